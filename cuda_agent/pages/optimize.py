"""Renders the page of `cuda-agent optimize`, which lets a language model search for a fast solution of one task.

The page shows the best solution, its measured speed-up, and the attempts: the conversations with the model.  It is one
static HTML file without scripts.  Its text is in ``optimize.html.j2``."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from cuda_agent.agent.progress import ENDS, Event, Find, Goal
from cuda_agent.agent.progress import factor as faster_of_both
from cuda_agent.agent.tools import standing
from cuda_agent.pages.charts import Drawing, amount, apart, clock_time, duration, factor, interval_chart, number, ticks
from cuda_agent.pages.episode_story import of_attempt
from cuda_agent.pages.page import page, plural
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import BASELINES, Probe, Verdict, baseline_parts

Bar = tuple[str, float, str, str]  # label, value, text, CSS class


def render(
    name: str, code: str, events: Sequence[Event], best: Find | None, probe: Probe, why: str, goal: Goal, where: str
) -> str:
    """Returns the page about one search for a fast solution, as HTML.

    Args:
        name: Name of the task (a PyTorch model that a solution must replace).
        code: Source of the task.
        events: The transcript of the search: its recorded events, such as verdicts.
        best: The best solution; None if no solution is confirmed to be correct.
        probe: Facts about the task without a solution: shapes, and times in eager mode and with ``torch.compile``.
        why: Reason why the search ended, a key of ``ENDS``.
        goal: What a solution had to reach to end the search.
        where: Name and address of the language model, as text."""
    verdict = (best.strict or best.quick) if best else None
    files = sorted(best.solution.files.items()) if best else []
    return page(
        "optimize.html.j2",
        styles=("optimize.css", "episodes.css"),
        name=name,
        code=code,
        best=best,
        probe=probe,
        verdict=verdict,
        strict=(verdict.strict if verdict else None) or {},
        ratio=faster_of_both(verdict) if verdict else None,
        judged=plural(sum(event["kind"] == "verdict" for event in events), "solution" if best is None else "judgement"),
        target=str(goal),
        ended=ENDS.get(why, why),
        where=where,
        spent=next((event for event in reversed(events) if event["kind"] == "spent"), None),
        bars_of_times=times_of(verdict, probe),
        ratios=ratios_of(verdict),
        baselines=BASELINES,
        rooflines=_roofline(verdict),
        files=sorted(files, key=lambda item: not item[0].startswith("kernels/")),
        needs=FORMATS[verdict.format].needs[verdict.device] if verdict else "",
        advice=[("advice", line) for line in verdict.advice[:6]] if verdict else [],
        attempts=_attempts(events),
        track=_track(events),
    )


def times_of(verdict: Verdict | None, probe: Probe) -> list[Bar]:
    if verdict is None:
        known = [("eager", probe.eager_seconds), ("torch.compile", probe.compile_seconds)]
        return [(label, seconds, duration(seconds), "quiet") for label, seconds in known if seconds]
    assert verdict.seconds
    bars: list[Bar] = [("this solution", verdict.seconds, _with_spread(verdict), "own")]
    for label, seconds, ends in _baselines(verdict):
        between = f", {ends[0]:.2f}–{ends[1]:.2f}" if ends else ""
        bars.append((label, seconds, f"{duration(seconds)} ({factor(seconds / verdict.seconds)}{between})", ""))
    return bars


def _baselines(verdict: Verdict) -> list[tuple[str, float, Sequence[float] | None]]:
    """Returns the baselines with which the verdict compares the solution: (name, seconds, interval of the speed-up)."""
    known = [("eager", verdict.eager_seconds, verdict.interval),
             ("torch.compile", verdict.compile_seconds, verdict.compile_interval)]  # fmt: skip
    if (strict := verdict.strict or {}).get("baselines"):
        parts = {label: baseline_parts(label) for label in strict["baselines"]}
        known = [(f"{BASELINES[kind]} {precision}", strict["baselines"][label], strict.get("intervals", {}).get(label))
                 for label, (kind, precision) in parts.items()]  # fmt: skip
    return [(name, seconds, ends) for name, seconds, ends in known if seconds]


def ratios_of(verdict: Verdict | None) -> Markup | None:
    """Draws the solution's speed-up over each baseline, with an interval.  Returns None if intervals are unknown."""
    if not verdict or not verdict.seconds:
        return None
    known = _baselines(verdict)
    rows = [(label, "", seconds / verdict.seconds, ends) for label, seconds, ends in known]
    return interval_chart("Times as fast as", rows, ratio=True) if any(ends for _, _, ends in known) else None


