"""A kernel of an agent's session, shown to people by a real jupyter_server: REST and a websocket."""

import json
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, Limits
from hermes_kernel.process.published import SPEC, publish_dir

from .. import traces
from ..conftest import DEGRADED
from .hosts import FORK, SPAWN, Host, Way, all_gone, files_of, host, new_runtime
from .servers import STOP_WAIT, FrontEnd, Server, jupyter_server
from .test_staging_faults import dead_kernel, end_all_above, is_swept

Make = Callable[..., BlockingRegistry]

WAYS = pytest.mark.parametrize("way", [FORK, SPAWN], ids=["fork", "spawn"])
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture(scope="module")
def server(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It finds live kernels where it looks by default: nobody tells it the directory."""
    with jupyter_server(tmp_path_factory.mktemp("live"), runtime, shows=publish_dir().parent) as found:
        yield found


@pytest.fixture
def owned(make_registry: Make) -> BlockingRegistry:
    registry = make_registry(limits=Limits(timeout=30), expose=True)
    assert registry.execute("x = 41", owner="a").kernel.degraded == DEGRADED
    return registry


@pytest.fixture
def person(server: Server, owned: BlockingRegistry) -> Iterator[FrontEnd]:
    with closing(FrontEnd(server, listed(server))) as found:
        yield found


def listed(server: Server) -> str:
    """Return the id that the server has given to the one live kernel."""
    (model,) = server.ask("GET", "/api/kernels")
    assert model["name"] == SPEC
    return str(model["id"])


def published_file(registry: BlockingRegistry) -> Path:
    (info,) = registry.kernels()
    assert info.connection_file is not None
    return Path(info.connection_file)


def private_file(runtime: Path) -> Path:
    (found,) = runtime.glob("hermes-kernel/*/connection.json")
    return found


def files(directory: Path) -> list[str]:
    """What lies in a directory of published files, and what is half done beside it."""
    return sorted(path.name for path in (*directory.glob("*"), *directory.parent.glob(".hermes-*")))


@contextmanager
def unharmed(registry: BlockingRegistry) -> Iterator[None]:
    """Whatever happens meanwhile, the agent has its kernel afterwards, and people can look into it anew."""
    (before,) = registry.kernels()
    yield
    result = registry.execute("x", owner="a")
    assert (result.status, result.value) == (CellStatus.OK, "41")
    assert (result.kernel.reused, result.kernel.lost) == (True, None)
    (after,) = registry.kernels()
    assert (after.pid, after.connection_file) == (before.pid, before.connection_file)
    assert after.connection_file is not None
    assert Path(after.connection_file).exists()


@contextmanager
def agents_cell(registry: BlockingRegistry, place: Path) -> Iterator[list[CellResult]]:
    """A cell of the agent's that runs until the end of the block; then its result is in the list."""
    begun, end = place / "begun", place / "end"
    for fifo in (begun, end):
        os.mkfifo(fifo)
    held = os.open(end, os.O_RDWR)
    code = f"end = open({str(end)!r}); open({str(begun)!r}, 'w').close(); end.read(); 'finished'"
    results: list[CellResult] = []
    agent = threading.Thread(target=lambda: results.append(registry.execute(code, owner="a")))
    agent.start()
    try:
        begun.read_bytes()
        yield results
    finally:
        os.close(held)
        agent.join(30)


def agents_cell_if(
    registry: BlockingRegistry, place: Path, *, busy: bool
) -> AbstractContextManager[list[CellResult]]:
    return agents_cell(registry, place) if busy else nullcontext([])


# -- what the server shows --------------------------------------------------------------------------------


def test_the_server_offers_the_spec_of_live_sessions_with_its_logos(server: Server) -> None:
    spec = server.ask("GET", "/api/kernelspecs")["kernelspecs"][SPEC]
    assert spec["spec"]["display_name"] == "Hermes (live session of an agent)"
    assert spec["spec"]["interrupt_mode"] == "message"
    assert spec["spec"]["metadata"]["kernel_provisioner"]["provisioner_name"] == "hermes-attach"
    kinds = {"logo-svg": "image/svg+xml", "logo-32x32": "image/png", "logo-64x64": "image/png"}
    assert set(spec["resources"]) == set(kinds)
    for name, kind in kinds.items():
        status, told, logo = server.raw("GET", spec["resources"][name])
        assert (status, told) == (200, kind)
        assert logo.startswith(b"<svg" if kind == "image/svg+xml" else b"\x89PNG")


def test_a_live_session_is_listed_as_long_as_it_lives(server: Server, make_registry: Make) -> None:
    assert server.ask("GET", "/api/kernels") == []
    registry = make_registry(expose=True)
    for owner in "ab":
        registry.execute("1", owner=owner)
    assert [model["name"] for model in server.ask("GET", "/api/kernels")] == [SPEC, SPEC]
    registry.close_owner("a")
    assert len(server.ask("GET", "/api/kernels")) == 1
    registry.close()
    assert server.ask("GET", "/api/kernels") == []


def test_a_session_of_the_servers_can_be_opened_on_it_and_closed(
    server: Server, owned: BlockingRegistry
) -> None:
    kernel = listed(server)
    with unharmed(owned):
        notebook = {"path": "a.ipynb", "name": "", "type": "notebook", "kernel": {"id": kernel}}
        status, _, told = server.raw("POST", "/api/sessions", notebook)
        session = json.loads(told)
        assert (status, session["kernel"]["id"], session["kernel"]["name"]) == (201, kernel, SPEC)
        with closing(FrontEnd(server, kernel)) as person:
            assert person.run("x").value == "41"
        assert server.status("DELETE", f"/api/sessions/{session['id']}") == 204
    owned.close()
    forget_what_was_deleted(server)


def forget_what_was_deleted(server: Server) -> None:
    """The listing after a kernel that was deleted there has ended.

    jupyter_client looks for it where it is no longer, and fails: once.
    """
    assert server.status("GET", "/api/kernels") in (200, 500)
    assert server.ask("GET", "/api/kernels") == []


# -- what a person does there -----------------------------------------------------------------------------


def test_a_person_and_the_agent_see_each_others_variables_and_the_persons_cells_are_counted(
    owned: BlockingRegistry, person: FrontEnd
) -> None:
    assert person.run("x + 1").value == "42"
    assert person.run("y = 'from a person'; print(y)").stdout == "from a person\n"
    first = owned.execute("y", owner="a")
    assert (first.value, first.kernel.foreign_cells) == ("'from a person'", 2)
    assert owned.execute("z = 'from the agent'", owner="a").kernel.foreign_cells == 0
    assert person.run("z").value == "'from the agent'"
    assert owned.execute("z", owner="a").kernel.foreign_cells == 1


def test_a_person_sees_the_agents_cell_as_it_runs(owned: BlockingRegistry, person: FrontEnd) -> None:
    owned.execute("print('said by the agent')", owner="a")
    shown = person.until_any(lambda m: m["msg_type"] == "stream")
    assert [m["content"]["code"] for m in shown if m["msg_type"] == "execute_input"] == [
        "print('said by the agent')"
    ]
    assert shown[-1]["content"]["text"] == "said by the agent\n"


def test_a_persons_cell_has_no_tools(make_registry: Make, server: Server) -> None:
    called: list[str] = []
    registry = make_registry(expose=True)
    registry.execute("import hermes_tools; hermes_tools.note", owner="a", tools={"note": called.append})
    with closing(FrontEnd(server, listed(server))) as person:
        answer = person.run("hermes_tools.note('from a person')")
    assert answer.reply["status"] == "error"
    assert called == []


@pytest.mark.parametrize("leave", ["exit", "exit()", "quit()", "import sys; sys.exit(3)"])
def test_a_persons_exit_leaves_the_session_as_it_is(
    owned: BlockingRegistry, person: FrontEnd, leave: str
) -> None:
    with unharmed(owned):
        person.run(leave)


def test_a_cell_that_a_person_sends_after_the_reply_to_a_failed_one_runs(person: FrontEnd) -> None:
    for _ in range(5):
        assert person.run("1 / 0").ended_with == "ZeroDivisionError"
        assert person.run("x").value == "41"


def test_a_persons_shutdown_request_is_refused(owned: BlockingRegistry, person: FrontEnd) -> None:
    with unharmed(owned):
        assert person.ask("shutdown_request", restart=False)["ename"] == "NotTheOwner"
    assert person.run("x").value == "41"


def test_an_interrupt_does_not_reach_the_agents_cell(
    owned: BlockingRegistry, person: FrontEnd, tmp_path: Path
) -> None:
    with unharmed(owned):
        with agents_cell(owned, tmp_path) as results:
            assert person.interrupt_status() == 500  # the server interrupts only what it has started
            assert person.ask("interrupt_request")["ename"] == "NotTheOwner"
        assert [(result.status, result.value) for result in results] == [(CellStatus.OK, "'finished'")]


def test_a_persons_own_cell_ends_by_an_interrupt_request(owned: BlockingRegistry, person: FrontEnd) -> None:
    """The button of a front end asks over REST, which the server refuses for what it has not started."""
    with unharmed(owned):
        cell = person.begin(SLEEP)
        person.until_printed(cell, "begun")
        assert person.interrupt_status() == 500
        person.send("control", "interrupt_request", {})
        assert person.answer(cell).ended_with == "KeyboardInterrupt"


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_delete_leaves_the_session_as_it_is(
    server: Server, owned: BlockingRegistry, person: FrontEnd, tmp_path: Path, busy: bool
) -> None:
    with unharmed(owned):
        with agents_cell_if(owned, tmp_path, busy=busy) as results:
            person.delete()
            assert server.ask("GET", "/api/kernels") == []
        assert [result.value for result in results] == ["'finished'"] * busy
    owned.close()
    forget_what_was_deleted(server)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_restart_is_refused_and_starts_nothing(
    server: Server, owned: BlockingRegistry, person: FrontEnd, tmp_path: Path, busy: bool
) -> None:
    key = json.loads(published_file(owned).read_text())["key"]
    with unharmed(owned):
        with agents_cell_if(owned, tmp_path, busy=busy) as results:
            assert server.status("POST", f"/api/kernels/{person.id}/restart") == 500
            assert psutil.Process(server.process.pid).children(recursive=True) == []
        assert [result.value for result in results] == ["'finished'"] * busy
        assert person.run("x").value == "41"
        with closing(FrontEnd(server, person.id)) as another:  # it connects to the same sockets anew
            assert another.run("x").value == "41"
    left = [path for path in server.temporary.rglob("*") if path.is_file() and key in path.read_text()]
    assert left == []


def test_a_live_session_cannot_be_started(server: Server, leaves_nothing: None) -> None:
    before = files(publish_dir())
    assert server.status("POST", "/api/kernels", {"name": SPEC}) == 500
    assert server.ask("GET", "/api/kernels") == []
    assert psutil.Process(server.process.pid).children(recursive=True) == []
    assert files(publish_dir()) == before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["asked", "killed"])
