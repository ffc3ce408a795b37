"""Renders the report of a run as one self-contained HTML file, from the data in ``report.json``.

The page needs no script, network or fonts, and can be printed.  Where data is missing, the page says so."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from cuda_agent.pages.charts import histogram, line_chart, number, share
from cuda_agent.pages.page import page
from cuda_agent.pages.tables import FAMILIES, cell, change_cell, groups, headline, operators, points, shown_metrics

Data = dict[str, Any]

# (key, title, is a share, axis from zero), in the order of the page.
CURVES = (
    ("reward", "Reward", False, False),
    ("pass_rate", "Pass rate", True, True),
    ("faster_than_eager", "Over 5 % faster than eager", True, True),
    ("faster_than_compile", "Over 5 % faster than both", True, True),
    ("heldout_pass_rate", "Pass rate, held out", True, True),
    ("heldout_speedup", "Speed-up over torch.compile, held out", False, True),
    ("explained_variance", "Explained variance", False, True),
    ("heldout_explained_variance", "Explained variance, held out", False, True),
    ("entropy", "Entropy, nats a token", False, True),
    ("kl", "KL from the engine, nats a token", False, True),
    ("response_length", "Response length, tokens", False, True),
    ("loss", "Loss", False, False),
    ("heldout_loss", "Loss, held out", False, False),
    ("value_loss", "Value loss", False, False),
)
_WORDS = {0: "No", 1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}
LOWEST_EXPLAINED_VARIANCE = 0.2


def render(data: Data) -> str:
    """Returns the report as HTML.  ``data`` is the result of ``stages.report.gather``; any part may be empty."""
    policies, stages = data.get("policies", []), data.get("stages", [])
    return page(
        "report.html.j2",
        clock=str(data.get("clock")),
        policies=policies,
        incomplete=[p["policy"] for p in policies if p["infra"] or p["unscored"]],
        lost=[f"{p['policy']} {p['infra']}" for p in policies if p["infra"]],
        count=_WORDS.get(len(policies), len(policies)),
        headline=headline(data),
        devices=_devices(data),
        versions=data.get("versions", {}),
        metrics=shown_metrics(data),
        groups=groups(data),
        cell=cell,
        change_cell=change_cell,
        points=points,
        learning=_learning(stages),
        lowest_variance=LOWEST_EXPLAINED_VARIANCE,
        kernels=data.get("kernels", []),
        operators=operators(policies),
        card=data.get("card") or {},
        families=FAMILIES,
        funnel=funnel,
        histogram=histogram,
        stages=stages,
        timed=[(stage["name"], stage["seconds"]) for stage in stages if stage.get("seconds") is not None],
        counted=[(stage["name"], tokens) for stage in stages if (tokens := _tokens(stage))],
        facts=_run(data),
        config=data.get("config") or {},
        config_text=json.dumps(data.get("config") or {}, indent=2),
    )


def _devices(data: Data) -> list[str]:
    return sorted({stage["device"] for stage in data.get("stages", []) if stage.get("device")})


def _learning(stages: Sequence[Data]) -> list[Data]:
    """Returns the learning curves of ``stages``, as one dict for each heading in the report.  Stages with the same
    heading (``Stage.chart``) share a dict.

    ``main`` has the curves that the page shows at once: those of metrics that are in ``Stage.curves`` and in
    ``CURVES``.  ``rest`` has the curves of all other metrics, which the page shows folded.  ``weak`` has (stage, last
    explained variance of the critic, held out if logged) for each stage where this variance is below
    ``LOWEST_EXPLAINED_VARIANCE``."""
    headings: dict[str, list[Data]] = {}
    for stage in stages:
        if stage.get("chart"):
            headings.setdefault(stage["chart"], []).append(stage)
    grids = []
    for title, members in headings.items():
        main, rest, weak = [], [], []
        for stage in members:
            name, series = stage["name"], _series(stage)
            known = [key for key, *_ in CURVES if key in series and key in stage["curves"]]
            before = f"{name}: " if len(members) > 1 else ""
            main += [_figure(key, series[key], before) for key in known]
            rest += [_figure(key, series[key], before) for key in sorted(series) if key not in known]
            variance = series.get("heldout_explained_variance") or series.get("explained_variance")
            if variance and variance[-1][1] < LOWEST_EXPLAINED_VARIANCE:
                weak.append((name, variance[-1][1]))
        grids.append({"title": title, "main": main, "rest": rest, "weak": weak})
    return grids


def _series(stage: Data) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for entry in stage["metrics"]:
        for key, value in entry["values"].items():
            series.setdefault(key, []).append((entry["step"], value))
    return series


def _figure(key: str, points: list[tuple[float, float]], before: str) -> tuple[str, str, str]:
    other = key, key.replace("_", " ").replace("/", " / "), False, False
    _, title, percent, from_zero = next((curve for curve in CURVES if curve[0] == key), other)
    title = before + (title[0].lower() + title[1:] if before else title)
    rule = (LOWEST_EXPLAINED_VARIANCE, "0.2") if "explained_variance" in key else None
    say: Callable[[float | None], str] = share if percent else number
    return title, say(points[-1][1]), line_chart(title, points, from_zero=from_zero, rule=rule, percent=percent)


def funnel(rows: Sequence[Data]) -> list[tuple[str, float, str, str]]:
    """Returns bars that show how many candidate tasks are left after each filter, as (label, number, text, CSS class).
    The first bar counts all candidates.  The class is ``quiet`` (pale) for the first bar and for filters that dropped
    no task; otherwise it is empty."""
    entered = rows[0]["entered"]
    entries = [("candidates", entered, str(entered), "quiet")]
    for row in rows:
        dropped = f", {row['dropped']} dropped" if row["dropped"] else ""
        entries.append((row["filter"], row["passed"], f"{row['passed']}{dropped}", "" if row["dropped"] else "quiet"))
    return entries


def _tokens(stage: Data) -> float:
    """Returns the number of tokens that a stage processed, summed over its steps.  Some steps log this number as
    ``tokens``.  For a step that does not, counts the tokens sampled in its episodes, or 0 if it logs none."""
    steps = [entry["values"] for entry in stage["metrics"]]
    return sum(v.get("tokens", v.get("episodes", 0.0) * v.get("response_length", 0.0)) for v in steps)


def _run(data: Data) -> list[tuple[str, Any]]:
    config = data.get("config") or {}
    facts = [*(("device", device) for device in _devices(data)), *data.get("versions", {}).items()]
    if "seed" in config:
        facts.append(("seed", config["seed"]))
        tasks = config.get("synthesis", {}).get("seed", config["seed"])
        if tasks != config["seed"]:
            facts.append(("seed of the tasks", tasks))
    for stage in data.get("stages", []):
        settings = config.get(stage["name"])
        if settings and "actor_lr" in settings:
            text = "{steps} steps of {episodes_per_step} episodes, learning rate {actor_lr:g}"
            facts.append((stage["name"], text.format(**settings)))
    return facts
