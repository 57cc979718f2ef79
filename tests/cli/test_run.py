import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .command import COMMAND, hermes, invoked, script

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_lines_of_a_script_may_end_as_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_bytes(b"\xef\xbb\xbfx = 6\r\n# %%\r\nx * 7\r\n")
    assert invoked("run", file).out == "42\n"


def test_all_cells_fine_is_0_and_their_text_is_on_stdout(tmp_path: Path) -> None:
    file = script(tmp_path, "import os\nprint('hé ☃')", "x = 6", "x * 7", "os.path.samefile('.', os.curdir)")
    ended = invoked("run", file)
    assert (ended.code, ended.out) == (0, "hé ☃\n42\nTrue\n")


def test_progress_is_one_plain_line_a_cell_on_stderr(tmp_path: Path) -> None:
    lines = invoked("run", script(tmp_path, "print(1)\nprint(2)", "y = '" + "z" * 100 + "'")).err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\[1/2\] ok +\d+\.\d\d s  print\(1\)", lines[0])
    assert re.fullmatch(r"\[2/2\] ok +\d+\.\d\d s  y = 'z+\.\.\.", lines[1])


def test_the_cells_run_where_the_file_is(tmp_path: Path) -> None:
    file = script(tmp_path, "import os\nprint(os.getcwd())")
    (tmp_path / "other").mkdir()
    assert invoked("run", file).out == f"{tmp_path}\n"
    assert hermes("run", file.name, "--cwd", "other", cwd=tmp_path).out == f"{tmp_path / 'other'}\n"


def test_a_script_from_stdin_runs_in_the_current_directory(tmp_path: Path) -> None:
    ended = hermes("run", "-", cwd=tmp_path, text="import os\n# %%\nprint(os.getcwd())")
    assert (ended.code, ended.out) == (0, f"{tmp_path}\n")


def test_a_failed_cell_ends_the_run_with_1(tmp_path: Path) -> None:
    ended = invoked("run", script(tmp_path, "print(1)", "1 / 0", "print(3)"))
    assert ended.code == 1
    assert ended.out.startswith("1\nTraceback")
    assert ended.out.endswith("ZeroDivisionError: division by zero\n")
    assert "cell 2 failed; 1 cell was not run" in ended.err


def test_keep_going_runs_the_rest_and_is_still_1(tmp_path: Path) -> None:
    ended = invoked("run", script(tmp_path, "x = 5", "1 / 0", "print(x)"), "--keep-going")
    assert ended.code == 1
    assert ended.out.endswith("\n5\n")


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 1)])
def test_sys_exit_stops_the_run(tmp_path: Path, status: int, code: int) -> None:
    ended = invoked("run", script(tmp_path, f"import sys\nprint('bye')\nsys.exit({status})", "print('no')"))
    assert (ended.code, ended.out) == (code, "bye\n")
    assert f"exited ({status})" in ended.err
    assert "1 cell was not run" in ended.err


def test_after_sys_exit_keep_going_has_a_fresh_kernel_and_says_so(tmp_path: Path) -> None:
    ended = invoked("run", script(tmp_path, "x = 1\nexit()", "print('x' in globals())"), "--keep-going")
    assert (ended.code, ended.out) == (0, "False\n")
    assert "state is gone" in ended.err
    assert "The state of the last call is gone" in ended.err


def test_a_cell_out_of_time_ends_the_run_with_1(tmp_path: Path) -> None:
    ended = invoked("run", script(tmp_path, "print('in')\nwhile True: pass", "1"), "--timeout", "0.5")
    assert (ended.code, ended.out) == (1, "in\n")
    assert "timed out" in ended.err
    assert "limit of 0.5 s" in ended.err


def test_a_cell_that_kills_its_kernel_ends_the_run_with_1(tmp_path: Path) -> None:
    ended = invoked("run", script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))
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
    for line in re.findall("x = .*", text):
        assert line.startswith("x = '[bold][bold]")
    assert "0:00:0" in text  # the clock beside the spinner
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).strip().splitlines()[-1]
    assert len(last) <= 60


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
    ended = invoked("run", "--json", script(tmp_path, "1"), "--python", shutil.which("true") or "true")
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1
