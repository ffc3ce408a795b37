"""What Ray's workers play with engines of their own, play ahead and play too much."""

import asyncio
from importlib.util import find_spec

import pytest

from cuda_agent.rl.ray.runtime import open_ray_runtime
from cuda_agent.rl.runtime import open_local
from cuda_agent.stages import warmup
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tracking import read_metrics
from cuda_agent.training.critic import critic_from_policy
from tests.rl.ray.ray_cases import config, context

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')"),
]


def two_steps(folder, settings, inputs):
    """Plays, learns, serves and plays again; what was played."""
    ctx = context(folder, settings, inputs)
    opened = open_local if settings.runtime == "local" else open_ray_runtime
    tasks = read_tasks(inputs["tasks"])

    async def script():
        async with opened(ctx, settings.warmup, "single", lambda found: critic_from_policy(found["policy"])) as runtime:
            await runtime.serve(await runtime.restore())
            first = await runtime.play(0, tasks)
            await runtime.learn(0, first.episodes)
            await runtime.serve(1)
            return [first, await runtime.play(1, tasks)]

    return asyncio.run(script())


def test_engines_of_several_workers_play_what_one_engine_plays(tmp_path, inputs):
    settings = {"policy": {"engine": "local"}, "agent": {"turn_tokens": 60}}
    alone = two_steps(tmp_path / "local", config(**settings), inputs)
    spread = two_steps(tmp_path / "ray", config(runtime="ray", **settings), inputs)
    for version, (one, other) in enumerate(zip(alone, spread, strict=True)):
        assert [e.id for e in one.episodes] == [e.id for e in other.episodes] and len(one.episodes) == 4
        for ours, theirs in zip(one.episodes, other.episodes, strict=True):
            assert (ours.ids, ours.mask, ours.versions) == (theirs.ids, theirs.mask, theirs.versions)
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert {v for v, sampled in zip(ours.versions, ours.mask, strict=True) if sampled} == {version}
            assert (ours.reward, ours.files) == (theirs.reward, theirs.files)


def test_every_task_keeps_its_share_where_more_is_played_than_needed(tmp_path, inputs):
    settings = config(runtime="ray", ray={"oversample": 0.5, "workers": 2})
    for played in two_steps(tmp_path, settings, inputs):
        tasks = [episode.task for episode in played.episodes]
        assert len(tasks) == 4 and {tasks.count(task) for task in tasks} == {2}
        assert 0 <= played.metrics["cut"] <= 2


def test_what_is_played_ahead_is_at_most_a_step_old_and_trained_on(tmp_path, inputs):
    settings = config(runtime="ray", ray={"max_off_policy_steps": 1}, warmup={"steps": 4})
    warmup.run(context(tmp_path, settings, inputs))
    steps = read_metrics(tmp_path / "said" / "metrics.jsonl")
    assert list(steps) == [0, 1, 2, 3]
    ages = [values["token_age"] for values in steps.values()]
    assert ages[0] == 0 and max(ages) <= 1 and sum(ages) > 0, ages
    assert all(values["stale"] == 0 and values["episodes"] == 4 for values in steps.values())
