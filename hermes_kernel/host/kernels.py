"""The kernels of one registry, on the supervisor's loop: who has one, whose turn it is, what became of it."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cell.execution import Settlement, cut_before_run
from ..cell.outputs import OutputCollector
from ..cell.result import CellResult, KernelReport, cell_result
from ..cell.status import CellStatus, Fate, Phase
from ..errors import HermesKernelError, KernelStartError
from ..lifecycle.info import KernelInfo, KernelState
from ..lifecycle.key import KernelKey, Owner
from ..lifecycle.loss import Loss, LossLedger
from ..process.launch import Launcher
from .bridge import NoTools
from .cut import Cut
from .manager import HermesKernelManager
from .options import Call, RegistryOptions
from .queue import CellQueue, Turn
from .session import CellOutcome, KernelGoneError, KernelSession
from .supervisor import Supervisor

MAX_ATTEMPTS = 5
"""How many kernels may end under a call that waits for them before it gives up."""

_LOSS_OF = {
    CellStatus.TIMED_OUT: Loss.TIMED_OUT,
    CellStatus.INTERRUPTED: Loss.INTERRUPTED,
    CellStatus.EXITED: Loss.EXITED,
}
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OwnedKernel:
    """One kernel of one owner, from the claim that made it until it is gone."""

    key: KernelKey
    kernel_id: str
    manager: HermesKernelManager
    started: float
    last_used: float
    queue: CellQueue = field(default_factory=CellQueue)
    session: KernelSession | None = None
    running: Cut | None = None
    attached: int = 0
    ended: bool = False


class OwnedKernels:
    """Finds or starts the kernel of a call, runs its cell there, and drops what has ended."""

    def __init__(self, supervisor: Supervisor, launcher: Launcher, options: RegistryOptions) -> None:
        self._supervisor = supervisor
        self._launcher = launcher
        self._options = options
        self._kernels: dict[KernelKey, OwnedKernel] = {}
        self._ledger = LossLedger()
        self._endings: set[asyncio.Task[None]] = set()
        supervisor.on_close(self.close)

    async def execute(self, call: Call, cut: Cut) -> CellResult:
        """Run one cell on its owner's kernel; a kernel that ends under waiting calls is replaced.

        Raises ConfigError and KernelStartError; then nothing is left of what was started.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        wait = call.request.times.queue_timeout
        deadline = math.inf if wait is None else began + wait
        for _ in range(MAX_ATTEMPTS):
            if cut.status is not None:
                return self._not_run(call, cut.status, Phase.QUEUED, None, loop.time() - began)
            kernel = self._claim(call)
            kernel.attached += 1
            try:
                turn = await kernel.queue.enter(cut, deadline)
                if turn is Turn.KERNEL_GONE:
                    continue
                if isinstance(turn, CellStatus):
                    return self._not_run(call, turn, Phase.QUEUED, kernel, loop.time() - began)
                try:
                    return await self._run(call, cut, kernel, began)
                except KernelGoneError:
                    await self._end(kernel, Loss.DIED)
                finally:
                    kernel.queue.leave()
            finally:
                kernel.attached -= 1
                kernel.last_used = time.time()
        raise KernelStartError(f"the kernel ended {MAX_ATTEMPTS} times before the code could be run; not run")

    def infos(self) -> tuple[KernelInfo, ...]:
        """Describe the kernels that exist now."""
        return tuple(_info(kernel) for kernel in self._kernels.values())

    def manager(self, owner: Owner) -> HermesKernelManager | None:
        """Return the manager of the kernel that the owner used last, None if it has none."""
        mine = [kernel for kernel in self._kernels.values() if kernel.key.owner == owner]
        return max(mine, key=lambda kernel: kernel.last_used).manager if mine else None

    async def close_where(self, predicate: Callable[[KernelInfo], bool]) -> int:
        """End the kernels that *predicate* picks, with the cells that run on them; return how many."""
        chosen = [kernel for kernel in self._kernels.values() if predicate(_info(kernel))]
        await asyncio.gather(*(self._end(kernel, Loss.CLOSED) for kernel in chosen))
        return len(chosen)

    async def close(self) -> None:
        """End every kernel."""
        await self.close_where(lambda _: True)
        await asyncio.gather(*self._endings, return_exceptions=True)

    def _claim(self, call: Call) -> OwnedKernel:
        kernel = self._kernels.get(call.key)
        if kernel is not None:
            return kernel
        kernel_id = uuid.uuid4().hex
        now = time.time()
        manager = HermesKernelManager(
            kernel_id=kernel_id,
            python=call.key.python,
            launcher=self._launcher,
            env_policy=call.env_policy,
            allow_magics=self._options.allow_magics,
            socket_dir=self._options.socket_dir,
            private_cwd=True,
        )
        kernel = self._kernels[call.key] = OwnedKernel(call.key, kernel_id, manager, now, now)
        return kernel

    async def _run(self, call: Call, cut: Cut, kernel: OwnedKernel, began: float) -> CellResult:
        """Run the call's cell; it has the turn."""
        loop = asyncio.get_running_loop()
        kernel.running = cut
        try:
            reused = kernel.session is not None
            session = kernel.session or await self._start(call, cut, kernel)
            if isinstance(session, CellStatus):
                await self._end(kernel, None)
                return self._not_run(call, session, Phase.STARTING, None, loop.time() - began)
            if session.has_ended:
                raise KernelGoneError(f"kernel {kernel.kernel_id} has ended")
            lost = self._ledger.tell(call.key)
            outcome = await session.run(call.request, cut)
        finally:
            kernel.running = None
        settlement = outcome.settlement
        ended = settlement.fate is Fate.END or kernel.ended
        if settlement.fate is Fate.END:
            await self._end(kernel, _LOSS_OF.get(settlement.status, Loss.DIED))
        report = KernelReport(
            kernel.kernel_id,
            reused=reused,
            lost=lost,
            ended=ended,
            foreign_cells=session.foreign_cells,
            degraded=session.degraded,
        )
        return _result(call, outcome, report, loop.time() - began, session.execution_count)

    async def _start(self, call: Call, cut: Cut, kernel: OwnedKernel) -> KernelSession | CellStatus:
        """Start the process and wait until it answers; TIMED_OUT or INTERRUPTED if the caller cut it."""
        loop = asyncio.get_running_loop()
        start_timeout = call.request.times.start_timeout
        deadline = loop.time() + start_timeout
        kernel.manager.start_timeout = start_timeout
        session = None
        try:
            await kernel.manager.start_kernel(cwd=call.key.cwd, env=dict(call.env))
            launched = kernel.manager.launched
            if launched is None:
                raise KernelStartError("the kernel's manager was shut down while it started")
            session = KernelSession(self._supervisor, self._launcher, launched, NoTools())
            kernel.session = session
            status = await session.ready(deadline, cut)
            if status is None and self._options.bootstrap is not None:
                status = await session.bootstrap(self._options.bootstrap, deadline, cut)
        except BaseException:
            await self._end(kernel, None)
            raise
        session.on_end(lambda: self._on_end(kernel))
        return session if status is None else status

    def _on_end(self, kernel: OwnedKernel) -> None:
        """The kernel process is gone. A running cell notices by itself; without one nobody else would."""
        if kernel.running is None and not kernel.ended:
            ending = asyncio.get_running_loop().create_task(self._end(kernel, Loss.DIED))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end(self, kernel: OwnedKernel, loss: Loss | None) -> None:
        """Take the kernel out of service and end it; callers that wait for it go elsewhere."""
        if kernel.ended:
            return
        kernel.ended = True
        if self._kernels.get(kernel.key) is kernel:
            del self._kernels[kernel.key]
        if loss is not None:
            self._ledger.record(kernel.key, loss)
        if kernel.running is not None:
            kernel.running.interrupt()
        try:
            if kernel.session is not None:
                await kernel.session.close()
            await kernel.manager.cleanup_resources()
        except HermesKernelError:
            _log.exception("ending kernel %s", kernel.kernel_id)
        finally:
            kernel.queue.close()

    def _not_run(
        self, call: Call, status: CellStatus, phase: Phase, kernel: OwnedKernel | None, duration: float
    ) -> CellResult:
        """The result of a call that ended before its code was sent; *kernel*: the one it waited for."""
        session = None if kernel is None else kernel.session
        outcome = CellOutcome(cut_before_run(status, phase), OutputCollector())
        report = KernelReport("" if kernel is None else kernel.kernel_id, reused=session is not None)
        return _result(call, outcome, report, duration, 0 if session is None else session.execution_count)


