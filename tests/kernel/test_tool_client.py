"""The kernel's end of the tool bridge, against a host that is a script, over real sockets."""

import asyncio
import concurrent.futures
import contextvars
import gc
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hermes_kernel.errors import ToolBudgetExceeded, ToolError
from hermes_kernel.kernel import bridge as client_module
from hermes_kernel.kernel.bridge import MAX_CONNECTIONS, ToolClient
from hermes_kernel.kernel.context import CELL, Cell
from hermes_kernel.wire import MAX_FRAME, Failure, FrameDecoder, Hello, ToolCall, ToolReply

from .. import traces

BOUND = 5.0  # seconds in which what must happen happens, also on a busy machine
TOKEN = "token-of-the-kernel"
CELL_TOKEN = "token-of-the-cell"


class Connection:
    """A connection as the host sees it."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._decoder = FrameDecoder()
        self._frames: list[bytes] = []

    def frame(self) -> bytes | None:
        """Return the next frame, None at the end."""
        while not self._frames:
            try:
                data = self._peer.recv(1024 * 1024)
            except OSError:
                return None
            if not data:
                return None
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

    def greet(self) -> bool:
        """Take the hello and answer it."""
        body = self.frame()
        if body is None:
            return False
        assert Hello.parse(body).token == TOKEN
        self.raw(ToolReply(0).encode())
        return True

    def call(self) -> ToolCall | None:
        body = self.frame()
        return None if body is None else ToolCall.parse(body)

    def answer(self, call: ToolCall, value: Any = None, **more: Any) -> None:
        self.raw(ToolReply(call.call_id, value, **more).encode())

    def raw(self, data: bytes) -> None:
        with suppress(OSError):
            self._peer.sendall(data)

    def hang_up(self) -> None:
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)


Script = Callable[["ScriptedHost", Connection], None]


class ScriptedHost:
    """Listens as a host does; *script* serves each connection on a thread of its own."""

    def __init__(self, directory: Path, script: Script, *, unix: bool) -> None:
        self._script = script
        if unix:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(directory / "t"))
            self._listener.listen(128)
            self.endpoint: dict[str, Any] = {"transport": "unix", "path": str(directory / "t")}
        else:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            self.endpoint = {"transport": "tcp", "ip": "127.0.0.1", "port": self._listener.getsockname()[1]}
        self._lock = threading.Lock()
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="scripted-host")]
        self.gates: list[threading.Event] = []
        self.calls: list[ToolCall] = []
        self.connections = 0
        self.open_now = 0
        self.most_open = 0
        self._threads[0].start()

    def gate(self) -> threading.Event:
        """Make an event for which the script waits; the end of the test sets it, whatever happens."""
        event = threading.Event()
        self.gates.append(event)
        return event

    def note(self, call: ToolCall) -> None:
        with self._lock:
            self.calls.append(call)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for event in self.gates:
            event.set()
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(BOUND)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), name="scripted-host")
            with self._lock:
                self._peers.append(peer)
                self._threads.append(thread)
                self.connections += 1
                self.open_now += 1
                self.most_open = max(self.most_open, self.open_now)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            self._script(self, Connection(peer))
        finally:
            with self._lock:
                self.open_now -= 1
            peer.close()


def echo(host: ScriptedHost, connection: Connection) -> None:
    """What an ordinary host does: each call gets its arguments back."""
    if connection.greet():
        while (call := connection.call()) is not None:
            host.note(call)
            connection.answer(call, call.arguments)


def first(misbehave: Callable[[Connection, ToolCall], None]) -> Script:
    """Misbehave at the first call of all; every later one is served as it should be."""
    done = threading.Event()

    def script(host: ScriptedHost, connection: Connection) -> None:
        if not connection.greet():
            return
        while (call := connection.call()) is not None:
            host.note(call)
            if done.is_set():
                connection.answer(call, call.arguments)
            else:
                done.set()
                misbehave(connection, call)

    return script


Serve = Callable[[Script], ScriptedHost]


@pytest.fixture(params=["unix", "tcp"])
def serve(
    request: pytest.FixtureRequest, leaves_nothing: None, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Serve]:
    """Start a host; the code of the test belongs to a cell of it."""
    monkeypatch.setattr(client_module, "FRESH", 0, raising=False)  # look each time whether the host is there
    directory = Path(tempfile.mkdtemp(dir=runtime))
    made: list[ScriptedHost] = []
    before = CELL.get()

    def start(script: Script) -> ScriptedHost:
        host = ScriptedHost(directory, script, unix=request.param == "unix")
        made.append(host)
        CELL.set(Cell(CELL_TOKEN, host.endpoint))
        return host

    yield start
    CELL.set(before)
    for host in made:
        host.close()
    shutil.rmtree(directory)


@pytest.fixture
def client(leaves_nothing: None) -> Iterator[ToolClient]:
    client = ToolClient()
    client.bind(TOKEN)
    yield client
    for connection in client._open:
        connection.close()


def in_cell(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Carry the cell into a thread, as the kernel does."""
    context = contextvars.copy_context()
    return lambda: context.run(function, *args)


