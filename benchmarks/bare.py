"""A bare pipe runner, to measure beside: an exec loop in ``python -c``, a line of JSON each way."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

RUNNER = """
import json, sys
names = {}
for line in sys.stdin:
    code = json.loads(line)
    try:
        value = eval(code, names)
    except SyntaxError:
        exec(code, names)
        value = None
    sys.stdout.write(json.dumps(repr(value)) + "\\n")
    sys.stdout.flush()
"""


class Bare:
    """One runner process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        return str(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def first_results(number: int) -> list[Bare]:
    """Start *number* runners at once and wait until each has given its first result."""

    def one(_: int) -> Bare:
        runner = Bare()
        assert runner.run("1 + 1") == "2"
        return runner

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(one, range(number)))
