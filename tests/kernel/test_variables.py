"""What a kernel tells of its variables, with objects that do harm when they are asked."""

import random
import string
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from hermes_kernel.cell import variables as reader
from hermes_kernel.cell.masks import MARGIN, Masks
from hermes_kernel.kernel import variables as module
from hermes_kernel.kernel.variables import LONG_IN_ALL, MAX_SHORT, MAX_TEXT, MAX_VARIABLES, variables

SPECIAL = (
    "__repr__", "__str__", "__format__", "__len__", "__sizeof__", "__iter__", "__getitem__", "__hash__",
    "__eq__", "__bool__", "__getattribute__", "__getattr__", "__dir__", "__index__", "__float__", "__lt__",
)  # fmt: skip
ENDS = (RuntimeError, SystemExit, KeyboardInterrupt, RecursionError)


class Trap:
    """Notes what code of a cell's runs while its block does, and raises there."""

    def __init__(self, end: type[BaseException] = SystemExit) -> None:
        self.end = end
        self.is_set = False
        self.ran: list[str] = []

    def __enter__(self) -> "Trap":
        self.is_set = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_set = False

    def spring(self, name: str) -> None:
        if self.is_set:
            self.ran.append(name)
            raise self.end(name)

    def method(self, base: Any, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.spring(name)
            return getattr(base, name)(*args, **kwargs)

        return call

    def attribute(self, name: str, value: Callable[[Any], Any]) -> property:
        def get(it: Any) -> Any:
            self.spring(name)
            return value(it)

        return property(get)

    def kind(self, *bases: type) -> Any:
        """A class that asks to be left alone, and so does its own."""
        meta = type("Meta", (type,), {name: self.method(type, name) for name in SPECIAL})
        base = bases[0] if bases else object
        attributes = {
            **{name: self.method(base, name) for name in SPECIAL},
            "__class__": self.attribute("__class__", type),
            "__dict__": self.attribute("__dict__", lambda _: {}),
            "__doc__": self.attribute("__doc__", lambda _: ""),
            "__module__": "__main__",
            "__qualname__": "Hostile",
        }
        return type.__new__(meta, "Hostile", bases, attributes)


@pytest.fixture
def trap() -> Trap:
    return Trap()


def told(namespace: dict[Any, Any], hidden: "dict[Any, Any] | None" = None) -> dict[str, dict[str, Any]]:
    content = variables(namespace, hidden or {})
    assert content["status"] == "ok"
    for entry in content["variables"]:
        assert entry.keys() == {"name", "type", "size", "text"}
        for key in ("name", "type", "text"):
            assert type(entry[key]) is str
            assert len(entry[key]) <= MAX_TEXT
    return {entry["name"]: entry for entry in content["variables"]}


def shown(value: object) -> str:
    text: str = told({"x": value})["x"]["text"]
    return text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (42, "42"),
        (-1.5, "-1.5"),
        (float("nan"), "nan"),
        (1j, "1j"),
        ("a'b\n", '"a\'b\\n"'),
        ("\ud800", "'\\ud800'"),
        (b"\x00", "b'\\x00'"),
        (bytearray(b"x"), "bytearray(b'x')"),
        (range(3), "range(0, 3)"),
        (range(9, 0, -2), "range(9, 0, -2)"),
        (..., "Ellipsis"),
        ([], "[]"),
        ([1, "a", [2]], "[1, 'a', <list>]"),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, 2), "(1, 2)"),
        (set(), "set()"),
        ({1}, "{1}"),
        (frozenset(), "frozenset({})"),
        (frozenset({1}), "frozenset({1})"),
        ({}, "{}"),
        ({"a": 1, 2: {}}, "{'a': 1, 2: <dict>}"),
        (list(range(6)), "[0, 1, 2, 3, 4, … (6)]"),
        (tuple(range(6)), "(0, 1, 2, 3, 4, … (6))"),
        (dict.fromkeys(range(6)), "{0: None, 1: None, 2: None, 3: None, 4: None, … (6)}"),
        (types, "types"),
        (len, "len"),
        ([].append, "append"),
        (int, "int"),
        (threading.Thread, "threading.Thread"),
    ],
)
def test_what_python_brings_is_shown_shortly(value: object, text: str) -> None:
    assert shown(value) == text


