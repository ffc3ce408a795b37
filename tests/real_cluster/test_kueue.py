"""Two tenants whose queues share GPUs in a cohort of Kueue: a run of higher priority takes the GPU of PPO.

PPO ends after its step, waits in its queue, goes on by itself, and has the bytes of a run in peace. Before that, a run
used up its budget of GPU-hours, and this one, with a higher budget, went on from the checkpoint. The GPUs are counted
ones, with nothing behind them; only PPO asks for one. Covers plain pods, and not RayJobs in a queue."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
import runs
from canaries import open_bucket
from kubectl import Cluster, script, wait_for
from release import Release, merged, release, values

from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.manifest import Manifest, manifest_entry, outcome_entry
from cuda_agent.pipeline.runs import read_run
from cuda_agent.storage import Store

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]  # builds Kueue

STEPS = 90  # a second each: the run of higher priority needs a minute to its first step
LENGTH = (f"agentic.steps={STEPS}",)
GPUS = {"guest": 0, "urgent": 1}  # tenant -> the GPUs that are its own; a guest borrows
PRIORITIES = {"guest": 100, "urgent": 1000}
AMPLE = {"cpu": "100", "memory": "1Ti", "ephemeral-storage": "1Ti"}  # what is requested must have a quota


def kueue(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, **fields}


def queues(tenant: str) -> list[dict[str, Any]]:
    """Returns the objects that the cluster's administrator makes for a tenant."""
    quotas = AMPLE | {"nvidia.com/gpu": GPUS[tenant]}
    flavor = {"name": "any", "resources": [{"name": name, "nominalQuota": much} for name, much in quotas.items()]}
    spec = {
        "cohortName": "everyone",
        "namespaceSelector": {},
        "preemption": {"reclaimWithinCohort": "LowerPriority"},
        "resourceGroups": [{"coveredResources": list(quotas), "flavors": [flavor]}],
    }
    return [
        kueue("WorkloadPriorityClass", tenant, value=PRIORITIES[tenant]),
        kueue("ClusterQueue", tenant, spec=spec),
    ]


def given() -> dict[str, Any]:
    with_gpu = merged(values()["profiles"]["cpu"]["defaults"]["resources"], {"limits": {"nvidia.com/gpu": 1}})
    profile = {"runs": 0, "device": "cpu", "stages": {"agentic": {"resources": with_gpu}}}
    named = {tenant: profile | {"queue": tenant, "queuePriority": tenant} for tenant in GPUS}
    return merged(values(), {"profiles": named})


@pytest.fixture(scope="module")
def queued(cluster: Cluster) -> Iterator[Release]:
    """Yields a release with a profile for each tenant."""
    script("kueue", number=cluster.number)
    made = [kueue("ResourceFlavor", "any", spec={}), *(one for tenant in GPUS for one in queues(tenant))]
    try:
        cluster.create(*made)
        with release(cluster, f"kueue-{os.getpid()}", given()) as here:
            own = [kueue("LocalQueue", tenant, spec={"clusterQueue": tenant}) for tenant in GPUS]
            here.cluster.create(*own)
            yield here
    finally:
        for one in made[::-1]:
            cluster.run("delete", one["kind"], one["metadata"]["name"], "--wait=false", "--ignore-not-found")


@dataclass
class Seen:
    frugal: Any = None  # the record of the run whose budget was used
    frugal_code: int = 0  # what `watch` exits with
    frugal_said: str = ""
    frugal_servers: list[str] = field(default_factory=list)  # those that are left
    frugal_step: int = 0  # after which it stopped
    frugal_attempts: list[dict[str, Any]] = field(default_factory=list)
    stopped: dict[str, Any] = field(default_factory=dict)  # how the preempted attempt ended
    evicted: datetime | None = None
    attempts: list[dict[str, Any]] = field(default_factory=list)  # of PPO, in Argo's words
    of_urgent: dict[str, Any] = field(default_factory=dict)  # PPO of the run that preempted
    manifests: dict[str, Manifest] = field(default_factory=dict)
    calm: dict[str, Any] = field(default_factory=dict)  # stage -> outputs, of the run in peace


