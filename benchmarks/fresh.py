"""Run by a new Python: ``fresh.py START_METHOD`` prints the seconds until a registry's first result."""

import sys
import time

from hermes_kernel import BlockingRegistry, Limits


def main() -> None:
    limits = Limits(start_method=sys.argv[1], spare_kernels=0)
    began = time.perf_counter()
    with BlockingRegistry(limits=limits) as registry:
        result = registry.execute("1 + 1", owner="benchmark")
        took = time.perf_counter() - began
    assert result.value == "2", result.text
    print(took)


main()
