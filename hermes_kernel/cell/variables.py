"""The variables of a kernel, as it tells them: looked at before they are believed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import plain_text
from .message import MalformedMessage
from .shown import Cleaner
from .text import strip_controls

REQUEST, REPLY = "hermes_variables_request", "hermes_variables_reply"
MOST = 1000  # variables
LONGEST = 1000  # characters of a name, a type or a short form that are looked at
SHOWN = 120  # of them that are shown at most


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
    return tuple(_variable(entry, cleaner) for entry in told[:MOST])


def _variable(entry: object, cleaner: Cleaner) -> Variable:
    if not isinstance(entry, dict):
        raise MalformedMessage(f"a variable is a {type(entry).__name__}, not an object")
    size = entry.get("size")
    known = isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63
    name, kind, text = (_text(entry.get(key), cleaner) for key in ("name", "type", "text"))
    return Variable(name, kind, size if known else None, text)


def _text(value: object, cleaner: Cleaner) -> str:
    if not isinstance(value, str):
        raise MalformedMessage(f"a text is a {type(value).__name__}")
    text = cleaner.mask(strip_controls(plain_text(value[:LONGEST])).replace("\n", " "))
    room = SHOWN
    if len(value) >= LONGEST:  # it is cut, and may end with the beginning of a secret
        room = min(SHOWN, max(len(text) - (LONGEST - SHOWN), 1))
    elif len(text) <= SHOWN:
        return text
    return f"{text[: room - 1]}…"
