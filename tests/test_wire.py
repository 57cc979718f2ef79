import json
import os
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session, json_packer

from hermes_kernel.wire import PACKER, UNPACKER, pack

texts = st.one_of(
    st.text(max_size=10),
    st.text(st.characters(categories=["Cs"]), max_size=3),
    st.binary(max_size=5).map(os.fsdecode),  # the name of a file that is not UTF-8
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


def over_the_wire(content: dict[str, Any]) -> dict[str, Any]:
    """Send a content from one Session of ours to another."""
    sender, receiver = (Session(key=b"k", packer=PACKER, unpacker=UNPACKER) for _ in range(2))
    frames = sender.serialize(sender.msg("stream", content))
    _, parts = receiver.feed_identities(frames)
    return receiver.deserialize(parts)["content"]


def test_valid_text_is_packed_as_jupyter_packs_it() -> None:
    message = {"text": "é 😀 \0", "date": datetime(2024, 5, 1, tzinfo=UTC), "n": [1, 2.5, None, True]}
    assert pack(message) == json_packer(message)
    assert "é 😀".encode() in pack(message)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "é\ud800😀", "\udc80\udcff"])
def test_a_lone_surrogate_is_escaped_and_not_refused(text: str) -> None:
    assert json.loads(pack({"text": text})) == {"text": text}
    assert over_the_wire({"name": "stdout", "text": text})["text"] == text


def test_a_lone_surrogate_in_a_key_is_escaped_too() -> None:
    assert json.loads(pack({"\ud800": [{"\udfff": 1}]})) == {"\ud800": [{"\udfff": 1}]}


def test_what_json_lacks_is_packed_beside_a_surrogate_as_without_one() -> None:
    rest = {"date": datetime(2024, 5, 1, tzinfo=UTC), "bytes": b"x", "tuple": (1, 2)}
    assert json.loads(pack({**rest, "text": "\ud800"})) == {**json.loads(pack(rest)), "text": "\ud800"}


@given(st.dictionaries(texts, values, max_size=4))
def test_any_content_comes_out_as_it_went_in(content: dict[str, Any]) -> None:
    # Two surrogates that make a pair are one character in JSON, whoever writes it.
    assert over_the_wire(content) == json.loads(json.dumps(content))


@given(values)
def test_what_is_packed_is_valid_utf8(value: Any) -> None:
    pack(value).decode("utf-8")
