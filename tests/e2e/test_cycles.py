"""Kernels made in every way and ended in every way, again and again: nothing piles up."""

import os
import random
import signal
from collections.abc import Callable

import pytest

from hermes_kernel import BlockingRegistry, Limits
from hermes_kernel.lifecycle.info import KernelState

from .. import traces

ESCAPE = """
import os, subprocess
children = [subprocess.Popen(["sleep", "300"], start_new_session=bool(n % 2)) for n in range(3)]
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execvp("sleep", ["sleep", "300"])
"""


def pid_of_kernel(registry: BlockingRegistry) -> int:
    """The kernel that serves; the one before may still be on its way out."""
    (pid,) = (info.pid for info in registry.kernels() if info.state is not KernelState.CLOSING)
    assert pid is not None
    return pid


ENDS: dict[str, Callable[[BlockingRegistry], object]] = {
    "closed": lambda registry: registry.close_owner("a"),
    "exits": lambda registry: registry.execute("import sys; sys.exit(3)", owner="a"),
    "dies": lambda registry: registry.execute("import os; os._exit(5)", owner="a"),
    "killed": lambda registry: os.kill(pid_of_kernel(registry), signal.SIGKILL),
    "timed out": lambda registry: registry.execute("import time; time.sleep(60)", owner="a", timeout=0.05),
    "reset": lambda registry: registry.execute("1", owner="a", reset=True),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("start_method", "spares", "cycles"), [("fork", 0, 45), ("spawn", 0, 20), ("auto", 1, 60)]
)
def test_kernels_that_come_and_go_leave_no_process_file_descriptor_or_thread(
    make_registry: Callable[..., BlockingRegistry], start_method: str, spares: int, cycles: int
) -> None:
    registry = make_registry(limits=Limits(start_method=start_method, spare_kernels=spares))
    dice = random.Random(start_method)

    def cycle(end: str) -> None:
        assert registry.execute(ESCAPE, owner="a").status.value == "ok"
        ENDS[end](registry)

    for end in ENDS:
        cycle(end)
    registry.close_owner("a")
    assert traces.eventually(lambda: registry.stats()["spares"] == spares)
    fds, threads = traces.descriptors(), traces.threads()
    for _ in range(cycles):
        cycle(dice.choice(list(ENDS)))
    registry.close_owner("a")
    assert traces.eventually(lambda: registry.stats()["spares"] == spares)
    assert traces.eventually(lambda: traces.descriptors() <= fds), (fds, traces.descriptors())
    # The pool that removes files has two threads, and makes the second when it first needs it.
    threads |= {name for name in traces.threads() if name.startswith("hermes-kernel-remover")}
    assert traces.eventually(lambda: traces.threads() <= threads), traces.threads() - threads
    assert not registry.kernels()
