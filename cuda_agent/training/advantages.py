"""Advantages of sampled tokens: generalised advantage estimation, its lambdas, and whitening.

The reward comes once, on the last sampled token of a sequence.  Prompt and tool tokens are no steps of the decision
process: the estimator carries over them.  Pure functions on tensors; knows nothing of models or rows.
"""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: Tensor | float) -> Tensor:
    """Generalised advantage estimation over the tokens where ``mask`` is true.

    rewards, values float [sequences, length]; mask bool [sequences, length]; lam a number or float [sequences].
    Returns float [sequences, length], zero where the mask is false.  After the last sampled token the value is 0.
    At a masked-out token the next value and the running sum pass through unchanged, as if it were not there.
    """
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
    """rewards float [sequences], mask bool [sequences, length] -> float [sequences, length]: each sequence's reward on
    its last sampled token, zero elsewhere (everywhere, where nothing was sampled)."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return rewards[:, None] * last


def adaptive_lambda(counts: Tensor, alpha: float = 0.05) -> Tensor:
    """Length-adaptive lambda 1 - 1/(alpha n) of sequences with n sampled tokens, at least 0 (VAPO, arXiv 2504.05118):
    the longer the sequence, the further a terminal reward reaches back.  counts [sequences] -> float [sequences]."""
    return (1 - 1 / (alpha * counts.clamp(min=1))).clamp(min=0.0)


def whiten(advantages: Tensor, epsilon: float = 1e-6) -> Tensor:
    """float [sampled tokens of the whole batch] -> the same with mean 0 and (biased) standard deviation 1.

    A batch whose advantages are all equal teaches nothing and becomes zeros; in single precision the rounding of the
    mean would become the advantage."""
    wide = advantages.double()
    centred = wide - wide.mean()
    return (centred / (centred.square().mean().sqrt() + epsilon)).to(advantages.dtype)


def explained_variance(values: Tensor, targets: Tensor) -> float:
    """1 - Var(targets - values) / Var(targets): 1 is perfect, 0 no better than a constant.  0 where targets do not
    vary."""
    spread = targets.var(correction=0)
    return 0.0 if spread == 0 else float(1 - (targets - values).var(correction=0) / spread)
