"""What a model reads of a cell: complete, bounded, true."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_kernel import BlockingRegistry, CellEvent, CellResult, CellStatus, Limits

from .test_cells_basics import still_answers

OK = CellStatus.OK
MakeRegistry = Callable[..., BlockingRegistry]
KEY = "sk-hold0123456789abcdefghij"
GITHUB = "ghp_" + "a1B2c3D4e5" * 3 + "F6g7H8"


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    return tmp_path / "spill"


@pytest.fixture
def registry(make_registry: MakeRegistry, spill: Path) -> BlockingRegistry:
    return make_registry(limits=Limits(spill_dir=str(spill)))


def spilled(result: CellResult) -> str:
    assert result.truncation.spill_path is not None
    path = Path(result.truncation.spill_path)
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text(encoding="utf-8")


def cut_rightly(result: CellResult, total: int) -> None:
    """The counts are true, the text is within its budget and says how much there was."""
    payload = json.loads(result.to_json())
    assert (result.truncation.bytes_total, result.truncation.truncated) == (total, True)
    assert result.truncation.bytes_shown <= 50_000
    assert len(result.text.encode()) <= 51_000
    assert f"{total:,} bytes" in result.text
    assert payload["stdout_truncated"] is True
    assert payload["stdout_bytes_total"] == total
    assert payload["stdout_bytes_captured"] + payload["stdout_bytes_omitted"] == total
    assert "execute_code stdout was truncated" in payload["warning"]
    assert payload["stdout_spill_path"] == result.truncation.spill_path
    assert "TRUNCATED" in payload["output"]


@pytest.mark.parametrize("end", ["\\n", ""])
def test_a_line_of_a_million_characters(registry: BlockingRegistry, end: str) -> None:
    result = registry.execute(f"print('z' * 1_000_000, end='{end}')", owner="a", timeout=10)
    assert result.status is OK
    total = 1_000_000 + len(end) // 2
    cut_rightly(result, total)
    assert result.text.startswith("zzz")
    assert result.text.rstrip().endswith("zzz")
    assert spilled(result) == "z" * 1_000_000 + "\n" * (len(end) // 2)
    still_answers(registry)


def test_two_hundred_thousand_lines(registry: BlockingRegistry) -> None:
    result = registry.execute("for i in range(200000): print(i)", owner="a", timeout=20)
    assert result.status is OK
    assert result.duration < 10
    whole = "".join(f"{n}\n" for n in range(200_000))
    cut_rightly(result, len(whole))
    assert result.text.startswith("0\n1\n2\n")
    assert result.text.rstrip().endswith("\n199999")
    assert spilled(result) == whole
    again = registry.execute("for i in range(200000): print(i)", owner="a", timeout=20)
    assert again.truncation.spill_path == result.truncation.spill_path


def test_a_million_lines_and_more_than_a_million_characters_are_counted_to_the_last(
    registry: BlockingRegistry,
) -> None:
    lines = registry.execute("print('\\n'.join(map(str, range(1_000_000))))", owner="a", timeout=60)
    cut_rightly(lines, 6_888_890)
    assert lines.text.startswith("0\n1\n2\n")
    assert lines.text.rstrip().endswith("\n999999")
    wide = registry.execute("print('w' * 1_500_000)", owner="a", timeout=60)
    cut_rightly(wide, 1_500_001)
    assert len(spilled(wide)) == 1_500_001
    still_answers(registry)


def test_a_file_of_what_was_cut_is_masked_and_outlives_its_kernel_and_its_registry(
    make_registry: MakeRegistry, spill: Path
) -> None:
    registry = make_registry(limits=Limits(spill_dir=str(spill)))
    code = f"print({GITHUB!r}); print('x' * 1_200_000); print('end')"
    result = registry.execute(code, owner="a", timeout=20)
    assert GITHUB not in result.to_json()
    registry.execute("import os; os._exit(1)", owner="a")
    registry.close_owner("a")
    registry.close()
    kept = spilled(result)
    assert GITHUB not in kept
    assert kept.startswith(GITHUB[:3])
    assert kept.endswith("xxx\nend\n")
    assert kept.count("x") >= 1_200_000


def test_a_file_that_cannot_hold_all_says_how_much_it_holds(make_registry: MakeRegistry, spill: Path) -> None:
    registry = make_registry(limits=Limits(spill_dir=str(spill), spill_bytes=100_000))
    result = registry.execute("for i in range(200000): print(i)", owner="a", timeout=20)
    text = spilled(result)
    assert len(text.encode()) < 101_000
    assert text.startswith("0\n1\n")
    assert text.endswith("199999\n")
    assert "100,000 of 1,288,890" in result.text
    without = make_registry(limits=Limits(spill_dir=str(spill / "no"), spill_bytes=0))
    result = without.execute("print('z' * 1_000_000)", owner="a")
    assert result.truncation.spill_path is None
    assert result.truncation.truncated
    assert not (spill / "no").exists()


def test_a_place_where_nothing_can_be_written_costs_the_file_alone(
    make_registry: MakeRegistry, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    registry = make_registry(limits=Limits(spill_dir=str(tmp_path / "file" / "below")))
    result = registry.execute("print('z' * 1_000_000)", owner="a")
    assert (result.status, result.truncation.spill_path) == (OK, None)
    assert result.truncation.bytes_total == 1_000_001


def test_the_budget_is_the_callers(make_registry: MakeRegistry) -> None:
    registry = make_registry(limits=Limits(output_bytes=1000, spill_bytes=0))
    result = registry.execute("print('é' * 5000); 'v' * 5000", owner="a")
    assert len(result.text.encode()) <= 2000
    assert result.truncation.bytes_total == 10_001
    error = registry.execute("print('z' * 5000); raise ValueError('the reason ' + 'y' * 50_000)", owner="a")
    assert len(error.text.encode()) <= 2000
    assert "ValueError: the reason" in error.text


def test_an_error_is_always_inside_the_budget(registry: BlockingRegistry) -> None:
    result = registry.execute("print('z' * 1_000_000)\nraise LookupError('the reason')", owner="a")
    assert result.text.rstrip().endswith("LookupError: the reason")
    assert len(result.text.encode()) <= 51_000
    deep = registry.execute("def f(n): return f(n + 1)\nf(0)", owner="a")
    assert deep.error is not None
    assert "RecursionError" in deep.text
    assert "more times" in deep.error.traceback
    assert len(deep.error.traceback.encode()) <= 10_500


def test_the_standard_error_has_a_budget_of_its_own(registry: BlockingRegistry) -> None:
    for size in (60_000, 900_000):
        code = f"import sys; sys.stderr.write('head' + 'w' * {size} + 'tail'); print('out')"
        result = registry.execute(code, owner="a")
        assert result.truncation.truncated
        assert result.truncation.bytes_total == size + 8 + 4
        assert len(result.stderr.encode()) < 10_500
        assert result.stderr.startswith("headww")
        assert result.stderr.rstrip().endswith("wwtail")
        assert len(result.text.encode()) < 11_000
        assert "out\n" in result.text
        assert spilled(result).count("w") == size


def test_a_bar_of_progress_is_its_last_frame(registry: BlockingRegistry) -> None:
    code = (
        "import sys\nfor i in range(50):\n    sys.stderr.write('\\r%d/50' % (i+1)); sys.stderr.flush()\n"
        "print('\\ndone')"
    )
    result = registry.execute(code, owner="a")
    assert result.text.count("50/50") == 1
    assert "1/50\n" not in result.text.replace("50/50", "")
    assert re.search(r"(?<!\d)1/50", result.text) is None
    assert result.text.count("done") == 1
    assert not result.truncation.truncated
    long = registry.execute("for i in range(100_000): print(f'\\r{i:>7} of 100000', end='')", owner="a")
    assert long.text == "  99999 of 100000"
    assert (long.truncation.truncated, long.truncation.spill_path) == (False, None)
    assert json.loads(long.to_json())["stdout_truncated"] is False


def test_what_was_cleared_or_updated_is_not_read(registry: BlockingRegistry) -> None:
    code = (
        "from IPython.display import display, clear_output\n"
        "h = display('one', display_id=True); h.update('two'); print('gone'){}; print('kept')"
    )
    assert registry.execute(code.format("; clear_output()"), owner="a").text == "kept\n"
    assert registry.execute(code.format(""), owner="a").text == "'two'\ngone\nkept\n"


def test_what_a_terminal_obeys_is_not_read(registry: BlockingRegistry) -> None:
    code = r"""
