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


def test_an_update_of_the_display_of_an_earlier_cell_is_shown() -> None:
    outputs = collected(
        VOICE.display("a"),
        VOICE.display("b", "unknown", update=True),
        VOICE.stream("x\n"),
        VOICE.display("c", "unknown", update=True),
    )
    assert outputs.text == "a\nc\nx\n"
    assert [output["output_type"] for output in outputs.to_notebook()] == ["display_data"] * 2 + ["stream"]
    validate(outputs.to_notebook())


@pytest.mark.parametrize("display_id", [None, 3, "x" * 100_000])
def test_an_update_of_no_id_shows_nothing(display_id: Any) -> None:
    outputs = collected(VOICE.display("a", display_id), VOICE.display("new", display_id, update=True))
    assert outputs.text == "a\n"


def test_a_display_takes_its_last_update_also_if_another_came_between() -> None:
    outputs = collected(
        VOICE.display("1", "d"),
        VOICE.display("2", "d", update=True),
        VOICE.display("3", "d"),
        VOICE.display("other", "e"),
    )
    assert outputs.text == "2\n3\nother\n"
    outputs.add(VOICE.display("4", "d", update=True))
    assert outputs.text == "4\n4\nother\n"


@pytest.mark.parametrize("same", [True, False])
def test_many_updates_of_many_displays_take_linear_time(same: bool) -> None:
    outputs = Collected()
    messages = [VOICE.display({}, "d" if same else str(n)) for n in range(5_000)]
    updates = [VOICE.display({}, "d" if same else str(n), update=True) for n in range(5_000)]
    started = perf_counter()
    for message in [*messages, *updates]:
        outputs.add(message)
    assert perf_counter() - started < 1
    assert len(outputs.items()) == 5_000


def test_the_number_of_displays_is_bounded_also_of_empty_ones() -> None:
    outputs = Collected(hold=10_000)
    for n in range(1_000):
        outputs.add(VOICE.display({}, str(n)))
    assert len(outputs.items()) < 30
    assert outputs.left_out == 1_000 - len(outputs.items())


def test_ids_of_cleared_displays_are_not_kept_without_bound() -> None:
    outputs = Collected()
    for n in range(3_000):
        outputs.add(VOICE.display({}, str(n)))
        outputs.add(VOICE.clear())
    outputs.add(VOICE.display("last", "2999", update=True))
    assert outputs.text == ""
    assert len(outputs._cleared) <= 1_000


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
    outputs = Collected(hold=20_000)
    for _ in range(10):
        outputs.add(VOICE.display("a", "id"))
    before = outputs.size
    outputs.add(VOICE.display("x" * 2_000, "id", update=True))
    assert (outputs.text.count("x"), outputs.left_out, outputs.size) == (0, 10, before)
    outputs.add(VOICE.display("x" * 400, "id", update=True))
    assert (outputs.text.count("x"), outputs.left_out, outputs.size) == (4_000, 10, before + 3_990)


HUGE: list[Any] = [["a"] * 1_000_000, {"x": [[1, 2]] * 400_000}, {str(n): n for n in range(400_000)}]


@pytest.mark.parametrize("value", HUGE, ids=["texts", "lists", "keys"])
@pytest.mark.parametrize("where", ["data", "metadata", "image/png", "update"])
def test_a_display_of_very_many_values_costs_next_to_nothing_and_is_not_kept(value: Any, where: str) -> None:
    data = {"text/plain": "said", ("image/png" if where == "image/png" else "application/json"): value}
    content: dict[str, Any] = {"data": data, "transient": {"display_id": "d"}}
    if where == "metadata":
        content = {"data": {"text/plain": "said"}, "metadata": {"m": value}}
    kind = "update_display_data" if where == "update" else "display_data"
    message = VOICE.says(kind, content)
    outputs = Collected()
    started = perf_counter()
    outputs.add(message)
    presented = present(outputs, None, cleaner=Masks(["correct-Horse7-battery"]))
    assert perf_counter() - started < 0.5
    assert presented.text.startswith("said\n")
    assert ("left out" in presented.text) == (where != "metadata")
    assert presented.shortened
    assert len(str(presented.outputs)) < 1_000
    assert outputs.size < 10_000


@pytest.mark.parametrize("where", ["data", "metadata"])
def test_what_is_nested_counts_by_its_size(where: str) -> None:
    nested = {"application/json": ["x" * 10_000] * 50}
    content = {"data": {}, "metadata": {}} | {where: nested}
    outputs = Collected()
    outputs.add(VOICE.says("display_data", content))
    assert 500_000 < outputs.size < 600_000
    outputs = Collected(hold=100_000)
    outputs.add(VOICE.says("display_data", content))
    assert (outputs.size, outputs.left_out) == (0, 1)


def test_what_is_nested_and_can_be_looked_at_is_kept() -> None:
    value = [{"x": n, "y": [n / 2]} for n in range(900)]
    (output,) = collected(VOICE.display({"application/json": value})).to_notebook()
    assert output["data"]["application/json"] == value


def test_metadata_that_is_too_long_to_show_is_left_out() -> None:
    content = {"data": {"text/plain": "x"}, "metadata": {"m": "x" * 100_000, "n": 1}}
    outputs = collected(VOICE.says("display_data", content))
    presented = present(outputs, None)
    assert presented.outputs == (
        {"output_type": "display_data", "data": {"text/plain": "x"}, "metadata": {}},
    )
    assert presented.shortened


