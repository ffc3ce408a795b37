"""Chooses the solution from which an attempt of a search starts.

The first attempts start from nothing, and each later one from one of all correct solutions so far. More likely are fast
solutions, solutions that differ from all faster ones, and solutions from which few attempts have started. As long as
there is no correct solution, attempts start from nothing."""

from collections.abc import Mapping, Sequence
from random import Random

from cuda_agent.agent.progress import Find, factor

MOST_BESIDE = 4
_FROM_NOTHING = 2  # most attempts that run side by side before there is a correct solution
_POWER = 16  # of a solution's speed, as a share of the fastest one's: at 0.9 its weight is 0.19, at 0.8 it is 0.03
_SAME = 0.1  # weight of a solution that equals a faster one, compared with one that shares no line with it


def beside(attempts: int, found: bool) -> int:
    """Returns how many attempts of a search with ``attempts`` attempts run side by side. ``found`` says whether there
    is a correct solution. Before there is one they start from nothing, which costs as much and finds less than a start
    from a solution; so there are fewer."""
    return max(1, min(MOST_BESIDE if found else _FROM_NOTHING, (attempts + 1) // 2))


def choose(finds: Sequence[Find], parents: Mapping[int, str], attempt: int, count: int, seed: int) -> Find | None:
    """Returns the solution from which the attempt with number ``attempt`` (from 1) starts, or None if it starts from
    nothing.

    The first ``count`` attempts start from nothing. ``finds`` are the correct solutions so far. ``parents`` maps the
    numbers of earlier attempts to the digests of the solutions from which they started. Equal arguments give equal
    choices."""
    ranked = sorted(finds, key=lambda find: (-_speed(find), find.solution.digest))
    ranked = [find for find in ranked if _speed(find) > 0]
    if attempt <= count or not ranked:
        return None
    return Random(f"{seed}/{attempt}").choices(ranked, weights(ranked, [*parents.values()]))[0]


def weights(ranked: Sequence[Find], started: Sequence[str]) -> list[float]:
    """Returns the weight of each solution in ``ranked``, which begins with the fastest. ``started`` holds the digests
    of the solutions from which attempts have started, one for each attempt."""
    found: list[float] = []
    lines = [_lines(find) for find in ranked]
    for rank, find in enumerate(ranked):
        nearest = max((len(lines[rank] & other) / len(lines[rank] | other) for other in lines[:rank]), default=0.0)
        novelty = 1 - (1 - _SAME) * nearest
        speed = (_speed(find) / _speed(ranked[0])) ** _POWER
        found.append(speed * novelty / (1 + started.count(find.solution.digest)))
    return found


def _speed(find: Find) -> float:
    return factor(find.strict or find.quick) or 0.0


def _lines(find: Find) -> frozenset[str]:
    texts = find.solution.files.values()
    return frozenset(line.strip() for text in texts for line in text.splitlines() if line.strip()) or frozenset([""])
