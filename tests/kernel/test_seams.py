import pytest

from hermes_kernel.kernel import ipykernel_seams
from hermes_kernel.kernel.ipykernel_seams import reason_for_stock_paths


@pytest.fixture(autouse=True)
def not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERMES_KERNEL_PLAIN", raising=False)


def test_this_ipykernel_has_all_that_we_rely_on() -> None:
    assert reason_for_stock_paths() is None


def test_stock_paths_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_KERNEL_PLAIN", "1")
    assert reason_for_stock_paths() == "HERMES_KERNEL_PLAIN=1"


def test_a_name_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ipykernel_seams.IPKernelApp, "_bind_socket")
    reason = reason_for_stock_paths()
    assert reason is not None
    assert "IPKernelApp._bind_socket (binding the sockets)" in reason


def test_a_parameter_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipykernel_seams.IPythonKernel, "shell_main", lambda self: None)
    reason = reason_for_stock_paths()
    assert reason is not None
    assert "IPythonKernel.shell_main" in reason
