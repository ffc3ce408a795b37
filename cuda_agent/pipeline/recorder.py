"""The record of a run in MLflow, the same from one machine and from a cluster's pods: a parent run, a child a stage.

Every call states what should be there and returns at once (``tracking.Mirror`` copies).  With the address ``off`` every
call does nothing.  Not covered: the store, which is the record that results come from.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda_agent.compose import flat
from cuda_agent.config import Config
from cuda_agent.errors import EXIT_DONE, EXIT_RETRY
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.graph import Stage
from cuda_agent.pipeline.manifest import Manifest
from cuda_agent.storage import Store
from cuda_agent.tracking import MANIFEST_TAG, Mirror, read_metrics, read_notes

NOTES_CHARACTERS = 4000  # of a stage's notes, as a tag


class Recorder:
    """Open from the first call until ``close``.

    Args:
        uri: MLflow's address, or ``off``.
        stages: the run's graph.
        trouble: gets one line, from another thread, when MLflow cannot be reached.
        artifacts: folder of a local database's artifacts; none: the server keeps them."""

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
    ) -> None:
        self._store, self._config = store, config
        self._sections = {stage.name: stage.config for stage in stages}
        self._mirror: Mirror | None = None
        if uri == "off":
            return
        sweep = runs.sweep_of(store, config)
        self._mirror = Mirror(uri, config.run.pipeline, run, artifacts, trouble, sweep)
        self._folder = tempfile.TemporaryDirectory()
        resolved = Path(self._folder.name) / "config.json"
        resolved.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
        tags = {"config": sha256, "store": store.uri}
        self._mirror.update(None, params=flat(config), tags=tags, artifacts=[resolved])

    def running(self, stage: str, scratch: Path) -> None:
        """A stage that is under way; ``scratch`` has its metrics."""
        self._update(stage, metrics=read_metrics(scratch / "metrics.jsonl"), status="RUNNING")

    def finished(self, stage: str, manifest: Manifest) -> list[str]:
        """A finished stage: its settings, metrics and notes, and where they came from.  Returns its notes."""
        if self._mirror is None:
            return []
        with tempfile.TemporaryDirectory() as folder:
            self._store.get_folder(manifest.metrics, Path(folder))
            metrics = read_metrics(Path(folder) / "metrics.jsonl")
            notes = read_notes(Path(folder) / "notes.jsonl")
        tags = {"key": manifest.key, "made by": manifest.run, "seconds": str(manifest.seconds)}
        tags |= {MANIFEST_TAG: manifest.to_bytes().decode()}  # people with a kubeconfig read it here
        tags |= {"notes": "\n".join(notes)[:NOTES_CHARACTERS]} if notes else {}
        self._update(stage, metrics=metrics, tags=tags, status="FINISHED")
        return notes

    def failed(self, stage: str, code: int) -> None:
        """A stage that ended with this exit code; 75 may be tried again."""
        self._update(stage, status="KILLED" if code == EXIT_RETRY else "FAILED")

    def keep(self, stage: str, files: Sequence[Path]) -> None:
        """Files of a stage that people read: its log, its episodes.  They must stay until ``close``."""
        self._update(stage, artifacts=[file for file in files if file.exists()])

    def report(self, folder: Path) -> None:
        """The run's report.  The folder must stay until ``close``."""
        if self._mirror:
            self._mirror.update(None, artifacts=[folder])

    def ended(self, code: int) -> None:
        """The run has ended with this exit code."""
        if self._mirror:
            self._mirror.update(None, status={EXIT_DONE: "FINISHED", EXIT_RETRY: "KILLED"}.get(code, "FAILED"))

    def close(self, seconds: float) -> bool:
        """Waits so long at most for the last copy; whether everything arrived."""
        if self._mirror is None:
            return True
        arrived = self._mirror.close(seconds)
        self._folder.cleanup()
        return arrived

    def _update(self, stage: str, **facts: Any) -> None:
        if self._mirror:
            sections = self._sections[stage]
            settings = {key: value for key, value in flat(self._config).items() if key.split(".")[0] in sections}
            self._mirror.update(stage, params=settings, **facts)


@contextmanager
def recording(*args: Any, seconds: float, **options: Any) -> Iterator[Recorder]:
    """A ``Recorder`` that is closed at the end, after ``seconds`` at most."""
    recorder = Recorder(*args, **options)
    try:
        yield recorder
    finally:
        recorder.close(seconds)
