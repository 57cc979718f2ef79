import json
import math
from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.cell.execution import Settlement, cut_before_run
from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.outputs import CellError, OutputCollector
from hermes_kernel.cell.request import CellTimes
from hermes_kernel.cell.result import CellResult, KernelReport, LateOutput, ToolCallRecord, cell_result
from hermes_kernel.cell.shown import Budget
from hermes_kernel.cell.status import CellStatus, Fate, Phase
from hermes_kernel.lifecycle.loss import Loss

from .test_message import TRACEBACK, KernelVoice

VOICE = KernelVoice()
TIMES = CellTimes(timeout=2.5, queue_timeout=7, start_timeout=30, interrupt_grace=0, idle_grace=1)
REPORT = KernelReport("k1", reused=True)
BOOM = CellError("ValueError", "boom", "\n".join(TRACEBACK))
CUTS = (CellStatus.TIMED_OUT, CellStatus.INTERRUPTED)

COMMON_KEYS = {
    "status", "output", "exit_code", "tool_calls_made", "duration_seconds", "kernel",
    "stdout_truncated", "stdout_bytes_captured", "stdout_bytes_total", "stdout_bytes_omitted",
}  # fmt: skip
EXTRA_KEYS = {"error", "warning", "hint", "tool_errors", "stdout_spill_path", "late_output", "images"}
KERNEL_KEYS = {"mode", "reused", "execution_count", "state_reset"}
EXTRA_KERNEL_KEYS = {"ended", "state_lost", "lost_reason", "leftovers", "foreign_cells"}


def settled(
    status: CellStatus, fate: Fate = Fate.KEEP, phase: Phase = Phase.RAN, exit_code: int | None = None
) -> Settlement:
    usual = {CellStatus.OK: 0, CellStatus.ERROR: 1, CellStatus.EXITED: 3, CellStatus.DIED: -9}
    code = usual.get(status, -1) if exit_code is None else exit_code
    return Settlement(status, phase, fate, code, BOOM if status is CellStatus.ERROR else None)


OK = settled(CellStatus.OK)


def shown(*messages: Any) -> OutputCollector:
    outputs = OutputCollector()
    for message in messages:
        outputs.add(message)
    return outputs


WIDE = Budget(output=1_000_000, stderr=1_000_000)


def result_of(
    settlement: Settlement = OK, *messages: Any, report: KernelReport = REPORT, **more: Any
) -> CellResult:
    arguments: dict[str, Any] = {"times": TIMES, "duration": 0.25, "execution_count": 4}
    return cell_result(settlement, shown(*messages), report=report, **(arguments | more))


