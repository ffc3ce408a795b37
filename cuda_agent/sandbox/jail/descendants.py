"""Reads the descendants of a process, and the memory of processes, from ``/proc``. Uses only the standard library.

When a process ends, Linux gives its children a new parent, such as init. If the new parent is not in the process tree
that is read, these children are not found."""

import contextlib
import os
import stat
from collections.abc import Set


def children(pid: int) -> set[int]:
    """Returns the children of ``pid``, including zombies. Returns an empty set if ``/proc`` does not list children."""
    found: set[int] = set()
    folder = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):  # the process ended meanwhile
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def state(stat: str) -> str:
    """Returns the state of a process or thread: R, S, D, T (stopped), Z (zombie), X (ended) or another letter. ``stat``
    is the path of its ``stat`` file in ``/proc``."""
    try:
        with open(stat, "rb", 0) as file:
            return chr(file.read(512).rpartition(b") ")[2][0])
    except (OSError, IndexError):
        return "X"


def memory_bytes(pid: int) -> tuple[int, int]:
    """Returns the resident bytes of ``pid``, and how many of these are private. Returns zeros if the process has
    ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return resident * page, (resident - shared) * page


def shared_bytes(pid: int) -> int:
    """Returns the resident bytes of ``pid`` in shared memory (``RssShmem`` in ``/proc``); 0 if the process has
    ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("RssShmem:"))
    return 0


def deleted_bytes(pid: int, devices: Set[int]) -> int:
    """Returns the bytes of deleted files that ``pid`` and its descendants hold open. Counts only file systems with the
    device numbers ``devices``, and skips processes that this process may not inspect."""
    found: dict[tuple[int, int], int] = {}
    for folder in (f"/proc/{one}/fd" for one in (pid, *descendants(pid))):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    file = os.stat(f"{folder}/{name}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_dev in devices:
                        found[file.st_dev, file.st_ino] = max(file.st_blocks * 512, file.st_size)
    return sum(found.values())


def descendants(pid: int, without: Set[int] = frozenset(), most: int = 1 << 22) -> set[int]:
    """Returns the process ids of the descendants of ``pid``. Leaves out the processes ``without`` and their
    descendants. Stops early when it has found more than ``most`` descendants; the result is then incomplete."""
    found: set[int] = set()
    unread = [pid]
    while unread and len(found) <= most:
        new = children(unread.pop()) - found - without
        found |= new
        unread += new
    return found
