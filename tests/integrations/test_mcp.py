"""The MCP server, as its clients meet it: a process, and what goes over its standard streams."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .. import traces

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from hermes_kernel.cell.events import StreamText
from hermes_kernel.integrations.mcp import PROGRESS_TEXT, CodeArguments, _Progress, tool_list

from .client import WAIT, cancelled, connected, environment, images_of, story, text_of
from .raw import raw

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SECRET = "kq83hf72hvbx91lzp0w7"
SLEEPER = """
import os, subprocess, sys, time
kept = 1
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True)
print(f"pid {child.pid} begun", flush=True)
time.sleep(600)
"""
IMAGE = """
import base64, zlib, struct
from IPython.display import Image, display
def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
png = (b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
       + chunk(b"IDAT", zlib.compress(b"\\0\\xff\\0\\0")) + chunk(b"IEND", b""))
print("an image:")
display(Image(png))
"""


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """What the server says on its standard error."""
    return tmp_path / "said"


def pid_of(written: str) -> int:
    words = written.split()
    return int(words[words.index("pid") + 1])


# -- what a client sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@story
async def test_state_stays_from_call_to_call_and_a_result_has_its_structure(said: Path, mode: str) -> None:
    async with connected(said, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["execute_code", "reset", "list_kernels"]
        assert set(tools["execute_code"].input_schema["properties"]) == {"code", "reset", "timeout"}
        await client.run("x = 40")
        result = await client.run("print('written'); x + 2")
        assert not result.is_error
        assert text_of(result) == "written\n42"
        structured = result.structured_content
        assert structured is not None
        assert (structured["status"], structured["output"]) == ("success", "written\n42")
        assert structured["kernel"]["reused"] is True
        assert structured["kernel"]["execution_count"] == 2
        assert structured["stdout_bytes_total"] == len("written\n")
    assert said.read_text() == ""


@story
async def test_a_failed_cell_is_an_error_with_its_traceback_and_state_stays(said: Path) -> None:
    async with connected(said) as client:
        result = await client.run("x = 1\n1 / 0")
        assert result.is_error
        assert "ZeroDivisionError: division by zero" in text_of(result)
        assert "<cell 1>" in text_of(result)
        assert text_of(await client.run("x")) == "1"
        ended = await client.run("import sys; sys.exit(3)")
        assert ended.is_error
        assert "exit code 3; state was lost" in text_of(ended)
        fine = await client.run("import sys; sys.exit()")
        assert not fine.is_error
        assert "(the cell before ended the kernel)" in text_of(fine)
        nothing = await client.run("y = 1")
        assert "no output" in text_of(nothing).lower() or "nothing" in text_of(nothing).lower()


@story
async def test_an_image_comes_as_one(said: Path) -> None:
    async with connected(said) as client:
        result = await client.run(IMAGE)
        (image,) = images_of(result)
        assert image.mime_type == "image/png"
        assert base64.b64decode(image.data, validate=True).startswith(b"\x89PNG")
        assert "an image:" in text_of(result)


@story
async def test_calls_at_once_run_one_after_another_and_each_has_its_own_answer(said: Path) -> None:
    async with connected(said) as client:
        await client.run("order = []")
        codes = [f"order.append({n}); import time; time.sleep(0.01); print('call', {n})" for n in range(20)]
        results = await asyncio.gather(*(client.run(code) for code in codes))
        assert [text_of(result) for result in results] == [f"call {n}" for n in range(20)]
        assert text_of(await client.run("order")) == str(list(range(20)))
        kernels = await client.call_tool("list_kernels", {})
        assert kernels.structured_content is not None
        (kernel,) = kernels.structured_content["kernels"]
        assert (kernel["state"], kernel["execution_count"]) == ("idle", 22)
        assert f"pid {kernel['pid']}" in text_of(kernels)


@story
async def test_two_clients_have_two_kernels(said: Path, tmp_path: Path) -> None:
    async with connected(said) as one, connected(tmp_path / "other") as other:
        await asyncio.gather(one.run("x = 1"), other.run("x = 2"))
        assert [text_of(await client.run("x")) for client in (one, other)] == ["1", "2"]
        await one.call_tool("reset", {})
        assert text_of(await other.run("x")) == "2"
        assert "NameError" in text_of(await one.run("x"))


@story
async def test_a_cell_that_runs_out_of_time_says_so_and_the_next_says_what_is_lost(said: Path) -> None:
    async with connected(said, "--timeout", "30") as client:
        await client.run("x = 1")
        result = await client.run("print('so far', flush=True)\nwhile True: pass", timeout=0.5)
        assert result.is_error
        assert "so far" in text_of(result)
        assert "longer than its limit of 0.5 s" in text_of(result)
        assert result.structured_content is not None
        assert result.structured_content["status"] == "timeout"
        after = await client.run("x")
        assert "(the cell before ran out of time)" in text_of(after)
        assert after.structured_content is not None
        assert after.structured_content["kernel"]["lost_reason"] == "timed_out"


@story
async def test_reset_ends_the_kernel_and_what_runs_on_it(said: Path) -> None:
    async with connected(said) as client:
        assert "There was no kernel." in text_of(await client.call_tool("reset", {}))
        call = await client.begin(SLEEPER)
        child = psutil.Process(pid_of(client.written))
        result = await client.call_tool("reset", {})
        assert result.structured_content == {"ended": 1}
        assert traces.eventually(lambda: traces.is_gone(child))
        interrupted = await call
        assert interrupted.is_error
        assert "begun" in text_of(interrupted)
        assert "state was lost" in text_of(interrupted)
        empty = await client.call_tool("list_kernels", {})
        assert empty.structured_content == {"kernels": []}
        after = await client.run("kept")
        assert "NameError" in text_of(after)
        assert "(the kernel was closed)" in text_of(after)
        fresh = await client.run("'kept' in dir()", reset=True)
        assert text_of(fresh).startswith("False")
        assert "(the kernel was reset)" in text_of(fresh)


@story
async def test_a_cell_is_heard_of_while_it_runs_without_secrets(said: Path) -> None:
    async with connected(said, MY_API_KEY=SECRET) as client:
        code = f"print('the key is ' + {SECRET[:9]!r} + {SECRET[9:]!r}, 'begun', flush=True); input_ = 1\n"
        call = await client.begin(code + "import time\ntime.sleep(600)")
        assert SECRET not in client.written
        assert "***" in client.written
        await cancelled(call)
        shown = await client.run(
            f"import os; print(os.environ.get('MY_API_KEY'), {SECRET[:9]!r} + {SECRET[9:]!r})"
        )
        assert text_of(shown).startswith("None ***")
        assert SECRET not in shown.model_dump_json()
    assert SECRET not in said.read_text()


@story
async def test_progress_that_is_too_long_has_its_end_and_says_how_much_is_missing() -> None:
    sent: list[str] = []

    class Session:
        async def report_progress(self, progress: float, message: str) -> None:
            sent.append(message)

    class Context:
        session = Session()

    progress = _Progress(Context())  # type: ignore[arg-type]
    for event in (StreamText("stdout", "a" * 5000), StreamText("stdout", "", 7), StreamText("stdout", "z")):
        progress.tell(event)
    telling = asyncio.create_task(progress.run())
    while not sent:
        await asyncio.sleep(0)
    telling.cancel()
    missing, text = sent[0].split("\n")
    assert missing == f"[… {5001 - PROGRESS_TEXT + 7} characters]"
    assert text == "a" * (PROGRESS_TEXT - 1) + "z"


@story
async def test_a_flood_is_cut_counted_and_no_line_is_too_long(said: Path) -> None:
    async with connected(said, HERMES_KERNEL_OUTPUT_BYTES="200000") as client:
        result = await client.run("for _ in range(200): print('e' * 50_000)")
        structured = result.structured_content
        assert structured is not None
        assert len(text_of(result)) > 120_000
        assert len(json.dumps(structured, ensure_ascii=False)) <= 100_000
        assert structured["stdout_bytes_total"] == 200 * 50_001
        assert structured["stdout_truncated"] is True
        assert "truncated" in structured["warning"]
        assert len(text_of(result).encode()) <= 202_000
        late = await client.run("print('after')")
        assert text_of(late) == "after"


# -- cancelling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@story
async def test_cancelling_ends_the_cell_with_its_tree_and_the_next_call_says_what_is_lost(
    said: Path, mode: str
) -> None:
    async with connected(said, mode=mode) as client:
        call = await client.begin(SLEEPER)
        child = psutil.Process(pid_of(client.written))
        await cancelled(call)
        assert await asyncio.to_thread(traces.eventually, lambda: traces.is_gone(child))
        after = await client.run("kept")
        assert "NameError" in text_of(after)
        assert "(the cell before was interrupted)" in text_of(after)


@story
async def test_a_cancelled_call_that_waits_touches_nothing(said: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with connected(said) as client:
        first = await client.begin(f"print('begun', flush=True)\nkept = open({str(fifo)!r}).read()")
        waiting = asyncio.create_task(client.run("kept = 'touched'"))
        last = asyncio.create_task(client.run("kept"))
        await client.call_tool("list_kernels", {})  # answered after the two have come in
        await cancelled(waiting)
        await client.call_tool("list_kernels", {})
        fifo.write_text("from the first")
        assert text_of(await first).startswith("begun")
        assert text_of(await last) == "'from the first'"
        assert text_of(await client.run("kept")) == "'from the first'"


@story
async def test_with_a_grace_a_cancelled_cell_keeps_its_state(said: Path) -> None:
    async with connected(said, HERMES_KERNEL_INTERRUPT_GRACE="10") as client:
        await client.run("x = 1")
        await cancelled(await client.begin("import time; print('begun', flush=True); time.sleep(600)"))
        assert text_of(await client.run("x")) == "1"


# -- what is wrong ----------------------------------------------------------------------------------------

WRONG = [
    ({}, "needs code"),
    ({"code": " \n"}, "not empty"),
    ({"code": 5}, "needs code"),
    ({"code": "1", "cod": 1}, "takes no 'cod'"),
    ({"code": "1", "reset": "yes"}, "reset='yes'"),
    ({"code": "1", "timeout": "5"}, "timeout='5'"),
    ({"code": "1", "timeout": True}, "timeout=True"),
    ({"code": "1", "timeout": -1}, "timeout=-1"),
    ({"code": "1", "timeout": 10**400}, "too large"),
]


@story
async def test_wrong_arguments_are_said_in_one_sentence_and_start_nothing(said: Path) -> None:
    async with connected(said) as client:
        for arguments, sentence in WRONG:
            result = await client.call_tool("execute_code", arguments)
            assert result.is_error, arguments
            assert sentence in text_of(result)
            assert "\n" not in text_of(result)
            assert result.structured_content is not None
            assert result.structured_content["status"] == "error"
        unknown = await client.call_tool("shell", {})
        assert unknown.is_error
        assert "unknown tool 'shell'; there are execute_code, reset and list_kernels" in text_of(unknown)
        assert (await client.call_tool("list_kernels", {})).structured_content == {"kernels": []}


@story
async def test_a_kernel_that_cannot_start_is_an_error_that_says_why(said: Path, tmp_path: Path) -> None:
    async with connected(said, "--python", tmp_path / "no-python") as client:
        result = await client.run("1")
        assert result.is_error
        assert "no-python" in text_of(result)
        assert (await client.call_tool("list_kernels", {})).structured_content == {"kernels": []}


def test_no_timeout_and_none_are_told_apart() -> None:
    assert CodeArguments.of({"code": "1"}).timeout is None
    assert CodeArguments.of({"code": "1", "timeout": 0}).timeout == 0
    assert tool_list(())[0].description == tool_list([])[0].description


def test_hostile_lines_disturb_nothing(said: Path) -> None:
    lines = [
        b"",
        b"\0\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"jsonrpc": "2.0"}',
        b'{"jsonrpc": "1.0", "id": 7, "method": "tools/list"}',
        b'{"jsonrpc": "2.0", "id": 7, "result": {}}',
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 99}}',
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": 5}',
        b'{"jsonrpc": "2.0", "method": "notifications/nothing"}',
        b'{"jsonrpc": "2.0", "id": 71, "method": "tools/call", "params": {"name": 5}}',
        b'{"jsonrpc": "2.0", "id": 72, "method": "tools/call", "params": {"name": "reset", "arguments": []}}',
        b'{"jsonrpc": "2.0", "id": 73, "method": "no/such"}',
        b'{"jsonrpc": "2.0", "id": 74, "method": "tools/call", "params": {"name": "execute_code", '
        b'"arguments": {"code": "\\ud800"}}}',
        b"x" * 3_000_000,
    ]
    with raw(said) as server:
        server.initialize()
        for line in lines:
            server.send(line)
        server.call(1, "6 * 7 #" + "é" * 200_000)
        answers = {}
        while 1 not in answers:
            message = server.line()
            answers[message.get("id")] = message
        assert answers[1]["result"]["content"][0]["text"] == "42"
        assert all("error" in answers[number] for number in (71, 72, 73))
        server.process.stdin.close()  # type: ignore[union-attr]
        assert server.ended() == 0
    assert "Traceback" not in said.read_text()


NOISE = """
import ctypes, os, subprocess, sys
os.write(1, b"raw\\n"); os.write(2, b"raw\\n")
os.system("echo shell; echo shell >&2")
subprocess.run(["sh", "-c", "echo child; echo {}"], check=True)
libc = ctypes.CDLL(None); libc.printf(b"libc\\n"); libc.fflush(None)
print('{"jsonrpc": "2.0", "id": 1, "result": {}}')
sys.stdout.buffer.write(b"\\xff\\xfe\\n")
sys.__stdout__.write("original\\n")
if os.fork() == 0:
    os.write(1, b"forked\\n"); os._exit(0)
