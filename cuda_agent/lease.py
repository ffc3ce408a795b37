"""The timing lease: while one process of this machine times a kernel, no other process uses the device.

The lease is needed because a kernel that takes 1.12 ms on an idle machine takes 1.75 ms beside a matrix multiplication.
The lease consists of two file locks.  ``Lease.working`` holds the first lock shared, during a step of decoding or
training or during other work on the device.  ``Lease.timing`` holds the first lock exclusively, while a kernel is
timed.  The second lock is a gate: each step locks it shared for a moment before the step begins.  To time a kernel, a
process first locks the gate exclusively, so that no new step can delay the timing."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lease:
    """One thread's handle of the timing lease.  While one process times a kernel, the lease keeps all other processes
    off the device.  All processes that take part must use the same ``folder``.  Contexts of the same handle can be
    nested: ``working`` inside ``working`` or ``timing`` does nothing, and ``timing`` inside ``timing`` does nothing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._held = ""  # the context that holds the lease: working, timing or none
        self._folder = folder
        self._gate = os.open(folder / "lease.gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = os.open(folder / "lease.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._lock)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Holds the lease in shared mode during the ``with`` block.  Meanwhile other processes may work, too, but none
        can time a kernel.  The block is usually one step of decoding or training (about a second)."""
        if self._held:
            yield
            return
        with _locked(self._gate, fcntl.LOCK_SH):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._held = "working"
        try:
            yield
        finally:
            self._held = ""
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def wanted(self) -> bool:
        """Whether another process waits to time a kernel, or times one.  Must not be used inside ``timing``."""
        assert self._held != "timing"
        try:
            fcntl.flock(self._gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        return False

    def pause(self) -> None:
        """Releases the lease for a moment inside ``working``, so that waiting processes can time a kernel."""
        assert self._held == "working"
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        with _locked(self._gate, fcntl.LOCK_SH):
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    @contextmanager
    def lent(self) -> Iterator[int]:
        """Yields a file descriptor that holds the lease in shared mode.  The lease is released when all copies of the
        descriptor are closed.  A process that is started inside the context can inherit a copy.  Then the lease lasts
        until that process ends, even after the context.  This handle must not hold the lease already."""
        assert not self._held
        with open(self._folder / "lease.lock") as lock:
            with _locked(self._gate, fcntl.LOCK_SH):
                fcntl.flock(lock, fcntl.LOCK_SH)
            yield lock.fileno()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Holds the lease exclusively during the ``with`` block, in which a kernel is timed.

        Raises:
            RuntimeError: This handle is inside ``working``.  Two processes that time a kernel inside ``working``
                would wait for each other forever."""
        if self._held == "working":
            raise RuntimeError("a timing may not begin inside work that holds the timing lease")
        if self._held:
            yield
            return
        with _locked(self._gate, fcntl.LOCK_EX), _locked(self._lock, fcntl.LOCK_EX):
            self._held = "timing"
            try:
                yield
            finally:
                self._held = ""


@contextmanager
def _locked(descriptor: int, kind: int) -> Iterator[None]:
    fcntl.flock(descriptor, kind)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
