"""Retention: which runs, artifacts and checkpoints nobody needs, and their removal.

Kept: the newest runs of each pipeline, what their manifests name, the cache entries of that, and the checkpoints of
stages that they began and did not finish.  Anything younger than an hour stays, whatever it is.

What it does not cover: machine-local caches (verdicts, builds, reports), which may be deleted by hand at any time.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from cuda_agent.pipeline.manifest import Manifest, config_entry
from cuda_agent.pipeline.runs import Run, list_runs
from cuda_agent.storage import Store, StoreDamaged

YOUNG = 3600.0  # seconds


@dataclass
class Plan:
    """What would go: keys with their sizes in bytes, and the runs they belonged to."""

    runs: list[str] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.keys.values())

    def to_json(self) -> dict[str, Any]:
        return {"runs": self.runs, "objects": len(self.keys), "bytes": self.size}


def plan(store: Store, keep: int = 10) -> Plan:
    """What ``collect`` would remove when the newest ``keep`` runs of each pipeline stay."""
    kept, gone = _choose(list_runs(store), keep)
    needed = {config_entry(run.config) for run in kept}
    alive: set[str] = set()  # stage/key of results that kept runs use
    began: set[str] = set()  # stage/key of what they began
    for run in kept:
        for key in store.list(f"runs/{run.name}"):
            needed.add(key)
            if key.endswith("/manifest.json"):
                manifest = Manifest.from_bytes(store.get(key))
                alive.add(f"{manifest.stage}/{manifest.key}")
                for digest in [*manifest.inputs.values(), *manifest.outputs.values(), manifest.metrics]:
                    needed |= _folder_keys(store, digest)
            elif key.endswith("/key"):
                began.add(f"{key.split('/')[2]}/{store.get(key).decode()}")
    result = Plan(runs=[run.name for run in gone])
    now = time.time()
    for prefix in ("runs", "configs", "cache", "checkpoints", "cas"):
        for key, (size, changed) in store.sizes(prefix).items():
            if key in needed or now - changed < YOUNG:
                continue
            if prefix == "cache" and key.removeprefix("cache/").removesuffix(".json") in alive:
                continue
            if prefix == "checkpoints" and "/".join(key.split("/")[1:3]) in began - alive:
                continue
            result.keys[key] = size
    return result


def collect(store: Store, what: Plan) -> None:
    """Removes it: cache entries and manifests first, so that nothing points into a hole."""
    order = {"cache": 0, "runs": 1, "checkpoints": 2, "configs": 3, "cas": 4}
    for key in sorted(what.keys, key=lambda key: order[key.split("/")[0]]):
        store.delete(key)


def _choose(runs: list[Run], keep: int) -> tuple[list[Run], list[Run]]:
    by_pipeline: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_pipeline[run.pipeline].append(run)
    kept = [run for group in by_pipeline.values() for run in group[max(0, len(group) - keep) :]]
    return kept, [run for run in runs if run not in kept]


def _folder_keys(store: Store, digest: str) -> set[str]:
    try:
        return {f"cas/{digest}"} | {f"cas/{entry['sha256']}" for entry in store.tree(digest).values()}
    except StoreDamaged:
        return set()
