"""What an agent gives the backend: everything of its own that the backend needs, in one value."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...cell.tools import ToolCallContext
from ...errors import ConfigError, ToolError
from ...lifecycle.key import Owner
from ...limits import Limits
from .agent import AgentModules, dispatcher

SCRIPT_TOOLS = frozenset(
    {"web_search", "web_extract", "read_file", "write_file", "search_files", "patch", "terminal"}
)
"""The tools that code may call at all."""


def no_tools(name: str, arguments: dict[str, Any], *, task_id: str, cell: ToolCallContext) -> Any:
    """Serve no call: what a host without tools does."""
    raise ToolError(f"{name} cannot be called: this host serves no tools")


def owner_by_task(task_id: str) -> Owner:
    """Return the owner that has no other name than that of its task; raises ConfigError for none."""
    if not task_id:
        raise ConfigError("the call has neither a session key nor a task id: nobody would own its kernel")
    return Owner(task_id)


@dataclass(frozen=True)
class Host:
    """The services of an agent, each with what stands in its place without one.

    Called on the thread that calls: ``resolve_owner(task_id)``, whose kernel it is, a delegated child's if
    ``Owner.child`` is set; ``scope()``, which keeps apart the owners of several profiles: it alone says their
    scope, also where kernels are ended, and an owner with another one is refused; ``limits()``, of which the
    call's own timeout and number of tool calls take the place; ``is_passthrough(name)`` and
    ``resolve_passthrough(name, value)``, which variables kernels see besides the safe ones, and with which
    value; ``build_env(env, python)``, the last word on what a kernel sees; ``capture_context()``, which
    returns the runner of the call's tools; ``interrupt_reason()``, why the cell was interrupted, if that is
    known; ``hint(error, tools)``, what to try after an error, instead of our own.

    ``dispatch(name, arguments, task_id=, cell=)`` serves a call of a tool, in the context of its cell's
    caller and inside of ``around_dispatch()``; it returns JSON text or what it stands for. The body of an
    ``async`` one runs later, on an event loop of ours: still with the caller's context variables, but outside
    of ``around_dispatch()`` and of what ``capture_context()`` sets in a thread.
    ``tool_stubs(names)``: Python source whose functions say how the tools are called.
    ``clean(text)`` is given what a result shows after our own masks. ``bootstrap`` is run before the first
    cell of each kernel. ``socket_dir()``: where sockets may stand. ``expose``: people may look in.

    For ``handle_execute_code`` alone: ``is_available()``, ``config()`` (``mode``, ``timeout``,
    ``max_tool_calls``), ``guard(code)``, which returns why the code may not run, ``elsewhere(code, task_id,
    enabled_tools)``, which returns the result of code that does not run on this machine, the directories
    ``recorded_cwd(task_id)`` and ``registered_cwd(task_id)``, ``is_interrupted()``, and ``script_tools``.
    """

    dispatch: Callable[..., Any] = no_tools
    resolve_owner: Callable[[str], Owner] = owner_by_task
    scope: Callable[[], str] = lambda: ""
    limits: Callable[[], Limits] = Limits
    is_passthrough: Callable[[str], bool] = lambda _name: False
    resolve_passthrough: Callable[[str, str | None], str | None] | None = None
    build_env: Callable[[dict[str, str], str], Mapping[str, str]] | None = None
    capture_context: Callable[[], Callable[[Callable[[], Any]], Any]] | None = None
    around_dispatch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    tool_stubs: Callable[[list[str]], str] | None = None
    clean: Callable[..., str] | None = None
    secrets: Collection[str] = ()
    interrupt_reason: Callable[[], str | None] = lambda: None
    hint: Callable[[str, Collection[str]], str | None] | None = None
    socket_dir: Callable[[], str | None] = lambda: None
    bootstrap: str | None = None
    expose: bool = False
    is_available: Callable[[], bool] = lambda: True
    config: Callable[[], Mapping[str, Any]] = dict
    guard: Callable[[str], str | None] = lambda _code: None
    elsewhere: Callable[[str, str, Collection[str]], str | None] = lambda _code, _task_id, _tools: None
    recorded_cwd: Callable[[str], str | None] = lambda _task_id: None
    registered_cwd: Callable[[str], str | None] = lambda _task_id: None
    is_interrupted: Callable[[], bool] = lambda: False
    script_tools: frozenset[str] = SCRIPT_TOOLS

    @classmethod
    def from_hermes_agent(cls) -> "Host":
        """Return the host that hermes-agent is; raises ConfigError if it cannot be imported."""
        dispatcher()
        return cls.of_modules(AgentModules())

    @classmethod
    def of_modules(cls, agent: AgentModules) -> "Host":
        """Return the same host without a look whether its dispatcher can be imported yet."""
        return cls(
            dispatch=agent.dispatch,
            resolve_owner=agent.resolve_owner,
            scope=agent.scope,
            limits=agent.limits,
            is_passthrough=agent.is_passthrough,
            resolve_passthrough=agent.resolve_passthrough,
            build_env=agent.build_env,
            capture_context=agent.capture_context,
            around_dispatch=agent.around_dispatch,
            tool_stubs=agent.tool_stubs,
            clean=agent.clean,
            interrupt_reason=agent.interrupt_reason,
            socket_dir=agent.socket_dir,
            is_available=agent.is_available,
            config=agent.config,
            guard=agent.guard,
            elsewhere=agent.elsewhere,
            recorded_cwd=agent.recorded_cwd,
            registered_cwd=agent.registered_cwd,
            is_interrupted=agent.is_interrupted,
            script_tools=agent.script_tools or SCRIPT_TOOLS,
        )
