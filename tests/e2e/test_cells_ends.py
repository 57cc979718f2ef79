"""Cells that end their own kernel: by exit, by a crash, by a signal, by replacing it."""

import time

import pytest

from hermes_kernel import BlockingRegistry, CellStatus, Loss

from .test_cells_basics import still_answers

EXITS = {
    "sys.exit(3)": ("import sys; sys.exit(3)", 3),
    "sys.exit(0)": ("import sys; sys.exit(0)", 0),
    "sys.exit(None)": ("import sys; sys.exit(None)", 0),
    "sys.exit()": ("import sys; sys.exit()", 0),
    "sys.exit(True)": ("import sys; sys.exit(True)", 1),
    "sys.exit(False)": ("import sys; sys.exit(False)", 0),
    "sys.exit(255)": ("import sys; sys.exit(255)", 255),
    "raise SystemExit": ("raise SystemExit", 0),
    "raise SystemExit(5)": ("raise SystemExit(5)", 5),
    "exit()": ("exit()", 0),
    "quit()": ("quit()", 0),
    "exit": ("exit", 0),
    "quit": ("quit", 0),
    "exit(3)": ("exit(3)", 3),
    "quit(4)": ("quit(4)", 4),
    "exit in a function": ("def f():\n    exit(6)\nf()", 6),
    "in a function": ("import sys\ndef f(): sys.exit(7)\nf()", 7),
    "in try/finally": ("import sys\ntry: sys.exit(8)\nfinally: x = 1", 8),
    "through except Exception": ("import sys\ntry: sys.exit(9)\nexcept Exception: pass", 9),
    "in a coroutine": ("import sys\nasync def f(): sys.exit(10)\nawait f()", 10),
    "in a repr": ("import sys\nclass A:\n    def __repr__(self): sys.exit(11)\nA()", 11),
    "from an error": ("import sys\ntry: 1/0\nexcept ZeroDivisionError: sys.exit(12)", 12),
    "by a subclass": ("class Bye(SystemExit): pass\nraise Bye(13)", 13),
    "by an IntEnum": ("import enum, sys\nclass C(enum.IntEnum):\n    BAD = 14\nsys.exit(C.BAD)", 14),
}


@pytest.mark.parametrize(("code", "exit_code"), EXITS.values(), ids=EXITS)
def test_an_exit_ends_the_kernel_with_its_real_code(
    registry: BlockingRegistry, code: str, exit_code: int
) -> None:
    registry.execute("z = 1", owner="a")
    result = registry.execute(f"print('before')\n{code}", owner="a", timeout=10)
    assert (result.status, result.exit_code, result.signal) == (CellStatus.EXITED, exit_code, None)
    assert (result.stdout, result.error, result.ran) == ("before\n", None, True)
    assert (result.kernel.ended, result.kernel.lost) == (True, None)
    assert "Traceback" not in result.text
    assert result.to_dict()["status"] == ("success" if exit_code == 0 else "error")
    after = still_answers(registry)
    assert (after.kernel.lost, after.kernel.reused, after.kernel.ended) == (Loss.EXITED, False, False)
    assert registry.execute("z", owner="a").error.ename == "NameError"


@pytest.mark.parametrize(
    ("code", "message"),
    [
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
        ("import sys\nclass Bad:\n    def __str__(self): raise ValueError\nsys.exit(Bad())", ""),
        ("import sys\nclass Bad:\n    def __str__(self): return 3\nsys.exit(Bad())", ""),
    ],
)
def test_an_exit_with_a_message_has_code_one_and_shows_the_message(
    registry: BlockingRegistry, code: str, message: str
) -> None:
    result = registry.execute(code, owner="a", timeout=10)
    assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.EXITED, 1, True)
    assert message in result.text
    assert message in result.to_dict()["output"]
    result.to_json().encode()
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


