"""Makes mutants, which are wrong answers to a task, made on purpose. ``judge.mutants`` chooses them, and tests whether
the judge's comparison rejects them. This module runs in the reference worker, the only process that has the task's
model."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from cuda_agent.sandbox.worker.values.weights import PlainWeights


def spoil(how: dict[str, Any], right: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns wrong outputs, made from the right outputs ``right`` and the inputs ``given``. ``how["kind"]`` selects
    one of these changes:

    - ``zeros`` replaces all values by zeros.
    - ``constant`` fills each output with its mean.
    - ``scale`` multiplies floating outputs by ``how["factor"]``.
    - ``copy`` replaces each output by the input ``given[how["input"]]`` if both have the same number of values."""
    match how["kind"]:
        case "zeros":
            return [torch.zeros_like(tensor) for tensor in right]
        case "constant":
            return [_mean(tensor).to(tensor.dtype).expand(tensor.shape) for tensor in right]
        case "scale":
            return [tensor * how["factor"] if _is_floating(tensor) else tensor for tensor in right]
        case "copy":
            source = given[how["input"]]
            return [source.reshape(tensor.shape) if source.numel() == tensor.numel() else tensor for tensor in right]
    raise ValueError(f"no mutant {how}")


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    if _is_floating(tensor):
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64)).mean()
    return tensor.double().mean().round()


def redraw(model: torch.nn.Module, build: Callable[[], torch.nn.Module], how: dict[str, Any]) -> torch.nn.Module | None:
    """Returns a second model, which ``build`` makes under the random seed ``how["seed"]``. If ``how["plain"]`` is true,
    also redraws the second model's plain weights, which its constructor does not draw at random (see ``PlainWeights``).
    Returns ``None`` if the model has no parameters and its buffers equal those of the second model."""
    torch.manual_seed(how["seed"])
    other = build()
    if how["plain"]:
        PlainWeights(other).draw(how["seed"])
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
    return None if same and not any(True for _ in model.parameters()) else other


def in_bfloat16(model: torch.nn.Module, given: list[torch.Tensor]) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Returns a copy of the model and the inputs ``given``, both in bfloat16. Integer and boolean inputs do not
    change."""
    return copy.deepcopy(model).bfloat16(), [t.bfloat16() if t.is_floating_point() else t for t in given]
