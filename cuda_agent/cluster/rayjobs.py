"""Runs a stage (a step of a run's Workflow) on Ray in several pods.

Creates these objects for KubeRay 1.6, and waits until the RayJob ends:

    RayJob          a head pod, which runs the stage's process, and further pods, which run the stage's actors
    NetworkPolicy   allows all traffic between these pods, and lets KubeRay's operator reach the head's dashboard
    NetworkPolicy   lets these pods connect to the sandbox servers of the run

The names of the Workflow and the stage determine the objects' names.  So a step that Argo restarts finds the RayJob
that it created before."""

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda_agent.cluster import pools
from cuda_agent.cluster.api import Cluster, new_object
from cuda_agent.cluster.pools import POOL_LABEL, RUN_NAME
from cuda_agent.config import Config
from cuda_agent.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY
from cuda_agent.pipeline.graph import ROWS, Stage
from cuda_agent.pipeline.manifest import outcome_entry, read_manifest
from cuda_agent.storage import Store

RAY_VERSION = "2.60.0"  # version of Ray in the image
RAY_LABEL = "cuda-agent.io/ray"
DASHBOARD = 8265
STARTING_SECONDS = 3600  # longest wait for all pods to start: a cluster may have to add nodes
GONE_SECONDS = 300.0  # longest wait for a failed job to be deleted
DAY = 86400
_REPLICAS = ("replicas", "minReplicas", "maxReplicas")
_ENDED = ("Complete", "Failed", "ValidationFailed")
_LEARN = {stage.name for stage in ROWS if "training" in stage.config}


def can_be_spread(stage: Stage) -> bool:
    """Returns whether the stage can run on Ray: whether it reads the configuration's section ``ray``."""
    return "ray" in stage.config


def task_name(stage: str) -> str:
    """Returns the name of the Workflow's step that runs the stage in several pods."""
    return f"{stage}-ray"


def stage_name(task: str) -> str:
    """Returns the name of the stage that the Workflow's step ``task`` runs."""
    return task.removesuffix("-ray")


def job_name(workflow: str, stage: str) -> str:
    """Returns the name of a stage's RayJob.  The name contains a hash of ``workflow`` instead of ``workflow`` itself,
    because KubeRay allows at most 47 characters in a name."""
    return f"ray-{hashlib.sha256(workflow.encode()).hexdigest()[:16]}-{stage}"


def ray_objects() -> list[dict[str, Any]]:
    """Returns templates of the Kubernetes objects that run a stage on Ray, in the order of creation.  In names and
    labels, ``RUN`` is a placeholder.  In the label ``cuda-agent.io/run`` it stands for the name of the run's Workflow,
    and everywhere else for the name of the RayJob."""
    labels = pools.labels_of("stage") | {RAY_LABEL: RUN_NAME}
    own = {RAY_LABEL: RUN_NAME}
    between = pools.peers(own)
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay"}}}
    policy = pools.network_policy(
        RUN_NAME, labels, own, [{"from": between}, pools.from_to([operator], DASHBOARD)], [{"to": between}]
    )
    servers = {POOL_LABEL: RUN_NAME, pools.COMPONENT_LABEL: "sandbox"}
    sandbox = pools.network_policy(f"{RUN_NAME}-sandbox", labels, servers, [pools.from_to(between, pools.PORT)])
    actors = {"groupName": "actors", "rayStartParams": {}, "template": _pod(labels, 30, 52365)}
    job = {
        "submissionMode": "HTTPMode",  # without a separate submitter pod, which would lack our walls
        "entrypoint": "",
        "backoffLimit": 0,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 0,
        "preRunningDeadlineSeconds": STARTING_SECONDS,
        "activeDeadlineSeconds": 7 * DAY,
        "rayClusterSpec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                # The head runs no actor: it has the store's credentials and the stage's own process.
                "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
                "template": _pod(labels, 120, 6379),
            },
            "workerGroupSpecs": [actors | dict.fromkeys(_REPLICAS, 1)],
        },
    }
    return [policy, sandbox, new_object("RayJob", RUN_NAME, labels, spec=job)]


def _pod(labels: Mapping[str, str], grace: int, port: int) -> dict[str, Any]:
    """Returns the template of a Ray pod.  The pod's probes connect to ``port``.  ``grace`` is the time from SIGTERM to
    SIGKILL in seconds."""
    # KubeRay's own probes need a program that may be missing.
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 5, "timeoutSeconds": 5}
    made = pools.container(
        "cuda-agent-ray",
        pools.HOME | {"CUDA_AGENT_RAY_ADDRESS": "auto", "RAY_USAGE_STATS_ENABLED": "0"},
        [pools.SHARED_MEMORY_MOUNT],
        name="ray",
        readinessProbe=probe | {"failureThreshold": 12},
        livenessProbe=probe | {"failureThreshold": 60, "initialDelaySeconds": 60},
    )
    pod = pools.pod_spec("stage", grace, made, **pools.SHARED_MEMORY)
    return {"metadata": {"labels": labels}, "spec": pod | {"restartPolicy": "Never"}}


