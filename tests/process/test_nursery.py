"""Kernels that are kept ready, without a process."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel.process import nursery
from hermes_kernel.process.launchclass import Program, launch_class
from hermes_kernel.process.nursery import Nursery, NurserySeat

KIND = launch_class("/python", {}, forks=True)
OTHER_KIND = launch_class("/python", {"LC_ALL": "C"}, forks=True)
PROGRAM = Program(("/python",), {})


class SlowTree:
    """A tree that is bound when it is told so."""

    is_gone = False

    def __init__(self) -> None:
        self.may_be_bound = asyncio.Event()

    async def bound(self) -> None:
        await self.may_be_bound.wait()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """It stays."""


class SlowSeat:
    """What is given up in steps."""

    def __init__(self) -> None:
        self.tree = SlowTree()
        self.is_given_up = False

    async def give_up(self, *, timeout: float) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        self.is_given_up = True

    hand_back = give_up


async def spares_after(close: Callable[[Nursery], Any]) -> list[SlowSeat]:
    """Ask twice for a kernel, so that the spare of the first is given up for that of the second."""
    spares: list[SlowSeat] = []
    made = asyncio.Event()

    async def new_seat(*_: Any, waits: bool = False, **__: Any) -> SlowSeat:
        seat = SlowSeat()
        if waits:
            spares.append(seat)
            made.set()
        return seat

    one = Nursery(spares=1)
    one._new_seat = new_seat  # type: ignore[method-assign, assignment]
    for _ in range(2):
        made.clear()
        await one.seat(KIND, PROGRAM, "k", binds=True)
        await made.wait()
    await one.seat(KIND, PROGRAM, "k", binds=True)
    await asyncio.sleep(0)  # the second is being given up, too
    await close(one)
    return spares


@pytest.mark.parametrize("close", [Nursery.close, Nursery.discard_spares])
def test_a_spare_that_is_not_wanted_any_more_is_given_up_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, close: Callable[[Nursery], Any]
) -> None:
    monkeypatch.setattr(nursery, "SPARE_DELAY", 0)
    spares = asyncio.run(spares_after(close))
    assert len(spares) >= 2
    assert all(spare.is_given_up for spare in spares)


async def old_spare_after(close: Callable[[Nursery], Any]) -> SlowSeat:
    """Have a spare of one class given up for one of another, and ask for a kernel just then."""
    spares: list[SlowSeat] = []

    async def new_seat(*_: Any, waits: bool = False, **__: Any) -> SlowSeat:
        seat = SlowSeat()
        if waits:
            seat.tree.may_be_bound.set()
            spares.append(seat)
        return seat

    one = Nursery(spares=1)
    one._new_seat = new_seat  # type: ignore[method-assign, assignment]
    await one.seat(KIND, PROGRAM, "k", binds=False)
    while not one.spares:
        await asyncio.sleep(0)
    await one.seat(OTHER_KIND, PROGRAM, "k", binds=False)
    while one.spares:
        await asyncio.sleep(0)
    await one.seat(OTHER_KIND, PROGRAM, "k", binds=False)
    await close(one)
    return spares[0]


@pytest.mark.parametrize("close", [Nursery.close, Nursery.discard_spares])
def test_a_spare_of_another_class_is_given_up_as_a_whole_whoever_asks_meanwhile(
    monkeypatch: pytest.MonkeyPatch, close: Callable[[Nursery], Any]
) -> None:
    monkeypatch.setattr(nursery, "SPARE_DELAY", 0)
    assert asyncio.run(old_spare_after(close)).is_given_up


async def seat_given_up_twice(monkeypatch: pytest.MonkeyPatch) -> SlowSeat:
    """Cancel whoever makes a seat, and again while that is being cleaned up."""
    seat = SlowSeat()
    monkeypatch.setattr(nursery.Staging, "create", lambda *_, **__: FakeStaging())
    monkeypatch.setattr(nursery, "Seat", lambda *_: seat)
    one = Nursery()
    one._zygote = lambda *_: FakeZygote()  # type: ignore[method-assign, assignment, return-value]
    making = asyncio.create_task(one.seat(KIND, PROGRAM, "k", binds=True))
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await one.close()
    return seat


class FakeTree(SlowTree):
    """A tree of a zygote that may have stopped."""

    has_answer = False

    async def prepare(self, *_: object) -> None:
        await asyncio.Event().wait()

    async def end(self, *, timeout: float) -> None:
        """It is nobody."""


class FakeZygote:
    """A zygote that forks nobody."""

    def fork(self) -> FakeTree:
        return FakeTree()


class FakeStaging:
    """No directory."""

    path = sockets = remains = None

    @property
    def lease(self) -> "FakeStaging":
        return self

    def close(self) -> None:
        """Nobody holds it."""

    def remove(self) -> None:
        """There is none."""


def test_a_tree_whose_caller_is_cancelled_twice_is_given_up_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asyncio.run(seat_given_up_twice(monkeypatch)).is_given_up


@pytest.mark.parametrize("has_answer", [True, False])
def test_a_zygote_that_has_not_answered_in_time_is_not_used_again(has_answer: bool) -> None:
    async def main() -> bool:
        retired: list[Any] = []
        zygote, tree, staging = FakeZygote(), FakeTree(), FakeStaging()
        seat = NurserySeat(tree, staging, zygote, retired.append)  # type: ignore[arg-type]
        tree.has_answer = True
        await seat.give_up(timeout=1)  # it has served once
        tree.has_answer = has_answer
        await seat.give_up(timeout=1)
        return retired == [zygote]

    assert asyncio.run(main()) is not has_answer


def test_a_zygote_that_was_given_no_time_is_used_again() -> None:
    async def main() -> None:
        def retire(_: object) -> None:
            raise AssertionError("it may be well")

        seat = NurserySeat(FakeTree(), FakeStaging(), FakeZygote(), retire)  # type: ignore[arg-type]
        await seat.hand_back(timeout=1)

    asyncio.run(main())
