"""The private directory of a kernel: connection file, sockets, log, its own working directory.

``<runtime>/hermes-kernel/<kernel id>/``, mode 0700, in a base directory that only its user can write. The
sockets stand in it if their paths fit into 107 bytes (the limit of AF_UNIX on Linux; 103 on macOS), else in
a directory with a short name; where the user has no runtime directory, in a file system in memory. Beside
it stands its lease: made before it, removed after it, and held as long as the kernel has a warden.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import ConfigError, HermesKernelError
from ..sidecar.streams import MARK_SIZE, REST_REGION, STREAM_NAMES
from . import lease
from .launch import StreamRest
from .lease import Lease

SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
LOG_TAIL = 64 * 1024
"""Bytes of the end of a log that are kept: more than an error shows, so that secrets in it are whole."""

LANDING_SIZE = 64 * 1024
"""Bytes for what was read last from a stream's pipe, see ``hermes_kernel.kernel.rest``."""

REST_SIZE = REST_REGION - LANDING_SIZE - 3 * 8  # three numbers
"""Bytes of each stream that survive the kernel process, in the same file."""

MEMORY = "/dev/shm"
"""Where Linux has a file system in memory: sockets take no room, and on a disk an inode takes its time."""

ZYGOTE = "zygote-"
"""What the name of a zygote's directory begins with."""

_log = logging.getLogger(__name__)
_REST = struct.Struct(f"=QQ{REST_SIZE}sQ{LANDING_SIZE}s")
_MARK_AT = len(STREAM_NAMES) * REST_REGION
_LONGEST_SUFFIX = "-5"
_CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_SOCKET_FILES = tuple(f"k-{end}" for end in (*range(1, len(_CHANNELS) + 1), "t"))
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class StagingError(HermesKernelError):
    """The private directory cannot be made, or is not private."""


