import json
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_kernel.errors import ConfigError
from hermes_kernel.kernel.rest import remains_in
from hermes_kernel.process import staging
from hermes_kernel.process.launch import StreamRest
from hermes_kernel.process.staging import (
    LANDING_SIZE,
    REST_SIZE,
    SOCKET_PATH_LIMIT,
    Staging,
    StagingError,
    check_socket_dir,
)
from hermes_kernel.process.sweep import sweep
from hermes_kernel.sidecar.streams import MARK_SIZE, REST_REGION

# hk-<user>-<8 digits>/k-5 must still fit behind it.
LONGEST_SOCKET_DIR = SOCKET_PATH_LIMIT - len(f"/hk-{os.getuid()}-12345678/k-5")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def base(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return runtime / "hermes-kernel"


def test_a_kernels_directory_is_private_and_is_removed_whole(base: Path) -> None:
    made = Staging.create("k1")
    made.write_connection_file({"key": "secret"})
    assert made.path == base / "k1"
    assert mode(made.path) == mode(base) == mode(made.work) == mode(made.ipython) == 0o700
    assert {mode(p) for p in made.path.iterdir() if p.is_file()} == {0o600}
    assert json.loads(made.connection_file.read_text()) == {"key": "secret"}
    made.remove()
    made.remove()
    assert not made.path.exists()


def test_what_a_cell_has_locked_is_removed_too(base: Path) -> None:
    made = Staging.create("k1")
    locked = made.work / "a" / "b"
    locked.mkdir(parents=True)
    (locked / "file").write_text("x")
    (made.work / "link").symlink_to(base.parent)
    locked.chmod(0)
    (made.work / "a").chmod(0)
    made.remove()
    assert not made.path.exists()
    assert base.parent.exists()


def test_a_directory_is_never_taken_over(base: Path) -> None:
    made = Staging.create("k1")
    with pytest.raises(StagingError, match="k1"):
        Staging.create("k1")
    assert made.work.exists()
    made.remove()


@pytest.mark.parametrize("kernel_id", ["../../etc", "a/b", "", ".", "..", "x" * 300, "é\ud800\0"])
def test_no_kernel_id_leaves_the_base_directory(base: Path, kernel_id: str) -> None:
    made = Staging.create(kernel_id)
    assert made.path.parent == base
    made.remove()


def test_a_base_directory_that_others_can_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "hermes-kernel").mkdir(mode=0o755)
    with pytest.raises(StagingError, match="not a private directory"):
        Staging.create("k1")


def test_a_base_directory_behind_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "hermes-kernel").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StagingError, match="not a private directory"):
        Staging.create("k1")


def test_a_base_directory_below_one_that_everybody_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    with pytest.raises(StagingError, match="written by others"):
        Staging.create("k1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make somebody else's directory")
def test_the_runtime_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert not staging.runtime_base().is_relative_to(tmp_path)


def test_sockets_stand_in_the_kernels_directory_if_their_paths_fit(base: Path) -> None:
    made = Staging.create("k1")
    assert made.sockets.parent == made.path
    made.remove()


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without a runtime directory, and the place for temporary files."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(prefix="hkt-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)


@pytest.mark.skipif(not Path(staging.MEMORY).is_dir(), reason="no file system in memory")
def test_without_a_login_sockets_stand_in_memory_and_go_with_the_rest(no_login: Path) -> None:
    made = Staging.create("k1")
    assert made.path == no_login / f"hermes-kernel-{os.getuid()}" / "k1"
    assert (made.sockets.parent.parent, mode(made.sockets.parent)) == (Path(staging.MEMORY), 0o700)
    assert str(made.sockets.parent) in made.remains
    renamed = made.rename("k2")
    assert renamed.sockets.parent.is_dir()
    assert not made.sockets.parent.exists()
    renamed.lease.close()
    sweep()  # whoever has made it is gone
    assert not renamed.sockets.parent.exists()
    assert not renamed.path.exists()
    again = Staging.create("k2")
    again.remove()
    assert not again.sockets.parent.exists()


