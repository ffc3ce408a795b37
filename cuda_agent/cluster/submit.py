"""Submits, resumes, stops and observes runs on a cluster.

A run has one or more attempts.  An attempt is an Argo Workflow, with a ConfigMap that holds the run's configuration.
All attempts carry the run's name as a label.  ``submit`` starts the first attempt.  When the last attempt has ended
without success, ``resume`` starts another one, which takes the results of finished stages from the store of
artifacts.  A Workflow has 170 KB, so lists of runs are lists of summaries: metadata, phase and message."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cuda_agent.cluster import rayjobs, run_pools, templates, waiting
from cuda_agent.cluster.api import Cluster, new_object
from cuda_agent.cluster.pools import POOL_LABEL, ROLE_LABEL, WORKFLOW_LABEL, owned_by
from cuda_agent.cluster.templates import PROFILE_LABEL, SCHEDULED_LABEL
from cuda_agent.compose import freeze
from cuda_agent.config import Config
from cuda_agent.errors import EXIT_BUDGET, EXIT_BUG, EXIT_CONFIG, EXIT_DONE, EXIT_GATE, EXIT_RETRY, ConfigError
from cuda_agent.pipeline.graph import ABSENT, ROWS, Stage
from cuda_agent.pipeline.local import StageView
from cuda_agent.pipeline.runs import choose, matching

RUN_LABEL, SWEEP_LABEL = "cuda-agent.io/run", "cuda-agent.io/sweep"
STOPPED_LABEL = "cuda-agent.io/stopped"  # of a Workflow that was stopped before its first pod: Argo says "Succeeded"
CONFIG_ANNOTATION, SUBMITTER_ANNOTATION = "cuda-agent.io/config", "cuda-agent.io/submitter"
RUN_NAME = re.compile(r"[a-z]([a-z0-9-]{0,34}[a-z0-9])?")  # also the name of a Service
ENDED = ("Succeeded", "Failed", "Error")
PATIENCE = 5.0  # seconds a step may wait for pods before the reason is looked up


@dataclass(frozen=True)
class Submission:
    """The Kubernetes objects of one attempt of the run named ``run``."""

    run: str
    workflow: dict[str, Any]
    config_map: dict[str, Any]


def submission(config: Config, profile: str, template: str, group: str = "") -> Submission:
    """Returns the Kubernetes objects of the first attempt of a new run.

    Args:
        config: The run's configuration; without ``run.name``, the run is named by time and the configuration's hash.
        profile: Name of a profile of the chart (settings for resources and node placement).
        template: Name of the profile's WorkflowTemplate (see ``template_for``).
        group: Argo runs one Workflow of this group at a time; empty: no group.

    Raises:
        ConfigError: The run's name cannot be the name of a Workflow."""
    text, sha256 = freeze(config)
    run = config.run.name or f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{sha256[:4]}"
    if not RUN_NAME.fullmatch(run):
        expected = "expected a letter and at most 35 more, digits or dashes, lower case"
        raise ConfigError(f"run.name: on a cluster, {expected}, got {run!r}.")
    labels = {RUN_LABEL: run, PROFILE_LABEL: profile} | ({SWEEP_LABEL: config.run.sweep} if config.run.sweep else {})
    return _submission(run, labels, text, sha256, template, group)


def sweep_submissions(
    configs: Sequence[Config], profile: str, template: str, parallel: int | None = None
) -> list[Submission]:
    """Returns one submission for each configuration of a sweep.  Argo executes at most ``parallel`` of the sweep's runs
    at a time (None: no limit)."""
    return [
        submission(config, profile, template, f"{config.run.sweep}-group-{number % parallel + 1}" if parallel else "")
        for number, config in enumerate(configs)
    ]


