"""Everything that one cell showed, in the order in which it was shown."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import json_text, plain, plain_text
from .message import Message

StreamName = Literal["stdout", "stderr"]

HOLD = 32 * 1024 * 1024
"""Characters of one cell that are kept, displays and all."""

TAIL = 1024 * 1024
"""Characters that are kept of the end, if there are more."""

SMALL = 64  # characters that something else than a text counts for
_JSON_MIME = re.compile(r"application/(.*\+)?json")


@dataclass(frozen=True)
class CellError:
    """The exception that ended a cell: its class, its text and the whole traceback as one string."""

    ename: str
    evalue: str
    traceback: str


@dataclass(frozen=True)
class Text:
    """What was written to a stream."""

    name: str
    text: str


@dataclass(frozen=True)
class Gap:
    """What was written to a stream and is not there: how many bytes."""

    name: str
    size: int


Item = Text | Gap | dict[str, Any]
"""What was shown; a mapping is an output of a notebook: a display, a value, an error."""


@dataclass
class _Stream:
    name: str
    parts: list[str]


@dataclass
class _Gap:
    name: str
    size: int


@dataclass
class _Display:
    output: dict[str, Any]
    display_id: str | None


@dataclass
class OutputCollector:
    """Collects the IOPub messages of one cell.

    Knows ``clear_output`` (also with ``wait``) and display updates, so that what is collected is what a
    notebook would show at the end. A kernel bounds what it sends; of one that does not, the first *hold*
    characters are kept and the last *tail*.
    """

    hold: int = HOLD
    tail: int = TAIL
    written: Mapping[str, int] | None = field(default=None, init=False)
    """How many bytes the kernel says the cell has written to each stream."""

    left_out: int = field(default=0, init=False)
    """How many displays are not here, because there were too many."""

    _shown: list[_Stream | _Gap | _Display] = field(default_factory=list, init=False)
    _held: int = field(default=0, init=False)
    _tail: deque[tuple[str, str]] = field(default_factory=deque, init=False)
    _tail_size: int = field(default=0, init=False)
    _dropped: dict[str, int] = field(default_factory=dict, init=False)
    _clear_pending: bool = field(default=False, init=False)
    _errors: list[CellError] = field(default_factory=list, init=False)

    def add(self, message: Message) -> None:
        """Take in one message; a type that shows nothing is ignored."""
        content = message.content
        match message.msg_type:
            case "clear_output":
                self._clear_pending = True
                if not content.get("wait"):
                    self._clear()
            case "stream":
                if skipped := _skipped(message):
                    self._shown.append(_Gap(content["name"], skipped))
                self._write(content["name"], content["text"])
            case "display_data" | "execute_result":
                self._show(message)
            case "update_display_data":
                self._update(message)
            case "error":
                self.fail(cell_error(content["ename"], content["evalue"], content.get("traceback", [])))

    def add_rest(self, name: StreamName, missing: int, rest: bytes, undrained: bytes = b"") -> int:
        """Add what a kernel had written to a stream and could not send before it ended.

        *missing* is the number of bytes that no message has brought, *rest* the last bytes of the stream,
        *undrained* what the kernel had not even read. Returns how many of the missing ones are lost.
        """
        kept = rest[-missing:] if missing > 0 else b""
        if missing > len(kept):
            self._shown.append(_Gap(name, missing - len(kept)))
        if text := (kept + undrained).decode("utf-8", "backslashreplace"):
            self._write(name, text)
        return max(missing, 0) - len(kept)

    def items(self) -> list[Item]:
        """Return all that was shown, in order."""
        items: list[Item] = []
        for shown in self._shown:
            match shown:
                case _Stream(name, parts):
                    text = "".join(parts)
                    parts[:] = [text]  # one text in the memory instead of two
                    items.append(Text(name, plain_text(text)))
                case _Gap(name, size):
                    items.append(Gap(name, size))
                case _Display(output):
                    items.append(output)
        items += [Gap(name, size) for name, size in self._dropped.items()]
        items += [Text(name, plain_text(text)) for name, text in self._tail]
        return items

    @property
    def size(self) -> int:
        """About how many characters there are."""
        return self._held + self._tail_size

    def total(self, name: str) -> int:
        """Return how many bytes were written to a stream: as the kernel says, or else as was received."""
        if self.written is not None:
            return self.written.get(name, 0)
        own = [item for item in self.items() if not isinstance(item, dict) and item.name == name]
        return sum(item.size if isinstance(item, Gap) else len(item.text.encode()) for item in own)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was shown."""
        if self._tail or self._dropped:
            return False
        return not any(not isinstance(shown, _Stream) or any(shown.parts) for shown in self._shown)

    @property
    def error(self) -> CellError | None:
        """The last exception that was shown."""
        return self._errors[-1] if self._errors else None

    @property
    def stdout(self) -> str:
        """All text on the standard output."""
        return self._stream_text("stdout")

    @property
    def stderr(self) -> str:
        """All text on the standard error; tracebacks are not part of it."""
        return self._stream_text("stderr")

    @property
    def value(self) -> str | None:
        """The text form of the last expression, None if it had none."""
        for shown in reversed(self._shown):
            if isinstance(shown, _Display) and shown.output["output_type"] == "execute_result":
                text: str | None = shown.output["data"].get("text/plain")
                return text
        return None

    def _write(self, name: str, text: str) -> None:
        self._clear_if_pending()
        if self._held + len(text) > self.hold:
            self._write_tail(name, text)
            return
        self._held += len(text)
        last = self._shown[-1] if self._shown else None
        if isinstance(last, _Stream) and last.name == name:
            last.parts.append(text)
        else:
            self._shown.append(_Stream(name, [text]))

    def _write_tail(self, name: str, text: str) -> None:
        """Keep the end of what is too much."""
        if len(text) > self.tail:
            self._drop(name, text[: -self.tail])
            text = text[-self.tail :]
        self._tail.append((name, text))
        self._tail_size += len(text)
        while self._tail_size > self.tail:
            first, dropped = self._tail.popleft()
            self._tail_size -= len(dropped)
            self._drop(first, dropped)

    def _drop(self, name: str, text: str) -> None:
        self._dropped[name] = self._dropped.get(name, 0) + len(text.encode("utf-8", "backslashreplace"))

    def _has_room(self, data: Mapping[str, Any]) -> bool:
        """Take room for a display; return whether there is some."""
        size = _size(data)
        if self._held + size > self.hold:
            self.left_out += 1
            return False
        self._held += size
        return True

    def _show(self, message: Message) -> None:
        self._clear_if_pending()
        content = message.content
        if not self._has_room(content["data"]):
            return
        output: dict[str, Any] = {
            "output_type": message.msg_type,
            "data": _mime_bundle(content["data"]),
            "metadata": plain(content.get("metadata", {})),
        }
        if message.msg_type == "execute_result":
            output["execution_count"] = _count(content.get("execution_count"))
        display_id = content.get("transient", {}).get("display_id")
        self._shown.append(_Display(output, display_id if isinstance(display_id, str) else None))

    def _update(self, message: Message) -> None:
        content = message.content
        wanted = content.get("transient", {}).get("display_id")
        for shown in self._shown:
            if isinstance(shown, _Display) and wanted is not None and shown.display_id == wanted:
                held = self._held - _size(shown.output["data"]) + _size(content["data"])
                if held > self.hold:  # one update may change many displays
                    self.left_out += 1
                    continue
                self._held = held
                shown.output["data"] = _mime_bundle(content["data"])
                shown.output["metadata"] = plain(content.get("metadata", {}))

    def fail(self, error: CellError) -> None:
        """Show an exception."""
        self._clear_if_pending()
        self._errors.append(error)
        output = {
            "output_type": "error",
            "ename": error.ename,
            "evalue": error.evalue,
            "traceback": error.traceback.split("\n"),
        }
        self._shown.append(_Display(output, None))

    def _clear_if_pending(self) -> None:
        if self._clear_pending:
            self._clear()

    def _clear(self) -> None:
        self._clear_pending = False
        self._shown.clear()
        self._tail.clear()
        self._dropped.clear()
        self._held = self._tail_size = 0

    def _stream_text(self, name: str) -> str:
        return "".join(item.text for item in self.items() if isinstance(item, Text) and item.name == name)


