"""Where kernels come from: the zygotes of one launcher, and the kernels that are kept ready."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import HermesKernelError
from .launchclass import LaunchClass, Program, ZygoteClass
from .staging import Staging, StagingError
from .tree import Seat
from .warden import WardenedTree, WardenGoneError
from .zygote import Zygote, bare_program

MAX_FORKING = 2  # zygotes that have a kernel in their memory
SPARE_DELAY = 0.1  # seconds after a launch, in which its first cell has the processors to itself
SPARE_TIMEOUT = 30.0  # seconds for a spare to be ready
SPARE_END_TIMEOUT = 5.0
LEAVE_TIMEOUT = 5.0  # seconds for the zygotes to be gone

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Spare:
    kind: LaunchClass
    seat: "NurserySeat"


@dataclass(frozen=True)
class NurserySeat(Seat):
    """A seat, and the process that it was forked of."""

    tree: WardenedTree
    zygote: Zygote
    retire: Callable[[Zygote], None]

    async def give_up(self, *, timeout: float) -> None:
        """End the tree and remove the directory; a zygote that has not answered may hang, and goes too."""
        if not self.tree.has_answer:
            self.retire(self.zygote)
        await self.hand_back(timeout=timeout)

    async def hand_back(self, *, timeout: float) -> None:
        """End the tree and remove the directory, as of a zygote that was given no time to answer."""
        await super().give_up(timeout=timeout)


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
        self._stopped: set[asyncio.Task[None]] = set()  # filling that has been cancelled and is not over
        self._leaving: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()  # trees that nobody wants any more
        self._release: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def spares(self) -> int:
        """How many kernels are ready."""
        return len(self._spares)

    async def seat(self, kind: LaunchClass, program: Program, kernel_id: str, *, binds: bool) -> Seat:
        """Return a tree of this kind: a spare if there is one, else a fork of the zygote."""
        self._stay()
        seat = self._take_spare(kind, kernel_id) if binds else None
        if seat is None:
            seat = await self._new_seat(kind, program, kernel_id, binds=binds)
        seat.tree.on_gone(self._plan_release)
        self._plan_spares(kind, program)
        return seat

    async def discard_spares(self) -> None:
        """End what is kept ready: a kernel of its class could not be used."""
        self._stop_filling()
        if self._stopped:
            await asyncio.wait(self._stopped)
        spares, self._spares = self._spares, []
        for spare in spares:
            self._end(spare.seat.give_up(timeout=SPARE_END_TIMEOUT))
        if self._ending:
            await asyncio.wait(self._ending)

    async def close(self) -> None:
        """End what is kept ready, and the zygotes when their kernels are gone."""
        self._closing = True
        self._stay()
        await self.discard_spares()
        for zygote in list(self._zygotes.values()):
            self._retire(zygote)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=LEAVE_TIMEOUT)

    async def _new_seat(
        self, kind: LaunchClass, program: Program, kernel_id: str, *, binds: bool, waits: bool = False
    ) -> "NurserySeat":
        """Fork a kernel that waits for its start. Raises WardenGoneError if there was nothing to fork of."""
        # First: it takes longest, and what is made after it is known to somebody who outlives this host.
        zygote = self._zygote(kind.zygote, program)
        staging = Staging.create(kernel_id, socket_dir=kind.socket_dir)
        terms = {
            "isolation": kind.isolation,
            "memory_limit": kind.memory_limit,
            "directory": str(staging.path),
            "place": str(staging.sockets) if binds else None,
            "waits": waits,
        }
        tree: WardenedTree | None = None
        try:
            try:
                tree = zygote.fork()
            except WardenGoneError:  # the zygote has ended, and nobody has noticed
                self._retire(zygote)
                raise
            await tree.prepare(terms, staging.remains)
        except BaseException:
            if tree is None:
                staging.lease.close()
                staging.remove()
            else:
                await asyncio.shield(self._end(Seat(tree, staging).give_up(timeout=SPARE_END_TIMEOUT)))
            raise
        return NurserySeat(tree, staging, zygote, self._retire)

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
        if zygote.is_leaving:
            return
        self._forget(zygote)
        self._in_background(zygote.leave())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        _keep(work, self._leaving)

    def _end(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """End a tree in a task of its own: whoever wants that may be cancelled before it is over."""
        return _keep(work, self._ending)

    def _take_spare(self, kind: LaunchClass, kernel_id: str) -> "NurserySeat | None":
        for spare in [spare for spare in self._spares if spare.kind == kind]:
            self._spares.remove(spare)
            try:
                staging = spare.seat.staging.rename(kernel_id)
            except StagingError as error:
                _log.info("a spare cannot be used: %s", error)
                self._end(spare.seat.give_up(timeout=SPARE_END_TIMEOUT))
                continue
            seat = replace(spare.seat, staging=staging)
            if not seat.tree.is_gone:
                return seat
            self._end(seat.give_up(timeout=SPARE_END_TIMEOUT))
        return None

    def _plan_spares(self, kind: LaunchClass, program: Program) -> None:
        if self._wanted_spares == 0 or not kind.zygote.forks or self._closing:
            return
        self._stop_filling()
        self._filling = asyncio.get_running_loop().create_task(self._fill(kind, program))

    def _stop_filling(self) -> None:
        """Cancel it once: whoever discards the spares waits for what it has begun."""
        filling, self._filling = self._filling, None
        if filling is not None and not filling.done():
            filling.cancel()
            self._stopped.add(filling)
            filling.add_done_callback(self._stopped.discard)

    async def _fill(self, kind: LaunchClass, program: Program) -> None:
        await asyncio.sleep(SPARE_DELAY)
        for old in [spare for spare in self._spares if spare.kind != kind]:
            self._spares.remove(old)
            await asyncio.shield(self._end(old.seat.give_up(timeout=SPARE_END_TIMEOUT)))
        while len(self._spares) < self._wanted_spares:
            try:
                seat = await self._new_seat(kind, program, uuid.uuid4().hex, binds=True, waits=True)
            except (OSError, HermesKernelError) as error:
                _log.info("no kernel can be kept ready: %s", error)
                return
            try:
                async with asyncio.timeout(SPARE_TIMEOUT):
                    await seat.tree.bound()
            except OSError as error:  # TimeoutError is one
                _log.info("no kernel can be kept ready: %s", error)
                await asyncio.shield(self._end(seat.give_up(timeout=SPARE_END_TIMEOUT)))
                return
            except BaseException:
                self._end(seat.hand_back(timeout=SPARE_END_TIMEOUT))
                raise
            spare = _Spare(kind, seat)
            self._spares.append(spare)
            seat.tree.on_gone(partial(self._on_end, spare))

    def _on_end(self, spare: _Spare) -> None:
        """A spare's process is gone: by itself, if it is still one."""
        if spare in self._spares:
            self._spares.remove(spare)
            self._end(spare.seat.give_up(timeout=SPARE_END_TIMEOUT))

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
        self._in_background(self._release_all())

    async def _release_all(self) -> None:
        await self.discard_spares()
        for zygote in list(self._zygotes.values()):
            self._retire(zygote)


def _keep(work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> "asyncio.Task[None]":
    """Do *work* in a task of its own, which is among *tasks* until it is over."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
