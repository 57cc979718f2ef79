"""The agent's tools as a cell sees them, and the calls of a cell as the host sees them."""

import asyncio
import contextvars
import functools
import inspect
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from hermes_kernel import (
    UNSET,
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    HermesKernelError,
    HermesKernelManager,
    KernelRegistry,
    Limits,
    Loss,
    Owner,
    Tool,
    ToolCallContext,
    ToolError,
)
from hermes_kernel.cell.events import ToolCallEnded, ToolCallStarted

from .test_cells_basics import still_answers
from .test_nbclient import started

Make = Callable[..., BlockingRegistry]

OK = CellStatus.OK
SPEAKER = contextvars.ContextVar("speaker", default="nobody")
LOCAL = threading.local()


class Host:
    """The agent's side: a tool that gives back what it gets, and keeps it."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def echo(self, value: Any) -> Any:
        self.got.append(value)
        return value


@pytest.fixture
def host() -> Host:
    return Host()


def value_of(result: CellResult) -> Any:
    """What the cell printed last, as JSON."""
    assert result.status is OK, result.text
    return json.loads(result.stdout.splitlines()[-1])


# -- from where a cell calls ------------------------------------------------------------------------------

WAYS = {
    "the main thread": "r = [h.echo(n) for n in range(40)]",
    "threads": """
def call(n): r[n] = h.echo(n)
threads = [threading.Thread(target=call, args=(n,)) for n in range(40)]
[t.start() for t in threads]; [t.join() for t in threads]""",
    "a subclass of Thread": """
class Caller(threading.Thread):
    def __init__(self, n):
        super().__init__()
        self.n = n
    def run(self):
        r[self.n] = h.echo(self.n)
threads = [Caller(n) for n in range(40)]
[t.start() for t in threads]; [t.join() for t in threads]""",
    "threads of a thread": """
def call(n): r[n] = h.echo(n)
def start():
    threads = [threading.Thread(target=call, args=(n,)) for n in range(40)]
    [t.start() for t in threads]; [t.join() for t in threads]
outer = threading.Thread(target=start); outer.start(); outer.join()""",
    "timers": """
def call(n): r[n] = h.echo(n)
timers = [threading.Timer(0.01, call, (n,)) for n in range(40)]
[t.start() for t in timers]; [t.join() for t in timers]""",
    "a thread pool": """
with ThreadPoolExecutor(16) as pool: r = list(pool.map(h.echo, range(40)))""",
    "a multiprocessing thread pool": """
from multiprocessing.pool import ThreadPool
with ThreadPool(16) as pool: r = pool.map(h.echo, range(40), 1)""",
    "gather": "r = await asyncio.gather(*(h.aio.echo(n) for n in range(40)))",
    "a task group": """
async with asyncio.TaskGroup() as group: tasks = [group.create_task(h.aio.echo(n)) for n in range(40)]
r = [task.result() for task in tasks]""",
    "to_thread": "r = await asyncio.gather(*(asyncio.to_thread(h.echo, n) for n in range(40)))",
    "the executor of the loop": """
loop = asyncio.get_running_loop()
r = await asyncio.gather(*(loop.run_in_executor(None, h.echo, n) for n in range(40)))""",
    "an event loop in a thread": """
async def all(): return await asyncio.gather(*(h.aio.echo(n) for n in range(40)))
with ThreadPoolExecutor(1) as pool: r = pool.submit(lambda: asyncio.run(all())).result()""",
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_calls_from_anywhere_in_a_cell_get_their_own_answers_under_the_callers_context(
    registry: BlockingRegistry, way: str
) -> None:
    heard = []

    def echo(n: int) -> int:
        heard.append((n, SPEAKER.get()))
        time.sleep(random.uniform(0, 0.05))
        return n

    def conversation() -> CellResult:
        SPEAKER.set("the caller")
        return registry.execute(
            "import asyncio, threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
            f"import hermes_tools as h\nr = [None] * 40\n{way}\nr == list(range(40)) or r",
            owner="a",
            tools=[echo],
        )

    result = contextvars.copy_context().run(conversation)
    assert result.value == "True", result.text
    assert sorted(heard) == [(n, "the caller") for n in range(40)]
    assert len(result.tool_calls) == result.to_dict()["tool_calls_made"] == 40
    assert still_answers(registry).kernel.reused


@pytest.mark.parametrize(("way", "count"), [("threads", 20), ("gather", 20), ("to_thread", 5)])
def test_calls_are_served_side_by_side(registry: BlockingRegistry, way: str, count: int) -> None:
    together = threading.Barrier(count)

    def echo(n: int) -> int:
        together.wait(30)
        return n

    begin = f"import asyncio, threading, hermes_tools as h\nr = [None] * {count}\n"
    code = WAYS[way].replace("40", str(count))
    result = registry.execute(f"{begin}{code}\nr", owner="a", tools=[echo])
    assert result.value == str(list(range(count))), result.text


def test_calls_of_two_owners_at_once_run_under_their_own_callers(registry: BlockingRegistry) -> None:
    together = threading.Barrier(2)

    def who() -> str:
        together.wait(30)
        return SPEAKER.get()

    results: dict[str, CellResult] = {}

    def conversation(owner: str) -> None:
        SPEAKER.set(owner)
        results[owner] = registry.execute("[hermes_tools.who() for _ in range(10)]", owner=owner, tools=[who])

    threads = [threading.Thread(target=conversation, args=(owner,)) for owner in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for owner in ("a", "b"):
        assert results[owner].value == repr([owner] * 10), results[owner].text


def test_the_bridge_answers_a_call_that_comes_after_one_was_given_up(registry: BlockingRegistry) -> None:
    release = threading.Event()

    def hold() -> str:
        release.wait(60)
        return "late"

    def echo(n: int) -> int:
        return n

    code = """
import asyncio, signal, hermes_tools as h
class Alarm(Exception): pass
def ring(*_): raise Alarm
got = []
for n in range(5):
    try:
        await asyncio.wait_for(h.aio.hold(), 0.1)
    except TimeoutError:
        got.append(h.echo(n))
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        h.hold()
    except Alarm:
        got.append(await h.aio.echo(n))
waits = [asyncio.wait_for(h.aio.hold(), 0.2) for _ in range(100)]
given_up = await asyncio.gather(*waits, return_exceptions=True)
assert {type(error) for error in given_up} == {TimeoutError}
got += [h.echo(n) for n in range(40)]
got += await asyncio.gather(*(h.aio.echo(n) for n in range(40)))
print(got)"""
    try:
        result = registry.execute(code, owner="a", tools=[hold, echo], timeout=60, max_tool_calls=None)
    finally:
        release.set()
    wanted = [n for n in range(5) for _ in range(2)] + [*range(40), *range(40)]
    assert result.stdout == f"{wanted}\n", result.text


def test_an_exception_of_the_cells_own_signal_handler_ends_a_call_as_itself(
    registry: BlockingRegistry,
) -> None:
    release = threading.Event()

    def hold() -> None:
        release.wait(60)

    code = """
