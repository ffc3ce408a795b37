"""``warmup``: tasks, policy -> ``policy``: PPO on one-shot answers, without tools (paper, section 3.3, stage 1).  Its
critic starts from the policy and is dropped afterwards."""

import asyncio

from cuda_agent.policy.model import save_policy
from cuda_agent.stages.context import StageContext
from cuda_agent.stages.learning import improve, shared_training
from cuda_agent.training.critic import critic_from_policy


def run(ctx: StageContext) -> None:
    policy = ctx.inputs["policy"]
    with shared_training(ctx) as ctx:
        model, tokenizer, _ = asyncio.run(
            improve(ctx, ctx.config.warmup, "single", policy, lambda: critic_from_policy(policy))
        )
    save_policy(model, tokenizer, ctx.outputs["policy"])
