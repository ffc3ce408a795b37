"""Forms of the reward: a table of pure functions of the verdict on an episode's final files.

``Verdict.reward`` is the paper's ladder.  It stays on every verdict, whatever form a stage learns from, because pages,
scores and the service show it."""

from collections.abc import Callable

from cuda_agent.agent.progress import factor
from cuda_agent.sandbox.wire import Verdict


def ladder(verdict: Verdict) -> float | None:
    """Returns the reward of the paper's Eq. 1, which ``Verdict`` explains; None for ``infra``."""
    return None if verdict.reward is None else float(verdict.reward)


def speedup(verdict: Verdict) -> float | None:
    """Returns 3 s / (1 + s) for a correct solution that is s times as fast as the faster baseline: a smooth reward.

    The baselines are eager and ``torch.compile``.  The reward rises with every gain in speed, from 0 (infinitely slow)
    over 1.5 (as fast as the baseline) and 2 (twice as fast) towards 3, so it stays in the range of ``ladder``.

    Returns:
        -1 for a solution that is not correct, a number in [0, 3) for a correct one (0 if it was not timed); None for
            ``infra``.
    """
    if verdict.status != "ok":
        return ladder(verdict)
    gain = factor(verdict) or 0.0
    return 3 * gain / (1 + gain)


REWARDS: dict[str, Callable[[Verdict], float | None]] = {"ladder": ladder, "speedup": speedup}
