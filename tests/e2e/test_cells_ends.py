"""Cells that end their own kernel: by exit, by a crash, by a signal, by replacing it."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellStatus, Loss

from .. import traces
from .test_cells_basics import still_answers

EXITS = {
    "sys.exit(3)": ("import sys; sys.exit(3)", 3),
    "sys.exit(0)": ("import sys; sys.exit(0)", 0),
    "sys.exit(None)": ("import sys; sys.exit(None)", 0),
    "sys.exit()": ("import sys; sys.exit()", 0),
    "sys.exit(True)": ("import sys; sys.exit(True)", 1),
    "raise SystemExit": ("raise SystemExit", 0),
    "exit()": ("exit()", 0),
    "quit()": ("quit()", 0),
    "exit(3)": ("exit(3)", 3),
    "quit(4)": ("quit(4)", 4),
    "in a function": ("import sys\ndef f(): sys.exit(7)\nf()", 7),
    "in try/finally": ("import sys\ntry: sys.exit(8)\nfinally: x = 1", 8),
    "through except Exception": ("import sys\ntry: sys.exit(9)\nexcept Exception: pass", 9),
    "in a coroutine": ("import sys\nasync def f(): sys.exit(10)\nawait f()", 10),
    "in a repr": ("import sys\nclass A:\n    def __repr__(self): sys.exit(11)\nA()", 11),
    "by a subclass": ("class Bye(SystemExit): pass\nraise Bye(13)", 13),
    "by an IntEnum": ("import enum, sys\nclass C(enum.IntEnum):\n    BAD = 14\nsys.exit(C.BAD)", 14),
}


@pytest.mark.parametrize("names", [[*EXITS][:9], [*EXITS][9:]], ids=["plainly", "from somewhere"])
def test_an_exit_ends_the_kernel_with_its_real_code(registry: BlockingRegistry, names: list[str]) -> None:
    for name in names:
        code, exit_code = EXITS[name]
        registry.execute("z = 1", owner="a")
        result = registry.execute(f"print('before')\n{code}", owner="a", timeout=10)
        assert (result.status, result.exit_code, result.signal) == (CellStatus.EXITED, exit_code, None), name
        assert (result.stdout, result.error, result.ran) == ("before\n", None, True), name
        assert (result.kernel.ended, result.kernel.lost) == (True, None), name
        assert "Traceback" not in result.text, name
        assert result.to_dict()["status"] == ("success" if exit_code == 0 else "error"), name
        after = still_answers(registry)
        assert (after.kernel.lost, after.kernel.reused, after.kernel.ended) == (Loss.EXITED, False, False), (
            name
        )
        assert registry.execute("'z' in globals()", owner="a").value == "False", name


def test_the_bare_names_of_a_console_end_the_kernel_too(registry: BlockingRegistry) -> None:
    for code in ("exit", "quit"):
        result = registry.execute(code, owner="a", timeout=10)
        assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.EXITED, 0, True)
        assert still_answers(registry).kernel.lost is Loss.EXITED


def test_an_exit_with_a_message_has_code_one_and_shows_the_message(registry: BlockingRegistry) -> None:
    for code, message in (
        ("import sys; sys.exit('fatal: boom')", "fatal: boom"),
        ("raise SystemExit('fatal: boom')", "fatal: boom"),
        ("exit('fatal: boom')", "fatal: boom"),
        ("import sys; sys.exit('zwei\\nZeilen é')", "zwei\nZeilen é"),
        ("import sys; sys.exit((3, 'pair'))", "(3, 'pair')"),
        ("import sys; sys.exit([1, 2])", "[1, 2]"),
        ("import sys; sys.exit(2.5)", "2.5"),
        ("raise SystemExit(3, 'two arguments')", "two arguments"),
        ("import sys; sys.exit('a\\ud800b')", "a"),
        ("import sys; sys.exit('')", ""),
    ):
        result = registry.execute(code, owner="a", timeout=10)
        assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.EXITED, 1, True), code
        assert message in result.text, code
        assert message in result.to_dict()["output"], code
        result.to_json().encode()
        assert still_answers(registry).kernel.lost is Loss.EXITED, code


@pytest.mark.parametrize("body", ["raise ValueError", "return 3"])
def test_an_exit_whose_message_cannot_be_shown_is_still_an_exit(
    registry: BlockingRegistry, body: str
) -> None:
    code = f"import sys\nclass Bad:\n    def __str__(self): {body}\nsys.exit(Bad())"
    result = registry.execute(code, owner="a", timeout=10)
    assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.EXITED, 1, True)
    assert still_answers(registry).kernel.lost is Loss.EXITED


@pytest.mark.parametrize("code", ["-1", "256", "2**70", "-2**70"])
def test_an_exit_code_that_no_process_can_have_still_ends_the_cell(
    registry: BlockingRegistry, code: str
) -> None:
    result = registry.execute(f"import sys; sys.exit({code})", owner="a", timeout=10)
    assert result.status is CellStatus.EXITED
    assert result.to_dict()["status"] == ("success" if result.exit_code == 0 else "error")
    assert result.exit_code >= 0, "a negative code says: a signal, or cut"
    assert still_answers(registry).kernel.lost is Loss.EXITED


def test_an_exit_that_is_not_the_cells_own_keeps_the_kernel(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    for code in (
        "import sys\ntry: sys.exit(3)\nexcept SystemExit: pass",
        "import sys, threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()",
        "import subprocess as s, sys; s.run([sys.executable, '-c', 'raise SystemExit(3)']); None",
        "import os\npid = os.fork()\nif not pid: os._exit(3)\nos.waitpid(pid, 0); None",
        "import multiprocessing as m, sys; p = m.get_context('fork').Process(target=sys.exit, args=(3,)); "
        "p.start(); p.join()",
    ):
        result = registry.execute(code, owner="a", timeout=10)
        assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.OK, 0, False), code
        assert still_answers(registry).kernel.reused, code
    assert registry.execute("z", owner="a").value == "1"


def test_what_would_keep_the_process_alive_does_not_hold_an_exit(registry: BlockingRegistry) -> None:
    for before in (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
        "import subprocess; subprocess.Popen(['sleep', '600'])",
        "import atexit, time; atexit.register(time.sleep, 600)",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ):
        registry.execute("1", owner="a")
        started = time.monotonic()
        result = registry.execute(f"{before}\nimport sys; sys.exit(3)", owner="a", timeout=30)
        assert time.monotonic() - started < 4, before
        assert (result.status, result.exit_code) == (CellStatus.EXITED, 3), before
        assert still_answers(registry).kernel.lost is Loss.EXITED, before


def test_the_control_thread_of_a_kernel_that_ends_speaks_no_more(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    """Its words go through the IOPub thread, whose end comes next: it would wait for one that has gone."""
    seen = tmp_path / "threads"
    result = registry.execute(
        "import atexit, pathlib, sys, threading\n"
        "names = lambda: repr([thread.name for thread in threading.enumerate()])\n"
        f"atexit.register(lambda: pathlib.Path({str(seen)!r}).write_text(names()))\n"
        "sys.exit(3)",
        owner="a",
    )
    assert (result.status, result.exit_code) == (CellStatus.EXITED, 3)
    names = seen.read_text()
    assert "IOPub" in names
    assert "Control" not in names


DEATHS = {
    "_exit(7)": ("os._exit(7)", 7, None),
    "_exit(0)": ("os._exit(0)", 0, None),
    "_exit(255)": ("os._exit(255)", 255, None),
    "_exit in a thread": ("t = threading.Thread(target=os._exit, args=(8,)); t.start(); t.join(30)", 8, None),
    "_exit in a repr": ("class A:\n    def __repr__(self): os._exit(9)\nA()", 9, None),
    "_exit in await": ("async def f(): os._exit(10)\nawait f()", 10, None),
    "exec": ("os.execv('/bin/sh', ['sh', '-c', 'exit 11'])", 11, None),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL); signal.pause()", -9, "SIGKILL"),
    "SIGUSR1": ("signal.raise_signal(signal.SIGUSR1); signal.pause()", -10, "SIGUSR1"),
    "by a child": ("subprocess.run(f'kill -9 {os.getpid()}', shell=True); signal.pause()", -9, "SIGKILL"),
    "segfault": ("ctypes.string_at(0)", -11, "SIGSEGV"),
    "abort": ("os.abort()", -6, "SIGABRT"),
    "closerange": ("os.closerange(3, 200)", None, None),
    "close all": ("os.closerange(0, 4096)", None, None),
}
IMPORTS = "import ctypes, os, signal, subprocess, sys, threading"


@pytest.mark.parametrize("names", [[*DEATHS][:7], [*DEATHS][7:]], ids=["with a code", "by a signal"])
def test_a_kernel_that_dies_is_seen_at_once_with_its_code_and_the_output_so_far(
    registry: BlockingRegistry, names: list[str]
) -> None:
    for name in names:
        code, exit_code, signal_name = DEATHS[name]
        registry.execute(IMPORTS, owner="a")
        started = time.monotonic()
        write = "print('before'); print('aside', file=sys.stderr); sys.stdout.write('half')"
        result = registry.execute(f"{write}\n{code}", owner="a", timeout=20)
        assert time.monotonic() - started < 2, name
        assert result.status is CellStatus.DIED, name
        assert result.stdout == "before\nhalf", name
        # Without its descriptors the kernel's own libraries fail in their own words, after the cell's.
        words = result.stderr if exit_code is not None else result.stderr[:6]
        assert words == "aside\n", name
        assert (result.ran, result.error, result.kernel.ended) == (True, None, True), name
        if exit_code is not None:
            assert (result.exit_code, result.signal) == (exit_code, signal_name), name
        payload = result.to_dict()
        assert payload["status"] == "error", name
        assert "lost" in payload["error"], name
        assert signal_name is None or signal_name in payload["error"], name
        assert "memory" not in payload["error"], "never out of memory without proof"
        after = still_answers(registry)
        assert (after.kernel.lost, after.kernel.reused) == (Loss.DIED, False), name


@pytest.mark.parametrize(
    "write",
    [
        "print('x', flush=True)",
        "[print('x') for _ in range(3000)]",
        "print('x', end='')",
        "os.write(1, b'x\\n'); os.write(1, b'x\\n')",
        "print('x'); os.write(1, b'y\\n'); print('z')",
        "subprocess.run(['sh', '-c', 'echo x; echo x'])",
    ],
    ids=["flushed", "many lines", "no newline", "raw", "mixed", "by a child"],
)
def test_all_output_before_a_death_is_kept(registry: BlockingRegistry, write: str) -> None:
    registry.execute(IMPORTS, owner="a")
    expected = registry.execute(f"{write}; None", owner="a").stdout
    assert expected
    for end in ("os._exit(7)", "os.kill(os.getpid(), 9)"):
        registry.execute(IMPORTS, owner="a")
        result = registry.execute(f"{write}\n{end}", owner="a", timeout=10)
        assert (result.status, result.stdout) == (CellStatus.DIED, expected), end
    still_answers(registry)


def test_what_has_left_the_pipe_when_the_kernel_dies_is_kept(registry: BlockingRegistry) -> None:
    code = """
