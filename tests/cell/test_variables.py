"""The host's look at what a kernel tells of its variables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.message import MalformedMessage
from hermes_kernel.cell.variables import LONGEST, MOST, SHOWN, Variable, variables_of

SECRET = "correct-horse-battery-staple-" * 4
MASKS = Masks([SECRET])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=6), items, max_size=3),
    max_leaves=8,
)


def entry(**parts: Any) -> dict[str, Any]:
    return {"name": "x", "type": "int", "size": 28, "text": "1"} | parts


def read(*entries: Any) -> tuple[Variable, ...]:
    return variables_of({"status": "ok", "variables": list(entries)}, MASKS)


def test_what_a_kernel_tells_is_what_the_host_gets() -> None:
    assert read(entry(), entry(name="y", size=None, text="")) == (
        Variable("x", "int", 28, "1"),
        Variable("y", "int", None, ""),
    )
    assert read() == ()


def test_what_else_a_kernel_tells_is_passed_over() -> None:
    assert variables_of({"variables": [entry(more=[1])], "total": "many"}, MASKS) == read(entry())


@pytest.mark.parametrize("told", [None, {}, "x", 3, {"x": entry()}])
def test_what_is_no_list_is_refused(told: Any) -> None:
    with pytest.raises(MalformedMessage, match=f"variables is a {type(told).__name__}, not a list"):
        variables_of({"variables": told}, MASKS)
    with pytest.raises(MalformedMessage):
        variables_of({"status": "error"}, MASKS)


@pytest.mark.parametrize("told", [None, [], "x", 3, [entry()]])
def test_an_entry_that_is_no_object_is_refused(told: Any) -> None:
    with pytest.raises(MalformedMessage, match=f"a variable is a {type(told).__name__}"):
        read(entry(), told)


@pytest.mark.parametrize("key", ["name", "type", "text"])
@pytest.mark.parametrize("told", [None, 3, [], {}, True])
def test_a_text_that_is_none_is_refused(key: str, told: Any) -> None:
    with pytest.raises(MalformedMessage, match="a text is a"):
        read(entry(**{key: told}))


@pytest.mark.parametrize("key", ["name", "type", "text"])
def test_a_text_that_is_missing_is_refused(key: str) -> None:
    told = entry()
    del told[key]
    with pytest.raises(MalformedMessage):
        read(told)


@pytest.mark.parametrize("size", [None, -1, 2**63, 10**100, 1.5, "28", True, [], {}])
def test_a_size_that_cannot_be_one_is_not_known(size: Any) -> None:
    assert read(entry(size=size)) == (Variable("x", "int", None, "1"),)


@pytest.mark.parametrize("size", [0, 2**63 - 1])
def test_any_other_size_is_believed(size: int) -> None:
    assert read(entry(size=size))[0].size == size


def test_more_than_there_may_be_are_left_out() -> None:
    assert len(read(*[entry()] * (MOST + 1))) == MOST


@pytest.mark.parametrize("key", ["name", "type", "text"])
def test_a_long_text_is_cut(key: str) -> None:
    (variable,) = read(entry(**{key: "é" * 10**6}))
    assert getattr(variable, key) == "é" * (SHOWN - 1) + "…"
    (variable,) = read(entry(**{key: "é" * SHOWN}))
    assert getattr(variable, key) == "é" * SHOWN


@pytest.mark.parametrize("key", ["name", "type", "text"])
def test_a_secret_is_masked_before_the_cut(key: str) -> None:
    for before in (0, 1, SHOWN - 30, SHOWN - 1, LONGEST - 20):
        (variable,) = read(entry(**{key: "-" * before + SECRET + "-" * 2000}))
        assert SECRET[:12] not in getattr(variable, key)
    (variable,) = read(entry(**{key: f"a {SECRET} b"}))
    assert getattr(variable, key) == "a *** b"


@pytest.mark.parametrize("key", ["name", "type", "text"])
def test_what_may_be_the_beginning_of_a_secret_where_the_kernel_has_cut_is_not_shown(key: str) -> None:
    for separator in (" ", "x" * 50, "x" * 120):
        (variable,) = read(entry(**{key: ((SECRET + separator) * 100)[: LONGEST - 1] + "…"}))
        assert SECRET[:4] not in getattr(variable, key)
        assert getattr(variable, key).endswith("…")


@pytest.mark.parametrize("key", ["name", "type", "text"])
def test_a_secret_with_control_characters_in_it_is_masked(key: str) -> None:
    (variable,) = read(entry(**{key: "\x1b[31m".join((SECRET[:10], SECRET[10:]))}))
    assert getattr(variable, key) == "***"


@pytest.mark.parametrize("key", ["name", "type", "text"])
@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("a\x1b[31mred\x1b[0mb", "aredb"),
        ("\x1b]0;title\x07x", "x"),
        ("a\nb\r\nc", "a b c"),
        ("\x00a\x07\x7f\x9b", "a"),
        ("\u202eabc", "abc"),
        ("\ud800", "\\ud800"),
    ],
)
def test_a_text_is_one_line_that_a_terminal_can_show(key: str, told: str, shown: str) -> None:
    (variable,) = read(entry(**{key: told}))
    assert getattr(variable, key) == shown


@given(JSON)
def test_whatever_a_kernel_tells_is_refused_or_fits_on_a_screen(told: Any) -> None:
    for content in (told, {"variables": told}, {"variables": [entry(name=told)]}):
        if not isinstance(content, dict):
            continue
        try:
            found = variables_of(content, MASKS)
        except MalformedMessage:
            continue
        for variable in found:
            for text in (variable.name, variable.type, variable.text):
                assert len(text) <= SHOWN
                assert text.isprintable() or not any(c in text for c in "\n\r\x1b\x00\x08")
                text.encode()
