"""Compares the search of `cuda-agent optimize` with one conversation and with best-of-N, at equal cost.

    python benchmarks/claims/search.py last --store .cuda-agent/store --parallel 7 --work search --json search.json
    python benchmarks/claims/search.py --combine seed0.json seed1.json seed2.json

A run's policy is served at an OpenAI-compatible address (``policy_server``), and plays the run's held-out tasks of the
teacher's family. All methods have the same model, turns, tokens, temperature and sandbox:

- ``one``: one conversation. When it ends, the next one begins from nothing, so that no budget is left over.
- ``once``: the same until its first conversation ends. Then its best solution stays as it is.
- ``best-of-N``: conversations that begin from nothing, as many at a time as the search has.
- ``search``: later conversations begin with solutions of earlier ones.

A method ends after ``--verdicts`` verdicts or ``--tokens`` sampled tokens. A solution counts as one verdict of a
method, however often it is judged. The sandbox judges it once for all methods of a task, so they share its measured
time. After every verdict there is a best speed-up so far over the faster of eager and ``torch.compile``, or 0 without a
correct solution. The area is the mean of these numbers over all verdicts of the budget; a method that ends early keeps
its last number. Each task has one area, the mean over ``--seeds``. The intervals draw tasks again, with the areas of
all methods; with ``--combine`` they draw files first, and then tasks within each: a file's tasks share a policy. The
ceiling is the area of a method whose first verdict is on the fastest solution that any method found with any seed: no
method can have more.

With enough processors, each of ``--parallel`` plays has ``sandbox.threads`` of them to itself, and the server has the
rest. With fewer, all share one timing lease. Each play is a file below ``--work``; the same command goes on after an
interruption.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from policy_server import NAME, served

from cuda_agent.agent.progress import NO_TARGET, Findings, SearchBudget, factor
from cuda_agent.config import Config, SandboxConfig
from cuda_agent.optimize.archive import MOST_BESIDE
from cuda_agent.optimize.attempt import Attempt
from cuda_agent.optimize.folder import SearchOrder
from cuda_agent.optimize.search import run_attempts, unless
from cuda_agent.optimize.search_environment import Terms
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.policy.served import ServedModel
from cuda_agent.sandbox.client import Sandbox, open_sandbox
from cuda_agent.sandbox.wire import Solution, Verdict
from cuda_agent.storage import open_store
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_whole

PLAYED = ("one", "best-of-N", "search")
METHODS = ("one", "once", "best-of-N", "search")
RESAMPLES = 10_000


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="last", help="a run, the beginning of its name, or last")
    parser.add_argument("--store", default=".cuda-agent/store")
    parser.add_argument("--policy", default="agentic", help="stage whose policy plays")
    parser.add_argument("--split", default="heldout", choices=["heldout", "train"], help="train: for tuning the search")
    parser.add_argument("--tasks", type=int, default=20, help="most tasks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--verdicts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=8000, help="sampled ones")
    parser.add_argument("--turns", type=int, help="limit of turns in a conversation; default: that of evaluations")
    parser.add_argument("--parallel", type=int, default=1, help="plays at a time; a play is a task with one seed")
    parser.add_argument("--work", type=Path, default=Path("search"), help="folder for plays and caches")
    parser.add_argument("--finished", action="store_true", help="play nothing, and show what is finished")
    parser.add_argument("--combine", type=Path, nargs="+", help="results of earlier calls, seen as one")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Play:
    task: Task
    seed: int
    file: Path  #: of the result


@dataclass
class Course:
    """The verdicts of one method on one task, in the order in which they came. Sets ``stop`` at the end of the
    budget."""

    verdicts: int  #: limit
    tokens: int  #: limit of sampled ones
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    found: list[tuple[int, float, str, int]] = field(default_factory=list)  #: tokens, speed-up or 0, status, attempt
    once: int | None = None  #: number of verdicts of the first conversation; None: it has not ended
    prompt: int = 0
    sampled: int = 0
    again: int = 0  #: verdicts on solutions that this method has had before
    ended: Counter[str] = field(default_factory=Counter)  #: reason -> conversations
    parents: list[int] = field(default_factory=list)  #: attempts that began with a solution
    seen: set[str] = field(default_factory=set)

    def tell(self, kind: str, attempt: int = 0, **facts: Any) -> None:
        """Takes the events of the attempts (``progress.Transcript.tell``)."""
        if kind == "spent":
            self.prompt, self.sampled = facts["prompt"], facts["sampled"]
        elif kind == "verdict":
            self._take(Verdict.from_json(facts["verdict"]), facts["files"], attempt)
        elif kind == "ended":
            self.ended[facts["why"]] += 1
            self.once = len(self.found) if self.once is None else self.once
        elif kind == "parent":
            self.parents.append(attempt)
        if len(self.found) >= self.verdicts or self.sampled >= self.tokens:
            self.stop.set()

    def _take(self, verdict: Verdict, files: dict[str, str], attempt: int) -> None:
        digest = Solution(verdict.format, files).digest
        if digest in self.seen:
            self.again += 1
        elif verdict.status != "infra" and not self.stop.is_set():
            self.seen.add(digest)
            self.found.append((self.sampled, factor(verdict) or 0.0, verdict.status, attempt))

    def facts(self) -> dict[str, Any]:
        kept = ("found", "once", "prompt", "sampled", "again", "ended", "parents")
        return {name: getattr(self, name) for name in kept}


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    options = parse()
    if options.combine:
        answers = [json.loads(file.read_text()) for file in options.combine]
        plays = [play for number, answer in enumerate(answers) for play in numbered(answer["plays"], number)]
        budget = answers[0]["budget"]
        if any(answer["budget"] != budget for answer in answers):
            raise SystemExit("the files have different budgets")
    else:
        budget = {"verdicts": options.verdicts, "tokens": options.tokens}
        plays = measure(options)
    answer = compared(plays, budget["verdicts"]) | {"budget": budget}
    print(table(answer))
    if options.json:
        write_whole(options.json, json.dumps(answer | {"plays": plays}, indent=1))


def numbered(plays: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    return [{**play, "task": f"{number}/{play['task']}"} for play in plays]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plays all tasks with all seeds and returns the results. Names plays that are missing at the end, for example
    because their sandbox failed. Raises SystemExit if all are missing."""
    store, work = open_store(options.store), options.work.absolute()
    run = runs.find_run(store, options.run)
    config, manifests = runs.read_config(store, run.config), runs.run_manifests(store, run, STAGES)
    work = work / manifests[options.policy].outputs["policy"][:12]  # another run or policy has another folder
    for name, digest in (("tasks", manifests["synthesis"].outputs["tasks"]),
                         ("policy", manifests[options.policy].outputs["policy"])):  # fmt: skip
        if not (work / name).is_dir():
            store.get_folder(digest, work / name)
    tasks = [task for task in read_tasks(work / "tasks") if task.split == options.split and task.family == "teacher"]
    results = work / f"plays-{options.verdicts}-{options.tokens}-{options.turns}"
    chosen = tasks[: options.tasks]
    all_plays = [Play(task, seed, results / f"{task.name}-{seed}.json") for seed in options.seeds for task in chosen]
    left = [play for play in all_plays if not play.file.exists()]
    if left and not options.finished:
        results.mkdir(exist_ok=True)
        play_all(left, config, options, work)
    if lacking := [play.file.stem for play in all_plays if not play.file.exists()]:
        print(f"not played: {', '.join(lacking)}; the same command goes on with them", file=sys.stderr)
    if len(lacking) == len(all_plays):
        raise SystemExit(1)
    return [json.loads(play.file.read_text()) for play in all_plays if play.file.exists()]


