"""Nothing that a cell writes breaks its kernel or its result, and nothing of it is lost."""

import pytest

from hermes_kernel import BlockingRegistry, CellStatus

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
