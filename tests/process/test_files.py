"""Files that are replaced: what becomes of their mode, and what is refused beforehand."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from hermes_kernel.process.files import check_replaceable, put_file, replace_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write(file: BinaryIO) -> None:
    file.write(b"new")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize(("given", "less_the_umask"), [(0o666, 0o644), (0o600, 0o600)])
def test_a_new_file_has_the_mode_that_is_given_less_the_umask(
    tmp_path: Path, given: int, less_the_umask: int
) -> None:
    replace_file(tmp_path / "a", write, mode=given)
    assert mode(tmp_path / "a") == less_the_umask


@pytest.mark.parametrize("own", [0o664, 0o666, 0o640, 0o600, 0o755, 0o444])
def test_a_file_that_is_replaced_keeps_its_own_mode(tmp_path: Path, own: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(own)
    replace_file(path, write, mode=0o600)
    assert (path.read_text(), mode(path)) == ("new", own)


def test_a_private_file_has_its_mode_whatever_was_there(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o664)
    link.symlink_to(path)
    replace_file(link, write, mode=0o600, keeps_mode=False)
    assert (path.read_text(), mode(path), link.is_symlink()) == ("new", 0o600, True)


def test_a_file_that_is_put_has_the_mode_that_is_given(tmp_path: Path) -> None:
    put_file(tmp_path / "a", write, mode=0o600, beside=tmp_path)
    assert mode(tmp_path / "a") == 0o600


def test_where_a_file_can_be_replaced_nothing_is_left_of_the_look(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new")
    (tmp_path / "old").write_text("old")
    check_replaceable(tmp_path / "old")
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    check_replaceable(tmp_path / "link")
    assert sorted(names(tmp_path)) == ["link", "old"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("place", ["none/a", "file/a", "n" * 250, "loop", "/proc/a"])
def test_where_none_can_be_put_it_is_said_beforehand(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for attempt in (check_replaceable, lambda path: replace_file(path, write)):
        with pytest.raises(OSError, match=r"\S"):
            attempt(tmp_path / place)
    assert sorted(names(tmp_path)) == ["file", "loop"]
