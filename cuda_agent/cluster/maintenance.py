"""Runs a maintenance job (``doctor``, ``gc``, ``gc-plan``, ``pin``, ``unpin``) on a cluster and returns its answer.

``doctor`` runs checks in a pod of the cluster, ``gc`` removes old runs, ``gc-plan`` lists what ``gc`` would remove, and
``pin`` and ``unpin`` say which runs ``gc`` keeps.

A job is an Argo Workflow with one pod.  The pod does the work with the functions of ``pod_maintenance``.  It has the
rights of a service account that the Helm chart creates, so the user needs no such rights, only the right to submit
Workflows.  The job's answer is an output parameter of the Workflow."""

import contextlib
import json
import secrets
import time
from typing import Any

from cuda_agent.cluster.api import AWAY, Cluster, ClusterError, new_object
from cuda_agent.cluster.submit import ENDED, phase
from cuda_agent.cluster.templates import JOB_LABEL, choose
from cuda_agent.errors import EXIT_RETRY

START_SECONDS = 180.0  # longest wait for the job's pod to start
EVERY = 0.5  # seconds between two queries


def ask(cluster: Cluster, release: str | None, job: str, run: str = "") -> Any:
    """Runs the maintenance job ``job`` of the Helm release ``release`` (None: the only one of the namespace), and
    returns its answer, parsed from JSON.  ``run`` is the name of a run, if the job needs one.

    Raises:
        ClusterError: The job could not start, failed, or gave no answer."""
    template = choose(cluster, job, release, JOB_LABEL).name
    name = f"{job}-{secrets.token_hex(4)}"
    spec: dict[str, Any] = {"workflowTemplateRef": {"name": template}}
    if run:
        spec["arguments"] = {"parameters": [{"name": "run", "value": run}]}
    cluster.create(new_object("Workflow", name, {JOB_LABEL: job}, spec=spec))
    try:
        return _answer(cluster, name, job)
    finally:
        with contextlib.suppress(ClusterError):
            cluster.delete("Workflow", name)


def _answer(cluster: Cluster, name: str, job: str) -> Any:
    heard = time.monotonic()
    deadline = heard + START_SECONDS
    while True:
        try:
            workflow = cluster.get("Workflow", name)
            heard = time.monotonic()
        except ClusterError as error:  # the job itself continues while the API server restarts
            if error.exit_code != EXIT_RETRY or time.monotonic() - heard > AWAY:
                raise
            time.sleep(EVERY)
            continue
        nodes = [*workflow.get("status", {}).get("nodes", {}).values()]
        if phase(workflow) in ENDED:
            break
        if time.monotonic() > deadline and not any(node.get("phase") == "Running" for node in nodes):
            said = "; ".join(node["message"] for node in nodes if node.get("message"))
            raise ClusterError(
                f"The pod of {job} did not start in {START_SECONDS:.0f} s"
                + (f": {said}" if said else ". Does Argo watch this namespace, and is there room?")
            )
        time.sleep(EVERY)
    outputs = [parameter for node in nodes for parameter in node.get("outputs", {}).get("parameters", [])]
    for parameter in outputs:
        if parameter["name"] == "answer":
            return json.loads(parameter["value"])
    said = workflow["status"].get("message") or next((n["message"] for n in nodes if n.get("message")), "no message")
    raise ClusterError(f"{job} ended without an answer: {said}{_last_lines(cluster, name)}")


def _last_lines(cluster: Cluster, name: str) -> str:
    with contextlib.suppress(ClusterError):
        for pod in cluster.all("Pod", f"workflows.argoproj.io/workflow={name}"):
            return "".join(f"\n  | {line[:160]}" for line in [*cluster.logs(pod["metadata"]["name"])][-8:])
    return ""
