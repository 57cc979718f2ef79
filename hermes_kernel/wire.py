"""What both processes must put on the wire alike: Jupyter messages, and the frames of the tool bridge.

This file also runs in the kernel's interpreter: no import of the host side, Python 3.10. docs/wire.md
describes the frames.
"""

import json
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jupyter_client.jsonutil import json_clean, json_default

from .errors import HermesKernelError

PACKER = "hermes_kernel.wire.pack"
UNPACKER = "jupyter_client.session.json_unpacker"
"""What every Session of ours packs and unpacks with."""

MAX_FRAME = 16 * 1024 * 1024
"""Bytes of one frame of the tool bridge, without its header."""

MAX_NESTED = 500_000
"""Lists, objects and keys in one call: reading them takes the host's GIL, whatever they are worth."""

MAX_HELLO = 4096
"""Bytes of the first frame of a connection."""

HALF_FRAME_TIMEOUT = 10.0
"""Seconds for the rest of a frame that has begun, and for a new connection to say who it is."""

_JSON = json.JSONEncoder(default=json_default, ensure_ascii=False, allow_nan=False)
_HEADER = struct.Struct(">I")
_DEPTH = 100
_MOST_BITS = 14_000  # of a whole number: Python reads and writes 4300 digits
_SHOWN_PATH = 100
_NOT_NESTING = bytes(set(range(256)) - set(b'"[{:'))


def pack(message: Any) -> bytes:
    """Serialise a part of a Jupyter message; text that is not valid Unicode is escaped, not refused."""
    try:
        text = _JSON.encode(message)
    except (TypeError, ValueError):  # what JSON does not have: jupyter_client's own way out
        text = _JSON.encode(json_clean(message))
    # In JSON a lone surrogate can only stand in a string, where its escape says the same.
    return text.encode("utf-8", "backslashreplace")


class WireError(HermesKernelError):
    """What arrived is no frame of the tool bridge, or none of the kind that was due."""


