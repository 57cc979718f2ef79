import enum
import json
import os
import tracemalloc
from collections import OrderedDict
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session, json_packer

from hermes_kernel.wire import (
    MAX_FRAME,
    MAX_NESTED,
    PACKER,
    UNPACKER,
    BadCallError,
    Failure,
    FrameDecoder,
    Hello,
    ToolCall,
    ToolReply,
    WireError,
    check_json,
    pack,
)

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


# -- the frames of the tool bridge ------------------------------------------------------------------------


calls = st.builds(
    ToolCall,
    st.integers(0, 2**60),
    texts,
    texts,
    st.dictionaries(texts, values, max_size=3),
    st.just(()) | st.lists(values, min_size=1, max_size=2),
)


def unframed(data: bytes) -> bytes:
    (frame,) = FrameDecoder().feed(data)
    return frame


@given(calls)
def test_a_call_arrives_as_it_was_sent(call: ToolCall) -> None:
    assert ToolCall.parse(unframed(call.encode())) == call


@given(st.integers(0, 2**60), values, st.booleans())
def test_a_result_arrives_as_it_was_returned(call_id: int, value: Any, closes: bool) -> None:
    reply = ToolReply(call_id, value, closes=closes)
    assert ToolReply.parse(unframed(reply.encode())) == reply


@given(texts, st.sampled_from([Failure.TOOL, Failure.BUDGET, Failure.REFUSED, None]))
def test_an_error_arrives_with_its_kind(text: str, kind: str | None) -> None:
    reply = ToolReply(7, error=text, kind=kind)
    assert ToolReply.parse(unframed(reply.encode())) == reply


def test_a_token_is_a_hello() -> None:
    assert Hello.parse(unframed(Hello("token").encode())) == Hello("token")


