import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_kernel import Owner, Tool, ToolCallContext, ToolError
from hermes_kernel.cell.execution import Settlement, cut_before_run
from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.replay import (
    Finding,
    NeverAnsweredError,
    RecordedRun,
    RecordError,
    ToolAnswers,
    compared,
    recorded_runs,
    tools_that_answer,
)
from hermes_kernel.cell.result import CellResult, KernelReport, LateOutput, ToolCallRecord
from hermes_kernel.cell.shown import Budget, Unmasked
from hermes_kernel.cell.status import CellStatus, Phase
from hermes_kernel.cell.toolrecord import FullCall, RecordedCall, RecordedCatalogue
from hermes_kernel.cell.tools import ToolSet
from hermes_kernel.cell.transcript import HumanCell, RanCell, SessionNotebook
from hermes_kernel.lifecycle.key import KernelKey

from .test_message import KernelVoice
from .test_result import result_of, settled

VOICE = KernelVoice()
OK = settled(CellStatus.OK)
KEY = KernelKey(Owner("a", "b", "c"), "/bin/python", "/work", ("gpu",))
SECRET = "a-secret-of-the-host's"
MASKS = Masks([SECRET])
PLAIN = Unmasked()


def result(*messages: Any, settlement: Settlement = OK, **more: Any) -> CellResult:
    return result_of(settlement, *messages, report=KernelReport("0123456789abcdef"), **more)


def made(tool: str, ordinal: int, given: Any, gave: Any = None, **more: Any) -> RecordedCall:
    arguments, answer = json.dumps({"by_name": given}), json.dumps(gave)
    return RecordedCall.of(
        FullCall(tool, ordinal, arguments, len(arguments), answer, len(answer), **more), MASKS
    )


def file_of(
    of: CellResult, record: tuple[RecordedCall, ...] | None = None, tools: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """A transcript with one cell."""
    notebook = SessionNotebook(record_tools=record is not None)
    catalogue = RecordedCatalogue.of(ToolSet.of(tools), MASKS)
    notebook.add_tools(catalogue)
    digest = None if record is None else catalogue.digest
    notebook.add(RanCell("code", KEY, of, 1e9, 30, 50, record, digest))
    node: dict[str, Any] = json.loads(
        SessionNotebook.HEAD + "".join(notebook.pending) + notebook.tail(),
    )
    return node


def recorded(of: CellResult, *record: RecordedCall) -> RecordedRun:
    (run,) = recorded_runs(file_of(of, record or None))
    return run


def found(of: CellResult, now: CellResult) -> list[Finding]:
    return compared(recorded(of), now)


def words(findings: list[Finding]) -> str:
    return "\n".join(f"{'gap' if finding.is_gap else 'difference'}: {finding.what}" for finding in findings)


# -- reading -----------------------------------------------------------------------------------------------


def test_a_run_has_what_is_needed_to_run_it_again() -> None:
    run = recorded(result(VOICE.stream("hi\n")))
    assert (run.number, run.source, run.owner, run.kernel_id) == (1, "code", KEY.owner, "0123456789abcdef")
    assert (run.python, run.cwd, run.variant) == ("/bin/python", "/work", ("gpu",))
    assert (run.status, run.exit_code, run.timeout, run.bytes_total) == (CellStatus.OK, 0, 30, 3)
    assert (run.truncated, run.masked, run.calls, run.tools) == (False, False, None, ())


def test_cells_without_a_record_and_such_as_never_ran_are_left_out() -> None:
    notebook = SessionNotebook()
    notebook.add(RanCell("1", KEY, result_of(cut_before_run(CellStatus.TIMED_OUT, Phase.QUEUED)), 1e9))
    notebook.add(RanCell("2", KEY, result(), 1e9))
    notebook.add(HumanCell("3", KEY, "0123456789abcdef", (), 5, 1e9, 0.1))
    node = json.loads(SessionNotebook.HEAD + "".join(notebook.pending) + notebook.tail())
    node["cells"].insert(0, {"cell_type": "markdown", "metadata": {}, "source": "# Head"})
    node["cells"].append({"cell_type": "code", "metadata": {}, "source": "4", "outputs": []})
    assert [(run.number, run.source) for run in recorded_runs(node)] == [(1, "2"), (2, "3")]
    # A run keeps a cell that never ran as the code that it is.
    node["cells"][1]["cell_type"] = "code"
    assert [run.source for run in recorded_runs(node)] == ["2", "3"]


def positional(a: int, /, b: int = 2, *c: int, d: Any = print, **e: int) -> "dict[str, int]":
    """Take all kinds."""
    return {}


SCHEMA = Tool(
    "schema",
    lambda **_: None,
    "Of a schema.",
    {"properties": {"q": {"type": "string"}, "a-b": {}}, "required": ["q"]},
)


async def waits(n: int, context: ToolCallContext, m: int = 5) -> int:
    return n


@pytest.mark.parametrize(
    "tool", [positional, SCHEMA, Tool("aio_", waits), abs, dict], ids=lambda t: str(t)[:20]
)
def test_the_tools_of_a_record_look_to_a_cell_as_they_did(tool: Any) -> None:
    tools = ToolSet.of([tool])
    (run,) = recorded_runs(file_of(result(), (), (tool,)))
    again = ToolSet.of(tools_that_answer(run.tools, lambda *_: None))
    assert again.catalogue == tools.catalogue


def test_a_call_is_answered_with_its_arguments_as_they_came() -> None:
    (run,) = recorded_runs(file_of(result(), (), (positional,)))
    heard: list[Any] = []

    def answer(*call: Any) -> str:
        heard.append(call)
        return "the answer"

    (tool,) = tools_that_answer(run.tools, answer)
    over = threading.Event()
    context = ToolCallContext(None, "k", "c", 1, over)
    assert tool.wants_context
    assert tool.call({"d": 4, "context": 5}, context, (1, 2, 3)) == "the answer"
    assert heard == [("positional", {"d": 4, "context": 5}, (1, 2, 3), over)]


# -- hostile notebooks -------------------------------------------------------------------------------------

CELL = file_of(
    result(VOICE.stream("hi"), VOICE.result("1"), late_output=(LateOutput(1, "x"),)),
    (made("positional", 0, {"a": 1}, 2), made("positional", 1, {}, error="no")),
    (positional,),
)
WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    float("inf"),
    float("nan"),
    "x",
    "[" * 100_000,
    [],
    [[]],
    {},
    {"a": 1},
    10**30,
]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a notebook."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def changed(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


