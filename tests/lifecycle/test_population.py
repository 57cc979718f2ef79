import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hermes_kernel.lifecycle.key import KernelKey, Owner
from hermes_kernel.lifecycle.loss import Loss
from hermes_kernel.lifecycle.population import KernelPopulation, KernelRecord

A = KernelKey(Owner("a"), "/py")
B = KernelKey(Owner("b"), "/py")
C = KernelKey(Owner("c"), "/py")
CHILD = KernelKey(Owner("a", child="c1"), "/py")
SCOPED = KernelKey(Owner("a", scope="work"), "/py")
IDLE = 10.0
KEYS = st.sampled_from([A, B, C, CHILD, SCOPED])


@pytest.fixture
def population() -> KernelPopulation:
    return KernelPopulation(max_kernels=2, idle_timeout=IDLE)


def told(population: KernelPopulation, key: KernelKey) -> Loss | None:
    """What a cell is told that runs on the kernel that serves *key*, or on a new one if there is none."""
    serving = next((r for r in population if r.key == key and population.serves(r)), object())
    return population.ledger.say(key, serving).loss


def close_where(
    population: KernelPopulation, predicate: Callable[[KernelRecord], bool], loss: Loss | None
) -> tuple[KernelRecord, ...]:
    """End every kernel that *predicate* picks, in use or not."""
    return tuple(
        gone for record in list(population) if predicate(record) for gone in population.close(record, loss)
    )


def used(population: KernelPopulation, key: KernelKey, now: float, *, pinned: bool = False) -> KernelRecord:
    """One whole call: its kernel is there afterwards, free, and its owner knows what was lost before."""
    record = population.claim(key, now, pinned=pinned).record
    population.ledger.say(key, record)
    population.release(record, now)
    return record


def held(population: KernelPopulation, key: KernelKey, now: float, *, reset: bool = False) -> KernelRecord:
    """A call that is still running."""
    record = population.claim(key, now, reset=reset).record
    population.ledger.say(key, record)
    return record


# Claim


def test_the_first_call_gets_a_new_kernel_that_it_holds(population: KernelPopulation) -> None:
    claim = population.claim(A, now=3.0)
    assert (claim.is_new, claim.doomed) == (True, ())
    assert claim.record.key == A
    assert (claim.record.attached, claim.record.last_used, claim.record.pinned) == (1, 3.0, False)
    assert population.serves(claim.record)
    assert (list(population), len(population)) == ([claim.record], 1)


def test_a_call_while_the_kernel_is_being_started_shares_it_and_does_not_start_it_again(
    population: KernelPopulation,
) -> None:
    first = population.claim(A, now=3.0)
    others = [population.claim(A, now=3.0) for _ in range(5)]
    assert first.is_new
    assert not any(claim.is_new or claim.doomed for claim in others)
    assert {claim.record for claim in others} == {first.record}
    assert (first.record.attached, len(population)) == (6, 1)


def test_the_next_call_finds_the_kernel_of_the_last(population: KernelPopulation) -> None:
    record = used(population, A, now=3.0)
    claim = population.claim(A, now=4.0)
    assert (claim.record, claim.is_new, claim.doomed) == (record, False, ())
    assert record.last_used == 4.0


@pytest.mark.parametrize(
    "other",
    [
        B,
        CHILD,
        SCOPED,
        replace(A, python="/other"),
        replace(A, cwd="/here"),
        replace(A, variant=("x",)),
    ],
    ids=repr,
)
def test_another_owner_child_scope_or_interpreter_has_a_kernel_of_its_own(
    population: KernelPopulation, other: KernelKey
) -> None:
    record = held(population, A, now=3.0)
    claim = population.claim(other, now=3.0)
    assert claim.is_new
    assert claim.record is not record
    assert set(population) == {record, claim.record}


def test_a_child_reset_or_closed_leaves_its_parent_and_its_sibling_alone(
    population: KernelPopulation,
) -> None:
    parent = used(population, A, now=3.0)
    sibling = used(population, replace(CHILD, owner=Owner("a", child="c2")), now=3.0, pinned=True)
    child = used(population, CHILD, now=3.0, pinned=True)
    again = population.claim(CHILD, now=4.0, reset=True, pinned=True)
    assert again.doomed == (child,)
    assert population.close(again.record, Loss.CLOSED) == (again.record,)
    assert set(population) == {parent, sibling}


