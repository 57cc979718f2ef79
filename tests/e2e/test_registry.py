"""Many conversations in one registry: who shares a kernel, who loses one, and what each is told."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    KernelInfo,
    KernelRegistry,
    Limits,
    Loss,
    Owner,
)

from .. import traces
from .test_cells_basics import still_answers
from .test_cells_queue import HeldCell, attached

Make = Callable[..., BlockingRegistry]

PID = "import os; os.getpid()"
OK = CellStatus.OK


@contextmanager
def callers(registry: BlockingRegistry, count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that call; a test that fails ends their calls, which would hold it up."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            registry.close()
            raise


def hold(
    pool: ThreadPoolExecutor, registry: BlockingRegistry, owner: str | Owner, directory: Path
) -> tuple[HeldCell, Future[CellResult]]:
    """Begin a cell on the owner's kernel that runs until it is let go."""
    directory.mkdir(exist_ok=True)
    cell = HeldCell(directory)
    future = pool.submit(registry.execute, cell.code, owner=owner, timeout=60)
    cell.wait_until_it_runs()
    return cell, future


def pid_of(registry: BlockingRegistry, owner: str | Owner) -> int:
    result = registry.execute(PID, owner=owner)
    assert result.value is not None, result.text
    return int(result.value)


def gone(pid: int) -> bool:
    return traces.eventually(lambda: not psutil.pid_exists(pid), within=10)


def alive(registry: BlockingRegistry) -> set[Owner]:
    return {info.owner for info in registry.kernels()}


# -- persistence ------------------------------------------------------------------------------------------


def test_variables_and_imports_last_from_one_call_to_the_next(registry: BlockingRegistry) -> None:
    first = registry.execute("import math as m; x = 20; d = {'a': [1]}", owner="a")
    assert (first.status, first.kernel.reused, first.kernel.lost, first.execution_count) == (
        OK,
        False,
        None,
        1,
    )
    second = registry.execute("d['a'].append(x); d, m.floor(2.5)", owner="a")
    assert (second.value, second.kernel.reused, second.execution_count) == ("({'a': [1, 20]}, 2)", True, 2)
    assert second.kernel.kernel_id == first.kernel.kernel_id
    assert registry.execute("1/0", owner="a").status is CellStatus.ERROR
    third = registry.execute("x, m.pi > 3", owner="a")
    assert (third.value, third.kernel.lost, third.execution_count) == ("(20, True)", None, 4)


def test_the_turns_of_one_conversation_share_its_kernel_whatever_thread_they_come_from(
    registry: BlockingRegistry,
) -> None:
    for turn in range(3):
        with ThreadPoolExecutor(1) as pool:
            code = "turns = [*globals().get('turns', []), len(globals().get('turns', []))]; turns"
            result = pool.submit(registry.execute, code, owner=Owner("a") if turn else "a").result()
        assert result.value == str(list(range(turn + 1)))
    assert len(registry.kernels()) == 1


# -- who shares -------------------------------------------------------------------------------------------


def test_owners_that_differ_in_anything_share_nothing(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(max_kernels=8))
    owners = [
        Owner("a"),
        Owner("b"),
        Owner("a", child="1"),
        Owner("a", child="2"),
        Owner("a", scope="profile"),
        Owner("a", child="1", scope="profile"),
        Owner("a::child::1"),
    ]
    for n, owner in enumerate(owners):
        result = registry.execute(f"before = globals().get('mine'); mine = {n}; before", owner=owner)
        assert (result.value, result.kernel.reused, result.kernel.lost) == (None, False, None), owner
    assert [registry.execute("mine", owner=owner).value for owner in owners] == [
        str(n) for n in range(len(owners))
    ]
    assert len({pid_of(registry, owner) for owner in owners}) == len(owners)
    assert alive(registry) == set(owners)


@pytest.mark.parametrize("owner", ["", "  ", None, 3])
def test_a_caller_without_a_name_shares_with_nobody(registry: BlockingRegistry, owner: object) -> None:
    with pytest.raises(ConfigError, match="owner"):
        registry.execute("1", owner=owner)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="owner"):
        registry.execute("1")
    assert registry.kernels() == ()


