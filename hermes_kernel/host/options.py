"""What a registry and a call may be told, checked before anything is started."""

import asyncio
import contextvars
import difflib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from ..cell.events import CellEvent
from ..cell.masks import Masks
from ..cell.request import CellRequest, CellTimes
from ..cell.shown import Cleaner
from ..cell.tools import ToolSet
from ..cell.transcript import Transcript, checked_transcript
from ..errors import ConfigError
from ..lifecycle.key import KernelKey, Owner
from ..limits import UNSET, Limits, Unset, checked_call_limit, checked_time_limit, not_available, shown
from ..process import interpreter
from ..process.environment import EnvPolicy, scrub
from ..process.local import check_cwd, environment_now
from ..process.staging import check_socket_dir
from .cleaning import checked_secrets, cleaner_for
from .events import EventPump
from .grant import CellTools, kernels_that_wait
from .handlers import HandlerLoop
from .observe import Observed
from .transcript import check_transcript_place


class RegistryArguments(TypedDict, total=False):
    """The keyword arguments of a registry.

    ``env_passthrough``: names of variables that the kernels may see besides the safe ones, or a function
    that says so of a name. ``resolve_env(name, value)`` gives such a variable's value (None: it is left
    out). ``build_env(env, python)`` is given all that passes and the interpreter, and returns what a kernel
    is to have instead. All three are called on the thread that calls ``execute``. ``secrets``: texts of at
    least 4 characters that no result may hold, besides the values of variables that are withheld and what
    looks like a key.
    ``clean(text)`` is called with the texts of a result after that; ``clean(text, mask)`` is called instead,
    and ``mask`` is what would have been done. ``bootstrap``: code run before the first cell
    of every kernel. ``socket_dir``: where the kernels' sockets are to stand. ``expose``: people find the
    kernels in JupyterLab and `hermes-kernel attach`, as ``hermes-live``. ``transcript``: where the sessions
    are kept as notebooks while they run, see ``Transcript``. ``capture_context`` is called on
    the thread that calls ``execute`` and returns a *runner*: ``runner(fn)`` runs ``fn`` with what of that
    thread's the tools need besides its context variables (thread-locals), and returns what ``fn`` returns.
    """

    limits: Limits
    env_passthrough: Iterable[str] | Callable[[str], bool]
    resolve_env: Callable[[str, str | None], str | None] | None
    build_env: Callable[[dict[str, str], str], Mapping[str, str]] | None
    secrets: Iterable[str]
    allow_magics: bool
    expose: bool
    transcript: "str | os.PathLike[str] | Transcript | None"
    protect_host: bool
    capture_context: Callable[[], Any] | None
    clean: Callable[..., str] | None
    bootstrap: str | None
    socket_dir: str | os.PathLike[str] | None


class CallArguments(TypedDict, total=False):
    """The keyword arguments of ``execute``, besides the owner.

    ``timeout`` in seconds, None or 0 = none. ``reset``: begin with a fresh kernel; a cell that runs on the
    old one finishes there. ``pinned``: neither the cap nor idleness ends the kernel. ``python``: the
    interpreter, by path or name. ``cwd``: the working directory; None = one of the kernel's own.
    ``variant``: what else tells this kernel from others of its owner. ``tools``: what the cell can call as
    ``hermes_tools.name(...)`` (see ``ToolSet.of``), ``max_tool_calls`` how often in all; None = no limit.
    ``show_value``: whether the value of the last expression is shown, as in a notebook.
    ``on_event`` is told what the cell writes, shows and calls while it does, on a thread of its own; what it
    raises is logged, and one that takes its time misses some text, but holds nothing up.
    """

    tools: Any
    timeout: float | Unset | None
    max_tool_calls: int | Unset | None
    reset: bool
    pinned: bool
    python: str | os.PathLike[str] | None
    cwd: str | os.PathLike[str] | None
    variant: tuple[str, ...]
    show_value: bool
    on_event: Callable[[CellEvent], None] | None


_LATER_OF_REGISTRY: dict[str, Any] = {
    "protect_host": False,
}  # fmt: skip
REMEMBERED_TOOL_SETS = 64


@dataclass(frozen=True)
class Call:
    """One checked call: whose kernel, what to run, and the environment of a kernel that must be started."""

    key: KernelKey
    request: CellRequest
    env: Mapping[str, str]
    env_policy: EnvPolicy
    reset: bool = False
    pinned: bool = False
    tools: CellTools | None = None
    events: EventPump | None = None
    observed: Observed = field(default_factory=Observed)
    cleaner: Cleaner = field(default_factory=Masks)
    serving: frozenset[str] = frozenset()


