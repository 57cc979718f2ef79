"""A client that is killed: it begins a cell that never ends, says so, and waits."""

import asyncio
import sys
from pathlib import Path

from .client import connected

CODE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"],
                         start_new_session=True)
print(f"pids {os.getpid()} {child.pid} begun", flush=True)
import time
while True:
    print("more", flush=True)
    time.sleep(0.01)
"""


async def main(said: str, *arguments: str) -> None:
    async with connected(Path(said), *arguments) as client:
        call = await client.begin(CODE)
        words = client.written.split()
        print(client.process.pid, *words[words.index("pids") + 1 :][:2], flush=True)
        await call


asyncio.run(main(*sys.argv[1:]))
