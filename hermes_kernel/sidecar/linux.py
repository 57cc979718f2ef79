"""What the sidecars ask of Linux. Standard library only, Python 3.10."""

import ctypes
import functools
import os
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MS_PRIVATE_EVERYWHERE = (1 << 18) | (1 << 14)  # MS_PRIVATE | MS_REC
ENVIRONMENT_START = 47  # of the fields of /proc/PID/stat behind the name

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set something for this process; raises OSError."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), "prctl")


def unshare(flags: int) -> None:
    """Leave the namespaces that *flags* name for new ones; raises OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount(kind: bytes | None, place: bytes, flags: int) -> None:
    """Mount a file system of *kind* at *place*, or change how it is mounted (None); raises OSError."""
    source = b"none" if kind is None else kind
    _check(_libc.mount(source, place, kind, ctypes.c_ulong(flags), None), f"mount of {os.fsdecode(place)}")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def news() -> int | None:
    """Return a descriptor that is readable when there is something to ``take_news`` of; None: there never is.

    The kernel of the system knows whom an orphan descends from.
    """
    return None


def take_news() -> None:
    """Take in who has come to those that descend from this process: here that is looked up when needed."""


def signal_at_parents_end(signum: int) -> None:
    """Have a signal sent to this process when the thread that forked it ends."""
    prctl(PR_SET_PDEATHSIG, signum)


def hide() -> None:
    """Let no process of the same user read our memory and environment."""
    prctl(PR_SET_DUMPABLE, 0)


def watch(pid: int) -> int | None:
    """Return a descriptor that is readable once the process is gone; None if there is no such thing here.

    Raises ProcessLookupError if it is gone already.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # older than Linux 5.3, or a sandbox forbids it
        return None


def started(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None if it is gone."""
    fields = _fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def children() -> list[int]:
    """Return the children of this single-threaded process, zombies too."""
    try:
        return children_of(os.getpid())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        own = str(os.getpid())
        return [pid for pid, fields in _processes() if fields[1] == own]


def children_of(pid: int) -> list[int]:
    """Return the children of a single-threaded process; raises OSError."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def descendants(roots: list[int]) -> list[tuple[int, bool]]:
    """Return *roots* and all that descends from them: each process, and whether it is stopped or a zombie."""
    below: dict[int, list[int]] = {}
    states = {}
    for pid, fields in _processes():
        below.setdefault(int(fields[1]), []).append(pid)
        states[pid] = fields[0] in "ZXTt"
    found = []
    pending = [root for root in roots if root in states]
    while pending:
        pid = pending.pop()
        found.append((pid, states[pid]))
        pending += below.get(pid, ())
    return found


def mark_environment(name: str, value: str) -> None:
    """Overwrite a variable in the environment block that others read in /proc, if it has the same length.

    A process that was forked and not executed shows the block of its ancestor; whoever looks for the marked
    processes of one kernel must find them too.
    """
    data = value.encode()
    address, size = _place_of(name)
    if size != len(data):
        raise OSError(f"{name} has no place of the right size in the environment block")
    ctypes.memmove(address, data, size)


@functools.cache
def _place_of(name: str) -> tuple[int, int]:
    """Return where the value of a variable stands in the environment block, and its size in bytes.

    It stands there in every fork of this process, too.
    """
    with open("/proc/self/environ", "rb") as file:
        block = file.read()
    head = f"{name}=".encode()
    at = block.find(b"\0" + head)
    at = 0 if block.startswith(head) else at + 1 if at >= 0 else -1
    end = block.find(b"\0", at)
    fields = _fields(os.getpid())
    if at < 0 or fields is None:
        raise OSError(f"{name} has no place in the environment block")
    at += len(head)
    return int(fields[ENVIRONMENT_START]) + at, end - at


def enter_user_and_pid_namespace() -> None:
    """Have the next child be the first of a new pid namespace; raises OSError where that is not allowed.

    User and group stay what they are: nothing about files changes.
    """
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWPID)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def see_own_processes_only() -> None:
    """In the first process of a pid namespace: give it a /proc of its own. Raises OSError."""
    unshare(CLONE_NEWNS)
    mount(None, b"/", MS_PRIVATE_EVERYWHERE)
    mount(b"proc", b"/proc", MS_NOSUID_NODEV_NOEXEC)


def forbid_new_privileges() -> None:
    """Let no program that this process starts have more rights than it."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def _processes() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _fields(int(name))) is not None:
            yield int(name), fields


def _fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat behind the name of the program, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
