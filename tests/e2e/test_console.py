"""A person at a console on an agent's live kernel: the real jupyter_console, in a terminal of its own."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, Limits

pexpect = pytest.importorskip("pexpect")
pytest.importorskip("jupyter_console")
if not hasattr(pexpect, "spawn"):
    pytest.skip("there are no pseudo-terminals here", allow_module_level=True)

Make = Callable[..., BlockingRegistry]

WAIT = 30  # seconds for what has to appear
CTRL_C, CTRL_D = "\x03", "\x04"
PROMPT = "In [#]: "
ATTACHED = "the agent's cells are shown as they run"
STYLE = r"(?:\x1b\[[0-9;?]*[A-Za-z])*"


class Console:
    """A console, the person before it, and what they see."""

    def __init__(self, arguments: list[str], place: Path) -> None:
        env = {
            **os.environ,
            "TERM": "xterm",
            "NO_COLOR": "1",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody answers where the cursor is
            "JUPYTER_CONFIG_DIR": str(place / "config"),
            "IPYTHONDIR": str(place / "ipython"),
        }
        self._terminal = pexpect.spawn(
            sys.executable, arguments, env=env, dimensions=(50, 200), encoding="utf-8", timeout=WAIT
        )

    def sees(self, text: str) -> None:
        """Wait for a text, however it is coloured; # is any number."""
        characters = (r"\d+" if character == "#" else re.escape(character) for character in text)
        self._terminal.expect(STYLE.join(characters))

    def types(self, line: str) -> None:
        self._terminal.send(f"{line}\r")

    def presses(self, key: str) -> None:
        self._terminal.send(key)

    def is_sent(self, signum: int) -> None:
        self._terminal.kill(signum)

    def ends(self) -> int | None:
        """Wait for its end, and return its exit code."""
        self._terminal.expect(pexpect.EOF)
        self._terminal.wait()
        self._terminal.close()
        code: int | None = self._terminal.exitstatus
        return code

    def hang_up(self) -> None:
        """Close the terminal, and wait until the console is gone."""
        process = psutil.Process(self._terminal.pid)
        self._terminal.ptyproc.fileobj.close()
        self._terminal.ptyproc.fd = self._terminal.child_fd = -1
        process.wait(WAIT)
        self._terminal.closed = self._terminal.ptyproc.closed = True
        self._terminal.terminated = self._terminal.ptyproc.terminated = True

    def close(self) -> None:
        if not self._terminal.closed:
            self._terminal.close(force=True)


Open = Callable[[], Console]


@pytest.fixture
def registry(make_registry: Make) -> BlockingRegistry:
    registry = make_registry(expose=True, limits=Limits(timeout=60))
    registry.execute("x = 41", owner="a")
    return registry


