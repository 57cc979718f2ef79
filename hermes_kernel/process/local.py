"""The launcher for kernels on this machine."""

import asyncio
import itertools
import logging
import math
import os
import sys
import sysconfig
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError, HermesKernelError, KernelStartError
from ..sidecar import __file__ as _sidecar
from ..sidecar.streams import STREAMS
from . import interpreter
from .environment import FIXED, EnvPolicy, scrub
from .launch import Ended, Interpreter, KernelExit, KernelHandle, Launched, LaunchSpec, StreamRest
from .launchclass import Program, launch_class, start_variables
from .marked import MARK, end_marked
from .published import place_of, publish, withdraw
from .staging import Staging, StagingError, remove_trees
from .sweep import remove_retired, sweep
from .tree import IsolationRefusedError, ProcessTree, Seat, TreeSpec, make_trees
from .warden import WardenGoneError
from .zygote import KERNEL_MODULE, LAUNCHER, start_ticks

NODE = "local"
PLAIN = "HERMES_KERNEL_PLAIN"
START_UP = "PYTHONSTARTUP"  # names code that runs before a kernel can serve: a welcome comes before it
PROBE_TIMEOUT = 10.0  # seconds for an interpreter to say what it has
KILL_TIMEOUT = 5.0  # seconds for a killed tree to be gone
SWEEP_TIMEOUT = 2.0  # seconds to look for what a killed warden has left
SWEEP_INTERVAL = 60.0  # seconds between two looks for what dead hosts have left
REMOVAL_WAIT = 0.5  # seconds that the end of a kernel waits for the removal of its files
CLOSE_TIMEOUT = 5.0  # seconds for all that is still being removed when the launcher is closed
REMOVERS = 2  # threads that remove files
REMEMBERED = 1000  # ended kernels whose exit code can still be asked for

_PACKAGE = Path(_sidecar).absolute().parent.parent
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class _Kernel:
    staging: Staging
    published: Path | None
    tree: ProcessTree
    exited: "asyncio.Task[KernelExit]"
    gone: "asyncio.Task[Ended]"


