"""The page of `cuda-agent optimize`: what was found, how much faster it is and how that is known, and the way there.

Pure; one static HTML file without scripts, in the style of the workflow's report.  The words are in
``optimize.html.j2``; here are the figures and charts that they need.  Does not: measure or choose anything.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from cuda_agent.agent.progress import Event, Find
from cuda_agent.agent.progress import factor as faster_of_both
from cuda_agent.agent.tools import standing
from cuda_agent.pages.charts import clock_time, duration, factor, interval_chart, number, svg, ticks
from cuda_agent.pages.page import page, plural
from cuda_agent.pages.text import safe
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import BASELINES, Probe, Tensor, Verdict, baseline, baseline_parts

_ENDS = {
    "target": "the target was reached", "answer": "the model said that nothing more was to be gained",
    "turns": "all turns were used", "tokens": "the token budget was used up", "minutes": "the time was up",
    "money": "the money was spent", "stuck": "the model repeated itself", "infra": "the sandbox failed",
    "server": "the model's address was lost", "stopped": "it was stopped",
}  # fmt: skip
_SHOWN_TEXT, _SHOWN_TURNS = 3000, 200
_WRITERS = ("Write", "Edit", "MultiEdit")
SECTIONS = (
    ("result", "Times"),
    ("roofline", "Under the roofline"),
    ("kernel", "The kernels"),
    ("use", "Using it"),
    ("story", "How it came about"),
    ("measured", "How it was measured"),
    ("problem", "The problem"),
)
Bar = tuple[str, float, str, str]  # label, value, what to say, class


def render(
    name: str,
    code: str,
    events: Sequence[Event],
    best: Find | None,
    probe: Probe,
    why: str,
    target: float,
    where: str,
) -> str:
    """``best``: None where nothing was correct."""
    verdict = (best.strict or best.quick) if best else None
    files = sorted(best.solution.files.items()) if best else []
    return page(
        "optimize.html.j2",
        f"{name}: cuda-agent optimize",
        SECTIONS,
        "the times",
        styles=("optimize.css",),
        name=name,
        code=code,
        best=best,
        verdict=verdict,
        interval=(verdict.strict or {}).get("interval") if verdict else None,
        against=_against(verdict),
        judged=plural(sum(event["kind"] == "verdict" for event in events), "solution" if best is None else "judgement"),
        facts=_facts(verdict, events, why, target, where),
        bars_of_times=_times(verdict, probe),
        ratios=_ratios(verdict),
        failed=_failed(verdict),
        rooflines=_roofline(verdict),
        files=sorted(files, key=lambda item: not item[0].startswith("kernels/")),
        needs=FORMATS[verdict.format].needs[verdict.device] if verdict else "",
        attempts=_attempts(events),
        track=_track(events),
        measured=_measured(verdict, probe),
    )


def _facts(verdict: Verdict | None, events: Sequence[Event], why: str, target: float, where: str) -> list[str]:
    facts = [f"format {verdict.format} on {verdict.device}"] if verdict else []
    facts += [f"target {target:g}×", f"ended: {_ENDS.get(why, why)}", where]
    if spent := [event for event in events if event["kind"] == "spent"]:
        last = spent[-1]
        about = "about " if last["estimated"] else ""
        cost = f", {last['cost']:.2f} at the prices given" if last["cost"] else ""
        facts.append(f"{about}{last['prompt'] + last['sampled']:,} tokens{cost}, {clock_time(last['seconds'])}")
    return facts


def _against(verdict: Verdict | None) -> str:
    """What the headline says: the ratio to the faster baseline, as the target counts, and that baseline's name."""
    if verdict is None:
        return "no correct solution"
    ratio = faster_of_both(verdict)
    name = "torch.compile" if ratio is not None and ratio == verdict.speedup_compile else "eager PyTorch"
    return f"{factor(ratio)} {'as fast as' if (ratio or 0) >= 1 else 'the speed of'} {name}"


