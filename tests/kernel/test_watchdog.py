"""The watchdog of a kernel on Windows, with calls that are an object. It was never run on Windows."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel.kernel import watchdog
from hermes_kernel.kernel.watchdog import HOST_IS_GONE, WATCH, WindowsCalls, end_with_host

PATIENCE = 10.0


class FakeCalls:
    """A handle that is waited for until the host is gone; *fail*: the names of the calls that fail."""

    def __init__(self, *fail: str) -> None:
        self.fail = fail
        self.called: list[str] = []
        self.host_is_gone = threading.Event()
        self.is_over = threading.Event()
        self.code: int | None = None

    def keep(self, handle: int) -> None:
        self._call("keep", handle)

    def wait(self, handle: int) -> None:
        self._call("wait", handle)
        assert self.host_is_gone.wait(PATIENCE)

    def close(self, handle: int) -> None:
        self.is_over.set()
        self._call("close", handle)

    def start_thread(self, function: Callable[[], None]) -> None:
        self._call("start_thread")
        threading.Thread(target=function, daemon=True).start()

    def end(self, code: int) -> None:
        self.code = code
        self._call("end")
        self.is_over.set()

    def _call(self, name: str, *handles: int) -> None:
        assert set(handles) <= {42}
        self.called.append(name)
        if name in self.fail:
            raise OSError(f"{name}: refused")


def test_a_kernel_ends_with_its_host() -> None:
    calls = FakeCalls()
    assert end_with_host({WATCH: "42"}, calls)
    assert calls.code is None
    calls.host_is_gone.set()
    assert calls.is_over.wait(PATIENCE)
    assert calls.code == HOST_IS_GONE != 0
    assert calls.called == ["keep", "start_thread", "wait", "end"]


@pytest.mark.parametrize("value", ["42", "not a number", ""])
def test_no_cell_sees_the_handle(value: str) -> None:
    environ = {WATCH: value, "PATH": "x"}
    calls = FakeCalls()
    end_with_host(environ, calls)
    assert environ == {"PATH": "x"}
    calls.host_is_gone.set()


def test_the_variable_is_gone_before_the_handle_is_touched() -> None:
    environ = {WATCH: "42"}

    class Looking(FakeCalls):
        def keep(self, handle: int) -> None:
            assert WATCH not in environ
            super().keep(handle)

    assert end_with_host(environ, Looking("wait"))


def test_a_kernel_of_nobodys_is_not_watched() -> None:
    calls = FakeCalls()
    assert not end_with_host({"PATH": "x"}, calls)
    assert calls.called == []


@pytest.mark.parametrize(
    ("fail", "called"),
    [
        (("keep",), ["keep", "close"]),
        (("start_thread",), ["keep", "start_thread", "close"]),
        (("keep", "close"), ["keep", "close"]),
    ],
)
def test_a_handle_that_cannot_be_used_is_closed_and_the_kernel_runs_on(
    fail: tuple[str, ...], called: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = FakeCalls(*fail)
    assert not end_with_host({WATCH: "42"}, calls)
    assert calls.called == called
    assert calls.code is None
    assert f"the end of the host is not watched: {fail[0]}: refused" in caplog.text


def test_a_wait_that_fails_does_not_end_the_kernel(caplog: pytest.LogCaptureFixture) -> None:
    calls = FakeCalls("wait")
    assert end_with_host({WATCH: "42"}, calls)
    assert calls.is_over.wait(PATIENCE)
    assert calls.called == ["keep", "start_thread", "wait", "close"]
    assert calls.code is None
    assert "not watched any more" in caplog.text


def test_what_is_no_number_is_logged_and_the_kernel_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    calls = FakeCalls()
    assert not end_with_host({WATCH: "0x2A?"}, calls)
    assert calls.called == []
    assert "not watched" in caplog.text


def test_elsewhere_the_variable_is_taken_and_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(WATCH, "42")
    assert not end_with_host()
    assert WATCH not in os.environ
    assert "is not Windows" in caplog.text


def test_the_module_needs_the_standard_library_alone() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('watchdog', {watchdog.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert module.end_with_host({}) is False\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=PATIENCE)


class FakeKernel32:
    """The three functions, with C signatures; *answers* replaces what they return."""

    def __init__(self, **answers: int) -> None:
        self.given: list[tuple[Any, ...]] = []
        number, handle = ctypes.c_uint32, ctypes.c_void_p
        for name, arguments, answer in (
            ("SetHandleInformation", (handle, number, number), 1),
            ("WaitForSingleObject", (handle, number), 0),
            ("CloseHandle", (handle,), 1),
        ):
            function = self._function(name, answers.get(name, answer))
            setattr(self, name, ctypes.CFUNCTYPE(number, *arguments)(function))

    def _function(self, name: str, answer: int) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            self.given.append((name, *arguments))
            return answer

        return function


HANDLE = 0xFFFF_FFFF_0000_0010


def test_windows_is_asked_for_what_is_meant() -> None:
    kernel32 = FakeKernel32()
    calls = WindowsCalls(kernel32, lambda: 6)
    calls.keep(HANDLE)
    calls.wait(HANDLE)
    calls.close(HANDLE)
    assert kernel32.given == [
        ("SetHandleInformation", HANDLE, 1, 0),
        ("WaitForSingleObject", HANDLE, 0xFFFF_FFFF),
        ("CloseHandle", HANDLE),
    ]


@pytest.mark.parametrize(
    ("name", "answer", "call"),
    [
        ("SetHandleInformation", 0, WindowsCalls.keep),
        ("WaitForSingleObject", 0xFFFF_FFFF, WindowsCalls.wait),
        ("WaitForSingleObject", 0x80, WindowsCalls.wait),
        ("CloseHandle", 0, WindowsCalls.close),
    ],
)
def test_what_windows_refuses_is_an_os_error(
    name: str, answer: int, call: Callable[[WindowsCalls, int], None]
) -> None:
    calls = WindowsCalls(FakeKernel32(**{name: answer}), lambda: 6)
    with pytest.raises(OSError, match=f"{name} fails with the Windows error 6"):
        call(calls, HANDLE)


def test_the_thread_that_waits_does_not_keep_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = WindowsCalls(FakeKernel32(), lambda: 6)
    seen: list[threading.Thread] = []
    has_run = threading.Event()

    def look() -> None:
        seen.append(threading.current_thread())
        has_run.set()

    calls.start_thread(look)
    assert has_run.wait(PATIENCE)
    assert seen[0].daemon

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        calls.start_thread(look)


def test_the_end_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    WindowsCalls(FakeKernel32(), lambda: 6).end(HOST_IS_GONE)
    assert codes == [1]
