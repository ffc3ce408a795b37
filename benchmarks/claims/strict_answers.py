"""Judges the final answers of ``learning.py``'s policies again, in strict mode.

    python benchmarks/claims/strict_answers.py .cuda-agent/learning/store/seed-*.json --gpus 0 1 2 --json strict.json

Each input is a file that ``learning.py --gpus`` has written for one seed; the seed's store lies beside it. All policies
keep the episodes that they have played; only the verdicts on the final solutions are new. The result has the form of
``learning.py``'s, so ``learning.py --combine`` reads it. ``cuda-agent evaluate-set`` judges equal answers once, and the
same command goes on after an interruption. Every process of a GPU gets whole tasks and shares the GPU's lease.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from learning import POLICIES, manifest, read_seeds, report, scores_of, start_on, task_values

from cuda_agent.policy.episode import EPISODES, Episode, read_episodes
from cuda_agent.rl.scores import Result, read_scores
from cuda_agent.storage import open_store
from cuda_agent.synthesis.teacher.optimum import Optimum, read_optima

Answers = dict[str, tuple[str, dict[str, str]]]  # "<seed> <policy> <episode's id>" -> (task, files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=Path, nargs="+", help="files that learning.py --gpus has written")
    parser.add_argument("--gpus", nargs="+", required=True, help="as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--processes", type=int, default=2, help="of each GPU")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the sandbox, as experiment=cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.seeds[0].parent / "strict"
    answers: Answers = {}
    every = [(file, seed) for file in options.seeds for seed in read_seeds(file)]
    for file, seed in every:
        for policy in (*POLICIES, "control"):
            for episode in episodes_of(file, seed, policy):
                if episode.files:
                    answers[f"{seed['seed']} {policy} {episode.id}"] = (episode.task, episode.files)
    first, seed = every[0]
    tasks = artifact(first, seed["run"], "synthesis", "tasks", folder / "tasks")
    found = judge(answers, tasks, folder, options)
    optima = read_optima(tasks)
    report([strict(file, seed, found, optima) for file, seed in every], options.json)


def episodes_of(file: Path, seed: dict[str, Any], policy: str) -> list[Episode]:
    run, stage = of_policy(seed, policy)
    with tempfile.TemporaryDirectory() as folder:
        scores = artifact(file, run, stage, "scores", Path(folder) / "scores")
        return list(read_episodes(scores / EPISODES))


def of_policy(seed: dict[str, Any], policy: str) -> tuple[str, str]:
    """Returns the run and the stage that evaluated ``policy``."""
    return (seed["control"], "evaluate-base") if policy == "control" else (seed["run"], f"evaluate-{policy}")


def artifact(file: Path, run: str, stage: str, name: str, folder: Path) -> Path:
    """Writes an output of a stage to ``folder``, from the store beside ``file``, and returns the folder."""
    store = str(file.with_suffix(""))
    shutil.rmtree(folder, ignore_errors=True)
    open_store(store).get_folder(manifest(store, run, stage).outputs[name], folder)
    return folder


def judge(answers: Answers, tasks: Path, folder: Path, options: argparse.Namespace) -> dict[str, Result]:
    """Judges all answers. Returns the result of each one."""
    parts = [(gpu, number) for gpu in range(len(options.gpus)) for number in range(options.processes)]
    names = sorted({task for task, _ in answers.values()})
    known = options.seeds[0].parent / "tasks.local" / "cache" / "sandbox" / "baselines"
    started, outputs = [], []
    for index, (gpu, number) in enumerate(parts):
        mine = set(names[index :: len(parts)])
        rows = [
            {"name": task, "sample": answer, "files": files}
            for answer, (task, files) in answers.items()
            if task in mine
        ]
        if not rows:
            continue
        home = folder / f"gpu-{options.gpus[gpu]}"
        home.mkdir(parents=True, exist_ok=True)
        if number == 0 and known.exists():
            shutil.copytree(known, home / "cache" / "sandbox" / "baselines", dirs_exist_ok=True)
        records = home / f"answers-{number}.jsonl"
        records.write_text("".join(json.dumps(row) + "\n" for row in rows))
        outputs.append(home / f"judged-{number}")
        command = [sys.executable, "-m", "cuda_agent.cli", "evaluate-set", str(records), "--tasks", str(tasks)]
        command += ["--mode", "strict", "--output", str(outputs[-1]), f"run.store={home}/store", "sandbox.format=plan"]
        command += options.set
        started.append(start_on(options.gpus, gpu, command, sys.stderr))
    if failed := [str(output) for output, one in zip(outputs, started, strict=True) if one.wait()]:
        raise SystemExit(f"{', '.join(failed)}: not all answers are judged; the same command goes on")
    found = {}
    for output in outputs:
        for outcome in read_scores(output / "scores.json").outcomes:
            found[outcome.episode.partition(", sample ")[2]] = outcome.final
    return found


def strict(file: Path, seed: dict[str, Any], found: dict[str, Result], optima: dict[str, Optimum]) -> dict[str, Any]:
    """Returns ``seed`` with the values that follow from the results in ``found``. An answer without files has not
    passed. An answer without a result, because its sandbox failed, does not count."""
    values = {}
    for policy in (*POLICIES, "control"):
        scores = scores_of(str(file.with_suffix("")), *of_policy(seed, policy))
        without = {episode.id for episode in episodes_of(file, seed, policy) if not episode.files}
        outcomes = []
        for outcome in scores.outcomes:
            result = found.get(f"{seed['seed']} {policy} {outcome.episode}")
            if result is None and outcome.episode in without:
                result = Result("no_answer")
            if result is not None:
                outcomes.append(replace(outcome, final=with_gap(result, optima.get(outcome.task))))
        values[policy] = task_values(replace(scores, outcomes=outcomes))
    return seed | {"values": values}


def with_gap(result: Result, optimum: Optimum | None) -> Result:
    """Returns ``result`` with its gap to the best known design, if there is one and ``result`` has a time."""
    if optimum is None or not optimum.speedup or not result.speedup_eager:
        return result
    return replace(result, gap=optimum.speedup / result.speedup_eager)


if __name__ == "__main__":
    main()
