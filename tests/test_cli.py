import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner, Result

from hermes_kernel.cli import main
from hermes_kernel.cli.script import Cell, CellKind, cells_of

from . import traces

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "hermes_kernel.cli")
WAIT = 60

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def hermes(*arguments: str | Path, cwd: Path | None = None, text: str | None = None, **env: str) -> Ended:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=WAIT,
        env={**os.environ, **env},
        check=False,
    )
    assert "Traceback" not in done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def invoked(*arguments: str | Path) -> Result:
    """The command in this process, for what is refused before anything starts."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def script(directory: Path, *cells: str) -> Path:
    file = directory / "script.py"
    file.write_text("".join(f"# %%\n{cell}\n" for cell in cells), encoding="utf-8")
    return file


def started(*arguments: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def read_notebook(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


# --- cells of a script


def sources(text: str) -> Sequence[tuple[CellKind, str]]:
    return [(cell.kind, cell.source) for cell in cells_of(text)]


def test_what_stands_before_the_first_marker_is_a_cell() -> None:
    assert sources("a = 1\n# %%\nb = 2\n") == [(CellKind.CODE, "a = 1"), (CellKind.CODE, "b = 2")]


@pytest.mark.parametrize("text", ["", "\n\n", "# %%\n\n# %% nothing\n"])
def test_blank_text_has_nothing_to_run(text: str) -> None:
    assert not any(cell.runs for cell in cells_of(text))


def test_a_title_may_follow_the_marker() -> None:
    assert cells_of("# %% Load the data\nx = 1\n") == [Cell(CellKind.CODE, "x = 1", "Load the data")]


def test_markdown_is_taken_out_of_its_comments() -> None:
    text = '# %% [markdown]\n# # Title\n#\n# text\n# %% More [md]\n"""\nkept\n"""\n# %% [raw]\n# as is\n'
    assert cells_of(text) == [
        Cell(CellKind.MARKDOWN, "# Title\n\ntext"),
        Cell(CellKind.MARKDOWN, "kept", "More"),
        Cell(CellKind.RAW, "as is"),
    ]


def test_a_marker_within_a_string_splits_nothing() -> None:
    text = 'x = """\n# %%\n"""\n# %%\ny = 1'
    assert [cell.source for cell in cells_of(text)] == ['x = """\n# %%\n"""', "y = 1"]


def test_broken_code_and_magics_do_not_hide_the_markers_behind_them() -> None:
    text = "!echo it's\n# %%\n%matplotlib inline\n# %%\nf(\n# %%\nx = '''\n# %%\ny"
    assert len(cells_of(text)) == 5


@pytest.mark.parametrize("line", ["    # %%", "# %%time", "x = 1  # %%", "## %%", "# % %"])
def test_what_only_resembles_a_marker_is_none(line: str) -> None:
    assert len(cells_of(f"a = 1\n{line}\nb = 2")) == 1


def test_lines_of_a_script_may_end_as_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_bytes(b"\xef\xbb\xbfx = 6\r\n# %%\r\nx * 7\r\n")
    assert hermes("run", file).out == "42\n"


# --- a run


def test_all_cells_fine_is_0_and_their_text_is_on_stdout(tmp_path: Path) -> None:
    file = script(tmp_path, "import os\nprint('hé ☃')", "x = 6", "x * 7", "os.path.samefile('.', os.curdir)")
    ended = hermes("run", file)
    assert (ended.code, ended.out) == (0, "hé ☃\n42\nTrue\n")


def test_progress_is_one_plain_line_a_cell_on_stderr(tmp_path: Path) -> None:
    lines = hermes("run", script(tmp_path, "print(1)\nprint(2)", "y = '" + "z" * 100 + "'")).err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\[1/2\] ok +\d+\.\d\d s  print\(1\)", lines[0])
    assert re.fullmatch(r"\[2/2\] ok +\d+\.\d\d s  y = 'z+\.\.\.", lines[1])


def test_the_cells_run_where_the_file_is(tmp_path: Path) -> None:
    file = script(tmp_path, "import os\nprint(os.getcwd())")
    (tmp_path / "other").mkdir()
    assert hermes("run", file).out == f"{tmp_path}\n"
    assert hermes("run", file.name, "--cwd", "other", cwd=tmp_path).out == f"{tmp_path / 'other'}\n"


def test_a_script_from_stdin_runs_in_the_current_directory(tmp_path: Path) -> None:
    ended = hermes("run", "-", cwd=tmp_path, text="import os\n# %%\nprint(os.getcwd())")
    assert (ended.code, ended.out) == (0, f"{tmp_path}\n")


