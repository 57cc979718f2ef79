"""``hermes-kernel run``: a script or a notebook, cell by cell, on one kernel."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..cell.result import NOTHING, CellResult
from ..errors import ConfigError
from ..host.blocking import BlockingRegistry
from ..host.options import CallArguments
from ..limits import Limits
from ..process.files import check_replaceable
from .config import configuration
from .document import STDIN, Document
from .interruption import Interruption
from .printable import printable
from .progress import Place, RunProgress, progress, succeeded
from .script import Cell
from .toolbox import load_tools

if TYPE_CHECKING:
    from .notebook import NotebookKeeper

OWNER = "hermes-kernel run"
CELL_FAILED = 1


@click.command(short_help="Run a script or a notebook, cell by cell.")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE.py|FILE.ipynb|-")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a cell on stdout, else nothing.")
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="OUT.ipynb",
    help="Write a notebook with the outputs, also if a cell fails.",
)
@click.option(
    "--record-tools",
    is_flag=True,
    help="Keep what the tools were given and gave in it, for `replay`; needs --save.",
)
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help=f"How long each cell may run; 0 = no limit.  [default: {Limits().timeout:g}]",
)
@click.option("--cwd", metavar="DIR", help="Where the cells run.  [default: where the file is]")
@click.option("--python", metavar="PYTHON", help="The kernel's interpreter.  [default: this one]")
@click.option(
    "--tools",
    metavar="PACKAGE.MODULE:NAME",
    help="What the cells can call as hermes_tools.name(...), e.g. a list of functions.",
)
@click.option("--keep-going", is_flag=True, help="Run the cells that follow a failed one, too.")
@click.pass_context
def run(
    ctx: click.Context,
    file: Path,
    *,
    as_json: bool,
    save: Path | None,
    timeout: float | None,
    cwd: str | None,
    python: str | None,
    tools: str | None,
    keep_going: bool,
    record_tools: bool,
) -> None:
    """Run the cells of a script or a notebook on one kernel, one after another.

    A script is split into cells at its lines `# %%`; `-` reads one from stdin. The text of the cells goes to
    stdout, the progress to stderr.

    A cell that fails ends the run, and so does one that ends its kernel with sys.exit. With --keep-going the
    next cell runs, on a fresh kernel if there is none any more: then the state is gone.

    What no option says comes from the environment or a file; `hermes-kernel config show` shows it.

    Exit codes: 0 all cells fine, 1 a cell failed, 2 a usage, configuration or start error, 130 interrupted.
    """
    settings = configuration().with_arguments(timeout=timeout, cwd=cwd, python=python)
    registry_arguments = settings.registry_arguments()
    if save is not None:
        _check_save(save)
    elif record_tools:
        raise click.UsageError("--record-tools needs --save: the record is kept in the notebook")
    document = Document.read(file, with_notebook=save is not None)
    arguments = settings.call_arguments()
    if arguments["cwd"] is None:
        arguments["cwd"] = _default_cwd(file)
    if tools is not None:
        arguments["tools"] = load_tools(tools)
    keeper = document.keeper(record_tools=record_tools)
    with Interruption() as interruption, BlockingRegistry(**registry_arguments, _keeper=keeper) as registry:
        cell_run = CellRun(registry, document, arguments, interruption, progress(), keeper)
        try:
            failed = cell_run.run(as_json=as_json, keep_going=keep_going)
        finally:
            if save is not None and document.notebook is not None and cell_run.may_save:
                document.notebook.write(save, private=record_tools)
    ctx.exit(interruption.exit_code or (CELL_FAILED if failed else 0))


class CellRun:
    """One run of a document's cells."""

    def __init__(
        self,
        registry: BlockingRegistry,
        document: Document,
        arguments: CallArguments,
        interruption: Interruption,
        shown: RunProgress,
        keeper: "NotebookKeeper | None",
    ) -> None:
        self._registry = registry
        self._document = document
        self._arguments = arguments
        self._interruption = interruption
        self._shown = shown
        self._keeper = keeper
        self._to_run = [(index, cell) for index, cell in enumerate(document.cells) if cell.runs]
        self._done = 0

    @property
    def may_save(self) -> bool:
        """Whether there is more to keep than that no kernel came up."""
        return self._done > 0 or not self._to_run

    def run(self, *, as_json: bool, keep_going: bool) -> int:
        """Run the cells up to the one that ends the run; return how many have failed."""
        total = len(self._to_run)
        if not total:
            self._shown.say(f"{self._document.name} has no cells to run.")
        failed = 0
        for number, (index, cell) in enumerate(self._to_run, start=1):
            result = self._run_cell(index, Place.of(number, total, cell.source), cell)
            self._show(result, as_json=as_json)
            failed += not succeeded(result)
            left = total - number
            if self._interruption.requested:
                self._shown.say(f"Interrupted; {_cells(left)} not run.")
                break
            if left and not keep_going and (result.kernel.ended or not succeeded(result)):
                how = "ended the kernel" if succeeded(result) else "failed"
                self._shown.say(
                    f"Stopped: cell {number} {how}; {_cells(left)} not run (--keep-going runs them)."
                )
                break
        return failed

    def _run_cell(self, index: int, place: Place, cell: Cell) -> CellResult:
        if self._keeper is not None:
            self._keeper.index = index
        with self._shown.running(place):
            result = self._registry.execute(
                cell.source, owner=OWNER, interrupted=lambda: self._interruption.requested, **self._arguments
            )
        self._done += 1
        self._shown.ran(place, result)
        return result

    def _show(self, result: CellResult, *, as_json: bool) -> None:
        if as_json:
            click.echo(result.to_json().encode("utf-8"))
        elif result.text:
            click.echo(printable(result.text), nl=not result.text.endswith("\n"))
        if result.warning not in (None, NOTHING):  # a person sees that there is nothing
            self._shown.say(result.warning)
        sentence = result.to_dict().get("error")
        if sentence is not None and result.error is None:  # an exception's is in the text
            self._shown.say(sentence)


def _cells(count: int) -> str:
    return "1 cell was" if count == 1 else f"{count or 'no'} cells were"


def _check_save(save: Path) -> None:
    """Refuse a place for the notebook before anything runs."""
    problem = None
    if not os.path.isdir(save.parent):  # of a name that is too long there is none either
        problem = f"there is no directory {str(save.parent)!r}; make it first"
    elif os.path.exists(save) and not os.path.isfile(save):
        problem = f"{str(save)!r} is not a file; give a file's name"
    elif save.suffix != ".ipynb":
        problem = f"{str(save)!r} would become a notebook; give a name that ends in .ipynb"
    else:
        try:
            check_replaceable(save)
        except OSError as error:
            why = error.strerror or str(error)
            problem = f"{str(save)!r} cannot be written: {why}; give another place, or a shorter name"
    if problem is not None:
        raise click.BadParameter(problem, param_hint="'--save'")


def _default_cwd(file: Path) -> str:
    try:
        return str(Path.cwd() if file == STDIN else file.absolute().parent)
    except FileNotFoundError:
        raise ConfigError("the current directory is gone; give one with --cwd") from None
