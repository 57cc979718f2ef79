"""The Jupyter client of our kernels, for nbclient and everybody who drives a manager by hand."""

import time
from queue import Empty
from typing import Any

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.session import Session
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


class OwnerSession(Session):
    """A session whose requests show that they come from the kernel's owner."""

    owner_secret = Unicode()

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
        if msg_type in OWNERS_REQUESTS and self.owner_secret:
            message["metadata"].setdefault("hermes", {})["owner_secret"] = self.owner_secret
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

    async def _async_wait_for_ready(self, timeout: float | None = None) -> None:
        """Wait for the kernel's first answer, and for a message that shows that IOPub is subscribed.

        Raises RuntimeError if the kernel ends before, or does not answer within *timeout* seconds.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        ask_again = 0.0
        asked: set[str] = set()
        answer: dict[str, Any] | None = None
        subscribed = False
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
                    await self.iopub_channel.get_msg(timeout=POLL)
                    subscribed = True
            except Empty:
                pass  # nothing yet: look at the process and the clock again
        self._handle_kernel_info_reply(answer)

    wait_for_ready = _async_wait_for_ready
