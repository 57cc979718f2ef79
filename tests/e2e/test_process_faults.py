"""Processes that end, stop, stay or cannot be made, in every place where there is one."""

import ast
import asyncio
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellStatus,
    HermesKernelError,
    KernelRegistry,
    KernelStartError,
    Limits,
    Loss,
)
from hermes_kernel.process.zygote import Zygote

from .. import traces
from ..conftest import DEGRADED
from ..containment.matrix import HERE as CONTAINMENT
from .escapes import KINDS
from .hosts import (
    FORK,
    NAMESPACE,
    NAMESPACES,
    SPARE,
    SPAWN,
    Family,
    Host,
    Way,
    all_gone,
    family,
    files_of,
    host,
    in_its_own_world,
    new_runtime,
    processes_of,
    spares,
)
from .test_cells_basics import still_answers
from .test_cells_queue import HeldCell
from .test_registry import callers, hold

Make = Callable[..., BlockingRegistry]

NEEDS_NAMESPACES = pytest.mark.skipif(
    not NAMESPACES, reason="this machine has no user namespaces for this user"
)
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
BOTH = pytest.mark.parametrize("way", [FORK, SPAWN], ids=["fork", "spawn"])
WITH_SPARE = pytest.mark.parametrize("way", [SPARE, SPAWN], ids=["spare", "spawn"])
IN_A_NAMESPACE = pytest.param(NAMESPACE, marks=NEEDS_NAMESPACES)
EVERY_WAY = pytest.mark.parametrize(
    "way", [SPARE, SPAWN, IN_A_NAMESPACE], ids=["spare", "spawn", "namespace"]
)
ISOLATED = pytest.mark.parametrize(
    "way", [NAMESPACE, {**NAMESPACE, "start_method": "spawn"}], ids=["fork", "spawn"]
)
SECRET = "sk-hold0123456789abcdefghij"
BOUND = 2.0  # seconds until nothing may be left
TRIES = int(os.environ.get("HERMES_TEST_SOAK") or 10)  # moments at which a host is killed
OTHER_UID = 54_322
SLEEP = "import time; time.sleep(60)"
HERE = Path(__file__).parent
HELD = HERE / "held"
LINGER = str(HERE / "linger.py")
ESCAPES = str(HERE / "escapes.py")


def kernel_of(registry: BlockingRegistry, owner: str = "a") -> int:
    """The pid of an owner's kernel, as its registry has it."""
    (pid,) = (info.pid for info in registry.kernels() if info.owner.session == owner)
    assert pid is not None
    return pid


def made(make_registry: Make, way: Way, **limits: Any) -> BlockingRegistry:
    """A registry in which owner a will get its kernel in the way that is wanted: a spare, if that is it."""
    registry = make_registry(limits=Limits(**way, **limits))
    if way["spare_kernels"]:
        wait_for_spare(registry)
    return registry


def wait_for_spare(registry: BlockingRegistry, owner: str = "z") -> int:
    """Wait until there is a kernel that nobody has beside that of an owner, and return its pid."""
    registry.execute("1", owner=owner)
    zygote = family(kernel_of(registry, owner)).zygote
    kernels = [info.pid for info in registry.kernels() if info.pid is not None]
    # Another process waits for its terms beside it, and is the younger one.
    assert traces.eventually(lambda: registry.stats()["spares"], within=20)
    return spares(zygote, kernels)[0]


def ready(one: Host, way: Way, code: str = "x = 1", **arguments: Any) -> None:
    """Give owner a its kernel, in the way that is wanted: a spare, if that is it."""
    if way["spare_kernels"]:
        assert one.cell("1", owner="z")["status"] == "ok"
        one.wait_for_spare()
    assert one.cell(code, **arguments)["status"] == "ok"
    if way["spare_kernels"]:
        one.wait_for_spare()


def grow(
    registry: BlockingRegistry, directory: Path, owner: str = "a"
) -> tuple[Family, list[psutil.Process]]:
    """Have a cell start all that ``escapes.py`` has; return who stands above the kernel, and the tree."""
    directory.mkdir(exist_ok=True)
    code = f"import runpy; kept = runpy.run_path({ESCAPES!r}, {{'DIRECTORY': {str(directory)!r}}})"
    result = registry.execute(code, owner=owner, timeout=20)
    assert result.status is CellStatus.OK, result.text
    assert traces.eventually(lambda: set(os.listdir(directory)) == set(KINDS), within=20), os.listdir(
        directory
    )
    line = family(kernel_of(registry, owner))
    tree: list[psutil.Process] = line.warden.children(recursive=True)
    assert len(tree) > len(KINDS)
    assert not any(map(traces.is_gone, tree))
    return line, tree


def marked(process: psutil.Process) -> bool:
    return traces.COOKIE in process.environ()


# -- the host ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "warm"),
    [(FORK, False), (SPARE, True), (SPAWN, True)],
    ids=["first by fork", "second from a spare", "second by spawn"],
)
def test_a_host_that_is_killed_while_a_kernel_starts_leaves_nothing_but_files_for_the_next_one(
    leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, way: Way, warm: bool
) -> None:
    """At some moments of a first start, and of one that finds everything prepared."""
    longest = 0.05 if way is SPARE else 0.6
    moments = [longest * (n + random.random()) / TRIES for n in range(TRIES)]

    def kill_after(seconds: float, runtime: Path) -> list[psutil.Process]:
        with host(way, runtime=runtime) as one:
            if warm:
                ready(one, way)
            one.tell("begin", code="1", owner="b")
            time.sleep(seconds)  # the moment is what is tried, not waited for
            one.kill()
            one.wait()
            traces.eventually(lambda: not processes_of(runtime), within=3)
            return processes_of(runtime)

    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        runtimes = [stack.enter_context(new_runtime()) for _ in moments]
        left = dict(zip(moments, pool.map(kill_after, moments, runtimes), strict=True))
        assert {moment: processes for moment, processes in left.items() if processes} == {}
        for runtime in runtimes:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
            with BlockingRegistry():
                assert traces.eventually(lambda: not files_of(runtime), within=2), files_of(runtime)  # noqa: B023


@BOTH
def test_a_host_that_is_killed_before_its_first_kernel_is_there_leaves_no_file(
    leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """There is a process then that lives on for a moment: it can see to the files that it knows of."""
    with host(way) as one:
        one.tell("begin", code="1")
        assert traces.eventually(lambda: psutil.Process(one.pid).children(), within=10)
        one.kill()
        one.wait()
        assert traces.eventually(lambda: not traces.marked_processes(str(one.runtime)), within=3)
        if not one.leaves_nothing(3):  # it had made the directory, and told nobody yet
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(one.runtime))
            BlockingRegistry().close()
        assert one.leaves_nothing(3), one.leaves()


