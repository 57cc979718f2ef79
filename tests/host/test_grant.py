import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel import Owner, ToolCallContext, ToolError
from hermes_kernel.cell.events import CellEvent, ToolCallEnded, ToolCallStarted
from hermes_kernel.cell.result import ToolCallRecord
from hermes_kernel.cell.tools import ToolSet
from hermes_kernel.host.grant import (
    CUT_OFF,
    ERROR_TEXT,
    PREVIEW,
    CellTools,
    ToolGrant,
    kernels_that_wait,
    preview,
)
from hermes_kernel.wire import ToolCall, ToolReply

SPEAKER = contextvars.ContextVar("speaker", default="nobody")


class Caller:
    """Notes what it was told."""

    def __init__(self) -> None:
        self.told: list[ToolReply] = []

    def cut_off(self, reply: ToolReply) -> None:
        self.told.append(reply)


def no_loop() -> Any:
    raise RuntimeError("no loop")


def granted(*handlers: Callable[..., Any], limit: int | None = 50, **more: Any) -> ToolGrant:
    tools = CellTools(ToolSet.of(handlers), limit, loop=no_loop, **more)
    return ToolGrant(tools, owner=Owner("a"), kernel_id="k", tell=lambda told: told())


def served(grant: ToolGrant, tool: str, *place: Any, **arguments: Any) -> ToolReply:
    return grant.serve(ToolCall(7, grant.token, tool, arguments, place), Caller()).reply


def echo(x: Any) -> Any:
    return x


def told(records: tuple[ToolCallRecord, ...]) -> list[tuple[str, str, str | None]]:
    return [(record.name, record.args, record.error) for record in records]


def test_calls_are_told_in_the_order_in_which_they_began() -> None:
    grant = granted(echo, abs)
    served(grant, "echo", x=1)
    served(grant, "abs", -2)
    served(grant, "nothing")
    served(grant, "echo")
    assert told(grant.retire()) == [("echo", "x=1", None), ("abs", "-2", None)]
    assert grant.calls_made == 2


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ({"error": "not found"}, "not found"),
        ({"error": ""}, None),
        ({"error": {"code": 5}}, "{'code': 5}"),
        ({"error": "x" * 1000}, "x" * ERROR_TEXT),
        ({"ok": 1}, None),
        ("error", None),
        (b"bytes", "echo returned what cannot be sent: the result is of type bytes"),
        ([float("nan")], "echo returned what cannot be sent: the result[0] is nan"),
    ],
    ids=str,
)
def test_the_error_of_a_call_is_noted_whoever_tells_it(result: Any, error: str | None) -> None:
    grant = granted(returning(result))
    served(grant, "echo")
    (record,) = grant.retire()
    assert (record.error or "").startswith(error or "")
    assert (record.error is None) == (error is None)


def returning(result: Any) -> Callable[[], Any]:
    def handler() -> Any:
        return result

    handler.__name__ = "echo"
    return handler


def raising(error: BaseException) -> Callable[[], Any]:
    def handler() -> Any:
        raise error

    handler.__name__ = "fail"
    return handler


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("in my words"), "in my words"),
        (ValueError("no"), "ValueError: no"),
        (KeyError("k"), "KeyError: 'k'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (SystemExit(3), "SystemExit: 3"),
    ],
    ids=str,
)
def test_a_handlers_exception_is_told_in_its_words(error: BaseException, text: str) -> None:
    grant = granted(raising(error))
    reply = served(grant, "fail")
    assert (reply.kind, reply.error) == ("tool", text)
    assert grant.retire()[0].error == text


def test_a_handler_sees_its_callers_context_and_changes_nothing_in_it() -> None:
    def speak(to: str) -> str:
        was = SPEAKER.get()
        SPEAKER.set(to)
        return was

    def captured() -> contextvars.Context:
        SPEAKER.set("Ann")
        return contextvars.copy_context()

    grant = granted(speak, context=contextvars.Context().run(captured))
    assert [served(grant, "speak", to="x").value for _ in range(2)] == ["Ann", "Ann"]
    assert SPEAKER.get() == "nobody"


