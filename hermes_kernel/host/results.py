"""Builds the results of a registry's cells: what they show, within its limits, and files for the rest."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ..cell.outputs import OutputCollector
from ..cell.result import CellResult, KernelReport, LateOutput, cell_result
from ..cell.shown import Budget, Cleaner, present
from ..cell.toolrecord import RecordedCall, RecordedCatalogue
from ..cell.transcript import HumanCell, RanCell
from ..cell.variables import Variable, variables_of
from ..errors import KernelStartError
from ..lifecycle.key import KernelKey
from ..limits import Limits
from .cleaning import HostCleaner
from .foreign import LONGEST_CODE, ForeignCell
from .options import Call
from .session import CellOutcome
from .spill import SpillStore

QUICK = 100_000  # characters that are read through on the loop

T = TypeVar("T")
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
        size = outcome.outputs.size + sum(outputs.size for _, outputs in late)
        return await _done(build, size, call.cleaner)

    async def ran_cell(
        self, call: Call, result: CellResult, outcome: CellOutcome
    ) -> tuple[RanCell, RecordedCatalogue | None]:
        """Return a call as a transcript has it, and the catalogue that goes with its recorded tool calls."""
        tools = call.tools if call.tools is not None and call.tools.record else None
        started = time.time() - result.duration

        def build() -> tuple[RanCell, RecordedCatalogue | None]:
            calls = tuple(RecordedCall.of(full, call.cleaner) for full in outcome.recorded)
            catalogue = None if tools is None else RecordedCatalogue.of(tools.tools, call.cleaner)
            ran = RanCell(
                call.request.code,
                call.key,
                result,
                started,
                timeout=call.request.times.timeout,
                max_tool_calls=None if call.tools is None else call.tools.limit,
                record=None if tools is None else calls,
                tools=None if catalogue is None else catalogue.digest,
            )
            return ran, catalogue

        size = sum(full.arguments_size + full.result_size for full in outcome.recorded)
        return await _done(build, size, call.cleaner)

    async def mask(self, error: KernelStartError, cleaner: Cleaner) -> None:
        """Take out of an error, which tells what a kernel has written, what nobody may read."""
        await _done(lambda: error.mask(cleaner.mask), len(str(error)), cleaner)

    async def variables(self, told: Mapping[str, Any], cleaner: Cleaner) -> tuple[Variable, ...]:
        """Return what a kernel tells of its variables; raises MalformedMessage."""
        return await _done(lambda: variables_of(told, cleaner), QUICK + 1, cleaner)

    async def human_cell(
        self, key: KernelKey, kernel_id: str, foreign: ForeignCell, cleaner: Cleaner
    ) -> HumanCell:
        """Return a cell of another client as a transcript has it."""

        def build() -> HumanCell:
            shown = present(
                foreign.outputs,
                foreign.outputs.error,
                budget=self._budget,
                cleaner=cleaner,
                store=self._store,
            )
            duration = (time.time() if foreign.ended is None else foreign.ended) - foreign.began
            return HumanCell(
                foreign.code[:LONGEST_CODE],
                key,
                kernel_id,
                shown.outputs,
                foreign.execution_count,
                foreign.began,
                max(duration, 0.0),
                masked=shown.masked,
                truncated=shown.truncated or shown.shortened or len(foreign.code) > LONGEST_CODE,
                ended=foreign.ended is not None,
            )

        return await _done(build, foreign.outputs.size, cleaner)

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


async def _done(build: Callable[[], T], size: int, cleaner: Cleaner) -> T:
    """Call *build* here, or on a thread if it has much to read through or calls the host's own function."""
    if size <= QUICK and not isinstance(cleaner, HostCleaner):
        return build()
    try:
        return await asyncio.get_running_loop().run_in_executor(None, build)
    except RuntimeError:  # the interpreter ends: no thread can be started any more
        return build()
