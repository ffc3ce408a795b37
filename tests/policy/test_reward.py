"""Forms of the reward, as functions of the verdict."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_agent.config import Ppo
from cuda_agent.policy.reward import REWARDS, ladder, raw, speedup
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.training.advantages import ADVANTAGES

REFUSED = ["build_error", "wrong", "cheat", "timeout", "crash"]
SECONDS = st.floats(1e-6, 10)


def verdict(status="ok", seconds=None, eager=None, compiled=None) -> dict:
    times = {"seconds": seconds, "eager_seconds": eager, "compile_seconds": compiled}
    return Verdict(status, "plan", "quick", "cpu", "real", **times).to_json()


def test_the_configuration_offers_every_row_of_the_tables():
    assert set(get_args(Ppo.model_fields["reward"].annotation)) == set(REWARDS)
    assert set(get_args(Ppo.model_fields["advantage"].annotation)) == set(ADVANTAGES)


@pytest.mark.parametrize("form", REWARDS)
def test_a_refused_solution_costs_one_and_a_fault_of_ours_nothing(form):
    assert [REWARDS[form](verdict(status, 1e-3, 1.0, 1.0)) for status in REFUSED] == [-1.0] * len(REFUSED)
    assert REWARDS[form](verdict("infra")) is None


def test_the_ladder_is_equation_one_of_the_paper():
    steps = [(1.0, 1.0, 1.0), (0.94, 1.0, 0.9), (0.94, 1.0, 1.0), (0.96, 1.0, 1.0), (None, None, None)]
    assert [ladder(verdict("ok", *times)) for times in steps] == [1.0, 2.0, 3.0, 1.0, 1.0]


def test_speedup_is_against_the_faster_baseline():
    assert speedup(verdict("ok", 1.0, 1.0, 4.0)) == speedup(verdict("ok", 1.0, 4.0, 1.0)) == 1.5
    assert speedup(verdict("ok", 1.0, 2.0, 4.0)) == 2.0
    assert speedup(verdict("ok", 1.0, 2.0)) == 2.0, "the only baseline"
    assert speedup(verdict("ok")) == 0.0, "correct, and not timed"


def test_raw_is_the_speed_up_over_the_faster_baseline_without_a_bound():
    assert raw(verdict("ok", 1.0, 1.0, 4.0)) == raw(verdict("ok", 1.0, 4.0, 1.0)) == 1.0
    assert raw(verdict("ok", 0.01, 2.0, 1.0)) == 100.0
    assert raw(verdict("ok")) == 0.0, "correct, and not timed"


@given(SECONDS, SECONDS, SECONDS, st.floats(1.01, 100))
def test_speedup_is_bounded_and_rises_with_speed(seconds, eager, compiled, gain):
    slow, fast = (speedup(verdict("ok", time, eager, compiled)) for time in (seconds, seconds / gain))
    assert 0 < slow < fast < 3
