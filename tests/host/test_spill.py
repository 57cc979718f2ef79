import os
import stat
import threading
import time
from pathlib import Path

import pytest

from hermes_kernel.host import spill
from hermes_kernel.host.spill import SpillStore

NAME = "output-0123456789ab.txt"


def test_a_file_is_its_users_alone_and_whole(tmp_path: Path) -> None:
    store = SpillStore(str(tmp_path / "a" / "b"))
    path = store.keep(NAME, b"text")
    assert path == str(tmp_path / "a" / "b" / NAME)
    assert Path(path).read_bytes() == b"text"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "a" / "b").st_mode) == 0o700
    assert store.keep(NAME, b"text") == path
    assert [entry.name for entry in Path(path).parent.iterdir()] == [NAME]


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / NAME).symlink_to(other)
    assert SpillStore(str(tmp_path)).keep(NAME, b"ours") is not None
    assert (other.read_text(), (tmp_path / NAME).read_text()) == ("theirs", "ours")


def test_what_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert SpillStore(str(tmp_path / "file")).keep(NAME, b"x") is None
    assert "cannot be kept" in caplog.text


def test_old_files_of_ours_go_and_nothing_else(tmp_path: Path) -> None:
    old = time.time() - spill.MAX_AGE - 10
    for name in (NAME, "notes.txt", "output-0123456789ab", "display-0123456789ab.png"):
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "output-ffffffffffff.txt").write_bytes(b"young")
    SpillStore(str(tmp_path)).keep("output-eeeeeeeeeeee.txt", b"new")
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"notes.txt", "output-0123456789ab", "output-ffffffffffff.txt", "output-eeeeeeeeeeee.txt"}


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "MAX_TOTAL", 25)
    now = time.time()
    for n in range(5):
        path = tmp_path / f"output-{n:012x}.txt"
        path.write_bytes(b"x" * 10)
        os.utime(path, (now - 100 + n, now - 100 + n))
    SpillStore(str(tmp_path)).keep(NAME, b"new")
    assert {entry.name for entry in tmp_path.iterdir()} == {f"output-{n:012x}.txt" for n in (3, 4)} | {NAME}


def test_threads_that_write_the_same_are_all_told_its_name(tmp_path: Path) -> None:
    store = SpillStore(str(tmp_path))
    told: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: told.append(store.keep(NAME, b"x" * 10_000))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [str(tmp_path / NAME)] * 8
    assert (tmp_path / NAME).stat().st_size == 10_000
