"""The folder of ``cuda-agent optimize --whole``: prepares and locks it, and reads what the searches in it have found.

model.py          the problem                           run.json      settings, for --resume; holds no API key
trace.json        the model's submodules and times      parts/NAME/   the search for the part NAME, as in ``folder``
parts.json        what each part gained                 parts/NAME.py the task of the part
report.html       a page about it
solution/         the model with its parts replaced     verdict.json  its strict verdict
model_new.py      the same as a program that compares itself with the original"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import read_events, replayed
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import UserError
from cuda_agent.optimize.evaluation import read_solution
from cuda_agent.optimize.folder import OptimizeError, SearchOrder, prepared, read_order
from cuda_agent.optimize.whole.parts import Part
from cuda_agent.sandbox.wire import Solution, Verdict
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_whole

_BEGUN = ("model.py", "run.json", "trace.json", "parts.json")
_DONE = ("target", "answer", "turns", "stuck", "refused")  # ends of a search that more budget does not change


@dataclass(frozen=True)
class Spent:
    """What searches have used."""

    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.seconds + other.seconds, self.money + other.money)


@dataclass(frozen=True)
class PartSearch:
    """What the folder of a part's search holds."""

    begun: bool = False  #: whether there is a search to resume
    done: bool = False  #: whether it needs no resumption
    spent: Spent = Spent()
    solution: Solution | None = None
    verdict: Verdict | None = None  #: on ``solution`` as a solution of the part alone


def is_whole(folder: Path) -> bool:
    """Returns whether ``folder`` was begun with ``--whole``."""
    try:
        return bool(json.loads((folder / "run.json").read_text()).get("whole"))
    except (OSError, ValueError, AttributeError):
        return False


def part_folder(folder: Path, part: Part) -> Path:
    return folder / "parts" / part.module.name


@contextlib.contextmanager
def opened(order: SearchOrder, settings: SandboxConfig, task: Task, folder: Path, resume: bool) -> Iterator[None]:
    """Prepares and locks ``folder`` in a ``with`` block.  If a new search fails before the first turn of its first
    part, removes what it has written.

    Raises:
        OptimizeError: The folder cannot be used.  What is in it stays as it is."""
    prepare = partial(_prepare, order, settings, task, folder, resume)
    with prepared(folder, resume, prepare, lambda folder: not _played(folder), _clear):
        yield


def _prepare(order: SearchOrder, settings: SandboxConfig, task: Task, folder: Path, resume: bool) -> None:
    if resume:
        if (folder / "model.py").read_text() != task.code:
            raise OptimizeError(f"{folder}/model.py has changed since: begin anew in another folder")
    elif any(folder.iterdir()):
        unknown = [path for path in folder.iterdir() if path.name not in (*_BEGUN, "parts")]
        if unknown or not is_whole(folder) or _played(folder):
            how = f"go on with --resume {folder}, or name another one with --output"
            raise OptimizeError(f"{folder} is there already: {how}")
        _clear(folder)
    (folder / "model.py").write_text(task.code)
    about = {"order": asdict(order), "sandbox": settings.model_dump(mode="json"), "whole": True}
    write_whole(folder / "run.json", json.dumps(about, indent=1))


def _played(folder: Path) -> bool:
    return any((folder / "parts").glob("*/transcript.jsonl"))


def _clear(folder: Path) -> None:
    for name in _BEGUN:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "parts", ignore_errors=True)


def read_search(folder: Path, order: SearchOrder) -> PartSearch:
    """Returns what the folder of a part's search holds.  ``order`` has the settings of now: a search that has ended
    with others goes on.

    Raises:
        OptimizeError: The folder holds something else than a search."""
    if not (folder / "transcript.jsonl").is_file():
        return PartSearch()
    try:
        events = read_events(folder / "transcript.jsonl")
        used = replayed(events)[2]
        ended = next((event for event in reversed(events) if event["kind"] in ("begin", "outcome")), {})
        if ended.get("kind") == "outcome":
            used = ended["spent"]
        tokens, seconds = used.get("prompt", 0) + used.get("sampled", 0), used.get("seconds", 0.0)
        money = (used.get("prompt", 0) * order.price_in + used.get("sampled", 0) * order.price_out) / 1e6
        before = read_order(folder)[0]
        same = (before.terms, before.attempts) == (order.terms, order.attempts)
        found = PartSearch(True, same and ended.get("why") in _DONE, Spent(tokens, seconds, money))
        if not (folder / "verdict.json").is_file():
            return found
        verdict = Verdict.from_json(json.loads((folder / "verdict.json").read_text()))
        return replace(found, verdict=verdict, solution=read_solution(folder / "solution", verdict.format))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise OptimizeError(f"{folder}: not the search of a part ({type(error).__name__}: {error})") from None


def order_for(order: SearchOrder, parts: Sequence[Part], spent: Spent, before: Spent) -> SearchOrder | None:
    """Returns the settings of the search for the first of ``parts``, or None if no budget is left.  Each of ``parts``,
    which have not been searched yet, gets as much of the rest of the budget as its share of the time.

    Args:
        order: The settings of the whole command.
        parts: The parts that are not searched yet.
        spent: What all searches have used, this one included.
        before: What this one has used before it is resumed."""
    share = parts[0].share / sum(part.share for part in parts)
    limits: dict[str, Any] = {}
    for name, limit, used, own in (
        ("tokens", order.tokens, spent.tokens, before.tokens),
        ("minutes", order.minutes, spent.seconds / 60, before.seconds / 60),
        ("money", order.money, spent.money, before.money),
    ):
        if limit is not None:
            if limit <= used:
                return None
            limits[name] = type(limit)(own + (limit - used) * share)
    return replace(order, **limits)
