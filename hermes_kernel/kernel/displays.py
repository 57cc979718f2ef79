"""What a cell displays, within bounds: neither this process nor the host pays for what nobody can look at."""

import enum
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQDisplayPublisher

from ..wire import pack

MIB = 2**20
BUNDLE_BYTES = 32 * MIB  # of one display
LIVE_BYTES = 16 * MIB  # of what a cell shows at a time, before it ends
LIVE_DISPLAYS = 2000
SENT_BYTES = 256 * MIB  # of one cell, with what it has cleared again
HELD_BYTES = 32 * MIB  # of what is sent at the end of the cell
HELD_UPDATES = 64
TEXT_BYTES = 10_000  # of the text of a display that is too large

_log = logging.getLogger(__name__)


class Kind(enum.Enum):
    """What a message shows."""

    DISPLAY = "display_data"
    UPDATE = "update_display_data"
    VALUE = "execute_result"


@dataclass(frozen=True)
class Slot:
    """Where a display waits for the end of its cell, until the next one of the same slot comes."""

    kind: Kind
    display_id: str | None = None


@dataclass(frozen=True)
class Bundle:
    """The forms of one display: for each MIME type its value."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    size: int

    @classmethod
    def of(cls, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> "Bundle":
        """Return what is to be sent of a display: not what is no JSON, nor more than BUNDLE_BYTES.

        Its text then says what is missing. If nothing of it can be sent it is returned as it is, for
        ipykernel to say so.
        """
        sizes = {mime: size_of(value) for mime, value in data.items()}
        about = (size_of(metadata) or 0) if metadata else 0
        total = about + sum(size or 0 for size in sizes.values())
        if total > BUNDLE_BYTES:
            if about > TEXT_BYTES:
                sizes["metadata"] = about
            return cls(_too_large(data, sizes, total), {}, TEXT_BYTES)
        bad = [mime for mime, size in sizes.items() if size is None]
        if not bad or len(bad) == len(data):
            return cls(dict(data), dict(metadata), total)
        good = {mime: value for mime, value in data.items() if mime not in bad}
        reasons = ", ".join(f"{mime} (no JSON: {type(data[mime]).__name__})" for mime in bad)
        return cls(_with_note(good, f"[left out: {reasons}]"), dict(metadata), total)


def size_of(value: object) -> int | None:
    """Return how many bytes a value takes, None if it cannot be sent."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    try:
        return len(pack(value))
    except Exception:  # noqa: BLE001  # code of the cell's may be in there
        return None


def _too_large(data: Mapping[str, Any], sizes: Mapping[str, int | None], total: int) -> dict[str, Any]:
    text = data.get("text/plain")
    shown = text if isinstance(text, str) else ""
    kept = shown[:TEXT_BYTES].encode("utf-8", "backslashreplace")[:TEXT_BYTES].decode("utf-8", "ignore")
    is_whole = (sizes.get("text/plain") or 0) <= TEXT_BYTES
    missing = [
        f"{mime} of {size or 0:,} bytes"
        for mime, size in sizes.items()
        if not (mime == "text/plain" and isinstance(text, str) and is_whole)
    ]
    bound = f"a display has at most {BUNDLE_BYTES:,} bytes, this one {total:,}"
    return _with_note({"text/plain": kept}, f"[left out: {', '.join(missing)}; {bound}]")


def _with_note(data: Mapping[str, Any], note: str) -> dict[str, Any]:
    text = data.get("text/plain")
    has_text = isinstance(text, str) and text
    return {**data, "text/plain": f"{text}\n{note}" if has_text else note}


@dataclass
class _Held:
    size: int
    send: Callable[[], object]

    def send_late(self) -> None:
        try:
            self.send()
        except Exception:  # noqa: BLE001  # whatever the cell has made of it since: the reply must follow
            _log.error("a display was lost", exc_info=True)


