"""A run on a cluster, from `helm install` to the report: every stage a pod, the bytes of a run on one machine.

The same configuration runs beside it as a local run does.  Takes about ten minutes on two cores.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from canaries import open_bucket, served
from kubectl import Cluster
from release import ROOT, Release, release, values
from runs import succeeded

from cuda_agent.cluster.rayjobs import can_be_spread, task_name
from cuda_agent.pipeline.graph import ROWS, STAGES
from cuda_agent.pipeline.manifest import read_manifest

pytestmark = pytest.mark.cluster

SMOKE = ("experiment=smoke", "sandbox.clock=model")
NAMES = [stage.name for stage in STAGES]


@dataclass
class Run:
    name: str
    installed: Release
    submitted: float  # seconds that `submit` took
    seconds: float  # from submit to its end
    outputs: dict[str, dict[str, str]]  # stage -> artifact -> digest


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Iterator[Release]:
    """Of its own, without a webhook: `finish` has nothing to tell then."""
    with release(cluster, f"bare-{os.getpid()}", values()) as made:
        yield made


@pytest.fixture(scope="module")
def run(bare: Release) -> Run:
    """A finished run.  What its stages say is kept in the store, so pods may go."""
    return finished(bare, "first")


def said(installed: Release, *words: str) -> str:
    """What `cuda-agent` prints."""
    done = installed.command(*words)
    assert done.returncode == 0, f"cuda-agent {words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def finished(installed: Release, name: str) -> Run:
    begun = time.monotonic()
    told = json.loads(said(installed, "submit", *SMOKE, f"run.name={name}", "--json"))
    submitted = time.monotonic() - begun
    assert told["run"] == told["workflow"] == name
    succeeded(installed.cluster, name)
    seconds = time.monotonic() - begun
    with open_bucket(installed) as store:
        manifests = {stage: read_manifest(store, name, stage) for stage in NAMES}
    outputs = {stage: manifest.outputs for stage, manifest in manifests.items() if manifest}
    return Run(name, installed, submitted, seconds, outputs)


@pytest.fixture(scope="module")
def local(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `cuda-agent run --json` says of the same configuration on this machine; after the other, not beside it."""
    folder = tmp_path_factory.mktemp("local")
    words = [*SMOKE, f"run.store={folder / 'store'}", "run.mlflow=off", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "cuda_agent.cli", "run", *words], cwd=ROOT, text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def nodes(installed: Release, workflow: str, kind: str = "Pod") -> set[str]:
    """The nodes of one type (Pod, Skipped, ...), by their names in the graph."""
    found = installed.cluster.get("workflow", workflow)["status"]["nodes"].values()
    return {re.sub(r"\(\d+\)$", "", node["displayName"]) for node in found if node["type"] == kind}


def test_helm_test_finds_the_store_and_mlflow(bare: Release) -> None:
    done = bare.helm("test", "cuda-agent", "--timeout", "3m")
    assert done.returncode == 0 and "Succeeded" in done.stdout, done.stderr


def test_every_stage_was_a_pod_and_evaluations_ran_in_pods_of_the_sandbox(run: Run) -> None:
    assert nodes(run.installed, run.name) == {"prepare", *NAMES, "finish"}
    space = run.installed.cluster
    events = space.get("events")["items"]
    began = {event["involvedObject"]["name"] for event in events if event["reason"] == "Started"}
    assert {f"{run.name}-{role}-0" for role in ("workspace", "build", "evaluate")} <= began
    left = space.get("statefulsets,secrets,services,networkpolicies")["items"]
    assert not [item["metadata"]["name"] for item in left if item["metadata"]["name"].startswith(f"{run.name}-")]
    print(f"\nsubmit: {run.submitted:.1f} s; a smoke run from submit to its end: {run.seconds:.0f} s")


def test_outputs_have_the_digests_of_a_run_on_one_machine(run: Run, local: dict[str, Any]) -> None:
    assert run.outputs == {stage: facts["outputs"] for stage, facts in local["stages"].items()}
    assert list(run.outputs) == NAMES