# The cap


def test_beyond_the_cap_the_kernel_used_longest_ago_is_evicted_when_another_is_claimed(
    population: KernelPopulation,
) -> None:
    a, b = used(population, A, now=3.0), used(population, B, now=4.0)
    claim = population.claim(C, now=5.0)
    assert claim.doomed == (a,)
    assert set(population) == {b, claim.record}
    assert not population.serves(a)


def test_a_call_makes_its_kernel_the_last_to_be_evicted(population: KernelPopulation) -> None:
    used(population, A, now=3.0)
    b = used(population, B, now=4.0)
    used(population, A, now=5.0)
    assert population.claim(C, now=6.0).doomed == (b,)


def test_a_kernel_was_used_last_when_its_last_call_ended(population: KernelPopulation) -> None:
    a = held(population, A, now=3.0)
    b = used(population, B, now=4.0)
    assert population.release(a, now=5.0) == ()
    assert a.last_used == 5.0
    assert population.claim(C, now=6.0).doomed == (b,)


def test_up_to_the_cap_nothing_is_evicted(population: KernelPopulation) -> None:
    used(population, A, now=3.0)
    assert population.claim(B, now=4.0).doomed == ()


def test_a_kernel_in_use_is_never_evicted_though_it_is_the_oldest(population: KernelPopulation) -> None:
    a, b = held(population, A, now=3.0), used(population, B, now=4.0)
    assert population.claim(C, now=5.0).doomed == (b,)
    assert population.serves(a)


def test_the_cap_is_exceeded_while_all_are_in_use_and_holds_again_as_they_are_released(
    population: KernelPopulation,
) -> None:
    a, b, c = (held(population, key, now=3.0) for key in (A, B, C))
    assert len(population) == 3
    assert population.release(b, now=4.0) == (b,)
    assert population.release(a, now=5.0) == ()
    assert population.release(c, now=6.0) == ()
    assert set(population) == {a, c}


def test_a_kernel_beyond_the_cap_stays_until_its_last_call_is_over(population: KernelPopulation) -> None:
    held(population, A, now=3.0)
    held(population, B, now=3.0)
    c = held(population, C, now=3.0)
    assert held(population, C, now=3.0) is c
    assert population.release(c, now=4.0) == ()
    assert population.serves(c)
    assert population.release(c, now=5.0) == (c,)


def test_several_kernels_go_at_once_if_the_cap_needs_it_oldest_first() -> None:
    population = KernelPopulation(max_kernels=3, idle_timeout=IDLE)
    a, b, c = (used(population, key, now) for key, now in ((A, 5.0), (B, 3.0), (C, 4.0)))
    population.max_kernels = 1
    assert population.claim(A, now=6.0).doomed == (b, c)
    assert list(population) == [a]


def test_pinned_kernels_neither_count_for_the_cap_nor_are_evicted() -> None:
    population = KernelPopulation(max_kernels=1, idle_timeout=IDLE)
    keys = [KernelKey(Owner("a", child=f"c{number}"), "/py") for number in range(5)]
    children = [used(population, key, now=3.0, pinned=True) for key in keys]
    a = used(population, A, now=4.0)
    assert set(population) == {*children, a}
    claim = population.claim(B, now=5.0)
    assert claim.doomed == (a,)
    assert set(population) == {*children, claim.record}


def test_a_pinned_kernel_stays_pinned_when_a_later_call_does_not_say_so(
    population: KernelPopulation,
) -> None:
    child = used(population, CHILD, now=3.0, pinned=True)
    used(population, CHILD, now=4.0)
    assert child.pinned
    assert population.sweep(now=1000.0) == ()


# Idleness


def test_a_kernel_goes_exactly_when_nobody_has_used_it_for_the_timeout(population: KernelPopulation) -> None:
    a = used(population, A, now=3.0)
    assert population.sweep(now=12.5) == ()
    assert population.sweep(now=13.0) == (a,)
    assert (population.sweep(now=13.0), len(population)) == ((), 0)


