"""Which of the host's variables a cell sees."""

import json
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry, Owner

from .. import interpreters
from .test_cells_basics import still_answers

KEY = "sk-hold0123456789abcdefghij"


def environment(registry: BlockingRegistry, owner: str | Owner = "a") -> Mapping[str, str]:
    result = registry.execute("import json, os; print(json.dumps(dict(os.environ)))", owner=owner, timeout=20)
    seen: dict[str, str] = json.loads(result.stdout)
    return seen


def test_a_secret_of_the_host_is_in_no_environment_of_the_cell(
    registry: BlockingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for code in (
        "import os; print(os.environ.get('OPENAI_API_KEY'))",
        "!env",
        "import subprocess; subprocess.run(['env']); None",
        "print(open('/proc/self/environ').read())",
        "%env",
        "%%bash\nenv",
    ):
        result = registry.execute(code, owner="a", timeout=10)
        assert result.text, code
        assert KEY not in result.text, code
        assert "OPENAI" not in result.stdout, code
    assert registry.execute("os.environ.get('OPENAI_API_KEY') is None", owner="a").value == "True"
    still_answers(registry)


def test_a_kernel_begins_with_an_empty_log_and_a_profile_of_its_own(registry: BlockingRegistry) -> None:
    code = "from IPython.paths import locate_profile; locate_profile() == get_ipython().profile_dir.location"
    assert registry.execute(code, owner="a").value == "True"
    (info,) = registry.kernels()
    assert info.connection_file is not None
    log = Path(info.connection_file).with_name("kernel.log")
    assert not log.exists()
    registry.execute(
        "get_ipython().log.warning('said'); get_ipython().kernel.log.warning('and said')", owner="a"
    )
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["said", "said"]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["a link", "a pipe", "a pipe that somebody reads", "nothing"])
def test_a_log_that_cannot_be_written_costs_no_cell_anything(registry: BlockingRegistry, what: str) -> None:
    registry.execute("x = 41; import os, shutil", owner="a")
    (info,) = registry.kernels()
    assert info.connection_file is not None
    log = Path(info.connection_file).with_name("kernel.log")
    elsewhere = log.with_name("elsewhere")
    make = {
        "a link": f"os.symlink({str(elsewhere)!r}, {str(log)!r})",
        "a pipe": f"os.mkfifo({str(log)!r})",
        "a pipe that somebody reads": f"os.mkfifo({str(log)!r}); r = os.open({str(log)!r}, os.O_NONBLOCK)",
        "nothing": f"shutil.rmtree({str(log.parent)!r})",
    }
    code = f"{make[what]}; get_ipython().kernel.log.warning('said'); x"
    result = registry.execute(code, owner="a", timeout=20)
    assert (result.value, result.stderr) == ("41", "")
    assert not elsewhere.exists()


