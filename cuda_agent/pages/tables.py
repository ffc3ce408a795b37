"""The report's scores as HTML: the paper's table for every set of tasks, its charts, paired differences, operators.

Pure: takes parts of ``report.json``.  Not covered: computing scores (``rl.scores``).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from cuda_agent.pages.charts import factor, interval_chart, share, stack_chart
from cuda_agent.rl.scores import FEWEST_TASKS

Data = dict[str, Any]

METRICS: tuple[tuple[str, str, str], ...] = (
    ("passed", "Pass", "correct on every check"),
    ("faster_eager", "Faster than eager", "correct, and faster than eager by any margin"),
    ("faster_compile", "Faster than compile", "correct, and faster than torch.compile by any margin"),
    ("speedup_eager", "× eager", "geometric mean speed-up over eager, correct solutions only"),
    ("speedup_compile", "× compile", "geometric mean speed-up over torch.compile, correct solutions only"),
)
FAMILIES = {"teacher": "The teacher’s family", "catalogue": "The full operator catalogue", "overall": "All tasks"}
STATUSES = ("ok", "wrong", "build_error", "no_answer", "crash", "timeout", "cheat")


def scores_section(data: Data, clock: str) -> str:
    """The first family with charts and table, the others with their table; all tasks together folded away."""
    policies, groups = data.get("policies", []), data.get("families", [])
    if not any(p["outcomes"] for p in policies):
        return empty("No episode has been scored yet.")
    parts = [
        f'<p class="intro">{clock} Each task weighs the same. The final answer is what the agent left in its work '
        "folder; the best of the trajectory is the best state that it went through, the published table’s rule. Small "
        "figures are 95 % intervals over tasks.</p>"
    ]
    for i, group in enumerate(groups):
        parts.append(_heading(policies, group) + (_charts(policies, group) if i == 0 else "") + _table(policies, group))
        parts.append(_changes(data, group))
    if len(groups) > 1:
        parts.append(f"<details><summary>All tasks together</summary>{_table(policies, 'overall')}</details>")
    if lost := [(p["policy"], p["infra"]) for p in policies if p["infra"]]:
        said = ", ".join(f"{escape(name)} {count}" for name, count in lost)
        parts.append(f'<p class="fine">Episodes lost by the machinery, not by the policy, and not scored: {said}.</p>')
    return "".join(parts)


def operators_section(policies: Sequence[Data]) -> str:
    scored = [p for p in policies if p["final"]["operators"]]
    if not scored:
        return empty("No operator has been scored yet.")
    tables = {p["policy"]: {row["group"]: row for row in p["final"]["operators"]} for p in scored}
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    last = scored[-1]["policy"]
    rows = []
    for name in names:
        found = {policy: table.get(name) for policy, table in tables.items()}
        cells = "".join(_heat(row["passed"] if row else None) for row in found.values())
        tasks = max(row["tasks"] for row in found.values() if row)
        speedup = (found[last] or {}).get("speedup_compile")
        rows.append(f'<tr><th scope="row">{escape(name)}</th><td>{tasks}</td>{cells}<td>{factor(speedup)}</td></tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in tables)
    return (
        '<p class="intro">Share of the tasks with this operator whose final answer is correct. Most rows stand on a '
        "few tasks: a map of what is missing, not a ranking.</p>"
        '<div class="scroll tall" role="region" aria-label="Scores by operator" tabindex="0"><table class="operators">'
        f'<thead><tr><th scope="col">Operator</th><th scope="col">Tasks</th>{head}'
        f'<th scope="col">× compile, {escape(last)}</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def summary(data: Data) -> str:
    """What changed from the first policy to the last, on the first family, in answers that are correct and in those
    that are faster than ``torch.compile`` too; and whether that can be told from chance."""
    family = (data.get("families") or [None])[0]
    found = [c for c in data.get("changes", []) if c["differences"] and c["differences"][0]["group"] == family]
    if family is None or not found:
        return "No policy has been scored yet."
    change = found[-1]
    by_metric = {row["metric"]: row for row in change["differences"]}
    passed, faster = by_metric["passed"], by_metric["faster_compile"]
    before, after = escape(change["before"]), escape(change["after"])
    if passed["change"] is None or faster["change"] is None:
        return f"{after} and {before} share no scored task, so they cannot be compared."
    first = f"<b>{before}</b> on <b>{share(passed['before'])}</b>: {_difference(passed)}"
    second = f"<b>{before}</b>’s on <b>{share(faster['before'])}</b>: {_difference(faster)}"
    return (
        f"On {plural(passed['tasks'], 'task')} of {_lower(family)}, <b>{after}</b> ends with a correct answer on "
        f"<b>{share(passed['after'])}</b>, {first}. Its answer is correct and faster than torch.compile on "
        f"<b>{share(faster['after'])}</b>, {second}. Intervals cover the choice of tasks, not the seed of training."
    )


def _difference(row: Data) -> str:
    if not row["interval"]:
        return "the two agree on every task" if row["tasks"] >= FEWEST_TASKS else "too few tasks for an interval"
    low, high = row["interval"]
    said = f"{_points(row['change'])} points, 95 % interval {_points(low)} to {_points(high)}"
    return f"{said}, which these tasks cannot tell from none" if low <= 0 <= high else said


def empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'


def plural(count: int, one: str) -> str:
    return f"{count} {one}{'' if count == 1 else 's'}"


def slug(text: str) -> str:
    """For class names: nothing of ``text`` but letters, digits and dashes."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())


