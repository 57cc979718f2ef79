"""Process trees on a Windows that is an object: what is called, in which order, and what if it fails.

None of it was ever run on Windows.
"""

import asyncio
import ctypes
import inspect
import itertools
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel.kernel import watchdog
from hermes_kernel.process import windows
from hermes_kernel.process.launch import Ended, LaunchSpec, ProcessLimits
from hermes_kernel.process.launchclass import LaunchClass, Program, ZygoteClass
from hermes_kernel.process.local import LocalLauncher
from hermes_kernel.process.tree import IsolationRefusedError, TreeExit, TreeSpec
from hermes_kernel.process.windows import (
    EMPTY_POLL,
    EMPTY_TIMEOUT,
    TAIL,
    TERMINATED,
    Created,
    Order,
    WindowsApi,
    WindowsTree,
    WindowsTrees,
    command_line,
    environment_block,
    exit_of,
)

SPEC = TreeSpec((r"C:\py\python.exe", "-u"), ("launcher.py", "a b"), {"PATH": "x"}, r"C:\work")
KIND = LaunchClass(ZygoteClass())
PROGRAM = Program((), {})
LEASE = 77
PID = 4_000_000
PATIENCE = 10.0  # seconds until a test that hangs fails

BEGIN = [
    *("make_job", "limit_job", "make_event", "hold", "make_pipe"),
    *("open_null", "lend", "open_this_process", "lend", "create_process"),
    *("close event copy", "close host", "close pipe writer copy", "close null", "close pipe writer"),
    *("is_in_job", "resume", "close thread", "start_thread", "start_thread"),
]
FALLIBLE = [call for call in BEGIN if not call.startswith("close")]
OWNED = ["event", "job", "pipe reader", "process"]


