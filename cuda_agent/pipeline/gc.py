"""Garbage collection of the store: removes old runs, and the artifacts and checkpoints that only old runs need.

A pipeline is a series of runs whose configurations have the same value of ``run.pipeline``.  The newest runs of each
pipeline are kept.  With them are kept the artifacts that their manifests (records of finished stages) name, the cache
entries of their results, and the checkpoints of their unfinished stages.  No object younger than an hour is removed.

Garbage collection and runs exclude each other.  On one machine a file lock ensures this.  On a cluster, garbage
collection takes a lock in the store with ``alone``, then checks that no run is active.  A new run waits until the lock
is gone."""

import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cuda_agent.pipeline.manifest import Manifest, config_entry
from cuda_agent.pipeline.runs import Run, list_runs
from cuda_agent.storage import Store, StoreDamaged

YOUNG = 3600.0  # seconds
LOCK_SECONDS = 3600  # the process that took an older lock was killed
KEEP = 10  # newest runs of each pipeline
_ORDER = ("cache", "runs", "sweeps", "checkpoints", "configs", "cas")  # the order of removal


@dataclass
class Plan:
    """The runs and the store's objects that a garbage collection removes."""

    runs: list[str] = field(default_factory=list)  # names of the runs
    keys: dict[str, int] = field(default_factory=dict)  # key of an object -> its size in bytes

    @property
    def size(self) -> int:
        return sum(self.keys.values())

    def to_json(self) -> dict[str, Any]:
        return {"runs": self.runs, "objects": len(self.keys), "bytes": self.size}


def plan(store: Store, keep: int = KEEP) -> Plan:
    """Returns the runs and objects to remove from ``store`` so that the newest ``keep`` runs of each pipeline remain.
    A pipeline is a series of runs with the same value of ``run.pipeline``."""
    by_pipeline: dict[str, list[Run]] = defaultdict(list)
    for run in list_runs(store):
        by_pipeline[run.pipeline].append(run)
    gone = [run.name for group in by_pipeline.values() for run in group[: max(0, len(group) - keep)]]
    kept = [run for group in by_pipeline.values() for run in group if run.name not in gone]
    needed = {config_entry(run.config) for run in kept}
    finished: set[str] = set()  # stage/key of results that kept runs use
    began: set[str] = set()  # stage/key of stages that kept runs began
    for run in kept:
        for key in store.list(f"runs/{run.name}"):
            needed.add(key)
            if key.endswith("/manifest.json"):
                manifest = Manifest.from_bytes(store.get(key))
                finished.add(f"{manifest.stage}/{manifest.key}")
                needed |= {f"cas/{manifest.code}", f"cas/{manifest.environment}"}
                for digest in [*manifest.inputs.values(), *manifest.outputs.values(), manifest.metrics]:
                    needed |= _folder_keys(store, digest)
            elif key.endswith("/key"):
                began.add(f"{key.split('/')[2]}/{store.get(key).decode()}")
    needed |= {f"cache/{result}.json" for result in finished}
    needed_folders = {f"sweeps/{run.sweep}" for run in kept} | {f"checkpoints/{begun}" for begun in began - finished}
    old = time.time() - YOUNG
    result = Plan(runs=gone)
    for prefix in _ORDER:
        for key, (size, changed) in store.sizes(prefix).items():
            folders = {"/".join(key.split("/")[:depth]) for depth in (2, 3)}
            if key not in needed and not folders & needed_folders and changed < old:
                result.keys[key] = size
    return result


def collect(store: Store, what: Plan) -> None:
    """Removes the objects that ``what`` lists.  Begins with cache entries and manifests (records of finished stages),
    so that after an interruption none of them refers to removed data."""
    for key in sorted(what.keys, key=lambda key: _ORDER.index(key.split("/")[0])):
        store.delete(key)


@contextlib.contextmanager
def alone(store: Store) -> Iterator[bool]:
    """Holds a lock for garbage collection in the store during the ``with`` block.  Yields False if another process
    holds such a lock, else True.  Only a process that gets True may collect.

    A process writes its own lock before it looks for other locks.  So if two processes begin at the same time, at most
    one gets True.  A lock older than ``LOCK_SECONDS`` does not count, because a job that collects garbage is killed
    after this time."""
    mine = f"locks/gc-{uuid.uuid4().hex}"
    store.put(mine, b"")
    try:
        others = {key: changed for key, (_, changed) in store.sizes("locks").items() if key != mine}
        free = not any(map(_is_held, others.values()))
        if free:
            for stale in others:  # locks of killed collections
                store.delete(stale)
        yield free
    finally:
        store.delete(mine)


def is_collecting(store: Store) -> bool:
    return any(_is_held(changed) for _, changed in store.sizes("locks").values())


def _is_held(changed: float) -> bool:
    return time.time() - changed < LOCK_SECONDS


def await_end(store: Store, patience: float) -> bool:
    """Waits at most ``patience`` seconds until no garbage collection runs in ``store``.  Returns whether none runs."""
    deadline = time.monotonic() + patience
    while is_collecting(store):
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True


def _folder_keys(store: Store, digest: str) -> set[str]:
    try:
        return {f"cas/{digest}"} | {f"cas/{entry['sha256']}" for entry in store.tree(digest).values()}
    except StoreDamaged:
        return set()
