"""Tools for examples/tools_demo.ipynb: notes as files of a temporary directory, and a small database.

hermes-kernel run examples/tools_demo.ipynb --tools examples.tools_demo:TOOLS
"""

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from hermes_kernel import ToolCallContext, ToolError

_directory = tempfile.TemporaryDirectory(prefix="tools-demo-")
NOTES = Path(_directory.name)

_database = sqlite3.connect(":memory:", check_same_thread=False)
_database.executescript(
    """
    create table city (name text primary key, country text, people integer);
    insert into city values ('Bergen', 'NO', 291940), ('Oslo', 'NO', 717710), ('Malmö', 'SE', 362133);
    """
)


def write_note(name: str, text: str) -> dict[str, Any]:
    """Write a note; returns its size in bytes."""
    path = _note(name)
    path.write_text(text, encoding="utf-8")
    return {"name": name, "bytes": path.stat().st_size}


def read_note(name: str) -> str:
    """Return the text of a note."""
    path = _note(name)
    if not path.exists():
        raise ToolError(f"there is no note {name!r}; list_notes() shows what there is")
    return path.read_text(encoding="utf-8")


def list_notes() -> list[str]:
    """Return the names of the notes."""
    return sorted(path.stem for path in NOTES.glob("*.txt"))


async def query(sql: str, parameters: list[Any] | None = None, *, limit: int = 100) -> list[dict[str, Any]]:
    """Run a SELECT on the table city(name, country, people) and return its rows."""
    if not sql.lstrip().lower().startswith("select"):
        raise ToolError("only SELECT is allowed")
    cursor = _database.execute(sql, parameters or [])
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchmany(limit)]


def whoami(context: ToolCallContext) -> dict[str, Any]:
    """Return what a tool knows of its caller."""
    return {"owner": None if context.owner is None else context.owner.session, "origin": context.origin}


def _note(name: str) -> Path:
    if not name.isidentifier():
        raise ToolError(f"{name!r} is no name for a note; use letters, digits and underscores")
    return NOTES / f"{name}.txt"


TOOLS = [write_note, read_note, list_notes, query, whoami]