print('\x1b[31mred\x1b[0m \x1b]8;;https://example.org\x07link\x1b]8;;\x07 \x1b]52;c;aGk=\x07'
      'a\x00b\x07c \x9b1mbold \u202eback')
import os; os.write(1, b'\x1b[3'); os.write(1, b'2mgreen\x1b[0m\n')
'\x1b[1mvalue'"""
    result = registry.execute(code, owner="a")
    assert "red link abc bold back\n" in result.text
    assert "green\n" in result.text
    assert (
        re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", result.text + result.stdout + str(result.value))
        is None
    )


@pytest.mark.parametrize("code", [
    "print('\\u20ac' * 400_000)",
    "import os\nfor b in ('\\u20ac' * 3000).encode(): os.write(1, bytes([b]))",
    "import sys\nfor b in ('\\u20ac' * 3000).encode(): sys.stdout.buffer.write(bytes([b]))",
], ids=["print", "os.write", "buffer"])  # fmt: skip
def test_a_character_that_is_cut_in_two_is_whole(registry: BlockingRegistry, code: str) -> None:
    result = registry.execute(code, owner="a")
    assert set(re.sub(r"\[\.\.\..*\.\.\.\]", "", result.text).strip().replace("\n", "")) == {"€"}
    assert result.truncation.bytes_total in (9000, 1_200_001)


def test_bytes_that_are_no_text_are_counted_as_they_were(registry: BlockingRegistry) -> None:
    result = registry.execute("import os; os.write(1, b'\\xff\\xfe raw\\n'); print('after')", owner="a")
    assert result.text.splitlines()[1] == "after"
    assert " raw" in result.text
    assert result.truncation.bytes_total == 7 + 6


def test_all_lines_of_forty_cells_arrive(registry: BlockingRegistry) -> None:
    whole = "".join(f"{n}\n" for n in range(200))
    for _ in range(40):
        assert registry.execute("for i in range(200): print(i)", owner="a").stdout == whole


def test_the_streams_keep_their_order(registry: BlockingRegistry) -> None:
    code = (
        "import os, subprocess, sys\nfor n in range(20):\n"
        "    print('p', n); print('e', n, file=sys.stderr); os.write(1, b'w %d\\n' % n)\n"
        "    subprocess.run(['echo', 's', str(n)])"
    )
    result = registry.execute(code, owner="a", timeout=20)
    assert result.text == "".join(f"p {n}\ne {n}\nw {n}\ns {n}\n" for n in range(20))


def test_prints_and_raw_writes_keep_their_order(registry: BlockingRegistry) -> None:
    code = "import os\nfor n in range(300): print('p', n); os.write({}, b'r %d\\n' % n)"
    whole = "".join(f"p {n}\nr {n}\n" for n in range(300))
    for descriptor in (1, 2):
        assert registry.execute(code.format(descriptor), owner="a").text == whole


LATE = {
    "thread": "import threading\ngo = threading.Event()\n"
    "def f(): go.wait(); print('LATE')\nlate = threading.Thread(target=f); late.start(); print('cell1')",
    "pool": "import concurrent.futures, threading\ngo = threading.Event()\n"
    "pool = concurrent.futures.ThreadPoolExecutor()\n"
    "def f(): go.wait(); print('LATE')\nlate = pool.submit(f); print('cell1')",
    "task": "import asyncio\ngo = asyncio.Event()\nasync def f():\n    await go.wait(); print('LATE')\n"
    "late = asyncio.create_task(f()); print('cell1')",
}
LET_IT = {"thread": "late.join()", "pool": "late.result()", "task": "await late"}


@pytest.mark.parametrize("how", LATE)
def test_what_comes_late_is_said_with_its_cell(registry: BlockingRegistry, how: str) -> None:
    registry.execute("x = 1", owner="a")
    first = registry.execute(LATE[how], owner="a")
    assert first.text == "cell1\n"
    second = registry.execute(f"go.set(); {LET_IT[how]}; print('cell2')", owner="a")
    assert second.text == "cell2\n"
    ((count, text),) = [(late.execution_count, late.text) for late in second.late_output]
    assert (count, text) == (2, "LATE\n")
    assert json.loads(second.to_json())["late_output"] == [{"execution_count": 2, "text": "LATE\n"}]
    assert registry.execute("print('cell3')", owner="a").late_output == ()


def test_much_that_comes_late_is_not_lost(registry: BlockingRegistry) -> None:
    first = LATE["thread"].replace("'LATE'", "'L' * 120_000")
    registry.execute(first, owner="a")
    second = registry.execute("go.set(); late.join(); print('cell2')", owner="a")
    (late,) = second.late_output
    assert "of 120,001 bytes" in late.text
    assert late.text.endswith("LLL\n")


def test_a_secret_of_the_host_is_in_no_part_of_a_result(
    make_registry: MakeRegistry, monkeypatch: pytest.MonkeyPatch, spill: Path
) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", "correct-Horse7-battery")
    registry = make_registry(limits=Limits(spill_dir=str(spill)), secrets=["hunter2-is-mine"])
    for secret in (KEY, GITHUB, "correct-Horse7-battery", "hunter2-is-mine"):
        parts = [secret[:9], secret[9:]]
        ways = [
            f"print({secret!r})",
            f"import sys; print({secret!r}, file=sys.stderr)",
            f"s = {parts!r}; ''.join(s)",
            f"s = {parts!r}; raise ValueError(''.join(s))",
            f"s = {parts!r}; print(s[0] + '\\r' + s[1])",
            f"s = {parts!r}; print(s[0] + '\\x1b[0m' + s[1])",
            f"s = {parts!r}; print('\\u200b'.join(''.join(s)))",
            f"import sys\ns = {parts!r}; sys.stdout.write(s[0]); sys.stdout.flush(); sys.stderr.write(s[1])",
            f"import os\nfor c in {secret!r}: os.write(1, c.encode())",
            f"print('x' * 30_000, {secret!r}, 'y' * 60_000)",
            f"print('x' * 19_990 + ' ' + {secret!r} + ' ' + 'y' * 60_000)",
            f"from IPython.display import display, HTML, JSON; s = ''.join({parts!r}); "
            "display(HTML(f'<b>{s}</b>'), JSON({'k': s}), s)",
            f"import os; os.write(2, {secret!r}.encode()); os._exit(1)",
            f"import os\nfor s in {parts!r}: os.write(2, b'\\x1b[1m' + s.encode())\nos._exit(1)",
        ]
        for code in ways:
            events: list[CellEvent] = []
            result = registry.execute(code, owner="a", on_event=events.append)
            assert "\x1b" not in result.text + result.to_dict().get("error", ""), code
            everything = [result.to_json(), json.dumps(result.to_notebook_outputs()), repr(result)]
            if "sys.stderr.write(s[1])" not in code:
                everything.append(repr(events))
            if result.truncation.spill_path is not None:
                everything.append(spilled(result))
            assert not [part for part in everything if secret in part.replace("\u200b", "")], code
    still_answers(registry)


def test_code_is_never_masked_and_settings_are_left_alone(registry: BlockingRegistry) -> None:
    assert (
        registry.execute("k='sk-'+'a'*30; len('sk-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')", owner="a").value == "33"
    )
    settings = (
        "TOKENIZERS_PARALLELISM=false MAX_TOKENS=4096 KEYBOARD_LAYOUT=us XAUTHORITY=/home/ann/.Xauthority "
        "GIT_AUTHOR_NAME=Ann"
    )
    assert registry.execute(f"print({settings!r})", owner="a").stdout == settings + "\n"


def test_the_host_may_clean_more_or_instead(make_registry: MakeRegistry) -> None:
    more = make_registry(clean=lambda text: text.replace("private", "[gone]"))
    result = more.execute(f"print('a private {KEY}')", owner="a")
    assert "[gone]" in result.text
    assert KEY not in result.text
    instead = make_registry(clean=lambda text, mask: text.replace("private", "[gone]"))
    assert instead.execute(f"print('a private {KEY}')", owner="a").text == f"a [gone] {KEY}\n"
    for broken in (lambda text: 1 / 0, lambda text: None):
        failing = make_registry(clean=broken)
        result = failing.execute(f"print('a private {KEY}')", owner="a")
        assert (result.status, KEY in result.text, "private" in result.text) == (OK, False, True)


def test_a_cell_that_shows_nothing_is_told_so(registry: BlockingRegistry) -> None:
    silent = registry.execute("x = 1", owner="a")
    assert silent.text == ""
    assert "showed nothing" in (silent.warning or "")
    assert registry.execute("x", owner="a").warning is None


HINTS = {
    "import notinstalled_": "not installed",
    "from hermes_tools import nothing": "no tools",
    "'text'['key']": "parsed results",
    "import asyncio\nasync def m(): return 5\nasyncio.run(m())": "await main()",
}


@pytest.mark.parametrize("code", HINTS)
def test_a_known_mistake_has_a_hint(registry: BlockingRegistry, code: str) -> None:
    result = registry.execute(code, owner="a")
    if result.status is OK:  # asyncio.run works in this version
        return
    assert HINTS[code] in (result.hint or ""), result.text
    assert json.loads(result.to_json())["hint"] == result.hint
    assert registry.execute("1/0", owner="a").hint is None


@pytest.fixture
def memory() -> Iterator[Callable[[], float]]:
    """How far above its beginning this process's memory has been at most, in MB."""
    me = psutil.Process()
    begin = me.memory_info().rss
    most = [begin]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], me.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()

    def above() -> float:
        print(f"{(most[0] - begin) / 1e6:.0f} MB")
        return (most[0] - begin) / 1e6

    yield above
    over.set()
    watching.join()


