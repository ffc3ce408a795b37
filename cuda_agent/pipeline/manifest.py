"""Reads and writes manifests (records of finished stages), computes cache keys, and defines the layout of the store:

cas/<sha256>                      files and folders of artifacts, and for each result the hashes of its code's files and
                                  the versions of its software; each under the hash of its content
configs/<sha256>.json             configurations of runs, with all default values
cache/<stage>/<key>.json          the manifest of the result with this cache key; written after the result
checkpoints/<stage>/<key>/        checkpoints of an unfinished stage
runs.json                         copies of the records of done runs, for a quick list
runs/<run>/run.json               the run's record: its name, the hash of its configuration and other facts
runs/<run>/end.json               the run's record when it last ended, with how it ended
runs/<run>/pin                    exists if garbage collections keep the run
runs/<run>/spans/<process>.jsonl  spans, which show where the run's time went
runs/<run>/<stage>/manifest.json  the manifest of the result that the run uses for this stage
runs/<run>/<stage>/key            the cache key with which the stage's last attempt began
runs/<run>/<stage>/log.txt        the output of the stage's last attempt
runs/<run>/<stage>/outcome.json   how the stage's last attempt on a cluster ended, if it failed
runs/<run>/prepare/<sha256>.json  the same of the step ``prepare``, for a configuration with this hash
sweeps/<sweep>/mlflow             the id of the MLflow run that is the parent of the sweep's runs"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.compose import section_values
from cuda_agent.config import Config
from cuda_agent.pipeline.closure import code_version, device_name, environment_digest
from cuda_agent.pipeline.graph import GRAPH_FILE, STAGES_INPUT, Stage, ancestors
from cuda_agent.pipeline.locks import using
from cuda_agent.storage import Store, file_sha256, json_sha256
from cuda_agent.tracking import read_metrics, write_metrics

TASK_FILES = (".parquet", ".jsonl", ".py")  # what task sets consist of


@dataclass(frozen=True)
class Manifest:
    """The record of one finished stage: how its result was made, and the digests of the folders with the result."""

    stage: str
    run: str  # the run that made the result
    key: str  # cache key
    code: str  # version of the stage's import closure
    environment: str  # digest of the software
    device: str | None  # only for a stage that measures times
    config: str  # sha256 of the whole configuration
    inputs: dict[str, str]  # name -> digest of a folder in the store
    outputs: dict[str, str]  # name -> digest of a folder in the store
    metrics: str  # digest of the folder of metrics.jsonl and notes.jsonl
    seconds: float  # of all attempts; of an interrupted attempt, up to its last checkpoint
    finished: str  # ISO 8601, UTC
    resumed: list[int] = field(default_factory=list)  # steps of the checkpoints from which the stage resumed
    lost: int = 0  # episodes that faults ended; if there are any, only this run uses the result
    scores: dict[str, float] = field(default_factory=dict)  # of an evaluation: metric -> value, for final solutions

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Identity:
    """The facts that decide a stage's result.  The stage's cache key is a hash of them."""

    stage: str
    code: str  # version of the stage's import closure
    environment: str  # digest of the software
    config: dict[str, Any]  # the sections that the stage reads
    inputs: dict[str, str]  # name -> digest of a folder in the store
    device: str | None  # only for a stage that measures times

    @property
    def key(self) -> str:
        return json_sha256(asdict(self))


def identify(stage: Stage, config: Config, inputs: dict[str, str]) -> Identity:
    """Returns the facts that decide the cache key of ``stage``.  ``inputs`` are the stage's inputs: name -> digest."""
    values, device = section_values(config, stage.config), _device(stage, config) if stage.timing else None
    if "synthesis" in stage.config and (sets := _task_sets(config)):
        values["task_sets"] = sets
    return Identity(stage.name, code_version(stage.module), environment_digest(), values, inputs, device)


def _task_sets(config: Config) -> dict[str, dict[str, str]]:
    """Returns the sha256 of each file of the task sets that ``config`` names: key -> name of a file -> sha256."""
    named = {"tasks": config.synthesis.tasks, "evaluation_set": config.synthesis.evaluation_set}
    found = {}
    for key, place in named.items():
        if place:
            path = Path(place)
            under = [Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names]
            files = [path] if path.is_file() else [file for file in under if file.suffix in TASK_FILES]
            found[key] = {file.relative_to(path).as_posix(): file_sha256(file) for file in files if file.is_file()}
    return found


