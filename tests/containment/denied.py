"""``denied.py CALL[,CALL] COMMAND...`` runs a command for which system calls do not exist, for good."""

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": (0xC000003E, {"pidfd_open": 434, "unshare": 272}),
    "aarch64": (0xC00000B7, {"pidfd_open": 434, "unshare": 97}),
}
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def deny(names: list[str]) -> None:
    architecture, numbers = NUMBERS[platform.machine()]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 0)]
    for name in names:
        steps += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    steps.append((RETURN, 0, 0, ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in (
        (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1)),
        (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER)),
    ):
        program = ctypes.byref(Program(len(steps), code)) if option == PR_SET_SECCOMP else ctypes.c_ulong(0)
        if libc.prctl(option, value, program, ctypes.c_ulong(0), ctypes.c_ulong(0)):
            raise OSError(ctypes.get_errno(), f"prctl {option}")


if __name__ == "__main__":
    deny(sys.argv[1].split(","))
    os.execv(sys.argv[2], sys.argv[2:])
