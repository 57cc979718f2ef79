"""Text as this terminal, or this pipe, can take it."""

import sys


def printable(text: str) -> str:
    """Return *text* with escapes for what stdout's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
