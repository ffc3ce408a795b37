"""Makes the data card of a synthesis (the generation of a task set).

The data card is a summary of the task set, as JSON. It has counts of the tasks, the time of each task in eager PyTorch
and under torch.compile, and a histogram of the eager times."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda_agent.tasks.task import Task

BINS = 12  # bins of the histogram of times
Times = dict[str, tuple[float, float | None]]  # task -> eager and compiled seconds


def _counts(tasks: Sequence[Task], key: Callable[[Task], str]) -> dict[str, int]:
    return dict(sorted(Counter(map(key, tasks)).items()))


def _log_histogram(values: Sequence[float], low: float, high: float) -> dict[str, list[float]]:
    """Counts ``values`` in ``BINS`` bins between ``low`` and ``high``. The bins have equal widths on a logarithmic
    scale. A value below ``low`` counts in the first bin, and a value above ``high`` in the last bin. Returns the edges
    of the bins and the counts."""
    edges = [low * (high / low) ** (step / BINS) for step in range(BINS + 1)]
    found = [0.0] * BINS
    for value in values:
        place = math.floor(BINS * math.log(max(value, 1e-12) / low) / math.log(high / low))
        found[min(BINS - 1, max(0, place))] += 1
    return {"edges": edges, "counts": found}


def data_card(
    tasks: Sequence[Task], times: Times, window_ms: tuple[float, float], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the data card, a summary of ``tasks`` as JSON.

    Args:
        times: Times of the tasks in seconds.
        window_ms: Least and greatest eager time of a task, in milliseconds; the range of the histogram.
        facts: Further entries of the data card."""
    eager = [times[task.name][0] * 1e3 for task in tasks if task.name in times]
    return dict(facts) | {
        "tasks": len(tasks),
        "window_ms": list(window_ms),
        "by_split": _counts(tasks, lambda task: task.split),
        "by_family": _counts(tasks, lambda task: task.family),
        "by_family_and_split": _counts(tasks, lambda task: f"{task.family}/{task.split}"),
        "by_data_source": _counts(tasks, lambda task: task.data_source),
        "ops": dict(Counter(op for task in tasks for op in task.ops).most_common()),
        "eager_ms": _log_histogram(eager, *window_ms),
        "times": {
            name: {"eager_seconds": eager, "compile_seconds": compiled} for name, (eager, compiled) in times.items()
        },
    }


def refusals(card: Mapping[str, Any]) -> str:
    """Returns the data card's refused candidates as text, such as "runs in eager: 3 of 4 candidates of given", and the
    most frequent reason of each family; "" if none was refused."""
    said = [
        f"{row['filter']}: {row['dropped']} of {row['entered']} candidates of {family}"
        for family, rows in card["yield"].items()
        for row in rows
        if row["dropped"]
    ]
    reasons = [f"most often: {next(iter(found))}" for found in card["reasons"].values() if found]
    return "; ".join([*said, *reasons])
