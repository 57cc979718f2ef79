"""The live kernels of this user, whichever process has started them: found by their leases.

What is told about a session comes from its private directory, which its cells can write: it is shown, and
nothing is done because of it. Whom to signal comes from the lease's record, and is checked against the
processes themselves.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from . import lease
from .marked import has_mark
from .published import published_of, read_published
from .staging import is_lease_of_ours, runtime_base
from .zygote import ZYGOTE_MODULE, start_ticks

SESSION = "session.json"
POLL = 0.02  # seconds between two looks at a process that cannot be watched
FAR_FUTURE = 2**40  # seconds since the epoch from which a number is no time


@dataclass(frozen=True)
class Session:
    """One live kernel. ``started`` is in seconds since the epoch, pids are 0 where they are not known.

    ``published``: its connection file for people, if it has one.
    """

    kernel_id: str
    session: str | None
    child: str | None
    scope: str
    pid: int
    host: int
    started: float
    python: str
    cwd: str
    isolation: str
    start_method: str
    lease_file: Path
    published: Path | None = None

    @property
    def owner(self) -> str:
        """The owner as one word: session, child and scope; "-" for a kernel that has none."""
        if self.session is None:
            return "-"
        child = "" if self.child is None else f"/{self.child}"
        return f"{self.session}{child}" + (f"@{self.scope}" if self.scope else "")

    def is_called(self, name: str) -> bool:
        """Whether *name* means this one: its owner, its owner's session, or the start of its id."""
        is_id = len(name) >= 4 and self.kernel_id.startswith(name)
        return is_id or (self.session is not None and name in (self.owner, self.session))


@dataclass(frozen=True)
class _Process:
    pid: int
    started: int

    @property
    def is_there(self) -> bool:
        return self.pid > 1 and self.started > 0 and start_ticks(self.pid) == self.started


def live_sessions() -> tuple[Session, ...]:
    """Return the live kernels of this user, the oldest first; raises StagingError."""
    found = []
    for path in filter(is_lease_of_ours, lease.leases(runtime_base())):
        told = lease.read(path.with_suffix("") / SESSION)
        if "kernel_id" in told and lease.is_held(path):
            found.append(_session(path, told, _published(path)))
    return tuple(sorted(found, key=lambda session: session.started))


def end_session(session: Session, *, timeout: float) -> bool:
    """Have the warden end the tree, and wait until it is gone; return whether it is.

    It is signalled if it is a warden, and if its start time and the mark of its kernel, as long as that is
    there, are what the lease says.
    """
    deadline = time.monotonic() + timeout
    record = lease.read(session.lease_file)
    warden = _process(record, "warden")
    kernel = _process(record, "kernel")
    cookie = lease.cookie_of(record)
    is_marked = cookie is not None and (not kernel.is_there or has_mark(kernel.pid, cookie))
    if not (is_marked and warden.is_there and _is_warden(warden.pid, session.lease_file)):
        return not lease.is_held(session.lease_file)
    watch = _watch(warden.pid)
    try:
        if warden.is_there:  # still, now that its number cannot become another's
            _signal(warden.pid, watch)
        if watch is not None:
            return bool(select.select([watch], [], [], max(0.0, deadline - time.monotonic()))[0])
        while lease.is_held(session.lease_file) and time.monotonic() < deadline:
            time.sleep(POLL)
        return not lease.is_held(session.lease_file)
    finally:
        if watch is not None:
            os.close(watch)


def _is_warden(pid: int, lease_file: Path) -> bool:
    """Whether a process is a warden and, as far as it shows that, the one that holds the lease.

    A cell can write what the record says, and what it writes there must not end another program.
    """
    try:
        argv = psutil.Process(pid).cmdline()
    except psutil.Error:  # it has just ended, or is somebody else's
        return False
    return ZYGOTE_MODULE in argv and _has_open(pid, lease_file) is not False  # a warden is a zygote's fork


def _has_open(pid: int, path: Path) -> bool | None:
    """Whether a process has a file open; None if it does not show that, as a warden to its own user."""
    try:
        wanted = path.stat(follow_symlinks=False)
        return any(_is_file(each, wanted) for each in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it hides, or this is not Linux
        return None


def _is_file(descriptor: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), wanted)
    except OSError:  # it was closed meanwhile, or leads to what is gone
        return False


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, not allowed, or it has just ended
        return None


def _signal(pid: int, watch: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        if watch is not None:
            for signum in (signal.SIGTERM, signal.SIGCONT):  # a cell may have stopped it
                signal.pidfd_send_signal(watch, signum)
        else:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)


def _process(record: Mapping[str, Any], name: str) -> _Process:
    told = record.get(name)
    if not isinstance(told, dict):
        return _Process(0, 0)
    return _Process(_number(told.get("pid")), _number(told.get("started")))


def _published(lease_file: Path) -> Path | None:
    """Return the connection file for people, None if there is none that a client can use."""
    path = published_of(lease_file.with_suffix("").name, lease.read(lease_file))
    return path if path is not None and read_published(path) is not None else None


def _session(path: Path, told: Mapping[str, Any], published: Path | None) -> Session:
    owner = told.get("owner")
    owner = owner if isinstance(owner, dict) else {}
    return Session(
        kernel_id=path.with_suffix("").name,
        session=_text(owner.get("session")) or None,
        child=_text(owner.get("child")) or None,
        scope=_text(owner.get("scope")),
        pid=_number(told.get("pid")),
        host=_number(told.get("host")),
        started=_seconds(told.get("started")),
        python=_text(told.get("python")),
        cwd=_text(told.get("cwd")),
        isolation=_text(told.get("isolation")),
        start_method=_text(told.get("start_method")),
        lease_file=path,
        published=published,
    )


def _text(value: object) -> str:
    """Return a text that can be shown on one line of a terminal."""
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _seconds(value: object) -> float:
    """Return a time since the epoch; 0 for what cannot be one: NaN is no JSON, and 10**400 is no float."""
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < FAR_FUTURE
    return float(value) if is_time else 0.0  # type: ignore[arg-type]


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else 0
