"""Runs a program, and ends it with all that it has started when the process that wanted it has ended.

``python launcher.py hermes_kernel.sidecar.guard HOST PROGRAM ARGUMENT...``: HOST is the pid of our parent.
The program has our standard streams, our group and our exit code. SIGTERM reaches both; a program that has
not ended a moment later is ended, as is what it leaves behind.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from .events import Events, Host
from .system import system
from .tree import end_tree, ended_children

GRACE = 1.0  # seconds for a program that is asked to end
NOT_EXECUTED = 127  # exit code, as a shell has it


class Guard:
    """One guard process, which has a program as its child."""

    def __init__(self, events: Events, child: int) -> None:
        self._events = events
        self._child = child
        self._status: int | None = None

    def run(self) -> int:
        """Wait for the end of the program or of the host; leave nothing; return the exit code."""
        while self._status is None and not self._events.is_over:
            self._wait()
        deadline = time.monotonic() + GRACE
        while self._status is None and not self._events.host_is_gone and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
        end_tree(self._events, self._reap)
        if self._status is None:
            return 1
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    def _wait(self, timeout: float | None = None) -> None:
        self._reap()
        if self._status is None:
            self._events.wait(timeout=timeout)
            self._reap()

    def _reap(self) -> None:
        """Take in every child that has ended."""
        for pid, status in ended_children():
            if pid == self._child:
                self._status = status


def main(arguments: Sequence[str]) -> int:
    """Guard a program until it has ended, or its host has; return its exit code."""
    host, *program = arguments
    events = Events(Host.of(int(host), None))
    if os.getppid() != int(host):  # it ended before we could look
        return 1
    system.adopt_orphans()
    system.signal_at_parents_end(signal.SIGCONT)  # whoever has stopped us: somebody has to clean up
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become(program, events, guard)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # the program's alone: their end is to be its end
        os.dup2(nothing, stream)
    return Guard(events, child).run()


def _become(program: Sequence[str], events: Events, guard: int) -> NoReturn:
    try:
        events.close()
        # Python ignores two of them, and what is ignored stays so in the program.
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        system.signal_at_parents_end(signal.SIGKILL)
        if os.getppid() == guard:
            os.execvp(program[0], list(program))
    except OSError as error:
        print(f"{program[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_EXECUTED)