GIGABYTE = {
    "print": "for _ in range(1000): print('p' * 999_999)",
    "os.write": "import os\nb = b'w' * 100_000\nfor _ in range(10_000):\n    n = 0\n"
    "    while n < len(b): n += os.write(1, b[n:])",
    "subprocess": "import subprocess; subprocess.run(['head', '-c', '1000000000', '/dev/zero'])",
}


@pytest.mark.parametrize("how", GIGABYTE)
def test_a_gigabyte_costs_the_host_little_and_is_counted(
    registry: BlockingRegistry, memory: Callable[[], float], how: str
) -> None:
    registry.execute("1", owner="a")
    result = registry.execute(GIGABYTE[how], owner="a", timeout=100)
    assert result.status is OK, result.message
    assert result.truncation.bytes_total == 1_000_000_000
    assert len(result.text.encode()) <= 51_000
    assert memory() < 64
    still_answers(registry)


def test_a_gigabyte_of_displays_costs_the_host_little(
    registry: BlockingRegistry, memory: Callable[[], float]
) -> None:
    registry.execute("1", owner="a")
    code = "from IPython.display import display\nfor n in range(50_000): display('d' * 20_000)\nprint('end')"
    result = registry.execute(code, owner="a", timeout=110)
    assert result.status is OK, result.message
    assert result.text.rstrip().endswith("end") or "end" in result.stdout
    assert len(result.text.encode()) <= 51_000
    assert "displays" in (result.warning or "")
    assert memory() < 64
    still_answers(registry)


