"""Stage ``warmup``: trains the policy by reinforcement learning on single answers without tools (CUDA Agent, arXiv
2602.24286, section 3.3, stage 1). Inputs: tasks, policy; output: ``policy``. The setting ``warmup.advantage`` chooses
the estimator of advantages. If the estimator needs a critic (a model that estimates the expected reward), the stage
makes one from the policy."""

import asyncio

from cuda_agent.context import StageContext
from cuda_agent.policy.model import save_policy
from cuda_agent.rl.ppo import train_ppo
from cuda_agent.training.critic import critic_from_policy


def run(ctx: StageContext) -> None:
    training = train_ppo(ctx, ctx.config.warmup, "single", lambda inputs: critic_from_policy(inputs["policy"]))
    model, tokenizer, _ = asyncio.run(training)
    save_policy(model, tokenizer, ctx.outputs["policy"])
