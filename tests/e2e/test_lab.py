"""A person beside an agent: `hermes-kernel lab` as it is, and a real browser on its page.

With HERMES_TEST_BROWSER=1 what is missing for that is a failure; HERMES_TEST_PICTURES names a directory for
the pictures of the documentation.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellStatus

from .. import traces
from ..cli.command import COMMAND, hermes

try:
    from playwright.sync_api import Locator, Page, expect, sync_playwright
except ImportError:
    sync_playwright = None

pytestmark = pytest.mark.timeout(300)

START_WAIT = 60.0
STOP_WAIT = 20.0
SHOWN_WAIT = 60_000  # milliseconds, as the browser's driver counts
SIZE = {"width": 1200, "height": 700}
PANEL_WIDTH = 400
OWNER = "conversation-17"
LIVE = "Hermes (live session of an agent)"
REFUSED = "a live session of hermes_kernel is started and restarted by its agent alone"

CHROMIUM = (
    "--headless",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
CONFIG = {"LabApp": {"extension_manager": "readonly"}}
NOTIFICATION = Path("@jupyterlab", "apputils-extension", "notification.jupyterlab-settings")
NO_NEWS = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}

TABLE = """\
rows = [
    {"city": "Oslo", "visits": 12},
    {"city": "Lima", "visits": 25},
    {"city": "Pune", "visits": 5},
]
"""
LOOK = """\
for row in rows:
    print(row["city"], row["visits"])
checked = sum(row["visits"] for row in rows)"""


def missing() -> str | None:
    """Say what has to be installed for these tests."""
    if sync_playwright is None:
        return "the Python package playwright is not installed: pip install playwright"
    if importlib.util.find_spec("jupyterlab") is None:
        return "JupyterLab is not installed: pip install jupyterlab"
    if shutil.which("chromium") is None:
        return "there is no chromium on the PATH: apt-get install chromium"
    return None


@pytest.fixture(scope="module", autouse=True)
def _all_is_there() -> None:
    reason = missing()
    if reason is not None and os.environ.get("HERMES_TEST_BROWSER") == "1":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@dataclass
class Lab:
    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(STOP_WAIT)


@contextmanager
def running_lab(home: Path) -> Iterator[Lab]:
    """Run the command with every directory of a user's below *home*; sessions are found as everywhere."""
    settings = home / "settings" / NOTIFICATION
    for directory in (home / "config", home / "root", settings.parent):
        directory.mkdir(parents=True)
    (home / "config" / "jupyter_server_config.json").write_text(json.dumps(CONFIG))
    settings.write_text(json.dumps(NO_NEWS))
    env = {
        **os.environ,
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_CONFIG_PATH": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    command = [
        *COMMAND,
        "lab",
        "--no-browser",
        "--port",
        "0",
        "--root-dir",
        str(home / "root"),
        "--allow-root",
    ]
    log = home / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, cwd=home, stdout=file, stderr=file)
    lab = Lab(process, "", log)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/lab\?token=[0-9a-f]+", log.read_text())
        if found is None:
            return False
        lab.url = found[0]
        try:
            with urllib.request.urlopen(f"{found[1]}/api", timeout=START_WAIT) as answer:
                return bool(answer.status == 200)
        except urllib.error.URLError:  # it says where it is before it listens
            return False

    try:
        assert traces.eventually(answers, within=START_WAIT), log.read_text()
        yield lab
    finally:
        try:
            lab.end()
        except subprocess.TimeoutExpired:
            pass  # a thread of anyio's that was on a file when the loop ended is waited for without end
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def lab(leaves_nothing: None, tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path / "home") as found:
        yield found


