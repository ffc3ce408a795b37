"""Whether reinforcement learning taught the demo's policy something: seeds, paired intervals, and a control row.

    python benchmarks/claims/learning.py --seeds 0 1 2 --json learning.json
    python benchmarks/claims/learning.py --combine seed0.json seed1.json seed2.json

For every seed: a whole run whose base is trained for ``--base-seconds`` (its held-out loss is printed beside the
control's: they should be alike), and a control, a base trained for as long as base and reinforcement-learning stages
together, evaluated on the same held-out tasks.  Intervals resample (seed, task) pairs, 95 %; speed-ups are geometric
means over the pairs that both policies solved.  Takes about 25 minutes a seed on 2 cores; keep the machine idle.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cuda_agent.pipeline.manifest import read_manifest
from cuda_agent.rl.scores import Scores, read_scores
from cuda_agent.storage import open_store
from cuda_agent.tracking import read_metrics

LEARNING = ("warmup", "collect", "rft", "critic", "agentic")
POLICIES = ("base", "warmup", "rft", "agentic")
RATES = ("passed", "faster_eager", "faster_compile")
RESAMPLES = 5000
COMPARED = (("base", "agentic"), ("control", "agentic"), ("rft", "agentic"), ("base", "rft"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base-seconds", type=float, default=240.0)
    parser.add_argument("--examples", type=int, default=20000, help="of the base's corpus")
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--store", default=".cuda-agent/learning/store")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run")
    parser.add_argument("--combine", type=Path, nargs="+", help="results of earlier calls, seen as one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.combine:
        seeds = [seed for file in options.combine for seed in json.loads(file.read_text())["seeds"]]
    else:
        seeds = [measure(seed, options) for seed in options.seeds]
    found = {policy: {(n, task): v for n, seed in enumerate(seeds) for task, v in seed["values"][policy].items()}
             for policy in (*POLICIES, "control")}  # fmt: skip
    answer: dict[str, Any] = {
        "rows": {policy: row(values) for policy, values in found.items()},
        "rows_of_seeds": [{policy: row(seed["values"][policy]) for policy in found} for seed in seeds],
        "differences": {f"{a} -> {b}": difference(found[a], found[b]) for a, b in COMPARED},
    }
    print(json.dumps(answer, indent=1))
    if options.json:
        options.json.write_text(json.dumps(answer | {"seeds": seeds}, indent=1))


def measure(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """A run and its control: where they are, what they took, and task -> what ``per_task`` says, for every policy."""
    store = options.store
    overrides = [f"experiment={options.experiment}", f"seed={seed}", f"run.store={store}", "run.mlflow=off"]
    overrides += [f"bootstrap.examples={options.examples}", "bootstrap.steps=1000000", *options.set]
    run = start([*overrides, f"bootstrap.max_seconds={options.base_seconds}"])
    spent = sum(manifest(store, run, stage).seconds for stage in LEARNING)
    control = start([*overrides, f"bootstrap.max_seconds={options.base_seconds + spent:.0f}"], "--to", "evaluate-base")
    values = {policy: per_task(scores_of(store, run, f"evaluate-{policy}")) for policy in POLICIES}
    values["control"] = per_task(scores_of(store, control, "evaluate-base"))
    losses = {"base": heldout_loss(store, run), "control": heldout_loss(store, control)}
    print(f"seed {seed}: {run}, control {control}; held-out loss {losses}; {spent:.0f} s of reinforcement learning",
          file=sys.stderr)  # fmt: skip
    facts = {"seed": seed, "run": run, "control": control, "learning_seconds": spent, "heldout_loss": losses}
    return facts | {"values": values}


def start(overrides: list[str], *options: str) -> str:
    """Runs the pipeline; returns the run's name."""
    command = [sys.executable, "-m", "cuda_agent.cli", "run", *overrides, *options, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["run"]


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


def per_task(scores: Scores, family: str = "teacher") -> dict[str, dict[str, float]]:
    """task -> rates, and mean log speed-ups over the correct final answers (NaN without one)."""
    values: dict[str, dict[str, list[float]]] = {}
    for outcome in (o for o in scores.outcomes if o.family == family):
        found = values.setdefault(outcome.task, {name: [] for name in (*RATES, "eager", "compile")})
        eager, compiled = outcome.final.speedup_eager, outcome.final.speedup_compile
        found["passed"].append(float(outcome.final.correct))
        found["faster_eager"].append(float(outcome.final.correct and (eager or 0) > 1))
        found["faster_compile"].append(float(outcome.final.correct and (compiled or 0) > 1))
        for name, speedup in (("eager", eager), ("compile", compiled)):
            if outcome.final.correct and speedup:
                found[name].append(float(np.log(speedup)))
    return {
        task: {name: float(np.mean(of)) if of else float("nan") for name, of in found.items()}
        for task, found in values.items()
    }


def row(values: dict[Any, dict[str, float]]) -> dict[str, float]:
    columns = {name: np.array([found[name] for found in values.values()]) for name in (*RATES, "eager", "compile")}
    rates = {name: round(float(columns[name].mean()), 4) for name in RATES}
    return rates | {f"x_{name}": round(float(np.exp(np.nanmean(columns[name]))), 3) for name in ("eager", "compile")}


def difference(before: dict[Any, dict[str, float]], after: dict[Any, dict[str, float]]) -> dict[str, Any]:
    """Change with its paired interval: of rates in shares, of speed-ups as a ratio over pairs that both solved."""
    pairs = sorted(set(before) & set(after))
    draws = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    found: dict[str, Any] = {"pairs": len(pairs)}
    for name in (*RATES, "eager", "compile"):
        change = np.array([after[pair][name] - before[pair][name] for pair in pairs])
        means = np.nanmean(change[draws], axis=1)
        numbers = np.array([np.nanmean(change), *np.percentile(means, (2.5, 97.5))])
        numbers = numbers if name in RATES else np.exp(numbers)
        label = name if name in RATES else f"x_{name}"
        found[label] = {"change": round(float(numbers[0]), 4), "interval": [round(float(n), 4) for n in numbers[1:]]}
    return found


if __name__ == "__main__":
    main()