def strict_json(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text.encode("utf-8")
    return json.loads(text, parse_constant=refuse)


# Every way in which a call can come out: before the code was sent only a cut is possible.
COMBINATIONS = [
    (status, phase, fate)
    for status, phase, fate in product(CellStatus, Phase, Fate)
    if phase is Phase.RAN or (status in CUTS and fate is Fate.KEEP)
]


@pytest.mark.parametrize(("status", "phase", "fate"), COMBINATIONS)
def test_every_way_to_end_has_the_common_keys_and_only_listed_extras(
    status: CellStatus, phase: Phase, fate: Fate
) -> None:
    report = replace(REPORT, ended=fate is Fate.END)
    result = result_of(settled(status, fate, phase), VOICE.stream("partial"), report=report)
    payload = strict_json(result.to_json())
    assert payload.keys() >= COMMON_KEYS
    assert payload.keys() - COMMON_KEYS <= EXTRA_KEYS
    assert payload["kernel"].keys() >= KERNEL_KEYS
    assert payload["kernel"].keys() - KERNEL_KEYS <= EXTRA_KERNEL_KEYS
    assert ("ended" in payload["kernel"]) == (fate is Fate.END)
    assert payload["output"].startswith("partial")
    assert payload["exit_code"] == result.exit_code
    assert ("error" in payload) == (status is not CellStatus.OK)
    assert payload.get("error") != ""
    assert payload == result.to_dict()


def test_a_plain_success_has_the_common_keys_alone() -> None:
    assert result_of(OK, VOICE.stream("hi\n"), VOICE.result("42")).to_dict() == {
        "status": "success",
        "output": "hi\n42",
        "exit_code": 0,
        "tool_calls_made": 0,
        "duration_seconds": 0.25,
        "kernel": {"mode": "session", "reused": True, "execution_count": 4, "state_reset": False},
        "stdout_truncated": False,
        "stdout_bytes_captured": 3,
        "stdout_bytes_total": 3,
        "stdout_bytes_omitted": 0,
    }


@pytest.mark.parametrize(
    ("settlement", "word"),
    [
        (OK, "success"),
        (settled(CellStatus.ERROR), "error"),
        (settled(CellStatus.EXITED, exit_code=0), "success"),
        (settled(CellStatus.EXITED, exit_code=3), "error"),
        (settled(CellStatus.EXITED, exit_code=-1), "error"),
        (settled(CellStatus.TIMED_OUT), "timeout"),
        (settled(CellStatus.INTERRUPTED), "interrupted"),
        (settled(CellStatus.DIED, exit_code=0), "error"),
        (settled(CellStatus.DIED), "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.status.value}-{value.exit_code}",
)
def test_the_status_word_is_that_of_the_contract(settlement: Settlement, word: str) -> None:
    payload = result_of(settlement).to_dict()
    assert payload["status"] == word
    assert payload["exit_code"] == settlement.exit_code


# What is shown


def test_the_output_is_stdout_then_the_value_then_stderr_and_the_traceback() -> None:
    result = result_of(
        settled(CellStatus.ERROR),
        VOICE.stream("err", "stderr"),
        VOICE.result("42"),
        VOICE.stream("out"),
        VOICE.error(),
    )
    traceback = "\n".join(TRACEBACK)
    assert result.to_dict()["output"] == f"out\n42\n--- stderr ---\nerr\n{traceback}"
    assert result.text == f"err\n42\nout\n{traceback}\n"


def test_lines_that_end_get_no_second_newline_in_the_output() -> None:
    result = result_of(OK, VOICE.stream("out\n"), VOICE.result("42\n"), VOICE.stream("err\n", "stderr"))
    assert result.to_dict()["output"] == "out\n42\n--- stderr ---\nerr\n"


def test_stderr_alone_is_a_block_of_its_own() -> None:
    assert result_of(OK, VOICE.stream("err", "stderr")).to_dict()["output"] == "--- stderr ---\nerr"


def test_an_empty_value_is_no_stderr() -> None:
    assert result_of(OK, VOICE.stream("out"), VOICE.result("")).to_dict()["output"] == "out\n"


def test_an_error_is_its_whole_traceback() -> None:
    result = result_of(settled(CellStatus.ERROR), VOICE.error())
    assert result.error == BOOM
    assert result.to_dict()["error"] == BOOM.traceback


def test_an_error_without_a_traceback_is_its_class_and_text() -> None:
    settlement = replace(settled(CellStatus.ERROR), error=CellError("KeyError", "'k'", ""))
    assert result_of(settlement).to_dict()["error"] == "KeyError: 'k'"


def test_an_error_that_says_nothing_still_has_a_sentence() -> None:
    assert result_of(replace(settled(CellStatus.ERROR), error=None)).to_dict()["error"]


def test_an_error_of_the_reply_alone_is_in_the_text_too() -> None:
    assert BOOM.traceback in result_of(settled(CellStatus.ERROR), VOICE.stream("out")).text


@pytest.mark.parametrize("status", [s for s in CellStatus if s is not CellStatus.ERROR])
def test_only_an_error_has_an_error(status: CellStatus) -> None:
    result = result_of(replace(settled(status), error=BOOM), VOICE.error())
    assert result.error is None


@pytest.mark.parametrize("status", list(CellStatus))
def test_only_a_death_has_a_signal(status: CellStatus) -> None:
    result = result_of(settled(status), signal="SIGKILL")
    assert result.signal == ("SIGKILL" if status is CellStatus.DIED else None)


def test_the_counts_of_bytes_are_of_utf8() -> None:
    payload = result_of(OK, VOICE.stream("é😀"), VOICE.stream("err", "stderr")).to_dict()
    assert payload["stdout_bytes_captured"] == payload["stdout_bytes_total"] == 6


def test_the_truncation_counts_both_streams_and_what_could_not_be_saved() -> None:
    result = result_of(
        OK,
        VOICE.stream("é", metadata={"hermes": {"skipped": 4}}),
        VOICE.stream("err", "stderr", metadata={"hermes": {"skipped": 6}}),
        lost_bytes={"stdout": 4, "stderr": 6},
    )
    assert (result.truncation.bytes_total, result.truncation.bytes_shown) == (15, 5)
    assert result.truncation.truncated
    assert "10 bytes" in (result.warning or "")


def test_the_duration_has_two_decimals_in_the_json_alone() -> None:
    result = result_of(OK, duration=1.23456)
    assert result.duration == 1.23456
    assert result.to_dict()["duration_seconds"] == 1.23


def test_the_count_is_that_of_the_reply_else_the_last_known_one() -> None:
    assert result_of(replace(OK, execution_count=9)).execution_count == 9
    assert result_of(OK).execution_count == 4


def test_the_outputs_are_those_of_a_notebook_and_cannot_be_changed_through_a_copy() -> None:
    result = result_of(OK, VOICE.stream("a"), VOICE.result("1", count=2))
    expected = [
        {"output_type": "stream", "name": "stdout", "text": "a"},
        {
            "output_type": "execute_result",
            "data": {"text/plain": "1"},
            "metadata": {},
            "execution_count": 2,
        },
    ]
    assert result.to_notebook_outputs() == expected
    result.to_notebook_outputs()[0]["text"] = "b"
    assert list(result.outputs) == expected


def test_a_result_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        result_of().text = "b"  # type: ignore[misc]


# What is said


@pytest.mark.parametrize("status", CUTS)
def test_a_cut_that_cost_the_kernel_says_that_state_was_lost(status: CellStatus) -> None:
    error = result_of(settled(status, Fate.END)).to_dict()["error"]
    assert "state was lost" in error
    assert "fresh" in error
    assert "state kept" not in error


@pytest.mark.parametrize("status", CUTS)
def test_a_cut_that_the_grace_saved_says_that_state_is_kept(status: CellStatus) -> None:
    error = result_of(settled(status, Fate.KEEP)).to_dict()["error"]
    assert "state kept" in error
    assert "not run" not in error
    assert "lost" not in error


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.STARTING])
@pytest.mark.parametrize("status", CUTS)
def test_a_call_that_never_ran_says_so(status: CellStatus, phase: Phase) -> None:
    result = result_of(cut_before_run(status, phase))
    assert not result.ran
    assert result.exit_code == -1
    assert "not run; state kept" in result.to_dict()["error"]
    assert "lost" not in result.to_dict()["error"]


@pytest.mark.parametrize(
    ("phase", "limit"), [(Phase.RAN, "2.5 s"), (Phase.QUEUED, "7 s"), (Phase.STARTING, "30 s")]
)
def test_a_timeout_says_the_limit_that_was_passed(phase: Phase, limit: str) -> None:
    fate = Fate.END if phase is Phase.RAN else Fate.KEEP
    payload = result_of(settled(CellStatus.TIMED_OUT, fate, phase), VOICE.stream("partial")).to_dict()
    assert limit in payload["error"]
    assert payload["output"] == f"partial\n⏰ {payload['error']}"


def test_an_interrupted_cell_says_so_below_its_output() -> None:
    payload = result_of(settled(CellStatus.INTERRUPTED, Fate.END), VOICE.stream("partial\n")).to_dict()
    assert payload["output"] == "partial\n[execution interrupted]"
    assert "interrupted" in payload["error"]


@pytest.mark.parametrize(("signal", "words"), [("SIGKILL", "SIGKILL"), (None, "-9")])
def test_a_death_says_how_and_that_state_was_lost(signal: str | None, words: str) -> None:
    error = result_of(settled(CellStatus.DIED, Fate.END), signal=signal).to_dict()["error"]
    assert "session kernel died" in error
    assert words in error
    assert "state was lost" in error
    assert "memory" not in error


def test_an_exit_with_a_code_says_it_and_that_state_was_lost() -> None:
    payload = result_of(settled(CellStatus.EXITED, Fate.END, exit_code=3)).to_dict()
    assert "exit code 3" in payload["error"]
    assert "state was lost" in payload["error"]


def test_an_exit_without_a_failure_has_no_error_and_a_warning() -> None:
    payload = result_of(settled(CellStatus.EXITED, Fate.END, exit_code=0)).to_dict()
    assert "error" not in payload
    assert "fresh" in payload["warning"]


def test_an_idle_that_is_missing_is_said() -> None:
    assert "may be missing" in (result_of(replace(OK, idle_missing=True)).warning or "")


# The kernel


@pytest.mark.parametrize("loss", list(Loss))
def test_a_loss_is_said_with_its_reason_and_only_reset_and_death_are_resets(loss: Loss) -> None:
    payload = result_of(OK, report=KernelReport("k2", lost=loss)).to_dict()
    assert payload["kernel"] == {
        "mode": "session",
        "reused": False,
        "execution_count": 4,
        "state_reset": loss in (Loss.RESET, Loss.DIED),
        "state_lost": True,
        "lost_reason": loss.value,
    }
    assert "gone" in payload["warning"]


def test_what_a_loss_and_an_exit_say_is_said_together() -> None:
    report = KernelReport("k2", lost=Loss.IDLE, ended=True)
    warning = result_of(settled(CellStatus.EXITED, Fate.END, exit_code=0), report=report).warning or ""
    assert "idle" in warning
    assert "fresh" in warning


def test_leftovers_and_foreign_cells_are_said_if_there_are_any() -> None:
    report = replace(REPORT, leftovers=("sleep (pid 9)",), foreign_cells=2, ended=True)
    kernel = result_of(OK, report=report).to_dict()["kernel"]
    assert kernel["leftovers"] == ["sleep (pid 9)"]
    assert (kernel["foreign_cells"], kernel["ended"]) == (2, True)


def test_tool_calls_are_counted_and_late_output_and_hints_are_said() -> None:
    result = replace(
        result_of(),
        tool_calls=(ToolCallRecord("f", "x=1", 0.1), ToolCallRecord("g", "", 0.1, "boom")),
        tool_errors=({"tool": "g", "error": "boom"},),
        late_output=(LateOutput(3, "late"),),
        hint="try this",
    )
    payload = strict_json(result.to_json())
    assert payload["tool_calls_made"] == 2
    assert payload["tool_errors"] == [{"tool": "g", "error": "boom"}]
    assert payload["late_output"] == [{"execution_count": 3, "text": "late"}]
    assert payload["hint"] == "try this"


# The limit


def test_an_output_above_the_limit_is_cut_and_said_in_every_place() -> None:
    payload = strict_json(result_of(OK, VOICE.stream("HEAD" + "x" * 200_000 + "TAIL")).to_json())
    assert payload["output"].startswith("HEAD")
    assert payload["output"].endswith("TAIL")
    assert "TRUNCATED" in payload["output"]
    assert "execute_code stdout was truncated" in payload["warning"]
    assert payload["stdout_truncated"] is True
    assert payload["stdout_bytes_total"] == 200_008
    assert payload["stdout_bytes_captured"] + payload["stdout_bytes_omitted"] == 200_008
    assert 0 < payload["stdout_bytes_captured"] < 100_000


def test_the_warning_that_was_there_stays_when_output_is_cut() -> None:
    report = KernelReport("k2", lost=Loss.IDLE)
    payload = strict_json(result_of(OK, VOICE.stream("x" * 200_000), report=report).to_json())
    assert "idle" in payload["warning"]
    assert "truncated" in payload["warning"]


def test_an_output_just_below_the_limit_is_whole() -> None:
    payload = strict_json(result_of(OK, VOICE.stream("x" * 99_000), budget=WIDE).to_json())
    assert payload["output"] == "x" * 99_000
    assert payload["stdout_truncated"] is False
    assert "warning" not in payload


def test_a_long_traceback_leaves_room_for_itself_at_the_cost_of_the_output() -> None:
    settlement = replace(settled(CellStatus.ERROR), error=CellError("E", "v", "t" * 60_000))
    payload = strict_json(result_of(settlement, VOICE.stream("x" * 60_000), budget=WIDE).to_json())
    assert payload["error"] == "t" * 60_000
    assert "TRUNCATED" in payload["output"]


def test_the_dict_is_whole_where_the_json_is_cut() -> None:
    result = result_of(OK, VOICE.stream("x" * 200_000), budget=WIDE)
    assert result.to_dict()["output"] == "x" * 200_000


def with_nested(text: str) -> dict[str, CellResult]:
    return {
        "leftovers": result_of(OK, report=replace(REPORT, leftovers=(text,))),
        "tool_errors": replace(result_of(), tool_errors=({"tool": "g", "error": text},)),
        "late_output": replace(result_of(), late_output=(LateOutput(3, text),)),
    }


NESTED = sorted(with_nested(""))


@pytest.mark.parametrize("where", NESTED)
def test_a_lone_surrogate_that_is_nested_does_not_come_out_either(where: str) -> None:
    strict_json(with_nested("\udcff")[where].to_json())


@pytest.mark.parametrize("where", NESTED)
def test_a_long_text_that_is_nested_does_not_break_the_limit(where: str) -> None:
    assert len(with_nested("x" * 200_000)[where].to_json()) <= 100_000


awkward = st.one_of(
    st.text(max_size=10),
    st.text(st.characters(categories=["Cs"]), max_size=3),
    st.sampled_from(['"', "\\", "\0", "\n", "é", "😀", "\u2028", "\x1b[31m"]),
)
long_text = st.builds(
    lambda piece, times: piece * (times // (len(piece) or 1)), awkward, st.integers(0, 150_000)
)
reports = st.builds(
    KernelReport,
    st.just("k"),
    reused=st.booleans(),
    lost=st.none() | st.sampled_from(Loss),
    ended=st.booleans(),
)


@given(st.sampled_from(COMBINATIONS), long_text, long_text, long_text, awkward, reports)
def test_any_result_is_strict_json_below_the_limit(
    how: tuple[CellStatus, Phase, Fate], out: str, err: str, traceback: str, value: str, report: KernelReport
) -> None:
    settlement = settled(how[0], how[2], how[1])
    messages = [VOICE.stream(out), VOICE.stream(err, "stderr"), VOICE.result(value)]
    if settlement.error is not None:
        messages.append(VOICE.error(traceback=[traceback]))
    outputs = shown(*messages)
    settlement = replace(settlement, error=outputs.error)
    result = cell_result(
        settlement, outputs, times=TIMES, report=report, duration=math.pi, execution_count=1, budget=WIDE
    )
    text = result.to_json()
    assert len(text) <= 100_000
    payload = strict_json(text)
    assert payload.keys() >= COMMON_KEYS
    assert payload["stdout_bytes_captured"] + payload["stdout_bytes_omitted"] == payload["stdout_bytes_total"]
    assert payload["stdout_bytes_total"] == len(outputs.stdout.encode())
    for part in (result.text, result.stdout, result.stderr, result.value or ""):
        part.encode("utf-8")


def test_a_secret_is_in_no_part_of_a_result() -> None:
    secret = "hunter2_is_mine"
    error = CellError("ModuleNotFoundError", f"No module named '{secret}'", "Traceback")
    result = result_of(
        replace(settled(CellStatus.ERROR), error=error),
        tool_calls=(ToolCallRecord("f", f"x={secret!r}", 0.1, f"bad {secret}"),),
        report=replace(REPORT, leftovers=(f"thread {secret}",)),
        cleaner=Masks([secret]),
    )
    assert result.hint is not None
    assert secret not in repr(result)
    assert secret not in result.to_json()
