"""The kernel's end of the tool bridge: connections to the host, one for each call that is under way."""

import asyncio
import concurrent.futures
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..errors import ToolBudgetExceeded, ToolError
from ..wire import HALF_FRAME_TIMEOUT, Failure, FrameDecoder, Hello, ToolCall, ToolReply, WireError
from .context import CELL, Cell

MAX_CONNECTIONS = 32  # calls of this process that are under way at once; others wait for their turn
READ_SIZE = 64 * 1024
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
        os.register_at_fork(after_in_child=self._after_fork)

    def bind(self, token: str) -> None:
        """Take the token that proves to the host that a connection comes from this kernel."""
        self._token = token

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return its result; raises ToolError or one of its kinds."""
        cell = _cell()
        frame = _encoded(next(self._ids), cell, name, arguments)
        connection, turn = self._free()
        if turn is not None:
            try:
                connection = turn.result()
            except BaseException:  # interrupted
                self._give_up(turn)
                raise
        if connection is None:
            connection = self._connect(cell.endpoint)
        try:
            reply = connection.ask(frame)
        except (OSError, WireError) as error:
            raise self._lost(connection, error) from None
        except BaseException:  # interrupted: the answer would be taken for another call's
            self._drop(connection)
            raise
        self._give_back(connection, reply)
        return _value(reply)

    async def acall(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool without blocking the event loop; a task that is cancelled drops the call."""
        cell = _cell()
        frame = _encoded(next(self._ids), cell, name, arguments)
        connection, turn = self._free()
        if turn is not None:
            try:
                connection = await asyncio.wrap_future(turn)
            except BaseException:  # cancelled
                self._give_up(turn)
                raise
        if connection is None:
            connection = self._connect(cell.endpoint)
        try:
            reply = await connection.aask(frame)
        except (OSError, WireError) as error:
            raise self._lost(connection, error) from None
        except BaseException:  # cancelled
            self._drop(connection)
            raise
        self._give_back(connection, reply)
        return _value(reply)

    def _free(self) -> "tuple[_Connection | None, Turn | None]":
        """Return a connection that is free, None for leave to open one, and else the turn to wait for."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_open(time.monotonic()):
                    return connection, None
                self._open.discard(connection)
                connection.close()
                self._count -= 1
            if self._count < MAX_CONNECTIONS:
                self._count += 1
                return None, None
            turn: Turn = concurrent.futures.Future()
            self._waiting.append(turn)
            return None, turn

    def _give_up(self, turn: "Turn") -> None:
        """Do not wait any more; a turn that has just come goes to the next."""
        with self._lock:
            has_come = not turn.cancel() and not turn.cancelled()
        if has_come:
            self._hand_on(turn.result())

    def _connect(self, endpoint: Mapping[str, Any]) -> "_Connection":
        try:
            connection = _Connection(endpoint, self._token)
        except BaseException as error:
            self._hand_on(None)
            if isinstance(error, OSError | WireError):
                raise ToolError(f"the host cannot be reached for tools: {error}") from None
            raise
        with self._lock:
            self._open.add(connection)
        return connection

    def _give_back(self, connection: "_Connection", reply: ToolReply) -> None:
        if reply.closes:
            self._drop(connection)
        else:
            self._hand_on(connection)

    def _lost(self, connection: "_Connection", error: Exception) -> ToolError:
        self._drop(connection)
        return ToolError(f"{LOST}{error}")

    def _drop(self, connection: "_Connection") -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()
        self._hand_on(None)

    def _hand_on(self, connection: "_Connection | None") -> None:
        """Give a connection, or the leave to open one, to who waits longest."""
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(connection)
                    return
            if connection is None:
                self._count -= 1
            else:
                self._idle.append(connection)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._waiting: deque[Turn] = deque()
        self._count = 0

    def _after_fork(self) -> None:
        """In a forked child: the connections are the parent's."""
        for connection in self._open:
            connection.close()
        self._reset()


class _Connection:
    """One connection, with at most one call under way."""

    def __init__(self, endpoint: Mapping[str, Any], token: str) -> None:
        self._socket = _connected(endpoint)
        self._decoder = FrameDecoder()
        self._used_at = time.monotonic()
        try:
            self._socket.settimeout(HALF_FRAME_TIMEOUT)
            reply = self.ask(Hello(token).encode())
            self._socket.settimeout(None)
            if reply.error is not None:
                raise WireError(reply.error)
        except BaseException:
            self.close()
            raise

    def ask(self, frame: bytes) -> ToolReply:
        """Send a frame and wait for its answer."""
        self._socket.sendall(frame)
        while not (frames := self._decoder.feed(self._read(self._socket.recv(READ_SIZE)))):
            pass
        self._used_at = time.monotonic()
        return ToolReply.parse(frames[0])

    async def aask(self, frame: bytes) -> ToolReply:
        """Send a frame and await its answer."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        await loop.sock_sendall(self._socket, frame)
        while not (frames := self._decoder.feed(self._read(await loop.sock_recv(self._socket, READ_SIZE)))):
            pass
        self._socket.setblocking(True)
        self._used_at = time.monotonic()
        return ToolReply.parse(frames[0])

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

    def _read(self, data: bytes) -> bytes:
        if not data:
            raise ConnectionError("the host has hung up")
        return data


Turn = concurrent.futures.Future[_Connection | None]
"""A place in the queue for a connection; its result is one, or None for leave to open one."""


def _cell() -> Cell:
    cell = CELL.get()
    if cell is None:
        raise ToolError(NO_CELL)
    return cell


def _encoded(call_id: int, cell: Cell, name: str, arguments: dict[str, Any]) -> bytes:
    try:
        return ToolCall(call_id, cell.token, name, arguments).encode()
    except WireError as error:
        raise ToolError(f"{name}() was not called: {error}") from None


def _value(reply: ToolReply) -> Any:
    if reply.error is None:
        return reply.value
    if reply.kind == Failure.ARGUMENTS:
        raise TypeError(reply.error)
    raise (ToolBudgetExceeded if reply.kind == Failure.BUDGET else ToolError)(reply.error)


def _connected(endpoint: Mapping[str, Any]) -> socket.socket:
    if endpoint.get("transport") == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: Any = endpoint["path"]
    else:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = endpoint["ip"], endpoint["port"]
    try:
        connection.settimeout(HALF_FRAME_TIMEOUT)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection
