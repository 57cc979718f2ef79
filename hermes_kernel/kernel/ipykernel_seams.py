"""The private names of ipykernel that our fast paths rely on, and the check that they are there.

If one is missing the kernel runs on stock paths: the shell channel has its thread, a flush waits for its
message to be sent. It is slower then, and as correct.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

from ipykernel.control import ControlThread
from ipykernel.iostream import IOPubThread
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

PLAIN = "HERMES_KERNEL_PLAIN"

# Where we rely on it, the object, the name, and (for a function) the parameters that we use.
_SEAMS: tuple[tuple[str, object, str, tuple[str, ...]], ...] = (
    ("binding the sockets", IPKernelApp, "_bind_socket", ("s", "port")),
    ("encrypting the sockets", IPKernelApp, "_apply_curve_server_options", ("socket",)),
    ("connect_request", IPKernelApp, "_ports", ()),
    ("running without subshells", IPythonKernel, "_supports_kernel_subshells", ()),
    ("aborting a stranger's cells only", IPythonKernel, "_abort_queues", ("subshell_id",)),
    ("aborting a stranger's cells only", IPythonKernel, "_send_abort_reply", ("stream", "msg", "idents")),
    ("no pause after a cell", IPythonKernel, "_execute_sleep", ()),
    ("cells in the main thread", IPythonKernel, "shell_main", ("subshell_id", "msg")),
    ("interrupting an awaiting cell", IPythonKernel, "_cancel_on_sigint", ("future",)),
    ("topics of a rebound kernel", IPythonKernel, "_topic", ("topic",)),
    *(
        ("running start-up code", IPKernelApp, f"_run_{what}", ())
        for what in ("startup_files", "exec_lines", "exec_files", "cmd_line_code", "module")
    ),
    ("the IOPub thread", IOPubThread, "__init__", ("socket", "pipe", "session")),
    ("the control thread", ControlThread, "__init__", ()),
)


def reason_for_stock_paths() -> str | None:
    """Return why this kernel must run on stock paths; None if it need not."""
    if os.environ.get(PLAIN) == "1":
        return f"{PLAIN}=1"
    missing = [
        f"{getattr(home, '__name__', home)}.{name} ({purpose})"
        for purpose, home, name, parameters in _SEAMS
        if not _fits(home, name, parameters)
    ]
    return "ipykernel has changed: " + ", ".join(missing) if missing else None


def _fits(home: object, name: str, parameters: tuple[str, ...]) -> bool:
    found: Any = inspect.getattr_static(home, name, None)
    if found is None:
        return False
    if not parameters:
        return True
    function: Callable[..., Any] = getattr(home, name)
    return set(parameters) <= set(inspect.signature(function).parameters)
