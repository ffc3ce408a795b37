"""Formats scores as lines for a terminal: the final scores of runs, and the scores of a benchmark or a solution set."""

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = f"{'pass':>7} {'> eager':>8} {'> compile':>10} {'x eager':>8} {'x compile':>10}"
_CELLS = (("passed", 7), ("faster_eager", 8), ("faster_compile", 10), ("speedup_eager", 8), ("speedup_compile", 10))


def cells(scores: Mapping[str, float | None]) -> str:
    """Returns the scores (metric -> value) as text that fits below ``HEAD``: rates in percent, speed-ups as factors."""
    texts = []
    for metric, width in _CELLS:
        value, form = scores.get(metric), ".2f" if metric.startswith("speedup") else ".1%"
        texts.append(f"{'–' if value is None else format(value, form):>{width}}")
    return " ".join(texts)


def sweep_lines(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the table of the sweep ``name``.  ``rows`` come from ``pipeline.compare.sweep_rows``."""
    settings = [" ".join(f"{key}={value}" for key, value in row["settings"].items()) for row in rows]
    first = max(len(name) + 6, *(len(row["run"]) for row in rows))
    second, third = max(map(len, settings)), max(6, *(len(row["policy"]) for row in rows))
    lines = [f"{f'sweep {name}':{first}}  {'':{second}}  {'policy':{third}} {HEAD}"]
    for row, text in zip(rows, settings, strict=True):
        lines.append(f"{row['run']:{first}}  {text:{second}}  {row['policy']:{third}} {cells(row['scores'])}")
    return lines


def diff_lines(runs: Sequence[str], scores: Mapping[str, Sequence[Mapping[str, float] | None]]) -> list[str]:
    """Returns the scores of two ``runs`` (names) as a table.  ``scores`` maps each policy to its scores in both runs,
    or None where it has none.  Shows the last policy, and the others whose scores differ."""
    shown = {policy: both for policy, both in scores.items() if both[0] != both[1] or policy == list(scores)[-1]}
    if not shown:
        return []
    first, second = max(map(len, shown)), max(map(len, runs))
    rows = [(policy, run, values) for policy, both in shown.items() for run, values in zip(runs, both, strict=True)]
    lines = [f"  {policy:{first}}  {run:{second}} {cells(values or {})}" for policy, run, values in rows]
    return [f"  {'':{first}}  {'':{second}} {HEAD}", *lines]


def benchmark_lines(scores: Any, answers: Mapping[str, int], fast: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the result of a benchmark (``BenchmarkResult``): a summary; tables for the final answers, for the best
    solutions and for fast_p; and, if there are any, the tasks whose check accepts deliberately wrong answers."""
    played = f"{scores.episodes} episodes of {scores.tasks} tasks, format {scores.format}"
    lines = [f"{scores.policy}: {played}: " + ", ".join(f"{count} {what}" for what, count in answers.items())]
    if scores.infra:
        lines.append(f"{scores.infra} lost to faults of ours; they are not scored")
    if scores.clock == "model":
        lines.append("sandbox.clock=model: times are a deterministic cost, not measured")
    if scores.mode == "strict":
        lines.append("the final answer was judged in strict mode, the best of the trajectory in quick mode")
    lines += table_lines(f"final answer, format {scores.format}", scores.final)
    lines += table_lines(f"best of trajectory, format {scores.format}", scores.best)
    lines += fast_lines(scores.format, fast)
    if scores.lets_through:
        lines += ["", f"{'tasks with a weak check':28} {'pass':>7}  lets through (from which tolerance)"]
    for task, mutants in scores.lets_through.items():
        passed = [outcome.final.correct for outcome in scores.outcomes if outcome.task == task]
        share = format(sum(passed) / len(passed), ".1%") if passed else "–"
        lines.append(f"{task[:28]:28} {share:>7}  {', '.join(mutants)}")
    return lines


def fast_lines(solution_format: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a table of fast_p.  ``rows`` come from ``benchmark.fast_rows``."""
    columns = " ".join(f"{f'p={p}':>7}" for p in rows[0]["fast_p"])
    lines = ["", f"fast_p, format {solution_format}", f"{'':42} {'tasks':>5} {columns}"]
    for row in rows:
        samples = {"first": "first sample", "all": "all samples"}[row["samples"]]
        label = f"{row['group'][:14]:14} {samples:12} over {row['baseline']}"
        shares = " ".join(f"{'–' if share is None else format(share, '.1%'):>7}" for share in row["fast_p"].values())
        lines.append(f"{label:42} {row['tasks']:5} {shares}")
    lines.append("first sample: as KernelBench counts, where a task without a verdict is failed")
    return [*lines, "all samples: the mean over those of the tasks with a verdict"]


def table_lines(title: str, table: Any) -> list[str]:
    """Returns one table of ``Scores`` as lines: a row for all tasks and, if there are several families of tasks, a row
    for each family."""
    rows = [table.overall, *(table.families if len(table.families) > 1 else [])]
    return ["", title, f"{'':28} {HEAD}", *(f"{row.group[:28]:28} {cells(vars(row))}" for row in rows)]
