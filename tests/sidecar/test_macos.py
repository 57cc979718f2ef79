"""What the sidecars ask of macOS, with a macOS that is an object: processes, orphans, queues of events.

None of it was ever run on macOS.
"""

import ctypes
import errno
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_kernel.sidecar import linux, macos
from hermes_kernel.sidecar import tree as sidecar_tree
from hermes_kernel.sidecar.macos import (
    FORGET_AFTER,
    LAUNCHD,
    LOOK_AFTER,
    NOTE_EXIT,
    NOTE_FORK,
    STOPPED,
    ZOMBIE,
    Darwin,
    Family,
    MacOS,
    Process,
    declare,
)

RUNNING = 2
STRANGER = 50  # a process that launchd has started
SIDECAR = 100  # the process that asks


class FakeDarwin(Darwin):
    """Processes that are forked, leave their session and end, as macOS has them.

    ``numbers``: whether it tells the unique numbers. ``fail``: the names of the calls that fail.
    """

    def __init__(self, *, numbers: bool = True) -> None:
        self.numbers = numbers
        self.fail: set[str] = set()
        self.table: dict[int, Process] = {}
        self.sessions: dict[int, int] = {}
        self.told: dict[int, dict[int, int]] = {}  # for each queue: what it wants to know of which process
        self.pending: dict[int, dict[int, int]] = {}
        self.here = SIDECAR
        self.sent: list[tuple[int, int]] = []
        self.whole_looks = 0
        self._pids = itertools.count(1000)
        self._unique = itertools.count(1)
        self._clock = itertools.count(1_700_000_000_000_000, 10)
        self._queues = itertools.count(30)
        self._born(LAUNCHD, parent=0, session=1)
        self._born(STRANGER, parent=LAUNCHD, session=STRANGER)
        self._born(SIDECAR, parent=LAUNCHD, session=SIDECAR)

    # What happens.

    def fork(self, parent: int, pid: int | None = None) -> int:
        child = next(self._pids) if pid is None else pid
        self._born(child, parent=parent, session=self.sessions[parent])
        self._note(parent, NOTE_FORK)
        return child

    def new_session(self, pid: int) -> None:
        self.sessions[pid] = pid

    def exit(self, pid: int) -> None:
        """End a process. Its children become launchd's, who takes in at once those of its own that end."""
        process = self.table[pid]
        for child, its in list(self.table.items()):
            if its.parent == pid:
                self.table[child] = its._replace(parent=LAUNCHD)
                if not its.lives:
                    self.reap(child)
        self.table[pid] = process._replace(state=ZOMBIE)
        self._note(pid, NOTE_EXIT)
        for wanted in self.told.values():
            wanted.pop(pid, None)
        if process.parent == LAUNCHD:
            self.reap(pid)

    def reap(self, pid: int) -> None:
        del self.table[pid], self.sessions[pid]

    def stop(self, pid: int) -> None:
        self.table[pid] = self.table[pid]._replace(state=STOPPED)

    def daemon(self, parent: int) -> tuple[int, int]:
        """Fork twice, as what wants to be nobody's child does; return the middle process and the last."""
        middle = self.fork(parent)
        self.new_session(middle)
        last = self.fork(middle)
        return middle, last

    def kill(self, pid: int, signum: int) -> None:
        self.sent.append((pid, signum))
        if pid not in self.table:
            raise ProcessLookupError
        if signum == 9 and self.table[pid].lives:
            self.exit(pid)
        elif signum == 19:
            self.stop(pid)

    def reap_own(self) -> None:
        for pid, process in list(self.table.items()):
            if process.parent == self.here and not process.lives:
                self.reap(pid)

    # What is asked.

    def own_pid(self) -> int:
        return self.here

    def session(self, pid: int) -> int:
        return self.sessions.get(pid, 0)

    def processes(self) -> Iterator[Process]:
        self._attempt("processes")
        self.whole_looks += 1
        return iter(list(self.table.values()))

    def children(self, pid: int) -> list[int]:
        return [child for child, process in self.table.items() if process.parent == pid]

    def process(self, pid: int) -> Process | None:
        return self.table.get(pid)

    def queue(self) -> int:
        self._attempt("queue")
        queue = next(self._queues)
        self.told[queue], self.pending[queue] = {}, {}
        return queue

    def tell(self, queue: int, pid: int, what: int) -> None:
        self._attempt("tell")
        if pid not in self.table or not self.table[pid].lives:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        self.told[queue][pid] = what

    def events(self, queue: int) -> list[tuple[int, int]]:
        found, self.pending[queue] = list(self.pending[queue].items()), {}
        return found

    def close(self, descriptor: int) -> None:
        del self.told[descriptor], self.pending[descriptor]

    def _born(self, pid: int, *, parent: int, session: int) -> None:
        unique = next(self._unique)
        born_of = self.table[parent].number if parent else 0
        self.table[pid] = Process(
            pid, parent, RUNNING, next(self._clock),
            unique if self.numbers else 0, born_of if self.numbers else 0,
        )  # fmt: skip
        self.sessions[pid] = session

    def _note(self, pid: int, what: int) -> None:
        for queue, wanted in self.told.items():
            if wanted.get(pid, 0) & what:
                self.pending[queue][pid] = self.pending[queue].get(pid, 0) | what

    def _attempt(self, name: str) -> None:
        if name in self.fail:
            raise OSError(errno.EMFILE, f"{name}: refused")