@pytest.mark.parametrize("what", ["nothing", "a file", "anybody's", "a link", "not root's"])
def test_memory_that_is_no_safe_place_holds_no_sockets(
    no_login: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    memory = tmp_path / "memory"
    if what == "a file":
        memory.write_text("")
    elif what == "a link":
        memory.symlink_to(staging.MEMORY)
    elif what != "nothing":
        memory.mkdir()
        memory.chmod(0o777 if what == "anybody's" else 0o1777)
    if what == "not root's" and os.getuid() == 0:
        os.chown(memory, 12345, 12345)
    monkeypatch.setattr(staging, "MEMORY", str(memory))
    made = Staging.create("k1")
    assert made.sockets.parent == made.path
    made.remove()


@pytest.mark.skipif(not Path(staging.MEMORY).is_dir(), reason="no file system in memory")
def test_memory_in_which_a_sandbox_lets_no_socket_stand_holds_none(
    no_login: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    staging._holds_sockets.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "bind", refuse)
        made = Staging.create("k1")
    staging._holds_sockets.cache_clear()
    assert made.sockets.parent == made.path
    made.remove()
    assert not list(Path(staging.MEMORY).glob("hk-probe-*"))


def test_sockets_of_a_long_runtime_directory_stand_in_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    made = Staging.create("k1")
    try:
        assert made.path.is_relative_to(long)
        assert not made.sockets.is_relative_to(long)
        assert mode(made.sockets.parent) == 0o700
    finally:
        made.remove()
    assert not made.sockets.parent.exists()


@pytest.mark.parametrize("length", range(SOCKET_PATH_LIMIT - 30, SOCKET_PATH_LIMIT + 1))
def test_every_socket_path_can_be_bound_or_its_directory_is_refused(
    base: Path, tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    directory = Path("/tmp") / ("s" * (length - len("/tmp/")))
    directory.mkdir(mode=0o700)
    try:
        if length > LONGEST_SOCKET_DIR:
            with pytest.raises(ConfigError, match=str(directory)):
                check_socket_dir(str(directory))
            return
        checked = check_socket_dir(str(directory))
        made = Staging.create("kernel-with-a-long-name-0123456789", socket_dir=checked)
        try:
            info = made.ipc_addresses()
            for port in (value for key, value in info.items() if key.endswith("_port")):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.bind(f"{info['ip']}-{port}")
        finally:
            made.remove()
        assert list(directory.iterdir()) == []
    finally:
        directory.rmdir()


@pytest.mark.parametrize("bad", ["", 3, "a\0b"])
def test_a_socket_dir_that_is_no_path_is_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="socket_dir"):
        check_socket_dir(bad)  # type: ignore[arg-type]


def test_a_socket_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = Path("/tmp") / f"hkt-file-{os.getpid()}"
    file.write_text("")
    try:
        with pytest.raises(ConfigError, match="cannot be used"):
            check_socket_dir(str(file))
    finally:
        file.unlink()


def write_rest(made: Staging, total: int, ring: bytes, *, landing: bytes = b"", landed_at: int = 7) -> None:
    landing = landing.ljust(LANDING_SIZE, b"\0")
    raw = struct.pack("<QQ", total, 7) + ring + struct.pack("<Q", landed_at) + landing
    with open(made.path / "kernel.rest", "r+b") as file:
        file.write(raw)


def test_the_rest_of_a_stream_is_read_in_the_order_in_which_it_was_written(base: Path) -> None:
    made = Staging.create("k1")
    assert made.rest("stdout") == StreamRest()
    ring = bytes(REST_SIZE - 3) + b"abc"
    write_rest(made, REST_SIZE, ring)
    assert made.rest("stdout") == StreamRest(REST_SIZE, ring)
    write_rest(made, REST_SIZE + 2, b"xy" + ring[2:])
    assert made.rest("stdout").rest.endswith(b"abcxy")
    write_rest(made, 3, b"xyz" + bytes(REST_SIZE - 3))
    assert made.rest("stdout") == StreamRest(3, b"xyz")
    made.remove()


def test_what_was_read_and_not_noted_before_the_end_is_part_of_the_rest(base: Path) -> None:
    made = Staging.create("k1")
    ring = b"xyz" + bytes(REST_SIZE - 3)
    write_rest(made, 3, ring, landing=b"ab\n")
    assert made.rest("stdout") == StreamRest(3, b"xyz", b"ab\n")
    write_rest(made, 3, ring, landing=b"ab\n", landed_at=4)
    assert made.rest("stdout") == StreamRest(3, b"xyz")
    made.remove()


@pytest.mark.parametrize(
    "content", [b"", b"short", struct.pack("<Q", 2**64 - 1) + bytes(16 + REST_SIZE + LANDING_SIZE)]
)
def test_a_rest_that_a_cell_has_spoilt_is_no_rest(base: Path, content: bytes) -> None:
    made = Staging.create("k1")
    (made.path / "kernel.rest").write_bytes(content)
    assert (made.rest("stdout"), made.rest("stderr")) == (StreamRest(), StreamRest())
    assert made.last_cell() is None
    made.remove()


def test_each_stream_and_the_mark_have_their_own_part_of_the_file(base: Path) -> None:
    made = Staging.create("k1")
    path = made.path / "kernel.rest"
    assert path.stat().st_size == 2 * REST_REGION + MARK_SIZE
    assert (made.rest("stderr"), made.last_cell()) == (StreamRest(), "")
    rests, mark = remains_in(path)
    for name, text in (("stdout", b"to one"), ("stderr", b"to the other")):
        rests[name].add(text)
    mark.set("a cell")
    assert made.rest("stdout") == StreamRest(6, b"to one")
    assert made.rest("stderr") == StreamRest(12, b"to the other")
    assert made.last_cell() == "a cell"
    made.remove()


@pytest.mark.parametrize("name", ["kernel.rest", "kernel.log"])
def test_a_pipe_or_a_link_in_the_place_of_a_file_is_not_read(base: Path, name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * (24 + REST_SIZE + LANDING_SIZE))
    made = Staging.create("k1")
    (made.path / name).unlink(missing_ok=True)
    os.mkfifo(made.path / name)
    assert (made.rest("stdout"), made.log_tail()) == (StreamRest(), "")
    (made.path / name).unlink()
    (made.path / name).symlink_to(secret)
    assert (made.rest("stdout"), made.log_tail()) == (StreamRest(), "")
    made.remove()


# -- what nobody's lease stands for -----------------------------------------------------------------------


def without_lease(name: str) -> Staging:
    made = Staging.create(name)
    made.lease.remove()
    return made


def dead_without_lease(name: str) -> Staging:
    made = without_lease(name)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{made.sockets}-4")
    return made


def test_the_sweep_removes_what_has_lost_its_lease_and_is_read_by_nobody(base: Path) -> None:
    dead = dead_without_lease("dead")
    assert sweep() == 1
    assert not dead.path.exists()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_the_sweep_leaves_a_kernel_alone_whose_lease_a_cell_has_deleted(base: Path, is_full: bool) -> None:
    alive, dead = without_lease("alive"), dead_without_lease("dead")
    with socket.socket(socket.AF_UNIX) as reader, socket.socket(socket.AF_UNIX) as other:
        reader.bind(f"{alive.sockets}-4")
        reader.listen(0)
        if is_full:
            other.connect(f"{alive.sockets}-4")
        assert sweep() == 1
    assert list(base.iterdir()) == [alive.path]
    assert not dead.path.exists()
    alive.remove()


@pytest.mark.parametrize("is_locked", [False, True])
def test_the_sweep_leaves_a_kernel_alone_of_whose_sockets_it_cannot_tell(base: Path, is_locked: bool) -> None:
    """They stand where the caller or a manager wanted them, or others may not even look."""
    alive = without_lease("alive")
    with socket.socket(socket.AF_UNIX) as reader:
        if is_locked and os.getuid() != 0:  # root may look everywhere
            reader.bind(f"{alive.sockets}-4")
            os.chmod(f"{alive.sockets}-4", 0)
        assert sweep() == 0
    assert list(base.iterdir()) == [alive.path]
    alive.remove()


def test_a_name_that_is_taken_while_the_sweep_looks_is_left_alone(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = dead_without_lease("again")
    made: list[Staging] = []

    def look_first(lease_file: Path) -> bool:
        dead.remove()
        made.append(Staging.create("again"))
        return True

    monkeypatch.setattr(staging, "is_abandoned", look_first)
    assert sweep() == 0
    assert made[0].path.exists()
    assert made[0].lease.path.exists()
    made[0].lease.close()
    made[0].remove()


def test_the_sweep_removes_the_short_directory_of_what_has_lost_its_lease(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    long = runtime / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    dead = dead_without_lease("dead")
    assert dead.sockets.parent != dead.path
    assert sweep() == 1
    assert not dead.sockets.parent.exists()
    shutil.rmtree(long)


def test_the_sweep_leaves_alone_what_is_no_kernels(base: Path, tmp_path: Path) -> None:
    held = Staging.create("held")
    zygote = without_lease("zygote-1")
    (base / "link").symlink_to(tmp_path)
    (base / "file").write_text("x")
    (base / ".hidden").mkdir()
    before = sorted(base.iterdir())
    try:
        assert sweep() == 0
        assert sorted(base.iterdir()) == before
    finally:
        held.lease.close()
        held.remove()
        zygote.remove()
        for stranger in (base / "link", base / "file"):
            stranger.unlink(missing_ok=True)
        (base / ".hidden").rmdir()
