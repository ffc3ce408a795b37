"""Filters candidate tasks. Some filters need only a task's source. Others need a probe, which is a run of the task's
own model in the sandbox.

CUDA Agent (arXiv 2602.24286) has five filters. A task must run in eager mode and under torch.compile; be deterministic;
have outputs that are not constant and differ between inputs; take a time in eager mode within limits; and be unlike the
evaluation set. Here the third filter is stricter. It tries wrong answers that are made on purpose
(``sandbox.judge.mutants``). The sandbox's comparison of outputs must reject each of them, except those with errors of
rounding or of 1 %. This module also checks the form of the source, and refuses tasks with the same bytes or structure
as an earlier task.

Two filters need a sweep (``teacher.design_sweep``), which times many designs of a task. A design is one way to write
the task's kernel. First, designs must differ enough in speed or in correctness. Second, the best design must be at
least ``synthesis.headroom`` times as fast as torch.compile. For this filter, the judge (the sandbox's test of
solutions) times the best designs again. Cheap filters come first: a sweep takes two seconds, a probe under
torch.compile ten or more."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from cuda_agent.sandbox.wire import Probe
from cuda_agent.synthesis.similarity import Shingles, duplicate_key, nearest
from cuda_agent.synthesis.teacher.optimum import Swept
from cuda_agent.tasks.inspect import problems
from cuda_agent.tasks.task import Task

# The filters in the order in which they are applied; the data card shows this order.
FILTERS = (
    "composed",  # the writer made a task
    "form",  # Model, get_inputs, get_init_inputs; at least one operator
    "new bytes",
    "new structure",
    "unlike the evaluation set",
    "runs in eager",
    "deterministic",
    "rejects wrong answers",  # a constant, an input, the answer to other inputs or weights
    "time window",
    "choice matters",  # of a design, to speed or to correctness; only with a sweep
    "compiles",
    "headroom",  # of the best design over torch.compile; only with a sweep
)
SPREAD, RIGHT = 1.5, 0.7  # a choice matters if median time / best time >= SPREAD, or the share of right designs < RIGHT


class Prober(Protocol):
    """The part of a sandbox that the filters use. ``probe`` runs the task's own model, without a candidate kernel. If
    ``compile`` is true, ``probe`` also times the model under torch.compile."""

    async def probe(self, task: Task, compile: bool = True) -> Probe: ...


class TaskRefused(Exception):
    """A filter refused a candidate task. The data card (a summary of the synthesis, as JSON) counts refusals by
    ``filter`` and by the error's text."""

    def __init__(self, filter: str, reason: str = "") -> None:
        super().__init__(f"{filter}: {reason}" if reason else filter)
        self.filter = filter


class SourceFilter:
    """The filters that need only the source of a candidate task. The object remembers each checked candidate and
    refuses later copies of it.

    Args:
        references: (name, shingles) of each task of the evaluation set. Shingles are the hashed subtrees of the task's
            syntax tree (``similarity.shingles``).
        max_similarity: Greatest accepted similarity of a candidate to a task of the evaluation set, from 0 to 1."""

    def __init__(self, references: Sequence[tuple[str, Shingles]], max_similarity: float) -> None:
        self.references, self.max_similarity = references, max_similarity
        self.digests: set[str] = set()
        self.keys: set[str] = set()
        self.scores: list[float] = []  # similarity of each candidate to the nearest task of the evaluation set

    def check(self, task: Task) -> None:
        """Raises TaskRefused if a filter refuses ``task``, for example because an earlier task is the same."""
        if found := problems(task.code):
            raise TaskRefused("form", found[0])
        if not task.ops:
            raise TaskRefused("form", "uses no operator")
        if task.digest in self.digests:
            raise TaskRefused("new bytes")
        self.digests.add(task.digest)
        key = duplicate_key(task.code)
        if key in self.keys:
            raise TaskRefused("new structure")
        self.keys.add(key)
        if self.references:
            name, score = nearest(task.code, self.references)
            self.scores.append(score)
            if score > self.max_similarity:
                raise TaskRefused("unlike the evaluation set", name)


def check_eager(probe: Probe, window: tuple[float, float]) -> None:
    """Applies the filters that need only ``probe``, the result of a task's run in eager mode. Raises TaskRefused if a
    filter refuses the task. ``window`` holds the least and the greatest accepted time in eager mode, in seconds."""
    if probe.error or probe.eager_seconds is None:
        raise TaskRefused("runs in eager", last_line(probe.error))
    if not probe.deterministic:
        raise TaskRefused("deterministic")
    if probe.lets_through:
        raise TaskRefused("rejects wrong answers", ", ".join(probe.lets_through))
    if probe.eager_seconds < window[0]:
        raise TaskRefused("time window", "too fast")
    if probe.eager_seconds > window[1]:
        raise TaskRefused("time window", "too slow")


def check_compiled(probe: Probe) -> None:
    if probe.error or probe.compile_seconds is None:
        raise TaskRefused("compiles", last_line(probe.error))


def check_choice(swept: Swept) -> None:
    """Checks that the choice of a design (one way to write a task's kernel) matters. ``swept`` is the result of timing
    many designs of one task. Raises TaskRefused if no design computes the right outputs. Also raises TaskRefused if
    most designs compute the right outputs and their median time is about that of the fastest one."""
    if swept.seconds is None or swept.median_seconds is None:
        raise TaskRefused("choice matters", "no design is right")
    if swept.median_seconds < SPREAD * swept.seconds and swept.right >= RIGHT:
        raise TaskRefused("choice matters", "most designs are right and fast")


def check_headroom(speedup: float | None, probe: Probe, headroom: float) -> None:
    """Raises TaskRefused if the best design of a task is less than ``headroom`` times as fast as torch.compile. A
    design is one way to write the task's kernel. Compares speed-ups over eager mode instead of times, because the times
    of designs and those of ``probe`` are not comparable.

    Args:
        speedup: Speed-up of the best design over eager mode, or None if the sandbox rejects the best designs.
        probe: Has the task's times in eager mode and under torch.compile.
        headroom: Least accepted ratio of the two speed-ups (of the best design and of torch.compile)."""
    if speedup is None:
        raise TaskRefused("headroom", "the judge refuses the best designs")
    assert probe.eager_seconds and probe.compile_seconds  # timed in turn
    if speedup < headroom * probe.eager_seconds / probe.compile_seconds:
        raise TaskRefused("headroom", "torch.compile is too fast")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "no result"


def yields(refused: Counter[str], passed: int) -> list[dict[str, Any]]:
    """Returns one row per filter: how many candidates reached, passed and failed it. ``refused`` counts
    refused candidates by filter; ``passed`` is the number of candidates that passed all filters."""
    rows, entered = [], refused.total() + passed
    for name in FILTERS:
        rows.append({"filter": name, "entered": entered, "passed": entered - refused[name], "dropped": refused[name]})
        entered -= refused[name]
    return rows
