"""Submits, resumes, stops and observes runs on a cluster.

A run has one or more attempts.  An attempt is an Argo Workflow, with a ConfigMap that holds the run's configuration.
All attempts carry the run's name as a label.  ``submit`` starts the first attempt.  When the last attempt has ended
without success, ``resume`` starts another one, which takes the results of finished stages from the store of
artifacts."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cuda_agent.cluster import rayjobs, run_pools
from cuda_agent.cluster.api import Cluster, ClusterError, new_object
from cuda_agent.cluster.pools import WORKFLOW_LABEL, owned_by, version_name
from cuda_agent.compose import freeze
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline.graph import ABSENT, ROWS, Stage
from cuda_agent.pipeline.local import StageView
from cuda_agent.pipeline.runs import choose, matching

RUN_LABEL, PROFILE_LABEL, SWEEP_LABEL = "cuda-agent.io/run", "cuda-agent.io/profile", "cuda-agent.io/sweep"
CONFIG_ANNOTATION, SUBMITTER_ANNOTATION = "cuda-agent.io/config", "cuda-agent.io/submitter"
RUN_NAME = re.compile(r"[a-z]([a-z0-9-]{0,34}[a-z0-9])?")  # also the name of a Service
ENDED = ("Succeeded", "Failed", "Error")
PATIENCE = 5.0  # seconds a pod may wait before its events are shown


@dataclass(frozen=True)
class Submission:
    """The Kubernetes objects of one attempt of the run named ``run``."""

    run: str
    workflow: dict[str, Any]
    config_map: dict[str, Any]


def submission(config: Config, profile: str, release: str, group: str = "") -> Submission:
    """Returns the Kubernetes objects of the first attempt of a new run.

    Args:
        config: The run's configuration; without ``run.name``, the run is named by time and the configuration's hash.
        profile: Name of a profile of the chart (settings for resources and node placement).
        release: Name of the Helm release.
        group: Argo runs one Workflow of this group at a time; empty: no group.

    Raises:
        ConfigError: The run's name cannot be the name of a Workflow."""
    text, sha256 = freeze(config)
    run = config.run.name or f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{sha256[:4]}"
    if not RUN_NAME.fullmatch(run):
        expected = "expected a letter and at most 35 more, digits or dashes, lower case"
        raise ConfigError(f"run.name: on a cluster, {expected}, got {run!r}.")
    labels = {RUN_LABEL: run, PROFILE_LABEL: profile} | ({SWEEP_LABEL: config.run.sweep} if config.run.sweep else {})
    return _submission(run, labels, text, sha256, template_name(release, profile), group)


def sweep_submissions(
    configs: Sequence[Config], profile: str, release: str, parallel: int | None = None
) -> list[Submission]:
    """Returns one submission for each configuration of a sweep.  Argo executes at most ``parallel`` of the sweep's runs
    at a time (None: no limit)."""
    return [
        submission(config, profile, release, f"{config.run.sweep}-group-{number % parallel + 1}" if parallel else "")
        for number, config in enumerate(configs)
    ]


def template_name(release: str, profile: str) -> str:
    return f"{release}-{profile}-{version_name()}"


def _submission(name: str, labels: dict[str, str], text: str, sha256: str, template: str, group: str) -> Submission:
    values = {"run": labels[RUN_LABEL], "config": sha256} | ({"group": group} if group else {})
    parameters = [{"name": key, "value": value} for key, value in values.items()]
    spec = {"workflowTemplateRef": {"name": template}, "arguments": {"parameters": parameters}}
    workflow = new_object("Workflow", name, labels, spec=spec)
    workflow["metadata"]["annotations"] = {CONFIG_ANNOTATION: sha256}
    config_map = new_object("ConfigMap", name, labels, immutable=True, data={"config.json": text})
    return Submission(labels[RUN_LABEL], workflow, config_map)


