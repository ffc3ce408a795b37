"""Computes the scores of a policy from the verdicts of its episodes. A verdict is the result of judging one solution.
The metrics are those of the results table in the CUDA Agent paper, and the gap to the best known kernel of a task.

Each metric is computed twice: for the final solution of every episode, and for the best solution judged in the episode.
There are metrics over all tasks, per family of tasks and per operator. ``compare`` compares two policies task by task.
It compares rates on the tasks that both policies have played, and speed-ups on the tasks that both have solved.

Episodes lost to infrastructure faults or the deadline are counted, but not scored. Metrics have confidence intervals,
which come from a bootstrap over tasks. If a rate is 0 in all tasks, or 1 in all tasks, its interval comes from the
binomial distribution instead. The intervals account for the choice of tasks, but not for noise in times or for the
choice of training seeds."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from cuda_agent.policy.episode import Episode
from cuda_agent.sandbox.wire import Mode, Verdict
from cuda_agent.tasks.task import Task

RATES = ("passed", "faster_eager", "faster_compile")
SPEEDUPS = ("speedup_eager", "speedup_compile", "gap")  # the metrics with a geometric mean
METRICS = RATES + SPEEDUPS

RESAMPLES = 2000
COVERAGE = 0.95
FEWEST_TASKS = 5  # with fewer tasks a bootstrap interval is meaningless


@dataclass
class Result:
    """The result of one solution of an episode."""

    status: str  # the verdict's status, or ``no_answer`` if there was nothing to judge
    speedup_eager: float | None = None  # over PyTorch's eager mode
    speedup_compile: float | None = None  # over torch.compile
    gap: float | None = None  # the best known design's speed-up over eager, divided by ``speedup_eager``

    @property
    def correct(self) -> bool:
        return self.status == "ok"


@dataclass
class EpisodeScore:
    """The score of one episode: the results of its final solution and of its best solution."""

    episode: str  # id
    task: str  # name
    family: str  # the task's family
    ops: list[str]  # the task's operators
    final: Result
    best: Result
    turns: int
    tokens: int  # number of tokens that the policy sampled


@dataclass
class ScoreRow:
    """The scores over one group of tasks: all tasks, a family, or the tasks with one operator. ``passed``,
    ``faster_eager`` and ``faster_compile`` are rates: shares of a task's episodes (0 to 1), averaged over the tasks. A
    speed-up is the geometric mean over the tasks with a correct and timed solution, or None if no task has one. ``gap``
    compares solutions with the best known design of their task's kernel: the design's speed-up over eager is divided by
    the solution's. ``gap`` is the geometric mean of these ratios over the solved tasks whose best design is known.
    ``intervals`` maps each metric to its 95 % interval (low, high). The interval is None if fewer than ``FEWEST_TASKS``
    tasks have a value. It is also None if all tasks have the same value, unless the metric is a rate and this value is
    0 or 1."""

    group: str  # "overall", a family or an operator
    tasks: int
    correct_tasks: int
    passed: float | None
    faster_eager: float | None
    faster_compile: float | None
    speedup_eager: float | None
    speedup_compile: float | None
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    gap: float | None = None


@dataclass
class Table:
    overall: ScoreRow
    families: list[ScoreRow]
    operators: list[ScoreRow]


@dataclass
class Scores:
    """All scores of one policy on one task set: the content of ``scores.json``. ``lets_through`` is about tasks whose
    check is too weak, because it accepts deliberately wrong answers (see ``synthesis.lint``). It maps each such task to
    texts. Each text has the name of an accepted answer and the least tolerance that accepts it."""

    policy: str
    clock: Literal["real", "model"]  # "model": times are a deterministic cost, not measured
    mode: Mode | None  # of the final solutions' verdicts; None without a verdict
    tasks: int  # number of tasks in the set
    unscored: list[str]  # tasks without a single scored episode
    episodes: int  # number of scored episodes
    infra: int  # number of episodes lost to infrastructure faults or the deadline: not scored
    final: Table  # of the episodes' final solutions
    best: Table  # of the best solutions judged during the episodes; the agent loop judges these in quick mode
    statuses: dict[str, int]  # status -> number of final solutions with this status
    ended: dict[str, int]  # reason why an episode ended -> number of scored episodes
    mean_turns: float | None  # turns per episode
    mean_tokens: float | None  # tokens that the policy sampled, per episode
    outcomes: list[EpisodeScore]
    seed: int  # seed of the bootstrap
    resamples: int  # number of the bootstrap's resamples
    lets_through: dict[str, list[str]] = field(default_factory=dict)
    format: str = ""  # of the final solutions; empty without a verdict

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Difference:
    """The change of one metric from one policy to another on their common tasks. For a rate, the change is a
    difference, and the common tasks are those that both policies have played. For a speed-up or for the gap to the best
    known design, the change is a ratio, and the common tasks are those that both policies have solved. ``interval`` is
    the 95 % interval from a bootstrap over tasks. It is None if there are fewer than ``FEWEST_TASKS`` common tasks, or
    if the change is the same on every task."""

    group: str  # "overall" or a family
    metric: str
    tasks: int  # number of common tasks
    before: float | None  # value of the first policy on the common tasks
    after: float | None  # value of the second policy on the common tasks
    change: float | None
    interval: tuple[float, float] | None  # (low, high) of ``change``


def score(
    policy: str,
    episodes: Iterable[Episode],
    tasks: Sequence[Task],
    clock: Literal["real", "model"],
    seed: int = 0,
    fastest: Mapping[str, float] | None = None,
) -> Scores:
    """Returns the scores of the policy named ``policy`` from its ``episodes`` on ``tasks``. ``clock`` says whether
    times are measured ("real") or computed from a cost model ("model"). ``seed`` is the seed of the bootstrap.
    ``fastest`` maps the name of each task whose best kernel design is known to this design's speed-up over eager.

    Raises:
        ValueError: An episode's task is not in ``tasks``, a verdict has another clock than ``clock``, or the final
            solutions were judged in different modes (such as quick and strict)."""
    by_name = {task.name: task for task in tasks}
    outcomes: list[EpisodeScore] = []
    ended: Counter[str] = Counter()
    modes: set[Mode] = set()
    infra, format = 0, ""
    for episode in episodes:
        if episode.task not in by_name:
            raise ValueError(f"episode {episode.id} is on task {episode.task!r}, which is not in the set")
        final = Verdict.from_json(episode.verdict) if episode.verdict else None
        best = Verdict.from_json(episode.best) if episode.best else None
        for verdict in (final, best):
            if verdict and verdict.clock != clock:
                raise ValueError(f"episode {episode.id}: verdict under the {verdict.clock} clock, expected {clock}")
        if episode.reward is None or (final is not None and final.status == "infra"):
            infra += 1
            continue
        if final:
            modes.add(final.mode)
            format = final.format
        apart = final is not None and best is not None and final.mode != best.mode
        task = by_name[episode.task]
        known = (fastest or {}).get(task.name)
        ended[episode.ended] += 1
        outcome = EpisodeScore(
            episode=episode.id,
            task=task.name,
            family=task.family,
            ops=list(task.ops),
            final=_result(final, known),
            best=_result(best, known) if apart else _better(_result(final, known), _result(best, known)),
            turns=max(episode.turns, default=-1) + 1,
            tokens=sum(episode.mask),
        )
        outcomes.append(outcome)
    if len(modes) > 1:
        raise ValueError(f"{policy}: final verdicts of several modes: {', '.join(sorted(modes))}")
    scored = {outcome.task for outcome in outcomes}
    return Scores(
        policy=policy,
        clock=clock,
        mode=next(iter(modes), None),
        tasks=len(by_name),
        unscored=sorted(set(by_name) - scored),
        episodes=len(outcomes),
        infra=infra,
        final=_table(outcomes, "final", seed),
        best=_table(outcomes, "best", seed),
        statuses=dict(sorted(Counter(outcome.final.status for outcome in outcomes).items())),
        ended=dict(sorted(ended.items())),
        mean_turns=float(np.mean([o.turns for o in outcomes])) if outcomes else None,
        mean_tokens=float(np.mean([o.tokens for o in outcomes])) if outcomes else None,
        outcomes=outcomes,
        seed=seed,
        resamples=RESAMPLES,
        format=format,
    )


def compare(
    before: Scores, after: Scores, which: Literal["final", "best"] = "final", family: str | None = None, seed: int = 0
) -> list[Difference]:
    """Returns the change of each metric from ``before`` to ``after`` on their common tasks (of ``family``, if given).
    ``which`` chooses the final or the best solutions. ``seed`` is the seed of the bootstrap.

    Raises:
        ValueError: ``before`` and ``after`` have different clocks (measured and computed times), or were judged in
            different modes (such as quick and strict)."""
    if before.clock != after.clock:
        raise ValueError(f"{before.policy} is under the {before.clock} clock, {after.policy} under {after.clock}")
    if before.mode and after.mode and before.mode != after.mode:
        raise ValueError(f"{before.policy} was judged in {before.mode} mode, {after.policy} in {after.mode} mode")
    common = sorted({o.task for o in before.outcomes} & {o.task for o in after.outcomes})
    if family is not None:
        of_family = {o.task for o in after.outcomes if o.family == family}
        common = [task for task in common if task in of_family]
    a, b = (per_task(scores.outcomes, which, common) for scores in (before, after))
    found = []
    for metric in METRICS:
        ratio = metric in SPEEDUPS
        both = ~np.isnan(a[metric]) & ~np.isnan(b[metric])
        if metric == "gap" and not both.any():  # no best design is known
            continue
        old, new = a[metric][both], b[metric][both]
        told = len(old) >= FEWEST_TASKS and not np.allclose(new - old, new[0] - old[0])  # else its width would be 0
        interval = _percentiles(_means(new - old, _draws(len(old), seed), ratio)) if told else None
        first, second, change = (_mean(column, ratio) for column in (old, new, new - old))
        found.append(Difference(family or "overall", metric, len(old), first, second, change, interval))
    return found


def fast_p(outcomes: Iterable[EpisodeScore], p: float, baseline: str, tasks: int | None = None) -> float | None:
    """Returns KernelBench's fast_p (arXiv 2502.10517): the share of tasks whose final solution is correct and more than
    ``p`` times as fast as the baseline ("eager" or "compile"). If ``p`` is 0, any correct solution counts. A task with
    several episodes in ``outcomes`` counts as the share of its successful episodes. ``tasks`` is the divisor, by
    default the number of tasks in ``outcomes``. Returns None if the divisor is 0."""
    shares: dict[str, list[bool]] = {}
    for outcome in outcomes:
        speedup = getattr(outcome.final, f"speedup_{baseline}") or 0.0
        shares.setdefault(outcome.task, []).append(outcome.final.correct and (p == 0 or speedup > p))
    count = len(shares) if tasks is None else tasks
    return sum(sum(row) / len(row) for row in shares.values()) / count if count else None


def write_scores(path: Path, scores: Scores) -> None:
    path.write_text(json.dumps(scores.to_json(), indent=1, sort_keys=True) + "\n")


def read_scores(path: Path) -> Scores:
    """Reads scores that ``write_scores`` wrote. Raises ValueError if the file holds no scores."""
    return TypeAdapter(Scores).validate_python(json.loads(path.read_text()))


def _result(verdict: Verdict | None, fastest: float | None) -> Result:
    if verdict is None or verdict.status != "ok":
        return Result("no_answer" if verdict is None else verdict.status)
    speedup = verdict.speedup_eager
    return Result("ok", speedup, verdict.speedup_compile, fastest / speedup if fastest and speedup else None)


def _better(final: Result, best: Result) -> Result:
    """Returns the better result: a correct one before a wrong one, then the one with the larger speed-up over
    torch.compile, then the one with the larger speed-up over eager. The CUDA Agent paper uses the same order."""
    return max(final, best, key=lambda r: (r.correct, r.speedup_compile or 0.0, r.speedup_eager or 0.0))


def _table(outcomes: Sequence[EpisodeScore], which: str, seed: int) -> Table:
    row = partial(_row, which=which, seed=seed)
    families = sorted({outcome.family for outcome in outcomes})
    operators = Counter(op for outcome in outcomes for op in set(outcome.ops))
    return Table(
        overall=row("overall", outcomes),
        families=[row(family, [o for o in outcomes if o.family == family]) for family in families],
        operators=[
            row(op, [o for o in outcomes if op in o.ops])
            for op, _ in sorted(operators.items(), key=lambda item: (-item[1], item[0]))
        ],
    )


def _row(group: str, outcomes: Sequence[EpisodeScore], which: str, seed: int) -> ScoreRow:
    names = sorted({outcome.task for outcome in outcomes})
    columns = per_task(outcomes, which, names)
    draws = _draws(len(names), seed)
    values = {metric: _mean(columns[metric], metric in SPEEDUPS) for metric in METRICS}
    intervals: dict[str, tuple[float, float] | None] = {}
    for metric in METRICS:
        column = columns[metric][~np.isnan(columns[metric])]
        if len(column) < FEWEST_TASKS:
            intervals[metric] = None
        elif metric in RATES and bool(np.all(column == column[0])) and column[0] in (0.0, 1.0):
            intervals[metric] = _unanimous(float(column[0]), len(column))
        elif np.allclose(column, column[0]):  # its width would be 0
            intervals[metric] = None
        else:
            intervals[metric] = _percentiles(_means(columns[metric], draws, metric in SPEEDUPS))
    return ScoreRow(group, len(names), int(np.sum(columns["passed"] > 0)), **values, intervals=intervals)  # type: ignore[arg-type]


def per_task(outcomes: Sequence[EpisodeScore], which: str, names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Returns a dict from each metric to its values, float64 [len(names)], one per task. The value of a rate is a
    share of the task's episodes, such as the share of correct ones. The value of a speed-up is the mean of its natural
    logarithm over the task's correct and timed episodes, or nan without such episodes. The same holds for ``gap``,
    which is also nan if the task's best design is unknown. ``which`` is "final" or "best"."""
    results: dict[str, list[Result]] = {name: [] for name in names}
    for outcome in outcomes:
        if outcome.task in results:
            results[outcome.task].append(outcome.final if which == "final" else outcome.best)
    rows = [results[name] for name in names]
    columns = {"passed": np.array([np.mean([r.correct for r in row]) for row in rows])}
    for baseline in ("eager", "compile"):
        ratios = [[(r.correct and getattr(r, f"speedup_{baseline}")) or 0.0 for r in row] for row in rows]
        timed = [[ratio for ratio in row if ratio] for row in ratios]
        columns[f"faster_{baseline}"] = np.array([np.mean([ratio > 1 for ratio in row]) for row in ratios])
        columns[f"speedup_{baseline}"] = np.array([np.mean(np.log(row)) if row else np.nan for row in timed])
    gaps = [[r.gap for r in row if r.correct and r.gap] for row in rows]
    columns["gap"] = np.array([np.mean(np.log(row)) if row else np.nan for row in gaps])
    return columns


