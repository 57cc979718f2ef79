"""What is set outside of the program: by variables and files, below what is said as an argument.

Arguments, then ``HERMES_KERNEL_<NAME>`` in the environment, then a file, then the defaults. The file is the
one that ``HERMES_KERNEL_CONFIG`` names, else ``hermes-kernel.toml``, or the table ``[tool.hermes-kernel]`` of
``pyproject.toml``, in the working directory or the nearest directory above it.
"""

import difflib
import math
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..cell.transcript import Transcript
from ..errors import ConfigError
from ..limits import Limits, shown
from .options import CallArguments, RegistryArguments

PREFIX = "HERMES_KERNEL_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
OWN_VARIABLES = frozenset({FILE_VARIABLE, f"{PREFIX}PLAIN", f"{PREFIX}COOKIE"})
"""Variables with the prefix that are no settings."""

FILE = "hermes-kernel.toml"
PROJECT_FILE, TABLE = "pyproject.toml", "hermes-kernel"

_LIMITS: dict[str, Any] = {field.name: field.default for field in fields(Limits)}
_OTHERS: dict[str, Any] = {
    "env_passthrough": (),
    "allow_magics": True,
    "expose": False,
    "transcript": None,
    "record_tools": False,
    "bootstrap": None,
    "socket_dir": None,
    "python": None,
    "cwd": None,
}
DEFAULTS: Mapping[str, Any] = MappingProxyType({**_LIMITS, **_OTHERS})
"""Each setting and its default: the fields of ``Limits``, what a registry takes, ``python`` and ``cwd``."""

_SWITCHES = frozenset(name for name, default in DEFAULTS.items() if isinstance(default, bool))
_NUMBERS = frozenset(
    name
    for name, default in _LIMITS.items()
    if name in ("queue_timeout", "memory_limit") or type(default) in (int, float)
)
_NONE = frozenset({"none", "null", ""})
_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_NONE_IS_A_WORD = frozenset({"isolation"})  # where "none" says something
_LARGEST = sys.float_info.max  # a larger number can be no time, and need not be printable
_SHOWN = 100  # characters of a wrong value that its error names


@dataclass(frozen=True)
class Setting:
    """A value, and where it comes from."""

    value: Any
    source: str = "default"


@dataclass(frozen=True)
class Configuration:
    """Every setting with its value and its source."""

    settings: Mapping[str, Setting]

    @classmethod
    def load(cls, environ: Mapping[str, str], directory: Path | None) -> "Configuration":
        """Read the settings of an environment, and of the files that count in a directory (None: no such).

        Raises ConfigError for a name that is no setting, with the nearest one, and for a file or a value that
        cannot be read.
        """
        settings = {name: Setting(default) for name, default in DEFAULTS.items()}
        file = _file_named(environ) or (None if directory is None else _file_found(directory))
        if file is not None:
            path, values = file
            for name, value in values.items():
                _check_name(name, DEFAULTS, f"in {path}")
                settings[name] = Setting(_from_file(name, value, path), str(path))
        known = {f"{PREFIX}{name.upper()}": name for name in DEFAULTS}
        for variable in sorted(environ):
            if variable.startswith(PREFIX) and variable not in OWN_VARIABLES:
                _check_name(variable, known, "in the environment")
                name = known[variable]
                settings[name] = Setting(_from_text(name, variable, environ[variable]), variable)
        configuration = cls(MappingProxyType(settings))
        configuration.limits()  # a value that cannot be is refused here, with its source
        return configuration

    def with_arguments(self, source: str = "argument", /, **given: Any) -> "Configuration":
        """Return the configuration with arguments on top of it; None is one that was not given."""
        settings = dict(self.settings)
        for name, value in given.items():
            _check_name(name, DEFAULTS, "among the arguments")
            if value is not None:
                settings[name] = Setting(value, source)
        return replace(self, settings=MappingProxyType(settings))

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    def limits(self) -> Limits:
        """Return the Limits; raises ConfigError, which names where a wrong value comes from."""
        values = {name: self[name] for name in _LIMITS}
        try:
            return Limits(**values)
        except ConfigError as error:
            sources = [
                setting.source
                for name, setting in self.settings.items()
                if str(error).startswith((f"{name}=", f"{name} ")) and setting.source != "default"
            ]
            raise ConfigError(f"{error} ({sources[0]})" if sources else str(error)) from error

    def registry_arguments(self) -> RegistryArguments:
        """Return what a registry is made with."""
        arguments: RegistryArguments = {
            "limits": self.limits(),
            "env_passthrough": self["env_passthrough"],
            "allow_magics": self["allow_magics"],
            "expose": self["expose"],
            "bootstrap": self["bootstrap"],
            "socket_dir": self["socket_dir"],
        }
        if self["transcript"] is not None:
            arguments["transcript"] = Transcript(self["transcript"], self["record_tools"])
        return arguments

    def call_arguments(self) -> CallArguments:
        """Return what every call is made with."""
        return {"python": self["python"], "cwd": self["cwd"]}


