"""Finds the processes of a kernel by its mark, and ends them: for what a killed warden has left.

Every program that a kernel starts inherits HERMES_KERNEL_COOKIE with a random value. A process that has
cleared its environment, or hides it, is not found: this is a second line, not the guarantee.
"""

import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

MARK = "HERMES_KERNEL_COOKIE"
QUIET = 2  # looks that find nothing new until what was found counts as all
_HEAD = f"{MARK}=".encode()


def end_marked(cookies: Collection[str], *, limit: float = 1.0) -> bool:
    """Kill every process with one of the marks; return whether none is left after *limit* seconds.

    They are stopped before they are killed: what is stopped makes nothing new.
    """
    if not cookies:
        return True
    deadline = time.monotonic() + limit
    while found := marked(cookies):
        seen: set[int] = set()
        quiet = 0
        while quiet < QUIET and time.monotonic() < deadline:
            new = set(found) - seen
            for pid in new:
                _do(pid, psutil.Process.suspend)
            quiet = 0 if new else quiet + 1
            seen |= new
            found = marked(cookies)
        for pid in seen:
            _do(pid, psutil.Process.kill)
        if time.monotonic() > deadline:
            return not marked(cookies)
        time.sleep(0.001)  # the OS takes them down; there is nothing to wait on for somebody else's child
    return True


def marked(cookies: Collection[str]) -> list[int]:
    """Return the live processes of this user that have one of the marks; never this one."""
    wanted = [_HEAD + cookie.encode() for cookie in cookies]
    read = _read_proc if sys.platform == "linux" else _read_elsewhere
    own = os.getpid()
    return [pid for pid in psutil.pids() if pid != own and _has(read, pid, wanted)]


def has_mark(pid: int, cookie: str) -> bool:
    """Whether a process of this user has the mark."""
    read = _read_proc if sys.platform == "linux" else _read_elsewhere
    return _has(read, pid, [_HEAD + cookie.encode()])


def _has(read: Callable[[int], bytes], pid: int, wanted: list[bytes]) -> bool:
    block = read(pid)
    return _HEAD in block and any(mark in block.split(b"\0") for mark in wanted)


def _read_proc(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
    except OSError:  # it has ended, or is not ours
        return b""


def _read_elsewhere(pid: int) -> bytes:
    try:
        env = psutil.Process(pid).environ()
    except psutil.Error:  # it has ended, or is not ours
        return b""
    return _HEAD + env[MARK].encode() if MARK in env else b""


def _do(pid: int, act: Callable[[psutil.Process], None]) -> None:
    try:
        act(psutil.Process(pid))
    except psutil.Error:  # it has ended, or runs as another user by now
        pass
