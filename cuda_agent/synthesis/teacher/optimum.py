"""Defines the results of a search for a task's best design, ``Swept`` and ``Optimum``, and stores optima in a file.

A design is one way to write the task's kernel. A sweep (``design_sweep``) times many designs of a task, and the judge
then times the fastest of them. On an H200 the judge's times are 1 to 3 us longer than the sweep's, probably because the
device runs other processes before each call. So only the judge's time of a design can be compared with the time of an
agent's solution, which the judge measures as well.

The file lies in the folder of the tasks. The filters of synthesis and the scores of an evaluation use the optima.
Episodes, rewards and training do not."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from cuda_agent.tasks.task import Task

FILE = "optimum.json"


@dataclass(frozen=True)
class Swept:
    """The result of a sweep, which times many designs of one task. Times come from the sweep, not from the judge. Each
    is the median of several calls with a cold L2 cache, in seconds."""

    eager_seconds: float
    seconds: float | None  # time of the fastest design; None if no design is right (gives correct outputs)
    median_seconds: float | None  # median over the times of all right designs; None if there is none
    right: float  # share of the draws whose design is right (0 to 1)
    fastest: tuple[str, ...] = ()  # the fastest right designs, the fastest first
    surprises: tuple[str, ...] = ()  # designs (and why they fail) that the teacher expects to be right

    @property
    def speedup(self) -> float | None:
        """The speed-up of the fastest design over eager; None if no design is right."""
        return self.eager_seconds / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Optimum:
    """The best design of one task, with times that the judge measured in quick mode, its usual mode. If the judge
    accepts none of the sweep's fastest designs, ``seconds`` and ``speedup`` are None."""

    design: str = ""
    seconds: float | None = None
    eager_seconds: float | None = None
    surprises: tuple[str, ...] = ()  # designs (and why they fail) that were right in the sweep

    @property
    def speedup(self) -> float | None:
        """The speed-up of the design over eager PyTorch; None if the judge accepted no design."""
        return self.eager_seconds / self.seconds if self.seconds and self.eager_seconds else None


class DesignSearch(Protocol):
    """A search for the best design of a task of the teacher's family (``design_sweep.Sweep`` is one). A call of the
    object times many designs of the task. ``judged`` then lets the judge time the fastest of them."""

    async def __call__(self, task: Task) -> Swept: ...
    async def judged(self, task: Task, swept: Swept) -> Optimum: ...


def write_optima(folder: Path, optima: Mapping[str, Optimum]) -> None:
    """Writes ``optima``, a mapping from a task's name to its optimum, to ``folder/optimum.json``."""
    rows = {name: asdict(optimum) for name, optimum in optima.items()}
    (folder / FILE).write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def read_optima(folder: Path) -> dict[str, Optimum]:
    """Returns the optima that ``write_optima`` wrote to ``folder``, or an empty dict if synthesis made no sweep."""
    path = folder / FILE
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: optimum_from_json(row) for name, row in rows.items()}


def optimum_from_json(row: Mapping[str, Any]) -> Optimum:
    """Returns the optimum in ``row``. A row of an earlier version has more keys, which are ignored. Its times come from
    the sweep, not from the judge."""
    return Optimum(row["design"], row["seconds"], row["eager_seconds"], tuple(row["surprises"]))


def swept_from_json(row: dict[str, Any]) -> Swept:
    return Swept(**row | {"surprises": tuple(row["surprises"]), "fastest": tuple(row["fastest"])})
