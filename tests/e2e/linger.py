"""``linger.py DIRECTORY NAME`` notes its pid in a file of that name, and does nothing for a while."""

import os
import signal
import sys
import time

LIFE = 60


def linger(directory: str, name: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(f"{directory}/.{name}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{directory}/.{name}", f"{directory}/{name}")
    time.sleep(LIFE)


if __name__ == "__main__":
    linger(*sys.argv[1:3])