def test_a_sweep_takes_all_that_are_idle_and_no_other(population: KernelPopulation) -> None:
    a, b = used(population, A, now=3.0), used(population, B, now=4.0)
    child = used(population, CHILD, now=3.0, pinned=True)
    assert population.sweep(now=13.5) == (a,)
    assert population.sweep(now=1000.0) == (b,)
    assert list(population) == [child]


def test_a_kernel_in_use_is_not_idle_and_its_time_begins_with_the_end_of_its_last_call(
    population: KernelPopulation,
) -> None:
    a = held(population, A, now=3.0)
    held(population, A, now=3.0)
    population.release(a, now=4.0)
    assert population.sweep(now=1000.0) == ()
    assert population.release(a, now=1000.0) == ()
    assert population.sweep(now=1009.5) == ()
    assert population.sweep(now=1010.0) == (a,)


def test_any_claim_sweeps_and_an_idle_kernel_does_not_serve_its_owner_again(
    population: KernelPopulation,
) -> None:
    a, b = used(population, A, now=3.0), used(population, B, now=3.0)
    claim = population.claim(A, now=13.0)
    assert claim.is_new
    assert claim.record is not a
    assert set(claim.doomed) == {a, b}
    assert len(claim.doomed) == 2
    assert told(population, A) is Loss.IDLE


def test_the_next_sweep_is_when_the_first_free_kernel_becomes_idle(population: KernelPopulation) -> None:
    assert population.next_sweep() == math.inf
    a = held(population, A, now=3.0)
    used(population, CHILD, now=3.0, pinned=True)
    assert population.next_sweep() == math.inf
    b = used(population, B, now=5.0)
    assert population.next_sweep() == 15.0
    population.release(a, now=4.0)
    assert population.next_sweep() == 14.0
    assert population.sweep(now=14.0) == (a,)
    assert population.next_sweep() == 15.0
    assert population.sweep(now=15.0) == (b,)
    assert population.next_sweep() == math.inf


def test_asking_for_the_next_sweep_changes_nothing(population: KernelPopulation) -> None:
    a = used(population, A, now=3.0)
    assert [population.next_sweep() for _ in range(3)] == [13.0] * 3
    assert list(population) == [a]


@example(last_used=3.1, idle_timeout=1.0)
@given(last_used=st.floats(0, 1e9), idle_timeout=st.floats(1e-3, 1e6))
def test_a_sweep_at_the_time_of_the_next_sweep_finds_something(last_used: float, idle_timeout: float) -> None:
    population = KernelPopulation(max_kernels=2, idle_timeout=idle_timeout)
    a = used(population, A, now=last_used)
    assert population.sweep(population.next_sweep()) == (a,)


# Reset


def test_reset_of_a_free_kernel_closes_it_and_gives_a_new_one(population: KernelPopulation) -> None:
    a = used(population, A, now=3.0)
    claim = population.claim(A, now=4.0, reset=True)
    assert (claim.is_new, claim.doomed) == (True, (a,))
    assert list(population) == [claim.record]
    assert told(population, A) is Loss.RESET


def test_reset_during_a_call_gives_a_new_kernel_at_once_and_the_old_one_serves_its_calls_to_the_end(
    population: KernelPopulation,
) -> None:
    old = held(population, A, now=3.0)
    held(population, A, now=3.0)
    claim = population.claim(A, now=4.0, reset=True)
    assert (claim.is_new, claim.doomed) == (True, ())
    assert claim.record is not old
    assert (set(population), len(population)) == ({old, claim.record}, 2)
    assert population.serves(claim.record)
    assert not population.serves(old)
    assert population.release(old, now=5.0) == ()
    assert old in set(population)
    assert population.release(old, now=6.0) == (old,)
    assert list(population) == [claim.record]


def test_a_call_after_a_reset_shares_the_new_kernel(population: KernelPopulation) -> None:
    held(population, A, now=3.0)
    new = held(population, A, now=4.0, reset=True)
    claim = population.claim(A, now=5.0)
    assert (claim.record, claim.is_new) == (new, False)


def test_each_of_several_resets_during_calls_retires_one_more_kernel(population: KernelPopulation) -> None:
    first = held(population, A, now=3.0)
    second = held(population, A, now=3.0, reset=True)
    third = held(population, A, now=3.0, reset=True)
    assert set(population) == {first, second, third}
    assert population.release(second, now=4.0) == (second,)
    assert population.release(first, now=4.0) == (first,)
    assert list(population) == [third]