def submit(cluster: Cluster, *all_of_them: Submission) -> None:
    """Creates the Kubernetes objects of all submissions, with an annotation that names the user.  If one cannot be
    created, deletes those created before it.

    Raises:
        ClusterError: The cluster lacks the chart, or the profile in the package's version.  Or the user lacks a right,
            or a name is taken."""
    for template in {what.workflow["spec"]["workflowTemplateRef"]["name"] for what in all_of_them}:
        require_template(cluster, template)
    for what in all_of_them:
        cluster.create(what.workflow, dry_run=True)  # admission policies decide before any object exists
    submitter = cluster.user()
    made: list[str] = []
    try:
        for what in all_of_them:
            what.workflow["metadata"]["annotations"] |= {SUBMITTER_ANNOTATION: submitter} if submitter else {}
            owner = cluster.create(what.workflow)["metadata"]
            made.append(owner["name"])
            metadata = what.config_map["metadata"] | {"ownerReferences": [owned_by(owner["name"], owner["uid"])]}
            cluster.create(what.config_map | {"metadata": metadata})
    except BaseException:  # also an interrupt
        for name in made:
            cluster.delete("Workflow", name)
        raise


def require_template(cluster: Cluster, wanted: str) -> None:
    """Raises a ``ClusterError`` if the cluster has no WorkflowTemplate ``wanted``.  The message lists the existing
    templates."""
    if cluster.find("WorkflowTemplate", wanted) is not None:
        return
    try:
        there = sorted(item["metadata"]["name"] for item in cluster.all("WorkflowTemplate", PROFILE_LABEL))
    except ClusterError as error:
        if error.status != 404:
            raise
        text = f"{cluster.name} has no Argo Workflows (its kind WorkflowTemplate is unknown). Install it first."
        raise ClusterError(text, 404) from None
    where = f"namespace {cluster.namespace} of {cluster.name}"
    if not there:
        text = f"There is no chart of cuda-agent in {where}. helm install it there, or name another --namespace."
    else:
        text = (
            f"There is no template {wanted} in {where}; there are: {', '.join(there)}. A name is made of --release, "
            f"--profile and the chart's version, which must be that of this command ({version_name()})."
        )
    raise ClusterError(text, 404)


def workflows(cluster: Cluster, run: str | None = None) -> list[dict[str, Any]]:
    """Returns the Workflows of all runs, or only of ``run``, oldest first.  A run has a Workflow per attempt."""
    found = cluster.all("Workflow", f"{RUN_LABEL}={run}" if run else RUN_LABEL)
    return sorted(found, key=lambda item: (item["metadata"]["creationTimestamp"], item["metadata"]["name"]))


def find(cluster: Cluster, run: str) -> dict[str, Any]:
    """Returns the newest Workflow of a run.  ``run`` is the run's name, the start of its name, or the text ``last``,
    which means the newest run.

    Raises:
        ConfigError: No run or several runs match."""
    there = workflows(cluster)
    names = list(dict.fromkeys(run_of(item) for item in there))
    name = choose(names, run, f"namespace {cluster.namespace} of {cluster.name}")
    return next(item for item in reversed(there) if run_of(item) == name)


def known_name(cluster: Cluster, run: str) -> str:
    """Returns the full name of a run.  ``run`` is the run's name, the start of its name, or the text ``last``, which
    means the newest run.  If no Workflow matches a name, returns it unchanged, because MLflow may still have the run.

    Raises:
        ConfigError: Several runs match, or ``run`` is ``last`` and there is no run."""
    names = list(dict.fromkeys(run_of(item) for item in workflows(cluster)))
    if run != "last" and not matching(names, run):
        return run
    return choose(names, run, f"namespace {cluster.namespace} of {cluster.name}")


def run_of(workflow: dict[str, Any]) -> str:
    return workflow["metadata"]["labels"][RUN_LABEL]


