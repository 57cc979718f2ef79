"""The protocol's own client, as a test uses it."""

import asyncio
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import psutil
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, ImageContent, TextContent

WAIT = 60.0  # seconds: nothing here takes as long
ARGUMENTS = ("-m", "hermes_kernel.cli", "mcp")
COMMAND = (sys.executable, *ARGUMENTS)

P = ParamSpec("P")


def story(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), WAIT))

    return run


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


class Connected(Client):
    """A client and the process of its server."""

    process: psutil.Process
    said: Path

    async def run(self, code: str, **more: Any) -> CallToolResult:
        return await self.call_tool("execute_code", {"code": code, **more})

    async def begin(self, code: str, until: str = "begun", **more: Any) -> "asyncio.Task[CallToolResult]":
        """Begin a call; return when its cell has written what is waited for."""
        written = Written()
        call = asyncio.create_task(
            self.call_tool("execute_code", {"code": code, **more}, progress_callback=written)
        )
        await asyncio.wait({call, asyncio.create_task(written.has(until))}, return_when="FIRST_COMPLETED")
        assert not call.done(), call.result()
        self.written = written.text
        return call


class Written:
    """What the progress of a call has told."""

    def __init__(self) -> None:
        self.text = ""
        self._changed = asyncio.Condition()

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        async with self._changed:
            self.text += message or ""
            self._changed.notify_all()

    async def has(self, text: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: text in self.text)


@asynccontextmanager
async def connected(
    said: Path, *arguments: str | Path, mode: str = "auto", cwd: Path | None = None, **env: str
) -> AsyncIterator[Connected]:
    """Start the server as clients do; what it says on its standard error is in the file *said*."""
    command = StdioServerParameters(
        command=sys.executable,
        args=[*ARGUMENTS, *map(str, arguments)],
        env=environment(**env),
        cwd=cwd,
    )
    before = set(psutil.Process().children())
    with said.open("w") as errlog:
        async with Connected(stdio_client(command, errlog), mode=mode) as client:
            (client.process,) = set(psutil.Process().children()) - before
            client.said = said
            yield client


def text_of(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def images_of(result: CallToolResult) -> list[ImageContent]:
    return [block for block in result.content if isinstance(block, ImageContent)]


async def cancelled(call: "asyncio.Task[Any]") -> None:
    """Cancel a call, as a client does whose user has lost patience."""
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()
