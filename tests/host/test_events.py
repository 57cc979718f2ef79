import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel.cell.events import CellEvent, Display, StreamText, ToolCallEnded, ToolCallStarted
from hermes_kernel.cell.masks import Masks
from hermes_kernel.host import events as module
from hermes_kernel.host.events import EventPump

from .. import traces
from ..cell.test_message import KernelVoice

VOICE = KernelVoice()
SECRET = "hunter2-is-mine"


def pumped(*told: Any, on_event: Callable[[CellEvent], object] | None = None) -> list[CellEvent]:
    events: list[CellEvent] = []
    pump = EventPump(on_event or events.append, Masks([SECRET]))  # type: ignore[arg-type]
    for one in told:
        if isinstance(one, ToolCallStarted | ToolCallEnded):
            pump.tell(one)
        else:
            pump.tell_message(one)
    asyncio.run(pump.close())
    return events


def test_events_come_in_their_order() -> None:
    call = ToolCallStarted(1, "f", "x=1")
    told = pumped(
        VOICE.stream("a\n"), VOICE.display("d"), call, VOICE.stream("b\n", "stderr"), VOICE.result("5")
    )
    assert told == [
        StreamText("stdout", "a\n"),
        Display({"text/plain": "d"}),
        call,
        StreamText("stderr", "b\n"),
        Display({"text/plain": "5"}),
    ]


def test_a_secret_is_masked_however_it_is_cut() -> None:
    for cut in range(1, len(SECRET)):
        told = pumped(VOICE.stream(f"a {SECRET[:cut]}"), VOICE.stream(f"{SECRET[cut:]} b\n"))
        assert "".join(event.text for event in told if isinstance(event, StreamText)) == "a *** b\n"
    (shown,) = pumped(VOICE.display({"text/html": f"<b>{SECRET}</b>", "application/json": {"k": [SECRET]}}))
    assert SECRET not in repr(shown)


def test_the_rest_of_a_line_is_told_at_the_end() -> None:
    assert pumped(VOICE.stream("no newline")) == [StreamText("stdout", "no newline")]
    assert pumped() == []


def test_what_it_raises_is_logged_and_the_rest_is_told(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def broken(event: CellEvent) -> None:
        seen.append(event)
        raise ValueError("the caller's own")

    pumped(VOICE.stream("a\n"), VOICE.display("d"), on_event=broken)
    assert len(seen) == 2
    assert "on_event failed" in caplog.text


def test_one_that_takes_its_time_misses_text_and_is_told_how_much() -> None:
    go, begun = threading.Event(), threading.Event()
    seen: list[CellEvent] = []

    def slow(event: CellEvent) -> None:
        seen.append(event)
        begun.set()
        go.wait(30)

    pump = EventPump(slow, Masks())
    pump.tell_message(VOICE.stream("first\n"))
    assert begun.wait(30)
    line = "x" * 99 + "\n"
    for _ in range(3 * module.MAX_WAITING // 100):
        pump.tell_message(VOICE.stream(line))
    go.set()
    asyncio.run(pump.close())
    texts = [event for event in seen if isinstance(event, StreamText)]
    told = sum(len(event.text) for event in texts)
    skipped = sum(event.skipped for event in texts)
    assert skipped > 0
    assert told + skipped == 6 + 3 * module.MAX_WAITING // 100 * 100


def test_one_that_never_returns_does_not_hold_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "DELIVERY", 0.1)
    go = threading.Event()
    pump = EventPump(lambda _: go.wait(30), Masks())  # type: ignore[arg-type, return-value]
    pump.tell_message(VOICE.stream("a\n"))
    asyncio.run(pump.close())
    assert "takes longer" in caplog.text
    go.set()
    assert pump._thread is not None
    pump._thread.join(30)
    assert not pump._thread.is_alive()


def test_a_display_that_is_huge_is_not_told_however_it_is_made() -> None:
    for large in ({"application/json": [["a"]] * 100_000}, {"text/plain": "x" * module.MAX_WAITING}):
        message = VOICE.display("d")
        message.content["data"].update(large)  # type: ignore[index]
        assert pumped(message, VOICE.stream("a\n")) == [StreamText("stdout", "a\n")]


def test_nothing_is_told_after_its_call_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELIVERY", 0.1)
    go = threading.Event()
    seen: list[CellEvent] = []

    def slow(event: CellEvent) -> None:
        seen.append(event)
        go.wait(30)

    pump = EventPump(slow, Masks())
    pump.tell_message(VOICE.display("first"))
    assert traces.eventually(lambda: len(seen) == 1)
    for _ in range(5):  # taken together
        pump.tell_message(VOICE.display("more"))
    asyncio.run(pump.close())
    go.set()
    assert pump._thread is not None
    pump._thread.join(30)
    assert len(seen) == 1


def test_a_secret_of_a_tool_call_is_masked() -> None:
    told = pumped(ToolCallStarted(1, "f", f"x='{SECRET}'"), ToolCallEnded(1, "f", 0.1, f"bad {SECRET}"))
    assert told == [ToolCallStarted(1, "f", "x='***'"), ToolCallEnded(1, "f", 0.1, "bad ***")]


def test_one_that_exits_is_called_again() -> None:
    events: list[CellEvent] = []

    def exits(event: CellEvent) -> None:
        events.append(event)
        raise SystemExit

    pumped(VOICE.display("a"), VOICE.display("b"), on_event=exits)
    assert len(events) == 2
