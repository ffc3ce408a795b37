"""Renders the graph as an Argo ``WorkflowTemplate`` from its table, typed by Hera.

    prepare ─► a task a stage ─► finish;  on failure: exit ─► finish

One template serves every variant of the graph: it has a task for each row, after the sources of all variants.  A task
is skipped without a pod when ``prepare`` reports that the cache has its stage or that the run's graph leaves it out. A
stage that Ray can spread over several pods has a second task, which creates the stage's Ray cluster and follows it;
``prepare`` chooses between the two.

The result is data without a release: the chart reads it, merges image, resources, placement and names for each profile
and makes one template per profile.  A submission passes ``run``, ``config`` and optionally a ``group``.  Only fields
that Argo 3.7 and 4.x both have are used.  Argo carries each stage's manifest and log; data goes straight to the store.
Maintenance jobs are templates of one pod.

Not covered: the commands in the pods (``cluster.pod``), the sandbox's pods (``cluster.pools``), and the settings of a
profile (the chart's values).
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from hera.workflows import models
from hera.workflows.models import Template

from cuda_agent.cluster.pools import CONTAINER_SECURITY, version_name
from cuda_agent.cluster.rayjobs import can_be_spread, task_name
from cuda_agent.pipeline.gc import LOCK_SECONDS
from cuda_agent.pipeline.graph import ROWS, Stage, check

NAME = "cuda-agent"  # prefix of a release's objects; the chart replaces it by the release's name
RUN, CONFIG, WORKFLOW = "{{workflow.parameters.run}}", "{{workflow.parameters.config}}", "{{workflow.name}}"
# One Workflow of a concurrency group runs at a time, the oldest first (a sweep's limit).  By default each is a group.
CONCURRENCY_GROUP = "{{=workflow.parameters.group == '' ? workflow.name : workflow.parameters.group}}"
CONFIG_FOLDER = "/config"  # where prepare finds the configuration that came with the Workflow
PLAN_FOLDER = "/scratch/plan"  # where prepare writes one file an output parameter
MANIFEST_FILE = "/scratch/manifest.json"  # where a stage leaves its manifest for Argo
# Output parameter of prepare for a run's servers, and the environment variable that passes it to the stages.
PLACES = {"servers": "CUDA_AGENT_SANDBOX_SERVERS", "engines": "CUDA_AGENT_ENGINE_SERVERS"}
GRACE = 120  # seconds from SIGTERM to SIGKILL: a checkpoint must fit
DAY = 86400

# The ends of a pod that are retried.  The exit code decides, because Argo reports the same preemption as Failed
# or Error ("-1": there is no exit code, the pod or its node is gone).  A deadline is not a preemption, though its
# exit code looks like one.  An out-of-memory kill is retried once, because other pods may have caused it.
RETRY = (
    "!(lastRetry.message matches '(?i)deadline') && (lastRetry.message matches 'OOMKilled' ? retries == '0' : "
    "(lastRetry.status == 'Error' || lastRetry.exitCode in ['75', '137', '143', '-1']))"
)

EXECUTOR_RESOURCES = {
    "requests": {"cpu": "10m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
    "limits": {"cpu": "500m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
}


def workflow_template(stages: Sequence[Stage] = ROWS) -> dict[str, Any]:
    """Returns the WorkflowTemplate, before the chart's values."""
    check(stages)
    templates = [
        Template(name="run", dag=models.DAGTemplate(tasks=_tasks(stages))),
        _prepare(stages),
        *(_stage(stage) for stage in stages),
        *(_spread(stage) for stage in stages if can_be_spread(stage)),
        # After any failure the run's pools are removed; after a success the graph's finish task removes them.
        Template(
            name="exit",
            steps=[
                models.ParallelSteps(
                    root=[
                        models.WorkflowStep(name="finish", template="finish", when="{{workflow.status}} != Succeeded")
                    ]
                )
            ],
        ),
        _finish(),
    ]
    return _template(
        f"{NAME}-{version_name()}",
        "run",
        templates,
        hooks={"exit": models.LifecycleHook(template="exit")},
        arguments=models.Arguments(
            parameters=[
                models.Parameter(name="run"),
                models.Parameter(name="config"),
                models.Parameter(name="group", value=""),
            ]
        ),
        synchronization=models.Synchronization(mutexes=[models.Mutex(name=CONCURRENCY_GROUP)]),
    )


