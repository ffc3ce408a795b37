"""PPO's loop over a runtime that only pretends: what becomes of a step whose episodes are lost."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cuda_agent.errors import EXIT_RETRY, TryAgain
from cuda_agent.policy.episode import Episode
from cuda_agent.rl import ppo
from cuda_agent.rl.runtime import RolloutBatch
from cuda_agent.tasks.io import read_tasks, write_tasks
from cuda_agent.tracking import read_metrics
from cuda_agent.training.recipes import episode_metrics
from tests.rl.ray.ray_cases import config, context

SETTINGS = {"steps": 2, "episodes_per_step": 2, "samples_per_prompt": 2, "minibatches": 1, "advantage": "rloo"}


def episode(name: str, reward: float | None, version: int) -> Episode:
    ended = "infra" if reward is None else "answer"
    return Episode(name, "t", "single", [1, 2], [0, 1], [0.0, -1.0], [-1, version], [0, 0], reward, ended)


class Pretended:
    """Plays episodes with the rewards that ``rewards`` gives for a step, and remembers what happens."""

    def __init__(self, rewards, metrics=None):
        self.rewards, self.metrics, self.done = rewards, metrics or {}, []

    async def play(self, step, tasks):
        self.done.append((tasks[0].split, step))
        episodes = [episode(f"s/{n}/0", reward, step) for n, reward in enumerate(self.rewards(step))]
        return RolloutBatch(episodes, 1.0, {"workers_lost": float(tasks[0].split == "heldout")})

    async def learn(self, step, episodes):
        self.done.append(("learn", step))
        return episode_metrics(episodes) | self.metrics

    async def serve(self, version):
        self.done.append(("serve", version))

    async def save(self, step):
        self.done.append(("save", step))

    async def restore(self):
        return 0

    async def result(self):
        return None, None, None


def train(monkeypatch, folder, inputs, rewards, metrics=None, **settings):
    """Runs PPO; what happened, and the stage's context."""
    runtime, ctx = Pretended(rewards, metrics), context(folder, config(warmup=SETTINGS | settings), inputs)

    @asynccontextmanager
    async def opened(*arguments):
        yield runtime

    monkeypatch.setattr(ppo, "open_local", opened)
    try:
        asyncio.run(ppo.train_ppo(ctx, ctx.config.warmup, "single", lambda found: None))
    finally:
        ctx.done = runtime.done
        ctx.metrics = read_metrics(folder / "said" / "metrics.jsonl")
    return ctx


def test_a_step_without_any_episode_is_no_step_and_is_tried_again(tmp_path, monkeypatch, inputs):
    done = []

    def rewards(step):
        done.append(step)
        return [1.0, 2.0] if step == 0 else [None, None]

    with pytest.raises(TryAgain, match=r"step 2: no episode has a reward; 2 were lost \(infra\)") as error:
        train(monkeypatch, tmp_path, inputs, rewards)
    assert error.value.exit_code == EXIT_RETRY and done == [0, 1]
    assert list(read_metrics(tmp_path / "said" / "metrics.jsonl")) == [0], "nothing was learnt in the second step"


@pytest.mark.parametrize("lost", [True, False])
def test_a_stage_that_lost_episodes_says_so_once(tmp_path, monkeypatch, inputs, lost):
    ctx = train(monkeypatch, tmp_path, inputs, lambda step: [1.0, None if lost else 2.0])
    said = [
        "warmup lost episodes to faults or to the deadline; its metric dropped counts them",
        "warmup lost episodes to faults: other runs will not take its result from the cache",
    ]
    assert ctx.tracker.notes() == said * lost
    assert [metrics["lost"] for metrics in ctx.metrics.values()] == [float(lost)] * 2
    assert [metrics["dropped"] for metrics in ctx.metrics.values()] == [float(lost)] * 2
    assert ("learn", 1) in ctx.done


def test_each_alarm_is_noted_once_a_stage(tmp_path, monkeypatch, inputs):
    ctx = train(monkeypatch, tmp_path, inputs, lambda step: [1.0, 2.0], {"entropy": 1e-4, "ratio_mean": 2.0})
    entropy, ratio = ctx.tracker.notes()
    assert entropy.startswith("warmup: entropy left its limits") and ratio.startswith("warmup: ratio_mean left")


@pytest.mark.parametrize(("limit", "taken"), [(None, 4), (45, 4), (35, 3), (5, 1)])
def test_the_limit_of_time_ends_a_stage_before_a_step_that_would_exceed_it(tmp_path, monkeypatch, inputs, limit, taken):
    clock = [0.0]

    def rewards(step):  # a step takes 10 s
        clock[0] += 10
        return [1.0, 2.0]

    monkeypatch.setattr(ppo, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ctx = train(monkeypatch, tmp_path, inputs, rewards, steps=4, max_seconds=limit)
    assert [step for what, step in ctx.done if what == "save"] == list(range(1, taken + 1))
    ended = [f"warmup: max_seconds ends it after step {taken} of 4"] if taken < 4 else []
    assert ctx.tracker.notes() == ended


@pytest.mark.parametrize(("every", "shown"), [(0, []), (1, [0, 1, 2]), (2, [0, 2])])
def test_heldout_tasks_are_played_every_few_steps_and_only_shown(tmp_path, monkeypatch, inputs, every, shown):
    first, second = read_tasks(inputs["tasks"])
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks", [first, replace(second, split="heldout")])
    given = inputs | {"tasks": tmp_path / "tasks"}
    ctx = train(monkeypatch, tmp_path / "stage", given, lambda step: [1.0, 2.0], eval_every=every, steps=3)
    assert [step for what, step in ctx.done if what == "heldout"] == shown
    assert [step for what, step in ctx.done if what == "train"] == [0, 1, 2]
    assert [step for step, metrics in ctx.metrics.items() if "heldout_pass_rate" in metrics] == shown
    assert [metrics["episodes"] for metrics in ctx.metrics.values()] == [2.0] * 3, "none is trained on"
    lost = [step for step, metrics in ctx.metrics.items() if metrics["workers_lost"]]
    assert lost == shown, "workers that a held-out round lost count"


def test_the_shown_speedup_is_that_of_the_solutions_that_passed():
    episodes = [episode(f"s/{n}/0", 1.0, 0) for n in range(4)]
    for one, (status, speedup) in zip(episodes, [("ok", 2.0), ("ok", 0.5), ("wrong", None), ("ok", 8.0)], strict=True):
        one.verdict = {"status": status, "speedup_compile": speedup}
    assert ppo.heldout_metrics(episodes) == pytest.approx({"heldout_pass_rate": 0.75, "heldout_speedup": 2.0})
    assert ppo.heldout_metrics(episodes[2:3]) == {"heldout_pass_rate": 0.0}
