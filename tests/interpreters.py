"""The other Pythons of this machine, and environments of theirs in which a kernel can run."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

Version = tuple[int, int]

PYTHONS = "HERMES_TEST_PYTHONS"
SUPPORTED: tuple[Version, ...] = ((3, 10), (3, 11), (3, 12), (3, 13))
NEEDED = "ipykernel>=7.3,<8"
_WHO = "import sys; print(*sys.version_info[:2], sys.prefix)"
_FOLDERS = ("~/.pyenv/versions/*/bin", "/opt/python*/bin", "/opt/python/*/bin", "/usr/local/bin", "/usr/bin")
_AT_ONCE = 2
_SECONDS_TO_ANSWER = 10
_SECONDS_TO_INSTALL = 240


def find() -> dict[Version, str]:
    """Return one interpreter for each version that can be run here.

    They are those that HERMES_TEST_PYTHONS names (paths with the separator of PATH between them), else
    what is on PATH and in the usual folders. A name on PATH may be a shim that runs nothing: each is tried.
    """
    named = os.environ.get(PYTHONS)
    paths = named.split(os.pathsep) if named else list(_usual_places())
    found: dict[Version, str] = {}
    for path in filter(None, dict.fromkeys(paths)):
        version = _version_of(path)
        if version is not None:
            found.setdefault(version, path)
    return found


class Environments:
    """A virtual environment with its own ipykernel for each Python, all made on the first question."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pythons = find()
        self._made: dict[Version, str | CannotMakeError] = {}

    def versions(self) -> Iterable[Version]:
        """Return every version that was found, too old ones as well."""
        return self._pythons

    def interpreter(self, version: Version) -> str:
        """Return the bare interpreter of a version; skips the test if there is none."""
        if version not in self._pythons:
            pytest.skip(f"no Python {_dotted(version)} found that runs; name one in {PYTHONS}")
        return self._pythons[version]

    def python(self, version: Version) -> str:
        """Return the Python of the version's environment; skips the test if it cannot be made."""
        self.interpreter(version)
        made = self._all()[version]
        if isinstance(made, CannotMakeError):
            pytest.skip(f"no environment for Python {_dotted(version)}: {made}")
        return made

    def any_two(self) -> tuple[str, str]:
        """Return the Pythons of the oldest and the newest environment; skips the test without two."""
        made = [python for python in self._all().values() if isinstance(python, str)]
        if len(made) < 2:
            pytest.skip(f"fewer than two Pythons that can have an environment; name them in {PYTHONS}")
        return made[0], made[-1]

    def _all(self) -> "dict[Version, str | CannotMakeError]":
        if not self._made:
            wanted = [version for version in SUPPORTED if version in self._pythons]
            with ThreadPoolExecutor(_AT_ONCE) as makers:
                self._made = dict(zip(wanted, makers.map(self._make, wanted), strict=True))
        return self._made

    def _make(self, version: Version) -> "str | CannotMakeError":
        try:
            python = bare(self._pythons[version], self._directory / f"python {_dotted(version)}", pip=True)
            install(python, NEEDED)
        except CannotMakeError as error:
            return error
        return python


class CannotMakeError(Exception):
    """An environment cannot be made here; the text says why."""


def bare(interpreter: str, directory: Path, *, pip: bool = False, lent: str | None = None) -> str:
    """Make an environment with nothing in it and return its Python.

    *lent*: the Python of an environment whose packages it is to find too.
    """
    _run([interpreter, "-m", "venv", *([] if pip else ["--without-pip"]), str(directory)])
    python = str(directory / "bin" / "python")
    if lent is not None:
        (site_packages(python) / "lent.pth").write_text(f"{site_packages(lent)}\n", encoding="utf-8")
    return python


def install(python: str, *arguments: str) -> None:
    """Have an environment's own pip install something."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *arguments])


def site_packages(python: str) -> Path:
    """Return where the packages of an environment lie."""
    return Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())


def foreign_environment() -> dict[str, str]:
    """Return the environment without what would lead another Python to the packages of this one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "PYTHONUTF8" or not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=foreign_environment(),
            timeout=_SECONDS_TO_INSTALL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMakeError(str(error)) from error
    if done.returncode:
        raise CannotMakeError(f"{' '.join(command)}: {(done.stdout + done.stderr).strip()[-500:]}")
    return done.stdout


def _usual_places() -> Iterator[str]:
    names = [f"python3.{minor}" for minor in range(9, 14)]
    for name in names:
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            found = shutil.which(name, path=folder)
            if found is not None:
                yield found
    for pattern in _FOLDERS:
        root = Path(pattern).expanduser()
        for folder in map(str, sorted(Path(root.anchor).glob(str(root.relative_to(root.anchor))))):
            for name in (*names, "python3", "python"):
                found = shutil.which(name, path=folder)
                if found is not None:
                    yield found


def _version_of(python: str) -> Version | None:
    """Return the version of an interpreter; None if it cannot be run."""
    try:
        done = subprocess.run(
            [python, "-c", _WHO],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=foreign_environment(),
            timeout=_SECONDS_TO_ANSWER,
        )
        major, minor = done.stdout.split()[:2]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return (int(major), int(minor)) if done.returncode == 0 else None


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def few() -> list[str]:
    """Return the oldest and the newest that can run a kernel, and those that are too old: fewer take less."""
    found = find()
    supported = sorted(found.keys() & set(SUPPORTED))
    return [path for version, path in found.items() if version not in supported[1:-1]]


if __name__ == "__main__":
    print(os.pathsep.join(few()))
