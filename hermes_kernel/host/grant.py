"""What one cell was granted: its tools, its budget and its caller's context, until the cell is over."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import logging
import reprlib
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ..cell.authority import CellAuthority, Refusal
from ..cell.events import CellEvent, ToolCallEnded, ToolCallStarted
from ..cell.result import ToolCallRecord
from ..cell.shown import Cleaner, Unmasked
from ..cell.toolrecord import RECORD_LIMIT, FullCall, arguments_of
from ..cell.tools import ToolCallContext, ToolSet
from ..errors import ToolError, json_text
from ..lifecycle.key import Owner
from ..wire import Failure, ToolCall, ToolReply, WireError

RECORDS = 1000  # calls of one cell that are told one by one; more are only counted
PREVIEW = 80  # characters of a call's arguments in its record
ERROR_TEXT = 300  # characters of a call's error in its record
ERROR_SENT = 20_000  # characters of a handler's error that its cell sees
RECORDED = 64 * 1024 * 1024  # characters of the arguments and results of one cell that are recorded
CUT_OFF = "The cell ended before the tool answered; the result is dropped."


@dataclass(eq=False)
class Serving:
    """A cell that waits for its handlers, until it is over; which kernel's it is."""

    kernel_id: str
    is_over: bool = False


SERVING = contextvars.ContextVar[frozenset[Serving]]("hermes_serving", default=frozenset())
"""The cells that wait for the handler that runs here: a call of one of their kernels would never end."""


def kernels_that_wait() -> frozenset[str]:
    """Return the kernels whose cells wait for the handler that runs here."""
    return frozenset(cell.kernel_id for cell in SERVING.get() if not cell.is_over)


Waiting = concurrent.futures.Future[Any]
_PLAIN = (str, dict, list, int, float, bool, type(None))
_log = logging.getLogger(__name__)
_NOTHING_SECRET = Unmasked()


@dataclass(frozen=True)
class CellTools:
    """What a caller gives its cell, captured on the calling thread.

    ``limit``: how many calls, None for no limit. ``context`` and ``runner``: under what handlers run.
    ``loop`` returns the event loop for handlers that are ``async``. ``on_event`` is told of each call.
    ``record``: whether arguments and results are kept for a transcript. ``cleaner`` takes the secrets out of
    what is told of a call before that is cut: half a secret is none that anybody finds.
    """

    tools: ToolSet
    limit: int | None
    loop: Callable[[], asyncio.AbstractEventLoop]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    runner: Callable[[Callable[[], Any]], Any] | None = None
    on_event: Callable[[CellEvent], None] | None = None
    record: bool = False
    cleaner: Cleaner = _NOTHING_SECRET


class Caller(Protocol):
    """The connection that a call has come from."""

    def cut_off(self, reply: ToolReply) -> None:
        """Answer for a handler that has not, without waiting, and read the connection no more."""


