"""Draws charts for the HTML pages as inline SVG.

Colours and fonts come from the page's CSS, so that the same chart suits the light theme, the dark theme and print."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from markupsafe import Markup

from cuda_agent.pages.text import safe

Points = Sequence[tuple[float, float]]
Anchor = Literal["start", "middle", "end"]
_LARGE = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1))  # prefixes of units, and what they multiply
_SMALL = (("", 1), ("m", 1e-3), ("µ", 1e-6), ("n", 1e-9))


class Drawing:
    """A chart in SVG.  Its methods add shapes.  Later shapes cover earlier ones.

    The constructor's argument ``css`` is the CSS class of the whole chart.  A method's argument ``css`` is the CSS
    class of the added shape."""

    def __init__(self, width: float, height: float, css: str = "chart") -> None:
        self.width, self.height, self._css = width, height, css
        self._shapes: list[str] = []

    def line(self, css: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._shapes.append(f'<line class="{css}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>')

    def text(self, css: str, x: float, y: float, text: str, anchor: Anchor = "start") -> None:
        self._shapes.append(f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>')

    def dot(self, css: str, x: float, y: float, radius: float, title: str = "") -> None:
        self._shapes.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{_title(title)}</circle>')

    def bar(self, css: str, x: float, y: float, width: float, height: float, title: str) -> None:
        size = f'width="{width:.1f}" height="{height:.1f}" rx="1.5"'
        self._shapes.append(f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" {size}>{_title(title)}</rect>')

    def path(self, css: str, points: Points, tag: Literal["polyline", "polygon"] = "polyline") -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<{tag} class="{css}" points="{places}"/>')

    def svg(self, spoken: str) -> Markup:
        """Returns the chart as SVG; ``spoken`` is the text for screen readers."""
        box = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        head = f'class="{self._css}" {box} role="img" aria-label="{safe(spoken)}"'
        return Markup(f"<svg {head}>{''.join(self._shapes)}</svg>")


def _title(text: str) -> str:
    return f"<title>{safe(text)}</title>" if text else ""


def _room(texts: Sequence[str], size: float) -> float:
    """Returns about the width of the longest of ``texts`` in a font of ``size`` pixels, with a gap beside it."""
    return 0.6 * size * max(map(len, texts), default=0) + 8


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Returns ``places`` in their order.  A place that is nearer than ``gap`` to the next smaller one is raised."""
    moved, last = list(places), -math.inf
    for i in sorted(range(len(places)), key=places.__getitem__):
        moved[i] = last = max(places[i], last + gap)
    return moved


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with ``digits`` significant digits, but keeps all digits before the decimal point.  Drops zeros
    at the end of a fraction, and puts thin spaces between thousands.  A magnitude below 1e-4, or of 1e7 and more, has
    an exponent.  None, NaN and infinity give "–"."""
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
    """Returns about ``most`` round numbers, evenly spaced, that cover the range from ``low`` to ``high``."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # also if the numbers differ by rounding alone
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(12, 3 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def line_chart(
    title: str, points: Points, *, from_zero: bool = False, rule: tuple[float, str] | None = None, percent: bool = False
) -> Markup:
    """Draws a curve through ``points``, which are pairs (training step, value).

    Args:
        title: The chart's name for screen readers.
        points: The points, in the order of the steps; at least one.
        from_zero: Whether the vertical axis includes 0.
        rule: (value, label) of a dashed horizontal line; None: no line.
        percent: Whether the values are shares from 0 to 1, to be shown in percent."""
    width, height, right, top, bottom = 320, 178, 14, 12, 28
    end, foot = width - right, height - 9
    shown = [v for _, v in points] + ([rule[0]] if rule else []) + [0.0] * from_zero
    marks = ticks(min(shown), max(shown), 4)
    named = [f"{100 * mark:g}\u202f%" if percent else number(mark) for mark in marks]
    left = max(44.0, _room(named, 11))
    x_low, x_high = points[0][0], points[-1][0]

    def x(value: float) -> float:
        return left + (end - left) * ((value - x_low) / (x_high - x_low) if x_high > x_low else 0.5)

    def y(value: float) -> float:
        return top + (height - top - bottom) * (1 - (value - marks[0]) / (marks[-1] - marks[0]))

    say: Callable[[float | None], str] = share if percent else number
    chart = Drawing(width, height)
    for mark, name in zip(marks, named, strict=True):
        chart.line("grid", left, y(mark), end, y(mark))
        chart.text("tick", left - 7, y(mark) + 3.5, name, "end")
    if rule:
        chart.line("rule", left, y(rule[0]), end, y(rule[0]))
        chart.text("rule-label", end, y(rule[0]) - 5, rule[1], "end")
    if x_high > x_low:
        chart.text("tick", left, foot, f"{x_low:g}")
        chart.text("tick", (left + end) / 2, foot, "step", "middle")
        chart.text("tick", end, foot, f"{x_high:g}", "end")
    else:
        chart.text("tick", x(x_low), foot, f"{x_low:g}", "middle")
    places = [(x(at), y(value)) for at, value in points]
    chart.path("area", [(places[0][0], y(marks[0])), *places, (places[-1][0], y(marks[0]))], "polygon")
    chart.path("curve", places)
    if len(points) <= 24:
        for place, (at, value) in zip(places, points, strict=True):
            chart.dot("dot", *place, 2.6, f"step {at:g}: {say(value)}")
    else:
        chart.dot("dot", *places[-1], 2.8)
    return chart.svg(f"{title}: from {say(points[0][1])} to {say(points[-1][1])} over {len(points)} steps")


def interval_chart(
    title: str, rows: Sequence[tuple[str, str, float | None, Sequence[float] | None]], ratio: bool
) -> Markup:
    """Draws each row (label, CSS class, value, interval) as a dot with its interval, and writes the value beside it.
    With ``ratio``, the values are ratios, such as speed-ups, on a logarithmic axis with 1 at its centre.  Otherwise
    they are shares from 0 to 1.  ``title`` is for screen readers."""
    row_height, left, right, top = 30, max(74.0, _room([row[0] for row in rows], 13)), 70, 6
    width = left + 246
    chart = Drawing(width, top + row_height * len(rows) + 24)
    if ratio:
        known = [v for _, _, value, interval in rows for v in (value, *(interval or ())) if v is not None]
        high = math.exp(1.08 * max(abs(math.log(v)) for v in [*known, 1.25] if v > 0))
        low = 1 / high
        fine, coarse = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 20, 100), (0.01, 0.05, 0.25, 1, 4, 20, 100)
        marks = [m for m in (coarse if high / low > 32 else fine) if low <= m <= high]
        if len(marks) < 3:
            marks = [m for m in (0.6, 0.8, 1, 1.25, 1.6) if low <= m <= high]
    else:
        marks = [0.0, 0.25, 0.5, 0.75, 1.0]

    def x(value: float) -> float:
        at = math.log(max(value, low) / low) / math.log(high / low) if ratio else value
        return left + (width - left - right) * min(1.0, max(0.0, at))

    say: Callable[[float | None], str] = factor if ratio else share
    for mark in marks:
        chart.line("grid one" if ratio and mark == 1 else "grid", x(mark), top, x(mark), chart.height - 20)
        chart.text("tick", x(mark), chart.height - 6, f"{mark:g}×" if ratio else f"{100 * mark:.0f}", "middle")
    for i, (label, name, value, interval) in enumerate(rows):
        y = top + row_height * (i + 0.5)
        chart.text("row-label", 0, y + 4, label)
        if interval and value is not None:
            chart.line(f"whisker {name}", x(interval[0]), y, x(interval[1]), y)
        if value is not None:
            chart.dot(f"mark {name}", x(value), y, 5)
        chart.text("value none" if value is None else "value", width, y + 4, say(value), "end")
    return chart.svg(f"{title}: " + ", ".join(f"{label} {say(value)}" for label, _, value, _ in rows))


