"""The modules of hermes-agent, and what of them the backend uses.

Releases differ: what one lacks is left to our own defaults, and said at the debug level. Nothing is imported
before it is asked for.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ...cell.tools import ToolCallContext
from ...errors import ConfigError
from ...lifecycle.key import Owner
from ...limits import Limits
from .failures import log_failure

DISPATCHER = "model_tools"
CODE_TOOL = "tools.code_execution_tool"
TERMINAL = "tools.terminal_tool"
GATEWAY_MARKER = "_HERMES_GATEWAY"  # the variable that is "1" in a gateway
SPILLED = ("cache", "exec")  # below the agent's home

_log = logging.getLogger(__name__)


def member(module: str, *names: str) -> Any:
    """Return the first of these members that a module has; None if it has none, or is not there."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # another program's module: it may fail in any way
        _log.debug("%s cannot be imported: %s", module, error)
        return None
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def safeguard(module: str, name: str) -> Any:
    """Return the member that a safeguard is; None if the release has no such.

    Raises ConfigError for a module that is there and cannot be imported: nothing runs past it.
    """
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise ConfigError(
            f"{name} cannot be asked, because {module} cannot be imported: {error}; repair hermes-agent"
        ) from error


def count_of(config: Mapping[str, Any], name: str, default: int) -> int:
    """Return a whole number of a configuration: the default if it is none, and at least 1."""
    try:
        return max(1, int(config.get(name, default)))
    except (TypeError, ValueError, OverflowError):
        return default


def is_there() -> bool:
    """Whether there is a hermes-agent, also one that cannot be imported, or is only just being imported."""
    return sys.modules.get(DISPATCHER) is not None or importlib.util.find_spec(DISPATCHER) is not None


def dispatcher() -> ModuleType:
    """Return the module that nothing works without; raises ConfigError if it cannot be imported."""
    try:
        module = importlib.import_module(DISPATCHER)
        if not callable(module.handle_function_call):
            raise TypeError("handle_function_call is no function")
        return module
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"hermes-agent cannot be imported: {error}; install it in the agent's environment "
            f"({sys.executable}), or give a Host of your own"
        ) from error


