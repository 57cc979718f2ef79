"""What the host makes up for a kernel before it exists, and hands over: its name and its keys."""

import secrets
import uuid
from dataclasses import dataclass, field
from typing import Any


def new_secret() -> str:
    """Return 32 random bytes as text."""
    return secrets.token_hex(32)


@dataclass(frozen=True)
class KernelIdentity:
    """Who a kernel is, and what proves it.

    ``session_key`` signs its messages, ``owner_secret`` shows that a request is its owner's, and
    ``bridge_token`` that a connection to the tool bridge comes from the kernel.
    """

    kernel_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    session_key: str = field(default_factory=new_secret, repr=False)
    owner_secret: str = field(default_factory=new_secret, repr=False)
    bridge_token: str = field(default_factory=new_secret, repr=False)


def kernel_options(*, owner_secret: str, bridge_token: str, allow_magics: bool) -> dict[str, Any]:
    """Return what a kernel is told in its private connection file."""
    return {
        "ends_on_exit": True,
        "owner_secret": owner_secret,
        "allow_magics": allow_magics,
        "bridge_token": bridge_token,
    }
