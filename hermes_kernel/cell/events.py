"""What a caller can be told while its cell runs."""

from dataclasses import dataclass


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


CellEvent = ToolCallStarted | ToolCallEnded
