"""Shows the progress of an active run: as a live table on a terminal, as plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda_agent.pipeline.local import StageView

Watch = Callable[[str, list[StageView]], None]
# State -> mark and style.
LOOKS = {
    "waiting": ("·", "dim"),
    "running": ("▶", "bold cyan"),
    "retry": ("↻", "yellow"),
    "cached": ("✓", "green"),
    "done": ("✓", "green"),
    "failed": ("✗", "red"),
}


@contextmanager
def watching(as_json: bool = False) -> Iterator[Watch]:
    """Yields a function that shows a run's progress: as a live table if stdout is a terminal, otherwise as lines.  With
    ``as_json`` the function writes lines to stderr, because stdout is for JSON."""
    if as_json:
        yield plain(lambda line: print(line, file=sys.stderr))
    elif sys.stdout.isatty():
        with _live() as watch:
            yield watch
    else:
        yield plain(print)


def plain(write: Callable[[str], None], every: float = 10.0) -> Watch:
    """Returns a function that reports a run's progress as lines of text.  It passes each line to ``write``.

    A line tells a change of a stage's state, or a new note (a message that a stage or the executor adds for the user).
    About every ``every`` seconds, further lines tell the progress of the running stages, and why pods do not start."""
    known: dict[str, tuple[str, int]] = {}  # stage -> state and number of notes
    shown = time.monotonic()

    def watch(run: str, views: list[StageView]) -> None:
        nonlocal shown
        if not known:
            write(f"run {run}")
        for view in views:
            state, notes = known.get(view.name, ("waiting", 0))
            known[view.name] = (view.state, len(view.notes))
            for note in view.notes[notes:]:
                write(f"{view.name}: {note}")
            if state != view.state:
                write(f"{view.name}: {_state(view)}")
        if time.monotonic() - shown > every:
            shown = time.monotonic()
            for view in views:
                if view.waits:
                    write(f"{view.name}: waits: {view.waits}")
                elif view.state == "running" and view.total:
                    write("  ".join(filter(None, [f"{view.name}: {progress(view)}", _rates(view), _left(view)])))

    return watch


@contextmanager
def _live() -> Iterator[Watch]:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    drawn = 0.0
    with Live(console=console, auto_refresh=False) as live:

        def watch(run: str, views: list[StageView]) -> None:
            nonlocal drawn
            if time.monotonic() - drawn > 0.2 or all(view.state in ("done", "cached") for view in views):
                drawn = time.monotonic()
                live.update(_table(run, views, console.width), refresh=True)

        yield watch


def _table(run: str, views: list[StageView], width: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    whole = sum(view.weight for view in views)
    share = sum(view.weight * _share(view) for view in views) / whole
    table = Table(title=f"{run}  {share:.0%}", title_justify="left", box=None, padding=(0, 1), expand=False)
    for column in ("", "stage", "", "progress", "time", "left", "rates"):
        table.add_column(column, justify="right" if column in ("progress", "time", "left") else "left", no_wrap=True)
    for view in views:
        mark, style = LOOKS[view.state]
        running, elapsed = view.state == "running", _elapsed(view) or view.seconds
        table.add_row(
            Text(mark, style=style),
            Text(view.name, style=style),
            ProgressBar(total=1.0, completed=_share(view), width=20) if running else Text(view.state),
            progress(view) if running else "",
            duration(elapsed) if elapsed else "",
            _left(view) if running else "",
            Text(_rates(view)[: max(10, width - 70)], style="dim") if running else "",
        )
        for note in [*view.notes[-2:], *filter(None, [view.waits])]:
            table.add_row("", Text(f"  {note}"[: max(20, width - 4)], style="yellow"))
    return table


def progress(view: StageView) -> str:
    return f"{view.done}/{view.total} {view.unit}" if view.total else ""


def duration(seconds: float) -> str:
    """Returns ``seconds`` as text, such as 43 s, 2:05 or 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _state(view: StageView) -> str:
    if view.state in ("done", "cached"):
        return f"{view.state} ({duration(view.seconds)})"
    if view.state == "running":
        return "running" if view.attempt < 2 else f"running, attempt {view.attempt}"
    return f"{view.state}: {view.message}" if view.message else view.state


def _share(view: StageView) -> float:
    if view.state in ("done", "cached"):
        return 1.0
    return min(1.0, view.done / view.total) if view.total and view.state == "running" else 0.0


def _elapsed(view: StageView) -> float:
    return time.monotonic() - view.began if view.state == "running" else 0.0


def _left(view: StageView) -> str:
    share = _share(view)
    return f"{duration(_elapsed(view) * (1 - share) / share)} left" if 0.02 < share < 1 else ""


def _rates(view: StageView) -> str:
    numbers = {name: f"{rate:,.0f}" if abs(rate) >= 100 else f"{rate:.3g}" for name, rate in view.rates.items()}
    return "  ".join(f"{number} {name.replace('_per_second', '/s')}" for name, number in numbers.items())
