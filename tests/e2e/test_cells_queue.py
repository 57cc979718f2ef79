"""Several calls for one kernel: they wait in turn, give up alone, and outlive the kernel they waited for."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, KernelRegistry, Limits, Loss

from .. import traces
from .test_cells_basics import still_answers


class HeldCell:
    """A cell that runs until it is let go; then it does what its last line says."""

    def __init__(self, directory: Path, *, then: str = "'finished'") -> None:
        self._started, self._go = directory / "started", directory / "go"
        os.mkfifo(self._started)
        os.mkfifo(self._go)
        self.code = (
            "import os, sys\nkept = 1\n"
            f"open({str(self._started)!r}, 'w').close()\nopen({str(self._go)!r}).close()\n{then}"
        )

    def wait_until_it_runs(self) -> None:
        self._started.read_bytes()  # to its end, so that no other reader meets this writer

    def let_go(self) -> None:
        self._go.open("w").close()


def run_held(
    pool: ThreadPoolExecutor, registry: BlockingRegistry, cell: HeldCell, timeout: float = 30
) -> Future[CellResult]:
    future = pool.submit(registry.execute, cell.code, owner="a", timeout=timeout)
    cell.wait_until_it_runs()
    return future


def attached(registry: BlockingRegistry, count: int) -> bool:
    return traces.eventually(lambda: sum(info.attached for info in registry.kernels()) == count)


ENDS = {
    "sys.exit": ("sys.exit(3)", CellStatus.EXITED, Loss.EXITED),
    "os._exit": ("os._exit(3)", CellStatus.DIED, Loss.DIED),
    "kill": ("os.kill(os.getpid(), 9)", CellStatus.DIED, Loss.DIED),
    "timeout": ("import time; time.sleep(60)", CellStatus.TIMED_OUT, Loss.TIMED_OUT),
}


@pytest.mark.parametrize(("then", "status", "lost"), ENDS.values(), ids=ENDS)
def test_a_call_that_waits_for_a_kernel_that_ends_runs_on_a_fresh_one_and_is_told(
    registry: BlockingRegistry, tmp_path: Path, then: str, status: CellStatus, lost: Loss
) -> None:
    cell = HeldCell(tmp_path, then=then)
    with ThreadPoolExecutor(2) as pool:
        first = run_held(pool, registry, cell, timeout=3)
        second = pool.submit(registry.execute, "print(6*7); 'kept' in globals()", owner="a", timeout=20)
        assert attached(registry, 2)
        cell.let_go()
        assert first.result().status is status
        after = second.result()
    assert (after.status, after.ran, after.stdout, after.value) == (CellStatus.OK, True, "42\n", "False")
    assert after.kernel.lost is lost
    assert after.kernel.kernel_id != first.result().kernel.kernel_id
    assert set(first.result().to_dict()["kernel"]) >= {"mode", "reused", "execution_count", "state_reset"}
    assert still_answers(registry).kernel.reused
    assert len(registry.kernels()) == 1


def test_all_calls_that_wait_for_a_kernel_that_ends_run_in_turn_on_one_fresh_kernel(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    cell = HeldCell(tmp_path, then="os._exit(3)")
    with ThreadPoolExecutor(6) as pool:
        first = run_held(pool, registry, cell)
        waiting = []
        for n in range(5):
            code = f"order = [*globals().get('order', []), {n}]; order"
            waiting.append(pool.submit(registry.execute, code, owner="a", timeout=20))
            assert attached(registry, n + 2)
        cell.let_go()
        assert first.result().status is CellStatus.DIED
        results = [future.result() for future in waiting]
    assert [result.value for result in results] == [str(list(range(n + 1))) for n in range(5)]
    assert len({result.kernel.kernel_id for result in results}) == 1
    assert results[0].kernel.lost is Loss.DIED
    still_answers(registry)


def test_waiting_calls_survive_one_kernel_after_another(registry: BlockingRegistry, tmp_path: Path) -> None:
    cell = HeldCell(tmp_path, then="os._exit(3)")
    with ThreadPoolExecutor(5) as pool:
        first = run_held(pool, registry, cell)
        waiting = []
        for n in range(3):
            code = f"import os; os._exit({n + 4})"
            waiting.append(pool.submit(registry.execute, code, owner="a", timeout=20))
            assert attached(registry, n + 2)
        last = pool.submit(registry.execute, "print(6*7)", owner="a", timeout=20)
        assert attached(registry, 5)
        cell.let_go()
        assert [f.result().exit_code for f in (first, *waiting)] == [3, 4, 5, 6]
        assert {f.result().status for f in (first, *waiting)} == {CellStatus.DIED}
        assert (last.result().stdout, last.result().kernel.lost) == ("42\n", Loss.DIED)
    still_answers(registry)


def test_a_waiting_call_that_wants_to_stop_returns_at_once_and_touches_nothing(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    registry.execute("z = 1", owner="a")
    cell = HeldCell(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        first = run_held(pool, registry, cell)
        started = time.monotonic()
        result = registry.execute("z = 2; print('ran')", owner="a", interrupted=lambda: True)
        assert time.monotonic() - started < 1
        assert (result.status, result.ran, result.text) == (CellStatus.INTERRUPTED, False, "")
        assert (result.kernel.ended, result.kernel.lost) == (False, None)
        assert "not run; state kept" in result.to_dict()["error"]
        cell.let_go()
        assert (first.result().status, first.result().value) == (CellStatus.OK, "'finished'")
    assert registry.execute("z, kept", owner="a").value == "(1, 1)"
    assert still_answers(registry).kernel.reused


def test_a_call_that_changes_its_mind_while_it_waits_touches_nothing(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    registry.execute("z = 1", owner="a")
    cell, stop = HeldCell(tmp_path), threading.Event()
    askers = set()

    def interrupted() -> bool:
        askers.add(threading.get_ident())
        return stop.is_set()

    with ThreadPoolExecutor(2) as pool:
        first = run_held(pool, registry, cell)
        caller: list[int] = []

        def call() -> CellResult:
            caller.append(threading.get_ident())
            return registry.execute("z = 2", owner="a", interrupted=interrupted, timeout=30)

        second = pool.submit(call)
        assert attached(registry, 2)
        stop.set()
        assert (second.result(2).status, second.result().ran) == (CellStatus.INTERRUPTED, False)
        assert "not run; state kept" in second.result().to_dict()["error"]
        assert not first.done()
        cell.let_go()
        assert first.result().value == "'finished'"
    assert askers == set(caller), "the predicate is asked on the calling thread alone"
    assert registry.execute("z", owner="a").value == "1"


def test_waiting_is_bounded_and_a_call_whose_turn_never_came_says_that_it_did_not_run(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    registry.execute("z = 1", owner="a")
    cell = HeldCell(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        first = run_held(pool, registry, cell)
        started = time.monotonic()
        result = registry.execute("z = 2", owner="a", timeout=0.5)
        assert time.monotonic() - started < 2
        assert (result.status, result.ran, result.exit_code) == (CellStatus.TIMED_OUT, False, -1)
        assert "not run; state kept" in result.to_dict()["error"]
        assert result.kernel.ended is False
        cell.let_go()
        assert first.result().value == "'finished'"
    assert registry.execute("z", owner="a").value == "1"
    assert still_answers(registry).kernel.reused


def test_a_loss_is_not_forgotten_over_a_call_that_did_not_run(registry: BlockingRegistry) -> None:
    registry.execute("import os; os._exit(1)", owner="a")
    result = registry.execute("1", owner="a", interrupted=lambda: True)
    assert (result.status, result.ran) == (CellStatus.INTERRUPTED, False)
    assert still_answers(registry).kernel.lost is Loss.DIED


def test_an_interrupt_before_the_first_kernel_starts_nothing(registry: BlockingRegistry) -> None:
    result = registry.execute("1", owner="a", interrupted=lambda: True)
    assert (result.status, result.ran) == (CellStatus.INTERRUPTED, False)
    assert registry.kernels() == ()
    assert registry.execute("print(6*7)", owner="a").stdout == "42\n"


def test_calls_of_one_owner_at_once_share_one_kernel_and_lose_no_step(registry: BlockingRegistry) -> None:
    code = "import os, time; x = globals().get('x', 0) + 1; time.sleep(.02); print(os.getpid())"
    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda _: registry.execute(code, owner="a", timeout=60), range(20)))
    assert {result.status for result in results} == {CellStatus.OK}
    assert len({result.stdout for result in results}) == 1
    assert registry.execute("x", owner="a").value == "20"
    assert len(registry.kernels()) == 1
    still_answers(registry)


def test_owners_do_not_wait_for_each_other(registry: BlockingRegistry, tmp_path: Path) -> None:
    cell = HeldCell(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        first = run_held(pool, registry, cell)
        assert registry.execute("'kept' in globals()", owner="b").value == "False"
        assert not first.done()
        cell.let_go()
        assert first.result().status is CellStatus.OK


def test_closing_an_owner_interrupts_its_cell_and_the_next_call_is_told(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    cell = HeldCell(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        first = run_held(pool, registry, cell)
        registry.close_owner("a")
        assert (first.result(10).status, first.result().kernel.ended) == (CellStatus.INTERRUPTED, True)
    assert registry.kernels() == ()
    assert still_answers(registry).kernel.lost is Loss.CLOSED


def test_closing_the_registry_ends_every_call_that_runs_or_waits(
    make_registry: Callable[..., BlockingRegistry], tmp_path: Path
) -> None:
    registry = make_registry()
    cell = HeldCell(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        first = run_held(pool, registry, cell)
        second = pool.submit(registry.execute, "1", owner="a", timeout=60)
        assert attached(registry, 2)
        registry.close()
        assert first.result(10).status is CellStatus.INTERRUPTED
        error = second.exception(10)
        assert error is not None or second.result().status is CellStatus.INTERRUPTED


def test_cancelling_a_task_interrupts_its_cell_only(leaves_nothing: None, tmp_path: Path) -> None:
    async def conversation() -> None:
        async with KernelRegistry(limits=Limits(timeout=30)) as registry:
            await registry.execute("z = 1", owner="a")
            cell = HeldCell(tmp_path)
            running = asyncio.create_task(registry.execute(cell.code, owner="a"))
            await asyncio.to_thread(cell.wait_until_it_runs)
            waiting = asyncio.create_task(registry.execute("z = 2", owner="a"))
            while sum(info.attached for info in await registry.kernels()) < 2:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(cell.let_go)
            assert (await running).value == "'finished'"
            assert (await registry.execute("z", owner="a")).value == "1"
            (tmp_path / "again").mkdir()
            cell = HeldCell(tmp_path / "again")
            running = asyncio.create_task(registry.execute(cell.code, owner="a"))
            await asyncio.to_thread(cell.wait_until_it_runs)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            after = await registry.execute("print(6*7)", owner="a")
            assert (after.stdout, after.kernel.lost) == ("42\n", Loss.INTERRUPTED)

    asyncio.run(conversation())
