"""Stage ``report``: writes the report of a run, as a page (``index.html``) and as data (``report.json``). Inputs:
tasks, the scores of every policy, and the metrics, notes and manifests of all stages; output: ``report``, a folder with
both files.

This module gathers the data; the module ``pages.report`` renders the page. Neither file contains a date. If times are
simulated (setting ``sandbox.clock=model``), the files also omit versions, durations, devices and notes, so equal inputs
give files with equal bytes."""

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from cuda_agent import __version__
from cuda_agent.context import StageContext
from cuda_agent.pages.report import render
from cuda_agent.policy.episode import EPISODES, Episode, read_episodes
from cuda_agent.rl.scores import Scores, compare, read_scores
from cuda_agent.sandbox.wire import Verdict
from cuda_agent.spans import span
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.tracking import read_metrics, read_notes

SCORES = "scores-"  # prefix of the inputs that hold a policy's scores
PACKAGES = ("torch", "transformers", "numpy")
KERNELS = 6  # number of kernels shown with their source
MESSAGE_CHARACTERS = 4000  # most characters of one message in a shown trajectory


@span("write report")
def run(ctx: StageContext) -> None:
    scored = {name.removeprefix(SCORES): folder for name, folder in ctx.inputs.items() if name.startswith(SCORES)}
    scores = {policy: read_scores(folder / "scores.json") for policy, folder in scored.items()}
    tasks = read_tasks(ctx.inputs["tasks"])
    episodes = ((policy, one) for policy, folder in scored.items() for one in read_episodes(folder / EPISODES))
    kernels = fastest_kernels(episodes, tasks)
    data = gather(scores, kernels, ctx.inputs["tasks"] / "card.json", ctx.inputs["stages"])
    folder = ctx.outputs["report"]
    (folder / "report.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    (folder / "index.html").write_text(render(data))


def gather(scores: dict[str, Scores], kernels: list[dict[str, Any]], card: Path, stages: Path) -> dict[str, Any]:
    """Returns the data of the report, as values that JSON can represent.

    Args:
        scores: Scores by policy, in the order of training.
        kernels: The result of ``fastest_kernels``.
        card: The file with the data card, a summary of the tasks.
        stages: The folder with ``graph.json`` (a list of the earlier stages), ``config.json``, and one folder per stage
            with its metrics, notes and manifest."""
    rows = _read_json(stages / "graph.json")
    about = {row["name"]: row["about"] for row in rows}
    clock = next(iter(scores.values())).clock
    groups = {row.group for s in scores.values() for row in s.final.families}
    families = sorted(groups, key=lambda family: (family != "teacher", family))
    first, *later = scores.values()
    versions = {"python": python_version(), "cuda-agent": __version__} | {name: version(name) for name in PACKAGES}
    return {
        "clock": clock,
        **({} if clock == "model" else {"versions": versions}),
        "config": _read_json(stages / "config.json"),
        "families": families,
        "policies": [s.to_json() | {"about": about.get(f"evaluate-{s.policy}", "")} for s in scores.values()],
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
        "stages": [_stage(stages / row["name"], row, timeless=clock == "model") for row in rows],
    }


def fastest_kernels(episodes: Iterable[tuple[str, Episode]], tasks: list[Task]) -> list[dict[str, Any]]:
    """Returns correct final solutions with the highest speed-up over ``torch.compile``, best first: at most one per
    task, and at most ``KERNELS`` in all. ``episodes`` holds pairs of a policy's name and an episode."""
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


def _stage(folder: Path, row: dict[str, Any], timeless: bool) -> dict[str, Any]:
    manifest = _read_json(folder / "manifest.json")
    place = {"seconds": manifest.get("seconds"), "device": manifest.get("device")}
    return {
        "name": row["name"],
        "chart": row["chart"],
        "curves": row["curves"],
        **({} if timeless else place | {"notes": read_notes(folder / "notes.jsonl")}),
        "code": manifest.get("code"),
        "metrics": [
            {"step": step, "values": {k: v for k, v in values.items() if not (timeless and "second" in k)}}
            for step, values in read_metrics(folder / "metrics.jsonl").items()
        ],
    }


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}