def test_a_failed_cell_ends_the_run_with_1(tmp_path: Path) -> None:
    ended = hermes("run", script(tmp_path, "print(1)", "1 / 0", "print(3)"))
    assert ended.code == 1
    assert ended.out.startswith("1\nTraceback")
    assert ended.out.endswith("ZeroDivisionError: division by zero\n")
    assert "cell 2 failed; 1 cell was not run" in ended.err


def test_keep_going_runs_the_rest_and_is_still_1(tmp_path: Path) -> None:
    ended = hermes("run", script(tmp_path, "x = 5", "1 / 0", "print(x)"), "--keep-going")
    assert ended.code == 1
    assert ended.out.endswith("\n5\n")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 1)])
def test_sys_exit_stops_the_run(tmp_path: Path, status: int, code: int) -> None:
    ended = hermes("run", script(tmp_path, f"import sys\nprint('bye')\nsys.exit({status})", "print('no')"))
    assert (ended.code, ended.out) == (code, "bye\n")
    assert f"exited ({status})" in ended.err
    assert "1 cell was not run" in ended.err


def test_after_sys_exit_keep_going_has_a_fresh_kernel_and_says_so(tmp_path: Path) -> None:
    ended = hermes("run", script(tmp_path, "x = 1\nexit()", "print('x' in globals())"), "--keep-going")
    assert (ended.code, ended.out) == (0, "False\n")
    assert "state is gone" in ended.err
    assert "The state of the last call is gone" in ended.err


def test_a_cell_out_of_time_ends_the_run_with_1(tmp_path: Path) -> None:
    ended = hermes("run", script(tmp_path, "print('in')\nwhile True: pass", "1"), "--timeout", "0.5")
    assert (ended.code, ended.out) == (1, "in\n")
    assert "timed out" in ended.err
    assert "limit of 0.5 s" in ended.err


