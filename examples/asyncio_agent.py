"""Two conversations at once, each a task with a kernel of its own: python examples/asyncio_agent.py"""

import asyncio

from hermes_kernel import KernelRegistry, Limits

SCRIPTS = {  # what a model would ask for, turn by turn
    "anna": ["import hermes_tools as h; a, b = h.temperature('Oslo'), h.temperature('Lima')", "b - a"],
    "ben": ["import asyncio; await asyncio.sleep(0.1); done = True", "done"],
}


async def temperature(city: str) -> int:
    """How warm it is there; a service that takes its time."""
    await asyncio.sleep(0.05)
    return {"Oslo": -2, "Lima": 19}[city]


async def conversation(registry: KernelRegistry, owner: str) -> list[str]:
    """Run one conversation's cells, one after another; return what its model would read."""
    read = []
    for code in SCRIPTS[owner]:
        result = await registry.execute(code, owner=owner, tools=[temperature])
        read.append(f"{owner} {result.status.value}: {result.text.strip() or '-'}")
    return read


async def main() -> None:
    """Run all conversations side by side; then give one up in the middle of a cell."""
    async with KernelRegistry(limits=Limits(max_kernels=8)) as registry:
        for read in await asyncio.gather(*(conversation(registry, owner) for owner in SCRIPTS)):
            print(*read, sep="\n")
        task = asyncio.create_task(registry.execute("import time; time.sleep(60)", owner="ben"))
        await asyncio.sleep(0.5)
        task.cancel()  # interrupts the cell
        await asyncio.wait([task])
        print("ben", (await registry.execute("done", owner="ben")).warning)


asyncio.run(main())
