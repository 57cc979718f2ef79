"""Writes docs/reference.md from the docstrings of the public names: python docs/make_reference.py"""

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, is_typeddict

import hermes_kernel
from hermes_kernel.cell import events
from hermes_kernel.cell.result import LateOutput, ToolCallRecord, Truncation
from hermes_kernel.cell.variables import Variable
from hermes_kernel.host.options import CallArguments, RegistryArguments
from hermes_kernel.lifecycle.info import KernelState

TARGET = Path(__file__).with_name("reference.md")
HEAD = """\
# Reference

Everything here can be imported from `hermes_kernel`, but for what the second part names. This page is made
from the docstrings by `docs/make_reference.py`. Times are in seconds, sizes in bytes.
"""

FIRST = (
    *("BlockingRegistry", "KernelRegistry", "Limits", "Owner", "CellResult", "CellStatus", "CellError"),
    *("KernelReport", "Loss", "KernelInfo", "Tool", "ToolCallContext", "ToolDispatcher", "Transcript"),
    *("HermesKernelManager", "HermesKernelError", "ConfigError", "KernelStartError"),
    *("ToolError", "ToolBudgetExceeded"),
)
SECOND: tuple[Any, ...] = (
    *(RegistryArguments, CallArguments, ToolCallRecord, Truncation, LateOutput, Variable, KernelState),
    *(events.StreamText, events.Display, events.ToolCallStarted, events.ToolCallEnded),
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MODULES = re.compile(r"\b(?:hermes_kernel|collections|typing|pathlib)(?:\.\w+)*\.(?=[A-Z])")


def reference() -> str:
    """Return the page."""
    parts = [HEAD, *(section(getattr(hermes_kernel, name)) for name in FIRST)]
    parts.append("# What these take and give\n\nTypes of arguments, fields and events.\n")
    return "\n".join([*parts, *map(section, SECOND)])


def section(thing: Any) -> str:
    """Return the section of one class."""
    lines = [f"## {thing.__name__}", ""]
    if not is_typeddict(thing) and not issubclass(thing, enum.Enum | BaseException):
        lines += ["```python", f"{thing.__name__}{_signature(thing)}", "```", ""]
    lines += [_doc(thing), ""]
    if issubclass(thing, enum.Enum):
        lines += [", ".join(f"`{member.name}`" for member in thing), ""]
    if is_typeddict(thing):
        lines += [", ".join(f"`{name}`" for name in thing.__annotations__), ""]
    for name, method in _methods(thing):
        shown = f"{name}{_signature(method)}" if callable(method) else name
        lines += [f"### `{thing.__name__}.{name}`", "", "```python", shown, "```", "", _doc(method), ""]
    return "\n".join(lines)


def _methods(thing: type) -> Iterator[tuple[str, Any]]:
    if issubclass(thing, enum.Enum | BaseException) or thing is hermes_kernel.HermesKernelManager:
        return
    for home in thing.__mro__:
        if not home.__module__.startswith("hermes_kernel"):
            continue
        for name, given in vars(home).items():
            value = given.__func__ if isinstance(given, classmethod | staticmethod) else given
            told = inspect.isfunction(value) or isinstance(value, property)
            if told and not name.startswith("_") and not dataclasses.is_dataclass(value):
                yield name, value


def _signature(thing: Any) -> str:
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(…)"
    text = re.sub(r"\b_\w+: [^,)]+(?: = [^,)]+)?(?:, )?", "", _ADDRESS.sub("", text))  # what is private
    text = re.sub(r"\*<class '[\w.]*?(\w+)'>", r"Unpack[\1]", text)
    text = re.sub(r"(?<=[:>] )'([^']+)'", r"\1", text)  # an annotation that is written as a text
    return _MODULES.sub("", text).replace("*, **", "**")


def _doc(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").replace("``", "`").replace("\n\n::\n", "\n")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
