"""Provides buffers and comparisons on the CPU; ``device`` provides the same functions for the GPU."""

import numpy

from cuda_agent.sandbox.judge.memory.buffers import Array, Buffers
from cuda_agent.sandbox.judge.memory.check import agree, mismatch, real, same, values_off
from cuda_agent.sandbox.wire import Tensor

__all__ = [
    "Buffers",
    "agree",
    "distance",
    "flush",
    "free_bytes",
    "healthy",
    "mismatch",
    "policy_bytes",
    "pool_bytes",
    "prepared_bytes",
    "same",
    "slots",
    "trim",
    "values_off",
]


def slots(size: int) -> int:
    """Returns the number of slots of a worker's buffers, for a task whose inputs and outputs take ``size`` bytes. A
    slot holds the inputs and outputs of one call."""
    return 3 if size <= 64 << 20 else 2


def pool_bytes() -> int:
    """Returns the most bytes that one task's pool of inputs and expected outputs may take."""
    return 48 << 20


def prepared_bytes() -> int:
    """Returns the most bytes that all prepared tasks (the tasks that the judge keeps ready) may hold together. On the
    CPU there is no common limit, because each worker has its own limit. The result is 2**62, which is never reached."""
    return 1 << 62


def policy_bytes() -> int:
    """Returns the bytes that the judge leaves free for a policy (a language model) on the same device. On the CPU it
    reserves nothing and returns 0."""
    return 0


def free_bytes() -> int:
    """Returns 2**62, which is more than any task needs. ``device.free_bytes`` returns the free bytes of a GPU. On the
    CPU each worker has its own memory limit, so the free memory is not measured."""
    return 1 << 62


def trim() -> None:
    """Does nothing. ``device.trim`` releases unused memory; NumPy already frees memory that no array uses."""


def flush() -> None:
    """Does nothing. ``device.flush`` flushes a GPU's L2 cache before a call. On the CPU, filling and comparing buffers
    already evicts older data from the caches."""


def distance(have: Array, exact: Array, tensor: Tensor) -> tuple[float, float]:
    """Returns sum((have - exact) ** 2) and sum(exact ** 2) for floating dtypes, else zeros. ``exact`` is in float64."""
    if not tensor.dtype.startswith(("float", "bfloat")):
        return 0.0, 0.0
    off = real(have, tensor.dtype).astype(numpy.float64).ravel() - exact.ravel()
    return float(numpy.dot(off, off)), float(numpy.dot(exact.ravel(), exact.ravel()))


def healthy() -> bool:
    """Returns whether a comparison of two arrays with known contents gives the expected result."""
    ones, tensors = numpy.ones(1024, numpy.float32), [Tensor((1024,), "float32")]
    return not mismatch([ones], [ones], tensors, 0.1)[0] and bool(mismatch([ones], [2 * ones], tensors, 0.1)[0])
