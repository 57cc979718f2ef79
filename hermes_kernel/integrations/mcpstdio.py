"""Standard input and output as a client's of an MCP server, such that the server can always end.

The SDK reads and writes them on threads that nothing can cancel: a server that is asked to end would wait for
its client's next line, and one whose client reads no more would wait for ever.
"""

import asyncio
import concurrent.futures
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import anyio
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from ..errors import ConfigError

READ_SIZE = 64 * 1024
WAITING = 16  # pieces of input that are read ahead
LAST_WORDS = 1.0  # seconds that a client which sends no more may take to read what it was sent
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP")


@contextmanager
def claimed() -> Iterator[tuple[int, int]]:
    """Take standard input and output for the client alone; return their descriptors.

    In their place are an empty input and standard error: what a library prints disturbs nothing. Raises
    ConfigError if they are closed.
    """
    if sys.stdin is None or sys.stdout is None:  # something else may have got their numbers since
        raise ConfigError(
            "standard input or output is closed; an MCP client starts this command and talks to it there"
        )
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing if sys.stderr is None else 2, 1)
    os.close(nothing)
    try:
        yield source, target
    finally:
        # The two stay open: a thread may still wait for them, and their numbers must not become others'.
        os.dup2(source, 0)
        os.dup2(target, 1)


async def talk(server: "Server[Any]", source: int, target: int) -> None:
    """Serve the client on these descriptors until it sends no more, or reads no more."""
    lines = _Lines(source)
    output = _Output(target, lines)
    try:
        # The SDK asks no more of its files than what these two have.
        async with stdio_server(cast(Any, lines), cast(Any, output)) as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())
    except* anyio.BrokenResourceError:
        pass  # a line came when the server had ended already


@contextmanager
def ends_at_a_signal() -> Iterator[list[int]]:
    """Cancel the task at the first signal that asks for an end; the list has its number then.

    A second one ends the process, as without us. One that was ignored stays ignored.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught: list[int] = []
    numbers: list[int] = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def release() -> None:
        while numbers:
            loop.remove_signal_handler(numbers.pop())

    def end(number: int) -> None:
        release()
        caught.append(number)
        task.cancel()

    try:
        for number in numbers:
            loop.add_signal_handler(number, end, number)
    except NotImplementedError:  # Windows, where a process that ends takes its kernels with it
        numbers.clear()
    try:
        yield caught
    finally:
        release()


class _Lines:
    """The lines of a descriptor. They are over when it is, and when somebody says so."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(WAITING)
        self._ready: list[str] = []
        self.over = self._loop.create_future()
        threading.Thread(target=self._read, name="hermes-mcp-input", daemon=True).start()

    def end(self) -> None:
        """There is nobody whose lines would be of use."""
        if not self.over.done():
            self.over.set_result(None)

    def __aiter__(self) -> "_Lines":
        return self

    async def __anext__(self) -> str:
        while not self._ready:
            getting = asyncio.ensure_future(self._pieces.get())
            try:
                await asyncio.wait({getting, self.over}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done() or not (piece := getting.result()):
                    self.end()
                    raise StopAsyncIteration
            finally:
                getting.cancel()
            self._ready = piece.decode("utf-8", "replace").split("\n")[::-1]
        return self._ready.pop()

    def _read(self) -> None:
        """Hand over whole lines, then an empty piece. On a thread: no descriptor can always be polled."""
        pending = bytearray()
        while data := self._piece():
            lines, newline, rest = data.rpartition(b"\n")
            if newline:
                if whole := bytes(pending + lines):  # an empty piece says that there are no more
                    self._hand_over(whole)
                pending = bytearray(rest)
            else:
                pending += data
        if pending:
            self._hand_over(bytes(pending))
        self._hand_over(b"")

    def _piece(self) -> bytes:
        try:
            return os.read(self._source, READ_SIZE)
        except OSError:  # a terminal that has gone
            return b""

    def _hand_over(self, piece: bytes) -> None:
        putting = self._pieces.put(piece)
        try:
            asyncio.run_coroutine_threadsafe(putting, self._loop).result()
        except (RuntimeError, concurrent.futures.CancelledError):  # the loop ends: nobody wants it
            putting.close()


class _Output:
    """Writes to a descriptor. A client that cannot be written to has gone."""

    def __init__(self, target: int, lines: _Lines) -> None:
        self._target = target
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[bool]]] = queue.SimpleQueue()
        self._given_up = self._loop.create_future()
        lines.over.add_done_callback(lambda _: self._loop.call_later(LAST_WORDS, self._give_up))
        threading.Thread(target=self._write, name="hermes-mcp-output", daemon=True).start()

    async def write(self, text: str) -> None:
        """Write, or say that there is nobody to write to."""
        written: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.put((text.encode(), written))
        await asyncio.wait({written, self._given_up}, return_when=asyncio.FIRST_COMPLETED)
        if not written.done() or not written.result():
            self._lines.end()
            raise anyio.ClosedResourceError

    async def flush(self) -> None:
        """Nothing is held back."""

    def _give_up(self) -> None:
        if not self._given_up.done():
            self._given_up.set_result(None)

    def _write(self) -> None:
        while True:
            data, written = self._waiting.get()
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(self._target, rest) :]
            except OSError:
                pass  # said by what is left
            try:
                self._loop.call_soon_threadsafe(_tell, written, not rest)
            except RuntimeError:  # the loop is closed
                return


def _tell(written: "asyncio.Future[bool]", value: bool) -> None:
    if not written.done():
        written.set_result(value)
