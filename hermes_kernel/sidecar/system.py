"""The operating system as the sidecars need it: the file for the platform that this is."""

import sys
from typing import Any

system: Any
if sys.platform == "darwin":
    from . import macos as system
elif sys.platform == "win32":
    system = None  # no sidecar runs there: see hermes_kernel/process/windows.py
else:
    from . import linux as system

__all__ = ["system"]
