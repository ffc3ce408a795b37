"""The held-out split: by operator combination, not by task.

Two tasks with the same operators and other shapes are the same problem for a policy, so that a combination belongs to
one side of the split.  The side is a hash of (seed, combination): no list is stored, and a resumed run agrees with an
uninterrupted one.  What it does not cover: near combinations (``relu, sum`` and ``relu, mean`` may lie on different
sides).
"""

import hashlib
from collections.abc import Callable, Iterable

from cuda_agent.tasks.task import Task


def is_heldout(combination: str, seed: int, share: float) -> bool:
    """Whether this combination is held out.  ``share`` in [0, 1]: held-out share of all combinations."""
    digest = hashlib.sha256(f"{seed}/{combination}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def heldout_combinations(tasks: Iterable[Task], combination: Callable[[Task], str]) -> frozenset[str]:
    """The combinations of the held-out tasks, which a training corpus must not contain."""
    return frozenset(combination(task) for task in tasks if task.split == "heldout")


def ops_combination(task: Task) -> str:
    """The combination of a catalogue task: its operators, in any order."""
    return "+".join(sorted(task.ops))
