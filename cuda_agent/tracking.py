"""What a run says of itself: metrics, progress and notes.

The stage's side (``FileTracker``) writes three files into a folder; they travel with checkpoints, so after a resume
they say exactly what the checkpoint knew.  The host's side (``Mirror``) copies them into MLflow from a background
thread that compares what should be there with what is: losing MLflow for a while, or for good, neither stops nor
slows a run, and a retry lands in the same MLflow run.

    metrics.jsonl    {"step": 3, "reward": 1.25, ...} a line; a later line of the same (key, step) replaces the value
    notes.jsonl      {"text": ...} a line
    progress.json    {"done", "total", "unit", "rates"}, only while the stage runs

What it does not cover: where the files go in the end (``pipeline``), and who reads them.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Metrics = dict[int, dict[str, float]]  # step -> key -> value


class FileTracker:
    """The tracker of one stage; see ``stages.context.Tracker``."""

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
        now = time.monotonic()
        if now - self._shown < 0.1 and done < total:
            return
        self._shown = now
        _replace(
            self._folder / "progress.json", json.dumps({"done": done, "total": total, "unit": unit, "rates": rates})
        )

    def note(self, text: str) -> None:
        if text not in self.notes():
            self._append("notes.jsonl", {"text": text})

    def notes(self) -> list[str]:
        return read_notes(self._folder / "notes.jsonl")

    def save(self, folder: Path) -> None:
        """Writes metrics, one line a step, and notes into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        write_metrics(folder / "metrics.jsonl", read_metrics(self._folder / "metrics.jsonl"))
        notes = self._folder / "notes.jsonl"
        (folder / "notes.jsonl").write_bytes(notes.read_bytes() if notes.exists() else b"")

    def restore(self, folder: Path) -> None:
        """Goes back to what ``save`` wrote; anything logged since is forgotten."""
        for name in ("metrics.jsonl", "notes.jsonl"):
            _replace(self._folder / name, (folder / name).read_text())

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with open(self._folder / name, "a") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> Metrics:
    """Steps in order, the last value of each (key, step); empty when there is no file, a torn last line is ignored."""
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
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


# MLflow ---------------------------------------------------------------------------------------------------------------

# A run of MLflow is found again by these tags, so a second process of the same run writes into the same place.
RUN_TAG, STAGE_TAG = "cuda_agent.run", "cuda_agent.stage"
SWEEP_TAG, PARENT_TAG = "cuda_agent.sweep", "mlflow.parentRunId"
MANIFEST_TAG = "manifest"  # of a stage that is done: its manifest


@dataclass(frozen=True)
class Sweep:
    """Runs that stand below one parent.  ``agree`` gives the MLflow run that is the parent: that of whoever was first,
    or what its argument makes."""

    name: str
    agree: Callable[[Callable[[], str]], str]


@dataclass
class Entry:
    """What MLflow should say of one run: the workflow itself, or one of its stages."""

    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    artifacts: list[Path] = field(default_factory=list)  # files and folders, which must stay until ``close``
    status: str = "RUNNING"  # of MLflow: RUNNING, FINISHED, FAILED, KILLED


@dataclass
class _Sent:
    """What MLflow is known to hold of one entry."""

    run_id: str
    params: set[str]
    tags: dict[str, str]
    points: set[tuple[str, int]]
    status: str
    artifacts: set[Path] = field(default_factory=set)


