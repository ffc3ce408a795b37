"""Prepares and locks the folder in which `cuda-agent optimize` keeps a search.  If a new search fails before the
model's first turn, clears the folder.

model.py          the problem                          solution/     kernels, and plan.json or model_new.py
model_new.py      the solution as one standalone file  verdict.json  the solution's strict verdict, else the quick one
transcript.jsonl  the search's events                  report.html   a page about the search
run.json          the settings of the search and the sandbox, for --resume; holds no API key"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import NO_TARGET, Event, Findings, State, read_events, replayed
from cuda_agent.config import SandboxConfig
from cuda_agent.errors import UserError
from cuda_agent.optimize.search_environment import Terms
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_whole

_BEGUN = ("model.py", "run.json", "transcript.jsonl", "report.html")  # all files of a folder before the first turn
_PLAYED = ("spent", "files", "verdict")  # events that show that a turn was played


class OptimizeError(UserError):
    """The command cannot work with its folder or settings; the message says why."""


@dataclass(frozen=True)
class SearchOrder:
    """The settings of a search.  A search consists of one or more attempts, in each of which the model tries to write a
    fast solution.  ``tokens``, ``minutes`` and ``money`` limit all attempts together (None: no limit).

    Raises:
        OptimizeError: ``money`` is limited but no price is given, the context is shorter than two answers, or no turn
            is left for a tool."""

    base_url: str  #: OpenAI-compatible address
    model: str  #: name of the model at the address
    key_env: str = "OPENAI_API_KEY"  #: environment variable that holds the API key
    attempts: int = 1  #: number of attempts
    search: bool = True  #: whether later attempts start from solutions of earlier ones
    terms: Terms = field(default_factory=Terms)  #: settings of each attempt
    tokens: int | None = None
    minutes: float | None = 60.0
    money: float | None = None
    price_in: float = 0.0  #: price of a million prompt tokens
    price_out: float = 0.0  #: price of a million sampled tokens
    lessons: str = ""  #: file of lessons of earlier searches, which this one reads and adds to; empty: none

    @property
    def learns(self) -> bool:
        """Whether lessons are read and kept.  The prompts of the style ``compact`` have no place for them."""
        return bool(self.lessons) and self.terms.style == "full"

    def __post_init__(self) -> None:
        if self.money is not None and not (self.price_in or self.price_out):
            raise OptimizeError("--money needs a price: --price-in, --price-out or both, per million tokens")
        if self.terms.context < 2 * self.terms.answer_tokens and self.terms.style == "full":
            raise OptimizeError("--context must be at least twice --answer-tokens: a conversation has to fit in, too")
        if self.terms.turns < 2 and self.terms.style == "full":
            raise OptimizeError("--turns must be at least 2: the last turn only sums up and calls no tool")


def with_changes(order: SearchOrder, changes: dict[str, Any]) -> SearchOrder:
    """Returns a copy of ``order`` with new values for some fields.  ``changes`` maps the name of a field to its new
    value.  The field is one of ``order`` or of ``order.terms``, the settings of each attempt.  An infinite target
    becomes ``NO_TARGET``.  A new share ``until`` without a new target replaces the target."""
    if "until" in changes:
        changes = {"target": NO_TARGET} | changes
    if "target" in changes:
        changes = changes | {"target": min(changes["target"], NO_TARGET)}
    terms = {name: value for name, value in changes.items() if name in Terms.__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in terms}
    return replace(order, terms=replace(order.terms, **terms), **rest)


def read_order(folder: Path) -> tuple[SearchOrder, dict[str, Any]]:
    """Returns the order and the sandbox settings with which the search in ``folder`` was begun.

    Raises:
        OptimizeError: ``run.json`` is missing or cannot be read."""
    if not (folder / "run.json").is_file():
        raise OptimizeError(f"{folder}: nothing to go on with: it holds no run.json")
    try:
        data = json.loads((folder / "run.json").read_text())
        return SearchOrder(**data["order"] | {"terms": Terms(**data["order"]["terms"])}), data["sandbox"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptimizeError(f"{folder}/run.json: nothing to go on with ({type(error).__name__}: {error})") from None


def so_far(path: Path) -> tuple[dict[int, State], Findings, Event]:
    """Returns how far a search has come according to the transcript ``path``: the states of its attempts (by attempt
    number), the correct solutions, and the used budget.

    Raises:
        OptimizeError: ``path`` is not a transcript."""
    try:
        return replayed(read_events(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptimizeError(f"{path}: not a transcript to go on with ({type(error).__name__}: {error})") from None


def write_solution(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the ``files`` of a solution (text by path) to ``folder``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextlib.contextmanager
def opened(order: SearchOrder, settings: SandboxConfig, task: Task, folder: Path, resume: bool) -> Iterator[None]:
    """Prepares and locks ``folder`` for a search in a ``with`` block.  If a new search fails before the model's first
    turn, removes the files of the search.

    Raises:
        OptimizeError: The folder cannot be used.  Results of an earlier search in it are unchanged."""
    prepare = partial(_prepare_folder, order, settings, task, folder, resume)
    with prepared(folder, resume, prepare, _unplayed, _clear):
        yield


@contextlib.contextmanager
def prepared(
    folder: Path,
    resume: bool,
    prepare: Callable[[], None],
    unplayed: Callable[[Path], bool],
    clear: Callable[[Path], None],
) -> Iterator[None]:
    """Locks ``folder`` in a ``with`` block, after ``prepare`` has written to it.  Makes the folder unless ``resume`` is
    set.  If the block of a new command fails while ``unplayed`` holds of the folder, calls ``clear`` with it, and
    removes it if it was made here.

    Raises:
        OptimizeError: The folder cannot be used."""
    with contextlib.ExitStack() as held:
        try:
            fresh = not folder.exists()
            if not resume:
                folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone(folder, "cuda-agent optimize"))
            fresh = fresh or any(folder.iterdir())  # keep an empty folder that a person made
            prepare()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise OptimizeError(f"{folder}: no folder for the result: {why}") from None
        try:
            yield
        except BaseException:
            if not resume and unplayed(folder):
                clear(folder)
                if fresh:
                    folder.rmdir()
            raise


@contextlib.contextmanager
def alone(folder: Path, command: str) -> Iterator[None]:
    """Holds an exclusive lock on ``folder`` during a ``with`` block.  Goes on without a lock if the file system cannot
    lock folders.  ``command`` is the command that uses the folder, such as "cuda-agent optimize"; it appears in the
    error message.

    Raises:
        OptimizeError: Another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some shared file systems lock no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OptimizeError(f"{folder}: another {command} works in there") from None
        yield
    finally:
        os.close(descriptor)


