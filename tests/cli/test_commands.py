import subprocess
import sys
from pathlib import Path

import pytest

from .command import ROOT, WAIT, invoked


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
    assert result.code == 2
    assert result.out == ""
    assert said in result.err


def test_the_version_and_the_help_are_there() -> None:
    assert invoked("--version").out.startswith("hermes-kernel, version ")
    for command in ([], ["run"], ["doctor"]):
        result = invoked(*command, "--help")
        assert result.code == 0
        assert "Exit codes" in result.out


def test_the_installed_script_is_this_command() -> None:
    installed = Path(sys.executable).with_name("hermes-kernel")
    done = subprocess.run([installed, "--version"], capture_output=True, timeout=WAIT, check=True)
    assert done.stdout.startswith(b"hermes-kernel, version ")
