"""How a forked child of the warden becomes a kernel: its descriptors, its limits, then the kernel itself.

The descriptor BIRTH tells it twice what it is to be, a line of JSON each: the terms, then the start.
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol

BIRTH = 7  # where it reads what it is to be
BOUND = 8  # where it says that it has opened its sockets
FIRST_FREE = 9
CANNOT_BEGIN = 127
LEISURE = 0.2  # seconds without terms: no start, this kernel's or another's, waits for the processors
OOM_SCORE = b"500"


class Kernel(Protocol):
    """A kernel that is all there but for what tells it from others."""

    how: str
    """How it is made: ``"fork"`` or ``"spawn"``."""

    note: str | None
    """Why it is not made in a faster way, if it is not."""

    greets: bool
    """Whether it is about to serve cells when it welcomes a subscriber, and all is known of it."""

    def rehearse(self) -> None:
        """Do what makes the first cell quicker; there is time, nobody has asked for the kernel yet."""

    def bind(self, place: str, directory: str, *, waits: bool) -> None:
        """Open at *place* what others connect to, before it is known which kernel it will be.

        What it leaves stands in *directory*, which may have another name when it begins.
        *waits*: there is time, nobody waits for it yet.
        """

    def begin(self, start: "Start") -> int:
        """Be this kernel; return the exit code if it comes back."""


class Terms(NamedTuple):
    """What is said of a kernel before it is known which it will be.

    ``directory``: what it leaves stands there. ``place``: where it is to open its sockets; None = where it is
    told to at its start. ``waits``: whether that is not known yet.
    """

    isolation: str
    memory_limit: int | None
    directory: str
    place: str | None
    waits: bool


class Start(NamedTuple):
    """What a kernel is to be: the interpreter with its options, what that is given, its environment."""

    interpreter: Sequence[str]
    arguments: Sequence[str]
    env: Mapping[str, str]
    cwd: str


class Spawned:
    """A kernel that is a program to be executed."""

    how = "spawn"
    greets = False

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def rehearse(self) -> None:
        """Nothing: there is no kernel yet."""

    def bind(self, place: str, directory: str, *, waits: bool) -> None:
        """Nothing: the program does it."""

    def begin(self, start: Start) -> int:
        """Execute the interpreter."""
        for number in (signal.SIGINT, signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
            signal.signal(number, signal.SIG_DFL)  # what Python ignores, a program need not
        os.execve(start.interpreter[0], [*start.interpreter, *start.arguments], start.env)


def be_born(kernel: Kernel, descriptors: Mapping[int, int]) -> NoReturn:
    """Be a kernel as soon as the descriptor BIRTH says which; end if it says nothing.

    *descriptors* maps the numbers that the kernel knows to those that the warden has. Nothing else of the
    warden's stays open.
    """
    code = CANNOT_BEGIN
    try:
        arrange(descriptors)
        with open(BIRTH, "rb") as birth:
            if not select.select([birth], [], [], LEISURE)[0]:
                rehearse(kernel)
            terms = Terms(**read(birth))
            limit_harm(terms.memory_limit)
            if terms.place is not None:
                kernel.bind(terms.place, terms.directory, waits=terms.waits)
            os.write(BOUND, b"b")
            os.close(BOUND)
            start = Start(**read(birth))
        os.chdir(start.cwd)
        code = kernel.begin(start)
    except BaseException:  # noqa: BLE001  # the edge of the process: its last words are read by the warden
        traceback.print_exc(file=sys.__stderr__)
    finally:
        flush()
        os._exit(code)


def rehearse(kernel: Kernel) -> None:
    """Have the kernel rehearse. One that cannot is a kernel all the same: its terms may be on their way."""
    try:
        kernel.rehearse()
    except Exception:  # noqa: BLE001  # whatever has changed in ipykernel; its first cell will show it
        traceback.print_exc(file=sys.__stderr__)


def arrange(descriptors: Mapping[int, int]) -> None:
    """Have the descriptors where *descriptors* says, from 0 on, and no others."""
    out_of_the_way = [fcntl.fcntl(source, fcntl.F_DUPFD, FIRST_FREE) for source in descriptors.values()]
    for place, source in zip(descriptors, out_of_the_way, strict=True):
        os.dup2(source, place, inheritable=place not in (BIRTH, BOUND))
    os.closerange(FIRST_FREE, highest_descriptor() + 1)


def highest_descriptor() -> int:
    """Return the highest descriptor that may be open."""
    try:
        return max(map(int, os.listdir("/dev/fd")))
    except OSError:  # not mounted
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return min(soft, 1 << 16)


def limit_harm(memory_limit: int | None) -> None:
    """Leave no core dump of a conversation, let the host live when memory runs out, and bound the memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        bound = memory_limit if hard == resource.RLIM_INFINITY else min(memory_limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    try:
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(score, OOM_SCORE)
        finally:
            os.close(score)
    except OSError:  # no /proc (macOS), or not allowed: a preference, not a promise
        pass


def read(birth: BinaryIO) -> dict[str, Any]:
    """Read the next that this kernel is told; if nobody says it, there is to be no kernel."""
    line = birth.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    told: dict[str, Any] = json.loads(line)
    return told


def flush() -> None:
    """Write out what the standard streams hold, whatever a cell has made of them."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # the process ends now: there is nobody left to tell
            if stream is not None:
                stream.flush()
