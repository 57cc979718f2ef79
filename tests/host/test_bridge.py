"""The host's end of the tool bridge under attack: real sockets, and peers that no client of ours is."""

import asyncio
import contextvars
import gc
import json
import os
import resource
import shutil
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hermes_kernel.cell.events import CellEvent, ToolCallEnded, ToolCallStarted
from hermes_kernel.cell.result import ToolCallRecord
from hermes_kernel.cell.tools import ToolCallContext, ToolSet
from hermes_kernel.errors import ToolError
from hermes_kernel.host import bridge as bridge_module
from hermes_kernel.host import grant as grant_module
from hermes_kernel.host.bridge import ACCEPT_AGAIN, MAX_CONNECTIONS, KernelBridge
from hermes_kernel.host.grant import CUT_OFF, CellTools, ToolGrant
from hermes_kernel.host.handlers import HandlerLoop
from hermes_kernel.host.supervisor import Supervisor
from hermes_kernel.kernel.bridge import ToolClient
from hermes_kernel.kernel.context import CELL, Cell
from hermes_kernel.wire import MAX_FRAME, FrameDecoder, ToolCall, ToolReply

from .. import traces

BOUND = 5.0  # seconds in which what must happen happens, also on a busy machine
SOON = 3.0  # seconds in which a client that plays by the rules is served, whatever others do
TOKEN = "token-of-the-kernel"
NOBODY = 65534
MIB = 1024 * 1024
HEADER = struct.Struct(">I")

Place = dict[str, Any]
Reply = dict[str, Any]


class Host:
    """A supervisor, and the bridges of the kernels that it has."""

    def __init__(self) -> None:
        self.supervisor = Supervisor("bridges")
        self._bridges: list[KernelBridge] = []
        self._releases: list[threading.Event] = []

    def open(self, place: Place, token: str = TOKEN, kernel_id: str = "k") -> KernelBridge:
        bridge = KernelBridge(self.supervisor, place, token=token, kernel_id=kernel_id)
        self._bridges.append(bridge)
        self.on_loop(bridge.open)
        return bridge

    def on_loop(self, function: Callable[[], object]) -> None:
        """Call a function on the supervisor's loop, as the sessions do."""

        async def called() -> None:
            function()

        self.supervisor.submit(called()).result(BOUND)

    def gate(self) -> threading.Event:
        """Make an event for which handlers wait; the end of the test sets it, whatever happens."""
        event = threading.Event()
        self._releases.append(event)
        return event

    def close(self) -> None:
        for event in self._releases:
            event.set()
        for bridge in self._bridges:
            self.on_loop(bridge.close)
        self.supervisor.close()
        assert traces.eventually(lambda: not serving_threads(), within=10), "threads were left"


class Peer:
    """One connection to a bridge, in the hands of the test."""

    def __init__(self, endpoint: Place, token: str | None = TOKEN) -> None:
        if endpoint["transport"] == "unix":
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            address: Any = endpoint["path"]
        else:
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            address = endpoint["ip"], endpoint["port"]
        self._decoder = FrameDecoder()
        self._frames: list[bytes] = []
        try:
            self.socket.connect(address)  # without a time limit: a full backlog is waited for
            self.socket.settimeout(BOUND)
            if token is not None:
                self.say({"hello": token})
                assert self.reply().get("error") is None
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send bytes; return whether the bridge has taken them all."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def say(self, content: object) -> bool:
        return self.send(frame(content))

    def ask(self, grant: ToolGrant | str, tool: str, call_id: Any = 1, /, **args: Any) -> Reply:
        """Call a tool and wait for the answer."""
        self.begin(grant, tool, call_id, **args)
        return self.reply()

    def begin(self, grant: ToolGrant | str, tool: str, call_id: Any = 1, /, **args: Any) -> None:
        cell = grant if isinstance(grant, str) else grant.token
        self.say({"id": call_id, "cell": cell, "tool": tool, "args": args})

    def reply(self) -> Reply:
        """Return the next answer; raises EOFError if there is none."""
        while not self._frames:
            try:
                data = self.socket.recv(MIB)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError("the bridge has hung up")
            self._frames = self._decoder.feed(data)
        reply: Reply = json.loads(self._frames.pop(0))
        return reply

    def rest(self) -> list[Reply]:
        """Return what comes until the bridge hangs up, which it has to."""
        replies = []
        while True:
            try:
                replies.append(self.reply())
            except EOFError:
                return replies


def frame(content: object) -> bytes:
    return framed(json.dumps(content).encode())


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def serving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hermes-tools"]


def refuse_loop() -> asyncio.AbstractEventLoop:
    raise AssertionError("no handler of this test is async")


def cell(
    *handlers: Callable[..., Any],
    limit: int | None = 50,
    loop: Callable[[], asyncio.AbstractEventLoop] = refuse_loop,
    on_event: Callable[[CellEvent], None] | None = None,
) -> CellTools:
    return CellTools(ToolSet.of(handlers), limit, loop=loop, on_event=on_event)


def echo(value: Any) -> Any:
    """Return what is given."""
    return value


def endpoint_of(bridge: KernelBridge) -> Place:
    grant = bridge.grant(cell())
    endpoint: Place = bridge.metadata(grant)["endpoint"]
    bridge.retire(grant)
    return endpoint


def is_served(bridge: KernelBridge, *, within: float = SOON) -> None:
    """A client that plays by the rules gets its answer, and in time."""
    began = time.monotonic()
    grant = bridge.grant(cell(echo))
    with Peer(bridge.metadata(grant)["endpoint"]) as peer:
        assert peer.ask(grant, "echo", value="x") == {"id": 1, "value": "x"}
    assert [call.name for call in bridge.retire(grant)] == ["echo"]
    assert time.monotonic() - began < within


@pytest.fixture
def directory(runtime: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=runtime))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def host(leaves_nothing: None) -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def unix(directory: Path) -> Place:
    return {"transport": "unix", "path": str(directory / "t")}


@pytest.fixture
def place(request: pytest.FixtureRequest, unix: Place) -> Place:
    return {} if getattr(request, "param", "unix") == "tcp" else unix


EITHER = pytest.mark.parametrize("place", ["unix", "tcp"], indirect=True)
"""For what depends on the kind of socket; a frame is a frame on both."""


@pytest.fixture
def bridge(host: Host, place: Place) -> KernelBridge:
    return host.open(place)


