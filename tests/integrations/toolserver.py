"""A small MCP server, built with the SDK, whose tools a test gives to cells.

``python -m tests.integrations.toolserver [SOCKET]``: a tool that waits says so at the socket, which is closed
when it, or what it has started, is gone.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any, Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult

PIXEL = b"\x89PNG\r\n\x1a\n"

server = MCPServer("tools of the tests", log_level="ERROR")
held: list[socket.socket] = []


def say(text: str) -> None:
    """Tell the test, and keep the connection as long as this process, or a child that has it, lives."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    connection.sendall(f"{text}\n".encode())
    connection.set_inheritable(True)
    held.append(connection)


@server.tool()
def add(a: int, b: int = 1) -> dict[str, Any]:
    """Add two numbers.

    The second line.
    """
    return {"sum": a + b}


@server.tool(structured_output=False)
def plain(text: str, times: int | None = None, kind: Literal["upper", "lower"] = "upper") -> str:
    """Give a text back."""
    return f"{getattr(text, kind)()} {times}"


@server.tool()
def picture() -> Image:
    """Paint."""
    return Image(data=PIXEL, format="png")


@server.tool(name="odd-name.v2")
def odd() -> CallToolResult:
    """Has a name that is no identifier, and no content."""
    return CallToolResult(content=[])


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
async def wait(name: str) -> str:
    """Wait for ever."""
    say(f"waiting {name}")
    try:
        await asyncio.Event().wait()
    finally:
        say(f"cancelled {name}")
    return "never"


@server.tool()
async def meet(name: str, others: int) -> str:
    """Wait until the others are here, too."""
    meeting.append(name)
    arrived.set() if len(meeting) > others else None
    await arrived.wait()
    return name


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def environment(name: str) -> dict[str, str | None]:
    """A variable of this server."""
    return {"value": os.environ.get(name)}


@server.tool()
def noise() -> str:
    """Write to standard output, where only the protocol may be."""
    os.write(1, b"noise\n")
    subprocess.run(["echo", "noise"], check=True)
    return "written"


@server.tool()
async def linger() -> str:  # on the main thread, where signals are
    """Ignore what asks for an end, and have a child in a session of its own that does so, too."""
    say("lingers")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    children.append(
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, pass_fds=[held[-1].fileno()])
    )
    return json.dumps([os.getpid(), children[-1].pid])


meeting: list[str] = []
arrived = asyncio.Event()
children: "list[subprocess.Popen[bytes]]" = []

if __name__ == "__main__":
    server.run("stdio")
    if children:
        signal.pause()  # standard input is closed: a server that does not care
