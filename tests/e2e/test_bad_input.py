"""What cannot be: refused with the value and the next step, nothing started, and the registry still works."""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_kernel import (
    UNSET,
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    HermesKernelError,
    KernelStartError,
    Limits,
    Loss,
    Owner,
)
from hermes_kernel.errors import InterpreterError

from .. import traces
from ..conftest import START_METHOD
from .test_json_contract import COMMON, read

REGISTRY = Callable[..., BlockingRegistry]


@contextmanager
def refused(
    *said: str, kind: type[HermesKernelError] = ConfigError, by: BlockingRegistry | None = None
) -> Iterator[None]:
    """The block raises *kind*, which says all of *said*; *by* has no kernel then and still works."""
    with pytest.raises(kind) as caught:
        yield
    payload = read(caught.value.to_json())
    assert payload.keys() - COMMON.keys() == {"error"}
    for text in said:
        assert text in str(caught.value)
        assert text in payload["error"]
    if by is not None:
        assert by.kernels() == ()


def works(registry: BlockingRegistry) -> None:
    result = registry.execute("print(6*7)", owner="a", timeout=30)
    assert (result.status, result.stdout, result.kernel.lost) == (CellStatus.OK, "42\n", None)


def script(path: Path, body: str, *, mode: int = 0o755) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(mode)
    return path


def wrapper(path: Path, instead_of_a_kernel: str) -> Path:
    """An interpreter that says what it has, and does something else when it is to run a kernel."""
    return script(
        path,
        f'case "$*" in *probe*) exec {shlex.quote(sys.executable)} "$@";; esac\n{instead_of_a_kernel}',
    )


def test_code_that_is_blank_is_refused_and_a_comment_runs(registry: BlockingRegistry) -> None:
    for code in ("", " ", "\n", " \t\r\n \x0c\n"):
        with refused("code", by=registry):
            registry.execute(code, owner="a")
    for code in ("# nothing to do", "pass", "\n\n# a\n", "''"):
        assert registry.execute(code, owner="a").status is CellStatus.OK
    works(registry)


def test_code_that_is_not_a_string_is_refused_by_the_name_of_its_type(registry: BlockingRegistry) -> None:
    for code, kind in ((None, "None"), (3, "int"), (b"print(1)", "bytes"), (["1"], "list"), (True, "bool")):
        with refused(kind, by=registry):
            registry.execute(code, owner="a")  # type: ignore[arg-type]
    works(registry)


def test_source_that_python_cannot_read_is_a_cell_with_an_error_at_worst(registry: BlockingRegistry) -> None:
    for code in (
        "x = 1\0",
        "\0",
        "print('a\0b')",
        "print('a\ud800b')",
        "\udcff",
        "x = '\ud83d'  # half an emoji",
        "# comment \ud800",
        "\ufeff\ufeff1",
        "é = 1; é",
        "x" * 100_000,
        "'" * 3,
        "# coding: no-such-coding\n1",
        "1 +" * 5_000 + "1",
        "-" * 50_000 + "1",
    ):
        result = registry.execute(code, owner="a", timeout=20)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, code[:40]
        assert result.ran
        read(result.to_json())
        after = registry.execute("print(6*7)", owner="a", timeout=20)
        assert (after.stdout, after.kernel.reused) == ("42\n", True), code[:40]


def test_an_owner_without_a_name_is_refused(registry: BlockingRegistry) -> None:
    empty: list[Any] = ["", "  ", "\t\n", None, 3, b"a", True, ("a",)]
    for owner in empty:
        with refused("owner", by=registry):
            registry.execute("1", owner=owner)
        with refused("owner"):
            registry.close_owner(owner)
    with refused("owner", by=registry):
        registry.execute("1")
    for arguments in (("",), (" ",), (None,), (3,), ("a", ""), ("a", 3), ("a", None, 3)):
        with refused("owner"):
            Owner(*arguments)
    works(registry)


