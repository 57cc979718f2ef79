"""``sys.stdout`` and ``sys.stderr`` of a kernel."""

import codecs
import contextvars
import io
import sys
from sys import gettrace
from time import monotonic
from typing import Any

from jupyter_client.session import extract_header

from .context import WRITER
from .outputs import SEND_AT, OutputLog

HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


class HermesOutStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a kernel.

    It cannot be closed: a cell that closes it has flushed it. ``fileno`` is a descriptor that is captured,
    so a child that is given the stream writes into the cell too.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, log: OutputLog, name: str) -> None:
        self._output_log = log
        self.name = name
        self._latest_parent: dict[str, Any] = {}
        self._binary = _BinaryOutput(self)

    @property
    def parent_header(self) -> dict[str, Any]:
        """The header of the request that what is written now belongs to."""
        return WRITER.get(self._latest_parent)

    @property
    def latest_parent(self) -> dict[str, Any]:
        """The header of the cell that started last."""
        return self._latest_parent

    def set_parent(self, parent: dict[str, Any]) -> None:
        """Say whose output follows, for this context and for threads that have none of their own."""
        self._latest_parent = extract_header(parent)
        WRITER.set(self._latest_parent)

    def set_thread_parent(self, parent: dict[str, Any]) -> "contextvars.Token[dict[str, Any]]":
        """Say whose output follows in this context alone; returns the token for ``reset_thread_parent``."""
        return WRITER.set(extract_header(parent))

    def reset_thread_parent(self, token: "contextvars.Token[dict[str, Any]]") -> None:
        """Undo one ``set_thread_parent``."""
        WRITER.reset(token)

    def write(self, text: str) -> int:
        """Write text; returns its length in characters."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        log, parent, size, now = self._output_log, WRITER.get(self._latest_parent), len(text), monotonic()
        # A print is two calls of this, and there may be millions: what is usual is done here, without the
        # lock. Between the look at the segment and the new total nothing is called, so that under the GIL no
        # other thread and no signal handler comes in between; a trace function would.
        alone = now - log.written_at < log.shortest_write or not log.others()
        if alone and HAS_GIL and text.isascii() and gettrace() is None:
            data = text.encode()
            segment = log.segment
            if segment is not None and segment.parent is parent and segment.name is self.name:
                rest = segment.rest
                total = rest.total
                at = rest.start + total % rest.size
                if at + size <= rest.end and total + size < rest.sent + SEND_AT:
                    rest.map[at : at + size] = data
                    rest.total = total = total + size
                    rest.count[0] = total
                    log.written_at = monotonic()
                    return size
        log.write(self.name, text, parent)
        return size

    def write_bytes(self, data: bytes, *, raw: int) -> None:
        """Write UTF-8 that stands for *raw* bytes."""
        self._output_log.drain()
        self._output_log.append(self.name, data, self.parent_header, raw=raw)

    def flush(self) -> None:
        """Send what was written."""
        self._output_log.flush_soon()

    def close(self) -> None:
        """Flush. The stream belongs to the kernel, which writes to it after the cell."""
        self.flush()

    def end_character(self) -> None:
        """Show the bytes of a character that nobody will complete: its cell is over."""
        self._binary.end_character()

    @property
    def buffer(self) -> "_BinaryOutput":
        """The stream for bytes."""
        return self._binary

    def reconfigure(self, **options: Any) -> None:
        """Accept what a script asks of a text stream; this one is UTF-8 and unbuffered enough."""

    def fileno(self) -> int:
        """Return the descriptor that belongs to this stream."""
        return 1 if self.name == "stdout" else 2

    def isatty(self) -> bool:
        """Nobody types here."""
        return False

    def readable(self) -> bool:
        """It cannot be read."""
        return False

    def writable(self) -> bool:
        """It can be written."""
        return True

    def __del__(self) -> None:
        # io.IOBase would call close() when the interpreter ends, where nothing can be sent any more.
        return


class _BinaryOutput(io.RawIOBase):
    """``sys.stdout.buffer``: bytes are decoded as they come; what is not UTF-8 becomes an escape."""

    def __init__(self, text: HermesOutStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: Any) -> int:
        raw = bytes(memoryview(data))
        self._text.write_bytes(self._decoder.decode(raw).encode(), raw=len(raw))
        return len(raw)

    def end_character(self) -> None:
        if rest := self._decoder.decode(b"", final=True):
            self._text.write_bytes(rest.encode(), raw=0)

    def flush(self) -> None:
        self._text.flush()

    def close(self) -> None:
        self._text.flush()

    def fileno(self) -> int:
        return self._text.fileno()

    def writable(self) -> bool:
        return True

    def __del__(self) -> None:
        return
