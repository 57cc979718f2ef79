"""Builds the results of a registry's cells: what they show, within its limits, and files for the rest."""

import asyncio
from collections.abc import Sequence
from functools import partial

from ..cell.outputs import OutputCollector
from ..cell.result import CellResult, KernelReport, LateOutput, cell_result
from ..cell.shown import Budget, present
from ..limits import Limits
from .options import Call
from .session import CellOutcome
from .spill import SpillStore

QUICK = 100_000  # characters that are read through on the loop

Late = Sequence[tuple[int | None, OutputCollector]]
"""What earlier cells have written since they were settled: the number of each, and that."""


class Results:
    """Makes a result of what came of a call."""

    def __init__(self, limits: Limits) -> None:
        self._budget = Budget(limits.output_bytes, limits.stderr_bytes, limits.spill_bytes)
        self._late_budget = Budget(limits.stderr_bytes, limits.stderr_bytes, spill=0)
        self._store = SpillStore(limits.spill_dir)

    async def built(
        self,
        call: Call,
        outcome: CellOutcome,
        report: KernelReport,
        *,
        duration: float,
        execution_count: int,
        late: Late = (),
    ) -> CellResult:
        """Build a result; where there is much to read through, not on the loop, which others wait for."""
        build = partial(
            self._build, call, outcome, report, duration=duration, execution_count=execution_count, late=late
        )
        if outcome.outputs.size + sum(outputs.size for _, outputs in late) <= QUICK:
            return build()
        try:
            return await asyncio.get_running_loop().run_in_executor(None, build)
        except RuntimeError:  # the interpreter ends: no thread can be started any more
            return build()

    def _build(
        self,
        call: Call,
        outcome: CellOutcome,
        report: KernelReport,
        *,
        duration: float,
        execution_count: int,
        late: Late,
    ) -> CellResult:
        ended = outcome.exit
        return cell_result(
            outcome.settlement,
            outcome.outputs,
            times=call.request.times,
            report=report,
            duration=duration,
            execution_count=execution_count,
            signal=None if ended is None else ended.signal,
            lost_bytes=outcome.lost_bytes,
            note=outcome.note,
            tool_calls=outcome.tool_calls,
            calls_made=outcome.calls_made,
            late_output=tuple(
                LateOutput(count, present(outputs, None, budget=self._late_budget, cleaner=call.cleaner).text)
                for count, outputs in late
            ),
            tools=() if call.tools is None else tuple(call.tools.tools.tools),
            budget=self._budget,
            cleaner=call.cleaner,
            store=self._store,
        )
