"""Whose kernel it is, and which one: the identity under which a registry finds it."""

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Owner:
    """The conversation that a kernel belongs to; a delegated child owns its own.

    ``session`` is the stable name of the conversation, ``child`` that of a delegated child, ``scope`` keeps
    apart what shares both (a profile, a tenant). Raises ConfigError for an empty name: two callers without
    one would share a kernel.
    """

    session: str
    child: str | None = None
    scope: str = ""

    def __post_init__(self) -> None:
        for name, value in (("session", self.session), ("child", self.child), ("scope", self.scope)):
            if value is None and name == "child":
                continue
            if not isinstance(value, str):
                raise ConfigError(f"owner {name} {value!r} is a {type(value).__name__}; give a string")
            if name != "scope" and not value.strip():
                raise ConfigError(f"owner {name} {value!r} is empty; give the name of the conversation")

    @classmethod
    def of(cls, owner: "str | Owner") -> "Owner":
        """Return *owner* itself, or the owner whose session is this string; raises ConfigError."""
        if isinstance(owner, Owner):
            return owner
        if not isinstance(owner, str):
            raise ConfigError(f"owner {owner!r} is a {type(owner).__name__}; give a string or an Owner")
        return cls(owner)


@dataclass(frozen=True)
class KernelKey:
    """One kernel of one owner: which interpreter runs it, and where.

    ``cwd`` is None for the kernel's own private directory.
    """

    owner: Owner
    python: str
    cwd: str | None = None
    variant: tuple[str, ...] = ()
