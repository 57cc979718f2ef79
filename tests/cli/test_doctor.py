import json
import re
import shutil
from pathlib import Path

import pytest

from ..conftest import DEGRADED
from .command import hermes, invoked

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_doctor_finds_a_working_kernel(runtime: Path) -> None:
    ended = invoked("doctor")
    assert ended.code == 0
    assert f"{runtime}/hermes-kernel (private)" in ended.out
    assert "6 * 7 = 42" in ended.out
    assert re.search(r"^start method +fork$", ended.out, re.MULTILINE)
    assert re.search(rf"^degraded +{DEGRADED or 'no'}$", ended.out, re.MULTILINE)


def test_doctor_tells_a_program_what_it_tells_a_person() -> None:
    ended = hermes("doctor", "--json", HERMES_KERNEL_PLAIN="1")
    found = json.loads(ended.out)
    assert ended.code == 0
    assert set(found["packages"]) == {"jupyter_client", "ipykernel", "pyzmq", "ipython"}
    assert found["plain"] is True
    kernel = found["kernel"]
    assert (kernel["works"], kernel["transport"], kernel["isolation"]) == (True, "ipc", "none")
    assert kernel["milliseconds"] > 0
    assert "HERMES_KERNEL_PLAIN" in kernel["degraded"]


def test_doctor_is_2_with_the_reason_if_no_kernel_starts() -> None:
    ended = invoked("doctor", "--json", "--python", shutil.which("true") or "true")
    assert ended.code == 2
    assert json.loads(ended.out)["kernel"]["works"] is False
    assert "not a Python that can run a kernel" in ended.err


def test_doctor_says_if_the_place_for_kernels_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "hermes-kernel").mkdir(mode=0o777)
    (tmp_path / "hermes-kernel").chmod(0o777)
    ended = hermes("doctor", XDG_RUNTIME_DIR=str(tmp_path))
    assert ended.code == 2
    assert "not a private directory" in ended.out
    assert ended.err.startswith("Error: ")
