"""One execution of one cell, as a state machine over Jupyter messages.

The machine does no I/O and has no clock: it is fed what arrives, with the time at which it arrived, and says
when it wants to be asked again (``deadline``) and whether the cell is settled. The settle rule is that of
nbclient: a cell is over when its reply is in *and* the idle status of the same request.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from ..errors import plain_text
from .message import Message
from .outputs import CellError, OutputCollector, cell_error, count_of
from .request import CellTimes
from .status import CellStatus, Fate, Phase

REPLY = "execute_reply"
STARTED = "hermes_cell_started"
"""What our kernel sends on the shell channel before a cell runs: it leaves even if the cell keeps the GIL."""

MOST_ORPHANS = 100  # texts that nobody has asked for, while it is open whether the kernel ends
MOST_LEFTOVERS = 20
LONGEST_NAME = 120

BUSY_GRACE = 5.0
"""Seconds from the send to the busy status; after that the cell's time runs without one."""


@dataclass(frozen=True)
class Settlement:
    """How a call came out: its status, how far it had come and what becomes of the kernel.

    ``exit_code`` is what the cell or its process ended with. ``idle_missing``: the kernel never said that it
    was done, so output may be missing. ``grace_until``: until when a kernel that was interrupted may show
    that it is sound.
    """

    status: CellStatus
    phase: Phase
    fate: Fate
    exit_code: int = 0
    error: CellError | None = None
    execution_count: int | None = None
    idle_missing: bool = False
    grace_until: float = 0.0

    @property
    def ran(self) -> bool:
        """Whether the code was handed to a kernel."""
        return self.phase is Phase.RAN


class _Stage(Enum):
    SENT = "sent"
    RUNNING = "running"
    ASKED_TO_END = "asked to end"
    SETTLED = "settled"


