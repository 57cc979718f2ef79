"""What holds on stock paths as well as on ours, and how one can tell which it is."""

from collections.abc import Callable

import pytest

from hermes_kernel import BlockingRegistry, CellStatus

Make = Callable[..., BlockingRegistry]


@pytest.mark.parametrize("plain", [False, True])
def test_a_kernel_says_whether_it_runs_on_stock_paths(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setenv("HERMES_KERNEL_PLAIN", "1" if plain else "0")
    registry = make_registry()
    result = registry.execute("import os; os.environ.get('HERMES_KERNEL_PLAIN')", owner="a")
    assert (result.kernel.degraded is not None) is plain
    assert registry.kernels()[0].degraded == result.kernel.degraded
    assert result.value is None


@pytest.mark.parametrize("plain", [False, True])
def test_output_order_threads_and_children_come_out_alike_on_both_paths(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    monkeypatch.setenv("HERMES_KERNEL_PLAIN", "1" if plain else "0")
    registry = make_registry()
    for _ in range(20):
        result = registry.execute(
            "import os, sys\n"
            "print('a'); print('b', file=sys.stderr); print('c'); sys.stdout.flush()\n"
            "os.write(1, b'd\\n'); _ = os.system('echo e'); print('f')",
            owner="a",
        )
        assert result.stdout == "a\nc\nd\ne\nf\n"
        assert result.text.startswith("a\nb\nc\n")
    assert registry.execute("for i in range(200): print(i)", owner="a").stdout.count("\n") == 200
    assert (
        registry.execute("import asyncio; await asyncio.sleep(0); 1 / 0", owner="a").status
        is CellStatus.ERROR
    )