def _template(name: str, entrypoint: str, templates: list[Template], **more: Any) -> dict[str, Any]:
    """Returns the fields that all Workflows share."""
    template = models.WorkflowTemplate(
        api_version="argoproj.io/v1alpha1",
        kind="WorkflowTemplate",
        metadata=models.ObjectMeta(name=name),
        spec=models.WorkflowSpec(
            entrypoint=entrypoint,
            active_deadline_seconds=14 * DAY,
            archive_logs=True,
            artifact_repository_ref=models.ArtifactRepositoryRef(config_map=f"{NAME}-artifacts", key="store"),
            pod_gc=models.PodGC(strategy="OnPodSuccess", delete_delay_duration="600s"),
            ttl_strategy=models.TTLStrategy(seconds_after_success=7 * DAY, seconds_after_failure=30 * DAY),
            service_account_name=f"{NAME}-stage",
            automount_service_account_token=False,
            executor=models.ExecutorConfig(service_account_name=f"{NAME}-executor"),
            security_context=models.PodSecurityContext(
                run_as_non_root=True,
                run_as_user=65532,
                run_as_group=65532,
                fs_group=65532,
                seccomp_profile=models.SeccompProfile(type="RuntimeDefault"),
            ),
            volumes=[
                models.Volume(name="work", empty_dir=models.EmptyDirVolumeSource()),
                models.Volume(name="tmp", empty_dir=models.EmptyDirVolumeSource()),
            ],
            templates=templates,
            **more,
        ),
    )
    return json.loads(template.model_dump_json(by_alias=True, exclude_none=True))


def maintenance_jobs() -> dict[str, dict[str, Any]]:
    """Returns WorkflowTemplates by name, before the chart's values, of the jobs a user starts
    (``cluster.maintenance``)."""
    return {
        "doctor": _errand("doctor", "operator", 900, ["pod", "doctor", "--workflow", WORKFLOW]),
        "gc": _errand("gc", "collector", LOCK_SECONDS, ["pod", "gc", "--workflow", WORKFLOW]),
        "gc-plan": _errand("gc-plan", "collector", 3600, ["pod", "gc", "--workflow", WORKFLOW, "--dry-run"]),
    }


def _errand(name: str, account: str, seconds: int, arguments: list[str]) -> dict[str, Any]:
    """Returns a job of one pod.  It is not retried: a user is waiting, or the schedule starts it again."""
    template = Template(
        name=name,
        metadata=_metadata("setup"),
        service_account_name=f"{NAME}-{account}",
        automount_service_account_token=True,
        active_deadline_seconds=seconds,
        pod_spec_patch=_patch(30),
        container=_container(arguments),
        outputs=models.Outputs(
            parameters=[models.Parameter(name="answer", value_from=models.ValueFrom(path=f"{PLAN_FOLDER}/answer"))]
        ),
    )
    return _template(f"{NAME}-{name}-{version_name()}", name, [template])


