"""Whatever a kernel sends: the call returns in time and says the truth, and the next cell is right.

The kernel is a script over real sockets; where it stops within a frame, it speaks ZMTP by hand.
"""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import Session
from zmq.utils.monitor import parse_monitor_message

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, KernelStartError, Limits, Loss
from hermes_kernel.cell import execution
from hermes_kernel.host import connection

from ..fakes import DELIMITER, FakeKernel, FakeLauncher, HandMadeSocket, Script, only_first

Request = dict[str, Any]
Run = Callable[..., tuple[BlockingRegistry, FakeLauncher]]
Frames = Callable[[FakeKernel, Request, str], list[bytes]]

FAST = Limits(timeout=2, idle_grace=1)
SHORT = Limits(timeout=0.3, idle_grace=0.2)
LATE = 2.0  # seconds that a call may take longer than its cell's timeout
IDLE_MISSING = "did not say that it was done"
SPEC = Path(__file__).parents[2] / "kernelspec" / "hermes"

FORGED = {"ename": "Forged", "evalue": "lie", "traceback": ["Forged: lie"]}
# What would show in the result if it were believed.
LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "iopub": ("stream", {"name": "stdout", "text": "LIE"}),
    "shell": ("execute_reply", {"status": "error", **FORGED}),
    "control": ("execute_reply", {"status": "error", **FORGED}),
}
every_channel = pytest.mark.parametrize("channel", LIES)


@pytest.fixture
def scripted(leaves_nothing: None) -> Iterator[Run]:
    made: list[BlockingRegistry] = []

    def make(
        script: Script, limits: Limits = FAST, *, by_hand: str = ""
    ) -> tuple[BlockingRegistry, FakeLauncher]:
        launcher = FakeLauncher(script, frozenset(by_hand.split()))
        registry = BlockingRegistry(limits=limits, _launcher=launcher)
        made.append(registry)
        return registry, launcher

    yield make
    for registry in made:
        registry.close()


def echo(kernel: FakeKernel, request: Request) -> None:
    """An ordinary cell, which shows its code."""
    kernel.busy(request)
    kernel.stream(request, request["content"]["code"])
    kernel.reply(request)
    kernel.idle(request)


def first(misbehave: Script) -> Script:
    return only_first(misbehave, echo)


def amid(noise: Script) -> Script:
    """An ordinary cell with *noise* before it, in it and after it."""

    def script(kernel: FakeKernel, request: Request) -> None:
        noise(kernel, request)
        kernel.busy(request)
        kernel.stream(request, request["content"]["code"])
        noise(kernel, request)
        kernel.reply(request)
        kernel.idle(request)
        noise(kernel, request)

    return script


def run(registry: BlockingRegistry, code: str, timeout: float = 2.0) -> CellResult:
    """Run a cell; its call is in time, and its result can be told."""
    began = time.monotonic()
    result = registry.execute(code, owner="a", timeout=timeout)
    assert time.monotonic() - began < timeout + LATE
    assert json.loads(result.to_json())["kernel"]["reused"] is result.kernel.reused
    return result


def seen(result: CellResult) -> tuple[CellStatus, str, bool]:
    return result.status, result.stdout, result.kernel.ended


def survives(
    scripted: Run,
    misbehave: Script,
    *,
    status: CellStatus = CellStatus.OK,
    stdout: str = "first",
    ended: bool = False,
    limits: Limits = FAST,
    by_hand: str = "",
) -> CellResult:
    """The first cell comes out as said; the next is right, on a fresh kernel if that one was *ended*."""
    registry, launcher = scripted(first(misbehave), limits, by_hand=by_hand)
    result = run(registry, "first", limits.timeout or 0)
    assert seen(result) == (status, stdout, ended)
    following = run(registry, "next")
    assert (*seen(following), following.kernel.reused) == (CellStatus.OK, "next", False, not ended)
    assert len(launcher.kernels) == 1 + ended
    return result


# What is no message, or none that is signed


def signed(**parts: Any) -> Frames:
    def frames(kernel: FakeKernel, request: Request, channel: str) -> list[bytes]:
        kind, content = LIES[channel]
        return kernel.frames(request, kind, **{"content": content} | parts)

    return frames


def signature(forge: Callable[[bytes], list[bytes]]) -> Frames:
    def frames(kernel: FakeKernel, request: Request, channel: str) -> list[bytes]:
        delimiter, right, *parts = kernel.frames(request, *LIES[channel])
        return [delimiter, *forge(right), *parts]

    return frames


def plain(*frames: bytes) -> Frames:
    return lambda kernel, request, channel: list(frames)


def signed_by_another(kernel: FakeKernel, request: Request, channel: str) -> list[bytes]:
    delimiter, _, *parts = kernel.frames(request, *LIES[channel])
    return [delimiter, Session(key=b"another").sign(parts), *parts]


