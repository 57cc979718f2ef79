from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from hermes_kernel.cell.message import MalformedMessage, Message
from hermes_kernel.wire import PACKER, UNPACKER

TRACEBACK = ["Traceback (most recent call last):", "ValueError: boom"]


class KernelVoice:
    """Real messages as a kernel sends them, over the wire and parsed. The other tests of cells use it too."""

    def __init__(self) -> None:
        self._kernel, self._host = (Session(key=b"k", packer=PACKER, unpacker=UNPACKER) for _ in range(2))
        self.request = self._host.msg("execute_request", {"code": "1"})
        self.foreign_request = self._host.msg("execute_request", {"code": "2"})

    @property
    def msg_id(self) -> str:
        return self.request["header"]["msg_id"]

    def raw(
        self,
        msg_type: str,
        content: Any,
        *,
        foreign: bool = False,
        orphan: bool = False,
        metadata: Any = None,
    ) -> dict[str, Any]:
        """One deserialised message: an answer to our request, to a foreign one, or to none."""
        parent = None if orphan else self.foreign_request if foreign else self.request
        sent = self._kernel.msg(msg_type, content, parent=parent, metadata=metadata)
        _, parts = self._host.feed_identities(self._kernel.serialize(sent))
        return self._host.deserialize(parts)

    def says(self, msg_type: str, content: Any, **how: Any) -> Message:
        return Message.parse(self.raw(msg_type, content, **how))

    def stream(self, text: str, name: str = "stdout", **how: Any) -> Message:
        return self.says("stream", {"name": name, "text": text}, **how)

    def status(self, state: str, **how: Any) -> Message:
        return self.says("status", {"execution_state": state}, **how)

    def result(self, data: dict[str, Any] | str, count: Any = 1) -> Message:
        data = {"text/plain": data} if isinstance(data, str) else data
        return self.says("execute_result", {"data": data, "metadata": {}, "execution_count": count})

    def display(self, data: dict[str, Any] | str, display_id: Any = None, *, update: bool = False) -> Message:
        data = {"text/plain": data} if isinstance(data, str) else data
        transient = {} if display_id is None else {"display_id": display_id}
        kind = "update_display_data" if update else "display_data"
        return self.says(kind, {"data": data, "metadata": {}, "transient": transient})

    def error(self, ename: str = "ValueError", evalue: str = "boom", traceback: Any = None) -> Message:
        lines = TRACEBACK if traceback is None else traceback
        return self.says("error", {"ename": ename, "evalue": evalue, "traceback": lines})

    def clear(self, *, wait: bool = False) -> Message:
        return self.says("clear_output", {"wait": wait})

    def reply(self, status: str = "ok", *, count: int | None = 1, hermes: Any = None, **more: Any) -> Message:
        content: dict[str, Any] = {"status": status, "execution_count": count}
        if status == "error":
            content |= {"ename": "ValueError", "evalue": "boom", "traceback": TRACEBACK}
        metadata = {} if hermes is None else {"hermes": hermes}
        return self.says("execute_reply", content | more.pop("content", {}), metadata=metadata, **more)


