"""OpenTelemetry: a span for each cell, below the span in which it was called, and a child for each tool call.

::

    from hermes_kernel.integrations.otel import instrument

    instrument()  # or instrument(tracer_provider)

Spans hold whose cell it was, how it ended and how much it showed: no code, no output, no arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from .. import __version__
from ..cell.events import ToolCallEnded, ToolCallStarted
from ..cell.result import CellResult
from ..cell.status import CellStatus
from ..host.observe import forget, observe
from ..lifecycle.key import KernelKey

CELL_SPAN, TOOL_SPAN = "execute_code", "tool"

_FINE = (CellStatus.OK, CellStatus.EXITED)


@dataclass
class CellSpan:
    """The span of one cell."""

    tracer: Tracer
    span: Span
    _inside: Context = field(init=False)
    _tools: dict[int, Span] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inside = trace.set_span_in_context(self.span)

    def tool_started(self, event: ToolCallStarted) -> None:
        """Begin the span of a tool call."""
        attributes: dict[str, str | int] = {
            "hermes_kernel.tool": event.name,
            "hermes_kernel.call_id": event.call_id,
        }
        self._tools[event.call_id] = self.tracer.start_span(
            f"{TOOL_SPAN} {event.name}", self._inside, SpanKind.INTERNAL, attributes
        )

    def tool_ended(self, event: ToolCallEnded) -> None:
        """End it."""
        span = self._tools.pop(event.call_id, None)
        if span is None:
            return
        span.set_attribute("hermes_kernel.seconds", event.seconds)
        if event.error is not None:
            span.set_status(Status(StatusCode.ERROR, "the tool has failed"))  # its text may hold anything
        span.end()

    def ended(self, result: CellResult | None, error: BaseException | None) -> None:
        """End the cell's span, and those of calls that nobody has answered."""
        for span in self._tools.values():
            span.set_status(Status(StatusCode.ERROR, "the cell has ended"))
            span.end()
        self._tools.clear()
        if result is not None:
            self.span.set_attributes(attributes_of(result))
            if result.status not in _FINE or result.exit_code:
                self.span.set_status(Status(StatusCode.ERROR, result.status.value))
        elif error is not None:
            self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self.span.end()


class CellSpans:
    """Makes the spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def cell(self, key: KernelKey) -> CellSpan:
        """Begin the span of a cell, below the caller's."""
        attributes: dict[str, str] = {"hermes_kernel.owner": key.owner.session}
        if key.owner.child is not None:
            attributes["hermes_kernel.child"] = key.owner.child
        if key.owner.scope:
            attributes["hermes_kernel.scope"] = key.owner.scope
        span = self._tracer.start_span(CELL_SPAN, context.get_current(), SpanKind.INTERNAL, attributes)
        return CellSpan(self._tracer, span)


_active: list[CellSpans] = []


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Make spans of all cells from now on; a second call replaces the first.

    *tracer_provider*: None = the global one.
    """
    uninstrument()
    spans = CellSpans(trace.get_tracer("hermes_kernel", __version__, tracer_provider))
    _active.append(spans)
    observe(spans)


def uninstrument() -> None:
    """Make no more spans."""
    while _active:
        forget(_active.pop())


def attributes_of(result: CellResult) -> Mapping[str, str | bool | int | float]:
    """Return what a cell's span tells of its result."""
    told: dict[str, str | bool | int | float] = {
        "hermes_kernel.status": result.status.value,
        "hermes_kernel.ran": result.ran,
        "hermes_kernel.exit_code": result.exit_code,
        "hermes_kernel.kernel_id": result.kernel.kernel_id,
        "hermes_kernel.reused": result.kernel.reused,
        "hermes_kernel.ended": result.kernel.ended,
        "hermes_kernel.execution_count": result.execution_count,
        "hermes_kernel.tool_calls": result.calls_made,
        "hermes_kernel.bytes_total": result.truncation.bytes_total,
        "hermes_kernel.bytes_shown": result.truncation.bytes_shown,
        "hermes_kernel.foreign_cells": result.kernel.foreign_cells,
    }
    if result.kernel.lost is not None:
        told["hermes_kernel.lost"] = result.kernel.lost.value
    if result.error is not None:
        told["hermes_kernel.error"] = result.error.ename
    return told
