"""What is taken from hermes-agent's modules, release by release: stand-ins with the names that they have."""

import contextvars
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hermes_kernel import ConfigError, Limits, Owner
from hermes_kernel.integrations import hermes_agent
from hermes_kernel.integrations.hermes_agent import SCRIPT_TOOLS, Host, handle_execute_code, use

from .agent import execute, execute_text

Put = Callable[..., ModuleType]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Put:
    """Have a module with these members, below packages that have nothing."""

    def put(name: str, **members: Any) -> ModuleType:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                made = ModuleType(package)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, package, made)
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    put("model_tools", handle_function_call=lambda *_, **__: "{}", __file__=str(tmp_path / "model_tools.py"))
    return put


@pytest.fixture
def host(put: Put) -> Host:
    return Host.from_hermes_agent()


@contextmanager
def broken_import(module: str) -> Iterator[None]:
    """Importing the module fails within the block."""

    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == module:
                raise RuntimeError("half installed")

    had = sys.modules.pop(module, None)
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    try:
        yield
    finally:
        del sys.meta_path[0]
        if had is not None:
            sys.modules[module] = had


def test_without_hermes_agent_there_is_an_error_and_the_first_call_has_a_host_that_has_nothing(
    leaves_nothing: None,
) -> None:
    with pytest.raises(ConfigError, match=r"hermes-agent cannot be imported.*give a Host"):
        Host.from_hermes_agent()
    try:
        result = execute("import hermes_tools; print(hermes_tools.echo())", sandbox_tools={"echo"})
    finally:
        use(None)
    assert result["output"] == "{'error': 'echo cannot be called: this host serves no tools'}\n"


def test_a_release_that_lacks_everything_else_gives_the_defaults(host: Host) -> None:
    assert host.resolve_owner("task") == Owner("task")
    with pytest.raises(ConfigError, match="nobody would own"):
        host.resolve_owner("")
    assert host.limits() == Limits()
    assert (host.scope(), host.socket_dir(), host.interrupt_reason(), host.is_interrupted()) == (
        "",
        None,
        None,
        False,
    )
    assert host.is_passthrough("X_TOKEN") is False
    assert host.resolve_passthrough is not None
    assert host.resolve_passthrough("X", "value") == "value"
    assert host.clean is not None
    assert host.clean("text") == "text"
    assert host.capture_context is not None
    assert host.capture_context()(lambda: 3) == 3
    assert host.tool_stubs is not None
    assert host.tool_stubs(["terminal"]) == ""
    assert (host.config(), host.script_tools, host.is_available()) == ({}, SCRIPT_TOOLS, True)
    assert (host.recorded_cwd("task"), host.registered_cwd("task")) == (None, None)
    with host.around_dispatch():
        pass


def test_code_is_refused_where_the_approval_cannot_be_asked(put: Put, host: Host) -> None:
    put("tools.terminal_tool", _get_env_config=lambda: {"env_type": "local"})
    assert host.guard("1") == "the agent's approval guard cannot be asked"


@pytest.mark.parametrize("given", [None, {}, {"env_type": None}, {"env_type": ""}, "local"])
def test_code_is_refused_where_it_is_not_known_which_machine_it_is_for(
    put: Put, host: Host, given: object
) -> None:
    put("tools.approval", check_execute_code_guard=lambda *_, **__: {"approved": True})
    put("tools.code_execution_tool", _execute_remote=lambda *_: "run elsewhere")
    for members in ({}, {"_get_env_config": lambda: given}):
        put("tools.terminal_tool", **members)
        for ask in (lambda: host.guard("1"), lambda: host.elsewhere("1", "task", ())):
            with pytest.raises(ConfigError, match=r"which machine.*terminal_tool"):
                ask()


def test_code_is_refused_where_the_terminals_module_cannot_be_imported(put: Put, host: Host) -> None:
    put("tools.approval", check_execute_code_guard=lambda *_, **__: {"approved": True})
    with broken_import("tools.terminal_tool"), pytest.raises(ConfigError, match="half installed"):
        host.elsewhere("1", "task", ())


GATES = {
    "tools.terminal_tool": {"_get_env_config": lambda: {"env_type": "local"}},
    "tools.approval": {"check_execute_code_guard": lambda *_, **__: {"approved": True}},
}