@pytest.fixture
def many_files() -> Iterator[None]:
    """A thousand connections have two thousand ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the system allows {hard} open files; this test needs {wanted}")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def short_of_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(bridge_module, "HALF_FRAME_TIMEOUT", seconds)


# --- the ordinary case --------------------------------------------------------------------------------


@EITHER
def test_a_kernel_that_shows_its_token_calls_the_tools_of_its_cell(bridge: KernelBridge) -> None:
    is_served(bridge)


def test_many_calls_in_one_write_are_answered_in_their_order(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge)) as peer:
        calls = [
            {"id": number, "cell": grant.token, "tool": "echo", "args": {"value": number}}
            for number in range(40)
        ]
        peer.send(b"".join(map(frame, calls)))
        assert [peer.reply() for _ in calls] == [{"id": number, "value": number} for number in range(40)]


def test_a_call_that_arrives_byte_by_byte_is_a_call(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge)) as peer:
        for byte in frame({"id": 3, "cell": grant.token, "tool": "echo", "args": {"value": 1}}):
            peer.send(bytes([byte]))
        assert peer.reply() == {"id": 3, "value": 1}


# --- what is no call ----------------------------------------------------------------------------------

DEEP = 200_000
NO_CALLS: dict[str, Callable[[str], bytes]] = {
    "empty": lambda cell: b"",
    "no JSON": lambda cell: b"read_file('x')",
    "half JSON": lambda cell: b'{"id": 7, "cell": ',
    "two values": lambda cell: b'{"id": 7} {"id": 8}',
    "deep and open": lambda cell: b"[" * DEEP,
    "deep and closed": lambda cell: b"[" * DEEP + b"]" * DEEP,
    "deep objects": lambda cell: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep arguments": lambda cell: call_text(cell, args='{"value":' + "[" * DEEP + "]" * DEEP + "}"),
    "NUL": lambda cell: b"\0",
    "NUL in a string": lambda cell: call_text(cell, args='{"value": "\0"}'),
    "NUL after it": lambda cell: call_text(cell) + b"\0",
    "BOM": lambda cell: b"\xef\xbb\xbf" + call_text(cell),
    "UTF-16": lambda cell: call_text(cell).decode().encode("utf-16"),
    "invalid UTF-8": lambda cell: call_text(cell, args='{"value": "?"}').replace(b"?", b"\xff\xfe"),
    "null": lambda cell: b"null",
    "a number": lambda cell: b"7",
    "a list": lambda cell: b"[" + call_text(cell) + b"]",
    "NaN": lambda cell: call_text(cell, args='{"value": NaN}'),
    "Infinity": lambda cell: call_text(cell, args='{"value": Infinity}'),
    "-Infinity": lambda cell: call_text(cell, args='{"value": [-Infinity]}'),
    "too many digits": lambda cell: call_text(cell, args='{"value": ' + "9" * 5000 + "}"),
    "id missing": lambda cell: frame_body({"cell": cell, "tool": "echo", "args": {"value": 1}}),
    "id a string": lambda cell: call_text(cell, call_id='"7"'),
    "id a bool": lambda cell: call_text(cell, call_id="true"),
    "id a fraction": lambda cell: call_text(cell, call_id="7.0"),
    "id null": lambda cell: call_text(cell, call_id="null"),
    "id NaN": lambda cell: call_text(cell, call_id="NaN"),
    "id of too many digits": lambda cell: call_text(cell, call_id="9" * 5000),
    "args missing": lambda cell: frame_body({"id": 7, "cell": cell, "tool": "echo"}),
    "args a list": lambda cell: call_text(cell, args="[1]"),
    "args null": lambda cell: call_text(cell, args="null"),
    "args a string": lambda cell: call_text(cell, args='"value"'),
    "cell missing": lambda cell: frame_body({"id": 7, "tool": "echo", "args": {"value": 1}}),
    "cell a list": lambda cell: frame_body({"id": 7, "cell": [cell], "tool": "echo", "args": {"value": 1}}),
    "tool null": lambda cell: frame_body({"id": 7, "cell": cell, "tool": None, "args": {"value": 1}}),
    "tool a dict": lambda cell: frame_body({"id": 7, "cell": cell, "tool": {}, "args": {"value": 1}}),
    "a second hello": lambda cell: frame_body({"hello": TOKEN}),
}
REFUSED_CALLS: dict[str, Callable[[str], bytes]] = {
    "unknown tool": lambda cell: frame_body({"id": 7, "cell": cell, "tool": "eval", "args": {"value": 1}}),
    "tool with a blank": lambda cell: frame_body(
        {"id": 7, "cell": cell, "tool": "echo ", "args": {"value": 1}}
    ),
    "tool of 1 MB": lambda cell: frame_body({"id": 7, "cell": cell, "tool": "x" * MIB, "args": {}}),
    "tool a dunder": lambda cell: frame_body({"id": 7, "cell": cell, "tool": "__class__", "args": {}}),
    "an argument too many": lambda cell: call_text(cell, args='{"value": 1, "other": 2}'),
    "an argument too few": lambda cell: call_text(cell, args="{}"),
    "an argument that is self": lambda cell: call_text(cell, args='{"value": 1, "self": 2}'),
    "1 000 arguments": lambda cell: frame_body(
        {"id": 7, "cell": cell, "tool": "echo", "args": {f"a{n}": n for n in range(1000)}}
    ),
    "cell with a blank after it": lambda cell: call_text(cell + " "),
    "cell with a blank before it": lambda cell: call_text(" " + cell),
    "cell with a line end": lambda cell: call_text(cell + "\\n"),
    "cell with NUL": lambda cell: call_text(cell + "\\u0000"),
    "cell in capitals": lambda cell: call_text(cell.swapcase()),
    "no cell": lambda cell: call_text(""),
    "the kernel's token for a cell": lambda cell: call_text(TOKEN),
    "a surrogate for a cell": lambda cell: call_text("\\ud800"),
}


def frame_body(content: object) -> bytes:
    return json.dumps(content).encode()


def call_text(cell: str, call_id: str = "7", args: str = '{"value": 1}') -> bytes:
    return f'{{"id": {call_id}, "cell": "{cell}", "tool": "echo", "args": {args}}}'.encode()


@pytest.mark.parametrize("what", [*NO_CALLS, *REFUSED_CALLS])
def test_what_is_no_call_is_refused_and_costs_neither_budget_nor_connection(
    bridge: KernelBridge, what: str
) -> None:
    ran: list[object] = []

    def echo(value: Any) -> Any:
        ran.append(value)
        return value

    grant = bridge.grant(cell(echo, limit=1))
    with Peer(endpoint_of(bridge)) as peer:
        peer.send(framed({**NO_CALLS, **REFUSED_CALLS}[what](grant.token)))
        answer = peer.reply()
        assert answer["error"]
        assert answer["id"] in (0, 7)
        assert answer["kind"] in ("refused", "arguments")
        assert not ran
        assert peer.ask(grant, "echo", 8, value="right") == {"id": 8, "value": "right"}
    assert ran == ["right"]
    assert [call.error for call in bridge.retire(grant)] == [None]


@pytest.mark.parametrize("what", sorted(NO_CALLS.keys() - {"a second hello"}))  # as the first one it is right
def test_what_is_no_hello_is_refused_and_ends_the_connection(bridge: KernelBridge, what: str) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge), token=None) as peer:
        peer.send(framed(NO_CALLS[what](grant.token)))
        (answer,) = peer.rest()
        assert (answer["id"], answer["kind"], answer["closes"]) == (0, "refused", True)
        assert grant.token not in answer["error"]
    is_served(bridge)


@pytest.mark.parametrize(
    "hello",
    [
        {"hello": "wrong"},
        {"hello": ""},
        {"hello": TOKEN + " "},
        {"hello": " " + TOKEN},
        {"hello": TOKEN[:-1]},
        {"hello": TOKEN.upper()},
        {"hello": "\ud800"},
        {"hello": "x" * 1000},
        {"hello": [TOKEN]},
        {"hello": None},
        {"hello": 7},
        {"Hello": TOKEN},
        {},
    ],
    ids=lambda hello: json.dumps(hello)[:40],
)
def test_a_connection_without_the_kernels_token_is_refused_and_ends(
    bridge: KernelBridge, hello: object
) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge), token=None) as peer:
        call = {"id": 1, "cell": grant.token, "tool": "echo", "args": {"value": 1}}
        peer.send(frame(hello) + frame(call))
        (answer,) = peer.rest()
        assert (answer["id"], answer["kind"], answer["closes"]) == (0, "refused", True)
        assert TOKEN not in json.dumps(answer)
    assert bridge.retire(grant) == ()
    is_served(bridge)


def test_a_call_without_a_hello_runs_nothing_even_with_the_cells_token(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge), token=None) as peer:
        peer.begin(grant, "echo", value=1)
        (answer,) = peer.rest()
        assert answer["closes"] is True
    assert bridge.retire(grant) == ()


def test_keys_that_nobody_asked_for_are_ignored(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge), token=None) as peer:
        peer.say({"hello": TOKEN, "hi": [1], "id": "x"})
        assert peer.reply().get("error") is None
        call = {"id": 1, "cell": grant.token, "tool": "echo", "args": {"value": 1}, "budget": 1000, "kind": 3}
        peer.say(call)
        assert peer.reply() == {"id": 1, "value": 1}


@pytest.mark.parametrize("call_id", [0, -1, 2**63, -(10**4000)])
def test_an_id_is_given_back_however_large_it_is(bridge: KernelBridge, call_id: int) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge)) as peer:
        assert peer.ask(grant, "echo", call_id, value=1) == {"id": call_id, "value": 1}


@pytest.mark.parametrize("text", ["1e999", "-1e999", '[1, {"a": 1e400}]'])
def test_a_number_too_large_for_a_float_is_no_infinity_of_the_handlers(
    bridge: KernelBridge, text: str
) -> None:
    given: list[object] = []

    def keep(value: Any) -> None:
        given.append(value)

    grant = bridge.grant(cell(keep))
    with Peer(endpoint_of(bridge)) as peer:
        peer.send(framed(call_text(grant.token, args=f'{{"value": {text}}}').replace(b"echo", b"keep")))
        answer = peer.reply()
    assert given == [], "JSON has no infinity, and the handler was given one"
    assert answer["error"]


# --- what is no frame ---------------------------------------------------------------------------------

NO_FRAMES = {
    "length 0xFFFFFFFF": b"\xff\xff\xff\xff",
    "length 0xFFFFFFFF and some": b"\xff\xff\xff\xff" + b"x" * 100_000,
    "one byte too many": HEADER.pack(MAX_FRAME + 1),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "ZMTP": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL",
    "the old protocol": b'{"tool": "read_file", "args": {}}\n',
}


@pytest.mark.parametrize("token", [TOKEN, None], ids=["known", "stranger"])
@pytest.mark.parametrize("what", NO_FRAMES)
def test_what_is_no_frame_is_told_so_and_ends_the_connection(
    bridge: KernelBridge, what: str, token: str | None
) -> None:
    with Peer(endpoint_of(bridge), token) as peer:
        peer.send(NO_FRAMES[what])
        if what == "TLS":  # it announces a length that could be one; then it has its time
            peer.socket.shutdown(socket.SHUT_WR)
            peer.rest()
        else:
            (answer,) = peer.rest()
            assert (answer["id"], answer["kind"], answer["closes"]) == (0, "refused", True)
    is_served(bridge)


@pytest.mark.parametrize("token", [TOKEN, None], ids=["known", "stranger"])
def test_a_frame_of_100_mb_is_not_kept(bridge: KernelBridge, token: str | None) -> None:
    endpoint = endpoint_of(bridge)
    chunk = bytes(MIB)
    with Peer(endpoint, token) as peer, traced() as grown:
        peer.send(HEADER.pack(100 * MIB))
        sent = 0
        while sent < 100 and peer.send(chunk):
            sent += 1
        peer.rest()
        assert grown() < 16 * MIB
    assert sent < 100
    is_served(bridge)


def test_calls_before_what_is_no_frame_run_once_and_those_after_it_never(bridge: KernelBridge) -> None:
    ran: list[int] = []

    def note(n: int) -> int:
        ran.append(n)
        return n

    grant = bridge.grant(cell(note))
    with Peer(endpoint_of(bridge)) as peer:
        assert peer.ask(grant, "note", n=1)["value"] == 1
        late = frame({"id": 3, "cell": grant.token, "tool": "note", "args": {"n": 2}})
        peer.send(b"\xff\xff\xff\xff" + late)
        peer.rest()
    assert ran == [1]


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """How much memory Python has taken at most since the block began."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


