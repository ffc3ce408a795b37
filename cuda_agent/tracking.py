"""Records metrics, notes and progress of stages (the steps of the training workflow) in files, and mirrors runs of the
workflow in MLflow.

A stage writes three files through ``FileTracker``.  The stage's checkpoints contain the first two:

    metrics.jsonl    {"step": 3, "reward": 1.25, ...} per line; the last value of a step and key counts
    notes.jsonl      {"text": ...} per line
    progress.json    {"done": 3, "total": 10, "unit": "steps", "rates": {...}}, only while the stage runs

``Mirror`` copies the records of one run of the workflow to MLflow.  It works in a thread, so the workflow does not wait
for MLflow.  In MLflow the workflow has a parent run, and each stage has a child run.  When a stage is retried, it
continues its earlier child run."""

import contextlib
import copy
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent import mlflow_api
from cuda_agent.mlflow_api import MlflowEntry

Metrics = dict[int, dict[str, float]]  # step -> key -> value
Trouble = Callable[[str], None]  # receives one line for the user


class FileTracker:
    """Writes metrics, progress and notes of one stage to files in ``folder``.  Implements the interface
    ``context.Tracker``, which describes ``log``, ``progress`` and ``note``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shown = 0.0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = {key: float(value) for key, value in metrics.items()}
        for key in [key for key, value in values.items() if not math.isfinite(value)]:
            self.note(f"{key} was {values.pop(key)} at step {step}")
        self._append("metrics.jsonl", {"step": int(step)} | values)

    def progress(self, done: int, total: int, unit: str = "steps", **rates: float) -> None:
        if time.monotonic() - self._shown > 0.1 or done >= total:
            self._shown = time.monotonic()
            now = {"done": done, "total": total, "unit": unit, "rates": rates}
            write_whole(self._folder / "progress.json", json.dumps(now))

    def note(self, text: str) -> None:
        if text not in self.notes():
            self._append("notes.jsonl", {"text": text})

    def notes(self) -> list[str]:
        return read_notes(self._folder / "notes.jsonl")

    def save(self, folder: Path) -> None:
        """Writes the metrics, one line per step, and the notes to files in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        write_metrics(folder / "metrics.jsonl", read_metrics(self._folder / "metrics.jsonl"))
        notes = self._folder / "notes.jsonl"
        (folder / "notes.jsonl").write_bytes(notes.read_bytes() if notes.exists() else b"")

    def restore(self, folder: Path) -> None:
        """Replaces all metrics and notes with those that ``save`` wrote to ``folder``."""
        for name in ("metrics.jsonl", "notes.jsonl"):
            write_whole(self._folder / name, (folder / name).read_text())

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with open(self._folder / name, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> Metrics:
    """Returns the metrics in a file, sorted by step.  Of several values for one step and key, the last one counts."""
    steps: Metrics = {}
    for line in _lines(path):
        step = line.pop("step")
        steps.setdefault(step, {}).update(line)
    return dict(sorted(steps.items()))


def write_metrics(path: Path, metrics: Metrics) -> None:
    path.write_text("".join(json.dumps({"step": step} | values) + "\n" for step, values in sorted(metrics.items())))


def read_notes(path: Path) -> list[str]:
    return [line["text"] for line in _lines(path)]


def read_progress(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return json.loads(path.read_text())
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


def write_whole(path: Path, text: str) -> None:
    """Replaces the content of the file at ``path`` with ``text``, atomically."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


# MLflow ---------------------------------------------------------------------------------------------------------------

# ``Mirror`` finds an MLflow run by these tags, so that a second process of the same run writes to the same place.
RUN_TAG, STAGE_TAG = "cuda_agent.run", "cuda_agent.stage"
SWEEP_TAG, PARENT_TAG = "cuda_agent.sweep", "mlflow.parentRunId"
MANIFEST_TAG = "manifest"  # the manifest of a finished stage
STORE_TAG = "store id"  # of the workflow's run: two stores may have the same URI, on two servers
RELEASE_TAG = "release"  # of the workflow's run: namespace/name of the chart's release, on a cluster
POLICY_TAG = "policy"  # of the workflow's run: the policy with the last scores


@dataclass(frozen=True)
class Sweep:
    """A sweep: several runs of the workflow with different settings.  In MLflow they share one parent run.

    ``name`` is the name of the sweep.  ``agree(make)`` returns the parent's id in MLflow.  All runs of the sweep get
    the same id.  If no id is stored yet, ``agree`` calls ``make``, which creates a parent run and returns its id."""

    name: str
    agree: Callable[[Callable[[], str]], str]


@dataclass
class Wanted:
    """The content that one MLflow run should have.  The MLflow run belongs to the workflow or to one of its stages."""

    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    artifacts: dict[Path, None] = field(default_factory=dict)  # files and folders to upload; must exist until ``close``
    status: str = "RUNNING"  # RUNNING, FINISHED, FAILED or KILLED, as in MLflow


class Mirror:
    """Copies the records of one run of the workflow to MLflow, in a thread.  In MLflow the workflow has a parent run,
    and each stage has a child run.

    ``update`` says what the child run of ``stage`` should contain, or the parent run if ``stage`` is None.  It adds
    params, tags and artifacts, replaces metrics and status, and returns at once.  The thread then sends the changes.
    ``close`` waits at most ``timeout`` seconds until all changes are sent, and returns whether they are.  When MLflow
    fails for the first time, the thread calls ``trouble`` with one line for the user.  If MLflow refuses the user, the
    thread ends: to ask again is no use."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        run: str,
        artifacts: Path | None,
        trouble: Trouble,
        sweep: Sweep | None = None,
        store: str = "",
    ) -> None:
        self._uri, self._experiment, self._run, self._artifacts = uri, experiment, run, artifacts
        self._store = store
        self._trouble, self._sweep = trouble, sweep
        self._entries: dict[str | None, Wanted] = {None: Wanted()}
        self._there: dict[str, MlflowEntry] | None = None  # stage (empty: the workflow) -> what MLflow holds
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._arrived = threading.Event()  # also if MLflow refuses
        self._refused = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def update(
        self,
        stage: str | None,
        *,
        params: Mapping[str, Any] = {},
        tags: Mapping[str, str] = {},
        metrics: Metrics | None = None,
        artifacts: Sequence[Path] = (),
        status: str = "",
    ) -> None:
        with self._lock:
            entry = self._entries.setdefault(stage, Wanted())
            entry.params |= params
            entry.tags |= tags
            entry.metrics = entry.metrics if metrics is None else metrics
            entry.artifacts |= dict.fromkeys(artifacts)
            entry.status = status or entry.status
        self._changed.set()

    def close(self, timeout: float) -> bool:
        self._closing.set()
        self._changed.set()
        return self._arrived.wait(timeout) and not self._refused

    def _work(self) -> None:
        api, warned, pause = None, False, 1.0
        while True:
            self._changed.wait()
            self._changed.clear()
            closing = self._closing.is_set()
            try:
                api = api or mlflow_api.connect(self._uri)
                self._sync(api)
                pause = 1.0
                if closing:
                    self._arrived.set()
                    return
            except Exception as error:  # a failure of MLflow must not stop the run
                if refused := mlflow_api.refusal(error):
                    self._trouble(f"{refused} Metrics are kept in the store.")
                    self._refused = True
                    self._arrived.set()
                    return
                if not warned:
                    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                    self._trouble(f"MLflow at {self._uri} is away ({reason}); metrics are kept in the store.")
                    warned = True
                self._there = None  # read the present state again
                self._changed.set()
                pause = min(2 * pause, 30.0)
            if closing:
                time.sleep(0.2)
            else:
                self._closing.wait(pause)

    def _sync(self, api: mlflow_api.Api) -> None:
        with self._lock:
            wanted = copy.deepcopy({stage or "": entry for stage, entry in self._entries.items()})
        if self._there is None:
            place = self._artifacts.absolute().as_uri() if self._artifacts else None
            self._experiment_id = api.experiment(self._experiment, place)
            found = api.find([self._experiment_id], RUN_TAG, self._run)
            found = with_tag(found, STORE_TAG, self._store) if self._store else found
            self._there = {entry.tags.get(STAGE_TAG, ""): entry for entry in reversed(found)}
        for stage, entry in wanted.items():
            if stage not in self._there:
                tags = {RUN_TAG: self._run, STAGE_TAG: stage, "mlflow.runName": stage or self._run}
                tags |= {STORE_TAG: self._store} if self._store and not stage else {}
                if stage:
                    tags[PARENT_TAG] = self._there[""].run_id
                elif self._sweep is not None:
                    tags |= {SWEEP_TAG: self._sweep.name, PARENT_TAG: _sweep_run(api, self._experiment_id, self._sweep)}
                self._there[stage] = api.create(self._experiment_id, tags)
            _send(api, self._there[stage], entry)


def with_tag(found: Sequence[MlflowEntry], name: str, *values: str) -> list[MlflowEntry]:
    """Returns those MLflow runs in ``found`` whose tag ``name`` has one of ``values``, of runs of the workflow, and
    those of their stages, which lack the tag.  The value "" stands for runs without the tag."""
    of_runs = (entry for entry in found if not entry.tags.get(STAGE_TAG))
    parents = {entry.run_id for entry in of_runs if entry.tags.get(name, "") in values}
    return [entry for entry in found if {entry.run_id, entry.tags.get(PARENT_TAG)} & parents]


def _sweep_run(api: mlflow_api.Api, experiment: str, sweep: Sweep) -> str:
    made = ""

    def make() -> str:
        nonlocal made
        tags = {SWEEP_TAG: sweep.name, RUN_TAG: "", STAGE_TAG: "", "mlflow.runName": sweep.name}
        made = api.create(experiment, tags).run_id
        api.end(made, "FINISHED")
        return made

    agreed = sweep.agree(make)
    if made not in ("", agreed):  # another process was first
        api.delete(made)
    return agreed


def _send(api: mlflow_api.Api, there: MlflowEntry, wanted: Wanted) -> None:
    """Updates the MLflow run ``there`` so that its content becomes ``wanted``.  Sends only what is missing in MLflow.
    Sends a final status, such as FINISHED, last."""
    if there.status == wanted.status == "FINISHED" and wanted.tags and wanted.tags.items() <= there.tags.items():
        there.unread.clear()
        there.points |= {(key, step) for step, values in wanted.metrics.items() for key in values}
    if wanted.status == "RUNNING" and there.status != "RUNNING":
        api.end(there.run_id, "RUNNING")
        there.status = "RUNNING"
    for key in there.unread & {key for values in wanted.metrics.values() for key in values}:
        there.points |= {(key, step) for step in api.steps(there.run_id, key)}
        there.unread.remove(key)
    params = {key: str(value)[:6000] for key, value in wanted.params.items() if key not in there.params}
    tags = {key: value for key, value in wanted.tags.items() if there.tags.get(key) != value}
    known, found = there.points, wanted.metrics.items()
    points = [(key, v, step) for step, values in found for key, v in values.items() if (key, step) not in known]
    api.log(there.run_id, params, tags, points)
    there.params |= params.keys()
    there.tags |= tags
    there.points |= {(key, step) for key, _, step in points}
    for path in wanted.artifacts:
        if path not in there.artifacts:
            api.upload(there.run_id, path)
            there.artifacts.add(path)
    if wanted.status != there.status:
        api.end(there.run_id, wanted.status)
        there.status = wanted.status
