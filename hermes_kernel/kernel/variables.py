"""The variables of the cells, told without running any code of theirs.

A ``__repr__`` may print, wait, or change what it shows. So only objects of exactly the types that Python
(and NumPy, and pandas) brings are read; of others the name of their class is told. A metaclass may answer for
its classes, too: they are compared by identity, and hashed only if they have none.
"""

import itertools
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

MAX_VARIABLES = 1000  # that are told; more are only counted
MAX_SHORT = 1000  # characters of a name, a type or a short form that are told, however many there are
MAX_TEXT = 64 * 1024 + 120  # of those that are longer: who shows less masks secrets before the cut
LONG_IN_ALL = 2 * 1024 * 1024  # characters of them that are told together
_ITEMS = 5  # of a container that are shown
_COLUMNS = 1000  # of a table that are added up
_LONG_INT = 256  # bits from which a number is not written out
_HEAP_TYPE = 1 << 9  # of a class's flags: it was made while Python ran
_OWN = ("builtins", "__main__")

# Read from the type itself: a class of the user's may answer for its own attributes.
_name: Callable[[type, type], str] = type.__dict__["__qualname__"].__get__
_module: Callable[[type, type], Any] = type.__dict__["__module__"].__get__
_flags: Callable[[type, type], int] = type.__dict__["__flags__"].__get__
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
    own = _named(hidden)
    found = {
        name: value
        for name, value in _named(namespace).items()
        if name[:1] != "_" and (name not in own or own[name] is not value)
    }
    room = Room()
    told = [_described(name, found[name], room) for name in sorted(found)[:MAX_VARIABLES]]
    return {"status": "ok", "total": len(found), "variables": told}


