"""A process tree on POSIX: a session of its own, killed as a group.

A descendant that made a session of its own escapes the group; ending those too takes a warden process.
"""

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from .tree import ExitStatus

_log = logging.getLogger(__name__)

PIPE_SIZE = 1024 * 1024
EARLY = 64 * 1024  # bytes that are kept of what a process writes before it takes its pipes
UNDRAINED = 1024 * 1024  # bytes of a dead kernel's pipe that are kept: as many as the pipe can hold


class PosixStdio:
    """The pipes of a process: one for what it writes at first, two that it reads itself later on."""

    def __init__(self) -> None:
        self._ends: list[int] = []
        try:
            for _ in range(3):
                self._ends += os.pipe()
        except OSError:
            self.close()
            raise
        self.early_read, self.early_write, *rest = self._ends
        out_read, out_write, err_read, err_write = rest
        self.handed_over = (out_read, out_write), (err_read, err_write)
        for _, write_end in self.handed_over:
            _make_roomy(write_end)
        os.set_blocking(self.early_read, False)

    def close_ends_of_process(self) -> None:
        """The process has them: nobody else may keep the pipes open."""
        for end in (self.early_write, *(write_end for _, write_end in self.handed_over)):
            self._close(end)

    def read_early(self) -> bytes | None:
        """Return what the process wrote before it took the pipes; None at the end of that."""
        try:
            data = os.read(self.early_read, 65536)
        except BlockingIOError:
            return b""
        return data or None

    def rest(self) -> tuple[bytes, bytes]:
        """Return what is in the pipes that the process reads itself."""
        out, err = (_read_available(read_end) for read_end, _ in self.handed_over)
        return out, err

    def close(self) -> None:
        """Close what is open."""
        while self._ends:
            os.close(self._ends.pop())

    def _close(self, end: int) -> None:
        self._ends.remove(end)
        os.close(end)


class PosixTree:
    """The head of a session and its process group."""

    def __init__(self, process: "subprocess.Popen[bytes]", stdio: PosixStdio) -> None:
        self.pid = process.pid
        self._stdio = stdio
        self._undrained = b"", b""
        self._early = bytearray()
        self._reads_early = True
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._loop.add_reader(stdio.early_read, self._take_early)
        self._stop_watching = self._watch()

    @classmethod
    def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, stdio: PosixStdio
    ) -> "PosixTree":
        """Start *argv* (see ``tree.start``)."""
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdio.early_write,
            stderr=stdio.early_write,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            pass_fds=[end for pipe in stdio.handed_over for end in pipe],
        )
        stdio.close_ends_of_process()
        return cls(process, stdio)

    def undrained(self) -> tuple[bytes, bytes]:
        """Return what nobody has read of the tree's output."""
        return self._undrained

    def early(self) -> bytes:
        """Return the end of what the process wrote before it took its pipes."""
        return bytes(self._early)

    async def ended(self) -> ExitStatus:
        """Wait until the first process is gone and say how it ended."""
        return await asyncio.shield(self._ended)

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its group."""
        if not self._ended.done():
            self._signal_group(signum)

    def kill(self) -> None:
        """Kill the group."""
        self.signal(signal.SIGKILL)

    def _signal_group(self, signum: int) -> None:
        # Only while the head is not reaped: until then no stranger can have its number.
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:  # the head has just ended and nothing else is in its group
            pass
        except PermissionError as error:  # a program of another user's: it is not ours to end
            _log.warning("cannot signal the group %d: %s", self.pid, error)

    def _watch(self) -> Callable[[], None]:
        """Have ``_reap`` called on the loop when the head is gone; return how to stop that."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or not allowed
            return self._watch_by_thread()
        self._loop.add_reader(descriptor, self._reap)

        def stop() -> None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

        return stop

    def _watch_by_thread(self) -> Callable[[], None]:
        def wait() -> None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self._loop.call_soon_threadsafe(self._reap)

        threading.Thread(target=wait, name=f"hermes-wait-{self.pid}", daemon=True).start()
        return lambda: None

    def _take_early(self) -> bool:
        """Read what there is; return whether there may be more."""
        if not self._reads_early:
            return False
        data = self._stdio.read_early()
        if data is None:
            self._stop_early()
            return False
        self._early += data
        del self._early[:-EARLY]
        return bool(data)

    def _stop_early(self) -> None:
        if self._reads_early:
            self._reads_early = False
            self._loop.remove_reader(self._stdio.early_read)

    def _reap(self) -> None:
        """The head is a zombie: kill what is left of its group, then take its status."""
        self._stop_watching()
        self._signal_group(signal.SIGKILL)
        code = self._process.wait()
        self._undrained = self._stdio.rest()
        while self._take_early():
            pass
        self._stop_early()  # a descendant may still have the other end
        self._stdio.close()
        self._ended.set_result(ExitStatus(code, _signal_name(-code) if code < 0 else None))


def _make_roomy(pipe: int) -> None:
    """Ask for a larger pipe: nobody reads it while a cell keeps the GIL."""
    if sys.platform != "linux":
        return
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    except OSError as error:  # over the user's quota of pipe memory
        _log.info("a pipe keeps its size: %s", error)


def _read_available(descriptor: int) -> bytes:
    """Read what is there now. A descendant that escaped may still write: nothing is waited for."""
    os.set_blocking(descriptor, False)
    data = bytearray()
    try:
        while len(data) < UNDRAINED and (piece := os.read(descriptor, 65536)):
            data += piece
    except BlockingIOError:
        pass  # that was all
    return bytes(data)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"SIG{number}"
