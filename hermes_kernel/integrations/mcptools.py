"""The tools of other MCP servers, as functions that cells can call.

A file names the servers, as desktop clients have them, and for each which of its tools are allowed:

    {"mcpServers": {"files": {"command": "files-server", "args": ["/data"], "allow": ["read_file"]}}}
"""

import json
import keyword
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import CallToolResult, TextContent
from mcp_types import Tool as OfferedTool

from ..cell.tools import HELPERS, Tool
from ..errors import ConfigError, ToolError

KEYS = frozenset({"command", "args", "env", "cwd", "allow", "type"})
ALL = "*"
_NOT_IN_A_NAME = re.compile(r"\W")


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
        content = json.loads(path.read_text(encoding="utf-8"))
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
    """Servers that run as our children, and their tools."""

    tools: tuple[Tool, ...] = ()

    @classmethod
    @asynccontextmanager
    async def of(cls, file: str | None) -> "AsyncIterator[ToolServers]":
        """Start the servers of a file; they end with the block. Raises ConfigError."""
        if file is None:
            yield cls()
            return
        async with AsyncExitStack() as stack:
            clients: dict[str, Client] = {}
            offered: list[tuple[str, OfferedTool]] = []
            for spec in servers_of(Path(file)):
                clients[spec.name] = client = await _started(stack, spec)
                offered += [(spec.name, tool) for tool in await _allowed(client, spec)]
            pairs = zip(offered, named(offered), strict=True)
            yield cls(tuple(_tool(name, tool, clients[server]) for (server, _), (name, tool) in pairs))


async def _started(stack: AsyncExitStack, spec: ServerSpec) -> Client:
    parameters = StdioServerParameters(
        command=spec.command, args=list(spec.args), env=dict(spec.env), cwd=spec.cwd
    )
    try:
        return await stack.enter_async_context(Client(parameters))
    except Exception as error:
        raise ConfigError(f"the MCP server {spec.name!r} ({spec.command}) does not start: {error}") from error


async def _allowed(client: Client, spec: ServerSpec) -> list[OfferedTool]:
    found: list[OfferedTool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    names = {tool.name for tool in found}
    if missing := sorted(set(spec.allow) - names - {ALL}):
        raise ConfigError(
            f"the MCP server {spec.name!r} has no tool {missing[0]!r}; it has {', '.join(sorted(names))}"
        )
    return [tool for tool in found if spec.allows(tool.name)]


def _tool(name: str, offered: OfferedTool, client: Client) -> Tool:
    async def call(**arguments: Any) -> Any:
        return value_of(name, await client.call_tool(offered.name, arguments))

    return Tool(name, call, offered.description or offered.title or offered.name, offered.input_schema)


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
    return f"{made}_" if keyword.iskeyword(made) or made in HELPERS else made
