"""Waits until a condition is true."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: str, seconds: float, look: Callable[[], T]) -> T:
    """Calls ``look`` until its result is true, and returns it.  Fails after ``seconds``; ``what`` is in the message."""
    end = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < end, f"gave up waiting: {what}"
        time.sleep(0.2)
    return seen
