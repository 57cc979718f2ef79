import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from hermes_kernel import ConfigError, HermesKernelManager, KernelStartError

from .. import traces

SLEEPS = "import time; time.sleep(600)"
AWAITS = "import asyncio; await asyncio.sleep(600)"
DEAF = """
import signal, subprocess, time
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
time.sleep(600)
"""
LOSES_IDLE = """
session, send = get_ipython().kernel.session, get_ipython().kernel.session.send
def send_all_but_idle(stream, kind, content=None, *args, **kwargs):
    if kind == "status" and content == {"execution_state": "idle"}:
        session.send = send  # the next one arrives
        return None
    return send(stream, kind, content, *args, **kwargs)
session.send = send_all_but_idle
print("lost")
"""

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def notebook(*cells: str) -> nbformat.NotebookNode:
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    node.metadata.kernelspec = {"name": "no-such-kernel", "display_name": "written elsewhere"}
    return node


def run(node: nbformat.NotebookNode, **options: object) -> nbformat.NotebookNode:
    client = NotebookClient(node, kernel_manager_class=HermesKernelManager, **options)
    client.execute()
    return node


def test_a_notebook_runs_without_an_installed_kernel_spec_whatever_kernel_it_names() -> None:
    node = run(notebook("print('hi')", "6 * 7"))
    assert node.cells[0].outputs[0].text == "hi\n"
    assert node.cells[1].outputs[0].data["text/plain"] == "42"
    assert node.metadata.language_info.name == "python"
    nbformat.validate(node)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebooks_give_the_outputs_that_they_hold(path: Path) -> None:
    wanted = nbformat.read(path, as_version=4)
    got = run(nbformat.read(path, as_version=4), allow_errors=True)
    for before, after in zip(wanted.cells, got.cells, strict=True):
        if before.cell_type == "code":
            assert after.outputs == before.outputs, before.source


def test_the_working_directory_is_the_hosts_unless_one_is_given(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd())"
    assert run(notebook(code)).cells[0].outputs[0].text == f"{os.getcwd()}\n"
    node = run(notebook(code), resources={"metadata": {"path": str(tmp_path)}})
    assert node.cells[0].outputs[0].text == f"{tmp_path}\n"


def test_a_manager_can_be_started_under_one_loop_and_used_under_another() -> None:
    manager = HermesKernelManager()
    asyncio.run(manager.start_kernel())
    try:
        first, second = notebook("x = 6"), notebook("x * 7")
        for node in (first, second):
            client = NotebookClient(node, km=manager)
            asyncio.run(client.async_execute())
            client.kc.stop_channels()
        assert second.cells[0].outputs[0].data["text/plain"] == "42"
        assert asyncio.run(manager.is_alive())
    finally:
        asyncio.run(manager.shutdown_kernel())


def test_an_error_in_a_cell_is_an_error_of_the_notebook() -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(notebook("1 / 0"))
    node = run(notebook("1 / 0", "print('on')"), allow_errors=True)
    assert node.cells[0].outputs[0].ename == "ZeroDivisionError"
    assert node.cells[1].outputs[0].text == "on\n"


@pytest.mark.parametrize("code", [SLEEPS, AWAITS, DEAF])
def test_a_cell_that_runs_too_long_times_out_and_its_kernel_goes(code: str) -> None:
    with pytest.raises(CellTimeoutError):
        run(notebook(code), timeout=1)


@pytest.mark.parametrize("code", [SLEEPS, AWAITS])
def test_an_interrupted_cell_is_an_error_of_the_notebook(code: str) -> None:
    with pytest.raises(CellExecutionError, match=r"KeyboardInterrupt|CancelledError"):
        run(notebook(code, "print('on')"), timeout=1, interrupt_on_timeout=True)


@pytest.mark.parametrize("code", [SLEEPS, AWAITS])
def test_interrupt_on_timeout_reaches_sleeping_and_awaiting_cells(code: str) -> None:
    node = run(notebook(code, "print('on')"), timeout=1, interrupt_on_timeout=True, allow_errors=True)
    assert node.cells[0].outputs[0].ename in ("KeyboardInterrupt", "CancelledError")
    assert node.cells[1].outputs[0].text == "on\n"


