"""What a registry keeps to when something goes wrong around it: its callers, its process, its clock."""

import asyncio
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    HermesKernelError,
    KernelRegistry,
    KernelStartError,
    Limits,
    Loss,
    Owner,
)
from hermes_kernel.cell.events import ToolCallEnded, ToolCallStarted
from hermes_kernel.host.cut import Cut
from hermes_kernel.host.session import KernelSession

from .. import traces
from .test_cells_basics import still_answers
from .test_cells_queue import HeldCell, attached
from .test_registry import PID, Make, callers, gone, hold, pid_of

Outcome = str | HermesKernelError


class HeldStart:
    """Bootstrap code that says when it runs and goes on when it is told to, in each kernel by itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entered = directory / "entered"
        os.mkfifo(self._entered)
        self.code = (
            f"import os; go = f'{directory}/{{os.getpid()}}'; os.mkfifo(go)\n"
            f"with open({str(self._entered)!r}, 'w') as entered: print(os.getpid(), file=entered)\n"
            "open(go).close()"
        )

    def wait_until_it_runs(self) -> int:
        """Return the pid of the kernel; read to the end, so that the next reader does not meet the same."""
        return int(self._entered.read_text())

    def let_go(self, pid: int) -> None:
        (self._directory / str(pid)).open("w").close()


# -- callers that give up while they wait -----------------------------------------------------------------


def test_waiting_threads_that_give_up_leave_cell_process_and_variables_alone(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    pid = pid_of(registry, "a")
    registry.execute("z = 1", owner="a")
    stop = threading.Event()
    with callers(registry, 12) as pool:
        cell, running = hold(pool, registry, "a", tmp_path / "held")
        late = [pool.submit(registry.execute, "z += 1", owner="a", timeout=0.5) for _ in range(5)]
        cut = [
            pool.submit(registry.execute, "z += 1", owner="a", timeout=60, interrupted=stop.is_set)
            for _ in range(5)
        ]
        assert {call.result(5).status for call in late} == {CellStatus.TIMED_OUT}
        assert attached(registry, 6)
        stop.set()
        assert {call.result(5).status for call in cut} == {CellStatus.INTERRUPTED}
        for call in (*late, *cut):
            result = call.result()
            assert (result.ran, result.kernel.ended, result.kernel.lost) == (False, False, None)
            assert "not run; state kept" in result.to_dict()["error"]
        assert not running.done()
        assert attached(registry, 1)
        cell.let_go()
        assert running.result(10).value == "'finished'"
    assert registry.execute("z, kept", owner="a").value == "(1, 1)"
    assert pid_of(registry, "a") == pid


def test_waiting_tasks_that_give_up_leave_cell_process_and_variables_alone(
    leaves_nothing: None, tmp_path: Path
) -> None:
    async def conversation() -> None:
        async with KernelRegistry() as registry:
            pid = (await registry.execute("z = 1; " + PID, owner="a")).value
            cell = HeldCell(tmp_path)
            running = asyncio.create_task(registry.execute(cell.code, owner="a", timeout=60))
            await asyncio.to_thread(cell.wait_until_it_runs)
            late = [asyncio.create_task(registry.execute("z += 1", owner="a", timeout=0.5)) for _ in range(5)]
            cut = [asyncio.create_task(registry.execute("z += 1", owner="a", timeout=60)) for _ in range(5)]
            results = await asyncio.gather(*late)
            assert {(r.status, r.ran) for r in results} == {(CellStatus.TIMED_OUT, False)}
            for task in cut:
                task.cancel()
            ended = await asyncio.gather(*cut, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in ended)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await registry.execute("z += 1", owner="a", timeout=60)
            assert not running.done()
            await asyncio.to_thread(cell.let_go)
            assert (await running).value == "'finished'"
            after = await registry.execute("import os; z, kept, os.getpid()", owner="a")
            assert after.value == f"(1, 1, {pid})"

    asyncio.run(conversation())


def test_a_waiter_that_gives_up_just_as_its_turn_comes_is_told_the_truth(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    """Whatever wins, the kernel is in the state that the results speak of."""
    registry.execute("z = 0", owner="a")
    z = 0
    for attempt in range(30):
        directory = tmp_path / str(attempt)
        stop = threading.Event()
        with callers(registry, 2) as pool:
            cell, running = hold(pool, registry, "a", directory)
            waiter = pool.submit(registry.execute, "z += 1", owner="a", timeout=30, interrupted=stop.is_set)
            assert attached(registry, 2)
            both = threading.Thread(target=stop.set)
            both.start()
            time.sleep(0.005 * (attempt % 12))  # not to synchronise: to spread the tries over the poll
            cell.let_go()
            both.join()
            assert running.result(10).value == "'finished'"
            result = waiter.result(10)
        after = registry.execute("globals().get('z')", owner="a")
        if result.status is CellStatus.OK:
            z += 1
        if result.kernel.ended:
            assert (result.status, result.ran) == (CellStatus.INTERRUPTED, True)
            assert (after.value, after.kernel.lost) == (None, Loss.INTERRUPTED)
            registry.execute(f"z = {z}", owner="a")
        else:
            assert (after.value, after.kernel.lost) == (str(z), None), result


# -- timeout against reply --------------------------------------------------------------------------------


def test_a_timeout_and_a_reply_in_the_same_millisecond_have_one_outcome(registry: BlockingRegistry) -> None:
    seen = set()
    registry.execute("import time; n = 0", owner="a")
    n, sleep = 0, 0.18
    for _ in range(100):
        result = registry.execute(f"time.sleep({sleep}); n += 1; n", owner="a", timeout=0.2)
        seen.add(result.status)
        if result.status is CellStatus.OK:
            n += 1
            sleep += 0.0005  # up to the edge, and back from beyond
            assert (result.value, result.kernel.ended, result.kernel.lost) == (str(n), False, None)
        else:
            sleep -= 0.003
            assert (result.status, result.ran, result.kernel.ended) == (CellStatus.TIMED_OUT, True, True)
            after = registry.execute(f"gone = 'n' not in globals(); import time; n = {n}; gone", owner="a")
            assert (after.value, after.kernel.lost, after.kernel.reused) == ("True", Loss.TIMED_OUT, False)
    assert seen == {CellStatus.OK, CellStatus.TIMED_OUT}


# -- closing, from anywhere, at any time ------------------------------------------------------------------


def outcome(registry: BlockingRegistry, code: str, owner: str) -> Outcome:
    try:
        return registry.execute(code, owner=owner, timeout=60).status.value
    except HermesKernelError as error:
        return error if json.loads(error.to_json())["status"] == "error" else "no JSON"


def test_a_registry_that_eight_threads_close_ends_every_call_that_runs_waits_or_starts(
    make_registry: Make, tmp_path: Path
) -> None:
    registry = make_registry(limits=Limits(max_kernels=8))
    with callers(registry, 32) as pool:
        held = [hold(pool, registry, owner, tmp_path / owner) for owner in "abc"]
        waiting = [pool.submit(outcome, registry, "1", owner) for owner in "aabbcc"]
        starting = [pool.submit(outcome, registry, "1", owner) for owner in "def"]
        assert attached(registry, 12) or sum(not call.done() for call in starting) < 3
        began = time.monotonic()
        start = threading.Barrier(8)

        def close() -> None:
            start.wait()
            registry.close()

        closings = [pool.submit(close) for _ in range(8)]
        for closing in closings:
            closing.result(20)
        assert time.monotonic() - began < 15
        for _, running in held:
            assert (running.result(5).status, running.result().ran) == (CellStatus.INTERRUPTED, True)
        for call in waiting:
            said = call.result(5)
            assert said == "interrupted" or isinstance(said, HermesKernelError)
        for call in starting:
            said = call.result(5)
            assert said in ("interrupted", "ok") or isinstance(said, HermesKernelError)
    assert isinstance(outcome(registry, "1", "a"), HermesKernelError)
    registry.close()


def test_an_owner_that_eight_threads_close_loses_its_kernel_once(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    pid = pid_of(registry, "a")
    other = pid_of(registry, "b")
    with callers(registry, 9) as pool:
        _, running = hold(pool, registry, "a", tmp_path / "held")
        closings = [pool.submit(registry.close_owner, "a") for _ in range(8)]
        assert sum(closing.result(10) for closing in closings) >= 1
        result = running.result(10)
    assert (result.status, result.ran, result.kernel.ended) == (CellStatus.INTERRUPTED, True, True)
    assert "state was lost" in result.to_dict()["error"]
    assert gone(pid)
    assert registry.stats()["lost_closed"] == 1
    assert pid_of(registry, "b") == other
    assert still_answers(registry).kernel.lost is Loss.CLOSED


def test_callers_that_give_up_while_their_owner_is_closed_are_told_one_thing(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    for attempt in range(10):
        stop = threading.Event()
        cell = HeldCell(made(tmp_path / str(attempt)))
        with callers(registry, 4) as pool:
            running = pool.submit(registry.execute, cell.code, owner="a", interrupted=stop.is_set)
            cell.wait_until_it_runs()
            start = threading.Barrier(3)
            closings = [
                pool.submit(lambda start=start: (start.wait(), registry.close_owner("a"))) for _ in "ab"
            ]
            start.wait()
            stop.set()
            result = running.result(10)
            for closing in closings:
                closing.result(10)
        assert (result.status, result.ran, result.kernel.ended) == (CellStatus.INTERRUPTED, True, True)
        assert still_answers(registry).kernel.lost in (Loss.CLOSED, Loss.INTERRUPTED)


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_closing_is_as_quick_and_as_honest_with_a_grace(make_registry: Make, tmp_path: Path) -> None:
    """The grace is for a cell that is cut by its caller or its time; a closed kernel ends now."""
    registry = make_registry(limits=Limits(interrupt_grace=20))
    with callers(registry, 1) as pool:
        _, running = hold(pool, registry, "a", tmp_path / "held")
        began = time.monotonic()
        assert registry.close_owner("a") == 1
        result = running.result(10)
    assert time.monotonic() - began < 8
    assert (result.status, result.kernel.ended) == (CellStatus.INTERRUPTED, True)
    assert still_answers(registry).kernel.lost is Loss.CLOSED


@pytest.mark.parametrize("how", ["close_owner", "close", "interrupted"])
def test_a_call_whose_kernel_still_starts_ends_at_once_and_leaves_nothing(
    make_registry: Make, tmp_path: Path, how: str
) -> None:
    start = HeldStart(tmp_path)
    registry = make_registry(bootstrap=start.code)
    stop = threading.Event()
    with callers(registry, 2) as pool:
        call = pool.submit(registry.execute, "1", owner="a", interrupted=stop.is_set)
        start.wait_until_it_runs()
        (info,) = registry.kernels()
        assert info.pid is not None
        if how == "close_owner":
            assert registry.close_owner("a") == 1
        elif how == "close":
            registry.close()
        else:
            stop.set()
        result = call.result(10)
    assert (result.status, result.ran) == (CellStatus.INTERRUPTED, False)
    assert gone(info.pid)
    if how != "close":
        assert registry.kernels() == ()


def test_a_caller_that_finds_its_starting_kernel_closed_takes_another_one(
    make_registry: Make, tmp_path: Path
) -> None:
    """T-CL: a retired cold kernel runs nothing, and its end does not take its replacement along."""
    start = HeldStart(tmp_path)
    registry = make_registry(bootstrap=start.code)
    stop = threading.Event()
    with callers(registry, 3) as pool:
        first = pool.submit(registry.execute, PID, owner="a", interrupted=stop.is_set)
        start.wait_until_it_runs()
        behind = [pool.submit(registry.execute, PID, owner="a", timeout=60) for _ in range(2)]
        assert attached(registry, 3)
        (old,) = registry.kernels()
        stop.set()
        assert (first.result(10).status, first.result().ran) == (CellStatus.INTERRUPTED, False)
        start.let_go(start.wait_until_it_runs())
        results = [call.result(30) for call in behind]
    assert {result.status for result in results} == {CellStatus.OK}
    assert len({result.value for result in results}) == 1
    assert {result.kernel.lost for result in results} == {None}
    (new,) = registry.kernels()
    assert new.kernel_id != old.kernel_id
    assert still_answers(registry).kernel.reused


def test_a_reset_while_the_kernel_starts_takes_a_fresh_one(make_registry: Make, tmp_path: Path) -> None:
    start = HeldStart(tmp_path)
    registry = make_registry(bootstrap=start.code)
    with callers(registry, 2) as pool:
        first = pool.submit(registry.execute, PID, owner="a", timeout=60)
        starting = [start.wait_until_it_runs()]
        second = pool.submit(registry.execute, PID, owner="a", timeout=60, reset=True)
        starting.append(start.wait_until_it_runs())
        assert sorted(info.attached for info in registry.kernels()) == [1, 1]
        for pid in starting:
            start.let_go(pid)
        results = [first.result(30), second.result(30)]
    assert {result.status for result in results} == {CellStatus.OK}
    assert results[0].value != results[1].value
    assert traces.eventually(lambda: len(registry.kernels()) == 1)
    assert registry.execute(PID, owner="a").value == results[1].value


def test_a_reset_is_told_to_its_caller_and_not_to_one_that_runs_on_the_old_kernel_meanwhile(
    make_registry: Make, tmp_path: Path
) -> None:
    start = HeldStart(tmp_path)
    registry = make_registry(bootstrap=start.code)
    with callers(registry, 4) as pool:
        first = pool.submit(registry.execute, "x = 1", owner="a")
        start.let_go(start.wait_until_it_runs())
        first.result(20)
        cell, running = hold(pool, registry, "a", tmp_path / "held")
        behind = pool.submit(registry.execute, "x", owner="a", timeout=60)
        assert attached(registry, 2)
        reset = pool.submit(registry.execute, "'x' in globals()", owner="a", timeout=60, reset=True)
        pid = start.wait_until_it_runs()
        cell.let_go()
        assert running.result(10).kernel.lost is None
        waited = behind.result(10)
        start.let_go(pid)
        fresh = reset.result(20)
    assert (waited.value, waited.kernel.lost) == ("1", None), "it found the state that it expects"
    assert (fresh.value, fresh.kernel.lost) == ("False", Loss.RESET)


def test_a_call_takes_no_kernel_after_the_fifth_has_ended_under_it(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    deadly = "import os; os._exit(1)"
    with callers(registry, 9) as pool:
        _, running = hold(pool, registry, "a", tmp_path / "held")
        waiting = []
        for n in range(6):
            waiting.append(pool.submit(registry.execute, deadly, owner="a", timeout=60))
            assert attached(registry, n + 2)
        last = pool.submit(registry.execute, "open('ran', 'w')", owner="a", timeout=60)
        assert attached(registry, 8)
        (info,) = registry.kernels()
        assert info.pid is not None
        os.kill(info.pid, signal.SIGKILL)
        assert running.result(10).status is CellStatus.DIED
        for call in (*waiting, last):
            error = call.exception(60)
            if error is None:
                assert call.result().ran
            else:
                assert isinstance(error, KernelStartError)
                assert "not run" in str(error)
    assert still_answers(registry).kernel.lost is Loss.DIED


def test_an_attached_kernel_is_never_reaped(make_registry: Make) -> None:
    """The idle end and a new call, again and again at the same time: a call never meets a dying kernel."""
    registry = make_registry(limits=Limits(idle_timeout=0.05))
    registry.execute("n = 0", owner="a")
    n = 0
    for attempt in range(25):
        time.sleep(
            0.04 + attempt % 5 * 0.005
        )  # not to synchronise: to meet the idle end as well as to miss it
        result = registry.execute("n = globals().get('n', 0) + 1; n", owner="a", timeout=30)
        assert result.status is CellStatus.OK
        n = n + 1 if result.kernel.lost is None else 1
        assert result.value == str(n)
        assert result.kernel.lost in (None, Loss.IDLE)


# -- the host process -------------------------------------------------------------------------------------


def test_a_forked_child_that_exits_normally_or_closes_the_registry_leaves_the_kernels_alone(
    registry: BlockingRegistry,
) -> None:
    pid = pid_of(registry, "a")
    registry.execute("x = 1", owner="a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            registry.close()
            try:
                registry.execute("x = 2", owner="a")
            except HermesKernelError:
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    process = multiprocessing.get_context("fork").Process(target=registry.close)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert registry.execute("x", owner="a").value == "1"
    assert pid_of(registry, "a") == pid


def host(script: str, *, closed: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a host program of its own to its end, and see from here that it leaves nothing.

    *closed*: what a shell is told to close before.
    """
    lines = "import os, signal, sys, threading, time\nfrom hermes_kernel import *\n" + textwrap.dedent(script)
    runtime = Path(tempfile.mkdtemp(prefix="hkh-"))
    try:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", lines],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        left = traces.kernels_of(runtime)
        assert traces.eventually(lambda: not traces.marked_processes(str(runtime))), done
        assert left == [], done
    finally:
        for process in traces.marked_processes(str(runtime)):
            process.kill()
        shutil.rmtree(runtime)
    return done


