"""A recorded session run again: what its cells and their tool calls are held against.

What a notebook says is untrusted: a record that is not of the right shape is an error that names its cell.
"""

import difflib
import inspect
import json
import keyword
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..errors import ConfigError, ToolError, json_text
from ..lifecycle.key import Owner
from .masks import MASK
from .result import CellResult
from .shown import Cleaner
from .status import CellStatus
from .text import strip_controls
from .toolrecord import RecordedCall, arguments_of, digest_of
from .tools import Cancelled, Tool, ToolCallContext, ToolSet
from .transcript import CELL_KEY, NOTEBOOK_KEY, VERSION, By, outputs_of

SHOWN_LINES = 12  # of a difference between two texts
SHOWN_WIDTH = 200  # characters of each
_JSON_MIME = re.compile(r"application/(.*\+)?json")
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
_KINDS = {
    kind.name: kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}


class RecordError(ConfigError):
    """The notebook holds no record that can be run again."""


@dataclass(frozen=True)
class Finding:
    """What is not as it was, or (``is_gap``) cannot be known to be: it is never taken for equal."""

    what: str
    is_gap: bool = False

    def __post_init__(self) -> None:
        # It may quote a notebook, which may be anybody's, and is shown on a terminal.
        object.__setattr__(self, "what", strip_controls(self.what))


@dataclass(frozen=True)
class RecordedTool:
    """A tool as its catalogue has it: what a cell needs to call it."""

    name: str
    description: str
    signature: inspect.Signature


@dataclass(frozen=True)
class RecordedRun:
    """One cell of a transcript: what ran, where, and what came of it.

    ``number`` is its place among the code cells, from 1. ``calls`` is None if its tool calls were not
    recorded; ``calls_told`` are those that the transcript names, the first of ``calls_made``. ``outputs`` are
    a notebook's, ``late`` is what cells before it had written after their end.
    """

    number: int
    source: str
    by: By
    owner: Owner
    kernel_id: str
    python: str
    cwd: str | None
    variant: tuple[str, ...]
    status: CellStatus
    exit_code: int | None
    timeout: float | None
    max_tool_calls: int | None
    bytes_total: int | None
    truncated: bool
    masked: bool
    outputs: tuple[dict[str, Any], ...]
    late: str = ""
    calls_told: tuple[str, ...] = ()
    calls_made: int = 0
    calls: tuple[RecordedCall, ...] | None = None
    tools: tuple[RecordedTool, ...] = ()


def recorded_runs(notebook: Mapping[str, Any]) -> list[RecordedRun]:
    """Return what ran in a session, in order; raises RecordError."""
    try:
        told = notebook["metadata"].get(NOTEBOOK_KEY)
        cells = list(notebook["cells"])
        is_known = isinstance(told, Mapping) and told.get("version") == VERSION
    except _MALFORMED:
        is_known = False
    if not is_known:
        raise RecordError(
            "it is no recorded session; record one with `hermes-kernel run --save`, or with transcript=…"
        )
    runs = []
    number = 0
    for cell in cells:
        try:
            if cell["cell_type"] != "code":
                continue
            number += 1
            ran = cell["metadata"].get(CELL_KEY)
            if ran is not None and ran.get("ran") is not False:
                runs.append(_run(number, cell, ran, told.get("tools", {})))
        except _MALFORMED as error:
            raise RecordError(
                f"the record of code cell {number} is not as it was written "
                f"({type(error).__name__}: {_shown(str(error))}); record the session again"
            ) from error
    return runs


def compared(recorded: RecordedRun, result: CellResult) -> list[Finding]:
    """Hold a result against the record of the same cell."""
    findings: list[Finding] = []
    if result.status is not recorded.status:
        findings.append(Finding(f"status: was {recorded.status.value}, is {result.status.value}"))
    elif recorded.exit_code is not None and result.exit_code != recorded.exit_code:
        findings.append(Finding(f"exit code: was {recorded.exit_code}, is {result.exit_code}"))
    was = _shown_by_cell(recorded.outputs, recorded.status)
    now = _shown_by_cell(outputs_of(result), result.status)
    findings += _outputs_compared(was, now, masked=recorded.masked)
    total = result.truncation.bytes_total
    if recorded.bytes_total is not None and total != recorded.bytes_total:
        findings.append(Finding(f"bytes written: were {recorded.bytes_total:,}, are {total:,}"))
    if recorded.truncated or result.truncation.truncated or result.is_shortened:
        findings.append(Finding("the output is cut: only what is shown could be compared", is_gap=True))
    if recorded.masked or result.is_masked:
        findings.append(Finding("secrets are masked in the output: they could not be compared", is_gap=True))
    if recorded.late != _late_text(result):
        findings.append(
            Finding("what cells before it wrote after their end is not the same text", is_gap=True)
        )
    return [*findings, *_calls_compared(recorded, result)]


