"""Reads and writes the records of runs in the store, and finds runs by name."""

import contextlib
import fcntl
import getpass
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cuda_agent.compose import load
from cuda_agent.config import Config, RunConfig
from cuda_agent.errors import EXIT_CONFIG, EXIT_DONE, EXIT_GATE, EXIT_RETRY, ConfigError
from cuda_agent.pipeline.graph import Stage
from cuda_agent.pipeline.manifest import Manifest, config_entry, read_manifest
from cuda_agent.storage import Store, local_folder

_BEGINNING = ("name", "config", "pipeline", "created", "sweep", "submitter")  # the facts in run.json
_STATUSES = {
    None: "unfinished",
    EXIT_DONE: "done",
    EXIT_RETRY: "interrupted",
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

    @classmethod
    def begun(cls, name: str, config: Config, sha256: str, submitter: str) -> "Run":
        """Returns the record of a run ``name`` that begins now; ``sha256`` is the hash of ``config``."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        return cls(name, sha256, config.run.pipeline, now, sweep=config.run.sweep or "", submitter=submitter)

    def facts(self) -> bytes:
        """Returns the content of run.json: the fields that are known when the run begins."""
        return json.dumps({name: getattr(self, name) for name in _BEGINNING}).encode()

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
        if store.create(f"runs/{record.name}/run.json", record.facts()):
            return record
    raise ConfigError(f"run.name: expected a new name, but there is a run {base} of another configuration or state.")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""


def end_run(store: Store, run: Run, code: int, stage: str, message: str) -> None:
    store.put(f"runs/{run.name}/end.json", json.dumps({"code": code, "stage": stage, "message": message}).encode())


def read_run(store: Store, name: str) -> Run:
    facts = json.loads(store.get(f"runs/{name}/run.json"))
    end = f"runs/{name}/end.json"
    return Run(**facts, **(json.loads(store.get(end)) if store.exists(end) else {}))


def list_runs(store: Store) -> list[Run]:
    """Returns all runs, oldest first."""
    names = [key.split("/")[1] for key in store.list("runs") if key.count("/") == 2 and key.endswith("/run.json")]
    return sorted((read_run(store, name) for name in names), key=lambda run: (run.created, run.name))


def newest_unfinished(store: Store, sha256: str) -> Run | None:
    return next((run for run in reversed(list_runs(store)) if run.config == sha256 and run.code != 0), None)


def find_run(store: Store, name: str) -> Run:
    """Returns the run that ``name`` selects.  ``name`` is a run's name, the beginning of a name, or ``last`` for the
    newest run.

    Raises:
        ConfigError: No run or several match; the message lists the choices."""
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
    if not store.exists(key):
        made = make()
        if store.create(key, made.encode()):
            return made
    return store.get(key).decode()


def read_config(store: Store, sha256: str) -> Config:
    return load(store.get(config_entry(sha256)).decode(), sha256)


def run_manifests(store: Store, run: Run, stages: Sequence[Stage]) -> dict[str, Manifest]:
    """Returns a map from the names of the run's finished stages to their manifests (records of the stages' results), in
    the order of ``stages``."""
    found = {stage.name: read_manifest(store, run.name, stage.name) for stage in stages}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def lock_path(home: Path, store: Store, sha256: str) -> Path:
    return home / "locks" / f"run-{hashlib.sha256(store.uri.encode()).hexdigest()[:8]}-{sha256[:24]}"


@contextlib.contextmanager
def try_lock(path: Path, shared: bool = False) -> Iterator[bool]:
    """Tries to lock the file ``path`` for the ``with`` block, without waiting, and yields whether this succeeded.
    Several processes can hold the lock at the same time if all of them pass ``shared``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_running(home: Path, store: Store, run: Run) -> bool:
    """Returns whether a process on this machine now executes a run of this store with the configuration of ``run``."""
    with try_lock(lock_path(home, store, run.config)) as free:
        return not free
