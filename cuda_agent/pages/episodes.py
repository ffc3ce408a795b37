"""Renders episodes (agents' work on tasks) as one HTML page: turns, tool calls, diffs, verdicts, and sampled tokens.

The page can be read without JavaScript.  Its only script searches, filters and sorts the episodes.  The page leaves out
episodes that would make it too large."""

from collections.abc import Sequence

from cuda_agent.agent.progress import ENDS
from cuda_agent.pages.charts import share
from cuda_agent.pages.episode_story import EpisodeEntry, EpisodeRow, Story
from cuda_agent.pages.page import page, part, plural
from cuda_agent.sandbox.wire import Verdict

MOST = 200  # episodes of a page, unless asked for more
LARGEST = 12 << 20  # most characters of all episodes on a page
SHADES = ((-0.0513, "95 %"), (-0.357, "70 %"), (-0.916, "40 %"), (-2.303, "10 %"), (-4.605, "1 %"))
"""Shades of sampled tokens on the page, from likely to unlikely: (lowest log-probability in nats, lowest probability as
text).  Tokens below the last limit have one more shade."""


def render(title: str, entries: Sequence[EpisodeEntry], found: int, asked: str, most: int = MOST) -> str:
    """Returns the HTML page about ``entries``, the episodes that a user selected.

    Args:
        title: The heading, such as the name of the run.
        entries: The selected episodes, in the order of the page.
        found: The number of episodes before the selection.
        asked: A text for people that describes the selection, such as "stage collect, sorted by newest".
        most: The limit of episodes on the page.  There are fewer if the page would exceed ``LARGEST`` characters."""
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
    values = {name: sorted({str(getattr(row, name)) for row in rows}) for name in ("stage", "status", "ended")}
    return page(
        "episodes.html.j2",
        styles=("optimize.css", "episodes.css"),
        script="episodes.js",
        of=title,
        cards=cards,
        count=f"{plural(len(rows), 'episode')} of {plural(len({row.task for row in rows}), 'task')}",
        correct=share(sum(row.status == "ok" for row in rows) / len(rows)) if rows else "",
        facts=[asked, *(f"{stage} {sum(row.stage == stage for row in rows)}" for stage in values["stage"])],
        fitting=len(entries),
        found=found,
        selects=values,
        shades=[said for _, said in SHADES],
    )


def _card(row: EpisodeRow, story: Story) -> str:
    verdicts = {"The verdict": story.verdict, "Its best state on the way": story.best}
    if story.best == story.verdict:
        del verdicts["Its best state on the way"]
    return part(
        "episode.html.j2",
        row=row,
        story=story,
        ended=ENDS.get(row.ended, row.ended),
        verdicts={heading: Verdict.from_json(verdict).to_json() for heading, verdict in verdicts.items() if verdict},
        files=[(path, text[:20_000]) for path, text in sorted(story.files.items())[:20]],
        shade=_shade,
    )


def _shade(logprob: float) -> int:
    return next((i for i, (lowest, _) in enumerate(SHADES) if logprob >= lowest), len(SHADES))
