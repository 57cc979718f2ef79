"""Lets others follow what registries do: each cell, and the tool calls in it, from its call to its result.

An observer is told on the thread of the call that a cell begins, so that it can see the caller's context;
what follows it is told on other threads, and in order. What it raises is logged and holds nothing up.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Protocol

from ..cell.events import CellEvent, ToolCallEnded, ToolCallStarted
from ..cell.result import CellResult
from ..lifecycle.key import KernelKey

_log = logging.getLogger(__name__)


class CellObserver(Protocol):
    """Follows one cell."""

    def tool_started(self, event: ToolCallStarted) -> None:
        """The cell has called a tool."""

    def tool_ended(self, event: ToolCallEnded) -> None:
        """The tool has answered, or the cell has ended before."""

    def ended(self, result: CellResult | None, error: BaseException | None) -> None:
        """The call is over: with a result, or with the error that it raises."""


class Observer(Protocol):
    """Is told of every cell of every registry of the process."""

    def cell(self, key: KernelKey) -> CellObserver:
        """A cell is about to be run; called on the thread of the call."""


class Observed:
    """What follows one cell, guarded: whatever its observers do, the cell goes on."""

    def __init__(self, observers: Iterable[CellObserver] = ()) -> None:
        self._observers = list(observers)

    @classmethod
    def begin(cls, key: KernelKey) -> "Observed":
        """Tell everybody that a cell is about to be run."""
        begun = []
        for observer in _observers():
            try:
                begun.append(observer.cell(key))
            except (Exception, SystemExit):  # noqa: BLE001  # an observer's code
                _log.exception("an observer has failed")
        return cls(begun)

    def tell(self, event: CellEvent) -> None:
        """Tell an event of the cell's tools."""
        for observer in list(self._observers):
            try:
                if isinstance(event, ToolCallStarted):
                    observer.tool_started(event)
                elif isinstance(event, ToolCallEnded):
                    observer.tool_ended(event)
            except (Exception, SystemExit):  # noqa: BLE001  # an observer's code
                _log.exception("an observer has failed")

    def end(self, result: CellResult | None = None, error: BaseException | None = None) -> None:
        """Tell that the call is over, once: who comes second has nothing to add."""
        while self._observers:
            try:
                self._observers.pop(0).ended(result, error)
            except (Exception, SystemExit):  # noqa: BLE001  # an observer's code
                _log.exception("an observer has failed")

    def __bool__(self) -> bool:
        return bool(self._observers)


_lock = threading.Lock()
_known: list[Observer] = []


def observe(observer: Observer) -> None:
    """Have an observer told of every cell that begins from now on."""
    with _lock:
        if observer not in _known:
            _known.append(observer)


def forget(observer: Observer) -> None:
    """Tell an observer of no more cells."""
    with _lock:
        if observer in _known:
            _known.remove(observer)


def _observers() -> list[Observer]:
    with _lock:
        return list(_known)