def objects(
    base: Sequence[Mapping[str, Any]],
    workflow: str,
    uid: str,
    stage: str,
    arguments: Sequence[str],
    servers: str,
    config: Config,
    engines: str = "",
) -> list[dict[str, Any]]:
    """Returns the Kubernetes objects that run a stage in several pods: the templates ``base``, filled in for one run.

    Args:
        base: Templates of the objects, from the chart; resources and node placement are set.
        workflow: Name of the run's Workflow.
        uid: UID of the run's Workflow.
        stage: Name of the stage.
        arguments: Command-line arguments of the program ``cuda-agent``, which runs the stage in the head pod.
        servers: Addresses of the sandbox servers, separated by commas.
        config: The run's configuration.
        engines: Addresses of the vLLM servers that the run's stages share, separated by commas; empty: none."""
    count = config.ray.workers + (config.ray.trainers if stage in _LEARN else 0)
    env = {
        "CUDA_AGENT_RAY_PODS": str(count),
        "ARGO_NODE_ID": os.environ.get("ARGO_NODE_ID", ""),  # the stage's spans are below the node of this step
        "CUDA_AGENT_SANDBOX_SERVERS": servers,
        "CUDA_AGENT_SANDBOX_TOKEN": pools.token_of(workflow, optional=True),
        "CUDA_AGENT_ENGINE_SERVERS": engines,
    }
    made = pools.of_run(base, workflow, uid, {POOL_LABEL: workflow}, job_name(workflow, stage))
    job = next(one for one in made if one["kind"] == "RayJob")["spec"]
    job["activeDeadlineSeconds"] = int(os.environ.get("CUDA_AGENT_DEADLINE", job["activeDeadlineSeconds"]))
    job["entrypoint"] = shlex.join([*pools.COMMAND, *arguments])
    head, (actors,) = (job["rayClusterSpec"][key] for key in ("headGroupSpec", "workerGroupSpecs"))
    for group in (head, actors):
        group["template"]["spec"]["containers"][0]["env"] += pools.variables(env)
    actors |= dict.fromkeys(_REPLICAS, count)
    return made


def follow(
    cluster: Cluster,
    store: Store,
    made: Sequence[Mapping[str, Any]],
    run: str,
    stage: str,
    workflow: str,
    should_stop: Callable[[], bool] = lambda: False,
    pause: float = 3.0,
) -> tuple[int, str]:
    """Runs a stage's RayJob and waits until the RayJob ends.

    If an earlier attempt of this step left a RayJob, and this RayJob failed, replaces it.  If the earlier RayJob did
    not fail, creates no other one.  If the run is stopped during the wait, deletes the RayJob.  If only the pod of this
    process is stopped, leaves the RayJob running for the next attempt.

    Args:
        cluster: The cluster.
        store: The store, where the stage writes its manifest or the reason of its failure.
        made: The objects from ``objects``; those that the cluster lacks are created.
        run: Name of the run.
        stage: Name of the stage.
        workflow: Name of the run's Workflow.
        should_stop: Returns whether the pod of this process is being stopped.
        pause: Seconds between two polls of the cluster.

    Returns:
        (exit code of the stage, message); the message of a successful stage is empty."""
    name = next(one["metadata"]["name"] for one in made if one["kind"] == "RayJob")
    found = cluster.find("RayJob", name)
    if found is not None and _state(found)[0] in _ENDED and _state(found)[1] != "SUCCEEDED":
        cluster.delete("RayJob", name)
        end, found = time.monotonic() + GONE_SECONDS, None
        while cluster.find("RayJob", name) is not None and time.monotonic() < end:
            time.sleep(pause)
    if found is None:
        store.delete(outcome_entry(run, stage))
    for one in made:
        cluster.create_if_absent(one)
    shown = ""
    while True:
        found = cluster.find("RayJob", name)
        if found is None:
            return EXIT_RETRY, f"RayJob {name} was deleted."
        state, job, message = _state(found)
        if (line := f"RayJob {name}: {state or 'new'} {job}".rstrip()) != shown:
            print(shown := line, flush=True)
        if state in _ENDED:
            return _outcome(store, run, stage, state, job, message)
        if cluster.get("Workflow", workflow)["spec"].get("shutdown"):
            cluster.delete("RayJob", name)
            return EXIT_RETRY, "The run was stopped."
        if should_stop():
            return EXIT_RETRY, f"RayJob {name} goes on; the next attempt follows it."
        time.sleep(pause)


def _state(job: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns three texts from a RayJob's status: the state of the RayJob (``jobDeploymentStatus``), the state of the
    job in Ray (``jobStatus``), and KubeRay's reason and message.  A missing text is empty."""
    status = job.get("status", {})
    why = [status.get("reason"), status.get("message")]
    return status.get("jobDeploymentStatus", ""), status.get("jobStatus", ""), ": ".join(filter(None, why))


def _outcome(store: Store, run: str, stage: str, state: str, job: str, message: str) -> tuple[int, str]:
    if job == "SUCCEEDED" and read_manifest(store, run, stage) is not None:
        return EXIT_DONE, ""
    if store.exists(entry := outcome_entry(run, stage)):
        said = json.loads(store.get(entry))
        return int(said["code"]), str(said["message"])
    code = EXIT_CONFIG if state == "ValidationFailed" else EXIT_RETRY
    return code, f"The RayJob of {stage} ended ({state}{f', {job}' if job else ''}): {message or 'nothing was said'}"


def names(workflow: str) -> list[tuple[str, str]]:
    """Returns (kind, name) of every Kubernetes object that stages of a run on Ray can have, RayJobs first."""
    jobs = [job_name(workflow, stage.name) for stage in ROWS if can_be_spread(stage)]
    return [("RayJob", job) for job in jobs] + [("NetworkPolicy", job + of) for job in jobs for of in ("", "-sandbox")]