class _Running:
    """A call that was admitted; also what its handler looks at to learn that the cell is over."""

    __slots__ = (
        "_event",
        "_is_over",
        "_lock",
        "args",
        "began",
        "call",
        "caller",
        "error",
        "number",
        "recorded",
        "seconds",
        "tool",
        "waiting_for",
    )

    def __init__(self, call: ToolCall, caller: Caller, lock: threading.RLock, cleaner: Cleaner) -> None:
        self._lock = lock
        self.call: ToolCall | None = call
        self.caller = caller
        self.tool = call.tool
        self.args = preview(call.arguments, call.place, cleaner)
        self.number = 0  # among the calls of the cell
        self.recorded: _Recorded | None = None
        self.began = time.monotonic()
        self.seconds = 0.0
        self.error: str | None = CUT_OFF
        self.waiting_for: concurrent.futures.Future[Any] | None = None
        self._is_over = False
        self._event: threading.Event | None = None  # most handlers never wait

    def end(self, error: str | None) -> None:
        """Note how the call came out, and keep nothing of its arguments."""
        self.seconds = time.monotonic() - self.began
        self.error = error
        self.call = None
        self.waiting_for = None

    def cut_off(self) -> None:
        """The cell has ended before the handler. Under the lock."""
        self._is_over = True
        if self._event is not None:
            self._event.set()

    def is_set(self) -> bool:
        """Whether the cell has ended."""
        return self._is_over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the cell."""
        with self._lock:
            event = self._event = self._event or threading.Event()
            if self._is_over:
                event.set()
        return event.wait(timeout)

    @property
    def record(self) -> ToolCallRecord:
        """How the call is told."""
        return ToolCallRecord(self.tool, self.args, round(self.seconds, 6), self.error)


class ToolGrant:
    """The right of one cell to call tools, and the calls that it has made. Safe from any thread."""

    def __init__(
        self,
        tools: CellTools,
        *,
        owner: Owner | None,
        kernel_id: str,
        tell: Callable[[Callable[[], object]], None],
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.cell_id = secrets.token_hex(8)
        self.tools = tools
        self._owner = owner
        self._kernel_id = kernel_id
        self._tell = tell
        self._authority = CellAuthority(tools.tools.names, tools.limit)
        self._own = Serving(kernel_id)
        self._serving = tools.context.run(SERVING.get) | {self._own}
        self._running: set[_Running] = set()
        self._calls: list[_Running] = []  # in the order in which they began, the first RECORDS of them
        self._lock = threading.RLock()
        self._record = _Record() if tools.record else None
        self.refusals = 0

    def serve(self, call: ToolCall, caller: Caller) -> "Answer":
        """Serve one call on the calling thread, however long its handler takes.

        If the cell ends meanwhile, *caller* is told so at once, and what the handler returns is dropped.
        """
        tool = self.tools.tools.tools.get(call.tool)
        if tool is not None and (wrong := tool.refuse_arguments(call.arguments, call.place)):
            return answer(ToolReply(call.call_id, error=wrong, kind=Failure.ARGUMENTS))
        running = _Running(call, caller, self._lock, self.tools.cleaner)
        # Its arguments as they came: the handler may change them.
        arguments = None if self._record is None else _arguments_text(call)
        with self._lock:
            refusal = self._authority.admit(call.tool)
            if refusal is None:
                running.number = self._authority.spent
                if self._record is not None:
                    running.recorded = self._record.begin(call.tool, arguments)
                if len(self._calls) < RECORDS:
                    self._calls.append(running)
                self._running.add(running)
                if self.tools.on_event is not None:
                    self._on_event(ToolCallStarted(running.number, call.tool, running.args))
            else:
                self.refusals += 1
        if refusal is not None:
            return answer(self._refused(call, refusal))
        served, error = self._run(call, running)
        with self._lock:
            if running not in self._running:
                return answer(self._cut_off(call))
            self._running.discard(running)
            running.end(error)
            if self._record is not None and running.recorded is not None:
                self._record.keep(running.recorded, served)
        if self.tools.on_event is not None:
            self._on_event(ToolCallEnded(running.number, call.tool, running.seconds, running.error))
        return served

    def retire(self) -> tuple[ToolCallRecord, ...]:
        """The cell is over: refuse what comes, cancel what runs; return what was called. Idempotent."""
        cut_off: list[tuple[ToolCall, _Running, Waiting | None]] = []
        self._own.is_over = True
        with self._lock:
            self._authority.retire()
            for running in self._running:
                if running.call is not None:
                    cut_off.append((running.call, running, running.waiting_for))
                running.cut_off()
                running.end(CUT_OFF)
            self._running.clear()
            records = tuple(running.record for running in self._calls)
        for call, running, waiting in cut_off:
            if waiting is not None:
                _give_up(waiting, self.tools.loop)
            running.caller.cut_off(self._cut_off(call))
            if self.tools.on_event is not None:
                self._on_event(ToolCallEnded(running.number, call.tool, running.seconds, CUT_OFF))
        return records

    def _cut_off(self, call: ToolCall) -> ToolReply:
        sentence = self._authority.sentence(Refusal.RETIRED, call.tool)
        return ToolReply(call.call_id, error=sentence, kind=Failure.REFUSED, closes=True)

    @property
    def recorded(self) -> tuple[FullCall, ...]:
        """The calls that were made, with their arguments and results, if they are recorded."""
        with self._lock:
            return () if self._record is None else self._record.calls()

    @property
    def calls_made(self) -> int:
        """How many calls were served, also those that are not told."""
        return self._authority.spent

    def _refused(self, call: ToolCall, refusal: Refusal) -> ToolReply:
        kind = Failure.BUDGET if refusal is Refusal.SPENT else Failure.REFUSED
        return ToolReply(call.call_id, error=self._authority.sentence(refusal, call.tool), kind=kind)

    def _run(self, call: ToolCall, running: _Running) -> "tuple[Answer, str | None]":
        """Run the handler; return what is sent, and the error for the record."""
        try:
            if running.is_set():  # the cell has ended before it could begin
                raise ToolError(CUT_OFF)
            value = self.tools.context.copy().run(self._begin, call, running)
            if (waiting := running.waiting_for) is not None:
                value = self._wait(running, waiting)
            return _answered(call, value), self._error_told(value)
        except concurrent.futures.CancelledError:
            error = f"{call.tool} was cancelled"
        except BaseException as raised:  # noqa: BLE001  # the edge of a handler, which may raise anything
            _log.debug("tool %s failed", call.tool, exc_info=True)
            error = failure_text(raised)
        return answer(ToolReply(call.call_id, error=error, kind=Failure.TOOL)), self._error_text(error)

    def _error_told(self, value: Any) -> str | None:
        """The error that a tool's own result tells, for the record of its call."""
        error = value.get("error") if isinstance(value, dict) else None
        return self._error_text(str(error)) if error else None

    def _error_text(self, error: str) -> str:
        return _cut(error, ERROR_TEXT, self.tools.cleaner)

    def _begin(self, call: ToolCall, running: _Running) -> Any:
        """Call the handler in the caller's context, with its thread-locals if a runner sets them."""
        SERVING.set(self._serving)
        runner = self.tools.runner
        if runner is None:
            return self._call(call, running)
        return runner(lambda: self._call(call, running))

    def _call(self, call: ToolCall, running: _Running) -> Any:
        """Call the handler; what an ``async`` one still has to do goes on in the same context."""
        tools = self.tools.tools
        context = None
        if tools.wants_context(call.tool):
            context = ToolCallContext(self._owner, self._kernel_id, self.cell_id, running.number, running)
        value = tools.call(call.tool, call.arguments, context, call.place)
        if type(value) not in _PLAIN and inspect.isawaitable(value):
            work = _awaited(value)
            try:
                running.waiting_for = asyncio.run_coroutine_threadsafe(work, self.tools.loop())
            except RuntimeError:
                work.close()
                if inspect.iscoroutine(value):
                    value.close()
                raise
            return None
        return value

    def _wait(self, running: _Running, waiting: Waiting) -> Any:
        if running.is_set():  # the cell ended before there was anything to cancel
            _give_up(waiting, self.tools.loop)
        return waiting.result()

    def _on_event(self, event: CellEvent) -> None:
        on_event = self.tools.on_event
        if on_event is None:
            return

        def told() -> None:
            try:
                on_event(event)
            except Exception:  # noqa: BLE001  # the caller's code: its cell goes on
                _log.exception("on_event failed for %s", type(event).__name__)

        self._tell(told)


