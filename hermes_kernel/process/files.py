"""Files that are replaced whole or not at all."""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .lock import SAFELY

RANDOM = 4  # bytes in the name of a file that is being written

Write = Callable[[BinaryIO], None]


def replace_file(path: Path, write: Write, *, mode: int = 0o666, keeps_mode: bool = True) -> os.stat_result:
    """Have *write* fill a file that then takes this one's place; return what it is. Raises OSError.

    *mode* is what a new file has, less the umask; one that is replaced keeps its own (*keeps_mode*). Of a
    link it is what the link leads to that is replaced.
    """
    path = _target(path)
    own = _mode_of(path) if keeps_mode else None
    if own is None:
        return put_file(path, write, mode=mode, beside=path.parent)
    return put_file(path, write, mode=own, beside=path.parent, ignores_umask=True)


def check_replaceable(path: Path) -> None:
    """Raise the OSError that ``replace_file`` would: a file is made beside this one, and removed."""
    path = _target(path)
    half = _half(path, path.parent)
    os.close(_made(half, 0o600))
    half.unlink()


def put_file(
    path: Path, write: Write, *, mode: int, beside: Path, ignores_umask: bool = False
) -> os.stat_result:
    """Have *write* fill a file in the directory *beside*, which then takes the place of *path*.

    A link at that place is replaced, not followed. Raises OSError.
    """
    half = _half(path, beside)
    descriptor = _made(half, mode)
    try:
        with open(descriptor, "wb") as file:
            if ignores_umask and sys.platform != "win32":
                os.fchmod(descriptor, mode)
            write(file)
        written = half.stat()  # once it is closed: some file systems note the time of the last write then
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    return written


def text_bytes(text: str) -> bytes:
    """Return JSON text as UTF-8. Half of a character pair is not, but its escape is good JSON."""
    return text.encode("utf-8", "backslashreplace")


def _target(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:  # how Python 3.11 says that a link leads to itself
        raise OSError(str(error)) from error


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def _half(path: Path, beside: Path) -> Path:
    return beside / f".{path.name}.{secrets.token_hex(RANDOM)}"


def _made(half: Path, mode: int) -> int:
    return os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, mode)
