"""Files that are replaced whole or not at all."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], None], *, mode: int = 0o666) -> os.stat_result:
    """Have *write* fill a file that then takes this one's place; return what it is. Raises OSError.

    *mode* is what a new file has, less the umask; one that is replaced keeps its own.
    """
    try:
        path = path.resolve()
    except RuntimeError as error:  # how Python 3.11 says that a link leads to itself
        raise OSError(str(error)) from error
    try:
        mode = path.stat().st_mode & 0o777 | 0o200
    except FileNotFoundError:
        pass
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with open(descriptor, "wb") as file:
            write(file)
        written = beside.stat()  # once it is closed: some file systems note the time of the last write then
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return written


def text_bytes(text: str) -> bytes:
    """Return JSON text as UTF-8. Half of a character pair is not, but its escape is good JSON."""
    return text.encode("utf-8", "backslashreplace")
