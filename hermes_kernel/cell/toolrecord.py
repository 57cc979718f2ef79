"""What a tool call was given and what came of it, kept so that the cell can be run again without the tool."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import json_text, plain, plain_text
from .shown import Cleaner
from .tools import ToolSet

RECORD_LIMIT = 1024 * 1024
"""Bytes of JSON of one call's arguments, and of its result, that are kept."""


@dataclass(frozen=True)
class FullCall:
    """One call of a cell, as it was made: the JSON of its arguments and of its result.

    ``ordinal`` counts the calls of this tool in its cell, from 0. Both texts are None where they are too
    large to be kept; the sizes are in bytes. ``error``: what the cell was told instead of a result.
    ``answered`` is False if the cell ended before the tool did.
    """

    tool: str
    ordinal: int
    arguments: str | None
    arguments_size: int
    result: str | None
    result_size: int
    error: str | None = None
    answered: bool = True


@dataclass(frozen=True)
class RecordedCall:
    """One call as a transcript has it: without secrets, and with a word on what is missing.

    ``arguments`` and ``result`` are JSON texts: a notebook that is saved anew has its keys in another order.
    ``digest`` tells the arguments from others. ``cut`` and ``masked`` name what is not there, or not as it
    was: "arguments", "result". ``sizes`` are in bytes of JSON, of the arguments and of the result.
    ``answered`` is False if the cell ended before the tool did.
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
    answered: bool = True

    @classmethod
    def of(cls, call: FullCall, cleaner: Cleaner) -> "RecordedCall":
        """Take the secrets out of a call."""
        cut: list[str] = []
        changed: list[str] = []

        def cleaned(part: str, text: str | None) -> str | None:
            try:
                value = None if text is None else json.loads(text)
                clean = _without_secrets(value, cleaner.mask)
            except RecursionError:  # no cell of ours nests so deep: it is not kept
                text = None
            if text is None:
                cut.append(part)
                return None
            if clean != value:
                changed.append(part)
            # In JSON the escape of half a character pair says the same as the half.
            return plain_text(json_text(clean))

        arguments = cleaned("arguments", call.arguments)
        result = None
        if call.error is None and call.answered:
            result = cleaned("result", call.result)
        error = None if call.error is None else plain_text(cleaner.mask(call.error))
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
            call.answered,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the call as a notebook's metadata hold it."""
        told: dict[str, Any] = {"ordinal": self.ordinal, "digest": self.digest, "bytes": list(self.sizes)}
        texts = {"arguments": self.arguments, "result": self.result, "error": self.error}
        told.update({name: text for name, text in texts.items() if text is not None})
        told.update({name: list(what) for name, what in (("cut", self.cut), ("masked", self.masked)) if what})
        if not self.answered:
            told["answered"] = False
        return told


@dataclass(frozen=True)
class RecordedCatalogue:
    """The tools of a cell as a transcript has them: without secrets. ``digest`` tells them from others."""

    digest: str
    entries: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, tools: ToolSet, cleaner: Cleaner) -> "RecordedCatalogue":
        """Take the secrets out of a catalogue: a default can be one."""
        entries = tuple(_entry_without_secrets(plain(entry), cleaner.mask) for entry in tools.catalogue)
        return cls(digest_of(entries), entries)


def arguments_of(arguments: Mapping[str, Any], place: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the arguments of a call as they are kept: by name and, if there are any, by place."""
    return {"by_name": dict(arguments), **({"by_place": list(place)} if place else {})}


def digest_of(arguments: object) -> str:
    """Return what tells these arguments from others: equal ones have the same, in any order of the names."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_secrets(value: Any, mask: Callable[[str], str]) -> Any:
    """Return a JSON value with its texts masked, and its numbers where one is a secret."""
    text = "" if isinstance(value, str) else plain_text(json_text(value))
    numbers = mask if text and mask(text) != text else None
    return _masked(value, mask, numbers)


def _masked(value: Any, mask: Callable[[str], str], numbers: Callable[[str], str] | None) -> Any:
    match value:
        case str():
            return mask(value)
        case dict():
            return {mask(key): _masked(item, mask, numbers) for key, item in value.items()}
        case list():
            return [_masked(item, mask, numbers) for item in value]
        case int() | float() if numbers is not None and not isinstance(value, bool):
            text = json_text(value)
            clean = numbers(text)
            return value if clean == text else clean
    return value


def _entry_without_secrets(entry: Mapping[str, Any], mask: Callable[[str], str]) -> dict[str, Any]:
    parameters = [
        {
            key: value if key in ("name", "kind") else _without_secrets(value, mask)
            for key, value in parameter.items()
        }
        for parameter in entry["parameters"]
    ]
    told = {key: _without_secrets(entry[key], mask) for key in ("description", "returns") if key in entry}
    return {**entry, **told, "parameters": parameters}
