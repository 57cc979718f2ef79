"""What a cell leaves running: its threads, and the processes that are children of the kernel."""

import os
import threading
from collections.abc import Iterator

MOST = 20  # things that are named
LONGEST = 80  # characters of a name


class Leftovers:
    """Tells what has come since it was asked last and is still there."""

    def __init__(self) -> None:
        self._known: set[object] = set()

    def begin(self) -> None:
        """Take what is there for known: it was before any cell."""
        self._known = {key for key, _ in _running()}

    def since(self) -> list[str]:
        """Return the names of what is new."""
        now = list(_running())
        new = [name for key, name in now if key not in self._known]
        self._known = {key for key, _ in now}
        return new[:MOST]


def _running() -> Iterator[tuple[object, str]]:
    for thread in threading.enumerate():
        # ZeroMQ starts one of its own for a large message, when it likes.
        is_zmqs = type(thread).__module__.startswith("zmq.")
        if thread is not threading.main_thread() and not is_zmqs:
            yield ("thread", id(thread)), f"thread {thread.name[:LONGEST]}"
    for pid in _children():
        name = _name_of(pid)
        if name is not None:
            yield ("process", pid), f"process {pid} {name[:LONGEST]}"


def _children() -> Iterator[int]:
    """Return the children of this process; none where the system does not tell them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        tasks = os.listdir("/proc/self/task")
    except (AttributeError, OSError):  # no Linux; or there are none, as is usual
        return
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as file:
                pids = file.read()
        except OSError:  # the thread has ended, or the system was built without
            continue
        yield from map(int, pids.split())


def _name_of(pid: int) -> str | None:
    """Return the name of a process, None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read()
    except OSError:
        return None
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    return None if rest.split()[:1] == [b"Z"] else name.decode("utf-8", "backslashreplace")
