"""Measures the commands where there are many runs: 200 on a cluster, and 10,000 in a store that is 20 ms away.

    python benchmarks/many_runs.py --json many_runs.json

The cluster is an API server in memory (``tests/cluster/fake_api.py``) with Workflows as Argo leaves them: the chart's
template twice, 41 nodes, and the API server's ``managedFields``. The store is a server of S3 in memory that waits
before each answer. Each command is a new process, so its seconds contain Python's start and imports. The aims are 2 s
and 2 MB for each command on the cluster, and 3 s for ``runs`` of the store. Needs helm (``.ci/tools``).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_agent.cluster.rayjobs import can_be_spread, task_name
from cuda_agent.cluster.submit import submission
from cuda_agent.compose import compose
from cuda_agent.pipeline.graph import ROWS
from tests.cluster.fake_api import FakeApi
from tests.deploy.charts import template

CHART = {"minio": {"enabled": True}, "mlflow": {"enabled": True}, "fullnameOverride": "cuda-agent"}
PODS = [("prepare", True), *((row.name, True) for row in ROWS), ("finish", True)]
STEPS = [*PODS, *((task_name(row.name), False) for row in ROWS if can_be_spread(row))]  # name, does it run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflows", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = on_a_cluster(options.workflows)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def on_a_cluster(count: int) -> dict[str, Any]:
    """Returns seconds, bytes and requests of each command in a namespace with ``count`` runs."""
    spec = next(one["spec"] for one in template(CHART) if "-cpu-" in one["metadata"]["name"])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, FakeApi() as api:
        for number in range(count):
            workflow = argos(f"run-{number:03}", spec, "Running" if number == 7 else "Succeeded")
            api.add("Workflow", **workflow)
            api.add("ConfigMap", f"run-{number:03}", workflow["labels"], data={"config.json": "{}"})
        found["bytes a Workflow"] = len(json.dumps(api.objects["workflows", "run-000"], separators=(",", ":")))
        where = os.environ | {"KUBECONFIG": str(api.kubeconfig(Path(folder)))}
        for command in (["runs"], ["watch", "run-003"], ["watch", "last"], ["cancel", "run-007"]):
            api.requests, api.sent = [], 0
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "cuda_agent.cli", *command, "--on", "fake"],
                capture_output=True, text=True, env=where,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            seconds = time.perf_counter() - began
            found[" ".join(command)] = {"seconds": seconds, "bytes": api.sent, "requests": len(api.requests)}
    return found


def argos(name: str, spec: dict[str, Any], phase: str) -> dict[str, Any]:
    """Returns a Workflow of the template ``spec``, as ``FakeApi.add`` takes it, after Argo's controller ran it."""
    sent = submission(compose(["experiment=smoke", f"run.name={name}"]), "cpu", "cuda-agent-cpu").workflow
    labels = sent["metadata"]["labels"] | {"workflows.argoproj.io/phase": phase}
    stored = {f"namespaced/cuda-agent-cpu/{one['name']}": one for one in spec["templates"]}
    status = {
        "phase": phase, "progress": "70/70", "startedAt": "2026-01-01T00:00:00Z",
        "nodes": {node["id"]: node for node in nodes(name)},
        "storedTemplates": stored, "storedWorkflowTemplateSpec": spec,
    }  # fmt: skip
    managed = [{"manager": "workflow-controller", "fieldsType": "FieldsV1", "fieldsV1": {"f:status": fields(status)}}]
    metadata = {"annotations": sent["metadata"]["annotations"], "managedFields": managed}
    return {"name": name, "labels": labels, "metadata": metadata, "spec": sent["spec"], "status": status}


def nodes(workflow: str) -> list[dict[str, Any]]:
    """Returns Argo's nodes of a run: the graph, for each step that runs the step and its pod, and the skipped steps."""
    servers = f"http://{workflow}-build-0.{workflow}-sandbox:8750,http://{workflow}-evaluate-0.{workflow}-sandbox:8750"
    inputs = {"parameters": [{"name": "servers", "value": servers}, {"name": "engines", "value": ""}]}
    made = [{"id": workflow, "name": workflow, "displayName": workflow, "type": "DAG", "phase": "Succeeded"}]
    for number, (step, runs) in enumerate(STEPS):
        common = {
            "boundaryID": workflow, "children": [f"{workflow}-{10**9 + number}"], "templateName": step,
            "templateScope": f"namespaced/{workflow}", "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:00:05Z", "progress": "5/5", "nodeFlag": {},
            "resourcesDuration": {"cpu": 12, "ephemeral-storage": 0, "memory": 658},
        }  # fmt: skip
        kinds = [("Retry", "", 2 * 10**9), ("Pod", "(0)", 3 * 10**9)] if runs else [("Skipped", "", 2 * 10**9)]
        for kind, attempt, base in kinds:
            shown, phase = f"{step}{attempt}", "Succeeded" if runs else "Skipped"
            one = {"id": f"{workflow}-{base + number}", "name": f"{workflow}.{shown}", "displayName": shown}
            made.append(common | one | {"type": kind, "phase": phase, **({"inputs": inputs} if runs else {})})
    return made


def fields(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``fieldsV1`` with which the API server records who set ``value``.  A list counts as one field."""
    owned = {f"f:{key}": fields(inner) if isinstance(inner, dict) else {} for key, inner in value.items()}
    return {".": {}, **owned}


if __name__ == "__main__":
    main()
