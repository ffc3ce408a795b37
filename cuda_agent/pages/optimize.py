"""The page of `cuda-agent optimize`: what was found, how much faster it is and how that is known, and the way there.

Pure; one static HTML file without scripts, in the style of the workflow's report.  Whatever tasks, models and tools
said is escaped.  Does not: measure or choose anything.
"""

import math
import statistics
from collections.abc import Sequence
from html import escape

from cuda_agent.agent.progress import Event, Find
from cuda_agent.agent.progress import factor as faster_of_both
from cuda_agent.agent.tools import standing
from cuda_agent.pages.charts import bars, clock_time, duration, factor, interval_chart, number, ticks
from cuda_agent.pages.page import diff_rows, document, safe, source, style_sheet
from cuda_agent.pages.tables import empty, plural
from cuda_agent.sandbox.formats.table import FORMATS
from cuda_agent.sandbox.wire import BASELINES, Probe, Tensor, Verdict, baseline, baseline_parts

_ENDS = {
    "target": "the target was reached", "answer": "the model said that nothing more was to be gained",
    "turns": "all turns were used", "tokens": "the token budget was used up", "minutes": "the time was up",
    "money": "the money was spent", "stuck": "the model repeated itself", "infra": "the sandbox failed",
    "server": "the model's address was lost", "stopped": "it was stopped",
}  # fmt: skip
_SHOWN_TEXT, _SHOWN_TURNS = 3000, 200


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
    sections = [
        ("result", "Times", _times(verdict, probe)),
        ("roofline", "Under the roofline", _roofline(verdict)),
        ("kernel", "The kernels", _kernels(best)),
        ("use", "Using it", _use(best, verdict)),
        ("story", "How it came about", _story(events)),
        ("measured", "How it was measured", _measured(verdict, probe)),
        ("problem", "The problem", f'<pre tabindex="0"><code>{safe(code)}</code></pre>'),
    ]
    clock = "model" if verdict is not None and verdict.clock == "model" else "real"
    footer = (
        f"Clock: {clock}{' (nothing was measured)' if clock == 'model' else ''}. Intervals are 95 % bootstrap "
        "intervals over timed calls."
    )
    head = _head(name, verdict, best, events, why, target, where)
    style = style_sheet("optimize.css")
    return document(f"{name}: cuda-agent optimize", head, sections, footer, style, "the times")


def _head(
    name: str, verdict: Verdict | None, best: Find | None, events: Sequence[Event], why: str, target: float, where: str
) -> str:
    judged = sum(event["kind"] == "verdict" for event in events)
    parts = ['<p class="over">cuda-agent optimize</p>']
    if verdict is None or best is None:
        parts.append(f"<h1>{escape(name)}: no correct solution</h1>")
        lede = f"{plural(judged, 'solution')} judged, none of them correct."
    else:
        ratio, against = _against(verdict)
        how = "faster" if (ratio or 0) >= 1 else "as fast"
        said = f"{factor(ratio)} as fast as {against}" if how == "faster" else f"{factor(ratio)} the speed of {against}"
        parts.append(f"<h1>{escape(name)}: {said}</h1>")
        low_high = (verdict.strict or {}).get("interval")
        spread = f" (95 % {low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else ""
        lede = (
            f"One call takes <b>{duration(verdict.seconds)}</b>, eager PyTorch {duration(verdict.eager_seconds)}: "
            f"<b>{factor(verdict.speedup_eager)}</b>{spread}. Found in turn {best.turn + 1} of attempt "
            f"{best.attempt}, {plural(judged, 'judgement')} in all."
        )
    facts = [f"target {target:g}×", f"ended: {_ENDS.get(why, why)}", where]
    if verdict:
        facts.insert(0, f"format {verdict.format} on {verdict.device}")
    if spent := [event for event in events if event["kind"] == "spent"]:
        last = spent[-1]
        about = "about " if last["estimated"] else ""
        cost = f", {last['cost']:.2f} at the prices given" if last["cost"] else ""
        facts.append(f"{about}{last['prompt'] + last['sampled']:,} tokens{cost}, {clock_time(last['seconds'])}")
    parts.append(f'<p class="lede">{lede}</p>')
    parts.append(f'<ul class="about">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul>')
    if verdict and verdict.clock == "model":
        parts.append(
            '<p class="banner" role="note"><strong>Model clock.</strong> Every time on this page is a computed cost. '
            "None of it was measured.</p>"
        )
    if verdict and verdict.mode != "strict":
        parts.append(
            '<p class="banner" role="note"><strong>Not strict.</strong> The best solution was not measured in strict '
            "mode; its times are those of a quick look.</p>"
        )
    if verdict and verdict.advisory:
        parts.append(
            '<p class="banner" role="note"><strong>Advisory.</strong> The Python of the solution ran free; what it '
            "computed with is not known.</p>"
        )
    return "".join(parts)


def _against(verdict: Verdict) -> tuple[float | None, str]:
    """The ratio to the faster baseline, as the target counts, and that baseline's name."""
    ratio = faster_of_both(verdict)
    compiled = ratio is not None and ratio == verdict.speedup_compile
    return ratio, "torch.compile" if compiled else "eager PyTorch"


