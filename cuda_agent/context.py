"""The interface between a stage and the program that runs it: ``StageContext``.

A stage is a function ``run(ctx) -> None``.  Through ``ctx`` it reads its input folders, fills its output folders, logs
metrics and saves checkpoints.  The program then stores the output folders as artifacts.  A stage does not depend on
Argo, MLflow, S3 or other stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # pydantic is slow to import, and some processes need only the exit codes
    from cuda_agent.config import Config

SCORE = "score/"  # begins the names of the metrics that score a policy, as in score/passed


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of one step.  If a metric is logged twice for the same step, the later value counts."""

    def progress(self, done: int, total: int, unit: str = "steps", **rates: float) -> None:
        """Shows in the live display that ``done`` of ``total`` units are done, as in "3 of 10 steps".  ``rates`` are
        further numbers to show, such as ``tokens_per_second``."""

    def note(self, text: str) -> None:
        """Adds a line of text for the user, such as a warning, to the stage's notes.  Ignores repeated lines."""


class Checkpoints(Protocol):
    """The checkpoints of one stage.  They are stored under the stage's cache key, which is a hash of everything that
    determines the stage's result."""

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Calls ``write`` to fill an empty folder, and stores the folder atomically as the checkpoint of ``step``.
        Keeps the two newest checkpoints."""

    def load(self, read: Callable[[Path], None]) -> int | None:
        """Calls ``read`` with a folder that holds the newest complete checkpoint, and returns the checkpoint's step.
        If there is no checkpoint, returns None.  If a checkpoint is damaged, adds a note and tries the previous one."""


@dataclass
class WorkerContext:
    """The part of a stage's context that the stage sends to its worker processes, which may run on other machines."""

    name: str  # name of the stage
    config: "Config"  # only the sections that the graph lists for this stage
    inputs: dict[str, Path]  # artifact name -> read-only folder
    work: Path  # scratch folder, removed after the stage
    cache: Path  # folder of this machine for verdicts, baselines and builds; it is kept between runs
    ranks: Any = field(default=None, kw_only=True)  # the trainer's group of processes, if there is one


@dataclass
class StageContext(WorkerContext):
    outputs: dict[str, Path]  # artifact name -> empty folder to fill
    tracker: Tracker
    checkpoints: Checkpoints
    should_stop: Callable[[], bool]  # after SIGTERM: save a checkpoint and raise TryAgain