def test_a_cell_that_takes_no_notice_of_an_interrupt_is_interrupted_until_it_ends() -> None:
    swallows = (
        "import time\nswallowed = 0\nwhile swallowed < 3:\n"
        "    try: time.sleep(600)\n    except KeyboardInterrupt: swallowed += 1\nprint(swallowed)"
    )
    node = run(notebook(swallows, "print('on')"), timeout=1, interrupt_on_timeout=True)
    assert [cell.outputs[0].text for cell in node.cells] == ["3\n", "on\n"]


def test_a_cell_that_is_given_up_ends_with_its_kernel() -> None:
    given_up = {"ename": "GivenUp", "evalue": "", "traceback": ["GivenUp: no notice"]}
    with pytest.raises(CellExecutionError, match="GivenUp"):
        run(notebook(DEAF), timeout=1, iopub_timeout=1, interrupt_on_timeout=True, error_on_timeout=given_up)


@pytest.mark.parametrize("allow_errors", [False, True])
def test_a_kernel_that_dies_is_noticed(allow_errors: bool) -> None:
    with pytest.raises(DeadKernelError):
        run(notebook("import os; os._exit(3)"), allow_errors=allow_errors)


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "exit()", "quit"])
def test_a_cell_that_exits_ends_the_notebook(code: str) -> None:
    with pytest.raises(CellExecutionError, match="SystemExit"):
        run(notebook(code))


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "exit()", "quit"])
def test_what_follows_an_exit_does_not_run_if_errors_are_allowed(code: str) -> None:
    node = notebook(code, "print('on')")
    with pytest.raises(DeadKernelError):
        run(node, allow_errors=True)
    assert [cell.outputs for cell in node.cells] == [[], []]  # an exit is no error to be shown


def test_an_idle_that_is_lost_costs_a_warning_and_no_output(caplog: pytest.LogCaptureFixture) -> None:
    node = run(notebook("x = 6", LOSES_IDLE, "print(x * 7)"), iopub_timeout=1)
    assert (node.cells[1].outputs[0].text, node.cells[2].outputs[0].text) == ("lost\n", "42\n")
    assert caplog.text.count("Timeout waiting for IOPub output") == 1


def test_an_idle_that_is_lost_can_be_an_error_and_its_kernel_goes() -> None:
    with pytest.raises(CellTimeoutError, match="IOPub"):
        run(notebook(LOSES_IDLE), iopub_timeout=1, raise_on_iopub_timeout=True)


@contextmanager
def started(**options: object) -> Iterator[HermesKernelManager]:
    """A manager that a notebook is given and does not own."""
    manager = HermesKernelManager(**options)
    asyncio.run(manager.start_kernel())
    try:
        yield manager
    finally:
        asyncio.run(manager.shutdown_kernel())


@contextmanager
def client_of(
    manager: HermesKernelManager, node: nbformat.NotebookNode, **options: object
) -> Iterator[NotebookClient]:
    client = NotebookClient(node, km=manager, **options)
    try:
        yield client
    finally:
        if client.kc is not None:
            client.kc.stop_channels()


def test_a_given_kernel_keeps_its_state_and_lives_on_after_a_notebook() -> None:
    with started() as manager:
        first, second = notebook("x = 6"), notebook("x * 7")
        with client_of(manager, first) as one, client_of(manager, second) as other:
            one.execute()
            other.execute()
            assert one.kc is not other.kc
        assert second.cells[0].outputs[0].data["text/plain"] == "42"
        assert asyncio.run(manager.is_alive())


