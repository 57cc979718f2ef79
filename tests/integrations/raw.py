"""The server without a client's library between: bytes."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .client import COMMAND, WAIT, environment

CLIENT = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}


class Raw:
    """A server process and the lines that go to and fro."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.bytes = b""

    def send(self, message: dict[str, Any] | bytes) -> None:
        assert self.process.stdin is not None
        line = message if isinstance(message, bytes) else json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def initialize(self) -> None:
        self.send({"id": 0, "method": "initialize", "params": CLIENT})
        assert self.answer(0)["result"]["serverInfo"]["name"] == "hermes-kernel"
        self.send({"method": "notifications/initialized"})

    def call(self, number: int, code: str, **more: Any) -> None:
        arguments = {"code": code, **more}
        params = {"name": "execute_code", "arguments": arguments, "_meta": {"progressToken": number}}
        self.send({"id": number, "method": "tools/call", "params": params})

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.bytes += line
        message: dict[str, Any] = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        return message

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to a request; notifications before it are passed over."""
        while (message := self.line()).get("id") != number:
            assert "method" in message, message
        return message

    def told(self, text: str) -> None:
        """Wait until a cell has written this."""
        seen = ""
        while text not in seen:
            seen += self.line()["params"].get("message", "")

    def ended(self) -> int:
        """Wait for the end, reading what comes until then."""
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            self.bytes += self.process.stdout.read()
        return self.process.wait(WAIT)


@contextmanager
def raw(said: Path, *arguments: str | Path, **env: str) -> Iterator[Raw]:
    with said.open("wb") as errors:
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(**env),
        )
    try:
        yield Raw(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # what was not sent needs not be