def identity_of(
    store: Store, stages: Sequence[Stage], stage: Stage, config: Config, done: dict[str, Manifest]
) -> Identity:
    """Returns the facts that decide the cache key of ``stage``.

    ``done`` has the manifests of all stages on which ``stage`` depends.  The digests of the inputs come from these
    manifests.  If one of the inputs is ``graph.STAGES_INPUT``, a folder that describes all these stages, this
    function makes the folder and writes it to the store."""
    inputs = {}
    for name, source in stage.inputs.items():
        if source == STAGES_INPUT:
            with tempfile.TemporaryDirectory() as temporary:
                _make_stages_folder(store, stages, stage, config, done, Path(temporary))
                inputs[name] = store.put_folder(Path(temporary))
        else:
            above, _, artifact = source.partition(".")
            inputs[name] = done[above].outputs[artifact]
    return identify(stage, placed(config), inputs)


def placed(config: Config) -> Config:
    """Returns a copy of ``config`` with the addresses of sandbox servers, vLLM servers and Ray from environment
    variables.  Pods of a cluster have these variables.  If a variable is not set, the copy keeps the address in
    ``config``."""
    given = os.environ.get
    changes: dict[str, Any] = {}
    if servers := given("CUDA_AGENT_SANDBOX_SERVERS"):
        changes["sandbox"] = config.sandbox.model_copy(update={"servers": servers.split(",")})
    if servers := given("CUDA_AGENT_ENGINE_SERVERS"):
        vllm = config.policy.vllm.model_copy(update={"servers": servers.split(",")})
        changes["policy"] = config.policy.model_copy(update={"vllm": vllm})
    if address := given("CUDA_AGENT_RAY_ADDRESS"):
        changes["ray"] = config.ray.model_copy(update={"address": address})
    return config.model_copy(update=changes)


def _device(stage: Stage, config: Config) -> str:
    """Returns a name for the device on which the stage measures times.  The name becomes part of the cache key.

    If the environment variable CUDA_AGENT_DEVICE is set, as in pods of a cluster, returns its value.  Otherwise returns
    "servers" if sandbox servers are configured, "ray" if the stage uses an existing Ray cluster, and else a description
    of this machine's device."""
    if named := os.environ.get("CUDA_AGENT_DEVICE"):
        return named
    if config.sandbox.servers:
        return "servers"
    elsewhere = "ray" in stage.config and config.runtime == "ray" and config.ray.address
    return "ray" if elsewhere else device_name(config.sandbox.device)


def cache_entry(stage: str, key: str) -> str:
    return f"cache/{stage}/{key}.json"


def manifest_entry(run: str, stage: str) -> str:
    return f"runs/{run}/{stage}/manifest.json"


def key_entry(run: str, stage: str) -> str:
    return f"runs/{run}/{stage}/key"


def outcome_entry(run: str, stage: str) -> str:
    """Returns the key in the store of ``outcome.json``, which says how a stage's last attempt on a cluster failed."""
    return f"runs/{run}/{stage}/outcome.json"


def prepare_entry(run: str, sha256: str) -> str:
    """Returns the key in the store that says how the step ``prepare`` failed.  The key has the hash of the
    configuration, because the name ``run`` may belong to a run of another one."""
    return f"runs/{run}/prepare/{sha256}.json"


def pin_entry(run: str) -> str:
    """Returns the key in the store that exists if garbage collections keep the run."""
    return f"runs/{run}/pin"


def config_entry(sha256: str) -> str:
    return f"configs/{sha256}.json"


def read_manifest(store: Store, run: str, stage: str) -> Manifest | None:
    return _read(store, manifest_entry(run, stage))


def _read(store: Store, key: str) -> Manifest | None:
    data = store.find(key)
    return None if data is None else Manifest.from_bytes(data)


