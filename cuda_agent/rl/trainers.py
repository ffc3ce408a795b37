"""Makes trainers from the configuration, and trains a policy by imitation. Imports neither the sandbox nor Ray."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from cuda_agent.config import Bootstrap, Sft
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.errors import BadConfiguration, TryAgain
from cuda_agent.lease import Lease
from cuda_agent.machine import gpus
from cuda_agent.policy.lora import attach
from cuda_agent.spans import span
from cuda_agent.training.critic import Critic
from cuda_agent.training.distributed import DistributedTrainer, TrainerLost
from cuda_agent.training.memory import PRECISION, Shape, layout, shape_of
from cuda_agent.training.packing import Tokens
from cuda_agent.training.ranks import Ranks
from cuda_agent.training.recipes import sft
from cuda_agent.training.trainer import Trainer

COST = 0.05  # imitation saves a checkpoint when saving takes at most this share of the time since the last save


def make_trainer(
    ctx: WorkerContext,
    model: Any,
    *,
    longest: int,
    max_grad_norm: float = 1.0,
    precision: Literal["auto"] | None = None,
    scratch: bool = False,
) -> Trainer:
    """Makes a trainer for ``model``: in this process on ``training.device``, or on the trainer processes ``ctx.ranks``
    if these are given.

    ``longest`` is the length of the longest sequence in tokens. ``precision`` is None or "auto". With None, the trainer
    computes in the precision that ``policy.dtype`` names. With "auto", it computes in bfloat16 if the device supports
    this. Only imitation may use "auto". PPO compares the trainer's log-probabilities with those of the engine that
    sampled the tokens, so the two must be close.

    ``scratch`` marks a model that is trained from scratch. Such a model is trained with Muon, which needs half as many
    tokens as AdamW. Other models are trained with AdamW, and get LoRA adapters if ``lora.rank`` is set.

    Raises:
        BadConfiguration: ``training.device`` is cuda, and this machine has no GPU.
        PolicyError: A name in ``lora.targets`` matches no linear layer of the model."""
    import torch

    config, training = ctx.config, ctx.config.training
    torch.set_num_threads(config.policy.threads)
    trunk = model.trunk if isinstance(model, Critic) else model
    if not scratch and (lora := config.lora).rank:
        attach(trunk, lora.rank, lora.alpha, lora.targets, config.seed)
    rows = layout(config, _shape(trunk), longest, scratch=scratch)
    options: dict[str, Any] = {
        "row_tokens": rows.row_tokens,
        "max_grad_norm": max_grad_norm,
        "weight_decay": 0.1 if scratch else 0.0,
        "optimizer": "muon" if scratch else "adamw",
        "precision": precision or PRECISION[config.policy.dtype],
        "gradient_checkpointing": rows.recompute,
        "compile": training.compile,
    }
    if ctx.ranks is not None:
        name = "critic" if isinstance(model, Critic) else "policy"
        options["parallelism"] = training.parallelism
        return cast(Trainer, DistributedTrainer(ctx.ranks, name, model, **options))
    require_gpus(training.device, 1)
    return Trainer(model, device=training.device, lease=Lease(ctx.cache / "lease"), **options)


def _shape(model: Any) -> Shape | None:
    try:
        return shape_of(model.config.get_text_config().to_dict())
    except (KeyError, TypeError):  # a size is missing
        return None


def require_gpus(device: str, count: int) -> None:
    """Raises BadConfiguration if ``device`` is cuda and this machine has fewer than ``count`` GPUs."""
    if device == "cuda" and (here := gpus()) < count:
        raise BadConfiguration(f"training.device is cuda: expected at least {count} GPUs, and this machine has {here}")


Place = TypeVar("Place", bound=WorkerContext)


@contextmanager
def shared_training(ctx: Place) -> Iterator[Place]:
    """Starts ``training.num_processes`` trainer processes (ranks). Yields a copy of ``ctx`` with these ranks. If
    ``training.num_processes`` is 1, starts no process and yields ``ctx`` itself: the stage's process trains.

    Raises:
        BadConfiguration: The machine has too few GPUs.
        TryAgain: A rank died."""
    settings, threads = ctx.config.training, ctx.config.policy.threads
    require_gpus(settings.device, settings.num_processes)
    if settings.num_processes == 1:
        yield ctx
        return
    each = max(1, threads // settings.num_processes)
    with Ranks(settings.num_processes, device=settings.device, threads=each, lease=ctx.cache / "lease") as ranks:
        try:
            yield replace(ctx, ranks=ranks)
        except TrainerLost as error:
            raise TryAgain(str(error)) from error


@span("imitate")
def imitate(
    ctx: StageContext, trainer: Trainer, sequences: Sequence[Tokens], settings: Bootstrap | Sft, **limits: Any
) -> None:
    """Trains ``trainer`` by imitation (supervised training) on ``sequences``. Continues at the newest checkpoint, if
    there is one. Logs metrics, shows progress and saves checkpoints. ``limits`` are further arguments of
    ``training.recipes.sft``, such as ``epochs``. Raises TryAgain when the stage is told to stop."""
    tokens, lr = settings.tokens_per_step, settings.lr
    ctx.checkpoints.load(trainer.load)
    saved = time.monotonic()
    cost = 0.0
    for metrics in sft(trainer, sequences, tokens_per_step=tokens, lr=lr, seed=ctx.config.seed, **limits):
        fraction = metrics.pop("progress")
        if metrics.get("skipped"):
            ctx.tracker.note(f"{ctx.name}: updates were left out, because their gradients were not finite")
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