def test_two_notebooks_at_once_on_one_kernel_have_their_own_outputs() -> None:
    with started() as manager:
        nodes = [notebook(*(f"print({n}, {m})" for m in range(10))) for n in range(2)]
        with client_of(manager, nodes[0]) as one, client_of(manager, nodes[1]) as other:

            async def both() -> None:
                await asyncio.gather(one.async_execute(), other.async_execute())

            asyncio.run(both())
        for n, node in enumerate(nodes):
            shown = ["".join(output.text for output in cell.outputs) for cell in node.cells]
            assert shown == [f"{n} {m}\n" for m in range(10)]


@pytest.mark.parametrize("code", [SLEEPS, AWAITS, DEAF])
def test_a_given_kernel_that_runs_too_long_is_the_givers_to_end(code: str) -> None:
    with started() as manager:
        with client_of(manager, notebook(code), timeout=1) as client, pytest.raises(CellTimeoutError):
            client.execute()
        assert asyncio.run(manager.is_alive())


def test_a_given_kernel_that_is_interrupted_goes_on() -> None:
    with started() as manager:
        node = notebook("x = 6", SLEEPS, "x * 7")
        options = {"timeout": 1, "interrupt_on_timeout": True, "allow_errors": True}
        with client_of(manager, node, **options) as client:
            client.execute()
        assert node.cells[1].outputs[0].ename == "KeyboardInterrupt"
        assert node.cells[2].outputs[0].data["text/plain"] == "42"


@pytest.mark.parametrize("allow_errors", [False, True])
@pytest.mark.parametrize("code", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_a_given_kernel_that_dies_is_noticed(code: str, allow_errors: bool) -> None:
    """With a manager whose calls block, nbclient waits for ever: there is none of that kind here."""
    assert issubclass(HermesKernelManager, AsyncKernelManager)
    with started() as manager:
        options = {"allow_errors": allow_errors}
        with client_of(manager, notebook(code), **options) as client, pytest.raises(DeadKernelError):
            client.execute()
        assert not asyncio.run(manager.is_alive())


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "exit()"])
def test_a_given_kernel_can_be_exited(code: str) -> None:
    with started() as manager:
        ends = pytest.raises(CellExecutionError, match="SystemExit")
        with client_of(manager, notebook(code)) as client, ends:
            client.execute()
        asyncio.run(manager.provisioner.wait())
        assert not asyncio.run(manager.is_alive())


def test_one_client_runs_its_notebook_again_on_a_fresh_kernel_under_another_loop() -> None:
    node = notebook("print('x' in globals()); x = 1")
    client = NotebookClient(node, kernel_manager_class=HermesKernelManager)
    for _ in range(2):
        asyncio.run(client.async_execute())
        assert node.cells[0].outputs[0].text == "False\n"


def test_cells_can_be_run_one_by_one() -> None:
    node = notebook("x = 6", "x * 7")
    client = NotebookClient(node, kernel_manager_class=HermesKernelManager)
    client.reset_execution_trackers()
    with client.setup_kernel():
        for index, cell in enumerate(node.cells):
            client.execute_cell(cell, index)
    assert node.cells[1].outputs[0].data["text/plain"] == "42"


def test_input_is_refused_at_once() -> None:
    with pytest.raises(CellExecutionError, match="nobody can answer"):
        run(notebook("input('who? ')"))


def test_a_restart_keeps_the_addresses_and_loses_the_state() -> None:
    async def main() -> None:
        manager = HermesKernelManager()
        await manager.start_kernel()
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=30)
            await client.execute_interactive("x = 1", output_hook=lambda _: None)
            before = manager.get_connection_info()
            await manager.restart_kernel()
            assert manager.get_connection_info() == before
            await client.wait_for_ready(timeout=30)
            reply = await client.execute_interactive("x", output_hook=lambda _: None)
            assert reply["content"]["ename"] == "NameError"
        finally:
            client.stop_channels()
            await manager.shutdown_kernel()

    asyncio.run(main())


@pytest.mark.parametrize("now", [False, True])
def test_a_kernel_that_has_ended_by_itself_can_be_shut_down(now: bool) -> None:
    async def main() -> None:
        manager = HermesKernelManager()
        await manager.start_kernel()
        await manager.signal_kernel(9)
        await manager.provisioner.wait()
        assert not await manager.is_alive()
        await manager.shutdown_kernel(now=now)
        await manager.cleanup_resources()

    asyncio.run(main())


