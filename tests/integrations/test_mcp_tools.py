"""The tools of other MCP servers in cells: real servers, and what is read of the file that names them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from .. import traces

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from mcp_types import CallToolResult, ImageContent, TextContent
from mcp_types import Tool as OfferedTool

from hermes_kernel import ConfigError, Tool, ToolError
from hermes_kernel.integrations.mcp import tool_list
from hermes_kernel.integrations.mcptools import GUARD, ServerSpec, ToolServers, named, servers_of, value_of
from hermes_kernel.process.zygote import LAUNCHER

from ..cli.command import hermes
from .client import Connected, cancelled, connected, story, text_of
from .raw import raw

pytestmark = pytest.mark.usefixtures("leaves_nothing")

ROOT = Path(__file__).parents[2]
SERVER = ["-m", "tests.integrations.toolserver"]
SECRET = "kq83hf72hvbx91lzp0w7"


def entry(*arguments: str, allow: Any = ("*",), **more: Any) -> dict[str, Any]:
    return {
        "command": sys.executable,
        "args": [*SERVER, *arguments],
        "cwd": str(ROOT),
        "allow": list(allow),
        **more,
    }


def config(directory: Path, **servers: dict[str, Any]) -> Path:
    path = directory / "tools.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return path


@pytest.fixture
def said(tmp_path: Path) -> Path:
    return tmp_path / "said"


class Ear:
    """Where the tool servers of a test say something; a connection ends with the last process that has it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen()
        self._listening.settimeout(30)
        self._heard: list[socket.socket] = []

    def hear(self) -> str:
        connection, _ = self._listening.accept()
        connection.settimeout(30)
        self._heard.append(connection)
        text = b""
        while not text.endswith(b"\n"):
            text += connection.recv(1)
        return text.decode().strip()

    def silence(self) -> None:
        """Wait until all who have said something are gone."""
        for connection in self._heard:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""

    def close(self) -> None:
        for connection in (*self._heard, self._listening):
            connection.close()


@pytest.fixture
def ear(runtime: Path) -> Iterator[Ear]:
    path = runtime / "ear"
    made = Ear(path)
    yield made
    made.close()
    path.unlink()


# -- in a cell --------------------------------------------------------------------------------------------


async def printed(client: Connected, code: str) -> Any:
    """What a cell prints, as JSON."""
    result = await client.run(f"import json, hermes_tools\n{code}")
    assert not result.is_error, text_of(result)
    return json.loads(text_of(result).splitlines()[-1])


@story
async def test_tools_are_typed_functions_with_their_docstrings(said: Path, tmp_path: Path) -> None:
    async with connected(said, "--tools-from", config(tmp_path, mine=entry())) as client:
        (told, *_) = (await client.list_tools()).tools
        assert "* add: Add two numbers." in (told.description or "")
        assert "* odd_name_v2: Has a name" in (told.description or "")
        code = """
import inspect
f = hermes_tools.add
print(json.dumps([str(inspect.signature(f)), inspect.getdoc(f), sorted(hermes_tools.__all__)]))
"""
        signature, document, names = await printed(client, code)
        assert signature == "(a: int, b: int = 1)"
        assert document.splitlines()[0] == "Add two numbers."
        assert {"add", "plain", "picture", "odd_name_v2", "fail", "wait"} <= set(names)
        code = "print(str(inspect.signature(hermes_tools.plain)))"
        shown = text_of(await client.run(code))
        assert shown == "(text: str, times=None, kind: Literal['upper', 'lower'] = 'upper')"


@story
async def test_a_cell_gets_the_structure_else_the_text_and_an_error_is_raised(
    said: Path, tmp_path: Path
) -> None:
    async with connected(said, "--tools-from", config(tmp_path, mine=entry())) as client:
        code = """
from hermes_tools import ToolError, add, plain, picture, fail, odd_name_v2, noise
def error_of(f, *args):
    try: return f(*args)
    except (ToolError, TypeError) as error: return type(error).__name__ + ": " + str(error)
print(json.dumps([add(2, 3), add(2), plain("abc"), plain("ABC", kind="lower", times=2), odd_name_v2(),
                  picture(), error_of(fail, "it had to be"), error_of(add, "two"), error_of(add, {1}),
                  noise()]))
"""
        found = await printed(client, code)
        assert found[:5] == [{"sum": 5}, {"sum": 3}, "ABC None", "abc 2", ""]
        assert "[image that is not shown]" in found[5]
        assert found[6].startswith("ToolError: ")
        assert "it had to be" in found[6]
        assert found[7].startswith("ToolError: ")
        assert found[8].startswith("TypeError: ")
        assert found[9] == {"result": "written"}
        result = await client.run("hermes_tools.add(1)\nhermes_tools.fail('x')")
        assert result.structured_content is not None
        assert result.structured_content["tool_calls_made"] == 2
        assert [failed["tool"] for failed in result.structured_content["tool_errors"]] == ["fail"]


