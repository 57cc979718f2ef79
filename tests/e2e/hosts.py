"""Hosts to be killed, and the look from outside at what they leave."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .. import traces

Way = Mapping[str, Any]  # how kernels are made: arguments of Limits

PROGRAM = Path(__file__).with_name("host_program.py")
FORK: Way = {"start_method": "fork", "spare_kernels": 0}
SPAWN: Way = {"start_method": "spawn", "spare_kernels": 0}
SPARE: Way = {"start_method": "fork", "spare_kernels": 1}
NAMESPACE: Way = {**FORK, "isolation": "namespace", "require_isolation": True}
NOTHING: Mapping[str, str] = {}
NAMESPACES = subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Family:
    """A kernel and what stands above it; *first* is its warden's child."""

    zygote: psutil.Process
    warden: psutil.Process
    first: psutil.Process
    kernel: psutil.Process


def family(kernel: int, host: int | None = None) -> Family:
    """Find out who stands above a kernel: its host's child, its grandchild, and so on."""
    line = [psutil.Process(kernel)]
    while line[-1].ppid() != (host or os.getpid()):
        line.append(psutil.Process(line[-1].ppid()))
    *_, first, warden, zygote = line
    return Family(zygote, warden, first, line[0])


def spares(zygote: psutil.Process, kernels: Sequence[int]) -> list[int]:
    """Kernels that a zygote has and nobody else."""
    found = []
    for warden in zygote.children():
        leaves = [process.pid for process in warden.children(recursive=True) if not process.children()]
        if leaves and not set(leaves) & set(kernels):
            found += leaves
    return found


def all_gone(processes: Sequence[psutil.Process], within: float) -> bool:
    return traces.eventually(lambda: all(map(traces.is_gone, processes)), within=within)


def processes_of(runtime: Path) -> list[psutil.Process]:
    """Processes whose environment or command line names a runtime directory."""
    name = os.fsencode(runtime)
    found = []
    for process in psutil.process_iter():
        place = Path(f"/proc/{process.pid}")
        try:
            told = (place / "cmdline").read_bytes()
            told += (place / "environ").read_bytes()
        except PermissionError:
            pass  # of another user's: the command line has to do
        except OSError:
            continue
        if name in told and process.pid != os.getpid() and not traces.is_gone(process):
            found.append(process)
    return found


def files_of(runtime: Path) -> list[str]:
    """Directories, leases and places for sockets in a runtime directory."""
    return [str(path) for path in (*traces.kernels_of(runtime), *(runtime / "tmp").glob("hk-*"))]


class Host:
    """A host process with a runtime directory of its own, told what to do line by line."""

    def __init__(self, runtime: Path, command: Sequence[str], env: Mapping[str, str], said: Path) -> None:
        self.runtime = runtime
        self._said = said
        with said.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                env={**env, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime / "tmp")},
                cwd=runtime,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr(self) -> str:
        return self._said.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, word: str, **arguments: Any) -> Any:
        """Tell the host something and return its answer."""
        self.say(word, **arguments)
        return self.answer()

    def say(self, word: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([word, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the host has ended: {self._process.wait(10)}\n{self.stderr}"
        return json.loads(line)

    def cell(self, code: str, owner: str = "a", **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.tell("cell", code=code, owner=owner, **arguments)
        return answer

    def kernel(self, owner: str = "a") -> int:
        """The pid of an owner's kernel."""
        (pid,) = (info["pid"] for info in self.tell("kernels") if info["owner"] == owner)
        return int(pid)

    def family(self, owner: str = "a") -> Family:
        return family(self.kernel(owner), self.pid)

    def wait_for_spare(self) -> int:
        """Wait until there is a kernel that nobody has; there must be one of somebody's."""
        kernels = [info["pid"] for info in self.tell("kernels")]
        zygote = family(kernels[0], self.pid).zygote
        assert traces.eventually(lambda: spares(zygote, kernels), within=20)
        return spares(zygote, kernels)[0]

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._process.send_signal(signum)

    def wait(self, within: float = 10) -> int:
        return self._process.wait(within)

    def leaves(self) -> list[str]:
        return [str(process.pid) for process in processes_of(self.runtime)] + files_of(self.runtime)

    def leaves_nothing(self, within: float = 5.0) -> bool:
        return traces.eventually(lambda: not self.leaves(), within=within)

    def end(self) -> int:
        """Let the host close its registry and end; return its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait(20)

    def end_by_force(self) -> None:
        """End the process, whatever has become of it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                continue


def in_its_own_world(then: str = "") -> Sequence[str]:
    """What stands before a host in a pid namespace of its own, not as the first process there."""
    script = f'exec 3<&0; "$@" <&3 & wait $!; {then or "exit"}'
    return ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh")


@contextmanager
def new_runtime() -> Iterator[Path]:
    """A runtime directory, short enough for sockets, with a place for temporary files; nobody stays in it."""
    runtime = Path(tempfile.mkdtemp(prefix="hkh-"))
    try:
        (runtime / "tmp").mkdir()
        yield runtime
    finally:
        for process in processes_of(runtime):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        shutil.rmtree(runtime, ignore_errors=True)


@contextmanager
def host(
    limits: Way,
    *,
    before: Sequence[str] = (),
    env: Mapping[str, str] = NOTHING,
    runtime: Path | None = None,
    prepare: Callable[[Path], object] = lambda _: None,
) -> Iterator[Host]:
    """A host that is up. Afterwards nothing may be left of it; if something is, it is ended."""
    with new_runtime() as own:
        prepare(own)
        command = [*before, sys.executable, str(PROGRAM), json.dumps({"timeout": 60, **limits})]
        made = Host(runtime or own, command, {**os.environ, **env}, own / "stderr")
        try:
            assert made.answer() == "ready"
            yield made
            if not made.has_ended:
                assert made.end() == 0, made.stderr
            if runtime is None:
                assert made.leaves_nothing(), made.leaves()
        finally:
            made.end_by_force()
