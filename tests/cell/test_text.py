import re
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hermes_kernel.cell.text import (
    Bounded,
    Piece,
    Shown,
    StreamCleaner,
    bound,
    cut,
    fold,
    rejoin,
    strip_controls,
)


def folded(text: str) -> str:
    return joined(fold([("stdout", text)]))


def joined(pieces: list[Piece], stream: str = "stdout") -> str:
    return "".join(text for name, text in pieces if name == stream)


def size(text: str) -> int:
    return len(text.encode())


def notice(omitted: int, total: int) -> str:
    return f"[{omitted} of {total}]"


def seconds(act: Callable[[], object]) -> float:
    """The shorter of two times, for other work may be done on this machine."""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return min(times)


def chunked(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


# Folding

FRAMES = [
    pytest.param("a\nb\n", "a\nb\n", id="nothing to fold"),
    pytest.param("0%\r50%\r100%\n", "100%\n", id="frames"),
    pytest.param("\r0%\r50%\r100%", "100%", id="frames that begin with the return"),
    pytest.param("100%\r", "100%", id="a return at the end"),
    pytest.param("ab  \r", "ab", id="a return at the end, behind blanks"),
    pytest.param("abcdef\rxy\n", "xycdef\n", id="a shorter frame leaves the rest"),
    pytest.param("abcdef\rxy    \n", "xy\n", id="blanks cover the rest"),
    pytest.param("loading\r       \r", "", id="a bar that goes"),
    pytest.param("loading\r       \r\nnext\n", "\nnext\n", id="a bar that goes, and a newline"),
    pytest.param("a\r\nb\r\n", "a\nb\n", id="newlines of Windows"),
    pytest.param("a  \r\r\nb\n", "a  \nb\n", id="newlines of Windows, written as text"),
    pytest.param("x\ra\r\n", "a\n", id="a frame and a newline of Windows"),
    pytest.param("- \b\b\\ \b\b| \b\bok\n", "ok\n", id="a spinner"),
    pytest.param("ab\b\b\b\bX\n", "Xb\n", id="no backspace before the first column"),
    pytest.param(" 1/9 [=> ]\b\b\b\b\b\b\b\b\b\b 9/9 [===]\n", " 9/9 [===]\n", id="keras"),
    pytest.param("abc\r\x1b[Kx\n", "x\n", id="erase to the end"),
    pytest.param("abc\rx\x1b[0K\n", "x\n", id="erase to the end, with its number"),
    pytest.param("abcd\b\b\x1b[1K\n", "   d\n", id="erase to the start, and the cursor's"),
    pytest.param("abc\x1b[1K\rx\n", "x\n", id="erase to the start at the end"),
    pytest.param("abcd\b\x1b[1K\rx\n", "x\n", id="erase all by the start"),
    pytest.param("abcd\b\x1b[1K\r\x1b[1K\n", "\n", id="erase to the start what is erased"),
    pytest.param("abc\x1b[2K\rx\n", "x\n", id="erase the line"),
    pytest.param("ab\x1b[2Kc\rx\n", "x c\n", id="erasing does not move the cursor"),
    pytest.param("abcd\b\b\x1b[1K\bX\x1b[2K\bY\n", " Y\n", id="erase twice"),
    pytest.param("abc\r\x9bKx\n", "x\n", id="erase, as C1"),
    pytest.param("\x1b[31mred\x1b[0m\rgo\n", "god\n", id="colours take no column"),
    pytest.param("\x1b]0;title\x07abc\r\x1b]0;t\x1b\\x\x07\0\n", "xbc\n", id="titles and bells neither"),
    pytest.param("\x1b[31mred\x1b[K\n", "\x1b[31mred\x1b[K\n", id="a line without returns stays"),
    pytest.param("\x1b]0;lost\rab\rX\n", "Xb\n", id="a title that does not end costs one frame"),
    pytest.param("\x1b[3\rab\n", "ab\n", id="a colour that does not end"),
    pytest.param("one\ra\ntwo\nthree\rX\n", "ane\ntwo\nXhree\n", id="each line on its own"),
    pytest.param("é日本\r字\n", "字日本\n", id="a character is a column"),
]


@pytest.mark.parametrize(("text", "shown"), FRAMES)
def test_a_line_is_folded_to_its_last_frame(text: str, shown: str) -> None:
    assert folded(text) == shown


@pytest.mark.parametrize(("text", "shown"), FRAMES)
def test_a_frame_that_comes_in_pieces_is_folded_alike(text: str, shown: str) -> None:
    assert joined(fold([("stdout", character) for character in text])) == shown


def test_the_bar_of_tqdm_is_its_last_frame() -> None:
    frames = [f"\r{done:3}%|{'█' * (done // 10):10}| {done}/100 [00:00<00:01]" for done in range(101)]
    assert fold([("stderr", frame) for frame in frames] + [("stderr", "\n")]) == [
        ("stderr", "100%|██████████| 100/100 [00:00<00:01]\n")
    ]


def test_the_bar_of_pip_is_its_last_frame() -> None:
    start, frame = "Downloading x.whl\n\x1b[?25l", "\r\x1b[2K     \x1b[32m━━\x1b[0m {}/9 MB"
    text = start + "".join(frame.format(done) for done in range(10)) + "\x1b[?25h\nDone\n"
    assert strip_controls(folded(text)) == "Downloading x.whl\n     ━━ 9/9 MB\nDone\n"


def test_a_bar_on_one_stream_leaves_the_lines_of_the_other_in_their_places() -> None:
    pieces = [
        ("stderr", "start\n\r 0%"),
        ("stdout", "first\n"),
        ("stderr", "\r50%"),
        ("stdout", "second\n"),
        ("stderr", "\r100%\nend\n"),
        ("stdout", "third"),
    ]
    assert fold(pieces) == [
        ("stderr", "start\n"),
        ("stdout", "first\n"),
        ("stdout", "second\n"),
        ("stderr", "100%\nend\n"),
        ("stdout", "third"),
    ]


def test_fragments_of_a_line_that_is_not_overwritten_stay_in_their_places() -> None:
    pieces = [("stdout", "x\ry\na"), ("stderr", "!"), ("stdout", "b\r"), ("stderr", "?"), ("stdout", "\nc")]
    assert fold(pieces) == [
        ("stdout", "y\na"),
        ("stderr", "!"),
        ("stdout", "b"),
        ("stderr", "?"),
        ("stdout", "\nc"),
    ]


def test_a_return_and_a_newline_in_two_pieces_are_one_newline() -> None:
    assert fold([("stdout", "a\r"), ("stderr", "\n"), ("stdout", "\nb")]) == [
        ("stdout", "a"),
        ("stderr", "\n"),
        ("stdout", "\nb"),
    ]


def test_a_return_on_one_stream_does_not_overwrite_the_other() -> None:
    assert fold([("stdout", "abc"), ("stderr", "\rx"), ("stdout", "d\n")]) == [
        ("stdout", "abc"),
        ("stderr", "x"),
        ("stdout", "d\n"),
    ]


def test_what_has_no_text_is_left_out() -> None:
    assert fold([]) == []
    assert fold([("stdout", ""), ("stdout", "a"), ("stderr", "\r")]) == [("stdout", "a")]


def test_folding_is_linear() -> None:
    long = "x" * 10**6
    assert seconds(lambda: folded(long + "\r123456" * 10**6)) < 2
    assert seconds(lambda: folded(long + "\r1234\x1b[K" * 10**5)) < 2
    assert seconds(lambda: folded(long + "\b\bX\x1b[2K" * 10**5 + "\r")) < 2
    assert seconds(lambda: folded(long + "\b\bX\x1b[1K" * 10**5 + "\r")) < 2
    assert seconds(lambda: fold([("stdout", long), *[("stdout", "\r123456")] * 10**5])) < 2
    assert seconds(lambda: folded("some text\n" * 800_000)) < 0.1


ERASURES = ["\x1b[K", "\x1b[0K", "\x1b[1K", "\x1b[2K"]
SEQUENCES = [*ERASURES, "\x1b[31m", "\x1b]0;t\x07", "\x1b", "\x9b"]
FRAME_TEXT = st.lists(st.sampled_from([*"ab \r\r\b\n\té", *SEQUENCES])).map("".join)
PIECES = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), FRAME_TEXT), max_size=8)


