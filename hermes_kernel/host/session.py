"""One live kernel as its owner uses it: cells one after another, each to its settlement."""

import asyncio
import contextlib
import logging
import math
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import zmq

from ..cell.execution import CellExecution, Settlement
from ..cell.message import Message
from ..cell.outputs import OutputCollector, StreamName, stream_end
from ..cell.request import CellRequest, CellTimes
from ..cell.result import ToolCallRecord
from ..cell.status import CellStatus, Fate
from ..cell.toolrecord import FullCall
from ..cell.variables import REPLY, REQUEST
from ..errors import HermesKernelError, KernelStartError
from ..process.launch import KernelExit, Launched, Launcher, StreamRest
from .bridge import KernelBridge
from .connection import KernelConnection
from .cut import Cut
from .events import EventPump
from .foreign import ForeignCells
from .grant import CellTools, ToolGrant
from .supervisor import Supervisor

DRAIN = 0.5  # seconds for what a kernel had sent before it ended to arrive
EXIT_WAIT = 1.0  # seconds for a kernel that said it ends to be gone; a thread of the cell's may hold it up
LAST_WORDS = 1.0  # seconds that a result waits for what its kernel said last
SIGNAL_TIMEOUT = 1.0  # seconds for a signal to be sent
END_TIMEOUT = 5.0  # seconds for a killed tree to be gone
MAX_ANOMALIES = 100  # unreadable or forged messages before the kernel is given up
MAX_LOGGED = 5  # of them that are worth a line in the log
REJECTED = "The kernel was ended: it sent too many messages that no kernel sends."
ASK_AGAIN = 0.2  # seconds without a message on IOPub until the kernel is asked once more
RECONNECT = 5  # milliseconds; a kernel takes its time to start
RECONNECT_FORKED = 1  # one that is a fork is about to have its sockets
REMEMBERED_CELLS = 64  # cells that may still write after their end
LATE = 100_000  # characters of that which are kept for one cell, besides its last ones
PROBE = "None"
HELP = "`hermes-kernel doctor` shows what is wrong"

_CUT = (CellStatus.TIMED_OUT, CellStatus.INTERRUPTED)

_log = logging.getLogger(__name__)


class KernelGoneError(HermesKernelError):
    """The kernel was gone before the code could be sent: nothing has run."""


class BridgeError(HermesKernelError):
    """The host's end of the tool bridge cannot be opened: nothing has run."""


@dataclass
class _PastCell:
    """A cell, and what it has written since it was settled."""

    execution_count: int | None = None
    outputs: OutputCollector = field(default_factory=lambda: OutputCollector(LATE, LATE))

    def take_outputs(self) -> OutputCollector | None:
        """Return what it has written since this was asked last, None if nothing."""
        if self.outputs.is_empty:
            return None
        outputs, self.outputs = self.outputs, OutputCollector(LATE, LATE)
        return outputs


@dataclass(frozen=True)
class CellOutcome:
    """A settled cell: how it ended, what it showed, and how the kernel ended if it did."""

    settlement: Settlement
    outputs: OutputCollector
    exit: KernelExit | None = None
    note: str | None = None
    lost_bytes: Mapping[str, int] = field(default_factory=dict)
    tool_calls: tuple[ToolCallRecord, ...] = ()
    calls_made: int = 0
    refusals: int = 0
    recorded: tuple[FullCall, ...] = ()
    leftovers: tuple[str, ...] = ()