def without(node: Any, path: tuple[Any, ...]) -> Any:
    copy = json.loads(json.dumps(node))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


def replayed(node: Any) -> None:
    """Do with a notebook what a replay does, but for the kernel."""
    for run in recorded_runs(node):
        ToolSet.of(tools_that_answer(run.tools, lambda *_: None))
        answers = ToolAnswers(run, MASKS)
        for tool, arguments in [("positional", {"a": 1}), ("positional", {}), ("x", {})]:
            try:
                answers.answer(tool, arguments, ())
            except ToolError:
                pass
        words([*compared(run, result(VOICE.stream("ho"))), *answers.finish()]).encode()


def refused(node: Any) -> str | None:
    try:
        replayed(node)
    except RecordError as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:20])
def test_a_record_in_which_anything_is_something_else_is_an_error_that_says_so(value: Any) -> None:
    for path in places(CELL):
        said = refused(changed(CELL, path, value))
        assert said is None or ("record" in said and len(said) < 500)


def test_a_record_from_which_anything_is_taken_is_an_error_that_says_so() -> None:
    for path in places(CELL)[1:]:
        said = refused(without(CELL, path))
        assert said is None or "record" in said


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_hostile_notebook_gives_a_record_error_and_never_another(data: Any) -> None:
    anything = st.recursive(
        st.sampled_from(WRONG) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
        max_leaves=5,
    )
    node: Any = CELL
    for _ in range(data.draw(st.integers(1, 3))):
        node = changed(node, data.draw(st.sampled_from(places(node))), data.draw(anything))
    refused(node)


def test_a_cell_that_cannot_be_read_is_named() -> None:
    node = changed(CELL, ("cells", 0, "metadata", "hermes", "status"), "fine")
    with pytest.raises(RecordError, match=r"code cell 1 is not as it was written.*record the session again"):
        recorded_runs(node)