def under_way(client: ToolClient) -> int:
    """How many of the client's connections are taken, or lost."""
    return client.under_way


def can_make_as_many_calls_as_ever(client: ToolClient, host: ScriptedHost) -> None:
    """No slot was lost: so many calls are under way at once as may be."""
    assert under_way(client) == 0
    assert len(client._open) == len(client._idle)
    assert not [lease for lease in client._waiting if lease.turn and not lease.turn.cancelled()]
    before = len(host.calls)
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        calls = [pool.submit(in_cell(client.call, "echo", {"n": n})) for n in range(40)]
        assert [call.result(BOUND) for call in calls] == [{"n": n} for n in range(40)]
    assert len(host.calls) == before + 40


def is_waiting(thread: int) -> bool:
    """Whether a thread waits for a future."""
    frame: FrameType | None = sys._current_frames().get(thread)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:2] == ["wait", "result"]


# --- the ordinary case --------------------------------------------------------------------------------


def test_calls_one_after_the_other_share_a_connection(serve: Serve, client: ToolClient) -> None:
    host = serve(echo)
    for n in range(5):
        assert client.call("echo", {"n": n}) == {"n": n}
    assert asyncio.run(client.acall("echo", {"n": 5})) == {"n": 5}
    assert client.call("echo", {"n": 6}) == {"n": 6}
    assert (host.connections, len(host.calls)) == (1, 7)
    assert {call.cell for call in host.calls} == {CELL_TOKEN}
    assert len({call.call_id for call in host.calls}) == 7


def test_code_that_belongs_to_no_cell_calls_nothing(serve: Serve, client: ToolClient) -> None:
    host = serve(echo)

    def outside() -> None:
        CELL.set(None)
        with pytest.raises(ToolError, match="belongs to no cell"):
            client.call("echo", {})
        with pytest.raises(ToolError, match="belongs to no cell"):
            asyncio.run(client.acall("echo", {}))

    contextvars.copy_context().run(outside)
    assert host.connections == 0


def test_what_cannot_be_sent_is_not_sent_and_costs_no_connection(serve: Serve, client: ToolClient) -> None:
    host = serve(echo)
    with pytest.raises(ToolError, match="was not called"):
        client.call("echo", {"text": "x" * (MAX_FRAME + 1)})
    with pytest.raises((TypeError, ToolError)):
        client.call("echo", {"text": b"x"})
    can_make_as_many_calls_as_ever(client, host)


@pytest.mark.parametrize("text", ["[" * 1_100_000, "{}," * 1_100_000], ids=["lists", "objects"])
def test_a_long_text_is_one_value_whatever_it_is_made_of(serve: Serve, client: ToolClient, text: str) -> None:
    serve(echo)
    assert client.call("echo", {"text": text}) == {"text": text}


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Failure.TOOL, ToolError),
        (Failure.REFUSED, ToolError),
        (Failure.BUDGET, ToolBudgetExceeded),
        (Failure.ARGUMENTS, TypeError),
        ("of a later version", ToolError),
        (None, ToolError),
    ],
)
def test_each_kind_of_error_has_its_exception_and_keeps_the_connection(
    serve: Serve, client: ToolClient, kind: str | None, error: type[Exception]
) -> None:
    host = serve(first(lambda connection, call: connection.answer(call, error="no such file", kind=kind)))
    with pytest.raises(error, match="no such file"):
        client.call("echo", {})
    assert client.call("echo", {"n": 1}) == {"n": 1}
    assert host.connections == 1


