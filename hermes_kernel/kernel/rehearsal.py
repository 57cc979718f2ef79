"""Lets a kernel answer once where nobody listens, so that its first answer is as quick as the next ones.

What is made on first use is made then, and in a forked process the memory that an answer touches is its own
already. Nothing of it stays: not a name, not a number, not a message.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("kernel_info_request", {}),
    ("execute_request", {"code": "1 + 1", "silent": False, "store_history": False, "user_expressions": {}}),
)


class Nowhere:
    """In the place of a socket: takes everything."""

    closed = False

    def send_multipart(self, *args: Any, **kwargs: Any) -> None:
        """Take a message."""

    def flush(self, *args: Any) -> None:
        """There is nothing to wait for."""


def rehearse(app: Any) -> None:
    """Have the kernel of *app* answer some requests.

    One that has no connection yet does it on an event loop that is gone afterwards: a fork would share it.
    """
    kernel = app.kernel
    kernel.bind()  # to this process, for the time being
    if kernel.shell_stream is not None:
        _answer(app, kernel.shell_stream.io_loop.asyncio_loop)
        return
    loop = asyncio.new_event_loop()
    try:
        _answer(app, loop)
    finally:
        loop.close()
        asyncio.set_event_loop(None)


def _answer(app: Any, loop: asyncio.AbstractEventLoop) -> None:
    kernel, session = app.kernel, app.session
    with _nothing_kept(app), _to_nowhere(kernel):
        for kind, content in REQUESTS:
            parts = session.serialize(session.msg(kind, content), ident=b"nobody")
            loop.run_until_complete(kernel.dispatch_shell([zmq.Frame(part) for part in parts]))


@contextmanager
def _to_nowhere(kernel: Any) -> Iterator[None]:
    nowhere = Nowhere()
    places: list[tuple[Any, str, Any]] = [
        (kernel, "iopub_socket", nowhere),
        (kernel, "shell_stream", None),
        (kernel.shell.displayhook, "pub_socket", nowhere),
        (kernel.shell.display_pub, "pub_socket", nowhere),
    ]
    before = [getattr(home, name) for home, name, _ in places]
    for home, name, place in places:
        setattr(home, name, place)
    try:
        yield
    finally:
        for (home, name, _), value in zip(places, before, strict=True):
            setattr(home, name, value)


@contextmanager
def _nothing_kept(app: Any) -> Iterator[None]:
    kernel, shell = app.kernel, app.kernel.shell
    names = dict(shell.user_ns)
    hidden = dict(shell.user_ns_hidden)
    context = kernel._shell_context
    number = app.session.message_count
    try:
        yield
    finally:
        shell.user_ns.clear()
        shell.user_ns.update(names)
        shell.user_ns_hidden.clear()
        shell.user_ns_hidden.update(hidden)
        shell.last_execution_result = None
        shell.exit_code = None
        kernel._shell_context = context
        app.session.digest_history.clear()
        app.session.message_count = number
        app.output_log.begin_cell("")
        for stream in app.streams:
            stream.set_parent({})
