"""Chooses the solution from which an attempt of a search starts.

The attempts of a search belong to islands. An attempt usually starts from a solution of the same island, so that the
search follows several ideas. More likely are fast solutions, solutions that differ from all faster ones, and solutions
from which few attempts have started. Where there is no correct solution, an attempt starts from nothing."""

from collections.abc import Mapping, Sequence
from random import Random

from cuda_agent.agent.progress import Find, factor

MOST_ISLANDS = 4
_VISIT = 0.25  # share of the attempts that may start from a solution of any island
_RANK = 0.6  # weight of a solution, compared with that of the next faster one
_SAME = 0.1  # weight of a solution that equals a faster one, compared with one that shares no line with it


def islands(attempts: int) -> int:
    """Returns the number of islands of a search with ``attempts`` attempts. So many attempts run side by side."""
    return max(1, min(MOST_ISLANDS, (attempts + 1) // 2))


def island_of(attempt: int, count: int) -> int:
    """Returns the island, from 0, of the attempt with this number, from 1. ``count`` is the number of islands."""
    return (attempt - 1) % count


def choose(finds: Sequence[Find], parents: Mapping[int, str], attempt: int, count: int, seed: int) -> Find | None:
    """Returns the solution from which the attempt with number ``attempt`` starts, or None if it starts from nothing.

    The first attempt of an island starts from nothing. ``finds`` are the correct solutions so far. ``parents`` maps the
    numbers of earlier attempts to the digests of the solutions from which they started. ``count`` is the number of
    islands. Equal arguments give equal choices."""
    if attempt <= count:
        return None
    random, island = Random(f"{seed}/{attempt}"), island_of(attempt, count)
    own = [find for find in finds if island_of(find.attempt, count) == island]
    chosen = [*finds] if not own or random.random() < _VISIT else own
    ranked = sorted(chosen, key=lambda find: (-_speed(find), find.solution.digest))
    ranked = [find for find in ranked if _speed(find) > 0]
    return random.choices(ranked, weights(ranked, [*parents.values()]))[0] if ranked else None


def weights(ranked: Sequence[Find], started: Sequence[str]) -> list[float]:
    """Returns the weight of each solution in ``ranked``, which begins with the fastest. ``started`` holds the digests
    of the solutions from which attempts have started, one for each attempt."""
    found: list[float] = []
    lines = [_lines(find) for find in ranked]
    for rank, find in enumerate(ranked):
        nearest = max((len(lines[rank] & other) / len(lines[rank] | other) for other in lines[:rank]), default=0.0)
        novelty = 1 - (1 - _SAME) * nearest
        found.append(_RANK**rank * novelty / (1 + started.count(find.solution.digest)))
    return found


def _speed(find: Find) -> float:
    return factor(find.strict or find.quick) or 0.0


def _lines(find: Find) -> frozenset[str]:
    texts = find.solution.files.values()
    return frozenset(line.strip() for text in texts for line in text.splitlines() if line.strip()) or frozenset([""])
