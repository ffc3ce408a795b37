"""Engine replicas of a run: real vLLM servers on the processor, in pods that only the run's stages reach.

Needs an environment with vLLM for Python 3.11, whose interpreter CUDA_AGENT_VLLM_PYTHON names; pods mount it. One run,
as far as the stages that play for the first time. Does not cover GPUs and NCCL.
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

from cuda_agent.pipeline.manifest import manifest_entry, read_manifest

PYTHON = os.environ.get("CUDA_AGENT_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="CUDA_AGENT_VLLM_PYTHON names no environment with vLLM"),
]
RUN = "served"
POD = f"{RUN}-engine-0"
_METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics').read().decode())"


@dataclass
class Seen:
    pod: dict[str, Any] = field(default_factory=dict)
    before: str = ""  # what the replica wrote while there was no policy
    reached: dict[str, set[str]] = field(default_factory=dict)  # who -> what of all that there is
    answered: float = 0.0  # completions of the replica
    restarts: int = 0
    stages: dict[str, bool] = field(default_factory=dict)  # those that have left a result


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
        "replicas": 1,
        "claim": "weights",
        "resources": size,
        "extraVolumes": [{"name": "vllm", "persistentVolumeClaim": {"claimName": "vllm", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "vllm", "mountPath": "/opt/environment", "readOnly": True}],
    }
    given = merged(values(), {"extraObjects": [claim], "profiles": {"cpu": {"engine": engine}}})
    with release(cluster, namespace, given) as made:
        script("project", "engine", number=cluster.number)
        script("environment", namespace, "vllm", str(Path(PYTHON).parent.parent), number=cluster.number)
        yield made
        cluster.run("delete", "persistentvolume", f"vllm-{namespace}", "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def seen(served: Release) -> Seen:
    space, found = served.cluster, Seen()
    runs.submit(served, RUN, "policy.engine=vllm", "policy.engine_batch=4", "bootstrap.steps=1")
    found.before = wait_for("the replica's first words", runs.LONG, lambda: space.try_run("logs", POD).stdout)
    found.pod = space.get("pod", POD)
    places: dict[str, probing.Place] = {"engine": ("tcp", probing.address_of(space, POD), 8000)}
    stage = runs.pod_of(space, RUN, "evaluate-base")  # which waits for the replica
    wait_for("the replica answers", runs.LONG, lambda: ready(space))
    found.reached["stage"] = probing.reached(space, stage, places)
    found.reached["sandbox"] = probing.reached(space, f"{RUN}-evaluate-0", places, container="sandbox")
    others = probing.cluster_places(space) | {
        "MinIO": probing.service_of(space, "cuda-agent-minio", 9000),
        "sandbox": ("tcp", probing.address_of(space, f"{RUN}-evaluate-0"), 8750),
    }
    found.reached["engine"] = probing.reached(space, POD, others, container="engine")
    runs.reaches(space, RUN, "evaluate-base", "done")
    lines = space.run("exec", POD, "-c", "engine", "--", "python3", "-c", _METRICS).splitlines()
    counted = [line for line in lines if line.startswith("vllm:request_success_total")]
    found.answered = sum(float(line.rsplit(" ", 1)[1]) for line in counted)
    space.try_run("exec", POD, "-c", "engine", "--", "sh", "-c", "kill -KILL -1; kill 1")
    runs.reaches(space, RUN, "warmup", "done")
    (status,) = space.get("pod", POD)["status"]["containerStatuses"]
    found.restarts = status["restartCount"]
    with open_bucket(served) as store:
        names = ("bootstrap", "evaluate-base", "warmup")
        found.stages = {name: read_manifest(store, manifest_entry(RUN, name)) is not None for name in names}
    done = served.command("cancel", RUN)
    assert done.returncode == 0, done.stderr
    runs.ended(space, RUN)
    return found


def ready(space: Cluster) -> bool:
    (status,) = space.get("pod", POD)["status"].get("containerStatuses") or [{}]
    return bool(status.get("ready"))


def test_a_replica_waits_for_the_runs_first_policy(seen: Seen) -> None:
    assert f"waiting for /engine/{RUN}/policy" in seen.before
    assert seen.pod["spec"]["automountServiceAccountToken"] is False


def test_stages_play_with_it(seen: Seen) -> None:
    assert seen.answered > 0
    assert all(seen.stages.values()) and len(seen.stages) == 3


def test_only_stages_reach_it_and_it_reaches_nothing(seen: Seen) -> None:
    assert seen.reached == {"stage": {"engine"}, "sandbox": set(), "engine": set()}


def test_one_that_ends_is_started_again_and_given_the_weights_of_the_stage(seen: Seen) -> None:
    assert seen.restarts >= 1
    assert seen.stages["warmup"], "it proves to every stage what it serves"


def test_nothing_of_it_stays(seen: Seen, served: Release) -> None:
    def left() -> list[str]:
        items = served.cluster.get("statefulsets,services,networkpolicies")["items"]
        return [item["metadata"]["name"] for item in items if item["metadata"]["name"].startswith(f"{RUN}-engine")]

    wait_for("the engine's objects are gone", 120, lambda: not left())
