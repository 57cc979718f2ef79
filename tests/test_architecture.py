"""The import contracts of setup.cfg hold, and each of them breaks where it is violated."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
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


# What comes with a dependency because that is made of it, and its own interface shows it.
THROUGH = {
    "IPython": "ipykernel",
    "comm": "ipykernel",
    "tornado": "ipykernel",
    "anyio": "mcp",
    "mcp_types": "mcp",
    "jupyter_server": "jupyterlab",
}
WITH_AN_EXTRA = {
    "cli/livekernels.py": "lab",
    "cli/people.py": "lab",
    "integrations/mcp.py": "mcp",
    "integrations/mcpstdio.py": "mcp",
    "integrations/mcptools.py": "mcp",
    "integrations/otel.py": "otel",
}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def test_what_is_imported_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distributions = packages_distributions()

    def named(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", each)[0].lower().replace("-", "_") for each in requirements}

    core = named(project["dependencies"])
    package = ROOT / "hermes_kernel"
    for file in package.rglob("*.py"):
        extra = WITH_AN_EXTRA.get(str(file.relative_to(package)))
        allowed = core | (named(project["optional-dependencies"][extra]) if extra else set())
        for module in set(imported(file)) - sys.stdlib_module_names - {"hermes_kernel"}:
            owners = {THROUGH.get(module, name).lower().replace("-", "_") for name in distributions[module]}
            assert owners & allowed, f"{file} imports {module}, which is of {owners}"
