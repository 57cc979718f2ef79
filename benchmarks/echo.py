"""What tool calls are measured against: JSON lines over a unix socket, and nothing else.

``python -m benchmarks.echo PATH`` is the client; for each line on its stdin, ``CALLS THREADS SIZE``, it makes
so many calls and writes the seconds that each took.
"""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def bare_echo(calls: int, threads: int, size: int) -> Iterator[Callable[[], float]]:
    """Make a contender: the seconds of a call, out of *calls* by *threads*, of *size* characters each way."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "echo")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(threads)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        command = [sys.executable, "-m", "benchmarks.echo", path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            requests, answers = client.stdin, client.stdout
            assert requests is not None
            assert answers is not None

            def run() -> float:
                requests.write(f"{calls} {threads} {size}\n")
                requests.flush()
                return float(answers.readline())

            run()
            yield run
            requests.close()
        listener.close()


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_serve, args=(peer,), daemon=True).start()


def _serve(peer: socket.socket) -> None:
    received = b""
    while data := peer.recv(65536):
        received += data
        if received.endswith(b"\n"):
            request = json.loads(received)
            received = b""
            peer.sendall(json.dumps({"result": request["args"]["x"]}).encode() + b"\n")
    peer.close()


def _client(path: str) -> None:
    for line in sys.stdin:
        calls, threads, size = map(int, line.split())
        print(timed(lambda: _Caller(path).call, calls, threads, "x" * size), flush=True)


class _Caller:
    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def call(self, x: str) -> object:
        self._socket.sendall(
            json.dumps({"tool": "echo", "args": {"x": x}, "token": "t" * 43}).encode() + b"\n"
        )
        received = b""
        while not received.endswith(b"\n"):
            received += self._socket.recv(65536)
        return json.loads(received)["result"]


def timed(make: Callable[[], Callable[[str], object]], calls: int, threads: int, x: str) -> float:
    """Return the seconds of one of *calls*, made by *threads* that call what *make* gives each."""
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        call = make()
        call(x)
        ready.wait()
        for _ in range(calls // threads):
            call(x)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return (time.perf_counter() - start) / (calls // threads * threads)


if __name__ == "__main__":
    _client(sys.argv[1])