def test_functions_are_shown_with_their_parameters_and_not_called() -> None:
    def add(a: int, /, b: int = 2, *rest: int, c: int = 3) -> None:
        raise AssertionError

    assert shown(add) == "add(a, b)"
    assert shown(lambda x: x) == "<lambda>(x)"


def test_sizes_are_in_bytes_and_none_where_they_are_not_known() -> None:
    found = told({"text": "x" * 1000, "many": [0] * 1000, "f": shown, "o": object()})
    assert found["text"]["size"] == sys.getsizeof("x" * 1000)
    assert found["many"]["size"] == sys.getsizeof([0] * 1000)
    assert (found["f"]["size"], found["o"]["size"]) == (None, None)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("base", [object, str, bytes, int, float, list, tuple, dict, set])
def test_no_code_of_an_object_or_its_class_runs(end: type[BaseException], base: type) -> None:
    trap = Trap(end)
    kind = trap.kind(base)
    value = base.__new__(kind)
    namespace = {"value": value, "kind": kind, "list": [value, kind], "dict": {1: value}, "tuple": (value,)}
    with trap:
        found = told(namespace)
    assert trap.ran == []
    assert found["value"] == {"name": "value", "type": "Hostile", "size": None, "text": ""}
    assert found["list"]["text"] == f"[<Hostile>, <{__name__}.Meta>]"
    assert found["dict"]["text"] == "{1: <Hostile>}"
    assert found["kind"]["text"] == ""


def test_a_method_of_a_hostile_objects_base_is_named_without_its_class(trap: Trap) -> None:
    append = list.__dict__["append"].__get__(trap.kind(list)())
    with trap:
        assert shown(append) == "append"
    assert trap.ran == []


def test_a_name_that_is_a_text_of_another_class_is_taken_as_what_it_is(trap: Trap) -> None:
    text = trap.kind(str)

    def function() -> None:
        pass

    kind = type("Kind", (), {"__qualname__": text("Told")})
    moved = type("Kind", (), {"__module__": text("elsewhere"), "__qualname__": text("Told")})
    function.__code__ = function.__code__.replace(co_name=text("told"))
    with trap:
        found = told({"it": kind(), "kind": kind, "moved": moved(), "function": function})
    assert trap.ran == []
    assert (found["it"]["type"], found["kind"]["text"]) == (f"{__name__}.Told", f"{__name__}.Told")
    assert (found["moved"]["type"], found["function"]["text"]) == ("Told", "told()")


def test_a_class_that_was_made_without_a_module_is_named() -> None:
    namespace: dict[str, Any] = {}
    exec("kind = type('Kind', (), {}); it = kind()", namespace)
    found = told({"it": namespace["it"], "kind": namespace["kind"]})
    assert (found["it"]["type"], found["kind"]["text"]) == ("Kind", "Kind")


def test_classes_of_the_cells_own_are_named_without_a_module() -> None:
    kind = type("Kind", (), {"__module__": "__main__"})
    assert told({"it": kind()})["it"]["type"] == "Kind"
    assert told({"it": threading.Thread()})["it"]["type"] == "threading.Thread"


def test_private_names_and_what_the_kernel_has_put_there_are_left_out() -> None:
    own, other = object(), object()
    namespace = {"_": 1, "__name__": "x", "In": own, "exit": other, "x": 1}
    assert list(told(namespace, {"In": own, "exit": own, "gone": 1})) == ["exit", "x"]


def test_names_are_sorted_and_may_be_any_text() -> None:
    names = ["é", "a b", "\n", "\ud800", "1", "", "\x1b[31m", "if"]
    assert list(told(dict.fromkeys(names, 1))) == sorted(names)


def test_keys_that_are_no_texts_are_left_out_and_not_asked(trap: Trap) -> None:
    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            trap.spring("__eq__")
            return False

        def __lt__(self, other: str) -> bool:
            trap.spring("__lt__")
            return True

    namespace: dict[Any, Any] = {Key("x"): "key", 1: 1, None: 2, ("a",): 3, "x": "text", Key("y"): 4}
    hidden: dict[Any, Any] = {Key("x"): "text"}
    with trap:
        assert list(told(namespace, hidden)) == ["x"]
    assert trap.ran == []


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 10**1_000_000, range(10**1_000_000)], ids=type)
def test_large_numbers_are_not_written_out(value: object) -> None:
    assert "a number of" in shown(value)
    assert "a number of" in shown([value])


