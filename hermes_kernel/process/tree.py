"""A process together with all that it has started, behind one Protocol; platforms are files."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: its exit code, or -N and the name of signal N."""

    exit_code: int
    signal: str | None = None


class ProcessTree(Protocol):
    """A started process and its descendants, from the start until the tree is gone."""

    pid: int

    def undrained(self) -> tuple[bytes, bytes]:
        """Return what the tree wrote to its standard output and error and nobody has read."""

    def early(self) -> bytes:
        """Return the end of what the process wrote before it took its pipes."""

    async def ended(self) -> ExitStatus:
        """Wait until the first process is gone (its group is killed then) and say how it ended."""

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its group; nothing if it is gone."""

    def kill(self) -> None:
        """Kill the whole tree; idempotent. ``ended`` says when it is done."""


class Stdio(Protocol):
    """The pipes of a process that is to be started."""

    handed_over: tuple[tuple[int, int], tuple[int, int]]
    """For standard output and error: the numbers of a pipe's two ends, as the process will find them."""

    def close(self) -> None:
        """Close what was not handed over to a process; idempotent."""


def make_stdio() -> Stdio:
    """Make the pipes for one process; raises OSError."""
    if sys.platform == "win32":
        raise NotImplementedError("kernels on Windows are not available in this version")
    from .posix import PosixStdio

    return PosixStdio()


def start(argv: Sequence[str], *, env: Mapping[str, str], cwd: str, stdio: Stdio) -> ProcessTree:
    """Start a process as the head of a tree of its own, on the running event loop.

    Its standard input is empty. What it writes is read (see ``early``) until it puts the pipes of *stdio* in
    the place of its standard streams; *stdio* belongs to the tree from then on.
    Raises OSError; then *stdio* is still the caller's to close.
    """
    if sys.platform == "win32":
        raise NotImplementedError("kernels on Windows are not available in this version")
    from .posix import PosixStdio, PosixTree

    if not isinstance(stdio, PosixStdio):
        raise TypeError("the pipes of another platform")
    return PosixTree.start(argv, env=env, cwd=cwd, stdio=stdio)
