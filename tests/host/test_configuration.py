"""Arguments, the environment, a file, the defaults; and what is wrong is said with its place."""

from dataclasses import fields
from pathlib import Path

import pytest

from hermes_kernel import ConfigError, Limits, Transcript
from hermes_kernel.host.configuration import DEFAULTS, Configuration
from hermes_kernel.host.options import RegistryOptions


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_without_anything_all_is_default(tmp_path: Path) -> None:
    configuration = Configuration.load({"PATH": "/bin"}, tmp_path)
    assert {setting.source for setting in configuration.settings.values()} == {"default"}
    assert configuration.limits() == Limits()
    assert {field.name for field in fields(Limits)} <= set(DEFAULTS)
    assert RegistryOptions.of(configuration.registry_arguments()).limits == Limits()


def test_what_is_nearer_to_the_call_counts(tmp_path: Path) -> None:
    file = written(tmp_path / "hermes-kernel.toml", "timeout = 10\nmax_kernels = 2\nidle_timeout = 60\n")
    environ = {"HERMES_KERNEL_TIMEOUT": "20", "HERMES_KERNEL_MAX_KERNELS": "3"}
    configuration = Configuration.load(environ, tmp_path).with_arguments("--timeout", timeout=30, cwd=None)
    assert [(name, configuration.settings[name].value, configuration.settings[name].source)
            for name in ("timeout", "max_kernels", "idle_timeout", "start_timeout", "cwd")] == [
        ("timeout", 30, "--timeout"),
        ("max_kernels", 3, "HERMES_KERNEL_MAX_KERNELS"),
        ("idle_timeout", 60, str(file)),
        ("start_timeout", 30, "default"),
        ("cwd", None, "default"),
    ]  # fmt: skip
    assert configuration.limits() == Limits(timeout=30, max_kernels=3, idle_timeout=60)


def test_the_nearest_file_counts_and_its_own_before_the_projects(tmp_path: Path) -> None:
    written(tmp_path / "hermes-kernel.toml", "timeout = 1")
    inner = tmp_path / "a" / "b"
    project = written(tmp_path / "a" / "pyproject.toml", "[tool.hermes-kernel]\ntimeout = 2\n")
    inner.mkdir()
    assert Configuration.load({}, inner).settings["timeout"].source == str(project)
    written(tmp_path / "a" / "hermes-kernel.toml", "timeout = 3")
    assert Configuration.load({}, inner)["timeout"] == 3
    written(inner / "pyproject.toml", "[project]\nname = 'x'\n")  # none of ours: passed over
    assert Configuration.load({}, inner)["timeout"] == 3
    written(inner / "pyproject.toml", "this is = not [ toml")
    assert Configuration.load({}, inner)["timeout"] == 3


def test_a_file_can_be_named(tmp_path: Path) -> None:
    written(tmp_path / "hermes-kernel.toml", "timeout = 1")
    other = written(tmp_path / "other" / "mine.toml", "timeout = 4")
    project = written(tmp_path / "other" / "pyproject.toml", "[tool.hermes-kernel]\ntimeout = 5\n")
    for path, timeout in ((other, 4), (project, 5)):
        assert Configuration.load({"HERMES_KERNEL_CONFIG": str(path)}, tmp_path)["timeout"] == timeout
    with pytest.raises(ConfigError, match="no such file"):
        Configuration.load({"HERMES_KERNEL_CONFIG": str(tmp_path / "none.toml")}, tmp_path)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("none", "timeout", None),
        ("0.5", "timeout", 0.5),
        ("7", "max_tool_calls", 7),
        ("NONE", "max_tool_calls", None),
        ("none", "isolation", "none"),
        ("namespace", "isolation", "namespace"),
        ("1", "require_isolation", True),
        ("off", "allow_magics", False),
        ("A_KEY, B_KEY ,", "env_passthrough", ("A_KEY", "B_KEY")),
        ("x = 1", "bootstrap", "x = 1"),
        ("", "spill_dir", None),
        ("1073741824", "memory_limit", 1073741824),
    ],
)
def test_a_variables_text_becomes_a_value(tmp_path: Path, text: str, name: str, value: object) -> None:
    configuration = Configuration.load({f"HERMES_KERNEL_{name.upper()}": text}, tmp_path)
    assert configuration[name] == value


def test_a_files_values_become_a_registry(tmp_path: Path) -> None:
    lines = [
        "timeout = 'none'",
        "env_passthrough = ['A_KEY']",
        "expose = true",
        "transcript = 'session.ipynb'",
        "record_tools = true",
        "python = 'python3'",
    ]
    written(tmp_path / "hermes-kernel.toml", "\n".join(lines))
    configuration = Configuration.load({}, tmp_path)
    arguments = configuration.registry_arguments()
    assert arguments["limits"].timeout is None
    assert arguments["env_passthrough"] == ("A_KEY",)
    assert arguments["transcript"] == Transcript("session.ipynb", record_tools=True)
    assert configuration.call_arguments() == {"python": "python3", "cwd": None}


