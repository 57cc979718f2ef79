"""The manager of a registry's kernel: a view of it for every Jupyter tool, whenever it is asked for."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hermes_kernel import BlockingRegistry, CellStatus, ConfigError, HermesKernelManager, Limits, Loss
from hermes_kernel.process.launch import Launched, LaunchSpec
from hermes_kernel.process.local import LocalLauncher

from .. import traces


class HeldLauncher(LocalLauncher):
    """Launches nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go = threading.Event()

    async def launch(self, spec: LaunchSpec) -> Launched:
        self.begun.set()
        await asyncio.get_running_loop().run_in_executor(None, self.go.wait)
        return await super().launch(spec)


@pytest.fixture
def registry(leaves_nothing: None) -> Iterator[BlockingRegistry]:
    with BlockingRegistry(limits=Limits(timeout=60)) as registry:
        registry.execute("x = 41", owner="a")
        yield registry


def manager_of(registry: BlockingRegistry, owner: str = "a") -> HermesKernelManager:
    manager = registry.manager(owner)
    assert manager is not None
    return manager


async def asked(manager: HermesKernelManager, expression: str) -> str:
    """The value of an expression as a client of the manager gets it."""
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=30)
        reply = await client.execute(
            "pass", user_expressions={"asked": expression}, reply=True, timeout=30, store_history=False
        )
        return str(reply["content"]["user_expressions"]["asked"]["data"]["text/plain"])
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)


def test_one_that_is_asked_for_before_the_launch_has_the_kernel_afterwards(leaves_nothing: None) -> None:
    launcher = HeldLauncher()
    with BlockingRegistry(limits=Limits(timeout=60), _launcher=launcher) as registry:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(registry.execute, "x = 41", owner="a")
            assert launcher.begun.wait(30)
            try:
                early = manager_of(registry)
                (info,) = registry.kernels()
                assert (early.kernel_id, early.has_kernel, early.launched) == (info.kernel_id, False, None)
            finally:
                launcher.go.set()
            assert running.result(60).status is CellStatus.OK
        (info,) = registry.kernels()
        assert manager_of(registry) is early
        assert early.has_kernel
        assert early.launched is not None
        assert (early.launched.pid, early.connection_file) == (info.pid, info.connection_file)
        assert asyncio.run(asked(early, "x + 1")) == "42"


def test_one_that_is_asked_for_later_is_ready_at_once_and_stays_the_same(registry: BlockingRegistry) -> None:
    manager = manager_of(registry)

    async def look() -> tuple[bool, str]:
        await asyncio.wait_for(asyncio.wrap_future(manager.ready), 5)  # type: ignore[arg-type]
        return await manager.is_alive(), await asked(manager, "x + 1")

    assert asyncio.run(look()) == (True, "42")
    assert manager_of(registry) is manager
    assert registry.execute("x", owner="a").value == "41"


@pytest.mark.parametrize("what", ["start_kernel", "restart_kernel"])
def test_the_kernel_is_not_started_or_restarted_behind_its_registry(
    registry: BlockingRegistry, what: str
) -> None:
    manager = manager_of(registry)
    with pytest.raises(ConfigError, match=r"belongs to a registry.*reset=True"):
        asyncio.run(getattr(manager, what)())
    again = registry.execute("x", owner="a")
    assert (again.value, again.kernel.reused, again.kernel.lost) == ("41", True, None)
    registry.close_owner("a")
    with pytest.raises(ConfigError, match="belongs to a registry"):
        asyncio.run(getattr(manager, what)())
    assert registry.kernels() == ()


@pytest.mark.parametrize("now", [False, True], ids=["asked", "killed"])
def test_a_shutdown_ends_the_registrys_kernel_and_its_owner_is_told(
    registry: BlockingRegistry, now: bool
) -> None:
    manager = manager_of(registry)
    asyncio.run(manager.shutdown_kernel(now=now))
    assert not manager.has_kernel
    assert traces.eventually(lambda: not registry.kernels())
    after = registry.execute("'x' in dir()", owner="a")
    assert (after.value, after.kernel.lost) == ("False", Loss.DIED)
    assert manager_of(registry) is not manager


def test_the_manager_of_a_kernel_that_its_registry_has_ended_has_none(registry: BlockingRegistry) -> None:
    manager = manager_of(registry)
    registry.close_owner("a")
    assert not manager.has_kernel
    assert not asyncio.run(manager.is_alive())
    assert registry.manager("a") is None
