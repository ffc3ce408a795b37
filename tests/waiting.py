"""Waiting for something to become true."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, seconds: float, look: Callable[[], T]) -> T:
    """The first true answer."""
    end = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < end, f"gave up waiting: {what}"
        time.sleep(0.2)
    return seen
