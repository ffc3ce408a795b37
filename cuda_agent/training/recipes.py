"""Defines the training algorithms (recipes): imitation, value pretraining and policy optimization with PPO's loss.

The caller provides the data and saves checkpoints. Recipes with the decorator ``over_ranks`` can run on all processes
(ranks) of a trainer. The random orders of sequences depend only on the seed and the number of the epoch."""

import time
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice

import torch
from torch import Tensor

from cuda_agent.config import CriticConfig, Ppo
from cuda_agent.policy.episode import Episode
from cuda_agent.training.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    explained_variance,
    gae,
    terminal_rewards,
)
from cuda_agent.training.distributed import over_ranks
from cuda_agent.training.losses import Metrics, added, ppo_loss, sft_loss, value_loss
from cuda_agent.training.packing import Batch, PackedRow, Tokens, batch_of, split_evenly, tokens_of_episode, trainable
from cuda_agent.training.trainer import Trainer

WARMUP = 0.02  # fraction of the training during which the learning rate rises


def learning_rate(fraction: float, peak: float) -> float:
    """Returns the learning rate after ``fraction`` (0 to 1) of the training. The rate rises linearly to ``peak`` during
    the first part of the training (the fraction ``WARMUP``), then falls linearly to 0."""
    if fraction < WARMUP:
        return peak * max(fraction / WARMUP, 0.01)
    return peak * (1 - min(1.0, (fraction - WARMUP) / (1 - WARMUP)))


def sft_batches(lengths: Sequence[int], tokens_per_step: int, seed: int, epoch: int) -> list[list[int]]:
    """Splits an epoch into optimizer steps of at most ``tokens_per_step`` tokens. A longer sequence is alone in a step.
    Returns the indices of the sequences in each step. ``seed`` and ``epoch`` decide the order of the sequences."""
    batches: list[list[int]] = []
    room = 0
    for index in _shuffled(len(lengths), seed, epoch):
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
) -> Iterator[dict[str, float]]:
    """Trains on the tokens of ``sequences`` whose mask is true (supervised fine-tuning; CUDA Agent paper, section 3.3,
    stage 2). Yields the metrics of each optimizer step.

    The length of the training is given by either ``steps`` or ``epochs``. The training also ends when
    ``trainer.seconds`` reaches ``max_seconds``. ``sft_batches`` divides an epoch into steps, in an order that depends
    on ``seed``. A trainer that was restored from a checkpoint continues after its last step.

    The learning rate peaks at ``lr`` and depends on the progress of the training (``learning_rate``). Progress is the
    fraction of the steps or the fraction of ``max_seconds``, whichever is larger.

    Raises ``ValueError`` if both or neither of ``steps`` and ``epochs`` are given, or if there are no sequences."""
    if (steps is None) == (epochs is None):
        raise ValueError("give either steps or epochs")
    if not sequences:
        raise ValueError("no sequences to imitate")
    lengths = [len(sequence) for sequence in sequences]
    batches = islice(_endless(lengths, tokens_per_step, seed, epochs), steps)
    total = steps if steps is not None else sum(1 for _ in _endless(lengths, tokens_per_step, seed, epochs))
    for chosen in islice(batches, trainer.step, None):
        fraction = max((trainer.step + 1) / (total + 1), trainer.seconds / max_seconds if max_seconds else 0.0)
        if fraction >= 1:
            return
        batch = batch_of(sequences[index] for index in chosen)
        rate = learning_rate(fraction, lr)
        began = time.monotonic()
        metrics = sft_step(trainer, batch, rate)
        tokens, elapsed = sum(lengths[index] for index in chosen), time.monotonic() - began
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
    """Takes one optimizer step on the negative log-likelihood of a batch. Adds the step's time to ``trainer.seconds``,
    unless ``torch.compile`` compiled something during the step."""
    start, graphs = time.monotonic(), trainer.graphs

    def loss_of(row: PackedRow) -> tuple[Tensor, Metrics]:
        logprobs, entropy = trainer.logprobs(row)
        return sft_loss(logprobs, len(batch)), {"entropy": entropy.sum() / len(batch)}

    metrics = trainer.update(batch, None, lr, loss_of)
    if trainer.graphs == graphs:
        trainer.seconds += time.monotonic() - start
    return metrics


