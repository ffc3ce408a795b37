"""Values of the chart for one profile: the pods of a run, their number, resources and nodes.

What it does not cover: values of a whole release (``chart_values``).
"""

from typing import Annotated

from pydantic import Field

from cuda_agent.deploy.chart_fields import Name, Object, Resources, ValuesGroup, group, leaf
from cuda_agent.pipeline.graph import ROWS

StageName = Annotated[str, Field(pattern=f"^({'|'.join(stage.name for stage in ROWS)})$")]


class Placement(ValuesGroup):
    """Where a pod runs and with what.  A field that a stage does not give is that of the profile's ``defaults``; one
    that it gives counts as a whole."""

    resources: Resources = group(Resources(), "requests and limits")
    nodeSelector: dict[str, str] = leaf({}, "labels of its nodes", "WorkflowTemplate:nodeSelector", {"pool": "a"})
    tolerations: list[Object] = leaf(
        [], "taints it tolerates", "WorkflowTemplate:tolerations", [{"key": "gpu", "operator": "Exists"}]
    )
    affinity: Object = leaf({}, "affinity", "WorkflowTemplate:affinity", {"podAntiAffinity": {}})
    deadlineSeconds: int = leaf(
        604800, "after this long a pod is ended for good", "WorkflowTemplate:activeDeadlineSeconds"
    )


class Pool(ValuesGroup):
    """One kind of sandbox servers of a run."""

    replicas: Annotated[int, Field(ge=1, le=512)] = leaf(1, "servers", "WorkflowTemplate:container.env")
    resources: Resources = group(Resources(), "requests and limits of one server")
    nodeSelector: dict[str, str] = leaf({}, "labels of their nodes", "WorkflowTemplate:container.env", {"pool": "b"})
    tolerations: list[Object] = leaf(
        [], "taints they tolerate", "WorkflowTemplate:container.env", [{"key": "sandbox", "operator": "Exists"}]
    )
    affinity: Object = leaf({}, "affinity", "WorkflowTemplate:container.env", {"podAntiAffinity": {}})


class Pools(ValuesGroup):
    workspace: Pool = group(Pool(), "folders that the agent works in (CPU)")
    build: Pool = group(Pool(), "compilers (CPU)")
    evaluate: Pool = group(Pool(), "what judges and times; with GPUs where `sandbox.device=cuda`")


class EnginePods(ValuesGroup):
    """vLLM servers of a run whose ``policy.engine`` is vllm; without them each stage starts its own."""

    replicas: Annotated[int, Field(ge=0, le=512)] = leaf(
        0, "servers; 0: none", r"WorkflowTemplate:container.env\[CUDA_AGENT_ENGINE", 2
    )
    claim: Name = leaf(
        "",
        "claim of a volume that many nodes may write (ReadWriteMany), by which weights reach them",
        "WorkflowTemplate:container.env",
        "weights",
    )
    resources: Resources = group(Resources(), "requests and limits of one server; it uses all GPUs that it has")
    nodeSelector: dict[str, str] = leaf({}, "labels of their nodes", "WorkflowTemplate:container.env", {"pool": "e"})
    tolerations: list[Object] = leaf(
        [], "taints they tolerate", "WorkflowTemplate:container.env", [{"key": "engine", "operator": "Exists"}]
    )
    affinity: Object = leaf({}, "affinity", "WorkflowTemplate:container.env", {"podAntiAffinity": {}})
    extraVolumes: list[Object] = leaf(
        [], "more volumes of the servers", "WorkflowTemplate:container.env", [{"name": "v", "emptyDir": {}}]
    )
    extraVolumeMounts: list[Object] = leaf(
        [], "and where they are", "WorkflowTemplate:container.env", [{"name": "v", "mountPath": "/v"}]
    )


class RayPods(ValuesGroup):
    """A Ray for stages whose runtime is ray, of several pods; without it they have one inside their own pod."""

    enabled: bool = leaf(
        False,
        "have KubeRay make one for each; needs its operator, 1.6",
        r"WorkflowTemplate:container.env\[CUDA_AGENT_RAY",
    )
    headResources: Resources = group(Resources(), "requests and limits of the pod that the stage itself runs in")
    resources: Resources = group(Resources(), "the same of the trainer's pod and of each rollout worker's")
    nodeSelector: dict[str, str] = leaf({}, "labels of their nodes", "WorkflowTemplate:container.env", {"pool": "r"})
    tolerations: list[Object] = leaf(
        [], "taints they tolerate", "WorkflowTemplate:container.env", [{"key": "ray", "operator": "Exists"}]
    )
    affinity: Object = leaf({}, "affinity", "WorkflowTemplate:container.env", {"podAntiAffinity": {}})


class Profile(ValuesGroup):
    """What a run's pods get.  A researcher names it: ``cuda-agent submit --profile NAME``."""

    device: str = leaf(
        "",
        "what times are taken on, part of cache keys; empty: the profile's name",
        "WorkflowTemplate:container.env",
        "h1",
    )
    parallelism: int = leaf(
        1,
        "stages of a run at once; 1 where it has engine replicas or a Ray of several pods",
        "WorkflowTemplate:spec.parallelism",
        3,
    )
    queue: str = leaf("", "Kueue's LocalQueue for stages and sandboxes", "WorkflowTemplate:metadata.labels", "gpus")
    priorityClass: str = leaf("", "PriorityClass of all pods", "WorkflowTemplate:podPriorityClassName", "high")
    defaults: Placement = group(Placement(), "of every stage")
    stages: dict[StageName, Placement] = leaf(
        {}, "a stage's own place; what it does not say is in `defaults`", "WorkflowTemplate:nodeSelector",
        {"agentic": {"nodeSelector": {"gpu": "h100"}}},
    )  # fmt: skip
    pools: Pools = group(Pools(), "the run's sandbox")
    engine: EnginePods = group(EnginePods(), "vLLM servers for runs whose engine is vllm")
    ray: RayPods = group(RayPods(), "several pods for stages whose runtime is ray")


SMALL = Resources(
    requests={"cpu": "100m", "memory": "512Mi"}, limits={"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}
)
WORK = Resources(
    requests={"cpu": "500m", "memory": "2Gi"}, limits={"cpu": "2", "memory": "8Gi", "ephemeral-storage": "20Gi"}
)
_JUDGE = Resources(
    requests={"cpu": "500m", "memory": "1Gi"}, limits={"cpu": "2", "memory": "6Gi", "ephemeral-storage": "10Gi"}
)
_GPU = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
_WITH_GPU = Resources(
    requests={"cpu": "8", "memory": "64Gi"},
    limits={"cpu": "16", "memory": "128Gi", "ephemeral-storage": "500Gi", "nvidia.com/gpu": 1},
)
PROFILES = {
    "cpu": Profile(
        defaults=Placement(resources=WORK, deadlineSeconds=604800),
        stages={},
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