VOICE = KernelVoice()

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("stream", {"name": "stdout", "text": "hi"}),
    ("stream", {"name": "stderr", "text": ""}),
    ("display_data", {"data": {"text/plain": "x"}, "metadata": {}, "transient": {"display_id": "d"}}),
    ("display_data", {"data": {}}),
    ("display_data", {"data": {"image/png": "aGk=", "application/json": {"a": [1]}}, "metadata": {"a": 1}}),
    ("update_display_data", {"data": {"text/plain": "x"}, "metadata": {}, "transient": {"display_id": "d"}}),
    ("execute_result", {"data": {"text/plain": "1"}, "metadata": {}, "execution_count": 1}),
    ("error", {"ename": "E", "evalue": "v", "traceback": ["a", "b"]}),
    ("error", {"ename": "E", "evalue": "v"}),
    ("status", {"execution_state": "busy"}),
    ("status", {"execution_state": "idle"}),
    ("status", {"execution_state": "starting"}),
    ("execute_input", {"code": "1", "execution_count": 1}),
    ("clear_output", {"wait": True}),
    ("execute_reply", {"status": "ok", "execution_count": 1, "payload": [], "user_expressions": {}}),
    (
        "execute_reply",
        {"status": "error", "execution_count": 1, "ename": "E", "evalue": "v", "traceback": []},
    ),
    ("execute_reply", {"status": "aborted"}),
    ("kernel_info_reply", {"status": "ok", "protocol_version": "5.3", "banner": ""}),
    ("iopub_welcome", {"subscription": ""}),
    ("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}),
    ("comm_msg", {"comm_id": "c", "data": {}}),
    ("input_request", {"prompt": "", "password": False}),
    ("shutdown_reply", {"restart": False}),
    ("a_type_of_tomorrow", {"anything": [1, None, "x"]}),
]

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("stream", {}),
    ("stream", {"text": "hi"}),
    ("stream", {"name": "stdlog", "text": "hi"}),
    ("stream", {"name": None, "text": "hi"}),
    ("stream", {"name": ["stdout"], "text": "hi"}),
    ("stream", {"name": "stdout"}),
    ("stream", {"name": "stdout", "text": None}),
    ("stream", {"name": "stdout", "text": 5}),
    ("stream", {"name": "stdout", "text": ["hi"]}),
    ("error", {}),
    ("error", {"ename": "E"}),
    ("error", {"ename": None, "evalue": "v", "traceback": []}),
    ("error", {"ename": "E", "evalue": 5, "traceback": []}),
    ("error", {"ename": "E", "evalue": "v", "traceback": None}),
    ("error", {"ename": "E", "evalue": "v", "traceback": "a"}),
    ("error", {"ename": "E", "evalue": "v", "traceback": [1]}),
    ("status", {}),
    ("status", {"execution_state": None}),
    ("status", {"execution_state": ["idle"]}),
    ("execute_reply", {}),
    ("execute_reply", {"status": None}),
    ("execute_reply", {"status": "fine"}),
    ("execute_reply", {"status": ["ok"]}),
    ("execute_reply", {"status": "error"}),
    ("execute_reply", {"status": "error", "ename": "E", "evalue": "v", "traceback": [None]}),
    ("execute_reply", {"status": "ok", "execution_count": "1"}),
    ("execute_reply", {"status": "ok", "execution_count": True}),
    ("execute_reply", {"status": "ok", "execution_count": 1.5}),
    *[
        (kind, content)
        for kind in ("display_data", "update_display_data", "execute_result")
        for content in (
            {},
            {"data": None},
            {"data": ["text/plain"]},
            {"data": "x"},
            {"data": {}, "metadata": None},
            {"data": {}, "metadata": []},
            {"data": {}, "transient": None},
            {"data": {}, "transient": "d"},
        )
    ],
]


@pytest.mark.parametrize(("msg_type", "content"), GOOD)
def test_every_message_of_a_kernel_is_read(msg_type: str, content: dict[str, Any]) -> None:
    raw = VOICE.raw(msg_type, content, metadata={"hermes": {"end": 3}})
    assert Message.parse(raw) == Message(
        msg_type=msg_type,
        msg_id=raw["header"]["msg_id"],
        parent_id=VOICE.msg_id,
        content=content,
        metadata={"hermes": {"end": 3}},
    )


@pytest.mark.parametrize(("msg_type", "content"), WRONG)
def test_a_content_of_the_wrong_shape_is_refused(msg_type: str, content: dict[str, Any]) -> None:
    raw = VOICE.raw(msg_type, content)
    with pytest.raises(MalformedMessage):
        Message.parse(raw)


