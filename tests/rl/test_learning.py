"""The loop of the stages that learn by rewards: what is played ahead, and which episodes count."""

import asyncio
from contextlib import aclosing

import pytest

from cuda_agent.agent.loop import seed_of
from cuda_agent.errors import BadConfiguration
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.ppo import mean_age, oldest, prefetch
from cuda_agent.rl.ray.players import EpisodeCollector, open_placement_group
from cuda_agent.rl.rollouts import episodes_of
from cuda_agent.rl.runtime import RolloutBatch
from cuda_agent.tasks.task import Task
from tests.rl.ray.ray_cases import config, context

TASKS = [Task(name, "", (), "torch#1") for name in ("a", "b")]


def history(steps: range, max_off_policy_steps: int) -> list[tuple[str, int]]:
    """What happens in which order, where learning takes longer than playing."""
    events = []

    async def play(step: int) -> RolloutBatch:
        events.append(("play", step))
        await asyncio.sleep(0)
        events.append(("played", step))
        return RolloutBatch([], float(step), {})

    async def script() -> None:
        async with aclosing(prefetch(play, steps, max_off_policy_steps)) as batches:
            async for step, played in batches:
                assert played.seconds == step
                for _ in range(20):
                    await asyncio.sleep(0)
                events.append(("learnt", step))

    asyncio.run(script())
    return events


def test_without_staleness_nothing_is_played_before_the_last_step_is_learnt():
    order = [(what, step) for step in (3, 4, 5) for what in ("play", "played", "learnt")]
    assert history(range(3, 6), 0) == order


@pytest.mark.parametrize("max_off_policy_steps", [1, 2, 5])
def test_the_next_steps_are_played_meanwhile_and_none_too_early(max_off_policy_steps):
    events = history(range(2, 8), max_off_policy_steps)
    when = {event: index for index, event in enumerate(events)}
    for step in range(2, 8):
        if step - max_off_policy_steps - 1 >= 2:
            assert when["play", step] > when["learnt", step - max_off_policy_steps - 1]
        if step + 1 < 8:
            assert when["played", step] < when["play", step + 1] < when["learnt", step], "one after the other, ahead"
    assert len(when) == len(events) == 18


def test_a_fault_in_what_is_played_ahead_ends_the_rest():
    ended = []

    async def play(step: int) -> RolloutBatch:
        if step == 1:
            raise RuntimeError("no engine")
        try:
            await asyncio.sleep(0 if step == 0 else 60)
        except asyncio.CancelledError:
            ended.append(step)
            raise
        return RolloutBatch([], 0.0, {})

    async def script() -> None:
        async with aclosing(prefetch(play, range(4), 2)) as batches:
            async for _, _ in batches:
                for _ in range(20):
                    await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="no engine"):
        asyncio.run(script())
    assert ended == [2]


def episode(name: str, reward: float | None = 1.0, versions: tuple[int, ...] = (-1, 4, -1, 5)) -> Episode:
    task = name.split("/")[1].split("#")[0] if "/" in name else "t"
    mask = [int(version >= 0) for version in versions]
    zeros = [0] * len(mask)
    return Episode(name, task, "agent", zeros, mask, [0.0] * len(mask), [*versions], zeros, reward, "answer")


def test_the_age_of_an_episode_is_that_of_its_oldest_sampled_token():
    assert oldest(episode("x")) == 4
    assert mean_age([episode("x"), episode("y", versions=(-1, 6))], 6) == pytest.approx(1.0)
    assert oldest(episode("x", versions=(-1, -1))) == float("inf") and mean_age([], 3) == 0


def test_of_every_task_the_first_to_finish_are_kept_in_the_order_of_the_tasks():
    jobs = episodes_of(TASKS, 3, "s")
    harvest = EpisodeCollector(jobs, 2)
    for name in ("s/b/2", "s/a/1", "s/b/0"):
        harvest.add(episode(name))
        assert not harvest.full
    harvest.add(episode("s/a/0"))
    assert harvest.full and harvest.cut == 2
    assert [kept.id for kept in harvest.episodes()] == ["s/a/0", "s/a/1", "s/b/0", "s/b/2"]


def test_a_task_that_is_drawn_twice_has_other_episodes_each_time_and_a_group_for_each_draw():
    jobs = episodes_of([TASKS[0], TASKS[1], TASKS[0]], 2, "s")
    assert [name for _, name in jobs] == ["s/a/0", "s/a/1", "s/b/0", "s/b/1", "s/a#2/0", "s/a#2/1"]
    assert len({seed_of(0, name) for _, name in jobs}) == 6
    assert [episode(name).group for _, name in jobs] == ["s/a", "s/a", "s/b", "s/b", "s/a#2", "s/a#2"]


def test_of_every_draw_of_a_task_the_first_to_finish_are_kept():
    jobs = episodes_of([TASKS[0], TASKS[0]], 3, "s")
    harvest = EpisodeCollector(jobs, 2)
    for name in ("s/a/2", "s/a/1", "s/a/0", "s/a#2/2"):
        harvest.add(episode(name))
        assert not harvest.full, "the second draw has only one"
    harvest.add(episode("s/a#2/0"))
    assert harvest.full and [kept.id for kept in harvest.episodes()] == ["s/a/1", "s/a/2", "s/a#2/0", "s/a#2/2"]


def test_episodes_stand_in_the_order_of_their_jobs():
    jobs = episodes_of([TASKS[0], TASKS[1], TASKS[0]], 2, "s")
    harvest = EpisodeCollector(jobs, 2)
    for _, name in reversed(jobs):
        assert not harvest.full
        harvest.add(episode(name))
    assert harvest.full and harvest.cut == 0
    assert [kept.id for kept in harvest.episodes()] == [name for _, name in jobs]


def test_an_episode_without_a_reward_does_not_take_the_place_of_one_with():
    harvest = EpisodeCollector(episodes_of(TASKS[:1], 3, "s"), 2)
    harvest.add(episode("s/a/0", reward=None))
    harvest.add(episode("s/a/1"))
    assert not harvest.full, "the third may still be good"
    harvest.add(episode("s/a/2"))
    assert harvest.full and [kept.id for kept in harvest.episodes()] == ["s/a/1", "s/a/2"]


@pytest.mark.parametrize("trainers", [0, 1])
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"policy": {"engine": "vllm", "vllm": {"servers": ["http://a:1"]}}}, "has 1 for them"),
        ({"ray": {"worker_gpus": 1000}}, r"ray.worker_gpus (and ray.trainer_gpus add|adds) up to 2000, and this"),
    ],
)
def test_what_no_ray_here_could_hold_is_a_wrong_configuration(tmp_path, sections, said, trainers):
    ctx = context(tmp_path, config(runtime="ray", **sections), {"policy": tmp_path})

    async def script() -> None:
        async with open_placement_group(ctx, trainers):
            pytest.fail("too late")

    with pytest.raises(BadConfiguration, match=said):
        asyncio.run(script())


def test_where_too_few_have_a_reward_the_others_are_counted():
    harvest = EpisodeCollector(episodes_of(TASKS[:1], 2, "s"), 2)
    harvest.add(episode("s/a/0", reward=None))
    harvest.add(episode("s/a/1"))
    assert harvest.full and [kept.reward for kept in harvest.episodes()] == [None, 1.0]
