"""Measures whether reinforcement learning improves the demo's policy, over several seeds and against a control.

    python benchmarks/claims/learning.py --seeds 0 1 2 --json learning.json
    python benchmarks/claims/learning.py --combine seed0.json seed1.json seed2.json

For every seed there are two runs of the pipeline. The first is a whole run. The stage ``bootstrap`` trains its base
policy on worked examples for ``--base-seconds``, and the later stages improve this policy. The second is the control:
only a base policy. Its training on worked examples takes as long as the training of the base policy and the stages
``warmup`` to ``agentic`` of the first run together. All policies are evaluated on the same held-out tasks. The held-out
losses of the two base policies are printed; they should be alike.

``seeds.difference`` computes the differences between policies and their intervals. ``--combine`` measures nothing, but
reads results of earlier calls, also of older versions. ``--greedy`` also evaluates every policy at temperature 0 with
one episode per task, as a separate row (``base, greedy``). With ``--set evaluate.mode=strict`` final answers are judged
in strict mode. A seed takes about 25 minutes on 2 cores; keep the machine idle.

    python benchmarks/claims/learning.py --experiment cuda --gpus 0 1 2 --set synthesis.seed=0 --json learning.json

With ``--gpus`` the seeds are measured at the same time, each with one of these GPUs and an equal part of the
processors. Their tasks are synthesized once, so ``--set`` must give them one ``synthesis.seed``. The same command goes
on after an interruption.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from seeds import Values, difference

from cuda_agent.pipeline.manifest import read_manifest
from cuda_agent.rl.scores import METRICS, SPEEDUPS, Scores, per_task, read_scores
from cuda_agent.storage import open_store
from cuda_agent.tracking import read_metrics

LEARNING = ("warmup", "collect", "rft", "critic", "agentic")
POLICIES = ("base", "warmup", "rft", "agentic")
COMPARED = (
    ("base", "agentic"), ("control", "agentic"), ("warmup", "agentic"), ("rft", "agentic"),
    ("base", "warmup"), ("warmup", "rft"), ("base", "rft"),
)  # fmt: skip
OLD_NAMES = {"speedup_eager": "eager", "speedup_compile": "compile"}
GREEDY = ("evaluate.temperature=0", "evaluate.samples=1")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base-seconds", type=float, default=240.0)
    parser.add_argument("--examples", type=int, default=20000, help="of the base's corpus")
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--store", default=".cuda-agent/learning/store")
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--gpus", nargs="+", help="one for each seed, as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run")
    parser.add_argument("--combine", type=Path, nargs="+", help="results of earlier calls, seen as one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.gpus and len(options.gpus) != len(options.seeds):
        parser.error(f"--gpus: expected one for each of {len(options.seeds)} seeds, got {len(options.gpus)}")
    return options


def main() -> None:
    options = parse()
    if options.gpus:
        options.combine = side_by_side(options)
    if options.combine:
        seeds = [seed for file in options.combine for seed in read_seeds(file)]
    else:
        seeds = [measure(seed, options) for seed in options.seeds]
    report(seeds, options.json)


def report(seeds: Sequence[Mapping[str, Any]], file: Path | None) -> None:
    """Prints the means of all policies and the differences between them. Also writes them to ``file``, with
    ``seeds``."""
    policies = [policy for policy in seeds[0]["values"] if all(policy in seed["values"] for seed in seeds)]
    found = {policy: [seed["values"][policy] for seed in seeds] for policy in policies}
    known = {policy for pair in COMPARED for policy in pair}
    pairs = [*COMPARED, *((policy, "agentic") for policy in policies if policy.removesuffix(", greedy") not in known)]
    compared = [(a + how, b + how) for how in ("", ", greedy") for a, b in pairs if {a + how, b + how} <= set(found)]
    answer: dict[str, Any] = {
        "rows": {policy: row(values) for policy, values in found.items()},
        "rows_of_seeds": [{policy: row([of]) for policy, of in seed["values"].items()} for seed in seeds],
        "differences": {f"{a} -> {b}": difference(found[a], found[b]) for a, b in compared},
    }
    print(json.dumps(answer, indent=1))
    if file:
        file.write_text(json.dumps(answer | {"seeds": seeds}, indent=1))


def read_seeds(file: Path) -> list[dict[str, Any]]:
    """Returns the seeds in a result of an earlier call, each as ``measure`` returns it. Files of older versions may
    have other names for speed-ups, NaN instead of None, or no ``gap``; these are converted, and a missing value becomes
    None. Raises SystemExit if the file has no values of seeds."""
    seeds = json.loads(file.read_text(), parse_constant=lambda _: None).get("seeds", ())
    if not all("values" in seed for seed in seeds) or not seeds:
        raise SystemExit(f"{file} has no values of seeds: expected a file that --json wrote")

    def of_today(values: dict[str, float | None]) -> dict[str, float | None]:
        return {metric: values.get(metric, values.get(OLD_NAMES.get(metric, ""))) for metric in METRICS}

    return [
        seed | {"values": {policy: {task: of_today(values) for task, values in tasks.items()}
                           for policy, tasks in seed["values"].items()}}
        for seed in seeds
    ]  # fmt: skip


def side_by_side(options: argparse.Namespace) -> list[Path]:
    """Measures all seeds at the same time, each in a process with one GPU and a store beside those of the others.
    Returns the file with the result of each seed. Each store begins as a copy of one with the synthesized tasks."""
    store = Path(options.store)
    tasks = [f"run.store={store / 'tasks'}", f"seed={options.seeds[0]}", "run.mlflow=off", *options.set]
    start([f"experiment={options.experiment}", *tasks], "--to", "synthesis", gpu=options.gpus[0])
    rest = ["--base-seconds", str(options.base_seconds), "--examples", str(options.examples)]
    rest += ["--experiment", options.experiment, *["--greedy"] * options.greedy, "--set", *options.set]
    started, files = [], []
    for number, seed in enumerate(options.seeds):
        mine = store / f"seed-{seed}"
        if not mine.exists():
            for end in ("", ".local"):  # the latter has the baselines of the tasks
                shutil.copytree(f"{store / 'tasks'}{end}", f"{mine}{end}", dirs_exist_ok=True)
        files.append(mine.with_suffix(".json"))
        command = [sys.executable, __file__, "--seeds", str(seed), f"--store={mine}", f"--json={files[-1]}", *rest]
        started.append(start_on(options.gpus, number, command, subprocess.DEVNULL))
    if failed := [seed for seed, one in zip(options.seeds, started, strict=True) if one.wait()]:
        raise SystemExit(f"seeds {failed} failed; the same command goes on with them")
    return files


def start_on(gpus: Sequence[str], number: int, command: Sequence[str], stdout: Any) -> subprocess.Popen[bytes]:
    """Starts ``command`` with only the GPU ``gpus[number]``, and with this GPU's equal part of the processors."""
    processors = sorted(os.sched_getaffinity(0))
    share = max(1, len(processors) // len(gpus))
    cores = ",".join(map(str, processors[number * share : (number + 1) * share] or processors))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[number]}
    return subprocess.Popen(["taskset", "-c", cores, *command], env=environment, stdout=stdout)


