import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .command import ROOT, WAIT, hermes, read_notebook

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_the_tour_runs_and_is_stored_without_outputs() -> None:
    tour = ROOT / "examples" / "tour.ipynb"
    notebook = read_notebook(tour)
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    ended = hermes("run", tour)
    assert ended.code == 0
    assert "Zugspitze" in ended.out


def test_the_tools_demo_runs_and_is_stored_without_outputs() -> None:
    demo = ROOT / "examples" / "tools_demo.ipynb"
    notebook = read_notebook(demo)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    ended = hermes("run", demo, "--tools", "examples.tools_demo:TOOLS", cwd=ROOT)
    assert ended.code == 0, ended.err
    for shown in ("write_note(name: str, text: str)", "1009650", "'Oslo': '717,710 people'", "only SELECT"):
        assert shown in ended.out


def test_the_agent_loop_runs_from_anywhere(tmp_path: Path) -> None:
    ended = ran_python(ROOT / "examples" / "agent_loop.py", cwd=tmp_path)
    assert "state was lost" in ended
    assert ended.rstrip().endswith("4.5 °C on average, from a file of 40 rows.")


def test_the_mcp_client_runs_from_anywhere(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    shown = ran_python(ROOT / "examples" / "mcp_client.py", cwd=tmp_path)
    assert re.findall(r"^-- (\w+)$", shown, re.M) == ["ran", "failed", "ran", "ran", "ran"]
    for part in ("40", "ValueError: could not convert string to float", "'Zugspitze': 4.5"):
        assert part in shown
    assert re.search(r"^\[image: \d+ characters\]$|no matplotlib", shown, re.M)


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


def test_the_readmes_example_of_many_conversations_shows_what_it_says(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(readme_blocks()[1], encoding="utf-8")
    assert ran_python(example, cwd=tmp_path) == "ERROR RESET\n1\n"


def test_the_readmes_example_of_tools_shows_what_it_says(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(readme_blocks()[2], encoding="utf-8")
    shown = ran_python(example, cwd=tmp_path)
    assert shown == "40\n[('in_stock', \"part='bolt'\"), ('in_stock', \"part='nut'\")]\n"


def test_the_readmes_example_of_output_shows_what_it_says(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(readme_blocks()[3], encoding="utf-8")
    assert ran_python(example, cwd=tmp_path) == "588890\n***\n\n"


def test_the_readmes_nbclient_example_runs(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(readme_blocks()[4], encoding="utf-8")
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


@pytest.mark.parametrize("name", ["threaded_agent", "asyncio_agent"])
def test_the_agent_loops_for_threads_and_for_asyncio_run(name: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / f"{name}.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40
    shown = ran_python(example, cwd=tmp_path)
    said = {
        "threaded_agent": ["anna ok: 13.0", "ben timed_out: The cell ran longer", "ben error: Traceback"],
        "asyncio_agent": ["anna ok: 21", "ben ok: True", "(the cell before was interrupted)"],
    }
    assert [part for part in said[name] if part not in shown] == []


def test_the_live_session_takes_what_is_typed(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "live_session.py", "weather"],
        input="x = 41\nx + 1\n1 / 0\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=WAIT,
        check=True,
    )
    assert "The session is live." in ended.stdout
    assert "42" in ended.stdout
    assert "ZeroDivisionError" in ended.stdout
    cells = read_notebook(tmp_path / "weather.ipynb").cells
    assert [cell.source for cell in cells[1:]] == ["x = 41", "x + 1", "1 / 0"]


def test_what_the_tutorial_types_is_answered_as_it_says(tmp_path: Path) -> None:
    """Its first session, up to where a person comes in, from a directory like the project's root."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(The session is live\.\n.*?)^```", tutorial, re.M | re.S)
    typed = re.findall(r"^agent> (.*)$", block, re.M)
    assert "examples/weather.csv" in typed[0]
    ended = subprocess.run(
        [sys.executable, "examples/live_session.py", "weather"],
        input="".join(f"{line}\n" for line in typed),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=WAIT,
        check=True,
    )
    answers = re.sub(r"^agent> .*\n", "", block, flags=re.M)
    assert ended.stdout.replace("agent> ", "").rstrip("\n") == answers.rstrip("\n")
    assert hermes("replay", "weather.ipynb", cwd=tmp_path).code == 0
