"""The three things a trainer is used for, each written down once: imitation, value pretraining, PPO with a critic.

They take sequences or episodes and settings and return metrics; where data comes from, when to checkpoint and when to
stop is the caller's.  Those that are ``over_ranks`` run on all ranks of a trainer alike.  Learning rates follow
``learning_rate``; whatever is random follows from (seed, epoch or step).
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from cuda_agent.config import Ppo
from cuda_agent.policy.episode import Episode
from cuda_agent.training.advantages import adaptive_lambda, explained_variance, gae, terminal_rewards, whiten
from cuda_agent.training.distributed import over_ranks
from cuda_agent.training.losses import Metrics, ppo_loss, sft_loss, value_loss
from cuda_agent.training.packing import Batch, PackedRow, Tokens, batch_of, split_evenly, tokens_of_episode, trainable
from cuda_agent.training.trainer import Trainer

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(
    fraction: float, peak: float, schedule: Schedule = "linear", warmup: float = 0.02, floor: float = 0.0
) -> float:
    """The rate after ``fraction`` (0 to 1) of the training: a linear rise during ``warmup``, then down to
    ``floor * peak`` at the end (not for ``constant``)."""
    if fraction < warmup:
        return peak * max(fraction / warmup, 0.01)
    left = 1 - min(1.0, (fraction - warmup) / (1 - warmup))
    shape = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2, "constant": 1.0}[schedule]
    return peak * (floor + (1 - floor) * shape)


def sft_batches(lengths: Sequence[int], tokens_per_step: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the sequences of each optimizer step of an epoch: shuffled, at most ``tokens_per_step`` tokens in all
    (a longer sequence is a batch of its own)."""
    order = _shuffled(len(lengths), seed, epoch)
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if lengths[index] > room or not batches:
            batches.append([])
            room = tokens_per_step
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def sft(
    trainer: Trainer,
    sequences: Sequence[Tokens],
    *,
    tokens_per_step: int,
    lr: float,
    seed: int,
    steps: int | None = None,
    epochs: int | None = None,
    max_seconds: float | None = None,
    schedule: Schedule = "linear",
    warmup: float = 0.02,
) -> Iterator[dict[str, float]]:
    """Imitates the masked tokens of ``sequences``; yields the metrics of each optimizer step, after it.

    Ends at whichever limit comes first (give one of ``steps`` and ``epochs``; ``max_seconds`` counts
    ``trainer.seconds``) and schedules the rate by the share of it that is used up.  A restored trainer goes on at its
    step: the batches before it are skipped.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("give either steps or epochs")
    if not sequences:
        raise ValueError("no sequences to imitate")
    lengths = [len(sequence) for sequence in sequences]
    batches = islice(_endless(lengths, tokens_per_step, seed, epochs), steps)
    total = steps if steps is not None else sum(1 for _ in _endless(lengths, tokens_per_step, seed, epochs))
    for chosen in islice(batches, trainer.step, None):
        start = time.monotonic()
        fraction = max((trainer.step + 1) / (total + 1), trainer.seconds / max_seconds if max_seconds else 0.0)
        if fraction >= 1:
            return
        batch = batch_of(sequences[index] for index in chosen)
        rate = learning_rate(fraction, lr, schedule, warmup)
        metrics = sft_step(trainer, batch, rate)
        elapsed = time.monotonic() - start
        trainer.seconds += elapsed
        tokens = sum(lengths[index] for index in chosen)
        yield metrics | {"lr": rate, "progress": fraction, "tokens": tokens, "tokens_per_second": tokens / elapsed}


def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def _endless(lengths: Sequence[int], tokens_per_step: int, seed: int, epochs: int | None) -> Iterator[list[int]]:
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from sft_batches(lengths, tokens_per_step, seed, epoch)
        epoch += 1


@over_ranks
def sft_step(trainer: Trainer, batch: Batch, lr: float) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of a batch's masked tokens."""

    def loss_of(row: PackedRow) -> tuple[Tensor, Metrics]:
        logprobs, entropy = trainer.logprobs(row)
        return sft_loss(logprobs, len(batch)), {"entropy": entropy.sum() / len(batch)}

    return trainer.update(batch, None, lr, loss_of)


