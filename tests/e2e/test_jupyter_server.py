"""The spec `hermes` under a real jupyter_server, as a front end uses it: REST and a websocket."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import websocket

from .. import traces
from ..cli.command import COMMAND

ROUNDS = 5  # of what is measured
START_WAIT = 30.0
STOP_WAIT = 10.0
ANSWER_WAIT = 30.0
POLLER_WAIT = 3.0  # the kernel looks for its parent once a second
QUICK = 1.0

SECRETS = {"OPENAI_API_KEY": "sk-hold0123456789abcdefghij", "SECRET_TOKEN": "s3cr3t-of-the-host-0123"}
HELD = tuple(SECRETS.values())


@dataclass(frozen=True)
class Answer:
    """What came back for a cell: the reply's content, and what was published."""

    reply: dict[str, Any]
    stdout: str
    value: str | None

    @property
    def ended_with(self) -> str:
        """`ok`, or the name of the exception."""
        return str(self.reply.get("ename", self.reply["status"]))


class Kernel:
    """A kernel of the server, and the websocket of one front end to it."""

    def __init__(self, server: "Server", spec: str) -> None:
        self._server = server
        self.id: str = server.ask("POST", "/api/kernels", {"name": spec})["id"]
        self._channels = f"/api/kernels/{self.id}/channels"
        self._socket = server.connect(self._channels)
        (self.process,) = traces_of(server.runtime, self.id)

    def begin(self, code: str) -> str:
        """Send a cell; return its message's id."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": "execute_request",
            "session": "test",
            "username": "test",
            "date": "2026-01-01T00:00:00Z",
            "version": "5.3",
        }
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        message = {
            "channel": "shell",
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
        }
        self._socket.send(json.dumps(message))
        return header["msg_id"]

    def until(self, cell: str, said: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Read messages up to the one of *cell* for which *said* holds; return those of the cell."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + ANSWER_WAIT
        while True:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") == cell:
                found.append(message)
                if said(message):
                    return found

    def until_printed(self, cell: str, text: str) -> None:
        self.until(cell, lambda m: m["msg_type"] == "stream" and text in m["content"]["text"])

    def answer(self, cell: str) -> Answer:
        """Wait for the reply and for idle, which come in any order on their two channels."""
        left = {"reply", "idle"}

        def is_last(message: dict[str, Any]) -> bool:
            if message["msg_type"] == "execute_reply":
                left.discard("reply")
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                left.discard("idle")
            return not left

        messages = self.until(cell, is_last)
        by_type: dict[str, list[dict[str, Any]]] = {}
        for message in messages:
            by_type.setdefault(message["msg_type"], []).append(message["content"])
        values = [content["data"]["text/plain"] for content in by_type.get("execute_result", [])]
        stdout = "".join(c["text"] for c in by_type.get("stream", []) if c["name"] == "stdout")
        return Answer(by_type["execute_reply"][0], stdout, values[-1] if values else None)

    def run(self, code: str) -> Answer:
        return self.answer(self.begin(code))

    def interrupt(self) -> None:
        self._server.ask("POST", f"/api/kernels/{self.id}/interrupt")

    def restart(self) -> None:
        """Ask for it over REST; that alone, the websocket is not yet usable again."""
        self._server.ask("POST", f"/api/kernels/{self.id}/restart")

    def reconnect(self) -> None:
        """Connect anew, as JupyterLab does after a restart: the server waits until iopub is heard."""
        self._socket.close()
        self._socket = self._server.connect(self._channels)

    def delete(self) -> None:
        self._server.ask("DELETE", f"/api/kernels/{self.id}")

    def close(self) -> None:
        self._socket.close()


@dataclass
class Server:
    """A jupyter_server process of the test's own."""

    process: "subprocess.Popen[bytes]"
    url: str
    token: str
    runtime: Path
    root: Path

    def raw(self, method: str, path: str, body: object = None) -> tuple[int, str, bytes]:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_WAIT) as response:
            return response.status, response.headers["Content-Type"], response.read()

    def ask(self, method: str, path: str, body: object = None) -> Any:
        told = self.raw(method, path, body)[2]
        return json.loads(told) if told else None

    def connect(self, path: str) -> websocket.WebSocket:
        return websocket.create_connection(
            self.url.replace("http", "ws", 1) + path,
            header=[f"Authorization: token {self.token}"],
            timeout=ANSWER_WAIT,
        )

    @contextmanager
    def kernel(self, spec: str = "hermes") -> Iterator[Kernel]:
        """A kernel that is gone at the end, also if the test has not deleted it."""
        kernel = Kernel(self, spec)
        with closing(kernel):
            try:
                yield kernel
            finally:
                if any(running["id"] == kernel.id for running in self.ask("GET", "/api/kernels")):
                    kernel.delete()