# --- silence ------------------------------------------------------------------------------------------

HALVES = {
    "half a header": b"\0\0",
    "a header": HEADER.pack(100),
    "half a body": HEADER.pack(100) + b"{",
    "all but a byte": framed(b'{"hello": "x"}')[:-1],
}


@EITHER
@pytest.mark.parametrize("token", [TOKEN, None], ids=["known", "stranger"])
@pytest.mark.parametrize("half", HALVES)
def test_half_a_frame_and_then_silence_ends_the_connection(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch, half: str, token: str | None
) -> None:
    short_of_patience(monkeypatch, 0.5)
    with Peer(endpoint_of(bridge), token) as peer:
        began = time.monotonic()
        peer.send(HALVES[half])
        peer.rest()
        assert 0.4 < time.monotonic() - began < SOON
    is_served(bridge)


def test_a_connection_that_says_nothing_at_all_ends(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch, 0.5)
    with Peer(endpoint_of(bridge), token=None) as peer:
        peer.rest()


def test_a_connection_that_is_known_may_be_silent_between_calls(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch, 0.3)
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(echo))
    with Peer(endpoint) as silent, Peer(endpoint) as clock:
        assert silent.ask(grant, "echo", value=1)["value"] == 1
        clock.send(b"\0")
        clock.rest()
        assert silent.ask(grant, "echo", value=2)["value"] == 2


@pytest.mark.parametrize("token", [TOKEN, None], ids=["known", "stranger"])
def test_a_frame_that_goes_on_and_on_has_no_more_time_than_another(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    short_of_patience(monkeypatch, 0.5)
    endpoint = endpoint_of(bridge)
    with Peer(endpoint, token) as peer:
        monkeypatch.setattr(bridge_module, "READ_SIZE", 1)  # as if it came so slowly, and never stopped
        began = time.monotonic()
        peer.send(HEADER.pack(MIB) + bytes(MIB - 1))
        peer.rest()
        assert time.monotonic() - began < SOON


def test_many_that_are_silent_do_not_keep_others_waiting(
    bridge: KernelBridge,
) -> None:
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint, TOKEN if number % 2 else None) for number in range(MAX_CONNECTIONS - 2)]
    try:
        for number, peer in enumerate(peers):
            peer.send(list(HALVES.values())[number % len(HALVES)])
        is_served(bridge)
    finally:
        for peer in peers:
            peer.close()


# --- authority ----------------------------------------------------------------------------------------


def test_the_token_of_another_kernel_opens_nothing(host: Host, place: Place, directory: Path) -> None:
    first = host.open(place)
    elsewhere = {**place, "path": str(directory / "u")} if place else {}
    second = host.open(elsewhere, token="another", kernel_id="l")
    grant = second.grant(cell(echo))
    with Peer(endpoint_of(first), token=None) as peer:
        peer.say({"hello": "another"})
        (answer,) = peer.rest()
        assert answer["kind"] == "refused"
    with Peer(endpoint_of(first)) as peer:  # a cell of the second kernel, called over the first's connection
        answer = peer.ask(grant, "echo", value=1)
        assert (answer["kind"], "value" in answer) == ("refused", False)
    assert second.retire(grant) == ()


def test_the_token_of_a_retired_cell_is_told_so_and_leaves_the_next_cells_budget(
    bridge: KernelBridge,
) -> None:
    first = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge)) as peer:
        assert peer.ask(first, "echo", value=1)["value"] == 1
        bridge.retire(first)
        second = bridge.grant(cell(echo, limit=1))
        for number in range(10):
            answer = peer.ask(first, "echo", number, value=1)
            assert (answer["id"], answer["kind"]) == (number, "refused")
            assert "ended" in answer["error"]
        assert peer.ask(second, "echo", value=2)["value"] == 2
        assert peer.ask(second, "echo", value=2)["kind"] == "budget"


def test_what_was_retired_long_ago_takes_no_more_room(bridge: KernelBridge) -> None:
    first = bridge.grant(cell(echo))
    bridge.retire(first)
    for _ in range(bridge_module.REMEMBERED):
        bridge.retire(bridge.grant(cell(echo)))
    with Peer(endpoint_of(bridge)) as peer:
        answer = peer.ask(first, "echo", value=1)
        assert (answer["kind"], "value" in answer) == ("refused", False)


@EITHER
def test_64_clients_that_know_both_tokens_share_a_budget_of_5(bridge: KernelBridge) -> None:
    ran: list[int] = []

    def note(n: int) -> int:
        ran.append(n)
        return n

    grant = bridge.grant(cell(note, limit=5))
    endpoint = endpoint_of(bridge)
    together = threading.Barrier(64)

    def attack(number: int) -> list[Reply]:
        with Peer(endpoint) as peer:
            together.wait(30)
            return [peer.ask(grant, "note", call, n=number) for call in range(10)]

    with ThreadPoolExecutor(64) as pool:
        answers = [answer for replies in pool.map(attack, range(64)) for answer in replies]
    assert len(answers) == 640
    assert len(ran) == 5
    assert sum("value" in answer for answer in answers) == 5
    assert all(answer["kind"] == "budget" for answer in answers if "value" not in answer)
    assert len(bridge.retire(grant)) == 5


def test_no_budget_runs_nothing(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo, limit=0))
    with Peer(endpoint_of(bridge)) as peer:
        assert peer.ask(grant, "echo", value=1)["kind"] == "budget"


# --- floods -------------------------------------------------------------------------------------------