def test_a_cell_that_kills_its_kernel_ends_the_run_with_1(tmp_path: Path) -> None:
    ended = hermes("run", script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
    assert ended.code == 1
    assert "died (SIGKILL)" in ended.err


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_a_terminal_gets_colour_and_no_line_longer_than_it_is(tmp_path: Path) -> None:
    import pty

    file = script(tmp_path, f"x = '{'[bold]' * 40}'; print('out')")
    ours, theirs = pty.openpty()
    # The child alone must hold the far end: its end is then the end of the file.
    with subprocess.Popen(
        [*COMMAND, "run", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60"},
        encoding="utf-8",
    ) as child:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # how Linux says that nobody holds the far end any more
            pass
        assert child.stdout is not None
        assert child.stdout.read() == "out\n"
    os.close(ours)
    text = shown.decode()
    assert child.returncode == 0
    assert "\x1b[32mok" in text
    assert "x = '[bold][bold]" in text
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).strip().splitlines()[-1]
    assert len(last) <= 60


# --- JSON


def test_json_is_one_object_a_cell_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    file = script(tmp_path, "print('ü')", "1 / 0", "import sys; sys.exit(2)", "6 * 7")
    ended = hermes("run", "--json", "--keep-going", file, PYTHONIOENCODING="ascii")
    objects = [json.loads(line) for line in ended.out.splitlines()]
    assert ended.code == 1
    assert [each["status"] for each in objects] == ["success", "error", "error", "success"]
    assert [each["exit_code"] for each in objects] == [0, 1, 2, 0]
    assert objects[0]["output"] == "ü\n"
    assert objects[3]["kernel"]["lost_reason"] == "exited"


def test_an_error_before_the_first_cell_leaves_stdout_empty(tmp_path: Path) -> None:
    ended = hermes("run", "--json", script(tmp_path, "1"), "--python", shutil.which("true") or "true")
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1


# --- saving


def test_a_script_is_saved_as_a_valid_notebook_even_if_a_cell_fails(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("# %% [markdown]\n# # Head\n# %% Sum\nprint('a')\n1 + 1\n# %%\n1 / 0\n# %%\n3\n")
    assert hermes("run", file, "--save", tmp_path / "out.ipynb").code == 1
    head, good, bad, never = read_notebook(tmp_path / "out.ipynb").cells
    assert (head.cell_type, head.source) == ("markdown", "# Head")
    assert (good.execution_count, good.metadata.title) == (1, "Sum")
    assert [output.output_type for output in good.outputs] == ["stream", "execute_result"]
    assert (bad.execution_count, bad.outputs[0].ename) == (2, "ZeroDivisionError")
    assert (never.execution_count, never.outputs) == (None, [])


def test_a_saved_notebook_runs_again_and_loses_its_old_outputs(tmp_path: Path) -> None:
    file = script(tmp_path, "n = 6", "n * 7", "import sys; sys.exit(4)")
    notebook = tmp_path / "out.ipynb"
    hermes("run", file, "--save", notebook)
    before = read_notebook(notebook)
    assert before.cells[2].outputs[0].evalue.startswith("The cell ended its kernel with exit code 4")
    before.cells[0].source = "1 / 0"
    nbformat.write(before, notebook)
    assert hermes("run", notebook, "--save", notebook).code == 1
    after = read_notebook(notebook)
    assert [cell.id for cell in after.cells] == [cell.id for cell in before.cells]
    assert after.cells[0].outputs[0].ename == "ZeroDivisionError"
    assert [cell.outputs for cell in after.cells[1:]] == [[], []]


def test_half_a_character_in_an_output_still_makes_a_valid_notebook(tmp_path: Path) -> None:
    code = "from IPython.display import HTML, display\ndisplay(HTML('\\ud83d'))\nprint('\\ud83d')"
    hermes("run", script(tmp_path, code), "--save", tmp_path / "out.ipynb")
    assert read_notebook(tmp_path / "out.ipynb").cells[0].outputs


def test_a_notebook_for_which_no_kernel_came_up_is_not_overwritten(tmp_path: Path) -> None:
    notebook = tmp_path / "mine.ipynb"
    hermes("run", script(tmp_path, "42"), "--save", notebook)
    kept = notebook.read_bytes()
    assert hermes("run", notebook, "--save", notebook, "--cwd", tmp_path / "none").code == 2
    assert notebook.read_bytes() == kept
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.ipynb", "script.py"]


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument"),
        (["x.py", "--timeout", "soon"], "not a valid float"),
        (["x.py", "--timeout", "-1"], "give a number of seconds"),
        (["x.py", "--timeout", "nan"], "give a number of seconds"),
        (["x.py", "--save", "none/x.ipynb"], "there is no directory 'none'"),
        (["x.py", "--save", "."], "is not a file"),
        (["x.py", "--faster"], "No such option"),
        (["missing.py"], "does not exist"),
        (["."], "is a directory"),
        (["pyproject.toml"], "neither a .py nor a .ipynb"),
    ],
)
def test_usage_errors_are_2_and_say_what_to_do(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    result = invoked("run", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr


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
R = {"nbformat": 4, "nbformat_minor": 4, "cells": [], "metadata": {"language_info": {"name": "R"}}}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.py", b"x = '\xff'", "not UTF-8"),
        ("a.py", b"# coding: klingon", "not UTF-8"),
        ("a.ipynb", b"\xff\xfe{}", "not UTF-8"),
        ("a.ipynb", b"{", "not JSON"),
        ("a.ipynb", b"[" * 100_000, "not JSON"),
        ("a.ipynb", b"[]", "not a notebook"),
        ("a.ipynb", b"{}", "not a notebook"),
        ("a.ipynb", b'{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "not a valid notebook"),
        ("a.ipynb", b'{"nbformat": 4, "cells": 5, "metadata": 6}', "not a valid notebook"),
        ("a.ipynb", b'{"nbformat": 3, "worksheets": [4]}', "not a valid notebook"),
        ("a.ipynb", b'{"nbformat": 9, "cells": []}', "pip install -U nbformat"),
        ("a.ipynb", json.dumps(R).encode(), "give a notebook in Python"),
    ],
)
def test_a_bad_file_is_one_sentence_and_2(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    result = invoked("run", tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["a.py", "a.ipynb"])
def test_an_empty_file_has_no_cells_and_is_fine(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    result = invoked("run", tmp_path / name)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "has no cells to run" in result.stderr


def test_a_notebook_of_an_old_format_is_upgraded(tmp_path: Path) -> None:
    (tmp_path / "old.ipynb").write_text(json.dumps(OLD))
    ended = hermes("run", tmp_path / "old.ipynb", "--save", tmp_path / "new.ipynb")
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
    ended = hermes("run", tmp_path / "a.ipynb", "--save", tmp_path / "b.ipynb")
    assert (ended.code, ended.out) == (0, "7\n")
    assert ended.err.startswith("[1/1]")
    assert [c.source for c in read_notebook(tmp_path / "b.ipynb").cells] == ["1/0", " \n", "1/0", "7"]


# --- being cut


def test_ctrl_c_interrupts_the_cell_ends_the_kernel_and_is_130(tmp_path: Path, runtime: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    file = script(
        tmp_path, f"print('in')\nopen({str(ready)!r}, 'w').close()\nwhile True: pass", "print('no')"
    )
    child = started("run", file, "--json", "--save", tmp_path / "out.ipynb")
    ready.read_text()  # returns when the cell has opened the other end
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=WAIT)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert json.loads(out)["status"] == "interrupted"
    assert read_notebook(tmp_path / "out.ipynb").cells[0].outputs[0].text == "in\n"
    assert traces.kernels_of(runtime) == []


def test_a_request_to_end_is_obeyed_like_ctrl_c(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    child = started("run", script(tmp_path, f"open({str(ready)!r}, 'w').close()\nwhile True: pass"))
    ready.read_text()
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=WAIT)
    assert child.returncode == 143
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    child = started("run", script(tmp_path, "print('a')", "print('b')", "print('c')"))
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(WAIT) == 141
    assert "Traceback" not in err
    assert "Exception" not in err
    assert "[2/3]" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "run", str(script(tmp_path, "print(1)"))],
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            timeout=WAIT,
            check=False,
        )
    assert done.returncode == 2
    assert "the output cannot be written" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


# --- doctor, version, help


def test_doctor_finds_a_working_kernel(runtime: Path) -> None:
    ended = hermes("doctor")
    assert ended.code == 0
    assert f"{runtime}/hermes-kernel (private)" in ended.out
    assert "6 * 7 = 42" in ended.out


def test_doctor_tells_a_program_what_it_tells_a_person() -> None:
    ended = hermes("doctor", "--json", HERMES_KERNEL_PLAIN="1")
    found = json.loads(ended.out)
    assert ended.code == 0
    assert set(found["packages"]) == {"jupyter_client", "ipykernel", "pyzmq", "ipython"}
    assert (found["start_method"], found["plain"]) == ("spawn", True)
    kernel = found["kernel"]
    assert (kernel["works"], kernel["transport"], kernel["isolation"]) == (True, "ipc", "none")
    assert kernel["milliseconds"] > 0
    assert "HERMES_KERNEL_PLAIN" in kernel["degraded"]


def test_doctor_is_2_with_the_reason_if_no_kernel_starts() -> None:
    ended = hermes("doctor", "--json", "--python", shutil.which("true") or "true")
    assert ended.code == 2
    assert json.loads(ended.out)["kernel"]["works"] is False
    assert "not a Python that can run a kernel" in ended.err


def test_doctor_says_if_the_place_for_kernels_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "hermes-kernel").mkdir(mode=0o777)
    (tmp_path / "hermes-kernel").chmod(0o777)
    ended = hermes("doctor", XDG_RUNTIME_DIR=str(tmp_path))
    assert ended.code == 2
    assert "not a private directory" in ended.out
    assert ended.err.startswith("Error: ")


