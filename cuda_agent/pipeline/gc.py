"""Garbage collection of the store, beside running runs: removes old runs, and what only old runs need.

A pipeline is a series of runs whose configurations have the same value of ``run.pipeline``.  Of each pipeline the
newest finished runs are kept.  A sweep counts as one run, and is kept or removed whole.  Runs that are pinned, under
way, or were active in the last days are kept, too, finished or not.

With a run are kept the artifacts that its manifests (records of finished stages) name, the cache entries of its
results, and the checkpoints of its unfinished stages.  No object younger than an hour is removed.  ``locks`` keeps runs
and collections apart for the moments in which they could meet."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cuda_agent.errors import EXIT_DONE, EXIT_GATE
from cuda_agent.pipeline.manifest import Manifest, config_entry, pin_entry
from cuda_agent.pipeline.runs import Run, list_runs, write_index
from cuda_agent.storage import Store, StoreDamaged, side_by_side

YOUNG = 3600.0  # seconds
KEEP = 10  # newest finished runs of each pipeline
DAYS = 7.0  # days after its last activity in which a run is kept anyway
_DAY = 86400.0
_QUIET = 1.0  # days without activity after which a run of another machine counts as cut off
_ORDER = ("cache", "runs", "sweeps", "checkpoints", "configs", "cas")  # the order of removal


@dataclass
class Plan:
    """The runs and the store's objects that a garbage collection removes."""

    runs: list[str] = field(default_factory=list)  # names of the runs
    sweeps: list[str] = field(default_factory=list)  # names of the sweeps to which these runs belong
    keys: dict[str, int] = field(default_factory=dict)  # key of an object -> its size in bytes
    pinned: list[str] = field(default_factory=list)  # names of the runs that are kept because they are pinned
    kept: list[Run] = field(default_factory=list)
    still: list[str] = field(default_factory=list)  # names of kept runs that are not under way

    @property
    def size(self) -> int:
        return sum(self.keys.values())

    def to_json(self) -> dict[str, Any]:
        return {"runs": self.runs, "pinned": self.pinned, "objects": len(self.keys), "bytes": self.size}


def plan(
    store: Store,
    keep: int = KEEP,
    days: float = DAYS,
    live: Collection[str] = (),
    known: Callable[[str], bool] = lambda run: False,
    configs: Collection[str] = (),
) -> Plan:
    """Returns the runs and objects to remove from ``store``.

    Args:
        store: The store.
        keep: How many of the newest finished runs of each pipeline are kept.
        days: Runs that were active in so many days are kept.
        live: Names of the runs that are under way.
        known: Returns whether ``live`` would have the name of a run if it were under way.  Otherwise the run may be
            under way on another machine, until it has been quiet for a day.
        configs: Hashes of configurations that stay, because a schedule names them."""
    objects = {prefix: store.sizes(prefix) for prefix in _ORDER}
    records, now = list_runs(store, indexed=False), time.time()
    own: dict[str, list[str]] = defaultdict(list)  # run -> its keys
    for key in objects["runs"]:
        own[key.split("/")[1]].append(key)
    stage_keys = _stage_keys(store, objects["runs"])
    of_checkpoints: dict[str, float] = defaultdict(float)  # stage/key -> last change
    for key, (_, changed) in objects["checkpoints"].items():
        stage = "/".join(key.split("/")[1:3])
        of_checkpoints[stage] = max(of_checkpoints[stage], changed)

    def quiet(run: Run) -> float:
        """Returns the days since the last sign of the run."""
        signs = [objects["runs"][key][1] for key in own[run.name]]
        signs += [of_checkpoints[begun] for begun in stage_keys.get(run.name, ()) if begun in of_checkpoints]
        return (now - max([_seconds(run.created), *signs])) / _DAY

    idle = {run.name: quiet(run) for run in records}
    pinned = [run.name for run in records if pin_entry(run.name) in objects["runs"]]
    active = {name for name, since in idle.items() if since < max(days, YOUNG / _DAY)}
    named = active | set(live) | set(pinned)
    kept = [run for unit in _units(records, keep, named) for run in unit]
    names = {run.name for run in kept}
    needed = {config_entry(sha256) for sha256 in [*(run.config for run in kept), *configs]}
    needed |= {key for name in names for key in own[name]}
    manifests = [key for key in needed if key.endswith("/manifest.json")]
    made = [Manifest.from_bytes(data) for data in side_by_side(store.find, manifests) if data is not None]
    finished = {f"{one.stage}/{one.key}" for one in made}  # results that kept runs use
    digests = {digest for one in made for digest in [*one.inputs.values(), *one.outputs.values(), one.metrics]}
    needed |= {f"cas/{digest}" for one in made for digest in (one.code, one.environment)}
    needed |= {key for keys in side_by_side(lambda digest: _folder_keys(store, digest), digests) for key in keys}
    needed |= {f"cache/{result}.json" for result in finished}
    began = {begun for name in names for begun in stage_keys.get(name, ())}
    folders = {f"sweeps/{run.sweep}" for run in kept} | {f"checkpoints/{begun}" for begun in began - finished}
    gone = [run for run in records if run.name not in names]
    still = [run.name for run in kept if run.name not in live and (known(run.name) or idle[run.name] > _QUIET)]
    sweeps = sorted({run.sweep for run in gone} - {""})
    result = Plan([run.name for run in gone], sweeps, pinned=pinned, kept=kept, still=still)
    for keys in objects.values():
        for key, (size, changed) in keys.items():
            above = {"/".join(key.split("/")[:depth]) for depth in (2, 3)}
            if key not in needed and not folders & above and changed < now - YOUNG:
                result.keys[key] = size
    return result