@story
async def test_the_async_twin_and_calls_at_once_reach_the_server_together(said: Path, tmp_path: Path) -> None:
    async with connected(said, "--tools-from", config(tmp_path, mine=entry())) as client:
        code = """
import asyncio
async def one(n): return await hermes_tools.aio.meet(str(n), others=7)
print(json.dumps([r["result"] for r in await asyncio.gather(*map(one, range(8)))]))
"""
        assert await printed(client, code) == list("01234567")
        code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(json.dumps([r["sum"] for r in pool.map(hermes_tools.add, range(8))]))
"""
        assert await printed(client, code) == list(range(1, 9))


@story
async def test_the_budget_holds(said: Path, tmp_path: Path) -> None:
    path = config(tmp_path, mine=entry())
    async with connected(said, "--tools-from", path, HERMES_KERNEL_MAX_TOOL_CALLS="2") as client:
        result = await client.run("import hermes_tools\nfor n in range(3): print(hermes_tools.add(n))")
        assert result.is_error
        assert "{'sum': 2}" in text_of(result)
        assert "ToolBudgetExceeded" in text_of(result)
        assert result.structured_content is not None
        assert result.structured_content["tool_calls_made"] == 2
        assert text_of(await client.run("hermes_tools.add(1)")) == "{'sum': 2}"


@story
async def test_only_what_is_allowed_is_there_and_names_of_two_servers_are_told_apart(
    said: Path, tmp_path: Path
) -> None:
    path = config(
        tmp_path, one=entry(allow=["add", "fail"]), two=entry(allow=["add", "plain"]), no=entry(allow=[])
    )
    async with connected(said, "--tools-from", path) as client:
        names = await printed(client, "print(json.dumps(sorted(hermes_tools.__all__)))")
        tools = {"fail", "one_add", "plain", "two_add"}
        assert tools <= set(names)
        assert not {"add", "die", "wait", "no_add"} & set(names)
        refused = await client.run("hermes_tools.die()")
        assert "no tool 'die'" in text_of(refused)
        assert await printed(client, "print(json.dumps(hermes_tools.two_add(4)))") == {"sum": 5}


@story
async def test_a_tool_that_never_returns_is_cancelled_with_its_cell(
    said: Path, tmp_path: Path, ear: Ear
) -> None:
    async with connected(said, "--tools-from", config(tmp_path, mine=entry(ear.path))) as client:
        call = asyncio.create_task(client.run("import hermes_tools; hermes_tools.wait('first')"))
        assert await asyncio.to_thread(ear.hear) == "waiting first"
        await cancelled(call)
        assert await asyncio.to_thread(ear.hear) == "cancelled first"
        late = await client.run("import hermes_tools; hermes_tools.wait('second')", timeout=0.5)
        assert late.structured_content is not None
        assert late.structured_content["status"] == "timeout"
        assert [await asyncio.to_thread(ear.hear) for _ in "ab"] == ["waiting second", "cancelled second"]
        assert text_of(await client.run("import hermes_tools; hermes_tools.add(1)")).startswith("{'sum': 2}")


@story
async def test_a_server_that_dies_in_a_call_costs_its_tools_alone(said: Path, tmp_path: Path) -> None:
    path = config(tmp_path, one=entry(allow=["die", "add"]), two=entry(allow=["plain"]))
    async with connected(said, "--tools-from", path) as client:
        code = """
kept = 1
errors = []
for call in (hermes_tools.die, lambda: hermes_tools.add(1)):
    try: call()
    except hermes_tools.ToolError as error: errors.append(str(error))
