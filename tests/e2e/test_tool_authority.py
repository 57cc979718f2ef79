"""How often a cell may call tools, until when, and who may not."""

import asyncio
import contextvars
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    KernelRegistry,
    Limits,
    Loss,
    ToolCallContext,
)

from .test_cells_basics import still_answers
from .test_strangers import Stranger
from .test_tools import Host, add, value_of

Make = Callable[..., BlockingRegistry]

SPEAKER = contextvars.ContextVar("speaker", default="nobody")
OVER = "No active execute_code cell"

SETUP = """
import asyncio, json, multiprocessing, os, sys, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import hermes_tools as h

def attempt(n):
    try:
        return 'served' if h.echo(n) == n else 'mixed up'
    except h.ToolBudgetExceeded:
        return 'spent'
    except Exception as error:
        return f'{type(error).__name__}: {error}'

async def attempt_async(n):
    try:
        return 'served' if await h.aio.echo(n) == n else 'mixed up'
    except h.ToolBudgetExceeded:
        return 'spent'
    except Exception as error:
        return f'{type(error).__name__}: {error}'

def start_all(threads):
    for thread in threads: thread.start()
    for thread in threads: thread.join()

fork = multiprocessing.get_context('fork')
go, said = threading.Event(), []
def late():
    go.wait(60)
    said.append(attempt('late'))
"""


@pytest.fixture
def host() -> Host:
    return Host()


# -- the budget -------------------------------------------------------------------------------------------


def test_the_call_beyond_the_budget_is_an_error_and_the_next_cell_has_the_whole_budget_again(
    registry: BlockingRegistry, host: Host
) -> None:
    code = "n = 0\nwhile True:\n    hermes_tools.echo(n)\n    n += 1"
    for _ in range(2):
        result = registry.execute(code, owner="a", tools=[host.echo])
        assert result.status is CellStatus.ERROR
        assert result.error is not None
        assert result.error.ename == "ToolBudgetExceeded"
        assert "limit reached" in result.error.evalue
        assert "50" in result.error.evalue
        assert "limit reached" in result.to_dict()["error"]
        assert len(result.tool_calls) == result.to_dict()["tool_calls_made"] == 50
        assert host.got == list(range(50))
        after = registry.execute("n", owner="a", tools=[host.echo])
        assert (after.value, after.kernel.reused) == ("50", True)
        host.got.clear()


def test_who_catches_the_error_and_goes_on_gets_no_call_more(registry: BlockingRegistry, host: Host) -> None:
    code = """
r = [attempt(n) for n in range(60)]
r += [await attempt_async(n) for n in range(10)]
tries = []
def call():
    tries.append(1)
    h.echo(0)
try: h.retry(call, max_attempts=3, delay=0.01)
except h.ToolBudgetExceeded: pass
print(json.dumps([r, len(tries)]))"""
    result = registry.execute(SETUP + code, owner="a", tools=[host.echo])
    answers, tries = value_of(result)
    assert answers == ["served"] * 50 + ["spent"] * 20
    assert tries == 1, "what is spent is not tried again"
    assert host.got == list(range(50))
    assert len(result.tool_calls) == 50
    assert result.tool_errors == ()


CROWDS = {
    "threads": """
gate = threading.Barrier(64)
def call(n):
    gate.wait(30)
    r.append(attempt(n))
start_all([threading.Thread(target=call, args=(n,)) for n in range(64)])""",
    "a thread pool": "with ThreadPoolExecutor(64) as pool: r += pool.map(attempt, range(64))",
    "gather": "r += await asyncio.gather(*(attempt_async(n) for n in range(64)))",
    "to_thread": "r += await asyncio.gather(*(asyncio.to_thread(attempt, n) for n in range(64)))",
    "a pool of forked children": "with fork.Pool(8) as pool: r += pool.map(attempt, range(64), 1)",
    "an executor of forked children": """
with ProcessPoolExecutor(8, mp_context=fork) as pool: r += pool.map(attempt, range(64))""",
    "threads of forked children": """
pipes = []
for n in range(8):
    reads, writes = os.pipe()
    if os.fork() == 0:
        start_all([threading.Thread(target=lambda: r.append(attempt(n))) for _ in range(8)])
        os.write(writes, json.dumps(r).encode())
        os._exit(0)
    os.close(writes)
    pipes.append(reads)
for reads in pipes:
    with open(reads) as file: r += json.load(file)""",
    "all of them at once": """
with fork.Pool(4) as pool:
    job = pool.map_async(attempt, range(32), 1)
    threads = [threading.Thread(target=lambda: r.append(attempt(0))) for _ in range(16)]
    for thread in threads: thread.start()
    r += await asyncio.gather(*(attempt_async(n) for n in range(16)))
    for thread in threads: thread.join()
    r += job.get(60)""",
}


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_of_sixty_four_calls_at_once_as_many_run_as_the_budget_has(
    registry: BlockingRegistry, host: Host, crowd: str
) -> None:
    registry.execute(SETUP, owner="a", tools=[host.echo])
    for _ in range(2):
        result = registry.execute(
            f"r = []\n{crowd}\nprint(json.dumps(r))", owner="a", tools=[host.echo], max_tool_calls=5
        )
        assert Counter(value_of(result)) == {"served": 5, "spent": 59}
        assert len(host.got) == len(result.tool_calls) == 5
        host.got.clear()
    assert still_answers(registry).kernel.reused