def test_a_host_that_stands_still_during_a_flood_loses_nothing(
    registry: BlockingRegistry, spill: Path
) -> None:
    """The whole host is stopped for four seconds, by a child of the cell, and woken again."""
    code = f"""
import subprocess, sys
stop = "import os, time, signal; input(); os.kill({os.getpid()}, signal.SIGSTOP); print(flush=True); "
stop += "time.sleep(4); os.kill({os.getpid()}, signal.SIGCONT)"
child = subprocess.Popen([sys.executable, "-c", stop], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for n in range(40_000):
    print(n, flush=True)
    if n == 5_000:
        child.stdin.write(b"\\n"); child.stdin.flush(); child.stdout.readline()
child.wait()
print('end')"""
    result = registry.execute(code, owner="a", timeout=60)
    whole = "".join(f"{n}\n" for n in range(40_000)) + "end\n"
    assert result.status is OK
    assert result.truncation.bytes_total == len(whole)
    assert spilled(result) == whole
    still_answers(registry)


def test_events_tell_of_text_and_displays_and_hold_nothing_up(registry: BlockingRegistry) -> None:
    events: list[Any] = []
    code = "from IPython.display import display\nprint('a'); display('b'); print('c'); 4"
    registry.execute(code, owner="a", on_event=events.append)
    assert [type(event).__name__ for event in events] == ["StreamText", "Display", "StreamText", "Display"]
    assert "".join(event.text for event in events if hasattr(event, "text")) == "a\nc\n"
    waiting = threading.Event()
    began = time.monotonic()
    result = registry.execute(
        "for i in range(200_000): print(i)", owner="a", on_event=lambda _: waiting.wait(9)
    )
    assert result.status is OK
    assert time.monotonic() - began < 9
    waiting.set()


