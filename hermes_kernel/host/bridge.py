"""The host's end of the tool bridge: a socket of one kernel, on which the code of its cells calls tools.

Each connection has a daemon thread that reads a call, runs its handler and writes the answer; a client that
wants calls served side by side opens as many connections. So a handler that never returns holds one
connection and nothing else, and a peer that does not read, or sends what is no call, hurts itself alone.
"""

import asyncio
import hmac
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ..cell.authority import RETIRED, UNKNOWN
from ..cell.result import ToolCallRecord
from ..lifecycle.key import Owner
from ..wire import (
    HALF_FRAME_TIMEOUT,
    MAX_FRAME,
    MAX_HELLO,
    BadCallError,
    Failure,
    FrameDecoder,
    Hello,
    ToolCall,
    ToolReply,
    WireError,
    send_timeout,
)
from .grant import Answer, CellTools, ToolGrant, answer
from .supervisor import Supervisor

MAX_CONNECTIONS = 128  # of one kernel; each has a thread
IDLE = 1.0  # seconds without a call after which a connection may have to make room for a new one
MAX_ABANDONED = 512  # threads of one kernel that handlers keep beyond their cells
HEAD = 400  # bytes of a large call that must have named its cell
BACKLOG = 1024
ACCEPT_AGAIN = 0.2  # seconds until the next try when the process has no descriptor left
REMEMBERED = 4096  # tokens of cells that are over, so that a late call is told so
READ_SIZE = 64 * 1024
LARGE = 1024 * 1024  # bytes of a frame from which on it waits for its turn
TURN = 1.0  # seconds for the rest of a large frame, whose turn others wait for
LARGE_AT_ONCE = 4  # of one kernel, in memory and not parsed yet
LOOPBACK = "127.0.0.1"

UNAUTHORIZED = "Unauthorized: this connection has not shown the kernel's token."
CROWDED = f"too many connections: a kernel may have {MAX_CONNECTIONS} that are in use; end some of the calls"

_log = logging.getLogger(__name__)


