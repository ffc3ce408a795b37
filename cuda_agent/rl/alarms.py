"""Finds signs of unstable training in the metrics of a PPO step. An alarm only warns the user. It does not
change the training."""

from collections.abc import Mapping

# Metric -> its least and greatest sound value, and what another value means.
ALARMS = {
    "entropy": (0.01, float("inf"), "the policy hardly explores any more"),
    "ratio_mean": (0.9, 1.1, "the policy moves far in one step"),
    "train_inference_mismatch": (0.0, 0.1, "engine and trainer give tokens different probabilities"),
    "cut_short": (0.0, 0.5, "most episodes use up their turns or tokens"),
    "explained_variance": (-0.1, 1.0, "the critic predicts rewards worse than a constant"),
    "skipped": (0.0, 0.0, "gradients of the policy were not finite, so updates were left out"),
    "critic_skipped": (0.0, 0.0, "gradients of the critic were not finite, so updates were left out"),
}
GROWTH = 3.0  # greatest sound entropy, as a multiple of the first step's
_GREW = f"entropy is more than {GROWTH:g} times that of the first step: the policy forgets; try a smaller actor_lr"


def alarms(metrics: Mapping[str, float], first: Mapping[str, float]) -> list[str]:
    """Returns one line of text for each alarm. ``metrics`` are those of the current step. A metric that is NaN or
    outside its limits (``ALARMS``) causes an alarm. The entropy also causes one if it is more than ``GROWTH`` times its
    value in ``first``. ``first`` holds the first value of each metric that this process has seen."""
    lines = [
        f"{name} left its limits, {low:g} to {high:g}: {meaning}"
        for name, (low, high, meaning) in ALARMS.items()
        if name in metrics and not low <= metrics[name] <= high
    ]
    return lines + [_GREW] * (metrics.get("entropy", 0.0) > GROWTH * first.get("entropy", float("inf")))
