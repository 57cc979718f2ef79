"""What a kernel could leave behind, looked for from outside."""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

COOKIE = "HERMES_KERNEL_COOKIE"


def kernels_of(runtime: Path) -> list[Path]:
    """Directories of kernels below a runtime directory."""
    base = runtime / "hermes-kernel"
    return sorted(base.iterdir()) if base.exists() else []


def short_socket_directories(place: str | None = None) -> set[str]:
    user = f"hk-{os.getuid()}-"
    entries = Path(place or tempfile.gettempdir()).iterdir()
    return {entry.name for entry in entries if entry.name.startswith(user)}


def marked_processes(ipython_under: str) -> list[psutil.Process]:
    """Processes that run in a kernel's environment, one whose directory lies below *ipython_under*."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if COOKIE in env and env.get("IPYTHONDIR", "").startswith(ipython_under):
            found.append(process)
    return found


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def zombies() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


def descriptors() -> int:
    return psutil.Process().num_fds() if sys.platform != "win32" else 0


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def eventually(condition: Callable[[], object], *, within: float = 5.0) -> bool:
    """Whether *condition* comes to hold. For the OS alone: it may take its time to tell of an end."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