def naive_row(line: str) -> str:
    """A terminal as one would write it down, for lines without sequences other than those that erase."""
    cells: dict[int, str] = {}
    column = 0
    for token in re.findall(r"\x1b\[[012]?K|[\s\S]", line):
        match token:
            case "\r":
                column = 0
            case "\b":
                column = max(0, column - 1)
            case "\x1b[1K":
                cells = {at: cell for at, cell in cells.items() if at > column}
            case "\x1b[2K":
                cells = {}
            case "\x1b[K" | "\x1b[0K":
                cells = {at: cell for at, cell in cells.items() if at < column}
            case _:
                cells[column] = token
                column += 1
    return "".join(cells.get(at, " ") for at in range(max(cells, default=-1) + 1)).rstrip()


@given(st.lists(st.sampled_from([*"abc  \r\b\b", *ERASURES])).map("".join))
def test_a_folded_line_is_what_a_terminal_shows(line: str) -> None:
    assert folded(line + "\b") == naive_row(line)


@given(PIECES, st.lists(st.integers(0, 50)))
def test_folding_does_not_depend_on_the_pieces(pieces: list[Piece], cuts: list[int]) -> None:
    once = fold(pieces)
    for stream in ("stdout", "stderr"):
        other = fold([(stream, chunk) for chunk in chunked(joined(pieces, stream), cuts)])
        assert joined(once, stream) == joined(other, stream)


