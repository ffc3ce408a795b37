"""Computes losses over sampled tokens, and the log-probabilities that the losses need.

A minibatch consists of packed rows, which hold one or more sequences each. A loss function takes flat tensors (one
entry per sampled token of one row) and ``total``, the number of sampled tokens of the whole minibatch. It returns the
row's share of the minibatch's mean loss; the shares of all rows add up to the mean. Most metrics are such shares of a
mean too. Metrics with names ``*_max`` are maxima over the row. ``added`` combines the metrics of several rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Metrics = dict[str, Tensor]


def added(known: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    """Returns a new dict: each metric in ``more`` plus the metric with the same name in ``known``, or 0 if there is
    none. For names ``*_max``, takes the maximum instead of the sum. Leaves out metrics that only ``known`` has."""
    return {
        name: max(known.get(name, 0.0), value) if name.endswith("_max") else known.get(name, 0.0) + value
        for name, value in more.items()
    }


def token_logprobs(
    states: Tensor, ids: Tensor, project: Callable[[Tensor], Tensor], chunk: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the tokens ``ids``, int64 [n], and the entropies of the predicted distributions.
    Both are float32 [n], in nats, at ``temperature``. The entropies have no gradient.

    ``states``, float [n, hidden], are the hidden states that predict these tokens. ``project`` maps m states to logits
    [m, vocabulary]. At most ``chunk`` rows of logits exist at a time. If there are several chunks, the backward pass
    recomputes their logits."""

    def one(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = project(states).float()
        logprobs = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, ids[:, None])[:, 0], entropy

    parts = list(zip(states.split(chunk), ids.split(chunk), strict=True))
    if len(parts) == 1 or not torch.is_grad_enabled():
        done = [one(*part) for part in parts]
    else:
        done = [checkpoint(one, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat([logprobs for logprobs, _ in done]), torch.cat([entropy for _, entropy in done])


def sft_loss(logprobs: Tensor, total: int) -> Tensor:
    """Returns one packed row's share (a scalar) of the mean negative log-likelihood of a batch's ``total`` tokens.
    ``logprobs``, float32 [n], are the log-probabilities of the row's tokens."""
    return -logprobs.sum() / total


def ppo_loss(
    logprobs: Tensor,
    old: Tensor,
    engine: Tensor,
    advantages: Tensor,
    total: int,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
    dual_clip: float | None = None,
    shares: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Returns one packed row's share of the minibatch's clipped PPO loss (a scalar), and the row's metrics. The loss is
    that of arXiv 1707.06347, with an asymmetric clipping range (CUDA Agent paper, section 3.3).

    The inference engine that sampled the tokens computes slightly different probabilities than the trainer. Truncated
    importance sampling corrects for this: each token is weighted by min(exp(``old`` - ``engine``), ``tis_cap``),
    without gradient.

    Args:
        logprobs: float32 [n], log-probabilities under the current policy, with gradient.
        old: float32 [n], log-probabilities under the old policy, for the ratio exp(``logprobs`` - ``old``). They come
            from the engine, or from the trainer before its first step on the batch.
        engine: float32 [n], log-probabilities under the engine.
        advantages: float32 [n].
        total: Number of sampled tokens of the minibatch.
        clip_low, clip_high: The ratio is clipped to the range from 1 - ``clip_low`` to 1 + ``clip_high``.
        tis_cap: Largest importance weight.
        dual_clip: Limit of the ratio of tokens with negative advantages (arXiv 1912.09729), or None for no limit.
        shares: float32 [n], weights of the tokens in the minibatch's loss, by default 1 / ``total``. The weights do
            not affect the metrics."""
    ratio = (logprobs - old).clamp(-20, 20).exp()  # a token that became e^20 times likelier must not overflow
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, surrogate.maximum(dual_clip * advantages), surrogate)
    weight = (old - engine).exp().clamp(max=tis_cap).detach()
    loss = -(weight * surrogate).sum() / total if shares is None else -(weight * surrogate * shares).sum()
    with torch.no_grad():
        drift = (logprobs - engine).clamp(-20, 20)
        metrics = {
            "ratio_mean": ratio.sum() / total,
            "ratio_max": ratio.max() if len(ratio) else ratio.new_zeros(()),
            "clip_low": ((ratio < 1 - clip_low) & (advantages < 0)).sum() / total,
            "clip_high": ((ratio > 1 + clip_high) & (advantages > 0)).sum() / total,
            "kl": (drift.exp() - 1 - drift).sum() / total,  # KL from the engine's policy to the trainer's, k3 estimator
            "train_inference_mismatch": drift.abs().sum() / total,
            "importance_mean": weight.sum() / total,
        }
    return loss, metrics


def value_loss(
    values: Tensor, targets: Tensor, total: int, old: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Returns one packed row's share (a scalar) of half the mean squared error between ``values`` (with gradient) and
    ``targets``. With ``clip`` (as in PPO), each token contributes the larger of two errors: that of its value, and that
    of its value clipped to ``old`` ± ``clip``. ``old`` are the values before the update. All tensors are float32 [n].
    Raises ``ValueError`` if ``clip`` is given without ``old``."""
    error = (values - targets).square()
    if clip is not None:
        if old is None:
            raise ValueError("value clipping needs the old values")
        held = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (held - targets).square())
    return 0.5 * error.sum() / total