def check_json(value: object, path: str, depth: int = _DEPTH) -> None:
    """Raise TypeError, naming the place, if *value* is not what JSON can carry unchanged.

    A tuple passes, and arrives as a list. Texts, whole numbers, finite numbers, booleans and None pass, as
    do lists, and dictionaries whose keys are texts.
    """
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise _not_json(path, "a whole number of too many digits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _not_json(path, f"{value!r}, which JSON does not have")
    elif depth == 0:
        raise _not_json(path, f"nested more than {_DEPTH} levels deep, or contains itself")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{path}[{index}]", depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _not_json(path, f"a dict with the key {_shown(key)}: keys must be strings")
            check_json(item, f"{path}[{key[:_SHOWN_PATH]!r}]", depth - 1)
    else:
        raise _not_json(path, f"of type {type(value).__name__}")


def _not_json(path: str, what: str) -> TypeError:
    if len(path) > _SHOWN_PATH:
        path = f"{path[:_SHOWN_PATH]}…"
    return TypeError(f"{path} is {what}; give None, bool, int, float, str, or lists and dicts of them")


def _shown(key: object) -> str:
    return repr(key)[:_SHOWN_PATH] if isinstance(key, int | float | bytes | None) else type(key).__name__


class Hello(NamedTuple):
    """The first frame of a connection: the kernel's token proves that it comes from the kernel."""

    token: str

    @classmethod
    def parse(cls, body: bytes) -> "Hello":
        """Read the first frame of a connection; raises WireError."""
        return cls(_text(_object(body, _untrusted), "hello"))

    def encode(self) -> bytes:
        """Return the frame."""
        return _frame({"hello": self.token})


class ToolCall(NamedTuple):
    """A cell calls a tool. ``cell`` is the token that the cell was given.

    ``arguments`` are by name; ``place`` has those that can only be given by their place.
    """

    call_id: int
    cell: str
    tool: str
    arguments: dict[str, Any]
    place: Sequence[Any] = ()

    @classmethod
    def parse(cls, body: bytes) -> "ToolCall":
        """Read a call; raises WireError, with the call's id where there is one."""
        _check_nested(body)
        frame = _object(body, _untrusted)
        call_id = frame.get("id")
        if type(call_id) is not int:
            raise WireError(f"id is a {type(call_id).__name__}, not a whole number")
        try:
            arguments, place = frame.get("args"), frame.get("place", ())
            if not isinstance(arguments, dict):
                raise WireError(f"args is a {type(arguments).__name__}, not an object")
            if not isinstance(place, list | tuple):
                raise WireError(f"place is a {type(place).__name__}, not an array")
            return cls(call_id, _text(frame, "cell"), _text(frame, "tool"), arguments, place)
        except WireError as error:
            raise BadCallError(call_id, str(error)) from None

    def encode(self) -> bytes:
        """Return the frame; raises WireError if it is too large."""
        content = {"id": self.call_id, "cell": self.cell, "tool": self.tool, "args": self.arguments}
        if self.place:
            content["place"] = self.place
        frame = _frame(content)
        _check_nested(frame[_HEADER.size :])
        return frame


class BadCallError(WireError):
    """A call whose id can be read, and not all of the rest."""

    def __init__(self, call_id: int, what: str) -> None:
        super().__init__(what)
        self.call_id = call_id


class ToolReply(NamedTuple):
    """The answer to the call ``call_id``: a value, or the ``error`` that says why there is none.

    ``kind`` tells errors apart (see ``Failure``). ``closes``: the host will not read this connection again.
    The answer to Hello has the id 0.
    """

    call_id: int
    value: Any = None
    error: str | None = None
    kind: str | None = None
    closes: bool = False

    @classmethod
    def parse(cls, body: bytes) -> "ToolReply":
        """Read a reply; raises WireError."""
        frame = _object(body)
        call_id, error, kind = frame.get("id"), frame.get("error"), frame.get("kind")
        if type(call_id) is not int or not isinstance(error, str | None):
            raise WireError("a reply needs an id, and its error must be a string")
        kind = kind if isinstance(kind, str) else None
        return cls(call_id, frame.get("value"), error, kind, frame.get("closes") is True)

    def encode(self) -> bytes:
        """Return the frame; raises TypeError for a value that is not JSON, WireError if it is too large."""
        if self.error is None:
            check_json(self.value, "the result")
            frame: dict[str, Any] = {"id": self.call_id, "value": self.value}
        else:
            frame = {"id": self.call_id, "error": self.error, "kind": self.kind}
        if self.closes:
            frame["closes"] = True
        return _frame(frame)


class Failure:
    """The kinds of failed calls, as the wire has them."""

    TOOL = "tool"
    REFUSED = "refused"
    BUDGET = "budget"
    ARGUMENTS = "arguments"


@dataclass
class FrameDecoder:
    """Bytes in, whole frames out, however the stream was cut."""

    limit: int = MAX_FRAME
    _buffer: bytearray = field(default_factory=bytearray, init=False)

    @property
    def has_part(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return bool(self._buffer)

    @property
    def waiting(self) -> int:
        """The bytes of the frame that has begun."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take in what was read and return the bodies of the frames that are whole now.

        Raises WireError for a frame that is announced as too large: the connection is of no further use.
        """
        if not self._buffer and len(data) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(data)
            if len(data) == _HEADER.size + size and size <= self.limit:  # most often it is one frame
                return [data[_HEADER.size :]]
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        if size > self.limit:
            raise WireError(f"a frame of {size} bytes is announced; it may have {self.limit}")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        frame = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return frame


def send_timeout(seconds: float) -> bytes | int:
    """Return the value of SO_SNDTIMEO that bounds a send on a blocking socket; 0 = no bound."""
    if sys.platform == "win32":
        return int(seconds * 1000)
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# What is sent has passed check_json, so it contains nothing twice within itself.
_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_untrusted = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _frame(content: dict[str, Any]) -> bytes:
    # A lone surrogate passes as it stands: two of them are a character once they are escaped.
    body = _encode(content).encode("utf-8", "surrogatepass")
    if len(body) > MAX_FRAME:
        raise WireError(f"it has {len(body)} bytes of JSON; one call may carry {MAX_FRAME}")
    return _HEADER.pack(len(body)) + body


def _check_nested(body: bytes) -> None:
    if len(body) <= MAX_NESTED or _nested(body) <= MAX_NESTED:
        return
    if _nested(_outside_texts(body)) > MAX_NESTED:
        raise WireError(f"it has more than {MAX_NESTED} lists, objects and keys; send them as one text")


def _outside_texts(body: bytes) -> bytes:
    """Return what of *body* can be nesting, in a time and a memory that the texts do not decide."""
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes side by side change nothing about what stands inside and what outside of a text.
    marks = without_escapes.translate(None, _NOT_NESTING).replace(b'""', b"")
    return b"".join(marks.split(b'"')[::2])


def _nested(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _object(body: bytes, decoder: json.JSONDecoder = _decoder) -> dict[str, Any]:
    try:
        text = body.decode("utf-8", "surrogatepass")
        content, end = decoder.raw_decode(text)
        if end != len(text) and text[end:].strip():
            raise ValueError("there is more behind it")
    except (ValueError, RecursionError) as error:
        raise WireError(f"the frame is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise WireError(f"the frame is a {type(content).__name__}, not an object")
    return content


def _text(frame: dict[str, Any], name: str) -> str:
    value = frame.get(name)
    if not isinstance(value, str):
        raise WireError(f"{name} is a {type(value).__name__}, not a string")
    return value