def test_a_cell_that_dies_and_one_that_is_cut_keep_their_end(registry: BlockingRegistry) -> None:
    died = registry.execute(
        f"import os, signal\nfor i in range(300_000): print(i)\nos.kill(os.getpid(), {int(signal.SIGKILL)})",
        owner="a",
        timeout=20,
    )
    assert died.status is CellStatus.DIED
    assert died.text.rstrip().endswith("299999")
    assert died.truncation.bytes_total == sum(len(f"{n}\n") for n in range(300_000))
    cut = registry.execute(
        "import time\nfor i in range(300_000): print(i)\ntime.sleep(60)", owner="a", timeout=8
    )
    assert cut.status is CellStatus.TIMED_OUT
    assert cut.text.rstrip().endswith("299999")


def test_what_a_cell_leaves_running_is_named_once(registry: BlockingRegistry) -> None:
    code = """
import subprocess, threading
child = subprocess.Popen(["sleep", "100"])
stop = threading.Event()
thread = threading.Thread(target=stop.wait, name="waits")
thread.start()"""
    result = registry.execute(code, owner="a")
    pid = registry.execute("child.pid", owner="a").value
    assert set(result.kernel.leftovers) == {"thread waits", f"process {pid} sleep"}
    assert json.loads(result.to_json())["kernel"]["leftovers"] == list(result.kernel.leftovers)
    ended = registry.execute("stop.set(); thread.join(); child.kill(); child.wait()", owner="a")
    assert ended.kernel.leftovers == ()
    done = (
        "import subprocess, threading; subprocess.run(['true'])\n"
        "thread = threading.Thread(target=int); thread.start(); thread.join()"
    )
    assert registry.execute(done, owner="a").kernel.leftovers == ()
