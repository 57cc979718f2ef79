"""``hermes-kernel config``: what is set, and where."""

import json
import math
import os
from pathlib import Path
from typing import Any

import click

from ..errors import plain
from ..host.configuration import Configuration
from .sessions import print_table

_HEADINGS = ("SETTING", "VALUE", "FROM")


def configuration() -> Configuration:
    """Return the configuration of this process; raises ConfigError."""
    try:
        directory = Path.cwd()
    except FileNotFoundError:  # it is gone, with what was in it
        return Configuration.load(os.environ, None)
    return Configuration.load(os.environ, directory)


@click.group(short_help="Show what is set.")
def config() -> None:
    """Show what is set outside of the command line.

    Arguments count before variables (HERMES_KERNEL_TIMEOUT=60), these before a file, and that before the
    defaults. The file is hermes-kernel.toml, or the table [tool.hermes-kernel] of pyproject.toml, in the
    current directory or the nearest one above it, or the one that HERMES_KERNEL_CONFIG names.

    Exit codes: 0 shown, 2 a name or a value is wrong.
    """


@config.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(*, as_json: bool) -> None:
    """Show each setting, its value and where that comes from.

    Exit codes: 0 shown, 2 a name or a value is wrong.
    """
    settings = configuration().settings
    if as_json:
        told = {
            name: {"value": setting.value, "source": setting.source} for name, setting in settings.items()
        }
        click.echo(json.dumps(plain(told)))
        return
    rows = [(name, _shown(setting.value), setting.source) for name, setting in settings.items()]
    print_table([_HEADINGS, *rows])


def _shown(value: Any) -> str:
    if value is None or value == math.inf:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return str(value).replace("\n", "\\n")
