"""What a model reads of what a cell has shown: folded, without control characters, masked, cut.

The order of the steps is that of the words above: a secret cannot hide behind an escape sequence, and none
straddles the cut.
"""

import base64
import binascii
import hashlib
import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from ..errors import json_text, plain
from .outputs import CellError, Gap, Item, OutputCollector, Text, TooLarge
from .text import Bounded, Shown, bound, cut, fold, front_share, rejoin, strip_controls

INLINE = 1024 * 1024  # characters of an image that stay in the result
SHORT_VALUE = 2_000  # characters of an exception's text that a result shows, beside its traceback
_STREAMS = ("stdout", "stderr")
_NO_TEXT = re.compile(r"[A-Za-z0-9+/\s]*={0,2}\s*")
# What is not ended goes on to the end, as in a browser: so each character is looked at a few times only.
_TAG = re.compile(
    r"<(script|style)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)|<[^<>]{0,5000}+>", re.DOTALL | re.IGNORECASE
)
_SAYS_NOTHING = re.compile(r"<[\w.<>]+ object(?: at 0x[0-9a-f]+)?>|<[\w.<>]+ at 0x[0-9a-f]+>")
"""The text of an object that has none of its own."""

_BREAKS = ("<tr", "<br", "<p>", "<li", "<di", "<h1", "<h2", "<h3")
_BLANK_LINES = re.compile(r"(?<![ \t])[ \t]*+\n(?:[ \t]*+\n)+")


class Cleaner(Protocol):
    """What takes secrets out of text."""

    margin: int
    """Characters: nothing that is taken out is longer."""

    def mask(self, text: str) -> str:
        """Return the text without them."""


class Store(Protocol):
    """Keeps what is too large for a result. Returns the path of the file, None if it could not be kept."""

    def keep(self, name: str, data: bytes) -> str | None:
        """Keep a file with this name."""


@dataclass(frozen=True)
class Budget:
    """How much is shown, in bytes of UTF-8; ``spill`` is how much of what is not is kept in a file."""

    output: int = 50_000
    stderr: int = 10_000
    spill: int = 5_000_000


@dataclass(frozen=True)
class StreamCount:
    """Bytes of one stream: all that was written, and what is shown of it."""

    total: int
    shown: int
    truncated: bool


@dataclass(frozen=True)
class Presented:
    """The texts of a result. ``images`` names each image: its type, its bytes, its file if it has one.

    ``masked``: whether something was taken out of them; ``shortened``: whether a display or an exception is
    not there as a whole.
    """

    text: str = ""
    stdout: str = ""
    stdout_and_displays: str = ""
    stderr: str = ""
    value: str | None = None
    outputs: tuple[dict[str, Any], ...] = ()
    error: CellError | None = None
    counts: Mapping[str, StreamCount] = field(default_factory=dict)
    bytes_total: int = 0
    bytes_shown: int = 0
    truncated: bool = False
    spill_path: str | None = None
    images: tuple[dict[str, Any], ...] = ()
    masked: bool = False
    shortened: bool = False


class Nowhere:
    """A store that keeps nothing."""

    def keep(self, name: str, data: bytes) -> str | None:
        """Keep nothing."""
        return None


class _Noticing:
    """Another cleaner, and whether it has found something."""

    def __init__(self, cleaner: Cleaner) -> None:
        self._cleaner = cleaner
        self.margin = cleaner.margin
        self.has_masked = False

    def mask(self, text: str) -> str:
        """Return the text without secrets."""
        cleaned = self._cleaner.mask(text)
        self.has_masked = self.has_masked or cleaned != text
        return cleaned


class Unmasked:
    """A cleaner that takes nothing out."""

    margin = 0

    def mask(self, text: str) -> str:
        """Return the text."""
        return text


def present(
    outputs: OutputCollector,
    error: CellError | None,
    *,
    budget: Budget | None = None,
    cleaner: Cleaner | None = None,
    store: Store | None = None,
) -> Presented:
    """Return what is to be read of *outputs*; *error* is the exception that ended the cell."""
    return _Presenter(outputs, error, budget or Budget(), cleaner or Unmasked(), store or Nowhere()).present()


