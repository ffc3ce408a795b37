"""Defines Muon in float32, for processors without bfloat16 instructions.

``torch.optim.Muon`` makes the update of each matrix orthogonal in bfloat16. Such a processor computes that twenty times
as slowly as in float32, so that it takes most of a step of a small model."""

import math
from typing import Any

import torch
from torch import Tensor


class FloatMuon(torch.optim.Muon):
    """Muon as ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, but it makes updates orthogonal in the
    dtype of the parameters. Its state is that of ``torch.optim.Muon``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient. ``closure`` is not called."""
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonal(parameter.grad.lerp(mean, momentum), group["ns_coefficients"], group["ns_steps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Returns a matrix with the singular vectors of ``matrix`` [rows, columns] and singular values near 1 (about 0.7 to
    1.2), by the quintic Newton-Schulz iteration of Muon. ``coefficients`` are those of X, XXᵀX and (XXᵀ)²X."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