def _result(
    call: Call, outcome: CellOutcome, report: KernelReport, duration: float, execution_count: int
) -> CellResult:
    settlement: Settlement = outcome.settlement
    ended = outcome.exit
    return cell_result(
        settlement,
        outcome.outputs,
        times=call.request.times,
        report=report,
        duration=duration,
        execution_count=execution_count,
        signal=None if ended is None else ended.signal,
        lost_bytes=outcome.lost_bytes,
    )


def _info(kernel: OwnedKernel) -> KernelInfo:
    launched = kernel.manager.launched
    session = kernel.session
    if kernel.ended:
        state = KernelState.CLOSING
    elif session is None or not session.is_ready:
        state = KernelState.STARTING
    else:
        state = KernelState.IDLE if kernel.running is None else KernelState.BUSY
    return KernelInfo(
        owner=kernel.key.owner,
        kernel_id=kernel.kernel_id,
        pid=None if launched is None else launched.pid,
        state=state,
        started=kernel.started,
        last_used=kernel.last_used,
        execution_count=0 if session is None else session.execution_count,
        connection_file=None if launched is None else launched.connection_file,
        python=kernel.key.python,
        cwd=kernel.key.cwd,
        attached=kernel.attached,
        degraded=None if session is None else session.degraded,
    )