class HeldKernels:
    """Kernels that wait right after their fork until they are let go."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._reached: list[str] = []
        self.env = {"PYTHONPATH": str(HELD), "LC_HELD": str(place)}

    def __enter__(self) -> Self:
        os.mkfifo(self._place / "reached")
        self._reader = os.open(self._place / "reached", os.O_RDWR)  # so that who comes need not wait for us
        return self

    def __exit__(self, *_: object) -> None:
        self.let_all_go()
        os.close(self._reader)

    def next(self) -> int:
        """Wait until one has been forked; its pid."""
        if not self._reached:
            self._reached += os.read(self._reader, 4096).decode().split()
        return int(self._reached.pop(0))

    def arrived(self) -> list[int]:
        """Those that have been forked since this was asked last."""
        while select.select([self._reader], [], [], 0)[0]:
            self._reached += os.read(self._reader, 4096).decode().split()
        reached, self._reached = self._reached, []
        return [int(pid) for pid in reached]

    def let_go(self, pid: int) -> None:
        (self._place / str(pid)).touch()

    def let_all_go(self) -> None:
        """Let go of those that are held, and hold nobody from now on."""
        (self._place / "all").touch()


def test_a_spare_that_is_not_ready_yet_is_nobodys_kernel(leaves_nothing: None, tmp_path: Path) -> None:
    with HeldKernels(tmp_path) as held, host(SPARE, env=held.env) as one:

        def is_served(owner: str) -> bool:
            return any(info["owner"] == owner and info["state"] == "idle" for info in one.tell("kernels"))

        def is_served_with_the_others_let_go() -> bool:
            for pid in held.arrived():
                held.let_go(pid)
            return is_served("a")

        one.tell("begin", code="6 * 7", owner="a")
        assert traces.eventually(is_served_with_the_others_let_go, within=20)
        assert one.tell("join")["value"] == "42"
        # One or two that were let go may still become spares; who comes after them has to wait.
        for owner in "bcde":
            one.tell("begin", code="6 * 7", owner=owner)
            if not traces.eventually(partial(is_served, owner), within=1):
                break
        assert [info["state"] for info in one.tell("kernels") if info["owner"] == owner] == ["starting"]
        held.let_all_go()
        assert one.tell("join").get("value") == "42"


def test_a_host_that_dies_before_its_kernel_can_hear_of_it_has_no_kernel(
    leaves_nothing: None, tmp_path: Path
) -> None:
    """All above the kernel are killed right after the fork: nobody but the kernel itself can notice."""
    with HeldKernels(tmp_path) as held, host(FORK, env=held.env) as one:
        one.tell("begin", code="1")
        kernel = held.next()
        # What it is to be may have been said already: then it would begin.
        traces.eventually(lambda: [*one.runtime.glob("hermes-kernel/*/session.json")], within=1)
        line = family(kernel, one.pid)
        line.zygote.suspend()
        for process in (line.warden, line.zygote, psutil.Process(one.pid)):
            process.kill()
        one.wait()
        assert all_gone([line.zygote, line.warden], within=BOUND)
        assert not traces.is_gone(line.kernel)
        held.let_all_go()
        assert all_gone([line.kernel], within=BOUND)
        # Whoever would remove its files is gone; see test_staging_faults.
        shutil.rmtree(one.runtime / "hermes-kernel", ignore_errors=True)  # or is at it just now


@pytest.mark.parametrize("how", ["os._exit", "exception", "sys.exit"])
def test_a_host_that_ends_without_closing_anything_leaves_nothing(leaves_nothing: None, how: str) -> None:
    with host(SPARE) as one:
        ready(one, SPARE)
        one.say("leave", how=how)
        assert one.wait() == (1 if how == "exception" else 3)
        assert one.leaves_nothing(BOUND), one.leaves()
        assert ("nobody catches it" in one.stderr) == (how == "exception")


@WITH_SPARE
def test_a_host_that_is_killed_takes_its_busy_kernel_and_its_idle_one_with_all_their_children(
    leaves_nothing: None, tmp_path: Path, way: Way
) -> None:
    idle = "import subprocess; child = subprocess.Popen(['sleep', '600']); child.pid"
    busy = """
import os, time
for number in range(50):
    if os.fork() == 0:
        if number % 2:
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(60)
        os._exit(0)
