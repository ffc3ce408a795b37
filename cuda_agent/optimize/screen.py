"""Shows a running search: as a live view on a terminal, as plain lines elsewhere, as JSON lines for programs.

The live view shows a ``View``, which is built only from the events of the search.  Text of models and tools is reduced
to printable characters before it reaches a terminal."""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cuda_agent.agent.progress import ENDS, Event, Goal
from cuda_agent.optimize.search import Watch
from cuda_agent.pages.charts import duration as kernel_time
from cuda_agent.pipeline.screen import duration
from cuda_agent.sandbox.wire import printable

_BARS = "▁▂▃▄▅▆▇█"
_TEXT = 4000  # characters of a turn that are kept for the view


@dataclass
class AttemptView:
    turn: int = 0
    doing: str = "starts"
    text: str = ""
    thought: str = ""
    diff: list[str] = field(default_factory=list)
    diff_of: str = ""
    verdict: str = ""
    factor: float | None = None  # speed-up of the last judged solution
    best: float | None = None
    ended: str = ""


@dataclass
class View:
    task: str = ""
    model: str = ""
    goal: Goal = field(default_factory=lambda: Goal(0.0))
    turns: int = 0
    baselines: str = ""
    notes: list[str] = field(default_factory=list)
    passing: str = ""  # current activity of the search besides its attempts
    passing_since: float = 0.0  # seconds of the search at which it began
    attempts: dict[int, AttemptView] = field(default_factory=dict)
    focus: int = 1
    best: float | None = None
    track: list[float] = field(default_factory=list)  # best speed-up so far, after each correct solution
    judged: int = 0
    tokens: int = 0
    cost: float = 0.0
    estimated: bool = False
    seconds: float = 0.0

    def take(self, event: Event) -> None:
        kind, number = event["kind"], int(event["attempt"])
        self.seconds = max(self.seconds, float(event["at"]))
        if kind == "begin":
            self.task, self.model = event["task"], event["order"]["model"]
            terms = event["order"]["terms"]
            self.goal, self.turns = Goal(terms["target"], terms.get("until")), terms["turns"]
        elif kind == "baselines":
            self.baselines = told(event)
        if kind in ("baselines", "verdict", "outcome"):
            self.passing = ""
        elif kind == "note" and event.get("passing"):
            self.passing, self.passing_since = told(event), self.seconds
        elif kind in ("note", "form", "wait"):
            self.notes.append((f"[{number}] " if number else "") + told(event))
        if not number:
            return
        attempt = self.attempts.setdefault(number, AttemptView())
        if kind in ("text", "thought", "tool", "diff"):
            self.focus = number
        if kind == "turn":
            attempt.turn, attempt.text, attempt.thought = event["turn"] + 1, "", ""
            attempt.doing = "waits for the model"
        elif kind == "thought":
            attempt.thought, attempt.doing = (attempt.thought + event["text"])[-_TEXT:], "thinks"
        elif kind == "text":
            attempt.text, attempt.doing = (attempt.text + event["text"])[-_TEXT:], "writes"
        elif kind == "again":
            attempt.text = attempt.thought = ""
        elif kind in ("wait", "note", "form", "tool", "void"):
            attempt.doing = told(event)
        elif kind == "result" and event["error"]:
            attempt.doing += told(event)
        elif kind == "diff":
            attempt.diff, attempt.diff_of = event["text"].splitlines(), told(event)
        elif kind == "verdict":
            self.judged += 1
            attempt.verdict, attempt.factor = told(event), event["factor"]
            if event["factor"] and event["verdict"]["mode"] == "quick":
                attempt.best = max(attempt.best or 0.0, event["factor"])
                self.best = max(self.best or 0.0, event["factor"])
                self.track.append(self.best)
        elif kind == "spent":
            self.tokens, self.cost = event["prompt"] + event["sampled"], event["cost"]
            self.estimated = event["estimated"]
        elif kind == "ended":
            attempt.ended = attempt.doing = told(event)


def told(event: Event) -> str:
    kind = event["kind"]
    if kind == "baselines":
        times = {"eager": event["probe"]["eager_seconds"], "torch.compile": event["probe"]["compile_seconds"]}
        return ", ".join(f"{name} {kernel_time(seconds)}" for name, seconds in times.items() if seconds)
    if kind == "tool":
        values = event["arguments"] if isinstance(event["arguments"], dict) else {}
        what = next((values[key] for key in ("command", "path", "pattern", "id") if key in values), "")
        return clean(f"{event['name']} {what}")[:100]
    if kind == "result":
        return f" → error: {clean(event['error'])}"
    if kind == "diff":
        return f"{clean(event['path'])} +{event['added']} −{event['removed']}"
    if kind == "verdict":
        found = event["verdict"]
        if event["factor"]:
            return f"{event['command']}{' (strict)' if found['mode'] == 'strict' else ''}: ok, {event['factor']:.2f}×"
        return clean(f"{event['command']}: {found['status']} {''.join(found['message'].splitlines()[:1])}")
    return ENDS[event["why"]] if kind == "ended" else clean(event["text"])


def sparkline(values: list[float], width: int = 40) -> str:
    """Returns the last ``width`` of the speed-ups in ``values`` as a line of bars. The lowest bar stands for the
    minimum of all ``values`` and 1 (the speed of the baseline), and the highest bar for the maximum."""
    if not values:
        return ""
    low, high = min(*values, 1.0), max(*values, 1.0)
    steps, span = len(_BARS) - 1, (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * steps)] for value in values[-width:])


def clean(text: str) -> str:
    return printable(str(text)).strip()


def spent(view: View) -> str:
    about = "about " if view.estimated else ""
    money = f", {about}{view.cost:.2f} spent" if view.cost else ""
    return f"{about}{view.tokens:,} tokens{money}, {duration(view.seconds)}"


