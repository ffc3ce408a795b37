"""The comparison of outputs, tried with mutants of right answers."""

import numpy
import pytest

from cuda_agent.sandbox.judge.memory.check import agree, mismatch
from cuda_agent.sandbox.wire import Tensor

FLOAT = Tensor((64,), "float32")


def wrong(want: numpy.ndarray, have: numpy.ndarray, dtype: str = "float32") -> str:
    message = mismatch([want], [have], [Tensor(want.shape, dtype)], 1e-2)[0]
    assert agree([want], [have], [Tensor(want.shape, dtype)], 1e-2) == (not message)
    return message


def test_rounding_passes_and_the_largest_difference_is_told() -> None:
    want = numpy.linspace(-3, 3, 64, dtype=numpy.float32)
    message, error = mismatch([want], [want + numpy.float32(1e-4)], [FLOAT], 1e-2)
    assert message == "" and 0.9e-4 < error < 1.1e-4


@pytest.mark.parametrize("scale", [1.0, 1e-3, 4e-6, 1e4])
def test_zeros_never_stand_for_values_however_small(scale: float) -> None:
    want = (numpy.arange(64, dtype=numpy.float32) + 1) * numpy.float32(scale)
    assert "64 of 64 values" in wrong(want, numpy.zeros_like(want))


def test_one_wrong_value_at_the_end_is_found_and_named() -> None:
    want = numpy.ones(3_000_000, numpy.float32)
    have = want.copy()
    have[-1] = 2
    assert wrong(want, have) == (
        "output 0[3000000]: 1 of 3000000 values are off by more than the tolerance 0.01, "
        "first at 2999999: 2 instead of 1"
    )


def test_nan_is_no_wildcard_and_infinities_must_agree() -> None:
    want = numpy.ones(8, numpy.float32)
    special = want.copy()
    for value in (numpy.nan, numpy.inf):
        special[3] = value
        assert wrong(want, special) and wrong(special, want)
        assert wrong(special, special.copy()) == ""
    negative = special.copy()
    negative[3] = -numpy.inf
    assert wrong(special, negative)


def test_integers_and_booleans_are_equal_or_wrong() -> None:
    want = numpy.arange(8)
    assert wrong(want, want.copy(), "int64") == ""
    assert "first at 7: 8 instead of 7" in wrong(want, numpy.append(want[:-1], 8), "int64")
    assert wrong(numpy.array([0, 1], "u1"), numpy.array([0, 0x61], "u1"), "bool")


def test_bfloat16_is_compared_as_the_number_it_is() -> None:
    one, close, two = numpy.array([0x3F80], "u2"), numpy.array([0x3F81], "u2"), numpy.array([0x4000], "u2")
    assert wrong(one, close, "bfloat16") == ""
    assert wrong(one, two, "bfloat16").endswith("2 instead of 1")


def test_nothing_to_compare_is_right() -> None:
    assert wrong(numpy.empty(0, numpy.float32), numpy.empty(0, numpy.float32)) == ""


def test_a_complex_number_without_dimensions_is_compared_as_two_numbers() -> None:
    one, other = numpy.array(1 + 2j, numpy.complex64), numpy.array(1 + 3j, numpy.complex64)
    assert wrong(one, one, "complex64") == "" and wrong(one, other, "complex64")
