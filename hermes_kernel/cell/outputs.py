"""Everything that one cell showed, in the order in which it was shown."""

import re
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from ..errors import json_text, plain, plain_text
from .message import Message

StreamName = Literal["stdout", "stderr"]

HOLD = 32 * 1024 * 1024
"""Characters of one cell that are kept, displays and all."""

TAIL = 1024 * 1024
"""Characters that are kept of the end, if there are more."""

NESTED = 4 * 1024 * 1024
"""Size of the lists and mappings of one display that are kept."""

LONGEST_ERROR = 512 * 1024
"""Characters of an exception's text that are kept, and of its traceback."""

SMALL = 256  # characters that a value counts for beside its text: what it costs to look at it
MOST_TYPES = 64  # of one display
LONGEST_TYPE = 200
LONGEST_ID = 1000
MOST_CLEARED = 1000  # ids of displays that were cleared and are known by it
_MIME = re.compile(r"[\w.+-]+/[\w.+-]+(;[\x20-\x7e]*)?", re.ASCII)
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


@dataclass(frozen=True)
class TooLarge:
    """Stands in a display for a value that is more than can be looked at."""


Item = Text | Gap | dict[str, Any]
"""What was shown; a mapping is an output of a notebook: a display, a value, an error.

A value of a display may be TooLarge.
"""


@dataclass
class _Stream:
    name: str
    parts: list[str]


@dataclass
class _Gap:
    name: str
    size: int


@dataclass
class _Content:
    """What a display shows; displays that were updated together share it."""

    data: dict[str, Any]
    metadata: dict[str, Any]


@dataclass
class _Display:
    output: dict[str, Any]
    content: _Content

    @property
    def whole(self) -> dict[str, Any]:
        return {**self.output, "data": self.content.data, "metadata": self.content.metadata}


@dataclass
class _Error:
    output: dict[str, Any]
    size: int


@dataclass
class _SameId:
    """The displays of one display_id, and what they take together."""

    count: int = 0
    size: int = 0
    _differing: list[_Display] = field(default_factory=list)
    _shared: _Content = field(default_factory=lambda: _Content({}, {}))

    def add(self, display: _Display, size: int) -> None:
        self._differing.append(display)
        self.count += 1
        self.size += size

    def update(self, content: _Content, size: int) -> None:
        for display in self._differing:
            display.content = self._shared
        self._differing.clear()
        self._shared.data, self._shared.metadata = content.data, content.metadata
        self.size = size


