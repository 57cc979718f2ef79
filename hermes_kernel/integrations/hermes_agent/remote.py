"""The names of kernels on other machines. There are none: docs/adr/0014 says why, and what happens then."""

from collections.abc import Callable, Collection
from typing import Any


def execute_in_remote_kernel(
    code: str,
    *,
    env: Any,
    env_type: str,
    task_env_id: str,
    sandbox_tools: Collection[str],
    timeout: float,
    max_tool_calls: int,
    reset: bool,
    idle_exit: float = 1800,
) -> dict[str, Any] | None:
    """Return None: nothing was run, and the caller runs the code as a script, as after a failure."""
    return None


def shutdown_remote_kernels_where(predicate: Callable[[str], bool]) -> None:
    """End nothing: there are none."""


def shutdown_remote_kernels_for_owner(session_key: str) -> None:
    """End nothing: there are none."""


def shutdown_all_remote_kernels() -> None:
    """End nothing: there are none."""