def test_a_retired_kernel_in_use_is_neither_swept_nor_evicted(population: KernelPopulation) -> None:
    old = held(population, A, now=3.0)
    held(population, A, now=3.0, reset=True)
    assert population.sweep(now=1000.0) == ()
    assert population.claim(B, now=1000.0).doomed == ()
    assert population.claim(C, now=1000.0).doomed == ()
    assert old in set(population)


def test_reset_with_nothing_there_is_a_first_call(population: KernelPopulation) -> None:
    claim = population.claim(A, now=3.0, reset=True)
    assert (claim.is_new, claim.doomed, len(population)) == (True, (), 1)
    assert told(population, A) is None


def test_reset_at_the_cap_evicts_nobody(population: KernelPopulation) -> None:
    used(population, A, now=3.0)
    b = used(population, B, now=4.0)
    assert population.claim(B, now=5.0, reset=True).doomed == (b,)


# Doom and close


def test_a_dead_kernel_that_nobody_uses_is_closed_at_once_and_once(population: KernelPopulation) -> None:
    a = used(population, A, now=3.0)
    assert population.doom(a, Loss.DIED) == (a,)
    assert population.doom(a, Loss.DIED) == ()
    assert population.close(a, Loss.CLOSED) == ()
    assert len(population) == 0


def test_a_dead_kernel_in_use_is_closed_by_its_last_call(population: KernelPopulation) -> None:
    a = held(population, A, now=3.0)
    assert population.doom(a, Loss.DIED) == ()
    assert (population.serves(a), list(population)) == (False, [a])
    assert population.release(a, now=4.0) == (a,)
    assert len(population) == 0


def test_close_of_a_kernel_in_use_hands_it_out_now_and_never_again(population: KernelPopulation) -> None:
    a = held(population, A, now=3.0)
    assert population.close(a, Loss.CLOSED) == (a,)
    assert len(population) == 0
    assert population.close(a, Loss.CLOSED) == ()
    assert population.doom(a, Loss.DIED) == ()
    assert population.release(a, now=4.0) == ()


def test_close_of_a_retired_kernel_in_use_hands_it_out_now_and_never_again(
    population: KernelPopulation,
) -> None:
    old = held(population, A, now=3.0)
    new = held(population, A, now=3.0, reset=True)
    assert population.close(old, Loss.CLOSED) == (old,)
    assert population.close(old, Loss.CLOSED) == ()
    assert population.release(old, now=4.0) == ()
    assert list(population) == [new]
    assert told(population, A) is None


def test_close_ends_a_pinned_kernel(population: KernelPopulation) -> None:
    child = used(population, CHILD, now=3.0, pinned=True)
    assert population.close(child, Loss.CLOSED) == (child,)
    assert len(population) == 0


def test_after_a_close_the_next_call_gets_a_new_kernel(population: KernelPopulation) -> None:
    a = held(population, A, now=3.0)
    population.close(a, Loss.CLOSED)
    claim = population.claim(A, now=4.0)
    assert claim.is_new
    assert claim.record is not a


def test_close_where_ends_all_that_it_picks_in_use_retired_or_free_and_no_other(
    population: KernelPopulation,
) -> None:
    free = used(population, A, now=3.0)
    child = used(population, CHILD, now=3.0, pinned=True)
    retired = held(population, B, now=3.0)
    in_use = held(population, B, now=3.0, reset=True)
    closed = close_where(population, lambda record: record.key != A, Loss.CLOSED)
    assert len(closed) == 3
    assert set(closed) == {child, retired, in_use}
    assert list(population) == [free]
    assert close_where(population, lambda record: True, Loss.CLOSED) == (free,)
    assert close_where(population, lambda record: True, Loss.CLOSED) == ()


@pytest.mark.parametrize("end", ["reset", "died", "closed"])
def test_what_is_said_late_of_a_kernel_never_touches_its_replacement(
    population: KernelPopulation, end: str
) -> None:
    old = held(population, A, now=3.0)
    if end == "died":
        population.doom(old, Loss.DIED)
    elif end == "closed":
        population.close(old, Loss.CLOSED)
    new = held(population, A, now=4.0, reset=end == "reset")
    assert population.doom(old, Loss.DIED) == ()
    assert population.release(old, now=5.0) == (() if end == "closed" else (old,))
    assert population.close(old, Loss.TIMED_OUT) == ()
    assert population.serves(new)
    assert (new.attached, new.last_used) == (1, 4.0)
    assert list(population) == [new]
    assert told(population, A) is None