class FakeWindows(WindowsApi):
    """One job, one process and the handles of them; what is used wrongly is remembered as a mistake.

    *fail*: the names of the calls that fail, or the number of the one that does.
    """

    def __init__(self, *fail: str | int, puts_into_job: bool = True) -> None:
        self.fail = set(fail)
        self.puts_into_job = puts_into_job
        self.calls: list[str] = []
        self.mistakes: list[str] = []
        self.open: dict[int, str] = {}
        self.inherited: set[int] = set()
        self.leases: set[int] = set()
        self.threads: list[threading.Thread] = []
        self.order: Order | None = None
        self.memory_limit: int | None = None
        self.kills_on_close = False
        self.is_immortal = False  # whatever is done to it
        self.in_job: set[str] = set()  # the process, and what it has started
        self.running: set[str] = set()
        self.code = 0
        self.is_resumed = False
        self.event_is_set = False
        self.paused = 0.0
        self.written = b""
        self._numbers = itertools.count(0x7FFF_0000_0010, 4)
        self._attempts = itertools.count()
        self._change = threading.Condition()

    # What a test does.

    def exit(self, code: int) -> None:
        """The first process ends by itself."""
        with self._change:
            self.code = code
            self.running.discard("first")
            self._change.notify_all()

    def write(self, data: bytes) -> None:
        with self._change:
            self.written += data
            self._change.notify_all()

    def die(self) -> None:
        """What nothing could end has ended."""
        self.is_immortal = False
        self._end(self.running, TERMINATED | 9)

    def kinds(self) -> list[str]:
        return sorted(self.open.values())

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    # What the code under test calls.

    def make_job(self) -> int:
        self._called("make_job")
        return self._new("job")

    def limit_job(self, job: int, memory_limit: int | None) -> None:
        self._called("limit_job", job)
        self.kills_on_close, self.memory_limit = True, memory_limit

    def make_event(self) -> int:
        self._called("make_event")
        return self._new("event")

    def set_event(self, event: int) -> None:
        self._called("set_event", event)
        self.event_is_set = True

    def make_pipe(self) -> tuple[int, int]:
        self._called("make_pipe")
        return self._new("pipe reader"), self._new("pipe writer")

    def read(self, pipe: int) -> bytes:
        self._called("read", pipe)
        with self._change:
            ended = self._change.wait_for(lambda: self.written or self._nobody_writes(), PATIENCE)
            data, self.written = self.written, b""
            return data if ended else b"nobody has closed the pipe"

    def open_null(self) -> int:
        self._called("open_null")
        return self._new("null", inherited=True)

    def open_this_process(self) -> int:
        self._called("open_this_process")
        return self._new("host", inherited=True)

    def lend(self, handle: int, access: int | None = None) -> int:
        self._called("lend", handle)
        if self.open[handle] == "event":
            assert access == windows.SYNCHRONIZE
        return self._new(f"{self.open[handle]} copy", inherited=True)

    def create_process(self, order: Order) -> Created:
        self._called("create_process", order.job, *order.lent)
        self.order = order
        self.running.add("first")
        if self.puts_into_job:
            self.in_job.add("first")
        return Created(self._new("process"), self._new("thread"), PID)

    def is_in_job(self, process: int, job: int) -> bool:
        self._called("is_in_job", process, job)
        return "first" in self.in_job

    def assign(self, job: int, process: int) -> None:
        self._called("assign", job, process)
        self.in_job.add("first")

    def resume(self, thread: int) -> None:
        self._called("resume", thread)
        if "first" not in self.in_job:
            self.mistakes.append("it runs outside its job")
        self.is_resumed = True

    def wait(self, handle: int, timeout: float | None) -> bool:
        self._called("wait", handle)
        with self._change:
            ended = self._change.wait_for(lambda: "first" not in self.running, timeout or PATIENCE)
        if handle not in self.open:
            self.mistakes.append("a handle was closed while somebody waited on it")
        return ended

    def exit_code(self, process: int) -> int:
        self._called("exit_code", process)
        return self.code

    def terminate_process(self, process: int, code: int) -> None:
        self._called("terminate_process", process)
        self._end({"first"}, code)

    def terminate_job(self, job: int, code: int) -> None:
        self._called("terminate_job", job)
        self._end(self.in_job, code)

    def active_processes(self, job: int) -> int:
        self._called("active_processes", job)
        return len(self.running & self.in_job)

    def close(self, handle: int) -> None:
        kind = self.open.pop(handle, None)
        if kind is None:
            self.mistakes.append("a handle was closed twice")
        self.inherited.discard(handle)
        self.calls.append(f"close {kind}")
        if kind == "job" and self.kills_on_close:
            self._end(self.in_job, TERMINATED | 9)
        with self._change:
            self._change.notify_all()

    def hold(self, descriptor: int) -> int:
        self._called("hold")
        assert descriptor == LEASE or descriptor > 2
        self.leases.add(descriptor + 1000)
        return descriptor + 1000

    def let_go(self, descriptor: int) -> None:
        self.calls.append("let_go")
        self.leases.remove(descriptor)

    def start_thread(self, name: str, function: Callable[[], None]) -> None:
        self._called("start_thread")
        thread = threading.Thread(target=function, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def pause(self, seconds: float) -> None:
        self.calls.append("pause")
        self.paused += seconds

    def _called(self, name: str, *handles: int) -> None:
        self.calls.append(name)
        if not set(handles) <= self.open.keys():
            self.mistakes.append(f"{name} of a handle that is closed")
        number = None if threading.current_thread() in self.threads else next(self._attempts)
        if number in self.fail or name in self.fail:
            raise OSError(5, f"{name}: refused", None, 5)

    def _new(self, kind: str, *, inherited: bool = False) -> int:
        handle = next(self._numbers)
        self.open[handle] = kind
        if inherited:
            self.inherited.add(handle)
        return handle

    def _end(self, names: set[str], code: int) -> None:
        with self._change:
            if self.is_immortal:
                return
            if "first" in names & self.running:
                self.code = code
            self.running -= names
            self._change.notify_all()

    def _nobody_writes(self) -> bool:
        return not self.running and not any("pipe writer" in kind for kind in self.open.values())


@pytest.fixture
def make() -> Iterator[Callable[..., FakeWindows]]:
    """Make fakes; at the end of the test everything of them is closed, and nothing was used wrongly."""
    made: list[FakeWindows] = []

    def new(*fail: str | int, **options: bool) -> FakeWindows:
        made.append(FakeWindows(*fail, **options))
        return made[-1]

    yield new
    for fake in made:
        fake.die()
        fake.join()
        assert fake.mistakes == []
        assert fake.open == {}
        assert fake.leases == set()


def begin(fake: FakeWindows, spec: TreeSpec = SPEC) -> WindowsTree:
    tree = WindowsTree(fake)
    asyncio.run(tree.start(spec, LEASE))
    return tree


def ended(tree: WindowsTree) -> TreeExit:
    return asyncio.run(asyncio.wait_for(tree.ended(), PATIENCE))


def gone(tree: WindowsTree) -> Ended:
    return asyncio.run(asyncio.wait_for(tree.gone(), PATIENCE))


def end(tree: WindowsTree, timeout: float = PATIENCE) -> Ended:
    return asyncio.run(tree.end(timeout=timeout))


def steps_of_begin(fake: FakeWindows) -> list[str]:
    """The calls without those of the two threads, which come when they come."""
    return [call for call in fake.calls if call not in ("read", "wait")]


# The start.


def test_a_process_is_in_its_job_before_it_runs_and_what_was_lent_to_it_is_closed(
    make: Callable[..., FakeWindows],
) -> None:
    fake = make()
    tree = begin(fake)
    assert steps_of_begin(fake) == BEGIN
    assert (tree.pid, tree.warden, tree.how, tree.note) == (PID, 0, "spawn", None)
    assert fake.is_resumed
    assert fake.kinds() == OWNED
    assert fake.inherited == set()
    assert fake.leases == {LEASE + 1000}


def test_on_an_older_windows_a_process_is_assigned_before_it_runs(make: Callable[..., FakeWindows]) -> None:
    fake = make(puts_into_job=False)
    begin(fake)
    assert steps_of_begin(fake)[-6:] == [
        *("is_in_job", "assign", "resume", "close thread", "start_thread", "start_thread")
    ]


def test_a_process_inherits_what_it_needs_and_nothing_else() -> None:
    seen: list[set[int]] = []

    class Watching(FakeWindows):
        def create_process(self, order: Order) -> Created:
            seen.append(set(self.inherited))
            kinds = [self.open[handle] for handle in order.lent]
            assert kinds == ["null", "pipe writer copy", "host", "event copy"]
            assert (self.open[order.stdin], self.open[order.output]) == ("null", "pipe writer copy")
            return super().create_process(order)

    fake = Watching()
    tree = begin(fake)
    assert fake.order is not None
    assert seen == [set(fake.order.lent)]
    assert fake.order.job not in seen[0]
    assert end(tree) is Ended.CLEAN
    fake.join()


def test_a_process_is_told_which_handles_it_has(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    begin(fake)
    assert fake.order is not None
    _, _, host, event = fake.order.lent
    variables = dict(entry.split("=") for entry in fake.order.environment.split("\0") if entry)
    assert variables == {"PATH": "x", watchdog.WATCH: str(host), "JPY_INTERRUPT_EVENT": str(event)}
    assert fake.order.image == r"C:\py\python.exe"
    assert fake.order.command_line == r'C:\py\python.exe -u launcher.py "a b"'
    assert fake.order.cwd == r"C:\work"


@pytest.mark.parametrize(
    ("puts_into_job", "number"),
    [
        *((True, number) for number in range(len(FALLIBLE))),
        *((False, number) for number in range(len(FALLIBLE) + 1)),  # and the assignment
    ],
)
def test_whatever_fails_while_a_tree_is_made_nothing_is_left(
    make: Callable[..., FakeWindows], puts_into_job: bool, number: int
) -> None:
    fake = make(number, puts_into_job=puts_into_job)
    with pytest.raises(OSError, match="refused"):
        begin(fake)
    assert fake.open == {}
    assert fake.leases == set()
    assert fake.running == set()


def test_an_assignment_that_fails_ends_the_process_that_has_not_run(
    make: Callable[..., FakeWindows],
) -> None:
    fake = make("assign", puts_into_job=False)
    with pytest.raises(OSError, match="assign: refused"):
        begin(fake)
    assert not fake.is_resumed
    after = fake.calls[fake.calls.index("assign") + 1 :]
    assert after == [
        *("close thread", "terminate_job", "terminate_process", "wait", "close process"),
        *("close pipe reader", "let_go", "close event", "close job"),
    ]


def test_a_process_that_can_neither_be_used_nor_ended_ends_with_the_handle_of_its_job(
    make: Callable[..., FakeWindows],
) -> None:
    fake = make("resume", "terminate_job", "terminate_process")
    with pytest.raises(OSError, match="resume: refused"):
        begin(fake)
    assert (fake.open, fake.running) == ({}, set())


@pytest.mark.parametrize("refused", ["terminate_process", "wait"])
def test_a_process_that_has_ended_with_its_job_cannot_be_terminated_but_is_waited_for(
    make: Callable[..., FakeWindows], refused: str
) -> None:
    fake = make("resume", refused)
    with pytest.raises(OSError, match="resume: refused"):
        begin(fake)
    assert fake.calls.count("wait") == 1
    assert (fake.open, fake.running) == ({}, set())


def test_a_seat_is_a_directory_and_a_tree_that_waits(
    make: Callable[..., FakeWindows], leaves_nothing: None
) -> None:
    fake = make()

    async def main() -> None:
        seat = await WindowsTrees(fake).seat(KIND, PROGRAM, "k1", binds=True)
        assert seat.staging.path.exists()
        assert fake.calls == []
        await seat.give_up(timeout=PATIENCE)
        assert not seat.staging.path.exists()

    asyncio.run(main())


def test_an_isolation_is_refused_in_words_before_anything_is_made(
    make: Callable[..., FakeWindows], leaves_nothing: None
) -> None:
    fake = make()
    isolated = LaunchClass(ZygoteClass(), "namespace")
    with pytest.raises(IsolationRefusedError, match="isolate nothing"):
        asyncio.run(WindowsTrees(fake).seat(isolated, PROGRAM, "k1", binds=True))
    assert fake.calls == []


@pytest.mark.parametrize("limit", [None, 1 << 30])
def test_the_memory_limit_is_that_of_the_job(
    make: Callable[..., FakeWindows], leaves_nothing: None, limit: int | None
) -> None:
    fake = make()

    async def main() -> None:
        kind = LaunchClass(ZygoteClass(), memory_limit=limit)
        seat = await WindowsTrees(fake).seat(kind, PROGRAM, "k1", binds=False)
        await seat.tree.start(SPEC, seat.staging.lease.descriptor)
        await seat.give_up(timeout=PATIENCE)

    asyncio.run(main())
    assert fake.memory_limit == limit


@pytest.mark.parametrize(
    "spec",
    [
        TreeSpec(("p",), (), {"A": "1\0B=2"}, "c"),
        TreeSpec(("p",), (), {"A=B": "1"}, "c"),
        TreeSpec(("p",), (), {"": "1"}, "c"),
        TreeSpec(("p",), ("a\0b",), {}, "c"),
    ],
)
def test_what_no_process_can_be_given_is_a_value_error_and_leaves_nothing(
    make: Callable[..., FakeWindows], spec: TreeSpec
) -> None:
    fake = make()
    with pytest.raises(ValueError, match=r"illegal|null"):
        begin(fake, spec)
    assert "create_process" not in fake.calls
    assert fake.open == {}


def test_nothing_is_kept_ready(make: Callable[..., FakeWindows]) -> None:
    trees = WindowsTrees(make())
    asyncio.run(trees.discard_spares())
    asyncio.run(trees.close())
    assert trees.spares == 0


# The end.


def test_a_tree_that_has_not_started_ends_at_once_and_never_starts(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = WindowsTree(fake)
    tree.signal(signal.SIGINT)
    assert end(tree, 0) is Ended.CLEAN
    assert (ended(tree), gone(tree)) == (TreeExit(-9, "SIGKILL"), Ended.CLEAN)
    with pytest.raises(OSError, match="has ended"):
        asyncio.run(tree.start(SPEC, LEASE))
    assert fake.calls == []


def test_a_tree_starts_once(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    with pytest.raises(OSError, match="has started"):
        asyncio.run(tree.start(SPEC, LEASE))
    assert fake.calls.count("create_process") == 1


def test_a_tree_whose_start_has_failed_can_be_ended(make: Callable[..., FakeWindows]) -> None:
    tree = WindowsTree(make("create_process"))
    with pytest.raises(OSError, match="refused"):
        asyncio.run(tree.start(SPEC, LEASE))
    assert end(tree) is Ended.CLEAN


@pytest.mark.parametrize("ends_first", [True, False])
def test_an_end_while_it_starts_ends_it_or_keeps_it_from_starting(
    make: Callable[..., FakeWindows], ends_first: bool
) -> None:
    fake = make()
    tree = WindowsTree(fake)
    meet = threading.Barrier(2)

    def start() -> bool:
        meet.wait(PATIENCE)
        try:
            asyncio.run(tree.start(SPEC, LEASE))
        except OSError:
            return False
        return True

    def finish() -> Ended:
        meet.wait(PATIENCE)
        return end(tree)

    work = [finish, start] if ends_first else [start, finish]
    with ThreadPoolExecutor(2) as pool:
        results = [task.result(PATIENCE) for task in [pool.submit(one) for one in work]]
    assert Ended.CLEAN in results
    assert fake.running == set()


def test_what_a_process_started_ends_with_it_and_its_last_words_are_kept(
    make: Callable[..., FakeWindows],
) -> None:
    fake = make()
    tree = begin(fake)
    fake.running.add("child")
    fake.in_job.add("child")
    fake.write(b"x" * TAIL + b"ImportError")
    fake.exit(3)
    assert ended(tree) == TreeExit(3, early=b"x" * (TAIL - len("ImportError")) + b"ImportError")
    assert gone(tree) is Ended.CLEAN
    assert fake.running == set()
    assert fake.kinds() == []


def test_nobody_looks_at_a_process_that_runs(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    fake.exit(0)
    assert ended(tree) == TreeExit(0)
    gone(tree)
    assert fake.calls.count("wait") == 1
    assert fake.paused == 0


def test_everything_is_closed_before_a_tree_counts_as_gone(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    left: list[object] = []

    async def wait() -> None:
        await tree.gone()
        left.extend((*fake.open.values(), *fake.leases))

    fake.exit(0)
    asyncio.run(asyncio.wait_for(wait(), PATIENCE))
    assert left == []


@pytest.mark.parametrize("signum", [signal.SIGINT, 21, 1, 0])
def test_an_interrupt_is_the_event_that_ipykernel_waits_for(
    make: Callable[..., FakeWindows], signum: int
) -> None:
    fake = make()
    tree = begin(fake)
    tree.signal(signum)
    assert fake.event_is_set
    assert fake.running == {"first"}


@pytest.mark.parametrize(("signum", "name"), [(15, "SIGTERM"), (9, "SIGKILL"), (200, "SIG200")])
def test_any_other_signal_ends_the_tree_and_is_what_it_ended_by(
    make: Callable[..., FakeWindows], signum: int, name: str
) -> None:
    fake = make()
    tree = begin(fake)
    tree.signal(signum)
    assert ended(tree) == TreeExit(-signum, name)
    assert gone(tree) is Ended.CLEAN
    assert not fake.event_is_set


def test_what_is_gone_gets_no_signal(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    assert end(tree) is Ended.CLEAN
    before = len(fake.calls)
    tree.signal(signal.SIGINT)
    tree.signal(signal.SIGTERM)
    assert end(tree) is Ended.CLEAN
    assert len(fake.calls) == before


def test_an_interrupt_that_fails_is_logged(
    make: Callable[..., FakeWindows], caplog: pytest.LogCaptureFixture
) -> None:
    tree = begin(make("set_event"))
    tree.signal(signal.SIGINT)
    assert "cannot be interrupted" in caplog.text


def test_an_end_is_a_kill_and_leaves_nothing(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    assert end(tree) is Ended.CLEAN
    assert ended(tree) == TreeExit(-9, "SIGKILL")
    assert gone(tree) is Ended.CLEAN
    assert fake.kinds() == []


def test_eight_threads_may_end_a_tree_at_once(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    start = threading.Barrier(8)

    def one(number: int) -> Ended:
        start.wait(PATIENCE)
        tree.signal(signal.SIGINT if number % 2 else signal.SIGTERM)
        return end(tree)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {Ended.CLEAN}
    assert [fake.calls.count(f"close {kind}") for kind in OWNED] == [1] * len(OWNED)
    assert fake.calls.count("let_go") == 1


def test_who_does_not_wait_any_more_takes_nothing_from_those_who_do(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)

    async def impatient() -> None:
        for wait in (tree.ended, tree.gone):
            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(impatient())
    fake.exit(4)
    assert ended(tree) == TreeExit(4)
    assert gone(tree) is Ended.CLEAN


def test_a_child_that_cannot_be_ended_makes_the_end_not_clean(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    fake.running.add("child")
    fake.in_job.add("child")
    fake.is_immortal = True
    fake.exit(0)
    assert gone(tree) is Ended.NOT_CLEAN
    assert fake.paused == pytest.approx(EMPTY_TIMEOUT)
    assert fake.calls.count("terminate_job") == 1 + round(EMPTY_TIMEOUT / EMPTY_POLL)
    assert ended(tree).exit_code == 0
    assert fake.kinds() == ["pipe reader"]  # that child may still write


def test_a_process_that_cannot_be_ended_is_not_said_to_be_gone(make: Callable[..., FakeWindows]) -> None:
    fake = make()
    tree = begin(fake)
    fake.is_immortal = True
    assert end(tree, 0) is Ended.NOT_CLEAN
    assert end(tree, 0) is Ended.NOT_CLEAN
    assert fake.kinds() == OWNED
    fake.die()
    assert gone(tree) is Ended.CLEAN
    assert end(tree) is Ended.CLEAN


def test_a_job_that_cannot_be_terminated_is_closed_and_nobody_knows_what_is_left(
    make: Callable[..., FakeWindows],
) -> None:
    fake = make("terminate_job")
    tree = begin(fake)
    assert end(tree) is Ended.UNKNOWN
    assert ended(tree) == TreeExit(-9, "SIGKILL")
    assert fake.running == set()
    assert fake.kinds() == []


def test_a_job_whose_processes_cannot_be_counted_is_of_unknown_end(make: Callable[..., FakeWindows]) -> None:
    fake = make("active_processes")
    tree = begin(fake)
    assert end(tree) is Ended.UNKNOWN
    assert fake.kinds() == []


@pytest.mark.parametrize("call", ["wait", "exit_code"])
def test_a_process_that_cannot_be_watched_is_ended(make: Callable[..., FakeWindows], call: str) -> None:
    fake = make(call)
    tree = begin(fake)
    fake.exit(0) if call == "exit_code" else None
    assert ended(tree) == TreeExit(-9, "SIGKILL")
    assert gone(tree) is Ended.CLEAN
    assert fake.running == set()


def test_output_that_cannot_be_read_costs_the_last_words_alone(make: Callable[..., FakeWindows]) -> None:
    fake = make("read")
    tree = begin(fake)
    fake.exit(5)
    assert ended(tree) == TreeExit(5)
    assert gone(tree) is Ended.CLEAN


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (0, TreeExit(0)),
        (255, TreeExit(255)),
        (0xC000_0005, TreeExit(0xC000_0005)),
        (TERMINATED, TreeExit(TERMINATED)),
        (TERMINATED + 2, TreeExit(-2, "SIGINT")),
        (TERMINATED + 256, TreeExit(TERMINATED + 256)),
    ],
)
def test_only_what_we_end_has_ended_by_a_signal(code: int, wanted: TreeExit) -> None:
    assert exit_of(code, b"") == wanted


def test_an_environment_is_sorted_as_windows_sorts_and_ends_with_two_nuls() -> None:
    assert environment_block({"b": "2", "A": "1=1", "=C:": "x"}) == "=C:=x\0A=1=1\0b=2\0"
    assert environment_block({}) == "\0"


def test_arguments_are_quoted_as_a_c_program_reads_them() -> None:
    assert command_line(("a b", 'c"d', "")) == '"a b" c\\"d ""'


# With the launcher above it, and the calls below it.


def test_a_launcher_whose_trees_are_these_falls_back_and_says_why(
    make: Callable[..., FakeWindows], leaves_nothing: None
) -> None:
    fake = make()
    limits = ProcessLimits(isolation="namespace", start_method="auto")

    async def main() -> tuple[str, str | None, Ended, str | None]:
        launcher = LocalLauncher()
        launcher._trees = WindowsTrees(fake)
        kernel = await launcher.launch(
            LaunchSpec("k1", sys.executable, "key", None, {"PATH": "x"}, process=limits)
        )
        outcome = await launcher.end(kernel.handle, timeout=PATIENCE)
        exited = await launcher.ended(kernel.handle)
        await launcher.close()
        assert not Path(kernel.connection_file).parent.exists()
        return kernel.isolation, kernel.degraded, outcome, exited.signal

    isolation, degraded, outcome, name = asyncio.run(main())
    assert (isolation, outcome, name) == ("none", Ended.CLEAN, "SIGKILL")
    assert degraded is not None
    assert "not available here: Windows has jobs, which isolate nothing; runs with 'none'" in degraded


def test_the_fake_has_every_call_with_its_parameters() -> None:
    for name, function in inspect.getmembers(WindowsApi, inspect.isfunction):
        if not name.startswith("_"):
            own = FakeWindows.__dict__[name]
            assert inspect.signature(own) == inspect.signature(function), name


def test_both_sides_name_the_watch_alike() -> None:
    assert windows.WATCH == watchdog.WATCH


def test_elsewhere_there_is_no_windows() -> None:
    with pytest.raises(OSError, match="is not Windows"):
        WindowsTrees()


HANDLE = 0xFFFF_FFFF_0000_0010  # as large as one can be
FUNCTIONS = sorted(windows.SIGNATURES)


class FakeKernel32:
    """The functions behind the calls, with their real C signatures; what they are given is remembered.

    *fail*: the function that fails; with a number behind it only from that call on.
    """

    def __init__(self, fail: str = "", from_call: int = 0) -> None:
        self.fail, self.from_call = fail, from_call
        self.given: dict[str, list[tuple[Any, ...]]] = {name: [] for name in FUNCTIONS}
        self.attributes: dict[int, list[int]] = {}
        self.reads = [b"one", b"", b"two"]
        self.structures: dict[str, Any] = {}
        for name, (result, arguments) in windows.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(result, *arguments)(self._function(name)))

    def _function(self, name: str) -> Callable[..., Any]:
        act = getattr(self, f"_{name}", lambda *_: 1)

        def function(*arguments: Any) -> Any:
            self.given[name].append(arguments)
            if name == self.fail and len(self.given[name]) > self.from_call:
                return {"CreateFileW": -1, "ResumeThread": -1, "WaitForSingleObject": -1}.get(name, 0)
            return act(*arguments)

        return function

    def _CreateJobObjectW(self, *_: Any) -> int:
        return HANDLE

    def _GetCurrentProcess(self) -> int:
        return -1

    def _CreatePipe(self, reader: int, writer: int, *_: Any) -> int:
        ctypes.c_void_p.from_address(reader).value = HANDLE + 4
        ctypes.c_void_p.from_address(writer).value = HANDLE + 8
        return 1

    def _DuplicateHandle(self, _: int, __: int, ___: int, copy: int, *____: Any) -> int:
        ctypes.c_void_p.from_address(copy).value = HANDLE + 12
        return 1

    def _SetInformationJobObject(self, _: int, __: int, place: int, size: int) -> int:
        self.structures["limits"] = windows._ExtendedLimits.from_buffer_copy(ctypes.string_at(place, size))
        return 1

    def _QueryInformationJobObject(self, _: int, __: int, place: int, ___: int, ____: Any) -> int:
        windows._Accounting.from_address(place).active = 3
        return 1

    def _InitializeProcThreadAttributeList(self, place: int | None, _: int, __: int, size: int) -> int:
        ctypes.c_size_t.from_address(size).value = 64
        return 0 if place is None else 1

    def _UpdateProcThreadAttribute(
        self, _: int, __: int, kind: int, values: int, size: int, *___: Any
    ) -> int:
        self.attributes[kind] = list((ctypes.c_void_p * (size // 8)).from_address(values))
        return 1

    def _CreateProcessW(self, *given: Any) -> int:
        _, line, _, _, _, _, environment, _, info, made = given
        self.structures["line"] = ctypes.wstring_at(line)
        self.structures["environment"] = ctypes.wstring_at(environment, 9)
        raw = ctypes.string_at(info, ctypes.sizeof(windows._StartupInfo))
        self.structures["info"] = windows._StartupInfo.from_buffer_copy(raw)
        result = windows._ProcessInformation.from_address(made)
        result.process, result.thread, result.pid = HANDLE + 16, HANDLE + 20, 1234
        return 1

    def _IsProcessInJob(self, _: int, __: int, answer: int) -> int:
        ctypes.c_int32.from_address(answer).value = 1
        return 1

    def _GetExitCodeProcess(self, _: int, code: int) -> int:
        ctypes.c_uint32.from_address(code).value = 0xC000_0005
        return 1

    def _WaitForSingleObject(self, *_: int) -> int:
        return 0

    def _ReadFile(self, _: int, buffer: int, __: int, count: int, ___: Any) -> int:
        if not self.reads:
            return 0
        data = self.reads.pop(0)
        ctypes.memmove(buffer, data, len(data))
        ctypes.c_uint32.from_address(count).value = len(data)
        return 1


def api_over(kernel32: FakeKernel32, number: int = windows.ERROR_BROKEN_PIPE) -> WindowsApi:
    return WindowsApi(kernel32, lambda: number, lambda number: f"error {number}\r\n")


ORDER = Order("image", "line", "A=1\0B=2\0", "cwd", HANDLE, HANDLE + 4, (HANDLE, HANDLE + 4), HANDLE + 8)


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the sizes are those of 64 bits")
@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [
        (windows._SecurityAttributes, 24, {"descriptor": 8, "inherit": 16}),
        (
            windows._StartupInfo,
            112,
            {"flags": 60, "stdin": 80, "stdout": 88, "stderr": 96, "attributes": 104},
        ),
        (windows._ProcessInformation, 24, {"thread": 8, "pid": 16}),
        (windows._ExtendedLimits, 144, {"flags": 16, "affinity": 48, "job_memory": 120}),
        (windows._Accounting, 48, {"total": 36, "active": 40}),
    ],
)
def test_a_structure_has_the_layout_of_the_windows_headers(
    structure: Any, size: int, offsets: dict[str, int]
) -> None:
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in offsets} == offsets


@pytest.mark.parametrize(
    ("limit", "flags"), [(None, 0x2000 | 0x400), (1 << 40, 0x2000 | 0x400 | 0x200)], ids=["none", "1 TiB"]
)
def test_a_job_ends_with_its_handle_and_nothing_may_leave_it(limit: int | None, flags: int) -> None:
    kernel32 = FakeKernel32()
    api = api_over(kernel32)
    api.limit_job(api.make_job(), limit)
    limits = kernel32.structures["limits"]
    assert (limits.flags, limits.job_memory) == (flags, limit or 0)
    assert limits.flags & (0x800 | 0x1000) == 0  # BREAKAWAY_OK, SILENT_BREAKAWAY_OK
    assert kernel32.given["CreateJobObjectW"] == [(None, None)]
    assert kernel32.given["SetInformationJobObject"][0][:2] == (HANDLE, 9)


def test_a_process_is_created_suspended_without_a_window_with_its_handles_and_its_job() -> None:
    kernel32 = FakeKernel32()
    assert api_over(kernel32).create_process(ORDER) == Created(HANDLE + 16, HANDLE + 20, 1234)
    image, _, process_rights, thread_rights, inherits, flags, _, cwd, _, _ = kernel32.given["CreateProcessW"][
        0
    ]
    assert (image, process_rights, thread_rights, inherits, cwd) == ("image", None, None, 1, "cwd")
    assert flags == 0x4 | 0x200 | 0x400 | 0x8_0000 | 0x0800_0000
    assert kernel32.structures["line"] == "line"
    assert kernel32.structures["environment"] == "A=1\0B=2\0\0"
    info = kernel32.structures["info"]
    assert (info.size, info.flags) == (112, 0x100)
    assert (info.stdin, info.stdout, info.stderr) == (HANDLE, HANDLE + 4, HANDLE + 4)
    assert kernel32.attributes == {0x2_0002: [HANDLE, HANDLE + 4], 0x2_000D: [HANDLE + 8]}
    (listed,) = kernel32.given["DeleteProcThreadAttributeList"]
    assert listed == (info.attributes,)


def test_where_a_process_cannot_be_created_in_a_job_it_is_created_all_the_same() -> None:
    kernel32 = FakeKernel32("UpdateProcThreadAttribute", from_call=1)
    assert api_over(kernel32).create_process(ORDER).pid == 1234
    assert list(kernel32.attributes) == [0x2_0002]


@pytest.mark.parametrize("name", ["CreateProcessW", "UpdateProcThreadAttribute"])
def test_a_list_of_attributes_is_given_back_whatever_fails(name: str) -> None:
    kernel32 = FakeKernel32(name)
    with pytest.raises(OSError, match=name):
        api_over(kernel32).create_process(ORDER)
    assert len(kernel32.given["DeleteProcThreadAttributeList"]) == 1


def test_handles_are_private_and_their_copies_are_lent() -> None:
    kernel32 = FakeKernel32()
    api = api_over(kernel32)
    assert api.make_pipe() == (HANDLE + 4, HANDLE + 8)
    api.make_event()
    assert kernel32.given["CreatePipe"][0][2] is None
    assert kernel32.given["CreateEventW"] == [(None, 0, 0, None)]
    assert api.lend(HANDLE) == api.lend(HANDLE, windows.SYNCHRONIZE) == HANDLE + 12
    same, less = kernel32.given["DuplicateHandle"]
    assert (same[1], *same[4:]) == (HANDLE, 0, 1, 2)
    assert (less[1], *less[4:]) == (HANDLE, 0x10_0000, 1, 0)
    api.open_this_process()
    ((access, inherits, _),) = kernel32.given["OpenProcess"]
    assert (access, inherits) == (0x10_0000, 1)
    api.open_null()
    assert kernel32.given["CreateFileW"][0][:3] == ("NUL", 0xC000_0000, 3)


def test_a_pipe_is_read_to_its_end_over_writes_of_nothing() -> None:
    api = api_over(FakeKernel32())
    assert [api.read(HANDLE) for _ in range(3)] == [b"one", b"two", b""]
    with pytest.raises(OSError, match="ReadFile: error 6"):
        api_over(FakeKernel32("ReadFile"), 6).read(HANDLE)


def test_a_wait_has_no_limit_or_that_of_its_caller() -> None:
    kernel32 = FakeKernel32()
    api = api_over(kernel32)
    assert api.wait(HANDLE, None)
    assert api.wait(HANDLE, 1.5)
    assert kernel32.given["WaitForSingleObject"] == [(HANDLE, 0xFFFF_FFFF), (HANDLE, 1500)]


def test_what_windows_answers_is_what_is_returned() -> None:
    api = api_over(FakeKernel32())
    assert api.exit_code(HANDLE) == 0xC000_0005
    assert api.active_processes(HANDLE) == 3
    assert api.is_in_job(HANDLE, HANDLE)


CALLS: dict[str, Callable[[WindowsApi], object]] = {
    "CreateJobObjectW": lambda api: api.make_job(),
    "SetInformationJobObject": lambda api: api.limit_job(HANDLE, None),
    "CreateEventW": lambda api: api.make_event(),
    "SetEvent": lambda api: api.set_event(HANDLE),
    "CreatePipe": lambda api: api.make_pipe(),
    "ReadFile": lambda api: api.read(HANDLE),
    "CreateFileW": lambda api: api.open_null(),
    "OpenProcess": lambda api: api.open_this_process(),
    "DuplicateHandle": lambda api: api.lend(HANDLE),
    "InitializeProcThreadAttributeList": lambda api: api.create_process(ORDER),
    "CreateProcessW": lambda api: api.create_process(ORDER),
    "IsProcessInJob": lambda api: api.is_in_job(HANDLE, HANDLE),
    "AssignProcessToJobObject": lambda api: api.assign(HANDLE, HANDLE),
    "ResumeThread": lambda api: api.resume(HANDLE),
    "WaitForSingleObject": lambda api: api.wait(HANDLE, None),
    "GetExitCodeProcess": lambda api: api.exit_code(HANDLE),
    "TerminateProcess": lambda api: api.terminate_process(HANDLE, TERMINATED | 9),
    "TerminateJobObject": lambda api: api.terminate_job(HANDLE, TERMINATED | 9),
    "QueryInformationJobObject": lambda api: api.active_processes(HANDLE),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_that_fails_is_an_os_error_with_its_name_and_windows_text(name: str) -> None:
    with pytest.raises(OSError, match=rf"{name}: error 5 \[5\]"):
        CALLS[name](api_over(FakeKernel32(name), 5))


@pytest.mark.parametrize("name", CALLS)
def test_a_function_that_does_not_fail_is_no_error(name: str) -> None:
    kernel32 = FakeKernel32()
    CALLS[name](api_over(kernel32))
    assert kernel32.given[name]


def test_a_handle_that_cannot_be_closed_is_logged_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        api_over(FakeKernel32("CloseHandle"), 6).close(HANDLE)
    assert "CloseHandle: error 6" in caplog.text


def test_a_thread_that_cannot_be_started_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        api_over(FakeKernel32()).start_thread("name", lambda: None)


def test_a_lease_is_held_by_a_descriptor_of_its_own(tmp_path: Path) -> None:
    api = api_over(FakeKernel32())
    with open(tmp_path / "lease", "wb") as file:
        held = api.hold(file.fileno())
    api.let_go(held)
    with pytest.raises(OSError, match="Bad file descriptor"):
        api.let_go(held)
