import warnings
from itertools import pairwise
from time import perf_counter
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat import v4

from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.message import MalformedMessage, Message
from hermes_kernel.cell.outputs import CellError, OutputCollector, stream_end
from hermes_kernel.cell.shown import masked, present
from hermes_kernel.cell.text import fold, strip_controls

from .test_message import TRACEBACK, KernelVoice

VOICE = KernelVoice()


class Collected(OutputCollector):
    """What was collected, as it is shown where nothing has to be cut."""

    @property
    def text(self) -> str:
        return present(self, None).text

    def to_notebook(self) -> list[dict[str, Any]]:
        return list(present(self, None).outputs)


def collected(*messages: Message) -> Collected:
    outputs = Collected()
    for message in messages:
        outputs.add(message)
    return outputs


def validate(outputs: list[dict[str, Any]]) -> None:
    """A notebook with these outputs is one of format 4, and can be written as UTF-8."""
    cell = v4.new_code_cell("1", outputs=[nbformat.from_dict(output) for output in outputs])
    notebook = v4.new_notebook(cells=[cell])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nbformat.validate(notebook)
    nbformat.writes(notebook).encode("utf-8")


def test_a_cell_that_shows_nothing_has_nothing() -> None:
    outputs = collected()
    assert (outputs.text, outputs.stdout, outputs.stderr, outputs.value) == ("", "", "", None)
    assert outputs.error is None
    assert outputs.to_notebook() == []


def test_pieces_of_one_stream_are_merged_in_their_order() -> None:
    outputs = collected(VOICE.stream("a"), VOICE.stream("b\n"), VOICE.stream("c"))
    assert outputs.stdout == "ab\nc"
    assert outputs.to_notebook() == [{"output_type": "stream", "name": "stdout", "text": "ab\nc"}]


def test_two_streams_keep_their_order_in_the_text_and_are_apart_by_name() -> None:
    outputs = collected(VOICE.stream("1"), VOICE.stream("2", "stderr"), VOICE.stream("3"))
    assert (outputs.text, outputs.stdout, outputs.stderr) == ("123", "13", "2")
    assert [(o["name"], o["text"]) for o in outputs.to_notebook()] == [
        ("stdout", "1"),
        ("stderr", "2"),
        ("stdout", "3"),
    ]


def test_the_value_is_the_last_result() -> None:
    outputs = collected(VOICE.result("1"), VOICE.stream("x"), VOICE.result("2", count=7), VOICE.display("d"))
    assert outputs.value == "2"
    assert outputs.to_notebook()[2]["execution_count"] == 7


def test_a_display_is_no_value() -> None:
    assert collected(VOICE.display("d")).value is None


def test_a_result_without_text_is_no_value() -> None:
    assert collected(VOICE.result({"image/png": "aGk="})).value is None


def test_an_empty_result_is_a_value() -> None:
    assert collected(VOICE.result("")).value == ""


def test_the_text_is_in_the_order_in_which_it_came() -> None:
    outputs = collected(
        VOICE.stream("a\n"), VOICE.display("d"), VOICE.stream("e\n", "stderr"), VOICE.result("v")
    )
    assert outputs.text == "a\nd\ne\nv\n"


def test_a_value_stands_on_a_line_of_its_own() -> None:
    outputs = collected(VOICE.stream("no newline"), VOICE.result("v"), VOICE.stream("after"))
    assert outputs.text == "no newline\nv\nafter"


def test_a_value_that_ends_its_line_gets_no_second_newline() -> None:
    assert collected(VOICE.stream("a\n"), VOICE.result("v\n"), VOICE.display("d")).text == "a\nv\nd\n"


def test_a_traceback_stands_on_lines_of_its_own() -> None:
    outputs = collected(VOICE.stream("partial"), VOICE.error(), VOICE.stream("late"))
    assert outputs.text == "partial\n" + "\n".join(TRACEBACK) + "\nlate"


def test_an_output_without_text_leaves_no_blank_line() -> None:
    outputs = collected(VOICE.stream("a"), VOICE.display({"image/png": "aGk="}), VOICE.stream("b"))
    assert outputs.text == "a\n[image/png]\nb"


def test_an_error_is_kept_whole() -> None:
    outputs = collected(VOICE.error("KeyError", "'k'", ["a", "b\nc"]))
    assert outputs.error == CellError("KeyError", "'k'", "a\nb\nc")
    assert outputs.stderr == ""


def test_the_last_error_is_the_error() -> None:
    outputs = collected(VOICE.error("A"), VOICE.error("B"))
    assert outputs.error is not None
    assert outputs.error.ename == "B"


def test_an_error_without_a_traceback_is_an_error() -> None:
    outputs = collected(VOICE.says("error", {"ename": "E", "evalue": "v"}))
    assert outputs.error == CellError("E", "v", "")
    validate(outputs.to_notebook())


