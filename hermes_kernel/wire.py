"""What both processes must put on the wire alike.

This file also runs in the kernel's interpreter: no import of the host side, Python 3.10.
"""

import json
from typing import Any

from jupyter_client.jsonutil import json_clean, json_default

PACKER = "hermes_kernel.wire.pack"
UNPACKER = "jupyter_client.session.json_unpacker"
"""What every Session of ours packs and unpacks with."""


def pack(message: Any) -> bytes:
    """Serialise a part of a Jupyter message; text that is not valid Unicode is escaped, not refused."""
    try:
        text = _dumps(message)
    except (TypeError, ValueError):  # what JSON does not have: jupyter_client's own way out
        text = _dumps(json_clean(message))
    # In JSON a lone surrogate can only stand in a string, where its escape says the same.
    return text.encode("utf-8", "backslashreplace")


def _dumps(message: Any) -> str:
    return json.dumps(message, default=json_default, ensure_ascii=False, allow_nan=False)
