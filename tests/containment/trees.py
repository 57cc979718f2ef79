"""Process trees that try to get away: ``trees.py MARK SHAPE`` grows one below itself and says "ready".

Everything carries MARK in its command line, and ends by itself after LIFE seconds.
"""

import mmap
import os
import random
import signal
import struct
import sys
import time

LIFE = 15.0
RACERS = 4
BOMB = 40
_SLOT = struct.Struct("<I")


def plain() -> None:
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(LIFE)
            os._exit(0)


def escaped() -> None:
    """Sessions of their own, orphans from the start."""
    for _ in range(50):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(LIFE)
            os._exit(0)
    for _ in range(50):  # until each is where it wants to be
        os.wait()


def deaf() -> None:
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                continue
    for _ in range(10):
        if os.fork() == 0:
            os.setsid()
            time.sleep(LIFE)
            os._exit(0)


def racers() -> None:
    """Each process lives until it has a child in a session of its own."""
    until = time.monotonic() + LIFE
    for _ in range(RACERS):
        if os.fork() == 0:
            while time.monotonic() < until:
                if os.fork():
                    os._exit(0)
                os.setsid()
            os._exit(0)


def bomb() -> None:
    """Each process fills the places of those that have died, at most BOMB in all."""
    until = time.monotonic() + LIFE
    places = mmap.mmap(-1, BOMB * _SLOT.size)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while time.monotonic() < until:
            at = random.randrange(BOMB) * _SLOT.size
            (pid,) = _SLOT.unpack_from(places, at)
            if pid and is_alive(pid):
                time.sleep(0.001)
                continue
            _SLOT.pack_into(places, at, os.getpid())
            child = os.fork()
            if child == 0:
                os.setsid()
            else:
                _SLOT.pack_into(places, at, child)
        os._exit(0)
    while sum(bool(pid) for (pid,) in _SLOT.iter_unpack(places)) < BOMB * 0.9:
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SHAPES = {shape.__name__: shape for shape in (plain, escaped, deaf, racers, bomb)}

if __name__ == "__main__":
    SHAPES[sys.argv[2]]()
    os.write(1, b"ready\n")
    os.close(1)
    time.sleep(LIFE)
