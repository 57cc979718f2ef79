"""Which variables of the host a kernel may see. Pure: a mapping in, a mapping out.

An allow-list decides, not a block-list. The order of the rules is: a declared pass-through is kept; a name
that looks like a secret is dropped; a safe name is kept; everything else is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

SECRET_SUBSTRINGS = (
    "KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "PASSWD",
    "AUTH", "DSN", "WEBHOOK", "CREDS", "BEARER", "APIKEY",
)  # fmt: skip

SAFE_PREFIXES = (
    "PATH", "HOME", "USER", "LANG", "LC_", "TERM", "TMPDIR", "TMP", "TEMP", "SHELL",
    "LOGNAME", "XDG_", "PYTHONPATH", "VIRTUAL_ENV", "CONDA",
)  # fmt: skip

SAFE_NAMES = frozenset(
    {"TZ", "HERMES_HOME", "HERMES_PROFILE", "HERMES_CONFIG", "HERMES_ENV", "HERMES_DELEGATED_CHILD_CONTEXT"}
)

# Git's identity contains AUTH by accident; what follows the prefix is still looked at.
INNOCENT_PREFIXES = ("GIT_AUTHOR_", "GIT_COMMITTER_")

# Without some of these a Windows process cannot open a socket or find its own libraries.
WINDOWS_NAMES = frozenset(
    {
        "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "OS", "PROCESSOR_ARCHITECTURE",
        "NUMBER_OF_PROCESSORS", "PUBLIC", "ALLUSERSPROFILE", "PROGRAMDATA", "PROGRAMFILES",
        "PROGRAMFILES(X86)", "PROGRAMW6432", "APPDATA", "LOCALAPPDATA", "USERPROFILE", "USERDOMAIN",
        "USERNAME", "HOMEDRIVE", "HOMEPATH", "COMPUTERNAME",
    }
)  # fmt: skip

# Said to every kernel: text is UTF-8, and no bytecode is left in other people's directories.
FIXED = {"PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class EnvPolicy:
    """Which names may pass besides the safe ones, and the values that replace the host's own.

    ``passthrough``: names the user declared. ``values``: what a pass-through name is to hold instead of the
    host's value; ``withheld``: names whose value must not pass although they are declared.
    """

    passthrough: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)
    withheld: frozenset[str] = frozenset()


def scrub(env: Mapping[str, str], *, platform: str, policy: EnvPolicy) -> dict[str, str]:
    """Return what of *env* a kernel may see. *platform* is that of ``sys.platform``."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in policy.withheld and is_visible(name, platform=platform, policy=policy)
    }
    kept.update(policy.values)
    return kept


def withheld_secrets(env: Mapping[str, str], *, platform: str, policy: EnvPolicy) -> frozenset[str]:
    """Return the values that do not reach a kernel because their names look like those of secrets."""
    return frozenset(
        value
        for name, value in env.items()
        if looks_secret(name)
        and (name in policy.withheld or not is_visible(name, platform=platform, policy=policy))
    )


def is_visible(name: str, *, platform: str, policy: EnvPolicy) -> bool:
    """Return whether a variable of this name reaches a kernel."""
    return name in policy.passthrough or _is_safe(name, platform)


@lru_cache(maxsize=4096)
def looks_secret(name: str) -> bool:
    """Return whether a variable of this name is likely to hold a secret."""
    innocent = _innocent_prefix(name)
    return any(word in name.upper()[len(innocent) :] for word in SECRET_SUBSTRINGS)


def _innocent_prefix(name: str) -> str:
    return next((prefix for prefix in INNOCENT_PREFIXES if name.startswith(prefix)), "")


@lru_cache(maxsize=4096)
def _is_safe(name: str, platform: str) -> bool:
    if looks_secret(name):
        return False
    if _innocent_prefix(name) or name.startswith(SAFE_PREFIXES) or name in SAFE_NAMES:
        return True
    return platform == "win32" and name.upper() in WINDOWS_NAMES
