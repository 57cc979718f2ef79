"""What a sidecar process waits for, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

if sys.platform == "win32":
    pytest.skip("no sidecar runs there", allow_module_level=True)

from hermes_kernel.sidecar.events import Events, Host
from hermes_kernel.sidecar.system import system


@contextmanager
def events_of(host: "subprocess.Popen[bytes]") -> Iterator[Events]:
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    events = Events(Host.of(host.pid, system.started(host.pid)))
    try:
        yield events
    finally:
        events.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def host() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_host_that_lives_is_not_waited_for_longer_than_that(host: "subprocess.Popen[bytes]") -> None:
    with events_of(host) as events:
        began = time.monotonic()
        assert not events.host_ends_within(0)
        assert not events.host_ends_within(0.2)
        assert 0.2 <= time.monotonic() - began < 5


@pytest.mark.parametrize("watched", [True, False], ids=["pidfd", "no pidfd"])
def test_a_host_that_is_about_to_end_is_seen_to(host: "subprocess.Popen[bytes]", watched: bool) -> None:
    with events_of(host) as events:
        if not watched and events.host.watch is not None:
            os.close(events.host.watch)
            events.host.watch = None
        threading.Timer(0.2, host.kill).start()
        assert events.host_ends_within(20)
        assert events.host_ends_within(0)
