"""A process together with all that it has started, behind one Protocol; platforms are files."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: its exit code, or -N and the name of signal N."""

    exit_code: int
    signal: str | None = None


class ProcessTree(Protocol):
    """A started process and its descendants, from the start until the tree is gone."""

    pid: int

    async def ended(self) -> ExitStatus:
        """Wait until the first process is gone (its group is killed then) and say how it ended."""

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its group; nothing if it is gone."""

    def kill(self) -> None:
        """Kill the whole tree; idempotent. ``ended`` says when it is done."""


def start(argv: Sequence[str], *, env: Mapping[str, str], cwd: str, log: Path) -> ProcessTree:
    """Start a process as the head of a tree of its own, on the running event loop.

    Its standard input is empty, its output goes to the file *log*. Raises OSError.
    """
    if sys.platform == "win32":
        raise NotImplementedError("kernels on Windows are not available in this version")
    from .posix import PosixTree

    return PosixTree.start(argv, env=env, cwd=cwd, log=log)
