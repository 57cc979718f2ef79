"""A launcher whose node is far away: every call and answer crosses as JSON, late, never, or only later."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hermes_kernel.errors import KernelStartError
from hermes_kernel.process.environment import EnvPolicy
from hermes_kernel.process.launch import (
    Ended,
    Interpreter,
    KernelExit,
    KernelHandle,
    Launched,
    Launcher,
    LaunchSpec,
    ProcessLimits,
    StreamRest,
)

T = TypeVar("T")

_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        EnvPolicy,
        Interpreter,
        KernelExit,
        KernelHandle,
        Launched,
        LaunchSpec,
        ProcessLimits,
        StreamRest,
    )
}


def crossed(value: T) -> T:
    """Return *value* as it comes out on the other side; raises TypeError for what is not data."""
    copy: T = _unpacked(json.loads(json.dumps(_packed(value), allow_nan=False)))
    assert copy == value
    return copy


def _packed(value: Any) -> Any:
    match value:
        case Ended():
            return {"$": "Ended", "value": value.value}
        case bytes():
            return {"$": "bytes", "value": value.decode("latin-1")}
        case tuple() | frozenset():
            return {"$": type(value).__name__, "value": [_packed(item) for item in value]}
        case Mapping():
            assert all(isinstance(key, str) and key != "$" for key in value)
            return {key: _packed(item) for key, item in value.items()}
        case list():
            return [_packed(item) for item in value]
    if type(value) in _TYPES.values():
        named = {entry.name: _packed(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
        return {"$": type(value).__name__, "value": named}
    return value  # json.dumps refuses what is no data


def _unpacked(value: Any) -> Any:
    match value:
        case {"$": "Ended", "value": name}:
            return Ended(name)
        case {"$": "bytes", "value": text}:
            return text.encode("latin-1")
        case {"$": "tuple", "value": items}:
            return tuple(_unpacked(item) for item in items)
        case {"$": "frozenset", "value": items}:
            return frozenset(_unpacked(item) for item in items)
        case {"$": kind, "value": named}:
            return _TYPES[kind](**{name: _unpacked(item) for name, item in named.items()})
        case dict():
            return {key: _unpacked(item) for key, item in value.items()}
        case list():
            return [_unpacked(item) for item in value]
    return value


@dataclass
class RemoteLauncher:
    """Reaches *inner* over a bad line. The knobs may be turned from any thread.

    ``delay``: seconds that each call and each answer is under way. ``lose(name)``: the next call of this name
    happens and its answer never comes. ``partition()``: nothing gets through until ``heal()``. A caller that
    gave a duration hears of it when that is over, as the Launcher's promise says; with ``bounded=False`` it
    hears nothing at all. A kernel whose launch was never answered is ended when the line heals; and
    when the host closes its end, the node ends everything.
    """

    inner: Launcher
    delay: float = 0.0
    bounded: bool = True
    calls: list[str] = field(default_factory=list)
    _losing: set[str] = field(default_factory=set, init=False)
    _cut: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _healed: "list[asyncio.Future[None]]" = field(default_factory=list, init=False)
    _running: "set[asyncio.Task[Any]]" = field(default_factory=set, init=False)
    _unanswered: "list[asyncio.Task[Launched]]" = field(default_factory=list, init=False)
    _lost: "list[asyncio.Future[None]]" = field(default_factory=list, init=False)
    _exits: dict[KernelHandle, KernelExit] = field(default_factory=dict, init=False)

    def lose(self, name: str) -> None:
        """Lose the answer of the next call of this name."""
        with self._lock:
            self._losing.add(name)

    def partition(self) -> None:
        """Let nothing through until ``heal``."""
        with self._lock:
            self._cut = True

    def heal(self) -> None:
        """Let everything through again, what has waited first; what is lost is then known to be lost."""
        with self._lock:
            self._cut = False
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_heal)

    spares = 0

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        """See Launcher."""
        return await self._call("probe", lambda: self.inner.probe(python, timeout=timeout), timeout)

    async def launch(self, spec: LaunchSpec) -> Launched:
        """See Launcher."""
        work = self._start("launch", lambda: self.inner.launch(crossed(spec)))
        try:
            launched = crossed(await self._answer("launch", work, spec.timeout))
        except TimeoutError as error:
            self._unanswered.append(work)
            raise KernelStartError(f"no answer from the node within {spec.timeout:g} s") from error
        except asyncio.CancelledError:
            self._unanswered.append(work)
            if not self._cut:
                self._on_heal()
            raise
        return launched

    async def ended(self, handle: KernelHandle) -> KernelExit:
        """See Launcher."""
        exit_ = crossed(await self._call("ended", lambda: self.inner.ended(crossed(handle)), None))
        self._exits[handle] = exit_
        return exit_

    def exit_of(self, handle: KernelHandle) -> KernelExit | None:
        """See Launcher."""
        return self._exits.get(handle)

    async def signal(self, handle: KernelHandle, signum: int) -> None:
        """See Launcher."""
        await self._call("signal", lambda: self.inner.signal(crossed(handle), signum), None)

    async def end(self, handle: KernelHandle, *, timeout: float) -> Ended:
        """See Launcher."""
        try:
            return crossed(
                await self._call("end", lambda: self.inner.end(crossed(handle), timeout=timeout), timeout)
            )
        except TimeoutError:
            return Ended.UNKNOWN

    async def sweep(self) -> None:
        """See Launcher. The node sees to itself: nobody waits for its answer."""
        await self.inner.sweep()

    async def close(self) -> None:
        """See Launcher. The node sees that its host is gone and ends all: this needs no answer."""
        self._cut = False
        await self._end_unanswered()
        await self.inner.close()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _call(self, name: str, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T:
        return await self._answer(name, self._start(name, work), timeout)

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T]":
        """Send a call. What it does there goes on whether somebody waits here or not."""
        self._loop = asyncio.get_running_loop()
        self.calls.append(name)

        async def there() -> T:
            await self._pass()
            return await work()

        task = self._loop.create_task(there(), name=f"remote {name}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _answer(self, name: str, work: "asyncio.Task[T]", timeout: float | None) -> T:
        async with asyncio.timeout(timeout if self.bounded else None):
            await asyncio.wait({work})
            with self._lock:
                lost = name in self._losing
                self._losing.discard(name)
            if lost:
                never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._lost.append(never)
                await never
            await self._pass()
            return work.result()

    async def _pass(self) -> None:
        await asyncio.sleep(self.delay)
        while self._cut:
            healed = asyncio.get_running_loop().create_future()
            self._healed.append(healed)
            await healed

    def _on_heal(self) -> None:
        lost, self._lost = self._lost, []
        for never in lost:
            if not never.done():
                never.set_exception(TimeoutError("the answer was lost"))
        waiting, self._healed = self._healed, []
        for healed in waiting:
            if not healed.done():
                healed.set_result(None)
        task = asyncio.get_running_loop().create_task(self._end_unanswered(), name="remote clean-up")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _end_unanswered(self) -> None:
        unanswered, self._unanswered = self._unanswered, []
        for task in unanswered:
            if not task.done():
                waiting, self._healed = self._healed, []
                for healed in waiting:
                    if not healed.done():
                        healed.set_result(None)
                await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                await self.inner.end(task.result().handle, timeout=5)