def _size(data: Mapping[str, Any]) -> int:
    """Return about how many characters a display takes."""
    return sum(len(value) if isinstance(value, str) else SMALL for value in data.values())


def _skipped(message: Message) -> int:
    """Return how many bytes the kernel has not sent before this stream message."""
    hermes = message.metadata.get("hermes")
    return count_of(hermes.get("skipped")) if isinstance(hermes, dict) else 0


def count_of(value: object) -> int:
    """Return a count that a kernel tells, 0 for what cannot be one."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if is_count else 0  # type: ignore[return-value]


def stream_end(message: Message) -> int | None:
    """Return how many bytes the kernel had written to its stream by the end of this stream message."""
    hermes = message.metadata.get("hermes")
    end = hermes.get("end") if isinstance(hermes, dict) else None
    return end if isinstance(end, int) and not isinstance(end, bool) and 0 <= end < 2**63 else None


def cell_error(ename: str, evalue: str, traceback: list[str]) -> CellError:
    """Return the exception that a message tells of, as valid Unicode."""
    return CellError(plain_text(ename), plain_text(evalue), plain_text("\n".join(traceback)))


def _mime_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return *data* as a notebook may hold it: text for every type but the JSON ones."""
    bundle: dict[str, Any] = {}
    for mime, value in plain(dict(data)).items():
        if _JSON_MIME.fullmatch(mime) or isinstance(value, str):
            bundle[mime] = value
        elif isinstance(value, list) and all(isinstance(line, str) for line in value):
            bundle[mime] = "".join(value)
        elif value is not None:
            bundle[mime] = json_text(value)
    return bundle


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
