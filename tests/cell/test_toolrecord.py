import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel import Tool
from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.shown import Unmasked
from hermes_kernel.cell.toolrecord import (
    FullCall,
    RecordedCall,
    RecordedCatalogue,
    arguments_of,
    digest_of,
)
from hermes_kernel.cell.tools import ToolSet

SECRET = "a-secret-of-the-host's"
PIN = "98765432"
MASKS = Masks([SECRET, PIN])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
TEXT_WITH_HALVES = st.text(st.characters(codec=None))


def full(arguments: Any, result: Any = None, **more: Any) -> FullCall:
    texts = [json.dumps(arguments, ensure_ascii=False), json.dumps(result, ensure_ascii=False)]
    return FullCall("f", 0, texts[0], len(texts[0]), texts[1], len(texts[1]), **more)


def shuffled(value: Any) -> Any:
    """The same value with the keys of its objects the other way round."""
    match value:
        case dict():
            return {key: shuffled(item) for key, item in reversed(list(value.items()))}
        case list():
            return [shuffled(item) for item in value]
    return value


@given(JSON)
def test_a_digest_does_not_depend_on_the_order_of_the_names(value: Any) -> None:
    assert digest_of(shuffled(value)) == digest_of(value)


@given(JSON, JSON)
def test_different_arguments_have_different_digests(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (digest_of(one) == digest_of(other)) == same


@pytest.mark.parametrize(
    ("one", "other"), [(1, "1"), (1, True), (0, False), (None, "null"), ([], {}), ([1, 2], [2, 1]), (1, 1.0)]
)
def test_values_that_python_or_a_reader_could_take_for_equal_are_told_apart(one: Any, other: Any) -> None:
    assert digest_of({"x": one}) != digest_of({"x": other})


def test_arguments_by_place_are_none_by_name() -> None:
    assert arguments_of({"x": 1}) == {"by_name": {"x": 1}}
    assert arguments_of({"x": 1}, [2]) == {"by_name": {"x": 1}, "by_place": [2]}
    assert digest_of(arguments_of({}, [1])) != digest_of(arguments_of({"x": 1}))


@given(JSON | TEXT_WITH_HALVES, JSON | TEXT_WITH_HALVES)
def test_without_secrets_a_call_comes_back_as_it_was_and_is_valid_text(arguments: Any, result: Any) -> None:
    call = RecordedCall.of(full(arguments, result), Unmasked())
    assert (call.cut, call.masked, call.answered) == ((), (), True)
    assert call.arguments is not None
    assert call.result is not None
    json.dumps(call.to_dict(), ensure_ascii=False).encode()
    # Two halves of a character beside each other are that character: JSON cannot tell.
    joined = json.loads(json.dumps([arguments, result]))
    assert [json.loads(call.arguments), json.loads(call.result)] == joined
    assert call.digest == digest_of(arguments)


def test_the_numbers_of_an_argument_keep_their_kind() -> None:
    call = RecordedCall.of(full({"a": 1, "b": 1.0, "c": True, "d": -0.0}), MASKS)
    assert call.arguments == '{"a": 1, "b": 1.0, "c": true, "d": -0.0}'


@pytest.mark.parametrize(
    "value",
    [
        SECRET,
        f"Bearer {SECRET}",
        {SECRET: 1},
        {"a": [{"b": SECRET}]},
        PIN,
        int(PIN),
        {"pins": [1, [int(PIN)]]},
        float(PIN),
    ],
    ids=str,
)
def test_a_secret_is_in_no_part_of_a_record(value: Any) -> None:
    for call in (full({"x": value}), full({}, value), full({}, error=f"no such thing: {value}")):
        recorded = RecordedCall.of(call, MASKS)
        told = json.dumps(recorded.to_dict())
        assert SECRET not in told
        assert PIN not in told
        assert recorded.masked == (("arguments",) if call.arguments != "{}" else ("result",))


def test_the_digest_of_masked_arguments_tells_nothing_of_the_secret() -> None:
    other = RecordedCall.of(full({"x": "another-secret-value"}), Masks(["another-secret-value"]))
    assert RecordedCall.of(full({"x": SECRET}), MASKS).digest == other.digest


def test_two_keys_that_are_masked_alike_are_not_passed_off_as_one() -> None:
    call = RecordedCall.of(full({}, {SECRET: 1, PIN: 2}), MASKS)
    assert call.masked == ("result",)


def test_what_was_too_large_is_named_and_has_its_size() -> None:
    call = RecordedCall.of(FullCall("f", 3, None, 2_000_000, None, 3_000_000), MASKS)
    told = call.to_dict()
    assert (call.cut, call.digest) == (("arguments", "result"), "")
    assert told == {
        "ordinal": 3,
        "digest": "",
        "bytes": [2_000_000, 3_000_000],
        "cut": ["arguments", "result"],
    }


def test_a_call_that_was_never_answered_says_so_and_has_no_result() -> None:
    call = RecordedCall.of(FullCall("f", 0, '{"by_name": {}}', 15, None, 0, answered=False), MASKS)
    assert (call.answered, call.cut, call.result) == (False, (), None)
    assert call.to_dict()["answered"] is False


def test_what_is_nested_too_deep_to_be_looked_through_is_cut_and_no_error() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert RecordedCall.of(FullCall("f", 0, deep, len(deep), "[]", 2), MASKS).cut == ("arguments",)
    deep = "[" * 900 + "]" * 900
    assert RecordedCall.of(FullCall("f", 0, "{}", 2, deep, len(deep)), MASKS).cut in ((), ("result",))


def fetch(url: str, token: str = SECRET, pin: int = int(PIN), codec: Any = print) -> str:
    """Fetch with a-secret-of-the-host's help."""
    return url


def test_a_secret_in_a_tools_default_or_description_is_not_in_its_catalogue() -> None:
    tools = ToolSet.of([fetch, Tool("other", fetch, parameters={"properties": {"t": {"default": SECRET}}})])
    catalogue = RecordedCatalogue.of(tools, MASKS)
    told = json.dumps(catalogue.entries)
    assert SECRET in json.dumps(tools.catalogue)
    assert SECRET not in told
    assert PIN not in told
    assert [entry["name"] for entry in catalogue.entries] == ["fetch", "other"]
    assert catalogue.digest != tools.digest


def test_the_digest_of_a_catalogue_tells_nothing_of_a_secret_in_it() -> None:
    def with_default(default: str) -> str:
        def tool(token: str = default) -> None: ...

        return RecordedCatalogue.of(ToolSet.of([tool]), Masks([default])).digest

    assert with_default("first-secret-value") == with_default("second-secret-valu")


def test_a_catalogue_is_valid_text() -> None:
    tools = ToolSet.of([Tool("f", lambda x: x, description="half \ud83d a pair")])
    json.dumps(RecordedCatalogue.of(tools, MASKS).entries, ensure_ascii=False).encode()