def _with_spread(verdict: Verdict) -> str:
    if len(verdict.samples) < 4:
        return duration(verdict.seconds)
    low, _, high = statistics.quantiles(verdict.samples, n=4)
    return f"{duration(verdict.seconds)}, half of the calls {duration(low)} to {duration(high)}"


def shares_of_peak(verdict: Verdict) -> list[str]:
    """Returns lines of text that compare the solution's bytes and FLOP per second with the device's peak rates.  Bytes
    are those of the task's inputs and outputs; FLOP are those of the reference.  An unknown quantity has no line.  The
    list is empty if the solution is not correct, or if its time is unknown or simulated."""
    if verdict.status != "ok" or verdict.clock == "model" or not verdict.seconds:
        return []
    peak = "the device's peak"
    copied = peak if verdict.device == "cuda" else "a measured copy"
    known = (
        (verdict.bytes, "B", "inputs and outputs of {}", verdict.peak_bytes_per_second, copied,
         "caches held a part, or not all was needed"),
        (verdict.flops, "FLOP", "{} in the reference", verdict.peak_flops, peak, "rougher arithmetic, or less of it"),
    )  # fmt: skip
    lines = []
    for count, unit, what, most, best, why_more in known:
        if count:
            rate = count / verdict.seconds
            lines.append(f"{what.format(amount(count, unit))}: {amount(rate, f'{unit}/s')}")
            if most and rate > most:
                lines[-1] += f", {rate / most:.2g} times {best}: {why_more}"
            elif most:
                lines[-1] += f", {rate / most:.0%} of {best}"
    if (reached := verdict.speed_of_light) and reached <= 1:
        least = duration(reached * verdict.seconds)
        lines.append(f"speed of light: {reached:.0%}; at the peak rates the call takes {least}")
    return lines


def _roofline(verdict: Verdict | None) -> dict[str, Any]:
    """Returns what the page shows about the device's limits, as variables for the template.

    ``said`` and ``standing`` are text.  ``chart`` is a roofline chart, or None if the task's FLOP are 0 or unknown, or
    the peak bandwidth is unknown.  If only the FLOP are missing, ``bars`` compares bandwidths instead.  The dict is
    empty if the solution's time or the task's number of bytes is unknown, or if times are simulated."""
    if verdict is None or verdict.clock == "model" or not verdict.seconds or not verdict.bytes:
        return {}
    peak, eager = verdict.peak_bytes_per_second, verdict.eager_seconds
    rates = [("this solution", verdict.bytes / verdict.seconds, "own")]
    rates += [("eager", verdict.bytes / eager, "")] if eager else []
    rates += [("peak", peak, "quiet")] if peak else []
    return {
        "said": shares_of_peak(verdict),
        "standing": standing(verdict),
        "chart": _roof_chart(verdict, peak) if peak and verdict.flops else None,
        "bars": [(label, rate, amount(rate, "B/s"), css) for label, rate, css in rates if peak and not verdict.flops],
    }


