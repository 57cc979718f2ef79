"""Live Jupyter kernels behind an AI agent's execute_code tool.

This is the front door. It is light on purpose: a kernel process passes through it and must never load the
host side, so every name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cell.events import CellEvent
    from .cell.outputs import CellError
    from .cell.result import CellResult, KernelReport
    from .cell.status import CellStatus
    from .cell.tools import Tool, ToolCallContext, ToolDispatcher
    from .cell.transcript import Transcript
    from .errors import ConfigError, HermesKernelError, KernelStartError, ToolBudgetExceeded, ToolError
    from .host.blocking import BlockingRegistry
    from .host.manager import HermesKernelManager
    from .host.registry import KernelRegistry
    from .lifecycle.info import KernelInfo
    from .lifecycle.key import Owner
    from .lifecycle.loss import Loss
    from .limits import UNSET, Limits

_HOMES = {
    "BlockingRegistry": "host.blocking",
    "KernelRegistry": "host.registry",
    "HermesKernelManager": "host.manager",
    "Limits": "limits",
    "UNSET": "limits",
    "Owner": "lifecycle.key",
    "Loss": "lifecycle.loss",
    "KernelInfo": "lifecycle.info",
    "Tool": "cell.tools",
    "ToolCallContext": "cell.tools",
    "ToolDispatcher": "cell.tools",
    "Transcript": "cell.transcript",
    "CellEvent": "cell.events",
    "CellResult": "cell.result",
    "CellStatus": "cell.status",
    "CellError": "cell.result",
    "KernelReport": "cell.result",
    "HermesKernelError": "errors",
    "ConfigError": "errors",
    "KernelStartError": "errors",
    "ToolError": "errors",
    "ToolBudgetExceeded": "errors",
}

__all__ = [
    "UNSET",
    "BlockingRegistry",
    "CellError",
    "CellEvent",
    "CellResult",
    "CellStatus",
    "ConfigError",
    "HermesKernelError",
    "HermesKernelManager",
    "KernelInfo",
    "KernelRegistry",
    "KernelReport",
    "KernelStartError",
    "Limits",
    "Loss",
    "Owner",
    "Tool",
    "ToolBudgetExceeded",
    "ToolCallContext",
    "ToolDispatcher",
    "ToolError",
    "Transcript",
]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