def test_an_answer_that_closes_is_an_answer_and_the_next_call_connects_anew(
    serve: Serve, client: ToolClient
) -> None:
    def refuse(connection: Connection, call: ToolCall) -> None:
        connection.answer(call, error="the cell has ended", kind=Failure.REFUSED, closes=True)

    host = serve(first(refuse))
    with pytest.raises(ToolError, match="the cell has ended"):
        client.call("echo", {})
    assert client.call("echo", {"n": 1}) == {"n": 1}
    assert host.connections == 2
    can_make_as_many_calls_as_ever(client, host)


# --- a host that goes away, or is none ----------------------------------------------------------------


def asked(client: ToolClient, how: str, arguments: dict[str, Any]) -> Any:
    """Make one call, by either way."""
    if how == "call":
        return client.call("echo", arguments)
    return asyncio.run(client.acall("echo", arguments))


HOW = pytest.mark.parametrize("how", ["call", "acall"])


@HOW
def test_a_host_that_hangs_up_before_its_answer_is_not_asked_again(
    serve: Serve, client: ToolClient, how: str
) -> None:
    host = serve(first(lambda connection, call: connection.hang_up()))
    with pytest.raises(ToolError, match="may have run"):
        asked(client, how, {"n": 1})
    assert [call.arguments for call in host.calls] == [{"n": 1}]
    assert asked(client, how, {"n": 2}) == {"n": 2}
    assert [call.arguments for call in host.calls] == [{"n": 1}, {"n": 2}]
    can_make_as_many_calls_as_ever(client, host)


@HOW
def test_half_an_answer_is_none_and_is_not_asked_for_again(
    serve: Serve, client: ToolClient, how: str
) -> None:
    def half(connection: Connection, call: ToolCall) -> None:
        connection.raw(ToolReply(call.call_id, "x" * 1000).encode()[:500])
        connection.hang_up()

    host = serve(first(half))
    with pytest.raises(ToolError, match="may have run"):
        asked(client, how, {"n": 1})
    assert asked(client, how, {"n": 2}) == {"n": 2}
    assert len(host.calls) == 2


@HOW
def test_a_connection_that_the_host_has_hung_up_meanwhile_is_replaced_in_silence(
    serve: Serve, client: ToolClient, how: str
) -> None:
    answered, gone = threading.Event(), threading.Event()

    def script(host: ScriptedHost, connection: Connection) -> None:
        echo_once = not answered.is_set()
        if not connection.greet():
            return
        while (call := connection.call()) is not None:
            host.note(call)
            connection.answer(call, call.arguments)
            if echo_once:
                answered.set()
                connection.hang_up()
                gone.set()

    host = serve(script)
    assert asked(client, how, {"n": 1}) == {"n": 1}
    assert gone.wait(BOUND)
    assert asked(client, how, {"n": 2}) == {"n": 2}
    assert [call.arguments for call in host.calls] == [{"n": 1}, {"n": 2}]
    assert host.connections == 2
    can_make_as_many_calls_as_ever(client, host)


GARBAGE: dict[str, Callable[[ToolCall], bytes]] = {
    "another id": lambda call: ToolReply(call.call_id + 1, "of another call").encode(),
    "the id of a hello": lambda call: ToolReply(0, "of another call").encode(),
    "an id that is a text": lambda call: framed({"id": str(call.call_id), "value": 1}),
    "an id that is true": lambda call: framed({"id": True, "value": 1}),
    "no id": lambda call: framed({"value": 1}),
    "an error that is a number": lambda call: framed({"id": call.call_id, "error": 7}),
    "a list": lambda call: framed([call.call_id]),
    "no JSON": lambda call: struct.pack(">I", 5) + b"hello",
    "invalid UTF-8": lambda call: struct.pack(">I", 2) + b"\xff\xfe",
    "deep JSON": lambda call: struct.pack(">I", 200_000) + b"[" * 200_000,
    "NaN": lambda call: struct.pack(">I", 20) + b'{"id": 1,"value":NaN}'[:20],
    "HTTP": lambda call: b"HTTP/1.1 200 OK\r\n\r\n",
    "too large": lambda call: struct.pack(">I", MAX_FRAME + 1) + b"x" * 1000,
    "length 0xFFFFFFFF": lambda call: b"\xff\xff\xff\xff",
    "a frame of nothing": lambda call: bytes(4),
}


