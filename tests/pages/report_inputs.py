"""Makes random inputs of the stage ``report``, in the formats of the stages that make the real ones."""

import json
import random
from pathlib import Path
from typing import Literal

from cuda_agent.config import Config
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.policy.episode import Episode, write_episodes
from cuda_agent.rl.scores import score, write_scores
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.synthesis.card import data_card
from cuda_agent.tasks.io import write_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import write_metrics

POLICIES = ("base", "warmup", "rft", "agentic")
SKILL = {"base": 0.5, "warmup": 0.58, "rft": 0.72, "agentic": 0.8}
OPS = ("relu", "tanh", "exp", "sigmoid", "square", "softplus", "sum", "softmax", "amax", "mean")
FILTERS = (
    "form",
    "new bytes",
    "unlike the evaluation set",
    "runs in eager",
    "deterministic",
    "time window",
    "compiles",
)
KERNEL = """// one pass over memory
#include <cmath>

void fused(long block, long grid, const float* x, float* y, long n) {
  long lo = n * block / grid, hi = n * (block + 1) / grid;
  for (long i = lo; i < hi; i++) {
    float v = x[i] > 0.0f ? x[i] : 0.0f;
    y[i] = std::tanh(v) * 0.5f;
  }
}
"""
NODE = {"kernel": "kernels/fused.cpp", "function": "fused", "grid": 8, "args": ["in0", "out0", "in0.numel"]}
PLAN = json.dumps({"nodes": [NODE]})
CODE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(torch.relu(x)) * 0.5


def get_inputs():
    return [torch.randn(64, 4096)]


def get_init_inputs():
    return []
