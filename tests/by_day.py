"""Divides the cases of a long parametrized test between ``make test`` and ``make test-drills``."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(count: int, cases: Iterable[Any]) -> list[Any]:
    """Returns ``cases`` for ``pytest.mark.parametrize``: each ``count``-th runs in ``make test``, the others are
    drills."""
    marks = pytest.mark.nightly
    return [case if number % count == 0 else pytest.param(case, marks=marks) for number, case in enumerate(cases)]