def masked(value: Any, cleaner: Cleaner) -> Any:
    """Return a JSON-like value with all its texts masked."""
    return _masked_json(plain(value), cleaner.mask)


class _Presenter:
    def __init__(
        self,
        outputs: OutputCollector,
        error: CellError | None,
        budget: Budget,
        cleaner: Cleaner,
        store: Store,
    ) -> None:
        self._outputs = outputs
        self._budget = budget
        self._cleaner = _Noticing(cleaner)
        self._store = store
        self._images: list[dict[str, Any]] = []
        self._is_shortened = outputs.left_out > 0 or outputs.is_shortened
        self._items: list[Item] = [self._readable(item) for item in _merged(_folded(outputs.items()))]
        self._error = None if error is None else self._short(error)
        errors = [n for n, item in enumerate(self._items) if isinstance(item, dict) and "ename" in item]
        self._last = errors[-1] if errors and error is not None else None  # it stands at the end of the text

    def present(self) -> Presented:
        said = "" if self._error is None else _ended(self._error.traceback)
        everything = [item for n, item in enumerate(self._items) if n != self._last]
        items = _without_middle(everything, "stderr", self._budget.stderr, self._cleaner)
        room = max(self._budget.output - len(said.encode()), 0)
        size, gap = _extent(items)
        is_cut = items is not everything or gap > 0 or size > room or self._has_long_stdout()
        where = self._spill(everything, said) if is_cut else _Where()
        shown = self._fit(items, room, where)
        streams = {name: self._stream(name, where) for name in _STREAMS}
        total = sum(count.total for _, count in streams.values())
        notebook = tuple(self._notebook())
        return Presented(
            text=_ended(shown.text) + said if said else shown.text,
            stdout=streams["stdout"][0],
            stdout_and_displays=self._with_displays(streams["stdout"][0], where),
            stderr=streams["stderr"][0],
            value=self._value(),
            outputs=notebook,
            error=self._error,
            counts={name: count for name, (_, count) in streams.items()},
            bytes_total=total,
            bytes_shown=min(shown.bytes_shown, total) if is_cut else total,
            truncated=is_cut,
            spill_path=where.path,
            images=tuple(self._images),
            masked=self._cleaner.has_masked,
            shortened=self._is_shortened,
        )

    def _has_long_stdout(self) -> bool:
        texts = (item.text for item in self._items if isinstance(item, Text) and item.name == "stdout")
        return sum(map(_size, texts)) > self._budget.output

    def _fit(
        self, items: list[Item], budget: int, where: "_Where", *, said: str = "", lines: bool = True
    ) -> Shown:
        """Return as much of the items as fits, *said* after them; what is missing is said where it was."""
        text, gap, marks = _joined(items, end=said)
        size = _size(text)
        if size > budget:
            if gap:
                text = _joined([item for item in items if not isinstance(item, Gap)], end=said).text
            return _cut(text, budget, self._cleaner, where, extra=gap, lines=lines)
        return Shown(self._cleaner.mask(text), size - marks + gap, size - marks, truncated=gap > 0)

    def _stream(self, name: str, where: "_Where") -> tuple[str, StreamCount]:
        own: list[Item] = [item for item in self._items if not isinstance(item, dict) and item.name == name]
        budget = self._budget.output if name == "stdout" else self._budget.stderr
        shown = self._fit(own, budget, where)
        total = self._outputs.total(name)
        count = min(shown.bytes_shown, total) if shown.truncated else total
        return shown.text, StreamCount(total, count, shown.truncated)

    def _with_displays(self, stdout: str, where: "_Where") -> str:
        """Return what was written to the standard output and displayed, in order."""
        displays = [item for item in self._items if isinstance(item, dict) and _is_display(item)]
        if not displays:
            return stdout
        own: list[Item] = [
            item
            for item in self._items
            if (_is_display(item) if isinstance(item, dict) else item.name == "stdout")
        ]
        return self._fit(own, self._budget.output, where).text

    def _value(self) -> str | None:
        for item in reversed(self._items):
            if isinstance(item, dict) and item["output_type"] == "execute_result":
                text = item["data"].get("text/plain")
                if not isinstance(text, str):
                    return None
                return _cut(text, self._budget.output, self._cleaner, _Where()).text
        return None

    def _short(self, error: CellError) -> CellError:
        """The exception is always shown: its class, its text and its last frames."""
        evalue = self._cleaner.mask(strip_controls(error.evalue))
        traceback = strip_controls(error.traceback)
        if len(error.evalue) > SHORT_VALUE:
            self._is_shortened = True
            short = _cut(strip_controls(error.evalue), SHORT_VALUE, self._cleaner, _Where()).text
            traceback = traceback.replace(strip_controls(error.evalue), short)
            evalue = short
        traceback = _cut(
            traceback, min(self._budget.stderr, self._budget.output), self._cleaner, _Where()
        ).text
        return CellError(self._cleaner.mask(strip_controls(error.ename))[:SHORT_VALUE], evalue, traceback)

    def _spill(self, items: list[Item], said: str) -> "_Where":
        """Keep all that was shown in a file, or as much as may be kept."""
        if self._budget.spill <= 0:
            return _Where()
        kept = self._fit(items, self._budget.spill, _Where(), said=said, lines=False)
        data = kept.text.encode()
        path = self._store.keep(f"output-{hashlib.sha256(data).hexdigest()[:12]}.txt", data)
        if path is None:
            return _Where()
        if kept.truncated:
            return _Where(path, f"{path} holds {kept.bytes_shown:,} of {kept.bytes_total:,}")
        return _Where(path, f"all is in {path}")

    def _readable(self, item: Item) -> Item:
        """Bound and clean a display: its texts are masked, what is too large goes into a file."""
        if not isinstance(item, dict):
            return item
        if "data" not in item:
            error = self._short(CellError(item["ename"], item["evalue"], "\n".join(item["traceback"])))
            lines = error.traceback.split("\n")
            return {**item, "ename": error.ename, "evalue": error.evalue, "traceback": lines}
        data: dict[str, Any] = {}
        readable: dict[str, Any] = {}
        notes = []
        for mime, value in item["data"].items():
            name = self._cleaner.mask(mime)
            kept, note = self._form(mime, name, value)
            if kept is not None:
                data[name], readable[mime] = kept, value
            if note is not None:
                notes.append(note)
        said = data.get("text/plain")
        if not isinstance(said, str) or _SAYS_NOTHING.fullmatch(said):
            text = strip_controls(_as_text(readable))
            said = _cut(text, self._budget.output, self._cleaner, _Where()).text or said or ""
        notes.insert(0, said)
        if whole := "\n".join(filter(None, notes)):
            data["text/plain"] = whole
        return {**item, "data": data, "metadata": self._metadata(item.get("metadata", {}))}

    def _form(self, mime: str, name: str, value: Any) -> tuple[Any, str | None]:
        """Return what is shown of one form of a display, and what is said of what is not."""
        if isinstance(value, TooLarge):
            return None, f"[{name} is left out: too large to be looked at]"
        if isinstance(value, str) and _is_binary(mime):
            return self._image(name, value)
        if isinstance(value, str):
            # Plain text is cut where it is shown: a file holds all.
            return (strip_controls(value) if mime == "text/plain" else self._cut_display(value)), None
        if (size := len(json_text(value))) > self._budget.output:
            self._is_shortened = True
            return None, f"[{name} of {size:,} characters is left out]"
        return _masked_json(value, self._cleaner.mask), None

    def _metadata(self, metadata: Mapping[str, Any]) -> Any:
        if len(json_text(metadata)) > self._budget.output:
            self._is_shortened = True
            return {}
        return _masked_json(metadata, self._cleaner.mask)

    def _image(self, mime: str, value: str) -> tuple[str | None, str | None]:
        size = len(value) * 3 // 4
        image: dict[str, Any] = {"mime": mime, "bytes": size}
        self._images.append(image)
        if len(value) <= INLINE:
            return value if _NO_TEXT.fullmatch(value) else self._cleaner.mask(value), None
        try:
            data = base64.b64decode(value, validate=False)
        except (binascii.Error, ValueError):
            self._is_shortened = True
            return None, f"[{mime} of {len(value):,} characters is not valid base64: left out]"
        extension = re.sub(r"\W", "", mime.rpartition("/")[2].partition("+")[0])[:10] or "bin"
        path = self._store.keep(f"display-{hashlib.sha256(data).hexdigest()[:12]}.{extension}", data)
        image["bytes"] = len(data)
        if path is None:
            self._is_shortened = True
            return None, f"[{mime} of {len(data):,} bytes is left out: too large to show]"
        image["path"] = path
        return None, f"[{mime} of {len(data):,} bytes: {path}]"

    def _notebook(self) -> list[dict[str, Any]]:
        """The outputs as a notebook keeps them, each of a size that can be read."""
        outputs: list[dict[str, Any]] = []
        for item in self._items:
            if isinstance(item, dict):
                outputs.append(self._notebook_form(item))
            elif isinstance(item, Text) and item.text:
                budget = self._budget.output if item.name == "stdout" else self._budget.stderr
                text = _cut(item.text, budget, self._cleaner, _Where()).text
                outputs.append({"output_type": "stream", "name": item.name, "text": text})
        return outputs

    def _notebook_form(self, output: dict[str, Any]) -> dict[str, Any]:
        text = output.get("data", {}).get("text/plain")
        if text is None:
            return dict(output)
        return {**output, "data": {**output["data"], "text/plain": self._cut_display(text)}}

    def _cut_display(self, text: str) -> str:
        shown = _cut(text, max(self._budget.output, 1), self._cleaner, _Where())
        self._is_shortened = self._is_shortened or shown.truncated
        return shown.text


