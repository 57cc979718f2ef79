"""The kernel's end of the tool bridge: connections to the host, one for each call that is under way."""

import asyncio
import concurrent.futures
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import wire
from ..errors import ToolBudgetExceeded, ToolError
from ..wire import (
    HALF_FRAME_TIMEOUT,
    Failure,
    FrameDecoder,
    Hello,
    ToolCall,
    ToolReply,
    WireError,
    send_timeout,
)
from .context import CELL, Cell

MAX_CONNECTIONS = 32  # calls of this process that are under way at once; others wait for their turn
READ_SIZE = 64 * 1024
CONNECT_AGAIN = 0.02  # seconds
FRESH = 0.5  # seconds after a call in which the host keeps the connection
_PEEK = getattr(socket, "MSG_DONTWAIT", 0)  # Windows has none
NO_CELL = (
    "this code belongs to no cell that has tools: it is another client's cell, or runs in a thread that was "
    "not started with threading.Thread or ThreadPoolExecutor.submit in a cell. Call the tool in a cell of "
    "the agent's, or start the thread there."
)
LOST = "the connection to the host was lost before the tool answered; it may have run: "


class ToolClient:
    """Calls tools for the code of cells, from any thread, task and forked child.

    A call has a connection to itself while it is under way, and the next one takes it over.
    """

    def __init__(self) -> None:
        self._token = ""
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def bind(self, token: str) -> None:
        """Take the token that proves to the host that a connection comes from this kernel."""
        self._token = token

    @property
    def under_way(self) -> int:
        """How many calls have a connection, or the right to open one."""
        return len(self._leases)

    def call(self, name: str, arguments: dict[str, Any], place: Sequence[Any] = ()) -> Any:
        """Call a tool and return its result; raises ToolError or one of its kinds."""
        cell = _cell()
        request = _request(ToolCall(next(self._ids), cell.token, name, arguments, place))
        lease = _Lease()
        try:
            self._lend(lease, blocking=True)
            if lease.turn is not None:
                lease.connection = lease.turn.result()
            if lease.connection is None:
                lease.connection = self._opened(cell.endpoint)
                lease.connection.greet(self._token)
            reply = lease.connection.ask(request)
            lease.is_clean = not reply.closes
        except _NotSent as error:
            raise ToolError(f"the host cannot be reached for tools: {error}") from None
        except (OSError, WireError) as error:
            if not _is_of_this_file(error):  # a signal handler of the cell's has raised it
                raise
            raise ToolError(f"{LOST}{error}") from None
        finally:
            self._leases.discard(lease)  # here, where no interrupt can come before it
            self._take_back(lease)
        return _value(reply)

    async def acall(self, name: str, arguments: dict[str, Any], place: Sequence[Any] = ()) -> Any:
        """Call a tool without blocking the event loop; a task that is cancelled drops the call."""
        cell = _cell()
        request = _request(ToolCall(next(self._ids), cell.token, name, arguments, place))
        lease = _Lease()
        try:
            self._lend(lease, blocking=False)
            if lease.turn is not None:
                lease.connection = await asyncio.wrap_future(lease.turn)
            if lease.connection is None:
                lease.connection = self._opened(cell.endpoint)
                await lease.connection.agreet(self._token)
            reply = await lease.connection.aask(request)
            lease.is_clean = not reply.closes
        except _NotSent as error:
            raise ToolError(f"the host cannot be reached for tools: {error}") from None
        except (OSError, WireError) as error:
            raise ToolError(f"{LOST}{error}") from None
        finally:
            self._leases.discard(lease)  # here, where no interrupt can come before it
            self._take_back(lease)
        return _value(reply)

    def _lend(self, lease: "_Lease", *, blocking: bool) -> None:
        """Give the call a connection that is free, else leave to open one, else a turn to wait for."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open(time.monotonic()):
                    lease.connection = connection
                    self._leases.add(lease)
                    return
                self._forget(connection)
            # A call that blocks an event loop must not wait for what that loop's tasks hold.
            if len(self._leases) >= MAX_CONNECTIONS and not (blocking and _in_event_loop()):
                lease.turn = concurrent.futures.Future()
                self._waiting.append(lease)
            else:
                self._leases.add(lease)

    def _take_back(self, lease: "_Lease") -> None:
        """The call is over, however it ended: what it held goes to who has waited longest."""
        with self._lock:
            if (turn := lease.turn) is not None and not turn.cancel() and lease.connection is None:
                lease.connection = turn.result()  # it had just come
            connection = lease.connection
            if connection is not None and not lease.is_clean:
                self._forget(connection)
                connection = None
            while self._waiting and len(self._leases) < MAX_CONNECTIONS:
                waiting = self._waiting.popleft()
                if waiting.turn is not None and waiting.turn.set_running_or_notify_cancel():
                    self._leases.add(waiting)
                    waiting.turn.set_result(connection)
                    connection = None  # who comes next may open one
            if connection is not None:
                self._idle.append(connection)

    def _opened(self, endpoint: Mapping[str, Any]) -> "_Connection":
        connection = _Connection(endpoint)
        with self._lock:
            self._open.add(connection)
        return connection

    def _forget(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        connection.close()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a task that is collected gives back whenever that happens
        self._ids = itertools.count(1)
        self._leases: set[_Lease] = set()
        self._waiting: deque[_Lease] = deque()
        self._idle: list[_Connection] = []
        self._open: weakref.WeakSet[_Connection] = weakref.WeakSet()

    def _after_fork(self) -> None:
        """In a forked child: the connections are the parent's."""
        for connection in self._open:
            connection.close()
        self._reset()


