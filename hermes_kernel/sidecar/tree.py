"""How a process ends all that descends from it, however it tries to get away."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator

from .events import Events
from .system import system

FAST = 0.03  # seconds in which an ordinary tree is gone; a fork bomb is not
QUIET = 2  # looks at a tree that find nothing new until it counts as stopped
ROUND = 0.3  # seconds for a stopped and killed tree to be gone


def ended_children() -> Iterator[tuple[int, int]]:
    """Take in every child of this process that has ended: its pid and its wait status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_tree(
    events: Events,
    reap: Callable[[], object],
    *,
    spare: Callable[[], Collection[int]] = frozenset,
    limit: float = 5.0,
) -> bool:
    """Kill all descendants of this process, but not the children that *spare* names and what is below them.

    *reap* takes in the children that have ended. Orphans become children of this process, so what is
    killed hands over its own. Where killing alone does not end it (each that dies makes room for a fork of
    another), everything is stopped first: what is stopped makes nothing new. Return whether nothing is left
    after *limit* seconds.
    """
    began = time.monotonic()
    while time.monotonic() - began < FAST:
        if _kill_children(reap, spare):
            return True
        events.wait(timeout=0.001)
    while time.monotonic() - began < limit:
        _stop(spare, began + limit)
        for pid, _ in system.descendants(_own(spare)):
            _send(pid, signal.SIGKILL)
        until = time.monotonic() + ROUND
        while time.monotonic() < until:
            if _kill_children(reap, spare):
                return True
            events.wait(timeout=0.001)
    return _kill_children(reap, spare)


def _kill_children(reap: Callable[[], object], spare: Callable[[], Collection[int]]) -> bool:
    """Kill the children, take in those that have ended; return whether none is left."""
    reap()
    children = _own(spare)
    for pid in children:
        _send(pid, signal.SIGKILL)
    return not children


def _stop(spare: Callable[[], Collection[int]], deadline: float) -> None:
    """Stop every descendant, until two looks find none that runs."""
    quiet = 0
    while quiet < QUIET and time.monotonic() < deadline:
        running = [pid for pid, is_stopped in system.descendants(_own(spare)) if not is_stopped]
        for pid in running:
            _send(pid, signal.SIGSTOP)
        quiet = 0 if running else quiet + 1


def _own(spare: Callable[[], Collection[int]]) -> list[int]:
    spared = set(spare())
    return [pid for pid in system.children() if pid not in spared]


def _send(pid: int, signum: int) -> None:
    """Signal a descendant that was there a moment ago."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # it has ended, and its own parent has taken that in
    except PermissionError:
        pass  # it runs as another user, and will be counted as left