@pytest.fixture
def gated(put: Put, host: Host) -> Host:
    """A host whose agent runs code here, and has approved it."""
    for name, members in GATES.items():
        put(name, **members)
    return host


def test_a_profile_whose_terminal_policy_is_not_known_runs_no_code(put: Put, gated: Host) -> None:
    assert gated.guard("1") is None
    asked: list[str] = []
    put("tools.terminal_scope", enforce_no_refusal=lambda: asked.append("policy"))
    assert gated.guard("1") is None
    assert asked == ["policy"]

    def refuse() -> None:
        raise RuntimeError("config.yaml cannot be read")

    put("tools.terminal_scope", enforce_no_refusal=refuse)
    assert "config.yaml cannot be read" in str(gated.guard("1"))
    with broken_import("tools.terminal_scope"), pytest.raises(ConfigError, match="half installed"):
        gated.guard("1")


@pytest.mark.parametrize(
    ("probe", "marker", "refused"),
    [(True, None, True), (False, None, False), (False, "1", False), (None, "1", True), (None, None, False)],
)
def test_a_supervised_gateway_runs_no_code_that_would_end_it(
    put: Put,
    gated: Host,
    monkeypatch: pytest.MonkeyPatch,
    probe: bool | None,
    marker: str | None,
    refused: bool,
) -> None:
    monkeypatch.delenv("_HERMES_GATEWAY", raising=False)
    if marker is not None:
        monkeypatch.setenv("_HERMES_GATEWAY", marker)
    if probe is not None:
        put("tools.process_registry", _is_supervised_gateway_process=lambda: probe)
    assert gated.guard("gateway restart") is None, "a release that looks for no such commands"
    put("cron.lifecycle_guard", contains_gateway_lifecycle_command=lambda text: "gateway restart" in text)
    assert gated.guard("print(1)") is None
    said = gated.guard("os.system('gateway restart')")
    assert ("gateway" in str(said)) is refused
    with broken_import("cron.lifecycle_guard"):
        if refused:
            with pytest.raises(ConfigError, match="half installed"):
                gated.guard("1")
        else:
            assert gated.guard("1") is None


@pytest.mark.parametrize("home", ["tools.approval", "tools.approval_context"])
def test_the_owner_is_the_session_key_and_a_delegated_child_its_own(put: Put, host: Host, home: str) -> None:
    key = {"now": "session-1"}
    put(home, get_current_session_key=lambda default="default": key["now"] or default)
    assert host.resolve_owner("task") == Owner("session-1")
    values = {"HERMES_SESSION_ID": "child-1"}
    put("agent.delegation_context", is_delegated_child_context=lambda: True)
    assert host.resolve_owner("task") == Owner("session-1", child="task")
    put("gateway.session_context", get_session_env=lambda name, default="": values.get(name, default))
    assert host.resolve_owner("task") == Owner("session-1", child="child-1")
    put("agent.delegation_context", is_delegated_child_context=lambda: False)
    key["now"] = ""
    assert host.resolve_owner("task") == Owner("task")


def test_a_session_key_that_cannot_be_read_is_the_task(put: Put, host: Host) -> None:
    def broken(default: str = "") -> str:
        raise RuntimeError("no context")

    put("tools.approval", get_current_session_key=broken)
    assert host.resolve_owner("task") == Owner("task")


@pytest.mark.parametrize(
    ("configured", "kernels", "idle"),
    [
        ({"max_session_kernels": 7, "kernel_idle_timeout": 60}, 7, 60),
        ({"max_session_kernels": 0, "kernel_idle_timeout": -5}, 1, 1),
        ({"max_session_kernels": "3", "kernel_idle_timeout": "x"}, 3, 1800),
        ({"max_session_kernels": None, "kernel_idle_timeout": []}, 4, 1800),
        ({"kernel_mode": "per-call"}, 4, 1800),
        ("not a mapping", 4, 1800),
    ],
)
def test_limits_are_what_the_configuration_says_where_that_can_be(
    put: Put, host: Host, configured: object, kernels: int, idle: int
) -> None:
    put("tools.code_execution_tool", _load_config=lambda: configured)
    limits = host.limits()
    assert (limits.max_kernels, limits.idle_timeout) == (kernels, idle)