class _Lease:
    """What one call holds: a connection, the right to open one, or a turn to wait for."""

    __slots__ = ("connection", "is_clean", "turn")

    def __init__(self) -> None:
        self.connection: _Connection | None = None
        self.turn: concurrent.futures.Future[_Connection | None] | None = None
        self.is_clean = False  # whether the next call may use the connection


class _NotSent(Exception):
    """There is no connection, so nothing was sent on it."""


class _Connection:
    """One connection, with at most one call under way."""

    def __init__(self, endpoint: Mapping[str, Any]) -> None:
        self._endpoint = endpoint
        self._socket = _socket(endpoint)
        self._decoder = FrameDecoder()
        self._used_at = time.monotonic()

    def greet(self, token: str) -> None:
        """Connect, and show the kernel's token; raises _NotSent."""
        try:
            # Not settimeout: without blocking, a unix socket does not wait for room in the host's backlog.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout(HALF_FRAME_TIMEOUT))
            self._socket.connect(_address(self._endpoint))
            self._socket.settimeout(HALF_FRAME_TIMEOUT)
            try:
                self._socket.sendall(Hello(token).encode())
            except (BrokenPipeError, ConnectionResetError):
                pass  # the host has hung up, and has said why
            _check_greeting(self._receive())
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout(0))
        except (OSError, WireError) as error:
            raise _NotSent(error) from None

    async def agreet(self, token: str) -> None:
        """Connect, and show the kernel's token, without blocking the event loop; raises _NotSent."""
        try:
            await asyncio.wait_for(self._agreet(token), HALF_FRAME_TIMEOUT)
        except asyncio.TimeoutError:
            raise _NotSent("timed out") from None
        except (OSError, WireError) as error:
            raise _NotSent(error) from None
        self._socket.setblocking(True)

    async def _agreet(self, token: str) -> None:
        await self._aconnect()
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, Hello(token).encode())
        except (BrokenPipeError, ConnectionResetError):
            pass  # the host has hung up, and has said why
        _check_greeting(await self._areceive())

    def ask(self, request: "_Request") -> ToolReply:
        """Send a call and wait for its answer."""
        self._socket.sendall(request.frame)
        return self._noted(request, self._receive())

    async def aask(self, request: "_Request") -> ToolReply:
        """Send a call and await its answer."""
        self._socket.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(self._socket, request.frame)
        reply = await self._areceive()
        self._socket.setblocking(True)
        return self._noted(request, reply)

    def _noted(self, request: "_Request", reply: ToolReply) -> ToolReply:
        if reply.kind != Failure.REFUSED:  # the host may close what is only refused
            self._used_at = time.monotonic()
        return request.checked(reply)

    def is_open(self, now: float) -> bool:
        """Whether the host has not hung up while nobody called. It does not so soon after a call."""
        if now - self._used_at < FRESH:
            return True
        try:
            if not _PEEK:
                self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK | _PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            if not _PEEK:
                self._socket.setblocking(True)
        return False  # its end, or what nobody asked for

    def close(self) -> None:
        """Close the connection; the host drops a call that is under way."""
        self._socket.close()

    async def _aconnect(self) -> None:
        self._socket.setblocking(False)
        if self._socket.family == socket.AF_INET:
            await asyncio.get_running_loop().sock_connect(self._socket, _address(self._endpoint))
            return
        # While the host's backlog is full there is nothing that could be awaited.
        while not self._connects():  # noqa: ASYNC110
            await asyncio.sleep(CONNECT_AGAIN)

    def _connects(self) -> bool:
        try:
            self._socket.connect(_address(self._endpoint))
        except BlockingIOError:
            return False
        return True

    def _receive(self) -> ToolReply:
        while not (frames := self._decoder.feed(self._read(self._socket.recv(READ_SIZE)))):
            pass
        return self._only(frames)

    async def _areceive(self) -> ToolReply:
        loop = asyncio.get_running_loop()
        while not (frames := self._decoder.feed(self._read(await loop.sock_recv(self._socket, READ_SIZE)))):
            pass
        return self._only(frames)

    def _read(self, data: bytes) -> bytes:
        if not data:
            raise ConnectionError("the host has hung up")
        return data

    def _only(self, frames: list[bytes]) -> ToolReply:
        """Read an answer; one that comes with more cannot be told from another call's."""
        if len(frames) > 1 or self._decoder.has_part:
            raise WireError("more came than one answer")
        return ToolReply.parse(frames[0])


