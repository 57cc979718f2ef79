import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .. import traces

AT_THE_LAUNCH = """
import asyncio, os, signal, sys
from hermes_kernel.process.launch import LaunchSpec
from hermes_kernel.process.local import LocalLauncher

async def main():
    spec = LaunchSpec("orphan", sys.executable, "key", None, {"PATH": os.environ["PATH"]})
    print((await LocalLauncher().launch(spec)).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""

AFTER_A_CELL = """
import os, signal
from hermes_kernel import BlockingRegistry

registry = BlockingRegistry()
result = registry.execute("import os; print(os.getpid())", owner="a")
print(result.stdout, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("program", [AT_THE_LAUNCH, AFTER_A_CELL], ids=["at the launch", "after a cell"])
def test_a_kernel_ends_with_a_host_that_is_killed(program: str, tmp_path: Path) -> None:
    host = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert host.returncode == -9
    pid = int(host.stdout.split()[-1])
    try:
        kernel = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended: list[int] = []
    try:
        ended, _, _ = select.select([kernel], [], [], 10)
        assert ended, f"the kernel {pid} outlives its host"
    finally:
        if not ended:
            signal.pidfd_send_signal(kernel, signal.SIGKILL)
        os.close(kernel)
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert traces.eventually(lambda: not traces.marked_processes(str(tmp_path)))