@dataclass(frozen=True)
class _Bundle:
    """What can be kept of the content of a display, as it came, and its size."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    size: int
    is_whole: bool

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "_Bundle":
        data: dict[str, Any] = {}
        size, room = SMALL, NESTED
        for mime, value in islice(content["data"].items(), MOST_TYPES):
            if len(mime) > LONGEST_TYPE or not _MIME.fullmatch(mime):
                continue
            if isinstance(value, str):
                data[mime], taken = value, SMALL + len(value)
            elif (taken := size_of(value, room)) <= room:
                data[mime] = value
                room -= taken
            else:
                data[mime], taken = TooLarge(), SMALL
            size += taken + SMALL + len(mime)
        metadata = content.get("metadata", {})
        taken = size_of(metadata, room)
        has_metadata = taken <= room
        if not has_metadata:
            metadata, taken = {}, SMALL
        has_data = len(data) == len(content["data"]) and TooLarge() not in data.values()
        return cls(data, metadata, size + taken, has_data and has_metadata)

    def kept(self) -> _Content:
        return _Content(_mime_bundle(self.data), plain(self.metadata))


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

    is_shortened: bool = field(default=False, init=False)
    """Whether a display is not here as a whole."""

    _shown: list[_Stream | _Gap | _Display | _Error] = field(default_factory=list, init=False)
    _same_id: dict[str, _SameId] = field(default_factory=dict, init=False)
    _cleared: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False)
    _written_late: dict[str, int] = field(default_factory=dict, init=False)
    _held: int = field(default=0, init=False)
    _tail: deque[tuple[str, str]] = field(default_factory=deque, init=False)
    _tail_size: int = field(default=0, init=False)
    _dropped: dict[str, int] = field(default_factory=dict, init=False)
    _clear_pending: bool = field(default=False, init=False)
    _error: CellError | None = field(default=None, init=False)
    _error_without_room: _Error | None = field(default=None, init=False)

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

    def add_late(self, message: Message) -> None:
        """Take in what the kernel has sent after the end of the cell, and not counted in ``written``."""
        self.add(message)
        if message.msg_type == "stream":
            text = message.content["text"].encode("utf-8", "backslashreplace")
            self._count_late(message.content["name"], _skipped(message) + len(text))

    def add_rest(self, name: StreamName, missing: int, rest: bytes, undrained: bytes = b"") -> int:
        """Add what a kernel had written to a stream and could not send before it ended.

        *missing* is the number of bytes that no message has brought, *rest* the last bytes of the stream,
        *undrained* what the kernel had not even read. Returns how many of the missing ones are lost.
        """
        self._count_late(name, max(missing, 0) + len(undrained))
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
                case _Display():
                    items.append(shown.whole)
                case _Error(output):
                    items.append(output)
        items += [Gap(name, size) for name, size in self._dropped.items()]
        items += [Text(name, plain_text(text)) for name, text in self._tail]
        if self._error_without_room is not None:
            items.append(self._error_without_room.output)
        return items

    @property
    def size(self) -> int:
        """About how many characters there are."""
        last = 0 if self._error_without_room is None else self._error_without_room.size
        return self._held + self._tail_size + last

    def total(self, name: str) -> int:
        """Return how many bytes were written to a stream: as the kernel says, or else as was received."""
        if self.written is not None:
            return self.written.get(name, 0) + self._written_late.get(name, 0)
        own = [item for item in self.items() if not isinstance(item, dict) and item.name == name]
        return sum(item.size if isinstance(item, Gap) else len(item.text.encode()) for item in own)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was shown."""
        if self._tail or self._dropped or self._error_without_room is not None:
            return False
        return not any(not isinstance(shown, _Stream) or any(shown.parts) for shown in self._shown)

    @property
    def error(self) -> CellError | None:
        """The last exception that was shown."""
        return self._error

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
                text = shown.content.data.get("text/plain")
                return text if isinstance(text, str) else None
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

    def _count_late(self, name: str, size: int) -> None:
        self._written_late[name] = self._written_late.get(name, 0) + size

    def _take_room(self, size: int) -> bool:
        """Take room for a display; return whether there is some."""
        if self._held + size > self.hold:
            self.left_out += 1
            return False
        self._held += size
        return True

    def _show(self, message: Message) -> None:
        self._clear_if_pending()
        content = message.content
        display_id = _display_id(content)
        bundle = _Bundle.of(content)
        size = bundle.size + len(display_id or "")
        self.is_shortened = self.is_shortened or not bundle.is_whole
        if not self._take_room(size):
            return
        is_value = message.msg_type == "execute_result"
        output: dict[str, Any] = {"output_type": "execute_result" if is_value else "display_data"}
        if is_value:
            output["execution_count"] = _count(content.get("execution_count"))
        display = _Display(output, bundle.kept())
        self._shown.append(display)
        if display_id is not None:
            self._same_id.setdefault(display_id, _SameId()).add(display, size)

    def _update(self, message: Message) -> None:
        """Change the displays of an id; that of an earlier cell is shown here, for there it cannot be."""
        display_id = _display_id(message.content)
        if display_id is None:
            return
        displays = self._same_id.get(display_id)
        if displays is None:
            if display_id not in self._cleared:
                self._show(message)
            return
        bundle = _Bundle.of(message.content)
        size = displays.count * (bundle.size + len(display_id))
        self.is_shortened = self.is_shortened or not bundle.is_whole
        if self._held - displays.size + size > self.hold:
            self.left_out += displays.count
            return
        self._held += size - displays.size
        displays.update(bundle.kept(), size)

    def fail(self, error: CellError) -> None:
        """Show an exception. The last one is kept also if there is no room for it."""
        self._clear_if_pending()
        if self._error_without_room is not None:
            self._error_without_room = None
            self.left_out += 1
        self._error = error
        output = {
            "output_type": "error",
            "ename": error.ename,
            "evalue": error.evalue,
            "traceback": error.traceback.split("\n"),
        }
        shown = _Error(output, SMALL + len(error.ename) + len(error.evalue) + len(error.traceback))
        if self._held + shown.size > self.hold:
            self._error_without_room = shown
        else:
            self._held += shown.size
            self._shown.append(shown)

    def _clear_if_pending(self) -> None:
        if self._clear_pending:
            self._clear()

    def _clear(self) -> None:
        self._clear_pending = False
        self._remember_cleared()
        self._shown.clear()
        self._error_without_room = None
        self._tail.clear()
        self._dropped.clear()
        self._held = self._tail_size = 0

    def _remember_cleared(self) -> None:
        self._cleared.update(dict.fromkeys(self._same_id))
        self._same_id.clear()
        while len(self._cleared) > MOST_CLEARED:
            self._cleared.popitem(last=False)

    def _stream_text(self, name: str) -> str:
        return "".join(item.text for item in self.items() if isinstance(item, Text) and item.name == name)


def size_of(value: object, limit: int) -> int:
    """Return about how many characters a JSON-like value takes; above *limit*, anything above it."""
    size = 0
    waiting = [value]
    while waiting and size <= limit:
        item = waiting.pop()
        size += SMALL
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, dict | list | tuple):
            if size + SMALL * len(item) > limit:  # not even copied
                return limit + 1
            waiting += item
            if isinstance(item, dict):
                waiting += item.values()
    return size


def _display_id(content: Mapping[str, Any]) -> str | None:
    display_id = content.get("transient", {}).get("display_id")
    return display_id if isinstance(display_id, str) and len(display_id) <= LONGEST_ID else None


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
    """Return the exception that a message tells of, as valid Unicode; without the middle of a huge text."""
    said, whole = _without_middle(evalue), "\n".join(traceback)
    if said != evalue and whole.endswith(evalue):
        whole = whole[: len(whole) - len(evalue)] + said
    return CellError(plain_text(_without_middle(ename)), plain_text(said), plain_text(_without_middle(whole)))


def _without_middle(text: str) -> str:
    if len(text) <= LONGEST_ERROR:
        return text
    half = LONGEST_ERROR // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are not kept ...]\n{text[-half:]}"


def _mime_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return *data* as a notebook may hold it: text for every type but the JSON ones."""
    bundle: dict[str, Any] = {}
    for mime, raw in data.items():
        value = plain(raw)
        if _JSON_MIME.fullmatch(mime) or isinstance(value, str | TooLarge):
            bundle[mime] = value
        elif isinstance(value, list) and all(isinstance(line, str) for line in value):
            bundle[mime] = "".join(value)
        elif value is not None:
            bundle[mime] = json_text(value)
    return bundle


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