@over_ranks
def sft_loss_of(trainer: Trainer, sequences: Sequence[Tokens]) -> float:
    """Returns the mean negative log-likelihood of ``sequences``, in nats per token, without training on them."""
    return -float(trainer.flat(batch_of(sequences), lambda row: trainer.logprobs(row)[0]).mean())


@over_ranks
def value_epoch(
    critic: Trainer, episodes: Sequence[Episode], settings: CriticConfig, *, seed: int, epoch: int
) -> dict[str, float]:
    """Runs one epoch of value pretraining (CUDA Agent paper, section 3.3, stage 3), with gamma 1, on the ``episodes``
    that have a reward and sampled tokens. Each step has at most ``settings.tokens_per_step`` tokens; a longer episode
    is alone in a step. ``seed`` and ``epoch`` decide the order of the episodes.

    If ``settings.gae_lambda`` is 1, the targets are the episodes' rewards. If it is below 1, the target of a token is
    its value plus its advantage, both from the critic as it is when the epoch begins. Returns metrics.
    ``explained_variance`` compares the rewards with the values that the critic predicted before each update."""
    start = time.monotonic()
    batch = batch_of(tokens_of_episode(episode) for episode in trainable(episodes))
    lam = settings.gae_lambda
    goals = targets(batch, None if lam == 1 else critic.flat(batch, critic.values), 1.0, lam)
    seen = torch.zeros(len(batch))
    lengths = [len(sequence) for sequence in batch.sequences]
    batches = sft_batches(lengths, settings.tokens_per_step, seed, epoch)
    losses = [_value_step(critic, batch, chosen, goals, settings.lr, seen)["loss"] for chosen in batches]
    seen = critic.summed(seen)
    elapsed = time.monotonic() - start
    return {
        "value_loss": sum(losses) / len(losses),
        "explained_variance": explained_variance(seen, _returns(batch)),
        "steps": len(losses),
        "tokens_per_second": sum(lengths) / elapsed,
    }


@over_ranks
def value_quality(critic: Trainer, episodes: Sequence[Episode]) -> dict[str, float]:
    """Compares the critic's values with the rewards of held-out episodes. Returns the metrics ``explained_variance``
    and ``value_loss``."""
    batch = batch_of(tokens_of_episode(episode) for episode in trainable(episodes))
    values, returns = critic.flat(batch, critic.values), _returns(batch)
    return {
        "explained_variance": explained_variance(values, returns),
        "value_loss": float(value_loss(values, returns, len(batch))),
    }


