import sys
import threading

import pytest

from hermes_kernel.kernel.displays import (
    BUNDLE_BYTES,
    HELD_BYTES,
    HELD_UPDATES,
    LIVE_BYTES,
    LIVE_DISPLAYS,
    MIB,
    SENT_BYTES,
    TEXT_BYTES,
    Bundle,
    CellDisplays,
    Kind,
    Slot,
    size_of,
)

DISPLAY = Slot(Kind.DISPLAY)
VALUE = Slot(Kind.VALUE)
NOTHING = {"displays": 0, "bytes": 0}


class Cell:
    """Displays by name, and in which order they are sent."""

    def __init__(self) -> None:
        self.displays = CellDisplays()
        self.sent: list[str] = []
        self.begin, self.clear = self.displays.begin, self.displays.clear

    def show(self, name: str, size: int = 10, slot: Slot = DISPLAY) -> None:
        if self.displays.admit(slot, size, lambda: self.sent.append(name)):
            self.sent.append(name)

    def update(self, display_id: str, name: str, size: int = 10) -> None:
        self.show(name, size, Slot(Kind.UPDATE, display_id))

    def finish(self) -> tuple[list[str], dict[str, int]]:
        self.sent.clear()
        left_out = self.displays.finish()
        return list(self.sent), left_out

    def fill(self) -> None:
        for _ in range(LIVE_DISPLAYS):
            self.show("live", 1)


@pytest.fixture
def cell() -> Cell:
    cell = Cell()
    cell.begin()
    return cell


def test_what_a_cell_may_show_is_sent_at_once(cell: Cell) -> None:
    cell.fill()
    assert cell.sent == ["live"] * LIVE_DISPLAYS
    assert cell.finish() == ([], NOTHING)


def test_of_too_many_displays_the_last_one_is_sent_at_the_end_and_the_others_are_counted(cell: Cell) -> None:
    cell.fill()
    for number in range(5):
        cell.show(f"more {number}", 100)
    assert cell.sent == ["live"] * LIVE_DISPLAYS
    assert cell.finish() == (["more 4"], {"displays": 4, "bytes": 400})
    assert cell.finish() == ([], {"displays": 4, "bytes": 400})


def test_of_too_much_data_the_last_display_is_sent_at_the_end_and_what_fits_before(cell: Cell) -> None:
    cell.show("first", LIVE_BYTES)
    cell.show("second", 1)
    cell.show("third", 1)
    assert cell.sent == ["first"]
    assert cell.finish() == (["third"], {"displays": 1, "bytes": 1})
    cell.begin()
    cell.show("large", LIVE_BYTES + 1)
    cell.show("small", 1)
    assert cell.sent[-1] == "small"
    assert cell.finish() == (["large"], NOTHING)


def test_a_new_cell_may_show_as_much_again(cell: Cell) -> None:
    cell.fill()
    cell.show("more")
    cell.finish()
    cell.begin()
    cell.show("next")
    assert cell.sent[-1] == "next"
    assert cell.finish() == ([], NOTHING)


def test_what_a_thread_shows_between_two_cells_is_sent_when_the_next_one_ends(cell: Cell) -> None:
    cell.fill()
    cell.finish()
    cell.show("of a thread")
    cell.begin()
    assert cell.finish() == (["of a thread"], NOTHING)


def test_the_value_is_not_displaced_by_displays(cell: Cell) -> None:
    cell.fill()
    cell.show("value", slot=VALUE)
    cell.show("more")
    cell.show("last")
    assert cell.finish() == (["value", "last"], {"displays": 1, "bytes": 10})


def test_of_each_display_id_the_last_update_is_sent_and_none_is_left_out(cell: Cell) -> None:
    cell.fill()
    for number in range(3):
        for display_id in "ab":
            cell.update(display_id, f"{display_id} {number}")
    cell.update("a", "a last")
    assert cell.finish() == (["b 2", "a last"], NOTHING)


def test_an_update_that_fits_takes_the_place_of_one_that_is_held_back(cell: Cell) -> None:
    cell.update("a", "large", LIVE_BYTES + 1)
    cell.update("a", "small", 1)
    assert cell.sent == ["small"]
    assert cell.finish() == ([], NOTHING)


def test_updates_are_held_back_for_so_many_displays_only(cell: Cell) -> None:
    cell.fill()
    cell.show("display")
    for number in range(HELD_UPDATES + 2):
        cell.update(str(number), str(number))
    sent, left_out = cell.finish()
    assert sent == [str(number) for number in range(1, HELD_UPDATES + 2)][-HELD_UPDATES:]
    assert left_out == {"displays": 3, "bytes": 30}


def test_what_is_held_back_takes_bounded_memory_and_the_last_is_never_dropped(cell: Cell) -> None:
    cell.fill()
    size = HELD_BYTES // 4
    for number in range(6):
        cell.update(str(number), str(number), size)
    assert cell.finish() == (["2", "3", "4", "5"], {"displays": 2, "bytes": 2 * size})
    cell.update("x", "huge", HELD_BYTES + 1)
    assert cell.finish()[0] == ["huge"]


