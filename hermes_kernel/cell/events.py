"""What a caller can be told while its cell runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StreamText:
    """The cell has written ``text`` to the stream ``name``; secrets are masked, lines are whole.

    ``skipped``: how many characters before it are left out, because they came faster than they were taken.
    """

    name: str
    text: str
    skipped: int = 0


@dataclass(frozen=True)
class Display:
    """The cell shows something: ``data`` by media type. ``updates``: it takes the place of what was shown."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    updates: bool = False


@dataclass(frozen=True)
class ToolCallStarted:
    """The cell has called a tool; ``args`` is a preview of at most 80 characters."""

    call_id: int
    name: str
    args: str


@dataclass(frozen=True)
class ToolCallEnded:
    """The tool has answered, after ``seconds``; ``error`` says why there was no result."""

    call_id: int
    name: str
    seconds: float
    error: str | None = None


CellEvent = StreamText | Display | ToolCallStarted | ToolCallEnded
