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

from . import lease
from .marked import has_mark
from .published import published_of
from .staging import is_lease_of_ours, runtime_base
from .zygote import start_ticks

SESSION = "session.json"
POLL = 0.02  # seconds between two looks at a process that cannot be watched


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
            found.append(_session(path, told, published_of(path.with_suffix("").name, lease.read(path))))
    return tuple(sorted(found, key=lambda session: session.started))


def end_session(session: Session, *, timeout: float) -> bool:
    """Have the warden end the tree, and wait until it is gone; return whether it is.

    The warden is signalled if its start time and the mark of its kernel are what the lease says.
    """
    deadline = time.monotonic() + timeout
    record = lease.read(session.lease_file)
    warden = _process(record, "warden")
    kernel = _process(record, "kernel")
    cookie = lease.cookie_of(record)
    if cookie is None or not warden.is_there or (kernel.is_there and not has_mark(kernel.pid, cookie)):
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


def _session(path: Path, told: Mapping[str, Any], published: Path | None) -> Session:
    owner = told.get("owner")
    owner = owner if isinstance(owner, dict) else {}
    started = told.get("started")
    return Session(
        kernel_id=path.with_suffix("").name,
        session=_text(owner.get("session")) or None,
        child=_text(owner.get("child")) or None,
        scope=_text(owner.get("scope")),
        pid=_number(told.get("pid")),
        host=_number(told.get("host")),
        started=float(started) if isinstance(started, int | float) else 0.0,
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


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else 0
