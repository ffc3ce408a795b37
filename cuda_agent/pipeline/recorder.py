"""Records a run in MLflow: a parent run with one child run per stage.  Works on one machine and in a cluster's pods.

A thread of ``tracking.Mirror`` sends the records to MLflow.  The method ``close`` waits for MLflow.  No other method
does."""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cuda_agent.compose import flat
from cuda_agent.config import Config
from cuda_agent.context import SCORE
from cuda_agent.errors import EXIT_DONE, EXIT_RETRY
from cuda_agent.pipeline.graph import ROWS, Stage, policy_of
from cuda_agent.pipeline.manifest import Manifest
from cuda_agent.pipeline.runs import agree, store_id
from cuda_agent.storage import Store
from cuda_agent.tracking import MANIFEST_TAG, POLICY_TAG, RELEASE_TAG, Metrics, Mirror, Sweep, read_metrics, read_notes

NOTES_CHARACTERS = 4000  # most characters of a stage's notes in a tag
_EVALUATIONS = [row.name for row in ROWS if row.about]  # the place in this list is the step of a run's scores


class Recorder:
    """Records one run in MLflow.  Call ``close`` at the end.

    Args:
        uri: MLflow's address, or ``off`` to record nothing.
        sha256: Hash of ``config``.
        run: Name of the run.
        stages: The stages of the run's graph.
        trouble: Function that is called with a message, from another thread, when MLflow first fails.
        artifacts: Folder for artifacts if ``uri`` is a local database, or None if MLflow's server stores them.
        submitter: User who started the run; empty: unknown."""

    def __init__(
        self,
        uri: str,
        store: Store,
        config: Config,
        sha256: str,
        run: str,
        stages: Sequence[Stage],
        trouble: Callable[[str], None],
        artifacts: Path | None = None,
        submitter: str = "",
    ) -> None:
        self._store, self._config = store, config
        self._sections = {stage.name: stage.config for stage in stages}
        self._mirror: Mirror | None = None
        self._scores: Metrics = {}
        if uri == "off":
            return
        name = config.run.sweep
        sweep = Sweep(name, partial(agree, store, f"sweeps/{name}/mlflow")) if name else None
        self._mirror = Mirror(uri, config.run.pipeline, run, artifacts, trouble, sweep, store_id(store))
        self._folder = tempfile.TemporaryDirectory()
        resolved = Path(self._folder.name) / "config.json"
        resolved.write_text(config.model_dump_json(indent=1))
        tags = {"config": sha256, "store": store.uri} | ({"mlflow.user": submitter} if submitter else {})
        if release := os.environ.get("CUDA_AGENT_RELEASE"):
            tags[RELEASE_TAG] = release
        self._mirror.update(None, params=flat(config), tags=tags, artifacts=[resolved])

    def running(self, stage: str, scratch: Path) -> None:
        """Records that ``stage`` is running.  Also records the metrics that the stage has written to its folder
        ``scratch`` so far."""
        self._update(stage, metrics=read_metrics(scratch / "metrics.jsonl"), status="RUNNING")

    def finished(self, stage: str, manifest: Manifest) -> list[str]:
        """Records a finished stage in MLflow: settings, metrics, notes, and the name of the run that computed the
        result (an earlier run if the result came from the cache).  The scores of an evaluation also become metrics of
        the parent run.  There each policy has its own step, so MLflow lists runs by the scores of their last policy.
        Returns the stage's notes, which are messages for the user, such as warnings.  If the recorder's ``uri`` is
        ``off``, records nothing and returns an empty list."""
        if self._mirror is None:
            return []
        with tempfile.TemporaryDirectory() as folder:
            self._store.get_folder(manifest.metrics, Path(folder))
            metrics = read_metrics(Path(folder) / "metrics.jsonl")
            notes = read_notes(Path(folder) / "notes.jsonl")
        tags = {"key": manifest.key, "made by": manifest.run, "seconds": str(manifest.seconds)}
        tags |= {MANIFEST_TAG: manifest.to_bytes().decode()}  # users with a kubeconfig read the manifest here
        tags |= {"notes": "\n".join(notes)[:NOTES_CHARACTERS]} if notes else {}
        self._update(stage, metrics=metrics, tags=tags, status="FINISHED")
        if manifest.scores:
            step = _EVALUATIONS.index(stage)
            self._scores[step] = {f"{SCORE}{name}": value for name, value in manifest.scores.items()}
            last = policy_of(_EVALUATIONS[max(self._scores)], self._config.sandbox.clock)
            self._mirror.update(None, metrics=self._scores, tags={POLICY_TAG: last})
        return notes

    def failed(self, stage: str, code: int) -> None:
        """Records that ``stage`` ended with exit code ``code``: as KILLED for 75 (try again), else as FAILED."""
        self._update(stage, status="KILLED" if code == EXIT_RETRY else "FAILED")

    def keep(self, stage: str, files: Sequence[Path]) -> None:
        """Copies ``files`` of a stage, such as its log, to MLflow.  The files must exist until ``close``."""
        self._update(stage, artifacts=[file for file in files if file.exists()])

    def attach(self, path: Path) -> None:
        """Copies a file, or all files of a folder such as the report, to MLflow, beside the run.  It must exist until
        ``close``."""
        if self._mirror:
            self._mirror.update(None, artifacts=[path])

    def ended(self, code: int) -> None:
        if self._mirror:
            self._mirror.update(None, status={EXIT_DONE: "FINISHED", EXIT_RETRY: "KILLED"}.get(code, "FAILED"))

    def close(self, seconds: float) -> bool:
        """Waits at most ``seconds`` until MLflow has all records.  Returns whether MLflow has them."""
        if self._mirror is None:
            return True
        arrived = self._mirror.close(seconds)
        self._folder.cleanup()
        return arrived

    def _update(self, stage: str, **facts: Any) -> None:
        if self._mirror:
            sections = self._sections[stage]
            settings = {k: value for k, value in flat(self._config).items() if {k, k.split(".")[0]} & set(sections)}
            self._mirror.update(stage, params=settings, **facts)
