"""``hermes-kernel replay``: a recorded session, run again and held against its record."""

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..cell.replay import (
    Finding,
    NeverAnsweredError,
    RecordedRun,
    RecordError,
    ToolAnswers,
    compared,
    recorded_runs,
    tools_that_answer,
)
from ..cell.result import CellResult
from ..cell.shown import Cleaner
from ..cell.status import CellStatus
from ..cell.tools import Cancelled
from ..cell.transcript import By
from ..errors import ConfigError
from ..host.blocking import BlockingRegistry
from ..host.options import CallArguments, RegistryOptions
from ..lifecycle.key import Owner
from ..limits import UNSET, Unset
from .config import configuration
from .document import read_file
from .interruption import Interruption
from .printable import printable
from .progress import Place, RunProgress, progress

DIFFERS = 1
MOST_KERNELS = 64
IDLE_TIMEOUT = 30 * 24 * 3600.0  # seconds; an owner's kernel is kept until its last cell has run


@click.command(short_help="Run a recorded session again and compare.")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.ipynb")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a cell on stdout.")
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="How long each cell may run.  [default: as then]"
)
@click.option("--cwd", metavar="DIR", help="Where the cells run.  [default: where they ran]")
@click.option(
    "--python", metavar="PYTHON", help="The kernels' interpreter.  [default: the same, if it is there]"
)
@click.pass_context
def replay(
    ctx: click.Context,
    file: Path,
    *,
    as_json: bool,
    timeout: float | None,
    cwd: str | None,
    python: str | None,
) -> None:
    """Run the cells of a recorded session on fresh kernels, and report what is not as it was.

    The notebook is one that `run --save` or a registry's transcript= has written. Tool calls are answered
    from its record (--record-tools): no tool runs. What cannot be compared, because it was cut, masked or not
    recorded, is reported as a gap and never taken for equal.

    Exit codes: 0 all as it was, 1 a difference or a gap, 2 a usage, configuration or start error, 130
    interrupted.
    """
    runs = _runs(file)
    # Of what is set elsewhere only limits count: the session is run as it was, and leaves no other record.
    configured = configuration().with_arguments(timeout=timeout).limits()
    limits = replace(configured, max_kernels=MOST_KERNELS, idle_timeout=IDLE_TIMEOUT)
    shown = progress()
    last = {run.owner: index for index, run in enumerate(runs, start=1)}
    with Interruption() as interruption, BlockingRegistry(limits=limits) as registry:
        session = Replay(registry, UNSET if timeout is None else timeout, cwd, python, interruption)
        counts = {"same": 0, "different": 0, "gaps": 0}
        for number, run in enumerate(runs, start=1):
            findings = session.run(run)
            if last[run.owner] == number:
                session.close(run.owner)
            if interruption.requested:
                shown.say("Interrupted.")
                break
            place = Place.of(number, len(runs), run.source)
            _tell(run, place, findings, as_json=as_json, shown=shown)
            differs = any(not finding.is_gap for finding in findings)
            counts["different" if differs else "gaps" if findings else "same"] += 1
    shown.say("{same} cells as they were, {different} different, {gaps} with gaps alone".format(**counts))
    ctx.exit(interruption.exit_code or (DIFFERS if counts["different"] or counts["gaps"] else 0))


class Replay:
    """Runs the cells of a session again, each on the kernel that has the state of those before it."""

    def __init__(
        self,
        registry: BlockingRegistry,
        timeout: float | Unset,
        cwd: str | None,
        python: str | None,
        interruption: Interruption,
    ) -> None:
        self._registry = registry
        self._timeout = timeout
        self._cwd = cwd
        self._python = python
        self._interruption = interruption
        self._cleaner: Cleaner = RegistryOptions().cleaner()
        self._kernels: dict[tuple[Any, ...], str] = {}

    def run(self, recorded: RecordedRun) -> list[Finding]:
        """Run one cell; return what is not as it was."""
        key = (recorded.owner, recorded.python, recorded.cwd, recorded.variant)
        before = self._kernels.get(key)
        self._kernels[key] = recorded.kernel_id
        if recorded.status is CellStatus.INTERRUPTED:
            return [Finding("it was interrupted then: that cannot be run again", is_gap=True)]
        answers = ToolAnswers(recorded, self._cleaner)
        lock = threading.Lock()

        def answer(tool: str, arguments: dict[str, Any], place: Sequence[Any], cell_over: Cancelled) -> Any:
            try:
                with lock:
                    return answers.answer(tool, arguments, place)
            except NeverAnsweredError:
                cell_over.wait()  # as it did then
                raise

        arguments: CallArguments = {
            "timeout": self._timeout if isinstance(self._timeout, float) else recorded.timeout,
            "cwd": recorded.cwd if self._cwd is None else self._cwd,
            "python": self._interpreter(recorded),
            "variant": recorded.variant,
            "reset": before is not None and before != recorded.kernel_id,
            "tools": tools_that_answer(recorded.tools, answer),
            "max_tool_calls": recorded.max_tool_calls,
        }
        if recorded.by is By.HUMAN and not isinstance(self._timeout, float):
            arguments["timeout"] = UNSET  # a person has none
        try:
            result = self._registry.execute(
                recorded.source,
                owner=recorded.owner,
                interrupted=lambda: self._interruption.requested,
                **arguments,
            )
        except ConfigError as error:
            raise ConfigError(
                f"cell {recorded.number}: {error} (--cwd and --python choose others)"
            ) from error
        with lock:
            findings = [*compared(recorded, result), *answers.finish()]
        if before == recorded.kernel_id and result.ran and not result.kernel.reused:
            findings.append(_lost(result))
        return findings

    def close(self, owner: Owner) -> None:
        """End the kernels of an owner that has no more cells."""
        self._registry.close_owner(owner)

    def _interpreter(self, recorded: RecordedRun) -> str | None:
        if self._python is not None:
            return self._python
        return recorded.python if os.path.exists(recorded.python) else None  # nor if we may not see it


def _lost(result: CellResult) -> Finding:
    why = "" if result.kernel.lost is None else f" ({result.kernel.lost.value})"
    return Finding(f"it ran on a fresh kernel{why}, and not on that of the cells before it as it did then")


def _runs(file: Path) -> list[RecordedRun]:
    # nbformat takes longer to load than a kernel to start.
    from .notebook import parsed_notebook

    notebook = parsed_notebook(read_file(file), str(file))
    try:
        runs = recorded_runs(notebook)
    except RecordError as error:
        raise ConfigError(f"{file}: {error}") from error
    if not runs:
        raise ConfigError(
            f"{file} holds no cell that has run; record a session with `hermes-kernel run --save`"
        )
    return runs


def _tell(
    run: RecordedRun, place: Place, findings: Sequence[Finding], *, as_json: bool, shown: RunProgress
) -> None:
    differences = [finding.what for finding in findings if not finding.is_gap]
    gaps = [finding.what for finding in findings if finding.is_gap]
    if as_json:
        told = {"cell": run.number, "by": run.by.value, "differences": differences, "gaps": gaps}
        click.echo(json.dumps(told))
        return
    word = "DIFFERS" if differences else "gap" if gaps else "same"
    who = " (human)" if run.by is By.HUMAN else ""
    lines = [f"{place} {word:8}{who} {place.first_line[:60]}".rstrip()]
    for kind, whats in (("difference", differences), ("gap", gaps)):
        lines += [f"    {kind}: " + what.replace("\n", "\n    ") for what in whats]
    click.echo(printable("\n".join(lines)))