def test_a_budget_of_none_has_no_end_and_one_of_zero_no_beginning(
    registry: BlockingRegistry, host: Host
) -> None:
    registry.execute(SETUP, owner="a", tools=[host.echo])
    code = """
with ThreadPoolExecutor(100) as pool: r = list(pool.map(attempt, range(300)))
print(json.dumps(r))"""
    result = registry.execute(code, owner="a", tools=[host.echo], max_tool_calls=None)
    assert value_of(result) == ["served"] * 300
    assert len(result.tool_calls) == len(host.got) == 300
    none = registry.execute("print(json.dumps(attempt(1)))", owner="a", tools=[host.echo], max_tool_calls=0)
    assert value_of(none) == "spent"
    assert (len(host.got), none.tool_calls) == (300, ())


@pytest.mark.parametrize("limit", [-1, float("nan"), 2.5, "3"])
def test_a_budget_that_cannot_be_is_refused_before_anything_is_started(
    registry: BlockingRegistry, limit: Any
) -> None:
    with pytest.raises(ConfigError, match="max_tool_calls"):
        registry.execute("1", owner="a", tools=[add], max_tool_calls=limit)
    with pytest.raises(ConfigError, match="max_tool_calls"):
        Limits(max_tool_calls=limit)
    assert registry.kernels() == ()


def test_a_call_that_fails_is_charged_and_one_that_is_refused_is_not(
    registry: BlockingRegistry, host: Host
) -> None:
    def fail() -> None:
        raise ValueError("no")

    code = """
import hermes_tools as h
def names(call):
    try: call()
    except Exception as error: return type(error).__name__
kept = h.add"""
    registry.execute(code, owner="a", tools=[add])
    code = """
refused = [lambda: h.echo({1}), lambda: h.echo(float('nan')), lambda: h.echo(), lambda: h.echo(1, 2),
           lambda: h.echo(other=1), lambda: kept(1), lambda: h.nothing(), lambda: h.echo('x' * 20_000_000)]
seen = [names(call) for call in refused * 3]
seen += [names(h.fail), names(lambda: h.echo(1)), names(lambda: h.echo(2))]
seen += [names(call) for call in refused]
print(seen[:8], seen[-11:-8])"""
    result = registry.execute(code, owner="a", tools=[host.echo, fail], max_tool_calls=2)
    wanted = ["TypeError"] * 5 + ["ToolError", "AttributeError", "ToolError"]
    assert result.stdout == f"{wanted} {['ToolError', None, 'ToolBudgetExceeded']}\n", result.text
    assert host.got == [1]
    assert [(call.name, call.error is None) for call in result.tool_calls] == [
        ("fail", False),
        ("echo", True),
    ]


# -- whose call it is -------------------------------------------------------------------------------------

