"""The kernels of one registry, on the supervisor's loop: who has one, whose turn it is, what became of it."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import zmq

from ..cell.execution import cut_before_run
from ..cell.message import MalformedMessage
from ..cell.outputs import OutputCollector
from ..cell.result import CellResult, KernelReport
from ..cell.shown import Cleaner
from ..cell.status import CellStatus, Fate, Phase
from ..cell.variables import Variable
from ..errors import HermesKernelError, KernelStartError
from ..lifecycle.info import KernelInfo, KernelState
from ..lifecycle.key import Owner
from ..lifecycle.loss import Loss
from ..lifecycle.population import KernelPopulation, KernelRecord
from ..process.environment import EnvPolicy
from ..process.launch import Launched, Launcher, LaunchSpec, ProcessLimits
from ..process.published import publish_dir
from .bridge import KernelBridge
from .cut import Cut
from .identity import KernelIdentity, kernel_options
from .manager import HermesKernelManager
from .options import Call, RegistryOptions, check_function
from .queue import CellQueue, Turn
from .results import Results
from .session import END_TIMEOUT, CellOutcome, KernelGoneError, KernelSession
from .supervisor import Supervisor
from .transcript import SessionKeeper
from .variables import NO_ANSWER

MAX_ATTEMPTS = 5
"""How many kernels may end under a call that waits for them before it gives up."""

TEAR_DOWN_WAIT = 1.0  # seconds that a result waits for its kernel to be gone
START_MARGIN = 1.0  # seconds beyond the start's own bound until its launcher counts as silent
VARIABLES_TIMEOUT = 5.0  # seconds for a kernel to tell its variables
SETTLE_TIMEOUT = 10.0  # seconds for the calls of a registry that closes to have their results

WAITS_FOR_ITSELF = (
    "a tool of the cell that runs on this kernel has called execute for the same kernel, and would wait for "
    "itself; give another owner. Not run"
)

_LOSS_OF = {
    CellStatus.TIMED_OUT: Loss.TIMED_OUT,
    CellStatus.INTERRUPTED: Loss.INTERRUPTED,
    CellStatus.EXITED: Loss.EXITED,
}
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OwnedKernel:
    """One kernel of one owner, from the claim that made it until it is gone."""

    record: KernelRecord
    identity: KernelIdentity
    started: float
    last_used: float
    cleaner: Cleaner
    env_policy: EnvPolicy
    queue: CellQueue = field(default_factory=CellQueue)
    launched: Launched | None = None
    manager: HermesKernelManager | None = None
    session: KernelSession | None = None
    starting: "asyncio.Task[KernelSession] | None" = None
    running: Cut | None = None
    at_rest: asyncio.Event = field(default_factory=asyncio.Event)
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    ending: "asyncio.Task[None] | None" = None

    @property
    def kernel_id(self) -> str:
        """The kernel's name, also of its directory."""
        return self.identity.kernel_id

    def begin(self, cut: Cut) -> None:
        """A call has the turn."""
        self.running = cut
        self.at_rest.clear()

    def finish(self) -> None:
        """The call is over, whatever it did."""
        self.running = None
        self.at_rest.set()


