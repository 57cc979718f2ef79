"""Which kernels exist, who holds them, and which must go.

The population decides and the registry acts: every method takes the time as an argument and returns the
kernels to close, each exactly once. What is attached stays in service through sweep, cap and reset; only
``close`` ends it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .key import KernelKey
from .loss import Loss, LossLedger


@dataclass(eq=False)
class KernelRecord:
    """One kernel: whose it is, when it was used last (in the clock's seconds), and by how many calls.

    ``has_state``: a cell has run on it. A ``pinned`` kernel belongs to a delegated child that lives: neither
    the cap nor idleness ends it. ``is_visited``: a person's cell runs on it, which is a use like others.
    """

    key: KernelKey
    last_used: float
    pinned: bool = False
    attached: int = 0
    has_state: bool = False
    is_visited: bool = False


@dataclass(frozen=True)
class Claim:
    """A call's hold on a kernel. ``is_new``: nobody has started it yet. ``doomed``: close these."""

    record: KernelRecord
    is_new: bool
    doomed: tuple[KernelRecord, ...] = ()


@dataclass
class KernelPopulation:
    """The kernels of one registry.

    At most *max_kernels* unpinned ones are kept when nobody uses them; an unpinned one that nobody has used
    for *idle_timeout* seconds goes.
    """

    max_kernels: int
    idle_timeout: float
    ledger: LossLedger = field(default_factory=LossLedger)
    losses: Counter[Loss] = field(default_factory=Counter, init=False)
    _serving: dict[KernelKey, KernelRecord] = field(default_factory=dict, init=False)
    _retired: set[KernelRecord] = field(default_factory=set, init=False)

    def __iter__(self) -> Iterator[KernelRecord]:
        """All kernels that are not to be closed: in service, or retired and still in use."""
        yield from self._serving.values()
        yield from self._retired

    def __len__(self) -> int:
        return len(self._serving) + len(self._retired)

    def serves(self, record: KernelRecord) -> bool:
        """Whether a call on the record's key would get this very kernel."""
        return self._serving.get(record.key) is record

    def claim(self, key: KernelKey, now: float, *, reset: bool = False, pinned: bool = False) -> Claim:
        """Attach a call to the kernel of *key*, and add one if there is none or it is to be reset.

        A kernel that is reset while calls use it serves them to the end and then goes.
        """
        doomed = [*self.sweep(now)]
        record = self._serving.get(key)
        if record is not None and reset:
            doomed += self.doom(record, Loss.RESET)
            record = None
        is_new = record is None
        if record is None:
            record = self._serving[key] = KernelRecord(key, now)
        record.attached += 1
        record.last_used = now
        record.pinned = record.pinned or pinned
        doomed += self._over_capacity()
        return Claim(record, is_new, tuple(doomed))

    def release(self, record: KernelRecord, now: float) -> tuple[KernelRecord, ...]:
        """Detach a call; the last one out of a retired kernel closes it, and the cap holds again."""
        record.attached -= 1
        record.last_used = now
        if record.attached == 0 and record in self._retired:
            self._retired.discard(record)
            return (record, *self._over_capacity())
        return self._over_capacity()

    def visit(self, record: KernelRecord, now: float, *, is_visited: bool) -> tuple[KernelRecord, ...]:
        """A person's cell begins on a kernel, or none runs there any more."""
        record.is_visited, record.last_used = is_visited, now
        return self._over_capacity()

    def doom(self, record: KernelRecord, loss: Loss | None) -> tuple[KernelRecord, ...]:
        """Take *record* out of service, for a reason that its owner is told; close it unless it is in use."""
        if not self.serves(record):
            return ()
        del self._serving[record.key]
        if loss is not None:
            self.losses[loss] += 1
            self.ledger.record(record.key.owner, record, loss)
        if record.attached:
            self._retired.add(record)
            return ()
        return (record,)

    def close(self, record: KernelRecord, loss: Loss | None) -> tuple[KernelRecord, ...]:
        """End *record* although it may be in use: it is to be closed now; nothing if that was said before."""
        doomed = self.doom(record, loss)
        if record in self._retired:
            self._retired.discard(record)
            return (record,)
        return doomed

    def sweep(self, now: float) -> tuple[KernelRecord, ...]:
        """Take out of service what nobody has used for ``idle_timeout``."""
        idle = [record for record in self._free() if now >= record.last_used + self.idle_timeout]
        return self._doom_all(idle, Loss.IDLE)

    def next_sweep(self) -> float:
        """When ``sweep`` will find something at the earliest; infinity if never, as things are."""
        return min((record.last_used + self.idle_timeout for record in self._free()), default=math.inf)

    def _free(self) -> Iterator[KernelRecord]:
        return (r for r in self._serving.values() if not (r.pinned or r.attached or r.is_visited))

    def _over_capacity(self) -> tuple[KernelRecord, ...]:
        unpinned = sum(not record.pinned for record in self._serving.values())
        by_age = sorted(self._free(), key=lambda record: record.last_used)
        return self._doom_all(by_age[: max(0, unpinned - self.max_kernels)], Loss.EVICTED)

    def _doom_all(self, records: Iterable[KernelRecord], loss: Loss) -> tuple[KernelRecord, ...]:
        return tuple(gone for record in list(records) for gone in self.doom(record, loss))