@given(st.lists(st.binary(max_size=40), max_size=5), st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    decoder, found, at = FrameDecoder(), [], 0
    while at < len(stream):
        end = data.draw(st.integers(at + 1, len(stream)))
        found += decoder.feed(stream[at:end])
        at = end
    assert found == bodies
    assert not decoder.has_part


def test_a_decoder_says_whether_a_frame_has_begun() -> None:
    decoder = FrameDecoder()
    assert not decoder.has_part
    assert decoder.feed(b"\0\0") == []
    assert decoder.has_part
    assert decoder.feed(b"\0\1xy") == [b"x"]
    assert decoder.has_part


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\xff\xff\xff\xffx"])
def test_a_frame_that_is_announced_as_too_large_ends_the_connection_before_it_is_read(data: bytes) -> None:
    with pytest.raises(WireError, match="announced"):
        FrameDecoder().feed(data)


def test_a_frame_of_just_the_allowed_size_passes() -> None:
    room = MAX_FRAME - len(b'{"id":1,"value":""}')
    assert len(unframed(ToolReply(1, "x" * room).encode())) == MAX_FRAME
    with pytest.raises(WireError, match=f"may carry {MAX_FRAME}"):
        ToolReply(1, "x" * (room + 1)).encode()


NOT_CALLS: list[bytes] = [
    b"", b"\0", b"nothing", b"[1, 2]", b"null", b"3", b'"text"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"{", b"{}",
    b"[" * 200_000, b'{"a":' * 200_000, b'{"id": NaN}', b'{"id": Infinity}',
    b'{"id": "1", "cell": "c", "tool": "t", "args": {}}',
    b'{"id": true, "cell": "c", "tool": "t", "args": {}}',
    b'{"id": 1.5, "cell": "c", "tool": "t", "args": {}}',
    b'{"id": 1' + b"0" * 10_000 + b"}",
]  # fmt: skip
BAD_CALLS: list[bytes] = [
    b'{"id": 1, "tool": "t", "args": {}}',
    b'{"id": 1, "cell": 3, "tool": "t", "args": {}}',
    b'{"id": 1, "cell": "c", "tool": [], "args": {}}',
    b'{"id": 1, "cell": "c", "tool": "t"}',
    b'{"id": 1, "cell": "c", "tool": "t", "args": []}',
    b'{"id": 1, "cell": "c", "tool": "t", "args": null}',
]


@pytest.mark.parametrize("body", NOT_CALLS, ids=lambda body: repr(body[:12]))
@pytest.mark.parametrize("kind", [ToolCall, Hello, ToolReply])
def test_what_is_no_frame_of_ours_is_a_wire_error_and_nothing_else(kind: Any, body: bytes) -> None:
    with pytest.raises(WireError):
        kind.parse(body)


@pytest.mark.parametrize("body", BAD_CALLS, ids=lambda body: repr(body[8:30]))
def test_a_call_that_is_wrong_can_still_be_answered_by_its_id(body: bytes) -> None:
    with pytest.raises(BadCallError) as wrong:
        ToolCall.parse(body)
    assert wrong.value.call_id == 1


def test_what_is_not_expected_in_a_call_is_left_alone() -> None:
    body = b'{"id": 1, "cell": "c", "tool": "t", "args": {"x": 1}, "more": [1]}'
    assert ToolCall.parse(body) == ToolCall(1, "c", "t", {"x": 1})


def call_of(argument: bytes) -> bytes:
    return b'{"id": 1, "cell": "c", "tool": "t", "args": {"x": ' + argument + b"}}"


@pytest.mark.parametrize(
    "body",
    [
        b":" * (MAX_NESTED + 1) + b'"' + b'\\"' * 2_000_000,
        b'"' + b":" * (MAX_NESTED + 1) + b"\\" * 2_000_001,
        b'"' * 2_000_000 + b":" * (MAX_NESTED + 1),
        b'":","' * 1_000_000,
        b'":",' * 1_000_000 + b'"\\',
    ],
    ids=["escaped quotes", "backslashes", "quotes", "short texts", "half an escape"],
)
def test_a_call_that_is_made_to_be_slow_is_refused_at_once(body: bytes) -> None:
    began = perf_counter()
    with pytest.raises(WireError):
        ToolCall.parse(body)
    assert perf_counter() - began < 2


def test_a_long_text_full_of_colons_takes_a_few_times_its_size() -> None:
    text = "2026-01-01 12:00:00 INFO ok\n" * 480_000
    body = ToolCall(1, "c", "t", {"text": text}).encode()[4:]
    tracemalloc.start()
    try:
        assert ToolCall.parse(body).arguments == {"text": text}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * len(body)


@pytest.mark.parametrize(
    "text", ["[", "{", ":", "\\", '"', '\\"', '\\\\"[', '"[', "[\\", "\n:", "\u2028{"], ids=repr
)
def test_what_stands_in_a_text_is_no_nesting(text: str) -> None:
    value = {"x": [text * MAX_NESTED, "", text]}
    assert ToolCall.parse(ToolCall(1, "c", "t", value).encode()[4:]).arguments == value


@pytest.mark.parametrize("part", [b"[]", b'{"":1}', b'["[\\"",[]]', b'{"\\\\":[]}'])
def test_more_nesting_than_a_call_may_have_is_refused(part: bytes) -> None:
    texts = b'"' + b":[" * MAX_NESTED + b'",'
    marks = part.count(b"[]") + part.count(b'{"') + part.count(b'":') + part.count(b'["[')
    allowed = (MAX_NESTED - 10) // marks
    ToolCall.parse(call_of(b"[" + texts + b",".join([part] * allowed) + b"]"))
    with pytest.raises(WireError, match="lists, objects and keys"):
        ToolCall.parse(call_of(b"[" + texts + b",".join([part] * (allowed + 20)) + b"]"))


@pytest.mark.parametrize("size", [0x220000, 0x222222, 0x5C0000, 0x5C5C5C])
def test_the_size_of_a_call_says_nothing_about_its_nesting(size: int) -> None:
    room = size - len(call_of(b'""').replace(b" ", b""))
    frame = ToolCall(1, "c", "t", {"x": ":" * room}).encode()
    assert len(frame) == size + 4


# -- what is JSON -----------------------------------------------------------------------------------------


@given(values)
def test_values_pass(value: Any) -> None:
    check_json(value, "x")


def cyclic() -> Any:
    loop: list[Any] = []
    loop.append({"again": loop})
    return loop


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "x is of type set"),
        (b"a", "x is of type bytes"),
        (object(), "x is of type object"),
        (float("nan"), "x is nan"),
        ([1, float("inf")], "x[1] is inf"),
        ({"a": {"b": [None, {3}]}}, "x['a']['b'][1] is of type set"),
        ((1, {"k": 1j}), "x[1]['k'] is of type complex"),
        ({1: 2}, "x is a dict with the key 1: keys must be strings"),
        ({None: 2}, "x is a dict with the key None"),
        ({(1, 2): 2}, "x is a dict with the key tuple"),
        (10**5000, "x is a whole number of too many digits"),
        (cyclic(), "contains itself"),
        ([[[[b""]]]], "x[0][0][0][0] is of type bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_json_cannot_carry_unchanged_is_named_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(TypeError) as refused:
        check_json(value, "x")
    assert words in str(refused.value)
    assert "give None" in str(refused.value)
    assert len(str(refused.value)) < 400


def test_subclasses_of_what_json_has_pass() -> None:
    class Level(enum.IntEnum):
        LOW = 1

    check_json([Level.LOW, OrderedDict(a=1), (1, 2), True], "x")