class World:
    """A sidecar with one child, as a warden has its kernel."""

    def __init__(self, *, numbers: bool = True) -> None:
        self.darwin = FakeDarwin(numbers=numbers)
        self.system = MacOS(self.darwin)
        self.system.adopt_orphans()
        self.kernel = self.darwin.fork(SIDECAR)
        self.darwin.new_session(self.kernel)
        self.system.take_news()


@pytest.fixture(params=[True, False], ids=["numbers", "no numbers"])
def world(request: pytest.FixtureRequest) -> World:
    return World(numbers=request.param)


@pytest.fixture
def numbered() -> World:
    return World()


# The same names on every platform.


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, function in inspect.getmembers(linux, inspect.isfunction)
        if not name.startswith("_") and name not in ("prctl", "unshare", "mount")
    ],
)
def test_every_function_of_linux_is_one_of_macos_with_the_same_parameters(name: str) -> None:
    parameters = [list(inspect.signature(getattr(module, name)).parameters) for module in (linux, macos)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("name", ["adopt_orphans", "children", "descendants", "news", "take_news", "watch"])
def test_the_functions_of_the_module_are_those_of_one_system(name: str) -> None:
    assert getattr(macos, name).__self__ is macos.hide.__self__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "call",
    [
        lambda system: system.enter_user_and_pid_namespace(),
        lambda system: system.see_own_processes_only(),
        lambda system: system.forbid_new_privileges(),
    ],
)
def test_what_macos_cannot_do_is_an_os_error_that_says_so(call: Callable[[MacOS], None]) -> None:
    with pytest.raises(OSError, match="macOS") as caught:
        call(MacOS(FakeDarwin()))
    assert caught.value.errno == errno.ENOTSUP


def test_what_is_a_preference_is_no_error_and_no_call() -> None:
    system = MacOS(FakeDarwin())
    system.hide()
    system.signal_at_parents_end(9)


# The end of the host.


def test_a_watch_is_told_of_the_end_of_the_process() -> None:
    darwin = FakeDarwin()
    watch = MacOS(darwin).watch(STRANGER)
    assert watch is not None
    assert darwin.told[watch] == {STRANGER: NOTE_EXIT}
    darwin.exit(STRANGER)
    assert darwin.events(watch) == [(STRANGER, NOTE_EXIT)]


