"""What a registry makes of a kernel that does not play by the rules. The kernel is a script."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_kernel import BlockingRegistry, CellStatus, KernelStartError, Limits, Loss
from hermes_kernel.host import connection, session

from ..fakes import FakeKernel, FakeLauncher, Script, only_first

Request = dict[str, Any]
Run = Callable[..., tuple[BlockingRegistry, FakeLauncher]]

FAST = Limits(timeout=5, idle_grace=0.2)


@pytest.fixture
def scripted(leaves_nothing: None) -> Iterator[Run]:
    made: list[BlockingRegistry] = []

    def make(script: Script, limits: Limits = FAST) -> tuple[BlockingRegistry, FakeLauncher]:
        launcher = FakeLauncher(script)
        registry = BlockingRegistry(limits=limits, _launcher=launcher)
        made.append(registry)
        return registry, launcher

    yield make
    for registry in made:
        registry.close()


def once(misbehave: Script) -> Script:
    return only_first(misbehave, lambda kernel, request: kernel.good(request))


def test_an_ordinary_cell(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "hi\n")
        kernel.reply(request, {"status": "ok", "execution_count": 7})
        kernel.idle(request)

    registry, launcher = scripted(script)
    result = registry.execute("code", owner="a")
    assert (result.status, result.stdout, result.execution_count) == (CellStatus.OK, "hi\n", 7)
    assert launcher.kernels[0].cells == ["code"]


def test_output_after_the_reply_and_before_idle_belongs_to_the_cell(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.reply(request)
        kernel.stream(request, "late but not too late")
        kernel.idle(request)

    registry, _ = scripted(script)
    assert registry.execute("x", owner="a").stdout == "late but not too late"


def test_a_lost_idle_is_said_and_costs_nothing_but_its_grace(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.reply(request)

    registry, launcher = scripted(script)
    result = registry.execute("x", owner="a")
    assert result.status is CellStatus.OK
    assert "did not say that it was done" in (result.warning or "")
    assert registry.execute("x", owner="a").kernel.reused
    assert len(launcher.kernels) == 1


def test_a_reply_that_never_comes_is_a_timeout_and_costs_the_kernel(scripted: Run) -> None:
    registry, launcher = scripted(once(FakeKernel.busy), Limits(timeout=0.2))
    result = registry.execute("x", owner="a")
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, True)
    again = registry.execute("y", owner="a")
    assert (again.status, again.kernel.lost) == (CellStatus.OK, Loss.TIMED_OUT)
    assert len(launcher.kernels) == 2


@pytest.mark.parametrize("channel", ["reply", "iopub"])
def test_an_error_on_either_channel_is_an_error(scripted: Run, channel: str) -> None:
    error = {"ename": "E", "evalue": "v", "traceback": ["E: v"]}

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        if channel == "iopub":
            kernel.iopub("error", error, request)
        kernel.reply(request, {"status": "error", **error} if channel == "reply" else None)
        kernel.idle(request)

    registry, _ = scripted(script)
    result = registry.execute("x", owner="a")
    assert result.status is CellStatus.ERROR
    assert result.error is not None
    assert (result.error.ename, result.error.traceback) == ("E", "E: v")


def test_a_second_reply_never_becomes_another_cells_result(scripted: Run) -> None:
    kept: list[Request] = []

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, request["content"]["code"])
        kernel.reply(request)
        kernel.reply(request, {"status": "error", "ename": "Forged", "evalue": "", "traceback": []})
        for old in kept:
            kernel.reply(old)
            kernel.stream(old, "of an old cell")
            kernel.idle(old)
        kept.append(request)
        kernel.idle(request)

    registry, _ = scripted(script)
    for n in range(5):
        result = registry.execute(f"cell {n}", owner="a")
        assert (result.status, result.stdout) == (CellStatus.OK, f"cell {n}")


def test_what_comes_after_a_cell_is_settled_is_no_strangers_and_no_fault(
    scripted: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.good(request)
        kernel.iopub("execute_input", {"code": "late", "execution_count": 1}, request)
        kernel.signed("shell", request, "hermes_cell_started", {})

    registry, launcher = scripted(script)
    for _ in range(3):
        result = registry.execute("x", owner="a")
        assert (result.status, result.kernel.foreign_cells, result.kernel.ended) == (CellStatus.OK, 0, False)
    assert len(launcher.kernels) == 1
    assert caplog.text == ""


def test_nothing_is_lost_that_comes_right_behind_the_end_of_a_cell(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.good(request)
        kernel.stream(request, "behind\n")

    registry, _ = scripted(script)
    results = [registry.execute("x", owner="a") for _ in range(20)]
    # It is late output, or the cell's own where it overtakes the reply; that of the last cell is to come.
    texts = [result.text for result in results]
    texts += [late.text for result in results for late in result.late_output]
    assert 19 <= "".join(texts).count("behind") <= 20


@pytest.mark.parametrize("has_parent", [True, False])
def test_what_a_cell_that_ends_its_kernel_has_its_exit_handlers_write_is_its_own(
    scripted: Run, has_parent: bool
) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "x\n", hermes={"end": 2})
        kernel.reply(request, hermes={"exit_code": 0, "written": {"stdout": 2, "stderr": 0}})
        kernel.idle(request)
        for end in (100_002, 200_002):
            text = {"name": "stdout", "text": "b" * 100_000}
            kernel.iopub("stream", text, request if has_parent else None, {"hermes": {"end": end}})
        kernel.die(0)

    registry, _ = scripted(script)
    result = registry.execute("x", owner="a")
    assert (result.status, result.late_output) == (CellStatus.EXITED, ())
    assert result.truncation.bytes_total == 200_002
    assert result.stdout.startswith("x\nbbb")


def unreadable(kernel: FakeKernel, request: Request) -> None:
    for channel in ("iopub", "shell"):
        kernel.raw(channel, request, b"")
        kernel.raw(channel, request, b"no delimiter")
        kernel.raw(channel, request, b"<IDS|MSG>", b"0" * 64, b"{}", b"{}", b"{}", b"{}")
        kernel.raw(channel, request, b"<IDS|MSG>", *[b"x"] * 50)


def ill_formed(kernel: FakeKernel, request: Request) -> None:
    for content in (None, [], 3, "text", {"name": "stdout", "text": 3}, {"name": "fd 7", "text": "x"}):
        kernel.signed("iopub", request, "stream", content)
    for kind in ("error", "display_data", "execute_result", "status", "update_display_data", "x" * 1000):
        kernel.signed("iopub", request, kind, {"data": 3, "ename": 4})
    for kind in (None, 3, [], {}):
        kernel.signed("iopub", request, kind, {})
    for content in ({"status": 7}, {"status": "ok", "execution_count": "many"}, {}, [], None):
        kernel.signed("shell", request, "execute_reply", content)
    kernel.raw(
        "iopub", request, b"<IDS|MSG>", kernel.session.sign([b"[" * 100_000] * 4), *[b"[" * 100_000] * 4
    )
    kernel.iopub("stream", {"name": "stdout", "text": "orphan"}, None)


@pytest.mark.parametrize("noise", [unreadable, ill_formed])
def test_what_is_no_message_is_passed_over(scripted: Run, noise: Script) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        noise(kernel, request)
        kernel.stream(request, "fine")
        kernel.reply(request)
        kernel.idle(request)

    registry, _ = scripted(script)
    for _ in range(2):
        result = registry.execute("x", owner="a")
        assert (result.status, result.stdout) == (CellStatus.OK, "fine")


def test_a_kernel_that_sends_too_much_that_is_no_message_is_ended(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        for _ in range(session.MAX_ANOMALIES + 1):
            kernel.raw("iopub", request, b"noise")
        kernel.reply(request)
        kernel.idle(request)

    registry, _ = scripted(once(script))
    result = registry.execute("x", owner="a")
    assert (result.status, result.kernel.ended) == (CellStatus.OK, True)
    assert registry.execute("x", owner="a").kernel.lost is Loss.DIED


def test_a_frame_over_the_limit_ends_the_kernel(scripted: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq hangs up without a word; a host that waited for the rest would wait for ever."""
    monkeypatch.setattr(connection, "MAX_MESSAGE", 10_000)

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "x" * 20_000)
        kernel.reply(request)
        kernel.idle(request)

    registry, _ = scripted(once(script))
    result = registry.execute("x", owner="a")
    assert result.kernel.ended
    assert "output may be missing" in (result.warning or "")
    assert registry.execute("y", owner="a").kernel.lost is Loss.DIED


