"""Reads descendants and memory of a process from the kernel's tables. Standard library only: both sides of the jail use
it.

Not covered: orphans that were reparented outside because no ancestor is a subreaper."""

import contextlib
import os
from collections.abc import Set


def children(pid: int) -> set[int]:
    """Return the children of ``pid``, zombies included. Empty where the kernel keeps no such lists."""
    found: set[int] = set()
    folder = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def memory_bytes(pid: int) -> tuple[int, int]:
    """Return the resident bytes of ``pid``, and how many of them no file or other process shares; 0 after its end."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return resident * page, (resident - shared) * page


def descendants(pid: int, without: Set[int] = frozenset(), most: int = 1 << 22) -> set[int]:
    """Return all descendants of ``pid``, zombies included, except those in ``without`` and their descendants. Stop soon
    after ``most``."""
    found: set[int] = set()
    unread = [pid]
    while unread and len(found) <= most:
        new = children(unread.pop()) - found - without
        found |= new
        unread += new
    return found
