"""The backend of hermes-agent's execute_code, with a plain agent: what its own tests ask, and more.

Which variables Windows cannot do without, and what its encodings would do to a kernel's text, are questions
to pure functions: ``tests/process/test_environment.py`` asks them on any system.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_kernel import Limits, Owner
from hermes_kernel.integrations import hermes_agent
from hermes_kernel.integrations.hermes_agent import (
    ChildPython,
    Host,
    child_cwd,
    child_python,
    execution_mode,
    handle_execute_code,
    session_kernels,
    shutdown_all_kernels,
    shutdown_kernels_for_delegated_child,
    shutdown_kernels_for_owner,
    use,
)

from .. import traces
from ..e2e.test_json_contract import read
from ..e2e.test_registry_faults import HeldStart
from .agent import PROMPT, SESSION, STUBS, TOOLS, Agent, execute, execute_text, in_session, owners, session

Make = Callable[..., Agent]
SECRET = "sk-hold0123456789abcdefghij"


@pytest.fixture
def make(leaves_nothing: None) -> Iterator[Make]:
    """Have an agent's kernels behind the functions; after the test nothing of them is left."""

    def make(**services: Any) -> Agent:
        agent = Agent()
        if isinstance(services.get("limits"), Limits):
            agent.limits = services.pop("limits")
        use(agent.host(**services))
        return agent

    yield make
    use(None)


@pytest.fixture
def agent(make: Make) -> Agent:
    return make()


def pid_of(name: str, child: str | None = None) -> int:
    return int(in_session(name, "import os; print(os.getpid())", child)["output"])


def is_dead(pid: int) -> bool:
    return bool(traces.eventually(lambda: not psutil.pid_exists(pid), within=10))


def has(name: str, variable: str, child: str | None = None) -> bool:
    return in_session(name, f"print({variable!r} in globals())", child)["output"] == "True\n"


