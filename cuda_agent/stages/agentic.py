"""``agentic``: tasks, policy, critic -> ``policy``, ``critic``: multi-turn PPO in the sandbox (paper, section 3.3,
stage 4), from the policy of rejection fine-tuning and the pretrained critic."""

import asyncio

from cuda_agent.context import StageContext
from cuda_agent.policy.model import save_policy
from cuda_agent.rl.ppo import train_ppo
from cuda_agent.training.critic import load_critic, save_critic


def run(ctx: StageContext) -> None:
    model, tokenizer, critic = asyncio.run(
        train_ppo(ctx, ctx.config.agentic, "agent", lambda inputs: load_critic(inputs["critic"]))
    )
    save_policy(model, tokenizer, ctx.outputs["policy"])
    save_critic(critic, ctx.outputs["critic"])