@given(PIECES)
def test_folding_twice_is_folding_once(pieces: list[Piece]) -> None:
    once = fold(pieces)
    assert fold(once) == once
    assert not any("\r" in text or "\b" in text or not text for _, text in once)


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text(st.sampled_from("ab \n")))))
def test_what_is_not_overwritten_stays(pieces: list[Piece]) -> None:
    kept = [piece for piece in pieces if piece[1]]
    assert fold(pieces) == kept
    assert [p for p in fold([*pieces, ("stdout", "\n\r\bx")]) if p[0] == "stderr"] == [
        p for p in kept if p[0] == "stderr"
    ]


@given(st.integers(0, 3000), st.text(st.sampled_from("#=- 1%"), max_size=60))
def test_a_bar_is_never_truncated(frames: int, frame: str) -> None:
    text = folded(f"\r{frame}" * frames)
    assert cut(bound(text, 100, 10), 100, notice=notice) == Shown(text, size(text), size(text), False)


# Stripping


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        pytest.param("\x1b[1;31mred\x1b[0m", "red", id="colours"),
        pytest.param("\x1b[?25l\x1b[2J\x1b[H\x1b[>4;2mx\x1b[ q\x1b[1 @", "x", id="CSI of all forms"),
        pytest.param("\x9b31mred\x9b0m", "red", id="C1 CSI"),
        pytest.param("\x1b]0;title\x07x", "x", id="OSC to BEL"),
        pytest.param("\x1b]0;title\x1b\\x", "x", id="OSC to ST"),
        pytest.param("\x9d0;title\x9cx", "x", id="C1 OSC"),
        pytest.param("\x1b]8;;https://e.org\x1b\\link\x1b]8;;\x1b\\!", "link!", id="a link's text stays"),
        pytest.param("a\x1b]52;c;cm0gLXJm\x07b", "ab", id="the clipboard is not set"),
        pytest.param("\x1bPq#0;2;0\x07~\x1b\\x", "x", id="DCS, not ended by BEL"),
        pytest.param("\x1bXsos\x1b\\\x1b^pm\x1b\\\x1b_apc\x1b\\x", "x", id="SOS, PM, APC"),
        pytest.param("\x90dcs\x9c\x98sos\x9c\x9epm\x9c\x9fapc\x9cx", "x", id="C1 strings"),
        pytest.param("\x1bPtmux;\x1b\x1b]52;c;YQ==\x07\x1b\\x", "x", id="a string in a string"),
        pytest.param("\x1b(B\x1b)0\x1b#8\x1b %Gx", "x", id="nF"),
        pytest.param("\x1b7\x1b8\x1b=\x1b>\x1bM\x1bD\x1bc\x1b~x", "x", id="Fp, Fe, Fs"),
        pytest.param("\x84\x85\x8d\x80\x9ax", "x", id="C1 alone"),
        pytest.param("a\0b\x07c\x0bd\x0ce\x7ff\x18g\x1ah", "abcdefgh", id="C0 and DEL"),
        pytest.param("a\r\nb\rc\r\r\n\bd\te", "a\nbc\nd\te", id="returns go, tabs and newlines stay"),
        pytest.param("a\u202eb\u202c\u2066c\u2069\u200ed\u200f", "abcd", id="directions"),
        pytest.param("x\x1b", "x", id="an escape at the end"),
        pytest.param("x\x1b[1;3", "x", id="half of a CSI"),
        pytest.param("x\x1b(", "x", id="half of an nF"),
        pytest.param("x\x1b]0;tit", "x", id="half of an OSC"),
        pytest.param("\x1b]0;tit\nnext", "\nnext", id="an OSC ends with its line"),
        pytest.param("\x1b]0;tit\r\nnext", "\nnext", id="an OSC ends with its line on Windows"),
        pytest.param("\x1bPdata\nnext", "\nnext", id="a DCS ends with its line"),
        pytest.param("\x1b]0;tit\x1b[1mbold", "bold", id="an OSC ends with the next sequence"),
        pytest.param("\x1b[31é\x1b\nx", "é\nx", id="what is no sequence stays"),
        pytest.param("\x1b\x1b[1m\x1b[\x1b[0mx", "x", id="nothing forms a sequence afterwards"),
        pytest.param("\ud83d\ude00\udcff", "\\ud83d\\ude00\\udcff", id="lone surrogates"),
    ],
)
def test_what_a_terminal_would_obey_goes(text: str, plain: str) -> None:
    assert strip_controls(text) == plain


