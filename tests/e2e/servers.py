"""A real jupyter_server, and what a front end does with its kernels: REST and a websocket."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import websocket

from .. import traces
from ..cli.command import COMMAND

START_WAIT = 30.0
STOP_WAIT = 10.0
ANSWER_WAIT = 30.0

SECRETS = {"OPENAI_API_KEY": "sk-hold0123456789abcdefghij", "SECRET_TOKEN": "s3cr3t-of-the-host-0123"}


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


class FrontEnd:
    """The websocket of one front end to a kernel that the server knows, and what it can ask for."""

    def __init__(self, server: "Server", kernel_id: str) -> None:
        self._server = server
        self.id = kernel_id
        self._channels = f"/api/kernels/{kernel_id}/channels"
        self._socket = server.connect(self._channels)

    def send(self, channel: str, message_type: str, content: Mapping[str, Any]) -> str:
        """Send a request; return its message's id."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": message_type,
            "session": "test",
            "username": "test",
            "date": datetime.now(UTC).isoformat(),
            "version": "5.3",
        }
        message = {
            "channel": channel,
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
        }
        self._socket.send(json.dumps(message))
        return header["msg_id"]

    def begin(self, code: str) -> str:
        """Send a cell; return its message's id."""
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        return self.send("shell", "execute_request", content)

    def until(self, cell: str, said: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Read messages up to the one of *cell* for which *said* holds; return those of the cell."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + ANSWER_WAIT
        while True:
            message = self._read(deadline)
            if message["parent_header"].get("msg_id") == cell:
                found.append(message)
                if said(message):
                    return found

    def _read(self, deadline: float) -> dict[str, Any]:
        self._socket.settimeout(max(0.01, deadline - time.monotonic()))
        message: dict[str, Any] = json.loads(self._socket.recv())
        return message

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

    def ask(self, message_type: str, **content: Any) -> dict[str, Any]:
        """Send a control request and return the content of its reply."""
        request = self.send("control", message_type, content)
        messages = self.until(request, lambda message: message["channel"] == "control")
        answer: dict[str, Any] = messages[-1]["content"]
        return answer

    def until_any(self, said: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Read messages of anybody's cells up to the one for which *said* holds."""
        found: list[dict[str, Any]] = []
        while not found or not said(found[-1]):
            found.append(self._read(time.monotonic() + ANSWER_WAIT))
        return found

    def interrupt_status(self) -> int:
        """Ask for an interrupt over REST; return how that went."""
        return self._server.status("POST", f"/api/kernels/{self.id}/interrupt")

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


class Kernel(FrontEnd):
    """A kernel that the server has started, and the websocket of one front end to it."""

    def __init__(self, server: "Server", spec: str) -> None:
        super().__init__(server, server.ask("POST", "/api/kernels", {"name": spec})["id"])
        (self.process,) = traces_of(server.runtime, self.id)


@dataclass
class Server:
    """A jupyter_server process of the test's own."""

    process: "subprocess.Popen[bytes]"
    url: str
    token: str
    runtime: Path
    root: Path
    temporary: Path

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

    def status(self, method: str, path: str, body: object = None) -> int:
        """Ask, and return how it went alone."""
        try:
            return self.raw(method, path, body)[0]
        except urllib.error.HTTPError as error:
            with error:
                return error.code

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
def jupyter_server(home: Path, runtime: Path, *, shows: Path | None = None) -> Iterator[Server]:
    """Run a server whose every directory lies below *home*, its kernels' below *runtime*.

    ``shows``: its runtime directory of Jupyter's, if that is to be another one; then it lets people into the
    kernels that others have left there.
    """
    root, share = home / "root", home / "prefix" / "share" / "jupyter"
    for directory in (root, home / "prefix", home / "tmp"):
        directory.mkdir(parents=True)
    env = {
        **os.environ,
        **SECRETS,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "XDG_RUNTIME_DIR": str(runtime),
        "JUPYTER_PATH": str(share),
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(shows or home / "jupyter"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    install = [*COMMAND, "spec", "install", "--prefix", str(home / "prefix")]
    for arguments in ([], ["--name", "leaky"], ["--live"]):
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
        "ServerApp.allow_external_kernels": shows is not None,
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
        info = (shows or home / "jupyter") / f"jpserver-{process.pid}.json"
        server = Server(process, "", token, runtime, root, home / "tmp")

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
