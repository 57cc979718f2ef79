"""Directories of kernels that are full, gone, stale, planted or somebody else's."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellStatus, Limits, Loss, ToolError
from hermes_kernel.process.staging import MEMORY

from .. import traces
from ..containment.matrix import HERE as CONTAINMENT
from .hosts import (
    FORK,
    NAMESPACE,
    SPARE,
    SPAWN,
    Way,
    all_gone,
    family,
    files_of,
    host,
    in_its_own_world,
    new_runtime,
    processes_of,
)
from .test_process_faults import (
    BOTH,
    BOUND,
    LINGER,
    NEEDS_NAMESPACES,
    NEEDS_ROOT,
    kernel_of,
    kernels_in,
    wait_for_spare,
)
from .test_registry import Make

pytestmark = pytest.mark.usefixtures("leaves_nothing")

ANOTHER_USER = 54_323
DAY = 86_400


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test's own, and this process in it."""
    with new_runtime() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        (runtime / "hermes-kernel").mkdir(mode=0o700)
        yield runtime


def dead_kernel(runtime: Path, name: str = "", **record: Any) -> Path:
    """What a host that was killed leaves if nobody sees to it: a directory and the lease, held by nobody."""
    directory = runtime / "hermes-kernel" / (name or uuid.uuid4().hex)
    (directory / "work").mkdir(parents=True, mode=0o700)
    directory.chmod(0o700)
    (directory / "connection.json").write_text("{}")
    own = {"cookie": uuid.uuid4().hex, "host": {"pid": 1}, "sockets": str(directory)}
    lease_of(directory).write_text(json.dumps({**own, **record}))
    return directory


def lease_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.lease")


def is_swept(runtime: Path, within: float = BOUND) -> bool:
    """Whether the first thing that a new host does is to remove all that dead ones have left."""
    canary = dead_kernel(runtime)
    with BlockingRegistry():
        return traces.eventually(lambda: not canary.exists() and not lease_of(canary).exists(), within=within)


# -- what dead hosts have left ----------------------------------------------------------------------------


def filled(directory: Path) -> None:
    for number in range(2000):
        (directory / "work" / str(number)).touch()


def locked(directory: Path) -> None:
    inner = directory / "work" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").touch(0o000)
    for path in (inner, inner.parent, directory / "work", directory / "connection.json"):
        path.chmod(0o000)


def deep(directory: Path) -> None:
    here = os.getcwd()
    os.chdir(directory / "work")
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)


def odd_files(directory: Path) -> None:
    os.mkfifo(directory / "work" / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "k-1"))
    (directory / "work" / os.fsdecode(b"\xff\n -rf")).touch()
    (directory / "work" / "nowhere").symlink_to("/nonexistent")


def aged(seconds: float) -> Callable[[Path], None]:
    def age(directory: Path) -> None:
        moment = time.time() + seconds
        for path in (*directory.iterdir(), directory, lease_of(directory)):
            os.utime(path, (moment, moment))

    return age


def with_record(content: bytes) -> Callable[[Path], None]:
    return lambda directory: void(lease_of(directory).write_bytes(content))


def void(_: object) -> None:
    return None


def retired(directory: Path) -> None:
    """As if its host had been killed while it was removing it."""
    directory.rename(directory.with_name(f".{directory.name}.012345678"))
    lease_of(directory).unlink()


SHAPES: dict[str, Callable[[Path], None]] = {
    "full": filled,
    "locked": locked,
    "deep": deep,
    "odd files": odd_files,
    "old": aged(-30 * DAY),
    "of tomorrow": aged(+30 * DAY),
    "only a lease": shutil.rmtree,
    "half removed": retired,
    "a lease that says nothing": with_record(b""),
    "a lease of rubbish": with_record(b"\xff\x00{"),
    "a lease of a list": with_record(b"[1]"),
    "a deep lease": with_record(b"[" * 50_000),
    "a large lease": with_record(b'{"cookie": "' + b"a" * 10_000_000),
    "a lease with odd values": with_record(b'{"cookie": 3, "sockets": ["a"], "host": null, "warden": "x"}'),
    "a lease with a NUL": with_record(json.dumps({"sockets": "/a\0b", "cookie": "\0"}).encode()),
    "a lease that nobody may read": lambda directory: lease_of(directory).chmod(0o000),
}


