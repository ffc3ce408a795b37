"""Defines the reward functions from which a training stage can choose (``REWARDS``).

Each function computes the reward of an episode from the sandbox's verdict on the solution, in the form of
``Verdict.to_json``. The configuration of a stage names the function. The field ``reward`` of a verdict does not depend
on this choice: it always has the value of ``ladder``."""

from collections.abc import Callable, Mapping
from typing import Any

Json = Mapping[str, Any]


def ladder(verdict: Json) -> float | None:
    """Returns the reward of Eq. 1 of the CUDA Agent paper: -1 for an incorrect solution, and 1, 2 or 3 for a correct
    one, depending on its speed (``Verdict`` gives the limits). Returns None for the status ``infra``, a fault of the
    sandbox."""
    return None if verdict["reward"] is None else float(verdict["reward"])


def speedup(verdict: Json) -> float | None:
    """Returns ``3 * s / (1 + s)`` for a correct solution. ``s`` is its speed-up over the reference in eager PyTorch or
    under ``torch.compile``, whichever is faster. The reward rises smoothly from 0 (infinitely slow) through 1.5
    (equally fast) and 2 (twice as fast) towards 3. Returns 0 for a correct solution that was not timed, -1 for an
    incorrect one, and None for the status ``infra``, a fault of the sandbox."""
    gain = raw(verdict)
    return 3 * gain / (1 + gain) if gain is not None and verdict["status"] == "ok" else gain


def raw(verdict: Json) -> float | None:
    """Returns the speed-up of a correct solution over the reference in eager PyTorch or under ``torch.compile``,
    whichever is faster. The reward has no upper bound. The CUDA Agent paper uses it in an ablation (Table 2). Returns 0
    for a correct solution that was not timed, -1 for an incorrect one, and None for the status ``infra``, a fault of
    the sandbox."""
    if verdict["status"] != "ok":
        return ladder(verdict)
    ratios = (verdict["speedup_eager"], verdict["speedup_compile"])
    return min((ratio for ratio in ratios if ratio is not None), default=0.0)


REWARDS: dict[str, Callable[[Json], float | None]] = {"ladder": ladder, "speedup": speedup, "raw": raw}
