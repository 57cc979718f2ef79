"""Writes sessions as notebooks while they run."""

import asyncio
import hashlib
import logging
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ..cell.toolrecord import RecordedCatalogue
from ..cell.transcript import HumanCell, RanCell, SessionNotebook, Transcript
from ..errors import ConfigError
from ..lifecycle.key import Owner
from ..process.files import replace_file, text_bytes

WRITE_TIMEOUT = 0.5  # seconds that a result waits for its transcript; the writing goes on
CLOSE_TIMEOUT = 10.0  # seconds that the registry's end waits for it
PRIVATE = 0o600
COPY_SIZE = 1024 * 1024
MOST_WRITERS = 200  # notebooks that are known at a time, besides those that have something to write
MOST_NAMES = 1000  # tried for a notebook that somebody else has changed

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 80
_log = logging.getLogger(__name__)


class SessionWriter:
    """One notebook and its file. It lives on the supervisor's loop; what takes time is done on a thread.

    Each time the file is replaced by a copy that has the new cells too: a reader finds a whole notebook at
    every moment. A file that somebody else has changed since is left to them, and the session goes on in
    another one. *owner*: whose cells alone a file that is continued may have, None for everybody's.
    """

    def __init__(self, path: Path, *, record_tools: bool, owner: Owner | None = None) -> None:
        self.path = path
        self.problem: str | None = None
        self._owner = owner
        self._notebook = SessionNotebook(record_tools)
        self._is_open = False
        self._file = _File()
        self._added: deque[tuple[RanCell | HumanCell, RecordedCatalogue | None]] = deque()
        self._writing = asyncio.Lock()

    @property
    def has_all(self) -> bool:
        """Whether all is in the file that was added."""
        return not (self._added or self._notebook.pending or self._writing.locked())

    def add(self, cell: RanCell | HumanCell, tools: RecordedCatalogue | None = None) -> None:
        """Add a cell, and the catalogue of its tools if its calls are recorded."""
        self._added.append((cell, tools))

    async def write(self) -> None:
        """Write what was added; who comes while it is being written finds that done, or does the rest."""
        async with self._writing:
            if not self._added and not self._notebook.pending:
                return
            try:
                await _on_a_thread(self._write)
            except Exception as error:  # noqa: BLE001  # the edge of a task: the session goes on
                if self.problem is None:
                    _log.warning(
                        "the transcript %s cannot be written: %s",
                        self.path,
                        error,
                        exc_info=not isinstance(error, OSError),
                    )
                self.problem = f"The transcript {self.path} cannot be written: {error}."
            else:
                self.problem = None

    def open(self) -> None:
        """Continue the file that is there, if there is one; raises ConfigError if it is not one of ours."""
        try:
            if os.path.lexists(self.path):
                self._go_on()
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"transcript={str(self.path)!r} is there and cannot be continued: {error}; give another path"
            ) from error
        self._is_open = True

    def _go_on(self) -> None:
        try:
            info = self.path.stat()
        except FileNotFoundError:  # a link to what is not there yet
            return
        if not stat.S_ISREG(info.st_mode):  # to read what is no file can take for ever
            raise ValueError("it is no file")
        text = self.path.read_text(encoding="utf-8")
        record_tools = self._notebook.record_tools
        self._notebook = SessionNotebook.parse(text, record_tools=record_tools, owner=self._owner)
        self._file = _File(_state(info))

    def _write(self) -> None:
        """Write the cells that were added behind those that are there. On a thread, one at a time."""
        if not self._is_open:
            try:
                self.open()
            except ConfigError as error:  # nothing is lost of a session that runs
                _log.warning("%s", error)
                self._move()
                self._is_open = True
        while self._added:
            cell, tools = self._added.popleft()
            if tools is not None:
                self._notebook.add_tools(tools)
            self._notebook.add(cell)
        cells = list(self._notebook.pending)
        try:
            self._put(cells)
        except _ChangedError:
            taken = self.path
            self._move()
            _log.warning("%s was changed by somebody else: the transcript goes on in %s", taken, self.path)
            self._put(cells)
        del self._notebook.pending[: len(cells)]

    def _put(self, cells: list[str]) -> None:
        found = _state_of(self.path)
        if found is None:  # not yet, or no more
            self._file = _File()
        elif found != self._file.state:  # it may be no file now: opening it could take for ever
            raise _ChangedError
        self._file = self._file.extended(self.path, cells, self._notebook.tail())

    def _move(self) -> None:
        """Leave the file to whoever has changed it."""
        self.path = free_name(self.path)
        self._file = _File()


class _ChangedError(OSError):
    """Somebody else has changed the file."""

    def __init__(self) -> None:
        super().__init__("it was changed by somebody else")


@dataclass(frozen=True)
class _File:
    """A notebook's file as we left it, and where its last cell ends; ``end`` is 0 if it has none of ours."""

    state: tuple[int, int, int] | None = None
    end: int = 0

    def extended(self, path: Path, cells: list[str], tail: str) -> "_File":
        """Replace the file by one with more cells; raises OSError, _ChangedError if it is not ours now."""
        ends: list[int] = []

        def write(file: BinaryIO) -> None:
            if self.end:
                with path.open("rb") as old:
                    if _state(os.fstat(old.fileno())) != self.state:
                        raise _ChangedError
                    _copy(old, file, self.end)
                rest = cells
            else:  # the first cell of a file has no comma before it
                file.write(SessionNotebook.HEAD.encode())
                rest = [cells[0].removeprefix(","), *cells[1:]]
            for cell in rest:
                file.write(text_bytes(cell))
            ends.append(file.tell())
            file.write(text_bytes(tail))
            file.flush()
            if _state_of(path) != self.state:
                raise _ChangedError

        return _File(_state(replace_file(path, write, mode=PRIVATE)), *ends)


