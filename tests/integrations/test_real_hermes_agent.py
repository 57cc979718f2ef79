"""The backend with the real hermes-agent: a program uses both, in an environment of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from .. import traces

REQUIRED = bool(os.environ.get("HERMES_TEST_HERMES_AGENT"))
"""Whether an environment that cannot be made is a failure; else the tests are skipped, and pip says why."""

RELEASE = "hermes-agent==0.19.0"
PROGRAM, PLUGGED = (Path(__file__).with_name(f"{name}_agent.py") for name in ("real", "plugged"))
PROJECT = Path(__file__).parents[2]
INSTALL_TIMEOUT, RUN_TIMEOUT = 400, 120  # seconds

pytestmark = pytest.mark.timeout(INSTALL_TIMEOUT + RUN_TIMEOUT + 60)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with hermes-agent and this package."""
    directory = tmp_path_factory.mktemp("hermes-agent")
    python = directory / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for command in ([sys.executable, "-m", "venv", directory], [*pip, "install", RELEASE, "-e", PROJECT]):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False
            )
            problem = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"it took longer than {INSTALL_TIMEOUT} s"
        if problem:
            said = f"{RELEASE} cannot be installed here: {problem[-2000:]}"
            if REQUIRED:
                pytest.fail(said)
            pytest.skip(said)
    return python


class Told:
    """What the program has said, and where it ran."""

    def __init__(self, answer: dict[str, Any], work: Path, runtime: Path) -> None:
        self.work = work
        self.runtime = runtime
        self._answer = answer

    def __getitem__(self, scene: str) -> Any:
        return self._answer[scene]


def run(python: Path, home: Path, runtime: Path, *command: str | Path) -> dict[str, Any]:
    """Run a program with the agent, and read its answer."""
    # A kernel of the agent's own environment, not of the tests'.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    env.update(HERMES_HOME=str(home), HERMES_TIMEZONE="Asia/Tokyo", XDG_RUNTIME_DIR=str(runtime))
    env.pop("TZ", None)
    done = subprocess.run(
        [python, *command], capture_output=True, text=True, timeout=RUN_TIMEOUT, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="session")
