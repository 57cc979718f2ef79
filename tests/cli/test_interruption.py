import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from .. import traces
from .command import COMMAND, WAIT, read_notebook, script, started

pytestmark = pytest.mark.usefixtures("leaves_nothing")


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
    file = script(tmp_path, f"open({str(ready)!r}, 'w').close()\nwhile True: pass", "print('no')")
    child = started("run", file, "--keep-going")
    ready.read_text()
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=WAIT)
    assert (child.returncode, out) == (143, "")
    assert "1 cell was not run" in err
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
