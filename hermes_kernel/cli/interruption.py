"""Ctrl-C and a request to end, as a question that a running cell's caller can ask."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class Interruption:
    """While the block runs, the first SIGINT or SIGTERM is only noted; the second raises KeyboardInterrupt.

    A signal that was ignored (a job in the background of a script) stays ignored. For the main thread.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous = signal.getsignal(signum)
            if previous is not signal.SIG_IGN:
                self._previous[signum] = previous
                signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signum is not None

    @property
    def exit_code(self) -> int:
        """The exit code that says which signal it was, 0 if none has come."""
        return 0 if self._signum is None else 128 + self._signum

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:
            raise KeyboardInterrupt
        self._signum = signum


def exit_code_of_interrupt() -> int:
    """Return the exit code of a command that Ctrl-C has ended."""
    return 128 + signal.SIGINT