@dataclass(frozen=True)
class Staging:
    """The directory of one kernel; it exists from ``create`` to ``remove``."""

    path: Path
    sockets: Path
    cookie: str
    lease: Lease

    @classmethod
    def create(cls, kernel_id: str, *, socket_dir: str | None = None) -> "Staging":
        """Make the directory of a new kernel, and a mark for its processes.

        Its lease is held by this process until ``lease.close()``. Raises ConfigError for a *socket_dir* that
        cannot hold a socket, StagingError if the base directory is not the user's own or the directory
        cannot be made.
        """
        name = _directory_name(kernel_id)
        path = runtime_base() / name
        sockets = _socket_place(path, name, socket_dir)
        cookie = secrets.token_hex(16)
        try:
            taken = Lease.take(_lease_of(path))
        except OSError as error:
            raise StagingError(f"cannot make the kernel's directory {path}: {error}") from error
        made: list[Path] = []  # a directory that was there is somebody else's and stays
        try:
            taken.write({"cookie": cookie, "host": {"pid": os.getpid()}, "sockets": str(sockets.parent)})
            for directory in dict.fromkeys((path, sockets.parent)):
                directory.mkdir(mode=0o700)
                made.append(directory)
                _check_private(directory)
            (path / "ipython").mkdir(mode=0o700)
            (path / "work").mkdir(mode=0o700)
            _create(path / "kernel.rest", b"", size=_MARK_AT + MARK_SIZE)
        except (OSError, StagingError) as error:
            remove_trees(made)
            taken.remove()
            raise StagingError(f"cannot make the kernel's directory {path}: {error}") from error
        return cls(path, sockets, cookie, taken)

    def rename(self, kernel_id: str) -> "Staging":
        """Return this directory as that of another kernel; what is open in it stays open.

        Raises StagingError if there is one of that name, or the name is too long for the sockets; then this
        one is as it was.
        """
        name = _directory_name(kernel_id)
        path = self.path.with_name(name)
        if len(name) > len(self.path.name):
            raise StagingError(f"cannot make the kernel's directory {path}: its name is too long")
        try:
            taken = Lease.take(_lease_of(path))
        except OSError as error:
            raise StagingError(f"cannot make the kernel's directory {path}: {error}") from error
        moves = {self.path: path}
        if self.sockets.parent != self.path:
            short = self.sockets.parent.name != self.path.name
            moves[self.sockets.parent] = self.sockets.parent.with_name(_short_name(name) if short else name)
        sockets = moves[self.sockets.parent] / self.sockets.name
        try:
            taken.write({**lease.read(self.lease.path), "sockets": str(sockets.parent)})
            for old, new in moves.items():
                if os.path.lexists(new):
                    raise FileExistsError(f"{new} is there")
                os.rename(old, new)
        except OSError as error:
            taken.remove()
            raise StagingError(f"cannot make the kernel's directory {path}: {error}") from error
        self.lease.remove()
        return replace(self, path=path, sockets=sockets, lease=taken)

    @property
    def session_file(self) -> Path:
        """What is told about the session to other processes of the user, see ``sessions``."""
        return self.path / "session.json"

    @property
    def connection_file(self) -> Path:
        """The private connection file."""
        return self.path / "connection.json"

    @property
    def log(self) -> Path:
        """Where the kernel's log messages go, if it has any."""
        return self.path / "kernel.log"

    @property
    def work(self) -> Path:
        """The working directory of a kernel that has no other."""
        return self.path / "work"

    @property
    def ipython(self) -> Path:
        """The kernel's own IPYTHONDIR: nobody's startup files, nobody's history."""
        return self.path / "ipython"

    @property
    def tool_socket(self) -> Path:
        """Where the host listens for the tool calls of the cells."""
        return self.sockets.with_name(f"{self.sockets.name}-t")

    def ipc_addresses(self) -> dict[str, Any]:
        """Return the connection info of sockets in this directory."""
        ports = {f"{channel}_port": number for number, channel in enumerate(_CHANNELS, start=1)}
        return {"transport": "ipc", "ip": str(self.sockets), **ports}

    def write_connection_file(self, info: Mapping[str, Any]) -> None:
        """Write the connection file, readable by its user alone."""
        _create(self.connection_file, json.dumps(dict(info), indent=1).encode())

    def log_tail(self) -> str:
        """Return the end of the log; empty if there is none."""
        return _read_end(self.log, LOG_TAIL).decode("utf-8", "backslashreplace").strip()

    def rest(self, stream: str) -> StreamRest:
        """Return the end of what the kernel wrote to a stream. The kernel wrote it: no number is trusted."""
        raw = self._remains(STREAM_NAMES.index(stream) * REST_REGION, _REST.size)
        if len(raw) != _REST.size:
            return StreamRest()
        total: int
        total, from_pipe, ring, landed_at, landing = _REST.unpack(raw)
        if total >= 2**63:
            return StreamRest()
        # What was read from the pipe, and had not got into the ring when the process ended.
        landed = landing.rstrip(b"\0") if landed_at == from_pipe else b""
        if total <= REST_SIZE:
            return StreamRest(total, ring[:total], landed)
        cut = total % REST_SIZE
        return StreamRest(total, ring[cut:] + ring[:cut], landed)

    def last_cell(self) -> str | None:
        """Return the msg_id of the cell that began last; None if a cell has spoilt the file that tells."""
        raw = self._remains(_MARK_AT, MARK_SIZE)
        return raw.rstrip(b"\0").decode("utf-8", "backslashreplace") if len(raw) == MARK_SIZE else None

    def _remains(self, start: int, size: int) -> bytes:
        return _read(self.path / "kernel.rest", size, lambda _: start)

    @property
    def remains(self) -> tuple[str, ...]:
        """What is to be removed if the host cannot do it, in this order.

        Not the lease where a warden may miss a process of its tree: the sweep of a next host looks for those.
        """
        lease_file = () if sys.platform == "darwin" else (self.lease.path,)
        return tuple(map(str, dict.fromkeys((self.path, self.sockets.parent, *lease_file))))

    def record(self, **more: Any) -> None:
        """Add to what the lease's file says; raises OSError."""
        lease.write(self.lease.path, {**lease.read(self.lease.path), **more})

    def write_session(self, session: Mapping[str, Any]) -> None:
        """Write what is told about the session; raises OSError."""
        _create(self.session_file, json.dumps(dict(session)).encode())

    def remove(self) -> None:
        """Remove the directory and all that is in it, whatever the cells have made of it."""
        remove_trees(self.retire())

    def retire(self) -> tuple[Path, ...]:
        """Move the directory out of the way, so that its name is free; return what is to be removed."""
        gone = set_aside((self.path, self.sockets.parent))
        with contextlib.suppress(FileNotFoundError):
            self.lease.path.unlink()
        return gone


def set_aside(directories: Iterable[Path]) -> tuple[Path, ...]:
    """Give directories names that nobody uses; return what is to be removed."""
    gone = []
    for number, directory in enumerate(dict.fromkeys(directories)):
        aside = directory.with_name(f".{directory.name}.{os.urandom(4).hex()}{number}")
        try:
            os.rename(directory, aside)
        except FileNotFoundError:
            continue
        except OSError as error:  # something is mounted there, or the base is not writable any more
            _log.warning("cannot move %s: %s", directory, error)
            aside = directory
        gone.append(aside)
    return tuple(gone)


