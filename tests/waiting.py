"""Waits for conditions in tests, and detects that an engine asks for the timing lease."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from cuda_agent.lease import Lease

T = TypeVar("T")


def wait_for(what: str, seconds: float, look: Callable[[], T]) -> T:
    """Calls ``look`` until its result is true, and returns it.  Fails after ``seconds``; ``what`` is in the message."""
    end = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < end, f"gave up waiting: {what}"
        time.sleep(0.2)
    return seen


class AskedLease(Lease):
    """A handle of the timing lease (the machine-wide lock around timed kernels). It sets ``asked`` when its owner
    begins to wait in ``working``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked = threading.Event()

    def working(self) -> AbstractContextManager[None]:
        self.asked.set()
        return super().working()
