"""The Jupyter client of our kernels, for nbclient and everybody who drives a manager by hand."""

import contextlib
import time
from queue import Empty
from typing import Any, Protocol

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.session import Session
from traitlets import Any as AnyTrait
from traitlets import Instance, Unicode, default

from .supervisor import SOCKET_OPTIONS

POLL = 0.05  # seconds between two looks at the process while nothing arrives
ASK_AGAIN = 0.2  # seconds without a message on IOPub until the kernel is asked once more


def client_context() -> zmq.asyncio.Context:
    """Return a ZeroMQ context whose sockets lose nothing and connect at once when the kernel has bound."""
    context = zmq.asyncio.Context()
    for option, value in SOCKET_OPTIONS.items():
        context.setsockopt(option, value)
    return context


OWNERS_REQUESTS = frozenset({"execute_request", "interrupt_request", "shutdown_request"})


def with_secret(message_type: str, metadata: dict[str, Any], secret: str) -> dict[str, Any]:
    """Return the metadata of a message; of one that only the owner may send, with the owner's secret."""
    if message_type not in OWNERS_REQUESTS or not secret:
        return metadata
    return {**metadata, "hermes": {**metadata.get("hermes", {}), "owner_secret": secret}}


class CellWatch(Protocol):
    """Grants tools to the cells of one client, as long as its own messages show that they run."""

    def begin(self, msg_id: str) -> dict[str, Any] | None:
        """A cell is about to be sent; return what its request carries, None for no tools."""

    def observe(self, msg_type: str, parent_id: str | None, content: dict[str, Any]) -> None:
        """A message has come."""

    def end(self) -> None:
        """The client hears no more."""


class OwnerSession(Session):
    """A session whose requests show that they come from the kernel's owner."""

    owner_secret = Unicode()
    cells: CellWatch | None = AnyTrait(None)  # type: ignore[assignment]

    def msg(
        self,
        msg_type: str,
        content: dict[str, Any] | None = None,
        parent: dict[str, Any] | None = None,
        header: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Make a message; one that only the owner may send carries the secret."""
        message: dict[str, Any] = super().msg(msg_type, content, parent, header, metadata)
        message["metadata"] = with_secret(msg_type, message["metadata"], self.owner_secret)
        if self.cells is not None and msg_type == "execute_request" and not (content or {}).get("silent"):
            tools = self.cells.begin(message["header"]["msg_id"])
            if tools is not None:
                message["metadata"].setdefault("hermes", {})["tools"] = tools
        return message

    def deserialize(self, msg_list: list[Any], content: bool = True, copy: bool = True) -> dict[str, Any]:
        """Read a message; what it says of a cell is looked at on its way."""
        message: dict[str, Any] = super().deserialize(msg_list, content, copy)
        if self.cells is not None and content:
            parent = message["parent_header"].get("msg_id")
            self.cells.observe(message["header"]["msg_type"], parent, message["content"])
        return message


class HermesKernelClient(AsyncKernelClient):
    """An AsyncKernelClient that is ready as soon as the kernel is."""

    context = Instance(zmq.asyncio.Context)

    @default("context")
    def _default_context(self) -> zmq.asyncio.Context:
        self._created_context = True
        return client_context()

    def start_channels(
        self,
        shell: bool = True,
        iopub: bool = True,
        stdin: bool = True,
        hb: bool = False,
        control: bool = True,
    ) -> None:
        """Start the channels; no heartbeat unless asked for: the manager knows whether the process lives."""
        super().start_channels(shell=shell, iopub=iopub, stdin=stdin, hb=hb, control=control)

    def stop_channels(self) -> None:
        """Stop the channels; what its cells may call ends with what it can hear of them."""
        super().stop_channels()
        if isinstance(self.session, OwnerSession) and self.session.cells is not None:
            self.session.cells.end()

    async def _async_wait_for_ready(self, timeout: float | None = None) -> None:
        """Wait for the kernel's first answer, and for a message that shows that IOPub is subscribed.

        What is there already may be of the kernel before a restart, and shows nothing. Raises RuntimeError if
        the kernel ends before, or does not answer within *timeout* seconds.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        ask_again = 0.0
        asked: set[str] = set()
        answer: dict[str, Any] | None = None
        subscribed = False
        with contextlib.suppress(Empty):
            while True:
                await self.iopub_channel.get_msg(timeout=0)
        while answer is None or not subscribed:
            now = time.monotonic()
            if now > deadline:
                raise RuntimeError(f"Kernel did not answer within {timeout:g} seconds")
            if not await self.is_alive():
                raise RuntimeError("Kernel died before replying to kernel_info")
            # A subscription that came after the first answer misses its status: ask for another one.
            if now >= ask_again and (answer is not None or not asked):
                asked.add(self.kernel_info())
                ask_again = now + ASK_AGAIN
            try:
                if answer is None:
                    message = await self.shell_channel.get_msg(timeout=POLL)
                    if message["parent_header"].get("msg_id") in asked:
                        answer = message
                else:
                    message = await self.iopub_channel.get_msg(timeout=POLL)
                    is_welcome = message["header"]["msg_type"] == "iopub_welcome"
                    subscribed = is_welcome or message["parent_header"].get("msg_id") in asked
            except Empty:
                pass  # nothing yet: look at the process and the clock again
        self._handle_kernel_info_reply(answer)

    wait_for_ready = _async_wait_for_ready
