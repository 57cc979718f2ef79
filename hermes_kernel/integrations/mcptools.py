"""The tools of other MCP servers, as functions that cells can call.

A file names the servers, as desktop clients have them, and for each which of its tools are allowed:

    {"mcpServers": {"files": {"command": "files-server", "args": ["/data"], "allow": ["read_file"]}}}
"""

import asyncio
import json
import keyword
import logging
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult, TextContent
from mcp_types import Tool as OfferedTool

from ..cell.masks import worth_masking
from ..cell.tools import HELPERS, Tool
from ..errors import ConfigError, ToolError
from ..process.environment import looks_secret
from ..process.zygote import LAUNCHER

KEYS = frozenset({"command", "args", "env", "cwd", "allow", "type"})
ALL = "*"
GUARD = "hermes_kernel.sidecar.guard"
_NOT_IN_A_NAME = re.compile(r"\W", re.ASCII)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSpec:
    """One server: how it is started, and which of its tools cells may call; ``*`` is all of them."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    allow: tuple[str, ...] = ()

    def allows(self, tool: str) -> bool:
        """Whether cells may call a tool of this server's."""
        return tool in self.allow or ALL in self.allow


def servers_of(path: Path) -> list[ServerSpec]:
    """Read the file that names the servers; raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_name_twice)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a file with mcpServers") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f"{path} has no mcpServers; give {{'mcpServers': {{name: {{'command': …}}}}}}")
    return [_spec(name, entry, path) for name, entry in servers.items()]


def named(offered: Sequence[tuple[str, OfferedTool]]) -> list[tuple[str, OfferedTool]]:
    """Return the tools with the names that cells call them by.

    A tool's own name, made an identifier; two of one name have that of their server before it.
    """
    short = [_identifier(tool.name) for _, tool in offered]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else f"{_identifier(server)}_{name}"
        for name, (server, _) in zip(short, offered, strict=True)
    ]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"two tools would be named {twice[0]!r}; allow one of them only")
    return [(name, tool) for name, (_, tool) in zip(names, offered, strict=True)]


def value_of(name: str, result: CallToolResult) -> Any:
    """Return what a cell gets of a result: its structure, else its text; raises ToolError for an error."""
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    others = [block.type for block in result.content if not isinstance(block, TextContent)]
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or f"{name} has failed without saying why")
    if result.structured_content is not None:
        return result.structured_content
    return "\n".join([text, *(f"[{kind} that is not shown]" for kind in others)]) if others else text


@dataclass(frozen=True)
class ToolServers:
    """The tools of servers that run as our children, and what of their settings no result may hold."""

    tools: tuple[Tool, ...] = ()
    secrets: frozenset[str] = frozenset()

    @classmethod
    @asynccontextmanager
    async def of(cls, file: str | None, start_timeout: float) -> "AsyncIterator[ToolServers]":
        """Start the servers of a file; they end with the block. Raises ConfigError.

        *start_timeout*: in how many seconds each has to say what it offers.
        """
        specs = [] if file is None else servers_of(Path(file))
        commands = [_command(spec) for spec in specs]
        servers = [_ToolServer(*pair) for pair in zip(specs, commands, strict=True)]
        try:
            offered: list[tuple[_ToolServer, OfferedTool]] = []
            deadline = asyncio.get_running_loop().time() + start_timeout
            for server in servers:
                offered += [(server, tool) for tool in await server.offered(deadline, start_timeout)]
            names = named([(server.spec.name, tool) for server, tool in offered])
            pairs = zip(offered, names, strict=True)
            yield cls(
                tuple(_tool(name, tool, server) for (server, _), (name, tool) in pairs), _secrets_of(specs)
            )
        finally:
            await _ended(servers)


class _ToolServer:
    """One server, in a task of its own: however it ends, nothing else does."""

    def __init__(self, spec: ServerSpec, command: Sequence[str]) -> None:
        self.spec = spec
        self._command = command
        self._client: Client | None = None
        self._offered: asyncio.Future[list[OfferedTool]] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def offered(self, deadline: float, start_timeout: float) -> list[OfferedTool]:
        """Return the tools that cells may call, once the server has said which it has. Raises ConfigError."""
        try:
            async with asyncio.timeout_at(deadline):
                found = await asyncio.shield(self._offered)
        except TimeoutError:
            raise ConfigError(
                f"{self._said()} does not answer within {start_timeout:g} s; try it by hand, or leave it out"
            ) from None
        names = {tool.name for tool in found}
        if missing := sorted(set(self.spec.allow) - names - {ALL}):
            has = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"the MCP server {self.spec.name!r} has no tool {missing[0]!r}; it has {has}")
        return [tool for tool in found if self.spec.allows(tool.name)]

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool; raises ToolError where the server gives no result."""
        if self._client is None:
            raise ToolError(self._gone())
        try:
            return await self._client.call_tool(tool, dict(arguments))
        except MCPError as error:
            raise ToolError(self._gone() if error.code == CONNECTION_CLOSED else error.message) from error

    def leave(self) -> None:
        """Ask for the end of the server."""
        self._leave.set()
        if not self._offered.done():
            self.task.cancel()

    async def _run(self) -> None:
        command, *arguments = self._command
        parameters = StdioServerParameters(
            command=command, args=arguments, env=dict(self.spec.env), cwd=self.spec.cwd
        )
        try:
            async with Client(parameters, cache=None) as client:
                self._offered.set_result(await _all_tools(client))
                self._client = client
                await self._leave.wait()
        except Exception as error:  # noqa: BLE001  # whatever a server does, the others and the cells go on
            if not self._offered.done():
                self._offered.set_exception(ConfigError(self._not_started(_first(error))))
                self._offered.exception()  # looked at: an earlier server may have failed, too
            elif not self._leave.is_set():
                _log.warning("%s has ended: %s", self._said(), _first(error))
        finally:
            self._client = None

    def _said(self) -> str:
        return f"the MCP server {self.spec.name!r} ({self.spec.command})"

    def _not_started(self, error: BaseException) -> str:
        if isinstance(error, MCPError) and error.code == CONNECTION_CLOSED:
            return f"{self._said()} does not start: it has ended before it answered; try it by hand"
        return f"{self._said()} does not start: {error}"

    def _gone(self) -> str:
        return f"the MCP server {self.spec.name!r} has ended; its tools cannot be called any more"


