"""An MCP server whose tool is a live kernel: what a desktop client or another agent calls over stdio."""

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    ImageContent,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from .. import __version__
from ..cell.events import CellEvent, StreamText, ToolCallStarted
from ..cell.result import CellResult
from ..cell.status import CellStatus
from ..cell.tools import Tool as CellTool
from ..errors import ConfigError, HermesKernelError
from ..host.configuration import Configuration
from ..host.options import CallArguments
from ..host.registry import KernelRegistry
from .mcpstdio import claimed, ends_at_a_signal, talk
from .mcptools import ToolServers

PROGRESS_EVERY = 0.5  # seconds between two messages on how far a cell is
PROGRESS_TEXT = 2_000  # characters of new output in one of them, from its end
IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_UNKNOWN = "unknown tool {0!r}; there are execute_code, reset and list_kernels"

EXECUTE_CODE = """\
Run Python code in this session's live kernel and return what it shows: printed text, the value of the last
expression, images, the traceback of an error. Variables, imports and functions stay from call to call. Code
that runs longer than its limit, or is cancelled, costs the kernel: its state is lost, and the next call has a
fresh one and is told so."""
RESET = (
    "End this session's kernel with all that it has started. The next execute_code starts with a fresh one."
)
LIST_KERNELS = "List the live kernels of this server: state, number of cells run, process id, directory."

_log = logging.getLogger(__name__)


def tool_list(tools: Sequence[CellTool]) -> list[Tool]:
    """Return the tools of the server; the first tells what its cells can call."""
    called = "".join(f"\n* {tool.name}: {_first_line(tool.description)}" for tool in tools)
    more = f"\nThe code can call, as hermes_tools.name(...):{called}" if tools else ""
    code = {
        "code": {"type": "string", "description": "Python code; its last expression is shown."},
        "reset": {"type": "boolean", "description": "Begin with a fresh kernel."},
        "timeout": {"type": "number", "description": "How many seconds the code may run; 0 = no limit."},
    }
    nothing = {"type": "object", "properties": {}}
    return [
        Tool(
            name="execute_code",
            description=EXECUTE_CODE + more,
            input_schema={"type": "object", "properties": code, "required": ["code"]},
            annotations=ToolAnnotations(title="Run Python code", read_only_hint=False),
        ),
        Tool(name="reset", description=RESET, input_schema=nothing),
        Tool(
            name="list_kernels",
            description=LIST_KERNELS,
            input_schema=nothing,
            annotations=ToolAnnotations(read_only_hint=True),
        ),
    ]


def _first_line(description: str) -> str:
    return next(iter(description.strip().splitlines()), "")


def content_of(result: CellResult) -> list[ContentBlock]:
    """Return what a model reads and sees of a result: its text, what else it is told, its images."""
    said = [result.text.rstrip("\n")]
    if result.message is not None and result.error is None:
        said.append(f"[{result.message}]")
    said += [f"[{word}]" for word in (result.warning, result.hint) if word is not None]
    said += [f"[late output of cell {late.execution_count}]\n{late.text}" for late in result.late_output]
    content: list[ContentBlock] = [TextContent(text="\n".join(filter(None, said)))]
    for output in result.to_notebook_outputs():
        for mime, data in output.get("data", {}).items():
            if mime in IMAGES and isinstance(data, str):
                content.append(ImageContent(data=data.replace("\n", ""), mime_type=mime))
    return content


def tool_result(result: CellResult) -> CallToolResult:
    """Return a cell's result as that of a tool call; a failed cell is an error that the model sees."""
    failed = result.status is not CellStatus.OK and not (
        result.status is CellStatus.EXITED and result.exit_code == 0
    )
    return CallToolResult(
        content=content_of(result), structured_content=json.loads(result.to_json()), is_error=failed
    )


@dataclass(frozen=True)
class CodeArguments:
    """The arguments of ``execute_code``, checked."""

    code: str
    reset: bool = False
    timeout: float | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> "CodeArguments":
        """Check what a client has sent; raises ConfigError."""
        if unknown := sorted(given.keys() - {"code", "reset", "timeout"}):
            raise ConfigError(f"execute_code takes no {unknown[0]!r}; it takes code, reset and timeout")
        code, reset, timeout = given.get("code"), given.get("reset", False), given.get("timeout")
        if not isinstance(code, str) or not code.strip():
            raise ConfigError("execute_code needs code: give Python code as a text that is not empty")
        if not isinstance(reset, bool):
            raise ConfigError(f"reset={reset!r}: give true or false")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)):
            raise ConfigError(f"timeout={timeout!r}: give a number of seconds")
        return cls(code, reset, timeout)