import signal
def ring(*_): raise TimeoutError('the alarm rang')
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.2)
hermes_tools.hold()"""
    try:
        result = registry.execute(code, owner="a", tools=[hold], timeout=30)
    finally:
        release.set()
    assert result.error is not None, result.text
    assert (result.error.ename, result.error.evalue) == ("TimeoutError", "the alarm rang")


def test_a_call_whose_connection_breaks_is_an_error_and_is_not_run_again(
    registry: BlockingRegistry, host: Host, tmp_path: Path
) -> None:
    begun, release = tmp_path / "begun", threading.Event()
    os.mkfifo(begun)
    ran = []

    def hold() -> None:
        ran.append(1)
        begun.open("w").close()
        release.wait(60)

    code = f"""
import gc, socket, threading, hermes_tools as h
def call():
    try:
        said.append(h.hold())
    except h.ToolError as error:
        said.append(str(error))
said = []
caller = threading.Thread(target=call); caller.start()
open({str(begun)!r}).close()
for thing in gc.get_objects():
    if isinstance(thing, socket.socket) and thing.family == socket.AF_UNIX and thing.getpeername():
        thing.shutdown(socket.SHUT_RDWR)
caller.join(30)
print(said, h.echo(5))"""
    try:
        result = registry.execute(code, owner="a", tools=[hold, host.echo])
    finally:
        release.set()
    assert result.status is OK, result.text
    assert "connection" in result.stdout
    assert result.stdout.endswith(" 5\n")
    assert ran == [1]


# -- how tools are given ----------------------------------------------------------------------------------


def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


async def add_later(a: int, b: int = 0) -> int:
    await asyncio.sleep(0)
    return a + b


class Adder:
    """Serves its tools by their names."""

    def tools(self) -> list[Tool]:
        return [Tool("add", description="Add.", parameters=SCHEMA)]

    def dispatch(self, name: str, arguments: dict[str, Any], context: ToolCallContext) -> Any:
        assert (name, context.origin) == ("add", "execute_code")
        return add(**arguments)


class LaterAdder(Adder):
    async def dispatch(self, name: str, arguments: dict[str, Any], context: ToolCallContext) -> Any:
        return await add_later(**arguments)


class Callable_:
    def __call__(self, a: int, b: int = 0) -> int:
        return a + b


SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer", "default": 0}, "a": {"type": "integer"}},
    "required": ["a"],
}

FORMS: dict[str, Callable[[], Any]] = {
    "functions": lambda: [add],
    "a generator": lambda: (tool for tool in [add]),
    "a coroutine function": lambda: [Tool("add", add_later)],
    "Tools": lambda: [Tool("add", lambda a, b=0: a + b)],
    "a Tool with a schema": lambda: [Tool("add", lambda **given: add(**given), parameters=SCHEMA)],
    "a mapping": lambda: {"add": lambda a, b=0: a + b},
    "a mapping of Tools": lambda: {"add": Tool("other_name", add)},
    "a mapping of partials": lambda: {"add": functools.partial(add, b=0)},
    "a mapping of coroutine functions": lambda: {"add": add_later},
    "a mapping of objects": lambda: {"add": Callable_()},
    "a dispatcher": Adder,
    "a dispatcher of coroutines": LaterAdder,
}
CALLS_OF_ADD = """
import hermes_tools as h
h.add(1), h.add(1, b=2), h.add(a=1, b=3), await h.aio.add(1, b=4), h.__all__[0]"""


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tools_may_be_given_in_any_form(registry: BlockingRegistry, form: Callable[[], Any]) -> None:
    result = registry.execute(CALLS_OF_ADD, owner="a", tools=form())
    assert result.value == "(1, 3, 4, 5, 'add')", result.text


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.usefixtures("leaves_nothing")
def test_tools_may_be_given_in_any_form_to_the_registry_for_asyncio(form: Callable[[], Any]) -> None:
    async def main() -> CellResult:
        async with KernelRegistry() as registry:
            return await registry.execute(CALLS_OF_ADD, owner="a", tools=form())

    result = asyncio.run(main())
    assert result.value == "(1, 3, 4, 5, 'add')", result.text


WRONG_TOOLS: dict[str, Any] = {
    "a string": "add",
    "a number": 3,
    "None": None,
    "what cannot be called": [3],
    "a mapping to what cannot be called": {"add": "add"},
    "a lambda": [lambda: 1],
    "no identifier": {"add-it": add},
    "a keyword": {"class": add},
    "the name of a helper": {"retry": add},
    "two of one name": [add, Tool("add", add_later)],
    "a function without a name": [functools.partial(add)],
    "a Tool without a handler": [Tool("add")],
}


@pytest.mark.parametrize("tools", WRONG_TOOLS.values(), ids=WRONG_TOOLS)
def test_what_is_no_tool_is_refused_before_anything_is_started(
    registry: BlockingRegistry, tools: Any
) -> None:
    with pytest.raises(ConfigError, match="tool"):
        registry.execute("1", owner="a", tools=tools)
    assert registry.kernels() == ()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "object", "properties": ["a"]},
        {"type": "object", "properties": {}, "required": ["a"]},
        "object",
    ],
)
def test_what_is_no_schema_of_an_object_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match="add"):
        Tool("add", add, parameters=schema)


@pytest.mark.usefixtures("leaves_nothing")
def test_under_asyncio_an_async_tool_runs_on_the_callers_loop_and_a_blocking_one_does_not_hold_it() -> None:
    async def main() -> None:
        here, loops = asyncio.get_running_loop(), []
        asked, answered = asyncio.Event(), threading.Event()

        async def on_the_loop() -> str:
            loops.append(asyncio.get_running_loop())
            asked.set()
            return "async"

        def blocking() -> bool:
            here.call_soon_threadsafe(asked.set)
            return answered.wait(30)

        async def caller() -> None:
            await asked.wait()
            answered.set()

        async with KernelRegistry() as registry:
            result = await registry.execute("hermes_tools.on_the_loop()", owner="a", tools=[on_the_loop])
            assert (result.value, loops) == ("'async'", [here])
            asked.clear()
            result, _ = await asyncio.gather(
                registry.execute("hermes_tools.blocking()", owner="a", tools=[blocking]), caller()
            )
            assert result.value == "True"

    asyncio.run(main())


def test_async_tools_run_side_by_side_for_threads_too(registry: BlockingRegistry) -> None:
    here, met = [], asyncio.Event()

    async def meet(n: int) -> None:
        here.append(n)
        if len(here) == 5:
            met.set()
        await asyncio.wait_for(met.wait(), 30)

    result = registry.execute(
        "import asyncio\nlen(await asyncio.gather(*(hermes_tools.aio.meet(n) for n in range(5))))",
        owner="a",
        tools=[meet],
    )
    assert result.value == "5", result.text


# -- what a tool looks like -------------------------------------------------------------------------------

NOTHING = object()


def read_file(path: str, limit: int = 10, *parts: str, encoding: str | None = None, **rest: Any):  # type: ignore[no-untyped-def]
    """Read a file.

    At most limit lines of it.
    """


def returns_a_mapping(path: str) -> dict[str, int]:
    return {}


def test_a_tool_has_its_own_signature_docstring_and_hints(registry: BlockingRegistry) -> None:
    code = """