def _file_named(environ: Mapping[str, str]) -> tuple[Path, Mapping[str, Any]] | None:
    named = environ.get(FILE_VARIABLE)
    if not named:
        return None
    path = Path(os.path.expanduser(named))
    try:
        os.fsencode(path)
        content = None if "\0" in named else _parsed(path)
    except UnicodeEncodeError:  # no file can have that name
        content = None
    if content is None:
        raise ConfigError(f"{FILE_VARIABLE}={named!r}: there is no such file; name one, or unset it")
    return path, _table(content, path) if path.name == PROJECT_FILE else content


def _file_found(directory: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the settings of the nearest file; a pyproject.toml without our table is none."""
    for place in (directory, *directory.parents):
        content = _parsed(place / FILE)
        if content is not None:
            return place / FILE, content
        project = place / PROJECT_FILE
        try:
            concerns_us = TABLE in project.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        content = _parsed(project) if concerns_us else None
        if content is not None and TABLE in _tool_tables(content, project):
            return project, _table(content, project)
    return None


def _parsed(path: Path) -> dict[str, Any] | None:
    """Return the content of a TOML file, None if it is not there; raises ConfigError."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; make it readable, or remove it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; repair it, or remove it") from error
    except ValueError as error:  # more digits than Python reads
        raise ConfigError(f"{path} has a whole number that is too large; give a smaller one") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; repair it, or remove it") from error


def _table(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    table = _tool_tables(content, path).get(TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(f"tool.{TABLE} in {path} is a {type(table).__name__}; make it a table")
    return table


def _tool_tables(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    tables = content.get("tool", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"tool in {path} is a {type(tables).__name__}; make it a table")
    return tables


def _check_name(name: str, known: Mapping[str, Any], where: str) -> None:
    if name in known:
        return
    prefix = PREFIX if name.startswith(PREFIX) else ""  # the same in all: it makes none of them near
    short = {setting.removeprefix(prefix): setting for setting in known}
    near = difflib.get_close_matches(name.removeprefix(prefix), list(short), n=1)
    hint = f"did you mean {short[near[0]]!r}?" if near else f"known are: {', '.join(known)}"
    raise ConfigError(f"unknown setting {name!r} {where}: {hint}")


def _from_file(name: str, value: Any, path: Path) -> Any:
    """Return a value of a TOML file. TOML has no null: the word "none" says it."""
    if isinstance(value, str) and value.lower() == "none" and name not in _NONE_IS_A_WORD:
        return None
    if name == "env_passthrough":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name}={_shown(value)} in {path}: give a list of names")
        return tuple(value)
    if name in _SWITCHES and not isinstance(value, bool):
        raise ConfigError(f"{name}={_shown(value)} in {path}: give true or false")
    if name not in _LIMITS and name not in _SWITCHES and not isinstance(value, str):
        raise ConfigError(f"{name}={_shown(value)} in {path}: give a text")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{name} in {path} is too large; give a smaller number")
    return value


def _shown(value: Any) -> str:
    """Return a wrong value as its error names it."""
    text = shown(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _from_text(name: str, variable: str, text: str) -> Any:
    """Return the value that a variable's text means."""
    word = text.strip().lower()
    if name == "env_passthrough":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in _SWITCHES:
        if word not in _YES | _NO:
            raise ConfigError(f"{variable}={_shown(text)}: give 1 or 0")
        return word in _YES
    if word in _NONE and name not in _NONE_IS_A_WORD:
        return None
    if name not in _NUMBERS:
        return text
    return _number(variable, text)


def _number(variable: str, text: str) -> int | float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{variable}={_shown(text)}: give a number") from None
    if math.isinf(number) and "inf" not in text.lower():
        raise ConfigError(f"{variable} is too large; give a smaller number")
    try:
        return int(text)
    except ValueError:  # one that is not whole
        return number
