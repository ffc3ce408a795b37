"""Whether reinforcement learning taught the demo's policy something: seeds, paired intervals, and a control row.

    python benchmarks/claims/learning.py --seeds 0 1 2 --base-seconds 400 --json learning.json

For every seed: a whole run whose base is trained for ``--base-seconds`` (its held-out loss is printed: it should be
flat by then), and a control, the same base trained on for as long as the reinforcement-learning stages took, evaluated
on the same held-out tasks.  Intervals resample (seed, task) pairs, 95 %; speed-ups are geometric means over the pairs
that both policies solved.  Takes about half an hour a seed on 2 cores; keep the machine idle.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cuda_agent.pipeline.manifest import manifest_entry, read_manifest
from cuda_agent.stages.scores import Scores, read_scores
from cuda_agent.storage import open_store
from cuda_agent.tracking import read_metrics

LEARNING = ("warmup", "collect", "rft", "critic", "agentic")
POLICIES = ("base", "warmup", "rft", "agentic")
RATES = ("passed", "faster_eager", "faster_compile")
RESAMPLES = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base-seconds", type=float, default=400.0)
    parser.add_argument("--experiment", default="demo")
    parser.add_argument("--store", default=".cuda-agent/learning/store")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scores: dict[str, list[Scores]] = {policy: [] for policy in (*POLICIES, "control")}
    facts = []
    for seed in options.seeds:
        overrides = [f"experiment={options.experiment}", f"seed={seed}", f"run.store={options.store}", "run.mlflow=off"]
        run = start([*overrides, f"bootstrap.max_seconds={options.base_seconds}"])
        spent = sum(stage_seconds(options.store, run, stage) for stage in LEARNING)
        control = start(
            [*overrides, f"bootstrap.max_seconds={options.base_seconds + spent:.0f}"], "--to", "evaluate-base"
        )
        for policy in POLICIES:
            scores[policy].append(scores_of(options.store, run, f"evaluate-{policy}"))
        scores["control"].append(scores_of(options.store, control, "evaluate-base"))
        losses = [heldout_loss(options.store, name) for name in (run, control)]
        facts.append({"seed": seed, "run": run, "control": control, "learning_seconds": spent, "heldout_loss": losses})
        print(f"seed {seed}: {run}, control {control}; held-out loss of the base {losses[0]:.4f}, of the control "
              f"{losses[1]:.4f}; {spent:.0f} s of reinforcement learning", file=sys.stderr)  # fmt: skip
    answer: dict[str, Any] = {"runs": facts, "rows": {}, "differences": {}}
    values = {policy: per_task(rows) for policy, rows in scores.items()}
    for policy, found in values.items():
        answer["rows"][policy] = row(found)
    for before, after in (("base", "agentic"), ("control", "agentic"), ("rft", "agentic"), ("base", "rft")):
        answer["differences"][f"{before} -> {after}"] = difference(values[before], values[after])
    print(json.dumps(answer["rows"], indent=1), json.dumps(answer["differences"], indent=1), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))


def start(overrides: list[str], *options: str) -> str:
    """Runs the pipeline; returns the run's name."""
    command = [sys.executable, "-m", "cuda_agent.cli", "run", *overrides, *options, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["run"]


def manifest(store: str, run: str, stage: str) -> Any:
    found = read_manifest(open_store(store), manifest_entry(run, stage))
    assert found is not None, f"run {run} has no {stage}"
    return found


def stage_seconds(store: str, run: str, stage: str) -> float:
    return manifest(store, run, stage).seconds


def scores_of(store: str, run: str, stage: str) -> Scores:
    with tempfile.TemporaryDirectory() as folder:
        open_store(store).get_folder(manifest(store, run, stage).outputs["scores"], Path(folder) / "scores")
        return read_scores(Path(folder) / "scores" / "scores.json")


def heldout_loss(store: str, run: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        open_store(store).get_folder(manifest(store, run, "bootstrap").metrics, Path(folder) / "said")
        steps = read_metrics(Path(folder) / "said" / "metrics.jsonl")
        return next(values["heldout_loss"] for values in reversed(steps.values()) if "heldout_loss" in values)


def per_task(rows: list[Scores], family: str = "teacher") -> dict[tuple[int, str], dict[str, float]]:
    """(seed index, task) -> rates, and mean log speed-ups over the correct final answers (NaN without one)."""
    values: dict[tuple[int, str], dict[str, list[float]]] = {}
    for number, scores in enumerate(rows):
        for outcome in (o for o in scores.outcomes if o.family == family):
            found = values.setdefault((number, outcome.task), {name: [] for name in (*RATES, "eager", "compile")})
            eager, compiled = outcome.final.speedup_eager, outcome.final.speedup_compile
            found["passed"].append(float(outcome.final.correct))
            found["faster_eager"].append(float(outcome.final.correct and (eager or 0) > 1))
            found["faster_compile"].append(float(outcome.final.correct and (compiled or 0) > 1))
            for name, speedup in (("eager", eager), ("compile", compiled)):
                if outcome.final.correct and speedup:
                    found[name].append(float(np.log(speedup)))
    return {
        pair: {name: float(np.mean(of)) if of else float("nan") for name, of in found.items()}
        for pair, found in values.items()
    }


def row(values: dict[tuple[int, str], dict[str, float]]) -> dict[str, float]:
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
