"""Compares a candidate's outputs with the reference's outputs, in pure functions on NumPy arrays.

The tolerance has an absolute and a relative part, as in ``torch.allclose``. In ``torch.allclose`` the absolute part is
a constant. Here it shrinks with the typical magnitude of the expected values, so that zeros do not pass where values of
about 1e-6 are expected. Integers and booleans must be equal. Shapes and dtypes need no check, because the task's spec
determines them."""

from collections.abc import Sequence

import numpy

from cuda_agent.sandbox.judge.memory.buffers import Array
from cuda_agent.sandbox.wire import Tensor

_CHUNK = 1 << 16  # values compared at a time: they fit into a CPU's cache


def mismatch(
    expected: Sequence[Array], actual: Sequence[Array], tensors: Sequence[Tensor], tolerance: float, cap: float = 1.0
) -> tuple[str, float]:
    """Compares the outputs ``actual`` with ``expected``. ``tensors`` holds their shapes and dtypes.

    A floating value may differ by ``tolerance * (magnitude + scale)``. ``magnitude`` is the absolute expected value.
    ``scale`` is the root mean square of the output's expected values, at most ``cap``. Integers and booleans must be
    equal. Infinite and NaN values must be the same in both.

    Returns:
        A message about the first output that differs (empty if all agree), and the largest absolute difference of
        finite values. The comparison ends with the first output that differs."""
    largest = 0.0
    for index, (want, have, tensor) in enumerate(zip(expected, actual, tensors, strict=True)):
        wanted, given = (real(values, tensor.dtype).ravel() for values in (want, have))
        message, difference, _ = _compare(wanted, given, tolerance, cap)
        largest = max(largest, difference)
        if message:
            return f"output {index}{list(tensor.shape)}: {message}", largest
    return "", largest


def agree(expected: Sequence[Array], actual: Sequence[Array], tensors: Sequence[Tensor], tolerance: float) -> bool:
    """Returns whether ``mismatch`` finds no difference. Stops soon after the first difference."""
    for want, have, tensor in zip(expected, actual, tensors, strict=True):
        wanted, given = (real(values, tensor.dtype).ravel() for values in (want, have))
        if _compare(wanted, given, tolerance, cap=1.0, whole=False)[2]:
            return False
    return True


def values_off(
    expected: Sequence[Array], actual: Sequence[Array], tensors: Sequence[Tensor], tolerance: float, cap: float = 1.0
) -> int:
    """Returns how many values of ``actual`` differ from ``expected`` by more than ``mismatch`` allows."""
    count = 0
    for want, have, tensor in zip(expected, actual, tensors, strict=True):
        count += _compare(real(want, tensor.dtype).ravel(), real(have, tensor.dtype).ravel(), tolerance, cap)[2]
    return count


def real(values: Array, dtype: str) -> Array:
    """Returns ``values`` as real numbers: raw bits of bfloat16 become float32, and a complex number becomes two
    numbers. Other values stay as they are."""
    if dtype == "bfloat16":
        return (values.astype(numpy.uint32) << 16).view(numpy.float32)
    if dtype in ("complex64", "complex128"):
        return numpy.atleast_1d(values).view(values.real.dtype)
    return values


def _compare(want: Array, have: Array, tolerance: float, cap: float, whole: bool = True) -> tuple[str, float, int]:
    """Compares one output, as flat arrays of real numbers, by the rule of ``mismatch``. Returns a message (empty if
    they agree), the largest absolute difference of finite values, and the number of wrong values. If ``whole`` is
    false, stops soon after the first wrong floating value. The difference and number then cover only the values so
    far."""
    if want.dtype.kind in "iu":
        wrong = numpy.flatnonzero(want != have)
        if not wrong.size:
            return "", 0.0, 0
        first = int(wrong[0])
        difference = float(numpy.abs(want[wrong].astype(numpy.float64) - have[wrong].astype(numpy.float64)).max())
        values = f"first at {first}: {have[first]} instead of {want[first]}"
        return f"{wrong.size} of {want.size} values differ, {values}", difference, wrong.size
    wide = numpy.float32 if want.dtype.itemsize <= 4 else numpy.float64
    with numpy.errstate(all="ignore"):
        scale = min(cap, _typical(want))
        largest, wrong_count, first_wrong = 0.0, 0, -1
        for start in range(0, want.size, _CHUNK):
            w = want[start : start + _CHUNK].astype(wide, copy=False)
            h = have[start : start + _CHUNK].astype(wide, copy=False)
            off: Array = numpy.subtract(w, h)
            numpy.abs(off, out=off)
            most = float(off.max(initial=0))
            if most <= tolerance * scale:  # the usual case: every value is within the tolerance and finite
                largest = max(largest, most)
                continue
            good = numpy.isfinite(off) & (off <= tolerance * scale + tolerance * numpy.abs(w))
            if not good.all():
                special = ~numpy.isfinite(w) | ~numpy.isfinite(h)
                good = numpy.where(special, (w == h) | (numpy.isnan(w) & numpy.isnan(h)), good)
                off = numpy.where(special, 0, off)
                bad = numpy.flatnonzero(~good)
                if bad.size and first_wrong < 0:
                    first_wrong = start + int(bad[0])
                wrong_count += bad.size
                if wrong_count and not whole:
                    break
            largest = max(largest, float(off.max(initial=0, where=numpy.isfinite(off))))
    if not wrong_count:
        return "", largest, 0
    values = f"first at {first_wrong}: {have[first_wrong]:.6g} instead of {want[first_wrong]:.6g}"
    message = f"{wrong_count} of {want.size} values are off by more than the tolerance {tolerance:g}, {values}"
    return message, largest, wrong_count


def _typical(want: Array) -> float:
    """Returns the root mean square of the finite values in ``want``; 1 if no value is finite."""
    squares, count = 0.0, 0
    for start in range(0, want.size, _CHUNK):
        part = want[start : start + _CHUNK]
        finite = numpy.isfinite(part)
        part = part.astype(numpy.float64) if finite.all() else part[finite].astype(numpy.float64)
        squares += float(numpy.dot(part, part))
        count += part.size
    return float(numpy.sqrt(squares / count)) if count else 1.0


def same(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Returns whether two lists of arrays are equal bit for bit."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