class OwnedKernels:
    """Finds or starts the kernel of a call, runs its cell there, and ends what must go."""

    def __init__(
        self,
        supervisor: Supervisor,
        launcher: Launcher,
        options: RegistryOptions,
        keeper: SessionKeeper | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._launcher = launcher
        self._options = options
        limits = options.limits
        self._population = KernelPopulation(limits.max_kernels, limits.idle_timeout)
        self._kernels: dict[KernelRecord, OwnedKernel] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._next_sweep: asyncio.TimerHandle | None = None
        self._closing = False
        self._results = Results(limits)
        self._keeper = keeper
        self._counts: Counter[str] = Counter()
        supervisor.on_close(self.close)

    async def execute(self, call: Call, cut: Cut) -> CellResult:
        """Run one cell on its owner's kernel; a kernel that ends under waiting calls is replaced.

        Raises ConfigError and KernelStartError; then nothing is left of what was started.
        """
        task = asyncio.current_task()
        if task is not None:
            self._calls.add(task)
        if self._keeper is not None and self._keeper.record_tools and call.tools is not None:
            call = replace(call, tools=replace(call.tools, record=True))
        try:
            result = await self._execute(call, cut)
        except BaseException as error:
            if isinstance(error, KernelStartError):
                await self._results.mask(error, call.cleaner)
            call.observed.end(error=error)
            raise
        finally:
            if call.events is not None:
                await call.events.close()
            if task is not None:
                self._calls.discard(task)
        self._counts[f"cells_{result.status.value}" if result.ran else "calls_not_run"] += 1
        self._counts["reused"] += result.ran and result.kernel.reused
        self._counts["tool_calls"] += result.calls_made
        self._counts["cut_bytes"] += result.truncation.bytes_total - result.truncation.bytes_shown
        call.observed.end(result)
        return result

    def infos(self) -> tuple[KernelInfo, ...]:
        """Describe the kernels that exist now."""
        return tuple(self._info(kernel) for kernel in self._kernels.values())

    def stats(self) -> dict[str, int]:
        """Count what has happened, see ``KernelRegistry.stats``."""
        kernels = list(self._kernels.values())
        return {
            "kernels": len(kernels),
            "spares": self._launcher.spares,
            "attached": sum(kernel.record.attached for kernel in kernels),
            "started": 0,
            "reused": 0,
            "tool_calls": 0,
            "tool_refusals": 0,
            "cut_bytes": 0,
            **{f"cells_{status.value}": 0 for status in CellStatus},
            "calls_not_run": 0,
            **{f"lost_{loss.value}": self._population.losses[loss] for loss in Loss},
            **self._counts,
        }

    def manager(self, owner: Owner) -> HermesKernelManager | None:
        """Return the manager of the kernel that the owner used last, None if it has none."""
        kernel = self._last_used(owner)
        if kernel is not None and kernel.manager is None:
            kernel.manager = HermesKernelManager.of_registry(
                kernel.identity,
                self._launcher,
                python=kernel.record.key.python,
                env_policy=kernel.env_policy,
                allow_magics=self._options.allow_magics,
                socket_dir=self._options.socket_dir,
                expose=self._options.expose,
            )
            if kernel.launched is not None:
                kernel.manager.adopt(kernel.launched)
        return None if kernel is None else kernel.manager

    async def variables(self, owner: Owner, cleaner: Cleaner) -> tuple[Variable, ...]:
        """Return the variables of the kernel that the owner used last, none if it has no kernel."""
        kernel = self._last_used(owner)
        if kernel is None or kernel.session is None or kernel.starting is not None:
            return ()
        try:
            told = await kernel.session.variables(VARIABLES_TIMEOUT)
            return await self._results.variables(told, cleaner)
        except KernelGoneError:
            return ()
        except TimeoutError as error:
            raise HermesKernelError(NO_ANSWER.format(VARIABLES_TIMEOUT)) from error
        except MalformedMessage as error:
            raise HermesKernelError(f"the kernel's answer is no list of variables: {error}") from error

    async def close_where(self, predicate: Callable[[KernelInfo], bool]) -> int:
        """End the kernels that *predicate* picks, with the cells that run on them; return how many.

        One that is being ended already is waited for, and not counted. Raises ConfigError for what cannot be
        called, or is async.
        """
        check_function("predicate", predicate)
        chosen = [kernel for kernel in self._kernels.values() if predicate(self._info(kernel))]
        number = sum(kernel.ending is None for kernel in chosen)
        await asyncio.gather(*(self._end(kernel, Loss.CLOSED) for kernel in chosen))
        return number

    async def close(self) -> None:
        """End every kernel; calls that run or wait have their results first."""
        self._closing = True
        if self._next_sweep is not None:
            self._next_sweep.cancel()
        await self.close_where(lambda _: True)
        if calls := self._calls - {asyncio.current_task()}:
            await asyncio.wait(calls, timeout=SETTLE_TIMEOUT)
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._keeper is not None:
            await self._keeper.close()
        await self._options.handlers.close()

    async def _execute(self, call: Call, cut: Cut) -> CellResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        times = call.request.times
        queue_deadline = math.inf if times.queue_timeout is None else began + times.queue_timeout
        start_budget = times.start_timeout
        reset = call.reset
        session: KernelSession | None = None
        for _ in range(MAX_ATTEMPTS):
            status = cut.status or (CellStatus.INTERRUPTED if self._closing else None)
            if status is not None:
                return await self._not_run(call, status, Phase.QUEUED, None, loop.time() - began)
            kernel = self._claim(call, reset=reset)
            reset = False
            reused = kernel.session is not None and kernel.starting is None
            try:
                if kernel.kernel_id in call.serving and kernel.running is not None:
                    raise HermesKernelError(WAITS_FOR_ITSELF)
                turn = await kernel.queue.enter(cut, queue_deadline)
                if turn is Turn.KERNEL_GONE:
                    continue
                if isinstance(turn, CellStatus):
                    return await self._not_run(call, turn, Phase.QUEUED, kernel, loop.time() - began)
                try:
                    if kernel.ending is not None:  # the turn came just before the end
                        continue
                    kernel.begin(cut)
                    starts = loop.time()
                    session = kernel.session
                    if session is None:
                        started = await self._start(call, cut, kernel, start_budget)
                        start_budget -= loop.time() - starts
                        if isinstance(started, CellStatus):
                            return await self._not_run(
                                call, started, Phase.STARTING, None, loop.time() - began
                            )
                        session = started
                    outcome, lost = await self._run(call, cut, kernel.record, session, queue_deadline)
                    if isinstance(outcome, CellStatus):
                        return await self._not_run(call, outcome, Phase.QUEUED, kernel, loop.time() - began)
                    took = loop.time() - began
                    return await self._settled(call, kernel, session, outcome, lost, took, reused=reused)
                except KernelGoneError:
                    kernel.finish()
                    await self._end(kernel, Loss.DIED)
                finally:
                    kernel.finish()
                    if kernel.session is not None and kernel.session.has_ended:
                        self._on_end(kernel)  # it ended while the result was made
                    kernel.queue.leave()
            finally:
                self._release(kernel)
        what = (
            f"the kernel ended {MAX_ATTEMPTS} times before the code could be run; it was not run. "
            "Look at what its bootstrap code and its interpreter do at the start"
        )
        raise KernelStartError(what) if session is None else session.start_error(what)

    async def _run(
        self, call: Call, cut: Cut, record: KernelRecord, session: KernelSession, queue_deadline: float
    ) -> tuple[CellOutcome | CellStatus, Loss | None]:
        """Run the cell, and find what it is to be told; a cell that does not run leaves that for the next."""
        ledger = self._population.ledger
        if self._population.serves(record):
            telling = ledger.say(call.key, record)
            loss = telling.loss
        else:
            telling = ledger.say_retired(call.key, record)
            loss = None if record.has_state else telling.loss
        ran = False
        try:
            outcome = await session.run(
                call.request, cut, queue_deadline, tools=call.tools, events=call.events
            )
            ran = isinstance(outcome, CellOutcome)
            record.has_state = record.has_state or ran
        finally:
            if not ran:
                ledger.unsay(telling)
        return outcome, loss

    async def _settled(
        self,
        call: Call,
        kernel: OwnedKernel,
        session: KernelSession,
        outcome: CellOutcome,
        lost: Loss | None,
        duration: float,
        *,
        reused: bool,
    ) -> CellResult:
        """The cell has run: end its kernel if that is its fate, and build its result."""
        ended = outcome.settlement.fate is Fate.END
        if ended:
            kernel.finish()
            self._population.close(kernel.record, _LOSS_OF.get(outcome.settlement.status, Loss.DIED))
            # A node that does not answer must not keep the result.
            await asyncio.wait({self._tear_down(kernel)}, timeout=TEAR_DOWN_WAIT)
        self._counts["tool_refusals"] += outcome.refusals
        report = KernelReport(
            kernel.kernel_id,
            reused=reused,
            lost=lost,
            ended=ended,
            leftovers=() if ended else outcome.leftovers,
            foreign_cells=session.foreign.take_count(),
            degraded=session.degraded,
        )
        late = session.take_late_outputs()
        result = await self._results.built(
            call, outcome, report, duration=duration, execution_count=session.execution_count, late=late
        )
        return await self._kept(call, result, outcome, kernel)

    def _claim(self, call: Call, *, reset: bool) -> OwnedKernel:
        now = asyncio.get_running_loop().time()
        claim = self._population.claim(call.key, now, reset=reset, pinned=call.pinned)
        if claim.is_new:
            began = time.time()
            self._kernels[claim.record] = OwnedKernel(
                claim.record, KernelIdentity(), began, began, call.cleaner, call.env_policy
            )
        self._tear_down_soon(claim.doomed)
        kernel = self._kernels[claim.record]
        kernel.last_used = time.time()
        kernel.cleaner = call.cleaner
        return kernel

    def _release(self, kernel: OwnedKernel) -> None:
        kernel.last_used = time.time()
        now = asyncio.get_running_loop().time()
        self._tear_down_soon(self._population.release(kernel.record, now))
        self._plan_sweep()

    async def _start(
        self, call: Call, cut: Cut, kernel: OwnedKernel, timeout: float
    ) -> KernelSession | CellStatus:
        """Bring the kernel up; INTERRUPTED if the caller cuts its call or the kernel is closed first."""
        loop = asyncio.get_running_loop()
        self._counts["started"] += 1
        starting = kernel.starting = loop.create_task(self._bring_up(call, kernel, loop.time() + timeout))
        cutting = asyncio.Event()
        cut.on_change(cutting.set)
        waiting = loop.create_task(cutting.wait())
        try:
            await asyncio.wait(
                {starting, waiting}, timeout=timeout + START_MARGIN, return_when=asyncio.FIRST_COMPLETED
            )
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                return starting.result()
        finally:
            cut.on_change(None)
            waiting.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
            kernel.starting = None
        closed = kernel.ending is not None
        kernel.finish()
        self._population.close(kernel.record, None)
        await asyncio.wait({self._tear_down(kernel)}, timeout=TEAR_DOWN_WAIT)
        if not starting.cancelled():
            return starting.result()
        if cut.status is None and not closed:
            raise KernelStartError("the kernel's node did not answer in time; is it reachable?")
        return cut.status or CellStatus.INTERRUPTED

    async def _bring_up(self, call: Call, kernel: OwnedKernel, deadline: float) -> KernelSession:
        loop = asyncio.get_running_loop()
        try:
            spec = self._launch_spec(call, kernel.identity, timeout=max(deadline - loop.time(), 0.001))
            launched = kernel.launched = await self._launcher.launch(spec)
        except HermesKernelError:
            raise
        except (
            Exception
        ) as error:  # a launcher may be anybody's: the caller is told in our words, with its own
            raise KernelStartError(f"the kernel did not start: {error}") from error
        if kernel.manager is not None:
            kernel.manager.adopt(launched)
        bridge = KernelBridge(
            self._supervisor,
            launched.bridge,
            token=kernel.identity.bridge_token,
            kernel_id=kernel.kernel_id,
            owner=call.key.owner,
        )
        try:
            session = kernel.session = KernelSession(
                self._supervisor,
                self._launcher,
                launched,
                bridge,
                owner_secret=kernel.identity.owner_secret,
                keeps_foreign=self._keeper is not None,
            )
        except zmq.ZMQError as error:  # no descriptors left, for one
            raise KernelStartError(f"the sockets to the kernel cannot be made: {error}") from error
        session.on_end(lambda: self._on_end(kernel))
        session.foreign.on_change(partial(self._on_foreign_change, kernel, session))
        await session.ready(deadline)
        if self._options.bootstrap is not None:
            await session.bootstrap(self._options.bootstrap, deadline)
        return session

    def _launch_spec(self, call: Call, identity: KernelIdentity, *, timeout: float) -> LaunchSpec:
        options, limits = self._options, self._options.limits
        return LaunchSpec(
            kernel_id=identity.kernel_id,
            python=call.key.python,
            session_key=identity.session_key,
            cwd=call.key.cwd,
            env=call.env,
            env_policy=call.env_policy,
            options=kernel_options(
                owner_secret=identity.owner_secret,
                bridge_token=identity.bridge_token,
                allow_magics=options.allow_magics,
            ),
            socket_dir=options.socket_dir,
            label={"owner": asdict(call.key.owner)},
            publish_dir=str(publish_dir()) if options.expose else None,
            process=ProcessLimits(
                limits.start_method, limits.isolation, limits.require_isolation, limits.memory_limit
            ),
            timeout=timeout,
        )

    def _on_end(self, kernel: OwnedKernel) -> None:
        """The kernel process is gone. A running cell notices by itself; without one nobody else would."""
        if kernel.running is None and kernel.ending is None:
            task = asyncio.get_running_loop().create_task(self._end(kernel, Loss.DIED))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    def _on_foreign_change(self, kernel: OwnedKernel, session: KernelSession) -> None:
        """A person's cell begins or is over."""
        if self._options.expose:  # elsewhere nobody is expected, and a cell may say anything
            now = asyncio.get_running_loop().time()
            is_visited = session.foreign.are_running
            self._tear_down_soon(self._population.visit(kernel.record, now, is_visited=is_visited))
            self._plan_sweep()
        self._keep_foreign_soon(kernel)

    def _keep_foreign_soon(self, kernel: OwnedKernel) -> None:
        """Keep a person's cell that is over, or with a cell of the owner's that runs after that one."""
        if self._keeper is None:
            return
        if kernel.running is None and kernel.ending is None:
            task = asyncio.get_running_loop().create_task(self._keep_foreign_now(kernel))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    async def _end(self, kernel: OwnedKernel, loss: Loss | None) -> None:
        """Take the kernel out of service, for a reason that its owner is told, and wait until it is gone."""
        self._population.close(kernel.record, loss)
        await asyncio.shield(self._tear_down(kernel))

    def _tear_down_soon(self, doomed: Iterable[KernelRecord]) -> None:
        for record in doomed:
            self._tear_down(self._kernels[record])

    def _tear_down(self, kernel: OwnedKernel) -> "asyncio.Task[None]":
        """End the kernel, once; the task is done when nothing of it is left."""
        if kernel.ending is None:
            kernel.ending = asyncio.get_running_loop().create_task(self._tear_down_now(kernel))
            self._endings.add(kernel.ending)
            kernel.ending.add_done_callback(self._endings.discard)
        return kernel.ending

    async def _tear_down_now(self, kernel: OwnedKernel) -> None:
        kernel.queue.close()
        try:
            if kernel.running is not None:
                kernel.running.interrupt()
            if kernel.session is not None:
                await kernel.session.kill()
            if kernel.running is not None:
                await kernel.at_rest.wait()  # its caller is told how far the cell came
            if kernel.session is not None:
                await kernel.session.close()
                await self._keep_foreign_now(kernel, every=True)
            elif kernel.launched is not None:  # and its sockets could not be made
                await self._launcher.end(kernel.launched.handle, timeout=END_TIMEOUT)
            if kernel.manager is not None:
                kernel.manager.release()
        except Exception:  # noqa: BLE001  # the edge of a task: the rest of the registry must go on
            _log.exception("ending kernel %s", kernel.kernel_id)
        finally:
            self._kernels.pop(kernel.record, None)

    def _last_used(self, owner: Owner) -> OwnedKernel | None:
        mine = [kernel for kernel in self._kernels.values() if kernel.record.key.owner == owner]
        return max(mine, key=lambda kernel: kernel.last_used, default=None)

    def _plan_sweep(self) -> None:
        """Have the idle kernels ended when it is time, without any traffic."""
        if self._next_sweep is not None:
            self._next_sweep.cancel()
            self._next_sweep = None
        due = self._population.next_sweep()
        if not self._closing and not math.isinf(due):
            self._next_sweep = asyncio.get_running_loop().call_at(due, self._sweep)

    def _sweep(self) -> None:
        self._tear_down_soon(self._population.sweep(asyncio.get_running_loop().time()))
        self._plan_sweep()

    async def _not_run(
        self, call: Call, status: CellStatus, phase: Phase, kernel: OwnedKernel | None, duration: float
    ) -> CellResult:
        """The result of a call that ended before its code was sent; *kernel*: the one it waited for."""
        session = None if kernel is None else kernel.session
        outcome = CellOutcome(cut_before_run(status, phase), OutputCollector())
        report = KernelReport("" if kernel is None else kernel.kernel_id, reused=session is not None)
        count = 0 if session is None else session.execution_count
        result = await self._results.built(call, outcome, report, duration=duration, execution_count=count)
        return await self._kept(call, result, outcome, kernel)

    async def _kept(
        self, call: Call, result: CellResult, outcome: CellOutcome, kernel: OwnedKernel | None
    ) -> CellResult:
        """Keep the cell in the session's transcript, if there is one; the result says if that failed."""
        if self._keeper is None:
            return result
        try:
            cell, tools = await self._results.ran_cell(call, result, outcome)
            if kernel is None:
                self._keeper.add(cell, tools)
            else:
                async with kernel.keeping:
                    await self._keep_foreign(kernel, before=result.execution_count if result.ran else None)
                    self._keeper.add(cell, tools)
            problem = await self._keeper.written(call.key.owner)
        except Exception as error:  # noqa: BLE001  # the cell has run: its result is not lost for a record
            _log.exception("keeping a cell of %s", call.key.owner)
            problem = f"The transcript does not have this cell: {error}."
        if problem is None:
            return result
        return replace(result, warning=" ".join(filter(None, (result.warning, problem))))

    async def _keep_foreign_now(self, kernel: OwnedKernel, *, every: bool = False) -> None:
        """Keep and write what other clients have run on a kernel."""
        if self._keeper is None:
            return
        async with kernel.keeping:
            kept = await self._keep_foreign(kernel, every=every)
        if kept:
            await self._keeper.written(kernel.record.key.owner)

    async def _keep_foreign(
        self, kernel: OwnedKernel, *, before: int | None = None, every: bool = False
    ) -> bool:
        """Keep what other clients have run on a kernel; return whether there was something."""
        if self._keeper is None or kernel.session is None:
            return False
        kept = kernel.session.foreign.take_ended(before=before, every=every)
        for foreign in kept:
            cell = await self._results.human_cell(
                kernel.record.key, kernel.kernel_id, foreign, kernel.cleaner
            )
            self._keeper.add(cell)
        return bool(kept)

    def _info(self, kernel: OwnedKernel) -> KernelInfo:
        launched, session = kernel.launched, kernel.session
        if kernel.ending is not None or not self._population.serves(kernel.record):
            state = KernelState.CLOSING
        elif session is None or kernel.starting is not None:
            state = KernelState.STARTING
        else:
            state = KernelState.IDLE if kernel.running is None else KernelState.BUSY
        return KernelInfo(
            owner=kernel.record.key.owner,
            kernel_id=kernel.kernel_id,
            pid=None if launched is None else launched.pid,
            state=state,
            started=kernel.started,
            last_used=kernel.last_used,
            execution_count=0 if session is None else session.execution_count,
            connection_file=None if launched is None else launched.published or launched.connection_file,
            python=kernel.record.key.python,
            cwd=kernel.record.key.cwd,
            attached=kernel.record.attached,
            pinned=kernel.record.pinned,
            isolation="none" if launched is None else launched.isolation,
            degraded=None if session is None else session.degraded,
        )
