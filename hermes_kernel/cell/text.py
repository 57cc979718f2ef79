"""What a cell wrote, turned into what a model reads.

The steps, in their order: `fold` to the last frame, `strip_controls`, `bound`, whatever masks secrets, `cut`.
`StreamCleaner` does the two in the middle for text that is told while the cell still runs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import plain_text

Piece = tuple[str, str]
"""The name of a stream and a text that was written to it."""

_STRING_LIMIT = 4096
_LINE_LIMIT = 1000
_BLOCK_LIMIT = 64 * 1024
_WORD_LIMIT = 256

# C0 but \t, \n, \b and \r; DEL and C1; marks, embeddings, overrides and isolates of direction.
_NEVER_SHOWN = r"\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"

# What a control may begin: CSI; OSC; DCS, SOS, PM or APC; any other escape. A string ends at the latest with
# its line or frame, so that a lost end costs little, and lines can be stripped alone.
_SEQUENCE = rf"""
    (?: (?: (?<=\x9b) | (?<=\x1b)\[ ) [0-?]*+ [\ -/]*+ [@-~]?
      | (?: (?<=\x9d) | (?<=\x1b)\] ) [^\x07\x18\x1a\x1b\x9c\r\n]{{0,{_STRING_LIMIT}}}+ (?:[\x07\x9c]|\x1b\\)?
      | (?: (?<=[\x90\x98\x9e\x9f]) | (?<=\x1b)[PX^_] )
        [^\x18\x1a\x1b\x9c\r\n]{{0,{_STRING_LIMIT}}}+ (?:\x9c|\x1b\\)?
      | (?<=\x1b) [\ -/]*+ [0-~]?
    )?
"""
_ERASE = re.compile(r"(?:\x1b\[|\x9b)[012]?K")

_UNFINISHED = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z"
    rf"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x1b\x9c\r\n]{{0,{_STRING_LIMIT}}}\Z"
    r"|\x1b[ -/]*\Z"
)
_ENDS_STRING = "\x07\x18\x1a\x1b\x9c\r\n"
_BEGINS_STRING = re.compile(r"[\x90\x98\x9d-\x9f]")
_CONTROL = re.compile(rf"[\x08\r{_NEVER_SHOWN}] {_SEQUENCE}", re.VERBOSE)
_MOTIONLESS = re.compile(rf"[{_NEVER_SHOWN}] (?!(?<=\x1b)\[[012]?K|(?<=\x9b)[012]?K) {_SEQUENCE}", re.VERBOSE)
_MOTION = re.compile(rf"([\r\x08]|{_ERASE.pattern})")
_UNWANTED = re.compile(rf"[\x08\r{_NEVER_SHOWN}\ud800-\udfff]")
_PLAIN_BYTES = bytes([*b"\t\n", *range(0x20, 0x7F)])

_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY")
_KEY_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY")
_KEY_MARK = 64  # no shorter than what the two match


def fold(pieces: Sequence[Piece]) -> list[Piece]:
    """Reduce what was overwritten, by carriage returns and backspaces, to what a terminal shows at the end.

    Each stream is folded on its own and every character counts as one column. A folded line stands where its
    last fragment stood, every other text stays in its place; a piece without text is left out.
    """
    overwritten = {name for name, text in pieces if "\r" in text or "\b" in text}
    folded = {name: _FoldedStream() for name in overwritten}
    for place, (name, text) in enumerate(pieces):
        if name in folded:
            folded[name].write(place, text)
    for stream in folded.values():
        stream.end()
    shown = [
        (name, folded[name].text_at(place) if name in folded else text)
        for place, (name, text) in enumerate(pieces)
    ]
    return [(name, text) for name, text in shown if text]


def rejoin(pieces: Sequence[Piece]) -> list[Piece]:
    """Give a sequence that ends in a later piece of its stream to that piece; one without an end goes."""
    carried: dict[str, str] = {}
    whole: list[Piece] = []
    for name, piece in pieces:
        text = carried.pop(name, "") + piece
        end = _end_of_whole(text)
        if end < len(text):
            carried[name] = text[end:]
        whole.append((name, text[:end]))
    return whole


def _end_of_whole(text: str) -> int:
    """Return where the sequence begins that has not ended at the end of *text*, else its length.

    At most one match is tried for each kind of beginning: a text may consist of beginnings.
    """
    size = len(text)
    start = max(size - _STRING_LIMIT - 8, 0)
    last = max(text.rfind(end, start) for end in _ENDS_STRING)
    if last >= 0 and text[last] == "\x1b" and _UNFINISHED.match(text, last):
        return last
    behind = max(last + 1, start)
    string = _BEGINS_STRING.search(text, max(behind, size - _STRING_LIMIT - 1))
    control = text.rfind("\x9b", behind)
    if control >= 0 and _UNFINISHED.match(text, control):
        return control if string is None else min(control, string.start())
    return size if string is None else string.start()


@dataclass
class _FoldedStream:
    """One stream's text, folded, by the place of the piece it belongs to."""

    _texts: dict[int, list[str]] = field(default_factory=dict)
    _line: list[tuple[int, str]] = field(default_factory=list)
    """The fragments of the line that has not ended yet, each with its place."""

    def write(self, place: int, text: str) -> None:
        first, newline, rest = text.partition("\n")
        self._line.append((place, first))
        if newline:
            self._end_line("\n")
            whole, newline, last = rest.rpartition("\n")
            if "\r" in whole or "\b" in whole:
                whole = "\n".join(map(_folded_line, whole.split("\n")))
            self._put(place, whole + newline)
            self._line.append((place, last))

    def end(self) -> None:
        # No newline follows: a "\r" at the very end is one that returns.
        self._end_line("")

    def text_at(self, place: int) -> str:
        return "".join(self._texts.get(place, ()))

    def _end_line(self, newline: str) -> None:
        line = "".join(fragment for _, fragment in self._line)
        shown = line.rstrip("\r") if newline else line
        place = self._line[-1][0]
        if "\r" in shown or "\b" in shown:
            self._put(place, _last_frame(shown))
        else:
            room = len(shown)
            for fragment_place, fragment in self._line:
                self._put(fragment_place, fragment[:room])
                room -= len(fragment[:room])
        self._put(place, newline)
        self._line.clear()

    def _put(self, place: int, text: str) -> None:
        if text:
            self._texts.setdefault(place, []).append(text)