EXITS = {
    "idle": "r.execute('1', owner='a')",
    "many": "[r.execute('1', owner=n) for n in 'abc']",
    "mid-cell": """
        r.execute('1', owner='a')
        def run(): r.execute('import time; time.sleep(300)', owner='a')
        threading.Thread(target=run, daemon=True).start()
        while not any(info.state.value == 'busy' for info in r.kernels()): pass
    """,
    "starting": """
        def run(): r.execute('1', owner='a')
        threading.Thread(target=run, daemon=True).start()
        while not r.kernels(): pass
    """,
    "waiting": """
        def run(): r.execute('import time; time.sleep(300)', owner='a')
        [threading.Thread(target=run, daemon=True).start() for _ in range(4)]
        while sum(info.attached for info in r.kernels()) < 4: pass
    """,
    "exit in a thread": """
        def run(): r.execute('1', owner='a'); sys.exit(3)
        t = threading.Thread(target=run); t.start(); t.join()
    """,
    "used in atexit": """
        import atexit
        atexit.register(lambda: r.execute('1', owner='a'))
        r.execute('1', owner='b')
    """,
    "dropped": "r.execute('1', owner='a'); del r",
}


@pytest.mark.parametrize("code", EXITS.values(), ids=EXITS)
def test_a_host_that_ends_with_live_kernels_ends_quietly_and_leaves_nothing(
    leaves_nothing: None, code: str
) -> None:
    began = time.monotonic()
    done = host("r = BlockingRegistry()\n" + textwrap.dedent(code))
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stderr == ""
    assert time.monotonic() - began < 25


