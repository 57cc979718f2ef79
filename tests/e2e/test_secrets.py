import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

from hermes_kernel import BlockingRegistry, ConfigError, HermesKernelManager, KernelStartError
from hermes_kernel.process.environment import EnvPolicy

SECRET = "sk-hold0123456789abcdefghij"
LOOK = "import os; print(sorted(os.environ.items()))"

Make = Callable[..., BlockingRegistry]


@pytest.fixture(autouse=True)
def secret_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("SECRET", SECRET)


def test_a_cell_and_its_children_do_not_see_the_hosts_secrets(registry: BlockingRegistry) -> None:
    result = registry.execute(LOOK + "\nos.system('env')\n!env", owner="a")
    assert "HERMES_KERNEL_COOKIE" in result.text
    assert SECRET not in result.text
    environ = registry.execute("open('/proc/self/environ').read()", owner="a")
    assert SECRET not in environ.text


class Leaky(HermesKernelManager):
    """A kernel spec that asks for a secret of the host's by substitution."""

    @property
    def kernel_spec(self) -> KernelSpec:
        spec = super().kernel_spec
        spec.env = {"X": "a-${SECRET}-b", "LC_X": "a-${SECRET}-b", "API_KEY": "${SECRET}"}
        return spec


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("env", [None, {**os.environ, "OPENAI_API_KEY": SECRET, "SECRET": SECRET}])
def test_neither_a_kernel_spec_nor_a_caller_leaks_one_through_nbclient(env: dict[str, str] | None) -> None:
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LOOK)])
    options = {} if env is None else {"env": env}
    NotebookClient(node, kernel_manager_class=Leaky).execute(**options)
    text = node.cells[0].outputs[0].text
    assert SECRET not in text
    assert "('LC_X', 'a-${SECRET}-b')" in text
    assert "'X'" not in text
    assert "API_KEY" not in text


@pytest.mark.usefixtures("leaves_nothing")
def test_the_command_line_and_the_files_of_a_kernel_hold_no_secret_of_the_host() -> None:
    async def main() -> None:
        manager = Leaky()
        await manager.start_kernel(extra_arguments=["--InteractiveShell.banner1={env}"])
        launched = manager.launched
        assert launched is not None
        try:
            assert SECRET not in str(launched.argv)
            for file in Path(launched.connection_file).parent.rglob("*"):
                if file.is_file():
                    assert SECRET.encode() not in file.read_bytes(), file
        finally:
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())


def test_a_declared_name_passes(make_registry: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FLAG", "1")
    monkeypatch.setenv("MY_API_TOKEN", "t")
    code = "import os; os.environ.get('MY_FLAG'), os.environ.get('MY_API_TOKEN')"
    assert make_registry().execute(code, owner="a").value == "(None, None)"
    declared = make_registry(env_passthrough=["MY_FLAG", "MY_API_TOKEN", "NOT_SET"])
    assert declared.execute(code, owner="a").value == "('1', 't')"
    chosen = make_registry(env_passthrough=lambda name: name == "MY_FLAG")
    assert chosen.execute(code, owner="a").value == "('1', None)"


def test_values_come_from_the_owners_store_on_the_calling_thread(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    monkeypatch.setenv("A_TOKEN", "of the process")
    monkeypatch.setenv("B_TOKEN", "of the process")
    threads = set()

    def resolve(name: str, value: str | None) -> str | None:
        threads.add(threading.get_ident())
        return {"A_TOKEN": "of the owner", "C_TOKEN": "only there"}.get(name)

    registry = make_registry(env_passthrough=["A_TOKEN", "B_TOKEN", "C_TOKEN"], resolve_env=resolve)
    code = "import os; [os.environ.get(n) for n in ('A_TOKEN', 'B_TOKEN', 'C_TOKEN')]"
    assert registry.execute(code, owner="a").value == "['of the owner', None, 'only there']"
    assert threads == {threading.get_ident()}


def test_the_environment_is_frozen_when_the_kernel_starts(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = make_registry(env_passthrough=["MY_FLAG"])
    monkeypatch.setenv("MY_FLAG", "before")
    code = "import os; os.environ.get('MY_FLAG')"
    registry.execute(code, owner="a")
    monkeypatch.setenv("MY_FLAG", "after")
    assert registry.execute(code, owner="a").value == "'before'"
    assert registry.execute(code, owner="b").value == "'after'"


@pytest.mark.usefixtures("leaves_nothing")
def test_a_manager_lets_a_declared_name_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FLAG", "1")
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os; os.environ['MY_FLAG']")])
    manager = HermesKernelManager(env_policy=EnvPolicy(frozenset({"MY_FLAG"})))
    client = NotebookClient(node, km=manager)
    client.execute()
    client.kc.stop_channels()
    asyncio.run(manager.shutdown_kernel(now=True))
    assert node.cells[0].outputs[0].data["text/plain"] == "'1'"


def test_the_error_of_a_kernel_that_does_not_start_tells_no_secret(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    given = "quite-ordinary-but-not-to-be-told"
    for ends in ("raise ValueError(told)", "import os; os.write(2, told.encode()); os._exit(3)"):
        registry = make_registry(
            secrets=[given],
            env_passthrough=["MY_TOKEN"],
            bootstrap=f"import os; told = os.environ['MY_TOKEN'] + ' {given}' + 'x' * 3_980; {ends}",
        )
        with pytest.raises(KernelStartError) as caught:
            registry.execute("1", owner="a")
        error = caught.value
        for text in (error.to_json(), str(error), repr(error), error.log_tail):
            assert given not in text
            assert SECRET[-12:] not in text
        assert "***" in error.message or error.log_tail.endswith("x" * 3_980)


def test_an_environment_that_cannot_be_is_refused_without_its_values() -> None:
    async def start(env: dict[str, object]) -> None:
        await HermesKernelManager().start_kernel(env=env)

    for value in (b"sk-hold0123456789abcdefghij", "sk-hold0123456789\0abcdefghij", ["sk-hold0123456789"]):
        with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
            asyncio.run(start({"OPENAI_API_KEY": value}))
        assert "sk-hold" not in str(caught.value)
