"""The machine-wide timing lease: whoever times a kernel has the processor to himself.

A kernel that takes 1.12 ms on an idle machine takes 1.75 ms beside a matmul, so decoding and training (``working``)
pause while a time is taken (``timing``).  Two advisory file locks make it work across processes and keep the
timer from starving: a timer first closes the gate, through which every worker must pass before its next step.
What it does not cover: other programs of the machine.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lease:
    """``folder`` is shared by all processes of the machine that must not disturb each other.  One instance may be used
    by one thread at a time; each thread makes its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._gate = os.open(folder / "lease.gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = os.open(folder / "lease.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._lock)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Held for one step of decoding or training (milliseconds to a second), shared with other workers."""
        with _held(self._gate, fcntl.LOCK_SH):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Held while a time is taken, alone."""
        with _held(self._gate, fcntl.LOCK_EX), _held(self._lock, fcntl.LOCK_EX):
            yield


@contextmanager
def _held(descriptor: int, kind: int) -> Iterator[None]:
    fcntl.flock(descriptor, kind)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
