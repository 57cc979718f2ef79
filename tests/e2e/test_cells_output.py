"""Nothing that a cell writes breaks its kernel or its result, and nothing of it is lost."""

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, Limits

from ..conftest import DEGRADED
from .test_cells_basics import still_answers

SURROGATES = {
    "print": "print('a\\ud800b')",
    "stdout": "import sys; sys.stdout.write('a\\ud800b\\n'); None",
    "stderr": "import sys; sys.stderr.write('a\\ud800b\\n'); None",
    "low": "import sys; print('a\\udfffb', file=sys.stderr)",
    "file name": "import os; print('a' + os.fsdecode(b'\\xff') + 'b')",
    "alone": "print('a', '\\ud800', 'b', sep='')",
    "writelines": "import sys; sys.stdout.writelines(['a', '\\ud83d', 'b', '\\n'])",
    "repr": "class R:\n    def __repr__(self): return 'a\\ud800b'\nR()",
    "display": "from IPython.display import display; display({'text/plain': 'a\\ud800b'}, raw=True)",
}


def test_a_lone_surrogate_is_shown_as_an_escape_on_one_line(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="a")
    for name, code in SURROGATES.items():
        result = registry.execute(code, owner="a", timeout=5)
        assert (result.status, result.error, result.exit_code) == (CellStatus.OK, None, 0), name
        line = result.text.rstrip("\n")
        assert "\n" not in line, name
        assert (line[:1], line[-1:]) == ("a", "b"), name
        assert len(line) > 2, f"{name}: the surrogate left no trace"
        result.text.encode()
        result.to_json().encode()
        assert still_answers(registry).kernel.reused, name


def test_an_error_with_a_lone_surrogate_keeps_its_class_and_the_kernel(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="a")
    for ename, code in (
        ("ValueError", "raise ValueError('a\\ud800b')"),
        ("AssertionError", "assert False, 'a\\udcffb'"),
        ("FileNotFoundError", "open('a\\udcffb-is-not-there')"),
    ):
        result = registry.execute(code, owner="a", timeout=5)
        assert result.status is CellStatus.ERROR
        assert result.error is not None
        assert result.error.ename == ename
        assert ename in result.text
        for text in (result.text, result.error.evalue, result.error.traceback, result.to_json()):
            text.encode()
        assert still_answers(registry).kernel.reused


RAW = {
    "fd 1": ("import os; os.write(1, b'\\xff\\xfe raw\\n'); print('after')", "stdout"),
    "fd 2": ("import os; os.write(2, b'\\xff\\xfe raw\\n'); print('after')", "stderr"),
    "buffer": ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe raw\\n'); print('after')", "stdout"),
    "child's 1": ("import subprocess as s; s.run(['printf', r'\\377 raw\\n']); print('after')", "stdout"),
    "child's 2": ("import os; os.system(r\"printf '\\377 raw\\n' >&2\"); print('after')", "stderr"),
    "split": ("import os; os.write(1, b'\\xc3'); os.write(1, b'\\xa9 raw\\n'); print('after')", "stdout"),
    "escape": ("!printf '\\377\\376 raw\\n'\nprint('after')", "stdout"),
}


def test_raw_bytes_on_a_stream_reach_the_result_and_not_the_host(
    registry: BlockingRegistry, capfd: pytest.CaptureFixture[str]
) -> None:
    registry.execute("1", owner="a")
    for name, (code, stream) in RAW.items():
        result = registry.execute(code, owner="a", timeout=5)
        assert (result.status, result.error) == (CellStatus.OK, None), name
        assert " raw" in getattr(result, stream), name
        assert " raw" in result.text, name
        assert "after" in result.stdout, name
        assert "after" in result.text, name
        assert still_answers(registry).kernel.reused, name
    assert registry.execute("import os; os.write(1, 'é'.encode()); None", owner="a").stdout == "é"
    assert capfd.readouterr() == ("", "")