import inspect, json, typing, hermes_tools as h
f, aio = h.read_file, h.aio.read_file
print(json.dumps([
    str(inspect.signature(f)), str(inspect.signature(aio)), inspect.getdoc(f), inspect.getdoc(aio),
    f.__name__, f.__module__, [str(typing.get_type_hints(f)[name]) for name in ('path', 'limit')],
    inspect.iscoroutinefunction(f), inspect.iscoroutinefunction(aio),
]))"""
    seen = value_of(registry.execute(code, owner="a", tools=[read_file]))
    signature, doc = str(inspect.signature(read_file)), inspect.getdoc(read_file)
    assert seen[:6] == [signature, signature, doc, doc, "read_file", "hermes_tools"]
    assert seen[6:] == [["<class 'str'>", "<class 'int'>"], False, True]


def test_a_tool_says_what_it_returns(registry: BlockingRegistry) -> None:
    result = registry.execute(
        "import inspect; print(inspect.signature(hermes_tools.returns_a_mapping))",
        owner="a",
        tools=[returns_a_mapping],
    )
    assert result.stdout == f"{inspect.signature(returns_a_mapping)}\n"


def test_help_shows_what_a_tool_takes_and_the_module_which_there_are(registry: BlockingRegistry) -> None:
    shown = registry.execute("help(hermes_tools.read_file)", owner="a", tools=[read_file, add]).text
    assert "read_file(path: str, limit: int = 10" in shown
    assert "At most limit lines of it." in shown
    shown = registry.execute("help(hermes_tools)", owner="a", tools=[read_file, add]).text
    assert "read_file(path: str" in shown
    assert "Add two numbers." in shown


def test_a_schema_becomes_a_signature_and_what_is_left_out_is_not_sent(registry: BlockingRegistry) -> None:
    got = []

    def search(**given: Any) -> None:
        got.append(given)

    schema = {
        "type": "object",
        "properties": {
            "limit": {"type": "integer", "default": 5},
            "kind": {"enum": ["file", "text"]},
            "pattern": {"type": "string"},
            "max-depth": {"type": "integer"},
        },
        "required": ["pattern"],
    }
    code = """
import inspect, json, hermes_tools as h
signature = inspect.signature(h.search)
first = next(iter(signature.parameters.values()))
h.search("x"); h.search(pattern="y", limit=2); h.search("z", **{"max-depth": 1})
print(json.dumps([list(signature.parameters)[:3], str(first), signature.parameters['limit'].default,
                  str(signature.parameters['kind'].annotation), h.search.__doc__]))"""
    result = registry.execute(
        code, owner="a", tools=[Tool("search", search, description="Find it.", parameters=schema)]
    )
    assert value_of(result) == [
        ["pattern", "limit", "kind"],
        "pattern: str",
        5,
        "Literal['file', 'text']",
        "Find it.",
    ]
    assert got == [{"pattern": "x"}, {"pattern": "y", "limit": 2}, {"pattern": "z", "max-depth": 1}]


ODD_SCHEMAS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "any": ({"additionalProperties": True}, "a=1, b=2", {"a": 1, "b": 2}),
    "none": ({}, "", {}),
    "required twice": ({"properties": {"a": {}}, "required": ["a", "a"]}, "1", {"a": 1}),
    "the name of a keyword": ({"properties": {"class": {}}}, "**{'class': 1}", {"class": 1}),
    "others": ({"properties": {"others": {}, "max-depth": {}}}, "others=1", {"others": 1}),
    "self": ({"properties": {"self": {}, "args": {}}}, "1, args=2", {"self": 1, "args": 2}),
    "types": ({"properties": {"a": {"type": ["string", "null"]}, "b": True}}, "'x'", {"a": "x"}),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "given", "wanted"), ODD_SCHEMAS.values(), ids=ODD_SCHEMAS)
def test_a_tool_can_be_called_whatever_its_schema_names(
    registry: BlockingRegistry, schema: dict[str, Any], given: str, wanted: dict[str, Any]
) -> None:
    tool = Tool("f", lambda **named: named, parameters={"type": "object", **schema})
    result = registry.execute(f"hermes_tools.f({given})", owner="a", tools=[tool], timeout=10)
    assert result.value == repr(wanted), result.text or result.status


def test_a_default_that_is_not_json_is_shown_and_stays_the_hosts(registry: BlockingRegistry) -> None:
    got = []

    def find(where: Path = Path("here"), what: object = NOTHING) -> None:
        got.append((where, what))

    result = registry.execute(
        "import inspect\nfrom hermes_tools import find\nfind(), find('x')\nprint(inspect.signature(find))",
        owner="a",
        tools=[find],
    )
    assert repr(Path("here")) in result.stdout, result.text
    assert got == [(Path("here"), NOTHING), ("x", NOTHING)]


def test_the_modules_names_are_the_tools_and_the_helpers(registry: BlockingRegistry) -> None:
    code = """
import json, hermes_tools as h
names = {}
exec('from hermes_tools import *', names)
from hermes_tools import add, aio, retry
from hermes_tools.aio import add as add_async
starred = [name for name in names if name[0] != '_']
print(json.dumps([sorted(h.__all__), [n for n in h.__all__ if n not in dir(h)], starred == h.__all__,
                  add(1, 2), await aio.add(1, 3), await add_async(1, 4)]))"""
    helpers = ["json_parse", "shell_quote", "retry", "ToolError", "ToolBudgetExceeded"]
    seen = value_of(registry.execute(code, owner="a", tools=[add, read_file]))
    assert seen == [sorted([*helpers, "add", "read_file"]), [], True, 3, 4, 5]


def test_the_module_is_a_name_of_the_first_cell_and_the_tools_are_none(registry: BlockingRegistry) -> None:
    result = registry.execute("hermes_tools.add(1, 2), 'add' in globals()", owner="a", tools=[add])
    assert result.value == "(3, False)", result.text


def test_a_tool_that_there_is_not_is_an_error_that_names_those_that_there_are(
    registry: BlockingRegistry,
) -> None:
    result = registry.execute("hermes_tools.ad(1)", owner="a", tools=[add, read_file])
    assert result.error is not None
    assert result.error.ename == "AttributeError"
    assert "add, read_file" in result.error.evalue
    result = registry.execute("from hermes_tools import ad", owner="a", tools=[add])
    assert result.error is not None
    assert result.error.ename == "ImportError"


def test_a_tool_can_be_pickled_by_its_name(registry: BlockingRegistry) -> None:
    result = registry.execute(
        "import pickle; pickle.loads(pickle.dumps(hermes_tools.add))(1, 2)", owner="a", tools=[add]
    )
    assert result.value == "3", result.text


# -- helpers ----------------------------------------------------------------------------------------------


def test_the_helpers_do_what_they_say(registry: BlockingRegistry) -> None:
    code = r"""
import json, time
from hermes_tools import json_parse, retry, shell_quote, ToolError, ToolBudgetExceeded
tries = []
def fails_twice():
    tries.append(1)
    if len(tries) < 3: raise ValueError('not yet')
    return 'done'
def fails(): tries.append(1); raise ValueError('never')
began = time.monotonic()
answers = [retry(fails_twice, max_attempts=3, delay=0.1)]
waited, tries[:] = time.monotonic() - began, []
for attempts in (3, 1):
    try:
        retry(fails, max_attempts=attempts, delay=0)
    except ValueError as error:
        answers.append([str(error), len(tries)])
    tries[:] = []
