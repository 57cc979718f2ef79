"""A second client of an owner's kernel, with the connection file but not the owner's secret."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient

from hermes_kernel import BlockingRegistry, CellStatus, Limits

from .. import traces

Make = Callable[..., BlockingRegistry]


class Stranger:
    """A stock blocking client that has been given the connection file without what is the owner's."""

    def __init__(self, registry: BlockingRegistry, place: Path) -> None:
        (info,) = registry.kernels()
        assert info.connection_file is not None
        connection = json.loads(Path(info.connection_file).read_text())
        assert connection.pop("hermes")["owner_secret"]
        file = place / "published.json"
        file.write_text(json.dumps(connection))
        self.client = BlockingKernelClient(connection_file=str(file))
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=30)
        self.shown: list[Any] = []

    def run(self, code: str, **options: Any) -> dict[str, Any]:
        reply = self.client.execute_interactive(
            code, timeout=30, output_hook=lambda m: self.shown.append(m["content"]), **options
        )
        content: dict[str, Any] = reply["content"]
        return content

    def ask(self, message_type: str, **content: Any) -> dict[str, Any]:
        """Send a control request and return the content of its reply."""
        message = self.client.session.msg(message_type, content)
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=30)
            if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
                answer: dict[str, Any] = reply["content"]
                return answer

    def close(self) -> None:
        self.client.stop_channels()
        self.client.context.destroy(linger=0)


@pytest.fixture
def owned(make_registry: Make) -> BlockingRegistry:
    registry = make_registry(limits=Limits(timeout=30))
    registry.execute("x = 41", owner="a")
    return registry


@pytest.fixture
def stranger(owned: BlockingRegistry, tmp_path: Path) -> Any:
    other = Stranger(owned, tmp_path)
    yield other
    other.close()


def pid_of(registry: BlockingRegistry) -> int | None:
    return registry.kernels()[0].pid


def test_a_stranger_shares_the_state_and_is_counted(owned: BlockingRegistry, stranger: Stranger) -> None:
    assert stranger.run("x += 1")["status"] == "ok"
    first = owned.execute("x", owner="a")
    assert (first.value, first.kernel.foreign_cells) == ("42", 1)
    assert first.to_dict()["kernel"]["foreign_cells"] == 1
    assert owned.execute("x", owner="a").kernel.foreign_cells == 0


@pytest.mark.parametrize("code", ["exit", "exit()", "quit", "get_ipython().ask_exit()"])
def test_exit_of_a_stranger_is_that_of_its_front_end(
    owned: BlockingRegistry, stranger: Stranger, code: str
) -> None:
    pid = pid_of(owned)
    reply = stranger.run(code)
    assert reply["payload"] == [{"source": "ask_exit", "keepkernel": True}]
    assert any("goes on" in shown.get("text", "") for shown in stranger.shown)
    result = owned.execute("x", owner="a")
    assert (result.value, pid_of(owned)) == ("41", pid)
    assert owned.execute("get_ipython().ask_exit()", owner="a").kernel.ended


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise SystemExit"])
def test_a_stranger_cannot_exit_the_kernel(owned: BlockingRegistry, stranger: Stranger, code: str) -> None:
    pid = pid_of(owned)
    assert stranger.run(code)["ename"] == "SystemExit"
    result = owned.execute("x", owner="a")
    assert (result.value, pid_of(owned)) == ("41", pid)


@pytest.mark.parametrize("restart", [False, True])
def test_a_stranger_cannot_shut_the_kernel_down(
    owned: BlockingRegistry, stranger: Stranger, restart: bool
) -> None:
    reply = stranger.ask("shutdown_request", restart=restart)
    assert (reply["status"], reply["ename"]) == ("error", "NotTheOwner")
    assert "agent's session" in reply["evalue"]
    assert owned.execute("x", owner="a").value == "41"


