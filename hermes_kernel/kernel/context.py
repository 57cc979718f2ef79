"""Which cell the running code belongs to, also in the threads and pools that the cell starts."""

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A cell that may call tools: the token that says so, and where the host listens."""

    token: str
    endpoint: Mapping[str, Any]


CELL: contextvars.ContextVar[Cell | None] = contextvars.ContextVar("hermes_cell", default=None)
"""There is no fallback: code that belongs to no cell may not act as the one that happens to run."""

WRITER: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("hermes_writer")
"""The header of the request that what the running code writes is an answer to."""

_start_thread = threading.Thread.start
_submit = ThreadPoolExecutor.submit


def carry_cell_into_threads() -> None:
    """Let threads, timers and jobs of thread pools belong to the cell that starts them; idempotent.

    Only its two variables are carried. A whole context would change what else a plain Python does in a
    thread: the precision of decimal numbers, for one. asyncio copies the context by itself.
    """
    threading.Thread.start = _start_in_cell  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = _submit_in_cell  # type: ignore[method-assign, assignment]


def _start_in_cell(self: threading.Thread) -> None:
    cell, writer = CELL.get(), WRITER.get(None)
    if (cell is None and writer is None) or self.ident is not None:
        _start_thread(self)
        return
    run = self.run
    had_own = "run" in self.__dict__

    def enter() -> None:
        _give_back()
        _belong(cell, writer)

    def _give_back() -> None:
        if had_own:
            self.run = run  # type: ignore[method-assign]
        else:
            self.__dict__.pop("run", None)

    self.run = _in_turn(enter, run)  # type: ignore[method-assign, assignment]
    try:
        _start_thread(self)
    except BaseException:
        _give_back()
        raise


def _in_turn(*functions: Callable[[], None]) -> Callable[[], object]:
    """Return what calls one after the other, without a frame that a traceback would show."""
    calls = [partial(function) for function in functions]
    return partial(deque, map(partial.__call__, calls), 0)


def _belong(cell: Cell | None, writer: dict[str, Any] | None) -> None:
    CELL.set(cell)
    if writer is not None:
        WRITER.set(writer)


def _submit_in_cell(
    self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> "Future[Any]":
    cell, writer = CELL.get(), WRITER.get(None)

    def run_in_cell(*given: Any, **named: Any) -> Any:
        before = CELL.get(), WRITER.get(None)
        _belong(cell, writer)
        try:
            return fn(*given, **named)
        finally:
            _belong(*before)

    return _submit(self, run_in_cell, *args, **kwargs)
