"""What the sidecars ask of macOS. Standard library only, Python 3.10.

On macOS an orphan becomes a child of launchd, whoever it descends from. Its birth is not forgotten, though:
every process has a number that no other gets, and keeps that of the process that forked it. So a sidecar
remembers whom it has seen below it (``Family``), and finds an orphan again by its parent's number; where
there is no such number, by what was seen before its parent ended; else by the session it is in. A process
whose parent was never seen, and that has left its session, is not found: this is a best effort.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LAUNCHD = 1
STOPPED, ZOMBIE = 4, 5  # SSTOP and SZOMB
FORGET_AFTER = 2  # looks that do not find a process until it counts as gone
LOOK_AFTER = 256  # ends of processes until all are looked at, so that the dead are forgotten
MICROSECONDS = 1_000_000

PROC_ALL_PIDS = 1
PROC_PPID_ONLY = 6
PROC_PIDTBSDINFO = 3
PROC_PIDT_SHORTBSDINFO = 13
PROC_PIDUNIQIDENTIFIERINFO = 17
PROC_PIDT_BSDINFOWITHUNIQID = 18
ZOMBIES_TOO = 1
ROOM = 64  # for processes that are made between two calls
EVFILT_PROC = -5
EV_ADD = 1
NOTE_EXIT = 0x8000_0000
NOTE_FORK = 0x4000_0000
EVENTS = 64  # that are taken at once

Identity = tuple[int, int]  # what no two processes share: the number, or pid and start where there is none


class Process(NamedTuple):
    """A process as it was at one look; 0 is what macOS does not tell.

    ``started``: in microseconds since the epoch. ``number``: its own for good; ``born_of``: that of the
    process that forked it.
    """

    pid: int
    parent: int
    state: int
    started: int = 0
    number: int = 0
    born_of: int = 0

    @property
    def identity(self) -> Identity:
        """What no other process has."""
        return (self.number, 0) if self.number else (self.pid, self.started)

    @property
    def birth(self) -> Identity | None:
        """The identity of the process that forked it, if macOS tells that."""
        return (self.born_of, 0) if self.born_of else None

    @property
    def lives(self) -> bool:
        """Whether it is more than an exit status that nobody has taken yet."""
        return self.state != ZOMBIE


@dataclass
class Relative:
    """One of a family: who forked it, as far as that is known, and how many looks have not needed it."""

    pid: int
    parent: Identity | None
    missed: int = 0


class Family:
    """A process and all that descends from it, as far as it was seen: those whose parents have ended, too.

    ``queue``: where macOS tells of forks and ends; None if it does not.
    """

    def __init__(self, calls: "Darwin", pid: int) -> None:
        self.pid = pid
        self._calls = calls
        self._relatives: dict[Identity, Relative] = {}
        self._by_pid: dict[int, Identity] = {}
        self._sessions: dict[int, Identity] = {}  # those that one of the family leads, or has led
        self._ends = 0
        try:
            self.queue: int | None = calls.queue()
        except OSError:  # no descriptors left: then only looks find who has come
            self.queue = None

    def look(self) -> dict[int, Process]:
        """Look at all processes and find who has come to the family; return them all by their pid."""
        table = {process.pid: process for process in self._calls.processes()}
        self._by_pid = {p.pid: p.identity for p in table.values() if p.identity in self._relatives}
        if self.pid in table and self.pid not in self._by_pid:
            self._add(table[self.pid], None)
        self._sessions.update(self._sessions_in(table))
        self._welcome(table)
        self._sessions = self._sessions_in(table)
        self._forget()
        self._ends = 0
        return table

    def take_news(self) -> None:
        """Take in what macOS tells: who has forked is asked at once for its children."""
        if self.queue is None:
            return
        has_lost_a_leader = False
        for pid, what in self._calls.events(self.queue):
            if what & NOTE_FORK:
                self._welcome_children(pid)
            if what & NOTE_EXIT:
                self._ends += 1
                has_lost_a_leader |= pid in self._sessions
        # Who is left in the session of one that has ended is to be found while its number is nobody else's.
        if has_lost_a_leader or self._ends >= LOOK_AFTER:
            self.look()

    def parent_of(self, process: Process, table: Mapping[int, Process]) -> int:
        """Return whose child a process is: an orphan's is the nearest ancestor that lives."""
        if process.pid == self.pid or process.identity not in self._relatives or not process.lives:
            return process.parent
        parent = table.get(process.parent)
        if parent is not None and parent.identity in self._relatives:
            return process.parent
        for ancestor in self._ancestors(process.identity):
            found = table.get(self._relatives[ancestor].pid)
            if found is not None and found.lives and found.identity == ancestor:
                return found.pid
        return process.parent

    def _ancestors(self, identity: Identity) -> Iterator[Identity]:
        parent = self._relatives[identity].parent
        while parent is not None and parent in self._relatives:
            yield parent
            parent = self._relatives[parent].parent

    def _welcome(self, table: Mapping[int, Process]) -> None:
        """Take in every process that belongs here, until one round finds nobody."""
        strangers = sorted(table.values(), key=lambda process: process.number)  # parents before children
        has_come = True
        while has_come:
            has_come = False
            strangers = [process for process in strangers if process.identity not in self._relatives]
            for process in strangers:
                parent = self._parent_in_family(process, table)
                if parent is not None:
                    self._add(process, parent)
                    has_come = True

    def _parent_in_family(self, process: Process, table: Mapping[int, Process]) -> Identity | None:
        if process.birth in self._relatives:
            return process.birth
        parent = table.get(process.parent)
        if parent is not None and parent.identity in self._relatives:
            return parent.identity
        if process.parent == LAUNCHD and process.lives:
            return self._sessions.get(self._calls.session(process.pid))
        return None

    def _welcome_children(self, pid: int) -> None:
        """Take in the children of one of the family."""
        parent = self._calls.process(pid)
        if parent is None or parent.identity not in self._relatives:  # it is somebody else by now
            return
        for child in self._calls.children(pid):
            process = self._calls.process(child)
            if process is not None and process.parent == pid and process.identity not in self._relatives:
                self._add(process, parent.identity)

    def _add(self, process: Process, parent: Identity | None) -> None:
        self._relatives[process.identity] = Relative(process.pid, parent)
        self._by_pid[process.pid] = process.identity
        if self.queue is None:
            return
        try:
            self._calls.tell(self.queue, process.pid, NOTE_FORK | NOTE_EXIT)
        except OSError:  # it has ended, or is another user's now: then a look finds whom it has forked
            return
        if parent is not None:
            self._welcome_children(process.pid)  # those that it had before

    def _sessions_in(self, table: Mapping[int, Process]) -> dict[int, Identity]:
        """Return the sessions that are or were led by one of the family, if one of the family is in them."""
        found: dict[int, Identity] = {}
        for pid, identity in self._by_pid.items():
            process = table.get(pid)
            if process is None or process.identity != identity or not process.lives:
                continue
            session = self._calls.session(pid)
            leader = self._by_pid.get(session) or self._sessions.get(session)
            if leader is not None:
                found[session] = leader
        return found

    def _forget(self) -> None:
        """Forget who is gone and has left nobody. Not at once: the look may just have missed a child."""
        needed = set(self._by_pid.values())
        for identity in self._by_pid.values():
            needed.update(self._ancestors(identity))
        for identity, relative in list(self._relatives.items()):
            relative.missed = 0 if identity in needed else relative.missed + 1
            if relative.missed >= FORGET_AFTER:
                del self._relatives[identity]