def test_the_next_host_removes_what_dead_kernels_have_left_whatever_its_shape(place: Path) -> None:
    for shape, change in SHAPES.items():
        change(dead_kernel(place, shape.replace(" ", "-")))
    with BlockingRegistry():
        traces.eventually(lambda: not files_of(place), within=BOUND)
        assert files_of(place) == []


@NEEDS_ROOT
def test_what_is_removed_needs_no_more_rights_than_its_user_has() -> None:
    """Root could remove anything: here the host is somebody who must unlock what a cell has locked."""

    def plant(runtime: Path) -> None:
        (runtime / "hermes-kernel").mkdir(mode=0o700)
        locked(dead_kernel(runtime))
        for path in (runtime, *runtime.rglob("*")):
            os.chown(path, ANOTHER_USER, ANOTHER_USER, follow_symlinks=False)

    with host(FORK, before=unprivileged(ANOTHER_USER), prepare=plant) as one:
        assert traces.eventually(lambda: not kernels_in(one.runtime), within=BOUND), kernels_in(one.runtime)


def precious(runtime: Path) -> Path:
    """A directory that has nothing to do with kernels."""
    directory = runtime / "precious"
    (directory / "sub").mkdir(parents=True)
    (directory / "file").write_text("precious")
    (directory / "sub" / "file").write_text("precious")
    (directory / "sub" / "file").chmod(0o400)
    (directory / "sub").chmod(0o500)
    return directory


def contents(directory: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path): (path.stat().st_mode, path.read_text() if path.is_file() else "")
        for path in (directory, *sorted(directory.rglob("*")))
        if path.exists()
    }


def link_as_kernel(base: Path, victim: Path) -> None:
    (base / "k").symlink_to(victim)
    (base / "k.lease").write_text(json.dumps({"cookie": uuid.uuid4().hex, "sockets": str(base / "k")}))


def link_inside(base: Path, victim: Path) -> None:
    (dead_kernel(base.parent, "k") / "work" / "link").symlink_to(victim)


def sockets_in(name: str) -> Callable[[Path, Path], None]:
    def plant(base: Path, victim: Path) -> None:
        dead_kernel(base.parent, "k", sockets=name.format(victim=victim))

    return plant


def sockets_of_that_name(base: Path, victim: Path) -> None:
    (base / f"{victim.name}.lease").write_text(json.dumps({"sockets": str(victim)}))


def sockets_behind_a_link(base: Path, victim: Path) -> None:
    victim.chmod(0o700)
    (victim / "k").mkdir()
    (base.parent / "link").symlink_to(victim)
    dead_kernel(base.parent, "k", sockets=str(base.parent / "link" / "k"))


def lease_called(name: str) -> Callable[[Path, Path], None]:
    def plant(base: Path, victim: Path) -> None:
        (base / name).write_text(json.dumps({"sockets": str(victim)}))

    return plant


def link_as_lease(base: Path, victim: Path) -> None:
    (base / "k.lease").symlink_to(victim / "file")


def hard_link_as_lease(base: Path, victim: Path) -> None:
    os.link(victim / "file", base / "k.lease")


def fifo_as_lease(base: Path, victim: Path) -> None:
    os.mkfifo(base / "k.lease")


def directory_as_lease(base: Path, victim: Path) -> None:
    (base / "k.lease").mkdir()
    (base / "k.lease" / "link").symlink_to(victim)


