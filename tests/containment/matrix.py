"""Every end of a host, a warden or a kernel against every tree: who is left, seen from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENDS = (
    "asked", "timeout", "kernel -9", "host -9", "warden -9", "zygote -9", "host and warden -9",
    "warden stopped, host -9",
)  # fmt: skip
SHAPES = ("plain", "escaped", "deaf", "racers", "bomb")
BOUNDS = {"racers": 3.0, "bomb": 6.0}  # seconds until nothing may be left; else BOUND
BOUND = 2.0
MIN_MARKED = 10


@dataclass(frozen=True)
class Setting:
    """How the host runs: its kernels, and what stands before its command line."""

    start_method: str
    isolation: str
    before: Sequence[str] = ()
    uid: int | None = None


@dataclass(frozen=True)
class Row:
    """What became of one tree: how many processes there were, who is left, when the last was seen."""

    end: str
    shape: str
    marked: int
    left: list[int]
    ms: int
    answer: str = ""
    host: dict[str, object] = field(default_factory=dict)


def scan(mark: str, within: float | None = None) -> tuple[list[int], int]:
    """Ask the separate program who carries the mark, with *within*: until nobody does or the time is up."""
    arguments = [] if within is None else [str(within)]
    found = subprocess.run(
        [sys.executable, "-I", "-S", str(HERE / "scan.py"), *arguments],
        input=mark, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    answer = json.loads(found.stdout)
    return answer["left"], answer["ms"]


def run(setting: Setting, end: str, shape: str) -> Row:
    """Grow one tree in a host of its own and end it in one way."""
    mark = f"hkm{uuid.uuid4().hex[:12]}"
    runtime = Path(tempfile.mkdtemp(prefix="hkm-"))
    try:
        if setting.uid is not None:
            os.chown(runtime, setting.uid, setting.uid)
        return _run(setting, end, shape, mark, runtime)
    finally:
        kill_all(mark)
        shutil.rmtree(runtime, ignore_errors=True)


def _run(setting: Setting, end: str, shape: str, mark: str, runtime: Path) -> Row:
    options = {
        "start_method": setting.start_method, "isolation": setting.isolation,
        "mark": mark, "shape": shape, "program": str(HERE / "trees.py"),
    }  # fmt: skip
    host = subprocess.Popen(
        [*setting.before, sys.executable, str(HERE / "host.py")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime), "HOME": str(runtime)},
        cwd=runtime,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        who = json.loads(_tell(host, json.dumps(options)))
        before, _ = scan(mark)
        answer = ""
        if end == "asked":
            answer = _tell(host, "close")
        elif end == "timeout":
            answer = _tell(host, "timeout")
        else:
            for name, signum in _deaths(end):
                os.kill(who[name], signum)
        if end == "zygote -9":  # kernels live on; their end is as complete as ever
            answer = _tell(host, "close")
        left, ms = scan(mark, BOUNDS.get(shape, BOUND))
        return Row(end, shape, len(before), left, ms, answer, who)
    finally:
        host.kill()
        host.communicate()


def _tell(host: "subprocess.Popen[str]", word: str) -> str:
    assert host.stdin is not None
    assert host.stdout is not None
    host.stdin.write(f"{word}\n")
    host.stdin.flush()
    return host.stdout.readline().strip()


def _deaths(end: str) -> list[tuple[str, int]]:
    if end == "warden stopped, host -9":
        return [("warden", signal.SIGSTOP), ("host", signal.SIGKILL)]
    if end == "host and warden -9":
        return [("warden", signal.SIGKILL), ("host", signal.SIGKILL)]
    return [(end.removesuffix(" -9"), signal.SIGKILL)]


def kill_all(mark: str) -> None:
    """Leave nothing of a tree that has got away."""
    left, _ = scan(mark)
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in left:
            if pid != os.getpid():
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    continue


WHAT_ENDS = {
    "asked": "the owner is closed, or its kernel reset, evicted or idle too long",
    "timeout": "a cell reaches its time limit",
    "kernel -9": "the kernel is killed, or ends by itself",
    "host -9": "the host is killed",
    "warden -9": "the warden is killed",
    "zygote -9": "the zygote is killed, and later the owner is closed",
    "host and warden -9": "host and warden are killed",
    "warden stopped, host -9": "the warden is stopped, then the host is killed",
}


def table(left: Mapping[tuple[str, str], Sequence[Sequence[int]]]) -> str:
    """Return the table of the guarantees; *left*: for each level and end, who was left of each tree."""
    lines = ["| what happens | `none` | `namespace` |", "|---|---|---|"]
    for end, what in WHAT_ENDS.items():
        cells = (
            "nothing is left" if not any(left[level, end]) else "**some**" for level in ("none", "namespace")
        )
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)
