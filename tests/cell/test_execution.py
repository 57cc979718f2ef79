import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hermes_kernel.cell.execution import BUSY_GRACE, CellExecution, Settlement, cut_before_run
from hermes_kernel.cell.outputs import CellError
from hermes_kernel.cell.request import CellTimes
from hermes_kernel.cell.status import CellStatus, Fate, Phase

from .test_message import TRACEBACK, KernelVoice

VOICE = KernelVoice()
TIMES = CellTimes(timeout=10, queue_timeout=10, start_timeout=30, interrupt_grace=0, idle_grace=1)
WITH_GRACE = replace(TIMES, interrupt_grace=2)
BUSY, IDLE, OK = VOICE.status("busy"), VOICE.status("idle"), VOICE.reply()
FAILED = VOICE.reply("error")
FOREIGN = [
    VOICE.status("busy", foreign=True),
    VOICE.status("idle", foreign=True),
    VOICE.stream("theirs", foreign=True),
    VOICE.status("starting", orphan=True),
    VOICE.stream("nobody's", orphan=True),
]
BOOM = CellError("ValueError", "boom", "\n".join(TRACEBACK))


def sent(times: CellTimes = TIMES, now: float = 3.0) -> CellExecution:
    return CellExecution(VOICE.msg_id, times, now)


def running(times: CellTimes = TIMES, now: float = 3.0) -> CellExecution:
    execution = sent(times, now)
    execution.receive_iopub(BUSY, now)
    return execution


def how(execution: CellExecution) -> tuple[CellStatus, Fate, int]:
    settlement = execution.settlement
    assert settlement is not None, "the cell is not settled"
    assert settlement.phase is Phase.RAN
    assert settlement.ran
    return settlement.status, settlement.fate, settlement.exit_code


# The settle rule


def test_a_cell_is_over_when_its_reply_is_in_and_then_its_idle() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    assert execution.settlement is None
    execution.receive_iopub(IDLE, 3.6)
    assert how(execution) == (CellStatus.OK, Fate.KEEP, 0)


def test_a_cell_is_over_when_its_idle_is_in_and_then_its_reply() -> None:
    execution = running()
    execution.receive_iopub(IDLE, 3.5)
    assert execution.settlement is None
    execution.receive_reply(OK, 3.6)
    assert how(execution) == (CellStatus.OK, Fate.KEEP, 0)