def test_odd_names_of_owners_are_names_and_each_is_its_own(registry: BlockingRegistry) -> None:
    names = ["../..", "a/b\0c", "😀", "é", "e\u0301", "x" * 100_000, "a::child::b", "\ud800", " a "]
    for name in names[:4]:
        assert registry.execute("6*7", owner=name).value == "42"
        registry.close_owner(name)
    for name in names[4:]:
        assert registry.execute("'mine' in globals()", owner=name).value == "False"
        registry.execute("mine = 1", owner=name)
        registry.close_owner(name)
    works(registry)


BAD_LIMITS = [-1, -0.001, float("-inf"), float("nan"), "30", True, False, [30], b"1", 1j]


@pytest.mark.parametrize("name", ["timeout", "start_timeout", "interrupt_grace", "idle_grace"])
def test_a_limit_that_is_no_time_is_refused_by_name_and_value(name: str) -> None:
    for value in BAD_LIMITS:
        with refused(name, repr(value)):
            Limits(**{name: value})
        with refused(name, repr(value)):
            Limits.from_mapping({name: value})


def test_a_timeout_of_a_call_that_is_no_time_is_refused(registry: BlockingRegistry) -> None:
    for value in BAD_LIMITS:
        with refused("timeout", repr(value), by=registry):
            registry.execute("1", owner="a", timeout=value)  # type: ignore[arg-type]
    works(registry)


def test_choices_have_names_and_others_are_refused() -> None:
    for name, value in (
        ("start_method", "fast"),
        ("start_method", 3),
        ("isolation", "jail"),
        ("isolation", None),
    ):
        with refused(name, repr(value)):
            Limits(**{name: value})


LATER_LIMITS = {
    "isolation": "basic",
}
LATER_REGISTRY = {
    "protect_host": True,
}


def test_what_this_version_lacks_is_refused_by_name(make_registry: REGISTRY) -> None:
    lacking = "is not available in this version"
    for name, value in LATER_LIMITS.items():
        with refused(lacking, name):
            Limits(**{name: value})
        with refused(lacking, name):
            Limits.from_mapping({name: value})
    for name, value in LATER_REGISTRY.items():
        with refused(lacking, name):
            make_registry(**{name: value})


def test_the_default_of_every_name_may_be_given(make_registry: REGISTRY) -> None:
    limits = Limits.from_mapping(
        {
            "max_kernels": 4, "idle_timeout": 1800, "start_timeout": 30, "timeout": 300,
            "queue_timeout": None, "max_tool_calls": 50, "interrupt_grace": 0, "idle_grace": 1,
            "output_bytes": 50_000, "stderr_bytes": 10_000, "spill_bytes": 5_000_000, "spill_dir": None,
            "memory_limit": None,
            "isolation": "none", "require_isolation": False, "start_method": "auto", "spare_kernels": 1,
        }
    )  # fmt: skip
    assert limits == Limits()
    registry = make_registry(
        limits=limits, env_passthrough=(), resolve_env=None, build_env=None, secrets=(),
        allow_magics=True, expose=False, transcript=None, protect_host=False, capture_context=None,
        clean=None, bootstrap=None, socket_dir=None,
    )  # fmt: skip
    result = registry.execute(
        "6*7", owner="a", tools=(), timeout=UNSET, max_tool_calls=UNSET, reset=False, pinned=False,
        python=None, cwd=None, variant=(), show_value=True, interrupted=lambda: False, on_event=None,
    )  # fmt: skip
    assert result.value == "42"


def test_a_name_that_does_not_exist_is_refused_with_the_nearest_one(make_registry: REGISTRY) -> None:
    for wrong, right in (("time_out", "timeout"), ("max_kernel", "max_kernels"), ("idle_grac", "idle_grace")):
        with refused(wrong, right):
            Limits.from_mapping({wrong: 1})
    for wrong, right in (
        ("limit", "limits"),
        ("env_pass_through", "env_passthrough"),
        ("bootstap", "bootstrap"),
    ):
        with refused(wrong, right):
            make_registry(**{wrong: None})
    registry = make_registry()
    for wrong, right in (("timout", "timeout"), ("pyhton", "python"), ("tool", "tools"), ("cwdd", "cwd")):
        with refused(wrong, right, by=registry):
            registry.execute("1", owner="a", **{wrong: 1})
    with refused("zzzzzz", by=registry):
        registry.execute("1", owner="a", zzzzzz=1)  # type: ignore[call-arg]
    works(registry)