@EITHER
def test_10_000_calls_whose_answers_nobody_reads_keep_to_the_budget_and_hold_nobody(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch, 1)
    ran: list[int] = []

    def note(n: int) -> str:
        ran.append(n)
        return "x" * 1000

    grant = bridge.grant(cell(note, limit=50))
    # The id comes back with each answer: together they are more than what the system keeps for a reader.
    call = frame({"id": 10**1000, "cell": grant.token, "tool": "note", "args": {"n": 1}})
    with Peer(endpoint_of(bridge)) as peer:
        flood = threading.Thread(target=peer.send, args=(call * 10_000,))
        flood.start()
        is_served(bridge)
        flood.join(30)
        assert not flood.is_alive()
        assert traces.eventually(lambda: len(ran) == 50)
        is_served(bridge)
        assert traces.eventually(lambda: not serving_threads(), within=10), "a thread waits for ever"
    assert len(bridge.retire(grant)) == 50


def test_10_000_calls_whose_answers_are_read_are_all_answered(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo, limit=50))
    with Peer(endpoint_of(bridge)) as peer:
        calls = b"".join(
            frame({"id": number, "cell": grant.token, "tool": "echo", "args": {"value": number}})
            for number in range(10_000)
        )
        flood = threading.Thread(target=peer.send, args=(calls,))
        flood.start()
        answers = [peer.reply() for _ in range(10_000)]
        flood.join(BOUND)
    assert [answer["id"] for answer in answers] == list(range(10_000))
    assert [answer.get("value") for answer in answers[:51]] == [*range(50), None]


def test_frames_of_nothing_are_each_answered(bridge: KernelBridge) -> None:
    with Peer(endpoint_of(bridge)) as peer:
        flood = threading.Thread(target=peer.send, args=(bytes(4 * 20_000),))
        flood.start()
        assert all(peer.reply()["error"] for _ in range(20_000))
        flood.join(BOUND)
    is_served(bridge)


@EITHER
def test_a_peer_that_reads_none_of_its_answers_of_1_mb_holds_only_itself(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch, 1)

    def large() -> str:
        return "x" * MIB

    grant = bridge.grant(cell(large, limit=None))
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(8)]
    try:
        for peer in peers:
            for number in range(20):
                peer.begin(grant, "large", number)
        is_served(bridge)
        assert traces.eventually(lambda: not serving_threads(), within=10), "a thread waits for ever"
        is_served(bridge)
    finally:
        for peer in peers:
            peer.close()


@EITHER
def test_a_connection_dropped_before_its_answer_harms_no_other_and_runs_once(bridge: KernelBridge) -> None:
    entered, ran = threading.Event(), []

    def slow(context: ToolCallContext) -> int:
        ran.append(1)
        entered.set()
        context.cancelled.wait(BOUND)
        return 1

    grant = bridge.grant(cell(slow, echo))
    endpoint = endpoint_of(bridge)
    with Peer(endpoint) as peer:
        peer.begin(grant, "slow")
        assert entered.wait(BOUND)
    with Peer(endpoint) as peer:
        assert peer.ask(grant, "echo", value=1)["value"] == 1
    assert [(call.name, call.error) for call in bridge.retire(grant)] == [("slow", CUT_OFF), ("echo", None)]
    assert traces.eventually(lambda: not serving_threads())
    assert ran == [1]


def test_a_connection_dropped_in_the_middle_of_a_call_runs_nothing(bridge: KernelBridge) -> None:
    grant = bridge.grant(cell(echo))
    call = frame({"id": 1, "cell": grant.token, "tool": "echo", "args": {"value": 1}})
    for end in (1, 4, 10, len(call) - 1):
        with Peer(endpoint_of(bridge)) as peer:
            peer.send(call[:end])
    assert traces.eventually(lambda: not serving_threads())
    assert bridge.retire(grant) == ()


@EITHER
@pytest.mark.usefixtures("many_files")
def test_a_storm_of_1000_connections_does_not_keep_a_client_waiting(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(echo, limit=None))
    held: list[Peer] = []
    halves = [b"", b"\0", HEADER.pack(100), HEADER.pack(100) + b"x" * 50, frame({"hello": "wrong"})]

    def storm() -> None:
        for number in range(1000):
            peer = Peer(endpoint, token=None)
            peer.send(halves[number % len(halves)])
            held.append(peer)
            if number % 7 == 0:
                peer.close()

    attacker = threading.Thread(target=storm)
    attacker.start()
    slowest, served, most_threads = 0.0, 0, 0
    try:
        while attacker.is_alive() or served < 3:
            began = time.monotonic()
            with Peer(endpoint) as peer:
                assert peer.ask(grant, "echo", value=1)["value"] == 1
            slowest = max(slowest, time.monotonic() - began)
            served += 1
            most_threads = max(most_threads, len(serving_threads()))
        attacker.join()
        is_served(bridge)  # so that all that came before it have been taken in
        most_threads = max(most_threads, len(serving_threads()))
        assert slowest < SOON
        assert most_threads <= 128 + 8, "threads of those that had to go may take a moment"
    finally:
        attacker.join()
        for peer in held:
            peer.close()
    assert traces.eventually(lambda: not serving_threads())


@pytest.mark.usefixtures("many_files")
def test_a_storm_does_not_fail_the_kernels_own_client(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(echo, limit=None))
    held: list[Peer] = []

    def storm() -> None:
        held.extend(Peer(endpoint, token=None) for _ in range(250))

    attackers = [threading.Thread(target=storm) for _ in range(4)]
    for attacker in attackers:
        attacker.start()

    def call_from_a_new_client() -> None:
        client = ToolClient()
        client.bind(TOKEN)
        CELL.set(Cell(grant.token, endpoint))
        try:
            assert client.call("echo", {"value": 1}) == 1
        finally:
            client._after_fork()  # it closes what it has

    try:
        while any(attacker.is_alive() for attacker in attackers):
            contextvars.Context().run(call_from_a_new_client)
    finally:
        for attacker in attackers:
            attacker.join()
        for peer in held:
            peer.close()


def test_known_connections_that_nobody_uses_make_room(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(MAX_CONNECTIONS)]
    try:
        with Peer(endpoint, token=None) as one_more:
            answer = one_more.reply()
            assert (answer["kind"], answer["closes"]) == ("refused", True)
            assert "too many" in answer["error"]

        def is_let_in() -> bool:
            with Peer(endpoint, token=None) as peer:
                peer.say({"hello": TOKEN})
                return peer.reply().get("error") is None

        assert traces.eventually(is_let_in)
    finally:
        for peer in peers:
            peer.close()


def test_connections_that_are_only_refused_make_room_for_a_cell_that_may_call(bridge: KernelBridge) -> None:
    over = bridge.grant(cell(echo))
    bridge.retire(over)
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(MAX_CONNECTIONS)]
    stop = threading.Event()

    def stay_in_use() -> None:  # what a cell has left behind, and it knows how connections are chosen
        while not stop.is_set():
            for peer in peers:
                try:
                    peer.ask(over, "echo", value=1)
                except (EOFError, OSError):
                    pass

    leftover = threading.Thread(target=stay_in_use)
    leftover.start()
    try:
        grant = bridge.grant(cell(echo))

        def is_answered() -> bool:
            try:
                with Peer(endpoint) as peer:
                    return bool(peer.ask(grant, "echo", value=1).get("value") == 1)
            except (AssertionError, EOFError, OSError):
                return False

        assert traces.eventually(is_answered, within=SOON)
    finally:
        stop.set()
        leftover.join(30)
        for peer in peers:
            peer.close()


@EITHER
def test_the_kernels_own_client_is_told_when_there_are_too_many(host: Host, bridge: KernelBridge) -> None:
    gate, entered = host.gate(), threading.Semaphore(0)

    def stuck() -> None:
        entered.release()
        gate.wait()

    grant = bridge.grant(cell(stuck, echo, limit=None))
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(MAX_CONNECTIONS)]
    try:
        for peer in peers:
            peer.begin(grant, "stuck")
        for _ in peers:
            assert entered.acquire(timeout=BOUND)
        client = ToolClient()
        client.bind(TOKEN)

        def call() -> str:
            CELL.set(Cell(grant.token, endpoint))
            with pytest.raises(ToolError) as caught:
                client.call("echo", {"value": 1})
            return str(caught.value)

        told = {contextvars.Context().run(call) for _ in range(50)}
        assert all("too many connections" in text for text in told), told
        gate.set()
        assert [peer.reply()["value"] for peer in peers] == [None] * len(peers)
    finally:
        for peer in peers:
            peer.close()
    is_served(bridge)


