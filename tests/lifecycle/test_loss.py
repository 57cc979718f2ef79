import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hermes_kernel.lifecycle.key import KernelKey, Owner
from hermes_kernel.lifecycle.loss import Loss, LossLedger

A = KernelKey(Owner("a"), "/py", "/here")
A_THERE = KernelKey(Owner("a"), "/py", "/there")
A_OTHER_PYTHON = KernelKey(Owner("a"), "/other", "/here")
A_BOTH = KernelKey(Owner("a"), "/other", "/there")
B = KernelKey(Owner("b"), "/py", "/here")
OF_A_KERNEL = [loss for loss in Loss if loss not in (Loss.CWD_CHANGED, Loss.PYTHON_CHANGED)]


@pytest.fixture
def ledger() -> LossLedger:
    return LossLedger()


def test_there_is_a_reason_for_every_way_to_lose_state() -> None:
    assert {loss.value for loss in Loss} == {
        "reset", "idle", "evicted", "died", "timed_out", "interrupted", "exited", "closed",
        "cwd_changed", "python_changed",
    }  # fmt: skip


def test_a_first_call_has_lost_nothing(ledger: LossLedger) -> None:
    assert ledger.tell(A) is None


def test_calls_on_a_living_kernel_are_told_nothing(ledger: LossLedger) -> None:
    assert [ledger.tell(A) for _ in range(3)] == [None, None, None]


@pytest.mark.parametrize("loss", OF_A_KERNEL)
def test_a_loss_is_told_once_on_the_next_call(ledger: LossLedger, loss: Loss) -> None:
    ledger.tell(A)
    ledger.record(A, loss)
    assert [ledger.tell(A), ledger.tell(A)] == [loss, None]


def test_a_loss_is_told_to_its_owner_alone(ledger: LossLedger) -> None:
    ledger.tell(A)
    ledger.tell(B)
    ledger.record(A, Loss.IDLE)
    assert ledger.tell(B) is None
    assert ledger.tell(A) is Loss.IDLE


def test_a_kernel_that_no_call_ever_reached_loses_nothing(ledger: LossLedger) -> None:
    ledger.record(A, Loss.DIED)
    assert ledger.tell(A) is None


def test_of_two_losses_before_one_call_the_first_is_told(ledger: LossLedger) -> None:
    ledger.tell(A)
    ledger.record(A, Loss.DIED)
    ledger.record(A, Loss.CLOSED)
    assert [ledger.tell(A), ledger.tell(A)] == [Loss.DIED, None]


def test_every_loss_of_a_series_is_told(ledger: LossLedger) -> None:
    ledger.tell(A)
    told = []
    for loss in OF_A_KERNEL:
        ledger.record(A, loss)
        told.append(ledger.tell(A))
    assert told == OF_A_KERNEL


def test_another_directory_is_said_once_and_again_on_the_way_back(ledger: LossLedger) -> None:
    told = [ledger.tell(key) for key in (A, A_THERE, A_THERE, A)]
    assert told == [None, Loss.CWD_CHANGED, None, Loss.CWD_CHANGED]


def test_another_interpreter_is_said_once(ledger: LossLedger) -> None:
    told = [ledger.tell(key) for key in (A, A_OTHER_PYTHON, A_OTHER_PYTHON)]
    assert told == [None, Loss.PYTHON_CHANGED, None]


def test_another_interpreter_in_another_directory_is_another_interpreter(ledger: LossLedger) -> None:
    ledger.tell(A)
    assert ledger.tell(A_BOTH) is Loss.PYTHON_CHANGED


def test_another_owner_in_another_directory_has_lost_nothing(ledger: LossLedger) -> None:
    ledger.tell(A_THERE)
    assert ledger.tell(B) is None


def test_the_loss_of_a_kernel_elsewhere_is_not_told_to_a_call_that_had_its_state(ledger: LossLedger) -> None:
    ledger.tell(A)
    ledger.tell(A_THERE)
    ledger.record(A, Loss.EVICTED)
    assert ledger.tell(A_THERE) is None


def test_a_loss_elsewhere_counts_as_told_once_the_call_is_back(ledger: LossLedger) -> None:
    ledger.tell(A)
    ledger.tell(A_THERE)
    ledger.record(A, Loss.EVICTED)
    assert ledger.tell(A) in (Loss.EVICTED, Loss.CWD_CHANGED)
    assert ledger.tell(A) is None


def test_beyond_its_capacity_the_owner_that_called_longest_ago_is_forgotten() -> None:
    ledger = LossLedger(capacity=2)
    owners = [KernelKey(Owner(name), "/py") for name in "abc"]
    for key in owners[:2]:
        ledger.tell(key)
        ledger.record(key, Loss.IDLE)
    ledger.tell(owners[2])
    assert ledger.tell(owners[1]) is Loss.IDLE
    assert ledger.tell(owners[0]) is None


def test_a_call_keeps_its_owner_from_being_forgotten() -> None:
    ledger = LossLedger(capacity=2)
    a, b, c = (KernelKey(Owner(name), "/py") for name in "abc")
    for key in (a, b, a, c):
        ledger.tell(key)
    ledger.record(a, Loss.IDLE)
    ledger.record(b, Loss.IDLE)
    assert (ledger.tell(a), ledger.tell(b)) == (Loss.IDLE, None)


def test_what_is_remembered_does_not_grow_with_the_owners() -> None:
    ledger = LossLedger(capacity=10)
    for number in range(1000):
        key = KernelKey(Owner(f"owner {number}"), "/py")
        ledger.tell(key)
        ledger.record(key, Loss.IDLE)
    assert len(ledger._last_key) <= 10
    assert len(ledger._untold) <= 11


class Ledger(RuleBasedStateMachine):
    """Calls and losses of two owners in any order, against what their calls can find."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LossLedger()
        self.last: dict[Owner, KernelKey] = {}
        self.gone: dict[KernelKey, Loss] = {}

    @rule(key=st.sampled_from([A, A_THERE, A_OTHER_PYTHON, B]), loss=st.sampled_from(OF_A_KERNEL))
    def lose(self, key: KernelKey, loss: Loss) -> None:
        self.ledger.record(key, loss)
        self.gone.setdefault(key, loss)

    @rule(key=st.sampled_from([A, A_THERE, A_OTHER_PYTHON, B]))
    def call(self, key: KernelKey) -> None:
        told = self.ledger.tell(key)
        before = self.last.get(key.owner)
        if before is None:
            assert told is None
        elif before == key:
            assert told is self.gone.get(key)
        else:
            assert told in (Loss.PYTHON_CHANGED if before.python != key.python else Loss.CWD_CHANGED,)
        self.last[key.owner] = key
        self.gone.pop(key, None)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=30)


def test_what_is_taken_back_is_told_to_the_next_call(ledger: LossLedger) -> None:
    ledger.tell(A)
    ledger.record(A, Loss.TIMED_OUT)
    telling = ledger.say(A)
    ledger.record(A, Loss.DIED)
    ledger.unsay(telling)
    assert (telling.loss, ledger.tell(A), ledger.tell(A)) == (Loss.TIMED_OUT, Loss.TIMED_OUT, None)


def test_an_owner_whose_first_call_did_not_run_has_lost_nothing(ledger: LossLedger) -> None:
    telling = ledger.say(A)
    ledger.record(A, Loss.DIED)
    ledger.unsay(telling)
    assert (telling.loss, ledger.tell(A)) == (None, None)