LEFTOVERS = {
    "a thread": ("thread = threading.Thread(target=late); thread.start()", "go.set(); thread.join(30)"),
    "a thread of a thread": (
        """
def start():
    go.wait(60)
    inner = threading.Thread(target=late); inner.start(); inner.join()
thread = threading.Thread(target=start); thread.start()""",
        "go.set(); thread.join(30)",
    ),
    "a timer": ("timer = threading.Timer(0.01, late); timer.start()", "go.set(); timer.join(30)"),
    "a job of a thread pool": (
        "pool = ThreadPoolExecutor(1); job = pool.submit(late)",
        "go.set(); job.result(30); pool.shutdown()",
    ),
    "a queued job of a thread pool": (
        "pool = ThreadPoolExecutor(1); pool.submit(go.wait, 60); job = pool.submit(late)",
        "go.set(); job.result(30); pool.shutdown()",
    ),
    "a multiprocessing thread pool": (
        "from multiprocessing.pool import ThreadPool\npool = ThreadPool(1)",
        "said.append(pool.apply(attempt, ('late',))); pool.terminate()",
    ),
    "a task": (
        """
async def call():
    await begin.wait()
    said.append(await attempt_async('late'))
begin = asyncio.Event(); task = asyncio.create_task(call())""",
        "begin.set(); await task",
    ),
    "a task in a thread": (
        "task = asyncio.create_task(asyncio.to_thread(late))",
        "go.set(); await task",
    ),
    "a callback of the event loop": (
        """
future = asyncio.get_running_loop().create_future()
future.add_done_callback(lambda _: said.append(attempt('late')))""",
        "future.set_result(None); await asyncio.sleep(0)",
    ),
    "a forked child": (
        """
begin, end = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(begin[0], 1)
    os.write(end[1], attempt('late').encode())
    os._exit(0)""",
        "os.write(begin[1], b'.'); said.append(os.read(end[0], 10_000).decode())",
    ),
    "a forked child of a forked child": (
        """
begin, end = os.pipe(), os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.read(begin[0], 1)
        os.write(end[1], attempt('late').encode())
    os._exit(0)""",
        "os.write(begin[1], b'.'); said.append(os.read(end[0], 10_000).decode())",
    ),
    "a pool of forked children": (
        "pool = fork.Pool(1)",
        "said.append(pool.apply(attempt, ('late',))); pool.terminate()",
    ),
}


@pytest.mark.parametrize(("leave", "release"), LEFTOVERS.values(), ids=LEFTOVERS)
def test_what_a_cell_leaves_behind_gets_nothing_of_the_next_cells_budget(
    registry: BlockingRegistry, host: Host, leave: str, release: str
) -> None:
    first = registry.execute(SETUP + leave + "\nh.echo('first')", owner="a", tools=[host.echo])
    assert first.value == "'first'", first.text
    code = f"{release}\nprint(json.dumps([said, [attempt(n) for n in range(4)]]))"
    second = registry.execute(code, owner="a", tools=[host.echo], max_tool_calls=3)
    (refused,), served = value_of(second)
    assert refused.startswith("ToolError: ")
    assert OVER in refused
    assert served == ["served"] * 3 + ["spent"]
    assert host.got == ["first", 0, 1, 2]
    assert len(second.tool_calls) == 3


def test_a_call_between_two_cells_is_refused_and_the_function_itself_still_works(
    registry: BlockingRegistry, host: Host, tmp_path: Path
) -> None:
    begin, answer = tmp_path / "begin", tmp_path / "answer"
    os.mkfifo(begin)
    os.mkfifo(answer)
    code = f"""
def between():
    open({str(begin)!r}).close()
    text = attempt(1)
    with open({str(answer)!r}, 'w') as file: file.write(text)
thread = threading.Thread(target=between); thread.start()"""
    first = registry.execute(SETUP + code, owner="a", tools=[host.echo])
    assert first.status is CellStatus.OK, first.text
    begin.open("w").close()
    assert OVER in answer.read_text()
    assert host.got == []
    assert first.tool_calls == ()
    assert registry.execute("thread.join(); h.echo(2)", owner="a", tools=[host.echo]).value == "2"


def test_work_given_to_an_old_pool_belongs_to_the_cell_that_gives_it(registry: BlockingRegistry) -> None:
    heard = []

    def echo(n: Any) -> Any:
        heard.append((SPEAKER.get(), n))
        return n

    def cell(speaker: str, code: str) -> CellResult:
        SPEAKER.set(speaker)
        return registry.execute(code, owner="a", tools=[echo], max_tool_calls=5)

    first = """
pool = ThreadPoolExecutor(2)
pool.submit(attempt, 0).result()
await asyncio.to_thread(attempt, 1)
old = pool.submit(late)"""
    second = """
loop = asyncio.get_running_loop()
r = [pool.submit(attempt, 2).result(), *pool.map(attempt, [3]), await loop.run_in_executor(pool, attempt, 4),
     await loop.run_in_executor(None, attempt, 5), await asyncio.to_thread(attempt, 6)]
go.set()
old.result(30)
pool.shutdown()
print(json.dumps([r, said]))"""
    assert contextvars.copy_context().run(cell, "first", SETUP + first).status is CellStatus.OK
    result = contextvars.copy_context().run(cell, "second", second)
    served, (refused,) = value_of(result)
    assert served == ["served"] * 5
    assert OVER in refused
    assert heard == [("first", 0), ("first", 1), *(("second", n) for n in range(2, 7))]