def test_the_report_is_fetched_and_nothing_in_it_is_empty(run: Run, local: dict[str, Any]) -> None:
    page = run.installed.cluster.state / said(run.installed, "report", run.name, "--on", ".").strip()
    assert page.read_text() == Path(local["report"]).read_text()
    report = json.loads(said(run.installed, "report", run.name, "--on", ".", "--json"))
    assert report == json.loads((Path(local["report"]).parent / "report.json").read_text())
    assert all(report.values()), [name for name, value in report.items() if not value]
    for policy in report["policies"]:
        outcomes = [outcome["final"]["status"] for outcome in policy["outcomes"]]
        assert outcomes and set(outcomes) != {"no_answer"}, "episodes, and verdicts on what they ended with"
        assert policy["final"]["overall"] and policy["best"]["overall"]
    for kernel in report["kernels"]:
        assert all(kernel[name] for name in ("task", "code", "policy", "files", "verdict", "messages"))
    for stage in report["stages"]:
        assert stage["code"] and (stage["metrics"] or stage["name"] == "synthesis"), stage["name"]
    episodes = {stage["name"]: stage["metrics"][0]["values"].get("episodes") for stage in report["stages"][1:]}
    assert all(episodes[name] > 0 for name in NAMES if name.startswith("evaluate-") or name == "collect")


def test_the_episodes_are_those_that_the_stages_counted(run: Run) -> None:
    report = json.loads(said(run.installed, "report", run.name, "--on", ".", "--json"))
    counted = {  # collect counts those of each round
        stage["name"]: sum(row["values"].get("episodes", 0) for row in stage["metrics"]) for stage in report["stages"]
    }
    listed = Counter(
        row["stage"] for row in json.loads(said(run.installed, "episodes", run.name, "--on", ".", "--json"))
    )
    assert listed == {name: counted[name] for name in NAMES if name.startswith("evaluate-") or name == "collect"}
    page = run.installed.cluster.state / "episodes.html"
    said(run.installed, "episodes", run.name, "--on", ".", "--stage", "collect", "--output", str(page))
    assert "<html" in page.read_text()[:200].lower()


def test_mlflow_has_every_stage_with_its_curves(run: Run) -> None:
    from mlflow import MlflowClient

    with served(run.installed, "mlflow", 5000) as address:
        client = MlflowClient(tracking_uri=address)
        (experiment,) = [found for found in client.search_experiments() if found.name == "smoke"]
        found = client.search_runs([experiment.experiment_id], f"tags.`cuda_agent.run` = '{run.name}'")
        assert {entry.data.tags["cuda_agent.stage"] for entry in found} == {"", *NAMES}
        assert {entry.info.status for entry in found} == {"FINISHED"}
        (agentic,) = [entry for entry in found if entry.data.tags["cuda_agent.stage"] == "agentic"]
        history = client.get_metric_history(agentic.info.run_id, "reward")
        assert len({point.step for point in history}) == len(history) > 1
        assert agentic.data.params["sandbox.clock"] == "model"


def test_the_same_configuration_again_is_one_pod_with_the_same_outputs(run: Run) -> None:
    again = finished(run.installed, "again")
    assert nodes(run.installed, "again") == {"prepare"}
    rows = {row.name for row in ROWS}  # of all graphs: those that this one leaves out are skipped, too
    spread = {task_name(row.name) for row in ROWS if can_be_spread(row)}
    assert nodes(run.installed, "again", "Skipped") == {*rows, *spread, "finish"}
    assert again.outputs == run.outputs
    status = run.installed.cluster.get("workflow", "again")["status"]
    ended, began = (datetime.fromisoformat(status[name]) for name in ("finishedAt", "startedAt"))
    print(f"\nsubmit: {again.submitted:.1f} s; served from the cache in {(ended - began).total_seconds():.0f} s")
    page = json.loads(said(run.installed, "report", "again", "--on", ".", "--json"))
    assert page["policies"]