def _folded_line(line: str) -> str:
    """Fold a line whose newline has been taken off."""
    line = line.rstrip("\r")
    return _last_frame(line) if "\r" in line or "\b" in line else line


def _last_frame(line: str) -> str:
    line = _MOTIONLESS.sub("", line)
    if "\b" not in line and not _ERASE.search(line):
        return _overlaid(line.split("\r")).rstrip(" \t")
    row = _Row()
    runs = iter(_MOTION.split(line))
    row.write(next(runs))
    for motion, run in zip(runs, runs, strict=True):
        if motion == "\r":
            row.column = 0
        elif motion == "\b":
            row.column = max(0, row.column - 1)
        else:
            row.erase(motion[-2])
        if run:
            row.write(run)
    return row.text.rstrip(" \t")


def _overlaid(frames: list[str]) -> str:
    """Lay each frame over those before it, of which only what is longer can still be seen."""
    shown = ""
    for frame in reversed(frames):
        if len(frame) > len(shown):
            shown += frame[len(shown) :]
    return shown


@dataclass
class _Row:
    """One row of an endless terminal.

    Only the columns from *start* to *end* are not blank, whatever the cells hold: erasing moves a mark, so
    that a long row is not paid for again with every short frame. The column is never behind *end*.
    """

    column: int = 0
    _cells: list[str] = field(default_factory=list)
    _start: int = 0
    _end: int = 0

    @property
    def text(self) -> str:
        return " " * self._start + "".join(self._cells[self._start : self._end])

    def write(self, run: str) -> None:
        begin, behind = self.column, self.column + len(run)
        self._cells[begin:behind] = run
        if self._start == self._end:
            self._start, self._end = begin, behind
        if behind < self._start:
            self._cells[behind : self._start] = " " * (self._start - behind)
        self._start = min(self._start, begin)
        self._end = max(self._end, behind)
        self.column = behind

    def erase(self, how: str) -> None:
        """Erase as CSI K does: "1" to the start and with the cursor, "2" all, anything else to the end."""
        if how == "2":
            self._start = self._end = self.column
        elif how == "1":
            self._start = min(max(self._start, self.column + 1), self._end)
        else:
            self._end = self.column
            self._start = min(self._start, self._end)


