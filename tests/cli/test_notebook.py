import json
import stat
import sys
from pathlib import Path

import nbformat
import pytest

from .command import invoked, read_notebook, script

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_a_script_is_saved_as_a_valid_notebook_even_if_a_cell_fails(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("# %% [markdown]\n# # Head\n# %% Sum\nprint('a')\n1 + 1\n# %%\n1 / 0\n# %%\n3\n")
    assert invoked("run", file, "--save", tmp_path / "out.ipynb").code == 1
    head, good, bad, never = read_notebook(tmp_path / "out.ipynb").cells
    assert (head.cell_type, head.source) == ("markdown", "# Head")
    assert (good.execution_count, good.metadata.title) == (1, "Sum")
    assert [output.output_type for output in good.outputs] == ["stream", "execute_result"]
    assert (bad.execution_count, bad.outputs[0].ename) == (2, "ZeroDivisionError")
    assert (never.execution_count, never.outputs) == (None, [])


def test_a_saved_notebook_runs_again_and_loses_its_old_outputs(tmp_path: Path) -> None:
    file = script(tmp_path, "n = 6", "n * 7", "import sys; sys.exit(4)")
    notebook = tmp_path / "out.ipynb"
    invoked("run", file, "--save", notebook)
    before = read_notebook(notebook)
    assert before.cells[2].outputs[0].evalue.startswith("The cell ended its kernel with exit code 4")
    before.cells[0].source = "1 / 0"
    nbformat.write(before, notebook)
    assert invoked("run", notebook, "--save", notebook).code == 1
    after = read_notebook(notebook)
    assert [cell.id for cell in after.cells] == [cell.id for cell in before.cells]
    assert after.cells[0].outputs[0].ename == "ZeroDivisionError"
    assert [cell.outputs for cell in after.cells[1:]] == [[], []]


def test_half_a_character_in_an_output_still_makes_a_valid_notebook(tmp_path: Path) -> None:
    code = "from IPython.display import HTML, display\ndisplay(HTML('\\ud83d'))\nprint('\\ud83d')"
    invoked("run", script(tmp_path, code), "--save", tmp_path / "out.ipynb")
    assert read_notebook(tmp_path / "out.ipynb").cells[0].outputs


def test_a_notebook_for_which_no_kernel_came_up_is_not_overwritten(tmp_path: Path) -> None:
    notebook = tmp_path / "mine.ipynb"
    invoked("run", script(tmp_path, "42"), "--save", notebook)
    kept = notebook.read_bytes()
    assert invoked("run", notebook, "--save", notebook, "--cwd", tmp_path / "none").code == 2
    assert notebook.read_bytes() == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.ipynb", "script.py"]


OLD = {
    "nbformat": 3,
    "nbformat_minor": 0,
    "metadata": {"name": ""},
    "worksheets": [
        {
            "metadata": {},
            "cells": [
                {"cell_type": "heading", "level": 1, "metadata": {}, "source": "Old"},
                {"cell_type": "code", "collapsed": False, "input": ["x = 6\n", "x * 7"], "language": "python",
                 "metadata": {}, "outputs": []},
            ],
        }
    ],
}  # fmt: skip


def test_a_notebook_of_an_old_format_is_upgraded(tmp_path: Path) -> None:
    (tmp_path / "old.ipynb").write_text(json.dumps(OLD))
    ended = invoked("run", tmp_path / "old.ipynb", "--save", tmp_path / "new.ipynb")
    assert (ended.code, ended.out) == (0, "42\n")
    assert [cell.cell_type for cell in read_notebook(tmp_path / "new.ipynb").cells] == ["markdown", "code"]


def test_cells_that_are_blank_or_not_code_are_skipped_and_kept(tmp_path: Path) -> None:
    v4 = nbformat.v4
    cells = [
        v4.new_raw_cell("1/0"),
        v4.new_code_cell(" \n"),
        v4.new_markdown_cell("1/0"),
        v4.new_code_cell("7"),
    ]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    ended = invoked("run", tmp_path / "a.ipynb", "--save", tmp_path / "b.ipynb")
    assert (ended.code, ended.out) == (0, "7\n")
    assert ended.err.startswith("[1/1]")
    assert [c.source for c in read_notebook(tmp_path / "b.ipynb").cells] == ["1/0", " \n", "1/0", "7"]


@pytest.mark.filterwarnings("error")
def test_a_notebook_without_cell_ids_gets_them_and_nobody_is_bothered(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7")])
    del notebook.cells[0]["id"]
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    ended = invoked("run", tmp_path / "a.ipynb", "--save", tmp_path / "a.ipynb")
    assert (ended.code, ended.out) == (0, "42\n")
    assert read_notebook(tmp_path / "a.ipynb").cells[0].id


@pytest.mark.parametrize(
    "place", ["/proc/x.ipynb", "{}/" + "n" * 245 + ".ipynb", "{}/" + "n" * 300 + "/x.ipynb"]
)
def test_a_place_where_no_notebook_can_be_written_is_refused_before_anything_runs(
    tmp_path: Path, place: str
) -> None:
    file = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    ended = invoked("run", file, "--save", place.format(tmp_path))
    assert (ended.code, ended.out) == (2, "")
    assert "'--save'" in ended.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["script.py"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_notebook_with_recorded_calls_is_its_users_alone(tmp_path: Path) -> None:
    file, out = script(tmp_path, "1"), tmp_path / "out.ipynb"
    out.write_text("old")
    out.chmod(0o664)
    assert invoked("run", file, "--save", out).code == 0
    assert mode(out) == 0o664
    assert invoked("run", file, "--save", out, "--record-tools").code == 0
    assert mode(out) == 0o600