"""
    with host(way) as one:
        ready(one, way, idle)
        held = HeldCell(tmp_path, then=SLEEP)
        one.tell("begin", code=busy + held.code, owner="b")
        held.wait_until_it_runs()
        families = [one.family(owner) for owner in "ab"]
        trees = [process for family in families for process in family.warden.children(recursive=True)]
        assert len(trees) >= 53
        one.kill()
        assert all_gone(trees, within=BOUND)
        assert one.leaves_nothing(BOUND), one.leaves()


def test_a_host_that_stands_still_for_a_while_keeps_its_kernel_and_the_cell_that_runs(
    leaves_nothing: None, tmp_path: Path
) -> None:
    with host(SPARE) as one:
        ready(one, SPARE, "x = 41")
        pid = one.kernel()
        held = HeldCell(tmp_path, then="x += 1; x")
        one.tell("begin", code=held.code, timeout=20)
        held.wait_until_it_runs()
        one.kill(signal.SIGSTOP)
        try:
            held.let_go()  # it ends while nobody listens
            time.sleep(2)  # this long is what is tried
        finally:
            one.kill(signal.SIGCONT)
        answer = one.tell("join")
        assert (answer["status"], answer["value"]) == ("ok", "42")
        assert one.cell("x")["value"] == "42"
        assert one.kernel() == pid


def test_a_ctrl_c_for_the_hosts_terminal_does_not_reach_its_kernels(
    leaves_nothing: None, tmp_path: Path
) -> None:
    with host(SPARE) as one:
        ready(one, SPARE)
        one.tell("handle_interrupts")
        held = HeldCell(tmp_path, then="'not interrupted'")
        one.tell("begin", code=held.code)
        held.wait_until_it_runs()
        os.killpg(one.pid, signal.SIGINT)
        held.let_go()
        assert one.tell("join")["value"] == "'not interrupted'"
        assert one.cell("x")["value"] == "1"


def test_a_ctrl_c_for_the_hosts_terminal_does_not_reach_what_is_just_being_started(
    leaves_nothing: None,
) -> None:
    with host(FORK) as one:
        one.tell("handle_interrupts")
        one.tell("begin", code="6 * 7")
        assert traces.eventually(lambda: psutil.Process(one.pid).children(), within=10)
        started = psutil.Process(one.pid).children()

        def interrupt_until_it_is_up() -> bool:
            os.killpg(one.pid, signal.SIGINT)
            return any(info["state"] != "starting" for info in one.tell("kernels"))

        assert traces.eventually(interrupt_until_it_is_up, within=10)
        assert one.tell("join")["value"] == "42"
        # A signal between the fork and the new session reaches the zygote too: then there is another one.
        assert len(psutil.Process(one.pid).children()) == len(started) == 1


@pytest.mark.parametrize(
    ("way", "signum"),
    [(SPARE, signal.SIGINT), (SPARE, signal.SIGTERM), (SPAWN, signal.SIGHUP)],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
def test_a_host_whose_group_is_told_to_end_leaves_nothing(
    leaves_nothing: None, way: Way, signum: signal.Signals
) -> None:
    with host(way) as one:
        ready(one, way)
        os.killpg(one.pid, signum)
        assert one.wait(5) == -signum
        assert one.leaves_nothing(5), one.leaves()


@WITH_SPARE
def test_a_forked_worker_that_outlives_a_killed_host_does_not_keep_its_kernels(
    leaves_nothing: None, way: Way
) -> None:
    """It has every descriptor of the host: no connection is closed by the death."""
    with host(way) as one:
        ready(one, way)
        worker = psutil.Process(one.tell("fork_worker"))
        tree = one.family().zygote
        members = [tree, *tree.children(recursive=True)]
        one.kill()
        assert all_gone(members, within=BOUND)
        assert not traces.is_gone(worker)
        worker.kill()
        assert one.leaves_nothing(BOUND), one.leaves()


# -- what stands between host and kernel ends -------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "signum"),
    [
        (SPARE, signal.SIGKILL),
        (SPAWN, signal.SIGKILL),
        pytest.param(NAMESPACE, signal.SIGKILL, marks=NEEDS_NAMESPACES),
        (SPARE, signal.SIGTERM),
    ],
    ids=["spare", "spawn", "namespace", "told to end"],
)
def test_a_warden_that_ends_takes_the_whole_tree_and_the_call_is_told(
    make_registry: Make, tmp_path: Path, way: Way, signum: signal.Signals
) -> None:
    registry = made(make_registry, way)
    line, tree = grow(registry, tmp_path / "escapes")
    with callers(registry, 1) as pool:
        _, running = hold(pool, registry, "a", tmp_path / "held")
        line.warden.send_signal(signum)
        began = time.monotonic()
        result = running.result(10)
        assert time.monotonic() - began < BOUND
    assert (result.status, result.signal, result.kernel.ended) == (CellStatus.DIED, "SIGKILL", True)
    assert all_gone(tree, within=BOUND)
    assert still_answers(registry).kernel.lost is Loss.DIED


@EVERY_WAY
def test_a_stopped_warden_does_not_hold_up_the_end_of_a_kernel(
    make_registry: Make, tmp_path: Path, way: Way
) -> None:
    registry = made(make_registry, way)
    line, tree = grow(registry, tmp_path / "escapes")
    line.warden.suspend()
    began = time.monotonic()
    assert registry.close_owner("a") == 1
    assert time.monotonic() - began < BOUND
    assert all_gone(tree, within=BOUND)
    assert still_answers(registry).kernel.lost is Loss.CLOSED


@EVERY_WAY
def test_kernels_live_on_without_their_zygote_and_the_next_owner_gets_one(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way)
    registry.execute("x = 1", owner="a")
    line = family(kernel_of(registry))
    line.zygote.kill()
    assert all_gone([line.zygote], within=BOUND)
    assert registry.execute("x", owner="a").value == "1"
    began = time.monotonic()
    assert registry.execute("6 * 7", owner="b").value == "42"
    assert time.monotonic() - began < 5
    assert line.zygote not in psutil.Process(kernel_of(registry, "b")).parents()
    assert registry.execute("x", owner="a").value == "1"
    assert registry.close_owner("a") == 1
    assert all_gone([line.warden, line.first, line.kernel], within=BOUND)


@EVERY_WAY
def test_without_zygote_and_warden_all_that_carries_the_mark_of_the_kernel_is_ended(
    make_registry: Make, tmp_path: Path, way: Way
) -> None:
    registry = made(make_registry, way)
    line, tree = grow(registry, tmp_path / "escapes")
    # Who has thrown away its environment is known by its parents alone, and they are killed.
    unmarked = [] if "isolation" in way else [process for process in tree if not marked(process)]
    assert len(unmarked) == (0 if "isolation" in way else 1)
    line.zygote.suspend()
    line.warden.kill()
    line.zygote.kill()
    try:
        assert all_gone([process for process in tree if process not in unmarked], within=BOUND)
        assert not any(map(traces.is_gone, unmarked))
        assert still_answers(registry).kernel.lost is Loss.DIED
    finally:
        for process in unmarked:
            process.kill()


@BOTH
def test_a_zygote_that_is_killed_while_it_makes_the_first_kernel_costs_no_call(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way)
    with callers(registry, 1) as pool:
        call = pool.submit(registry.execute, "6 * 7", owner="a")
        assert traces.eventually(lambda: psutil.Process().children(), within=10)
        for zygote in psutil.Process().children():
            zygote.kill()
        assert call.result(20).value == "42"


@WITH_SPARE
def test_a_zygote_that_a_cell_has_stopped_costs_no_call(make_registry: Make, way: Way) -> None:
    registry = made(make_registry, way, start_timeout=10)
    registry.execute("x = 1", owner="a")
    zygote = family(kernel_of(registry)).zygote
    if way["spare_kernels"]:  # what is given up then must not count for the zygote
        wait_for_spare(registry)
        kernels = [info.pid for info in registry.kernels() if info.pid is not None]
        psutil.Process(spares(zygote, kernels)[0]).kill()
        assert traces.eventually(lambda: not registry.stats()["spares"])
    zygote.suspend()
    for owner in "bc":
        began = time.monotonic()
        assert registry.execute("6 * 7", owner=owner).value == "42"
        assert time.monotonic() - began < 5
        zygote.suspend()
    assert registry.execute("x", owner="a").value == "1"


def test_a_zygote_that_stands_still_is_a_start_error_in_time_harms_no_kernel_and_is_not_used_again(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Zygote, "_wake", lambda _: None)  # as if it were stopped again and again
    registry = made(make_registry, FORK, start_timeout=2)
    registry.execute("x = 1", owner="a")
    zygote = family(kernel_of(registry)).zygote
    zygote.suspend()
    try:
        began = time.monotonic()
        with pytest.raises(KernelStartError, match="not started within"):
            registry.execute("1", owner="b")
        assert time.monotonic() - began < 3
        assert registry.execute("6 * 7", owner="b").value == "42"
        assert zygote not in psutil.Process(kernel_of(registry, "b")).parents()
        assert registry.execute("x", owner="a").value == "1"
    finally:
        zygote.resume()
    assert registry.execute("x", owner="a").value == "1"
    assert registry.close_owner("a") == 1  # and what was asked for and given up is nobody's to keep
    assert all_gone([zygote], within=BOUND)


# -- the kernel ends --------------------------------------------------------------------------------------

DEATHS = {
    "os._exit(7)": ("died", 7, None),
    "os.kill(os.getpid(), signal.SIGKILL); signal.pause()": ("died", -9, "SIGKILL"),
    "os.kill(os.getpid(), signal.SIGTERM); signal.pause()": ("died", -15, "SIGTERM"),
    "os.kill(0, signal.SIGKILL); signal.pause()": ("died", -9, "SIGKILL"),
    "ctypes.string_at(0)": ("died", -11, "SIGSEGV"),
    "os.abort()": ("died", -6, "SIGABRT"),
    "sys.exit(3)": ("exited", 3, None),
    "sys.exit('a message')": ("exited", 1, None),
}


@EVERY_WAY
def test_the_end_of_a_kernel_is_told_as_it_was(make_registry: Make, way: Way) -> None:
    registry = made(make_registry, way)
    for code, expected in DEATHS.items():
        imports = "import ctypes, os, signal, sys"
        # A group that is not the kernel's own would be its host's.
        group = registry.execute(f"{imports}\nos.getpgrp() == os.getpid()", owner="a")
        assert group.value == "True"
        began = time.monotonic()
        result = registry.execute(f"print('before')\n{code}", owner="a", timeout=20)
        assert time.monotonic() - began < BOUND, code
        assert (result.status.value, result.exit_code, result.signal) == expected, code
        assert result.stdout == "before\n", code
        still_answers(registry)
    began = time.monotonic()
    stop = "import os, signal; print('stops', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    stopped = registry.execute(stop, owner="a", timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert stopped.status is CellStatus.TIMED_OUT
    assert still_answers(registry).kernel.lost is Loss.TIMED_OUT


@EVERY_WAY
def test_a_death_is_seen_at_once_whatever_a_child_in_a_session_of_its_own_keeps_open(
    make_registry: Make, tmp_path: Path, way: Way
) -> None:
    registry = made(make_registry, way)
    registry.execute("import os, subprocess, sys, time", owner="a")
    line = family(kernel_of(registry))
    code = f"""