def beside(*functions: Callable[[], Any]) -> list[Any]:
    """Call the functions side by side and return what they return."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(function) for function in functions]]


# -- persistence, and how it ends -------------------------------------------------------------------------


def test_state_and_imports_persist_across_cells_and_an_exception_costs_nothing(agent: Agent) -> None:
    first = execute("import math as m\nx = 41")
    second = execute("x += 1; print(x, m.floor(2.5))")
    assert (first["kernel"]["reused"], second["kernel"]["reused"]) == (False, True)
    assert (second["output"], second["kernel"]["execution_count"]) == ("42 2\n", 2)
    failed = execute("x += 1\n1/0")
    assert (failed["status"], failed["exit_code"], failed["kernel"]["reused"]) == ("error", 1, True)
    assert "ZeroDivisionError" in failed["error"]
    assert "--- stderr ---" in failed["output"]
    assert execute("print(x)")["output"] == "43\n"


def test_a_reset_discards_the_state(agent: Agent) -> None:
    execute("x = 1")
    fresh = execute("print(x)", reset=True)
    assert (fresh["status"], fresh["kernel"]["state_reset"], fresh["kernel"]["reused"]) == (
        "error",
        True,
        False,
    )
    assert "NameError" in fresh["error"]


def test_a_timeout_kills_the_kernel_and_says_that_the_state_is_lost(agent: Agent) -> None:
    execute("x = 1")
    pid = pid_of("task")
    result = execute("print('partial', flush=True)\nimport time; time.sleep(30)", timeout=0.5)
    assert (result["status"], result["exit_code"], result["kernel"]["ended"]) == ("timeout", -1, True)
    assert "state was lost" in result["error"]
    assert result["output"] == f"partial\n⏰ {result['error']}"
    assert session_kernels() == ()
    assert is_dead(pid)
    after = execute("print('x' in globals())")
    assert (after["output"], after["kernel"]["reused"], after["kernel"]["lost_reason"]) == (
        "False\n",
        False,
        "timed_out",
    )


def test_with_a_grace_a_timeout_interrupts_in_place_and_says_that_the_state_is_kept(make: Make) -> None:
    make(limits=Limits(interrupt_grace=10))
    execute("x = 1")
    result = execute("print('partial', flush=True)\nimport time; time.sleep(30)", timeout=0.5)
    assert (result["status"], result["exit_code"], result["kernel"].get("ended")) == ("timeout", -1, None)
    assert "state kept" in result["error"]
    assert "state was lost" not in result["error"]
    assert result["output"] == f"partial\n⏰ {result['error']}"
    after = execute("print(x)")
    assert (after["output"], after["kernel"]["reused"]) == ("1\n", True)


def test_a_cell_that_does_not_end_within_its_grace_costs_the_state_and_says_so(make: Make) -> None:
    make(limits=Limits(interrupt_grace=0.2))
    execute("x = 1")
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    result = execute(deaf, timeout=0.5)
    assert (result["status"], result["kernel"]["ended"]) == ("timeout", True)
    assert "state was lost" in result["error"]
    assert execute("print('x' in globals())")["kernel"]["lost_reason"] == "timed_out"


@pytest.mark.parametrize(
    ("argument", "code", "status"), [("", 0, "success"), ("3", 3, "error"), ("'fatal: boom'", 1, "error")]
)
def test_sys_exit_ends_the_kernel_with_its_code(agent: Agent, argument: str, code: int, status: str) -> None:
    execute("x = 1")
    ended = execute(f"print('bye')\nimport sys; sys.exit({argument})")
    assert (ended["kernel"]["ended"], ended["exit_code"], ended["status"]) == (True, code, status)
    assert ended["output"].startswith("bye\n")
    assert session_kernels() == ()
    after = execute("print('x' in globals())")
    assert (after["output"], after["kernel"]["reused"]) == ("False\n", False)


def test_the_output_of_a_grandchild_reaches_the_result(agent: Agent) -> None:
    inner = "import subprocess; subprocess.run(['echo', 'from the grandchild'])"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}])\nprint('then')"
    assert execute(code)["output"] == "from the grandchild\nthen\n"


def test_a_kernel_that_dies_is_told_at_once_with_its_code_and_without_secrets(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    make()
    code = f"import os, subprocess\nsubprocess.Popen(['sleep', '60'])\nos.write(2, b'{SECRET}'); os._exit(3)"
    began = time.monotonic()
    died = execute(code, timeout=30)
    assert time.monotonic() - began < 10
    assert (died["status"], died["exit_code"]) == ("error", 3)
    assert "state was lost" in died["error"]
    assert SECRET not in json.dumps(died)
    assert execute("print(1)")["kernel"]["state_reset"]


def test_the_backends_death_ends_a_kernel_mid_cell_with_its_children(tmp_path: Path) -> None:
    program = Path(__file__).with_name("doomed_agent.py")
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "HERMES_RPC_TOKEN": "x"}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        doomed = [psutil.Process(pid) for pid in told["pids"]]
        process.kill()
        assert traces.eventually(lambda: all(map(traces.is_gone, doomed)), within=10)
    watchdogs = ("PARENT", "SENTINEL", "HERMES_RPC", "SPILL")
    assert [name for name in told["variables"] if any(word in name for word in watchdogs)] == []
    assert traces.eventually(lambda: traces.kernels_of(runtime) == [])


def test_a_process_that_ends_takes_its_kernels_along_and_says_nothing(tmp_path: Path) -> None:
    program = Path(__file__).with_name("doomed_agent.py")
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    ended = subprocess.run(
        [sys.executable, program, "ends"], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    pids = json.loads(ended.stdout)["pids"]
    assert ended.stderr == ""
    assert traces.eventually(lambda: not any(map(psutil.pid_exists, pids)))
    assert traces.eventually(lambda: traces.kernels_of(runtime) == [])


# -- whose kernel it is -----------------------------------------------------------------------------------


def test_state_survives_the_turns_of_one_conversation_and_is_no_other_sessions(agent: Agent) -> None:
    in_session("one", "x = 1", task_id="turn-1")
    assert in_session("one", "print(x)", task_id="turn-2")["output"] == "1\n"
    assert not in_session("two", "print('x' in globals())", task_id="turn-1")["kernel"]["reused"]
    assert not has("two", "x")


def test_delegated_children_share_no_state_with_their_parent_or_each_other(agent: Agent) -> None:
    in_session("one", "x = 'parent'")
    in_session("one", "y = 'c1'", child="c1")
    in_session("one", "z = 'c2'", child="c2")
    assert [has("one", name, "c1") for name in "xyz"] == [False, True, False]
    assert [has("one", name, "c2") for name in "xyz"] == [False, False, True]
    assert [has("one", name) for name in "xyz"] == [True, False, False]


def test_live_children_keep_their_kernels_past_the_cap(make: Make) -> None:
    make(limits=Limits(max_kernels=2))
    children = [f"c{n}" for n in range(5)]
    for child in children:
        in_session("one", f"mine = {child!r}", child)
    told = [in_session("one", "print(mine)", child) for child in children]
    assert [result["output"].strip() for result in told] == children
    assert all(result["kernel"]["reused"] for result in told)
    assert all(info.pinned for info in session_kernels())


def test_a_finished_child_releases_its_kernels_and_its_siblings_stay(agent: Agent) -> None:
    pid = pid_of("one", "c1")
    in_session("one", "x = 2", "c2")
    in_session("one", "x = 0")
    shutdown_kernels_for_delegated_child("")
    assert owners() == {("one", "c1"), ("one", "c2"), ("one", None)}
    shutdown_kernels_for_delegated_child("c1")
    assert owners() == {("one", "c2"), ("one", None)}
    assert is_dead(pid)
    assert in_session("one", "print(x)", "c2")["output"] == "2\n"


def test_a_session_that_is_cleared_disposes_its_own_kernels(agent: Agent) -> None:
    in_session("one", "x = 1", mode="project")
    pid = pid_of("one")
    in_session("one", "x = 1", "c1")
    in_session("two", "x = 2")
    shutdown_kernels_for_owner("")
    shutdown_kernels_for_owner("nobody")
    assert len(session_kernels()) == 4
    shutdown_kernels_for_owner("one")
    assert owners() == {("one", "c1"), ("two", None)}
    assert is_dead(pid)
    after = in_session("one", "print('x' in globals())")
    assert (after["output"], after["kernel"]["lost_reason"]) == ("False\n", "closed")
    assert in_session("two", "print(x)")["output"] == "2\n"


def test_one_name_in_two_profiles_is_two_owners_and_ends_in_its_own(agent: Agent) -> None:
    for profile in ("p1", "p2"):
        with session("one", profile=profile):
            execute(f"x = {profile!r}")
        with session("one", child="c", profile=profile):
            execute(f"x = {profile!r}")
    with session("one", profile="p1"):
        shutdown_kernels_for_owner("one")
        shutdown_kernels_for_delegated_child("c")
    assert {(info.owner.scope, info.owner.child) for info in session_kernels()} == {("p2", None), ("p2", "c")}
    with session("one", profile="p2"):
        assert execute("print(x)")["output"] == "p2\n"


def test_live_kernels_are_capped_and_the_one_used_longest_ago_goes(make: Make) -> None:
    make(limits=Limits(max_kernels=2))
    pids = {name: pid_of(name) for name in "abcd"}
    assert traces.eventually(lambda: owners() == {("c", None), ("d", None)})
    assert is_dead(pids["a"])
    assert is_dead(pids["b"])
    again = in_session("a", "print(1)")
    assert (again["kernel"]["reused"], again["kernel"]["lost_reason"]) == (False, "evicted")


def test_parallel_first_cells_of_one_owner_share_one_process(agent: Agent) -> None:
    def cell() -> dict[str, Any]:
        return in_session("one", "import os; print(os.getpid())")

    results = beside(*[cell] * 6)
    assert {result["status"] for result in results} == {"success"}
    assert len({result["output"] for result in results}) == 1
    assert len(session_kernels()) == 1
    assert sorted(result["kernel"]["execution_count"] for result in results) == [1, 2, 3, 4, 5, 6]


def test_a_call_without_session_and_task_is_refused(make: Make) -> None:
    make(resolve_owner=Host().resolve_owner)
    result = read(execute_text("1", task_id=""))
    assert "session key" in result["error"]
    assert session_kernels() == ()
    assert execute("print(1)", task_id="t")["output"] == "1\n"


def test_an_owner_that_cannot_be_resolved_is_the_task(make: Make) -> None:
    def broken(task_id: str) -> Owner:
        raise RuntimeError("no session module")

    make(resolve_owner=broken)
    assert execute("print(1)", task_id="t9")["output"] == "1\n"
    assert owners() == {("t9", None)}


# -- what the key holds -----------------------------------------------------------------------------------


def test_another_tool_set_or_mode_is_another_kernel_and_the_model_is_told(
    agent: Agent, tmp_path: Path
) -> None:
    execute("x = 1", sandbox_tools={"echo"})
    other = execute("print('x' in globals())", sandbox_tools={"echo", "read_file"})
    assert (other["output"], other["kernel"]["lost_reason"]) == ("False\n", "variant_changed")
    assert execute("print(x)", sandbox_tools=frozenset({"echo"}))["output"] == "1\n"
    moved = execute(
        "print('x' in globals())", sandbox_tools={"echo"}, mode="project", child_cwd=str(tmp_path)
    )
    assert (moved["output"], moved["kernel"]["lost_reason"]) == ("False\n", "cwd_changed")
    assert len(session_kernels()) == 3


def test_a_directory_that_is_gone_is_an_error_and_leaves_nothing(agent: Agent, tmp_path: Path) -> None:
    result = execute("1", mode="project", child_cwd=str(tmp_path / "gone"))
    assert result["status"] == "error"
    assert str(tmp_path / "gone") in result["error"]
    assert session_kernels() == ()


# -- idleness and what is left ----------------------------------------------------------------------------


def test_idle_kernels_are_reaped_without_another_call_and_attached_ones_are_not(make: Make) -> None:
    agent = make(limits=Limits(idle_timeout=1))
    in_session("one", "x = 1")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(in_session, "busy", "import hermes_tools; print(hermes_tools.gate())")
        assert agent.reached.acquire(timeout=20)
        pid = next(info.pid for info in session_kernels() if info.owner.session == "one")
        assert pid is not None
        assert is_dead(pid)
        assert traces.eventually(lambda: owners() == {("busy", None)})
        agent.opened.release()
        assert call.result(20)["status"] == "success"
    told = in_session("one", "print('x' in globals())")
    assert (told["output"], told["kernel"]["lost_reason"]) == ("False\n", "idle")


def test_an_idle_kernel_that_was_used_just_now_is_spared_while_another_is_reaped(make: Make) -> None:
    make(limits=Limits(idle_timeout=2))
    in_session("fresh", "n = 0")
    pid = pid_of("stale")
    while ("stale", None) in owners():
        kept = in_session("fresh", "n += 1")
        assert kept["kernel"]["reused"], kept
    assert is_dead(pid)
    assert owners() == {("fresh", None)}
    assert int(in_session("fresh", "print(n)")["output"]) > 1


def test_what_dead_backends_have_left_goes_and_what_is_not_theirs_stays(
    make: Make, runtime: Path, tmp_path: Path
) -> None:
    base = runtime / "hermes-kernel"
    base.mkdir(mode=0o700, exist_ok=True)
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    week_ago = time.time() - 8 * 86400
    stale = base / ("0" * 32)
    stale.mkdir(mode=0o700)
    lease = base / f"{stale.name}.lease"
    lease.write_text("{}")
    os.utime(stale, (week_ago, week_ago))
    link = base / ("1" * 32)
    link.symlink_to(target)
    (base / f"{link.name}.lease").write_text("{}")
    make()
    execute("x = 1")
    try:
        assert traces.eventually(lambda: not stale.exists() and not lease.exists())
        assert (target / "kept").exists()
        (info,) = session_kernels()
        live = base / info.kernel_id
        os.utime(live, (week_ago, week_ago))
        in_session("two", "1")
        assert live.is_dir()
        assert execute("print(x)")["output"] == "1\n"
    finally:
        link.unlink(missing_ok=True)
        (base / f"{link.name}.lease").unlink(missing_ok=True)


def test_other_limits_take_hold_when_no_kernel_is_lost_by_it(make: Make) -> None:
    agent = make(limits=Limits(max_kernels=1))
    in_session("a", "x = 1")
    agent.limits = Limits(max_kernels=3, timeout=7)
    assert in_session("a", "print(x)")["output"] == "1\n"
    in_session("b", "x = 1")
    assert traces.eventually(lambda: owners() == {("b", None)})
    shutdown_kernels_for_owner("b")
    for name in "abc":
        in_session(name, "x = 1")
    assert owners() == {("a", None), ("b", None), ("c", None)}


# -- the authority of a cell ------------------------------------------------------------------------------

KEPT = "import hermes_tools, threading\ncalled = hermes_tools.echo\ngo = threading.Event()\n"


def test_a_later_cells_calls_run_under_that_cells_authority_also_through_a_kept_name(make: Make) -> None:
    def capture() -> Callable[[Callable[[], Any]], Any]:
        answer = getattr(PROMPT, "answer", None)

        def runner(function: Callable[[], Any]) -> Any:
            PROMPT.answer = answer
            try:
                return function()
            finally:
                del PROMPT.answer

        return runner

    agent = make(capture_context=capture)
    for n in (1, 2):
        PROMPT.answer = f"prompt-{n}"
        in_session("one", f"{KEPT if n == 1 else ''}called({n})", task_id=f"turn-{n}")
    del PROMPT.answer
    in_session("one", "called(3)", task_id="turn-3")
    assert [seen["task"] for seen in agent.seen] == ["turn-1", "turn-2", "turn-3"]
    assert [seen["prompt"] for seen in agent.seen] == ["prompt-1", "prompt-2", None]
    assert {seen["session"] for seen in agent.seen} == {"one"}
    assert {seen["origin"] for seen in agent.seen} == {"execute_code"}
    assert SESSION.get() == ""


def test_a_settled_cells_authority_refuses_and_a_leftover_spends_nothing_of_the_next(agent: Agent) -> None:
    left = (
        f"{KEPT}answers = []\ndef late(): go.wait(); answers.append(called('late'))\n"
        "thread = threading.Thread(target=late); thread.start()"
    )
    assert execute(left)["status"] == "success"
    second = execute(
        "go.set(); thread.join(); print(answers[0]['error']); print(called('mine'))", max_tool_calls=1
    )
    assert second["output"].startswith("No active execute_code cell")
    assert second["output"].endswith("{'value': 'mine'}\n")
    assert second["tool_calls_made"] == 1
    assert [arguments["value"] for _, arguments in agent.calls] == ["mine"]


def test_a_hand_made_client_without_the_cells_token_is_unauthorized(agent: Agent) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(in_session, "one", "import hermes_tools; print(hermes_tools.gate())")
        assert agent.reached.acquire(timeout=20)
        (info,) = session_kernels()
        assert info.connection_file is not None
        hermes = json.loads(Path(info.connection_file).read_text())["hermes"]
        (endpoint,) = Path(info.connection_file).parent.glob("*-t")
        replies = [_ask(endpoint, hermes["bridge_token"], cell) for cell in ("", "wrong", "é")]
        agent.opened.release()
        assert call.result(20)["status"] == "success"
    assert all("Unauthorized" in str(reply) for reply in replies)
    assert [name for name, _ in agent.calls] == ["gate"]


def _ask(endpoint: Path, kernel_token: str, cell: str) -> Any:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(endpoint))
        peer.settimeout(20)
        call = {"id": 1, "cell": cell, "tool": "echo", "args": {"value": 1}}
        for body in ({"hello": kernel_token}, call):
            data = json.dumps(body).encode()
            peer.sendall(len(data).to_bytes(4, "big") + data)
            size = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")
            answer = json.loads(peer.recv(size, socket.MSG_WAITALL))
    return answer


# -- kernels that are retired while somebody waits --------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
def test_a_kernel_that_is_retired_while_it_starts_runs_nothing(
    make: Make, tmp_path: Path, *, reset: bool
) -> None:
    start = HeldStart(tmp_path)
    make(bootstrap=start.code)
    marker = tmp_path / "ran"
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(in_session, "one", f"open({str(marker)!r}, 'w')", reset=reset)
        start.wait_until_it_runs()
        (old,) = session_kernels()
        shutdown_kernels_for_owner("one")
        result = first.result(20)
        assert (result["status"], result["kernel"]["execution_count"]) == ("interrupted", 0)
        assert "not run" in result["error"]
        assert session_kernels() == ()
        second = pool.submit(in_session, "one", "print('fresh')")
        start.let_go(start.wait_until_it_runs())
        assert second.result(20)["output"] == "fresh\n"
    assert not marker.exists()
    (new,) = session_kernels()
    assert new.kernel_id != old.kernel_id


def test_a_kernel_that_dies_in_its_bootstrap_is_an_error_and_no_second_one_is_started(
    make: Make, tmp_path: Path
) -> None:
    started, marker = tmp_path / "started", tmp_path / "ran"
    make(bootstrap=f"open({str(started)!r}, 'a').write('x')\nimport os, signal; os.kill(os.getpid(), 9)")
    result = read(execute_text(f"open({str(marker)!r}, 'w')"))
    assert (result["status"], result["exit_code"]) == ("error", -1)
    assert "bootstrap" in result["error"]
    assert started.read_text() == "x"
    assert not marker.exists()
    assert session_kernels() == ()


def test_repeated_retirement_ends_after_a_bounded_number_of_kernels_and_says_that_nothing_ran(
    make: Make, tmp_path: Path
) -> None:
    started, marker = tmp_path / "started", tmp_path / "ran"
    agent = make(bootstrap=f"open({str(started)!r}, 'a').write('x')")
    deadly = ["import os; os._exit(1)"] * 6
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(in_session, "one", "import hermes_tools, os; hermes_tools.gate(); os._exit(1)")
        assert agent.reached.acquire(timeout=20)
        waiting: list[Future[Any]] = []
        for code in (*deadly, f"open({str(marker)!r}, 'w')"):
            waiting.append(pool.submit(in_session, "one", code))
            number = len(waiting) + 1
            assert traces.eventually(lambda n=number: sum(k.attached for k in session_kernels()) == n)
        agent.opened.release()
        assert first.result(60)["exit_code"] == 1
        results = [call.result(60) for call in waiting]
    assert [result["kernel"]["execution_count"] for result in results] == [1, 1, 1, 1, 0, 0, 0]
    for result in results[4:]:
        assert (result["status"], result["exit_code"]) == ("error", -1)
        assert "ended 5 times before the code could be run; it was not run" in result["error"]
    assert len(started.read_text()) == 5
    assert not marker.exists()
    assert session_kernels() == ()


def test_a_stale_clean_up_does_not_take_the_replacement_along(agent: Agent) -> None:
    with ThreadPoolExecutor(2) as pool:
        old = pool.submit(in_session, "one", "import hermes_tools; hermes_tools.gate(); print('old ends')")
        assert agent.reached.acquire(timeout=20)
        fresh = in_session("one", "x = 'fresh'", reset=True)
        assert not fresh["kernel"]["reused"]
        agent.opened.release()
        assert old.result(20)["output"] == "old ends\n"
    assert traces.eventually(lambda: len(session_kernels()) == 1)
    assert in_session("one", "print(x)")["output"] == "fresh\n"


def test_a_caller_behind_a_cell_that_ends_its_kernel_runs_on_a_fresh_one(agent: Agent) -> None:
    in_session("one", "x = 1")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(in_session, "one", "import hermes_tools, os; hermes_tools.gate(); os._exit(1)")
        assert agent.reached.acquire(timeout=20)
        second = pool.submit(in_session, "one", "print('x' in globals())")
        assert traces.eventually(lambda: sum(info.attached for info in session_kernels()) == 2)
        agent.opened.release()
        assert first.result(20)["status"] == "error"
        told = second.result(20)
    assert (told["output"], told["kernel"]["lost_reason"]) == ("False\n", "died")


# -- tools ------------------------------------------------------------------------------------------------


def test_a_tool_is_called_as_the_agents_own_functions_call_it_and_its_result_is_parsed(agent: Agent) -> None:
    agent.files["a"] = "héllo"
    code = (
        "import inspect\nfrom hermes_tools import read_file, terminal\n"
        "print(inspect.signature(read_file), read_file.__doc__)\n"
        "r = read_file('a', limit=3)\nprint(r['content'])\nprint(read_file(path='b'))\nterminal('ls')"
    )
    result = execute(code)
    assert result["output"] == (
        "(path: str, offset: int = 1, limit: int = 500) Read lines of a file.\n"
        "héllo\n{'error': 'no such file: b'}\n"
    )
    assert agent.calls == [
        ("read_file", {"path": "a", "offset": 1, "limit": 3}),
        ("read_file", {"path": "b", "offset": 1, "limit": 500}),
        ("terminal", {"command": "ls", "timeout": None, "workdir": None}),
    ]
    assert (result["status"], result["tool_calls_made"]) == ("success", 3)
    assert result["tool_errors"] == [{"tool": "read_file", "error": "no such file: b"}]


def test_a_script_that_a_tool_failed_goes_on_with_the_error_as_a_value(agent: Agent) -> None:
    result = execute("import hermes_tools as h\nprint(h.write_file(path='x'))\nprint(h.echo(float))")
    assert result["output"].startswith("{'error': 'x is protected'}\n")
    assert result["status"] == "error"
    assert "TypeError" in result["error"]
    assert result["tool_errors"] == [{"tool": "write_file", "error": "x is protected"}]


def test_a_call_past_the_budget_is_refused_as_a_value_and_the_next_cell_has_its_own(agent: Agent) -> None:
    code = "import hermes_tools as h\nfor n in range(3): r = h.echo(n)\nprint(r)"
    for _ in range(2):
        result = execute(code, max_tool_calls=2)
        assert "limit reached" in result["output"]
        assert (result["status"], result["tool_calls_made"]) == ("success", 2)
    assert "limit reached" in execute(code, max_tool_calls=0)["output"]
    assert len(agent.calls) == 4


@pytest.mark.parametrize("mode", ["strict", "project"])
def test_only_the_given_tools_can_be_called_in_either_mode(agent: Agent, tmp_path: Path, mode: str) -> None:
    place = {"mode": mode, "child_cwd": str(tmp_path), "sandbox_tools": {"echo"}}
    for name in ("execute_code", "read_file"):
        result = execute(f"from hermes_tools import {name}", **place)
        assert f"cannot import name '{name}'" in result["error"]
        assert "echo" in result["hint"]
    listed = execute("import hermes_tools; print(*dir(hermes_tools))", **place)["output"].split()
    assert "echo" in listed
    assert not {"execute_code", "read_file"} & set(listed)
    code = "import hermes_tools as h\ntry: h.read_file('a')\nexcept Exception as error: print(error)"
    assert "read_file" in execute(code, **place)["output"]
    assert agent.calls == []


def test_arguments_that_are_for_a_turn_alone_are_dropped(make: Make) -> None:
    agent = make(tool_stubs=None)
    blocked = "background=True, pty=True, notify=True, notify_on_complete=True, watch_patterns=['x'], "
    code = f"import hermes_tools as h\nh.terminal(command='ls', {blocked}heartbeat=1, persist_on_release=1)"
    assert execute(code)["status"] == "success"
    assert agent.calls == [("terminal", {"command": "ls"})]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('{"a": NaN}', "{'a': None}"),
        ('"{\\"a\\": 1}"', "{'a': 1}"),
        ('"plain"', "plain"),
        ("not JSON", "not JSON"),
        ({"a": 1}, "{'a': 1}"),
        ([1], "[1]"),
        (None, "None"),
    ],
)
def test_what_a_tool_answers_is_what_its_text_stands_for(make: Make, answer: object, told: str) -> None:
    make(dispatch=lambda *_, **__: answer)
    assert execute("import hermes_tools; print(hermes_tools.echo())")["output"] == f"{told}\n"


@contextlib.contextmanager
def noted(told: list[str]) -> Iterator[None]:
    told.append("before")
    yield
    told.append("after")


def test_a_call_is_served_inside_of_what_the_host_puts_around_it(make: Make) -> None:
    told: list[str] = []

    make(around_dispatch=lambda: noted(told), dispatch=lambda *_, **__: told.append("call"))
    assert execute("import hermes_tools as h; print(h.echo(1))")["output"] == "None\n"
    assert told == ["before", "call", "after"]


def test_an_async_dispatch_is_awaited(make: Make) -> None:
    async def dispatch(name: str, arguments: dict[str, Any], **_: Any) -> str:
        if arguments["value"]:
            return '{"a": 1}'
        raise ValueError("falsy")

    make(dispatch=dispatch)
    code = "import hermes_tools as h; print(h.echo(1), h.echo(0))"
    assert execute(code)["output"] == "{'a': 1} {'error': 'falsy'}\n"


def test_an_async_dispatch_runs_in_the_callers_context_variables_and_after_what_is_put_around_it(
    make: Make,
) -> None:
    told: list[str] = []

    async def dispatch(name: str, arguments: dict[str, Any], **_: Any) -> str:
        told.append(f"{SESSION.get()}: {arguments['value']}")
        return "1"

    make(around_dispatch=lambda: noted(told), dispatch=dispatch)
    assert in_session("one", "import hermes_tools as h; print(h.echo(5))")["output"] == "1\n"
    assert told == ["before", "after", "one: 5"]


def test_ten_threads_get_their_own_answers(agent: Agent) -> None:
    code = (
        "import hermes_tools\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(10) as pool:\n"
        "    print([r['value'] for r in pool.map(hermes_tools.echo, range(30))] == list(range(30)))"
    )
    assert execute(code)["output"] == "True\n"


def test_the_helpers_of_scripts_are_there(agent: Agent) -> None:
    code = (
        "from hermes_tools import json_parse, retry, shell_quote\n"
        'print(json_parse(\'\\ufeff{"a": "x\\ty"}\'), shell_quote("it\'s"))\n'
        "tries = []\n"
        "def flaky():\n    tries.append(1)\n    if len(tries) < 3: raise OSError\n    return 'done'\n"
        "print(retry(flaky, delay=0), len(tries))"
    )
    assert execute(code)["output"] == "{'a': 'x\\ty'} 'it'\"'\"'s'\ndone 3\n"


class Reader:
    """An agent that answers its model's second read of a file with a short note."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.origins: list[str | None] = []
        self.text = "\n".join(f"line {n}" for n in range(20_000))

    def dispatch(self, name: str, arguments: dict[str, Any], *, task_id: str, cell: Any = None) -> str:
        origin = None if cell is None else cell.origin
        self.origins.append(origin)
        if origin != "execute_code":
            if arguments["path"] in self.seen:
                return json.dumps({"unchanged": True})
            self.seen.add(arguments["path"])
        return json.dumps({"content": self.text})

    def model_reads(self, path: str) -> Any:
        return json.loads(self.dispatch("read_file", {"path": path}, task_id="task"))