def _roof_chart(verdict: Verdict, peak: float) -> Markup:
    """Draws the device's roofline: FLOP per second over FLOP per byte of inputs and outputs.  The solution,
    ``torch.compile`` and eager are dots.  ``peak`` is the peak memory bandwidth in bytes per second."""
    assert verdict.flops and verdict.bytes and verdict.seconds
    intensity = verdict.flops / verdict.bytes
    timed = (("this solution", verdict.seconds), ("torch.compile", verdict.compile_seconds),
             ("eager", verdict.eager_seconds))  # fmt: skip
    points = [(label, verdict.flops / seconds) for label, seconds in timed if seconds]
    ridge = verdict.peak_flops / peak if verdict.peak_flops else intensity * 10
    xs = [math.log10(v) for v in (intensity / 10, intensity * 10, ridge / 10, ridge * 4)]
    left, right = min(xs), max(xs)
    roof = [(x, min(x + math.log10(peak), math.log10(verdict.peak_flops or math.inf))) for x in (left, right)]
    if verdict.peak_flops and left < math.log10(ridge) < right:
        roof.insert(1, (math.log10(ridge), math.log10(verdict.peak_flops)))
    ys = [y for _, y in roof] + [math.log10(value) for _, value in points]
    low, high = min(ys) - 0.3, max(ys) + 0.3
    width, height, margin, bottom = 760, 340, 70, 40
    chart = Drawing(width, height, "chart wide")

    def x(value: float) -> float:
        return margin + (value - left) / (right - left) * (width - margin - 20)

    def y(value: float) -> float:
        return 12 + (high - value) / (high - low) * (height - bottom - 12)

    for exponent in range(math.ceil(low), math.floor(high) + 1):
        chart.line("grid", margin, y(exponent), width - 20, y(exponent))
        chart.text("tick", margin - 6, y(exponent) + 4, amount(10.0**exponent, "FLOP/s"), "end")
    for exponent in range(math.ceil(left), math.floor(right) + 1):
        chart.line("grid", x(exponent), 12, x(exponent), height - bottom)
        chart.text("tick", x(exponent), height - 22, number(10.0**exponent), "middle")
    chart.text("tick", width - 20, height - 6, "operations a byte of inputs and outputs", "end")
    chart.path("roof", [(x(at), y(value)) for at, value in roof])
    at, heights = x(math.log10(intensity)), [y(math.log10(value)) for _, value in points]
    for (label, _), place, beside in zip(points, heights, apart(heights, 15), strict=True):
        chart.dot(*(("dot top", at, place, 6) if label == points[0][0] else ("dot miss", at, place, 4)))
        chart.text("row-label", at + 10, beside + 4, label)
    spoken = "; ".join(f"{label} {amount(value, 'FLOP/s')}" for label, value in points)
    return chart.svg(f"Roofline at {number(intensity)} operations a byte: {spoken}")


def _track(events: Sequence[Event]) -> Markup | None:
    """Draws how the search went over time: a dot for each verdict of quick mode, and a line for the best speed-up so
    far.  Speed-ups are over the faster of eager and ``torch.compile``; a solution that is not correct counts as 0.
    Returns None if there is no such verdict."""
    quick = [event for event in events if event["kind"] == "verdict" and event["verdict"]["mode"] == "quick"]
    if not quick:
        return None
    marks = ticks(0, max([event["factor"] or 0.0 for event in quick] + [1.0]) * 1.05)
    width, height, left, bottom = 760, 240, 44, 30
    span = max(max(event["at"] for event in quick), 1e-9)
    chart = Drawing(width, height, "chart wide")

    def place(at: float, value: float) -> tuple[float, float]:
        return left + at / span * (width - left - 16), 10 + (1 - value / marks[-1]) * (height - bottom - 10)

    for mark in marks:
        y = place(0, mark)[1]
        chart.line("grid one" if mark == 1 else "grid", left, y, width - 16, y)
        chart.text("tick", left - 6, y + 4, f"{number(mark)}×", "end")
    chart.text("tick", width - 16, height - 8, clock_time(span), "end")
    chart.text("tick", left, height - 8, "0")
    best = 0.0
    steps: list[tuple[float, float]] = []
    for event in quick:
        if (event["factor"] or 0.0) > best:
            steps += [place(event["at"], best)] if best else []
            best = event["factor"]
            steps.append(place(event["at"], best))
    if steps:
        chart.path("best-so-far", [*steps, place(span, best)])
    for event in quick:
        said = factor(event["factor"]) if event["factor"] else event["verdict"]["status"]
        title = f"attempt {event['attempt']}, {clock_time(event['at'])}: {said}"
        chart.dot("dot" if event["factor"] else "dot miss", *place(event["at"], event["factor"] or 0.0), 4, title)
    return chart.svg(f"{plural(len(quick), 'judged solution')}, the best {factor(best) if best else 'none'}")


def _attempts(events: Sequence[Event]) -> list[dict[str, Any]]:
    attempts = []
    for attempt in sorted({event["attempt"] for event in events if event["attempt"]}):
        own = [event for event in events if event["attempt"] == attempt]
        ended = next((event for event in reversed(own) if event["kind"] == "ended"), {"why": "", "summary": ""})
        best = max((event["factor"] or 0.0 for event in own if event["kind"] == "verdict"), default=0.0)
        facts = {"number": attempt, "best": best, "end": ENDS.get(ended["why"], ""), "summary": ended["summary"]}
        attempts.append(facts | {"story": of_attempt(own, attempt)})
    return attempts
