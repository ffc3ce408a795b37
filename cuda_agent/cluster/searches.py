"""Submits, follows and collects searches of `cuda-agent optimize` on a cluster, and brings their results.

A search has one or more Workflows, as a run has attempts: each has a ConfigMap of the same name with the order of the
search (its settings and the problem).  All carry the search's name as a label.  The result goes from the store to the
user by MLflow, as reports of runs do."""

import hashlib
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from cuda_agent.cluster import results, templates
from cuda_agent.cluster.api import Cluster, new_object
from cuda_agent.cluster.submit import (
    CONFIG_ANNOTATION,
    ENDED,
    RUN_NAME,
    Submission,
    next_attempt,
    phase,
    step_and_attempt,
)
from cuda_agent.cluster.templates import PROFILE_LABEL, SEARCH_LABEL, Template
from cuda_agent.errors import ConfigError
from cuda_agent.mlflow_api import Rest
from cuda_agent.pipeline.gc import YOUNG
from cuda_agent.storage import Store

EXPERIMENT, TAG = "cuda-agent-searches", "cuda-agent.search"  # in MLflow
_STATES = {
    "Pending": "waits", "Running": "running", "Succeeded": "done", "Failed": "failed", "Error": "failed",
}  # fmt: skip


def template_for(cluster: Cluster, profile: str, release: str | None, device: str) -> Template:
    """Returns the WorkflowTemplate with which searches are submitted to ``profile``.

    Raises:
        ClusterError: The namespace has no release that fits, or it lacks the profile.
        ConfigError: The release has no server for searches, or the profile's sandboxes have no GPU for ``device``."""
    run = templates.choose(cluster, profile, release)
    if not templates.templates(cluster, SEARCH_LABEL):
        raise ConfigError(f"Release {run.release} names no server of a language model: see search.server of the chart.")
    if device == "cuda" and run.gpus == "0":
        raise ConfigError(f"--device cuda: the sandboxes of profile {profile} have no GPUs. Use another --profile.")
    return templates.choose(cluster, f"search-{profile}", run.release, SEARCH_LABEL)


def new_name() -> str:
    return f"search-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def submission(search: str, workflow: str, profile: str, template: str, text: str) -> Submission:
    """Returns the Kubernetes objects of a Workflow of the search ``search``.  ``text`` is the order of the search."""
    sha256, labels = hashlib.sha256(text.encode()).hexdigest(), {SEARCH_LABEL: search, PROFILE_LABEL: profile}
    parameters = [{"name": "run", "value": search}, {"name": "config", "value": sha256}]
    spec = {"workflowTemplateRef": {"name": template}, "arguments": {"parameters": parameters}}
    made = new_object("Workflow", workflow, labels, spec=spec)
    config_map = new_object("ConfigMap", workflow, labels, immutable=True, data={"config.json": text})
    for item in (made, config_map):
        item["metadata"]["annotations"] = {CONFIG_ANNOTATION: sha256}
    return Submission(search, made, config_map)


def names(cluster: Cluster, search: str) -> list[str]:
    """Returns the names of the Workflows of a search, oldest first."""
    found = cluster.metadata("Workflow", f"{SEARCH_LABEL}={search}") if RUN_NAME.fullmatch(search) else []
    return [about["name"] for about in sorted(found, key=lambda about: (about["creationTimestamp"], about["name"]))]


def states(cluster: Cluster) -> dict[str, str]:
    """Returns search -> phase of its newest Workflow, oldest search first."""
    flows = sorted(cluster.metadata("Workflow", SEARCH_LABEL), key=lambda about: about["creationTimestamp"])
    cells = cluster.table("Workflow", SEARCH_LABEL) if flows else {}
    found = {}
    for about in flows:
        status = {"phase": cells.get(about["name"], {}).get("Status")}
        found[about["labels"][SEARCH_LABEL]] = phase({"metadata": about, "status": status})
    return found


def newest(cluster: Cluster, search: str) -> dict[str, Any] | None:
    """Returns the newest Workflow of the search with exactly this name, or None."""
    found = names(cluster, search)
    return cluster.find("Workflow", found[-1]) if found else None


