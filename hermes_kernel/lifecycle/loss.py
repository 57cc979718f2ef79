"""Why a call did not find the state of its owner's last call."""

from collections import OrderedDict
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


@dataclass
class LossLedger:
    """What each owner must still be told about state that is gone.

    Remembers at most *capacity* owners, the ones that called last: an owner that was forgotten is told
    nothing, as on its first call.
    """

    capacity: int = 10_000
    _last_key: OrderedDict[Owner, KernelKey] = field(default_factory=OrderedDict, init=False)
    _untold: dict[KernelKey, Loss] = field(default_factory=dict, init=False)

    def record(self, key: KernelKey, loss: Loss) -> None:
        """Note that the kernel of *key* has ended and took its state along; the first reason counts."""
        if key.owner in self._last_key:
            self._untold.setdefault(key, loss)

    def tell(self, key: KernelKey) -> Loss | None:
        """Return why a cell on *key* does not find the last cell's state, and count it as told."""
        return self.say(key).loss

    def say(self, key: KernelKey) -> "Telling":
        """Like ``tell``, for a cell that may yet not run: then ``unsay`` what is returned."""
        owner = key.owner
        before = self._last_key.get(owner)
        self._last_key[owner] = key
        self._last_key.move_to_end(owner)
        while len(self._last_key) > self.capacity:
            forgotten, _ = self._last_key.popitem(last=False)
            for stale in [k for k in self._untold if k.owner == forgotten]:
                del self._untold[stale]
        own = self._untold.pop(key, None)
        return Telling(key, before, own, _reason(before, key, own))

    def unsay(self, telling: "Telling") -> None:
        """The cell did not run: its owner still has to be told."""
        key, before = telling.key, telling.before
        if before is None:
            self._last_key.pop(key.owner, None)
            self._untold.pop(key, None)
            return
        self._last_key[key.owner] = before
        if telling.own is not None:
            self._untold[key] = telling.own


@dataclass(frozen=True)
class Telling:
    """What was said to a call: the reason, the owner's key before, the loss of this key's kernel."""

    key: KernelKey
    before: KernelKey | None
    own: Loss | None
    loss: Loss | None


def _reason(before: KernelKey | None, key: KernelKey, own: Loss | None) -> Loss | None:
    if before is None or before == key:
        return own
    if before.python != key.python:
        return Loss.PYTHON_CHANGED
    return Loss.CWD_CHANGED if before.cwd != key.cwd else own