for number in map(int, os.listdir("/proc/self/fd")):
    try: os.set_inheritable(number, True)
    except OSError: pass  # that of the listing
command = [sys.executable, {LINGER!r}, {str(tmp_path)!r}, "up"]
subprocess.Popen(command, start_new_session=True, close_fds=False)
while not os.path.exists({str(tmp_path / "up")!r}): time.sleep(0.01)
open({str(tmp_path / "died")!r}, "w").write(str(time.monotonic()))
os._exit(3)"""
    result = registry.execute(code, owner="a", timeout=30)
    assert time.monotonic() - float((tmp_path / "died").read_text()) < 1
    assert (result.status, result.exit_code) == (CellStatus.DIED, 3)
    assert traces.eventually(lambda: not processes_of(tmp_path), within=BOUND)
    assert all_gone([line.warden, line.kernel], within=BOUND)
    still_answers(registry)


@EVERY_WAY
def test_a_cell_that_closes_descriptors_ends_its_output_or_its_kernel_and_no_more(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way)
    for code in ("import sys; sys.stdout.close()", "import os; [os.close(f) for f in (0, 1, 2)]"):
        result = registry.execute(code, owner="a", timeout=10)
        assert result.status in (CellStatus.OK, CellStatus.ERROR), code
        still_answers(registry)
        assert registry.execute("import os; print(os.system('echo child') >= 0)", owner="a").ran
        still_answers(registry)
    began = time.monotonic()
    result = registry.execute("import os; os.closerange(3, 200)", owner="a", timeout=20)
    assert time.monotonic() - began < BOUND
    assert (result.status, result.kernel.ended) == (CellStatus.DIED, True)
    assert still_answers(registry).kernel.lost is Loss.DIED


def test_an_interrupt_without_a_cell_harms_nobody(make_registry: Make) -> None:
    registry = made(make_registry, FORK)
    registry.execute("x = 1", owner="a")
    line = family(kernel_of(registry))
    for _ in range(3):
        line.kernel.send_signal(signal.SIGINT)
        assert registry.execute("x", owner="a", timeout=10).value == "1"
    line.warden.send_signal(signal.SIGINT)
    line.zygote.send_signal(signal.SIGINT)
    line.warden.send_signal(signal.SIGHUP)
    line.zygote.send_signal(signal.SIGHUP)
    assert registry.execute("x", owner="a").value == "1"
    assert registry.execute("6 * 7", owner="b").value == "42"
    assert not any(map(traces.is_gone, (line.zygote, line.warden, line.kernel)))


# -- what a cell has started ------------------------------------------------------------------------------


def run_out_of_time(registry: BlockingRegistry) -> None:
    assert registry.execute(SLEEP, owner="a", timeout=0.2).status is CellStatus.TIMED_OUT


def interrupt(registry: BlockingRegistry) -> None:
    result = registry.execute(SLEEP, owner="a", interrupted=lambda: True)
    assert result.status is CellStatus.INTERRUPTED
    if not result.ran:
        registry.execute(SLEEP, owner="a", timeout=0.1)


def end_by(code: str, status: CellStatus) -> Callable[[BlockingRegistry], None]:
    def end(registry: BlockingRegistry) -> None:
        assert registry.execute(code, owner="a", timeout=20).status is status

    return end


ENDS: dict[str, Callable[[BlockingRegistry], object]] = {
    "its time is over": run_out_of_time,
    "its caller has had enough": interrupt,
    "it exits": end_by("import sys; sys.exit(3)", CellStatus.EXITED),
    "it dies": end_by("import os; os._exit(3)", CellStatus.DIED),
    "it is killed": end_by("import os, signal; os.kill(os.getpid(), 9); signal.pause()", CellStatus.DIED),
    "it is reset": lambda registry: registry.execute("1", owner="a", reset=True),
    "its owner is closed": lambda registry: registry.close_owner("a"),
    "another owner takes its place": lambda registry: registry.execute("1", owner="b"),
    "all is closed": lambda registry: registry.close(),
}


@pytest.mark.parametrize(
    ("end", "way"),
    [(end, SPARE) for end in ENDS]
    + [(end, SPAWN) for end in ("its time is over", "it dies", "all is closed")],
    ids=[*ENDS, "its time is over (spawn)", "it dies (spawn)", "all is closed (spawn)"],
)
def test_whatever_a_cell_has_started_is_gone_when(
    make_registry: Make, tmp_path: Path, end: str, way: Way
) -> None:
    registry = make_registry(limits=Limits(**way, max_kernels=1))
    line, tree = grow(registry, tmp_path)
    ENDS[end](registry)
    assert all_gone([*tree, line.warden], within=BOUND), [
        process for process in tree if not traces.is_gone(process)
    ]
    assert processes_of(tmp_path) == []


def test_whatever_a_cell_has_started_is_gone_when_it_was_idle_for_too_long(
    make_registry: Make, tmp_path: Path
) -> None:
    registry = made(make_registry, SPARE, idle_timeout=1.5)
    line, tree = grow(registry, tmp_path)
    assert all_gone([*tree, line.warden], within=1.5 + 1 + BOUND)
    assert processes_of(tmp_path) == []
    # With idleness goes all that was kept ready, too.
    assert all_gone([line.zygote], within=1.5 + 1 + BOUND)
    assert still_answers(registry).kernel.lost is Loss.IDLE


def test_eight_threads_may_end_a_tree_at_once_each_in_its_way(make_registry: Make, tmp_path: Path) -> None:
    registry = make_registry(limits=Limits(**SPARE))
    registry.execute("1", owner="z")
    line, tree = grow(registry, tmp_path)
    ways: list[Callable[[], object]] = [
        lambda: registry.close_owner("a"),
        lambda: registry.close_where(lambda info: info.owner.session == "a"),
        lambda: registry.execute("1", owner="a", reset=True),
        line.warden.terminate,
        line.kernel.kill,
        lambda: registry.close_owner("a"),
        lambda: registry.execute("import os; os._exit(1)", owner="a"),
        registry.close,
    ]
    start = threading.Barrier(len(ways))

    def at_once(way: Callable[[], object]) -> str:
        start.wait()
        try:
            way()
        except (HermesKernelError, psutil.NoSuchProcess) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ways)) as pool:
        outcomes = list(pool.map(at_once, ways))
    assert all("closed" in text or "no longer exists" in text for text in outcomes if text), outcomes
    assert all_gone([*tree, line.warden, line.zygote], within=BOUND)


def test_a_reset_ends_a_daemon_and_an_orphan_whose_pids_a_cell_has_told(make_registry: Make) -> None:
    registry = made(make_registry, SPARE)
    code = """
import os, subprocess
pids = [subprocess.Popen(['sleep', '600'], start_new_session=True).pid]
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if (orphan := os.fork()) != 0:
        os.write(writer, str(orphan).encode()); os._exit(0)
    os.execvp('sleep', ['sleep', '600'])