def _times(verdict: Verdict | None, probe: Probe) -> str:
    if verdict is None:
        known = [("eager", probe.eager_seconds), ("torch.compile", probe.compile_seconds)]
        rows = [(label, seconds, duration(seconds), "quiet") for label, seconds in known if seconds]
        return empty("Nothing to compare with the baselines.") + bars(rows)
    assert verdict.seconds
    strict = verdict.strict or {}
    named: dict[str, float | None] = {"eager": verdict.eager_seconds, "torch.compile": verdict.compile_seconds}
    if strict.get("baselines"):
        named = {}
        for label, seconds in strict["baselines"].items():
            kind, precision = baseline_parts(label)
            named[f"{BASELINES[kind]} {precision}"] = seconds
    rows = [("this solution", verdict.seconds, _with_spread(verdict), "own")]
    rows += [
        (label, seconds, f"{duration(seconds)} ({factor(seconds / verdict.seconds)})", "")
        for label, seconds in named.items()
        if seconds
    ]
    parts = [bars(rows)]
    first = (strict.get("baselines") or {}).get(baseline("eager", "fp32"))
    if first and strict.get("interval"):
        low, high = strict["interval"]
        ratios: list[tuple[str, str, float | None, tuple[float, float] | None]] = [
            (_short(label), "", seconds / verdict.seconds, (low * seconds / first, high * seconds / first))
            for label, seconds in named.items()
            if seconds
        ]
        chart = interval_chart("Times as fast as", ratios, scale="log", rule=1.0)
        parts.append(
            f'<h3>Times as fast as</h3><figure class="ratios">{chart}</figure>'
            '<p class="fine">Solution and eager FP32 were timed in turn, and the interval is of their ratio; the other '
            "baselines were measured beside eager before, and their intervals are scaled from it.</p>"
        )
    for label, reason in (strict.get("failed") or {}).items():
        kind, _ = baseline_parts(label)
        parts.append(f'<p class="fine">{escape(BASELINES[kind])} was not timed: {escape(str(reason)[:200])}</p>')
    return "".join(parts)


def _short(label: str) -> str:
    """``torch.compile fp32`` -> ``compile fp32``: the chart's labels are narrow."""
    return label.replace("torch.compile", "compile").replace("max-autotune", "autotune")


def _with_spread(verdict: Verdict) -> str:
    if len(verdict.samples) < 4:
        return duration(verdict.seconds)
    low, _, high = statistics.quantiles(verdict.samples, n=4)
    return f"{duration(verdict.seconds)}, half of the calls {duration(low)} to {duration(high)}"


def _roofline(verdict: Verdict | None) -> str:
    if verdict is None or verdict.clock == "model" or not verdict.seconds or not verdict.bytes:
        return empty("No position: nothing correct was timed, or the clock measures nothing.")
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
    text = "".join(f'<p class="intro">{escape(line)}.</p>' for line in said)
    if told := standing(verdict):
        text += f'<p class="fine">{escape(told)}.</p>'
    if peak and verdict.flops:
        return text + _roof_chart(verdict, peak)
    if peak:
        best = max(peak, rate)
        rows = [("this solution", rate, _amount(rate, "B/s"), "own")]
        if verdict.eager_seconds:
            eager = verdict.bytes / verdict.eager_seconds
            rows.append(("eager", eager, _amount(eager, "B/s"), ""))
        rows.append(("peak", peak, _amount(peak, "B/s"), "quiet"))
        return (
            text
            + bars([(a, b / best, c, d) for a, b, c, d in rows])
            + (
                '<p class="fine">The problem holds no matrix product, convolution or attention whose operations could '
                "be counted, so its place is on the memory side of the roofline.</p>"
            )
        )
    return text