@dataclass(frozen=True)
class _Where:
    """Where what is not shown can be read: the file, and what is said of it."""

    path: str | None = None
    words: str = ""

    def notice(self, omitted: int, total: int) -> str:
        where = f"; {self.words}" if self.words else ""
        return f"[... OUTPUT TRUNCATED: {omitted:,} of {total:,} bytes are left out here{where} ...]"


def _cut(
    text: str, budget: int, cleaner: Cleaner, where: _Where, *, extra: int = 0, lines: bool = True
) -> Shown:
    """Bound, mask and cut a text, in this order."""
    bounded = bound(text, budget, cleaner.margin)
    masked = Bounded(cleaner.mask(bounded.head), bounded.gap, cleaner.mask(bounded.tail))
    return cut(masked, budget, notice=where.notice, extra=extra, lines=lines)


def _ended(text: str) -> str:
    """Return a text that ends with its last line."""
    return text if not text or text.endswith("\n") else f"{text}\n"


def _folded(items: list[Item]) -> list[Item]:
    """Fold and strip what was written to the streams; the rest stays between it."""
    others = {f"#{number}": item for number, item in enumerate(items) if not isinstance(item, Text)}
    pieces = [
        (item.name, item.text) if isinstance(item, Text) else (f"#{number}", "\n")
        for number, item in enumerate(items)
    ]
    return [
        others[name] if name in others else Text(name, strip_controls(text))
        for name, text in fold(rejoin(pieces))
    ]


