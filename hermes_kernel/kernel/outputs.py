"""What the kernel process writes, on its way to IOPub: in order, complete, and saved if the process dies.

Both standard streams share one log, so that what is written alternately arrives alternately. What Python
code writes is kept here until it is sent; what children and C code write to the file descriptors 1 and 2
goes through a pipe, which is emptied before a flush, so that it lands in the cell that wrote it.
"""

import codecs
import contextvars
import io
import logging
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from jupyter_client.session import Session, extract_header

FLUSH_INTERVAL = 0.2  # seconds until text that nobody flushes is sent
SEND_AT = 256 * 1024  # characters that are sent without waiting for the interval
CHUNK = 1024 * 1024  # characters of one message: a frame must stay far below what a client accepts
FLUSH_TIMEOUT = 10.0  # seconds that a waiting flush waits for the IOPub thread
OTHERS_MAY_WRITE = 20e-6  # seconds since the last text in which a child can have written; a print takes 1e-6
READ_SIZE = 64 * 1024  # bytes; what a pipe holds

_COUNT = struct.Struct("<Q")
_COUNTS = struct.Struct("<QQ")
_log = logging.getLogger(__name__)


class IOPub(Protocol):
    """The part of ipykernel's IOPubThread that we use."""

    io_loop: Any
    thread: threading.Thread

    def schedule(self, f: Any) -> None:
        """Run *f* on the thread, after all that was scheduled before."""


class Rest:
    """The end of a stream in a file that outlives the process, for what could not be sent any more.

    The host reads it when the process is gone, and finds what no message has brought it. The file holds, as
    numbers of 8 bytes, little endian: how many bytes were written so far, and how many of them came from a
    pipe; then a ring of the last bytes written; then the second number as it was at the last read from the
    pipe, and READ_SIZE bytes for what was read. Between the read and the ring the process may die.
    """

    def __init__(self, path: Path | None) -> None:
        self.total = 0
        self._from_pipe = 0
        self._landed = 0
        self._map = None if path is None else _map(path)
        self._landing = 0 if self._map is None else len(self._map) - READ_SIZE
        self._size = self._landing - _COUNT.size - _COUNTS.size
        if self._size <= 0:
            self._map = None

    def read(self, descriptor: int) -> bytes:
        """Read at most READ_SIZE bytes from a pipe, which are in the file as soon as they have left it.

        Raises OSError; BlockingIOError if there is nothing to read.
        """
        if self._map is None:
            return os.read(descriptor, READ_SIZE)
        self._map[self._landing : self._landing + self._landed] = bytes(self._landed)
        _COUNT.pack_into(self._map, self._landing - _COUNT.size, self._from_pipe)
        with memoryview(self._map)[self._landing :] as landing:
            self._landed = os.readv(descriptor, [landing])
            return landing[: self._landed].tobytes()

    def add(self, data: bytes, *, from_pipe: int = 0) -> None:
        """Note what was written; *from_pipe*: how many bytes that were read it makes good for."""
        size = len(data)
        self.total += size
        self._from_pipe += from_pipe
        if self._map is None:
            return
        if size > self._size:
            data = data[-self._size :]
            size = self._size
        ring = _COUNTS.size
        at = ring + (self.total - size) % self._size
        room = ring + self._size - at
        if size <= room:
            self._map[at : at + size] = data
        else:
            self._map[at : at + room] = data[:room]
            self._map[ring : ring + size - room] = data[room:]
        # Last, and at once: a process that dies before has not written, and its read is still valid.
        _COUNTS.pack_into(self._map, 0, self.total, self._from_pipe)


class StartMark:
    """Which cell began last, in a file that outlives the process: so that none is ever run twice."""

    def __init__(self, path: Path | None) -> None:
        self._map = None if path is None else _map(path)

    def set(self, msg_id: str) -> None:
        """A cell begins."""
        if self._map is not None:
            size = len(self._map)
            self._map[:] = msg_id.encode("utf-8", "backslashreplace")[:size].ljust(size, b"\0")


def _map(path: Path) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:  # started by hand, without a directory of ours
        _log.info("%s is not kept beyond the end of the kernel: %s", path.name, error)
        return None


class _Segment:
    """Text of one stream and one cell, not sent yet."""

    __slots__ = ("buffer", "end", "name", "parent", "start")

    def __init__(self, name: str, parent: dict[str, Any], start: int) -> None:
        self.name = name
        self.parent = parent
        self.buffer = io.StringIO()
        self.start = start
        self.end = start


