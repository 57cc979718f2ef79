"""Programs that a cell runs and waits for. What they leave in the background is not waited for.

A pipe ends when the last process that holds it does. So the end of the program itself is what ends the
reading, and what is in the pipe by then is all that is read.
"""

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

Outlet = Callable[[str], object]
"""What takes the text that a program writes."""

READ_SIZE = 1024 * 1024  # bytes: more than a pipe holds, so one read empties it
PATIENCE = () if sys.platform == "win32" else ((signal.SIGINT, 0.1), (signal.SIGTERM, 0.1))
"""How an interrupted program is told to end, and the seconds that it has to do so; then it is killed."""
TIME_TO_DIE = 1.0  # seconds in which a killed program is gone


def run(
    command: str | Sequence[str],
    *,
    script: bytes | None = None,
    out: Outlet | None = None,
    err: Outlet | int | None = None,
    shell: str | None = None,
) -> int:
    """Run a program until it ends; return its exit code (-N if signal N has killed it).

    A text is for *shell* (None: ``sh``). *script* is its input; without one it has none. Without an outlet
    it writes to our descriptor; *err* may be ``subprocess.STDOUT``. Raises OSError if there is no such
    program. An exception of an outlet's, or an interrupt, ends the program.
    """
    process = subprocess.Popen(
        command,
        bufsize=0,
        shell=isinstance(command, str),
        executable=shell,
        stdin=subprocess.DEVNULL if script is None else subprocess.PIPE,
        stdout=None if out is None else subprocess.PIPE,
        stderr=subprocess.PIPE if callable(err) else err,
    )
    outlets = [
        (pipe, outlet)
        for pipe, outlet in ((process.stdout, out), (process.stderr, err))
        if pipe is not None and callable(outlet)
    ]
    try:
        if script is not None or outlets:
            _follow(process, script or b"", outlets)
        return process.wait()
    except BaseException:
        _end(process)
        raise
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


if sys.platform == "win32":

    def _follow(process: Any, script: bytes, outlets: Sequence[tuple[IO[bytes], Outlet]]) -> None:
        """Feed the program and take what it writes, to the end of its pipes: these cannot be waited for."""
        texts = process.communicate(script if process.stdin is not None else None)
        for pipe, outlet in outlets:
            text = texts[0] if pipe is process.stdout else texts[1]
            outlet(text.decode("utf-8", "backslashreplace").replace("\r\n", "\n"))

else:

    def _follow(process: Any, script: bytes, outlets: Sequence[tuple[IO[bytes], Outlet]]) -> None:
        """Feed the program and take what it writes, until it ends."""
        readers = {pipe.fileno(): _Reader(pipe.fileno(), outlet) for pipe, outlet in outlets}
        waiting = _wait_for(process)
        poll = select.poll()
        poll.register(waiting, select.POLLIN)
        for number in readers:
            poll.register(number, select.POLLIN)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            poll.register(process.stdin, select.POLLOUT)
        has_ended = False
        try:
            while not has_ended:
                for number, _ in poll.poll():
                    if number == waiting:
                        has_ended = True
                    elif number in readers:
                        if not readers[number].read():
                            poll.unregister(number)
                    else:
                        script = _feed(number, script)
                        if not script:
                            poll.unregister(number)
                            process.stdin.close()
            for reader in readers.values():
                reader.read()
                reader.finish()
        finally:
            os.close(waiting)

    def _wait_for(process: Any) -> int:
        """Return a descriptor that can be read as soon as the process has ended."""
        reader, writer = os.pipe()

        def wait() -> None:
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # nobody follows the program any more
                os.write(writer, b".")
            os.close(writer)

        try:
            threading.Thread(target=wait, name="hermes-wait", daemon=True).start()
        except BaseException:
            os.close(reader)
            os.close(writer)
            raise
        return reader

    class _Reader:
        """The end of a pipe that is read, and where its text goes."""

        def __init__(self, number: int, outlet: Outlet) -> None:
            self._number = number
            self._outlet = outlet
            self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
            os.set_blocking(number, False)

        def read(self) -> bool:
            """Hand on what is in the pipe; return whether there can be more."""
            try:
                data = os.read(self._number, READ_SIZE)
            except BlockingIOError:
                return True
            if text := self._decoder.decode(data):
                self._outlet(text)
            return bool(data)

        def finish(self) -> None:
            """Hand on what stands for the first half of a character."""
            if text := self._decoder.decode(b"", final=True):
                self._outlet(text)

    def _feed(number: int, script: bytes) -> bytes:
        """Write what the pipe takes; return what is left to write."""
        try:
            return script[os.write(number, script) :]
        except BlockingIOError:
            return script
        except BrokenPipeError:  # the program does not want to read it
            return b""


def _end(process: Any) -> None:
    for number, seconds in PATIENCE:
        process.send_signal(number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the system: then the warden takes it
        process.wait(TIME_TO_DIE)
