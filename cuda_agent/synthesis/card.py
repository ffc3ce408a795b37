"""The data card: content and origin of a task set, as plain JSON for the report.

It holds counts, the yield of every filter, times, operators.  What it does not cover: how policies fare on the tasks.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda_agent.tasks.task import Task


def counts(tasks: Sequence[Task], key: Callable[[Task], str]) -> dict[str, int]:
    return dict(sorted(Counter(map(key, tasks)).items()))


def log_histogram(values: Sequence[float], low: float, high: float, bins: int = 12) -> dict[str, list[float]]:
    """Counts in ``bins`` intervals of equal ratio from ``low`` to ``high`` (both > 0); outliers fall into the ends."""
    edges = [low * (high / low) ** (step / bins) for step in range(bins + 1)]
    found = [0.0] * bins
    for value in values:
        place = math.floor(bins * math.log(max(value, 1e-12) / low) / math.log(high / low))
        found[min(bins - 1, max(0, place))] += 1
    return {"edges": edges, "counts": found}


def data_card(
    tasks: Sequence[Task],
    times: Mapping[str, tuple[float, float | None]],
    window_ms: tuple[float, float],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The card.  ``times``: task name -> (eager seconds, compiled seconds).  ``facts`` are copied unchanged."""
    eager = [times[task.name][0] * 1e3 for task in tasks if task.name in times]
    return dict(facts) | {
        "tasks": len(tasks),
        "window_ms": list(window_ms),
        "by_split": counts(tasks, lambda task: task.split),
        "by_family": counts(tasks, lambda task: task.family),
        "by_family_and_split": counts(tasks, lambda task: f"{task.family}/{task.split}"),
        "by_data_source": counts(tasks, lambda task: task.data_source),
        "ops": dict(Counter(op for task in tasks for op in task.ops).most_common()),
        "eager_ms": log_histogram(eager, *window_ms),
        "times": {
            name: {"eager_seconds": eager, "compile_seconds": compiled} for name, (eager, compiled) in times.items()
        },
    }
