"""The Jupyter client of our kernels, for nbclient and everybody who drives a manager by hand."""

import asyncio
import time
from typing import Any

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from traitlets import Instance, default

from .supervisor import SOCKET_OPTIONS

POLL = 0.05  # seconds between two looks at the process while nothing arrives


def client_context() -> zmq.asyncio.Context:
    """Return a ZeroMQ context whose sockets lose nothing and connect at once when the kernel has bound."""
    context = zmq.asyncio.Context()
    for option, value in SOCKET_OPTIONS.items():
        context.setsockopt(option, value)
    return context


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
        """Wait for the kernel's welcome and its first answer.

        Raises RuntimeError if the kernel ends before, or does not answer within *timeout* seconds.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        request = self.kernel_info()
        answer: dict[str, Any] | None = None
        welcomed = False
        while answer is None or not welcomed:
            channel = self.iopub_channel if answer is not None else self.shell_channel
            if await channel.socket.poll(int(POLL * 1000)):
                message = await channel.get_msg(timeout=0)
                if message["parent_header"].get("msg_id") == request and channel is self.shell_channel:
                    answer = message
                elif message["msg_type"] == "iopub_welcome":
                    welcomed = True
            elif not await self.is_alive():
                raise RuntimeError("Kernel died before replying to kernel_info")
            elif time.monotonic() > deadline:
                raise RuntimeError(f"Kernel did not answer within {timeout:g} seconds")
        self._handle_kernel_info_reply(answer)
        await asyncio.sleep(0)

    wait_for_ready = _async_wait_for_ready
