"""The pipes behind the descriptors 1 and 2, through which children and C code write."""

import codecs
import logging
import os
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

from .rest import READ_SIZE

_log = logging.getLogger(__name__)


class Log(Protocol):
    """Where what is read goes."""

    def read(self, name: str, descriptor: int) -> bytes:
        """Read from a stream's pipe. Raises OSError."""

    def append(
        self, name: str, data: bytes, parent: dict[str, Any], *, raw: int | None = None, from_pipe: int = 0
    ) -> None:
        """Take in text as UTF-8."""


class Stream(Protocol):
    """The stream of Python's that a descriptor belongs to."""

    name: str

    @property
    def latest_parent(self) -> dict[str, Any]:
        """The header of the cell that started last."""

    def fileno(self) -> int:
        """Return the number of the descriptor."""


class DescriptorPipe:
    """The pipe behind descriptor 1 or 2, read by a thread and, before a flush, by whoever flushes.

    The warden makes it and holds the end that is read too: what is in it when the process dies is not lost.
    """

    def __init__(self, log: Log, stream: Stream, ends: Sequence[int] | None) -> None:
        self._log = log
        self._stream = stream
        self.number = stream.fileno()
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._undecoded = 0  # bytes read whose character is not complete
        self._lock = threading.RLock()  # a signal handler may print while its thread reads here
        self.reading = False
        self.read_end, self._write_end = os.pipe() if ends is None else ends
        for end in (self.read_end, self._write_end):
            os.set_inheritable(end, False)
        os.dup2(self._write_end, self.number)
        os.set_blocking(self.read_end, False)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def time_of_write(self) -> float:
        """Return how many seconds it takes at least to write to the pipe."""
        times = []
        for _ in range(5):
            began = monotonic()
            os.write(self._write_end, b"")
            times.append(monotonic() - began)
        return min(times)

    def drain(self) -> None:
        """Take in all that is in the pipe now."""
        with self._lock:
            while self._read_once():
                pass

    def end_character(self) -> None:
        """Take in what is in the pipe now, and the bytes of a character that is not complete."""
        with self._lock:
            self.drain()
            if not self.reading:
                self._take_in(self._decoder.decode(b"", final=True), self._undecoded)

    def repair(self) -> None:
        """Put the pipe back if the descriptor was closed. One that a cell has redirected stays as it is."""
        try:
            os.fstat(self.number)
        except OSError:
            try:
                os.dup2(self._write_end, self.number)
            except OSError as error:  # the cell has closed this one too
                _log.warning("descriptor %d is closed for good: %s", self.number, error)

    def take(self) -> None:
        """Take in what one read gives."""
        with self._lock:
            self._read_once()

    def _read_once(self) -> bool:
        """Take in what one read gives; return whether there may be more."""
        if self.reading:  # a signal handler prints: its text comes first
            return False
        self.reading = True
        try:
            data = self._log.read(self._stream.name, self.read_end)
            self._undecoded += len(data)
            self._take_in(self._decoder.decode(data), len(data))
            return len(data) == READ_SIZE
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("descriptor %d is not captured any more: %s", self.number, error)
            return False
        finally:
            self.reading = False

    def _take_in(self, text: str, from_pipe: int) -> None:
        if text:
            parent, raw = self._stream.latest_parent, self._undecoded
            self._undecoded = 0
            self._log.append(self._stream.name, text.encode(), parent, raw=raw, from_pipe=from_pipe)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self.reading = False


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of *data*. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]