def test_a_script_rereads_in_full_what_its_model_has_seen_also_when_its_output_was_cut(make: Make) -> None:
    reader = Reader()
    make(dispatch=reader.dispatch)
    assert "content" in reader.model_reads("a")
    assert reader.model_reads("a") == {"unchanged": True}
    code = "from hermes_tools import read_file\nfor _ in 'ab': r = read_file('a')\nprint(r['content'])"
    for _ in range(2):
        result = execute(code)
        assert result["stdout_truncated"]
        assert Path(result["stdout_spill_path"]).read_text() == f"{reader.text}\n"
    assert reader.origins == [None, None, *["execute_code"] * 4]


def test_what_a_script_has_read_is_not_what_its_model_has_seen(make: Make) -> None:
    reader = Reader()
    make(dispatch=reader.dispatch)
    execute("from hermes_tools import read_file\nfor _ in 'ab': read_file('a')")
    assert reader.seen == set()
    assert reader.model_reads("a") == {"content": reader.text}
    assert reader.origins == ["execute_code", "execute_code", None]


# -- what a cell sees of the machine ----------------------------------------------------------------------


def environment(**options: Any) -> dict[str, str]:
    seen: dict[str, str] = json.loads(
        execute("import json, os; print(json.dumps(dict(os.environ)))", **options)["output"]
    )
    return seen