def _shown_by_cell(outputs: Sequence[dict[str, Any]], status: CellStatus) -> Sequence[dict[str, Any]]:
    """Return outputs without the sentence on how the cell ended: its status is compared, not its limit."""
    if status in (CellStatus.OK, CellStatus.ERROR) or not outputs:
        return outputs
    is_ending = outputs[-1]["output_type"] == "error" and outputs[-1]["ename"] == status.name
    return outputs[:-1] if is_ending else outputs


def _calls_compared(recorded: RecordedRun, result: CellResult) -> list[Finding]:
    """Say which tool calls nobody can hold against a record."""
    if recorded.calls is None and recorded.calls_made:
        names = _shown(", ".join(map(_on_one_line, dict.fromkeys(recorded.calls_told))))
        said = f"{recorded.calls_made} tool calls are not recorded ({names}): record with --record-tools"
        return [Finding(said, is_gap=True)]
    known = len(recorded.calls or ())
    if recorded.calls_made <= known:
        return []
    findings = [Finding(f"of {recorded.calls_made} tool calls {known} are recorded: no more", is_gap=True)]
    if result.calls_made != recorded.calls_made:
        findings.append(Finding(f"tool calls: were {recorded.calls_made}, are {result.calls_made}"))
    return findings


class NeverAnsweredError(ToolError):
    """The cell had ended before the tool answered."""


@dataclass
class ToolAnswers:
    """Answers the tool calls of one cell from its record. Not safe from many threads: the caller locks.

    ``cleaner`` takes the secrets out of what is said of a call.
    """

    recorded: RecordedRun
    cleaner: Cleaner
    findings: list[Finding] = field(default_factory=list)
    _taken: set[int] = field(default_factory=set)
    _made: dict[str, int] = field(default_factory=dict)

    def answer(self, tool: str, arguments: Mapping[str, Any], place: Sequence[Any]) -> Any:
        """Return what the tool gave then; raises ToolError if it failed then, or is not recorded so.

        Raises NeverAnsweredError if it did not answer then: its cell is to wait for it, as it did.
        Looked for by tool and arguments, first at the same place among the calls of the tool: calls that ran
        side by side may come in another order.
        """
        ordinal = self._made.get(tool, 0)
        self._made[tool] = ordinal + 1
        given = arguments_of(arguments, place)
        index = self._found(tool, ordinal, digest_of(given))
        name = f"{_on_one_line(tool)} call {ordinal + 1}"
        if index is None:
            shown = self.cleaner.mask(json_text(given))
            self._note(f"{name}: was not made with these arguments: {_shown(shown)}")
            raise ToolError(f"{tool}: this call is not in the record")
        self._taken.add(index)
        call = (self.recorded.calls or ())[index]
        for part in call.cut:
            self._note(f"{name}: its {_on_one_line(part)} are cut in the record", is_gap=True)
        for part in call.masked:
            self._note(f"{name}: secrets are masked in its {_on_one_line(part)}", is_gap=True)
        if not call.answered:
            raise NeverAnsweredError(f"{tool}: the cell ended before this call was answered")
        if call.error is not None:
            raise ToolError(call.error)
        if "result" in call.cut:
            raise ToolError(f"{tool}: the result of this call is too large to be in the record")
        return None if call.result is None else json.loads(call.result)

    def finish(self) -> list[Finding]:
        """Return what was found, now that the cell is over."""
        for index, call in enumerate(self.recorded.calls or ()):
            if index not in self._taken:
                shown = self.cleaner.mask(call.arguments or "")
                name = f"{_on_one_line(call.tool)} call {call.ordinal + 1}"
                self._note(f"{name}: was made, and is not: {_shown(shown)}")
        return self.findings

    def _found(self, tool: str, ordinal: int, digest: str) -> int | None:
        """Return the place of the record of a call, None if there is none."""
        own = [
            (index, call)
            for index, call in enumerate(self.recorded.calls or ())
            if call.tool == tool and index not in self._taken
        ]
        same = [index for index, call in own if call.digest == digest]
        here = [index for index, call in own if call.ordinal == ordinal]
        if both := set(same).intersection(here):
            return both.pop()
        if same:
            return same[0]
        # What it was given is not known as it was: its place alone says that it is this one.
        unknown = [index for index, call in own if index in here and "arguments" in (*call.cut, *call.masked)]
        return unknown[0] if unknown else None

    def _note(self, what: str, *, is_gap: bool = False) -> None:
        self.findings.append(Finding(what, is_gap))