def framed(content: object) -> bytes:
    body = json.dumps(content).encode()
    return struct.pack(">I", len(body)) + body


@HOW
@pytest.mark.parametrize("what", GARBAGE)
def test_an_answer_that_is_none_costs_its_call_and_its_connection_alone(
    serve: Serve, client: ToolClient, what: str, how: str
) -> None:
    host = serve(first(lambda connection, call: connection.raw(GARBAGE[what](call))))
    with pytest.raises(ToolError, match="may have run"):
        asked(client, how, {"n": 1})
    assert asked(client, how, {"n": 2}) == {"n": 2}
    assert [call.arguments for call in host.calls] == [{"n": 1}, {"n": 2}]
    assert host.connections == 2
    can_make_as_many_calls_as_ever(client, host)


@HOW
def test_an_answer_too_many_is_never_taken_for_another_calls(
    serve: Serve, client: ToolClient, how: str
) -> None:
    def twice(connection: Connection, call: ToolCall) -> None:
        one = ToolReply(call.call_id, "right").encode()
        other = ToolReply(call.call_id + 1, "of the call to come").encode()
        connection.raw(one + other + other[:7])

    host = serve(first(twice))
    with suppress(ToolError):
        assert asked(client, how, {"n": 1}) == "right"
    with ThreadPoolExecutor(1) as pool:
        try:
            for n in (2, 3):
                answer = pool.submit(in_cell(asked, client, how, {"n": n}))
                assert answer.result(BOUND) == {"n": n}
        finally:
            host.close()  # wakes a client that waits for the rest of what is none
    assert len(host.calls) == 3


@HOW
def test_a_host_that_is_not_there_is_an_error_of_the_tool(serve: Serve, client: ToolClient, how: str) -> None:
    host = serve(echo)
    host.close()
    for _ in range(MAX_CONNECTIONS + 1):
        with pytest.raises(ToolError, match="cannot be reached"):
            asked(client, how, {})
    assert (client.under_way, len(client._open)) == (0, 0)


@HOW
def test_a_host_that_refuses_the_kernel_says_why(serve: Serve, client: ToolClient, how: str) -> None:
    def refuse(host: ScriptedHost, connection: Connection) -> None:
        connection.frame()
        connection.raw(ToolReply(0, error="too many connections", kind=Failure.REFUSED, closes=True).encode())

    host = serve(refuse)
    with pytest.raises(ToolError, match="too many connections"):
        asked(client, how, {})
    assert (client.under_way, len(client._open)) == (0, 0)
    assert host.calls == []


@HOW
def test_a_host_that_hangs_up_on_the_hello_costs_no_connection(
    serve: Serve, client: ToolClient, how: str
) -> None:
    serve(lambda host, connection: connection.hang_up())
    for _ in range(MAX_CONNECTIONS + 1):
        with pytest.raises(ToolError, match="cannot be reached"):
            asked(client, how, {})
    assert (client.under_way, len(client._open)) == (0, 0)