class LocalLauncher:
    """Starts kernels on this machine, each below a warden that ends its tree.

    It lives on one event loop; ``SupervisedLauncher`` lends it to others. ``spares``: how many kernels are
    kept ready; ``idle_timeout``: seconds without a kernel after which nothing is kept.
    """

    def __init__(self, *, spares: int = 0, idle_timeout: float = 1800.0) -> None:
        self._trees = make_trees(spares=spares, idle_timeout=idle_timeout)
        self._kernels: dict[KernelHandle, _Kernel] = {}
        self._ended: OrderedDict[KernelHandle, KernelExit] = OrderedDict()
        self._removals: set[asyncio.Future[Any]] = set()
        self._launching: dict[asyncio.Future[None], asyncio.Task[Any]] = {}
        self._giving_up: set[asyncio.Task[None]] = set()
        self._is_closing = False
        # Apart from the threads that make results: a cell may have left files for minutes.
        self._remover = ThreadPoolExecutor(REMOVERS, "hermes-kernel-remover")
        self._interpreters: dict[str, Interpreter] = {}
        self._incarnations = itertools.count()
        self._swept_at = -math.inf

    @property
    def spares(self) -> int:
        """How many kernels are ready."""
        return self._trees.spares

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        """Find out whether *python* can run a kernel; an answer that it can is remembered."""
        known = self._interpreters.get(python)
        if known is not None:
            return known
        if python == sys.executable:
            found = interpreter.own()
        else:
            env = _seen_by(python, scrub(environment_now(), platform=sys.platform, policy=EnvPolicy()))
            found = await interpreter.probe(python, env, timeout=timeout)
        self._interpreters[python] = found
        return found

    async def launch(self, spec: LaunchSpec) -> Launched:
        """Make the kernel's directory and start its process."""
        over = asyncio.get_running_loop().create_future()
        self._launching[over] = task = _current_task()
        try:
            return await self._launch(spec)
        except asyncio.CancelledError:
            if self._is_closing and task.uncancel() == 0:  # close() alone has cancelled it
                raise _closed() from None
            raise
        finally:
            del self._launching[over]
            over.set_result(None)

    async def _launch(self, spec: LaunchSpec) -> Launched:
        if self._is_closing:
            raise _closed()
        python = await self.probe(spec.python, timeout=min(PROBE_TIMEOUT, spec.timeout))
        cwd = None if spec.cwd is None else check_cwd(spec.cwd)
        try:
            async with asyncio.timeout(spec.timeout):
                begun = await self._begin_somehow(spec, python, cwd)
        except TimeoutError as error:
            what = f"the kernel's process was not started within {spec.timeout:g} s"
            raise KernelStartError(what, argv=_command(python, spec)) from error
        except (OSError, StagingError) as error:
            what = f"the kernel's process cannot be started: {error}"
            raise KernelStartError(what, argv=_command(python, spec)) from error
        tree, staging = begun.seat.tree, begun.seat.staging
        handle = KernelHandle(NODE, spec.kernel_id, next(self._incarnations))
        self._watch(handle, begun)
        return Launched(
            handle,
            tree.pid,
            begun.argv,
            _connection(staging, spec),
            str(staging.connection_file),
            bridge={"transport": "unix", "path": str(staging.tool_socket)},
            isolation=begun.isolation,
            degraded="; ".join(begun.notes) or None,
            start_method=tree.how,
            greets=tree.greets and START_UP not in spec.env,
            published=None if begun.published is None else str(begun.published),
        )

    async def ended(self, handle: KernelHandle) -> KernelExit:
        """Wait until the kernel process is gone and say how."""
        kernel = self._kernels.get(handle)
        if kernel is not None:
            return await asyncio.shield(kernel.exited)
        if handle not in self._ended:
            raise UnknownKernelError(f"{handle} is not a kernel of this launcher")
        return self._ended[handle]

    def exit_of(self, handle: KernelHandle) -> KernelExit | None:
        """Return how the kernel ended, None while it runs."""
        kernel = self._kernels.get(handle)
        if kernel is None:
            return self._ended.get(handle)
        return kernel.exited.result() if kernel.exited.done() else None

    async def signal(self, handle: KernelHandle, signum: int) -> None:
        """Send a signal to the kernel process and its group."""
        kernel = self._kernels.get(handle)
        if kernel is not None:
            kernel.tree.signal(signum)

    async def end(self, handle: KernelHandle, *, timeout: float) -> Ended:
        """Kill the tree, wait until it is gone and remove its directory."""
        kernel = self._kernels.get(handle)
        if kernel is None:
            return Ended.CLEAN
        withdraw(kernel.published)
        await kernel.tree.end(timeout=timeout)
        await asyncio.wait({kernel.gone, kernel.exited}, timeout=SWEEP_TIMEOUT)
        if not (kernel.gone.done() and kernel.exited.done()):
            return Ended.NOT_CLEAN
        if self._forget(handle, kernel.exited.result()):
            await self._remove(kernel.staging)
        if asyncio.get_running_loop().time() - self._swept_at > SWEEP_INTERVAL:
            self._remove_in_background(sweep)
        return kernel.gone.result()

    async def sweep(self) -> None:
        """Remove what kernels of dead hosts have left on this machine."""
        self._remove_in_background(sweep)

    async def close(self) -> None:
        """End every kernel, and wait for the removal of what they have left. Nothing is launched any more."""
        self._is_closing = True
        for task in self._launching.values():
            task.cancel()
        if under_way := {*self._launching, *self._giving_up}:
            await asyncio.wait(under_way, timeout=CLOSE_TIMEOUT)
        await asyncio.gather(*(self.end(handle, timeout=KILL_TIMEOUT) for handle in list(self._kernels)))
        await self._trees.close()
        self._remove_in_background(remove_retired)
        if self._removals:
            await asyncio.wait(self._removals, timeout=CLOSE_TIMEOUT)
        self._remover.shutdown(wait=False)

    def _forks(self, spec: LaunchSpec, notes: list[str]) -> bool:
        """Whether the kernel is to be forked; if that was asked for and cannot be, *notes* says why."""
        if spec.process.start_method == "spawn":
            return False
        reason = reason_not_to_fork(spec)
        if reason is not None and spec.process.start_method == "fork":
            notes.append(f"started by spawn: {reason}")
        return reason is None

    async def _begin_somehow(self, spec: LaunchSpec, python: Interpreter, cwd: str | None) -> "_Begun":
        """Start a tree in the best way that works, and note why a better one did not.

        Raises OSError, StagingError, ConfigError, KernelStartError.
        """
        notes: list[str] = []
        isolation = spec.process.isolation
        forks = self._forks(spec, notes)
        lost = 0
        while True:
            try:
                seat, argv, published = await self._begin(spec, python, cwd, isolation, notes, forks=forks)
            except WardenGoneError as error:
                lost += 1
                if lost == 1:  # somebody may have killed it
                    continue
                if not forks:
                    raise
                forks = False
                notes.append(f"started by spawn: the process to fork of has ended: {error}")
            except IsolationRefusedError as error:
                why = f"isolation {isolation!r} is not available here: {error.strerror}"
                if spec.process.require_isolation:
                    what = f"{why}; leave require_isolation out to run without"
                    raise KernelStartError(what, argv=_command(python, spec)) from error
                isolation = "none"
                notes.append(f"{why}; runs with 'none'")
            else:
                if seat.tree.note is not None:
                    notes.append(f"started by {seat.tree.how}: {seat.tree.note}")
                return _Begun(seat, argv, isolation, tuple(notes), published)

    async def _begin(
        self,
        spec: LaunchSpec,
        python: Interpreter,
        cwd: str | None,
        isolation: str,
        notes: list[str],
        *,
        forks: bool,
    ) -> tuple[Seat, tuple[str, ...], Path | None]:
        """Start a tree in its directory; if that fails nothing is left.

        Return its seat, its command and its connection file for people, if it has one.
        Raises OSError (WardenGoneError, IsolationRefusedError), StagingError, ConfigError.
        """
        env = _environment(spec)
        kind = launch_class(
            spec.python,
            env,
            forks=forks,
            isolation=isolation,
            memory_limit=spec.process.memory_limit,
            socket_dir=spec.socket_dir,
        )
        seat = await self._trees.seat(
            kind, _program(python, env), spec.kernel_id, binds=spec.connection is None
        )
        staging = seat.staging
        published = None if spec.publish_dir is None else place_of(spec.publish_dir, staging.path.name)
        tree_spec = TreeSpec(
            _interpreter(python),
            _arguments(spec, staging),
            {**env, "IPYTHONDIR": str(staging.ipython), MARK: staging.cookie},
            cwd or str(staging.work),
            (*(() if published is None else (str(published),)), *staging.remains),
        )
        try:
            options = {**spec.options, "stdio": _streams(), "guarded": True}
            staging.write_connection_file({**_connection(staging, spec), "hermes": options})
            await seat.tree.start(tree_spec, staging.lease.descriptor)
            _write_session(staging, spec, seat.tree, isolation, tree_spec.cwd, published)
        except BaseException as error:
            await self._give_up(seat)
            if isinstance(error, ValueError | TypeError):  # a NUL, or what is no text
                what = f"the command or the environment of the kernel is wrong: {error}"
                raise ConfigError(what) from error
            raise
        staging.lease.close()
        if published is not None:
            try:
                publish(published, _connection(staging, spec))
            except OSError as error:
                notes.append(f"not published for people: {error}")
                published = None
        return seat, tree_spec.argv, published

    async def _give_up(self, seat: Seat) -> None:
        """End what has been begun, also if whoever wants that is cancelled meanwhile."""

        async def end() -> None:
            await seat.give_up(timeout=KILL_TIMEOUT)
            await self._trees.discard_spares()

        ending = asyncio.create_task(end())
        self._giving_up.add(ending)
        ending.add_done_callback(self._giving_up.discard)
        await asyncio.shield(ending)

    def _watch(self, handle: KernelHandle, begun: "_Begun") -> None:
        staging, process = begun.seat.staging, begun.seat.tree
        exited = asyncio.create_task(_exit_of(process, staging), name=f"exit of {handle}")
        gone = asyncio.create_task(self._gone(process, staging.cookie), name=f"end of {handle}")
        self._kernels[handle] = _Kernel(staging, begun.published, process, exited, gone)

    async def _gone(self, process: ProcessTree, cookie: str) -> Ended:
        """Wait for the end of the tree; what a killed warden has left is looked for and ended at once."""
        ended = await process.gone()
        if ended is not Ended.CLEAN:
            _log.warning(
                "the tree of process %d was not ended by its warden: looking for what is left", process.pid
            )
        elif sys.platform != "darwin":  # where who belongs to it is remembered, and one may have been missed
            return ended
        is_clean = await self._in_background(end_marked, {cookie}, threads=None)
        return ended if is_clean else Ended.NOT_CLEAN

    def _forget(self, handle: KernelHandle, exit_: KernelExit) -> bool:
        """Keep of an ended kernel how it ended, not what it wrote; return whether this is news."""
        self._ended[handle] = KernelExit(exit_.exit_code, exit_.signal)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return self._kernels.pop(handle, None) is not None

    async def _remove(self, staging: Staging) -> None:
        """Remove a kernel's directory. A cell may have filled it: then that goes on without its caller."""
        removal = self._remove_in_background(remove_trees, staging.retire())
        await asyncio.wait({removal}, timeout=REMOVAL_WAIT)

    def _remove_in_background(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        if function is sweep:
            self._swept_at = asyncio.get_running_loop().time()
        return self._in_background(function, *arguments, threads=self._remover)

    def _in_background(
        self, function: Callable[..., T], *arguments: Any, threads: ThreadPoolExecutor | None
    ) -> "asyncio.Future[T]":
        """Run *function* on a thread, or here if the interpreter ends and no thread can be started."""
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(threads, _logged, function, *arguments)
        except RuntimeError:
            work = loop.create_future()
            work.set_result(_logged(function, *arguments))
        self._removals.add(work)
        work.add_done_callback(self._removals.discard)
        return work


@dataclass(frozen=True)
class _Begun:
    seat: Seat
    argv: tuple[str, ...]
    isolation: str
    notes: tuple[str, ...]
    published: Path | None


def _current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a coroutine is run by no task")
    return task


def _closed() -> KernelStartError:
    return KernelStartError("no kernel is started any more: what starts them has been closed")


def reason_not_to_fork(spec: LaunchSpec) -> str | None:
    """Return why a kernel cannot be forked, None if it can."""
    if sys.platform != "linux":
        return f"a fork is not safe on {sys.platform}"
    if spec.extra_arguments:
        return f"it has options of its own: {' '.join(spec.extra_arguments)}"
    return None


def environment_now() -> dict[str, str]:
    """Return the environment as it is; other threads may be changing it."""
    found = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in found if value is not None}