def play_all(plays: Sequence[Play], config: Config, options: argparse.Namespace, work: Path) -> None:
    shares, rest = divided(sorted(os.sched_getaffinity(0)), options.parallel, config.sandbox.threads)
    caches = [work / "cache" / str(number if rest else 0) for number in range(options.parallel)]
    lease = None if rest else caches[0] / "lease"
    spawn = multiprocessing.get_context("spawn")
    waiting = spawn.Queue()
    for play in plays:
        waiting.put(play)
    batch = min(96, 2 * MOST_BESIDE * options.parallel + options.parallel)
    with served(work / "policy", config.policy, batch, rest or shares[0], lease) as url:
        places = [spawn.Process(target=place, args=(share, cache, url, config, options, waiting))
                  for share, cache in zip(shares, caches, strict=True)]  # fmt: skip
        for one in places:
            one.start()
        try:
            for one in places:
                one.join()
        finally:
            for one in places:
                one.terminate()  # if this program is ended; each closes its sandbox
            for one in places:
                one.join()


def end(*_: object) -> None:
    raise KeyboardInterrupt


def divided(processors: Sequence[int], parallel: int, threads: int) -> tuple[list[Sequence[int]], Sequence[int]]:
    """Returns the processors of each place, and those of the server. If there are too few, all places share all, and
    the server's are empty."""
    if len(processors) <= parallel * threads:
        return [processors] * parallel, []
    return [processors[i * threads : (i + 1) * threads] for i in range(parallel)], processors[parallel * threads :]


