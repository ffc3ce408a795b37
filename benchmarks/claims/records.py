"""Scores the final answers in a record, an archive of ``records/`` with tasks and answers of finished runs.

    tar xf benchmarks/claims/records/cuda-2026-11-27.tar.xz
    python benchmarks/claims/records.py cuda-2026-11-27 --seeds 0 2

This prints the figures from the quick verdicts of the runs. Several records, each with some of the seeds, make one
table: they may have different tasks. To judge the answers again, on a GPU of the same kind:

    cuda-agent evaluate-set cuda-2026-11-27/answers.jsonl --tasks cuda-2026-11-27/set --mode strict --output strict \\
        sandbox.format=plan sandbox.device=cuda
    python benchmarks/claims/records.py cuda-2026-11-27 --seeds 0 2 --judged strict

An archive ``…-strict.tar.xz`` beside a record holds such verdicts: ``--judged`` takes its folders.

``--endings trained`` counts only held-out tasks with the ending of a training task, and ``--endings untrained`` the
others. A new record comes from the stores of finished runs, folders called <kind>-<seed>:

    python benchmarks/claims/records.py new --make runs/seed-0 runs/seed-1 runs/control-0 runs/no_rft-0

The kind ``seed`` gives the policies base, warmup, rft and agentic. The kind ``control`` gives one, a base that was
trained for longer. Any other kind is an ablation and gives its last policy, under the kind's name: ``agentic``, or
``one-shot`` where there is no agent loop.

A record holds ``answers.jsonl`` (a line for each episode), ``set`` (the tasks and their optima), ``tasks`` (a store
with the stage ``synthesis``, from which runs can begin) and ``tasks.local`` (the baselines). ``--make`` writes
the first two.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from learning import POLICIES, report, task_values
from strict_answers import artifact, with_gap

from cuda_agent.policy.episode import EPISODES, read_episodes
from cuda_agent.rl.scores import EpisodeScore, Result, read_scores
from cuda_agent.synthesis.teacher.family import ending
from cuda_agent.synthesis.teacher.optimum import read_optima
from cuda_agent.tasks.io import read_any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="the unpacked folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="policies that not all have are left out")
    parser.add_argument("--endings", choices=("trained", "untrained"), help="of the held-out tasks that count")
    parser.add_argument("--make", type=Path, nargs="+", metavar="STORE", help="make the record from these runs")
    parser.add_argument("--judged", type=Path, nargs="*", default=[], help="folders that evaluate-set has written")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.make:
        (record,) = options.records
        make(record, options.make)
    found = {}
    for record in options.records:
        found |= values(record, options.judged, options.endings)
    report([{"seed": seed, "values": found[seed]} for seed in options.seeds], options.json)


def values(record: Path, judged: Sequence[Path], endings: str | None = None) -> dict[int, dict[str, Any]]:
    """Returns seed -> policy -> task -> metric -> value. Without ``judged``, the values come from the quick verdicts in
    the record. An answer without a verdict, because its sandbox failed, does not count. ``endings`` is the value of the
    option of this name."""
    trained = tasks_with_trained_endings(record)
    optima = read_optima(record / "set")
    outcomes: dict[int, dict[str, list[EpisodeScore]]] = defaultdict(lambda: defaultdict(list))
    for sample, task, result in results(record, judged):
        if endings and (task in trained) != (endings == "trained"):
            continue
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


def tasks_with_trained_endings(record: Path) -> set[str]:
    tasks = read_any(record / "set")
    trained = {ending(task) for task in tasks if task.split == "train"}
    return {task.name for task in tasks if ending(task) in trained}


def make(record: Path, stores: Sequence[Path]) -> None:
    rows: list[dict[str, Any]] = []
    for store in stores:
        kind, _, seed = store.name.rpartition("-")
        evaluated = policies_of(store, kind)
        stages = [stage for _, stage in evaluated]
        for policy, stage in evaluated:
            with tempfile.TemporaryDirectory() as folder:
                scores = artifact(store, newest(store, stages), stage, "scores", Path(folder) / "scores")
                finals = {outcome.episode: outcome.final for outcome in read_scores(scores / "scores.json").outcomes}
                for episode in read_episodes(scores / EPISODES):
                    if episode.id in finals:
                        quick = {name: value for name, value in asdict(finals[episode.id]).items() if name != "gap"}
                        answer = {"sample": f"{seed} {policy} {episode.id}", "files": episode.files, "quick": quick}
                        rows.append({"name": episode.task, **answer})
    artifact(stores[0], newest(stores[0], ["synthesis"]), "synthesis", "tasks", record / "set")
    (record / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def policies_of(store: Path, kind: str) -> list[tuple[str, str]]:
    """Returns (name of a policy in the record, the stage that evaluated it) for each policy of ``store``."""
    if kind == "seed":
        return [(policy, f"evaluate-{policy}") for policy in POLICIES]
    if kind == "control":
        return [(kind, "evaluate-base")]
    last = next(which for which in ("agentic", "one-shot") if [*store.glob(f"runs/*/evaluate-{which}/manifest.json")])
    return [(kind, f"evaluate-{last}")]


def newest(store: Path, stages: Sequence[str]) -> str:
    """Returns the name of the latest run in ``store`` that has finished all of ``stages``. A store of ``learning.py``
    also has the run of its control, which has fewer stages."""

    def is_done(run: Path) -> bool:
        return all((run / stage / "manifest.json").exists() for stage in stages)

    return max(run.name for run in (store / "runs").iterdir() if is_done(run))


if __name__ == "__main__":
    main()
