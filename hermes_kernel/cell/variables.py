"""The variables of a kernel, as it tells them: looked at before they are believed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import plain_text
from .masks import MARGIN
from .message import MalformedMessage
from .shown import Cleaner
from .text import strip_controls

REQUEST, REPLY = "hermes_variables_request", "hermes_variables_reply"
MOST = 1000  # variables
SHOWN = 120  # characters of a name, a type or a short form that are shown at most
LONGEST = MARGIN + SHOWN
"""Characters of them that are looked at: a secret that begins in what is shown is there as a whole."""

SHORT = 1000  # characters up to which a text is looked at, however many there are
LONG_IN_ALL = 2 * 1024 * 1024  # characters that are looked at of those that are longer
CUT = "…"


@dataclass(frozen=True)
class Variable:
    """One variable. ``size`` is in bytes, without what it refers to; None where that is not known.

    ``text`` is a short form; empty for an object that only its own code could describe.
    """

    name: str
    type: str
    size: int | None
    text: str


def variables_of(content: Mapping[str, Any], cleaner: Cleaner) -> tuple[Variable, ...]:
    """Return the variables that a kernel's reply tells, without secrets; raises MalformedMessage."""
    told = content.get("variables")
    if not isinstance(told, list):
        raise MalformedMessage(f"variables is a {type(told).__name__}, not a list")
    reader = _Reader(cleaner)
    return tuple(reader.variable(entry) for entry in told[:MOST])


class _Reader:
    """Reads the entries of one reply; ``room`` is how much of what is long it still looks at."""

    def __init__(self, cleaner: Cleaner) -> None:
        self._cleaner = cleaner
        self._room = LONG_IN_ALL

    def variable(self, entry: object) -> Variable:
        """Return what an entry tells; raises MalformedMessage."""
        if not isinstance(entry, dict):
            raise MalformedMessage(f"a variable is a {type(entry).__name__}, not an object")
        size = entry.get("size")
        known = isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63
        name, kind, text = (self._text(entry.get(key)) for key in ("name", "type", "text"))
        return Variable(name, kind, size if known else None, text)

    def _text(self, value: object) -> str:
        if not isinstance(value, str):
            raise MalformedMessage(f"a text is a {type(value).__name__}")
        if len(value) > SHORT:
            self._room -= min(len(value), LONGEST)
            if self._room < 0:
                return CUT
        text = self._cleaner.mask(strip_controls(plain_text(value[:LONGEST])).replace("\n", " "))
        room = SHOWN
        if len(value) >= LONGEST:  # it is cut, and may end with the beginning of a secret
            room = min(SHOWN, max(len(text) - self._cleaner.margin, 1))
        elif len(text) <= SHOWN:
            return text
        return f"{text[: room - 1]}{CUT}"