def place(processors: Sequence[int], cache: Path, url: str, config: Config, options: Any, waiting: Any) -> None:
    """Takes plays from ``waiting``, one after the other, and writes their results."""
    os.sched_setaffinity(0, processors)
    signal.signal(signal.SIGTERM, end)

    async def work() -> None:
        async with open_sandbox(config.sandbox, cache) as sandbox:
            while True:
                try:
                    play = waiting.get(timeout=1)
                except queue.Empty:
                    return
                began = time.monotonic()
                found = await played(play, sandbox, url, config, options)
                found["seconds"] = round(time.monotonic() - began, 1)
                write_whole(play.file, json.dumps(found))
                last = {name: course["found"][-1:] for name, course in found["courses"].items()}
                print(f"{play.file.stem}: {found['seconds']} s, {last}", file=sys.stderr, flush=True)

    asyncio.run(work())


async def played(play: Play, sandbox: Sandbox, url: str, config: Config, options: Any) -> dict[str, Any]:
    """Plays a task with all methods side by side, and returns the course of each."""
    sandboxed: SandboxConfig = config.sandbox
    terms = Terms(
        sandboxed.format, sandboxed.device, "compact", options.turns or config.evaluate.turns, config.policy.context,
        config.agent.turn_tokens, NO_TARGET, temperature=config.evaluate.temperature, seed=play.seed,
    )  # fmt: skip
    most = 20 * options.verdicts  # conversations
    order = SearchOrder(url, NAME, attempts=most, terms=terms, minutes=None)

    async def play_one(method: str) -> Course:
        course, findings, budget = Course(options.verdicts, options.tokens), Findings(), SearchBudget()
        async with ServedModel(url, NAME, form="raw") as model:
            facts = play.task, model, sandbox, terms, budget, findings, course.tell
            attempts = [Attempt(number, *facts) for number in range(1, most + 1)]
            if method == "search":
                await run_attempts(attempts, order, findings, course.tell, course.stop)
            else:
                await unless(course.stop, independent(attempts, 1 if method == "one" else MOST_BESIDE))
        return course

    courses = await asyncio.gather(*map(play_one, PLAYED))
    found = {method: course.facts() for method, course in zip(PLAYED, courses, strict=True)}
    return {"task": play.task.name, "seed": play.seed, "terms": asdict(terms), "courses": found}


async def independent(attempts: Sequence[Attempt], beside: int) -> None:
    slots = asyncio.Semaphore(beside)

    async def one(attempt: Attempt) -> None:
        async with slots:
            await attempt.run()

    async with asyncio.TaskGroup() as group:
        for attempt in attempts:
            group.create_task(one(attempt))


# ------------------------------------------------------------------------------------------------------------- figures


def best_so_far(speedups: Sequence[float], count: int) -> list[float]:
    """Returns the best of the first 1, 2, ... ``count`` of ``speedups``; 0 without any."""
    best, found = 0.0, []
    for number in range(count):
        best = max(best, *speedups[number : number + 1], 0.0)
        found.append(best)
    return found


def area(play: Mapping[str, Any], method: str, count: int) -> float:
    course = play["courses"]["one" if method == "once" else method]
    speedups = [found[1] for found in course["found"]]
    if method == "once":
        speedups = speedups[: course["once"]]
    return float(np.mean(best_so_far(speedups, count)))


