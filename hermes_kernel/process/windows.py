"""Process trees on Windows: a job object holds each, and ends it with the last handle to the job.

The host alone has that handle, and nobody inherits it: if the host dies, by whatever cause, Windows closes it
and ends the tree. No process of ours stands between. Not in the tree is what another process starts at a
cell's request: WMI, the Task Scheduler, a service, a COM server.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .launch import Ended
from .launchclass import LaunchClass, Program
from .staging import Staging
from .tree import IsolationRefusedError, Seat, TreeExit, TreeSpec

WATCH = "HERMES_KERNEL_WATCH"  # the handle by which a kernel sees the end of its host, see kernel/watchdog
INTERRUPT = "JPY_INTERRUPT_EVENT"  # the event on which ipykernel interrupts a cell
KILL = 9  # SIGKILL, a name that Python does not have on Windows
TERMINATED = 0xE04B_0000
"""With the number of a signal: the exit code of what we end. No program and no error of Windows' has it."""

INTERRUPTS = frozenset({0, 1, signal.SIGINT, 21})  # CTRL_C_EVENT, CTRL_BREAK_EVENT, SIGINT, SIGBREAK
EMPTY_TIMEOUT = 5.0  # seconds for a tree to be gone once its first process is
EMPTY_POLL = 0.005  # seconds between two looks at a tree that is being ended
ABANDON_TIMEOUT = 1.0  # seconds for a process that could not be used to be gone
LAST_WORDS_TIMEOUT = 0.5  # seconds for the end of what a dead process wrote
TAIL = 4096  # bytes of that which are kept
READ_SIZE = 64 * 1024

_log = logging.getLogger(__name__)


class WindowsTrees:
    """Makes process trees, each in a job of its own; nothing is kept ready, for nothing can be forked."""

    spares = 0

    def __init__(self, api: "WindowsApi | None" = None) -> None:
        self._api = WindowsApi.of_this_system() if api is None else api

    async def seat(self, kind: LaunchClass, program: Program, kernel_id: str, *, binds: bool) -> Seat:
        """Return a tree that waits for its start, and the directory of the kernel.

        Raises IsolationRefusedError, StagingError and ConfigError, and nothing is left then.
        """
        if kind.isolation != "none":
            raise IsolationRefusedError(errno.ENOTSUP, "Windows has jobs, which isolate nothing")
        staging = Staging.create(kernel_id, socket_dir=kind.socket_dir)
        return Seat(WindowsTree(self._api, kind.memory_limit), staging)

    async def discard_spares(self) -> None:
        """There are none."""

    async def close(self) -> None:
        """Nothing is kept ready."""


class Phase(Enum):
    """What has become of a tree."""

    WAITING = "waiting for its start"
    STARTED = "started"
    ENDED = "ended"


