"""Everything that one cell showed, in the order in which it was shown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import json_text, plain, plain_text
from .message import Message

StreamName = Literal["stdout", "stderr"]

_JSON_MIME = re.compile(r"application/(.*\+)?json")


@dataclass(frozen=True)
class CellError:
    """The exception that ended a cell: its class, its text and the whole traceback as one string."""

    ename: str
    evalue: str
    traceback: str


@dataclass
class _Stream:
    name: str
    parts: list[str]


@dataclass
class _Display:
    output: dict[str, Any]
    display_id: str | None


@dataclass
class OutputCollector:
    """Collects the IOPub messages of one cell.

    Knows ``clear_output`` (also with ``wait``) and display updates, so that what is collected is what a
    notebook would show at the end.
    """

    _shown: list[_Stream | _Display] = field(default_factory=list, init=False)
    _clear_pending: bool = field(default=False, init=False)
    _errors: list[CellError] = field(default_factory=list, init=False)

    def add(self, message: Message) -> None:
        """Take in one message; a type that shows nothing is ignored."""
        content = message.content
        match message.msg_type:
            case "clear_output":
                self._clear_pending = True
                if not content.get("wait"):
                    self._clear()
            case "stream":
                self._write(content["name"], content["text"])
            case "display_data" | "execute_result":
                self._show(message)
            case "update_display_data":
                self._update(message)
            case "error":
                self.fail(cell_error(content["ename"], content["evalue"], content.get("traceback", [])))

    def add_rest(self, name: StreamName, missing: int, rest: bytes, undrained: bytes = b"") -> int:
        """Add what a kernel had written to a stream and could not send before it ended.

        *missing* is the number of bytes that no message has brought, *rest* the last bytes of the stream,
        *undrained* what the kernel had not even read. Returns how many of the missing ones are lost.
        """
        kept = rest[-missing:] if missing > 0 else b""
        if text := (kept + undrained).decode("utf-8", "backslashreplace"):
            self._write(name, text)
        return max(missing, 0) - len(kept)

    @property
    def error(self) -> CellError | None:
        """The last exception that was shown."""
        return self._errors[-1] if self._errors else None

    @property
    def stdout(self) -> str:
        """All text on the standard output."""
        return self._stream_text("stdout")

    @property
    def stderr(self) -> str:
        """All text on the standard error; tracebacks are not part of it."""
        return self._stream_text("stderr")

    @property
    def value(self) -> str | None:
        """The text form of the last expression, None if it had none."""
        for shown in reversed(self._shown):
            if isinstance(shown, _Display) and shown.output["output_type"] == "execute_result":
                text: str | None = shown.output["data"].get("text/plain")
                return text
        return None

    @property
    def text(self) -> str:
        """What a person would have read, in the order in which it came."""
        pieces = [_text_of(shown) for shown in self._shown]
        return plain_text("".join(_on_lines_of_their_own(self._shown, pieces)))

    def to_notebook(self) -> list[dict[str, Any]]:
        """Return the outputs as a notebook keeps them (nbformat 4)."""
        outputs: list[dict[str, Any]] = []
        for shown in self._shown:
            if isinstance(shown, _Stream):
                text = plain_text("".join(shown.parts))
                outputs.append({"output_type": "stream", "name": shown.name, "text": text})
            else:
                outputs.append(dict(shown.output))
        return outputs

    def _write(self, name: str, text: str) -> None:
        self._clear_if_pending()
        last = self._shown[-1] if self._shown else None
        if isinstance(last, _Stream) and last.name == name:
            last.parts.append(text)
        else:
            self._shown.append(_Stream(name, [text]))

    def _show(self, message: Message) -> None:
        self._clear_if_pending()
        content = message.content
        output: dict[str, Any] = {
            "output_type": message.msg_type,
            "data": _mime_bundle(content["data"]),
            "metadata": plain(content.get("metadata", {})),
        }
        if message.msg_type == "execute_result":
            output["execution_count"] = _count(content.get("execution_count"))
        display_id = content.get("transient", {}).get("display_id")
        self._shown.append(_Display(output, display_id if isinstance(display_id, str) else None))

    def _update(self, message: Message) -> None:
        content = message.content
        wanted = content.get("transient", {}).get("display_id")
        for shown in self._shown:
            if isinstance(shown, _Display) and wanted is not None and shown.display_id == wanted:
                shown.output["data"] = _mime_bundle(content["data"])
                shown.output["metadata"] = plain(content.get("metadata", {}))

    def fail(self, error: CellError) -> None:
        """Show an exception."""
        self._clear_if_pending()
        self._errors.append(error)
        output = {
            "output_type": "error",
            "ename": error.ename,
            "evalue": error.evalue,
            "traceback": error.traceback.split("\n"),
        }
        self._shown.append(_Display(output, None))

    def _clear_if_pending(self) -> None:
        if self._clear_pending:
            self._clear()

    def _clear(self) -> None:
        self._clear_pending = False
        self._shown.clear()

    def _stream_text(self, name: str) -> str:
        parts = (s.parts for s in self._shown if isinstance(s, _Stream) and s.name == name)
        return plain_text("".join(piece for stream in parts for piece in stream))


def stream_end(message: Message) -> int | None:
    """Return how many bytes the kernel had written to its stream by the end of this stream message."""
    hermes = message.metadata.get("hermes")
    end = hermes.get("end") if isinstance(hermes, dict) else None
    return end if isinstance(end, int) and not isinstance(end, bool) and 0 <= end < 2**63 else None


def cell_error(ename: str, evalue: str, traceback: list[str]) -> CellError:
    """Return the exception that a message tells of, as valid Unicode."""
    return CellError(plain_text(ename), plain_text(evalue), plain_text("\n".join(traceback)))


def _mime_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return *data* as a notebook may hold it: text for every type but the JSON ones."""
    bundle: dict[str, Any] = {}
    for mime, value in plain(dict(data)).items():
        if _JSON_MIME.fullmatch(mime) or isinstance(value, str):
            bundle[mime] = value
        elif isinstance(value, list) and all(isinstance(line, str) for line in value):
            bundle[mime] = "".join(value)
        elif value is not None:
            bundle[mime] = json_text(value)
    return bundle


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text_of(shown: _Stream | _Display) -> str:
    if isinstance(shown, _Stream):
        return "".join(shown.parts)
    if shown.output["output_type"] == "error":
        return "\n".join(shown.output["traceback"])
    text = shown.output["data"].get("text/plain", "")
    return text if isinstance(text, str) else ""


def _on_lines_of_their_own(shown: list[_Stream | _Display], pieces: list[str]) -> list[str]:
    """Separate values and tracebacks from what stands before and behind them; streams follow each other."""
    spaced: list[str] = []
    at_line_start = True
    for item, piece in zip(shown, pieces, strict=True):
        if not piece:
            continue
        if isinstance(item, _Display) and not at_line_start:
            spaced.append("\n")
        spaced.append(piece)
        if isinstance(item, _Display) and not piece.endswith("\n"):
            spaced.append("\n")
        at_line_start = isinstance(item, _Display) or piece.endswith("\n")
    return spaced