def collect(store: Store, what: Plan) -> None:
    """Removes the objects that ``what`` lists.  Begins with cache entries and manifests (records of finished stages),
    so that after an interruption none of them refers to removed data."""
    write_index(store, what.kept)
    for prefix in _ORDER:
        store.delete_all(key for key in what.keys if key.startswith(f"{prefix}/"))


def _units(records: Iterable[Run], keep: int, named: Collection[str]) -> list[list[Run]]:
    """Returns the runs to keep.  A unit is a sweep, or a run outside of sweeps.  It is kept if it has a run in
    ``named``, or if it is among the newest ``keep`` units of its pipeline that have a finished run."""
    units: dict[tuple[str, str], list[Run]] = defaultdict(list)  # the newest unit comes last
    for run in records:
        unit = (run.pipeline, f"sweep {run.sweep}" if run.sweep else run.name)
        units[unit] = [*units.pop(unit, []), run]
    of_pipeline: dict[str, list[list[Run]]] = defaultdict(list)
    for (pipeline, _), unit_runs in units.items():
        if any(run.code in (EXIT_DONE, EXIT_GATE) for run in unit_runs):
            of_pipeline[pipeline].append(unit_runs)
    newest = {id(unit) for finished in of_pipeline.values() for unit in finished[max(0, len(finished) - keep) :]}
    return [unit for unit in units.values() if id(unit) in newest or any(run.name in named for run in unit)]


def _stage_keys(store: Store, keys: Iterable[str]) -> dict[str, list[str]]:
    """Returns run -> stage/key of the stages that it began."""
    found: dict[str, list[str]] = defaultdict(list)
    entries = [key for key in keys if key.endswith("/key")]
    for entry, data in zip(entries, side_by_side(store.find, entries), strict=True):
        _, run, stage, _ = entry.split("/")
        found[run].append(f"{stage}/{(data or b'').decode()}")
    return found


def _folder_keys(store: Store, digest: str) -> set[str]:
    try:
        return {f"cas/{digest}"} | {f"cas/{entry['sha256']}" for entry in store.tree(digest).values()}
    except StoreDamaged:
        return set()


def _seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