def directories_of(lease_file: Path) -> tuple[Path, ...]:
    """Return the directories of a kernel whose host has died.

    The name of the lease says which they are. The record, which its cells could write, is not asked.
    """
    path = lease_file.with_suffix("")
    short = (Path(place) / _short_name(path.name) for place in (MEMORY, *_short_places()))
    return tuple(directory for directory in dict.fromkeys((path, *short)) if _is_own_directory(directory))


def lost_leases(base: Path) -> list[Path]:
    """Return where the leases of kernels stood that are gone, but for their directories.

    A lease is there before its directory and goes after it, so somebody has deleted it: if that was a cell,
    its kernel may live. It does not if its sockets are there and nobody reads them. Whoever takes such a
    lease must look again.
    """
    directories: list[Path] = []  # before their leases
    with contextlib.suppress(FileNotFoundError):
        directories += filter(_is_directory_of_ours, base.iterdir())
    without = [file for file in map(_lease_of, directories) if not os.path.lexists(file)]
    return [file for file in without if is_abandoned(file)]


def is_abandoned(lease_file: Path) -> bool:
    """Whether a kernel without a lease is gone, as far as its sockets tell: they may be elsewhere."""
    places = [directory / name for directory in directories_of(lease_file) for name in _SOCKET_FILES]
    sockets = list(filter(_is_socket, places))
    return bool(sockets) and not any(map(_is_read, sockets))


def remove_sockets(lease_file: Path, record: Mapping[str, Any]) -> None:
    """Remove the sockets of a kernel whose host has died from where the caller wanted them to stand.

    The record is a file that its cells could write: nothing goes but sockets with the names that they must
    have, in a directory that must have this one, and the directory only if it held them and nothing else.
    """
    name = lease_file.with_suffix("").name
    given = record.get("sockets")
    if not isinstance(given, str) or not os.path.isabs(given) or "\0" in given:
        return
    place = Path(given)
    if place.name not in (name, _short_name(name)) or not _is_own_directory(place):
        return
    found = [place / file for file in _SOCKET_FILES if _is_socket(place / file)]
    try:
        for socket in found:
            socket.unlink()
        if found:
            place.rmdir()
    except OSError as error:
        _log.info("%s is not removed: %s", place, error)


def runtime_base() -> Path:
    """Return the directory in which kernels get theirs, made if needed.

    ``hermes-kernel`` in XDG_RUNTIME_DIR if that is this user's, else a directory of this user's among the
    temporary ones. Raises StagingError if others could write into it.
    """
    base = _base_place()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StagingError(
            f"cannot make {base}: {error}; set XDG_RUNTIME_DIR to a directory of your own"
        ) from error
    _check_private(base)
    return base


def _base_place() -> Path:
    if sys.platform == "win32":
        return Path(platformdirs.user_runtime_path("hermes-kernel", appauthor=False))
    login = _login_place()
    if login is not None:
        return login / "hermes-kernel"
    return Path(tempfile.gettempdir()) / f"hermes-kernel-{os.getuid()}"


def _login_place() -> Path | None:
    """Return the directory that this user's login has for such things, None if it has none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # The variable survives su and sudo, which makes the directory somebody else's.
    if os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        return Path(runtime)
    return None


def check_socket_dir(socket_dir: str) -> str:
    """Return *socket_dir* as an absolute path; raises ConfigError if no socket can stand in it."""
    if not isinstance(socket_dir, str | os.PathLike) or not os.fspath(socket_dir):
        raise ConfigError(f"socket_dir={socket_dir!r}: give the path of a directory")
    try:
        path = Path(os.path.abspath(os.fspath(socket_dir)))
        _short_socket_place("any", str(path))
        path.mkdir(mode=0o700, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"socket_dir={str(socket_dir)!r} cannot be used: {error}; give a directory"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"socket_dir={str(socket_dir)!r} is not writable; give one that is")
    return str(path)


def _directory_name(kernel_id: str) -> str:
    if _SAFE_NAME.fullmatch(kernel_id):
        return kernel_id
    return hashlib.sha256(kernel_id.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _socket_place(path: Path, name: str, socket_dir: str | None) -> Path:
    """Return the common start of the five socket paths."""
    if socket_dir is not None:
        roomy = Path(socket_dir) / name / "k"
        return roomy if _fits(roomy) else _short_socket_place(name, socket_dir)
    if _is_usable(MEMORY) and _login_place() is None:
        return _short_socket_place(name, MEMORY)
    if _fits(path / "k"):
        return path / "k"
    return _short_socket_place(name, *_short_places())


def _is_usable(directory: str) -> bool:
    """Whether we may make directories there that nobody else can move or remove."""
    try:
        info = os.stat(directory, follow_symlinks=False)
    except OSError:
        return False
    is_kept = info.st_uid == 0 and info.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(info.st_mode) and bool(is_kept) and _holds_sockets(directory)


@functools.cache
def _holds_sockets(directory: str) -> bool:
    """Whether a socket can stand in a directory of ours there: a sandbox may forbid it. Tried once."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hk-probe-", dir=directory) as place,
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.bind(os.path.join(place, "k"))
    except OSError:
        return False
    return True