class WindowsTree:
    """A process and all that it starts, in a job. It may be used by any thread and any event loop.

    A thread waits for its end, without looking at it in between. *memory_limit*: bytes that the whole tree
    may commit.
    """

    warden = 0
    how = "spawn"
    greets = False
    note: str | None = None

    def __init__(self, api: "WindowsApi", memory_limit: int | None = None) -> None:
        self.pid = 0
        self._api = api
        self._memory_limit = memory_limit
        self._lock = threading.Lock()
        self._phase = Phase.WAITING
        self._running: Running | None = None
        self._ended: Future[TreeExit] = Future()
        self._gone: Future[Ended] = Future()
        for future in (self._ended, self._gone):
            future.set_running_or_notify_cancel()  # one who does not wait any more must not cancel it

    async def start(self, spec: TreeSpec, lease: int) -> None:
        """Start the process. Raises OSError, also after the end, and nothing is left then.

        What ``spec.remains`` names is left to the sweep of a next host: nobody is there to remove it.
        """
        with self._lock:
            if self._phase is not Phase.WAITING:
                raise OSError(errno.ECANCELED, f"this tree has {self._phase.value}")
            self._running = self._start(spec, lease)
            self._phase = Phase.STARTED
            self.pid = self._running.pid

    async def ended(self) -> TreeExit:
        """Wait until the first process is gone and say how it ended; the rest of the tree is ended then."""
        return await asyncio.wrap_future(self._ended)

    async def gone(self) -> Ended:
        """Wait until the tree is gone; UNKNOWN if Windows does not say so."""
        return await asyncio.wrap_future(self._gone)

    def signal(self, signum: int) -> None:
        """Interrupt the first process, or end the tree: Windows knows no other signals.

        An interrupt is the event on which ipykernel waits. A console event would not arrive: the process has
        a console of its own, which nobody sees.
        """
        with self._lock:
            if self._running is None or self._phase is not Phase.STARTED:
                return
            if signum not in INTERRUPTS:
                self._running.job.kill(signum)
                return
            try:
                self._api.set_event(self._running.interrupt)
            except OSError as error:
                _log.warning("process %d cannot be interrupted: %s", self.pid, error)

    async def end(self, *, timeout: float) -> Ended:
        """Kill the whole tree and wait until it is gone; idempotent."""
        with self._lock:
            if self._phase is Phase.WAITING:
                self._phase = Phase.ENDED
                self._ended.set_result(exit_of(TERMINATED | KILL, b""))
                self._gone.set_result(Ended.CLEAN)
            elif self._running is not None:
                self._running.job.kill(KILL)
        gone = asyncio.wrap_future(self._gone)
        await asyncio.wait({gone}, timeout=timeout)
        gone.cancel()
        if self._running is None or self._gone.done():
            return self._gone.result()
        return self._running.job.census()

    def _start(self, spec: TreeSpec, lease: int) -> "Running":
        """Start the process in a job of its own, and the thread that sees to its end.

        It is in its job before it runs its first instruction, so that nothing it starts is outside. If
        anything fails, all that was made before is ended and closed, the last first.
        """
        api = self._api
        with ExitStack() as made:
            job = Job(api, api.make_job())
            made.callback(job.close)
            api.limit_job(job.handle, self._memory_limit)
            interrupt = _kept(made, api, api.make_event())
            held = api.hold(lease)
            made.callback(api.let_go, held)
            with ExitStack() as lent:
                ours, theirs = api.make_pipe()
                output = Drain(api, ours)
                made.callback(output.close)
                _kept(lent, api, theirs)
                created = _create(api, spec, job, theirs, interrupt)
            made.callback(_abandon, api, job, created.process)
            try:
                if not api.is_in_job(created.process, job.handle):
                    api.assign(job.handle, created.process)
                api.resume(created.thread)
            finally:
                api.close(created.thread)
            output.start()
            running = Running(created.pid, created.process, job, interrupt, output, held)
            api.start_thread(f"hermes-wait-{running.pid}", lambda: self._see_to_the_end(running))
            made.pop_all()
        return running

    def _see_to_the_end(self, running: "Running") -> None:
        """Wait for the first process, end the rest, and close all that we have of the tree."""
        outcome = Ended.UNKNOWN
        try:
            code = self._wait_for_first(running)
            running.job.kill(KILL)  # what it has started ends with it
            self._ended.set_result(exit_of(code, running.output.last_words(LAST_WORDS_TIMEOUT)))
            outcome = running.job.wait_until_empty(EMPTY_TIMEOUT)
        finally:
            try:
                with self._lock:  # whoever signals has the handles until then
                    self._phase = Phase.ENDED
                running.close(self._api)
            finally:
                self._gone.set_result(outcome)

    def _wait_for_first(self, running: "Running") -> int:
        try:
            self._api.wait(running.process, None)
            return self._api.exit_code(running.process)
        except OSError as error:  # what cannot be watched is ended
            _log.error("process %d cannot be watched: %s", running.pid, error)
            return TERMINATED | KILL


@dataclass(frozen=True)
class Running:
    """What the host has of a tree that runs."""

    pid: int
    process: int
    job: "Job"
    interrupt: int
    output: "Drain"
    lease: int

    def close(self, api: "WindowsApi") -> None:
        """Close it; closing the job ends what could not be ended before."""
        api.close(self.interrupt)
        api.close(self.process)
        self.job.close()
        api.let_go(self.lease)