def link_that_looks_retired(base: Path, victim: Path) -> None:
    (base / ".k.012345678").symlink_to(victim)


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "a link in the place of a directory": link_as_kernel,
    "a link inside a directory": link_inside,
    "a link that looks like what is being removed": link_that_looks_retired,
    "sockets in a foreign directory": sockets_in("{victim}"),
    "sockets in a part of one": sockets_in("{victim}/sub"),
    "sockets on a way around": sockets_in("{victim}/../precious"),
    "sockets at a relative place": sockets_in("../precious"),
    "sockets in a foreign directory with the name of the lease": sockets_of_that_name,
    "sockets behind a link": sockets_behind_a_link,
    "a lease of this directory": lease_called("..lease"),
    "a lease of the one above": lease_called("...lease"),
    "a lease without a name": lease_called(".lease"),
    "a lease with a name of blanks": lease_called("  .lease"),
    "a link in the place of a lease": link_as_lease,
    "a hard link in the place of a lease": hard_link_as_lease,
    "a fifo in the place of a lease": fifo_as_lease,
    "a directory in the place of a lease": directory_as_lease,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_nothing_but_what_kernels_had_is_ever_removed_or_changed(
    place: Path, plant: Callable[[Path, Path], None]
) -> None:
    victim = precious(place)
    beside = place / "hermes-kernel" / "no-kernel"
    beside.mkdir()
    (beside / "file").write_text("not ours")
    plant(place / "hermes-kernel", victim)
    before = {**contents(victim), **contents(beside)}
    assert is_swept(place)
    assert {**contents(victim), **contents(beside)} == before


@NEEDS_ROOT
def test_directories_and_leases_of_another_user_stay(place: Path) -> None:
    theirs = dead_kernel(place)
    for path in (theirs, lease_of(theirs)):
        os.chown(path, ANOTHER_USER, ANOTHER_USER)
    mixed = dead_kernel(place)
    os.chown(mixed, ANOTHER_USER, ANOTHER_USER)
    assert is_swept(place)
    assert theirs.exists()
    assert lease_of(theirs).exists()
    assert mixed.exists()


def test_numbers_in_the_record_of_a_dead_kernel_are_never_signalled(place: Path) -> None:
    """They may be anybody's by now."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            who = {"pid": stranger.pid, "started": 1}
            dead_kernel(place, warden=who, kernel=who, host=who, zygote=who, pid=stranger.pid)
            assert is_swept(place)
            assert not traces.is_gone(psutil.Process(stranger.pid))
        finally:
            stranger.kill()


@NEEDS_ROOT
def test_a_record_with_the_mark_of_somebody_who_lives_ends_nobody() -> None:
    """In a pid namespace of the host's own: others of this user could be ended, too."""
    with host(SPARE, before=in_its_own_world()) as one:
        assert one.cell("x = 1")["status"] == "ok"
        line = one.tell("line")
        for name, pid in line.items():
            dead_kernel(one.runtime, name, cookie=one.tell("cookie_of", pid=pid))
        one.tell("sweep")
        planted = [one.runtime / "hermes-kernel" / name for name in line]
        assert traces.eventually(lambda: not any(path.exists() for path in planted))
        assert one.tell("line") == line
        assert one.cell("x")["value"] == "1"


@BOTH
def test_processes_that_have_outlived_all_that_should_end_them_are_ended_by_the_next_host(
    place: Path, tmp_path: Path, way: Way
) -> None:
    code = (
        "import subprocess, sys, time, os\n"
        f"subprocess.Popen([sys.executable, {LINGER!r}, {str(tmp_path)!r}, 'up'], start_new_session=True)\n"
        f"while not os.path.exists({str(tmp_path / 'up')!r}): time.sleep(0.01)"
    )
    with host(way, runtime=place) as one:
        assert one.cell(code)["status"] == "ok"
        line = one.family()
        end_all_above(one.pid, line.zygote, line.warden)
        one.wait()
        assert all_gone([line.zygote, line.warden, line.kernel], within=BOUND)
        survivors = processes_of(tmp_path)
        assert len(survivors) == 1
        assert files_of(place)
        with BlockingRegistry():
            assert all_gone(survivors, within=BOUND)
            assert traces.eventually(lambda: not files_of(place), within=BOUND), files_of(place)


