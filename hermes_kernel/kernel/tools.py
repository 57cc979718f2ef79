"""The module ``hermes_tools``: the agent's tools as functions of the cell."""

import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..errors import ToolBudgetExceeded, ToolError
from ..wire import check_json
from .bridge import ToolClient
from .context import Cell

NAME = "hermes_tools"
AIO = f"{NAME}.aio"
_BY_PLACE = inspect.Parameter.POSITIONAL_ONLY
_REST = inspect.Parameter.VAR_POSITIONAL
_NAMED_REST = inspect.Parameter.VAR_KEYWORD
_ANY_WAY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def json_parse(text: str) -> Any:
    """Read JSON as tools write it: control characters in strings and a byte order mark do not matter."""
    return json.loads(text.removeprefix("\ufeff"), strict=False)


def shell_quote(text: object) -> str:
    """Return *text* so that a POSIX shell takes it as one word."""
    return shlex.quote(str(text))


def retry(function: Callable[[], Any], max_attempts: int = 3, delay: float = 2) -> Any:
    """Call *function* until it returns, *max_attempts* times at most; wait *delay* seconds, then twice that…

    The last exception is passed on. A spent budget is not tried again.
    """
    attempt = 1
    while True:
        try:
            return function()
        except Exception as error:  # whatever fails, that is what it is for
            if attempt >= max_attempts or isinstance(error, ToolBudgetExceeded):
                raise
        time.sleep(delay * 2 ** (attempt - 1))
        attempt += 1


_HELPERS = {
    "json_parse": json_parse,
    "shell_quote": shell_quote,
    "retry": retry,
    "ToolError": ToolError,
    "ToolBudgetExceeded": ToolBudgetExceeded,
}
for _helper in (json_parse, shell_quote, retry):
    _helper.__module__ = NAME


class _ToolsModule(ModuleType):
    """A module whose functions are the tools of the cell that runs."""

    def __getattr__(self, name: str) -> Any:
        names = [known for known in self.__dict__.get("__all__", ()) if known not in _HELPERS]
        has = f"this cell has {', '.join(names)}" if names else "this cell has none"
        raise AttributeError(f"module {NAME!r} has no tool {name!r}; {has}")

    def __dir__(self) -> list[str]:
        return sorted(
            {*self.__dict__.get("__all__", ()), *({"aio", "__doc__", "__name__"} & self.__dict__.keys())}
        )