CLOSED = {
    "stdout.close": "import sys; sys.stdout.close()",
    "stderr.close": "import sys; sys.stderr.close()",
    "both closed": "import sys; sys.stdout.close(); sys.stderr.close()",
    "stdin.close": "import sys; sys.stdin.close()",
    "__stdout__.close": "import sys; sys.__stdout__.close(); sys.__stderr__.close()",
    "detach": "import sys; sys.stdout.detach()",
    "buffer.close": "import sys; sys.stdout.buffer.close()",
    "with stdout": "import sys\nwith sys.stdout as f: f.write('x')",
    "fds 0 1 2": "import os; [os.close(f) for f in (0,1,2)]",
    "fd 1": "import os; os.close(1)",
    "file over fd 1": "with open(1, 'w') as f: f.write('x')",
    "fds taken": "import os; [os.close(f) for f in (0,1,2)]; k = [open('/dev/null') for _ in range(3)]",
    "dup2": "import os; n = os.open(os.devnull, os.O_RDWR); [os.dup2(n, f) for f in (0,1,2)]; None",
}


def test_a_cell_that_closes_its_own_streams_ends_and_the_next_one_prints(registry: BlockingRegistry) -> None:
    for name, code in CLOSED.items():
        result = registry.execute(code, owner=name, timeout=5)
        assert result.status in {CellStatus.OK, CellStatus.ERROR, CellStatus.DIED}, name
        after = still_answers(registry, name)
        assert after.kernel.reused == (result.status is not CellStatus.DIED), name
        error = registry.execute("1/0", owner=name, timeout=5)
        assert error.error is not None
        assert error.error.ename == "ZeroDivisionError", name
        assert "ZeroDivisionError" in error.text, name
        still_answers(registry, name)
        registry.close_owner(name)


REPLACED = {
    "StringIO": "import sys, io; sys.stdout = io.StringIO(); print('hidden')",
    "stderr": "import sys, io; sys.stderr = io.StringIO(); print('hidden', file=sys.stderr)",
    "None": "import sys; sys.stdout = sys.stderr = None",
    "number": "import sys; sys.stdout = 3",
    "deleted": "import sys; del sys.stdout, sys.stderr",
    "raising": "import sys\nclass W:\n"
    "    def write(self, t): raise OSError('full')\n    flush = write\nsys.stdout = W()",
    "__stdout__": "import sys; sys.stdout = sys.__stdout__; sys.stderr = sys.__stderr__",
    "devnull": "import sys; sys.stdout = open('/dev/null', 'w')",
    "redirect left open": (
        "import contextlib, io; r = contextlib.redirect_stdout(io.StringIO()); r.__enter__(); None"
    ),
}


def test_streams_that_a_cell_replaced_are_the_next_cells_again(registry: BlockingRegistry) -> None:
    for name, code in REPLACED.items():
        registry.execute(code, owner="a", timeout=5)
        result = registry.execute("import sys; print('visible?'); print('too', file=sys.stderr)", owner="a")
        assert (result.status, result.stdout, result.stderr) == (CellStatus.OK, "visible?\n", "too\n"), name
        assert still_answers(registry).kernel.reused, name


def test_an_error_is_reported_though_the_cell_took_stderr_away(registry: BlockingRegistry) -> None:
    for code in (
        "import sys; sys.stderr = None; 1/0",
        "import sys; sys.stdout.close(); sys.stderr.close(); 1/0",
    ):
        result = registry.execute(code, owner="a", timeout=5)
        assert result.status is CellStatus.ERROR
        assert result.error is not None
        assert result.error.ename == "ZeroDivisionError"
        still_answers(registry)


def test_control_characters_and_nul_do_not_hurt(registry: BlockingRegistry) -> None:
    result = registry.execute(r"print('a\x00b\x07c\x1b[31md\x1b]0;t\x07e\u202ef')", owner="a", timeout=5)
    assert result.status is CellStatus.OK
    assert result.stdout.startswith("a")
    assert "f" in result.stdout
    result.to_json().encode()
    assert still_answers(registry).kernel.reused


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess as s; p = s.Popen(['sleep', '600']); print('done')",
        "import os; os.system('sleep 600 & echo done'); None",
        "!sleep 4 & echo done",
    ],
    ids=["Popen", "system", "shell escape"],
)
def test_a_child_that_keeps_the_streams_does_not_keep_the_cell(registry: BlockingRegistry, code: str) -> None:
    registry.execute("1", owner="a")
    result = registry.execute(code, owner="a", timeout=10)
    assert (result.status, result.stdout.split()) == (CellStatus.OK, ["done"])
    assert result.duration < 4
    assert still_answers(registry).kernel.reused