def template_for(cluster: Cluster, profile: str, release: str | None, configs: Sequence[Config]) -> str:
    """Returns the name of the WorkflowTemplate with which runs of ``configs`` are submitted to ``profile``.

    Args:
        cluster: The cluster.
        profile: Name of a profile of the chart.
        release: Name of the Helm release; None: the only one of the namespace.
        configs: The runs' configurations.

    Raises:
        ClusterError: The namespace has no such template.
        ConfigError: A configuration judges on GPUs, and the profile's sandboxes have none."""
    chosen = templates.choose(cluster, profile, release)
    if chosen.gpus == "0" and any(config.sandbox.device == "cuda" for config in configs):
        others = sorted(one.job for one in templates.of_release(cluster, chosen.release) if one.gpus not in ("", "0"))
        helps = f"Use --profile {' or '.join(others)}" if others else "Add one to the chart"
        raise ConfigError(f"sandbox.device=cuda: the sandboxes of profile {profile} have no GPUs. {helps}.")
    return chosen.name


def _submission(name: str, labels: dict[str, str], text: str, sha256: str, template: str, group: str) -> Submission:
    values = {"run": labels[RUN_LABEL], "config": sha256} | ({"group": group} if group else {})
    parameters = [{"name": key, "value": value} for key, value in values.items()]
    spec = {"workflowTemplateRef": {"name": template}, "arguments": {"parameters": parameters}}
    workflow = new_object("Workflow", name, labels, spec=spec)
    workflow["metadata"]["annotations"] = {CONFIG_ANNOTATION: sha256}
    config_map = new_object("ConfigMap", name, labels, immutable=True, data={"config.json": text})
    config_map["metadata"]["annotations"] = {CONFIG_ANNOTATION: sha256}
    return Submission(labels[RUN_LABEL], workflow, config_map)


def submit(cluster: Cluster, *all_of_them: Submission) -> None:
    """Creates the Kubernetes objects of all submissions, with an annotation that names the user.  If one cannot be
    created, deletes those created before it.

    Raises:
        ClusterError: The user lacks a right, or a name is taken."""
    for what in all_of_them:
        cluster.create(what.workflow, dry_run=True)  # admission policies decide before any object exists
    named = {SUBMITTER_ANNOTATION: user} if (user := cluster.user()) else {}
    made: list[str] = []
    try:
        for what in all_of_them:
            for item in (what.workflow, what.config_map):
                item["metadata"]["annotations"] |= named
            owner = cluster.create(what.workflow)["metadata"]
            made.append(owner["name"])
            metadata = what.config_map["metadata"] | {"ownerReferences": [owned_by(owner["name"], owner["uid"])]}
            cluster.create(what.config_map | {"metadata": metadata})
    except BaseException:  # also an interrupt
        for name in made:
            cluster.delete("Workflow", name)
        raise


def workflows(cluster: Cluster, run: str = "", sweep: str = "") -> list[dict[str, Any]]:
    """Returns summaries of the Workflows of all runs, oldest first, or only of ``run`` or of ``sweep``.  A run has a
    Workflow per attempt.  A summary has the metadata of the Workflow's ConfigMap, which has the same name and labels
    and is a hundredth as large, and of the Workflow's status ``phase`` and ``message``.  A Workflow that a schedule
    made has no ConfigMap: its summary has its own metadata."""
    selector = f"{RUN_LABEL}={run}" if run else f"{SWEEP_LABEL}={sweep}" if sweep else RUN_LABEL
    printed, made = cluster.table("Workflow", selector), cluster.metadata("ConfigMap", selector)
    if not sweep and not (run and made):
        scheduled = [about for about in cluster.metadata("Workflow", SCHEDULED_LABEL) if run in ("", about["name"])]
        printed |= cluster.table("Workflow", SCHEDULED_LABEL) if scheduled else {}
        made = made + [about | {"labels": about["labels"] | {RUN_LABEL: about["name"]}} for about in scheduled]
    found = [
        {"metadata": about, "status": {key: printed[about["name"]].get(name) or "" for key, name in _PRINTED}}
        for about in made
        if about["name"] in printed
    ]
    never_began = {about["name"] for about in cluster.metadata("Workflow", f"{selector},{STOPPED_LABEL}")}
    for item in found:
        if item["metadata"]["name"] in never_began and item["status"]["phase"] == "Succeeded":
            item["status"] |= {"phase": "Failed", "message": "stopped before it began"}
    return sorted(found, key=lambda item: (item["metadata"]["creationTimestamp"], item["metadata"]["name"]))


