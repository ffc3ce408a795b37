"""Draws tokens from logits. The caller gives the random numbers, so that a token does not depend on its batch."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, position: int, count: int) -> np.ndarray:
    """Returns float64 [count], uniform in [0, 1). Entry i depends only on ``seed`` and ``position`` + i."""
    bits = np.random.Philox(key=seed % 2**64)
    bits.advance(position // 4)  # one counter step gives four numbers
    return np.random.Generator(bits).random(position % 4 + count)[position % 4 :]


def draw(logits: Tensor, noise: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Draws the next token of n rows. Returns the tokens' ids, int64 [n], and log-probabilities, float32 [n].

    ``logits`` are float32 [n, vocab]. ``noise``, float64 [n] in [0, 1), picks a token from each row's cumulative
    distribution. ``temperatures`` are floats [n]. At temperature 0 the likeliest token is taken, with its
    log-probability at temperature 1. No value is read back from the device, so a CUDA graph can record this."""
    greedy = temperatures == 0
    probabilities = torch.softmax(logits / torch.where(greedy, 1.0, temperatures).to(logits.dtype)[:, None], -1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), ids)
    return ids[:, 0], probabilities.gather(-1, ids)[:, 0].log()


def draw_steps(
    step: Callable[[Tensor, Tensor, int], Tensor],
    ids: Tensor,
    positions: Tensor,
    noise: Tensor,
    temperatures: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Draws the next k tokens of n rows, one decoding step after the other. ``step`` is a decoder's method, and
    ``ids``, ``positions`` and ``longest`` are its first arguments. ``noise`` is float64 [n, k]. Returns ids (int64) and
    log-probabilities (float32), both [n, k]."""
    found = []
    for column in range(noise.shape[1]):
        ids, logprobs = draw(step(ids, positions + column, longest + column), noise[:, column], temperatures)
        found.append((ids, logprobs))
    drawn, logprobs_of = zip(*found, strict=True)
    return torch.stack(drawn, 1), torch.stack(logprobs_of, 1)
