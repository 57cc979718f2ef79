from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hermes_kernel.cell.request import CellRequest, CellTimes
from hermes_kernel.cell.status import CellStatus, Fate, Phase
from hermes_kernel.errors import ConfigError

TIMES = CellTimes(timeout=5, queue_timeout=5, start_timeout=30, interrupt_grace=0, idle_grace=1)


@pytest.mark.parametrize("code", ["1", " x = 1", "\n# only a comment", "print('\ud800')", "\0"], ids=repr)
def test_code_is_taken_as_it_is(code: str) -> None:
    assert CellRequest(code, TIMES).code == code


@pytest.mark.parametrize("code", ["", " ", "\n\t \r\n", "\u2003"], ids=repr)
def test_blank_code_is_refused(code: str) -> None:
    with pytest.raises(ConfigError, match="blank"):
        CellRequest(code, TIMES)


@pytest.mark.parametrize("code", [None, 5, b"1", ["1"], True], ids=repr)
def test_code_that_is_no_string_is_refused_with_its_type(code: Any) -> None:
    with pytest.raises(ConfigError, match=type(code).__name__):
        CellRequest(code, TIMES)


def test_a_request_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        CellRequest("1", TIMES).code = "2"  # type: ignore[misc]


def test_the_ways_to_end_are_the_documented_ones() -> None:
    assert {s.name for s in CellStatus} == {"OK", "ERROR", "EXITED", "TIMED_OUT", "INTERRUPTED", "DIED"}
    assert {p.name for p in Phase} == {"QUEUED", "STARTING", "RAN"}
    assert {f.name for f in Fate} == {"KEEP", "END"}
