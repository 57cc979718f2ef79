"""What ordinary code gets, and the question every other file asks afterwards."""

from collections.abc import Callable

import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, Limits


def still_answers(registry: BlockingRegistry, owner: str = "a") -> CellResult:
    """Run a plain cell after a case: it must be right, and say whether it found the state of before."""
    after = registry.execute("print(6*7)", owner=owner, timeout=30)
    assert (after.status, after.stdout, after.text.strip()) == (CellStatus.OK, "42\n", "42")
    assert after.kernel.reused == (after.kernel.lost is None)
    return after


def test_a_byte_order_mark_before_the_source_is_no_part_of_it(registry: BlockingRegistry) -> None:
    for code in ("\ufeffprint('bom')", "\ufeff# comment\nprint('bom')", "\ufeff\nprint('bom')"):
        result = registry.execute(code, owner="a", timeout=5)
        assert (result.status, result.stdout, result.error) == (CellStatus.OK, "bom\n", None), code
    assert still_answers(registry).kernel.reused


def test_source_with_any_line_ends_runs(registry: BlockingRegistry) -> None:
    for code, stdout in (
        ("a=1\r\nif a:\r\n    print('crlf')\r\n", "crlf\n"),
        ("a=1\rprint('cr')", "cr\n"),
        ("a=1\r\n\rprint('mixed')\n\r\n", "mixed\n"),
        ("print('form')\n\x0c\nprint('feed')", "form\nfeed\n"),
        ("if 1:\n\tprint('tab')\n\n\n", "tab\n"),
        ("# -*- coding: latin-1 -*-\nprint('é')", "é\n"),
        ("from __future__ import annotations\nprint('future')", "future\n"),
        ("s = '''a\r\nb'''\nprint(len(s.split()))", "2\n"),
    ):
        result = registry.execute(code, owner="a", timeout=5)
        assert (result.status, result.stdout, result.error) == (CellStatus.OK, stdout, None), code
        assert still_answers(registry).kernel.reused


def test_no_line_of_forty_cells_in_a_row_is_late_or_lost(registry: BlockingRegistry) -> None:
    expected = "".join(f"{i}\n" for i in range(200))
    for _ in range(40):
        result = registry.execute("for i in range(200): print(i)", owner="a", timeout=5)
        assert (result.status, result.stdout, result.stderr) == (CellStatus.OK, expected, "")
        assert result.late_output == ()
    still_answers(registry)


def test_many_writers_of_both_streams_lose_no_line(registry: BlockingRegistry) -> None:
    code = (
        "import sys, threading\n"
        "def write(n):\n"
        "    for i in range(100):\n"
        "        print(f'o{n}.{i}\\n', end='')\n"
        "        print(f'e{n}.{i}\\n', end='', file=sys.stderr)\n"
        "threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; None"
    )
    for _ in range(5):
        result = registry.execute(code, owner="a", timeout=20)
        assert sorted(result.stdout.splitlines()) == sorted(f"o{n}.{i}" for n in range(8) for i in range(100))
        assert sorted(result.stderr.splitlines()) == sorted(f"e{n}.{i}" for n in range(8) for i in range(100))
    still_answers(registry)


def test_streams_that_take_turns_thousands_of_times_between_two_flushes(
    make_registry: Callable[..., BlockingRegistry],
) -> None:
    registry = make_registry(limits=Limits(stderr_bytes=100_000))
    code = (
        "import sys, time\n"
        "for n in range(4000):\n"
        "    sys.stdout.write(f'{n}\\n'); sys.stderr.write(f'{n}\\n')\n"
        "time.sleep(1)  # the flush is the IOPub thread's own"
    )
    result = registry.execute(code, owner="a", timeout=20)
    assert result.status is CellStatus.OK
    assert result.stdout == result.stderr == "".join(f"{n}\n" for n in range(4000))
    still_answers(registry)


def test_an_error_does_not_abort_the_cell_that_follows_at_once(registry: BlockingRegistry) -> None:
    for n in range(20):
        assert registry.execute("1/0", owner="a").status is CellStatus.ERROR
        assert registry.execute(str(n), owner="a").value == str(n)


def test_execution_count_is_one_based_and_counts_failed_cells(registry: BlockingRegistry) -> None:
    codes = ["1", "1/0", "def (", "x = 1", "# nothing"]
    counts = [registry.execute(code, owner="a").execution_count for code in codes]
    assert counts == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "code",
    ["import os; os._exit(1)", "import sys; sys.exit()", "import time; time.sleep(60)", "while True: pass"],
    ids=["died", "exited", "timed out asleep", "timed out busy"],
)
def test_the_execution_count_of_a_cell_that_ends_its_kernel_is_the_next_one(
    registry: BlockingRegistry, code: str
) -> None:
    assert registry.execute("1", owner="a").execution_count == 1
    assert registry.execute(code, owner="a", timeout=0.3).execution_count == 2
    assert registry.execute(code, owner="a", timeout=0.3).execution_count == 1, "the first cell of the kernel"
    assert still_answers(registry).execution_count == 1