print(json.dumps([*errors, hermes_tools.plain("a")]))
"""
        gone = "the MCP server 'one' has ended; its tools cannot be called any more"
        assert await printed(client, code) == [gone, gone, "A None"]
        assert text_of(await client.run("kept")) == "1"


@story
async def test_a_servers_secrets_reach_it_alone_and_ours_do_not_reach_it(said: Path, tmp_path: Path) -> None:
    path = config(tmp_path, mine=entry(env={"SERVICE_TOKEN": SECRET, "PLACE": "here"}))
    async with connected(said, "--tools-from", path, OUR_API_KEY=SECRET[::-1]) as client:
        code = """
import os
from hermes_tools import environment
given = [environment(name)["value"] for name in ("SERVICE_TOKEN", "PLACE", "OUR_API_KEY")]
print(json.dumps([len(given[0]), given[1:], os.environ.get("SERVICE_TOKEN")]), given[0])
"""
        result = await client.run(f"import json, hermes_tools\n{code}")
        assert text_of(result) == f'[{len(SECRET)}, ["here", null], null] ***'
        assert SECRET not in result.model_dump_json()


def test_a_server_has_no_signal_ignored_that_programs_are_ended_by(tmp_path: Path) -> None:
    guarded = [sys.executable, "-I", "-S", LAUNCHER, GUARD, str(os.getpid())]
    (tmp_path / "file").touch()
    for script, code in (("yes | head -1", 0), ("ulimit -f 1; exec yes > file", 128 + signal.SIGXFSZ)):
        done = subprocess.run(
            [*guarded, "sh", "-c", script], capture_output=True, cwd=tmp_path, timeout=30, check=False
        )
        assert (done.returncode, done.stderr) == (code, b"")


# -- a server that does not start -------------------------------------------------------------------------

SILENT = {"command": sys.executable, "args": ["-c", "import time; time.sleep(600)"], "allow": ["*"]}
ENDS = {"command": sys.executable, "args": ["-c", ""], "allow": ["*"]}
BABBLES = {"command": "yes", "args": ["no protocol"], "allow": ["*"]}


@pytest.mark.parametrize(
    ("servers", "sentence"),
    [
        ({"bad": {"command": "no-such-program", "allow": ["*"]}}, "'bad' (no-such-program) does not start"),
        ({"bad": {"command": "./no-such", "allow": ["*"]}}, "there is no program './no-such'"),
        ({"bad": {**ENDS, "cwd": "/no/such/place"}}, "there is no directory '/no/such/place'"),
        ({"bad": ENDS}, "it has ended before it answered"),
        ({"good": entry(), "bad": SILENT}, "does not answer within 5 s"),
        ({"bad": BABBLES}, "does not answer within 5 s"),
        ({"good": entry(), "bad": entry(allow=["shell"])}, "'bad' has no tool 'shell'; it has add, die"),
        ({"bad": {**ENDS, "allow": "*"}}, "does not say which tools cells may call"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used_is_one_sentence(tmp_path: Path, servers: Any, sentence: str) -> None:
    path = config(tmp_path, **servers)
    before = set(psutil.Process().children(recursive=True))
    ended = hermes("mcp", "--tools-from", path, text="", HERMES_KERNEL_START_TIMEOUT="5")
    assert (ended.code, ended.out) == (2, "")
    errors = [line for line in ended.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, ended.err
    assert sentence in errors[0]
    assert len(ended.err.splitlines()) == 1, ended.err
    assert set(psutil.Process().children(recursive=True)) == before


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    ended = hermes("mcp", "--tools-from", tmp_path / "none.json", text="")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"Error: {tmp_path / 'none.json'} does not exist; give a file with mcpServers\n"


# -- the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "SIGTERM", "SIGKILL"])
def test_the_servers_of_tools_end_with_ours_by_any_end(
    said: Path, tmp_path: Path, ear: Ear, how: str
) -> None:
    path = config(tmp_path, tame=entry(allow=["add"]), wild=entry(ear.path, allow=["linger"]))
    with raw(said, "--tools-from", path) as server:
        server.initialize()
        server.call(1, "import hermes_tools; hermes_tools.linger()")
        assert server.answer(1)["result"]["isError"] is False
        assert ear.hear() == "lingers"
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len([child for child in children if "tests.integrations.toolserver" in child.cmdline()]) == 4
        if how == "closed":
            server.process.stdin.close()  # type: ignore[union-attr]
        else:
            server.process.send_signal(getattr(signal, how))
        server.ended()
        ear.silence()
    assert traces.eventually(lambda: all(map(traces.is_gone, children)))


def test_the_servers_of_tools_end_with_a_client_that_is_killed(said: Path, tmp_path: Path, ear: Ear) -> None:
    path = config(tmp_path, wild=entry(ear.path, allow=["wait"]))
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.doomed", str(said), "--tools-from", str(path)],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        cwd=ROOT,
    )
    with client:
        assert client.stdout is not None
        server = psutil.Process(int(client.stdout.readline().split()[0]))
        children = server.children(recursive=True)
        client.kill()
    assert traces.eventually(lambda: all(map(traces.is_gone, [server, *children])), within=10)


# -- without a process ------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no mcpServers"),
        ('{"mcpServers": []}', "has no mcpServers"),
        ('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "'a' is there twice"),
        ('{"mcpServers": {"a": 5}}', "mcpServers.a in"),
        ('{"mcpServers": {"a": {"command": "x"}}}', 'give "allow"'),
        ('{"mcpServers": {"a": {"command": "x", "allow": [5]}}}', 'give "allow"'),
        ('{"mcpServers": {"a": {"url": "http://x", "allow": []}}}', "unknown key 'url'"),
        ('{"mcpServers": {"a": {"type": "http", "allow": []}}}', "only servers with a command"),
        ('{"mcpServers": {"a": {"command": ["x"], "allow": []}}}', "only servers with a command"),
        ('{"mcpServers": {"a": {"command": "x", "allow": [], "args": "y"}}}', "args is a list of texts"),
        ('{"mcpServers": {"a": {"command": "x", "allow": [], "env": {"A": 1}}}}', "env is no object"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, sentence: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        servers_of(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_says_which_servers_and_which_of_their_tools(tmp_path: Path) -> None:
    path = written(
        tmp_path, json.dumps({"mcpServers": {"a": {"command": "x", "allow": ["f"], "type": "stdio"}}})
    )
    (spec,) = servers_of(path)
    assert spec == ServerSpec("a", "x", (), {}, None, ("f",))
    assert spec.allows("f")
    assert not spec.allows("g")
    assert ServerSpec("a", "x", allow=("*",)).allows("g")


def offered(name: str) -> OfferedTool:
    return OfferedTool(name=name, input_schema={"type": "object"})


@given(st.text())
def test_whatever_a_tool_is_named_a_cell_can_call_it(name: str) -> None:
    ((made, _),) = named([("server", offered(name))])
    assert made.isascii()
    Tool(made, lambda: None)


def test_names_that_stay_the_same_are_refused() -> None:
    names = [name for name, _ in named([("a", offered("f")), ("b", offered("f")), ("b", offered("class"))])]
    assert names == ["a_f", "b_f", "class_"]
    with pytest.raises(ConfigError, match="allow one of them only"):
        named([("a", offered("x-y")), ("a", offered("x_y"))])
    with pytest.raises(ConfigError, match="'a_f'"):
        named([("a", offered("f")), ("b", offered("f")), ("c", offered("a_f"))])


def test_a_result_becomes_a_value() -> None:
    text, image = TextContent(text="t"), ImageContent(data="", mime_type="image/png")
    assert value_of("f", CallToolResult(content=[text], structured_content={"a": 1})) == {"a": 1}
    assert value_of("f", CallToolResult(content=[text, text])) == "t\nt"
    assert value_of("f", CallToolResult(content=[text, image])) == "t\n[image that is not shown]"
    assert value_of("f", CallToolResult(content=[])) == ""
    assert value_of("f", CallToolResult(content=[], structured_content={})) == {}
    with pytest.raises(ToolError, match=r"^t$"):
        value_of("f", CallToolResult(content=[text], is_error=True, structured_content={"a": 1}))
    with pytest.raises(ToolError, match="f has failed without saying why"):
        value_of("f", CallToolResult(content=[], is_error=True))


def test_a_description_that_is_blank_is_none_in_the_list() -> None:
    (told, *_) = tool_list([Tool("f", lambda: None, "  \n")])
    assert "* f" in (told.description or "")


@story
async def test_without_a_file_there_are_no_tools() -> None:
    async with ToolServers.of(None, 1) as servers:
        assert servers == ToolServers()
