"""``evaluate-base``, ``-warmup``, ``-rft``, ``-agentic``: held-out tasks, policy -> ``scores``.  One module, four rows of
the graph: every policy plays the same tasks in the same loop, with the same budget and the same seeds."""

import asyncio

from cuda_agent.policy.episode import Episode, read_episodes, write_episodes
from cuda_agent.stages.collect import EPISODES
from cuda_agent.stages.context import StageContext, TryAgain
from cuda_agent.stages.rollouts import batch_metrics, open_rollouts
from cuda_agent.stages.scores import score, write_scores
from cuda_agent.tasks.io import read_tasks


def run(ctx: StageContext) -> None:
    asyncio.run(_run(ctx))


async def _run(ctx: StageContext) -> None:
    config = ctx.config
    tasks = [task for task in read_tasks(ctx.inputs["tasks"]) if task.split == "heldout"]
    episodes: list[Episode] = []
    start = ctx.checkpoints.load(lambda folder: episodes.extend(read_episodes(folder / EPISODES))) or 0
    async with open_rollouts(
        ctx,
        ctx.inputs["policy"],
        turns=config.evaluate.turns,
        context=config.policy.context,
        temperature=config.evaluate.temperature,
    ) as rollouts:
        for sample in range(start, config.evaluate.samples):
            played = await rollouts.play(
                tasks,
                1,
                f"evaluate/{sample}",
                "agent",
                on_done=lambda done, total: ctx.tracker.progress(done, total, unit="episodes"),
            )
            episodes += played
            ctx.tracker.log(sample, batch_metrics(played))
            ctx.checkpoints.save(sample + 1, lambda folder: write_episodes(folder / EPISODES, episodes))
            if ctx.should_stop():
                raise TryAgain(f"stopped after round {sample + 1} of {config.evaluate.samples}")
    folder = ctx.outputs["scores"]
    write_episodes(folder / EPISODES, episodes)
    policy = ctx.name.removeprefix("evaluate-")
    write_scores(folder / "scores.json", score(policy, episodes, tasks, config.sandbox.clock, config.seed))
