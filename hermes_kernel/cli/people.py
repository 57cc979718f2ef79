"""``hermes-kernel attach``, ``lab`` and ``vars``: a person looks into a live session of an agent."""

import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ..cell.variables import Variable
from ..errors import ConfigError
from ..host.cleaning import cleaner_for
from ..host.variables import read_variables
from ..process.environment import EnvPolicy
from ..process.local import environment_now
from .printable import printable
from .sessions import exposed_session, print_table
from .spec import SOURCES

ANSWER_TIMEOUT = 5.0  # seconds for a kernel to tell its variables
EXTRA = 'pip install "hermes-kernel[lab]"'
LOOPBACK = "127.0.0.1"
KERNELS = "hermes_kernel.cli.livekernels.LiveKernels"  # by name: it needs JupyterLab's server

_HEADINGS = ("NAME", "TYPE", "SIZE", "VALUE")


@click.command(short_help="Open a console on a live session.")
@click.argument("owner")
def attach(owner: str) -> None:
    """Open a console on the live session of OWNER, or of a kernel id's first characters.

    It shows the agent's cells as they run. What is typed runs in the same kernel, and the agent is told that
    it did. Leaving it (exit, or Ctrl-D) ends nothing; the agent's cells cannot be interrupted from here.

    Exit codes: 0 left, 2 there is no such session, it is not exposed, or there is no console.
    """
    _, connection_file = exposed_session(owner)
    try:
        from jupyter_console.app import ZMQTerminalIPythonApp
    except ImportError:
        raise ConfigError(f"the console is not installed; install it with {EXTRA}") from None
    click.echo(
        printable(f"The live session of {owner}: the agent's cells are shown as they run. exit leaves it.")
    )
    ZMQTerminalIPythonApp.launch_instance(
        argv=[
            f"--existing={connection_file}",
            "--ZMQTerminalInteractiveShell.include_other_output=True",
            "--ZMQTerminalInteractiveShell.other_output_prefix=[agent] ",
            "--ZMQTerminalIPythonApp.confirm_exit=False",
        ]
    )


@click.command(short_help="Open JupyterLab with the live sessions in it.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8888, show_default=True, help="0: any free one."
)
@click.option("--no-browser", is_flag=True, help="Only say where it is.")
@click.option(
    "--root-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=".",
    metavar="DIR",
    help="What the file browser shows.  [default: the current directory]",
)
@click.option("--allow-root", is_flag=True, help="Let the server run as root.")
def lab(*, port: int, no_browser: bool, root_dir: Path, allow_root: bool) -> None:
    """Open JupyterLab on this machine, with the live sessions of agents among its running kernels.

    Only sessions whose host was started with expose=True are there, as "Hermes (live session of an agent)"
    and the start of their kernels' ids, which `hermes-kernel ps` shows, too. Notebooks and consoles can be
    attached to them. Interrupt ends a cell of one's own, none of the agent's; restart and shutdown leave a
    session as it is. The page is protected by a token of its own.

    Exit codes: 0 ended, 2 JupyterLab is not installed or cannot be started.
    """
    try:
        from jupyterlab.labapp import LabApp
    except ImportError:
        raise ConfigError(f"JupyterLab is not installed; install it with {EXTRA}") from None
    # The spec of live sessions need not be installed: it is found here.
    os.environ["JUPYTER_PATH"] = os.pathsep.join(
        filter(None, (str(SOURCES.parent), os.environ.get("JUPYTER_PATH")))
    )
    arguments = _lab_arguments(port, root_dir, no_browser=no_browser, allow_root=allow_root)
    try:
        server = LabApp.initialize_server(argv=arguments)
        server.identity_provider.token_generated = True  # else it shows the address without the token
        server.start()
    except SystemExit as ended:
        if ended.code in (None, 0):
            raise
        raise ConfigError(
            "JupyterLab cannot be started: what its server says above is the reason; change that first"
        ) from None


@click.command(name="vars", short_help="Show the variables of a live session.")
@click.argument("owner")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def variables(owner: str, *, as_json: bool) -> None:
    """Show the variables of the live session of OWNER, or of a kernel id's first characters.

    No code of theirs runs for it: objects of classes that Python, NumPy and pandas do not bring are named,
    not shown. SIZE is without what an object refers to.

    Exit codes: 0 shown, 2 there is no such session, it is not exposed, or its kernel does not answer.
    """
    _, connection_file = exposed_session(owner)
    cleaner = cleaner_for(frozenset(), environment_now(), sys.platform, EnvPolicy(), None)
    found = read_variables(connection_file, cleaner, timeout=ANSWER_TIMEOUT)
    if as_json:
        click.echo(json.dumps([asdict(variable) for variable in found]))
    elif found:
        print_table([_HEADINGS, *map(_row, found)])
    else:
        click.echo("There are no variables.")


def _lab_arguments(port: int, root_dir: Path, *, no_browser: bool, allow_root: bool) -> Sequence[str]:
    token = secrets.token_hex(24)  # ours, whatever the user's own configuration says of tokens
    arguments = [
        f"--ServerApp.ip={LOOPBACK}",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={root_dir.absolute()}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.kernel_manager_class={KERNELS}",
        "--ServerApp.allow_external_kernels=False",  # KERNELS finds them
    ]
    return [*arguments, *["--no-browser"] * no_browser, *["--allow-root"] * allow_root]


def _row(variable: Variable) -> tuple[str, ...]:
    return (variable.name, variable.type, _size(variable.size), variable.text)


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    shown: float = size
    for unit in ("B", "KiB", "MiB", "GiB"):
        if shown < 1024 or unit == "GiB":
            break
        shown /= 1024
    return f"{shown:.0f} {unit}"
