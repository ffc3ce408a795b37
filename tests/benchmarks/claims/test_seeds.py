"""Differences over seeds against numbers worked out by hand."""

import importlib.util
import math
from pathlib import Path

import pytest

from cuda_agent.rl.scores import METRICS, SPEEDUPS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "claims" / "seeds.py"
spec = importlib.util.spec_from_file_location("claims_seeds", SCRIPT)
seeds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(seeds)


def policy(*rows: list[float | None]) -> list[dict]:
    """One list of values per seed, a value per task; a speed-up is None where the value is."""
    return [
        {f"t{i}": {m: value if m in SPEEDUPS else value or 0.0 for m in METRICS} for i, value in enumerate(row)}
        for row in rows
    ]


def test_many_tasks_of_few_seeds_do_not_narrow_the_interval():
    """Two seeds teach nothing and one teaches 30 points: over 300 pairs the mean of 10 would seem certain."""
    before, after = policy(*[[0.5] * 100] * 3), policy([0.5] * 100, [0.5] * 100, [0.8] * 100)
    found = seeds.difference(before, after)["passed"]
    assert (found["tasks"], found["seeds"], found["change"]) == ([100] * 3, [0.0, 0.0, 0.3], 0.1)
    assert found["t_interval"] == [pytest.approx(0.1 - 4.3027 * 0.1, abs=1e-4), pytest.approx(0.5303, abs=1e-4)]
    assert found["bootstrap_interval"] == [0.0, pytest.approx(0.3)]


def test_seeds_that_agree_leave_the_spread_of_their_tasks_to_the_bootstrap():
    before, after = policy(*[[0.0] * 20] * 2), policy(*[[0.0, 1.0] * 10] * 2)
    found = seeds.difference(before, after)["passed"]
    assert found["t_interval"] == [0.5, 0.5]
    low, high = found["bootstrap_interval"]
    spread = 1.96 * math.sqrt(0.25 / 40)  # of the mean of 40 coins, drawn in two groups of 20
    assert low == pytest.approx(0.5 - spread, abs=0.02) and high == pytest.approx(0.5 + spread, abs=0.02)


def test_one_seed_has_a_change_and_no_interval():
    found = seeds.difference(policy([0.0, 0.5]), policy([0.5, 1.0]))["passed"]
    assert found["change"] == 0.5 and found["t_interval"] is None and found["bootstrap_interval"] is None


def test_speed_ups_are_ratios_over_the_tasks_that_both_solved():
    two, four = math.log(2), math.log(4)
    before, after = policy([two, None, two], [None, two], [two]), policy([four, four, None], [four, None], [two])
    found = seeds.difference(before, after)["speedup_compile"]
    assert (found["tasks"], found["seeds"]) == ([1, 0, 1], [2.0, None, 1.0]), "the second seed has no such task"
    assert found["change"] == pytest.approx(math.sqrt(2), abs=1e-4)
    assert found["t_interval"][0] * found["t_interval"][1] == pytest.approx(2.0, abs=0.05), "symmetric in the logarithm"


def test_only_tasks_that_both_policies_played_are_compared():
    before = policy([0.0, 0.0], [0.0, 0.0])
    after = [{"t1": of["t1"], "t9": of["t0"]} for of in policy([0.0, 1.0], [0.0, 1.0])]
    found = seeds.difference(before, after)["passed"]
    assert (found["tasks"], found["change"]) == ([1, 1], 1.0)
