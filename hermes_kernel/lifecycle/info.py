"""What a registry tells about one of its kernels."""

from dataclasses import dataclass
from enum import Enum

from .key import Owner


class KernelState(Enum):
    """Where a kernel is in its life."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    CLOSING = "closing"


@dataclass(frozen=True)
class KernelInfo:
    """One kernel as its registry sees it.

    ``pid`` is the kernel process as the host sees it, None while it starts. ``started`` and ``last_used``
    are seconds since the epoch. ``attached`` counts the calls that hold the kernel now. ``isolation`` is the
    level in force, ``degraded`` says what is not as it was asked for: stock paths, no isolation...
    """

    owner: Owner
    kernel_id: str
    pid: int | None
    state: KernelState
    started: float
    last_used: float
    execution_count: int
    connection_file: str | None
    python: str
    cwd: str | None
    attached: int
    pinned: bool = False
    isolation: str = "none"
    degraded: str | None = None
    node: str = "local"
