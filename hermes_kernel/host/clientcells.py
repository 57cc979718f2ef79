"""Tools for the cells of a plain Jupyter client: granted with the request, ended by what the client hears."""

import contextvars
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .bridge import KernelBridge
from .grant import CellTools, ToolGrant


class ClientCells:
    """The cells of one client that may call tools. Safe from any thread.

    Nobody settles these cells for us: a cell is over when its reply or its idle status comes, when a later
    cell of the client begins, or when the client stops. The kernel's end ends the bridge.
    """

    def __init__(self, tools: CellTools, bridge: Callable[[], KernelBridge | None]) -> None:
        self._tools = tools
        self._bridge = bridge
        self._lock = threading.Lock()
        self._open: dict[str, tuple[KernelBridge, ToolGrant]] = {}

    def begin(self, msg_id: str) -> dict[str, Any] | None:
        """A cell is about to be sent; return what its request carries, None while there is no kernel."""
        bridge = self._bridge()
        if bridge is None:
            return None
        grant = bridge.grant(replace(self._tools, context=contextvars.copy_context()))
        with self._lock:
            self._open[msg_id] = bridge, grant
        return bridge.metadata(grant)

    def observe(self, msg_type: str, parent_id: str | None, content: dict[str, Any]) -> None:
        """Look at a message that has come."""
        if parent_id not in self._open:
            return
        state = content.get("execution_state") if msg_type == "status" else None
        if msg_type == "execute_reply" or state == "idle":
            self._retire([parent_id])
        elif state == "busy":  # cells run in their order
            with self._lock:
                names = list(self._open)
            self._retire(names[: names.index(parent_id)] if parent_id in names else [])

    def end(self) -> None:
        """The client hears no more."""
        with self._lock:
            names = list(self._open)
        self._retire(names)

    def _retire(self, names: list[str]) -> None:
        for name in names:
            with self._lock:
                found = self._open.pop(name, None)
            if found is not None:
                bridge, grant = found
                bridge.retire(grant)