@pytest.mark.parametrize(
    "text",
    [
        "plain\n\ttext [31m 0;title",
        "déjà e\u0301 ÿ\xa0«»",
        "日本語 한국어 العربية עברית",
        "👩‍👩‍👧 ❤️ 🏳️‍🌈 🇩🇪 👍🏽",
        "a\u200cb\u200dc\u2028d\ufeffe\U000e0001",
        "",
    ],
)
def test_what_a_reader_would_see_stays(text: str) -> None:
    assert strip_controls(text) == text


@pytest.mark.parametrize("begin", ["\x1b]", "\x9d", "\x1bP", "\x90", "\x1b_", "\x9f"])
def test_a_string_that_does_not_end_costs_little(begin: str) -> None:
    assert strip_controls(begin + "x" * 10_000) == "x" * (10_000 - 4096)


@pytest.mark.parametrize(
    "part",
    [
        "\x1b[",
        "\x1b]",
        "\x1b",
        "\x9d",
        "\x9b",
        "\x1bP",
        "\x90",
        "\x1b]a",
        "\x9da",
        "\x1b ",
        "\x1b[1",
        "\x1b[1m",
    ],
)
def test_stripping_is_linear(part: str) -> None:
    assert seconds(lambda: strip_controls(part * 10**6)) < 2


# What a sequence that has not ended looks like: the rejoined pieces are searched for it in another way.
UNFINISHED = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x1b\x9c\r\n]{0,4096}\Z"
    r"|\x1b[ -/]*\Z"
)


@given(st.text("\x1b[]PX\x9b\x90\x98\x9d\x9e\x9c\x07\x18\r\n 0;ma", max_size=30))
@example("\x9d" + "a" * 4096)
@example("\x9d" + "a" * 4097)
@example("\x1b]" + "a" * 4096)
@example("\x1b]" + "a" * 4097)
@example("\x9d" * 5000)
@example("\x9b0\x9d\x9b1")
def test_a_sequence_without_its_end_goes_on_in_the_next_piece(text: str) -> None:
    unfinished = UNFINISHED.search(text, max(len(text) - 4104, 0))
    begun = "" if unfinished is None else unfinished[0]
    pieces = rejoin([("stdout", text), ("stderr", "x"), ("stdout", "\n")])
    assert pieces == [("stdout", text[: len(text) - len(begun)]), ("stderr", "x"), ("stdout", f"{begun}\n")]