@dataclass
class _Recorded:
    """One call of a record, and its answer once there is one."""

    call: FullCall


class _Record:
    """The calls of one cell with all that went to and fro; large ones without. Under the grant's lock."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._calls: list[_Recorded] = []
        self._room = RECORDED

    def begin(self, tool: str, arguments: str | None) -> _Recorded | None:
        """Take in a call that begins; None if there are too many."""
        ordinal = self._begun.get(tool, 0)
        self._begun[tool] = ordinal + 1
        if len(self._calls) >= RECORDS:
            return None
        kept, size = self._take(arguments)
        recorded = _Recorded(FullCall(tool, ordinal, kept, size, None, 0, answered=False))
        self._calls.append(recorded)
        return recorded

    def keep(self, recorded: _Recorded, served: "Answer") -> None:
        """Keep what a call was answered."""
        body = _result_body(served)
        size = len(body)
        kept = None
        if size <= RECORD_LIMIT:
            kept, _ = self._take(body.decode("utf-8", "surrogatepass"))
        recorded.call = replace(
            recorded.call, result=kept, result_size=size, error=served.reply.error, answered=True
        )

    def calls(self) -> tuple[FullCall, ...]:
        """Return them, each tool's in the order in which they began."""
        return tuple(recorded.call for recorded in self._calls)

    def _take(self, text: str | None) -> tuple[str | None, int]:
        if text is None:
            return None, 0
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > RECORD_LIMIT or len(text) > self._room:
            return None, size
        self._room -= len(text)
        return text, size


