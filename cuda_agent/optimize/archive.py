"""Chooses the solution from which an attempt of a search starts.

The first attempts start from nothing, and each later one from one of all correct solutions so far. More likely are fast
solutions, solutions that differ from all faster ones, and solutions from which few attempts have started. As long as
there is no correct solution, attempts start from nothing, and so do some after attempts that gained nothing."""

from collections.abc import Collection, Sequence
from random import Random

from cuda_agent.agent.progress import Find, factor

MOST_BESIDE = 4
_FROM_NOTHING = 2  # most attempts that run side by side before there is a correct solution
_POWER = 16  # of a solution's speed, as a share of the fastest one's: at 0.9 its weight is 0.19, at 0.8 it is 0.03
_GAIN = 1.05  # least gain of an attempt over its start that is not noise
_PATIENCE = 4  # attempts from solutions without a gain until one starts from nothing; then 2, and then 1
_SAME = 0.1  # weight of a solution that equals a faster one, compared with one that shares no line with it


def beside(attempts: int, found: bool) -> int:
    """Returns how many attempts of a search with ``attempts`` attempts run side by side. ``found`` says whether there
    is a correct solution. Before there is one they start from nothing, which costs as much and finds less than a start
    from a solution; so there are fewer."""
    return max(1, min(MOST_BESIDE if found else _FROM_NOTHING, (attempts + 1) // 2))


def choose(
    finds: Sequence[Find], starts: Sequence[str | None], count: int, seed: int, busy: Collection[int]
) -> Find | None:
    """Returns the solution from which the next attempt starts, or None if it starts from nothing.

    The first ``count`` attempts start from nothing. ``finds`` are the correct solutions so far. ``starts`` holds the
    digest of the solution from which each earlier attempt started, in the order of their numbers (from 1); "" if the
    attempt started from nothing, and None if it has not started or this is not known. ``busy`` are the numbers of the
    attempts that have not ended. Equal arguments give equal choices."""
    ranked = sorted(finds, key=lambda find: (-_speed(find), find.solution.digest))
    ranked = [find for find in ranked if _speed(find) > 0]
    if len(starts) < count or not ranked or _lost_patience(ranked, starts, busy):
        return None
    return Random(f"{seed}/{len(starts) + 1}").choices(ranked, weights(ranked, starts))[0]


def _lost_patience(ranked: Sequence[Find], starts: Sequence[str | None], busy: Collection[int]) -> bool:
    """Returns whether so many attempts from solutions gained nothing that the next one starts from nothing. They count
    from the latest attempt on that found the fastest solution, or one that is 5 % faster than its own start. A policy
    that cannot improve solutions so has half of its attempts start from nothing."""
    speeds = {find.solution.digest: _speed(find) for find in ranked}
    gained = [ranked[0].attempt]
    for find in ranked:
        start = starts[find.attempt - 1] if find.attempt <= len(starts) else ""
        if start and _speed(find) >= _GAIN * speeds.get(start, 0.0):
            gained.append(find.attempt)
    since = range(max(gained) + 1, len(starts) + 1)
    in_vain = [number for number in since if starts[number - 1] and number not in busy]
    from_nothing = sum(starts[number - 1] == "" and number > in_vain[0] for number in since) if in_vain else 0
    return len(in_vain) >= sum(max(1, _PATIENCE >> times) for times in range(from_nothing + 1))


def weights(ranked: Sequence[Find], started: Sequence[str | None]) -> list[float]:
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