# What the owner is told


@pytest.mark.parametrize("loss", [Loss.IDLE, Loss.EVICTED, Loss.RESET, Loss.DIED, Loss.CLOSED])
def test_the_owner_is_told_why_its_kernel_went_once(population: KernelPopulation, loss: Loss) -> None:
    a = used(population, A, now=3.0)
    now = 4.0
    if loss is Loss.IDLE:
        now = 13.0
        assert population.sweep(now) == (a,)
    elif loss is Loss.EVICTED:
        used(population, B, now=4.0)
        used(population, C, now=4.0)
    elif loss is Loss.DIED:
        assert population.doom(a, Loss.DIED) == (a,)
    elif loss is Loss.CLOSED:
        assert population.close(a, Loss.CLOSED) == (a,)
    claim = population.claim(A, now, reset=loss is Loss.RESET)
    assert claim.is_new
    assert [told(population, A), told(population, A)] == [loss, None]


def test_an_owner_is_not_told_what_another_lost(population: KernelPopulation) -> None:
    for key in (A, B):
        used(population, key, now=3.0)
    used(population, CHILD, now=3.0, pinned=True)
    close_where(population, lambda record: record.key == A, Loss.CLOSED)
    assert [told(population, key) for key in (B, CHILD, SCOPED)] == [None, None, None]
    assert told(population, A) is Loss.CLOSED


def test_a_reset_during_a_call_is_told_once_and_the_end_of_the_old_kernel_is_no_loss(
    population: KernelPopulation,
) -> None:
    old = held(population, A, now=3.0)
    new = population.claim(A, now=4.0, reset=True).record
    assert told(population, A) is Loss.RESET
    assert population.release(old, now=5.0) == (old,)
    population.release(new, now=5.0)
    assert population.claim(A, now=6.0).record is new
    assert told(population, A) is None


def test_a_close_of_a_kernel_in_use_is_told_on_the_next_call(population: KernelPopulation) -> None:
    a = held(population, A, now=3.0)
    population.close(a, Loss.CLOSED)
    population.release(a, now=4.0)
    population.claim(A, now=5.0)
    assert [told(population, A), told(population, A)] == [Loss.CLOSED, None]


def test_an_eviction_at_release_is_told(population: KernelPopulation) -> None:
    a, _, _ = (held(population, key, now=3.0) for key in (A, B, C))
    assert population.release(a, now=4.0) == (a,)
    population.claim(A, now=5.0)
    assert told(population, A) is Loss.EVICTED


def test_an_end_without_a_reason_is_told_to_nobody(population: KernelPopulation) -> None:
    a, b = used(population, A, now=3.0), used(population, B, now=3.0)
    assert population.doom(a, None) == (a,)
    assert population.close(b, None) == (b,)
    assert [told(population, key) for key in (A, B)] == [None, None]


# Any order of events


@dataclass
class Expected:
    """What the model knows of one record."""

    key: KernelKey
    pinned: bool
    last_used: float
    calls: int = 0