class KernelSession:
    """The connection to one kernel process, from its launch until it is gone.

    It lives on the supervisor's loop. One cell runs at a time: its caller sees to that.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        launcher: Launcher,
        launched: Launched,
        bridge: KernelBridge,
        *,
        owner_secret: str,
        keeps_foreign: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._launcher = launcher
        self._launched = launched
        self._bridge = bridge
        self._execution: CellExecution | None = None
        self._events: EventPump | None = None
        self._past: OrderedDict[str, _PastCell] = OrderedDict()
        self._asked: set[str] = set()
        self._questions: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self._subscribed = False
        self._answered = launched.greets
        self._degraded: str | None = None
        self._gone_channels: set[str] = set()
        self._changed = asyncio.Event()
        self._positions: dict[StreamName, int] = {"stdout": 0, "stderr": 0}
        self._anomalies = 0
        self._rejected = False
        self.foreign = ForeignCells(keeps=keeps_foreign)
        self.execution_count = 0
        self._connection = KernelConnection(
            supervisor.zmq_context,
            launched.connection,
            owner_secret=owner_secret,
            reconnect=RECONNECT_FORKED if launched.greets else RECONNECT,
            receive=self._receive,
            disconnected=self._on_disconnect,
            unreadable=self._count_anomaly,
        )
        self._exit: asyncio.Task[KernelExit] = asyncio.create_task(
            launcher.ended(launched.handle), name=f"end of {launched.handle}"
        )
        self._exit.add_done_callback(self._wake)

    @property
    def is_ready(self) -> bool:
        """Whether cells can be sent to the kernel, and we are told what they do."""
        return self._subscribed and self._answered

    @property
    def has_ended(self) -> bool:
        """Whether the kernel process is gone."""
        return self._exit.done()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have *callback* called on the loop when the kernel process is gone."""
        self._exit.add_done_callback(lambda _: callback())

    @property
    def degraded(self) -> str | None:
        """Why something is not as it was asked for: as its launcher says, and the kernel itself."""
        reasons = (self._launched.degraded, self._degraded)
        return "; ".join(reason for reason in reasons if reason is not None) or None

    async def ready(self, deadline: float) -> None:
        """Wait until the kernel answers.

        Raises KernelStartError if it ends before, or does not answer until *deadline* (loop time).
        """
        ask_again = self._loop.time() + ASK_AGAIN if self._launched.greets else -math.inf
        while not self.is_ready:
            # A subscription that came after the first answer misses its status: ask for another one.
            if self._loop.time() >= ask_again and (self._answered or not self._asked):
                with contextlib.suppress(zmq.Again):  # nobody is connected just now: the next time
                    self._asked.add(self._connection.send("shell", "kernel_info_request", {}, {}))
                ask_again = self._loop.time() + ASK_AGAIN
            if self._exit.done():
                raise self._start_error(f"the kernel ended while it started; {HELP}", await self._exit)
            if self._loop.time() >= deadline:
                raise self._start_error(f"the kernel did not answer within start_timeout; {HELP}", None)
            has_to_ask = self._answered or not self._asked
            await self._wait(min(deadline, ask_again) if has_to_ask else deadline, None)

    async def bootstrap(self, code: str, deadline: float) -> None:
        """Run code of the host's before the first cell; raises KernelStartError if it fails."""
        timeout = max(deadline - self._loop.time(), 0.001)
        times = CellTimes(timeout, None, timeout, 0, timeout)
        outcome = await self._execute(code, times, Cut(), math.inf, silent=True)
        status = outcome.settlement.status
        if status is CellStatus.OK:
            return
        error = outcome.outputs.error
        what = error.traceback if error is not None else f"it ended as {status.value}"
        if status is CellStatus.EXITED:
            await asyncio.wait({self._exit}, timeout=EXIT_WAIT)
        ended = self._exit.result() if self._exit.done() else None
        raise self._start_error(f"the bootstrap code failed: {what}", ended)

    async def run(
        self,
        request: CellRequest,
        cut: Cut,
        queue_deadline: float = math.inf,
        *,
        tools: CellTools | None = None,
        events: EventPump | None = None,
    ) -> CellOutcome | CellStatus:
        """Run one cell to its settlement. If its fate is END, the tree is gone when this returns.

        The cell may call *tools* while it runs, and *events* is told what it shows. A cell of another client
        is waited for until *queue_deadline* (loop time): TIMED_OUT or INTERRUPTED if our code was not sent by
        then. Raises KernelGoneError if the kernel ended before the cell began.
        """
        if self._exit.done():
            raise KernelGoneError(f"{self._launched.handle} has ended")
        self._connection.read_now()  # a cell of another client may have begun
        if (waited := await self._wait_for_others(cut, queue_deadline)) is not None:
            return waited
        if self._gone_channels:  # its messages would not reach us any more
            raise KernelGoneError(f"{self._launched.handle} has hung up")
        if cut.status is not None:  # since it had its turn
            return cut.status
        self._events = events
        try:
            outcome = await self._run_with_tools(request, cut, queue_deadline, tools)
        finally:
            self._events = None
        settlement = outcome.settlement
        if settlement.status is CellStatus.DIED and not settlement.ran:
            raise KernelGoneError(f"{self._launched.handle} ended before the cell began")
        if settlement.fate is Fate.KEEP and settlement.status in _CUT:
            settlement = await self._prove_alive(settlement, request.times)
        if settlement.fate is Fate.KEEP and self._rejected:
            settlement = replace(settlement, fate=Fate.END)
        if settlement.execution_count is not None:
            self.execution_count = settlement.execution_count
        note = REJECTED if self._rejected else None
        if settlement.fate is Fate.KEEP:
            return replace(outcome, settlement=settlement, note=note)
        outcome = replace(outcome, settlement=settlement, note=note)
        return await self._last_words(outcome)

    async def kill(self) -> None:
        """End the kernel process and its tree; a cell that runs is settled by that."""
        await self._launcher.end(self._launched.handle, timeout=END_TIMEOUT)

    async def close(self) -> None:
        """End the kernel and everything of it; idempotent."""
        await self.kill()
        await asyncio.wait({self._exit}, timeout=END_TIMEOUT)
        self._exit.cancel()
        self._connection.close()
        self._bridge.close()

    def take_late_outputs(self) -> list[tuple[int | None, OutputCollector]]:
        """Return what earlier cells have written since this was asked last."""
        late = [(past.execution_count, past.take_outputs()) for past in self._past.values()]
        return [(count, outputs) for count, outputs in late if outputs is not None]

    async def variables(self, timeout: float) -> Mapping[str, Any]:
        """Ask the kernel for its variables, also while a cell runs, and return the content of its reply.

        Raises TimeoutError if it does not answer within *timeout* seconds, KernelGoneError if it has ended.
        """
        try:
            msg_id = self._connection.send("control", REQUEST, {}, {})
        except zmq.Again as error:
            raise KernelGoneError(f"{self._launched.handle} takes no requests any more") from error
        answer = self._questions[msg_id] = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait({answer, self._exit}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._questions[msg_id]
        if not answer.done():
            raise KernelGoneError(f"{self._launched.handle} has ended")
        content: Mapping[str, Any] = answer.result()
        return content

    async def interrupt(self) -> None:
        """Send the kernel a SIGINT."""
        try:
            async with asyncio.timeout(SIGNAL_TIMEOUT):
                await self._launcher.signal(self._launched.handle, signal.SIGINT)
        except TimeoutError:  # the grace runs; after it the kernel is killed
            _log.warning("%s was not reached by an interrupt", self._launched.handle)

    async def _wait_for_others(self, cut: Cut, deadline: float) -> CellStatus | None:
        """Wait until no cell of another client runs; say what came first if it was not that."""
        while self.foreign.are_running and not self._exit.done():
            if cut.status is not None:
                return cut.status
            if self._loop.time() >= deadline:
                return CellStatus.TIMED_OUT
            await self._wait(deadline, cut)
        return None

    async def _run_with_tools(
        self, request: CellRequest, cut: Cut, queue_deadline: float, tools: CellTools | None
    ) -> CellOutcome:
        """Run the cell; its right to call tools begins with its request and ends with its settlement."""
        if tools is None:
            return await self._execute(
                request.code, request.times, cut, queue_deadline, show_value=request.show_value
            )
        try:
            self._bridge.open()
        except OSError as error:
            raise BridgeError(f"the tools cannot be offered to the kernel: {error}; not run") from error
        grant = self._bridge.grant(tools)
        try:
            outcome = await self._execute(
                request.code, request.times, cut, queue_deadline, show_value=request.show_value, grant=grant
            )
        finally:
            calls = self._bridge.retire(grant)
        if tools.on_event is not None:
            await asyncio.sleep(0)  # the ends of the calls that were cut off are told, too
        if outcome.settlement.execution_count is not None:
            self._bridge.delivered(grant)
        return replace(
            outcome,
            tool_calls=calls,
            calls_made=grant.calls_made,
            refusals=grant.refusals,
            recorded=grant.recorded,
        )

    async def _execute(
        self,
        code: str,
        times: CellTimes,
        cut: Cut,
        queue_deadline: float,
        *,
        silent: bool = False,
        show_value: bool = True,
        grant: ToolGrant | None = None,
    ) -> CellOutcome:
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        hermes: dict[str, Any] = {"tell_start": True}
        if not show_value:
            hermes["show_value"] = False
        if grant is not None:
            hermes["tools"] = self._bridge.metadata(grant)
        metadata = {"hermes": hermes}
        try:
            msg_id = self._connection.send("shell", "execute_request", content, metadata)
        except zmq.Again as error:
            raise KernelGoneError(f"{self._launched.handle} takes no requests any more") from error
        past = self._remember(msg_id)
        execution = CellExecution(msg_id, times, self._loop.time(), queue_deadline=queue_deadline)
        if self.foreign.are_running:
            execution.hold()
        self._execution = execution
        try:
            settlement = await self._settle(execution, cut)
        finally:
            self._execution = None
            past.execution_count = None if silent else execution.execution_count
        if settlement.fate is Fate.END:
            self._execution = execution  # its last words are still to come
        return CellOutcome(settlement, execution.outputs, leftovers=execution.leftovers)

    def _remember(self, msg_id: str) -> _PastCell:
        """Keep a place for what the cell writes once it is settled: that may be before its caller knows."""
        past = self._past[msg_id] = _PastCell()
        while len(self._past) > REMEMBERED_CELLS:
            self._past.popitem(last=False)
        return past

    async def _settle(self, execution: CellExecution, cut: Cut) -> Settlement:
        """The one poll of a running cell: messages, the end of the process, the deadline, the caller."""
        interrupted = False
        while execution.settlement is None:
            if self._exit.done():
                await self._drain()
                ended = self._exit.result()
                execution.kernel_ended(ended.exit_code, ended.last_cell)
                continue
            if self._rejected:
                await self.kill()
                if not self._exit.done():
                    execution.kernel_ended(-9)
                continue
            if self._gone_channels:
                # The process lives but has hung up: it sent more than a frame may have.
                await self._end_disconnected()
                if not self._exit.done():  # it cannot be ended; nothing more can come of it
                    execution.kernel_ended(-9)
                continue
            if cut.status is not None:
                execution.interrupt(self._loop.time())
            execution.tick(self._loop.time())
            if execution.interrupt_wanted and not interrupted:
                interrupted = True
                await self.interrupt()
            if execution.settlement is None:
                await self._wait(execution.deadline, None if cut.status else cut)
        return execution.settlement

    async def _prove_alive(self, settlement: Settlement, times: CellTimes) -> Settlement:
        """A kernel that was interrupted is kept only if it runs another cell within the same grace."""
        grace_left = max(settlement.grace_until - self._loop.time(), 0)
        probe_times = CellTimes(grace_left, None, times.start_timeout, 0, grace_left)
        try:
            async with asyncio.timeout(grace_left):
                outcome = await self._execute(PROBE, probe_times, Cut(), math.inf, silent=True)
        except (TimeoutError, KernelGoneError):  # the cell has run; only its kernel is not to be had
            return replace(settlement, fate=Fate.END)
        if outcome.settlement.status is CellStatus.OK and not outcome.settlement.idle_missing:
            return settlement
        return replace(settlement, fate=Fate.END)

    async def _last_words(self, outcome: CellOutcome) -> CellOutcome:
        """End the kernel and add to the outputs what it had written and not sent."""
        if outcome.settlement.status is CellStatus.EXITED:
            await asyncio.wait({self._exit}, timeout=EXIT_WAIT)
        ending = asyncio.create_task(self.kill())
        done, _ = await asyncio.wait({self._exit}, timeout=LAST_WORDS)
        ended = self._exit.result() if done else None
        if ended is not None and outcome.settlement.status is CellStatus.EXITED:
            await self._drain()  # what its exit handlers have written is more than the rests can hold
        self._execution = None
        lost: dict[str, int] = {}
        if ended is not None:
            ends: dict[StreamName, StreamRest] = {"stdout": ended.stdout, "stderr": ended.stderr}
            for name, end in ends.items():
                missing = end.total - self._positions[name]
                lost[name] = outcome.outputs.add_rest(name, missing, end.rest, end.undrained)
        await asyncio.wait({ending}, timeout=LAST_WORDS)
        return replace(outcome, exit=ended, lost_bytes=lost)

    async def _end_disconnected(self) -> None:
        """A channel is gone. Most often the process is about to be; one that lives on is of no use."""
        done, _ = await asyncio.wait({self._exit}, timeout=DRAIN)
        if not done:
            _log.warning("%s has hung up: %s", self._launched.handle, ", ".join(self._gone_channels))
            await self.kill()

    async def _drain(self) -> None:
        """Wait until the shell and IOPub channels have been read to their ends, the reply with them."""
        try:
            async with asyncio.timeout(DRAIN):
                while not self._gone_channels >= {"shell", "iopub"}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:  # a child of the kernel holds the socket open
            _log.info("%s ended, but not its channels", self._launched.handle)
        self._connection.read_all()

    async def _wait(self, until: float, cut: Cut | None) -> None:
        """Wait for a change: a message, the end of the process, the caller's cut, or the time *until*."""
        if cut is not None:
            cut.on_change(self._changed.set)
        timer = None if math.isinf(until) else self._loop.call_at(until, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            self._changed.clear()
            if timer is not None:
                timer.cancel()

    def _wake(self, _: object = None) -> None:
        self._changed.set()

    def _receive(self, channel: str, message: Message) -> None:
        now = self._loop.time()
        execution = self._execution
        if channel == "iopub":
            self._receive_iopub(message, execution, now)
        elif message.msg_type == "kernel_info_reply" and message.parent_id in self._asked:
            self._learn(message.content)
        elif message.msg_type == REPLY:
            self._answer(message)
        elif execution is None or execution.settlement or message.parent_id != execution.msg_id:
            if message.parent_id not in self._past:  # what is said of a settled cell nobody forged
                self._count_anomaly()
        elif channel != "shell" or not execution.receive_reply(message, now):
            self._count_anomaly()
        elif execution.anomalies:
            execution.anomalies = 0
            self._count_anomaly()
        if execution is None or execution.settlement is not None or channel == "shell":
            self._changed.set()

    def _answer(self, message: Message) -> None:
        question = self._questions.get(message.parent_id or "")
        if question is not None and not question.done():
            question.set_result(message.content)
        elif question is not None or not self._connection.is_ours(message.parent_id):
            self._count_anomaly()  # one that comes after its time is none

    def _receive_iopub(self, message: Message, execution: CellExecution | None, now: float) -> None:
        if message.msg_type == "stream":
            name: StreamName = message.content["name"]
            self._positions[name] = max(self._positions[name], stream_end(message) or 0)
        if message.msg_type == "iopub_welcome" or message.parent_id in self._asked:
            self._subscribed = True
        elif execution is not None and execution.receive_iopub(message, now):
            if message.msg_type == "status":
                self._changed.set()
            elif self._events is not None:
                self._events.tell_message(message)
        elif (past := self._past.get(message.parent_id or "")) is not None:
            if message.msg_type == "stream":
                past.outputs.add_late(message)
        elif message.msg_type == "execute_input" and message.parent_id is not None:
            self._begin_foreign(message.parent_id, message, execution)
        elif message.msg_type == "status" and message.content["execution_state"] == "idle":
            self._end_foreign(message.parent_id, execution, now)
        else:
            self.foreign.show(message)

    def _begin_foreign(self, parent_id: str, message: Message, execution: CellExecution | None) -> None:
        if self._connection.is_ours(parent_id):
            return  # we have sent no such cell: nobody says when it ends
        self.foreign.begin(parent_id, message)
        if execution is not None:
            execution.hold()

    def _end_foreign(self, parent_id: str | None, execution: CellExecution | None, now: float) -> None:
        if self.foreign.end(parent_id):
            self._changed.set()
            if execution is not None and not self.foreign.are_running:
                execution.resume(now)

    def _count_anomaly(self) -> None:
        """Something came that no kernel sends. Too much of it ends the kernel, with a cell or without."""
        self._anomalies += 1
        if self._anomalies <= MAX_LOGGED:
            _log.warning("%s sent what is no answer (number %d)", self._launched.handle, self._anomalies)
        if self._anomalies > MAX_ANOMALIES and not self._rejected:
            _log.warning("%s sent too much that is no answer: it is ended", self._launched.handle)
            self._rejected = True
            self._changed.set()
            self._rejecting = self._loop.create_task(self.kill(), name=f"reject {self._launched.handle}")

    def _learn(self, content: Mapping[str, Any]) -> None:
        self._answered = True
        hermes = content.get("hermes")
        degraded = hermes.get("degraded") if isinstance(hermes, dict) else None
        self._degraded = degraded[:500] if isinstance(degraded, str) else None

    def _on_disconnect(self, channel: str) -> None:
        self._connection.read_all()
        if self._subscribed:
            self._gone_channels.add(channel)
        self._changed.set()

    def start_error(self, what: str) -> KernelStartError:
        """Return *what* was wrong with the start of this kernel, with what it has left if it has ended."""
        return self._start_error(what, self._exit.result() if self._exit.done() else None)

    def _start_error(self, what: str, ended: KernelExit | None) -> KernelStartError:
        if ended is None:
            return KernelStartError(what, argv=self._launched.argv)
        said = (ended.stderr.rest + ended.stderr.undrained).decode("utf-8", "backslashreplace")
        log_tail = "\n".join(part for part in (ended.log_tail, said.strip()) if part)
        return KernelStartError(what, argv=self._launched.argv, exit_code=ended.exit_code, log_tail=log_tail)
