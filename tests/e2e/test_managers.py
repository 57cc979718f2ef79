"""The manager of a registry's kernel: a view of it for every Jupyter tool, whenever it is asked for."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    HermesKernelManager,
    KernelStartError,
    Limits,
    Loss,
)
from hermes_kernel.process.launch import Launched, LaunchSpec
from hermes_kernel.process.local import LocalLauncher

from .. import traces


class HeldLauncher(LocalLauncher):
    """Launches nothing until it is let go, and perhaps nothing then."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.begun = threading.Event()
        self.go = threading.Event()

    async def launch(self, spec: LaunchSpec) -> Launched:
        self.begun.set()
        await asyncio.get_running_loop().run_in_executor(None, self.go.wait)
        if self.fails:
            raise OSError("no process today")
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


@contextmanager
def early_manager(
    *, fails: bool = False
) -> Iterator[tuple[BlockingRegistry, HermesKernelManager, Callable[[], CellResult]]]:
    """A manager that is asked for before its kernel is launched, and what lets that happen."""
    launcher = HeldLauncher(fails=fails)
    with (
        BlockingRegistry(limits=Limits(timeout=60), _launcher=launcher) as registry,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(registry.execute, "x = 41", owner="a")

        def go() -> CellResult:
            launcher.go.set()
            return running.result(60)

        try:
            assert launcher.begun.wait(30)
            yield registry, manager_of(registry), go
        finally:
            launcher.go.set()


def test_one_that_is_asked_for_before_the_launch_has_the_kernel_afterwards(leaves_nothing: None) -> None:
    with early_manager() as (registry, early, go):
        (info,) = registry.kernels()
        assert (early.kernel_id, early.has_kernel, early.launched) == (info.kernel_id, False, None)
        ready = early.ready
        assert not ready.done()
        assert go().status is CellStatus.OK
        assert (ready.done(), ready.exception()) == (True, None)
        (info,) = registry.kernels()
        assert manager_of(registry) is early
        assert early.has_kernel
        assert early.launched is not None
        assert (early.launched.pid, early.connection_file) == (info.pid, info.connection_file)
        assert asyncio.run(asked(early, "x + 1")) == "42"


def test_who_waits_for_a_kernel_that_does_not_come_up_is_told(leaves_nothing: None) -> None:
    with early_manager(fails=True) as (_, early, go):
        ready = early.ready
        with pytest.raises(KernelStartError, match="no process today"):
            go()
        assert isinstance(ready.exception(), KernelStartError)
        assert not early.has_kernel
        asyncio.run(early.shutdown_kernel())


@pytest.mark.parametrize("now", [False, True], ids=["asked", "killed"])
def test_a_shutdown_before_the_launch_is_a_start_that_fails(leaves_nothing: None, now: bool) -> None:
    with early_manager() as (registry, early, go):
        asyncio.run(early.shutdown_kernel(now=now))
        with pytest.raises(KernelStartError, match="shut down while it started"):
            go()
        assert traces.eventually(lambda: not registry.kernels())
        assert registry.execute("40 + 2", owner="a").value == "42"
        assert manager_of(registry) is not early


def test_it_shows_what_the_kernel_was_launched_with(leaves_nothing: None) -> None:
    with BlockingRegistry(limits=Limits(timeout=60), allow_magics=False, env_passthrough=["MY"]) as registry:
        registry.execute("1", owner="a")
        manager = manager_of(registry)
        assert manager.connection_file is not None
        told = json.loads(Path(manager.connection_file).read_text())
        assert (manager.allow_magics, manager.env_policy.passthrough) == (False, {"MY"})
        assert told["hermes"]["bridge_token"] == manager.bridge_token
        assert told["hermes"]["owner_secret"] == manager.owner_secret
        assert told["key"].encode() == manager.session.key
        for secret in (manager.bridge_token, manager.owner_secret, told["key"]):
            assert secret not in repr(manager.launched)


def test_one_that_is_asked_for_when_its_interpreter_is_gone_is_there(
    leaves_nothing: None, tmp_path: Path
) -> None:
    script = tmp_path / "project"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    with BlockingRegistry(limits=Limits(timeout=60)) as registry:
        registry.execute("x = 41", owner="a", python=script)
        script.unlink()
        manager = manager_of(registry)
        assert (manager.python, manager.has_kernel) == (str(script), True)


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


@pytest.mark.parametrize("now", [False, True], ids=["asked", "killed"])
def test_what_its_user_has_open_holds_up_nobody_when_the_registry_ends_the_kernel(
    registry: BlockingRegistry, now: bool
) -> None:
    manager = manager_of(registry)
    client = manager.client()
    client.start_channels()
    closing = threading.Thread(target=registry.close_owner, args=("a",))
    try:
        closing.start()  # at the same time
        asyncio.run(manager.shutdown_kernel(now=now))
        closing.join(20)
        assert not closing.is_alive()
        assert registry.execute("40 + 2", owner="b").value == "42"
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)


def test_the_manager_of_a_kernel_that_its_registry_has_ended_has_none(registry: BlockingRegistry) -> None:
    manager = manager_of(registry)
    registry.close_owner("a")
    assert not manager.has_kernel
    assert not asyncio.run(manager.is_alive())
    assert registry.manager("a") is None