def test_a_settled_cell_has_its_count_and_nothing_missing() -> None:
    execution = running()
    execution.receive_reply(VOICE.reply(count=7), 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert execution.settlement == Settlement(CellStatus.OK, Phase.RAN, Fate.KEEP, execution_count=7)


def test_an_idle_that_does_not_come_is_waited_for_and_then_flagged() -> None:
    execution = running()
    execution.receive_reply(OK, 4.0)
    assert execution.deadline == 5.0
    execution.tick(4.9)
    assert execution.settlement is None
    execution.tick(5.0)
    assert how(execution) == (CellStatus.OK, Fate.KEEP, 0)
    assert execution.settlement is not None
    assert execution.settlement.idle_missing


def test_an_idle_that_comes_in_its_grace_is_not_missing() -> None:
    execution = running()
    execution.receive_reply(OK, 4.0)
    execution.receive_iopub(IDLE, 4.9)
    assert execution.settlement is not None
    assert not execution.settlement.idle_missing


def test_with_no_grace_for_idle_a_cell_is_settled_by_the_next_tick() -> None:
    execution = running(replace(TIMES, idle_grace=0))
    execution.receive_reply(OK, 4.0)
    assert execution.deadline == 4.0
    execution.tick(4.0)
    assert how(execution) == (CellStatus.OK, Fate.KEEP, 0)


def test_output_that_comes_between_reply_and_idle_belongs_to_the_cell() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    assert execution.receive_iopub(VOICE.stream("late"), 3.6)
    execution.receive_iopub(IDLE, 3.7)
    assert execution.outputs.stdout == "late"


def test_an_error_on_both_channels_is_an_error() -> None:
    execution = running()
    execution.receive_iopub(VOICE.error(), 3.5)
    execution.receive_reply(FAILED, 3.6)
    execution.receive_iopub(IDLE, 3.7)
    assert how(execution) == (CellStatus.ERROR, Fate.KEEP, 1)
    assert execution.settlement is not None
    assert execution.settlement.error == BOOM


def test_an_error_in_the_reply_alone_is_an_error() -> None:
    execution = running()
    execution.receive_reply(FAILED, 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert how(execution) == (CellStatus.ERROR, Fate.KEEP, 1)
    assert execution.settlement is not None
    assert execution.settlement.error == BOOM


def test_an_error_on_iopub_alone_is_an_error() -> None:
    execution = running()
    execution.receive_iopub(VOICE.error(), 3.5)
    execution.receive_reply(OK, 3.6)
    execution.receive_iopub(IDLE, 3.7)
    assert how(execution) == (CellStatus.ERROR, Fate.KEEP, 1)


def test_an_error_that_was_cleared_is_an_error() -> None:
    execution = running()
    for message in (VOICE.error(), VOICE.clear(), IDLE):
        execution.receive_iopub(message, 3.5)
    execution.receive_reply(OK, 3.6)
    assert how(execution)[0] is CellStatus.ERROR


def test_an_error_between_reply_and_idle_is_an_error() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    execution.receive_iopub(VOICE.error(), 3.6)
    execution.receive_iopub(IDLE, 3.7)
    assert how(execution)[0] is CellStatus.ERROR


def test_a_cell_that_was_aborted_is_an_error_that_says_so() -> None:
    execution = running()
    execution.receive_reply(VOICE.says("execute_reply", {"status": "aborted"}), 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert how(execution) == (CellStatus.ERROR, Fate.KEEP, 1)
    assert execution.settlement is not None
    assert execution.settlement.error is not None
    assert "did not run" in execution.settlement.error.evalue


def test_a_lone_surrogate_in_a_reply_does_not_come_out() -> None:
    execution = running()
    execution.receive_reply(VOICE.reply("error", content={"evalue": "\ud800", "traceback": ["\ud800"]}), 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert execution.settlement is not None
    error = execution.settlement.error
    assert error is not None
    assert (error.evalue, error.traceback) == ("\\ud800", "\\ud800")


# Whose message it is


@pytest.mark.parametrize("message", FOREIGN, ids=lambda m: f"{m.msg_type} {m.content}")
def test_a_message_of_others_is_not_ours_and_changes_nothing(message: Any) -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    assert not execution.receive_iopub(message, 3.6)
    assert execution.settlement is None
    assert execution.outputs.is_empty
    assert execution.anomalies == 0


def test_a_reply_to_others_is_not_ours_and_does_not_end_the_cell() -> None:
    execution = running()
    execution.receive_iopub(IDLE, 3.5)
    assert not execution.receive_reply(VOICE.reply(foreign=True), 3.6)
    assert not execution.receive_reply(VOICE.reply(orphan=True), 3.6)
    assert execution.settlement is None


def test_a_reply_of_another_type_is_not_the_cells() -> None:
    execution = running()
    execution.receive_iopub(IDLE, 3.5)
    assert not execution.receive_reply(VOICE.says("kernel_info_reply", {"status": "ok"}), 3.6)
    assert execution.settlement is None


def test_a_second_reply_is_an_anomaly_and_the_first_one_counts() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    assert execution.receive_reply(FAILED, 3.6)
    assert execution.anomalies == 1
    execution.receive_iopub(IDLE, 3.7)
    assert how(execution)[0] is CellStatus.OK


def test_a_second_reply_does_not_extend_the_wait_for_idle() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    execution.receive_reply(OK, 4.4)
    assert execution.deadline == 4.5


def test_whatever_comes_for_a_settled_cell_changes_nothing_and_a_second_reply_is_counted() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    execution.receive_iopub(IDLE, 3.6)
    before = execution.settlement
    assert execution.receive_reply(FAILED, 3.7)
    assert execution.receive_iopub(VOICE.error(), 3.7)
    execution.kernel_ended(-9)
    execution.interrupt(3.8)
    execution.tick(1e9)
    assert execution.settlement is before
    assert execution.anomalies == 1
    assert execution.outputs.is_empty


def test_what_a_settled_cell_writes_is_not_its_own_any_more_if_its_kernel_goes_on() -> None:
    execution = running()
    execution.receive_reply(OK, 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert not execution.receive_iopub(VOICE.stream("late"), 3.7)
    assert not execution.receive_iopub(VOICE.stream("late", orphan=True), 3.7)
    assert execution.outputs.is_empty


def test_what_a_cell_that_ends_its_kernel_writes_then_is_its_own_and_counted() -> None:
    execution = running()
    execution.receive_iopub(VOICE.stream("x\n"), 3.4)
    exits = {"exit_code": 0, "written": {"stdout": 2, "stderr": 0}}
    execution.receive_reply(VOICE.reply(hermes=exits), 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert execution.receive_iopub(VOICE.stream("late"), 3.7)
    assert execution.receive_iopub(VOICE.stream("later", orphan=True), 3.8)
    assert not execution.receive_iopub(VOICE.stream("other", foreign=True), 3.9)
    assert not execution.receive_iopub(VOICE.status("idle", foreign=True), 3.9)
    assert execution.outputs.stdout == "x\nlatelater"
    assert execution.outputs.total("stdout") == 11


@pytest.mark.parametrize("exits", [True, False])
def test_what_exit_handlers_write_may_overtake_the_reply_that_tells_of_the_end(exits: bool) -> None:
    execution = running()
    execution.receive_iopub(VOICE.stream("orphan before\n", orphan=True), 3.4)
    execution.receive_iopub(VOICE.stream("x\n"), 3.4)
    execution.receive_iopub(IDLE, 3.5)
    assert execution.receive_iopub(VOICE.stream("own\n"), 3.5)
    assert not execution.receive_iopub(VOICE.stream("orphan\n", orphan=True), 3.5)
    report: dict[str, Any] = {"written": {"stdout": 2, "stderr": 0}} | ({"exit_code": 0} if exits else {})
    execution.receive_reply(VOICE.reply(hermes=report), 3.6)
    assert execution.outputs.stdout == ("x\nown\norphan\n" if exits else "x\nown\n")
    assert execution.outputs.total("stdout") == len(execution.outputs.stdout)


# The run clock


def test_the_clock_starts_with_busy() -> None:
    execution = sent()
    assert execution.deadline == 3.0 + BUSY_GRACE
    execution.receive_iopub(BUSY, 4.0)
    assert execution.deadline == 14.0


def test_a_second_busy_does_not_start_the_clock_again() -> None:
    execution = running()
    execution.receive_iopub(BUSY, 9.0)
    assert execution.deadline == 13.0


def test_a_foreign_busy_does_not_start_the_clock() -> None:
    execution = sent()
    execution.receive_iopub(FOREIGN[0], 4.0)
    assert execution.deadline == 8.0


def test_without_busy_the_clock_starts_five_seconds_after_the_send() -> None:
    execution = sent()
    execution.tick(7.9)
    assert execution.deadline == 8.0
    execution.tick(8.0)
    assert execution.settlement is None
    assert execution.deadline == 18.0
    execution.tick(18.0)
    assert how(execution) == (CellStatus.TIMED_OUT, Fate.END, -1)


def test_a_busy_that_comes_later_does_not_give_the_cell_more_time() -> None:
    execution = sent()
    execution.tick(8.0)
    execution.receive_iopub(BUSY, 12.0)
    assert execution.deadline == 18.0


def test_a_reply_without_busy_is_a_reply() -> None:
    execution = sent()
    execution.receive_reply(OK, 3.5)
    assert execution.deadline == 4.5
    execution.receive_iopub(IDLE, 3.6)
    assert how(execution)[0] is CellStatus.OK


def test_without_a_limit_a_running_cell_waits_for_messages_alone() -> None:
    execution = running(replace(TIMES, timeout=None))
    assert execution.deadline == math.inf
    execution.tick(1e12)
    assert execution.settlement is None
    execution.receive_reply(OK, 1e12)
    assert execution.deadline == 1e12 + 1


# Timeout, interrupt and grace


def test_a_timeout_ends_the_kernel_at_once_if_there_is_no_grace() -> None:
    execution = running()
    execution.tick(12.9)
    assert execution.settlement is None
    execution.tick(13.0)
    assert how(execution) == (CellStatus.TIMED_OUT, Fate.END, -1)
    assert not execution.interrupt_wanted


def test_an_interrupt_ends_the_kernel_at_once_if_there_is_no_grace() -> None:
    for execution in (sent(), running()):
        execution.interrupt(3.5)
        assert how(execution) == (CellStatus.INTERRUPTED, Fate.END, -1)
        assert not execution.interrupt_wanted


def test_a_cut_cell_keeps_the_output_it_had() -> None:
    execution = running()
    execution.receive_iopub(VOICE.stream("partial"), 4.0)
    execution.tick(13.0)
    assert execution.outputs.stdout == "partial"


def cut_with_grace(by: str, times: CellTimes = WITH_GRACE) -> tuple[CellExecution, CellStatus]:
    """A cell that was asked to end at 13.0 and has until 15.0."""
    execution = running(times)
    if by == "time":
        execution.tick(13.0)
        return execution, CellStatus.TIMED_OUT
    execution.interrupt(13.0)
    return execution, CellStatus.INTERRUPTED


by_either = pytest.mark.parametrize("by", ["time", "caller"])


@by_either
def test_with_a_grace_a_cut_cell_is_asked_to_end_first(by: str) -> None:
    execution, _ = cut_with_grace(by)
    assert execution.interrupt_wanted
    assert execution.settlement is None
    assert execution.deadline == 15.0


@by_either
@pytest.mark.parametrize("reply", [OK, FAILED], ids=["ok", "error"])
def test_a_cut_cell_that_ends_in_its_grace_keeps_its_kernel_and_is_still_cut(by: str, reply: Any) -> None:
    execution, status = cut_with_grace(by)
    execution.receive_iopub(VOICE.error("KeyboardInterrupt", ""), 13.5)
    execution.receive_reply(reply, 13.5)
    assert execution.settlement is None
    execution.receive_iopub(IDLE, 14.9)
    assert how(execution) == (status, Fate.KEEP, -1)


@by_either
def test_a_cut_cell_that_does_not_end_in_its_grace_loses_its_kernel(by: str) -> None:
    execution, status = cut_with_grace(by)
    execution.tick(14.9)
    assert execution.settlement is None
    execution.tick(15.0)
    assert how(execution) == (status, Fate.END, -1)


@by_either
@pytest.mark.parametrize("half", ["reply", "idle"])
def test_half_an_end_in_the_grace_is_no_end(by: str, half: str) -> None:
    execution, status = cut_with_grace(by)
    if half == "reply":
        execution.receive_reply(FAILED, 13.5)
    else:
        execution.receive_iopub(IDLE, 13.5)
    assert execution.deadline == 15.0
    execution.tick(15.0)
    assert how(execution) == (status, Fate.END, -1)


@by_either
def test_a_second_cut_changes_neither_the_reason_nor_the_grace(by: str) -> None:
    execution, status = cut_with_grace(by)
    execution.interrupt(14.0)
    assert execution.deadline == 15.0
    execution.tick(15.0)
    assert how(execution)[0] is status


@by_either
def test_a_cut_cell_whose_code_exits_does_not_keep_its_kernel(by: str) -> None:
    execution, status = cut_with_grace(by)
    execution.receive_reply(VOICE.reply(hermes={"exit_code": 3}), 13.5)
    execution.receive_iopub(IDLE, 13.6)
    assert execution.settlement is not None
    assert execution.settlement.status in (status, CellStatus.EXITED)
    assert execution.settlement.fate is Fate.END


def test_an_interrupt_before_busy_has_its_grace_too() -> None:
    execution = sent(WITH_GRACE)
    execution.interrupt(4.0)
    assert execution.interrupt_wanted
    assert execution.deadline == 6.0
    execution.receive_iopub(BUSY, 5.0)
    assert execution.deadline == 6.0


def test_an_unlimited_cell_that_is_interrupted_has_a_deadline() -> None:
    execution = running(replace(WITH_GRACE, timeout=None))
    execution.interrupt(50.0)
    assert execution.deadline == 52.0


# The end of the kernel


@pytest.mark.parametrize("code", [0, 1, 3, -9, -11])
def test_a_kernel_that_ends_without_a_reply_has_died_with_its_code(code: int) -> None:
    for execution in (sent(), running()):
        execution.kernel_ended(code)
        assert how(execution) == (CellStatus.DIED, Fate.END, code)


def test_a_kernel_that_ends_after_idle_but_without_a_reply_has_died() -> None:
    execution = running()
    execution.receive_iopub(IDLE, 3.5)
    execution.kernel_ended(-9)
    assert how(execution) == (CellStatus.DIED, Fate.END, -9)


@pytest.mark.parametrize(
    ("reply", "status", "exit_code"),
    [
        (OK, CellStatus.OK, 0),
        (FAILED, CellStatus.ERROR, 1),
        (VOICE.reply(hermes={"exit_code": 3}), CellStatus.EXITED, 3),
    ],
    ids=["ok", "error", "exit"],
)
def test_a_kernel_that_ends_after_the_reply_leaves_the_status_of_the_reply(
    reply: Any, status: CellStatus, exit_code: int
) -> None:
    execution = running()
    execution.receive_reply(reply, 3.5)
    execution.kernel_ended(-9)
    assert how(execution) == (status, Fate.END, exit_code)
    assert execution.settlement is not None
    assert execution.settlement.idle_missing == (status is not CellStatus.EXITED)


@by_either
def test_a_kernel_that_ends_after_a_cut_leaves_the_status_of_the_cut(by: str) -> None:
    execution, status = cut_with_grace(by)
    execution.kernel_ended(-9)
    assert how(execution) == (status, Fate.END, -1)


@by_either
def test_a_kernel_that_ends_after_a_cut_and_a_reply_leaves_the_status_of_the_cut(by: str) -> None:
    execution, status = cut_with_grace(by)
    execution.receive_reply(OK, 13.5)
    execution.kernel_ended(0)
    assert how(execution) == (status, Fate.END, -1)


# Exit codes


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (0, 0),
        (1, 1),
        (3, 3),
        (255, 255),
        (-1, -1),
        (2**31 - 1, 2**31 - 1),
        (2**31, 255),
        (10**30, 255),
        (-(10**30), 255),
    ],
)
@pytest.mark.parametrize("status", ["ok", "error"])
def test_a_reply_with_an_exit_code_ends_the_kernel_with_it(code: int, exit_code: int, status: str) -> None:
    execution = running()
    execution.receive_reply(VOICE.reply(status, hermes={"exit_code": code}), 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert how(execution) == (CellStatus.EXITED, Fate.END, exit_code)
    assert execution.settlement is not None
    assert execution.settlement.error is None


@pytest.mark.parametrize(
    "hermes", [{"exit_code": v} for v in (True, False, "3", 3.0, None, [3], {})] + [{}, [], "x", 3], ids=repr
)
def test_a_forged_exit_code_is_none(hermes: Any) -> None:
    execution = running()
    execution.receive_reply(VOICE.reply(hermes=hermes), 3.5)
    execution.receive_iopub(IDLE, 3.6)
    assert how(execution) == (CellStatus.OK, Fate.KEEP, 0)


def test_an_exit_without_idle_is_an_exit() -> None:
    execution = running()
    execution.receive_reply(VOICE.reply(hermes={"exit_code": 0}), 3.5)
    execution.tick(4.5)
    assert how(execution) == (CellStatus.EXITED, Fate.END, 0)


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.STARTING])
@pytest.mark.parametrize("status", [CellStatus.TIMED_OUT, CellStatus.INTERRUPTED])
def test_a_call_that_is_cut_before_it_runs_touches_nothing(status: CellStatus, phase: Phase) -> None:
    settlement = cut_before_run(status, phase)
    assert settlement == Settlement(status, phase, Fate.KEEP, exit_code=-1)
    assert not settlement.ran


class Execution(RuleBasedStateMachine):
    """One cell under any order of messages, ticks, cuts and the end of its kernel.

    What it keeps beside the machine are the facts that were fed to it; the settlement must follow from them.
    """

    @initialize(
        timeout=st.sampled_from([None, 0.5, 2.0, 300.0]),
        interrupt_grace=st.sampled_from([0.0, 1.0]),
        idle_grace=st.sampled_from([0.0, 1.0]),
    )
    def send(self, timeout: float | None, interrupt_grace: float, idle_grace: float) -> None:
        self.now = 3.0
        self.times = CellTimes(timeout, None, 30, interrupt_grace, idle_grace)
        self.cell = sent(self.times)
        self.started: float | None = None
        self.reply: Any = None
        self.replied = math.inf
        self.idle = self.error_shown = self.interrupted = False
        self.asked: float | None = None
        self.died: int | None = None
        self.settlement: Settlement | None = None
        self.items: list[Any] = []
        self.after = 0  # replies of ours since it was settled, and second ones

    @property
    def settled(self) -> bool:
        return self.settlement is not None

    def start(self) -> None:
        self.started = self.now if self.started is None else self.started

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.0, 5.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def busy(self) -> None:
        assert self.cell.receive_iopub(BUSY, self.now)
        if not self.settled and self.asked is None:
            self.start()

    @rule()
    def becomes_idle(self) -> None:
        assert self.cell.receive_iopub(IDLE, self.now)
        self.idle |= not self.settled

    @rule(
        message=st.sampled_from(
            [VOICE.stream("a"), VOICE.stream("b", "stderr"), VOICE.display("d"), VOICE.clear()]
        )
    )
    def shows(self, message: Any) -> None:
        is_late = self.settlement is not None and message.msg_type == "stream"
        is_taken = not is_late or (self.settlement is not None and self.settlement.fate is Fate.END)
        assert self.cell.receive_iopub(message, self.now) == is_taken
        if is_late and is_taken:
            self.items = self.cell.outputs.items()

    @rule()
    def shows_an_error(self) -> None:
        assert self.cell.receive_iopub(VOICE.error(), self.now)
        self.error_shown |= not self.settled

    @rule(reply=st.sampled_from([OK, FAILED, VOICE.reply(hermes={"exit_code": 3})]))
    def replies(self, reply: Any) -> None:
        assert self.cell.receive_reply(reply, self.now)
        if self.settled or self.reply is not None:
            self.after += 1
        else:
            self.reply, self.replied = reply, self.now

    @rule(message=st.sampled_from(FOREIGN))
    def others_speak(self, message: Any) -> None:
        before = self.cell.deadline
        ends = self.settlement is not None and self.settlement.fate is Fate.END
        is_last_word = ends and message.msg_type == "stream" and message.parent_id is None
        assert self.cell.receive_iopub(message, self.now) == is_last_word
        assert self.cell.deadline == before
        if is_last_word:
            self.items = self.cell.outputs.items()

    @rule()
    def others_are_answered(self) -> None:
        before = self.cell.deadline
        assert not self.cell.receive_reply(VOICE.reply(foreign=True), self.now)
        assert self.cell.deadline == before

    def tick_and_note(self) -> None:
        wanted = self.cell.interrupt_wanted
        unstarted = self.started is None and self.reply is None and self.asked is None
        if unstarted and self.now >= 3.0 + BUSY_GRACE:
            self.start()
        self.cell.tick(self.now)
        if self.cell.interrupt_wanted and not wanted:
            self.asked = self.now

    @rule()
    def tick(self) -> None:
        due = self.now >= self.cell.deadline
        before = (self.cell.deadline, self.cell.settlement)
        self.tick_and_note()
        assert due or (self.cell.deadline, self.cell.settlement) == before

    @precondition(lambda self: math.isfinite(self.cell.deadline))
    @rule()
    def tick_at_the_deadline(self) -> None:
        self.now = max(self.now, self.cell.deadline)
        before = self.cell.deadline
        self.tick_and_note()
        assert self.cell.settlement is not None or self.cell.deadline > before, (
            "a tick that is due does nothing"
        )

    @rule()
    def interrupt(self) -> None:
        wanted = self.cell.interrupt_wanted
        self.cell.interrupt(self.now)
        self.interrupted |= not self.settled
        if self.cell.interrupt_wanted and not wanted:
            self.asked = self.now

    @rule(code=st.sampled_from([0, 3, -9]))
    def kernel_ends(self, code: int) -> None:
        assume(self.died is None)
        self.cell.kernel_ended(code)
        if not self.settled:
            self.died = code

    @invariant()
    def is_settled_once_and_for_all_and_for_a_reason(self) -> None:
        if self.settlement is None and self.cell.settlement is not None:
            self.settlement = self.cell.settlement
            self.items = self.cell.outputs.items()
            self.check_reason(self.settlement)
        assert self.cell.settlement is self.settlement
        if self.settled:
            assert self.cell.deadline == math.inf
            assert self.cell.outputs.items() == self.items
        assert self.cell.anomalies == self.after

    def check_reason(self, settlement: Settlement) -> None:
        status, died = settlement.status, self.died is not None
        complete = self.reply is not None and self.idle
        exits = self.reply is not None and "hermes" in self.reply.metadata
        gave_up_idle = self.reply is not None and self.now >= self.replied + self.times.idle_grace
        assert settlement.phase is Phase.RAN
        assert complete or died or gave_up_idle or status in (CellStatus.TIMED_OUT, CellStatus.INTERRUPTED)
        match status:
            case CellStatus.TIMED_OUT:
                assert self.times.timeout is not None
                assert self.started is not None
                cut_at = self.now if self.asked is None else self.asked
                assert cut_at >= self.started + self.times.timeout
                assert self.replied >= cut_at, "its reply was there before its time was up"
            case CellStatus.INTERRUPTED:
                assert self.interrupted
            case CellStatus.DIED:
                assert died
                assert self.reply is None
                assert settlement.exit_code == self.died
            case CellStatus.EXITED:
                assert exits
                assert settlement.exit_code == 3
            case CellStatus.ERROR:
                assert self.reply is FAILED or self.error_shown
                assert settlement.error is not None
                assert settlement.exit_code == 1
            case CellStatus.OK:
                assert self.reply is OK
                assert not self.error_shown
                assert settlement.exit_code == 0
        if status in (CellStatus.TIMED_OUT, CellStatus.INTERRUPTED):
            assert settlement.exit_code == -1
            saved = self.asked is not None and complete and not died and not exits
            assert (settlement.fate is Fate.KEEP) == saved
            if self.asked is not None and not complete and not died:
                assert self.now >= self.asked + self.times.interrupt_grace, "its grace was not over"
        else:
            assert self.asked is None
            ends = died or status in (CellStatus.EXITED, CellStatus.DIED)
            assert (settlement.fate is Fate.END) == ends
        came_to_its_end = status in (CellStatus.OK, CellStatus.ERROR)
        assert settlement.idle_missing == (came_to_its_end and not self.idle)

    @invariant()
    def a_complete_cell_is_settled(self) -> None:
        if self.reply is not None and self.idle:
            assert self.cell.settlement is not None

    @invariant()
    def a_deadline_is_missing_only_where_there_is_no_limit(self) -> None:
        if self.cell.settlement is None and math.isinf(self.cell.deadline):
            assert self.times.timeout is None
            assert self.reply is None
            assert self.asked is None

    def teardown(self) -> None:
        """Time alone settles every cell that has a limit, in a few steps."""
        if not hasattr(self, "cell"):
            return
        for _ in range(3):
            if math.isfinite(self.cell.deadline):
                self.now = max(self.now, self.cell.deadline)
                self.tick_and_note()
        if self.cell.settlement is None:
            assert self.times.timeout is None
            self.interrupt()
            self.now = max(self.now, min(self.cell.deadline, 1e12))
            self.tick_and_note()
        assert self.cell.settlement is not None
        self.is_settled_once_and_for_all_and_for_a_reason()


TestExecution = Execution.TestCase
TestExecution.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
