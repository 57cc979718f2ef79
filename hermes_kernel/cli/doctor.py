"""``hermes-kernel doctor``: what is here, and whether a kernel starts."""

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import click

from .. import __version__
from ..cell.status import CellStatus
from ..errors import HermesKernelError, KernelStartError
from ..host.blocking import BlockingRegistry
from ..limits import Limits
from ..process.local import PLAIN
from ..process.staging import StagingError, runtime_base
from .printable import printable

OWNER = "hermes-kernel doctor"
CANNOT_START = 2
PACKAGES = ("jupyter_client", "ipykernel", "pyzmq", "ipython")

_QUESTION, _ANSWER = "6 * 7", "42"
_VERSIONS = """\
import importlib.metadata, json, platform
print(json.dumps([platform.python_version(), importlib.metadata.version("ipykernel"),
                  importlib.metadata.version("ipython")]))
"""


@dataclass(frozen=True)
class KernelCheck:
    """What became of a kernel that was started to see whether it works.

    ``milliseconds`` is the time from the call to the answer, the start included. ``isolation`` is the level
    in force. ``degraded`` says what is not as it was asked for, if anything; ``error`` why there is none,
    ``log_tail`` what it wrote then.
    """

    interpreter: str
    works: bool = False
    milliseconds: int | None = None
    python: str | None = None
    ipykernel: str | None = None
    ipython: str | None = None
    transport: str | None = None
    start_method: str | None = None
    isolation: str | None = None
    degraded: str | None = None
    error: str | None = None
    log_tail: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that doctor tells."""

    hermes_kernel: str
    python: str
    executable: str
    platform: str
    packages: dict[str, str | None]
    runtime_directory: str | None
    runtime_directory_problem: str | None
    plain: bool
    kernel: KernelCheck


@click.command(short_help="Show what is installed and whether a kernel starts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--python", metavar="PYTHON", help="The interpreter to check.  [default: this one]")
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool, python: str | None) -> None:
    """Show what is installed, where kernels keep their files, and whether one starts and answers.

    Exit codes: 0 a kernel works, 2 it does not.
    """
    found = diagnosis(python)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        _print(found)
    if found.kernel.error is not None:
        tail = f"\n{found.kernel.log_tail}" if found.kernel.log_tail else ""
        click.echo(f"Error: {found.kernel.error}{tail}", err=True)
    ctx.exit(0 if found.kernel.works else CANNOT_START)


def diagnosis(python: str | None) -> Diagnosis:
    """Look at this installation and start a kernel with *python* (None: this interpreter)."""
    directory, problem = None, None
    try:
        directory = str(runtime_base())
    except StagingError as error:
        problem = str(error)
    return Diagnosis(
        hermes_kernel=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
        runtime_directory=directory,
        runtime_directory_problem=problem,
        plain=os.environ.get(PLAIN) == "1",
        kernel=check_kernel(python),
    )


def check_kernel(python: str | None) -> KernelCheck:
    """Start a kernel, ask it something and end it."""
    interpreter = python or sys.executable
    try:
        with BlockingRegistry(limits=Limits(timeout=30)) as registry:
            return _asked(registry, interpreter)
    except KernelStartError as error:
        return KernelCheck(interpreter, error=error.message, log_tail=error.log_tail)
    except HermesKernelError as error:
        return KernelCheck(interpreter, error=str(error))


def _asked(registry: BlockingRegistry, interpreter: str) -> KernelCheck:
    began = time.monotonic()
    result = registry.execute(_QUESTION, owner=OWNER, python=interpreter)
    milliseconds = round((time.monotonic() - began) * 1000)
    manager = registry.manager(OWNER)
    if result.status is not CellStatus.OK or result.value != _ANSWER or manager is None:
        answer = result.to_dict().get("error") or result.text
        return KernelCheck(
            interpreter,
            error=f"the kernel was asked for {_QUESTION} and said {answer!r}; try another one with --python",
        )
    (info,) = registry.kernels()
    told = registry.execute(_VERSIONS, owner=OWNER, python=interpreter)
    python, ipykernel, ipython = json.loads(told.stdout) if told.status is CellStatus.OK else [None] * 3
    return KernelCheck(
        info.python,
        works=True,
        milliseconds=milliseconds,
        python=python,
        ipykernel=ipykernel,
        ipython=ipython,
        transport=manager.transport,
        start_method=None if manager.launched is None else manager.launched.start_method,
        isolation=info.isolation,
        degraded=info.degraded,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(found: Diagnosis) -> None:
    kernel = found.kernel
    lines = {
        "hermes_kernel": found.hermes_kernel,
        "python": f"{found.python}  {found.executable}",
        **{name: number or "not installed" for name, number in found.packages.items()},
        "platform": found.platform,
        "kernels' files": f"{found.runtime_directory} (private)"
        if found.runtime_directory
        else f"not usable: {found.runtime_directory_problem}",
        PLAIN: "1 (stock paths are asked for)" if found.plain else "not set",
        "interpreter": kernel.interpreter,
    }
    if kernel.works:
        lines |= {
            "its versions": f"python {kernel.python}, ipykernel {kernel.ipykernel}, ipython {kernel.ipython}",
            "transport": f"{kernel.transport}",
            "start method": f"{kernel.start_method}",
            "isolation": f"{kernel.isolation}",
            "degraded": kernel.degraded or "no",
            "kernel": f"started and answered {_QUESTION} = {_ANSWER} in {kernel.milliseconds} ms",
        }
    else:
        lines["kernel"] = "does not work"
    width = max(map(len, lines))
    for name, text in lines.items():
        click.echo(f"{click.style(f'{name:{width}}', bold=True)}  {printable(text)}")
