"""A host to be killed: it grows a tree in a cell, says who is who, and does what it is told.

Reads one line of JSON (its options), prints one (the pids), then waits for words on its input: ``close`` ends
the owner, ``timeout`` runs a cell into its time limit; each is answered with what came of it.
"""

import json
import os
import sys

from hermes_kernel import BlockingRegistry, Limits

GROW = """
import os, signal, subprocess, sys
command = [sys.executable, "-I", "-S", {program!r}, {mark!r}, {shape!r}]
tree = subprocess.Popen(command, stdout=subprocess.PIPE)
assert tree.stdout.readline() == b"ready\\n"
"""
FORKED = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {mark!r}.encode(), 0, 0, 0)
for number in range(10):
    if os.fork() == 0:
        if number % 2:
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(15)
        os._exit(0)
"""


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def can_watch() -> bool:
    """Whether the end of a process can be waited for."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def main() -> None:
    options = json.loads(sys.stdin.readline())
    limits = Limits(
        start_method=options["start_method"], isolation=options["isolation"], spare_kernels=0, timeout=20
    )
    with BlockingRegistry(limits=limits) as registry:
        for code in (GROW, FORKED):
            result = registry.execute(code.format(**options), owner="a")
            assert result.status.value == "ok", result.text
        (kernel,) = registry.kernels()
        warden = parent(kernel.pid)
        if kernel.isolation == "namespace":
            warden = parent(warden)
        pids = {"host": os.getpid(), "zygote": parent(warden), "warden": warden, "kernel": kernel.pid}
        who = {**pids, "isolation": kernel.isolation, "degraded": kernel.degraded, "watches": can_watch()}
        print(json.dumps(who), flush=True)
        for word in sys.stdin:
            if word == "close\n":
                registry.close_owner("a")
                print("closed", flush=True)
            elif word == "timeout\n":
                code = "import time; time.sleep(60)"
                print(registry.execute(code, owner="a", timeout=0.2).status.value, flush=True)


main()