@contextmanager
def watching(as_json: bool) -> Iterator[Watch]:
    """Yields a function that shows events: as JSON with ``as_json``, in a live view on a terminal, else as lines."""
    write = partial(print, flush=True)  # for readers of a pipe
    if as_json:
        yield json_lines(write)
    elif sys.stdout.isatty():
        with live() as watch:
            yield watch
    else:
        yield plain(write)


def json_lines(write: Callable[[str], None]) -> Watch:
    """Returns a function that writes each event as a line of JSON.  Skips the text that the model streams, and the
    outcome, which the command prints itself."""

    def watch(event: Event) -> None:
        if event["kind"] not in ("text", "thought", "outcome"):
            write(json.dumps(event, ensure_ascii=False))

    return watch


def plain(write: Callable[[str], None], width: int = 0) -> Watch:
    """Returns a function that writes events as lines, such as tool calls, diffs, verdicts, notes and ends of attempts.
    If a tool call fails, its line includes the error and is cut to ``width`` characters (0: the terminal's width).  The
    error is left out if the call's verdict, on the line before, already reports the failure."""
    view = View()
    waiting: dict[int, str] = {}  # attempt -> pending line of a tool
    judged: set[int] = set()  # attempts whose last line was a verdict, which has the failure
    room = width or shutil.get_terminal_size((120, 24)).columns

    def watch(event: Event) -> None:
        before = view.best
        view.take(event)
        kind, number = event["kind"], event["attempt"]
        where = f"[{number}] " if number else ""
        line = waiting.pop(number, "")
        if kind == "result" and event["error"] and number not in judged:
            said, why = line or f"{where} ", told(event)
            write(cut_to(cut_to(said, max(room - len(why), room * 2 // 3)) + why, room))
        elif line:
            write(line)
        (judged.add if kind == "verdict" else judged.discard)(number)
        if kind == "begin":
            write(f"{view.task} with {view.model}, {view.goal}")
        elif kind == "baselines":
            write(f"baselines: {view.baselines}")
        elif kind == "tool":
            waiting[number] = f"{where}turn {view.attempts[number].turn}: {told(event)}"
        elif kind == "void":
            write(f"{where}turn {view.attempts[number].turn}: {told(event)}")
        elif kind in ("diff", "verdict"):
            write(f"{where}  {told(event)}{'  ← the best so far' if view.best != before else ''}")
        elif kind == "ended":
            write(f"{where}{told(event)}; {spent(view)}")
        elif kind in ("note", "wait", "form"):
            write(f"{where}{told(event)}")

    return watch


def cut_to(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


@contextmanager
def live() -> Iterator[Watch]:
    """Yields a function that takes events into a view.  A thread draws the view several times a second, so that its
    clocks go on between two events."""
    from rich.console import Console
    from rich.live import Live

    console, view, lock = Console(), View(), threading.Lock()
    drawn, over = time.monotonic(), False

    def draw() -> Any:
        nonlocal drawn
        with lock:
            now = time.monotonic()
            view.seconds, drawn = view.seconds + now - drawn, now
            return drawing(view, console.width, 0 if over else console.height)

    def watch(event: Event) -> None:
        with lock:
            view.take(event)

    with Live(get_renderable=draw, console=console, refresh_per_second=8):
        yield watch
        over = True


def drawing(view: View, width: int, height: int) -> Any:
    """Returns ``view`` as a Rich renderable for a terminal of ``width`` columns and ``height`` lines.  Below an
    overview, and if there is room, it shows the most recently active attempt: the model's text, the last verdict and
    the last diff.  If ``height`` is 0, only the overview is shown."""
    from rich.console import Group
    from rich.text import Text

    def line(*parts: str | tuple[str, str]) -> Text:
        text = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
        text.truncate(width)
        return text

    def times(best: float | None) -> str:
        return f"{best:.2f}×" if best else "–"

    good = "bold green" if view.best and view.best >= view.goal.target else "bold"
    lines = [
        line((view.task, "bold"), (f"  {view.model}  ", "cyan"), (view.baselines, "dim")),
        line(
            ("best ", "dim"), (times(view.best), good), (f", {view.goal}  ", "dim"),
            (sparkline(view.track), "green"), (f"  {view.judged} judged  {spent(view)}", "dim"),
        ),
    ]  # fmt: skip
    for number, attempt in sorted(view.attempts.items()):
        mark = (f"✓ {number} ", "green") if attempt.ended else (f"▶ {number} ", "cyan")
        best = (f"{times(attempt.best):>7}  ", "bold")
        doing = (attempt.doing, "dim" if attempt.ended else "")
        lines.append(line(mark, f"turn {attempt.turn}/{view.turns}  ", best, doing))
    passing = f"{view.passing}: {duration(view.seconds - view.passing_since)}" if view.passing else ""
    lines += [line((note, "yellow")) for note in [note for note in (*view.notes, passing) if note][-2:]]
    focus = view.attempts.get(view.focus)
    room = height - len(lines) - 4
    if height and focus and not focus.ended and room > 4:
        style = "" if focus.text else "italic dim"
        words = [part for part in map(clean, (focus.text or focus.thought).splitlines()) if part]
        shown = words[-max(3, room // 3) :]
        lines += [line(""), *(line((row, style)) for row in shown)]
        if focus.verdict:
            lines.append(line((focus.verdict, "green" if focus.factor else "red")))
        if focus.diff:
            lines.append(line((focus.diff_of, "bold")))
            for row in focus.diff[: max(0, room - len(shown) - 3)]:
                style = {"+": "green", "-": "red", "@": "cyan"}.get(row[:1], "dim")
                lines.append(line((printable(row.expandtabs(4)), style)))
    return Group(*lines)
