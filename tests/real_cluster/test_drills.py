"""One run that is disturbed three times, and then the same run in peace on this machine: the same bytes.

A pod is killed and deleted in mid-training, the run is cancelled and resumed, and MLflow is away for whole stages. All
in one run, because a run in pods takes minutes. Evaluations are as few as can be, since how they end is not what is
tried here.
"""

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import runs
from canaries import leaks, open_bucket, served
from kubectl import Cluster, wait_for
from release import Release

from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.manifest import Manifest, manifest_entry
from cuda_agent.storage import Store, open_store
from cuda_agent.tracking import RUN_TAG, STAGE_TAG, Metrics, read_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

RUN = "drill"
OVERRIDES = ("warmup.steps=3", "critic.epochs=120")  # long enough to be met in the middle


@dataclass
class Drill:
    """What was seen on the way, and what came out."""

    killed_after: int = 0  # steps of warmup that the killed pod had counted
    cancelled_after: int = 0  # epochs of critic that were counted when the run was cancelled, at least
    away: list[str] = field(default_factory=list)  # stages that began and ended while there was no MLflow
    calm: dict[str, Any] = field(default_factory=dict)  # stage -> outputs, of the run in peace
    manifests: dict[str, Manifest] = field(default_factory=dict)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    calm_metrics: dict[str, Metrics] = field(default_factory=dict)
    leaked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def drill(installed: Release, planted: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Drill:
    space, seen = installed.cluster, Drill()
    folder = tmp_path_factory.mktemp("drill")
    runs.submit(installed, RUN, *OVERRIDES)
    kill_in_training(installed, seen)
    cancel_in_training(installed, seen)
    resume_without_mlflow(installed, seen)
    runs.succeeded(space, f"{RUN}-r2")
    with open_bucket(installed) as store:
        seen.manifests = {stage.name: manifest_of(store, RUN, stage.name) for stage in STAGES}
        seen.metrics = {name: metrics_of(store, seen.manifests[name], folder / name) for name in seen.manifests}
    seen.leaked = leaks(installed, planted)
    in_peace(folder / "calm", seen)
    return seen


def in_peace(folder: Path, seen: Drill) -> None:
    """The same run on this machine, afterwards: two at once would compete for what evaluations need."""
    told = runs.in_peace(folder, *OVERRIDES)
    seen.calm = {name: facts["outputs"] for name, facts in told["stages"].items()}
    store = open_store(folder / "store")
    for stage in STAGES:
        manifest = manifest_of(store, told["run"], stage.name)
        seen.calm_metrics[stage.name] = metrics_of(store, manifest, folder / stage.name)


def kill_in_training(installed: Release, seen: Drill) -> None:
    """Stops warmup's process where it is, reads what it has counted, and deletes the pod without a grace period."""
    space = installed.cluster
    pod = runs.pod_of(space, RUN, "warmup")
    with open_bucket(installed) as store:
        wait_for("a checkpoint of warmup", runs.LONG, lambda: indices(store, "warmup"))
    folder = "/scratch/stage/warmup"
    stop = f"kill -STOP $(cat {folder}/pid) && cat {folder}/metrics.jsonl"
    lines = space.run("exec", pod, "-c", "main", "--", "sh", "-c", stop)
    seen.killed_after = len({json.loads(line)["step"] for line in lines.splitlines()})
    space.run("delete", "pod", pod, "--force", "--grace-period=0")


def cancel_in_training(installed: Release, seen: Drill) -> None:
    space = installed.cluster
    runs.pod_of(space, RUN, "critic")
    with open_bucket(installed) as store:
        found = wait_for("a checkpoint of critic", runs.LONG, lambda: indices(store, "critic"))
        seen.cancelled_after = max(json.loads(store.get(key))["step"] for key in found)
    done = installed.command("cancel", RUN)
    assert done.returncode == 0 and "critic" in done.stdout, done
    assert runs.phase(runs.ended(space, RUN)) == "Failed"


def resume_without_mlflow(installed: Release, seen: Drill) -> None:
    """MLflow is away from before the resumption until a stage after the resumed one has ended. The run waits for its
    return, because on a busy machine the rest of the run might be the faster."""
    space, again, mlflow = installed.cluster, f"{RUN}-r2", "deployment/cuda-agent-mlflow"
    space.run("scale", mlflow, "--replicas=0")
    space.run("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=mlflow", "--timeout=120s")
    since = datetime.now().astimezone()
    done = installed.command("resume", RUN)
    assert done.returncode == 0, done.stderr
    for stage in ("critic", "agentic"):
        runs.reaches(space, again, stage, "done")
    runs.suspend(space, again, True)
    seen.away = between(space, again, since, datetime.now().astimezone())
    space.run("scale", mlflow, "--replicas=1")
    wait_for("MLflow", runs.LONG, lambda: space.get(mlflow).get("status", {}).get("readyReplicas"))
    runs.suspend(space, again, False)


def indices(store: Store, stage: str) -> list[str]:
    """Of the stage's complete checkpoints."""
    return [key for key in store.list(f"checkpoints/{stage}") if key.endswith(".json") and key.count("/") == 3]


def between(space: Cluster, workflow: str, since: datetime, until: datetime) -> list[str]:
    """Stages whose pods began and ended between the two."""
    nodes = space.get("workflow", workflow)["status"]["nodes"].values()
    return sorted(
        node["displayName"].split("(")[0]
        for node in nodes
        if node["type"] == "Pod"
        and node.get("phase") == "Succeeded"
        and since < datetime.fromisoformat(node["startedAt"])
        and datetime.fromisoformat(node["finishedAt"]) < until
    )


def manifest_of(store: Store, run: str, stage: str) -> Manifest:
    return Manifest.from_bytes(store.get(manifest_entry(run, stage)))


def metrics_of(store: Store, manifest: Manifest, folder: Path) -> Metrics:
    store.get_folder(manifest.metrics, folder)
    return read_metrics(folder / "metrics.jsonl")


def timeless(metrics: Metrics) -> Metrics:
    return {step: {key: v for key, v in values.items() if "second" not in key} for step, values in metrics.items()}


def test_the_disturbed_run_ends_with_the_bytes_of_the_run_in_peace(drill: Drill) -> None:
    found = {name: manifest.outputs for name, manifest in drill.manifests.items()}
    assert set(found) == set(drill.calm) == {stage.name for stage in STAGES}
    assert found == drill.calm


def test_a_deleted_pod_costs_at_most_one_step(drill: Drill) -> None:
    (resumed,) = drill.manifests["warmup"].resumed
    assert resumed >= 1 and drill.killed_after - resumed in (0, 1)


def test_a_cancelled_run_goes_on_after_the_last_step(drill: Drill) -> None:
    (resumed,) = drill.manifests["critic"].resumed
    assert drill.cancelled_after <= resumed < 120


def test_no_step_is_missing_and_none_is_there_twice(drill: Drill) -> None:
    for name, metrics in drill.metrics.items():
        assert timeless(metrics) == timeless(drill.calm_metrics[name]), name
    assert list(drill.metrics["warmup"]) == [0, 1, 2] and list(drill.metrics["critic"]) == list(range(120))


def test_mlflow_that_was_away_for_whole_stages_knows_every_step_once(drill: Drill, installed: Release) -> None:
    assert "agentic" in drill.away, "no stage began and ended while MLflow was away"
    from mlflow import MlflowClient

    with served(installed, "mlflow", 5000) as address:
        client = MlflowClient(tracking_uri=address)
        experiment = client.get_experiment_by_name("smoke")
        found = client.search_runs([experiment.experiment_id], f"tags.`{RUN_TAG}` = '{RUN}'")
        by_stage = {run.data.tags[STAGE_TAG]: run for run in found}
        assert len(found) == len(by_stage) == 1 + len(STAGES)
        assert {run.info.status for run in found} == {"FINISHED"}
        for name, metrics in drill.metrics.items():
            run = by_stage[name]
            keys = {key for values in metrics.values() for key in values}
            assert set(run.data.metrics) == keys, name
            for key in keys:
                points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
                assert sorted(points) == [(step, values[key]) for step, values in metrics.items() if key in values]


def test_after_a_whole_run_planted_secrets_are_read_nowhere(drill: Drill) -> None:
    """That the search finds what is there is tried beside the walls."""
    assert drill.leaked == []
