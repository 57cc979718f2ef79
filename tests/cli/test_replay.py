import asyncio
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from hermes_kernel import BlockingRegistry, CellStatus, KernelRegistry, Limits, Owner, ToolError, Transcript

from ..e2e.test_strangers import Stranger
from .command import Ended, hermes, invoked, read_notebook, script

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Make = Callable[..., BlockingRegistry]

SECRET = "sk-ant-" + "api03-" + "aB3dE5gH7jK9" * 3  # of a shape that everybody masks
numbers = itertools.count()
TOOLBOX = """
from hermes_kernel import ToolError

calls = []

def double(n: int) -> int:
    calls.append(n)
    return 2 * n

def fail(why: str):
    raise ToolError(why)

def large(n: int) -> str:
    return "x" * n

TOOLS = [double, fail, large]
"""


def recorded(directory: Path, *cells: str, options: tuple[str, ...] = ("--record-tools",)) -> Path:
    """Record a run of these cells, with tools."""
    toolbox = f"toolbox_{next(numbers)}"  # a module of this process's
    (directory / f"{toolbox}.py").write_text(TOOLBOX)
    file = script(directory, *cells)
    out = directory / "out.ipynb"
    arguments = ("--save", out, "--keep-going", "--tools", f"{toolbox}:TOOLS", *options)
    with contextlib.chdir(directory):
        assert invoked("run", file, *arguments).code in (0, 1)
    return out


def words(ended: Ended) -> list[str]:
    """What is said of each cell."""
    return [line.split()[1] for line in ended.out.splitlines() if line.startswith("[")]


def edit(path: Path, change: Callable[[Any], None]) -> Path:
    node = json.loads(path.read_bytes())
    change(node)
    path.write_text(json.dumps(node))
    return path


def set_source(number: int, source: str) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        node["cells"][number]["source"] = source

    return change


CELLS = (
    "import hermes_tools as h\nx = h.double(4); print(x)",
    "try: h.fail('no such file')\nexcept h.ToolError as error: print(error)",
    "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(4) as pool: print(list(pool.map(h.double, range(8))))",
    "import sys; print('err', file=sys.stderr); {x}",
    "1 / 0",
    "x = 5; exit(3)",
    "'x' in globals()",
)


def test_a_recorded_run_is_the_same_again_without_its_tools(tmp_path: Path) -> None:
    out = recorded(tmp_path, *CELLS)
    (toolbox,) = tmp_path.glob("toolbox_*.py")
    toolbox.unlink()
    ended = hermes("replay", out, cwd=tmp_path)
    assert ended.code == 0, ended.out
    lines = ended.out.splitlines()
    assert words(ended) == ["same"] * 7
    assert lines[4] == "[5/7] same     1 / 0"
    assert ended.err == "7 cells as they were, 0 different, 0 with gaps alone\n"


def test_json_is_one_object_a_cell(tmp_path: Path) -> None:
    out = recorded(tmp_path, "1", "hermes_tools.double(2)", "3")
    edit(out, set_source(1, "hermes_tools.double(3)"))
    ended = invoked("replay", "--json", out)
    objects = [json.loads(line) for line in ended.out.splitlines()]
    assert [each["cell"] for each in objects] == [1, 2, 3]
    assert [bool(each["differences"]) for each in objects] == [False, True, False]
    assert {each["by"] for each in objects} == {"agent"}
    assert all(each["gaps"] == [] for each in objects)
    assert ended.code == 1


