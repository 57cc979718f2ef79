"""Who follows cells is told of each call's end, once, whatever became of the call."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    HermesKernelError,
    KernelRegistry,
)
from hermes_kernel.cell.events import ToolCallEnded, ToolCallStarted
from hermes_kernel.host.observe import forget, observe
from hermes_kernel.lifecycle.key import KernelKey

Make = Callable[..., BlockingRegistry]


class Follower:
    """Notes how each call ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ends: list[CellStatus | type[BaseException] | None] = []

    def cell(self, key: KernelKey) -> "Follower":
        self.begun += 1
        return self

    def tool_started(self, event: ToolCallStarted) -> None:
        raise AssertionError(event)

    def tool_ended(self, event: ToolCallEnded) -> None:
        raise AssertionError(event)

    def ended(self, result: CellResult | None, error: BaseException | None) -> None:
        self.ends.append(type(error) if result is None else result.status)


@pytest.fixture
def follower() -> Iterator[Follower]:
    one = Follower()
    observe(one)
    yield one
    forget(one)


def test_each_call_that_has_begun_ends_once(make_registry: Make, follower: Follower) -> None:
    registry = make_registry()
    registry.execute("1", owner="a")
    registry.execute("1", owner="a", interrupted=lambda: True)
    with pytest.raises(ZeroDivisionError):
        registry.execute("1", owner="a", interrupted=lambda: bool(1 / 0))
    answers = iter([False, False])
    with pytest.raises(StopIteration):
        registry.execute("while True: pass", owner="a", interrupted=answers.__next__)
    registry.close()
    with pytest.raises(HermesKernelError) as closed:
        registry.execute("1", owner="a")
    assert follower.begun == 5
    assert follower.ends == [
        CellStatus.OK,
        CellStatus.INTERRUPTED,
        ZeroDivisionError,
        CellStatus.INTERRUPTED,
        type(closed.value),
    ]


def test_a_call_that_is_refused_has_not_begun(make_registry: Make, follower: Follower) -> None:
    registry = make_registry()
    for wrong in ({"interrupted": 3}, {"timeout": -1}, {"nothing": 1}):
        with pytest.raises(ConfigError):
            registry.execute("1", owner="a", **wrong)
    assert (follower.begun, follower.ends) == (0, [])


async def refused_by_a_closed_registry() -> BaseException:
    async with KernelRegistry() as registry:
        pass
    with pytest.raises(HermesKernelError) as closed:
        await registry.execute("1", owner="a")
    return closed.value


def test_a_call_of_an_asyncio_registry_that_is_closed_ends(follower: Follower) -> None:
    error = asyncio.run(refused_by_a_closed_registry())
    assert (follower.begun, follower.ends) == (1, [type(error)])
