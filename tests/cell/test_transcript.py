import json
import warnings
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermes_kernel import ConfigError, Owner
from hermes_kernel.cell.execution import cut_before_run
from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.result import CellResult, KernelReport, LateOutput, ToolCallRecord
from hermes_kernel.cell.shown import Budget
from hermes_kernel.cell.status import CellStatus, Phase
from hermes_kernel.cell.toolrecord import FullCall, RecordedCall, RecordedCatalogue
from hermes_kernel.cell.tools import ToolSet
from hermes_kernel.cell.transcript import (
    HumanCell,
    RanCell,
    SessionNotebook,
    Transcript,
    checked_transcript,
    notebook_cell,
)
from hermes_kernel.lifecycle.key import KernelKey
from hermes_kernel.lifecycle.loss import Loss

from .test_message import KernelVoice
from .test_result import result_of, settled

VOICE = KernelVoice()
KEY = KernelKey(Owner("conversation-17"), "/bin/python", "/work", ("gpu",))
REPORT = KernelReport("0123456789abcdef", reused=True)
NOT_RUN = cut_before_run(CellStatus.TIMED_OUT, Phase.QUEUED)
MASKS = Masks(["a-secret-of-the-host's"])


def ran(result: CellResult | None = None, code: str = "1 + 1", key: KernelKey = KEY, **more: Any) -> RanCell:
    return RanCell(code, key, result or result_of(report=REPORT), 1_700_000_000.5, timeout=30, **more)


def human(code: str = "x = 2", **more: Any) -> HumanCell:
    given: dict[str, Any] = {
        "outputs": (),
        "execution_count": 3,
        "started": 1_700_000_000.0,
        "duration": 0.25,
    }
    return HumanCell(code, KEY, "0123456789abcdef", **(given | more))


def text_of(notebook: SessionNotebook) -> str:
    return SessionNotebook.HEAD + "".join(notebook.pending) + notebook.tail()