class Mirror:
    """Copies the entries of one workflow into MLflow: one experiment a pipeline, a parent run, one child run a stage.

    ``update(stage, ...)`` states what should be there (stage ``None``: the parent) and returns at once.  ``close``
    waits at most ``timeout`` seconds for the last copy and says whether everything arrived.  ``trouble`` is called
    once, from the thread, with a line for the person who watches."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        run: str,
        artifacts: Path | None,
        trouble: Callable[[str], None],
        sweep: Sweep | None = None,
    ) -> None:
        self._sweep = sweep
        self._uri, self._experiment, self._run, self._artifacts, self._trouble = (
            uri,
            experiment,
            run,
            artifacts,
            trouble,
        )
        self._entries: dict[str | None, Entry] = {None: Entry()}
        self._sent: dict[str | None, _Sent] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def update(
        self,
        stage: str | None,
        *,
        params: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        metrics: Metrics | None = None,
        artifacts: list[Path] | None = None,
        status: str | None = None,
    ) -> None:
        with self._lock:
            entry = self._entries.setdefault(stage, Entry())
            entry.params |= params or {}
            entry.tags |= tags or {}
            entry.metrics = entry.metrics if metrics is None else metrics
            entry.artifacts += [path for path in artifacts or [] if path not in entry.artifacts]
            entry.status = status or entry.status
        self._changed.set()

    def close(self, timeout: float) -> bool:
        self._closing.set()
        self._changed.set()
        return self._arrived.wait(timeout)

    def _work(self) -> None:
        client, told, pause = None, False, 1.0
        while True:
            self._changed.wait()
            self._changed.clear()
            closing = self._closing.is_set()
            try:
                client = client or _client(self._uri)
                self._sync(client)
                pause = 1.0
                if closing:
                    self._arrived.set()
                    return
            except Exception as error:  # whatever MLflow does, the run goes on
                if not told:
                    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                    self._trouble(f"MLflow at {self._uri} is away ({reason}); metrics are kept in the store.")
                    told = True
                self._sent.clear()  # look again what is there
                self._changed.set()
                pause = min(2 * pause, 30.0)
            time.sleep(0.2 if closing or self._closing.is_set() else pause)

    def _sync(self, client: Any) -> None:
        with self._lock:
            entries = {
                stage: Entry(dict(e.params), dict(e.tags), dict(e.metrics), list(e.artifacts), e.status)
                for stage, e in self._entries.items()
            }
        for stage, entry in entries.items():
            if stage not in self._sent:
                self._sent[stage] = self._find_or_make(client, stage)
            _send(client, self._sent[stage], entry)

    def _find_or_make(self, client: Any, stage: str | None) -> _Sent:
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            location = self._artifacts.absolute().as_uri() if self._artifacts else None
            experiment_id = client.create_experiment(self._experiment, artifact_location=location)
        else:
            experiment_id = experiment.experiment_id
        tags = {RUN_TAG: self._run, STAGE_TAG: stage or ""}
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = client.search_runs([experiment_id], query, max_results=1)
        if not found:
            tags["mlflow.runName"] = stage or self._run
            if stage is not None:
                tags[PARENT_TAG] = self._sent[None].run_id
            elif self._sweep is not None:
                tags |= {SWEEP_TAG: self._sweep.name, PARENT_TAG: _sweep_run(client, experiment_id, self._sweep)}
            found = [client.create_run(experiment_id, tags=tags)]
        run = found[0]
        points = {
            (key, point.step) for key in run.data.metrics for point in client.get_metric_history(run.info.run_id, key)
        }
        return _Sent(run.info.run_id, set(run.data.params), dict(run.data.tags), points, run.info.status)


def _sweep_run(client: Any, experiment_id: str, sweep: Sweep) -> str:
    """The parent of all runs of a sweep.  It has no end of its own: the runs below it say how they ended."""
    made: list[str] = []

    def make() -> str:
        tags = {SWEEP_TAG: sweep.name, RUN_TAG: "", STAGE_TAG: "", "mlflow.runName": sweep.name}
        made.append(client.create_run(experiment_id, tags=tags).info.run_id)
        client.set_terminated(made[-1], "FINISHED")
        return made[-1]

    agreed = sweep.agree(make)
    for run_id in made:
        if run_id != agreed:  # somebody was first
            client.delete_run(run_id)
    return agreed


def _client(uri: str) -> Any:
    """Imports MLflow, which takes seconds, and opens the store, which takes seconds more the first time."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri)


def _send(client: Any, sent: _Sent, entry: Entry) -> None:
    """Sends what is not there yet."""
    from mlflow.entities import Metric, Param, RunTag

    run_id, now = sent.run_id, int(time.time() * 1000)
    if entry.status == "RUNNING" and sent.status != "RUNNING":
        client.update_run(run_id, "RUNNING")
        sent.status = "RUNNING"
    params = [Param(key, str(value)[:6000]) for key, value in entry.params.items() if key not in sent.params]
    tags = [RunTag(key, value) for key, value in entry.tags.items() if sent.tags.get(key) != value]
    points = [
        Metric(key, value, now, step)
        for step, values in entry.metrics.items()
        for key, value in values.items()
        if (key, step) not in sent.points
    ]
    for start in range(0, max(len(params), len(tags)), 90):
        client.log_batch(run_id, params=params[start : start + 90], tags=tags[start : start + 90])
    for start in range(0, len(points), 900):
        client.log_batch(run_id, metrics=points[start : start + 900])
    sent.params |= {param.key for param in params}
    sent.tags |= entry.tags
    sent.points |= {(point.key, point.step) for point in points}
    for path in entry.artifacts:
        if path not in sent.artifacts:
            client.log_artifacts(run_id, str(path)) if path.is_dir() else client.log_artifact(run_id, str(path))
            sent.artifacts.add(path)
    if entry.status != sent.status:
        client.set_terminated(run_id, entry.status)
        sent.status = entry.status
