"""What a person asks to be done inside of a cluster: a Workflow of one pod, made from the chart's template for it.

The person needs a submitter's rights and nothing else: what the pod may do is in the template.  Its answer comes back
as an output parameter, so Argo's own way of reporting is tried as well, and the Workflow is removed.

What it does not cover: what the pods do (``pod_errands``).
"""

import contextlib
import json
import secrets
import time
from typing import Any

from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.cluster.submit import ENDED, phase, require_template, template_name

ERRAND_LABEL = "cuda-agent.io/errand"
START_SECONDS = 180.0  # until its pod runs
EVERY = 0.5  # seconds between two looks


def ask(cluster: Cluster, release: str, errand: str) -> Any:
    """The answer of ``doctor``, ``gc`` or ``gc-plan``.  Raises ``ClusterError`` when there is none."""
    template = template_name(release, errand)
    require_template(cluster, template)
    name = f"{errand}-{secrets.token_hex(4)}"
    cluster.create(
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"name": name, "labels": {ERRAND_LABEL: errand}},
            "spec": {"workflowTemplateRef": {"name": template}},
        }
    )
    try:
        return _answer(cluster, name, errand)
    finally:
        with contextlib.suppress(ClusterError):
            cluster.delete("Workflow", name)


def _answer(cluster: Cluster, name: str, errand: str) -> Any:
    deadline = time.monotonic() + START_SECONDS
    while True:
        workflow = cluster.get("Workflow", name)
        nodes = [*workflow.get("status", {}).get("nodes", {}).values()]
        if phase(workflow) in ENDED:
            break
        if time.monotonic() > deadline and not any(node.get("phase") == "Running" for node in nodes):
            said = "; ".join(node["message"] for node in nodes if node.get("message"))
            raise ClusterError(
                f"The pod of {errand} did not start in {START_SECONDS:.0f} s"
                + (f": {said}" if said else ". Does Argo watch this namespace, and is there room?")
            )
        time.sleep(EVERY)
    for node in nodes:
        for parameter in node.get("outputs", {}).get("parameters", []):
            if parameter["name"] == "answer":
                return json.loads(parameter["value"])
    said = workflow["status"].get("message") or next((n["message"] for n in nodes if n.get("message")), "no message")
    raise ClusterError(f"{errand} ended without an answer: {said}{_last_words(cluster, name)}")


def _last_words(cluster: Cluster, name: str) -> str:
    with contextlib.suppress(ClusterError):
        for pod in cluster.all("Pod", f"workflows.argoproj.io/workflow={name}"):
            return "".join(f"\n  | {line[:160]}" for line in [*cluster.logs(pod["metadata"]["name"])][-8:])
    return ""
