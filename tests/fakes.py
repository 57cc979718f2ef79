"""A kernel that is a script, over real sockets, and a launcher whose kernels are such scripts."""

import asyncio
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session

from hermes_kernel.process.launch import (
    Ended,
    Interpreter,
    KernelExit,
    KernelHandle,
    Launched,
    LaunchSpec,
)

PORTS = {f"{channel}_port": n for n, channel in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}


class FakeKernel:
    """Answers kernel_info by itself and leaves every execute_request to *script*, on a thread of its own.

    ``script(kernel, request)`` may use ``busy``, ``idle``, ``reply``, ``stream`` and ``send``, or ``die``.
    """

    def __init__(self, info: dict[str, Any], script: "Script", ended: Callable[[int], None]) -> None:
        self._info = info
        self._script = script
        self._ended = ended
        self.session = Session(key=info["key"].encode())
        self.cells: list[str] = []
        self.last_cell = ""
        self.interrupted = threading.Event()
        self._stop = threading.Event()
        self._exit_code = 0
        self.thread = threading.Thread(target=self._run, name="fake-kernel", daemon=True)
        self.thread.start()

    def busy(self, request: dict[str, Any]) -> None:
        self.iopub("status", {"execution_state": "busy"}, request)

    def idle(self, request: dict[str, Any]) -> None:
        self.iopub("status", {"execution_state": "idle"}, request)

    def stream(self, request: dict[str, Any], text: str, name: str = "stdout", **metadata: Any) -> None:
        self.iopub("stream", {"name": name, "text": text}, request, metadata)

    def iopub(
        self, kind: str, content: Any, parent: dict[str, Any] | None, metadata: dict[str, Any] | None = None
    ) -> None:
        self.session.send(self._sockets["iopub"], kind, content, parent=parent, metadata=metadata)

    def reply(self, request: dict[str, Any], content: Any = None, **metadata: Any) -> None:
        content = {"status": "ok", "execution_count": 1} if content is None else content
        self.session.send(
            self._sockets["shell"],
            "execute_reply",
            content,
            parent=request,
            ident=request["idents"],
            metadata=metadata,
        )

    def signed(self, channel: str, request: dict[str, Any], kind: Any, content: Any) -> None:
        """Send a message whose signature is right, whatever its header and content are."""
        header = {**self.session.msg_header("x"), "msg_type": kind}
        parent = request["header"]
        parts = [json.dumps(part, default=str).encode() for part in (header, parent, {}, content)]
        self.raw(channel, request, b"<IDS|MSG>", self.session.sign(parts), *parts)

    def raw(self, channel: str, request: dict[str, Any], *frames: bytes) -> None:
        """Send frames that are no message."""
        prefix = list(request["idents"]) if channel == "shell" else []
        self._sockets[channel].send_multipart([*prefix, *frames])

    def good(self, request: dict[str, Any]) -> None:
        """What an ordinary kernel says of a cell that shows nothing."""
        self.busy(request)
        self.reply(request)
        self.idle(request)

    def die(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._stop.set()

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        self._sockets = {"shell": context.socket(zmq.ROUTER), "iopub": context.socket(zmq.XPUB)}
        self._sockets["control"] = context.socket(zmq.ROUTER)
        try:
            for channel, socket in self._sockets.items():
                socket.linger = 0
                socket.bind(f"ipc://{self._info['ip']}-{PORTS[f'{channel}_port']}")
            self._serve(self._sockets["shell"])
        finally:
            context.destroy(linger=200)
            self._ended(self._exit_code)

    def _serve(self, shell: "zmq.Socket[bytes]") -> None:
        while not self._stop.is_set():
            if not shell.poll(5):
                continue
            idents, parts = self.session.feed_identities(shell.recv_multipart())
            request = {**self.session.deserialize(parts), "idents": idents}
            if request["msg_type"] == "kernel_info_request":
                self.busy(request)
                self.session.send(shell, "kernel_info_reply", {"status": "ok"}, parent=request, ident=idents)
                self.idle(request)
            elif request["msg_type"] == "execute_request":
                self.cells.append(request["content"]["code"])
                self.last_cell = request["header"]["msg_id"]
                self._script(self, request)


Script = Callable[[FakeKernel, dict[str, Any]], None]


@dataclass
class FakeLauncher:
    """Launches FakeKernels that follow *script*."""

    script: Script
    kernels: list[FakeKernel] = field(default_factory=list)
    _exits: "dict[KernelHandle, asyncio.Future[KernelExit]]" = field(default_factory=dict)
    _places: dict[KernelHandle, tuple[FakeKernel, Path]] = field(default_factory=dict)

    spares = 0

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        return Interpreter(python, sys.version_info[:2], "7.3.0")

    async def launch(self, spec: LaunchSpec) -> Launched:
        loop = asyncio.get_running_loop()
        handle = KernelHandle("fake", spec.kernel_id, len(self._exits))
        place = Path(tempfile.mkdtemp(prefix="hk-fake-"))
        info = {
            "transport": "ipc",
            "ip": str(place / "k"),
            "key": spec.session_key,
            "signature_scheme": "hmac-sha256",
            **PORTS,
        }
        exit_: asyncio.Future[KernelExit] = loop.create_future()
        self._exits[handle] = exit_

        def ended(code: int) -> None:
            loop.call_soon_threadsafe(_settle, exit_, KernelExit(code, last_cell=kernel.last_cell))

        kernel = FakeKernel(info, self.script, ended)
        self.kernels.append(kernel)
        self._places[handle] = kernel, place
        return Launched(handle, 4_000_000, ("fake",), info, str(place / "connection.json"))

    async def ended(self, handle: KernelHandle) -> KernelExit:
        return await asyncio.shield(self._exits[handle])

    def exit_of(self, handle: KernelHandle) -> KernelExit | None:
        exit_ = self._exits[handle]
        return exit_.result() if exit_.done() else None

    async def signal(self, handle: KernelHandle, signum: int) -> None:
        self._places[handle][0].interrupted.set()

    async def end(self, handle: KernelHandle, *, timeout: float) -> Ended:
        kernel, place = self._places[handle]
        await asyncio.to_thread(kernel.stop)
        await self.ended(handle)
        shutil.rmtree(place, ignore_errors=True)
        return Ended.CLEAN

    async def sweep(self) -> None:
        """Nothing of it outlives a test."""

    async def close(self) -> None:
        for handle in self._places:
            await self.end(handle, timeout=5)


def _settle(exit_: "asyncio.Future[KernelExit]", how: KernelExit) -> None:
    if not exit_.done():
        exit_.set_result(how)