_PRINTED = (("phase", "Status"), ("message", "Message"))  # columns of `kubectl get workflows`


def find(cluster: Cluster, run: str) -> dict[str, Any]:
    """Returns the summary of the newest Workflow of a run.  ``run`` is the run's name, the start of its name, or the
    text ``last``, which means the newest run.

    Raises:
        ConfigError: No run or several runs match.
        ClusterError: There is no such namespace."""
    if (there := _attempts(cluster, run)) == []:
        there = workflows(cluster)
    if not there:
        templates.require_namespace(cluster)
    names = list(dict.fromkeys(run_of(item) for item in there))
    name = choose(names, run, f"namespace {cluster.namespace} of {cluster.name}")
    return next(item for item in reversed(there) if run_of(item) == name)


def _attempts(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    """Returns the Workflows of the run with exactly this name."""
    return workflows(cluster, run) if run != "last" and RUN_NAME.fullmatch(run) else []


def newest_of(cluster: Cluster, sweep: str) -> list[dict[str, Any]]:
    """Returns the summary of the newest Workflow of each run of a sweep.

    Raises:
        ConfigError: There is no such sweep."""
    found = {run_of(item): item for item in workflows(cluster, sweep=sweep)} if RUN_NAME.fullmatch(sweep) else {}
    if not found:
        templates.require_namespace(cluster)
        raise ConfigError(f"sweep {sweep}: there is none in namespace {cluster.namespace} of {cluster.name}.")
    return list(found.values())


def known_name(cluster: Cluster, run: str) -> str:
    """Returns the full name of a run.  ``run`` is the run's name, the start of its name, or the text ``last``, which
    means the newest run.  If no Workflow matches a name, returns it unchanged, because MLflow may still have the run.

    Raises:
        ConfigError: Several runs match, or ``run`` is ``last`` and there is no run.
        ClusterError: There is no such namespace."""
    if _attempts(cluster, run):
        return run
    names = list(dict.fromkeys(run_of(item) for item in workflows(cluster)))
    if not names:
        templates.require_namespace(cluster)
    if run != "last" and not matching(names, run):
        return run
    return choose(names, run, f"namespace {cluster.namespace} of {cluster.name}")


def run_of(workflow: dict[str, Any]) -> str:
    return workflow["metadata"]["labels"][RUN_LABEL]


def submitter_of(workflow: dict[str, Any]) -> str:
    """Returns the user who submitted this attempt of a run, or "" if that is unknown.  A summary suffices."""
    return str(workflow["metadata"].get("annotations", {}).get(SUBMITTER_ANNOTATION, ""))


def phase(workflow: dict[str, Any]) -> str:
    found = workflow.get("status", {}).get("phase") or "Pending"
    never_began = STOPPED_LABEL in workflow.get("metadata", {}).get("labels", {})
    return "Failed" if found == "Succeeded" and never_began else found


def step_and_attempt(name: str) -> tuple[str, int]:
    """Returns (step, number of the attempt) from the name of a Workflow's node.  Argo names the attempts of a step
    ``STEP(0)``, ``STEP(1)`` and so on.  A name without a number has the number -1."""
    step, _, number = re.fullmatch(r"(.*?)(\((\d+)\))?", name).groups()  # type: ignore[union-attr]
    return step, -1 if number is None else int(number)


def exit_code(workflow: dict[str, Any]) -> int:
    """Returns the exit code of a run that has ended: 0, 75 if it was stopped, otherwise that of the step that failed,
    in its last attempt.  A step that was killed, or left no exit code, counts as a bug."""
    if phase(workflow) == "Succeeded":
        return EXIT_DONE
    if workflow["spec"].get("shutdown"):
        return EXIT_RETRY
    nodes = workflow.get("status", {}).get("nodes", {}).values()
    last = {}  # step -> its last attempt
    for node in sorted(nodes, key=lambda node: node.get("startedAt") or ""):
        if node.get("type") == "Pod":
            last[step_and_attempt(node.get("displayName", ""))[0]] = node
    failed = [node for node in last.values() if node.get("phase") == "Failed"]
    codes = {str((node.get("outputs") or {}).get("exitCode")) for node in failed}
    final = next((code for code in (EXIT_CONFIG, EXIT_GATE, EXIT_BUDGET) if str(code) in codes), EXIT_BUG)
    return EXIT_RETRY if codes == {str(EXIT_RETRY)} else final


def resume(cluster: Cluster, last: dict[str, Any]) -> Submission:
    """Submits and returns the next attempt of a run.  ``last`` is its newest Workflow, of which a summary suffices.

    Raises:
        ConfigError: The run has not ended yet, or it succeeded.
        ClusterError: The chart has no template for the run any more."""
    name, now = run_of(last), phase(last)
    if now not in ENDED:
        raise ConfigError(f"Run {name} is {now.lower()}. Cancel it first, or watch it.")
    if now == "Succeeded":
        raise ConfigError(f"Run {name} is done; there is nothing to go on with.")
    metadata = last["metadata"]
    if SCHEDULED_LABEL in metadata["labels"]:
        raise ConfigError(f"Run {name} was started by a schedule. Submit its configuration as a new run to go on.")
    spec = cluster.get("Workflow", metadata["name"])["spec"]
    text = cluster.get("ConfigMap", metadata["name"])["data"]["config.json"]
    ours = (RUN_LABEL, PROFILE_LABEL, SWEEP_LABEL)
    labels = {key: value for key, value in metadata["labels"].items() if key in ours}
    profile = labels[PROFILE_LABEL]
    release = re.sub(rf"-{re.escape(profile)}-[0-9]+-.*$", "", spec["workflowTemplateRef"]["name"])
    given = {item["name"]: item["value"] for item in spec["arguments"]["parameters"]}
    attempt = next_attempt(name, [flow["metadata"]["name"] for flow in workflows(cluster, name)])
    template = templates.choose(cluster, profile, release).name
    sha256 = given["config"]
    what = _submission(attempt, labels, text, sha256, template, given.get("group", ""))
    submit(cluster, what)
    return what


def next_attempt(run: str, taken: Iterable[str]) -> str:
    """Returns the name of the next Workflow of ``run``: RUN-r2, RUN-r3 and so on.  ``taken`` has the names of the run's
    existing Workflows.  The new number is one higher than the highest number in ``taken``.  Lower numbers are not
    filled again, although Argo removes old Workflows."""
    numbers = (name.removeprefix(f"{run}-r") for name in taken)
    return f"{run}-r{max((int(number) for number in numbers if number.isdigit()), default=1) + 1}"


def cancel(cluster: Cluster, last: dict[str, Any], now: bool) -> list[str]:
    """Stops a run, and returns the names of its running stages.  ``last`` is the run's newest Workflow, of which a
    summary suffices.

    If ``now`` is False, the stages first write a checkpoint, and then a step of the Workflow removes the run's servers.
    If ``now`` is True, the stages write no checkpoint, and this function removes the servers in place of that step.
    A run that waits for its turn ends at once.

    Raises:
        ConfigError: The run has ended."""
    name = last["metadata"]["name"]
    if phase(last) in ENDED:
        raise ConfigError(f"{name} has ended ({phase(last)}).")
    waits = phase(last) == "Pending"
    change: dict[str, Any] = {"spec": {"shutdown": "Terminate" if now or waits else "Stop"}}
    if waits:
        change["metadata"] = {"labels": {STOPPED_LABEL: "yes"}}
    stopped = cluster.patch("Workflow", name, change)
    if now or waits:
        run_pools.remove_pools(cluster, name, run_pools.SERVERS)
    return [view.name for view in views(stopped) if view.state == "running"]


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
        attempts = [shown for shown in by_name if step_and_attempt(shown)[0] == task and shown != task]
        node = by_name.get(max(attempts, key=step_and_attempt, default=task))
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


def delays(cluster: Cluster, workflow: dict[str, Any], shown: Sequence[StageView]) -> dict[str, tuple[str, bool]]:
    """Returns why steps wait for pods: step -> (reason, whether only a person can help).

    A Workflow that has not begun may wait for its turn.  Otherwise looks at the pods of waiting steps, and for
    ``prepare``, while it runs, at the run's sandbox servers.  Looks only at steps in ``shown`` that have taken more
    than ``PATIENCE`` seconds."""
    name, found = workflow["metadata"]["name"], {}
    if turn := _turn(workflow):
        return {"prepare": (turn, False)}
    slow = {view.name for view in shown if view.state == "waiting" and view.seconds > PATIENCE}
    if slow:
        pods = cluster.all("Pod", f"{WORKFLOW_LABEL}={name}", "status.phase=Pending")
        for stage, pod in ((_stage_of(pod["metadata"]), pod) for pod in pods):
            if stage in slow:
                found[stage] = waiting.why(cluster, [pod], ""), waiting.is_hopeless([pod])
    if any(view.name == "prepare" and view.state == "running" and view.seconds > PATIENCE for view in shown):
        reasons = []
        for server in cluster.all("StatefulSet", f"{POOL_LABEL}={name},{ROLE_LABEL}"):
            if not server.get("status", {}).get("readyReplicas"):
                about = server["metadata"]
                pods = cluster.all("Pod", f"{POOL_LABEL}={name},{ROLE_LABEL}={about['labels'][ROLE_LABEL]}")
                why = waiting.why(cluster, pods, about["name"])
                reasons.append((f"{about['name']}: {why}", waiting.is_hopeless(pods)))
        if reasons:
            texts, hopeless = zip(*reasons, strict=True)
            found["prepare"] = "; ".join(texts), any(hopeless)
    return found


def _turn(workflow: dict[str, Any]) -> str:
    """Returns for which other Workflows this one waits before its first pod; empty: for none."""
    locks = workflow.get("status", {}).get("synchronization") or {}
    for kind, what in (("semaphore", "runs of its profile"), ("mutex", "run of its sweep")):
        for lock in (locks.get(kind) or {}).get("waiting") or ():
            holders = lock.get("holders") or [lock.get("holder", "")]
            names = ", ".join(sorted(one.rsplit("/", 1)[-1] for one in holders))
            return f"waits for its turn behind the {what}: {names}"
    return ""


def _stage_of(pod: dict[str, Any]) -> str:
    """Returns the name of the step to which a pod of a Workflow belongs.  ``pod`` is the pod's metadata."""
    node = pod.get("annotations", {}).get("workflows.argoproj.io/node-name", "")
    return rayjobs.stage_name(step_and_attempt(node.rsplit(".", 1)[-1])[0])


def _seconds(node: dict[str, Any]) -> float:
    if not node.get("startedAt"):
        return 0.0
    began = datetime.fromisoformat(node["startedAt"])
    ended = datetime.fromisoformat(node["finishedAt"]) if node.get("finishedAt") else datetime.now(UTC)
    return max(0.0, (ended - began).total_seconds())


def pods_of(cluster: Cluster, run: str) -> dict[str, str]:
    """Returns stage -> name of the stage's newest pod, for all stages with a pod in the run's newest Workflow."""
    newest = [item["metadata"]["name"] for item in workflows(cluster, run)][-1:]
    pods = [pod for name in newest for pod in cluster.metadata("Pod", f"{WORKFLOW_LABEL}={name}")]
    return {_stage_of(pod): pod["name"] for pod in sorted(pods, key=lambda pod: pod["creationTimestamp"])}
