"""The commands, and the edge where what went wrong becomes one sentence and an exit code."""

import errno
from typing import Any

import click

from .. import __version__
from ..errors import HermesKernelError, KernelStartError
from .config import config
from .doctor import doctor
from .interruption import exit_code_of_interrupt
from .mcp import mcp
from .people import attach, lab, variables
from .replay import replay
from .run import run
from .sessions import kill, ps
from .spec import spec

CANNOT = 2
"""Exit code of a usage, configuration or start error; click's usage errors have it too."""

BROKEN_PIPE = 141
"""Exit code if the reader of our output has gone, as a shell reports a death by SIGPIPE."""


class Commands(click.Group):
    """A group whose commands may raise what this package raises; the user gets no traceback for it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except HermesKernelError as error:
            click.echo(f"Error: {_sentence(error)}", err=True)
            ctx.exit(CANNOT)
        except KeyboardInterrupt:
            ctx.exit(exit_code_of_interrupt())
        except OSError as error:  # files are read and written where it is known which; this is our output
            if error.errno == errno.EPIPE:
                ctx.exit(BROKEN_PIPE)
            click.echo(f"Error: the output cannot be written: {error}; send it to another place", err=True)
            ctx.exit(CANNOT)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hermes-kernel")
def main() -> None:
    """Run notebooks and scripts on live Jupyter kernels.

    Exit codes: 0 all is well, 1 a cell failed, 2 a usage, configuration or start error, 130 interrupted.
    """


main.add_command(run)
main.add_command(replay)
main.add_command(config)
main.add_command(doctor)
main.add_command(spec)
main.add_command(ps)
main.add_command(kill)
main.add_command(attach)
main.add_command(lab)
main.add_command(mcp)
main.add_command(variables)


def _sentence(error: HermesKernelError) -> str:
    """What the user reads: a sentence and, for a kernel that did not start, the end of its log below."""
    if not isinstance(error, KernelStartError):
        return str(error)
    sentence = f"{error.message}; `hermes-kernel doctor` shows what a kernel needs"
    return f"{sentence}\n{error.log_tail}" if error.log_tail else sentence
