"""Removes what dead hosts have left: the processes and directories of kernels whose lease nobody holds."""

import contextlib
import logging
import re
import sys
from pathlib import Path

from . import lease
from .lease import Lease
from .marked import end_marked
from .published import published_of, withdraw, withdraw_halves
from .staging import (
    StagingError,
    directories_of,
    is_abandoned,
    is_lease_of_ours,
    lost_leases,
    remove_sockets,
    remove_trees,
    runtime_base,
    set_aside,
)

_RETIRED = re.compile(r"\..+\.[0-9a-f]{9}")
_log = logging.getLogger(__name__)


def sweep() -> int:
    """Remove what is left of every kernel that has nobody; return how many there were.

    A lease decides, or where there is none whether the sockets are read, never a time or a pid. Nothing
    outside the directories that a kernel of this user has is touched, whatever its record says.
    """
    try:
        base = runtime_base()
    except StagingError as error:  # whoever starts a kernel is told
        _log.info("nothing is swept: %s", error)
        return 0
    known = [path for path in lease.leases(base) if is_lease_of_ours(path)]
    dead = [taken for path in known if (taken := Lease.take_dead(path)) is not None]
    records = {one: lease.read(one.path) for one in dead}
    gone = {one.path for one in dead}
    alive = {lease.cookie_of(lease.read(path)) for path in known if path not in gone}
    cookies = {cookie for record in records.values() if (cookie := lease.cookie_of(record))} - alive
    all_ended = end_marked(cookies)
    if not all_ended:
        _log.warning("processes of dead kernels cannot be ended: %s", ", ".join(sorted(cookies)))
    for one, record in records.items():
        remains = set_aside(directories_of(one.path))
        remove_sockets(one.path, record)
        name = one.path.with_suffix("").name
        withdraw(published_of(name, record))
        withdraw_halves(name, record)
        if all_ended:
            one.remove()
        else:
            one.close()  # the next sweep tries again
        remove_trees(remains)
    remove_retired()
    return len(dead) + (0 if sys.platform == "win32" else _sweep_abandoned(base))


def _sweep_abandoned(base: Path) -> int:
    """Remove what has lost its lease; return how many there were. While one is removed its name is held."""
    number = 0
    for path in lost_leases(base):
        try:
            taken = Lease.take(path)
        except OSError as error:  # somebody has the name now
            _log.info("%s is left alone: %s", path, error)
            continue
        remains = set_aside(directories_of(path)) if is_abandoned(path) else ()
        taken.remove()
        remove_trees(remains)
        number += bool(remains)
    return number


def remove_retired() -> None:
    """Remove what was moved out of the way and could not be removed then."""
    with contextlib.suppress(StagingError, FileNotFoundError):
        remove_trees([entry for entry in runtime_base().iterdir() if _RETIRED.fullmatch(entry.name)])
