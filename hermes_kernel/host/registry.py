"""The registry for asyncio programs: a thin front over the kernels on the supervisor's loop."""

import asyncio
import os
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from ..cell.result import CellResult
from ..cell.variables import Variable
from ..lifecycle.info import KernelInfo
from ..lifecycle.key import Owner
from ..process.interpreter import resolve
from ..process.launch import Launcher
from ..process.local import LocalLauncher
from .cut import Cut
from .kernels import OwnedKernels
from .manager import HermesKernelManager
from .options import CallArguments, RegistryArguments, RegistryOptions
from .supervised import SupervisedLauncher
from .supervisor import Supervisor
from .transcript import SessionKeeper, Transcripts

T = TypeVar("T")

PROBE_TIMEOUT = 10.0  # seconds for an interpreter to say what it has


class RegistryBase:
    """What both fronts share: the options, the supervisor and the kernels on it."""

    def __init__(
        self,
        *,
        _launcher: Launcher | None = None,
        _keeper: SessionKeeper | None = None,
        **arguments: Unpack[RegistryArguments],
    ) -> None:
        self._options = RegistryOptions.of(arguments)
        self._supervisor = Supervisor("hermes-kernel-registry")
        limits = self._options.limits
        local = _launcher or LocalLauncher(spares=limits.spare_kernels, idle_timeout=limits.idle_timeout)
        self._launcher = launcher = SupervisedLauncher(self._supervisor, local)
        self._supervisor.submit(launcher.sweep())
        transcript = self._options.transcript
        keeper = _keeper or (None if transcript is None else Transcripts(transcript))
        self._kernels = OwnedKernels(self._supervisor, launcher, self._options, keeper)

    def __del__(self) -> None:
        supervisor = getattr(self, "_supervisor", None)  # absent if the arguments were refused
        if supervisor is not None and not supervisor.closed:
            warnings.warn(f"{type(self).__name__} was not closed", ResourceWarning, stacklevel=2)
            supervisor.abandon()


class KernelRegistry(RegistryBase):
    """Owners and their kernels, for asyncio. Safe from many tasks and loops.

    ::

        async with KernelRegistry() as registry:
            result = await registry.execute("6 * 7", owner="conversation-17")

    Keyword arguments: see ``RegistryArguments``. Raises ConfigError for one that cannot be.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def execute(
        self, code: str, *, owner: str | Owner = "", **arguments: Unpack[CallArguments]
    ) -> CellResult:
        """Run one cell on the owner's kernel and return its result, whatever the cell did.

        Cancelling the awaiting task interrupts the cell. Keyword arguments: see ``CallArguments``. Raises
        ConfigError (nothing was started) and KernelStartError.
        """
        call = self._options.call(code, owner, arguments, asyncio.get_running_loop())
        cut = Cut()
        try:
            return await self._await(self._kernels.execute(call, cut), cut)
        except BaseException as error:
            call.observed.end(error=error)
            raise

    async def check_python(self, python: str | os.PathLike[str] | None) -> None:
        """Raise InterpreterError if an interpreter cannot run a kernel; no kernel is started or ended."""
        await self._await(self._launcher.probe(resolve(python), timeout=PROBE_TIMEOUT))

    async def kernels(self) -> tuple[KernelInfo, ...]:
        """Describe the kernels that exist now."""
        return await self._await(_now(self._kernels.infos))

    async def manager(self, owner: str | Owner) -> HermesKernelManager | None:
        """Return the manager of the owner's kernel, None if it has none."""
        who = Owner.of(owner)
        return await self._await(_now(lambda: self._kernels.manager(who)))

    async def variables(self, owner: str | Owner) -> tuple[Variable, ...]:
        """Describe the variables of the owner's kernel, also while a cell runs; none if it has no kernel.

        No code of theirs is run for it. Raises HermesKernelError if the kernel does not answer in 5 s.
        """
        return await self._await(self._kernels.variables(Owner.of(owner), self._options.cleaner()))

    async def stats(self) -> dict[str, int]:
        """Count what has happened.

        ``kernels``, ``spares``, ``attached``: how many there are now; ``started`` and ``lost_<reason>``
        kernels; ``cells_<status>``, ``calls_not_run`` and those that ``reused`` a kernel; ``tool_calls`` and
        ``tool_refusals``; ``cut_bytes`` of output that results did not show.
        """
        return await self._await(_now(self._kernels.stats))

    async def close_owner(self, owner: str | Owner, *, children: bool = False) -> int:
        """End the owner's kernels with the cells that run on them; return how many there were.

        *children*: those of its delegated children too.
        """
        return await self.close_where(owned_by(Owner.of(owner), children=children))

    async def close_child(self, child: str) -> int:
        """End the kernels of a delegated child, whoever delegated to it; return how many there were."""
        return await self.close_where(delegated(child))

    async def close_where(self, predicate: Callable[[KernelInfo], bool]) -> int:
        """End the kernels that *predicate* picks with the cells that run on them; return how many.

        *predicate* is called on the registry's own thread.
        """
        return await self._await(self._kernels.close_where(predicate))

    async def close(self) -> None:
        """End every kernel and the supervisor; idempotent."""
        await self._supervisor.aclose()

    async def _await(self, work: Coroutine[Any, Any, T], cut: Cut | None = None) -> T:
        """Await work of the supervisor's. A cancelled caller stays until what it started has settled."""
        future = asyncio.wrap_future(self._supervisor.submit(work))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if cut is not None and not self._supervisor.closed:
                self._supervisor.call(cut.interrupt)
                await asyncio.wait([future])
            if future.done() and not future.cancelled():
                future.exception()  # looked at: the caller is told that it was cancelled
            raise


def owned_by(owner: Owner, *, children: bool) -> Callable[[KernelInfo], bool]:
    """Return a predicate that picks the kernels of *owner*."""
    if not children:
        return lambda info: info.owner == owner
    return lambda info: (
        replace(info.owner, child=owner.child) == owner if owner.child is None else info.owner == owner
    )


def delegated(child: str) -> Callable[[KernelInfo], bool]:
    """Return a predicate that picks the kernels of a delegated child."""
    return lambda info: bool(child) and info.owner.child == child


async def _now(function: Callable[[], T]) -> T:
    return function()