def _create(api: "WindowsApi", spec: TreeSpec, job: "Job", output: int, interrupt: int) -> "Created":
    """Create the process, which does not run yet, with copies of the handles that it needs and no others."""
    with ExitStack() as lent:
        null = _kept(lent, api, api.open_null())
        theirs = _kept(lent, api, api.lend(output))
        host = _kept(lent, api, api.open_this_process())
        event = _kept(lent, api, api.lend(interrupt, SYNCHRONIZE))
        env = {**spec.env, WATCH: str(host), INTERRUPT: str(event)}
        return api.create_process(
            Order(
                image=spec.interpreter[0],
                command_line=command_line(spec.argv),
                environment=environment_block(env),
                cwd=spec.cwd,
                stdin=null,
                output=theirs,
                lent=(null, theirs, host, event),
                job=job.handle,
            )
        )


def _kept(owner: ExitStack, api: "WindowsApi", handle: int) -> int:
    owner.callback(api.close, handle)
    return handle


def _abandon(api: "WindowsApi", job: "Job", process: int) -> None:
    """End a process that cannot be used, and what it may have started."""
    job.kill(KILL)
    try:
        api.terminate_process(process, TERMINATED | KILL)  # it may not be in the job yet
    except OSError as error:  # it has ended with the job already
        _log.debug("%s", error)
    try:
        api.wait(process, ABANDON_TIMEOUT)
    except OSError as error:
        _log.warning("a process that could not be used cannot be waited for: %s", error)
    api.close(process)


def command_line(argv: tuple[str, ...]) -> str:
    """Return the command line from which a C program reads *argv*; raises ValueError."""
    line = subprocess.list2cmdline(argv)
    if "\0" in line:
        raise ValueError("embedded null character")
    return line


def environment_block(env: Mapping[str, str]) -> str:
    """Return *env* as Windows takes it: sorted, each with a NUL behind it; raises ValueError."""
    for name, value in env.items():
        if not name or "=" in name[1:] or "\0" in name + value:
            raise ValueError(f"illegal environment variable name or value: {name!r}")
    block = "".join(f"{name}={env[name]}\0" for name in sorted(env, key=str.upper))
    return block or "\0"


def exit_of(code: int, early: bytes) -> TreeExit:
    """Return how a process ended that has this exit code: by itself, or because we ended it."""
    number = code - TERMINATED
    if not 0 < number < 256:
        return TreeExit(code, early=early)
    return TreeExit(-number, _signal_name(number), early)


def _signal_name(number: int) -> str:
    if number == KILL:
        return "SIGKILL"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class Job:
    """A job object, and the only handle to it. Every call may come from any thread, and after its end."""

    def __init__(self, api: "WindowsApi", handle: int) -> None:
        self.handle = handle
        self._api = api
        self._lock = threading.Lock()
        self._is_open = True

    def kill(self, signum: int) -> None:
        """End all processes in it as if by a signal. What Windows does not end so ends with the handle."""
        with self._lock:
            if not self._is_open:
                return
            try:
                self._api.terminate_job(self.handle, TERMINATED | signum & 0xFF)
            except OSError as error:
                _log.warning("a job cannot be terminated, so it is closed: %s", error)
                self._close()

    def census(self) -> Ended:
        """Say whether any process is in it."""
        with self._lock:
            if not self._is_open:
                return Ended.UNKNOWN
            try:
                return Ended.NOT_CLEAN if self._api.active_processes(self.handle) else Ended.CLEAN
            except OSError as error:
                _log.warning("the processes of a job cannot be counted: %s", error)
                return Ended.UNKNOWN

    def wait_until_empty(self, timeout: float) -> Ended:
        """Wait until no process is in it, for *timeout* seconds.

        Windows does not promise to tell of that, so it is looked at: a few times, for what has been ended is
        soon gone. What was started meanwhile is ended, too.
        """
        for _ in range(round(timeout / EMPTY_POLL)):
            found = self.census()
            if found is not Ended.NOT_CLEAN:
                return found
            self.kill(KILL)
            self._api.pause(EMPTY_POLL)
        return self.census()

    def close(self) -> None:
        """Close the handle, which ends whatever is in the job."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._api.close(self.handle)


class Drain:
    """Reads what a process and its children write to the end of a pipe, and keeps the last of it."""

    def __init__(self, api: "WindowsApi", pipe: int) -> None:
        self._api = api
        self._pipe = pipe
        self._tail = bytearray()
        self._lock = threading.Lock()
        self._has_started = False
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin to read; raises OSError."""
        self._api.start_thread(f"hermes-output-{self._pipe}", self._read)
        self._has_started = True

    def last_words(self, timeout: float) -> bytes:
        """Return the end of what was written, once nobody can write any more or *timeout* has passed."""
        self._is_over.wait(timeout)
        with self._lock:
            return bytes(self._tail)

    def close(self) -> None:
        """Close the pipe; if it is read, with the last who writes to it."""
        if self._has_started:
            self._is_over.wait(ABANDON_TIMEOUT)
        else:
            self._api.close(self._pipe)

    def _read(self) -> None:
        try:
            while data := self._api.read(self._pipe):
                with self._lock:
                    self._tail += data
                    del self._tail[:-TAIL]
        except OSError as error:
            _log.warning("what a kernel writes is not read any more: %s", error)
        finally:
            # Here and not elsewhere: to close a pipe that another thread reads would wait for that thread.
            self._api.close(self._pipe)
            self._is_over.set()