def test_a_runner_runs_the_handler_and_gives_its_result() -> None:
    local = threading.local()

    def runner(work: Callable[[], Any]) -> Any:
        local.name = "Ann"
        try:
            return work()
        finally:
            del local.name

    def who() -> str:
        return str(local.name)

    assert served(granted(who, runner=runner), "who").value == "Ann"
    assert not hasattr(local, "name")


def test_a_handler_knows_whose_cell_it_serves() -> None:
    contexts: list[ToolCallContext] = []
    serving: list[frozenset[str]] = []
    later: list[contextvars.Context] = []

    def note(context: ToolCallContext) -> None:
        contexts.append(context)
        serving.append(kernels_that_wait())
        later.append(contextvars.copy_context())

    grant = granted(note)
    served(grant, "note")
    served(grant, "note")
    assert [(c.owner, c.kernel_id, c.cell_id, c.call_id, c.origin) for c in contexts] == [
        (Owner("a"), "k", grant.cell_id, number, "execute_code") for number in (1, 2)
    ]
    assert serving == [{"k"}, {"k"}]
    assert kernels_that_wait() == frozenset()
    assert later[0].run(kernels_that_wait) == {"k"}  # of what it has started
    grant.retire()
    assert later[0].run(kernels_that_wait) == frozenset()


def test_events_come_in_pairs_and_none_for_a_refusal() -> None:
    events: list[CellEvent] = []
    grant = granted(echo, raising(ValueError("no")), limit=2, on_event=events.append)
    served(grant, "echo", x="a")
    served(grant, "fail")
    served(grant, "echo", x="b")
    started = [event for event in events if isinstance(event, ToolCallStarted)]
    ended = [event for event in events if isinstance(event, ToolCallEnded)]
    assert started == [ToolCallStarted(1, "echo", "x='a'"), ToolCallStarted(2, "fail", "")]
    assert [(e.call_id, e.name, e.error) for e in ended] == [(1, "echo", None), (2, "fail", "ValueError: no")]


def test_what_on_event_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: CellEvent) -> None:
        raise RuntimeError("broken")

    assert served(granted(echo, on_event=broken), "echo", x=1).value == 1
    assert "on_event failed" in caplog.text


def test_a_call_in_flight_is_cut_off_told_so_and_its_result_dropped() -> None:
    entered, release = threading.Event(), threading.Event()
    seen: list[bool] = []

    def slow(context: ToolCallContext) -> str:
        entered.set()
        release.wait(30)
        seen.append(context.cancelled.is_set() and context.cancelled.wait(0))
        return "too late"

    grant, caller, replies = granted(slow), Caller(), []
    thread = threading.Thread(
        target=lambda: replies.append(grant.serve(ToolCall(7, grant.token, "slow", {}), caller).reply)
    )
    thread.start()
    assert entered.wait(30)
    (record,) = grant.retire()
    assert record.error == CUT_OFF
    assert [(reply.call_id, reply.kind, reply.closes) for reply in caller.told] == [(7, "refused", True)]
    release.set()
    thread.join(30)
    assert seen == [True]
    assert replies[0].kind == "refused"
    assert grant.retire() == (record,)
    assert served(grant, "slow").error == replies[0].error


@pytest.mark.parametrize(
    ("place", "arguments", "shown"),
    [
        ((), {}, ""),
        ((), {"path": "a.csv", "limit": 3}, "path='a.csv', limit=3"),
        ((1, "b"), {"c": [1, 2]}, "1, 'b', c=[1, 2]"),
    ],
    ids=str,
)
def test_a_preview_shows_what_was_given(place: Any, arguments: dict[str, Any], shown: str) -> None:
    assert preview(arguments, place) == shown


def test_a_preview_is_short_whatever_was_given() -> None:
    for value in ("x" * 10**6, ["y" * 100] * 1000, {"k" * 100: {"z": [0] * 10**5}}, 10**4000):
        assert len(preview({"value": value, "more": value})) <= PREVIEW