class OutputLog:
    """The order of everything that the process writes, and the way out of it.

    ``wait`` = a flush waits until the IOPub thread has sent (stock behaviour); else a flush hands over in
    the calling thread, which is enough: the idle status is handed over after it.
    """

    def __init__(self, *, wait: bool = False) -> None:
        self._wait = wait
        self._lock = threading.RLock()
        self._segments: list[_Segment] = []
        self._pending = 0
        self._written_at = 0.0
        self._flush_due = False
        self._forked = False
        self._session: Session | None = None
        self._iopub: IOPub | None = None
        self._rests = {"stdout": Rest(None), "stderr": Rest(None)}
        self._mark = StartMark(None)
        self._pipes: list[_DescriptorPipe] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def bind(
        self,
        session: Session,
        iopub: IOPub,
        directory: Path | None,
        streams: "list[HermesOutStream]",
        pipes: Sequence[Sequence[int] | None],
    ) -> None:
        """Begin to send, and to read the descriptors 1 and 2.

        *pipes*: the two ends of one for each stream, as the host has made them; None makes one here.
        """
        self._forked = False
        self._session, self._iopub = session, iopub
        if directory is not None:
            self._rests = {name: Rest(directory / f"{name}.rest") for name in self._rests}
            self._mark = StartMark(directory / "cell.started")
        if hasattr(os, "fork"):
            self._pipes = [_DescriptorPipe(s, pipe) for s, pipe in zip(streams, pipes, strict=True)]
            threading.Thread(target=self._watch_pipes, name="hermes-fd", daemon=True).start()

    def write(self, name: str, text: str, parent: dict[str, Any]) -> None:
        """Take in text that Python code writes, in the cell whose request has the header *parent*."""
        now = time.monotonic()
        if now - self._written_at > OTHERS_MAY_WRITE:
            self._drain_pipes()  # what a child has written before this stands before it
        self.append(name, text, parent)
        self._written_at = time.monotonic()

    def read(self, name: str, descriptor: int) -> bytes:
        """Read from a stream's pipe; what is read counts as written once it is appended. Raises OSError."""
        return self._rests[name].read(descriptor)

    def append(self, name: str, text: str, parent: dict[str, Any], *, from_pipe: int = 0) -> None:
        """Put text at the end of what was written; *from_pipe*: how many bytes of a read it stands for."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate is no text for anybody else
            data = text.encode("utf-8", "backslashreplace")
            text = data.decode("utf-8")
        if self._forked:
            self._write_in_child(name, data)
            return
        with self._lock:
            rest = self._rests[name]
            segment = self._segments[-1] if self._segments else None
            if segment is None or segment.name != name or segment.parent is not parent:
                segment = _Segment(name, parent, rest.total)
                self._segments.append(segment)
            segment.buffer.write(text)
            rest.add(data, from_pipe=from_pipe)
            segment.end = rest.total
            self._pending += len(text)
            if self._pending >= SEND_AT:
                self._send()
            elif not self._flush_due:
                self._flush_later()

    def flush(self) -> None:
        """Hand everything that was written before this call to the IOPub thread."""
        if self._forked:
            for name in list(self._child_lines):
                self._write_in_child(name, b"", whole=True)
            return
        self._drain_pipes()
        self._send()
        iopub = self._iopub
        if self._wait and iopub is not None and iopub.thread.is_alive():
            if threading.current_thread() is iopub.thread:
                return
            sent = threading.Event()
            iopub.schedule(sent.set)
            if not sent.wait(FLUSH_TIMEOUT):
                _log.warning("the IOPub thread did not send within %s s", FLUSH_TIMEOUT)

    def _drain_pipes(self) -> None:
        if not self._forked:
            for pipe in self._pipes:
                pipe.drain()

    def _watch_pipes(self) -> None:
        """Take in what children and C code write, as it comes."""
        watched = {pipe.read_end: pipe for pipe in self._pipes}
        poll = select.poll()
        for end in watched:
            poll.register(end, select.POLLIN)
        while watched:
            for end, events in poll.poll():
                if events & ~select.POLLIN:  # a cell has closed our end
                    _log.warning("descriptor %d is not captured any more", watched.pop(end).number)
                    poll.unregister(end)
                else:
                    watched[end].take()

    def begin_cell(self, msg_id: str) -> None:
        """Note that a cell begins."""
        self._mark.set(msg_id)

    def repair(self) -> None:
        """Reopen the descriptors 1 and 2 if a cell has closed them."""
        for pipe in self._pipes:
            pipe.repair()

    def _flush_later(self) -> None:
        iopub = self._iopub
        if iopub is None:
            return
        self._flush_due = True
        iopub.schedule(lambda: iopub.io_loop.call_later(FLUSH_INTERVAL, self._send))

    def _send(self) -> None:
        with self._lock:
            self._flush_due = False
            if self._session is None or self._iopub is None:
                return
            segments, self._segments, self._pending = self._segments, [], 0
            for segment in segments:
                self._send_segment(self._session, self._iopub, segment)

    def _send_segment(self, session: Session, iopub: IOPub, segment: _Segment) -> None:
        text = segment.buffer.getvalue()
        at = segment.start
        for first in range(0, len(text), CHUNK):
            chunk = text[first : first + CHUNK]
            last = first + CHUNK >= len(text)
            at = segment.end if last else at + len(chunk.encode("utf-8"))
            message = session.msg(
                "stream",
                {"name": segment.name, "text": chunk},
                parent=segment.parent,
                metadata={"hermes": {"end": at}},
            )
            session.send(iopub, message, ident=b"stream." + segment.name.encode())  # type: ignore[arg-type]

    def _write_in_child(self, name: str, data: bytes, *, whole: bool = False) -> None:
        """Write to the pipe, in whole lines: half of one would stand alone in whatever cell runs by then."""
        data = self._child_lines.pop(name, b"") + data
        end = len(data) if whole else data.rfind(b"\n") + 1
        if end < len(data):
            self._child_lines[name] = data[end:]
        _write_all(1 if name == "stdout" else 2, data[:end])

    def _after_fork(self) -> None:
        """In a forked child: it has no threads and must not speak for the kernel; it writes to the pipe."""
        self._forked = True
        self._child_lines: dict[str, bytes] = {}
        self._lock = threading.RLock()
        self._segments = []


class HermesOutStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a kernel.

    It cannot be closed: a cell that closes it has flushed it. ``fileno`` is a descriptor that is captured,
    so a child that is given the stream writes into the cell too.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, log: OutputLog, name: str) -> None:
        self._output_log = log
        self.name = name
        self._parent: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar(f"{name}_parent")
        self._latest_parent: dict[str, Any] = {}
        self._binary = _BinaryOutput(self)

    @property
    def parent_header(self) -> dict[str, Any]:
        """The header of the request that what is written now belongs to."""
        return self._parent.get(self._latest_parent)

    @property
    def latest_parent(self) -> dict[str, Any]:
        """The header of the cell that started last."""
        return self._latest_parent

    def set_parent(self, parent: dict[str, Any]) -> None:
        """Say whose output follows, for this context and for threads that have none of their own."""
        self._latest_parent = extract_header(parent)
        self._parent.set(self._latest_parent)

    def set_thread_parent(self, parent: dict[str, Any]) -> "contextvars.Token[dict[str, Any]]":
        """Say whose output follows in this context alone; returns the token for ``reset_thread_parent``."""
        return self._parent.set(extract_header(parent))

    def reset_thread_parent(self, token: "contextvars.Token[dict[str, Any]]") -> None:
        """Undo one ``set_thread_parent``."""
        self._parent.reset(token)

    def write(self, text: str) -> int:
        """Write text; returns its length in characters."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output_log.write(self.name, text, self.parent_header)
        return len(text)

    def flush(self) -> None:
        """Send what was written."""
        self._output_log.flush()

    def close(self) -> None:
        """Flush. The stream belongs to the kernel, which writes to it after the cell."""
        self.flush()

    @property
    def buffer(self) -> "_BinaryOutput":
        """The stream for bytes."""
        return self._binary

    def reconfigure(self, **options: Any) -> None:
        """Accept what a script asks of a text stream; this one is UTF-8 and unbuffered enough."""

    def fileno(self) -> int:
        """Return the descriptor that belongs to this stream."""
        return 1 if self.name == "stdout" else 2

    def isatty(self) -> bool:
        """Nobody types here."""
        return False

    def readable(self) -> bool:
        """It cannot be read."""
        return False

    def writable(self) -> bool:
        """It can be written."""
        return True

    def __del__(self) -> None:
        # io.IOBase would call close() when the interpreter ends, where nothing can be sent any more.
        return


