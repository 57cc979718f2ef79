"""Notebook files: their cells to run, and what the cells showed to be kept in them."""

import json
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import nbformat
from nbformat.validator import normalize

from ..cell.toolrecord import RecordedCatalogue
from ..cell.transcript import (
    CELL_KEY,
    NOTEBOOK_KEY,
    PYTHON_METADATA,
    VERSION,
    HumanCell,
    RanCell,
    notebook_cell,
)
from ..errors import ConfigError
from ..lifecycle.key import Owner
from ..process.files import replace_file, text_bytes
from .script import Cell, CellKind

FORMAT = 4


class Notebook:
    """A notebook in memory whose code cells have no outputs until they are recorded."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._generations: dict[str, int] = {}
        node.metadata.pop(NOTEBOOK_KEY, None)
        for cell in node.cells:
            cell.metadata.pop(CELL_KEY, None)
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None

    @classmethod
    def read(cls, raw: bytes, name: str) -> "Notebook":
        """Read a notebook of any format; raises ConfigError if there is none, or none of Python's."""
        node = parsed_notebook(raw, name)
        kernel = node.metadata.get("kernelspec", {}).get("language")
        language = str(kernel or node.metadata.get("language_info", {}).get("name") or "python")
        if language.lower() not in ("python", "ipython", "python3"):
            raise ConfigError(f"{name} is written in {language}; give a notebook in Python")
        return cls(node)

    @classmethod
    def of(cls, cells: list[Cell]) -> "Notebook":
        """Make a notebook of a script's cells."""
        node = nbformat.v4.new_notebook(metadata=nbformat.from_dict(PYTHON_METADATA))
        node.cells = [_node_of(cell) for cell in cells]
        return cls(node)

    def cells(self) -> list[Cell]:
        """Return the cells, in their order."""
        return [Cell(CellKind(cell.cell_type), cell.source) for cell in self._node.cells]

    def record(self, index: int, ran: RanCell, tools: RecordedCatalogue | None) -> None:
        """Keep what the cell at *index* showed, and how it ran.

        *tools*: the catalogue that goes with its recorded tool calls.
        """
        cell = self._node.cells[index]
        made = notebook_cell(ran, cell.get("id", ""), self._generation(ran.result.kernel.kernel_id))
        cell.metadata[CELL_KEY] = nbformat.from_dict(made["metadata"][CELL_KEY])
        cell.execution_count = made.get("execution_count")
        cell.outputs = [_kept(output, self._node) for output in made.get("outputs", [])]
        told = self._node.metadata.setdefault(NOTEBOOK_KEY, nbformat.from_dict({}))
        told.update(version=VERSION, record_tools=told.get("record_tools", False) or ran.record is not None)
        if tools is not None and tools.entries:
            entries = [nbformat.from_dict(entry) for entry in tools.entries]
            told.setdefault("tools", {})[tools.digest] = entries

    def _generation(self, kernel_id: str) -> int:
        """Return the number of this kernel; a call that met none has that of the last."""
        known = self._generations
        return known.setdefault(kernel_id, len(known) + 1) if kernel_id else len(known)

    def write(self, path: Path, *, private: bool = False) -> None:
        """Write the notebook, whole or not at all; raises ConfigError if that is not possible.

        *private*: for this user alone, whoever could read what was there.
        """
        text = nbformat.writes(self._node, version=FORMAT)
        try:
            replace_file(
                path, lambda file: _put(file, text), mode=0o600 if private else 0o666, keeps_mode=not private
            )
        except OSError as error:
            raise cannot_save(path.resolve(), error) from error


class NotebookKeeper:
    """Keeps the cells of a run in its notebook; ``index`` is the place of the one that runs."""

    def __init__(self, notebook: Notebook, *, record_tools: bool) -> None:
        self.record_tools = record_tools
        self.index = 0
        self._notebook = notebook

    def add(self, cell: RanCell | HumanCell, tools: RecordedCatalogue | None = None) -> None:
        """Keep a cell of the run's."""
        if isinstance(cell, RanCell):
            self._notebook.record(self.index, cell, tools)

    async def written(self, owner: Owner) -> str | None:
        """Nothing is wrong: the notebook is written at the end of the run."""
        return None

    async def close(self) -> None:
        """Nothing is left to do."""


def cannot_save(path: Path, why: object) -> ConfigError:
    """Return the error for a notebook that cannot be written."""
    return ConfigError(f"the notebook cannot be saved as {path}: {why}; give another place with --save")


def parsed_notebook(raw: bytes, name: str) -> Any:
    """Read a notebook of any format; raises ConfigError if there is none."""
    return _valid(_upgraded(_parsed(raw, name), name), name)


def _put(file: BinaryIO, text: str) -> None:
    file.write(text_bytes(f"{text}\n"))


def _parsed(raw: bytes, name: str) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8 text; give a notebook as Jupyter saves it") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON ({error}); give a notebook as Jupyter saves it") from None
    version = data.get("nbformat") if isinstance(data, dict) else None
    if isinstance(data, dict) and type(version) is int and ("cells" in data or "worksheets" in data):
        return data
    raise ConfigError(f"{name} is JSON but not a notebook; give a notebook as Jupyter saves it")


def _upgraded(data: dict[str, Any], name: str) -> Any:
    """Return the notebook in the format of today, with its multi-line texts joined."""
    if data["nbformat"] > FORMAT:
        raise ConfigError(
            f"{name} has notebook format {data['nbformat']}; this nbformat reads up to {FORMAT}: "
            "upgrade it with pip install -U nbformat"
        )
    try:
        return nbformat.convert(nbformat.reader.reads(json.dumps(data)), FORMAT)
    except RecursionError:
        raise _too_deep(name) from None
    except (nbformat.ValidationError, ValueError, LookupError, TypeError, AttributeError) as error:
        # nbformat's readers of old formats look into what they read before they check it.
        raise _not_valid(name, error) from None


def _valid(node: Any, name: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            _, node = normalize(node)  # it warns of the ids that it adds
        nbformat.validate(node)
    except RecursionError:
        raise _too_deep(name) from None
    except (nbformat.ValidationError, LookupError, TypeError, AttributeError) as error:
        raise _not_valid(name, error) from None
    return node


def _not_valid(name: str, error: Exception) -> ConfigError:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(f"{name} is not a valid notebook ({why}); open it in Jupyter and save it again")


def _too_deep(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is not a valid notebook (it is nested too deep); open it in Jupyter and save it again"
    )


def _node_of(cell: Cell) -> Any:
    metadata = {"title": cell.title} if cell.title else {}
    match cell.kind:
        case CellKind.CODE:
            return nbformat.v4.new_code_cell(cell.source, metadata=metadata)
        case CellKind.MARKDOWN:
            return nbformat.v4.new_markdown_cell(cell.source, metadata=metadata)
        case CellKind.RAW:
            return nbformat.v4.new_raw_cell(cell.source, metadata=metadata)


def _kept(output: dict[str, Any], node: Any) -> Any:
    """Return an output for the notebook; one that no notebook may hold is replaced by a word about it."""
    kept = nbformat.from_dict(output)
    try:
        nbformat.validate(kept, ref="output", version=FORMAT, version_minor=node.nbformat_minor)
    except nbformat.ValidationError:
        text = f"[an output of type {output.get('output_type')!r} is left out: a notebook cannot hold it]\n"
        return nbformat.v4.new_output("stream", name="stderr", text=text)
    return kept
