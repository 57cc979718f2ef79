"""The host's end of a zygote, with its process."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import psutil
import pytest

from hermes_kernel.process import zygote as zygotes
from hermes_kernel.process.launchclass import Program, launch_class
from hermes_kernel.process.nursery import Nursery, NurserySeat
from hermes_kernel.process.zygote import Zygote

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="zygotes are Linux's"),
]

KIND = launch_class(sys.executable, {}, forks=False)
PROGRAM = Program((sys.executable,), {})


@asynccontextmanager
async def seated() -> AsyncIterator[NurserySeat]:
    """A kernel that waits for its start, below a zygote."""
    nursery = Nursery()
    seat = await nursery.seat(KIND, PROGRAM, "k1", binds=False)
    assert isinstance(seat, NurserySeat)
    try:
        await seat.tree.prepared()
        yield seat
    finally:
        await nursery.close()


@contextmanager
def forked_worker() -> Iterator[None]:
    """A child that has every descriptor of this process."""
    go_on, let_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go_on, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.write(let_go, b"x")
        os.waitpid(pid, 0)
        os.close(go_on)
        os.close(let_go)


async def leave_and_end_the_last_tree(seat: NurserySeat, *, stopped: bool = False) -> float:
    """Return how long the zygote has lived without trees."""
    leaving = asyncio.create_task(seat.zygote.leave())
    await asyncio.sleep(0)
    if stopped:
        psutil.Process(seat.zygote.pid).suspend()
    await asyncio.wait({leaving}, timeout=2 * zygotes.LEAVE_TIMEOUT)  # it has a tree for all that time
    await seat.give_up(timeout=5)
    began = time.monotonic()
    await asyncio.wait_for(leaving, 5)
    return time.monotonic() - began


def test_a_forked_worker_of_the_host_does_not_keep_a_zygote_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zygotes, "LEAVE_TIMEOUT", 1)

    async def main() -> float:
        async with seated() as seat:
            with forked_worker():
                return await leave_and_end_the_last_tree(seat)

    assert asyncio.run(main()) < zygotes.LEAVE_TIMEOUT / 2


def test_a_zygote_that_does_not_end_after_its_last_kernel_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygotes, "LEAVE_TIMEOUT", 0.2)
    monkeypatch.setattr(Zygote, "_wake", lambda _: None)  # as if it were stopped again and again

    async def main() -> None:
        async with seated() as seat:
            await leave_and_end_the_last_tree(seat, stopped=True)

    asyncio.run(main())


def test_a_zygote_that_leaves_stays_for_as_long_as_it_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygotes, "LEAVE_TIMEOUT", 0.1)

    async def main() -> None:
        async with seated() as seat:
            leaving = asyncio.create_task(seat.zygote.leave())
            await asyncio.wait({leaving}, timeout=0.5)
            assert not leaving.done()
            await seat.give_up(timeout=5)
            await asyncio.wait_for(leaving, 5)

    asyncio.run(main())


@pytest.mark.parametrize("act", ["fork", "leave"])
def test_a_zygote_that_somebody_has_stopped_goes_on_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(zygotes, "LEAVE_TIMEOUT", 1)

    async def main() -> None:
        async with seated() as seat:
            os.kill(seat.zygote.pid, signal.SIGSTOP)
            if act == "fork":
                tree = seat.zygote.fork()
                await tree.prepare(
                    {
                        "isolation": "none",
                        "memory_limit": None,
                        "directory": "",
                        "place": None,
                        "waits": False,
                    },
                    (),
                )
                await asyncio.wait_for(tree.prepared(), 5)
                await tree.end(timeout=5)
                await seat.give_up(timeout=5)
            else:
                assert await leave_and_end_the_last_tree(seat) < zygotes.LEAVE_TIMEOUT / 2

    asyncio.run(main())