def _merged(items: list[Item]) -> list[Item]:
    merged: list[Item] = []
    for name, run in groupby(items, key=lambda item: item.name if isinstance(item, Text) else None):
        if name is None:
            merged += run
        else:
            merged.append(Text(name, "".join(item.text for item in run if isinstance(item, Text))))
    return merged


def _without_middle(items: list[Item], name: str, budget: int, cleaner: Cleaner) -> list[Item]:
    """Leave the middle of one stream out where it is longer than *budget* bytes; the rest stays in order.

    What stands at the two cuts is masked before.
    """
    sizes = [_size(item.text) if isinstance(item, Text) and item.name == name else 0 for item in items]
    total = sum(sizes)
    if total <= budget:
        return items
    head = front_share(budget)
    tail = budget - head
    kept: list[Item] = []
    at = 0
    said = False
    for item, size in zip(items, sizes, strict=True):
        start, end = at, at + size
        at = end
        if not size or not isinstance(item, Text):
            kept.append(item)
            continue
        if end <= head or start >= total - tail:
            kept.append(item)
            continue
        data = item.text.encode()
        first = _end_of_head(data, max(head - start, 0), cleaner)
        last = _start_of_tail(data, min(max(end - (total - tail), 0), size), cleaner)
        middle = ""
        if not said:
            said = True
            omitted = total - budget
            middle = f"\n[... STDERR TRUNCATED: {omitted:,} of {total:,} bytes are left out here ...]\n"
        kept.append(Text(name, first + middle + last))
    return kept