def test_what_was_cleared_is_neither_sent_nor_counted(cell: Cell) -> None:
    cell.fill()
    cell.show("more")
    cell.show("last")
    cell.clear(wait=False)
    assert cell.finish() == ([], NOTHING)
    cell.show("after")
    assert cell.sent == ["after"]


def test_a_clear_that_waits_takes_effect_with_the_next_display(cell: Cell) -> None:
    cell.fill()
    cell.show("more")
    cell.clear(wait=True)
    cell.show("after")
    assert cell.sent[-1] == "after"
    assert cell.finish() == ([], NOTHING)


def test_a_clear_that_nothing_follows_does_not_let_what_it_would_clear_clear_the_rest(cell: Cell) -> None:
    cell.fill()
    cell.show("more")
    cell.clear(wait=True)
    assert cell.finish() == ([], {"displays": 1, "bytes": 10})


def test_a_long_animation_ends_with_its_last_frame(cell: Cell) -> None:
    frames = SENT_BYTES // (10 * MIB) + 5
    for number in range(frames):
        cell.show(f"frame {number}", 10 * MIB)
        cell.clear(wait=True)
    assert len(cell.sent) == SENT_BYTES // (10 * MIB)
    cell.show("end", 10 * MIB)
    assert cell.finish() == (["end"], NOTHING)


def test_a_display_that_cannot_be_sent_at_the_end_does_not_keep_the_others(
    cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise TypeError("not any more")

    cell.fill()
    cell.displays.admit(VALUE, 1, fail)
    cell.show("last")
    assert cell.finish()[0] == ["last"]
    assert "a display was lost" in caplog.text


def test_threads_lose_no_count(cell: Cell) -> None:
    cell.fill()
    threads = [threading.Thread(target=lambda: [cell.show("x", 1) for _ in range(2000)]) for _ in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert cell.finish() == (["x"], {"displays": 15_999, "bytes": 15_999})


def test_a_bundle_within_its_bounds_is_sent_as_it_is() -> None:
    data = {"text/plain": "a" * 10, "image/png": b"123", "application/json": {"a": 1}}
    bundle = Bundle.of(data, {"width": 3})
    assert (bundle.data, bundle.metadata, bundle.size) == (data, {"width": 3}, 10 + 3 + 8 + 12)
    assert bundle.data is not data


def test_a_bundle_that_is_too_large_keeps_its_text_and_says_what_is_missing() -> None:
    bundle = Bundle.of({"text/plain": "a table", "text/html": "x" * (BUNDLE_BYTES + 1)}, {"width": 3})
    assert list(bundle.data) == ["text/plain"]
    assert bundle.data["text/plain"].startswith("a table\n[left out: text/html of 33,554,433 bytes; ")
    assert "text/plain" not in bundle.data["text/plain"]
    assert bundle.metadata == {}
    assert bundle.size < 2 * TEXT_BYTES


def test_what_is_said_about_a_display_counts_as_a_part_of_it() -> None:
    whole = Bundle.of({"text/plain": "a"}, {"image/png": {"alt": "x" * 1000}})
    assert whole.size > 1000
    assert whole.metadata["image/png"]
    cut = Bundle.of({"text/plain": "a"}, {"image/png": {"alt": "x" * BUNDLE_BYTES}})
    assert cut.metadata == {}
    assert cut.data["text/plain"].startswith("a\n[left out: metadata of 33,554,")


def test_a_text_that_is_too_large_is_cut_and_says_so() -> None:
    bundle = Bundle.of({"text/plain": "é" * BUNDLE_BYTES}, {})
    text = bundle.data["text/plain"]
    assert text.startswith("é" * (TEXT_BYTES // 2) + "\n[left out: text/plain of 67,108,864 bytes; ")
    assert len(text.encode()) < TEXT_BYTES + 200


class Odd:
    def __len__(self) -> int:
        raise ValueError("not even a length")


@pytest.mark.parametrize("value", [object(), {1, object()}, Odd()], ids=["object", "set", "odd"])
def test_a_form_that_is_no_json_is_left_out_and_the_others_stay(value: object) -> None:
    bundle = Bundle.of({"text/plain": "x", "text/html": value}, {})
    assert bundle.data == {"text/plain": f"x\n[left out: text/html (no JSON: {type(value).__name__})]"}


def test_a_bundle_of_which_nothing_can_be_sent_is_left_for_ipykernel_to_refuse() -> None:
    data = {"text/html": object()}
    assert Bundle.of(data, {}).data == data


@pytest.mark.parametrize(
    ("value", "size"),
    [("abc", 3), ("é", 2), ("\ud800", 3), (b"\xff", 1), (None, 4), ([1, 2], 6), ({1: 2}, 8), (Odd, None)],
)
def test_a_value_is_as_large_as_what_is_sent_of_it(value: object, size: int | None) -> None:
    assert size_of(value) == size
