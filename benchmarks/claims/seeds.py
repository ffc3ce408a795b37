"""Compares two policies over several seeds of training. Each seed is a cluster of correlated results.

All tasks of a seed share one training, so (seed, task) pairs are not independent. For each seed, the change is averaged
over its tasks; the overall change is the mean of these averages over the seeds. There are two 95 % intervals for the
overall change. ``t_interval`` uses one number per seed. ``bootstrap_interval`` resamples seeds, and then tasks within
each seed. With few seeds the bootstrap interval is too narrow, and the t interval decides. A seed's tasks are those
that both policies played. For speed-ups, they are those that both policies solved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_agent.rl.scores import METRICS, SPEEDUPS

RESAMPLES = 5000
TAIL = 0.025
Values = Mapping[str, Mapping[str, float | None]]  # task -> metric -> rate or log(speed-up)


def difference(before: Sequence[Values], after: Sequence[Values]) -> dict[str, dict[str, Any]]:
    """Returns for each metric the change from ``before`` to ``after``, which hold one item per seed. The change of a
    rate is a difference, that of a speed-up is a ratio. A metric's result has the overall ``change`` and its two
    intervals. ``tasks`` holds the number of compared tasks of each seed, and ``seeds`` the change of each seed. A seed
    without compared tasks has the change None and is left out of the mean."""
    found = {}
    for metric in METRICS:
        changes = [_changes(*pair, metric) for pair in zip(before, after, strict=True)]
        known = [change for change in changes if len(change)]
        means = np.array([change.mean() for change in known])
        numbers = {
            "change": means.mean() if known else None,
            "t_interval": t_interval(means),
            "bootstrap_interval": bootstrap_interval(known),
        }
        found[metric] = {
            "tasks": [len(change) for change in changes],
            "seeds": [_said(change.mean() if len(change) else None, metric) for change in changes],
            **{name: _said(number, metric) for name, number in numbers.items()},
        }
    return found


def t_interval(means: NDArray[np.float64]) -> tuple[float, float] | None:
    """Returns Student's 95 % interval (low, high) of the mean of ``means`` [seeds]. Returns None with fewer than two
    seeds."""
    if len(means) < 2:
        return None
    from scipy.stats import t  # MLflow brings scipy; a machine that measures seeds may lack it

    reach = t.ppf(1 - TAIL, len(means) - 1) * means.std(ddof=1) / np.sqrt(len(means))
    return float(means.mean() - reach), float(means.mean() + reach)


def bootstrap_interval(changes: Sequence[NDArray[np.float64]]) -> tuple[float, float] | None:
    """Returns the 95 % bootstrap interval (low, high) of the mean over seeds of each seed's mean. ``changes`` holds
    [tasks] per seed. Returns None with fewer than two seeds."""
    if len(changes) < 2:
        return None
    random, total = np.random.default_rng(0), np.zeros(RESAMPLES)
    for _ in changes:  # one draw of a seed, and of tasks of this seed
        means = np.array([one[random.integers(0, len(one), (RESAMPLES, len(one)))].mean(axis=1) for one in changes])
        total += means[random.integers(0, len(changes), RESAMPLES), np.arange(RESAMPLES)]
    low, high = np.quantile(total / len(changes), [TAIL, 1 - TAIL])
    return float(low), float(high)


def _changes(before: Values, after: Values, metric: str) -> NDArray[np.float64]:
    pairs = [(before[task][metric], after[task][metric]) for task in sorted(before.keys() & after.keys())]
    return np.array([new - old for old, new in pairs if old is not None and new is not None])


def _said(number: Any, metric: str) -> Any:
    """Returns ``number`` rounded to 4 digits. If ``metric`` is a speed-up, ``number`` is a logarithm, and its
    exponential is returned. None stays None."""
    return None if number is None else np.round(np.exp(number) if metric in SPEEDUPS else number, 4).tolist()
