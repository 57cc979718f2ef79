"""``ps`` and ``kill``: what other processes see of a registry's kernels, and do to them."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hermes_kernel import BlockingRegistry, Loss, Owner
from hermes_kernel.process.zygote import start_ticks

from .command import hermes, invoked

Make = Callable[..., BlockingRegistry]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def kernels() -> list[dict[str, object]]:
    told = invoked("ps", "--json").out
    found: list[dict[str, object]] = json.loads(told, parse_constant=no_constant)
    return found


def lease_of(registry: BlockingRegistry) -> Path:
    (info,) = registry.kernels()
    assert info.connection_file is not None
    return Path(info.connection_file).parent.with_suffix(".lease")


def test_without_a_kernel_there_is_nothing_to_show_or_end(leaves_nothing: None) -> None:
    assert invoked("ps").out == "There is no live kernel.\n"
    assert kernels() == []
    ended = invoked("kill", "--all")
    assert (ended.code, ended.out) == (0, "There is no live kernel.\n")


def test_live_kernels_are_shown_with_their_owners(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="first")
    registry.execute("1", owner=Owner("second", child="child", scope="work"), cwd="/")
    infos = {info.kernel_id: info for info in registry.kernels()}
    shown = kernels()
    assert [each["owner"] for each in shown] == ["first", "second/child@work"]
    for each in shown:
        info = infos[str(each["kernel_id"])]
        assert (each["pid"], each["isolation"], each["python"]) == (info.pid, "none", info.python)
        assert each["host"] == os.getpid()
        assert psutil.pid_exists(int(str(each["pid"])))
    assert shown[1]["cwd"] == "/"
    headings, *rows = invoked("ps").out.splitlines()
    assert headings.split()[:3] == ["OWNER", "KERNEL", "PID"]
    assert [row.split()[0] for row in rows] == ["first", "second/child@work"]


def test_a_killed_kernel_is_gone_with_its_tree_and_its_owner_is_told(registry: BlockingRegistry) -> None:
    started = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True).pid"
    child = int(registry.execute(started, owner="first").value or 0)
    registry.execute("x = 1", owner="second")
    ended = invoked("kill", "first", "--json")
    (told,) = json.loads(ended.out)
    assert (ended.code, told["owner"], told["ended"]) == (0, "first", True)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert [each["owner"] for each in kernels()] == ["second"]
    assert registry.execute("1", owner="first").kernel.lost is Loss.DIED
    assert registry.execute("x", owner="second").value == "1"


@pytest.mark.parametrize("name", ["conversation", "conversation/child", "id"])
def test_a_kernel_is_named_by_its_session_its_owner_or_its_id(registry: BlockingRegistry, name: str) -> None:
    registry.execute("1", owner=Owner("conversation", child="child"))
    (info,) = registry.kernels()
    ended = invoked("kill", info.kernel_id[:8] if name == "id" else name)
    assert ended.code == 0
    assert ended.out.endswith("ended\n")
    assert kernels() == []


def test_all_can_be_ended_at_once(registry: BlockingRegistry) -> None:
    for owner in ("a", "b", "c"):
        registry.execute("1", owner=owner)
    ended = invoked("kill", "--all")
    assert (ended.code, ended.out.count("ended")) == (0, 3)
    assert kernels() == []


def test_a_name_that_no_kernel_has_is_an_error_and_ends_nothing(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="a")
    refused = invoked("kill", "a", "nobody")
    assert refused.code == 2
    assert "no live kernel is called 'nobody'" in refused.err
    assert len(kernels()) == 1
    for arguments in ((), ("a", "--all")):
        assert invoked("kill", *arguments).code == 2


@pytest.mark.parametrize(
    "started", [10**400, math.nan, math.inf, -1, True, "now", 1e300], ids=lambda value: str(value)[:8]
)
def test_what_a_cell_writes_about_itself_is_shown_and_not_obeyed(
    registry: BlockingRegistry, started: object
) -> None:
    """The session file tells; whom to signal comes from the lease and is checked against the processes."""
    registry.execute("1", owner="a")
    (info,) = registry.kernels()
    assert info.connection_file is not None
    file = Path(info.connection_file).with_name("session.json")
    told = json.loads(file.read_text())
    told |= {"pid": os.getpid(), "host": 1, "cwd": "/\x1b]0;x\x07red\n", "owner": {"session": "a\tb"}}
    file.write_text(json.dumps(told | {"started": started}))
    (shown,) = kernels()
    assert not {"\x1b", "\x07", "\n"} & set(str(shown["cwd"]))
    assert shown["started"] == 0.0
    ended = invoked("ps")
    assert (ended.code, "\x1b" in ended.out) == (0, False)
    assert invoked("kill", "--all").code == 0
    assert not kernels()


@pytest.mark.parametrize("field", ["started", "pid"])
def test_a_warden_that_is_not_the_recorded_one_is_not_signalled(
    registry: BlockingRegistry, field: str
) -> None:
    registry.execute("1", owner="a")
    lease = lease_of(registry)
    record = json.loads(lease.read_text())
    record["warden"][field] = os.getpid() if field == "pid" else 1
    lease.write_text(json.dumps(record))
    ended = invoked("kill", "--all")
    assert (ended.code, "could not be ended" in ended.out) == (1, True)
    assert registry.execute("6 * 7", owner="a").kernel.reused


def a_stranger() -> list[str]:
    return [sys.executable, "-c", "print(flush=True); input()"]


@pytest.mark.parametrize("kernel", ["gone", "as it is"])
def test_a_process_that_is_no_warden_is_not_signalled(registry: BlockingRegistry, kernel: str) -> None:
    registry.execute("1", owner="a")
    lease = lease_of(registry)
    record = json.loads(lease.read_text())
    with subprocess.Popen(a_stranger(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdin is not None
        stranger.stdout.readline()
        warden = {"pid": stranger.pid, "started": start_ticks(stranger.pid)}
        gone = {"kernel": {"pid": 0, "started": 0}} if kernel == "gone" else {}
        lease.write_text(json.dumps({**record, "warden": warden, **gone}))
        ended = invoked("kill", "a")
        stranger.stdin.write(b"\n")
        stranger.stdin.close()
        assert stranger.wait(30) == 0
    assert (ended.code, "could not be ended" in ended.out) == (1, True)
    assert registry.execute("6 * 7", owner="a").kernel.reused


def test_a_warden_whose_kernel_is_gone_is_ended(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="a")
    lease = lease_of(registry)
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "kernel": {"pid": 0, "started": 0}}))
    assert invoked("kill", "a").code == 0
    assert kernels() == []


@pytest.mark.skipif(sys.platform != "linux", reason="it asks /proc for the descriptors of a process")
def test_a_zygote_that_a_lease_names_as_its_warden_is_not_signalled(registry: BlockingRegistry) -> None:
    """It looks like a warden, and shows its descriptors: the lease is not among them."""
    registry.execute("1", owner="a")
    lease = lease_of(registry)
    record = json.loads(lease.read_text())
    zygote = psutil.Process(record["warden"]["pid"]).parent()
    assert zygote is not None
    warden = {"pid": zygote.pid, "started": start_ticks(zygote.pid)}
    lease.write_text(json.dumps({**record, "warden": warden}))
    assert invoked("kill", "a").code == 1
    assert registry.execute("6 * 7", owner="a").kernel.reused


def test_a_name_that_the_terminal_cannot_show_is_shown_with_escapes(registry: BlockingRegistry) -> None:
    registry.execute("1", owner="Zoë \N{SNOWMAN}")
    for arguments in (("ps",), ("kill", "--all")):
        ended = hermes(*arguments, PYTHONIOENCODING="latin-1:strict", encoding="latin-1")
        assert (ended.code, ended.err) == (0, "")
        assert "Zoë \\u2603" in ended.out
