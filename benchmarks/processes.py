"""Starts, ends and memory of kernel processes, beside a bare pipe runner and a stock kernel."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from jupyter_client.manager import start_new_kernel

from hermes_kernel import BlockingRegistry, Limits

from .bare import Bare, first_results

Contender = Callable[[], float]
HERE = Path(__file__).parent
AT_ONCE = 16
DEAF = """
import signal, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"],
    stdout=subprocess.PIPE,
)
child.stdout.readline()
"""  # noqa: E501
DEAF_TIMEOUT = 0.3
SETTLED = 1.0  # seconds until what waits has done what it does with its time
ENDS = ("close", "exit", "_exit", "kill", "timeout", "reset")


@contextmanager
def first_result(*, spares: int) -> Iterator[Contender]:
    """The first result of an owner of a registry that has had others."""
    limits = Limits(spare_kernels=spares, max_kernels=AT_ONCE + 2)
    with BlockingRegistry(limits=limits) as registry:
        registry.execute("1 + 1", owner="before")
        number = 0

        def run() -> float:
            nonlocal number
            number += 1
            if spares:
                _wait_for_spare(registry)
            began = time.perf_counter()
            registry.execute("1 + 1", owner=f"{number}")
            took = time.perf_counter() - began
            registry.close_owner(f"{number}")
            return took

        yield run


def bare_first_result() -> float:
    began = time.perf_counter()
    runner = Bare()
    runner.run("1 + 1")
    took = time.perf_counter() - began
    runner.close()
    return took


def stock_first_result() -> float:
    began = time.perf_counter()
    manager, client = start_new_kernel(kernel_name="python3")
    client.execute_interactive("1 + 1", output_hook=lambda _: None, allow_stdin=False)
    took = time.perf_counter() - began
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    return took


def forked(stack: ExitStack) -> dict[str, Contender]:
    """A first result from a forked kernel."""
    ours = stack.enter_context(first_result(spares=0))
    return {"ours": ours, "bare": bare_first_result, "stock": stock_first_result}


def spare(stack: ExitStack) -> dict[str, Contender]:
    """A first result from a kernel that was ready."""
    return {"ours": stack.enter_context(first_result(spares=1)), "bare": bare_first_result}


def new_registry(_: ExitStack) -> dict[str, Contender]:
    """The first result in a new process: what is forked of is made for it, or a kernel is spawned."""

    def contender(start_method: str) -> Contender:
        command = [sys.executable, str(HERE / "fresh.py"), start_method]

        def run() -> float:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parent)
            return float(done.stdout)

        return run

    return {"ours": contender("auto"), "our spawn": contender("spawn")}


def at_once(stack: ExitStack) -> dict[str, Contender]:
    """Sixteen owners at once, until each has its first result."""
    limits = Limits(spare_kernels=0, max_kernels=AT_ONCE + 1)
    registry = stack.enter_context(BlockingRegistry(limits=limits))
    registry.execute("1 + 1", owner="before")
    pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
    number = 0

    def ours() -> float:
        nonlocal number
        number += 1
        owners = [f"{number}-{each}" for each in range(AT_ONCE)]
        began = time.perf_counter()
        list(pool.map(lambda owner: registry.execute("1 + 1", owner=owner), owners))
        took = time.perf_counter() - began
        for owner in owners:
            registry.close_owner(owner)
        return took

    def bare() -> float:
        began = time.perf_counter()
        runners = first_results(AT_ONCE)
        took = time.perf_counter() - began
        for runner in runners:
            runner.close()
        return took

    return {"ours": ours, "bare": bare}


def deaf_child(stack: ExitStack) -> dict[str, Contender]:
    """From the deadline of a cell to its result; a child of the cell ignores SIGTERM."""
    registry = stack.enter_context(BlockingRegistry())

    def ours() -> float:
        registry.execute(DEAF, owner="benchmark")
        began = time.perf_counter()
        registry.execute("import time; time.sleep(60)", owner="benchmark", timeout=DEAF_TIMEOUT)
        return time.perf_counter() - began - DEAF_TIMEOUT

    return {"ours": ours}


def memory() -> dict[str, float]:
    """MiB (PSS) of sixteen kernels, idle after a first cell: with all that belongs to them, and stock."""
    limits = Limits(spare_kernels=0, max_kernels=AT_ONCE)
    with BlockingRegistry(limits=limits) as registry:
        for number in range(AT_ONCE):
            registry.execute("1 + 1", owner=f"{number}")
        time.sleep(SETTLED)
        ours = _pss_of_children()
    one, with_spare = (_memory_of_one(spares=spares) for spares in (0, 1))
    kernels = [start_new_kernel(kernel_name="python3") for _ in range(AT_ONCE)]
    for _, client in kernels:
        client.execute_interactive("1 + 1", output_hook=lambda _: None, allow_stdin=False)
    stock = _pss_of_children()
    for manager, client in kernels:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return {"ours": ours, "a spare": with_spare - one, "stock": stock, "ratio": ours / stock}


def _memory_of_one(*, spares: int) -> float:
    with BlockingRegistry(limits=Limits(spare_kernels=spares, max_kernels=1)) as registry:
        registry.execute("1 + 1", owner="0")
        if spares:
            _wait_for_spare(registry)
        time.sleep(SETTLED)
        return _pss_of_children()


def cycles(number: int) -> dict[str, float]:
    """Start and end kernels in mixed ways; return what is left, which must be nothing."""
    dice = random.Random(7)
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    before = psutil.Process().num_fds(), threading.active_count()
    began = time.perf_counter()
    for _ in range(number):
        start_method = dice.choice(("fork", "spawn", "auto"))
        limits = Limits(start_method=start_method, spare_kernels=dice.choice((0, 1)))
        with BlockingRegistry(limits=limits) as registry:
            registry.execute(ESCAPE, owner="a")
            END_CODE[dice.choice(ENDS)](registry)
    took = time.perf_counter() - began
    return {
        "cycles": number,
        "seconds": took,
        "processes": len(_marked(str(runtime))),
        "directories": len(list((runtime / "hermes-kernel").iterdir())),
        "fds more": psutil.Process().num_fds() - before[0],
        "threads more": threading.active_count() - before[1],
    }


ESCAPE = """
import os, subprocess
children = [subprocess.Popen(["sleep", "300"], start_new_session=bool(n % 2)) for n in range(3)]
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execvp("sleep", ["sleep", "300"])
"""
END_CODE: dict[str, Callable[[BlockingRegistry], object]] = {
    "close": lambda registry: registry.close_owner("a"),
    "exit": lambda registry: registry.execute("import sys; sys.exit(3)", owner="a"),
    "_exit": lambda registry: registry.execute("import os; os._exit(5)", owner="a"),
    "kill": lambda registry: os.kill(registry.kernels()[0].pid or 0, signal.SIGKILL),
    "timeout": lambda registry: registry.execute("import time; time.sleep(60)", owner="a", timeout=0.1),
    "reset": lambda registry: registry.execute("1", owner="a", reset=True),
}


def _wait_for_spare(registry: BlockingRegistry) -> None:
    deadline = time.monotonic() + 10
    while not registry.stats()["spares"]:
        assert time.monotonic() < deadline, "no spare"
        time.sleep(0.01)
    time.sleep(0.1)  # it has been forked, and makes itself ready


def _pss_of_children() -> float:
    total = 0
    for process in psutil.Process().children(recursive=True):
        total += process.memory_full_info().pss
    return total / 2**20


def _marked(runtime: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("IPYTHONDIR", "").startswith(runtime):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