@pytest.mark.parametrize("mode", ["strict", "project"])
def test_secrets_stay_out_and_what_was_declared_passes_in_either_mode(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    secret = {
        "OPENAI_API_KEY": SECRET,
        "GITHUB_TOKEN": SECRET,
        "SENTRY_DSN": "d",
        "HERMES_BASE_URL": "u",
        "RANDOM_X": "r",
    }
    declared = {"NOTION_TOKEN": "process", "OTHER_TOKEN": "process"}
    for name, value in {**secret, **declared, "HERMES_TIMEZONE": "Asia/Tokyo", "HERMES_HOME": "/h"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TZ", raising=False)
    profile = {"NOTION_TOKEN": "routed"}
    make(
        is_passthrough=lambda name: name in declared,
        resolve_passthrough=lambda name, value: profile.get(name),
        build_env=lambda env, python: {**env, "TZ": "Asia/Tokyo"},
    )
    seen = environment(mode=mode, child_cwd=str(tmp_path))
    assert not set(secret) & set(seen)
    assert "HERMES_TIMEZONE" not in seen
    assert (seen["NOTION_TOKEN"], seen["HERMES_HOME"], seen["TZ"]) == ("routed", "/h", "Asia/Tokyo")
    assert "OTHER_TOKEN" not in seen
    assert seen["PATH"]
    assert not [name for name in seen if name.startswith("HERMES_RPC")]


def test_there_is_no_time_zone_unless_one_is_set(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TZ", raising=False)
    assert "TZ" not in environment()


@pytest.mark.parametrize("locale", ["C", "xx_YY.latin-1"])
def test_any_text_can_be_printed_whatever_the_locale(
    make: Make, monkeypatch: pytest.MonkeyPatch, locale: str
) -> None:
    for name in ("LANG", "LC_ALL"):
        monkeypatch.setenv(name, locale)
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    make()
    code = (
        "import subprocess, sys\nprint('漢 é', flush=True)\n"
        "subprocess.run([sys.executable, '-c', \"print('→')\"])"
    )
    assert execute(code)["output"] == "漢 é\n→\n"
    assert execute("print('\\ud800')")["output"] == "\\ud800\n"


def test_a_network_socket_can_be_made(agent: Agent) -> None:
    assert (
        execute("import socket; socket.create_server(('127.0.0.1', 0)).close(); print('ok')")["output"]
        == "ok\n"
    )


# -- how a cell ends, and what is told --------------------------------------------------------------------


def test_an_interrupt_is_asked_for_on_the_calling_thread_and_its_reason_is_the_recorded_one(
    make: Make,
) -> None:
    interrupted: set[int] = set()
    asked: set[int] = set()
    reasons: dict[int, str | None] = {}

    def is_interrupted() -> bool:
        asked.add(threading.get_ident())
        return threading.get_ident() in interrupted

    def reason() -> str | None:
        return reasons.get(threading.get_ident())

    agent = make(interrupt_reason=reason)
    caller = threading.get_ident()
    for told in (None, "the user\nsent a message"):
        reasons[caller] = told
        with ThreadPoolExecutor(1) as pool:
            interrupter = pool.submit(lambda: agent.reached.acquire(timeout=20) and interrupted.add(caller))
            code = "import hermes_tools; print('began', flush=True); hermes_tools.gate()"
            result = execute(code, is_interrupted=is_interrupted)
            interrupter.result()
        agent.opened.release()
        interrupted.clear()
        said = (
            "[execution interrupted]" if told is None else "[execution interrupted — the user sent a message]"
        )
        assert result["output"] == f"began\n{said}"
        assert (result["status"], result["exit_code"]) == ("interrupted", -1)
        assert "interrupted" in result["error"]
        assert "state was lost" in result["error"]
    assert asked == {caller}


def test_a_caller_that_is_interrupted_while_it_waits_touches_nothing(agent: Agent) -> None:
    in_session("one", "x = 1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(in_session, "one", "import hermes_tools; hermes_tools.gate(); print(x)")
        assert agent.reached.acquire(timeout=20)
        second = in_session("one", "x = 2", is_interrupted=lambda: True)
        assert second["status"] == "interrupted"
        assert "state kept" in second["error"]
        agent.opened.release()
        assert first.result(20)["output"] == "1\n"


def test_small_output_is_whole_and_unmarked_and_large_output_keeps_its_ends(agent: Agent) -> None:
    small = execute("print('x' * 1000)")
    assert (small["stdout_truncated"], small["stdout_bytes_omitted"]) == (False, 0)
    assert "warning" not in small
    for middle in ("'x' * 79_999", "'\\n'.join(['x' * 79] * 1000)"):
        large = execute(f"print('HEAD'); print({middle}); print('TAIL')")
        assert large["output"].startswith("HEAD\n")
        assert large["output"].endswith("TAIL\n")
        assert "TRUNCATED" in large["output"]
        assert "execute_code stdout was truncated" in large["warning"]
        assert large["stdout_spill_path"] in large["warning"]
        assert (large["stdout_truncated"], large["stdout_bytes_total"]) == (True, 80_010)
        assert large["stdout_bytes_captured"] + large["stdout_bytes_omitted"] == 80_010
        assert "leftovers" not in large["kernel"]


def test_both_streams_are_told_and_stderr_is_capped(agent: Agent) -> None:
    result = execute("import sys\nprint('out'); print('err', file=sys.stderr)\nraise ValueError('boom')")
    assert result["output"].startswith("out\n--- stderr ---\nerr\nTraceback")
    assert result["output"].endswith("ValueError: boom")
    assert "ValueError: boom" in result["error"]
    assert len(execute("import sys; sys.stderr.write('e' * 60_000)")["output"]) < 11_000


def test_neither_values_nor_magics_are_what_a_script_has(agent: Agent) -> None:
    assert execute("x = 5\nx + 1")["output"] == ""
    for code in ("!ls", "%pwd", "x?", "%%bash\nls"):
        result = execute(code)
        assert (result["status"], "SyntaxError" in result["error"]) == ("error", True)


def test_the_hosts_own_cleaner_and_hint_have_the_last_word(make: Make) -> None:
    make(
        clean=lambda text: text.replace("private", "[redacted]"),
        secrets=["a secret"],
        hint=lambda error, tools: f"try {min(tools)}" if "KeyError" in error else None,
    )
    assert (
        execute("print('pri' + 'vate', 'a ' + 'secret', '\\x1b[31mred\\x1b[0m')")["output"]
        == "[redacted] *** red\n"
    )
    assert execute("{}['x']")["hint"] == "try echo"
    assert "Import it first" in execute("retry")["hint"]


def test_code_of_the_hosts_runs_before_the_first_cell_of_each_kernel(make: Make) -> None:
    make(bootstrap="import sys\nsys.addaudithook(lambda event, args: None)\nready = 1")
    assert execute("print(ready)")["output"] == "1\n"
    assert execute("print(ready)", reset=True)["output"] == "1\n"


def test_a_cell_without_calls_is_quick(agent: Agent) -> None:
    execute("x = 1")
    began = time.monotonic()
    assert execute("print(sum(range(1000)))")["output"] == "499500\n"
    assert time.monotonic() - began < 2


# -- what goes wrong on our side --------------------------------------------------------------------------


def _raise(*_: Any) -> Any:
    raise RuntimeError("the host is broken")


@pytest.mark.parametrize(
    ("services", "options"),
    [
        ({"limits": _raise}, {}),
        ({"limits": lambda: {"max_kernels": 2}}, {}),
        ({"is_passthrough": _raise}, {}),
        ({"build_env": _raise}, {}),
        ({"scope": _raise}, {}),
        ({"capture_context": _raise}, {}),
        ({"socket_dir": lambda: 3}, {}),
        ({}, {"timeout": -1}),
        ({}, {"max_tool_calls": -1}),
        ({}, {"sandbox_tools": {"no name"}}),
        ({}, {"code": "  "}),
        ({}, {"code": None}),
        ({}, {"is_interrupted": _raise}),
    ],
)
def test_what_is_wrong_on_the_hosts_side_is_a_result_with_every_key(
    make: Make, services: dict[str, Any], options: dict[str, Any]
) -> None:
    make(**services)
    result = read(execute_text(**{"code": "print(1)", **options}))
    assert (result["status"], result["exit_code"]) == ("error", -1)


@pytest.mark.parametrize(
    "service",
    ["is_available", "guard", "elsewhere", "config", "limits", "is_interrupted", "capture_context"],
)
def test_a_models_call_is_answered_and_runs_nothing_if_the_host_fails(
    make: Make, tmp_path: Path, service: str
) -> None:
    make(**{service: _raise})
    marker = tmp_path / "ran"
    code = f"import time; time.sleep({30 * (service == 'is_interrupted')}); open({str(marker)!r}, 'w')"
    result = read(handle_execute_code({"code": code}, task_id="t"))
    assert (result["status"], result["error"]) == ("error", "RuntimeError: the host is broken")
    assert not marker.exists()


@pytest.mark.parametrize("service", ["tool_stubs", "interrupt_reason", "hint", "clean", "around_dispatch"])
def test_a_service_that_fails_where_it_may_costs_no_result(make: Make, service: str) -> None:
    make(**{service: _raise})
    result = execute("import hermes_tools as h\nprint('said', h.echo(value=1))\n1/0")
    assert result["output"].startswith("said {'")


def _leak(*_: Any, **__: Any) -> Any:
    raise ValueError(f"401 for token {SECRET}")


async def _leak_later(*_: Any, **__: Any) -> Any:
    _leak()


LEAKS = [
    {"dispatch": _leak},
    {"dispatch": _leak_later},
    {"around_dispatch": _leak},
    {"tool_stubs": _leak},
    {"resolve_owner": _leak},
    {"interrupt_reason": _leak},
    {"hint": _leak},
    {"scope": _leak},
    {"limits": _leak},
    {"config": _leak},
    {"guard": _leak},
    {"recorded_cwd": _leak},
]


@pytest.mark.parametrize("services", LEAKS, ids=lambda services: next(iter(services)))
def test_what_a_host_raises_is_logged_by_its_class_and_its_text_at_the_debug_level_alone(
    make: Make, caplog: pytest.LogCaptureFixture, services: dict[str, Any]
) -> None:
    agent = make(**services)
    agent.config["mode"] = "project"
    caplog.set_level(logging.DEBUG, "hermes_kernel")
    code = {"code": "import hermes_tools as h; h.echo(1); 1/0"}
    handle_execute_code(code, task_id="t", enabled_tools=["echo"])
    execute("1", is_interrupted=lambda: True)
    shutdown_kernels_for_owner("t")
    formatter = logging.Formatter()  # with the traceback, where there is one
    telling = [(record.levelno, formatter.format(record)) for record in caplog.records]
    assert any(level >= logging.INFO and "ValueError" in text for level, text in telling)
    assert [text for level, text in telling if level > logging.DEBUG and SECRET in text] == []
    assert any(SECRET in text and "_leak" in text for level, text in telling if level == logging.DEBUG)


def test_ending_kernels_raises_nothing_whatever_state_they_are_in(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    use(None)
    for end in (shutdown_all_kernels, lambda: shutdown_kernels_for_owner("x")):
        end()
    make(scope=lambda: "")
    execute("x = 1")
    for _ in range(2):
        shutdown_all_kernels()
        assert session_kernels() == ()
        shutdown_kernels_for_owner("task")
        shutdown_kernels_for_delegated_child("task")
    assert execute("print('x' in globals())")["output"] == "False\n"
    assert "were not ended" not in caplog.text


def test_an_end_that_fails_is_logged_and_raises_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    broken = threading.Event()
    make(scope=lambda: _raise() if broken.is_set() else "")
    execute("x = 1")
    broken.set()
    for end in (
        lambda: shutdown_kernels_for_owner("task"),
        lambda: shutdown_kernels_for_delegated_child("c"),
    ):
        caplog.clear()
        end()
        assert "kernels were not ended" in caplog.text
        assert len(session_kernels()) == 1
    broken.clear()
    shutdown_kernels_for_owner("task")
    assert session_kernels() == ()


def test_an_owner_has_the_scope_that_the_host_says_or_is_refused(make: Make) -> None:
    make(resolve_owner=lambda task_id: Owner("s", scope="p"), scope=lambda: "")
    result = read(execute_text("1"))
    assert "scope 'p'" in result["error"]
    assert "scope()" in result["error"]
    assert session_kernels() == ()
    make(resolve_owner=lambda task_id: Owner("s", scope="p"), scope=lambda: "p")
    assert execute("print(1)")["output"] == "1\n"
    shutdown_kernels_for_owner("s")
    assert session_kernels() == ()


def test_all_kernels_end_also_under_cells_that_run(agent: Agent) -> None:
    with ThreadPoolExecutor(3) as pool:
        calls: list[Future[Any]] = [
            pool.submit(in_session, name, "import hermes_tools; hermes_tools.gate()") for name in "abc"
        ]
        for _ in calls:
            assert agent.reached.acquire(timeout=20)
        beside(*[shutdown_all_kernels] * 2)
        assert {call.result(20)["status"] for call in calls} == {"interrupted"}
        for _ in calls:
            agent.opened.release()
    assert execute("print(1)")["output"] == "1\n"


def test_another_host_takes_the_place_of_the_one_before_with_its_kernels(make: Make) -> None:
    make()
    pid = pid_of("one")
    make()
    assert is_dead(pid)
    assert not in_session("one", "print(1)")["kernel"]["reused"]


def test_a_ctrl_c_in_the_calling_thread_is_passed_on_and_ends_the_cell(agent: Agent) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: agent.reached.acquire(timeout=20) and os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            execute("import hermes_tools; hermes_tools.gate()")
        agent.opened.release()
    assert execute("print(1)")["kernel"]["lost_reason"] == "interrupted"


def test_the_names_for_other_machines_are_there_and_run_nothing(agent: Agent) -> None:
    result = hermes_agent.execute_in_remote_kernel(
        "1",
        env=None,
        env_type="ssh",
        task_env_id="t",
        sandbox_tools=TOOLS,
        timeout=1,
        max_tool_calls=1,
        reset=False,
    )
    assert result is None
    hermes_agent.shutdown_remote_kernels_where(lambda owner: True)
    hermes_agent.shutdown_remote_kernels_for_owner("one")
    hermes_agent.shutdown_all_remote_kernels()


# -- modes, interpreters, directories ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("project", "project"),
        ("strict", "strict"),
        (" STRICT ", "strict"),
        ("Project", "project"),
        ("banana", "project"),
        ("", "project"),
        (None, "project"),
        (3, "project"),
    ],
)
def test_a_mode_is_one_of_two_whatever_the_configuration_says(
    value: object, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert execution_mode(value) == mode
    known = isinstance(value, str) and value.strip().lower() in ("project", "strict")
    assert (caplog.records == []) is known


def interpreter(root: Path, name: str = "python", *, mode: int = 0o755) -> Path:
    (root / "bin").mkdir(parents=True, exist_ok=True)
    path = root / "bin" / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    path.chmod(mode)
    return path


def test_the_interpreter_of_a_project_is_its_environments_and_a_virtual_one_comes_first(
    tmp_path: Path,
) -> None:
    venv, conda = interpreter(tmp_path / "venv"), interpreter(tmp_path / "conda", "python3")
    both = {"VIRTUAL_ENV": str(tmp_path / "venv"), "CONDA_PREFIX": str(tmp_path / "conda")}
    own = sys.executable
    assert child_python("strict", both).path == own
    assert child_python("project", {}).path == own
    assert child_python("project", both).path == str(venv)
    assert child_python("project", {"CONDA_PREFIX": str(tmp_path / "conda")}).path == str(conda)
    assert child_python("project", {**both, "VIRTUAL_ENV": str(tmp_path / "gone")}).path == str(conda)
    venv.chmod(0o644)
    assert child_python("project", both).path == (
        str(venv) if os.geteuid() == 0 and os.access(venv, os.X_OK) else str(conda)
    )


def test_an_environment_that_cannot_be_used_is_the_last_one_that_is_looked_at(tmp_path: Path) -> None:
    interpreter(tmp_path / "venv")
    interpreter(tmp_path / "conda")
    both = {"VIRTUAL_ENV": str(tmp_path / "venv"), "CONDA_PREFIX": str(tmp_path / "conda")}
    asked: list[str] = []
    chosen = child_python("project", both, lambda path: asked.append(path) or "it is too old")
    assert (chosen.path, chosen.reason) == (sys.executable, "it is too old")
    assert asked == [str(tmp_path / "venv" / "bin" / "python")]


def test_a_cell_runs_on_the_projects_interpreter_or_on_the_agents_own_and_says_why(
    agent: Agent, tmp_path: Path
) -> None:
    works = interpreter(tmp_path / "works")
    options = {"mode": "project", "child_cwd": str(tmp_path)}
    code = "import os, sys; print(os.getcwd()); from hermes_tools import echo; print(echo(1))"
    on_project = execute(code, child_python=str(works), **options)
    assert on_project["output"] == f"{tmp_path}\n{{'value': 1}}\n"
    assert "warning" not in on_project
    (info,) = session_kernels()
    assert info.python == str(works)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    environ = {"VIRTUAL_ENV": str(tmp_path / "bare")}
    chosen = child_python("project", environ, hermes_agent.unusable_python)
    assert chosen.path == sys.executable
    assert "no ipykernel" in str(chosen.reason)
    environ = {"VIRTUAL_ENV": str(tmp_path / "works")}
    assert child_python("project", environ, hermes_agent.unusable_python) == ChildPython(str(works))
    for python, reason in (
        (tmp_path / "bare" / "bin" / "python", "no ipykernel"),
        (broken, "exit code 1"),
        (tmp_path / "gone", "not an interpreter"),
    ):
        with session(str(python)):
            fallen_back = execute("import sys; print(sys.executable)", child_python=str(python), **options)
            assert fallen_back["status"] == "success", fallen_back
            assert reason in fallen_back["warning"]
            assert str(python) in fallen_back["warning"]
            assert "warning" not in execute("print(1)", child_python=str(python), **options)
            assert "warning" not in execute("print(1)", **options)
            again = execute("print(1)", child_python=str(python), **options)
            assert (again["kernel"]["reused"], reason in again["warning"]) == (True, True)


def test_the_directory_of_a_strict_cell_is_its_own_and_private(agent: Agent, tmp_path: Path) -> None:
    code = "import os, stat; print(os.getcwd()); print(oct(stat.S_IMODE(os.stat('.').st_mode)))"
    own, mode = execute(code, child_cwd=str(tmp_path))["output"].split()
    assert own != str(tmp_path)
    assert mode == "0o700"
    shutdown_all_kernels()
    assert not Path(own).exists()


def test_a_project_cell_imports_from_its_directory_and_the_tools_too(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("value = 7\n")
    code = "import mine, hermes_tools; print(mine.value, hermes_tools.echo(1))"
    assert execute(code, mode="project", child_cwd=str(tmp_path))["output"] == "7 {'value': 1}\n"


def test_the_directory_of_a_call_is_the_first_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {}
    for name in ("recorded", "registered", "terminal", "here"):
        (tmp_path / name).mkdir()
        places[name] = str(tmp_path / name)
    monkeypatch.chdir(places["here"])
    monkeypatch.setenv("HOME", str(tmp_path))

    def of(mode: str = "project", task: str = "t", terminal: str = "~/terminal") -> str:
        environ = {"TERMINAL_CWD": terminal} if terminal else {}
        return child_cwd(
            mode,
            task,
            environ,
            recorded=lambda task_id: places["recorded"],
            registered=lambda task_id: places["registered"],
        )

    assert of("strict") == ""
    assert of() == places["recorded"]
    os.rmdir(places["recorded"])
    assert of() == places["registered"]
    assert of(task="") == places["terminal"]
    os.rmdir(places["registered"])
    assert of() == places["terminal"]
    assert of(terminal=" ~/terminal ") == places["terminal"]
    assert of(terminal="/nowhere") == places["here"]
    assert of(terminal="") == places["here"]
    assert child_cwd("project", "t", {}, recorded=_raise, registered=_raise) == places["here"]
    os.rmdir(places["here"])
    assert of(terminal="") == ""


# -- the tool as a model sees it --------------------------------------------------------------------------


def test_the_schema_names_the_enabled_tools_alone_and_says_what_is_lost(agent: Agent) -> None:
    schema = hermes_agent.execute_code_schema(["read_file", "browser"], "strict")
    description = schema["description"]
    assert set(schema["parameters"]["properties"]) == {"code", "reset"}
    assert schema["parameters"]["properties"]["reset"]["type"] == "boolean"
    assert schema["parameters"]["required"] == ["code"]
    assert "read_file(path, offset=1, limit=500): Read lines of a file." in description
    assert "echo(" not in description
    assert "state is lost" in description
    assert "directory of its own" in description
    assert (
        "session's working directory" in hermes_agent.execute_code_schema(["echo"], "project")["description"]
    )
    for word in ("sandbox", "isolated", "cloud"):
        assert word not in description.lower()


def test_the_schema_of_a_host_without_tools_names_the_helpers_alone(make: Make) -> None:
    make(script_tools=frozenset())
    schema = hermes_agent.execute_code_schema()
    assert schema["parameters"]["properties"]["code"]["description"].endswith("import retry")
    listed = schema["description"].partition("can import:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.strip().partition("(")[0] for line in listed] == ["json_parse", "shell_quote", "retry"]


def test_a_model_reaches_reset_whatever_stale_key_the_configuration_has(agent: Agent) -> None:
    agent.config["kernel_mode"] = "per-call"
    call = {"code": "x = 1"}
    assert json.loads(handle_execute_code(call, task_id="t", enabled_tools=["echo"]))["status"] == "success"
    kept = json.loads(handle_execute_code({"code": "print(x)"}, task_id="t", enabled_tools=["echo"]))
    assert (kept["output"], kept["kernel"]["reused"]) == ("1\n", True)
    fresh = handle_execute_code({"code": "print(x)", "reset": True}, task_id="t", enabled_tools=["echo"])
    assert json.loads(fresh)["kernel"]["state_reset"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"command": "ls"}, ("execute_code", "terminal")),
        ({}, ("non-empty `code`",)),
        ({"code": None}, ("non-empty `code`",)),
        ({"code": " \n"}, ("non-empty `code`",)),
        ({"code": 3}, ("int",)),
        ({"code": ["x"]}, ("list",)),
        ({"code": "x", "reset": "yes"}, ("`reset`", "true or false", "'yes'")),
        ({"code": "x", "reset": 1}, ("`reset`", "true or false", "1")),
        (None, ("arguments", "NoneType")),
        ('{"code": "1"}', ("arguments", "str")),
    ],
)
def test_arguments_that_a_model_mixes_up_are_explained(
    agent: Agent, arguments: Any, said: tuple[str, ...]
) -> None:
    result = read(handle_execute_code(arguments, task_id="t"))
    for words in said:
        assert words in result["error"]
    assert session_kernels() == ()


@pytest.mark.parametrize(
    ("given", "resets"),
    [(True, True), ("true", True), (" True ", True), (False, False), ("false", False), (None, False)],
)
def test_a_reset_may_be_a_word(agent: Agent, given: object, resets: bool) -> None:
    handle_execute_code({"code": "x = 1"}, task_id="t")
    result = read(handle_execute_code({"code": "print('x' in globals())", "reset": given}, task_id="t"))
    assert (result["output"], result["kernel"]["state_reset"]) == (f"{not resets}\n", resets)


@pytest.mark.parametrize("tools", [None, "read_file", 3, [1], [None, "echo"]])
def test_tools_that_are_no_names_are_refused(agent: Agent, tools: Any) -> None:
    result = read(execute_text("1", sandbox_tools=tools))
    assert "sandbox_tools=" in result["error"]
    assert "names" in result["error"]
    if tools is not None:  # it is all of them, there
        result = read(handle_execute_code({"code": "1"}, task_id="t", enabled_tools=tools))
        assert "enabled_tools=" in result["error"]
    assert session_kernels() == ()


def test_tools_that_no_script_may_call_leave_all_that_it_may(agent: Agent) -> None:
    code = {
        "code": "import hermes_tools as h; print(sorted({'read_file', 'echo', 'browser'} & set(h.__all__)))"
    }
    assert (
        json.loads(handle_execute_code(code, task_id="t", enabled_tools=["browser"]))["output"]
        == "['echo', 'read_file']\n"
    )
    assert (
        json.loads(handle_execute_code(code, task_id="t", enabled_tools=["echo"]))["output"] == "['echo']\n"
    )


def test_code_that_is_refused_or_not_available_leaves_no_trace(make: Make, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = {"code": f"open({str(marker)!r}, 'w')"}
    make(guard=lambda code: "blocked: not approved")
    blocked = read(handle_execute_code(code, task_id="t"))
    assert (blocked["error"], blocked["tool_calls_made"]) == ("blocked: not approved", 0)
    make(is_available=lambda: False)
    assert "not available" in read(handle_execute_code(code, task_id="t"))["error"]
    make(elsewhere=lambda code, task_id, tools: '{"status": "remote"}')
    assert handle_execute_code(code, task_id="t") == '{"status": "remote"}'
    assert session_kernels() == ()
    assert not marker.exists()


def test_the_configuration_and_the_places_of_a_session_are_a_cells(make: Make, tmp_path: Path) -> None:
    agent = make(recorded_cwd=lambda task_id: str(tmp_path) if task_id == "t" else None)
    agent.config.update(mode="project", timeout=0.5, max_tool_calls=1)
    code = (
        "import os, time, hermes_tools as h\n"
        "print(os.getcwd(), h.echo(1), h.echo(2), flush=True); time.sleep(30)"
    )
    result = json.loads(handle_execute_code({"code": code}, task_id="t", enabled_tools=["echo"]))
    assert result["status"] == "timeout"
    assert result["output"].startswith(f"{tmp_path} {{'value': 1}} {{'error': 'Tool call limit reached")


ODD_STUBS = """
def gate(x=undefined): pass
def write_file(x=1 / 0): pass
def echo(a, a): pass
def terminal(x=exit()): pass
@undefined
def odd(): pass
"""


def test_stubs_are_read_and_never_run(make: Make) -> None:
    make(tool_stubs=lambda names: f"raise SystemExit\n{STUBS}\n{ODD_STUBS}")
    code = (
        "import hermes_tools as h, inspect\n"
        "for f in (h.gate, h.write_file, h.echo, h.terminal, h.read_file): print(inspect.signature(f))"
    )
    assert execute(code)["output"].splitlines() == [
        *["(**arguments)"] * 4,
        "(path: str, offset: int = 1, limit: int = 500)",
    ]


@pytest.mark.parametrize("stubs", ["def (", None, ["def f(): pass"], "(" * 5000, "\0"])
def test_stubs_that_are_no_source_are_said_to_be_none(make: Make, stubs: object) -> None:
    make(tool_stubs=lambda names: stubs)
    assert "tool_stubs" in execute("1")["error"]
