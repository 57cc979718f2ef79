"""Secrets in what a cell has written: how they are recognised, and the text without them."""

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, quote_plus

from .shapes import RUN, RUN_LEAD, SHAPES, Shape

MASK = "***"
MARGIN = 64 * 1024
"""Characters: no secret is longer, except a longer exact one and a private key without its end."""

SHOWN_FROM = 24
"""Length from which a key keeps its ends, so that the reader recognises which one it was."""
SHOWN_HEAD, SHOWN_TAIL = 6, 4

SHORTEST_SECRET = 4
SHORTEST_IN_BASE64 = 12
SHORTEST_WORTH_MASKING = 12

ROUNDS = 16
"""Passes over one text. A mask can complete another secret; the second pass nearly always finds nothing."""

LONGEST_RUN = 4096
"""Characters of a longer run without a hyphen that are searched for the beginning of a key."""


@dataclass(frozen=True, order=True)
class _Span:
    """Where something to mask stands, and whether nothing of it may be shown."""

    start: int
    end: int
    is_whole: bool


class Masks:
    """Finds the keys of known shapes and the exact values of *secrets*, and masks them.

    ``margin``: no secret is longer, except a private key whose end is missing.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        needles = {needle for secret in secrets for needle in _written_forms(secret)}
        self._needles = sorted(needles, key=lambda needle: (-len(needle), needle))
        self.margin = max([MARGIN, *map(len, needles)])

    def mask(self, text: str) -> str:
        """*text* without its secrets; masking the result again changes nothing."""
        for _ in range(ROUNDS):
            masked = _replace(text, self._spans(text))
            if masked == text:
                break
            text = masked
        return text

    def _spans(self, text: str) -> list[_Span]:
        sketch = _sketch(text)
        spans = list(self._found(text, sketch, self._needles))
        if b"\0" in sketch or (not text.isascii() and _UNSEEN.search(text)):
            spans += self._found_between_unseen(text)
        return _merged(spans)

    def _found_between_unseen(self, text: str) -> Iterator[_Span]:
        """What is found once the characters that nobody sees are out, at its place in *text*."""
        seen = _seen(text)
        gaps: list[int] = []
        needles = [needle for needle in map(_seen, self._needles) if len(needle) >= SHORTEST_SECRET]
        for span in self._found(seen, _sketch(seen), needles):
            gaps = gaps or [match.start() - index for index, match in enumerate(_UNSEEN.finditer(text))]
            last = span.end - 1
            yield _Span(
                span.start + bisect_right(gaps, span.start),
                last + bisect_right(gaps, last) + 1,
                span.is_whole,
            )

    def _found(self, text: str, sketch: bytes, needles: list[str]) -> Iterator[_Span]:
        runs = _runs(text, sketch)
        beginnings = _beginnings(runs)
        for shape in SHAPES:
            place = beginnings if shape.in_run else text
            if place and any(literal in place for literal in shape.literals):
                yield from _matches(shape, text)
        for needle in needles:
            if needle in (runs if _RUN_ONLY.fullmatch(needle) else text):
                yield from _occurrences(needle, text)


def worth_masking(value: str) -> bool:
    """Whether the exact *value* of a variable that was withheld is a secret rather than a setting."""
    value = value.strip()
    if len(value) < SHORTEST_WORTH_MASKING or _is_number(value):
        return False
    if _WORDS.fullmatch(value) or _EMAIL.fullmatch(value):
        return False
    if _URL.match(value):
        return _URL_WITH_PASSWORD.match(value) is not None or _holds_random(value)
    return not any(all(map(_is_path, value.split(separator))) for separator in (":", ";", "\0"))


# Characters that a reader does not see, but that stand between those of a secret: controls, and what Unicode
# calls Default_Ignorable_Code_Point.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f"
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

_WORD_CHARACTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_CONTROLS = frozenset({*range(0x20), 0x7F} - {ord("\n")})
_SKETCH = bytes(ord("x") if c in _WORD_CHARACTERS else 0 if c in _CONTROLS else ord(" ") for c in range(256))
_SHORTEST_RUN = b"x" * RUN
_LONG_RUN = re.compile(_SHORTEST_RUN + b"x*")
_REST_OF_KEY = re.compile(r"[A-Za-z0-9_-]+")
_REST_OF_WORD = re.compile(r"[A-Za-z0-9_]+")
_RUN_ONLY = re.compile(rf"[A-Za-z0-9_-]{{{RUN},}}")

# In repr, JSON and URLs a word can follow an escape that ends in a letter or a digit.
_ESCAPE = re.compile(r"(?:\\[abfnrtv0]|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|%[0-9A-Fa-f]{2})\Z")
_LONGEST_ESCAPE = 6

_WORDS = re.compile(r"[^\W\d_]+(?:[-_. ]+[^\W\d_]+)*[-_. ]*")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@]*:[^/?#]+@")
_ROOTED = re.compile(r"~|\.{0,2}/|[A-Za-z]:[\\/]|\\\\")
_NAME_WORD = r"(?:[A-Z]?[a-z]+(?:[A-Z][a-z]+){0,3}[0-9]{0,4}|[A-Z]+[0-9]{0,4}|[0-9]+[a-z]{0,2})"
_NAME = rf"[-_.+@ ]*{_NAME_WORD}(?:[-_.+@ ]+{_NAME_WORD})*[-_.+@ ]*"
_NAMES = re.compile(rf"{_NAME}(?:[/\\]{_NAME})+[/\\]?")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{27,}={0,2}")
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def _written_forms(secret: str) -> set[str]:
    """The ways in which programs write *secret*; none for a value too short to tell from ordinary text."""
    value = secret.strip() if len(secret.strip()) >= SHORTEST_SECRET else secret
    if len(value) < SHORTEST_SECRET or not value.strip():
        return set()
    raw = value.encode("utf-8", "surrogatepass")
    percent = {quote(raw), quote(raw, safe=""), quote_plus(raw)}
    forms = {
        value,
        *percent,
        *(re.sub("%..", lambda match: match[0].lower(), form) for form in percent),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        repr(raw)[2:-1],
        # Beside a double quote, repr escapes the single ones.
        repr(value + "'\"")[1:-4],
        repr(raw + b"'\"")[2:-4],
        raw.hex(),
        raw.hex().upper(),
    }
    if len(raw) >= SHORTEST_IN_BASE64:
        for lead in range(3):
            text = base64.b64encode(b"\0" * lead + raw).decode()
            # The characters that depend on this value alone, whatever stands before and after it.
            stable = text[-(-lead * 8 // 6) : (lead + len(raw)) * 8 // 6]
            forms |= {stable, stable.replace("+", "-").replace("/", "_")}
    return forms


def _sketch(text: str) -> bytes:
    """*text* as one byte a character: ``x`` of a word, NUL for a control character, else a space."""
    return text.encode("ascii", "replace").translate(_SKETCH)


def _runs(text: str, sketch: bytes) -> str:
    """The long words of *text*, where nearly every key must be: far less to search than the whole."""
    if _SHORTEST_RUN not in sketch:
        return ""
    runs = {text[max(0, match.start() - RUN_LEAD) : match.end()] for match in _LONG_RUN.finditer(sketch)}
    return "\n".join(runs)


def _beginnings(runs: str) -> str:
    """Where a key can begin in long words: at their beginning, or behind a hyphen."""
    if len(runs) < LONGEST_RUN:
        return runs
    return "\n".join(run if "-" in run else run[:LONGEST_RUN] for run in runs.split("\n"))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matches(shape: Shape, text: str) -> Iterator[_Span]:
    pattern = _compiled(shape.pattern)
    group: str | int = "secret" if "secret" in pattern.groupindex else 0
    match = pattern.search(text)
    while match:
        start, end = match.span(group)
        if _begins_word(text, start):
            # The rest of its word goes with a key: cut off from it, the rest could be taken for another.
            end = end if shape.whole else _end_of(_REST_OF_KEY, text, end)
            yield _Span(start, end, shape.whole or end - start < SHOWN_FROM)
        else:
            end = _end_of(_REST_OF_WORD, text, match.start() + 1)
        match = pattern.search(text, end)


def _begins_word(text: str, at: int) -> bool:
    before = text[max(0, at - _LONGEST_ESCAPE) : at]
    return not before or not (before[-1].isalnum() or before[-1] == "_") or _ESCAPE.search(before) is not None


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _occurrences(needle: str, text: str) -> Iterator[_Span]:
    at = text.find(needle)
    while at >= 0:
        yield _Span(at, at + len(needle), is_whole=True)
        at = text.find(needle, at + len(needle))


def _seen(text: str) -> str:
    if text.isascii():  # three times as fast
        return text.encode().translate(None, bytes(_CONTROLS)).decode()
    return _UNSEEN.sub("", text)


def _merged(spans: list[_Span]) -> list[_Span]:
    """*spans* in order, those that overlap as one: of these nothing is shown if that holds for any."""
    merged: list[_Span] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if last and (span.start < last.end or (span.start == last.end and span.is_whole and last.is_whole)):
            merged[-1] = _Span(last.start, max(last.end, span.end), last.is_whole or span.is_whole)
        else:
            merged.append(span)
    return merged


def _replace(text: str, spans: list[_Span]) -> str:
    if not spans:
        return text
    pieces, done = [], 0
    for span in spans:
        pieces.append(text[done : span.start])
        pieces.append(MASK if span.is_whole else _with_ends(_seen(text[span.start : span.end])))
        done = span.end
    return "".join([*pieces, text[done:]])


def _with_ends(key: str) -> str:
    return key[:SHOWN_HEAD] + MASK + key[-SHOWN_TAIL:]


def _is_number(value: str) -> bool:
    for read in (float, lambda text: int(text, 0)):
        try:
            read(value)
        except ValueError:
            continue
        return True
    return False


def _is_path(value: str) -> bool:
    if _BASE64.fullmatch(value) and _looks_random(value):
        return False
    if not value or _ROOTED.match(value):
        return True
    return _NAMES.fullmatch(value) is not None


def _holds_random(url: str) -> bool:
    """Whether a part of *url* is a key: that of a webhook, or the user of a DSN."""
    parts = re.findall(r"[A-Za-z0-9_-]{20,}", url)
    return any(_looks_random(part) and not _UUID.fullmatch(part) for part in parts)


def _looks_random(text: str) -> bool:
    """Whether letters, capitals and digits alternate more often than in names: pieces shorter than three."""
    pieces = _PIECES.findall(text)
    return len(pieces) > 3 and sum(map(len, pieces)) < 3 * len(pieces)