def test_sockets_that_stand_elsewhere_go_with_what_a_dead_kernel_has_left(place: Path) -> None:
    """The path of the runtime directory is too long for them, and so is that of temporary files."""
    long = place / ("x" * 90)
    (long / "tmp").mkdir(parents=True, mode=0o700)
    long.chmod(0o700)
    before = traces.short_socket_directories("/tmp")
    with host(FORK, runtime=long) as one:
        assert one.cell("1")["status"] == "ok"
        line = one.family()
        end_all_above(one.pid, line.zygote, line.warden)
        one.wait()
    assert traces.short_socket_directories("/tmp") - before
    with host(FORK, runtime=long):
        gone = traces.eventually(lambda: traces.short_socket_directories("/tmp") <= before, within=BOUND)
        assert gone, traces.short_socket_directories("/tmp") - before


@pytest.mark.parametrize("way", [FORK, SPARE, SPAWN], ids=["fork", "spare", "spawn"])
def test_what_a_kernel_leaves_is_found_wherever_its_sockets_stand(
    make_registry: Make, place: Path, way: Way
) -> None:
    registry = make_registry(limits=Limits(**way), socket_dir=place)
    if way["spare_kernels"]:
        wait_for_spare(registry)
    died = registry.execute("import os; print('last', end=''); os._exit(3)", owner="a", timeout=20)
    assert (died.status, died.exit_code, died.stdout) == (CellStatus.DIED, 3, "last")
    assert registry.execute("get_ipython().kernel.log.warning('said'); 1", owner="a").stderr == ""
    assert "said" in (directory_of(registry) / "kernel.log").read_text()


WITHOUT_A_LOGIN = """
import os, signal, sys
from hermes_kernel import BlockingRegistry, Limits

registry = BlockingRegistry(limits=Limits(spare_kernels=int(sys.argv[1])))
for owner in "ab":
    assert registry.execute("40 + 2", owner=owner, timeout=30).value == "42"
print(*{str(registry.manager(owner).ip) for owner in "ab"}, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
registry.close()
"""


@pytest.mark.skipif(not Path(MEMORY).is_dir(), reason="no file system in memory")
@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("spares", [0, 1])
def test_without_a_login_the_sockets_in_memory_go_with_their_host(place: Path, spares: int, end: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    before = traces.short_socket_directories(MEMORY)
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_LOGIN, str(spares), end],
        env={**env, "TMPDIR": str(place)}, stdout=subprocess.PIPE, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == (0 if end == "closed" else -signal.SIGKILL)
    sockets = ended.stdout.split()
    assert len(sockets) == 2
    assert all(Path(ip).is_relative_to(MEMORY) for ip in sockets)
    assert traces.eventually(lambda: traces.short_socket_directories(MEMORY) <= before, within=BOUND)
    base = place / f"hermes-kernel-{os.getuid()}"
    assert traces.eventually(lambda: not list(base.iterdir()), within=BOUND), list(base.iterdir())


@NEEDS_NAMESPACES
def test_nothing_outlives_a_namespace_whoever_is_killed(place: Path, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time, os\n"
        f"subprocess.Popen([sys.executable, {LINGER!r}, {str(tmp_path)!r}, 'up'], start_new_session=True)\n"
        f"while not os.path.exists({str(tmp_path / 'up')!r}): time.sleep(0.01)"
    )
    with host(NAMESPACE, runtime=place) as one:
        assert one.cell(code)["status"] == "ok"
        line = one.family()
        survivors = processes_of(tmp_path)
        assert len(survivors) == 1
        end_all_above(one.pid, line.zygote, line.warden)
        one.wait()
        assert all_gone([line.zygote, line.warden, line.first, line.kernel, *survivors], within=BOUND)
    assert is_swept(place)


def end_all_above(pid: int, zygote: psutil.Process, warden: psutil.Process) -> None:
    """Kill a host and its helpers so that none of them has the time to clean up after another."""
    host_process = psutil.Process(pid)
    for process in (host_process, zygote, warden):
        process.suspend()
    for process in (warden, zygote, host_process):  # the end of each wakes the one below it
        process.kill()