@pytest.mark.parametrize(
    "piece",
    [
        begin * 4096 + end
        for begin in ("\x9d", "\x90", "\x9b", "\x1b", "\x1b]", "\x9d\x9b")
        for end in ("\x07", "")
    ],
    ids=lambda piece: ascii(piece[:2] + piece[-1]),
)
def test_pieces_are_rejoined_in_linear_time(piece: str) -> None:
    pieces = [("stdout", piece), ("stderr", "x")] * 500
    assert seconds(lambda: rejoin(pieces)) < 1


@pytest.mark.parametrize("text", ["some text\n" * 800_000, "日本語の\n" * 600_000, "some text…\n" * 600_000])
def test_what_has_no_controls_is_stripped_fast(text: str) -> None:
    assert seconds(lambda: strip_controls(text)) < 0.15


CONTROLS = st.text(
    st.sampled_from("ab \n\t\r\b\0\x07[]PX^_\\;?01mK(B\x1b\x1b\x1b\x9b\x9c\x9d\x90\x84é日\u202e\u200d\ud800")
)


@given(CONTROLS | st.text())
def test_no_control_but_newlines_and_tabs_is_left(text: str) -> None:
    plain = strip_controls(text)
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", plain
    )
    assert strip_controls(plain) == plain
    assert plain.count("\n") == text.count("\n")


@given(st.lists(CONTROLS))
def test_lines_can_be_stripped_alone(lines: list[str]) -> None:
    for end in ("\n", "\r"):
        assert strip_controls(end.join(lines)) == strip_controls(end).join(map(strip_controls, lines))


# The coarse bound


def test_a_text_with_room_is_not_bounded() -> None:
    assert bound("x" * 30, 10, 10) == Bounded("x" * 30, 0, "")


def test_the_middle_of_a_larger_text_is_left_out() -> None:
    text = "".join(chr(ord("0") + at % 75) for at in range(31))
    assert bound(text, 10, 10) == Bounded(text[:14], 1, text[15:])


def test_a_bound_is_between_characters() -> None:
    assert bound("é" * 20, 5, 3) == Bounded("é" * 2, 30, "é" * 3)


@given(st.text(), st.integers(0, 60), st.integers(0, 20))
def test_a_bound_loses_what_it_says(text: str, budget: int, margin: int) -> None:
    bounded = bound(text, budget, margin)
    head, tail = size(bounded.head), size(bounded.tail)
    assert head + bounded.gap + tail == size(text)
    assert text.startswith(bounded.head)
    assert text.endswith(bounded.tail)
    if size(text) <= budget + 2 * margin:
        assert bounded == Bounded(text, 0, "")
    else:
        assert int(budget * 0.4) + margin - 3 <= head <= int(budget * 0.4) + margin
        assert budget - int(budget * 0.4) + margin - 3 <= tail <= budget - int(budget * 0.4) + margin


# The exact cut


def shown(text: str, budget: int, *, extra: int = 0, lines: bool = True) -> Shown:
    return cut(Bounded(text, 0, ""), budget, notice=notice, extra=extra, lines=lines)


def test_a_text_within_the_budget_is_unchanged() -> None:
    assert shown("é" * 5, 10) == Shown("é" * 5, 10, 10, truncated=False)


def test_a_larger_text_shows_its_front_and_its_end() -> None:
    assert shown("0123456789abcdef", 10) == Shown("0123\n[6 of 16]\nabcdef", 16, 10, truncated=True)


def test_the_notice_is_on_a_line_of_its_own() -> None:
    assert shown("012\n\n456789abcdef", 10).text == "012\n[7 of 17]\nabcdef"
    assert shown("0123456789\nbcdef", 10).text == "0123\n[6 of 16]\n\nbcdef"