def traces_of(runtime: Path, kernel_id: str | None = None) -> list[psutil.Process]:
    """Processes of kernels below *runtime*; with an id, the kernel's own process alone."""
    if kernel_id is None:
        return traces.marked_processes(str(runtime))
    try:
        session = json.loads((runtime / "hermes-kernel" / kernel_id / "session.json").read_text())
        return [psutil.Process(session["pid"])]
    except (FileNotFoundError, psutil.NoSuchProcess):  # between two processes
        return []


@contextmanager
def jupyter_server(home: Path, runtime: Path) -> Iterator[Server]:
    """Run a server whose every directory lies below *home*, its kernels' below *runtime*."""
    root, share = home / "root", home / "prefix" / "share" / "jupyter"
    for directory in (root, home / "prefix"):
        directory.mkdir(parents=True)
    env = {
        **os.environ,
        **SECRETS,
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(runtime),
        "JUPYTER_PATH": str(share),
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "jupyter"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    install = [*COMMAND, "spec", "install", "--prefix", str(home / "prefix")]
    for arguments in ([], ["--name", "leaky"]):
        subprocess.run([*install, *arguments], env=env, check=True, capture_output=True, timeout=START_WAIT)
    leaky = share / "kernels" / "leaky" / "kernel.json"
    content = json.loads(leaky.read_text())
    content["env"] = {"X": "a-${SECRET_TOKEN}-b", "LC_X": "a-${SECRET_TOKEN}-b", "LC_PLAIN": "kept"}
    leaky.write_text(json.dumps(content))

    token = uuid.uuid4().hex
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": 0,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "ServerApp.root_dir": root,
        "ServerApp.jpserver_extensions": "{}",
        "IdentityProvider.token": token,
    }
    command = [
        sys.executable,
        "-m",
        "jupyter_server",
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    log = home / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, cwd=root, stdout=file, stderr=file)
    try:
        info = home / "jupyter" / f"jpserver-{process.pid}.json"
        server = Server(process, "", token, runtime, root)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                server.url = json.loads(info.read_text())["url"].rstrip("/")
                return server.raw("GET", "/api/status")[0] == 200
            except (OSError, ValueError):  # not yet written, not yet whole, not yet listening
                return False

        assert traces.eventually(answers, within=START_WAIT), log.read_text()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_WAIT)
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with jupyter_server(tmp_path_factory.mktemp("server"), runtime) as found:
        yield found


@pytest.fixture
def kernel(server: Server, leaves_nothing: None) -> Iterator[Kernel]:
    with server.kernel() as found:
        yield found


@pytest.fixture
def own_runtime() -> Iterator[Path]:
    """A runtime directory for one test, whatever is left in it; short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="hkj-"))
    yield directory
    for process in traces_of(directory):
        process.kill()
    shutil.rmtree(directory, ignore_errors=True)  # the wardens of a killed server remove, too


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measured(name: str, times: list[float], record: Callable[[str, object], None]) -> float:
    """Return the median, and keep the figures with the test's report."""
    median = statistics.median(times)
    record(name, [round(taken, 3) for taken in times])
    print(f"{name}: median {median:.3f} s of {[round(taken, 3) for taken in times]}")
    return median