class MacOS:
    """The functions that every platform has (see ``linux``), over the calls of macOS."""

    def __init__(self, calls: "Darwin") -> None:
        self._calls = calls
        self._known: Family | None = None

    def adopt_orphans(self) -> None:
        """Begin to remember who descends from this process, so that orphans are found again."""
        self._family().look()

    def news(self) -> int | None:
        """Return a descriptor that is readable when there is something to ``take_news`` of."""
        return self._family().queue

    def take_news(self) -> None:
        """Take in who has come to those that descend from this process, and who has ended."""
        self._family().take_news()

    def signal_at_parents_end(self, signum: int) -> None:
        """Nothing: no parent's end sends a signal. A kernel looks for its parent itself."""

    def hide(self) -> None:
        """Nothing: here only root may read the memory of others."""

    def watch(self, pid: int) -> int | None:
        """Return a descriptor that is readable once the process is gone; None if there is no such thing.

        A child that is forked does not get it. Raises ProcessLookupError if the process is gone already.
        """
        try:
            queue = self._calls.queue()
        except OSError:
            return None
        try:
            self._calls.tell(queue, pid, NOTE_EXIT)
            if self.started(pid) is None:  # it ended before that was asked for
                raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
        except ProcessLookupError:
            self._calls.close(queue)
            raise
        except OSError:
            self._calls.close(queue)
            return None
        return queue

    def started(self, pid: int) -> int | None:
        """Return when a process started, in seconds since the epoch; None if it is gone.

        0 if it is another user's, who does not tell.
        """
        process = self._calls.process(pid)
        return process.started // MICROSECONDS if process is not None and process.lives else None

    def children(self) -> list[int]:
        """Return the children of this process, zombies too, and the orphans that it would have adopted."""
        family = self._family()
        table = family.look()
        return [pid for pid, process in table.items() if family.parent_of(process, table) == family.pid]

    def children_of(self, pid: int) -> list[int]:
        """Return the children of a process; raises OSError."""
        family = self._family()
        table = family.look()
        if pid not in table:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
        return [child for child, process in table.items() if family.parent_of(process, table) == pid]

    def descendants(self, roots: list[int]) -> list[tuple[int, bool]]:
        """Return *roots* and all that descends from them: each process, and if it is stopped or a zombie."""
        family = self._family()
        table = family.look()
        below: dict[int, list[int]] = {}
        for pid, process in table.items():
            below.setdefault(family.parent_of(process, table), []).append(pid)
        found = []
        pending = [root for root in roots if root in table]
        while pending:
            pid = pending.pop()
            found.append((pid, table[pid].state in (STOPPED, ZOMBIE)))
            pending += below.get(pid, ())
        return found

    def mark_environment(self, name: str, value: str) -> None:
        """Overwrite a variable where others read it, if it has the same length; raises OSError.

        They read the memory in which the process was given its environment.
        """
        if not self._calls.overwrite(name, value):
            raise OSError(errno.EINVAL, f"{name} has no place of the right size in the environment")

    def enter_user_and_pid_namespace(self) -> None:
        """Raise OSError: there are no namespaces."""
        raise OSError(errno.ENOTSUP, "macOS has no pid namespaces")

    def see_own_processes_only(self) -> None:
        """Raise OSError: every process sees all."""
        raise OSError(errno.ENOTSUP, "macOS has no pid namespaces")

    def forbid_new_privileges(self) -> None:
        """Raise OSError: a program that has more rights than its caller gets them."""
        raise OSError(errno.ENOTSUP, "macOS cannot keep a program from getting more privileges")

    def _family(self) -> Family:
        """Return the family of this process. A fork begins its own: it has no queue of its parent's."""
        pid = self._calls.own_pid()
        if self._known is None or self._known.pid != pid:
            self._known = Family(self._calls, pid)
        return self._known


