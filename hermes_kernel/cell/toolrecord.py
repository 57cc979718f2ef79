"""What a tool call was given and what came of it, kept so that the cell can be run again without the tool."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import json_text
from .shown import Cleaner, masked

RECORD_LIMIT = 1024 * 1024
"""Bytes of JSON of one call's arguments, and of its result, that are kept."""


@dataclass(frozen=True)
class FullCall:
    """One call of a cell, as it was made: the JSON of its arguments and of its result.

    ``ordinal`` counts the calls of this tool in its cell, from 0. Both texts are None where they are too
    large to be kept; the sizes are in bytes. ``error``: what the cell was told instead of a result.
    """

    tool: str
    ordinal: int
    arguments: str | None
    arguments_size: int
    result: str | None
    result_size: int
    error: str | None = None


@dataclass(frozen=True)
class RecordedCall:
    """One call as a transcript has it: without secrets, and with a word on what is missing.

    ``arguments`` and ``result`` are JSON texts: a notebook that is saved anew has its keys in another order.
    ``digest`` tells the arguments from others. ``cut`` and ``masked`` name what is not there, or not as it
    was: "arguments", "result". ``sizes`` are in bytes of JSON, of the arguments and of the result.
    """

    tool: str
    ordinal: int
    digest: str
    arguments: str | None = None
    result: str | None = None
    error: str | None = None
    cut: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    sizes: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, call: FullCall, cleaner: Cleaner) -> "RecordedCall":
        """Take the secrets out of a call."""
        cut = [
            part for part, text in (("arguments", call.arguments), ("result", call.result)) if text is None
        ]
        changed: list[str] = []

        def cleaned(part: str, text: str | None) -> str | None:
            if text is None:
                return None
            value = json.loads(text)
            clean = masked(value, cleaner)
            if clean != value:
                changed.append(part)
            return json_text(clean)

        arguments = cleaned("arguments", call.arguments)
        result = cleaned("result", call.result) if call.error is None else None
        error = None if call.error is None else cleaner.mask(call.error)
        if error != call.error:
            changed.append("result")
        return cls(
            call.tool,
            call.ordinal,
            "" if arguments is None else digest_of(json.loads(arguments)),
            arguments,
            result,
            error,
            tuple(cut),
            tuple(changed),
            (call.arguments_size, call.result_size),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the call as a notebook's metadata hold it."""
        told: dict[str, Any] = {"ordinal": self.ordinal, "digest": self.digest, "bytes": list(self.sizes)}
        texts = {"arguments": self.arguments, "result": self.result, "error": self.error}
        told.update({name: text for name, text in texts.items() if text is not None})
        told.update({name: list(what) for name, what in (("cut", self.cut), ("masked", self.masked)) if what})
        return told


def arguments_of(arguments: Mapping[str, Any], place: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the arguments of a call as they are kept: by name and, if there are any, by place."""
    return {"by_name": dict(arguments), **({"by_place": list(place)} if place else {})}


def digest_of(arguments: object) -> str:
    """Return what tells these arguments from others: equal ones have the same, in any order of the names."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