@pytest.fixture(scope="module")
def seen(queued: Release, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    found = Seen()
    use_up_a_budget(queued, found)
    preempt(queued, found)
    told = runs.in_peace(tmp_path_factory.mktemp("calm"), *LENGTH)
    found.calm = {name: facts["outputs"] for name, facts in told["stages"].items()}
    return found


def use_up_a_budget(queued: Release, found: Seen) -> None:
    space, run = queued.cluster, "frugal"
    runs.submit(queued, run, *LENGTH, "run.gpu_hours=0.003", "--profile", "guest")
    found.frugal_code = queued.command("watch", run).returncode
    found.frugal_said = runs.said(space, run)
    with open_bucket(queued) as store:
        found.frugal, found.frugal_step = read_run(store, run), max(steps(store))
    found.frugal_attempts = attempts(space, run)
    found.frugal_servers = [
        one["metadata"]["name"]
        for one in space.get("statefulsets")["items"]
        if one["metadata"]["name"].startswith(f"{run}-")
    ]


def preempt(queued: Release, found: Seen) -> None:
    space, run = queued.cluster, "patient"
    runs.submit(queued, run, *LENGTH, "run.gpu_hours=1", "--profile", "guest")
    pod = runs.pod_of(space, run, "agentic")
    with open_bucket(queued) as store:
        wait_for("a step", runs.LONG, lambda: max(steps(store)) > found.frugal_step)
    runs.submit(queued, "urgent", "agentic.steps=1", runs.OTHER, "--profile", "urgent")
    runs.reaches(space, "urgent", "agentic", "running", "done")
    with open_bucket(queued) as store:
        found.stopped = wait_for("the end of the attempt", runs.LONG, lambda: outcome(store, run))
    events = space.get("events", "--field-selector", f"involvedObject.name={pod}")["items"]
    told = [one for one in events if "preempt" in f"{one['reason']} {one['message']}".lower()]
    found.evicted = min((datetime.fromisoformat(one["lastTimestamp"]) for one in told), default=None)
    runs.succeeded(space, "urgent")
    runs.succeeded(space, run)
    found.attempts = attempts(space, run)
    (found.of_urgent,) = attempts(space, "urgent")
    with open_bucket(queued) as store:
        found.manifests = {
            stage.name: Manifest.from_bytes(store.get(manifest_entry(run, stage.name))) for stage in STAGES
        }


def steps(store: Store) -> list[int]:
    """Returns the steps of PPO's checkpoints."""
    keys = [key for key in store.list("checkpoints/agentic") if key.endswith(".json") and key.count("/") == 3]
    return [json.loads(store.get(key))["step"] for key in keys] or [0]


def outcome(store: Store, run: str) -> Any:
    entry = outcome_entry(run, "agentic")
    return json.loads(store.get(entry)) if store.exists(entry) else None


def attempts(space: Cluster, run: str) -> list[dict[str, Any]]:
    nodes = space.get("workflow", run)["status"]["nodes"].values()
    found = [node for node in nodes if node["type"] == "Pod" and node["displayName"].startswith("agentic(")]
    return sorted(found, key=lambda node: node["displayName"])


def test_a_used_budget_ends_the_run_at_a_checkpoint(seen: Seen) -> None:
    assert seen.frugal_code == 76 and seen.frugal.status == "budget spent", seen.frugal_said
    assert "of 0.003 GPU-hours (run.gpu_hours)" in seen.frugal.message
    assert 1 <= seen.frugal_step < STEPS and not seen.frugal_servers
    assert len(seen.frugal_attempts) == 1, "it is not tried again"


def test_a_higher_priority_stops_ppo_after_its_step_and_within_the_grace_period(seen: Seen) -> None:
    first, second = seen.attempts
    assert first["phase"] in ("Failed", "Error") and second["phase"] == "Succeeded", first  # Error: the pod is gone
    assert seen.stopped["code"] == 75, seen.stopped
    assert seen.stopped["message"].startswith("stopped after step"), "it ended by itself"
    assert seen.evicted is not None
    seconds = (datetime.fromisoformat(first["finishedAt"]) - seen.evicted).total_seconds()
    print(f"\nevicted {seen.evicted}, ended after {seconds} s: {seen.stopped['message']}")
    assert seconds < 120


def test_the_preempted_run_waits_until_the_gpu_is_free_and_goes_on_after_its_last_step(seen: Seen) -> None:
    _, second = seen.attempts
    print(f"\nurgent: {seen.of_urgent['startedAt']} to {seen.of_urgent['finishedAt']}; then {second['startedAt']}")
    after = int(seen.stopped["message"].split()[3])
    assert seen.manifests["agentic"].resumed == [seen.frugal_step, after]
    assert seen.frugal_step < after < STEPS


def test_the_preempted_run_has_the_bytes_of_a_run_in_peace(seen: Seen) -> None:
    found = {name: manifest.outputs for name, manifest in seen.manifests.items()}
    assert set(found) == set(seen.calm) == {stage.name for stage in STAGES}
    assert found == seen.calm
