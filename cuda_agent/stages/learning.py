"""What the stages that train share: a trainer as the configuration wants it, imitation with checkpoints, and the PPO
loop of ``warmup`` and ``agentic``.

Not here: the algorithms (``training``), and playing episodes (``rollouts``).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from cuda_agent.config import Ppo
from cuda_agent.lease import Lease
from cuda_agent.policy.lora import attach
from cuda_agent.policy.vllm_server import gpus
from cuda_agent.stages.context import BadConfiguration, StageContext, TryAgain
from cuda_agent.stages.rollouts import Kind, draw, open_rollouts, seed_of
from cuda_agent.tasks.io import read_tasks
from cuda_agent.training.critic import Critic
from cuda_agent.training.memory import AUTO_TOKENS, ROW_TOKENS
from cuda_agent.training.packing import Tokens
from cuda_agent.training.ranks import RankedTrainer, Ranks, TrainerLost
from cuda_agent.training.recipes import ppo_update, sft
from cuda_agent.training.trainer import Trainer

COST = 0.05  # a supervised step is checkpointed when that takes at most this share of the time since the last one


def make_trainer(
    ctx: StageContext,
    model: Any,
    *,
    row_tokens: int,
    longest: int,
    max_grad_norm: float = 1.0,
    precision: Literal["fp32", "auto"] = "fp32",
    scratch: bool = False,
) -> Trainer:
    """``longest``: tokens of the longest sequence, which must fit into a row.  ``precision`` "auto" is for imitation;
    PPO needs the very log-probabilities of the engine.  ``scratch``: Muon, with which a new model gets as far on half
    the tokens (measured: docs/lab-notebook.md).  Others may train adapters instead (``lora``)."""
    import torch

    torch.set_num_threads(ctx.config.policy.threads)
    if not scratch and (lora := ctx.config.lora).rank:
        trunk = model.trunk if isinstance(model, Critic) else model
        attach(trunk, lora.rank, lora.alpha, lora.targets, ctx.config.seed)
    row_tokens = max(min(row_tokens, ROW_TOKENS), longest)
    checkpointing = ctx.config.training.checkpointing
    options: dict[str, Any] = {
        "row_tokens": row_tokens,
        "max_grad_norm": max_grad_norm,
        "weight_decay": 0.1 if scratch else 0.0,
        "optimizer": "muon" if scratch else "adamw",
        "precision": precision,
        "gradient_checkpointing": checkpointing == "on" or (checkpointing == "auto" and row_tokens > AUTO_TOKENS),
    }
    if (ranks := getattr(ctx, "ranks", None)) is not None:
        name = "critic" if isinstance(model, Critic) else "policy"
        options["share"] = ctx.config.training.share
        return cast(Trainer, RankedTrainer(ranks, name, model, **options))  # which is one to all who do not compute
    return Trainer(model, lease=Lease(ctx.cache / "lease"), **options)


@contextmanager
def shared_training(ctx: StageContext) -> Iterator[StageContext]:
    """A context whose trainers run on the ranks that ``training`` asks for; the same where that is this process.  A
    rank that dies ends the stage with TryAgain."""
    settings, threads = ctx.config.training, ctx.config.policy.threads
    if settings.ranks == 1 and settings.device == "cpu":
        yield ctx
        return
    if settings.device == "cuda" and (here := gpus()) < settings.ranks:
        raise BadConfiguration(f"training.ranks: {settings.ranks} on GPUs, and this machine has {here}")
    each = max(1, threads // settings.ranks)
    with Ranks(settings.ranks, device=settings.device, threads=each, lease=ctx.cache / "lease") as ranks:
        try:
            yield replace(ctx, ranks=ranks)
        except TrainerLost as error:
            raise TryAgain(str(error)) from error


def imitate(ctx: StageContext, trainer: Trainer, sequences: Sequence[Tokens], **settings: Any) -> None:
    """Supervised training on ``sequences`` from the newest checkpoint on (``settings`` are
    those of ``training.recipes.sft``): logs, shows progress, checkpoints, stops when asked."""
    ctx.checkpoints.load(trainer.load)
    saved = time.monotonic()
    cost = 0.0
    for metrics in sft(trainer, sequences, seed=ctx.config.seed, **settings):
        fraction = metrics.pop("progress")
        ctx.tracker.log(trainer.step, metrics)
        ctx.tracker.progress(round(1000 * fraction), 1000, unit="‰", tokens_per_second=metrics["tokens_per_second"])
        stopping = ctx.should_stop()
        if stopping or cost <= COST * (time.monotonic() - saved):
            began = time.monotonic()
            ctx.checkpoints.save(trainer.step, trainer.save)
            saved = time.monotonic()
            cost = saved - began
        if stopping:
            raise TryAgain(f"stopped after step {trainer.step}")


async def improve(
    ctx: StageContext,
    settings: Ppo,
    kind: Kind,
    policy: Path,
    make_critic: Callable[[], Critic],
) -> tuple[Any, Any, Critic]:
    """PPO: play a batch, learn from it, serve what was learnt; checkpointed after every step.

    Returns (model, tokenizer, critic)."""
    config = ctx.config
    tasks = [task for task in read_tasks(ctx.inputs["tasks"]) if task.split == "train"]
    async with open_rollouts(
        ctx,
        policy,
        turns=config.agent.turns,
        context=settings.context,
        temperature=config.agent.temperature,
    ) as rollouts:
        sizes: dict[str, Any] = {
            "row_tokens": settings.batch_tokens,
            "longest": settings.context,
            "max_grad_norm": settings.max_grad_norm,
        }
        compute = rollouts.engine.compute
        actor = await compute(lambda: make_trainer(ctx, rollouts.model, **sizes))
        critic = await compute(lambda: make_trainer(ctx, make_critic(), **sizes))

        def save(folder: Path) -> None:
            for name, trainer in (("actor", actor), ("critic", critic)):
                (folder / name).mkdir()
                trainer.save(folder / name)

        def load(folder: Path) -> None:
            actor.load(folder / "actor")
            critic.load(folder / "critic")

        start = ctx.checkpoints.load(load) or 0
        await rollouts.engine.update_from(actor.model, start)
        for step in range(start, settings.steps):
            began = time.monotonic()
            batch = draw(tasks, settings.batch // settings.samples, config.seed, step)
            episodes = await rollouts.play(batch, settings.samples, f"{ctx.name}/{step}", kind)
            played = time.monotonic() - began
            update = partial(
                ppo_update,
                actor,
                critic,
                episodes,
                settings,
                seed=seed_of(config.seed, f"{ctx.name}/{step}") % 2**31,
                train_actor=step >= settings.critic_warmup,
                temperature=config.agent.temperature,
            )
            metrics = await compute(update)
            await rollouts.engine.update_from(actor.model, step + 1)
            seconds = time.monotonic() - began
            sampled = sum(sum(episode.mask) for episode in episodes)
            ctx.tracker.log(
                step,
                metrics
                | {
                    "rollout_seconds": played,
                    "step_seconds": seconds,
                    "sampled_tokens_per_second": sampled / played,
                    "episodes_per_second": len(episodes) / played,
                },
            )
            ctx.tracker.progress(step + 1, settings.steps, reward=metrics.get("reward", 0.0))
            ctx.checkpoints.save(step + 1, save)
            if ctx.should_stop() and step + 1 < settings.steps:
                raise TryAgain(f"stopped after step {step + 1} of {settings.steps}")
        return rollouts.model, rollouts.tokenizer, critic.model
