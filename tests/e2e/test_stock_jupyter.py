"""Our kernel spec under jupyter_client's own managers: no class of ours is asked for, the promises hold."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from jupyter_client.manager import AsyncKernelManager, KernelManager

from .. import traces

SPEC = Path(__file__).parents[2] / "kernelspec" / "hermes"

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(autouse=True)
def installed_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "kernels" / "hermes"
    shutil.copytree(SPEC, place)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hold0123456789abcdefghij")
    monkeypatch.setenv("HARMLESS", "but not on the list")
    return place


async def value_of(manager: AsyncKernelManager, code: str) -> str:
    client = manager.client()
    client.start_channels()
    shown: list[str] = []

    def note(message: dict) -> None:  # type: ignore[type-arg]
        content = message["content"]
        if message["msg_type"] == "execute_result":
            shown.append(content["data"]["text/plain"])
        elif message["msg_type"] == "error":
            shown.append(content["ename"])

    try:
        await client.wait_for_ready(timeout=30)
        await client.execute_interactive(code, timeout=30, output_hook=note, allow_stdin=False)
    finally:
        client.stop_channels()
        client.context.term()
    return shown[-1]


def values(*codes: str, **start: object) -> list[str]:
    async def main() -> list[str]:
        manager = AsyncKernelManager(kernel_name="hermes")
        await manager.start_kernel(**start)
        try:
            return [await value_of(manager, code) for code in codes]
        finally:
            await manager.shutdown_kernel()

    return asyncio.run(main())


def test_the_spec_starts_our_kernel_with_a_scrubbed_environment() -> None:
    cookie, secret, harmless = values(
        "import os; 'HERMES_KERNEL_COOKIE' in os.environ",
        "os.environ.get('OPENAI_API_KEY', 'none')",
        "os.environ.get('HARMLESS', 'none')",
    )
    assert (cookie, secret, harmless) == ("True", "'none'", "'none'")


def test_what_a_caller_passes_as_environment_is_scrubbed_too() -> None:
    env = {**os.environ, "MY_TOKEN": "t", "LC_MINE": "kept"}
    found = values("import os; os.environ.get('MY_TOKEN'), os.environ.get('LC_MINE')", env=env)
    assert found == ["(None, 'kept')"]


def test_sys_exit_does_not_end_the_kernel_of_a_stock_manager() -> None:
    assert values("import sys; sys.exit(3)", "6 * 7") == ["SystemExit", "42"]


def test_a_blocking_manager_works_too() -> None:
    manager = KernelManager(kernel_name="hermes")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        reply = client.execute_interactive("6 * 7", timeout=30, output_hook=lambda _: None)
        assert reply["content"]["status"] == "ok"
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=30)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        client.context.destroy()


@pytest.mark.parametrize("own_session", [False, True])
def test_children_of_the_kernel_end_with_it(own_session: bool) -> None:
    code = f"import subprocess; subprocess.Popen(['sleep', '600'], start_new_session={own_session}).pid"

    async def main() -> int:
        manager = AsyncKernelManager(kernel_name="hermes")
        await manager.start_kernel()
        child = await value_of(manager, code)
        await manager.shutdown_kernel()
        return int(child)

    pid = asyncio.run(main())
    assert traces.eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists() or _is_dead(pid))


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""
    except FileNotFoundError:
        return True
