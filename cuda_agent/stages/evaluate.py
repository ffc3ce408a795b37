"""``evaluate-base``, ``-warmup``, ``-rft``, ``-agentic``: held-out tasks, policy -> ``scores``.

One module, four rows of the graph: every policy plays the same tasks in the same loop, with the same budget and seeds.
"""

import asyncio

from cuda_agent.context import StageContext
from cuda_agent.policy.episode import EPISODES, write_episodes
from cuda_agent.rl.rounds import play_rounds
from cuda_agent.rl.scores import score, write_scores


def run(ctx: StageContext) -> None:
    config = ctx.config
    settings = config.evaluate
    tasks, episodes = asyncio.run(
        play_rounds(ctx, "heldout", settings.samples, turns=settings.turns, temperature=settings.temperature)
    )
    folder = ctx.outputs["scores"]
    write_episodes(folder / EPISODES, episodes)
    policy = ctx.name.removeprefix("evaluate-")
    write_scores(folder / "scores.json", score(policy, episodes, tasks, config.sandbox.clock, config.seed))