@pytest.mark.parametrize("name", ["aio", "no name", "class", "__all__"])
def test_a_tool_that_no_cell_can_have_is_a_record_error(name: str) -> None:
    digest = next(iter(CELL["metadata"]["hermes_kernel"]["tools"]))
    place = ("metadata", "hermes_kernel", "tools", digest)
    with pytest.raises(RecordError):
        recorded_runs(changed(CELL, (*place, 0, "name"), name))
    entry = CELL["metadata"]["hermes_kernel"]["tools"][digest][0]
    with pytest.raises(RecordError, match="two tools"):
        recorded_runs(changed(CELL, place, [entry, entry]))


def test_what_a_record_says_of_a_parameter_is_never_evaluated(tmp_path: Path) -> None:
    code = f"__import__('pathlib').Path({str(tmp_path / 'evaluated')!r}).touch()"
    digest = next(iter(CELL["metadata"]["hermes_kernel"]["tools"]))
    place = ("metadata", "hermes_kernel", "tools", digest, 0)
    node = changed(CELL, (*place, "returns"), code)
    node = changed(
        node, (*place, "parameters", 0), {"name": "a", "kind": "POSITIONAL_ONLY", "annotation": code}
    )
    node = changed(node, (*place, "parameters", 3, "default_text"), code)
    (run,) = recorded_runs(node)
    (entry,) = ToolSet.of(tools_that_answer(run.tools, lambda *_: None)).catalogue
    assert (entry["returns"], entry["parameters"][0]["annotation"]) == (code, code)
    assert list(tmp_path.iterdir()) == []


def test_a_cell_whose_catalogue_is_gone_is_a_record_error() -> None:
    with pytest.raises(RecordError, match="catalogue"):
        recorded_runs(changed(CELL, ("metadata", "hermes_kernel", "tools"), {}))


# -- comparing ---------------------------------------------------------------------------------------------

SAME: list[Callable[[], CellResult]] = [
    result,
    lambda: result(VOICE.stream("a\n"), VOICE.stream("b", "stderr"), VOICE.result("1")),
    lambda: result(VOICE.display({"text/html": "<b>x</b>", "application/json": {"b": 1, "a": [2]}})),
    lambda: result(VOICE.display({"image/png": "aGk=", "text/plain": "an image"})),
    lambda: result(VOICE.error(), settlement=settled(CellStatus.ERROR)),
    *(lambda s=status: result(VOICE.stream("x"), settlement=settled(s)) for status in CellStatus),
]


@pytest.mark.parametrize("make", SAME)
def test_the_same_again_is_the_same_also_in_a_notebook_that_was_saved_anew(
    make: Callable[[], CellResult],
) -> None:
    node = file_of(make())
    again = json.loads(
        nbformat.writes(nbformat.reads(json.dumps(node), as_version=4))
    )  # keys sorted, lines split
    for each in (node, again):
        (run,) = recorded_runs(each)
        assert compared(run, make()) == []


def test_another_number_of_the_cell_or_another_traceback_is_no_difference() -> None:
    one = result(VOICE.result("1", 3), VOICE.error(traceback=["here"]))
    assert found(one, result(VOICE.result("1", 9), VOICE.error(traceback=["there"]))) == []


