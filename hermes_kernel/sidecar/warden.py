"""The warden: parent of one kernel, and of every orphan that its cells leave; it outlives none of them.

A small single-threaded process between the host and a kernel. It speaks lines of JSON with the host:

    host    {"prepare": {"isolation": …, "memory_limit": …, "directory": …, "place": …, "waits": …},
             "remains": […]}                                     once: have a kernel ready
            {"start": {"interpreter": […], "arguments": […], "env": {…}, "cwd": …}, "remains": […]}
                                                                 once, with a lease: say which kernel it is
            {"signal": N}   {"end": true}
    warden  {"kernel": pid, "warden": pid, "how": …, "note": …, "greets": …}  or {"refused": why, …}
            {"bound": true}                                      its sockets are there
            {"exited": pid, "code": …, "early": …, "left": […]}
            {"ended": clean, "seconds": …}                       its last word

The end of the connection, of the host or of the kernel ends the tree, and so does SIGTERM. If the host is
gone, the warden also removes the kernel's files, the *remains*.

A kernel is forked before anybody asks for one, which takes its time: it waits until it is told its terms.
"""

import array
import base64
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from .birth import BIRTH, BOUND, Kernel, Terms, be_born, highest_descriptor
from .events import Events, Host
from .remains import remove
from .streams import STREAMS
from .system import system
from .tree import end_tree, ended_children

EARLY = 64 * 1024  # bytes that are kept of what a kernel writes before it takes its pipes
LEFT = 1024 * 1024  # bytes of a dead kernel's pipe that are kept: as many as the pipe can hold
READ_SIZE = 64 * 1024
TAIL = 4096  # bytes of the early output that the host is told
DYING = 0.5  # seconds for a host that has left the connection to be gone, if that is why
FIRST_WORD = 5.0  # seconds for the first process of a namespace to have its kernel


class IsolationError(OSError):
    """There is no namespace for the kernel."""


