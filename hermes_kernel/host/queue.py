"""Whose turn it is on one kernel: first come, first served."""

import asyncio
import math
from collections import deque
from enum import Enum

from ..cell.status import CellStatus
from .cut import Cut


class Turn(Enum):
    """Why a caller stopped waiting, other than by its own time or wish."""

    YOURS = "yours"
    KERNEL_GONE = "kernel gone"


class CellQueue:
    """The callers of one kernel. Lives on the supervisor's loop."""

    def __init__(self) -> None:
        self._taken = False
        self._gone = False
        self._waiting: deque[asyncio.Future[Turn | CellStatus]] = deque()

    async def enter(self, cut: Cut, deadline: float) -> Turn | CellStatus:
        """Wait for the turn, until *deadline* (loop time) or until the caller cuts its call.

        Whoever gets YOURS must call ``leave``.
        """
        if cut.status is not None:
            return cut.status
        if self._gone:
            return Turn.KERNEL_GONE
        if not self._taken:
            self._taken = True
            return Turn.YOURS
        return await self._wait(cut, deadline)

    def leave(self) -> None:
        """Give the turn to the next caller."""
        self._taken = False
        while self._waiting and not self._taken:
            place = self._waiting.popleft()
            if not place.done():
                self._taken = True
                place.set_result(Turn.YOURS)

    def close(self) -> None:
        """The kernel is gone: send everybody away."""
        self._gone = True
        while self._waiting:
            _answer(self._waiting.popleft(), Turn.KERNEL_GONE)

    async def _wait(self, cut: Cut, deadline: float) -> Turn | CellStatus:
        loop = asyncio.get_running_loop()
        place: asyncio.Future[Turn | CellStatus] = loop.create_future()
        self._waiting.append(place)
        cut.on_change(lambda: _answer(place, CellStatus.INTERRUPTED))
        timer = None
        if not math.isinf(deadline):
            timer = loop.call_at(deadline, _answer, place, CellStatus.TIMED_OUT)
        try:
            return await place
        finally:
            if timer is not None:
                timer.cancel()
            if place in self._waiting:
                self._waiting.remove(place)


def _answer(place: "asyncio.Future[Turn | CellStatus]", answer: Turn | CellStatus) -> None:
    if not place.done():
        place.set_result(answer)