print(json.dumps([json_parse('\ufeff{"a": "b\tc\nd"}'), shell_quote("it's; rm"), shell_quote(''), answers,
                  waited, issubclass(ToolBudgetExceeded, ToolError)]))"""
    *seen, waited, is_kind = value_of(registry.execute(code, owner="a", tools=[add]))
    assert seen == [
        {"a": "b\tc\nd"},
        "'it'\"'\"'s; rm'",
        "''",
        ["done", ["never", 3], ["never", 1]],
    ]
    assert waited >= 0.3, "0.1 s, then twice that"
    assert is_kind


# -- what travels -----------------------------------------------------------------------------------------

EXACT: list[Any] = [
    None, True, False, 0, 1, -1, 2**53 + 1, 2**60, 2**64 + 1, -(2**63), 10**300,
    0.0, -0.0, 0.1, 1e308, 5e-324, 1.0, 1e22,
    "", "a", "é", "😀", "\x00\x01\x1f\x7f", "\u2028\u2029\ufeff", "\r\n\t\\\"'", "\ud800", "a\udfffb",
    "\udcff", [], {}, [[]], [{}], {"": None}, {"\ud800": "\ud800"}, {"a": {"b": [1, {"c": [True, None]}]}},
    {"true": True, "1": 1}, ["x" * 1000] * 100,
]  # fmt: skip


def test_what_json_has_arrives_as_it_was_sent_and_comes_back(registry: BlockingRegistry, host: Host) -> None:
    code = f"""
import hermes_tools as h
sent = {EXACT!r}
back = [h.echo(value) for value in sent] + [await h.aio.echo(value) for value in sent]
[repr(a) for a, b in zip(sent * 2, back, strict=True) if repr(a) != repr(b)]"""
    result = registry.execute(code, owner="a", tools=[host.echo], max_tool_calls=None)
    assert result.value == "[]", result.text
    assert list(map(repr, host.got)) == list(map(repr, EXACT * 2))


def test_ten_megabytes_arrive_whole_in_both_directions(registry: BlockingRegistry, host: Host) -> None:
    text = "0123456789é" * 900_000
    code = """
text = "0123456789é" * 900_000
hermes_tools.echo(text) == text, await hermes_tools.aio.echo(text) == text"""
    result = registry.execute(code, owner="a", tools=[host.echo])
    assert result.value == "(True, True)", result.text
    assert host.got == [text, text]


NOT_JSON = {
    "{1, 2}": "value",
    "float('nan')": "value",
    "float('inf')": "value",
    "[-float('inf')]": "value[0]",
    "b'\\xff'": "value",
    "object()": "value",
    "cyclic": "value",
    "{'a': cyclic}": "value['a']",
    "{1: 2}": "value",
    "{'a': {None: 1}}": "value['a']",
    "{'a': [0, {'b': {3}}]}": "value['a'][1]['b']",
    "(1, (2, [b'']))": "value[1][1][0]",
    "10**5000": "value",
    "1j": "value",
    "print": "value",
    "range(3)": "value",
    "decimal.Decimal(1)": "value",
    "deep": "value",
}


def test_an_argument_that_is_not_json_is_a_type_error_with_its_place_and_nothing_is_sent(
    registry: BlockingRegistry, host: Host
) -> None:
    code = f"""
import decimal, json, hermes_tools as h
cyclic, deep = [], []
cyclic.append(cyclic)
for _ in range(5000): deep = [deep]
said = []
for text in {list(NOT_JSON)!r}:
    for call in (h.echo, h.aio.echo):
        try:
            answer = call(eval(text))
            if call is h.aio.echo: answer = await answer
            said.append('answered ' + str(answer))
        except Exception as error:
            said.append(type(error).__name__ + ': ' + str(error))
print(h.echo('the only one'))
print(json.dumps(said))"""
    result = registry.execute(code, owner="a", tools=[host.echo], max_tool_calls=1)
    for (text, place), *said in zip(NOT_JSON.items(), *[iter(value_of(result))] * 2, strict=True):
        for sentence in said:
            assert sentence.startswith("TypeError: "), text
            assert "echo" in sentence, text
            assert place in sentence, text
    assert host.got == ["the only one"]
    assert [call.args for call in result.tool_calls] == ["value='the only one'"]


def test_wrong_names_and_counts_are_a_type_error_and_nothing_is_sent(registry: BlockingRegistry) -> None:
    ran = []

    def two(first: Any, second: Any = 2) -> Any:
        ran.append((first, second))
        return [first, second]

    code = """
import json, hermes_tools as h
said = []
for call in (h.two, h.aio.two):
    for args, named in ([], {}), ([1, 2, 3], {}), ([1], {'c': 3}), ([1], {'first': 1}), ([], {'second': 1}):
        try:
            answer = call(*args, **named)
            if call is h.aio.two: answer = await answer
            said.append('answered')
        except Exception as error:
            said.append(type(error).__name__ + ': ' + str(error))
print(h.two(0))
print(json.dumps(said))"""
    result = registry.execute(code, owner="a", tools=[two], max_tool_calls=1)
    said = value_of(result)
    assert [sentence for sentence in said if not sentence.startswith("TypeError: two()")] == []
    assert len(said) == 10
    assert ran == [(0, 2)]
    assert len(result.tool_calls) == 1


def everything(a: Any, b: Any = 2, /, c: Any = 3, *args: Any, d: Any, e: Any = 5, **rest: Any) -> list[Any]:
    return [a, b, c, list(args), d, e, rest]


def named_and_rest(a: Any = 1, b: Any = 2, *args: Any) -> list[Any]:
    return [a, b, list(args)]


def same_name(a: Any, /, *args: Any, **rest: Any) -> list[Any]:
    return [a, list(args), rest]


@pytest.mark.parametrize(
    "call",
    [
        "everything(1, d=4)",
        "everything(1, 9, d=4)",
        "everything(1, 9, 8, 7, 6, d=4, e=0, f=1, g=[2])",
        "everything(1, d=4, args=7)",
        "everything(1, c=8, d=4)",
        "everything(1, 9, c=8, d=4)",
        "named_and_rest()",
        "named_and_rest(5)",
        "named_and_rest(a=5)",
        "named_and_rest(b=5)",
        "named_and_rest(1, b=5)",
        "named_and_rest(1, 2, 3, 4)",
        "same_name(1, a=2)",
        "same_name(1, 2, args=3)",
    ],
)
def test_arguments_reach_the_parameters_that_python_would_give_them_to(
    registry: BlockingRegistry, call: str
) -> None:
    tools = [everything, named_and_rest, same_name]
    result = registry.execute(f"hermes_tools.{call}", owner="a", tools=tools)
    assert result.value == repr(eval(call)), result.text


def test_an_argument_that_is_too_large_is_an_error_and_the_bridge_goes_on(
    registry: BlockingRegistry, host: Host
) -> None:
    code = """
try:
    hermes_tools.echo('x' * 100_000_000)
except hermes_tools.ToolError as error:
    print(error)
