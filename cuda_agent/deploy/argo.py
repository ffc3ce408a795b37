"""Renders the graph of stages as an Argo ``WorkflowTemplate`` (Argo 3.7 and 4.x), validated by the library Hera.

    prepare ─► one task per stage ─► finish;  after a failure, the exit hook runs finish

A search of `cuda-agent optimize` has a separate, smaller template.

One template serves every variant of the graph, such as the one without the stage ``critic``.  The task ``prepare``
decides which stages run.  It skips a stage that the run's variant leaves out, or whose result is cached.  A stage that
can run on Ray has two tasks: one runs the stage in a single pod, the other in several pods.  ``prepare`` chooses one
of them.  The task ``finish`` removes the run's sandbox and vLLM servers, and records how the run ended.  The Helm
chart makes a copy of the template for each profile (the resources and placement of a run's pods)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hera.workflows import models
from pydantic import BaseModel

from cuda_agent.cluster import pools
from cuda_agent.cluster.pools import version_name
from cuda_agent.cluster.rayjobs import DAY, can_be_spread, task_name
from cuda_agent.cluster.templates import SCHEDULED_LABEL
from cuda_agent.pipeline.graph import ROWS, Stage, check
from cuda_agent.pipeline.locks import COLLECTION_SECONDS

NAME = "cuda-agent"  # prefix of a release's objects; the chart replaces it by the release's name
RUN, CONFIG, WORKFLOW = "{{workflow.parameters.run}}", "{{workflow.parameters.config}}", "{{workflow.name}}"
# One Workflow of a concurrency group runs at a time, the oldest first (a sweep's limit).  By default a group holds one.
CONCURRENCY_GROUP = "{{=workflow.parameters.group == '' ? workflow.name : workflow.parameters.group}}"
CONFIG_FOLDER = "/config"  # where prepare finds the configuration that came with the Workflow
PLAN_FOLDER = "/scratch/plan"  # where prepare writes one file per output parameter
MANIFEST_FILE = "/scratch/manifest.json"  # where a stage leaves its manifest for Argo
OF_THE_RUN = ["--run", RUN, "--config", CONFIG, "--workflow", WORKFLOW]
# Output parameter of prepare for a run's servers, and the environment variable that passes it to the stages.
PLACES = {"servers": "CUDA_AGENT_SANDBOX_SERVERS", "engines": "CUDA_AGENT_ENGINE_SERVERS"}
GRACE = 120  # seconds from SIGTERM to SIGKILL: a checkpoint must fit

# The ends of a pod that are retried.  The exit code decides, because Argo reports the same preemption as Failed
# or Error ("-1": there is no exit code, the pod or its node is gone).  A deadline is not a preemption, though its
# exit code looks like one.  An out-of-memory kill is retried once, because other pods may have caused it.
RETRY = (
    "!(lastRetry.message matches '(?i)deadline') && (lastRetry.message matches 'OOMKilled' ? retries == '0' : "
    "(lastRetry.status == 'Error' || lastRetry.exitCode in ['75', '137', '143', '-1']))"
)

BACKOFF = {"duration": "10s", "factor": 3, "cap": "10m"}

EXECUTOR_RESOURCES = {
    "requests": {"cpu": "10m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
    "limits": {"cpu": "500m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
}


def workflow_template(stages: Sequence[Stage] = ROWS) -> dict[str, Any]:
    """Returns the WorkflowTemplate for a run of ``stages``.  The Helm chart later adds the images, resources and
    further settings."""
    check(stages)
    finish = ["pod", "finish", *OF_THE_RUN, "--status", "{{workflow.status}}"]
    # The exit hook removes the run's pools after a failure; after a success the graph's finish task does.
    unless_finished = {"name": "finish", "template": "finish", "when": "{{workflow.status}} != Succeeded"}
    templates = [
        {"name": "run", "dag": {"tasks": _tasks(stages)}},
        _prepare(stages),
        *map(_stage, stages),
        *(_spread(stage) for stage in stages if can_be_spread(stage)),
        {"name": "exit", "steps": [[unless_finished]]},
        _pod("finish", "finish", finish, 900, account="operator"),
    ]
    return _template(
        f"{NAME}-{version_name()}",
        templates,
        hooks={"exit": {"template": "exit"}},
        arguments={"parameters": [{"name": "run"}, {"name": "config"}, {"name": "group", "value": ""}]},
        synchronization={"mutexes": [{"name": CONCURRENCY_GROUP}]},
    )


def maintenance_jobs() -> dict[str, dict[str, Any]]:
    """Returns the WorkflowTemplates of the maintenance jobs, by name: ``doctor`` checks the cluster, ``gc`` removes
    old runs, ``gc-plan`` lists what ``gc`` would remove, and ``pin`` and ``unpin`` say which runs ``gc`` keeps.  Each
    job runs in one pod, without retries."""
    jobs: tuple[tuple[str, str, int, list[str]], ...] = (  # name, account, seconds, arguments
        ("doctor", "operator", 900, ["doctor", "--workflow", WORKFLOW]),
        ("gc", "collector", COLLECTION_SECONDS, ["gc"]),
        ("gc-plan", "collector", 3600, ["gc", "--dry-run"]),
        ("pin", "collector", 900, ["pin", "--run", RUN]),
        ("unpin", "collector", 900, ["pin", "--run", RUN, "--remove"]),
    )
    made = {}
    for name, account, seconds, arguments in jobs:
        pod = _pod(name, "setup", ["pod", *arguments], seconds, account, outputs=_answers(["answer"]))
        del pod["retryStrategy"]
        of_run = {"arguments": {"parameters": [{"name": "run"}]}} if RUN in arguments else {}
        made[name] = _template(f"{NAME}-{name}-{version_name()}", [pod], **of_run)
    return made


def search_template() -> dict[str, Any]:
    """Returns the WorkflowTemplate for a search of `cuda-agent optimize`.

        prepare ─► begin ─► one pod for each player ─► end;  the exit hook runs finish

    The players are played side by side, and share the sandbox servers that ``prepare`` starts.  If the pod of a player
    fails, ``end`` still makes the result of what the others have found."""
    outputs = {name: f"{{{{tasks.prepare.outputs.parameters.{name}}}}}" for name in ("servers", "players")}

    def task(name: str, after: str, **more: Any) -> dict[str, Any]:
        given = {"servers": outputs["servers"], "what": name} | ({"player": "{{item}}"} if more else {})
        arguments = {"parameters": [{"name": key, "value": value} for key, value in given.items()]}
        return {"name": name, "template": "search", "depends": after, "arguments": arguments} | more

    tasks = [
        {"name": "prepare", "template": "prepare"},
        task("begin", "prepare"),
        task("player", "begin", withParam=outputs["players"]),
        task("end", "player.Succeeded || player.Failed || player.Errored"),
    ]
    prepare = ["pod", "search-prepare", *OF_THE_RUN]
    config: dict[str, Any] = {"volumes": [_CONFIG_VOLUME], "outputs": _answers(outputs)}
    play = ["pod", "search", "{{inputs.parameters.what}}", "--run", RUN, "--player", "{{inputs.parameters.player}}"]
    env = {
        PLACES["servers"]: "{{inputs.parameters.servers}}",
        "CUDA_AGENT_SANDBOX_TOKEN": pools.token_of(WORKFLOW, optional=True),
    }
    inputs = {"parameters": [{"name": "servers"}, {"name": "what"}, {"name": "player", "value": "0"}]}
    templates = [
        {"name": "run", "dag": {"tasks": tasks, "failFast": False}},
        _pod("prepare", "prepare", prepare, 1800, "operator", mounts=[_CONFIG_MOUNT], **config),
        _pod("search", "search", play, 7 * DAY, env=env, inputs=inputs),
        {"name": "exit", "steps": [[{"name": "finish", "template": "finish"}]]},
        _pod("finish", "finish", ["pod", "search-finish", "--workflow", WORKFLOW], 900, account="operator"),
    ]
    return _template(
        f"{NAME}-search-{version_name()}",
        templates,
        hooks={"exit": {"template": "exit"}},
        arguments={"parameters": [{"name": "run"}, {"name": "config"}]},
        synchronization={"mutexes": [{"name": f"search-{RUN}"}]},
    )


def cron_workflow() -> dict[str, Any]:
    """Returns a CronWorkflow that starts runs on a schedule.  The Helm chart sets the schedule, the time zone, the
    profile and the configuration.  The parameter ``run`` is empty, so each run gets the name of its Workflow."""
    spec = {
        "schedules": ["0 2 * * 6"],
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 3600,
        "successfulJobsHistoryLimit": 4,
        "failedJobsHistoryLimit": 4,
        "workflowMetadata": {"labels": {SCHEDULED_LABEL: "yes"}},
        "workflowSpec": {
            "workflowTemplateRef": {"name": f"{NAME}-{version_name()}"},
            "arguments": {"parameters": [{"name": "run", "value": ""}, {"name": "config", "value": ""}]},
        },
    }
    return _typed(models.CronWorkflow, "CronWorkflow", NAME, spec)


def _template(name: str, templates: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    # The patch sets what a template has no fields for: the grace period, and the security context and limits of the
    # executor's containers, which do not depend on the controller's settings then.
    executor = {"securityContext": pools.CONTAINER_SECURITY, "resources": EXECUTOR_RESOURCES}
    patch = {
        "terminationGracePeriodSeconds": 60,
        "enableServiceLinks": False,
        "initContainers": [{"name": "init", **executor}],
        "containers": [{"name": "wait", **executor}],
    }
    defaults = pools.container(NAME, pools.HOME, [pools.SHARED_MEMORY_MOUNT], command=pools.COMMAND)
    spec = {
        "entrypoint": templates[0]["name"],
        "activeDeadlineSeconds": 14 * DAY,
        "archiveLogs": True,
        "artifactRepositoryRef": {"configMap": f"{NAME}-artifacts", "key": "store"},
        "podGC": {"strategy": "OnPodSuccess", "deleteDelayDuration": "600s"},
        "ttlStrategy": {"secondsAfterSuccess": 7 * DAY, "secondsAfterFailure": 30 * DAY},
        "serviceAccountName": f"{NAME}-stage",
        "automountServiceAccountToken": False,
        "executor": {"serviceAccountName": f"{NAME}-executor"},
        "securityContext": pools.POD_SECURITY,
        "volumes": pools.pod_volumes(**pools.SHARED_MEMORY),
        # What all pods have in common stands once: Argo copies the templates into each Workflow, twice.
        "podSpecPatch": json.dumps(patch, sort_keys=True),
        "templateDefaults": {"container": defaults},
        "templates": templates,
    }
    return _typed(models.WorkflowTemplate, "WorkflowTemplate", name, spec | more)


def _typed(model: type[BaseModel], kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the Argo object with this kind, name and spec, as a dict.  ``model`` is the library Hera's class for
    the kind.  Raises ValueError if the object has a field that ``model`` lacks, or a value of the wrong type."""
    made = {"apiVersion": "argoproj.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    rendered = model.model_validate(made).model_dump(mode="json", by_alias=True, exclude_none=True)
    if rendered != made:
        raise ValueError(f"Hera's {kind} does not know all fields of {name}.")
    return rendered


def _tasks(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    planned = "{{tasks.prepare.outputs.parameters.%s}}"
    places = [{"name": name, "value": planned % name} for name in PLACES]
    tasks: list[dict[str, Any]] = [{"name": "prepare", "template": "prepare"}]
    for stage in stages:
        task = {
            "name": stage.name,
            "template": stage.name,
            "dependencies": ["prepare", *_either(stages, stage.upstream)],
            "when": f"{planned % stage.name} == run",
            "arguments": {"parameters": places},
        }
        tasks.append(task)
        if can_be_spread(stage):
            name = task_name(stage.name)
            tasks.append(task | {"name": name, "template": name, "when": f"{planned % stage.name} == ray"})
    read = {above for stage in stages for above in stage.upstream}
    last = [stage.name for stage in stages if stage.name not in read]
    finish = {"dependencies": ["prepare", *_either(stages, last)], "when": f"{planned % 'finish'} == run"}
    return [*tasks, {"name": "finish", "template": "finish"} | finish]


def _either(stages: Sequence[Stage], names: Sequence[str]) -> list[str]:
    """Returns the names of all Argo tasks that belong to the stages in ``names``.  A stage that can run on Ray has
    two tasks, of which only one runs.  Any other stage has one task."""
    spread = {stage.name for stage in stages if can_be_spread(stage)}
    return [task for name in names for task in ([name, task_name(name)] if name in spread else [name])]


def _prepare(stages: Sequence[Stage]) -> dict[str, Any]:
    more: dict[str, Any] = {
        "volumes": [_CONFIG_VOLUME],
        "outputs": _answers([*(stage.name for stage in stages), *PLACES, "finish"]),
    }
    return _pod("prepare", "prepare", ["pod", "prepare", *OF_THE_RUN], 1800, "operator", mounts=[_CONFIG_MOUNT], **more)


# What came with the Workflow.  Optional: a run that a schedule starts (cron) finds its configuration in the store.
_CONFIG_VOLUME = {"name": "config", "configMap": {"name": WORKFLOW, "optional": True, "defaultMode": 0o444}}
_CONFIG_MOUNT = {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}


def _stage(stage: Stage) -> dict[str, Any]:
    env = _PLACES | {"CUDA_AGENT_SANDBOX_TOKEN": pools.token_of(WORKFLOW, optional=True)}
    arguments = ["pod", "stage", stage.name, *OF_THE_RUN]
    return _pod(stage.name, "stage", arguments, 7 * DAY, grace=GRACE, env=env, **_manifest(stage))


def _spread(stage: Stage) -> dict[str, Any]:
    """Returns the template of the step that creates a stage's RayJob and waits until the RayJob ends."""
    arguments = ["pod", "ray", stage.name, *OF_THE_RUN]
    return _pod(task_name(stage.name), "setup", arguments, 7 * DAY, account="ray", env=_PLACES, **_manifest(stage))


_PLACES = {variable: f"{{{{inputs.parameters.{name}}}}}" for name, variable in PLACES.items()}


def _manifest(stage: Stage) -> dict[str, Any]:
    artifact = {
        "name": "manifest",
        "path": MANIFEST_FILE,
        "optional": True,  # a failed stage has none
        "archive": {"none": {}},
        "s3": {"key": f"argo/{WORKFLOW}/{stage.name}/manifest.json"},
    }
    return {"inputs": {"parameters": [{"name": name} for name in PLACES]}, "outputs": {"artifacts": [artifact]}}


def _answers(names: Iterable[str]) -> dict[str, Any]:
    """Returns the output parameters ``names`` of a step.  Argo reads each parameter from a file of the same name."""
    return {"parameters": [{"name": name, "valueFrom": {"path": f"{PLAN_FOLDER}/{name}"}} for name in names]}


def _pod(
    name: str,
    component: str,
    arguments: list[str],
    seconds: int,
    account: str = "",
    grace: int = 0,
    env: Mapping[str, Any] = {},
    mounts: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Returns the template of a step that runs in one pod, for at most ``seconds``.  With ``account``, the pod has the
    token of the service account ``cuda-agent-<account>``.  ``grace`` is the number of seconds from SIGTERM to SIGKILL;
    0: that of the Workflow.  ``more`` has further fields of the template."""
    token = {"serviceAccountName": f"{NAME}-{account}", "automountServiceAccountToken": True} if account else {}
    patch = {"podSpecPatch": json.dumps({"terminationGracePeriodSeconds": grace})} if grace else {}
    return {
        "name": name,
        "metadata": {"labels": {pools.NAME_LABEL: NAME, pools.COMPONENT_LABEL: component}},
        **token,
        "activeDeadlineSeconds": seconds,
        "retryStrategy": {"limit": "4", "retryPolicy": "Always", "expression": RETRY, "backoff": BACKOFF},
        **patch,
        "container": {"args": arguments, "env": pools.variables(env), "volumeMounts": [*mounts]},
    } | more
