"""The way of tool calls from a cell to the host."""

from typing import Protocol


class ToolBridge(Protocol):
    """Serves the tool calls of one kernel."""

    async def open_cell(self) -> str | None:
        """Let a cell call tools; return the token that its request carries, None if it has no tools."""

    def close_cell(self, token: str | None) -> None:
        """End what the cell may do; a call that comes later is refused."""

    async def close(self) -> None:
        """End the bridge with its kernel."""


class NoTools:
    """The bridge of a kernel whose cells have no tools."""

    async def open_cell(self) -> str | None:
        """No tools, no token."""
        return None

    def close_cell(self, token: str | None) -> None:
        """Nothing was granted."""

    async def close(self) -> None:
        """Nothing is open."""