def test_a_thread_that_cannot_be_started_costs_that_connection_alone(
    bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = endpoint_of(bridge)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with Peer(endpoint, token=None) as peer:
                assert peer.rest() == []
    is_served(bridge)


# --- memory, and the time of others -------------------------------------------------------------------


@pytest.mark.parametrize("size", [MIB, MAX_FRAME])
def test_a_stranger_may_not_announce_more_than_a_hello_has(bridge: KernelBridge, size: int) -> None:
    with Peer(endpoint_of(bridge), token=None) as peer:
        peer.send(HEADER.pack(size))
        assert peer.rest()[0]["closes"] is True


def test_strangers_with_half_a_frame_each_take_little_memory(host: Host, unix: Place) -> None:
    bridge = host.open(unix)
    endpoint = endpoint_of(bridge)
    half = HEADER.pack(MAX_FRAME) + bytes(8 * MIB)
    peers: list[Peer] = []
    try:
        with traced() as grown:
            for _ in range(32):
                peers.append(Peer(endpoint, token=None))
                peers[-1].send(half)
            assert grown() < 64 * MIB
    finally:
        for peer in peers:
            peer.close()


def test_connections_with_half_a_frame_each_take_limited_memory(
    host: Host, unix: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch, 2)
    bridge = host.open(unix)
    endpoint = endpoint_of(bridge)
    half = HEADER.pack(MAX_FRAME) + bytes(8 * MIB)
    peers = [Peer(endpoint) for _ in range(64)]
    try:
        with traced() as grown, ThreadPoolExecutor(len(peers)) as pool:
            list(pool.map(lambda peer: peer.send(half), peers))  # it may be cut off, or not be read
            assert grown() < 256 * MIB
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("sent", [1000, MIB - 1000, MIB + 100_000, 15 * MIB])
def test_large_frames_that_do_not_go_on_keep_no_large_call_waiting(bridge: KernelBridge, sent: int) -> None:
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(length))
    peers = [Peer(endpoint) for _ in range(8)]
    half = HEADER.pack(MAX_FRAME) + bytes(sent)
    senders = [threading.Thread(target=peer.send, args=(half,)) for peer in peers]
    try:
        for sender in senders:
            sender.start()
        for _ in range(4):
            is_served(bridge)
        with Peer(endpoint) as peer:
            peer.socket.settimeout(SOON)
            assert peer.ask(grant, "length", text="x" * 2 * MIB)["value"] == 2 * MIB
    finally:
        for peer in peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        for sender in senders:
            sender.join()
        for peer in peers:
            peer.close()


def test_connections_that_had_to_go_leave_no_thread_behind_that_waits_for_its_turn(
    host: Host, unix: Place
) -> None:
    bridge = host.open(unix)
    endpoint = endpoint_of(bridge)
    half = HEADER.pack(MAX_FRAME) + bytes(MIB + 100_000)
    peers: list[Peer] = []

    def one_more() -> bool:
        peer = Peer(endpoint, token=None)
        peers.append(peer)
        peer.say({"hello": TOKEN})
        if peer.reply().get("error") is not None:
            return False
        peer.socket.settimeout(0.2)
        with suppress(TimeoutError):  # it is not read to its end
            peer.send(half)
        return True

    try:
        for _ in range(MAX_CONNECTIONS):
            assert one_more()
        for _ in range(MAX_CONNECTIONS // 2):
            assert traces.eventually(one_more)
        assert traces.eventually(lambda: len(serving_threads()) <= MAX_CONNECTIONS + 8, within=SOON)
    finally:
        for peer in peers:
            peer.close()


def test_close_wakes_threads_that_wait_for_large_frames(host: Host, place: Place) -> None:
    bridge = host.open(place)
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(12)]
    try:
        for peer in peers:
            peer.socket.settimeout(0.2)
            with suppress(TimeoutError):
                peer.send(HEADER.pack(MAX_FRAME) + bytes(2 * MIB))
        host.on_loop(bridge.close)
        assert traces.eventually(lambda: not serving_threads(), within=SOON)
    finally:
        for peer in peers:
            peer.close()


def test_large_frames_that_wait_to_be_read_through_take_limited_memory(
    host: Host, unix: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_patience(monkeypatch, 2)
    bridge = host.open(unix)
    endpoint = endpoint_of(bridge)
    gate = host.gate()
    parse = ToolCall.parse

    def slowly(body: bytes) -> ToolCall:  # as it is for millions of small values, under the GIL
        gate.wait(60)
        return parse(body)

    monkeypatch.setattr(bridge_module, "ToolCall", SimpleNamespace(parse=slowly))
    whole = frame({"id": 1, "cell": "x", "tool": "echo", "args": {"value": "x" * 15 * MIB}})
    peers = [Peer(endpoint) for _ in range(32)]
    try:
        with traced() as grown, ThreadPoolExecutor(len(peers)) as pool:
            list(pool.map(lambda peer: peer.send(whole), peers))  # it may be cut off, or not be read
            assert grown() < 256 * MIB
    finally:
        gate.set()
        for peer in peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
            peer.close()


def test_large_frames_that_trickle_in_keep_no_large_call_waiting(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(length))
    peers = [Peer(endpoint) for _ in range(8)]
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.3):
            for peer in peers:
                peer.send(b"x")

    attacker = threading.Thread(target=trickle)
    try:
        for peer in peers:
            peer.send(HEADER.pack(MAX_FRAME) + bytes(MIB + 1))
        attacker.start()
        for _ in range(3):
            with Peer(endpoint) as peer:
                peer.socket.settimeout(SOON)
                assert peer.ask(grant, "length", text="x" * 2 * MIB)["value"] == 2 * MIB
    finally:
        stop.set()
        attacker.join()
        for peer in peers:
            peer.close()


@EITHER
def test_many_large_calls_at_once_are_all_served(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(length, limit=None))
    together = threading.Barrier(32)

    def call(number: int) -> int:
        with Peer(endpoint) as peer:
            peer.socket.settimeout(30)
            together.wait(30)
            text = str(number) * (3 * MIB)
            return int(peer.ask(grant, "length", text=text)["value"]) // len(str(number))

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(call, range(10, 42))) == {3 * MIB}


def length(text: str) -> int:
    """Return how long a text is."""
    return len(text)


def test_the_arguments_of_calls_that_are_over_are_not_kept(host: Host, unix: Place) -> None:
    bridge = host.open(unix)

    def take(text: str) -> int:
        return len(text)

    grant = bridge.grant(cell(take))
    endpoint = endpoint_of(bridge)
    call = frame({"id": 1, "cell": grant.token, "tool": "take", "args": {"text": "x" * 4 * MIB}})
    with Peer(endpoint) as peer, traced():
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            peer.send(call)
            assert peer.reply()["value"] == 4 * MIB
        assert tracemalloc.get_traced_memory()[0] - before < 20 * MIB
    assert len(bridge.retire(grant)) == 20


