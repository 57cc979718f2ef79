"""The connection file of a live kernel for people: one that Jupyter's front ends find and may read.

It lies where a Jupyter server looks for kernels that others have started, under the name of a kernel spec
whose provisioner starts nothing. It holds no owner secret: who has it can run cells, and not end or
interrupt what is the owner's.
"""

import ipaddress
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jupyter_core.paths import jupyter_runtime_dir

from .files import RANDOM, put_file
from .lock import SAFELY, is_own
from .staging import SOCKET_PATH_LIMIT

SPEC = "hermes-live"
"""The kernel spec that a front end sees such a kernel under."""

DIRECTORY = "external_kernels"
"""What jupyter_server calls the directory by default, in its runtime directory."""

_PREFIX, _SUFFIX = "hermes-", ".json"
_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
_MAX_SIZE = 16 * 1024
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_log = logging.getLogger(__name__)


def publish_dir() -> Path:
    """Return where the front ends of this user look."""
    return Path(jupyter_runtime_dir()) / DIRECTORY


def place_of(directory: str | Path, name: str) -> Path:
    """Return where the kernel whose private directory has this *name* is published."""
    return Path(directory).absolute() / f"{_PREFIX}{name}{_SUFFIX}"


def publish(path: Path, info: Mapping[str, Any]) -> None:
    """Write a connection file, whole or not at all and readable by its user alone.

    Raises OSError, also if others could put another file in its place.
    """
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # Jupyter makes it as private as this
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _check_own(path.parent)
    # Not beside it: a front end takes every file of that directory for a kernel.
    content = json.dumps({**info, "kernel_name": SPEC}, indent=1).encode()
    put_file(path, lambda file: _put(file, content), mode=0o600, beside=path.parent.parent)


def _put(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def withdraw(path: Path | None) -> None:
    """Remove the file, if it is there."""
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is not removed: %s", path, error)


def withdraw_halves(name: str, record: Mapping[str, Any]) -> None:
    """Remove what a host that was killed while it published a kernel has left of that."""
    path = _place_in(name, record)
    if path is None:
        return
    half = re.compile(re.escape(f".{path.name}.") + f"[0-9a-f]{{{2 * RANDOM}}}")
    try:
        found = [entry for entry in path.parent.parent.iterdir() if half.fullmatch(entry.name)]
        for entry in found:
            if stat.S_ISREG(entry.lstat().st_mode):
                entry.unlink()
    except OSError as error:
        _log.info("nothing is removed beside %s: %s", path.parent, error)


def _place_in(name: str, record: Mapping[str, Any]) -> Path | None:
    """Return where a record says that a kernel is published, None if that cannot be."""
    given = record.get("published")
    if not isinstance(given, str) or not os.path.isabs(given) or "\0" in given:
        return None
    path = Path(given)
    return path if path == place_of(path.parent, name) and path.parent.name == DIRECTORY else None


def published_of(name: str, record: Mapping[str, Any]) -> Path | None:
    """Return the published file of the kernel whose private directory has this *name*, None if it has none.

    The record is a file that its cells could write: only a file with the name that it must have counts, and
    only if it is of the kind that ``publish`` writes. Whether one can connect is for ``read_published``.
    """
    path = _place_in(name, record)
    return path if path is not None and _content(path) is not None else None


def read_published(path: Path) -> dict[str, Any] | None:
    """Return the connection of a published file, None if it is not what ``publish`` writes.

    A cell may have put anything in its place, also since somebody looked: whoever connects takes what this
    returns, and does not read the file again. No link is followed; every part is one that a client can use.
    """
    content = _content(path)
    if content is None or not all(is_one(content.get(key)) for key, is_one in _PARTS.items()):
        return None
    return {key: content[key] for key in _PARTS} if _is_address(content) else None


def _content(path: Path) -> dict[str, Any] | None:
    """Return what a file of our kind holds; None if it is none, or not this user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFELY)
    except (OSError, ValueError):  # ValueError: a lone surrogate, which no path has
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or not is_own(info):
            return None
        content = json.loads(os.read(descriptor, _MAX_SIZE))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return content if isinstance(content, dict) and content.get("kernel_name") == SPEC else None


def _is_address(content: Mapping[str, Any]) -> bool:
    """Whether there can be sockets there: a path that is not too long, or an address of IPv4."""
    ip = content["ip"]
    if content["transport"] == "ipc":
        longest = f"{ip}-{max(content[port] for port in _PORTS)}"
        return bool(ip) and len(os.fsencode(longest)) <= SOCKET_PATH_LIMIT
    try:
        ipaddress.IPv4Address(ip)
    except ValueError:
        return False
    return True


def _is_port(value: object) -> bool:
    return type(value) is int and 0 < value <= 65_535


def _is_text(value: object) -> bool:
    """Whether it is a text that can be a path, too: without NUL and half a character pair."""
    return isinstance(value, str) and "\0" not in value and not _LONE_SURROGATE.search(value)


_PARTS: dict[str, Callable[[Any], bool]] = {
    "kernel_name": lambda value: value == SPEC,
    "transport": lambda value: value in ("ipc", "tcp"),
    "ip": _is_text,
    "key": lambda value: isinstance(value, str) and value.isascii(),
    "signature_scheme": lambda value: value == "hmac-sha256",
    **dict.fromkeys(_PORTS, _is_port),
}


def _check_own(directory: Path) -> None:
    if sys.platform == "win32":
        return  # the runtime directory is in the user's profile, which has the right access list
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or not is_own(info) or info.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory that only this user can write")
    above = directory.parent.stat()
    open_to_others = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    if above.st_uid not in (os.getuid(), 0) or open_to_others:
        raise PermissionError(f"{directory.parent} belongs to another user or can be written by others")