def _times(verdict: Verdict | None, probe: Probe) -> list[Bar]:
    """Of the solution and the baselines; of the baselines alone where nothing was correct."""
    if verdict is None:
        known = [("eager", probe.eager_seconds), ("torch.compile", probe.compile_seconds)]
        return [(label, seconds, duration(seconds), "quiet") for label, seconds in known if seconds]
    assert verdict.seconds
    return [("this solution", verdict.seconds, _with_spread(verdict), "own")] + [
        (label, seconds, f"{duration(seconds)} ({factor(seconds / verdict.seconds)})", "")
        for label, seconds in _baselines(verdict).items()
    ]


def _baselines(verdict: Verdict) -> dict[str, float]:
    """Name -> seconds."""
    named = {"eager": verdict.eager_seconds, "torch.compile": verdict.compile_seconds}
    if strict := (verdict.strict or {}).get("baselines"):
        named = {" ".join((BASELINES[kind], precision)): strict[label] for label in strict
                 for kind, precision in [baseline_parts(label)]}  # fmt: skip
    return {label: seconds for label, seconds in named.items() if seconds}


def _ratios(verdict: Verdict | None) -> Markup | None:
    """How many times as fast as each baseline, with intervals; None where they were not measured."""
    strict = (verdict.strict if verdict else None) or {}
    first = (strict.get("baselines") or {}).get(baseline("eager", "fp32"))
    if not verdict or not verdict.seconds or not first or not strict.get("interval"):
        return None
    low, high = strict["interval"]
    rows = [  # the chart's labels are narrow
        (
            label.replace("torch.compile", "compile").replace("max-autotune", "autotune"),
            "",
            seconds / verdict.seconds,
            (low * seconds / first, high * seconds / first),
        )
        for label, seconds in _baselines(verdict).items()
    ]
    return interval_chart("Times as fast as", rows, scale="log", rule=1.0)


def _failed(verdict: Verdict | None) -> list[tuple[str, str]]:
    """Baselines that were not timed, and why."""
    failed = ((verdict.strict if verdict else None) or {}).get("failed") or {}
    return [(BASELINES[baseline_parts(label)[0]], str(reason)[:200]) for label, reason in failed.items()]


def _with_spread(verdict: Verdict) -> str:
    if len(verdict.samples) < 4:
        return duration(verdict.seconds)
    low, _, high = statistics.quantiles(verdict.samples, n=4)
    return f"{duration(verdict.seconds)}, half of the calls {duration(low)} to {duration(high)}"


def _roofline(verdict: Verdict | None) -> dict[str, Any]:
    """Sentences, what limits the solution, and a chart or bars where the peaks are known; empty where nothing is."""
    if verdict is None or verdict.clock == "model" or not verdict.seconds or not verdict.bytes:
        return {}
    rate, peak = verdict.bytes / verdict.seconds, verdict.peak_bytes_per_second
    said = [f"Inputs and outputs of {_amount(verdict.bytes, 'B')} a call: {_amount(rate, 'B/s')}"]
    if peak:
        source = "of the device's memory" if verdict.device == "cuda" else "of a measured copy"
        said[0] += f", {rate / peak:.0%} {source} ({_amount(peak, 'B/s')})"
    if verdict.flops:
        done = verdict.flops / verdict.seconds
        said.append(f"{_amount(verdict.flops, 'FLOP')} in the reference: {_amount(done, 'FLOP/s')}")
        if verdict.peak_flops:
            said[1] += (
                f", {done / verdict.peak_flops:.0%} of the device's peak ({_amount(verdict.peak_flops, 'FLOP/s')})"
            )
    bars: list[Bar] = []
    if peak and not verdict.flops:
        bars = [("this solution", rate, _amount(rate, "B/s"), "own")]
        if verdict.eager_seconds:
            eager = verdict.bytes / verdict.eager_seconds
            bars.append(("eager", eager, _amount(eager, "B/s"), ""))
        bars.append(("peak", peak, _amount(peak, "B/s"), "quiet"))
    chart = _roof_chart(verdict, peak) if peak and verdict.flops else None
    return {"said": said, "standing": standing(verdict), "chart": chart, "bars": bars}