def test_an_asyncio_host_that_ends_its_loop_mid_cell_ends_quietly(leaves_nothing: None) -> None:
    done = host(
        """
        import asyncio
        async def main():
            r = KernelRegistry()
            await r.execute('1', owner='a')
            asyncio.create_task(r.execute('import time; time.sleep(300)', owner='a'))
            while not any(info.state.value == 'busy' for info in await r.kernels()): pass
            return r
        r = asyncio.run(main())
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", ">&-", "2>&-"])
def test_a_host_without_standard_streams_has_kernels_that_have_their_own(
    leaves_nothing: None, tmp_path: Path, closed: str
) -> None:
    """No descriptor of ours may land where a standard stream belongs."""
    code = (
        "import os, subprocess; print('printed'); os.write(2, b'raw'); subprocess.run(['echo', 'child']); "
        "[os.readlink(f'/proc/self/fd/{n}').partition(':')[0] for n in (0, 1, 2)]"
    )
    script = f"""
        with BlockingRegistry() as r:
            seen = r.execute({code!r}, owner='a')
            cut = r.execute('import time; time.sleep(60)', owner='a', timeout=0.3)
            after = r.execute('6 * 7', owner='a')
        with open({str(tmp_path / "told")!r}, 'w') as told:
            print(seen.stdout, seen.stderr, seen.value, cut.status.value, after.value, file=told)
        """
    done = host(script, closed=closed)
    assert done.returncode == 0
    told = "printed\nchild\n raw ['/dev/null', 'pipe', 'pipe'] timed_out 42\n"
    assert (tmp_path / "told").read_text() == told


def test_a_host_that_forks_and_exits_in_the_child_keeps_its_kernels(leaves_nothing: None) -> None:
    done = host(
        """
        r = BlockingRegistry()
        r.execute('x = 1', owner='a')
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print(r.execute('x', owner='a').value)
        r.close()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_ctrl_c_in_a_waiting_host_interrupts_the_cell_and_is_passed_on(leaves_nothing: None) -> None:
    done = host(
        """
        r = BlockingRegistry()
        r.execute('x = 1', owner='a')
        r.execute('y = 1', owner='b')
        def ctrl_c():
            while not any(info.state.value == 'busy' for info in r.kernels()): pass
            os.kill(os.getpid(), signal.SIGINT)
        for wish in (None, lambda: False):
            threading.Thread(target=ctrl_c).start()
            began = time.monotonic()
            try:
                r.execute('import time; time.sleep(300)', owner='a', interrupted=wish)
            except KeyboardInterrupt:
                print('passed on', time.monotonic() - began < 10)
            after = r.execute("'x' in globals()", owner='a')
            print(after.value, after.kernel.lost.name)
        print(r.execute('y', owner='b').value)
        r.close()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "passed on True\nFalse INTERRUPTED\n" * 2 + "1\n"


def test_an_exception_that_is_set_in_a_waiting_thread_interrupts_its_cell(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    cell, caught = HeldCell(tmp_path), []

    def call() -> None:
        try:
            registry.execute(cell.code, owner="a", timeout=60, interrupted=lambda: False)
        except KeyboardInterrupt:
            caught.append(registry.kernels())

    caller = threading.Thread(target=call)
    caller.start()
    cell.wait_until_it_runs()
    assert caller.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(caller.ident), ctypes.py_object(KeyboardInterrupt)
    )
    caller.join(20)
    assert caught == [()], "the call came back when the cell had settled"
    assert still_answers(registry).kernel.lost is Loss.INTERRUPTED


def test_a_ctrl_c_while_the_call_waits_for_its_turn_touches_nothing(leaves_nothing: None) -> None:
    done = host(
        """
        r = BlockingRegistry()
        release = os.pipe()
        first = r.execute('import os, time; x = 1; os.getpid()', owner='a').value
        out = []
        cell = threading.Thread(target=lambda: out.append(r.execute('time.sleep(3); x = 2; x', owner='a')))
        cell.start()
        while not any(info.state.value == 'busy' for info in r.kernels()): pass
        def ctrl_c():
            while sum(info.attached for info in r.kernels()) < 2: pass
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=ctrl_c).start()
        try:
            r.execute('x = 3', owner='a')
        except KeyboardInterrupt:
            print(cell.is_alive())
        cell.join()
        print(out[0].value, r.execute('x', owner='a').value,
              r.execute("os.getpid()", owner="a").value == first)
        r.close()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n2 2 True\n", "")


# -- the clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_wall_clock_that_jumps_neither_cuts_a_cell_nor_reaps_a_kernel(
    make_registry: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    registry = make_registry(limits=Limits(idle_timeout=60, timeout=30))
    registry.execute("x = 1", owner="b")
    real = time.time
    with callers(registry, 1) as pool:
        cell, running = hold(pool, registry, "a", tmp_path / "held")
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        result = registry.execute("import time; time.sleep(60)", owner="c", timeout=0.3)
        assert (result.status, result.duration < 20) == (CellStatus.TIMED_OUT, True)
        assert registry.execute("x", owner="b").value == "1"
        assert not running.done()
        cell.let_go()
        assert running.result(10).value == "'finished'"
        assert 0 <= running.result().duration < 60
    assert registry.stats()["lost_idle"] == 0


# -- asyncio ----------------------------------------------------------------------------------------------


def test_a_task_that_is_cancelled_at_any_point_leaves_an_owner_that_can_go_on(leaves_nothing: None) -> None:
    async def turns(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def conversation() -> None:
        async with KernelRegistry(limits=Limits(timeout=30)) as registry:
            await registry.execute("n = 0", owner="a")
            n = 0
            for point in [0, 1, 2, 3, 5, 8, 13, 20, 40, 80, 160, 320, 640, 1280, 2560]:
                task = asyncio.create_task(registry.execute("n += 1; n", owner="a"))
                await turns(point)
                task.cancel()
                try:
                    n = int((await task).value or 0)
                    cancelled = False
                except asyncio.CancelledError:
                    cancelled = True
                after = await registry.execute("globals().get('n')", owner="a")
                assert after.status is CellStatus.OK
                if after.kernel.lost is None:
                    assert after.value in ((str(n), str(n + 1)) if cancelled else (str(n),))
                    n = int(after.value or 0)
                else:
                    assert (after.kernel.lost, after.value, cancelled) == (Loss.INTERRUPTED, None, True)
                    await registry.execute(f"n = {n}", owner="a")
                assert sum(info.attached for info in await registry.kernels()) == 0
            # ... and while the kernel starts
            for point in (0, 1, 3, 10, 100, 1000):
                task = asyncio.create_task(registry.execute("1", owner="b", reset=True))
                await turns(point)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await registry.execute("6 * 7", owner="b")).value == "42"

    asyncio.run(conversation())


def test_a_task_that_is_cancelled_twice_does_not_hold_its_kernel(
    leaves_nothing: None, tmp_path: Path
) -> None:
    async def conversation() -> None:
        async with KernelRegistry() as registry:
            cell = HeldCell(tmp_path)
            task = asyncio.create_task(registry.execute(cell.code, owner="a", timeout=60))
            await asyncio.to_thread(cell.wait_until_it_runs)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            after = await registry.execute("6 * 7", owner="a")
            assert (after.value, after.kernel.lost) == ("42", Loss.INTERRUPTED)

    asyncio.run(conversation())


def test_a_registry_that_is_closed_by_many_tasks_while_calls_run_ends_them_all(leaves_nothing: None) -> None:
    async def conversation() -> None:
        registry = KernelRegistry(limits=Limits(max_kernels=8))
        calls = [
            asyncio.create_task(registry.execute("import time; time.sleep(60)", owner=owner))
            for owner in "aabbc"
        ]
        while sum(info.attached for info in await registry.kernels()) < 5:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(15):
            await asyncio.gather(*(registry.close() for _ in range(8)))
            results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, HermesKernelError)
            else:
                assert result.status is CellStatus.INTERRUPTED

    asyncio.run(conversation())


