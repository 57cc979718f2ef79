"""Python text as cells: the percent format that editors know."""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ..errors import ConfigError


class CellKind(Enum):
    """What a cell is for."""

    CODE = "code"
    MARKDOWN = "markdown"
    RAW = "raw"


@dataclass(frozen=True)
class Cell:
    """One cell of a script or a notebook; ``title`` is what stands behind a script's marker."""

    kind: CellKind
    source: str
    title: str = ""

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return self.kind is CellKind.CODE and bool(self.source.strip())


_MARKER = re.compile(r"#[ \t]?%%+(?P<rest>(?:\s.*)?)$")
_KIND = re.compile(r"\[(?P<kind>markdown|md|raw)\]")
_KINDS = {"markdown": CellKind.MARKDOWN, "md": CellKind.MARKDOWN, "raw": CellKind.RAW}


def decoded(raw: bytes, name: str) -> str:
    """Return Python text as Python reads it: UTF-8 unless it declares another encoding.

    Raises ConfigError if it cannot be read so.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return io.TextIOWrapper(io.BytesIO(raw), encoding).read()
    except (SyntaxError, UnicodeError, LookupError):  # LookupError: one that turns bytes into bytes
        raise ConfigError(f"{name} is not UTF-8 text; save it as UTF-8 or declare its encoding") from None


def cells_of(text: str) -> list[Cell]:
    """Split Python text at its ``# %%`` markers; what stands before the first is a cell of its own.

    ``# %% [markdown]`` and ``# %% [raw]`` start cells that do not run.
    """
    lines = text.split("\n")
    bounds = [*sorted(_marker_lines(text)), len(lines)]
    before = _code(lines[: bounds[0]], "")
    cells = [before] if before.source else []
    for start, end in itertools.pairwise(bounds):
        cells.append(_cell(lines[start], lines[start + 1 : end]))
    return cells


def _marker_lines(text: str) -> Iterator[int]:
    """Find the lines, from 0, with a marker that is a comment and not part of a longer string."""
    lines = text.split("\n")
    candidates = {number for number, line in enumerate(lines) if _MARKER.match(line)}
    if not candidates:
        return
    seen = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            seen = token.end[0]
            if token.type == tokenize.COMMENT and token.start[0] - 1 in candidates:
                yield token.start[0] - 1
    except (tokenize.TokenError, SyntaxError):
        # Magics and broken code: from here on every line that looks like a marker is one.
        yield from (number for number in candidates if number >= seen)


def _cell(marker: str, body: list[str]) -> Cell:
    match = _MARKER.match(marker)
    title = match["rest"].strip() if match else ""
    kind = _KIND.search(title)
    if kind is None:
        return _code(body, title)
    title = title[: kind.start()].strip()
    return Cell(_KINDS[kind["kind"]], _prose(body), title)


def _code(body: list[str], title: str) -> Cell:
    return Cell(CellKind.CODE, "\n".join(body).strip("\n"), title)


def _prose(body: list[str]) -> str:
    """Take a text out of the comments, or the string, that it is kept in."""
    text = "\n".join(body).strip("\n")
    lines = text.split("\n")
    if all(line.startswith("#") or not line.strip() for line in lines):
        return "\n".join(re.sub(r"^# ?", "", line) for line in lines)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # Neither, or what Python does not even parse: it is kept as it stands.
        return text
    return value.strip("\n") if isinstance(value, str) else text
