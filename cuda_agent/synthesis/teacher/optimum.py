"""Defines ``Optimum``, the result of a search for a task's best design (``design_sweep``), and stores optima in a file.

A design is one way to write the task's kernel. The file lies in the folder of the tasks. The filters of synthesis and
the scores of an evaluation use the optima. Episodes, rewards and training do not."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "optimum.json"


@dataclass(frozen=True)
class Optimum:
    """The result of a sweep: the best of many timed designs of one task. Times are median seconds of a call with a cold
    L2 cache."""

    eager_seconds: float
    seconds: float | None  # time of the best design; None if no design is right (gives correct outputs)
    median_seconds: float | None  # median over the times of all right designs; None if there is none
    right: float  # share of the randomly drawn designs that are right (0 to 1; a repeated design counts again)
    design: str = ""  # the best design
    surprises: tuple[str, ...] = ()  # designs that fail although the teacher expects them to be right; with reasons

    @property
    def speedup(self) -> float | None:
        """The speed-up of the best design over eager; None if no design is right."""
        return self.eager_seconds / self.seconds if self.seconds else None


def write_optima(folder: Path, optima: Mapping[str, Optimum]) -> None:
    """Writes ``optima`` (by the task's name) to ``folder/optimum.json``."""
    rows = {name: asdict(optimum) for name, optimum in optima.items()}
    (folder / FILE).write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def read_optima(folder: Path) -> dict[str, Optimum]:
    """Returns the optima that ``write_optima`` wrote to ``folder``, or an empty dict if synthesis made no sweep."""
    path = folder / FILE
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: from_json(row) for name, row in rows.items()}


def from_json(row: Mapping[str, object]) -> Optimum:
    return Optimum(**row | {"surprises": tuple(row["surprises"])})  # type: ignore[arg-type, operator]