def test_a_stranger_cannot_interrupt_the_owners_cell(
    owned: BlockingRegistry, stranger: Stranger, tmp_path: Path
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    for fifo in (begun, go_on):
        _fifo(fifo)
    results: list[Any] = []
    code = f"open({str(begun)!r}, 'w').close(); open({str(go_on)!r}).read(); 'finished'"
    owner = threading.Thread(target=lambda: results.append(owned.execute(code, owner="a")))
    owner.start()
    begun.read_bytes()
    reply = stranger.ask("interrupt_request")
    go_on.write_bytes(b"")
    owner.join(30)
    assert reply["ename"] == "NotTheOwner"
    assert results[0].value == "'finished'"


def test_a_strangers_failure_aborts_none_of_the_owners_cells(
    owned: BlockingRegistry, stranger: Stranger, tmp_path: Path
) -> None:
    for _ in range(10):
        stranger.client.execute("1 / 0", stop_on_error=True)
        result = owned.execute("x", owner="a")
        assert (result.status, result.value) == (CellStatus.OK, "41")


def test_a_strangers_own_queue_stops_at_its_failure_as_in_any_kernel(
    stranger: Stranger, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    _fifo(go_on)
    stranger.client.execute(f"open({str(go_on)!r}).read(); 1 / 0", stop_on_error=True)
    second = stranger.client.execute("print('not run')", stop_on_error=True)
    go_on.write_text("now")
    while True:
        reply = stranger.client.get_shell_msg(timeout=30)
        if reply["parent_header"]["msg_id"] == second:
            break
    assert reply["content"]["status"] == "aborted"


@pytest.mark.parametrize(
    ("method", "spares"), [("fork", 0), ("fork", 1), ("spawn", 0)], ids=["fork", "spare", "spawn"]
)
def test_the_heart_beats_for_whoever_asks_however_the_kernel_was_made(
    make_registry: Make, tmp_path: Path, method: str, spares: int
) -> None:
    registry = make_registry(limits=Limits(start_method=method, spare_kernels=spares))
    if spares:
        registry.execute("1", owner="before")
        assert traces.eventually(lambda: registry.stats()["spares"], within=20)
    registry.execute("1", owner="a")
    manager = registry.manager("a")
    assert manager is not None
    with zmq.Context() as context, context.socket(zmq.REQ) as heart:
        heart.connect(f"ipc://{manager.ip}-{manager.hb_port}")
        for beat in (b"one", b"two"):
            heart.send(beat)
            assert heart.poll(10_000)
            assert heart.recv() == beat
        # A client that starts its channels takes the kernel for dead where it does not beat.
        client = manager.client()
        client.start_channels(hb=True)
        try:
            assert traces.eventually(client.hb_channel.is_beating)
        finally:
            client.stop_channels()


@pytest.mark.parametrize("end", ["time", "caller"])
def test_a_call_behind_a_strangers_cell_waits_in_the_queue_and_touches_nothing(
    make_registry: Make, tmp_path: Path, end: str
) -> None:
    registry = make_registry(limits=Limits(timeout=30, queue_timeout=0.3))
    registry.execute("x = 41", owner="a")
    stranger = Stranger(registry, tmp_path)
    try:
        begun, go_on = tmp_path / "begun", tmp_path / "go on"
        for fifo in (begun, go_on):
            _fifo(fifo)
        request = stranger.client.execute(
            f"open({str(begun)!r}, 'w').close(); open({str(go_on)!r}).read(); y = 'stranger'"
        )
        begun.read_bytes()
        while True:  # the host has to have heard of it, too
            message = stranger.client.get_iopub_msg(timeout=30)
            if (message["msg_type"], message["parent_header"].get("msg_id")) == ("execute_input", request):
                break
        asked = iter([False, False, True])
        interrupted = (lambda: next(asked, True)) if end == "caller" else None
        result = registry.execute("x = 'touched'", owner="a", interrupted=interrupted)
        status = CellStatus.INTERRUPTED if end == "caller" else CellStatus.TIMED_OUT
        assert (result.status, result.ran) == (status, False)
        assert "not run; state kept" in result.to_dict()["error"]
        go_on.write_bytes(b"")
        while stranger.client.get_shell_msg(timeout=30)["parent_header"]["msg_id"] != request:
            pass
        after = registry.execute("x, y", owner="a", timeout=30)
        assert after.value == "(41, 'stranger')"
    finally:
        stranger.close()


def test_the_clock_of_a_cell_does_not_run_while_a_strangers_cell_does(
    make_registry: Make, tmp_path: Path
) -> None:
    registry = make_registry(limits=Limits(timeout=30, queue_timeout=20))
    registry.execute("x = 41", owner="a")
    stranger = Stranger(registry, tmp_path)
    try:
        stranger.client.execute("import time; time.sleep(1.5)")
        result = registry.execute("import time; time.sleep(0.3); x", owner="a", timeout=1)
        assert (result.status, result.value) == (CellStatus.OK, "41")
    finally:
        stranger.close()


def test_the_owners_secret_stands_in_the_private_file_alone(owned: BlockingRegistry) -> None:
    (info,) = owned.kernels()
    assert info.connection_file is not None
    secret = json.loads(Path(info.connection_file).read_text())["hermes"]["owner_secret"]
    result = owned.execute("import os, sys; [*os.environ.values(), *sys.argv]", owner="a")
    assert secret not in result.to_json()
    manager = owned.manager("a")
    assert manager is not None
    assert secret not in json.dumps(manager.get_connection_info(), default=str)


@pytest.mark.parametrize("event", ["pre_run_cell", "post_run_cell", "pre_execute", "post_execute"])
def test_what_ipython_says_of_a_cell_when_a_callback_fails_holds_nothing_of_the_owners(
    owned: BlockingRegistry, event: str
) -> None:
    (info,) = owned.kernels()
    assert info.connection_file is not None
    secrets = json.loads(Path(info.connection_file).read_text())["hermes"]
    owned.execute(f"get_ipython().events.register({event!r}, lambda *a: 1/0)", owner="a")
    result = owned.execute("x", owner="a", tools={"tool": lambda: 1})
    assert (result.value, "Error in callback" in result.text) == ("41", True)
    for name in ("owner_secret", "bridge_token", "tell_start", "endpoint"):
        assert name not in result.to_json()
        assert str(secrets.get(name, name)) not in result.to_json()


def test_a_client_that_goes_away_in_the_middle_of_its_cell_keeps_nobody_else_from_the_kernel(
    owned: BlockingRegistry, tmp_path: Path
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    for fifo in (begun, go_on):
        _fifo(fifo)
    stranger = Stranger(owned, tmp_path)
    stranger.client.execute(
        f"print('lost'); open({str(begun)!r}, 'w').close(); open({str(go_on)!r}).read(); y = 'done'"
    )
    begun.read_bytes()
    stranger.close()
    go_on.write_bytes(b"")
    result = owned.execute("x, y", owner="a", timeout=30)
    assert (result.value, result.stdout) == ("(41, 'done')", "")
    assert owned.execute("x", owner="a").value == "41"


def test_a_client_of_the_registrys_own_manager_is_an_owner(owned: BlockingRegistry) -> None:
    manager = owned.manager("a")
    assert manager is not None

    async def main() -> str:
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=30)
            reply = await client.execute("import sys; sys.exit(3)", reply=True, timeout=30)
            return str(reply["metadata"]["hermes"]["exit_code"])
        finally:
            client.stop_channels()
            client.context.destroy(linger=0)

    assert asyncio.run(main()) == "3"


def _fifo(path: Path) -> None:
    import os

    os.mkfifo(path)
