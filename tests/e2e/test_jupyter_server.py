"""The spec `hermes` under a real jupyter_server, as a front end uses it: REST and a websocket."""

import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from .. import traces
from .servers import SECRETS, START_WAIT, STOP_WAIT, Kernel, Server, jupyter_server, traces_of

ROUNDS = 5  # of what is measured
POLLER_WAIT = 3.0  # the kernel looks for its parent once a second
QUICK = 1.0

HELD = tuple(SECRETS.values())


@pytest.fixture(scope="module")
def server(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with jupyter_server(tmp_path_factory.mktemp("server"), runtime) as found:
        yield found


@pytest.fixture
def kernel(server: Server, leaves_nothing: None) -> Iterator[Kernel]:
    with server.kernel() as found:
        yield found


@pytest.fixture
def own_runtime() -> Iterator[Path]:
    """A runtime directory for one test, whatever is left in it; short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="hkj-"))
    yield directory
    for process in traces_of(directory):
        process.kill()
    shutil.rmtree(directory, ignore_errors=True)  # the wardens of a killed server remove, too


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measured(name: str, times: list[float], record: Callable[[str, object], None]) -> float:
    """Return the median, and keep the figures with the test's report."""
    median = statistics.median(times)
    record(name, [round(taken, 3) for taken in times])
    print(f"{name}: median {median:.3f} s of {[round(taken, 3) for taken in times]}")
    return median


def test_the_server_offers_the_spec_and_serves_its_logo(server: Server) -> None:
    told = server.ask("GET", "/api/kernelspecs")["kernelspecs"]
    spec = told["hermes"]
    assert spec["spec"]["display_name"] == "Hermes (Python 3)"
    assert spec["spec"]["language"] == "python"
    assert spec["spec"]["metadata"]["kernel_provisioner"]["provisioner_name"] == "hermes-provisioner"
    assert set(spec["resources"]) == {"logo-svg", "logo-32x32", "logo-64x64"}
    status, kind, logo = server.raw("GET", spec["resources"]["logo-svg"])
    assert (status, kind) == (200, "image/svg+xml")
    assert logo.startswith(b"<svg")


def test_the_cells_run_in_the_interpreter_that_installed_the_spec(kernel: Kernel) -> None:
    assert kernel.run("import sys; sys.executable").value == repr(sys.executable)
    assert kernel.run("6 * 7").value == "42"


ENVIRONMENT = """\
import os, subprocess, sys
print(dict(os.environ))
print(subprocess.run([sys.executable, '-c', 'import os; print(dict(os.environ))'],
                     capture_output=True, text=True).stdout)
"""


def test_neither_a_cell_nor_its_child_sees_the_servers_secrets(server: Server, kernel: Kernel) -> None:
    assert all(psutil.Process(server.process.pid).environ()[name] == SECRETS[name] for name in SECRETS)
    shown = kernel.run(ENVIRONMENT).stdout
    assert shown.count("HERMES_KERNEL_COOKIE") == 2
    assert not any(secret in shown for secret in HELD)
    assert not any(name in shown for name in SECRETS)
    assert not any(secret in str(kernel.process.environ()) for secret in HELD)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_secret_that_the_specs_env_names_is_not_filled_in(server: Server) -> None:
    with server.kernel("leaky") as kernel:
        shown = kernel.run(ENVIRONMENT).stdout
        assert not any(secret in shown for secret in HELD)
        assert kernel.run("os.environ.get('LC_PLAIN'), os.environ.get('X')").value == "('kept', None)"
        kernel.restart()
        kernel.reconnect()
        assert not any(secret in kernel.run(ENVIRONMENT).stdout for secret in HELD)


@pytest.mark.parametrize("leave", ["sys.exit(3)", "raise SystemExit('done')"])
def test_system_exit_is_shown_and_the_kernel_lives(leave: str, kernel: Kernel) -> None:
    kernel.run("import sys; kept = 'state'")
    assert kernel.run(leave).ended_with == "SystemExit"
    assert kernel.run("kept").value == "'state'"
    assert kernel.process.is_running()


@pytest.mark.parametrize("leave", ["exit()", "quit()"])
def test_exit_asks_the_front_end_and_ends_the_kernel_which_the_server_replaces(
    leave: str, server: Server, kernel: Kernel
) -> None:
    """What ipykernel does: a reply of `ok` whose payload lets a console leave, then the kernel goes."""
    kernel.run("kept = 'state'")
    answer = kernel.run(leave)
    assert answer.ended_with == "ok"
    assert answer.reply["payload"] == [{"source": "ask_exit", "keepkernel": False}]
    assert traces.eventually(lambda: traces.is_gone(kernel.process))
    assert traces.eventually(lambda: traces_of(server.runtime, kernel.id), within=START_WAIT)
    kernel.reconnect()
    assert kernel.run("'kept' in globals()").value == "False"


def test_a_sleeping_cell_is_interrupted(kernel: Kernel) -> None:
    cell = kernel.begin("import time; kept = 1; print('begun', flush=True); time.sleep(60)")
    kernel.until_printed(cell, "begun")
    kernel.interrupt()
    assert kernel.answer(cell).ended_with == "KeyboardInterrupt"
    assert kernel.run("kept").value == "1"


def test_an_awaiting_cell_is_interrupted(kernel: Kernel) -> None:
    cell = kernel.begin("import asyncio; kept = 1; print('begun', flush=True); await asyncio.sleep(60)")
    kernel.until_printed(cell, "begun")
    began = time.perf_counter()
    kernel.interrupt()
    assert kernel.answer(cell).ended_with == "CancelledError"  # the name that ipykernel has for it
    assert time.perf_counter() - began < QUICK
    assert kernel.run("kept").value == "1"


CHILD = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).pid"


