"""Defines the forms of the reward (``REWARDS``): pure functions of the verdict on an episode's final files.

A stage learns from the form in its configuration. Pages, scores and the service always show ``Verdict.reward``."""

from collections.abc import Callable

from cuda_agent.agent.progress import factor
from cuda_agent.sandbox.wire import Verdict


def ladder(verdict: Verdict) -> float | None:
    """Returns the reward of the paper's Eq. 1 (see ``Verdict``), or None for the status ``infra``."""
    return None if verdict.reward is None else float(verdict.reward)


def speedup(verdict: Verdict) -> float | None:
    """Returns ``3 * s / (1 + s)`` for a correct solution that is ``s`` times as fast as the faster of eager and
    ``torch.compile``. The reward rises smoothly from 0 (infinitely slow) through 1.5 (equally fast) and 2 (twice as
    fast) towards 3. An untimed correct solution gets 0, an incorrect one -1, and the status ``infra`` None."""
    if verdict.status != "ok":
        return ladder(verdict)
    gain = factor(verdict) or 0.0
    return 3 * gain / (1 + gain)


def raw(verdict: Verdict) -> float | None:
    """Returns the speed-up itself over the faster of eager and ``torch.compile``: the reward that the paper's ladder is
    compared with. It has no bound. An untimed correct solution gets 0, an incorrect one -1, and ``infra`` None."""
    return factor(verdict) or 0.0 if verdict.status == "ok" else ladder(verdict)


REWARDS: dict[str, Callable[[Verdict], float | None]] = {"ladder": ladder, "speedup": speedup, "raw": raw}