import os, signal
from hermes_kernel.kernel import outputs
print('before')
outputs.OutputLog.append = lambda *args, **named: os._exit(7)  # right after the read
os.write(1, b'raw\\n')
signal.pause()
"""
    result = registry.execute(code, owner="a", timeout=10)
    assert (result.status, result.stdout) == (CellStatus.DIED, "before\nraw\n")
    still_answers(registry)


def test_a_death_is_seen_though_a_child_keeps_the_pipes_open(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="a")
    started = time.monotonic()
    code = "import os, subprocess; subprocess.Popen(['sleep', '600']); os._exit(3)"
    result = registry.execute(code, owner="a", timeout=30)
    assert (result.status, result.exit_code) == (CellStatus.DIED, 3)
    assert time.monotonic() - started < 2
    still_answers(registry)


def test_a_kernel_that_died_between_two_calls_is_replaced_and_said(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    (info,) = registry.kernels()
    assert info.pid is not None
    kernel = psutil.Process(info.pid)
    kernel.kill()
    assert traces.eventually(lambda: traces.is_gone(kernel))
    after = still_answers(registry)
    assert (after.kernel.lost, after.kernel.reused) == (Loss.DIED, False)
    assert after.to_dict()["kernel"]["state_reset"] is True
    assert still_answers(registry).kernel.lost is None


@pytest.mark.parametrize(
    "fork",
    [
        "pid = os.fork()",
        "pid = os.fork() or os.fork()",
    ],
    ids=["fork", "two"],
)
def test_a_forked_copy_of_the_kernel_never_speaks_for_it(registry: BlockingRegistry, fork: str) -> None:
    registry.execute("import os", owner="a")
    code = f"{fork}\nprint('parent' if pid else 'child')\nif pid: os.wait(); None"
    result = registry.execute(code, owner="a", timeout=10)
    assert result.status is CellStatus.OK
    assert "parent" in result.stdout
    answers = [registry.execute(f"print({n}); {n}", owner="a", timeout=10) for n in range(5)]
    assert [answer.value for answer in answers] == ["0", "1", "2", "3", "4"]
    assert [answer.stdout for answer in answers] == ["0\n", "1\n", "2\n", "3\n", "4\n"]
    assert [answer.execution_count for answer in answers] == [3, 4, 5, 6, 7]
    assert still_answers(registry).kernel.reused


@pytest.mark.parametrize(
    "code", ["exit = 3; exit", "exit, quit = 3, 4", "quit = lambda: 5", "exit.__class__"]
)
def test_exit_and_quit_are_plain_names(registry: BlockingRegistry, code: str) -> None:
    result = registry.execute(code, owner="a")
    assert result.status is CellStatus.OK, result.text
    assert registry.execute("6 * 7", owner="a").value == "42"


FORKED = {
    "exit": ("sys.exit(3)", 3, ""),
    "exit without a code": ("sys.exit()", 0, ""),
    "exit with a message": ("sys.exit('fatal: boom')", 1, "fatal: boom\n"),
    "error": ("raise ValueError('in the child')", 1, "ValueError: in the child\n"),
    "interrupt": ("raise KeyboardInterrupt", 1, "KeyboardInterrupt\n"),
    "end of the cell": ("pass", 0, ""),
}


def test_a_forked_child_ends_as_any_python_and_shows_its_error(registry: BlockingRegistry) -> None:
    registry.execute("import os, sys", owner="a")
    for name, (body, exit_code, shown) in FORKED.items():
        code = f"""
