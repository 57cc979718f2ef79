"""What both processes must put on the wire alike.

This file also runs in the kernel's interpreter: no import of the host side, Python 3.10.
"""

import json
from typing import Any

from jupyter_client.jsonutil import json_clean, json_default
from jupyter_client.session import json_packer

PACKER = "hermes_kernel.wire.pack"
UNPACKER = "jupyter_client.session.json_unpacker"
"""What every Session of ours packs and unpacks with."""


def pack(message: Any) -> bytes:
    """Serialise a part of a Jupyter message; text that is not valid Unicode is escaped, not refused."""
    try:
        return json_packer(message)
    except UnicodeEncodeError:  # a lone surrogate, in the code of a cell or in what it shows
        text = json.dumps(json_clean(message), default=json_default, ensure_ascii=True, allow_nan=False)
        return text.encode("ascii")
