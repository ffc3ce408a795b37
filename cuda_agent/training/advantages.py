"""Computes the advantages of sampled tokens with the estimators in the table ``ADVANTAGES``.

A sequence gets one reward, on its last sampled token (CUDA Agent paper, Eq. 1). The other tokens, from prompts and
tool outputs, get no advantages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """The input of an estimator: the data of a batch of sequences."""

    rewards: Tensor  # float [sequences], each for a whole sequence
    mask: Tensor  # bool [sequences, length], true at sampled tokens
    groups: Tensor  # int64 [sequences], equal within a group (``policy.episode.group_of``)
    values: Tensor | None  # float [sequences, length], the critic's; None without a critic
    gamma: float  # discount per sampled token
    lam: float  # GAE's lambda


@dataclass(frozen=True)
class Estimator:
    """An estimator of advantages, as listed in ``ADVANTAGES``. ``estimate`` returns the advantages of all sampled
    tokens in one tensor, float [sampled tokens], sequence after sequence. ``critic`` is true if the estimator needs the
    values of a critic. If it is false, ``estimate`` ignores the values in its input, and no critic is trained."""

    estimate: Callable[[AdvantageInputs], Tensor]
    critic: bool


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Returns generalised advantages (GAE, arXiv 1506.02438) of the tokens where ``mask`` is true, and zeros elsewhere.

    ``rewards`` (of each token), ``values`` (of the state before each token), ``mask`` and the result are
    [sequences, length]. Tokens where ``mask`` is false are skipped. The value after the last sampled token is 0."""
    next_value = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for step in reversed(range(values.shape[1])):
        here, value = mask[:, step], values[:, step]
        delta = rewards[:, step] + gamma * next_value - value
        running = torch.where(here, delta + gamma * lam * running, running)
        next_value = torch.where(here, value, next_value)
        advantages[:, step] = torch.where(here, running, 0.0)
    return advantages


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Returns float [sequences, length]: each sequence's reward at its last sampled token, and zeros elsewhere.
    ``rewards`` are float [sequences]; ``mask``, bool [sequences, length], is true at sampled tokens."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return rewards[:, None] * last


def whiten(advantages: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Returns a batch's advantages, float [sampled tokens], shifted and scaled to mean 0 and (biased) standard
    deviation 1. If all advantages are equal, the result is 0. To this end the mean is computed in double precision:
    otherwise its rounding error would be divided by a standard deviation near 0."""
    wide = advantages.double()
    centred = wide - wide.mean()
    return (centred / (centred.square().mean().sqrt() + epsilon)).to(advantages.dtype)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """Returns 1 - Var(targets - values) / Var(targets) of two float tensors [n]: 1 for perfect values, 0 for a constant
    value, and 0 if the targets do not vary."""
    spread = targets.var(correction=0)
    return 0.0 if spread == 0 else float(1 - (targets - values).var(correction=0) / spread)


def group(rewards: Tensor, groups: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Returns the rewards, normalised within each group, as in GRPO (arXiv 2402.03300): (reward - mean of the group) /
    (biased standard deviation of the group + epsilon). In a group of one, the result is 0. ``rewards`` (float),
    ``groups`` (int64, equal within a group) and the result are [sequences]."""
    centred, sizes = _centred(rewards, groups)
    spread = (_group_sums(centred.square(), groups) / sizes).sqrt()
    return (centred / (spread + epsilon)).to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Returns each reward minus the mean of the other rewards in the same group: REINFORCE leave-one-out (arXiv
    2402.14740). In a group of one, the result is 0. The mean, which is the baseline of a sequence, does not depend on
    that sequence, so the gradient estimate is unbiased. ``rewards`` (float), ``groups`` (int64, equal within a group)
    and the result are [sequences]."""
    centred, sizes = _centred(rewards, groups)
    return (centred * sizes / (sizes - 1).clamp(min=1)).to(rewards.dtype)


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    wide = rewards.double()
    sizes = _group_sums(torch.ones_like(wide), groups)
    return wide - _group_sums(wide, groups) / sizes, sizes


def _group_sums(numbers: Tensor, groups: Tensor) -> Tensor:
    _, members = groups.unique(return_inverse=True)
    return torch.zeros_like(numbers).index_add(0, members, numbers)[members]


def _on_all_tokens(of_groups: Callable[[Tensor, Tensor], Tensor], given: AdvantageInputs) -> Tensor:
    """Computes one advantage per sequence with ``of_groups`` (``group`` or ``rloo``), and repeats it for each sampled
    token of the sequence. Returns float [sampled tokens]."""
    return of_groups(given.rewards, given.groups)[:, None].expand(given.mask.shape)[given.mask]


def _whitened_gae(inputs: AdvantageInputs) -> Tensor:
    if inputs.values is None:
        raise ValueError("advantage=gae needs the values of a critic")
    rewards = terminal_rewards(inputs.rewards, inputs.mask)
    return whiten(gae(rewards, inputs.values, inputs.mask, inputs.gamma, inputs.lam)[inputs.mask])


ADVANTAGES = {
    "gae": Estimator(_whitened_gae, critic=True),  # PPO (paper, section 3.3)
    "group": Estimator(partial(_on_all_tokens, group), critic=False),
    "rloo": Estimator(partial(_on_all_tokens, rloo), critic=False),
}
