import base64
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.message import Message
from hermes_kernel.cell.outputs import CellError, OutputCollector
from hermes_kernel.cell.shown import Budget, Presented, present

from .test_message import KernelVoice

VOICE = KernelVoice()
SMALL = Budget(output=1_000, stderr=300, spill=5_000)
SECRET = "correct-Horse7-battery"


class Kept:
    """A store that is a mapping."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def keep(self, name: str, data: bytes) -> str | None:
        self.files[name] = data
        return f"/kept/{name}"


def shown(*messages: Message, error: CellError | None = None, **how: Any) -> Presented:
    outputs = OutputCollector()
    for message in messages:
        outputs.add(message)
    if error is not None:
        outputs.fail(error)
    return present(outputs, error, **({"budget": SMALL} | how))


def test_what_fits_is_whole() -> None:
    result = shown(VOICE.stream("a\n"), VOICE.stream("e\n", "stderr"), VOICE.result("5"))
    assert (result.text, result.stdout, result.stderr, result.value) == ("a\ne\n5\n", "a\n", "e\n", "5")
    assert (result.bytes_total, result.bytes_shown, result.truncated, result.spill_path) == (
        4,
        4,
        False,
        None,
    )


def test_what_does_not_fit_is_cut_and_kept() -> None:
    store = Kept()
    text = "".join(f"{n}\n" for n in range(1000))
    result = shown(VOICE.stream(text), store=store)
    assert result.truncated
    assert (result.bytes_total, result.counts["stdout"].total) == (len(text), len(text))
    (data,) = store.files.values()
    assert data.decode() == text
    assert result.spill_path is not None
    assert result.spill_path in result.text
    assert f"{len(text):,} bytes" in result.text
    assert (result.text[:4], result.text[-4:]) == ("0\n1\n", "999\n")
    again = Kept()
    shown(VOICE.stream(text), store=again)
    assert again.files == store.files


def test_a_file_that_may_not_hold_all_says_so() -> None:
    store = Kept()
    result = shown(VOICE.stream("x" * 20_000), store=store)
    (data,) = store.files.values()
    assert 5_000 < len(data) < 5_200
    assert "holds 5,000 of 20,000" in result.text


def test_what_the_kernel_has_left_out_is_said_where_it_was() -> None:
    gap = VOICE.stream("end\n", metadata={"hermes": {"skipped": 7_000_000}})
    result = shown(VOICE.stream("begin\n"), gap)
    assert result.text == "begin\n[... 7,000,000 bytes of stdout are not kept ...]\nend\n"
    assert (result.truncated, result.bytes_total, result.bytes_shown) == (True, 7_000_010, 10)
    long = shown(
        VOICE.stream("b" * 5_000), VOICE.stream("e" * 5_000, metadata={"hermes": {"skipped": 90_000}})
    )
    assert "99,000 of 100,000 bytes" in long.text
    assert (long.text[:100], long.text[-100:]) == ("b" * 100, "e" * 100)
    assert long.bytes_total == 100_000


def test_the_count_of_the_kernel_is_the_total() -> None:
    outputs = OutputCollector()
    outputs.add(VOICE.stream("\\xff\n"))
    outputs.written = {"stdout": 2, "stderr": 0}
    result = present(outputs, None)
    assert (result.bytes_total, result.bytes_shown, result.counts["stdout"].total) == (2, 2, 2)


def test_an_exception_is_always_there() -> None:
    error = CellError("ValueError", "the reason", "Traceback\n  line 1\nValueError: the reason")
    result = shown(VOICE.stream("x" * 9_000), error=error)
    assert result.text.endswith("\n  line 1\nValueError: the reason\n")
    assert len(result.text.encode()) <= 2_000
    long = CellError("E", "r" * 100_000, "Traceback\nE: " + "r" * 100_000)
    result = shown(error=long)
    assert "E: rrr" in result.text
    assert len(result.text.encode()) <= 2_000
    assert result.error is not None
    assert len(result.error.evalue) < 3_000


def test_an_exception_that_was_shown_on_the_way_stands_in_its_place() -> None:
    result = shown(VOICE.error(traceback=["first"]), VOICE.stream("then\n"))
    assert result.text == "first\nthen\n"


def test_a_display_is_shown_by_its_text() -> None:
    frame = "<style>td {}</style><table><tr><td>a</td></tr><tr><td>b &amp; c</td></tr></table>"
    assert shown(VOICE.display({"text/html": frame})).text.split() == ["a", "b", "&", "c"]
    assert shown(VOICE.display({"application/json": {"k": [1]}})).text == '{"k": [1]}\n'
    assert shown(VOICE.display({"image/png": "aGk="})).text == "[image/png]\n"
    assert shown(VOICE.display({"text/markdown": "# t", "text/plain": "<o>"})).text == "<o>\n"
    for nothing in (
        "<IPython.core.display.HTML object>",
        "<__main__.D object at 0x7f00>",
        "<__main__.D at 0x7f0>",
    ):
        assert shown(VOICE.display({"text/html": "<b>x</b>", "text/plain": nothing})).text == "x\n"
        assert shown(VOICE.display({"text/plain": nothing})).text == f"{nothing}\n"
    html = VOICE.display({"text/html": f"<b>{SECRET}</b>"})
    assert SECRET not in repr(shown(html, cleaner=Masks([SECRET])))


def test_a_large_image_is_a_file() -> None:
    store = Kept()
    data = b"\x89PNG" + bytes(2_000_000)
    png = base64.b64encode(data).decode()
    result = shown(VOICE.display({"image/png": png, "text/plain": "<Figure>"}), store=store)
    ((name, kept),) = store.files.items()
    assert kept == data
    assert result.text == f"<Figure>\n[image/png of 2,000,004 bytes: /kept/{name}]\n"
    assert result.images == ({"mime": "image/png", "bytes": 2_000_004, "path": f"/kept/{name}"},)
    assert "image/png" not in result.outputs[0]["data"]
    lost = shown(VOICE.display({"image/png": png}))
    assert "left out" in lost.text
    small = shown(VOICE.display({"image/png": "aGk="}), store=store)
    assert small.outputs[0]["data"]["image/png"] == "aGk="
    assert small.images[0]["mime"] == "image/png"


def test_the_standard_error_leaves_room_for_the_rest() -> None:
    result = shown(VOICE.stream("e" * 5_000 + "\n", "stderr"), VOICE.stream("out\n"))
    assert "out\n" in result.text
    assert result.text.count("e") < 350 + 20
    assert result.truncated


def test_a_sequence_that_was_cut_in_two_is_gone() -> None:
    result = shown(VOICE.stream("a\x1b[3"), VOICE.stream("e\n", "stderr"), VOICE.stream("1mb"))
    assert result.stdout == "ab"
    assert shown(VOICE.stream("a\x9b"), VOICE.stream("", "stderr"), VOICE.stream("0mb")).stdout == "ab"
    assert shown(VOICE.stream("end\x1b[")).text == "end"


pieces = st.lists(st.binary(max_size=40), max_size=12)


@given(pieces, st.lists(st.integers(0, 480), max_size=6))
def test_however_bytes_are_cut_the_text_is_the_same_and_within_its_budget(
    written: list[bytes], cuts: list[int]
) -> None:
    text = b"".join(written).decode("utf-8", "backslashreplace")
    budget = Budget(output=100, stderr=50, spill=0)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [VOICE.stream(text[a:b]) for a, b in pairwise(edges)]
    one, many = shown(VOICE.stream(text), budget=budget), shown(*parts, budget=budget)
    assert one.text == many.text
    one.text.encode("utf-8")
    assert one.bytes_shown <= max(100, one.bytes_total * (not one.truncated))
    assert len(one.text.encode()) <= 100 + 1_000


@given(st.text(max_size=200), st.text(max_size=200), st.integers(0, len(SECRET)), st.booleans())
def test_a_secret_is_never_whole(before: str, after: str, cut: int, two_streams: bool) -> None:
    second = "stderr" if two_streams else "stdout"
    messages = (VOICE.stream(f"{before} {SECRET[:cut]}"), VOICE.stream(f"{SECRET[cut:]} {after}", second))
    store = Kept()
    budget = Budget(output=150, stderr=80, spill=300)
    result = shown(*messages, budget=budget, cleaner=Masks([SECRET]), store=store)
    for part in (result.text, result.stdout, result.stderr, repr(result.outputs), repr(store.files)):
        assert SECRET not in part


@pytest.mark.parametrize(
    "text",
    [
        "x" * 8_000_000,
        ("y" * 99 + "\n") * 80_000,
        "\n" * 8_000_000,
        "\r" * 8_000_000,
        "\x1b[" * 4_000_000,
        "a\r" * 4_000_000,
        "é€😀\n" * 700_000,
        "sk-" * 2_600_000,
    ],
    ids=["line", "lines", "newlines", "returns", "escapes", "frames", "wide", "keys"],
)
def test_eight_megabytes_take_no_time_to_speak_of(text: str) -> None:
    outputs = OutputCollector()
    for at in range(0, len(text), 131_072):
        outputs.add(VOICE.stream(text[at : at + 131_072]))
    began = time.monotonic()
    result = present(outputs, None, cleaner=Masks(), store=Kept())
    assert time.monotonic() - began < 30
    assert len(result.text.encode()) <= 51_000


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_part_of_a_secret_is_left_at_a_cut(stream: str) -> None:
    budget = {"stdout": SMALL.output, "stderr": SMALL.stderr}[stream]
    size = len(SECRET)
    for edge in (budget * 2 // 5, 10_000 - budget * 3 // 5):
        for at in range(edge - size - 1, edge + 2):
            text = f"{'a' * at} {SECRET} {'b' * (10_000 - at - size)}"
            result = shown(VOICE.stream(text, stream), cleaner=Masks([SECRET]))
            for part in (result.text, result.stdout, result.stderr, repr(result.outputs)):
                assert not any(SECRET[n : n + 5] in part for n in range(size - 4)), at
