"""Defines the forms of the reward (``REWARDS``): pure functions of an episode's verdict (``Verdict.to_json``).

A stage trains with the form that its configuration names. HTML pages, scores and the service always show
``Verdict.reward``, which is the form "ladder"."""

from collections.abc import Callable, Mapping
from typing import Any

Json = Mapping[str, Any]


def ladder(verdict: Json) -> float | None:
    """Returns the reward of the paper's Eq. 1: -1 for an incorrect solution, and 1, 2 or 3 for a correct one, depending
    on its speed (see ``Verdict``). Returns None for the status ``infra``, a fault of the sandbox."""
    return None if verdict["reward"] is None else float(verdict["reward"])


def speedup(verdict: Json) -> float | None:
    """Returns ``3 * s / (1 + s)`` for a correct solution that is ``s`` times as fast as the faster of eager and
    ``torch.compile``. The reward rises smoothly from 0 (infinitely slow) through 1.5 (equally fast) and 2 (twice as
    fast) towards 3. Returns 0 for a correct solution without times, -1 for an incorrect one, and None for the status
    ``infra``, a fault of the sandbox."""
    gain = raw(verdict)
    return 3 * gain / (1 + gain) if gain is not None and verdict["status"] == "ok" else gain


def raw(verdict: Json) -> float | None:
    """Returns the speed-up of a correct solution over the faster of eager and ``torch.compile``, without an upper
    bound. The paper uses this reward in an ablation (Table 2). Returns 0 for a correct solution without times, -1 for
    an incorrect one, and None for the status ``infra``, a fault of the sandbox."""
    if verdict["status"] != "ok":
        return ladder(verdict)
    ratios = (verdict["speedup_eager"], verdict["speedup_compile"])
    return min((ratio for ratio in ratios if ratio is not None), default=0.0)


REWARDS: dict[str, Callable[[Json], float | None]] = {"ladder": ladder, "speedup": speedup, "raw": raw}
