"""The sockets between a host and one kernel, read on the supervisor's loop.

Sockets are read as soon as they are readable, without a task or a future for each message; a message that
cannot be read is counted, never raised.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..cell.message import Message
from .signed import SignedSession

MAX_MESSAGE = 128 * 1024 * 1024
"""Bytes of one frame; a kernel that sends more loses its connection (libzmq closes it without a word).

While a large message is read, all other kernels wait: some seconds for this one.
"""

_AT_ONCE = 256  # messages read before others get their turn
_CHANNELS = {"shell": zmq.DEALER, "iopub": zmq.SUB, "control": zmq.DEALER}
_log = logging.getLogger(__name__)

Receive = Callable[[str, Message], None]


class KernelConnection:
    """The shell, IOPub and control channels of one kernel.

    *receive* is called with the name of the channel and each well-formed message; *disconnected* with the
    name of a channel whose other end has gone; *unreadable* for each message that is none. *reconnect*:
    milliseconds after which a socket that connects before the kernel has bound tries again.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        info: Mapping[str, Any],
        *,
        owner_secret: str,
        reconnect: int,
        receive: Receive,
        disconnected: Callable[[str], None],
        unreadable: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._disconnected = disconnected
        self._unreadable = unreadable
        self._reconnect = reconnect
        self._session = SignedSession(
            info["key"].encode(), info["signature_scheme"], owner_secret=owner_secret
        )
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._monitors: dict[str, zmq.Socket[Any]] = {}
        try:
            for channel, kind in _CHANNELS.items():
                self._connect(context, channel, kind, _address(info, channel))
        except BaseException:
            self.close()
            raise

    def send(self, channel: str, message_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> str:
        """Send a request without ever blocking; return its msg_id.

        Raises zmq.Again if the kernel does not take messages.
        """
        msg_id, frames = self._session.request(message_type, content, metadata)
        self._sockets[channel].send_multipart(frames, zmq.NOBLOCK)
        # Sending can make the descriptor forget that there is something to read.
        self._loop.call_soon(self._read, channel)
        return msg_id

    def is_ours(self, msg_id: str | None) -> bool:
        """Whether a request with this id can be one of ours."""
        return msg_id is not None and msg_id.startswith(self._session.session_id)

    def close(self) -> None:
        """Close the sockets; idempotent."""
        for monitored, monitor in self._monitors.items():
            self._loop.remove_reader(_descriptor(monitor))
            self._sockets[monitored].disable_monitor()
            monitor.close(linger=0)
        for socket in self._sockets.values():
            self._loop.remove_reader(_descriptor(socket))
            socket.close(linger=0)
        self._sockets.clear()
        self._monitors.clear()

    def read_now(self) -> None:
        """Take in what has arrived, as much as is read at once."""
        for channel in _CHANNELS:
            self._read(channel)

    def read_all(self) -> None:
        """Take in everything that has arrived."""
        for channel in _CHANNELS:
            while self._read_once(channel):
                pass

    def _connect(self, context: "zmq.Context[Any]", channel: str, kind: int, address: str) -> None:
        socket = self._sockets[channel] = context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        socket.setsockopt(zmq.RECONNECT_IVL, self._reconnect)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, self._session.identity)
        monitor = self._monitors[channel] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(_descriptor(monitor), self._read_monitor, channel)
        self._loop.add_reader(_descriptor(socket), self._read, channel)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        # The descriptor tells of news only to somebody who has looked before and found nothing.
        self._loop.call_soon(self._read, channel)
        self._loop.call_soon(self._read_monitor, channel)

    def _read(self, channel: str) -> None:
        for _ in range(_AT_ONCE):
            if not self._read_once(channel):
                return
        self._loop.call_soon(self._read, channel)

    def _read_once(self, channel: str) -> bool:
        """Read one message; return whether there was one."""
        socket = self._sockets.get(channel)
        if socket is None:  # closed since this was scheduled
            return False
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            message = Message.parse(self._session.opened(frames))
        except Exception as error:  # noqa: BLE001  # whatever a kernel sends, and however it fails to be read
            _log.debug("unreadable message on %s: %s: %s", channel, type(error).__name__, str(error)[:200])
            self._unreadable()
            return True
        try:
            self._receive(channel, message)
        except Exception:  # noqa: BLE001  # the edge of the loop's callback: the next message must be read
            _log.exception("taking in a %s on %s", message.msg_type[:50], channel)
            self._unreadable()
        return True

    def _read_monitor(self, channel: str) -> None:
        while True:
            monitor = self._monitors.get(channel)
            if monitor is None:
                return
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._disconnected(channel)


def _descriptor(socket: "zmq.Socket[Any]") -> int:
    return int(socket.getsockopt(zmq.FD))


def _address(info: Mapping[str, Any], channel: str) -> str:
    port = info[f"{channel}_port"]
    separator = "-" if info["transport"] == "ipc" else ":"
    return f"{info['transport']}://{info['ip']}{separator}{port}"
