"""The demo on a cluster, with measured times, cut to a quarter of an hour on two cores. Too long for every day."""

import json
import os
from collections.abc import Iterator

import pytest
from kubectl import Cluster
from release import Release, release, values
from runs import succeeded

from cuda_agent.pipeline.graph import STAGES

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

CUT = (
    "synthesis.train=10", "synthesis.heldout=10", "synthesis.catalogue=2", "bootstrap.examples=4000",
    "bootstrap.steps=500", "bootstrap.max_seconds=90", "warmup.steps=3", "warmup.episodes_per_step=64",
    "collect.samples=4",
    "critic.epochs=3", "agentic.steps=3", "agentic.episodes_per_step=64", "evaluate.samples=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Iterator[Release]:
    with release(cluster, f"demo-{os.getpid()}", values()) as made:
        yield made


def test_the_demo_runs_in_pods_and_its_report_holds_times_and_places(bare: Release) -> None:
    submitted = bare.command("submit", "experiment=demo", *CUT, "run.name=demo")
    assert submitted.returncode == 0, submitted.stderr
    succeeded(bare.cluster, "demo")
    report = json.loads(bare.command("report", "demo", "--on", ".", "--json").stdout)
    assert report["clock"] == "real" and all(report.values()), [name for name, value in report.items() if not value]
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert set(stages) == {stage.name for stage in STAGES} - {"report"}
    timed = {stage.name for stage in STAGES if stage.timing}
    for name, stage in stages.items():
        assert stage["seconds"] > 0 and stage["code"], name
        assert stage["device"] == ("cpu" if name in timed else None), "what was timed says on what"
    for policy in report["policies"]:
        outcomes = [outcome["final"]["status"] for outcome in policy["outcomes"]]
        assert outcomes and set(outcomes) != {"no_answer"}
        assert policy["infra"] == 0, "nothing was lost by the machinery"
    for kernel in report["kernels"]:
        assert kernel["verdict"]["seconds"] > 0 and kernel["verdict"]["clock"] == "real"
    seconds = {name: round(stage["seconds"]) for name, stage in stages.items()}
    print(f"\n{json.dumps(seconds)}\n{json.dumps({p['policy']: p['final']['overall'] for p in report['policies']})}")