def test_a_host_that_does_not_answer_the_hello_is_waited_for_a_while(
    serve: Serve, client: ToolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HALF_FRAME_TIMEOUT", 0.3)
    released = threading.Event()

    def silent(host: ScriptedHost, connection: Connection) -> None:
        released.wait(BOUND)

    host = serve(silent)
    host.gates.append(released)
    with pytest.raises(ToolError, match="cannot be reached"):
        client.call("echo", {})
    assert (client.under_way, len(client._open)) == (0, 0)


def test_a_hosts_full_backlog_is_waited_for(client: ToolClient, leaves_nothing: None, runtime: Path) -> None:
    directory = Path(tempfile.mkdtemp(dir=runtime))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "t"))
    listener.listen(0)
    waiting: list[socket.socket] = []
    with suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(str(directory / "t"))

    def call() -> Any:
        CELL.set(Cell(CELL_TOKEN, {"transport": "unix", "path": str(directory / "t")}))
        return client.call("echo", {"n": 1})

    def serve_after_the_others() -> None:
        for _ in waiting[1:]:
            listener.accept()[0].close()
        peer, _ = listener.accept()
        with peer:
            connection = Connection(peer)
            assert connection.greet()
            tool_call = connection.call()
            assert tool_call is not None
            connection.answer(tool_call, "served")

    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(contextvars.Context().run, call)
            with suppress(TimeoutError):
                answer.result(0.2)  # it does not come before the host serves
            listener.settimeout(BOUND)
            with suppress(TimeoutError):
                serve_after_the_others()
            assert answer.result(BOUND) == "served"
    finally:
        listener.close()
        for one in waiting:
            one.close()
        shutil.rmtree(directory)


# --- many at once -------------------------------------------------------------------------------------


def test_100_calls_of_threads_and_tasks_share_32_connections_and_nobody_starves(
    serve: Serve, client: ToolClient
) -> None:
    arrived = threading.Semaphore(0)
    go = threading.Event()

    def script(host: ScriptedHost, connection: Connection) -> None:
        if connection.greet():
            while (call := connection.call()) is not None:
                host.note(call)
                arrived.release()
                go.wait(4 * BOUND)
                connection.answer(call, call.arguments)

    host = serve(script)
    host.gates.append(go)

    async def tasks() -> list[Any]:
        return await asyncio.gather(*(client.acall("echo", {"n": n}) for n in range(50)))

    with ThreadPoolExecutor(51) as pool:
        of_tasks = pool.submit(in_cell(lambda: asyncio.run(tasks())))
        of_threads = [pool.submit(in_cell(client.call, "echo", {"n": n})) for n in range(50, 100)]
        for _ in range(MAX_CONNECTIONS):
            assert arrived.acquire(timeout=BOUND)
        assert traces.eventually(lambda: len(client._waiting) == 100 - MAX_CONNECTIONS)
        assert (len(host.calls), host.connections) == (MAX_CONNECTIONS, MAX_CONNECTIONS)
        go.set()
        assert of_tasks.result(4 * BOUND) == [{"n": n} for n in range(50)]
        assert [call.result(4 * BOUND) for call in of_threads] == [{"n": n} for n in range(50, 100)]
    assert host.most_open <= 32
    assert sorted(call.arguments["n"] for call in host.calls) == list(range(100))
    can_make_as_many_calls_as_ever(client, host)


def test_calls_that_wait_are_served_in_the_order_in_which_they_came(serve: Serve, client: ToolClient) -> None:
    arrived, turns = threading.Semaphore(0), threading.Semaphore(0)

    def script(host: ScriptedHost, connection: Connection) -> None:
        if connection.greet():
            while (call := connection.call()) is not None:
                host.note(call)
                arrived.release()
                turns.acquire(timeout=BOUND)
                connection.answer(call, call.arguments)

    host = serve(script)
    with ThreadPoolExecutor(MAX_CONNECTIONS + 5) as pool:
        calls = []
        for n in range(MAX_CONNECTIONS + 5):
            calls.append(pool.submit(in_cell(client.call, "echo", {"n": n})))
            if n < MAX_CONNECTIONS:
                assert arrived.acquire(timeout=BOUND)
            else:
                wanted = n + 1 - MAX_CONNECTIONS
                assert traces.eventually(lambda wanted=wanted: len(client._waiting) == wanted)  # type: ignore[misc]
        for _ in range(5):
            turns.release()
            assert arrived.acquire(timeout=BOUND)
        turns.release(MAX_CONNECTIONS + 5)
        assert all(call.result(BOUND) for call in calls)
    assert [call.arguments["n"] for call in host.calls[MAX_CONNECTIONS:]] == [
        MAX_CONNECTIONS + n for n in range(5)
    ]