class ToolSets:
    """The tool sets of the last calls: a caller gives the same tools with every cell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], tuple[list[Any], ToolSet]] = {}

    def of(self, given: object) -> ToolSet:
        """Return the tools as a ToolSet; raises ConfigError."""
        if not isinstance(given, list | tuple):
            return ToolSet.of(given)
        key = tuple(map(id, given))  # of objects that are kept here, so no other has their place
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return known[1]
        tools = ToolSet.of(given)
        with self._lock:
            self._known[key] = list(given), tools
            if len(self._known) > REMEMBERED_TOOL_SETS:
                del self._known[next(iter(self._known))]
        return tools


@dataclass(frozen=True)
class RegistryOptions:
    """The checked arguments of a registry. Raises ConfigError for what cannot be."""

    limits: Limits = field(default_factory=Limits)
    env_passthrough: tuple[str, ...] | Callable[[str], bool] = ()
    resolve_env: Callable[[str, str | None], str | None] | None = None
    build_env: Callable[[dict[str, str], str], Mapping[str, str]] | None = None
    allow_magics: bool = True
    capture_context: Callable[[], Callable[[Callable[[], Any]], Any]] | None = None
    secrets: frozenset[str] = frozenset()
    clean: Callable[..., str] | None = None
    bootstrap: str | None = None
    socket_dir: str | None = None
    expose: bool = False
    transcript: Transcript | None = None
    handlers: HandlerLoop = field(default_factory=HandlerLoop, init=False)
    _tool_sets: ToolSets = field(default_factory=ToolSets, init=False)

    @classmethod
    def of(cls, arguments: RegistryArguments) -> "RegistryOptions":
        """Check the arguments of a registry."""
        given: dict[str, Any] = dict(arguments)
        _check_names(given, RegistryArguments, _LATER_OF_REGISTRY)
        limits = given.get("limits")
        if limits is not None and not isinstance(limits, Limits):
            raise ConfigError(f"limits is a {type(limits).__name__}; give a Limits")
        if given.get("socket_dir") is not None:
            given["socket_dir"] = check_socket_dir(given["socket_dir"])
        _checked_switch("allow_magics", given.get("allow_magics", True))
        _checked_switch("expose", given.get("expose", False))
        bootstrap = given.get("bootstrap")
        if bootstrap is not None and not isinstance(bootstrap, str):
            raise ConfigError(f"bootstrap is a {type(bootstrap).__name__}; give Python source as a string")
        for name in ("resolve_env", "build_env", "capture_context", "clean"):
            if given.get(name) is not None:
                check_function(name, given[name])
        given["secrets"] = checked_secrets(given.get("secrets", ()))
        given["env_passthrough"] = _checked_passthrough(given.get("env_passthrough", ()))
        given["transcript"] = checked_transcript(given.get("transcript"))
        if given["transcript"] is not None:
            check_transcript_place(given["transcript"])
        own = {known.name for known in fields(cls) if known.init}
        return cls(**{key: value for key, value in given.items() if key in own and value is not None})

    def call(
        self,
        code: str,
        owner: str | Owner,
        arguments: CallArguments,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Call:
        """Check one call, on the calling thread; raises ConfigError, and nothing was started then.

        *loop* is the caller's own, for tools that are ``async``.
        """
        given: dict[str, Any] = dict(arguments)
        _check_names(given, CallArguments, {})
        cwd = given.get("cwd")
        key = KernelKey(
            Owner.of(owner),
            interpreter.resolve(given.get("python")),
            None if cwd is None else check_cwd(cwd),
            _checked_variant(given.get("variant", ())),
        )
        request = CellRequest(
            code,
            self._times(given.get("timeout", UNSET)),
            _checked_switch("show_value", given.get("show_value", True)),
        )
        policy = self._env_policy()
        env = environment_now()
        if self.build_env is not None:
            passes = scrub(env, platform=sys.platform, policy=policy)
            policy = _rebuilt(policy, passes, self.build_env, key.python)
        cleaner = cleaner_for(self.secrets, env, sys.platform, policy, self.clean)
        on_event = given.get("on_event")
        if on_event is not None:
            check_function("on_event", on_event)
        events = None if on_event is None else EventPump(on_event, cleaner)
        call = Call(
            key,
            request,
            scrub(env, platform=sys.platform, policy=policy),
            policy,
            reset=_checked_switch("reset", given.get("reset", False)),
            pinned=_checked_switch("pinned", given.get("pinned", False)),
            tools=self._tools(given, loop, events, cleaner),
            events=events,
            cleaner=cleaner,
            serving=kernels_that_wait(),
        )
        return _observed(call, Observed.begin(key))  # nothing is refused here any more

    def cleaner(self) -> Cleaner:
        """Return what cleans what is told besides the results; for the calling thread, as ``call``."""
        return cleaner_for(self.secrets, environment_now(), sys.platform, self._env_policy(), self.clean)

    def _tools(
        self,
        given: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop | None,
        events: EventPump | None,
        cleaner: Cleaner,
    ) -> CellTools | None:
        """Capture what the cell's tools need of the calling thread; None if it has no tools."""
        limit = given.get("max_tool_calls", UNSET)
        limit = self.limits.max_tool_calls if limit is UNSET else checked_call_limit("max_tool_calls", limit)
        tools = self._tool_sets.of(given.get("tools", ()))
        if not tools.tools:
            return None
        return CellTools(
            tools,
            limit,
            loop=self.handlers.get if loop is None else lambda: loop,
            context=contextvars.copy_context(),
            runner=None if self.capture_context is None else _checked_runner(self.capture_context()),
            on_event=None if events is None else events.tell,
            cleaner=cleaner,
        )

    def _times(self, timeout: Any) -> CellTimes:
        limits = self.limits
        seconds = limits.timeout if timeout is UNSET else checked_time_limit("timeout", timeout)
        return CellTimes(
            timeout=seconds,
            queue_timeout=seconds if limits.queue_timeout is None else limits.queue_timeout,
            start_timeout=limits.start_timeout,
            interrupt_grace=limits.interrupt_grace,
            idle_grace=limits.idle_grace,
        )

    def _env_policy(self) -> EnvPolicy:
        """What passes besides the safe names now: evaluated for each call, frozen when its kernel starts."""
        allowed = self.env_passthrough
        names = [name for name in list(os.environ) if allowed(name)] if callable(allowed) else list(allowed)
        if self.resolve_env is None:
            return EnvPolicy(frozenset(names))
        values, withheld = {}, set()
        for name in names:
            value = self.resolve_env(name, os.environ.get(name))
            if value is None:
                withheld.add(name)
            else:
                values[name] = _checked_value("resolve_env", name, value)
        return EnvPolicy(frozenset(names), values, frozenset(withheld))


