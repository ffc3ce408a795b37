"""The command `cuda-agent episodes`, which lists the episodes of a run or writes them to one HTML page."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from cuda_agent.cli.options import STORE, AsJson, Namespace, StoreOption, Where, command, command_group
from cuda_agent.cli.places import find
from cuda_agent.cluster.api import ClusterError
from cuda_agent.errors import ConfigError

if TYPE_CHECKING:
    from cuda_agent.pages.episode_story import EpisodeEntry, EpisodeRow

commands = command_group()
_HEAD = f"{'':>5} {'stage':18} {'task':34} {'status':12} {'reward':>6} {'speed':>7} {'turns':>5} {'tokens':>7}  ended"


@command(
    commands,
    "cuda-agent episodes last --stage evaluate-agentic --status wrong",
    "cuda-agent episodes last --task softmax --sort best --output softmax.html",
    "cuda-agent episodes first --on my-cluster --min-reward 2 --open",
    "cuda-agent episodes model-optimized --open",
)
def episodes(
    run: Annotated[
        str,
        Argument(
            metavar="RUN|FOLDER",
            help="a run, the beginning of its name, or `last`; or a folder of `optimize` or `benchmark --output`",
        ),
    ],
    stage: Annotated[str | None, Option(help="only episodes of this stage, such as collect or evaluate-rft")] = None,
    task: Annotated[str | None, Option(help="only episodes of tasks whose name contains this text")] = None,
    status: Annotated[
        str | None, Option(help="only episodes of this status: that of a verdict, such as ok or wrong; no_answer; lost")
    ] = None,
    min_reward: Annotated[float | None, Option(help="only episodes with at least this reward")] = None,
    sort: Annotated[
        Literal["newest", "oldest", "best", "worst", "turns", "tokens", "task"],
        Option(help="which episodes come first"),
    ] = "newest",
    most: Annotated[int, Option(min=1, help="limit of episodes in the list and on the page")] = 200,
    output: Annotated[Path | None, Option(help="write the episodes to this file, as one HTML page")] = None,
    open_page: Annotated[bool, Option("--open", help="write the page, and open it in a browser")] = False,
    store: StoreOption = STORE,
    on: Where = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """List the episodes of a run, or show them on a page.

    An episode is a conversation in which a model works on one task. A run keeps the episodes of the stage `collect`
    and of the evaluations. The page shows turns, tool calls, diffs, verdicts and token probabilities. It is one HTML
    file that works offline, with search, filters and sorting. All text that models wrote is shown as plain text."""
    from cuda_agent.pipeline import episodes as left

    with tempfile.TemporaryDirectory() as folder:
        title, home, entries, nothing = _entries(run, store, on, namespace, Path(folder))
        chosen = left.chosen(entries, stage, task, status, min_reward, sort)
        page = output or (home / "episodes.html" if open_page else None)
        if page is not None:
            from cuda_agent.pages.episodes import render

            said = {"stage": stage, "task": task, "status": status, "reward at least": min_reward}
            asked = ", ".join([*(f"{k} {v}" for k, v in said.items() if v is not None), f"sorted by {sort}"])
            _write(page, render(title, chosen, len(entries), asked, most))
    if as_json:
        print(json.dumps([asdict(entry.row) for entry in chosen], indent=1))  # ASCII alone: the text is a model's
    elif page is None:
        print("\n".join(_lines(chosen, len(entries), most, nothing)))
    else:
        print(page)
    if page is not None and open_page:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


def _write(page: Path, text: str) -> None:
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page}: cannot be written: {error.strerror}") from None


def _entries(
    run: str, store: str, on: str | None, namespace: str | None, folder: Path
) -> "tuple[str, Path, list[EpisodeEntry], str]":
    """Returns the episodes of ``run``, which is a run's name, or the path of a folder or file.  Fetches the files of
    a named run into ``folder``.

    Returns:
        The title of the page, the page's default folder, the episodes, and the message to print if there are none."""
    from cuda_agent.cluster import results
    from cuda_agent.pipeline import episodes as left
    from cuda_agent.pipeline import runs
    from cuda_agent.storage import StoreUnavailable

    path = Path(run)
    if on is None and _is_path(run):
        search = (path / left.TRANSCRIPT).is_file()
        nothing = "no attempts: the search has begun none" if search else f"no episodes: {left.FILE} is empty"
        return path.name, path if path.is_dir() else path.parent, left.of_path(path), nothing
    nothing = "no episodes: collect and the evaluations leave them"
    try:
        where, name = find(run, store, on, namespace)
    except (ConfigError, StoreUnavailable, ClusterError) as error:
        if on is None and path.is_dir():
            raise ConfigError(f"{left.no_result(path)}\n{error}") from None
        raise
    if isinstance(where, tuple):
        home, found = runs.local_home(store), left.of_run(*where, folder)
    else:
        home = runs.user_home()
        with results.mlflow(where) as server:
            found = results.episodes(server, name, folder)
    return f"run {name}", home / "episodes" / name, left.listed(found), nothing


def _is_path(text: str) -> bool:
    from cuda_agent.pipeline.episodes import FILE, TRANSCRIPT

    return "/" in text or any((Path(text) / name).is_file() for name in ("", TRANSCRIPT, FILE))


def _lines(chosen: "list[EpisodeEntry]", found: int, most: int, nothing: str) -> list[str]:
    """Returns the lines of a table with the first ``most`` episodes in ``chosen``.  ``found`` is the number of
    episodes before filtering.  If it is 0, returns the message ``nothing`` in place of the table."""
    if not chosen:
        return [f"none of {found} episodes" if found else nothing]
    lines = [_HEAD, *(_line(entry.row) for entry in chosen[:most])]
    rest = len(chosen) - most
    lines.append(f"{len(chosen)} of {found} episodes" + (f"; {rest} are not listed: see --most" if rest > 0 else ""))
    return lines


def _line(row: "EpisodeRow") -> str:
    from cuda_agent.sandbox.wire import printable

    reward = "–" if row.reward is None else f"{row.reward:g}"
    speed = "–" if row.speedup is None else f"{row.speedup:.2f}x"
    tokens = "–" if row.tokens is None else str(row.tokens)
    flags = f" ({', '.join(row.flags)})" if row.flags else ""
    return printable(
        f"{row.number:>5} {row.stage[:18]:18} {row.task[:34]:34} {row.status:12} {reward:>6} {speed:>7} "
        f"{row.turns:>5} {tokens:>7}  {row.ended}{flags}"
    )
