"""A plain agent in the place of hermes-agent: its sessions, its tools, its configuration."""

import contextvars
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hermes_kernel import Limits, Owner, ToolCallContext
from hermes_kernel.integrations import hermes_agent
from hermes_kernel.integrations.hermes_agent import Host

from ..conftest import START_METHOD

SESSION = contextvars.ContextVar("session", default="")
CHILD = contextvars.ContextVar[str | None]("child", default=None)
PROFILE = contextvars.ContextVar("profile", default="")
PROMPT = threading.local()  # .answer: what asks the user, of one thread, as terminals have it

TOOLS = frozenset({"read_file", "write_file", "terminal", "echo", "gate"})
STUBS = '''
import json

def _call(name, args):
    raise RuntimeError("a stub is never run")

def read_file(path: str, offset: int = 1, limit: int = 500):
    """Read lines of a file."""
    return _call("read_file", {"path": path})

def terminal(command: str, timeout: int = None, workdir: str = None):
    """Run a command."""
    return _call("terminal", {"command": command})

def echo(value: "Any" = None):
    """Give it back."""
    return _call("echo", {"value": value})
'''


class Agent:
    """What an agent has, and what became of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.seen: list[dict[str, Any]] = []
        self.reached = threading.Semaphore(0)
        self.opened = threading.Semaphore(0)
        self.limits = Limits()
        self.config: dict[str, Any] = {"mode": "strict", "timeout": 30}
        self.files: dict[str, str] = {}

    def host(self, **other: Any) -> Host:
        services: dict[str, Any] = {
            "dispatch": self.dispatch,
            "resolve_owner": self.resolve_owner,
            "scope": PROFILE.get,
            "limits": self._limits,
            "tool_stubs": lambda names: STUBS,
            "config": lambda: self.config,
            "script_tools": TOOLS,
        }
        return Host(**{**services, **other})

    def _limits(self) -> Limits:
        if START_METHOD and self.limits.start_method == "auto":
            return Limits(**{**vars(self.limits), "start_method": START_METHOD})
        return self.limits

    def resolve_owner(self, task_id: str) -> Owner:
        return Owner(SESSION.get() or task_id, child=CHILD.get())

    def dispatch(self, name: str, arguments: dict[str, Any], *, task_id: str, cell: ToolCallContext) -> Any:
        self.calls.append((name, arguments))
        self.seen.append(
            {
                "task": task_id,
                "session": SESSION.get(),
                "origin": cell.origin,
                "prompt": getattr(PROMPT, "answer", None),
            }
        )
        match name:
            case "read_file" if arguments["path"] in self.files:
                return json.dumps({"content": self.files[arguments["path"]], "total_lines": 1})
            case "read_file":
                return json.dumps({"error": f"no such file: {arguments['path']}"})
            case "write_file":
                raise PermissionError(f"{arguments['path']} is protected")
            case "gate":
                self.reached.release()
                assert self.opened.acquire(timeout=60)
                return {"opened": True}
        return json.dumps(arguments)


@contextmanager
def bound(variable: "contextvars.ContextVar[Any]", value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def session(name: str, child: str | None = None, profile: str = "") -> Iterator[None]:
    """The block is a turn of this session's."""
    with bound(SESSION, name), bound(CHILD, child), bound(PROFILE, profile):
        yield


def execute_text(code: Any, **options: Any) -> str:
    """Run code as the agent's own entry point does, and return the JSON."""
    arguments: dict[str, Any] = {
        "task_id": "task",
        "mode": "strict",
        "child_python": "",
        "child_cwd": "",
        "sandbox_tools": TOOLS,
        "timeout": 30,
        "max_tool_calls": 50,
        "reset": False,
        "is_interrupted": lambda: False,
        **options,
    }
    return hermes_agent.execute_in_session_kernel(code, **arguments)


def execute(code: str, **options: Any) -> dict[str, Any]:
    """Run code in the same way, and read the JSON."""
    result: dict[str, Any] = json.loads(execute_text(code, **options))
    return result


def in_session(name: str, code: str, child: str | None = None, **options: Any) -> dict[str, Any]:
    """Run code in a turn of a session's."""
    with session(name, child):
        return execute(code, **options)


def owners() -> set[tuple[str, str | None]]:
    """Whose kernels there are."""
    return {(info.owner.session, info.owner.child) for info in hermes_agent.session_kernels()}


Make = Callable[..., Agent]
