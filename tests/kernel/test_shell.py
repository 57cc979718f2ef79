import traceback

import pytest

from hermes_kernel.kernel.shell import exit_code_of, plain_traceback, printable, safe_str


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