def _end_of_head(data: bytes, size: int, cleaner: Cleaner) -> str:
    text = cleaner.mask(data[: size + cleaner.margin].decode("utf-8", "ignore")) if size else ""
    return text.encode()[:size].decode("utf-8", "ignore")


def _start_of_tail(data: bytes, size: int, cleaner: Cleaner) -> str:
    window = data[max(len(data) - size - cleaner.margin, 0) :] if size else b""
    masked = cleaner.mask(window.decode("utf-8", "ignore")).encode()
    return masked[max(len(masked) - size, 0) :].decode("utf-8", "ignore")


class _Joined(NamedTuple):
    """What a person would have read, how many bytes are missing in it, and how many it takes to say so."""

    text: str
    gap: int
    marks: int


def _joined(items: list[Item], *, end: str = "") -> _Joined:
    """Return what a person would have read.

    Values, displays and tracebacks stand on lines of their own, and so does *end*.
    """
    pieces: list[str] = []
    gap = marks = 0
    at_line_start = True
    for item in items:
        if isinstance(item, Gap):
            gap += item.size
            piece = f"[... {item.size:,} bytes of {item.name} are not kept ...]\n"
            piece = piece if at_line_start else f"\n{piece}"
            marks += len(piece)
        elif isinstance(item, Text):
            piece = item.text
        elif "traceback" in item:
            piece = "\n".join(item["traceback"])
        else:
            piece = item["data"].get("text/plain", "")
        if not piece:
            continue
        if isinstance(item, dict):
            if not at_line_start:
                pieces.append("\n")
            pieces.append(piece)
            if not piece.endswith("\n"):
                pieces.append("\n")
            at_line_start = True
        else:
            pieces.append(piece)
            at_line_start = piece.endswith("\n")
    if end and not at_line_start:
        pieces.append("\n")
    return _Joined("".join([*pieces, end]), gap, marks)


def _extent(items: list[Item]) -> tuple[int, int]:
    """Return how many bytes the items take together, and how many are missing."""
    text, gap, _ = _joined(items)
    return _size(text), gap


def _size(text: str) -> int:
    """Return how many bytes of UTF-8 a text takes; of ASCII, without a copy."""
    return len(text) if text.isascii() else len(text.encode())


def _is_display(output: Mapping[str, Any]) -> bool:
    return output.get("output_type") == "display_data"


def _is_binary(mime: str) -> bool:
    media = mime.startswith(("image/", "audio/", "video/")) and mime != "image/svg+xml"
    return media or mime == "application/pdf"


def _as_text(data: Mapping[str, Any]) -> str:
    """Return something to read of a display that has no plain text."""
    for mime in ("text/markdown", "text/latex"):
        if isinstance(data.get(mime), str):
            return str(data[mime])
    if isinstance(data.get("text/html"), str):
        text = _TAG.sub(lambda tag: "\n" if tag[0][:3].lower() in _BREAKS else " ", data["text/html"])
        return _BLANK_LINES.sub("\n", html.unescape(text)).strip()
    if "application/json" in data:
        return json_text(data["application/json"])
    return "".join(f"[{mime}]" for mime in data if _is_binary(mime))


def _masked_json(value: Any, mask: Callable[[str], str]) -> Any:
    match value:
        case str():
            return mask(value)
        case dict():
            return {mask(key): _masked_json(item, mask) for key, item in value.items()}
        case list():
            return [_masked_json(item, mask) for item in value]
    return value