@dataclass(frozen=True)
class Order:
    """What a process is to be. *lent*: the handles that it inherits; *stdin* and *output* are among them."""

    image: str
    command_line: str
    environment: str
    cwd: str
    stdin: int
    output: int
    lent: tuple[int, ...]
    job: int


@dataclass(frozen=True)
class Created:
    """A process that does not run yet: handles of it and of its first thread."""

    process: int
    thread: int
    pid: int


SYNCHRONIZE = 0x0010_0000
GENERIC_READ_WRITE = 0xC000_0000
FILE_SHARE_READ_WRITE = 3
OPEN_EXISTING = 3
DUPLICATE_SAME_ACCESS = 2
CREATE_SUSPENDED = 0x0000_0004
CREATE_NEW_PROCESS_GROUP = 0x0000_0200  # a Ctrl-C in the host's console is not for the kernel
CREATE_UNICODE_ENVIRONMENT = 0x0000_0400
EXTENDED_STARTUPINFO_PRESENT = 0x0008_0000
CREATE_NO_WINDOW = 0x0800_0000
CREATION_FLAGS = (
    CREATE_SUSPENDED
    | CREATE_NEW_PROCESS_GROUP
    | CREATE_UNICODE_ENVIRONMENT
    | EXTENDED_STARTUPINFO_PRESENT
    | CREATE_NO_WINDOW
)
STARTF_USESTDHANDLES = 0x0000_0100
PROC_THREAD_ATTRIBUTE_HANDLE_LIST = 0x0002_0002
PROC_THREAD_ATTRIBUTE_JOB_LIST = 0x0002_000D
BASIC_ACCOUNTING_INFORMATION = 1
EXTENDED_LIMIT_INFORMATION = 9
JOB_OBJECT_LIMIT_JOB_MEMORY = 0x0000_0200
JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION = 0x0000_0400  # else a crash waits for a click on a message box
JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE = 0x0000_2000
WAIT_OBJECT_0 = 0
WAIT_TIMEOUT = 0x0000_0102
INFINITE = 0xFFFF_FFFF
ERROR_BROKEN_PIPE = 109
INVALID_HANDLE = ctypes.c_void_p(-1).value

# Types of one size on every platform: c_ulong, for one, is another on Linux, where this is tested.
_BOOL, _DWORD, _HANDLE, _POINTER = ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p
_SIZE, _TEXT = ctypes.c_size_t, ctypes.c_wchar_p

SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "AssignProcessToJobObject": (_BOOL, (_HANDLE, _HANDLE)),
    "CloseHandle": (_BOOL, (_HANDLE,)),
    "CreateEventW": (_HANDLE, (_POINTER, _BOOL, _BOOL, _TEXT)),
    "CreateFileW": (_HANDLE, (_TEXT, _DWORD, _DWORD, _POINTER, _DWORD, _DWORD, _HANDLE)),
    "CreateJobObjectW": (_HANDLE, (_POINTER, _TEXT)),
    "CreatePipe": (_BOOL, (_POINTER, _POINTER, _POINTER, _DWORD)),
    "CreateProcessW": (
        _BOOL,
        (
            *(_TEXT, _POINTER, _POINTER, _POINTER, _BOOL),
            *(_DWORD, _POINTER, _TEXT, _POINTER, _POINTER),
        ),
    ),
    "DeleteProcThreadAttributeList": (None, (_POINTER,)),
    "DuplicateHandle": (_BOOL, (_HANDLE, _HANDLE, _HANDLE, _POINTER, _DWORD, _BOOL, _DWORD)),
    "GetCurrentProcess": (_HANDLE, ()),
    "GetExitCodeProcess": (_BOOL, (_HANDLE, _POINTER)),
    "InitializeProcThreadAttributeList": (_BOOL, (_POINTER, _DWORD, _DWORD, _POINTER)),
    "IsProcessInJob": (_BOOL, (_HANDLE, _HANDLE, _POINTER)),
    "OpenProcess": (_HANDLE, (_DWORD, _BOOL, _DWORD)),
    "QueryInformationJobObject": (_BOOL, (_HANDLE, ctypes.c_int, _POINTER, _DWORD, _POINTER)),
    "ReadFile": (_BOOL, (_HANDLE, _POINTER, _DWORD, _POINTER, _POINTER)),
    "ResumeThread": (_DWORD, (_HANDLE,)),
    "SetEvent": (_BOOL, (_HANDLE,)),
    "SetInformationJobObject": (_BOOL, (_HANDLE, ctypes.c_int, _POINTER, _DWORD)),
    "TerminateJobObject": (_BOOL, (_HANDLE, _DWORD)),
    "TerminateProcess": (_BOOL, (_HANDLE, _DWORD)),
    "UpdateProcThreadAttribute": (
        _BOOL,
        (_POINTER, _DWORD, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER),
    ),
    "WaitForSingleObject": (_DWORD, (_HANDLE, _DWORD)),
}


class _SecurityAttributes(ctypes.Structure):
    _fields_ = (("length", _DWORD), ("descriptor", _POINTER), ("inherit", _BOOL))


class _StartupInfo(ctypes.Structure):
    _fields_ = (
        ("size", _DWORD),
        ("reserved", _POINTER),
        ("desktop", _POINTER),
        ("title", _POINTER),
        *((name, _DWORD) for name in ("x", "y", "width", "height", "columns", "rows", "fill", "flags")),
        ("show", ctypes.c_uint16),
        ("reserved2_size", ctypes.c_uint16),
        ("reserved2", _POINTER),
        ("stdin", _HANDLE),
        ("stdout", _HANDLE),
        ("stderr", _HANDLE),
        ("attributes", _POINTER),
    )


class _ProcessInformation(ctypes.Structure):
    _fields_ = (("process", _HANDLE), ("thread", _HANDLE), ("pid", _DWORD), ("thread_id", _DWORD))


class _ExtendedLimits(ctypes.Structure):
    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", _DWORD),
        ("smallest_working_set", _SIZE),
        ("largest_working_set", _SIZE),
        ("active_processes", _DWORD),
        ("affinity", _SIZE),
        ("priority", _DWORD),
        ("scheduling", _DWORD),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", _SIZE),
        ("job_memory", _SIZE),
        ("peak_process_memory", _SIZE),
        ("peak_job_memory", _SIZE),
    )


class _Accounting(ctypes.Structure):
    _fields_ = (
        *((f"time_{number}", ctypes.c_int64) for number in range(4)),
        *((name, _DWORD) for name in ("page_faults", "total", "active", "terminated")),
    )