def test_clear_output_forgets_what_was_shown() -> None:
    outputs = collected(VOICE.stream("a"), VOICE.result("1"), VOICE.clear(), VOICE.stream("b"))
    assert (outputs.text, outputs.value) == ("b", None)


def test_clear_output_does_not_forget_an_error() -> None:
    outputs = collected(VOICE.error("KeyError"), VOICE.clear())
    assert outputs.error is not None
    assert outputs.to_notebook() == []


def test_clear_output_that_waits_keeps_what_is_there_until_something_comes() -> None:
    outputs = collected(VOICE.stream("old"), VOICE.clear(wait=True))
    assert outputs.text == "old"
    outputs.add(VOICE.stream("new"))
    outputs.add(VOICE.stream("er"))
    assert outputs.text == "newer"


@pytest.mark.parametrize(
    ("new", "text"),
    [(VOICE.display("d"), "d\n"), (VOICE.result("v"), "v\n"), (VOICE.error(traceback=["t"]), "t\n")],
    ids=["display", "result", "error"],
)
def test_whatever_is_shown_ends_the_wait_of_clear_output(new: Message, text: str) -> None:
    assert collected(VOICE.stream("old"), VOICE.clear(wait=True), new).text == text


def test_a_clear_at_once_ends_the_wait_of_the_one_before() -> None:
    outputs = collected(
        VOICE.stream("a"), VOICE.clear(wait=True), VOICE.clear(), VOICE.stream("b"), VOICE.display("c")
    )
    assert outputs.text == "b\nc\n"


def test_an_update_changes_every_display_of_its_id_where_it_stands() -> None:
    outputs = collected(
        VOICE.display("old", "d"),
        VOICE.stream("x\n"),
        VOICE.display("old", "d"),
        VOICE.display("other", "e"),
        VOICE.display("new", "d", update=True),
    )
    assert outputs.text == "new\nx\nnew\nother\n"


def test_an_update_of_an_unknown_id_or_none_shows_nothing() -> None:
    outputs = collected(
        VOICE.display("a"),
        VOICE.display("b", "d"),
        VOICE.display("new", "unknown", update=True),
        VOICE.display("new", update=True),
    )
    assert outputs.text == "a\nb\n"


def test_a_display_that_was_cleared_is_not_brought_back_by_an_update() -> None:
    outputs = collected(VOICE.display("a", "d"), VOICE.clear(), VOICE.display("b", "d", update=True))
    assert outputs.text == ""


def test_an_update_does_not_take_the_place_of_what_it_updates_from() -> None:
    outputs = collected(VOICE.display({"text/plain": "a", "text/html": "<a>"}, "d"))
    outputs.add(VOICE.display("b", "d", update=True))
    assert outputs.to_notebook() == [
        {"output_type": "display_data", "data": {"text/plain": "b"}, "metadata": {}}
    ]


@pytest.mark.parametrize("msg_type", ["execute_input", "comm_open", "a_type_of_tomorrow"])
def test_a_type_that_shows_nothing_is_ignored(msg_type: str) -> None:
    outputs = collected(VOICE.stream("a"), VOICE.says(msg_type, {"data": {"text/plain": "x"}, "code": "1"}))
    assert outputs.text == "a"


@pytest.mark.parametrize(
    ("missing", "rest", "added", "gone"),
    [
        (0, b"abc", "", 0),
        (-3, b"abc", "", 0),
        (2, b"abc", "bc", 0),
        (3, b"abc", "abc", 0),
        (5, b"abc", "abc", 2),
        (5, b"", "", 5),
        (0, b"", "", 0),
    ],
)
def test_only_what_no_message_brought_is_added_and_the_rest_is_counted(
    missing: int, rest: bytes, added: str, gone: int
) -> None:
    outputs = collected(VOICE.stream("sent "))
    assert outputs.add_rest("stdout", missing, rest) == gone
    assert outputs.stdout == "sent " + added


def test_the_rest_of_the_standard_error_goes_there() -> None:
    outputs = collected(VOICE.stream("out"))
    outputs.add_rest("stderr", 3, b"err")
    assert (outputs.stdout, outputs.stderr, outputs.text) == ("out", "err", "outerr")


def test_the_rest_may_be_cut_within_a_character() -> None:
    outputs = collected()
    assert outputs.add_rest("stdout", 2, "aé!".encode()) == 0
    assert outputs.stdout == "\\xa9!"


@given(st.binary(max_size=20), st.integers(-5, 40))
def test_what_is_added_and_what_is_gone_make_up_what_was_missing(rest: bytes, missing: int) -> None:
    outputs = collected()
    gone = outputs.add_rest("stdout", missing, rest)
    kept = rest[len(rest) - min(max(missing, 0), len(rest)) :]
    assert gone + len(kept) == max(missing, 0)
    assert outputs.stdout == kept.decode("utf-8", "backslashreplace")