def submitter_of(workflow: dict[str, Any]) -> str:
    """Returns the user who submitted this attempt of a run, or "" if that is unknown."""
    return str(workflow["metadata"].get("annotations", {}).get(SUBMITTER_ANNOTATION, ""))


def phase(workflow: dict[str, Any]) -> str:
    return workflow.get("status", {}).get("phase") or "Pending"


def resume(cluster: Cluster, run: str) -> Submission:
    """Submits and returns the next attempt of a run that has ended.

    Raises:
        ConfigError: The run has not ended yet, or it succeeded."""
    last = find(cluster, run)
    name, now = run_of(last), phase(last)
    if now not in ENDED:
        raise ConfigError(f"Run {name} is {now.lower()}. Cancel it first, or watch it.")
    if now == "Succeeded":
        raise ConfigError(f"Run {name} is done; there is nothing to go on with.")
    metadata, spec = last["metadata"], last["spec"]
    text = cluster.get("ConfigMap", metadata["name"])["data"]["config.json"]
    ours = (RUN_LABEL, PROFILE_LABEL, SWEEP_LABEL)
    labels = {key: value for key, value in metadata["labels"].items() if key in ours}
    profile = labels[PROFILE_LABEL]
    release = re.sub(rf"-{re.escape(profile)}-[0-9]+-.*$", "", spec["workflowTemplateRef"]["name"])
    given = {item["name"]: item["value"] for item in spec["arguments"]["parameters"]}
    attempt = next_attempt(name, [flow["metadata"]["name"] for flow in workflows(cluster, name)])
    template = template_name(release, profile)
    sha256 = metadata["annotations"][CONFIG_ANNOTATION]
    what = _submission(attempt, labels, text, sha256, template, given.get("group", ""))
    submit(cluster, what)
    return what


def next_attempt(run: str, taken: Iterable[str]) -> str:
    """Returns the name of the next Workflow of ``run``: RUN-r2, RUN-r3 and so on.  ``taken`` has the names of the run's
    existing Workflows.  The new number is one higher than the highest number in ``taken``.  Lower numbers are not
    filled again, although Argo removes old Workflows."""
    numbers = (name.removeprefix(f"{run}-r") for name in taken)
    return f"{run}-r{max((int(number) for number in numbers if number.isdigit()), default=1) + 1}"


def cancel(cluster: Cluster, run: str, now: bool) -> tuple[str, list[str]]:
    """Stops a run.  Returns the run's full name and the names of its running stages.

    If ``now`` is False, the stages first write a checkpoint, and then a step of the Workflow removes the run's servers.
    If ``now`` is True, the stages write no checkpoint, and this function removes the servers in place of that step.

    Raises:
        ConfigError: The run has ended, or no run or several runs match."""
    last = find(cluster, run)
    name = last["metadata"]["name"]
    if phase(last) in ENDED:
        raise ConfigError(f"Run {run_of(last)} has ended ({phase(last)}).")
    running = [view.name for view in views(last) if view.state == "running"]
    cluster.patch("Workflow", name, {"spec": {"shutdown": "Terminate" if now else "Stop"}})
    if now:
        run_pools.remove_pools(cluster, name, run_pools.SERVERS)
    return run_of(last), running


_STATES = {
    "Pending": "waiting", "Running": "running", "Succeeded": "done", "Skipped": "cached", "Omitted": "waiting",
    "Failed": "failed", "Error": "failed",
}  # fmt: skip


