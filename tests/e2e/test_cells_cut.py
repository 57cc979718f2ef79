"""Cells that are cut by their time limit or by their caller, with and without a grace."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry, CellStatus, Limits, Loss

from .test_cells_basics import still_answers

DEAF = {
    "swallows in sleep": ("while True:\n    try: time.sleep(0.2)\n    except BaseException: pass"),
    "swallows busy": (
        "while True:\n    try:\n        for _ in iter(int, 1): pass\n    except BaseException: pass"
    ),
    "swallows in await": ("while True:\n    try: await asyncio.sleep(0.2)\n    except BaseException: pass"),
    "ignores": "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(0.2)",
    "own handler": "signal.signal(signal.SIGINT, lambda *a: None)\nwhile True: time.sleep(0.2)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
}
BUSY = {
    "holds the GIL": "ctypes.PyDLL(None).sleep(600)",
    "busy": "while True: pass",
    "regular expression": "re.match('(a+)+$', 'a' * 64 + 'b')",
    "await": "await asyncio.sleep(60)",
    "swallows": DEAF["swallows in sleep"],
}
IMPORTS = "import asyncio, ctypes, os, re, signal, subprocess, sys, threading, time"


@pytest.mark.parametrize(("cases", "grace"), [(DEAF, 0.3), (BUSY, 0)], ids=["after the grace", "at once"])
def test_a_cell_that_is_not_interrupted_costs_its_kernel(
    make_registry: Callable[..., BlockingRegistry], cases: dict[str, str], grace: float
) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=grace))
    for name, code in cases.items():
        registry.execute(f"{IMPORTS}\nz = 1", owner="a")
        started = time.monotonic()
        result = registry.execute(f"print('begun')\n{code}", owner="a", timeout=0.5)
        assert time.monotonic() - started < 0.5 + grace + 2, name
        assert (result.status, result.ran, result.exit_code) == (CellStatus.TIMED_OUT, True, -1), name
        assert (result.stdout, result.kernel.ended) == ("begun\n", True), name
        assert "state was lost" in result.to_dict()["error"], name
        after = still_answers(registry)
        assert (after.kernel.lost, after.kernel.reused) == (Loss.TIMED_OUT, False), name


HEEDFUL = {
    "sleep": "time.sleep(60)",
    "await": "await asyncio.sleep(60)",
    "gather": "await asyncio.gather(*(asyncio.sleep(60) for _ in range(3)))",
    "await an event": "await asyncio.Event().wait()",
    "await a thread": "await asyncio.to_thread(threading.Event().wait, 60)",
    "async with": "async with asyncio.timeout(60): await asyncio.sleep(60)",
    "busy": "while True: pass",
    "child": "subprocess.run(['sleep', '60'])",
    "lock": "threading.Event().wait(60)",
    "finally": "try: time.sleep(60)\nfinally: print('cleaned')",
    "a handler that raises": (
        "def fail(*_): raise OSError('no')\nsignal.signal(signal.SIGINT, fail)\ntime.sleep(60)"
    ),
    "the main thread masks it": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\nwhile True: time.sleep(0.2)"
    ),  # for good: the last one
}


def test_a_cell_that_heeds_the_interrupt_within_the_grace_keeps_the_state(
    make_registry: Callable[..., BlockingRegistry],
) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=5))
    registry.execute(IMPORTS, owner="a")
    for name, code in HEEDFUL.items():
        registry.execute("z = 1", owner="a")
        result = registry.execute(f"z = 2; print('begun')\n{code}\nz = 3", owner="a", timeout=0.3)
        assert result.duration < 5, name
        assert (result.status, result.ran, result.exit_code) == (CellStatus.TIMED_OUT, True, -1), name
        assert (result.kernel.ended, result.kernel.lost) == (False, None), name
        assert result.stdout.startswith("begun\n"), name
        error = result.to_dict()["error"]
        assert "state kept" in error, name
        assert "state was lost" not in error, name
        after = still_answers(registry)
        assert (after.kernel.reused, after.kernel.lost) == (True, None), name
        assert registry.execute("z", owner="a").value == "2", name
        assert registry.execute("await asyncio.sleep(0, 'awaited')", owner="a").value == "'awaited'", name


@pytest.mark.parametrize("grace", [0, 5])
@pytest.mark.parametrize("code", ["await asyncio.sleep(60)", "time.sleep(60)"], ids=["await", "sleep"])
def test_an_interrupt_by_the_caller_is_heard_and_says_what_became_of_the_state(
    make_registry: Callable[..., BlockingRegistry], tmp_path: Path, code: str, grace: float
) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=grace))
    registry.execute(f"{IMPORTS}\nz = 1", owner="a")
    mark = tmp_path / "running"
    askers = set()

    def interrupted() -> bool:
        askers.add(threading.get_ident())
        return mark.exists()

    code = f"print('begun')\nopen({str(mark)!r}, 'w').close()\n{code}"
    result = registry.execute(code, owner="a", timeout=30, interrupted=interrupted)
    assert (result.status, result.ran, result.exit_code) == (CellStatus.INTERRUPTED, True, -1)
    assert result.stdout == "begun\n"
    assert result.duration < 10
    assert result.kernel.ended == (grace == 0)
    error = result.to_dict()["error"]
    assert "interrupted" in error
    assert ("state kept" if grace else "state was lost") in error
    assert result.to_dict()["output"].splitlines()[-1].startswith("[execution interrupted")
    assert askers == {threading.get_ident()}
    after = still_answers(registry)
    assert after.kernel.lost is (None if grace else Loss.INTERRUPTED)


WRITES = {
    "both streams": ("print('partial'); print('aside', file=sys.stderr)", "partial\n", "aside\n"),
    "flushed": (
        "print('partial', flush=True); print('aside', file=sys.stderr, flush=True)",
        "partial\n",
        "aside\n",
    ),
    "no newline": ("print('partial', end=''); print('aside', end='', file=sys.stderr)", "partial", "aside"),
    "raw": ("os.write(1, b'partial\\n'); os.write(2, b'aside\\n')", "partial\n", "aside\n"),
    "by a child": ("subprocess.run('echo partial; echo aside >&2', shell=True)", "partial\n", "aside\n"),
    "many lines": ("for i in range(2000): print(i)", "".join(f"{i}\n" for i in range(2000)), ""),
}


@pytest.mark.parametrize("grace", [0, 5])
def test_the_output_before_a_cut_is_returned(
    make_registry: Callable[..., BlockingRegistry], grace: float
) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=grace))
    for name, (write, stdout, stderr) in WRITES.items():
        registry.execute(IMPORTS, owner="a")
        result = registry.execute(f"{write}\ntime.sleep(60)", owner="a", timeout=0.5)
        assert result.status is CellStatus.TIMED_OUT, name
        assert result.stdout == stdout, name
        assert result.stderr.startswith(stderr), name
        assert stdout in result.text, name
        assert stderr in result.text, name
        payload = result.to_dict()
        assert payload["output"].startswith(stdout.rstrip("\n")), name
        assert stderr in payload["output"], name
        assert payload["output"].endswith("⏰ " + payload["error"]), name
        still_answers(registry)


def test_a_cell_that_writes_now_and_then_is_shown_up_to_the_cut(registry: BlockingRegistry) -> None:
    registry.execute("import time", owner="a")
    code = "for i in range(100): print('step', i, flush=True); time.sleep(0.2)"
    result = registry.execute(code, owner="a", timeout=2)
    assert result.status is CellStatus.TIMED_OUT
    lines = result.text.splitlines()
    assert lines == [f"step {i}" for i in range(len(lines))]
    assert 8 <= len(lines) <= 10


SLOW = {
    "repr": "class S:\n    def __repr__(self): time.sleep(60)\nS()",
    "repr in a list": "class S:\n    def __repr__(self): time.sleep(60)\n[S()]",
    "_repr_html_": "class S:\n    def _repr_html_(self): time.sleep(60)\nS()",
    "str of an exception": "class S(Exception):\n    def __str__(self): time.sleep(60)\nraise S('s')",
    "repr of an argument": "class S:\n    def __repr__(self): time.sleep(60)\nraise ValueError(S())",
    "endless repr": "class S:\n    def __repr__(self):\n        while True: pass\nS()",
}


def test_a_repr_or_str_that_hangs_is_a_timeout(registry: BlockingRegistry) -> None:
    for name, code in SLOW.items():
        registry.execute("import time", owner="a")
        result = registry.execute(f"print('begun')\n{code}", owner="a", timeout=0.5)
        assert result.duration < 3, name
        assert (result.status, result.stdout, result.error) == (CellStatus.TIMED_OUT, "begun\n", None), name
        assert "state was lost" in result.to_dict()["error"], name
        assert still_answers(registry).kernel.lost is Loss.TIMED_OUT, name


def test_without_a_limit_a_cell_outlives_the_registrys_own(
    make_registry: Callable[..., BlockingRegistry],
) -> None:
    registry = make_registry(limits=Limits(timeout=0.2))
    for timeout in (None, 0, float("inf"), 1e308):
        result = registry.execute("import time; time.sleep(0.3); 'slept'", owner="a", timeout=timeout)
        assert (result.status, result.value) == (CellStatus.OK, "'slept'"), timeout
    result = registry.execute("import time; time.sleep(60)", owner="a")
    assert result.status is CellStatus.TIMED_OUT, "the registry's own limit still holds"


@pytest.mark.parametrize("timeout", [None, 0, float("inf")])
def test_a_registry_may_have_no_limit_at_all(
    make_registry: Callable[..., BlockingRegistry], timeout: float | None
) -> None:
    registry = make_registry(limits=Limits(timeout=timeout))
    assert registry.execute("6*7", owner="a").value == "42"
    result = registry.execute("while True: pass", owner="a", timeout=0.5)
    assert result.status is CellStatus.TIMED_OUT