def test_a_lone_surrogate_never_comes_out() -> None:
    outputs = collected(
        VOICE.stream("o\ud800"),
        VOICE.stream("e\udfff", "stderr"),
        VOICE.result("v\ud83d"),
        VOICE.error("E\ud800", "v\ud800", ["t\ud800"]),
    )
    assert (outputs.stdout, outputs.stderr, outputs.value) == ("o\\ud800", "e\\udfff", "v\\ud83d")
    assert outputs.error == CellError("E\\ud800", "v\\ud800", "t\\ud800")
    outputs.text.encode("utf-8")
    validate(outputs.to_notebook())


@pytest.mark.parametrize("data", [{"text/plain": "\ud800"}, {"text/html": "<b>\ud800</b>"}], ids=repr)
def test_a_lone_surrogate_of_a_display_never_comes_out_either(data: dict[str, Any]) -> None:
    validate(collected(VOICE.display(data)).to_notebook())


@pytest.mark.parametrize(
    "message",
    [
        VOICE.stream("a"),
        VOICE.stream("a", "stderr"),
        VOICE.display({"text/plain": "d", "image/png": "aGk=", "application/json": {"a": [1, None]}}, "d"),
        VOICE.display({}),
        VOICE.result("v", count=3),
        VOICE.result("v", count=None),
        VOICE.error(),
        VOICE.error(traceback=[]),
    ],
    ids=lambda message: message.msg_type,
)
def test_what_is_collected_is_a_valid_notebook_output(message: Message) -> None:
    validate(collected(message).to_notebook())


@pytest.mark.parametrize(
    ("msg_type", "content"),
    [
        ("display_data", {"data": {"text/html": 5}}),  # display({"text/html": 5}, raw=True)
        ("display_data", {"data": {"image/png": None}}),
        ("display_data", {"data": {"text/html": {"a": 1}}}),
        ("execute_result", {"data": {}, "execution_count": True}),
        ("execute_result", {"data": {}, "execution_count": -1}),
    ],
)
def test_an_odd_message_is_refused_or_still_makes_a_valid_notebook(
    msg_type: str, content: dict[str, Any]
) -> None:
    try:
        message = VOICE.says(msg_type, content)
    except MalformedMessage:
        return
    validate(collected(message).to_notebook())


def test_the_notebook_does_not_change_what_was_collected() -> None:
    outputs = collected(VOICE.display("d"), VOICE.stream("a"))
    for output in outputs.to_notebook():
        output.clear()
    assert outputs.text == "d\na"


@pytest.mark.parametrize(
    ("metadata", "end"),
    [
        ({"hermes": {"end": 0}}, 0),
        ({"hermes": {"end": 12}}, 12),
        ({}, None),
        ({"hermes": {}}, None),
        ({"hermes": None}, None),
        ({"hermes": [12]}, None),
        ({"hermes": {"end": -1}}, None),
        ({"hermes": {"end": True}}, None),
        ({"hermes": {"end": "12"}}, None),
        ({"hermes": {"end": 12.0}}, None),
        ({"hermes": {"end": 2**63}}, None),
    ],
    ids=repr,
)
def test_the_end_of_a_stream_message_is_a_number_of_bytes_or_unknown(metadata: Any, end: int | None) -> None:
    assert stream_end(VOICE.stream("a", metadata=metadata)) == end


shown = st.one_of(
    st.builds(VOICE.stream, st.text(max_size=5), st.sampled_from(["stdout", "stderr"])),
    st.builds(VOICE.display, st.text(max_size=5), st.sampled_from([None, "d", "e"]), update=st.booleans()),
    st.builds(VOICE.result, st.text(max_size=5), st.sampled_from([None, 1, 2])),
    st.builds(
        VOICE.error, st.text(max_size=3), st.text(max_size=3), st.lists(st.text(max_size=5), max_size=2)
    ),
    st.builds(VOICE.clear, wait=st.booleans()),
)


@given(st.lists(shown, max_size=8))
def test_any_outputs_make_a_valid_notebook_that_says_the_same(messages: list[Message]) -> None:
    outputs = collected(*messages)
    notebook = outputs.to_notebook()
    validate(notebook)
    for name in ("stdout", "stderr"):
        texts = [o["text"] for o in notebook if o["output_type"] == "stream" and o["name"] == name]
        folded = "".join(text for _, text in fold([(name, getattr(outputs, name))]))
        assert "".join(texts) == strip_controls(folded)
    kinds = [(output["output_type"], output.get("name")) for output in notebook]
    assert not any(a == b and a[0] == "stream" for a, b in pairwise(kinds)), "one stream in two pieces"
    for output in notebook:
        if output["output_type"] != "stream":
            said = "\n".join(output.get("traceback", [])) or output.get("data", {}).get("text/plain", "")
            assert said in outputs.text


