"""The zygote: it forks wardens, each of which forks a kernel, and is what stands behind them.

``python launcher.py hermes_kernel.sidecar.zygote CONTROL LEASE HOST STARTED REMAINS [MODULE]``: descriptors
of a socket and of its own lease; pid and start time of the host; JSON of the files to remove if that is gone.
Each byte on the socket comes with a descriptor, the control connection of a new warden, but the last, which
says that there will be no more. With MODULE
(``MODULE.prepare()`` returns a ``birth.Kernel``) a kernel is a fork of what has been prepared, without it a
program to be executed.

If a warden is killed, what its kernel has started becomes the zygote's, and is ended.
"""

import contextlib
import errno
import gc
import importlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from .birth import Kernel, Spawned
from .events import DISMISSAL, Events, Host
from .remains import remove
from .system import system
from .tree import end_tree, ended_children
from .warden import DYING, Warden, receive

MARK = "HERMES_KERNEL_COOKIE"
NOBODY = "0" * 32
WARDENS_END = 7.0  # seconds that wardens have to end by themselves when the host is gone


class Zygote:
    """One zygote process."""

    def __init__(self, control: int, lease: int, host: Host, kernel: Kernel) -> None:
        self._control = control
        self._lease = lease
        self._host = host
        self._kernel = kernel
        self._events = Events(host)
        self._wardens: set[int] = set()
        self._next: int | None = None  # to a warden that waits for its connection
        self._host_has_left = False
        self._is_dismissed = False

    @property
    def host_is_gone(self) -> bool:
        """Whether the host has ended, or is about to: it has left without a word."""
        says_nothing = self._host_has_left and not self._is_dismissed
        return self._events.host_ends_within(DYING if says_nothing else 0)

    def run(self) -> None:
        """Fork wardens until the host leaves; then wait until they are gone."""
        system.adopt_orphans()
        system.signal_at_parents_end(signal.SIGCONT)
        mark_as_nobodys()
        self._make_next()
        while not self._is_over():
            if self._control in self._events.wait([self._control]):
                self._receive()
            self._clean()
        self._end()

    def _is_over(self) -> bool:
        return self._events.is_over or self._host_has_left

    def _receive(self) -> None:
        data, connections = receive(self._control, 1)
        self._is_dismissed = data == DISMISSAL
        self._host_has_left = self._is_dismissed or not data
        for connection in connections:
            try:
                self._hand_over(connection)
            except OSError as error:
                refuse(connection, error)
            os.close(connection)
        if connections:
            self._make_next()

    def _hand_over(self, connection: int) -> None:
        """Give a warden its connection: the one that waits, or a new one. Raises OSError."""
        for _ in range(2):
            if self._next is None:
                self._fork()
            warden, self._next = self._next, None
            if warden is None:
                break
            try:
                send(warden, connection)
                return
            except ConnectionError:  # somebody has killed it while it waited
                continue
            finally:
                os.close(warden)
        raise OSError(errno.ECHILD, "wardens do not live")

    def _make_next(self) -> None:
        """Have a warden wait for the next connection: a fork takes its time."""
        if self._next is None:
            try:
                self._fork()
            except OSError:  # whoever needs it will try, and be told
                return

    def _fork(self) -> None:
        ours, theirs = pair()  # numbers: a socket object would be one of the kernel's, too
        try:
            pid = os.fork()
            if pid == 0:
                os.close(ours)
                self._become_warden(theirs)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._wardens.add(pid)
        self._next = ours

    def _become_warden(self, source: int) -> NoReturn:
        try:
            self._events.close()
            os.close(self._control)
            os.close(self._lease)
            os.setsid()
            Warden(source, Host.of(self._host.pid, self._host.started), self._kernel).run()
        except BaseException:  # noqa: BLE001  # the edge of the process; its standard error is the zygote's log
            traceback.print_exc()
        finally:
            os._exit(0)

    def _clean(self) -> None:
        """Take in the wardens that have ended, and end what a killed one has left."""
        self._reap()
        if any(child not in self._wardens for child in system.children()):
            end_tree(self._events, self._reap, spare=lambda: self._wardens)

    def _reap(self) -> None:
        for pid, _ in ended_children():
            self._wardens.discard(pid)

    def _end(self) -> None:
        """See the wardens out, and end what is left then.

        What the host had asked for before it died has a warden, too: its files are to be removed.
        """
        while not self._host_has_left and self._events.wait([self._control], timeout=0):
            self._receive()
        if self._next is not None:
            os.close(self._next)  # which ends the one that waits
        for warden in self._wardens:
            os.kill(warden, signal.SIGCONT)  # a cell may have stopped it
            if self._events.told_to_end:
                os.kill(warden, signal.SIGTERM)
        deadline = time.monotonic() + WARDENS_END
        while self._wardens:
            left = deadline - time.monotonic()
            if self._events.is_over and left <= 0:
                break
            self._events.wait(timeout=max(0.0, left) if self._events.is_over else None)
            if not self._events.is_over:
                deadline = time.monotonic() + WARDENS_END
            self._clean()
        end_tree(self._events, self._reap)


def pair() -> tuple[int, int]:
    """Return the descriptors of two connected sockets; raises OSError."""
    one, other = socket.socketpair()
    return one.detach(), other.detach()


def send(place: int, descriptor: int) -> None:
    """Send one byte and a descriptor over a socket; raises OSError."""
    connection = socket.socket(fileno=place)
    try:
        socket.send_fds(connection, [b"w"], [descriptor])
    finally:
        connection.detach()


def refuse(connection: int, error: OSError) -> None:
    """Tell the host that there is no warden."""
    try:
        said = {"refused": str(error), "errno": error.errno, "isolation": False}
        os.write(connection, json.dumps(said).encode() + b"\n")
    except OSError:  # the host has left
        return


def mark_as_nobodys() -> None:
    """Wardens inherit this: one is no leftover of its zygote's, and is not to be ended as one."""
    with contextlib.suppress(OSError):  # started without a mark
        system.mark_environment(MARK, NOBODY)


def prepared(module: str) -> Kernel:
    """Return what kernels are forked of; if it cannot be made they are executed, and say so."""
    try:
        kernel: Kernel = importlib.import_module(module).prepare()
    except Exception as error:  # noqa: BLE001  # whatever is wrong with that interpreter's packages
        traceback.print_exc()
        return Spawned(f"cannot fork: {type(error).__name__}: {error}")
    return kernel


def main(arguments: Sequence[str]) -> int:
    """Be a zygote until the host is gone or has left; return the exit code."""
    control, lease, host, started = map(int, arguments[:4])
    remains, *module = arguments[4:]
    kernel = prepared(module[0]) if module else Spawned()
    gc.collect()
    gc.freeze()
    gc.disable()  # what only waits makes no garbage, and a collection would touch what is shared
    zygote = Zygote(control, lease, Host.of(host, started), kernel)
    zygote.run()
    if zygote.host_is_gone:
        remove(json.loads(remains))
    return 0
