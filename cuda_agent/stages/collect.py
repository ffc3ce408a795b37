"""Stage ``collect``: plays the training tasks with the policy, in turns with tools, and keeps all episodes, successful
or not. Inputs: tasks, policy; output: ``episodes``. A round is one episode of every task. The stage saves a checkpoint
after every round, so a killed stage loses at most one round."""

import asyncio

from cuda_agent.context import StageContext
from cuda_agent.policy.episode import EPISODES, write_episodes
from cuda_agent.rl.rounds import play_rounds


def run(ctx: StageContext) -> None:
    agent, samples = ctx.config.agent, ctx.config.collect.samples
    play = play_rounds(ctx, "train", samples, turns=agent.turns, temperature=agent.temperature)
    _, episodes = asyncio.run(play)
    write_episodes(ctx.outputs["episodes"] / EPISODES, episodes)
