"""What a sidecar process waits for: descriptors, signals, its children, and the end of its host."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from typing import Any

from .system import system

DISMISSAL = b"l"  # of a zygote: the host lives, and wants no more of it
HOST_POLL = 0.25  # seconds between two looks at a host that cannot be watched


class Host:
    """The process for which a sidecar works: gone is gone, whoever has its number then."""

    def __init__(self, pid: int, started: int | None, watch: int | None) -> None:
        self.pid = pid
        self.started = started
        self.watch = watch
        self._gone = False

    @classmethod
    def of(cls, pid: int, started: int | None) -> "Host":
        """Look for the process *pid* that has *started* then (see ``system.started``)."""
        try:
            watch = system.watch(pid)
        except ProcessLookupError:
            watch = None
        return cls(pid, started, watch)

    def is_gone(self) -> bool:
        """Whether the process has ended."""
        if not self._gone:
            found = system.started(self.pid)
            self._gone = found is None or (self.started is not None and found != self.started)
        return self._gone


class Events:
    """Waits for the events of one single-threaded process; made anew after each fork."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.host_is_gone = host.is_gone()
        self.told_to_end = False
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.signal(signal.SIGTERM, self._end)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    @property
    def is_over(self) -> bool:
        """Whether there is nobody to work for any more."""
        return self.host_is_gone or self.told_to_end

    def wait(
        self, readable: Iterable[int] = (), writable: Iterable[int] = (), *, timeout: float | None = None
    ) -> set[int]:
        """Wait for the first of the descriptors, a signal or the end of the host; *timeout* in seconds.

        Return the descriptors that are ready.
        """
        poll = select.poll()
        for descriptor in readable:
            poll.register(descriptor, select.POLLIN)
        for descriptor in writable:
            poll.register(descriptor, select.POLLOUT)
        poll.register(self._reader, select.POLLIN)
        news = system.news()
        if news is not None:
            poll.register(news, select.POLLIN)
        watch = self.host.watch
        if watch is not None and not self.host_is_gone:
            poll.register(watch, select.POLLIN)
        elif not self.host_is_gone:
            timeout = HOST_POLL if timeout is None else min(timeout, HOST_POLL)
        ready = {fd for fd, _ in poll.poll(None if timeout is None else max(0, timeout * 1000))}
        if self._reader in ready:
            self._clear()
        if news in ready:
            system.take_news()
        if watch in ready or (watch is None and self.host.is_gone()):
            self.host_is_gone = True
        return ready - {self._reader, watch, news}

    def host_ends_within(self, seconds: float) -> bool:
        """Wait until the host is gone; return whether it is. Who ends has closed its sockets before."""
        deadline = time.monotonic() + seconds
        while not self.host.is_gone():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(timeout=left)
        return True

    def close(self) -> None:
        """Give the signals back to a process that becomes something else."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for end in (self._reader, self._writer):
            os.close(end)
        if self.host.watch is not None:
            with contextlib.suppress(OSError):  # on macOS a forked child does not get it
                os.close(self.host.watch)

    def _end(self, *_: Any) -> None:
        self.told_to_end = True

    def _clear(self) -> None:
        try:
            while len(os.read(self._reader, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # that was all


def _wake(*_: Any) -> None:
    """Be a handler: without one the wakeup descriptor is not written."""