class AgentModules:
    """The services of hermes-agent, as the fields of ``Host`` want them."""

    def dispatch(self, name: str, arguments: dict[str, Any], *, task_id: str, cell: ToolCallContext) -> Any:
        """Serve a call of a tool as the agent serves its model's.

        What a script reads its model has not seen: the script has all of it, and so has the model later.
        """
        if name != "read_file":
            return dispatcher().handle_function_call(name, arguments, task_id=task_id)
        _forget_reads(task_id)
        try:
            return dispatcher().handle_function_call(name, arguments, task_id=task_id)
        finally:
            _forget_reads(task_id)

    def resolve_owner(self, task_id: str) -> Owner:
        """Return the session, its delegated child, or the task that calls; raises ConfigError for none."""
        session = self._session_key() or task_id
        if not session:
            raise ConfigError("the call has neither a session key nor a task id: nobody would own its kernel")
        if not self._is_child():
            return Owner(session)
        return Owner(session, child=self._session_value("HERMES_SESSION_ID") or task_id or session)

    def scope(self) -> str:
        """Return the home of the profile that calls."""
        home = member("hermes_constants", "get_hermes_home")
        return "" if home is None else str(home())

    def config(self) -> Mapping[str, Any]:
        """Return the ``code_execution`` part of the configuration."""
        load = member(CODE_TOOL, "_load_config")
        config = {} if load is None else load()
        return config if isinstance(config, Mapping) else {}

    def limits(self) -> Limits:
        """Return what the configuration says of kernels; a value that cannot be is the default."""
        config = self.config()
        home = member("hermes_constants", "get_process_hermes_home", "get_hermes_home")
        return Limits(
            max_kernels=count_of(config, "max_session_kernels", Limits.max_kernels),
            idle_timeout=count_of(config, "kernel_idle_timeout", int(Limits.idle_timeout)),
            spill_dir=None if home is None else str(Path(home(), *SPILLED)),
        )

    def is_passthrough(self, name: str) -> bool:
        """Whether a skill or the configuration has declared that a variable may pass."""
        declared = member("tools.env_passthrough", "is_env_passthrough")
        return declared is not None and bool(declared(name))

    def resolve_passthrough(self, name: str, value: str | None) -> str | None:
        """Return the value that the calling profile has, never another's."""
        get_secret = member("agent.secret_scope", "get_secret")
        if get_secret is None:
            return value
        try:
            secret = get_secret(name)
        except Exception as error:  # noqa: BLE001  # several profiles, and none of them is calling
            log_failure(_log, error, f"{name} does not pass")
            return None
        return None if secret is None else str(secret)

    def build_env(self, env: dict[str, str], python: str) -> dict[str, str]:
        """Add what the agent says of time zone, homes, profile and its own modules."""
        env.update(self._of_profile(env))
        zone = os.environ.get("HERMES_TIMEZONE", "").strip()
        if zone and sys.platform != "win32":
            env["TZ"] = zone
        override = member("hermes_constants", "get_hermes_home_override")
        if override is not None and (home := override()):
            env["HERMES_HOME"] = str(home)
        apply_home = member("hermes_constants", "apply_subprocess_home_env")
        if apply_home is not None:
            apply_home(env)
        return self._with_root(env, python)

    def capture_context(self) -> Callable[[Callable[[], Any]], Any]:
        """Return what runs a function with the calling thread's prompts, and puts back what was there.

        If they cannot be captured the function has none: what is dangerous is denied then.
        """
        pairs = _callbacks()
        captured = [(getter, setter, getter()) for getter, setter in pairs]

        def runner(function: Callable[[], Any]) -> Any:
            before = [(setter, getter()) for getter, setter, _ in captured]
            try:
                for _, setter, callback in captured:
                    setter(callback)
                return function()
            finally:
                for setter, callback in before:
                    setter(callback)

        return runner

    @contextlib.contextmanager
    def around_dispatch(self) -> Iterator[None]:
        """What a tool prints goes nowhere, of this thread alone."""
        silence = member("agent.thread_scoped_output", "thread_scoped_silence")
        if silence is None:
            silence = contextlib.nullcontext
        with silence():
            yield

    def tool_stubs(self, names: list[str]) -> str:
        """Return the agent's own functions for these tools, as source."""
        generate = member(CODE_TOOL, "generate_hermes_tools_module")
        return "" if generate is None else str(generate(names))

    @property
    def script_tools(self) -> frozenset[str] | None:
        """The tools that code may call at all."""
        allowed = member(CODE_TOOL, "SANDBOX_ALLOWED_TOOLS")
        return None if allowed is None else frozenset(allowed)

    def clean(self, text: str) -> str:
        """Take out escape sequences and what the agent takes for a secret."""
        strip = member("tools.ansi_strip", "strip_ansi")
        redact = member("agent.redact", "redact_sensitive_text")
        text = text if strip is None else strip(text)
        return text if redact is None else str(redact(text, code_file=True))

    def interrupt_reason(self) -> str | None:
        """Why this thread was interrupted, if the agent has recorded it."""
        recorded = member("tools.interrupt", "get_interrupt_reason")
        reason = None if recorded is None else recorded()
        return str(reason) if reason else None

    def is_interrupted(self) -> bool:
        """Whether this thread is interrupted."""
        asked = member("tools.interrupt", "is_interrupted")
        return asked is not None and bool(asked())

    def socket_dir(self) -> str | None:
        """Where the agent's sockets may stand."""
        directory = member("hermes_constants", "socket_safe_tmpdir")
        return None if directory is None else str(directory())

    def is_available(self) -> bool:
        """Whether code may be run at all."""
        return bool(member(CODE_TOOL, "SANDBOX_AVAILABLE") is not False)

    def guard(self, code: str) -> str | None:
        """Ask what the agent asks before it runs code; return why it may not run.

        Whether the terminal's policy is known, whether the code would end the gateway that runs it, and the
        approval of the whole script. Raises ConfigError where that cannot be asked.
        """
        return _unknown_policy() or _end_of_the_gateway(code) or self._disapproval(code)

    def elsewhere(self, code: str, task_id: str, enabled_tools: Collection[str]) -> str | None:
        """Have the agent run code by itself where its terminal is not on this machine.

        Raises ConfigError where it is not known which machine that is: never is this one taken for it.
        """
        if self._environment()["env_type"] == "local":
            return None
        execute = member(CODE_TOOL, "_execute_remote")
        if execute is None:
            raise ConfigError(
                "the agent's terminal is on another machine, and this release cannot run code there"
            )
        return str(execute(code, task_id, list(enabled_tools)))

    def recorded_cwd(self, task_id: str) -> str | None:
        """Return the directory in which the session's shell is."""
        recorded = member(TERMINAL, "get_session_cwd")
        return None if recorded is None else recorded(task_id)

    def registered_cwd(self, task_id: str) -> str | None:
        """Return the directory that was registered for the session."""
        registered = member("tools.file_tools", "_registered_task_cwd_override")
        return None if registered is None else registered(task_id)

    def _session_key(self) -> str:
        current = member("tools.approval_context", "get_current_session_key") or member(
            "tools.approval", "get_current_session_key"
        )
        try:
            return str(current(default="") or "") if current is not None else ""
        except Exception as error:  # noqa: BLE001  # the agent's own code; the task has a kernel to itself
            log_failure(_log, error, "the session key is not known")
            return ""

    def _session_value(self, name: str) -> str:
        get = member("gateway.session_context", "get_session_env")
        return "" if get is None else str(get(name, "") or "")

    def _is_child(self) -> bool:
        asked = member("agent.delegation_context", "is_delegated_child_context")
        return asked is not None and bool(asked())

    def _disapproval(self, code: str) -> str | None:
        check = member("tools.approval", "check_execute_code_guard")
        if check is None:
            return "the agent's approval guard cannot be asked"
        config = self._environment()
        has_access = member(TERMINAL, "_docker_has_host_access")
        access = {} if has_access is None else {"has_host_access": has_access(config)}
        verdict = check(code, config["env_type"], **access)
        if not verdict.get("approved"):
            return str(verdict.get("message") or "the code was not approved")
        if verdict.get("user_approved") and (
            clear := member("tools.interrupt", "clear_current_thread_interrupt")
        ):
            clear()
        return None

    def _environment(self) -> Mapping[str, Any]:
        """Return what the agent knows of where its terminal is; raises ConfigError if it does not."""
        get = safeguard(TERMINAL, "_get_env_config")
        config = None if get is None else get()
        if not isinstance(config, Mapping) or not config.get("env_type"):
            raise ConfigError(
                f"it is not known for which machine the code is: in this release {TERMINAL}._get_env_config "
                "gives no env_type; give a Host with a guard and an elsewhere of your own"
            )
        return config

    def _of_profile(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the declared variables that only the calling profile has."""
        current = member("agent.secret_scope", "current_secret_scope")
        scope = None if current is None else current()
        if not isinstance(scope, Mapping):
            return {}
        missing = [name for name in scope if name not in env and name not in os.environ]
        return {name: str(scope[name]) for name in missing if self.is_passthrough(name)}

    def _with_root(self, env: dict[str, str], python: str) -> dict[str, str]:
        """Have the agent's modules importable on its own interpreter, and on no other."""
        home = Path(str(dispatcher().__file__)).resolve().parent
        root = str(home)
        own = os.path.realpath(python) == os.path.realpath(sys.executable) and (
            os.path.dirname(python) == os.path.dirname(sys.executable)
        )
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
        if own and home.name not in ("site-packages", "dist-packages"):
            paths.insert(0, root)
        if paths:
            env["PYTHONPATH"] = os.pathsep.join(paths)
        else:
            env.pop("PYTHONPATH", None)
        return env


def _unknown_policy() -> str | None:
    """Say why the terminal's policy of the calling profile is not known, None if it is."""
    enforce = safeguard("tools.terminal_scope", "enforce_no_refusal")
    if enforce is None:
        return None
    try:
        enforce()
    except Exception as error:  # noqa: BLE001  # whatever it is, the agent refuses
        return f"the terminal policy of the profile is not known: {error}; repair the profile's configuration"
    return None


def _end_of_the_gateway(code: str) -> str | None:
    """Say so if the code would end or restart the gateway that this process is."""
    probe = safeguard("tools.process_registry", "_is_supervised_gateway_process")
    if not (os.environ.get(GATEWAY_MARKER) == "1" if probe is None else probe()):
        return None
    contains = safeguard("cron.lifecycle_guard", "contains_gateway_lifecycle_command")
    if contains is None or not contains(code):
        return None
    return "the code would end the gateway that runs it; have that done from a shell outside of the gateway"


def _forget_reads(task_id: str) -> None:
    """Have the agent answer the next read of a task's in full. Whether a file has changed it still knows."""
    for name in ("reset_file_dedup", "notify_other_tool_call"):
        forget = member("tools.file_tools", name)
        if forget is not None:
            forget(task_id or "default")


def _callbacks() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return the agent's prompts of a thread: of each what gets it and what sets it."""
    api = member("tools.thread_context", "_callback_api")
    try:
        found = () if api is None else tuple(api())
    except Exception as error:  # noqa: BLE001  # the agent's own code
        log_failure(_log, error, "the thread's prompts cannot be captured, what is dangerous is denied")
        return []
    if found and all(isinstance(pair, tuple) for pair in found):
        return list(found)
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))