def _short_places() -> tuple[str, ...]:
    return (tempfile.gettempdir(), "/tmp")


def _short_name(name: str) -> str:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return f"hk-{user}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _short_socket_place(name: str, *directories: str) -> Path:
    for directory in directories:
        place = Path(directory) / _short_name(name) / "k"
        if _fits(place):
            return place
    raise ConfigError(
        f"socket_dir={directories[0]!r} is too long: a socket's path may have {SOCKET_PATH_LIMIT} bytes and "
        f"would have {_size(place)}; give a shorter directory"
    )


def _fits(place: Path) -> bool:
    return _size(place) <= SOCKET_PATH_LIMIT


def _size(place: Path) -> int:
    return len(os.fsencode(place)) + len(_LONGEST_SUFFIX)


def _lease_of(path: Path) -> Path:
    return path.with_name(path.name + lease.SUFFIX)


def is_lease_of_ours(path: Path) -> bool:
    """Whether a file has the name of a kernel's lease."""
    name = path.name.removesuffix(lease.SUFFIX)
    return name + lease.SUFFIX == path.name and _SAFE_NAME.fullmatch(name) is not None


def _is_directory_of_ours(path: Path) -> bool:
    """Whether a directory has the name of a kernel's; that of a zygote has no sockets that could tell."""
    is_ours = _SAFE_NAME.fullmatch(path.name) is not None and not path.name.startswith(ZYGOTE)
    return is_ours and path.suffix != lease.SUFFIX and _is_own_directory(path)


def _is_read(path: Path) -> bool:
    """Whether somebody may read a socket: that nobody does is said by the system."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # many wait already, or it is locked
            return True
    return True


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:
        return False


def _is_own_directory(path: Path) -> bool:
    try:
        info = path.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(info.st_mode) and (sys.platform == "win32" or info.st_uid == os.getuid())


def _check_private(path: Path) -> None:
    """Raise StagingError unless *path* is a real directory of this user that no other can write."""
    if sys.platform == "win32":
        return  # the runtime directory is in the user's profile, which has the right access list
    own = os.getuid()
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != own or info.st_mode & 0o077:
        raise StagingError(
            f"{path} is not a private directory of this user (wanted: owner {own}, mode 0700); "
            "remove it, or set XDG_RUNTIME_DIR to a directory of your own"
        )
    parent = path.parent.lstat()
    open_to_others = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    if parent.st_uid not in (own, 0) or open_to_others:
        raise StagingError(
            f"{path.parent} belongs to another user or can be written by others; "
            "set XDG_RUNTIME_DIR to a directory of your own"
        )


def _create(path: Path, content: bytes, *, size: int | None = None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        if size is not None:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # a hole in a mapped file is a SIGBUS on a full disk
                os.posix_fallocate(descriptor, 0, size)


def _read_end(path: Path, size: int) -> bytes:
    return _read(path, size, lambda length: max(0, length - size))


def _read(path: Path, size: int, start: Callable[[int], int]) -> bytes:
    """Return at most *size* bytes of a plain file, from where *start* says for its length on.

    Nothing if a cell has put something else in its place.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return b""
        file.seek(start(info.st_size))
        return file.read(size)


def remove_trees(directories: Iterable[Path]) -> None:
    """Remove directories with all that is in them; what cannot be removed is logged."""
    for directory in directories:
        if directory.is_symlink():  # somebody has put it there; what it points to is nobody's to remove
            directory.unlink()
            continue
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            continue
        except (OSError, RecursionError) as error:  # locked by a cell, or deeper than Python can follow
            _remove_by_tools(directory, error)


def _remove_by_tools(directory: Path, error: Exception) -> None:
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):
        if shutil.which(command[0]) is not None:
            subprocess.run(
                [*command, str(directory)], stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
    if os.path.lexists(directory):
        _log.warning("cannot remove %s: %s", directory, error)
