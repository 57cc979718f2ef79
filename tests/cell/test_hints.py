import pytest

from hermes_kernel.cell.hints import hint_for
from hermes_kernel.cell.outputs import CellError

TOOLS = ("read_file", "search")


def error(ename: str, evalue: str) -> CellError:
    return CellError(ename, evalue, f"{ename}: {evalue}")


@pytest.mark.parametrize(
    ("ename", "evalue", "said"),
    [
        ("ImportError", "cannot import name 'retry' from 'hermes_tools' (unknown location)", "reset"),
        ("ImportError", "cannot import name 'reed_file' from 'hermes_tools' (x.py)", "read_file, search"),
        ("AttributeError", "module 'hermes_tools' has no attribute 'reed_file'", "read_file, search"),
        ("NameError", "name 'json_parse' is not defined", "from hermes_tools import json_parse"),
        ("NameError", "name 'search' is not defined", "from hermes_tools import search"),
        ("ModuleNotFoundError", "No module named 'pandas'", "'pandas' is not installed"),
        ("TypeError", "string indices must be integers, not 'str'", "parsed results"),
        ("AttributeError", "'str' object has no attribute 'get'", "parsed results"),
        ("RuntimeError", "asyncio.run() cannot be called from a running event loop", "await main()"),
    ],
)
def test_a_known_error_has_a_hint(ename: str, evalue: str, said: str) -> None:
    assert said in (hint_for(error(ename, evalue), TOOLS) or "")


@pytest.mark.parametrize(
    ("ename", "evalue"),
    [
        ("NameError", "name 'x' is not defined"),
        ("ImportError", "cannot import name 'x' from 'os'"),
        ("ValueError", "No module named 'x'"),
        ("ZeroDivisionError", "division by zero"),
        ("E", ""),
    ],
)
def test_any_other_error_has_none(ename: str, evalue: str) -> None:
    assert hint_for(error(ename, evalue), TOOLS) is None
    assert hint_for(None) is None


def test_only_the_beginning_is_looked_at_and_a_cell_without_tools_is_told_so() -> None:
    assert hint_for(error("TypeError", "x" * 10_000 + "string indices must be integers")) is None
    assert (
        hint_for(error("ImportError", "cannot import name 'f' from 'hermes_tools'"))
        == "This cell was given no tools."
    )


def test_workers_that_cannot_find_a_function_of_the_cell_have_a_hint_also_without_an_error() -> None:
    stderr = "Traceback ...\nAttributeError: Can't get attribute 'square' on <module '__main__' (built-in)>\n"
    for failed in (None, error("BrokenProcessPool", "a child process terminated abruptly")):
        hint = hint_for(failed, (), stderr) or ""
        assert "'square'" in hint
        assert "get_context('fork')" in hint
    assert hint_for(None, (), "Can't get attribute 'x' on <module 'other'>") is None
