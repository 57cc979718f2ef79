"""What can go wrong on our side, and the JSON that an agent reads then.

A cell that fails is a value (``CellResult``), never an exception. The exceptions here say that nothing ran.
This file also runs in the kernel's interpreter: standard library only, Python 3.10.
"""

import json
import math
from collections.abc import Callable
from typing import Any

JSON_LIMIT = 100_000
"""Most characters of one result's JSON; a tool result above it is cut off by the agent (contract ENT-04)."""

LOG_SHOWN = 4_000
"""Characters of the end of a log that an error shows."""

_CUT_ORDER = ("output", "error", "warning", "hint")
_DEPTH = 100
_NESTED_TEXT = 300
_NESTED_ITEMS = 20
_HEAD_SHARE = 0.4  # of what is kept, the rest is the tail: the end of an output says how it ended


def common_keys() -> dict[str, Any]:
    """Return the keys that every result has, with the values of a call that ran nothing."""
    return {
        "status": "error",
        "output": "",
        "exit_code": -1,
        "tool_calls_made": 0,
        "duration_seconds": 0.0,
        "kernel": {"mode": "session", "reused": False, "execution_count": 0, "state_reset": False},
        "stdout_truncated": False,
        "stdout_bytes_captured": 0,
        "stdout_bytes_total": 0,
        "stdout_bytes_omitted": 0,
    }


def plain_text(text: str) -> str:
    """Return *text* as valid Unicode: a lone surrogate becomes its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Return a JSON-like *value* with all its texts valid Unicode, and null for what JSON does not have.

    What is nested more than *depth* levels deep is replaced by an ellipsis.
    """
    match value:
        case str():
            return plain_text(value)
        case float() if not math.isfinite(value):
            return None
        case dict() | list() | tuple() if depth == 0:
            return "…"
        case dict():
            return {plain_text(str(key)): plain(item, depth - 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth - 1) for item in value]
    return value


def cut_to_limit(payload: dict[str, Any], limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return *payload* so that its JSON has at most *limit* characters, with its long texts cut if needed.

    Lists and their texts are shortened first; then ``output`` is cut, then ``error``, ``warning`` and
    ``hint``. A text that is cut keeps its head, its tail and a notice that says how much is missing.
    """
    payload = plain(payload)
    if len(json_text(payload)) <= limit:
        return payload
    payload = {key: value if isinstance(value, str) else _shortened(value) for key, value in payload.items()}
    for key in _CUT_ORDER:
        text = payload.get(key)
        excess = len(json_text(payload)) - limit
        if excess <= 0:
            break
        if isinstance(text, str):
            payload[key] = _cut_to(text, len(json_text(text)) - excess)
    return payload


def bounded_json(payload: dict[str, Any], limit: int = JSON_LIMIT) -> str:
    """Serialise *payload* in at most *limit* characters (see ``cut_to_limit``); non-ASCII text is kept."""
    return json_text(cut_to_limit(payload, limit))


def json_text(value: object) -> str:
    """Return *value* as JSON; raises ValueError for NaN, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _shortened(value: Any) -> Any:
    """Bound what is nested: it names things, and is not where a result is told."""
    match value:
        case str() if len(value) > _NESTED_TEXT:
            return value[:_NESTED_TEXT] + "…"
        case dict():
            return {key[:_NESTED_TEXT]: _shortened(item) for key, item in list(value.items())[:_NESTED_ITEMS]}
        case list():
            return [_shortened(item) for item in value[:_NESTED_ITEMS]]
    return value


def _cut_to(text: str, room: int) -> str:
    """Cut *text* so that its JSON form has at most *room* characters, or down to the notice alone."""
    kept = len(text)
    while True:
        # A character takes up to six in JSON, and not all take the same: approach from above.
        head = int(kept * _HEAD_SHARE)
        tail = kept - head
        notice = f"\n[... {len(text) - kept} of {len(text)} characters TRUNCATED from this result ...]\n"
        cut = text[:head] + notice + text[len(text) - tail :]
        size = len(json_text(cut))
        if size <= room:
            return cut
        if kept == 0:
            return min(text, cut, key=lambda shown: len(json_text(shown)))
        kept = min(kept - 1, kept * max(room, 0) // size)


class HermesKernelError(Exception):
    """Base of everything that this package raises."""

    def to_dict(self) -> dict[str, Any]:
        """Return the common keys of a result with this error's text."""
        return {**common_keys(), "error": str(self)}

    def to_json(self) -> str:
        """Return the JSON an agent reads: every common key, status ``error``, at most 100 000 characters."""
        return bounded_json(self.to_dict())


class ConfigError(HermesKernelError, ValueError):
    """The call asks for something that cannot be; nothing was started and nothing was lost."""


class InterpreterError(ConfigError):
    """The interpreter that was asked for cannot run a kernel; the text says what helps."""


class KernelStartError(HermesKernelError, RuntimeError):
    """A kernel did not come up; whatever had been started is gone again.

    ``argv`` is the command that was run, ``exit_code`` the code it ended with (negative: the signal; None:
    it had not ended) and ``log_tail`` the end of what it wrote, of which the text shows the last lines.
    """

    def __init__(
        self,
        message: str,
        *,
        argv: tuple[str, ...] = (),
        exit_code: int | None = None,
        log_tail: str = "",
    ) -> None:
        self.message = message
        self.argv = argv
        self.exit_code = exit_code
        self.log_tail = log_tail
        super().__init__(message)

    def mask(self, mask: Callable[[str], str]) -> None:
        """Take out what nobody may read; *mask* returns a text without it.

        The end of the log is cut after that: a secret that straddles the cut is whole before.
        """
        self.message = mask(self.message)
        self.log_tail = mask(self.log_tail)[-LOG_SHOWN:]
        self.args = (self.message,)

    def __str__(self) -> str:
        lines = [self.message]
        if self.argv:
            lines.append("command: " + " ".join(self.argv))
        if self.exit_code is not None:
            lines.append(f"exit code: {self.exit_code}")
        if self.log_tail:
            lines.append("last lines of its log:\n" + self.log_tail[-LOG_SHOWN:])
        return "\n".join(lines)


class ToolError(HermesKernelError):
    """A tool that the cell called has failed; the text is the tool's own."""


class ToolBudgetExceeded(ToolError):
    """The cell has used up the tool calls that it was granted."""
