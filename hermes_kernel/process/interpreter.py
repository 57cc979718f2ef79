"""Which Python runs a kernel, and whether it can."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import InterpreterError
from ..sidecar import __file__ as _sidecar
from .launch import Interpreter
from .marked import MARK, end_marked

OLDEST_PYTHON = (3, 10)
OLDEST_IPYKERNEL = (7, 3)
FIRST_UNKNOWN_IPYKERNEL = (8,)
NEEDED = "ipykernel>=7.3,<8"
END_TIMEOUT = 1.0  # seconds for what a probe has left to be gone

_PROBE = Path(_sidecar).with_name("probe.py").absolute()


def resolve(python: str | os.PathLike[str] | None) -> str:
    """Return the absolute path of an interpreter given by path or by name; None = this one.

    A virtual environment's link is not followed: following it would leave the environment. Raises
    InterpreterError if there is nothing that can be run.
    """
    if python is None:
        return sys.executable
    if not isinstance(python, str | os.PathLike) or not isinstance(os.fspath(python), str):
        raise InterpreterError(f"python={python!r}: give the path or the name of an interpreter")
    name = os.fspath(python)
    if not name or "\0" in name:
        raise InterpreterError(f"python={name!r}: give the path or the name of an interpreter")
    path = Path(os.path.expanduser(name))
    try:
        is_directory = path.is_dir()
    except OSError as error:  # longer than any name may be
        raise InterpreterError(
            f"python={name!r} cannot be looked for: {error.strerror}; give a path"
        ) from error
    if is_directory:
        inside = path / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        hint = f"; did you mean {str(inside)!r}?" if inside.exists() else "; give the interpreter itself"
        raise InterpreterError(f"python={name!r} is a directory{hint}")
    found = shutil.which(str(path))
    if found is None:
        raise InterpreterError(f"python={name!r} is not an interpreter that can be run; give an existing one")
    return os.path.abspath(found)


def own() -> Interpreter:
    """Return this interpreter; raises InterpreterError if its ipykernel is missing or does not fit."""
    try:
        ipykernel = version("ipykernel")
    except PackageNotFoundError:
        ipykernel = None
    return _checked(sys.executable, sys.version_info[:2], ipykernel)


async def probe(python: str, env: dict[str, str], *, timeout: float) -> Interpreter:
    """Ask *python* what it has, by running it with *env*.

    Raises InterpreterError with what was found, what is needed and the command that helps. *timeout* is in
    seconds.
    """
    cookie = secrets.token_hex(16)
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            str(_PROBE),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**env, MARK: cookie},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise InterpreterError(
            f"python={python!r} cannot be run: {error}; give an existing interpreter"
        ) from error
    try:
        async with asyncio.timeout(timeout):
            out, err = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            await process.wait()
    except TimeoutError:
        raise InterpreterError(
            f"python={python!r} did not answer within {timeout:g} s; give another interpreter"
        ) from None
    finally:
        await _end(process, cookie)
    try:
        answer = json.loads(out)
        major, minor = (int(part) for part in answer["version"])
        ipykernel = None if answer["ipykernel"] is None else str(answer["ipykernel"])
    except (ValueError, KeyError, TypeError):
        tail = err.decode("utf-8", "backslashreplace").strip()[-500:]
        raise InterpreterError(
            f"python={python!r} is not a Python that can run a kernel (exit code {process.returncode})"
            + (f": {tail}" if tail else "; give another interpreter")
        ) from None
    return _checked(python, (major, minor), ipykernel)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Read to the end, or as much as no interpreter has to say: something else may write without end."""
    data = b""
    while stream is not None and (piece := await stream.read(65536)):
        data = (data + piece)[-65536:]
    return data


async def _end(process: "asyncio.subprocess.Process", cookie: str) -> None:
    """Leave nothing of the probe: a script in an interpreter's place may have started others."""
    if process.returncode is None:
        process.kill()
    await asyncio.get_running_loop().run_in_executor(None, end_marked, {cookie})
    with contextlib.suppress(TimeoutError):  # somebody who is not to be found holds its pipes
        async with asyncio.timeout(END_TIMEOUT):
            await asyncio.gather(_read(process.stdout), _read(process.stderr), process.wait())


def _checked(python: str, python_version: tuple[int, int], ipykernel: str | None) -> Interpreter:
    if python_version < OLDEST_PYTHON:
        raise InterpreterError(
            f"python={python!r} is Python {_dotted(python_version)}; "
            f"needed is {_dotted(OLDEST_PYTHON)} or newer: give another interpreter"
        )
    have = "has no ipykernel" if ipykernel is None else f"has ipykernel {ipykernel}"
    if ipykernel is None or not OLDEST_IPYKERNEL <= _numbers(ipykernel) < FIRST_UNKNOWN_IPYKERNEL:
        raise InterpreterError(
            f"python={python!r} {have}; needed is {NEEDED}: "
            f"run {shlex.quote(python)} -m pip install '{NEEDED}'"
        )
    return Interpreter(python, python_version, ipykernel)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release.split("+")[0])[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
