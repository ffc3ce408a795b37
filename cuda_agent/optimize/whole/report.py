"""Results of ``cuda-agent optimize --whole``: as lines for a terminal, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import Goal
from cuda_agent.optimize.verdict_text import verdict_lines
from cuda_agent.optimize.whole.folder import Spent
from cuda_agent.optimize.whole.parts import Part
from cuda_agent.pages.charts import factor
from cuda_agent.sandbox.wire import Solution, TaskSpec, Verdict, printable


@dataclass
class PartResult:
    """What became of a part."""

    part: Part
    note: str = ""  #: why the part is left out; empty if its solution is in the whole
    solution: Solution | None = None
    spec: TaskSpec | None = None  #: of the part's task
    isolated: Verdict | None = None  #: on the solution, as a solution of the part's task
    alone: Verdict | None = None  #: on the model in which this part alone is replaced
    kept: bool = False  #: whether the solution is in the result

    @property
    def expected(self) -> float | None:
        """The model's speed-up with this part alone, by Amdahl's law; None if there is no solution."""
        faster = self.isolated.speedup_eager if self.isolated else None
        return self.part.expected(faster) if faster else None

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.part.title, "names": list(self.part.names), "class": self.part.module.kind,
            "share": self.part.share, "bound": self.part.bound, "expected": self.expected, "kept": self.kept,
            "isolated": self.isolated.speedup_eager if self.isolated else None,
            "isolated_compile": self.isolated.speedup_compile if self.isolated else None,
            "integrated": self.alone.speedup_eager if self.alone else None, "note": self.note,
        }  # fmt: skip


@dataclass
class WholeOutcome:
    """What ``--whole`` found."""

    folder: Path
    results: list[PartResult]
    verdict: Verdict | None  #: strict, on the model with the kept solutions; None if none is kept
    compiled: bool  #: whether torch.compile compiles the rest of the model
    why: str  #: why the last search ended, a key of ``progress.ENDS``
    goal: Goal  #: what the user asked for, of each part and of the model
    spent: Spent  #: by all searches

    @property
    def reached(self) -> bool:
        """Whether the model reaches the goal."""
        return self.verdict is not None and self.goal.reached(self.verdict)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "outcome", "folder": str(self.folder), "why": self.why, "reached": self.reached,
            "spent": asdict(self.spent), "compiled": self.compiled,
            "parts": [result.to_json() for result in self.results],
            "verdict": self.verdict.to_json() if self.verdict else None,
        }  # fmt: skip


def part_lines(parts: Sequence[Part]) -> list[str]:
    """Returns the table of a model's parts, before the searches."""
    rows = [("part", "class", "share", "model at most", "")]
    for part in parts:
        note = f"left out: {part.left_out}" if part.left_out else ""
        rows.append((part.title, part.module.kind, f"{part.share:.0%}", factor(part.bound), note))
    rows.append(("outside of them", "", f"{max(0.0, 1 - sum(part.share for part in parts)):.0%}", "", ""))
    return _table(rows)


def outcome_lines(outcome: WholeOutcome) -> list[str]:
    """Returns the result: the gain of each part alone and in the model, then the verdict on the whole."""
    rows = [("part", "share", "part alone", "model: expected", "measured", "")]
    for result in outcome.results:
        isolated = result.isolated.speedup_eager if result.isolated else None
        alone = result.alone.speedup_eager if result.alone else None
        note = result.note if result.note else "in the result" if result.kept else ""
        rows.append((
            result.part.title, f"{result.part.share:.0%}", factor(isolated), factor(result.expected), factor(alone),
            note,
        ))  # fmt: skip
    lines = ["", *_table(rows), "(times as fast as eager PyTorch; expected: by Amdahl's law from the first two)", ""]
    if outcome.verdict is None:
        return [*lines, f"no part makes the whole model faster; {outcome.folder}/report.html tells more"]
    files = (f"{outcome.folder}/model_new.py   from model_new import ModelNew", f"{outcome.folder}/report.html")
    goal = [] if outcome.goal.is_none else [f"{outcome.goal} is {'reached' if outcome.reached else 'not reached'}"]
    verdict = replace(outcome.verdict, advice=[])  # it would be about the code that puts the solutions in
    rest = ["torch.compile compiles the rest of the model"] if outcome.compiled else []
    return [*lines, *rest, *verdict_lines(verdict), *goal, "", *files]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
