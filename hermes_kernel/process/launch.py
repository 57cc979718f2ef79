"""The launch seam: how a kernel process is asked for, named, signalled and ended.

Only data crosses it: frozen, JSON-able values, durations and opaque handles. The process tree, its
directory and its file descriptors live wholly on the node's side, so that a node may one day be another
machine. Every call is bounded by a duration that the caller gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from .environment import EnvPolicy


@dataclass(frozen=True)
class Interpreter:
    """A Python that can run a kernel: the command to start it and what it has."""

    executable: str
    version: tuple[int, int]
    ipykernel: str


@dataclass(frozen=True)
class ProcessLimits:
    """How a kernel process is made and what holds it: the fields of ``Limits`` with these names.

    ``memory_limit`` is in bytes, None = none. With ``require_isolation`` no lower level than ``isolation``
    will do.
    """

    start_method: str = "spawn"
    isolation: str = "none"
    require_isolation: bool = False
    memory_limit: int | None = None


@dataclass(frozen=True)
class LaunchSpec:
    """What a kernel is to be.

    ``session_key`` signs its messages (made by the host, a secret). ``cwd`` is None for a private directory
    of its own. ``env`` is already scrubbed; the node applies ``env_policy`` once more as the last step.
    ``options`` reach the kernel in its private connection file. ``connection`` names addresses that somebody
    else has chosen (a stock kernel manager, or the run before a restart); None lets the node choose.
    ``label`` is what the node tells people about the session. ``publish_dir`` is where the node leaves a
    connection file for people, None for nowhere. ``timeout``: seconds for the launch, not for the kernel to
    answer.
    """

    kernel_id: str
    python: str
    session_key: str = field(repr=False)
    cwd: str | None
    env: Mapping[str, str]
    env_policy: EnvPolicy = field(default_factory=EnvPolicy)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    extra_arguments: tuple[str, ...] = ()
    connection: Mapping[str, Any] | None = field(default=None, repr=False)
    socket_dir: str | None = None
    label: Mapping[str, Any] = field(default_factory=dict)
    publish_dir: str | None = None
    process: ProcessLimits = field(default_factory=ProcessLimits)
    timeout: float = 30.0


@dataclass(frozen=True)
class KernelHandle:
    """The name of one launched kernel; it means nothing but to the launcher that gave it."""

    node: str
    kernel_id: str
    incarnation: int


@dataclass(frozen=True)
class Launched:
    """A kernel process that exists. ``connection`` is a secret: it holds the signing key.

    ``bridge`` says where the kernel can reach the host's end of the tool bridge: the place of a socket, or
    nothing for a port of this machine's. ``isolation`` is the level in force, ``degraded`` why something is
    not as it was asked for. ``start_method`` is how it was made: ``"fork"`` or ``"spawn"``. ``greets``: it
    welcomes a subscriber when it is about to serve cells, not before, and has nothing more to say of itself:
    nobody has to ask. ``published``: the connection file for people, None if there is none.
    """

    handle: KernelHandle
    pid: int
    argv: tuple[str, ...]
    connection: Mapping[str, Any] = field(repr=False)
    connection_file: str
    bridge: Mapping[str, Any] = field(default_factory=dict)
    isolation: str = "none"
    degraded: str | None = None
    start_method: str = "spawn"
    greets: bool = False
    published: str | None = None


@dataclass(frozen=True)
class StreamRest:
    """The end of a stream: how many bytes the kernel had taken in, the last of them, and those it had not."""

    total: int = 0
    rest: bytes = b""
    undrained: bytes = b""


@dataclass(frozen=True)
class KernelExit:
    """How a kernel process ended: its exit code (-N for signal N) and what it left behind.

    ``signal`` is the name of the signal, None for an ordinary exit. ``last_cell`` is the msg_id of the cell
    that began last, empty if none did, None if that cannot be known.
    """

    exit_code: int
    signal: str | None = None
    log_tail: str = ""
    stdout: StreamRest = StreamRest()
    stderr: StreamRest = StreamRest()
    last_cell: str | None = None


class Ended(Enum):
    """What ``Launcher.end`` can say about the tree that it ended."""

    CLEAN = "clean"
    NOT_CLEAN = "not clean"
    UNKNOWN = "unknown"


class Launcher(Protocol):
    """Starts kernels on one node and ends them."""

    @property
    def spares(self) -> int:
        """How many kernels are kept ready, as far as this side knows. Asks nobody."""

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        """Find out whether *python* can run a kernel; raises ConfigError with the next step if not."""

    async def launch(self, spec: LaunchSpec) -> Launched:
        """Start a kernel process; raises KernelStartError or ConfigError, and nothing is left then."""

    async def ended(self, handle: KernelHandle) -> KernelExit:
        """Wait until the kernel process is gone and say how."""

    def exit_of(self, handle: KernelHandle) -> KernelExit | None:
        """Return how the kernel ended as far as this side knows, None while it runs. Asks nobody."""

    async def signal(self, handle: KernelHandle, signum: int) -> None:
        """Send a signal to the kernel process and its group; nothing if it is gone."""

    async def end(self, handle: KernelHandle, *, timeout: float) -> Ended:
        """Kill the whole tree and remove what the node kept for it; idempotent."""

    async def sweep(self) -> None:
        """Remove what kernels of dead hosts have left on the node."""

    async def close(self) -> None:
        """End every kernel of this launcher."""
