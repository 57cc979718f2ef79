"""Drives the backend with the real modules of hermes-agent, in an environment that has them.

Arguments: the agent's home, a directory to work in. The answer is one JSON object on the last line.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model_tools
from gateway.session_context import clear_session_vars, set_session_vars
from tools.approval import (
    register_gateway_notify,
    reset_current_session_key,
    reset_hermes_interactive_context,
    resolve_gateway_approval,
    set_current_session_key,
    set_hermes_interactive_context,
    unregister_gateway_notify,
)
from tools.code_execution_tool import SANDBOX_ALLOWED_TOOLS
from tools.env_passthrough import register_env_passthrough
from tools.interrupt import is_interrupted, set_interrupt
from tools.terminal_tool import set_approval_callback

from hermes_kernel.integrations import hermes_agent

WORK = Path(sys.argv[2])
TOKEN = "ghp_" + "a1B2c3D4e5" * 4
DOOMED = WORK / "doomed"
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "hermes-agent.md"


def execute(code: str, **options: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "task_id": "task",
        "mode": "project",
        "child_python": sys.executable,
        "child_cwd": str(WORK),
        "sandbox_tools": SANDBOX_ALLOWED_TOOLS,
        "timeout": 60,
        "max_tool_calls": 50,
        "reset": False,
        "is_interrupted": lambda: False,
        **options,
    }
    result: dict[str, Any] = json.loads(hermes_agent.execute_in_session_kernel(code, **arguments))
    return result


@contextmanager
def session(key: str) -> Iterator[None]:
    token = set_current_session_key(key)
    try:
        yield
    finally:
        reset_current_session_key(token)


def tools() -> Any:
    """Real calls of real tools, their signatures, their errors."""
    return execute("""
import inspect, json, os
from hermes_tools import patch, read_file, search_files, terminal, write_file
said = {'signature': str(inspect.signature(read_file)), 'documented': bool(read_file.__doc__)}
said['write'] = write_file('notes.txt', 'alpha\\nbeta\\ngamma\\n')
said['read'] = read_file('notes.txt', 2, 1)
said['patch'] = patch('notes.txt', 'beta', 'delta')
said['found'] = search_files('delta', path=os.getcwd())
said['shell'] = terminal('cat notes.txt; exit 3')
said['missing'] = read_file('no-such-file.txt')
print(json.dumps(said))
""")


def budget() -> Any:
    """Two calls of three."""
    code = "from hermes_tools import terminal\nfor n in range(3): print(terminal(f'echo {n}'))"
    return execute(code, max_tool_calls=2)


def reads() -> Any:
    """A script reads a file many times, then its model does, then the script writes what it has read."""
    path = WORK / "hidden.txt"
    path.write_text("seen by the script alone\n")
    code = (
        "import json; from hermes_tools import read_file\n"
        f"print(json.dumps([read_file({str(path)!r}).get('content') for _ in range(6)]))"
    )
    script = [json.loads(execute(code, task_id="reads")["output"]) for _ in range(2)]
    model = json.loads(model_tools.handle_function_call("read_file", {"path": str(path)}, task_id="reads"))
    path.write_text("changed behind their backs\n")
    written = execute(
        f"from hermes_tools import write_file; print(write_file({str(path)!r}, 'x'))", task_id="reads"
    )
    return {"script": script, "model": model.get("content"), "written": written["output"]}


def refusals() -> Any:
    """A tool that was not given; a thread that outlives its cell."""
    not_given = execute("from hermes_tools import terminal", sandbox_tools=frozenset({"read_file"}))
    execute(
        "import threading, hermes_tools\ngo = threading.Event(); late = []\n"
        "def call(): go.wait(); late.append(hermes_tools.read_file('notes.txt'))\n"
        "thread = threading.Thread(target=call); thread.start()"
    )
    late = execute("go.set(); thread.join(); print(late[0]['error'])")
    return {"not_given": not_given, "late": late}


def cleaning() -> Any:
    """What the agent takes for secrets, and escape sequences."""
    halves = f"{TOKEN[:10]!r} + {TOKEN[10:]!r}"
    return execute(f"print('\\x1b[31mred\\x1b[0m', {halves}); raise ValueError({halves})")


def environment() -> Any:
    """What the agent's own rules let pass."""
    values = {"OPENAI_API_KEY": "sk-0123456789", "NOTION_TOKEN": "ntn-kept", "OTHER_TOKEN": "tkn-dropped"}
    os.environ.update(values)
    register_env_passthrough(["NOTION_TOKEN", "OPENAI_API_KEY"])
    return execute("import json, os; print(json.dumps(sorted(os.environ.items())))", task_id="environment")