class _Ids(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("own", ctypes.c_uint64),
        ("born_of", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 3),
    )


class _Info(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("flags", "state", "exit_status", "pid", "parent")),
        ("users_and_groups", ctypes.c_uint32 * 7),
        ("names", ctypes.c_char * 48),
        ("more", ctypes.c_uint32 * 6),
        ("seconds", ctypes.c_uint64),
        ("microseconds", ctypes.c_uint64),
    )


class _InfoWithIds(ctypes.Structure):
    _fields_ = (("info", _Info), ("ids", _Ids))


class _ShortInfo(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("pid", "parent", "group", "state")),
        ("name", ctypes.c_char * 16),
        ("more", ctypes.c_uint32 * 8),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("about", ctypes.c_size_t),
        ("filter", ctypes.c_int16),
        ("flags", ctypes.c_uint16),
        ("what", ctypes.c_uint32),
        ("data", ctypes.c_ssize_t),
        ("user_data", ctypes.c_void_p),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NUMBER, _POINTER = ctypes.c_int, ctypes.c_void_p
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "proc_listpids": (ctypes.c_uint32, ctypes.c_uint32, _POINTER, _NUMBER),
    "proc_pidinfo": (_NUMBER, _NUMBER, ctypes.c_uint64, _POINTER, _NUMBER),
    "kqueue": (),
    "kevent": (_NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER),
}


