"""Files for what is too large for a result. They outlive the kernel, and go when they are old or too many."""

import contextlib
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path

import platformdirs

MAX_AGE = 7 * 24 * 3600.0  # seconds that a file stays
MAX_TOTAL = 500_000_000  # bytes of all files together; the oldest go first
SWEEP_INTERVAL = 600.0  # seconds between two looks for what must go

_OURS = re.compile(r"(?:output|display)-[0-9a-f]{12}\.\w{1,10}")
_log = logging.getLogger(__name__)


class SpillStore:
    """Keeps files in one directory, readable by its user alone. Safe from any thread.

    *directory*: where; None = ``hermes-kernel/output`` in the user's cache.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = Path(directory) if directory is not None else default_directory()
        self._lock = threading.Lock()
        self._swept_at = -SWEEP_INTERVAL

    def keep(self, name: str, data: bytes) -> str | None:
        """Write a file and return its path, None if that cannot be done: a result does not fail for it."""
        path = self._directory / name
        try:
            with self._lock:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._sweep()
                self._write(path, data)
        except OSError as error:
            _log.warning("what is too large for a result cannot be kept in %s: %s", path, error)
            return None
        return str(path)

    def _write(self, path: Path, data: bytes) -> None:
        """Put the file in place at once: whoever has been told its name reads all of it."""
        new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(new, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                new.unlink()
            raise

    def _sweep(self) -> None:
        """Remove what is too old, and the oldest of what is too much. Only what has a name of ours."""
        now = time.monotonic()
        if now - self._swept_at < SWEEP_INTERVAL:
            return
        self._swept_at = now
        oldest = time.time() - MAX_AGE
        files = []
        for entry in os.scandir(self._directory):
            info = entry.stat(follow_symlinks=False)
            if _OURS.fullmatch(entry.name) and stat.S_ISREG(info.st_mode):
                files.append((info.st_mtime, info.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for modified, size, path in sorted(files):
            if modified >= oldest and total <= MAX_TOTAL:
                break
            with contextlib.suppress(FileNotFoundError):  # another process has swept, too
                os.unlink(path)
            total -= size


def default_directory() -> Path:
    """Return where files go if nobody has said where."""
    return platformdirs.user_cache_path("hermes-kernel", appauthor=False) / "output"
