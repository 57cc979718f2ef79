"""``ps`` and ``kill``: what other processes see of a registry's kernels, and do to them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hermes_kernel import BlockingRegistry, Loss, Owner

from .command import invoked

Make = Callable[..., BlockingRegistry]


def kernels() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(invoked("ps", "--json").out)
    return found


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


def test_what_a_cell_writes_about_itself_is_shown_and_not_obeyed(registry: BlockingRegistry) -> None:
    """The session file tells; whom to signal comes from the lease and is checked against the processes."""
    registry.execute("1", owner="a")
    (info,) = registry.kernels()
    assert info.connection_file is not None
    file = Path(info.connection_file).with_name("session.json")
    told = json.loads(file.read_text())
    told |= {"pid": os.getpid(), "host": 1, "cwd": "/\x1b[31mred\n", "owner": {"session": "a\tb"}}
    file.write_text(json.dumps(told))
    (shown,) = kernels()
    assert "\x1b" not in str(shown["cwd"])
    assert invoked("kill", "--all").code == 0
    assert not kernels()


@pytest.mark.parametrize("field", ["started", "pid"])
def test_a_warden_that_is_not_the_recorded_one_is_not_signalled(
    registry: BlockingRegistry, field: str
) -> None:
    registry.execute("1", owner="a")
    (info,) = registry.kernels()
    assert info.connection_file is not None
    lease = Path(info.connection_file).parent.with_suffix(".lease")
    record = json.loads(lease.read_text())
    record["warden"][field] = os.getpid() if field == "pid" else 1
    lease.write_text(json.dumps(record))
    ended = invoked("kill", "--all")
    assert (ended.code, "could not be ended" in ended.out) == (1, True)
    assert registry.execute("6 * 7", owner="a").kernel.reused
