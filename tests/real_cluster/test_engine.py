"""Engine replicas of a run: real vLLM servers on the processor, in pods that only the run's stages reach.

Needs an environment with vLLM for Python 3.11, whose interpreter CUDA_AGENT_VLLM_PYTHON names; pods mount it. One whole
run, in which one of two replicas is killed. Does not cover GPUs and NCCL.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import probing
import pytest
import runs
from canaries import open_bucket
from kubectl import Cluster, script, wait_for
from release import Release, merged, release, values

from cuda_agent.pipeline.manifest import read_manifest
from cuda_agent.tracking import read_metrics

PYTHON = os.environ.get("CUDA_AGENT_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="CUDA_AGENT_VLLM_PYTHON names no environment with vLLM"),
]
RUN = "served"
PODS = [f"{RUN}-engine-{number}" for number in range(2)]
_METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics').read().decode())"


@dataclass
class Seen:
    pod: dict[str, Any] = field(default_factory=dict)
    before: str = ""  # what the replica wrote while there was no policy
    reached: dict[str, set[str]] = field(default_factory=dict)  # who -> what of all that there is
    answered: list[float] = field(default_factory=list)  # completions of each replica until then
    restarts: list[int] = field(default_factory=list)  # of each
    gaps: dict[str, list[float]] = field(default_factory=dict)  # stage that learns -> engine against trainer, a step


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[Release]:
    """A release whose profile has engine replicas."""
    namespace = f"engine-{os.getpid()}"
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    size = merged(values()["profiles"]["cpu"]["defaults"]["resources"], {"limits": {"memory": "8Gi"}})
    engine = {
        "replicas": 2,
        "claim": "weights",
        "resources": size,
        "extraVolumes": [{"name": "vllm", "persistentVolumeClaim": {"claimName": "vllm", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "vllm", "mountPath": "/opt/environment", "readOnly": True}],
    }
    with release(cluster, namespace, merged(values(), {"profiles": {"cpu": {"engine": engine}}})) as made:
        made.cluster.create(claim)
        script("project", "engine", number=cluster.number)
        script("environment", namespace, "vllm", str(Path(PYTHON).parent.parent), number=cluster.number)
        yield made
        cluster.run("delete", "persistentvolume", f"vllm-{namespace}", "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def seen(served: Release, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    space, found, folder = served.cluster, Seen(), tmp_path_factory.mktemp("served")
    runs.submit(served, RUN, "policy.engine=vllm", "policy.engine_batch=4", "bootstrap.steps=1")
    found.before = wait_for("the replica's first words", runs.LONG, lambda: space.try_run("logs", PODS[0]).stdout)
    found.pod = space.get("pod", PODS[0])
    places: dict[str, probing.Place] = {"engine": ("tcp", probing.address_of(space, PODS[0]), 8000)}
    stage = runs.pod_of(space, RUN, "evaluate-base")  # which waits for the replica
    wait_for("the replicas answer", runs.LONG, lambda: all(container(space, pod).get("ready") for pod in PODS))
    found.reached["stage"] = probing.reached(space, stage, places)
    found.reached["sandbox"] = probing.reached(space, f"{RUN}-evaluate-0", places, container="sandbox")
    others = probing.cluster_places(space) | {
        "MinIO": probing.service_of(space, "cuda-agent-minio", 9000),
        "sandbox": ("tcp", probing.address_of(space, f"{RUN}-evaluate-0"), 8750),
    }
    found.reached["engine"] = probing.reached(space, PODS[0], others, container="engine")
    runs.reaches(space, RUN, "evaluate-base", "done")
    runs.reaches(space, RUN, "warmup", "done")
    for pod in PODS:
        lines = space.run("exec", pod, "-c", "engine", "--", "python3", "-c", _METRICS).splitlines()
        counted = [line for line in lines if line.startswith("vllm:request_success_total")]
        found.answered.append(sum(float(line.rsplit(" ", 1)[1]) for line in counted))
    space.try_run("exec", PODS[0], "-c", "engine", "--", "sh", "-c", "kill -KILL -1; kill 1")
    wait_for("the replica is started again", runs.LONG, lambda: container(space, PODS[0]).get("restartCount"))
    runs.reaches(space, RUN, "agentic", "done")
    found.restarts = [container(space, pod)["restartCount"] for pod in PODS]
    runs.succeeded(space, RUN)
    with open_bucket(served) as store:
        for name in ("warmup", "agentic"):
            manifest = read_manifest(store, RUN, name)
            assert manifest is not None
            store.get_folder(manifest.metrics, folder / name)
            steps = read_metrics(folder / name / "metrics.jsonl")
            found.gaps[name] = [values["train_inference_mismatch"] for values in steps.values()]
    return found


def container(space: Cluster, pod: str) -> dict[str, Any]:
    (status,) = space.get("pod", pod)["status"].get("containerStatuses") or [{}]
    return dict(status)


def test_a_replica_waits_for_the_runs_first_policy(seen: Seen) -> None:
    assert f"waiting for /engine/{RUN}/policy" in seen.before
    assert seen.pod["spec"]["automountServiceAccountToken"] is False


def test_stages_play_with_it(seen: Seen) -> None:
    assert min(seen.answered) > 0 and len(seen.answered) == 2
    assert all(len(gaps) > 0 and max(gaps) < 1e-4 for gaps in seen.gaps.values()) and len(seen.gaps) == 2


def test_only_stages_reach_it_and_it_reaches_nothing(seen: Seen) -> None:
    assert seen.reached == {"stage": {"engine"}, "sandbox": set(), "engine": set()}


def test_one_that_ends_is_started_again_and_the_run_goes_on(seen: Seen) -> None:
    """Every stage has all of them prove what they serve."""
    assert seen.restarts[0] >= 1 and seen.restarts[1] == 0


def test_nothing_of_it_stays(seen: Seen, served: Release) -> None:
    def left() -> list[str]:
        items = served.cluster.get("statefulsets,services,networkpolicies")["items"]
        return [item["metadata"]["name"] for item in items if item["metadata"]["name"].startswith(f"{RUN}-engine")]

    wait_for("the engine's objects are gone", 120, lambda: not left())
