"""Makes a page and a CSV file of the results of `cuda-agent evaluate-set`, which judges a set of solutions.

A record is one solution of the set.  Each record has exactly one outcome (a key of ``OUTCOMES``), so the numbers of all
outcomes add up to the number of records.  The page shows these numbers, claimed and measured speed-ups, scores, and the
reasons for rejections.  It is one static HTML file without scripts."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from cuda_agent.pages.charts import Drawing, factor, number
from cuda_agent.pages.page import page
from cuda_agent.pages.tables import METRICS, cell
from cuda_agent.rl.scores import Scores, fast_p
from cuda_agent.sandbox.wire import Verdict, printable

# What became of a record: a verdict's status, or the reason why there is no verdict.
OUTCOMES = {
    "ok": "correct on every check",
    "wrong": "another result than the reference",
    "build_error": "does not compile, or is no solution of its format",
    "crash": "raised an error or died",
    "timeout": "did not end in time",
    "cheat": "tried to deceive the judge",
    "no_solution": "the record holds no code",
    "unreadable": "the record or its file cannot be read",
    "no_task": "no task fits the record",
    "task_error": "the task itself cannot be run",
    "infra": "the sandbox failed, each time it was asked; the same command asks again",
    "pending": "not judged yet; the same command goes on",
}
JUDGED = ("ok", "wrong", "build_error", "crash", "timeout", "cheat")  # outcomes that are charged to the solution
LOST = ("task_error", "infra", "pending")  # outcomes that say nothing about the solution
THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)  # the values of p in fast_p
CONFIRMED = 0.9  # a claim is confirmed if this share of it is measured
_MESSAGE = 600  # most characters of a message on the page; the CSV has all


@dataclass(frozen=True)
class JudgedRow:
    """One record (a solution of the set), and its outcome.  A claim is a speed-up that the solution's author states."""

    record: str
    task: str  # empty if no task was found
    family: str
    outcome: str  # a key of OUTCOMES
    message: str = ""
    verdict: Verdict | None = None
    claim_eager: float | None = None
    claim_compile: float | None = None
    other_reference: bool = False  # whether the record was written for another version of its task

    @property
    def speedup_eager(self) -> float | None:
        return self.verdict.speedup_eager if self.verdict and self.outcome == "ok" else None

    @property
    def speedup_compile(self) -> float | None:
        return self.verdict.speedup_compile if self.verdict and self.outcome == "ok" else None


def accounts(rows: Sequence[JudgedRow]) -> list[tuple[str, int, str]]:
    """Returns (outcome, number of records, meaning) for each outcome that occurs.  The numbers add up to all rows."""
    counts = Counter(row.outcome for row in rows)
    return [(outcome, counts[outcome], says) for outcome, says in OUTCOMES.items() if counts[outcome]]


def claims(rows: Sequence[JudgedRow]) -> dict[str, Any]:
    """Compares the speed-ups over eager PyTorch that authors claim with the measured ones.  Returns an empty dict if no
    record has a claim.

    Returns:
        The number of claims under ``all``, and five numbers that add up to it.  ``confirmed``: the measured speed-up is
        at least ``CONFIRMED`` times the claim.  ``lower``: it is less.  ``untimed``: the solution is correct, but has
        no measured speed-up.  ``rejected``: it is not correct.  ``unjudged``: it has no verdict.  ``claimed`` and
        ``measured`` are geometric means of the two speed-ups over the records that have both; None without such
        records."""
    claimed = [(row, row.claim_eager) for row in rows if row.claim_eager]
    if not claimed:
        return {}
    both = [(claim, row.speedup_eager) for row, claim in claimed if row.speedup_eager]
    confirmed = sum(measured >= CONFIRMED * claim for claim, measured in both)
    correct = sum(row.outcome == "ok" for row, _ in claimed)
    rejected = sum(row.outcome in JUDGED for row, _ in claimed) - correct
    return {
        "all": len(claimed),
        "confirmed": confirmed,
        "lower": len(both) - confirmed,
        "untimed": correct - len(both),
        "rejected": rejected,
        "unjudged": len(claimed) - correct - rejected,
        "claimed": _geometric_mean(claim for claim, _ in both),
        "measured": _geometric_mean(measured for _, measured in both),
    }


def fast_rows(scores: Scores, tasks: int) -> list[tuple[float, list[float | None]]]:
    """Returns a row (p, shares) for each threshold p in ``THRESHOLDS``.

    ``shares`` holds four values of KernelBench's fast_p: the share of tasks with a correct solution that is more than p
    times as fast as a baseline.  For p = 0, every correct solution counts.  The first two values are for the baselines
    eager and ``torch.compile``, and divide by the number of scored tasks.  The other two are for the same baselines,
    and divide by ``tasks``.  If the divisor is 0, the share is None."""
    return [
        (
            p,
            [
                fast_p(scores.outcomes, p, baseline, count)
                for count in (None, tasks)
                for baseline in ("eager", "compile")
            ],
        )
        for p in THRESHOLDS
    ]