def approval() -> Any:
    """A dangerous command asks the turn's own session, through the gateway and at a terminal."""
    asked: list[dict[str, Any]] = []
    code = f"from hermes_tools import terminal\nprint(terminal('rm -rf {DOOMED}'))"

    def answering(choice: str) -> Callable[[dict[str, Any]], None]:
        def notify(data: dict[str, Any]) -> None:
            asked.append({"command": data["command"], "thread": threading.current_thread().name})
            threading.Thread(target=resolve_gateway_approval, args=("gate", choice)).start()

        return notify

    results = []
    tokens = set_session_vars(platform="telegram", session_key="gate")
    try:
        with session("gate"):
            for choice in ("deny", "once"):
                DOOMED.mkdir(exist_ok=True)
                register_gateway_notify("gate", answering(choice))
                result = execute(code)
                results.append({"choice": choice, "output": result["output"], "there": DOOMED.exists()})
                unregister_gateway_notify("gate")
    finally:
        clear_session_vars(tokens)
    prompted: list[str] = []

    def prompt(command: str, description: str, **_: Any) -> str:
        prompted.append(command)
        return "deny"

    DOOMED.mkdir(exist_ok=True)
    token = set_hermes_interactive_context(True)
    set_approval_callback(prompt)
    try:
        at_terminal = execute(code, task_id="terminal")
    finally:
        set_approval_callback(None)
        reset_hermes_interactive_context(token)
    return {
        "asked": asked,
        "results": results,
        "prompted": prompted,
        "at_terminal": at_terminal["output"],
        "there": DOOMED.exists(),
    }


def sessions() -> Any:
    """Two turns of one session, another session, its end."""
    with session("one"):
        execute("x = 1", task_id="turn-1")
        again = execute("print(x)", task_id="turn-2")
    with session("two"):
        other = execute("print('x' in globals())", task_id="turn-1")
    hermes_agent.shutdown_kernels_for_owner("one")
    owners = sorted(info.owner.session for info in hermes_agent.session_kernels())
    return {"again": again["output"], "other": other["output"], "owners": owners}


def interrupt() -> Any:
    """The interrupt bit of the thread that calls."""
    began = WORK / "began"
    os.mkfifo(began)
    caller = threading.get_ident()

    def cut() -> None:
        began.read_bytes()
        set_interrupt(True, caller)

    threading.Thread(target=cut).start()
    code = f"open({str(began)!r}, 'w').close()\nimport time; time.sleep(60)"
    result = execute(code, is_interrupted=is_interrupted)
    set_interrupt(False)
    return result


def entry() -> Any:
    """The agent's own way to its tools, with ours in the place of its execute_code."""
    registered()
    (WORK / "sub").mkdir()

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        options = {"enabled_tools": ["terminal", "execute_code"]}
        answer: dict[str, Any] = json.loads(
            model_tools.handle_function_call(name, arguments, task_id="entry", **options)
        )
        return answer

    code = "kept = 1; import hermes_tools as h; print(h.terminal('cd sub')['exit_code'])"
    first = call("execute_code", code=code)
    moved = call("execute_code", code="import os; print(os.getcwd()); print('kept' in globals())")
    reset = call("execute_code", code="print('fresh')", reset=True)
    blank = call("execute_code", code=" ")
    ending = "print('hermes gateway restart')"
    elsewhere = call("execute_code", code=ending)
    os.environ["_HERMES_GATEWAY"] = "1"
    try:
        inside = call("execute_code", code=ending)
    finally:
        del os.environ["_HERMES_GATEWAY"]
    return {
        "first": first,
        "moved": moved,
        "reset": reset,
        "blank": blank,
        "elsewhere": elsewhere,
        "inside": inside,
    }


def registered() -> None:
    """What the how-to says."""
    text = HOW_TO.read_text(encoding="utf-8")
    (code,) = [block for block in text.split("```python\n") if "registry.register(" in block]
    exec(code.partition("```")[0], {})


def definitions() -> Any:
    """What a model is told of the tool: with few of the agent's tools, with many, and with another mode."""
    told = {}
    for toolsets in (["code_execution", "file"], ["code_execution", "file", "terminal"]):
        for quiet in (True, False):
            found = model_tools.get_tool_definitions(enabled_toolsets=toolsets, quiet_mode=quiet)
            (ours,) = [tool["function"] for tool in found if tool["function"]["name"] == "execute_code"]
            told[f"{len(toolsets)} {quiet}"] = ours
    return {"told": told, "ours": hermes_agent.execute_code_schema(["read_file"])}


SCENES = (
    tools,
    budget,
    reads,
    refusals,
    cleaning,
    environment,
    approval,
    sessions,
    interrupt,
    entry,
    definitions,
)


def main() -> None:
    """Play each scene and tell what came of all of them."""
    os.chdir(WORK)
    hermes_agent.use(hermes_agent.Host.from_hermes_agent())
    told = {scene.__name__: scene() for scene in SCENES}
    pids = [info.pid for info in hermes_agent.session_kernels()]
    hermes_agent.shutdown_all_kernels()
    print(json.dumps({**told, "pids": pids}))


main()