def test_interpreter_directory_and_variant_are_part_of_which_kernel_it_is(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    registry.execute("x = 1", owner="a")
    assert registry.execute("'x' in globals()", owner="a", cwd=tmp_path).value == "False"
    assert registry.execute("'x' in globals()", owner="a", variant=("v",)).value == "False"
    assert registry.execute("x", owner="a").value == "1"
    assert registry.close_owner("a") == 3
    assert registry.kernels() == ()


# -- what is lost is told ---------------------------------------------------------------------------------


def _die(registry: BlockingRegistry) -> None:
    assert registry.execute("import os; os._exit(3)", owner="a").kernel.ended


def _killed_from_outside(registry: BlockingRegistry) -> None:
    os.kill(pid_of(registry, "a"), 9)
    assert traces.eventually(lambda: not registry.kernels())


def _time_out(registry: BlockingRegistry) -> None:
    result = registry.execute("import time; time.sleep(60)", owner="a", timeout=0.2)
    assert (result.status, result.kernel.ended) == (CellStatus.TIMED_OUT, True)
    assert "state was lost" in result.to_dict()["error"]
    assert registry.kernels() == ()


def _interrupt(registry: BlockingRegistry) -> None:
    running = threading.Event()

    def interrupted() -> bool:
        if any(info.execution_count and info.state.value == "busy" for info in registry.kernels()):
            running.set()
        return running.is_set()

    registry.execute("0", owner="a")
    result = registry.execute("import time; time.sleep(60)", owner="a", interrupted=interrupted)
    assert (result.status, result.ran, result.kernel.ended) == (CellStatus.INTERRUPTED, True, True)


def _exit(registry: BlockingRegistry) -> None:
    result = registry.execute("import sys; sys.exit(3)", owner="a")
    assert (result.status, result.kernel.ended) == (CellStatus.EXITED, True)
    assert registry.kernels() == ()


def _close(registry: BlockingRegistry) -> None:
    assert registry.close_owner("a") == 1
    assert registry.close_owner("a") == 0


def _evict(registry: BlockingRegistry) -> None:
    for owner in ("b", "c"):
        registry.execute("1", owner=owner)
    assert Owner("a") not in alive(registry) or traces.eventually(lambda: Owner("a") not in alive(registry))


def _idle(registry: BlockingRegistry) -> None:
    assert traces.eventually(lambda: not registry.kernels())


LOSSES: dict[str, tuple[Callable[[BlockingRegistry], None], Loss, Limits]] = {
    "died": (_die, Loss.DIED, Limits()),
    "killed": (_killed_from_outside, Loss.DIED, Limits()),
    "timed out": (_time_out, Loss.TIMED_OUT, Limits()),
    "interrupted": (_interrupt, Loss.INTERRUPTED, Limits()),
    "exited": (_exit, Loss.EXITED, Limits()),
    "closed": (_close, Loss.CLOSED, Limits()),
    "evicted": (_evict, Loss.EVICTED, Limits(max_kernels=2)),
    "idle": (_idle, Loss.IDLE, Limits(idle_timeout=1.5)),
}


@pytest.mark.parametrize(("lose", "loss", "limits"), LOSSES.values(), ids=LOSSES)
def test_a_loss_is_told_with_its_reason_on_the_next_call_and_on_no_other(
    make_registry: Make, lose: Callable[[BlockingRegistry], None], loss: Loss, limits: Limits
) -> None:
    registry = make_registry(limits=limits)
    first = registry.execute("x = 1", owner="a")
    assert first.kernel.lost is None
    lose(registry)
    other = registry.execute("1", owner="other")
    assert other.kernel.lost is None, "only the owner lost something"
    told = registry.execute("'x' in globals()", owner="a")
    assert (told.value, told.kernel.lost, told.kernel.reused) == ("False", loss, False)
    assert told.kernel.kernel_id != first.kernel.kernel_id
    report = told.to_dict()["kernel"]
    assert (report["state_lost"], report["lost_reason"]) == (True, loss.value)
    assert report["state_reset"] is (loss is Loss.DIED)
    again = registry.execute("1", owner="a")
    assert (again.kernel.lost, again.kernel.reused) == (None, True)
    assert "state_lost" not in again.to_dict()["kernel"]


def test_a_reset_is_told_on_the_very_call_and_only_if_there_was_something_to_reset(
    registry: BlockingRegistry,
) -> None:
    nothing = registry.execute("x = 1", owner="a", reset=True)
    assert (nothing.status, nothing.kernel.lost, nothing.kernel.reused) == (OK, None, False)
    assert nothing.to_dict()["kernel"]["state_reset"] is False
    old = pid_of(registry, "a")
    reset = registry.execute("x", owner="a", reset=True)
    assert reset.status is CellStatus.ERROR
    assert reset.error is not None
    assert reset.error.ename == "NameError"
    assert (reset.kernel.lost, reset.kernel.reused, reset.execution_count) == (Loss.RESET, False, 1)
    assert reset.to_dict()["kernel"]["state_reset"] is True
    assert gone(old)
    after = still_answers(registry)
    assert (after.kernel.lost, after.kernel.reused) == (None, True)
    assert after.to_dict()["kernel"]["state_reset"] is False


def test_a_reset_of_what_was_lost_before_says_the_earlier_reason(registry: BlockingRegistry) -> None:
    registry.execute("import os; os._exit(1)", owner="a")
    assert registry.execute("1", owner="a", reset=True).kernel.lost is Loss.DIED
    assert registry.execute("1", owner="a").kernel.lost is None


def test_a_changed_directory_or_interpreter_is_told_once(registry: BlockingRegistry, tmp_path: Path) -> None:
    python = tmp_path / "another-python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    where = tmp_path / "project"
    where.mkdir()
    assert registry.execute("x = 1", owner="a").kernel.lost is None
    moved = registry.execute("import os; print(os.getcwd()); 'x' in globals()", owner="a", cwd=where)
    assert (moved.stdout, moved.value) == (f"{where}\n", "False")
    assert moved.kernel.lost is Loss.CWD_CHANGED
    assert moved.to_dict()["kernel"]["lost_reason"] == "cwd_changed"
    assert registry.execute("1", owner="a", cwd=where).kernel.lost is None
    other = registry.execute("'x' in globals()", owner="a", cwd=where, python=python)
    assert (other.value, other.kernel.lost) == ("False", Loss.PYTHON_CHANGED)
    assert registry.execute("1", owner="a", cwd=where, python=python).kernel.lost is None
    assert registry.execute("1", owner="b", cwd=where).kernel.lost is None


# -- reset while a cell runs ------------------------------------------------------------------------------


def test_a_reset_while_a_cell_runs_starts_at_once_and_lets_the_cell_finish_on_the_old_kernel(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    old = pid_of(registry, "a")
    registry.execute("x = 'old'", owner="a")
    with callers(registry, 2) as pool:
        cell, running = hold(pool, registry, "a", tmp_path / "held")
        behind = pool.submit(registry.execute, "x, os.getpid()", owner="a", timeout=60)
        assert attached(registry, 2)
        new = registry.execute("import os; ('x' in globals(), os.getpid())", owner="a", reset=True)
        assert (new.status, new.kernel.lost, new.kernel.reused) == (OK, Loss.RESET, False)
        assert new.value is not None
        assert new.value.startswith("(False, ")
        assert str(old) not in new.value
        assert not running.done()
        assert psutil.pid_exists(old)
        states = {info.pid: info.state.value for info in registry.kernels()}
        assert states.pop(old) == "closing"
        assert [*states.values()] == ["idle"]
        cell.let_go()
        assert (running.result(10).status, running.result().value) == (OK, "'finished'")
        assert running.result().kernel.ended is False
        # The call that waited on the old kernel runs there or is told: it never meets a silent loss.
        waited = behind.result(20)
        assert waited.status is OK or waited.kernel.lost is not None, waited
    assert gone(old)
    after = registry.execute("'x' in globals()", owner="a")
    assert (after.value, after.kernel.lost, after.kernel.reused) == ("False", None, True)
    assert traces.eventually(lambda: len(registry.kernels()) == 1)


def test_resets_from_many_threads_at_once_leave_one_kernel(registry: BlockingRegistry) -> None:
    registry.execute("x = 1", owner="a")
    with callers(registry, 5) as pool:
        calls = [pool.submit(registry.execute, PID, owner="a", reset=True, timeout=60) for _ in range(5)]
        results = [call.result() for call in calls]
    assert {result.status for result in results} == {OK}
    assert {result.kernel.reused for result in results} == {False}
    assert traces.eventually(lambda: len(registry.kernels()) == 1)
    last = still_answers(registry)
    assert last.kernel.kernel_id in {result.kernel.kernel_id for result in results}


# -- first cells in parallel ------------------------------------------------------------------------------


def test_racers_on_the_first_start_share_one_process_and_none_found_a_kernel(
    make_registry: Make, runtime: Path, tmp_path: Path
) -> None:
    entered, go = tmp_path / "entered", tmp_path / "go"
    os.mkfifo(entered)
    os.mkfifo(go)
    registry = make_registry(bootstrap=f"open({str(entered)!r}, 'w').close(); open({str(go)!r}).close()")
    code = "import os; x = globals().get('x', 0) + 1; os.getpid()"
    with callers(registry, 6) as pool:
        calls = [pool.submit(registry.execute, code, owner="a", timeout=60) for _ in range(6)]
        entered.open().close()
        assert attached(registry, 6)
        (info,) = registry.kernels()
        assert (info.execution_count, info.attached) == (0, 6)
        assert len({p.pid for p in traces.marked_processes(str(runtime)) if p.ppid() == os.getpid()}) == 1
        go.open("w").close()
        results = [call.result() for call in calls]
    assert {result.status for result in results} == {OK}
    assert len({result.value for result in results}) == 1
    assert [result.kernel.reused for result in results] == [False] * 6
    last = registry.execute("x", owner="a")
    assert (last.value, last.kernel.reused) == ("6", True)
    assert registry.stats()["started"] == 1


def test_a_kernel_whose_bootstrap_code_runs_is_still_starting(make_registry: Make, tmp_path: Path) -> None:
    entered, go = tmp_path / "entered", tmp_path / "go"
    os.mkfifo(entered)
    os.mkfifo(go)
    registry = make_registry(bootstrap=f"open({str(entered)!r}, 'w').close(); open({str(go)!r}).close()")
    with callers(registry, 1) as pool:
        call = pool.submit(registry.execute, "1", owner="a")
        entered.open().close()
        (info,) = registry.kernels()
        assert info.state.value == "starting"
        go.open("w").close()
        assert call.result(20).status is OK


def test_many_owners_start_together_and_all_come_up(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(max_kernels=24, start_timeout=90))
    start = threading.Barrier(24)

    def converse(n: int) -> tuple[CellStatus, str | None, str | None]:
        start.wait()
        first = registry.execute(f"x = {n}", owner=f"owner {n}", timeout=60)
        return first.status, *(registry.execute(c, owner=f"owner {n}").value for c in ("x", PID))

    with callers(registry, 24) as pool:
        results = list(pool.map(converse, range(24)))
    assert [(status, x) for status, x, _ in results] == [(OK, str(n)) for n in range(24)]
    assert len({pid for *_, pid in results}) == 24
    infos = registry.kernels()
    assert len({info.connection_file for info in infos}) == len({info.pid for info in infos}) == 24


# -- children ---------------------------------------------------------------------------------------------


def test_a_finished_child_gives_back_its_kernels_and_its_siblings_keep_theirs(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(max_kernels=8))
    parent, one, two = Owner("a"), Owner("a", child="1"), Owner("a", child="2")
    pids = {owner: pid_of(registry, owner) for owner in (parent, one, two)}
    assert registry.close_child("") == 0
    assert registry.close_child("no such") == 0
    assert registry.close_child("1") == 1
    assert gone(pids[one])
    assert {pid_of(registry, parent), pid_of(registry, two)} == {pids[parent], pids[two]}
    assert alive(registry) == {parent, two}
    assert registry.close_child("1") == 0


def test_a_cleared_session_gives_back_its_own_kernel_and_its_childrens_if_told_so(
    make_registry: Make,
) -> None:
    registry = make_registry(limits=Limits(max_kernels=8))
    parent, child, cousin = Owner("a"), Owner("a", child="1"), Owner("b", child="1")
    scoped = Owner("a", scope="profile")
    pids = {owner: pid_of(registry, owner) for owner in (parent, child, cousin, scoped)}
    assert registry.close_owner("a") == 1
    assert gone(pids[parent])
    assert alive(registry) == {child, cousin, scoped}
    registry.execute("1", owner="a")
    assert registry.close_owner("a", children=True) == 2
    assert gone(pids[child])
    assert alive(registry) == {cousin, scoped}
    assert pid_of(registry, scoped) == pids[scoped]
    assert registry.close_owner(cousin) == 1
    assert registry.close_owner("never seen") == 0


def test_kernels_are_closed_by_any_property_that_they_have(registry: BlockingRegistry) -> None:
    for owner in ("a", "b", "c"):
        registry.execute("1", owner=owner)
    seen: list[KernelInfo] = []

    def picks(info: KernelInfo) -> bool:
        seen.append(info)
        return info.owner.session in "ab"

    assert registry.close_where(picks) == 2
    assert {info.owner.session for info in seen} == {"a", "b", "c"}
    assert alive(registry) == {Owner("c")}


def test_a_predicate_that_fails_closes_nothing_and_is_told(registry: BlockingRegistry) -> None:
    registry.execute("x = 1", owner="a")
    with pytest.raises(ZeroDivisionError):
        registry.close_where(lambda info: 1 // 0 == 0)
    assert registry.execute("x", owner="a").value == "1"


# -- cap, pins, idleness ----------------------------------------------------------------------------------


def test_the_kernel_that_was_used_longest_ago_goes_and_is_really_dead(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(max_kernels=2))
    a, b = pid_of(registry, "a"), pid_of(registry, "b")
    registry.execute("touched = 1", owner="a")
    c = pid_of(registry, "c")
    assert gone(b)
    assert traces.eventually(lambda: alive(registry) == {Owner("a"), Owner("c")})
    assert pid_of(registry, "a") == a
    pid_of(registry, "d")
    assert gone(c)
    assert registry.execute("touched", owner="a").value == "1"


def test_a_running_kernel_is_not_evicted_and_the_cap_holds_again_when_it_is_free(
    make_registry: Make, tmp_path: Path
) -> None:
    registry = make_registry(limits=Limits(max_kernels=4))
    with callers(registry, 1) as pool:
        cell, running = hold(pool, registry, "0", tmp_path / "held")
        pids = {n: pid_of(registry, n) for n in "1234"}
        assert gone(pids["1"]), "the one that was used longest ago and is free"
        assert not running.done()
        assert traces.eventually(lambda: alive(registry) == {Owner(n) for n in "0234"})
        cell.let_go()
        assert running.result(10).value == "'finished'"
    assert registry.execute("kept", owner="0").value == "1"
    assert len(registry.kernels()) == 4


def test_a_cap_that_was_exceeded_by_running_cells_holds_again_as_they_end(
    make_registry: Make, tmp_path: Path
) -> None:
    registry = make_registry(limits=Limits(max_kernels=1))
    with callers(registry, 3) as pool:
        held = [hold(pool, registry, n, tmp_path / n) for n in "abc"]
        assert len(registry.kernels()) == 3
        for cell, running in held:
            cell.let_go()
            assert (running.result(10).status, running.result().kernel.ended) == (OK, False)
    assert traces.eventually(lambda: len(registry.kernels()) == 1)
    assert alive(registry) == {Owner("c")}
    assert registry.execute("kept", owner="c").value == "1"
    assert registry.execute("1", owner="a").kernel.lost is Loss.EVICTED


def test_pinned_kernels_of_children_survive_cap_and_idleness_and_go_with_their_child(
    make_registry: Make,
) -> None:
    registry = make_registry(limits=Limits(max_kernels=1, idle_timeout=1.0))
    children = [Owner("a", child=str(n)) for n in range(3)]
    for n, child in enumerate(children):
        registry.execute(f"x = {n}", owner=child, pinned=True)
    registry.execute("1", owner="b")
    registry.execute("1", owner="c")
    assert traces.eventually(lambda: alive(registry) == set(children)), "what is not pinned is idle and goes"
    for n, child in enumerate(children):
        result = registry.execute("x", owner=child)
        assert (result.value, result.kernel.lost) == (str(n), None)
    assert all(info.pinned for info in registry.kernels())
    assert [registry.close_child(str(n)) for n in range(3)] == [1, 1, 1]
    assert registry.kernels() == ()


IDLE = Limits(idle_timeout=2.0)


def _assert_gone_in_time(pid: int, since: float) -> None:
    """Gone within a second after idle_timeout, and not before."""
    process = psutil.Process(pid)
    with pytest.raises(psutil.TimeoutExpired):
        process.wait(timeout=max(since + 1.5 - time.monotonic(), 0.01))
    process.wait(timeout=max(since + 3.0 - time.monotonic(), 0.01))


def test_an_idle_kernel_goes_within_a_second_without_any_traffic(make_registry: Make) -> None:
    registry = make_registry(limits=IDLE)
    pid = pid_of(registry, "a")
    _assert_gone_in_time(pid, time.monotonic())
    assert traces.eventually(lambda: not registry.kernels())


def test_use_puts_off_the_end_of_an_idle_kernel_and_a_cell_that_runs_is_use(
    make_registry: Make, tmp_path: Path
) -> None:
    registry = make_registry(limits=Limits(idle_timeout=0.5))
    with callers(registry, 1) as pool:
        cell, running = hold(pool, registry, "a", tmp_path / "held")
        other = pid_of(registry, "b")
        assert gone(other), "meanwhile the time of a free kernel is over"
        cell.let_go()
        assert running.result(10).kernel.ended is False
        assert registry.execute("kept", owner="a").value == "1"


@pytest.mark.parametrize("block", ["primitive", "busy"])
def test_an_idle_kernel_goes_while_the_users_own_loop_stands_still(leaves_nothing: None, block: str) -> None:
    async def conversation() -> None:
        async with KernelRegistry(limits=IDLE) as registry:
            value = (await registry.execute(PID, owner="a")).value
            assert value is not None
            since, process = time.monotonic(), psutil.Process(int(value))
            if block == "primitive":
                over = threading.Event()
                watcher = threading.Thread(target=lambda: (process.wait(10), over.set()))
                watcher.start()
                over.wait(10)  # the loop's own thread
                watcher.join()
            else:
                while process.is_running() and time.monotonic() < since + 10:
                    await asyncio.sleep(0)
            assert 1.5 < time.monotonic() - since < 3.5
            assert (await registry.execute("1", owner="a")).kernel.lost is Loss.IDLE

    asyncio.run(conversation())


# -- what the registry says of itself ---------------------------------------------------------------------


def test_the_state_of_each_kernel_is_told_from_start_to_end(make_registry: Make, tmp_path: Path) -> None:
    entered, go = tmp_path / "entered", tmp_path / "go"
    os.mkfifo(entered)
    os.mkfifo(go)
    registry = make_registry(bootstrap=f"open({str(entered)!r}, 'w').close(); open({str(go)!r}).close()")
    began = time.time()
    held = tmp_path / "held"
    held.mkdir()
    cell = HeldCell(held)
    with callers(registry, 1) as pool:
        running = pool.submit(registry.execute, cell.code, owner=Owner("a", child="1"), pinned=True)
        entered.open().close()
        (starting,) = registry.kernels()
        assert (starting.attached, starting.pinned, starting.execution_count) == (1, True, 0)
        assert starting.owner == Owner("a", child="1")
        go.open("w").close()
        cell.wait_until_it_runs()
        (busy,) = registry.kernels()
        assert (busy.state.value, busy.kernel_id, busy.node) == ("busy", starting.kernel_id, "local")
        assert busy.pid is not None
        assert psutil.pid_exists(busy.pid)
        assert busy.connection_file is not None
        assert Path(busy.connection_file).exists()
        cell.let_go()
        running.result(10)
    assert traces.eventually(lambda: registry.kernels()[0].attached == 0)
    (idle,) = registry.kernels()
    assert (idle.state.value, idle.execution_count, idle.pid) == ("idle", 1, busy.pid)
    assert began - 1 <= idle.started <= idle.last_used <= time.time() + 1
    assert (idle.python, idle.cwd, idle.isolation) == (sys.executable, None, "none")
    manager = registry.manager(Owner("a", child="1"))
    assert manager is not None
    assert registry.manager("a") is None


def test_the_counts_of_a_registry_add_up(make_registry: Make) -> None:
    registry = make_registry(limits=Limits(max_kernels=2))
    assert registry.stats()["started"] == 0
    for owner in ("a", "a", "b", "c"):
        registry.execute("1", owner=owner)
    registry.execute("1/0", owner="c")
    registry.execute("1", owner="c", reset=True)
    registry.execute("1", owner="c", interrupted=lambda: True)
    registry.execute("import sys; sys.exit()", owner="c")
    registry.close_owner("b")
    assert traces.eventually(lambda: registry.stats()["kernels"] == 0)
    stats = registry.stats()
    counts = {key: value for key, value in stats.items() if value and key != "spares"}
    assert counts == {
        "started": 4,
        "reused": 3,
        "lost_evicted": 1,
        "lost_reset": 1,
        "lost_exited": 1,
        "lost_closed": 1,
        "cells_ok": 5,
        "cells_error": 1,
        "cells_exited": 1,
        "calls_not_run": 1,
    }
    assert {f"lost_{loss.value}" for loss in Loss} <= stats.keys()


def test_forty_registries_in_a_row_leave_the_hosts_descriptors_as_they_were(leaves_nothing: None) -> None:
    with BlockingRegistry() as registry:
        registry.execute("1", owner="a")
    assert traces.eventually(lambda: "hermes-kernel-registry" not in traces.threads())
    before = traces.descriptors()
    for _ in range(10):
        with BlockingRegistry() as registry:
            assert registry.execute("6 * 7", owner="a").value == "42"
    with BlockingRegistry() as registry:
        for _ in range(30):
            assert registry.execute("6 * 7", owner="a").value == "42"
            assert registry.close_owner("a") == 1
    assert traces.eventually(lambda: traces.descriptors() <= before)