def views(workflow: dict[str, Any], rows: Sequence[Stage] = ROWS) -> list[StageView]:
    """Returns the state of each step of a Workflow, for the table that shows a run's progress.  The steps are
    ``prepare``, the stages in ``rows`` that the run's graph has, and ``finish``."""
    nodes = list(workflow.get("status", {}).get("nodes", {}).values())
    by_name = {node["displayName"]: node for node in nodes if node.get("type") != "Retry"}
    groups = {node["displayName"]: node for node in nodes if node.get("type") == "Retry"}
    absent = _absent(nodes)
    stages = [(stage.name, stage.weight) for stage in rows if stage.name not in absent]
    found = []
    for name, weight in [("prepare", 0.2), *stages, ("finish", 0.1)]:
        view = StageView(name, weight)
        found.append(view)
        task = rayjobs.task_name(name)  # replaces the plain step if the stage runs in several pods
        if task not in groups and by_name.get(task, {}).get("phase", "Skipped") in ("Skipped", "Omitted"):
            task = name
        attempts = [node for shown, node in by_name.items() if re.fullmatch(rf"{re.escape(task)}\(\d+\)", shown)]
        node = max(attempts, key=lambda node: int(node["displayName"][len(task) + 1 : -1]), default=by_name.get(task))
        if node is None:
            continue
        view.attempt = len(attempts)
        view.state = _STATES.get(node.get("phase", ""), "waiting")
        if view.state == "failed" and groups.get(task, {}).get("phase") == "Running":
            view.state = "retry"
        view.message = node.get("message", "") if view.state != "cached" else ""
        view.notes = [view.message] if view.message and view.state in ("waiting", "retry", "failed") else []
        view.seconds = _seconds(node)
        view.began = time.monotonic() - view.seconds
        done, _, total = node.get("progress", "").partition("/")
        if total.isdigit() and int(total) > 1:
            view.done, view.total, view.unit = int(done), int(total), "steps"
    return found


def _absent(nodes: Sequence[dict[str, Any]]) -> set[str]:
    """Returns the names of the stages that the run's graph leaves out.  The step ``prepare`` reports them when it ends.
    Before that, the result is empty."""
    outputs = [node.get("outputs") or {} for node in nodes if node["displayName"] == "prepare"]
    parameters = [item for output in outputs for item in output.get("parameters", [])]
    return {item["name"] for item in parameters if item.get("value") == ABSENT}


def explain(cluster: Cluster, workflow: dict[str, Any], shown: Sequence[StageView]) -> None:
    """Writes into the notes of waiting stages why they wait.  Looks only at stages in ``shown`` that have waited for
    more than ``PATIENCE`` seconds.  The reason is the message of a Kubernetes event that reports a failure of the
    stage's pod; without such an event, the notes stay unchanged."""
    waiting = {view.name: view for view in shown if view.state == "waiting" and view.seconds > PATIENCE}
    if not waiting:
        return
    pod = re.compile(rf"{re.escape(workflow['metadata']['name'])}-(.+)-\d+")
    for event in cluster.all("Event"):
        of = pod.fullmatch(event["involvedObject"].get("name", ""))
        view = waiting.get(rayjobs.stage_name(of[1])) if of else None
        if view and event.get("type") == "Warning" and event.get("reason", "").startswith("Failed"):
            view.notes = [view.message, event.get("message", "")]


def _seconds(node: dict[str, Any]) -> float:
    if not node.get("startedAt"):
        return 0.0
    began = datetime.fromisoformat(node["startedAt"])
    ended = datetime.fromisoformat(node["finishedAt"]) if node.get("finishedAt") else datetime.now(UTC)
    return max(0.0, (ended - began).total_seconds())


def pods_of(cluster: Cluster, run: str) -> dict[str, str]:
    """Returns stage -> name of the stage's newest pod, for all stages with a pod in the run's newest Workflow."""
    found = {}
    newest = [item["metadata"]["name"] for item in workflows(cluster, run)][-1:]
    pods = [pod["metadata"] for name in newest for pod in cluster.all("Pod", f"{WORKFLOW_LABEL}={name}")]
    for pod in sorted(pods, key=lambda pod: pod["creationTimestamp"]):
        node = pod.get("annotations", {}).get("workflows.argoproj.io/node-name", "")
        task = re.sub(r"\(\d+\)$", "", node.rsplit(".", 1)[-1])
        found[rayjobs.stage_name(task)] = pod["name"]
    return found