@dataclass
class CellExecution:
    """The life of one execute_request from the moment it was sent.

    ``interrupt_wanted`` says that the host should interrupt the kernel: the cell has been cut and may use its
    grace to end by itself.
    """

    msg_id: str
    times: CellTimes
    sent_at: float
    queue_deadline: float = math.inf
    outputs: OutputCollector = field(default_factory=OutputCollector)
    leftovers: tuple[str, ...] = field(default=(), init=False)
    """What the cell has left running: threads and processes, as the kernel names them."""

    anomalies: int = field(default=0, init=False)
    interrupt_wanted: bool = field(default=False, init=False)
    _stage: _Stage = field(default=_Stage.SENT, init=False)
    _since: float = field(init=False)
    _reply: Message | None = field(default=None, init=False)
    _replied_at: float = field(default=math.inf, init=False)
    _held: bool = field(default=False, init=False)
    _begun: bool = field(default=False, init=False)
    _count: int | None = field(default=None, init=False)
    _idle: bool = field(default=False, init=False)
    _orphans: list[Message] = field(default_factory=list, init=False)
    _cut: CellStatus | None = field(default=None, init=False)
    _settlement: Settlement | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._since = self.sent_at

    @property
    def settlement(self) -> Settlement | None:
        """How the cell came out; None while it has not."""
        return self._settlement

    @property
    def execution_count(self) -> int | None:
        """The number of the cell, None while it has none."""
        return self._count

    @property
    def deadline(self) -> float:
        """When ``tick`` is due at the latest; infinity while only a message can change anything."""
        match self._stage:
            case _Stage.SENT:
                return self.queue_deadline if self._held else self._since + BUSY_GRACE
            case _Stage.RUNNING if self._reply is not None:
                return self._replied_at + self.times.idle_grace
            case _Stage.RUNNING:
                return math.inf if self.times.timeout is None else self._since + self.times.timeout
            case _Stage.ASKED_TO_END:
                return self._since + self.times.interrupt_grace
            case _Stage.SETTLED:
                return math.inf

    def receive_iopub(self, message: Message, now: float) -> bool:
        """Take in a message of the IOPub channel; return whether it belongs to this cell.

        What is written after its settlement does if its kernel ends with it; else it is late output.
        """
        if self._settlement is not None:
            return self._receive_late(message, self._settlement)
        if message.parent_id != self.msg_id:
            self._hold_orphan(message)
            return False
        if message.msg_type == "execute_input":
            self._note_count(message)
        elif self._idle and message.msg_type == "stream":
            self.outputs.add_late(message)
        elif message.msg_type != "status":
            self.outputs.add(message)
        elif message.content["execution_state"] == "busy":
            self._begin(now)
        elif message.content["execution_state"] == "idle":
            self._idle = True
            self._settle_if_complete()
        return True

    def receive_reply(self, message: Message, now: float) -> bool:
        """Take in a message of the shell channel; return whether it is this cell's reply."""
        if message.parent_id != self.msg_id or message.msg_type not in (REPLY, STARTED):
            return False
        if message.msg_type == STARTED:
            self._begin(now)
            return True
        if self._reply is not None or self._stage is _Stage.SETTLED:
            self.anomalies += 1  # a cell has one reply; a second one is forged
            return True
        self._begin(now)
        self._reply = message
        self._note_count(message)
        self._note_report(message)
        self._replied_at = now
        self._settle_if_complete()
        return True

    def hold(self) -> None:
        """A cell of another client runs before this one: its time does not run yet."""
        self._held = self._held or self._stage is _Stage.SENT

    def resume(self, now: float) -> None:
        """No cell of another client runs any more."""
        if self._held and self._stage is _Stage.SENT:
            self._held, self._since = False, now

    def interrupt(self, now: float) -> None:
        """The caller wants the cell to end. One that has replied has ended: only its idle is outstanding."""
        if self._reply is None:
            self._ask_to_end(CellStatus.INTERRUPTED, now)

    def kernel_ended(self, exit_code: int, last_cell: str | None = None) -> None:
        """The kernel process is gone; *exit_code* is negative for a signal.

        *last_cell* is the cell that the kernel had begun last, None if that is not known.
        """
        if self._stage is _Stage.SETTLED:
            return
        if self._cut is not None:
            self._settle(self._cut, Fate.END, exit_code=-1)
        elif self._reply is not None:
            self._settle_by_reply(self._reply, Fate.END)
        elif last_cell is not None and last_cell != self.msg_id and not self._begun:
            self._settle(CellStatus.DIED, Fate.END, exit_code=exit_code, phase=Phase.STARTING)
        else:
            self._settle(CellStatus.DIED, Fate.END, exit_code=exit_code)

    def tick(self, now: float) -> None:
        """Let time act: start the clock, give up the wait for idle, or cut the cell."""
        if now < self.deadline:
            return
        if self._stage is _Stage.ASKED_TO_END:
            self._settle(self._cut or CellStatus.TIMED_OUT, Fate.END, exit_code=-1)
        elif self._reply is not None:
            self._settle_by_reply(self._reply, Fate.KEEP)
        elif self._stage is _Stage.SENT and not self._held:
            self._start_clock(now)
        else:
            self._ask_to_end(CellStatus.TIMED_OUT, now)

    def _hold_orphan(self, message: Message) -> None:
        """Keep what an exit handler may have written: it may overtake the reply that tells of the end."""
        is_orphan = message.parent_id is None and message.msg_type == "stream"
        if self._idle and is_orphan and len(self._orphans) < MOST_ORPHANS:
            self._orphans.append(message)

    def _receive_late(self, message: Message, settlement: Settlement) -> bool:
        is_own = message.parent_id == self.msg_id
        if message.msg_type != "stream":
            return is_own  # it changes nothing any more
        # Exit handlers run when no request is being answered.
        is_own = settlement.fate is Fate.END and (is_own or message.parent_id is None)
        if is_own:
            self.outputs.add_late(message)
        return is_own

    def _begin(self, now: float) -> None:
        self._begun = True
        self._start_clock(now)

    def _note_count(self, message: Message) -> None:
        count = message.content.get("execution_count")
        if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
            self._count = count

    def _note_report(self, message: Message) -> None:
        """Note what the kernel says of the cell; it is shown, and nothing is decided by it."""
        hermes = message.metadata.get("hermes")
        if not isinstance(hermes, dict):
            return
        self.outputs.left_out += count_of(hermes.get("left_out"))
        written, left = hermes.get("written"), hermes.get("leftovers")
        if isinstance(written, dict):
            self.outputs.written = {name: count_of(written.get(name)) for name in ("stdout", "stderr")}
        if isinstance(left, list):
            named = [plain_text(name)[:LONGEST_NAME] for name in left if isinstance(name, str)]
            self.leftovers = tuple(named[:MOST_LEFTOVERS])

    def _start_clock(self, now: float) -> None:
        if self._stage is _Stage.SENT:
            self._stage, self._since = _Stage.RUNNING, now

    def _ask_to_end(self, status: CellStatus, now: float) -> None:
        if self._stage not in (_Stage.SENT, _Stage.RUNNING):
            return
        self._cut = status
        if self.times.interrupt_grace > 0:
            self._stage, self._since = _Stage.ASKED_TO_END, now
            self.interrupt_wanted = True
        else:
            self._settle(status, Fate.END, exit_code=-1)

    def _settle_if_complete(self) -> None:
        if self._reply is None or not self._idle:
            return
        if self._cut is not None:
            fate = Fate.KEEP if _exit_code(self._reply) is None else Fate.END
            self._settle(self._cut, fate, exit_code=-1)
        else:
            self._settle_by_reply(self._reply, Fate.KEEP)

    def _settle_by_reply(self, reply: Message, fate: Fate) -> None:
        exit_code = _exit_code(reply)
        if exit_code is not None:
            self._settle(CellStatus.EXITED, Fate.END, exit_code=exit_code)
            return
        # The two channels disagree where a repr or a __str__ raises: an error on either is an error.
        error = self.outputs.error or _error_of(reply)
        if error is None:
            self._settle(CellStatus.OK, fate)
        else:
            self._settle(CellStatus.ERROR, fate, exit_code=1, error=error)

    def _settle(
        self,
        status: CellStatus,
        fate: Fate,
        *,
        exit_code: int = 0,
        error: CellError | None = None,
        phase: Phase = Phase.RAN,
    ) -> None:
        self._stage = _Stage.SETTLED
        self._settlement = Settlement(
            status=status,
            phase=phase,
            fate=fate,
            exit_code=exit_code,
            error=error,
            execution_count=self._count,
            idle_missing=status in (CellStatus.OK, CellStatus.ERROR) and not self._idle,
            grace_until=self._since + self.times.interrupt_grace if self.interrupt_wanted else 0.0,
        )
        if fate is Fate.END:
            for orphan in self._orphans:
                self.outputs.add_late(orphan)
        self._orphans.clear()


def cut_before_run(status: CellStatus, phase: Phase) -> Settlement:
    """Return the settlement of a call whose time or whose caller ended it before its code was sent."""
    return Settlement(status, phase, Fate.KEEP, exit_code=-1)


def _exit_code(reply: Message) -> int | None:
    """The code with which the cell ended its kernel, None if it did not."""
    hermes = reply.metadata.get("hermes")
    code = hermes.get("exit_code") if isinstance(hermes, dict) else None
    if isinstance(code, bool) or not isinstance(code, int):
        return None
    return code if -(2**31) <= code < 2**31 else 255


def _error_of(reply: Message) -> CellError | None:
    content = reply.content
    if content["status"] == "ok":
        return None
    if content["status"] == "aborted":
        return CellError("Aborted", "the kernel did not run this cell", "Aborted: the kernel did not run it")
    return cell_error(content["ename"], content["evalue"], content.get("traceback", []))
