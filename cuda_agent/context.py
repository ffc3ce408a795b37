"""StageContext: the interface of a stage to its surroundings.

A stage is ``run(ctx) -> None``.  It reads its inputs (local folders), fills its outputs (local folders that the
executor commits as artifacts once ``run`` returns), logs metrics and saves checkpoints.  It does not depend on Argo,
MLflow, S3 or other stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # processes that only start others need the exit codes quickly
    from cuda_agent.config import Config


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of one step.  Logging a step again (after a resume) replaces its values."""

    def progress(self, done: int, total: int, unit: str = "steps", **rates: float) -> None:
        """Sets the progress in the live table, with rates such as tokens_per_second."""

    def note(self, text: str) -> None:
        """Adds one line for the user, kept with the run (a fallback taken, a gate missed)."""


class Checkpoints(Protocol):
    """The checkpoint slot of this stage's cache key."""

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Calls ``write`` to fill an empty folder, which then becomes visible atomically.  The last two checkpoints are
        kept."""

    def load(self, read: Callable[[Path], None]) -> int | None:
        """Calls ``read`` with the newest complete checkpoint and returns its step, or None if there is none.  A corrupt
        checkpoint is noted, and the one before is tried."""


@dataclass
class WorkerContext:
    """The part of the context that a worker process of the stage gets, perhaps on another machine."""

    name: str  # of the stage
    config: "Config"  # only the sections that the graph lists for this stage
    inputs: dict[str, Path]  # artifact name -> read-only folder
    work: Path  # scratch folder, removed afterwards
    cache: Path  # machine-local folder that survives runs: verdicts, baselines, builds by content
    ranks: Any = field(default=None, kw_only=True)  # process group of the trainer, if one is open


@dataclass
class StageContext(WorkerContext):
    outputs: dict[str, Path]  # artifact name -> empty folder to fill
    tracker: Tracker
    checkpoints: Checkpoints
    should_stop: Callable[[], bool]  # after SIGTERM: save a checkpoint and raise TryAgain
