"""Alarms of a training step."""

import math

import pytest

from cuda_agent.rl.alarms import ALARMS, alarms

SOUND = {
    "entropy": 0.4,
    "ratio_mean": 1.01,
    "train_inference_mismatch": 0.01,
    "cut_short": 0.2,
    "explained_variance": 0.5,
    "skipped": 0.0,
    "critic_skipped": 0.0,
}


def test_a_sound_step_and_a_step_without_metrics_give_no_alarm():
    assert SOUND.keys() == ALARMS.keys()
    assert alarms(SOUND, SOUND) == alarms({}, {}) == alarms(SOUND, {}) == []


def test_an_entropy_that_grows_far_above_the_first_steps_gives_an_alarm():
    assert alarms(SOUND, SOUND | {"entropy": 0.14}) == []
    (line,) = alarms(SOUND, SOUND | {"entropy": 0.13})
    assert "the policy forgets" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("entropy", 0.001),
        ("ratio_mean", 1.3),
        ("ratio_mean", 0.7),
        ("train_inference_mismatch", 0.3),
        ("cut_short", 0.8),
        ("explained_variance", -0.5),
        ("entropy", math.nan),
        ("skipped", 0.25),
        ("critic_skipped", 1.0),
    ],
)
def test_each_metric_beyond_its_limits_gives_its_alarm(name, value):
    (line,) = alarms(SOUND | {name: value}, SOUND)
    assert line.startswith(f"{name} left its limits") and line == alarms({name: value}, {})[0]
