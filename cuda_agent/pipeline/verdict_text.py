"""A verdict on one screen, for a person."""

from cuda_agent.sandbox.wire import BASELINES, Verdict, baseline, baseline_parts


def verdict_lines(verdict: Verdict) -> list[str]:
    lines = [f"{verdict.status}  (lane {verdict.lane}, device {verdict.device}, mode {verdict.mode})"]
    if verdict.message:
        lines.append(verdict.message)
    if verdict.advisory:
        lines.append("advisory: the solution's Python ran free, and what it computed with is not known")
    if verdict.clock == "model":
        lines.append("sandbox.clock=model: the times below are a deterministic cost, not measured")
    if verdict.seconds is not None:
        lines.append(_row("solution", verdict.seconds))
    if verdict.strict and "baselines" in verdict.strict:
        lines += _strict_times(verdict, verdict.strict)
    else:
        for name, seconds, factor in (
            ("eager", verdict.eager_seconds, verdict.speedup_eager),
            ("torch.compile", verdict.compile_seconds, verdict.speedup_compile),
        ):
            if seconds is not None:
                lines.append(_row(name, seconds, factor))
    if verdict.strict and verdict.strict.get("kinds"):
        strict = verdict.strict
        kinds = ", ".join(strict["kinds"])
        skipped = f" (none possible: {', '.join(strict['skipped'])})" if strict["skipped"] else ""
        lines.append(f"inputs: {kinds}{skipped}")
        beside = f"error against double precision {strict['error']:.1e}, eager's {strict['eager_error']:.1e}"
        lines.append(beside + ("" if strict["repeatable"] else "; two runs on the same inputs differ"))
    if verdict.checks:
        error = f", largest difference from eager {verdict.max_error:.2g}" if verdict.max_error is not None else ""
        lines.append(f"{verdict.checks} checks passed{error}; reward {verdict.reward}")
    return lines


def _row(name: str, seconds: float, factor: float | None = None, note: str = "") -> str:
    faster = f"   solution is {factor:.2f}x as fast" if factor else ""
    return f"{name:18} {seconds * 1e6:10.1f} µs{faster}{note}"


def _strict_times(verdict: Verdict, strict: dict[str, object]) -> list[str]:
    """Every baseline, and by what arithmetic the solution's error is explained."""
    baselines, interval, failed = strict["baselines"], strict["interval"], strict["failed"]
    precision = strict["precision"]
    assert isinstance(baselines, dict) and isinstance(failed, dict) and isinstance(interval, list | tuple)
    lines = []
    for label, seconds in baselines.items():
        name, arithmetic = baseline_parts(label)
        first = label == baseline("eager", "fp32")
        note = f" (95 % {interval[0]:.2f} to {interval[1]:.2f})" if first else ""
        same = "   <- the same arithmetic" if arithmetic == precision != "fp32" else ""
        factor = seconds / verdict.seconds if verdict.seconds else None
        lines.append(_row(f"{BASELINES[name]} {arithmetic}", seconds, factor, note + same))
    lines += [
        f"{BASELINES[baseline_parts(label)[0]]}: {str(why).splitlines()[0][:90]}" for label, why in failed.items()
    ]
    if precision and precision != "fp32":
        lines.append(f"its error is that of {precision} arithmetic: compare it with the baselines of that precision")
    return lines