class Darwin:
    """The calls that are made of macOS, one each.

    *libc* has the functions (libproc is a part of it), *last_error* returns the errno of what failed last.
    """

    def __init__(self, libc: Any, last_error: Callable[[], int]) -> None:
        self._libc = libc
        self._last_error = last_error

    @classmethod
    def of_this_system(cls) -> "Darwin":
        """Return the calls of the system that this process runs on."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.getenv.argtypes, libc.getenv.restype = (ctypes.c_char_p,), _POINTER
        if sys.platform == "darwin":
            declare(libc)
        return cls(libc, ctypes.get_errno)

    def own_pid(self) -> int:
        """Return the pid of this process."""
        return os.getpid()

    def session(self, pid: int) -> int:
        """Return the session in which a process is; 0 if it is gone, or nobody may know."""
        try:
            return os.getsid(pid)
        except OSError:
            return 0

    def processes(self) -> Iterator[Process]:
        """Return all processes, zombies too; raises OSError."""
        for pid in self._pids(PROC_ALL_PIDS, 0):
            process = self.process(pid)
            if process is not None:
                yield process

    def children(self, pid: int) -> list[int]:
        """Return the children of a process, zombies too; raises OSError."""
        return self._pids(PROC_PPID_ONLY, pid)

    def process(self, pid: int) -> Process | None:
        """Return a process as it is now, also a zombie; None if it is gone."""
        both = _InfoWithIds()
        error = self._ask(pid, PROC_PIDT_BSDINFOWITHUNIQID, both)
        if error == errno.ESRCH:
            return None
        if error == errno.EPERM:  # another user's: less is told, but enough
            return self._process_of_another(pid)
        if error and self._ask(pid, PROC_PIDTBSDINFO, both.info):  # it has gone meanwhile
            return None
        info, ids = both.info, both.ids
        started = info.seconds * MICROSECONDS + info.microseconds
        return Process(pid, info.parent, info.state, started, ids.own, ids.born_of)

    def queue(self) -> int:
        """Return the descriptor of a new queue of events; raises OSError."""
        queue = self._libc.kqueue()
        if queue < 0:
            raise self._failure("kqueue")
        os.set_inheritable(queue, False)
        return int(queue)

    def tell(self, queue: int, pid: int, what: int) -> None:
        """Have a queue told what happens to a process; raises OSError, ProcessLookupError if it is gone."""
        wish = _Event(pid, EVFILT_PROC, EV_ADD, what)
        if self._libc.kevent(queue, ctypes.byref(wish), 1, None, 0, None) < 0:
            raise self._failure("kevent")

    def events(self, queue: int) -> list[tuple[int, int]]:
        """Take what a queue was told: each process, and what has happened to it. Nothing is waited for."""
        found: list[tuple[int, int]] = []
        events = (_Event * EVENTS)()
        while True:
            count = self._libc.kevent(queue, None, 0, events, EVENTS, ctypes.byref(_Time(0, 0)))
            found += [(event.about, event.what) for event in events[: max(0, count)]]
            if count < EVENTS:  # that was all, or it failed, and looks will find them
                return found

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def overwrite(self, name: str, value: str) -> bool:
        """Overwrite the value of a variable in its place; return whether it had one of this length."""
        place = self._libc.getenv(name.encode())
        data = value.encode()
        if not place or len(ctypes.string_at(place)) != len(data):
            return False
        ctypes.memmove(place, data, len(data))
        return True

    def _process_of_another(self, pid: int) -> Process | None:
        short, ids = _ShortInfo(), _Ids()
        if self._ask(pid, PROC_PIDT_SHORTBSDINFO, short):
            return None
        self._ask(pid, PROC_PIDUNIQIDENTIFIERINFO, ids)  # zeros, if that is not told
        return Process(pid, short.parent, short.state, 0, ids.own, ids.born_of)

    def _ask(self, pid: int, flavor: int, answer: ctypes.Structure) -> int:
        """Fill *answer*, and return the errno, 0 if there is none."""
        size = ctypes.sizeof(answer)
        got = self._libc.proc_pidinfo(pid, flavor, ZOMBIES_TOO, ctypes.byref(answer), size)
        return 0 if got == size else self._last_error() or errno.EIO

    def _pids(self, which: int, whose: int) -> list[int]:
        size = ctypes.sizeof(_NUMBER)
        room = self._libc.proc_listpids(which, whose, None, 0) // size + ROOM
        while True:
            pids = (_NUMBER * room)()
            got = self._libc.proc_listpids(which, whose, pids, ctypes.sizeof(pids))
            if got < 0 or (got == 0 and which == PROC_ALL_PIDS):
                raise self._failure("proc_listpids")
            if got < ctypes.sizeof(pids):
                return [pid for pid in pids[: got // size] if pid > 0]
            room *= 2  # there may be more

    def _failure(self, name: str) -> OSError:
        number = self._last_error()
        return OSError(number, f"{name}: {os.strerror(number)}")


def declare(libc: Any) -> None:
    """Say what the functions take that only macOS has; all of them return a C int."""
    for name, arguments in SIGNATURES.items():
        getattr(libc, name).argtypes = arguments


# A module is what the sidecars know of a platform, so there is one of this kind for each process.
_system = MacOS(Darwin.of_this_system())
adopt_orphans = _system.adopt_orphans
news = _system.news
take_news = _system.take_news
signal_at_parents_end = _system.signal_at_parents_end
hide = _system.hide
watch = _system.watch
started = _system.started
children = _system.children
children_of = _system.children_of
descendants = _system.descendants
mark_environment = _system.mark_environment
enter_user_and_pid_namespace = _system.enter_user_and_pid_namespace
see_own_processes_only = _system.see_own_processes_only
forbid_new_privileges = _system.forbid_new_privileges
