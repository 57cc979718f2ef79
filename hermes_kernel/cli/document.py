"""What is to be run, wherever it comes from."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ..errors import ConfigError
from .script import Cell, cells_of, decoded

if TYPE_CHECKING:
    from .notebook import Notebook, NotebookKeeper

STDIN = Path("-")


@dataclass(frozen=True)
class Document:
    """A file's cells, and the notebook that keeps their outputs if there is one."""

    name: str
    cells: list[Cell]
    notebook: "Notebook | None"

    @classmethod
    def read(cls, file: Path, *, with_notebook: bool) -> Self:
        """Read a script, a notebook or (``-``) a script from stdin; raises ConfigError if that fails."""
        name = "standard input" if file == STDIN else str(file)
        suffix = file.suffix.lower()
        if file == STDIN:
            raw = _bytes_of_stdin()
        elif suffix in (".py", ".ipynb") or not os.path.isfile(file):  # also a name that is too long
            raw = read_file(file)
        else:
            raise ConfigError(f"{file} is neither a .py nor a .ipynb file; pipe a script into `run -`")
        if suffix == ".ipynb" and raw.strip():
            notebook = _notebook_class().read(raw, name)
            return cls(name, notebook.cells(), notebook)
        cells = cells_of(decoded(raw, name))
        return cls(name, cells, _notebook_class().of(cells) if with_notebook else None)

    def keeper(self, *, record_tools: bool) -> "NotebookKeeper | None":
        """Return what keeps the cells of a run in the notebook, None if there is none."""
        if self.notebook is None:
            return None
        from .notebook import NotebookKeeper

        return NotebookKeeper(self.notebook, record_tools=record_tools)


def _bytes_of_stdin() -> bytes:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise ConfigError("there is no standard input to read; give a file")
    raw: bytes = stream.read()
    return raw


def read_file(file: Path) -> bytes:
    """Return what a file holds; raises ConfigError."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; give an existing file") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a directory; give a .py or .ipynb file in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give a file that can") from error


def _notebook_class() -> "type[Notebook]":
    # nbformat loads jsonschema, which takes longer than a kernel's start where all of its formats are
    # installed: a script that is only run must not pay for it.
    from .notebook import Notebook

    return Notebook