def test_a_process_that_is_gone_cannot_be_watched_and_leaves_no_descriptor() -> None:
    darwin = FakeDarwin()
    with pytest.raises(ProcessLookupError):
        MacOS(darwin).watch(9999)
    assert darwin.told == {}


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_process_that_ends_while_it_is_asked_for_is_gone(is_reaped: bool) -> None:
    class Late(FakeDarwin):
        def tell(self, queue: int, pid: int, what: int) -> None:
            super().tell(queue, pid, what)
            self.exit(pid)
            if is_reaped:
                self.reap(pid)

    darwin = Late()
    child = darwin.fork(SIDECAR)
    with pytest.raises(ProcessLookupError):
        MacOS(darwin).watch(child)
    assert darwin.told == {}


@pytest.mark.parametrize("call", ["queue", "tell"])
def test_where_nothing_can_be_watched_there_is_no_watch_and_no_descriptor(call: str) -> None:
    darwin = FakeDarwin()
    darwin.fail.add(call)
    assert MacOS(darwin).watch(STRANGER) is None
    assert darwin.told == {}


def test_a_process_has_started_as_long_as_it_lives() -> None:
    darwin = FakeDarwin()
    system = MacOS(darwin)
    child = darwin.fork(SIDECAR)
    assert system.started(child) == 1_700_000_000
    darwin.exit(child)
    assert system.started(child) is None
    darwin.reap(child)
    assert system.started(child) is None


# Children, orphans and what is below them.


def test_a_zombie_is_a_child_until_it_is_reaped(world: World) -> None:
    world.darwin.exit(world.kernel)
    assert world.system.children() == [world.kernel]
    world.darwin.reap(world.kernel)
    assert world.system.children() == []


def test_the_orphan_of_a_process_that_has_ended_is_a_child_of_the_nearest_that_lives(world: World) -> None:
    middle, last = world.darwin.daemon(world.kernel)
    world.system.take_news()
    world.darwin.exit(middle)
    world.darwin.reap(middle)
    assert world.darwin.table[last].parent == LAUNCHD
    assert world.system.children() == [world.kernel]
    assert world.system.children_of(world.kernel) == [last]
    assert dict(world.system.descendants([world.kernel])) == {world.kernel: False, last: False}
    world.darwin.exit(world.kernel)
    world.darwin.reap(world.kernel)
    assert world.system.children() == [last]


def test_a_chain_of_orphans_is_followed_over_all_that_have_ended(world: World) -> None:
    chain = [world.kernel]
    for _ in range(5):
        chain.append(world.darwin.fork(chain[-1]))
        world.darwin.new_session(chain[-1])
        world.system.take_news()
    for pid in chain[1:-1]:
        world.darwin.exit(pid)
        if pid in world.darwin.table:
            world.darwin.reap(pid)
        assert dict(world.system.descendants([world.kernel]))[chain[-1]] is False
        assert world.system.children() == [world.kernel]


def test_a_child_that_was_never_seen_is_known_by_the_number_of_its_parent(numbered: World) -> None:
    child = numbered.darwin.fork(numbered.kernel)  # nobody looks until the kernel is gone
    numbered.darwin.new_session(child)
    numbered.darwin.exit(numbered.kernel)
    numbered.darwin.reap(numbered.kernel)
    assert numbered.system.children() == [child]


def test_without_numbers_an_orphan_is_known_by_what_was_seen_before() -> None:
    world = World(numbers=False)
    child = world.darwin.fork(world.kernel)
    world.darwin.new_session(child)
    world.system.take_news()
    world.darwin.exit(world.kernel)
    world.darwin.reap(world.kernel)
    assert world.system.children() == [child]


def test_an_orphan_whose_parent_was_never_seen_is_known_by_its_session(world: World) -> None:
    middle = world.darwin.fork(world.kernel)
    last = world.darwin.fork(middle)
    world.darwin.exit(middle)
    world.darwin.reap(middle)
    assert world.system.children_of(world.kernel) == [last]
    world.darwin.exit(world.kernel)
    world.darwin.reap(world.kernel)
    assert world.system.children() == [last]


