"""``attach``, ``lab`` and ``vars``: what they refuse, and what ``vars`` and ``ps`` show."""

import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellStatus, Owner

from .. import traces
from .command import hermes, invoked

Make = Callable[..., BlockingRegistry]

LOOKS = ["attach", "vars"]


@pytest.fixture
def exposed(make_registry: Make) -> BlockingRegistry:
    return make_registry(expose=True)


def kernels() -> dict[str, dict[str, object]]:
    return {each["owner"]: each for each in json.loads(invoked("ps", "--json").out)}


def told(*arguments: str) -> list[dict[str, object]]:
    ended = invoked("vars", *arguments, "--json")
    assert (ended.code, ended.err) == (0, "")
    found: list[dict[str, object]] = json.loads(ended.out)
    return found


def without(place: Path, module: str) -> str:
    """The PYTHONPATH of a Python that has no such module."""
    (place / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    return os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))


def test_variables_are_shown_in_columns(exposed: BlockingRegistry) -> None:
    exposed.execute("rows = [0] * 5000\nname, nothing = 'Bob', None\nclass C: pass\nc = C()", owner="a")
    ended = invoked("vars", "a")
    assert (ended.code, ended.err) == (0, "")
    headings, *rows = (line.split(maxsplit=4) for line in ended.out.splitlines())
    assert headings == ["NAME", "TYPE", "SIZE", "VALUE"]
    assert [row[0] for row in rows] == ["C", "c", "name", "nothing", "rows"]
    assert rows[0] == ["C", "type", "-", "C"]
    assert rows[1] == ["c", "C", "-"]
    assert rows[2] == ["name", "str", str(sys.getsizeof("Bob")), "B", "'Bob'"]
    assert rows[4] == ["rows", "list", "39", "KiB", "[0, 0, 0, 0, 0, … (5000)]"]
    assert ended.out.count("\n") == 6


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ("0", "0 B"),
        ("10**5", "98 KiB"),
        ("4 * 10**6", "4 MiB"),
        ("5 * 2**29", "2 GiB"),
        ("2**44", "16384 GiB"),
    ],
)
def test_sizes_are_in_units_that_are_easy_to_read(exposed: BlockingRegistry, size: str, shown: str) -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy
    code = f"import numpy as np\nx = np.broadcast_to(np.int8(0), ({size},))"
    assert exposed.execute(code, owner="a").status is CellStatus.OK
    assert invoked("vars", "a").out.splitlines()[-1].split()[:5] == [
        "x", "numpy.ndarray", *shown.split(), "int8"
    ]  # fmt: skip


def test_variables_are_told_to_programs_as_one_list(exposed: BlockingRegistry) -> None:
    exposed.execute("x = 1\nclass C: pass\nc = C()", owner="a")
    assert told("a") == [
        {"name": "C", "type": "type", "size": None, "text": "C"},
        {"name": "c", "type": "C", "size": None, "text": ""},
        {"name": "x", "type": "int", "size": sys.getsizeof(1), "text": "1"},
    ]


def test_a_kernel_without_variables_says_so(exposed: BlockingRegistry) -> None:
    exposed.execute("pass", owner="a")
    assert invoked("vars", "a").out == "There are no variables.\n"
    assert told("a") == []


def test_looking_from_another_process_is_no_cell_and_changes_nothing(exposed: BlockingRegistry) -> None:
    exposed.execute("x = 1", owner="a")
    ended = hermes("vars", "a")
    assert (ended.code, ended.err) == (0, "")
    assert "x     int   28 B  1" in ended.out
    result = exposed.execute("x", owner="a")
    assert (result.value, result.kernel.foreign_cells, result.execution_count) == ("1", 0, 2)