os.wait()
[*pids, int(os.read(reader, 20))]"""
    result = registry.execute(code, owner="a")
    assert result.value is not None, result.text
    children = [psutil.Process(pid) for pid in json.loads(result.value)]
    assert not any(map(traces.is_gone, children))
    assert registry.execute("1", owner="a", reset=True).kernel.lost is Loss.RESET
    assert all_gone(children, within=3)


@EVERY_WAY
def test_a_forked_copy_that_goes_on_is_nobodys_answer_and_ends_with_the_kernel(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way)
    registry.execute("import os", owner="a")
    result = registry.execute("pid = os.fork()\nprint('parent' if pid else 'child')", owner="a", timeout=10)
    assert result.status is CellStatus.OK
    assert "parent" in result.stdout
    line = family(kernel_of(registry))
    tree = line.warden.children(recursive=True)
    for number in range(5):
        assert (
            registry.execute(f"{number}, os.getpid() > 0", owner="a", timeout=5).value == f"({number}, True)"
        )
    assert len({registry.execute("os.getpid()", owner="a").value for _ in range(5)}) == 1
    registry.close_owner("a")
    assert all_gone(tree, within=BOUND)


@EVERY_WAY
def test_orphans_that_end_are_taken_in_while_their_kernel_lives(make_registry: Make, way: Way) -> None:
    registry = made(make_registry, way)
    code = """
import os
for _ in range(100):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()"""
    assert registry.execute(code, owner="a", timeout=20).status is CellStatus.OK
    line = family(kernel_of(registry))

    def zombies() -> list[psutil.Process]:
        children = line.warden.children(recursive=True)
        return [process for process in children if process.status() == psutil.STATUS_ZOMBIE]

    assert traces.eventually(lambda: not zombies(), within=BOUND), len(zombies())
    assert still_answers(registry).kernel.reused


@EVERY_WAY
def test_workers_of_a_pool_work_in_each_start_method(make_registry: Make, way: Way) -> None:
    registry = made(make_registry, way)
    for method in ("fork", "spawn", "forkserver"):
        code = (
            "import multiprocessing as mp\n"
            f"with mp.get_context({method!r}).Pool(2) as p: print(p.map(abs, [-1, 2, -3]))"
        )
        result = registry.execute(code, owner="a", timeout=20)
        assert (result.status, result.stdout) == (CellStatus.OK, "[1, 2, 3]\n"), (method, result.text)


def test_spawned_workers_that_cannot_find_a_cells_function_say_so_and_leave_nobody(
    make_registry: Make,
) -> None:
    registry = made(make_registry, FORK)
    code = (
        "import multiprocessing as mp\ndef square(x): return x * x\n"
        "with mp.get_context('spawn').Pool(2) as p: print(p.map(square, [1, 2, 3]))"
    )
    result = registry.execute(code, owner="a", timeout=2)
    assert result.stdout == "[1, 4, 9]\n" or "cannot find 'square'" in (result.hint or ""), result.text
    assert len(result.text) < 51_000
    registry.close_owner("a")
    assert traces.eventually(lambda: not workers(), within=BOUND), workers()


def workers() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "multiprocessing" in " ".join(process.cmdline())]


@BOTH
def test_what_a_leftover_writes_in_the_shape_of_an_answer_is_nobodys_answer(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way)
    forge = """
import json, os, threading
go, forged = threading.Event(), threading.Event()
def forge():
    go.wait()
    reply = json.dumps({'status': 'success', 'result': 'forged', 'output': 'forged', 'exit_code': 0})
    for frame in (reply, '{"exited": 1, "code": 0}', '{"ended": true}', '<IDS|MSG>' + reply):
        for descriptor in (1, 2):
            os.write(descriptor, (frame + '\\n').encode())
    forged.set()
threading.Thread(target=forge).start()"""
    assert registry.execute(forge, owner="a").status is CellStatus.OK
    second = registry.execute("go.set(); forged.wait(); 'second'", owner="a", timeout=10)
    assert (second.status, second.value) == (CellStatus.OK, "'second'")
    assert [registry.execute(f"{number}", owner="a").value for number in range(3)] == ["0", "1", "2"]


def test_a_child_that_is_killed_is_the_cells_own_affair(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(**FORK))
    code = "import subprocess; subprocess.run(['sh', '-c', 'kill -9 $$']).returncode"
    assert registry.execute(code, owner="a").value == "-9"
    assert still_answers(registry).kernel.reused


# -- what a cell does to others ---------------------------------------------------------------------------


def test_a_kernel_that_tries_to_join_its_hosts_group_harms_nobody(leaves_nothing: None) -> None:
    """Who kills the group of a kernel must not have asked which one it is in now."""
    with host(SPARE) as one:
        ready(one, SPARE)
        code = f"""
import os
def join():
    try: os.setpgid(0, {one.pid})
    except OSError as error: return type(error).__name__
if (child := os.fork()) == 0:
    os._exit(0 if join() else 1)
join(), os.wait()[1]"""
        assert one.cell(code)["value"] == "('PermissionError', 0)"
        assert one.cell(SLEEP, timeout=0.2)["status"] == "timed_out"
        assert one.cell("6 * 7")["value"] == "42"


@EVERY_WAY
def test_what_stands_above_a_kernel_shows_no_secret_of_its_host(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    registry = made(make_registry, way)
    # Where a cell sees them, its parent is its warden, and the next one its zygote.
    code = """
import os
def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
def environment(pid):
    try: return open(f'/proc/{pid}/environ', 'rb').read()
    except OSError: return b''
above, seen = [os.getpid()], 0
while len(above) < 3 and parent(above[-1]): above.append(parent(above[-1]))
SECRET.encode() in b''.join(map(environment, above)), environment(above[0]) != b''"""
    assert (
        registry.execute(code.replace("SECRET", f"('{SECRET[:9]}' + '{SECRET[9:]}')"), owner="a").value
        == "(False, True)"
    )
    line = family(kernel_of(registry))
    for process in (line.zygote, line.warden, line.first, line.kernel):
        assert SECRET not in str(process.environ())


@NEEDS_ROOT
def test_a_cell_that_kills_everybody_it_can_takes_its_host_along_and_ends_with_it(
    leaves_nothing: None,
) -> None:
    """Whoever runs the host can be killed by the cell; the first process of the namespace stays."""
    with (
        new_runtime() as runtime,
        host(FORK, before=in_its_own_world(then="sleep 10"), runtime=runtime) as one,
    ):
        assert one.cell("import os, subprocess; child = subprocess.Popen(['sleep', '60'])")["status"] == "ok"
        own = os.readlink("/proc/self/ns/pid")
        assert one.cell("os.readlink('/proc/self/ns/pid')")["value"] != repr(own), "it would be us"
        _, *tree = psutil.Process(one.pid).children(recursive=True)
        assert len(tree) >= 5
        one.say("cell", code="os.kill(-1, 9)")
        assert all_gone(tree, within=3), [process for process in tree if not traces.is_gone(process)]
        one.kill()
        one.wait()


def test_without_isolation_a_cell_reaches_its_host_as_its_user_does(leaves_nothing: None) -> None:
    """What docs/security.md says that this level does not hold is not held: nobody may rely on it."""
    with host(FORK, env={"OPENAI_API_KEY": SECRET}) as one:
        code = f"""
