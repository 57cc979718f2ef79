"""The answer to one call: what a program asks of it, and the JSON that a model reads."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import common_keys, cut_to_limit, json_text, plain_text
from ..lifecycle.loss import Loss
from .execution import Settlement
from .hints import hint_for
from .outputs import CellError, OutputCollector
from .request import CellTimes
from .shown import Budget, Cleaner, Presented, Store, StreamCount, present
from .status import CellStatus, Fate, Phase

NOTHING_WRITTEN = StreamCount(0, 0, truncated=False)

TOOL_ERRORS = 5
"""Most failed tool calls that a result names (contract TER-01)."""

CUT = "execute_code stdout was truncated: the head and the tail are shown"
NOTHING = "The cell ended well and showed nothing; print() what you want to see."
_FRESH = "The next call starts with a fresh kernel."


@dataclass(frozen=True)
class KernelReport:
    """What a call met and what it left behind.

    ``lost`` says why the state of the owner's last call was not there, ``ended`` that the kernel is gone
    with this cell, ``degraded`` why the kernel runs on stock paths, if it does.
    """

    kernel_id: str
    reused: bool = False
    lost: Loss | None = None
    ended: bool = False
    leftovers: tuple[str, ...] = ()
    foreign_cells: int = 0
    degraded: str | None = None


@dataclass(frozen=True)
class Truncation:
    """How much was written to both streams together, and how much of it is shown; in bytes of UTF-8."""

    bytes_total: int
    bytes_shown: int
    truncated: bool = False
    spill_path: str | None = None


@dataclass(frozen=True)
class ToolCallRecord:
    """One call of a tool from the cell; ``args`` is a preview, ``seconds`` how long it took."""

    name: str
    args: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class LateOutput:
    """Text that an earlier cell wrote after it was settled."""

    execution_count: int | None
    text: str


@dataclass(frozen=True)
class CellResult:
    """The result of one call. A cell that failed, hung or killed its kernel has one too.

    ``ran`` is False if the code was never sent; then nothing was touched. ``text`` is what the model reads,
    in the order in which it was written. ``exit_code`` is 0, 1 for an error, the code with which the cell or
    its process ended (-N for signal N), -1 if it was cut. ``duration`` is in seconds and covers the call.
    """

    status: CellStatus
    ran: bool
    text: str
    stdout: str
    stderr: str
    value: str | None
    outputs: tuple[dict[str, Any], ...]
    error: CellError | None
    exit_code: int
    signal: str | None
    duration: float
    execution_count: int
    kernel: KernelReport
    truncation: Truncation
    warning: str | None = None
    hint: str | None = None
    tool_calls: tuple[ToolCallRecord, ...] = ()
    tool_errors: tuple[dict[str, str], ...] = ()
    late_output: tuple[LateOutput, ...] = ()
    _calls_made: int = 0
    _message: str | None = None
    _stdout_count: StreamCount = NOTHING_WRITTEN
    _images: tuple[dict[str, Any], ...] = ()
    _masked: bool = False
    _stdout_and_displays: str | None = None
    _shortened: bool = False

    @property
    def calls_made(self) -> int:
        """How many tool calls were served, also those that are not told one by one."""
        return max(self._calls_made, len(self.tool_calls))

    @property
    def is_shortened(self) -> bool:
        """Whether a display or an exception that the cell has shown is not here as a whole."""
        return self._shortened

    @property
    def is_masked(self) -> bool:
        """Whether secrets were taken out of what the cell has shown."""
        return self._masked

    @property
    def message(self) -> str | None:
        """The sentence, or the traceback, that says why the cell did not end well; None if it did."""
        return self._message

    def to_dict(self) -> dict[str, Any]:
        """Return the result as the agent's JSON has it: the common keys, others where they say something."""
        payload = common_keys()
        count = self._stdout_count
        payload.update(
            status=_status_word(self.status, self.exit_code),
            output=self._output(),
            exit_code=self.exit_code,
            tool_calls_made=self.calls_made,
            duration_seconds=round(self.duration, 2),
            stdout_truncated=count.truncated,
            stdout_bytes_captured=count.shown,
            stdout_bytes_total=count.total,
            stdout_bytes_omitted=count.total - count.shown,
        )
        payload["kernel"].update(
            reused=self.kernel.reused,
            execution_count=self.execution_count,
            state_reset=self.kernel.lost in (Loss.RESET, Loss.DIED),
            **self._kernel_extras(),
        )
        extras = {
            "error": self._message,
            "warning": self.warning,
            "hint": self.hint,
            "tool_errors": list(self.tool_errors),
            "stdout_spill_path": self.truncation.spill_path,
            "late_output": [asdict(late) for late in self.late_output],
            "images": list(self._images),
        }
        payload.update({key: value for key, value in extras.items() if value})
        return payload

    def to_json(self) -> str:
        """Return ``to_dict`` as JSON of at most 100 000 characters; ``output`` is cut before ``error``."""
        return result_json(self.to_dict())

    def to_notebook_outputs(self) -> list[dict[str, Any]]:
        """Return the outputs as a notebook's code cell keeps them (nbformat 4)."""
        return [dict(output) for output in self.outputs]

    def _kernel_extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.kernel.ended:
            extras["ended"] = True
        if self.kernel.lost is not None:
            extras["state_lost"] = True
            extras["lost_reason"] = self.kernel.lost.value
        if self.kernel.leftovers:
            extras["leftovers"] = list(self.kernel.leftovers)
        if self.kernel.foreign_cells:
            extras["foreign_cells"] = self.kernel.foreign_cells
        return extras

    def _output(self) -> str:
        """Stdout and displays, the value on a line of its own, then a block of stderr and the traceback."""
        output = self.stdout if self._stdout_and_displays is None else self._stdout_and_displays
        if self.value is not None:
            output = _joined(output, self.value)
        errors = self.stderr
        if self.error is not None:
            errors = _joined(errors, self.error.traceback)
        if errors:
            output = _joined(output, f"--- stderr ---\n{errors}")
        if self.status is CellStatus.TIMED_OUT:
            output = _joined(output, f"⏰ {self._message}")
        elif self.status is CellStatus.INTERRUPTED:
            output = _joined(output, "[execution interrupted]")
        return output


