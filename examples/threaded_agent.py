"""Two conversations at once, each on a thread with a kernel of its own: python examples/threaded_agent.py"""

from concurrent.futures import ThreadPoolExecutor

from hermes_kernel import BlockingRegistry, Limits

PRICES = {"bolt": 0.25, "nut": 0.10}
SCRIPTS = {  # what a model would ask for, turn by turn
    "anna": [
        "import hermes_tools as h; prices = {part: h.price(part) for part in ('bolt', 'nut')}",
        "order = {'bolt': 40, 'nut': 30}; sum(prices[part] * count for part, count in order.items())",
    ],
    "ben": ["total = 0", "while True: total += 1", "total"],
}


def price(part: str) -> float:
    """What one of a part costs."""
    return PRICES[part]


def conversation(registry: BlockingRegistry, owner: str) -> list[str]:
    """Run one conversation's cells, one after another; return what its model would read."""
    read = []
    for code in SCRIPTS[owner]:
        result = registry.execute(code, owner=owner, tools=[price], timeout=1)
        read.append(f"{owner} {result.status.value}: {result.text.strip() or result.message or '-'}")
    return read


def main() -> None:
    """Run all conversations side by side."""
    with BlockingRegistry(limits=Limits(max_kernels=8)) as registry, ThreadPoolExecutor() as threads:
        for read in threads.map(lambda owner: conversation(registry, owner), SCRIPTS):
            print(*read, sep="\n")


if __name__ == "__main__":
    main()
