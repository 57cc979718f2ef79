"""``config show``, and that the commands do what is set."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel.host.configuration import DEFAULTS

from .command import WAIT, Ended, hermes, invoked, read_notebook, script
from .test_people import without


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("HERMES_KERNEL_") and name != "HERMES_KERNEL_PLAIN":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def shown() -> dict[str, Any]:
    ended = invoked("config", "show", "--json")
    assert (ended.code, ended.err) == (0, "")
    found: dict[str, Any] = json.loads(ended.out)
    return found


def refused(ended: Ended) -> str:
    """The one sentence of a command that has not begun."""
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: ")
    assert ended.err.count("\n") == 1
    return ended.err


# -- config show ------------------------------------------------------------------------------------------


def test_each_setting_is_shown_with_its_value_and_its_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hermes-kernel.toml"
    file.write_text("max_kernels = 2\nenv_passthrough = ['A', 'B']\ntimeout = 7\nbootstrap = 'a\\nb'\n")
    monkeypatch.setenv("HERMES_KERNEL_TIMEOUT", "none")
    monkeypatch.setenv("HERMES_KERNEL_EXPOSE", "yes")
    ended = invoked("config", "show")
    assert (ended.code, ended.err) == (0, "")
    headings, *rows = (line.split() for line in ended.out.splitlines())
    assert headings == ["SETTING", "VALUE", "FROM"]
    told = {row[0]: row[1:] for row in rows}
    assert list(told) == list(DEFAULTS)
    assert told["timeout"] == ["none", "HERMES_KERNEL_TIMEOUT"]
    assert told["expose"] == ["true", "HERMES_KERNEL_EXPOSE"]
    assert told["max_kernels"] == ["2", str(file)]
    assert told["env_passthrough"] == ["A,", "B", str(file)]
    assert told["bootstrap"] == ["a\\nb", str(file)]
    assert told["idle_timeout"] == ["1800.0", "default"]
    assert told["cwd"] == ["none", "default"]


def test_as_json_the_values_have_their_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text("[tool.hermes-kernel]\nmemory_limit = 1000000000\nallow_magics = false\n")
    monkeypatch.setenv("HERMES_KERNEL_TIMEOUT", "0.5")
    monkeypatch.setenv("HERMES_KERNEL_ENV_PASSTHROUGH", "A_NAME,B_NAME")
    found = shown()
    assert set(found) == set(DEFAULTS)
    assert found["timeout"] == {"value": 0.5, "source": "HERMES_KERNEL_TIMEOUT"}
    assert found["env_passthrough"]["value"] == ["A_NAME", "B_NAME"]
    assert found["memory_limit"] == {"value": 1000000000, "source": str(project)}
    assert found["allow_magics"] == {"value": False, "source": str(project)}
    assert found["spill_dir"] == {"value": None, "source": "default"}


def test_a_time_without_end_is_none(tmp_path: Path) -> None:
    file = tmp_path / "hermes-kernel.toml"
    file.write_text("timeout = inf\n")
    assert shown()["timeout"] == {"value": None, "source": str(file)}
    assert "Infinity" not in invoked("config", "show", "--json").out
    (row,) = [line.split() for line in invoked("config", "show").out.splitlines() if "timeout " in line[:9]]
    assert row == ["timeout", "none", str(file)]


def test_a_file_that_is_named_counts_instead_of_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hermes-kernel.toml").write_text("timeout = 1\nmax_kernels = 1\n")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert shown()["timeout"] == {"value": 1, "source": str(tmp_path / "hermes-kernel.toml")}
    named = tmp_path / "mine.toml"
    named.write_text("timeout = 2\n")
    monkeypatch.setenv("HERMES_KERNEL_CONFIG", str(named))
    found = shown()
    assert found["timeout"] == {"value": 2, "source": str(named)}
    assert found["max_kernels"]["source"] == "default"
    monkeypatch.setenv("HERMES_KERNEL_CONFIG", str(tmp_path / "none.toml"))
    assert "there is no such file" in refused(invoked("config", "show"))


WRONG_FILES = [
    ("xyzzy = 1", ["'xyzzy'", "known are: max_kernels, ", ", cwd"]),
    ("tool = 1", ["'tool'", "hermes-kernel.toml"]),
    ("timeout = " + "[" * 5000, ["is nested too deeply", "hermes-kernel.toml"]),
    ("time_out = 1", ["'time_out'", "did you mean 'timeout'?"]),
    ("timeout = -1", ["timeout=-1", "hermes-kernel.toml"]),
    ("timeout = ", ["is not TOML", "hermes-kernel.toml"]),
    ("expose = 'yes'", ["expose='yes'", "true or false"]),
]


@pytest.mark.parametrize("command", [("config", "show"), ("run", "-"), ("mcp",)], ids=" ".join)
@pytest.mark.parametrize(("text", "parts"), WRONG_FILES, ids=[text[:20] for text, _ in WRONG_FILES])
def test_a_wrong_file_is_one_sentence_of_every_command(
    tmp_path: Path, command: tuple[str, ...], text: str, parts: list[str]
) -> None:
    (tmp_path / "hermes-kernel.toml").write_text(text)
    sentence = refused(invoked(*command))
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize("command", [("config", "show"), ("run", "-"), ("mcp",)], ids=" ".join)
def test_a_wrong_variable_is_one_sentence_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HERMES_KERNEL_MAX_KERNLES", "2")
    sentence = refused(invoked(*command))
    assert "'HERMES_KERNEL_MAX_KERNLES' in the environment" in sentence
    assert "did you mean 'HERMES_KERNEL_MAX_KERNELS'?" in sentence


def test_a_directory_that_is_gone_has_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shown()["timeout"]["source"] == "default"
    monkeypatch.chdir("/")


# -- what the commands do with it -------------------------------------------------------------------------


@pytest.mark.usefixtures("leaves_nothing")
def test_run_does_what_is_set(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "hermes-kernel.toml").write_text(
        f"timeout = 0.5\ncwd = {str(work)!r}\nbootstrap = 'given = 5'\nallow_magics = false\n"
        "env_passthrough = ['SHOWN']\ntranscript = 'kept.ipynb'\n"
    )
    file = script(
        tmp_path,
        "import os\nprint(os.getcwd(), given, os.environ.get('SHOWN'))",
        "%time 1",
        "while True: pass",
    )
    ended = hermes("run", file, "--keep-going", cwd=tmp_path, SHOWN="here")
    assert ended.code == 1
    assert f"{work} 5 here" in ended.out
    assert "SyntaxError" in ended.out
    assert "longer than its limit of 0.5 s" in ended.err
    assert len(read_notebook(tmp_path / "kept.ipynb").cells) == 3


@pytest.mark.usefixtures("leaves_nothing")
def test_options_of_run_win_and_without_any_the_cells_run_where_the_file_is(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (tmp_path / "hermes-kernel.toml").write_text("timeout = 0.2\npython = '/no/python'\ncwd = '/no/place'\n")
    code = "import os, time\ntime.sleep(0.4)\nprint(os.getcwd())"
    options = ("--timeout", "30", "--python", sys.executable, "--cwd", str(place))
    ended = hermes("run", script(tmp_path, code), *options, cwd=tmp_path)
    assert (ended.code, ended.out) == (0, f"{place}\n"), ended.err
    elsewhere = hermes("run", script(tmp_path, code), cwd=place.parent.parent)
    assert (elsewhere.code, elsewhere.out) == (0, f"{tmp_path}\n"), elsewhere.err
    wrong = hermes("run", script(tmp_path, "1"), "--timeout", "-1", cwd=place.parent.parent)
    assert "timeout=-1" in refused(wrong)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_run_in_a_directory_that_is_gone_needs_its_option_alone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os; os.rmdir({str(gone)!r})\n"
        "from hermes_kernel.cli import main; main(['run', '-', '--cwd', '/'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=gone,
        input="import os; print(os.getcwd())",
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=WAIT,
    )
    assert (done.returncode, done.stdout) == (0, "/\n"), done.stderr


@pytest.mark.usefixtures("leaves_nothing")
def test_a_replay_has_the_limits_that_are_set_and_leaves_no_record(tmp_path: Path) -> None:
    session = tmp_path / "session.ipynb"
    recorded = hermes("run", script(tmp_path, "print('x' * 5000)"), "--save", session, cwd=tmp_path)
    assert recorded.code == 0, recorded.err
    (tmp_path / "hermes-kernel.toml").write_text(
        "transcript = 'kept.ipynb'\nbootstrap = 'print(1/0)'\npython = '/no/python'\ncwd = '/no/place'\n"
    )
    before = sorted(tmp_path.iterdir())
    same = hermes("replay", session, cwd=tmp_path)
    assert same.code == 0, same.out + same.err
    assert sorted(tmp_path.iterdir()) == before
    cut = hermes("replay", session, cwd=tmp_path, HERMES_KERNEL_OUTPUT_BYTES="1000")
    assert cut.code == 1
    assert "gap" in cut.out or "DIFFERS" in cut.out
    assert "did you mean" in refused(hermes("replay", session, cwd=tmp_path, HERMES_KERNEL_OUTPUT_BYTE="1"))


@pytest.mark.usefixtures("leaves_nothing")
def test_mcp_does_what_is_set_and_its_options_win(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
    from ..integrations.raw import raw

    (tmp_path / "mine.toml").write_text("timeout = 0.2\ncwd = '/no/place'\nbootstrap = 'given = 5'\n")
    named = {"HERMES_KERNEL_CONFIG": str(tmp_path / "mine.toml")}
    with raw(tmp_path / "said", "--cwd", tmp_path, **named) as server:
        server.initialize()
        server.call(1, "import os; print(os.getcwd(), given, flush=True)\nwhile True: pass")
        text = server.answer(1)["result"]["content"][0]["text"]
        assert f"{tmp_path} 5" in text
        assert "longer than its limit of 0.2 s" in text
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.ended() == 0


def test_without_its_sdk_the_mcp_server_is_one_sentence(tmp_path: Path) -> None:
    sentence = refused(hermes("mcp", PYTHONPATH=without(tmp_path, "mcp"), text=""))
    assert 'pip install "hermes-kernel[mcp]"' in sentence