def test_a_thread_that_nobody_can_tell_the_cell_of_is_refused_with_what_to_do(
    registry: BlockingRegistry, host: Host
) -> None:
    code = """
import _thread, queue
answers, before = queue.Queue(), attempt(0)
_thread.start_new_thread(lambda: answers.put(attempt(1)), ())
print(json.dumps([answers.get(timeout=30), before, attempt(2)]))"""
    result = registry.execute(SETUP + code, owner="a", tools=[host.echo], max_tool_calls=2)
    refused, *served = value_of(result)
    assert refused.startswith("ToolError: ")
    assert "threading.Thread" in refused
    assert "ThreadPoolExecutor" in refused
    assert served == ["served", "served"]
    assert (host.got, len(result.tool_calls)) == ([0, 2], 2)


def test_a_forked_child_is_served_while_its_parent_waits_for_an_answer(registry: BlockingRegistry) -> None:
    parent_waits, child_called = threading.Event(), threading.Event()

    def hold() -> bool:
        parent_waits.set()
        return child_called.wait(30)

    def note(n: int) -> list[Any]:
        waited = parent_waits.wait(30)
        child_called.set()
        return [n, waited]

    code = """
import json, os, hermes_tools as h
h.add(1)
reads, writes = os.pipe()
if os.fork() == 0:
    os.write(writes, json.dumps(h.note(5)).encode())
    os._exit(0)
held = h.hold()
print(json.dumps([held, json.loads(os.read(reads, 1000)), h.add(2)]))"""
    result = registry.execute(code, owner="a", tools=[hold, note, add], timeout=60)
    assert value_of(result) == [True, [5, True], 2]
    assert sorted(call.name for call in result.tool_calls) == ["add", "add", "hold", "note"]


# -- the end of a cell with calls under way ---------------------------------------------------------------


class Holding:
    """A tool that answers when its cell is over, and knows that it was told so."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()

    def hold(self, context: ToolCallContext) -> str:
        self.begun.set()
        if context.cancelled.wait(60):
            self.cancelled.set()
        return "late"

    async def hold_async(self) -> str:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "late"

    def wait_until_it_holds(self) -> bool:
        return self.begun.wait(30)


HOLD = """
def hold():
    try: said.append(h.hold())
    except Exception as error: said.append(f'{type(error).__name__}: {error}')
thread = threading.Thread(target=hold, daemon=True); thread.start()
h.wait_until_it_holds()
"""
ENDS = {
    "its time is up": ("thread.join()", CellStatus.TIMED_OUT),
    "its caller gives up": ("thread.join()", CellStatus.INTERRUPTED),
    "its owner is closed": ("thread.join()", CellStatus.INTERRUPTED),
    "its process dies": ("os._exit(3)", CellStatus.DIED),
    "it exits": ("sys.exit(3)", CellStatus.EXITED),
    "it fails": ("1 / 0", CellStatus.ERROR),
    "it is done": ("'done'", CellStatus.OK),
}


@pytest.mark.parametrize("kind", ["blocking", "async"])
@pytest.mark.parametrize("end", ENDS)
def test_a_call_under_way_is_cancelled_and_its_answer_dropped_when_the_cell_ends_because(
    registry: BlockingRegistry, host: Host, end: str, kind: str
) -> None:
    holding = Holding()
    tools: dict[str, Any] = {
        "hold": holding.hold if kind == "blocking" else holding.hold_async,
        "wait_until_it_holds": holding.wait_until_it_holds,
        "echo": host.echo,
    }
    registry.execute(SETUP, owner="a", tools=tools)
    last, status = ENDS[end]
    arguments: dict[str, Any] = {"timeout": 2 if end == "its time is up" else 60}
    if end == "its caller gives up":
        arguments["interrupted"] = holding.begun.is_set
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(registry.execute, HOLD + last, owner="a", tools=tools, **arguments)
        if end == "its owner is closed":
            assert holding.begun.wait(30)
            registry.close_owner("a")
        result = call.result(40)
    assert result.status is status, result.text
    assert holding.cancelled.wait(30), "the handler was not told"
    held, *_ = (call for call in result.tool_calls if call.name == "hold")
    assert held.error is not None
    assert result.duration < 20
    assert "late" not in result.text

    code = f"""
{SETUP if result.kernel.ended else ""}
if 'thread' in globals(): thread.join(30)
print(json.dumps([said, [attempt(n) for n in range(4)]]))"""
    after = registry.execute(code, owner="a", tools=tools, max_tool_calls=3)
    told, served = value_of(after)
    assert served == ["served"] * 3 + ["spent"]
    assert [call.name for call in after.tool_calls] == ["echo"] * 3
    assert host.got == [0, 1, 2]
    if not result.kernel.ended:
        (sentence,) = told
        assert sentence.startswith("ToolError: ")


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_the_code_whose_call_was_cut_off_is_told_that_its_cell_is_over(
    registry: BlockingRegistry, kind: str
) -> None:
    entered = threading.Semaphore(0)

    def hold(context: ToolCallContext) -> None:
        entered.release()
        context.cancelled.wait(60)

    async def hold_async() -> None:
        entered.release()
        await asyncio.sleep(60)

    def wait_for_eight() -> bool:
        return all(entered.acquire(timeout=30) for _ in range(8))

    tools = {"hold": hold if kind == "blocking" else hold_async, "wait": wait_for_eight}
    code = """