Answering = Callable[[str, dict[str, Any], Sequence[Any], Cancelled], Any]
"""Serves a call: its tool's name, its arguments by name and by place, and what is set when the cell ends."""


def tools_that_answer(tools: Iterable[RecordedTool], answer: Answering) -> list[Tool]:
    """Return tools that look to a cell as they did, and are served by *answer*."""
    return [_tool(recorded, answer) for recorded in tools]


def _tool(recorded: RecordedTool, answer: Answering) -> Tool:
    parameters = list(recorded.signature.parameters.values())
    ours = "context_of_a_replayed_call"
    while ours in recorded.signature.parameters:
        ours += "_"

    def handler(*place: Any, **arguments: Any) -> Any:
        context: ToolCallContext = arguments.pop(ours)
        return answer(recorded.name, arguments, place, context.cancelled)

    # A parameter for the context is none that a cell sees.
    context = inspect.Parameter(ours, inspect.Parameter.KEYWORD_ONLY, annotation=ToolCallContext)
    has_rest = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - has_rest, context)
    handler.__signature__ = recorded.signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return Tool(recorded.name, handler, description=recorded.description)


def _run(
    number: int, cell: Mapping[str, Any], ran: Mapping[str, Any], tools: Mapping[str, Any]
) -> RecordedRun:
    kernel, owner = ran["kernel"], ran["owner"]
    record = ran.get("tool_record")
    catalogue = [] if record is None else _entries(tools, _text(ran["tools"]))
    names = [_text(call["name"]) for call in ran.get("tool_calls", [])]
    outputs = tuple(dict(output) for output in cell["outputs"])
    _comparable(outputs)
    return RecordedRun(
        number=number,
        source=_text(_joined(cell["source"])),
        by=By(ran["by"]),
        owner=Owner(_text(owner["session"]), owner["child"], _text(owner["scope"])),
        kernel_id=_text(kernel["id"]),
        python=_text(kernel["python"]),
        cwd=None if kernel["cwd"] is None else _text(kernel["cwd"]),
        variant=tuple(map(_text, kernel["variant"])),
        status=CellStatus(ran["status"]),
        exit_code=_optional(int, ran.get("exit_code")),
        timeout=_limit((int, float), ran.get("timeout")),
        max_tool_calls=_limit(int, ran.get("max_tool_calls")),
        bytes_total=_limit(int, ran.get("bytes")),
        truncated=bool(ran.get("truncated") or ran.get("shortened")),
        masked=bool(ran.get("masked")),
        outputs=outputs,
        late="".join(_text(late["text"]) for late in ran.get("late_output", [])),
        calls_told=tuple(names),
        calls_made=max(_limit(int, ran.get("tool_calls_made")) or 0, len(names)),
        calls=None if record is None else tuple(map(_call, record)),
        tools=tuple(map(_recorded_tool, catalogue)),
    )


def _call(told: Mapping[str, Any]) -> RecordedCall:
    return RecordedCall(
        _text(told["tool"]),
        _whole(told["ordinal"]),
        _text(told["digest"]),
        _json_or_none(told.get("arguments")),
        _json_or_none(told.get("result")),
        None if told.get("error") is None else _text(told["error"]),
        tuple(map(_text, told.get("cut", ()))),
        tuple(map(_text, told.get("masked", ()))),
        answered=told.get("answered") is not False,
    )


def _entries(tools: Mapping[str, Any], digest: str) -> Sequence[Any]:
    entries: Sequence[Any] = tools.get(digest, [])
    if digest not in tools and digest != digest_of([]):
        raise KeyError(f"the catalogue {digest[:12]}")
    _check_tools(entries)
    return entries


def _check_tools(entries: Sequence[Any]) -> None:
    """Raise ConfigError, a ValueError, for tools that no cell could be given."""
    ToolSet.of(tools_that_answer(map(_recorded_tool, entries), lambda *_: None))


def _recorded_tool(entry: Mapping[str, Any]) -> RecordedTool:
    parameters = [_parameter(parameter) for parameter in entry["parameters"]]
    returns = inspect.Signature.empty if "returns" not in entry else _text(entry["returns"])
    signature = inspect.Signature(parameters, return_annotation=returns)
    return RecordedTool(_text(entry["name"]), _text(entry["description"]), signature)


