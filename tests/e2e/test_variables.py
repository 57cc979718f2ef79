"""What an owner's live kernel tells of its variables."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel import (
    BlockingRegistry,
    CellResult,
    CellStatus,
    HermesKernelError,
    KernelRegistry,
    Limits,
    Owner,
)

Make = Callable[..., BlockingRegistry]

HOSTILE = """
import sys, types
class Meta(type):
    def __hash__(kind): raise SystemExit
    def __getattribute__(kind, name): raise SystemExit
    def __instancecheck__(kind, it): raise SystemExit
class Name(str):
    def __len__(self): raise SystemExit
    def __format__(self, spec): raise SystemExit
class Bad(list, metaclass=Meta):
    __slots__ = ()
    def __repr__(self): open(asked, 'w').close()
    def __len__(self): open(asked, 'w').close()
    def __sizeof__(self): open(asked, 'w').close()
    def __getattribute__(self, name): open(asked, 'w').close(); raise SystemExit
    __class__ = property(lambda self: open(asked, 'w').close())
class Plain: pass
Plain.__qualname__ = Name('Plain')
fake = types.ModuleType('numpy')
class ndarray:
    nbytes = property(lambda self: open(asked, 'w').close())
    dtype = shape = nbytes
fake.ndarray = ndarray
bad, within, plain, array = Bad(), [Bad()], Plain(), ndarray()
sys.modules['numpy'] = fake
globals()['\\ud800'] = '\\ud800'
"""


def short(registry: BlockingRegistry, owner: str | Owner = "a") -> dict[str, str]:
    return {variable.name: variable.text for variable in registry.variables(owner)}


@contextmanager
def running(
    registry: BlockingRegistry, place: Path, code: str = "", **options: Any
) -> Iterator[list[CellResult]]:
    """A cell that has begun and ends with the block."""
    begun, go_on = place / "begun", place / "go on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    code = f"{code}\nopen({str(begun)!r}, 'w').close(); open({str(go_on)!r}).close()"
    results: list[CellResult] = []
    cell = threading.Thread(target=lambda: results.append(registry.execute(code, owner="a", **options)))
    cell.start()
    begun.read_bytes()
    try:
        yield results
    finally:
        go_on.write_bytes(b"")
        cell.join(30)


def test_an_owner_without_a_kernel_has_no_variables(registry: BlockingRegistry) -> None:
    registry.execute("x = 1", owner="a")
    assert registry.variables("b") == ()
    assert registry.variables(Owner("a", child="c")) == ()
    registry.close_owner("a")
    assert registry.variables("a") == ()


def test_a_fresh_kernel_has_none_of_its_own(registry: BlockingRegistry) -> None:
    registry.execute("pass", owner="a", tools=[len])
    assert registry.variables("a") == ()


def test_variables_are_told_by_name_with_their_types_and_sizes(registry: BlockingRegistry) -> None:
    registry.execute("import os\nrows = [1, 2]\ndef f(a): pass\nclass C: pass\nc = C(); _x = 1", owner="a")
    found = registry.variables("a")
    assert [(variable.name, variable.type, variable.text) for variable in found] == [
        ("C", "type", "C"),
        ("c", "C", ""),
        ("f", "function", "f(a)"),
        ("os", "module", "os"),
        ("rows", "list", "[1, 2]"),
    ]
    assert found[4].size is not None
    assert found[4].size > 0


def test_looking_changes_nothing(registry: BlockingRegistry) -> None:
    first = registry.execute("x = 1", owner="a")
    registry.variables("a")
    result = registry.execute("x", owner="a")
    assert (result.value, result.kernel.foreign_cells) == ("1", 0)
    assert result.execution_count == (first.execution_count or 0) + 1


def test_what_an_owner_has_done_to_the_names_of_the_kernel_is_seen(registry: BlockingRegistry) -> None:
    registry.execute("exit = 3\nexit", owner="a")
    assert short(registry) == {"exit": "3"}


def test_the_kernel_that_was_used_last_is_asked(registry: BlockingRegistry, tmp_path: Path) -> None:
    registry.execute("x = 1", owner="a")
    registry.execute("x = 2", owner="a", cwd=str(tmp_path))
    assert short(registry) == {"x": "2"}
    registry.execute("pass", owner="a")
    assert short(registry) == {"x": "1"}


def test_variables_are_told_while_a_cell_runs(registry: BlockingRegistry, tmp_path: Path) -> None:
    with running(registry, tmp_path, "x = 1") as results:
        assert short(registry) == {"x": "1"}
    assert results[0].status is CellStatus.OK


def test_many_threads_may_ask_at_once(registry: BlockingRegistry) -> None:
    registry.execute("x = 1", owner="a")
    found: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda: found.append(short(registry))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [{"x": "1"}] * 20


def test_a_cell_that_keeps_the_interpreter_to_itself_is_not_waited_for_longer_than_said(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    """A call of a C function that does not let go of the GIL, on a pipe that the test ends."""
    registry.execute("x = 1", owner="a")
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    code = f"""
import ctypes, os, sys
reader, writer = (os.open(path, os.O_RDWR) for path in ({str(go_on)!r}, {str(begun)!r}))
buffer, library, interval = ctypes.create_string_buffer(1), ctypes.PyDLL(None), sys.getswitchinterval()
read, write = library.read, library.write
sys.setswitchinterval(1000)  # no other thread comes between the two
write(writer, b'x', 1)
read(reader, buffer, 1)
sys.setswitchinterval(interval)
"""
    results: list[CellResult] = []
    cell = threading.Thread(target=lambda: results.append(registry.execute(code, owner="a", timeout=60)))
    cell.start()
    with begun.open("rb", buffering=0) as pipe:
        assert pipe.read(1) == b"x"
    try:
        with pytest.raises(HermesKernelError, match="did not answer within 5 s"):
            registry.variables("a")
    finally:
        go_on.write_bytes(b"x")
        cell.join(30)
    assert (results[0].status, results[0].kernel.ended) == (CellStatus.OK, False)
    assert short(registry)["x"] == "1"
    assert registry.execute("x", owner="a").value == "1"


def test_a_kernel_that_has_died_has_no_variables(registry: BlockingRegistry) -> None:
    registry.execute("x = 1", owner="a")
    assert registry.execute("import os; os._exit(3)", owner="a").status is CellStatus.DIED
    assert registry.variables("a") == ()
    registry.execute("y = 1", owner="a")
    assert short(registry) == {"y": "1"}


def test_a_kernel_that_dies_while_it_is_asked_has_no_variables(
    registry: BlockingRegistry, tmp_path: Path
) -> None:
    registry.execute("x = 1", owner="a")
    (info,) = registry.kernels()
    assert info.pid is not None
    os.kill(info.pid, 19)  # SIGSTOP: it cannot answer
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(registry.variables("a")))
    asking.start()
    os.kill(info.pid, 9)
    asking.join(30)
    assert found == [()]


def test_secrets_are_masked(make_registry: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    withheld, given = "w1thheld-" * 6, "g1ven-" * 30
    monkeypatch.setenv("SERVICE_TOKEN", withheld)
    registry = make_registry(secrets=[given], clean=lambda text: text.replace("Bob", "B."))
    file = tmp_path / "secrets"
    file.write_text(f"{withheld}\n{given}\nBob\nsk-ant-api03-{'aB3' * 30}")
    registry.execute(
        f"one, two, name, key = open({str(file)!r}).read().split()\n"
        "items, table, late = [one, two], {one: two}, '-' * 100 + two\n"
        "globals()[one] = 1; kind = type(two, (), {}); it = kind()\n"
        "raw, long = one.encode(), (two + ' ') * 10_000",
        owner="a",
    )
    found = registry.variables("a")
    for part in (withheld[:9], given[:10], "Bob", "aB3aB3aB3"):
        assert part not in repr(found)
    texts = {variable.name: variable.text for variable in found}
    assert (texts["one"], texts["items"], texts["name"]) == ("'***'", "['***', '***']", "'B.'")
    assert {variable.type for variable in found} >= {"***"}


def test_what_objects_do_when_they_are_asked_is_not_done(registry: BlockingRegistry, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    result = registry.execute(f"asked = {str(asked)!r}\n{HOSTILE}", owner="a")
    assert result.status is CellStatus.OK, result.text
    found = short(registry)
    assert (found["bad"], found["within"], found["plain"], found["array"]) == ("", "[<Bad>]", "", "")
    assert found["\\ud800"] == "'\\ud800'"
    assert not asked.exists()
    assert short(registry) == found  # what answers is still there
    # IPython itself looks at a number with the module numpy, if there is one.
    assert registry.execute("del sys.modules['numpy']\n6 * 7", owner="a").value == "42"


def test_the_asyncio_registry_tells_the_same(leaves_nothing: None) -> None:
    async def main() -> None:
        async with KernelRegistry(limits=Limits(spare_kernels=0)) as registry:
            assert await registry.variables("a") == ()
            await registry.execute("x = 1", owner="a")
            (variable,) = await registry.variables("a")
            assert (variable.name, variable.type, variable.text) == ("x", "int", "1")
            cell = asyncio.create_task(
                registry.execute("import asyncio; await asyncio.sleep(600)", owner="a")
            )
            assert (await registry.variables("a"))[-1].name == "x"
            cell.cancel()

    asyncio.run(main())


def test_a_closed_registry_says_so(make_registry: Make) -> None:
    registry = make_registry()
    registry.close()
    with pytest.raises(HermesKernelError, match="closed"):
        registry.variables("a")