def hold():
    try: said.append(h.hold())
    except Exception as error: said.append(f'{type(error).__name__}: {error}')
threads = [threading.Thread(target=hold) for _ in range(8)]
for thread in threads: thread.start()
h.wait()"""
    registry.execute(SETUP, owner="a", tools=tools)
    for _ in range(10):
        assert registry.execute(code, owner="a", tools=tools).value == "True"
    join = "for thread in threads: thread.join(30)\nprint(json.dumps(said))"
    told = value_of(registry.execute(join, owner="a", tools=tools))
    assert len(told) == 80
    assert [sentence for sentence in told if OVER not in sentence] == []


@pytest.mark.parametrize("end", ["its time is up", "its caller gives up"])
@pytest.mark.usefixtures("leaves_nothing")
def test_under_asyncio_an_async_handler_is_cancelled_with_its_cell(end: str) -> None:
    async def main() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with KernelRegistry() as registry:
            timeout = 2 if end == "its time is up" else 60
            call = asyncio.create_task(
                registry.execute("hermes_tools.hold()", owner="a", tools=[hold], timeout=timeout)
            )
            async with asyncio.timeout(40):
                await begun.wait()
                if end == "its time is up":
                    assert (await call).status is CellStatus.TIMED_OUT
                else:
                    call.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await call
                await cancelled.wait()
            after = await registry.execute("hermes_tools.add(1)", owner="a", tools=[add])
            assert after.value == "1"

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_call_in_a_cell_that_is_interrupted_and_kept_ends_with_it(
    make_registry: Make, host: Host, kind: str
) -> None:
    registry, holding = make_registry(limits=Limits(interrupt_grace=10)), Holding()
    tools = {"hold": holding.hold if kind == "blocking" else holding.hold_async, "echo": host.echo}
    registry.execute("x = 1; import hermes_tools as h", owner="a", tools=tools)
    code = "h.hold()" if kind == "blocking" else "await h.aio.hold()"
    result = registry.execute(code, owner="a", tools=tools, timeout=1)
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, False), result.text
    assert holding.cancelled.wait(30)
    after = registry.execute("x, h.echo(7), await h.aio.echo(8)", owner="a", tools=tools)
    assert after.value == "(1, 7, 8)", after.text


# -- handlers that never return ---------------------------------------------------------------------------


class Stuck:
    """Tools that return when the test is over."""

    def __init__(self) -> None:
        self.begun, self._over = threading.Event(), threading.Event()
        self._entered = threading.Semaphore(0)

    def blocking(self) -> None:
        self.begun.set()
        self._entered.release()
        self._over.wait(3600)

    async def holds_the_loop(self) -> None:
        self.blocking()

    def wait_for_twenty(self) -> bool:
        return all(self._entered.acquire(timeout=30) for _ in range(20))

    def let_go(self) -> None:
        self._over.set()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    tools = Stuck()
    yield tools
    tools.let_go()


@pytest.mark.parametrize("kind", ["blocking", "holds_the_loop"])
def test_a_handler_that_never_returns_holds_neither_its_cells_end_nor_other_calls(
    stuck: Stuck, registry: BlockingRegistry, kind: str
) -> None:
    tools = {"stuck": getattr(stuck, kind), "add": add}
    registry.execute("1", owner="a")
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(registry.execute, "hermes_tools.stuck()", owner="a", tools=tools, timeout=4)
        assert stuck.begun.wait(30)
        other = registry.execute("hermes_tools.add(1, 2)", owner="b", tools=tools)
        assert not held.done(), "the other owner's call was to be served meanwhile"
        assert other.value == "3"
        result = held.result(30)
    assert result.status is CellStatus.TIMED_OUT
    assert time.monotonic() - began < 15
    after = registry.execute("hermes_tools.add(1, 3)", owner="a", tools=tools)
    assert (after.value, after.kernel.lost) == ("4", Loss.TIMED_OUT)
    stuck.let_go()


def test_calls_that_never_return_do_not_keep_a_kernels_later_cells_from_calling(
    stuck: Stuck, registry: BlockingRegistry
) -> None:
    tools = {"stuck": stuck.blocking, "wait": stuck.wait_for_twenty, "add": add}
    code = """