def cron_workflow() -> dict[str, Any]:
    """Returns a CronWorkflow that starts the template on a schedule; the chart sets schedule, profile and
    configuration.  A run without a name is named after its Workflow."""
    cron = models.CronWorkflow(
        api_version="argoproj.io/v1alpha1",
        kind="CronWorkflow",
        metadata=models.ObjectMeta(name=NAME),
        spec=models.CronWorkflowSpec(
            schedules=["0 2 * * 6"],
            concurrency_policy="Forbid",
            starting_deadline_seconds=3600,
            successful_jobs_history_limit=4,
            failed_jobs_history_limit=4,
            workflow_spec=models.WorkflowSpec(
                workflow_template_ref=models.WorkflowTemplateRef(name=f"{NAME}-{version_name()}"),
                arguments=models.Arguments(
                    parameters=[models.Parameter(name="run", value=""), models.Parameter(name="config", value="")]
                ),
            ),
        ),
    )
    return json.loads(cron.model_dump_json(by_alias=True, exclude_none=True))


def _tasks(stages: Sequence[Stage]) -> list[models.DAGTask]:
    planned = "{{tasks.prepare.outputs.parameters.%s}}"
    tasks = [models.DAGTask(name="prepare", template="prepare")]
    for stage in stages:
        tasks.append(
            models.DAGTask(
                name=stage.name,
                template=stage.name,
                dependencies=["prepare", *_either(stages, stage.upstream)],
                when=f"{planned % stage.name} == run",
                arguments=models.Arguments(
                    parameters=[models.Parameter(name=name, value=planned % name) for name in PLACES]
                ),
            )
        )
        if can_be_spread(stage):
            spread = {"name": task_name(stage.name), "template": task_name(stage.name)}
            tasks.append(tasks[-1].model_copy(update=spread | {"when": f"{planned % stage.name} == ray"}))
    read = {above for stage in stages for above in stage.upstream}
    last = [stage.name for stage in stages if stage.name not in read]
    finish = models.DAGTask(
        name="finish",
        template="finish",
        dependencies=["prepare", *_either(stages, last)],
        when=f"{planned % 'finish'} == run",
    )
    return [*tasks, finish]


def _either(stages: Sequence[Stage], names: Sequence[str]) -> list[str]:
    """Returns the tasks of these stages; for each stage at most one of them is not skipped."""
    spread = {stage.name for stage in stages if can_be_spread(stage)}
    return [task for name in names for task in ([name, task_name(name)] if name in spread else [name])]


def _prepare(stages: Sequence[Stage]) -> Template:
    """Returns the step that outputs: for every stage ``run``, ``ray``, ``cached`` or ``absent``; the addresses of the
    run's servers; and whether ``finish`` has work."""
    names = [*(stage.name for stage in stages), *PLACES, "finish"]
    return Template(
        name="prepare",
        metadata=_metadata("prepare"),
        service_account_name=f"{NAME}-operator",
        automount_service_account_token=True,
        active_deadline_seconds=1800,
        retry_strategy=_retries(),
        pod_spec_patch=_patch(60),
        volumes=[
            # Optional: a run that a schedule starts (cron) finds its configuration in the store.
            models.Volume(
                name="config", config_map=models.ConfigMapVolumeSource(name=WORKFLOW, optional=True, default_mode=0o444)
            )
        ],
        container=_container(
            ["pod", "prepare", "--run", RUN, "--config", CONFIG, "--workflow", WORKFLOW],
            mounts=[models.VolumeMount(name="config", mount_path=CONFIG_FOLDER, read_only=True)],
        ),
        outputs=models.Outputs(
            parameters=[
                models.Parameter(name=name, value_from=models.ValueFrom(path=f"{PLAN_FOLDER}/{name}")) for name in names
            ]
        ),
    )


def _stage(stage: Stage) -> Template:
    arguments = ["pod", "stage", stage.name, "--run", RUN, "--config", CONFIG, "--workflow", WORKFLOW]
    token = models.EnvVar(
        name="CUDA_AGENT_SANDBOX_TOKEN",
        value_from=models.EnvVarSource(
            secret_key_ref=models.SecretKeySelector(name=f"{WORKFLOW}-sandbox", key="token", optional=True)
        ),
    )
    return Template(
        name=stage.name,
        metadata=_metadata("stage"),
        inputs=models.Inputs(parameters=[models.Parameter(name=name) for name in PLACES]),
        active_deadline_seconds=7 * DAY,
        retry_strategy=_retries(),
        pod_spec_patch=_patch(GRACE),
        container=_container(arguments, env=[*_places(), token]),
        outputs=_manifest(stage),
    )