os.wait()
"""


def test_nothing_but_the_protocol_is_ever_on_standard_output(said: Path) -> None:
    with raw(said) as server:
        server.initialize()
        server.call(1, NOISE)
        text = server.answer(1)["result"]["content"][0]["text"]
        for written in ("raw", "shell", "child", "libc", "original", "forked", '"id": 1'):
            assert written in text
        server.call(2, "1 / 0")
        server.answer(2)
        server.call(3, "import os; os.kill(os.getpid(), 9)")
        server.answer(3)
        server.process.stdin.close()  # type: ignore[union-attr]
        assert server.ended() == 0
        assert server.bytes.endswith(b"\n")
        for line in server.bytes.splitlines():
            assert json.loads(line)["jsonrpc"] == "2.0"


CLAIM = """
import os
from hermes_kernel.integrations.mcpstdio import claimed
with claimed() as (source, target):
    print("printed", flush=True)
    os.system("echo from a child; cat")
    os.write(target, b"wire:" + os.read(source, 100))
print("given back", flush=True)
"""


def test_what_the_server_itself_prints_goes_to_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", CLAIM], input=b"in", capture_output=True, check=True)
    assert done.stdout == b"wire:ingiven back\n"
    assert done.stderr == b"printed\nfrom a child\n"


def test_without_standard_streams_there_is_one_sentence(tmp_path: Path) -> None:
    for closed in ("<&-", ">&-"):
        done = subprocess.run(
            ["sh", "-c", f'"$0" -m hermes_kernel.cli mcp {closed}', sys.executable],
            input="" if closed == ">&-" else None,
            capture_output=True,
            encoding="utf-8",
            timeout=WAIT,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        assert "is closed" in done.stderr


# -- the end ----------------------------------------------------------------------------------------------

BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
while True:
    print("begun", "more" * 100, flush=True)
    time.sleep(0.001)
"""


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a cell"])
@pytest.mark.parametrize("how", ["closed", "gone", "SIGTERM", "SIGINT", "SIGHUP"])
def test_every_end_of_a_client_leaves_nothing(said: Path, how: str, busy: bool, runtime: Path) -> None:
    with raw(said) as server:
        server.initialize()
        server.call(1, "1")
        server.answer(1)
        if busy:
            server.call(2, BUSY)
            server.told("begun")
        assert traces.kernels_of(runtime)
        streams = (server.process.stdin, server.process.stdout)
        assert streams[0] is not None
        assert streams[1] is not None
        if how in ("closed", "gone"):
            if how == "gone":
                streams[1].close()
            streams[0].close()
        else:
            server.process.send_signal(getattr(signal, how))
        code = server.ended()
        assert code == (0 if how in ("closed", "gone") else 128 + getattr(signal, how))
        # At once: it is the server itself that has seen to it.
        assert not traces.marked_processes(str(runtime))
        assert traces.kernels_of(runtime) == []
    assert said.read_text() == ""