@dataclass
class CellDisplays:
    """How much the cell that runs has displayed, and what waits for its end.

    What is more than a cell may show is held back: the last display, the last value, the last update of each
    display_id. They are sent when the cell ends; the displays that they have replaced are left out. An
    update that a later one replaces is not: nobody would see it any more.
    """

    _displays: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _sent_bytes: int = field(default=0, init=False)
    _held: dict[Slot, _Held] = field(default_factory=dict, init=False)
    _left_out: int = field(default=0, init=False)
    _left_out_bytes: int = field(default=0, init=False)
    _clear_pending: bool = field(default=False, init=False)
    _lock: Any = field(default_factory=threading.RLock, init=False)

    def __post_init__(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def begin(self) -> None:
        """A cell begins. What a thread has displayed since the last one's end is still sent."""
        with self._lock:
            self._sent_bytes = 0
            self._reset()

    def admit(self, slot: Slot, size: int, send: Callable[[], object]) -> bool:
        """Return whether a display is to be sent now; if not, *send* is called at the end of the cell."""
        with self._lock:
            if self._clear_pending:
                self._reset()
                self._held.clear()
            if slot.kind is Kind.UPDATE:
                self._held.pop(slot, None)
            if self._has_room(size):
                self._displays += 1
                self._bytes += size
                self._sent_bytes += size
                return True
            self._leave_out(slot)
            self._held[slot] = _Held(size, send)
            self._make_room()
            return False

    def clear(self, *, wait: bool) -> None:
        """What was displayed is gone; with *wait*, when the next display comes."""
        with self._lock:
            if wait:
                self._clear_pending = True
                return
            self._reset()
            self._held.clear()

    def finish(self) -> dict[str, int]:
        """The cell ends: send what was held back; return how much was left out."""
        with self._lock:
            if self._clear_pending:  # they would come after what clears them
                for slot in list(self._held):
                    self._leave_out(slot)
            held, self._held = list(self._held.values()), {}
            left_out = {"displays": self._left_out, "bytes": self._left_out_bytes}
        for display in held:
            display.send_late()
        return left_out

    def _reset(self) -> None:
        self._displays = self._bytes = self._left_out = self._left_out_bytes = 0
        self._clear_pending = False

    def _has_room(self, size: int) -> bool:
        return (
            self._displays < LIVE_DISPLAYS
            and self._bytes + size <= LIVE_BYTES
            and self._sent_bytes + size <= SENT_BYTES
        )

    def _make_room(self) -> None:
        """Leave out what was held first, but not what was held last."""
        while len(self._held) > 1 and (
            sum(display.size for display in self._held.values()) > HELD_BYTES
            or sum(slot.kind is Kind.UPDATE for slot in self._held) > HELD_UPDATES
        ):
            self._leave_out(next(iter(self._held)))

    def _leave_out(self, slot: Slot) -> None:
        display = self._held.pop(slot, None)
        if display is not None:
            self._left_out += 1
            self._left_out_bytes += display.size

    def _after_fork(self) -> None:
        self._lock = threading.RLock()


class HermesDisplayPublisher(ZMQDisplayPublisher):
    """``display(x)``, within the bounds of the shell's ``displays``."""

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send a display, or hold it back."""
        send = super().publish
        options = {"transient": transient, "update": update, **kwargs}
        if not isinstance(data, dict) or not isinstance(metadata, dict | NoneType):
            send(data, metadata, **options)
            return
        bundle = Bundle.of(data, metadata or {})
        # ipykernel finds the cell that a display belongs to in the context.
        later = partial(copy_context().run, send, bundle.data, bundle.metadata, **options)
        if self.shell.displays.admit(_slot(transient, update=update), bundle.size, later):
            send(bundle.data, bundle.metadata, **options)

    def clear_output(self, wait: bool = False) -> None:
        """Clear what the cell has shown so far."""
        self.shell.displays.clear(wait=wait)
        super().clear_output(wait)


def _slot(transient: Any, *, update: bool) -> Slot:
    if not update:
        return Slot(Kind.DISPLAY)
    display_id = transient.get("display_id") if isinstance(transient, dict) else None
    return Slot(Kind.UPDATE, display_id if isinstance(display_id, str) else None)


class HermesDisplayHook(ZMQShellDisplayHook):
    """The value of an expression, within the same bounds."""

    def finish_displayhook(self) -> None:
        """Send the value, or hold it back."""
        message: Any = self.msg
        self.msg: Any = None
        if not message or not message["content"]["data"] or not self.session:
            super().finish_displayhook()
            return
        content = message["content"]
        metadata = content["metadata"]
        # What a _repr_mimebundle_ returns beside its forms is checked by nobody.
        bundle = Bundle.of(content["data"], metadata if isinstance(metadata, dict) else {})
        content.update(data=bundle.data, metadata=bundle.metadata)

        def send() -> None:
            self.msg = message
            ZMQShellDisplayHook.finish_displayhook(self)

        if self.shell.displays.admit(Slot(Kind.VALUE), bundle.size, send):
            send()