print(hermes_tools.echo(1))"""
    result = registry.execute(code, owner="a", tools=[host.echo], max_tool_calls=1)
    assert result.status is OK, result.text
    assert "bytes" in result.stdout
    assert host.got == [1]


# -- handlers that fail -----------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _cyclic() -> list[Any]:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    return cyclic


RAISED: dict[str, BaseException] = {
    "boom": ValueError("boom"),
    "own words": ToolError("own words"),
    "KeyError": KeyError("x"),
    "Unprintable": Unprintable(),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "StopIteration": StopIteration(),
    "ancelled": asyncio.CancelledError(),
}
RETURNED: dict[str, Callable[[], Any]] = {
    "bytes": lambda: b"\xff",
    "nan": lambda: {"rows": [1, float("nan")]},
    "inf": lambda: float("inf"),
    "set": lambda: {"a": {1}},
    "object": object,
    "cyclic": _cyclic,
    "int": lambda: {1: 2},
    "lambda": lambda: [lambda: 1],
}


def _try_each(names: list[str]) -> str:
    return f"""
import json, hermes_tools as h
said = {{}}
for name in {names!r}:
    try:
        said[name] = ['answered', repr(getattr(h, name)())]
    except BaseException as error:
        said[name] = [type(error).__name__, str(error)]
    assert h.echo(name) == name
print(json.dumps(said))"""


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("said", RAISED)
def test_a_handler_that_raises_is_a_tool_error_with_its_text_and_the_next_call_works(
    registry: BlockingRegistry, said: str, is_async: bool
) -> None:
    error = RAISED[said]

    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    async def echo(value: Any) -> Any:
        return value

    tools = {"fail": fail_later if is_async else fail, "echo": echo}
    result = registry.execute(_try_each(["fail"]), owner="a", tools=tools, timeout=10)
    kind, text = value_of(result)["fail"]
    assert kind == "ToolError"
    assert said in text
    if isinstance(error, ToolError):
        assert text == str(error)
    assert [call.error for call in result.tool_calls] == [text, None]
    assert still_answers(registry).kernel.reused


def test_a_result_that_is_not_json_is_a_tool_error_and_the_next_call_works(
    registry: BlockingRegistry, host: Host
) -> None:
    tools = {f"returns_{name}": handler for name, handler in RETURNED.items()}
    result = registry.execute(_try_each(list(tools)), owner="a", tools={**tools, "echo": host.echo})
    said = value_of(result)
    for name in tools:
        kind, text = said[name]
        assert kind == "ToolError", name
        assert name in text, "it says which tool"
    assert host.got == list(tools)


def test_a_result_of_a_hundred_megabytes_is_a_tool_error_and_the_next_call_works(
    registry: BlockingRegistry, host: Host
) -> None:
    tools = {"huge": lambda: "x" * 100_000_000, "echo": host.echo}
    result = registry.execute(_try_each(["huge"]), owner="a", tools=tools)
    kind, text = value_of(result)["huge"]
    assert kind == "ToolError"
    assert "bytes" in text


# -- a tool set that changes ------------------------------------------------------------------------------


def test_tools_change_from_cell_to_cell_and_the_state_stays(registry: BlockingRegistry) -> None:
    first = registry.execute("import hermes_tools as h; f = h.add; x = [f(1, 2)]", owner="a", tools=[add])
    assert first.status is OK, first.text
    other = registry.execute(
        "x.append(h.shout('a')); x, hasattr(h, 'add'), h.__all__[0]",
        owner="a",
        tools={"shout": lambda text: text.upper()},
    )
    assert other.value == "([3, 'A'], False, 'shout')", other.text
    assert (other.kernel.reused, other.kernel.lost) == (True, None)
    kept = registry.execute("f(1, 2)", owner="a", tools={"shout": lambda text: text.upper()})
    assert kept.error is not None
    assert kept.error.ename == "ToolError"
    assert "'add' is no tool of this cell" in kept.error.evalue
    assert kept.tool_calls == ()
    same_name = registry.execute(
        "h.add('a', 'b', 'c'), f(1, 2)", owner="a", tools={"add": lambda *parts: "".join(map(str, parts))}
    )
    assert same_name.error is not None, "the kept function has the parameters of before"
    again = registry.execute("h.add(2, 3), f(3, 4), x", owner="a", tools=[add])
    assert (again.value, again.kernel.reused) == ("(5, 7, [3, 'A'])", True), again.text


def test_a_cell_without_tools_has_the_helpers_and_no_tool(registry: BlockingRegistry) -> None:
    registry.execute("import hermes_tools as h; f = h.add", owner="a", tools=[add])
    none = registry.execute("sorted(h.__all__), h.shell_quote('a b'), hasattr(h, 'add')", owner="a")
    helpers = sorted(["json_parse", "shell_quote", "retry", "ToolError", "ToolBudgetExceeded"])
    assert none.value is not None, none.text
    assert " ".join(none.value.split()) == repr((helpers, "'a b'", False))
    for code, kind in (("f(1)", "ToolError"), ("h.add(1)", "AttributeError")):
        result = registry.execute(code, owner="a", tools=())
        assert result.error is not None
        assert result.error.ename == kind
        assert (result.tool_calls, result.to_dict()["tool_calls_made"]) == ((), 0)
    assert registry.execute("h.add(1), f(2)", owner="a", tools=[add]).value == "(1, 2)"


def test_a_function_kept_from_one_cell_runs_under_the_cell_that_calls_it(registry: BlockingRegistry) -> None:
    def who(context: ToolCallContext) -> str:
        return f"{SPEAKER.get()} {context.cell_id}"

    def cell(speaker: str, code: str) -> CellResult:
        SPEAKER.set(speaker)
        return registry.execute(code, owner="a", tools=[who], max_tool_calls=2)

    run = contextvars.copy_context().run
    first = run(cell, "first", "from hermes_tools import who\nwho(), who()")
    second = run(cell, "second", "who(), who()")
    assert first.value is not None, first.text
    assert second.value is not None, second.text
    assert first.value.count("first ") == second.value.count("second ") == 2
    assert len(set(eval(first.value))) == len(set(eval(second.value))) == 1
    assert first.value.replace("first", "second") != second.value


SPOILED = {
    "the namespace is cleared": "globals().clear()",
    "the name is deleted": "del hermes_tools",
    "the module is forgotten": "import sys; del sys.modules['hermes_tools'], sys.modules['hermes_tools.aio']",
    "the module is blocked": "import sys; sys.modules['hermes_tools'] = None",
    "the module is replaced": "import sys; sys.modules['hermes_tools'] = type(sys)('hermes_tools')",
    "its attributes are assigned": "hermes_tools.add = hermes_tools.aio = hermes_tools.retry = 5",
    "its attributes are deleted": "del hermes_tools.add, hermes_tools.aio, hermes_tools.__all__",
    "its dictionary is cleared": "vars(hermes_tools).clear()",
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_the_tools_are_back_in_the_next_cell_when(registry: BlockingRegistry, spoil: str) -> None:
    registry.execute("kept = 1", owner="a", tools=[add])
    spoiled = registry.execute(spoil, owner="a", tools=[add])
    assert spoiled.status is OK, spoiled.text
    code = """