def to_csv(rows: Sequence[JudgedRow]) -> str:
    """Returns the text of a CSV file with a header and one line for each record.  An apostrophe precedes text that a
    spreadsheet would run as a formula."""
    own = ("record", "task", "family", "outcome", "claim_eager", "speedup_eager", "claim_compile", "speedup_compile")
    judged = (
        "seconds", "eager_seconds", "compile_seconds", "reward", "checks", "max_error",
        "format", "mode", "device", "clock", "advisory",
    )  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*own, *judged, "other_reference", "message"])
    for row in rows:
        values = [getattr(row, name) for name in own] + [getattr(row.verdict, name, None) for name in judged]
        writer.writerow([_cell(value) for value in (*values, row.other_reference, row.message)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@") else text


def render(
    name: str, rows: Sequence[JudgedRow], scores: Scores, tasks: int, skipped: Sequence[str], facts: Sequence[str]
) -> str:
    """Returns the page as HTML.

    Args:
        name: The name of the set.
        rows: All records.
        scores: The scores of the judged records.
        tasks: The divisor for fast_p (see ``fast_rows``).  It is the number of tasks in the set, minus those that could
            not be scored for reasons outside of the solutions (outcomes in ``LOST``).
        skipped: Files of the input that hold no solution.
        facts: Short texts about the evaluation, such as its mode, for the head of the page."""
    several = len(scores.outcomes) > len({outcome.task for outcome in scores.outcomes})
    kinds = (("final", "Every sample"), ("best", "The best sample of each task"))
    return page(
        "judged_set.html.j2",
        styles=("judged_set.css",),
        name=name,
        rows=rows,
        judged=JUDGED,
        lost=LOST,
        accounts=accounts(rows),
        claims=claims(rows),
        confirmed=CONFIRMED,
        chart=_chart(rows),
        scored=scores.final.overall.tasks,
        tasks=tasks,
        clock=scores.clock,
        fast=fast_rows(scores, tasks),
        metrics=METRICS,
        cell=cell,
        tables=[
            (title, [table.overall, *(table.families if len(table.families) > 1 else [])])
            for which, title in (kinds if several else kinds[:1])
            for table in [getattr(scores, which)]
        ],
        several=several,
        skipped=skipped,
        facts=facts,
        brief=lambda text: text if len(text) <= _MESSAGE else text[:_MESSAGE] + " …",
    )


def _geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _chart(rows: Sequence[JudgedRow]) -> Markup | None:
    """Draws the claimed (horizontal) and the measured speed-up over eager PyTorch as dots on logarithmic axes.

    Each judged record with a claim is a dot, except correct ones without a measured speed-up.  Rejected records have no
    measured speed-up either; their dots are below the axis.  A diagonal line marks equal speed-ups.  Returns None if
    there is no dot."""
    claimed = [(row, row.claim_eager) for row in rows if row.claim_eager and row.outcome in JUDGED]
    points = [(row, min(max(claim, 1e-6), 1e9), row.speedup_eager) for row, claim in claimed]  # any number is claimed
    points = [point for point in points if point[2] or point[0].outcome != "ok"]  # without correct ones of no time
    if not points:
        return None
    known = [value for _, claim, measured in points for value in (claim, measured) if value]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)) + 1e-9)
    low, high = (low, high) if high > low else (low, low + 1)
    width, height, left, top, right, bottom = 720, 440, 62, 10, 16, 66
    floor = height - bottom
    chart = Drawing(width, height, "chart wide")

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (width - left - right)

    def y(value: float) -> float:
        return floor - (math.log10(value) - low) / (high - low) * (floor - top)

    labelled = (1, 2, 5) if high - low <= 3 else (1,)  # more labels would overlap
    for exponent in range(low, high + 1):
        for mark, lead in ((m * 10.0**exponent, m) for m in (1, 2, 5)):
            if mark <= 10.0**high * 1.0001:
                css = "grid one" if mark == 1 else "grid"
                chart.line(css, left, y(mark), width - right, y(mark))
                chart.line(css, x(mark), top, x(mark), floor)
                if lead in labelled:
                    chart.text("tick", left - 7, y(mark) + 4, f"{number(mark)}×", "end")
                    chart.text("tick", x(mark), height - 22, f"{number(mark)}×", "middle")
    chart.line("rule", x(10.0**low), y(10.0**low), x(10.0**high), y(10.0**high))
    chart.text("tick", left - 7, floor + 22, "rejected", "end")
    chart.text("tick", width - right, height - 5, "claimed", "end")
    chart.text("tick", left + 6, top + 12, "measured")
    for row, claim, measured in points:
        said = factor(measured) if measured else row.outcome.replace("_", " ")
        title = f"{row.record}: claimed {factor(claim)}, {said}"
        chart.dot("dot" if measured else "dot miss", x(claim), y(measured) if measured else floor + 18, 4, title)
    return chart.svg(f"Measured over claimed speed-up of {len(points)} solutions")
