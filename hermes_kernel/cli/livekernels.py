"""The kernels of ``hermes-kernel lab``: those that its server starts, and the live sessions of agents.

jupyter_server finds kernels that others have started, too. But it gives them ids of its own, it forgets one
that is shut down (JupyterLab does that by itself at times, while it opens a notebook), although it runs on,
and its listing fails once such a session has ended.
"""

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.web import HTTPError

from ..errors import ConfigError
from ..host.attach import NOT_STARTED_HERE
from ..process.published import SPEC, read_published
from ..process.sessions import Session, live_sessions

ANSWER_TIMEOUT = 5.0  # seconds for a kernel to take an interrupt, or to refuse it
NOT_RESTARTED = "The live session %s is not restarted: %s."
NOT_ENDED = "The live session %s runs on: only its agent, or `hermes-kernel kill`, ends it."


class LiveKernels(AsyncMappingKernelManager):
    """Lists every exposed live session under its own id, as long as it lives and whatever is asked here."""

    def __bool__(self) -> bool:
        """Say yes, without a look at how many there are: a kernel's manager asks while it is made."""
        return True

    def list_kernel_ids(self) -> list[str]:
        """Return the ids of the kernels that run now."""
        self._look()
        ids: list[str] = super().list_kernel_ids()
        return ids

    def list_kernels(self) -> list[dict[str, Any]]:
        """Return what the panel of running kernels shows."""
        self._look()
        found: list[dict[str, Any]] = super().list_kernels()
        return found

    async def _async_start_kernel(self, **kwargs: Any) -> str:
        # Here already: after a start that has failed, jupyter_client does not end its other kernels.
        if kwargs.get("kernel_name") == SPEC and kwargs.get("kernel_id") not in self:
            raise ConfigError(NOT_STARTED_HERE)
        kernel_id: str = await super()._async_start_kernel(**kwargs)
        return kernel_id

    async def _async_shutdown_kernel(self, kernel_id: str, now: bool = False, restart: bool = False) -> None:
        if self._is_live(kernel_id):
            self.log.info(NOT_ENDED, kernel_id)
        else:
            await super()._async_shutdown_kernel(kernel_id, now=now, restart=restart)

    async def _async_restart_kernel(self, kernel_id: str, now: bool = False) -> Any:
        if self._is_live(kernel_id):
            self.log.warning(NOT_RESTARTED, kernel_id, NOT_STARTED_HERE)
            raise ConfigError(NOT_STARTED_HERE)
        return await super()._async_restart_kernel(kernel_id, now=now)

    start_kernel = _async_start_kernel
    shutdown_kernel = _async_shutdown_kernel
    restart_kernel = _async_restart_kernel

    async def interrupt_kernel(self, kernel_id: str) -> None:
        """Interrupt the cell that runs; the kernel of a live session refuses it for a cell of its agent."""
        if self._is_live(kernel_id):
            await _ask_to_interrupt(self.get_kernel(kernel_id))
        else:
            await ensure_async(super().interrupt_kernel(kernel_id))

    def _is_live(self, kernel_id: str) -> bool:
        return kernel_id in self and not self.get_kernel(kernel_id).owns_kernel

    def _look(self) -> None:
        """Take in the sessions that have begun, and leave out those that have ended."""
        live = {_id_of(session): session for session in live_sessions() if session.published is not None}
        for kernel_id in list(self._kernels):
            if self._is_live(kernel_id) and kernel_id not in live:
                self.remove_kernel(kernel_id)
        for kernel_id, session in live.items():
            if kernel_id not in self:
                self._take_in(kernel_id, session)

    def _take_in(self, kernel_id: str, session: Session) -> None:
        assert session.published is not None
        info = read_published(session.published)
        if info is None:
            return  # it ends just now, or a cell has put something else there
        kernel = self.kernel_manager_factory(
            parent=self, log=self.log, owns_kernel=False, kernel_id=kernel_id, kernel_name=SPEC
        )
        kernel.load_connection_info(info)
        kernel.execution_state = "idle"
        kernel.last_activity = datetime.now(UTC)
        kernel.ready.set_result(None)
        self._kernels[kernel_id] = kernel


async def _ask_to_interrupt(kernel: Any) -> None:
    """Send an interrupt; raises HTTPError if the kernel refuses it, or does not answer."""
    reply: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
    control = kernel.connect_control()
    control.on_recv(reply.set_result)  # there is one reply
    try:
        kernel.session.send(control, "interrupt_request")
        frames = await asyncio.wait_for(reply, ANSWER_TIMEOUT)
    except TimeoutError:
        raise HTTPError(504, "the kernel does not answer") from None
    finally:
        control.close()
    content = kernel.session.deserialize(kernel.session.feed_identities(frames)[1])["content"]
    if content["status"] != "ok":
        raise HTTPError(409, content["evalue"])


def _id_of(session: Session) -> str:
    """Return the kernel's id in the shape that a server's addresses have; it begins as `ps` shows it."""
    try:
        return str(uuid.UUID(session.kernel_id))
    except ValueError:  # a name that its host has given
        return str(uuid.uuid5(uuid.NAMESPACE_OID, session.kernel_id))