x = 1
imported = __import__('hermes_tools').add(1, 4)
x, hermes_tools.add(1, 2), await hermes_tools.aio.add(1, 3), imported, hermes_tools.__name__"""
    result = registry.execute(code, owner="a", tools=[add])
    assert result.value == "(1, 3, 4, 5, 'hermes_tools')", result.text
    assert result.kernel.reused
    assert registry.execute("x", owner="a").value == "1"


def test_a_name_of_the_users_is_left_alone_and_the_import_still_works(registry: BlockingRegistry) -> None:
    registry.execute("hermes_tools = 5", owner="a", tools=[add])
    result = registry.execute(
        "before = hermes_tools\nimport hermes_tools\nbefore, hermes_tools.add(1, 2)", owner="a", tools=[add]
    )
    assert result.value == "(5, 3)", result.text


def _reset(registry: BlockingRegistry) -> bool:
    return True


def _die(registry: BlockingRegistry) -> bool:
    registry.execute("import os; os._exit(3)", owner="a", tools=[add])
    return False


def _close(registry: BlockingRegistry) -> bool:
    registry.close_owner("a")
    return False


@pytest.mark.parametrize("end", [_reset, _die, _close])
def test_the_tools_are_there_in_a_kernel_that_replaces_another(
    registry: BlockingRegistry, end: Callable[[BlockingRegistry], bool]
) -> None:
    assert registry.execute("hermes_tools.add(1, 2)", owner="a", tools=[add]).value == "3"
    reset = end(registry)
    result = registry.execute("hermes_tools.add(1, 3)", owner="a", tools=[add], reset=reset)
    assert (result.value, result.kernel.reused) == ("4", False), result.text
    assert result.kernel.lost in (Loss.RESET, Loss.DIED, Loss.CLOSED)
    assert registry.execute("hermes_tools.add(1, 4)", owner="a", tools=[add]).value == "5"


# -- what the host is told --------------------------------------------------------------------------------


def test_a_result_lists_the_calls_of_its_cell_and_of_no_other(registry: BlockingRegistry) -> None:
    def work(text: str, seconds: float = 0, more: Any = None) -> dict[str, Any]:
        time.sleep(seconds)
        return {"error": ""} if text == "empty" else {"length": len(text)}

    def fail(text: str) -> None:
        raise ToolError(text)

    code = """
import hermes_tools as h
h.work('a')
h.work('empty')
h.work('é' * 100_000, more=list(range(1000)))
try:
    h.fail('no! ' * 200)
except h.ToolError:
    pass
h.work('slow', seconds=0.3)
None"""
    result = registry.execute(code, owner="a", tools=[work, fail])
    assert result.status is OK, result.text
    calls = result.tool_calls
    assert [call.name for call in calls] == ["work", "work", "work", "fail", "work"]
    assert calls[0].args == "text='a'"
    assert all(0 < len(call.args) <= 80 for call in calls)
    assert [call.error is None for call in calls] == [True, True, True, False, True]
    assert calls[3].error is not None
    assert calls[3].error.startswith("no! no! ")
    assert len(calls[3].error) == 300
    assert calls[0].seconds < 0.3 <= calls[4].seconds < 10
    assert result.tool_errors == ({"tool": "fail", "error": calls[3].error},)
    payload = result.to_dict()
    assert (payload["status"], payload["tool_calls_made"]) == ("success", 5)
    assert payload["tool_errors"] == [{"tool": "fail", "error": calls[3].error}]
    after = registry.execute("h.work('a')", owner="a", tools=[work, fail])
    assert (len(after.tool_calls), after.tool_errors) == (1, ())
    assert "tool_errors" not in after.to_dict()


def test_at_most_five_tool_errors_are_told_also_those_that_a_result_tells(registry: BlockingRegistry) -> None:
    def fail(n: int) -> dict[str, Any]:
        if n % 2:
            raise ToolError(f"raised {n}")
        return {"error": {"code": n} if n == 4 else f"told {n}" * (100 if n == 2 else 1)}

    code = """
seen = []
for n in range(8):
    try:
        seen.append(hermes_tools.fail(n))
    except hermes_tools.ToolError as error:
        seen.append(str(error))
seen[0], seen[1], seen[4]"""
    result = registry.execute(code, owner="a", tools=[fail])
    assert result.value == "({'error': 'told 0'}, 'raised 1', {'error': {'code': 4}})", result.text
    assert len(result.tool_calls) == 8
    assert [told["tool"] for told in result.tool_errors] == ["fail"] * 5
    texts = [told["error"] for told in result.tool_errors]
    assert texts == ["told 0", "raised 1", ("told 2" * 100)[:300], "raised 3", str({"code": 4})]
    assert result.to_dict()["tool_errors"] == list(result.tool_errors)
    assert all(call.error is not None for call in result.tool_calls)


def test_calls_of_a_cell_that_fails_are_told_too(registry: BlockingRegistry) -> None:
    result = registry.execute("hermes_tools.add(1); 1 / 0", owner="a", tools=[add])
    assert (result.status, len(result.tool_calls)) == (CellStatus.ERROR, 1)
    assert result.to_dict()["tool_calls_made"] == 1


def test_any_text_in_a_call_can_be_told_as_json(registry: BlockingRegistry) -> None:
    def fail(text: str) -> None:
        raise ToolError(text)

    code = r"""
try: hermes_tools.fail('\ud800\x00 é')
except hermes_tools.ToolError as error: said = str(error)
said"""
    result = registry.execute(code, owner="a", tools=[fail])
    assert result.value == repr("\ud800\x00 é")
    payload = json.loads(result.to_json().encode())
    assert payload["tool_errors"][0]["error"].endswith(" é")


def test_the_host_hears_of_each_call_when_it_begins_and_when_it_ends(registry: BlockingRegistry) -> None:
    events: list[Any] = []

    def fail() -> None:
        raise ToolError("no")

    code = """