def _lower(family: str) -> str:
    """A family's name inside a sentence."""
    name = FAMILIES.get(family, family)
    return escape(name[0].lower() + name[1:])


def _row(policy: Data, which: str, group: str) -> Data | None:
    table = policy[which]
    if group == "overall":
        return table["overall"]
    return next((row for row in table["families"] if row["group"] == group), None)


def _heading(policies: Sequence[Data], group: str) -> str:
    rows = [_row(p, "final", group) for p in policies]
    tasks = max((row["tasks"] for row in rows if row), default=0)
    return f'<h3>{escape(FAMILIES.get(group, group))} <span class="count">{plural(tasks, "task")}</span></h3>'


def _charts(policies: Sequence[Data], group: str) -> str:
    figures = []
    for key, title, _ in METRICS:
        rate = not key.startswith("speedup")
        entries = []
        for p in policies:
            row = _row(p, "final", group)
            value, interval = (row[key], row["intervals"].get(key)) if row else (None, None)
            entries.append((p["policy"], f"p-{slug(p['policy'])}", value, interval))
        drawn = interval_chart(
            title, entries, scale="linear" if rate else "log", rule=None if rate else 1.0, percent=rate
        )
        figures.append(f"<figure><figcaption>{title}</figcaption>{drawn}</figure>")
    counts = {
        p["policy"]: Counter(o["final"]["status"] for o in p["outcomes"] if group in (o["family"], "overall"))
        for p in policies
    }
    used = [status for status in STATUSES if status == "ok" or any(c[status] for c in counts.values())]
    legend = "".join(f'<li><span class="chip s-{s}"></span>{s.replace("_", " ")}</li>' for s in used)
    rows = [(name, [(f"s-{status}", count[status]) for status in used]) for name, count in counts.items()]
    figures.append(
        f"<figure><figcaption>How the answers ended</figcaption>{stack_chart('How the answers ended', rows)}"
        f'<ul class="legend">{legend}</ul></figure>'
    )
    return f'<div class="grid">{"".join(figures)}</div>'


def _table(policies: Sequence[Data], group: str) -> str:
    head = "".join(f'<th scope="col"><abbr title="{escape(says)}">{title}</abbr></th>' for _, title, says in METRICS)
    body = "".join(
        f'<tbody><tr class="part"><th colspan="6" scope="rowgroup">{title}</th></tr>'
        + "".join(_score_row(p, _row(p, which, group)) for p in policies)
        + "</tbody>"
        for which, title in (("final", "Final answer"), ("best", "Best of the trajectory"))
    )
    label = escape(FAMILIES.get(group, group))
    return (
        f'<div class="scroll" role="region" aria-label="{label}: scores" tabindex="0"><table class="scores"><thead><tr>'
        f'<th scope="col">Policy</th>{head}</tr></thead>{body}</table></div>'
    )


def _score_row(policy: Data, row: Data | None) -> str:
    head = _policy_cell(policy["policy"], policy.get("about", ""))
    if row is None:
        return f'<tr>{head}<td colspan="5">not scored</td></tr>'
    return f"<tr>{head}{''.join(_cell(key, row[key], row['intervals'].get(key)) for key, _, _ in METRICS)}</tr>"


def _policy_cell(name: str, says: str) -> str:
    return (
        f'<th scope="row"><span class="swatch p-{slug(name)}"></span>{escape(name)}<small>{escape(says)}</small></th>'
    )


def _cell(key: str, value: float | None, interval: Sequence[float] | None) -> str:
    rate = not key.startswith("speedup")
    say: Callable[[float | None], str] = share if rate else factor
    if value is None:
        return "<td>–</td>"
    said = ""
    if interval:
        low, high = interval
        said = f"{100 * low:.0f}–{100 * high:.0f}" if rate else f"{low:.2f}–{high:.2f}"
    return f"<td>{say(value)}<small>{said}</small></td>"


def _changes(data: Data, group: str) -> str:
    found = [c for c in data.get("changes", []) if c["differences"] and c["differences"][0]["group"] == group]
    if not found:
        return ""
    rows = "".join(
        f"<tr>{_policy_cell(c['after'], 'against ' + c['before'])}{''.join(map(_change, c['differences']))}</tr>"
        for c in found
    )
    head = "".join(f'<th scope="col">{title}</th>' for _, title, _ in METRICS)
    return (
        '<details><summary>Paired differences of the final answers</summary><div class="scroll" role="region" '
        'tabindex="0" aria-label="Paired differences"><table class="scores changes"><thead><tr>'
        f'<th scope="col">Policy</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="fine">On the tasks that both were scored on, resampled together. Rates: percentage points. '
        "Speed-ups: ratio of the geometric means, each over its own correct solutions. Bold: the interval excludes no "
        "change.</p></details>"
    )


def _change(difference: Data) -> str:
    change, interval = difference["change"], difference["interval"]
    if change is None:
        return "<td>–</td>"
    ratio = difference["metric"].startswith("speedup")
    said = factor(change) if ratio else _points(change)
    if not interval:
        return f"<td>{said}</td>"
    low, high = interval
    none = 1.0 if ratio else 0.0
    said = said if low <= none <= high else f"<b>{said}</b>"
    return f"<td>{said}<small>{f'{low:.2f}–{high:.2f}' if ratio else f'{_points(low)} to {_points(high)}'}</small></td>"


def _heat(value: float | None) -> str:
    if value is None:
        return "<td>–</td>"
    return f'<td class="heat" style="--heat:{100 * value:.0f}%">{100 * value:.0f}\u202f%</td>'


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")
