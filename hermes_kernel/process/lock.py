"""A lock on an open file. It ends with the last descriptor of that file, whatever ends the processes."""

import os
import sys

if sys.platform == "win32":
    import msvcrt

    FAR = 1 << 30  # a byte that nobody reads: a locked one can be read by nobody else
    SAFELY = os.O_BINARY | os.O_NOINHERIT

    def lock(descriptor: int) -> bool:
        """Take the lock, if nobody has it; return whether it is ours. Whoever has it is not waited for."""
        os.lseek(descriptor, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def is_own(info: os.stat_result) -> bool:
        """Whether a file is this user's: the directory is in the user's profile."""
        return True

else:
    import fcntl

    SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

    def lock(descriptor: int) -> bool:
        """Take the lock, if nobody has it; return whether it is ours. Whoever has it is not waited for."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_own(info: os.stat_result) -> bool:
        """Whether a file is this user's."""
        return info.st_uid == os.getuid()
