"""The output log and its streams, with an IOPub thread that is only a list."""

import mmap
import os
import re
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from hermes_kernel.kernel.outputs import EXACT, FLOOD, SEND_AT, OutputLog
from hermes_kernel.kernel.rest import READ_SIZE, RING, Rest, remains_in
from hermes_kernel.kernel.streams import HermesOutStream
from hermes_kernel.sidecar.streams import MARK_SIZE, REST_REGION

SIZE = 64


class Later:
    """The part of an event loop that the log uses: what is due, called by hand."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay: float, function: Callable[[], None]) -> None:
        self.due.append(function)


class FakeIOPub:
    """Takes what is sent, and runs what is scheduled at once."""

    def __init__(self) -> None:
        self.io_loop = Later()
        self.thread = threading.Thread()
        self.sent: list[list[bytes]] = []
        self.closed = False
        self.socket = self

    def schedule(self, f: Callable[[], None]) -> None:
        f()

    def send_multipart(self, frames: list[bytes], **_: Any) -> None:
        self.sent.append(frames)


class Wire:
    """A log bound to a fake IOPub, and what has come out of it."""

    def __init__(self, directory: Path | None = None) -> None:
        self.log = OutputLog()
        self.iopub = FakeIOPub()
        self.session = Session(key=b"k")
        self.stdout = HermesOutStream(self.log, "stdout")
        self.stderr = HermesOutStream(self.log, "stderr")
        if directory is not None:
            (directory / "kernel.rest").write_bytes(bytes(2 * REST_REGION + MARK_SIZE))
        self.log.bind(self.session, self.iopub, directory, [], [])

    def messages(self) -> list[tuple[str, str, int]]:
        return [message[:3] for message in self.messages_with_gaps()]

    def messages_with_gaps(self) -> list[tuple[str, str, int, int]]:
        reader = Session(key=b"k")
        out: list[tuple[str, str, int, int]] = []
        for frames in self.iopub.sent:
            _, parts = reader.feed_identities(frames)
            message = reader.deserialize(parts)
            content = message["content"]
            hermes = message["metadata"]["hermes"]
            out.append((content["name"], content["text"], hermes["end"], hermes.get("skipped", 0)))
        return out

    def texts(self) -> list[tuple[str, str]]:
        return [(name, text) for name, text, _ in self.messages()]


def test_what_is_written_alternately_arrives_alternately() -> None:
    wire = Wire()
    for n in range(3):
        wire.stdout.write(f"out {n}\n")
        wire.stderr.write(f"err {n}\n")
    wire.stdout.flush()
    assert wire.texts() == [(name, f"{name[3:]} {n}\n") for n in range(3) for name in ("stdout", "stderr")]


def test_nothing_is_sent_before_a_flush_and_everything_with_one() -> None:
    wire = Wire()
    wire.stdout.write("a")
    wire.stdout.write("b")
    assert wire.texts() == []
    assert len(wire.iopub.io_loop.due) == 1
    wire.stderr.flush()
    assert wire.texts() == [("stdout", "ab")]
    wire.iopub.io_loop.due.pop()()
    assert wire.texts() == [("stdout", "ab")]


def test_a_lot_is_sent_without_a_flush_in_messages_that_a_client_accepts() -> None:
    wire = Wire()
    text = "a" + "é" * SEND_AT
    wire.stdout.write(text)
    assert "".join(text for _, text in wire.texts()) == text
    assert [len(text.encode()) for _, text in wire.texts()] == [SEND_AT - 1, SEND_AT, 2]
    assert [end for _, _, end in wire.messages()] == [SEND_AT - 1, 2 * SEND_AT - 1, 2 * SEND_AT + 1]
    small = Wire()
    small.stdout.write("x" * (SEND_AT - 1))
    assert small.texts() == []


def test_a_loop_that_flushes_makes_few_messages_and_loses_nothing() -> None:
    wire = Wire()
    for n in range(1000):
        print(n, file=wire.stdout, flush=True)
    assert len(wire.texts()) < 100
    while wire.iopub.io_loop.due:
        wire.iopub.io_loop.due.pop()()
    assert "".join(text for _, text in wire.texts()) == "".join(f"{n}\n" for n in range(1000))


@pytest.mark.parametrize("piece", [7, 1000, SEND_AT + 1, 3 * FLOOD])
def test_of_a_flood_head_and_end_are_sent_and_all_is_counted(piece: int) -> None:
    wire = Wire()
    header = Session().msg("execute_request")
    wire.stdout.set_parent(header)
    line = ("é" * piece)[: piece - 1] + "\n"
    written = 0
    while written < 2 * FLOOD:
        wire.stdout.write(line)
        written += len(line.encode())
    wire.stderr.set_parent(header)
    wire.stderr.write("and an error\n")
    counts = wire.log.finish(header["header"]["msg_id"])
    assert counts == {"stdout": written, "stderr": 13}
    sent = [
        (text, end, skipped) for name, text, end, skipped in wire.messages_with_gaps() if name == "stdout"
    ]
    *head, (tail, end, skipped) = sent
    whole = line * (written // len(line.encode()))
    begin = "".join(text for text, _, _ in head)
    assert not any(gap for _, _, gap in head)
    assert whole.startswith(begin)
    assert FLOOD - 4 <= len(begin.encode()) <= FLOOD
    assert whole.endswith(tail)
    assert len(tail.encode()) > RING - 4 - SEND_AT
    assert end == written == len(begin.encode()) + skipped + len(tail.encode())
    assert [text for name, text in wire.texts() if name == "stderr"] == ["and an error\n"]
    assert wire.log.finish(header["header"]["msg_id"]) == counts
    assert len(wire.messages_with_gaps()) == len(sent) + sum(n == "stderr" for n, _ in wire.texts())


def test_each_message_says_how_much_had_been_written_by_its_end() -> None:
    wire = Wire()
    wire.stdout.write("é")
    wire.stdout.flush()
    wire.stderr.write("xyz")
    wire.stdout.write("b")
    wire.log.flush()
    assert wire.messages() == [("stdout", "é", 2), ("stderr", "xyz", 3), ("stdout", "b", 3)]


def test_text_goes_to_the_cell_that_wrote_it() -> None:
    wire = Wire()
    headers = [Session().msg("execute_request") for _ in range(2)]
    for header in headers:
        wire.stdout.set_parent(header)
        wire.stdout.write("x")
    token = wire.stdout.set_thread_parent(headers[0])
    wire.stdout.write("y")
    wire.stdout.reset_thread_parent(token)
    wire.stdout.write("z")
    wire.stdout.flush()
    reader = Session(key=b"k")
    parents = [
        reader.deserialize(reader.feed_identities(f)[1])["parent_header"]["msg_id"] for f in wire.iopub.sent
    ]
    first, second = (h["header"]["msg_id"] for h in headers)
    assert parents == [first, second, first, second]


def test_a_lone_surrogate_is_written_as_its_escape() -> None:
    wire = Wire()
    assert wire.stdout.write("a\ud800b") == 3
    wire.stdout.flush()
    assert wire.texts() == [("stdout", "a\\ud800b")]


@given(st.lists(st.binary(max_size=7), max_size=30))
def test_bytes_come_out_as_their_text_however_they_are_cut(pieces: list[bytes]) -> None:
    wire = Wire()
    for piece in pieces:
        assert wire.stdout.buffer.write(piece) == len(piece)
    wire.stdout.buffer.write(b"\n")
    wire.stdout.flush()
    whole = (b"".join(pieces) + b"\n").decode("utf-8", "backslashreplace")
    assert "".join(text for _, text in wire.texts()) == whole


def test_a_stream_cannot_be_closed_and_is_what_a_script_expects_of_one() -> None:
    wire = Wire()
    wire.stdout.write("a")
    wire.stdout.close()
    assert wire.texts() == [("stdout", "a")]
    assert not wire.stdout.closed
    wire.stdout.write("b")
    wire.stdout.reconfigure(encoding="utf-8", line_buffering=True)
    assert (wire.stdout.fileno(), wire.stderr.fileno()) == (1, 2)
    assert wire.stdout.writable()
    assert not wire.stdout.isatty()
    assert not wire.stdout.readable()
    with pytest.raises(TypeError, match="must be str, not bytes"):
        wire.stdout.write(b"x")  # type: ignore[arg-type]
    print("c", file=wire.stdout, flush=True)
    wire.log.flush()
    assert wire.texts()[-1] == ("stdout", "bc\n")


def small_rest(path: Path) -> Rest:
    """A ring of SIZE bytes in a new file, where something else stands before it and behind it."""
    length = 24 + SIZE + READ_SIZE
    path.write_bytes(bytes(8) + bytes(length) + b"behind")
    with open(path, "r+b") as file:
        return Rest("stdout", mmap.mmap(file.fileno(), 0), base=8, length=length)


def read_rest(path: Path, size: int = SIZE, *, start: int = 0) -> tuple[int, bytes]:
    raw = path.read_bytes()[start:]
    return struct.unpack_from("<Q", raw)[0], raw[16 : 16 + size]


@given(st.lists(st.binary(max_size=3 * SIZE), max_size=20))
def test_the_end_of_what_was_written_can_be_read_from_the_file(writes: list[bytes]) -> None:
    path = Path(os.environ["XDG_RUNTIME_DIR"]) / "ring"
    rest = small_rest(path)
    for data in writes:
        rest.add(data)
    total, ring = read_rest(path, start=8)
    assert (path.read_bytes()[:8], path.read_bytes()[-6:]) == (bytes(8), b"behind")
    everything = b"".join(writes)
    assert total == rest.total == len(everything)
    cut = total % SIZE
    ordered = ring[:total] if total <= SIZE else ring[cut:] + ring[:cut]
    assert ordered == everything[-SIZE:]
    path.unlink()


def test_what_was_written_and_not_sent_is_in_the_file(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.stdout.write("sent")
    wire.stdout.flush()
    wire.stdout.write(" and not")
    total, ring = read_rest(tmp_path / "kernel.rest", RING)
    assert (total, ring[:total]) == (12, b"sent and not")
    assert read_rest(tmp_path / "kernel.rest", start=REST_REGION)[0] == 0


def landed(path: Path) -> bytes:
    """What a host would take for read and not noted."""
    raw = path.read_bytes()[8:-6]
    valid = raw[8:16] == raw[16 + SIZE : 24 + SIZE]
    return raw[24 + SIZE :].rstrip(b"\0") if valid else b""


def test_what_has_left_the_pipe_is_in_the_file_at_any_time_and_once(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    rest = small_rest(path)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    try:
        for data in (b"first and longer\n", b"second\n", b"third, the longest of all\n"):
            os.write(write_end, data)
            assert rest.read(read_end) == data
            assert landed(path) == data
            rest.add(b"printed meanwhile\n")
            assert landed(path) == data
            rest.add(data, from_pipe=len(data))
            assert landed(path) == b""
            with pytest.raises(BlockingIOError):
                rest.read(read_end)
            assert landed(path) == b""
    finally:
        os.close(read_end)
        os.close(write_end)


def test_without_a_file_everything_else_works(tmp_path: Path) -> None:
    for place in (None, tmp_path / "nothing", tmp_path / "short"):
        (tmp_path / "short").write_bytes(bytes(100))
        rests, mark = remains_in(place)
        rests["stdout"].add(b"x")
        mark.set("a cell")
        assert [rest.total for rest in rests.values()] == [1, 0]


def test_a_forked_child_writes_to_the_descriptor_and_sends_nothing() -> None:
    wire = Wire()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write_end, 1)
        wire.stdout.write("from the child\n")
        wire.stdout.flush()
        os._exit(0 if not wire.iopub.sent else 1)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"from the child\n"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_writers_in_many_threads_lose_nothing() -> None:
    wire = Wire()
    threads = [
        threading.Thread(target=lambda: [print("x", file=wire.stdout, flush=n % 7 == 0) for n in range(500)])
        for _ in range(8)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    wire.log.flush()
    assert "".join(text for _, text in wire.texts()).count("x") == 4000
    ends = [end for _, _, end in wire.messages()]
    assert ends == sorted(ends)
    assert ends[-1] == 8000


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="POSIX signals")
def test_a_signal_handler_that_prints_loses_nothing_and_disturbs_nothing() -> None:
    wire = Wire()
    handled = 0

    def handle(*_: object) -> None:
        nonlocal handled
        handled += 1
        print("s" * 7, file=wire.stdout)
        print("e" * 7, file=wire.stderr)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        for n in range(20_000):
            wire.stdout.write(f"{n:07}\n")
            if n % 3 == 0:
                wire.stderr.write(f"{n:07}\n")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wire.log.flush()
    assert handled > 10
    out = "".join(text for name, text in wire.texts() if name == "stdout")
    err = "".join(text for name, text in wire.texts() if name == "stderr")
    assert (len(out), len(err)) == (8 * (20_000 + handled), 8 * (6667 + handled))
    assert re.findall(r"\d{7}", out) == [f"{n:07}" for n in range(20_000)]


def test_a_handler_that_prints_while_a_segment_begins_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    wire.stdout.write("1")
    begin = wire.log._begin_segment
    monkeypatch.setattr(
        wire.log,
        "_begin_segment",
        lambda *given: (wire.stdout.write("s"), monkeypatch.undo(), begin(*given))[2],
    )
    wire.stderr.write("e")
    wire.stdout.write("2")
    wire.log.flush()
    assert wire.texts() == [("stdout", "1"), ("stderr", "e"), ("stdout", "s2")]


def test_a_trace_function_that_prints_each_line_loses_nothing() -> None:
    wire = Wire()
    calls = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal calls
        calls += 1
        wire.stdout.write(f"T{calls:06}\n")
        wire.stderr.write(f"E{calls:06}\n")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for n in range(50):
            wire.stdout.write(f"H{n:06}\n")
            wire.stdout.flush()
        still = sys.gettrace()
    finally:
        sys.settrace(before)
    wire.log.flush()
    assert still is trace
    out = "".join(text for name, text in wire.texts() if name == "stdout")
    err = "".join(text for name, text in wire.texts() if name == "stderr")
    assert re.findall(r"T\d{6}\n", out) == [f"T{n + 1:06}\n" for n in range(calls)]
    assert re.findall(r"H\d{6}\n", out) == [f"H{n:06}\n" for n in range(50)]
    assert len(err) == 8 * calls


@pytest.mark.parametrize("data", [5, None, "text", 1.5])
def test_a_stream_for_bytes_takes_bytes_alone(data: object) -> None:
    wire = Wire()
    with pytest.raises(TypeError):
        wire.stdout.buffer.write(data)
    for data in (b"a", bytearray(b"b"), memoryview(b"c"), array("B", b"d")):
        assert wire.stdout.buffer.write(data) == 1
    wire.log.flush()
    assert wire.texts() == [("stdout", "abcd")]


def test_half_a_character_is_an_escape_when_its_cell_ends() -> None:
    wire = Wire()
    header = Session().msg("execute_request")
    wire.stdout.set_parent(header)
    wire.stdout.buffer.write(b"ab\xe2\x82")
    wire.stdout.end_character()
    assert wire.log.finish(header["header"]["msg_id"])["stdout"] == 4
    assert wire.texts() == [("stdout", "ab\\xe2\\x82")]
    wire.stdout.buffer.write(b"\xac")
    wire.log.flush()
    assert wire.texts()[1:] == [("stdout", "\\xac")]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [False, True], ids=["before it is handed over", "after"])
def test_text_whose_sending_is_interrupted_is_sent_later_and_once(
    monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    wire = Wire()
    for n in range(5):
        wire.stdout.write(f"out {n}\n")
        wire.stderr.write(f"err {n}\n")
    schedule, calls = wire.iopub.schedule, 0

    def interrupted(f: Callable[[], None]) -> None:
        nonlocal calls
        calls += 1
        if calls != 4 or after:
            schedule(f)
        if calls == 4:
            raise Interrupted

    monkeypatch.setattr(wire.iopub, "schedule", interrupted)
    with pytest.raises(Interrupted):
        wire.log.flush()
    wire.stdout.write("more\n")
    wire.log.flush()
    wanted = [(name, f"{name[3:]} {n}\n") for n in range(5) for name in ("stdout", "stderr")]
    assert wire.texts() == [*wanted, ("stdout", "more\n")]
    assert [end for name, _, end in wire.messages() if name == "stdout"] == [6, 12, 18, 24, 30, 35]


def test_streams_that_alternate_very_often_are_told_apart_less_finely_and_lose_nothing() -> None:
    wire = Wire()
    header = Session().msg("execute_request")
    for stream in (wire.stdout, wire.stderr):
        stream.set_parent(header)
    for n in range(5000):
        wire.stdout.write(f"out {n}\n")
        wire.stderr.write(f"err {n}\n")
        if n == 4000:
            wire.log.flush()
    counts = wire.log.finish(header["header"]["msg_id"])
    texts = wire.texts()
    exact = [(name, f"{name[3:]} {n}\n") for n in range(EXACT // 2 - 1) for name in ("stdout", "stderr")]
    assert texts[: EXACT - 2] == exact
    assert len(texts) <= EXACT + 4
    for name in ("stdout", "stderr"):
        whole = "".join(f"{name[3:]} {n}\n" for n in range(5000))
        assert "".join(text for stream, text in texts if stream == name) == whole
        assert counts[name] == len(whole)
        ends = [end for stream, _, end in wire.messages() if stream == name]
        assert ends == sorted(ends)
        assert ends[-1] == len(whole)
    fresh = Session().msg("execute_request")
    for stream in (wire.stdout, wire.stderr):
        stream.set_parent(fresh)
    for _ in range(3):
        wire.stdout.write("o")
        wire.stderr.write("e")
    wire.log.flush()
    assert wire.texts()[len(texts) :] == [("stdout", "o"), ("stderr", "e")] * 3
