"""Rounds of episodes that only pretend to be played: what becomes of the lost ones."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from cuda_agent.errors import TryAgain
from cuda_agent.policy.episode import Episode
from cuda_agent.rl import rounds
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tracking import read_metrics
from tests.rl.ray.ray_cases import config, context


def play(monkeypatch, folder, inputs, lost):
    """Plays two rounds; the last episodes are lost, as many of a round as ``lost`` says."""

    class Players:
        async def play(self, jobs, kind, on_done):
            kept = len(jobs) - lost
            return [
                Episode(name, task.name, kind, *[[]] * 5, 1.0 if n < kept else None, "answer" if n < kept else "infra")
                for n, (task, name) in enumerate(jobs)
            ]

    @asynccontextmanager
    async def opened(*arguments):
        yield Players()

    monkeypatch.setattr(rounds, "open_rollouts", opened)
    ctx = context(folder, config(), inputs, "collect")
    _, episodes = asyncio.run(rounds.play_rounds(ctx, "train", 2, turns=1, temperature=1.0))
    return ctx, episodes


def test_a_stage_that_lost_episodes_says_so_once(tmp_path, monkeypatch, inputs):
    ctx, episodes = play(monkeypatch, tmp_path, inputs, 1)
    assert ctx.tracker.notes() == [
        "collect lost episodes to faults or to the deadline; its metric dropped counts them",
        "collect lost episodes to faults: other runs will not take its result from the cache",
    ]
    metrics = read_metrics(tmp_path / "said" / "metrics.jsonl")
    assert [values["lost"] for values in metrics.values()] == [1.0, 1.0]
    assert [episode.reward for episode in episodes] == [1.0, None] * 2


def test_a_stage_that_lost_nothing_says_nothing(tmp_path, monkeypatch, inputs):
    assert play(monkeypatch, tmp_path, inputs, 0)[0].tracker.notes() == []


def test_a_round_of_lost_episodes_only_is_tried_again(tmp_path, monkeypatch, inputs):
    with pytest.raises(TryAgain, match="round 1: no episode has a reward; 2 were lost"):
        play(monkeypatch, tmp_path, inputs, len(read_tasks(inputs["tasks"])))
