"""Forms of the reward: a table of pure functions of the verdict on an episode's final workspace.

``Verdict.reward`` is the paper's ladder and stays on every verdict, whatever form a stage learns from: pages, scores
and the service show it.  Not covered: verdicts (``sandbox.judge``) and training on rewards (``training``).
"""

from collections.abc import Callable

from cuda_agent.sandbox.wire import Verdict


def ladder(verdict: Verdict) -> float | None:
    """The reward of the paper's Eq. 1.

    Returns:
        -1 for a solution that is not correct, 1 for a correct one, 2 if it is more than 5 % faster than eager, 3 if it
        is also more than 5 % faster than ``torch.compile``; None for ``infra``.
    """
    return None if verdict.reward is None else float(verdict.reward)


REWARDS: dict[str, Callable[[Verdict], float | None]] = {"ladder": ladder}
