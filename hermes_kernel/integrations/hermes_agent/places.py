"""Where and by what the code of an agent runs: its mode, its interpreter, its directory."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .failures import log_failure

PROJECT, STRICT = "project", "strict"
MODES = (PROJECT, STRICT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChildPython:
    """An interpreter, and why it is not the one of the project, if there was one that cannot be used."""

    path: str
    reason: str | None = None


def execution_mode(value: object) -> str:
    """Return the mode that a configuration names, ``project`` if it names none."""
    if isinstance(value, str) and value.strip().lower() in MODES:
        return value.strip().lower()
    _log.warning("code_execution.mode=%r is not one of %s: it is taken for %s", value, MODES, PROJECT)
    return PROJECT


def child_python(
    mode: str, environ: Mapping[str, str], unusable: Callable[[str], str | None] = lambda _path: None
) -> ChildPython:
    """Return the interpreter of the active environment in project mode, else the host's own.

    ``unusable(path)`` says why a kernel cannot run on an interpreter, None if it can. The first one that is
    there counts: if it cannot be used the host's own is, and no other environment's is looked for.
    """
    if mode == PROJECT:
        for path in _interpreters(environ):
            reason = unusable(path)
            return ChildPython(path) if reason is None else ChildPython(sys.executable, reason)
    return ChildPython(sys.executable)


def child_cwd(
    mode: str,
    task_id: str,
    environ: Mapping[str, str],
    *,
    recorded: Callable[[str], str | None] = lambda _task_id: None,
    registered: Callable[[str], str | None] = lambda _task_id: None,
) -> str:
    """Return the directory of a call, ``""`` for the kernel's own.

    In project mode the first of these that is a directory: where the session's shell is, what was registered
    for it, ``TERMINAL_CWD``, the host's working directory.
    """
    if mode != PROJECT:
        return ""
    rungs: tuple[Callable[[], str | None], ...] = (
        lambda: recorded(task_id) if task_id else None,
        lambda: registered(task_id) if task_id else None,
        lambda: os.path.expanduser(environ.get("TERMINAL_CWD", "").strip()),
        os.getcwd,
    )
    for rung in rungs:
        try:
            place = rung()
        except Exception as error:  # noqa: BLE001  # the host's own code, or a directory that is gone
            log_failure(_log, error, "a directory is not known")
            continue
        if place and os.path.isdir(place):
            return place
    return ""


def _interpreters(environ: Mapping[str, str]) -> Iterator[str]:
    windows = sys.platform == "win32"
    names = ("python.exe", "python3.exe") if windows else ("python", "python3")
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if root := environ.get(variable, "").strip():
            for name in names:
                path = Path(root, "Scripts" if windows else "bin", name)
                if path.is_file() and os.access(path, os.X_OK):
                    yield str(path)