class Population(RuleBasedStateMachine):
    """Calls, ends and time in any order, beside a model that keeps the books in the plainest way.

    Times are multiples of 0.5: sums and differences are exact.
    """

    @initialize(max_kernels=st.integers(1, 2))
    def begin(self, max_kernels: int) -> None:
        self.population = KernelPopulation(max_kernels, IDLE)
        self.now = 3.0
        self.known: dict[KernelRecord, Expected] = {}  # every record there ever was
        self.serving: dict[KernelKey, KernelRecord] = {}
        self.retired: set[KernelRecord] = set()
        self.handed_out: list[KernelRecord] = []
        self.untold: dict[KernelKey, Loss] = {}

    def teardown(self) -> None:
        """In the end everybody leaves and all is closed: then each record was handed out once."""
        while running := self.running():
            self.leave(running[0])
        self.hand_out(set(close_where(self.population, lambda record: True, None)))
        assert len(self.handed_out) == len(self.known)
        assert set(self.handed_out) == set(self.known)
        assert len(self.population) == 0

    # The model

    def running(self) -> list[KernelRecord]:
        return [record for record, expected in self.known.items() if expected.calls]

    def unpinned(self) -> set[KernelRecord]:
        return {record for record in self.serving.values() if not self.known[record].pinned}

    def free(self) -> set[KernelRecord]:
        return {record for record in self.unpinned() if not self.known[record].calls}

    def idle(self) -> set[KernelRecord]:
        return {record for record in self.free() if self.now - self.known[record].last_used >= IDLE}

    def hand_out(self, doomed: set[KernelRecord], *, in_use: bool = False) -> None:
        for record in doomed:
            assert record not in self.handed_out, "handed out for closing twice"
            assert in_use or not self.known[record].calls, "handed out while calls use it"
            self.handed_out.append(record)

    def take_out_of_service(self, records: set[KernelRecord], loss: Loss | None) -> None:
        for record in records:
            del self.serving[self.known[record].key]
            if loss is not None:
                self.untold[self.known[record].key] = loss

    def evict(self, victims: set[KernelRecord]) -> None:
        free, excess = self.free(), len(self.unpinned()) - self.population.max_kernels
        assert victims <= free, "evicted though in use, pinned or out of service"
        assert len(victims) == min(len(free), max(0, excess))
        ages = [self.known[record].last_used for record in free - victims]
        assert all(self.known[victim].last_used <= age for victim in victims for age in ages)
        self.hand_out(victims)
        self.take_out_of_service(victims, Loss.EVICTED)

    def end(self, record: KernelRecord, loss: Loss | None) -> set[KernelRecord]:
        """A close: what it must hand out."""
        if self.serving.get(self.known[record].key) is record:
            self.take_out_of_service({record}, loss)
            return {record}
        if record in self.retired:
            self.retired.discard(record)
            return {record}
        return set()

    # The events

    @rule(
        key=KEYS,
        reset=st.sampled_from([False, False, True]),
        pinned=st.sampled_from([False, False, False, True]),
    )
    def claim(self, key: KernelKey, reset: bool, pinned: bool) -> None:
        claim = self.population.claim(key, self.now, reset=reset, pinned=pinned)
        doomed = set(claim.doomed)
        assert len(doomed) == len(claim.doomed)

        expired = self.idle()
        assert expired <= doomed
        self.hand_out(expired)
        self.take_out_of_service(expired, Loss.IDLE)
        doomed -= expired

        if reset and (old := self.serving.get(key)):
            self.take_out_of_service({old}, Loss.RESET)
            if self.known[old].calls:
                self.retired.add(old)
            else:
                assert old in doomed
                self.hand_out({old})
                doomed -= {old}

        assert claim.is_new is (key not in self.serving)
        if claim.is_new:
            assert claim.record not in self.known
            self.known[claim.record] = Expected(key, pinned, self.now)
            self.serving[key] = claim.record
        assert claim.record is self.serving[key]
        expected = self.known[claim.record]
        expected.calls, expected.last_used = expected.calls + 1, self.now
        expected.pinned = expected.pinned or pinned
        self.evict(doomed)
        assert told(self.population, key) is self.untold.pop(key, None)

    @rule(key=KEYS)
    def call(self, key: KernelKey) -> None:
        """A call that is over before anything else happens."""
        self.claim(key, reset=False, pinned=False)
        self.leave(self.serving[key])

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.running())))

    def leave(self, record: KernelRecord) -> None:
        answer = self.population.release(record, self.now)
        doomed = set(answer)
        assert len(doomed) == len(answer)
        expected = self.known[record]
        expected.calls, expected.last_used = expected.calls - 1, self.now
        if record in self.retired and not expected.calls:
            assert record in doomed
            self.retired.discard(record)
            self.hand_out({record})
            doomed -= {record}
        self.evict(doomed)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), loss=st.sampled_from([Loss.DIED, Loss.TIMED_OUT, None]))
    def doom(self, data: st.DataObject, loss: Loss | None) -> None:
        record = data.draw(st.sampled_from(list(self.known)))
        doomed = self.population.doom(record, loss)
        if self.serving.get(record.key) is not record:
            assert doomed == ()
            return
        self.take_out_of_service({record}, loss)
        if self.known[record].calls:
            assert doomed == ()
            self.retired.add(record)
        else:
            assert doomed == (record,)
            self.hand_out({record})

    @precondition(lambda self: self.known)
    @rule(data=st.data(), loss=st.sampled_from([Loss.CLOSED, Loss.INTERRUPTED, None]))
    def close(self, data: st.DataObject, loss: Loss | None) -> None:
        record = data.draw(st.sampled_from(list(self.known)))
        doomed = self.population.close(record, loss)
        assert doomed == tuple(self.end(record, loss))
        self.hand_out(set(doomed), in_use=True)

    @rule(session=st.sampled_from("abc"))
    def close_where(self, session: str) -> None:
        picked = [*self.retired, *self.serving.values()]
        doomed = close_where(self.population, lambda r: r.key.owner.session == session, Loss.CLOSED)
        ended = set[KernelRecord]()
        for record in picked:
            if record.key.owner.session == session:
                ended |= self.end(record, Loss.CLOSED)
        assert len(doomed) == len(ended)
        assert set(doomed) == ended
        self.hand_out(ended, in_use=True)

    @rule()
    def sweep(self) -> None:
        due, expired = self.population.next_sweep(), self.idle()
        doomed = self.population.sweep(self.now)
        assert bool(doomed) is (due <= self.now)
        assert len(doomed) == len(expired)
        assert set(doomed) == expired
        self.hand_out(expired)
        self.take_out_of_service(expired, Loss.IDLE)
        assert not any(
            self.now - record.last_used >= IDLE
            for record in self.population
            if not record.pinned and not record.attached
        )

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, IDLE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # What holds at any time

    @invariant()
    def all_that_is_not_handed_out_is_there(self) -> None:
        there = list(self.population)
        assert len(there) == len(set(there)) == len(self.population)
        assert set(there) == {*self.serving.values(), *self.retired}
        assert set(there) == self.known.keys() - set(self.handed_out)

    @invariant()
    def every_record_tells_its_calls_and_its_last_use(self) -> None:
        for record, expected in self.known.items():
            told = (record.key, record.pinned, record.attached, record.last_used)
            assert told == (expected.key, expected.pinned, expected.calls, expected.last_used)

    @invariant()
    def one_kernel_serves_a_key(self) -> None:
        serving = [record for record in self.known if self.population.serves(record)]
        assert len({record.key for record in serving}) == len(serving)
        assert set(serving) == set(self.serving.values())

    @invariant()
    def what_is_retired_is_in_use(self) -> None:
        assert all(record.attached for record in self.population if not self.population.serves(record))

    @invariant()
    def beyond_the_cap_there_is_only_what_is_in_use(self) -> None:
        unpinned = [r for r in self.population if self.population.serves(r) and not r.pinned]
        if len(unpinned) > self.population.max_kernels:
            assert all(record.attached for record in unpinned)

    @invariant()
    def the_next_sweep_is_when_the_first_becomes_idle(self) -> None:
        times = [self.known[record].last_used + IDLE for record in self.free()]
        assert self.population.next_sweep() == min(times, default=math.inf)


TestPopulation = Population.TestCase
TestPopulation.settings = settings(max_examples=200, stateful_step_count=40)


def test_a_kernel_on_which_a_person_works_is_neither_idle_nor_evicted(population: KernelPopulation) -> None:
    a, b = used(population, A, now=3.0), used(population, B, now=4.0)
    assert population.visit(a, now=5.0, is_visited=True) == ()
    assert population.claim(C, now=6.0).doomed == (b,)
    assert population.sweep(now=5.0 + 10 * population.idle_timeout) == ()
    assert population.serves(a)


def test_a_persons_cell_that_ends_is_a_use_and_the_cap_holds_again(population: KernelPopulation) -> None:
    a = used(population, A, now=3.0)
    population.visit(a, now=4.0, is_visited=True)
    b, c = held(population, B, now=5.0), held(population, C, now=6.0)
    assert population.visit(a, now=7.0, is_visited=False) == (a,)
    assert a.last_used == 7.0
    assert population.serves(b)
    assert population.serves(c)
