"""Leases: files whose lock says who lives."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_kernel.process import lease, staging
from hermes_kernel.process.lease import Lease, LeaseHeldError
from hermes_kernel.process.staging import Staging, StagingError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "k1.lease"


@pytest.fixture
def thief(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Somebody who locks each file at the moment it is made."""
    held: list[int] = []
    make = os.open

    def make_and_lose(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = make(path, flags, mode)
        if flags & os.O_EXCL:
            held.append(make(path, os.O_RDWR | os.O_CLOEXEC))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        return descriptor

    monkeypatch.setattr(lease.os, "open", make_and_lose)
    yield held
    for descriptor in held:
        os.close(descriptor)


def test_whoever_locks_a_lease_before_its_maker_is_not_waited_for(path: Path, thief: list[int]) -> None:
    with pytest.raises(LeaseHeldError):
        Lease.take(path)
    assert 0 < len(thief) <= lease.TRIES
    assert list(path.parent.iterdir()) == []


def test_a_kernel_whose_lease_somebody_else_locks_is_an_error(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, thief: list[int]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with pytest.raises(StagingError, match="held"):
        Staging.create("k1")
    assert not list(staging.runtime_base().glob("*k1*"))


def test_a_lease_has_its_lock_before_its_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep would take it for dead in between, and remove it."""
    lock, had_its_name = lease.lock, []

    def look_and_lock(descriptor: int) -> bool:
        had_its_name.append(path.exists())
        return lock(descriptor)

    monkeypatch.setattr(lease, "lock", look_and_lock)
    Lease.take(path).remove()
    assert had_its_name == [False]


def test_a_lease_that_lives_is_not_taken_and_one_that_is_dead_is(path: Path) -> None:
    first = Lease.take(path)
    with pytest.raises(LeaseHeldError):
        Lease.take(path)
    first.close()
    second = Lease.take(path)
    assert lease.is_held(path)
    second.remove()
    assert list(path.parent.iterdir()) == []


def test_a_sweep_that_removes_what_is_just_being_made_costs_another_try(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, swept = os.link, []

    def sweep_first(source: str, target: str) -> None:
        if not swept:
            swept.append(source)
            os.unlink(source)
        link(source, target)

    monkeypatch.setattr(lease.os, "link", sweep_first)
    taken = Lease.take(path)
    assert swept
    assert lease.is_held(path)
    taken.remove()
