"""Memory and comparisons on the CPU: what ``device`` is on the GPU."""

import secrets
from collections.abc import Sequence

import numpy

from cuda_agent.sandbox.buffers import Array, Buffers, can_roll
from cuda_agent.sandbox.check import mismatch, real, same
from cuda_agent.sandbox.wire import Tensor

__all__ = ["Array", "Buffers", "can_roll", "constant", "flush", "mismatch", "rolled", "same"]


def flush() -> None:
    """Nothing: the judge's own filling and comparing leave little of a call in a processor's caches."""


def constant(values: Array, tensor: Tensor) -> bool:
    """One value only (outputs of one number are not judged by this), or nothing finite."""
    flat = real(values, tensor.dtype).ravel()
    if flat.dtype.kind == "f" and flat.size and not numpy.isfinite(flat).any():
        return True
    return flat.size > 1 and bool((flat == flat[0]).all())


def rolled(inputs: Sequence[Array], tensors: Sequence[Tensor]) -> list[Array]:
    """The same values in other places: fresh contents from the same domain, without an oracle."""
    fresh = []
    for values, tensor in zip(inputs, tensors, strict=True):
        axis = next((i for i, extent in enumerate(values.shape) if extent > 1), None)
        if axis is None or not tensor.dtype.startswith(("float", "bfloat")):
            fresh.append(values)
            continue
        fresh.append(numpy.roll(values, 1 + secrets.randbelow(values.shape[axis] - 1), axis))
    return fresh
