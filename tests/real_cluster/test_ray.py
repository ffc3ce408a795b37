"""Stages in several pods: RayJobs that KubeRay's real operator makes, and the bytes of a run with Ray on one machine.

One run, all of whose stages that play are spread. Most are left in peace; in `agentic` the pod of a rollout worker that
plays is killed. Covers the operator, the pods' walls, and what of them stays. Does not cover GPUs, and a loss of the
head (a retry of the whole stage).
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import probing
import pytest
import runs
from canaries import open_bucket
from kubectl import Cluster, script, wait_for
from release import Release, merged, release, values

from cuda_agent.cluster import rayjobs
from cuda_agent.pipeline.graph import ROWS, STAGES
from cuda_agent.pipeline.manifest import Manifest, manifest_entry
from cuda_agent.tracking import Metrics, read_metrics

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (pip install '.[ray]')"),
]

RUN = "spread"
# Without overlap, so that every token has the weights that it has on one machine; long enough to be met in the middle.
PLACES = ("ray.trainers=2", "training.num_processes=2")  # the trainer's two ranks are in two pods
OVERRIDES = ("runtime=ray", "ray.max_off_policy_steps=0", "agentic.steps=8", "agentic.episodes_per_step=6", *PLACES)
SPREAD = [stage.name for stage in STAGES if rayjobs.can_be_spread(stage)]


@dataclass
class Seen:
    """What was seen on the way, and what came out."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # stage -> its RayJob while it ran
    pods: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # stage -> its pods then
    nodes: dict[str, set[str]] = field(default_factory=dict)  # Pod, Skipped, ... -> names in the graph
    reached: set[str] = field(default_factory=set)  # from the pod of an actor, of all that it might try
    from_sandbox: set[str] = field(default_factory=set)  # of Ray's pods, from a pod of the sandbox
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    alone: dict[str, dict[str, str]] = field(default_factory=dict)  # outputs of the same run on this machine


@pytest.fixture(scope="module")
def spread(cluster: Cluster) -> Iterator[Release]:
    """A release whose profile has pods for Ray, beside the operator."""
    script("kuberay", number=cluster.number)
    small = values()["profiles"]["cpu"]["defaults"]["resources"]
    ray = {"enabled": True, "headResources": small, "resources": small}
    with release(cluster, f"ray-{os.getpid()}", merged(values(), {"profiles": {"cpu": {"ray": ray}}})) as made:
        script("project", "ray", number=cluster.number)
        yield made