def test_the_session_of_a_kernel_that_has_just_ended_is_still_its_own(world: World) -> None:
    middle = world.darwin.fork(world.kernel)
    last = world.darwin.fork(middle)
    world.system.children()
    unseen = world.darwin.fork(last)
    child = world.darwin.fork(unseen)
    for pid in (unseen, last, middle, world.kernel):
        world.darwin.exit(pid)
        if pid in world.darwin.table:
            world.darwin.reap(pid)
    assert world.system.children() == [child]


def test_what_nobody_could_see_is_not_found(world: World) -> None:
    middle, last = world.darwin.daemon(world.kernel)
    world.darwin.exit(middle)
    world.darwin.reap(middle)
    assert last not in dict(world.system.descendants([world.kernel]))


def test_strangers_stay_strangers(world: World) -> None:
    world.darwin.fork(STRANGER)
    world.darwin.fork(LAUNCHD)
    world.darwin.exit(STRANGER)
    assert world.system.children() == [world.kernel]
    assert [pid for pid, _ in world.system.descendants([world.kernel])] == [world.kernel]


def test_a_session_is_forgotten_with_the_last_of_the_family_in_it(world: World) -> None:
    """Its number may be anybody's from then on."""
    world.system.children()
    world.darwin.exit(world.kernel)
    world.darwin.reap(world.kernel)
    world.system.take_news()
    other = world.darwin.fork(LAUNCHD, pid=world.kernel)
    world.darwin.new_session(other)
    orphan = world.darwin.fork(other)
    world.darwin.exit(other)
    assert world.darwin.sessions[orphan] == world.kernel
    assert world.system.children() == []


def test_a_pid_that_is_used_again_is_somebody_else(world: World) -> None:
    child = world.darwin.fork(world.kernel)
    world.system.take_news()
    world.darwin.exit(child)
    world.darwin.reap(child)
    world.darwin.fork(STRANGER, pid=child)
    assert world.system.children_of(world.kernel) == []
    assert [pid for pid, _ in world.system.descendants([world.kernel])] == [world.kernel]


def test_the_news_of_a_pid_that_is_used_again_bring_nobody(world: World) -> None:
    child = world.darwin.fork(world.kernel)
    world.system.take_news()
    world.darwin.fork(child)
    for pid in list(world.darwin.children(child)):
        world.darwin.exit(pid)
        world.darwin.reap(pid)
    world.darwin.exit(child)
    world.darwin.reap(child)
    other = world.darwin.fork(STRANGER, pid=child)
    its = world.darwin.fork(other)
    world.system.take_news()
    world.darwin.exit(other)
    world.darwin.reap(other)
    assert its not in dict(world.system.descendants([world.kernel]))
    assert world.system.children() == [world.kernel]
    assert its not in [relative.pid for relative in world.system._family()._relatives.values()]


def test_who_was_a_child_when_it_was_listed_and_is_somebody_else_when_it_is_asked_is_a_stranger(
    world: World,
) -> None:
    world.darwin.children = lambda pid: [STRANGER]  # type: ignore[method-assign]
    child = world.darwin.fork(world.kernel)
    world.system.take_news()
    assert {pid for pid, _ in world.system.descendants([world.kernel])} == {world.kernel, child}


def test_an_ancestor_whose_pid_is_used_again_is_passed_over(world: World) -> None:
    middle, last = world.darwin.daemon(world.kernel)
    world.system.take_news()
    world.darwin.exit(middle)
    world.darwin.reap(middle)
    world.darwin.fork(STRANGER, pid=middle)
    assert world.system.children_of(world.kernel) == [last]


def test_an_ancestor_that_nobody_has_reaped_yet_is_passed_over(world: World) -> None:
    _, last = world.darwin.daemon(world.kernel)
    world.system.take_news()
    world.darwin.exit(world.darwin.table[last].parent)
    world.darwin.exit(world.kernel)
    assert sorted(world.system.children()) == sorted([world.kernel, last])


def test_an_orphan_that_has_ended_is_launchds_to_reap(world: World) -> None:
    middle, last = world.darwin.daemon(world.kernel)
    world.system.take_news()
    world.darwin.exit(middle)
    world.darwin.reap(middle)
    world.darwin.table[last] = world.darwin.table[last]._replace(state=ZOMBIE)
    assert world.system.children_of(world.kernel) == []