def next_workflow(cluster: Cluster, search: str) -> str:
    """Returns the name of the next Workflow of a search that was submitted before."""
    return next_attempt(search, names(cluster, search))


def steps(workflow: dict[str, Any]) -> dict[str, str]:
    """Returns step -> state, for the steps that have begun.  A step that failed has its message after its state."""
    found: dict[str, str] = {}
    nodes = workflow.get("status", {}).get("nodes", {}).values()
    for node in sorted(nodes, key=lambda node: node.get("startedAt") or ""):
        if node.get("type") != "Pod":
            continue
        step, attempt = step_and_attempt(node["displayName"])
        state = _STATES.get(node.get("phase", ""), "waits")
        said = f": {node['message']}" if state == "failed" and node.get("message") else ""
        found[step] = f"{state}{said}" + (f" (try {attempt + 1})" if attempt > 0 else "")
    return found


def failure(workflow: dict[str, Any]) -> tuple[str, str]:
    """Returns (message, exit code) of the step that made the Workflow fail; the exit code may be empty."""
    nodes = workflow.get("status", {}).get("nodes", {}).values()
    failed = [node for node in nodes if node.get("type") == "Pod" and node.get("phase") in ENDED[1:]]
    for node in sorted(failed, key=lambda node: node.get("finishedAt") or "", reverse=True):
        return node.get("message", ""), str((node.get("outputs") or {}).get("exitCode", ""))
    return workflow.get("status", {}).get("message", ""), ""


def is_done(workflow: dict[str, Any]) -> bool:
    return phase(workflow) in ENDED


def leave(uri: str, search: str, folder: Path) -> None:
    """Copies the files in ``folder``, the result of a search, to the MLflow at ``uri``, in place of an older result.

    Raises:
        httpx.HTTPError: MLflow does not answer, or refuses."""
    api = Rest(uri)
    experiment = api.experiment(EXPERIMENT, None)
    older = api.find([experiment], TAG, search)
    row = api.create(experiment, {TAG: search, "mlflow.runName": search})
    api.upload(row.run_id, folder)
    api.end(row.run_id, "FINISHED")
    for one in older:  # last: there is always a result
        api.delete(one.run_id)


def fetch(cluster: Cluster, search: str, folder: Path) -> bool:
    """Writes the files of a search's result to ``folder``, and returns whether there is a result.

    Raises:
        ClusterError: MLflow does not answer.
        ConfigError: The release has no MLflow, or it refuses this user."""
    with results.mlflow(cluster) as server:
        api = Rest(server.address, seconds=60.0)
        rows = api.find(api.experiments(), TAG, search) if RUN_NAME.fullmatch(search) else []
        row = next((row.run_id for row in rows if row.status == "FINISHED"), None)
        if row is not None:
            results.save(api, row, api.files(row), folder)
        return row is not None


def collect(cluster: Cluster, store: Store, uri: str, days: float, dry_run: bool) -> list[str]:
    """Removes searches from the store and from the MLflow at ``uri`` (``off``: none), if nothing of them has changed in
    so many days and none of their Workflows is under way.  Returns their names; with ``dry_run`` removes nothing.  If
    MLflow does not answer, removes nothing and returns an empty list: the next collection tries again."""
    live = {search for search, state in states(cluster).items() if state not in ENDED}
    before = time.time() - max(days * 86400, YOUNG)
    old = {}
    for search in store.folders("searches"):
        sizes = store.sizes(f"searches/{search}")
        if sizes and search not in live and all(changed < before for _, changed in sizes.values()):
            old[search] = [*sizes]
    if dry_run:
        return [*old]
    try:
        if old and uri != "off":
            api = Rest(uri)
            experiments = api.experiments()
            for row in (row for search in old for row in api.find(experiments, TAG, search)):
                api.delete(row.run_id)
    except httpx.HTTPError:
        return []
    store.delete_all(key for keys in old.values() for key in keys)
    return [*old]