def test_two_clients_of_one_manager_do_not_take_each_others_replies() -> None:
    async def main() -> list[str]:
        manager = HermesKernelManager()
        await manager.start_kernel()
        clients = [manager.client() for _ in range(2)]
        try:
            for client in clients:
                client.start_channels()
                await client.wait_for_ready(timeout=30)
            asked = [client.execute(f"{n}", reply=True, timeout=30) for n, client in enumerate(clients)]
            return [reply["content"]["status"] for reply in await asyncio.gather(*asked)]
        finally:
            for client in clients:
                client.stop_channels()
            await manager.shutdown_kernel(now=True)

    assert asyncio.run(main()) == ["ok", "ok"]


def test_a_manager_that_nobody_shuts_down_is_ended_with_its_interpreter(runtime: Path) -> None:
    code = (
        "import asyncio; from hermes_kernel import HermesKernelManager\n"
        "km = HermesKernelManager(); asyncio.run(km.start_kernel())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert traces.kernels_of(runtime) == []


@pytest.mark.parametrize("option", ["preexec_fn", "pass_fds", "executable", "user", "shell"])
def test_a_keyword_that_would_reach_into_the_process_is_refused(option: str) -> None:
    async def main() -> None:
        manager = HermesKernelManager()
        with pytest.raises(ConfigError, match=option):
            await manager.start_kernel(**{option: None})

    asyncio.run(main())


def test_a_foreign_provisioner_is_refused() -> None:
    from jupyter_client.provisioning.local_provisioner import LocalProvisioner

    async def main() -> None:
        manager = HermesKernelManager()
        manager.provisioner = LocalProvisioner(parent=manager, kernel_spec=manager.kernel_spec)
        with pytest.raises(ConfigError, match="LocalProvisioner"):
            await manager.start_kernel()

    asyncio.run(main())


def test_a_kernel_that_ends_while_it_starts_is_noticed_at_once(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n[ "$2" = \'-P\' ] || exec {sys.executable} "$@"\nexit 3\n')
    script.chmod(0o755)
    manager = HermesKernelManager(python=str(script))
    client = NotebookClient(notebook("1"), km=manager)
    with pytest.raises(RuntimeError, match="died"):
        client.execute()
    asyncio.run(manager.shutdown_kernel(now=True))


def test_an_interpreter_that_cannot_be_found_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-python"):
        HermesKernelManager(python="no-such-python")


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("hermes_kernel.process.zygote.Zygote._execute", refuse)

    async def main() -> None:
        manager = HermesKernelManager()
        with pytest.raises(KernelStartError, match="Cannot allocate memory"):
            await manager.start_kernel()
        assert not await manager.is_alive()

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0, 0.05, 0.3])
def test_a_start_that_is_cancelled_ends_soon_and_leaves_nothing(seconds: float) -> None:
    async def main() -> None:
        manager = HermesKernelManager()
        began = time.monotonic()
        try:
            await asyncio.wait_for(manager.start_kernel(), seconds)
        except TimeoutError:
            assert not manager.has_kernel
        assert time.monotonic() - began < 4
        await manager.shutdown_kernel(now=True)
        assert not await asyncio.to_thread(psutil.Process().children)

    asyncio.run(main())


def test_magics_can_be_forbidden() -> None:
    manager = HermesKernelManager(allow_magics=False)
    asyncio.run(manager.start_kernel())
    try:
        for cell in ("%time 1", "!echo x", "len?", "%%bash\necho x", "ls"):
            node = notebook(cell)
            client = NotebookClient(node, km=manager, allow_errors=True)
            client.execute()
            client.kc.stop_channels()
            assert node.cells[0].outputs[0].output_type == "error", cell
    finally:
        asyncio.run(manager.shutdown_kernel())