def _roof_chart(verdict: Verdict, peak: float) -> str:
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
    return (
        f'<figure><svg class="chart wide" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Roofline at {number(intensity)} operations a byte: {escape(spoken)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _kernels(best: Find | None) -> str:
    if best is None:
        return empty("None that is correct.")
    return "".join(
        f'<figure class="source"><figcaption>{safe(path)}</figcaption><pre tabindex="0"><code>'
        f"{source(path, text)}</code></pre></figure>"
        for path, text in sorted(
            best.solution.files.items(), key=lambda item: (not item[0].startswith("kernels/"), item)
        )
    )


def _use(best: Find | None, verdict: Verdict | None) -> str:
    if best is None or verdict is None:
        return empty("There is nothing to use yet. Go on with a larger budget: --resume, with this folder.")
    needs = FORMATS[verdict.format].needs[verdict.device]
    snippet = "from model_new import ModelNew\n\nmodel = ModelNew(*get_init_inputs()).eval()\n"
    snippet += "model.load_state_dict(old_model.state_dict())\n"
    snippet += "output = model(*inputs)" if verdict.device == "cpu" else "output = model.cuda()(*inputs)"
    return (
        f'<p class="intro"><b>model_new.py</b> in this folder needs {needs}; nothing of cuda-agent. Kernels are built '
        "in the first call and kept in the user's cache.</p>"
        f"<pre><code>{escape(snippet)}</code></pre>"
        '<p class="fine">Made for inference, for the shapes, types and plain arguments that get_inputs() and '
        "get_init_inputs() give; others are refused with a ValueError. A call through Python costs some ten "
        "microseconds that the times above do not hold.</p>"
    )


def _story(events: Sequence[Event]) -> str:
    verdicts = [event for event in events if event["kind"] == "verdict"]
    numbers = sorted({event["attempt"] for event in events if event["attempt"]})
    if not numbers:
        return empty("No attempt was made.")
    return _track(verdicts) + "".join(_attempt(number, events) for number in numbers)


def _track(verdicts: Sequence[Event]) -> str:
    """Every judged solution over time, and the best so far."""
    quick = [event for event in verdicts if event["verdict"]["mode"] == "quick"]
    if not quick:
        return empty("No solution was judged.")
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
        parts.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(label)}</title></circle>')
    return (
        '<p class="intro">Every solution that was judged, by how many times as fast it was as the faster of eager and '
        "torch.compile in a quick look (grey: not correct), and the best so far.</p>"
        f'<figure><svg class="chart wide" viewBox="0 0 {width} {height}" role="img" aria-label="'
        f'{plural(len(quick), "judged solution")}, the best {factor(best) if best else "none"}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _attempt(number: int, events: Sequence[Event]) -> str:
    own = [event for event in events if event["attempt"] == number]
    ended = next((event for event in reversed(own) if event["kind"] == "ended"), None)
    known = [event["factor"] for event in own if event["kind"] == "verdict" and event["factor"]]
    turns: list[list[Event]] = []
    for event in own:
        if event["kind"] == "turn":
            turns.append([event])
        elif turns:
            turns[-1].append(event)
    end = f"; {_ENDS.get(ended['why'], ended['why'])}" if ended else ""
    head = f"{plural(len(turns), 'turn')}, best {factor(max(known)) if known else 'none'}{end}"
    rest = len(turns) - _SHOWN_TURNS
    more = f'<p class="fine">The first {rest} turns are in transcript.jsonl.</p>' if rest > 0 else ""
    summary = f'<p class="intro">{safe(ended["summary"][:_SHOWN_TEXT])}</p>' if ended and ended["summary"] else ""
    body = "".join(_turn(turn) for turn in turns[-_SHOWN_TURNS:])
    opened = " open" if number == 1 and len(turns) <= 12 else ""
    return (
        f'<h3>Attempt {number} <span class="count">{escape(head)}</span></h3>{summary}'
        f"<details{opened}><summary>Turn by turn</summary>{more}{body}</details>"
    )


def _turn(events: Sequence[Event]) -> str:
    parts, hit = [], False
    for event in events[1:]:
        if event["kind"] == "message" and event["message"]["role"] == "assistant":
            message = event["message"]
            if message["content"].strip():
                parts.append(f"<p>{safe(message['content'].strip()[:_SHOWN_TEXT])}</p>")
            calls = [
                call for call in message.get("tool_calls") or () if call["name"] not in ("Write", "Edit", "MultiEdit")
            ]
            parts += [f"<p><code>{safe(_call(call))}</code></p>" for call in calls]
        elif event["kind"] == "diff":
            rows = diff_rows(event["text"])
            title = f"{safe(event['path'])} +{event['added']} −{event['removed']}"
            parts.append(f'<details><summary>{title}</summary><pre class="diff"><code>{rows}</code></pre></details>')
        elif event["kind"] == "verdict":
            found = event["verdict"]
            hit = hit or bool(event["factor"])
            mode = " in strict mode" if found["mode"] == "strict" else ""
            if event["factor"]:
                parts.append(f'<p class="ok">{escape(event["command"])}{mode}: correct, {factor(event["factor"])}</p>')
            else:
                said = f"{event['command']}{mode}: {found['status']} {found['message'][:600]}"
                parts.append(f'<p class="no">{safe(said)}</p>')
        elif event["kind"] in ("note", "form"):
            parts.append(f'<p class="fine">{safe(event["text"])}</p>')
    return f'<div class="turn{" hit" if hit else ""}"><span>turn {events[0]["turn"] + 1}</span>{"".join(parts)}</div>'


def _call(call: Event) -> str:
    values = call["arguments"] if isinstance(call["arguments"], dict) else {}
    return f"{call['name']} " + " ".join(str(value) for value in values.values())[:400]


def _measured(verdict: Verdict | None, probe: Probe) -> str:
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
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in facts)
    return (
        f'<div class="scroll"><table class="facts-table"><tbody>{rows}</tbody></table></div>'
        '<p class="fine">Judged in a sandbox whose judge shares no process with the solution: fresh secret inputs for '
        "every call, outputs poisoned before and checked after.</p>"
    )


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _amount(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{number(value / size)} {prefix}{unit}"
    return f"{number(value)} {unit}"
