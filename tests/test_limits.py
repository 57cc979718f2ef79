import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel.errors import ConfigError
from hermes_kernel.limits import UNSET, Limits, checked_time_limit

PUBLIC = {
    "max_kernels": 4,
    "idle_timeout": 1800,
    "start_timeout": 30,
    "timeout": 300,
    "queue_timeout": None,
    "max_tool_calls": 50,
    "interrupt_grace": 0,
    "idle_grace": 1,
    "output_bytes": 50_000,
    "stderr_bytes": 10_000,
    "spill_bytes": 5_000_000,
    "spill_dir": None,
    "memory_limit": None,
    "isolation": "none",
    "require_isolation": False,
    "start_method": "auto",
    "spare_kernels": 1,
}
LATER = {"isolation": "basic"}
OUTPUT = {"output_bytes": 1_000, "stderr_bytes": 0, "spill_bytes": 0}
PROCESS = {"memory_limit": 2**30, "require_isolation": True, "spare_kernels": 0, "start_method": "fork"}
TIMES = ("start_timeout", "timeout", "interrupt_grace", "idle_grace")
NOT_A_TIME: list[Any] = [-1, -0.001, -math.inf, math.nan, "5", "", b"5", True, False, [], {}, 1j, UNSET]
HUGE = 10**400
UNWRITABLE = -(10**5000)  # has more digits than Python writes


def test_the_defaults_are_the_documented_ones() -> None:
    assert {field.name: getattr(Limits(), field.name) for field in fields(Limits)} == PUBLIC


def test_limits_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Limits().timeout = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", NOT_A_TIME, ids=repr)
def test_what_is_no_time_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})


@pytest.mark.parametrize("name", TIMES)
def test_a_whole_number_beyond_all_floats_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: HUGE})


@pytest.mark.parametrize("name", PUBLIC)
def test_a_number_with_more_digits_than_python_writes_is_refused_like_others(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: UNWRITABLE})
    with pytest.raises(ConfigError, match="unknown limit"):
        Limits.from_mapping({UNWRITABLE: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["start_timeout", "interrupt_grace", "idle_grace"])
@pytest.mark.parametrize("value", [math.inf, None])
def test_only_the_timeout_of_a_cell_may_be_without_end(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})


@pytest.mark.parametrize("value", [None, 0, 0.0, -0.0, math.inf])
def test_none_zero_and_infinity_are_no_time_limit(value: float | None) -> None:
    assert checked_time_limit("timeout", value) is None
    assert Limits(timeout=value).timeout is None


def test_a_time_limit_is_a_number_of_seconds() -> None:
    assert checked_time_limit("timeout", 3) == 3.0
    assert Limits(timeout=0.25).timeout == 0.25


def test_a_graces_may_be_zero_but_a_start_takes_time() -> None:
    limits = Limits(interrupt_grace=0, idle_grace=0)
    assert (limits.interrupt_grace, limits.idle_grace) == (0, 0)
    with pytest.raises(ConfigError, match="start_timeout"):
        Limits(start_timeout=0)


@pytest.mark.parametrize("name", LATER)
def test_what_this_version_lacks_is_refused_and_said(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*not available in this version"):
        Limits(**{name: LATER[name]})


@pytest.mark.parametrize("name", PUBLIC)
def test_a_default_may_be_written_out(name: str) -> None:
    assert Limits(**{name: PUBLIC[name]}) == Limits()


@pytest.mark.parametrize("name", ["isolation", "start_method"])
@pytest.mark.parametrize("value", ["", "Auto", "container", None, 1, [], math.nan], ids=repr)
def test_an_unknown_choice_is_refused_with_the_known_ones(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*is not one of '") as refused:
        Limits(**{name: value})
    assert ("'namespace'" if name == "isolation" else "'spawn'") in str(refused.value)


@pytest.mark.parametrize("value", ["auto", "fork", "spawn"])
def test_the_start_methods_of_this_version_are_taken(value: str) -> None:
    assert Limits(start_method=value).start_method == value


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in LATER for value in (-1, math.nan, True, [], object(), "many")]
    + [(name, value) for name in OUTPUT for value in (-1, math.nan, True, 1.5, [], object(), "many")]
    + [(name, value) for name in PROCESS for value in (-1, math.nan, 1.5, [], object(), "many")]
    + [("spare_kernels", True), ("memory_limit", True), ("memory_limit", 2**25), ("memory_limit", 0)]
    + [("max_tool_calls", value) for value in (-1, math.nan, True, 3.0, [], object(), "many")]
    + [("require_isolation", 0), ("max_kernels", 4.0), ("spill_dir", 3), ("spill_dir", b"/tmp")]
    + [
        ("spill_dir", "/tmp/\ud800"),
        ("spill_dir", "~nobody-of-that-name/x"),
        ("spill_dir", ""),
        ("spill_dir", "a\0b"),
        ("spill_dir", object()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_type_or_number_is_refused_for_every_limit(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})


@pytest.mark.parametrize("name", ["max_kernels", "idle_timeout"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, None, True, "3"], ids=repr)
def test_a_cap_and_an_idleness_that_leave_no_kernel_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        Limits(**{name: value})


def test_a_count_may_be_as_large_as_one_likes() -> None:
    assert Limits(max_tool_calls=10**9, max_kernels=10**9).max_tool_calls == 10**9
    with pytest.raises(ConfigError, match="max_tool_calls="):
        Limits(max_tool_calls=1e9)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PROCESS)
def test_how_processes_are_made_and_held_can_be_said(name: str) -> None:
    assert getattr(Limits(**{name: PROCESS[name]}), name) == PROCESS[name]
    assert Limits(isolation="namespace", require_isolation=True).isolation == "namespace"


def test_how_much_is_shown_and_kept_can_be_said(tmp_path: Path) -> None:
    for name, value in OUTPUT.items():
        assert getattr(Limits(**{name: value}), name) == value
    assert Limits(spill_dir=tmp_path).spill_dir == str(tmp_path)  # type: ignore[arg-type]
    assert Path(Limits(spill_dir="here").spill_dir or "").is_absolute()


def test_a_mapping_gives_the_same_limits_as_arguments() -> None:
    assert Limits.from_mapping({}) == Limits()
    assert Limits.from_mapping({"timeout": 5, "idle_grace": 2}) == Limits(timeout=5, idle_grace=2)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("time_out", "timeout"),
        ("idle_time", "idle_timeout"),
        ("max_kernel", "max_kernels"),
        ("Timeout", "timeout"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"{key!r}.*did you mean {near!r}"):
        Limits.from_mapping({key: 5})


@pytest.mark.parametrize("key", ["xyzzy", "", 3, None, ("timeout",)], ids=repr)
def test_a_key_like_no_other_is_refused_with_all_known_names(key: Any) -> None:
    with pytest.raises(ConfigError, match="unknown limit") as refused:
        Limits.from_mapping({key: 5})
    assert "timeout" in str(refused.value)


@pytest.mark.parametrize("values", [None, ["timeout"], "timeout", 3, Limits()], ids=repr)
def test_limits_are_built_from_a_mapping_and_nothing_else(values: Any) -> None:
    with pytest.raises(ConfigError, match=f"a {type(values).__name__}; give a mapping"):
        Limits.from_mapping(values)


def test_the_values_of_a_mapping_are_checked() -> None:
    with pytest.raises(ConfigError, match="timeout=-1"):
        Limits.from_mapping({"timeout": -1})


def test_what_was_not_given_has_a_readable_name() -> None:
    assert repr(UNSET) == "UNSET"
