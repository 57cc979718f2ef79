"""The thread that keeps the promises: one event loop of its own, apart from every loop of the user's.

A user's loop may stand still, and ``asyncio.run`` may end while the kernel lives on; what ends processes,
watches deadlines and reads sockets must not depend on it.
"""

import asyncio
import atexit
import concurrent.futures
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import zmq

from ..errors import HermesKernelError

T = TypeVar("T")

CLOSE_TIMEOUT = 10.0  # seconds for everything that the thread has to end
MAX_SOCKETS = 16_383  # of the ZeroMQ context: five a kernel and their monitors

SOCKET_OPTIONS = {zmq.RCVHWM: 0, zmq.SNDHWM: 0, zmq.LINGER: 0}

_log = logging.getLogger(__name__)


class SupervisorClosedError(HermesKernelError):
    """The registry or manager is closed."""


class Supervisor:
    """A daemon thread with an event loop and a ZeroMQ context.

    ``on_close`` callbacks run on the loop before it ends, the last one first.
    """

    def __init__(self, name: str) -> None:
        self._owner_pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closing: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._closed = threading.Event()
        self._finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._finished.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self._lock = threading.RLock()  # a collected registry may close it while this thread holds the lock
        self.zmq_context = zmq.Context()
        self.zmq_context.max_sockets = MAX_SOCKETS
        for option, value in SOCKET_OPTIONS.items():
            self.zmq_context.setsockopt(option, value)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._at_exit = _close_at_exit(weakref.ref(self))

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or belongs to a process that this one was forked from."""
        return self._closed.is_set() or self._owner_pid != os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this supervisor's thread."""
        return threading.current_thread() is self._thread

    def on_close(self, callback: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have *callback* awaited on the loop when the supervisor is closed."""
        self._closing.append(callback)

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run *work* on the loop; may be called from any thread.

        It runs in a context of its own: what the caller holds in context variables is not kept alive by it.
        Raises SupervisorClosedError.
        """
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        if self._owner_pid != os.getpid():
            work.close()
            raise SupervisorClosedError("it belongs to the parent process; make one here")
        with self._lock:
            if self._closed.is_set():
                work.close()
                raise SupervisorClosedError("it is closed; make a new one")
            self._loop.call_soon_threadsafe(self._start, work, result, context=contextvars.Context())
        return result

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await *work* on the loop, from whatever loop the caller runs on."""
        if self.is_current:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def call(self, function: Callable[[], object]) -> None:
        """Call *function* on the loop soon; nothing if the supervisor has ended."""
        with self._lock:
            if self._owner_pid == os.getpid() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(function, context=contextvars.Context())

    def close(self) -> None:
        """Run the ``on_close`` callbacks and end the thread; idempotent, from any thread but its own.

        Whoever calls it, it returns when the thread has ended, or after CLOSE_TIMEOUT seconds. In a forked
        child it does nothing: the thread, and all that it owns, are the parent's.
        """
        self._begin_close()
        if self._owner_pid == os.getpid() and not self.is_current:
            self._thread.join(CLOSE_TIMEOUT)
            if self._thread.is_alive():
                _log.error("%s did not end within %s s", self._thread.name, CLOSE_TIMEOUT)
            atexit.unregister(self._at_exit)

    async def aclose(self) -> None:
        """Close without blocking the caller's loop, which waits until the thread has ended."""
        self._begin_close()
        if self._owner_pid == os.getpid() and not self.is_current:
            finished = asyncio.wrap_future(self._finished)
            try:
                await asyncio.wait_for(asyncio.shield(finished), CLOSE_TIMEOUT)
            except TimeoutError:
                _log.error("%s did not end within %s s", self._thread.name, CLOSE_TIMEOUT)
            atexit.unregister(self._at_exit)

    def abandon(self) -> None:
        """Close without waiting: for an owner that is being collected, on whatever thread that happens.

        The end of the interpreter still waits for it.
        """
        self._begin_close()

    def _begin_close(self) -> None:
        if self._owner_pid != os.getpid():
            return
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, work: Coroutine[Any, Any, T], result: "concurrent.futures.Future[T]") -> None:
        task = self._loop.create_task(_ending_no_loop(work))

        def done(finished: "asyncio.Task[T]") -> None:
            if not result.set_running_or_notify_cancel():
                if not finished.cancelled():
                    finished.exception()  # looked at: nobody else waits for it
            elif finished.cancelled():
                result.set_exception(SupervisorClosedError("it was closed; make a new one"))
            elif (error := finished.exception()) is not None:
                result.set_exception(error.raised if isinstance(error, _ProgramEndError) else error)
            else:
                result.set_result(finished.result())

        task.add_done_callback(done)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._closed.is_set():
                self._serve()
            self._loop.run_until_complete(self._finish())
        finally:
            with self._lock:
                self._loop.close()
            self.zmq_context.destroy(linger=0)
            self._finished.set_result(None)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        except (
            SystemExit,
            KeyboardInterrupt,
        ):  # of the host's code, which asyncio passes on; kernels live here
            _log.exception("%s goes on", self._thread.name)

    async def _finish(self) -> None:
        for callback in reversed(self._closing):
            try:
                await callback()
            except Exception:  # noqa: BLE001  # the edge of the thread: the next one must still be run
                _log.exception("closing %s", self._thread.name)
        own = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not own]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._loop.shutdown_default_executor()


class _ProgramEndError(Exception):
    """Carries what would end the loop, and with it the kernels of everybody."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised
        super().__init__(repr(raised))


async def _ending_no_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ProgramEndError(error) from error


def _close_at_exit(reference: "weakref.ref[Supervisor]") -> Callable[[], None]:
    def close() -> None:
        supervisor = reference()
        if supervisor is not None:
            supervisor.close()

    atexit.register(close)
    return close
