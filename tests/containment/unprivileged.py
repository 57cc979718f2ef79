"""Run by root in its own mount namespace: ``unprivileged.py UID COMMAND...`` runs a command as that user.

What the command needs (this interpreter, the project) may lie in directories that only root can enter. They
are mounted anew, for this command alone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = [Path(sys.base_prefix).resolve(), Path(sys.prefix).absolute(), ROOT]


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def open_up(needed: list[Path]) -> None:
    """Let everybody reach the directories, through ancestors that hold nothing else."""
    for path in needed:
        for ancestor in reversed(path.parents):
            if ancestor.stat().st_mode & 0o001:
                continue
            kept = Path(tempfile.mkdtemp(prefix="hkm-kept-"))
            mount("--bind", ancestor, kept)
            mount("-t", "tmpfs", "-o", "mode=755", "none", ancestor)
            for below in needed:
                if ancestor in below.parents:
                    below.mkdir(parents=True)
                    mount("--bind", kept / below.relative_to(ancestor), below)


def main() -> None:
    uid = sys.argv[1]
    open_up(NEEDED)
    os.execvp("setpriv", ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *sys.argv[2:]])


main()
