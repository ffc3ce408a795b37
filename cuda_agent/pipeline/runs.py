"""Reads and writes the records of runs in the store, and finds runs by name."""

import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cuda_agent.compose import load
from cuda_agent.config import Config, RunConfig
from cuda_agent.errors import EXIT_BUDGET, EXIT_CONFIG, EXIT_DONE, EXIT_GATE, EXIT_RETRY, ConfigError
from cuda_agent.pipeline.graph import ROWS, Stage, policy_of
from cuda_agent.pipeline.manifest import Manifest, config_entry, pin_entry, read_manifest
from cuda_agent.storage import Store, StoreError, local_folder, side_by_side

INDEX = "runs.json"  # the records of done runs, which do not change; saves most requests of a list
_LATE = 100  # done runs that a list may read one by one; if there are more, it writes the index anew
_STATUSES = {
    None: "unfinished",
    EXIT_DONE: "done",
    EXIT_RETRY: "interrupted",
    EXIT_BUDGET: "budget spent",
    EXIT_CONFIG: "refused",
    EXIT_GATE: "gate missed",
}


@dataclass(frozen=True)
class Run:
    """The record of a run.  ``code`` is the exit code: 0 if the run is done, None if it never ended.  A run that is
    not done can be continued and can then end again.  ``code`` is from the last time that it ended."""

    name: str
    config: str  # sha256 of the configuration
    pipeline: str  # name of the MLflow experiment
    created: str  # ISO 8601, UTC
    code: int | None = None
    stage: str = ""  # the stage that failed
    message: str = ""  # why the run ended with ``code``
    sweep: str = ""  # name of the run's sweep
    submitter: str = ""  # user who started the run: of this machine, or of the cluster
    graph: str = "full"  # variant of the graph
    clock: str = "real"  # the setting sandbox.clock
    stages: list[str] = field(default_factory=list)  # the stages that were finished when the run ended
    policy: str = ""  # the policy that was scored last
    scores: dict[str, float] = field(default_factory=dict)  # of that policy: metric -> value

    @classmethod
    def begun(cls, name: str, config: Config, sha256: str, submitter: str) -> "Run":
        """Returns the record of a run ``name`` that begins now; ``sha256`` is the hash of ``config``."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        sweep, clock = config.run.sweep or "", config.sandbox.clock
        more = {"sweep": sweep, "submitter": submitter, "graph": config.graph, "clock": clock}
        return cls(name, sha256, config.run.pipeline, now, **more)  # type: ignore[arg-type]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def status(self) -> str:
        return _STATUSES.get(self.code, "failed")


def user_home() -> Path:
    """Returns this user's folder on this machine for what belongs to no store: the environment variable CUDA_AGENT_HOME
    or, if it is not set, ``cuda-agent`` in the user's cache folder (XDG_CACHE_HOME, else ``~/.cache``)."""
    if home := os.environ.get("CUDA_AGENT_HOME"):
        return Path(home).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "cuda-agent"


def local_home(store_uri: str) -> Path:
    """Returns the folder on this machine for caches, locks, scratch files and MLflow's database of a store.

    The environment variable CUDA_AGENT_HOME names this folder.  If it is not set, the folder depends on the store:

    - a local store whose folder is called ``store``, such as ``x/store``: the parent folder ``x``;
    - another local store, such as ``x/y``: the folder ``x/y.local`` beside it;
    - a store in S3 or in memory: the user's folder (``user_home``)."""
    folder = local_folder(store_uri)
    if folder is None or "CUDA_AGENT_HOME" in os.environ:
        return user_home()
    return folder.parent if folder.name == "store" else folder.parent / f"{folder.name}.local"


def spans_folder(home: Path, run: str) -> Path:
    """Returns the folder on this machine for the spans of a run's processes.  ``home`` is the store's local home."""
    return home / "work" / run / "spans"