class _BinaryOutput(io.RawIOBase):
    """``sys.stdout.buffer``: bytes are decoded as they come; what is not UTF-8 becomes an escape."""

    def __init__(self, text: HermesOutStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: Any) -> int:
        raw = bytes(data)
        self._text.write(self._decoder.decode(raw))
        return len(raw)

    def flush(self) -> None:
        self._text.flush()

    def close(self) -> None:
        self._text.flush()

    def fileno(self) -> int:
        return self._text.fileno()

    def writable(self) -> bool:
        return True

    def __del__(self) -> None:
        return


class _DescriptorPipe:
    """The pipe behind descriptor 1 or 2, read by a thread and, before a flush, by whoever flushes.

    The warden makes it and holds the end that is read too: what is in it when the process dies is not lost.
    """

    def __init__(self, stream: HermesOutStream, ends: Sequence[int] | None) -> None:
        self._stream = stream
        self.number = stream.fileno()
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._lock = threading.RLock()  # a signal handler may print while its thread reads here
        self._reading = False
        self.read_end, self._write_end = os.pipe() if ends is None else ends
        for end in (self.read_end, self._write_end):
            os.set_inheritable(end, False)
        os.dup2(self._write_end, self.number)
        os.set_blocking(self.read_end, False)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def drain(self) -> None:
        """Take in all that is in the pipe now."""
        with self._lock:
            while self._read_once():
                pass

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
        if self._reading:  # a signal handler prints: its text comes first
            return False
        self._reading = True
        log = self._stream._output_log
        try:
            data = log.read(self._stream.name, self.read_end)
            if text := self._decoder.decode(data):
                log.append(self._stream.name, text, self._stream.latest_parent, from_pipe=len(data))
            return len(data) == READ_SIZE
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("descriptor %d is not captured any more: %s", self.number, error)
            return False
        finally:
            self._reading = False

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._reading = False


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
