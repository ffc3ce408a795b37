"""Stage ``agentic``: trains the policy by multi-turn reinforcement learning in the sandbox (CUDA Agent, arXiv
2602.24286, section 3.3, stage 4). Inputs: tasks, policy, optionally critic; outputs: ``policy``, ``critic``.

The critic is a model that estimates the expected reward. The initial critic is the input ``critic``. Without this
input, the stage makes the initial critic from the policy. The setting ``agentic.advantage`` chooses the estimator of
advantages. If the estimator needs a critic, the stage trains the initial critic and outputs the trained one. Otherwise
it outputs the initial critic."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from cuda_agent.context import StageContext
from cuda_agent.policy.model import save_policy
from cuda_agent.rl.ppo import train_ppo
from cuda_agent.training.critic import Critic, critic_from_policy, load_critic, save_critic


def run(ctx: StageContext) -> None:
    model, tokenizer, critic = asyncio.run(train_ppo(ctx, ctx.config.agentic, "agent", first_critic))
    save_policy(model, tokenizer, ctx.outputs["policy"])
    if "critic" in ctx.outputs:
        save_critic(first_critic(ctx.inputs) if critic is None else critic, ctx.outputs["critic"])


def first_critic(inputs: Mapping[str, Path]) -> Critic:
    """Returns the initial critic. This is the pretrained critic if ``inputs`` (folders by name) has one. Otherwise it
    is a new critic made from the policy in ``inputs``."""
    return load_critic(inputs["critic"]) if "critic" in inputs else critic_from_policy(inputs["policy"])
