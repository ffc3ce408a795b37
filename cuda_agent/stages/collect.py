"""Stage ``collect``: plays the policy in the full agent loop on the training tasks and keeps every episode, good and
bad.  Inputs: tasks, policy; output: ``episodes``.  It saves after every round (one episode of every task), so a kill
costs at most one round.
"""

import asyncio

from cuda_agent.context import StageContext
from cuda_agent.policy.episode import EPISODES, write_episodes
from cuda_agent.rl.rounds import play_rounds


def run(ctx: StageContext) -> None:
    config = ctx.config
    _, episodes = asyncio.run(
        play_rounds(
            ctx, "train", config.collect.samples, turns=config.agent.turns, temperature=config.agent.temperature
        )
    )
    write_episodes(ctx.outputs["episodes"] / EPISODES, episodes)
