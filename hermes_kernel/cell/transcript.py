"""A session as a notebook: its cells with what they have shown, and in the metadata what became of them.

Notebook format 4.5. What is ours stands below ``hermes_kernel`` in the notebook's metadata and below
``hermes`` in each cell's; ``docs/how-to/transcripts.md`` describes it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar

from ..errors import ConfigError, plain
from ..lifecycle.key import KernelKey, Owner
from .result import CellResult
from .status import CellStatus
from .toolrecord import RecordedCall, RecordedCatalogue

VERSION = 1
FORMAT = 4
NOTEBOOK_KEY = "hermes_kernel"
CELL_KEY = "hermes"
_DIGITS = 16  # of a number in a cell's id
_COUNTED = (CellStatus.OK, CellStatus.ERROR, CellStatus.EXITED)

PYTHON_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
}
"""The metadata of a notebook that any Python kernel can run."""


class By(Enum):
    """Who has run a cell."""

    AGENT = "agent"
    HUMAN = "human"


@dataclass(frozen=True)
class Transcript:
    """Where a registry keeps its sessions as notebooks.

    ``path``: a notebook for all of them, or a directory in which each owner has one. A notebook of this kind
    that is there already is continued. ``record_tools``: keep the whole arguments and results of tool calls,
    up to 1 MiB each, so that the session can be replayed without the tools.
    """

    path: str | PurePath
    record_tools: bool = False


@dataclass(frozen=True)
class RanCell:
    """One cell as it ran; ``started`` is in seconds since the epoch, ``timeout`` in seconds, None for none.

    ``record``: its tool calls in full, None if they are not recorded; ``tools`` the digest of its catalogue.
    """

    code: str
    key: KernelKey
    result: CellResult
    started: float
    timeout: float | None = None
    max_tool_calls: int | None = None
    record: tuple[RecordedCall, ...] | None = None
    tools: str | None = None

    @property
    def owner(self) -> Owner:
        """Whose cell it is."""
        return self.key.owner


@dataclass(frozen=True)
class HumanCell:
    """A cell that somebody else than the agent ran on a kernel of its; times are seconds since the epoch.

    ``ended`` is False if its end was not seen: its kernel ended first.
    """

    code: str
    key: KernelKey
    kernel_id: str
    outputs: tuple[dict[str, Any], ...]
    execution_count: int | None
    started: float
    duration: float
    masked: bool = False
    truncated: bool = False
    ended: bool = True

    @property
    def owner(self) -> Owner:
        """Whose kernel it ran on."""
        return self.key.owner


def agent_metadata(cell: RanCell, generation: int) -> dict[str, Any]:
    """Return what stands below ``hermes`` in the metadata of a cell of the agent's."""
    result = cell.result
    told: dict[str, Any] = {
        "by": By.AGENT.value,
        **_place(cell.key, result.kernel.kernel_id, generation),
        "status": result.status.value,
        "ran": result.ran,
        "exit_code": result.exit_code,
        **_times(cell.started, result.duration),
        "timeout": cell.timeout,
        "bytes": result.truncation.bytes_total,
    }
    told["kernel"] |= {
        "reused": result.kernel.reused,
        "lost": None if result.kernel.lost is None else result.kernel.lost.value,
        "ended": result.kernel.ended,
    }
    if result.signal is not None:
        told["signal"] = result.signal
    if result.truncation.truncated:
        told["truncated"] = {"shown": result.truncation.bytes_shown, "file": result.truncation.spill_path}
    if result.is_shortened:
        told["shortened"] = True
    if result.is_masked:
        told["masked"] = True
    if result.warning is not None:
        told["warning"] = result.warning
    if result.late_output:
        told["late_output"] = [asdict(late) for late in result.late_output]
    if result.tool_calls or cell.tools is not None:
        told["tool_calls"] = [asdict(call) for call in result.tool_calls]
        told["tool_calls_made"] = result.calls_made
        told["max_tool_calls"] = cell.max_tool_calls
    if cell.record is not None:
        told["tools"] = cell.tools
        told["tool_record"] = [{"tool": call.tool, **call.to_dict()} for call in cell.record]
    return told