class Window:
    """JupyterLab's page, with the panel of what runs open, as a person uses it."""

    def __init__(self, page: "Page", pictures: Path) -> None:
        self.page = page
        self._pictures = pictures
        self.panel = page.locator(".jp-RunningSessions")
        self.notebook = page.locator(".jp-NotebookPanel")
        self.status = page.locator("#jp-main-statusbar")
        self.dialog = page.locator(".jp-Dialog")

    def open(self, url: str) -> None:
        self.page.goto(url)
        expect(self.page.locator(".jp-LauncherCard").first).to_be_visible()
        self.page.get_by_role("tab", name="Running Terminals and Kernels").click()
        for section in ("Language Servers", "Recently Closed", "Workspaces", "Terminals"):
            self.panel.get_by_role("heading", name=section).click()
        edge = self.page.locator("#jp-main-split-panel > .lm-SplitPanel-handle:visible").first.bounding_box()
        assert edge is not None
        self.page.mouse.move(edge["x"] + edge["width"] / 2, SIZE["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(PANEL_WIDTH, SIZE["height"] / 2)
        self.page.mouse.up()

    def refresh(self) -> None:
        self.panel.get_by_role("button", name="Refresh List").click()

    def session(self, kernel_id: str, name: str = "No sessions connected") -> "Locator":
        return self.panel.get_by_text(f"{name} ({kernel_id[:8]})")

    def choose(self, session: "Locator", what: str) -> None:
        session.click(button="right")
        self.page.locator(".lm-Menu").get_by_text(what, exact=True).click()

    def attach(self, kernel_id: str) -> None:
        self.choose(self.session(kernel_id), "New Notebook for Kernel")
        expect(self.session(kernel_id, "Untitled.ipynb")).to_be_visible()
        expect(self.notebook.locator(".jp-KernelName")).to_have_text(LIVE)
        expect(self.status).to_contain_text("| Idle")

    def run(self, code: str) -> None:
        """Run the last cell; a new one follows it."""
        cells = self.notebook.locator(".jp-Notebook .jp-Cell")
        count = cells.count()
        editor = cells.last.locator(".cm-content")
        editor.click()
        self.page.keyboard.insert_text(code)
        expect(editor).to_contain_text(code.splitlines()[0])
        self.page.keyboard.press("Shift+Enter")
        expect(cells).to_have_count(count + 1)

    @property
    def output(self) -> "Locator":
        return self.notebook.locator(".jp-OutputArea-output").last

    def kernel_menu(self, what: str) -> None:
        self.page.get_by_role("menuitem", name="Kernel", exact=True).click()
        self.page.locator(".lm-Menu").get_by_text(what, exact=True).click()

    @contextmanager
    def asks(self, method: str, path: str, *, answered: int) -> Iterator[None]:
        """Wait for the server's answer to what the page asks for in the block."""

        def is_it(response: object) -> bool:
            return response.request.method == method and path in response.url  # type: ignore[attr-defined]

        with self.page.expect_response(is_it) as response:
            yield
        assert response.value.status == answered

    def picture(self, name: str) -> None:
        self.page.mouse.move(SIZE["width"] / 2, 10)  # where it lights nothing up
        self.page.screenshot(path=self._pictures / f"{name}.png", animations="disabled", caret="hide")


@pytest.fixture
def window(lab: Lab, tmp_path: Path) -> Iterator[Window]:
    pictures = Path(os.environ.get("HERMES_TEST_PICTURES") or tmp_path / "pictures")
    pictures.mkdir(parents=True, exist_ok=True)
    home = tmp_path / "browser"
    env = {**os.environ, **{name: str(home) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}}
    expect.set_options(timeout=SHOWN_WAIT)
    elsewhere: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=CHROMIUM, env=env, timeout=SHOWN_WAIT
        )
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(SHOWN_WAIT)
        page.on("request", lambda request: elsewhere.append(request.url))
        window = Window(page, pictures)
        window.open(lab.url)
        yield window
        browser.close()
    server = lab.url.split("/lab")[0]
    assert [url for url in elsewhere if not url.startswith((server, "data:", "blob:"))] == []


@dataclass
class Agent:
    registry: BlockingRegistry
    pid: int
    kernel_id: str

    def is_unharmed(self) -> bool:
        """Whether the next cell and a new client find the same kernel and all of its variables."""
        result = self.registry.execute("len(rows), checked", owner=OWNER)
        assert result.value == "(3, 42)", result
        told = json.loads(hermes("vars", OWNER, "--json").out)
        assert {"rows", "checked"} <= {variable["name"] for variable in told}
        (info,) = self.registry.kernels()
        return result.kernel.lost is None and (info.pid, info.kernel_id) == (self.pid, self.kernel_id)


@pytest.fixture
def agent(make_registry: Callable[..., BlockingRegistry]) -> Agent:
    registry = make_registry(expose=True)
    registry.execute(TABLE, owner=OWNER)
    (info,) = registry.kernels()
    return Agent(registry, info.pid, info.kernel_id)


def test_a_person_works_in_the_agents_session_and_can_harm_nothing(
    agent: Agent, lab: Lab, window: Window
) -> None:
    kernel_id = agent.kernel_id
    expect(window.panel.get_by_text(LIVE)).to_be_visible()
    expect(window.session(kernel_id)).to_be_visible()
    window.picture("running-panel")

    window.attach(kernel_id)
    window.run(LOOK)
    expect(window.output).to_have_text("Oslo 12\nLima 25\nPune 5\n")
    expect(window.status).to_contain_text("| Idle")
    window.picture("attached-notebook")
    result = agent.registry.execute("checked", owner=OWNER)
    assert (result.value, result.kernel.foreign_cells) == ("42", 1)

    window.kernel_menu("Restart Kernel…")
    with window.asks("POST", f"/api/kernels/{kernel_id[:8]}", answered=500):
        window.dialog.get_by_role("button", name="Confirm Kernel Restart").click()
    expect(window.dialog).to_have_count(0)
    assert psutil.Process(lab.process.pid).children() == []  # it would take over the kernel's sockets
    assert agent.is_unharmed()
    window.run("checked, len(rows)  # after Restart")
    expect(window.output).to_have_text("(42, 3)")
    window.picture("restart-refused")
    assert "is not restarted: a live session of hermes_kernel" in lab.log.read_text()

    with window.asks("DELETE", "/api/sessions/", answered=204):
        window.kernel_menu("Shut Down Kernel")
    expect(window.notebook.locator(".jp-KernelName")).to_have_text("No Kernel")
    window.refresh()
    expect(window.session(kernel_id)).to_be_visible()
    assert agent.is_unharmed()

    with window.asks("DELETE", f"/api/kernels/{kernel_id[:8]}", answered=204):
        window.choose(window.session(kernel_id), "Shut Down Kernel")
    window.refresh()
    expect(window.session(kernel_id)).to_be_visible()
    assert agent.is_unharmed()

    assert lab.end() == 0
    assert agent.is_unharmed()


def test_sessions_that_begin_and_end_are_shown_as_they_are(agent: Agent, lab: Lab, window: Window) -> None:
    window.attach(agent.kernel_id)
    agent.registry.execute("1", owner="second")
    (second,) = (info for info in agent.registry.kernels() if info.kernel_id != agent.kernel_id)
    window.refresh()
    expect(window.session(second.kernel_id)).to_be_visible()
    agent.registry.close_owner(OWNER)
    window.refresh()
    expect(window.session(agent.kernel_id, "Untitled.ipynb")).to_have_count(0)
    expect(window.status).to_contain_text("| Disconnected")
    expect(window.session(second.kernel_id)).to_be_visible()
    agent.registry.close_owner("second")
    window.refresh()
    expect(window.panel.get_by_text(LIVE)).to_have_count(0)
    agent.registry.execute("1", owner="third")
    (third,) = agent.registry.kernels()
    window.refresh()
    expect(window.session(third.kernel_id)).to_be_visible()
    assert "Traceback" not in lab.log.read_text()


def test_interrupt_ends_a_persons_cell_and_not_the_agents(
    agent: Agent, window: Window, tmp_path: Path
) -> None:
    window.attach(agent.kernel_id)
    window.run("import time; print('begun')\nwhile True: time.sleep(0.01)")
    expect(window.output).to_have_text("begun\n")
    with window.asks("POST", "/interrupt", answered=204):
        window.kernel_menu("Interrupt Kernel")
    expect(window.output).to_contain_text("KeyboardInterrupt")
    window.run("checked = 42")
    expect(window.status).to_contain_text("| Idle")

    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    cell = (
        f"import pathlib, time; pathlib.Path({str(begun)!r}).touch()\n"
        f"while not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)"
    )
    with ThreadPoolExecutor() as pool:
        running = pool.submit(agent.registry.execute, cell, owner=OWNER)
        try:
            assert traces.eventually(begun.exists, within=START_WAIT)
            with window.asks("POST", "/interrupt", answered=409):
                window.kernel_menu("Interrupt Kernel")
        finally:
            may_end.touch()
        assert running.result().status is CellStatus.OK
    assert agent.is_unharmed()


def test_the_launcher_says_why_it_starts_no_live_session(agent: Agent, window: Window) -> None:
    window.page.locator(".jp-LauncherCard").filter(has_text=LIVE).first.click()
    expect(window.dialog).to_contain_text(REFUSED)
    (info,) = agent.registry.kernels()
    assert info.pid == agent.pid


def test_a_refused_start_does_not_keep_the_server_from_ending(agent: Agent, lab: Lab) -> None:
    asked = urllib.request.Request(
        lab.url.replace("/lab?", "/api/kernels?"),
        method="POST",
        data=json.dumps({"name": "hermes-live"}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"token {lab.url.split('=')[1]}"},
    )
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(asked, timeout=START_WAIT)
    assert lab.end() == 0
    assert agent.registry.execute("len(rows)", owner=OWNER).value == "3"