@pytest.mark.parametrize(
    ("environ", "text", "said"),
    [
        ({"HERMES_KERNEL_TIMEOT": "1"}, "", ["HERMES_KERNEL_TIMEOT", "HERMES_KERNEL_TIMEOUT"]),
        ({"HERMES_KERNEL_TIMEOUT": "soon"}, "", ["HERMES_KERNEL_TIMEOUT='soon'", "number"]),
        ({"HERMES_KERNEL_TIMEOUT": "-1"}, "", ["timeout=-1", "(HERMES_KERNEL_TIMEOUT)"]),
        ({"HERMES_KERNEL_EXPOSE": "maybe"}, "", ["HERMES_KERNEL_EXPOSE='maybe'", "1 or 0"]),
        ({"HERMES_KERNEL_XYZZY": "1"}, "", ["XYZZY", *(f"HERMES_KERNEL_{n.upper()}" for n in DEFAULTS)]),
        ({"HERMES_KERNEL_TIMEOUT": "9" * 400}, "", ["too large", "HERMES_KERNEL_TIMEOUT", "smaller"]),
        ({"HERMES_KERNEL_TIMEOUT": "9" * 5000}, "", ["too large", "HERMES_KERNEL_TIMEOUT", "smaller"]),
        ({"HERMES_KERNEL_TIMEOUT": "1e999"}, "", ["too large", "HERMES_KERNEL_TIMEOUT", "smaller"]),
        ({}, "time_out = 1", ["'time_out'", "'timeout'", "hermes-kernel.toml"]),
        ({}, "timeout = -1", ["timeout=-1", "hermes-kernel.toml"]),
        ({}, "timeout = '1'", ["timeout='1'", "hermes-kernel.toml"]),
        ({}, "expose = 1", ["expose=1", "true or false"]),
        ({}, "python = 3", ["python=3", "text"]),
        ({}, "env_passthrough = 'A'", ["env_passthrough='A'", "list"]),
        ({}, "timeout = ", ["not TOML", "hermes-kernel.toml"]),
        ({}, "xyzzy = 1", ["'xyzzy'", "hermes-kernel.toml", *DEFAULTS]),
        ({}, f"timeout = {'9' * 400}", ["timeout", "too large", "hermes-kernel.toml", "smaller"]),
        ({}, f"max_kernels = {'9' * 5000}", ["too large", "hermes-kernel.toml", "smaller"]),
        ({}, f"max_kernels = 0x{'f' * 5000}", ["max_kernels", "too large", "hermes-kernel.toml", "smaller"]),
        ({}, f"python = 0x{'f' * 5000}", ["python=", "hermes-kernel.toml", "text"]),
        ({}, f"env_passthrough = [0x{'f' * 5000}]", ["env_passthrough=", "hermes-kernel.toml", "list"]),
        ({}, f"python = [{'1,' * 5000}]", ["python=[1, 1", "hermes-kernel.toml", "text"]),
        ({}, "timeout = " + "[" * 5000, ["nested too deeply", "hermes-kernel.toml"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    tmp_path: Path, environ: dict[str, str], text: str, said: list[str]
) -> None:
    written(tmp_path / "hermes-kernel.toml", text)
    with pytest.raises(ConfigError) as caught:
        Configuration.load(environ, tmp_path)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert len(str(caught.value)) < 1500


def test_an_argument_that_is_wrong_is_said_with_its_source() -> None:
    configuration = Configuration.load({}, None).with_arguments("--timeout", timeout=10**400)
    with pytest.raises(ConfigError, match=r"^timeout is a whole number too large .*\(--timeout\)$"):
        configuration.limits()


def test_variables_of_a_kernels_own_are_no_settings(tmp_path: Path) -> None:
    environ = {"HERMES_KERNEL_PLAIN": "1", "HERMES_KERNEL_COOKIE": "0" * 32}
    assert Configuration.load(environ, tmp_path).limits() == Limits()


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="'timeout'"):
        Configuration.load({}, Path("/")).with_arguments(timout=1)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool]\nhermes-kernel = 3\n", "tool.hermes-kernel in"),
        ("tool = 'hermes-kernel'\n", "tool in"),
        ("tool = [1]  # hermes-kernel\n", "tool in"),
        ("[[tool]]\nhermes-kernel = 1\n", "tool in"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, said: str, *, named: bool) -> None:
    path = written(tmp_path / "pyproject.toml", text)
    environ = {"HERMES_KERNEL_CONFIG": str(path)} if named else {}
    with pytest.raises(ConfigError, match="make it a table") as caught:
        Configuration.load(environ, tmp_path)
    assert f"{said} {path} is a" in str(caught.value)


@pytest.mark.parametrize("named", ["~no-such-user/x.toml", "a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, named: str) -> None:
    with pytest.raises(ConfigError, match=r"HERMES_KERNEL_CONFIG=.*name one"):
        Configuration.load({"HERMES_KERNEL_CONFIG": named}, tmp_path)
