"""The report's charts: numbers -> inline SVG.

Pure; colours and fonts come from the page's style sheet through classes, so one chart serves light, dark and paper.
Does not: interactive charts, or anything that needs a script.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from markupsafe import Markup

from cuda_agent.pages.text import safe

Scale = Literal["linear", "log"]
Points = Sequence[tuple[float, float]]


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: ``digits`` significant ones, thin thousands, no exponent between 1e-4 and 1e7."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 1e-4 or abs(value) >= 1e7:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}".replace(",", "\u202f")
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, at most about ``most``."""
    if not high > low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(
    title: str,
    points: Points,
    *,
    bounds: tuple[float | None, float | None] = (None, None),
    rule: tuple[float, str] | None = None,
    percent: bool = False,
) -> Markup:
    """One curve.  ``bounds`` are values the axis must include (None: fit); ``rule`` draws a dashed line with its
    label."""
    width, height, left, right, top, bottom = 320, 178, 44, 14, 12, 28
    shown = [v for _, v in points] + ([rule[0]] if rule else []) + [b for b in bounds if b is not None]
    marks = ticks(min(shown), max(shown), 4)
    x_low, x_high = points[0][0], points[-1][0]
    span = (x_high - x_low) or 1.0

    def x(value: float) -> float:
        return left + (width - left - right) * ((value - x_low) / span if x_high > x_low else 0.5)

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - (value - marks[0]) / (marks[-1] - marks[0]))

    say: Callable[[float | None], str] = share if percent else number
    parts = [
        f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(m):.1f}" y2="{y(m):.1f}"/>'
        f'<text class="tick" x="{left - 7}" y="{y(m) + 3.5:.1f}" text-anchor="end">'
        f"{f'{100 * m:g}' + chr(0x202F) + '%' if percent else number(m)}</text>"
        for m in marks
    ]
    if rule:
        parts.append(
            f'<line class="rule" x1="{left}" x2="{width - right}" y1="{y(rule[0]):.1f}" y2="{y(rule[0]):.1f}"/>'
            f'<text class="rule-label" x="{width - right}" y="{y(rule[0]) - 5:.1f}" text-anchor="end">'
            f"{safe(rule[1])}</text>"
        )
    for value in {x_low, x_high}:
        anchor = "middle" if x_low == x_high else "start" if value == x_low else "end"
        parts.append(f'<text class="tick" x="{x(value):.1f}" y="{height - 9}" text-anchor="{anchor}">{value:g}</text>')
    parts.append(
        f'<text class="tick" x="{(left + width - right) / 2:.0f}" y="{height - 9}" text-anchor="middle">'
        f"{'step' if x_high > x_low else ''}</text>"
    )
    places = [(x(at), y(value)) for at, value in points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    floor = y(marks[0])
    parts.append(
        f'<polygon class="area" points="{places[0][0]:.1f},{floor:.1f} {path} {places[-1][0]:.1f},{floor:.1f}"/>'
    )
    parts.append(f'<polyline class="curve" points="{path}"/>')
    if len(points) <= 24:
        parts += [
            f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="2.6"><title>step {at:g}: {say(v)}</title></circle>'
            for (px, py), (at, v) in zip(places, points, strict=True)
        ]
    else:
        parts.append(f'<circle class="dot" cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="2.8"/>')
    spoken = f"{title}: from {say(points[0][1])} to {say(points[-1][1])} over {len(points)} steps"
    return svg("chart", width, height, spoken, parts)


def interval_chart(
    title: str,
    rows: Sequence[tuple[str, str, float | None, tuple[float, float] | None]],
    *,
    scale: Scale = "linear",
    rule: float | None = None,
    percent: bool = False,
) -> Markup:
    """One row a policy: (label, class, value, interval); a dot, its interval and the value in words."""
    width, row_height, left, right, top = 320, 30, 74, 70, 6
    height = top + row_height * len(rows) + 24
    say: Callable[[float | None], str] = share if percent else factor
    known = [v for _, _, value, interval in rows for v in (value, *(interval or ())) if v is not None]
    if scale == "log":
        reach = max([abs(math.log(v)) for v in [*known, 1.25] if v > 0])
        low, high = math.exp(-reach * 1.08), math.exp(reach * 1.08)
        marks = [m for m in (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20, 100) if low <= m <= high]
        if len(marks) < 3:
            marks = [m for m in (0.6, 0.8, 1, 1.25, 1.6) if low <= m <= high]
    else:
        low, high, marks = 0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]

    def x(value: float) -> float:
        at = (
            (math.log(max(value, low) / low) / math.log(high / low)) if scale == "log" else (value - low) / (high - low)
        )
        return left + (width - left - right) * min(1.0, max(0.0, at))

    end = height - 20
    parts = []
    for m in marks:
        strong = " one" if m == rule else ""
        parts.append(f'<line class="grid{strong}" x1="{x(m):.1f}" x2="{x(m):.1f}" y1="{top}" y2="{end}"/>')
        label = f"{100 * m:.0f}" if percent else f"{m:g}×"
        parts.append(f'<text class="tick" x="{x(m):.1f}" y="{height - 6}" text-anchor="middle">{label}</text>')
    for i, (label, name, value, interval) in enumerate(rows):
        y = top + row_height * (i + 0.5)
        parts.append(f'<text class="row-label" x="0" y="{y + 4:.1f}">{safe(label)}</text>')
        if value is None:
            parts.append(f'<text class="value none" x="{width}" y="{y + 4:.1f}" text-anchor="end">none</text>')
            continue
        if interval:
            parts.append(
                f'<line class="whisker {name}" x1="{x(interval[0]):.1f}" x2="{x(interval[1]):.1f}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        parts.append(f'<circle class="mark {name}" cx="{x(value):.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(f'<text class="value" x="{width}" y="{y + 4:.1f}" text-anchor="end">{say(value)}</text>')
    spoken = f"{title}: " + ", ".join(f"{label} {say(value)}" for label, _, value, _ in rows)
    return svg("chart", width, height, spoken, parts)


def histogram(title: str, edges: Sequence[float], counts: Sequence[float], unit: str) -> Markup:
    """Bars over logarithmic intervals; the first and last edge and the middle one are named."""
    width, height, left, top, bottom = 640, 170, 4, 18, 26
    step, most = (width - 2 * left) / max(1, len(counts)), max([*counts, 1])
    parts = [f'<line class="axis" x1="{left}" x2="{width - left}" y1="{height - bottom}" y2="{height - bottom}"/>']
    for i, count in enumerate(counts):
        tall = (height - top - bottom) * count / most
        name = f"{number(edges[i], 2)} to {number(edges[i + 1], 2)} {unit}: {count:g}"
        if count:
            parts.append(
                f'<rect class="bar" x="{left + i * step + 1.5:.1f}" y="{height - bottom - tall:.1f}" '
                f'width="{step - 3:.1f}" height="{tall:.1f}" rx="2"><title>{name}</title></rect>'
                f'<text class="tick" x="{left + (i + 0.5) * step:.1f}" y="{height - bottom - tall - 5:.1f}" '
                f'text-anchor="middle">{count:g}</text>'
            )
    last = len(edges) - 1
    for i, anchor in ((0, "start"), (last // 2, "middle"), (last, "end")):
        parts.append(
            f'<text class="tick" x="{left + i * step:.1f}" y="{height - 8}" text-anchor="{anchor}">'
            f"{number(edges[i], 2)} {safe(unit)}</text>"
        )
    return svg("chart wide", width, height, f"{title}: {sum(counts):g} tasks", parts)


def stack_chart(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, int]]]]) -> Markup:
    """One row a policy: (label, [(class, count), ...]); the first count of all is what the row says in words."""
    width, row_height, left, right, top = 320, 30, 74, 70, 6
    height = top + row_height * len(rows) + 24
    parts = []
    for i, (label, pieces) in enumerate(rows):
        y, total, at = top + row_height * (i + 0.5), sum(n for _, n in pieces) or 1, float(left)
        parts.append(f'<text class="row-label" x="0" y="{y + 4:.1f}">{safe(label)}</text>')
        for name, count in pieces:
            wide = (width - left - right) * count / total
            said = f"{name.removeprefix('s-').replace('_', ' ')}: {count}"
            if count:
                parts.append(
                    f'<rect class="{name}" x="{at:.1f}" y="{y - 6:.1f}" width="{max(wide - 1.5, 0.5):.1f}" height="12" '
                    f'rx="1.5"><title>{safe(said)}</title></rect>'
                )
            at += wide
        first = f"{pieces[0][1]} of {sum(n for _, n in pieces)}" if pieces else "none"
        parts.append(f'<text class="value" x="{width}" y="{y + 4:.1f}" text-anchor="end">{first}</text>')
    spoken = f"{title}: " + "; ".join(
        f"{label} " + ", ".join(f"{n} {c.removeprefix('s-').replace('_', ' ')}" for c, n in pieces if n)
        for label, pieces in rows
    )
    return svg("chart", width, height, spoken, parts)


def share(value: float | None) -> str:
    """0.715 -> ``71.5 %``"""
    return "–" if value is None else f"{100 * value:.1f}\u202f%"


def factor(value: float | None) -> str:
    """1.5 -> ``1.50×``"""
    return "–" if value is None else (f"{value:.2f}×" if value < 99.5 else f"{value:.0f}×")


def clock_time(seconds: float | None) -> str:
    """``0.21 s``, ``48 s``, ``3 min 20 s``, ``2 h 5 min``"""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{number(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def duration(seconds: float | None) -> str:
    """A time of a kernel: ``12.3 µs``, ``1.2 ms``, ``2 s``"""
    if seconds is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds / 1e-9)} ns"


def svg(classes: str, width: float, height: float, spoken: str, parts: Sequence[str]) -> Markup:
    """``spoken``: what a screen reader says."""
    head = f'class="{classes}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{safe(spoken)}"'
    return Markup(f"<svg {head}>{''.join(parts)}</svg>")
