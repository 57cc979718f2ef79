import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hermes_kernel.errors import ConfigError, KernelStartError
from hermes_kernel.process import zygote
from hermes_kernel.process.environment import EnvPolicy
from hermes_kernel.process.launch import Ended, KernelHandle, Launched, LaunchSpec
from hermes_kernel.process.local import LocalLauncher, UnknownKernelError, check_cwd

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
