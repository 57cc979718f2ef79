"""How a cell can end."""

from enum import Enum


class CellStatus(Enum):
    """How a cell has ended."""

    OK = "ok"
    ERROR = "error"
    EXITED = "exited"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    DIED = "died"


class Phase(Enum):
    """How far a call had come when it was settled."""

    QUEUED = "queued"
    STARTING = "starting"
    RAN = "ran"


class Fate(Enum):
    """What becomes of the kernel once the cell is settled."""

    KEEP = "keep"
    END = "end"