class UnknownKernelError(HermesKernelError):
    """The handle names no kernel of this launcher."""


def check_cwd(cwd: str) -> str:
    """Return *cwd* as an absolute path; raises ConfigError if a process cannot work there."""
    if not isinstance(cwd, str | os.PathLike) or not isinstance(os.fspath(cwd), str) or not os.fspath(cwd):
        raise ConfigError(f"cwd={cwd!r}: give the path of a directory")
    path = os.path.expanduser(os.fspath(cwd))
    try:
        path = os.path.abspath(path)
    except OSError as error:
        raise ConfigError(
            f"cwd={os.fspath(cwd)!r}: the current directory is gone; give an absolute path"
        ) from error
    try:
        is_directory = os.path.isdir(path)
    except ValueError:  # a NUL in the path
        is_directory = False
    if not is_directory:
        what = "is not a directory" if os.path.lexists(path.replace("\0", "")) else "does not exist"
        raise ConfigError(f"cwd={os.fspath(cwd)!r} {what}; give an existing directory")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"cwd={os.fspath(cwd)!r} cannot be read; give a directory that can")
    return path


def _write_session(
    staging: Staging, spec: LaunchSpec, tree: ProcessTree, isolation: str, cwd: str, published: Path | None
) -> None:
    """Tell other processes of this user about the kernel, see ``sessions``."""
    known = {} if published is None else {"published": str(published)}
    staging.record(
        **known,
        warden={"pid": tree.warden, "started": start_ticks(tree.warden)},
        kernel={"pid": tree.pid, "started": start_ticks(tree.pid)},
    )
    staging.write_session(
        {
            "kernel_id": spec.kernel_id,
            "python": spec.python,
            "cwd": cwd,
            "pid": tree.pid,
            "host": os.getpid(),
            "started": time.time(),
            "isolation": isolation,
            "start_method": tree.how,
            **spec.label,
        }
    )