def _draws(n: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, max(n, 1), size=(RESAMPLES, n))


def _mean(column: NDArray[np.float64], geometric: bool) -> float | None:
    known = column[~np.isnan(column)]
    if not len(known):
        return None
    mean = float(np.mean(known))
    return float(np.exp(mean)) if geometric else mean


def _means(column: NDArray[np.float64], draws: NDArray[np.int64], geometric: bool) -> NDArray[np.float64]:
    """Returns the mean of ``column`` [tasks] over each resample in ``draws`` (indices of tasks, [resamples, tasks]):
    float64 [resamples]. Leaves out values that are nan. The mean of a resample without other values is nan. If
    ``geometric`` is set, ``column`` holds logarithms, and the means are geometric."""
    if not len(column):
        return np.full(len(draws), np.nan)
    with warnings.catch_warnings(action="ignore"):  # warnings about resamples without a known value
        means = np.nanmean(column[draws], axis=1)
    return np.exp(means) if geometric else means


def _percentiles(values: NDArray[np.float64]) -> tuple[float, float] | None:
    known = values[~np.isnan(values)]
    if len(known) < len(values) / 2:
        return None
    tail = 100 * (1 - COVERAGE) / 2
    low, high = np.percentile(known, [tail, 100 - tail])
    return float(low), float(high)


def _unanimous(share: float, n: int) -> tuple[float, float]:
    """Returns the exact binomial interval (Clopper-Pearson) of a rate that has the same value, ``share`` (0 or 1), in
    all ``n`` tasks. A bootstrap would give an interval of width 0, but the true rate may differ: if 0 of 24 tasks are
    solved, the interval reaches 14 %."""
    reach = 1 - ((1 - COVERAGE) / 2) ** (1 / n)
    return (0.0, reach) if share == 0 else (1 - reach, 1.0)
