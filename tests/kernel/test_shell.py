import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel.kernel import shell
from hermes_kernel.kernel.shell import (
    LONGEST,
    exit_code_of,
    plain_traceback,
    printable,
    safe_str,
    shortened,
)


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def lines_of(source: str) -> list[str]:
    try:
        exec(compile(source, "<cell 1>", "exec"), {"Broken": Broken})
    except BaseException as error:
        return plain_traceback(error, error.__traceback__)
    raise AssertionError("nothing was raised")


def test_a_traceback_is_pythons_own() -> None:
    try:
        exec("1 / 0", {})
    except ZeroDivisionError as error:
        wanted = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
        got = plain_traceback(error, error.__traceback__)
    assert got == wanted


def test_an_exception_that_has_no_text_is_shown_by_name() -> None:
    assert lines_of("raise Broken()")[-1].endswith("Broken: <exception str() failed>")


def test_repeated_frames_are_folded() -> None:
    shown = lines_of("def f(): f()\nf()")
    assert len(shown) < 20
    assert any("times]" in line for line in shown)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ((), 0),
        ((None,), 0),
        ((3,), 3),
        ((-1,), 255),
        ((256,), 0),
        ((2**70,), 255),
        ((True,), 1),
        (("text",), 1),
        ((1.5,), 1),
        (([],), 1),
    ],
)
def test_an_exit_code_is_what_python_would_end_with(code: tuple[object, ...], exit_code: int) -> None:
    assert exit_code_of(SystemExit(*code)) == exit_code


def test_a_printable_exception_is_left_alone_and_a_broken_one_keeps_its_name() -> None:
    error = ValueError("x")
    assert printable(error) is error
    stand_in = printable(Broken())
    assert type(stand_in).__name__ == "Broken"
    assert str(stand_in) == safe_str(Broken()) == "<str() of Broken failed>"


def test_a_text_that_is_too_long_keeps_its_ends_and_says_how_much_is_missing() -> None:
    short = "x" * LONGEST
    assert shortened(short) is short
    cut = shortened("h" * LONGEST + "t" * LONGEST)
    head, notice, tail = cut.split("\n")
    assert (set(head), set(tail), len(head + tail)) == ({"h"}, {"t"}, LONGEST)
    assert notice == f"[... {LONGEST:,} characters are missing ...]"
    assert shortened(head + tail + "x").count("1 characters") == 1


def test_a_huge_exception_is_shown_by_one_of_the_same_name() -> None:
    stand_in = printable(ValueError("h" * 2 * LONGEST))
    assert type(stand_in).__name__ == "ValueError"
    assert str(stand_in) == shortened("h" * 2 * LONGEST)
    named = printable(type("N" * 2 * LONGEST, (Exception,), {})("text"))
    assert (type(named).__name__, str(named)) == (shortened("N" * 2 * LONGEST), "text")


def test_frames_of_the_kernels_own_are_left_out_wherever_they_stand() -> None:
    def of_ours(work: Callable[[], None]) -> None:
        source = compile("def carry(work): work()", str(Path(shell.__file__).with_name("context.py")), "exec")
        names: dict[str, Any] = {}
        exec(source, names)
        names["carry"](work)

    def fail() -> None:
        raise ValueError("x")

    try:
        of_ours(fail)
    except ValueError as error:
        lines = plain_traceback(error, error.__traceback__)
    assert [line.split(", in ")[1] for line in lines if ", in " in line][1:] == ["of_ours", "fail"]
