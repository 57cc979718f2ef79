"""What one cell may do with tools: which, how often, and until when."""

from dataclasses import dataclass, field
from enum import Enum


class Refusal(Enum):
    """Why a tool call was turned away. A refusal is free: it is not charged and not recorded."""

    UNKNOWN = "unknown"
    RETIRED = "retired"
    NOT_ALLOWED = "not allowed"
    SPENT = "spent"


@dataclass
class CellAuthority:
    """The right of one cell to call tools, from its start until it is settled.

    The kernel outlives its cells, and so do threads and children that they leave behind; the right does not.
    ``limit`` is the number of calls, None for no limit. Not thread-safe: under the caller's lock.
    """

    tools: frozenset[str]
    limit: int | None
    spent: int = field(default=0, init=False)
    is_retired: bool = field(default=False, init=False)

    def admit(self, tool: str) -> Refusal | None:
        """Charge one call of *tool* to the budget, or say why it is refused."""
        if self.is_retired:
            return Refusal.RETIRED
        if tool not in self.tools:
            return Refusal.NOT_ALLOWED
        if self.limit is not None and self.spent >= self.limit:
            return Refusal.SPENT
        self.spent += 1
        return None

    def retire(self) -> None:
        """The cell is over: whatever calls in its name from now on is refused."""
        self.is_retired = True

    def sentence(self, refusal: Refusal, tool: str) -> str:
        """Say to the cell why its call of *tool* was refused, and what to do."""
        match refusal:
            case Refusal.UNKNOWN:
                return UNKNOWN
            case Refusal.RETIRED:
                return RETIRED
            case Refusal.NOT_ALLOWED:
                has = ", ".join(sorted(self.tools)) or "none"
                return f"{tool[:100]!r} is no tool of this cell; it has {has}"
            case Refusal.SPENT:
                return (
                    f"Tool call limit reached: this cell may make {self.limit}. Do the rest in another cell, "
                    "which may make as many again."
                )


UNKNOWN = "Unauthorized: no cell of this kernel was given this token."
RETIRED = (
    "No active execute_code cell: the cell that this call belongs to has ended. A thread, timer, pool or "
    "child process keeps the right of the cell that started it; start it in the cell that is to call."
)