@pytest.mark.parametrize(
    "code",
    [
        "import sys\ntry: sys.exit(3)\nexcept SystemExit: pass",
        "import sys, threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()",
        "import subprocess as s, sys; s.run([sys.executable, '-c', 'raise SystemExit(3)']); None",
        "import os\npid = os.fork()\nif not pid: os._exit(3)\nos.waitpid(pid, 0); None",
        "import multiprocessing as m, sys; p = m.get_context('fork').Process(target=sys.exit, args=(3,)); "
        "p.start(); p.join()",
    ],
    ids=["caught", "in a thread", "in a child", "in a fork", "in a worker"],
)
def test_an_exit_that_is_not_the_cells_own_keeps_the_kernel(registry: BlockingRegistry, code: str) -> None:
    registry.execute("z = 1", owner="a")
    result = registry.execute(code, owner="a", timeout=10)
    assert (result.status, result.exit_code, result.kernel.ended) == (CellStatus.OK, 0, False)
    assert still_answers(registry).kernel.reused
    assert registry.execute("z", owner="a").value == "1"


@pytest.mark.parametrize(
    "before",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
        "import subprocess; subprocess.Popen(['sleep', '600'])",
        "import atexit, time; atexit.register(time.sleep, 600)",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    ],
    ids=["thread", "child", "atexit", "deaf to SIGTERM"],
)
def test_what_would_keep_the_process_alive_does_not_hold_an_exit(
    registry: BlockingRegistry, before: str
) -> None:
    registry.execute("1", owner="a")
    started = time.monotonic()
    result = registry.execute(f"{before}\nimport sys; sys.exit(3)", owner="a", timeout=30)
    assert time.monotonic() - started < 5
    assert (result.status, result.exit_code) == (CellStatus.EXITED, 3)
    assert still_answers(registry).kernel.lost is Loss.EXITED


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


@pytest.mark.parametrize(("code", "exit_code", "signal"), DEATHS.values(), ids=DEATHS)
def test_a_kernel_that_dies_is_seen_at_once_with_its_code_and_the_output_so_far(
    registry: BlockingRegistry, code: str, exit_code: int | None, signal: str | None
) -> None:
    registry.execute(IMPORTS, owner="a")
    started = time.monotonic()
    result = registry.execute(
        f"print('before'); print('aside', file=sys.stderr); sys.stdout.write('half')\n{code}",
        owner="a",
        timeout=20,
    )
    assert time.monotonic() - started < 2
    assert result.status is CellStatus.DIED
    assert (result.stdout, result.stderr) == ("before\nhalf", "aside\n")
    assert (result.ran, result.error, result.kernel.ended) == (True, None, True)
    if exit_code is not None:
        assert (result.exit_code, result.signal) == (exit_code, signal)
    payload = result.to_dict()
    assert payload["status"] == "error"
    assert "lost" in payload["error"]
    assert signal is None or signal in payload["error"]
    assert "memory" not in payload["error"], "never out of memory without proof"
    after = still_answers(registry)
    assert (after.kernel.lost, after.kernel.reused) == (Loss.DIED, False)


@pytest.mark.parametrize(
    "write",
    [
        "print('x', flush=True)",
        "[print('x') for _ in range(3000)]",
        "os.write(1, b'x' * 3000)",
        "subprocess.run(['sh', '-c', 'echo x; echo x'])",
        "print('x', end='')",
    ],
    ids=["flushed", "many lines", "raw", "child", "no newline"],
)
@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), 9)"])
def test_all_output_before_a_death_is_kept(registry: BlockingRegistry, write: str, end: str) -> None:
    registry.execute(IMPORTS, owner="a")
    expected = registry.execute(f"{write}; None", owner="a").stdout
    assert expected
    result = registry.execute(f"{write}\n{end}", owner="a", timeout=10)
    assert (result.status, result.stdout) == (CellStatus.DIED, expected)
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
    import os
    import signal

    registry.execute("z = 1", owner="a")
    (info,) = registry.kernels()
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)
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
    result = registry.execute(f"{fork}\nprint('parent' if pid else 'child')", owner="a", timeout=10)
    assert result.status is CellStatus.OK
    assert "parent" in result.stdout
    answers = [registry.execute(f"print({n}); {n}", owner="a", timeout=10) for n in range(5)]
    assert [answer.value for answer in answers] == ["0", "1", "2", "3", "4"]
    assert [answer.stdout for answer in answers] == ["0\n", "1\n", "2\n", "3\n", "4\n"]
    assert [answer.execution_count for answer in answers] == [3, 4, 5, 6, 7]
    assert still_answers(registry).kernel.reused