import threading, hermes_tools as h
def call():
    try: h.stuck()
    except h.ToolError: pass
threads = [threading.Thread(target=call) for _ in range(20)]
for thread in threads: thread.start()
h.wait()"""
    join = "for thread in threads: thread.join(30)\nh.add(1, 2), sum(t.is_alive() for t in threads)"
    for _ in range(3):
        result = registry.execute(code, owner="a", tools=tools)
        assert result.value == "True", result.text
        after = registry.execute(join, owner="a", tools=tools)
        assert (after.value, after.kernel.reused) == ("(3, 0)", True), after.text
    stuck.let_go()


def test_calls_that_wait_for_their_turn_when_their_cell_ends_are_refused(
    stuck: Stuck, registry: BlockingRegistry, host: Host, tmp_path: Path
) -> None:
    begun, first = tmp_path / "begun", threading.Lock()
    os.mkfifo(begun)

    def hold() -> None:
        if first.acquire(blocking=False):
            begun.open("w").close()
        stuck.blocking()

    tools = {"hold": hold, "echo": host.echo}
    code = f"""
def call():
    try: said.append(h.hold())
    except h.ToolError as error: said.append(str(error))
threads = [threading.Thread(target=call) for _ in range(100)]
for thread in threads: thread.start()
open({str(begun)!r}).close()"""
    result = registry.execute(SETUP + code, owner="a", tools=tools, max_tool_calls=None)
    assert result.status is CellStatus.OK, result.text
    ran = len(result.tool_calls)
    code = """
for thread in threads: thread.join(30)
print(json.dumps([len(said), None in said, [attempt(n) for n in range(4)]]))"""
    after = registry.execute(code, owner="a", tools=tools, max_tool_calls=3)
    assert value_of(after) == [100, False, ["served"] * 3 + ["spent"]]
    assert ran < 100, "all of them ran at once: none had to wait"
    stuck.let_go()


HANDLERS = {
    "blocking": "def stuck(): begin(); time.sleep(3600)",
    "async": "async def stuck(): begin(); await asyncio.sleep(3600)",
    "async and blocking": "async def stuck(): begin(); time.sleep(3600)",
    "async and deaf": """
async def stuck():
    begin()
    while True:
        try: await asyncio.sleep(3600)
        except asyncio.CancelledError: pass""",
}
THREADS = """
import asyncio, sys, threading, time
from hermes_kernel import BlockingRegistry
def begin(): print("stuck", flush=True)
{handler}
def call():
    registry.execute("hermes_tools.stuck()", owner="a", tools=[stuck])
registry = BlockingRegistry()
threading.Thread(target=call, daemon=True).start()
sys.stdin.readline()
{end}
"""
ASYNCIO = """
import asyncio, sys, time
from hermes_kernel import KernelRegistry
def begin(): print("stuck", flush=True)
{handler}
async def main():
    async with KernelRegistry() as registry:
        call = asyncio.create_task(registry.execute("hermes_tools.stuck()", owner="a", tools=[stuck]))
        await asyncio.to_thread(sys.stdin.readline)
        call.cancel()