import os, resource
host = {one.pid}
environ = open(f'/proc/{{host}}/environ').read()
limits = [resource.prlimit(pid, resource.RLIMIT_CPU) for pid in (host, 0)]
os.kill(host, 0), ('OPENAI_' + 'API_KEY=') in environ, limits[0] == limits[1]"""
        assert one.cell(code)["value"] == "(None, True, True)"


# -- a pid namespace --------------------------------------------------------------------------------------


@NEEDS_NAMESPACES
def test_a_cell_in_a_namespace_sees_and_reaches_nobody_but_its_own(leaves_nothing: None) -> None:
    with host(NAMESPACE) as one:
        assert one.cell("1", owner="other")["status"] == "ok"
        assert one.cell("import os, psutil, resource, signal", owner="a")["status"] == "ok"
        line = one.family()
        others = [one.pid, line.zygote.pid, line.warden.pid, line.kernel.pid, one.family("other").kernel.pid]
        assert min(others) > 50, "they cannot be taken for processes of the namespace"
        seen = json.loads(str(one.cell("[int(n) for n in os.listdir('/proc') if n.isdigit()]")["value"]))
        assert 2 <= len(seen) < 10
        assert max(seen) < 50
        inner = one.cell("os.getpid()")["value"]
        status = Path(f"/proc/{line.kernel.pid}/status").read_text()
        assert f"NSpid:\t{line.kernel.pid}\t{inner}\n" in status, "the host knows the real number"
        attempts = (
            "os.kill(pid, 0)",
            "os.kill(pid, signal.SIGSTOP)",
            "resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1))",
            "os.setpriority(os.PRIO_PROCESS, pid, 10)",
            "os.pidfd_open(pid)",
            "open(f'/proc/{pid}/environ').read()",
            "open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')",
        )
        for attempt in attempts:
            code = f"""
reached = []
for pid in {others}:
    try: {attempt}
    except (ProcessLookupError, FileNotFoundError): continue
    reached.append(pid)
reached"""
            assert one.cell(code)["value"] == "[]", attempt
        assert one.cell("6 * 7", owner="other")["value"] == "42"


@NEEDS_NAMESPACES
def test_a_cell_in_a_namespace_cannot_end_the_process_that_holds_it(leaves_nothing: None) -> None:
    with host(NAMESPACE) as one:
        assert one.cell("import os, signal; x = 1")["status"] == "ok"
        for signum in ("SIGTERM", "SIGKILL", "SIGSTOP", "SIGINT", "SIGHUP"):
            code = f"parent = os.getppid(); assert parent == 1\nos.kill(parent, signal.{signum}); x"
            assert one.cell(code)["value"] == "1", signum
        assert one.cell("x")["value"] == "1"
        line = one.family()
        tree = [line.warden, line.first, line.kernel]
        assert one.tell("close_owner", owner="a") == 1
        assert all_gone(tree, within=BOUND)


@NEEDS_NAMESPACES
def test_a_cell_in_a_namespace_that_kills_everybody_it_can_kills_its_own_children_alone(
    leaves_nothing: None,
) -> None:
    with host(NAMESPACE) as one:
        assert one.cell("1", owner="other")["status"] == "ok"
        assert one.cell("import os, subprocess; child = subprocess.Popen(['sleep', '60'])")["status"] == "ok"
        line = one.family()
        everybody = [*line.zygote.children(recursive=True), line.zygote]
        # Never send it where it would reach more than the namespace.
        (info,) = (info for info in one.tell("kernels") if info["owner"] == "a")
        assert info["isolation"] == "namespace"
        own = os.readlink("/proc/self/ns/pid")
        assert os.readlink(f"/proc/{line.kernel.pid}/ns/pid") != own
        code = f"""
