import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient

from hermes_kernel.errors import ConfigError, KernelStartError
from hermes_kernel.host.supervised import SupervisedLauncher
from hermes_kernel.host.supervisor import Supervisor
from hermes_kernel.process import zygote
from hermes_kernel.process.environment import EnvPolicy
from hermes_kernel.process.launch import Ended, Interpreter, KernelHandle, Launched, LaunchSpec, ProcessLimits
from hermes_kernel.process.local import LocalLauncher, UnknownKernelError, check_cwd
from hermes_kernel.process.warden import WardenedTree
from hermes_kernel.process.zygote import KERNEL_MODULE

from .. import traces

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SPEC = LaunchSpec("k1", sys.executable, "key", None, {"PATH": os.environ["PATH"], "API_TOKEN": "t"})


@asynccontextmanager
async def launched(spec: LaunchSpec = SPEC) -> AsyncIterator[tuple[LocalLauncher, Launched]]:
    launcher = LocalLauncher()
    try:
        yield launcher, await launcher.launch(spec)
    finally:
        await launcher.close()


def test_only_data_crosses_the_seam() -> None:
    async def main() -> None:
        async with launched() as (_, kernel):
            json.dumps({**asdict(SPEC), "env_policy": None})
            json.dumps(asdict(kernel))

    asyncio.run(main())


async def environment_of(kernel: Launched) -> dict[str, str]:
    """The environment block of a kernel, once it has been executed."""
    file = Path(f"/proc/{kernel.pid}/environ")
    await asyncio.to_thread(traces.eventually, lambda: b"PYTHONUTF8" in file.read_bytes())
    return dict(item.split("=", 1) for item in file.read_text().split("\0") if item)


def test_the_node_scrubs_last_and_adds_its_own_variables() -> None:
    async def main() -> dict[str, str]:
        async with launched() as (_, kernel):
            return await environment_of(kernel)

    env = asyncio.run(main())
    assert "API_TOKEN" not in env
    assert env["PYTHONUTF8"] == "1"
    assert re.fullmatch("[0-9a-f]{32}", env["HERMES_KERNEL_COOKIE"])


def test_a_policy_lets_a_declared_name_pass() -> None:
    spec = replace(SPEC, env_policy=EnvPolicy(frozenset({"API_TOKEN"})))

    async def main() -> dict[str, str]:
        async with launched(spec) as (_, kernel):
            return await environment_of(kernel)

    assert asyncio.run(main())["API_TOKEN"] == "t"


def test_where_another_interpreter_is_never_passes() -> None:
    name = "PYTHONEXECUTABLE"
    spec = replace(SPEC, env={**SPEC.env, name: "/elsewhere"}, env_policy=EnvPolicy(frozenset({name})))

    async def main() -> dict[str, str]:
        async with launched(spec) as (_, kernel):
            return await environment_of(kernel)

    assert name not in asyncio.run(main())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_addresses_that_somebody_else_has_chosen_are_the_kernels(method: str) -> None:
    connection: dict[str, object] = {"transport": "tcp", "ip": "127.0.0.1"}
    with contextlib.ExitStack() as free:
        for channel in ("shell", "iopub", "stdin", "control", "hb"):
            place = free.enter_context(socket.socket())
            place.bind(("127.0.0.1", 0))
            connection[f"{channel}_port"] = place.getsockname()[1]
    key = "0" * 64
    spec = replace(SPEC, session_key=key, connection=connection, process=ProcessLimits(start_method=method))

    async def main() -> None:
        async with launched(spec) as (_, kernel):
            client = AsyncKernelClient()
            client.load_connection_info({**kernel.connection, "key": key.encode()})
            client.start_channels()
            try:
                await client.wait_for_ready(timeout=30)
            finally:
                client.stop_channels()
                client.context.destroy(linger=0)

    asyncio.run(main())