def strip_controls(text: str) -> str:
    """Remove what a terminal would obey and nothing a reader would see: only newlines and tabs are left.

    The text is valid Unicode afterwards: lone surrogates become their backslash escapes.
    """
    # Without plain ASCII, which is most of it, little is left to look through.
    unusual = text.encode("utf-8", "surrogatepass").translate(None, _PLAIN_BYTES)
    if not unusual or not _UNWANTED.search(unusual.decode("utf-8", "surrogatepass")):
        return text
    return plain_text(_CONTROL.sub("", text))


@dataclass(frozen=True)
class Bounded:
    """A text of which the middle may be missing: *gap* bytes of UTF-8; without a gap there is no tail."""

    head: str
    gap: int
    tail: str


def bound(text: str, budget: int, margin: int) -> Bounded:
    """Drop the middle of a text that is far over the budget; a margin stays at each side of the exact cut."""
    raw = _bytes(text)
    if len(raw) <= budget + 2 * margin:
        return Bounded(text, 0, "")
    front = front_share(budget)
    head = raw[: _boundary_before(raw, front + margin)]
    tail = raw[_boundary_behind(raw, len(raw) - (budget - front + margin)) :]
    return Bounded(_text(head), len(raw) - len(head) - len(tail), _text(tail))


@dataclass(frozen=True)
class Shown:
    """What of a text is shown, and how many bytes of UTF-8 it had and has; a notice is not among them."""

    text: str
    bytes_total: int
    bytes_shown: int
    truncated: bool