"""


def make_tasks(rng: random.Random) -> list[Task]:
    tasks = []
    for i in range(30):
        family = "teacher" if i < 24 else "catalogue"
        ops = tuple(rng.sample(OPS, rng.randint(1, 3)))
        tasks.append(Task(f"{'_'.join(ops)}-{i:04d}", f"# {i}\n{CODE}", ops, f"torch#{len(ops)}", family, "heldout"))
    return tasks


def make_verdict(rng: random.Random, skill: float, clock: Literal["real", "model"]) -> Verdict:
    if rng.random() > skill:
        status = rng.choice(["wrong", "wrong", "build_error", "crash", "timeout"])
        return Verdict(status, "plan", "quick", "cpu", clock, message="output 0 differs at 17 of 4096 places")
    eager = rng.uniform(2e-4, 3e-3)
    return Verdict(
        "ok",
        "plan",
        "quick",
        "cpu",
        clock,
        seconds=eager / rng.lognormvariate(0.45, 0.5),
        eager_seconds=eager,
        compile_seconds=eager / rng.lognormvariate(0.25, 0.25),
        samples=[eager] * 12,
        checks=5,
        max_error=3.2e-6,
    )


def make_episode(rng: random.Random, task: Task, name: str, skill: float, clock: Literal["real", "model"]) -> Episode:
    lost = rng.random() < 0.02
    verdict = make_verdict(rng, skill if task.family == "teacher" else skill * 0.2, clock)
    better = make_verdict(rng, 0.4, clock)
    length = rng.randint(150, 420)
    write = {"name": "Write", "arguments": {"path": "kernels/fused.cpp", "content": KERNEL}}
    return Episode(
        id=name,
        task=task.name,
        kind="agent",
        ids=[0] * length,
        mask=[0] * 60 + [1] * (length - 60),
        logprobs=[0.0] * length,
        versions=[0] * length,
        turns=[0] * (length // 2) + [1] * (length - length // 2),
        reward=None if lost else float(verdict.reward or 0),
        ended="infra" if lost else "answer",
        verdict=None if lost else verdict.to_json(),
        best=None if lost else better.to_json(),
        files={"plan.json": PLAN, "kernels/fused.cpp": KERNEL},
        messages=[
            {"role": "user", "content": task.code},
            {"role": "assistant", "content": "One pass is enough.", "tool_calls": [write]},
            {"role": "tool", "content": "wrote kernels/fused.cpp"},
        ],
    )


def curve(rng: random.Random, first: float, last: float, steps: int, noise: float) -> list[float]:
    return [first + (last - first) * (1 - 0.75**i) + rng.gauss(0, noise) for i in range(steps)]


def make_metrics(rng: random.Random, stage: str) -> dict[int, dict[str, float]]:
    def table(**curves: list[float]) -> dict[int, dict[str, float]]:
        return {i + 1: {k: v[i] for k, v in curves.items()} for i in range(len(next(iter(curves.values()))))}

    if stage in ("warmup", "agentic"):
        return table(
            reward=curve(rng, 0.1, 1.2, 8, 0.08),
            pass_rate=[min(1.0, max(0.0, v)) for v in curve(rng, 0.4, 0.75, 8, 0.03)],
            faster_than_eager=[min(1.0, max(0.0, v)) for v in curve(rng, 0.2, 0.55, 8, 0.03)],
            faster_than_compile=[min(1.0, max(0.0, v)) for v in curve(rng, 0.1, 0.35, 8, 0.03)],
            entropy=curve(rng, 0.31, 0.2, 8, 0.01),
            kl=[abs(v) for v in curve(rng, 0.001, 0.004, 8, 0.0006)],
            explained_variance=curve(rng, 0.05, 0.34 if stage == "agentic" else 0.12, 8, 0.03),
            response_length=curve(rng, 230, 190, 8, 6),
            clip_high=[abs(v) for v in curve(rng, 0.01, 0.03, 8, 0.004)],
            episodes=[64.0] * 8,
            tokens_per_second=curve(rng, 2800, 2900, 8, 90),
        )
    if stage in ("bootstrap", "rft"):
        steps = 60 if stage == "bootstrap" else 14
        return table(loss=curve(rng, 3.1, 0.2, steps, 0.03), tokens=[8192.0] * steps)
    if stage == "critic":
        return table(
            value_loss=curve(rng, 0.9, 0.5, 4, 0.02),
            heldout_explained_variance=curve(rng, 0.0, 0.4, 4, 0.02),
            tokens=[9000.0] * 4,
        )
    return {0: {"episodes": 30.0, "response_length": 210.0, "reward": 0.4}}


def make_inputs(
    folder: Path, seed: int = 0, clock: Literal["real", "model"] = "real", solve: bool = True
) -> dict[str, Path]:
    """Writes all input folders of ``report`` and returns name -> folder.  Without ``solve`` no answer is correct."""
    rng = random.Random(seed)
    tasks = make_tasks(rng)
    inputs = {"tasks": folder / "tasks", "stages": folder / "stages"}
    write_tasks(inputs["tasks"], tasks)
    entered, rows = 61, []
    for name, dropped in zip(FILTERS, (0, 2, 1, 3, 2, 14, 1), strict=True):
        rows.append({"filter": name, "entered": entered, "passed": entered - dropped, "dropped": dropped})
        entered -= dropped
    times = {task.name: (rng.lognormvariate(-7.2, 0.8), 1e-3) for task in tasks}
    facts = {"yield": {"teacher": rows, "catalogue": rows}, "operators": 118, "short": {"catalogue/heldout": 1}}
    (inputs["tasks"] / "card.json").write_text(json.dumps(data_card(tasks, times, (0.1, 5.0), facts)))
    for policy in POLICIES:
        inputs[f"scores-{policy}"] = target = folder / f"scores-{policy}"
        target.mkdir()
        chance = SKILL[policy] if solve else 0.0
        episodes = [make_episode(rng, task, f"evaluate/0/{task.name}/0", chance, clock) for task in tasks]
        if not solve:
            for episode in episodes:
                episode.best = None
        write_episodes(target / "episodes.jsonl", episodes)
        write_scores(target / "scores.json", score(policy, episodes, tasks, clock, seed))
    seconds = {"synthesis": 71, "bootstrap": 260, "warmup": 84, "collect": 40, "rft": 12, "critic": 15, "agentic": 130}
    for name in (*seconds, *(f"evaluate-{policy}" for policy in POLICIES)):
        target = inputs["stages"] / name
        target.mkdir(parents=True)
        facts = {
            "stage": name,
            "seconds": seconds.get(name, 22.0),
            "device": "Example CPU, 2 cores, g++ 12",
            "code": "0",
        }
        (target / "manifest.json").write_text(json.dumps(facts))
        write_metrics(target / "metrics.jsonl", make_metrics(rng, name))
        notes = [{"text": "explained variance 0.12 is below 0.2"}] if name == "warmup" else []
        (target / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    rows = [
        {k: getattr(row, k) for k in ("name", "chart", "curves", "about")} for row in STAGES if row.name != "report"
    ]
    (inputs["stages"] / "graph.json").write_text(json.dumps(rows))
    (inputs["stages"] / "config.json").write_text(json.dumps(Config().model_dump(mode="json")))
    return inputs
