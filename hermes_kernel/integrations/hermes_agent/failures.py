"""How it is logged that the host's own code has failed."""

import logging


def log_failure(log: logging.Logger, error: BaseException, what: str) -> None:
    """Log at ERROR what has failed, with the class of the exception.

    Its text and its traceback may hold what nobody meant to be logged: they are there at DEBUG alone.
    """
    log.error("%s: %s", what, type(error).__name__)
    log.debug("%s", what, exc_info=error)
