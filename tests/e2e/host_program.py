"""A host that does what it is told: lines of JSON, ``[word, arguments]``, each answered by one line.

Its argument has those of ``Limits``, and ``expose``, as JSON. When its input ends it closes its registry and
ends.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil

from hermes_kernel import BlockingRegistry, Limits


class Host:
    """The words that a host knows."""

    def __init__(self, registry: BlockingRegistry) -> None:
        self._registry = registry
        self._answer: dict[str, Any] = {}
        self._call = threading.Thread()
        self._strangers: dict[int, subprocess.Popen[bytes]] = {}

    def cell(self, code: str, owner: str = "a", **arguments: Any) -> dict[str, Any]:
        """Run a cell and tell how it went."""
        began = time.monotonic()
        try:
            result = self._registry.execute(code, owner=owner, **arguments)
        except Exception as error:
            return {"raised": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
        return {
            "raised": None,
            "status": result.status.value,
            "code": result.exit_code,
            "signal": result.signal,
            "stdout": result.stdout,
            "value": result.value,
            "text": result.text,
            "lost": result.kernel.lost and result.kernel.lost.value,
            "seconds": time.monotonic() - began,
        }

    def begin(self, code: str, owner: str = "a", **arguments: Any) -> None:
        """Have a thread run a cell."""

        def run() -> None:
            self._answer = self.cell(code, owner, **arguments)

        self._call = threading.Thread(target=run, daemon=True)
        self._call.start()

    def join(self) -> dict[str, Any]:
        """Tell how the cell of the thread went."""
        self._call.join()
        return self._answer

    def kernels(self) -> list[dict[str, Any]]:
        """Describe the kernels."""
        return [
            {
                "owner": info.owner.session,
                "pid": info.pid,
                "state": info.state.value,
                "isolation": info.isolation,
                "degraded": info.degraded,
            }
            for info in self._registry.kernels()
        ]

    def close_owner(self, owner: str) -> int:
        """End an owner's kernels."""
        return self._registry.close_owner(owner)

    def close(self) -> None:
        """End everything."""
        self._registry.close()

    def set_environment(self, name: str, value: str | None) -> None:
        """Change a variable, or take it out."""
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def fork_worker(self) -> int:
        """Fork a process that has all our descriptors and never ends by itself."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    def descriptors(self) -> int:
        """Count what is open."""
        return int(psutil.Process().num_fds())

    def leave_descriptors(self, count: int | None) -> None:
        """Let this process open *count* more descriptors, or as many as it likes."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = hard if count is None else psutil.Process().num_fds() + count
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    def leave_processes(self, pid: int, count: int) -> None:
        """Let another process of ours fork only while our user has less than *count* processes."""
        resource.prlimit(pid, resource.RLIMIT_NPROC, (count, resource.prlimit(pid, resource.RLIMIT_NPROC)[1]))

    def handle_interrupts(self) -> None:
        """Live on after a Ctrl-C."""
        signal.signal(signal.SIGINT, lambda *_: None)

    def line(self) -> dict[str, int]:
        """Tell who stands above the one kernel, with the numbers that they have for this process."""
        (info,) = self._registry.kernels()
        kernel = psutil.Process(info.pid)
        warden = psutil.Process(kernel.ppid())
        return {"kernel": kernel.pid, "warden": warden.pid, "zygote": warden.ppid()}

    def cookie_of(self, pid: int) -> str:
        """Tell the mark of a process."""
        return str(psutil.Process(pid).environ()["HERMES_KERNEL_COOKIE"])

    def sweep(self) -> None:
        """Do what a host does first: look for what dead ones have left."""
        BlockingRegistry().close()

    def take_number(self, pid: int) -> bool:
        """Kill a process, and have another one with its number; for root, in a pid namespace."""
        os.kill(pid, signal.SIGKILL)
        while psutil.pid_exists(pid):
            time.sleep(0.001)
        for _ in range(100):
            with open("/proc/sys/kernel/ns_last_pid", "w") as last:
                last.write(str(pid - 1))
            stranger = subprocess.Popen(["sleep", "60"])
            if stranger.pid == pid:
                self._strangers[pid] = stranger
                return True
            stranger.kill()
            stranger.wait()
        return False

    def stranger_lives(self, pid: int) -> bool:
        """Tell whether the process that took the number has had no signal."""
        return self._strangers[pid].poll() is None and psutil.Process(pid).status() != psutil.STATUS_STOPPED

    def leave(self, how: str) -> None:
        """End without having closed anything."""
        if how == "os._exit":
            os._exit(3)
        if how == "exception":
            raise ValueError("nobody catches it")
        sys.exit(3)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    expose = arguments.pop("expose", False)
    registry = BlockingRegistry(limits=Limits(**arguments), expose=expose)
    host = Host(registry)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        word, given = json.loads(line)
        print(json.dumps(getattr(host, word)(**given)), flush=True)
    registry.close()


if __name__ == "__main__":
    main()