class KernelServer:
    """Serves the tools to one client: one conversation, one owner."""

    def __init__(
        self, registry: KernelRegistry, arguments: CallArguments, tools: Sequence[CellTool] = ()
    ) -> None:
        self._registry = registry
        self._arguments = arguments
        self._tools = tools
        self._owner = f"mcp-{uuid.uuid4().hex[:12]}"

    @property
    def server(self) -> "Server[dict[str, Any]]":
        """What speaks the protocol."""
        return Server(
            "hermes-kernel",
            version=__version__,
            instructions="execute_code runs Python in a live kernel that this session has for itself.",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )

    async def _list_tools(
        self, context: "ServerRequestContext[Any]", params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=tool_list(self._tools))

    async def _call_tool(
        self, context: "ServerRequestContext[Any]", params: CallToolRequestParams
    ) -> CallToolResult:
        try:
            match params.name:
                case "execute_code":
                    return await self._execute(context, CodeArguments.of(params.arguments or {}))
                case "reset":
                    return await self._reset()
                case "list_kernels":
                    return await self._list_kernels()
            raise ConfigError(_UNKNOWN.format(params.name))
        except HermesKernelError as error:
            return CallToolResult(
                content=[TextContent(text=str(error))],
                structured_content=json.loads(error.to_json()),
                is_error=True,
            )

    async def _execute(self, context: "ServerRequestContext[Any]", given: CodeArguments) -> CallToolResult:
        """Run one cell; the client is told of its output meanwhile. Cancelling the call interrupts it."""
        progress = _Progress(context)
        arguments: CallArguments = {
            **self._arguments,
            "reset": given.reset,
            "tools": self._tools,
            "on_event": progress.tell,
        }
        if given.timeout is not None:
            arguments["timeout"] = given.timeout
        telling = asyncio.create_task(progress.run())
        try:
            result = await self._registry.execute(given.code, owner=self._owner, **arguments)
        finally:
            telling.cancel()
        return tool_result(result)

    async def _reset(self) -> CallToolResult:
        ended = await self._registry.close_owner(self._owner)
        said = "The kernel is ended." if ended else "There was no kernel."
        return CallToolResult(
            content=[TextContent(text=f"{said} The next call starts with a fresh one.")],
            structured_content={"ended": ended},
        )

    async def _list_kernels(self) -> CallToolResult:
        kernels: list[dict[str, Any]] = [
            {
                "kernel_id": info.kernel_id,
                "state": info.state.value,
                "execution_count": info.execution_count,
                "pid": info.pid,
                "python": info.python,
                "cwd": info.cwd,
                "isolation": info.isolation,
                "started": info.started,
            }
            for info in await self._registry.kernels()
        ]
        said = "\n".join(
            f"{kernel['kernel_id'][:12]}  {kernel['state']}  {kernel['execution_count']} cells  "
            f"pid {kernel['pid']}"
            for kernel in kernels
        )
        return CallToolResult(
            content=[TextContent(text=said or "There is no live kernel.")],
            structured_content={"kernels": kernels},
        )


class _Progress:
    """Tells a client what its cell has written since it was told last, if it wants to know."""

    def __init__(self, context: "ServerRequestContext[Any]") -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._text = ""
        self._left_out = 0
        self._sent = 0

    def tell(self, event: CellEvent) -> None:
        """Take in an event, on the thread of the events."""
        if isinstance(event, StreamText):
            self._loop.call_soon_threadsafe(self._add, event.text, event.skipped)
        elif isinstance(event, ToolCallStarted):
            self._loop.call_soon_threadsafe(self._add, f"[{event.name}({event.args})]\n")

    def _add(self, text: str, skipped: int = 0) -> None:
        whole = self._text + text
        self._text = whole[-PROGRESS_TEXT:]
        self._left_out += len(whole) - len(self._text) + skipped

    def _take(self) -> str:
        """Return what is new; the result will have what is left out here."""
        text = f"[… {self._left_out} characters]\n{self._text}" if self._left_out else self._text
        self._text, self._left_out = "", 0
        return text

    async def run(self) -> None:
        """Send what there is, now and then, until the cell is over."""
        while True:
            await asyncio.sleep(PROGRESS_EVERY)
            if text := self._take():
                self._sent += 1
                try:
                    await self._context.session.report_progress(self._sent, message=text)
                except Exception as error:  # noqa: BLE001  # the client has gone: the cell is told by that
                    _log.info("a client is not told of its cell: %s", error)
                    return


async def serve(configuration: Configuration, tools_from: str | None = None) -> int:
    """Serve one client on standard input and output until it goes; then nothing is left.

    *tools_from*: a file with MCP servers whose tools the cells can call. Returns the exit code: 0, or that of
    a signal that asked for the end. Raises ConfigError.
    """
    with ends_at_a_signal() as caught:
        try:
            await _serve(configuration, tools_from)
        except asyncio.CancelledError:
            if not caught:
                raise
        return 128 + caught[0] if caught else 0


async def _serve(configuration: Configuration, tools_from: str | None) -> None:
    # A line of a server's that is no message would be told with a traceback, and there may be many.
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
    arguments = configuration.registry_arguments()
    with claimed() as (source, target):
        async with ToolServers.of(tools_from, arguments["limits"].start_timeout) as servers:
            arguments["secrets"] = servers.secrets
            async with KernelRegistry(**arguments) as registry:
                kernels = KernelServer(registry, configuration.call_arguments(), servers.tools)
                await talk(kernels.server, source, target)
