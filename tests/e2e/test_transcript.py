"""What a session leaves behind as a notebook: real kernels, and people on them."""

import asyncio
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter, PythonExporter

from hermes_kernel import (
    BlockingRegistry,
    CellStatus,
    KernelRegistry,
    Limits,
    Owner,
    Tool,
    ToolCallContext,
    ToolError,
    Transcript,
)

from .test_strangers import Stranger

Make = Callable[..., BlockingRegistry]

SECRET = "a-secret-of-the-host's-0123456789"
PIN = 98765432


def notebook(path: Path) -> nbformat.NotebookNode:
    """A transcript that everybody can read without a warning."""
    with warnings.catch_warnings(action="error"):
        node = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(node)
        HTMLExporter().from_notebook_node(node)
        PythonExporter().from_notebook_node(node)
    return node


def told(path: Path) -> list[Any]:
    """What the transcript says of each cell."""
    return [cell.metadata.hermes for cell in notebook(path).cells]


def calls(path: Path) -> list[Any]:
    return [call for cell in told(path) for call in cell.get("tool_record", [])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session.ipynb"


@pytest.fixture
def recording(make_registry: Make, path: Path) -> BlockingRegistry:
    return make_registry(
        transcript=Transcript(path, record_tools=True), limits=Limits(timeout=30), secrets=[SECRET, str(PIN)]
    )


# -- how cells end, and on which kernels -------------------------------------------------------------------


def test_each_end_of_a_cell_is_kept_with_its_output_and_what_it_cost(make_registry: Make, path: Path) -> None:
    registry = make_registry(transcript=path, limits=Limits(timeout=30))
    steps: list[tuple[str, dict[str, Any], CellStatus]] = [
        ("x = 41; x + 1", {}, CellStatus.OK),
        ("print('so far'); 1 / 0", {}, CellStatus.ERROR),
        ("print('bye'); raise SystemExit(3)", {}, CellStatus.EXITED),
        ("print('here', flush=True)\nwhile True: pass", {"timeout": 0.5}, CellStatus.TIMED_OUT),
        ("import os; print('last', flush=True); os.kill(os.getpid(), 9)", {}, CellStatus.DIED),
        ("print('in', flush=True)\nwhile True: pass", cut_once_running(), CellStatus.INTERRUPTED),
        ("'never'", {"interrupted": lambda: True}, CellStatus.INTERRUPTED),
        ("'x' in globals()", {"reset": True}, CellStatus.OK),
    ]  # fmt: skip
    for code, more, status in steps:
        assert registry.execute(code, owner="a", **more).status is status
    cells = notebook(path).cells
    ends = [cell.metadata.hermes for cell in cells]
    assert [cell.source for cell in cells] == [code for code, _, _ in steps]
    assert [end.status for end in ends] == [status.value for _, _, status in steps]
    assert [cell.cell_type for cell in cells] == ["code"] * 6 + ["raw", "code"]
    assert [end.ran for end in ends] == [True] * 6 + [False, True]
    assert [end.exit_code for end in ends] == [0, 1, 3, -1, -9, -1, -1, 0]
    assert ends[4].signal == "SIGKILL"
    assert [end.kernel.generation for end in ends] == [1, 1, 1, 2, 3, 4, 4, 5]
    assert [end.kernel.ended for end in ends] == [False, False, True, True, True, True, False, False]
    lost = [None, None, None, "exited", "timed_out", "died", None, "interrupted"]
    assert [end.kernel.lost for end in ends] == lost
    texts = [[output.get("text") for output in cell.get("outputs", [])] for cell in cells]
    assert [text[0] for text in texts[1:6]] == ["so far\n", "bye\n", "here\n", "last\n", "in\n"]
    assert [end.timeout for end in ends] == [30, 30, 30, 0.5, 30, 30, 30, 30]
    shown = [cell.outputs[-1].output_type for cell in cells if cell.cell_type == "code"]
    assert shown == ["execute_result"] + ["error"] * 5 + ["execute_result"]


def cut_once_running() -> dict[str, Any]:
    begun = threading.Event()
    return {"interrupted": begun.is_set, "on_event": lambda _: begun.set()}


def test_images_and_large_displays_are_in_the_notebook_or_it_says_so(make_registry: Make, path: Path) -> None:
    registry = make_registry(
        transcript=path, limits=Limits(output_bytes=2000, spill_dir=str(path.parent / "s"))
    )
    code = (
        "from IPython.display import Image, HTML, JSON, display\n"
        "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n' + bytes(100)), JSON({'b': [1], 'a': 2}))"
    )
    registry.execute(code, owner="a")
    registry.execute("display(HTML('<b>' + 'x' * 5000))", owner="a")
    registry.execute("print('y' * 5000)", owner="a")
    image, html, text = notebook(path).cells
    assert set(image.outputs[0].data) == {"image/png", "text/plain"}
    assert image.outputs[1].data["application/json"] == {"b": [1], "a": 2}
    assert not {"shortened", "truncated"} & set(image.metadata.hermes)
    assert html.metadata.hermes.shortened is True
    assert text.metadata.hermes.truncated.shown < 5000
    assert Path(text.metadata.hermes.truncated.file).read_text() == "y" * 5000 + "\n"


def test_a_session_of_the_asyncio_registry_is_kept_too(leaves_nothing: None, path: Path) -> None:
    async def twice(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    async def main() -> None:
        async with KernelRegistry(transcript=Transcript(path, record_tools=True)) as registry:
            await registry.execute("hermes_tools.twice(4)", owner="a", tools=[twice])
            code = (
                "r = __import__('asyncio').gather(*(hermes_tools.aio.twice(n) for n in range(20)))\nawait r"
            )
            await registry.execute(code, owner=Owner("a", "child"), tools=[twice])

    asyncio.run(main())
    assert [cell.owner.child for cell in told(path)] == [None, "child"]
    first, *others = calls(path)
    assert (first.arguments, first.result) == ('{"by_name": {"n": 4}}', "8")
    assert sorted(call.ordinal for call in others) == list(range(20))
    for call in others:
        assert json.loads(call.result) == 2 * json.loads(call.arguments)["by_name"]["n"]


# -- tool calls --------------------------------------------------------------------------------------------


def f(x: Any = None, *rest: Any, **more: Any) -> Any:
    return x


def test_without_record_tools_calls_are_named_and_their_values_are_not_kept(
    make_registry: Make, path: Path
) -> None:
    registry = make_registry(transcript=path)
    registry.execute("hermes_tools.f('given' * 1000); None", owner="a", tools=[f])
    (cell,) = told(path)
    assert [(call.name, call.error) for call in cell.tool_calls] == [("f", None)]
    assert "tool_record" not in cell
    assert "given" * 100 not in path.read_text()


def test_calls_are_recorded_as_they_were_made_whatever_their_handlers_do(
    recording: BlockingRegistry, path: Path
) -> None:
    given_back: list[list[int]] = []

    def sort(items: list[int]) -> list[int]:
        items.sort()
        given_back.append(items)
        return items

    def spoil() -> None:
        given_back[0].append(float("nan"))  # type: ignore[arg-type]

    def fail(why: str) -> None:
        raise ToolError(why)

    class Dispatcher:
        def tools(self) -> list[Tool]:
            return [Tool("take", parameters={"properties": {"a": {}}})]

        def dispatch(self, name: str, arguments: dict[str, Any], context: ToolCallContext) -> Any:
            return [name, arguments.pop("a")]

    code = (
        "import hermes_tools as h\nh.sort([3, 1, 2]); h.spoil()\ntry: h.fail('no')\nexcept h.ToolError: pass"
    )
    assert recording.execute(code, owner="a", tools=[sort, spoil, fail]).status is CellStatus.OK
    recording.execute("hermes_tools.take(a=[1])", owner="a", tools=Dispatcher())
    recording.execute("hermes_tools.any(1, 2, k=3)", owner="a", tools={"any": f})
    recording.execute("hermes_tools.pos(5)", owner="a", tools=[Tool("pos", positional)])
    record = {call.tool: call for call in calls(path)}
    assert record["sort"].arguments == '{"by_name": {"items": [3, 1, 2]}}'
    assert record["sort"].result == "[1, 2, 3]"
    assert record["fail"].error == "no"
    assert (record["take"].arguments, record["take"].result) == ('{"by_name": {"a": [1]}}', '["take", [1]]')
    assert json.loads(record["any"].arguments) == {"by_name": {"k": 3}, "by_place": [1, 2]}
    assert json.loads(record["pos"].arguments) == {"by_name": {}, "by_place": [5]}


def positional(x: int, /) -> int:
    return x


def same(x: Any) -> Any:
    return x


def test_parallel_calls_are_each_recorded_once_with_their_own_results(
    recording: BlockingRegistry, path: Path
) -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(hermes_tools.same, range(45))))"
    )
    assert recording.execute(code, owner="a", tools=[same]).stdout == "990\n"
    record = calls(path)
    assert [call.ordinal for call in record] == list(range(45))
    given = [json.loads(call.arguments)["by_name"]["x"] for call in record]
    assert sorted(given) == list(range(45))
    assert [json.loads(call.result) for call in record] == given


