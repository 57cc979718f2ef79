"""The core of the registry over a launcher that is far away; then what a bad line to it may cost."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry, CellStatus, HermesKernelError, KernelStartError, Limits, Loss
from hermes_kernel.process.local import LocalLauncher

from .. import traces
from ..fakes import FakeKernel, FakeLauncher
from ..remote import RemoteLauncher
from . import test_cells_queue, test_registry, test_registry_faults
from .test_registry import callers, hold

CORE = {
    test_registry: (
        "variables_and_imports_last_from_one_call_to_the_next",
        "a_loss_is_told_with_its_reason_on_the_next_call_and_on_no_other",
        "a_reset_is_told_on_the_very_call_and_only_if_there_was_something_to_reset",
        "a_reset_while_a_cell_runs_starts_at_once_and_lets_the_cell_finish_on_the_old_kernel",
        "racers_on_the_first_start_share_one_process_and_none_found_a_kernel",
        "a_finished_child_gives_back_its_kernels_and_its_siblings_keep_theirs",
        "a_cap_that_was_exceeded_by_running_cells_holds_again_as_they_end",
        "the_state_of_each_kernel_is_told_from_start_to_end",
    ),
    test_registry_faults: (
        "a_registry_that_eight_threads_close_ends_every_call_that_runs_waits_or_starts",
        "a_call_whose_kernel_still_starts_ends_at_once_and_leaves_nothing",
        "a_caller_that_finds_its_starting_kernel_closed_takes_another_one",
    ),
    test_cells_queue: ("a_call_that_waits_for_a_kernel_that_ends_runs_on_a_fresh_one_and_is_told",),
}
for _module, _names in CORE.items():
    globals().update({f"test_{name}": getattr(_module, f"test_{name}") for name in _names})

Line = tuple[BlockingRegistry, RemoteLauncher]
MakeLine = Callable[..., Line]


@pytest.fixture
def make_line(leaves_nothing: None) -> Iterator[MakeLine]:
    """Registries on a far node; at the end the line is whole, and nothing is left on either side."""
    made: list[Line] = []

    def make(*, node: object = None, bounded: bool = True, delay: float = 0.02, **arguments: object) -> Line:
        launcher = RemoteLauncher(node or LocalLauncher(), delay=delay, bounded=bounded)  # type: ignore[arg-type]
        registry = BlockingRegistry(_launcher=launcher, **arguments)  # type: ignore[arg-type]
        made.append((registry, launcher))
        return registry, launcher

    yield make
    for registry, launcher in made:
        launcher.heal()
        registry.close()


@pytest.fixture
def make_registry(make_line: MakeLine) -> Callable[..., BlockingRegistry]:
    return lambda **arguments: make_line(**arguments)[0]


def fake() -> FakeLauncher:
    return FakeLauncher(FakeKernel.good)


SHORT = Limits(start_timeout=1.5, timeout=20)
BOUNDED = pytest.mark.parametrize("bounded", [True, False], ids=["refused", "silent"])


@BOUNDED
@pytest.mark.parametrize("fault", ["lost answer", "partition"])
def test_a_launch_without_an_answer_is_a_start_error_in_time_and_leaves_nothing(
    make_line: MakeLine, runtime: Path, fault: str, bounded: bool
) -> None:
    registry, line = make_line(limits=SHORT, bounded=bounded)
    line.lose("launch") if fault == "lost answer" else line.partition()
    with callers(registry, 1) as pool:
        began = time.monotonic()
        call = pool.submit(registry.execute, "1", owner="a")
        try:
            error = call.exception(10)
        finally:
            line.heal()
    assert isinstance(error, KernelStartError)
    assert error.to_dict()["status"] == "error"
    assert time.monotonic() - began < SHORT.start_timeout + 5
    assert registry.kernels() == ()
    registry.close()
    assert traces.eventually(lambda: not traces.marked_processes(str(runtime)))


def test_after_a_lost_launch_the_next_call_has_a_kernel_and_the_lost_one_ends_with_the_heal(
    make_line: MakeLine, runtime: Path
) -> None:
    registry, line = make_line(limits=Limits(start_timeout=5))
    line.lose("launch")
    with pytest.raises(KernelStartError):
        registry.execute("1", owner="a")
    result = registry.execute("6 * 7", owner="a")
    assert (result.value, result.kernel.lost, result.kernel.reused) == ("42", None, False)
    line.heal()
    assert traces.eventually(lambda: len(list(runtime.glob("hermes-kernel/*/session.json"))) == 1)


@BOUNDED
@pytest.mark.parametrize("fault", ["lost answer", "partition"])
def test_a_cell_that_times_out_returns_though_its_end_is_not_answered(
    make_line: MakeLine, fault: str, bounded: bool
) -> None:
    def script(kernel: FakeKernel, request: dict[str, object]) -> None:
        kernel.busy(request)
        if request["content"]["code"] != "hang":  # type: ignore[index]
            kernel.reply(request)
            kernel.idle(request)

    registry, line = make_line(node=FakeLauncher(script), bounded=bounded, limits=Limits(start_timeout=3))
    registry.execute("1", owner="a")
    line.lose("end") if fault == "lost answer" else line.partition()
    with callers(registry, 1) as pool:
        began = time.monotonic()
        call = pool.submit(registry.execute, "hang", owner="a", timeout=0.3)
        try:
            result = call.result(12)  # by promise 1: 0.3 s, idle_grace and a second
        finally:
            line.heal()
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, True)
    assert time.monotonic() - began < 8
    after = registry.execute("1", owner="a")
    assert (after.status, after.kernel.lost, after.kernel.reused) == (CellStatus.OK, Loss.TIMED_OUT, False)


@pytest.mark.parametrize("fault", ["lost answer", "partition"])
def test_a_cell_that_is_interrupted_returns_though_the_signal_is_not_answered(
    make_line: MakeLine, fault: str
) -> None:
    def script(kernel: FakeKernel, request: dict[str, object]) -> None:
        kernel.busy(request)
        if request["content"]["code"] == "heeds":  # type: ignore[index]
            kernel.interrupted.wait(3)
        kernel.reply(request)
        kernel.idle(request)

    limits = Limits(interrupt_grace=1, start_timeout=3)
    registry, line = make_line(node=FakeLauncher(script), limits=limits)
    registry.execute("1", owner="a")
    line.lose("signal") if fault == "lost answer" else line.partition()
    with callers(registry, 1) as pool:
        call = pool.submit(registry.execute, "heeds", owner="a", timeout=0.3)
        try:
            result = call.result(10)
        finally:
            line.heal()
    assert result.status is CellStatus.TIMED_OUT
    after = registry.execute("1", owner="a")
    assert after.status is CellStatus.OK
    assert after.kernel.lost is (Loss.TIMED_OUT if result.kernel.ended else None)


@BOUNDED
def test_a_caller_that_gives_up_while_the_launch_is_silent_returns_at_once(
    make_line: MakeLine, bounded: bool
) -> None:
    registry, line = make_line(node=fake(), bounded=bounded)
    line.partition()
    stop = threading.Event()
    with callers(registry, 1) as pool:
        call = pool.submit(registry.execute, "1", owner="a", interrupted=stop.is_set)
        assert traces.eventually(lambda: "launch" in line.calls)
        stop.set()
        try:
            result = call.result(5)
        finally:
            line.heal()
    assert (result.status, result.ran) == (CellStatus.INTERRUPTED, False)
    assert registry.kernels() == ()
    assert registry.execute("1", owner="a").status is CellStatus.OK


@BOUNDED
def test_a_registry_closes_in_time_while_nothing_gets_through(
    make_line: MakeLine, tmp_path: Path, runtime: Path, bounded: bool
) -> None:
    registry, line = make_line(bounded=bounded)
    with callers(registry, 2) as pool:
        _, running = hold(pool, registry, "a", tmp_path / "held")
        line.partition()
        began = time.monotonic()
        closing = pool.submit(registry.close)
        try:
            closing.result(20)
            took = time.monotonic() - began
            error = running.exception(10)
        finally:
            line.heal()
    assert took < 12
    assert error is None or isinstance(error, HermesKernelError)
    assert traces.eventually(lambda: not traces.marked_processes(str(runtime)), within=15)


def test_a_partition_of_the_launcher_costs_a_running_cell_and_its_state_nothing(
    make_line: MakeLine, tmp_path: Path
) -> None:
    registry, line = make_line()
    with callers(registry, 1) as pool:
        cell, running = hold(pool, registry, "a", tmp_path / "held")
        line.partition()
        cell.let_go()
        assert running.result(10).value == "'finished'"
    assert registry.execute("kept", owner="a").value == "1"
    line.heal()
    assert registry.execute("kept", owner="a").kernel.lost is None


def test_owners_on_a_far_node_do_not_wait_for_one_whose_launch_is_lost(make_line: MakeLine) -> None:
    registry, line = make_line(node=fake(), limits=Limits(start_timeout=4))
    registry.execute("1", owner="b")
    line.lose("launch")
    with callers(registry, 1) as pool:
        lost = pool.submit(registry.execute, "1", owner="a")
        assert traces.eventually(lambda: line.calls.count("launch") == 2)
        assert registry.execute("1", owner="b").kernel.reused
        assert registry.execute("1", owner="c").status is CellStatus.OK
        assert isinstance(lost.exception(15), KernelStartError)
