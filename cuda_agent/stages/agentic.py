"""``agentic``: tasks, policy, critic -> ``policy``, ``critic``: multi-turn PPO in the sandbox (paper, section 3.3,
stage 4), from the policy of rejection fine-tuning and the pretrained critic; without one, from a critic made of the
policy."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from cuda_agent.context import StageContext
from cuda_agent.policy.model import save_policy
from cuda_agent.rl.ppo import train_ppo
from cuda_agent.training.critic import Critic, critic_from_policy, load_critic, save_critic


def run(ctx: StageContext) -> None:
    def make_critic(inputs: Mapping[str, Path]) -> Critic:
        return load_critic(inputs["critic"]) if "critic" in inputs else critic_from_policy(inputs["policy"])

    model, tokenizer, critic = asyncio.run(train_ppo(ctx, ctx.config.agentic, "agent", make_critic))
    save_policy(model, tokenizer, ctx.outputs["policy"])
    save_critic(critic, ctx.outputs["critic"])
