"""A kernel that is a script, over real sockets, and a launcher whose kernels are such scripts."""

import asyncio
import json
import select
import shutil
import socket
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
KINDS = {"shell": zmq.ROUTER, "iopub": zmq.XPUB, "stdin": zmq.ROUTER, "control": zmq.ROUTER}
DELIMITER = b"<IDS|MSG>"
PEER_WAIT = 10.0  # seconds for the host to connect, and for a part of a frame of its own


class FakeKernel:
    """Answers kernel_info by itself and leaves every execute_request to *script*, on a thread of its own.

    ``script(kernel, request)`` may use ``busy``, ``idle``, ``reply``, ``stream`` and ``send``, or ``die``.
    The channels of *by_hand* are no sockets of ZeroMQ's: the script may write any bytes there.
    """

    def __init__(
        self,
        info: dict[str, Any],
        script: "Script",
        ended: Callable[[int], None],
        by_hand: frozenset[str] = frozenset(),
    ) -> None:
        self._info = info
        self._by_hand = by_hand
        self._script = script
        self._ended = ended
        # Without a copy, sending would leave a thread of pyzmq's behind.
        self.session = Session(key=info["key"].encode(), copy_threshold=sys.maxsize)
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

    def signed(self, channel: str, request: dict[str, Any], kind: Any, content: Any, **parts: Any) -> None:
        """Send a message whose signature is right, whatever its header and content are."""
        self.raw(channel, request, *self.frames(request, kind, content, **parts))

    def frames(self, request: dict[str, Any], kind: Any, content: Any, **parts: Any) -> list[bytes]:
        """Return a message whose signature is right; *parts* replace its own, bytes as they stand."""
        header = {**self.session.msg_header("x"), "msg_type": kind}
        whole = {"header": header, "parent": request["header"], "metadata": {}, "content": content} | parts
        packed = [p if isinstance(p, bytes) else json.dumps(p, default=str).encode() for p in whole.values()]
        return [DELIMITER, self.session.sign(packed), *packed]

    def raw(self, channel: str, request: dict[str, Any], *frames: bytes) -> None:
        """Send frames that are no message."""
        prefix = [] if channel == "iopub" else list(request["idents"])
        self._sockets[channel].send_multipart([*prefix, *frames])

    def receive(self, channel: str) -> dict[str, Any]:
        """Wait for a request on a channel that is not served."""
        assert self._sockets[channel].poll(int(PEER_WAIT * 1000))
        idents, parts = self.session.feed_identities(self._sockets[channel].recv_multipart())
        return {**self.session.deserialize(parts), "idents": idents}

    def write(self, channel: str, data: bytes) -> None:
        """Write bytes to a channel that is served by hand."""
        self._sockets[channel].write(data)

    def hang_up(self, channel: str) -> None:
        """Close a channel that is served by hand."""
        self._sockets[channel].close()

    def wait_for_hang_up(self, channel: str) -> None:
        """Wait until the host has closed a channel that is served by hand."""
        self._sockets[channel].read_to_end()

    def stop_reading(self) -> None:
        """Do nothing any more until the kernel is ended."""
        self._stop.wait()

    def good(self, request: dict[str, Any]) -> None:
        """What an ordinary kernel says of a cell that shows nothing."""
        self.busy(request)
        self.reply(request)
        self.idle(request)

    def die(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._stop.set()

    def leave(self, exit_code: int) -> None:
        """Let the process end before its channels, which hold what it has sent, are read to their ends."""
        self._exit_code = exit_code
        self._ended(exit_code)

    def stop(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        self._sockets: dict[str, Any] = {}
        try:
            for channel, kind in KINDS.items():
                path = f"{self._info['ip']}-{PORTS[f'{channel}_port']}"
                if channel in self._by_hand:
                    self._sockets[channel] = HandMadeSocket(path, kind)
                else:
                    self._sockets[channel] = context.socket(kind)
                    self._sockets[channel].linger = 0
                    self._sockets[channel].bind(f"ipc://{path}")
            for channel in self._by_hand:
                self._sockets[channel].accept()
            self._serve(self._sockets["shell"])
        finally:
            for channel in self._by_hand & self._sockets.keys():
                self._sockets[channel].close()
            context.destroy(linger=200)
            self._ended(self._exit_code)

    def _serve(self, shell: Any) -> None:
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


class HandMadeSocket:
    """The kernel's end of a channel in ZMTP 3.0 written out, so that it may stop within a frame.

    It has one peer, and the methods of a ZeroMQ socket that FakeKernel uses.
    """

    MORE, LONG, COMMAND = 1, 2, 4
    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

    def __init__(self, path: str, kind: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(PEER_WAIT)
        self._peer = self._listener
        self._type = zmq.SocketType(kind).name.encode()

    def accept(self) -> None:
        """Take the peer's connection and shake hands."""
        self._peer, _ = self._listener.accept()
        self._peer.settimeout(PEER_WAIT)
        ready = b"\x05READY\x0bSocket-Type" + len(self._type).to_bytes(4, "big") + self._type
        self.write(self.GREETING + self.header(len(ready), self.COMMAND) + ready)
        self._read(len(self.GREETING))

    @classmethod
    def header(cls, size: int, flags: int = 0) -> bytes:
        """Return what stands before a frame of *size* bytes."""
        if size < 256:
            return bytes([flags, size])
        return bytes([flags | cls.LONG]) + size.to_bytes(8, "big")

    def write(self, data: bytes) -> None:
        try:
            self._peer.sendall(data)
        except ConnectionError:
            pass  # as with a socket of ZeroMQ's that has no peer: it is dropped

    def send_multipart(self, frames: list[bytes], **_: Any) -> None:
        for number, frame in enumerate(frames, 1):
            self.write(self.header(len(frame), self.MORE if number < len(frames) else 0) + frame)

    def poll(self, milliseconds: int) -> bool:
        wait = milliseconds / 1000
        if not select.select([self._peer], [], [], wait)[0]:
            return False
        if self._peer.recv(1, socket.MSG_PEEK):
            return True
        select.select([], [], [], wait)  # the peer is gone, and nothing more comes
        return False

    def recv_multipart(self) -> list[bytes]:
        frames: list[bytes] = []
        while True:
            flags, *_ = self._read(1)
            frame = self._read(int.from_bytes(self._read(8 if flags & self.LONG else 1), "big"))
            if not flags & self.COMMAND:
                frames.append(frame)
                if not flags & self.MORE:
                    return frames

    def read_to_end(self) -> None:
        while self._peer.recv(65536):
            pass

    def close(self) -> None:
        self._peer.close()
        self._listener.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := self._peer.recv(size - len(data))):
                raise ConnectionError("the host has hung up")
            data += more
        return data


@dataclass
class FakeLauncher:
    """Launches FakeKernels that follow *script*, the first of them with channels *by_hand*."""

    script: Script
    by_hand: frozenset[str] = frozenset()
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

        by_hand = frozenset() if self.kernels else self.by_hand
        kernel = FakeKernel(info, self.script, ended, by_hand)
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


def only_first(misbehave: Script, then: Script) -> Script:
    """Misbehave in the first cell; every later one is an ordinary one."""
    begun: list[int] = []

    def script(kernel: FakeKernel, request: dict[str, Any]) -> None:
        if begun:
            then(kernel, request)
        else:
            begun.append(1)
            misbehave(kernel, request)

    return script
