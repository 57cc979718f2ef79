"""The operating system as the sidecars need it: the file for the platform that this is."""

import sys
from typing import Any

system: Any
if sys.platform == "darwin":
    from . import macos as system
else:
    from . import linux as system

__all__ = ["system"]
