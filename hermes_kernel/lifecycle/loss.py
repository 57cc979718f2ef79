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
        """Note that the kernel of *key* has ended and took its state along."""
        if key.owner in self._last_key:
            self._untold[key] = loss

    def tell(self, key: KernelKey) -> Loss | None:
        """Return why a call on *key* does not find the last call's state, and count it as told."""
        owner = key.owner
        before = self._last_key.get(owner)
        self._last_key[owner] = key
        self._last_key.move_to_end(owner)
        while len(self._last_key) > self.capacity:
            forgotten, _ = self._last_key.popitem(last=False)
            for stale in [k for k in self._untold if k.owner == forgotten]:
                del self._untold[stale]
        loss = self._untold.pop(key, None)
        if before is None or before == key:
            return loss
        return Loss.PYTHON_CHANGED if before.python != key.python else Loss.CWD_CHANGED