def test_lost_connections_let_those_that_wait_connect_anew(serve: Serve, client: ToolClient) -> None:
    arrived, drop = threading.Semaphore(0), threading.Event()

    def script(host: ScriptedHost, connection: Connection) -> None:
        if connection.greet():
            while (call := connection.call()) is not None:
                host.note(call)
                if drop.is_set():
                    connection.answer(call, call.arguments)
                    continue
                arrived.release()
                drop.wait(BOUND)
                connection.hang_up()

    host = serve(script)
    host.gates.append(drop)
    with ThreadPoolExecutor(60) as pool:
        calls = [pool.submit(in_cell(client.call, "echo", {})) for _ in range(60)]
        for _ in range(MAX_CONNECTIONS):
            assert arrived.acquire(timeout=BOUND)
        assert traces.eventually(lambda: len(client._waiting) == 60 - MAX_CONNECTIONS)
        drop.set()
        errors = [call.exception(BOUND) for call in calls]
    assert sum(isinstance(error, ToolError) for error in errors) == MAX_CONNECTIONS
    assert errors.count(None) == 60 - MAX_CONNECTIONS
    assert len(host.calls) == 60
    can_make_as_many_calls_as_ever(client, host)


def holding(arrived: threading.Semaphore, go: threading.Event) -> Script:
    """Hold the answers until *go*."""

    def script(host: ScriptedHost, connection: Connection) -> None:
        host.gates.append(go)
        if connection.greet():
            while (call := connection.call()) is not None:
                host.note(call)
                arrived.release()
                go.wait(4 * BOUND)
                connection.answer(call, call.arguments)

    return script


def test_a_plain_call_among_the_tasks_of_its_own_loop_does_not_wait_for_them(
    serve: Serve, client: ToolClient
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))
    outcome: list[object] = []

    async def main() -> None:
        tasks = [asyncio.create_task(client.acall("echo", {"n": n})) for n in range(MAX_CONNECTIONS)]
        while len(host.calls) < MAX_CONNECTIONS:
            await asyncio.sleep(0)
        go.set()
        # The tasks hold all connections, and cannot give one back while this blocks their loop.
        outcome.append(client.call("echo", {"n": -1}))
        await asyncio.gather(*tasks)

    thread = threading.Thread(target=in_cell(lambda: asyncio.run(main())))
    thread.start()
    thread.join(BOUND)
    is_stuck = thread.is_alive()
    if is_stuck:
        client._take_back(client._waiting[0])
    thread.join(BOUND)
    assert not is_stuck, "the loop waits for its own tasks, for ever"
    assert outcome == [{"n": -1}]


def test_a_task_that_connects_does_not_block_its_event_loop(
    serve: Serve, client: ToolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HALF_FRAME_TIMEOUT", 2)
    greet = threading.Event()

    def slow(host: ScriptedHost, connection: Connection) -> None:
        greet.wait(BOUND)
        echo(host, connection)

    host = serve(slow)
    host.gates.append(greet)

    async def main() -> Any:
        task = asyncio.create_task(client.acall("echo", {"n": 1}))
        await asyncio.sleep(0)
        greet.set()  # what the host waits for comes from this very loop
        return await task

    assert asyncio.run(main()) == {"n": 1}


# --- what is given up ---------------------------------------------------------------------------------


def test_a_cancelled_task_drops_its_call_and_loses_no_connection(serve: Serve, client: ToolClient) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))

    async def main() -> None:
        for _ in range(3):
            started = len(host.calls)
            tasks = [asyncio.create_task(client.acall("echo", {"n": n})) for n in range(MAX_CONNECTIONS + 20)]
            while len(host.calls) < started + MAX_CONNECTIONS:
                await asyncio.sleep(0)
            assert len(client._waiting) == 20
            for task in (
                *tasks[MAX_CONNECTIONS + 10 :],
                *tasks[: MAX_CONNECTIONS + 10],
            ):  # some that wait first
                task.cancel()
            assert all(
                isinstance(outcome, asyncio.CancelledError)
                for outcome in await asyncio.gather(*tasks, return_exceptions=True)
            )
            assert under_way(client) == 0

    asyncio.run(main())
    go.set()
    assert len(host.calls) == 3 * MAX_CONNECTIONS
    can_make_as_many_calls_as_ever(client, host)


