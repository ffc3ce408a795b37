"""Locks in the store that keep a garbage collection away from results while runs take them into use.

For a few seconds a run holds a lock: while it finds an old result and records that it uses it, or records a result of
its own.  A collection waits until no run holds one, and removes objects only while it holds a lock itself.  A process
writes its own lock before it looks for locks of the other kind, so of two that begin together at least one sees the
other."""

import contextlib
import time
import uuid
from collections.abc import Iterator

from cuda_agent.errors import TryAgain
from cuda_agent.storage import Store

COLLECTION_SECONDS = 3600  # the process that took an older lock of a collection was killed
USE_SECONDS = 900  # the same of a run's lock
WAIT_SECONDS = 900.0  # longest wait of one for the other


@contextlib.contextmanager
def using(store: Store, patience: float = WAIT_SECONDS) -> Iterator[None]:
    """Keeps collections away during the ``with`` block.  Waits while one removes objects, at most ``patience`` seconds.

    Raises:
        TryAgain: The collection took longer."""
    mine, deadline = f"locks/use-{uuid.uuid4().hex}", time.monotonic() + patience
    while True:
        store.put(mine, b"")
        if not _held(store, "gc", COLLECTION_SECONDS):
            break
        store.delete(mine)
        if time.monotonic() > deadline:
            raise TryAgain("`cuda-agent gc` is under way on this store.")
        time.sleep(1.0)
    try:
        yield
    finally:
        store.delete(mine)


@contextlib.contextmanager
def collecting(store: Store, patience: float = WAIT_SECONDS) -> Iterator[str]:
    """Keeps runs from taking results into use during the ``with`` block.  Yields an empty text, or why the block must
    remove nothing: another collection is under way, or a run holds a lock for longer than ``patience`` seconds."""
    mine, deadline = f"locks/gc-{uuid.uuid4().hex}", time.monotonic() + patience
    store.put(mine, b"")
    try:
        busy = ""
        if _held(store, "gc", COLLECTION_SECONDS) - {mine}:
            busy = "Another collection is under way."
        while not busy and _held(store, "use", USE_SECONDS):
            if time.monotonic() > deadline:
                busy = "A run has been storing results for a while."
            time.sleep(1.0)
        if not busy:
            for stale in set(store.list("locks")) - {mine}:  # of processes that were killed
                store.delete(stale)
        yield busy
    finally:
        store.delete(mine)


def _held(store: Store, kind: str, seconds: float) -> set[str]:
    """Returns the locks of this kind that are younger than ``seconds``."""
    locks = store.sizes("locks").items()
    return {key for key, (_, since) in locks if key.startswith(f"locks/{kind}-") and time.time() - since < seconds}