def of_no_parts(kernel: FakeKernel, request: Request, channel: str) -> list[bytes]:
    return [DELIMITER, kernel.session.sign([b""] * 4), *[b""] * 4]


HEAD = {"msg_id": "m", "msg_type": "execute_reply"}
DEEP = b'{"name":"stdout","status":"ok","text":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
NO_MESSAGES: dict[str, Frames] = {
    "one empty frame": plain(b""),
    "no delimiter": plain(b"a", b"b", b"c"),
    "nothing but a delimiter": plain(DELIMITER),
    "too few parts": plain(DELIMITER, b"0" * 64, b"{}", b"{}"),
    "parts that are empty": of_no_parts,
    "signature wrong": signature(lambda right: [b"0" * len(right)]),
    "signature missing": signature(lambda right: []),
    "signature empty": signature(lambda right: [b""]),
    "signature cut": signature(lambda right: [right[:-1]]),
    "signature twice as long": signature(lambda right: [right * 2]),
    "signature in capitals": signature(lambda right: [right.upper() + b" "]),
    "signature not ASCII": signature(lambda right: ["ä".encode() * 32]),
    "signature of another key": signed_by_another,
    "header null": signed(header=None),
    "header a list": signed(header=[["msg_id", "m"], ["msg_type", "stream"]]),
    "header a number": signed(header=7),
    "header a text": signed(header="header"),
    "header without msg_type": signed(header={"msg_id": "m"}),
    "header without msg_id": signed(header={"msg_type": "stream"}),
    "msg_type a list": signed(header=HEAD | {"msg_type": ["stream"]}),
    "msg_type an object": signed(header=HEAD | {"msg_type": {}}),
    "msg_id a number": signed(header=HEAD | {"msg_id": 7}),
    "content a list": signed(content=[["name", "stdout"], ["text", "LIE"]]),
    "content a text": signed(content="LIE"),
    "content null": signed(content=None),
    "content 200 000 deep": signed(content=DEEP),
    "content not UTF-8": signed(content=b'{"name":"stdout","status":"ok","text":"\xff\xfe"}'),
    "content half": signed(content=b'{"name":"stdout","status":"ok","text":"LI'),
    "content of two values": signed(content=b'{"name":"stdout","status":"ok","text":"LIE"}{}'),
    "content with a number of 10 000 digits": signed(content=b'{"status":"ok","n":' + b"9" * 10_000 + b"}"),
    "content empty": signed(content=b""),
    "parent null": signed(parent=None),
    "parent a list": signed(parent=[]),
    "parent with a number for its msg_id": signed(parent={"msg_id": 7}),
    "parent with a list for its msg_id": signed(parent={"msg_id": ["m"]}),
}


def says_on_every_channel(frames: Frames) -> Script:
    def noise(kernel: FakeKernel, request: Request) -> None:
        for channel in LIES:
            kernel.raw(channel, request, *frames(kernel, request, channel))

    return noise


@pytest.mark.parametrize("frames", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_passed_over(scripted: Run, frames: Frames) -> None:
    survives(scripted, amid(says_on_every_channel(frames)))


@pytest.mark.parametrize(
    "parts", [[b"x"] * 100_000, [DELIMITER, *[b"x"] * 100_000]], ids=["none", "delimiter"]
)
def test_a_message_of_100_000_parts_is_passed_over(scripted: Run, parts: list[bytes]) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        says_on_every_channel(plain(*parts))(kernel, request)
        echo(kernel, request)

    survives(scripted, script, limits=Limits(timeout=10))


def test_a_message_that_comes_again_counts_once(scripted: Run) -> None:
    sent: list[tuple[str, list[bytes]]] = []

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        sent.append(("iopub", kernel.frames(request, "stream", {"name": "stdout", "text": "once"})))
        sent.append(
            ("shell", kernel.frames(request, "execute_reply", {"status": "ok", "execution_count": 7}))
        )
        for channel, frames in sent * 3:
            kernel.raw(channel, request, *frames)
        kernel.idle(request)

    registry, _ = scripted(script)
    for _ in range(3):
        result = run(registry, "code")
        assert (*seen(result), result.execution_count) == (CellStatus.OK, "once", False, 7)


@every_channel
def test_what_is_no_message_costs_the_kernel_when_it_does_not_end(scripted: Run, channel: str) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "first")
        for frames in [*NO_MESSAGES.values()] * 4:
            kernel.raw(channel, request, *frames(kernel, request, channel))
        kernel.stop_reading()

    result = survives(scripted, script, status=CellStatus.DIED, ended=True)
    assert "too many messages that no kernel sends" in (result.warning or "")