def test_a_stopped_process_and_a_zombie_run_no_more(world: World) -> None:
    stopped, zombie, running = (world.darwin.fork(world.kernel) for _ in range(3))
    world.darwin.stop(stopped)
    world.darwin.exit(zombie)
    found = dict(world.system.descendants([world.kernel]))
    assert found == {world.kernel: False, stopped: True, zombie: True, running: False}


def test_a_root_that_is_gone_has_no_descendants(world: World) -> None:
    assert world.system.descendants([9999]) == []
    with pytest.raises(ProcessLookupError):
        world.system.children_of(9999)


def test_an_orphan_below_a_child_that_lives_is_not_this_process_to_end(numbered: World) -> None:
    """A zygote must leave to a warden what is the warden's, and take it over when the warden is killed."""
    darwin, warden = numbered.darwin, numbered.kernel
    kernel = darwin.fork(warden)
    numbered.system.take_news()
    middle, last = darwin.daemon(kernel)
    numbered.system.take_news()
    darwin.exit(middle)
    darwin.reap(middle)
    assert numbered.system.children() == [warden]
    darwin.exit(warden)
    darwin.reap(warden)
    assert numbered.system.children() == [kernel]
    assert dict(numbered.system.descendants([kernel])) == {kernel: False, last: False}


def test_after_a_fork_the_child_has_a_family_and_a_queue_of_its_own(numbered: World) -> None:
    parents = numbered.system.news()
    numbered.darwin.here = numbered.kernel
    assert numbered.system.children() == []
    assert numbered.system.news() not in (parents, None)
    assert parents in numbered.darwin.told  # not the child's to close
    child = numbered.darwin.fork(numbered.kernel)
    assert numbered.system.children() == [child]


# The news.


def test_whoever_forks_is_asked_at_once_and_nobody_else_is_looked_at(numbered: World) -> None:
    before = numbered.darwin.whole_looks
    middle, last = numbered.darwin.daemon(numbered.kernel)
    numbered.system.take_news()
    queue = numbered.system.news()
    assert queue is not None
    assert {numbered.kernel, middle, last} <= numbered.darwin.told[queue].keys()
    assert numbered.darwin.whole_looks == before


def test_the_dead_are_forgotten_as_they_become_many(numbered: World) -> None:
    for _ in range(LOOK_AFTER * (FORGET_AFTER + 1)):
        child = numbered.darwin.fork(numbered.kernel)
        numbered.system.take_news()
        numbered.darwin.exit(child)
        numbered.darwin.reap(child)
        numbered.system.take_news()
    family = numbered.system._family()
    assert len(family._relatives) <= 2 + LOOK_AFTER * FORGET_AFTER


def test_a_dead_ancestor_is_remembered_as_long_as_anybody_needs_it(world: World) -> None:
    middle, last = world.darwin.daemon(world.kernel)
    world.system.take_news()
    world.darwin.exit(middle)
    world.darwin.reap(middle)
    for _ in range(FORGET_AFTER + 2):
        assert world.system.children_of(world.kernel) == [last]


def test_one_look_that_comes_too_early_does_not_lose_a_child(numbered: World) -> None:
    """A list of pids is older than the answers about them: the parent is gone, and its child not listed."""
    darwin = numbered.darwin
    child = darwin.fork(numbered.kernel)
    darwin.new_session(child)
    darwin.exit(numbered.kernel)
    darwin.reap(numbered.kernel)
    hidden, session = darwin.table.pop(child), darwin.sessions.pop(child)
    assert numbered.system.children() == []
    darwin.table[child], darwin.sessions[child] = hidden, session
    assert numbered.system.children() == [child]


