"""Evaluations per minute on the CPU, and where their time goes.

    python benchmarks/sandbox.py --tasks 4 --solutions 10 --json sandbox.json

Solutions of the teacher with random designs, every one built, checked and timed anew (fresh caches); tasks are prepared
first, as synthesis prepares them, and that is timed beside it.  Once one after the other, and once all at once.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cuda_agent.config import Sandbox
from cuda_agent.sandbox.client import LocalSandbox
from cuda_agent.sandbox.wire import Solution, Verdict
from cuda_agent.synthesis.family import sample_task
from cuda_agent.synthesis.filters import Refused, check_eager
from cuda_agent.synthesis.teacher import solve
from cuda_agent.tasks.task import Task

WINDOW = (1e-4, 5e-3)  # seconds: the demo's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--solutions", type=int, default=10, help="a task, and again as many for the second round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        answer = asyncio.run(measure(options.tasks, options.solutions, Path(cache)))
    print(f"{platform.machine()}, {answer['evaluations']} evaluations a round")
    for name in ("prepare", "one_after_the_other", "all_at_once"):
        facts = answer[name]
        print(f"  {name:20} p50 {facts['p50']:.3f} s  p95 {facts['p95']:.3f} s  {facts['per_minute']:.0f} a minute")
    print("  phases p50:", "  ".join(f"{name} {seconds:.3f} s" for name, seconds in answer["phases"].items()))
    print("  statuses:", answer["statuses"])
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))


async def measure(tasks: int, solutions: int, cache: Path) -> dict[str, Any]:
    rng = random.Random(0)
    async with LocalSandbox(Sandbox(), cache) as sandbox:
        prepared, preparing = await prepare(sandbox, tasks, rng)
        drawn = distinct(prepared, 2 * solutions, rng)
        half = len(drawn) // 2
        verdicts: list[Verdict] = []

        async def evaluate(task: Task, solution: Solution) -> float:
            begin = time.perf_counter()
            verdicts.append(await sandbox.evaluate(task, solution))
            return time.perf_counter() - begin

        begin = time.perf_counter()
        alone = [await evaluate(*one) for one in drawn[:half]]
        alone_seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        crowd = list(await asyncio.gather(*(evaluate(*one) for one in drawn[half:])))
        crowd_seconds = time.perf_counter() - begin
    names = sorted({name for verdict in verdicts for name in verdict.phases})
    return {
        "evaluations": half,
        "prepare": figures(preparing, sum(preparing)),
        "one_after_the_other": figures(alone, alone_seconds),
        "all_at_once": figures(crowd, crowd_seconds),
        "phases": {name: statistics.median(v.phases[name] for v in verdicts if name in v.phases) for name in names},
        "statuses": {status: sum(v.status == status for v in verdicts) for status in {v.status for v in verdicts}},
    }


async def prepare(sandbox: LocalSandbox, count: int, rng: random.Random) -> tuple[list[Task], list[float]]:
    """Tasks inside the window with their baselines measured, and the seconds that each took (the first one pays for
    what is made once a machine)."""
    tasks: list[Task] = []
    seconds: list[float] = []
    while len(tasks) < count:
        task = sample_task(rng)
        begin = time.perf_counter()
        try:
            check_eager(await sandbox.probe(task, compile=False), WINDOW)
        except Refused:
            continue
        if not (await sandbox.probe(task)).error:
            tasks.append(task)
            seconds.append(time.perf_counter() - begin)
    return tasks, seconds


def distinct(tasks: list[Task], count: int, rng: random.Random) -> list[tuple[Task, Solution]]:
    """``count`` different solutions a task, or as many as the teacher has, in random order."""
    found: dict[str, tuple[Task, Solution]] = {}
    for task in tasks:
        mine: dict[str, Solution] = {}
        for _ in range(50 * count):
            solution = Solution("plan", solve(task, rng).files)
            mine.setdefault(solution.digest, solution)
            if len(mine) == count:
                break
        found |= {task.name + digest: (task, solution) for digest, solution in mine.items()}
    drawn = list(found.values())
    rng.shuffle(drawn)
    return drawn


def figures(seconds: list[float], total: float) -> dict[str, float]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": statistics.median(ordered), "p95": p95, "per_minute": 60 * len(seconds) / total}


if __name__ == "__main__":
    main()