def test_the_server_offers_the_spec_and_serves_its_logo(server: Server) -> None:
    told = server.ask("GET", "/api/kernelspecs")["kernelspecs"]
    spec = told["hermes"]
    assert spec["spec"]["display_name"] == "Hermes (Python 3)"
    assert spec["spec"]["language"] == "python"
    assert spec["spec"]["metadata"]["kernel_provisioner"]["provisioner_name"] == "hermes-provisioner"
    assert set(spec["resources"]) == {"logo-svg"}
    status, kind, logo = server.raw("GET", spec["resources"]["logo-svg"])
    assert (status, kind) == (200, "image/svg+xml")
    assert logo.startswith(b"<svg")


def test_the_cells_run_in_the_interpreter_that_installed_the_spec(kernel: Kernel) -> None:
    assert kernel.run("import sys; sys.executable").value == repr(sys.executable)
    assert kernel.run("6 * 7").value == "42"


ENVIRONMENT = """\
import os, subprocess, sys
print(dict(os.environ))
print(subprocess.run([sys.executable, '-c', 'import os; print(dict(os.environ))'],
                     capture_output=True, text=True).stdout)
"""


def test_neither_a_cell_nor_its_child_sees_the_servers_secrets(server: Server, kernel: Kernel) -> None:
    assert all(psutil.Process(server.process.pid).environ()[name] == SECRETS[name] for name in SECRETS)
    shown = kernel.run(ENVIRONMENT).stdout
    assert shown.count("HERMES_KERNEL_COOKIE") == 2
    assert not any(secret in shown for secret in HELD)
    assert not any(name in shown for name in SECRETS)
    assert not any(secret in str(kernel.process.environ()) for secret in HELD)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_secret_that_the_specs_env_names_is_not_filled_in(server: Server) -> None:
    with server.kernel("leaky") as kernel:
        shown = kernel.run(ENVIRONMENT).stdout
        assert not any(secret in shown for secret in HELD)
        assert kernel.run("os.environ.get('LC_PLAIN'), os.environ.get('X')").value == "('kept', None)"
        kernel.restart()
        kernel.reconnect()
        assert not any(secret in kernel.run(ENVIRONMENT).stdout for secret in HELD)


@pytest.mark.parametrize("leave", ["sys.exit(3)", "raise SystemExit('done')"])
def test_system_exit_is_shown_and_the_kernel_lives(leave: str, kernel: Kernel) -> None:
    kernel.run("import sys; kept = 'state'")
    assert kernel.run(leave).ended_with == "SystemExit"
    assert kernel.run("kept").value == "'state'"
    assert kernel.process.is_running()


@pytest.mark.parametrize("leave", ["exit()", "quit()"])
def test_exit_asks_the_front_end_and_ends_the_kernel_which_the_server_replaces(
    leave: str, server: Server, kernel: Kernel
) -> None:
    """What ipykernel does: a reply of `ok` whose payload lets a console leave, then the kernel goes."""
    kernel.run("kept = 'state'")
    answer = kernel.run(leave)
    assert answer.ended_with == "ok"
    assert answer.reply["payload"] == [{"source": "ask_exit", "keepkernel": False}]
    assert traces.eventually(lambda: traces.is_gone(kernel.process))
    assert traces.eventually(lambda: traces_of(server.runtime, kernel.id), within=START_WAIT)
    kernel.reconnect()
    assert kernel.run("'kept' in globals()").value == "False"


def test_a_sleeping_cell_is_interrupted(kernel: Kernel) -> None:
    cell = kernel.begin("import time; kept = 1; print('begun', flush=True); time.sleep(60)")
    kernel.until_printed(cell, "begun")
    kernel.interrupt()
    assert kernel.answer(cell).ended_with == "KeyboardInterrupt"
    assert kernel.run("kept").value == "1"


