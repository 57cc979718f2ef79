"""A span for each cell below its caller's, a child for each tool call; and what registries count."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from hermes_kernel import BlockingRegistry, ConfigError, KernelRegistry, KernelStartError, Limits
from hermes_kernel.host.observe import forget, observe
from hermes_kernel.lifecycle.key import KernelKey

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install opentelemetry-sdk to run these")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.trace import StatusCode  # noqa: E402

from hermes_kernel.integrations.otel import instrument, uninstrument  # noqa: E402

Make = Callable[..., BlockingRegistry]


@pytest.fixture
def spans() -> Iterator[tuple[InMemorySpanExporter, TracerProvider]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(provider)
    yield exporter, provider
    uninstrument()
    provider.shutdown()


def told(span: ReadableSpan) -> dict[str, object]:
    return {key.removeprefix("hermes_kernel."): value for key, value in (span.attributes or {}).items()}


def twice(number: int) -> int:
    return 2 * number


def broken() -> None:
    raise ValueError("sk-proj-0123456789abcdefghijABCDEFGHIJ is wrong")


def test_a_cell_and_its_tool_calls_are_spans_below_the_callers(
    make_registry: Make, spans: tuple[InMemorySpanExporter, TracerProvider]
) -> None:
    exporter, provider = spans
    registry = make_registry()
    code = "import hermes_tools as h; secret_name = h.twice(21)\ntry: h.broken()\nexcept Exception: pass"
    with provider.get_tracer("caller").start_as_current_span("turn") as turn:
        result = registry.execute(code, owner="a", tools=[twice, broken])
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert set(found) == {"turn", "execute_code", "tool twice", "tool broken"}
    cell = found["execute_code"]
    assert cell.parent is not None
    assert cell.parent.span_id == turn.get_span_context().span_id
    assert {found[name].parent.span_id for name in ("tool twice", "tool broken")} == {cell.context.span_id}
    attributes = told(cell)
    assert attributes | {"owner": "a", "status": "ok", "tool_calls": 2, "reused": False} == attributes
    assert attributes["kernel_id"] == result.kernel.kernel_id
    assert cell.status.status_code is StatusCode.UNSET
    assert found["tool broken"].status.status_code is StatusCode.ERROR
    everything = "".join(span.to_json() for span in found.values())
    assert "secret_name" not in everything
    assert "0123456789abcdefghij" not in everything


def test_how_a_cell_ended_is_in_its_span(
    make_registry: Make, spans: tuple[InMemorySpanExporter, TracerProvider]
) -> None:
    exporter, _ = spans
    registry = make_registry(limits=Limits(timeout=0.5))
    registry.execute("1 / 0", owner="a")
    registry.execute("while True: pass", owner="a")
    registry.execute("x = 1", owner="a")
    registry.execute("import sys; sys.exit(3)", owner="b")
    registry.execute("y", owner="a", interrupted=lambda: True)
    failed, late, fresh, exited, not_run = exporter.get_finished_spans()
    assert told(failed)["error"] == "ZeroDivisionError"
    assert told(late)["status"] == "timed_out"
    assert told(fresh)["lost"] == "timed_out"
    assert told(exited)["exit_code"] == 3
    assert told(not_run)["ran"] is False
    codes = [span.status.status_code for span in (failed, late, fresh, exited, not_run)]
    assert codes == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]


async def _two_cells() -> None:
    async with KernelRegistry() as registry:
        await registry.execute("1", owner="a")
        with pytest.raises(ConfigError, match="no_such_python"):
            await registry.execute("1", owner="a", python="no_such_python")


def test_asyncio_and_calls_that_are_refused(
    leaves_nothing: None, spans: tuple[InMemorySpanExporter, TracerProvider]
) -> None:
    exporter, _ = spans
    asyncio.run(_two_cells())
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.status_code) == ("execute_code", StatusCode.UNSET)


def test_a_kernel_that_does_not_come_up_is_an_error_of_its_cells_span_without_its_text(
    make_registry: Make, spans: tuple[InMemorySpanExporter, TracerProvider]
) -> None:
    exporter, _ = spans
    registry = make_registry(bootstrap="raise ValueError('0123456789abcdefghij')")
    with pytest.raises(KernelStartError, match="0123456789abcdefghij"):
        registry.execute("1", owner="a")
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.status_code) == ("execute_code", StatusCode.ERROR)
    assert span.status.description == "KernelStartError"
    assert told(span) == {"owner": "a"}
    assert "0123456789abcdefghij" not in span.to_json()


def test_without_instrumentation_there_are_no_spans(
    make_registry: Make, spans: tuple[InMemorySpanExporter, TracerProvider]
) -> None:
    exporter, _ = spans
    uninstrument()
    make_registry().execute("1", owner="a")
    assert exporter.get_finished_spans() == ()


class Failing:
    """An observer that fails whatever it is told."""

    def __init__(self) -> None:
        self.asked = 0

    def cell(self, key: KernelKey) -> "Failing":
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("cell")
        return self

    def tool_started(self, event: object) -> None:
        raise RuntimeError("tool_started")

    tool_ended = ended = tool_started  # type: ignore[assignment]


def test_an_observer_that_fails_holds_nothing_up(
    make_registry: Make, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    observe(failing)  # type: ignore[arg-type]
    try:
        registry = make_registry()
        for _ in range(2):
            result = registry.execute("import hermes_tools as h; h.twice(4)", owner="a", tools=[twice])
            assert result.value == "8"
    finally:
        forget(failing)  # type: ignore[arg-type]
    assert failing.asked == 2
    assert "an observer has failed" in caplog.text


def test_a_registry_counts_what_its_cells_did(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(timeout=0.5, output_bytes=1_000))
    zero = registry.stats()
    names = "started reused tool_calls tool_refusals cut_bytes lost_timed_out cells_ok cells_timed_out"
    assert {zero[name] for name in names.split()} == {0}
    code = "import hermes_tools as h\nfor n in range(3):\n    try: h.twice(n)\n    except Exception: pass"
    registry.execute(code, owner="a", tools=[twice], max_tool_calls=2)
    registry.execute("print('x' * 5_000)", owner="a")
    registry.execute("while True: pass", owner="a")
    registry.execute("1", owner="a")
    stats = registry.stats()
    assert (stats["tool_calls"], stats["tool_refusals"]) == (2, 1)
    assert 4_000 <= stats["cut_bytes"] <= 5_001
    assert (stats["started"], stats["reused"], stats["lost_timed_out"]) == (2, 2, 1)
    assert (stats["cells_ok"], stats["cells_timed_out"]) == (3, 1)
