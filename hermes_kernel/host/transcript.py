"""Writes sessions as notebooks while they run."""

import asyncio
import hashlib
import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from ..cell.tools import ToolSet
from ..cell.transcript import HumanCell, RanCell, SessionNotebook, Transcript
from ..errors import ConfigError
from ..lifecycle.key import Owner
from .files import replace_file, text_bytes

WRITE_TIMEOUT = 0.5  # seconds that a result waits for its transcript; the writing goes on
CLOSE_TIMEOUT = 10.0  # seconds that the registry's end waits for it
PRIVATE = 0o600
COPY_SIZE = 1024 * 1024
MOST_NAMES = 1000  # tried for a notebook that somebody else has changed

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 80
_log = logging.getLogger(__name__)


class SessionWriter:
    """One notebook and its file. It lives on the supervisor's loop.

    Each time the file is replaced by a copy that has the new cells too: a reader finds a whole notebook at
    every moment. A file that somebody else has changed since is left to them, and the session goes on in
    another one.
    """

    def __init__(self, path: Path, *, record_tools: bool) -> None:
        self.path = path
        self.problem: str | None = None
        self._notebook = SessionNotebook(record_tools)
        self._file = _File()
        self._writing = asyncio.Lock()
        if path.exists():
            self._go_on(record_tools=record_tools)

    def add(self, cell: RanCell | HumanCell, tools: ToolSet | None = None) -> None:
        """Add a cell, and the catalogue of its tools if its calls are recorded."""
        if tools is not None:
            self._notebook.add_tools(tools)
        self._notebook.add(cell)

    async def write(self) -> None:
        """Write what was added; who comes while it is being written finds that done, or does the rest."""
        async with self._writing:
            pending = self._notebook.pending
            if not pending:
                return
            cells, tail = list(pending), self._notebook.tail()
            try:
                await _on_a_thread(partial(self._replace, cells, tail))
            except OSError as error:
                if self.problem is None:
                    _log.warning("the transcript %s cannot be written: %s", self.path, error)
                self.problem = f"The transcript {self.path} cannot be written: {error}."
            else:
                self.problem = None
                del pending[: len(cells)]

    def _go_on(self, *, record_tools: bool) -> None:
        """Continue the file that is there; raises ConfigError if it is not one of ours."""
        try:
            text = self.path.read_text(encoding="utf-8")
            self._notebook = SessionNotebook.parse(text, record_tools=record_tools)
            self._file = _File(_state(self.path.stat()))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"transcript={str(self.path)!r} is there and cannot be continued: {error}; give another path"
            ) from error

    def _replace(self, cells: list[str], tail: str) -> None:
        """Write the cells behind those that are there. On a thread, one at a time."""
        try:
            found = _state(self.path.stat())
        except FileNotFoundError:  # not yet, or no more
            self._file = _File()
        else:
            if found != self._file.state:
                taken, self.path = self.path, free_name(self.path)
                self._file = _File()
                _log.warning(
                    "%s was changed by somebody else: the transcript goes on in %s", taken, self.path
                )
        self._file = self._file.extended(self.path, cells, tail)


@dataclass(frozen=True)
class _File:
    """A notebook's file as we left it, and where its last cell ends; ``end`` is 0 if it has none of ours."""

    state: tuple[int, int, int] | None = None
    end: int = 0

    def extended(self, path: Path, cells: list[str], tail: str) -> "_File":
        """Replace the file by one with more cells; raises OSError."""
        ends: list[int] = []

        def write(file: BinaryIO) -> None:
            if self.end:
                with path.open("rb") as old:
                    _copy(old, file, self.end)
            else:  # the first cell of a file has no comma before it
                file.write(SessionNotebook.HEAD.encode())
                cells[0] = cells[0].removeprefix(",")
            for cell in cells:
                file.write(text_bytes(cell))
            ends.append(file.tell())
            file.write(text_bytes(tail))

        return _File(_state(replace_file(path, write, mode=PRIVATE)), *ends)


class SessionKeeper(Protocol):
    """Keeps the cells of a registry. It is called on the supervisor's loop."""

    record_tools: bool
    """Whether the arguments and results of tool calls are wanted."""

    def add(self, cell: RanCell | HumanCell, tools: ToolSet | None = None) -> None:
        """Take in a cell, and the catalogue of its tools if its calls are recorded."""

    async def written(self, owner: Owner) -> str | None:
        """Wait until the owner's cells are kept, but not for ever; say what is wrong if they are not."""

    async def close(self) -> None:
        """Keep what is not kept yet."""


class Transcripts:
    """The notebooks of a registry: one for all of its owners, or one each in a directory."""

    def __init__(self, transcript: Transcript) -> None:
        self.record_tools = transcript.record_tools
        self._path = Path(transcript.path).expanduser().absolute()
        self._writers: dict[Owner | None, SessionWriter] = {}
        self._background: set[asyncio.Task[None]] = set()

    def add(self, cell: RanCell | HumanCell, tools: ToolSet | None = None) -> None:
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
        work = [asyncio.create_task(writer.write()) for writer in self._writers.values()]
        if work or self._background:
            await asyncio.wait({*work, *self._background}, timeout=CLOSE_TIMEOUT)

    def _writer(self, owner: Owner) -> SessionWriter:
        name = owner if self._path.is_dir() else None
        writer = self._writers.get(name)
        if writer is None:
            path = self._path if name is None else self._path / _file_name(owner)
            try:
                writer = SessionWriter(path, record_tools=self.record_tools)
            except ConfigError as error:  # nothing is lost of a session that runs
                _log.warning("%s", error)
                writer = SessionWriter(free_name(path), record_tools=self.record_tools)
            self._writers[name] = writer
        return writer


def check_transcript_place(transcript: Transcript) -> None:
    """Refuse what no notebook can be written to, before anything is started; raises ConfigError."""
    path = Path(transcript.path).expanduser().absolute()
    problem = None
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            problem = "is not writable; give a directory that is"
    elif path.suffix != ".ipynb":
        problem = "is no directory, and no notebook's name; give a name that ends in .ipynb"
    elif not path.parent.is_dir():
        problem = f"cannot be made: there is no directory {str(path.parent)!r}; make it first"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        problem = "cannot be written: its directory is not writable; give one that is"
    elif path.exists():
        SessionWriter(path, record_tools=transcript.record_tools)
    if problem is not None:
        raise ConfigError(f"transcript={str(transcript.path)!r} {problem}")


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


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size > 0:
        data = source.read(min(size, COPY_SIZE))
        if not data:
            raise OSError("the file has become shorter")
        target.write(data)
        size -= len(data)


async def _on_a_thread(function: "partial[None]") -> None:
    """Run a function where it keeps nobody waiting; here if the interpreter ends and no thread starts."""
    try:
        work = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:
        function()
    else:
        await work