# -- live kernels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "seconds"), [(SPARE, -8 * DAY), (SPAWN, 8 * DAY)], ids=["old", "of tomorrow"]
)
def test_files_of_a_live_kernel_stay_whatever_their_time(place: Path, way: Way, seconds: float) -> None:
    with host(way, runtime=place) as one:
        assert one.cell("open('kept', 'w').write('kept')")["status"] == "ok"
        if way["spare_kernels"]:
            one.wait_for_spare()
        moment = time.time() + seconds
        for path in (place / "hermes-kernel").rglob("*"):
            os.utime(path, (moment, moment), follow_symlinks=False)
        before = files_of(place)
        assert is_swept(place)
        assert files_of(place) == before
        assert one.cell("open('kept').read()")["value"] == "'kept'"
        assert one.cell("1", owner="b")["status"] == "ok"


def test_hosts_that_share_a_place_start_sweep_run_and_die_without_touching_each_others_kernels(
    place: Path,
) -> None:
    start = threading.Barrier(4)

    def live(number: int) -> None:
        with host(SPARE, runtime=place) as one:
            start.wait()
            for round_ in range(2):
                for owner in "ab":
                    code = f"open('kept', 'a').write('{number}{owner}'); open('kept').read()"
                    assert one.cell(code, owner=owner)["value"] == repr(f"{number}{owner}" * (round_ + 1))
            if number % 2:
                one.kill()
                one.wait()

    with ThreadPoolExecutor(4) as pool:
        for outcome in [pool.submit(live, number) for number in range(4)]:
            outcome.result()
    with host(
        SPARE, runtime=place
    ) as last:  # a spare that was just being made is for the next host to remove
        last.cell("1")
    assert traces.eventually(lambda: not files_of(place) and not processes_of(place)), files_of(place)


@pytest.mark.parametrize("way", [FORK, SPAWN], ids=["fork", "spawn"])
def test_a_kernel_whose_connection_file_and_sockets_are_gone_goes_on(make_registry: Make, way: Way) -> None:
    registry = make_registry(limits=Limits(**way))

    def double(n: int) -> int:
        return 2 * n

    assert registry.execute("import hermes_tools; x = 1", owner="a", tools=[double]).status is CellStatus.OK
    directory = directory_of(registry)
    for path in (*directory.glob("k-*"), directory / "connection.json"):
        path.unlink()
    assert registry.execute("x", owner="a").value == "1"
    called = registry.execute("hermes_tools.double(21)", owner="a", tools=[double], timeout=10)
    assert called.value == "42" or (called.error is not None and called.error.ename == ToolError.__name__)
    cut = registry.execute("import time; time.sleep(60)", owner="a", timeout=0.2)
    assert (cut.status, cut.kernel.ended) == (CellStatus.TIMED_OUT, True)
    assert registry.execute("'x' in globals()", owner="a").value == "False"
    assert registry.execute("hermes_tools.double(21)", owner="a", tools=[double]).value == "42"


@pytest.mark.parametrize(
    ("way", "what"), [(SPARE, "all"), (SPAWN, "its directory")], ids=["all", "its directory"]
)
def test_a_cleaner_that_removes_directories_of_live_kernels_costs_at_most_their_state(
    make_registry: Make, place: Path, way: Way, what: str
) -> None:
    registry = make_registry(limits=Limits(**way))
    registry.execute("x = 1", owner="a")
    tree = family(kernel_of(registry)).warden.children(recursive=True)
    gone = [directory_of(registry)] if what == "its directory" else list((place / "hermes-kernel").iterdir())
    for path in gone:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    after = registry.execute("print('output'); globals().get('x')", owner="a", timeout=20)
    assert after.stdout == "output\n"
    assert (after.value, after.kernel.lost) in (("1", None), (None, Loss.DIED))
    died = registry.execute("print('last words'); import os; os._exit(3)", owner="a")
    assert (died.status, died.exit_code) == (CellStatus.DIED, 3)
    assert registry.execute("6 * 7", owner="a").value == "42"
    assert registry.execute("6 * 7", owner="b").value == "42"
    registry.close()
    assert all_gone(tree, within=BOUND)
    assert traces.eventually(lambda: not files_of(place), within=BOUND), files_of(place)


def directory_of(registry: BlockingRegistry) -> Path:
    (info,) = (info for info in registry.kernels() if info.owner.session == "a")
    assert info.connection_file is not None
    return Path(info.connection_file).parent


# -- a file system that does not want to ------------------------------------------------------------------


