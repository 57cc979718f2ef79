"""What a model may try next after an error that others have run into before it."""

import re
from collections.abc import Collection

from .outputs import CellError

LOOKED_AT = 4_000
"""Characters of an error's text that are looked at."""

HELPERS = frozenset({"json_parse", "retry", "shell_quote"})
TOOLS = "hermes_tools"

_NO_NAME = re.compile(rf"cannot import name '([^']+)' from '{TOOLS}'")
_NO_ATTRIBUTE = re.compile(rf"module '{TOOLS}' has no attribute '([^']+)'")
_NO_MODULE = re.compile(r"No module named '([^']+)'")
_UNKNOWN = re.compile(r"name '([^']+)' is not defined")
_AWAIT = "cannot be called from a running event loop"
_NOT_IN_WORKER = re.compile(r"Can't get attribute '([^']+)' on <module '__main__'")


def hint_for(error: CellError | None, tools: Collection[str] = (), stderr: str = "") -> str | None:
    """Return what may help after *error*, None if nothing is known; *tools* are those of the cell.

    *stderr* is looked at as well: there worker processes complain, whose cell may hang instead of failing.
    """
    return (error and _hint_for_error(error, tools)) or _hint_for_workers(stderr)


def _hint_for_error(error: CellError, tools: Collection[str]) -> str | None:
    said = error.evalue[:LOOKED_AT]
    if (missing := _NO_NAME.search(said) or _NO_ATTRIBUTE.search(said)) is not None:
        return _missing_tool(missing[1], tools)
    if error.ename == "NameError" and (unknown := _UNKNOWN.search(said)) is not None:
        return _unknown_name(unknown[1], tools)
    if error.ename == "ModuleNotFoundError" and (module := _NO_MODULE.search(said)) is not None:
        return (
            f"{module[1]!r} is not installed for the interpreter of this kernel. Use the standard library, "
            "or run the project's own Python from a shell."
        )
    if "string indices must be integers" in said or "'str' object has no attribute 'get'" in said:
        return (
            f"A text was used as a mapping. The functions of {TOOLS} return parsed results: look at one with "
            "print(type(r), r) before you index it; json_parse reads JSON out of a text."
        )
    if _AWAIT in said:
        return "The kernel has a running event loop: write `await main()` instead of `asyncio.run(main())`."
    return None


def _hint_for_workers(stderr: str) -> str | None:
    if (lost := _NOT_IN_WORKER.search(stderr)) is None:
        return None
    return (
        f"A worker process that was spawned cannot find {lost[1]!r}, which a cell has defined. Write it to a "
        "module and import it, or use multiprocessing.get_context('fork')."
    )


def _missing_tool(name: str, tools: Collection[str]) -> str:
    if name in HELPERS:
        return (
            f"{name} is a helper of {TOOLS}. Another module of that name may stand in its place: look at "
            f"{TOOLS}.__file__; a reset gives a fresh kernel."
        )
    known = ", ".join(sorted(tools))
    return f"This cell can import from {TOOLS}: {known}." if known else "This cell was given no tools."


def _unknown_name(name: str, tools: Collection[str]) -> str | None:
    if name in tools or name in HELPERS:
        return f"Import it first: from {TOOLS} import {name}"
    return None
