"""Kernels in other Pythons: the same cells, in an environment that has nothing of the host's."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hermes_kernel
from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    KernelStartError,
    Limits,
    Loss,
)

from .. import interpreters
from ..interpreters import Environments, Version

PACKAGE = Path(hermes_kernel.__file__).parent
IN_THE_KERNEL = [
    *PACKAGE.glob("kernel/*.py"),
    *PACKAGE.glob("sidecar/*.py"),
    *(PACKAGE / name for name in ("wire.py", "errors.py", "__init__.py")),
]
MAKE = Callable[..., BlockingRegistry]


pytestmark = pytest.mark.timeout(300)  # the first test waits for all environments to be made


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    return Environments(tmp_path_factory.mktemp("environments"))


@pytest.fixture(params=interpreters.SUPPORTED, ids=lambda version: "3.{1}".format(*version))
def version(request: pytest.FixtureRequest) -> Version:
    found: Version = request.param
    return found


@pytest.fixture
def python(environments: Environments, version: Version) -> str:
    return environments.python(version)


@pytest.fixture
def some_python(environments: Environments) -> str:
    """The oldest: what works there without further ado works in the others."""
    return environments.any_two()[0]


def prefix(python: str) -> str:
    return str(Path(python).parent.parent)


def evaluated(result: CellResult) -> object:
    assert result.status is CellStatus.OK, result.text
    assert result.value is not None
    return ast.literal_eval(result.value)


def test_a_kernel_runs_in_the_environment_that_was_asked_for(
    registry: BlockingRegistry, python: str, version: Version
) -> None:
    result = registry.execute(
        "import sys; [*sys.version_info[:2]], sys.prefix, sys.executable", owner="a", python=python
    )
    assert evaluated(result) == ([*version], prefix(python), python)
    (info,) = registry.kernels()
    assert info.python == python
    plain = os.environ.get("HERMES_KERNEL_PLAIN") == "1"
    assert (info.degraded is not None) is plain, info.degraded
    assert result.kernel.degraded == info.degraded


DIVISION = 'Traceback (most recent call last):\n  File "<cell '
CELLS: dict[str, tuple[str, str | None, str, str]] = {
    "value": ("6*7", "42", "", ""),
    "no value": ("x = 1", None, "", ""),
    "a value of before": ("x", "1", "", ""),
    "stdout": ("print('é', 1)", None, "é 1\n", ""),
    "stderr": ("import sys; print('aside', file=sys.stderr)", None, "", "aside\n"),
    "lone surrogate": (r"print('a\ud800b'); 'a\ud800b'", r"'a\ud800b'", "a\\ud800b\n", ""),
    "await": ("import asyncio; await asyncio.sleep(0, 'awaited')", "'awaited'", "", ""),
    "gather": ("await asyncio.gather(*(asyncio.sleep(0, n) for n in range(3)))", "[0, 1, 2]", "", ""),
    "thread": (
        "import threading as t; h = t.Thread(target=print, args=('x',)); h.start(); h.join()",
        None,
        "x\n",
        "",
    ),
    "child": (
        "import subprocess as s; s.run('echo out; echo err >&2', shell=True); None",
        None,
        "out\n",
        "err\n",
    ),
    "descriptor": ("import os; os.write(1, b'raw\\n'); None", None, "raw\n", ""),
    "shell": ("!echo shell", None, "shell\n", ""),
    "shell's value": ("lines = !echo shell\nlines[0]", "'shell'", "", ""),
    "bash": ("%%bash\necho bash", None, "bash\n", ""),
    "spawned": (
        "import multiprocessing as m\nwith m.get_context('spawn').Pool(1) as p: print(p.map(abs, [-1]))",
        None,
        "[1]\n",
        "",
    ),
    "same python below": (
        "s.run([sys.executable, '-c', 'import sys; print(sys.prefix == ' + repr(sys.prefix) + ')']); None",
        None,
        "True\n",
        "",
    ),
}


def test_cells_give_what_they_give_in_the_hosts_python(registry: BlockingRegistry, python: str) -> None:
    for name, (code, value, stdout, stderr) in CELLS.items():
        result = registry.execute(code, owner="a", python=python, timeout=30)
        assert (result.status, result.value, result.stdout, result.stderr) == (
            (CellStatus.OK, value, stdout, stderr)
        ), name
        assert result.kernel.reused is (name != "value"), name


ERRORS = {
    "1/0": ("ZeroDivisionError", ['  File "<cell N>", line 1, in <module>', "    1/0"]),
    "def f(:": ("SyntaxError", ['  File "<cell N>", line 1', "    def f(:"]),
    "def f():\nreturn 1": ("IndentationError", ['  File "<cell N>", line 2', "    return 1"]),
    "raise KeyError('a') from ValueError('b')": ("KeyError", ["ValueError: b"]),
    "import no_such_module": ("ModuleNotFoundError", ["    import no_such_module"]),
    "async def f(): return 1/0\nawait f()": ("ZeroDivisionError", ['  File "<cell N>", line 1, in f']),
    "import asyncio; asyncio.run(asyncio.sleep(0))": ("RuntimeError", ["write `await ...`"]),
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E": ("E", ["    raise E"]),
    "def r(n): return r(n + 1)\nr(0)": ("RecursionError", ["[Previous line repeated "]),
    "input()": ("StdinNotImplementedError", ["nobody can answer"]),
    "breakpoint()": ("StdinNotImplementedError", ["nobody can answer"]),
}


def test_errors_have_pythons_own_traceback_without_our_frames(
    registry: BlockingRegistry, python: str
) -> None:
    for number, (code, (ename, parts)) in enumerate(ERRORS.items(), 1):
        result = registry.execute(code, owner="a", python=python, timeout=30)
        assert result.status is CellStatus.ERROR, code
        assert result.error is not None
        assert result.error.ename == ename, code
        text = result.error.traceback
        for part in parts:
            assert part.replace("<cell N>", f"<cell {number}>") in text, text
        for frame in ("hermes_kernel", "ipykernel", "IPython/core/inter", "IPython/core/async", "\x1b", "~/"):
            assert frame not in text, text
    still_answers(registry, python)


def still_answers(registry: BlockingRegistry, python: str) -> CellResult:
    after = registry.execute("print(6*7)", owner="a", python=python, timeout=30)
    assert (after.status, after.stdout) == (CellStatus.OK, "42\n")
    return after


ENDS = {
    "exit": ("import sys; print('before'); sys.exit(3)", 20, CellStatus.EXITED, 3, Loss.EXITED),
    "die": ("import os; print('before'); os._exit(7)", 20, CellStatus.DIED, 7, Loss.DIED),
    "loop": ("print('before')\nwhile True: pass", 0.5, CellStatus.TIMED_OUT, -1, Loss.TIMED_OUT),
}


def test_a_cell_that_ends_its_kernel_keeps_its_output_and_says_how(
    registry: BlockingRegistry, python: str
) -> None:
    for name, (code, timeout, status, exit_code, loss) in ENDS.items():
        registry.execute("x = 1", owner="a", python=python)
        started = time.monotonic()
        result = registry.execute(code, owner="a", python=python, timeout=timeout)
        assert time.monotonic() - started < 5, name
        assert (result.status, result.exit_code, result.stdout) == (status, exit_code, "before\n"), name
        assert (result.kernel.ended, result.error) == (True, None), name
        assert still_answers(registry, python).kernel.lost is loss, name


def test_a_cell_that_heeds_the_interrupt_keeps_the_state(make_registry: MAKE, python: str) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=10))
    registry.execute("import asyncio, time; z = 1", owner="a", python=python)
    for code in (
        "await asyncio.sleep(60)",
        "await asyncio.gather(*(asyncio.sleep(60) for _ in range(3)))",
        "time.sleep(60)",
        "while True: pass",
    ):
        result = registry.execute(f"print('begun')\n{code}", owner="a", python=python, timeout=0.3)
        assert (result.status, result.stdout) == (CellStatus.TIMED_OUT, "begun\n"), code
        assert result.duration < 5, code
        assert (result.kernel.ended, result.kernel.lost) == (False, None), code
        assert evaluated(registry.execute("z", owner="a", python=python)) == 1, code


# What the host has for itself alone; none of it is a dependency of ipykernel.
HOSTS_OWN = ("click", "rich", "nbclient", "nbformat", "pytest", "hypothesis", "tests")
PATHS = "import os, sys; [*sys.path], os.environ.get('PYTHONPATH')"


def test_nothing_of_the_hosts_but_our_package_is_lent(
    registry: BlockingRegistry, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    path, python_path = evaluated(registry.execute(PATHS, owner="a", python=python))  # type: ignore[misc]
    assert python_path is None
    mine = [entry for entry in sys.path if entry and not entry.startswith(sys.base_prefix)]
    assert not set(path) & {*mine, str(PACKAGE.parent), str(PACKAGE), os.getcwd()}
    assert not [entry for entry in path if entry.startswith((str(PACKAGE.parent), sys.prefix + os.sep))]
    asked = f"import importlib.util as u; [name for name in {HOSTS_OWN!r} if u.find_spec(name)]"
    assert evaluated(registry.execute(asked, owner="a", python=python)) == []


def test_a_cell_finds_our_package_of_the_hosts_version_and_nothing_else_does(
    registry: BlockingRegistry, python: str
) -> None:
    loaded = "import sys; sorted({n.split('.')[1] for n in sys.modules if n.startswith('hermes_kernel.')})"
    found = evaluated(registry.execute(loaded, owner="a", python=python))
    assert found == ["errors", "kernel", "sidecar", "wire"]  # a forked kernel begins in a sidecar
    ours = "import hermes_kernel; hermes_kernel.__version__, hermes_kernel.__file__"
    expected = (hermes_kernel.__version__, str(PACKAGE / "__init__.py"))
    assert evaluated(registry.execute(ours, owner="a", python=python)) == expected
    child = "import subprocess; subprocess.run([sys.executable, '-c', 'import hermes_kernel']).returncode"
    result = registry.execute(child, owner="a", python=python)
    assert result.value == "1"
    assert "No module named 'hermes_kernel'" in result.stderr


def test_an_older_copy_of_our_package_in_the_environment_is_not_used(
    registry: BlockingRegistry, environments: Environments, some_python: str, tmp_path: Path
) -> None:
    python = interpreters.bare(some_python, tmp_path / "venv", lent=some_python)
    older = interpreters.site_packages(python) / "hermes_kernel"
    older.mkdir()
    (older / "__init__.py").write_text("raise RuntimeError('older')")
    (older / "kernel.py").write_text("raise RuntimeError('older')")
    ours = "import hermes_kernel; hermes_kernel.__file__"
    assert evaluated(registry.execute(ours, owner="a", python=python)) == str(PACKAGE / "__init__.py")


def misleading(directory: Path) -> Path:
    """A directory with a file for every module that the start of a kernel could want."""
    ours = ("hermes_kernel", "ipykernel", "IPython", "zmq", "traitlets", "jupyter_client", "tornado", "comm")
    for name in (*sys.stdlib_module_names, *ours, "sitecustomize", "matplotlib_inline", "psutil", "debugpy"):
        (directory / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
    return directory


def test_files_named_like_modules_in_the_working_directory_do_not_disturb_the_kernel(
    registry: BlockingRegistry, python: str, tmp_path: Path
) -> None:
    cwd = misleading(tmp_path)
    ours = str(PACKAGE / "__init__.py")
    for code, value in (
        ("6*7", "42"),
        ("import os; os.getcwd()", repr(str(cwd))),
        ("import random, json, decimal, sqlite3, hermes_kernel as h; h.__file__", repr(ours)),
        ("import asyncio; await asyncio.sleep(0, 1)", "1"),
    ):
        result = registry.execute(code, owner="a", python=python, cwd=cwd)
        assert (result.status, result.value) == (CellStatus.OK, value), result.text
    result = registry.execute("1/0", owner="a", python=python, cwd=cwd)
    assert result.error is not None
    assert result.error.ename == "ZeroDivisionError"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["the host's Python", "another"])
def test_a_cell_can_import_what_lies_in_its_working_directory(
    registry: BlockingRegistry, environments: Environments, tmp_path: Path, elsewhere: bool
) -> None:
    (tmp_path / "of_mine.py").write_text("answer = 42")
    pythons: tuple[str | None, ...] = environments.any_two() if elsewhere else (None,)
    for python in pythons:
        result = registry.execute("import of_mine; of_mine.answer", owner="a", python=python, cwd=tmp_path)
        assert (result.status, result.value) == (CellStatus.OK, "42"), result.text


def test_what_leads_an_interpreter_astray_is_not_passed_on(
    registry: BlockingRegistry, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = tmp_path / "startup.py"
    startup.write_text("raise RuntimeError('startup')")
    dropped = {
        "PYTHONHOME": str(tmp_path),
        "PYTHONSTARTUP": str(startup),
        "PYTHONINSPECT": "1",
        "PYTHONOPTIMIZE": "2",
        "PYTHONPLATLIBDIR": "nowhere",
        "PYTHONEXECUTABLE": sys.executable,
        "__PYVENV_LAUNCHER__": sys.executable,
    }
    for name, value in dropped.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    code = f"import os, sys; sys.prefix, [name for name in {list(dropped)!r} if name in os.environ]"
    assert evaluated(registry.execute(code, owner="a", python=python)) == (prefix(python), [])


def test_the_users_module_path_reaches_another_python_too(
    registry: BlockingRegistry, some_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text("answer = 42")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = registry.execute("import of_mine; of_mine.answer", owner="a", python=some_python)
    assert result.value == "42", result.text


def test_our_own_place_on_the_module_path_is_not_lent_to_another_python(
    registry: BlockingRegistry, some_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    path, _ = evaluated(registry.execute(PATHS, owner="a", python=some_python))  # type: ignore[misc]
    assert str(PACKAGE.parent) not in path


def test_a_broken_module_on_the_users_module_path_fails_the_start_and_is_named(
    registry: BlockingRegistry, some_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ipykernel.py").write_text("raise RuntimeError('broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(KernelStartError) as caught:
        registry.execute("1", owner="a", python=some_python)
    assert time.monotonic() - started < 5
    for part in (some_python, str(tmp_path / "ipykernel.py"), "broken on purpose"):
        assert part in str(caught.value)
    monkeypatch.delenv("PYTHONPATH")
    still_answers(registry, some_python)


def test_two_owners_have_their_own_interpreters_at_the_same_time(
    registry: BlockingRegistry, environments: Environments
) -> None:
    pythons = environments.any_two()

    def ask(owner: int) -> list[object]:
        code = f"import sys; x = globals().get('x', []) + [{owner}]; sys.prefix, x"
        return [evaluated(registry.execute(code, owner=str(owner), python=pythons[owner])) for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        for owner, answers in enumerate(pool.map(ask, range(2))):
            assert answers == [(prefix(pythons[owner]), [owner] * count) for count in (1, 2, 3)]
    assert sorted(info.python for info in registry.kernels()) == sorted(pythons)


def test_an_owner_that_changes_its_interpreter_is_told_and_told_again_on_the_way_back(
    registry: BlockingRegistry, environments: Environments
) -> None:
    one, other = environments.any_two()
    told = []
    for python in (one, one, other, other, one, None):
        result = registry.execute("import sys; sys.prefix", owner="a", python=python)
        assert evaluated(result) == (sys.prefix if python is None else prefix(python))
        told.append(result.kernel.lost)
    assert told == [None, None, Loss.PYTHON_CHANGED, None, Loss.PYTHON_CHANGED, Loss.PYTHON_CHANGED]


def test_one_interpreter_has_many_names(
    registry: BlockingRegistry, some_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreters.bare(some_python, tmp_path / "venv", lent=some_python)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}")
    code = "import sys; x = globals().get('x', 0) + 1; sys.prefix, x"
    names = (python, "venv/bin/python", "./venv/bin/python", "~/venv/bin/python", "venv/../venv/bin/python")
    for count, name in enumerate((*names, "python", Path("venv/bin/python")), 1):
        result = registry.execute(code, owner="a", python=name)
        assert evaluated(result) == (prefix(python), count), name
        assert result.kernel.lost is None, name
    assert os.path.islink(python)
    (info,) = registry.kernels()
    assert info.python == python


def test_an_environment_may_lie_in_a_directory_with_an_odd_name_and_behind_a_link(
    registry: BlockingRegistry, some_python: str, tmp_path: Path
) -> None:
    directory = tmp_path / "mein Projekt – größer 'é' \"漢字\"" / ".venv"
    python = interpreters.bare(some_python, directory, lent=some_python)
    result = registry.execute("import sys; sys.prefix", owner="a", python=python)
    assert evaluated(result) == str(directory)
    link = tmp_path / "current"
    link.symlink_to(directory)
    result = registry.execute("import sys; sys.prefix", owner="b", python=link / "bin" / "python")
    assert evaluated(result) == str(link)


def test_a_python_that_is_too_old_is_refused_with_what_is_needed(
    registry: BlockingRegistry, environments: Environments
) -> None:
    versions = [version for version in environments.versions() if version < interpreters.SUPPORTED[0]]
    if not versions:
        pytest.skip(f"no Python before 3.10 found that runs; name one in {interpreters.PYTHONS}")
    for version in versions:
        python = environments.interpreter(version)
        with pytest.raises(ConfigError) as caught:
            registry.execute("1", owner="a", python=python)
        for part in (python, "is Python {}.{};".format(*version), "3.10 or newer"):
            assert part in str(caught.value)
    assert registry.kernels() == ()


def test_an_environment_with_an_older_ipykernel_is_refused_with_the_command_that_helps(
    registry: BlockingRegistry, some_python: str, tmp_path: Path
) -> None:
    python = interpreters.bare(some_python, tmp_path / "old project", lent=some_python)
    try:
        site = str(interpreters.site_packages(python))
        interpreters.install(some_python, "--no-deps", "--target", site, "ipykernel>=6,<7")
    except interpreters.CannotMakeError as error:
        pytest.skip(f"no ipykernel 6 to be had: {error}")
    with pytest.raises(ConfigError) as caught:
        registry.execute("1", owner="a", python=python)
    command = f"run '{python}' -m pip install '{interpreters.NEEDED}'"
    for part in (python, "has ipykernel 6.", f"needed is {interpreters.NEEDED}", command):
        assert part in str(caught.value)
    assert registry.kernels() == ()


def test_an_environment_without_an_ipykernel_is_refused_until_it_has_one(
    registry: BlockingRegistry, some_python: str, tmp_path: Path
) -> None:
    python = interpreters.bare(some_python, tmp_path / "venv")
    with pytest.raises(ConfigError, match=f"no ipykernel.* -m pip install '{interpreters.NEEDED}'"):
        registry.execute("1", owner="a", python=python)
    lent = interpreters.site_packages(python) / "lent.pth"
    lent.write_text(f"{interpreters.site_packages(some_python)}\n")
    assert still_answers(registry, python).kernel.lost is None


def test_what_runs_in_the_kernel_is_in_the_language_of_each_python(
    environments: Environments, version: Version, tmp_path: Path
) -> None:
    python = environments.interpreter(version)
    code = "import py_compile, sys\nfor n, name in enumerate(sys.argv[2:]):\n"
    code += "    py_compile.compile(name, sys.argv[1] + f'/{n}.pyc', doraise=True)"
    done = subprocess.run(
        [python, "-c", code, str(tmp_path), *map(str, IN_THE_KERNEL)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == len(IN_THE_KERNEL) > 10