def cut(
    bounded: Bounded, budget: int, *, notice: Callable[[int, int], str], extra: int = 0, lines: bool = True
) -> Shown:
    """Show at most *budget* bytes: 40 % from the front, 60 % from the end, between them *notice* on its line.

    *notice* is given the bytes left out and the bytes in all; *extra* were lost before, somewhere in the
    middle. With *lines*, long lines among others are clamped before, and a mark in them tells so: where that
    is enough, there is no notice.
    """
    head, tail = _bytes(bounded.head), _bytes(bounded.tail)
    if not bounded.gap:
        head, tail = head + tail, b""
    there = len(head) + len(tail)
    total = there + bounded.gap + extra
    if total == there <= budget:
        return Shown(bounded.head + bounded.tail, total, total, truncated=False)

    front_parts, back_parts = [_Part(head)], [_Part(tail)]
    if lines and there > budget and (b"\n" in head[:-1] or b"\n" in tail[:-1]):
        limit = max(_LINE_LIMIT, budget // 10)
        front_parts, back_parts = list(_clamped(head, limit)), list(_clamped(tail, limit))

    share = front_share(budget)
    if bounded.gap:
        front, back = _first(front_parts, share), _last(back_parts, budget - share)
    elif (size := _size(front_parts)) > budget:
        front, back = _first(front_parts, share), _last(front_parts, budget - share)
    elif extra:
        front = _first(front_parts, share)
        back = _last(front_parts, size - _size(front))
    else:
        return Shown(_joined(front_parts), total, size, truncated=True)

    shown = _size(front) + _size(back)
    before = _joined(front)
    if before and not before.endswith("\n"):
        before += "\n"
    return Shown(f"{before}{notice(total - shown, total)}\n{_joined(back)}", total, shown, truncated=True)


@dataclass(frozen=True)
class _Part:
    """A run of the text, or a mark of ours in it."""

    raw: bytes
    ours: bool = False

    @property
    def size(self) -> int:
        return 0 if self.ours else len(self.raw)


def _clamped(raw: bytes, limit: int) -> Iterator[_Part]:
    """Take the middle out of each line that is longer than *limit*."""
    done = 0
    for line in re.finditer(rb"(?m)^[^\n]{%d,}+" % (limit + 1), raw):
        start = _boundary_before(raw, line.start() + limit // 2)
        end = _boundary_behind(raw, line.end() - limit // 2)
        yield _Part(raw[done:start])
        yield _Part(f"…[{end - start:,} bytes TRUNCATED]…".encode(), ours=True)
        done = end
    yield _Part(raw[done:])


def _first(parts: list[_Part], budget: int) -> list[_Part]:
    """Return the first parts, of together at most *budget* bytes."""
    kept: list[_Part] = []
    for part in parts:
        if part.size > budget:
            kept.append(_Part(part.raw[: _boundary_before(part.raw, budget)]))
            break
        kept.append(part)
        budget -= part.size
    return kept


def _last(parts: list[_Part], budget: int) -> list[_Part]:
    """Return the last parts, of together at most *budget* bytes."""
    kept: list[_Part] = []
    for part in reversed(parts):
        if part.size > budget:
            kept.append(_Part(part.raw[_boundary_behind(part.raw, len(part.raw) - budget) :]))
            break
        kept.append(part)
        budget -= part.size
    return kept[::-1]


def _size(parts: list[_Part]) -> int:
    return sum(part.size for part in parts)


def _joined(parts: list[_Part]) -> str:
    return _text(b"".join(part.raw for part in parts))


def front_share(budget: int) -> int:
    """Return how much of a budget what stands at the front gets: 40 %."""
    return budget * 2 // 5


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _boundary_before(raw: bytes, at: int) -> int:
    """Return the last position up to *at* that is not inside a character."""
    while 0 < at < len(raw) and raw[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _boundary_behind(raw: bytes, at: int) -> int:
    """Return the first position from *at* that is not inside a character."""
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


class StreamCleaner:
    """Cleans text that is told while the cell runs: never half of an escape sequence or of a short line.

    *clean* sees whole lines, without controls, and a private key in PEM form as one text. Of a line that does
    not end, at most about *hold* characters wait for the rest of it.
    """

    def __init__(self, clean: Callable[[str], str], hold: int = 4096) -> None:
        self._clean = clean
        self._hold = hold
        self._streams: dict[str, _Held] = {}

    def feed(self, stream: str, text: str) -> list[Piece]:
        """Take in what was written to *stream*, return what can be told of it now."""
        held = self._streams.setdefault(stream, _Held())
        return self._told(stream, held.add(text, self._hold))

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        rests = [(stream, held.release()) for stream, held in self._streams.items()]
        return [piece for stream, rest in rests for piece in self._told(stream, rest)]

    def _told(self, stream: str, text: str) -> list[Piece]:
        cleaned = self._clean(text) if text else ""
        return [(stream, cleaned)] if cleaned else []


@dataclass
class _Held:
    """What of one stream is not told yet: a block that is open, and behind it a line that is not whole."""

    _block: list[str] = field(default_factory=list)
    _block_size: int = 0
    _line: str = ""

    def add(self, text: str, hold: int) -> str:
        line = self._line + text
        whole = max(line.rfind("\n"), line.rfind("\r")) + 1
        if len(line) - whole > hold:
            whole = max(whole, _place_to_part(line, len(line) - hold))
        self._line = line[whole:]
        return self._but_open_block(strip_controls(line[:whole]))

    def release(self) -> str:
        text = "".join(self._block) + strip_controls(self._line)
        self._block.clear()
        self._block_size = 0
        self._line = ""
        return text

    def _but_open_block(self, text: str) -> str:
        if self._block:
            if not _KEY_ENDS.search(text):
                return self._hold_block("", text)
            text = "".join(self._block) + text
            self._block.clear()
            self._block_size = 0
        start = _open_block(text)
        return self._hold_block(text[:start], text[start:])

    def _hold_block(self, before: str, text: str) -> str:
        if text:
            self._block.append(text)
            self._block_size += len(text)
        if self._block_size <= _BLOCK_LIMIT:
            return before
        block = "".join(self._block)
        self._block.clear()
        self._block_size = 0
        return before + block


def _open_block(text: str) -> int:
    """Return where the line stands that begins a private key of which the end is not there."""
    at = 0
    while begin := _KEY_BEGINS.search(text, at):
        end = _KEY_ENDS.search(text, begin.end())
        if end is None:
            return text.rfind("\n", 0, begin.start()) + 1
        at = end.end()
    return len(text)


def _place_to_part(line: str, at: int) -> int:
    """Return a place not far before *at* where no word, mark of a key or escape sequence is torn."""
    for place in range(at, max(0, at - _WORD_LIMIT), -1):
        if line[place - 1].isspace():
            at = place
            break
    mark = line.rfind("-----", max(0, at - _KEY_MARK), at + len("-----"))
    if mark >= 0:
        at = mark
    for control in _CONTROL.finditer(line, max(0, at - 2 * _STRING_LIMIT)):
        if control.end() > at:
            return min(at, control.start())
    return at