import threading, hermes_tools as h
threads = [threading.Thread(target=h.add, args=(n,)) for n in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
try: h.fail()
except h.ToolError: pass
None"""
    result = registry.execute(code, owner="a", tools=[add, fail], on_event=events.append)
    assert result.status is OK, result.text
    begun = [event for event in events if isinstance(event, ToolCallStarted)]
    ended = [event for event in events if isinstance(event, ToolCallEnded)]
    assert len(begun) == len(ended) == 21
    assert {event.call_id for event in begun} == {event.call_id for event in ended}
    for event in begun:
        (its_end,) = (end for end in ended if end.call_id == event.call_id)
        assert events.index(event) < events.index(its_end)
        assert event.name == its_end.name
        assert len(event.args) <= 80
        assert its_end.seconds >= 0
        assert its_end.error == ("no" if event.name == "fail" else None)
    assert sorted(event.args for event in begun if event.name == "add") == sorted(f"a={n}" for n in range(20))


def test_calls_from_forked_children_are_told_apart(registry: BlockingRegistry) -> None:
    events: list[Any] = []
    code = """
import multiprocessing, hermes_tools as h
h.add(0)
with multiprocessing.get_context('fork').Pool(4) as pool: print(sorted(pool.map(h.add, range(8), 1)))"""
    result = registry.execute(code, owner="a", tools=[add], on_event=events.append)
    assert result.stdout == f"{list(range(8))}\n", result.text
    begun = [event.call_id for event in events if isinstance(event, ToolCallStarted)]
    assert len(begun) == 9
    assert len(set(begun)) == 9, "two calls of one cell have the same id"


def test_an_on_event_that_fails_is_harmless(registry: BlockingRegistry) -> None:
    events = []

    def on_event(event: object) -> None:
        events.append(event)
        raise ValueError("the caller's own")

    result = registry.execute("hermes_tools.add(1, 2)", owner="a", tools=[add], on_event=on_event)
    assert (result.value, len(events)) == ("3", 3), result.text  # the call, its end, and the value
    with pytest.raises(ConfigError, match="on_event"):
        registry.execute("1", owner="a", tools=[add], on_event=5)  # type: ignore[arg-type]


def test_a_handler_may_ask_who_calls(registry: BlockingRegistry) -> None:
    seen: list[ToolCallContext] = []

    def asks(text: str, context: ToolCallContext) -> str:
        seen.append(context)
        return text

    async def asks_later(*, who: ToolCallContext, **rest: Any) -> dict[str, Any]:
        seen.append(who)
        return rest

    tools = [
        asks,
        Tool("asks_later", asks_later),
        Tool("described", asks, parameters={"properties": {"text": {}}}),
    ]
    code = """
import inspect, hermes_tools as h
h.asks('x'), h.asks_later(who=5, x=1), h.described('y'), str(inspect.signature(h.asks))"""
    owner = Owner("a", child="1", scope="s")
    first = registry.execute(code, owner=owner, tools=tools)
    assert first.value == "('x', {'x': 1}, 'y', '(text: str) -> str')", first.text
    second = registry.execute("h.asks('x')", owner=owner, tools=tools)
    assert second.status is OK, second.text
    assert [context.owner for context in seen] == [owner] * 4
    assert {context.kernel_id for context in seen} == {first.kernel.kernel_id}
    assert {context.origin for context in seen} == {"execute_code"}
    assert len({context.cell_id for context in seen[:3]}) == 1
    assert seen[3].cell_id != seen[0].cell_id
    assert len({context.call_id for context in seen[:3]}) == 3
    assert not any(context.cancelled.is_set() for context in seen)
    forged = registry.execute("h.asks('x', context=5)", owner=owner, tools=tools)
    assert forged.error is not None
    assert forged.error.ename == "TypeError"


# -- the caller's context ---------------------------------------------------------------------------------


def test_each_cell_has_the_context_of_its_own_caller(registry: BlockingRegistry) -> None:
    def who() -> list[str]:
        before = SPEAKER.get()
        SPEAKER.set("a handler")
        return [before, threading.current_thread().name]

    async def who_later() -> list[str]:
        return [SPEAKER.get()]

    def cell(speaker: str) -> CellResult:
        SPEAKER.set(speaker)
        return registry.execute(
            "import hermes_tools as h\n[h.who()[0], h.who()[0], *h.who_later()]",
            owner="a",
            tools=[who, who_later],
        )

    for speaker in ("first", "second"):
        result = contextvars.copy_context().run(cell, speaker)
        assert result.value == repr([speaker] * 3), result.text
    assert SPEAKER.get() == "nobody"


def test_thread_locals_reach_the_handlers_through_capture_context(make_registry: Make) -> None:
    def capture() -> Callable[[Callable[[], Any]], Any]:
        speaker = LOCAL.speaker

        def runner(work: Callable[[], Any]) -> Any:
            assert not hasattr(LOCAL, "speaker"), "what another call has left"
            LOCAL.speaker = speaker
            try:
                return work()
            finally:
                del LOCAL.speaker

        return runner

    registry = make_registry(capture_context=capture)
    together = threading.Barrier(2)

    def who(meet: bool = False) -> str:
        if meet:
            together.wait(30)
        return f"{LOCAL.speaker} {SPEAKER.get()}"

    results: dict[str, CellResult] = {}

    def conversation(owner: str) -> None:
        for turn in ("1", "2"):
            LOCAL.speaker = owner + turn
            SPEAKER.set(owner + turn)
            code = "import hermes_tools as h\n[h.who(meet=True) for _ in range(5)] + [h.who()]"
            results[owner + turn] = registry.execute(code, owner=owner, tools=[who])

    threads = [threading.Thread(target=conversation, args=(owner,)) for owner in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for speaker in ("a1", "a2", "b1", "b2"):
        assert results[speaker].value == repr([f"{speaker} {speaker}"] * 6), results[speaker].text


def test_a_capture_context_that_fails_runs_nothing(make_registry: Make) -> None:
    with pytest.raises(ConfigError, match="capture_context"):
        make_registry(capture_context=5)
    registry = make_registry(capture_context=lambda: None)
    with pytest.raises(ConfigError, match="capture_context"):
        registry.execute("1", owner="a", tools=[add])
    assert registry.kernels() == ()


PLAIN_PYTHON = """
import asyncio, contextvars, decimal, threading
from concurrent.futures import ThreadPoolExecutor
decimal.getcontext().prec = 5
mine = contextvars.ContextVar('mine', default='unset')
mine.set('set')
seen = []
def look(): seen.append((decimal.getcontext().prec, mine.get()))
thread = threading.Thread(target=look); thread.start(); thread.join()
timer = threading.Timer(0, look); timer.start(); timer.join()
with ThreadPoolExecutor(1) as pool: pool.submit(look).result()
async def main():
    await asyncio.to_thread(look)
    await asyncio.get_running_loop().run_in_executor(None, look)
    asyncio.get_running_loop().call_soon(look)
    await asyncio.create_task(asyncio.sleep(0))
thread = threading.Thread(target=lambda: asyncio.run(main())); thread.start(); thread.join()
look()
print(seen)
"""


def test_threads_of_a_cell_inherit_what_those_of_a_plain_python_do(registry: BlockingRegistry) -> None:
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN_PYTHON], capture_output=True, text=True, check=True, timeout=60
    )
    result = registry.execute(PLAIN_PYTHON, owner="a", tools=[add])
    assert result.stdout == plain.stdout, result.text
    assert "(28, 'unset')" in plain.stdout, "what a thread has of its own"


# -- a handler that calls the registry --------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_a_handler_can_run_a_cell_of_another_owner_and_none_of_its_own(
    registry: BlockingRegistry, is_async: bool
) -> None:
    def nested(owner: str) -> str | None:
        return registry.execute("6 * 7", owner=owner, timeout=60).value

    async def nested_later(owner: str) -> str | None:
        return nested(owner)

    def through(owner: str) -> str:
        return registry.execute("hermes_tools.nested('a')", owner=owner, tools=[nested], timeout=60).text

    code = """
import json, hermes_tools as h
try: own = h.nested('a')
except h.ToolError as error: own = str(error)
print(json.dumps([own, h.nested('b'), h.through('c')]))"""
    tools = {"nested": nested_later if is_async else nested, "through": through}
    began = time.monotonic()
    own, other, through_another = value_of(registry.execute(code, owner="a", tools=tools, timeout=60))
    assert time.monotonic() - began < 20
    assert "same kernel" in own
    assert other == "42"
    assert "ToolError" in through_another
    assert "same kernel" in through_another
    assert still_answers(registry).kernel.reused


def test_a_handler_that_ends_its_own_cell_interrupts_it(registry: BlockingRegistry) -> None:
    def close() -> int:
        return registry.close_owner("a")

    result = registry.execute("hermes_tools.close()", owner="a", tools=[close], timeout=60)
    assert (result.status, result.duration < 20) == (CellStatus.INTERRUPTED, True)
    assert still_answers(registry).kernel.lost is Loss.CLOSED


@pytest.mark.usefixtures("leaves_nothing")
def test_under_asyncio_a_handler_can_run_a_cell_of_another_owner_and_none_of_its_own() -> None:
    async def main() -> None:
        async with KernelRegistry() as registry:

            async def nested(owner: str) -> str | None:
                try:
                    return (await registry.execute("6 * 7", owner=owner, timeout=60)).value
                except HermesKernelError as error:
                    return type(error).__name__

            async with asyncio.timeout(20):
                result = await registry.execute(
                    "[hermes_tools.nested('a'), hermes_tools.nested('b')]",
                    owner="a",
                    tools=[nested],
                    timeout=60,
                )
            assert result.value == "['HermesKernelError', '42']", result.text
            assert (await registry.execute("1", owner="a")).kernel.reused

    asyncio.run(main())


# -- plain Jupyter clients --------------------------------------------------------------------------------


@contextmanager
def notebook_done(manager: HermesKernelManager, *cells: str, **options: Any) -> Iterator[list[str]]:
    """Run the cells on the manager's kernel; give what each printed or raised while the client is there."""
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(node, km=manager, **options)
    try:
        client.execute()
        yield [
            "".join(output.get("text", "") or output.get("ename", "") for output in cell.outputs)
            for cell in node.cells
        ]
    finally:
        client.kc.stop_channels()


def run_notebook(manager: HermesKernelManager, *cells: str, **options: Any) -> list[str]:
    with notebook_done(manager, *cells, **options) as texts:
        return texts


SPEND = """
import hermes_tools as h
served = 0
try:
    while True:
        h.echo(served)
        served += 1
except h.ToolBudgetExceeded:
    print(served)"""


@pytest.mark.usefixtures("leaves_nothing")
def test_each_cell_of_a_notebook_has_the_whole_budget_also_after_an_error(host: Host) -> None:
    with started(tools=[host.echo], max_tool_calls=3) as manager:
        texts = run_notebook(
            manager, SPEND, SPEND, "h.echo(7); 1 / 0", "h.echo(0); h.nope", SPEND, allow_errors=True
        )
        assert texts == ["3\n", "3\n", "ZeroDivisionError", "AttributeError", "3\n"]
        assert host.got == [0, 1, 2, 0, 1, 2, 7, 0, 0, 1, 2]
        assert run_notebook(manager, SPEND) == ["3\n"], "another client"


@pytest.mark.usefixtures("leaves_nothing")
def test_a_thread_of_a_notebooks_last_cell_is_refused_once_the_notebook_is_done(
    host: Host, tmp_path: Path
) -> None:
    go, said = tmp_path / "go", tmp_path / "said"
    os.mkfifo(go)
    os.mkfifo(said)
    code = f"""
import threading, hermes_tools as h
def late():
    open({str(go)!r}).close()
    try:
        text = repr(h.echo('late'))
    except Exception as error:
        text = f'{{type(error).__name__}}: {{error}}'
    with open({str(said)!r}, 'w') as file: file.write(text)
threading.Thread(target=late, daemon=True).start()
print(h.echo('in time'))"""
    with started(tools=[host.echo]) as manager:
        with notebook_done(manager, "import hermes_tools", code) as texts:
            assert texts == ["", "in time\n"]
            go.open("w").close()
            text = said.read_text()
        assert text.startswith("ToolError: ")
        assert "No active execute_code cell" in text
        assert host.got == ["in time"]
        assert run_notebook(manager, "print(h.echo('later'))") == ["later\n"]


@pytest.mark.usefixtures("leaves_nothing")
def test_a_thread_of_one_cell_of_a_notebook_gets_nothing_in_the_next(host: Host) -> None:
    leave = """
import threading, hermes_tools as h
go, said = threading.Event(), []
def late():
    go.wait(60)
    try: said.append(h.echo('late'))
    except Exception as error: said.append(str(error))
thread = threading.Thread(target=late); thread.start()"""
    with started(tools=[host.echo], max_tool_calls=3) as manager:
        texts = run_notebook(manager, leave, f"go.set(); thread.join(30); print(*said){SPEND}")
        assert texts[0] == ""
        assert "No active execute_code cell" in texts[1]
        assert texts[1].endswith("\n3\n")
        assert host.got == [0, 1, 2]


async def _restart(manager: HermesKernelManager) -> None:
    await manager.restart_kernel()


@pytest.mark.usefixtures("leaves_nothing")
def test_a_notebooks_tools_may_be_async_ask_who_calls_and_outlive_a_restart() -> None:
    seen: list[ToolCallContext] = []

    async def ask(context: ToolCallContext) -> str:
        seen.append(context)
        await asyncio.sleep(0)
        return "answered"

    code = "print(hermes_tools.ask(), await hermes_tools.aio.ask())"
    with started(tools=[ask]) as manager:
        assert run_notebook(manager, code) == ["answered answered\n"]
        asyncio.run(_restart(manager))
        assert run_notebook(manager, code) == ["answered answered\n"]
    assert [context.owner for context in seen] == [None] * 4
    assert len({context.cell_id for context in seen}) == 2


@pytest.mark.usefixtures("leaves_nothing")
def test_a_notebooks_cell_that_is_interrupted_has_its_calls_cancelled(host: Host) -> None:
    cancelled = threading.Event()

    def hold(context: ToolCallContext) -> None:
        if context.cancelled.wait(60):
            cancelled.set()

    with started(tools=[hold, host.echo], max_tool_calls=3) as manager:
        texts = run_notebook(
            manager, "hermes_tools.hold()", SPEND, timeout=2, interrupt_on_timeout=True, allow_errors=True
        )
        assert texts == ["KeyboardInterrupt", "3\n"]
        assert cancelled.wait(30)
        assert host.got == [0, 1, 2]


@pytest.mark.parametrize("limit", [-1, float("nan"), "3"])
def test_a_manager_refuses_a_budget_that_is_none(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_tool_calls"):
        HermesKernelManager(tools=[add], max_tool_calls=limit)


def test_limits_of_a_registry_are_the_budget_of_its_cells(make_registry: Make, host: Host) -> None:
    registry = make_registry(limits=Limits(max_tool_calls=3))
    for wanted, limit in ((3, UNSET), (2, 2), (3, UNSET)):
        result = registry.execute(SPEND, owner="a", tools=[host.echo], max_tool_calls=limit)
        assert result.stdout == f"{wanted}\n", result.text


def test_the_errors_of_a_tool_are_values_on_demand(registry: BlockingRegistry) -> None:
    def divide(by: int) -> float:
        return 6 / by

    tools = [Tool("divide", divide, returns_errors=True), Tool("strict", divide)]
    code = (
        "import hermes_tools as h\n"
        "print(h.divide(2), h.divide(0), await h.aio.divide(0))\n"
        "try: h.strict(0)\nexcept h.ToolError as error: print(error)\n"
        "print(h.divide(1), await h.aio.divide(1))\n"
        "try: h.divide(by=3, to=4)\nexcept TypeError: print('TypeError')"
    )
    result = registry.execute(code, owner="a", tools=tools, max_tool_calls=4)
    failed = {"error": "ZeroDivisionError: division by zero"}
    first, strict, spent, wrong = result.stdout.splitlines()
    assert first == f"3.0 {failed} {failed}"
    assert strict == failed["error"]
    assert spent.count("{'error': 'Tool call limit reached") == 2
    assert wrong == "TypeError"
    assert [error["tool"] for error in result.tool_errors] == ["divide", "divide", "strict"]