def test_a_turn_that_comes_while_its_task_is_cancelled_goes_to_the_next(
    serve: Serve, client: ToolClient
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))

    async def main() -> None:
        tasks = [asyncio.create_task(client.acall("echo", {"n": n})) for n in range(MAX_CONNECTIONS + 2)]
        while len(host.calls) < MAX_CONNECTIONS:
            await asyncio.sleep(0)
        first_in_line = client._waiting[0].turn
        assert first_in_line is not None
        tasks[0].cancel()  # its turn goes to the first in line ...
        while not first_in_line.done():
            await asyncio.sleep(0)
        tasks[MAX_CONNECTIONS].cancel()  # ... which is cancelled before it runs
        go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes[-1] == {"n": MAX_CONNECTIONS + 1}
        assert isinstance(outcomes[0], asyncio.CancelledError)

    asyncio.run(main())
    can_make_as_many_calls_as_ever(client, host)


def test_tasks_whose_loop_is_closed_under_them_lose_no_connection(serve: Serve, client: ToolClient) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))
    loop = asyncio.new_event_loop()

    async def begin() -> list["asyncio.Task[Any]"]:
        tasks = [asyncio.create_task(client.acall("echo", {"n": n})) for n in range(MAX_CONNECTIONS + 5)]
        while len(host.calls) < MAX_CONNECTIONS:
            await asyncio.sleep(0)
        return tasks

    tasks = loop.run_until_complete(begin())
    coroutines = [task.get_coro() for task in tasks]
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    for coroutine in coroutines:
        assert coroutine is not None
        coroutine.close()  # what the collector does
    del tasks, coroutines
    go.set()
    assert under_way(client) == 0
    can_make_as_many_calls_as_ever(client, host)


def test_a_task_that_is_collected_at_the_worst_moment_locks_nobody_out(
    serve: Serve, client: ToolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))

    async def abandon_one_that_waits() -> None:
        waiting = client.acall("echo", {})
        waiting.send(None)
        cycle: list[object] = [waiting]
        cycle.append(cycle)

    class Collecting(concurrent.futures.Future[Any]):
        def __init__(self) -> None:
            gc.collect()
            super().__init__()

    with ThreadPoolExecutor(MAX_CONNECTIONS + 1) as pool:
        calls = [pool.submit(in_cell(client.call, "echo", {})) for _ in range(MAX_CONNECTIONS)]
        for _ in calls:
            assert arrived.acquire(timeout=BOUND)
        gc.disable()
        try:
            asyncio.run(abandon_one_that_waits())
            with monkeypatch.context() as patch:
                patch.setattr(concurrent.futures, "Future", Collecting)
                one_more = pool.submit(in_cell(client.call, "echo", {"n": 1}))
                go.set()
                done, _ = concurrent.futures.wait([one_more], BOUND)
        finally:
            gc.enable()
        if not done:
            client._lock.release()  # the thread waits for a lock that it holds itself
        assert one_more.result(BOUND) == {"n": 1}
    assert done, "a thread that collects garbage waits for what it holds itself"
    can_make_as_many_calls_as_ever(client, host)


def interrupt_when(condition: Callable[[], object]) -> threading.Thread:
    """Interrupt the main thread, as the kernel does, once *condition* holds."""

    def interrupt() -> None:
        if traces.eventually(condition):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt, name="interrupt")
    thread.start()
    return thread


def test_an_interrupted_call_drops_its_connection_and_the_next_has_its_own_answer(
    serve: Serve, client: ToolClient
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))
    interrupt = interrupt_when(lambda: arrived.acquire(blocking=False))
    with pytest.raises(KeyboardInterrupt):
        client.call("echo", {"n": 1})
    interrupt.join()
    go.set()
    assert client.call("echo", {"n": 2}) == {"n": 2}
    assert len(host.calls) == 2
    can_make_as_many_calls_as_ever(client, host)