def test_arguments_of_the_wrong_kind_are_refused(make_registry: REGISTRY) -> None:
    wrong: list[dict[str, Any]] = [
        {"limits": {"timeout": 3}},
        {"limits": 3},
        {"env_passthrough": "PATH"},
        {"env_passthrough": 3},
        {"env_passthrough": [3]},
        {"env_passthrough": ["A=B"]},
        {"resolve_env": 3},
        {"build_env": {"A": "b"}},
        {"bootstrap": 3},
        {"bootstrap": b"x = 1"},
        {"socket_dir": 3},
    ]
    for arguments in wrong:
        with refused(*arguments):
            make_registry(**arguments)
    registry = make_registry()
    with refused("interrupted", by=registry):
        registry.execute("1", owner="a", interrupted=True)  # type: ignore[arg-type]
    with refused("max_tool_calls", by=registry):
        registry.execute("1", owner="a", max_tool_calls=-(10**5000))
    works(registry)


class AsyncCallable:
    async def __call__(self, *_: object) -> bool:
        return True


async def async_function(*_: object) -> bool:
    return True


async def async_generator(*_: object) -> AsyncIterator[bool]:
    yield True


@pytest.mark.parametrize("name", ["env_passthrough", "resolve_env", "build_env", "clean", "capture_context"])
def test_an_async_function_is_refused_where_its_answer_would_not_be_waited_for(
    make_registry: REGISTRY, name: str
) -> None:
    """What it returns is true, whatever it would say: each variable would pass."""
    for function in (async_function, async_generator, AsyncCallable(), partial(async_function, 1)):
        with refused(name, "async"):
            make_registry(**{name: function})


@pytest.mark.parametrize("name", ["interrupted", "on_event"])
def test_an_async_function_of_a_call_is_refused(registry: BlockingRegistry, name: str) -> None:
    for function in (async_function, async_generator, AsyncCallable(), partial(async_function, 1)):
        with refused(name, "async", by=registry):
            registry.execute("1", owner="a", **{name: function})
    works(registry)


def test_a_predicate_that_is_no_plain_function_ends_no_kernel(registry: BlockingRegistry) -> None:
    registry.execute("x = 1", owner="a")
    for function in (async_function, async_generator, AsyncCallable(), True, None):
        with refused("predicate"):
            registry.close_where(function)  # type: ignore[arg-type]
    assert registry.execute("x", owner="a").value == "1"