class KernelBridge:
    """Serves the tool calls of one kernel.

    ``open`` and ``close`` belong to the supervisor's loop; a cell may be granted tools from any thread.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        place: Mapping[str, Any],
        *,
        token: str,
        kernel_id: str,
        owner: Owner | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._place = place
        self._token = token
        self._kernel_id = kernel_id
        self._owner = owner
        self._listener: socket.socket | None = None
        self._endpoint: dict[str, Any] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._grants: dict[str, ToolGrant] = {}
        self._retired: OrderedDict[str, None] = OrderedDict()
        self._connections: OrderedDict[_Connection, None] = OrderedDict()
        self._abandoned: set[_Connection] = set()  # their cells are over, and their handlers run on
        self.large_frames = threading.BoundedSemaphore(LARGE_AT_ONCE)
        self.large_parse = threading.Lock()  # reading one keeps the GIL: not two in a row
        self._delivered: str | None = None

    def open(self) -> None:
        """Begin to listen; idempotent. Raises OSError."""
        if self._listener is not None or self._is_closed:
            return
        listener, self._endpoint = _listen(self._place)
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def grant(self, tools: CellTools) -> ToolGrant:
        """Let a cell call tools until it is retired."""
        grant = ToolGrant(tools, owner=self._owner, kernel_id=self._kernel_id, tell=self._supervisor.call)
        with self._lock:
            self._grants[grant.token] = grant
        return grant

    def metadata(self, grant: ToolGrant) -> dict[str, Any]:
        """Return what the request of the cell must carry; the catalogue too unless the kernel has it."""
        tools = grant.tools.tools
        content: dict[str, Any] = {"token": grant.token, "endpoint": self._endpoint, "digest": tools.digest}
        if self._delivered != tools.digest:
            content["catalogue"] = tools.catalogue
        return content

    def delivered(self, grant: ToolGrant) -> None:
        """The cell has begun, so its kernel has the catalogue."""
        self._delivered = grant.tools.tools.digest

    def retire(self, grant: ToolGrant) -> tuple[ToolCallRecord, ...]:
        """The cell is over; return the calls that it has made. Idempotent."""
        with self._lock:
            if self._grants.pop(grant.token, None) is not None:
                self._retired[grant.token] = None
            while len(self._retired) > REMEMBERED:
                self._retired.popitem(last=False)
        return grant.retire()

    def close(self) -> None:
        """End the bridge with its kernel; idempotent. A handler that runs on has nobody to answer to."""
        self._is_closed = True
        with self._lock:
            grants, connections = list(self._grants.values()), list(self._connections)
        for grant in grants:
            self.retire(grant)
        for connection in connections:
            connection.hang_up()
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
            _remove(self._endpoint)

    def knows(self, hello: Hello) -> bool:
        """Whether a connection comes from the kernel."""
        return hmac.compare_digest(hello.token.encode("utf-8", "replace"), self._token.encode())

    def serve(self, call: ToolCall, connection: "_Connection") -> Answer:
        """Serve a call under the cell that its token names."""
        with self._lock:
            grant = self._grants.get(call.cell)
            was_known = call.cell in self._retired
        if grant is None:
            text = RETIRED if was_known else UNKNOWN
            return answer(ToolReply(call.call_id, error=text, kind=Failure.REFUSED))
        return grant.serve(call, connection)

    def abandon(self, connection: "_Connection") -> None:
        """The connection is closed, and a handler keeps its thread: its place is free for another."""
        with self._lock:
            if self._connections.pop(connection, self) is None:
                self._abandoned.add(connection)

    def forget(self, connection: "_Connection") -> None:
        """The connection is gone, and its thread."""
        with self._lock:
            self._connections.pop(connection, None)
            self._abandoned.discard(connection)

    def is_live(self, head: bytes) -> bool:
        """Whether the beginning of a call names a cell that may call tools."""
        with self._lock:
            return any(token.encode() in head for token in self._grants)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptor is left: the connection stays in the backlog
            _log.warning("kernel %s: cannot accept a connection: %s", self._kernel_id, error)
            self._pause()
            return
        if not _is_own_user(peer):
            _log.warning("kernel %s: another user has tried to connect", self._kernel_id)
            peer.close()
            return
        connection = _Connection(self, peer)
        with self._lock:
            too_many = len(self._abandoned) >= MAX_ABANDONED
            leaving = None if too_many else self._make_room()
            crowded = too_many or len(self._connections) >= MAX_CONNECTIONS
            if not crowded:
                self._connections[connection] = None
        if leaving is not None:
            leaving.hang_up()
        if crowded:
            connection.cut_off(ToolReply(0, error=CROWDED, kind=Failure.REFUSED, closes=True))
            connection.close()
            return
        connection.start()

    def _pause(self) -> None:
        """Do not accept for a moment: the listener stays readable, and the loop would turn on it."""
        loop, listener = asyncio.get_running_loop(), self._listener
        if listener is None:
            return
        loop.remove_reader(listener.fileno())

        def resume() -> None:
            if self._listener is not None:
                loop.add_reader(self._listener.fileno(), self._accept)

        loop.call_later(ACCEPT_AGAIN, resume)

    def _make_room(self) -> "_Connection | None":
        """Take out a connection that a new one may replace: a stranger, else one that nobody uses."""
        if len(self._connections) < MAX_CONNECTIONS:
            return None
        now = time.monotonic()
        for may_go in (_Connection.is_stranger, _Connection.is_idle):
            for connection in self._connections:
                if may_go(connection, now):
                    del self._connections[connection]
                    return connection
        return None


class _Connection:
    """One connection and its thread."""

    def __init__(self, bridge: KernelBridge, peer: socket.socket) -> None:
        self._bridge = bridge
        self._peer = peer
        self._lock = threading.RLock()
        self._is_known = False
        self._serving = False
        self._is_answered = False
        self._has_turn = False
        self._sending = False
        self._last_used = time.monotonic()
        self._decoder = FrameDecoder(MAX_HELLO)
        self._frames: list[bytes] = []

    def start(self) -> None:
        """Read on a thread of its own."""
        thread = threading.Thread(target=self._run, name="hermes-tools", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process can have no more of them
            _log.warning("a tool connection is closed: %s", error)
            self._bridge.forget(self)
            self.close()

    def is_stranger(self, now: float) -> bool:
        """Whether it has not said who it is."""
        return not self._is_known

    def is_idle(self, now: float) -> bool:
        """Whether nothing has been called on it for a while."""
        is_busy = self._serving or self._sending or self._decoder.has_part
        return not is_busy and now - self._last_used > IDLE

    def cut_off(self, reply: ToolReply) -> None:
        """Answer for a handler that has not, without waiting, and read the connection no more."""
        with self._lock:
            if self._is_answered:  # its own thread was faster
                return
            self._is_answered = True
            try:
                self._peer.settimeout(0)
                self._peer.send(reply.encode())
            except OSError:  # it is gone, or does not read
                pass
        self._bridge.abandon(self)
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection; its thread notices, unless a handler keeps it."""
        with self._lock:
            try:
                self._peer.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end was faster
                pass
            if self._serving:
                self._peer.close()

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._peer.close()

    def _run(self) -> None:
        try:
            self._prepare()
            if self._greet():
                while self._serve_next():
                    pass
        except WireError as error:  # the peer is no client of ours
            self._send_last(ToolReply(0, error=str(error), kind=Failure.REFUSED, closes=True))
        except OSError as error:  # it is gone
            _log.debug("a tool connection has ended: %s", error)
        except Exception:  # noqa: BLE001  # the edge of the thread; the others go on
            _log.exception("serving a tool connection")
        finally:
            self._end_turn()
            self._bridge.forget(self)
            self.close()

    def _prepare(self) -> None:
        self._peer.setblocking(True)
        # A peer that does not read its answers must not keep the thread.
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout(HALF_FRAME_TIMEOUT))
        if self._peer.family == socket.AF_INET:
            self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _greet(self) -> bool:
        """Answer the first frame; return whether there was one. Raises WireError if it is wrong."""
        frame = self._read(time.monotonic() + HALF_FRAME_TIMEOUT)
        if frame is None:
            return False
        if not self._bridge.knows(Hello.parse(frame)):
            raise WireError(UNAUTHORIZED)
        self._is_known = True
        self._decoder.limit = MAX_FRAME
        self._send(ToolReply(0).encode())
        return True

    def _serve_next(self) -> bool:
        """Serve the next call; return whether the connection goes on."""
        frame = self._read()
        if frame is None:
            return False
        self._is_answered, self._serving = False, True
        try:
            call = self._parsed(frame)
            del frame  # not kept while the handler runs
            served = self._bridge.serve(call, self)
        except BadCallError as error:
            served = answer(ToolReply(error.call_id, error=f"no tool call: {error}", kind=Failure.REFUSED))
        except WireError as error:
            served = answer(ToolReply(0, error=f"no tool call: {error}", kind=Failure.REFUSED))
        with self._lock:
            self._serving = False
            if self._is_answered:  # the cell is over
                return False
            self._is_answered = self._sending = True
            if served.reply.kind != Failure.REFUSED:
                self._last_used = time.monotonic()
        self._send(served.frame)
        self._sending = False
        return not served.reply.closes

    def _parsed(self, frame: bytes) -> ToolCall:
        if len(frame) <= LARGE:
            return ToolCall.parse(frame)
        try:
            if not self._bridge.is_live(frame[:HEAD]):  # not worth its parsing
                raise WireError(RETIRED)
            with self._bridge.large_parse:
                return ToolCall.parse(frame)
        finally:
            self._end_turn()

    def _send_last(self, reply: ToolReply) -> None:
        try:
            self._send(reply.encode())
        except OSError as error:
            _log.debug("a tool connection has ended: %s", error)

    def _send(self, data: bytes) -> None:
        self._peer.sendall(data)

    def _read(self, deadline: float | None = None) -> bytes | None:
        """Return the next frame, None at the end. One that has begun must be whole within its time."""
        while not self._frames:
            if deadline is None and self._decoder.has_part:
                deadline = time.monotonic() + HALF_FRAME_TIMEOUT
            if deadline is not None and self._decoder.waiting > LARGE:
                return self._read_large(deadline)
            if not self._read_some(deadline):
                return None
        return self._frames.pop(0)

    def _read_large(self, deadline: float) -> bytes | None:
        """Read the rest of a large frame when it is its turn; the turn lasts until the frame is parsed."""
        if not self._bridge.large_frames.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise WireError("too many large calls at once")
        self._has_turn = True
        deadline = min(deadline, time.monotonic() + TURN)
        while not self._frames:
            if not self._read_some(deadline):
                return None
        return self._frames.pop(0)

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._bridge.large_frames.release()

    def _read_some(self, deadline: float | None) -> bool:
        """Take in what one read gives; return whether it was not the end."""
        if deadline is not None:
            self._peer.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            data = self._peer.recv(READ_SIZE)
            if deadline is not None and time.monotonic() > deadline:  # it comes, and never ends
                raise TimeoutError
        except TimeoutError:
            raise WireError("half a frame, and then silence") from None
        finally:
            if deadline is not None:
                self._peer.settimeout(None)
        self._frames += self._decoder.feed(data)
        return bool(data)


def _listen(place: Mapping[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """Make the listening socket; return it and its address, as the kernel is told it."""
    if place.get("transport") == "unix" and hasattr(socket, "AF_UNIX"):
        path = str(place["path"])
        endpoint = {"transport": "unix", "path": path}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _remove(endpoint)  # the directory is the kernel's, and a cell may have put something there
        try:
            listener.bind(path)
        except OSError:
            listener.close()
            raise
        try:
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            _remove(endpoint)
            raise
        return listener, endpoint
    listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
    return listener, {"transport": "tcp", "ip": LOOPBACK, "port": listener.getsockname()[1]}


def _remove(endpoint: Mapping[str, Any]) -> None:
    if endpoint.get("transport") == "unix":
        try:
            os.unlink(endpoint["path"])
        except OSError:  # the directory has gone with its kernel
            pass


def _is_own_user(peer: socket.socket) -> bool:
    """Whether the other end belongs to this user; True where the system does not say."""
    if sys.platform != "linux" or peer.family != socket.AF_UNIX:
        return True
    credentials = struct.Struct("3i")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return bool(credentials.unpack(raw)[1] == os.geteuid())
