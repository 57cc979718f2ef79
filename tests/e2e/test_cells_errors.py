"""Cells that fail, or that ask for somebody to type: an error, at once, and the kernel is kept."""

import sys

import pytest

from hermes_kernel import BlockingRegistry, CellStatus

from .test_cells_basics import still_answers

ASKING = {
    "input": "name = input('who? ')",
    "input without prompt": "input()",
    "getpass": "import getpass; getpass.getpass()",
    "input in a thread": "import asyncio; await asyncio.to_thread(input)",
    "kept input": "import builtins; builtins.input('who? ')",
    "input in a function": "def ask(): return input('who? ')\nask()",
}


def test_asking_for_input_is_an_error_at_once_that_says_nobody_answers(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    for name, code in ASKING.items():
        result = registry.execute(code, owner="a", timeout=5)
        assert result.status is CellStatus.ERROR, name
        assert result.duration < 1, name
        assert result.error is not None
        assert "nobody" in result.error.evalue or "not available" in result.error.evalue, name
        assert still_answers(registry).kernel.reused, name
    assert registry.execute("z", owner="a").value == "1"


READING = {
    "read(5)": "import sys; sys.stdin.read(5)",
    "read": "import sys; sys.stdin.read()",
    "readline": "import sys; sys.stdin.readline()",
    "iteration": "import sys; [line for line in sys.stdin]",
    "buffer": "import sys; sys.stdin.buffer.read()",
    "fd 0": "import os; os.read(0, 1)",
    "open(0)": "open(0, closefd=False).read()",
    "fileinput": "import fileinput; list(fileinput.input(files=('-',)))",
    "child": "import subprocess; subprocess.run(['cat'])",
    "child's input": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()']); None",
    "shell": "import os; os.system('read line')",
    "tty": "open('/dev/tty').read()",
}


def test_reading_standard_input_finds_its_end_or_fails_at_once(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    for name, code in READING.items():
        result = registry.execute(code, owner="a", timeout=5)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, name
        assert result.duration < 1, name
        assert still_answers(registry).kernel.reused, name


def test_a_shell_escape_finds_its_standard_input_at_its_end(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    for code in ("!cat", "x = !cat", "%%bash\ncat", "!read line"):
        result = registry.execute(code, owner="a", timeout=3)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, code
        assert still_answers(registry).kernel.reused, code


def test_a_debugger_does_not_hang(registry: BlockingRegistry) -> None:
    registry.execute("1/0", owner="a")
    for code in ("breakpoint()", "import pdb; pdb.set_trace()\nx = 1", "pdb.run('x = 1')", "1/0", "%debug"):
        result = registry.execute(code, owner="a", timeout=10)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, code
        assert result.duration < 5, code
        assert still_answers(registry).kernel.reused, code
        after = registry.execute("def f():\n    y = 1\n    return y\nf()", owner="a", timeout=5)
        assert after.value == "1", code


FAILING_REPR = {
    "raises": ("class B:\n    def __repr__(self): raise ValueError('no')\nB()", "ValueError"),
    "in a list": ("class B:\n    def __repr__(self): raise ValueError('no')\n[B()]", "ValueError"),
    "not a str": ("class B:\n    def __repr__(self): return 3\nB()", "TypeError"),
    "recursion": ("class B:\n    def __repr__(self): return repr(self)\nB()", "RecursionError"),
    "KeyboardInterrupt": (
        "class B:\n    def __repr__(self): raise KeyboardInterrupt\nB()",
        "KeyboardInterrupt",
    ),
    "BaseException": (
        "class Odd(BaseException): pass\nclass B:\n    def __repr__(self): raise Odd('odd')\nB()",
        "Odd",
    ),
    "printed": ("class B:\n    def __str__(self): raise ValueError('no')\nprint(B())", "ValueError"),
}


def test_a_repr_that_raises_is_an_error_that_names_it(registry: BlockingRegistry) -> None:
    for name, (code, ename) in FAILING_REPR.items():
        result = registry.execute(code, owner="a", timeout=5)
        assert (result.status, result.exit_code) == (CellStatus.ERROR, 1), name
        assert result.error is not None
        assert result.error.ename == ename, name
        assert ename in result.text, name
        assert ename in result.to_dict()["error"], name
        assert still_answers(registry).execution_count == result.execution_count + 1, name


FAILING_STR = {
    "str raises": "class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E('e')",
    "both raise": (
        "class E(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise E('e')"
    ),
    "str is no str": "class E(Exception):\n    def __str__(self): return 3\nraise E('e')",
    "argument": "class B:\n    def __repr__(self): raise ValueError\nclass E(Exception): pass\nraise E(B())",
    "base": "class E(BaseException):\n    def __str__(self): raise ValueError\nraise E",
}


def test_an_exception_whose_str_fails_is_still_an_error_of_its_class(registry: BlockingRegistry) -> None:
    for name, code in FAILING_STR.items():
        result = registry.execute(code, owner="a", timeout=5)
        assert (result.status, result.exit_code) == (CellStatus.ERROR, 1), name
        assert result.error is not None
        assert result.error.ename == "E", name
        assert "E" in result.error.traceback, name
        assert still_answers(registry).execution_count == result.execution_count + 1, name


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt", "GeneratorExit"])
def test_an_exception_whose_str_ends_more_than_itself_is_still_an_error_of_its_class(
    registry: BlockingRegistry, raised: str
) -> None:
    code = f"class E(Exception):\n    def __str__(self): raise {raised}\nraise E('e')"
    result = registry.execute(code, owner="a", timeout=5)
    assert result.status is CellStatus.ERROR
    assert result.error is not None
    assert result.error.ename == "E"
    assert still_answers(registry).kernel.reused


def test_an_exception_that_hides_everything_is_an_error_and_no_more(registry: BlockingRegistry) -> None:
    code = "class E(Exception):\n    def __getattribute__(self, n): raise ValueError(n)\nraise E('e')"
    assert registry.execute(code, owner="a", timeout=5).status is CellStatus.ERROR
    assert still_answers(registry).kernel.reused


ERRORS = {
    "syntax": ("def (", "SyntaxError"),
    "indentation": ("if 1:\nx = 1", "IndentationError"),
    "name": ("nowhere", "NameError"),
    "interrupt by hand": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "SIGINT": (
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
        "KeyboardInterrupt",
    ),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "cancelled": ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "memory": ("x = 'a' * 2**62", "MemoryError"),
    "digits": ("print(10 ** 5000)", "ValueError"),
    "group": ("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])", "ExceptionGroup"),
    "long source": ("x = " + "(" * 5000 + ")" * 5000, "SyntaxError"),
    "cause": ("try: 1/0\nexcept Exception as e: raise OSError('late') from e", "OSError"),
    "awaited": ("async def f(): raise LookupError('x')\nawait f()", "LookupError"),
    "code": ("compile('1', 'x', 'exec', flags=-1)", "ValueError"),
}


def test_an_error_keeps_the_state_and_shows_the_cells_frames_alone(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    for name, (code, ename) in ERRORS.items():
        result = registry.execute(f"print('before')\n{code}", owner="a", timeout=20)
        before = "" if ename in {"SyntaxError", "IndentationError"} else "before\n"
        assert (result.status, result.exit_code, result.stdout) == (CellStatus.ERROR, 1, before), name
        assert result.error is not None
        assert result.error.ename == ename, name
        assert result.kernel.ended is False
        payload = result.to_dict()
        for text in (result.text, result.error.traceback, payload["error"], payload["output"]):
            assert ename in text, name
            for ours in ("hermes_kernel/", "ipykernel/", "IPython/", "\x1b["):
                assert ours not in text, name
        assert still_answers(registry).kernel.reused, name
    assert registry.execute("z", owner="a").value == "1"


def test_rich_reprs_that_fail_or_lie_do_not_hurt(registry: BlockingRegistry) -> None:
    for method, body in (
        ("_repr_html_", "raise ValueError('html')"),
        ("_repr_html_", "return 3"),
        ("_repr_mimebundle_", "return 3"),
        ("_repr_mimebundle_", "raise ValueError('bundle')"),
        ("_repr_json_", "return {1, 2}"),
        ("_repr_png_", "return 'not a png'"),
        ("_ipython_display_", "raise ValueError('display')"),
    ):
        code = f"class R:\n    def __repr__(self): return 'R!'\n    def {method}(self, *a, **k): {body}\nR()"
        result = registry.execute(code, owner="a", timeout=5)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, method
        assert result.status is CellStatus.ERROR or "R!" in result.text, method
        result.to_json().encode()
        still_answers(registry)


HUGE = {
    "text": ("raise ValueError('h' * 70_000_000 + 't')", "ValueError"),
    "notes": ("e = OSError('h'); e.add_note('n' * 70_000_000); raise e", "OSError"),
    "name": ("raise type('N' * 70_000_000, (Exception,), {})", "N" * 50),
    "cause": ("try: raise ValueError('h' * 70_000_000)\nexcept ValueError: raise KeyError('k')", "KeyError"),
    "syntax": ("x = '" + "s" * 5_000_000, "SyntaxError"),
}


def test_an_exception_that_is_huge_is_an_error_and_no_more(registry: BlockingRegistry) -> None:
    registry.execute("z = 1", owner="a")
    for name, (code, ename) in HUGE.items():
        if "add_note" in code and sys.version_info < (3, 11):
            continue
        result = registry.execute(code, owner="a", timeout=60)
        assert (result.status, result.kernel.ended) == (CellStatus.ERROR, False), name
        assert result.error is not None
        assert result.error.ename.startswith(ename), name
        assert len(result.text) < 51_000, name
        assert registry.execute("z", owner="a").value == "1", name


IN_THREADS = {
    "thread": (
        "import threading\ndef f(): 1/0\nt = threading.Thread(target=f); t.start(); t.join()",
        CellStatus.OK,
    ),
    "pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor() as pool: pool.submit(lambda: 1/0).result()",
        CellStatus.ERROR,
    ),
    "await": ("import asyncio\nawait asyncio.to_thread(lambda: 1/0)", CellStatus.ERROR),
}


def test_an_error_in_a_thread_shows_no_frame_of_ours(registry: BlockingRegistry) -> None:
    for name, (code, status) in IN_THREADS.items():
        result = registry.execute(code, owner="a", timeout=10)
        assert result.status is status, name
        assert "ZeroDivisionError" in result.text, name
        assert "<cell" in result.text, name
        for ours in ("hermes_kernel/", "ipykernel/", "run_in_cell"):
            assert ours not in result.text, name