async def _ended(servers: Sequence[_ToolServer]) -> None:
    for server in servers:
        server.leave()
    if servers:
        await asyncio.wait([server.task for server in servers])


async def _all_tools(client: Client) -> list[OfferedTool]:
    found: list[OfferedTool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found


def _tool(name: str, offered: OfferedTool, server: _ToolServer) -> Tool:
    async def call(**arguments: Any) -> Any:
        return value_of(name, await server.call(offered.name, arguments))

    return Tool(name, call, offered.description or offered.title or offered.name, offered.input_schema)


def _command(spec: ServerSpec) -> list[str]:
    """Return what is executed: the program, and where we can, who ends it with all that it starts.

    Raises ConfigError if there is no such program.
    """
    wrong = f"the MCP server {spec.name!r} ({spec.command}) does not start"
    if spec.cwd is not None and not Path(spec.cwd).is_dir():
        raise ConfigError(f"{wrong}: there is no directory {spec.cwd!r}")
    program = spec.command
    if os.path.dirname(program):
        program = os.path.join(spec.cwd or "", program)
    if shutil.which(program, path=spec.env.get("PATH")) is None:
        raise ConfigError(f"{wrong}: there is no program {spec.command!r}; install it, or give its path")
    if sys.platform == "win32":  # a job object of the SDK's sees to it
        return [spec.command, *spec.args]
    return [sys.executable, "-I", "-S", LAUNCHER, GUARD, str(os.getpid()), spec.command, *spec.args]


def _secrets_of(specs: Sequence[ServerSpec]) -> frozenset[str]:
    return frozenset(
        value
        for spec in specs
        for name, value in spec.env.items()
        if looks_secret(name) and worth_masking(value)
    )


def _first(error: BaseException) -> BaseException:
    """Return what is the matter, out of the groups that task groups make of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} is there twice")
    return content


def _spec(name: str, entry: object, path: Path) -> ServerSpec:
    if not isinstance(entry, dict):
        raise ConfigError(f"mcpServers.{name} in {path} is a {type(entry).__name__}; make it an object")
    if unknown := sorted(entry.keys() - KEYS):
        raise ConfigError(f"mcpServers.{name} in {path}: unknown key {unknown[0]!r}; known: {sorted(KEYS)}")
    if entry.get("type", "stdio") != "stdio" or not isinstance(entry.get("command"), str):
        raise ConfigError(f"mcpServers.{name} in {path}: only servers with a command (stdio) can be used")
    allow = entry.get("allow")
    if not _is_texts(allow):
        raise ConfigError(
            f"mcpServers.{name} in {path} does not say which tools cells may call; "
            'give "allow": ["tool", …], or ["*"] for all of them'
        )
    env = entry.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ConfigError(f"mcpServers.{name} in {path}: env is no object of texts")
    args, cwd = entry.get("args", []), entry.get("cwd")
    if not _is_texts(args) or not isinstance(cwd, str | None):
        raise ConfigError(f"mcpServers.{name} in {path}: args is a list of texts, cwd a text")
    return ServerSpec(name, entry["command"], tuple(args), env, cwd, tuple(allow))


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _identifier(name: str) -> str:
    made = _NOT_IN_A_NAME.sub("_", name)
    if not made or made[0].isdigit():
        made = f"_{made}"
    is_taken = keyword.iskeyword(made) or made in HELPERS or (made.startswith("__") and made.endswith("__"))
    return f"{made}_x" if is_taken and made.endswith("_") else f"{made}_" if is_taken else made