DIFFERENT = [
    (result(VOICE.stream("a")), result(VOICE.stream("b")), "output 1 differs"),
    (result(VOICE.stream("a\nb")), result(VOICE.stream("a\rb")), "bytes written|output 1 differs"),
    (result(VOICE.stream("a\n")), result(VOICE.stream("a\x1b[0m\n")), "bytes written: were 2, are 6"),
    (result(VOICE.stream("a")), result(VOICE.stream("a", "stderr")), "output 1 differs"),
    (result(VOICE.stream("a")), result(), "outputs: were 1, are 0"),
    (result(), result(VOICE.result("1")), r"outputs: were 0, are 1 \(execute_result\)"),
    (result(VOICE.result("1")), result(VOICE.display("1")), "output 1 differs"),
    (result(VOICE.result("1")), result(VOICE.result("2")), "output 1 differs"),
    (result(VOICE.error("A")), result(VOICE.error("B")), "output 1 differs"),
    (result(VOICE.error(evalue="a")), result(VOICE.error(evalue="b")), "output 1 differs"),
    (result(), result(settlement=settled(CellStatus.ERROR)), "status: was ok, is error"),
    (
        result(settlement=settled(CellStatus.EXITED, exit_code=2)),
        result(settlement=settled(CellStatus.EXITED, exit_code=3)),
        "exit code: was 2, is 3",
    ),
    # values that are written alike
    *(
        (
            result(VOICE.display({"application/json": one, "text/plain": "x"})),
            result(VOICE.display({"application/json": other, "text/plain": "x"})),
            "output 1 differs",
        )
        for one, other in [
            (1, "1"), (["a", "b"], "ab"), (["ab"], ["a", "b"]), ([], {}), (True, 1), (None, "null")
        ]
    ),
    (
        result(VOICE.display({"text/html": "<b>x</b>\ntext/latex: y", "text/plain": "x"})),
        result(VOICE.display({"text/html": "<b>x</b>", "text/latex": "y", "text/plain": "x"})),
        "output 1 differs",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("was", "now", "said"), DIFFERENT)
def test_what_differs_is_said(was: CellResult, now: CellResult, said: str) -> None:
    findings = found(was, now)
    assert any(not finding.is_gap for finding in findings), findings
    assert re.search(said, words(findings)), words(findings)


WIDE = Budget(output=1_000_000, stderr=1_000_000)
NARROW = Budget(output=200, stderr=200)
PAGE = VOICE.display({"text/html": "<b>" + "x" * 5000, "text/plain": "a page"})
DATA = VOICE.display({"application/json": ["x" * 5000], "text/plain": "data"})
LONG = VOICE.error(evalue="v" * 5000)
PICTURE = VOICE.display({"image/png": "QUJD" * 400_000, "text/plain": "a picture"})
SAID = VOICE.stream(f"it is {SECRET}\n")


@pytest.mark.parametrize(
    "unknown",
    [
        lambda: result(VOICE.stream("x" * 5000), budget=NARROW),
        lambda: result(VOICE.stream("x" * 5000, "stderr"), budget=NARROW),
        lambda: result(PAGE, budget=NARROW),
        lambda: result(DATA, budget=NARROW),
        lambda: result(VOICE.result("x" * 5000), budget=NARROW),
        lambda: result(LONG, settlement=settled(CellStatus.ERROR)),
        lambda: result(PICTURE),
        lambda: result(SAID, cleaner=MASKS),
        lambda: result(VOICE.result(SECRET), cleaner=MASKS),
        lambda: result(VOICE.error(evalue=SECRET), cleaner=MASKS),
        lambda: result(VOICE.display({"text/html": SECRET}), cleaner=MASKS),
        lambda: result(VOICE.display({"application/json": {"k": SECRET}}), cleaner=MASKS),
    ],
)
def test_what_was_cut_left_out_or_masked_is_a_gap_and_never_the_same(
    unknown: Callable[[], CellResult],
) -> None:
    findings = found(unknown(), unknown())
    assert [finding.is_gap for finding in findings] == [True], words(findings)
    run = recorded(unknown())
    assert run.truncated or run.masked  # the record says it by itself


def test_what_is_cut_or_masked_now_alone_is_no_success_either() -> None:
    wide = result(PAGE, budget=WIDE)
    assert any(finding.is_gap for finding in found(wide, result(PAGE, budget=NARROW)))
    assert any(finding.is_gap for finding in found(result(SAID), result(SAID, cleaner=MASKS)))


def test_around_a_mask_the_text_is_compared() -> None:
    masked = result(SAID, cleaner=MASKS)
    assert "difference" not in words(found(masked, result(VOICE.stream(f"it is {'s' * len(SECRET)}\n"))))
    assert "output 1 differs" in words(found(masked, result(VOICE.stream(f"it was {'s' * len(SECRET)}\n"))))


def test_late_output_that_is_not_the_same_is_a_gap() -> None:
    late = result(late_output=(LateOutput(1, "late"),))
    assert found(late, result(late_output=(LateOutput(7, "late"),))) == []
    for was, now in [(late, result()), (result(), late), (late, result(late_output=(LateOutput(1, "l"),)))]:
        (finding,) = found(was, now)
        assert finding.is_gap


CALL = ToolCallRecord("f", "x=1", 0.5)


def test_calls_that_are_not_recorded_are_a_gap() -> None:
    was = result(tool_calls=(CALL, CALL), calls_made=2)
    (finding,) = found(was, was)
    assert finding == Finding("2 tool calls are not recorded (f): record with --record-tools", is_gap=True)


def test_more_calls_than_a_record_holds_are_a_gap_and_their_number_is_compared() -> None:
    run = recorded(result(tool_calls=(CALL,), calls_made=3), made("f", 0, {}))
    assert words(compared(run, result(tool_calls=(CALL,), calls_made=3))) == (
        "gap: of 3 tool calls 1 are recorded: no more"
    )
    assert "tool calls: were 3, are 2" in words(compared(run, result(tool_calls=(CALL,), calls_made=2)))


def test_what_is_said_of_a_hostile_output_does_nothing_to_a_terminal() -> None:
    node = file_of(result(VOICE.stream("x")))
    node["cells"][0]["outputs"][0]["text"] = "\x1b]0;title\x07\x1b[2J" + "y" * 5000 + "\n" * 500
    (run,) = recorded_runs(node)
    said = words(compared(run, result(VOICE.stream("x"))))
    assert "\x1b" not in said
    assert len(said) < 5000


# -- answering ---------------------------------------------------------------------------------------------


def answers(*calls: RecordedCall, cleaner: Any = PLAIN) -> ToolAnswers:
    return ToolAnswers(replace(recorded(result()), calls=calls), cleaner)


def test_each_call_gets_what_it_got_then() -> None:
    record = answers(made("f", 0, {"x": 1}, "one"), made("g", 0, {"x": 1}, [2]), made("f", 1, {}, error="no"))
    assert record.answer("f", {"x": 1}, ()) == "one"
    assert record.answer("g", {"x": 1}, ()) == [2]
    with pytest.raises(ToolError, match=r"^no$"):
        record.answer("f", {}, ())
    assert record.finish() == []


def test_equal_calls_get_their_results_in_order() -> None:
    record = answers(*(made("next", n, {}, n) for n in range(5)))
    assert [record.answer("next", {}, ()) for _ in range(5)] == list(range(5))


def test_calls_side_by_side_are_told_apart_by_their_arguments() -> None:
    record = answers(*(made("f", n, {"n": n}, n * n) for n in range(4)))
    assert [record.answer("f", {"n": n}, ()) for n in (3, 1, 0, 2)] == [9, 1, 0, 4]
    assert record.finish() == []


@pytest.mark.parametrize(
    ("tool", "given"),
    [("f", {"x": 2}), ("f", {}), ("f", {"x": 1, "y": 1}), ("f", {"x": "1"}), ("g", {"x": 1})],
)
def test_another_call_is_a_difference_and_gets_nothing(tool: str, given: dict[str, Any]) -> None:
    record = answers(made("f", 0, {"x": 1}, "one"))
    with pytest.raises(ToolError, match="not in the record"):
        record.answer(tool, given, ())
    said = words(record.finish())
    assert f"difference: {tool} call 1: was not made with these arguments" in said
    assert "difference: f call 1: was made, and is not" in said


def test_one_call_too_many_is_a_difference() -> None:
    record = answers(made("f", 0, {}, 1))
    record.answer("f", {}, ())
    with pytest.raises(ToolError):
        record.answer("f", {}, ())
    assert words(record.finish()).startswith("difference: f call 2: was not made")


def test_a_result_that_is_cut_or_masked_is_a_gap() -> None:
    masked = answers(made("f", 0, {}, SECRET))
    assert masked.answer("f", {}, ()) == "***"
    assert words(masked.finish()) == "gap: f call 1: secrets are masked in its result"
    cut = answers(RecordedCall.of(FullCall("f", 0, '{"by_name": {}}', 15, None, 2_000_000), MASKS))
    with pytest.raises(ToolError, match="too large"):
        cut.answer("f", {}, ())
    assert words(cut.finish()) == "gap: f call 1: its result are cut in the record"


def test_arguments_that_are_cut_or_masked_are_known_by_their_place_and_are_a_gap() -> None:
    record = answers(
        made("f", 0, {"key": SECRET}, 1),
        RecordedCall.of(FullCall("f", 1, None, 2_000_000, "2", 1), MASKS),
        made("f", 2, {"x": 3}, 3),
    )
    assert record.answer("f", {"key": "another"}, ()) == 1
    assert record.answer("f", {"x": "y" * 2_000_000}, ()) == 2
    with pytest.raises(ToolError):
        record.answer("f", {"x": 4}, ())
    assert [finding.is_gap for finding in record.finish()] == [True, True, False, False]


def test_a_call_that_was_never_answered_is_not_answered() -> None:
    record = answers(made("f", 0, {}, answered=False))
    with pytest.raises(NeverAnsweredError):
        record.answer("f", {}, ())
    assert record.finish() == []


def test_no_secret_is_in_what_is_said_of_a_call() -> None:
    record = answers(made("f", 0, {"x": "y" * 300}), cleaner=MASKS)
    for pad in range(0, 200, 7):
        with pytest.raises(ToolError):
            record.answer("f", {"x": "-" * pad + SECRET}, ())
    assert SECRET[:8] not in words(record.finish())


def test_what_is_said_of_a_call_is_valid_text_and_short() -> None:
    record = answers()
    with pytest.raises(ToolError):
        record.answer("f", {"x": "\udc80\x1b[2J" + "y" * 1_000_000}, ())
    said = words(record.finish())
    said.encode()
    assert "\x1b" not in said
    assert len(said) < 500


ARGUMENTS = st.sampled_from([{}, {"x": 1}, {"x": 2}, {"x": SECRET}])
NAMES = st.sampled_from(["f", "g"])


@given(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=8), st.lists(st.tuples(NAMES, ARGUMENTS), max_size=8))
def test_no_record_serves_two_calls_nor_another_tool_and_what_differs_is_never_silent(
    then: list[tuple[str, Any]], now: list[tuple[str, Any]]
) -> None:
    begun: dict[str, int] = {}
    calls = []
    for index, (tool, given_then) in enumerate(then):
        calls.append(made(tool, begun.get(tool, 0), given_then, [tool, index]))
        begun[tool] = begun.get(tool, 0) + 1
    record = answers(*calls)
    got = []
    for tool, given_now in now:
        try:
            name, index = record.answer(tool, given_now, ())
        except ToolError:
            continue
        assert name == tool
        assert then[index][0] == tool
        assert given_now == then[index][1] or SECRET in then[index][1].values()
        got.append(index)
    assert len(set(got)) == len(got)
    findings = record.finish()
    same = sorted(map(repr, then)) == sorted(map(repr, now))
    has_secret = any(SECRET in arguments.values() for _, arguments in then)
    assert (not findings) <= same
    if then == now:
        assert bool(findings) == has_secret
        assert all(finding.is_gap for finding in findings)