@over_ranks
def sft_loss_of(trainer: Trainer, sequences: Sequence[Tokens]) -> float:
    """Mean negative log-likelihood of sequences that are not trained on."""
    return -float(trainer.flat(batch_of(sequences), lambda row: trainer.logprobs(row)[0]).mean())


@over_ranks
def value_epoch(
    critic: Trainer,
    episodes: Sequence[Episode],
    *,
    lr: float,
    tokens_per_step: int,
    gae_lambda: float,
    seed: int,
    epoch: int,
) -> dict[str, float]:
    """One pass of value pretraining on episodes with a reward (the others are dropped), gamma 1.

    With ``gae_lambda`` below 1 the targets, V + advantage, come from the critic as it is when the epoch begins; with 1
    they are the episodes' rewards.  The explained variance returned is that of the predictions before each step.
    """
    start = time.monotonic()
    batch = batch_of(tokens_of_episode(episode) for episode in trainable(episodes))
    goals = targets(batch, None if gae_lambda == 1 else critic.flat(batch, critic.values), 1.0, gae_lambda)
    seen = torch.zeros(len(batch))
    losses = []
    lengths = [len(sequence) for sequence in batch.sequences]
    for chosen in sft_batches(lengths, tokens_per_step, seed, epoch):
        loss = _value_step(critic, batch, chosen, goals, lr, seen)["loss"]
        losses.append(loss)
    seen = critic.summed(seen)
    elapsed = time.monotonic() - start
    critic.seconds += elapsed
    return {
        "value_loss": sum(losses) / len(losses),
        "explained_variance": explained_variance(seen, _returns(batch)),
        "steps": len(losses),
        "tokens_per_second": sum(lengths) / elapsed,
    }


@over_ranks
def value_quality(critic: Trainer, episodes: Sequence[Episode]) -> dict[str, float]:
    """Explained variance and loss against the rewards of episodes that are not trained on (with a reward)."""
    batch = batch_of(tokens_of_episode(episode) for episode in trainable(episodes))
    values, returns = critic.flat(batch, critic.values), _returns(batch)
    return {
        "explained_variance": explained_variance(values, returns),
        "value_loss": float(value_loss(values, returns, len(batch))),
    }


