"""Measures whether a stage learns with Ray and two vLLM servers as well as in one process with the in-process engine.

    python benchmarks/claims/ray_vllm.py --store .cuda-agent/store --seeds 0 1 2 --json ray_vllm.json

The stage is ``warmup`` (or ``--stage agentic``). Its inputs come from the newest run in the store that has them: tasks
and a policy that was trained on worked examples. Verdicts use the simulated clock, so that rewards do not depend on the
machine's load. For one seed, both variants draw the same tasks, but their engines sample with different noise. The two
curves of a seed therefore differ as much as the curves of two seeds. They differ more if an engine serves wrong
weights.

The benchmark compares the rewards in two ways. First, for each step, it prints whether the mean reward with Ray lies
between the least and the greatest reward of the in-process seeds. Chance alone violates this now and then (with 3 seeds
at about every seventh step), so the result does not depend on it. Second, it computes the paired differences of whole
curves, one per seed. A curve counts with the mean reward of all steps but the first, which plays the policy before its
first update.

The result ``holds`` if the 95 % t interval of these differences contains zero, and if ``train_inference_mismatch`` with
Ray stays below 1e-4. This is the mean absolute difference between the log-probabilities of engine and trainer over all
sampled tokens.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from seeds import t_interval

from cuda_agent.compose import compose
from cuda_agent.config import Config
from cuda_agent.context import StageContext
from cuda_agent.pipeline import runs
from cuda_agent.pipeline.checkpoints import StageCheckpoints
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.stages import agentic, warmup
from cuda_agent.storage import Store, open_store
from cuda_agent.tracking import FileTracker, read_metrics

ONE, BOTH = "one process", "Ray, 2 vLLM servers"
KINDS: dict[str, list[str]] = {
    ONE: [],
    BOTH: ["runtime=ray", "ray.workers=2", "ray.max_off_policy_steps=0", "policy.engine=vllm"],
}
Step = dict[str, float]


def inputs_of(store: Store, stage: str, folder: Path) -> dict[str, Path]:
    """Copies the inputs of ``stage`` from the newest run in the store that has all of them. Returns input -> folder.
    Raises SystemExit if no run has them."""
    wanted = {name: source.split(".") for name, source in next(s for s in STAGES if s.name == stage).inputs.items()}
    for run in reversed(runs.list_runs(store)):
        made = runs.run_manifests(store, run, STAGES)
        if all(source in made for source, _ in wanted.values()):
            for name, (source, artifact) in wanted.items():
                store.get_folder(made[source].outputs[artifact], folder / name)
            return {name: folder / name for name in wanted}
    raise SystemExit(f"The store has no run with what {stage} takes: `make demo` makes one.")


def learn(stage: str, config: Config, inputs: dict[str, Path], folder: Path, cache: Path) -> list[Step]:
    """Runs the stage and returns the metrics of every step."""
    for part in ("policy", "critic", "scratch", "work"):
        (folder / part).mkdir(parents=True)
    tracker = FileTracker(folder / "said")
    ctx = StageContext(
        name=stage,
        config=config,
        inputs=inputs,
        outputs={name: folder / name for name in ("policy", "critic")},
        work=folder / "work",
        tracker=tracker,
        checkpoints=StageCheckpoints(open_store(str(folder / "store")), stage, "key", folder / "scratch", tracker),
        should_stop=lambda: False,
        cache=cache,
    )
    (warmup if stage == "warmup" else agentic).run(ctx)
    for note in tracker.notes():
        print(f"  {note}", flush=True)
    return list(read_metrics(folder / "said" / "metrics.jsonl").values())


def table(found: dict[str, list[list[Step]]]) -> dict[str, Any]:
    """Prints the reward curves. Returns the results as a dictionary; ``holds`` in it is the result of the
    comparison."""
    rewards = {kind: [[step["reward"] for step in steps] for steps in seeds] for kind, seeds in found.items()}
    gaps = {
        kind: max(s.get("train_inference_mismatch", 0.0) for steps in seeds for s in steps)
        for kind, seeds in found.items()
    }
    print(f"{'step':>5} {ONE + ', mean (least..greatest)':>40} {BOTH:>22} {'within':>7}")
    inside = []
    for number, (ours, theirs) in enumerate(zip(*(zip(*rewards[kind], strict=True) for kind in KINDS), strict=True)):
        mean = statistics.mean(theirs)
        inside.append(min(ours) <= mean <= max(ours))
        spread = f"{statistics.mean(ours):.3f} ({min(ours):.3f}..{max(ours):.3f})"
        print(f"{number:>5} {spread:>40} {mean:>22.3f} {'yes' if inside[-1] else 'no':>7}")
    curves = {kind: [statistics.mean(curve[1:]) for curve in of] for kind, of in rewards.items()}
    rises = {kind: [statistics.mean(curve[-2:]) - curve[0] for curve in of] for kind, of in rewards.items()}
    differences = np.array(curves[BOTH]) - np.array(curves[ONE])
    low, high = t_interval(differences) or (-math.inf, math.inf)  # one seed says nothing
    holds = low <= 0 <= high and gaps[BOTH] < 1e-4
    print(f"whole curves differ by {differences.mean():+.3f} ({low:+.3f} to {high:+.3f})")
    print(f"rise from the first step to the last two: {rises}")
    print(
        f"train_inference_mismatch at most {gaps}; {sum(inside)} of {len(inside)} steps within; "
        f"{'holds' if holds else 'FAILS'}"
    )
    facts = {
        "within": inside,
        "difference": (float(differences.mean()), low, high),
        "rise": rises,
        "train_inference_mismatch": gaps,
        "holds": holds,
    }
    return facts | {"rewards": rewards}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=".cuda-agent/store", help="with a finished run")
    parser.add_argument("--stage", default="warmup", choices=["warmup", "agentic"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="episodes a step")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of both")
    parser.add_argument("--json", help="write the result here, after every seed")
    args = parser.parse_args()
    sizes = [f"{args.stage}.steps={args.steps}", f"{args.stage}.episodes_per_step={args.batch}", "policy.threads=1"]
    sizes.append(f"{args.stage}.max_seconds=null")  # all seeds make as many steps
    found: dict[str, list[list[Step]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        (home / "cache").mkdir()
        inputs = inputs_of(open_store(args.store), args.stage, home / "inputs")
        for seed in args.seeds:
            for number, (kind, changes) in enumerate(KINDS.items()):
                own = ["experiment=demo", "sandbox.clock=model", f"seed={seed}", *sizes, *changes, *args.set]
                began = time.monotonic()
                found[kind].append(learn(args.stage, compose(own), inputs, home / f"{seed}-{number}", home / "cache"))
                seconds = time.monotonic() - began
                curve = " ".join(f"{step['reward']:.3f}" for step in found[kind][-1])
                print(f"seed {seed}, {kind}: {seconds:.0f} s, rewards {curve}", flush=True)
            result = table(found) | {"seeds": args.seeds[: len(found[ONE])]}
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
