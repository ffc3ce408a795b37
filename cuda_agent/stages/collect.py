"""``collect``: tasks, policy -> ``episodes``: plays the policy in the full agent loop and keeps every episode, good and
bad.  Played in rounds of one episode a task; a kill loses one round at most."""

import asyncio
import time

from cuda_agent.policy.episode import Episode, read_episodes, write_episodes
from cuda_agent.stages.context import StageContext, TryAgain
from cuda_agent.stages.rollouts import batch_metrics, open_rollouts
from cuda_agent.tasks.io import read_tasks

EPISODES = "episodes.jsonl"


def run(ctx: StageContext) -> None:
    asyncio.run(_run(ctx))


async def _run(ctx: StageContext) -> None:
    config = ctx.config
    tasks = [task for task in read_tasks(ctx.inputs["tasks"]) if task.split == "train"]
    episodes: list[Episode] = []
    start = ctx.checkpoints.load(lambda folder: episodes.extend(read_episodes(folder / EPISODES))) or 0
    async with open_rollouts(
        ctx,
        ctx.inputs["policy"],
        turns=config.agent.turns,
        context=config.policy.context,
        temperature=config.agent.temperature,
    ) as rollouts:
        for sample in range(start, config.collect.samples):
            began = time.monotonic()
            played = await rollouts.play(tasks, 1, f"collect/{sample}", "agent")
            seconds = time.monotonic() - began
            episodes += played
            ctx.tracker.log(sample, batch_metrics(played) | {"episodes_per_second": len(played) / seconds})
            ctx.tracker.progress(sample + 1, config.collect.samples, unit="rounds")
            ctx.checkpoints.save(sample + 1, lambda folder: write_episodes(folder / EPISODES, episodes))
            if ctx.should_stop():
                raise TryAgain(f"stopped after round {sample + 1} of {config.collect.samples}")
    write_episodes(ctx.outputs["episodes"] / EPISODES, episodes)