def test_a_kernel_has_nothing_of_the_hosts_but_its_log() -> None:
    async def main() -> list[str]:
        async with launched() as (_, kernel):
            own = lambda: os.getsid(kernel.pid) == kernel.pid and b"-f" in command.read_bytes()  # noqa: E731
            command = Path(f"/proc/{kernel.pid}/cmdline")
            await asyncio.to_thread(traces.eventually, own)
            fds = [os.readlink(f"/proc/{kernel.pid}/fd/{n}") for n in (0, 1, 2)]
            assert os.getsid(kernel.pid) == kernel.pid != os.getsid(0)
            return fds

    stdin, stdout, stderr = asyncio.run(main())
    assert stdin == "/dev/null"
    assert stdout.endswith("kernel.log") or "pipe" in stdout
    assert stderr.endswith("kernel.log") or "pipe" in stderr


@pytest.mark.parametrize("without_pidfd", [False, True])
def test_the_end_of_a_process_is_an_event(monkeypatch: pytest.MonkeyPatch, without_pidfd: bool) -> None:
    if without_pidfd:

        def refuse(pid: int, flags: int = 0) -> int:
            raise OSError("no pidfd here")

        monkeypatch.setattr(zygote.os, "pidfd_open", refuse)

    async def main() -> None:
        async with launched() as (launcher, kernel):
            assert launcher.exit_of(kernel.handle) is None
            os.kill(kernel.pid, signal.SIGKILL)
            ended = await asyncio.wait_for(launcher.ended(kernel.handle), 5)
            assert (ended.exit_code, ended.signal) == (-9, "SIGKILL")
            assert launcher.exit_of(kernel.handle) == ended

    asyncio.run(main())


def test_ending_is_idempotent_and_remembers_how_it_ended() -> None:
    async def main() -> None:
        async with launched() as (launcher, kernel):
            ends = await asyncio.gather(*(launcher.end(kernel.handle, timeout=5) for _ in range(8)))
            assert set(ends) == {Ended.CLEAN}
            assert (await launcher.ended(kernel.handle)).signal == "SIGKILL"
            await launcher.signal(kernel.handle, signal.SIGINT)
            assert not Path(kernel.connection_file).parent.exists()

    asyncio.run(main())


