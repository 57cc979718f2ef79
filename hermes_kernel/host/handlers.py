"""The event loop on which ``async`` handlers of tools run where their caller has none."""

import asyncio
import logging
import threading
from collections.abc import Callable

JOIN_TIMEOUT = 0.5  # seconds that a close waits for the loop to end

_log = logging.getLogger(__name__)


class HandlerLoop:
    """A daemon thread with an event loop, started at the first ``async`` handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: Callable[[], object] = lambda: None
        self._is_closed = False

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop; raises RuntimeError if it is closed."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the registry is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._run, args=(self._loop,), name="hermes-kernel-handlers", daemon=True
                ).start()
            return self._loop

    async def close(self) -> None:
        """End the loop with what runs on it; idempotent."""
        here, ended = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
        if loop is None:
            return
        self._told = lambda: here.call_soon_threadsafe(ended.set)
        try:
            loop.call_soon_threadsafe(loop.stop)
        except RuntimeError:  # it has ended by itself
            return
        try:
            async with asyncio.timeout(JOIN_TIMEOUT):
                await ended.wait()
        except TimeoutError:  # a handler blocks it; the thread is a daemon
            _log.warning("an async tool blocks its event loop")

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._is_closed:
                _run_until_stopped(loop)
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=JOIN_TIMEOUT / 2))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        try:
            self._told()
        except RuntimeError:  # nobody waits any more
            pass


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:  # of what a handler has left running
        _log.warning("an async tool has raised %s in the background", type(error).__name__)