def result_json(whole: dict[str, Any]) -> str:
    """Return what ``to_dict`` gave as JSON of at most 100 000 characters; it says so if that took a cut."""
    cut = cut_to_limit(whole)
    if cut["output"] != plain_text(whole["output"]):
        # The sentence takes room itself, so it must be there before the cut.
        said = whole.get("warning", "")
        shown = min(len(cut["output"].encode()), whole["stdout_bytes_captured"])
        cut = cut_to_limit(
            {
                **whole,
                "warning": said if CUT in said else f"{said} {CUT}.".lstrip(),
                "stdout_truncated": True,
                "stdout_bytes_captured": shown,
                "stdout_bytes_omitted": whole["stdout_bytes_total"] - shown,
            }
        )
    return json_text(cut)


def cell_result(
    settlement: Settlement,
    outputs: OutputCollector,
    *,
    times: CellTimes,
    report: KernelReport,
    duration: float,
    execution_count: int = 0,
    signal: str | None = None,
    lost_bytes: Mapping[str, int] = MappingProxyType({}),
    note: str | None = None,
    tool_calls: tuple[ToolCallRecord, ...] = (),
    calls_made: int = 0,
    late_output: tuple[LateOutput, ...] = (),
    tools: Collection[str] = (),
    budget: Budget | None = None,
    cleaner: Cleaner | None = None,
    store: Store | None = None,
) -> CellResult:
    """Build the result of a settled call.

    *execution_count* is the kernel's last known one, *signal* the name of the signal that ended its process
    and *lost_bytes* what was written to each stream and could not be saved from a kernel that ended; *note*
    is said in the warning. *tool_calls*: what the cell has called, the first of *calls_made*; *tools*: the
    names that it could call. *budget*, *cleaner* and *store*: see ``shown.present``.
    """
    if settlement.error is not None and outputs.error is None:
        outputs.fail(settlement.error)
    error = settlement.error if settlement.status is CellStatus.ERROR else None
    shown = present(outputs, error, budget=budget, cleaner=cleaner, store=store)
    message = _message(settlement, shown.error, times, signal)
    if cleaner is not None:
        tool_calls = tuple(_masked_call(call, cleaner) for call in tool_calls)
        report = replace(report, leftovers=tuple(map(cleaner.mask, report.leftovers)))
    return CellResult(
        status=settlement.status,
        ran=settlement.ran,
        text=shown.text,
        stdout=shown.stdout,
        stderr=shown.stderr,
        value=shown.value,
        outputs=shown.outputs,
        error=shown.error,
        exit_code=settlement.exit_code,
        signal=signal if settlement.status is CellStatus.DIED else None,
        duration=duration,
        execution_count=_execution_count(settlement, execution_count),
        kernel=report,
        truncation=Truncation(
            shown.bytes_total, shown.bytes_shown, truncated=shown.truncated, spill_path=shown.spill_path
        ),
        warning=_warning(settlement, report, sum(lost_bytes.values()), note, outputs, shown),
        hint=hint_for(shown.error, tools, shown.stderr),
        tool_calls=tool_calls,
        tool_errors=tuple(_tool_errors(tool_calls)),
        late_output=late_output,
        _calls_made=calls_made,
        _message=message,
        _stdout_count=shown.counts["stdout"],
        _images=shown.images,
        _masked=shown.masked,
        _stdout_and_displays=shown.stdout_and_displays,
        _shortened=shown.shortened,
    )


def _masked_call(call: ToolCallRecord, cleaner: Cleaner) -> ToolCallRecord:
    error = None if call.error is None else cleaner.mask(call.error)
    return replace(call, args=cleaner.mask(call.args), error=error)


def _tool_errors(calls: tuple[ToolCallRecord, ...]) -> list[dict[str, str]]:
    failed = [{"tool": call.name, "error": call.error} for call in calls if call.error is not None]
    return failed[:TOOL_ERRORS]


