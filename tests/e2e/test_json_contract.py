"""The JSON that an agent reads: its keys for every way a call can end, and its bounds."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    ConfigError,
    HermesKernelError,
    KernelStartError,
    Limits,
)

COMMON = {
    "status": str,
    "output": str,
    "exit_code": int,
    "tool_calls_made": int,
    "duration_seconds": float,
    "kernel": dict,
    "stdout_truncated": bool,
    "stdout_bytes_captured": int,
    "stdout_bytes_total": int,
    "stdout_bytes_omitted": int,
}
KERNEL = {"mode": str, "reused": bool, "execution_count": int, "state_reset": bool}
EXTRAS = {"error", "warning", "hint", "tool_errors", "stdout_spill_path", "late_output", "images"}
KERNEL_EXTRAS = {"ended", "state_lost", "lost_reason", "leftovers", "foreign_cells"}
LIMIT = 100_000


def read(text: str) -> dict[str, Any]:
    """Read a result as a strict consumer does, and check what holds for all of them."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert len(text) <= LIMIT
    text.encode("utf-8")
    payload: dict[str, Any] = json.loads(text, parse_constant=refuse)
    assert COMMON.keys() <= payload.keys() <= COMMON.keys() | EXTRAS
    for key, kind in COMMON.items():
        assert type(payload[key]) is kind or (kind is float and type(payload[key]) is int), key
    kernel = payload["kernel"]
    assert KERNEL.keys() <= kernel.keys() <= KERNEL.keys() | KERNEL_EXTRAS
    for key, kind in KERNEL.items():
        assert type(kernel[key]) is kind, key
    assert kernel["mode"] == "session"
    assert payload["status"] in {"success", "error", "timeout", "interrupted"}
    assert round(payload["duration_seconds"], 2) == payload["duration_seconds"]
    assert all(payload[key] for key in EXTRAS & payload.keys()), "an extra is there only if it says something"
    if payload["status"] == "success":
        assert "error" not in payload
        assert payload["exit_code"] == 0
    else:
        assert payload["error"]
    captured = payload["stdout_bytes_captured"] + payload["stdout_bytes_omitted"]
    assert captured == payload["stdout_bytes_total"]
    return payload


def of(result: CellResult) -> dict[str, Any]:
    payload = read(result.to_json())
    assert payload["exit_code"] == result.exit_code
    return payload