class Answer(NamedTuple):
    """A reply and its frame."""

    reply: ToolReply
    frame: bytes


def answer(reply: ToolReply) -> Answer:
    """Make the frame of a reply."""
    return Answer(reply, reply.encode())


def _answered(call: ToolCall, value: Any) -> Answer:
    """Make the reply with a handler's result; raises ToolError for one that cannot be sent."""
    try:
        return answer(ToolReply(call.call_id, value))
    except (TypeError, ValueError, RecursionError, WireError) as error:
        raise ToolError(f"{call.tool} returned what cannot be sent: {error}") from error


def preview(
    arguments: Mapping[str, Any], place: Sequence[Any] = (), cleaner: Cleaner = _NOTHING_SECRET
) -> str:
    """Return arguments as a short text; where something is cut, without the secrets that stood there."""
    shown = ""
    short = _Preview(cleaner)
    for name, value in (*(("", value) for value in place), *arguments.items()):
        text = repr(_cut(value, PREVIEW, cleaner)) if type(value) is str else short.repr(value)
        text = f"{name}={text}" if name else text
        shown = f"{shown}, {text}" if shown else text
        if len(shown) > PREVIEW:
            return f"{cleaner.mask(shown)[: PREVIEW - 1]}…"
    return shown


class _Preview(reprlib.Repr):
    """Shortens what is long, without the secrets that stand where it is cut."""

    def __init__(self, cleaner: Cleaner) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self._cleaner = cleaner

    def repr_str(self, x: str, level: int) -> str:
        """Shorten a text; its beginning and its end are kept."""
        if len(x) > self.maxstring:
            kept = self.maxstring + self._cleaner.margin
            if len(x) <= 2 * kept:
                x = self._cleaner.mask(x)
            else:
                ends = [self._cleaner.mask(end) for end in (x[:kept], x[-kept:])]
                x = f"{ends[0][: self.maxstring]} {ends[1][-self.maxstring :]}"
        return super().repr_str(x, level)


def _cut(text: str, size: int, cleaner: Cleaner) -> str:
    """Return the beginning of a text; a secret that stands across its end is masked before."""
    if len(text) <= size:
        return text
    return cleaner.mask(text[: size + cleaner.margin])[:size]


def _arguments_text(call: ToolCall) -> str | None:
    try:
        return json_text(arguments_of(call.arguments, call.place))
    except (ValueError, RecursionError):  # no cell of ours sends what cannot be written
        return None


def _result_body(served: "Answer") -> bytes:
    """Return the JSON of a result as it was sent: its handler may change the value that it has returned."""
    if served.reply.error is not None:
        return b"null"
    start = served.frame.index(b'"value":') + len(b'"value":')
    return served.frame[start : served.frame.rindex(b"}")]


def failure_text(error: BaseException) -> str:
    """Return what a cell sees of a handler's exception: a ToolError's own text, else its name before it."""
    # TracebackException, because the text of an exception may itself fail.
    text = str(traceback.TracebackException(type(error), error, None))
    if not isinstance(error, ToolError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= ERROR_SENT else f"{text[:ERROR_SENT]}…"


async def _awaited(value: Any) -> Any:
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:  # it would end the loop, and all that runs on it
        raise ToolError(failure_text(error)) from error


def _give_up(waiting: Waiting, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Cancel what an ``async`` handler does. A loop that is closed cannot be told, and will not answer."""
    try:
        is_closed = loop().is_closed()
    except RuntimeError:  # the registry is closed, and its loop with it
        is_closed = True
    if not is_closed:
        waiting.cancel()
        return
    try:
        waiting.set_exception(ToolError(CUT_OFF))
    except concurrent.futures.InvalidStateError:  # it has answered after all
        pass