def test_a_client_that_reads_no_more_does_not_hold_the_server(said: Path) -> None:
    with raw(said) as server:
        server.initialize()
        server.call(1, BUSY)
        server.told("begun")
        for number in range(2, 2000):  # more answers than the pipe holds
            server.send({"id": number, "method": "tools/list"})
        server.process.stdin.close()  # type: ignore[union-attr]
        assert server.process.wait(WAIT) == 0


def test_a_client_that_cannot_be_written_to_has_gone(said: Path) -> None:
    with raw(said) as server:
        server.initialize()
        server.call(1, BUSY)
        server.told("begun")
        server.process.stdout.close()  # type: ignore[union-attr]
        assert server.process.wait(WAIT) == 0
    assert said.read_text() == ""


def test_a_second_signal_does_not_wait(said: Path) -> None:
    with raw(said) as server:
        server.initialize()
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() in (128 + signal.SIGTERM, -signal.SIGTERM)


def test_an_end_while_requests_come_is_a_clean_one(said: Path) -> None:
    with raw(said) as server:
        server.initialize()
        for number in range(1, 300):
            server.send({"id": number, "method": "tools/list"})
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 128 + signal.SIGTERM
    assert said.read_text() == ""


@pytest.mark.parametrize("attempt", range(4))  # what comes must come while nobody takes it any more
def test_a_client_that_sends_on_after_the_signal_disturbs_nothing(said: Path, attempt: int) -> None:
    with raw(said) as server:
        server.initialize()
        server.call(1, BUSY)
        server.told("begun")
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(BrokenPipeError):
            while server.process.poll() is None:
                server.send({"id": 2, "method": "tools/list"})
        assert server.ended() == 128 + signal.SIGTERM
    assert said.read_text() == ""