def compared(plays: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Returns the mean of each method, and the comparison of the search with each of the others."""
    tasks = sorted({play["task"] for play in plays})
    areas = {
        method: np.array([np.mean([area(play, method, count) for play in plays if play["task"] == task])
                          for task in tasks]) for method in METHODS
    }  # fmt: skip
    courses = {method: [play["courses"][method] for play in plays] for method in PLAYED}
    rows = {
        method: {
            "verdicts": float(np.mean([len(one["found"]) for one in of])),
            "sampled": float(np.mean([one["sampled"] for one in of])),
            "prompt": float(np.mean([one["prompt"] for one in of])),
            "conversations": float(np.mean([sum(one["ended"].values()) for one in of])),
            "correct": float(np.mean([found[2] == "ok" for one in of for found in one["found"]])),
            "solved": float(np.mean([any(found[1] for found in one["found"]) for one in of])),
        }
        for method, of in courses.items()
    }
    clusters = [[at for at, task in enumerate(tasks) if cluster(task) == one] for one in sorted({*map(cluster, tasks)})]
    others = {method: ratio(areas["search"], areas[method], clusters) for method in METHODS if method != "search"}
    by_task = {task: {method: float(areas[method][i]) for method in METHODS} for i, task in enumerate(tasks)}
    means = {method: float(found.mean()) for method, found in areas.items()}
    most = [max(best_of(play) for play in plays if play["task"] == task) for task in tasks]
    return {"areas": means, "ceiling": float(np.mean(most)), "rows": rows, "search": others, "tasks": by_task}


def best_of(play: Mapping[str, Any]) -> float:
    """Returns the greatest speed-up of all methods of ``play``, or 0 without a correct solution."""
    return max((found[1] for course in play["courses"].values() for found in course["found"]), default=0.0)


def cluster(task: str) -> str:
    """Returns the number that ``numbered`` has put before a task's name, or an empty text."""
    return task.partition("/")[0] if "/" in task else ""


def drawn(clusters: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns resampled tasks [RESAMPLES, tasks]: each row draws as many of ``clusters`` as there are, and then tasks
    (positions) within each."""
    rng, size = np.random.default_rng(0), max(map(len, clusters))
    rows = []
    for _ in clusters:
        row, chosen = np.empty((RESAMPLES, size), int), rng.integers(0, len(clusters), RESAMPLES)
        for number, own in enumerate(clusters):
            at = chosen == number
            row[at] = np.array(own)[rng.integers(0, len(own), (int(at.sum()), size))]
        rows.append(row)
    return np.concatenate(rows, axis=1)


def ratio(areas: np.ndarray, others: np.ndarray, clusters: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compares ``areas`` with ``others``, both [tasks]. ``means`` is the ratio of the means, with its 95 % interval
    over resampled clusters and tasks. ``geometric`` is the geometric mean of the tasks' ratios, of tasks where both
    areas are above 0."""
    draws = drawn(clusters)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where((areas > 0) & (others > 0), np.log(areas / others), np.nan)
        means = areas[draws].mean(1) / others[draws].mean(1)
    result = {
        "means": float(areas.mean() / others.mean()) if others.any() else None,
        "means_interval": np.nanquantile(means, [0.025, 0.975]).tolist() if others.any() else None,
        "better": int((areas > others).sum()), "equal": int((areas == others).sum()), "tasks": len(areas),
    }  # fmt: skip
    known = logs[~np.isnan(logs)]
    if len(known):
        result["geometric"] = float(np.exp(known.mean()))
        with np.errstate(invalid="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a draw without any such task
            result["geometric_interval"] = np.exp(np.nanquantile(np.nanmean(logs[draws], 1), [0.025, 0.975])).tolist()
    return result | {"geometric_tasks": len(known)}


def table(answer: Mapping[str, Any]) -> str:
    head = ["", "area", "verdicts", "sampled tokens", "prompt tokens", "conversations", "verdicts correct", "solved",
            "search: ratio of the means", "geometric mean of the ratios", "better, equal, worse"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for method in METHODS:
        row, other = answer["rows"].get(method), answer["search"].get(method)
        cells = [method, f"{answer['areas'][method]:.3f}", *([
            f"{row['verdicts']:.1f}", f"{row['sampled']:.0f}", f"{row['prompt']:.0f}", f"{row['conversations']:.1f}",
            f"{row['correct']:.0%}", f"{row['solved']:.0%}"] if row else [""] * 6)]  # fmt: skip
        if other:
            worse = other["tasks"] - other["better"] - other["equal"]
            cells += [said(other, "means"), f"{said(other, 'geometric')}, {other['geometric_tasks']} tasks",
                      f"{other['better']}, {other['equal']}, {worse}"]  # fmt: skip
        else:
            cells += [""] * 3
        lines.append(f"| {' | '.join(cells)} |")
    ceiling = [f"{method} {answer['ceiling'] / area:.2f}" for method, area in answer["areas"].items() if area]
    lines += ["", f"ceiling: {answer['ceiling']:.3f}; divided by the area of {', '.join(ceiling)}"]
    lines += ["", f"| task | {' | '.join(METHODS)} |", "|---" * (1 + len(METHODS)) + "|"]
    for task, areas in answer["tasks"].items():
        lines.append(f"| {task} | {' | '.join(f'{areas[method]:.3f}' for method in METHODS)} |")
    return "\n".join(lines)


def said(figures: Mapping[str, Any], name: str) -> str:
    if figures.get(name) is None:
        return "none"
    low, high = figures[f"{name}_interval"]
    return f"{figures[name]:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