def cache_of(config: Config) -> Path:
    """Returns the folder on this machine for verdicts, baselines and builds, and for the timing lease.

    It lies beside the store, so that a store's runs share it with the commands that judge.  If no store is named and
    the usual one does not exist, it is the user's, so that nothing is measured again in the next folder."""
    store = config.run.store
    folder = local_folder(store)
    unused = store == RunConfig().store and folder is not None and not folder.is_dir()
    return (user_home() if unused else local_home(store)) / "cache"


def create_run(store: Store, config: Config, sha256: str) -> Run:
    """Creates the record of a new run in the store.  The run's name is the setting ``run.name`` of ``config``.  If it
    is not set, the name is made from the date and ``sha256``, the hash of ``config``.

    Raises:
        ConfigError: The store already has a run with this name."""
    base = config.run.name or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{sha256[:4]}"
    for attempt in range(1 if config.run.name else 100):
        record = Run.begun(f"{base}-{attempt}" if attempt else base, config, sha256, _user())
        if store.create(f"runs/{record.name}/run.json", record.to_bytes()):
            return record
    raise ConfigError(f"run.name: expected a new name, but there is a run {base} of another configuration or state.")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""


def touch(store: Store, run: Run) -> None:
    """Records a sign of activity of ``run``, which is continued now: garbage collections keep active runs."""
    entry = f"runs/{run.name}/run.json"
    store.put(entry, store.get(entry))


def end_run(store: Store, run: Run, code: int, stage: str, message: str, done: Mapping[str, Manifest]) -> None:
    """Records how ``run`` ended, which stages are finished, and the last scores.  ``done`` has the manifests of the
    finished stages, by stage."""
    order = [row.name for row in ROWS]
    stages = sorted(done, key=lambda name: order.index(name) if name in order else -1)  # as in ROWS, not as they ended
    scored = [name for name in stages if done[name].scores]
    last = {"policy": policy_of(scored[-1], run.clock), "scores": done[scored[-1]].scores} if scored else {}
    ended = replace(run, code=code, stage=stage, message=message, stages=stages, **last)  # type: ignore[arg-type]
    store.put(f"runs/{run.name}/end.json", ended.to_bytes())


def read_run(store: Store, name: str) -> Run:
    """Returns the record of the run with exactly this name.

    Raises:
        ConfigError: There is no such run."""
    if (found := _read(store, name)) is None:
        raise ConfigError(f"run {name}: there is no such run in {store.uri}.")
    return found


def _read(store: Store, name: str) -> Run | None:
    end = json.loads(store.find(f"runs/{name}/end.json") or "{}")
    if "config" not in end:  # the run has not ended yet; or an older version of this package recorded its end
        if (begun := store.find(f"runs/{name}/run.json")) is None:
            return None
        end = json.loads(begun) | end
    return Run(**end)


def list_runs(store: Store, indexed: bool = True) -> list[Run]:
    """Returns all runs, oldest first.  If ``indexed`` is False, reads each record, and none from the index."""
    known = {one["name"]: one for one in json.loads((store.find(INDEX) if indexed else None) or "[]")}
    names = store.folders("runs")
    found = {name: Run(**known[name]) for name in names if name in known}
    read = side_by_side(partial(_read, store), [name for name in names if name not in found])
    late = [run for run in read if run is not None]
    found |= {run.name: run for run in late}
    if sum(run.code == EXIT_DONE for run in late) > _LATE:
        with contextlib.suppress(StoreError):  # this user may only read
            write_index(store, found.values())
    return sorted(found.values(), key=lambda run: (run.created, run.name))


def write_index(store: Store, all_runs: Iterable[Run]) -> None:
    store.put(INDEX, json.dumps([asdict(run) for run in all_runs if run.code == EXIT_DONE]).encode())


def pin(store: Store, name: str, pinned: bool) -> None:
    """Pins the run with exactly this name, so that garbage collections keep it, or removes its pin.

    Raises:
        ConfigError: There is no such run."""
    read_run(store, name)
    if pinned:
        store.put(pin_entry(name), b"")
    else:
        store.delete(pin_entry(name))