def test_variables_are_shown_while_a_cell_runs(exposed: BlockingRegistry, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    code = f"x = 1\nopen({str(begun)!r}, 'w').close()\nopen({str(go_on)!r}).close()"
    results = []
    cell = threading.Thread(target=lambda: results.append(exposed.execute(code, owner="a")))
    cell.start()
    begun.read_bytes()
    try:
        assert [each["name"] for each in told("a")] == ["x"]
    finally:
        go_on.write_bytes(b"")
        cell.join(30)
    assert results[0].status is CellStatus.OK


def test_a_kernel_that_does_not_answer_is_one_sentence(
    exposed: BlockingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposed.execute("x = 1", owner="a")
    (info,) = exposed.kernels()
    assert info.pid is not None
    monkeypatch.setattr("hermes_kernel.cli.people.ANSWER_TIMEOUT", 0.5)
    kernel = psutil.Process(info.pid)
    kernel.suspend()
    assert traces.eventually(lambda: kernel.status() == psutil.STATUS_STOPPED)
    try:
        ended = invoked("vars", "a")
    finally:
        kernel.resume()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: the kernel did not answer within 0.5 s")
    assert ended.err.count("\n") == 1
    assert [each["name"] for each in told("a")] == ["x"]


def test_no_repr_runs_and_no_control_character_is_shown(exposed: BlockingRegistry, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    code = (
        f"class C:\n    def __repr__(self): open({str(asked)!r}, 'w').close(); raise SystemExit\n"
        "globals()['\\x1b]0;x\\x07red\\n'] = C(); text = '\\x1b]0;x\\x07red'"
    )
    exposed.execute(code, owner="a")
    ended = invoked("vars", "a")
    assert ended.code == 0
    assert not {"\x1b", "\x07"} & set(ended.out)
    assert ended.out.splitlines()[1].split() == ["red", "C", "-"]
    assert not asked.exists()


def test_secrets_of_the_persons_own_environment_and_keys_are_masked(
    exposed: BlockingRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "w1thheld-" * 6
    monkeypatch.setenv("SERVICE_TOKEN", secret)
    exposed.execute(f"x = ['{secret[:20]}' + '{secret[20:]}']\nkey = 'sk-ant-api03-' + 'aB3' * 30", owner="a")
    texts = {each["name"]: each["text"] for each in told("a")}
    assert texts["x"] == "['***']"
    assert "aB3aB3" not in str(texts["key"])
    assert secret[:9] not in invoked("vars", "a").out


@pytest.mark.parametrize("command", LOOKS)
def test_an_owner_that_has_no_kernel_is_one_sentence_with_a_next_step(
    exposed: BlockingRegistry, command: str
) -> None:
    exposed.execute("1", owner="a")
    for name in ("nobody", "a/child", "a@scope", ""):
        ended = invoked(command, name)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == (
            f"Error: no live kernel is called {name!r}; `hermes-kernel ps` shows those there are\n"
        )


@pytest.mark.parametrize("command", LOOKS)
def test_a_session_that_is_not_exposed_is_not_looked_into(registry: BlockingRegistry, command: str) -> None:
    registry.execute("secret = 1", owner="a")
    ended = invoked(command, "a")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: the session 'a' is not exposed: ")
    assert "expose=True" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("command", LOOKS)
def test_of_two_kernels_of_one_owner_the_person_chooses_by_id(
    exposed: BlockingRegistry, command: str, tmp_path: Path
) -> None:
    exposed.execute("x = 1", owner="a")
    exposed.execute("x = 2", owner="a", cwd=str(tmp_path))
    ended = invoked(command, "a")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Error: 'a' has 2 kernels: give the id of one of them: ")
    ids = ended.err.rstrip("\n").rpartition(": ")[2].split(", ")
    assert sorted(ids) == sorted(info.kernel_id[:12] for info in exposed.kernels())
    (second,) = (info for info in exposed.kernels() if info.cwd == str(tmp_path))
    if command == "vars":
        assert told(second.kernel_id[:12])[0]["text"] == "2"


def test_a_kernel_is_named_by_its_session_its_owner_or_its_id(exposed: BlockingRegistry) -> None:
    exposed.execute("x = 1", owner=Owner("conversation", child="child"))
    (info,) = exposed.kernels()
    for name in ("conversation", "conversation/child", info.kernel_id, info.kernel_id[:4]):
        assert [each["name"] for each in told(name)] == ["x"]


def test_an_exposed_kernel_is_chosen_before_one_that_is_not(make_registry: Make) -> None:
    open_, closed = make_registry(expose=True), make_registry()
    open_.execute("x = 'open'", owner="a")
    closed.execute("x = 'closed'", owner="a")
    assert told("a")[0]["text"] == "'open'"


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_session_that_has_ended_is_not_there_any_more(exposed: BlockingRegistry, end: str) -> None:
    exposed.execute("x = 1", owner="a")
    (info,) = exposed.kernels()
    assert info.connection_file is not None
    if end == "closed":
        exposed.close_owner("a")
    else:
        assert invoked("kill", "a").code == 0
    assert "no live kernel is called 'a'" in invoked("vars", "a").err
    file = Path(info.connection_file)
    assert traces.eventually(lambda: not file.exists())  # the warden removes it, or the host


def test_ps_tells_what_is_exposed_and_where(make_registry: Make) -> None:
    open_, closed = make_registry(expose=True), make_registry()
    open_.execute("1", owner="open")
    closed.execute("1", owner="closed")
    shown = kernels()
    file = Path(str(shown["open"]["connection_file"]))
    assert shown["closed"]["connection_file"] is None
    assert [str(file)] == [info.connection_file for info in open_.kernels()]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    connection = json.loads(file.read_text())
    assert connection["kernel_name"] == "hermes-live"
    assert "hermes" not in connection
    headings, *rows = (line.split() for line in invoked("ps").out.splitlines())
    # MEMORY is shown with its unit, AGE as well.
    at = headings.index("EXPOSED") + 2
    assert {row[0]: row[at] for row in rows} == {"open": "yes", "closed": "no"}


@pytest.mark.parametrize(
    "change", [{"shell_port": "x"}, {"transport": "nope"}, {"ip": "no such"}, {"key": 5}]
)
@pytest.mark.parametrize("command", LOOKS)
def test_a_connection_file_that_no_client_can_use_is_one_sentence(
    exposed: BlockingRegistry, command: str, change: dict[str, object]
) -> None:
    exposed.execute("1", owner="a")
    (info,) = exposed.kernels()
    assert info.connection_file is not None
    file = Path(info.connection_file)
    connection = json.loads(file.read_text())
    file.write_text(json.dumps({**connection, "transport": "tcp", "ip": "127.0.0.1", **change}))
    ended = invoked(command, "a")
    assert (ended.code, ended.out) == (2, "")
    assert "is not exposed" in ended.err
    assert ended.err.count("\n") == 1
    assert kernels()["a"]["connection_file"] is None


@pytest.mark.parametrize("field", ["another file", "another place", "no text", "of no use"])
def test_a_connection_file_that_a_cell_has_put_in_the_place_of_its_own_is_not_used(
    registry: BlockingRegistry, tmp_path: Path, field: str
) -> None:
    registry.execute("1", owner="a")
    (info,) = registry.kernels()
    assert info.connection_file is not None
    directory = Path(info.connection_file).parent
    place = tmp_path / "external_kernels"
    place.mkdir()
    named = place / f"hermes-{directory.name}.json"
    files = {
        "another file": str(place / "hermes-other.json"),
        "another place": str(tmp_path / named.name),
        "no text": 3,
        "of no use": str(named),
    }
    for file in (place / "hermes-other.json", tmp_path / named.name):
        file.write_text(json.dumps({"kernel_name": "hermes-live", "key": ""}))
    named.write_text("{}")
    lease = directory.with_suffix(".lease")
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "published": files[field]}))
    assert kernels()["a"]["connection_file"] is None
    assert "is not exposed" in invoked("vars", "a").err


def test_without_the_console_attach_says_what_to_install(exposed: BlockingRegistry, tmp_path: Path) -> None:
    exposed.execute("1", owner="a")
    ended = hermes("attach", "a", PYTHONPATH=without(tmp_path, "jupyter_console"))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        'Error: the console is not installed; install it with pip install "hermes-kernel[lab]"\n'
    )