def test_what_a_cell_defines_can_be_pickled_in_this_cell_and_in_the_next(registry: BlockingRegistry) -> None:
    define = (
        "import dataclasses, enum, pickle\n"
        "class Plain:\n    def __init__(self): self.x = 1\n"
        "@dataclasses.dataclass\nclass Data:\n    x: int = 2\n"
        "class Colour(enum.Enum):\n    RED = 3\n"
        "def function(): return 4\n"
        "class Failure(Exception): pass\n"
        "def again(thing): return pickle.loads(pickle.dumps(thing))\n"
        "again(Plain()).x, again(Data()), again(Colour.RED), again(function)(), again(Failure('f')).args"
    )
    use = "again(Plain()).x, again(Data()), again(Colour.RED), again(function)(), again(Failure('f')).args"
    expected = "(1, Data(x=2), <Colour.RED: 3>, 4, ('f',))"
    assert registry.execute(define, owner="a").value == expected
    assert registry.execute(use, owner="a").value == expected
    assert registry.execute("__name__, Plain.__module__", owner="a").value == "('__main__', '__main__')"
    import_main = "import __main__; __main__.Plain is Plain and __main__.__dict__ is globals()"
    assert registry.execute(import_main, owner="a").value == "True"


def test_the_source_of_what_a_cell_defined_is_found_now_and_later(registry: BlockingRegistry) -> None:
    function = "def double(x):\n    return 2 * x  # twice\n"
    method = "    def open(self):\n        return 'opened'\n"
    shown = registry.execute(function + "import inspect; print(inspect.getsource(double), end='')", owner="a")
    assert shown.stdout == function
    registry.execute("1/0", owner="a")
    registry.execute("class Box:\n" + method, owner="a")
    for name, source in (("double", function), ("Box.open", method)):
        assert registry.execute(f"print(inspect.getsource({name}), end='')", owner="a").stdout == source
    newer = "def double(x):\n    return x + x\n"
    registry.execute(newer, owner="a")
    assert registry.execute("print(inspect.getsource(double), end='')", owner="a").stdout == newer


def test_a_forked_worker_runs_a_function_of_the_cell(registry: BlockingRegistry) -> None:
    code = (
        "import multiprocessing as mp\n"
        "def square(x): return x * x\n"
        "with mp.get_context('fork').Pool(2) as pool: print(pool.map(square, [1, 2, 3]))"
    )
    assert registry.execute(code, owner="a", timeout=20).stdout == "[1, 4, 9]\n"
    assert still_answers(registry).kernel.reused


@pytest.mark.parametrize(
    "call",
    [
        "print(asyncio.run(m()))",
        "with asyncio.Runner() as runner: print(runner.run(m()))",
        "print(asyncio.get_event_loop().run_until_complete(m()))",
        "loop = asyncio.new_event_loop(); print(loop.run_until_complete(m()))",
    ],
    ids=["run", "Runner", "this loop", "new loop"],
)
def test_running_a_loop_in_a_cell_gives_the_value_or_says_to_await(
    registry: BlockingRegistry, call: str
) -> None:
    result = registry.execute(f"import asyncio\nasync def m(): return 5\n{call}", owner="a", timeout=5)
    said = f"{result.text}\n{result.hint}"
    assert (result.status is CellStatus.OK and result.stdout == "5\n") or (
        result.status is CellStatus.ERROR and "await" in said
    )
    assert registry.execute("await m()", owner="a", timeout=5).value == "5"
    assert still_answers(registry).kernel.reused


def test_the_value_of_the_last_expression_is_neither_shown_nor_asked_for_its_text_on_demand(
    registry: BlockingRegistry,
) -> None:
    code = (
        "class Loud:\n    def __repr__(self): print('asked'); return 'loud'\nasync def m(): return Loud()\n"
    )
    quiet = registry.execute(f"{code}x = 1\nprint('said')\nawait m()", owner="a", show_value=False)
    assert (quiet.status, quiet.value, quiet.text, quiet.outputs) == (
        CellStatus.OK,
        None,
        "said\n",
        ({"output_type": "stream", "name": "stdout", "text": "said\n"},),
    )
    assert registry.execute("1/0", owner="a", show_value=False).status is CellStatus.ERROR
    shown = registry.execute("x", owner="a")
    assert (shown.value, shown.kernel.reused) == ("1", True)
