"""A kernel process together with all that it starts, behind one Protocol; platforms are files."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .launch import Ended
from .launchclass import LaunchClass, Program
from .staging import Staging


@dataclass(frozen=True)
class TreeSpec:
    """What the first process of a tree is to be: an interpreter with its options, and what that is given.

    ``remains``: the files that are removed after it if this process is gone by then.
    """

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    remains: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line."""
        return (*self.interpreter, *self.arguments)


@dataclass(frozen=True)
class TreeExit:
    """How the first process of a tree ended: its exit code, or -N and the name of signal N.

    ``early``: the end of what it wrote before it took its pipes. ``left``: what was in the pipes of its
    standard output and error, and nobody had read.
    """

    exit_code: int
    signal: str | None = None
    early: bytes = b""
    left: tuple[bytes, bytes] = (b"", b"")


class ProcessTree(Protocol):
    """A started process and its descendants, from the start until the tree is gone."""

    pid: int
    """The first process, as this process sees it."""

    warden: int
    """The process that ends the tree; 0 where the operating system does that."""

    how: str
    """How the first process was made: ``"fork"`` or ``"spawn"``."""

    note: str | None
    """Why it was not made in a faster way, if it was not."""

    greets: bool
    """Whether it is about to serve cells when it welcomes a subscriber, and all is known of it."""

    async def start(self, spec: TreeSpec, lease: int) -> None:
        """Say what the first process is to be, and wait until it is there.

        *lease* is a descriptor that lives as long as the tree (see ``Lease``). Raises OSError.
        """

    async def ended(self) -> TreeExit:
        """Wait until the first process is gone and say how it ended; the rest of the tree is ended then."""

    async def gone(self) -> Ended:
        """Wait until the tree is gone, or what ends it; UNKNOWN if that was killed."""

    def signal(self, signum: int) -> None:
        """Send a signal to the first process and its group; nothing if it is gone."""

    async def end(self, *, timeout: float) -> Ended:
        """Kill the whole tree and wait until it is gone; idempotent."""


class IsolationRefusedError(OSError):
    """The isolation that was asked for cannot be had here."""


@dataclass(frozen=True)
class Seat:
    """A tree that waits for its start, and the directory of its kernel."""

    tree: ProcessTree
    staging: Staging

    async def give_up(self, *, timeout: float) -> None:
        """End the tree and remove the directory."""
        await self.tree.end(timeout=timeout)
        self.staging.lease.close()
        self.staging.remove()


class Trees(Protocol):
    """Makes process trees on this machine, on one event loop."""

    @property
    def spares(self) -> int:
        """How many first processes are kept ready."""

    async def seat(self, kind: LaunchClass, program: Program, kernel_id: str, *, binds: bool) -> Seat:
        """Return a tree of this kind and the directory of the kernel.

        *program*: what its first process can be forked of. *binds*: whether the process may open its sockets
        in the directory before its start. Raises OSError, StagingError and ConfigError, and nothing is left
        then.
        """

    async def discard_spares(self) -> None:
        """End what is kept ready: one of its class could not be used."""

    async def close(self) -> None:
        """End what is kept ready. Trees that have started are not touched."""


def make_trees(*, spares: int, idle_timeout: float) -> Trees:
    """Return what makes process trees on this platform.

    *spares*: how many first processes to keep ready; *idle_timeout*: seconds without a tree after which
    nothing is kept.
    """
    if sys.platform == "win32":
        from .windows import WindowsTrees

        return WindowsTrees()
    from .nursery import Nursery

    return Nursery(spares=spares, idle_timeout=idle_timeout)
