"""The tool ``execute_code`` as an agent registers it: what a model is told, and what its arguments mean."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...cell.tools import Tool
from ...errors import ConfigError, HermesKernelError
from ...limits import Limits
from .host import Host
from .places import STRICT, child_cwd, child_python, execution_mode
from .sessions import SessionCell, SessionKernels, as_json
from .toolstubs import HostTools, tool_names

NAME = "execute_code"
TOOLSET = "code_execution"
MAX_RESULT_SIZE_CHARS = 100_000

_WHAT = (
    "Run Python code in this session's live kernel. Variables, imports and functions stay from call to call. "
    "A call that runs out of time or is interrupted costs the kernel: its state is lost, and the next call "
    "starts with a fresh one. Worth it where several tool calls belong together: loops, filters, decisions "
    "that depend on what was found. For one call of a tool, call the tool itself."
)
_STRICT = "The code runs in a directory of its own: name the user's files by absolute paths."
_PROJECT = (
    "The code runs in the session's working directory, on the Python of its active environment if a kernel "
    "can run on that."
)
_HELPERS = (
    "  json_parse(text): What JSON text stands for, also if it is not strict.",
    "  shell_quote(text): The text as one word of a shell.",
    "  retry(function): Its result, tried again if it raises.",
)
_SHOWN = "Only what the code prints is shown: print() the result."


def execute_code_schema(
    host: Host, enabled_tools: Collection[str] | None = None, mode: object = None
) -> dict[str, Any]:
    """Return what a model is told of the tool; only the enabled tools are named."""
    names = _callable_tools(host, enabled_tools)
    mode = execution_mode(_mode(host) if mode is None else mode)
    tools = HostTools.of(host, names, "").tools()
    imported = ", ".join(sorted(names)[:2]) or "retry"
    description = "\n\n".join(
        [
            _WHAT,
            "\n".join(["From hermes_tools it can import:", *map(_line, tools), *_HELPERS]),
            _STRICT if mode == STRICT else _PROJECT,
            _SHOWN,
        ]
    )
    code = f"Python code, for instance: from hermes_tools import {imported}"
    return {
        "name": NAME,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": code},
                "reset": {"type": "boolean", "description": "Begin with a fresh kernel."},
            },
            "required": ["code"],
        },
    }


@dataclass(frozen=True)
class CodeTool:
    """Serves the calls of a model: checks them, asks the host, and runs the cell."""

    kernels: SessionKernels

    def handle(
        self, arguments: Mapping[str, Any], *, task_id: str | None, enabled_tools: Collection[str] | None
    ) -> str:
        """Run what a model asks for and return the result as JSON."""
        return as_json(lambda: self._run(arguments, task_id or "", enabled_tools))

    def _run(self, arguments: Mapping[str, Any], task_id: str, enabled_tools: Collection[str] | None) -> str:
        host = self.kernels.host
        if not host.is_available():
            raise ConfigError("execute_code is not available here: call the other tools one by one")
        code, reset = _code(arguments), _reset(arguments)
        names = _callable_tools(host, enabled_tools)
        if (why := host.guard(code)) is not None:
            return _refused(why)
        if (result := host.elsewhere(code, task_id, names)) is not None:
            return result
        config = host.config()
        mode = execution_mode(config.get("mode", "project"))
        cell = SessionCell(
            code,
            task_id,
            mode,
            child_python(mode, os.environ).path,
            child_cwd(mode, task_id, os.environ, recorded=host.recorded_cwd, registered=host.registered_cwd),
            names,
            config.get("timeout", Limits.timeout),
            config.get("max_tool_calls", Limits.max_tool_calls),
            reset,
            host.is_interrupted,
        )
        return self.kernels.execute(cell)


def _code(arguments: Mapping[str, Any]) -> str:
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"execute_code needs its arguments as an object with `code`; it got a {type(arguments).__name__}"
        )
    code = arguments.get("code")
    if code is None and "command" in arguments:
        raise ConfigError(
            "execute_code takes Python in `code`, not `command`: shell commands are for terminal(command=…)"
        )
    if code is None:
        raise ConfigError("execute_code needs a non-empty `code`: it was not given")
    if not isinstance(code, str):
        raise ConfigError(f"execute_code needs `code` as a string; it got a {type(code).__name__}")
    if not code.strip():
        raise ConfigError("execute_code needs a non-empty `code`: there is nothing to run")
    return code


def _reset(arguments: Mapping[str, Any]) -> bool:
    """Return whether a fresh kernel is asked for; models also write the word for it."""
    given = arguments.get("reset")
    if isinstance(given, bool | None):
        return given is True
    word = given.strip().lower() if isinstance(given, str) else ""
    if word not in ("true", "false"):
        raise ConfigError(f"execute_code needs `reset` as true or false; it got {given!r}")
    return word == "true"


def _callable_tools(host: Host, enabled_tools: Collection[str] | None) -> frozenset[str]:
    """Return which tools the code may call: if no enabled one is for scripts, all that are."""
    enabled = frozenset() if enabled_tools is None else tool_names("enabled_tools", enabled_tools)
    return (host.script_tools & enabled) or host.script_tools


def _mode(host: Host) -> object:
    return host.config().get("mode", "project")


def _refused(why: str) -> str:
    error = HermesKernelError(why)
    return json.dumps({**error.to_dict(), "error": why}, ensure_ascii=False)


def _line(tool: Tool) -> str:
    taken = ", ".join(_parameter(entry) for entry in tool.entry["parameters"])
    documented = tool.entry["description"].strip().splitlines()
    return f"  {tool.name}({taken}): {documented[0]}" if documented else f"  {tool.name}({taken})"


def _parameter(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "VAR_KEYWORD":
        return f"**{entry['name']}"
    return f"{entry['name']}={entry['default']!r}" if "default" in entry else str(entry["name"])