def test_one_registry_serves_tasks_of_several_loops_and_outlives_them(leaves_nothing: None) -> None:
    registry = KernelRegistry()
    results: list[str | None] = []

    async def converse(code: str) -> None:
        results.append((await registry.execute(code, owner="a")).value)

    asyncio.run(converse("x = 1; x"))
    threads = [threading.Thread(target=lambda: asyncio.run(converse("x += 1; x"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(registry.close())
    assert sorted(map(str, results)) == ["1", "2", "3", "4", "5"]


def test_the_owner_of_a_closed_kernel_is_told_even_if_the_close_came_between_start_and_cell(
    registry: BlockingRegistry,
) -> None:
    for _ in range(5):
        registry.execute("x = 1", owner=Owner("a"))
        registry.close_where(lambda info: True)
        assert registry.execute("'x' in globals()", owner="a").kernel.lost is Loss.CLOSED


def test_a_slow_cleaner_of_one_owner_holds_nobody_else_up(make_registry: Make) -> None:
    held = threading.Event()

    def clean(text: str) -> str:
        if "of a" in text:
            held.wait(30)
        return text

    registry = make_registry(clean=clean)
    for owner in ("a", "b"):
        registry.execute("1", owner=owner)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(registry.execute, "print('of a')", owner="a")
        quick = registry.execute("while True: pass", owner="b", timeout=0.2)
        assert not slow.done()
        held.set()
        assert slow.result(30).stdout == "of a\n"
    assert quick.status is CellStatus.TIMED_OUT
    assert quick.duration < 10


def test_a_cleaner_that_exits_costs_its_own_text_alone(make_registry: Make) -> None:
    registry = make_registry(clean=lambda text: sys.exit(3), secrets=["not-to-be-told"])
    assert registry.execute("print('not-to-be-told')", owner="a").stdout == "***\n"


def test_a_kernel_that_ends_while_its_result_is_made_is_gone_at_once(make_registry: Make) -> None:
    pids: list[int] = []

    def clean(text: str) -> str:
        if pids:
            assert traces.eventually(lambda: not psutil.pid_exists(pids[0]))
        return text

    registry = make_registry(clean=clean)
    registry.execute("1", owner="a")
    pids.append(registry.kernels()[0].pid or 0)
    code = "import os, threading; print('x'); threading.Timer(0.1, os._exit, [3]).start()"
    assert registry.execute(code, owner="a").status is CellStatus.OK
    assert traces.eventually(lambda: registry.kernels() == ())
    assert registry.stats()["lost_died"] == 1


def test_the_end_of_a_call_that_outlives_its_cell_is_told(make_registry: Make) -> None:
    reached, go = threading.Event(), threading.Event()

    def slow() -> None:
        reached.set()
        go.wait(30)

    def until_reached() -> None:
        reached.wait(30)

    registry = make_registry()
    events: list[object] = []
    code = (
        "import threading\nthreading.Thread(target=hermes_tools.slow).start()\nhermes_tools.until_reached()"
    )
    registry.execute(code, owner="a", tools=[slow, until_reached], on_event=events.append)
    go.set()
    told = [type(event) for event in events if getattr(event, "name", None) == "slow"]
    assert told == [ToolCallStarted, ToolCallEnded]


def test_what_a_handler_has_left_running_may_call_its_owners_kernel_later() -> None:
    async def main() -> list[CellResult]:
        jobs: list[asyncio.Task[CellResult]] = []
        async with KernelRegistry() as registry:
            is_over = asyncio.Event()

            async def job() -> CellResult:
                await is_over.wait()
                return await registry.execute("'of the job'", owner="a")

            async def schedule() -> None:
                jobs.append(asyncio.create_task(job()))

            async def hold() -> None:
                is_over.set()
                await asyncio.wait(jobs, timeout=0.3)  # it has its turn after this cell

            await registry.execute("hermes_tools.schedule()", owner="a", tools=[schedule])
            return [await registry.execute("hermes_tools.hold()", owner="a", tools=[hold]), await jobs[0]]

    ordinary, later = asyncio.run(main())
    assert (ordinary.status, later.status, later.value) == (CellStatus.OK, CellStatus.OK, "'of the job'")


def test_a_kernel_on_which_a_person_works_is_not_idle(make_registry: Make, tmp_path: Path) -> None:
    registry = make_registry(expose=True, limits=Limits(idle_timeout=1, max_kernels=1))
    registry.execute("1", owner="a")
    (info,) = registry.kernels()
    client = BlockingKernelClient(connection_file=info.connection_file)
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        done = tmp_path / "done"
        client.execute(f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.05)\nx = 2")
        assert traces.eventually(lambda: any(each.is_visited for each in registry._kernels._population))
        registry.execute("1", owner="b")  # there is room for one
        assert traces.eventually(lambda: [each.owner.session for each in registry.kernels()] == ["a"])
        done.touch()
        assert registry.execute("x", owner="a").value == "2"
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)
    assert traces.eventually(lambda: registry.kernels() == ())


def test_a_cut_between_the_turn_and_the_code_runs_nothing(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = make_registry()
    registry.execute("x = 1", owner="a")
    wait = KernelSession._wait_for_others

    async def cut_first(session: KernelSession, cut: Cut, deadline: float) -> CellStatus | None:
        cut.interrupt()
        return await wait(session, cut, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(KernelSession, "_wait_for_others", cut_first)
        result = registry.execute("x = 2", owner="a")
    assert (result.status, result.ran, result.kernel.ended) == (CellStatus.INTERRUPTED, False, False)
    assert registry.execute("x", owner="a").value == "1"