def told(python: Path, tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Told:
    """What came of all scenes."""
    place = tmp_path_factory.mktemp("real-agent")
    home, work, own = place / "home", place / "work", runtime / "real"
    for directory in (home, work, own):
        directory.mkdir(mode=0o700)
    return Told(run(python, home, own, PROGRAM, home, work), work, own)


def test_real_tools_are_called_with_their_own_signatures_and_answer_with_mappings(told: Told) -> None:
    result = told["tools"]
    said = json.loads(result["output"])
    assert said["signature"].startswith("(path: str, offset: int = 1")
    assert said["documented"]
    assert said["write"]["bytes_written"] == len("alpha\nbeta\ngamma\n")
    assert "beta" in said["read"]["content"]
    assert "alpha" not in said["read"]["content"]
    assert said["patch"]["success"]
    assert "notes.txt" in json.dumps(said["found"])
    assert (said["shell"]["output"].splitlines(), said["shell"]["exit_code"]) == (
        ["alpha", "delta", "gamma"],
        3,
    )
    assert "no-such-file.txt" in said["missing"]["error"]
    assert (result["status"], result["tool_calls_made"]) == ("success", 6)
    assert [error["tool"] for error in result["tool_errors"]] == ["read_file"]
    assert (told.work / "notes.txt").read_text() == "alpha\ndelta\ngamma\n"


def test_the_budget_of_a_cell_holds_for_real_tools(told: Told) -> None:
    first, second, third = told["budget"]["output"].splitlines()
    assert "'output': '0'" in first
    assert "'output': '1'" in second
    assert "limit reached" in third
    assert told["budget"]["tool_calls_made"] == 2


def test_a_script_reads_in_full_and_its_model_too_and_what_was_changed_meanwhile_is_noticed(
    told: Told,
) -> None:
    scene = told["reads"]
    contents = [content for script in scene["script"] for content in script] + [scene["model"]]
    assert len(contents) == 13
    assert all("seen by the script alone" in str(content) for content in contents)
    assert "warning" in scene["written"], "the agent knows what was read, and that it has changed since"


def test_what_was_not_given_and_what_outlives_its_cell_is_refused(told: Told) -> None:
    not_given, late = told["refusals"]["not_given"], told["refusals"]["late"]
    assert "cannot import name 'terminal'" in not_given["error"]
    assert "read_file" in not_given["hint"]
    assert late["output"].startswith("No active execute_code cell")
    assert late["tool_calls_made"] == 0


def test_secrets_and_escape_sequences_are_taken_out(told: Told) -> None:
    result = told["cleaning"]
    assert result["output"].startswith("red ghp_")
    assert "\x1b" not in json.dumps(result)
    assert "ghp_" + "a1B2c3D4e5" * 4 not in json.dumps(result)
    assert "ValueError: ghp_" in result["error"]


def test_the_agents_own_rules_say_what_a_kernel_sees(told: Told) -> None:
    seen = dict(json.loads(told["environment"]["output"]))
    assert seen["NOTION_TOKEN"] == "ntn-kept"
    assert not {"OPENAI_API_KEY", "OTHER_TOKEN", "HERMES_TIMEZONE"} & seen.keys()
    assert seen["TZ"] == "Asia/Tokyo"
    assert seen["HERMES_REAL_HOME"]
    assert not [name for name in seen if name.startswith("HERMES_RPC")]


def test_a_dangerous_command_asks_the_session_whose_turn_it_is(told: Told) -> None:
    scene = told["approval"]
    denied, allowed = scene["results"]
    assert (denied["there"], allowed["there"]) == (True, False)
    assert "denied" in denied["output"]
    assert all("rm -rf" in asked["command"] for asked in scene["asked"])
    assert len(scene["asked"]) == 2
    assert len(scene["prompted"]) == 1
    assert "denied" in scene["at_terminal"]
    assert scene["there"]


def test_a_kernel_belongs_to_the_session_key_of_the_turn(told: Told) -> None:
    scene = told["sessions"]
    assert (scene["again"], scene["other"]) == ("1\n", "False\n")
    assert "one" not in scene["owners"]
    assert "two" in scene["owners"]


def test_the_interrupt_bit_of_the_calling_thread_ends_the_cell(told: Told) -> None:
    result = told["interrupt"]
    assert (result["status"], result["exit_code"]) == ("interrupted", -1)
    assert result["output"].endswith("[execution interrupted]")
    assert "state was lost" in result["error"]


def test_the_agents_registry_serves_the_tool_with_its_own_guard_configuration_and_directories(
    told: Told,
) -> None:
    scene = told["entry"]
    assert (scene["first"]["output"], scene["first"]["tool_calls_made"]) == ("0\n", 1)
    assert scene["moved"]["output"] == f"{told.work / 'sub'}\nFalse\n"
    assert scene["moved"]["kernel"]["lost_reason"] == "cwd_changed"
    assert scene["reset"]["kernel"]["state_reset"]
    assert "non-empty" in scene["blank"]["error"]
    assert scene["elsewhere"]["output"] == "hermes gateway restart\n"
    assert "would end the gateway" in scene["inside"]["error"]
    assert scene["inside"]["output"] == ""


def test_a_model_of_the_real_agent_is_told_what_ours_is(told: Told) -> None:
    scene = told["definitions"]
    few, many = (scene["told"][f"{number} True"] for number in (2, 3))
    assert [scene["told"][f"{number} False"] for number in (2, 3)] == [few, many]
    live = scene["ours"]["description"].partition("\n\n")[0]
    for schema in (few, many):
        assert live in schema["description"]
        assert "read_file(path, offset=1, limit=500)" in schema["description"]
        assert schema["parameters"]["properties"].keys() == {"code", "reset"}
        assert "session's working directory" in schema["description"]
    assert "terminal(command" not in few["description"]
    assert "terminal(command" in many["description"]


@pytest.mark.parametrize("first", ["agent", "backend"])
def test_a_plugin_can_put_it_there_while_the_real_agent_is_imported(
    python: Path, tmp_path: Path, runtime: Path, first: str
) -> None:
    home, own = tmp_path / "home", runtime / first
    for directory in (home, own):
        directory.mkdir(mode=0o700)
    answer = run(python, home, own, PLUGGED, home, first)
    assert answer["by"]["output"] == "42\n"
    assert answer["by"]["kernel"]["mode"] == "session"
    assert "live kernel" in answer["definition"]["description"]
    assert "reset" in answer["definition"]["parameters"]["properties"]
    assert traces.kernels_of(own) == []


def test_nothing_of_the_real_agents_kernels_is_left(told: Told) -> None:
    assert len(told["pids"]) >= 2
    assert not any(map(psutil.pid_exists, told["pids"]))
    assert traces.kernels_of(told.runtime) == []
    assert traces.eventually(lambda: not traces.marked_processes(str(told.runtime)))
