"""Code that is odd in itself, or turns against its own interpreter or kernel: the call comes back."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry, CellStatus, Limits, Loss

from .test_cells_basics import still_answers

Make = Callable[..., BlockingRegistry]


def test_source_of_ten_megabytes_runs(registry: BlockingRegistry) -> None:
    code = "x = '''" + "y" * 10_000_000 + "'''; len(x)"
    result = registry.execute(code, owner="a", timeout=60)
    assert (result.status, result.value) == (CellStatus.OK, "10000000")
    assert still_answers(registry).kernel.reused


ODD_SOURCES = {
    "a sum of 200,000 terms": ("+".join(["1"] * 200_000), {"RecursionError", "MemoryError"}),
    "blanks and tabs": ("if 1:\n\tx = 1\n        y = 2", {"TabError"}),
    "a number of 5,000 digits": ("int('9' * 5000)", {"ValueError"}),
}


@pytest.mark.parametrize(("code", "enames"), ODD_SOURCES.values(), ids=ODD_SOURCES)
def test_source_that_is_too_much_for_python_is_an_error(
    registry: BlockingRegistry, code: str, enames: set[str]
) -> None:
    registry.execute("z = 1", owner="a")
    result = registry.execute(code, owner="a", timeout=60)
    assert result.status is CellStatus.ERROR
    assert result.error is not None
    assert result.error.ename in enames
    assert len(result.text.encode()) < 51_000
    assert registry.execute("z", owner="a").value == "1"
    assert still_answers(registry).kernel.reused


def test_the_magics_of_every_day_work(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    assert registry.execute("out = !echo a b\nprint(out)", owner="a").stdout == "['a b']\n"
    timed = registry.execute("%timeit -n1 -r1 1+1", owner="a")
    assert (timed.status, timed.error, "1 loop" in timed.text) == (CellStatus.OK, None, True)
    registry.execute("_ = open('s.py', 'w').write('print(6 * 7); kept = 1')", owner="a")
    assert registry.execute("%run s.py", owner="a").stdout == "42\n"
    assert registry.execute("kept", owner="a").value == "1"
    for code in ("%gui qt", "%gui tk", "%matplotlib qt", "%debug", "%no_such_magic", "%%no_such_magic\nx"):
        result = registry.execute(code, owner="a", timeout=20)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, code
        assert still_answers(registry).kernel.reused, code
    assert registry.execute("z", owner="a").value == "1"
    assert registry.execute("%reset -f", owner="a").status is CellStatus.OK
    assert registry.execute("'z' in globals()", owner="a").value == "False"
    assert still_answers(registry).kernel.reused


SPOILED = {
    "builtins deleted": "del __builtins__",
    "all names gone": "globals().clear()",
    "a name of a builtin": "print = open = len = 3",
    "builtins that fail": "import builtins; builtins.print = builtins.open = builtins.input = 3",
    "imports that fail": "import sys; sys.meta_path.clear(); sys.path.clear()",
    "displayhook": "import sys\ndef hook(x): raise ValueError('hook')\nsys.displayhook = hook",
    "excepthook": "import sys\ndef hook(*a): raise ValueError\nsys.excepthook = sys.unraisablehook = hook",
    "threading.excepthook": (
        "import threading\ndef hook(*a): raise ValueError\nthreading.excepthook = hook\n"
        "t = threading.Thread(target=lambda: 1/0); t.start(); t.join()"
    ),
    "a trace that fails": "import sys\ndef trace(*a): raise ValueError('trace')\nsys.settrace(trace)",
    "a profile that fails": "import sys\ndef profile(*a): raise ValueError('p')\nsys.setprofile(profile)",
    "faulthandler": "import faulthandler; faulthandler.enable(); faulthandler.dump_traceback_later(600)",
    "a directory that is gone": "import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "umask": "import os; _ = os.umask(0o777)",
    "time zone": "import os, time; os.environ['TZ'] = '!nonsense'; time.tzset()",
    "locale": "import locale; _ = locale.setlocale(locale.LC_ALL, 'C')",
    "a formatter that fails": (
        "get_ipython().display_formatter.formatters['text/plain'].for_type(str, lambda *a: 1/0)"
    ),
}


def test_what_a_cell_does_to_its_interpreter_does_not_keep_the_next_one_from_an_answer(
    registry: BlockingRegistry,
) -> None:
    for name, code in SPOILED.items():
        registry.execute("z = 1", owner=name)
        spoiled = registry.execute(code, owner=name, timeout=10)
        assert spoiled.status in {CellStatus.OK, CellStatus.ERROR}, name
        after = registry.execute("6 * 7", owner=name, timeout=10)
        if name == "displayhook":
            assert after.error is None or after.error.ename == "ValueError", name
        else:
            assert (after.status, after.value, after.kernel.reused) == (CellStatus.OK, "42", True), name
        failed = registry.execute("1 / 0", owner=name, timeout=10)
        assert failed.error is not None
        assert failed.error.ename == "ZeroDivisionError", name
        registry.close_owner(name)


@pytest.mark.parametrize(
    "code",
    [
        "import builtins; vars(builtins).clear()",
        "import builtins; builtins.__import__ = None",
        "import sys; sys.modules.clear()",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import sys; sys.setrecursionlimit(10**9)\nclass R:\n    def __repr__(self): return repr([R()])\nR()",
    ],
    ids=["no builtins", "no imports", "no modules", "recursion", "recursion in C"],
)
def test_a_cell_that_ruins_its_interpreter_costs_at_most_the_kernel(make_registry: Make, code: str) -> None:
    registry = make_registry(limits=Limits(memory_limit=2**30, timeout=2))
    registry.execute("z = 1", owner="a")
    for call in (code, "6 * 7"):
        began = time.monotonic()
        result = registry.execute(call, owner="a", timeout=2)
        assert time.monotonic() - began < 2 + 5 + 2  # the limit, the time to begin, and a little
        assert len(result.text.encode()) < 61_000
    after = registry.execute("6 * 7", owner="a")
    assert after.value == "42"
    assert after.kernel.lost in {None, Loss.DIED, Loss.TIMED_OUT}
    still_answers(registry)


RAISED = {
    "a group of a thousand": (
        "g = ValueError('deep')\nfor _ in range(1000): g = ExceptionGroup('g', [g])\nraise g",
        "ExceptionGroup",
    ),
    "a chain of ten thousand": (
        "e = ValueError('x')\nfor _ in range(10_000):\n"
        "    n = ValueError('x'); n.__cause__ = e; e = n\nraise e",
        "ValueError",
    ),
    "a circle of causes": (
        "e, f = ValueError('e'), ValueError('f'); e.__cause__, f.__cause__ = f, e; raise e",
        "ValueError",
    ),
}


@pytest.mark.parametrize(("code", "ename"), RAISED.values(), ids=RAISED)
def test_an_exception_of_any_shape_is_an_error_within_its_budget(
    registry: BlockingRegistry, code: str, ename: str
) -> None:
    result = registry.execute(code, owner="a", timeout=20)
    assert result.status is CellStatus.ERROR
    assert result.error is not None
    assert result.error.ename == ename
    assert len(result.error.traceback.encode()) <= 10_500
    assert still_answers(registry).kernel.reused


def test_an_exit_with_an_object_is_an_exit_with_code_one(registry: BlockingRegistry) -> None:
    result = registry.execute("raise SystemExit(object())", owner="a", timeout=10)
    assert (result.status, result.exit_code) == (CellStatus.EXITED, 1)
    assert "<object object at" in result.text
    assert still_answers(registry).kernel.lost is Loss.EXITED


def test_an_alarm_that_nobody_handles_is_told_by_its_name(registry: BlockingRegistry) -> None:
    code = "import signal; signal.setitimer(signal.ITIMER_REAL, 0.1); signal.pause()"
    result = registry.execute(code, owner="a", timeout=20)
    assert (result.status, result.signal, result.exit_code) == (CellStatus.DIED, "SIGALRM", -14)
    assert still_answers(registry).kernel.lost is Loss.DIED


def test_a_module_that_ends_the_process_when_it_is_imported_is_a_death_with_its_code(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    (tmp_path / "bye.py").write_text("import os; os._exit(9)")
    result = registry.execute("print('before'); import bye", owner="a", cwd=tmp_path, timeout=20)
    assert (result.status, result.exit_code, result.stdout) == (CellStatus.DIED, 9, "before\n")
    after = registry.execute("6 * 7", owner="a", cwd=tmp_path)
    assert (after.value, after.kernel.lost) == ("42", Loss.DIED)


def test_a_picture_of_fifty_megabytes_says_what_was_left_out(registry: BlockingRegistry) -> None:
    code = "class P:\n    def _repr_png_(self): return b'\\x89PNG' + bytes(50_000_000)\nP()"
    result = registry.execute(code, owner="a", timeout=20)
    assert result.status is CellStatus.OK
    assert "left out: image/png of 50,0" in result.text
    assert len(result.to_json()) < 100_000
    assert still_answers(registry).kernel.reused


def test_a_script_in_html_is_no_text(registry: BlockingRegistry) -> None:
    code = "from IPython.display import HTML, display\ndisplay(HTML('<script>alert(1)</script><b>bold</b>'))"
    result = registry.execute(code, owner="a")
    assert (result.text.strip(), result.error) == ("bold", None)


# What a cell can do to the kernel that runs it: its own results are worth nothing then.
TAKEN_APART = {
    "what runs a cell": "k.do_execute = lambda *a, **k: {'status': 'ok', 'execution_count': 1}",
    "its shell": "get_ipython().run_cell_async = get_ipython().run_cell = None",
    "its session": "k.session = None",
    "its key": "k.session.key = b'another'",
    "its output thread": "k.iopub_thread.stop()",
    "its output socket": "k.iopub_socket = None",
    "its event loop": "import asyncio; asyncio.get_event_loop().stop()",
    "all its sockets": "import gc, zmq\n[s.close(0) for s in gc.get_objects() if isinstance(s, zmq.Socket)]",
    "all its descriptors": "import os; os.closerange(0, 4096)",
}


@pytest.mark.parametrize("code", TAKEN_APART.values(), ids=TAKEN_APART)
def test_a_cell_that_takes_its_kernel_apart_hurts_its_own_results_alone(
    registry: BlockingRegistry, code: str
) -> None:
    registry.execute("x = 'other'", owner="b")
    registry.execute("k = get_ipython().kernel", owner="a")
    for call in (code, "6 * 7"):
        began = time.monotonic()
        result = registry.execute(call, owner="a", timeout=1)
        assert time.monotonic() - began < 1 + 5 + 2
        result.to_json()
        other = registry.execute("x", owner="b")
        assert (other.value, other.kernel.lost) == ("'other'", None)
    fresh = registry.execute("6 * 7", owner="a", reset=True)
    assert (fresh.status, fresh.value) == (CellStatus.OK, "42")
    assert still_answers(registry).kernel.reused


def test_what_a_failed_cell_holds_open_is_held_until_a_reset(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    """A write transaction locks out others, later cells and other owners, as long as its kernel lives."""
    place = os.fspath(tmp_path / "database")
    connect = f"import sqlite3\ndef connect(): return sqlite3.connect({place!r}, timeout=0)\n"
    write = connect + "with connect() as c: c.execute('insert into t values (2)')\n'written'"
    begin = connect + "c = connect(); c.execute('create table t (n)'); c.commit()\n"
    failed = registry.execute(
        begin + "c.execute('begin immediate'); c.execute('insert into t values (1)'); 1 / 0", owner="a"
    )
    assert failed.status is CellStatus.ERROR
    for owner in "ab":
        locked = registry.execute(write.replace("c:", "d:").replace("c.e", "d.e"), owner=owner)
        assert locked.error is not None, owner
        assert (locked.error.ename, "locked" in locked.error.evalue) == ("OperationalError", True), owner
    freed = registry.execute(write, owner="a", reset=True)
    assert (freed.value, freed.kernel.lost) == ("'written'", Loss.RESET)
    assert registry.execute(write, owner="b").value == "'written'"


def test_a_callback_of_the_bootstrap_can_close_what_a_failed_cell_has_left(
    make_registry: Make, tmp_path: Path
) -> None:
    bootstrap = """
import sqlite3
def close(*_):
    for thing in list(globals().values()):
        if isinstance(thing, sqlite3.Connection): thing.close()
get_ipython().events.register('post_run_cell', close)
"""
    registry = make_registry(bootstrap=bootstrap)
    connect = f"c = sqlite3.connect({os.fspath(tmp_path / 'database')!r}, timeout=0); c.execute"
    assert registry.execute(f"{connect}('create table t (n)')", owner="a").status is CellStatus.OK
    failed = registry.execute(f"{connect}('begin immediate'); 1 / 0", owner="a")
    assert failed.status is CellStatus.ERROR
    after = registry.execute(f"d{connect[1:].replace('c.e', 'd.e')}('begin immediate'); 'free'", owner="a")
    assert (after.value, after.kernel.reused) == ("'free'", True), after.text
