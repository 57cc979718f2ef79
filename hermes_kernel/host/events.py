"""Tells a caller what its cell does while it runs, on a thread that nobody else waits for."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ..cell.events import CellEvent, Display, StreamText, ToolCallEnded, ToolCallStarted
from ..cell.message import Message
from ..cell.outputs import size_of
from ..cell.shown import Cleaner, masked
from ..cell.text import StreamCleaner

MAX_WAITING = 1024 * 1024  # characters that wait for a slow caller; more is left out, and said
MAX_EVENTS = 10_000  # events that wait
DELIVERY = 2.0  # seconds that a result waits for its events to be taken

_DISPLAYS = ("display_data", "update_display_data", "execute_result")
_log = logging.getLogger(__name__)


class EventPump:
    """The events of one call, in order. What it is told is told on a thread of its own.

    A caller that does not take them holds nothing up: the cell goes on, and text that does not fit is
    counted instead.
    """

    def __init__(self, on_event: Callable[[CellEvent], None], cleaner: Cleaner) -> None:
        self._on_event = on_event
        self._cleaner = cleaner
        self._lines = StreamCleaner(cleaner.mask)
        self._waiting: deque[tuple[str, str] | CellEvent] = deque()
        self._size = 0
        self._skipped: dict[str, int] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._over = False
        self._is_abandoned = False
        self._done: Callable[[], None] | None = None

    def tell(self, event: CellEvent) -> None:
        """Tell an event. Never waits."""
        self._put(event, 0)

    def tell_message(self, message: Message) -> None:
        """Tell what a message of the cell shows, if it does. Never waits."""
        content = message.content
        if message.msg_type == "stream":
            self._put((content["name"], content["text"]), len(content["text"]))
        elif message.msg_type in _DISPLAYS:
            data, metadata = content["data"], content.get("metadata", {})
            size = size_of([data, metadata], MAX_WAITING + 1)
            updates = message.msg_type == "update_display_data"
            self._put(Display(data, metadata, updates), size)

    async def close(self) -> None:
        """Tell the rest; wait until it is taken, but not for ever."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell_done() -> None:
            loop.call_soon_threadsafe(done.set)

        with self._changed:
            if self._thread is None:
                return
            self._over = True
            self._done = tell_done
            self._changed.notify()
        try:
            async with asyncio.timeout(DELIVERY):
                await done.wait()
        except TimeoutError:
            _log.warning(
                "on_event takes longer than %s s: the rest of the events are told to nobody", DELIVERY
            )
            with self._changed:
                self._waiting.clear()
                self._is_abandoned = True

    def _put(self, item: tuple[str, str] | CellEvent, size: int) -> None:
        with self._changed:
            if self._over:
                return
            if self._size + size > MAX_WAITING or len(self._waiting) >= MAX_EVENTS:
                if isinstance(item, tuple):
                    self._skipped[item[0]] = self._skipped.get(item[0], 0) + len(item[1])
                    return
                if isinstance(item, Display):
                    return
            self._size += size
            self._waiting.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hermes-events", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._over:
                    self._changed.wait()
                items, skipped = list(self._waiting), self._skipped
                self._waiting.clear()
                self._size, self._skipped = 0, {}
                over = self._over
            self._tell_all(items, skipped)
            if over and not self._waiting:
                self._tell_all([StreamText(*piece) for piece in self._lines.finish()], {})
                if self._done is not None:
                    self._finish(self._done)
                return

    @staticmethod
    def _finish(done: Callable[[], None]) -> None:
        try:
            done()
        except RuntimeError as error:  # the registry was closed meanwhile
            _log.info("nobody waits for the events any more: %s", error)

    def _tell_all(self, items: list[tuple[str, str] | CellEvent], skipped: dict[str, int]) -> None:
        for item in items:
            if isinstance(item, tuple):
                for name, text in self._lines.feed(*item):
                    self._call(StreamText(name, text))
            elif isinstance(item, Display):
                data, metadata = (masked(part, self._cleaner) for part in (item.data, item.metadata))
                self._call(Display(data, metadata, item.updates))
            else:
                self._call(self._masked_call(item))
        for name, count in skipped.items():
            self._call(StreamText(name, "", count))

    def _masked_call(self, event: CellEvent) -> CellEvent:
        match event:
            case ToolCallStarted():
                return replace(event, args=self._cleaner.mask(event.args))
            case ToolCallEnded(error=str(error)):
                return replace(event, error=self._cleaner.mask(error))
        return event

    def _call(self, event: CellEvent) -> None:
        if self._is_abandoned:  # the call has returned: this would be told beside the next one's
            return
        try:
            self._on_event(event)
        except BaseException:  # noqa: BLE001  # the host's function; the cell and this thread must go on
            _log.exception("on_event failed for %s", type(event).__name__)
