"""The processes below a process, as the kernel lists them.  Standard library only: both sides of the jail use it.

Not covered: those that left, because their parent died and nobody on the way up is a subreaper.
"""

import contextlib
import os
from collections.abc import Set


def descendants(pid: int, without: Set[int] = frozenset(), most: int = 1 << 22) -> set[int]:
    """Children, theirs, and so on, dead ones that nobody waited for included; not those in ``without``, nor what is
    below them.  Stops soon when there are more than ``most``.  Empty where the kernel keeps no such lists."""
    found: set[int] = set()
    unread = [pid]
    while unread and len(found) <= most:
        folder = f"/proc/{unread.pop()}/task"
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(folder):
                with open(f"{folder}/{thread}/children") as file:
                    new = {int(word) for word in file.read().split()} - found - without
                found |= new
                unread += new
    return found