def test_without_jupyterlab_lab_says_what_to_install(tmp_path: Path) -> None:
    ended = hermes("lab", "--no-browser", PYTHONPATH=without(tmp_path, "jupyterlab"))
    assert (ended.code, ended.out) == (2, "")
    assert (
        ended.err == 'Error: JupyterLab is not installed; install it with pip install "hermes-kernel[lab]"\n'
    )


def test_what_is_not_installed_costs_the_other_commands_nothing(
    exposed: BlockingRegistry, tmp_path: Path
) -> None:
    exposed.execute("x = 1", owner="a")
    path = without(tmp_path, "jupyter_console")
    assert hermes("vars", "a", PYTHONPATH=path).code == 0
    assert hermes("attach", "nobody", PYTHONPATH=path).err.startswith(
        "Error: no live kernel is called 'nobody'"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lab", "--port", "70000"), "70000"),
        (("lab", "--port", "-1"), "-1"),
        (("lab", "--root-dir", "no such directory"), "no such directory"),
        (("attach",), "OWNER"),
        (("vars",), "OWNER"),
        (("vars", "a", "b"), "unexpected extra argument"),
    ],
)
def test_a_usage_error_is_2(arguments: tuple[str, ...], said: str) -> None:
    ended = invoked(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


@pytest.mark.parametrize("command", ["attach", "lab", "vars"])
def test_the_help_names_the_exit_codes(command: str) -> None:
    ended = invoked(command, "--help")
    assert ended.code == 0
    assert "Exit codes: 0" in ended.out


def test_a_value_that_the_terminal_cannot_show_is_shown_with_escapes(exposed: BlockingRegistry) -> None:
    exposed.execute("name, rows = 'Zoë \N{SNOWMAN}', [0] * 9", owner="a")
    ended = hermes("vars", "a", PYTHONIOENCODING="latin-1", encoding="latin-1")
    assert (ended.code, ended.err) == (0, "")
    assert "'Zoë \\u2603'" in ended.out
    assert "[0, 0, 0, 0, 0, \\u2026 (9)]" in ended.out


def test_a_server_that_does_not_start_is_2_and_says_why(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab", reason="the extra `lab` is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root needs to be allowed")
    ended = hermes("lab", "--no-browser", "--port", "0", HOME=str(tmp_path), JUPYTER_NO_CONFIG="1")
    assert ended.code == 2
    assert "Use --allow-root to bypass" in ended.err
    assert ended.err.splitlines()[-1].startswith("Error: JupyterLab cannot be started: ")
    assert "--allow-root" in invoked("lab", "--help").out