def test_the_end_of_the_server_leaves_the_session_as_it_is(
    runtime: Path, owned: BlockingRegistry, tmp_path: Path, signum: signal.Signals
) -> None:
    with (
        unharmed(owned),
        jupyter_server(tmp_path / "server", runtime, shows=publish_dir().parent) as server,
        closing(FrontEnd(server, listed(server))) as person,
    ):
        assert person.run("x").value == "41"
        server.process.send_signal(signum)
        server.process.wait(STOP_WAIT)


def test_a_session_that_ends_under_a_person_ends_for_the_server_too(
    server: Server, owned: BlockingRegistry, person: FrontEnd
) -> None:
    cell = person.begin(SLEEP)
    person.until_printed(cell, "begun")
    owned.close_owner("a")
    assert server.ask("GET", "/api/kernels") == []
    assert owned.execute("'x' in globals()", owner="a").value == "False"
    assert listed(server) != person.id


# -- the published file -----------------------------------------------------------------------------------


def test_the_published_file_is_its_users_alone_and_holds_no_secret_of_the_owners(
    runtime: Path, owned: BlockingRegistry
) -> None:
    path = published_file(owned)
    private = json.loads(private_file(runtime).read_text())
    options = private.pop("hermes")
    assert path.parent == publish_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert json.loads(path.read_text()) == {**private, "kernel_name": SPEC}
    secrets = [options["owner_secret"], options["bridge_token"]]
    assert all(len(secret) >= 16 for secret in secrets)
    assert not any(secret in path.read_text() for secret in secrets)


