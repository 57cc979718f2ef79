import json
from pathlib import Path

import pytest

from .command import hermes, invoked, script

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TOOLBOX = """
from hermes_kernel import Tool

def double(n: int) -> int:
    return 2 * n

class Shelf:
    tools = [double, Tool("triple", lambda n: 3 * n)]

BROKEN = [3]
ONCE = (tool for tool in [double])
"""


def toolbox(directory: Path, text: str = TOOLBOX) -> None:
    (directory / "my_toolbox.py").write_text(text, encoding="utf-8")


def test_the_cells_call_the_tools_of_a_module_of_the_working_directory(tmp_path: Path) -> None:
    toolbox(tmp_path)
    file = script(tmp_path, "import hermes_tools as h", "h.double(4) + h.triple(5)")
    ended = hermes("run", file, "--tools", "my_toolbox:Shelf.tools", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "23\n")


def test_what_was_called_is_in_the_json(tmp_path: Path) -> None:
    toolbox(tmp_path)
    file = script(tmp_path, "hermes_tools.double(4); hermes_tools.double('x' * 200)")
    ended = hermes("run", file, "--json", "--tools", "my_toolbox:Shelf.tools", cwd=tmp_path)
    assert json.loads(ended.out)["tool_calls_made"] == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "names no tools"),
        ("my_toolbox", "names no tools"),
        (":tools", "names no tools"),
        ("my_toolbox:", "names no tools"),
        ("nowhere.at_all:tools", "cannot be imported (ModuleNotFoundError"),
        ("my_broken:tools", "cannot be imported (ZeroDivisionError"),
        ("my_exit:tools", "cannot be imported (SystemExit: 0)"),
        ("my_toolbox:other", "my_toolbox has no 'other'"),
        ("my_toolbox:double", "give a list"),
        ("my_toolbox:BROKEN", "3, which cannot be called"),
    ],
)
def test_tools_that_are_none_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, words: str
) -> None:
    toolbox(tmp_path)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    (tmp_path / "my_exit.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ended = invoked("run", script(tmp_path, "print(1)"), "--tools", given)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_tools_that_can_be_gone_through_only_once_are_all_there(tmp_path: Path) -> None:
    toolbox(tmp_path)
    file = script(tmp_path, "hermes_tools.double(4)", "hermes_tools.double(5)")
    ended = hermes("run", file, "--tools", "my_toolbox:ONCE", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "8\n10\n")


def test_tools_are_imported_also_where_the_current_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolbox(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ended = invoked("run", script(tmp_path, "hermes_tools.double(4)"), "--tools", "my_toolbox:Shelf.tools")
    assert (ended.code, ended.out) == (0, "8\n")