def test_the_version_and_the_help_are_there() -> None:
    assert invoked("--version").output.startswith("hermes-kernel, version ")
    for command in ([], ["run"], ["doctor"]):
        result = invoked(*command, "--help")
        assert result.exit_code == 0
        assert "Exit codes" in result.output


def test_the_installed_script_is_this_command() -> None:
    installed = Path(sys.executable).with_name("hermes-kernel")
    done = subprocess.run([installed, "--version"], capture_output=True, timeout=WAIT, check=True)
    assert done.stdout.startswith(b"hermes-kernel, version ")


# --- examples and README


def test_the_tour_runs_and_is_stored_without_outputs() -> None:
    tour = ROOT / "examples" / "tour.ipynb"
    notebook = read_notebook(tour)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    ended = hermes("run", tour)
    assert ended.code == 0
    assert "Zugspitze" in ended.out


def test_the_agent_loop_runs_from_anywhere(tmp_path: Path) -> None:
    ended = ran_python(ROOT / "examples" / "agent_loop.py", cwd=tmp_path)
    assert "state was lost" in ended
    assert ended.rstrip().endswith("4.5 °C on average, from a file of 40 rows.")


def readme_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_the_readmes_first_example_shows_what_it_says(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(readme_blocks()[0], encoding="utf-8")
    assert len(readme_blocks()[0].splitlines()) <= 16
    shown = ran_python(example, cwd=tmp_path)
    statuses = [line.split(" |")[0] for line in shown.splitlines() if " | " in line]
    assert statuses == ["OK", "OK", "ERROR", "TIMED_OUT", "ERROR"]
    assert "OK | 12" in shown
    assert shown.rstrip().endswith("(the cell before ran out of time).")


def test_the_readmes_nbclient_example_runs(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(readme_blocks()[1], encoding="utf-8")
    assert "40 rows" in ran_python(example, cwd=ROOT)


def ran_python(file: Path, *, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