numbers = [int(name) for name in os.listdir('/proc') if name.isdigit()]
assert os.getpid() < 50 and len(numbers) < 10 and max(numbers) < 50
assert os.readlink('/proc/self/ns/pid') != {own!r} and os.getppid() == 1
os.kill(-1, 9)
child.wait(5)"""
        assert one.cell(code, timeout=20)["value"] == "-9"
        assert sum(map(traces.is_gone, everybody)) == 1
        assert one.cell("6 * 7", owner="other")["value"] == "42"
        assert one.cell("6 * 7")["value"] == "42"


@NEEDS_NAMESPACES
@ISOLATED
def test_a_kernel_in_a_namespace_does_all_that_one_outside_does(
    make_registry: Make, tmp_path: Path, way: Way
) -> None:
    registry = made(make_registry, way, interrupt_grace=5)

    def double(n: int) -> int:
        return 2 * n

    registry.execute("import os, subprocess, time, hermes_tools; x = 1", owner="a")
    (info,) = registry.kernels()
    assert (info.isolation, info.degraded) == ("namespace", DEGRADED)
    cut = registry.execute(SLEEP, owner="a", timeout=0.2)
    assert (cut.status, cut.kernel.ended) == (CellStatus.TIMED_OUT, False)
    assert registry.execute("x", owner="a").value == "1"
    assert registry.execute("hermes_tools.double(21)", owner="a", tools=[double]).value == "42"
    assert (
        registry.execute("subprocess.run(['sh', '-c', 'echo $(id -u)'])\n!id -u", owner="a").stdout
        == f"{os.getuid()}\n" * 2
    )
    given = tmp_path / "given"
    given.write_text("read")
    code = (
        f"given, made = {str(given)!r}, {str(tmp_path / 'made')!r}\n"
        "open(made, 'w').close(); os.getuid(), os.stat(given).st_uid, open(given).read()"
    )
    assert registry.execute(code, owner="a").value == f"({os.getuid()}, {os.getuid()}, 'read')"
    stat = (tmp_path / "made").stat()
    assert (stat.st_uid, stat.st_gid) == (os.getuid(), os.getgid())
    assert Path("/proc/self/status").exists(), "the mount is the namespace's own"
    assert registry.execute("import sys; sys.exit(4)", owner="a").exit_code == 4
    assert still_answers(registry).kernel.lost is Loss.EXITED


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_where_namespaces_are_denied_a_kernel_that_needs_one_does_not_start_and_says_why(
    leaves_nothing: None, method: str
) -> None:
    before = (sys.executable, str(CONTAINMENT / "denied.py"), "unshare")
    limits = {"start_method": method, "spare_kernels": 0, "isolation": "namespace"}
    with host({**limits, "require_isolation": True}, before=before) as one:
        for owner in "ab":
            answer = one.cell("1", owner=owner)
            assert answer["raised"] == "KernelStartError"
            first = answer["text"].splitlines()[0]
            assert "isolation 'namespace' is not available here" in first
            assert "require_isolation" in first
            assert "Operation not permitted" in first
            assert answer["seconds"] < 3
        assert one.tell("kernels") == []
        assert traces.eventually(lambda: not kernels_in(one.runtime), within=BOUND), kernels_in(one.runtime)
    with host(limits, before=before) as one:
        assert one.cell("6 * 7")["value"] == "42"
        (info,) = one.tell("kernels")
        assert info["isolation"] == "none"
        assert "isolation 'namespace' is not available here" in info["degraded"]
        assert "Operation not permitted" in info["degraded"]


@NEEDS_NAMESPACES
@pytest.mark.parametrize("required", [False, True])
def test_where_namespaces_are_denied_from_now_on_the_next_kernel_says_so_and_the_last_one_lives_on(
    leaves_nothing: None, required: bool
) -> None:
    with host({**NAMESPACE, "require_isolation": required}, before=("unshare", "-Ur")) as one:
        assert one.cell("x = 1")["status"] == "ok"
        enter = ["nsenter", "-t", str(one.pid), "-U", "--preserve-credentials"]
        deny = "echo 0 > /proc/sys/user/max_user_namespaces"
        subprocess.run([*enter, "sh", "-c", deny], check=True)
        answer = one.cell("6 * 7", owner="b")
        if required:
            assert answer["raised"] == "KernelStartError"
            assert "isolation 'namespace' is not available here" in answer["text"]
        else:
            assert answer["value"] == "42"
            levels = {info["owner"]: (info["isolation"], info["degraded"]) for info in one.tell("kernels")}
            assert levels["a"] == ("namespace", DEGRADED)
            assert levels["b"][0] == "none"
            assert "isolation 'namespace' is not available here" in levels["b"][1]
        assert one.cell("x")["value"] == "1"


def kernels_in(runtime: Path) -> list[Path]:
    """Directories and leases of kernels, without those of the zygotes that make them."""
    return [path for path in traces.kernels_of(runtime) if not path.name.startswith("zygote")]


# -- processes that cannot be made ------------------------------------------------------------------------


def test_a_kernel_lives_on_when_the_thread_that_asked_for_it_is_gone(make_registry: Make) -> None:
    for way in (FORK, SPAWN):
        registry = made(make_registry, way)
        thread = threading.Thread(target=registry.execute, args=("x = 1",), kwargs={"owner": "thread"})
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(registry.execute, "x = 1", owner="pool").result()

        async def conversation(registry: BlockingRegistry = registry) -> None:
            await asyncio.to_thread(registry.execute, "x = 1", owner="asyncio")

        asyncio.run(conversation())
        for owner in ("thread", "pool", "asyncio"):
            result = registry.execute("x", owner=owner)
            assert (result.value, result.kernel.lost) == ("1", None), owner
        registry.close()


def test_kernels_of_an_asyncio_registry_outlive_the_loop_that_asked_for_them(leaves_nothing: None) -> None:
    registry = KernelRegistry(limits=Limits(**SPARE))
    asyncio.run(registry.execute("x = 1", owner="a"))
    assert asyncio.run(registry.execute("x", owner="a")).value == "1"
    asyncio.run(registry.close())


def test_a_host_without_descriptors_has_a_clear_error_no_leak_and_a_kernel_when_it_has_some(
    leaves_nothing: None,
) -> None:
    """Whichever of the descriptors that a start needs is the one that is missing."""
    with host({**FORK, "start_timeout": 1}) as one:
        assert one.cell("1", owner="first")["status"] == "ok"
        before = one.tell("descriptors")
        errors: dict[int, str] = {}
        leaks: dict[int, int] = {}
        for count in range(60):
            one.tell("leave_descriptors", count=count)
            answer = one.cell("6 * 7")
            one.tell("leave_descriptors", count=None)
            if answer["raised"] is None:
                assert answer["value"] == "42", answer
                break
            errors[count] = answer["raised"]
            assert answer["seconds"] < 3
            assert one.cell("6 * 7", owner="first")["value"] == "42"
            allowed = before + sum(leaks.values())
            if not traces.eventually(lambda: one.tell("descriptors") <= allowed, within=1):  # noqa: B023
                leaks[count] = one.tell("descriptors") - allowed
        assert len(errors) > 5
        assert set(errors.values()) == {"KernelStartError"}, errors
        assert leaks == {}
        assert one.cell("6 * 7")["value"] == "42"


@NEEDS_ROOT
def test_a_user_without_processes_has_a_clear_error_and_a_kernel_when_it_may_have_some(
    leaves_nothing: None,
) -> None:
    before = ("unshare", "-m", sys.executable, str(CONTAINMENT / "unprivileged.py"), str(OTHER_UID))

    def give_away(runtime: Path) -> None:
        for path in (runtime, runtime / "tmp"):
            os.chown(path, OTHER_UID, OTHER_UID)

    with host(FORK, before=before, prepare=give_away) as one:
        assert one.cell("1", owner="first")["status"] == "ok"
        zygote = one.family("first").zygote
        tasks = sum(p.num_threads() for p in psutil.process_iter() if p.uids().real == OTHER_UID)

        def limit(count: int) -> None:
            waiting = (p for p in zygote.children(recursive=True) if p.pid != one.family("first").kernel.pid)
            for process in (zygote, *waiting):
                one.tell("leave_processes", pid=process.pid, count=count)

        outcomes = []
        for count in (1, *range(tasks, tasks + 4)):
            limit(count)
            answer = one.cell("6 * 7")
            outcomes.append(answer["raised"])
            if answer["raised"] is not None:
                assert answer["raised"] == "KernelStartError"
                # Of the kernel, or of one of its threads.
                cause = "Resource temporarily unavailable|can't start new thread"
                assert re.search(cause, answer["text"]), answer
                assert answer["seconds"] < 3
                assert traces.eventually(lambda: len(kernels_in(one.runtime)) == 2), "what is half made stays"
            assert one.cell("6 * 7", owner="first")["value"] == "42"
        assert outcomes[0] == "KernelStartError"
        limit(tasks + 100)
        assert one.cell("6 * 7")["value"] == "42"


@BOTH
def test_a_kernel_that_hangs_in_what_it_loads_is_given_up_in_time(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    registry = made(make_registry, way, start_timeout=1)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "asleep"))
    began = time.monotonic()
    with pytest.raises(KernelStartError, match=r"not started within|not answer within"):
        registry.execute("1", owner="a")
    assert time.monotonic() - began < 2
    monkeypatch.delenv("PYTHONPATH")
    assert registry.execute("6 * 7", owner="a").value == "42"


@BOTH
def test_a_kernel_that_ends_in_what_it_loads_is_an_error_at_once_with_its_last_words(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    registry = made(make_registry, way)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "dying"))
    began = time.monotonic()
    with pytest.raises(KernelStartError, match="these are my last words") as error:
        registry.execute("1", owner="a")
    assert time.monotonic() - began < 1
    assert error.value.exit_code == 3
    monkeypatch.delenv("PYTHONPATH")
    assert registry.execute("6 * 7", owner="a").value == "42"


@EVERY_WAY
def test_a_cell_that_wants_more_memory_than_there_is_gets_an_error_and_its_kernel_lives(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way, memory_limit=512 * 1024 * 1024)
    registry.execute("x = 1", owner="z")
    result = registry.execute("x = 1\nbytearray(10**9)", owner="a", timeout=20)
    assert result.status is CellStatus.ERROR
    assert result.error is not None
    assert result.error.ename == "MemoryError"
    code = (
        "import subprocess, sys\nallocate = [sys.executable, '-I', '-c', 'bytearray(10**9)']\n"
        "subprocess.run(allocate, capture_output=True).stderr[-12:]"
    )
    assert registry.execute(code, owner="a").value == "b'MemoryError\\n'"
    assert registry.execute("x", owner="a").value == "1"


@pytest.mark.parametrize("way", [FORK, SPARE, SPAWN], ids=["fork", "spare", "spawn"])
def test_a_first_cell_that_takes_all_the_memory_for_a_while_keeps_its_kernel(
    make_registry: Make, way: Way
) -> None:
    """Nothing of the kernel's own is made later: ZeroMQ ends the process where it gets no memory."""
    registry = made(make_registry, way, memory_limit=600 * 1024 * 1024)
    code = """
import time
def take(size):
    taken = []
    while size >= 512:
        try:
            taken.append(bytearray(size))
        except MemoryError:
            size //= 2
    time.sleep(1)
x = 1
take(2**26)"""
    assert registry.execute(code, owner="a", timeout=30).kernel.ended is False
    assert registry.execute("x", owner="a").value == "1"


@BOTH
def test_a_kernel_itself_takes_little_of_the_memory_that_its_cells_may_have(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way, memory_limit=512 * 1024 * 1024)
    assert registry.execute("len(bytearray(256 * 1024 * 1024))", owner="a").value == str(256 * 1024 * 1024)


