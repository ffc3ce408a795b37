"""Submits runs to an installed release with the command line, and observes them through Argo's Workflows.

The module defines the smallest run that has every stage, waits for a stage or for a run's end, and can suspend a
run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import probing
from kubectl import Cluster, wait_for
from release import ROOT, Release

from cuda_agent.cluster import submit as commands
from cuda_agent.cluster.submit import ENDED, phase, views
from cuda_agent.cluster.templates import template_name
from cuda_agent.compose import compose
from cuda_agent.pipeline.local import StageView

# Every stage for real, with as few evaluations as there can be: they are what takes time in pods.
TINY = (
    "experiment=smoke", "sandbox.clock=model", "synthesis.train=2", "synthesis.heldout=1", "synthesis.catalogue=0",
    "bootstrap.verify=0", "warmup.episodes_per_step=2", "warmup.samples_per_prompt=1", "collect.samples=1",
    "agentic.steps=1",
    "agentic.episodes_per_step=2", "agentic.samples_per_prompt=1", "agent.turns=3", "evaluate.turns=3",
)  # fmt: skip
OTHER = "agentic.actor_lr=1.5e-4"  # another run, of which only the last stages are not those of the first
ROLES = ("workspace", "build", "evaluate")
LONG = 2400.0  # seconds; far more than any wait here takes on a machine that does nothing else


def submission(run: str) -> commands.Submission:
    """Returns the objects that the command ``submit`` would create."""
    return commands.submission(compose([*TINY, f"run.name={run}"]), "cpu", template_name("cuda-agent", "cpu"))


def submit(installed: Release, run: str, *overrides: str) -> None:
    done = installed.command("submit", *TINY, *overrides, f"run.name={run}")
    assert done.returncode == 0, done.stderr


def in_peace(folder: Path, *overrides: str) -> Any:
    """Makes the same run on this machine, with its store in ``folder``, and returns what the command reports. Call it
    when nothing else runs: evaluations need the processors."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "cuda_agent.cli", "run", *TINY, *overrides, f"run.store={folder / 'store'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "run.mlflow=off", "--json"], text=True, capture_output=True, env=environment, timeout=LONG
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def stages(space: Cluster, workflow: str) -> dict[str, StageView]:
    return {view.name: view for view in views(space.get("workflow", workflow))}


def reaches(space: Cluster, workflow: str, stage: str, *states: str) -> StageView:
    """Waits until the stage is in one of these states, and returns its view. Raises if the run ends before."""

    def look() -> StageView | None:
        found = space.get("workflow", workflow)
        view = next(view for view in views(found) if view.name == stage)
        if view.state in states:
            return view
        assert phase(found) not in ENDED, f"{workflow} has ended with {stage} {view.state}: {said(space, workflow)}"
        return None

    return wait_for(f"{stage} of {workflow} is {states}", LONG, look)  # type: ignore[return-value]


def ended(space: Cluster, workflow: str) -> dict[str, Any]:
    """Waits for the run's end and returns its Workflow."""

    def look() -> dict[str, Any] | None:
        found: dict[str, Any] = space.get("workflow", workflow)
        return found if phase(found) in ENDED else None

    return wait_for(f"{workflow} ends", LONG, look)  # type: ignore[return-value]


def succeeded(space: Cluster, workflow: str) -> dict[str, Any]:
    found = ended(space, workflow)
    assert phase(found) == "Succeeded", said(space, workflow)
    return found


def suspend(space: Cluster, workflow: str, held: bool) -> None:
    """If ``held``, keeps the Workflow from starting further steps; running steps go on to their end. Otherwise lets the
    Workflow continue."""
    space.run("patch", "workflow", workflow, "--type=merge", "-p", json.dumps({"spec": {"suspend": held}}))


def said(space: Cluster, workflow: str) -> str:
    """Returns the states and the ends of the logs of a run, to explain its failure."""
    lines = [f"{view.name}: {view.state} {view.message}" for view in stages(space, workflow).values()]
    for pod in pods_of(space, workflow):
        log = space.try_run("logs", pod, "-c", "main", "--tail=20").stdout
        lines.append(f"--- {pod}\n{log}")
    return "\n".join(lines)


def pods_of(space: Cluster, workflow: str) -> list[str]:
    """Returns the names of the stages' pods that exist, oldest first."""
    found = space.get("pods", "-l", f"workflows.argoproj.io/workflow={workflow}")["items"]
    found.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
    return [pod["metadata"]["name"] for pod in found]


def pod_of(space: Cluster, workflow: str, stage: str) -> str:
    """Waits for a running pod of the stage and returns the pod's name."""

    def look() -> str:
        for pod in space.get("pods", "-l", f"workflows.argoproj.io/workflow={workflow}")["items"]:
            node = pod["metadata"]["annotations"]["workflows.argoproj.io/node-name"]
            state = pod["status"].get("containerStatuses", [])
            main = next((has for has in state if has["name"] == "main"), {})
            if node.rsplit(".", 1)[-1].split("(")[0] == stage and "running" in main.get("state", {}):
                return str(pod["metadata"]["name"])
        return ""

    return wait_for(f"a pod of {stage}", LONG, look)


@dataclass(frozen=True)
class Held:
    """A suspended run, which starts no further stage. ``from_stage`` names the places that the pod of its first stage
    could reach."""

    installed: Release
    name: str
    from_stage: set[str]
    tokens: str  # what that pod has where tokens would be

    @property
    def cluster(self) -> Cluster:
        return self.installed.cluster

    @property
    def servers(self) -> Sequence[str]:
        return [f"{self.name}-{role}-0" for role in ROLES]

    def places(self) -> dict[str, probing.Place]:
        """Returns all places that a pod of the namespace might try to reach."""
        return probing.cluster_places(self.cluster) | {
            "MinIO": probing.service_of(self.cluster, "cuda-agent-minio", 9000),
            "MLflow": probing.service_of(self.cluster, "cuda-agent-mlflow", 5000),
            **{
                f"its {role}": ("tcp", probing.address_of(self.cluster, f"{self.name}-{role}-0"), 8750)
                for role in ROLES
            },
        }


@contextmanager
def hold(installed: Release, name: str) -> Iterator[Held]:
    space = installed.cluster
    # A seed of its own: a first stage that the cache serves has no pod.  And long enough to be asked from inside.
    submit(installed, name, "seed=11", "synthesis.train=40", "synthesis.max_candidates=200")
    try:
        pod = pod_of(space, name, "synthesis")
        suspend(space, name, True)
        bare = Held(installed, name, set(), "")
        found = probing.reached(space, pod, bare.places())
        tokens = space.try_run("exec", pod, "-c", "main", "--", "ls", "/var/run/secrets", "/run/secrets").stdout
        yield Held(installed, name, found, tokens)
    finally:
        installed.command("cancel", name, "--now")  # first: what is let go would begin its next stage
        suspend(space, name, False)
