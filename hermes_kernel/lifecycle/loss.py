"""Why a call did not find the state of its owner's last call."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from .key import KernelKey, Owner


class Loss(Enum):
    """What became of the state that the owner's last call left behind."""

    RESET = "reset"
    IDLE = "idle"
    EVICTED = "evicted"
    DIED = "died"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    EXITED = "exited"
    CLOSED = "closed"
    CWD_CHANGED = "cwd_changed"
    PYTHON_CHANGED = "python_changed"
    VARIANT_CHANGED = "variant_changed"


@dataclass(frozen=True)
class _Place:
    """Where an owner's cell ran: on which kernel, and under which key."""

    key: KernelKey
    kernel: Hashable


@dataclass(frozen=True)
class Telling:
    """What was said to a call about the state that it finds, and what was known before."""

    owner: Owner
    loss: Loss | None
    here: _Place
    before: _Place | None
    reason: Loss | None


@dataclass
class LossLedger:
    """What each owner must still be told about state that is gone.

    It remembers on which kernel an owner's last cell ran, and why that kernel has ended if it has: a cell on
    another kernel is told. At most *capacity* owners are remembered, the ones that called last; one that was
    forgotten is told nothing, as on its first call.
    """

    capacity: int = 10_000
    _last: OrderedDict[Owner, _Place] = field(default_factory=OrderedDict, init=False)
    _reasons: dict[Hashable, Loss] = field(default_factory=dict, init=False)

    def record(self, owner: Owner, kernel: Hashable, loss: Loss) -> None:
        """Note that a kernel of the owner's has ended and took its state along; the first reason counts."""
        place = self._last.get(owner)
        if place is not None and place.kernel == kernel:
            self._reasons.setdefault(kernel, loss)

    def say(self, key: KernelKey, kernel: Hashable) -> Telling:
        """Return why a cell on *kernel* does not find the last cell's state, and count it as told.

        If the cell does not run then, ``unsay`` what is returned.
        """
        owner = key.owner
        before = self._last.get(owner)
        here = self._last[owner] = _Place(key, kernel)
        self._last.move_to_end(owner)
        reason = None
        if before is not None and before.kernel != kernel:
            reason = self._reasons.pop(before.kernel, None)
        while len(self._last) > self.capacity:
            _, forgotten = self._last.popitem(last=False)
            self._reasons.pop(forgotten.kernel, None)
        return Telling(owner, _loss(before, key, kernel, reason), here, before, reason)

    def say_retired(self, key: KernelKey, kernel: Hashable) -> Telling:
        """Like ``say``, for a cell that waited on a kernel that was reset meanwhile: nothing counts as told.

        Only where nothing is known of the owner, the kernel is remembered: what the cell leaves there is
        what the owner's next one does not find.
        """
        owner = key.owner
        before = self._last.get(owner)
        if before is None:
            telling = self.say(key, kernel)
            self._reasons.setdefault(kernel, Loss.RESET)
            return telling
        reason = self._reasons.get(before.kernel, Loss.RESET)
        return Telling(owner, _loss(before, key, kernel, reason), _Place(key, kernel), before, reason)

    def unsay(self, telling: Telling) -> None:
        """The cell did not run: its owner still has to be told, unless a later cell was told meanwhile."""
        here, before = telling.here, telling.before
        if self._last.get(telling.owner) is not here:
            return
        if before is None:
            del self._last[telling.owner]
            self._reasons.pop(here.kernel, None)
            return
        self._last[telling.owner] = before
        if telling.reason is not None:
            self._reasons[before.kernel] = telling.reason
        if here.kernel != before.kernel:
            self._reasons.pop(here.kernel, None)


def _loss(before: _Place | None, key: KernelKey, kernel: Hashable, reason: Loss | None) -> Loss | None:
    if before is None or before.kernel == kernel:
        return None
    if before.key.python != key.python:
        return Loss.PYTHON_CHANGED
    if before.key.cwd != key.cwd:
        return Loss.CWD_CHANGED
    return Loss.VARIANT_CHANGED if before.key.variant != key.variant else reason