# -- what is said ------------------------------------------------------------------------------------------

OSC = "\x1b]0;x\x07"


def obeyed(findings: list[Finding]) -> set[str]:
    """The characters of what is said that a terminal would obey."""
    return set(words(findings)) & set("\x1b\x07\x9d\x08\r\u202e")


def test_what_is_found_holds_nothing_that_a_terminal_obeys() -> None:
    assert Finding(f"a{OSC}b\r\u202e").what == "ab"
    assert Finding("a\n  b", is_gap=True).what == "a\n  b"


def test_tools_that_a_notebook_names_are_said_without_control_characters_and_on_one_line() -> None:
    name = f"do{OSC}uble\n    difference: forged" + "x" * 10_000
    node = file_of(result())
    node["cells"][0]["metadata"]["hermes"]["tool_calls"] = [{"name": name}] * 3
    (run,) = recorded_runs(node)
    findings = compared(run, result())
    assert "3 tool calls are not recorded (double" in words(findings)
    assert obeyed(findings) == set()
    assert len(words(findings).splitlines()) == 1
    assert len(words(findings)) < 1000


def test_a_record_of_calls_is_said_without_control_characters_and_on_one_line() -> None:
    call = made(f"dou{OSC}ble\nx", 0, {"n": 1}, 2)
    spoilt = replace(call, cut=(f"argu{OSC}ments\nx",), masked=(f"re{OSC}sult\nx" + "y" * 10_000,))
    answers = ToolAnswers(recorded(result(), spoilt), PLAIN)
    answers.answer(call.tool, {"n": 1}, ())
    left = ToolAnswers(recorded(result(), call), PLAIN)
    for findings in (answers.finish(), left.finish()):
        assert findings
        assert obeyed(findings) == set()
        assert len(words(findings).splitlines()) == len(findings)
        assert len(words(findings)) < 2000


def test_an_output_of_a_kind_that_is_none_is_said_without_control_characters() -> None:
    output = {"output_type": f"disp{OSC}lay", "data": {}, "metadata": {}}
    findings = compared(replace(recorded(result()), outputs=(output,)), result())
    assert findings
    assert obeyed(findings) == set()