@pytest.fixture(params=["attach", "jupyter console"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(registry: BlockingRegistry, way: str, tmp_path: Path) -> Iterator[Open]:
    consoles: list[Console] = []

    def open_console() -> Console:
        (info,) = registry.kernels()
        assert info.connection_file is not None
        if way == "attach":
            arguments = ["-m", "hermes_kernel.cli", "attach", "a"]
        else:
            arguments = ["-m", "jupyter", "console", "--existing", info.connection_file]
        console = Console(arguments, tmp_path)
        consoles.append(console)
        if way == "attach":
            console.sees(ATTACHED)
        console.sees(PROMPT)
        return console

    yield open_console
    for console in consoles:
        console.close()


class Held:
    """A cell that has begun, and goes on when it is told to."""

    def __init__(self, place: Path) -> None:
        self._begun, self._go_on = place / "begun", place / "go on"
        os.mkfifo(self._begun)
        os.mkfifo(self._go_on)
        self.code = f"open({str(self._begun)!r}, 'w').close(); open({str(self._go_on)!r}).close()"

    def wait(self) -> None:
        self._begun.read_bytes()

    def go_on(self) -> None:
        self._go_on.write_bytes(b"")


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


def still_there(registry: BlockingRegistry, pid: int | None) -> CellResult:
    """The agent's next result: nothing has been ended, and the state is there."""
    result = registry.execute("x", owner="a")
    assert (result.status, result.kernel.reused, result.kernel.lost) == (CellStatus.OK, True, None)
    assert pid == registry.kernels()[0].pid
    return result


def pid_of(registry: BlockingRegistry) -> int | None:
    return registry.kernels()[0].pid


def test_a_persons_cell_shares_the_state_and_the_agent_is_told(
    registry: BlockingRegistry, opened: Open
) -> None:
    console = opened()
    console.types("x += 1; 'x is ' + str(x)")
    console.sees("'x is 42'")
    result = registry.execute("x", owner="a")
    assert (result.value, result.kernel.foreign_cells) == ("42", 1)
    console.sees(PROMPT)
    console.types("1 / 0")
    console.sees("ZeroDivisionError: division by zero")
    result = registry.execute("x", owner="a")
    assert (result.value, result.kernel.foreign_cells) == ("42", 1)
    assert registry.execute("x", owner="a").kernel.foreign_cells == 0


@pytest.mark.parametrize("way", ["attach"], indirect=True)
def test_the_agents_cells_appear_with_what_they_show(registry: BlockingRegistry, opened: Open) -> None:
    console = opened()
    registry.execute("print('to' + 'day'); x * 1000", owner="a")
    console.sees("print('to' + 'day'); x * 1000")
    console.sees("today")
    console.sees("[agent] 41000")
    registry.execute("import sys; print('w' + 'arned', file=sys.stderr)", owner="a")
    console.sees("print('w' + 'arned', file=sys.stderr)")
    console.sees("warned")
    registry.execute("display('sh' + 'own')", owner="a")
    console.sees("[agent] 'shown'")
    assert registry.execute("{}['no' + 'key']", owner="a").status is CellStatus.ERROR
    console.sees("KeyError: 'nokey'")


@pytest.mark.parametrize("way", ["attach"], indirect=True)
def test_what_the_agent_prints_appears_while_its_cell_runs(
    registry: BlockingRegistry, opened: Open, held: Held
) -> None:
    console = opened()
    results: list[CellResult] = []
    code = f"print('be' + 'gun', flush=True); {held.code}"
    agent = threading.Thread(target=lambda: results.append(registry.execute(code, owner="a")))
    agent.start()
    held.wait()
    try:
        console.sees("begun")
    finally:
        held.go_on()
        agent.join(WAIT)
    assert results[0].status is CellStatus.OK


@pytest.mark.parametrize("leave", ["exit", "exit()", "quit", "quit()", "Ctrl-D", "terminal closed"])
def test_leaving_ends_nothing(registry: BlockingRegistry, opened: Open, way: str, leave: str) -> None:
    pid = pid_of(registry)
    console = opened()
    if leave == "terminal closed":
        console.hang_up()
    else:
        if leave != "Ctrl-D":
            console.types(leave)
            console.sees("This kernel belongs to an agent's session: it goes on.")
        else:
            console.presses(CTRL_D)
            if way != "attach":
                console.sees("Do you really want to exit")
                console.types("y")
        console.sees("keeping kernel alive")
        assert console.ends() == 0
    assert still_there(registry, pid).value == "41"
    again = opened()
    again.types("x, 'is ' + 'it'")
    again.sees("(41, 'is it')")


def test_closing_the_terminal_does_not_end_the_persons_cell(
    registry: BlockingRegistry, opened: Open, held: Held
) -> None:
    pid = pid_of(registry)
    console = opened()
    console.types(f"{held.code}; x = 'from the person'")
    held.wait()
    console.hang_up()
    held.go_on()
    result = still_there(registry, pid)
    assert (result.value, result.kernel.foreign_cells) == ("'from the person'", 1)


@pytest.mark.parametrize("key", ["Ctrl-C", "SIGINT"])
def test_an_interrupt_at_the_console_does_not_reach_the_agents_cell(
    registry: BlockingRegistry, opened: Open, held: Held, key: str
) -> None:
    pid = pid_of(registry)
    console = opened()
    results: list[CellResult] = []
    code = f"{held.code}; 'unharmed'"
    agent = threading.Thread(target=lambda: results.append(registry.execute(code, owner="a")))
    agent.start()
    held.wait()
    try:
        if key == "Ctrl-C":
            console.presses("typed")
            console.sees("typed")
            console.presses(CTRL_C)
        else:
            console.is_sent(signal.SIGINT)
            console.sees("KeyboardInterrupt escaped interact()")
            console.sees(PROMPT)
        console.presses("x, 'is ' + 'it'")
        console.sees("x, 'is ' + 'it'")
    finally:
        held.go_on()
        agent.join(WAIT)
    assert (results[0].status, results[0].value) == (CellStatus.OK, "'unharmed'")
    console.types("")
    console.sees("(41, 'is it')")
    assert still_there(registry, pid).kernel.foreign_cells == 1


def test_ctrl_c_in_the_persons_own_cell_ends_nothing(
    registry: BlockingRegistry, opened: Open, held: Held
) -> None:
    """The stock console says that it cannot interrupt what it has not started."""
    pid = pid_of(registry)
    console = opened()
    console.types(f"{held.code}; 'gone' + ' on'")
    held.wait()
    console.presses(CTRL_C)
    console.sees("Cannot interrupt kernels we didn't start")
    held.go_on()
    console.sees("'gone on'")
    assert still_there(registry, pid).value == "41"


def test_input_is_asked_of_the_person_and_never_by_the_agents_cells(
    registry: BlockingRegistry, opened: Open
) -> None:
    console = opened()
    console.types("x = input('who ' + 'is it? ')")
    console.sees("who is it? ")
    console.types("Bob")
    console.sees(PROMPT)
    assert registry.execute("x", owner="a").value == "'Bob'"
    result = registry.execute("input('who? ')", owner="a")
    assert result.error is not None
    assert "nobody can answer" in result.error.evalue


def test_the_agents_tools_are_not_the_persons(registry: BlockingRegistry, opened: Open) -> None:
    calls: list[int] = []

    def note(number: int) -> int:
        """Note a number."""
        calls.append(number)
        return number

    registry.execute("import hermes_tools; hermes_tools.note(1)", owner="a", tools=[note])
    console = opened()
    console.types("hermes_tools.note(2)")
    console.sees("ToolError")
    registry.execute("hermes_tools.note(3)", owner="a", tools=[note])
    assert calls == [1, 3]


def test_the_end_of_the_session_leaves_a_console_that_can_be_left(
    registry: BlockingRegistry, opened: Open, way: str
) -> None:
    console = opened()
    registry.close_owner("a")
    console.presses(CTRL_D)
    if way != "attach":
        console.sees("Do you really want to exit")
        console.types("y")
    assert console.ends() == 0


@pytest.mark.parametrize("way", ["attach"], indirect=True)
def test_two_people_may_look_at_once(registry: BlockingRegistry, opened: Open) -> None:
    first, second = opened(), opened()
    first.types("y = 'by ' + 'the first'; y")
    first.sees("'by the first'")
    second.sees("'by the first'")
    second.types("exit")
    assert second.ends() == 0
    first.types("x, y")
    first.sees("(41, 'by the first')")
    assert registry.execute("x", owner="a").kernel.foreign_cells == 3
