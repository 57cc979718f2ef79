"""The import contracts of setup.cfg hold, and each of them breaks where it is violated."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

VIOLATIONS = {
    "Rooms import only downhill": ("cell/status.py", "from ..host import session"),
    "What runs in another interpreter imports only what is there": ("kernel/shell.py", "import psutil"),
    "The host meets the kernel only on the wire": ("host/session.py", "from ..kernel import outputs"),
    "Pure rooms decide and do not act": ("cell/execution.py", "import asyncio"),
    "Nothing but data crosses the launch seam": ("process/launch.py", "import subprocess"),
}


def lint(tree: Path) -> str:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "hermes_kernel", tmp_path / "hermes_kernel", ignore=shutil.ignore_patterns("__py*")
    )
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def test_the_contracts_hold(tree: Path) -> None:
    assert f"Contracts: {len(VIOLATIONS)} kept, 0 broken" in lint(tree)


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_contract_breaks_where_it_is_violated(tree: Path, contract: str) -> None:
    file, line = VIOLATIONS[contract]
    module = tree / "hermes_kernel" / file
    docstring_end = module.read_text().index('"""', 3) + 3
    text = module.read_text()
    module.write_text(f"{text[:docstring_end]}\n{line}\n{text[docstring_end:]}")
    assert f"{contract} BROKEN" in lint(tree)
