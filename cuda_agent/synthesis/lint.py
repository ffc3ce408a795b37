"""Lints task sets: finds the wrong answers that each task accepts, and lists them as text, JSON or CSV.

The sandbox makes the wrong answers, which are called mutants (``sandbox.judge.mutants``). A task accepts a mutant if
the mutant agrees with the task's own outputs within the sandbox's tolerance."""

import asyncio
import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.wire import Probe, printable
from cuda_agent.synthesis.filters import Prober
from cuda_agent.tasks.task import Task

_AT_ONCE = 64  # tasks that servers may have in their queues


async def lint(
    tasks: Sequence[Task], sandbox: Prober, say: Callable[[str], None] = lambda line: None
) -> dict[str, Probe]:
    """Runs each task's own model in the sandbox, and tries the mutants (wrong answers made on purpose). Returns the
    results by task name. Calls ``say`` with one line of progress for each task."""
    done, turns = 0, asyncio.Semaphore(_AT_ONCE)

    async def one(task: Task) -> Probe:
        nonlocal done
        async with turns:
            probe = await sandbox.probe(task, compile=False)
        done += 1
        say(f"{done}/{len(tasks)} {task.name}: {_finding(probe) or 'rejects all wrong answers'}")
        return probe

    probes = await asyncio.gather(*map(one, tasks))
    return {task.name: probe for task, probe in zip(tasks, probes, strict=True)}


def names(probe: Probe) -> list[str]:
    """Returns "NAME (TOLERANCE)" for each mutant (wrong answer) that a task accepts. ``probe`` is the result of the
    task's run. TOLERANCE is the least tolerance that accepts the mutant. Leaves out the mutants in ``wire.ROUNDING``,
    whose errors are so small that a task should accept them."""
    return [f"{name} ({least:g})" for name, least in probe.lets_through.items()]


def _finding(probe: Probe) -> str:
    if probe.error:
        return f"does not run: {printable(probe.error)}"[:200]
    found = ", ".join(names(probe))
    return found if probe.deterministic else f"not deterministic{'; ' * bool(found)}{found}"


def lint_lines(probes: Mapping[str, Probe], tolerance: float) -> list[str]:
    """Returns the lines of a text: a table with one row per task, then a summary. The summary shows ``tolerance``, the
    tolerance of the sandbox."""
    width = max((len(name) for name in probes), default=4)
    lines = [f"{'task':{width}}  bf16    lets through (from which tolerance)"]
    for name, probe in probes.items():
        rounded = probe.mutants.get("bf16", 0.0)
        shown = "–" if rounded == 0.0 else "no" if rounded is None else f"{rounded:g}"
        lines.append(f"{name:{width}}  {shown:6}  {_finding(probe) or 'none'}")
    failed = sum(bool(probe.error) for probe in probes.values())
    weak = [probe for probe in probes.values() if not probe.error and probe.lets_through]
    kinds = [dict.fromkeys(name.split(" in output ")[0] for name in probe.lets_through) for probe in weak]
    counts = Counter(kind for row in kinds for kind in row)
    told = f"wrong answers pass in {len(weak)}, {failed} cannot be run"
    return [
        *lines, "",
        "bf16: the least tolerance at which the model's own result in bfloat16 passes; it counts against no task",
        f"{len(probes)} {'task' if len(probes) == 1 else 'tasks'} at tolerance {tolerance:g}: {told}",
        *(f"  {count:4} {name}" for name, count in counts.most_common()),
    ]  # fmt: skip


def to_json(probes: Mapping[str, Probe]) -> list[dict[str, Any]]:
    """Returns one JSON object per task. ``mutants`` maps each mutant to the least tolerance that accepts it, or to None
    if the sandbox's tolerance rejects it."""
    return [
        {"task": name, "error": probe.error, "deterministic": probe.deterministic, "mutants": probe.mutants,
         "lets_through": probe.lets_through}
        for name, probe in probes.items()
    ]  # fmt: skip


def write_csv(path: Path, probes: Mapping[str, Probe]) -> None:
    """Writes the CSV file ``path`` with one row for each mutant of each task. A task that does not run has one row,
    with its error.

    Raises:
        TaskError: The file cannot be written."""
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["task", "mutant", "least_tolerance", "error"])
            for name, probe in probes.items():
                mutants = probe.mutants or {"": None}
                rows.writerows([name, mutant, least, probe.error] for mutant, least in mutants.items())
    except OSError as error:
        raise TaskError(f"{path}: cannot be written: {error.strerror or error}") from None
