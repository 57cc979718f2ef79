"""The host's end of the connection to a warden, which is all that the host has of a process tree."""

import asyncio
import base64
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from .launch import Ended
from .tree import IsolationRefusedError, TreeExit, TreeSpec

MAX_LINE = 8 * 1024 * 1024  # bytes; two pipes full of output, and their base64
WARDEN_KILL_WAIT = 1.0  # seconds for a killed warden to be gone

_log = logging.getLogger(__name__)


class WardenGoneError(OSError):
    """There was no warden, or it ended before there was a kernel."""


class WardenedTree:
    """A process tree that a warden ends, see ``hermes_kernel.sidecar.warden``.

    It lives on the event loop that made it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.pid = self.warden = 0
        self.how = "spawn"
        self.note: str | None = None
        self.greets = False
        self._connection = connection
        self._received = b""
        self._warden_watch: int | None = None
        self._loop = asyncio.get_running_loop()
        self._prepared: asyncio.Future[None] = self._loop.create_future()
        self._bound: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[TreeExit] = self._loop.create_future()
        self._gone: asyncio.Future[Ended] = self._loop.create_future()
        self._loop.add_reader(connection, self._receive)

    def on_gone(self, callback: Callable[[], object]) -> None:
        """Have *callback* called on the loop when the tree is gone, or its warden."""
        self._gone.add_done_callback(lambda _: callback())

    @property
    def has_answer(self) -> bool:
        """Whether it is known that the kernel's process has been forked, or why it is not."""
        return self._prepared.done()

    @property
    def is_gone(self) -> bool:
        """Whether the tree is gone, or its warden."""
        return self._gone.done()

    async def prepare(self, terms: Mapping[str, Any], remains: tuple[str, ...]) -> None:
        """Ask for a kernel, which waits for its start. Raises WardenGoneError."""
        await self._say({"prepare": dict(terms), "remains": remains})

    async def prepared(self) -> None:
        """Wait until the kernel's process is there. Raises OSError, WardenGoneError."""
        await asyncio.shield(self._prepared)

    async def bound(self) -> None:
        """Wait until the kernel has its sockets and waits for its start. Raises OSError, WardenGoneError."""
        await self.prepared()
        await asyncio.shield(self._bound)

    async def start(self, spec: TreeSpec, lease: int) -> None:
        """Say what the kernel is to be, hand the lease to the warden, and wait until the process is there.

        Raises OSError, WardenGoneError.
        """
        start = asdict(spec)
        remains = start.pop("remains")
        await self._say({"start": start, "remains": remains}, lease)
        await self.prepared()

    async def ended(self) -> TreeExit:
        """Wait until the first process is gone and say how it ended."""
        return await asyncio.shield(self._ended)

    async def gone(self) -> Ended:
        """Wait until the tree is gone, or its warden; UNKNOWN if that was killed."""
        return await asyncio.shield(self._gone)

    def signal(self, signum: int) -> None:
        """Send a signal to the first process and its group."""
        if not self._ended.done():
            self._say_now({"signal": signum})

    def abandon(self) -> None:
        """Expect no warden any more: what should have forked it is gone."""
        if not self._prepared.done():
            self._close()

    async def end(self, *, timeout: float) -> Ended:
        """Kill the whole tree; a warden that does not answer is killed, and its kernel with it."""
        self.abandon()  # if there will be a warden, it finds that nobody wants it
        if not self._gone.done():
            self._say_now({"end": True})
            self._signal_warden(signal.SIGCONT)  # a cell may have stopped it
        if await self._is_gone_within(timeout):
            return self._gone.result()
        _log.warning("warden %d does not answer: it is killed", self.warden)
        self._signal_warden(signal.SIGKILL)
        if not await self._is_gone_within(WARDEN_KILL_WAIT):
            self._close()
        return Ended.UNKNOWN

    async def _is_gone_within(self, seconds: float) -> bool:
        await asyncio.wait({self._gone}, timeout=seconds)
        return self._gone.done()

    async def _say(self, line: dict[str, Any], *descriptors: int) -> None:
        data = json.dumps(line).encode() + b"\n"
        try:
            if descriptors:
                sent = socket.send_fds(self._connection, [data[:1]], descriptors)
                data = data[sent:]
            await self._loop.sock_sendall(self._connection, data)
        except ConnectionError as error:
            raise WardenGoneError(error.errno, "the warden is gone") from error

    def _say_now(self, line: dict[str, Any]) -> None:
        try:
            self._connection.send(json.dumps(line).encode() + b"\n")
        except OSError as error:  # it is gone, which we shall be told, or does not read: it will be killed
            _log.info("warden %d was not told %s: %s", self.warden, line, error)

    def _receive(self) -> None:
        try:
            data = self._connection.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            for line in lines:
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError):
            _log.exception("warden %d says what no warden says", self.warden)
            data = b""
        if not data or len(self._received) > MAX_LINE:
            self._close()

    def _take(self, message: dict[str, Any]) -> None:
        if "kernel" in message:
            self.pid, self.warden = int(message["kernel"]), int(message["warden"])
            self.how, self.note, self.greets = str(message["how"]), message["note"], bool(message["greets"])
            self._warden_watch = _watch(self.warden)
            if not self._prepared.done():
                self._prepared.set_result(None)
        elif "bound" in message:
            if not self._bound.done():
                self._bound.set_result(None)
        elif "refused" in message:
            if not self._prepared.done():
                kind = IsolationRefusedError if message["isolation"] else OSError
                self._prepared.set_exception(kind(message["errno"], str(message["refused"])))
                self._prepared.exception()
        elif "exited" in message:
            self._exit(
                int(message["code"]),
                base64.b64decode(message["early"]),
                [base64.b64decode(left) for left in message["left"]],
            )
        elif "ended" in message and not self._gone.done():
            self._gone.set_result(Ended.CLEAN if message["ended"] else Ended.NOT_CLEAN)

    def _exit(self, code: int, early: bytes = b"", left: list[bytes] | None = None) -> None:
        if not self._ended.done():
            name = _signal_name(-code) if code < 0 else None
            out, err = left or (b"", b"")
            self._ended.set_result(TreeExit(code, name, early, (out, err)))

    def _close(self) -> None:
        """There is no warden any more: its kernel has ended with it."""
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection)
        end_connection(self._connection)
        if self._warden_watch is not None:
            os.close(self._warden_watch)
            self._warden_watch = None
        if not self._prepared.done():
            self._prepared.set_exception(WardenGoneError("the warden ended before there was a kernel"))
            self._prepared.exception()  # looked at: whoever waits has it, and there may be nobody
        if not self._bound.done():
            self._bound.set_exception(WardenGoneError("the kernel ended before its start"))
            self._bound.exception()
        self._exit(-signal.SIGKILL)
        if not self._gone.done():
            self._gone.set_result(Ended.UNKNOWN)

    def _signal_warden(self, signum: int) -> None:
        """Signal the warden itself, which is there as long as the connection is."""
        if self._gone.done() or not self.warden:
            return
        try:
            if self._warden_watch is not None:
                signal.pidfd_send_signal(self._warden_watch, signum)
            else:
                os.kill(self.warden, signum)
        except ProcessLookupError:  # it has just ended
            pass


def end_connection(connection: socket.socket) -> None:
    """Close a connection for both ends, whoever else has a descriptor of ours."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # the other end has closed it
        _log.debug("a connection has ended: %s", error)
    connection.close()


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, not allowed, or it has ended
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"SIG{number}"
