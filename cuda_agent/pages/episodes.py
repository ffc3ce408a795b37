"""Episodes as one static page: turns, thoughts, tool calls with what came back, differences of files, verdicts, and the
sampled tokens shaded by their log-probability.

Pure.  Everything is in the HTML and can be read without JavaScript; the one script of the page (``episodes_page.js``)
searches, filters and sorts what is there.  The page stays bounded: episodes that do not fit are counted and left out.

Does not: choose or read episodes (``episodes``).
"""

from collections.abc import Iterable, Sequence
from importlib.resources import files

from cuda_agent.pages.charts import bars, duration, factor, number, share
from cuda_agent.pages.episode_story import EpisodeEntry, EpisodeRow, Story, StoryPart, Token, Turn
from cuda_agent.pages.page import diff_rows, document, safe, source, style_sheet
from cuda_agent.pages.tables import empty, plural
from cuda_agent.sandbox.wire import Verdict

MOST = 200  # episodes of a page, unless asked for more
LARGEST = 12 << 20  # characters of all of them
SHADES = ((-0.0513, "95 %"), (-0.357, "70 %"), (-0.916, "40 %"), (-2.303, "10 %"), (-4.605, "1 %"))
"""(lowest log-probability, the probability in words) of each shade but the last."""
_ENDS = {
    "answer": "it answered", "turns": "all turns were used", "tokens": "no room for more tokens",
    "deadline": "cut by the deadline", "infra": "cut by a fault of ours",
}  # fmt: skip
_SORTS = (
    ("", "as listed"),
    ("reward", "reward"),
    ("speedup", "speed-up"),
    ("turns", "turns"),
    ("tokens", "tokens"),
    ("logprob", "surprise"),
)


def render(title: str, entries: Sequence[EpisodeEntry], found: int, asked: str, most: int = MOST) -> str:
    """``entries``: those to show, in their order, of ``found`` in all; ``asked``: how they were chosen, in words."""
    cards: list[str] = []
    rows: list[EpisodeRow] = []
    room = LARGEST
    for entry in entries[:most]:
        card = _card(entry.row, entry.story())
        room -= len(card)
        if room < 0 and cards:
            break
        cards.append(card)
        rows.append(entry.row)
    body = f'{_controls(rows)}{_legend()}<div id="cards">{"".join(cards)}</div>' if cards else empty("No episode.")
    head = _head(title, rows, len(entries), found, asked)
    script = (files("cuda_agent.pages") / "episodes.js").read_text()
    style = style_sheet("optimize.css", "episodes.css")
    footer = (
        "A speed-up is against the faster of eager and torch.compile. Shades show the probability that the policy gave "
        "each token when it was sampled. Long texts are cut in the middle."
    )
    return document(f"{title}: episodes", head, [("episodes", "Episodes", body)], footer, style, "the episodes", script)


def _head(title: str, rows: Sequence[EpisodeRow], fitting: int, found: int, asked: str) -> str:
    correct = sum(row.status == "ok" for row in rows)
    lede = f"{plural(len(rows), 'episode')} of {plural(len({row.task for row in rows}), 'task')}"
    if rows:
        lede += f", <b>{share(correct / len(rows))}</b> correct in the end"
    facts = [asked, *(f"{stage} {sum(row.stage == stage for row in rows)}" for stage in _distinct(rows, "stage"))]
    parts = [
        '<p class="over">cuda-agent episodes</p>',
        f"<h1>{safe(title)}</h1>",
        f'<p class="lede">{lede}.</p>',
        f'<ul class="about">{"".join(f"<li>{safe(fact)}</li>" for fact in facts if fact)}</ul>',
    ]
    if len(rows) < fitting:
        parts.append(
            f'<p class="banner" role="note"><strong>Not all.</strong> {fitting} episodes were asked for, of {found}. '
            f"The first {len(rows)} of them are here, so that a browser can open the page. Ask for fewer "
            "(--stage, --task, --status, --min-reward), or for others first (--sort).</p>"
        )
    return "".join(parts)


def _distinct(rows: Sequence[EpisodeRow], name: str) -> list[str]:
    return sorted({str(getattr(row, name)) for row in rows})


def _controls(rows: Sequence[EpisodeRow]) -> str:
    """Hidden until the script says that it is there."""

    def select(name: str, label: str, options: Iterable[tuple[str, str]]) -> str:
        listed = "".join(f'<option value="{safe(value)}">{safe(text)}</option>' for value, text in options)
        return f'<label>{label} <select id="{name}">{listed}</select></label>'

    def any_of(name: str) -> list[tuple[str, str]]:
        return [("", "any"), *((value, value) for value in _distinct(rows, name))]

    return (
        '<div id="controls" class="controls" hidden>'
        '<label class="wide">Search <input id="search" type="search" placeholder="in all that was said and done" '
        'autocomplete="off" spellcheck="false"></label>'
        + select("stage", "Stage", any_of("stage"))
        + select("status", "Status", any_of("status"))
        + select("ended", "Ended", any_of("ended"))
        + '<label>Reward at least <input id="least" type="number" step="1" min="-1" max="3"></label>'
        + select("sort", "Sort by", _SORTS)
        + '<output id="count"></output></div>'
    )


def _legend() -> str:
    items = [f'<li><i class="k{i}">token</i> {said} or more</li>' for i, (_, said) in enumerate(SHADES)]
    items.append(f'<li><i class="k{len(SHADES)}">token</i> less</li>')
    return f'<ul class="shades" aria-label="Shades of sampled tokens">{"".join(items)}</ul>'


