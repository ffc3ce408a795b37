"""The schema of the chart's profiles (``profiles`` of the values): resources and placement of the pods of a run.

Also defines what all groups of the chart's values share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from cuda_agent.pipeline.graph import ROWS

Object = dict[str, Any]  # part of a Kubernetes object, passed on unchanged
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?$")]
StageName = Annotated[str, Field(pattern=f"^({'|'.join(stage.name for stage in ROWS)})$")]


class ValuesGroup(BaseModel):
    model_config = ConfigDict(extra="forbid")


def value(default: Any, description: str) -> Any:
    """Returns a field with the description that values.yaml and the README show."""
    return Field(default, description=description)


class Resources(ValuesGroup):
    requests: dict[str, Quantity | int] = value({}, "resources that a container requests, as in Kubernetes")
    limits: dict[str, Quantity | int] = value(
        {}, "resources that a container may use at most; `nvidia.com/gpu: 1` requests one GPU"
    )


class Place(ValuesGroup):
    """Where some pods of a run may run.  An empty field takes the chart's value of the same name, if there is one."""

    nodeSelector: dict[str, str] = value({}, "labels that a node must have to run these pods")
    tolerations: list[Object] = value([], "node taints that these pods tolerate")
    affinity: Object = value({}, "affinity rules of these pods, as in Kubernetes")
    runtimeClassName: Name = value(
        "",
        "RuntimeClass of these pods, such as `nvidia` where the default runtime knows no GPUs; empty: the default",
    )


class Placement(Place):
    """Place and resources of a stage's pod.  Fields of a stage replace those of the profile's ``defaults``."""

    resources: Resources = value(Resources(), "requests and limits of the stage")
    deadlineSeconds: int = value(604800, "seconds that the pod may run; then it is stopped, and not retried")


class Pool(Place):
    """One kind of sandbox servers of a run.  ``sandbox.runtimeClassName`` stands for an empty ``runtimeClassName``."""

    replicas: Annotated[int, Field(ge=1, le=512)] = value(1, "number of servers")
    resources: Resources = value(Resources(), "requests and limits of each server; must limit cpu and memory")


class Pools(ValuesGroup):
    workspace: Pool = value(Pool(), "servers for the folders in which the agent works; need no GPU")
    build: Pool = value(Pool(), "servers that compile kernels; need no GPU")
    evaluate: Pool = value(Pool(), "servers that judge and time kernels; need GPUs if `sandbox.device=cuda`")


class EnginePods(Place):
    """The vLLM servers of a run with ``policy.engine=vllm``.  Without them, each stage starts its own servers."""

    replicas: Annotated[int, Field(ge=0, le=512)] = value(
        0, "number of servers; above 0 requires `claim` and `parallelism: 1`"
    )
    claim: Name = value(
        "", "name of a PersistentVolumeClaim (ReadWriteMany), through which stages pass weights to the servers"
    )
    resources: Resources = value(Resources(), "requests and limits of each server, which uses all GPUs of its pod")
    extraVolumes: list[Object] = value([], "additional volumes of these servers")
    extraVolumeMounts: list[Object] = value([], "mounts of the additional volumes")


class RayPods(Place):
    """A Ray cluster of several pods for stages with ``runtime=ray``.  Without it, Ray runs inside the stage's pod.  The
    nodes are those of all pods but the head."""

    enabled: bool = value(
        False, "whether stages with `runtime=ray` get several pods; requires KubeRay 1.6 and `parallelism: 1`"
    )
    headResources: Resources = value(Resources(), "requests and limits of the head pod, which runs the stage's process")
    resources: Resources = value(Resources(), "requests and limits of each other pod: rollout workers and trainers")


class Profile(ValuesGroup):
    """Resources and placement of a run's pods.  A user selects a profile: ``cuda-agent submit --profile NAME``."""

    base: str = value(
        "", "profile from which unset fields come; empty: none; a profile of yours without `base` is based on `cpu`"
    )
    device: str = value(
        "", "name of the hardware that times are measured on; a part of cache keys; empty: the profile's name"
    )
    runs: Annotated[int, Field(ge=0)] = value(
        1, "maximum number of runs of this profile that work at once; the others wait for their turn; 0: no maximum"
    )
    parallelism: int = value(
        1, "maximum number of stages that run at once; must be 1 with `engine.replicas` or `ray.enabled`"
    )
    queue: Name = value("", "name of a Kueue LocalQueue for stages, sandboxes and engines; empty: none")
    queuePriority: Name = value(
        "", "name of a Kueue WorkloadPriorityClass for these pods, requires `queue`; empty: that of `priorityClass`"
    )
    priorityClass: str = value("", "name of the PriorityClass of all pods of a run; empty: the cluster's default")
    defaults: Placement = value(Placement(), "resources and placement of every stage")
    stages: dict[StageName, Placement] = value(
        {}, "resources and placement of single stages; unset fields come from `defaults`"
    )
    pools: Pools = value(Pools(), "sandbox servers of a run, by role")
    engine: EnginePods = value(EnginePods(), "vLLM servers of a run with `policy.engine=vllm`")
    ray: RayPods = value(RayPods(), "Ray pods of a stage with `runtime=ray`")


def resources_of(least: tuple[str, str, str], most: tuple[str, str, str], **more: int) -> Resources:
    """Returns requests (``least``) and limits (``most``), each as (processors, memory, disk).  The disk is requested,
    too, because Kubernetes otherwise requests its whole limit."""
    names = ("cpu", "memory", "ephemeral-storage")
    requests, limits = (dict(zip(names, amounts, strict=True)) for amounts in (least, most))
    return Resources(requests=requests, limits=limits | more)


SMALL = resources_of(("100m", "512Mi", "64Mi"), ("1", "1Gi", "2Gi"))
WORK = resources_of(("500m", "2Gi", "1Gi"), ("2", "8Gi", "20Gi"))
_JUDGE = resources_of(("500m", "1Gi", "512Mi"), ("2", "6Gi", "10Gi"))
_GPU = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
_WITH_GPU = resources_of(("8", "64Gi", "10Gi"), ("16", "128Gi", "500Gi"), **{"nvidia.com/gpu": 1})
PROFILES = {
    "cpu": Profile(
        defaults=Placement(resources=WORK),
        pools=Pools(workspace=Pool(resources=WORK), build=Pool(resources=WORK), evaluate=Pool(resources=_JUDGE)),
        engine=EnginePods(resources=WORK),
        ray=RayPods(headResources=WORK, resources=WORK),
    ),
    "gpu": Profile(
        parallelism=4,
        defaults=Placement(resources=_WITH_GPU, tolerations=_GPU),
        stages={"synthesis": Placement(resources=WORK), "report": Placement(resources=WORK)},
        pools=Pools(
            workspace=Pool(replicas=2, resources=WORK),
            build=Pool(replicas=2, resources=WORK),
            evaluate=Pool(replicas=2, resources=_WITH_GPU, tolerations=_GPU),
        ),
        engine=EnginePods(resources=_WITH_GPU, tolerations=_GPU),
        ray=RayPods(headResources=WORK, resources=_WITH_GPU, tolerations=_GPU),
    ),
}