async def _exit_of(process: ProcessTree, staging: Staging) -> KernelExit:
    status = await process.ended()
    out, err = status.left
    said = status.early.decode("utf-8", "backslashreplace")
    return KernelExit(
        status.exit_code,
        status.signal,
        f"{staging.log_tail()}\n{said}".strip(),
        stdout=_with_pipe(staging.rest("stdout"), out),
        stderr=_with_pipe(staging.rest("stderr"), err),
        last_cell=staging.last_cell(),
    )


def _with_pipe(rest: StreamRest, left: bytes) -> StreamRest:
    return replace(rest, undrained=rest.undrained + left)


def _interpreter(python: Interpreter) -> tuple[str, ...]:
    # -u: what C code and children write is not held back. -P: no directory of the user's on sys.path before
    # the kernel is up. Both are for the interpreter alone; a kernel is configured through its private file.
    safe_path = ("-P",) if python.version >= (3, 11) else ()
    return (python.executable, "-u", *safe_path)


def _arguments(spec: LaunchSpec, staging: Staging) -> tuple[str, ...]:
    return (LAUNCHER, KERNEL_MODULE, "-f", str(staging.connection_file), *spec.extra_arguments)


def _command(python: Interpreter, spec: LaunchSpec) -> tuple[str, ...]:
    """The command of a kernel that has no directory yet, for an error."""
    return (*_interpreter(python), LAUNCHER, KERNEL_MODULE, *spec.extra_arguments)