def _named(namespace: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what has a name: a key of another class may have a hash and an equality of its own."""
    copy = dict(namespace)  # at once: a cell may be running
    return {name: value for name, value in copy.items() if type(name) is str}


class Room:
    """How much more is told of what is long."""

    def __init__(self) -> None:
        self._left = LONG_IN_ALL

    @property
    def longest(self) -> int:
        """Characters from which a value need not be looked at: its text is longer than what is told."""
        return MAX_TEXT if self._left >= MAX_TEXT else MAX_SHORT

    def bounded(self, text: str) -> str:
        """Return a text as it is told. What is cut has MAX_TEXT characters, or is an ellipsis alone.

        So its reader knows that it may end within a secret.
        """
        if len(text) <= MAX_SHORT:
            return text
        if self._left < MAX_TEXT:
            return "…"
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT - 1]}…"
        self._left -= len(text)
        return text


def _described(name: str, value: object, room: Room) -> dict[str, Any]:
    try:
        size, text = _size(value), _short(value, room.longest)
    except BaseException:  # noqa: BLE001  # it changes while it is looked at, is too large, or is a forgery
        size, text = None, ""
    kind = type_name(type(value))
    told = {"name": room.bounded(name), "type": room.bounded(kind), "text": room.bounded(text)}
    return {**told, "size": size}


def type_name(kind: type) -> str:
    """Return the name of a class, with its module if that is not the cells' own."""
    name = _exact(_name(kind, type))
    try:
        module = _module(kind, type)
    except AttributeError:  # it was made where there is none
        return name
    known = type(module) is str and module not in _OWN
    return f"{module}.{name}" if known else name


def _size(value: object) -> int | None:
    kind = type(value)
    if _is_among(kind, _PLAIN) or _is_among(kind, _BRACKETS):
        return sys.getsizeof(value)
    if kind is _class_of("numpy", "ndarray"):
        return int(value.nbytes)  # type: ignore[attr-defined]
    if kind is _class_of("pandas", "DataFrame") and _has_known_axes(value):
        few = value.shape[1] <= _COLUMNS  # type: ignore[attr-defined]
        if few and all(map(_is_known, value.dtypes)):  # type: ignore[attr-defined]
            return int(value.memory_usage(index=False).sum())  # type: ignore[attr-defined]
    elif kind is _class_of("pandas", "Series") and _is_known(value.dtype):  # type: ignore[attr-defined]
        return int(value.memory_usage(index=False))  # type: ignore[attr-defined]
    return None


def _short(value: object, longest: int) -> str:
    kind: Any = type(value)
    if _is_among(kind, _PLAIN):
        return _plain(value, longest)
    if _is_among(kind, _BRACKETS):
        return _container(value, longest)
    if kind is FunctionType:
        code = value.__code__  # type: ignore[attr-defined]
        return f"{_exact(code.co_name)}({', '.join(code.co_varnames[: code.co_argcount])})"
    if kind is BuiltinFunctionType:
        return str(value.__name__)  # type: ignore[attr-defined]  # the class of its self has the rest
    if kind is ModuleType:
        name = ModuleType.__getattribute__(value, "__dict__").get("__name__")
        return name if type(name) is str else ""
    if kind is type:
        return type_name(value)  # type: ignore[arg-type]
    if kind is _class_of("numpy", "ndarray"):
        return f"{value.dtype.name} {value.shape}"  # type: ignore[attr-defined]
    if kind is _class_of("pandas", "DataFrame") and _has_known_axes(value):
        rows, columns = value.shape  # type: ignore[attr-defined]
        names = _some(value.columns[:_ITEMS], columns, longest)  # type: ignore[attr-defined]
        return f"{rows} rows × {columns} columns: {names}"
    if kind is _class_of("pandas", "Series"):
        dtype: Any = value.dtype  # type: ignore[attr-defined]
        name = dtype.name if _is_known(dtype) else type_name(type(dtype))
        return f"{name} {value.shape}"  # type: ignore[attr-defined]
    return ""


def _plain(value: Any, longest: int) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > _LONG_INT:
        return f"a number of {value.bit_length()} bits"
    if kind is range:
        parts = (value.start, value.stop, *(() if value.step == 1 else (value.step,)))
        return f"range({', '.join(_plain(part, longest) for part in parts)})"
    if kind in (str, bytes, bytearray):
        shown = repr(value[:longest])
        return shown if len(value) <= longest else f"{shown}… ({len(value)})"
    return repr(value)


def _container(value: Any, longest: int) -> str:
    first, last = _BRACKETS[type(value)]
    if isinstance(value, dict):
        pairs = itertools.islice(value.items(), _ITEMS)
        some = [f"{_item(key, longest)}: {_item(item, longest)}" for key, item in pairs]
    else:
        some = [_item(item, longest) for item in itertools.islice(value, _ITEMS)]
    if len(value) > len(some):
        some.append(f"… ({len(value)})")
    elif first == "(" and len(some) == 1:
        last = ",)"
    elif first == "{" and not some and type(value) is set:
        return "set()"
    return f"{first}{', '.join(some)}{last}"


def _some(items: Iterable[Any], total: int, longest: int) -> str:
    shown = [_item(item, longest) for item in items]
    return ", ".join(shown + (["…"] if total > len(shown) else []))


def _item(value: object, longest: int) -> str:
    if _is_among(type(value), _PLAIN):
        return _plain(value, longest)
    return f"<{type_name(type(value))}>"


def _class_of(module: str, name: str) -> object:
    """Return the class of a module that is loaded; what no value is an instance of if it is not.

    A class that a cell has put there, under the module's name, is none.
    """
    loaded = sys.modules.get(module)
    if type(loaded) is not ModuleType:
        return _class_of
    found = ModuleType.__getattribute__(loaded, "__dict__").get(name)
    if type(found) is not type:
        return _class_of
    is_compiled = not _flags(found, type) & _HEAP_TYPE
    return found if is_compiled or (module == "pandas" and _is_of(found, module)) else _class_of


def _has_known_axes(table: Any) -> bool:
    return all(map(_is_known, table.axes))


def _is_known(part: object) -> bool:
    """Whether a part of a table is of NumPy's or pandas's own classes; others bring their own code."""
    return _is_of(type(part), "numpy") or _is_of(type(part), "pandas")


def _is_of(kind: type, package: str) -> bool:
    module = _module(kind, type)
    return type(module) is str and module.partition(".")[0] == package


def _is_among(kind: type, kinds: Container[type]) -> bool:
    return type(kind) is type and kind in kinds


def _exact(text: str) -> str:
    """Return the same text as a str, whatever class it has."""
    return str.__str__(text)


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range, type(...)})