@EVERY_WAY
def test_a_cell_that_writes_too_large_a_file_gets_an_error_and_its_kernel_lives(
    make_registry: Make, way: Way
) -> None:
    registry = made(make_registry, way)
    code = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
with open('large', 'wb') as file: file.write(bytes(200_000))"""
    result = registry.execute(code, owner="a")
    assert result.status is CellStatus.ERROR
    assert result.error is not None
    assert (result.error.ename, "[Errno 27]" in result.error.evalue) == ("OSError", True)
    assert registry.execute("print('x' * 300_000)", owner="a").truncation.bytes_total == 300_001
    assert still_answers(registry).kernel.reused


def test_two_hundred_kernels_in_a_row_leave_the_hosts_descriptors_as_they_were(make_registry: Make) -> None:
    registry = made(make_registry, FORK)
    owners = ("a", "b", "c", "d")

    def fifty(owner: str) -> None:
        for number in range(50):
            assert registry.execute(f"{number}", owner=owner).value == str(number)
            assert registry.close_owner(owner) == 1

    with callers(registry, len(owners)) as pool:
        for owner in owners:  # what is made once, for all of them, and the threads that end them
            registry.execute("1", owner=owner)
        list(pool.map(registry.close_owner, owners))
        before = traces.descriptors()
        list(pool.map(fifty, owners))
        assert traces.eventually(lambda: traces.descriptors() <= before), traces.descriptors() - before
        assert traces.zombies() == []


# -- what a kernel is told --------------------------------------------------------------------------------

LOOK = """
import json, locale, os, pathlib, resource, shutil, signal, subprocess, sys, tempfile, time
child = "import json, os, sys, time\\n" \\
    "print(json.dumps([dict(os.environ), str(sys.flags), sys.path, time.tzname]))"
json.dumps({
    "environ": dict(os.environ),
    "path": sys.path,
    "flags": str(sys.flags),
    "tzname": [*time.tzname, time.localtime(0).tm_hour],
    "locale": [locale.setlocale(locale.LC_ALL), locale.getlocale(), locale.getpreferredencoding()],
    "temporary": tempfile.gettempdir(),
    "home": [os.path.expanduser("~"), str(pathlib.Path.home())],
    "found": shutil.which("only-there"),
    "encodings": [sys.getfilesystemencoding(), sys.stdout.encoding, sys.getdefaultencoding()],
    "argv": [sys.argv[0], sys.orig_argv[:3], sys.executable, sys.prefix],
    "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()],
    "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_CORE, resource.RLIMIT_AS)],
    "cwd": os.getcwd(),
    "child": json.loads(subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE).stdout),
})"""


def seen(registry: BlockingRegistry, owner: str) -> dict[str, Any]:
    """What a kernel and its child see of their environment, without what tells kernels apart."""
    result = registry.execute(LOOK, owner=owner, timeout=20)
    assert result.value is not None, result.text
    (info,) = (info for info in registry.kernels() if info.owner.session == owner)
    text = ast.literal_eval(result.value).replace(info.kernel_id, "KERNEL")
    found: dict[str, Any] = json.loads(text)
    for environment in (found["environ"], found["child"][0]):
        assert len(environment.pop("HERMES_KERNEL_COOKIE")) == 32
    return found


def test_a_kernel_sees_the_same_environment_however_it_is_made(
    make_registry: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its own start: what the host has changed since is seen also by one that was ready before."""
    path = os.environ["PATH"]

    def change(number: int) -> dict[str, str | None]:
        place = tmp_path / str(number)
        for name in ("bin", "lib", "tmp", "home"):
            (place / name).mkdir(parents=True)
        program = place / "bin" / "only-there"
        program.touch()
        program.chmod(0o755)
        return {
            "PATH": f"{place / 'bin'}:{path}",
            "HOME": str(place / "home"),
            "TZ": ("Asia/Tokyo", "America/New_York", "UTC")[number],
            "LANG": ("C.UTF-8", "C", "C.UTF-8")[number],
            "LC_ALL": ("C", "C.UTF-8", None)[number],
            "PYTHONPATH": f"{place / 'lib'}:{HERE / 'early'}",
            "PYTHONUNBUFFERED": ("1", None, "x")[number],
            "TMPDIR": str(place / "tmp"),
            "MPLCONFIGDIR": str(place),
            "IPYTHONDIR": str(place),
            "MY_FLAG": f"flag {number}",
            "OPENAI_API_KEY": f"{SECRET}{number}",
        }

    changes = [change(number) for number in range(3)]
    # The last one leaves alone all that makes a new zygote necessary: here a spare is used.
    changes.append(
        {
            **changes[2],
            "TZ": "Asia/Kolkata",
            "MY_FLAG": "flag 3",
            "OPENAI_API_KEY": SECRET,
            "PATH": changes[0]["PATH"],
            "TMPDIR": changes[0]["TMPDIR"],
        }
    )
    registries = {
        name: make_registry(limits=Limits(**way, max_kernels=20), env_passthrough=["MY_FLAG"])
        for name, way in (("fork", FORK), ("spawn", SPAWN), ("spare", SPARE))
    }
    for number, changed in enumerate(changes):
        spare = wait_for_spare(registries["spare"], "kept") if number == 3 else 0
        for name, value in changed.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        views = {name: seen(registry, f"owner {number}") for name, registry in registries.items()}
        if number == 3:
            assert kernel_of(registries["spare"], "owner 3") == spare
        assert views["fork"] == views["spawn"]
        assert views["spare"] == views["spawn"]
        view = views["spawn"]
        for environment in (view["environ"], view["child"][0]):
            for name in ("PATH", "HOME", "TZ", "LANG", "LC_ALL", "PYTHONPATH", "TMPDIR", "MY_FLAG"):
                assert environment.get(name) == changed[name], name
            assert not {"PYTHONUNBUFFERED", "MPLCONFIGDIR", "OPENAI_API_KEY"} & environment.keys()
            assert SECRET not in str(environment)
            assert environment["IPYTHONDIR"].endswith("/KERNEL/ipython")
        zones = {"Asia/Tokyo": "JST", "America/New_York": "EST", "UTC": "UTC", "Asia/Kolkata": "IST"}
        assert view["tzname"][0] == zones[str(changed["TZ"])]
        assert view["temporary"] == changed["TMPDIR"]
        assert view["home"] == [changed["HOME"]] * 2
        assert view["found"] == f"{str(changed['PATH']).partition(':')[0]}/only-there"
        assert set(str(changed["PYTHONPATH"]).split(":")) < set(view["path"])
        assert view["encodings"] == ["utf-8"] * 3


@pytest.mark.parametrize("way", [FORK, SPARE], ids=["fork", "spare"])
def test_kernels_of_one_zygote_share_no_chance(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "early"))
    registry = made(make_registry, way, max_kernels=9)
    code = """
import multiprocessing, os, random, tempfile, uuid
[random.random(), uuid.uuid4().hex, uuid.uuid1().hex, os.urandom(8).hex(), tempfile.mktemp(),
 bytes(multiprocessing.current_process().authkey).hex(), str(random.SystemRandom().random())]"""
    values = [ast.literal_eval(str(registry.execute(code, owner=owner).value)) for owner in "abcd"]
    for kind in zip(*values, strict=True):
        assert len(set(kind)) == 4, kind
