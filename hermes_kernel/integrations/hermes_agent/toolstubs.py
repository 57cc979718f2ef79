"""The tools of a host as cells see them: its own signatures, its results parsed, its errors as values."""

import __future__

import ast
import inspect
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...cell.tools import Tool, ToolCallContext
from ...errors import ConfigError
from .failures import log_failure
from .host import Host

LAZY = __future__.annotations.compiler_flag  # annotations stay the texts that they are

_log = logging.getLogger(__name__)

DROPPED = {
    "terminal": frozenset(
        {
            "background",
            "pty",
            "notify",
            "notify_on_complete",
            "watch_patterns",
            "heartbeat",
            "persist_on_release",
        }
    )
}
"""Arguments that mean something in an agent's turn alone: a cell may give them, and they do nothing."""


@dataclass(frozen=True)
class HostTools:
    """The tools of one cell: named and described as the host does, served by its ``dispatch``."""

    host: Host
    task_id: str
    named: Mapping[str, Tool]

    @classmethod
    def of(cls, host: Host, names: Collection[str], task_id: str) -> "HostTools":
        """Return the tools with these names; raises ConfigError for one that no cell could call."""
        ordered = tuple(sorted(tool_names("sandbox_tools", names)))
        source = ""
        if host.tool_stubs is not None and ordered:
            try:
                source = host.tool_stubs(list(ordered))
            except Exception as error:  # noqa: BLE001  # the host's own code; tools serve without signatures
                log_failure(_log, error, "tool_stubs has failed, the tools take any arguments")
        if not isinstance(source, str):
            raise ConfigError(f"tool_stubs gave a {type(source).__name__}; let it return Python source")
        return cls(host, task_id, _tools(ordered, source))

    def tools(self) -> list[Tool]:
        """Return them."""
        return list(self.named.values())

    def dispatch(self, name: str, arguments: dict[str, Any], context: ToolCallContext) -> Any:
        """Have the host serve a call; what it raises is a result with an ``error``, as its own errors are."""
        given = _with_defaults(self.named[name], arguments)
        for dropped in DROPPED.get(name, ()):
            given.pop(dropped, None)
        try:
            with self.host.around_dispatch():
                answer = self.host.dispatch(name, given, task_id=self.task_id, cell=context)
        except Exception as error:  # noqa: BLE001  # the host's own code
            return _failed(name, error)
        if inspect.isawaitable(answer):
            return _awaited(name, answer)
        return parsed(answer)


def tool_names(argument: str, names: Any) -> frozenset[str]:
    """Return the names of tools that an argument gives, which may be none; raises ConfigError."""
    if (
        not isinstance(names, Collection)
        or isinstance(names, str)
        or not all(isinstance(name, str) for name in names)
    ):
        raise ConfigError(f"{argument}={names!r}: give a set of the names of tools, which may be empty")
    return frozenset(names)


def parsed(answer: Any) -> Any:
    """Return what a tool's JSON text stands for, also if that is such a text again; other text as it is."""
    for _ in range(2):
        if not isinstance(answer, str):
            break
        try:
            answer = json.loads(answer, parse_constant=lambda _: None)
        except ValueError:
            break
    return answer


async def _awaited(name: str, answer: Any) -> Any:
    try:
        return parsed(await answer)
    except Exception as error:  # noqa: BLE001  # the host's own code
        return _failed(name, error)


def _failed(name: str, error: Exception) -> dict[str, str]:
    log_failure(_log, error, f"tool {name} has failed")
    return {"error": str(error) or type(error).__name__}


def signatures(source: str) -> dict[str, Callable[..., Any]]:
    """Return the functions at the top of a source text, of each its signature and its docstring alone.

    Nothing but the defaults of their parameters is evaluated; a function whose defaults cannot be is left
    out. Raises ConfigError for what is no Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"tool_stubs gave no Python source: {error}") from error
    functions: dict[str, Callable[..., Any]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            documented = ast.get_docstring(node)
            node.body = [ast.Expr(ast.Constant(documented or ""))]
            node.decorator_list = []
            namespace: dict[str, Any] = {}
            header = ast.fix_missing_locations(ast.Module([node], []))
            try:
                code = compile(header, "<tool_stubs>", "exec", flags=LAZY, dont_inherit=True)
                exec(code, namespace)  # no more than the defaults of its parameters
            except (Exception, SystemExit) as error:  # noqa: BLE001  # the host's own code
                _log.info("%s takes any arguments: %s", node.name, type(error).__name__)
                functions.pop(node.name, None)
                continue
            functions[node.name] = namespace[node.name]
    return functions


@lru_cache(maxsize=64)
def _tools(names: tuple[str, ...], source: str) -> dict[str, Tool]:
    described = signatures(source)
    return {name: Tool(name, described.get(name), returns_errors=True) for name in names}


def _with_defaults(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the host's own functions send them: with those that were left out."""
    if tool.handler is None:
        return dict(arguments)
    parameters = inspect.signature(tool.handler).parameters.values()
    return {**{p.name: p.default for p in parameters if p.default is not p.empty}, **arguments}
