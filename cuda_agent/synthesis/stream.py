"""The candidates of ``synthesize``: a stream for each family of tasks, or one for a task set that exists."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

from cuda_agent.errors import TaskError
from cuda_agent.synthesis.compose import Composer
from cuda_agent.synthesis.teacher.family import is_heldout, parse, sample_task
from cuda_agent.tasks.io import check_names, read_any
from cuda_agent.tasks.task import Task

ATTEMPTS_A_TASK = 60  # most proposals per wanted task of a stream
MOST_FAILED = 24  # refused candidates of a kind: then a set may have it in held-out tasks only


@dataclass
class Stream:
    """The progress of synthesis for one family of tasks: the composer (the writer of candidates), the accepted tasks,
    and the counts of refused candidates.

    Instead of a composer, a stream can have the tasks of a set (``given``). Each of them keeps its family. If the set
    has training tasks and held-out tasks, each keeps its split, too; else combinations of operators are held out."""

    family: str
    composer: Composer | None  # makes the candidates; None: they are ``given``
    combination: Callable[[Task], str]  # returns a task's combination of operators
    wanted: dict[str, int]  # split -> number of tasks
    kind: Callable[[Task], str] = lambda task: ""  # returns a task's kind; those of held-out tasks are trained
    tasks: list[Task] = field(default_factory=list)  # accepted so far
    heldout: set[str] = field(default_factory=set)  # combinations of the held-out tasks
    refused: Counter[str] = field(default_factory=Counter)  # filter -> number of candidates that it refused
    reasons: Counter[str] = field(default_factory=Counter)  # reason -> number of refused candidates
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # split -> kind -> tasks
    failed: Counter[str] = field(default_factory=Counter)  # kind -> number of refused candidates
    given: Sequence[Task] = ()

    @cached_property
    def is_split(self) -> bool:
        """Whether the tasks are given, with training tasks and held-out tasks among them."""
        return len({task.split for task in self.given}) > 1

    @property
    def repeatable(self) -> bool:
        return self.composer is None or self.composer.repeatable

    def made(self, split: str) -> int:
        return self.kinds[split].total()

    def wants(self, split: str) -> bool:
        return self.made(split) < self.wanted[split]

    async def candidate(self, index: int, rng: Random) -> Task:
        """Returns candidate number ``index``. Raises ComposeError if there is none of this number."""
        return await self.composer.compose(rng) if self.composer else self.given[index]

    def side(self, task: Task, seed: int, scarce: bool) -> str | None:
        """Returns the split of ``task``: "train" or "heldout". Returns None if the split is full. Also returns None for
        a composed task with the combination of operators of a held-out task, and for one after which the training tasks
        could not have every kind of held-out task. The last rule ends when candidates or probes become ``scarce``."""
        drawn, share = self.combination(task), self.wanted["heldout"] / sum(self.wanted.values())
        split = task.split if self.is_split else "heldout" if is_heldout(drawn, seed, share) else "train"
        if not self.wants(split):
            return None
        if self.composer is None:
            return split
        return split if drawn not in self.heldout and (scarce or self.leaves_room(task, split)) else None

    def accept(self, task: Task, split: str) -> None:
        self.tasks.append(replace(task, family=self.family if self.composer else task.family, split=split))
        self.kinds[split][self.kind(task)] += 1
        if split == "heldout":
            self.heldout.add(self.combination(task))

    def untrained(self) -> set[str]:
        """Returns the kinds of held-out tasks that no training task has."""
        return self.kinds["heldout"].keys() - self.kinds["train"].keys()

    def leaves_room(self, task: Task, split: str) -> bool:
        """Returns whether ``task`` for ``split`` leaves enough open training places: one, or two where training tasks
        abound, for each kind of held-out tasks, less the training tasks of this kind."""
        kind, places = self.kind(task), self.wanted["train"] - self.made("train")
        most = 2 if self.wanted["train"] >= 2 * self.wanted["heldout"] else 1
        kinds = {one for one in self.kinds["heldout"] if self.failed[one] < MOST_FAILED}
        missing = {one: max(0, most - self.kinds["train"][one]) for one in kinds}
        if split == "train":
            missing[kind], places = max(0, missing.get(kind, 0) - 1), places - 1
        else:
            missing[kind] = max(0, most - self.kinds["train"][kind])
        return not self.wanted["train"] or sum(missing.values()) <= places

    @property
    def attempts(self) -> int:
        """The most candidates that are proposed."""
        return ATTEMPTS_A_TASK * sum(self.wanted.values()) if self.composer else len(self.given)

    @property
    def done(self) -> bool:
        return not any(self.wants(split) for split in self.wanted)

    def rate(self, kind: str) -> float:
        """The estimated share of the candidates of ``kind`` that pass all filters. Before the first one, it is 1."""
        passed = sum(counts[kind] for counts in self.kinds.values())
        return (passed + 1) / (passed + self.failed[kind] + 1)


def read_given(path: Path) -> list[Task]:
    """Returns the tasks of a set that takes the place of new tasks. A task of the teacher's family that this version of
    the teacher cannot solve gets the family "given".

    Raises:
        TaskError: The set cannot be read, two tasks share a name, or a split is neither "train" nor "heldout"."""
    tasks = read_any(path)
    check_names(tasks)
    for task in tasks:
        if task.split not in ("train", "heldout"):
            raise TaskError(f"{path}: task {task.name}: expected the split train or heldout, got {task.split!r}")
    return [replace(task, family="given") if _is_unknown(task) else task for task in tasks]


def _is_unknown(task: Task) -> bool:
    try:
        return task.family == "teacher" and not parse(task)
    except ValueError:
        return True


class FamilyWriter:
    repeatable = True

    def __init__(self, device: str) -> None:
        self._device = device

    async def compose(self, rng: Random) -> Task:
        return sample_task(rng, self._device)