def test_an_awaiting_cell_is_interrupted(kernel: Kernel) -> None:
    cell = kernel.begin("import asyncio; kept = 1; print('begun', flush=True); await asyncio.sleep(60)")
    kernel.until_printed(cell, "begun")
    began = time.perf_counter()
    kernel.interrupt()
    assert kernel.answer(cell).ended_with == "CancelledError"  # the name that ipykernel has for it
    assert time.perf_counter() - began < QUICK
    assert kernel.run("kept").value == "1"


CHILD = "import subprocess; subprocess.Popen(['sleep', '600']).pid"


def test_delete_ends_the_kernel_and_its_children(server: Server, kernel: Kernel) -> None:
    child = psutil.Process(int(kernel.run(CHILD).value or 0))
    kernel.delete()
    assert traces.eventually(lambda: traces.is_gone(child) and traces.is_gone(kernel.process))
    assert traces.kernels_of(server.runtime) == []


def test_restart_ends_the_children_and_the_state(kernel: Kernel) -> None:
    child = psutil.Process(int(kernel.run(CHILD).value or 0))
    kernel.restart()
    kernel.reconnect()
    assert kernel.run("'subprocess' in globals()").value == "False"
    assert traces.eventually(lambda: traces.is_gone(child) and traces.is_gone(kernel.process))


@pytest.mark.usefixtures("leaves_nothing")
def test_delete_of_an_idle_kernel_is_quick(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    times = []
    for _ in range(ROUNDS):
        with server.kernel() as kernel:
            kernel.run("1")
            times.append(seconds(kernel.delete))
    assert measured("delete", times, record_property) < QUICK


def test_delete_of_a_busy_kernel_is_not_waited_for_long(server: Server, kernel: Kernel) -> None:
    cell = kernel.begin("import time; print('begun', flush=True); time.sleep(60)")
    kernel.until_printed(cell, "begun")
    assert seconds(kernel.delete) < 3 * QUICK
    assert traces.eventually(lambda: traces.is_gone(kernel.process))


def test_restart_of_an_idle_kernel_is_quick(
    kernel: Kernel, record_property: Callable[[str, object], None]
) -> None:
    answered, usable = [], []
    kernel.run("1")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        kernel.restart()
        answered.append(time.perf_counter() - began)
        kernel.reconnect()
        kernel.run("1")
        usable.append(time.perf_counter() - began)
    measured("restart, up to the first cell's end", usable, record_property)
    assert measured("restart", answered, record_property) < QUICK


@pytest.mark.usefixtures("leaves_nothing")
def test_a_server_that_is_asked_to_end_leaves_nothing(tmp_path: Path, own_runtime: Path) -> None:
    with jupyter_server(tmp_path, own_runtime) as server, closing(Kernel(server, "hermes")) as kernel:
        child = psutil.Process(int(kernel.run(CHILD).value or 0))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(STOP_WAIT)
        assert traces.eventually(lambda: traces.is_gone(kernel.process) and traces.is_gone(child))
        assert traces_of(own_runtime) == []
        assert traces.kernels_of(own_runtime) == []


@pytest.mark.parametrize(
    "cell",
    ["1", "import time; print('begun', flush=True); time.sleep(60)"],
    ids=["idle", "busy"],
)
def test_a_kernel_ends_with_a_server_that_is_killed(cell: str, tmp_path: Path, own_runtime: Path) -> None:
    with jupyter_server(tmp_path, own_runtime) as server, closing(Kernel(server, "hermes")) as kernel:
        if cell == "1":
            kernel.run(cell)
        else:
            kernel.until_printed(kernel.begin(cell), "begun")
        server.process.kill()
        server.process.wait()
        assert traces.eventually(lambda: traces.is_gone(kernel.process), within=POLLER_WAIT)