@pytest.mark.parametrize("value", [[0] * 10**6, {*range(10**6)}, "x" * 10**7, b"x" * 10**7, bytearray(10**7)])
def test_what_is_large_is_looked_at_where_it_begins(value: Any) -> None:
    entry = told({"x": value})["x"]
    assert entry["size"] == sys.getsizeof(value)
    assert len(entry["text"]) <= MAX_TEXT


def test_containers_that_hold_themselves_are_shown_one_level_deep() -> None:
    items: list[Any] = [1]
    items.append(items)
    table: dict[str, Any] = {}
    table["self"] = table
    assert (shown(items), shown(table)) == ("[1, <list>]", "{'self': <dict>}")


def test_what_is_told_is_bounded_in_number_and_in_size() -> None:
    names = {f"{n:05}" + "n" * 5000: ["é" * 10**6] * 10 for n in range(MAX_VARIABLES + 5)}
    content = variables(names, {})
    assert (content["total"], len(content["variables"])) == (MAX_VARIABLES + 5, MAX_VARIABLES)
    assert len(str(content)) < 3 * MAX_SHORT * MAX_VARIABLES + LONG_IN_ALL
    kind = type("K" * 2 * MAX_TEXT, (), {})
    assert len(told({"x": kind()})["x"]["type"]) == MAX_TEXT


def test_when_all_that_is_long_is_too_long_only_what_is_short_is_told() -> None:
    long = {f"n{n:03}": ["é" * 10**6, b"x" * 10**6] for n in range(100)}
    found = told({**long, "zz": "x" * (MAX_SHORT - 2), "zzz": "x" * (MAX_SHORT - 1)})
    whole = LONG_IN_ALL // MAX_TEXT
    assert [len(each["text"]) for each in found.values()] == (
        [MAX_TEXT] * whole + [1] * (100 - whole) + [MAX_SHORT, 1]
    )
    assert found["n099"]["text"] == "…"


def test_the_reader_looks_at_as_much_as_is_told() -> None:
    assert (MAX_TEXT, MAX_SHORT, LONG_IN_ALL) == (reader.LONGEST, reader.SHORT, reader.LONG_IN_ALL)


@pytest.mark.parametrize("size", [900, 1500, MARGIN])
def test_a_secret_that_is_longer_than_what_is_shown_is_found_by_its_reader(size: int) -> None:
    secret = "".join(random.Random(size).choices(string.ascii_letters, k=size))
    namespace = {
        "bare": secret,
        "listed": ["-" * 50, secret],
        "late": "-" * 100 + secret,
        "raw": secret.encode(),
    }
    found = reader.variables_of(variables(namespace, {}), Masks([secret]))
    texts = {variable.name: variable.text for variable in found}
    assert not any(secret[at : at + 6] in text for text in texts.values() for at in range(size - 5))
    if size < MARGIN:
        assert (texts["bare"], texts["raw"]) == ("'***'", "b'***'")


def test_enough_is_told_of_a_text_for_its_reader_to_find_a_secret_in_it() -> None:
    secret = "s3cr3t-" * 80
    assert secret in shown("x" * 100 + secret + "y" * 10_000)
    assert secret in shown(["x" * 100 + secret, "y"])


