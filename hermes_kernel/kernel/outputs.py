"""What the kernel process writes, on its way to IOPub: in order, complete, and saved if the process dies.

Both standard streams share one log, so that what is written alternately arrives alternately. What Python
code writes is kept here until it is sent; what children and C code write to the file descriptors 1 and 2
goes through a pipe, which is emptied before a flush, so that it lands in the cell that wrote it.
"""

import logging
import os
import select
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from sys import gettrace, settrace
from time import monotonic
from typing import Any, Protocol

import zmq
from ipykernel.iostream import BackgroundSocket
from jupyter_client.session import Session

from ..sidecar.streams import STREAM_NAMES as STREAMS
from .pipes import DescriptorPipe, Stream, write_all
from .rest import RING, Rest, remains_in

FLUSH_INTERVAL = 0.2  # seconds until text that nobody flushes is sent
FLUSH_PAUSE = 0.05  # seconds between two flushes that a cell asks for
SEND_AT = RING // 2  # bytes that are sent without waiting for the interval: never more than RING wait
EXACT = 1000  # changes of stream of one cell that are shown exactly where they were
FLOOD = 6 * 1024 * 1024  # bytes of one cell that are sent as they come
REMEMBERED_CELLS = 64  # whose threads may still write
FLUSH_TIMEOUT = 10.0  # seconds that a waiting flush waits for the IOPub thread
FLUSH_AGAIN = 0.1  # seconds until that is woken once more


_log = logging.getLogger(__name__)


class IOPub(Protocol):
    """The part of ipykernel's IOPubThread that we use."""

    io_loop: Any
    thread: threading.Thread
    socket: Any
    closed: bool

    def schedule(self, f: Any) -> None:
        """Run *f* on the thread, after all that was scheduled before."""


class _Cell:
    """What one cell has written: how much was sent, and what was not, because it was too much."""

    __slots__ = ("changes", "decoded", "parent", "sent", "skipped", "tails", "totals")

    def __init__(self, parent: dict[str, Any]) -> None:
        self.parent = parent
        self.changes = 0  # how often it has gone back to a stream of which something waits
        self.sent = 0
        self.totals = dict.fromkeys(STREAMS, 0)
        self.decoded = dict.fromkeys(STREAMS, 0)  # bytes that decoding has added to what was written
        self.skipped = dict.fromkeys(STREAMS, 0)
        self.tails: dict[str, tuple[int, int]] = {}  # where the end of what was skipped stands in its stream

    def skip(self, name: str, start: int, end: int) -> None:
        """Note that a part of a stream is not sent; done again it changes nothing."""
        tail = self.tails.get(name, (start, start))
        if tail[1] >= end > start:
            return
        # A signal handler may raise wherever something is called: from here on nothing is.
        self.tails[name] = (tail[0] if tail[1] == start else start, end)
        self.skipped[name] += end - start
        self.totals[name] += end - start


