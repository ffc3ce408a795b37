"""Prepares tables and charts of scores for the report: per family of tasks, per operator, and for pairs of policies."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from cuda_agent.pages.charts import factor, interval_chart, share, stack_chart
from cuda_agent.pages.page import slug
from cuda_agent.rl.scores import FEWEST_TASKS

Data = dict[str, Any]

METRICS: tuple[tuple[str, str, str], ...] = (
    ("passed", "Pass", "correct on every check"),
    ("faster_eager", "Faster than eager", "correct, and faster than eager by any margin"),
    ("faster_compile", "Faster than compile", "correct, and faster than torch.compile by any margin"),
    ("speedup_eager", "× eager", "geometric mean speed-up over eager, correct solutions only"),
    ("speedup_compile", "× compile", "geometric mean speed-up over torch.compile, correct solutions only"),
)
GAP = ("gap", "Gap to best", "time divided by that of the best known design, geometric mean, correct solutions only")
FAMILIES = {"teacher": "The teacher’s family", "catalogue": "The full operator catalogue", "overall": "All tasks"}
STATUSES = ("ok", "wrong", "build_error", "no_answer", "crash", "timeout", "cheat")


def shown_metrics(data: Data) -> tuple[tuple[str, str, str], ...]:
    """Returns (key, title, explanation) of each metric that the score tables show.  The last one is ``gap``, a
    solution's time divided by the time of the task's best known design.  It is left out if no policy has a value for
    it."""
    tables = [policy[which] for policy in data.get("policies", []) for which in ("final", "best")]
    known = any(table["overall"].get("gap") for table in tables)
    return (*METRICS, GAP) if known else METRICS


def groups(data: Data) -> list[Data]:
    """Returns the data of the report's score section, as one dict (group) for each family of tasks.

    A group has a score table with a row for each policy, and the paired differences between the first policy and each
    later one.  Only the first group has charts.  If there are several families, a last group covers all tasks; it has
    no differences, and the page shows it folded (key ``folded``).  Returns an empty list if there are no scores."""
    policies, families = data.get("policies", []), data.get("families", [])
    if not any(p["outcomes"] for p in policies):
        return []
    shown = [*families, "overall"] if len(families) > 1 else families
    titles = {"final": "Final answer", "best": "Best of the trajectory"}
    if any(p["mode"] == "strict" for p in policies):
        titles = {"final": f"{titles['final']}, strict mode", "best": f"{titles['best']}, quick mode"}
    return [
        {
            "title": FAMILIES.get(group, group),
            "tasks": max((row["tasks"] for p in policies if (row := _row(p, "final", group))), default=0),
            "folded": i == len(families),
            "charts": _charts(policies, group, shown_metrics(data)) if i == 0 else [],
            "statuses": _statuses(policies, group) if i == 0 else None,
            "parts": [
                (title, [(p["policy"], p.get("about", ""), _row(p, which, group)) for p in policies])
                for which, title in titles.items()
            ],
            "changes": _changes(data, group),
        }
        for i, group in enumerate(shown)
    ]


def operators(policies: Sequence[Data]) -> Data:
    """Returns a table of pass rates, with a row for each operator and a column for each policy that has scores by
    operator. The keys are ``policies`` (names), ``last`` (name of the last one) and ``rows``. A row is (operator,
    number of tasks, pass rates, the last policy's speed-up over ``torch.compile`` as text). Returns an empty dict if no
    policy has such scores."""
    scored = [p for p in policies if p["final"]["operators"]]
    if not scored:
        return {}
    tables = {p["policy"]: {row["group"]: row for row in p["final"]["operators"]} for p in scored}
    last = scored[-1]["policy"]
    rows = []
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        found = {policy: table.get(name) for policy, table in tables.items()}
        tasks = max(row["tasks"] for row in found.values() if row)
        speedup = (found[last] or {}).get("speedup_compile")
        rows.append((name, tasks, [row["passed"] if row else None for row in found.values()], factor(speedup)))
    return {"policies": list(tables), "last": last, "rows": rows}


def headline(data: Data) -> Data:
    """Returns the data of the report's headline, which compares the last policy with the first one.

    ``passed`` is the change of the share of correct final answers, with its interval.  ``faster`` is the change of the
    share that is correct and faster than ``torch.compile``.  Both are for the first family of tasks.  Returns an empty
    dict if there are no scores, or only those of one policy."""
    family = (data.get("families") or [None])[0]
    found = _changes(data, family)
    if family is None or not found:
        return {}
    change, title = found[-1], FAMILIES.get(family, family)
    rows = {row["metric"]: row for row in change["differences"]}
    return {
        "before": change["before"],
        "after": change["after"],
        "family": title[0].lower() + title[1:],
        "tasks": rows["passed"]["tasks"],
        "shared": None not in (rows["passed"]["change"], rows["faster_compile"]["change"]),
        "passed": rows["passed"],
        "faster": rows["faster_compile"],
        "fewest": FEWEST_TASKS,
    }


def _changes(data: Data, group: str | None) -> list[Data]:
    return [c for c in data.get("changes", []) if c["differences"] and c["differences"][0]["group"] == group]


def _row(policy: Data, which: str, group: str) -> Data | None:
    table = policy[which]
    if group == "overall":
        return table["overall"]
    return next((row for row in table["families"] if row["group"] == group), None)


def _charts(policies: Sequence[Data], group: str, metrics: Sequence[tuple[str, str, str]]) -> list[tuple[str, Markup]]:
    figures = []
    for key, title, _ in metrics:
        entries = []
        for p in policies:
            row = _row(p, "final", group)
            value, interval = (row[key], row["intervals"].get(key)) if row else (None, None)
            entries.append((p["policy"], f"p-{slug(p['policy'])}", value, interval))
        figures.append((title, interval_chart(title, entries, _is_ratio(key))))
    return figures


def _statuses(policies: Sequence[Data], group: str) -> tuple[list[str], str]:
    """Returns (statuses, chart) for the final answers of all policies to tasks of ``group``.  A status, such as ``ok``
    or ``wrong``, says how an answer was judged.  ``statuses`` lists those that occur, and always ``ok``.  The chart is
    SVG and shows how many answers of each policy have each status."""
    counts = {
        p["policy"]: Counter(o["final"]["status"] for o in p["outcomes"] if group in (o["family"], "overall"))
        for p in policies
    }
    used = [status for status in STATUSES if status == "ok" or any(c[status] for c in counts.values())]
    rows = [(name, [(f"s-{status}", count[status]) for status in used]) for name, count in counts.items()]
    return used, stack_chart("How the answers ended", rows)


def _is_ratio(key: str) -> bool:
    return key.startswith("speedup") or key == "gap"


def cell(key: str, value: float | None, interval: Sequence[float] | None) -> tuple[str, str]:
    """Formats a score of the metric ``key`` for a table.  Returns (score, interval) as text.  The interval is "" if it
    is unknown."""
    ratio = _is_ratio(key)
    said = factor(value) if ratio else share(value)
    if value is None or not interval:
        return said, ""
    low, high = interval
    return said, f"{low:.2f}–{high:.2f}" if ratio else f"{100 * low:.0f}–{100 * high:.0f}"


def change_cell(difference: Data) -> tuple[str, str, bool]:
    """Formats a paired difference (a metric's change between two policies on the same tasks) for a table.  Returns
    (change as text, its interval as text, whether the interval excludes "no change")."""
    change, interval = difference["change"], difference["interval"]
    if change is None:
        return "–", "", False
    ratio = _is_ratio(difference["metric"])
    said = factor(change) if ratio else points(change)
    if not interval:
        return said, "", False
    low, high = interval
    none = 1.0 if ratio else 0.0
    spread = f"{low:.2f}–{high:.2f}" if ratio else f"{points(low)} to {points(high)}"
    return said, spread, not low <= none <= high


def points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")
