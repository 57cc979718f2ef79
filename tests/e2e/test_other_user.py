import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from hermes_kernel import BlockingRegistry

SCRIPT = Path(__file__).with_name("other_user.py")
NOBODY = 65534


def python_of_everybody() -> str | None:
    """An interpreter that another user can run: this one may lie in a home directory."""
    candidates = filter(None, (shutil.which(name, path="/usr/bin:/bin") for name in ("python3", "python")))
    return next(candidates, None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed")
def test_another_user_can_neither_read_nor_reach_a_kernel(registry: BlockingRegistry, tmp_path: Path) -> None:
    python = python_of_everybody()
    if python is None:
        pytest.skip("no Python that another user may run")
    script = Path("/tmp") / f"hkt-other-user-{os.getpid()}.py"
    shutil.copy(SCRIPT, script)
    script.chmod(0o644)
    registry.execute("import os; os.umask(0)", owner="a")
    (info,) = registry.kernels()
    assert info.connection_file is not None
    sockets = json.loads(Path(info.connection_file).read_text())["ip"]
    command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python, "-I"]
    try:
        done = subprocess.run(
            [*command, str(script), info.connection_file, sockets], capture_output=True, text=True, timeout=30
        )
    finally:
        script.unlink()
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert stat.S_IMODE(Path(info.connection_file).stat().st_mode) == 0o600
    own = subprocess.run(
        [python, "-I", str(SCRIPT), info.connection_file, sockets], capture_output=True, text=True, timeout=30
    )
    could = own.stdout.splitlines()
    assert could == ["list", "read", "write", *(f"connect {port}" for port in range(1, 6)), "done"]
