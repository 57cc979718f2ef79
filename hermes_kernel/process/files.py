"""Files that are replaced whole or not at all."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .lock import SAFELY

RANDOM = 4  # bytes in the name of a file that is being written

Write = Callable[[BinaryIO], None]


def replace_file(path: Path, write: Write, *, mode: int = 0o666) -> os.stat_result:
    """Have *write* fill a file that then takes this one's place; return what it is. Raises OSError.

    *mode* is what a new file has, less the umask; one that is replaced keeps its own. Of a link it is what
    the link leads to that is replaced.
    """
    try:
        path = path.resolve()
    except RuntimeError as error:  # how Python 3.11 says that a link leads to itself
        raise OSError(str(error)) from error
    try:
        mode = path.stat().st_mode & 0o777 | 0o200
    except FileNotFoundError:
        pass
    return put_file(path, write, mode=mode, beside=path.parent)


def put_file(path: Path, write: Write, *, mode: int, beside: Path) -> os.stat_result:
    """Have *write* fill a file in the directory *beside*, which then takes the place of *path*.

    A link at that place is replaced, not followed. Raises OSError.
    """
    half = beside / f".{path.name}.{secrets.token_hex(RANDOM)}"
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, mode)
    try:
        with open(descriptor, "wb") as file:
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