class WindowsApi:
    """The calls that are made of Windows, one each. What fails raises OSError.

    *kernel32* has the functions; *last_error* returns the number of what failed last on this thread, and
    *describe* the text for it. Handles are not inherited, except where it is said.
    """

    def __init__(self, kernel32: Any, last_error: Callable[[], int], describe: Callable[[int], str]) -> None:
        self._kernel32 = kernel32
        self._last_error = last_error
        self._describe = describe
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(kernel32, name)
            function.restype, function.argtypes = result, arguments

    @classmethod
    def of_this_system(cls) -> "WindowsApi":
        """Return the calls of the Windows that this process runs on; raises OSError elsewhere."""
        if sys.platform == "win32":
            kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
            return cls(kernel32, ctypes.get_last_error, ctypes.FormatError)
        raise OSError(errno.ENOSYS, f"{sys.platform} is not Windows")

    def make_job(self) -> int:
        """Make a job object."""
        return self._call("CreateJobObjectW", None, None)

    def limit_job(self, job: int, memory_limit: int | None) -> None:
        """Have a job end with its handle, keep what its processes start, and bound its memory."""
        limits = _ExtendedLimits()
        limits.flags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE | JOB_OBJECT_LIMIT_DIE_ON_UNHANDLED_EXCEPTION
        if memory_limit is not None:
            limits.flags |= JOB_OBJECT_LIMIT_JOB_MEMORY
            limits.job_memory = memory_limit
        self._call(
            "SetInformationJobObject",
            job,
            EXTENDED_LIMIT_INFORMATION,
            ctypes.byref(limits),
            ctypes.sizeof(limits),
        )

    def make_event(self) -> int:
        """Make an event, which is not set, and which one wait resets."""
        return self._call("CreateEventW", None, False, False, None)

    def set_event(self, event: int) -> None:
        """Set an event."""
        self._call("SetEvent", event)

    def make_pipe(self) -> tuple[int, int]:
        """Make a pipe: the end to read and the end to write."""
        reader, writer = _HANDLE(), _HANDLE()
        self._call("CreatePipe", ctypes.byref(reader), ctypes.byref(writer), None, 0)
        return reader.value or 0, writer.value or 0

    def read(self, pipe: int) -> bytes:
        """Wait for something to read; nothing once nobody can write any more."""
        buffer = ctypes.create_string_buffer(READ_SIZE)
        count = _DWORD()
        while count.value == 0:  # somebody may write nothing
            if not self._kernel32.ReadFile(pipe, buffer, READ_SIZE, ctypes.byref(count), None):
                number = self._last_error()
                if number == ERROR_BROKEN_PIPE:
                    return b""
                raise self._failure("ReadFile", number)
        return buffer.raw[: count.value]

    def open_null(self) -> int:
        """Open what is empty and swallows everything; the handle is inherited."""
        inherited = _SecurityAttributes(ctypes.sizeof(_SecurityAttributes), None, True)
        handle = self._kernel32.CreateFileW(
            "NUL",
            GENERIC_READ_WRITE,
            FILE_SHARE_READ_WRITE,
            ctypes.byref(inherited),
            OPEN_EXISTING,
            0,
            None,
        )
        if handle in (None, INVALID_HANDLE):
            raise self._failure("CreateFileW", self._last_error())
        return int(handle)

    def open_this_process(self) -> int:
        """Return a handle of this process that can be waited on, and nothing else; it is inherited."""
        return self._call("OpenProcess", SYNCHRONIZE, True, os.getpid())

    def lend(self, handle: int, access: int | None = None) -> int:
        """Return a copy that is inherited, with the same rights or only those of *access*."""
        here = self._kernel32.GetCurrentProcess()
        copy = _HANDLE()
        options = DUPLICATE_SAME_ACCESS if access is None else 0
        self._call("DuplicateHandle", here, handle, here, ctypes.byref(copy), access or 0, True, options)
        return copy.value or 0

    def create_process(self, order: Order) -> Created:
        """Create a process that does not run yet, without a window, in its job if Windows can do that.

        It inherits the handles that are lent to it and no others.
        """
        info = _StartupInfo()
        info.size = ctypes.sizeof(info)
        info.flags = STARTF_USESTDHANDLES
        info.stdin, info.stdout, info.stderr = order.stdin, order.output, order.output
        made = _ProcessInformation()
        text = ctypes.create_unicode_buffer(order.command_line)  # Windows writes into it
        environment = ctypes.create_unicode_buffer(order.environment)
        with self._attributes(order) as attributes:
            info.attributes = ctypes.addressof(attributes)
            self._call(
                "CreateProcessW",
                order.image,
                text,
                None,
                None,
                True,
                CREATION_FLAGS,
                environment,
                order.cwd,
                ctypes.byref(info),
                ctypes.byref(made),
            )
        return Created(made.process, made.thread, made.pid)

    @contextlib.contextmanager
    def _attributes(self, order: Order) -> Iterator["ctypes.Array[ctypes.c_char]"]:
        """Make the list of what a process is created with: its handles and its job."""
        size = _SIZE()
        self._kernel32.InitializeProcThreadAttributeList(None, 2, 0, ctypes.byref(size))  # says the size
        attributes = ctypes.create_string_buffer(size.value)
        self._call("InitializeProcThreadAttributeList", attributes, 2, 0, ctypes.byref(size))
        handles = (_HANDLE * len(order.lent))(*order.lent)
        jobs = (_HANDLE * 1)(order.job)
        try:
            self._add(attributes, PROC_THREAD_ATTRIBUTE_HANDLE_LIST, handles)
            try:
                self._add(attributes, PROC_THREAD_ATTRIBUTE_JOB_LIST, jobs)
            except OSError as error:  # older than Windows 10: the process is assigned before it runs
                _log.debug("a process cannot be created in a job: %s", error)
            yield attributes
        finally:
            self._kernel32.DeleteProcThreadAttributeList(attributes)

    def _add(self, attributes: Any, kind: int, values: Any) -> None:
        self._call(
            "UpdateProcThreadAttribute", attributes, 0, kind, values, ctypes.sizeof(values), None, None
        )

    def is_in_job(self, process: int, job: int) -> bool:
        """Whether a process is in a job."""
        answer = _BOOL()
        self._call("IsProcessInJob", process, job, ctypes.byref(answer))
        return bool(answer.value)

    def assign(self, job: int, process: int) -> None:
        """Put a process into a job."""
        self._call("AssignProcessToJobObject", job, process)

    def resume(self, thread: int) -> None:
        """Let a thread run."""
        if self._kernel32.ResumeThread(thread) == INFINITE:
            raise self._failure("ResumeThread", self._last_error())

    def wait(self, handle: int, timeout: float | None) -> bool:
        """Wait until a process has ended; return whether it has after *timeout* seconds, None: no limit."""
        limit = INFINITE if timeout is None else round(timeout * 1000)
        result = self._kernel32.WaitForSingleObject(handle, limit)
        if result not in (WAIT_OBJECT_0, WAIT_TIMEOUT):
            raise self._failure("WaitForSingleObject", self._last_error())
        return bool(result == WAIT_OBJECT_0)

    def exit_code(self, process: int) -> int:
        """Return the exit code of a process that has ended."""
        code = _DWORD()
        self._call("GetExitCodeProcess", process, ctypes.byref(code))
        return code.value

    def terminate_process(self, process: int, code: int) -> None:
        """End a process, not what it has started."""
        self._call("TerminateProcess", process, code)

    def terminate_job(self, job: int, code: int) -> None:
        """End all processes in a job."""
        self._call("TerminateJobObject", job, code)

    def active_processes(self, job: int) -> int:
        """Return how many processes are in a job."""
        found = _Accounting()
        self._call(
            "QueryInformationJobObject",
            job,
            BASIC_ACCOUNTING_INFORMATION,
            ctypes.byref(found),
            ctypes.sizeof(found),
            None,
        )
        return int(found.active)

    def close(self, handle: int) -> None:
        """Close a handle. A failure is only logged: whoever closes has no use for it any more."""
        if not self._kernel32.CloseHandle(handle):
            _log.error("%s", self._failure("CloseHandle", self._last_error()))

    def hold(self, descriptor: int) -> int:
        """Return another descriptor of the same file."""
        return os.dup(descriptor)

    def let_go(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def start_thread(self, name: str, function: Callable[[], None]) -> None:
        """Run *function* on a thread that does not keep the interpreter."""
        try:
            threading.Thread(target=function, name=name, daemon=True).start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            raise OSError(errno.EAGAIN, str(error)) from error

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a function that returns nothing or zero if it fails."""
        result = getattr(self._kernel32, name)(*arguments)
        if not result:
            raise self._failure(name, self._last_error())
        return int(result)

    def _failure(self, name: str, number: int) -> OSError:
        # The fourth argument is a Windows error number there, from which Python makes the errno.
        return OSError(errno.EIO, f"{name}: {self._describe(number).strip()} [{number}]", None, number)