def histogram(title: str, edges: Sequence[float], counts: Sequence[float], unit: str) -> Markup:
    """Draws a histogram of tasks.  ``counts[i]`` is the number of tasks between ``edges[i]`` and ``edges[i + 1]``.  The
    edges are in ``unit``, such as "ms".  Labels the first, middle and last edge.  ``title`` is for screen readers."""
    width, height, left, top, bottom = 640, 170, 4, 18, 26
    step, most, floor = (width - 2 * left) / max(1, len(counts)), max([*counts, 1]), height - bottom
    chart = Drawing(width, height, "chart wide")
    chart.line("axis", left, floor, width - left, floor)
    for i, count in enumerate(counts):
        tall = (floor - top) * count / most
        if count:
            name = f"{number(edges[i], 2)} to {number(edges[i + 1], 2)} {unit}: {count:g}"
            chart.bar("bar", left + i * step + 1.5, floor - tall, step - 3, tall, name)
            chart.text("tick", left + (i + 0.5) * step, floor - tall - 5, f"{count:g}", "middle")
    last = len(edges) - 1
    named: tuple[tuple[int, Anchor], ...] = ((0, "start"), (last // 2, "middle"), (last, "end"))
    for i, anchor in named:
        chart.text("tick", left + i * step, height - 8, f"{number(edges[i], 2)} {unit}", anchor)
    return chart.svg(f"{title}: {sum(counts):g} tasks")


def stack_chart(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, int]]]]) -> Markup:
    """Draws each row (label, [(CSS class, count), ...]) as a stacked bar, with one segment per count that is not 0.
    Text beside the bar shows the first count and the sum, as in "3 of 8".  ``title`` is for screen readers."""
    row_height, left, right, top = 30, max(74.0, _room([label for label, _ in rows], 13)), 70, 6
    width = left + 246
    chart, spoken = Drawing(width, top + row_height * len(rows) + 24), []
    for i, (label, pieces) in enumerate(rows):
        y, total, at = top + row_height * (i + 0.5), sum(n for _, n in pieces), float(left)
        named = [(css, css.removeprefix("s-").replace("_", " "), count) for css, count in pieces if count]
        chart.text("row-label", 0, y + 4, label)
        for css, name, count in named:
            wide = (width - left - right) * count / total
            chart.bar(css, at, y - 6, max(wide - 1.5, 0.5), 12, f"{name}: {count}")
            at += wide
        chart.text("value", width, y + 4, f"{pieces[0][1]} of {total}" if pieces else "none", "end")
        spoken.append(f"{label} " + ", ".join(f"{count} {name}" for _, name, count in named))
    return chart.svg(f"{title}: " + "; ".join(spoken))


def share(value: float | None) -> str:
    """Formats a share (0 to 1) in percent: 0.715 gives ``71.5 %``."""
    return "–" if value is None else f"{100 * value:.1f}\u202f%"


def factor(value: float | None) -> str:
    """Formats a ratio, such as a speed-up: 1.5 gives ``1.50×``."""
    return "–" if value is None else (f"{value:.2f}×" if value < 99.5 else f"{value:.0f}×")


def clock_time(seconds: float | None) -> str:
    """Formats seconds as ``0.21 s``, ``48 s``, ``3 min 20 s`` or ``2 h 5 min``."""
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
    """Formats a kernel's time in seconds as ``12.3 µs``, ``1.2 ms`` or ``2 s``."""
    return "–" if seconds is None else amount(seconds, "s", _SMALL)


def amount(value: float, unit: str, prefixes: Sequence[tuple[str, float]] = _LARGE) -> str:
    """Formats a value with a unit and a fitting prefix: 33e6 with the unit ``B`` gives ``33 MB``."""
    prefix, size = next((known for known in prefixes if value >= known[1]), prefixes[-1])
    return f"{number(value / size)} {prefix}{unit}"