pid = os.fork()
if pid == 0:
    {body}
else:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"""
        result = registry.execute(code, owner="a", timeout=10)
        assert (result.status, result.stdout) == (CellStatus.OK, f"{exit_code}\n"), name
        assert result.stderr.endswith(shown), name
        assert bool(result.stderr) == bool(shown), name
        assert ("Traceback" in result.stderr) == shown.startswith(("ValueError", "Keyboard")), name
        assert still_answers(registry).kernel.reused, name


def test_what_a_task_raises_is_the_error_of_the_cell_that_awaits_it(registry: BlockingRegistry) -> None:
    registry.execute("import asyncio\nz = 1", owner="a")
    for wait in ("asyncio.gather(f())", "asyncio.create_task(f())", "asyncio.wait_for(f(), 5)"):
        code = f"async def f(): raise KeyboardInterrupt\nawait {wait}"
        result = registry.execute(code, owner="a", timeout=10)
        assert (result.status, result.kernel.ended) == (CellStatus.ERROR, False), wait
        assert result.error is not None
        assert result.error.ename == "KeyboardInterrupt"
        assert still_answers(registry).kernel.reused, wait
    assert registry.execute("z", owner="a").value == "1"


def test_an_exit_in_a_task_that_the_cell_awaits_is_the_cells(registry: BlockingRegistry) -> None:
    code = "import asyncio\nasync def f(): raise SystemExit(3)\nawait asyncio.create_task(f())"
    result = registry.execute(code, owner="a", timeout=10)
    assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.EXITED, 3, True)
    assert still_answers(registry).kernel.lost is Loss.EXITED


ENDLESS = {
    "stop": "asyncio.get_event_loop().stop()",
    "stop and wait": "asyncio.get_event_loop().stop(); await asyncio.sleep(0.1)",
    "stop later": "asyncio.get_event_loop().call_later(0.01, asyncio.get_event_loop().stop)",
    "a task that nobody awaits": "async def f(): raise KeyboardInterrupt\nt = asyncio.create_task(f())",
    "an exit that nobody awaits": "async def f(): raise SystemExit(3)\nt = asyncio.create_task(f())",
    "a callback": "def f(): raise KeyboardInterrupt\nasyncio.get_event_loop().call_soon(f); None",
}


def test_the_kernel_serves_on_when_its_loop_is_stopped(registry: BlockingRegistry) -> None:
    registry.execute("import asyncio\nz = 1", owner="a")
    for name, code in ENDLESS.items():
        result = registry.execute(code, owner="a", timeout=10)
        assert (result.status, result.kernel.ended) == (CellStatus.OK, False), name
        assert registry.execute("await asyncio.sleep(0.1); z", owner="a", timeout=10).value == "1", name
        assert still_answers(registry).kernel.reused, name


def test_a_signal_handler_that_exits_between_two_cells_ends_the_kernel(registry: BlockingRegistry) -> None:
    registry.execute(
        "import signal, sys; _ = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))", owner="a"
    )
    (info,) = registry.kernels()
    assert info.pid is not None
    kernel = psutil.Process(info.pid)
    kernel.send_signal(signal.SIGUSR1)
    assert traces.eventually(lambda: traces.is_gone(kernel))
    assert still_answers(registry).kernel.lost is not None
