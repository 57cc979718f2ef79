"""Removes the files of a kernel whose host cannot do it any more."""

import os
from collections.abc import Sequence


def remove(paths: Sequence[str]) -> None:
    """Remove directories with all that is in them, and files, in this order.

    What a cell has made too hard to remove stays, with what comes after it (the lease is the last): then the
    sweep of a next host sees to it.
    """
    import shutil  # a warden that lives has no use for it

    try:
        for path in paths:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
    except (OSError, RecursionError):
        return