def _execution_count(settlement: Settlement, last: int) -> int:
    """The cell's own count; a kernel that died at once did not live to tell it."""
    if settlement.execution_count is not None:
        return settlement.execution_count
    without_reply = settlement.status in (CellStatus.DIED, CellStatus.TIMED_OUT, CellStatus.INTERRUPTED)
    return last + 1 if settlement.ran and without_reply else last


def _status_word(status: CellStatus, exit_code: int) -> str:
    match status:
        case CellStatus.OK:
            return "success"
        case CellStatus.EXITED:
            return "success" if exit_code == 0 else "error"
        case CellStatus.TIMED_OUT:
            return "timeout"
        case CellStatus.INTERRUPTED:
            return "interrupted"
        case CellStatus.ERROR | CellStatus.DIED:
            return "error"


def _message(
    settlement: Settlement, error: CellError | None, times: CellTimes, signal: str | None
) -> str | None:
    """The ``error`` of the JSON: one sentence or, for an exception, its traceback."""
    match settlement.status:
        case CellStatus.OK:
            return None
        case CellStatus.ERROR:
            if error is None:
                return "The cell failed without saying why."
            return error.traceback or f"{error.ename}: {error.evalue}"
        case CellStatus.EXITED:
            if settlement.exit_code == 0:
                return None
            return (
                f"The cell ended its kernel with exit code {settlement.exit_code}; state was lost. {_FRESH}"
            )
        case CellStatus.DIED:
            how = f"signal {signal}" if signal else f"exit code {settlement.exit_code}"
            return f"The session kernel died ({how}); state was lost. {_FRESH}"
        case CellStatus.TIMED_OUT:
            return _cut_message(settlement, _limit_words(settlement, times))
        case CellStatus.INTERRUPTED:
            return _cut_message(settlement, "The call was interrupted")


def _limit_words(settlement: Settlement, times: CellTimes) -> str:
    match settlement.phase:
        case Phase.QUEUED:
            return f"The call waited for its turn longer than its limit of {_seconds(times.queue_timeout)}"
        case Phase.STARTING:
            return f"The kernel was not ready within {_seconds(times.start_timeout)}"
        case Phase.RAN:
            return f"The cell ran longer than its limit of {_seconds(times.timeout)}"


def _cut_message(settlement: Settlement, what: str) -> str:
    if not settlement.ran:
        return f"{what}: not run; state kept."
    if settlement.fate is Fate.KEEP:
        return f"{what}; it ended when it was interrupted: state kept."
    return f"{what} and its kernel was killed: state was lost. {_FRESH}"


def _seconds(value: float | None) -> str:
    return "no time" if value is None else f"{value:g} s"


def _warning(
    settlement: Settlement,
    report: KernelReport,
    lost_bytes: int,
    note: str | None,
    outputs: OutputCollector,
    shown: Presented,
) -> str | None:
    said = [] if note is None else [note]
    if report.lost is not None:
        said.append(f"The state of the last call is gone ({_LOSS_WORDS[report.lost]}).")
    if settlement.status is CellStatus.EXITED and settlement.exit_code == 0:
        said.append(f"The cell ended its kernel; its state is gone. {_FRESH}")
    if settlement.idle_missing:
        said.append("The kernel did not say that it was done; output may be missing.")
    if lost_bytes:
        said.append(f"{lost_bytes} bytes that the kernel wrote last could not be saved.")
    if shown.counts["stdout"].truncated:
        where = f"; read {shown.spill_path} in parts for the rest" if shown.spill_path else ""
        said.append(f"{CUT}{where}.")
    elif shown.truncated and shown.spill_path:
        said.append(f"The output was truncated; read {shown.spill_path} in parts for the rest.")
    if report.foreign_cells:
        cells = "1 cell" if report.foreign_cells == 1 else f"{report.foreign_cells} cells"
        said.append(f"A person ran {cells} on this kernel since the last call; the state may have changed.")
    if outputs.left_out:
        said.append(f"{outputs.left_out} displays are left out: too many for one result.")
    if settlement.status is CellStatus.OK and outputs.is_empty:
        said.append(NOTHING)
    return " ".join(said) or None


_LOSS_WORDS = {
    Loss.RESET: "the kernel was reset",
    Loss.IDLE: "the kernel was idle for too long",
    Loss.EVICTED: "the kernel made room for others",
    Loss.DIED: "the kernel died",
    Loss.TIMED_OUT: "the cell before ran out of time",
    Loss.INTERRUPTED: "the cell before was interrupted",
    Loss.EXITED: "the cell before ended the kernel",
    Loss.CLOSED: "the kernel was closed",
    Loss.CWD_CHANGED: "the working directory changed, and each has its own kernel",
    Loss.PYTHON_CHANGED: "the interpreter changed, and each has its own kernel",
    Loss.VARIANT_CHANGED: "the tools or the mode changed, and each set has its own kernel",
}


def _joined(above: str, below: str) -> str:
    """Put *below* on a line of its own."""
    return f"{above}{'' if not above or above.endswith(chr(10)) else chr(10)}{below}"
