"""What takes the secrets of one host out of the results of its cells."""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ..cell.masks import Masks, worth_masking
from ..cell.shown import Cleaner
from ..errors import ConfigError
from ..process.environment import EnvPolicy, withheld_secrets

SHORTEST_SECRET = 4  # characters

_log = logging.getLogger(__name__)


def checked_secrets(given: Any) -> frozenset[str]:
    """Return the secrets that a registry was given; raises ConfigError, which does not name them."""
    if isinstance(given, str | bytes):
        raise ConfigError("secrets is one text; give a list of texts")
    try:
        secrets = tuple(given)
    except TypeError:
        raise ConfigError(f"secrets is a {type(given).__name__}; give a list of texts") from None
    for number, secret in enumerate(secrets):
        if not isinstance(secret, str):
            raise ConfigError(f"secrets[{number}] is a {type(secret).__name__}; give a text")
        if len(secret.strip()) < SHORTEST_SECRET:
            raise ConfigError(
                f"secrets[{number}] is too short to be masked; give {SHORTEST_SECRET} characters"
            )
    return frozenset(secrets)


def cleaner_for(
    secrets: frozenset[str],
    env: Mapping[str, str],
    platform: str,
    policy: EnvPolicy,
    clean: Callable[..., str] | None,
) -> Cleaner:
    """Return what cleans the result of one call."""
    withheld = withheld_secrets(env, platform=platform, policy=policy)
    masks = _masks(secrets | frozenset(filter(worth_masking, withheld)))
    return masks if clean is None else HostCleaner(masks, clean)


@lru_cache(maxsize=16)
def _masks(secrets: frozenset[str]) -> Masks:
    return Masks(secrets)


class HostCleaner:
    """Our masks and the host's own function; if that fails, our masks alone."""

    def __init__(self, masks: Masks, clean: Callable[..., object]) -> None:
        self.margin = masks.margin
        self._masks = masks
        self._clean = clean
        self._decides = _takes_two(clean)

    def mask(self, text: str) -> str:
        """Return the text without secrets."""
        if not text:
            return text
        try:
            cleaned: object
            if self._decides:
                cleaned = self._clean(text, self._masks.mask)
            else:
                cleaned = self._clean(self._masks.mask(text))
        except (Exception, SystemExit):  # noqa: BLE001  # whatever it does, the secrets stay out
            _log.exception("clean has failed: our own masks are used")
            return self._masks.mask(text)
        if isinstance(cleaned, str):
            return cleaned
        _log.error("clean gave a %s: our own masks are used", type(cleaned).__name__)
        return self._masks.mask(text)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with the text and our own masking function."""
    try:
        inspect.signature(function).bind("", len)
    except (TypeError, ValueError):
        return False
    return True