def unprivileged(uid: int) -> tuple[str, ...]:
    return ("unshare", "-m", sys.executable, str(CONTAINMENT / "unprivileged.py"), str(uid))


@contextmanager
def host_on_a_small_disk(way: Way) -> Iterator[tuple[Any, Path]]:
    """A host whose runtime directory is a file system of its own, and that as it can be reached from here."""
    mount = 'mount -t tmpfs -o size=2m,mode=700 none "$XDG_RUNTIME_DIR" && mkdir "$TMPDIR" && exec "$@"'
    with host(way, before=("unshare", "-m", "sh", "-c", mount, "sh")) as one:
        yield one, Path(f"/proc/{one.pid}/root{one.runtime}")


def fill(disk: Path) -> Path:
    """Use up all the space that there is."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (65_536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


@NEEDS_ROOT
def test_without_room_for_its_directory_a_kernel_does_not_start_and_with_room_it_does() -> None:
    with host_on_a_small_disk(FORK) as (one, disk):
        assert one.cell("1", owner="first")["status"] == "ok"
        before = kernels_in(disk)
        filler = fill(disk)
        answer = one.cell("1")
        assert answer["raised"] == "KernelStartError"
        assert "No space left on device" in answer["text"]
        assert str(one.runtime) in answer["text"]
        assert answer["seconds"] < 3
        assert kernels_in(disk) == before
        assert one.cell("6 * 7", owner="first")["value"] == "42"
        filler.unlink()
        assert one.cell("6 * 7")["value"] == "42"


@NEEDS_ROOT
@BOTH
def test_on_a_disk_that_became_full_a_kernel_runs_on_and_its_output_is_whole(way: Way) -> None:
    with host_on_a_small_disk(way) as (one, disk):
        assert one.cell("x = 1")["status"] == "ok"
        fill(disk)
        for size in (10, 300_000):
            answer = one.cell(f"print('x' * {size}); x")
            assert (answer["status"], answer["value"], answer["signal"]) == ("ok", "1", None), answer
            assert len(answer["stdout"]) == size + 1 or "TRUNCATED" in answer["text"]
        raw = one.cell("import os; os.write(1, b'raw' * 1000); os.system('echo child'); x")
        assert (raw["status"], raw["value"]) == ("ok", "1")
        assert raw["stdout"].endswith("child\n")
        assert (
            one.cell("open('file', 'w').write('x' * 10_000)")["text"]
            .strip()
            .endswith("No space left on device")
        )
        assert one.cell("import sys; sys.exit(3)")["code"] == 3


@NEEDS_ROOT
def test_on_a_disk_that_cannot_be_written_any_more_a_start_is_a_clear_error() -> None:
    with host_on_a_small_disk(FORK) as (one, _):

        def remount(mode: str) -> None:
            enter = ["nsenter", "-t", str(one.pid), "-m"]
            subprocess.run([*enter, "mount", "-o", f"remount,{mode}", one.runtime], check=True)

        remount("ro")
        answer = one.cell("1")
        assert answer["raised"] == "KernelStartError"
        assert "Read-only file system" in answer["text"]
        assert answer["seconds"] < 3
        remount("rw")
        assert one.cell("6 * 7")["value"] == "42"


# -- numbers that are used again --------------------------------------------------------------------------


@NEEDS_ROOT
def test_whoever_has_the_number_of_one_that_has_died_is_not_taken_for_it() -> None:
    """In a pid namespace of the host's own, where one can choose the number of the next process."""
    with host(FORK, before=in_its_own_world()) as one:
        taken = []
        for who in ("kernel", "warden", "zygote"):
            assert one.cell("1")["status"] == "ok"
            taken.append(one.tell("line")[who])
            assert one.tell("take_number", pid=taken[-1]), who
            assert one.cell("import time; time.sleep(60)", timeout=0.1)["status"] in ("timed_out", "died")
            assert one.cell("6 * 7", reset=True)["value"] == "42"
            assert one.tell("close_owner", owner="a") == 1
        one.tell("close")
        assert [one.tell("stranger_lives", pid=pid) for pid in taken] == [True] * 3
