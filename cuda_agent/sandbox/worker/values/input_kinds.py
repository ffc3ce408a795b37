"""Varies the inputs that a task draws, to catch kernels that are correct only for typical values.

Each kind of variation keeps some properties of the drawn values. Non-negative values remain non-negative, because the
task may take their logarithm or root. Values in [0, 1] remain there, because they may be probabilities. Integers
(indices, labels) and booleans do not change."""

import torch


def vary(tensors: list[torch.Tensor], kind: str) -> list[torch.Tensor] | None:
    """Varies the values of ``tensors``. Returns tensors with the same shapes and dtypes. ``kind`` is one of
    ``wire.KINDS``, such as ``negative`` or ``sparse``. The kind ``normal`` changes nothing. Tensors to which the kind
    does not apply stay as they are. Returns ``None`` if the kind applies to no tensor."""
    if kind == "normal":
        return tensors
    varied = [_vary(tensor, kind) for tensor in tensors]
    if all(new is None for new in varied):
        return None
    return [old if new is None else new.to(old.dtype) for old, new in zip(tensors, varied, strict=True)]


def _vary(tensor: torch.Tensor, kind: str) -> torch.Tensor | None:
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return None
    values = tensor.float() if tensor.dtype != torch.float64 else tensor
    low, high = float(values.min()), float(values.max())
    positive, unit = low >= 0, low >= 0 and high <= 1
    resting = low if low > 0 else 0.0  # zero, or the least value if all drawn values are positive
    match kind:
        case "shifted":
            return 0.5 + 0.5 * values if unit else values + 3 * float(values.std())
        case "ramp":
            return torch.linspace(low, high, tensor.numel(), device=tensor.device).view(tensor.shape)
        case "negative":
            return None if positive else -values.abs()
        case "large":
            return None if unit else 30 * values
        case "sparse":
            return torch.where(torch.rand_like(values) < 0.05, values, resting)
        case "boundary":
            edge = torch.full_like(values, resting)
            edge.view(-1)[-1] = high
            return edge
    raise ValueError(f"there is no kind {kind!r}")