def test_a_signal_that_was_ignored_stays_ignored(said: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raw(said) as server:
            server.initialize()
            server.process.send_signal(signal.SIGHUP)
            server.call(1, "1")
            assert server.answer(1)["result"]["content"][0]["text"] == "1"
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_client_that_is_killed_leaves_nothing(said: Path, runtime: Path) -> None:
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.doomed", str(said)],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env=environment(),
        cwd=Path(__file__).parents[2],
    )
    with client:
        assert client.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in client.stdout.readline().split()]
        assert len(processes) == 3
        client.kill()
    assert traces.eventually(lambda: all(map(traces.is_gone, processes)))
    assert traces.eventually(lambda: traces.kernels_of(runtime) == [])
    assert "Traceback" not in said.read_text()


def test_a_server_that_is_killed_leaves_no_process(said: Path) -> None:
    with raw(said) as server:
        server.initialize()
        server.call(1, SLEEPER)
        message = server.line()
        child = psutil.Process(pid_of(message["params"]["message"]))
        server.process.kill()
        assert server.ended() == -signal.SIGKILL
    assert traces.eventually(lambda: traces.is_gone(child))


@story
async def test_a_server_that_is_killed_ends_the_calls_of_its_client(said: Path) -> None:
    async with connected(said) as client:
        call = await client.begin(SLEEPER)
        client.process.kill()
        await asyncio.wait({call})
        assert "Connection closed" in str(call.exception())


@story
async def test_many_calls_cost_the_server_no_descriptor_and_no_thread(said: Path) -> None:
    async with connected(said) as client:
        await asyncio.gather(*(client.run("1") for _ in range(10)))
        before = client.process.num_fds(), client.process.num_threads()
        for _ in range(10):
            await asyncio.gather(*(client.run("print(1)") for _ in range(10)))
            await cancelled(asyncio.create_task(client.run("1")))
        assert await asyncio.to_thread(
            traces.eventually,
            lambda: client.process.num_fds() <= before[0] and client.process.num_threads() <= before[1],
        ), (before, client.process.num_fds(), client.process.num_threads())
