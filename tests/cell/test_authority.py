from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.cell.authority import RETIRED, UNKNOWN, CellAuthority, Refusal


def test_each_admitted_call_is_charged_and_a_refused_one_is_free() -> None:
    authority = CellAuthority(frozenset({"echo"}), limit=2)
    said = [authority.admit(tool) for tool in ("echo", "other", "echo", "echo", "other")]
    assert said == [None, Refusal.NOT_ALLOWED, None, Refusal.SPENT, Refusal.NOT_ALLOWED]
    assert authority.spent == 2


def test_no_limit_and_a_limit_of_nothing() -> None:
    free, none = CellAuthority(frozenset({"f"}), limit=None), CellAuthority(frozenset({"f"}), limit=0)
    assert all(free.admit("f") is None for _ in range(1000))
    assert none.admit("f") is Refusal.SPENT


def test_once_retired_everything_is_refused_as_such() -> None:
    authority = CellAuthority(frozenset({"f"}), limit=0)
    authority.retire()
    assert [authority.admit(tool) for tool in ("f", "g")] == [Refusal.RETIRED] * 2
    assert authority.spent == 0


@given(st.lists(st.sampled_from(["a", "b", "c", "retire"])), st.none() | st.integers(0, 5))
def test_never_more_calls_than_granted_and_none_after_the_end(steps: list[str], limit: int | None) -> None:
    authority = CellAuthority(frozenset({"a", "b"}), limit)
    admitted = 0
    for step in steps:
        if step == "retire":
            authority.retire()
            continue
        refusal = authority.admit(step)
        admitted += refusal is None
        assert not (refusal is None and (authority.is_retired or step == "c"))
    assert admitted == authority.spent
    assert limit is None or admitted <= limit


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refusal.UNKNOWN, "Unauthorized"),
        (Refusal.RETIRED, "No active execute_code cell"),
        (Refusal.NOT_ALLOWED, "'g' is no tool of this cell; it has e, f"),
        (Refusal.SPENT, "limit reached: this cell may make 3"),
    ],
)
def test_every_refusal_says_which_one_it_is(refusal: Refusal, words: str) -> None:
    assert words in CellAuthority(frozenset({"f", "e"}), limit=3).sentence(refusal, "g")


def test_a_sentence_never_repeats_a_whole_long_name() -> None:
    sentence = CellAuthority(frozenset(), None).sentence(Refusal.NOT_ALLOWED, "x" * 10_000)
    assert len(sentence) < 300
    assert "it has none" in sentence
    assert UNKNOWN != RETIRED


def test_a_refusal_is_not_mistaken_for_leave() -> None:
    refusals: list[Any] = list(Refusal)
    assert all(refusals)