@over_ranks
def ppo_update(
    actor: Trainer,
    critic: Trainer,
    episodes: Sequence[Episode],
    settings: Ppo,
    *,
    seed: int,
    train_actor: bool = True,
    temperature: float = 1.0,
) -> dict[str, float]:
    """One PPO batch: advantages from the critic as it is, then ``epochs`` passes in ``minibatches`` optimizer steps,
    critic before actor.  Episodes without a reward, and those in which nothing was sampled, are dropped; when none is
    left nothing is trained.  ``temperature`` is the one the episodes were sampled at."""
    start = time.monotonic()
    kept = trainable(episodes)
    summary = episode_metrics(episodes)
    if not kept:
        return summary
    batch = batch_of(tokens_of_episode(episode) for episode in kept)
    values = critic.flat(batch, critic.values)
    counts = torch.tensor(batch.counts)
    lam = adaptive_lambda(counts) if settings.actor_lambda is None else settings.actor_lambda
    advantages = whiten(advantages_of(batch, values, settings.gamma, lam))
    goals = targets(batch, values, settings.gamma, settings.critic_lambda)
    old = batch.logprobs
    if settings.behavior_logprobs == "trainer" and train_actor:
        old = actor.flat(batch, lambda row: actor.logprobs(row, temperature)[0])

    seen = torch.zeros(len(batch))
    critic_steps, actor_steps = [], []
    for epoch in range(settings.epochs):
        for chosen in split_evenly(_shuffled(len(kept), seed, epoch), settings.minibatches):
            critic_steps.append(
                _value_step(critic, batch, chosen, goals, settings.critic_lr, seen, values, settings.value_clip)
            )
            if train_actor:
                actor_steps.append(_actor_step(actor, batch, chosen, old, advantages, settings, temperature))

    elapsed = time.monotonic() - start
    actor.seconds += elapsed
    passes = settings.epochs * sum(len(sequence) for sequence in batch.sequences)
    return (
        summary
        | _merged(actor_steps)
        | {f"critic_{name}": value for name, value in _merged(critic_steps).items()}
        | ({"train_inference_mismatch": actor_steps[0]["train_inference_mismatch"]} if actor_steps else {})
        | {
            "explained_variance": explained_variance(values, _returns(batch, settings.gamma)),
            "value_mean": float(values.mean()),
            "train_seconds": elapsed,
            "tokens_per_second": passes / elapsed,
        }
    )


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What a batch of episodes says before anything is learnt from it.  Rates are over the episodes with a reward."""
    kept = trainable(episodes)
    metrics = {"episodes": float(len(kept)), "dropped": float(len(episodes) - len(kept))}
    if not kept:
        return metrics
    rewards = [float(episode.reward or 0.0) for episode in kept]

    def share(hits: Sequence[bool]) -> float:
        return sum(hits) / len(kept)

    return metrics | {
        "reward": sum(rewards) / len(kept),
        "pass_rate": share([(episode.verdict or {}).get("status") == "ok" for episode in kept]),
        "faster_than_eager": share([reward >= 2 for reward in rewards]),
        "faster_than_compile": share([reward >= 3 for reward in rewards]),
        "response_length": sum(sum(episode.mask) for episode in kept) / len(kept),
        "cut_short": share([episode.ended in ("turns", "tokens") for episode in kept]),
    }


def advantages_of(batch: Batch, values: Tensor, gamma: float, lam: Tensor | float) -> Tensor:
    """Flat advantages of a batch from flat values of the states before its sampled tokens."""
    padded, mask = batch.padded(values)
    return gae(terminal_rewards(batch.rewards, mask), padded, mask, gamma, lam)[mask]


def targets(batch: Batch, values: Tensor | None, gamma: float, lam: float) -> Tensor:
    """Flat value targets, V + advantage; ``values`` may be None when ``lam`` is 1, where they cancel out."""
    known = torch.zeros(len(batch)) if values is None or lam == 1 else values
    return known + advantages_of(batch, known, gamma, lam)


def _returns(batch: Batch, gamma: float = 1.0) -> Tensor:
    return targets(batch, None, gamma, 1.0)


def _value_step(
    critic: Trainer,
    batch: Batch,
    chosen: Sequence[int],
    goals: Tensor,
    lr: float,
    seen: Tensor,
    old: Tensor | None = None,
    clip: float | None = None,
) -> dict[str, float]:
    """One critic step on the chosen sequences; writes the predictions before it into ``seen`` (flat)."""
    total = sum(batch.counts[index] for index in chosen)

    def loss_of(row: PackedRow) -> tuple[Tensor, Metrics]:
        values = critic.values(row)
        own = row.tokens.cpu()
        seen[own] = values.detach().cpu()
        before = None if old is None else old[own].to(values.device)
        return value_loss(values, goals[own].to(values.device), total, before, clip), {}

    return critic.update(batch, chosen, lr, loss_of)


def _actor_step(
    actor: Trainer,
    batch: Batch,
    chosen: Sequence[int],
    old: Tensor,
    advantages: Tensor,
    settings: Ppo,
    temperature: float,
) -> dict[str, float]:
    """One policy step on the chosen sequences, averaged over all their sampled tokens."""
    total = sum(batch.counts[index] for index in chosen)

    def loss_of(row: PackedRow) -> tuple[Tensor, Metrics]:
        logprobs, entropy = actor.logprobs(row, temperature)
        own = row.tokens.cpu()
        before, engine, gain = (flat[own].to(logprobs.device) for flat in (old, batch.logprobs, advantages))
        loss, metrics = ppo_loss(
            logprobs, before, engine, gain, total, settings.clip_low, settings.clip_high, settings.tis_cap
        )
        return loss, metrics | {"entropy": entropy.sum() / total}

    return actor.update(batch, chosen, settings.actor_lr, loss_of)


def _merged(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps; the largest of what is named ``*_max``."""
    if not steps:
        return {}
    return {
        name: max(step[name] for step in steps)
        if name.endswith("_max")
        else sum(step[name] for step in steps) / len(steps)
        for name in steps[0]
    }
