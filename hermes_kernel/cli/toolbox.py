"""``--tools package.module:attribute``: the tools that the cells of a run may call."""

import importlib
import operator
import os
import sys
from collections.abc import Iterator
from typing import Any

from ..cell.tools import ToolSet
from ..errors import ConfigError

EXAMPLE = "give package.module:attribute, the name of a list of functions"


def load_tools(name: str) -> Any:
    """Import what *name* says, from the working directory too; raises ConfigError if there are no tools."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"--tools {name!r} names no tools; {EXAMPLE}")
    _import_from_here()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ConfigError(
            f"--tools: {module_name} cannot be imported ({type(error).__name__}: {error}); {EXAMPLE}"
        ) from error
    try:
        tools = operator.attrgetter(attribute)(module)
    except AttributeError:
        raise ConfigError(f"--tools: {module_name} has no {attribute!r}; {EXAMPLE}") from None
    if isinstance(tools, Iterator):  # whoever is given it looks again for each cell
        tools = list(tools)
    try:
        ToolSet.of(tools)
    except ConfigError as error:
        raise ConfigError(f"--tools {name}: {error}") from None
    return tools


def _import_from_here() -> None:
    try:
        directory = os.getcwd()
    except OSError:  # it is gone, and so is what could be imported from it
        return
    if directory not in sys.path:
        sys.path.insert(0, directory)
