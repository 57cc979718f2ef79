"""What is taken from hermes-agent's modules, release by release: stand-ins with the names that they have."""

import contextvars
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hermes_kernel import ConfigError, Limits, Owner
from hermes_kernel.integrations import hermes_agent
from hermes_kernel.integrations.hermes_agent import SCRIPT_TOOLS, Host, use

from .agent import execute

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
    assert host.elsewhere("1", "task", ()) is None
    assert (host.recorded_cwd("task"), host.registered_cwd("task")) == (None, None)
    with host.around_dispatch():
        pass


def test_code_is_refused_where_the_approval_cannot_be_asked(host: Host) -> None:
    assert host.guard("1") == "the agent's approval guard cannot be asked"


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


def test_what_fails_while_it_is_imported_is_not_there(put: Put, host: Host, tmp_path: Path) -> None:
    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "hermes_constants":
                raise RuntimeError("half installed")

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    try:
        assert host.scope() == ""
    finally:
        del sys.meta_path[0]


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