def _program(python: Interpreter, env: Mapping[str, str]) -> Program:
    """Return how to execute what kernels are forked of; of the environment only what all of them share."""
    return Program(_interpreter(python), {"PATH": env.get("PATH", os.defpath), **dict(start_variables(env))})


def _streams() -> Sequence[Sequence[int]] | None:
    """Where the kernel finds the pipes for its output; None on Windows, where it has them from its start."""
    return None if sys.platform == "win32" else STREAMS


def _connection(staging: Staging, spec: LaunchSpec) -> dict[str, Any]:
    addresses = spec.connection or staging.ipc_addresses()
    return {
        "signature_scheme": "hmac-sha256",
        "kernel_name": "hermes",
        **addresses,
        "key": spec.session_key,
    }


def _seen_by(python: str, env: dict[str, str]) -> dict[str, str]:
    """Return *env* as an interpreter sees it: if it is another one, without what belongs to ours."""
    if python != sys.executable:
        _leave_own_environment(env, Path(python))
    return env


def _leave_own_environment(env: dict[str, str], python: Path) -> None:
    """Take out of *env* what belongs to this interpreter's packages, and say where the other's are."""
    own = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    inherited = env.pop("PYTHONPATH", "").split(os.pathsep)
    foreign = [entry for entry in inherited if entry and not _is_own(Path(entry), own)]
    if foreign:
        env["PYTHONPATH"] = os.pathsep.join(foreign)
    home = python.parent.parent
    env.pop("VIRTUAL_ENV", None)
    if (home / "pyvenv.cfg").exists():
        env["VIRTUAL_ENV"] = str(home)
        env["PATH"] = os.pathsep.join(filter(None, (str(python.parent), env.get("PATH", ""))))


def _is_own(entry: Path, own: set[Path]) -> bool:
    entry = entry.absolute()
    return entry == _PACKAGE.parent or any(entry == place or place in entry.parents for place in own)


def _environment(spec: LaunchSpec) -> dict[str, str]:
    """The last word on what the kernel sees: scrubbed here whatever came before, then what all have."""
    env = _seen_by(spec.python, scrub(spec.env, platform=sys.platform, policy=spec.env_policy))
    env.pop("PYTHONEXECUTABLE", None)  # it says where another interpreter is; jupyter_client drops it, too
    env.update(FIXED)
    if os.environ.get(PLAIN) == "1":
        env[PLAIN] = "1"
    return env


def _logged(function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except Exception:
        _log.exception("%s", function.__name__)
        raise