def test_a_namespace_that_changes_meanwhile_is_told_as_it_was_at_one_moment() -> None:
    namespace: dict[str, Any] = {f"n{n}": {n: n} for n in range(200)}
    stop = threading.Event()

    def change() -> None:
        n = 0
        while not stop.is_set():
            namespace[f"m{n % 500}"] = namespace["n0"]
            namespace["n0"][n] = n
            namespace.pop(f"m{(n - 250) % 500}", None)
            n += 1
            if n % 1000 == 0:
                namespace["n0"].clear()

    thread = threading.Thread(target=change)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(100):
            assert len(told(namespace)) >= 200
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize("end", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_what_changes_while_it_is_looked_at_is_named(
    monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    def fails(value: object, longest: int) -> str:
        raise end("dictionary changed size during iteration")

    monkeypatch.setattr(module, "_short", fails)
    assert told({"x": {1: 2}})["x"] == {"name": "x", "type": "dict", "size": None, "text": ""}


@pytest.mark.parametrize(
    ("package", "name"), [("numpy", "ndarray"), ("pandas", "DataFrame"), ("pandas", "Series")]
)
@pytest.mark.parametrize("planted", ["class", "hostile class", "hostile module"])
def test_a_class_that_a_cell_has_planted_in_a_package_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, trap: Trap, package: str, name: str, planted: str
) -> None:
    fields = ("nbytes", "dtype", "shape", "columns", "memory_usage", "axes", "dtypes")
    read = {field: trap.attribute(field, lambda _: 1) for field in fields}
    kind = trap.kind() if planted == "hostile class" else type(name, (), {"__module__": "__main__", **read})
    module = (trap.kind(types.ModuleType) if planted == "hostile module" else types.ModuleType)(package)
    setattr(module, name, kind)
    monkeypatch.setitem(sys.modules, package, module)
    value = kind()
    with trap:
        entry = told({"x": value, "y": [value]})["x"]
    assert (entry["size"], entry["text"]) == (None, "")
    assert trap.ran == []


def test_arrays_are_told_by_their_type_and_shape_alone(trap: Trap) -> None:
    numpy = pytest.importorskip("numpy")
    objects = numpy.empty(1, dtype=object)
    objects[0] = trap.kind()()
    titled = numpy.zeros(2, dtype={"names": ["a"], "formats": ["i4"], "titles": [trap.kind()()]})
    mine = type("Mine", (numpy.ndarray,), {"nbytes": trap.attribute("nbytes", lambda _: 1)})((2,))
    huge = numpy.broadcast_to(numpy.float64(0), (2**20, 2**20))
    namespace = {
        "zeros": numpy.zeros((3, 4)),
        "huge": huge,
        "objects": objects,
        "titled": titled,
        "mine": mine,
    }
    with trap:
        found = {name: (entry["size"], entry["text"]) for name, entry in told(namespace).items()}
    assert trap.ran == []
    assert found == {
        "zeros": (96, "float64 (3, 4)"),
        "huge": (2**43, "float64 (1048576, 1048576)"),
        "objects": (8, "object (1,)"),
        "titled": (8, "void32 (2,)"),
        "mine": (None, ""),
    }


def test_tables_are_told_by_their_shape_and_columns(trap: Trap) -> None:
    pandas = pytest.importorskip("pandas")
    value = trap.kind()()
    table = pandas.DataFrame({"a": [1, 2], "b": [1.5, 2.5], 3: pandas.Series([value, value], dtype=object)})
    namespace = {
        "table": table,
        "wide": pandas.DataFrame([range(5000)]),
        "numbers": table["a"],
        "words": table["a"].astype("category"),
        "labels": pandas.DataFrame([[1, 2]], columns=pandas.MultiIndex.from_tuples([(1, 2), (value, 3)])),
    }
    with trap:
        found = {name: (entry["size"], entry["text"]) for name, entry in told(namespace).items()}
    assert trap.ran == []
    assert found == {
        "table": (48, "2 rows × 3 columns: 'a', 'b', 3"),
        "wide": (None, "1 rows × 5000 columns: 0, 1, 2, 3, 4, …"),
        "numbers": (16, "int64 (2,)"),
        "words": (18, "category (2,)"),
        "labels": (16, "1 rows × 2 columns: <tuple>, <tuple>"),
    }


@pytest.mark.parametrize("part", ["columns", "index"])
def test_a_table_with_parts_that_bring_their_own_code_is_named(trap: Trap, part: str) -> None:
    pandas = pytest.importorskip("pandas")
    labels = pandas.Index(["a"])
    special = {name: trap.method(pandas.Index, name) for name in ("__len__", "__getitem__", "memory_usage")}
    labels.__class__ = type("Labels", (pandas.Index,), {"__module__": "__main__", **special})
    table = pandas.DataFrame([[1]], **{part: labels})
    assert type(getattr(table, part)).__name__ == "Labels"
    with trap:
        entry = told({"x": table})["x"]
    assert (entry["size"], entry["text"]) == (None, "")
    assert trap.ran == []


def test_names_of_builtins_are_names_as_others() -> None:
    assert told({"repr": 1, "len": 2, "dict": 3, "type": 4})["repr"]["text"] == "1"
