"""The variables of the cells, told without running any code of theirs.

A ``__repr__`` may print, wait, or change what it shows. So only objects of exactly the types that Python
(and NumPy, and pandas) brings are read; of others the name of their class is told.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

MAX_VARIABLES = 1000  # that are told; more are only counted
MAX_NAME = 200  # characters
MAX_TEXT = 120  # characters of the short form
_LINE = 80  # characters of a text that are shown
_ITEMS = 5  # of a container that are shown
_WORD = 40  # characters of a text inside a container
_LONG_INT = 256  # bits from which a number is not written out
_OWN = ("builtins", "__main__")

# Read from the type itself: a class of the user's may answer for its own attributes.
_name: Callable[[type, type], str] = type.__dict__["__qualname__"].__get__
_module: Callable[[type, type], Any] = type.__dict__["__module__"].__get__
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}


def variables(namespace: Mapping[Any, Any], hidden: Mapping[Any, Any]) -> dict[str, Any]:
    """Describe the variables of a namespace: their number, and name, type, size in bytes and a short form.

    Names that begin with an underscore are left out, and what stands unchanged in *hidden*.
    """
    found = dict(namespace)  # at once: a cell may be running
    names = sorted(
        name
        for name, value in found.items()
        if type(name) is str and name[:1] != "_" and (name not in hidden or hidden[name] is not value)
    )
    told = [_described(name, found[name]) for name in names[:MAX_VARIABLES]]
    return {"status": "ok", "total": len(names), "variables": told}


def _described(name: str, value: object) -> dict[str, Any]:
    try:
        size, text = _size(value), _short(value)
    except Exception:  # noqa: BLE001  # it changes while it is looked at, or is too large to be written
        size, text = None, ""
    return {
        "name": name[:MAX_NAME],
        "type": type_name(type(value)),
        "size": size,
        "text": text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…",
    }


def type_name(kind: type) -> str:
    """Return the name of a class, with its module if that is not the cells' own."""
    module = _module(kind, type)
    name = _name(kind, type)
    known = type(module) is str and module not in _OWN
    return f"{module}.{name}" if known else name


def _size(value: object) -> int | None:
    kind = type(value)
    if kind in _PLAIN or kind in _BRACKETS:
        return sys.getsizeof(value)
    if kind is _class_of("numpy", "ndarray"):
        return int(value.nbytes)  # type: ignore[attr-defined]
    if kind is _class_of("pandas", "DataFrame"):
        return int(value.memory_usage().sum())  # type: ignore[attr-defined]
    if kind is _class_of("pandas", "Series"):
        return int(value.memory_usage())  # type: ignore[attr-defined]
    return None


def _short(value: object) -> str:
    kind: Any = type(value)
    if kind in _PLAIN:
        return _plain(value, _LINE)
    if kind in _BRACKETS:
        return _container(value)
    if kind is FunctionType:
        code = value.__code__  # type: ignore[attr-defined]
        return f"{code.co_name}({', '.join(code.co_varnames[: code.co_argcount])})"
    if kind is BuiltinFunctionType:
        return str(value.__qualname__)  # type: ignore[attr-defined]
    if kind is ModuleType:
        name = ModuleType.__getattribute__(value, "__dict__").get("__name__")
        return name if type(name) is str else ""
    if kind is type:
        return type_name(value)  # type: ignore[arg-type]
    if kind is _class_of("numpy", "ndarray"):
        return f"{value.dtype} {value.shape}"  # type: ignore[attr-defined]
    if kind is _class_of("pandas", "DataFrame"):
        rows, columns = value.shape  # type: ignore[attr-defined]
        names = _some(value.columns[:_ITEMS], columns)  # type: ignore[attr-defined]
        return f"{rows} rows × {columns} columns: {names}"
    if kind is _class_of("pandas", "Series"):
        return f"{value.dtype} ({value.shape[0]},)"  # type: ignore[attr-defined]
    return ""


def _plain(value: Any, room: int) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > _LONG_INT:
        return f"a number of {value.bit_length()} bits"
    if kind in (str, bytes, bytearray):
        shown = repr(value[:room])
        return shown if len(value) <= room else f"{shown}… ({len(value)})"
    return repr(value)


def _container(value: Any) -> str:
    first, last = _BRACKETS[type(value)]
    if isinstance(value, dict):
        some = [f"{_item(key)}: {_item(item)}" for key, item in itertools.islice(value.items(), _ITEMS)]
    else:
        some = [_item(item) for item in itertools.islice(value, _ITEMS)]
    if len(value) > len(some):
        some.append(f"… ({len(value)})")
    elif first == "(" and len(some) == 1:
        last = ",)"
    elif first == "{" and not some and type(value) is set:
        return "set()"
    return f"{first}{', '.join(some)}{last}"


def _some(items: Iterable[Any], total: int) -> str:
    shown = [_item(item) for item in items]
    return ", ".join(shown + (["…"] if total > len(shown) else []))


def _item(value: object) -> str:
    if type(value) in _PLAIN:
        return _plain(value, _WORD)
    return f"<{type_name(type(value))}>"


def _class_of(module: str, name: str) -> object:
    """Return the class of a module that is loaded; what no value is an instance of if it is not."""
    loaded = sys.modules.get(module)
    if type(loaded) is not ModuleType:
        return _class_of
    return ModuleType.__getattribute__(loaded, "__dict__").get(name, _class_of)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...)})