def test_a_cut_is_between_characters() -> None:
    assert shown("é" * 10, 10) == Shown("éé\n[10 of 20]\nééé", 20, 10, truncated=True)
    assert shown("é" * 10, 9) == Shown("é\n[12 of 20]\nééé", 20, 8, truncated=True)
    assert shown("😀" * 9, 9) == Shown("[32 of 36]\n😀", 36, 4, truncated=True)


def test_no_budget_leaves_only_the_notice() -> None:
    assert shown("abc\n" * 1000, 0) == Shown("[4000 of 4000]\n", 4000, 0, truncated=True)


def test_what_the_bound_left_out_is_counted() -> None:
    bounded = Bounded("0123456", 100, "abcdefgh")
    assert cut(bounded, 10, notice=notice) == Shown("0123\n[105 of 115]\ncdefgh", 115, 10, truncated=True)
    assert cut(bounded, 100, notice=notice) == Shown(
        "0123456\n[100 of 115]\nabcdefgh", 115, 15, truncated=True
    )


def test_what_was_lost_before_is_counted_and_told() -> None:
    assert shown("0123456789abcdef", 10, extra=4).text == "0123\n[10 of 20]\nabcdef"
    assert shown("0123456789", 10, extra=4) == Shown("0123\n[4 of 14]\n456789", 14, 10, truncated=True)
    assert shown("", 10, extra=4) == Shown("[4 of 4]\n", 4, 0, truncated=True)


def test_a_huge_line_does_not_push_the_others_out() -> None:
    text = "start\n" + "x" * 5000 + "y" * 5000 + "\nend\n"
    clamped = "start\n" + "x" * 500 + "…[9,000 bytes TRUNCATED]…" + "y" * 500 + "\nend\n"
    assert shown(text, 2000) == Shown(clamped, 10_011, 1011, truncated=True)


def test_a_line_is_clamped_to_a_tenth_of_a_large_budget() -> None:
    text = "a\n" + "x" * 29_999 + "\n" + "y" * 2000 + "\n"
    clamped = "a\n" + "x" * 1000 + "…[27,999 bytes TRUNCATED]…" + "x" * 1000 + "\n" + "y" * 2000 + "\n"
    assert shown(text, 20_000).text == clamped


def test_clamped_lines_are_cut_as_well() -> None:
    result = shown(("x" * 3000 + "\n") * 10, 2000)
    front = "x" * 500 + "…[2,000 bytes TRUNCATED]…" + "x" * 300
    back = "x" * 198 + "\n" + "x" * 500 + "…[2,000 bytes TRUNCATED]…" + "x" * 500 + "\n"
    assert result == Shown(f"{front}\n[28010 of 30010]\n{back}", 30_010, 2000, truncated=True)


def test_a_line_is_clamped_between_characters() -> None:
    result = shown("a\n" + "日" * 1000, 1500)
    assert result.text == "a\n" + "日" * 166 + "…[2,004 bytes TRUNCATED]…" + "日" * 166
    assert (result.bytes_total, result.bytes_shown) == (3002, 998)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_single_line_is_cut_and_not_clamped(end: str) -> None:
    result = shown("x" * 9000 + end, 5000)
    assert result.text.startswith("x" * 2000 + "\n[")
    assert result.bytes_shown == 5000


def test_lines_are_clamped_only_where_that_is_wanted_and_needed() -> None:
    text = "start\n" + "x" * 3000 + "\nend\n"
    assert shown(text, 4000).text == text
    assert shown(text, 4000, extra=5).bytes_shown == len(text)
    front, back = "start\n" + "x" * 794, "x" * 1195 + "\nend\n"
    assert shown(text, 2000, lines=False).text == f"{front}\n[1011 of 3011]\n{back}"


def test_lines_beside_a_gap_are_clamped() -> None:
    bounded = Bounded("a\n" + "x" * 3000, 7, "y" * 3000 + "\nb\n")
    result = cut(bounded, 4000, notice=notice)
    mark = "…[2,000 bytes TRUNCATED]…"
    front, back = f"a\n{'x' * 500}{mark}{'x' * 500}", f"{'y' * 500}{mark}{'y' * 500}\nb\n"
    assert result == Shown(f"{front}\n[4007 of 6012]\n{back}", 6012, 2005, truncated=True)


