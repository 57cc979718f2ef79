from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hermes_kernel.errors import ConfigError
from hermes_kernel.lifecycle.info import KernelInfo, KernelState
from hermes_kernel.lifecycle.key import KernelKey, Owner

A = Owner("a")


def test_a_string_is_the_owner_of_that_session() -> None:
    assert Owner.of("a") == Owner("a") == Owner("a", child=None, scope="")


def test_an_owner_stays_itself() -> None:
    owner = Owner("a", child="c", scope="work")
    assert Owner.of(owner) is owner


@pytest.mark.parametrize("session", ["", " ", "\n\t "], ids=repr)
def test_an_empty_owner_is_refused_since_two_of_them_would_share_a_kernel(session: str) -> None:
    for make in (Owner, Owner.of):
        with pytest.raises(ConfigError, match="empty"):
            make(session)


@pytest.mark.parametrize("child", ["", "  "], ids=repr)
def test_an_empty_child_is_refused(child: str) -> None:
    with pytest.raises(ConfigError, match="child"):
        Owner("a", child=child)


def test_the_scope_may_be_empty() -> None:
    assert Owner("a", scope="").scope == ""


@pytest.mark.parametrize("value", [None, 3, b"a", ["a"], True], ids=repr)
def test_an_owner_that_is_no_string_is_refused(value: Any) -> None:
    for make in (Owner, Owner.of):
        with pytest.raises(ConfigError, match="give a string"):
            make(value)


@pytest.mark.parametrize("names", [{"child": 3}, {"child": b"c"}, {"scope": None}, {"scope": 3}], ids=repr)
def test_a_child_or_scope_that_is_no_string_is_refused(names: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give a string"):
        Owner("a", **names)


@pytest.mark.parametrize(
    "other", [Owner("b"), Owner("a", child="c"), Owner("a", scope="work"), Owner("A")], ids=repr
)
def test_every_part_of_an_owner_tells_it_from_others(other: Owner) -> None:
    assert other != A
    assert len({other, A, Owner("a")}) == 2


def test_a_child_is_not_the_session_that_spells_it_out() -> None:
    assert Owner("a", child="c") != Owner("a::child::c")


@pytest.mark.parametrize("other", ["e\u0301", "É", " é", "é ", "é\0", "é\u200b"], ids=ascii)
def test_names_that_only_look_alike_are_different_owners(other: str) -> None:
    assert Owner(other) != Owner("é")
    assert Owner.of(other).session == other


@pytest.mark.parametrize(
    "other",
    [
        KernelKey(Owner("b"), "/py"),
        KernelKey(A, "/other"),
        KernelKey(A, "/py", cwd="/w"),
        KernelKey(A, "/py", variant=("x",)),
    ],
    ids=repr,
)
def test_every_part_of_a_key_makes_another_kernel(other: KernelKey) -> None:
    assert other != KernelKey(A, "/py")
    assert len({other, KernelKey(A, "/py"), KernelKey(Owner.of("a"), "/py")}) == 2


def test_owners_and_keys_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        A.session = "b"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        KernelKey(A, "/py").cwd = "/"  # type: ignore[misc]


def test_what_is_told_about_a_kernel_says_where_it_runs_and_how() -> None:
    info = KernelInfo(A, "k1", None, KernelState.STARTING, 3.0, 3.0, 0, None, "/py", None, 1)
    assert (info.node, info.isolation, info.pinned, info.degraded) == ("local", "none", False, None)
    assert {state.name for state in KernelState} == {"STARTING", "IDLE", "BUSY", "CLOSING"}
