"""Draws new values for a model's plain weights, so that a solution cannot ignore them. The model's constructor does not
draw plain weights at random but fills them with a constant, or with zeros and a constant.

LayerNorm's weight, for example, starts with 1 and its bias with 0. With these values, a solution that ignores both
gives right outputs. Weights that the constructor draws at random keep their values, because these follow from a secret
seed. The reference worker (the process that runs the task's model) uses this module. A candidate worker (the process
that runs a solution) uses it if the solution's weights and the weights of the task's model have different names."""

import hashlib
from collections import Counter

import torch

_SAMPLE = 4096  # values that decide for most weights that they are random


class PlainWeights:
    """The plain weights of a model: floating-point weights that hold one value, or zeros and one other value.

    A buffer, or a frozen parameter, is plain only if all its values are 0 or all are 1, as in running statistics. Other
    buffers, such as masks and tables of positions, are part of the architecture."""

    def __init__(self, model: torch.nn.Module) -> None:
        found = {
            id(tensor): tensor
            for tensor in torch.nn.Module.state_dict(model, keep_vars=True).values()
            if _is_plain(tensor)
        }
        self._tensors = [tensor.detach() for tensor in found.values()]
        self._originals = [tensor.clone() for tensor in self._tensors]
        self.addresses = {tensor.data_ptr() for tensor in self._tensors}

    def draw(self, seed: int | None) -> None:
        """Draws new values for all plain weights. A new value is the constructor's value times a number from 0.5 to
        1.5. A tensor of zeros gets values from -0.5 to 0.5. The new values follow from ``seed`` and from the tensors'
        shapes, old values and order; names do not matter. If ``seed`` is ``None``, restores the constructor's
        values."""
        places: Counter[str] = Counter()
        for tensor, original in zip(self._tensors, self._originals, strict=True):
            if seed is None:
                tensor.copy_(original)
                continue
            largest = float(original.flatten()[original.abs().argmax()])
            form = f"{largest} {list(original.shape)}"
            places[form] += 1
            digest = hashlib.sha256(f"{seed} {form} {places[form]}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            noise = torch.rand(original.shape, generator=generator).to(original.device)
            tensor.copy_(original * (noise + 0.5) if largest else noise - 0.5)


def _is_plain(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
        return False
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout != torch.strided:
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return False  # one value in memory, shown many times: it cannot be written
    values = tensor.detach().flatten()
    for part in (values[:_SAMPLE], values):
        largest = part[part.abs().argmax()]
        if not bool(torch.isfinite(largest)) or not bool(((part == 0) | (part == largest)).all()):
            return False
    trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    return trained or any(bool((values == constant).all()) for constant in (0, 1))