asyncio.run(main())
"""
PROGRAMS = {
    f"{how}, {name}": program.format(handler=handler, end=end)
    for how, handler in HANDLERS.items()
    for name, program, end in (
        ("closed", THREADS, "registry.close()"),
        ("left", THREADS, "sys.exit()"),
        ("asyncio", ASYNCIO, ""),
    )
    if name != "asyncio" or how in ("blocking", "async")
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.usefixtures("leaves_nothing")
def test_a_host_with_a_handler_that_never_returns_exits_when_it_wants_to(
    program: str, tmp_path: Path
) -> None:
    script = tmp_path / "host.py"
    script.write_text(program)
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"stuck\n"
            began = time.monotonic()
            process.stdin.write(b"\n")
            process.stdin.flush()
            code = process.wait(30)
            took = time.monotonic() - began
        finally:
            process.kill()
    assert code == 0
    assert took < 5


# -- who has no right -------------------------------------------------------------------------------------


def test_a_stranger_is_refused_in_clear_words_and_spends_nothing(
    registry: BlockingRegistry, host: Host, tmp_path: Path
) -> None:
    registry.execute(SETUP + "kept = h.echo\nh.echo('owner')", owner="a", tools=[host.echo])
    stranger = Stranger(registry, tmp_path)
    try:
        for call in (
            "kept('stranger')",
            "h.echo('stranger')",
            "import hermes_tools; hermes_tools.echo('stranger')",
            "await h.aio.echo('stranger')",
        ):
            reply = stranger.run(call, stop_on_error=False)
            assert (reply["status"], reply["ename"]) == ("error", "ToolError"), call
            assert "another client" in reply["evalue"], call
        stranger.shown.clear()
        stranger.run(
            "start_all([threading.Thread(target=lambda: print(attempt('stranger')))])\n"
            "with fork.Pool(1) as pool: print(pool.apply(attempt, ('stranger',)))"
        )
        printed = "".join(shown.get("text", "") for shown in stranger.shown)
        assert printed.count("another client") == 2, printed
    finally:
        stranger.close()
    result = registry.execute(
        "print(json.dumps([attempt(n) for n in range(4)]))", owner="a", tools=[host.echo], max_tool_calls=3
    )
    assert value_of(result) == ["served"] * 3 + ["spent"]
    assert host.got == ["owner", 0, 1, 2]


def test_a_stranger_that_sends_what_it_has_heard_of_tools_is_refused(
    registry: BlockingRegistry, host: Host, tmp_path: Path
) -> None:
    registry.execute(SETUP, owner="a", tools=[host.echo])
    granted = value_of(
        registry.execute(f"{PEER}\nprint(json.dumps(granted()))", owner="a", tools=[host.echo])
    )
    stranger = Stranger(registry, tmp_path)
    try:
        session, channel = stranger.client.session, stranger.client.shell_channel
        content = {"code": "h.echo('stranger')", "silent": False, "store_history": True, "allow_stdin": False}
        message = session.msg("execute_request", content, metadata={"hermes": {"tools": granted}})
        channel.send(message)
        while True:
            reply = stranger.client.get_shell_msg(timeout=30)
            if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
                break
    finally:
        stranger.close()
    assert reply["content"]["status"] == "error"
    assert "another client" in reply["content"]["evalue"]
    assert host.got == []


def test_the_right_is_in_no_environment_variable(registry: BlockingRegistry) -> None:
    code = """
import json, os, subprocess
childs = subprocess.check_output(['env'], text=True)
print(json.dumps([dict(os.environ), open('/proc/self/environ').read(), childs]))"""
    without = value_of(registry.execute(code, owner="a"))
    seen = [
        value_of(registry.execute(f"{code}\nhermes_tools.add(1)", owner="a", tools=[add])) for _ in range(2)
    ]
    assert seen == [without, without], "a cell with tools has another environment"
    (info,) = registry.kernels()
    assert info.connection_file is not None
    secrets = json.loads(Path(info.connection_file).read_text())["hermes"]
    assert len(secrets["bridge_token"]) >= 16
    for secret in (secrets["bridge_token"], secrets["owner_secret"]):
        assert secret not in json.dumps(without)


# -- hand-made clients ------------------------------------------------------------------------------------

PEER = """
import gc, socket, struct

