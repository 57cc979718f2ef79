"""A log file that is made when there is something to write: most kernels have nothing to say."""

import os
import stat
from pathlib import Path
from typing import TextIO

_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFELY


class LateFile:
    """What a log handler writes to. Its *path* may change until the file is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def write(self, text: str) -> None:
        """Write text to the end of the file; nothing where there can be none."""
        if self._file is None:
            self._file = _plain_file(self.path)
        if self._file is not None:
            self._file.write(text)

    def flush(self) -> None:
        """Write out what is held back."""
        if self._file is not None:
            self._file.flush()


def _plain_file(path: Path) -> TextIO | None:
    """Open a file to write to its end; None if a cell has removed its directory or put something there.

    There is no other log that could say so.
    """
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")  # as long as the process