def test_without_expose_nothing_is_published(
    runtime: Path, server: Server, registry: BlockingRegistry
) -> None:
    before = files(publish_dir())
    registry.execute("1", owner="a")
    assert files(publish_dir()) == before
    assert published_file(registry) == private_file(runtime)
    assert server.ask("GET", "/api/kernels") == []


def killed(registry: BlockingRegistry) -> None:
    (info,) = registry.kernels()
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)


ENDS: dict[str, Callable[[BlockingRegistry], object]] = {
    "close_owner": lambda registry: registry.close_owner("a"),
    "reset": lambda registry: registry.execute("1", owner="a", reset=True),
    "timeout": lambda registry: registry.execute("import time; time.sleep(60)", owner="a", timeout=0.1),
    "exit": lambda registry: registry.execute("exit()", owner="a"),
    "death": lambda registry: registry.execute("import os; os._exit(3)", owner="a"),
    "killed": killed,
    "close": lambda registry: registry.close(),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@WAYS
def test_the_published_file_is_gone_with_its_kernel(
    make_registry: Make, way: Way, end: Callable[[BlockingRegistry], object]
) -> None:
    registry = make_registry(limits=Limits(**way), expose=True)
    registry.execute("1", owner="a")
    path = published_file(registry)
    assert files(path.parent) == [path.name]
    end(registry)
    assert traces.eventually(lambda: not path.exists())
    registry.close()
    assert files(path.parent) == []


def test_a_kernel_that_was_kept_ready_is_published_under_its_name_when_it_has_an_owner(
    make_registry: Make,
) -> None:
    registry = make_registry(expose=True)
    for owner in "abc":
        registry.execute("1", owner=owner)
    infos = registry.kernels()
    assert files(publish_dir()) == sorted(f"hermes-{info.kernel_id}.json" for info in infos)
    for info in infos:
        assert info.connection_file is not None
        addresses = json.loads(Path(info.connection_file).read_text())
        assert Path(f"{addresses['ip']}-{addresses['shell_port']}").is_socket()


def open_to_others(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o777)


def below_one_that_is_open_to_others(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    directory.parent.chmod(0o777)


def somewhere_else(directory: Path) -> None:
    directory.parent.mkdir()
    (directory.parent / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(directory.parent / "elsewhere")


def no_directory(directory: Path) -> None:
    directory.parent.mkdir()
    directory.write_text("a file")


@pytest.mark.parametrize(
    "make", [open_to_others, below_one_that_is_open_to_others, somewhere_else, no_directory]
)
def test_where_others_could_put_another_file_the_kernel_runs_and_says_that_it_is_not_published(
    runtime: Path,
    make_registry: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    make(publish_dir())
    before = sorted(tmp_path.rglob("*"))
    registry = make_registry(expose=True)
    result = registry.execute("6 * 7", owner="a")
    assert result.value == "42"
    assert "not published" in str(result.kernel.degraded)
    (info,) = registry.kernels()
    assert "not published" in str(info.degraded)
    assert published_file(registry) == private_file(runtime)
    assert sorted(tmp_path.rglob("*")) == before
    registry.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_cell_puts_in_the_place_of_the_published_file_takes_nothing_with_it(
    make_registry: Make, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    registry = make_registry(limits=Limits(spare_kernels=0), expose=True)
    for target in (precious / "file", precious):
        registry.execute("import os", owner="a")
        path = published_file(registry)
        assert (
            registry.execute(
                f"os.unlink({str(path)!r}); os.symlink({str(target)!r}, {str(path)!r})", owner="a"
            ).status
            is CellStatus.OK
        )
        registry.close_owner("a")
        assert not os.path.lexists(path)
        assert (precious / "file").read_text() == "precious"


# -- when the host dies -----------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """A runtime directory of this test's own."""
    with new_runtime() as runtime:
        yield runtime


@contextmanager
def exposing_host(place: Path, way: Way) -> Iterator[tuple[Host, Path]]:
    """A host with a kernel, and the kernel's published file."""
    env = {"JUPYTER_RUNTIME_DIR": str(place / "jupyter")}
    with host({**way, "expose": True}, runtime=place, env=env) as one:
        assert one.cell("x = 1")["status"] == "ok"
        (path,) = (place / "jupyter" / "external_kernels").iterdir()
        yield one, path


@WAYS
@pytest.mark.usefixtures("leaves_nothing")
def test_the_published_file_goes_with_a_host_that_is_killed(place: Path, way: Way) -> None:
    with exposing_host(place, way) as (one, path):
        one.kill()
        one.wait()
        assert traces.eventually(lambda: not path.exists())
        assert one.leaves_nothing(), one.leaves()


@WAYS
@pytest.mark.usefixtures("leaves_nothing")
def test_the_published_file_goes_with_a_warden_that_is_killed(place: Path, way: Way) -> None:
    with exposing_host(place, way) as (one, path):
        one.family().warden.kill()
        assert traces.eventually(lambda: not path.exists())
        assert one.cell("'x' in globals()")["value"] == "False"
        assert path.exists() is False


@WAYS
@pytest.mark.usefixtures("leaves_nothing")
def test_what_host_and_warden_have_left_published_is_removed_by_the_next_host(
    place: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exposing_host(place, way) as (one, path):
        line = one.family()
        end_all_above(one.pid, line.zygote, line.warden)
        one.wait()
        assert all_gone([line.zygote, line.warden, line.kernel], within=5)
    assert path.exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))  # not Jupyter's: the lease says where it was published
    with BlockingRegistry():
        assert traces.eventually(lambda: not path.exists())
    assert files_of(place) == []


def as_published(path: Path, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"kernel_name": SPEC, "key": "k", **more}))
    return path


def of_another_kernel(place: Path) -> tuple[str, Path]:
    path = as_published(place / "external_kernels" / "hermes-other.json")
    return str(path), path


def of_another_name(place: Path) -> tuple[str, Path]:
    path = as_published(place / "external_kernels" / "k.json")
    return str(path), path


def in_another_directory(place: Path) -> tuple[str, Path]:
    path = as_published(place / "elsewhere" / "hermes-k.json")
    return str(path), path


def not_a_connection_file(place: Path) -> tuple[str, Path]:
    path = as_published(place / "external_kernels" / "hermes-k.json", kernel_name="python3")
    return str(path), path


def behind_a_link(place: Path) -> tuple[str, Path]:
    path = as_published(place / "precious.json")
    link = place / "external_kernels" / "hermes-k.json"
    link.parent.mkdir()
    link.symlink_to(path)
    return str(link), path


def relative(place: Path) -> tuple[str, Path]:
    path = as_published(place / "external_kernels" / "hermes-k.json")
    return os.path.relpath(path), path


def the_directory(place: Path) -> tuple[str, Path]:
    path = place / "external_kernels" / "hermes-k.json" / "file"
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    return str(path.parent), path


@pytest.mark.parametrize(
    "plant",
    [
        of_another_kernel,
        of_another_name,
        in_another_directory,
        not_a_connection_file,
        behind_a_link,
        relative,
        the_directory,
    ],
)
@pytest.mark.usefixtures("leaves_nothing")
def test_whatever_the_record_of_a_dead_kernel_says_was_published_nothing_else_is_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], tuple[str, Path]]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (place / "hermes-kernel").mkdir(mode=0o700)
    said, precious = plant(place)
    before = precious.read_text()
    dead_kernel(place, "k", published=said)
    own = as_published(place / "external_kernels" / "hermes-honest.json")
    dead_kernel(place, "honest", published=str(own))
    assert is_swept(place)
    assert files_of(place) == []
    assert not own.exists()
    assert precious.read_text() == before
