import asyncio
import inspect
import json
import pydoc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hermes_kernel.cell.tools import Tool, ToolSet
from hermes_kernel.errors import ToolBudgetExceeded, ToolError
from hermes_kernel.kernel import tools as module
from hermes_kernel.kernel.tools import HermesTools

Sent = list[tuple[str, dict[str, Any], tuple[Any, ...]]]


def greet(name: str, /, *titles: str, greeting: str = "Hello", when: Any = print, **rest: int) -> str:
    """Greet somebody."""
    raise NotImplementedError


def echo(x: Any) -> Any: ...


class Client:
    """Notes what would be sent."""

    def __init__(self) -> None:
        self.sent: Sent = []

    def call(self, name: str, arguments: dict[str, Any], place: tuple[Any, ...]) -> Any:
        self.sent.append((name, arguments, place))
        return arguments

    async def acall(self, name: str, arguments: dict[str, Any], place: tuple[Any, ...]) -> Any:
        return self.call(name, arguments, place)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def tools(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[HermesTools]:
    monkeypatch.setattr(module, "ToolClient", lambda: client)
    yield HermesTools()
    for name in (module.NAME, f"{module.NAME}.aio"):
        sys.modules.pop(name, None)


def given(*handlers: Any, token: str = "t", with_catalogue: bool = True) -> dict[str, Any]:
    tool_set = ToolSet.of(handlers)
    request = {"token": token, "endpoint": {}, "digest": tool_set.digest}
    if with_catalogue:
        request["catalogue"] = tool_set.catalogue
    loaded: dict[str, Any] = json.loads(json.dumps(request))
    return loaded


def test_a_function_has_the_signature_and_the_words_of_its_tool(tools: HermesTools) -> None:
    cell = tools.enter(given(greet), {})
    assert cell is not None
    assert cell.token == "t"
    import hermes_tools  # type: ignore[import-not-found]

    shown = str(inspect.signature(hermes_tools.greet))
    assert (
        shown
        == f"(name: str, /, *titles: str, greeting: str = 'Hello', when: Any = {print!r}, **rest: int) -> str"
    )
    assert hermes_tools.greet.__name__ == "greet"
    assert hermes_tools.greet.__module__ == "hermes_tools"
    assert "Greet somebody." in pydoc.render_doc(hermes_tools.greet)
    assert "greet(name: str" in hermes_tools.__doc__
    assert inspect.iscoroutinefunction(hermes_tools.aio.greet)


def test_only_what_is_given_is_sent_by_name(tools: HermesTools, client: Client) -> None:
    tools.enter(given(greet), {})
    greet_ = tools.module.greet
    greet_("Ann")
    greet_("Ann", "Dr", greeting="Hi", extra=1)
    asyncio.run(tools.module.aio.greet("Bo"))
    assert client.sent == [
        ("greet", {}, ("Ann",)),
        ("greet", {"greeting": "Hi", "extra": 1}, ("Ann", "Dr")),
        ("greet", {}, ("Bo",)),
    ]


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "echo() missing a required argument: 'x'"),
        ((1, 2), {}, "echo() too many positional arguments"),
        ((1,), {"y": 2}, "echo() got an unexpected keyword argument 'y'"),
        (({1},), {}, "echo(): x is of type set"),
        (({"a": [float("nan")]},), {}, "echo(): x['a'][0] is nan"),
    ],
    ids=str,
)
def test_what_is_wrong_with_arguments_is_said_and_nothing_sent(
    tools: HermesTools, client: Client, args: Any, kwargs: Any, words: str
) -> None:
    tools.enter(given(echo), {})
    with pytest.raises(TypeError) as refused:
        tools.module.echo(*args, **kwargs)
    with pytest.raises(TypeError):
        asyncio.run(tools.module.aio.echo(*args, **kwargs))
    assert words in str(refused.value)
    assert client.sent == []


def test_the_module_shows_the_tools_of_the_cell_that_runs(tools: HermesTools) -> None:
    tools.enter(given(echo, greet), {})
    assert {"echo", "greet", "retry", "ToolError"} <= set(tools.module.__all__)
    assert {"echo", "greet", "aio"} <= set(dir(tools.module))
    first = tools.module.echo
    tools.enter(given(greet), {})
    assert "echo" not in dir(tools.module)
    with pytest.raises(AttributeError, match="no tool 'echo'; this cell has greet"):
        tools.module.echo  # noqa: B018
    tools.enter(None, {})
    with pytest.raises(AttributeError, match="this cell has none"):
        tools.module.greet  # noqa: B018
    assert "no tools" in str(tools.module.__doc__)
    assert first(1) == {"x": 1}  # it is the host that refuses


def test_a_catalogue_is_sent_once_and_kept(tools: HermesTools) -> None:
    tools.enter(given(echo), {})
    function = tools.module.echo
    tools.enter(None, {})
    tools.enter(given(echo, with_catalogue=False), {})
    assert tools.module.echo is function


def test_the_module_is_put_back_but_never_over_a_users_name(tools: HermesTools) -> None:
    namespace: dict[str, Any] = {}
    tools.enter(given(echo), namespace)
    assert namespace["hermes_tools"] is tools.module
    namespace["hermes_tools"] = 5
    del sys.modules["hermes_tools"]
    tools.module.echo = None  # type: ignore[attr-defined]
    tools.module.mine = 1  # type: ignore[attr-defined]
    tools.enter(given(echo, with_catalogue=False), namespace)
    assert namespace["hermes_tools"] == 5
    assert sys.modules["hermes_tools"] is tools.module
    assert callable(tools.module.echo)
    assert not hasattr(tools.module, "mine")
    namespace.clear()
    tools.enter(None, namespace)
    assert namespace["hermes_tools"] is tools.module


def test_a_schema_with_odd_names_takes_them_as_others(tools: HermesTools, client: Client) -> None:
    schema = {"properties": {"odd-name": {}, "x": {"type": "integer"}}, "required": ["x"]}
    tools.enter(given(Tool("t", echo, parameters=schema)), {})
    tools.module.t(1, **{"odd-name": 2})
    assert client.sent == [("t", {"x": 1, "odd-name": 2}, ())]


def test_the_helpers() -> None:
    assert module.json_parse('\ufeff{"a": "b\tc"}') == {"a": "b\tc"}
    assert module.shell_quote("it's") == "'it'\"'\"'s'"
    assert module.shell_quote(3) == "3"


def test_retry_waits_longer_each_time_and_gives_up_with_the_last_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    tries = iter([ToolError("1"), ToolError("2"), ToolError("3"), 4])

    def work() -> Any:
        found = next(tries)
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.raises(ToolError, match="3"):
        module.retry(work)
    assert waited == [2, 4]
    assert module.retry(work) == 4


def test_a_spent_budget_is_not_tried_again() -> None:
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        raise ToolBudgetExceeded("spent")

    with pytest.raises(ToolBudgetExceeded):
        module.retry(work, max_attempts=5, delay=0)
    assert tries == [1]
