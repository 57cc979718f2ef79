import asyncio
import contextvars
import decimal
import multiprocessing.pool
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hermes_kernel.kernel.context import CELL, Cell, carry_cell_into_threads

FIRST, SECOND = Cell("first", {}), Cell("second", {})


@pytest.fixture(autouse=True)
def carrying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
    carry_cell_into_threads()
    yield
    assert CELL.get() is None


def in_cell(cell: Cell | None, work: Callable[[], Any]) -> Any:
    """Run *work* as the code of a cell."""

    def entered() -> Any:
        CELL.set(cell)
        return work()

    return contextvars.copy_context().run(entered)


def in_thread(make: Callable[[Callable[[], None]], threading.Thread]) -> Cell | None:
    found: list[Cell | None] = []

    def start() -> threading.Thread:
        thread = make(lambda: found.append(CELL.get()))
        thread.start()
        return thread

    in_cell(FIRST, start).join()
    return found[0]


class Subclass(threading.Thread):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        self._work()


def test_a_thread_belongs_to_the_cell_that_starts_it() -> None:
    assert in_thread(lambda work: threading.Thread(target=work)) is FIRST
    assert in_thread(Subclass) is FIRST
    assert in_thread(lambda work: threading.Timer(0, work)) is FIRST


def test_a_thread_made_in_one_cell_and_started_in_another_belongs_to_the_second() -> None:
    found: list[Cell | None] = []
    thread = in_cell(FIRST, lambda: threading.Thread(target=lambda: found.append(CELL.get())))
    in_cell(SECOND, thread.start)
    thread.join()
    assert found == [SECOND]


def test_what_a_thread_starts_belongs_to_its_cell_too() -> None:
    def start_another(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            inner = threading.Thread(target=work)
            inner.start()
            inner.join()

        return threading.Thread(target=run)

    assert in_thread(start_another) is FIRST


def test_outside_of_a_cell_nothing_is_carried() -> None:
    found: list[Cell | None] = []
    thread = threading.Thread(target=lambda: found.append(CELL.get()))
    thread.start()
    thread.join()
    assert found == [None]
    assert "run" not in thread.__dict__


def test_a_thread_object_is_left_as_it_was() -> None:
    thread = in_cell(FIRST, lambda: threading.Thread(target=lambda: None))
    in_cell(FIRST, thread.start)
    thread.join()
    assert "run" not in thread.__dict__
    with pytest.raises(RuntimeError, match="once"):
        in_cell(FIRST, thread.start)
    assert "run" not in thread.__dict__


def test_a_run_of_the_objects_own_is_called_and_put_back() -> None:
    called = threading.Event()
    thread = threading.Thread()
    own: Any = lambda: called.set()  # noqa: E731
    thread.run = own  # type: ignore[method-assign]
    in_cell(FIRST, thread.start)
    thread.join()
    assert called.is_set()
    assert thread.__dict__["run"] is own


def test_a_job_belongs_to_the_cell_that_submits_it_not_to_the_pools_maker() -> None:
    pool = in_cell(FIRST, lambda: ThreadPoolExecutor(1))
    with pool:
        assert in_cell(FIRST, lambda: pool.submit(CELL.get)).result() is FIRST
        assert in_cell(SECOND, lambda: pool.submit(CELL.get)).result() is SECOND
        assert in_cell(None, lambda: pool.submit(CELL.get)).result() is None
        assert in_cell(SECOND, lambda: list(pool.map(lambda _: CELL.get(), range(3)))) == [SECOND] * 3


def test_a_job_is_submitted_with_all_its_arguments() -> None:
    with ThreadPoolExecutor(1) as pool:
        job = in_cell(FIRST, lambda: pool.submit(lambda *a, **k: (a, k), 1, fn=2, self=3))
        assert job.result() == ((1,), {"fn": 2, "self": 3})
        failing = pool.submit(lambda: 1 / 0)
        assert isinstance(failing.exception(), ZeroDivisionError)


def test_asyncio_carries_the_cell_by_itself() -> None:
    async def look() -> list[Cell | None]:
        loop = asyncio.get_running_loop()
        found = [
            CELL.get(),
            await asyncio.to_thread(CELL.get),
            await loop.run_in_executor(None, CELL.get),
            await asyncio.create_task(_cell()),
        ]
        later: asyncio.Future[Cell | None] = loop.create_future()
        loop.call_later(0, lambda: later.set_result(CELL.get()))
        return [*found, await later]

    assert in_cell(FIRST, lambda: asyncio.run(look())) == [FIRST] * 5


async def _cell() -> Cell | None:
    return CELL.get()


def test_a_worker_of_an_older_pool_of_another_kind_keeps_its_makers_cell() -> None:
    with in_cell(FIRST, lambda: multiprocessing.pool.ThreadPool(1)) as pool:
        assert in_cell(SECOND, lambda: pool.apply(CELL.get)) is FIRST


def test_nothing_else_of_the_context_is_carried() -> None:
    """As in a plain Python: a thread starts with the default precision."""
    found: list[int] = []

    def work() -> None:
        decimal.getcontext().prec = 5
        thread = threading.Thread(target=lambda: found.append(decimal.getcontext().prec))
        thread.start()
        thread.join()

    in_cell(FIRST, work)
    assert found == [decimal.DefaultContext.prec]


def test_carrying_twice_is_carrying_once() -> None:
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    carry_cell_into_threads()
    assert threading.Thread.start is start
    assert ThreadPoolExecutor.submit is submit
