"""Notebook files: their cells to run, and what the cells showed to be kept in them."""

import json
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import nbformat
from nbformat.validator import normalize

from ..cell.result import CellResult
from ..cell.status import CellStatus
from ..errors import ConfigError
from .script import Cell, CellKind

FORMAT = 4
_PYTHON = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
}
_COUNTED = (CellStatus.OK, CellStatus.ERROR, CellStatus.EXITED)


class Notebook:
    """A notebook in memory whose code cells have no outputs until they are recorded."""

    def __init__(self, node: Any) -> None:
        self._node = node
        for cell in node.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None

    @classmethod
    def read(cls, raw: bytes, name: str) -> "Notebook":
        """Read a notebook of any format; raises ConfigError if there is none, or none of Python's."""
        node = _valid(_upgraded(_parsed(raw, name), name), name)
        kernel = node.metadata.get("kernelspec", {}).get("language")
        language = str(kernel or node.metadata.get("language_info", {}).get("name") or "python")
        if language.lower() not in ("python", "ipython", "python3"):
            raise ConfigError(f"{name} is written in {language}; give a notebook in Python")
        return cls(node)

    @classmethod
    def of(cls, cells: list[Cell]) -> "Notebook":
        """Make a notebook of a script's cells."""
        node = nbformat.v4.new_notebook(metadata=nbformat.from_dict(_PYTHON))
        node.cells = [_node_of(cell) for cell in cells]
        return cls(node)

    def cells(self) -> list[Cell]:
        """Return the cells, in their order."""
        return [Cell(CellKind(cell.cell_type), cell.source) for cell in self._node.cells]

    def record(self, index: int, result: CellResult) -> None:
        """Keep what the cell at *index* showed."""
        cell = self._node.cells[index]
        cell.execution_count = result.execution_count if result.status in _COUNTED else None
        outputs = result.to_notebook_outputs()
        sentence = result.to_dict().get("error")
        if sentence is not None and result.error is None:
            # A cell whose kernel ended showed no error by itself, and must not look as if all went well.
            outputs.append(
                {
                    "output_type": "error",
                    "ename": result.status.name,
                    "evalue": sentence,
                    "traceback": [sentence],
                }
            )
        cell.outputs = [_kept(output, self._node) for output in outputs]

    def write(self, path: Path) -> None:
        """Write the notebook, whole or not at all; raises ConfigError if that is not possible."""
        text = nbformat.writes(self._node, version=FORMAT)
        path = path.resolve()
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            # Half of a character pair is not UTF-8, but its escape is good JSON.
            beside.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
            os.replace(beside, path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise cannot_save(path, error) from error


def cannot_save(path: Path, why: object) -> ConfigError:
    """Return the error for a notebook that cannot be written."""
    return ConfigError(f"the notebook cannot be saved as {path}: {why}; give another place with --save")


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
    except (nbformat.ValidationError, ValueError, LookupError, TypeError, AttributeError) as error:
        # nbformat's readers of old formats look into what they read before they check it.
        raise _not_valid(name, error) from None


def _valid(node: Any, name: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            _, node = normalize(node)  # it warns of the ids that it adds
        nbformat.validate(node)
    except (nbformat.ValidationError, LookupError, TypeError, AttributeError) as error:
        raise _not_valid(name, error) from None
    return node


def _not_valid(name: str, error: Exception) -> ConfigError:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(f"{name} is not a valid notebook ({why}); open it in Jupyter and save it again")


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
