"""The provisioner of the kernel spec ``hermes-live``: it starts nothing.

A front end that has found a live kernel restarts it by starting another process on its sockets. Then the
agent's session would be cut off, so what is asked to start is refused.
"""

from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from ..errors import ConfigError

NOT_STARTED_HERE = (
    "a live session of hermes_kernel is started and restarted by its agent alone: attach to the kernel that "
    "runs, or choose another kernel"
)


class AttachProvisioner(KernelProvisionerBase):
    """Refuses to launch. Kernels under its spec have a process, but it is never this one's."""

    @property
    def has_process(self) -> bool:
        """No: it belongs to the agent's host."""
        return False

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Refuse; raises ConfigError."""
        raise ConfigError(NOT_STARTED_HERE)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Refuse; raises ConfigError."""
        raise ConfigError(NOT_STARTED_HERE)

    async def poll(self) -> int | None:
        """Return 0: there is no process of this front end's."""
        return 0

    async def wait(self) -> int | None:
        """Return 0 at once."""
        return 0

    async def send_signal(self, signum: int) -> None:
        """Send none."""

    async def kill(self, restart: bool = False) -> None:
        """End nothing."""

    async def terminate(self, restart: bool = False) -> None:
        """End nothing."""

    async def cleanup(self, restart: bool = False) -> None:
        """Nothing is left."""