def test_what_is_cut_is_kept_below_the_home_of_the_agent_and_a_profile_is_a_scope(
    put: Put, host: Host
) -> None:
    put(
        "hermes_constants",
        get_hermes_home=lambda: Path("/profile"),
        get_process_hermes_home=lambda: Path("/home"),
    )
    assert host.limits().spill_dir == str(Path("/home/cache/exec"))
    assert host.scope() == str(Path("/profile"))


Pairs = Callable[[], Any]


def _flat(local: Any) -> Pairs:
    return lambda: (
        lambda: getattr(local, "approval", None),
        lambda: getattr(local, "sudo", None),
        lambda value: setattr(local, "approval", value),
        lambda value: setattr(local, "sudo", value),
    )


def _paired(local: Any) -> Pairs:
    approval_get, sudo_get, approval_set, sudo_set = _flat(local)()
    return lambda: ((approval_get, approval_set), (sudo_get, sudo_set))


@pytest.mark.parametrize("shape", [_flat, _paired])
def test_prompts_are_those_of_the_calling_thread_and_what_was_there_comes_back(
    put: Put, host: Host, shape: Callable[[Any], Pairs]
) -> None:
    local = threading.local()
    put("tools.thread_context", _callback_api=shape(local))
    assert host.capture_context is not None
    local.approval, local.sudo = "ask me", "password"
    runner = host.capture_context()
    barrier = threading.Barrier(2, timeout=20)

    def look() -> tuple[Any, Any]:
        barrier.wait()  # both at once: nothing is entered that only one may be in
        return local.approval, local.sudo

    def work() -> Any:
        local.approval = "another's"
        seen = runner(look)
        return seen, local.approval, getattr(local, "sudo", None)

    with ThreadPoolExecutor(2) as pool:
        results = [future.result(20) for future in [pool.submit(work) for _ in range(2)]]
    assert results == [(("ask me", "password"), "another's", None)] * 2
    with pytest.raises(ZeroDivisionError):
        runner(lambda: 1 / 0)
    assert local.approval == "ask me"


def test_prompts_that_cannot_be_captured_are_none(put: Put, host: Host) -> None:
    def broken() -> Any:
        raise RuntimeError("no terminal")

    put("tools.thread_context", _callback_api=broken)
    assert host.capture_context is not None
    assert host.capture_context()(lambda: "ran") == "ran"