def _prepare_folder(order: SearchOrder, settings: SandboxConfig, task: Task, folder: Path, resume: bool) -> None:
    """Writes the problem and the settings of the search to ``folder``.  If ``resume`` is set, the folder must hold a
    search for the same problem.  Otherwise it must be empty, or hold only a search that ended before the model's first
    turn.

    Raises:
        OptimizeError: The folder does not meet these conditions."""
    if resume:
        if not (folder / "transcript.jsonl").is_file():
            raise OptimizeError(f"{folder}: nothing to go on with; leave out --resume to begin")
        if (folder / "model.py").read_text() != task.code:
            raise OptimizeError(f"{folder}/model.py has changed since: begin anew in another folder")
    elif any(folder.iterdir()):
        if not _unplayed(folder):
            how = f"go on with --resume {folder}, or name another one with --output"
            raise OptimizeError(f"{folder} is there already: {how}")
        _clear(folder)
    (folder / "model.py").write_text(task.code)
    sandbox = settings.model_dump(mode="json")
    write_whole(folder / "run.json", json.dumps({"order": asdict(order), "sandbox": sandbox}, indent=1))


def _unplayed(folder: Path) -> bool:
    """Returns whether ``folder`` holds only a search that ended before the model's first turn."""
    paths = list(folder.iterdir())
    if not all(path.name in _BEGUN and path.is_file() and not path.is_symlink() for path in paths):
        return False
    try:
        read_order(folder)
        events = read_events(folder / "transcript.jsonl")
    except (OptimizeError, OSError, ValueError):
        return False
    return not any(event["kind"] in _PLAYED for event in events)


def _clear(folder: Path) -> None:
    for name in _BEGUN:
        (folder / name).unlink(missing_ok=True)
