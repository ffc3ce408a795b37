"""Runs in the store: who they are, how they ended, which one a person means, and how two of them differ.

What it does not cover: doing anything (``local``), and removing anything (``gc``).
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cuda_agent.config import Config, ConfigError, flat, load
from cuda_agent.pipeline.graph import Stage
from cuda_agent.pipeline.manifest import Manifest, config_entry, manifest_entry, read_manifest
from cuda_agent.storage import Store, local_folder


@dataclass(frozen=True)
class Run:
    """``code`` is None before its first end; 0 is done."""

    name: str
    config: str  # sha256
    pipeline: str
    created: str  # ISO 8601, UTC
    code: int | None = None
    stage: str = ""  # that it ended in
    message: str = ""

    @property
    def status(self) -> str:
        return {None: "unfinished", 0: "done", 75: "interrupted", 78: "refused", 79: "gate missed"}.get(
            self.code, "failed"
        )


def local_home(store_uri: str) -> Path:
    """The machine's own folder for a store: caches, locks, scratch, MLflow's database.  CUDA_AGENT_HOME, or beside a
    folder store, or ``~/.cache/cuda-agent``."""
    if home := os.environ.get("CUDA_AGENT_HOME"):
        return Path(home).absolute()
    folder = local_folder(store_uri)
    if folder is None:
        return Path.home() / ".cache" / "cuda-agent"
    return folder.parent if folder.name == "store" else folder.parent / f"{folder.name}.local"


def create_run(store: Store, config: Config, sha256: str) -> Run:
    """A new run, under the configured name or the date.  Raises ConfigError when the name is taken."""
    now = datetime.now(UTC)
    base = config.run.name or f"{now:%Y%m%d-%H%M%S}-{sha256[:4]}"
    for attempt in range(100):
        name = base if attempt == 0 else f"{base}-{attempt}"
        record = Run(name, sha256, config.run.pipeline, now.isoformat(timespec="microseconds"))
        facts = {
            key: value for key, value in asdict(record).items() if key in ("name", "config", "pipeline", "created")
        }
        if store.create(f"runs/{name}/run.json", json.dumps(facts).encode()):
            return record
        if config.run.name:
            raise ConfigError(
                f"run.name: expected a new name, but there is a run {name} of another configuration or state."
            )
    raise ConfigError(f"run.name: could not find a free name like {base}.")


def end_run(store: Store, run: Run, code: int, stage: str, message: str) -> None:
    store.put(f"runs/{run.name}/end.json", json.dumps({"code": code, "stage": stage, "message": message}).encode())


def read_run(store: Store, name: str) -> Run:
    facts = json.loads(store.get(f"runs/{name}/run.json"))
    end = f"runs/{name}/end.json"
    return Run(**facts, **(json.loads(store.get(end)) if store.exists(end) else {}))


def list_runs(store: Store) -> list[Run]:
    """Oldest first."""
    names = [key.split("/")[1] for key in store.list("runs") if key.count("/") == 2 and key.endswith("/run.json")]
    return sorted((read_run(store, name) for name in names), key=lambda run: (run.created, run.name))


def newest_unfinished(store: Store, sha256: str) -> Run | None:
    """The newest run of this configuration that is not done."""
    return next((run for run in reversed(list_runs(store)) if run.config == sha256 and run.code != 0), None)


def find_run(store: Store, name: str) -> Run:
    """By name, by the beginning of its name, or ``last``.  Raises ConfigError that lists what there is."""
    runs = list_runs(store)
    if name == "last" and runs:
        return runs[-1]
    matching = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(run.name for run in (matching or runs)[-10:]) or "none"
    raise ConfigError(f"run {name}: {'several match' if matching else 'there is no such run'} in {store.uri}: {names}.")


def run_config(store: Store, run: Run) -> Config:
    return load(store.get(config_entry(run.config)).decode(), run.config)


def run_manifests(store: Store, run: Run, stages: Sequence[Stage]) -> dict[str, Manifest]:
    """Of the stages that are done, in the table's order."""
    found = {stage.name: read_manifest(store, manifest_entry(run.name, stage.name)) for stage in stages}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def diff(store: Store, one: Run, other: Run, stages: Sequence[Stage]) -> dict[str, Any]:
    """What differs: configuration keys, and per stage what its key is made of and what came out."""
    settings = [flat(run_config(store, run)) for run in (one, other)]
    keys = [key for key in settings[0] | settings[1] if settings[0].get(key) != settings[1].get(key)]
    left, right = (run_manifests(store, run, stages) for run in (one, other))
    changes: dict[str, Any] = {}
    for name in left | right:
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            changes[name] = {"only in": one.name if a else other.name}
        elif a.key != b.key:
            parts = [
                part for part in ("code", "environment", "device", "inputs") if getattr(a, part) != getattr(b, part)
            ]
            differing: dict[str, Any] = {part: [getattr(a, part), getattr(b, part)] for part in parts} or {
                "configuration": True
            }
            same = [artifact for artifact in a.outputs if a.outputs[artifact] == b.outputs.get(artifact)]
            changes[name] = {"differs in": differing, "seconds": [a.seconds, b.seconds], "same outputs": same}
    return {
        "runs": [one.name, other.name],
        "config": {key: [settings[0].get(key), settings[1].get(key)] for key in keys},
        "stages": changes,
    }


def lock_path(home: Path, store: Store, sha256: str) -> Path:
    return home / "locks" / f"run-{hashlib.sha256(store.uri.encode()).hexdigest()[:8]}-{sha256[:24]}"


@contextlib.contextmanager
def try_lock(path: Path, shared: bool = False) -> Iterator[bool]:
    """Yields whether the machine-wide lock was free; it goes with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def is_running(home: Path, store: Store, run: Run) -> bool:
    """Whether somebody on this machine is running this run's configuration now."""
    with try_lock(lock_path(home, store, run.config)) as free:
        return not free