@every_channel
def test_noise_before_the_first_answer_does_not_keep_a_kernel_from_starting(
    scripted: Run, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = FakeKernel.busy

    def busy(kernel: FakeKernel, request: Request) -> None:
        if request["msg_type"] == "kernel_info_request":
            for frames in NO_MESSAGES.values():
                kernel.raw(channel, request, *frames(kernel, request, channel))
        ordinary(kernel, request)

    monkeypatch.setattr(FakeKernel, "busy", busy)
    survives(scripted, echo)


def test_a_kernel_whose_only_answer_is_noise_is_a_start_error_and_the_next_one_is_asked(
    scripted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = FakeKernel._serve

    def noise(kernel: FakeKernel, shell: Any) -> None:
        monkeypatch.setattr(FakeKernel, "_serve", serve)
        idents, _ = kernel.session.feed_identities(shell.recv_multipart())
        for _ in range(200):
            kernel.raw("shell", {"idents": idents}, b"noise")
        kernel.stop_reading()

    monkeypatch.setattr(FakeKernel, "_serve", noise)
    registry, _ = scripted(echo)
    with pytest.raises(KernelStartError, match="ended while it started"):
        registry.execute("first", owner="a")
    assert seen(run(registry, "next")) == (CellStatus.OK, "next", False)


# Messages that are odd, and messages all the same


def in_the_header(name: str, value: Any) -> Script:
    def noise(kernel: FakeKernel, request: Request) -> None:
        header = {**kernel.session.msg_header("comm_msg"), name: value}
        kernel.signed("iopub", request, "comm_msg", {}, header=header)

    return noise


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "msg_id", ["m" * 10_000_000, "", "\ud800", "\0"], ids=["10 MB", "empty", "lone", "NUL"]
)
def test_a_msg_id_may_be_any_text(scripted: Run, msg_id: str) -> None:
    survives(scripted, amid(in_the_header("msg_id", msg_id)))


@pytest.mark.parametrize(
    "kind", ["t" * 10_000_000, "", "\ud800", "__class__"], ids=["10 MB", "", "lone", "dunder"]
)
def test_a_type_that_is_not_known_is_passed_over(scripted: Run, kind: str) -> None:
    def noise(kernel: FakeKernel, request: Request) -> None:
        for channel in LIES:
            kernel.signed(channel, request, kind, {"status": 7})

    survives(scripted, amid(noise))


@pytest.mark.parametrize(
    "date", [7, None, "9999-99-99T99:99:99", "", [], "9" * 100_000], ids=lambda d: repr(d)[:20]
)
def test_the_date_of_a_header_is_not_looked_at(scripted: Run, date: Any) -> None:
    survives(scripted, amid(in_the_header("date", date)))


@pytest.mark.parametrize("depth", [50, 99, 100, 101, 500, 900, 980])
@pytest.mark.parametrize("mime", ["text/plain", "application/json"])
def test_what_is_shown_may_be_nested_as_deep_as_can_be_read(scripted: Run, mime: str, depth: int) -> None:
    def noise(kernel: FakeKernel, request: Request) -> None:
        for kind in ("execute_result", "display_data", "comm_msg"):
            content = {"data": {mime: nested(depth)}, "metadata": {"m": nested(depth)}}
            kernel.signed("iopub", request, kind, content, metadata={"hermes": {"end": nested(depth)}})

    survives(scripted, amid(noise))


ODD_JSON = {
    "no numbers": b'{"data":{"text/plain":"shown","application/json":[NaN,Infinity,-Infinity]}}',
    "too large": b'{"data":{"text/plain":"shown","application/json":[1e999,-1e999]},"metadata":{"x":1e400}}',
    "minus zero": b'{"data":{"text/plain":"shown","application/json":[-0.0]},"metadata":{}}',
    "keys that come twice": b'{"data":7,"data":{"text/plain":"LIE","text/plain":"shown"},"metadata":{}}',
}


@pytest.mark.parametrize("content", ODD_JSON.values(), ids=ODD_JSON)
def test_odd_json_is_read_as_python_does_and_told_as_strict_json(scripted: Run, content: bytes) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.raw("iopub", request, *kernel.frames(request, "display_data", content=content))
        kernel.stream(request, "first")
        kernel.reply(request)
        kernel.idle(request)

    result = survives(scripted, script)
    assert result.text == "shown\nfirst"
    json.loads(result.to_json(), parse_constant=refuse)


# Whose answer it is


def predicted(request: Request) -> dict[str, Any]:
    """The header of the owner's next request, as far as it can be guessed."""
    session, number = request["header"]["msg_id"].rsplit("_", 1)
    return {**request["header"], "msg_id": f"{session}_{int(number) + 1}"}


def of_another_session(request: Request) -> dict[str, Any]:
    return dict(Session(key=b"").msg("execute_request")["header"])


PARENTS: dict[str, Callable[[list[Request]], dict[str, Any]]] = {
    "no parent": lambda requests: {},
    "a parent without msg_id": lambda requests: {"session": requests[-1]["header"]["session"]},
    "the cell before": lambda requests: requests[-2]["header"],
    "an older cell": lambda requests: requests[0]["header"],
    "a cell not sent yet": lambda requests: predicted(requests[-1]),
    "another session's cell": lambda requests: of_another_session(requests[-1]),
}


@every_channel
@pytest.mark.parametrize("parent", PARENTS.values(), ids=PARENTS)
def test_an_answer_to_another_cell_is_not_this_ones(
    scripted: Run, parent: Callable[[list[Request]], dict[str, Any]], channel: str
) -> None:
    requests: list[Request] = []

    def lie(kernel: FakeKernel, request: Request) -> None:
        answers = parent(requests)
        kernel.signed(channel, request, *LIES[channel], parent=answers)
        if channel == "iopub":
            kernel.signed(channel, request, "error", FORGED, parent=answers)
            kernel.signed(channel, request, "status", {"execution_state": "idle"}, parent=answers)

    def script(kernel: FakeKernel, request: Request) -> None:
        requests.append(request)
        if len(requests) == 3:
            amid(lie)(kernel, request)
        else:
            echo(kernel, request)

    registry, launcher = scripted(script)
    for n in range(6):
        result = run(registry, f"cell {n}")
        assert seen(result) == (CellStatus.OK, f"cell {n}", False)
        assert (result.error, result.warning) == (None, None)
    assert len(launcher.kernels) == 1


@pytest.mark.parametrize("whose", ["an older cell", "a cell not sent yet"])
def test_no_cell_of_our_own_session_counts_as_another_clients(scripted: Run, whose: str) -> None:
    requests: list[Request] = []

    def script(kernel: FakeKernel, request: Request) -> None:
        requests.append(request)
        if len(requests) == 3:
            content = {"code": "x", "execution_count": 1}
            kernel.signed("iopub", request, "execute_input", content, parent=PARENTS[whose](requests))
        echo(kernel, request)

    registry, _ = scripted(script)
    for n in range(4):
        result = run(registry, f"cell {n}")
        assert (*seen(result), result.kernel.foreign_cells) == (CellStatus.OK, f"cell {n}", False, 0)


def test_a_cell_of_another_client_that_never_ends_is_said_and_a_reset_gets_past_it(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        content = {"code": "x", "execution_count": 1}
        kernel.signed("iopub", request, "execute_input", content, parent=of_another_session(request))
        echo(kernel, request)

    registry, launcher = scripted(first(script))
    assert seen(run(registry, "first")) == (CellStatus.OK, "first", False)
    waited = run(registry, "waits", timeout=0.2)
    assert (waited.status, waited.ran, waited.kernel.ended) == (CellStatus.TIMED_OUT, False, False)
    assert "not run; state kept" in waited.to_dict()["error"]
    result = registry.execute("fresh", owner="a", reset=True)
    assert (*seen(result), result.kernel.lost) == (CellStatus.OK, "fresh", False, Loss.RESET)
    assert launcher.kernels[0].cells == ["first"]


# Replies

BAD_REPLIES: dict[str, dict[str, Any]] = {
    "no status": {"execution_count": 1},
    "status 7": {"status": 7},
    "status a list": {"status": ["ok"]},
    "status unknown": {"status": "fine"},
    "execution_count a text": {"status": "ok", "execution_count": "boom"},
    "execution_count a boolean": {"status": "ok", "execution_count": True},
    "execution_count infinite": {"status": "ok", "execution_count": float("inf")},
    "traceback a text": {"status": "error", "ename": "E", "evalue": "v", "traceback": "E: v"},
    "traceback of numbers": {"status": "error", "ename": "E", "evalue": "v", "traceback": [1, 2]},
    "an error without its name": {"status": "error", "evalue": "v", "traceback": []},
}


def replies(content: dict[str, Any]) -> Script:
    def reply(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, request["content"]["code"])
        kernel.signed("shell", request, "execute_reply", content)
        kernel.idle(request)

    return reply


@pytest.mark.parametrize("content", BAD_REPLIES.values(), ids=BAD_REPLIES)
def test_a_reply_that_is_none_is_passed_over_and_the_one_behind_it_taken(
    scripted: Run, content: dict[str, Any]
) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        replies(content)(kernel, request)
        kernel.reply(request, {"status": "ok", "execution_count": 7})

    assert survives(scripted, script).execution_count == 7


@pytest.mark.parametrize("content", BAD_REPLIES.values(), ids=BAD_REPLIES)
def test_a_reply_that_is_none_is_no_answer(scripted: Run, content: dict[str, Any]) -> None:
    survives(scripted, replies(content), status=CellStatus.TIMED_OUT, ended=True, limits=SHORT)


@pytest.mark.parametrize(
    "extra",
    [
        {"payload": [{"source": "set_next_input", "text": "rm -rf /", "replace": True}]},
        {"payload": [{"source": "ask_exit", "keepkernel": False}]},
        {"payload": [{"source": "page", "data": {"text/plain": "x" * 10_000_000}}]},
        {"payload": "no list"},
        {"payload": [None, 7, [], {"source": []}]},
        {"user_expressions": []},
        {"execution_count": -1},
        {"execution_count": None},
        {"status": "ok", "traceback": 7, "ename": None},
    ],
    ids=lambda extra: repr(extra)[:50],
)
def test_what_else_a_reply_says_changes_nothing(scripted: Run, extra: dict[str, Any]) -> None:
    result = survives(scripted, replies({"status": "ok", "execution_count": 1, **extra}))
    assert (result.text, result.exit_code) == ("first", 0)


@pytest.mark.parametrize("count", [0, 2**31, 2**64, 10**4000], ids=["0", "2**31", "2**64", "4000 digits"])
def test_an_execution_count_may_be_any_whole_number(scripted: Run, count: int) -> None:
    assert survives(scripted, replies({"status": "ok", "execution_count": count})).execution_count == count


@pytest.mark.parametrize(
    "metadata", [{"exit_code": "boom"}, {"exit_code": True}, {"exit_code": []}, [], 7, None]
)
def test_metadata_of_a_reply_that_makes_no_sense_ends_nothing(scripted: Run, metadata: Any) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "first")
        content = {"status": "ok", "execution_count": 1}
        kernel.signed("shell", request, "execute_reply", content, metadata={"hermes": metadata})
        kernel.idle(request)

    survives(scripted, script)


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_an_error_may_be_huge(scripted: Run, size: int) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        error = {
            "ename": "E" * size,
            "evalue": "v" * size,
            "traceback": ["\ud800" * (size // 10), "t" * size],
        }
        kernel.signed("shell", request, "execute_reply", {"status": "error", **error})
        kernel.idle(request)

    result = survives(scripted, script, status=CellStatus.ERROR, stdout="")
    assert result.error is not None
    assert (result.error.ename[:1], result.exit_code) == ("E", 1)  # how much of it is kept is not asked here


def test_a_cell_that_the_kernel_did_not_run_is_an_error(scripted: Run) -> None:
    result = survives(scripted, replies({"status": "aborted"}), status=CellStatus.ERROR)
    assert result.error is not None
    assert result.error.ename == "Aborted"


# Order

BUSY, IDLE, REPLY, SHOWN = FakeKernel.busy, FakeKernel.idle, FakeKernel.reply, "shown"


def in_order(*steps: Any) -> Script:
    def script(kernel: FakeKernel, request: Request) -> None:
        for step in steps:
            if step == SHOWN:
                kernel.stream(request, "first")
            else:
                step(kernel, request)

    return script


@pytest.mark.parametrize(
    "steps",
    [
        (BUSY, SHOWN, REPLY, REPLY, IDLE),
        (BUSY, SHOWN, REPLY, IDLE, REPLY, REPLY),
        (SHOWN, REPLY, BUSY, IDLE),
        (REPLY, BUSY, SHOWN, IDLE),
        (BUSY, SHOWN, IDLE, REPLY),
        (SHOWN, IDLE, BUSY, REPLY),
        (SHOWN, IDLE, REPLY, BUSY),
        (BUSY, SHOWN, IDLE, IDLE, REPLY),
        (BUSY, SHOWN, REPLY, IDLE, IDLE, IDLE),
        (BUSY, BUSY, BUSY, SHOWN, REPLY, IDLE, BUSY),
        (SHOWN, REPLY, IDLE),
    ],
    ids=lambda steps: " ".join(getattr(step, "__name__", step) for step in steps),
)
def test_a_cell_is_over_with_its_reply_and_idle_in_whatever_order(
    scripted: Run, steps: tuple[Any, ...]
) -> None:
    result = survives(scripted, in_order(*steps))
    assert (result.warning, result.error) == (None, None)


def test_the_first_of_two_replies_counts(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN, REPLY)(kernel, request)
        kernel.signed("shell", request, *LIES["shell"])
        kernel.idle(request)

    survives(scripted, script)


def test_a_reply_on_the_control_channel_is_none(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.signed("control", request, *LIES["control"])
        kernel.idle(request)

    survives(scripted, script, status=CellStatus.TIMED_OUT, ended=True, limits=SHORT)


@pytest.mark.parametrize("steps", [(SHOWN, REPLY), (BUSY, SHOWN, REPLY), (BUSY, SHOWN, REPLY, BUSY)], ids=len)
def test_busy_for_ever_after_the_reply_is_said_and_costs_only_its_grace(
    scripted: Run, steps: tuple[Any, ...]
) -> None:
    result = survives(scripted, in_order(*steps))
    assert IDLE_MISSING in (result.warning or "")
    assert result.duration < FAST.idle_grace + 0.9


@pytest.mark.parametrize("steps", [(BUSY, SHOWN), (BUSY, SHOWN, IDLE), (BUSY, SHOWN, IDLE, BUSY)], ids=len)
def test_without_a_reply_the_cell_times_out(scripted: Run, steps: tuple[Any, ...]) -> None:
    survives(scripted, in_order(*steps), status=CellStatus.TIMED_OUT, ended=True, limits=SHORT)


def test_a_kernel_that_never_says_busy_is_timed_all_the_same(
    scripted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BUSY_GRACE", 0.2)
    survives(scripted, in_order(SHOWN), status=CellStatus.TIMED_OUT, ended=True, limits=SHORT)


# What is shown

BAD_CONTENTS: list[tuple[str, Any]] = [
    *[
        ("stream", {"name": name, "text": "LIE"})
        for name in ("x", "", None, 7, [], ["stdout"], "x" * 10_000_000)
    ],
    *[("stream", {"name": "stdout", "text": text}) for text in ({}, {"a": 1}, None, 7, ["LIE"], True)],
    ("stream", {"name": "stdout"}),
    ("stream", {"text": "LIE"}),
    *[(kind, {"data": data}) for kind in ("display_data", "execute_result") for data in (None, [], "LIE", 7)],
    *[("display_data", {"data": {}, "metadata": metadata}) for metadata in (None, [], "x")],
    *[("update_display_data", {"data": {}, "transient": transient}) for transient in (None, [], "x")],
    *[("error", FORGED | {"traceback": traceback}) for traceback in (None, 7, "LIE", [None], [["LIE"]])],
    ("error", FORGED | {"ename": None}),
    *[("status", {"execution_state": state}) for state in (None, 7, [], {})],
    ("status", {}),
]


@pytest.mark.parametrize("bad", BAD_CONTENTS, ids=lambda bad: repr(bad)[:60])
def test_what_is_shown_in_a_wrong_shape_is_passed_over(scripted: Run, bad: tuple[str, Any]) -> None:
    result = survives(scripted, amid(lambda kernel, request: kernel.signed("iopub", request, *bad)))
    assert (result.text, result.error, result.warning) == ("first", None, None)


def test_text_that_is_bytes_is_shown_as_jupyter_packs_it(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.iopub("stream", {"name": "stdout", "text": b"first"}, request)
        kernel.reply(request)
        kernel.idle(request)

    survives(scripted, script, stdout="Zmlyc3Q=")


@pytest.mark.parametrize("channel", ["stdin", *LIES])
def test_a_question_that_may_not_be_asked_is_passed_over(scripted: Run, channel: str) -> None:
    def ask(kernel: FakeKernel, request: Request) -> None:
        assert request["content"]["allow_stdin"] is False
        kernel.signed(channel, request, "input_request", {"prompt": "password: ", "password": True})

    result = survives(scripted, amid(ask))
    assert result.text == "first"


@pytest.mark.parametrize("channel", ["stdin", *LIES])
def test_a_kernel_that_waits_for_an_answer_to_it_times_out(scripted: Run, channel: str) -> None:
    def ask(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.signed(channel, request, "input_request", {"prompt": "? ", "password": False})
        kernel.stop_reading()

    survives(scripted, ask, status=CellStatus.TIMED_OUT, ended=True, limits=SHORT)


def test_a_flood_of_comms_shows_nothing_and_hides_nothing(scripted: Run) -> None:
    def flood(kernel: FakeKernel, request: Request) -> None:
        for n in range(300):
            kernel.iopub("comm_open", {"comm_id": f"c{n}", "target_name": "t", "data": {}}, request)
            for _ in range(3):
                kernel.iopub("comm_msg", {"comm_id": f"c{n}", "data": {"x": "y" * 100}}, request)
            kernel.iopub("comm_close", {"comm_id": None}, request)

    result = survives(scripted, amid(flood), limits=Limits(timeout=10))
    assert (result.outputs, result.warning) == (
        ({"output_type": "stream", "name": "stdout", "text": "first"},),
        None,
    )


@pytest.mark.parametrize("display_id", [None, 7, [], {}, "d" * 100_000], ids=lambda i: repr(i)[:10])
def test_an_update_without_an_id_shows_nothing(scripted: Run, display_id: Any) -> None:
    def flood(kernel: FakeKernel, request: Request) -> None:
        content = {"data": {"text/plain": "LIE"}, "metadata": {}, "transient": {"display_id": display_id}}
        kernel.iopub("display_data", {"data": {"text/plain": "shown"}}, request)
        for _ in range(100):
            kernel.iopub("update_display_data", content, request)

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        flood(kernel, request)
        in_order(SHOWN, REPLY, IDLE)(kernel, request)

    assert survives(scripted, script).text == "shown\nfirst"


@pytest.mark.parametrize("wait", [True, False, None, "no", ["x"], {}], ids=repr)
def test_a_cleared_output_is_gone_before_the_next_text(scripted: Run, wait: Any) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "cleared")
        for _ in range(100):
            kernel.iopub("clear_output", {"wait": wait}, request)
        in_order(SHOWN, REPLY, IDLE)(kernel, request)

    survives(scripted, script)


def test_a_clear_that_waits_for_a_text_that_never_comes_clears_nothing(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.iopub("clear_output", {"wait": True}, request)
        in_order(REPLY, IDLE)(kernel, request)

    survives(scripted, script)


# Size


@every_channel
def test_a_frame_over_the_limit_costs_the_kernel_at_once(
    scripted: Run, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE", 10_000)

    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.raw(channel, request, b"x" * 20_000)
        kernel.stop_reading()

    result = survives(scripted, script, status=CellStatus.DIED, ended=True, limits=Limits(timeout=30))
    assert result.duration < LATE


@every_channel
def test_a_frame_of_200_mb_costs_the_kernel_at_once(scripted: Run, channel: str) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.raw(channel, request, bytes(200_000_000))
        kernel.stop_reading()

    survives(scripted, script, status=CellStatus.DIED, ended=True)


@every_channel
def test_a_frame_of_just_the_limit_is_read(scripted: Run, channel: str) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.raw(channel, request, bytes(connection.MAX_MESSAGE))
        echo(kernel, request)

    survives(scripted, script)


# A peer that stops within a frame, or does not read

HALF = HandMadeSocket.header(1_000_000) + b"half"


def test_half_an_output_and_silence_is_said(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.write("iopub", HALF)
        kernel.reply(request)

    registry, launcher = scripted(first(script), by_hand="iopub")
    for _ in range(2):  # the rest of the frame never comes: whatever is shown is lost in it, and that is said
        result = run(registry, "first")
        assert (result.status, result.kernel.ended) == (CellStatus.OK, False)
        assert IDLE_MISSING in (result.warning or "")
    result = registry.execute("fresh", owner="a", reset=True)
    assert (*seen(result), result.kernel.lost) == (CellStatus.OK, "fresh", False, Loss.RESET)
    assert IDLE_MISSING not in (result.warning or "")
    assert launcher.kernels[0].cells == ["first", "first"]


def test_half_a_reply_and_silence_is_a_timeout(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.write("shell", HALF)
        kernel.idle(request)
        kernel.stop_reading()

    survives(scripted, script, status=CellStatus.TIMED_OUT, ended=True, limits=SHORT, by_hand="shell")


def test_half_a_frame_on_the_control_channel_and_silence_costs_nothing(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.write("control", HALF)
        echo(kernel, request)

    survives(scripted, script, by_hand="control")


@every_channel
@pytest.mark.parametrize(
    "last", [HALF, HALF[:1], HandMadeSocket.header(1, HandMadeSocket.MORE) + b"x", b""], ids=range(4)
)
def test_a_channel_that_is_closed_within_a_frame_costs_the_kernel_at_once(
    scripted: Run, channel: str, last: bytes
) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.write(channel, last)
        kernel.hang_up(channel)
        kernel.stop_reading()

    result = survives(
        scripted, script, status=CellStatus.DIED, ended=True, limits=Limits(timeout=30), by_hand=channel
    )
    assert result.duration < LATE


@every_channel
@pytest.mark.parametrize("garbage", [b"\x7f" * 100, b"\xff" * 100], ids=["7f", "ff"])
def test_bytes_that_are_no_frames_cost_the_kernel_at_once(
    scripted: Run, channel: str, garbage: bytes
) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.write(channel, garbage)
        kernel.stop_reading()

    survives(scripted, script, status=CellStatus.DIED, ended=True, by_hand=channel)


@every_channel
@pytest.mark.parametrize(
    "garbage", [HandMadeSocket.header(connection.MAX_MESSAGE + 1), b"\xff" * 100], ids=len
)
def test_a_channel_that_breaks_between_two_cells_costs_the_next_one_nothing(
    scripted: Run, channel: str, garbage: bytes
) -> None:
    broken = threading.Event()

    def script(kernel: FakeKernel, request: Request) -> None:
        echo(kernel, request)
        kernel.write(channel, garbage)
        kernel.wait_for_hang_up(channel)
        broken.set()

    registry, _ = scripted(first(script), by_hand=channel)
    assert seen(run(registry, "first")) == (CellStatus.OK, "first", False)
    assert broken.wait(LATE)
    for code in ("next", "last"):
        result = run(registry, code)
        assert (result.status, result.stdout) == (CellStatus.OK, code)


def test_output_that_ends_within_a_frame_is_said_to_be_missing(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.write("iopub", HALF)
        kernel.hang_up("iopub")
        kernel.reply(request)
        kernel.stop_reading()

    result = survives(scripted, script, ended=True, by_hand="iopub")
    assert "output may be missing" in (result.warning or "")


def test_the_reply_of_a_kernel_that_has_ended_is_read_though_it_comes_last(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        in_order(BUSY, SHOWN)(kernel, request)
        kernel.leave(3)
        kernel.hang_up("iopub")
        threading.Event().wait(0.2)  # long enough for the host to see both
        kernel.reply(request, hermes={"exit_code": 3})
        kernel.hang_up("shell")
        kernel.stop_reading()

    result = survives(
        scripted,
        script,
        status=CellStatus.EXITED,
        ended=True,
        limits=Limits(timeout=30),
        by_hand="shell iopub",
    )
    assert result.exit_code == 3


@pytest.mark.parametrize("channels", ["shell iopub control", "shell", "iopub"])
@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        HandMadeSocket.GREETING[:11],
        HandMadeSocket.GREETING,
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0" * 100,
    ],
    ids=["nothing", "half a greeting", "only a greeting", "HTTP", "zeros"],
)
def test_a_peer_that_does_not_shake_hands_is_a_start_error(
    scripted: Run, channels: str, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(handmade: HandMadeSocket) -> None:
        handmade._peer, _ = handmade._listener.accept()
        handmade.write(greeting)

    monkeypatch.setattr(HandMadeSocket, "accept", accept)
    serve = FakeKernel._serve

    def mute(kernel: FakeKernel, shell: Any) -> None:
        monkeypatch.setattr(FakeKernel, "_serve", serve)
        kernel.stop_reading()

    monkeypatch.setattr(FakeKernel, "_serve", mute)
    registry, _ = scripted(echo, Limits(start_timeout=0.3), by_hand=channels)
    with pytest.raises(KernelStartError, match="did not answer within start_timeout"):
        registry.execute("first", owner="a")
    assert registry.kernels() == ()
    monkeypatch.undo()
    assert seen(run(registry, "next")) == (CellStatus.OK, "next", False)


def test_a_kernel_that_does_not_read_blocks_neither_its_owner_nor_others(
    scripted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "BUSY_GRACE", 0.2)

    def script(kernel: FakeKernel, request: Request) -> None:
        echo(kernel, request)
        kernel.stop_reading()

    registry, launcher = scripted(first(script), by_hand="shell")
    assert seen(run(registry, "first")) == (CellStatus.OK, "first", False)
    asked = [0]

    def meanwhile() -> bool:
        asked[0] += 1
        if asked[0] == 3:  # the cell has been sent, and is not read
            assert registry.execute("other", owner="b").stdout == "other"
        return False

    unread = registry.execute("#" * 50_000_000, owner="a", timeout=0.5, interrupted=meanwhile)
    assert seen(unread) == (CellStatus.TIMED_OUT, "", True)
    assert (unread.duration < 0.5 + LATE, asked[0] >= 3) == (True, True)
    following = run(registry, "next")
    assert (*seen(following), following.kernel.lost) == (CellStatus.OK, "next", False, Loss.TIMED_OUT)
    assert launcher.kernels[0].cells == ["first"]


# CurveZMQ. A registry's kernels have no TCP; those that jupyter_client's own managers start may.


@pytest.fixture
def installed_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(SPEC, tmp_path / "kernels" / "hermes")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))


async def answer(manager: AsyncKernelManager) -> Any:
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=30)
        reply = await client.execute_interactive("6 * 7", timeout=30, output_hook=lambda _: None)
    finally:
        client.stop_channels()
        client.context.term()
    return reply["content"]["status"]


def refusal(manager: AsyncKernelManager, channel: str, *, keys: bool) -> int:
    """Knock at a channel, with wrong keys or none; return what became of the handshake."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as knocking:
        knocking.linger = 0
        knocking.reconnect_ivl = -1
        if keys:
            wrong, _ = zmq.curve_keypair()
            knocking.curve_publickey, knocking.curve_secretkey = zmq.curve_keypair()
            knocking.curve_serverkey = wrong
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        ends |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        with knocking.get_monitor_socket(ends) as monitor:
            knocking.connect(f"tcp://{manager.ip}:{getattr(manager, f'{channel}_port')}")
            assert monitor.poll(10_000)
            event = int(parse_monitor_message(monitor.recv_multipart())["event"])
            knocking.disable_monitor()
    return event


def test_a_curve_server_refuses_a_wrong_key_and_a_plain_client_and_serves_the_right_one(
    leaves_nothing: None, installed_spec: None
) -> None:
    async def main() -> None:
        manager = AsyncKernelManager(kernel_name="hermes", transport_encryption="required")
        await manager.start_kernel()
        try:
            assert manager.transport == "tcp"
            assert await answer(manager) == "ok"
            for channel in ("shell", "iopub", "stdin", "control"):
                for keys in (True, False):
                    event = await asyncio.to_thread(refusal, manager, channel, keys=keys)
                    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED, (channel, keys)
            assert await answer(manager) == "ok"
        finally:
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())
