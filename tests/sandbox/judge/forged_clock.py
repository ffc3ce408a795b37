"""A judge whose clock measures 1 ns for every call of a candidate, as if a solution had forged the device's clock, on a
machine with a small cache (``test_roofline``)."""

from typing import Any

from cuda_agent.sandbox.judge import judge, trial
from cuda_agent.sandbox.judge.timing import roofline


def _forged(device: str, wall: float, told: Any) -> float:
    return 1e-9


if __name__ == "__main__":
    vars(trial)["seconds_of_call"] = _forged
    vars(roofline)["cache_bytes"] = lambda folder, processors: 1 << 16
    judge.main()