def _card(row: EpisodeRow, story: Story) -> str:
    facts = {
        "stage": row.stage, "status": row.status, "ended": row.ended, "reward": row.reward, "speedup": row.speedup,
        "turns": row.turns, "tokens": row.tokens, "logprob": None if row.logprob is None else -row.logprob,
    }  # fmt: skip
    data = "".join(f' data-{name}="{safe(str(value))}"' for name, value in facts.items() if value is not None)
    reward = "no reward" if row.reward is None else f"reward {row.reward:g}"
    speed = f" · <b>{factor(row.speedup)}</b>" if row.speedup else ""
    counts = plural(row.turns, "turn") + (f", {number(row.tokens)} tokens" if row.tokens is not None else "")
    summary = (
        f'<span class="status s-{safe(row.status)}">{safe(row.status.replace("_", " "))}</span>'
        f'<span class="task">{safe(row.task)}</span><span class="what">{reward}{speed} · {counts} · '
        f"{safe(row.stage)}</span>"
    )
    about = [row.id, f"ended: {_ENDS.get(row.ended, row.ended)}", *(flag.replace("_", " ") for flag in row.flags)]
    if row.logprob is not None:
        about.append(f"{row.logprob:.3f} nats a token")
    earlier = f'<p class="fine">{plural(story.earlier, "earlier turn")} left out.</p>' if story.earlier else ""
    return (
        f'<article class="episode"{data}><details><summary>{summary}</summary>'
        f'<p class="facts" id="episode-{row.number}">{" · ".join(map(safe, filter(None, about)))} · '
        f'<a href="#episode-{row.number}">link</a></p>'
        f"{_opening(story)}{earlier}{''.join(map(_turn, story.turns))}{_result(story)}</details></article>"
    )


def _opening(story: Story) -> str:
    if not story.opening:
        return ""
    said = "".join(f"<h4>{safe(role)}</h4>{_pre(text)}" for role, text in story.opening)
    return f"<details><summary>What it was told</summary>{said}</details>"


def _turn(turn: Turn) -> str:
    hit = " hit" if any(part.kind == "verdict" and part.good for part in turn.parts) else ""
    return f'<div class="turn{hit}"><span>turn {turn.number}</span>{"".join(map(_part, turn.parts))}</div>'


def _part(part: StoryPart) -> str:
    tone = "" if part.good is None else " ok" if part.good else " no"
    if part.kind == "thought":
        return f'<details class="thought"><summary>Thought</summary><p>{safe(part.text)}</p></details>'
    if part.kind == "said":
        return f"<p>{safe(part.text)}</p>"
    if part.kind == "call":
        return f'<p class="call"><b>{safe(part.title)}</b></p>' + (_pre(part.text) if part.text else "")
    if part.kind == "result":
        return f'<pre class="result{tone}" tabindex="0"><code>{safe(part.text) or "(nothing)"}</code></pre>'
    if part.kind == "diff":
        rows = diff_rows(part.text)
        return (
            f"<details open><summary>{safe(part.title)}</summary>"
            f'<pre class="diff" tabindex="0"><code>{rows}</code></pre></details>'
        )
    if part.kind == "verdict":
        return f'<p class="{tone.strip()}">{safe(part.title)}: {safe(part.text)}</p>'
    if part.kind == "sampled":
        shaded = "".join(map(_shaded, part.tokens))
        return (
            f'<details class="sampled"><summary>{safe(part.title)}</summary>'
            f'<pre tabindex="0"><code>{shaded}</code></pre></details>'
        )
    return f'<p class="fine">{safe(part.text)}</p>'


def _shaded(token: Token) -> str:
    text, logprob = token
    shade = next((i for i, (lowest, _) in enumerate(SHADES) if logprob >= lowest), len(SHADES))
    return f'<i class="k{shade}" title="{logprob:.2f}">{safe(text)}</i>'


def _result(story: Story) -> str:
    parts = []
    if story.verdict:
        parts.append(f"<h4>The verdict</h4>{_verdict(Verdict.from_json(story.verdict))}")
    if story.best and story.best != story.verdict:
        parts.append(f"<h4>Its best state on the way</h4>{_verdict(Verdict.from_json(story.best))}")
    if story.files:
        listed = "".join(
            f'<figure class="source"><figcaption>{safe(path)}</figcaption><pre tabindex="0"><code>'
            f"{source(path, text[:20_000])}</code></pre></figure>"
            for path, text in sorted(story.files.items())[:20]
        )
        parts.append(f"<details><summary>Its files</summary>{listed}</details>")
    return "".join(parts)


def _verdict(verdict: Verdict) -> str:
    if verdict.status != "ok":
        return f'<p class="no">{safe(verdict.status.replace("_", " "))}</p>' + (
            _pre(verdict.message[:4000]) if verdict.message else ""
        )
    times = [
        ("kernel", verdict.seconds, "", "own"),
        ("torch.compile", verdict.compile_seconds, factor(verdict.speedup_compile), ""),
        ("eager", verdict.eager_seconds, factor(verdict.speedup_eager), ""),
    ]
    rows = [(label, s, f"{duration(s)}{f' ({x})' if x else ''}", css) for label, s, x, css in times if s]
    said = [f"format {verdict.format} on {verdict.device}", f"{verdict.checks} checks passed", f"{verdict.clock} clock"]
    correct = f'<p class="ok">correct, reward {verdict.reward}</p>'
    return f'{correct}{bars(rows)}<p class="fine">{safe(", ".join(said))}</p>'


def _pre(text: str) -> str:
    return f'<pre tabindex="0"><code>{safe(text)}</code></pre>'
