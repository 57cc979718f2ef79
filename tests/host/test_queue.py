import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.cell.status import CellStatus
from hermes_kernel.host.cut import Cut
from hermes_kernel.host.queue import CellQueue, Turn

FOREVER = float("inf")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(main())


def test_callers_come_in_the_order_in_which_they_came() -> None:
    async def test() -> None:
        queue, order = CellQueue(), []

        async def caller(number: int) -> None:
            assert await queue.enter(Cut(), FOREVER) is Turn.YOURS
            order.append(number)
            await asyncio.sleep(0)
            queue.leave()

        await asyncio.gather(*(caller(n) for n in range(20)))
        assert order == list(range(20))

    run(test)


def test_one_who_gives_up_does_not_hold_up_the_others() -> None:
    async def test() -> None:
        queue, cut = CellQueue(), Cut()
        await queue.enter(Cut(), FOREVER)
        impatient = asyncio.ensure_future(queue.enter(cut, FOREVER))
        patient = asyncio.ensure_future(queue.enter(Cut(), FOREVER))
        await asyncio.sleep(0)
        cut.interrupt()
        assert await impatient is CellStatus.INTERRUPTED
        assert not patient.done()
        queue.leave()
        assert await patient is Turn.YOURS

    run(test)


def test_a_wait_ends_with_its_time() -> None:
    async def test() -> None:
        queue = CellQueue()
        await queue.enter(Cut(), FOREVER)
        soon = asyncio.get_running_loop().time() + 0.01
        assert await queue.enter(Cut(), soon) is CellStatus.TIMED_OUT

    run(test)


def test_who_is_cut_before_waiting_does_not_take_a_free_turn() -> None:
    async def test() -> None:
        queue, cut = CellQueue(), Cut()
        cut.interrupt()
        assert await queue.enter(cut, FOREVER) is CellStatus.INTERRUPTED
        assert await queue.enter(Cut(), FOREVER) is Turn.YOURS

    run(test)


def test_when_the_kernel_is_gone_everybody_is_sent_away() -> None:
    async def test() -> None:
        queue = CellQueue()
        await queue.enter(Cut(), FOREVER)
        waiting = [asyncio.ensure_future(queue.enter(Cut(), FOREVER)) for _ in range(3)]
        await asyncio.sleep(0)
        queue.close()
        assert await asyncio.gather(*waiting) == [Turn.KERNEL_GONE] * 3
        queue.leave()
        assert await queue.enter(Cut(), FOREVER) is Turn.KERNEL_GONE

    run(test)


def test_a_waiting_task_that_is_cancelled_leaves_the_queue() -> None:
    async def test() -> None:
        queue = CellQueue()
        await queue.enter(Cut(), FOREVER)
        waiting = asyncio.ensure_future(queue.enter(Cut(), FOREVER))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        queue.leave()
        assert await queue.enter(Cut(), FOREVER) is Turn.YOURS

    run(test)


@given(st.lists(st.sampled_from(["enter", "leave", "interrupt", "cancel"]), max_size=40))
def test_never_have_two_the_turn_and_never_is_a_free_turn_kept_from_a_waiter(steps: list[str]) -> None:
    async def test() -> None:
        queue = CellQueue()
        callers: list[tuple[asyncio.Future[Turn | CellStatus], Cut]] = []
        left = 0
        for step in steps:
            waiting = [(f, c) for f, c in callers if not f.done()]
            if step == "enter":
                cut = Cut()
                callers.append((asyncio.ensure_future(queue.enter(cut, FOREVER)), cut))
            elif step == "interrupt" and waiting:
                waiting[0][1].interrupt()
            elif step == "cancel" and waiting:
                waiting[-1][0].cancel()
            elif step == "leave" and _holders(callers) > left:
                left += 1
                queue.leave()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            holding = _holders(callers) - left
            assert holding in (0, 1)
            if any(not f.done() for f, _ in callers):
                assert holding == 1
        for future, _ in callers:
            future.cancel()
        await asyncio.gather(*(f for f, _ in callers), return_exceptions=True)

    run(test)


def _holders(callers: list[tuple["asyncio.Future[Turn | CellStatus]", Cut]]) -> int:
    return sum(f.done() and not f.cancelled() and f.result() is Turn.YOURS for f, _ in callers)
