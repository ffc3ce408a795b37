"""The report's page: ``report.json`` -> one self-contained HTML file.

Pure.  No script, no network, no fonts to load; light and dark by the reader's preference; prints.  Text of tasks and
models is escaped.  An empty part says what is missing instead of vanishing.

Not covered: computing scores (``rl.scores``) and choosing what is shown (``stages.report``).
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from cuda_agent.pages.charts import bars, clock_time, duration, factor, histogram, line_chart, number, share
from cuda_agent.pages.page import document, safe, source, style_sheet
from cuda_agent.pages.tables import FAMILIES, empty, operators_section, plural, scores_section, slug, summary

Data = dict[str, Any]

# (key, title, is a share, values the axis must include), in the order of the page.
CURVES: tuple[tuple[str, str, bool, tuple[float | None, float | None]], ...] = (
    ("reward", "Reward", False, (None, None)),
    ("pass_rate", "Pass rate", True, (0, None)),
    ("faster_than_eager", "Over 5 % faster than eager", True, (0, None)),
    ("faster_than_compile", "Over 5 % faster than both", True, (0, None)),
    ("explained_variance", "Explained variance", False, (0, None)),
    ("heldout_explained_variance", "Explained variance, held out", False, (0, None)),
    ("entropy", "Entropy, nats a token", False, (0, None)),
    ("kl", "KL from the engine, nats a token", False, (0, None)),
    ("response_length", "Response length, tokens", False, (0, None)),
    ("loss", "Loss", False, (None, None)),
    ("heldout_loss", "Loss, held out", False, (None, None)),
    ("value_loss", "Value loss", False, (None, None)),
)
_WORDS = {0: "No", 1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}
LOWEST_EXPLAINED_VARIANCE = 0.2


def render(data: Data) -> str:
    """``data``: what ``report.gather`` gives.  Every part may be empty."""
    sections = [
        ("scores", "Scores", scores_section(data, _clock(data))),
        ("curves", "Learning curves", _curves(data)),
        ("kernels", "Fastest kernels", _kernels(data)),
        ("operators", "By operator", operators_section(data.get("policies", []))),
        ("tasks", "Tasks", _card(data)),
        ("spent", "Time and tokens", _spent(data)),
        ("notes", "Notes and warnings", _notes(data)),
        ("run", "This run", _run(data)),
    ]
    footer = f"{_clock(data)} Intervals are 95 % bootstrap intervals over tasks."
    return document("cuda-agent report", _head(data), sections, footer, style_sheet(), "the scores")


def _head(data: Data) -> str:
    policies, clock = data.get("policies", []), data.get("clock")
    tasks = max((p["tasks"] for p in policies), default=0)
    parts = [
        '<p class="over">cuda-agent</p>',
        f"<h1>{_WORDS.get(len(policies), len(policies))} {'policy' if len(policies) == 1 else 'policies'}, "
        f"{plural(tasks, 'held-out task')}</h1>",
        f'<p class="lede">{summary(data)}</p>',
        f'<ul class="about">{"".join(f"<li>{escape(fact)}</li>" for fact in _about(data))}</ul>',
    ]
    if clock == "model":
        parts.append(
            '<p class="banner" role="note"><strong>Model clock.</strong> Every time and speed-up on this page is a '
            "deterministic cost computed from the kernel, made for drills and tests. None of it was measured.</p>"
        )
    if short := [p["policy"] for p in policies if p["infra"] or p["unscored"]]:
        parts.append(
            f'<p class="banner" role="note"><strong>Incomplete.</strong> Episodes were lost by the machinery, not by '
            f"the policy, in the evaluation of {escape(', '.join(short))}; they are counted apart below.</p>"
        )
    return "".join(parts)


def _about(data: Data) -> list[str]:
    """The run in a line: where it ran, what it trained, under which clock."""
    config, versions = data.get("config") or {}, data.get("versions", {})
    facts = list(_devices(data))
    if torch := versions.get("torch"):
        facts.append(f"torch {torch}")
    if policy := config.get("policy"):
        facts.append(policy["base"] or f"a policy of {policy['layers']} layers × {policy['hidden']}, from scratch")
    if sandbox := config.get("sandbox"):
        facts.append(f"format {sandbox['format']} on {sandbox['device']}, {data.get('clock')} clock")
    return facts


def _devices(data: Data) -> list[str]:
    return sorted({stage["device"] for stage in data.get("stages", []) if stage.get("device")})


def _clock(data: Data) -> str:
    return {
        "real": "Clock: real (times were measured).",
        "model": "Clock: model (times are computed costs, not measured).",
    }.get(str(data.get("clock")), "Clock: unknown.")


def _curves(data: Data) -> str:
    """A grid for each heading that stages name; the curves that a stage does not list are folded away."""
    grids: dict[str, list[Data]] = {}
    for stage in data.get("stages", []):
        if stage.get("chart"):
            grids.setdefault(stage["chart"], []).append(stage)
    if not grids:
        return empty("No stage has curves.")
    parts = []
    for title, stages in grids.items():
        main, rest, warnings = [], [], []
        for stage in stages:
            series = _series(stage)
            known = [key for key, *_ in CURVES if key in series and key in stage["curves"]]
            before = f"{stage['name']}: " if len(stages) > 1 else ""
            main += [_figure(key, series[key], before) for key in known]
            rest += [_figure(key, series[key], before) for key in sorted(series) if key not in known]
            warnings.append(_variance_warning(stage["name"], series))
        parts.append(f"<h3>{escape(title)}</h3>{''.join(warnings)}")
        parts.append(
            f'<div class="grid">{"".join(main)}</div>' if main else "" if rest else empty("Nothing was logged.")
        )
        if rest:
            parts.append(
                f"<details><summary>{plural(len(rest), 'more curve')}</summary>"
                f'<div class="grid">{"".join(rest)}</div></details>'
            )
    return "".join(parts)


def _series(stage: Data) -> dict[str, list[tuple[float, float]]]:
    """Key -> (step, value), in the order of steps."""
    series: dict[str, list[tuple[float, float]]] = {}
    for entry in stage["metrics"]:
        for key, value in entry["values"].items():
            series.setdefault(key, []).append((entry["step"], value))
    return series


def _figure(key: str, points: list[tuple[float, float]], before: str) -> str:
    title, percent, bounds = next(
        ((title, percent, bounds) for k, title, percent, bounds in CURVES if k == key),
        (key.replace("_", " ").replace("/", " / "), False, (None, None)),
    )
    title = before + (title[0].lower() + title[1:] if before else title)
    rule = (LOWEST_EXPLAINED_VARIANCE, "0.2") if "explained_variance" in key else None
    say: Callable[[float | None], str] = share if percent else number
    return (
        f'<figure><figcaption>{escape(title)}<span class="last">{say(points[-1][1])}</span></figcaption>'
        f"{line_chart(title, points, bounds=bounds, rule=rule, percent=percent)}</figure>"
    )


def _variance_warning(name: str, series: dict[str, list[tuple[float, float]]]) -> str:
    for key in ("heldout_explained_variance", "explained_variance"):
        if key in series:
            last = series[key][-1][1]
            if last >= LOWEST_EXPLAINED_VARIANCE:
                return ""
            return (
                f'<p class="warning"><strong>Weak critic.</strong> In {escape(name)}, explained variance ended at '
                f"{number(last)}, below {LOWEST_EXPLAINED_VARIANCE}: the critic says little about the returns.</p>"
            )
    return ""


def _kernels(data: Data) -> str:
    kernels = data.get("kernels", [])
    if not kernels:
        return empty("No correct kernel yet. When a final answer passes every check, its source appears here.")
    intro = (
        '<p class="intro">The correct final answers with the largest speed-ups over torch.compile, one a task, of all '
        f"policies. {_clock(data)}</p>"
    )
    return intro + "".join(_kernel(kernel, i == 0) for i, kernel in enumerate(kernels))


def _kernel(kernel: Data, first: bool) -> str:
    verdict = kernel["verdict"]
    times = [
        ("kernel", verdict["seconds"], "", "own"),
        ("torch.compile", verdict["compile_seconds"], factor(verdict["speedup_compile"]), ""),
        ("eager", verdict["eager_seconds"], factor(verdict["speedup_eager"]), ""),
    ]
    shown = [(label, s, f"{duration(s)}{f' ({x})' if x else ''}", css) for label, s, x, css in times if s]
    sources = "".join(
        f'<figure class="source"><figcaption>{safe(path)}</figcaption>'
        f'<pre tabindex="0"><code>{source(path, text)}</code></pre></figure>'
        for path, text in sorted(kernel["files"].items())
    )
    facts = [
        f"policy <b>{escape(kernel['policy'])}</b>",
        f"format {escape(verdict['format'])} on {escape(verdict['device'])}",
        f"{verdict['checks']} checks passed",
    ]
    if verdict.get("max_error") is not None:
        facts.append(f"largest error {number(verdict['max_error'], 2)}")
    if verdict.get("samples"):
        facts.append(f"median of {len(verdict['samples'])} timed calls")
    headline = factor(verdict["speedup_compile"]) if verdict["speedup_compile"] else factor(verdict["speedup_eager"])
    against = "torch.compile" if verdict["speedup_compile"] else "eager"
    return (
        f'<article class="kernel"><div class="top"><h3>{escape(" → ".join(kernel["ops"]) or kernel["task"])}'
        f'<span class="count">{escape(kernel["task"])}</span></h3>'
        f'<p class="speed"><b>{headline}</b> against {against}</p></div>'
        f'<p class="facts">{" · ".join(facts)}</p>{bars(shown)}'
        f"<details{' open' if first else ''}><summary>Source</summary>{sources}</details>"
        f'<details><summary>The task</summary><pre tabindex="0"><code>{safe(kernel["code"])}</code></pre></details>'
        f"{_transcript(kernel['messages'])}</article>"
    )


def _transcript(messages: Sequence[Data]) -> str:
    if not messages:
        return ""
    turns = []
    for message in messages:
        calls = "".join(
            f'<pre tabindex="0"><code>{safe(str(call.get("name", "")))}'
            + "".join(f"\n{safe(str(k))}: {safe(str(v))}" for k, v in (call.get("arguments") or {}).items())
            + "</code></pre>"
            for call in message["tool_calls"]
        )
        text = f'<pre tabindex="0"><code>{safe(message["content"])}</code></pre>' if message["content"].strip() else ""
        turns.append(f'<li class="r-{slug(message["role"])}"><span>{safe(message["role"])}</span>{text}{calls}</li>')
    count = plural(len(turns), "message")
    return f'<details><summary>The trajectory, {count}</summary><ol class="turns">{"".join(turns)}</ol></details>'


def _card(data: Data) -> str:
    card = data.get("card") or {}
    if not card:
        return empty("No data card came with the tasks.")
    parts = []
    counts = [(name.replace("/", ", "), count) for name, count in card.get("by_family_and_split", {}).items()]
    facts = [
        ("tasks", card.get("tasks")),
        *counts,
        ("operators in the catalogue", card.get("operators")),
        ("different operators used", len(card.get("ops", {}))),
    ]
    parts.append(
        '<dl class="facts-grid">'
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{number(v, 6)}</dd></div>" for k, v in facts if v is not None)
        + "</dl>"
    )
    for family, missing in sorted(card.get("short", {}).items()):
        parts.append(
            f'<p class="warning"><strong>Too few.</strong> {plural(missing, "task")} short of {escape(family)}.</p>'
        )
    funnels = [
        f"<div><h3>Filters: {escape(FAMILIES.get(family, family)).lower()}</h3>{_funnel(rows)}</div>"
        for family, rows in card.get("yield", {}).items()
        if rows and rows[0]["entered"]
    ]
    parts.append(f'<div class="pair">{"".join(funnels)}</div>')
    if histogram_of := card.get("eager_ms"):
        parts.append(
            "<h3>Eager time</h3><figure>"
            + histogram("Eager time", histogram_of["edges"], histogram_of["counts"], "ms")
            + "</figure>"
        )
    if ops := card.get("ops"):
        listed = "".join(f"<li>{escape(op)} <small>{count}</small></li>" for op, count in ops.items())
        parts.append(f'<details><summary>Operators in the tasks</summary><ul class="tags">{listed}</ul></details>')
    return "".join(parts)


def _funnel(rows: Sequence[Data]) -> str:
    """What each filter let through, as shares of all candidates; a filter that dropped nothing is a thin line."""
    entered = rows[0]["entered"]
    entries = [("candidates", entered, str(entered), "quiet")]
    for row in rows:
        dropped = f", {row['dropped']} dropped" if row["dropped"] else ""
        entries.append((row["filter"], row["passed"], f"{row['passed']}{dropped}", "" if row["dropped"] else "quiet"))
    return bars(entries)


def _spent(data: Data) -> str:
    stages = data.get("stages", [])
    if not stages:
        return empty("No stage said what it spent.")
    timed = [(s["name"], s["seconds"], clock_time(s["seconds"]), "") for s in stages if s.get("seconds") is not None]
    if timed:
        total = sum(seconds for _, seconds, _, _ in timed)
        time = (
            f'<h3>Time a stage <span class="count">{clock_time(total)} in all</span></h3>{bars(timed)}<p class="fine">'
            "What went into each result. A stage served from the cache shows what it took when it ran.</p>"
        )
    else:
        why = " Under the model clock none is, so that two runs give the same page." if data["clock"] == "model" else ""
        time = f"<h3>Time a stage</h3>{empty(f'No time was kept.{why}')}"
    counted = [(s["name"], n, number(n), "") for s in stages if (n := _tokens(s))]
    total = sum(n for _, n, _, _ in counted)
    tokens = (
        f'<h3>Tokens a stage <span class="count">{number(total)} in all</span></h3>{bars(counted)}<p class="fine">'
        "Sampled where a policy plays, trained on where it learns from what is there.</p>"
        if counted
        else f"<h3>Tokens a stage</h3>{empty('No stage counted its tokens.')}"
    )
    return f'<div class="pair"><div>{time}</div><div>{tokens}</div></div>'


def _tokens(stage: Data) -> float:
    """Tokens that went through a stage: counted by its metrics each step, or sampled in its episodes."""
    steps = [entry["values"] for entry in stage["metrics"]]
    return sum(v.get("tokens", v.get("episodes", 0.0) * v.get("response_length", 0.0)) for v in steps)


def _notes(data: Data) -> str:
    notes = [(stage["name"], note) for stage in data.get("stages", []) for note in stage.get("notes", [])]
    if not notes:
        return empty("Nothing was noted.")
    rows = "".join(f'<li><span class="where">{escape(where)}</span> {escape(text)}</li>' for where, text in notes)
    return f'<ul class="notes">{rows}</ul>'


def _run(data: Data) -> str:
    config = data.get("config") or {}
    facts = [("clock", _clock(data).removeprefix("Clock: ")), *(("device", device) for device in _devices(data))]
    facts += list(data.get("versions", {}).items())
    if "seed" in config:
        facts.append(("seed", config["seed"]))
    for stage in data.get("stages", []):
        settings = config.get(stage["name"])
        if settings and "actor_lr" in settings:
            steps, episodes = settings["steps"], settings["episodes_per_step"]
            text = f"{steps} steps of {episodes} episodes, learning rate {settings['actor_lr']:g}"
            facts.append((stage["name"], text))
    listed = "".join(f"<tr><th scope='row'>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts)
    return (
        f'<table class="facts-table"><tbody>{listed}</tbody></table>'
        f'<details><summary>Configuration</summary><pre tabindex="0"><code>{escape(json.dumps(config, indent=2))}'
        "</code></pre></details>"
    )