class _Request(NamedTuple):
    """A call, as it is sent."""

    call_id: int
    frame: bytes

    def checked(self, reply: ToolReply) -> ToolReply:
        """Return the reply, if it is one to this call; raises WireError."""
        is_about_frame = reply.call_id == 0 and reply.error is not None
        if reply.call_id != self.call_id and not is_about_frame:
            raise WireError(f"the answer to call {reply.call_id} came for call {self.call_id}")
        return reply


def _cell() -> Cell:
    cell = CELL.get()
    if cell is None:
        raise ToolError(NO_CELL)
    return cell


def _is_of_this_file(error: BaseException) -> bool:
    """Whether an exception was raised by a call that stands here, or in ``wire``."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, wire.__file__)


def _in_event_loop() -> bool:
    """Whether this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _request(call: ToolCall) -> _Request:
    try:
        return _Request(call.call_id, call.encode())
    except WireError as error:
        raise ToolError(f"{call.tool}() was not called: {error}") from None


def _value(reply: ToolReply) -> Any:
    if reply.error is None:
        return reply.value
    if reply.kind == Failure.ARGUMENTS:
        raise TypeError(reply.error)
    raise (ToolBudgetExceeded if reply.kind == Failure.BUDGET else ToolError)(reply.error)


def _check_greeting(reply: ToolReply) -> None:
    if reply.error is not None or reply.call_id != 0:
        raise WireError(reply.error or "the host did not greet back")


def _socket(endpoint: Mapping[str, Any]) -> socket.socket:
    if endpoint.get("transport") == "unix":
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _address(endpoint: Mapping[str, Any]) -> Any:
    return endpoint["path"] if endpoint.get("transport") == "unix" else (endpoint["ip"], endpoint["port"])
