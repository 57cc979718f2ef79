"""Who lives: for each kernel a lock on a file, held by its warden, and in it what would be left behind.

A lock ends with the last process that holds it, whatever ends that; no clock and no number takes part.
"""

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lock import SAFELY, is_own, lock

SUFFIX = ".lease"
MAX_RECORD = 64 * 1024
TRIES = 8  # to make a lease that others take away
NOBODY = "0" * 32
"""The mark of a warden that was forked: it is no kernel's, see ``hermes_kernel.sidecar.zygote``."""

_COOKIE = re.compile(r"[0-9a-f]{32}")


class LeaseHeldError(OSError):
    """Somebody who lives holds the lease."""


@dataclass(frozen=True)
class Lease:
    """A lease that this process holds, until it hands over the descriptor and closes it."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> "Lease":
        """Make the file, with its lock; raises LeaseHeldError if somebody else has that, OSError.

        Nobody is waited for: whoever has the lock may be a cell that keeps it.
        """
        for _ in range(TRIES):
            descriptor = _take_once(path)
            if descriptor is None:
                continue
            if _is_at(descriptor, path):
                return cls(path, descriptor)
            os.close(descriptor)
        raise LeaseHeldError(f"{path} is held: others take it or its lock each time")

    @classmethod
    def take_dead(cls, path: Path) -> "Lease | None":
        """Take over the lease of somebody who has ended; None if there is none, or it is held."""
        try:
            descriptor = os.open(path, os.O_RDWR | SAFELY)
        except OSError:
            return None
        info = os.fstat(descriptor)
        own = stat.S_ISREG(info.st_mode) and is_own(info)
        if own and lock(descriptor) and _is_at(descriptor, path):
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def write(self, record: Mapping[str, Any]) -> None:
        """Write what would be left behind; raises OSError."""
        write(self.path, record)

    def close(self) -> None:
        """Let go of the descriptor; whoever has it too still holds the lease."""
        os.close(self.descriptor)

    def remove(self) -> None:
        """Remove the file, and let go."""
        if sys.platform == "win32":  # where a file that is open cannot be removed
            self.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        if sys.platform != "win32":
            self.close()


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the content of a lease's file, not the file; raises OSError."""
    data = json.dumps(dict(record)).encode()
    descriptor = os.open(path, os.O_WRONLY | SAFELY)
    try:
        os.write(descriptor, data)
        os.ftruncate(descriptor, len(data))  # afterwards: to free a block and take it again costs more
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """Return what a lease's file holds, nothing if it is no record. A cell may have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFELY)
        try:
            record = json.loads(os.read(descriptor, MAX_RECORD))
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def is_held(path: Path) -> bool:
    """Whether somebody who lives holds the lease."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFELY)
    except OSError:
        return False
    try:
        return not lock(descriptor)
    finally:
        os.close(descriptor)


def leases(base: Path) -> Iterator[Path]:
    """Return the leases in a directory."""
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(entry for entry in base.iterdir() if entry.name.endswith(SUFFIX))


def cookie_of(record: Mapping[str, Any]) -> str | None:
    """Return the mark of a kernel's processes, None if the record has none that can be one."""
    cookie = record.get("cookie")
    is_one = isinstance(cookie, str) and _COOKIE.fullmatch(cookie) is not None and cookie != NOBODY
    return cookie if is_one else None


def _take_once(path: Path) -> int | None:
    """Return the locked file, new or of somebody who has ended; None if it has just been taken away.

    Raises LeaseHeldError if somebody who lives has it, OSError.
    """
    try:
        return _make(path)
    except FileExistsError:
        pass  # somebody has it, or had it
    try:
        descriptor = os.open(path, os.O_RDWR | SAFELY)
    except FileNotFoundError:
        return None
    if not lock(descriptor):
        os.close(descriptor)
        raise LeaseHeldError(f"{path} is held: that kernel lives")
    return descriptor


if sys.platform == "win32":  # where a file that is open cannot be given another name

    def _make(path: Path) -> int | None:
        """Make the file and lock it; None if somebody was faster. Raises FileExistsError, OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)
        if lock(descriptor):
            return descriptor
        os.close(descriptor)
        return None

else:

    def _make(path: Path) -> int | None:
        """Make the file, which has its lock before its name: a sweep takes for dead what has none.

        None if somebody was faster with the lock, or has removed it. Raises FileExistsError, OSError.
        """
        # If this process ends here, the next sweep removes what has such a name.
        aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}0")
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY, 0o600)
        is_made = False
        try:
            if lock(descriptor):
                os.link(aside, path)
                is_made = True
        except FileNotFoundError:  # a sweep has taken it for a leftover
            return None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
            if not is_made:
                os.close(descriptor)
        return descriptor if is_made else None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the file that is open is the one that has the name."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