@pytest.mark.parametrize(
    ("cell", "now", "said"),
    [
        ("print('a')", "print('b')", "difference: output 1 differs"),
        ("print('a')", "pass", "difference: outputs: were 1, are 0 (stdout)"),
        ("print('a')", "print('a'); 1 / 0", "difference: status: was ok, is error"),
        ("exit(3)", "exit(4)", "difference: exit code: was 3, is 4"),
        ("1 / 0", "exit(1)", "difference: status: was error, is exited"),
        ("h.double(2); None", "h.double(3); None", 'not made with these arguments: {"by_name": {"n": 3}}'),
        ("h.double(2); None", "None", 'double call 1: was made, and is not: {"by_name": {"n": 2}}'),
        ("h.double(2); None", "h.double(2); h.double(2); None", "double call 2: was not made"),
        ("h.double(2); None", "h.fail('2'); None", "fail call 1: was not made"),
        ("from IPython.display import HTML; HTML('<b>')", "HTML('<i>')", "output 1 differs"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_was_is_said_and_1(tmp_path: Path, cell: str, now: str, said: str) -> None:
    out = edit(
        recorded(tmp_path, "import hermes_tools as h", cell),
        set_source(1, f"from IPython.display import HTML\n{now}"),
    )
    ended = invoked("replay", out)
    assert ended.code == 1
    assert said in ended.out
    assert "[2/2] DIFFERS" in ended.out
    assert "1 cells as they were, 1 different" in ended.err


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("print('x' * 60_000)", "the output is cut: only what is shown could be compared"),
        ("from IPython.display import HTML; HTML('<b>' + 'x' * 60_000)", "the output is cut"),
        ("print('sk-ant-' + 'api03-' + 'aB3dE5gH7jK9' * 3)", "secrets are masked in the output"),
        ("hermes_tools.fail('sk-ant-api03-' + 'aB3dE5gH7jK9' * 3)", "fail call 1: secrets are masked in its"),
        ("len(hermes_tools.large(2_000_000))", "large call 1: its result are cut in the record"),
        ("hermes_tools.fail('x' * 2_000_000)", "fail call 1: its arguments are cut in the record"),
    ],
)  # fmt: skip
def test_what_is_cut_or_masked_is_a_gap_and_1(tmp_path: Path, cell: str, said: str) -> None:
    ended = invoked("replay", recorded(tmp_path, "1", cell))
    assert ended.code == 1
    assert f"gap: {said}" in ended.out
    assert "[1/2] same" in ended.out


def test_calls_that_are_not_recorded_are_a_gap_and_1(tmp_path: Path) -> None:
    out = recorded(tmp_path, "try: hermes_tools.double(2)\nexcept AttributeError: pass", options=())
    ended = invoked("replay", out)
    assert ended.code == 1
    assert "gap: 1 tool calls are not recorded (double): record with --record-tools" in ended.out


def test_what_a_replay_says_holds_no_secret_and_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    out = recorded(tmp_path, "'a'", "hermes_tools.double(1)", "'b'")
    (tmp_path / "secret").write_text(SECRET)
    edit(out, set_source(1, f"hermes_tools.double(open({str(tmp_path / 'secret')!r}).read())"))

    def change(node: Any) -> None:
        node["cells"][0]["outputs"][0]["data"]["text/plain"] = "\x1b]0;title\x07é"
        node["cells"][2]["source"] = "'b' # \x1b]0;x\x07"

    ended = hermes("replay", edit(out, change), PYTHONIOENCODING="ascii")
    assert ended.code == 1
    assert "was not made with these arguments" in ended.out
    assert SECRET[10:-6] not in ended.out + ended.err
    assert not {"\x1b", "\x07"} & set(ended.out + ended.err)


def test_a_notebook_that_a_front_end_has_saved_anew_is_still_the_same(tmp_path: Path) -> None:
    code = (
        "from IPython.display import JSON, display\n"
        "display(JSON({'b': {'d': 1, 'c': 2}, 'a': 'x\\ny'}))\nprint('1\\n2')"
    )
    out = recorded(tmp_path, *CELLS, code)
    node = nbformat.read(out, as_version=4)
    node.cells.insert(0, nbformat.v4.new_markdown_cell("# Notes\nof mine"))
    node.cells.append(nbformat.v4.new_code_cell("'not of the record'"))
    node.metadata.kernelspec = {"name": "other", "display_name": "Other"}
    text = json.dumps(json.loads(nbformat.writes(node)), sort_keys=True)
    out.write_text(text)
    ended = invoked("replay", out)
    assert ended.code == 0, ended.out
    assert len(ended.out.splitlines()) == 8


def test_cwd_python_and_timeout_can_be_chosen(tmp_path: Path) -> None:
    cells = (
        "import os; os.path.basename(os.getcwd()) == 'other'",
        "import sys; sys.executable",
        "while True: pass",
    )
    out = recorded(tmp_path, *cells, options=("--timeout", "1"))
    (tmp_path / "other").mkdir()
    ended = invoked("replay", out, "--cwd", tmp_path / "other", "--timeout", "0.5")
    assert words(ended) == [
        "DIFFERS",
        "same",
        "same",
    ]
    assert "+text/plain: True" in ended.out
    assert invoked("replay", out).code == 0
    assert invoked("replay", out, "--python", "no-such-python").code == 2
    assert invoked("replay", out, "--cwd", tmp_path / "none").code == 2


@pytest.mark.parametrize("python", ["/" + "x" * 5000, "/" + "x" * 300 + "/python", "/a\0b", "\ud800"])
def test_an_interpreter_that_cannot_be_there_is_replaced_by_this_one(tmp_path: Path, python: str) -> None:
    out = recorded(tmp_path, "6 * 7")

    def change(node: Any) -> None:
        node["cells"][0]["metadata"]["hermes"]["kernel"]["python"] = python

    assert invoked("replay", edit(out, change)).code == 0


def test_an_interpreter_in_a_place_that_is_not_shown_is_replaced_by_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in the home of another user; root sees them all."""
    out = recorded(tmp_path, "6 * 7")
    python = "/home/somebody/bin/python"

    def change(node: Any) -> None:
        node["cells"][0]["metadata"]["hermes"]["kernel"]["python"] = python

    stat = os.stat

    def denied(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if os.fspath(path) == python:
            raise PermissionError(13, "Permission denied", python)
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", denied)
    assert invoked("replay", edit(out, change)).code == 0


def refused(ended: Ended, said: str) -> None:
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_what_is_no_recorded_session_is_refused_in_a_sentence(tmp_path: Path) -> None:
    refused(invoked("replay", tmp_path / "none.ipynb"), "does not exist")
    file = tmp_path / "file.ipynb"
    file.write_text("text")
    refused(invoked("replay", file), "is not JSON")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), file)
    refused(invoked("replay", file), "it is no recorded session; record one with `hermes-kernel run --save`")


@pytest.fixture(scope="module")
def two_cells(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The record of two cells, of which the second calls a tool."""
    return recorded(tmp_path_factory.mktemp("two"), "1", "hermes_tools.double(2)").read_text()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("status",), "fine"),
        (("timeout",), -1),
        (("timeout",), float("inf")),
        (("kernel",), None),
        (("owner", "session"), ""),
        (("tool_record", 0, "arguments"), "[" * 200_000),
        (("tools",), "none"),
    ],
)
def test_a_hostile_record_is_refused_in_a_sentence_and_nothing_runs(
    tmp_path: Path, two_cells: str, place: tuple[Any, ...], value: Any
) -> None:
    ran = tmp_path / "ran"

    def change(node: Any) -> None:
        inner = node["cells"][1]["metadata"]["hermes"]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        node["cells"][0]["source"] = f"open({str(ran)!r}, 'w')"

    out = tmp_path / "out.ipynb"
    out.write_text(two_cells)
    edit(out, change)
    refused(invoked("replay", out), "the record of code cell 2 is not as it was written")
    assert not ran.exists()