def test_delete_ends_the_kernel_and_its_children(server: Server, kernel: Kernel) -> None:
    child = psutil.Process(int(kernel.run(CHILD).value or 0))
    kernel.delete()
    assert traces.eventually(lambda: traces.is_gone(child) and traces.is_gone(kernel.process))
    assert traces.kernels_of(server.runtime) == []


def test_restart_ends_the_children_and_the_state(kernel: Kernel) -> None:
    child = psutil.Process(int(kernel.run(CHILD).value or 0))
    kernel.restart()
    kernel.reconnect()
    assert kernel.run("'subprocess' in globals()").value == "False"
    assert traces.eventually(lambda: traces.is_gone(child) and traces.is_gone(kernel.process))


@pytest.mark.usefixtures("leaves_nothing")
def test_delete_of_an_idle_kernel_is_quick(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    times = []
    for _ in range(ROUNDS):
        with server.kernel() as kernel:
            kernel.run("1")
            times.append(seconds(kernel.delete))
    assert measured("delete", times, record_property) < QUICK


def test_delete_of_a_busy_kernel_is_not_waited_for_long(server: Server, kernel: Kernel) -> None:
    cell = kernel.begin("import time; print('begun', flush=True); time.sleep(60)")
    kernel.until_printed(cell, "begun")
    assert seconds(kernel.delete) < 3 * QUICK
    assert traces.eventually(lambda: traces.is_gone(kernel.process))


def test_restart_of_an_idle_kernel_is_quick(
    kernel: Kernel, record_property: Callable[[str, object], None]
) -> None:
    answered, usable = [], []
    kernel.run("1")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        kernel.restart()
        answered.append(time.perf_counter() - began)
        kernel.reconnect()
        kernel.run("1")
        usable.append(time.perf_counter() - began)
    measured("restart, up to the first cell's end", usable, record_property)
    assert measured("restart", answered, record_property) < QUICK


@pytest.mark.usefixtures("leaves_nothing")
def test_a_server_that_is_asked_to_end_leaves_nothing(tmp_path: Path, own_runtime: Path) -> None:
    with jupyter_server(tmp_path, own_runtime) as server, closing(Kernel(server, "hermes")) as kernel:
        child = psutil.Process(int(kernel.run(CHILD).value or 0))
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(STOP_WAIT)
        assert traces.eventually(lambda: traces.is_gone(kernel.process) and traces.is_gone(child))
        assert traces_of(own_runtime) == []
        assert traces.kernels_of(own_runtime) == []


@pytest.mark.parametrize(
    "cell",
    ["", "import time; print('begun', flush=True); time.sleep(60)"],
    ids=["idle", "busy"],
)
def test_a_kernel_ends_with_a_server_that_is_killed(cell: str, tmp_path: Path, own_runtime: Path) -> None:
    with jupyter_server(tmp_path, own_runtime) as server, closing(Kernel(server, "hermes")) as kernel:
        child = psutil.Process(int(kernel.run(CHILD).value or 0))
        if cell:
            kernel.until_printed(kernel.begin(cell), "begun")
        server.process.kill()
        server.process.wait()
        assert traces.eventually(
            lambda: traces.is_gone(kernel.process) and traces.is_gone(child), within=POLLER_WAIT
        )
