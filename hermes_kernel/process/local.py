"""The launcher for kernels on this machine."""

import asyncio
import itertools
import os
import sys
import sysconfig
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, HermesKernelError, KernelStartError
from ..sidecar import __file__ as _sidecar
from . import interpreter, tree
from .environment import FIXED, EnvPolicy, scrub
from .launch import Ended, Interpreter, KernelExit, KernelHandle, Launched, LaunchSpec, StreamRest
from .staging import LOG_TAIL, Staging, StagingError, remove_trees

NODE = "local"
KERNEL_MODULE = "hermes_kernel.kernel.app"
PLAIN = "HERMES_KERNEL_PLAIN"
PROBE_TIMEOUT = 10.0  # seconds for an interpreter to say what it has
REMOVAL_WAIT = 0.5  # seconds that the end of a kernel waits for the removal of its files
CLOSE_TIMEOUT = 5.0  # seconds for all that is still being removed when the launcher is closed
REMEMBERED = 1000  # ended kernels whose exit code can still be asked for

_PACKAGE = Path(_sidecar).absolute().parent.parent
_LAUNCHER = str(Path(_sidecar).with_name("launcher.py").absolute())


@dataclass
class _Kernel:
    staging: Staging
    tree: tree.ProcessTree
    exited: "asyncio.Task[KernelExit]"


@dataclass
class LocalLauncher:
    """Spawns kernels as child processes.

    It lives on one event loop; ``SupervisedLauncher`` lends it to others.
    """

    _kernels: dict[KernelHandle, _Kernel] = field(default_factory=dict, init=False)
    _ended: OrderedDict[KernelHandle, KernelExit] = field(default_factory=OrderedDict, init=False)
    _removals: "set[asyncio.Future[None]]" = field(default_factory=set, init=False)
    _interpreters: dict[str, Interpreter] = field(default_factory=dict, init=False)
    _incarnations: "itertools.count[int]" = field(default_factory=itertools.count, init=False)

    async def probe(self, python: str, *, timeout: float) -> Interpreter:
        """Find out whether *python* can run a kernel; an answer that it can is remembered."""
        known = self._interpreters.get(python)
        if known is not None:
            return known
        if python == sys.executable:
            found = interpreter.own()
        else:
            env = scrub(environment_now(), platform=sys.platform, policy=EnvPolicy())
            found = await interpreter.probe(python, env, timeout=timeout)
        self._interpreters[python] = found
        return found

    async def launch(self, spec: LaunchSpec) -> Launched:
        """Make the kernel's directory and start its process."""
        python = await self.probe(spec.python, timeout=min(PROBE_TIMEOUT, spec.timeout))
        cwd = None if spec.cwd is None else check_cwd(spec.cwd)
        try:
            staging = Staging.create(spec.kernel_id, socket_dir=spec.socket_dir)
        except StagingError as error:
            raise KernelStartError(str(error)) from error
        argv = _command(python, staging, spec)
        connection = _connection(staging, spec)
        env = _environment(staging, spec)
        stdio: tree.Stdio | None = None
        try:
            stdio = tree.make_stdio()
            options = {**spec.options, "stdio": stdio.handed_over, "parent": os.getpid()}
            staging.write_connection_file({**connection, "hermes": options})
            process = tree.start(argv, env=env, cwd=cwd or str(staging.work), stdio=stdio)
        except BaseException as error:
            if stdio is not None:
                stdio.close()
            staging.remove()
            if isinstance(error, ValueError | TypeError):  # a NUL, or what is no text
                raise ConfigError(
                    f"the command or the environment of the kernel is wrong: {error}"
                ) from error
            if isinstance(error, OSError):
                what = f"the kernel's process cannot be started: {error}"
                raise KernelStartError(what, argv=argv) from error
            raise
        handle = KernelHandle(NODE, spec.kernel_id, next(self._incarnations))
        exited = asyncio.create_task(_exit_of(process, staging), name=f"exit of {handle}")
        self._kernels[handle] = _Kernel(staging, process, exited)
        return Launched(
            handle,
            process.pid,
            argv,
            connection,
            str(staging.connection_file),
            bridge={"transport": "unix", "path": str(staging.tool_socket)},
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
        kernel.tree.kill()
        try:
            await asyncio.wait_for(asyncio.shield(kernel.exited), timeout)
        except TimeoutError:
            return Ended.NOT_CLEAN
        if self._forget(handle, kernel.exited.result()):
            await self._remove(kernel.staging)
        return Ended.CLEAN

    async def close(self) -> None:
        """End every kernel, and wait for the removal of what they have left."""
        await asyncio.gather(*(self.end(handle, timeout=5) for handle in list(self._kernels)))
        if self._removals:
            await asyncio.wait(self._removals, timeout=CLOSE_TIMEOUT)

    def _forget(self, handle: KernelHandle, exit_: KernelExit) -> bool:
        """Keep of an ended kernel how it ended, not what it wrote; return whether this is news."""
        self._ended[handle] = KernelExit(exit_.exit_code, exit_.signal)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return self._kernels.pop(handle, None) is not None

    async def _remove(self, staging: Staging) -> None:
        """Remove a kernel's directory. A cell may have filled it: then that goes on without its caller."""
        gone = staging.retire()
        try:
            removal = asyncio.get_running_loop().run_in_executor(None, remove_trees, gone)
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            await asyncio.wait({removal}, timeout=REMOVAL_WAIT)
        except RuntimeError:  # the interpreter ends: no thread can be started any more
            remove_trees(gone)


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


async def _exit_of(process: tree.ProcessTree, staging: Staging) -> KernelExit:
    status = await process.ended()
    out, err = process.undrained()
    said = process.early().decode("utf-8", "backslashreplace")
    return KernelExit(
        status.exit_code,
        status.signal,
        f"{staging.log_tail()}\n{said}".strip()[-LOG_TAIL:],
        stdout=_with_pipe(staging.rest("stdout"), out),
        stderr=_with_pipe(staging.rest("stderr"), err),
        last_cell=staging.last_cell(),
    )


def _with_pipe(rest: StreamRest, left: bytes) -> StreamRest:
    return replace(rest, undrained=rest.undrained + left)


def _command(python: Interpreter, staging: Staging, spec: LaunchSpec) -> tuple[str, ...]:
    # -u: what C code and children write is not held back. -P: no directory of the user's on sys.path before
    # the kernel is up. Both are for the interpreter alone; a kernel is configured through its private file.
    safe_path = ("-P",) if python.version >= (3, 11) else ()
    file = str(staging.connection_file)
    return (spec.python, "-u", *safe_path, _LAUNCHER, KERNEL_MODULE, "-f", file, *spec.extra_arguments)


def _connection(staging: Staging, spec: LaunchSpec) -> dict[str, Any]:
    addresses = spec.connection or staging.ipc_addresses()
    return {
        "signature_scheme": "hmac-sha256",
        "kernel_name": "hermes",
        **addresses,
        "key": spec.session_key,
    }


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


def _environment(staging: Staging, spec: LaunchSpec) -> dict[str, str]:
    """The last word on what the kernel sees: scrubbed here whatever came before, then our own variables."""
    env = scrub(spec.env, platform=sys.platform, policy=spec.env_policy)
    if spec.python != sys.executable:
        _leave_own_environment(env, Path(spec.python))
    env.update(FIXED, IPYTHONDIR=str(staging.ipython), HERMES_KERNEL_COOKIE=spec.kernel_id)
    if os.environ.get(PLAIN) == "1":
        env[PLAIN] = "1"
    return env
