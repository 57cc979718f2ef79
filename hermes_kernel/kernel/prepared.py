"""Kernels that are forked of what has been made before: the whole application, or at least the imports.

What is here runs in a zygote (``hermes_kernel.sidecar.zygote``) until the fork, and in the kernel from then
on. Nothing may exist before that a fork would break or share: no thread, no ZeroMQ context, no event loop,
no socket. ``reason_not_to_fork`` looks for them; with one of them kernels are forked of the imports alone.
"""

import atexit
import contextlib
import fnmatch
import gc
import importlib
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ..sidecar.birth import Start
from ..sidecar.streams import STREAMS
from ..sidecar.system import system
from .app import HermesKernelApp, main, make_app, run
from .rehearsal import rehearse
from .shell import exit_code_of, plain_traceback

# What a first cell would import, beside what the application has.
LAZY = (
    "IPython.core.async_helpers",
    "IPython.core.autocall",
    "IPython.core.hooks",
    "IPython.core.logger",
    "IPython.core.magics.script",
    "IPython.core.payloadpage",
    "IPython.lib.pretty",
    "tornado.platform.asyncio",
    "zmq.eventloop.zmqstream",
)
MARK = "HERMES_KERNEL_COOKIE"
FORBIDDEN = ("anon_inode:", "socket:")
"""What no descriptor above the standard ones may be, but those that the zygote itself has."""


class ImportedKernel:
    """A kernel whose modules are there; the rest is made when it begins."""

    how = "fork"
    greets = False

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def rehearse(self) -> None:
        """Nothing: there is no kernel yet."""

    def bind(self, place: str, directory: str, *, waits: bool) -> None:
        """Nothing: it is bound when it begins."""

    def begin(self, start: Start) -> int:
        """Be this kernel until it ends; return the exit code of the process."""
        become(start)
        return to_the_end(lambda: main(list(start.arguments[2:])))


class BuiltKernel:
    """A kernel whose application, kernel and shell are there before the fork."""

    how = "fork"
    note: str | None = None
    greets = True

    def __init__(self, app: HermesKernelApp) -> None:
        self._app = app
        self._is_bound = False

    def rehearse(self) -> None:
        """Answer once: the memory that an answer touches is this process's own then."""
        rehearse(self._app)

    def bind(self, place: str, directory: str, *, waits: bool) -> None:
        """Open the sockets at *place*, and start the threads that serve them."""
        self._app.stdio = STREAMS
        self._app.bind_in(Path(place), Path(directory), waits=waits)
        self._is_bound = True
        if waits:
            rehearse(self._app)

    def begin(self, start: Start) -> int:
        """Be this kernel until it ends; return the exit code of the process."""
        return to_the_end(lambda: self._run(start))

    def _run(self, start: Start) -> int:
        self._app.connection_file = start.arguments[start.arguments.index("-f") + 1]
        self._app.init_connection_file()
        if self._is_bound:
            self._app.greet()
        become(start)
        if not self._is_bound:
            self._app.bind()
        self._app.take_over()
        return run(self._app)


def prepare() -> "BuiltKernel | ImportedKernel":
    """Make what the kernels of this process are forked of."""
    for name in LAZY:
        with contextlib.suppress(ImportError):  # of another version: then a first cell imports what it needs
            importlib.import_module(name)
    app = make_app(())
    if app.degraded is not None:
        HermesKernelApp.clear_instance()
        return ImportedKernel()  # the kernel says itself that it runs on stock paths
    before = inherited_descriptors()
    try:
        app.build([])
        warm(app)
        reason = reason_not_to_fork(before)
    except Exception as error:  # noqa: BLE001  # whatever has changed in ipykernel: there is a slower way
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        return BuiltKernel(app)
    return ImportedKernel(f"only the imports are shared: {reason}")


def warm(app: HermesKernelApp) -> None:
    """Let what a first cell makes once be made now, and leave no trace of it in the session."""
    rehearse(app)
    for pattern in ("*.py", "*.ipy"):  # start-up files are looked for
        fnmatch.filter([], pattern)
    try:
        raise ValueError("warm")
    except ValueError as error:
        plain_traceback(error, error.__traceback__)


def inherited_descriptors() -> set[str]:
    """Return the descriptors that the zygote has by itself."""
    return set(os.listdir("/proc/self/fd"))


def reason_not_to_fork(before: set[str]) -> str | None:
    """Return what of this process a fork would break, None if nothing."""
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        return f"there are threads: {', '.join(thread.name for thread in threading.enumerate())}"
    if zmq.Context._instance is not None:
        return "there is a ZeroMQ context"
    for number in sorted(inherited_descriptors() - before):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # it was the listing itself
            continue
        if target.startswith(FORBIDDEN):
            return f"descriptor {number} is {target}"
    return None


def become(start: Start) -> None:
    """Take over the environment, and forget what was derived from that of the zygote."""
    try:
        system.mark_environment(MARK, start.env[MARK])
    except (OSError, KeyError):  # then what this kernel leaves is found by its warden alone
        traceback.print_exc(file=sys.__stderr__)
    os.environ.clear()
    os.environ.update(start.env)
    time.tzset()
    tempfile.tempdir = None
    random.seed()
    sys.argv[:] = start.arguments
    sys.orig_argv[:] = [*start.interpreter, *start.arguments]
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)
    gc.enable()


def to_the_end(serve: Callable[[], int]) -> int:
    """Run a kernel as an interpreter would: wait for its threads, then do what is registered for its end."""
    try:
        code = serve()
    except SystemExit as end:
        code = exit_code_of(end)
    except BaseException:  # noqa: BLE001  # the edge of the process: read by its warden
        traceback.print_exc(file=sys.__stderr__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return int(code)
