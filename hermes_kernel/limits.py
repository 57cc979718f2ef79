"""How long, how much, how many: every bound of a registry in one frozen value."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final

from .errors import ConfigError


class Unset(Enum):
    """The type of ``UNSET``: the argument was not given, so the Limits decide."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET

_ISOLATION = ("none", "basic", "namespace")
SMALLEST_MEMORY = 64 * 1024 * 1024
"""Bytes below which no kernel starts."""

_START_METHODS = ("auto", "fork", "spawn")


@dataclass(frozen=True)
class Limits:
    """Bounds of a registry and of each of its cells. Times are in seconds, sizes in bytes.

    ``timeout``: running time of one cell; None or 0 = no limit.
    ``start_timeout``: from the launch of a kernel to its first answer.
    ``interrupt_grace``: how long a cell that is cut (by its timeout or by its caller) may take to end by
    itself; 0 = its kernel is killed at once. If it ends in time and answers a probe, its state is kept.
    ``idle_grace``: how long the kernel's *idle* is waited for once a cell's reply is there.
    ``queue_timeout``: how long a call waits for its turn; None = as long as its ``timeout``, 0 = not at all.
    ``max_kernels``: how many kernels stay when nobody uses them; the one that was used longest ago goes.
    ``idle_timeout``: after how long without use a kernel goes.
    ``max_tool_calls``: how many calls of tools one cell may make; None = no limit, 0 = none.
    ``output_bytes``: how much a result shows of what a cell wrote: 40 % from its head, 60 % from its end.
    ``stderr_bytes``: how much of that may be of the standard error, and how much a traceback may take.
    ``spill_bytes``: how much of an output that is cut is kept in a file; 0 = none.
    ``spill_dir``: where such files go; None = in the user's cache.
    ``start_method``: how kernel processes are made: ``"fork"`` (of a process that has loaded everything),
    ``"spawn"``, or ``"auto"``, the fastest that is available.
    ``spare_kernels``: how many kernels are kept ready for the next owner.
    ``memory_limit``: the address space of each process of a kernel; a cell gets MemoryError; None = no limit.
    ``isolation``: ``"none"``, or ``"namespace"``: cells see no process but their own, and whatever ends the
    kernel ends all of them. Where it is not available a kernel runs without and says so in ``degraded``; with
    ``require_isolation`` it does not start.

    Raises ConfigError for a negative number, NaN, a wrong type or a value that this version lacks.
    """

    max_kernels: int = 4
    idle_timeout: float = 1800.0
    start_timeout: float = 30
    timeout: float | None = 300
    queue_timeout: float | None = None
    max_tool_calls: int | None = 50
    interrupt_grace: float = 0
    idle_grace: float = 1
    output_bytes: int = 50_000
    stderr_bytes: int = 10_000
    spill_bytes: int = 5_000_000
    spill_dir: str | None = None
    memory_limit: int | None = None
    isolation: str = "none"
    require_isolation: bool = False
    start_method: str = "auto"
    spare_kernels: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", checked_time_limit("timeout", self.timeout))
        for name in ("idle_timeout", "start_timeout", "interrupt_grace", "idle_grace"):
            object.__setattr__(self, name, _checked_seconds(name, getattr(self, name)))
        for name in ("start_timeout", "idle_timeout"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{name}=0: a kernel could not be used at all; give seconds above 0")
        if self.queue_timeout is not None:
            seconds = _checked_seconds("queue_timeout", self.queue_timeout)
            object.__setattr__(self, "queue_timeout", seconds)
        _check_count("max_kernels", self.max_kernels, at_least=1)
        checked_call_limit("max_tool_calls", self.max_tool_calls)
        _check_count("spare_kernels", self.spare_kernels, at_least=0)
        if self.memory_limit is not None:
            _check_count("memory_limit", self.memory_limit, at_least=SMALLEST_MEMORY)
        if not isinstance(self.require_isolation, bool):
            raise ConfigError(f"require_isolation={shown(self.require_isolation)}: give True or False")
        _check_choice("isolation", self.isolation, _ISOLATION)
        _check_choice("start_method", self.start_method, _START_METHODS)
        for name in ("output_bytes", "stderr_bytes", "spill_bytes"):
            _check_count(name, getattr(self, name), at_least=0)
        if self.spill_dir is not None:
            object.__setattr__(self, "spill_dir", _checked_directory("spill_dir", self.spill_dir))
        if self.isolation == "basic":
            raise not_available("isolation", self.isolation)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Limits":
        """Build Limits from a configuration; raises ConfigError for a key that is none of its fields."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"limits are a {type(values).__name__}; give a mapping of names to values")
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1) if isinstance(key, str) else []
                hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
                raise ConfigError(f"unknown limit {shown(key)}: {hint}")
        return cls(**values)


def shown(value: object) -> str:
    """Return how a value is shown to whoever gave it, also if it is a number that Python does not write."""
    try:
        return repr(value)
    except ValueError:
        return f"<{type(value).__name__} of too many digits>"


def not_available(name: str, value: object) -> ConfigError:
    """Return the error for a name of the API whose feature this version lacks."""
    return ConfigError(f"{name}={value!r} is not available in this version; leave {name} out")


def checked_time_limit(name: str, value: object) -> float | None:
    """Return a time limit in seconds, None for no limit (None, 0 or infinity); raises ConfigError."""
    if value is None:
        return None
    seconds = _checked_seconds(name, value, finite=False)
    return None if seconds == 0 or math.isinf(seconds) else seconds


def checked_call_limit(name: str, value: object) -> int | None:
    """Return a number of calls, None for no limit; raises ConfigError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name}={shown(value)}: give a whole number, 0 or more, or None for no limit")
    return value


def _checked_seconds(name: str, value: object, *, finite: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give a number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        raise ConfigError(f"{name} is a whole number too large for a time; give seconds") from None
    if math.isnan(seconds) or seconds < 0 or (finite and math.isinf(seconds)):
        raise ConfigError(f"{name}={value!r} is not a time; give a number of seconds, 0 or more")
    return seconds


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{name}={shown(value)}: give a whole number, {at_least} or more")


def _checked_directory(name: str, value: object) -> str:
    """Return the absolute path of a directory, which need not be there yet; raises ConfigError."""
    path = str(value) if isinstance(value, str | PurePath) else ""
    if not path or "\0" in path:
        raise ConfigError(f"{name}={shown(value)}: give the path of a directory")
    try:
        path.encode("utf-8", "surrogateescape")
        return str(Path(path).expanduser().absolute())
    # No file can have that name, the current directory is gone, or there is no user of that name.
    except (UnicodeError, OSError, RuntimeError) as error:
        raise ConfigError(f"{name}={value!r} cannot be used: {error}; give another directory") from error


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={shown(value)} is not one of {', '.join(map(repr, choices))}")