# -- a registry's transcript --------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session.ipynb"


def same(x: Any) -> Any:
    return x


def test_owners_and_generations_of_kernels_are_the_same_again(
    make_registry: Make, path: Path, tmp_path: Path
) -> None:
    registry = make_registry(transcript=Transcript(path, record_tools=True), limits=Limits(timeout=30))
    b = Owner("a", "child")
    steps: list[tuple[str, Any, dict[str, Any]]] = [
        ("x = 1", "a", {}),
        ("x = 2", b, {"cwd": tmp_path}),
        ("hermes_tools.same(x)", "a", {"tools": [same]}),
        ("while True: pass", "a", {"timeout": 0.5}),
        ("'x' in globals()", "a", {}),
        ("x", b, {"cwd": tmp_path}),
        ("exit(3)", b, {"cwd": tmp_path}),
        ("'x' in globals()", b, {"cwd": tmp_path}),
        ("x = 3", "a", {}),
        ("'x' in globals()", "a", {"reset": True}),
        ("import os; os._exit(4)", "a", {}),
        ("'never'", "a", {"interrupted": lambda: True}),
        ("'x' in globals()", "a", {}),
        ("x = 5", "a", {"variant": ("other",)}),
        ("'x' in globals()", "a", {}),
    ]
    for code, owner, more in steps:
        registry.execute(code, owner=owner, **more)
    registry.close()
    ended = invoked("replay", path)
    assert ended.code == 0, ended.out
    assert len(ended.out.splitlines()) == 14