def _roof_chart(verdict: Verdict, peak: float) -> Markup:
    """Operations a second over operations a byte, both logarithmic; the roof as far as it is known."""
    assert verdict.flops and verdict.bytes and verdict.seconds
    intensity = verdict.flops / verdict.bytes
    points = [("this solution", verdict.flops / verdict.seconds, "top")]
    if verdict.compile_seconds:
        points.append(("torch.compile", verdict.flops / verdict.compile_seconds, "miss"))
    if verdict.eager_seconds:
        points.append(("eager", verdict.flops / verdict.eager_seconds, "miss"))
    ridge = verdict.peak_flops / peak if verdict.peak_flops else intensity * 10
    xs = [math.log10(v) for v in (intensity / 10, intensity * 10, ridge / 10, ridge * 4)]
    left, right = min(xs), max(xs)
    roof = [(x, min(x + math.log10(peak), math.log10(verdict.peak_flops or math.inf))) for x in (left, right)]
    if verdict.peak_flops and left < math.log10(ridge) < right:
        roof.insert(1, (math.log10(ridge), math.log10(verdict.peak_flops)))
    ys = [y for _, y in roof] + [math.log10(value) for _, value, _ in points]
    low, high = min(ys) - 0.3, max(ys) + 0.3
    width, height, margin, bottom = 760, 340, 70, 40

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            margin + (x - left) / (right - left) * (width - margin - 20),
            12 + (high - y) / (high - low) * (height - bottom - 12),
        )

    parts = []
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        _, y = place(left, exponent)
        parts.append(f'<line class="grid" x1="{margin}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = _amount(10.0**exponent, "FLOP/s")
        parts.append(f'<text class="tick" x="{margin - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for exponent in range(math.ceil(left), math.floor(right) + 1):
        x, _ = place(exponent, low)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="12" y2="{height - bottom}"/>')
        label = number(10.0**exponent)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 22}" text-anchor="middle">{label}</text>')
    axis = "operations a byte of inputs and outputs"
    parts.append(f'<text class="tick" x="{width - 20}" y="{height - 6}" text-anchor="end">{axis}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in roof))
    parts.append(f'<polyline class="roof" points="{line}"/>')
    for label, value, style in points:
        x, y = place(math.log10(intensity), math.log10(value))
        parts.append(f'<circle class="dot {style}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if style == "top" else 4}"/>')
        parts.append(f'<text class="row-label" x="{x + 10:.1f}" y="{y + 4:.1f}">{label}</text>')
    spoken = "; ".join(f"{label} {_amount(value, 'FLOP/s')}" for label, value, _ in points)
    return svg("chart wide", width, height, f"Roofline at {number(intensity)} operations a byte: {spoken}", parts)


def _track(events: Sequence[Event]) -> Markup | None:
    """Every judged solution over time, and the best so far; None without any."""
    quick = [event for event in events if event["kind"] == "verdict" and event["verdict"]["mode"] == "quick"]
    if not quick:
        return None
    known = [event["factor"] for event in quick if event["factor"]]
    marks = ticks(0, max([*known, 1.0]) * 1.05)
    width, height, left, bottom = 760, 240, 44, 30
    span = max(max(event["at"] for event in quick), 1e-9)

    def place(at: float, value: float) -> tuple[float, float]:
        return left + at / span * (width - left - 16), 10 + (1 - value / marks[-1]) * (height - bottom - 10)

    parts = []
    for mark in marks:
        y = place(0, mark)[1]
        style = "grid one" if mark == 1 else "grid"
        parts.append(f'<line class="{style}" x1="{left}" x2="{width - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{number(mark)}×</text>')
    parts.append(f'<text class="tick" x="{width - 16}" y="{height - 8}" text-anchor="end">{clock_time(span)}</text>')
    parts.append(f'<text class="tick" x="{left}" y="{height - 8}">0</text>')
    best = 0.0
    line: list[tuple[float, float]] = []
    for event in quick:
        if (event["factor"] or 0.0) > best:
            if line:
                line.append(place(event["at"], best))
            best = event["factor"]
            line.append(place(event["at"], best))
    if line:
        line.append(place(span, best))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline class="best-so-far" points="{points}"/>')
    for event in quick:
        x, y = place(event["at"], event["factor"] or 0.0)
        style = "dot" if event["factor"] else "dot miss"
        said = factor(event["factor"]) if event["factor"] else event["verdict"]["status"]
        label = f"attempt {event['attempt']}, {clock_time(event['at'])}: {said}"
        parts.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{safe(label)}</title></circle>')
    spoken = f"{plural(len(quick), 'judged solution')}, the best {factor(best) if best else 'none'}"
    return svg("chart wide", width, height, spoken, parts)


def _attempts(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Each attempt with its last turns."""
    attempts = []
    for attempt in sorted({event["attempt"] for event in events if event["attempt"]}):
        own = [event for event in events if event["attempt"] == attempt]
        ended = next((event for event in reversed(own) if event["kind"] == "ended"), None)
        known = [event["factor"] for event in own if event["kind"] == "verdict" and event["factor"]]
        turns: list[list[Event]] = []
        for event in own:
            if event["kind"] == "turn":
                turns.append([event])
            elif turns:
                turns[-1].append(event)
        end = f"; {_ENDS.get(ended['why'], ended['why'])}" if ended else ""
        attempts.append(
            {
                "number": attempt,
                "head": f"{plural(len(turns), 'turn')}, best {factor(max(known)) if known else 'none'}{end}",
                "rest": len(turns) - _SHOWN_TURNS,
                "summary": ended["summary"][:_SHOWN_TEXT] if ended and ended["summary"] else "",
                "open": attempt == 1 and len(turns) <= 12,
                "turns": [_turn(turn) for turn in turns[-_SHOWN_TURNS:]],
            }
        )
    return attempts


def _turn(events: Sequence[Event]) -> dict[str, Any]:
    """Parts: (kind, text, title) of each."""
    parts: list[tuple[str, str, str]] = []
    for event in events[1:]:
        if event["kind"] == "message" and event["message"]["role"] == "assistant":
            message = event["message"]
            if said := message["content"].strip():
                parts.append(("said", said[:_SHOWN_TEXT], ""))
            calls = [call for call in message.get("tool_calls") or () if call["name"] not in _WRITERS]
            parts += [("call", _call(call), "") for call in calls]
        elif event["kind"] == "diff":
            parts.append(("diff", event["text"], f"{event['path']} +{event['added']} −{event['removed']}"))
        elif event["kind"] == "verdict":
            found = event["verdict"]
            title = event["command"] + (" in strict mode" if found["mode"] == "strict" else "")
            if event["factor"]:
                parts.append(("ok", f"correct, {factor(event['factor'])}", title))
            else:
                parts.append(("no", f"{found['status']} {found['message'][:600]}", title))
        elif event["kind"] in ("note", "form"):
            parts.append(("note", event["text"], ""))
    return {"number": events[0]["turn"] + 1, "parts": parts, "hit": any(kind == "ok" for kind, _, _ in parts)}


def _call(call: Event) -> str:
    values = call["arguments"] if isinstance(call["arguments"], dict) else {}
    return f"{call['name']} " + " ".join(str(value) for value in values.values())[:400]


def _measured(verdict: Verdict | None, probe: Probe) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = [
        ("inputs", ", ".join(map(_shape, probe.inputs)) or "none"),
        ("outputs", ", ".join(map(_shape, probe.outputs)) or "none"),
        ("parameters", f"{probe.parameter_count:,}"),
    ]
    if verdict:
        facts.append(("mode", verdict.mode))
        facts.append(("checks", f"{verdict.checks} passed"))
        facts.append(("timed calls", str(len(verdict.samples))))
        if strict := verdict.strict:
            kinds = ", ".join(strict.get("kinds") or ())
            skipped = ", ".join(strict.get("skipped") or ())
            facts.append(
                ("kinds of inputs", kinds + (f"; not possible for this problem: {skipped}" if skipped else ""))
            )
            if "error" in strict:
                error = f"{strict['error']:.1e} (eager's own: {strict['eager_error']:.1e})"
                facts.append(("error against double precision", error))
            if strict.get("precision"):
                facts.append(("arithmetic that explains the error", strict["precision"]))
            if "repeatable" in strict:
                facts.append(("same inputs, same outputs", "yes" if strict["repeatable"] else "no"))
        if verdict.ran:
            shown = ", ".join(f"{ran.name} ({ran.kind})" for ran in verdict.ran[:6])
            facts.append(("what ran", shown))
        facts += [("advice", line) for line in verdict.advice[:6]]
    return facts


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _amount(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{number(value / size)} {prefix}{unit}"
    return f"{number(value)} {unit}"
