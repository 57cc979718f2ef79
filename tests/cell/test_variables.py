"""The host's look at what a kernel tells of its variables."""

import random
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.cell.masks import MARGIN, Masks
from hermes_kernel.cell.message import MalformedMessage
from hermes_kernel.cell.variables import LONG_IN_ALL, LONGEST, MOST, SHORT, SHOWN, Variable, variables_of

SECRET = "correct-horse-battery-staple-" * 4
MASKS = Masks([SECRET])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=6), items, max_size=3),
    max_leaves=8,
)


def entry(**parts: Any) -> dict[str, Any]:
    return {"name": "x", "type": "int", "size": 28, "text": "1"} | parts


def shared(secret: str, text: str) -> bool:
    """Whether a part of a secret that nobody would guess is in a text."""
    return any(secret[at : at + 4] in text for at in range(len(secret) - 3))


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
@pytest.mark.parametrize("size", [881, 1500, MARGIN, MARGIN + 1, 2 * MARGIN])
@pytest.mark.parametrize("before", [0, 1, SHOWN - 20])
def test_of_a_secret_that_is_longer_than_what_is_shown_nothing_is(key: str, size: int, before: int) -> None:
    secret = "".join(random.Random(size).choices(string.ascii_letters, k=size))
    told = ("-" * before + secret + "-" * 2 * MARGIN)[: LONGEST - 1] + "…"
    (variable,) = variables_of({"variables": [entry(**{key: told})]}, Masks([secret]))
    assert not shared(secret, getattr(variable, key))
    assert getattr(variable, key).endswith("…")


def test_of_a_long_web_token_nothing_but_its_ends_is_shown() -> None:
    token = f"eyJ{'aB3' * 20}.eyJ{'cD4' * 3000}.{'eF5' * 30}"
    (variable,) = read(entry(text=repr(token)))
    assert variable.text == f"'{token[:6]}***{token[-4:]}'"


def test_only_so_much_is_looked_at_and_of_the_rest_nothing_is_shown() -> None:
    told = [entry(name=f"x{n}", text="é" * (LONGEST - 1) + "…") for n in range(MOST)]
    found = read(*told, entry(text="short"))
    texts = [variable.text for variable in found]
    whole = LONG_IN_ALL // LONGEST
    assert whole > 10
    assert texts[:whole] == ["é" * (SHOWN - 1) + "…"] * whole
    assert set(texts[whole + 1 :]) == {"…"}
    assert read(*told[: MOST - 1], entry(text="é" * SHORT))[-1].text == "é" * (SHOWN - 1) + "…"


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