def test_a_message_that_answers_nothing_has_no_parent() -> None:
    assert VOICE.says("status", {"execution_state": "starting"}, orphan=True).parent_id is None


def test_an_answer_to_somebody_else_has_the_parent_of_theirs() -> None:
    assert VOICE.status("busy", foreign=True).parent_id == VOICE.foreign_request["header"]["msg_id"]


@pytest.mark.parametrize("raw", [None, [], "x", 5, b"x", True, [("header", {})]], ids=repr)
def test_what_is_no_object_is_refused(raw: Any) -> None:
    with pytest.raises(MalformedMessage):
        Message.parse(raw)


@pytest.mark.parametrize("part", ["header", "content"])
@pytest.mark.parametrize("value", [None, [], "x", 5], ids=repr)
def test_a_part_that_is_no_object_is_refused(part: str, value: Any) -> None:
    raw = VOICE.raw("status", {"execution_state": "idle"})
    with pytest.raises(MalformedMessage, match=part):
        Message.parse({**raw, part: value})


@pytest.mark.parametrize("part", ["header", "content"])
def test_a_missing_part_is_refused(part: str) -> None:
    raw = VOICE.raw("status", {"execution_state": "idle"})
    del raw[part]
    with pytest.raises(MalformedMessage):
        Message.parse(raw)


@pytest.mark.parametrize("parent", [[], "x", 5, {"msg_id": 5}, {"msg_id": ["x"]}, {"msg_id": {}}], ids=repr)
def test_a_parent_of_the_wrong_shape_is_refused(parent: Any) -> None:
    raw = VOICE.raw("status", {"execution_state": "idle"})
    with pytest.raises(MalformedMessage):
        Message.parse({**raw, "parent_header": parent})


@pytest.mark.parametrize("field", ["msg_type", "msg_id"])
@pytest.mark.parametrize("value", [None, 5, ["x"], {}], ids=repr)
def test_a_header_whose_fields_are_no_strings_is_refused(field: str, value: Any) -> None:
    raw = VOICE.raw("status", {"execution_state": "idle"})
    with pytest.raises(MalformedMessage):
        Message.parse({**raw, "header": {**raw["header"], field: value}})


@pytest.mark.parametrize("metadata", [None, [], "x", 5], ids=repr)
def test_metadata_of_the_wrong_shape_counts_as_none(metadata: Any) -> None:
    raw = VOICE.raw("status", {"execution_state": "idle"})
    assert Message.parse({**raw, "metadata": metadata}).metadata == {}


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
types = st.sampled_from([msg_type for msg_type, _ in GOOD])
FIELDS = ("name", "text", "data", "metadata", "transient", "ename", "evalue", "traceback", "execution_state",
          "status", "execution_count", "wait", "text/plain", "display_id")  # fmt: skip
fields = st.sampled_from(FIELDS)
contents = st.dictionaries(
    fields, json_values | st.sampled_from(["stdout", "ok", "error", "idle"]), max_size=6
)
near_messages = st.fixed_dictionaries(
    {},
    optional={
        "header": st.fixed_dictionaries({"msg_type": types, "msg_id": st.text(max_size=3)}) | json_values,
        "parent_header": st.fixed_dictionaries({"msg_id": json_values}) | json_values,
        "content": contents | json_values,
        "metadata": json_values,
    },
)
well_headed = st.fixed_dictionaries(
    {"header": st.fixed_dictionaries({"msg_type": types, "msg_id": st.just("m")}), "content": contents}
)


@given(json_values | near_messages | well_headed)
def test_whatever_arrives_is_a_message_or_malformed_and_nothing_else(raw: Any) -> None:
    try:
        message = Message.parse(raw)
    except MalformedMessage:
        return
    assert isinstance(message.msg_type, str)
    assert message.parent_id is None or isinstance(message.parent_id, str)
    assert isinstance(message.content, dict)
    assert isinstance(message.metadata, dict)
