"""Nothing outlives its owner: every end against every tree, seen from outside by a program of its own."""

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from jupyter_client.manager import KernelManager

from ..conftest import DEGRADED
from .matrix import ENDS, HERE, MIN_MARKED, ROOT, SHAPES, WHAT_ENDS, Row, Setting, kill_all, run, scan, table

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.timeout(300)]

SIDE_BY_SIDE = 3
OTHER_UID = 54_321
DENIED = str(HERE / "denied.py")
NAMESPACES = subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode == 0
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def outcomes(setting: Setting, ends: tuple[str, ...] = ENDS, shapes: tuple[str, ...] = SHAPES) -> list[Row]:
    """Run a part of the matrix, a few trees side by side."""
    pairs = [(end, shape) for shape in shapes for end in ends]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(lambda pair: run(setting, *pair), pairs))


def survivors(rows: list[Row]) -> list[str]:
    """Who is left of trees that were there, and that came to the end which was meant for them."""
    assert all(row.marked >= MIN_MARKED for row in rows)
    assert {row.answer for row in rows} == {"", "closed", "timed_out"}
    return [f"{row.end} / {row.shape}: {row.left} of {row.marked}" for row in rows if row.left]


def test_the_scan_sees_what_a_stock_kernel_leaves() -> None:
    """A scan that finds nothing proves nothing until it has found something."""
    mark = f"hkm{uuid.uuid4().hex[:12]}"
    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        program = [sys.executable, "-I", "-S", str(HERE / "trees.py"), mark, "escaped"]
        code = (
            f"import subprocess\nprocess = subprocess.Popen({program!r}, stdout=subprocess.PIPE)\n"
            "process.stdout.readline()"
        )
        reply = client.execute_interactive(code, timeout=60, output_hook=lambda _: None)
        assert reply["content"]["status"] == "ok"
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        left, _ = scan(mark)
        assert len(left) == 50
    finally:
        kill_all(mark)
        client.stop_channels()
        manager.cleanup_resources()
        manager.context.destroy(linger=0)
    assert scan(mark, 2.0)[0] == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_nothing_is_left_of_a_tree_whatever_ends_it(start_method: str, shape: str) -> None:
    rows = outcomes(Setting(start_method, "none"), shapes=(shape,))
    assert survivors(rows) == []
    assert {row.host["degraded"] for row in rows} == {DEGRADED}
    assert {row.host["watches"] for row in rows} == {True}


@pytest.mark.skipif(not NAMESPACES, reason="this machine has no user namespaces for this user")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_nothing_is_left_of_a_tree_in_a_namespace(start_method: str, shape: str) -> None:
    rows = outcomes(Setting(start_method, "namespace"), shapes=(shape,))
    assert survivors(rows) == []
    assert {(row.host["isolation"], row.host["degraded"]) for row in rows} == {("namespace", DEGRADED)}


@needs_root
@pytest.mark.parametrize("isolation", ["none", "namespace"])
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_user_without_privileges_has_the_same_guarantee(start_method: str, isolation: str) -> None:
    before = ("unshare", "-m", sys.executable, str(HERE / "unprivileged.py"), str(OTHER_UID))
    setting = Setting(start_method, isolation, before, OTHER_UID)
    rows = outcomes(setting, shapes=("escaped",))
    assert survivors(rows) == []
    assert {row.host["isolation"] for row in rows} == {isolation}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_guarantee_holds_where_processes_cannot_be_watched(start_method: str) -> None:
    before = (sys.executable, DENIED, "pidfd_open")
    rows = outcomes(Setting(start_method, "none", before), shapes=("escaped",))
    assert survivors(rows) == []
    assert {row.host["watches"] for row in rows} == {False}


def test_where_namespaces_are_denied_a_kernel_runs_without_and_says_so() -> None:
    before = (sys.executable, DENIED, "unshare")
    rows = outcomes(Setting("fork", "namespace", before), shapes=("escaped",))
    assert survivors(rows) == []
    assert {row.host["isolation"] for row in rows} == {"none"}
    assert all("isolation 'namespace' is not available here" in str(row.host["degraded"]) for row in rows)


def test_the_documented_guarantees_are_those_of_the_tests() -> None:
    """Every other test here demands that nothing is left: so the table says it, for each end and level."""
    nothing = {(level, end): [[]] for level in ("none", "namespace") for end in ENDS}
    documented = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert table(nothing) in documented
    assert set(WHAT_ENDS) == set(ENDS)