def _spread(stage: Stage) -> Template:
    """Returns the step that creates a stage's Ray cluster and follows it."""
    arguments = ["pod", "ray", stage.name, "--run", RUN, "--config", CONFIG, "--workflow", WORKFLOW]
    return Template(
        name=task_name(stage.name),
        metadata=_metadata("setup"),
        inputs=models.Inputs(parameters=[models.Parameter(name=name) for name in PLACES]),
        service_account_name=f"{NAME}-ray",
        automount_service_account_token=True,
        active_deadline_seconds=7 * DAY,
        retry_strategy=_retries(),
        pod_spec_patch=_patch(60),
        container=_container(arguments, env=_places()),
        outputs=_manifest(stage),
    )


def _places() -> list[models.EnvVar]:
    return [
        models.EnvVar(name=variable, value=f"{{{{inputs.parameters.{name}}}}}") for name, variable in PLACES.items()
    ]


def _manifest(stage: Stage) -> models.Outputs:
    return models.Outputs(
        artifacts=[
            models.Artifact(
                name="manifest",
                path=MANIFEST_FILE,
                optional=True,  # a failed stage has none
                archive=models.ArchiveStrategy(none=models.NoneStrategy()),
                s3=models.S3Artifact(key=f"argo/{WORKFLOW}/{stage.name}/manifest.json"),
            )
        ]
    )


def _finish() -> Template:
    arguments = ["pod", "finish", "--run", RUN, "--config", CONFIG, "--workflow", WORKFLOW]
    return Template(
        name="finish",
        metadata=_metadata("finish"),
        service_account_name=f"{NAME}-operator",
        automount_service_account_token=True,
        active_deadline_seconds=900,
        retry_strategy=_retries(),
        pod_spec_patch=_patch(60),
        container=_container([*arguments, "--status", "{{workflow.status}}"]),
    )


def _container(
    arguments: list[str], env: Sequence[models.EnvVar] = (), mounts: Sequence[models.VolumeMount] = ()
) -> models.Container:
    return models.Container(
        image=f"{NAME}:{version('cuda-agent')}",
        command=["python3", "-m", "cuda_agent.cli"],
        args=arguments,
        env=[
            models.EnvVar(name="HOME", value="/scratch"),
            models.EnvVar(name="CUDA_AGENT_HOME", value="/scratch/home"),
            *env,
        ],
        security_context=models.SecurityContext.model_validate(CONTAINER_SECURITY),
        volume_mounts=[
            models.VolumeMount(name="work", mount_path="/scratch"),
            models.VolumeMount(name="tmp", mount_path="/tmp"),
            *mounts,
        ],
    )


def _metadata(component: str) -> models.Metadata:
    return models.Metadata(labels={"app.kubernetes.io/name": NAME, "app.kubernetes.io/component": component})


def _retries() -> models.RetryStrategy:
    return models.RetryStrategy(
        limit="4",
        retry_policy="Always",
        expression=RETRY,
        backoff=models.Backoff(duration="10s", factor=3, cap="10m"),
    )


def _patch(grace: int) -> str:
    """Returns the pod settings that an Argo template cannot express otherwise: the termination grace period, and the
    security context and limits of the executor's containers, whatever the controller's settings are."""
    executor = {"securityContext": CONTAINER_SECURITY, "resources": EXECUTOR_RESOURCES}
    patch = {
        "terminationGracePeriodSeconds": grace,
        "enableServiceLinks": False,
        "initContainers": [{"name": "init", **executor}],
        "containers": [{"name": "wait", **executor}],
    }
    return json.dumps(patch, sort_keys=True)