class HermesTools:
    """What a kernel knows of tools: the module, the client, and which cell may use them."""

    def __init__(self) -> None:
        self.client = ToolClient()
        self.module = _ToolsModule(NAME)
        self._aio = _ToolsModule(AIO)
        self._digest = ""
        self._known: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._install(({}, {}))

    def enter(self, given: object, namespace: dict[str, Any]) -> Cell | None:
        """Make ready for a cell of the owner's; *given* is what its request carries, None for no tools.

        The module is put back where a cell has lost it, never over a name of the user's.
        """
        cell = None
        functions: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        if isinstance(given, Mapping):
            cell = Cell(str(given["token"]), given["endpoint"])
            if "catalogue" in given and given["digest"] != self._digest:
                self._known = self._functions(given["catalogue"])
                self._digest = given["digest"]
            if given["digest"] == self._digest:
                functions = self._known
        self._install(functions)
        namespace.setdefault(NAME, self.module)
        return cell

    def _functions(self, catalogue: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        plain, awaitable = {}, {}
        for entry in catalogue:
            tool = _Tool(self.client, entry)
            plain[tool.name], awaitable[tool.name] = tool.function(), tool.coroutine_function()
        return plain, awaitable

    def _install(self, functions: tuple[dict[str, Any], dict[str, Any]]) -> None:
        plain, awaitable = functions
        _fill(self.module, NAME, {**plain, **_HELPERS, "aio": self._aio}, _document(plain))
        _fill(self._aio, AIO, awaitable, "The tools as coroutine functions: ``await aio.name(...)``.")
        sys.modules[NAME], sys.modules[AIO] = self.module, self._aio


class _Tool:
    """One entry of the catalogue, as functions."""

    def __init__(self, client: ToolClient, entry: Mapping[str, Any]) -> None:
        self.name = str(entry["name"])
        self._client = client
        self._doc = str(entry["description"])
        self._returns_errors = bool(entry.get("returns_errors"))
        returned = _Text(entry["returns"]) if "returns" in entry else inspect.Signature.empty
        self._signature = inspect.Signature(
            [_parameter(described) for described in entry["parameters"]], return_annotation=returned
        )
        parameters = self._signature.parameters.values()
        self._places = tuple(p.name for p in parameters if p.kind is _ANY_WAY)
        # Where every parameter can be given by its name, most calls need no more than this to be bound.
        self._is_simple = all(p.kind in (_ANY_WAY, _BY_NAME) for p in parameters)
        self._needs_place = any(p.kind in (_BY_PLACE, _REST) for p in parameters)
        self._named_rest = next((p.name for p in parameters if p.kind is _NAMED_REST), "")
        self._names = frozenset(p.name for p in parameters)
        self._required = frozenset(p.name for p in parameters if p.default is p.empty)

    def function(self) -> Callable[..., Any]:
        """Return the function that calls the tool."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._client.call(self.name, *self._arguments(args, kwargs))

        def call_for_dict(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except ToolError as error:
                return {"error": str(error)}

        return self._dressed(call_for_dict if self._returns_errors else call, NAME)

    def coroutine_function(self) -> Callable[..., Any]:
        """Return the coroutine function that calls the tool."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._client.acall(self.name, *self._arguments(args, kwargs))

        async def call_for_dict(*args: Any, **kwargs: Any) -> Any:
            try:
                return await call(*args, **kwargs)
            except ToolError as error:
                return {"error": str(error)}

        return self._dressed(call_for_dict if self._returns_errors else call, AIO)

    def _dressed(self, call: Any, module: str) -> Callable[..., Any]:
        call.__name__ = call.__qualname__ = self.name
        call.__module__ = module
        call.__doc__ = self._doc
        call.__signature__ = self._signature
        parameters = self._signature.parameters.values()
        call.__annotations__ = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
        if self._signature.return_annotation is not inspect.Signature.empty:
            call.__annotations__["return"] = self._signature.return_annotation
        dressed: Callable[..., Any] = call
        return dressed

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Bind and check what is given: by name, and by place what has no other way.

        Raises TypeError that names what is wrong; nothing was sent then.
        """
        named = self._by_name(args, kwargs)
        if named is not None:
            self._check(named)
            return named, ()
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}() {error}") from None
        self._check(bound.arguments)
        if self._needs_place:
            return bound.kwargs, bound.args
        others = bound.arguments.pop(self._named_rest, {})
        return {**bound.arguments, **others}, ()

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Bind a call of the simple kind, None for any other and for one that is wrong."""
        if not self._is_simple or len(args) > len(self._places):
            return None
        named = {**dict(zip(self._places, args)), **kwargs}  # noqa: B905  # strict is slower
        names = named.keys()
        is_right = len(named) == len(args) + len(kwargs) and self._required <= names <= self._names
        return named if is_right else None

    def _check(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if type(value) is not str:
                check_json(value, f"{self.name}(): {name}")


class _Text(str):
    """An annotation or a default that is shown as it stands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _parameter(described: Mapping[str, Any]) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if "default" in described:
        default = described["default"]
    elif "default_text" in described:
        default = _Text(described["default_text"])
    annotation: Any = inspect.Parameter.empty
    if "annotation" in described:
        annotation = _Text(described["annotation"])
    kind = getattr(inspect.Parameter, described["kind"])
    return inspect.Parameter(described["name"], kind, default=default, annotation=annotation)


def _fill(module: ModuleType, name: str, members: dict[str, Any], doc: str) -> None:
    """Make the module hold just these."""
    listed = [name for name in members if name != "aio"]
    wanted = {"__name__": name, "__package__": NAME, "__doc__": doc, "__all__": listed, **members}
    for other in module.__dict__.keys() - wanted.keys():
        if not (other.startswith("__") and other.endswith("__")):
            del module.__dict__[other]
    module.__dict__.update(wanted)


def _document(functions: Mapping[str, Callable[..., Any]]) -> str:
    """The docstring of the module: what can be called."""
    lines = [f"    {name}{inspect.signature(function)}" for name, function in functions.items()]
    tools = (
        "\n".join(["The tools that this cell may call:", "", *lines]) if lines else "This cell has no tools."
    )
    return f"{tools}\n\nA call that fails raises ToolError. ``aio`` has the tools as coroutine functions."
