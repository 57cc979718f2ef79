"""Many threads, or tasks, do everything at once: nothing hangs, nothing leaks, nothing is lost silently."""

import asyncio
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, HermesKernelError, KernelRegistry, Limits

SEED = int(os.environ.get("HERMES_TEST_SEED") or random.SystemRandom().randrange(10**9))
OPERATIONS = int(os.environ.get("HERMES_TEST_SOAK") or 50)
"""How many a thread; 200 for the long run (HERMES_TEST_SOAK=200)."""

THREADS = 20
OWNERS = ("a", "b", "c", "d", "e")
LIMITS = Limits(max_kernels=3, timeout=60, start_timeout=60)
BOUND = 60 + OPERATIONS  # seconds for the whole

COUNT = "n = globals().get('n', 0) + 1; print(n)"
SLOW = "import time; n = globals().get('n', 0) + 1; print(n, flush=True); time.sleep(.1)"
WEIGHTS = {"run": 84, "fail": 4, "reset": 3, "interrupt": 3, "timeout": 3, "close": 2, "exit": 1}

CUT = (CellStatus.INTERRUPTED, CellStatus.TIMED_OUT)

Logbook = dict[str, list[CellResult]]


def violations(results: Logbook) -> list[str]:
    """What contradicts that each kernel counts its cells without a gap and each new one is explained."""
    wrong = []
    for owner, told in results.items():
        kernels: dict[str, list[CellResult]] = defaultdict(list)
        for result in told:
            if result.ran:
                kernels[result.kernel.kernel_id].append(result)
            elif result.status not in CUT or result.kernel.ended or result.kernel.lost is not None:
                wrong.append(f"{owner}: a call that did not run says {result.kernel}")
        silent = 0
        for kernel, cells in kernels.items():
            cells.sort(key=lambda result: result.execution_count or 0)
            story = f"{owner} {kernel[:4]}: " + ", ".join(
                f"{c.execution_count} {c.status.value} {c.stdout.strip()} {c.kernel.lost}" for c in cells
            )
            counted = [int(cell.stdout) for cell in cells if cell.stdout.strip()]
            if counted != [*range(1, len(counted) + 1)]:
                wrong.append(f"a state that is not the one of before: {story}")
            if any(not cell.stdout.strip() and cell.status not in CUT for cell in cells):
                wrong.append(f"a count is missing: {story}")
            if any(cell.kernel.ended for cell in cells[:-1]):
                wrong.append(f"it ran on: {story}")
            if any(cell.kernel.lost is not None for cell in cells[1:]):
                wrong.append(f"told of a loss that was none: {story}")
            silent += cells[0].kernel.lost is None
        if silent > 1:
            wrong.append(f"{owner}: {silent - 1} losses were not told")
    return wrong


def arguments(operation: str, choose: random.Random) -> tuple[str, dict[str, object]]:
    match operation:
        case "fail":
            return COUNT + "; 1/0", {}
        case "reset":
            return COUNT, {"reset": True}
        case "timeout":
            return SLOW, {"timeout": choose.uniform(0.01, 0.2)}
        case "exit":
            return COUNT + "; import sys; sys.exit()", {}
        case "interrupt":
            return SLOW, {}
    return COUNT, {}


@pytest.mark.timeout(BOUND + 60)
def test_twenty_threads_and_five_owners_do_everything_at_once(
    make_registry: Callable[..., BlockingRegistry],
) -> None:
    print(f"seed {SEED}, {THREADS} threads x {OPERATIONS} operations")
    registry = make_registry(limits=LIMITS)
    results: Logbook = defaultdict(list)
    done: Counter[str] = Counter()
    failures: list[BaseException] = []
    refused: list[HermesKernelError] = []

    def converse(number: int) -> None:
        choose = random.Random(SEED + number)
        try:
            for _ in range(OPERATIONS):
                owner = choose.choice(OWNERS)
                (operation,) = choose.choices([*WEIGHTS], [*WEIGHTS.values()])
                done[operation] += 1
                if operation == "close":
                    registry.close_owner(owner)
                    continue
                code, how = arguments(operation, choose)
                if operation == "interrupt":
                    at = time.monotonic() + choose.uniform(0, 0.3)
                    how["interrupted"] = lambda at=at: time.monotonic() > at
                try:
                    results[owner].append(registry.execute(code, owner=owner, **how))  # type: ignore[arg-type]
                except HermesKernelError as error:
                    refused.append(error)
        except BaseException as error:  # the edge of a thread: the test says it
            failures.append(error)

    threads = [threading.Thread(target=converse, args=(n,), daemon=True) for n in range(THREADS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(began + BOUND - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), f"stuck after {done}, seed {SEED}"
    assert failures == []
    assert all("not run" in str(error) for error in refused), refused
    print(dict(done), Counter(r.status.value for told in results.values() for r in told), len(refused))
    stats = registry.stats()
    assert (stats["attached"], stats["kernels"] <= LIMITS.max_kernels + 2) == (0, True)
    for owner in OWNERS:
        assert registry.execute("6 * 7", owner=owner).value == "42"
    registry.close()
    assert violations(results) == []


@pytest.mark.timeout(BOUND + 60)
def test_tasks_and_owners_do_everything_at_once(leaves_nothing: None) -> None:
    print(f"seed {SEED}")
    results: Logbook = defaultdict(list)

    async def converse(registry: KernelRegistry, number: int) -> None:
        choose = random.Random(SEED - number)
        for _ in range(max(OPERATIONS // 5, 5)):
            owner = choose.choice(OWNERS[:3])
            (operation,) = choose.choices([*WEIGHTS], [*WEIGHTS.values()])
            if operation == "close":
                await registry.close_owner(owner)
                continue
            code, how = arguments(operation, choose)
            call = asyncio.create_task(registry.execute(code, owner=owner, **how))  # type: ignore[arg-type]
            if operation == "interrupt":
                await asyncio.wait({call}, timeout=choose.uniform(0, 0.3))
                call.cancel()
            await asyncio.wait({call})
            if not call.cancelled() and call.exception() is None:
                results[owner].append(call.result())
            elif not call.cancelled():
                assert "not run" in str(call.exception())

    async def conversation() -> None:
        async with KernelRegistry(limits=LIMITS) as registry, asyncio.timeout(BOUND):
            await asyncio.gather(*(converse(registry, n) for n in range(20)))
            assert (await registry.stats())["attached"] == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(conversation())
    for owner, told in results.items():
        # A cancelled call has no result, so there may be gaps here; never a step back on one kernel.
        kernels: dict[str, list[CellResult]] = defaultdict(list)
        for result in told:
            if result.ran:
                kernels[result.kernel.kernel_id].append(result)
        for cells in kernels.values():
            cells.sort(key=lambda result: result.execution_count or 0)
            counted = [int(result.stdout) for result in cells if result.stdout.strip()]
            assert counted == sorted(set(counted)), (owner, cells)
            assert all(result.kernel.lost is None for result in cells[1:]), (owner, cells)