class Warden:
    """One warden process, from its first line to its end."""

    def __init__(self, source: int, host: Host, kernel: Kernel) -> None:
        self._source = source  # where the connection to the host comes from
        self._control = -1
        self._events = Events(host)
        self._kernel = kernel
        self._received = b""
        self._to_send = b""
        self._to_kernel = b""
        self._birth = -1  # where the kernel reads what it is to be
        self._is_told = False  # all that it is to be
        self._first = 0  # our child: the kernel, or the first process of its namespace
        self._pid = 0
        self._kernel_watch: int | None = None
        self._status: int | None = None
        self._early_end = self._bound_end = self._status_end = -1
        self._pipes: tuple[int, ...] = ()
        self._early = bytearray()
        self._host_has_left = False
        self._is_reported = False
        self._remains: list[str] = []
        self._leases: list[int] = []  # held as long as this process lives

    def run(self) -> None:
        """Wait for a connection, have a kernel, and see to it that nothing of it is left in the end."""
        system.adopt_orphans()
        system.signal_at_parents_end(signal.SIGCONT)  # whoever has stopped us: somebody has to clean up
        try:
            self._make(isolated=False)
        except OSError:  # it is tried again when a kernel is asked for, and told then
            pass
        if not self._connect():
            return  # which ends what waits for its terms
        try:
            self._serve()
            self._take_early()
            self._report_exit()
        finally:
            began = time.monotonic()
            clean = end_tree(self._events, self._reap)
            self._report_exit()
            self._tell({"ended": clean, "seconds": round(time.monotonic() - began, 4)})
            self._send_rest()
            if self._events.host_ends_within(DYING if self._host_has_left else 0):
                self._note_remains()
                remove(self._remains)

    def _connect(self) -> bool:
        """Wait for the connection to the host; return whether there is one.

        It may have come before the host died: what that has said is to be done.
        """
        while True:
            is_over = self._events.is_over
            if self._events.wait([self._source], timeout=0 if is_over else None):
                _, connections = receive(self._source, 1)
                os.close(self._source)
                if connections:
                    self._control = connections[0]
                    os.set_blocking(self._control, False)
                return bool(connections)
            if is_over:
                return False

    def _serve(self) -> None:
        prepared = False
        while not self._is_over():
            for line in self._lines():
                if "prepare" in line and not prepared:
                    prepared = True
                    self._remains = line["remains"]
                    try:
                        self._prepare(Terms(**line["prepare"]))
                    except OSError as error:
                        refused = isinstance(error, IsolationError)
                        self._tell({"refused": str(error), "errno": error.errno, "isolation": refused})
                        return
                elif "start" in line:
                    self._to_kernel += json.dumps(line["start"]).encode() + b"\n"
                    self._is_told = True
                    self._remains = line["remains"]
                elif "signal" in line:
                    self._signal(int(line["signal"]))
                elif "end" in line:
                    return
            self._wait()

    def _note_remains(self) -> None:
        """Find what the host has said and nobody has read, because it was gone by then."""
        while not self._host_has_left:
            before = self._received
            self._receive()
            for line in self._lines():
                self._remains = line.get("remains", self._remains)
            if self._received == before:
                return

    def _is_over(self) -> bool:
        return self._events.is_over or self._host_has_left or self._status is not None

    def _wait(self) -> None:
        """Wait for the next event and take it in."""
        self._reap()
        if self._is_over():
            return
        readable = [self._control, *(end for end in (self._early_end, self._bound_end) if end >= 0)]
        writable = [self._control] if self._to_send else []
        if self._to_kernel and self._birth >= 0:
            writable.append(self._birth)
        ready = self._events.wait(readable, writable)
        if self._birth in ready:
            self._write_birth()
        if self._early_end in ready:
            self._take_early()
        if self._bound_end in ready:
            self._take_bound()
        if self._control in ready:
            self._receive()
            self._send()

    def _prepare(self, terms: Terms) -> None:
        """Have a kernel on these terms, which waits until it is told what it is to be; raises OSError."""
        isolated = terms.isolation == "namespace"
        self._reap()
        if self._pid and (isolated or self._status is not None):
            self._unmake()
        if not self._pid:
            self._make(isolated=isolated)
        os.kill(self._first, signal.SIGCONT)  # somebody may have stopped it while it waited
        self._to_kernel = json.dumps(terms._asdict()).encode() + b"\n"
        self._write_birth()
        system.hide()
        kernel = self._kernel
        how = {"how": kernel.how, "note": kernel.note, "greets": kernel.greets}
        self._tell({"kernel": self._pid, "warden": os.getpid(), **how})

    def _unmake(self) -> None:
        """End the kernel that waits: it has ended by itself, or another one is wanted."""
        if self._status is None:
            os.kill(self._first, signal.SIGKILL)
            os.waitpid(self._first, 0)
        for end in (self._early_end, self._birth, self._bound_end, *self._pipes):
            os.close(end)
        self._early_end = self._birth = self._bound_end = -1
        self._pipes = ()
        self._first = self._pid = 0
        self._status = None

    def _make(self, *, isolated: bool) -> None:
        """Fork a kernel, which waits for its terms; raises OSError."""
        ends: list[int] = []
        try:
            for _ in range(5):
                ends += os.pipe()
            early, early_write, birth_read, birth, bound, bound_write, *streams = ends
            null = os.open(os.devnull, os.O_RDWR)
            ends.append(null)
            for write_end in streams[1::2]:
                make_roomy(write_end)
            numbers = [number for pair in STREAMS for number in pair]
            descriptors = {
                0: null,
                1: early_write,
                2: early_write,
                **dict(zip(numbers, streams, strict=True)),
            }
            descriptors |= {BIRTH: birth_read, BOUND: bound_write}
            if isolated:
                self._fork_isolated(descriptors)
            else:
                self._fork(descriptors)
        except BaseException:
            for end in ends:
                os.close(end)
            raise
        for end in (null, early_write, birth_read, bound_write, *streams[1::2]):
            os.close(end)
        os.set_blocking(early, False)
        os.set_blocking(birth, False)
        self._early_end, self._birth, self._bound_end, self._pipes = early, birth, bound, tuple(streams[::2])

    def _fork(self, descriptors: dict[int, int]) -> None:
        """Fork the kernel as a child of this process."""
        warden = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_kernel(descriptors, parent=warden)
        self._first = self._pid = pid

    def _become_kernel(self, descriptors: dict[int, int], *, parent: int) -> NoReturn:
        try:
            self._events.close()
            os.setsid()
            system.signal_at_parents_end(signal.SIGKILL)
            if os.getppid() != parent:  # it ended before we had asked for the signal
                os._exit(0)
            be_born(self._kernel, descriptors)
        finally:
            os._exit(1)

    def _fork_isolated(self, descriptors: dict[int, int]) -> None:
        """Fork the first process of a new pid namespace, and have it fork the kernel."""
        try:
            system.enter_user_and_pid_namespace()
        except OSError as error:
            raise IsolationError(error.errno, error.strerror) from error
        said, say = os.pipe()
        try:
            first = os.fork()
            if first == 0:
                os.close(said)
                self._become_first(descriptors, say)
        finally:
            os.close(say)
        self._first = first
        self._status_end = said
        answer = self._first_word()
        if answer != "kernel":
            raise IsolationError(errno.EPERM, answer or "the first process of the namespace says nothing")
        try:
            (self._pid,) = system.children_of(first)
            self._kernel_watch = system.watch(self._pid)
        except (OSError, ValueError) as error:  # it has ended, or this /proc tells nobody's children
            raise IsolationError(errno.ESRCH, f"the kernel in its namespace is not found: {error}") from error

    def _first_word(self) -> str:
        """Return what the first process of the namespace says of its kernel."""
        deadline = time.monotonic() + FIRST_WORD
        while (left := deadline - time.monotonic()) > 0 and not self._events.is_over:
            if self._events.wait([self._status_end], timeout=left):
                return os.read(self._status_end, READ_SIZE).decode().strip()
        return ""

    def _become_first(self, descriptors: dict[int, int], say: int) -> NoReturn:
        """Be pid 1 of the namespace: take in orphans until the kernel ends, and everything ends with us."""
        try:
            self._events.close()
            os.setsid()
            system.signal_at_parents_end(signal.SIGKILL)
            try:
                system.see_own_processes_only()
                system.forbid_new_privileges()
                kernel = os.fork()
            except OSError as error:
                os.write(say, f"{error}\n".encode())
                os._exit(1)
            if kernel == 0:
                os.setsid()
                system.signal_at_parents_end(signal.SIGKILL)
                be_born(self._kernel, descriptors)
            os.write(say, b"kernel\n")
            os.closerange(3, say)
            os.closerange(say + 1, highest_descriptor() + 1)
            while True:
                pid, status = os.waitpid(-1, 0)
                if pid == kernel:
                    os.write(say, json.dumps(status).encode())
                    os._exit(0)
        finally:
            os._exit(1)

    def _signal(self, signum: int) -> None:
        """Signal the kernel and its group. Nobody else has its number: we have not reaped it."""
        if self._status is not None or not self._pid:
            return
        if self._kernel_watch is not None and self._events.wait([self._kernel_watch], timeout=0):
            return
        for send in (os.killpg, os.kill):  # the first time it is scheduled, it makes a group of its own
            try:
                send(self._pid, signum)
            except ProcessLookupError:
                continue
            except PermissionError:  # it has become another user's
                return
            return

    def _reap(self) -> None:
        """Take in every child that has ended."""
        for pid, status in ended_children():
            if pid == self._first and self._status is None:
                self._status = self._status_of_kernel(status)

    def _status_of_kernel(self, status: int) -> int:
        """Return how the kernel ended: as our child did, or as the first process has said of it."""
        if self._status_end < 0:
            return status
        said = os.read(self._status_end, READ_SIZE)
        os.close(self._status_end)
        return int(json.loads(said)) if said else status

    def _report_exit(self) -> None:
        """Tell once how the kernel ended, if it has, and what was left of its output."""
        if self._status is None or self._is_reported:
            return
        self._is_reported = True
        self._tell(
            {
                "exited": self._pid,
                "code": os.waitstatus_to_exitcode(self._status),
                "early": _text(self._early[-TAIL:]),
                "left": [_text(read_available(pipe)) for pipe in self._pipes],
            }
        )
        self._send()

    def _take_early(self) -> None:
        """Read what the kernel writes before it takes its pipes."""
        if self._early_end < 0:
            return
        try:
            while data := os.read(self._early_end, READ_SIZE):
                self._early += data
                del self._early[:-EARLY]
        except BlockingIOError:
            return
        os.close(self._early_end)
        self._early_end = -1

    def _take_bound(self) -> None:
        """Tell the host that the kernel waits for its start, if that is what has happened."""
        if os.read(self._bound_end, 1):
            self._tell({"bound": True})
        os.close(self._bound_end)
        self._bound_end = -1

    def _write_birth(self) -> None:
        try:
            written = os.write(self._birth, self._to_kernel)
        except BlockingIOError:
            written = 0
        except BrokenPipeError:
            written = len(self._to_kernel)  # it has ended, which we shall be told
        self._to_kernel = self._to_kernel[written:]
        if self._is_told and not self._to_kernel:
            os.close(self._birth)
            self._birth = -1

    def _receive(self) -> None:
        try:
            data, leases = receive(self._control, READ_SIZE)
        except BlockingIOError:
            return
        self._leases += leases
        self._received += data
        self._host_has_left = not data

    def _lines(self) -> list[dict[str, Any]]:
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def _tell(self, message: dict[str, Any]) -> None:
        self._to_send += json.dumps(message).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        """Send what the host takes now."""
        try:
            while self._to_send:
                self._to_send = self._to_send[os.write(self._control, self._to_send) :]
        except BlockingIOError:
            return
        except OSError:  # it has left
            self._to_send = b""

    def _send_rest(self) -> None:
        """Send the last words, if the host listens within its second."""
        deadline = time.monotonic() + 1
        while self._to_send and not self._events.host_is_gone and time.monotonic() < deadline:
            self._events.wait(writable=[self._control], timeout=0.1)
            self._send()


def receive(connection: int, size: int) -> tuple[bytes, list[int]]:
    """Receive at most *size* bytes, none at the end, and the descriptors that come with them.

    Raises BlockingIOError.
    """
    place = socket.socket(fileno=connection)
    descriptors = array.array("i")
    try:
        data, ancillary, _, _ = place.recvmsg(size, socket.CMSG_SPACE(8 * descriptors.itemsize))
    except ConnectionError:
        return b"", []
    finally:
        place.detach()
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def make_roomy(pipe: int) -> None:
    """Ask for a larger pipe: nobody reads it while a cell keeps the GIL."""
    if sys.platform != "linux":
        return
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, LEFT)
    except OSError:  # over the user's quota of pipe memory: it keeps the size that it has
        return


def read_available(descriptor: int) -> bytes:
    """Read what is there now. A descendant that lives may still write: nothing is waited for."""
    os.set_blocking(descriptor, False)
    data = bytearray()
    try:
        while len(data) < LEFT and (piece := os.read(descriptor, READ_SIZE)):
            data += piece
    except BlockingIOError:
        pass  # that was all
    return bytes(data)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()
