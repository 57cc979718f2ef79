"""A launcher that lives on a supervisor's loop, callable from every other one."""

import asyncio

from ..process.launch import Ended, Interpreter, KernelExit, KernelHandle, Launched, Launcher, LaunchSpec
from .supervisor import Supervisor

KILL_TIMEOUT = 5.0  # seconds for the tree of a kernel that nobody wants to be gone
MARGIN = 4.0  # seconds that a launcher may take beyond the duration that it was given, to look for leftovers


class SupervisedLauncher:
    """Passes each call on to the supervisor's loop, and ends the launcher with the supervisor."""

    def __init__(self, supervisor: Supervisor, launcher: Launcher) -> None:
        self._supervisor = supervisor
        self._launcher = launcher
        self._undoing: set[asyncio.Task[Ended]] = set()
        supervisor.on_close(launcher.close)

    @property
    def spares(self) -> int:
        """See Launcher."""
        return self._launcher.spares

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        """See Launcher."""
        return await self._supervisor.run(self._launcher.probe(python, timeout=timeout))

    async def launch(self, spec: LaunchSpec) -> Launched:
        """See Launcher. If the caller is cancelled, on whatever loop, nothing is left of the kernel."""
        launch = _Launch(self._launcher, self._undoing)
        try:
            return await self._supervisor.run(launch.run(spec))
        except asyncio.CancelledError:
            self._supervisor.call(launch.undo)
            raise

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


class _Launch:
    """A launch on the supervisor's loop, whose caller may be cancelled on another one."""

    def __init__(self, launcher: Launcher, undoing: "set[asyncio.Task[Ended]]") -> None:
        self._launcher = launcher
        self._undoing = undoing
        self._is_wanted = True
        self._begun: asyncio.Task[Launched] | None = None

    async def run(self, spec: LaunchSpec) -> Launched:
        """Launch the kernel, unless that is unwanted by now."""
        if not self._is_wanted:
            raise asyncio.CancelledError
        self._begun = asyncio.create_task(self._launcher.launch(spec))
        return await self._begun

    def undo(self) -> None:
        """Cancel what has begun; it may be too late for that, then the kernel is ended."""
        self._is_wanted = False
        if self._begun is None:
            return
        if not self._begun.cancelling():
            self._begun.cancel()
        self._begun.add_done_callback(self._end)

    def _end(self, launched: "asyncio.Task[Launched]") -> None:
        if not launched.cancelled() and launched.exception() is None:
            end = self._launcher.end(launched.result().handle, timeout=KILL_TIMEOUT)
            ending = asyncio.create_task(end)
            self._undoing.add(ending)
            ending.add_done_callback(self._undoing.discard)