def test_a_cell_without_a_limit_does_not_fill_the_hosts_memory(host: Host, unix: Place) -> None:
    bridge = host.open(unix)
    grant = bridge.grant(cell(echo, limit=None))
    calls = 5000
    one = frame({"id": 1, "cell": grant.token, "tool": "echo", "args": {"value": 1}})
    with Peer(endpoint_of(bridge)) as peer, traced():

        def call_all() -> int:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(calls // 100):
                peer.send(one * 100)
                for _ in range(100):
                    peer.reply()
            return tracemalloc.get_traced_memory()[0] - before

        call_all()
        assert call_all() / calls < 100, "bytes that each call leaves"


def test_large_frames_of_one_kernel_do_not_stop_the_others(host: Host, unix: Place) -> None:
    bridge = host.open(unix)
    other = host.open({}, kernel_id="l")
    endpoint = endpoint_of(bridge)
    # Millions of small objects: reading them takes long, and Python does nothing else meanwhile.
    inner = b",".join([b"[]"] * ((MAX_FRAME - 1000) // 3))
    call = framed(b'{"id":1,"cell":"x","tool":"t","args":{"a":[' + inner + b"]}}")
    peers = [Peer(endpoint) for _ in range(12)]

    def attack(peer: Peer) -> None:
        with suppress(EOFError, OSError):
            peer.socket.settimeout(60)
            peer.send(call)
            peer.reply()

    slowest = 0.0
    with ThreadPoolExecutor(len(peers)) as pool:
        attacks = [pool.submit(attack, peer) for peer in peers]
        while slowest < SOON and not all(attack.done() for attack in attacks):
            began = time.monotonic()
            is_served(other, within=60)
            slowest = max(slowest, time.monotonic() - began)
        for peer in peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
            peer.close()
    assert traces.eventually(lambda: not serving_threads(), within=60)
    assert slowest < SOON


# --- handlers -----------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Mute:
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class Broken(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("not today")

    def get(self, *_: Any) -> Any:
        raise OSError("not today")


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def raising(error: BaseException) -> Callable[[], Any]:
    def handler() -> Any:
        raise error

    return handler


HANDLERS: dict[str, Callable[[], Any]] = {
    "raises": raising(OSError("disk on fire")),
    "raises ToolError": raising(ToolError("no such file")),
    "raises SystemExit": raising(SystemExit(3)),
    "raises KeyboardInterrupt": raising(KeyboardInterrupt()),
    "raises GeneratorExit": raising(GeneratorExit()),
    "raises CancelledError": raising(asyncio.CancelledError()),
    "raises MemoryError": raising(MemoryError()),
    "raises what has no text": raising(Unspeakable()),
    "raises a group": raising(BaseExceptionGroup("many", [SystemExit(), ValueError()])),
    "raises a text of 10 MB": raising(ValueError("x" * 10 * MIB)),
    "raises a surrogate": raising(ValueError("\ud800")),
    "recurses": lambda: deep_call(),
    "returns 100 MB": lambda: "x" * 100 * MIB,
    "returns bytes": lambda: b"x",
    "returns NaN": lambda: float("nan"),
    "returns Infinity": lambda: [1.0, float("inf")],
    "returns a cycle": cyclic,
    "returns a cycle of dicts": lambda: {"a": cyclic()},
    "returns deep JSON": lambda: deep(200_000),
    "returns a set": lambda: {1},
    "returns an object": object,
    "returns keys that are numbers": lambda: {1: 2},
    "returns a huge number": lambda: 10**100_000,
    "returns a generator": lambda: (n for n in range(3)),
    "returns a dict that is none": lambda: Broken(a=1),
    "returns an error without text": lambda: {"error": Mute()},
    "returns an error that is a huge number": lambda: {"error": 10**100_000},
    "returns an error that is deep": lambda: {"error": deep(200_000)},
}


def deep_call() -> Any:
    return deep_call()


@pytest.mark.parametrize("what", HANDLERS)
def test_whatever_a_handler_does_its_cell_gets_an_error_and_goes_on(
    host: Host, unix: Place, what: str
) -> None:
    bridge = host.open(unix)

    def bad() -> Any:
        return HANDLERS[what]()

    grant = bridge.grant(cell(bad, echo))
    with Peer(endpoint_of(bridge)) as peer:
        answer = peer.ask(grant, "bad")
        assert (answer["id"], answer["kind"]) == (1, "tool")
        assert 0 < len(answer["error"]) < 25_000
        assert peer.ask(grant, "echo", value=1)["value"] == 1
    is_served(bridge)
    bad_call, echo_call = bridge.retire(grant)
    assert (bad_call.name, echo_call.name) == ("bad", "echo")
    assert bad_call.error != CUT_OFF, "it was not the cell's end that ended the call"


def test_what_hangs_in_a_handler_holds_its_own_connection_alone(host: Host, bridge: KernelBridge) -> None:
    gate, entered = host.gate(), threading.Semaphore(0)

    def stuck() -> int:
        entered.release()
        gate.wait()
        return 1

    grant = bridge.grant(cell(stuck, echo))
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(32)]
    try:
        for peer in peers:
            peer.begin(grant, "stuck")
        for _ in peers:
            assert entered.acquire(timeout=BOUND)
        with Peer(endpoint) as peer:
            assert peer.ask(grant, "echo", value=1)["value"] == 1
        is_served(bridge)
        gate.set()
        assert [peer.reply()["value"] for peer in peers] == [1] * 32
    finally:
        for peer in peers:
            peer.close()


def test_handlers_that_hang_for_good_do_not_shut_out_the_next_cells(host: Host, bridge: KernelBridge) -> None:
    gate, entered = host.gate(), threading.Semaphore(0)

    def stuck() -> None:
        entered.release()
        gate.wait()

    endpoint = endpoint_of(bridge)
    hung = 0
    while hung < MAX_CONNECTIONS:
        grant = bridge.grant(cell(stuck, limit=32))
        peers = [Peer(endpoint) for _ in range(32)]
        for peer in peers:
            peer.begin(grant, "stuck")
        for _ in peers:
            assert entered.acquire(timeout=BOUND)
        bridge.retire(grant)
        for peer in peers:
            assert peer.rest()[0]["closes"] is True
            peer.close()
        hung += len(peers)
    is_served(bridge)


def test_an_async_handler_that_exits_does_not_end_the_loop_of_the_others(host: Host, unix: Place) -> None:
    bridge = host.open(unix)
    handlers = HandlerLoop()

    async def leave() -> None:
        raise SystemExit(3)

    async def wait(value: int) -> int:
        await asyncio.sleep(0)
        return value

    grant = bridge.grant(cell(leave, wait, loop=handlers.get))
    endpoint = endpoint_of(bridge)
    try:
        with Peer(endpoint) as peer:
            assert peer.ask(grant, "wait", value=1)["value"] == 1
            answer = peer.ask(grant, "leave")
            assert (answer["id"], answer["kind"]) == (1, "tool")
        with Peer(endpoint) as peer:
            assert peer.ask(grant, "wait", value=2)["value"] == 2
    finally:
        bridge.retire(grant)
        asyncio.run(handlers.close())


def test_what_an_async_handler_leaves_behind_does_not_end_the_loop_of_the_others(
    host: Host, unix: Place
) -> None:
    bridge = host.open(unix)
    handlers = HandlerLoop()

    async def leave_a_task() -> int:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        return 1

    async def wait(value: int) -> int:
        await asyncio.sleep(0)
        return value

    grant = bridge.grant(cell(leave_a_task, wait, loop=handlers.get))
    try:
        with Peer(endpoint_of(bridge)) as peer, suppress(TimeoutError):
            peer.socket.settimeout(1)
            peer.ask(grant, "leave_a_task")
        with Peer(endpoint_of(bridge)) as peer:
            assert peer.ask(grant, "wait", value=2).get("value") == 2
    finally:
        bridge.retire(grant)
        asyncio.run(handlers.close())


def test_an_async_handler_on_a_loop_that_is_closed_is_an_error(host: Host, unix: Place) -> None:
    bridge = host.open(unix)
    closed = asyncio.new_event_loop()
    closed.close()

    async def wait() -> int:
        return 1

    grant = bridge.grant(cell(wait, loop=lambda: closed))
    with Peer(endpoint_of(bridge)) as peer:
        assert peer.ask(grant, "wait")["kind"] == "tool"


# --- the end of a cell --------------------------------------------------------------------------------


@EITHER
def test_calls_in_flight_are_refused_at_once_when_their_cell_ends(host: Host, bridge: KernelBridge) -> None:
    gate, entered = host.gate(), threading.Semaphore(0)
    contexts: list[ToolCallContext] = []
    events: list[CellEvent] = []

    def slow(context: ToolCallContext) -> str:
        contexts.append(context)
        entered.release()
        gate.wait()
        return "too late"

    grant = bridge.grant(cell(slow, on_event=events.append))
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(8)]
    try:
        for number, peer in enumerate(peers):
            peer.begin(grant, "slow", number)
        for _ in peers:
            assert entered.acquire(timeout=BOUND)
        began = time.monotonic()
        records = bridge.retire(grant)
        for number, peer in enumerate(peers):
            (answer,) = peer.rest()  # the handlers run on
            assert (answer["id"], answer["kind"], answer["closes"]) == (number, "refused", True)
        assert time.monotonic() - began < SOON
        assert all(context.cancelled.is_set() for context in contexts)
        assert [record.error for record in records] == [CUT_OFF] * 8
    finally:
        for peer in peers:
            peer.close()
    gate.set()
    assert traces.eventually(lambda: not serving_threads())
    host.on_loop(lambda: None)
    assert sum(isinstance(event, ToolCallStarted) for event in events) == 8
    assert [event.error for event in events if isinstance(event, ToolCallEnded)] == [CUT_OFF] * 8
    is_served(bridge)


def test_an_async_call_in_flight_is_cancelled_when_its_cell_ends(host: Host, bridge: KernelBridge) -> None:
    handlers = HandlerLoop()
    entered, cancelled = threading.Event(), threading.Event()

    async def slow() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    grant = bridge.grant(cell(slow, loop=handlers.get))
    try:
        with Peer(endpoint_of(bridge)) as peer:
            peer.begin(grant, "slow", 7)
            assert entered.wait(BOUND)
            (record,) = bridge.retire(grant)
            assert record.error == CUT_OFF
            (answer,) = peer.rest()
            assert (answer["id"], answer["kind"]) == (7, "refused")
            assert cancelled.wait(BOUND)
    finally:
        asyncio.run(handlers.close())


def test_a_call_that_was_sent_behind_one_in_flight_does_not_run_after_the_cell(
    host: Host, bridge: KernelBridge
) -> None:
    gate, entered = host.gate(), threading.Event()
    ran: list[int] = []

    def slow() -> None:
        entered.set()
        gate.wait()

    def note() -> None:
        ran.append(1)

    grant = bridge.grant(cell(slow, note))
    with Peer(endpoint_of(bridge)) as peer:
        peer.begin(grant, "slow")
        assert entered.wait(BOUND)
        peer.begin(grant, "note", 2)
        assert len(bridge.retire(grant)) == 1
        gate.set()
        peer.rest()
    assert traces.eventually(lambda: not serving_threads())
    assert ran == []


def test_a_caller_is_refused_also_if_its_handler_heeds_the_end_at_once(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    entered = threading.Semaphore(0)

    def obedient(context: ToolCallContext) -> None:
        entered.release()
        context.cancelled.wait()

    for _ in range(20):
        grant = bridge.grant(cell(obedient))
        peers = [Peer(endpoint) for _ in range(8)]
        try:
            for peer in peers:
                peer.begin(grant, "obedient", 7)
            for _ in peers:
                assert entered.acquire(timeout=BOUND)
            bridge.retire(grant)
            answers = [[answer["kind"] for answer in peer.rest()] for peer in peers]
        finally:
            for peer in peers:
                peer.close()
        assert answers == [["refused"]] * 8, "hung up on without a word, the client says that it was lost"


def test_a_call_that_has_found_its_cell_just_before_its_end_is_refused(bridge: KernelBridge) -> None:
    class Connection:
        def cut_off(self, reply: ToolReply) -> None:
            raise AssertionError("the call was not under way")

    ran: list[int] = []

    def note() -> None:
        ran.append(1)

    grant = bridge.grant(cell(note))
    bridge.retire(grant)
    reply = grant.serve(ToolCall(1, grant.token, "note", {}), Connection()).reply
    assert (reply.kind, ran, bridge.retire(grant)) == ("refused", [], ())


def test_a_handler_that_has_not_begun_when_the_cell_ends_does_not_begin() -> None:
    ran: list[int] = []
    cut_off: list[ToolReply] = []

    class Connection:
        def cut_off(self, reply: ToolReply) -> None:
            cut_off.append(reply)

    def note() -> None:
        ran.append(1)

    def end_the_cell(_: object) -> None:
        grant.retire()

    tools = cell(note, on_event=lambda event: None)
    grant = ToolGrant(
        tools, owner=None, kernel_id="k", tell=end_the_cell
    )  # it is told before the handler runs
    reply = grant.serve(ToolCall(1, grant.token, "note", {}), Connection()).reply
    assert (reply.kind, reply.closes) == ("refused", True)
    assert [reply.kind for reply in cut_off] == ["refused"]
    assert ran == []


def test_each_of_a_handlers_threads_learns_that_the_cell_is_over(
    host: Host, bridge: KernelBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[ToolCallContext] = []
    gate, entered = host.gate(), threading.Event()
    together, waiting = threading.Barrier(2), threading.Semaphore(0)

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.release()
            return super().wait(timeout)

    def both_make_one() -> threading.Event:  # if both threads make one at all, then at the same time
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        return Noted()

    def slow(context: ToolCallContext) -> None:
        contexts.append(context)
        entered.set()
        gate.wait()

    monkeypatch.setattr(
        grant_module,
        "threading",
        SimpleNamespace(Event=both_make_one, Lock=threading.Lock, RLock=threading.RLock),
    )
    grant = bridge.grant(cell(slow))
    with Peer(endpoint_of(bridge)) as peer, ThreadPoolExecutor(2) as pool:
        peer.begin(grant, "slow")
        assert entered.wait(BOUND)
        waits = [pool.submit(contexts[0].cancelled.wait, BOUND) for _ in range(2)]
        for _ in waits:
            waiting.acquire(timeout=1)
        bridge.retire(grant)
        assert [wait.result(2 * BOUND) for wait in waits] == [True, True]
        gate.set()


def test_a_cell_may_be_retired_by_eight_threads_at_once(host: Host, bridge: KernelBridge) -> None:
    gate, entered = host.gate(), threading.Event()
    events: list[CellEvent] = []

    def slow() -> None:
        entered.set()
        gate.wait()

    grant = bridge.grant(cell(slow, on_event=events.append))
    together = threading.Barrier(8)

    def retire(_: int) -> tuple[ToolCallRecord, ...]:
        together.wait(BOUND)
        return bridge.retire(grant)

    with Peer(endpoint_of(bridge)) as peer:
        peer.begin(grant, "slow")
        assert entered.wait(BOUND)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(retire, range(8)))
        assert len(peer.rest()) == 1
    assert answers == [answers[0]] * 8, "who asks twice is told the same"
    assert [record.error for record in answers[0]] == [CUT_OFF]
    host.on_loop(lambda: None)
    assert sum(isinstance(event, ToolCallEnded) for event in events) == 1


def test_the_calls_of_a_cell_are_known_also_when_its_bridge_was_closed_first(
    host: Host, bridge: KernelBridge
) -> None:
    grant = bridge.grant(cell(echo))
    with Peer(endpoint_of(bridge)) as peer:
        assert peer.ask(grant, "echo", value=1)["value"] == 1
    host.on_loop(bridge.close)
    assert [call.name for call in bridge.retire(grant)] == ["echo"]


def test_calls_and_the_end_of_their_cell_meet_at_any_time(bridge: KernelBridge) -> None:
    endpoint = endpoint_of(bridge)
    ran = 0
    lock = threading.Lock()

    def note() -> int:
        nonlocal ran
        with lock:
            ran += 1
        return 1

    for _ in range(40):
        ran = 0
        grant = bridge.grant(cell(note, limit=None))
        peers = [Peer(endpoint) for _ in range(4)]
        try:
            for peer in peers:
                for number in range(20):
                    peer.begin(grant, "note", number)
            records = bridge.retire(grant)
            after = ran
            for peer in peers:
                peer.socket.shutdown(socket.SHUT_WR)
            answers = [answer for peer in peers for answer in peer.rest()]
        finally:
            for peer in peers:
                peer.close()
        assert traces.eventually(lambda: not serving_threads())
        assert ran <= len(records) <= ran + len(peers), "a call was admitted after the cell, or not recorded"
        assert ran - after <= len(peers), "at most those that were under way"
        assert sum("value" in answer for answer in answers) <= len(records)


# --- the end of the bridge ----------------------------------------------------------------------------


@EITHER
def test_close_ends_the_connections_and_removes_the_socket(host: Host, place: Place) -> None:
    before = traces.descriptors()
    bridge = host.open(place)
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(echo))
    peers = [Peer(endpoint), Peer(endpoint, token=None), Peer(endpoint)]
    try:
        peers[1].send(b"\0")
        assert peers[2].ask(grant, "echo", value=1)["value"] == 1
        host.on_loop(bridge.close)
        assert [peer.rest() for peer in peers] == [[], [], []]
        assert traces.eventually(lambda: not serving_threads())
        if place:
            assert not os.path.exists(place["path"])
        with pytest.raises(OSError, match=r"refused|No such file"):
            Peer(endpoint)
    finally:
        for peer in peers:
            peer.close()
    gc.collect()
    assert traces.eventually(lambda: traces.descriptors() <= before)
    host.on_loop(bridge.close)
    host.on_loop(bridge.open)
    assert traces.descriptors() <= before, "what is closed cannot be opened again"


def test_close_does_not_wait_for_handlers_and_they_leave_nothing(host: Host, place: Place) -> None:
    before = traces.descriptors()
    bridge = host.open(place)
    gate, entered = host.gate(), threading.Semaphore(0)

    def stuck() -> str:
        entered.release()
        gate.wait()
        return "x" * MIB

    grant = bridge.grant(cell(stuck))
    endpoint = endpoint_of(bridge)
    peers = [Peer(endpoint) for _ in range(4)]
    try:
        for number, peer in enumerate(peers):
            peer.begin(grant, "stuck", number)
        for _ in peers:
            assert entered.acquire(timeout=BOUND)
        began = time.monotonic()
        host.on_loop(bridge.close)
        assert time.monotonic() - began < SOON
        for peer in peers:
            (answer,) = peer.rest()
            assert answer["kind"] == "refused"
    finally:
        for peer in peers:
            peer.close()
    assert traces.descriptors() <= before, "the connections of stuck handlers are closed, too"
    assert len(serving_threads()) == 4
    gate.set()
    assert traces.eventually(lambda: not serving_threads())
    host.on_loop(bridge.close)


@EITHER
def test_close_wakes_a_thread_that_writes_to_a_peer_that_does_not_read(host: Host, place: Place) -> None:
    bridge = host.open(place)
    called = threading.Event()

    def large() -> str:
        called.set()
        return "x" * 15 * MIB

    grant = bridge.grant(cell(large))
    with Peer(endpoint_of(bridge)) as peer:
        peer.begin(grant, "large")
        assert called.wait(BOUND)
        peer.socket.recv(1, socket.MSG_PEEK)  # it has begun to write
        host.on_loop(bridge.close)
        assert traces.eventually(lambda: not serving_threads())


def test_a_bridge_that_was_never_opened_can_be_closed(host: Host, place: Place) -> None:
    bridge = KernelBridge(host.supervisor, place, token=TOKEN, kernel_id="k")
    grant = bridge.grant(cell(echo))
    host.on_loop(bridge.close)
    host.on_loop(bridge.close)
    bridge.retire(grant)


def test_a_bridge_that_is_opened_twice_listens_once(host: Host, place: Place) -> None:
    bridge = host.open(place)
    endpoint = endpoint_of(bridge)
    before = traces.descriptors()
    host.on_loop(bridge.open)
    assert traces.descriptors() <= before
    assert endpoint_of(bridge) == endpoint
    is_served(bridge)


def test_one_kernels_bridge_is_closed_and_another_kernels_goes_on(host: Host, unix: Place) -> None:
    first, second = host.open(unix), host.open({}, token="another", kernel_id="l")
    grant = second.grant(cell(echo))
    with Peer(endpoint_of(second), token="another") as peer:
        host.on_loop(first.close)
        assert peer.ask(grant, "echo", value=1)["value"] == 1


# --- the socket ---------------------------------------------------------------------------------------


def test_the_socket_is_its_users_alone(host: Host, unix: Place) -> None:
    host.open(unix)
    mode = os.stat(unix["path"]).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_bridge_without_a_place_listens_on_loopback_alone(host: Host) -> None:
    endpoint = endpoint_of(host.open({}))
    assert (endpoint["transport"], endpoint["ip"]) == ("tcp", "127.0.0.1")
    listening = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    (address,) = [c.laddr.ip for c in listening if c.laddr.port == endpoint["port"]]
    assert address == "127.0.0.1"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who the other end is")
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=["by its mode", "by who it is"])
def test_another_user_is_refused(host: Host, mode: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="hkt-open-"))  # below /tmp: every user can get there
    directory.chmod(0o755)
    try:
        bridge = host.open({"transport": "unix", "path": str(directory / "t")})
        path = endpoint_of(bridge)["path"]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        os.chmod(path, mode)
        reached = as_nobody(path)
        assert reached == ("not connected" if mode == 0o600 else "hung up")
        is_served(bridge)
    finally:
        host.on_loop(bridge.close)
        shutil.rmtree(directory)


