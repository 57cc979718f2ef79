"""Kernels that are kept ready, without a process."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel.process import nursery
from hermes_kernel.process.launchclass import Program, launch_class
from hermes_kernel.process.nursery import Nursery

KIND = launch_class("/python", {}, forks=True)
PROGRAM = Program(("/python",), {})


class SlowTree:
    """A tree that is never bound."""

    is_gone = False

    async def bound(self) -> None:
        await asyncio.Event().wait()

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
