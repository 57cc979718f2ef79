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
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ended = invoked("run", script(tmp_path, "print(1)"), "--tools", given)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert len(ended.err.strip().splitlines()) == 1