def as_nobody(path: str) -> str:
    """Say what another user gets who connects and shows the kernel's token."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing here but system calls
        told = b"failed"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(BOUND)
            try:
                connection.connect(path)
            except PermissionError:
                told = b"not connected"
            else:
                try:
                    connection.sendall(frame({"hello": TOKEN}))
                    told = b"answered" if connection.recv(100) else b"hung up"
                except (BrokenPipeError, ConnectionResetError):
                    told = b"hung up"
        finally:
            os.write(writing, told)
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told.decode()


def test_a_bridge_that_could_not_be_opened_leaves_no_socket_and_can_be_opened_later(
    host: Host, unix: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = KernelBridge(host.supervisor, unix, token=TOKEN, kernel_id="k")
    before = traces.descriptors()

    def fail(*_: object) -> None:
        raise PermissionError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "listen", fail)
        with pytest.raises(PermissionError):
            host.on_loop(bridge.open)
    assert traces.descriptors() <= before
    assert not os.path.exists(unix["path"])
    host.on_loop(bridge.open)
    try:
        is_served(bridge)
    finally:
        host.on_loop(bridge.close)


@EITHER
def test_a_process_without_descriptors_accepts_later_and_does_not_spin(
    host: Host, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[float] = []
    thrice = threading.Event()
    accept = KernelBridge._accept

    def counted(bridge: KernelBridge) -> None:
        attempts.append(time.monotonic())
        if len(attempts) == 3:
            thrice.set()
        accept(bridge)

    monkeypatch.setattr(KernelBridge, "_accept", counted)
    bridge = host.open(place)
    endpoint = endpoint_of(bridge)
    grant = bridge.grant(cell(echo))
    with Peer(endpoint) as known:
        attempts.clear()
        with no_descriptor_left(endpoint) as waiting:
            assert thrice.wait(BOUND)
            assert attempts[2] - attempts[0] > ACCEPT_AGAIN
            assert known.ask(grant, "echo", value=1)["value"] == 1
        with waiting:
            waiting.sendall(frame({"hello": TOKEN}))
            assert waiting.recv(100)
    is_served(bridge)


def test_a_bridge_is_closed_while_it_waits_for_descriptors(
    host: Host, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempted = threading.Event()
    pause = KernelBridge._pause

    def noted(bridge: KernelBridge) -> None:
        pause(bridge)
        attempted.set()

    monkeypatch.setattr(KernelBridge, "_pause", noted)
    first, second = host.open(place), host.open({}, kernel_id="l")
    endpoint = endpoint_of(first)
    with no_descriptor_left(endpoint) as waiting:
        assert attempted.wait(BOUND)
        host.on_loop(first.close)
    waiting.close()
    host.supervisor.submit(asyncio.sleep(2 * ACCEPT_AGAIN)).result(BOUND)  # what was to be done later is done
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    is_served(second)


@contextmanager
def no_descriptor_left(endpoint: Place) -> Iterator[socket.socket]:
    """A block in which no file can be opened; what it gives waits in the backlog of *endpoint*."""
    is_unix = endpoint["transport"] == "unix"
    waiting = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    waiting.settimeout(BOUND)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 50, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        waiting.connect(endpoint["path"] if is_unix else (endpoint["ip"], endpoint["port"]))
        yield waiting
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