@pytest.mark.parametrize("call", ["queue", "tell"])
def test_where_there_are_no_news_a_look_finds_what_is_there(call: str) -> None:
    darwin = FakeDarwin()
    darwin.fail.add(call)
    system = MacOS(darwin)
    system.adopt_orphans()
    assert (system.news() is None) == (call == "queue")
    system.take_news()
    kernel = darwin.fork(SIDECAR)
    system.children()
    child = darwin.fork(kernel)
    darwin.exit(kernel)
    darwin.reap(kernel)
    assert system.children() == [child]


def test_a_table_that_cannot_be_read_is_an_error_and_not_an_empty_one(numbered: World) -> None:
    numbered.darwin.fail.add("processes")
    with pytest.raises(OSError, match="processes: refused"):
        numbered.system.children()


# The end of a tree, by the code that ends it on every platform.


class NoEvents:
    def wait(self, *_: Any, **__: Any) -> set[int]:
        return set()


@pytest.fixture
def end_tree(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    def end(world: World, **options: Any) -> bool:
        monkeypatch.setattr(sidecar_tree, "system", world.system)
        monkeypatch.setattr(sidecar_tree.os, "kill", world.darwin.kill)
        result = sidecar_tree.end_tree(NoEvents(), world.darwin.reap_own, **options)  # type: ignore[arg-type]
        monkeypatch.undo()
        return result

    return end


def test_a_tree_with_daemons_in_it_is_ended_to_the_last(world: World, end_tree: Callable[..., bool]) -> None:
    for parent in [world.kernel, *(world.darwin.fork(world.kernel) for _ in range(3))]:
        middle, _ = world.darwin.daemon(parent)
        world.system.take_news()
        world.darwin.exit(middle)
        if middle in world.darwin.table:
            world.darwin.reap(middle)
    assert end_tree(world)
    assert sorted(world.darwin.table) == [LAUNCHD, STRANGER, SIDECAR]
    assert not {LAUNCHD, STRANGER, SIDECAR} & {pid for pid, _ in world.darwin.sent}


def test_a_kernel_that_is_dead_before_anybody_looks_takes_its_tree_along(
    world: World, end_tree: Callable[..., bool]
) -> None:
    _, last = world.darwin.daemon(world.kernel)
    world.system.take_news()
    world.darwin.exit(world.kernel)
    assert end_tree(world)
    assert last not in world.darwin.table
    assert sorted(world.darwin.table) == [LAUNCHD, STRANGER, SIDECAR]


def test_a_child_that_is_spared_is_spared_with_all_below_it(
    numbered: World, end_tree: Callable[..., bool]
) -> None:
    warden = numbered.kernel
    middle, last = numbered.darwin.daemon(numbered.darwin.fork(warden))
    numbered.system.take_news()
    numbered.darwin.exit(middle)
    if middle in numbered.darwin.table:
        numbered.darwin.reap(middle)
    other = numbered.darwin.fork(SIDECAR)
    assert end_tree(numbered, spare=lambda: {warden})
    assert other not in numbered.darwin.table
    assert {warden, last} <= numbered.darwin.table.keys()


@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["fork", "session", "exit"]), st.integers(0, 1000)), max_size=40),
)
def test_whoever_is_seen_once_is_never_lost_and_no_stranger_is_taken(
    numbers: bool, steps: list[tuple[str, int]]
) -> None:
    world = World(numbers=numbers)
    family = {world.kernel}
    for what, which in steps:
        alive = sorted(pid for pid in family if pid in world.darwin.table and world.darwin.table[pid].lives)
        if not alive:
            break
        pid = alive[which % len(alive)]
        if what == "fork":
            family.add(world.darwin.fork(pid))
        elif what == "session":
            world.darwin.new_session(pid)
        else:
            world.darwin.exit(pid)
        world.system.take_news()
        world.darwin.reap_own()
    for pid in [pid for pid, process in world.darwin.table.items() if not process.lives]:
        world.darwin.reap(pid)
    roots = world.system.children()
    assert {pid for pid, _ in world.system.descendants(roots)} == family & world.darwin.table.keys()


