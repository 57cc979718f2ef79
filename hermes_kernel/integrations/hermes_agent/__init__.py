"""The backend of hermes-agent's ``execute_code``: its names and arguments, our kernels.

``use(Host.from_hermes_agent())``, or a ``Host`` of your own, says once whose kernels they are. Without it the
first call takes hermes-agent if it is there, else a host that has nothing. Where it is there and cannot be
imported, or not yet, each call is an error that says so: no code runs past the agent's guard.
"""

import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from ...lifecycle.info import KernelInfo
from . import codetool
from .agent import AgentModules, is_there
from .failures import log_failure
from .host import SCRIPT_TOOLS, Host
from .places import ChildPython, child_cwd, child_python, execution_mode
from .remote import (
    execute_in_remote_kernel,
    shutdown_all_remote_kernels,
    shutdown_remote_kernels_for_owner,
    shutdown_remote_kernels_where,
)
from .sessions import SessionCell, SessionKernels, as_json

__all__ = [
    "SCRIPT_TOOLS",
    "ChildPython",
    "Host",
    "SessionCell",
    "SessionKernels",
    "child_cwd",
    "child_python",
    "execute_code_schema",
    "execute_in_remote_kernel",
    "execute_in_session_kernel",
    "execution_mode",
    "handle_execute_code",
    "session_kernels",
    "shutdown_all_kernels",
    "shutdown_all_remote_kernels",
    "shutdown_kernels_for_delegated_child",
    "shutdown_kernels_for_owner",
    "shutdown_remote_kernels_for_owner",
    "shutdown_remote_kernels_where",
    "unusable_python",
    "use",
]

_log = logging.getLogger(__name__)


class _Current:
    """The kernels behind the functions of this module, which the agent calls by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: SessionKernels | None = None

    def set(self, host: Host | None) -> None:
        with self._lock:
            before, self._kernels = self._kernels, None if host is None else SessionKernels(host)
        if before is not None:
            before.end_all()

    def get(self) -> SessionKernels:
        """Return the kernels; raises ConfigError while there is a hermes-agent that cannot be imported."""
        if (known := self._kernels) is not None:
            return known
        host = _host_found()  # without the lock: what it imports may come back here
        with self._lock:
            if self._kernels is None:
                self._kernels = SessionKernels(host)
            return self._kernels

    def known(self) -> SessionKernels | None:
        return self._kernels


_current = _Current()


def use(host: Host | None) -> None:
    """Serve this host from now on, None = the one that is found; the kernels of the one before are ended."""
    _current.set(host)


def execute_in_session_kernel(
    code: str,
    *,
    task_id: str,
    mode: str,
    child_python: str,
    child_cwd: str,
    sandbox_tools: Collection[str],
    timeout: float | None,
    max_tool_calls: int | None,
    reset: bool = False,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> str:
    """Run code on its session's kernel and return the result as JSON, whatever becomes of it.

    Blocks the calling thread, on which the host is asked whose kernel it is, and *is_interrupted* at least
    every 50 ms. What goes wrong is in the JSON; only what is no Exception (KeyboardInterrupt) is passed on.
    """
    cell = SessionCell(
        code,
        task_id,
        mode,
        child_python,
        child_cwd,
        sandbox_tools,
        timeout,
        max_tool_calls,
        reset,
        is_interrupted,
    )
    return as_json(lambda: _current.get().execute(cell))


def shutdown_kernels_for_owner(session_key: str) -> None:
    """End the kernels of a session; those of its delegated children stay. Raises nothing."""
    _quietly(lambda kernels: kernels.end_owner(session_key))


def shutdown_kernels_for_delegated_child(child_id: str) -> None:
    """End the kernels of a delegated child. Raises nothing."""
    _quietly(lambda kernels: kernels.end_child(child_id))


def shutdown_all_kernels() -> None:
    """End every kernel; idempotent, also done when the process ends. Raises nothing."""
    _quietly(lambda kernels: kernels.end_all())


def session_kernels() -> tuple[KernelInfo, ...]:
    """Describe the kernels that exist now."""
    kernels = _current.known()
    return () if kernels is None else kernels.kernels()


def unusable_python(python: str) -> str | None:
    """Say why a kernel cannot run on an interpreter, None if it can; for ``child_python``.

    Raises ConfigError while there is a hermes-agent that cannot be imported.
    """
    return _current.get().unusable(python)


def execute_code_schema(enabled_tools: Collection[str] | None = None, mode: object = None) -> dict[str, Any]:
    """Return what a model is told of ``execute_code``; may be called while hermes-agent is being imported.

    *enabled_tools*: None = all that code may call; *mode*: None = that of the configuration.
    """
    return codetool.execute_code_schema(_host_described(), enabled_tools, mode)


def handle_execute_code(arguments: dict[str, Any], **options: Any) -> str:
    """Serve a model's call of ``execute_code``; of the *options* ``task_id`` and ``enabled_tools`` count."""
    task_id, enabled_tools = options.get("task_id"), options.get("enabled_tools")
    return as_json(
        lambda: codetool.CodeTool(_current.get()).handle(
            arguments, task_id=task_id, enabled_tools=enabled_tools
        )
    )


def _host_found() -> Host:
    if is_there():
        return Host.from_hermes_agent()
    _log.info("hermes-agent is not there: cells have no tools")
    return Host()


def _host_described() -> Host:
    """Return the host of which the schema tells: without its dispatcher, whose import may have led here."""
    if (known := _current.known()) is not None:
        return known.host
    return Host.of_modules(AgentModules()) if is_there() else Host()


def _quietly(act: Callable[[SessionKernels], object]) -> None:
    kernels = _current.known()
    if kernels is None:
        return
    try:
        act(kernels)
    except Exception as error:  # noqa: BLE001  # called where the agent cleans up: the rest must go on
        log_failure(_log, error, "kernels were not ended")