class _Counting:
    """A cleaner that counts what it is given."""

    margin = 0

    def __init__(self) -> None:
        self.seen = 0

    def mask(self, text: str) -> str:
        self.seen += len(text)
        return text


def test_what_is_left_out_is_not_searched_for_secrets() -> None:
    cleaner = _Counting()
    present(collected(VOICE.display({"application/json": ["x" * 1_000] * 200})), None, cleaner=cleaner)
    assert cleaner.seen < 1_000


def test_a_huge_exception_is_kept_without_its_middle() -> None:
    said = "x" * 5_000_000 + "end"
    outputs = collected(VOICE.error(evalue=said, traceback=["Traceback:", f"ValueError: {said}"]))
    error = outputs.error
    assert error is not None
    assert outputs.size < 2_000_000
    assert error.evalue.endswith("xend")
    assert error.traceback.startswith("Traceback:\nValueError: xxx")
    presented = present(outputs, error)
    assert presented.error is not None
    assert "Traceback:\nValueError: xxx" in presented.text
    assert presented.text.endswith("xend\n")
    assert len(presented.text) < 11_000


def test_many_exceptions_are_held_within_bounds_and_the_last_one_is_there() -> None:
    outputs = Collected(hold=100_000)
    for n in range(100):
        outputs.add(VOICE.error(evalue=f"{n} " + "x" * 9_000, traceback=["y" * 9_000, f"last {n}"]))
    outputs.add(VOICE.stream("after"))
    assert outputs.size < 130_000
    assert outputs.left_out + len([item for item in outputs.items() if isinstance(item, dict)]) == 100
    assert outputs.error is not None
    assert outputs.error.evalue.startswith("99 ")
    presented = present(outputs, outputs.error)
    assert presented.text.endswith("last 99\n")
    assert presented.text.count("last 99") == 1
    outputs.add(VOICE.error(traceback=["small"]))
    presented = present(outputs, outputs.error)
    assert presented.text.endswith("small\n")
    assert "last 99" not in presented.text


def test_an_exception_for_which_there_is_no_room_is_cleared_with_the_rest() -> None:
    outputs = Collected(hold=10)
    outputs.add(VOICE.error())
    assert not outputs.is_empty
    outputs.add(VOICE.clear())
    assert outputs.is_empty
    assert outputs.size == 0


@pytest.mark.parametrize(
    "mime",
    ["", "plain", "text/", "/plain", "image/a b", "image/a\nb", "é/x", "a/" + "x" * 300, "a/b;\x1b[31m"],
)
def test_what_is_no_type_is_not_shown(mime: str) -> None:
    outputs = collected(VOICE.display({"text/plain": "x", mime: "y"}))
    (output,) = outputs.to_notebook()
    assert output["data"] == {"text/plain": "x"}
    assert outputs.is_shortened


@pytest.mark.parametrize(
    "mime",
    ["image/svg+xml", "application/vnd.plotly.v1+json", "text/x-a_b.c", "application/x+json; charset=utf-8"],
)
def test_what_is_a_type_is_shown(mime: str) -> None:
    outputs = collected(VOICE.display({"text/plain": "x", mime: "y"}))
    assert outputs.to_notebook()[0]["data"][mime] == "y"
    assert not outputs.is_shortened


def test_a_display_has_a_bounded_number_of_types() -> None:
    outputs = collected(VOICE.display({f"text/x{n}": "y" for n in range(10_000)}))
    assert len(outputs.to_notebook()[0]["data"]) < 100
    assert outputs.is_shortened


@pytest.mark.parametrize("mime", ["image/{}", "application/{}", "text/x;a={}", "application/{}+json"])
def test_a_secret_in_a_type_is_masked_wherever_the_type_is_named(mime: str) -> None:
    secret = "correct-Horse7-battery"
    outputs = collected(VOICE.display({mime.format(secret): "y"}))
    outputs.add(VOICE.display({mime.format(secret): "y" * 2_000_000}))
    outputs.add(VOICE.display({mime.format(secret): ["y"] * 2_000_000}))
    presented = present(outputs, None, cleaner=Masks([secret]))
    assert secret not in repr(presented)
    assert mime.format("***") in repr(presented)
    assert presented.masked


def test_what_comes_after_the_count_of_the_kernel_is_counted_too() -> None:
    outputs = collected(VOICE.stream("x\n"))
    outputs.written = {"stdout": 2, "stderr": 0}
    outputs.add_late(VOICE.stream("é" * 10))
    outputs.add_late(VOICE.stream("b", metadata={"hermes": {"skipped": 100}}))
    outputs.add_rest("stdout", 7, b"1234567", b"89")
    outputs.add_late(VOICE.stream("e", "stderr"))
    assert (outputs.total("stdout"), outputs.total("stderr")) == (2 + 20 + 101 + 9, 1)


def test_a_first_text_that_is_more_than_is_held_is_not_nothing() -> None:
    outputs = OutputCollector(hold=10, tail=5)
    outputs.add(VOICE.stream("x" * 20 + "end"))
    assert not outputs.is_empty
    assert outputs.stdout == "xxend"
    assert outputs.total("stdout") == 23