def test_more_owners_than_kernels_are_the_same_again(
    make_registry: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = make_registry(transcript=path)
    for n in range(6):
        registry.execute(f"x = {n}", owner=f"owner{n}")
        registry.execute("x", owner=f"owner{n}")
    registry.close()
    monkeypatch.setattr("hermes_kernel.cli.replay.MOST_KERNELS", 2)
    assert invoked("replay", path).code == 0


def test_a_state_that_the_replay_has_lost_is_said(
    make_registry: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = make_registry(transcript=path)
    for owner in ("a", "b", "c", "a"):
        registry.execute("1", owner=owner)
    registry.close()
    monkeypatch.setattr("hermes_kernel.cli.replay.MOST_KERNELS", 1)
    ended = invoked("replay", path)
    assert ended.code == 1
    assert "it ran on a fresh kernel (evicted)" in ended.out


def test_an_interrupted_cell_is_a_gap(make_registry: Make, path: Path) -> None:
    registry = make_registry(transcript=path)
    begun = threading.Event()
    registry.execute(
        "print('in', flush=True)\nwhile True: pass",
        owner="a",
        interrupted=begun.is_set,
        on_event=lambda _: begun.set(),
    )
    registry.execute("1", owner="a")
    registry.close()
    ended = invoked("replay", path)
    assert ended.code == 1
    assert "gap: it was interrupted then" in ended.out
    assert "[2/2] same" in ended.out


def test_a_cell_that_was_out_of_time_in_a_tool_is_so_again(make_registry: Make, path: Path) -> None:
    over = threading.Event()

    def hang() -> None:
        over.wait(30)

    registry = make_registry(transcript=Transcript(path, record_tools=True))
    result = registry.execute("hermes_tools.hang()", owner="a", tools=[hang], timeout=1)
    over.set()
    assert result.status is CellStatus.TIMED_OUT
    registry.close()
    ended = invoked("replay", path)
    assert ended.code == 0, ended.out


def test_a_session_with_a_persons_cells_is_the_same_again(
    make_registry: Make, path: Path, tmp_path: Path
) -> None:
    registry = make_registry(transcript=path, limits=Limits(timeout=30))
    registry.execute("x = 41", owner="a")
    stranger = Stranger(registry, tmp_path)
    try:
        stranger.run("x += 1; print(x)")
        stranger.run("1 / 0")
        registry.execute("x", owner="a")
        stranger.run("x + 1")
    finally:
        stranger.close()
    registry.close()
    ended = invoked("replay", path)
    assert ended.code == 0, ended.out
    assert [line.split()[1:3] for line in ended.out.splitlines()][1] == ["same", "(human)"]
    edit(path, set_source(1, "x += 2; print(x)"))
    ended = invoked("replay", path)
    assert words(ended) == ["same", "DIFFERS", "same", "DIFFERS", "DIFFERS"]


def odd(a: Any, /, *rest: Any, k: Any = object(), **more: Any) -> Any:  # noqa: B008
    return [a, *rest, more]


async def soon(n: int) -> int:
    return n + 1


def broken(n: int) -> Any:
    if n:
        raise ToolError("none of it")
    raise ValueError(n)


ODD = [
    "h.odd(1, 2, 3, k=4, z={'b': 1, 'a': [1.0, 1]})",
    "h.odd('\\udc80\\ud83d', **{'é': '\\x00'})",
    "str(__import__('inspect').signature(h.odd)), h.odd.__doc__",
    "await __import__('asyncio').gather(*(h.aio.soon(n) for n in range(9)))",
    "[h.soon(1), h.soon(1), h.soon(0)]",
    "for n in range(2):\n    try: h.broken(n)\n    except h.ToolError as error: print(repr(str(error)))",
    "try: h.odd(float('nan'))\nexcept TypeError as error: print(error)",
    "for n in range(4):\n    try: print(h.soon(n))\n    except h.ToolBudgetExceeded: print('spent')",
    "try: h.soon()\nexcept TypeError as error: print(error)",
    "sorted(n for n in dir(h) if n in ('odd', 'soon', 'broken'))",
]


@pytest.mark.parametrize("code", ODD)
def test_odd_calls_are_the_same_again(make_registry: Make, path: Path, code: str) -> None:
    registry = make_registry(transcript=Transcript(path, record_tools=True))
    tools = [odd, soon, broken]
    limit = 3 if "spent" in code else 50
    result = registry.execute(
        f"import hermes_tools as h\n{code}", owner="a", tools=tools, max_tool_calls=limit
    )
    assert result.status is CellStatus.OK, result.text
    registry.close()
    ended = invoked("replay", path)
    assert ended.code == 0, ended.out


def test_late_output_that_differs_is_a_gap(make_registry: Make, path: Path, tmp_path: Path) -> None:
    registry = make_registry(transcript=path)
    registry.execute("1", owner="a")
    registry.execute("2", owner="a")
    registry.close()

    def change(node: Any) -> None:
        node["cells"][1]["metadata"]["hermes"]["late_output"] = [{"execution_count": 1, "text": "late"}]

    ended = invoked("replay", edit(path, change))
    assert ended.code == 1
    assert "gap: what cells before it wrote" in ended.out


def test_a_session_of_the_asyncio_registry_is_the_same_again(path: Path) -> None:
    async def main() -> None:
        async with KernelRegistry(transcript=Transcript(path, record_tools=True)) as registry:
            await registry.execute("hermes_tools.soon(1)", owner="a", tools=[soon])

    asyncio.run(main())
    assert invoked("replay", path).code == 0
    assert read_notebook(path).cells[0].metadata.hermes.tool_record[0].result == "2"