@over_ranks
def ppo_update(
    actor: Trainer,
    critic: Trainer | None,
    episodes: Sequence[Episode],
    settings: Ppo,
    *,
    seed: int,
    train_actor: bool = True,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Trains the policy (``actor``) and the critic on ``episodes``. If ``train_actor`` is false, trains only the
    critic.

    Estimates the advantages once. Then passes over the episodes ``settings.epochs`` times, in ``settings.minibatches``
    steps each (CUDA Agent paper, section 3.3). Each step updates the critic before the actor. Drops episodes without a
    reward or without sampled tokens; if none is left, trains nothing.

    ``episodes`` must consist of whole groups. A group is all samples for one draw of a task
    (``policy.episode.group_of``). ``seed`` decides how episodes are shuffled into minibatches. ``temperature`` is the
    temperature at which the episodes were sampled.

    Returns metrics of the episodes and of the training. Training metrics are means over the steps, or maxima if their
    names end with ``_max``. An exception is ``train_inference_mismatch``: its value is that of the first step, before
    the weights change. Names of the critic's metrics begin with ``critic_``. Raises ``ValueError`` if the estimator
    ``settings.advantage`` needs a critic and there is none."""
    start = time.monotonic()
    kept = trainable(episodes)
    summary = episode_metrics(episodes)
    if not kept:
        return summary
    batch = batch_of(tokens_of_episode(episode) for episode in kept)
    values = None if critic is None else critic.flat(batch, critic.values)
    advantages, goals = estimate(batch, values, settings)
    old = batch.logprobs
    if settings.behavior_logprobs == "trainer" and train_actor:
        old = actor.flat(batch, lambda row: actor.logprobs(row, temperature)[0])
    seen = torch.zeros(len(batch))
    critic_steps, actor_steps = [], []
    for epoch in range(settings.epochs):
        for chosen in split_evenly(_shuffled(len(batch.sequences), seed, epoch), settings.minibatches):
            if critic is not None and goals is not None:
                rate, clip = settings.critic_lr, settings.value_clip
                critic_steps.append(_value_step(critic, batch, chosen, goals, rate, seen, values, clip))
            if train_actor:
                actor_steps.append(actor_step(actor, batch, chosen, old, advantages, settings, temperature))
    learnt = _merged(actor_steps) | {f"critic_{name}": value for name, value in _merged(critic_steps).items()}
    if actor_steps:
        learnt["train_inference_mismatch"] = actor_steps[0]["train_inference_mismatch"]
    if values is not None:
        learnt["explained_variance"] = explained_variance(values, _returns(batch, settings.gamma))
        learnt["value_mean"] = float(values.mean())
    elapsed = time.monotonic() - start
    passes = settings.epochs * sum(len(sequence) for sequence in batch.sequences)
    return summary | learnt | {"train_seconds": elapsed, "tokens_per_second": passes / elapsed}


def estimate(batch: Batch, values: Tensor | None, settings: Ppo) -> tuple[Tensor, Tensor | None]:
    """Returns the advantages of ``batch`` and the critic's targets, both float32 [sampled tokens].
    ``settings.advantage`` names the estimator of advantages. ``values`` are the critic's values, float32 [sampled
    tokens]; if they are None, the targets are None. Raises ``ValueError`` if the estimator needs ``values`` and they
    are None.

    The batch must consist of whole groups. A group is all samples for one draw of a task
    (``policy.episode.group_of``)."""
    padded, mask = batch.padded(torch.zeros(len(batch)) if values is None else values)
    known = None if values is None else padded
    inputs = AdvantageInputs(batch.rewards, mask, batch.groups, known, settings.gamma, settings.actor_lambda)
    goals = None if values is None else targets(batch, values, settings.gamma, settings.critic_lambda)
    return ADVANTAGES[settings.advantage].estimate(inputs), goals


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns metrics of ``episodes``. ``dropped`` is the number of episodes without a reward or without sampled
    tokens; all other metrics refer to the remaining episodes.

    ``faster_than_eager`` and ``faster_than_compile`` are the shares of episodes whose verdict (the judge's result) has
    a reward of at least 2 and of at least 3, respectively. This is the reward of Eq. 1 of the CUDA Agent paper, even if
    training uses another reward (``policy.reward``). ``judge_<phase>_seconds`` is the mean time that the judge spent in
    a phase, over the final verdicts that did not come from its cache."""
    kept = trainable(episodes)
    metrics = {"episodes": float(len(kept)), "dropped": float(len(episodes) - len(kept))}
    if not kept:
        return metrics
    rewards = [float(episode.reward or 0.0) for episode in kept]
    verdicts = [episode.verdict or {} for episode in kept]
    grades = [verdict.get("reward") or -1 for verdict in verdicts]

    def share(hits: Sequence[bool]) -> float:
        return sum(hits) / len(kept)

    judged = [verdict.get("phases") or {} for verdict in verdicts if verdict and not verdict.get("cached")]
    phases = sorted(set().union(*judged))
    metrics |= {f"judge_{name}_seconds": sum(one.get(name, 0.0) for one in judged) / len(judged) for name in phases}
    return metrics | {
        "reward": sum(rewards) / len(kept),
        "pass_rate": share([verdict.get("status") == "ok" for verdict in verdicts]),
        "faster_than_eager": share([grade >= 2 for grade in grades]),
        "faster_than_compile": share([grade >= 3 for grade in grades]),
        "response_length": sum(sum(episode.mask) for episode in kept) / len(kept),
        "cut_short": share([episode.ended in ("turns", "tokens") for episode in kept]),
    }