def human_metadata(cell: HumanCell, generation: int) -> dict[str, Any]:
    """Return what stands below ``hermes`` in the metadata of a cell of somebody else's."""
    failed = any(output["output_type"] == "error" for output in cell.outputs)
    status = CellStatus.ERROR if failed else CellStatus.OK
    told: dict[str, Any] = {
        "by": By.HUMAN.value,
        **_place(cell.key, cell.kernel_id, generation),
        "status": (status if cell.ended else CellStatus.INTERRUPTED).value,
        "ran": True,
        **_times(cell.started, cell.duration),
    }
    told.update({name: True for name in ("masked", "truncated") if getattr(cell, name)})
    return told


def outputs_of(result: CellResult) -> list[dict[str, Any]]:
    """Return the outputs of a result as a notebook is to show them.

    A cell whose kernel ended showed no error by itself, and must not look as if all went well.
    """
    outputs = result.to_notebook_outputs()
    if result.message is not None and result.error is None:
        name, said = result.status.name, result.message
        outputs.append({"output_type": "error", "ename": name, "evalue": said, "traceback": [said]})
    return outputs


def count_of_cell(result: CellResult) -> int | None:
    """Return the number under which a notebook shows the cell, None if it did not come so far."""
    return result.execution_count if result.status in _COUNTED else None


def notebook_cell(cell: RanCell | HumanCell, cell_id: str, generation: int) -> dict[str, Any]:
    """Return a cell of a notebook. One that never ran is a raw cell: whoever runs the notebook leaves it."""
    told = agent_metadata(cell, generation) if isinstance(cell, RanCell) else human_metadata(cell, generation)
    node: dict[str, Any] = {
        "cell_type": "code",
        "execution_count": None,
        "id": cell_id,
        "metadata": {CELL_KEY: told},
        "outputs": [],
        "source": cell.code,
    }
    if isinstance(cell, HumanCell):
        node |= {"outputs": list(cell.outputs), "execution_count": cell.execution_count}
    elif cell.result.ran:
        node |= {"outputs": outputs_of(cell.result), "execution_count": count_of_cell(cell.result)}
    else:
        del node["outputs"], node["execution_count"]
        node["cell_type"] = "raw"
    readable: dict[str, Any] = plain(node)
    return readable


