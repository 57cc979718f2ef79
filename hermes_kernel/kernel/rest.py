"""What a kernel leaves in a file that outlives it: the end of its output, and which cell began last."""

import logging
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from ..sidecar.streams import MARK_SIZE, REST_REGION, STREAM_NAMES

READ_SIZE = 64 * 1024  # bytes; what a pipe holds

_COUNT = struct.Struct("=Q")
_COUNTS = struct.Struct("=QQ")
RING = REST_REGION - READ_SIZE - _COUNTS.size - _COUNT.size  # bytes of a stream that are kept
_log = logging.getLogger(__name__)


class Rest:
    """The last bytes of a stream: those that nobody has sent yet, and what stood before them.

    In memory that outlives the process, for what could not be sent any more: the host reads it when the
    process is gone, and finds what no message has brought it. It holds, as numbers of 8 bytes: how many bytes
    were written so far, and how many of them came from a pipe; then a ring of the last bytes written; then
    the second number as it was at the last read from the pipe, and READ_SIZE bytes for what was read.
    Between the read and the ring the process may die.
    """

    def __init__(
        self, name: str, place: "mmap.mmap | None" = None, *, base: int = 0, length: int = REST_REGION
    ) -> None:
        self.name = name
        self.total = 0
        self.sent = 0  # how much of it has been sent
        self._from_pipe = 0
        self._landed = 0
        self.map: mmap.mmap | bytearray = bytearray(length) if place is None else place
        self._base = base
        self._landing = base + length - READ_SIZE
        self.start = base + _COUNTS.size  # of the ring
        self.end = self._landing - _COUNT.size
        self.size = self.end - self.start
        self.count = memoryview(self.map)[base : base + _COUNT.size].cast("Q")

    def read(self, descriptor: int) -> bytes:
        """Read at most READ_SIZE bytes from a pipe, which are in the file as soon as they have left it.

        Raises OSError; BlockingIOError if there is nothing to read.
        """
        self.map[self._landing : self._landing + self._landed] = bytes(self._landed)
        _COUNT.pack_into(self.map, self._landing - _COUNT.size, self._from_pipe)
        with memoryview(self.map)[self._landing : self._landing + READ_SIZE] as landing:
            self._landed = os.readv(descriptor, [landing])
            return landing[: self._landed].tobytes()

    def add(self, data: bytes | memoryview, *, from_pipe: int = 0) -> None:
        """Note what was written; *from_pipe*: how many bytes that were read it makes good for."""
        size = len(data)
        self.total += size
        self._from_pipe += from_pipe
        if size > self.size:
            data = data[-self.size :]
            size = self.size
        at = (self.total - size) % self.size
        room = self.size - at
        if size <= room:
            self.map[self.start + at : self.start + at + size] = data
        else:
            self.map[self.start + at : self.end] = data[:room]
            self.map[self.start : self.start + size - room] = data[room:]
        # Last, and at once: a process that dies before has not written, and its read is still valid.
        _COUNTS.pack_into(self.map, self._base, self.total, self._from_pipe)

    def between(self, start: int, end: int) -> bytes:
        """Return what was written from *start* to *end*, counted from the beginning, as far as it is kept."""
        start = max(start, self.total - self.size)
        if end <= start:
            return b""
        at, size = start % self.size, end - start
        room = self.size - at
        if size <= room:
            return bytes(self.map[self.start + at : self.start + at + size])
        return bytes(self.map[self.start + at : self.end]) + bytes(
            self.map[self.start : self.start + size - room]
        )


class StartMark:
    """Which cell began last, in memory that outlives the process: so that none is ever run twice."""

    def __init__(self, place: "mmap.mmap | None" = None, *, base: int = 0) -> None:
        self._map = place
        self._base = base

    def set(self, msg_id: str) -> None:
        """A cell begins."""
        if self._map is not None:
            mark = msg_id.encode("utf-8", "backslashreplace")[:MARK_SIZE].ljust(MARK_SIZE, b"\0")
            self._map[self._base : self._base + MARK_SIZE] = mark


class Remains(NamedTuple):
    """All of it: the rest of each stream, and the mark."""

    rests: dict[str, Rest]
    mark: StartMark


def remains_in(path: Path | None) -> Remains:
    """Return what is kept in a file that the host has made; without one it ends with the process."""
    try:
        if path is not None:
            with open(path, "r+b") as file:
                return _mapped(file.fileno())
    except (OSError, ValueError) as error:  # started by hand, without a directory of ours
        _log.info("nothing is kept beyond the end of the kernel: %s", error)
    return Remains({name: Rest(name) for name in STREAM_NAMES}, StartMark())


def _mapped(descriptor: int) -> Remains:
    place = mmap.mmap(descriptor, len(STREAM_NAMES) * REST_REGION + MARK_SIZE)
    rests = {name: Rest(name, place, base=number * REST_REGION) for number, name in enumerate(STREAM_NAMES)}
    return Remains(rests, StartMark(place, base=len(STREAM_NAMES) * REST_REGION))
