"""The seccomp filter: system calls that a candidate program may not use, in the format that bubblewrap takes.

Namespaces already hide files, processes and networks. The filter denies calls that create namespaces, gain privileges,
reach rarely tested parts of the kernel, allocate memory or slots that no limit counts (memfd, System V segments, AIO),
list mounts, or let programs that run at the same time signal each other through the files that they share: locks,
leases, file watches, the page cache.
"""

from __future__ import annotations

import errno
import platform
import struct
from pathlib import Path

_ROWS = [
    line.split()
    for line in Path(__file__).with_name("denied_calls.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
# name: number on x86_64, on aarch64 (None: it has no such call)
DENIED = {name: tuple(None if word == "-" else int(word) for word in numbers) for name, *numbers in _ROWS}
# Commands of fcntl that lock a file, read its locks, or watch it: GETLK, SETLK, SETLKW, the same for OFD locks (36…38),
# SETLEASE, GETLEASE, NOTIFY; and SETPIPE_SZ, which uses memory that is counted for the whole user
DENIED_FCNTL = (5, 6, 7, 36, 37, 38, 1024, 1025, 1026, 1031)
# audit architecture, column of DENIED, clone, clone3, fcntl
_MACHINES = {"x86_64": (0xC000003E, 0, 56, 435, 72), "aarch64": (0xC00000B7, 1, 220, 435, 25)}
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for this machine's processor, or the one named; None if the table does not cover it.

    >>> len(filter_program("x86_64")) % 8, filter_program("vax")
    (0, None)
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column, clone, clone3, fcntl = known
    eperm, enosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    # One instruction: (code, instructions to skip if true, to skip if false, operand). The fields are those of the
    # kernel's struct sock_filter.
    program = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_EQUAL, 1, 0, architecture),
        # Call numbers differ between architectures, so a call of another architecture would bypass the table.
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
        (_AT_LEAST, 0, 1, 0x40000000),  # x32 call numbers are not in the table
        (_RETURN, 0, 0, eperm),
        (_EQUAL, 0, 1, clone3),  # its flags are in memory, which a filter cannot read; libc falls back to clone
        (_RETURN, 0, 0, enosys),
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, 16),  # seccomp_data.args[0], low half
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, eperm),
        # The accumulator no longer holds the call number, so the decision about clone ends here.
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 2 * len(DENIED_FCNTL) + 2, fcntl),
        (_LOAD, 0, 0, 24),  # seccomp_data.args[1], low half: the command, an unsigned int
        *(step for command in DENIED_FCNTL for step in ((_EQUAL, 0, 1, command), (_RETURN, 0, 0, eperm))),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, eperm)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