@given(
    st.text() | st.text(st.sampled_from("aé日😀\n")),
    st.integers(0, 60),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_a_cut_is_right_to_the_byte(text: str, budget: int, margin: int, extra: int) -> None:
    bounded = bound(text, budget, margin)
    result = cut(bounded, budget, notice=lambda omitted, total: f"<{omitted}|{total}>", extra=extra)
    total = size(text) + extra
    assert result.bytes_total == total
    assert result.bytes_shown <= budget
    assert result.truncated == (total > result.bytes_shown)
    if extra == 0 and size(text) <= budget:
        assert result == Shown(text, total, total, truncated=False)
        return
    said = f"<{total - result.bytes_shown}|{total}>\n"
    head, _, tail = result.text.partition(said)
    kept = size(head) + size(tail) - result.bytes_shown
    assert kept in (0, 1)  # the newline before the notice
    head = head[: len(head) - kept]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert size(head) <= budget * 0.4
    assert size(tail) <= budget - int(budget * 0.4) or size(text) <= budget
    assert result.bytes_shown >= min(size(text), budget - 6)


@given(
    st.lists(st.tuples(st.sampled_from("x日"), st.integers(0, 2500)), max_size=12),
    st.integers(0, 8000),
    st.integers(0, 500),
)
def test_clamped_bytes_are_not_counted_as_shown(
    runs: list[tuple[str, int]], budget: int, margin: int
) -> None:
    text = "\n".join(character * count for character, count in runs)
    result = cut(bound(text, budget, margin), budget, notice=lambda omitted, total: f"<{omitted}|{total}>")
    ours = re.sub(r"…\[[\d,]+ bytes TRUNCATED\]…|<\d+\|\d+>", "", result.text)
    assert result.bytes_total == size(text)
    assert result.bytes_shown <= budget
    assert size(ours) - 2 <= result.bytes_shown <= size(ours)
    assert result.truncated == (size(text) > budget)


# Telling while it runs


def tell(cleaner: StreamCleaner, *texts: str) -> list[str]:
    return [joined(cleaner.feed("stdout", text)) for text in texts]


def masked(text: str) -> str:
    return re.sub(r"secret\w*", "***", text)


def test_whole_lines_are_told() -> None:
    cleaner = StreamCleaner(str.upper)
    assert tell(cleaner, "a", "b\nc", "\n", "d\r", "\ne") == ["", "AB\n", "C\n", "D", "\n"]
    assert cleaner.finish() == [("stdout", "E")]
    assert cleaner.finish() == []


def test_streams_are_held_apart() -> None:
    cleaner = StreamCleaner(str.upper)
    assert cleaner.feed("stdout", "a") == []
    assert cleaner.feed("stderr", "b\nc") == [("stderr", "B\n")]
    assert cleaner.feed("stdout", "d\n") == [("stdout", "AD\n")]
    assert cleaner.finish() == [("stderr", "C")]


def test_a_secret_in_two_pieces_is_masked() -> None:
    assert tell(StreamCleaner(masked), "x sec", "ret1", "23\n") == ["", "", "x ***\n"]


def test_a_secret_with_colours_in_it_is_masked() -> None:
    assert tell(StreamCleaner(masked), "sec\x1b[1mret\0abc\n") == ["***\n"]


def test_a_long_line_is_told_but_for_its_end() -> None:
    cleaner = StreamCleaner(str, hold=10)
    assert tell(cleaner, "x" * 25, "y" * 10, "\n") == ["x" * 15, "x" * 10, "y" * 10 + "\n"]


def test_a_long_line_is_parted_between_words() -> None:
    cleaner = StreamCleaner(masked, hold=4)
    assert tell(cleaner, "words and secret123", "45 end.", "\n") == ["words and ", "*** ", "end.\n"]


def test_a_long_line_is_not_parted_in_an_escape_sequence() -> None:
    cleaner = StreamCleaner(str, hold=4)
    assert tell(cleaner, "xxxx\x1b[38;5;196", "mred\n") == ["xxxx", "red\n"]
    assert tell(cleaner, "xxxx\x1b]0;a long title", " of two\x07yyyyy", "\n") == ["xxxx", "", "yyyyy\n"]


KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIB\n" * 20 + "-----END RSA PRIVATE KEY-----\n"


def pem(text: str) -> str:
    return re.sub(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----", "<key>", text
    )


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
@pytest.mark.parametrize("hold", [8, 4096])
@pytest.mark.parametrize(
    "text",
    [
        f"a\nkey: {KEY}b\n{KEY}{KEY}c",
        f"a\n{KEY}".replace("\n", "\r\n"),
        f"a\n{KEY}".replace("\n", "\\n"),
        f"words {KEY}".replace("RSA PRIVATE", "RSA \x1b[1mPRIVATE\x1b[0m"),
    ],
)
def test_a_private_key_is_seen_whole(text: str, step: int, hold: int) -> None:
    cleaner = StreamCleaner(pem, hold)
    told = [
        piece for at in range(0, len(text), step) for piece in cleaner.feed("stdout", text[at : at + step])
    ]
    assert joined([*told, *cleaner.finish()]) == pem(strip_controls(text))


def test_lines_before_a_private_key_are_told() -> None:
    cleaner = StreamCleaner(pem)
    assert tell(cleaner, "a\nb " + KEY[:80], KEY[80:] + "c\nd") == ["a\n", "b <key>\nc\n"]


def test_a_public_key_is_not_waited_for() -> None:
    text = "-----BEGIN PUBLIC KEY-----\nabc\n"
    assert tell(StreamCleaner(pem), text) == [text]


def test_a_private_key_without_an_end_is_told_at_last() -> None:
    cleaner, line = StreamCleaner(pem), "M" * 63 + "\n"
    told = tell(cleaner, KEY[:32], *[line] * 1024)
    assert told == [""] * 1024 + [KEY[:32] + line * 1024]
    assert tell(cleaner, line) == [line]
    assert tell(cleaner, KEY[:50]) == [""]
    assert cleaner.finish() == [("stdout", KEY[:50])]


TOLD_PARTS = ["\r\n", "sec", "ret", "\x1b[1m", "\x1b]0;t\x1b\\", KEY[:32], KEY[-30:], KEY]
TOLD = st.lists(st.sampled_from([*"ab \n\n\té日\x1b\x9b\x9d\x07[]m", *TOLD_PARTS])).map("".join)


@given(TOLD, st.lists(st.integers(0, 200)))
@example(KEY + "secret", [3, 40, 100, 215])
def test_what_is_told_is_the_cleaned_text(text: str, cuts: list[int]) -> None:
    cleaner = StreamCleaner(masked)
    told = [piece for chunk in chunked(text, cuts) for piece in cleaner.feed("stdout", chunk)]
    assert joined([*told, *cleaner.finish()]) == masked(strip_controls(text))
    assert all(chunk for _, chunk in told)


@given(CONTROLS, st.lists(st.integers(0, 50)), st.integers(1, 20))
def test_nothing_is_lost_or_torn_for_its_length(text: str, cuts: list[int], hold: int) -> None:
    cleaner = StreamCleaner(str.upper, hold)
    told = [piece for chunk in chunked(text, cuts) for piece in cleaner.feed("stdout", chunk)]
    assert joined([*told, *cleaner.finish()]) == strip_controls(text).upper()


@pytest.mark.parametrize(
    "part", ["x", "x y", "-----", "x" * 999, "\x1b[1m-", "-----BEGIN RSA PRIVATE KEY-----"]
)
def test_what_is_held_is_bounded(part: str) -> None:
    cleaner = StreamCleaner(str)
    told = sum(len(joined(cleaner.feed("stdout", part))) for _ in range(3000))
    held = len(joined(cleaner.finish()))
    assert told + held == len(strip_controls(part)) * 3000
    assert held < 64 * 1024 + 2 * 4096
