"""The chart's values: the schema of record, from which ``values.yaml``, ``values.schema.json`` and the chart's README
are made (``chart``).

Every leaf has a description and says which field of which object it ends up in (``renders``: kind, a colon, a regular
expression for the field's path); a test changes each leaf and looks there.  An ``example`` is a value to try where the
default has no obvious other value.

What it does not cover: how values are merged into objects (the chart's templates), and combinations that no type can
refuse (``templates/_validate.tpl``).
"""

from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cuda_agent.pipeline.graph import ROWS

Object = dict[str, Any]  # something of Kubernetes, passed on as it is
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?$")]
Cidr = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
StageName = Annotated[str, Field(pattern=f"^({'|'.join(stage.name for stage in ROWS)})$")]


class ValuesGroup(BaseModel):
    model_config = ConfigDict(extra="forbid")


def leaf(default: Any, description: str, renders: str, example: Any = None) -> Any:
    extra: dict[str, Any] = {"renders": renders}
    if example is not None:
        extra["example"] = example
    return Field(default, description=description, json_schema_extra=extra)


def group(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Resources(ValuesGroup):
    requests: dict[str, Quantity | int] = leaf(
        {}, "what a pod asks for", "(WorkflowTemplate|StatefulSet|Deployment):requests", {"cpu": "150m"}
    )
    limits: dict[str, Quantity | int] = leaf(
        {}, "what it may use at most; `nvidia.com/gpu: 1` asks for a GPU",
        "(WorkflowTemplate|StatefulSet|Deployment):limits", {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "4Gi"},
    )  # fmt: skip


class Image(ValuesGroup):
    repository: str = leaf("", "name without registry", "(WorkflowTemplate|StatefulSet|Deployment|Pod):", "other/image")
    tag: str = leaf("", "tag; empty: the chart's version", "(WorkflowTemplate|StatefulSet|Deployment|Pod):", "other")
    digest: Digest = leaf(
        "", "digest, which wins over the tag", "(WorkflowTemplate|StatefulSet|Deployment|Pod):", "sha256:" + "ab" * 32
    )


class Images(ValuesGroup):
    registry: str = leaf(
        "", "registry of all images, as in registry.example.org/team", "WorkflowTemplate:image$", "r.test/x"
    )
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = leaf(
        "IfNotPresent", "when images are pulled", "WorkflowTemplate:imagePullPolicy$", "Never"
    )
    pullSecrets: list[str] = leaf([], "names of pull secrets", "WorkflowTemplate:imagePullSecrets", ["pull"])
    command: list[str] = leaf(
        ["python3", "-m", "cuda_agent.cli"], "how cuda-agent is started in the stage and sandbox images",
        "WorkflowTemplate:container.command", ["/opt/cuda-agent"],
    )  # fmt: skip
    stage: Image = group(Image(repository="cuda-agent"), "stages, prepare and finish")
    sandbox: Image = group(Image(repository="cuda-agent-sandbox"), "the sandbox's servers")
    ray: Image = group(Image(repository="cuda-agent-ray"), "pods of a stage's Ray: the stages' image, with all of Ray")
    engine: Image = group(Image(repository="cuda-agent-engine"), "engine replicas, where a profile has them")
    minio: Image = group(Image(repository="cuda-agent-minio"), "MinIO, when the chart brings it")
    mlflow: Image = group(Image(repository="cuda-agent-mlflow"), "MLflow, when the chart brings it")


class StoreValues(ValuesGroup):
    bucket: str = leaf("cuda-agent", "bucket of artifacts, caches and logs", "ConfigMap:data.store", "other")
    prefix: str = leaf("", "folder inside the bucket", "WorkflowTemplate:container.env", "team-a")
    endpoint: str = leaf(
        "", "an S3 other than AWS, as in http://minio.storage:9000; empty with `minio.enabled`: its own",
        "ConfigMap:data.store", "https://s3.test:9000",
    )  # fmt: skip
    region: str = leaf("us-east-1", "region", "ConfigMap:data.store", "eu-west-1")
    existingSecret: Name = leaf(
        "",
        "secret with `accesskey` and `secretkey`; needed unless `minio.enabled` makes one",
        "ConfigMap:data.store",
        "other-s3",
    )


class Tracking(ValuesGroup):
    uri: str = leaf(
        "", "address of an MLflow server; empty with `mlflow.enabled`: the chart's own; empty without: no MLflow",
        "WorkflowTemplate:container.env", "http://mlflow.test:5001",
    )  # fmt: skip
    allowedPort: Port = leaf(5000, "its port, which stages may reach", "NetworkPolicy:egress", 5001)


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


_SMALL = Resources(
    requests={"cpu": "100m", "memory": "512Mi"}, limits={"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}
)
_WORK = Resources(
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
_PROFILES = {
    "cpu": Profile(
        defaults=Placement(resources=_WORK, deadlineSeconds=604800),
        stages={},
        pools=Pools(workspace=Pool(resources=_WORK), build=Pool(resources=_WORK), evaluate=Pool(resources=_JUDGE)),
        engine=EnginePods(resources=_WORK),
        ray=RayPods(headResources=_WORK, resources=_WORK),
    ),
    "gpu": Profile(
        parallelism=4,
        defaults=Placement(resources=_WITH_GPU, tolerations=_GPU),
        stages={"synthesis": Placement(resources=_WORK), "report": Placement(resources=_WORK)},
        pools=Pools(
            workspace=Pool(replicas=2, resources=_WORK),
            build=Pool(replicas=2, resources=_WORK),
            evaluate=Pool(replicas=2, resources=_WITH_GPU, tolerations=_GPU),
        ),
        engine=EnginePods(resources=_WITH_GPU, tolerations=_GPU),
        ray=RayPods(headResources=_WORK, resources=_WITH_GPU, tolerations=_GPU),
    ),
}


class Workflow(ValuesGroup):
    deadlineSeconds: int = leaf(
        1209600, "after this long a run is ended", "WorkflowTemplate:spec.activeDeadlineSeconds"
    )
    graceSeconds: int = leaf(
        120, "from SIGTERM to SIGKILL; a stage's checkpoint must fit", "WorkflowTemplate:podSpecPatch", 240
    )
    retryLimit: int = leaf(4, "how often a stage is tried again", "WorkflowTemplate:retryStrategy.limit")
    retryAfter: str = leaf("10s", "wait before the first retry; it triples", "WorkflowTemplate:backoff.duration", "1m")
    keepPods: str = leaf("600s", "how long a pod that succeeded stays", "WorkflowTemplate:deleteDelayDuration", "60s")
    keepDoneSeconds: int = leaf(
        604800, "how long a Workflow that succeeded stays", "WorkflowTemplate:secondsAfterSuccess"
    )
    keepFailedSeconds: int = leaf(2592000, "how long one that failed stays", "WorkflowTemplate:secondsAfterFailure")
    executorResources: Resources = group(
        Resources(
            requests={"cpu": "10m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
            limits={"cpu": "500m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
        ),
        "of Argo's own containers in a pod",
    )
    smallResources: Resources = group(_SMALL, "of prepare, finish and other pods that only ask and tell")


class SandboxValues(ValuesGroup):
    runtimeClassName: Name = leaf(
        "", "RuntimeClass of the servers, such as gVisor's or Kata's", "WorkflowTemplate:container.env", "gvisor"
    )
    extraVolumes: list[Object] = leaf(
        [], "more volumes of the servers", "WorkflowTemplate:container.env", [{"name": "v", "emptyDir": {}}]
    )
    extraVolumeMounts: list[Object] = leaf(
        [], "and where they are", "WorkflowTemplate:container.env", [{"name": "v", "mountPath": "/v"}]
    )
    recycleAfter: Annotated[int, Field(ge=0)] = leaf(
        1000,
        "verdicts after which a server ends and a fresh one takes its place; 0: never",
        "WorkflowTemplate:container.env",
    )
    recycleOnCheat: bool = leaf(True, "and after any cheat", "WorkflowTemplate:container.env")
    environment: dict[str, str] = leaf({}, "environment of the servers", "WorkflowTemplate:container.env", {"A": "b"})


class Access(ValuesGroup):
    viewers: list[Object] = leaf(
        [], "subjects that may look at runs", "RoleBinding:subjects", [{"kind": "ValuesGroup", "name": "everybody"}]
    )
    submitters: list[Object] = leaf(
        [],
        "subjects that may also submit, cancel and resume",
        "RoleBinding:subjects",
        [{"kind": "User", "name": "ada"}],
    )
    serviceAccountAnnotations: dict[str, str] = leaf(
        {},
        "on the service accounts of stages and of prepare, as clouds want them",
        "ServiceAccount:annotations",
        {"a": "b"},
    )


class Admission(ValuesGroup):
    enabled: bool = leaf(
        True, "admit only Workflows that are made from this release's templates", "ValidatingAdmissionPolicy:"
    )
    exemptUsers: list[str] = leaf(
        [], "users who are not asked, such as Argo's controller when it has `workflowDefaults`",
        "ValidatingAdmissionPolicy:matchConditions", ["system:serviceaccount:argo:argo"],
    )  # fmt: skip


class Network(ValuesGroup):
    enabled: bool = leaf(True, "deny by default, and allow what is needed", "NetworkPolicy:")
    apiServerCidrs: list[Cidr] = leaf(
        ["0.0.0.0/0"], "addresses of the API server, behind its service", "NetworkPolicy:egress", ["10.0.0.1/32"]
    )
    apiServerPort: Port = leaf(6443, "its port", "NetworkPolicy:egress")
    storeCidrs: list[Cidr] = leaf(
        ["0.0.0.0/0"], "addresses of an S3 that the chart does not bring", "NetworkPolicy:egress", ["10.0.0.2/32"]
    )
    storePort: Port = leaf(443, "its port", "NetworkPolicy:egress")
    trackingCidrs: list[Cidr] = leaf(
        [], "addresses of an MLflow that the chart does not bring", "NetworkPolicy:egress", ["10.0.0.3/32"]
    )
    dnsCidrs: list[Cidr] = leaf(
        [], "addresses of a DNS server outside of `kube-system`", "NetworkPolicy:egress", ["10.0.0.4/32"]
    )
    stageEgress: list[Object] = leaf(
        [], "more rules for stages, such as to a model's address", "NetworkPolicy:egress",
        [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}]}],
    )  # fmt: skip
    monitoringNamespace: str = leaf("monitoring", "where Prometheus runs", "NetworkPolicy:ingress", "prometheus")
    rayOperatorNamespace: str = leaf(
        "kuberay", "where KubeRay's operator runs, which asks the head of a stage's Ray",
        "WorkflowTemplate:container.env", "operators",
    )  # fmt: skip


class Quota(ValuesGroup):
    enabled: bool = leaf(False, "a ResourceQuota for the namespace", "ResourceQuota:")
    hard: dict[str, str | int] = leaf(
        {"pods": 200, "requests.nvidia.com/gpu": 16}, "its limits", "ResourceQuota:spec.hard", {"pods": 10}
    )


class Cron(ValuesGroup):
    enabled: bool = leaf(False, "submit a run again and again", "CronWorkflow:")
    schedule: str = leaf("0 2 * * 6", "when", "CronWorkflow:schedules", "1 1 * * *")
    timezone: str = leaf("Etc/UTC", "and in which time zone", "CronWorkflow:timezone", "Europe/Berlin")
    profile: str = leaf("cpu", "profile", "CronWorkflow:workflowTemplateRef", "gpu")
    config: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = leaf(
        "", "sha256 of a configuration that an earlier run has stored", "CronWorkflow:arguments", "cd" * 32
    )


class Gc(ValuesGroup):
    """What ``cuda-agent gc --on CONTEXT`` removes, for everybody who uses the release."""

    keep: Annotated[int, Field(ge=1)] = leaf(
        10, "newest runs of each pipeline that stay", r"WorkflowTemplate:container.env\[CUDA_AGENT_KEEP"
    )
    enabled: bool = leaf(
        False, "remove what no run needs again and again; it needs a moment without runs", "CronWorkflow:"
    )
    schedule: str = leaf("30 1 * * *", "when", "CronWorkflow:schedules", "1 1 * * *")


class Persistence(ValuesGroup):
    size: Quantity = leaf("20Gi", "size of the volume", "PersistentVolumeClaim:storage", "30Gi")
    storageClass: str = leaf(
        "", "storage class; empty: the default one", "PersistentVolumeClaim:storageClassName", "fast"
    )
    existingClaim: Name = leaf("", "a claim that is there already", "Deployment:claimName", "mine")


class Minio(ValuesGroup):
    enabled: bool = leaf(False, "bring a MinIO of one replica, for clusters that have no S3", "Deployment:")
    existingSecret: Name = leaf(
        "", "secret with `accesskey` and `secretkey`; empty: made at random", "Deployment:env", "m"
    )
    expireLogsDays: int = leaf(30, "after so many days logs and manifests that Argo wrote are removed", "Job:args", 7)
    persistence: Persistence = group(Persistence(size="50Gi"), "its volume")
    resources: Resources = group(_WORK, "its resources")


class Mlflow(ValuesGroup):
    enabled: bool = leaf(False, "bring an MLflow server, for clusters that have none", "Deployment:")
    backendUri: str = leaf(
        "", "address of a PostgreSQL without password, which comes from `backendSecret`; empty: SQLite on its volume",
        r"Deployment:env\[MLFLOW_BACKEND_STORE_URI", "postgresql://mlflow@db/mlflow",
    )  # fmt: skip
    backendSecret: Name = leaf("", "secret with `password` for `backendUri`", "Deployment:env", "db")
    allowedHosts: list[str] = leaf(
        [], "names besides its service's under which it may be asked", "Deployment:args", ["mlflow.example.org"]
    )
    persistence: Persistence = group(Persistence(size="20Gi"), "its volume")
    resources: Resources = group(_WORK, "its resources")


class Monitoring(ValuesGroup):
    serviceMonitor: bool = leaf(False, "a ServiceMonitor for the sandboxes' metrics", "ServiceMonitor:")
    dashboard: bool = leaf(False, "a ConfigMap with a Grafana dashboard", "ConfigMap:")
    alerts: bool = leaf(False, "a PrometheusRule", "PrometheusRule:")
    labels: dict[str, str] = leaf(
        {}, "labels that the operators look for", "(ServiceMonitor|PrometheusRule):labels", {"r": "p"}
    )
    dashboardLabels: dict[str, str] = leaf(
        {"grafana_dashboard": "1"}, "labels that Grafana's sidecar looks for", "ConfigMap:labels", {"g": "1"}
    )
    interval: str = leaf("30s", "how often metrics are read", "ServiceMonitor:interval", "15s")


class Webhook(ValuesGroup):
    existingSecret: Name = leaf(
        "",
        "secret with `url`: told how each run ended; the exit hook then always runs",
        "WorkflowTemplate:container.env",
        "w",
    )


class Values(ValuesGroup):
    nameOverride: Name = leaf("", "in place of the chart's name", "WorkflowTemplate:labels", "other")
    fullnameOverride: Name = leaf("", "in place of release and chart name", "WorkflowTemplate:metadata.name", "other")
    commonLabels: dict[str, str] = leaf({}, "on every object", "ServiceAccount:metadata.labels", {"team": "a"})
    images: Images = group(Images(), "images")
    store: StoreValues = group(StoreValues(), "the S3 that holds everything")
    tracking: Tracking = group(Tracking(), "MLflow")
    profiles: dict[str, Profile] = group(_PROFILES, "what a run's pods get; one WorkflowTemplate each")
    workflow: Workflow = group(Workflow(), "deadlines, retries, retention")
    sandbox: SandboxValues = group(SandboxValues(), "sandbox servers of all profiles")
    environment: dict[str, str] = leaf(
        {}, "environment of stages, prepare and finish; never a secret", "WorkflowTemplate:container.env", {"A": "b"}
    )
    secretEnvironment: dict[str, str] = leaf(
        {},
        "environment of stages from secrets: `NAME: secret/key`",
        "WorkflowTemplate:container.env",
        {"KEY": "api/key"},
    )
    extraVolumes: list[Object] = leaf(
        [],
        "more volumes of stages, prepare and finish",
        "WorkflowTemplate:spec.volumes",
        [{"name": "v", "emptyDir": {}}],
    )
    extraVolumeMounts: list[Object] = leaf(
        [], "and where they are", "WorkflowTemplate:volumeMounts", [{"name": "v", "mountPath": "/v"}]
    )
    extraObjects: list[Object] = leaf(
        [], "more objects of this release", "ConfigMap:",
        [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}, "data": {}}],
    )  # fmt: skip
    podSecurityContext: Object = leaf(
        {
            "runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "security context of all pods", "WorkflowTemplate:spec.securityContext",
        {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    )  # fmt: skip
    dnsPolicy: Literal["ClusterFirst", "Default", "None"] = leaf(
        "ClusterFirst", "DNS policy of stages", "WorkflowTemplate:dnsPolicy", "Default"
    )
    access: Access = group(Access(), "who may do what")
    admission: Admission = group(Admission(), "ValidatingAdmissionPolicy")
    networkPolicy: Network = group(Network(), "NetworkPolicies")
    quota: Quota = group(Quota(), "ResourceQuota")
    cron: Cron = group(Cron(), "CronWorkflow")
    gc: Gc = group(Gc(), "what runs leave behind")
    webhook: Webhook = group(Webhook(), "who is told when a run has ended")
    minio: Minio = group(Minio(), "MinIO")
    mlflow: Mlflow = group(Mlflow(), "MLflow")
    monitoring: Monitoring = group(Monitoring(), "Prometheus and Grafana")


CHART_VERSION = version("cuda-agent")