def _parameter(entry: Mapping[str, Any]) -> inspect.Parameter:
    name = _text(entry["name"])
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no parameter")
    default: Any = inspect.Parameter.empty
    if "default" in entry:
        default = entry["default"]
    elif "default_text" in entry:
        default = _Written(_text(entry["default_text"]))
    annotation = inspect.Parameter.empty if "annotation" not in entry else _text(entry["annotation"])
    return inspect.Parameter(name, _KINDS[entry["kind"]], default=default, annotation=annotation)


@dataclass(frozen=True)
class _Written:
    """A default that is no JSON: only how it is written is known."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _outputs_compared(
    was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], *, masked: bool
) -> list[Finding]:
    before, after = _comparable(was), _comparable(now)
    findings = []
    for number, (old, new) in enumerate(zip(before, after, strict=False), start=1):
        if old != new and not (masked and old[0] == new[0] and _fits(old[1], new[1])):
            findings.append(Finding(f"output {number} differs:\n{_difference(old, new)}"))
    if len(before) != len(after):
        rest = before[len(after) :] or after[len(before) :]
        kinds = ", ".join(kind for kind, _ in rest)
        findings.append(Finding(f"outputs: were {len(before)}, are {len(after)} ({kinds})"))
    return findings


def _comparable(outputs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the kind and the text of each output: what is to be the same in another run.

    Not the number of the cell, and of an exception not its traceback: both say where it ran.
    """
    told: list[tuple[str, str]] = []
    for kind, run in groupby(outputs, key=lambda output: output.get("name") or output["output_type"]):
        if kind in ("stdout", "stderr"):
            told.append((kind, "".join(_text(_joined(output["text"])) for output in run)))
        elif kind == "error":
            told += [(kind, f"{_text(output['ename'])}: {_text(output['evalue'])}") for output in run]
        else:
            told += [(_text(kind), _bundle(output)) for output in run]
    return told


def _bundle(output: Mapping[str, Any]) -> str:
    """Return a display as text: a line for each type that is short, so that a difference is readable."""
    data = dict(output["data"])
    plain = data.pop("text/plain", None)
    others = {
        mime: value if _JSON_MIME.fullmatch(mime) else _joined(value) for mime, value in sorted(data.items())
    }
    lines = [f"{_sorted_json(mime)}: {_sorted_json(value)}" for mime, value in others.items()]
    if metadata := output.get("metadata"):
        lines.append(f"metadata: {_sorted_json(metadata)}")
    text = "" if plain is None else f"text/plain: {_text(_joined(plain))}"
    return "\n".join([*lines, *([text] if text else [])])


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _late_text(result: CellResult) -> str:
    return "".join(late.text for late in result.late_output)


def _joined(text: Any) -> Any:
    """A notebook's file may hold a text as its lines."""
    is_lines = isinstance(text, list) and all(isinstance(line, str) for line in text)
    return "".join(text) if is_lines else text


def _fits(masked: str, text: str) -> bool:
    """Whether a text is the masked one with something in the place of each mask."""
    first, *rest = masked.split(MASK)
    if not rest or not text.startswith(first):
        return False
    *between, last = rest
    at = len(first)
    for piece in between:
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return text.endswith(last) and at <= len(text) - len(last)


def _difference(old: tuple[str, str], new: tuple[str, str]) -> str:
    was, now = ([f"({kind})", *text.splitlines()] for kind, text in (old, new))
    if was == now:
        return "  in the ends of its lines"
    lines = list(difflib.unified_diff(was, now, "was", "is", lineterm="", n=1))[2:]
    shown = [f"  {_shown(line)}" for line in lines if not line.startswith("@@")]
    more = len(shown) - SHOWN_LINES
    return "\n".join([*shown[:SHOWN_LINES], *([f"  … {more} lines more"] if more > 0 else [])])


def _shown(text: str) -> str:
    """Return the beginning of a text that may come from anybody, as a terminal can show it."""
    return strip_controls(text[: SHOWN_WIDTH * 10])[:SHOWN_WIDTH]


def _on_one_line(name: str) -> str:
    """Return the beginning of a name that a notebook gives, so that it begins no line of its own."""
    return _shown(name).replace("\n", " ")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} stands where it has a text")
    return value


def _json_or_none(value: object) -> str | None:
    if value is not None:
        json.loads(_text(value))
    return None if value is None else _text(value)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} stands where it has a number")
    return value


def _limit(kind: type | tuple[type, ...], value: Any) -> Any:
    number = _optional(kind, value)
    if number is not None and not 0 <= number < math.inf:
        raise ValueError(f"{number} is no limit")
    return number


def _optional(kind: type | tuple[type, ...], value: Any) -> Any:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"a {type(value).__name__} stands where it has a number")
    return value
