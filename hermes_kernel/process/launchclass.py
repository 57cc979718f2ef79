"""Which kernels can be forked of the same process. Pure: what is asked for in, a value to compare out."""

from collections.abc import Mapping
from dataclasses import dataclass

# What an interpreter, the C library or an imported package reads once, when it starts.
START_PREFIXES = (
    "PYTHON", "LD_", "LC_", "MALLOC_", "GLIBC_", "XDG_", "JUPYTER", "JPY_", "HERMES_KERNEL_"
)  # fmt: skip
START_NAMES = frozenset({"LANG", "LANGUAGE", "HOME", "TERM", "USERPROFILE"})
OWN = frozenset({"HERMES_KERNEL_COOKIE"})  # of one kernel, and set at its start


@dataclass(frozen=True)
class ZygoteClass:
    """What the kernels of one zygote have in common: ``forks`` of *python* started with *variables*.

    A zygote that does not fork kernels executes them, whatever their interpreter is.
    """

    python: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    forks: bool = False


@dataclass(frozen=True)
class LaunchClass:
    """What two kernels have in common if one can be made ready before it is known which it will be."""

    zygote: ZygoteClass
    isolation: str = "none"
    memory_limit: int | None = None
    socket_dir: str | None = None


@dataclass(frozen=True)
class Program:
    """How a process is executed of which kernels are forked: interpreter and options, and environment."""

    interpreter: tuple[str, ...]
    env: Mapping[str, str]


def launch_class(
    python: str,
    env: Mapping[str, str],
    *,
    forks: bool,
    isolation: str = "none",
    memory_limit: int | None = None,
    socket_dir: str | None = None,
) -> LaunchClass:
    """Return the class of a kernel that runs *python* with the environment *env*."""
    zygote = ZygoteClass(python, start_variables(env), True) if forks else ZygoteClass()
    return LaunchClass(zygote, isolation, memory_limit, socket_dir)


def start_variables(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of *env* that cannot be changed once an interpreter runs, sorted."""
    return tuple(
        sorted(
            (name, value)
            for name, value in env.items()
            if name not in OWN and (name in START_NAMES or name.startswith(START_PREFIXES))
        )
    )
