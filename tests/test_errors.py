import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.errors import (
    JSON_LIMIT,
    ConfigError,
    HermesKernelError,
    KernelStartError,
    ToolBudgetExceeded,
    ToolError,
    bounded_json,
    common_keys,
    cut_to_limit,
    json_text,
    plain_text,
)

COMMON_KEYS = {
    "status",
    "output",
    "exit_code",
    "tool_calls_made",
    "duration_seconds",
    "kernel",
    "stdout_truncated",
    "stdout_bytes_captured",
    "stdout_bytes_total",
    "stdout_bytes_omitted",
}
AWKWARD = ["a", " ", "\n", '"', "\\", "\0", "\x1b", "é", "\u2028", "😀", "\ud800", "\udfff"]
ERRORS = [
    HermesKernelError("boom"),
    ConfigError("boom"),
    KernelStartError("boom", argv=("python", "-m", "x"), exit_code=3, log_tail="no module x"),
    ToolError("boom"),
    ToolBudgetExceeded("boom"),
]

# Long texts without long examples: a few pieces, each repeated.
long_text = st.lists(
    st.tuples(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=5)), st.integers(0, 60_000)), max_size=3
).map(lambda pieces: "".join(piece * (times if len(piece) == 1 else times // 10) for piece, times in pieces))


def strict_json(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text.encode("utf-8")  # a lone surrogate cannot be sent
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_gives_the_common_keys_of_a_call_that_ran_nothing(error: HermesKernelError) -> None:
    payload = strict_json(error.to_json())
    assert payload.keys() == COMMON_KEYS | {"error"}
    assert payload["error"] == str(error)
    assert {key: payload[key] for key in COMMON_KEYS} == {
        "status": "error",
        "output": "",
        "exit_code": -1,
        "tool_calls_made": 0,
        "duration_seconds": 0,
        "kernel": {"mode": "session", "reused": False, "execution_count": 0, "state_reset": False},
        "stdout_truncated": False,
        "stdout_bytes_captured": 0,
        "stdout_bytes_total": 0,
        "stdout_bytes_omitted": 0,
    }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_of_ours_can_be_caught_as_one(error: HermesKernelError) -> None:
    assert isinstance(error, HermesKernelError)


def test_an_exhausted_budget_is_a_tool_error_and_bad_configuration_is_a_value_error() -> None:
    assert issubclass(ToolBudgetExceeded, ToolError)
    assert issubclass(ConfigError, ValueError)


def test_a_start_error_says_the_command_the_exit_code_and_the_end_of_the_log() -> None:
    error = KernelStartError(
        "the kernel ended", argv=("python", "-m", "x"), exit_code=-9, log_tail="no module x"
    )
    assert (error.argv, error.exit_code, error.log_tail) == (("python", "-m", "x"), -9, "no module x")
    for fact in ("the kernel ended", "python -m x", "-9", "no module x"):
        assert fact in str(error)


def test_a_start_error_says_an_exit_code_of_zero_too() -> None:
    assert "exit code: 0" in str(KernelStartError("the kernel ended", exit_code=0))


def test_a_start_error_without_facts_is_its_message_alone() -> None:
    assert str(KernelStartError("the kernel did not answer")) == "the kernel did not answer"


def test_the_common_keys_are_new_for_each_result() -> None:
    common_keys()["kernel"]["reused"] = True
    assert common_keys()["kernel"]["reused"] is False


def test_a_lone_surrogate_becomes_its_escape_and_other_text_stays() -> None:
    assert plain_text("a\ud800b é 😀 \0") == "a\\ud800b é 😀 \0"


def test_non_ascii_text_is_kept_as_it_is() -> None:
    assert "日本 😀" in bounded_json({**common_keys(), "output": "日本 😀"})


def test_a_short_payload_is_not_changed() -> None:
    payload = {**common_keys(), "output": "short", "error": "too"}
    assert cut_to_limit(payload) == payload


def test_the_longest_payload_that_fits_is_not_cut() -> None:
    room = JSON_LIMIT - len(bounded_json(common_keys()))
    fits = {**common_keys(), "output": "x" * room}
    assert len(bounded_json(fits)) == JSON_LIMIT
    assert json.loads(bounded_json(fits)) == fits
    too_long = {**common_keys(), "output": "x" * (room + 1)}
    assert "TRUNCATED" in json.loads(bounded_json(too_long))["output"]


def test_a_cut_keeps_head_and_tail_and_says_how_much_is_missing() -> None:
    text = "HEAD" + "x" * 200_000 + "TAIL"
    cut = cut_to_limit({**common_keys(), "output": text})["output"]
    assert cut.startswith("HEADx")
    assert cut.endswith("xTAIL")
    notice = cut.strip("HEADTIL").strip("x")
    missing = len(text) - (len(cut) - len(notice))
    assert f"{missing} of {len(text)} characters TRUNCATED" in notice


def test_a_cut_uses_the_room_that_there_is() -> None:
    cut = bounded_json({**common_keys(), "output": "x" * 200_000})
    assert JSON_LIMIT - 50 <= len(cut) <= JSON_LIMIT


def test_the_tail_of_a_cut_is_the_larger_part() -> None:
    cut = cut_to_limit({**common_keys(), "output": "h" * 100_000 + "t" * 100_000})["output"]
    shown = cut.split("\n[...")[0], cut.rsplit("...]\n")[1]
    assert len(shown[0]) / (len(shown[0]) + len(shown[1])) == pytest.approx(0.4, abs=0.001)


def test_the_output_is_cut_before_the_error() -> None:
    payload = cut_to_limit({**common_keys(), "output": "o" * 90_000, "error": "e" * 50_000})
    assert payload["error"] == "e" * 50_000
    assert "TRUNCATED" in payload["output"]


def test_the_error_is_cut_once_there_is_no_output_left_to_cut() -> None:
    payload = cut_to_limit({**common_keys(), "output": "o" * 200_000, "error": "E" + "e" * 200_000 + "."})
    assert payload["error"].startswith("Ee")
    assert payload["error"].endswith("e.")
    assert len(bounded_json(payload)) <= JSON_LIMIT


def test_the_error_of_a_kernel_with_a_long_log_is_cut_and_its_output_stays_empty() -> None:
    payload = json.loads(KernelStartError("no kernel", log_tail="y" * 200_000).to_json())
    assert payload["error"].startswith("no kernel")
    assert payload["output"] == ""


def test_a_text_is_never_replaced_by_a_notice_that_is_longer() -> None:
    payload = cut_to_limit({**common_keys(), "output": "3 rows", "error": "e" * 200_000})
    assert payload["output"] == "3 rows"


def test_a_lower_limit_can_be_asked_for() -> None:
    assert len(bounded_json({"output": "x" * 5_000}, limit=1_000)) <= 1_000


def test_the_caller_keeps_the_whole_text() -> None:
    payload = {**common_keys(), "output": "x" * 200_000}
    cut_to_limit(payload)
    assert payload["output"] == "x" * 200_000


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_null_in_a_result_and_refused_elsewhere(number: float) -> None:
    assert strict_json(bounded_json({"late_output": [{"n": number}]})) == {"late_output": [{"n": None}]}
    with pytest.raises(ValueError, match="JSON"):
        json_text(number)


@given(long_text, long_text, long_text, long_text)
def test_any_texts_make_strict_json_below_the_limit(output: str, error: str, warning: str, hint: str) -> None:
    texts = {"output": output, "error": error, "warning": warning, "hint": hint}
    text = bounded_json({**common_keys(), **texts})
    assert len(text) <= JSON_LIMIT
    payload = strict_json(text)
    for key, value in texts.items():
        whole = plain_text(value)
        assert payload[key] == whole or "TRUNCATED" in payload[key]


@given(long_text)
def test_any_text_that_is_cut_keeps_its_head_and_its_tail(text: str) -> None:
    whole = plain_text(text)
    cut = strict_json(bounded_json({**common_keys(), "output": text}))["output"]
    if cut == whole:
        return
    head, found, rest = cut.rpartition("\n[... ")
    assert found
    tail = rest.split("...]\n", 1)[1]
    assert len(head) > 1_000
    assert len(tail) > 1_000
    assert whole.startswith(head)
    assert whole.endswith(tail)


@given(st.text(max_size=50), st.text(max_size=50))
def test_any_error_text_makes_strict_json(message: str, log_tail: str) -> None:
    error = KernelStartError("\ud800" + message, log_tail=log_tail)
    assert strict_json(error.to_json())["error"] == plain_text(str(error))
