"""Run in a cell: starts a process in each way in which it might outlive its kernel.

DIRECTORY is given: there each process notes its pid under the name that KINDS has for it (see ``linger.py``).
"""

import multiprocessing
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DIRECTORY = globals().get("DIRECTORY", "")
LINGER = str(Path(__file__).with_name("linger.py"))
POOLED = "import runpy, sys; sys.argv[1:] = {!r}; runpy.run_path({!r}, run_name='__main__')"
kept: list[object] = []


def command(kind: str) -> list[str]:
    return [sys.executable, "-I", "-S", LINGER, DIRECTORY, kind]


def by_shell(kind: str, line: str, shell: str = "sh") -> None:
    subprocess.run([shell, "-c", line.format(shlex.join(command(kind)))], check=True)


def double_fork(run: Callable[[], object]) -> None:
    """Run something in an orphan with a session of its own."""
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            run()
        os._exit(0)
    os.waitpid(pid, 0)


def without_anything() -> None:
    """Run with no descriptor and no environment."""
    os.closerange(0, 4096)
    os.execve(sys.executable, command("daemon"), {})


def without_exec() -> None:
    os.closerange(0, 4096)
    sys.argv[1:] = [DIRECTORY, "no exec"]
    exec(compile(Path(LINGER).read_text(), LINGER, "exec"), {"__name__": "__main__"})


def on_a_terminal() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execv(sys.executable, command("pty"))
    kept.append(terminal)


def pooled(method: str) -> None:
    pool = multiprocessing.get_context(method).Pool(1)
    pool.apply_async(exec, (POOLED.format([DIRECTORY, f"{method} pool"], LINGER),))
    kept.append(pool)


KINDS: dict[str, Callable[[], object]] = {
    "plain": lambda: subprocess.Popen(command("plain")),
    "background": lambda: by_shell("background", "{} &"),
    "nohup": lambda: by_shell("nohup", "nohup {} >/dev/null 2>&1 &"),
    "job": lambda: by_shell("job", "set -m; {} & disown", shell="bash"),
    "new session": lambda: subprocess.Popen(command("new session"), start_new_session=True),
    "own group": lambda: subprocess.Popen(command("own group"), process_group=0),
    "setsid": lambda: subprocess.Popen(["setsid", *command("setsid")]),
    "timeout": lambda: subprocess.Popen(["timeout", "60", *command("timeout")]),
    "double fork": lambda: double_fork(lambda: os.execv(sys.executable, command("double fork"))),
    "daemon": lambda: double_fork(without_anything),
    "no exec": lambda: double_fork(without_exec),
    "pty": on_a_terminal,
    "fork pool": lambda: pooled("fork"),
    "spawn pool": lambda: pooled("spawn"),
    "forkserver pool": lambda: pooled("forkserver"),
}

if __name__ == "<run_path>":
    for escape in KINDS.values():
        escape()
