"""What is done before a kernel is asked for; nobody can tell from what the kernel shows."""

import ast
import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from hermes_kernel import BlockingRegistry, Limits

from .. import traces
from ..conftest import DEGRADED
from .hosts import FORK, family, spares

Make = Callable[..., BlockingRegistry]

LOOK = """
import gc, os, sys, threading
{
    "names": sorted(globals()),
    "hidden": sorted(get_ipython().user_ns_hidden),
    "history": list(get_ipython().history_manager.input_hist_raw),
    "result": str(get_ipython().last_execution_result),
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "modules": sorted(name for name in sys.modules),
    "environment": sorted(os.environ),
    "collects": gc.isenabled(),
}
"""

pytestmark = pytest.mark.skipif(DEGRADED, reason="on stock paths there is nothing that could be done before")


def faults(pid: int) -> int:
    """How many pages of memory a process has had to ask for."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[7])


def waiting(registry: BlockingRegistry) -> int:
    """The pid of the kernel that waits for its terms."""
    kernels = [info.pid for info in registry.kernels() if info.pid is not None]
    zygote = family(kernels[0]).zygote
    assert traces.eventually(lambda: spares(zygote, kernels))
    return int(spares(zygote, kernels)[-1])


def has_rehearsed(pid: int) -> bool:
    """Whether a waiting kernel has answered once: then it has touched 8 MB of memory, before less than 2."""
    return faults(pid) * os.sysconf("SC_PAGE_SIZE") > 4_000_000


def seen(registry: BlockingRegistry, owner: str) -> tuple[int, Any]:
    """The pid of an owner's kernel, and what its first cell sees."""
    value = registry.execute(LOOK, owner=owner).value
    (pid,) = (info.pid for info in registry.kernels() if info.owner.session == owner)
    assert pid is not None
    return pid, ast.literal_eval(str(value))


def test_the_first_cell_finds_no_trace_of_it(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(**FORK, max_kernels=9))
    registry.execute("1", owner="z")
    pid = waiting(registry)
    assert traces.eventually(lambda: has_rehearsed(pid), within=20)
    leisurely, of_one = seen(registry, "a")
    assert leisurely == pid
    for owner in "bcdefg":  # each is asked for at once
        had_time = has_rehearsed(waiting(registry))
        _, of_the_next = seen(registry, owner)
        if not had_time:
            break
    assert not had_time
    assert of_one == of_the_next
    assert of_one["collects"]
    assert registry.execute("1 + 1", owner="a").execution_count == 2


def test_a_first_cell_imports_nothing_that_its_zygote_could_have(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(**FORK))
    code = "import sys; sorted(set(sys.modules) - set(get_ipython()._sys_modules_keys))"
    assert registry.execute(code, owner="a").value == "[]"


def test_one_that_dies_while_it_waits_costs_nobody_a_kernel(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(**FORK))
    registry.execute("1", owner="z")
    process = psutil.Process(waiting(registry))
    process.kill()
    assert traces.eventually(lambda: traces.is_gone(process))
    result = registry.execute("40 + 2", owner="a")
    assert (result.value, result.kernel.degraded) == ("42", None)
