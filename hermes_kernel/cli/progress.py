"""How far a run is, for a person: on stderr, so that stdout is the cells' alone."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..cell.result import CellResult
from ..cell.status import CellStatus

WIDTH = 60  # characters of the code's first line in a plain line of progress

_WORDS = {
    CellStatus.OK: "ok",
    CellStatus.ERROR: "error",
    CellStatus.EXITED: "exited",
    CellStatus.TIMED_OUT: "timed out",
    CellStatus.INTERRUPTED: "interrupted",
    CellStatus.DIED: "died",
}


@dataclass(frozen=True)
class Place:
    """Which cell of how many, and how its code begins."""

    number: int
    total: int
    first_line: str

    @classmethod
    def of(cls, number: int, total: int, source: str) -> "Place":
        """Return the place of the cell with this code."""
        first = source.strip().split("\n", 1)[0].strip()
        return cls(number, total, "".join(c if c.isprintable() else "�" for c in first))

    def __str__(self) -> str:
        return f"[{self.number}/{self.total}]"


class RunProgress(Protocol):
    """Tells a person about a run."""

    def running(self, place: Place) -> contextlib.AbstractContextManager[None]:
        """Say that a cell runs, while the block lasts."""

    def ran(self, place: Place, result: CellResult) -> None:
        """Say how a cell ended."""

    def say(self, sentence: str) -> None:
        """Say something about the run."""


def progress() -> RunProgress:
    """Return the progress that stderr can show."""
    return TerminalProgress() if sys.stderr is not None and sys.stderr.isatty() else PlainProgress()


class PlainProgress:
    """One line a cell, for logs and pipes."""

    def running(self, place: Place) -> contextlib.AbstractContextManager[None]:
        """Say nothing: a line is written when the cell has ended."""
        return contextlib.nullcontext()

    def ran(self, place: Place, result: CellResult) -> None:
        """Write the cell's line."""
        code = place.first_line
        code = code if len(code) <= WIDTH else f"{code[: WIDTH - 3]}..."
        click.echo(f"{place} {_ending(result):11} {result.duration:6.2f} s  {code}", err=True)

    def say(self, sentence: str) -> None:
        """Write the sentence on a line of its own."""
        click.echo(sentence, err=True)


class TerminalProgress:
    """A spinner with a clock while a cell runs, then a line in colour."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    @contextlib.contextmanager
    def running(self, place: Place) -> Iterator[None]:
        """Show the spinner."""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as shown:
            room = max(10, self._console.width - 20 - len(str(place)))
            shown.add_task(f"{place} {place.first_line[:room]}", total=None)
            yield

    def ran(self, place: Place, result: CellResult) -> None:
        """Write the cell's line, cut to the terminal's width."""
        style = "green" if succeeded(result) else "bold red"
        line = Text.assemble(
            (f"{place} ", "dim"),
            (f"{_ending(result):11}", style),
            (f" {result.duration:6.2f} s  ", "dim"),
            (place.first_line, "bold"),
        )
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    def say(self, sentence: str) -> None:
        """Write the sentence in another colour than the cells' output."""
        self._console.print(Text(sentence, "yellow"), soft_wrap=True)


def succeeded(result: CellResult) -> bool:
    """Whether the cell did what it was to do; ending its kernel with code 0 is that, too."""
    return result.status is CellStatus.OK or (result.status is CellStatus.EXITED and result.exit_code == 0)


def _ending(result: CellResult) -> str:
    word = _WORDS[result.status]
    if result.status is CellStatus.EXITED:
        return f"{word} ({result.exit_code})"
    return f"{word} ({result.signal})" if result.signal else word