def test_a_declared_variable_has_the_value_of_the_calling_profile_or_none(
    put: Put, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("scope", default=None)

    def get_secret(name: str) -> str | None:
        values = scope.get()
        if values is None:
            raise RuntimeError("several profiles, and none is calling")
        return values.get(name)

    put("agent.secret_scope", get_secret=get_secret, current_secret_scope=scope.get)
    put("tools.env_passthrough", is_env_passthrough=lambda name: name.startswith("MY_"))
    monkeypatch.setenv("MY_TOKEN", "of the process")
    assert host.resolve_passthrough is not None
    assert host.build_env is not None
    assert host.resolve_passthrough("MY_TOKEN", "of the process") is None
    token = scope.set({"MY_TOKEN": "of the profile", "MY_OTHER": "new", "NOT_DECLARED": "x"})
    try:
        assert host.resolve_passthrough("MY_TOKEN", "of the process") == "of the profile"
        assert host.resolve_passthrough("MY_MISSING", "of the process") is None
        built = host.build_env({"PATH": "/bin", "MY_TOKEN": "of the profile"}, sys.executable)
    finally:
        scope.reset(token)
    assert (built["MY_TOKEN"], built["MY_OTHER"], built["PATH"]) == ("of the profile", "new", "/bin")
    assert "NOT_DECLARED" not in built


def test_time_zone_home_and_profile_are_the_agents(
    put: Put, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply_home(env: dict[str, str]) -> None:
        env.update(HERMES_REAL_HOME="/real", HOME="/own")

    put("hermes_constants", apply_subprocess_home_env=apply_home, get_hermes_home_override=lambda: "/profile")
    monkeypatch.setenv("HERMES_TIMEZONE", " Asia/Tokyo ")
    assert host.build_env is not None
    built = host.build_env({"HOME": "/root"}, sys.executable)
    assert (built["TZ"], built["HERMES_HOME"]) == ("Asia/Tokyo", "/profile")
    assert (built["HOME"], built["HERMES_REAL_HOME"]) == ("/own", "/real")
    monkeypatch.delenv("HERMES_TIMEZONE")
    assert "TZ" not in host.build_env({}, sys.executable)


def test_the_agents_modules_can_be_imported_on_its_own_interpreter_alone(host: Host, tmp_path: Path) -> None:
    root = str(tmp_path.resolve())
    both = os.pathsep.join([root, "/elsewhere"])
    assert host.build_env is not None
    assert host.build_env({}, sys.executable)["PYTHONPATH"] == root
    assert host.build_env({"PYTHONPATH": both}, sys.executable)["PYTHONPATH"] == both
    assert host.build_env({"PYTHONPATH": both}, "/project/bin/python")["PYTHONPATH"] == "/elsewhere"
    assert "PYTHONPATH" not in host.build_env({"PYTHONPATH": root}, "/project/bin/python")


def test_a_root_that_is_installed_needs_no_path(put: Put, tmp_path: Path) -> None:
    put(
        "model_tools", handle_function_call=print, __file__=str(tmp_path / "site-packages" / "model_tools.py")
    )
    host = Host.from_hermes_agent()
    assert host.build_env is not None
    assert "PYTHONPATH" not in host.build_env({}, sys.executable)


def test_text_is_stripped_and_then_redacted_as_code(put: Put, host: Host) -> None:
    asked: list[tuple[str, bool]] = []

    def redact(text: str, *, code_file: bool) -> str:
        asked.append((text, code_file))
        return f"<{text}>"

    put("tools.ansi_strip", strip_ansi=lambda text: text.replace("\x1b[0m", ""))
    put("agent.redact", redact_sensitive_text=redact)
    assert host.clean is not None
    assert host.clean("a\x1b[0mb") == "<ab>"
    assert asked == [("ab", True)]


@pytest.mark.parametrize("approved", [True, False])
def test_an_approval_is_asked_with_what_is_known_and_clears_an_old_interrupt(
    put: Put, host: Host, *, approved: bool
) -> None:
    asked: list[Any] = []
    cleared: list[bool] = []

    def check(code: str, env_type: str, has_host_access: bool = False) -> dict[str, Any]:
        asked.append((code, env_type, has_host_access))
        return {"approved": approved, "user_approved": approved, "message": "blocked"}

    put("tools.approval", check_execute_code_guard=check)
    put(
        "tools.terminal_tool",
        _get_env_config=lambda: {"env_type": "docker"},
        _docker_has_host_access=lambda config: config["env_type"] == "docker",
    )
    put("tools.interrupt", clear_current_thread_interrupt=lambda: cleared.append(True))
    assert host.guard("x = 1") == (None if approved else "blocked")
    assert asked == [("x = 1", "docker", True)]
    assert cleared == [True] * approved


def test_code_for_another_machine_is_run_by_the_agent_itself(put: Put, host: Host) -> None:
    put("tools.terminal_tool", _get_env_config=lambda: {"env_type": "ssh"})
    put("tools.code_execution_tool")
    with pytest.raises(ConfigError, match="another machine"):
        host.elsewhere("1", "task", ("terminal",))
    put("tools.code_execution_tool", _execute_remote=lambda code, task_id, tools: f"{code} {task_id} {tools}")
    assert host.elsewhere("1", "task", ("terminal",)) == "1 task ['terminal']"


def test_what_fails_while_it_is_imported_is_not_there(host: Host) -> None:
    with broken_import("hermes_constants"):
        assert host.scope() == ""


@pytest.fixture
def no_kernels(leaves_nothing: None) -> Iterator[None]:
    yield
    use(None)


def test_the_first_call_finds_hermes_agent_by_itself(put: Put, no_kernels: None) -> None:
    put(
        "model_tools",
        handle_function_call=lambda name, arguments, *, task_id: f'["{name}", "{task_id}"]',
        __file__="x",
    )
    put("tools.interrupt", get_interrupt_reason=lambda: "the user asked")
    code = "import hermes_tools; print(hermes_tools.echo(value=1))"
    assert execute(code, sandbox_tools={"echo"})["output"] == "['echo', 'task']\n"
    assert execute("1", is_interrupted=lambda: True)["output"] == "[execution interrupted — the user asked]"
    assert len(hermes_agent.session_kernels()) == 1


def test_first_calls_of_several_threads_share_what_was_found(put: Put, no_kernels: None) -> None:
    barrier = threading.Barrier(4, timeout=20)

    def call() -> str:
        barrier.wait()
        return str(execute("import os; print(os.getpid())")["output"])

    with ThreadPoolExecutor(4) as pool:
        pids = [future.result(60) for future in [pool.submit(call) for _ in range(4)]]
    assert len(set(pids)) == 1
    assert len(hermes_agent.session_kernels()) == 1


# -- an agent that is imported, or cannot be --------------------------------------------------------------

AGENT = """
import {ours} as ours
{early}
SCHEMAS = [ours.execute_code_schema()]

def handle_function_call(name, arguments, *, task_id):
    return "{{}}"
"""
REFUSING = "def check_execute_code_guard(code, env_type): return {'approved': False, 'message': 'ask first'}"
STUB_TOOL = """
SANDBOX_ALLOWED_TOOLS = {'read_file'}
def generate_hermes_tools_module(names): return 'def read_file(path): "Read."'
"""

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_kernels: None) -> Iterator[Write]:
    """Have an agent on disk, whose dispatcher has this text; its guard approves nothing."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "approval.py").write_text(REFUSING)
    (tmp_path / "tools" / "terminal_tool.py").write_text("_get_env_config = lambda: {'env_type': 'local'}")
    (tmp_path / "tools" / "code_execution_tool.py").write_text(STUB_TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> None:
        (tmp_path / "model_tools.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "model_tools")]:
        del sys.modules[name]


def agent_text(early: str = "") -> str:
    return AGENT.format(ours=hermes_agent.__name__, early=early)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", ["the agent", "the backend"])
def test_an_agent_that_asks_for_the_schema_while_it_is_imported_has_its_guard_asked(
    write: Write, tmp_path: Path, first: str
) -> None:
    write(agent_text())
    if first == "the agent":
        importlib.import_module("model_tools")
    marker = tmp_path / "ran"
    result = json.loads(handle_execute_code({"code": f"open({str(marker)!r}, 'w')"}, task_id="t"))
    assert result["error"] == "ask first"
    assert not marker.exists()
    (schema,) = sys.modules["model_tools"].SCHEMAS
    assert "read_file(path): Read." in schema["description"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("problem", ["import no_such_dependency", "1 / 0", "raise SystemExit(3)"])
def test_an_agent_that_cannot_be_imported_runs_nothing_and_is_tried_again(
    write: Write, tmp_path: Path, problem: str
) -> None:
    write(problem)
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')"
    for _ in range(2):
        for answer in (handle_execute_code({"code": code}, task_id="t"), execute_text(code)):
            assert "hermes-agent cannot be imported" in json.loads(answer)["error"]
    with pytest.raises(ConfigError, match="hermes-agent cannot be imported"):
        hermes_agent.unusable_python(sys.executable)
    assert not marker.exists()
    assert hermes_agent.execute_code_schema()["name"] == "execute_code"
    write(agent_text())
    assert json.loads(handle_execute_code({"code": code}, task_id="t"))["error"] == "ask first"


@pytest.mark.timeout(60)
def test_code_that_is_run_while_the_agent_is_imported_is_refused_and_later_asked_for(
    write: Write, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    code = {"code": f"open({str(marker)!r}, 'w')"}
    write(agent_text(f"EARLY = ours.handle_execute_code({code!r}, task_id='t')"))
    module = importlib.import_module("model_tools")
    assert "hermes-agent cannot be imported" in json.loads(module.EARLY)["error"]
    assert json.loads(handle_execute_code(code, task_id="t"))["error"] == "ask first"
    assert not marker.exists()


def test_what_a_script_reads_is_not_counted_as_seen(put: Put) -> None:
    told: list[tuple[str, str]] = []

    def serve(name: str, arguments: dict[str, Any], *, task_id: str) -> str:
        told.append((name, task_id))
        return "{}"

    put("model_tools", handle_function_call=serve, __file__="x")
    put("tools.file_tools", reset_file_dedup=lambda task: told.append(("forgotten", task)))
    host = Host.from_hermes_agent()
    host.dispatch("read_file", {}, task_id="", cell=None)
    host.dispatch("terminal", {}, task_id="t", cell=None)
    assert told == [("forgotten", "default"), ("read_file", ""), ("forgotten", "default"), ("terminal", "t")]