def test_a_mebibyte_of_a_call_is_kept_and_more_is_not(recording: BlockingRegistry, path: Path) -> None:
    around = len('{"by_name": {"x": ""}}')
    for size in (1024 * 1024 - around, 1024 * 1024 - around + 1):
        recording.execute(f"len(hermes_tools.same('y' * {size}))", owner="a", tools=[same])
    recording.execute("len(hermes_tools.big(1024 * 1024 - 2))", owner="a", tools=[big])
    recording.execute("len(hermes_tools.big(1024 * 1024 - 1))", owner="a", tools=[big])
    assert [call.get("cut") for call in calls(path)] == [None, ["arguments"], None, ["result"]]
    assert calls(path)[3].bytes == [len('{"by_name": {"n": 1048575}}'), 1024 * 1024 + 1]


def big(n: int) -> str:
    return "z" * n


def test_refused_calls_are_not_recorded_and_unanswered_ones_say_so(
    recording: BlockingRegistry, path: Path
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(30)

    code = "for n in range(3):\n    try: hermes_tools.f(n)\n    except hermes_tools.ToolBudgetExceeded: pass"
    recording.execute(code, owner="a", tools=[f], max_tool_calls=2)
    result = recording.execute(
        "hermes_tools.hang()", owner="a", tools=[hang], interrupted=lambda: begun.is_set()
    )
    go_on.set()
    assert result.status is CellStatus.INTERRUPTED
    first, second, third = calls(path)
    assert (first.result, second.result, first.get("answered")) == ("0", "1", None)
    assert (third.answered, third.get("result"), third.get("error")) == (False, None, None)
    assert told(path)[0].max_tool_calls == 2


def test_more_calls_than_are_recorded_are_counted(
    recording: BlockingRegistry, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_kernel.host.grant.RECORDS", 5)
    recording.execute("for n in range(9): hermes_tools.f(n)", owner="a", tools=[f])
    (cell,) = told(path)
    assert (len(cell.tool_record), len(cell.tool_calls), cell.tool_calls_made) == (5, 5, 9)


# -- secrets -----------------------------------------------------------------------------------------------


def fetch(key: str = SECRET, pin: int = PIN, *, path: str = f"/{SECRET}") -> Any:
    """Fetch something."""
    return {"key": key, "pin": [pin], SECRET: 1}


def leak(padding: str, secret: str) -> Any:
    raise ToolError(f"{padding}{secret}")


def test_no_secret_is_anywhere_in_a_transcript_but_in_the_code(
    recording: BlockingRegistry, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(f"{SECRET} {PIN}")
    code = (
        f"secret, pin = open({str(tmp_path / 'secret')!r}).read().split()\nimport hermes_tools as h\n"
        "print(secret, pin, file=__import__('sys').stderr)\n"
        "h.fetch(); h.fetch(secret, int(pin), path=secret)\n"
        "for n in range(0, 320, 5):\n"
        "    try: h.leak('-' * n, secret)\n"
        "    except h.ToolError: pass\n"
        "h.f({'a': ['-' * 50 + secret + '-' * 50] * 3}); h.f('-' * 60, '-' * 10, secret, secret)\n"
        "{secret: int(pin)}"
    )
    tools = [fetch, leak, f]
    assert recording.execute(code, owner="a", tools=tools, max_tool_calls=None).status is CellStatus.OK
    text = path.read_text()
    assert SECRET[:9] not in text
    assert SECRET[-9:] not in text
    assert str(PIN) not in text
    assert [call.masked for call in calls(path)[:2]] == [["result"], ["arguments", "result"]]


# -- people ------------------------------------------------------------------------------------------------


def by(path: Path) -> list[tuple[str, str]]:
    return [(cell.metadata.hermes.by, cell.source) for cell in notebook(path).cells]


@pytest.fixture
def person(make_registry: Make, path: Path, tmp_path: Path) -> Iterator[tuple[BlockingRegistry, Stranger]]:
    registry = make_registry(transcript=path, limits=Limits(timeout=30))
    registry.execute("x = 41", owner="a")
    stranger = Stranger(registry, tmp_path)
    yield registry, stranger
    stranger.close()


def wait_for(path: Path, count: int) -> None:
    """Wait until the transcript has so many cells; they are written as they go."""
    from .. import traces

    assert traces.eventually(lambda: len(json.loads(path.read_bytes())["cells"]) >= count, within=20)


def test_a_persons_cells_stand_where_they_ran_and_are_written_when_they_have(
    person: tuple[BlockingRegistry, Stranger], path: Path
) -> None:
    registry, stranger = person
    stranger.run("x += 1; print('hi'); x")
    wait_for(path, 2)
    stranger.run("1 / 0")
    result = registry.execute("x", owner="a")
    assert (result.value, result.kernel.foreign_cells) == ("42", 2)
    assert result.warning is not None
    assert "A person ran 2 cells" in result.warning
    stranger.run("y = 5")
    registry.close()
    assert by(path) == [
        ("agent", "x = 41"),
        ("human", "x += 1; print('hi'); x"),
        ("human", "1 / 0"),
        ("agent", "x"),
        ("human", "y = 5"),
    ]
    cells = notebook(path).cells
    assert [output.output_type for output in cells[1].outputs] == ["stream", "execute_result"]
    assert [cell.metadata.hermes.status for cell in cells] == ["ok", "ok", "error", "ok", "ok"]
    assert [cell.execution_count for cell in cells] == [1, 2, 3, 4, 5]
    assert {cell.metadata.hermes.kernel.generation for cell in cells} == {1}


def test_a_person_may_run_as_many_cells_as_they_like(
    person: tuple[BlockingRegistry, Stranger], path: Path
) -> None:
    registry, stranger = person
    for n in range(130):
        stranger.run(f"x = {n}")
    result = registry.execute("x", owner="a")
    assert (result.value, result.kernel.foreign_cells) == ("129", 130)
    assert by(path)[1:] == [*(("human", f"x = {n}") for n in range(130)), ("agent", "x")]


def test_a_cell_that_a_person_runs_while_the_agents_does_comes_after_it(
    person: tuple[BlockingRegistry, Stranger], path: Path, tmp_path: Path
) -> None:
    registry, stranger = person
    for n in range(5):
        begun, go_on = tmp_path / f"begun{n}", tmp_path / f"go on{n}"
        for fifo in (begun, go_on):
            os.mkfifo(fifo)
        code = f"open({str(begun)!r}, 'w').close(); open({str(go_on)!r}).read(); {n}"
        owner = threading.Thread(target=lambda code=code: registry.execute(code, owner="a"))
        owner.start()
        begun.read_bytes()
        stranger.client.execute(f"'theirs {n}'")
        go_on.write_bytes(b"")
        owner.join(30)
    registry.execute("'end'", owner="a")
    order = [source.rpartition("; ")[2] for _, source in by(path)[1:]]
    assert order == [*(each for n in range(5) for each in (str(n), f"'theirs {n}'")), "'end'"]


def test_a_persons_cell_that_runs_when_the_kernel_ends_is_not_told_as_a_success(
    person: tuple[BlockingRegistry, Stranger], path: Path, tmp_path: Path
) -> None:
    registry, stranger = person
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    stranger.client.execute(f"open({str(begun)!r}, 'w').close()\nwhile True: pass")
    begun.read_bytes()
    while stranger.client.get_iopub_msg(timeout=30)["msg_type"] != "execute_input":
        pass
    registry.close_owner("a")
    cell = told(path)[-1]
    assert (cell.by, cell.status) == ("human", "interrupted")


def test_a_persons_output_is_masked_and_cut_as_the_agents_is(
    make_registry: Make, path: Path, tmp_path: Path
) -> None:
    registry = make_registry(transcript=path, secrets=[SECRET], limits=Limits(output_bytes=2000))
    registry.execute("1", owner="a")
    (tmp_path / "secret").write_text(SECRET)
    stranger = Stranger(registry, tmp_path)
    try:
        stranger.run(f"open({str(tmp_path / 'secret')!r}).read()")
        stranger.run("print('y' * 5000)")
    finally:
        stranger.close()
    registry.close()
    _, masked, cut = told(path)
    assert (masked.masked, cut.truncated) == (True, True)
    assert SECRET[:9] not in path.read_text()


# -- readers -----------------------------------------------------------------------------------------------


def test_a_transcript_runs_in_a_stock_kernel(make_registry: Make, path: Path) -> None:
    registry = make_registry(transcript=path, limits=Limits(timeout=30))
    for code, more in [("x = 41", {}), ("'never'", {"interrupted": lambda: True}), ("print(x); x + 1", {})]:
        registry.execute(code, owner="a", **more)
    node = notebook(path)
    wanted = [cell.get("outputs") for cell in node.cells]
    client = NotebookClient(node, kernel_name="python3", timeout=60)
    with warnings.catch_warnings(action="error", category=UserWarning):
        client.execute()
    nbformat.validate(node)
    assert [cell.get("outputs") for cell in node.cells] == wanted


def test_a_file_that_cannot_be_written_costs_no_cell_and_no_result(
    make_registry: Make, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    registry = make_registry(transcript=place / "a.ipynb", limits=Limits(timeout=30))
    place.rmdir()
    result = registry.execute("x = 41; x", owner="a")
    assert (result.status, result.value) == (CellStatus.OK, "41")
    assert result.warning is not None
    assert "transcript" in result.warning
    place.mkdir()
    assert registry.execute("x", owner="a").warning is None
    assert [cell.source for cell in notebook(place / "a.ipynb").cells] == ["x = 41; x", "x"]