class SessionKeeper(Protocol):
    """Keeps the cells of a registry. It is called on the supervisor's loop."""

    record_tools: bool
    """Whether the arguments and results of tool calls are wanted."""

    def add(self, cell: RanCell | HumanCell, tools: RecordedCatalogue | None = None) -> None:
        """Take in a cell, and the catalogue of its tools if its calls are recorded."""

    async def written(self, owner: Owner) -> str | None:
        """Wait until the owner's cells are kept, but not for ever; say what is wrong if they are not."""

    async def close(self) -> None:
        """Keep what is not kept yet."""


class Transcripts:
    """The notebooks of a registry: one for all of its owners, or one each in a directory."""

    def __init__(self, transcript: Transcript) -> None:
        self.record_tools = transcript.record_tools
        self._path = _place(transcript)
        self._is_directory = self._path.is_dir()
        self._writers: dict[Owner | None, SessionWriter] = {}
        self._background: set[asyncio.Task[None]] = set()

    def add(self, cell: RanCell | HumanCell, tools: RecordedCatalogue | None = None) -> None:
        """Add a cell to its notebook."""
        self._writer(cell.owner).add(cell, tools)

    async def written(self, owner: Owner) -> str | None:
        """Wait until the owner's notebook is written, but not for ever; return what is wrong if it is not."""
        writer = self._writer(owner)
        task = asyncio.get_running_loop().create_task(writer.write(), name=f"transcript {writer.path}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        done, _ = await asyncio.wait({task}, timeout=WRITE_TIMEOUT)
        if not done:
            return f"The transcript {writer.path} is not written yet."
        return writer.problem

    async def close(self) -> None:
        """Write what is not written."""
        writers = list(self._writers.values())
        work = [asyncio.create_task(writer.write()) for writer in writers]
        if work or self._background:
            await asyncio.wait({*work, *self._background}, timeout=CLOSE_TIMEOUT)
        for writer in writers:
            if not writer.has_all:
                _log.error("the last cells of the session are not in the transcript %s", writer.path)

    def _writer(self, owner: Owner) -> SessionWriter:
        if not self._is_directory:
            return self._known(None, self._path)
        return self._known(owner, self._path / _file_name(owner))

    def _known(self, owner: Owner | None, path: Path) -> SessionWriter:
        writer = self._writers.get(owner)
        if writer is None:
            self._make_room()
            writer = SessionWriter(path, record_tools=self.record_tools, owner=owner)
            self._writers[owner] = writer
        return writer

    def _make_room(self) -> None:
        """Forget the oldest notebook that has all of its cells: it is read again if its owner comes back."""
        if len(self._writers) < MOST_WRITERS:
            return
        for owner, writer in self._writers.items():
            if writer.has_all:
                del self._writers[owner]
                return


def check_transcript_place(transcript: Transcript) -> None:
    """Refuse what no notebook can be written to, before anything is started; raises ConfigError."""
    try:
        os.fsencode(transcript.path)
        problem = _place_problem(transcript)
    except (OSError, UnicodeError) as error:  # it may be a name that no file can have
        problem = f"cannot be looked at: {error}; give another path"
    if problem is not None:
        raise ConfigError(f"transcript={str(transcript.path)!r} {problem}")


def _place_problem(transcript: Transcript) -> str | None:
    path = _place(transcript)
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            return "is not writable; give a directory that is"
    elif path.suffix != ".ipynb":
        return "is no directory, and no notebook's name; give a name that ends in .ipynb"
    elif not path.parent.is_dir():
        return f"cannot be made: there is no directory {str(path.parent)!r}; make it first"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        return "cannot be written: its directory is not writable; give one that is"
    else:
        SessionWriter(path, record_tools=transcript.record_tools).open()
    return None


def _place(transcript: Transcript) -> Path:
    """Return where a transcript is; "~" of a user that there is not is a name like others."""
    return Path(os.path.expanduser(transcript.path)).absolute()


def _file_name(owner: Owner) -> str:
    """Return the name of an owner's notebook; two owners never share one."""
    parts = [owner.session, *filter(None, (owner.child, owner.scope))]
    whole = "-".join(parts)
    safe = _UNSAFE.sub("-", whole).strip(".-")[:_LONGEST_NAME]
    if safe == whole and len(parts) == 1:
        return f"{safe}.ipynb"
    digest = hashlib.sha256(
        repr((owner.session, owner.child, owner.scope)).encode("utf-8", "backslashreplace")
    )
    return f"{safe or 'session'}-{digest.hexdigest()[:8]}.ipynb"


def free_name(path: Path) -> Path:
    """Return a name beside *path* that nobody has; raises FileExistsError."""
    for number in range(2, MOST_NAMES):
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        if not os.path.lexists(free):
            return free
    raise FileExistsError(f"{path} and {MOST_NAMES} others are there")


def _state(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_ino, info.st_mtime_ns, info.st_size


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        return _state(path.stat())
    except FileNotFoundError:
        return None


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size > 0:
        data = source.read(min(size, COPY_SIZE))
        if not data:
            raise OSError("the file has become shorter")
        target.write(data)
        size -= len(data)


async def _on_a_thread(function: Callable[[], None]) -> None:
    """Run a function on a thread of its own: a disk that does not answer keeps nobody waiting.

    Here if the interpreter ends and no thread starts.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failed: BaseException | None = None
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # the edge of a thread: whoever waits is told
            failed = error
        try:
            loop.call_soon_threadsafe(tell, failed)
        except RuntimeError as error:  # the registry was closed meanwhile
            _log.info("nobody waits for a transcript any more: %s", error)

    try:
        threading.Thread(target=run, name="hermes-transcript", daemon=True).start()
    except RuntimeError:
        function()
    else:
        await done