# The calls themselves.


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the sizes are those of 64 bits")
@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [
        (macos._Info, 136, {"state": 4, "pid": 12, "parent": 16, "names": 48, "seconds": 120}),
        (macos._Ids, 56, {"own": 16, "born_of": 24}),
        (macos._InfoWithIds, 192, {"ids": 136}),
        (macos._ShortInfo, 64, {"parent": 4, "state": 12, "name": 16}),
        (macos._Event, 32, {"filter": 8, "flags": 10, "what": 12, "data": 16, "user_data": 24}),
    ],
)
def test_a_structure_has_the_layout_of_the_headers(
    structure: Any, size: int, offsets: dict[str, int]
) -> None:
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in offsets} == offsets


class FakeLibc:
    """The functions, with C signatures. ``errors``: what a flavour of proc_pidinfo fails with."""

    def __init__(self, errors: dict[int, int] | None = None, *, pids: int = 3) -> None:
        self.errors = errors or {}
        self.pids = list(range(1, pids + 1))
        self.errno = 0
        self.asked: list[tuple[Any, ...]] = []
        self.events = [(7, NOTE_FORK), (8, NOTE_EXIT)]
        self.fails = False
        for name, arguments in macos.SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(getattr(self, f"_{name}")))
        declare(self)

    def _proc_listpids(self, which: int, whose: int, place: int | None, size: int) -> int:
        self.asked.append(("proc_listpids", which, whose, size))
        if place is None:
            return 4
        if self.fails:
            self.errno = errno.EPERM
            return 0
        fit = self.pids[: size // 4]
        ctypes.memmove(place, (ctypes.c_int * len(fit))(*fit), 4 * len(fit))
        return 4 * len(fit)

    def _proc_pidinfo(self, pid: int, flavor: int, argument: int, place: int, size: int) -> int:
        self.asked.append(("proc_pidinfo", pid, flavor, argument, size))
        if flavor in self.errors:
            self.errno = self.errors[flavor]
            return 0
        if flavor == macos.PROC_PIDT_SHORTBSDINFO:
            short = macos._ShortInfo.from_address(place)
            short.pid, short.parent, short.state = pid, 5, STOPPED
        if flavor in (macos.PROC_PIDTBSDINFO, macos.PROC_PIDT_BSDINFOWITHUNIQID):
            info = macos._Info.from_address(place)
            info.pid, info.parent, info.state, info.seconds, info.microseconds = pid, 4, RUNNING, 12, 34
        offset = {macos.PROC_PIDUNIQIDENTIFIERINFO: 0, macos.PROC_PIDT_BSDINFOWITHUNIQID: 136}.get(flavor)
        if offset is not None:
            ids = macos._Ids.from_address(place + offset)
            ids.own, ids.born_of = 1 << 40, 77
        return size

    def _kqueue(self) -> int:
        if self.fails:
            self.errno = errno.EMFILE
            return -1
        return os.dup(2)

    def _kevent(
        self, queue: int, wishes: int | None, wish: int, found: int | None, room: int, wait: int | None
    ) -> int:
        if self.fails:
            self.errno = errno.ESRCH
            return -1
        if wishes is not None:
            event = macos._Event.from_address(wishes)
            self.asked.append(("kevent", queue, event.about, event.filter, event.flags, event.what, wish))
            return 0
        assert wait is not None
        assert (macos._Time.from_address(wait).seconds, macos._Time.from_address(wait).nanoseconds) == (0, 0)
        now, self.events = self.events[:room], self.events[room:]
        for place, (about, what) in zip((macos._Event * room).from_address(found or 0), now, strict=False):
            place.about, place.what = about, what
        return len(now)


def darwin_over(libc: FakeLibc) -> Darwin:
    return Darwin(libc, lambda: libc.errno)


def test_one_call_tells_all_of_a_process() -> None:
    libc = FakeLibc()
    assert darwin_over(libc).process(9) == Process(9, 4, RUNNING, 12_000_034, 1 << 40, 77)
    assert libc.asked == [("proc_pidinfo", 9, 18, 1, 192)]


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ({18: errno.ESRCH}, None),
        ({18: errno.EPERM}, Process(9, 5, STOPPED, 0, 1 << 40, 77)),
        ({18: errno.EPERM, 17: errno.EINVAL}, Process(9, 5, STOPPED)),
        ({18: errno.EPERM, 13: errno.ESRCH}, None),
        ({18: errno.EINVAL}, Process(9, 4, RUNNING, 12_000_034)),
        ({18: errno.EINVAL, 3: errno.ESRCH}, None),
        ({18: 0, 3: 0}, None),
    ],
)
def test_what_is_not_told_is_asked_for_in_another_way(errors: dict[int, int], wanted: Process | None) -> None:
    assert darwin_over(FakeLibc(errors)).process(9) == wanted


