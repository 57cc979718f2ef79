"""The command as a test runs it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from click.testing import CliRunner

from hermes_kernel.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = (sys.executable, "-m", "hermes_kernel.cli")
WAIT = 60


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def hermes(
    *arguments: str | Path,
    cwd: Path | None = None,
    text: str | None = None,
    encoding: str = "utf-8",
    **env: str,
) -> Ended:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        input=text,
        capture_output=True,
        encoding=encoding,
        timeout=WAIT,
        env={**os.environ, **env},
        check=False,
    )
    assert "Traceback" not in done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def invoked(*arguments: str | Path) -> Ended:
    """Run the command in this process: quicker, where nothing depends on a process of its own."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def script(directory: Path, *cells: str) -> Path:
    file = directory / "script.py"
    file.write_text("".join(f"# %%\n{cell}\n" for cell in cells), encoding="utf-8")
    return file


def started(*arguments: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def read_notebook(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook
