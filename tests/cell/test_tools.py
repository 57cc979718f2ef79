import functools
import inspect
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel import ConfigError, Owner
from hermes_kernel.cell.tools import HELPERS, NO_TOOLS, Tool, ToolCallContext, ToolDispatcher, ToolSet

CONTEXT = ToolCallContext(Owner("a"), "k", "c", 1, threading.Event())


def echo(x: Any) -> Any:
    """Give x back."""
    return x


def greet(name: str, /, *titles: str, greeting: str = "Hello", ctx: ToolCallContext, **rest: int) -> Any:
    return [greeting, *titles, name, rest, ctx.call_id]


SCHEMA = {
    "type": "object",
    "properties": {
        "limit": {"type": "integer", "default": 10},
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "where": {"type": ["string", "null"]},
        "odd-name": {"type": "string"},
    },
    "required": ["path"],
}


def call(tools: ToolSet, tool: str, *place: Any, **arguments: Any) -> Any:
    assert tools.tools[tool].refuse_arguments(arguments, place) is None
    return tools.call(tool, arguments, CONTEXT, place)


# -- what may be given ------------------------------------------------------------------------------------


class Remote:
    """A dispatcher."""

    def tools(self) -> list[Tool]:
        return [Tool("far", description="Far away.", parameters=SCHEMA), Tool("any")]

    def dispatch(self, name: str, arguments: dict[str, Any], context: ToolCallContext) -> Any:
        return name, arguments, context.origin


@pytest.mark.parametrize(
    "given",
    [[echo], (echo,), {"echo": echo}, [Tool("echo", echo)], {"echo": Tool("other", echo)}, iter([echo])],
    ids=["list", "tuple", "mapping", "Tool", "renamed Tool", "iterator"],
)
def test_every_form_of_tools_gives_the_same_tool(given: Any) -> None:
    tools = ToolSet.of(given)
    assert tools.names == {"echo"}
    assert call(tools, "echo", x=[1]) == [1]
    assert tools.catalogue[0]["description"] == "Give x back."


def test_a_dispatcher_serves_by_name() -> None:
    tools = ToolSet.of(Remote())
    assert isinstance(Remote(), ToolDispatcher)
    assert tools.names == {"far", "any"}
    assert call(tools, "any", whatever=1) == ("any", {"whatever": 1}, "execute_code")


def test_methods_builtins_partials_and_callable_objects_can_be_tools() -> None:
    class Shelf:
        def __init__(self) -> None:
            self.books = ["a"]

        def lend(self, index: int) -> str:
            return self.books[index]

        def __call__(self, n: int = 2) -> int:
            return n

    tools = ToolSet.of(
        [Shelf().lend, abs, Tool("two", functools.partial(echo, x=2)), Tool("n", Shelf()), Tool("d", dict)]
    )
    assert call(tools, "lend", index=0) == "a"
    assert call(tools, "two") == 2
    assert call(tools, "n") == 2
    assert call(tools, "abs", -1) == 1
    assert call(tools, "d", a=1) == {"a": 1}


def test_no_tools_at_all() -> None:
    for nothing in ((), [], {}):
        assert ToolSet.of(nothing).names == NO_TOOLS.names == frozenset()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (echo, "function; give a list"),
        ("echo", "str; give a list"),
        (None, "NoneType; give a list"),
        (3, "int; give a list"),
        ([3], "3, which cannot be called"),
        ([echo, echo], "two tools are named 'echo'"),
        ([lambda x: x], "'<lambda>' is no name for a tool"),
        ([functools.partial(echo, 1)], "has no name"),
        ({"a.b": echo}, "'a.b' is no name"),
        ({"class": echo}, "'class' is no name"),
        ({"": echo}, "'' is no name"),
        ({3: echo}, "3 is no name"),
        ({"__dir__": echo}, "of its own"),
        ([Tool("echo")], "'echo' has no handler"),
        *[({name: echo}, "of its own") for name in sorted(HELPERS)],
    ],
    ids=str,
)
def test_what_cannot_be_a_tool_is_refused_by_name_with_the_next_step(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="give") as refused:
        ToolSet.of(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"handler": 3},
        {"handler": echo, "description": 3},
        {"handler": echo, "parameters": []},
        {"handler": echo, "parameters": {"type": "array"}},
        {"handler": echo, "parameters": {"properties": []}},
        {"handler": echo, "parameters": {"required": ["x"]}},
        {"handler": echo, "parameters": {"required": 3}},
    ],
    ids=str,
)
def test_a_tool_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'t'"):
        Tool("t", **arguments)


def test_a_catalogue_that_is_too_large_to_travel_with_a_cell_is_refused() -> None:
    with pytest.raises(ConfigError, match="shorten"):
        ToolSet.of([Tool("echo", echo, description="x" * 5_000_000)])


# -- the catalogue ----------------------------------------------------------------------------------------


def parameters(tool: Tool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(tool.entry))["parameters"]
    return found


def test_a_signature_is_described_without_the_context() -> None:
    assert parameters(Tool("greet", greet)) == [
        {"name": "name", "kind": "POSITIONAL_ONLY", "annotation": "str"},
        {"name": "titles", "kind": "VAR_POSITIONAL", "annotation": "str"},
        {"name": "greeting", "kind": "KEYWORD_ONLY", "annotation": "str", "default": "Hello"},
        {"name": "rest", "kind": "VAR_KEYWORD", "annotation": "int"},
    ]


def test_a_schema_is_described_with_what_is_required_first() -> None:
    assert parameters(Tool("t", echo, parameters=SCHEMA)) == [
        {"name": "path", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "str"},
        {"name": "limit", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "int", "default": 10},
        {"name": "mode", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "Literal['r', 'w']", "default": None},
        {"name": "where", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "str | None", "default": None},
        {"name": "others", "kind": "VAR_KEYWORD"},
    ]


def test_a_default_that_is_no_json_is_shown_and_not_sent() -> None:
    def tool(when: Any = print, where: object = threading.Lock) -> None: ...

    shown = parameters(Tool("tool", tool))
    assert shown[0] == {
        "name": "when",
        "kind": "POSITIONAL_OR_KEYWORD",
        "annotation": "Any",
        "default_text": repr(print),
    }


def test_a_context_may_be_optional() -> None:
    def tool(x: int, ctx: ToolCallContext | None = None) -> Any:
        return x, ctx

    assert [parameter["name"] for parameter in parameters(Tool("tool", tool))] == ["x"]
    assert call(ToolSet.of([tool]), "tool", x=1) == (1, CONTEXT)


def test_an_annotation_that_cannot_be_looked_up_is_shown_as_it_is_written() -> None:
    def tool(x: "Missing", context: "hermes_kernel.ToolCallContext") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert parameters(Tool("tool", tool)) == [
        {"name": "x", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "Missing"}
    ]


def test_the_digest_tells_catalogues_apart_and_nothing_else() -> None:
    def same(x: Any) -> Any:
        """Give x back."""

    def other(x: Any, y: int = 1) -> Any: ...

    digest = ToolSet.of([echo]).digest
    assert ToolSet.of({"echo": same}).digest == digest
    assert ToolSet.of({"echo": other}).digest != digest
    assert ToolSet.of([echo, abs]).digest != digest


# -- calling ----------------------------------------------------------------------------------------------


def test_arguments_reach_the_handler_by_place_and_by_name() -> None:
    tools = ToolSet.of([greet])
    greeted = call(tools, "greet", "Ann", "Dr", "Prof", greeting="Hi", extra=1)
    assert greeted == ["Hi", "Dr", "Prof", "Ann", {"extra": 1}, 1]
    assert call(tools, "greet", "Bo", name=1) == ["Hello", "Bo", {"name": 1}, 1]


def test_the_context_reaches_a_parameter_before_others_too() -> None:
    def tool(ctx: ToolCallContext, first: int, *rest: int) -> Any:
        return ctx.kernel_id, first, rest

    tools = ToolSet.of([tool])
    assert call(tools, "tool", 1, 2, 3) == ("k", 1, (2, 3))
    assert call(tools, "tool", first=1) == ("k", 1, ())
    assert tools.tools["tool"].refuse_arguments({"first": 1, "ctx": 2}) is not None


@pytest.mark.parametrize(
    ("place", "arguments", "words"),
    [
        ((), {}, "greet() missing a required argument: 'name'"),
        ((), {"any": 1}, "greet() missing a required argument: 'name'"),
        ((1,), {}, None),
        ((1, 2, 3), {"any": 2}, None),
    ],
    ids=str,
)
def test_missing_names_are_noticed(place: Any, arguments: dict[str, Any], words: str | None) -> None:
    assert Tool("greet", greet).refuse_arguments(arguments, place) == words


def test_what_a_schema_describes_is_given_by_name() -> None:
    tool = Tool("t", echo, parameters=SCHEMA)
    assert tool.refuse_arguments({"path": 1, "odd-name": 2}) is None
    assert tool.refuse_arguments({}) == "t() misses path"
    assert tool.refuse_arguments({"path": 1}, [1]) == "t() takes its arguments by name"
    closed = Tool("t", echo, parameters={"properties": {"path": {}}})
    assert closed.refuse_arguments({"y": 1}) == "t() takes no 'y'"


def test_unknown_names_are_noticed_and_not_repeated_at_length() -> None:
    wrong = Tool("echo", echo).refuse_arguments({"x": 1, "y" * 10_000: 2})
    assert wrong is not None
    assert "unexpected keyword argument" in wrong
    assert len(wrong) < 300


def test_the_handler_of_a_schema_is_called_by_name() -> None:
    def tool(**given: Any) -> Any:
        return given

    tools = ToolSet.of([Tool("tool", tool, parameters=SCHEMA)])
    assert call(tools, "tool", **{"path": "p", "odd-name": 1}) == {"path": "p", "odd-name": 1}


def test_an_async_handler_gives_what_can_be_awaited() -> None:
    async def tool() -> int:
        return 1

    awaitable = call(ToolSet.of([tool]), "tool")
    assert inspect.isawaitable(awaitable)
    awaitable.close()  # type: ignore[attr-defined]


def test_a_handler_without_a_signature_takes_names() -> None:
    class Strange:
        def __call__(self, **given: Any) -> Any:
            return given

        @property
        def __signature__(self) -> Any:
            raise ValueError("none")

    handler: Callable[..., Any] = Strange()
    tools = ToolSet.of({"strange": handler})
    assert call(tools, "strange", a=1) == {"a": 1}