def _rebuilt(
    policy: EnvPolicy,
    passes: dict[str, str],
    build_env: Callable[[dict[str, str], str], Mapping[str, str]],
    python: str,
) -> EnvPolicy:
    """Return the policy by which a kernel has what *build_env* makes of what passes."""
    given: Any = build_env(dict(passes), python)
    if not isinstance(given, Mapping):
        raise ConfigError(f"build_env gave a {type(given).__name__}; let it return the environment")
    for name in given:
        if not isinstance(name, str) or not name or "=" in name or not _can_be_in_a_variable(name):
            raise ConfigError(f"build_env: {name!r} is not the name of a variable")
    changed = {
        name: _checked_value("build_env", name, value)
        for name, value in given.items()
        if name not in passes or passes[name] != value
    }
    return replace(
        policy,
        values={**{name: value for name, value in policy.values.items() if name in given}, **changed},
        withheld=policy.withheld | (passes.keys() - given.keys()),
    )


def _checked_value(source: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{source} gave a {type(value).__name__} for {name!r}; give a string or None")
    if not _can_be_in_a_variable(value):
        raise ConfigError(
            f"{source} gave a value with a NUL or a lone surrogate for {name!r}; give text without one"
        )
    return value


def _can_be_in_a_variable(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _observed(call: Call, observed: Observed) -> Call:
    """Return a call that tells its observers what its cell's tools do."""
    if not observed:
        return call
    tools = call.tools
    if tools is not None:
        on_event = tools.on_event

        def tell(event: CellEvent) -> None:
            observed.tell(event)
            if on_event is not None:
                on_event(event)

        tools = replace(tools, on_event=tell)
    return replace(call, tools=tools, observed=observed)


def _checked_runner(runner: Any) -> Callable[[Callable[[], Any]], Any]:
    if not callable(runner):
        raise ConfigError(f"capture_context() gave {runner!r}; let it return a function runner(fn)")
    checked: Callable[[Callable[[], Any]], Any] = runner
    return checked


def check_function(name: str, given: object) -> None:
    """Refuse what cannot be called, and what is async: whatever it would say, what it returns is true."""
    if not callable(given):
        raise ConfigError(f"{name}={shown(given)} cannot be called; give a function")
    if any(map(_is_async, (given, type(given).__call__))):
        raise ConfigError(f"{name}={given!r} is async, and nobody would wait for it; give a plain function")


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _checked_passthrough(given: Any) -> tuple[str, ...] | Callable[[str], bool]:
    if callable(given):
        check_function("env_passthrough", given)
        function: Callable[[str], bool] = given
        return function
    if isinstance(given, str):
        raise ConfigError(f"env_passthrough={given!r} is one string; give a list of names, or a function")
    try:
        names = tuple(given)
    except TypeError:
        raise ConfigError(f"env_passthrough={given!r}: give a list of names, or a function") from None
    for name in names:
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"env_passthrough: {name!r} is not the name of a variable")
    return names


def _checked_switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: give True or False")
    return value


def _checked_variant(variant: Any) -> tuple[str, ...]:
    if not isinstance(variant, tuple | list) or not all(isinstance(part, str) for part in variant):
        raise ConfigError(f"variant={variant!r}: give a tuple of strings")
    return tuple(variant)


def _check_names(given: Mapping[str, Any], known: type, later: Mapping[str, Any]) -> None:
    names = list(known.__annotations__)
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(names)}"
            raise ConfigError(f"unknown option {name!r}: {hint}")
        # An equal value of another type is a mistake too: 0 is not False.
        if name in later and (type(value) is not type(later[name]) or value != later[name]):
            raise not_available(name, value)
