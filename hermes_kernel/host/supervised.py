"""A launcher that lives on a supervisor's loop, callable from every other one."""

import asyncio

from ..process.launch import Ended, Interpreter, KernelExit, KernelHandle, Launched, Launcher, LaunchSpec
from .supervisor import Supervisor

MARGIN = 4.0  # seconds that a launcher may take beyond the duration that it was given, to look for leftovers


class SupervisedLauncher:
    """Passes each call on to the supervisor's loop, and ends the launcher with the supervisor."""

    def __init__(self, supervisor: Supervisor, launcher: Launcher) -> None:
        self._supervisor = supervisor
        self._launcher = launcher
        supervisor.on_close(launcher.close)

    @property
    def spares(self) -> int:
        """See Launcher."""
        return self._launcher.spares

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        """See Launcher."""
        return await self._supervisor.run(self._launcher.probe(python, timeout=timeout))

    async def launch(self, spec: LaunchSpec) -> Launched:
        """See Launcher."""
        return await self._supervisor.run(self._launcher.launch(spec))

    async def ended(self, handle: KernelHandle) -> KernelExit:
        """See Launcher."""
        return await self._supervisor.run(self._launcher.ended(handle))

    def exit_of(self, handle: KernelHandle) -> KernelExit | None:
        """See Launcher."""
        return self._launcher.exit_of(handle)

    async def signal(self, handle: KernelHandle, signum: int) -> None:
        """See Launcher."""
        await self._supervisor.run(self._launcher.signal(handle, signum))

    async def end(self, handle: KernelHandle, *, timeout: float) -> Ended:
        """See Launcher."""
        return await self._supervisor.run(self._end(handle, timeout))

    async def _end(self, handle: KernelHandle, timeout: float) -> Ended:
        try:
            async with asyncio.timeout(timeout + MARGIN):
                return await self._launcher.end(handle, timeout=timeout)
        except TimeoutError:  # the node does not keep to the duration, or cannot be reached
            return Ended.UNKNOWN

    async def sweep(self) -> None:
        """See Launcher."""
        await self._supervisor.run(self._launcher.sweep())

    async def close(self) -> None:
        """See Launcher."""
        await self._supervisor.run(self._launcher.close())