def test_a_kernel_that_ends_between_cells_is_replaced_and_the_owner_is_told(scripted: Run) -> None:
    registry, launcher = scripted(FakeKernel.good)
    registry.execute("x", owner="a")
    launcher.kernels[0].die(9)
    launcher.kernels[0].thread.join()
    result = registry.execute("y", owner="a")
    assert (result.status, result.kernel.lost, result.kernel.reused) == (CellStatus.OK, Loss.DIED, False)
    assert registry.execute("z", owner="a").kernel.lost is None


def test_a_kernel_that_ends_in_a_cell_gives_its_code_and_what_it_had_sent(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.stream(request, "before")
        kernel.die(7)

    registry, _ = scripted(once(script))
    result = registry.execute("x", owner="a")
    assert (result.status, result.exit_code, result.stdout) == (CellStatus.DIED, 7, "before")


def test_an_interrupted_cell_that_ends_in_time_keeps_its_kernel(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        kernel.interrupted.wait(5)
        kernel.reply(
            request, {"status": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []}
        )
        kernel.idle(request)

    registry, launcher = scripted(once(script), Limits(timeout=0.1, interrupt_grace=3))
    result = registry.execute("x", owner="a")
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, False)
    assert "state kept" in result.to_dict()["error"]
    assert registry.execute("y", owner="a").kernel.reused
    assert len(launcher.kernels) == 1


def test_one_that_ends_in_time_and_answers_no_probe_does_not(scripted: Run) -> None:
    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        if not request["content"]["silent"]:
            kernel.interrupted.wait(5)
            kernel.reply(request)
            kernel.idle(request)

    registry, _ = scripted(script, Limits(timeout=0.1, interrupt_grace=0.3))
    result = registry.execute("x", owner="a")
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, True)
    assert "state was lost" in result.to_dict()["error"]


