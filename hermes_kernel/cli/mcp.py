"""``hermes-kernel mcp``: the MCP server."""

import asyncio

import click

from ..errors import ConfigError
from .config import configuration


@click.command(short_help="Serve a live kernel to an MCP client.")
@click.option(
    "--tools-from",
    metavar="CONFIG.json",
    help="MCP servers whose tools the code can call, each with the list of those it may.",
)
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="How long code may run, where a call does not say."
)
@click.option("--cwd", metavar="DIR", help="Where the code runs.  [default: a directory of its own]")
@click.option("--python", metavar="PYTHON", help="The kernel's interpreter.  [default: this one]")
@click.pass_context
def mcp(
    ctx: click.Context, *, tools_from: str | None, timeout: float | None, cwd: str | None, python: str | None
) -> None:
    """Serve execute_code, reset and list_kernels to an MCP client, over standard input and output.

    The client starts this command. Its session has one kernel, which ends with it. Settings come from the
    options, the environment and a file; `hermes-kernel config show` shows them.

    Exit codes: 0 the client has gone, 2 the server is not installed or a setting is wrong, 128 + N signal N
    has ended it.
    """
    try:
        from ..integrations.mcp import serve
    except ImportError as error:
        raise ConfigError(
            f'the MCP server is not installed ({error}); install it with pip install "hermes-kernel[mcp]"'
        ) from error
    settings = configuration().with_arguments(timeout=timeout, cwd=cwd, python=python)
    ctx.exit(asyncio.run(serve(settings, tools_from)))