def checked(text: str) -> nbformat.NotebookNode:
    """The notebook in a file that is one for everybody who reads notebooks."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text.encode("utf-8")
    json.loads(text, parse_constant=refuse)
    with warnings.catch_warnings(action="error"):
        node = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
        nbformat.validate(node)
        nbformat.validate(nbformat.reads(nbformat.writes(node), as_version=4))
    return node


def one(cell: RanCell | HumanCell) -> nbformat.NotebookNode:
    """A cell as it stands in the notebook that it is alone in."""
    notebook = SessionNotebook()
    notebook.add(cell)
    (node,) = checked(text_of(notebook)).cells
    return node


def test_a_cell_says_who_ran_it_where_when_and_what_came_of_it() -> None:
    node = one(ran(result_of(settled(CellStatus.OK), VOICE.stream("hi\n"), VOICE.result("2"), report=REPORT)))
    assert (node.cell_type, node.source, node.execution_count) == ("code", "1 + 1", 4)
    assert [output.output_type for output in node.outputs] == ["stream", "execute_result"]
    assert node.metadata.hermes == {
        "by": "agent",
        "owner": {"session": "conversation-17", "child": None, "scope": ""},
        "kernel": {
            "id": "0123456789abcdef",
            "generation": 1,
            "python": "/bin/python",
            "cwd": "/work",
            "variant": ["gpu"],
            "reused": True,
            "lost": None,
            "ended": False,
        },
        "status": "ok",
        "ran": True,
        "exit_code": 0,
        "started": "2023-11-14T22:13:20.500+00:00",
        "duration": 0.25,
        "timeout": 30,
        "bytes": 3,
    }


@pytest.mark.parametrize("status", CellStatus, ids=lambda status: status.value)
def test_each_way_to_end_is_told_and_none_looks_like_success(status: CellStatus) -> None:
    node = one(ran(result_of(settled(status), report=REPORT, signal="SIGKILL")))
    told = node.metadata.hermes
    assert (told.status, told.ran) == (status.value, True)
    assert any(output.output_type == "error" for output in node.outputs) == (status is not CellStatus.OK)
    counted = status in (CellStatus.OK, CellStatus.ERROR, CellStatus.EXITED)
    assert (node.execution_count is not None) == counted
    assert ("signal" in told) == (status is CellStatus.DIED)


@pytest.mark.parametrize("status", [CellStatus.TIMED_OUT, CellStatus.INTERRUPTED])
def test_a_call_that_never_ran_is_a_raw_cell_and_says_why(status: CellStatus) -> None:
    node = one(ran(result_of(cut_before_run(status, Phase.STARTING), report=KernelReport(""))))
    assert (node.cell_type, node.source) == ("raw", "1 + 1")
    assert node.metadata.hermes.ran is False
    assert node.metadata.hermes.status == status.value
    assert "outputs" not in node


def test_what_is_missing_in_the_outputs_is_said() -> None:
    small = {"report": REPORT, "budget": Budget(output=100, stderr=100)}
    plain = one(ran(result_of(settled(CellStatus.OK), VOICE.stream("x"), **small))).metadata.hermes
    assert not {"truncated", "masked", "shortened"} & set(plain)
    cut = one(ran(result_of(settled(CellStatus.OK), VOICE.stream("x" * 500), **small))).metadata.hermes
    assert (cut.truncated.shown < 500, cut.bytes) == (True, 500)
    page = VOICE.display({"text/html": "<b>" + "x" * 500, "text/plain": "a page"})
    assert one(ran(result_of(settled(CellStatus.OK), page, **small))).metadata.hermes.shortened is True
    secret = VOICE.stream("a-secret-of-the-host's")
    node = one(ran(result_of(settled(CellStatus.OK), secret, report=REPORT, cleaner=MASKS)))
    assert node.metadata.hermes.masked is True
    assert "secret" not in json.dumps(node)


def test_losses_late_output_and_warnings_are_told() -> None:
    report = replace(REPORT, reused=False, lost=Loss.TIMED_OUT, ended=True)
    result = result_of(report=report, late_output=(LateOutput(2, "late\n"),), note="Look out.")
    told = one(ran(result)).metadata.hermes
    assert (told.kernel.lost, told.kernel.ended, told.kernel.reused) == ("timed_out", True, False)
    assert told.late_output == [{"execution_count": 2, "text": "late\n"}]
    assert told.warning.startswith("Look out.")


def test_tool_calls_are_told_with_and_without_a_record() -> None:
    calls = (ToolCallRecord("f", "x=1", 0.5), ToolCallRecord("f", "x=2", 0.25, "no"))
    result = result_of(report=REPORT, tool_calls=calls, calls_made=7)
    told = one(ran(result, max_tool_calls=50)).metadata.hermes
    assert [(call.name, call.args, call.error) for call in told.tool_calls] == [
        ("f", "x=1", None),
        ("f", "x=2", "no"),
    ]
    assert (told.tool_calls_made, told.max_tool_calls, "tool_record" in told) == (7, 50, False)
    record = tuple(
        RecordedCall.of(FullCall("f", n, f'{{"by_name": {{"x": {n}}}}}', 20, "7", 1), MASKS) for n in range(2)
    )
    told = one(ran(result, record=record, tools="d" * 64)).metadata.hermes
    assert [(call.tool, call.ordinal, call.result) for call in told.tool_record] == [
        ("f", 0, "7"),
        ("f", 1, "7"),
    ]


def test_a_persons_cell_is_theirs() -> None:
    shown = ({"output_type": "stream", "name": "stdout", "text": "hi\n"},)
    node = one(human(outputs=shown, masked=True, truncated=True))
    told = node.metadata.hermes
    assert (told.by, told.status, told.masked, told.truncated) == ("human", "ok", True, True)
    assert (node.source, node.execution_count, node.outputs[0].text) == ("x = 2", 3, "hi\n")
    failed = ({"output_type": "error", "ename": "E", "evalue": "v", "traceback": []},)
    assert one(human(outputs=failed)).metadata.hermes.status == "error"


def test_a_persons_cell_whose_end_was_not_seen_is_not_told_as_a_success() -> None:
    assert one(human(ended=False)).metadata.hermes.status == "interrupted"


def test_kernels_are_numbered_for_each_owner() -> None:
    notebook = SessionNotebook()
    other = replace(KEY, owner=Owner("b"))
    for key, kernel_id in [(KEY, "k1"), (KEY, "k2"), (other, "k3"), (KEY, ""), (KEY, "k1"), (other, "k4")]:
        notebook.add(ran(result_of(report=KernelReport(kernel_id)), key=key))
    told = [cell.metadata.hermes.kernel for cell in checked(text_of(notebook)).cells]
    assert [kernel.generation for kernel in told] == [1, 2, 1, 2, 1, 2]


def test_a_continued_notebook_goes_on_counting_and_keeps_what_people_have_added() -> None:
    notebook = SessionNotebook()
    notebook.add(ran(result_of(report=KernelReport("k1"))))
    notebook.add(ran(result_of(report=KernelReport("k2"))))
    node = checked(text_of(notebook))
    node.cells.insert(0, nbformat.v4.new_markdown_cell("# Notes"))
    node.metadata.title = "My session"
    node.metadata.kernelspec.name = "mine"
    again = SessionNotebook.parse(nbformat.writes(node), record_tools=False)
    again.add(ran(result_of(report=KernelReport("k3"))))
    after = checked(text_of(again))
    assert [cell.cell_type for cell in after.cells] == ["markdown", "code", "code", "code"]
    assert after.cells[0].source == "# Notes"
    assert (after.metadata.title, after.metadata.kernelspec.name) == ("My session", "mine")
    assert after.cells[3].metadata.hermes.kernel.generation == 3


def test_ids_stay_different_in_a_notebook_of_which_cells_were_removed() -> None:
    notebook = SessionNotebook()
    for _ in range(3):
        notebook.add(ran(result_of(NOT_RUN, report=KernelReport(""))))
    node = checked(text_of(notebook))
    del node.cells[0]
    again = SessionNotebook.parse(nbformat.writes(node), record_tools=False)
    again.add(ran(result_of(NOT_RUN, report=KernelReport(""))))
    ids = [cell.id for cell in checked(text_of(again)).cells]
    assert len(set(ids)) == 3


def test_a_notebook_without_ids_is_given_some() -> None:
    notebook = SessionNotebook()
    notebook.add(ran())
    node = json.loads(text_of(notebook))
    node["nbformat_minor"] = 4
    del node["cells"][0]["id"]
    node["cells"].append({"cell_type": "markdown", "metadata": {}, "source": "x"})
    checked(text_of(SessionNotebook.parse(json.dumps(node), record_tools=False)))


GOOD = json.loads(text_of(SessionNotebook()))


@pytest.mark.parametrize(
    "node",
    [
        [],
        {},
        None,
        {**GOOD, "metadata": {}},
        {**GOOD, "metadata": {"hermes_kernel": {"version": 2}}},
        {**GOOD, "metadata": {"hermes_kernel": []}},
        {**GOOD, "metadata": {"hermes_kernel": {"version": 1, "tools": []}}},
        {**GOOD, "cells": {}},
        {**GOOD, "cells": [1]},
        {**GOOD, "cells": [{"metadata": 1}]},
        {**GOOD, "cells": [{"metadata": {"hermes": {"kernel": 3}}}]},
        {**GOOD, "nbformat": 3},
    ],
    ids=str,
)
def test_what_is_no_transcript_is_not_continued(node: Any) -> None:
    with pytest.raises(ValueError, match=r"it is|stands"):
        SessionNotebook.parse(json.dumps(node), record_tools=False)


def test_a_notebook_of_one_owner_is_not_continued_for_another() -> None:
    notebook = SessionNotebook()
    notebook.add(ran(key=replace(KEY, owner=Owner("half \ud83d", "c"))))
    text = text_of(notebook)
    SessionNotebook.parse(text, record_tools=False, owner=Owner("half \ud83d", "c"))
    with pytest.raises(ValueError, match="another owner"):
        SessionNotebook.parse(text, record_tools=False, owner=Owner("half \ud83d"))


# -- any session ------------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
MIME = st.sampled_from(
    ["text/plain", "text/html", "image/png", "application/json", "application/x.y+json", "a", ""]
)
DATA = st.dictionaries(MIME, ANY_JSON, max_size=3)
MESSAGES = st.one_of(
    st.tuples(ANY_TEXT, st.sampled_from(["stdout", "stderr"])).map(lambda each: VOICE.stream(*each)),
    DATA.map(VOICE.display),
    st.tuples(DATA, st.none() | st.integers(-1, 9) | ANY_TEXT).map(lambda each: VOICE.result(*each)),
    st.tuples(ANY_TEXT, ANY_TEXT, st.lists(ANY_TEXT, max_size=2)).map(lambda each: VOICE.error(*each)),
)
OWNERS = st.builds(Owner, st.sampled_from(["a", "b", "\udc80"]), st.sampled_from([None, "c"]))
KEYS = st.builds(KernelKey, OWNERS, ANY_TEXT, st.none() | ANY_TEXT, st.tuples(ANY_TEXT))
KERNEL_IDS = st.sampled_from(["", "0123456789abcdef", "fedcba9876543210"])
RESULTS = st.builds(
    lambda settlement, messages, kernel_id, late, note: result_of(
        settlement,
        *messages,
        report=KernelReport(kernel_id),
        late_output=(LateOutput(None, late),),
        note=note,
        cleaner=MASKS,
    ),
    st.sampled_from([*map(settled, CellStatus), NOT_RUN]),
    st.lists(MESSAGES, max_size=3),
    KERNEL_IDS,
    ANY_TEXT,
    st.none() | ANY_TEXT,
)
CALLS = st.builds(
    lambda tool, arguments, result: RecordedCall.of(
        FullCall(tool, 0, json.dumps(arguments), 9, json.dumps(result), 9), MASKS
    ),
    ANY_TEXT,
    ANY_TEXT,
    ANY_TEXT,
)
AGENTS = st.builds(
    lambda code, key, result, record: RanCell(code, key, result, 1e9, None, 5, record, None),
    ANY_TEXT,
    KEYS,
    RESULTS,
    st.none() | st.tuples(CALLS),
)
HUMANS = st.builds(
    lambda code, key, kernel_id, result, count: HumanCell(
        code, key, kernel_id, result.outputs, count, 1e9, 0.5, ended=bool(count)
    ),
    ANY_TEXT,
    KEYS,
    KERNEL_IDS,
    RESULTS,
    st.none() | st.integers(0, 5),
)


def some_tool(x: int = 1) -> None: ...


TOOLS = RecordedCatalogue.of(ToolSet.of([some_tool]), MASKS)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(AGENTS | HUMANS | st.sampled_from(["tools", "continue", "saved anew"]), max_size=8))
@example(["continue", "continue"])
def test_whatever_a_session_does_the_file_is_a_valid_notebook_with_all_of_its_cells(steps: Any) -> None:
    notebook = SessionNotebook()
    sources: list[str] = []
    for step in steps:
        if step == "tools":
            notebook.add_tools(TOOLS)
        elif step == "continue":
            notebook = SessionNotebook.parse(text_of(notebook), record_tools=True)
        elif step == "saved anew":
            node = nbformat.reads(text_of(notebook), as_version=4)
            notebook = SessionNotebook.parse(nbformat.writes(node), record_tools=True)
        else:
            notebook.add(step)
            sources.append(step.code.encode("utf-8", "backslashreplace").decode())
    node = checked(text_of(notebook))
    assert [cell.source for cell in node.cells] == sources
    assert len({cell.id for cell in node.cells}) == len(sources)
    assert ("tools" in node.metadata.hermes_kernel) == ("tools" in steps)


def test_a_cell_is_the_same_alone_and_among_others() -> None:
    cells = [ran(code=str(n)) for n in range(3)]
    notebook = SessionNotebook()
    for cell in cells:
        notebook.add(cell)
    nodes = json.loads(text_of(notebook))["cells"]
    assert nodes == [notebook_cell(cell, f"01234567-{n}", 1) for n, cell in enumerate(cells, start=1)]


# -- what a registry is given -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["a.ipynb", Path("a.ipynb"), PurePosixPath("a.ipynb"), Transcript("a.ipynb")]
)
def test_a_path_or_a_transcript_can_be_given(given: Any) -> None:
    transcript = checked_transcript(given)
    assert transcript is not None
    assert (str(transcript.path), transcript.record_tools) == ("a.ipynb", False)
    assert checked_transcript(None) is None


WRONG: Iterable[Any] = [*product(["", b"a", 5, True, "a\0b"], [False]), ("a.ipynb", 1), ("a.ipynb", None)]


@pytest.mark.parametrize(("path", "record_tools"), WRONG)
def test_what_cannot_be_a_transcript_is_refused(path: Any, record_tools: Any) -> None:
    with pytest.raises(ConfigError, match="give"):
        checked_transcript(Transcript(path, record_tools))
