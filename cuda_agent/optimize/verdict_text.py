"""Formats a verdict (the sandbox's judgement of one solution) as text for a person.  The text fits one screen."""

import statistics
from collections.abc import Sequence
from typing import Any

from cuda_agent.pages.optimize import shares_of_peak
from cuda_agent.sandbox.wire import BASELINES, Verdict, baseline_parts

_SHOWN = 6  # most kernels and operators of a call that are shown


def verdict_lines(verdict: Verdict) -> list[str]:
    known = "; measured before and kept" if verdict.cached else ""
    lines = [f"{verdict.status}  (format {verdict.format}, device {verdict.device}, mode {verdict.mode}{known})"]
    if verdict.message:
        lines.append(verdict.message)
    if verdict.advisory:
        lines.append("advisory: the solution's Python ran free, and what it computed with is not known")
    if verdict.untimed:
        lines.append(f"not timed: {verdict.untimed}")
    elif verdict.clock == "model":
        lines.append("sandbox.clock=model: the times below are a deterministic cost, not measured")
    if verdict.seconds is not None:
        lines.append(_row("solution", verdict.seconds, note=_spread(verdict.samples)))
    if verdict.strict and "baselines" in verdict.strict:
        lines += _strict_times(verdict, verdict.strict)
    else:
        for name, seconds, factor, interval in (
            ("eager", verdict.eager_seconds, verdict.speedup_eager, verdict.interval),
            ("torch.compile", verdict.compile_seconds, verdict.speedup_compile, verdict.compile_interval),
        ):
            if seconds is not None:
                lines.append(_row(name, seconds, factor, _between(interval)))
    if verdict.strict and verdict.strict.get("kinds"):
        strict = verdict.strict
        kinds = ", ".join(strict["kinds"])
        skipped = f" (none possible: {', '.join(strict['skipped'])})" if strict["skipped"] else ""
        lines.append(f"inputs: {kinds}{skipped}")
        beside = f"error against double precision {strict['error']:.1e}, eager's {strict['eager_error']:.1e}"
        lines.append(beside + ("" if strict["repeatable"] else "; two runs on the same inputs differ"))
    if verdict.checks and verdict.status == "ok":
        error = f", largest difference from eager {verdict.max_error:.2g}" if verdict.max_error is not None else ""
        lines.append(f"{verdict.checks} checks passed{error}; reward {verdict.reward}")
    elif verdict.checks:
        lines.append(f"before that, {verdict.checks} checks passed")
    lines += shares_of_peak(verdict) + _ran(verdict)
    return lines + [f"advice: {line}" for line in verdict.advice]


def _spread(samples: Sequence[float]) -> str:
    if len(samples) < 4:
        return ""
    low, _, high = statistics.quantiles(samples, n=4)
    return f"   half of {len(samples)} calls between {low * 1e6:.1f} and {high * 1e6:.1f}"


def _between(interval: Sequence[float] | None) -> str:
    return f" (95 % {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""


def _ran(verdict: Verdict) -> list[str]:
    lines = []
    for ran in verdict.ran[:_SHOWN]:
        times = f" x{ran.calls}" if ran.calls > 1 else ""
        share = f" {ran.share:.0%}" if ran.share is not None else ""
        lines.append(f"ran: {ran.name}{times} ({ran.kind}{share})")
    if len(verdict.ran) > _SHOWN:
        lines.append(f"ran: {len(verdict.ran) - _SHOWN} more")
    return lines


def _row(name: str, seconds: float, factor: float | None = None, note: str = "") -> str:
    faster = f"   solution is {factor:.2f}x as fast" if factor else ""
    return f"{name:18} {seconds * 1e6:10.1f} µs{faster}{note}"


def _strict_times(verdict: Verdict, strict: dict[str, Any]) -> list[str]:
    """Returns lines about the measurements of strict mode, the sandbox's more thorough mode.

    The lines give the time of each baseline (the task's own model, eager or compiled, at one precision), and why a
    baseline could not be timed.  If the solution's error is larger than that of fp32, a last line says which precision
    it suggests.  ``strict`` is ``verdict.strict``."""
    baselines, precision = strict["baselines"], strict["precision"]
    lines = []
    for label, seconds in baselines.items():
        name, arithmetic = baseline_parts(label)
        note = _between(strict.get("intervals", {}).get(label))
        same = "   <- the same arithmetic" if arithmetic == precision != "fp32" else ""
        factor = seconds / verdict.seconds if verdict.seconds else None
        lines.append(_row(f"{BASELINES[name]} {arithmetic}", seconds, factor, note + same))
    lines += [
        f"{BASELINES[baseline_parts(label)[0]]}: {str(why).splitlines()[0][:90]}"
        for label, why in strict["failed"].items()
    ]
    if any(arithmetic == precision != "fp32" for _, arithmetic in map(baseline_parts, baselines)):
        lines.append(f"its error is that of {precision} arithmetic: compare it with the baselines of that precision")
    elif precision and precision != "fp32":
        rough = precision.removeprefix("below ")
        lines.append(f"its error is larger than that of {rough} arithmetic, and no baseline is as rough")
    return lines
