from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hermes_kernel import Loss, Owner
from hermes_kernel.lifecycle.key import KernelKey
from hermes_kernel.lifecycle.loss import LossLedger

A = KernelKey(Owner("a"), "/py", "/here")
B = replace(A, owner=Owner("b"))
ENDS = [loss for loss in Loss if not loss.value.endswith("_changed")]


@pytest.fixture
def ledger() -> LossLedger:
    return LossLedger()


def tell(ledger: LossLedger, key: KernelKey, kernel: int) -> Loss | None:
    return ledger.say(key, kernel).loss


def test_a_first_call_has_lost_nothing(ledger: LossLedger) -> None:
    assert tell(ledger, A, 1) is None


def test_a_call_on_the_same_kernel_has_lost_nothing(ledger: LossLedger) -> None:
    assert [tell(ledger, A, 1) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("loss", ENDS)
def test_a_loss_is_told_to_the_next_call_and_to_no_other(ledger: LossLedger, loss: Loss) -> None:
    tell(ledger, A, 1)
    ledger.record(A.owner, 1, loss)
    assert [tell(ledger, A, 2), tell(ledger, A, 2)] == [loss, None]


def test_of_two_reasons_for_one_kernels_end_the_first_is_told(ledger: LossLedger) -> None:
    tell(ledger, A, 1)
    ledger.record(A.owner, 1, Loss.TIMED_OUT)
    ledger.record(A.owner, 1, Loss.CLOSED)
    assert tell(ledger, A, 2) is Loss.TIMED_OUT


def test_a_kernel_that_ran_no_cell_of_the_owners_took_no_state_along(ledger: LossLedger) -> None:
    ledger.record(A.owner, 1, Loss.DIED)
    assert tell(ledger, A, 2) is None
    ledger.record(A.owner, 2, Loss.TIMED_OUT)
    ledger.record(A.owner, 3, Loss.DIED)
    assert tell(ledger, A, 4) is Loss.TIMED_OUT


def test_owners_are_told_their_own_losses(ledger: LossLedger) -> None:
    tell(ledger, A, 1)
    tell(ledger, B, 2)
    ledger.record(A.owner, 1, Loss.IDLE)
    assert (tell(ledger, B, 2), tell(ledger, A, 3)) == (None, Loss.IDLE)


def test_another_directory_or_interpreter_is_another_state(ledger: LossLedger) -> None:
    tell(ledger, A, 1)
    there, other = replace(A, cwd="/there"), replace(A, cwd="/there", python="/other")
    assert [tell(ledger, there, 2), tell(ledger, other, 3), tell(ledger, A, 1)] == [
        Loss.CWD_CHANGED,
        Loss.PYTHON_CHANGED,
        Loss.PYTHON_CHANGED,
    ]


def test_another_variant_is_another_state(ledger: LossLedger) -> None:
    tell(ledger, A, 1)
    other, there = replace(A, variant=("v",)), replace(A, variant=("w",), cwd="/there")
    assert (tell(ledger, other, 2), tell(ledger, other, 2)) == (Loss.VARIANT_CHANGED, None)
    assert (tell(ledger, there, 3), tell(ledger, there, 3)) == (Loss.CWD_CHANGED, None)


def test_a_reset_is_told_to_its_caller_and_not_to_who_still_runs_on_the_old_kernel(
    ledger: LossLedger,
) -> None:
    tell(ledger, A, 1)
    ledger.record(A.owner, 1, Loss.RESET)
    assert tell(ledger, A, 1) is None
    assert tell(ledger, A, 2) is Loss.RESET


def test_what_a_first_cell_leaves_on_a_kernel_that_was_reset_is_told_to_the_next(ledger: LossLedger) -> None:
    ledger.record(A.owner, 1, Loss.RESET)
    assert ledger.say_retired(A, 1).loss is None
    assert (tell(ledger, A, 2), tell(ledger, A, 2)) == (Loss.RESET, None)


def test_a_first_cell_that_did_not_run_on_a_kernel_that_was_reset_left_nothing(ledger: LossLedger) -> None:
    ledger.unsay(ledger.say_retired(A, 1))
    assert tell(ledger, A, 2) is None


def test_who_waited_on_a_kernel_that_was_reset_takes_the_telling_from_nobody(ledger: LossLedger) -> None:
    tell(ledger, A, 1)
    ledger.record(A.owner, 1, Loss.IDLE)
    telling = ledger.say_retired(A, 2)
    assert (telling.loss, tell(ledger, A, 3)) == (Loss.IDLE, Loss.IDLE)
    ledger.unsay(telling)
    assert tell(ledger, A, 3) is None


def test_what_is_taken_back_is_told_to_the_next_call(ledger: LossLedger) -> None:
    tell(ledger, A, 1)
    ledger.record(A.owner, 1, Loss.TIMED_OUT)
    telling = ledger.say(A, 2)
    ledger.record(A.owner, 2, Loss.DIED)
    ledger.unsay(telling)
    assert (telling.loss, tell(ledger, A, 3), tell(ledger, A, 3)) == (Loss.TIMED_OUT, Loss.TIMED_OUT, None)


def test_an_owner_whose_first_call_did_not_run_has_lost_nothing(ledger: LossLedger) -> None:
    telling = ledger.say(A, 1)
    ledger.record(A.owner, 1, Loss.DIED)
    ledger.unsay(telling)
    assert (telling.loss, tell(ledger, A, 2)) == (None, None)


def test_the_end_of_a_kernel_with_state_stays_known_though_its_next_cell_did_not_run(
    ledger: LossLedger,
) -> None:
    tell(ledger, A, 1)
    telling = ledger.say(A, 1)
    ledger.record(A.owner, 1, Loss.DIED)
    ledger.unsay(telling)
    assert tell(ledger, A, 2) is Loss.DIED


def test_the_owners_that_called_longest_ago_are_forgotten_whole() -> None:
    ledger = LossLedger(capacity=2)
    keys = [replace(A, owner=Owner(f"owner {n}")) for n in range(5)]
    for n, key in enumerate(keys):
        tell(ledger, key, n)
        ledger.record(key.owner, n, Loss.DIED)
    assert len(ledger._last) == len(ledger._reasons) == 2
    assert tell(ledger, keys[0], 10) is None
    assert tell(ledger, keys[4], 11) is Loss.DIED


class Ledger(RuleBasedStateMachine):
    """Beside a model that keeps for each owner the last kernel and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LossLedger()
        self.last: dict[KernelKey, int] = {}
        self.ended: dict[int, Loss] = {}
        self.kernels = 0

    @rule(key=st.sampled_from([A, B]), fresh=st.booleans(), runs=st.booleans())
    def call(self, key: KernelKey, fresh: bool, runs: bool) -> None:
        before = self.last.get(key)
        if before is None or fresh or before in self.ended:
            self.kernels += 1
            kernel = self.kernels
            if before is not None and before not in self.ended:
                self.ended[before] = Loss.RESET
                self.ledger.record(key.owner, before, Loss.RESET)
        else:
            kernel = before
        telling = self.ledger.say(key, kernel)
        wanted = None if before is None or before == kernel else self.ended[before]
        assert telling.loss is wanted
        if runs:
            self.last[key] = kernel
        else:
            self.ledger.unsay(telling)

    @rule(key=st.sampled_from([A, B]), loss=st.sampled_from(ENDS))
    def end(self, key: KernelKey, loss: Loss) -> None:
        kernel = self.last.get(key)
        if kernel is not None:
            self.ledger.record(key.owner, kernel, loss)
            self.ended.setdefault(kernel, loss)


TestLedger = settings(max_examples=200, deadline=None)(Ledger).TestCase
