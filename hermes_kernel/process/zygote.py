"""The host's end of a zygote: a process that forks wardens and their kernels."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import psutil

from ..sidecar import __file__ as _sidecar
from ..sidecar.events import DISMISSAL
from ..sidecar.system import system
from .launchclass import Program, ZygoteClass
from .marked import MARK, end_marked
from .staging import ZYGOTE, Staging, remove_trees
from .warden import WardenedTree, WardenGoneError, end_connection

KERNEL_MODULE = "hermes_kernel.kernel.app"
PREPARED_MODULE = "hermes_kernel.kernel.prepared"
ZYGOTE_MODULE = "hermes_kernel.sidecar.zygote"
LEAVE_TIMEOUT = 2.0  # seconds for a zygote without kernels to leave

LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(_sidecar)), "launcher.py")
_log = logging.getLogger(__name__)


def bare_program() -> Program:
    """Return the program of a zygote that only executes kernels: this interpreter, and nothing else."""
    return Program((sys.executable, "-I", "-S"), {})


class Zygote:
    """A zygote process, from its start until it has ended. It lives on the event loop that made it."""

    def __init__(self, kind: ZygoteClass, program: Program) -> None:
        """Start the process; raises OSError and HermesKernelError, and nothing is left then."""
        self.kind = kind
        self.trees: set[WardenedTree] = set()
        self.is_leaving = False
        self._said = ""
        self._loop = asyncio.get_running_loop()
        self._staging = Staging.create(f"{ZYGOTE}{uuid.uuid4().hex}")
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._control = ours
                self._process = self._execute(program, theirs)
        except BaseException:
            self._staging.lease.close()
            self._staging.remove()
            raise
        self._staging.lease.close()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._stop_watching = watch_child(self._loop, self._process.pid, self._reap)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.returncode is not None

    def fork(self) -> WardenedTree:
        """Have a warden forked; raises OSError, WardenGoneError if the process has ended."""
        self._wake()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            tree = WardenedTree(ours)
        except ConnectionError as error:
            ours.close()
            raise WardenGoneError(error.errno, "the zygote is gone") from error
        except BaseException:
            ours.close()
            raise
        self.trees.add(tree)
        tree.on_gone(lambda: self.trees.discard(tree))
        return tree

    def log_tail(self) -> str:
        """Return the end of what the process wrote."""
        return self._said or self._staging.log_tail()

    async def leave(self) -> None:
        """Let the process end, which it does when its kernels are gone; if it does not then, it is killed."""
        self.is_leaving = True
        self._dismiss()
        self._hang_up()
        self._wake()
        childless: asyncio.Future[Any] = asyncio.gather(*(tree.gone() for tree in self.trees))
        either: set[asyncio.Future[Any]] = {self.ended, childless}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            childless.cancel()
        self._wake()  # it may have been stopped again
        await asyncio.wait({self.ended}, timeout=LEAVE_TIMEOUT)
        if not self.ended.done():
            _log.warning("zygote %d does not end: it is killed", self.pid)
            self._signal(signal.SIGKILL)
        await asyncio.shield(self.ended)

    def _dismiss(self) -> None:
        """Say that this process lives: one that hangs up without a word is dying."""
        if self._control.fileno() >= 0:
            with contextlib.suppress(OSError):  # it is gone, or does not read: it will be killed then
                self._control.send(DISMISSAL, socket.MSG_DONTWAIT)

    def _hang_up(self) -> None:
        """End the connection, not just our part: a child that the host has forked may have another one."""
        if self._control.fileno() >= 0:
            end_connection(self._control)

    def _wake(self) -> None:
        """Let the process go on: a cell may have stopped it."""
        self._signal(signal.SIGCONT)

    def _signal(self, signum: int) -> None:
        """Signal the process. Not through Popen, which would reap it before we are told of its end."""
        if not self.is_gone:
            os.kill(self.pid, signum)

    def _execute(self, program: Program, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        env = {**program.env, MARK: self._staging.cookie}
        if self.kind.forks:
            env["IPYTHONDIR"] = str(self._staging.ipython)
        host = psutil.Process()
        started = start_ticks(host.pid)
        argv = [
            *program.interpreter, LAUNCHER, ZYGOTE_MODULE, str(theirs.fileno()),
            str(self._staging.lease.descriptor), str(host.pid), str(started),
            json.dumps(self._staging.remains),
        ]  # fmt: skip
        with open(self._staging.log, "ab") as log:
            return subprocess.Popen(
                argv + [PREPARED_MODULE] * self.kind.forks,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=self._staging.work,
                start_new_session=True,
                pass_fds=(theirs.fileno(), self._staging.lease.descriptor),
            )

    def _reap(self) -> None:
        self._stop_watching()
        code = self._process.wait()
        for tree in list(self.trees):
            tree.abandon()
        self._hang_up()
        self._said = self._staging.log_tail()
        gone = self._staging.retire()
        # What ends otherwise than it should has not ended what it started.
        cookies = set() if code == 0 and self.is_leaving else {self._staging.cookie}

        def clean() -> None:
            end_marked(cookies)
            remove_trees(gone)

        try:
            cleaning = self._loop.run_in_executor(None, clean)
        except RuntimeError:  # the interpreter ends: no thread can be started any more
            clean()
            self.ended.set_result(None)
        else:
            cleaning.add_done_callback(lambda _: self.ended.set_result(None))


def start_ticks(pid: int) -> int:
    """Return when a process started, as ``sidecar.system.started`` does; 0 if it is gone."""
    if system is not None:
        return system.started(pid) or 0
    try:
        return int(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0


def watch_child(loop: asyncio.AbstractEventLoop, pid: int, ended: Callable[[], None]) -> Callable[[], None]:
    """Have *ended* called on the loop when a child of this process is gone; return how to stop that."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or not allowed
        return _watch_by_thread(loop, pid, ended)
    loop.add_reader(descriptor, ended)

    def stop() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    return stop


def _watch_by_thread(
    loop: asyncio.AbstractEventLoop, pid: int, ended: Callable[[], None]
) -> Callable[[], None]:
    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        loop.call_soon_threadsafe(ended)

    threading.Thread(target=wait, name=f"hermes-wait-{pid}", daemon=True).start()
    return lambda: None