def is_whole(store: Store, manifest: Manifest) -> bool:
    """Returns whether the store holds all output folders and the metrics folder of ``manifest``."""
    return all(store.has_folder(digest) for digest in [*manifest.outputs.values(), manifest.metrics])


def find_result(store: Store, run: str, identity: Identity) -> Manifest | None:
    """Returns the manifest of a complete result with this identity, or None.  Looks first in the cache, then at the
    manifest of ``run``, because a process may have been killed after it wrote this manifest and before it wrote the
    cache entry."""
    cached = _read(store, cache_entry(identity.stage, identity.key))
    if cached and is_whole(store, cached):
        return cached
    own = read_manifest(store, run, identity.stage)
    return own if own and own.key == identity.key and is_whole(store, own) else None


def serve_from_cache(store: Store, run: str, identity: Identity) -> Manifest | None:
    """Looks for a stored result with this identity, and makes it the result of its stage in ``run``.  Returns its
    manifest, or None if the store has no result."""
    with using(store):
        result = find_result(store, run, identity)
        return None if result is None else publish(store, run, result)


def commit(store: Store, run: str, manifest: Manifest, folders: Mapping[str, Path]) -> Manifest:
    """Publishes a new result (see ``publish``).  ``folders`` maps digests in ``manifest`` to the folders that were
    stored under them.  Stores what is missing again: what was there before, a collection may have removed since."""
    with using(store):
        for digest, folder in folders.items():
            if not store.has_folder(digest):
                store.put_folder(folder)
        return publish(store, run, manifest)


def publish(store: Store, run: str, manifest: Manifest) -> Manifest:
    """Writes ``manifest`` to the store: first as the manifest of ``run``, then as a cache entry.  If the cache already
    has a different, complete result with the same key, keeps that cache entry and makes it the manifest of ``run``.
    Writes no cache entry if the stage lost episodes (``Manifest.lost``).  Returns the manifest that ``run`` has in the
    end."""
    entry = cache_entry(manifest.stage, manifest.key)
    store.put(manifest_entry(run, manifest.stage), manifest.to_bytes())
    made = not store.exists(entry) if manifest.lost else store.create(entry, manifest.to_bytes())
    if not made:
        theirs = Manifest.from_bytes(store.get(entry))
        if theirs != manifest:
            if is_whole(store, theirs):
                store.put(manifest_entry(run, manifest.stage), theirs.to_bytes())
                return theirs
            if not manifest.lost:
                store.put(entry, manifest.to_bytes())
    return manifest


def _make_stages_folder(
    store: Store, stages: Sequence[Stage], stage: Stage, config: Config, done: dict[str, Manifest], folder: Path
) -> None:
    """Fills ``folder`` with ``graph.json``, ``config.json``, and the metrics, notes and manifests of all stages that
    ``stage`` depends on.  If ``sandbox.clock`` is "model" (a deterministic cost replaces measured times), leaves out
    durations, notes and other facts that can differ between two runs of the same configuration."""
    timeless = config.sandbox.clock == "model"
    left_out = {"run", "config", "finished", "resumed", "metrics"}
    left_out |= {"seconds", "key", "environment", "device"} if timeless else set()
    rows = []
    for name in ancestors(stages, stage.name):
        row = next(row for row in stages if row.name == name)
        rows.append({"name": name, "chart": row.chart, "curves": row.curves, "about": row.about})
        target = folder / name
        store.get_folder(done[name].metrics, target)
        facts = {key: value for key, value in asdict(done[name]).items() if key not in left_out}
        (target / "manifest.json").write_text(json.dumps(facts, indent=1, sort_keys=True))
        if timeless:
            metrics = {
                step: {key: value for key, value in values.items() if "second" not in key}
                for step, values in read_metrics(target / "metrics.jsonl").items()
            }
            for file in ("metrics.jsonl", "notes.jsonl"):
                (target / file).unlink()
            write_metrics(target / "metrics.jsonl", metrics)
            (target / "notes.jsonl").touch()
    (folder / GRAPH_FILE).write_text(json.dumps(rows, indent=1))
    values = config.model_dump(mode="json", exclude={"run"})
    (folder / "config.json").write_text(json.dumps(values, indent=1, sort_keys=True))
