"""``report``: all scores and what the stages said of themselves -> ``report`` (``index.html`` and ``report.json``).

Gathers the data here, draws it in ``report_page``.  Both are functions of the inputs: no date, no measurement of its
own, so the same inputs give the same bytes.  With the model clock, what only says how long things took, on what machine
and with which versions is left out: such a report is the same wherever it was made.

Does not: judge whether a result is good enough (stages and their gates do).
"""

import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from cuda_agent.context import StageContext
from cuda_agent.pages.report import render
from cuda_agent.policy.episode import Episode, read_episodes
from cuda_agent.rl.scores import Scores, compare, read_scores
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import read_metrics, read_notes

POLICIES = ("base", "warmup", "rft", "agentic")
PACKAGES = ("cuda-agent", "torch", "transformers", "numpy")
KERNELS = 6  # shown with their source
MESSAGE_CHARACTERS = 4000  # of one message of a shown trajectory


def run(ctx: StageContext) -> None:
    scores = {name: read_scores(ctx.inputs[f"scores-{name}"] / "scores.json") for name in POLICIES}
    tasks = read_tasks(ctx.inputs["tasks"])
    kernels = fastest_kernels(
        (
            (name, episode)
            for name in POLICIES
            for episode in read_episodes(ctx.inputs[f"scores-{name}"] / "episodes.jsonl")
        ),
        tasks,
    )
    data = gather(scores, kernels, ctx.inputs["tasks"] / "card.json", ctx.inputs["stages"])
    folder = ctx.outputs["report"]
    (folder / "report.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    (folder / "index.html").write_text(render(data))


def gather(scores: dict[str, Scores], kernels: list[dict[str, Any]], card: Path, stages: Path) -> dict[str, Any]:
    """Everything that the page shows, as plain JSON.  ``scores``: by policy, in the order of training."""
    clock = next(iter(scores.values())).clock
    families = sorted(
        {row.group for s in scores.values() for row in s.final.families}, key=lambda f: (f != "teacher", f)
    )
    first, *later = scores.values()
    return {
        "clock": clock,
        **({} if clock == "model" else {"versions": _versions()}),
        "config": _read_json(stages / "config.json"),
        "families": families,
        "policies": [s.to_json() for s in scores.values()],
        "changes": [
            {
                "before": first.policy,
                "after": s.policy,
                "differences": [vars(d) for d in compare(first, s, family=family)],
            }
            for family in families
            for s in later
        ],
        "kernels": kernels,
        "card": _read_json(card),
        "stages": [_stage(folder, timeless=clock == "model") for folder in _in_order(stages)],
    }


def fastest_kernels(episodes: Iterable[tuple[str, Episode]], tasks: list[Task]) -> list[dict[str, Any]]:
    """The correct final answers with the largest speed-ups against ``torch.compile`` (then eager), one a task."""
    by_name = {task.name: task for task in tasks}
    best: dict[str, tuple[tuple[float, float], str, Episode, Verdict]] = {}
    for policy, episode in episodes:
        if not episode.verdict or not episode.files or episode.task not in by_name:
            continue
        verdict = Verdict.from_json(episode.verdict)
        if verdict.status != "ok":
            continue
        rank = (verdict.speedup_compile or 0.0, verdict.speedup_eager or 0.0)
        if episode.task not in best or rank > best[episode.task][0]:
            best[episode.task] = (rank, policy, episode, verdict)
    ranked = sorted(best.values(), key=lambda entry: (entry[0], entry[2].task), reverse=True)
    return [
        _kernel(policy, episode, verdict, by_name[episode.task]) for _, policy, episode, verdict in ranked[:KERNELS]
    ]


def _kernel(policy: str, episode: Episode, verdict: Verdict, task: Task) -> dict[str, Any]:
    messages = [
        {
            "role": str(message.get("role", "")),
            "content": str(message.get("content") or "")[:MESSAGE_CHARACTERS],
            "tool_calls": message.get("tool_calls") or [],
        }
        for message in episode.messages
        if message.get("role") != "system"
    ]
    return {
        "task": task.name,
        "family": task.family,
        "ops": list(task.ops),
        "code": task.code,
        "policy": policy,
        "files": episode.files,
        "verdict": {k: v for k, v in verdict.to_json().items() if k not in ("phases", "cached")},
        "messages": messages,
    }


def _stage(folder: Path, timeless: bool) -> dict[str, Any]:
    manifest = _read_json(folder / "manifest.json")
    place = {"seconds": manifest.get("seconds"), "device": manifest.get("device")}
    return {
        "name": folder.name,
        **({} if timeless else place | {"notes": read_notes(folder / "notes.jsonl")}),
        "code": manifest.get("code"),
        "metrics": [
            {"step": step, "values": {k: v for k, v in values.items() if not (timeless and "second" in k)}}
            for step, values in read_metrics(folder / "metrics.jsonl").items()
        ],
    }


def _in_order(stages: Path) -> list[Path]:
    """The stages' folders in the order in which a person reads them: as trained, evaluations last."""
    order = ["synthesis", "bootstrap", "warmup", "collect", "rft", "critic", "agentic"]
    folders = [path for path in stages.iterdir() if path.is_dir()]
    evaluations = [f"evaluate-{name}" for name in POLICIES]
    place = {name: i for i, name in enumerate([*order, *evaluations])}
    return sorted(folders, key=lambda path: (place.get(path.name, len(place)), path.name))


def _versions() -> dict[str, str]:
    return {"python": python_version()} | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read_json(path: Path) -> dict[str, Any]:
    """Empty when the file is missing: the page then says that it has nothing to show there."""
    return json.loads(path.read_text()) if path.exists() else {}
