"""What the recipes decide without a model: rates, batches, targets, and what a batch of episodes says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_agent.training.packing import batch_of, tokens_of, tokens_of_episode
from cuda_agent.training.recipes import episode_metrics, learning_rate, sft, sft_batches, targets
from tests.training.training_cases import random_episode


def test_the_rate_rises_and_falls_to_zero() -> None:
    rates = [learning_rate(f / 100, 2.0) for f in range(101)]
    assert 0 < rates[0] < rates[1] < rates[2] == pytest.approx(2.0)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert learning_rate(0.51, 1.0) == pytest.approx(0.5)
    assert learning_rate(7.0, 1.0) == rates[100] == 0.0, "beyond the end it stays there"


def test_an_epoch_has_every_sequence_once_in_steps_of_at_most_so_many_tokens() -> None:
    lengths = [7, 3, 30, 5, 5, 9, 1, 12]
    batches = sft_batches(lengths, 14, seed=1, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(8))
    for batch in batches:
        assert sum(lengths[index] for index in batch) <= 14 or batch == [2], "a longer one is a batch of its own"
    assert batches == sft_batches(lengths, 14, seed=1, epoch=0)
    assert len({str(sft_batches(lengths, 14, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) > 1


def test_imitation_needs_one_limit_and_something_to_imitate() -> None:
    trainer: Any = None
    one = [tokens_of([1, 2], [0, 1])]
    for limits in ({}, {"steps": 1, "epochs": 1}):
        with pytest.raises(ValueError, match="either steps or epochs"):
            next(sft(trainer, one, tokens_per_step=8, lr=1e-3, seed=0, **limits))
    with pytest.raises(ValueError, match="no sequences"):
        next(sft(trainer, [], tokens_per_step=8, lr=1e-3, seed=0, steps=1))


def test_with_lambda_one_the_targets_are_the_rewards_whatever_the_values() -> None:
    episodes = [random_episode(seed, reward=reward) for seed, reward in ((1, -1.0), (2, 3.0))]
    batch = batch_of(map(tokens_of_episode, episodes))
    values = torch.randn(len(batch))
    expected = torch.cat([torch.full((count,), r) for count, r in zip(batch.counts, (-1.0, 3.0), strict=True)])
    torch.testing.assert_close(targets(batch, values, 1.0, 1.0), expected)
    torch.testing.assert_close(targets(batch, None, 1.0, 1.0), expected)
    assert not torch.allclose(targets(batch, values, 1.0, 0.5), expected)


def test_the_judges_seconds_are_means_over_verdicts_that_were_judged_anew() -> None:
    verdicts: list[dict[str, Any] | None] = [
        {"status": "ok", "phases": {"start": 0.2, "time": 0.4}, "cached": False},
        {"status": "wrong", "phases": {"start": 0.4}, "cached": False},
        {"status": "ok", "phases": {"start": 9.0, "time": 9.0}, "cached": True},
        None,
    ]
    metrics = episode_metrics([replace(random_episode(n), verdict=one) for n, one in enumerate(verdicts)])
    assert metrics["judge_start_seconds"] == pytest.approx(0.3)
    assert metrics["judge_time_seconds"] == pytest.approx(0.2)


def test_rates_are_over_the_episodes_with_a_reward() -> None:
    episodes = [
        replace(random_episode(number, reward=reward), ended=ended, verdict={"reward": reward})
        for number, (reward, ended) in enumerate(((3.0, "answer"), (2.0, "turns"), (-1.0, "tokens"), (1.0, "answer")))
    ]
    metrics = episode_metrics([*episodes, replace(random_episode(5), reward=None)])
    assert (metrics["episodes"], metrics["dropped"], metrics["reward"]) == (4, 1, 1.25)
    assert (metrics["faster_than_eager"], metrics["faster_than_compile"], metrics["cut_short"]) == (0.5, 0.25, 0.5)
    assert metrics["response_length"] == sum(sum(episode.mask) for episode in episodes) / 4
    assert episode_metrics([replace(random_episode(6), reward=None)]) == {"episodes": 0.0, "dropped": 1.0}
