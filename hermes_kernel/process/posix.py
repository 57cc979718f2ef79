"""A process tree on POSIX: a session of its own, killed as a group.

A descendant that made a session of its own escapes the group; ending those too takes a warden process.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .tree import ExitStatus


class PosixTree:
    """The head of a session and its process group."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.pid = process.pid
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._stop_watching = self._watch()

    @classmethod
    def start(cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, log: Path) -> "PosixTree":
        """Start *argv* (see ``tree.start``)."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                close_fds=True,
            )
        return cls(process)

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

    def _reap(self) -> None:
        """The head is a zombie: kill what is left of its group, then take its status."""
        self._stop_watching()
        self._signal_group(signal.SIGKILL)
        code = self._process.wait()
        self._ended.set_result(ExitStatus(code, _signal_name(-code) if code < 0 else None))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"SIG{number}"