def extras(payload: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The keys besides the common ones, without those that may always help: a warning and a hint."""
    return set(payload) - set(COMMON) - {"warning", "hint"}, set(payload["kernel"]) - set(KERNEL)


NOTHING: set[str] = set()
CASES = {
    "success": ("1", "success", 0, NOTHING, NOTHING),
    "error": ("1/0", "error", 1, {"error"}, NOTHING),
    "syntax error": ("def (", "error", 1, {"error"}, NOTHING),
    "exited with 0": ("import sys; sys.exit()", "success", 0, NOTHING, {"ended"}),
    "exited with 3": ("import sys; sys.exit(3)", "error", 3, {"error"}, {"ended"}),
    "exited with a message": ("import sys; sys.exit('boom')", "error", 1, {"error"}, {"ended"}),
    "timeout": ("import time; time.sleep(60)", "timeout", -1, {"error"}, {"ended"}),
    "died with a code": ("import os; os._exit(7)", "error", 7, {"error"}, {"ended"}),
    "died with code 0": ("import os; os._exit(0)", "error", 0, {"error"}, {"ended"}),
    "died by a signal": ("import os; os.kill(os.getpid(), 9)", "error", -9, {"error"}, {"ended"}),
}


@pytest.mark.parametrize(("code", "status", "exit_code", "top", "kernel"), CASES.values(), ids=CASES)
def test_each_end_of_a_cell_has_its_keys_and_no_other(
    registry: BlockingRegistry, code: str, status: str, exit_code: int, top: set[str], kernel: set[str]
) -> None:
    payload = of(registry.execute(code, owner="a", timeout=1))
    assert (payload["status"], payload["exit_code"]) == (status, exit_code)
    assert extras(payload) == (top, kernel)
    assert (payload["kernel"]["reused"], payload["kernel"]["execution_count"]) == (False, 1)
    assert payload["kernel"].get("ended", True) is True
    after = of(registry.execute("1", owner="a"))
    if not kernel:
        assert extras(after) == (set(), set())
        assert (after["kernel"]["reused"], after["kernel"]["execution_count"]) == (True, 2)
        return
    assert extras(after) == (set(), {"state_lost", "lost_reason"})
    reason = {"timeout": "timed_out", "exited": "exited", "died": "died"}
    cause = result_word(code)
    assert after["kernel"] | {"mode": "session"} == {
        "mode": "session",
        "reused": False,
        "execution_count": 1,
        "state_reset": cause == "died",
        "state_lost": True,
        "lost_reason": reason[cause],
    }
    assert after["warning"], "the loss is said in words, too"
    assert extras(of(registry.execute("1", owner="a"))) == (set(), set()), "and it is said once"


def result_word(code: str) -> str:
    return "exited" if "sys.exit" in code else "timeout" if "sleep" in code else "died"


def test_what_an_agent_looks_for_in_the_error_of_each_end_is_there(
    make_registry: Callable[..., BlockingRegistry],
) -> None:
    registry = make_registry()
    timed_out = of(registry.execute("print('p'); import time; time.sleep(60)", owner="a", timeout=0.5))
    assert "state was lost" in timed_out["error"]
    assert "0.5" in timed_out["error"], "the sentence names the limit"
    assert timed_out["output"] == "p\n⏰ " + timed_out["error"]
    died = of(registry.execute("import os; os.kill(os.getpid(), 9)", owner="a"))
    assert "kernel died" in died["error"]
    assert "SIGKILL" in died["error"]
    failed = of(registry.execute("nowhere", owner="a"))
    assert "NameError" in failed["error"]
    assert "Traceback" in failed["error"]
    assert failed["output"].startswith("--- stderr ---\n")


def test_the_json_of_an_interrupt_says_whether_the_cell_ran(registry: BlockingRegistry) -> None:
    not_run = of(registry.execute("1", owner="a", interrupted=lambda: True))
    assert (not_run["status"], not_run["exit_code"]) == ("interrupted", -1)
    assert extras(not_run) == ({"error"}, set())
    assert "not run; state kept" in not_run["error"]
    registry.execute("1", owner="a")
    asked = iter([False, False, False])
    ran = of(
        registry.execute(
            "import time; print('p'); time.sleep(60)", owner="a", interrupted=lambda: next(asked, True)
        )
    )
    assert (ran["status"], ran["exit_code"]) == ("interrupted", -1)
    assert extras(ran) == ({"error"}, {"ended"})
    assert "interrupted" in ran["error"]
    assert "state was lost" in ran["error"]
    assert ran["output"].splitlines()[-1].startswith("[execution interrupted")


def test_the_json_of_a_timeout_says_whether_the_cell_ran_and_the_state_was_kept(
    make_registry: Callable[..., BlockingRegistry],
) -> None:
    registry = make_registry(limits=Limits(interrupt_grace=5))
    registry.execute("1", owner="a")
    saved = of(registry.execute("import time; print('p'); time.sleep(60)", owner="a", timeout=0.5))
    assert (saved["status"], saved["exit_code"]) == ("timeout", -1)
    assert extras(saved) == ({"error"}, set())
    assert "state kept" in saved["error"]
    assert "not run" not in saved["error"]
    assert saved["output"].splitlines()[-1] == "⏰ " + saved["error"]
    busy, stop = threading.Event(), threading.Event()

    def hold() -> bool:
        if registry.kernels()[0].state.name == "BUSY":
            busy.set()
        return stop.is_set()

    holder = threading.Thread(
        target=registry.execute,
        args=("import time; time.sleep(60)",),
        kwargs={"owner": "a", "interrupted": hold},
    )
    holder.start()
    try:
        assert busy.wait(10)
        not_run = of(registry.execute("1", owner="a", timeout=0.3))
    finally:
        stop.set()
        holder.join()
    assert (not_run["status"], not_run["exit_code"]) == ("timeout", -1)
    assert extras(not_run) == ({"error"}, set())
    assert "not run; state kept" in not_run["error"]


def test_output_is_stdout_then_the_value_then_stderr(registry: BlockingRegistry) -> None:
    def output(code: str) -> str:
        text = of(registry.execute(f"import sys\n{code}", owner="a"))["output"]
        return str(text).rstrip("\n")

    err = "print('err', file=sys.stderr)"
    assert output(f"{err}; print('out'); 42") == "out\n42\n--- stderr ---\nerr"
    assert output("print('out', end=''); 42") == "out\n42"
    assert output("print('out')") == "out"
    assert output("42") == "42"
    assert output("None") == ""
    assert output(err) == "--- stderr ---\nerr"
    failed = output(f"print('out'); {err}; 1/0")
    assert failed.startswith("out\n--- stderr ---\nerr\nTraceback")
    assert failed.endswith("ZeroDivisionError: division by zero")


def test_byte_counts_are_those_of_stdout_alone_in_utf_8(registry: BlockingRegistry) -> None:
    payload = of(
        registry.execute("import sys; print('é€'); print('err', file=sys.stderr); 'value'", owner="a")
    )
    counts = [payload[f"stdout_bytes_{name}"] for name in ("captured", "total", "omitted")]
    assert (counts, payload["stdout_truncated"]) == ([6, 6, 0], False)


def test_text_beyond_ascii_is_kept_as_it_is(registry: BlockingRegistry) -> None:
    result = registry.execute("print('é € 漢字 😀'); raise ValueError('Größe')", owner="a")
    text = result.to_json()
    for kept in ("é € 漢字 😀", "Größe"):
        assert kept in text
    assert "\\u00" not in text


ODD = {
    "lone surrogate": "print('a\\ud800b'); raise ValueError('\\udfff')",
    "surrogate value": "class R:\n    def __repr__(self): return '\\ud800'\nR()",
    "surrogate class": "type('E\\ud800'.encode('utf-8', 'replace').decode(), (Exception,), {})",
    "nul": "print('a\\0b'); '\\0'",
    "control": "print(''.join(map(chr, range(32)))); raise ValueError(''.join(map(chr, range(160))))",
    "nan": "float('nan')",
    "infinity": "print(float('inf')); -float('inf')",
    "nan in json data": "from IPython.display import JSON; JSON({'x': float('nan')})",
    "odd json data": "from IPython.display import JSON; JSON({'x': [-0.0, 1e999, -1e999, 10**400]})",
    "invalid utf-8": "import os; os.write(1, bytes(range(256))); os.write(2, bytes(range(256))); None",
    "line separators": "print('a\\u2028b\\u2029c\\x85d\\ufeff\\ufffe\\uffff')",
    "beyond the plane": "print('\\U0010ffff' * 100)",
}


def test_whatever_a_cell_shows_its_json_is_strict(registry: BlockingRegistry) -> None:
    for name, code in ODD.items():
        result = registry.execute(code, owner="a", timeout=10)
        assert result.status in {CellStatus.OK, CellStatus.ERROR}, name
        assert of(result)["output"], name
    assert of(registry.execute("print(6*7)", owner="a"))["output"].strip() == "42"


BIG = {
    "newlines": "print('\\n' * 50_000)",
    "quotes": "print('\"' * 50_000)",
    "nul": "print('\\0' * 50_000)",
    "stdout": "print('z' * 1_000_000)",
    "stdout of wide text": "print('€' * 1_000_000)",
    "emoji": "print('😀' * 300_000)",
    "surrogates": "print('\\ud800' * 100_000)",
    "lines": "for i in range(100_000): print(i)",
    "raw": "import os; [os.write(1, b'x' * 10_000) for _ in range(100)]; None",
    "stderr": "import sys; print('z' * 1_000_000, file=sys.stderr)",
    "both": "import sys; print('z' * 500_000); print('y' * 500_000, file=sys.stderr)",
    "value": "class R:\n    def __repr__(self): return 'z' * 1_000_000\nR()",
    "evalue": "raise ValueError('z' * 1_000_000)",
    "evalue of quotes": "raise ValueError('\"' * 1_000_000)",
    "traceback": "def f(n): return g(n)\ndef g(n): return n and f(n - 1) or 1/0\nf(450)",
    "all": "import sys; print('\"' * 200_000)\n"
    "print('\\n' * 200_000, file=sys.stderr); raise ValueError('\\\\' * 200_000)",
    "class": "raise type('E' * 200_000, (Exception,), {})('x')",
    "exit message": "import sys; sys.exit('z' * 1_000_000)",
}


def test_no_output_makes_the_json_longer_than_an_agent_reads(registry: BlockingRegistry) -> None:
    for name, code in BIG.items():
        result = registry.execute(code, owner="a", timeout=60)
        payload = of(result)
        expected = "error" if "raise" in code or "1/0" in code or "exit" in code else "success"
        assert payload["status"] == expected, name
        shown = payload["output"]
        assert len(shown) > 1000 or "TRUNCATED" in shown or name == "nul", name
    assert of(registry.execute("print(6*7)", owner="a"))["output"].strip() == "42"


def test_output_that_is_cut_keeps_head_and_tail_and_says_how_much_there_was(
    registry: BlockingRegistry,
) -> None:
    result = registry.execute("print('head' + 'z' * 1_000_000 + 'tail')", owner="a", timeout=60)
    payload = of(result)
    assert payload["output"].startswith("head")
    assert payload["output"].rstrip("\n").endswith("tail")
    assert "TRUNCATED" in payload["output"]
    assert payload["stdout_bytes_total"] == 1_000_009
    assert payload["stdout_truncated"] is True


def test_the_error_survives_however_much_the_cell_printed(registry: BlockingRegistry) -> None:
    payload = of(
        registry.execute("print('z' * 1_000_000); raise LookupError('the reason')", owner="a", timeout=60)
    )
    assert "LookupError: the reason" in payload["error"]
    assert "LookupError: the reason" in payload["output"]


def test_a_partial_output_that_is_too_long_still_ends_with_the_reason(registry: BlockingRegistry) -> None:
    registry.execute("import time", owner="a")
    payload = of(registry.execute("print('\"' * 300_000); time.sleep(60)", owner="a", timeout=1.5))
    assert payload["status"] == "timeout"
    assert "state was lost" in payload["error"]
    assert payload["output"].endswith("⏰ " + payload["error"])


@pytest.mark.parametrize("kind", [HermesKernelError, ConfigError, KernelStartError])
@pytest.mark.parametrize(
    "message",
    ["no such interpreter 'é'", "\ud800\0", '"' * 300_000, "\n" * 300_000, "x" * 1_000_000],
    ids=["plain", "odd", "quotes", "newlines", "long"],
)
def test_every_error_of_ours_has_the_common_keys(kind: type[HermesKernelError], message: str) -> None:
    payload = read(kind(message).to_json())
    assert payload.keys() - COMMON.keys() == {"error"}
    assert payload["kernel"] == {
        "mode": "session",
        "reused": False,
        "execution_count": 0,
        "state_reset": False,
    }
    assert (payload["status"], payload["output"], payload["exit_code"]) == ("error", "", -1)
    assert payload["tool_calls_made"] == payload["stdout_bytes_total"] == payload["duration_seconds"] == 0
    assert payload["stdout_truncated"] is False
    assert payload["error"][:1] in {message[0], "\\"}


def test_the_json_of_a_start_error_tells_what_was_run_and_how_it_ended() -> None:
    error = KernelStartError(
        "the kernel died", argv=("py", "-u"), exit_code=3, log_tail="ImportError: x\n" * 50_000
    )
    payload = read(error.to_json())
    assert "py -u" in payload["error"]
    assert "3" in payload["error"]
    assert "ImportError: x" in payload["error"]


def test_errors_raised_by_a_call_are_of_the_same_shape(registry: BlockingRegistry) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.execute("", owner="a")
    assert read(caught.value.to_json()).keys() - COMMON.keys() == {"error"}
    registry.close()
    with pytest.raises(HermesKernelError) as closed:
        registry.execute("1", owner="a")
    assert read(closed.value.to_json()).keys() - COMMON.keys() == {"error"}


def test_the_output_has_what_was_displayed_in_its_place(registry: BlockingRegistry) -> None:
    code = (
        "from IPython.display import HTML, display\n"
        "print('first'); display({'k': 1}); print('second', end=''); display(HTML('<b>bold</b>')); 5"
    )
    told = json.loads(registry.execute(code, owner="a").to_json())
    assert told["output"] == "first\n{'k': 1}\nsecond\nbold\n5"
    assert (told["stdout_bytes_total"], told["stdout_truncated"]) == (12, False)


def test_many_displays_are_cut_to_the_budget(make_registry: Callable[..., BlockingRegistry]) -> None:
    registry = make_registry(limits=Limits(output_bytes=1_000))
    code = "for n in range(500):\n    display('x' * 20)\nprint('the end')"
    told = json.loads(registry.execute(code, owner="a").to_json())
    assert len(told["output"]) < 1_300
    assert "TRUNCATED" in told["output"]
    assert told["output"].endswith("the end\n")
