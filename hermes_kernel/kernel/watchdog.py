"""Ends the kernel when its host is gone, on Windows, where the host lends it a handle to wait for.

The second line: the job object in which the kernel runs ends with its host, too (``process/windows``).
Standard library only, Python 3.10.
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

WATCH = "HERMES_KERNEL_WATCH"
HOST_IS_GONE = 1  # the exit code of a kernel that ends for that reason
HANDLE_FLAG_INHERIT = 1
INFINITE = 0xFFFF_FFFF
WAIT_OBJECT_0 = 0

_log = logging.getLogger(__name__)


class Calls(Protocol):
    """What the watchdog asks of the operating system. What fails raises OSError."""

    def keep(self, handle: int) -> None:
        """Have a handle inherited by no child."""

    def wait(self, handle: int) -> None:
        """Wait, without a limit, until the process of a handle is gone."""

    def close(self, handle: int) -> None:
        """Close a handle."""

    def start_thread(self, function: Callable[[], None]) -> None:
        """Run a function on a thread that does not keep the process."""

    def end(self, code: int) -> None:
        """End this process at once."""


def end_with_host(environ: MutableMapping[str, str] | None = None, calls: Calls | None = None) -> bool:
    """End this process when its host is gone; return whether that is watched.

    The variable that names the handle is taken out of the environment first. A handle that cannot be used is
    no reason not to run. *environ* and *calls*: those of this process, if they are not given.
    """
    named = (os.environ if environ is None else environ).pop(WATCH, None)
    if named is None:
        return False
    try:
        handle = int(named)
        calls = WindowsCalls.of_this_system() if calls is None else calls
    except (ValueError, OSError) as error:
        _log.warning("the end of the host is not watched: %s", error)
        return False
    try:
        calls.keep(handle)  # first: a child that has it could be anybody's
        watching = calls
        calls.start_thread(lambda: _watch(watching, handle))
    except OSError as error:
        _log.warning("the end of the host is not watched: %s", error)
        _close(calls, handle)
        return False
    return True


def _watch(calls: Calls, handle: int) -> None:
    try:
        calls.wait(handle)
    except OSError as error:
        _log.warning("the end of the host is not watched any more: %s", error)
        _close(calls, handle)
        return
    calls.end(HOST_IS_GONE)


def _close(calls: Calls, handle: int) -> None:
    try:
        calls.close(handle)
    except OSError as error:  # it never was one
        _log.info("%s", error)


class WindowsCalls:
    """The calls, of Windows. *kernel32* has the functions, *last_error* says what failed on this thread."""

    def __init__(self, kernel32: Any, last_error: Callable[[], int]) -> None:
        self._kernel32 = kernel32
        self._last_error = last_error
        number, handle = ctypes.c_uint32, ctypes.c_void_p
        for name, arguments in (
            ("SetHandleInformation", (handle, number, number)),
            ("WaitForSingleObject", (handle, number)),
            ("CloseHandle", (handle,)),
        ):
            function = getattr(kernel32, name)
            function.restype, function.argtypes = number, arguments

    @classmethod
    def of_this_system(cls) -> "WindowsCalls":
        """Return the calls of the Windows that this process runs on; raises OSError elsewhere."""
        if sys.platform == "win32":
            return cls(ctypes.WinDLL("kernel32", use_last_error=True), ctypes.get_last_error)
        raise OSError(f"{sys.platform} is not Windows")

    def keep(self, handle: int) -> None:
        """Have a handle inherited by no child."""
        if not self._kernel32.SetHandleInformation(handle, HANDLE_FLAG_INHERIT, 0):
            raise self._failure("SetHandleInformation")

    def wait(self, handle: int) -> None:
        """Wait, without a limit, until the process of a handle is gone."""
        if self._kernel32.WaitForSingleObject(handle, INFINITE) != WAIT_OBJECT_0:
            raise self._failure("WaitForSingleObject")

    def close(self, handle: int) -> None:
        """Close a handle."""
        if not self._kernel32.CloseHandle(handle):
            raise self._failure("CloseHandle")

    def start_thread(self, function: Callable[[], None]) -> None:
        """Run a function on a thread that does not keep the process."""
        try:
            threading.Thread(target=function, name="hermes-watchdog", daemon=True).start()
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def end(self, code: int) -> None:
        """End this process at once."""
        os._exit(code)

    def _failure(self, name: str) -> OSError:
        return OSError(f"{name} fails with the Windows error {self._last_error()}")