ALARMS = """
import signal

class Alarm(Exception): pass

def ring(*_): raise Alarm

signal.signal(signal.SIGALRM, ring)
caught = lines = 0
while caught < 100:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        while True:
            print(f"<{lines}>", flush=lines % 50 == 0)
            lines += 1
    except Alarm:
        caught += 1
lines
"""


@pytest.mark.skipif(
    DEGRADED is not None, reason="on stock paths such a handler may be called within ipykernel's own sending"
)
def test_a_signal_handler_that_raises_while_a_cell_prints_loses_nothing(
    make_registry: Callable[..., BlockingRegistry], tmp_path: Path
) -> None:
    registry = make_registry(limits=Limits(spill_dir=str(tmp_path / "spill")))
    result = registry.execute(ALARMS, owner="a", timeout=60)
    assert result.status is CellStatus.OK, result.text
    shown = Counter(re.findall(r"<(\d+)>", all_of(result)))
    lines = int(result.value or 0)
    assert [n for n in range(lines) if str(n) not in shown] == []
    # A line is printed again if the alarm comes between its text and the count.
    assert sum(shown.values()) - len(shown) <= 100


def all_of(result: CellResult) -> str:
    if result.truncation.spill_path is None:
        return result.stdout
    return Path(result.truncation.spill_path).read_text(encoding="utf-8")


OWN_STREAMS = {
    "wrapper": "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')",
    "descriptor": "sys.stdout = open(os.dup(1), 'w')",
    "kept wrapper": "w = sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')",
    "with an error": "w = sys.stdout = open(os.dup(1), 'w'); print('hello'); 1/0",
}


def test_what_a_stream_of_the_cells_own_has_buffered_is_the_cells(registry: BlockingRegistry) -> None:
    registry.execute("import io, os, sys", owner="a")
    for name, code in OWN_STREAMS.items():
        assert registry.execute(f"{code}\nprint('hello')", owner="a").stdout == "hello\n", name
        assert registry.execute("import gc; gc.collect(); None", owner="a").stdout == "", name


BROKEN_STREAMS = {
    "nothing": "sys.stdout = sys.stderr = None",
    "a number": "sys.stdout = 3",
    "closed": "sys.stdout = open(os.devnull, 'w'); sys.stdout.close()",
    "flush raises": "class S:\n    def flush(self): raise KeyboardInterrupt\nsys.stdout = S()",
    "flush exits": "class S:\n    def flush(self): raise SystemExit(3)\nsys.stderr = S()",
    "no flush": "class S:\n    def __getattr__(self, name): raise ValueError(name)\nsys.stdout = S()",
}


def test_a_stream_of_the_cells_own_that_cannot_be_flushed_does_not_hurt(registry: BlockingRegistry) -> None:
    registry.execute("import os, sys", owner="a")
    for name, code in BROKEN_STREAMS.items():
        result = registry.execute(code, owner="a", timeout=10)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, name  # IPython flushes them too
        assert still_answers(registry).kernel.reused, name
    assert registry.execute("print('x')", owner="a").stdout == "x\n"


@pytest.mark.parametrize("write", ["sys.stdout.buffer.write", "os.write"])
def test_half_a_character_stays_in_its_cell(registry: BlockingRegistry, write: str) -> None:
    registry.execute("import os, sys", owner="a")
    first = "1, " if write == "os.write" else ""
    half = registry.execute(f"{write}({first}b'ab\\xe2\\x82'); None", owner="a")
    assert (half.stdout, half.truncation.bytes_total) == ("ab\\xe2\\x82", 4)
    after = registry.execute(f"{write}({first}b'ef'); None", owner="a")
    assert (after.stdout, after.truncation.bytes_total) == ("ef", 2)


def test_streams_that_alternate_very_often_cost_little_and_lose_nothing(registry: BlockingRegistry) -> None:
    registry.execute("import sys", owner="a")
    code = "for i in range(20_000): sys.stdout.write('a'); sys.stderr.write('b')\nNone"
    began = time.monotonic()
    result = registry.execute(code, owner="a", timeout=60)
    assert result.status is CellStatus.OK
    assert time.monotonic() - began < 4
    assert "missing" not in (result.warning or "")
    assert result.truncation.bytes_total == 40_000
    assert result.stdout == "a" * 20_000
    assert result.text.startswith("ab" * 400)