def targets(batch: Batch, values: Tensor | None, gamma: float, lam: float) -> Tensor:
    """Returns the critic's targets for a batch, float32 [sampled tokens]. A token's target is its value plus its
    advantage by GAE. ``values`` are the critic's values, float32 [sampled tokens]. If ``lam`` is 1, the values cancel
    out, and ``values`` may be None."""
    known = torch.zeros(len(batch)) if values is None or lam == 1 else values
    padded, mask = batch.padded(known)
    return known + gae(terminal_rewards(batch.rewards, mask), padded, mask, gamma, lam)[mask]


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
    """Takes one critic step towards the targets ``goals`` on the ``chosen`` sequences. Writes the critic's predictions
    before the step into ``seen``. If ``clip`` is given, the loss also uses the values clipped to ``old`` ± ``clip``
    (``value_loss``). ``old`` are the critic's values before the first step. ``goals``, ``seen`` and ``old`` are flat
    tensors of the batch (one entry per sampled token)."""
    total = sum(batch.counts[index] for index in chosen)

    def loss_of(row: PackedRow) -> tuple[Tensor, Metrics]:
        values = critic.values(row)
        own = row.tokens.cpu()
        seen[own] = values.detach().cpu()
        before = None if old is None else old[own].to(values.device)
        return value_loss(values, goals[own].to(values.device), total, before, clip), {}

    return critic.update(batch, chosen, lr, loss_of)


def actor_step(
    actor: Trainer, batch: Batch, chosen: list[int], old: Tensor, advantages: Tensor, settings: Ppo, temperature: float
) -> dict[str, float]:
    """Takes one step of the policy on the ``chosen`` sequences. ``old`` (the log-probabilities in the denominator of
    PPO's ratio) and ``advantages`` are flat tensors of the batch, with one entry per sampled token. In the first
    ``settings.lr_rise`` steps of ``actor``, the learning rate rises linearly, because AdamW's first steps are large and
    mostly noise. Returns the loss, the mean entropy, and the metrics of ``ppo_loss`` and ``Trainer.update``."""
    total = sum(batch.counts[index] for index in chosen)
    counts = torch.tensor(batch.counts)
    shares = (1.0 / (len(chosen) * counts)).repeat_interleave(counts)  # of tokens in the mean of trajectories' means

    def loss_of(row: PackedRow) -> tuple[Tensor, Metrics]:
        logprobs, entropy = actor.logprobs(row, temperature)
        own = row.tokens.cpu()
        flats = (old, batch.logprobs, advantages, shares)
        before, engine, gain, share = (flat[own].to(logprobs.device) for flat in flats)
        limits = settings.clip_low, settings.clip_high, settings.tis_cap, settings.dual_clip
        weights = share if settings.loss_mean == "trajectory" else None
        loss, metrics = ppo_loss(logprobs, before, engine, gain, total, *limits, weights)
        return loss, metrics | {"entropy": entropy.sum() / total}

    risen = min(1.0, (actor.step + 1) / settings.lr_rise) if settings.lr_rise else 1.0
    return actor.update(batch, chosen, risen * settings.actor_lr, loss_of)


def _merged(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = reduce(added, steps, {})
    return {name: value if name.endswith("_max") else value / len(steps) for name, value in total.items()}