@given(st.lists(shown, max_size=8))
def test_every_value_and_traceback_begins_a_line(messages: list[Message]) -> None:
    outputs = collected(*messages)
    rest = outputs.text
    at_line_start = True
    for output in outputs.to_notebook():
        is_stream = output["output_type"] == "stream"
        said = output["text"] if is_stream else "\n".join(output.get("traceback", []))
        said = said or output.get("data", {}).get("text/plain", "")
        if not said:
            continue
        if not is_stream and not at_line_start:
            assert rest.startswith("\n")
            rest = rest[1:]
        assert rest.startswith(said)
        rest = rest[len(said) :]
        at_line_start = said.endswith("\n")
        if not is_stream and not at_line_start:
            assert rest.startswith("\n")
            rest, at_line_start = rest[1:], True
    assert rest == ""


SECRET = "Zq7" + "aB9dK" * 7 + "-xyz"


class Kept:
    """A store that remembers what it was given."""

    def __init__(self) -> None:
        self.files: list[bytes] = []

    def keep(self, name: str, data: bytes) -> str | None:
        self.files.append(data)
        return f"/kept/{name}"


@pytest.mark.parametrize("before", range(3_960, 4_001, 3))
@pytest.mark.parametrize("behind", [0, 5_965])
def test_no_part_of_a_secret_is_shown_where_the_standard_error_is_cut(before: int, behind: int) -> None:
    text = "." * before + SECRET + "." * 20_000 + SECRET + "." * (behind + before - 3_960)
    shown = present(collected(VOICE.stream(text, "stderr")), None, cleaner=Masks([SECRET]))
    assert shown.truncated
    assert not any(part in shown.text for part in (SECRET[:8], SECRET[-8:]))


@pytest.mark.parametrize("text", ["x" * 200_000, "first\n" + "x" * 200_000 + "\nlast"])
def test_a_value_that_is_cut_is_said_to_be_and_kept_whole(text: str) -> None:
    store = Kept()
    shown = present(collected(VOICE.result(text)), None, store=store)
    assert shown.truncated
    assert store.files == [f"{text}\n".encode()]
    assert len(shown.text.encode()) <= 51_000
    assert len(str(shown.value).encode()) <= 51_000
    assert len(shown.outputs[0]["data"]["text/plain"].encode()) <= 51_000


@pytest.mark.parametrize("mime", ["application/json", "image/png", "text/html"])
def test_a_secret_is_in_no_part_of_a_display(mime: str) -> None:
    value: Any = {SECRET: [{SECRET: SECRET}]} if mime == "application/json" else SECRET
    message = VOICE.display({mime: value})
    message.content["metadata"] = {SECRET: {SECRET: SECRET}}
    shown = present(collected(message), None, cleaner=Masks([SECRET]))
    assert SECRET not in repr(shown)
    assert masked({SECRET: 1}, Masks([SECRET])) == {"***": 1}


@pytest.mark.parametrize("piece", ["<script>", "<style", "<!--", "<", "</script ", " ", "<p>\n", "<a b='"])
def test_html_is_read_in_linear_time(piece: str) -> None:
    outputs = collected(VOICE.display({"text/html": piece * (2_000_000 // len(piece))}))
    started = perf_counter()
    present(outputs, None)
    assert perf_counter() - started < 30


def test_the_text_of_html_has_no_controls() -> None:
    assert collected(VOICE.display({"text/html": "<b>a&#8238;b\x1b[31mc</b>"})).text == "abc\n"


def test_what_is_left_of_one_stream_when_the_other_is_overwritten_is_put_together_fast() -> None:
    messages = [VOICE.stream("x" * 40), VOICE.stream("\r", "stderr")]
    outputs = collected(*(messages * 100_000))
    started = perf_counter()
    assert len(present(outputs, None).outputs) == 1
    assert perf_counter() - started < 30


def test_an_update_of_many_displays_is_held_within_bounds() -> None:
    outputs = Collected(hold=1_000)
    for _ in range(10):
        outputs.add(VOICE.display("a", "id"))
    outputs.add(VOICE.display("x" * 400, "id", update=True))
    assert outputs.text.count("x") == 800
    assert (outputs.left_out, outputs.size) == (8, 808)


def test_a_first_text_that_is_more_than_is_held_is_not_nothing() -> None:
    outputs = OutputCollector(hold=10, tail=5)
    outputs.add(VOICE.stream("x" * 20 + "end"))
    assert not outputs.is_empty
    assert outputs.stdout == "xxend"
    assert outputs.total("stdout") == 23