def measure(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Makes the run and the control of one seed. Returns their names, the seconds of the learning stages, the held-out
    losses, and ``values``: policy -> task -> metric -> value."""
    store = options.store
    overrides = [f"experiment={options.experiment}", f"seed={seed}", f"run.store={store}", "run.mlflow=off"]
    overrides += [f"bootstrap.examples={options.examples}", "bootstrap.steps=1000000", *options.set]
    usual = [*overrides, f"bootstrap.max_seconds={options.base_seconds}"]
    run = start(usual)
    opened = open_store(store)  # a graph may leave out stages, such as the critic
    spent = sum(found.seconds for stage in LEARNING if (found := read_manifest(opened, run, stage)))
    longer = [*overrides, f"bootstrap.max_seconds={options.base_seconds + spent:.0f}"]
    control = start(longer, "--to", "evaluate-base")
    values = values_of(store, run, control)
    if options.greedy:  # the cache has all other stages
        greedy = values_of(store, start([*usual, *GREEDY]), start([*longer, *GREEDY], "--to", "evaluate-base"))
        values |= {f"{policy}, greedy": of for policy, of in greedy.items()}
    losses = {"base": heldout_loss(store, run), "control": heldout_loss(store, control)}
    print(f"seed {seed}: {run}, control {control}; held-out loss {losses}; {spent:.0f} s of reinforcement learning",
          file=sys.stderr)  # fmt: skip
    facts = {"seed": seed, "run": run, "control": control, "learning_seconds": spent, "heldout_loss": losses}
    return facts | {"values": values}


def start(overrides: list[str], *options: str, gpu: str | None = None) -> str:
    """Runs the pipeline, with only the GPU ``gpu`` if it is given, and returns the run's name."""
    command = [sys.executable, "-m", "cuda_agent.cli", "run", *overrides, *options, "--json"]
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return str(json.loads(done.stdout)["run"])


def manifest(store: str, run: str, stage: str) -> Any:
    found = read_manifest(open_store(store), run, stage)
    assert found is not None, f"run {run} has no {stage}"
    return found


def scores_of(store: str, run: str, stage: str) -> Scores:
    with tempfile.TemporaryDirectory() as folder:
        open_store(store).get_folder(manifest(store, run, stage).outputs["scores"], Path(folder) / "scores")
        return read_scores(Path(folder) / "scores" / "scores.json")


def heldout_loss(store: str, run: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        open_store(store).get_folder(manifest(store, run, "bootstrap").metrics, Path(folder) / "said")
        steps = read_metrics(Path(folder) / "said" / "metrics.jsonl")
        return next(values["heldout_loss"] for values in reversed(steps.values()) if "heldout_loss" in values)


def values_of(store: str, run: str, control: str) -> dict[str, Values]:
    found = {policy: task_values(scores_of(store, run, f"evaluate-{policy}")) for policy in POLICIES}
    return found | {"control": task_values(scores_of(store, control, "evaluate-base"))}


def task_values(scores: Scores, family: str = "teacher") -> Values:
    """Returns task -> metric -> value for the final answers on the tasks of ``family``. A value is None if it is not
    known."""
    outcomes = [outcome for outcome in scores.outcomes if outcome.family == family]
    names = sorted({outcome.task for outcome in outcomes})
    rows = zip(*(per_task(outcomes, "final", names)[metric].tolist() for metric in METRICS), strict=True)
    known = ([None if math.isnan(value) else value for value in row] for row in rows)
    return {name: dict(zip(METRICS, row, strict=True)) for name, row in zip(names, known, strict=True)}


def row(seeds: Sequence[Values]) -> dict[str, float | None]:
    """Returns the mean of each metric over all tasks of all seeds. For the metrics in ``SPEEDUPS`` it is the geometric
    mean over the tasks that have a value. A metric without any value is None."""
    columns = {metric: [of[metric] for values in seeds for of in values.values()] for metric in METRICS}
    known = {metric: [value for value in column if value is not None] for metric, column in columns.items()}
    means = {metric: float(np.mean(column)) if column else None for metric, column in known.items()}
    said = {metric: math.exp(means[metric]) for metric in SPEEDUPS if means[metric] is not None}
    return {metric: None if mean is None else round(said.get(metric, mean), 4) for metric, mean in means.items()}


if __name__ == "__main__":
    main()