@pytest.fixture(scope="module")
def seen(spread: Release, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    space, found = spread.cluster, Seen()
    folder = tmp_path_factory.mktemp("spread")
    runs.submit(spread, RUN, *OVERRIDES)
    look(space, found, "warmup")
    try_walls(space, found)
    runs.reaches(space, RUN, "warmup", "done")
    look(space, found, "collect")
    look(space, found, "agentic")
    kill_a_worker(spread)
    runs.succeeded(space, RUN)
    for node in space.get("workflow", RUN)["status"]["nodes"].values():
        found.nodes.setdefault(node["type"], set()).add(re.sub(r"\(\d+\)$", "", node["displayName"]))
    with open_bucket(spread) as store:
        for stage in STAGES:
            manifest = Manifest.from_bytes(store.get(manifest_entry(RUN, stage.name)))
            found.outputs[stage.name] = manifest.outputs
            store.get_folder(manifest.metrics, folder / stage.name)
            found.metrics[stage.name] = read_metrics(folder / stage.name / "metrics.jsonl")
    told = runs.in_peace(folder / "alone", *OVERRIDES)
    found.alone = {name: facts["outputs"] for name, facts in told["stages"].items()}
    return found


def look(space: Cluster, found: Seen, stage: str) -> None:
    """Waits until Ray runs the stage, and keeps its job and pods."""
    name = rayjobs.job_name(RUN, stage)

    def running() -> Any:
        job = space.try_run("get", "rayjob", name, "-o", "json")
        made = json.loads(job.stdout) if job.returncode == 0 else {}
        workflow = space.get("workflow", RUN)
        assert runs.phase(workflow) not in runs.ENDED, runs.said(space, RUN)
        return made if made.get("status", {}).get("jobStatus") == "RUNNING" else None

    found.jobs[stage] = wait_for(f"a running RayJob of {stage}", runs.LONG, running)
    found.pods[stage] = space.get("pods", "-l", f"{rayjobs.RAY_LABEL}={name}")["items"]


def of_group(pods: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    """The pods of KubeRay's kind `head` or `worker`."""
    return [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == group]


def try_walls(space: Cluster, found: Seen) -> None:
    (head,) = of_group(found.pods["warmup"], "head")
    actor = of_group(found.pods["warmup"], "worker")[0]["metadata"]["name"]
    ports = {"GCS": ("tcp", head["status"]["podIP"], 6379), "dashboard": ("tcp", head["status"]["podIP"], 8265)}
    judge = {"evaluate": ("tcp", probing.address_of(space, f"{RUN}-evaluate-0"), 8750)}
    found.reached = probing.reached(space, actor, ports | judge, container="ray")
    found.from_sandbox = probing.reached(space, f"{RUN}-evaluate-0", ports, container="sandbox")


def kill_a_worker(spread: Release) -> None:
    """Deletes the pod of a rollout worker, without a grace period, once a step is done: the next ones are long."""
    space, name = spread.cluster, rayjobs.job_name(RUN, "agentic")

    def has_worker() -> str:
        pods = space.get("pods", "-l", f"{rayjobs.RAY_LABEL}={name},ray.io/node-type=worker")["items"]
        assert runs.phase(space.get("workflow", RUN)) not in runs.ENDED, "the run has ended before"
        for pod in (pod["metadata"]["name"] for pod in pods):
            seen = space.try_run("exec", pod, "-c", "ray", "--", "sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null")
            if "ray::RolloutWorker" in seen.stdout:
                return str(pod)
        return ""

    pod = wait_for("the pod of a rollout worker", runs.LONG, has_worker)
    with open_bucket(spread) as store:
        wait_for("a checkpoint of agentic", runs.LONG, lambda: list(store.list("checkpoints/agentic")))
    space.run("delete", "pod", pod, "--force", "--grace-period=0")


def test_stages_that_play_are_rayjobs_and_the_others_are_pods(seen: Seen) -> None:
    assert {"warmup", "collect", "agentic", "evaluate-rft"} < set(SPREAD)
    wanted = {rayjobs.task_name(stage.name) if stage.name in SPREAD else stage.name for stage in STAGES}
    assert seen.nodes["Pod"] == {"prepare", *wanted, "finish"}
    absent = {row.name for row in ROWS} - {stage.name for stage in STAGES}  # rows of other graphs
    absent |= {rayjobs.task_name(row.name) for row in ROWS if row.name in absent and rayjobs.can_be_spread(row)}
    assert seen.nodes["Skipped"] == {*SPREAD, *absent, "finish"}, "and what a run that fails ends with"


def test_a_job_has_a_head_and_a_pod_for_each_actor(seen: Seen) -> None:
    workers = {stage: len(of_group(pods, "worker")) for stage, pods in seen.pods.items()}
    assert workers == {"warmup": 4, "collect": 2, "agentic": 4}, "two rollout workers, and the trainer's machines"
    for stage in workers:
        assert seen.jobs[stage]["metadata"]["ownerReferences"][0]["name"] == RUN
        assert len(of_group(seen.pods[stage], "head")) == 1


def test_actors_have_no_credentials_and_rays_port_asks_for_a_token(seen: Seen) -> None:
    for pod in [pod for pods in seen.pods.values() for pod in pods]:
        (container,) = pod["spec"]["containers"]
        names = {entry["name"] for entry in container["env"]}
        assert "RAY_AUTH_TOKEN" in names and not pod["spec"].get("automountServiceAccountToken", True)
        has = any(name.startswith("AWS_SECRET") for name in names)
        assert has == (pod["metadata"]["labels"]["ray.io/node-type"] == "head")


def test_rays_pods_reach_each_other_and_the_sandbox_and_it_reaches_none_of_them(seen: Seen) -> None:
    assert seen.reached == {"GCS", "dashboard", "evaluate"}
    assert seen.from_sandbox == set()


def test_outputs_have_the_digests_of_a_run_with_ray_on_one_machine(seen: Seen) -> None:
    assert list(seen.outputs) == [stage.name for stage in STAGES]
    for name, outputs in seen.outputs.items():
        # The report shows what was measured, and that a worker was lost.
        assert (outputs == seen.alone[name]) == (name != "report"), name


def test_a_lost_pod_costs_no_step_and_is_counted(seen: Seen) -> None:
    agentic = seen.metrics["agentic"]
    assert list(agentic) == list(range(8))
    assert max(values["workers_lost"] for values in agentic.values()) >= 1
    assert {values["workers_lost"] for values in seen.metrics["warmup"].values()} == {0}


def test_nothing_of_it_stays(seen: Seen, spread: Release) -> None:
    def left() -> list[str]:
        kinds = "rayjobs,rayclusters,networkpolicies,services,secrets,statefulsets,pods"
        names = [item["metadata"]["name"] for item in spread.cluster.get(kinds)["items"]]
        return [name for name in names if name.startswith(("ray-", f"{RUN}-sandbox"))]

    wait_for("Ray's pods are gone", 120, lambda: not left())