@dataclass
class SessionNotebook:
    """A notebook that grows. Holds what is not written yet, and what must be known of the rest.

    The file is HEAD, the cells with a comma between them, and ``tail``: so a cell is added by putting it
    behind the others.
    """

    HEAD: ClassVar[str] = '{\n "cells": ['

    record_tools: bool = False
    pending: list[str] = field(default_factory=list)
    count: int = 0
    _number: int = 0
    _metadata: dict[str, Any] = field(default_factory=lambda: dict(PYTHON_METADATA))
    _tools: dict[str, Any] = field(default_factory=dict)
    _generations: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, record_tools: bool, owner: Owner | None = None) -> "SessionNotebook":
        """Go on with a notebook of this kind: all its cells are to be written again.

        *owner*: whose cells alone it may have. Raises ValueError for another one.
        """
        node = _mapping(json.loads(text))
        metadata = _mapping(node.get("metadata"))
        told = _mapping(metadata.get(NOTEBOOK_KEY))
        cells = node.get("cells")
        if told.get("version") != VERSION or node.get("nbformat") != FORMAT or not isinstance(cells, list):
            raise ValueError("it is no transcript of this version")
        notebook = cls(record_tools)
        notebook._metadata |= {key: value for key, value in metadata.items() if key != NOTEBOOK_KEY}
        notebook._tools = _mapping(told.get("tools", {}))
        for cell in cells:
            notebook._learn(_mapping(cell), None if owner is None else plain(asdict(owner)))
        for cell in cells:
            notebook._append(cell if "id" in cell else {**cell, "id": notebook._next_id("cell")})
        return notebook

    def add(self, cell: RanCell | HumanCell) -> None:
        """Add a cell at the end."""
        kernel_id = cell.kernel_id if isinstance(cell, HumanCell) else cell.result.kernel.kernel_id
        generation = self._generation(cell.key.owner, kernel_id)
        self._append(notebook_cell(cell, self._next_id(kernel_id[:8] or "call"), generation))

    def add_tools(self, tools: RecordedCatalogue) -> None:
        """Keep a catalogue, for whoever runs the cells again."""
        if tools.entries:
            self._tools.setdefault(tools.digest, list(tools.entries))

    def tail(self) -> str:
        """Return what stands behind the last cell."""
        told: dict[str, Any] = {"version": VERSION, "record_tools": self.record_tools}
        if self._tools:
            told["tools"] = self._tools
        metadata = _json({**self._metadata, NOTEBOOK_KEY: told})
        return f'\n ],\n "metadata": {metadata},\n "nbformat": {FORMAT},\n "nbformat_minor": 5\n}}\n'

    def _append(self, node: Mapping[str, Any]) -> None:
        self.pending.append(f"{',' if self.count else ''}\n{_json(node)}")
        self.count += 1

    def _next_id(self, name: str) -> str:
        """Return an id that no cell of the notebook has."""
        self._number += 1
        return f"{name}-{self._number}"

    def _generation(self, owner: Owner, kernel_id: str) -> int:
        """Return the number of this kernel among its owner's; a call that met none has that of the last."""
        known = self._generations.setdefault(_owner_text(plain(asdict(owner))), {})
        last = max(known.values(), default=0)
        return known.setdefault(kernel_id, last + 1) if kernel_id else last

    def _learn(self, cell: Mapping[str, Any], owner: Mapping[str, Any] | None) -> None:
        """Take note of the numbers that are given; raises ValueError for a cell of another owner."""
        _, _, number = str(cell.get("id", "")).rpartition("-")
        if number.isdecimal() and len(number) < _DIGITS:
            self._number = max(self._number, int(number))
        told = _mapping(_mapping(cell.get("metadata", {})).get(CELL_KEY, {}))
        if told and owner is not None and told.get("owner") != owner:
            raise ValueError("it has cells of another owner")
        kernel = _mapping(told.get("kernel", {}))
        kernel_id, generation = kernel.get("id"), kernel.get("generation")
        if isinstance(kernel_id, str) and kernel_id and isinstance(generation, int):
            self._generations.setdefault(_owner_text(told.get("owner")), {})[kernel_id] = generation


def checked_transcript(given: object) -> Transcript | None:
    """Return what a registry was given as its transcript; raises ConfigError for what cannot be one."""
    if given is None:
        return None
    transcript = given if isinstance(given, Transcript) else Transcript(given)  # type: ignore[arg-type]
    path = transcript.path
    try:
        known = bool(path) and "\0" not in str(Path(path))
    except TypeError:
        known = False
    if not known:
        raise ConfigError(f"transcript={path!r}: give the path of a notebook, or a Transcript")
    if not isinstance(transcript.record_tools, bool):
        raise ConfigError(f"record_tools={transcript.record_tools!r}: give True or False")
    return transcript


def _place(key: KernelKey, kernel_id: str, generation: int) -> dict[str, Any]:
    kernel = {
        "id": kernel_id,
        "generation": generation,
        "python": key.python,
        "cwd": key.cwd,
        "variant": list(key.variant),
    }
    return {"owner": asdict(key.owner), "kernel": kernel}


def _times(started: float, duration: float) -> dict[str, Any]:
    begun = datetime.fromtimestamp(started, UTC).isoformat(timespec="milliseconds")
    return {"started": begun, "duration": round(duration, 3)}


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} stands where it has an object")  # noqa: TRY004  # of a file
    return value


def _owner_text(owner: object) -> str:
    return json.dumps(owner, sort_keys=True)  # a notebook that is saved anew has its keys in another order


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)
