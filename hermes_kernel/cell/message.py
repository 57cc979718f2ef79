"""A Jupyter message that has been looked at: what a kernel sends is untrusted until it is one of these."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Content = Mapping[str, Any]


class MalformedMessage(ValueError):
    """What arrived is no message of the protocol."""


@dataclass(frozen=True)
class Message:
    """One message of the kernel: its type, whose request it answers, and a content of the right shape."""

    msg_type: str
    msg_id: str
    parent_id: str | None
    content: Content
    metadata: Content

    @classmethod
    def parse(cls, raw: object) -> "Message":
        """Check the shape of a deserialised message.

        Raises MalformedMessage if the header, the parent or the content (of a type that we use) is not what
        the messaging protocol says. Unknown types pass: they are ignored, not wrong.
        """
        message = _mapping(raw, "message")
        header = _mapping(message.get("header"), "header")
        parent = _mapping(message.get("parent_header", {}), "parent_header")
        msg_type = _string(header.get("msg_type"), "msg_type")
        parent_id = parent.get("msg_id")
        content = _mapping(message.get("content"), "content")
        check = _CHECKS.get(msg_type)
        if check is not None:
            check(content)
        metadata = message.get("metadata")
        return cls(
            msg_type=msg_type,
            msg_id=_string(header.get("msg_id"), "msg_id"),
            parent_id=None if parent_id is None else _string(parent_id, "parent msg_id"),
            content=content,
            metadata=metadata if isinstance(metadata, dict) else {},
        )


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedMessage(f"{what} is a {type(value).__name__}, not an object")
    return value


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedMessage(f"{what} is a {type(value).__name__}, not a string")
    return value


def _check_stream(content: Content) -> None:
    if content.get("name") not in ("stdout", "stderr"):
        raise MalformedMessage(f"stream name {content.get('name')!r}")
    _string(content.get("text"), "stream text")


def _check_display(content: Content) -> None:
    _mapping(content.get("data"), "display data")
    for key in ("metadata", "transient"):
        _mapping(content.get(key, {}), f"display {key}")


def _check_error(content: Content) -> None:
    _string(content.get("ename"), "ename")
    _string(content.get("evalue"), "evalue")
    traceback = content.get("traceback", [])
    if not isinstance(traceback, list) or not all(isinstance(line, str) for line in traceback):
        raise MalformedMessage("traceback is not a list of strings")


def _check_status(content: Content) -> None:
    _string(content.get("execution_state"), "execution_state")


def _check_reply(content: Content) -> None:
    status = content.get("status")
    if status not in ("ok", "error", "aborted"):
        raise MalformedMessage(f"reply status {status!r}")
    if status == "error":
        _check_error(content)
    count = content.get("execution_count")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise MalformedMessage(f"execution_count is a {type(count).__name__}")


_CHECKS: dict[str, Callable[[Content], None]] = {
    "stream": _check_stream,
    "display_data": _check_display,
    "update_display_data": _check_display,
    "execute_result": _check_display,
    "error": _check_error,
    "status": _check_status,
    "execute_reply": _check_reply,
}
