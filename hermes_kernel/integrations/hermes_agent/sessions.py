"""The kernels of an agent's sessions: one registry behind the calls of many threads."""

import atexit
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from ...cell.result import CellResult, result_json
from ...cell.status import CellStatus
from ...errors import ConfigError, HermesKernelError, InterpreterError
from ...host.blocking import BlockingRegistry
from ...lifecycle.info import KernelInfo
from ...lifecycle.key import Owner
from ...limits import Limits
from .failures import log_failure
from .host import Host, owner_by_task
from .places import PROJECT, ChildPython
from .toolstubs import HostTools

INTERRUPTED = "[execution interrupted]"
REMEMBERED_OWNERS = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionCell:
    """One call of an agent's ``execute_code``: the code, whose it is, and what it may do."""

    code: str
    task_id: str
    mode: str
    child_python: str
    child_cwd: str
    sandbox_tools: Collection[str]
    timeout: float | None
    max_tool_calls: int | None
    reset: bool
    is_interrupted: Callable[[], bool]


class SessionKernels:
    """Runs cells on the kernels of their sessions. Safe from many threads."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._registry: BlockingRegistry | None = None
        self._limits = Limits()
        self._calls = 0
        self._reasons: dict[Owner, str | None] = {}

    def execute(self, cell: SessionCell) -> str:
        """Run a cell and return its result as JSON, also if it could not be run."""

        def run() -> str:
            with self._in_use() as registry:
                return self._execute(registry, cell)

        return as_json(run)

    def unusable(self, python: str) -> str | None:
        """Say why a kernel cannot run on an interpreter, None if it can."""
        with self._in_use() as registry:
            return _checked_python(registry, python).reason

    def kernels(self) -> tuple[KernelInfo, ...]:
        """Describe the kernels that exist now."""
        registry = self._registry
        return () if registry is None else registry.kernels()

    def end_owner(self, session_key: str) -> int:
        """End the kernels of a session, not those of its delegated children; return how many there were."""
        return self._end(
            session_key, lambda info: info.owner.session == session_key and info.owner.child is None
        )

    def end_child(self, child_id: str) -> int:
        """End the kernels of a delegated child; return how many there were."""
        return self._end(child_id, lambda info: info.owner.child == child_id)

    def end_all(self) -> None:
        """End every kernel, and all that stands behind them; idempotent. A later call begins anew."""
        with self._lock:
            registry, self._registry = self._registry, None
        if registry is not None:
            atexit.unregister(self.end_all)
            registry.close()

    def _end(self, name: str, chosen: Callable[[KernelInfo], bool]) -> int:
        registry = self._registry
        if not name or registry is None:
            return 0
        scope = self.host.scope()
        return registry.close_where(lambda info: info.owner.scope == scope and chosen(info))

    def _execute(self, registry: BlockingRegistry, cell: SessionCell) -> str:
        owner = self._owner(cell.task_id)
        tools = HostTools.of(self.host, cell.sandbox_tools, cell.task_id)
        python = _checked_python(registry, cell.child_python)
        result = registry.execute(
            cell.code,
            owner=owner,
            tools=tools,
            timeout=cell.timeout,
            max_tool_calls=cell.max_tool_calls,
            reset=cell.reset,
            pinned=owner.child is not None,
            python=python.path,
            cwd=(cell.child_cwd or None) if cell.mode == PROJECT else None,
            variant=(cell.mode, *tools.named),
            show_value=False,
            interrupted=cell.is_interrupted,
        )
        if self._is_news(owner, python, reused=result.kernel.reused) and python.reason is not None:
            note = f"The cell ran on {sys.executable}, the agent's own interpreter: {python.reason}."
            result = replace(result, warning=" ".join(filter(None, (result.warning, note))))
        return self._told(result, tuple(tools.named))

    def _is_news(self, owner: Owner, python: ChildPython, *, reused: bool) -> bool:
        """Whether the owner does not know why its cells do not run on the interpreter of the project."""
        with self._lock:
            known = self._reasons.pop(owner, None)
            self._reasons[owner] = python.reason
            if len(self._reasons) > REMEMBERED_OWNERS:
                del self._reasons[next(iter(self._reasons))]
        return not reused or known != python.reason

    def _owner(self, task_id: str) -> Owner:
        try:
            owner = self.host.resolve_owner(task_id)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # the host's own code; its task has a kernel to itself then
            log_failure(_log, error, f"the owner of task {task_id!r} is not known")
            owner = owner_by_task(task_id)
        scope = self.host.scope()
        if owner.scope not in ("", scope):  # an end looks for the owners of scope() alone
            raise ConfigError(
                f"resolve_owner() gave an owner of the scope {owner.scope!r}, where scope() gave {scope!r}; "
                "let scope() say it"
            )
        return replace(owner, scope=scope)

    def _told(self, result: CellResult, tools: Collection[str]) -> str:
        """Return the JSON of a result, with what the host knows of an interruption or an error."""
        payload = result.to_dict()
        if result.status is CellStatus.INTERRUPTED and (reason := self._asked(self.host.interrupt_reason)):
            output = payload["output"].removesuffix(INTERRUPTED)
            payload["output"] = f"{output}{INTERRUPTED[:-1]} — {' '.join(reason.split())}]"
        hint = self.host.hint
        if result.error is not None and hint is not None:
            said = result.error.traceback
            if told := self._asked(lambda: hint(said, tools)):
                payload["hint"] = told
        return result_json(payload)

    @staticmethod
    def _asked(question: Callable[[], str | None]) -> str | None:
        try:
            return question()
        except Exception as error:  # noqa: BLE001  # the host's own code: the result is told without
            log_failure(_log, error, "a question to the host has failed")
            return None

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[BlockingRegistry]:
        """The registry, which stays as it is as long as the block lasts."""
        limits = self.host.limits()
        with self._lock:
            registry, replaced = self._renewed(limits)
            self._calls += 1
        try:
            if replaced is not None:
                replaced.close()
            yield registry
        finally:
            with self._lock:
                self._calls -= 1

    def _renewed(self, limits: Limits) -> tuple[BlockingRegistry, BlockingRegistry | None]:
        """Return the registry, and the one that it replaces: other limits end no kernel. Under the lock."""
        if not isinstance(limits, Limits):
            raise ConfigError(f"limits() gave a {type(limits).__name__}; let it return Limits")
        # What each call says by itself makes no difference.
        limits = replace(limits, timeout=Limits.timeout, max_tool_calls=Limits.max_tool_calls)
        before = self._registry
        if before is not None and (limits == self._limits or self._calls or before.kernels()):
            return before, None
        host = self.host
        registry = BlockingRegistry(
            limits=limits,
            env_passthrough=host.is_passthrough,
            resolve_env=host.resolve_passthrough,
            build_env=host.build_env,
            secrets=host.secrets,
            allow_magics=False,
            expose=host.expose,
            capture_context=host.capture_context,
            clean=host.clean,
            bootstrap=host.bootstrap,
            socket_dir=host.socket_dir(),
        )
        if before is None:
            atexit.register(self.end_all)
        self._registry, self._limits = registry, limits
        return registry, before


def as_json(run: Callable[[], str]) -> str:
    """Return the JSON of a result, also if there is none because the host or the call was wrong."""
    try:
        return run()
    except HermesKernelError as error:
        return error.to_json()
    except Exception as error:  # noqa: BLE001  # the host's own code: its model is told, and goes on
        log_failure(_log, error, "a cell was not run")
        return HermesKernelError(f"{type(error).__name__}: {error}").to_json()


def _checked_python(registry: BlockingRegistry, python: str) -> ChildPython:
    """Return the interpreter if a kernel can run on it, else the host's own, and why."""
    if not python or python == sys.executable:
        return ChildPython(sys.executable)
    try:
        registry.check_python(python)
    except InterpreterError as error:
        return ChildPython(sys.executable, str(error))
    return ChildPython(python)
