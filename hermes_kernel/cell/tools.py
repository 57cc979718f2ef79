"""The tools that a cell may call: what they are named, what they take, and how they are run."""

import hashlib
import inspect
import json
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, get_args, runtime_checkable

from ..errors import ConfigError
from ..lifecycle.key import Owner
from ..wire import MAX_FRAME, check_json

ORIGIN = "execute_code"
HELPERS = frozenset({"aio", "json_parse", "shell_quote", "retry", "ToolError", "ToolBudgetExceeded"})
"""What ``hermes_tools`` has besides the tools."""

_HANDED_OUT = MAX_FRAME // 4  # bytes of a catalogue's JSON: it travels with a cell
_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_REST = inspect.Parameter.VAR_POSITIONAL
_NAMED_REST = inspect.Parameter.VAR_KEYWORD


class Cancelled(Protocol):
    """The part of ``threading.Event`` that a handler needs."""

    def is_set(self) -> bool:
        """Whether the cell is over; what the handler returns is dropped then."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most *timeout* seconds for it."""


@dataclass(frozen=True)
class ToolCallContext:
    """Who calls, for a handler that has a parameter annotated with this class.

    ``cancelled`` is set when the cell has ended before the handler.
    """

    owner: Owner | None
    kernel_id: str
    cell_id: str
    call_id: int
    cancelled: Cancelled
    origin: str = ORIGIN


@dataclass(frozen=True, eq=False)
class Tool:
    """One tool: a name that cells call, and what serves the calls.

    ``description`` becomes the docstring (default: the handler's own). ``parameters`` is a JSON schema of
    an object; without one the handler's signature says what the tool takes. A handler may be ``async``.
    ``handler`` may be left out for a tool of a dispatcher. ``returns_errors``: in the cell a call that fails
    or is refused returns ``{"error": text}`` and raises nothing. Raises ConfigError for a name that no cell
    could call, or a schema that is none.
    """

    name: str
    handler: Callable[..., Any] | None = None
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    returns_errors: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.handler is not None and not callable(self.handler):
            raise ConfigError(f"tool {self.name!r}: its handler {self.handler!r} cannot be called")
        if not isinstance(self.description, str):
            raise ConfigError(f"tool {self.name!r}: description is a {type(self.description).__name__}")
        if self.parameters is not None:
            _check_schema(self.name, self.parameters)

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The tool as the catalogue has it: name, description and parameters, all of it JSON."""
        description = self.description or (inspect.getdoc(self.handler) if self.handler else None) or ""
        entry: dict[str, Any] = {
            "name": self.name,
            "description": description,
            "parameters": self._parameters,
        }
        if self.returns_errors:
            entry["returns_errors"] = True
        if self._own_signature is not None:
            returned = self._own_signature.return_annotation
            if returned is not inspect.Signature.empty:
                entry["returns"] = _annotation_text(returned)
        return entry

    @cached_property
    def _signature(self) -> inspect.Signature | None:
        """The handler's own signature, with its annotations looked up; None if it has none."""
        if self.handler is None:
            return None
        try:
            return inspect.signature(self.handler, eval_str=True)
        except (NameError, SyntaxError, AttributeError, TypeError):
            pass  # an annotation that cannot be looked up: it is shown as it is written
        except ValueError:  # a builtin without a signature
            return None
        try:
            return inspect.signature(self.handler)
        except (ValueError, TypeError):
            return None

    @property
    def wants_context(self) -> bool:
        """Whether the handler has a parameter for the ToolCallContext."""
        return self._context_parameter is not None

    @cached_property
    def _context_parameter(self) -> str | None:
        for parameter in () if self._signature is None else self._signature.parameters.values():
            if _is_context(parameter.annotation):
                return parameter.name
        return None

    @cached_property
    def _parameters(self) -> list[dict[str, Any]]:
        if self.parameters is not None:
            return _of_schema(self.parameters)
        if self._signature is None:
            return [{"name": "arguments", "kind": _NAMED_REST.name}]
        own = self._own_signature
        return [] if own is None else [_of_parameter(parameter) for parameter in own.parameters.values()]

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return {parameter["name"]: parameter["kind"] for parameter in self._parameters}

    @cached_property
    def _takes_others(self) -> bool:
        return _NAMED_REST.name in self._kinds.values()

    @cached_property
    def _required(self) -> frozenset[str]:
        optional = (_REST.name, _NAMED_REST.name)
        return frozenset(
            p["name"]
            for p in self._parameters
            if p["kind"] not in optional and "default" not in p and "default_text" not in p
        )

    def refuse_arguments(self, arguments: Mapping[str, Any], place: Sequence[Any] = ()) -> str | None:
        """Say what is wrong with the names and the number of a call's arguments, None if nothing is."""
        names = arguments.keys()
        if not place and self._required <= names and (self._takes_others or names <= self._kinds.keys()):
            return None
        if self._own_signature is not None:
            try:
                self._own_signature.bind(*place, **arguments)
            except TypeError as error:
                return f"{self.name}() {str(error)[:200]}"
            return None
        if missing := self._required - names:
            return f"{self.name}() misses {', '.join(sorted(missing))}"
        if place:
            return f"{self.name}() takes its arguments by name"
        return f"{self.name}() takes no {', '.join(sorted(names - self._kinds.keys()))[:100]!r}"

    def call(
        self, arguments: dict[str, Any], context: ToolCallContext | None, place: Sequence[Any] = ()
    ) -> Any:
        """Run the handler and return what it returns, an awaitable if it is ``async``."""
        if self.handler is None:
            raise ConfigError(f"tool {self.name!r} has no handler; give Tool(..., handler=...)")
        if self._context_parameter is None:
            return self.handler(*place, **arguments)
        given = list(place)
        if self._context_place is not None and self._context_place <= len(given):
            given.insert(self._context_place, context)
            return self.handler(*given, **arguments)
        return self.handler(*given, **{**arguments, self._context_parameter: context})

    @cached_property
    def _own_signature(self) -> inspect.Signature | None:
        """What a cell sees of the handler's signature; None where a schema says what the tool takes."""
        if self.parameters is not None or self._signature is None:
            return None
        taken = [p for p in self._signature.parameters.values() if p.name != self._context_parameter]
        return self._signature.replace(parameters=taken)

    @cached_property
    def _context_place(self) -> int | None:
        """Where the context stands among what can be given by its place, None if it cannot."""
        parameters = () if self._signature is None else self._signature.parameters.values()
        by_place = [
            p.name for p in parameters if p.kind in (_POSITIONAL, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ]
        name = self._context_parameter
        return by_place.index(name) if name in by_place else None


@runtime_checkable
class ToolDispatcher(Protocol):
    """Serves many tools by their names."""

    def tools(self) -> Iterable[Tool]:
        """Return the tools that there are; their handlers are not used."""

    def dispatch(self, name: str, arguments: dict[str, Any], context: ToolCallContext) -> Any:
        """Serve one call and return its result, or an awaitable of it."""


@dataclass(frozen=True, eq=False)
class ToolSet:
    """The tools of a cell, and their catalogue as the kernel needs it."""

    tools: Mapping[str, Tool]
    dispatcher: ToolDispatcher | None = None

    @classmethod
    def of(cls, given: object) -> "ToolSet":
        """Take what a caller gives as ``tools``; raises ConfigError for what cannot be one.

        Callables and Tools in a sequence, a mapping of names to callables or Tools, or a ToolDispatcher.
        """
        if isinstance(given, ToolDispatcher) and not isinstance(given, Mapping):
            return cls._named(list(given.tools()), given)
        if isinstance(given, Mapping):
            return cls._named([_tool(value, name) for name, value in given.items()])
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(
                f"tools is a {type(given).__name__}; give a list of functions and Tools, a mapping of names "
                "to functions, or an object with tools() and dispatch()"
            )
        return cls._named([_tool(value) for value in given])

    @classmethod
    def _named(cls, tools: Sequence[object], dispatcher: ToolDispatcher | None = None) -> "ToolSet":
        named: dict[str, Tool] = {}
        for tool in tools:
            if not isinstance(tool, Tool):
                raise ConfigError(f"a dispatcher's tools() gave a {type(tool).__name__}; give Tool objects")
            if tool.name in named:
                raise ConfigError(f"two tools are named {tool.name!r}; give each its own name")
            if dispatcher is None and tool.handler is None:
                raise ConfigError(f"tool {tool.name!r} has no handler; give Tool(..., handler=...)")
            named[tool.name] = tool
        tool_set = cls(named, dispatcher)
        if len(tool_set._json) > _HANDED_OUT:
            raise ConfigError(f"the tools' descriptions have {len(tool_set._json)} bytes; shorten them")
        return tool_set

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(self.tools)

    @cached_property
    def catalogue(self) -> list[dict[str, Any]]:
        """What the kernel makes its functions of."""
        return [tool.entry for tool in self.tools.values()]

    @cached_property
    def digest(self) -> str:
        """Tells this catalogue from others."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    @cached_property
    def _json(self) -> str:
        return json.dumps(self.catalogue)

    def wants_context(self, name: str) -> bool:
        """Whether a call of this tool is to be given its context."""
        return self.dispatcher is not None or self.tools[name].wants_context

    def call(
        self,
        name: str,
        arguments: dict[str, Any],
        context: ToolCallContext | None,
        place: Sequence[Any] = (),
    ) -> Any:
        """Serve one call; the result may be awaitable. *context* may be None where it is not wanted."""
        if self.dispatcher is not None and context is not None:
            return self.dispatcher.dispatch(name, arguments, context)
        return self.tools[name].call(arguments, context, place)


NO_TOOLS = ToolSet({})


def _tool(value: object, name: object = None) -> Tool:
    if isinstance(value, Tool):
        return value if name is None or name == value.name else replace(value, name=name)  # type: ignore[arg-type]
    if not callable(value):
        raise ConfigError(f"tools holds {value!r}, which cannot be called; give functions or Tool objects")
    if name is None:
        name = getattr(value, "__name__", None)
        if name is None:
            raise ConfigError(f"the tool {value!r} has no name; give Tool('its_name', handler)")
    return Tool(name, value)  # type: ignore[arg-type]


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name for a tool; give a Python identifier: Tool('its_name', ...)")
    if name in HELPERS or (name.startswith("__") and name.endswith("__")):
        raise ConfigError(f"hermes_tools has a {name!r} of its own; give the tool another name")


def _check_schema(name: str, schema: object) -> None:
    problem = None
    if not isinstance(schema, Mapping):
        problem = f"is a {type(schema).__name__}"
    elif not isinstance(schema.get("properties", {}), Mapping):
        problem = "has properties that are no mapping"
    elif schema.get("type", "object") != "object":
        problem = f"describes a {schema['type']!r}"
    elif not isinstance(schema.get("required") or [], list | tuple):
        problem = "has a required that is no list"
    elif not all(name in schema.get("properties", {}) for name in schema.get("required") or []):
        problem = "requires what it does not describe"
    if problem is not None:
        raise ConfigError(f"parameters of tool {name!r} {problem}; give the JSON schema of an object")


def _of_parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.annotation is not parameter.empty:
        entry["annotation"] = _annotation_text(parameter.annotation)
    if parameter.default is not parameter.empty:
        _add_default(entry, parameter.default)
    return entry


def _is_context(annotation: Any) -> bool:
    """Whether a parameter is for the ToolCallContext, or for one or None."""
    if isinstance(annotation, str):
        return annotation.removesuffix(" | None").split(".")[-1] == ToolCallContext.__name__
    return annotation is ToolCallContext or ToolCallContext in get_args(annotation)


def _annotation_text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _of_schema(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    required = list(dict.fromkeys(schema.get("required") or ()))
    properties = schema.get("properties", {})
    ordered = [*required, *(name for name in properties if name not in required)]
    entries = []
    all_named = True
    for name in ordered:
        if not name.isidentifier() or keyword.iskeyword(name):
            all_named = False  # such a name can be given with ** only
            continue
        described = properties[name] if isinstance(properties[name], Mapping) else {}
        entry: dict[str, Any] = {"name": name, "kind": inspect.Parameter.POSITIONAL_OR_KEYWORD.name}
        if (annotation := _annotation_of(described)) is not None:
            entry["annotation"] = annotation
        if name not in required:
            _add_default(entry, described.get("default"))
        entries.append(entry)
    if not all_named or schema.get("additionalProperties"):
        others = "others"
        while others in properties:
            others += "_"
        entries.append({"name": others, "kind": _NAMED_REST.name})
    return entries


def _annotation_of(described: Mapping[str, Any]) -> str | None:
    if isinstance(described.get("enum"), list):
        return f"Literal[{', '.join(map(repr, described['enum']))}]"
    kinds = described.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return " | ".join(_TYPES.get(kind, "Any") for kind in names if isinstance(kind, str)) or None


def _add_default(entry: dict[str, Any], default: object) -> None:
    try:
        check_json(default, "default")
    except TypeError:
        entry["default_text"] = repr(default)[:100]
    else:
        entry["default"] = default