class Peer:
    def __init__(self, hello=None):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(endpoint['path'])
        self.socket.settimeout(30)
        if hello is not None:
            self.greeting = self.ask({'hello': hello})

    def ask(self, body):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.socket.sendall(struct.pack('>I', len(body)) + body)
        (size,) = struct.unpack('>I', self.read(4))
        return json.loads(self.read(size))

    def call(self, token, n):
        reply = self.ask({'id': 1, 'cell': token, 'tool': 'echo', 'args': {'value': n}})
        return 'served' if 'error' not in reply else f"{reply['kind']}: {reply['error']}"

    def read(self, size):
        data = b''
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more: raise ConnectionError
            data += more
        return data

def granted():
    return get_ipython().kernel.get_parent()['metadata']['hermes']['tools']
endpoint = granted()['endpoint']
"""


def kernel_token(registry: BlockingRegistry) -> str:
    (info,) = registry.kernels()
    assert info.connection_file is not None
    return str(json.loads(Path(info.connection_file).read_text())["hermes"]["bridge_token"])


def test_a_hand_made_client_is_bound_to_the_cell_and_the_budget_of_the_token_that_it_has(
    registry: BlockingRegistry, host: Host
) -> None:
    registry.execute(SETUP + PEER + "old = granted()['token']", owner="a", tools=[host.echo])
    code = f"""
peer = Peer({kernel_token(registry)!r})
token = granted()['token']
r = [attempt(0), peer.call(token, 1), peer.call(old, 2), peer.call('', 3), peer.call('é\\ud800', 4)]
r += [peer.call(token, 5), peer.call(token, 6), attempt(7)]
print(json.dumps(r))"""
    result = registry.execute(code, owner="a", tools=[host.echo], max_tool_calls=3)
    first, second, retired, empty, odd, third, spent, fourth = value_of(result)
    assert [first, second, third, fourth] == ["served", "served", "served", "spent"]
    assert retired.startswith("refused: ")
    assert OVER in retired
    assert empty.startswith("refused: Unauthorized")
    assert odd.startswith("refused: Unauthorized")
    assert spent.startswith("budget: ")
    assert host.got == [0, 1, 5]
    assert len(result.tool_calls) == 3


def test_what_is_no_call_is_answered_with_an_error_and_the_connection_goes_on(
    registry: BlockingRegistry, host: Host
) -> None:
    bodies = [
        b"[1,2]", b"5", b"null", b"", b"{", b"\xff\xfe", b"NaN", b"[" * 100_000, b"{}",
        b'{"id": 1, "cell": "x", "tool": [], "args": {}}', b'{"id": [], "cell": "x", "tool": "", "args": {}}',
        b'{"id": 1, "cell": 5, "tool": "a", "args": {}}', b'{"id": 1, "cell": "x", "tool": "a", "args": []}',
    ]  # fmt: skip
    registry.execute(SETUP + PEER, owner="a", tools=[host.echo])
    code = f"""
peer = Peer({kernel_token(registry)!r})
r = [peer.ask(body).get('error') for body in {bodies!r}]
print(json.dumps([r, peer.call(granted()['token'], 1), attempt(2)]))"""
    errors, by_hand, served = value_of(registry.execute(code, owner="a", tools=[host.echo]))
    assert all(isinstance(error, str) and error for error in errors), errors
    assert len(errors) == len(bodies)
    assert (by_hand, served) == ("served", "served")


def test_connections_that_prove_nothing_are_refused_and_keep_no_call_waiting(
    registry: BlockingRegistry, host: Host
) -> None:
    code = """
def answer(peer, body):
    try: return peer.ask(body).get('error') or 'accepted'
    except OSError: return 'closed'
call = {'id': 1, 'cell': granted()['token'], 'tool': 'echo', 'args': {'value': 'stranger'}}
r = [answer(Peer(), body) for body in (call, b'garbage', {'hello': 'wrong'}, {'hello': ''})]
half, huge = Peer(), Peer()
half.socket.sendall(b'\\0\\0')
huge.socket.sendall(struct.pack('>I', 2**31) + b'x' * 1000)
silent = [Peer() for _ in range(200)]
print(json.dumps([r, [attempt(n) for n in range(5)], await attempt_async(5)]))"""
    registry.execute(SETUP + PEER, owner="a", tools=[host.echo])
    result = registry.execute(code, owner="a", tools=[host.echo], timeout=60)
    answers, served, served_async = value_of(result)
    assert "accepted" not in answers
    assert [*served, served_async] == ["served"] * 6
    assert host.got == list(range(6))
    assert result.duration < 20