class _Handover:
    """A message for the IOPub thread, which sends it once, however often it has been handed over."""

    __slots__ = ("_frames", "_iopub")

    def __init__(self, iopub: IOPub, frames: list[bytes]) -> None:
        self._iopub = iopub
        self._frames = frames

    def __call__(self) -> None:
        frames, self._frames = self._frames, []
        if not frames or self._iopub.closed:
            return
        try:
            self._iopub.socket.send_multipart(frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.ENOTSOCK:
                raise
            _log.debug("the kernel ends: %s", error)


class _Segment:
    """A part of one stream that one cell has written and nobody has sent yet."""

    __slots__ = ("cell", "end", "message", "name", "parent", "rest", "start")

    def __init__(self, rest: Rest, parent: dict[str, Any], cell: _Cell) -> None:
        self.rest = rest
        self.name = rest.name
        self.parent = parent
        self.cell = cell
        self.start = self.end = rest.total
        self.message: _Handover | None = None

    def note_sent(self, end: int, sent: int) -> None:
        """Note that everything up to *end* is handed over, which makes *sent* bytes of the cell."""
        # A signal handler may raise wherever something is called, and then the segment is handed over again:
        # nothing is called here.
        self.cell.totals[self.name] += end - self.start
        self.cell.sent = sent
        self.rest.sent = self.start = end
        self.message = None


class OutputLog:
    """The order of everything that the process writes, and the way out of it.

    What was written stands in the ring of its stream until it is sent. Of a cell that writes more than FLOOD
    bytes the rest is counted, and only its end is sent, when the cell is over. A cell that has changed
    streams EXACT times has a message for each stream and flush from then on: one for each change would take
    its clients longer than the cell.

    ``wait`` = a flush waits until the IOPub thread has sent (stock behaviour); else a flush hands over in
    the calling thread, which is enough: the idle status is handed over after it.
    """

    def __init__(self, *, wait: bool = False) -> None:
        self._wait = wait
        self.lock = threading.RLock()
        self._segments: deque[_Segment] = deque()
        self._open: _Segment | None = None  # the one of them that is written to
        self._latest: dict[str, _Segment] = {}  # the last of them of each stream
        self.segment: _Segment | None = None  # the open one, while nobody works on it
        self.written_at = 0.0
        self.shortest_write = 0.0
        """Seconds that it takes at least to write to a descriptor: within them nobody has."""
        self._sent_at = 0.0
        self._flush_due = False
        self._flush_wanted = False
        # A signal handler or a trace function may print while its thread is at work here: that waits.
        self._busy = False
        self._waiting: deque[tuple[str, bytes, dict[str, Any], int | None, int]] = deque()
        self._send_waits = False
        self._forked = False
        self._session: Session | None = None
        self._iopub: IOPub | None = None
        self._rests, self._mark = remains_in(None)
        self._cells: OrderedDict[str, _Cell] = OrderedDict()
        self._pipes: list[DescriptorPipe] = []
        self._poll: select.poll | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def bind(
        self,
        session: Session,
        iopub: IOPub,
        directory: Path | None,
        streams: Sequence[Stream],
        pipes: Sequence[Sequence[int] | None],
    ) -> None:
        """Begin to send, and to read the descriptors 1 and 2.

        *pipes*: the two ends of one for each stream, as the host has made them; None makes one here.
        """
        self._forked = False
        self._session, self._iopub = session, iopub
        if directory is not None:
            self._rests, self._mark = remains_in(directory / "kernel.rest")
            self._drop_segments()
            self._cells.clear()
        if hasattr(os, "fork"):
            self._pipes = [DescriptorPipe(self, s, pipe) for s, pipe in zip(streams, pipes, strict=True)]
            self._poll = select.poll()
            for pipe in self._pipes:
                self._poll.register(pipe.read_end, select.POLLIN)
            self.shortest_write = min((pipe.time_of_write() for pipe in self._pipes), default=0.0)
            threading.Thread(target=self._watch_pipes, name="hermes-fd", daemon=True).start()

    def write(self, name: str, text: str, parent: dict[str, Any]) -> None:
        """Take in text that Python code writes, in the cell whose request has the header *parent*."""
        if monotonic() - self.written_at >= self.shortest_write:
            self.drain()  # what a child has written before this stands before it
        try:
            data = text.encode()
        except UnicodeEncodeError:  # a lone surrogate is no text for anybody else
            data = text.encode("utf-8", "backslashreplace")
        self.append(name, data, parent)
        self.written_at = monotonic()

    def read(self, name: str, descriptor: int) -> bytes:
        """Read from a stream's pipe; what is read counts as written once it is appended. Raises OSError."""
        return self._rests[name].read(descriptor)

    def append(
        self, name: str, data: bytes, parent: dict[str, Any], *, raw: int | None = None, from_pipe: int = 0
    ) -> None:
        """Put UTF-8 at the end of what was written.

        *raw*: how many bytes it was before it was decoded; *from_pipe*: how many bytes of a read it was.
        """
        if self._forked:
            self._write_in_child(name, data)
            return
        with self.lock:
            self._waiting.append((name, data, parent, raw, from_pipe))
            self._work()

    def _work(self) -> None:
        """Do what waits, in order; nothing if this thread is doing it already."""
        if self._busy:
            return
        self._busy = True
        trace = gettrace()
        if trace is not None:  # one that prints each line would never come to an end of ours
            settrace(None)
        try:
            while self._waiting or self._send_waits:
                if self._waiting:
                    self._append(*self._waiting.popleft())
                else:
                    self._send_waits = False
                    self._send_now()
        finally:
            self._busy = False
            if trace is not None:
                settrace(trace)

    def _append(
        self, name: str, data: bytes, parent: dict[str, Any], raw: int | None, from_pipe: int
    ) -> None:
        # Until it is there again, nobody writes into the segment without the lock.
        segment, self.segment = self.segment, None
        if segment is None or segment.parent is not parent or segment.rest.name != name:
            segment = self._begin_segment(name, parent)
        size = len(data)
        if raw is not None:
            segment.cell.decoded[name] += size - raw
        if size > SEND_AT:
            self._append_much(segment, data, from_pipe)
            return
        rest = segment.rest
        rest.add(data, from_pipe=from_pipe)
        if rest.total - rest.sent >= SEND_AT:
            self._send_now()
            return
        self.segment = segment
        if not self._flush_due:
            self._flush_due = True
            self._flush_after(FLUSH_INTERVAL)

    def _append_much(self, segment: _Segment, data: bytes, from_pipe: int) -> None:
        """Put more than fits into the ring at its end, in parts; of a flood only the end is needed."""
        name, parent, rest = segment.rest.name, segment.parent, segment.rest
        self._send_now()
        at = 0
        while at < len(data):
            if segment.cell.sent >= FLOOD:
                start = rest.total
                rest.add(memoryview(data)[at:], from_pipe=from_pipe)
                rest.sent = rest.total
                segment.cell.skip(name, start, rest.total)
                return
            end = _boundary(data, at + SEND_AT)
            segment = self._begin_segment(name, parent)
            rest.add(data[at:end], from_pipe=from_pipe)
            at, from_pipe = end, 0
            self._send_now()

    def _begin_segment(self, name: str, parent: dict[str, Any]) -> _Segment:
        key = parent.get("msg_id", "")
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(parent)
            while len(self._cells) > REMEMBERED_CELLS:
                self._cells.popitem(last=False)
        self._close_segment()
        latest = self._latest.get(name)
        if latest is not None and latest.parent is parent:
            if cell.changes >= EXACT:
                self._open = latest
                return latest
            cell.changes += 1
        segment = self._open = self._latest[name] = _Segment(self._rests[name], parent, cell)
        self._segments.append(segment)
        return segment

    def _close_segment(self) -> None:
        self.segment = None
        if self._open is not None:
            self._open.end = self._open.rest.total
            self._open = None

    def _drop_segments(self) -> None:
        self._segments.clear()
        self._latest.clear()
        self.segment = self._open = None

    def flush(self) -> None:
        """Hand everything that was written before this call to the IOPub thread."""
        if self._forked:
            for name in list(self._child_lines):
                self._write_in_child(name, b"", whole=True)
            return
        self.drain()
        self._send()
        iopub = self._iopub
        if self._wait and iopub is not None and iopub.thread.is_alive():
            if threading.current_thread() is iopub.thread:
                return
            sent = threading.Event()
            until = monotonic() + FLUSH_TIMEOUT
            while not sent.is_set() and monotonic() < until:
                # Also again: a signal handler that raised may have kept the thread asleep.
                iopub.schedule(sent.set)
                sent.wait(FLUSH_AGAIN)
            if not sent.is_set():
                _log.warning("the IOPub thread did not send within %s s", FLUSH_TIMEOUT)

    def flush_soon(self) -> None:
        """Hand over what was written, but not more often than somebody can look: a loop may ask for it."""
        since = monotonic() - self._sent_at
        if self._forked or self._wait or since >= FLUSH_PAUSE:
            self.flush()
        elif not self._flush_wanted:
            self._flush_wanted = True
            self._flush_after(FLUSH_PAUSE - since)

    def finish(self, msg_id: str) -> dict[str, int]:
        """A cell is over: hand over all that it has written, and return how many bytes each stream has had.

        Of what was too much to be sent the end is sent now, with how much is missing before it.
        """
        for pipe in self._pipes:
            pipe.end_character()
        self.flush()
        with self.lock:
            if self._iopub is not None:
                for cell in list(self._cells.values()):
                    self._send_tails(self._iopub, cell)
            done = self._cells.get(msg_id)
            if done is None:
                return dict.fromkeys(STREAMS, 0)
            return {name: done.totals[name] - done.decoded[name] for name in STREAMS}

    def _send_tails(self, iopub: IOPub, cell: _Cell) -> None:
        for name, (start, end) in list(cell.tails.items()):
            rest = self._rests[name]
            kept = max(start, rest.total - rest.size)
            data = rest.between(kept, end)
            lead = _boundary_after(data) if kept > start else 0
            skipped = cell.skipped[name] - len(data) + lead
            iopub.schedule(self._message(cell.parent, rest, data[lead:], end, skipped=skipped))
            cell.skipped[name] = 0
            del cell.tails[name]

    def others(self) -> bool:
        """Whether children or C code have written something that has not been taken in."""
        if self._poll is None or self._forked:
            return False
        try:
            if self._poll.poll(0):
                return True
        except RuntimeError:  # another thread looks just now
            return True
        # Afterwards: what has left a pipe, and is not in the log yet, is being read.
        return any(pipe.reading for pipe in self._pipes)

    def drain(self) -> None:
        """Take in what children and C code have written by now."""
        if self.others():  # one look at all pipes: a cell of one line flushes ten times
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

    def _flush_after(self, seconds: float) -> None:
        iopub = self._iopub
        if iopub is not None:
            iopub.schedule(lambda: iopub.io_loop.call_later(seconds, self._send))

    def _send(self) -> None:
        with self.lock:
            self._send_waits = True
            self._work()

    def _send_now(self) -> None:
        self._flush_due = self._flush_wanted = False
        if self._session is None or self._iopub is None:
            return
        self._close_segment()
        self._latest.clear()
        if self._segments:
            self._sent_at = monotonic()
        while self._segments:
            self._send_segment(self._iopub, self._segments[0])
            self._segments.popleft()

    def _send_segment(self, iopub: IOPub, segment: _Segment) -> None:
        """Hand a segment over. Where that is interrupted it is done again, and sends nothing twice."""
        cell, rest, start, end = segment.cell, segment.rest, segment.start, segment.end
        if start < end and cell.sent < FLOOD:
            data, sent = rest.between(start, end), cell.sent + end - start
            if sent > FLOOD:
                data, sent = data[: _boundary(data, FLOOD - cell.sent)], FLOOD
                end = start + len(data)
            if data:
                segment.message = segment.message or self._message(segment.parent, rest, data, end)
                iopub.schedule(segment.message)
            segment.note_sent(end, sent)
        if segment.start < segment.end:
            cell.skip(rest.name, segment.start, segment.end)
            rest.sent = segment.start = segment.end

    def _message(
        self, parent: dict[str, Any], rest: Rest, data: bytes, end: int, *, skipped: int = 0
    ) -> _Handover:
        """Make a message of a part of a stream, which ends at its byte *end* and has a gap before it."""
        assert self._session is not None
        assert self._iopub is not None
        hermes = {"end": end, "skipped": skipped} if skipped else {"end": end}
        message = self._session.msg(
            "stream",
            {"name": rest.name, "text": data.decode("utf-8", "backslashreplace")},
            parent=parent,
            metadata={"hermes": hermes},
        )
        frames = self._session.serialize(message, ident=b"stream." + rest.name.encode())
        return _Handover(self._iopub, frames)

    def _write_in_child(self, name: str, data: bytes, *, whole: bool = False) -> None:
        """Write to the pipe, in whole lines: half of one would stand alone in whatever cell runs by then."""
        data = self._child_lines.pop(name, b"") + data
        end = len(data) if whole else data.rfind(b"\n") + 1
        if end < len(data):
            self._child_lines[name] = data[end:]
        write_all(1 if name == "stdout" else 2, data[:end])

    def _after_fork(self) -> None:
        """In a forked child: it has no threads and must not speak for the kernel; it writes to the pipe."""
        self._forked = True
        self._child_lines: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self._drop_segments()
        self._busy = self._send_waits = False
        self._waiting.clear()


class OrderedSocket(BackgroundSocket):
    """The IOPub socket for everything but text: what is sent through it comes after the text before it."""

    def __init__(self, thread: Any, log: OutputLog) -> None:
        super().__init__(thread)
        object.__setattr__(self, "_output_log", log)  # its own attributes are those of the ZeroMQ socket

    def send_multipart(self, *args: Any, **kwargs: Any) -> Any:
        """Send a message, after the text."""
        self._output_log.flush()
        return super().send_multipart(*args, **kwargs)


def _boundary(data: bytes, at: int) -> int:
    """Return the last place up to *at* where a character of UTF-8 begins or the text ends."""
    if at >= len(data):
        return len(data)
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _boundary_after(data: bytes) -> int:
    """Return where the first character begins, at the most three bytes on."""
    at = 0
    while at < min(len(data), 3) and data[at] & 0xC0 == 0x80:
        at += 1
    return at