class HeldInterpreter:
    """An interpreter that is looked at until it is let go."""

    def __init__(self, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._probe = launcher.probe
        monkeypatch.setattr(launcher, "probe", self.probe)

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        self.reached.set()
        await self.go_on.wait()
        return await self._probe(python, timeout=timeout)


def kernels_below() -> list[str]:
    """The kernels that run below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a ZombieProcess is one: it has just ended
            found.append(" ".join(process.cmdline()))
    return [name for name in found if KERNEL_MODULE in name]


def test_a_launcher_that_is_closed_has_no_kernel_of_a_launch_that_was_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        launcher = LocalLauncher()
        held = HeldInterpreter(launcher, monkeypatch)
        launching = asyncio.create_task(launcher.launch(SPEC))
        await held.reached.wait()
        closing = asyncio.create_task(launcher.close())
        await asyncio.sleep(0)
        held.go_on.set()
        await closing
        with pytest.raises(KernelStartError, match="closed"):
            await launching
        assert kernels_below() == []

    asyncio.run(main())


@pytest.mark.parametrize("steps", [1, 5, 20, 100])
def test_a_launcher_is_closed_at_any_moment_of_a_launch(steps: int) -> None:
    async def main() -> None:
        launcher = LocalLauncher()
        launching = asyncio.create_task(launcher.launch(SPEC))
        for _ in range(steps):
            await asyncio.sleep(0)
        await launcher.close()
        await asyncio.wait({launching})
        assert kernels_below() == []
        assert isinstance(launching.exception(), KernelStartError | None)

    asyncio.run(main())


def test_a_closed_launcher_launches_nothing() -> None:
    async def main() -> None:
        launcher = LocalLauncher()
        await launcher.close()
        with pytest.raises(KernelStartError, match="closed"):
            await launcher.launch(SPEC)

    asyncio.run(main())


def test_a_launch_that_is_cancelled_twice_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time while the first is being cleaned up."""

    async def main() -> None:
        launcher = LocalLauncher()
        reached, ending = asyncio.Event(), asyncio.Event()

        async def hang(*_: object) -> None:
            reached.set()
            await asyncio.Event().wait()

        end = WardenedTree.end

        async def end_and_tell(tree: WardenedTree, *, timeout: float) -> Ended:
            ending.set()
            return await end(tree, timeout=timeout)

        monkeypatch.setattr(WardenedTree, "start", hang)
        monkeypatch.setattr(WardenedTree, "end", end_and_tell)
        launching = asyncio.create_task(launcher.launch(SPEC))
        for event in (reached, ending):
            await event.wait()
            launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        await launcher.close()

    asyncio.run(main())


@pytest.mark.parametrize("is_launched", [False, True], ids=["under way", "just launched"])
def test_a_launch_that_nobody_waits_for_any_more_is_undone(
    monkeypatch: pytest.MonkeyPatch, is_launched: bool
) -> None:
    """The caller is cancelled on a loop of its own, whatever the supervisor's is doing then."""
    launcher, supervisor = LocalLauncher(), Supervisor("test")
    lent = SupervisedLauncher(supervisor, launcher)
    launch, reached, go_on = launcher.launch, threading.Event(), threading.Event()

    async def held(spec: LaunchSpec) -> Launched:
        launched = await launch(spec) if is_launched else None
        reached.set()
        if launched is not None:
            go_on.wait(10)  # nothing else happens on this loop: the cancellation comes too late
            return launched
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(launcher, "launch", held)

    async def main() -> None:
        launching = asyncio.create_task(lent.launch(SPEC))
        await asyncio.to_thread(reached.wait, 20)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        go_on.set()

    asyncio.run(main())
    try:
        assert traces.eventually(lambda: not kernels_below())
        assert not supervisor.closed
    finally:
        supervisor.close()


def test_a_kernel_of_nobodys_is_unknown() -> None:
    async def main() -> None:
        with pytest.raises(UnknownKernelError):
            await LocalLauncher().ended(KernelHandle("local", "nobody", 0))

    asyncio.run(main())


def test_children_in_the_group_end_with_a_kernel_that_dies_by_itself(tmp_path: Path) -> None:
    """What held the pipes or the group of a dead kernel kept the caller waiting, and lived on."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n[ "$2" = \'-P\' ] || exec {sys.executable} "$@"\nsleep 600 &\nexit 3\n')
    script.chmod(0o755)

    async def main() -> None:
        async with launched(replace(SPEC, python=str(script))) as (launcher, kernel):
            ended = await asyncio.wait_for(launcher.ended(kernel.handle), 5)
            assert ended.exit_code == 3

    asyncio.run(main())


def test_a_directory_that_cannot_be_made_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_kernel.process.staging._create", _no_space)

    async def main() -> None:
        with pytest.raises(KernelStartError, match="No space left"):
            await LocalLauncher().launch(SPEC)

    asyncio.run(main())


def test_a_process_that_cannot_be_made_leaves_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)

    async def main() -> None:
        with pytest.raises(KernelStartError, match="Resource temporarily unavailable"):
            await LocalLauncher().launch(SPEC)

    asyncio.run(main())


@pytest.mark.parametrize("cwd", ["", "/nonexistent-directory", "/etc/passwd", "a\0b", 3, b"/tmp"])
def test_a_cwd_that_is_no_directory_is_refused_by_name(cwd: object) -> None:
    with pytest.raises(ConfigError, match="cwd="):
        check_cwd(cwd)  # type: ignore[arg-type]


def test_a_cwd_is_made_absolute_and_the_home_directory_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_cwd("~") == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert check_cwd(".") == str(tmp_path)


def _no_space(path: Path, content: bytes, *, size: int | None = None) -> None:
    raise OSError(28, "No space left on device")
