"""Scores the final answers in a record, an archive of ``records/`` with tasks and answers of finished runs.

    tar xf benchmarks/claims/records/cuda-2026-11-27.tar.xz
    python benchmarks/claims/records.py cuda-2026-11-27 --seeds 0 2

This prints the figures from the quick verdicts of the runs. To judge the answers again, on a GPU of the same kind:

    cuda-agent evaluate-set cuda-2026-11-27/answers.jsonl --tasks cuda-2026-11-27/set --mode strict --output strict \\
        sandbox.format=plan sandbox.device=cuda
    python benchmarks/claims/records.py cuda-2026-11-27 --seeds 0 2 --judged strict

A record holds ``answers.jsonl`` (a line for each episode), ``set`` (the tasks and their optima), ``tasks`` (a store
with the stage ``synthesis``, from which runs can begin) and ``tasks.local`` (the baselines).
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from learning import report, task_values
from strict_answers import with_gap

from cuda_agent.rl.scores import EpisodeScore, Result, read_scores
from cuda_agent.synthesis.teacher.optimum import read_optima


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="the unpacked folder")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="policies that not all have are left out")
    parser.add_argument("--judged", type=Path, nargs="*", default=[], help="folders that evaluate-set has written")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = values(options.record, options.judged)
    report([{"seed": seed, "values": found[seed]} for seed in options.seeds], options.json)


def values(record: Path, judged: Sequence[Path]) -> dict[int, dict[str, Any]]:
    """Returns seed -> policy -> task -> metric -> value. Without ``judged``, the values come from the quick verdicts in
    the record. An answer without a verdict, because its sandbox failed, does not count."""
    optima = read_optima(record / "set")
    outcomes: dict[int, dict[str, list[EpisodeScore]]] = defaultdict(lambda: defaultdict(list))
    for sample, task, result in results(record, judged):
        seed, policy, episode = sample.split(" ", 2)
        final = with_gap(result, optima.get(task))
        outcomes[int(seed)][policy].append(EpisodeScore(episode, task, "teacher", [], final, final, 0, 0))
    return {
        seed: {policy: task_values(SimpleNamespace(outcomes=of)) for policy, of in policies.items()}  # type: ignore[arg-type]
        for seed, policies in outcomes.items()
    }


def results(record: Path, judged: Sequence[Path]) -> Iterator[tuple[str, str, Result]]:
    """Yields (sample, task, result) of each answer with a verdict. An answer without a plan is not correct."""
    again = {
        outcome.episode.partition(", sample ")[2]: outcome.final
        for folder in judged
        for outcome in read_scores(folder / "scores.json").outcomes
    }
    for line in (record / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        result = again.get(row["sample"]) if judged else Result(**row["quick"])
        if result is None and "plan.json" not in row["files"]:
            result = Result("no_answer")
        if result is not None:
            yield row["sample"], row["name"], result


if __name__ == "__main__":
    main()
