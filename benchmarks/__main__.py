"""Measure hermes_kernel beside a stock kernel: ``python -m benchmarks [--quick] [--json FILE] [metric ...]``.

Tool calls are measured beside bare lines of JSON over a socket.

A metric is a function that makes its contenders; each round runs all of them in turn, so that whatever else
the machine does meets them alike. Shown are medians, quartiles and the median of the paired ratios.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

from jupyter_client.manager import start_new_kernel

from hermes_kernel import BlockingRegistry

from . import processes
from .echo import bare_echo

Contender = Callable[[], float]


@contextmanager
def ours(code: str) -> Iterator[Contender]:
    with BlockingRegistry() as registry:
        registry.execute(code, owner="benchmark")

        def run() -> float:
            start = time.perf_counter()
            registry.execute(code, owner="benchmark")
            return time.perf_counter() - start

        yield run


@contextmanager
def stock(code: str) -> Iterator[Contender]:
    manager, client = start_new_kernel(kernel_name="python3")
    try:

        def run() -> float:
            start = time.perf_counter()
            client.execute_interactive(code, output_hook=lambda _: None, allow_stdin=False)
            return time.perf_counter() - start

        run()
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def warm(code: str) -> Callable[[ExitStack], dict[str, Contender]]:
    """A cell on a kernel that is up: from the call to its result, reply and idle."""
    return lambda stack: {name.__name__: stack.enter_context(name(code)) for name in (ours, stock)}


def cold(_: ExitStack) -> dict[str, Contender]:
    """The first result of an owner whose kernel is not there yet."""

    def of_ours() -> float:
        with BlockingRegistry() as registry:
            start = time.perf_counter()
            registry.execute("1 + 1", owner="benchmark")
            return time.perf_counter() - start

    def of_stock() -> float:
        start = time.perf_counter()
        manager, client = start_new_kernel(kernel_name="python3")
        client.execute_interactive("1 + 1", output_hook=lambda _: None, allow_stdin=False)
        took = time.perf_counter() - start
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        return took

    return {"ours": of_ours, "stock": of_stock}


TOOL_CELL = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.echo import timed
import hermes_tools
timed(lambda: hermes_tools.echo, {calls}, {threads}, "x" * {size})
"""


def echo(x: str) -> str:
    """Give x back."""
    return x


@contextmanager
def tool_calls(calls: int, threads: int, size: int) -> Iterator[Contender]:
    """The seconds of one call from a cell, as ``bare_echo`` measures them from a bare Python."""
    code = TOOL_CELL.format(root=os.getcwd(), calls=calls, threads=threads, size=size)
    with BlockingRegistry() as registry:

        def run() -> float:
            result = registry.execute(code, owner="benchmark", tools=[echo], max_tool_calls=None)
            return float(result.value or "nan")

        run()
        yield run


def tools(calls: int, threads: int, size: int) -> Callable[[ExitStack], dict[str, Contender]]:
    """One tool call from a cell beside one line of JSON over a unix socket and back."""
    contenders = {"ours": tool_calls, "bare": bare_echo}
    return lambda stack: {
        name: stack.enter_context(contender(calls, threads, size)) for name, contender in contenders.items()
    }


LINES = "for i in range(500_000): print('x' * 99)"
METRICS: dict[str, tuple[Callable[[ExitStack], dict[str, Contender]], int]] = {
    "warm-pass": (warm("pass"), 200),
    "warm-print": (warm("print(1)"), 200),
    "warm-error": (warm("1 / 0"), 100),
    "cold": (cold, 9),
    "first-result-forked": (processes.forked, 25),
    "first-result-spare": (processes.spare, 25),
    "first-result-new-registry": (processes.new_registry, 9),
    "sixteen-at-once": (processes.at_once, 9),
    "timeout-deaf-child": (processes.deaf_child, 15),
    "print-50MB": (warm("print('x' * 50_000_000)"), 5),
    "print-500000-lines": (warm(LINES), 3),
    "tool-call-1kB": (tools(2000, 1, 1000), 15),
    "tool-call-1kB-8-threads": (tools(4000, 8, 1000), 9),
    "tool-call-1MB": (tools(40, 1, 1_000_000), 9),
}


# What is not a time of rounds: a function that gives the figures.
COUNTS: dict[str, Callable[[bool], dict[str, float]]] = {
    "memory-of-16": lambda quick: processes.memory(),
    "cycles": lambda quick: processes.cycles(60 if quick else 500),
}


def measure(metric: str, *, rounds: int) -> dict[str, Any]:
    make, _ = METRICS[metric]
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        contenders = make(stack)
        for _ in range(rounds):
            for name, run in contenders.items():
                times.setdefault(name, []).append(run() * 1000)
    ours = times.pop("ours")

    def beside(other: list[float]) -> dict[str, list[float]]:
        return {"ms": quartiles(other), "ratio": quartiles([a / b for a, b in zip(ours, other, strict=True)])}

    return {
        "metric": metric,
        "n": rounds,
        "ours_ms": quartiles(ours),
        "others": {name: beside(other) for name, other in times.items()},
    }


def quartiles(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return [round(low, 3), round(middle, 3), round(high, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = ", ".join([*METRICS, *COUNTS])
    parser.add_argument("metrics", nargs="*", help=f"of {known}; default: all")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    packages = ("jupyter_client", "ipykernel", "pyzmq", "ipython")
    facts = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        **{package: version(package) for package in packages},
    }
    print(json.dumps(facts))
    columns = ("ours ms [quartiles]", "beside", "its ms [quartiles]", "paired ratio")
    widths = (30, 10, 30, 22)
    headings = "  ".join(f"{column:>{width}}" for column, width in zip(columns, widths, strict=True))
    print(f"{'metric':26} {'n':>4}  {headings}")
    figures: list[dict[str, Any]] = []
    for metric in arguments.metrics or [*METRICS, *COUNTS]:
        if metric in COUNTS:
            figures.append({"metric": metric, **COUNTS[metric](arguments.quick)})
            print(json.dumps(figures[-1]), flush=True)
            continue
        if metric not in METRICS:
            sys.exit(f"unknown metric {metric!r}: known are {known}")
        rounds = METRICS[metric][1]
        rounds = max(2, rounds // 4) if arguments.quick else rounds
        figure = measure(metric, rounds=rounds)
        figures.append(figure)
        others = figure["others"] or {"-": {"ms": [0.0] * 3, "ratio": [0.0] * 3}}
        for name, other in others.items():
            rows = (figure["ours_ms"], other["ms"], other["ratio"])
            own, its, ratio = (f"{middle} [{low}-{high}]" for low, middle, high in rows)
            print(f"{metric:26} {rounds:>4}  {own:>30}  {name:>10}  {its:>30}  {ratio:>22}", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": facts, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
