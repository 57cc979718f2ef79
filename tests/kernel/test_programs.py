import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hermes_kernel.kernel.programs import run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the programs are those of a POSIX shell")


def test_what_a_program_writes_goes_to_its_outlets() -> None:
    out: list[str] = []
    err: list[str] = []
    assert run("echo a; echo b >&2; exit 3", out=out.append, err=err.append) == 3
    assert ("".join(out), "".join(err)) == ("a\n", "b\n")


def test_both_streams_may_share_an_outlet_in_order() -> None:
    texts: list[str] = []
    run("echo a; echo b >&2; echo c", out=texts.append, err=subprocess.STDOUT)
    assert "".join(texts) == "a\nb\nc\n"


def test_a_program_that_a_signal_ends_says_which() -> None:
    assert run("kill -9 $$", out=print) == -9


def test_a_program_without_a_script_has_no_input_and_a_missing_one_is_an_error() -> None:
    assert run(["cat"], out=print) == 0
    with pytest.raises(FileNotFoundError):
        run(["there-is-no-such-program"], script=b"")


@pytest.mark.parametrize("holder", ["sleep 20 &", "(sleep 20; echo late) &"])
def test_a_child_in_the_background_holds_nothing_up_and_all_written_before_is_there(holder: str) -> None:
    texts: list[str] = []
    started = time.monotonic()
    code = run(
        f"{holder} echo pid $!; head -c 200000 /dev/zero | tr '\\0' x; echo; echo end", out=texts.append
    )
    assert time.monotonic() - started < 10
    first, *rest = "".join(texts).splitlines()
    os.kill(int(first.split()[1]), 9)
    assert (code, rest) == (0, ["x" * 200000, "end"])


def test_a_child_that_writes_without_end_holds_nothing_up() -> None:
    texts: list[str] = []
    run("yes & echo $! >&2; sleep 0.2", out=lambda text: None, err=texts.append)
    # It has ended by itself: nobody reads any more what it writes.
    assert int("".join(texts)) > 0


def test_a_script_of_any_size_is_fed_and_one_that_is_not_read_is_no_matter() -> None:
    texts: list[str] = []
    script = b"x" * 3_000_000
    assert run(["cat"], script=script, out=texts.append) == 0
    assert "".join(texts) == script.decode()
    assert run(["true"], script=script) == 0
    assert run(["sh"], script=b"exec 0<&-; sleep 20 & exit 4\n") == 4


def test_bytes_that_are_no_text_become_escapes_and_a_split_character_stays_whole() -> None:
    texts: list[str] = []
    run("printf '\\303'; sleep 0.05; printf '\\251 \\377 \\303'", out=texts.append)
    assert "".join(texts) == "é \\xff \\xc3"


def test_an_outlet_that_fails_ends_the_program(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run("trap '' INT TERM; echo x; while :; do sleep 0.1; done", out=fail)
    assert time.monotonic() - started < 5


def test_nothing_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    for _ in range(20):
        run("echo x", script=b"y", out=lambda text: None, err=lambda text: None)
    for thread in threading.enumerate():
        if thread.name == "hermes-wait":
            thread.join(5)
    after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert len(after) <= len(before)