@pytest.mark.parametrize("count", [0, 1, 64, 65, 66, 200, 5000])
def test_all_processes_are_listed_however_many_they_are(count: int) -> None:
    libc = FakeLibc(pids=count)
    if count == 0:
        assert darwin_over(libc).children(3) == []
        return
    assert [process.pid for process in darwin_over(libc).processes()] == libc.pids


def test_the_children_of_one_process_are_asked_for_by_its_pid() -> None:
    libc = FakeLibc()
    assert darwin_over(libc).children(3) == [1, 2, 3]
    assert {call[:3] for call in libc.asked} == {("proc_listpids", 6, 3)}


def test_a_list_that_is_refused_is_an_os_error() -> None:
    libc = FakeLibc()
    libc.fails = True
    with pytest.raises(PermissionError, match="proc_listpids"):
        list(darwin_over(libc).processes())


def test_a_queue_is_told_what_to_watch_and_gives_what_has_happened() -> None:
    libc = FakeLibc()
    darwin = darwin_over(libc)
    queue = darwin.queue()
    try:
        assert not os.get_inheritable(queue)
        darwin.tell(queue, 9, NOTE_FORK | NOTE_EXIT)
        assert libc.asked == [("kevent", queue, 9, -5, 1, 0xC000_0000, 1)]
        libc.events = [(number, NOTE_FORK) for number in range(150)]
        assert darwin.events(queue) == [(number, NOTE_FORK) for number in range(150)]
        assert darwin.events(queue) == []
    finally:
        darwin.close(queue)


def test_a_queue_that_fails_is_an_os_error_and_has_no_events() -> None:
    libc = FakeLibc()
    libc.fails = True
    darwin = darwin_over(libc)
    with pytest.raises(OSError, match="kqueue"):
        darwin.queue()
    with pytest.raises(ProcessLookupError, match="kevent"):
        darwin.tell(3, 9, NOTE_EXIT)
    assert darwin.events(3) == []


def test_the_session_of_what_is_gone_is_none() -> None:
    darwin = darwin_over(FakeLibc())
    assert darwin.session(os.getpid()) == os.getsid(0)
    assert darwin.session(2**22 + 1) == 0
    assert darwin.own_pid() == os.getpid()


MARKING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hermes_kernel.sidecar import SYSTEM as system
for name, value in (("MARK", "afterw"), ("MARK", "longer than that"), ("NONE", "x"), ("MARK", "after!")):
    try:
        system.mark_environment(name, value)
    except OSError as error:
        print(error)
print(open("/proc/self/environ").read().replace(chr(0), " "))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="where others read it on Linux")
@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_mark_is_written_where_others_read_it_if_it_has_the_right_size(system: str) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(macos.__file__)))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MARKING.replace("SYSTEM", system), root],
        env={"FIRST": "1", "MARK": "before", "LAST": "2"},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    longer, none, environ = done.stdout.splitlines()
    assert "MARK has no place of the right size" in longer
    assert "NONE has no place" in none
    assert environ.split() == ["FIRST=1", "MARK=after!", "LAST=2"]


def test_a_family_without_a_process_of_its_own_in_the_table_has_nobody() -> None:
    darwin = FakeDarwin()
    family = Family(darwin, 424242)
    table = family.look()
    assert [pid for pid, process in table.items() if family.parent_of(process, table) == 424242] == []