def test_a_transcript_with_a_name_that_no_file_can_have_is_refused(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    for path in (tmp_path / "\ud800.ipynb", tmp_path / "\ud800", tmp_path / "\ud800" / "a.ipynb"):
        with refused("transcript"):
            make_registry(transcript=path)


def test_a_switch_that_is_no_boolean_is_refused(make_registry: REGISTRY) -> None:
    for value in ("no", "false", 0, None):
        with refused("allow_magics"):
            make_registry(allow_magics=value)


@pytest.mark.parametrize("name", ["reset", "pinned", "show_value"])
def test_a_switch_of_a_call_that_is_no_boolean_is_refused(registry: BlockingRegistry, name: str) -> None:
    for value in ("yes", "no", "", 0, 1, None, []):
        with refused(name, repr(value), by=registry):
            registry.execute("1", owner="a", **{name: value})
    works(registry)


def test_a_value_that_no_variable_can_have_is_refused_by_its_name(make_registry: REGISTRY) -> None:
    for value in ("a\0b", "a\ud800b", 3, b"x", ["x"]):
        registry = make_registry(env_passthrough=["MY_X"], resolve_env=lambda *_, value=value: value)
        with refused("resolve_env", "MY_X", by=registry):
            registry.execute("1", owner="a")
    for value in ("", "new\nline", "=", "é", os.fsdecode(b"\xff")):
        registry = make_registry(env_passthrough=["MY_X"], resolve_env=lambda *_, value=value: value)
        assert registry.execute("import os; os.environ['MY_X']", owner="a").value == repr(value)
        registry.close()


def test_an_environment_that_cannot_be_is_refused(make_registry: REGISTRY) -> None:
    wrong = [None, ["A=b"], {"MY_X": 3}, {"MY_X": None}, {"MY_X": "a\0b"}, {3: "x"}, {"A=B": "x"}, {"": "x"}]
    for given in wrong:
        registry = make_registry(build_env=lambda *_, given=given: given)
        with refused("build_env", by=registry):
            registry.execute("1", owner="a")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_value_that_is_too_long_for_a_new_program_hurts_nobody_else(
    make_registry: REGISTRY, method: str
) -> None:
    length = 1
    registry = make_registry(
        limits=Limits(start_method=method), env_passthrough=["MY_X"], resolve_env=lambda *_: "x" * length
    )
    assert registry.execute("z = 1", owner="b").status is CellStatus.OK
    length = 200_000
    code = "import os; len(os.environ['MY_X'])"
    if method == "fork":
        assert registry.execute(code, owner="a").value == "200000"
    else:
        with refused("Argument list too long", kind=KernelStartError):
            registry.execute(code, owner="a")
    assert registry.execute("z", owner="b").value == "1"


ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "no home": {"HOME": None},
    "no locale": {"LANG": None, "LC_ALL": None, "LC_CTYPE": None},
    "the plainest locale": {"LANG": "C", "LC_ALL": "C"},
    "no such locale": {"LANG": "xx_YY.nonsense", "LC_ALL": "xx_YY.nonsense"},
    "another encoding": {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"},
    "no such temporary directory": {"TMPDIR": "/no/such"},
    "a temporary directory that cannot be written": {"TMPDIR": "/proc"},
    "a temporary directory with a long name": {"TMPDIR": "/tmp/" + "x" * 200},
    "no path": {"PATH": None},
    "no such time zone": {"TZ": "!nonsense"},
    "places that cannot be written": {
        "XDG_CACHE_HOME": "/proc/x", "XDG_CONFIG_HOME": "/proc/x", "IPYTHONDIR": "/proc/x",
        "JUPYTER_RUNTIME_DIR": "/proc/x", "JUPYTER_CONFIG_DIR": "/proc/x",
    },
    "what leads programs astray": {
        "PYTHONHOME": "/no", "PYTHONSTARTUP": "/no", "PYTHONPATH": "/no/such:" + os.fsdecode(b"\xff"),
        "LD_LIBRARY_PATH": "/no",
    },
}  # fmt: skip


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("changed", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_kernel_starts_and_prints_whatever_the_hosts_environment_lacks_or_says(
    make_registry: REGISTRY, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], method: str
) -> None:
    for name, value in changed.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    registry = make_registry(limits=Limits(start_method=method, spare_kernels=0))
    code = "import os, tempfile; print('é€😀'); os.access(tempfile.gettempdir(), os.W_OK)"
    result = registry.execute(code, owner="a", timeout=30)
    assert (result.status, result.stdout, result.value) == (CellStatus.OK, "é€😀\n", "True"), result.text


def test_a_predicate_that_takes_its_time_costs_its_own_call_that_time_and_no_more(
    registry: BlockingRegistry,
) -> None:
    works(registry)
    over, asked = threading.Event(), threading.Event()

    def slow() -> bool:
        asked.set()
        over.wait(30)
        return False

    def call() -> CellResult:
        return registry.execute("'done'", owner="a", interrupted=slow)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(call)
        assert asked.wait(30)
        assert registry.execute("'other'", owner="b", timeout=10).value == "'other'"
        over.set()
        assert held.result(30).value == "'done'"


def test_a_predicate_that_raises_hurts_its_own_call_alone(registry: BlockingRegistry) -> None:
    works(registry)
    answers = iter([False, False])
    started = time.monotonic()
    with pytest.raises(StopIteration):
        registry.execute("import time; time.sleep(60)", owner="a", timeout=30, interrupted=answers.__next__)
    assert time.monotonic() - started < 5
    result = registry.execute("print(6*7)", owner="a")
    assert (result.stdout, result.kernel.lost) == ("42\n", Loss.INTERRUPTED)


def test_an_interpreter_that_cannot_be_run_is_refused_by_name(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    not_executable = script(tmp_path / "plain", "exit 0", mode=0o644)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    no_shebang = tmp_path / "noise"
    no_shebang.write_bytes(b"\x7fELF" + bytes(range(256)))
    no_shebang.chmod(0o755)
    bad_shebang = tmp_path / "shebang"
    bad_shebang.write_text("#!/no/such/interpreter\n")
    bad_shebang.chmod(0o755)
    for python in (
        "/no/such/python",
        "no-such-python-at-all",
        tmp_path,
        tmp_path / "missing",
        not_executable,
        dangling,
        loop,
        no_shebang,
        bad_shebang,
        "~nobody-of-that-name/bin/python",
        "",
        "py\0thon",
    ):
        name = "python" if python in ("", "py\0thon") else str(python)
        with refused(name, by=registry):
            registry.execute("1", owner="a", python=python)
    for odd in (3, b"/usr/bin/python3", True):
        with refused("python", by=registry):
            registry.execute("1", owner="a", python=odd)  # type: ignore[arg-type]
    works(registry)


def test_an_interpreters_name_that_no_system_can_hold_is_refused(registry: BlockingRegistry) -> None:
    for python in ("x" * 5_000, "/" + "x" * 300, "odd\ud800", "/odd\udcff"):
        with refused("python", by=registry):
            registry.execute("1", owner="a", python=python)
    works(registry)


def test_something_that_runs_and_is_no_python_is_refused(registry: BlockingRegistry, tmp_path: Path) -> None:
    for n, body in enumerate(
        (
            "echo garbage",
            "printf '\\377\\000\\n'",
            "exit 0",
            "echo no luck >&2; exit 4",
            "echo null",
            "echo '[]'",
            "echo '{}'",
            """echo '{"version": null, "ipykernel": 7}'""",
            """echo '{"version": [], "ipykernel": "7.3"}'""",
            """echo '{"version": [3, 11], "ipykernel": [7]}'""",
            "kill -9 $$",
        )
    ):
        python = script(tmp_path / f"python{n}", body)
        with refused(str(python), kind=HermesKernelError, by=registry):
            registry.execute("1", owner="a", python=python)
    works(registry)


def test_an_interpreter_that_never_says_what_it_is_is_given_up(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    python = script(tmp_path / "python", "exec sleep 600")
    registry = make_registry(limits=Limits(start_timeout=1))
    started = time.monotonic()
    with refused(str(python), kind=HermesKernelError, by=registry):
        registry.execute("1", owner="a", python=python)
    assert time.monotonic() - started < 3


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("starts", ["sleep 600 &", "setsid sleep 600 &"])
def test_what_is_no_python_leaves_nothing_of_what_it_started(
    make_registry: REGISTRY, tmp_path: Path, starts: str
) -> None:
    python = script(tmp_path / "python", f"{starts}\necho $! > {tmp_path}/started; exit 0")
    registry = make_registry(limits=Limits(start_timeout=1))
    with refused(str(python), kind=HermesKernelError, by=registry):
        registry.execute("1", owner="a", python=python)
    started = int((tmp_path / "started").read_text())
    assert traces.eventually(lambda: not psutil.pid_exists(started))


@pytest.mark.skipif(START_METHOD == "spawn", reason="a spawned kernel is asked when it can serve")
def test_a_start_up_file_without_an_end_costs_start_timeout(make_registry: REGISTRY, tmp_path: Path) -> None:
    start_up = tmp_path / "start_up.py"
    start_up.write_text("import time; time.sleep(600)")
    registry = make_registry(env_passthrough=["PYTHONSTARTUP"], limits=Limits(start_timeout=2, timeout=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSTARTUP", str(start_up))
        with refused("start_timeout", kind=KernelStartError, by=registry):
            registry.execute("1", owner="a")
    works(registry)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


def test_an_interpreter_without_a_fitting_ipykernel_is_refused_with_what_to_run(
    registry: BlockingRegistry, venv: Path
) -> None:
    python = venv / "bin" / "python"
    command = f"{python} -m pip install"
    with refused(str(python), "no ipykernel", "7.3", command, "ipykernel>=7.3", by=registry):
        registry.execute("1", owner="a", python=python)
    with refused(str(python), "no ipykernel", command, by=registry, kind=InterpreterError):
        registry.check_python(python)
    registry.check_python(sys.executable)
    registry.check_python(None)
    (site,) = venv.glob("lib/python*/site-packages")
    for version in ("6.0.0", "6.29.5", "7.2.9", "8.0.0", "10.1", "5"):
        info = site / f"ipykernel-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ipykernel\nVersion: {version}\n")
        with refused(str(python), version, "7.3", command, "ipykernel>=7.3", by=registry):
            registry.execute("1", owner="a", python=python)
        (info / "METADATA").unlink()
        info.rmdir()
    works(registry)


def test_an_interpreter_whose_ipykernel_is_broken_fails_to_start_and_shows_why(
    registry: BlockingRegistry, venv: Path
) -> None:
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    info = site / "ipykernel-7.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ipykernel\nVersion: 7.3.0\n")
    started = time.monotonic()
    with refused(str(python), "ModuleNotFoundError", kind=KernelStartError, by=registry):
        registry.execute("1", owner="a", python=python)
    assert time.monotonic() - started < 5
    works(registry)


def test_a_working_directory_that_is_none_is_refused(registry: BlockingRegistry, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for cwd in (tmp_path / "missing", file, file / "below", loop, "/no/such/dir", "x" * 5_000, "odd\udcff"):
        with pytest.raises(HermesKernelError) as caught:
            registry.execute("1", owner="a", cwd=cwd)
        assert str(cwd) in str(caught.value) or repr(str(cwd)) in str(caught.value)
        read(caught.value.to_json())
        assert registry.kernels() == ()
    for odd in ("", "a\0b", 3, b"/tmp\0", True):
        with refused("cwd", kind=HermesKernelError, by=registry):
            registry.execute("1", owner="a", cwd=odd)  # type: ignore[arg-type]
    works(registry)


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may enter every directory")
def test_a_working_directory_that_may_not_be_entered_is_refused(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with refused(str(closed), kind=HermesKernelError, by=registry):
        registry.execute("1", owner="a", cwd=closed)
    works(registry)


def test_a_working_directory_with_an_odd_name_is_one(registry: BlockingRegistry, tmp_path: Path) -> None:
    for n, name in enumerate(("with blank", "new\nline", "é", "'quoted\"")):
        directory = tmp_path / name
        directory.mkdir()
        result = registry.execute("import os; os.getcwd()", owner=f"o{n}", cwd=directory)
        assert result.value == repr(str(directory))
        registry.close_owner(f"o{n}")


def test_a_working_directory_with_modules_of_the_users_own_breaks_nothing(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    for name in (
        "json",
        "zmq",
        "random",
        "sitecustomize",
        "ipykernel",
        "hermes_kernel",
        "ipython_config",
        "ipython_kernel_config",
        "jupyter_config",
        "asyncio",
        "traitlets",
    ):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')\n")
    result = registry.execute("print(6*7)", owner="a", cwd=tmp_path, timeout=20)
    assert (result.status, result.stdout) == (CellStatus.OK, "42\n")


def test_a_directory_for_sockets_that_cannot_hold_them_is_refused(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    file = tmp_path / "file"
    file.write_text("x")
    for socket_dir in (long, file, "/tmp/\ud800"):
        with refused(ascii(str(socket_dir))[1:-1], kind=HermesKernelError):
            registry = make_registry(socket_dir=socket_dir)
            registry.execute("1", owner="a")


def test_a_kernel_that_ends_at_its_start_is_an_error_at_once_and_the_next_start_is_a_new_try(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    endings: dict[str, tuple[int | None, str]] = {
        "1/0": (None, "ZeroDivisionError"),
        "raise SystemExit(5)": (5, "5"),
        "import no_such_module_at_all": (None, "no_such_module_at_all"),
        "raise KeyboardInterrupt": (None, "KeyboardInterrupt"),
        "class E(BaseException): pass\nraise E('odd')": (None, "odd"),
    }
    check_endings(make_registry, broken, endings)


def test_a_bootstrap_that_kills_its_kernel_is_an_error_with_its_exit_code(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    endings: dict[str, tuple[int | None, str]] = {
        "import os; os._exit(9)": (9, "9"),
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (-9, "-9"),
    }
    check_endings(make_registry, tmp_path / "broken", endings)


def check_endings(make_registry: REGISTRY, broken: Path, endings: dict[str, tuple[int | None, str]]) -> None:
    for ending, (exit_code, said) in endings.items():
        body = "\n".join(f"    {line}" for line in ending.splitlines())
        bootstrap = f"import os\nif os.path.exists({str(broken)!r}):\n{body}\nready = 1"
        registry = make_registry(bootstrap=bootstrap)
        broken.touch()
        started = time.monotonic()
        with pytest.raises(KernelStartError) as caught:
            registry.execute("1", owner="a")
        assert time.monotonic() - started < 5
        assert said in str(caught.value), ending
        assert caught.value.argv, ending
        assert sys.executable in caught.value.argv[0]
        assert exit_code is None or caught.value.exit_code == exit_code
        assert said in read(caught.value.to_json())["error"]
        assert registry.kernels() == ()
        broken.unlink()
        result = registry.execute("ready", owner="a")
        assert (result.value, result.kernel.lost, result.execution_count) == ("1", None, 1)
        registry.close()


def test_a_bootstrap_that_is_no_python_is_refused_before_or_at_the_start(make_registry: REGISTRY) -> None:
    with refused("SyntaxError", kind=HermesKernelError):
        registry = make_registry(bootstrap="def (")
        registry.execute("1", owner="a")


def test_a_bootstrap_runs_before_user_code_on_every_start(make_registry: REGISTRY) -> None:
    registry = make_registry(bootstrap="started = 1\nprint('from the bootstrap')")
    result = registry.execute("started", owner="a")
    assert (result.value, result.stdout, result.execution_count) == ("1", "", 1)
    registry.execute("import os; os._exit(1)", owner="a")
    assert registry.execute("started", owner="a").value == "1"


def test_a_kernel_that_ends_before_it_answers_shows_its_command_code_and_last_words(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    for n, (body, exit_code, words) in enumerate(
        (
            ("echo out of luck >&2; exit 3", 3, "out of luck"),
            ("echo on stdout; exit 0", 0, "on stdout"),
            ("printf 'odd \\377\\n' >&2; kill -9 $$", -9, "odd"),
            ("for i in $(seq 20000); do echo line $i; done; echo the last; exit 1", 1, "the last"),
            ("sleep 600 & exit 5", 5, ""),
        )
    ):
        python = wrapper(tmp_path / f"python{n}", body)
        started = time.monotonic()
        with pytest.raises(KernelStartError) as caught:
            registry.execute("1", owner="a", python=python)
        assert time.monotonic() - started < 5, body
        error = caught.value
        assert (error.argv[0], error.exit_code) == (str(python), exit_code)
        assert words in error.log_tail
        assert len(error.log_tail) < 20_000
        said = read(error.to_json())["error"]
        assert str(python) in said
        assert str(exit_code) in said
        assert words in said
        assert registry.kernels() == ()
    works_elsewhere = registry.execute("6*7", owner="b")
    assert works_elsewhere.value == "42"
    assert registry.execute("6*7", owner="a").value == "42"


@pytest.mark.parametrize("stream", [1, 2])
def test_a_kernel_that_writes_much_before_it_ends_is_not_held_by_its_own_words(
    make_registry: REGISTRY, tmp_path: Path, stream: int
) -> None:
    python = wrapper(tmp_path / "python", f"exec >&{stream}\nseq 400000\necho the last\nexit 3")
    registry = make_registry(limits=Limits(start_timeout=8))
    with refused(str(python), "the last", kind=KernelStartError, by=registry):
        registry.execute("1", owner="a", python=python)


@pytest.mark.parametrize(
    "body",
    ["exec sleep 600", "trap '' TERM INT HUP\nsleep 600", "sleep 600 &\nwait", "kill -STOP $$", "exec yes"],
    ids=["sleeps", "deaf", "with a child", "stopped", "chatters"],
)
def test_a_kernel_that_never_answers_is_given_up_in_time_with_all_it_started(
    make_registry: REGISTRY, tmp_path: Path, body: str
) -> None:
    python = wrapper(tmp_path / "python", body)
    registry = make_registry(limits=Limits(start_timeout=1))
    started = time.monotonic()
    with refused(str(python), kind=KernelStartError, by=registry):
        registry.execute("1", owner="a", python=python)
    assert time.monotonic() - started < 3


def test_a_bootstrap_that_never_ends_is_given_up_in_time(make_registry: REGISTRY) -> None:
    registry = make_registry(bootstrap="import time; time.sleep(600)", limits=Limits(start_timeout=2))
    started = time.monotonic()
    with refused(kind=KernelStartError, by=registry):
        registry.execute("1", owner="a")
    assert time.monotonic() - started < 4


def test_a_start_is_interrupted_without_waiting_for_its_limit(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    python = wrapper(tmp_path / "python", f"touch {shlex.quote(str(began))}\nexec sleep 600")
    registry = make_registry()
    started = time.monotonic()
    result = registry.execute("1", owner="a", python=python, interrupted=began.exists)
    assert time.monotonic() - started < 5
    assert (result.status, result.ran) == (CellStatus.INTERRUPTED, False)
    works(registry)


def test_a_closed_registry_says_so(make_registry: REGISTRY) -> None:
    registry = make_registry()
    works(registry)
    registry.close()
    registry.close()
    with refused("closed", kind=HermesKernelError):
        registry.execute("1", owner="a")


def test_magics_are_a_cells_error_where_they_are_not_allowed(make_registry: REGISTRY) -> None:
    registry = make_registry(allow_magics=False)
    for code in (
        "!echo ran",
        "%env",
        "%%bash\necho ran",
        "x = !echo ran",
        "len?",
        "?len",
        "  !echo ran",
        "ls -la",
    ):
        result = registry.execute(code, owner="a", timeout=10)
        assert result.status is CellStatus.ERROR, code
        assert "ran\n" not in result.stdout, code
    works_still = registry.execute("print(6*7)", owner="a")
    assert (works_still.stdout, works_still.kernel.reused) == ("42\n", True)


def test_a_kernel_that_ends_in_a_start_up_file_shows_its_exit_code_and_last_words(
    make_registry: REGISTRY, tmp_path: Path
) -> None:
    start_up = tmp_path / "start_up.py"
    start_up.write_text("import os\nos.write(2, b'out of luck')\nos._exit(7)\n")
    registry = make_registry(env_passthrough=["PYTHONSTARTUP"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSTARTUP", str(start_up))
        with pytest.raises(KernelStartError) as caught:
            registry.execute("1", owner="a")
    assert caught.value.exit_code == 7
    assert caught.value.log_tail.endswith("out of luck")  # on stock paths ipykernel says something first
    assert registry.kernels() == ()
    works(registry)