def test_a_call_that_is_interrupted_while_it_waits_for_a_connection_loses_none(
    serve: Serve, client: ToolClient
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    host = serve(holding(arrived, go))
    main = threading.main_thread().ident or 0
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        calls = [pool.submit(in_cell(client.call, "echo", {})) for _ in range(MAX_CONNECTIONS)]
        for _ in calls:
            assert arrived.acquire(timeout=BOUND)
        for _ in range(3):
            interrupt = interrupt_when(lambda: is_waiting(main))
            with pytest.raises(KeyboardInterrupt):
                client.call("echo", {"n": "interrupted"})
            interrupt.join()
        go.set()
        assert all(call.result(BOUND) == {} for call in calls)
    assert len(host.calls) == MAX_CONNECTIONS, "a call that waited was sent all the same"
    can_make_as_many_calls_as_ever(client, host)


@pytest.mark.parametrize("is_connected", [True, False])
def test_an_interrupt_at_the_start_of_any_step_of_a_call_loses_no_connection(
    serve: Serve, client: ToolClient, is_connected: bool
) -> None:
    host = serve(echo)
    lost: list[str] = []
    at, is_done = 0, False
    while not is_done:  # Python looks for signals where a function begins: at the first one, the second one …
        at += 1
        left, where = at, ""

        def trace(frame: FrameType, event: str, _: object) -> None:
            nonlocal left, where
            if frame.f_code.co_filename == client_module.__file__:
                left -= 1
                if left == 0:
                    where = frame.f_code.co_name
                    raise KeyboardInterrupt

        if is_connected:
            client.call("echo", {})
        else:
            while client._idle:
                client._forget(client._idle.pop())
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            client.call("echo", {"n": at})
            is_done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if under_way(client):
            lost.append(where)
            client._leases.clear()
    assert client.call("echo", {"n": "right"}) == {"n": "right"}
    assert host.calls[-1].arguments == {"n": "right"}
    assert lost == []


# --- fork ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own_and_disturbs_no_call_of_its_parent(
    serve: Serve, client: ToolClient
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()

    def script(host: ScriptedHost, connection: Connection) -> None:
        if connection.greet():
            while (call := connection.call()) is not None:
                host.note(call)
                if call.arguments == {"who": "parent"}:
                    arrived.release()
                    go.wait(BOUND)
                connection.answer(call, [call.arguments, host.connections])

    host = serve(script)
    host.gates.append(go)
    assert client.call("echo", {"who": "nobody"})[1] == 1
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(in_cell(client.call, "echo", {"who": "parent"})) for _ in range(2)]
        for _ in held:
            assert arrived.acquire(timeout=BOUND)
        with client._lock:  # the worst moment: a thread of the parent holds the lock
            told = in_a_child(lambda: [client.call("echo", {"who": "child", "n": n}) for n in range(3)])
        assert told == [[{"who": "child", "n": n}, 3] for n in range(3)]
        go.set()
        assert [call.result(BOUND)[0] for call in held] == [{"who": "parent"}] * 2
    assert client.call("echo", {"who": "nobody"})[1] == 3
    assert len(host.calls) == 7
    assert under_way(client) == 0


def in_a_child(function: Callable[[], Any]) -> Any:
    """Return what *function* returns in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = b'"failed"'
        try:
            signal.alarm(10)
            told = json.dumps(function()).encode()
        except BaseException as error:
            told = json.dumps(repr(error)).encode()
        finally:
            os.write(writing, told)
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_all_connections_are_taken_does_not_wait_for_them(
    serve: Serve, client: ToolClient
) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()

    def script(host: ScriptedHost, connection: Connection) -> None:
        if connection.greet():
            while (call := connection.call()) is not None:
                host.note(call)
                if not call.arguments:
                    arrived.release()
                    go.wait(BOUND)
                connection.answer(call, call.arguments)

    host = serve(script)
    host.gates.append(go)
    with ThreadPoolExecutor(MAX_CONNECTIONS + 3) as pool:
        held = [pool.submit(in_cell(client.call, "echo", {})) for _ in range(MAX_CONNECTIONS + 3)]
        for _ in range(MAX_CONNECTIONS):
            assert arrived.acquire(timeout=BOUND)
        assert in_a_child(lambda: client.call("echo", {"who": "child"})) == {"who": "child"}
        go.set()
        assert [call.result(BOUND) for call in held] == [{}] * len(held)
    can_make_as_many_calls_as_ever(client, host)


def test_a_call_is_answered_soon(serve: Serve, client: ToolClient) -> None:
    serve(echo)
    began = time.monotonic()
    for n in range(200):
        client.call("echo", {"n": n})
    assert time.monotonic() - began < BOUND
