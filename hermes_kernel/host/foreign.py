"""The cells of other clients on a kernel: which of them run, how many there were, and what they showed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cell.message import Message
from ..cell.outputs import OutputCollector, count_of

RUNNING = 100  # foreign cells whose end is waited for
KEPT = 100  # of those that are not in the transcript yet, with what they have shown
LATE = 100_000  # characters of that which are kept for one cell, besides its last ones
LONGEST_CODE = 1024 * 1024


@dataclass
class ForeignCell:
    """A cell of another client's; times are in seconds since the epoch, ``ended`` is None while it runs."""

    code: str
    execution_count: int | None
    began: float = field(default_factory=time.time)
    ended: float | None = None
    outputs: OutputCollector = field(default_factory=lambda: OutputCollector(LATE, LATE))


class ForeignCells:
    """Follows them by their messages. ``keeps``: whether what they show is kept for a transcript."""

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._running: dict[str, ForeignCell | None] = {}
        self._count = 0
        self._kept: list[ForeignCell] = []
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have *callback* called when one has begun or ended."""
        self._changed = callback

    @property
    def are_running(self) -> bool:
        """Whether one runs now."""
        return bool(self._running)

    def begin(self, parent_id: str, message: Message) -> None:
        """One begins; *message* is its execute_input."""
        self._count += 1
        cell: ForeignCell | None = None
        if self._keeps and len(self._kept) < KEPT:
            code = message.content.get("code")
            count = count_of(message.content.get("execution_count"))
            cell = ForeignCell(code[: LONGEST_CODE + 1] if isinstance(code, str) else "", count or None)
            self._kept.append(cell)
        if len(self._running) < RUNNING:
            self._running[parent_id] = cell
        self._changed()

    def show(self, message: Message) -> None:
        """One of them shows something."""
        cell = self._running.get(message.parent_id or "")
        if cell is not None:
            cell.outputs.add(message)

    def end(self, parent_id: str | None) -> bool:
        """One has ended; return whether it was one that ran."""
        if parent_id is None or parent_id not in self._running:
            return False
        cell = self._running.pop(parent_id)
        if cell is not None:
            cell.ended = time.time()
        self._changed()
        return True

    def take_count(self) -> int:
        """Return how many have begun since this was asked last."""
        count, self._count = self._count, 0
        return count

    def take_ended(self, *, before: int | None = None, every: bool = False) -> list[ForeignCell]:
        """Return those that have ended since this was asked last; *every*: those that still run too.

        *before*: the number of a cell; those that have run after it are left for the next time.
        """

        def is_due(cell: ForeignCell) -> bool:
            # One that is not counted has the number of the cell that comes after it.
            is_before = before is None or cell.execution_count is None or cell.execution_count <= before
            return every or (cell.ended is not None and is_before)

        due = [cell for cell in self._kept if is_due(cell)]
        self._kept = [cell for cell in self._kept if not is_due(cell)]
        return due