def test_a_kernel_that_does_not_answer_is_a_start_error(
    scripted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeKernel, "_serve", lambda self, shell: self._stop.wait())
    registry, _ = scripted(FakeKernel.good, Limits(start_timeout=0.3))
    with pytest.raises(KernelStartError, match="did not answer within start_timeout"):
        registry.execute("x", owner="a")
    assert registry.kernels() == ()


def test_a_waiting_call_is_not_run_when_its_time_is_over_and_touches_nothing(scripted: Run) -> None:
    release = threading.Event()

    def script(kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        release.wait(10)
        kernel.reply(request)
        kernel.idle(request)

    registry, launcher = scripted(script)
    first: list[Any] = []
    runner = threading.Thread(target=lambda: first.append(registry.execute("long", owner="a", timeout=None)))
    runner.start()
    while not (launcher.kernels and launcher.kernels[0].cells):
        pass
    timed_out = registry.execute("waits", owner="a", timeout=0.1)
    interrupted = registry.execute("waits", owner="a", interrupted=lambda: True)
    release.set()
    runner.join()
    assert (timed_out.status, timed_out.ran) == (CellStatus.TIMED_OUT, False)
    assert (interrupted.status, interrupted.ran) == (CellStatus.INTERRUPTED, False)
    assert "not run; state kept" in timed_out.to_dict()["error"]
    assert (first[0].status, first[0].kernel.ended) == (CellStatus.OK, False)
    assert launcher.kernels[0].cells == ["long"]
