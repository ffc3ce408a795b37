"""Runs a judge that measures 1 ns for every call of a candidate, as if the solution had forged the clock.

The judge also assumes that the device's last cache holds 64 KiB only. Used by ``test_roofline``."""

from typing import Any

from cuda_agent.sandbox.judge import judge, trial
from cuda_agent.sandbox.judge.timing import roofline


def _forged(device: str, wall: float, told: Any) -> float:
    return 1e-9


if __name__ == "__main__":
    vars(trial)["seconds_of_call"] = _forged
    vars(roofline)["cache_bytes"] = lambda folder, processors: 1 << 16
    judge.main()
