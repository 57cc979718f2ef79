import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermes_kernel.process.published import (
    DIRECTORY,
    SPEC,
    place_of,
    publish,
    publish_dir,
    published_of,
    read_published,
    withdraw,
    withdraw_halves,
)
from hermes_kernel.process.sessions import live_sessions
from hermes_kernel.process.staging import SOCKET_PATH_LIMIT, Staging
from hermes_kernel.process.sweep import sweep

NAME = "0123abcd"
PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
INFO: dict[str, object] = {
    "transport": "ipc",
    "ip": "/run/k",
    **{name: number for number, name in enumerate(PORTS, start=1)},
    "key": "the key",
    "signature_scheme": "hmac-sha256",
    "kernel_name": "hermes",
}

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make somebody else's file")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the kernel is published; there is nothing yet."""
    return place_of(tmp_path / "jupyter" / DIRECTORY, NAME)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def everything(directory: Path) -> dict[str, object]:
    """What lies below a directory: what it is or says."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        kind = stat.S_IFMT(path.lstat().st_mode)
        found[str(path)] = path.read_bytes() if stat.S_ISREG(kind) else kind
    return found


# -- publish ----------------------------------------------------------------------------------------------


def test_front_ends_look_in_the_runtime_directory_of_jupyter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    assert place_of(publish_dir(), NAME) == tmp_path / "external_kernels" / f"hermes-{NAME}.json"


def test_what_is_published_names_the_spec_that_starts_nothing(place: Path) -> None:
    publish(place, INFO)
    assert json.loads(place.read_text()) == {**INFO, "kernel_name": "hermes-live"}


def test_file_and_directories_are_their_users_alone_whatever_the_umask(place: Path) -> None:
    before = os.umask(0)
    try:
        publish(place, INFO)
    finally:
        os.umask(before)
    assert (mode(place), mode(place.parent), mode(place.parent.parent)) == (0o600, 0o700, 0o700)


def test_a_file_that_is_there_is_replaced_and_what_a_link_points_to_is_not(
    place: Path, tmp_path: Path
) -> None:
    publish(place, {"key": "old"})
    publish(place, INFO)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place.unlink()
    place.symlink_to(precious)
    publish(place, INFO)
    assert json.loads(place.read_text())["key"] == "the key"
    assert not place.is_symlink()
    assert precious.read_text() == "precious"


def test_a_front_end_never_sees_a_file_that_is_not_whole(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []
    replace = os.replace

    def watched(half: Path, whole: Path) -> None:
        assert json.loads(half.read_text())["key"] == "the key"
        seen.append(list(place.parent.iterdir()))
        replace(half, whole)

    monkeypatch.setattr(os, "replace", watched)
    publish(place, INFO)
    assert seen == [[]]
    assert list(place.parent.iterdir()) == [place]
    assert list(place.parent.parent.iterdir()) == [place.parent]


def test_what_cannot_be_written_leaves_nothing(place: Path) -> None:
    with pytest.raises(TypeError):
        publish(place, {"key": object()})
    assert list(place.parent.parent.rglob("*")) == [place.parent]


def test_what_cannot_be_put_in_its_place_leaves_nothing(place: Path) -> None:
    place.mkdir(parents=True)
    place.parent.chmod(0o700)
    place.parent.parent.chmod(0o700)
    with pytest.raises(OSError, match=place.name):
        publish(place, INFO)
    assert list(place.parent.parent.rglob("*")) == [place.parent, place]


def open_to_the_group(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    directory.chmod(0o770)


def open_to_all(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    directory.chmod(0o1777)


def below_one_that_is_open(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    directory.parent.chmod(0o777)


def behind_a_link(directory: Path) -> None:
    elsewhere = directory.parent.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    directory.parent.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)


def nowhere(directory: Path) -> None:
    directory.parent.mkdir(mode=0o700)
    directory.symlink_to("nowhere")


def a_file(directory: Path) -> None:
    directory.parent.mkdir(mode=0o700)
    directory.write_text("")


def somebody_elses(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    os.chown(directory, 12345, 12345)


def below_somebody_elses(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    directory.parent.chmod(0o755)
    os.chown(directory.parent, 12345, 12345)


@pytest.mark.parametrize(
    "make",
    [
        open_to_the_group,
        open_to_all,
        below_one_that_is_open,
        behind_a_link,
        nowhere,
        a_file,
        pytest.param(somebody_elses, marks=needs_root),
        pytest.param(below_somebody_elses, marks=needs_root),
    ],
)
def test_nothing_is_published_where_others_could_put_another_file(
    place: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(place.parent)
    before = everything(tmp_path)
    with pytest.raises(OSError, match=r"jupyter"):
        publish(place, INFO)
    assert everything(tmp_path) == before


def test_a_directory_of_ones_own_below_one_where_all_may_write_but_not_rename_will_do(place: Path) -> None:
    place.parent.mkdir(parents=True, mode=0o700)
    place.parent.parent.chmod(0o1777)
    publish(place, INFO)
    assert place.exists()


# -- withdraw ---------------------------------------------------------------------------------------------


def test_what_is_withdrawn_is_gone_and_may_be_withdrawn_again(place: Path) -> None:
    publish(place, INFO)
    for _ in range(2):
        withdraw(place)
        assert list(place.parent.iterdir()) == []
    withdraw(None)


def test_a_directory_in_its_place_stays_and_is_no_error(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "sub").mkdir(parents=True)
    withdraw(place)
    assert (place / "sub").exists()
    assert place.name in caplog.text


# -- what a record says was published ---------------------------------------------------------------------


def test_what_was_published_is_found_by_the_record(place: Path) -> None:
    publish(place, INFO)
    assert published_of(NAME, {"published": str(place)}) == place
    assert published_of(NAME, {}) is None


SPOILT: list[object] = [
    None,
    3,
    "",
    [],
    {"a": 1},
    "/",
    "/dev/stdin",
    "/proc/self/mem",
    "external_kernels/hermes-{name}.json",
    "/" + "x" * 5000 + "/external_kernels/hermes-{name}.json",
    "/\ud800/external_kernels/hermes-{name}.json",
    "{place}\0",
    "{place}/..",
    "{directory}",
    "{directory}/hermes-other.json",
    "{directory}/x/../hermes-{name}.json",
]


@pytest.mark.parametrize("said", SPOILT, ids=range(len(SPOILT)))
def test_a_record_that_a_cell_has_spoilt_names_no_file(place: Path, said: object) -> None:
    publish(place, INFO)
    publish(place.with_name("hermes-other.json"), INFO)
    if isinstance(said, str):
        for word, meant in (("place", place), ("directory", place.parent), ("name", NAME)):
            said = said.replace(f"{{{word}}}", str(meant))
    assert published_of(NAME, {"published": said}) is None


def rubbish(path: Path) -> None:
    path.write_bytes(b"\xff\0{")


def a_list(path: Path) -> None:
    path.write_text(f'["{SPEC}"]')


def of_another_spec(path: Path) -> None:
    path.write_text('{"kernel_name": "python3"}')


def deep(path: Path) -> None:
    path.write_text("[" * 10_000)


def large(path: Path) -> None:
    path.write_text(json.dumps({"kernel_name": SPEC, "more": "x" * 1_000_000}))


def a_large_number(path: Path) -> None:
    path.write_text("9" * 10_000)


def empty(path: Path) -> None:
    path.write_text("")


def a_link(path: Path) -> None:
    publish(path.parent.with_name("elsewhere") / "precious.json", INFO)
    path.symlink_to(path.parent.with_name("elsewhere") / "precious.json")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("precious")


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


FORGED: list[dict[str, object]] = [
    {"transport": "nope"},
    {"transport": ["tcp"]},
    {"transport": "tcp", "ip": "no such"},
    {"transport": "tcp", "ip": "::1"},
    {"transport": "tcp", "ip": "127.0.0.1:1"},
    {"transport": "tcp", "ip": 2130706433},
    {"ip": ""},
    {"ip": 5},
    {"ip": "/run/\0"},
    {"ip": "/run/\ud800"},
    {"ip": "/" + "x" * (SOCKET_PATH_LIMIT - len("/-5") + 1)},
    *({name: "x"} for name in PORTS),
    {"shell_port": 0},
    {"shell_port": -1},
    {"shell_port": 65_536},
    {"shell_port": 1.0},
    {"shell_port": True},
    {"shell_port": None},
    {"key": 5},
    {"key": "k\xe9"},
    {"signature_scheme": "foo"},
    {"signature_scheme": "hmac-foo"},
    {"signature_scheme": 5},
]


@pytest.mark.parametrize("change", FORGED, ids=range(len(FORGED)))
def test_what_no_client_can_connect_to_is_no_connection(place: Path, change: dict[str, object]) -> None:
    publish(place, {**INFO, **change})
    assert read_published(place) is None
    assert published_of(NAME, {"published": str(place)}) == place  # the sweep removes it


@pytest.mark.parametrize("name", sorted({*INFO} - {"kernel_name"}))
def test_what_lacks_a_part_of_a_connection_is_none(place: Path, name: str) -> None:
    publish(place, {key: value for key, value in INFO.items() if key != name})
    assert read_published(place) is None


@pytest.mark.parametrize(
    "ip",
    [
        {"ip": "k"},
        {"ip": "/" + "x" * (SOCKET_PATH_LIMIT - len("/-5"))},
        {"transport": "tcp", "ip": "127.0.0.1"},
    ],
)
def test_what_was_published_is_read_without_what_is_none_of_it(place: Path, ip: dict[str, object]) -> None:
    publish(place, {**INFO, **ip, "curve_publickey": 5, "more": [1]})
    assert read_published(place) == {**INFO, **ip, "kernel_name": SPEC}


def another_users(path: Path) -> None:
    publish(path, INFO)
    os.chown(path, 12345, 12345)


PLANTED = pytest.mark.parametrize(
    "plant",
    [
        rubbish,
        a_list,
        of_another_spec,
        deep,
        large,
        a_large_number,
        empty,
        a_link,
        a_fifo,
        a_directory,
        a_device,
        pytest.param(another_users, marks=needs_root),
    ],
)


@PLANTED
def test_what_publish_has_not_written_was_not_published(place: Path, plant: Callable[[Path], None]) -> None:
    place.parent.mkdir(parents=True, mode=0o700)
    plant(place)
    assert published_of(NAME, {"published": str(place)}) is None
    assert read_published(place) is None


# -- its place in the sweep, and among the live sessions --------------------------------------------------


@pytest.fixture
def dead(runtime: Path, place: Path) -> Iterator[Staging]:
    """What a host has left of a kernel that it had published: directory and lease, held by nobody."""
    made = Staging.create(NAME)
    made.record(published=str(place))
    made.lease.close()
    yield made
    made.remove()


@pytest.mark.usefixtures("leaves_nothing")
def test_the_sweep_removes_what_a_dead_kernel_had_published(dead: Staging, place: Path) -> None:
    publish(place, INFO)
    publish(place.with_name("hermes-other.json"), INFO)
    assert sweep() == 1
    assert [path.name for path in place.parent.iterdir()] == ["hermes-other.json"]
    assert not dead.path.exists()


@pytest.mark.usefixtures("leaves_nothing")
def test_the_sweep_leaves_alone_what_a_live_kernel_has_published(place: Path) -> None:
    made = Staging.create(NAME)
    try:
        made.record(published=str(place))
        publish(place, INFO)
        assert sweep() == 0
        assert place.exists()
    finally:
        made.lease.close()
        made.remove()


@PLANTED
@pytest.mark.usefixtures("leaves_nothing")
def test_whatever_stands_in_its_place_the_sweep_goes_on_and_touches_nothing_else(
    dead: Staging, place: Path, plant: Callable[[Path], None]
) -> None:
    place.parent.mkdir(parents=True, mode=0o700)
    plant(place)
    before = everything(place.parent.parent)
    next_one = Staging.create("z")  # looked at after the other
    next_one.lease.close()
    assert sweep() == 2
    assert everything(place.parent.parent) == before
    assert not dead.path.exists()
    assert not next_one.path.exists()


@PLANTED
@pytest.mark.usefixtures("leaves_nothing")
def test_whatever_stands_in_its_place_a_live_session_is_shown(
    place: Path, plant: Callable[[Path], None]
) -> None:
    place.parent.mkdir(parents=True, mode=0o700)
    plant(place)
    made = Staging.create(NAME)
    try:
        made.record(published=str(place))
        made.write_session({"kernel_id": NAME})
        (session,) = live_sessions()
        assert (session.kernel_id, session.published) == (NAME, None)
    finally:
        made.lease.close()
        made.remove()


@pytest.mark.usefixtures("leaves_nothing")
def test_a_live_session_says_where_it_is_published_if_one_can_connect(place: Path) -> None:
    made = Staging.create(NAME)
    try:
        made.record(published=str(place))
        made.write_session({"kernel_id": NAME})
        publish(place, INFO)
        assert [session.published for session in live_sessions()] == [place]
        publish(place, {**INFO, "shell_port": "x"})
        assert [session.published for session in live_sessions()] == [None]
    finally:
        made.lease.close()
        made.remove()


def test_what_a_host_that_was_killed_while_it_published_has_left_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    directory.mkdir(mode=0o700)
    record = {"published": str(place_of(directory, "k1"))}
    half = tmp_path / ".hermes-k1.json.0123abcd"
    others = [
        tmp_path / name for name in (".hermes-k2.json.0123abcd", ".hermes-k1.json.0123abcde", "note.txt")
    ]
    for file in (half, *others):
        file.write_text("{}")
    linked = tmp_path / ".hermes-k1.json.89abcdef"
    linked.symlink_to(others[-1])
    withdraw_halves("k1", record)
    assert not half.exists()
    assert all(file.exists() for file in others)
    assert linked.is_symlink()
    withdraw_halves("k2", record)
    withdraw_halves("k1", {})
    assert others[0].exists()