def test_the_start_up_files_of_the_interpreters_environment_are_run(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    python = interpreters.bare(sys.executable, tmp_path / "venv", lent=sys.executable)
    startup = tmp_path / "venv" / "etc" / "ipython" / "startup"
    startup.mkdir(parents=True)
    (startup / "10-first.py").write_text("begun = ['py']")
    (startup / "20-second.ipy").write_text("begun.append('ipy')")
    assert registry.execute("begun", owner="a", python=python).value == "['py', 'ipy']"


def test_variables_pass_by_an_allow_list_and_a_secret_name_beats_it(
    registry: BlockingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        "KEY",
        "TOKEN",
        "SECRET",
        "PASSWORD",
        "CREDENTIAL",
        "PASSWD",
        "AUTH",
        "DSN",
        "WEBHOOK",
        "CREDS",
        "BEARER",
        "APIKEY",
    ]
    prefixes = [
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "LC_",
        "TERM",
        "TMPDIR",
        "TMP",
        "TEMP",
        "SHELL",
        "LOGNAME",
        "XDG_",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "CONDA",
    ]
    for name in parts:
        monkeypatch.setenv(f"XDG_{name}_X", "secret")
        monkeypatch.setenv(f"LC_{name.lower()}", "secret")
        monkeypatch.setenv(name, "secret")
    for prefix in prefixes:
        monkeypatch.setenv(f"{prefix}_OF_MINE", "safe")
    allowed = [
        "HERMES_HOME",
        "HERMES_PROFILE",
        "HERMES_CONFIG",
        "HERMES_ENV",
        "HERMES_DELEGATED_CHILD_CONTEXT",
    ]
    identity = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL", "DATE")]
    safe = [*allowed, *identity, "XDG_BYPASS", "USER_COMPASS"]
    for name in safe:
        monkeypatch.setenv(name, "safe")
    dropped = [
        "RANDOM_X",
        "HERMES_BASE_URL",
        "DATABASE_URL",
        "GIT_CONFIG_KEY_0",
        "path_lower",
        "JPY_PARENT_PID",
    ]
    for name in dropped:
        monkeypatch.setenv(name, "secret")
    seen = environment(registry)
    assert [name for name in seen if seen[name] == "secret"] == []
    assert [name for name in safe if seen.get(name) != "safe"] == []
    assert [p for p in prefixes if seen.get(f"{p}_OF_MINE") != "safe"] == []
    assert (seen["PYTHONIOENCODING"].lower(), seen["PYTHONUTF8"]) == ("utf-8", "1")
    assert seen["PYTHONDONTWRITEBYTECODE"] == "1"
    assert [name for name in seen if name.startswith("HERMES_RPC")] == []


def test_a_declared_variable_passes_even_with_a_secret_name(
    make_registry: Callable[..., BlockingRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MY_FLAG", "1"), ("MY_TOKEN", "t"), ("OTHER_FLAG", "2"), ("OTHER_TOKEN", "o")):
        monkeypatch.setenv(name, value)
    by_name = make_registry(env_passthrough=["MY_FLAG", "MY_TOKEN", "NOT_SET"])
    by_function = make_registry(env_passthrough=lambda name: name.startswith("MY_"))
    for registry in (by_name, by_function):
        seen = environment(registry)
        assert (seen.get("MY_FLAG"), seen.get("MY_TOKEN")) == ("1", "t")
        assert not {"OTHER_FLAG", "OTHER_TOKEN", "NOT_SET"} & set(seen)
        assert registry.execute("!echo $MY_FLAG", owner="a").stdout.strip() == "1"


def test_the_host_may_give_the_value_of_a_declared_variable_or_withhold_it(
    make_registry: Callable[..., BlockingRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_FLAG", "global")
    monkeypatch.setenv("MY_TOKEN", "global")
    values = {"MY_FLAG": "routed", "MY_NEW": "added"}
    registry = make_registry(
        env_passthrough=["MY_FLAG", "MY_TOKEN", "MY_NEW"], resolve_env=lambda name, _: values.get(name)
    )
    seen = environment(registry)
    assert (seen.get("MY_FLAG"), seen.get("MY_NEW")) == ("routed", "added")
    assert "MY_TOKEN" not in seen


def test_the_host_has_the_last_word_on_what_a_kernel_sees(
    make_registry: Callable[..., BlockingRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_GONE", "1")
    monkeypatch.setenv("MY_TOKEN", "global")
    monkeypatch.setenv("OTHER_TOKEN", "secret")
    asked: list[tuple[dict[str, str], str]] = []

    def build(env: dict[str, str], python: str) -> dict[str, str]:
        asked.append((dict(env), python))
        del env["LC_GONE"]
        return {**env, "LANG": "C.UTF-8", "MY_KEY": "given", "MY_TOKEN": f"{env['MY_TOKEN']} and more"}

    registry = make_registry(env_passthrough=["MY_TOKEN"], build_env=build)
    seen = environment(registry)
    assert "LC_GONE" not in seen
    assert (seen["LANG"], seen["MY_KEY"], seen["MY_TOKEN"]) == ("C.UTF-8", "given", "global and more")
    assert seen["PYTHONUTF8"] == "1"
    (passes, python), *_ = asked
    assert (passes["LC_GONE"], passes["MY_TOKEN"], python) == ("1", "global", sys.executable)
    assert "OTHER_TOKEN" not in passes


def test_the_environment_of_a_kernel_is_frozen_when_it_starts(
    make_registry: Callable[..., BlockingRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_FLAG", "old")
    registry = make_registry(env_passthrough=["MY_FLAG"])
    assert environment(registry)["MY_FLAG"] == "old"
    monkeypatch.setenv("MY_FLAG", "new")
    assert environment(registry)["MY_FLAG"] == "old"
    assert environment(registry, "b")["MY_FLAG"] == "new"
    registry.execute("import os; os._exit(1)", owner="a")
    assert environment(registry)["MY_FLAG"] == "new"


def test_a_cell_that_empties_its_environment_hurts_no_later_cell(registry: BlockingRegistry) -> None:
    registry.execute("import os; os.environ.clear()", owner="a", timeout=5)
    still_answers(registry)
    result = registry.execute("1/0", owner="a", timeout=5)
    assert result.error is not None
    assert result.error.ename == "ZeroDivisionError"
