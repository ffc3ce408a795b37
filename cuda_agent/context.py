"""StageContext: all that a stage may touch.

A stage is ``run(ctx) -> None``.  It reads its inputs (local folders), writes its outputs (local folders that the
executor commits as artifacts once ``run`` returns), logs metrics and saves checkpoints.  It knows nothing of Argo,
MLflow, S3 or the other stages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # whoever starts processes needs the exit codes alone, and at once
    from cuda_agent.config import Config


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of one step.  Logging the same step again (after a resume) replaces it; nothing is counted twice."""
        ...

    def progress(self, done: int, total: int, unit: str = "steps", **rates: float) -> None:
        """What the live table shows: how far the stage is, and rates such as tokens_per_second."""
        ...

    def note(self, text: str) -> None:
        """One line for the person who watches, kept with the run (a fallback taken, a gate missed)."""
        ...


class Checkpoints(Protocol):
    """The checkpoint slot of this stage's cache key."""

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """``write`` fills an empty folder; it becomes visible as a whole or not at all.  The last two are kept."""
        ...

    def load(self, read: Callable[[Path], None]) -> int | None:
        """Calls ``read`` with the newest complete checkpoint and returns its step; a corrupt one is noted and the
        one before is tried; ``None`` when there is none."""
        ...


@dataclass
class WorkerContext:
    """What a part of a stage that works in a process of its own, perhaps on another machine, has of the context."""

    name: str  # of the stage
    config: "Config"  # only the sections that the graph's table lists for this stage are there
    inputs: dict[str, Path]  # artifact name -> read-only folder
    work: Path  # scratch, gone afterwards
    cache: Path  # machine-local folder that survives runs: verdicts, baselines, builds by content
    ranks: Any = field(default=None, kw_only=True)  # the group that shares the training, where one has been opened


@dataclass
class StageContext(WorkerContext):
    outputs: dict[str, Path]  # artifact name -> empty folder to fill
    tracker: Tracker
    checkpoints: Checkpoints
    should_stop: Callable[[], bool]  # SIGTERM came: save a checkpoint and raise TryAgain
