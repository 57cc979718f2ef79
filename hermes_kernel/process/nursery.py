"""Where kernels come from: the zygotes of one launcher, and the kernels that are kept ready."""

import asyncio
import logging
from dataclasses import dataclass

from .launchclass import LaunchClass, Program, ZygoteClass
from .tree import TreeSpec
from .warden import WardenedTree, WardenGoneError
from .zygote import Zygote, bare_program

MAX_FORKING = 2  # zygotes that have a kernel in their memory
SPARE_DELAY = 0.1  # seconds after a launch, in which its first cell has the processors to itself
SPARE_TIMEOUT = 30.0  # seconds for a spare to be ready
SPARE_END_TIMEOUT = 5.0
LEAVE_TIMEOUT = 5.0  # seconds for the zygotes to be gone

_log = logging.getLogger(__name__)


@dataclass
class _Spare:
    kind: LaunchClass
    tree: WardenedTree


class Nursery:
    """Makes process trees, on one event loop.

    ``spares``: how many kernels are kept ready of the class that was asked for last. ``idle_timeout``:
    seconds without a tree after which nothing is kept.
    """

    def __init__(self, *, spares: int = 0, idle_timeout: float = 1800.0) -> None:
        self._wanted_spares = spares
        self._idle_timeout = idle_timeout
        self._zygotes: dict[ZygoteClass, Zygote] = {}  # the one that was used last is the last
        self._spares: list[_Spare] = []
        self._filling: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._release: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def spares(self) -> int:
        """How many kernels are ready."""
        return len(self._spares)

    async def begin(self, spec: TreeSpec, kind: LaunchClass, program: Program, lease: int) -> WardenedTree:
        """Start a tree: a spare of this class, or a fork of its zygote. Raises OSError."""
        self._stay()
        tree = self._take_spare(kind)
        if tree is not None:
            try:
                await tree.start(spec, lease)
            except WardenGoneError:
                tree = None  # it has ended while it waited
        if tree is None:
            tree = await self._new_tree(kind, program)
            try:
                await tree.start(spec, lease)
            except BaseException:
                await tree.end(timeout=SPARE_END_TIMEOUT)
                raise
        tree.on_gone(self._plan_release)
        self._plan_spares(kind, program)
        return tree

    async def discard_spares(self) -> None:
        """End what is kept ready: a kernel of its class could not be used."""
        if self._filling is not None:
            self._filling.cancel()
        spares, self._spares = self._spares, []
        await asyncio.gather(*(spare.tree.end(timeout=SPARE_END_TIMEOUT) for spare in spares))

    async def close(self) -> None:
        """End what is kept ready, and the zygotes when their kernels are gone."""
        self._closing = True
        self._stay()
        await self.discard_spares()
        for zygote in list(self._zygotes.values()):
            self._retire(zygote)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVE_TIMEOUT)

    async def _new_tree(self, kind: LaunchClass, program: Program) -> WardenedTree:
        """Fork a kernel that waits for its start. A zygote that is gone is replaced, once."""
        tree: WardenedTree | None = None
        for attempt in (1, 2):
            zygote = self._zygote(kind.zygote, program)
            try:
                tree = zygote.fork()
                await tree.prepare(isolation=kind.isolation, memory_limit=kind.memory_limit)
                zygote.has_served = True
                return tree
            except (WardenGoneError, BrokenPipeError, ConnectionError) as error:
                if tree is not None:
                    await tree.end(timeout=SPARE_END_TIMEOUT)
                said = zygote.log_tail()
                self._retire(zygote)
                if attempt == 2:
                    raise WardenGoneError(error.errno, f"{error}\n{said}".strip()) from error
            except BaseException:
                if tree is not None:
                    await tree.end(timeout=SPARE_END_TIMEOUT)
                if not zygote.has_served:  # it may hang in what it loads
                    self._retire(zygote)
                raise
        raise AssertionError("unreachable")

    def _zygote(self, kind: ZygoteClass, program: Program) -> Zygote:
        zygote = self._zygotes.pop(kind, None)
        if zygote is None or zygote.is_gone:
            zygote = Zygote(kind, program if kind.forks else bare_program())
            zygote.ended.add_done_callback(lambda _: self._forget(zygote))
        self._zygotes[kind] = zygote
        forking = [known for known in self._zygotes.values() if known.kind.forks]
        for old in forking[:-MAX_FORKING]:
            self._retire(old)
        return zygote

    def _forget(self, zygote: Zygote) -> None:
        if self._zygotes.get(zygote.kind) is zygote:
            del self._zygotes[zygote.kind]

    def _retire(self, zygote: Zygote) -> None:
        """Take no more kernels of it; it ends with the last that it has."""
        self._forget(zygote)
        task = asyncio.get_running_loop().create_task(zygote.leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _take_spare(self, kind: LaunchClass) -> WardenedTree | None:
        for spare in list(self._spares):
            if spare.tree.is_gone or spare.kind == kind:
                self._spares.remove(spare)
            if spare.kind == kind and not spare.tree.is_gone:
                return spare.tree
        return None

    def _plan_spares(self, kind: LaunchClass, program: Program) -> None:
        if self._wanted_spares == 0 or not kind.zygote.forks or self._closing:
            return
        if self._filling is not None:
            self._filling.cancel()
        self._filling = asyncio.get_running_loop().create_task(self._fill(kind, program))

    async def _fill(self, kind: LaunchClass, program: Program) -> None:
        await asyncio.sleep(SPARE_DELAY)
        for old in [spare for spare in self._spares if spare.kind != kind]:
            self._spares.remove(old)
            await old.tree.end(timeout=SPARE_END_TIMEOUT)
        try:
            while len(self._spares) < self._wanted_spares:
                async with asyncio.timeout(SPARE_TIMEOUT):
                    tree = await self._new_tree(kind, program)
                self._spares.append(_Spare(kind, tree))
        except (OSError, TimeoutError) as error:
            _log.info("no kernel can be kept ready: %s", error)

    def _stay(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None

    def _plan_release(self) -> None:
        """Once nothing has been used for as long as a kernel may be idle, keep nothing."""
        used = sum(len(zygote.trees) for zygote in self._zygotes.values()) - len(self._spares)
        if used <= 0 and not self._closing:
            self._stay()
            self._release = asyncio.get_running_loop().call_later(self._idle_timeout, self._release_now)

    def _release_now(self) -> None:
        task = asyncio.get_running_loop().create_task(self._release_all())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _release_all(self) -> None:
        await self.discard_spares()
        for zygote in list(self._zygotes.values()):
            self._retire(zygote)
