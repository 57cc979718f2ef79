"""Jupyter's wire protocol as a registry speaks it: signed requests to one kernel, and what comes back.

What ``jupyter_client.session.Session`` does for everybody else. That is configured through traits, which
costs half a millisecond for each new kernel, and looks for dates in every text that it reads.
"""

import hmac
import itertools
import json
import os
import uuid
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any

from jupyter_client import protocol_version  # type: ignore[attr-defined]  # which it has no __all__ for
from jupyter_client.session import DELIM

from ..wire import pack
from .client import with_secret

REMEMBERED = 65_536  # signatures, so that no message is taken in twice
_PARTS = ("header", "parent_header", "metadata", "content")


class SignedSession:
    """The messages between a host and one kernel, whose key signs them.

    *scheme* is the connection file's ``signature_scheme``, ``hmac-`` and the name of a hash. *owner_secret*
    goes with the requests that only the owner may send.
    """

    def __init__(self, key: bytes, scheme: str, *, owner_secret: str) -> None:
        self.session_id = uuid.uuid4().hex
        self._owner_secret = owner_secret
        self._username = os.environ.get("USER", "username")
        self._signing = hmac.new(key, digestmod=scheme.removeprefix("hmac-"))
        self._numbers = itertools.count(1)
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    @property
    def identity(self) -> bytes:
        """Where a kernel sends its replies."""
        return self.session_id.encode()

    def request(
        self, message_type: str, content: dict[str, Any], metadata: dict[str, Any]
    ) -> tuple[str, list[bytes]]:
        """Return the msg_id of a new request, and its frames."""
        msg_id = f"{self.session_id}_{os.getpid()}_{next(self._numbers)}"
        header = {
            "msg_id": msg_id,
            "msg_type": message_type,
            "username": self._username,
            "session": self.session_id,
            "date": datetime.now(UTC).isoformat(),
            "version": protocol_version,
        }
        metadata = with_secret(message_type, metadata, self._owner_secret)
        parts = [pack(part) for part in (header, {}, metadata, content)]
        return msg_id, [DELIM, self._sign(parts), *parts]

    def opened(self, frames: list[bytes]) -> dict[str, Any]:
        """Check the signature of a message and read its parts; what is none raises whatever it raises."""
        start = frames.index(DELIM) + 1
        signature, parts = frames[start], frames[start + 1 : start + 1 + len(_PARTS)]
        if len(parts) < len(_PARTS):
            raise ValueError(f"{len(parts)} parts")
        if not hmac.compare_digest(signature, self._sign(parts)):
            raise ValueError("wrong signature")
        if signature in self._seen:
            raise ValueError("repeated signature")
        self._seen[signature] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        texts = (part.decode("utf-8", "surrogatepass") for part in parts)  # or json looks which code it is
        return {name: json.loads(text) for name, text in zip(_PARTS, texts, strict=True)}

    def _sign(self, parts: list[bytes]) -> bytes:
        signing = self._signing.copy()
        for part in parts:
            signing.update(part)
        return signing.hexdigest().encode()
