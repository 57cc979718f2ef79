"""The registry for threads: each call blocks its thread, and no other."""

import concurrent.futures
import os
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from ..cell.result import CellResult
from ..cell.variables import Variable
from ..errors import HermesKernelError
from ..lifecycle.info import KernelInfo
from ..lifecycle.key import Owner
from ..process.interpreter import resolve
from .cut import Cut
from .manager import HermesKernelManager
from .options import CallArguments, check_function
from .registry import PROBE_TIMEOUT, RegistryBase, _now, delegated, owned_by

T = TypeVar("T")

INTERRUPT_POLL = 0.05  # seconds between two questions whether the caller wants the cell to end
SETTLE_TIMEOUT = 10.0  # seconds for an interrupted call to settle


class BlockingRegistry(RegistryBase):
    """Owners and their kernels, for threads. Safe from many of them.

    ::

        with BlockingRegistry() as registry:
            result = registry.execute("6 * 7", owner="conversation-17")

    Keyword arguments: see ``RegistryArguments``. Raises ConfigError for one that cannot be.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def execute(
        self,
        code: str,
        *,
        owner: str | Owner = "",
        interrupted: Callable[[], bool] | None = None,
        **arguments: Unpack[CallArguments],
    ) -> CellResult:
        """Run one cell on the owner's kernel and return its result, whatever the cell did.

        *interrupted* is asked on the calling thread, before anything is sent and then at least every 50 ms;
        once it is true the cell is ended. Other keyword arguments: see ``CallArguments``. Raises ConfigError
        (nothing was started) and KernelStartError. An exception that reaches the waiting thread
        (KeyboardInterrupt, one of *interrupted*) interrupts the cell and is passed on.
        """
        if interrupted is not None:
            check_function("interrupted", interrupted)
        call = self._options.call(code, owner, arguments)
        cut = Cut()
        try:
            if interrupted is not None and interrupted():
                cut.interrupt()
            return self._result(self._submit(self._kernels.execute(call, cut)), cut, interrupted)
        except BaseException as error:
            call.observed.end(error=error)
            raise

    def _result(
        self,
        future: "concurrent.futures.Future[CellResult]",
        cut: Cut,
        interrupted: Callable[[], bool] | None,
    ) -> CellResult:
        try:
            if interrupted is None:
                return future.result()
            while not concurrent.futures.wait([future], INTERRUPT_POLL).done:
                if cut.status is None and interrupted():
                    self._supervisor.call(cut.interrupt)
            return future.result()
        except BaseException:
            if not future.done():
                self._supervisor.call(cut.interrupt)
                concurrent.futures.wait([future], SETTLE_TIMEOUT)
            raise

    def check_python(self, python: str | os.PathLike[str] | None) -> None:
        """Raise InterpreterError if an interpreter cannot run a kernel; no kernel is started or ended."""
        self._submit(self._launcher.probe(resolve(python), timeout=PROBE_TIMEOUT)).result()

    def kernels(self) -> tuple[KernelInfo, ...]:
        """Describe the kernels that exist now."""
        return self._submit(_now(self._kernels.infos)).result()

    def manager(self, owner: str | Owner) -> HermesKernelManager | None:
        """Return the manager of the owner's kernel, None if it has none."""
        who = Owner.of(owner)
        return self._submit(_now(lambda: self._kernels.manager(who))).result()

    def variables(self, owner: str | Owner) -> tuple[Variable, ...]:
        """Describe the variables of the owner's kernel, also while a cell runs; none if it has no kernel.

        No code of theirs is run for it. Raises HermesKernelError if the kernel does not answer in 5 s.
        """
        return self._submit(self._kernels.variables(Owner.of(owner), self._options.cleaner())).result()

    def stats(self) -> dict[str, int]:
        """Count what has happened.

        ``kernels``, ``spares``, ``attached``: how many there are now; ``started`` and ``lost_<reason>``
        kernels; ``cells_<status>``, ``calls_not_run`` and those that ``reused`` a kernel; ``tool_calls`` and
        ``tool_refusals``; ``cut_bytes`` of output that results did not show.
        """
        return self._submit(_now(self._kernels.stats)).result()

    def close_owner(self, owner: str | Owner, *, children: bool = False) -> int:
        """End the owner's kernels with the cells that run on them; return how many there were.

        *children*: those of its delegated children too.
        """
        return self.close_where(owned_by(Owner.of(owner), children=children))

    def close_child(self, child: str) -> int:
        """End the kernels of a delegated child, whoever delegated to it; return how many there were."""
        return self.close_where(delegated(child))

    def close_where(self, predicate: Callable[[KernelInfo], bool]) -> int:
        """End the kernels that *predicate* picks with the cells that run on them; return how many.

        *predicate* is called on the registry's own thread.
        """
        return self._submit(self._kernels.close_where(predicate)).result()

    def close(self) -> None:
        """End every kernel and the supervisor; idempotent, from any thread."""
        self._supervisor.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        if self._supervisor.is_current:
            work.close()
            raise HermesKernelError("called from the registry's own thread, which would wait for itself")
        return self._supervisor.submit(work)