def newest_unfinished(store: Store, sha256: str) -> Run | None:
    return next((run for run in reversed(list_runs(store)) if run.config == sha256 and run.code != 0), None)


def find_run(store: Store, name: str) -> Run:
    """Returns the run that ``name`` selects.  ``name`` is a run's name, the beginning of a name, or ``last`` for the
    newest run.

    Raises:
        ConfigError: No run or several match; the message lists the choices."""
    if name not in ("", "last") and "/" not in name and (found := _read(store, name)):
        return found
    records = {record.name: record for record in list_runs(store)}
    return records[choose(list(records), name, store.uri)]


def matching(names: Sequence[str], asked: str) -> list[str]:
    """Returns the names that ``asked`` matches.  If a name equals ``asked``, only this name matches.  Otherwise all
    names match that begin with ``asked``.  The text ``last`` matches only the last name."""
    if asked == "last":
        return list(names[-1:])
    return [name for name in names if name == asked] or [name for name in names if name.startswith(asked)]


def choose(names: Sequence[str], asked: str, where: str) -> str:
    """Returns the one name in ``names`` that ``asked`` matches (see ``matching``).

    Raises:
        ConfigError: No name or several match.  The message lists the choices.  It also contains ``where``, which says
            where the names come from, such as the store's URI."""
    found = matching(names, asked)
    if len(found) == 1:
        return found[0]
    shown = ", ".join((found or list(names))[-10:]) or "none"
    raise ConfigError(f"run {asked}: {'several match' if found else 'there is no such run'} in {where}: {shown}.")


def agree(store: Store, key: str, make: Callable[[], str]) -> str:
    """Returns the text stored under ``key``.  If there is none, first stores the result of ``make``.  All processes get
    the same text, even if several call ``make`` at the same time."""
    if (found := store.find(key)) is not None:
        return found.decode()
    made = make()
    return made if store.create(key, made.encode()) else store.get(key).decode()


def store_id(store: Store) -> str:
    """Returns a text that identifies the store, also among stores of the same URI on different servers."""
    return agree(store, "id", lambda: secrets.token_hex(8))


def read_config(store: Store, sha256: str) -> Config:
    return load(store.get(config_entry(sha256)).decode(), sha256)


def run_manifests(store: Store, run: Run, stages: Sequence[Stage]) -> dict[str, Manifest]:
    """Returns a map from the names of the run's finished stages to their manifests (records of the stages' results), in
    the order of ``stages``."""
    names = [stage.name for stage in stages]
    found = side_by_side(lambda name: read_manifest(store, run.name, name), names)
    return {name: manifest for name, manifest in zip(names, found, strict=True) if manifest is not None}


def fetch_output(store: Store, run: Run, stage: str, output: str, folder: Path) -> Path:
    """Copies an output, such as ``policy``, of a stage of ``run`` from the store to ``folder``, and returns ``folder``.

    Raises:
        ConfigError: The stage has not finished in this run, or has no such output."""
    manifest = read_manifest(store, run.name, stage)
    if manifest is None or output not in manifest.outputs:
        raise ConfigError(f"stage {stage} of run {run.name} has made no {output}")
    store.get_folder(manifest.outputs[output], folder)
    return folder


def lock_path(home: Path, store: Store, sha256: str) -> Path:
    return home / "locks" / f"run-{hashlib.sha256(store.uri.encode()).hexdigest()[:8]}-{sha256[:24]}"


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Tries to lock the file ``path`` for the ``with`` block, without waiting, and yields whether this succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_running(home: Path, store: Store, run: Run) -> bool:
    """Returns whether a process on this machine now executes a run of this store with the configuration of ``run``."""
    path = lock_path(home, store, run.config)
    if not path.exists():
        return False
    with try_lock(path) as free:
        return not free
