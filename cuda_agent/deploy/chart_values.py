"""The schema of the chart's values; ``chart`` makes ``values.yaml``, ``values.schema.json`` and the README from it.

The schema checks each value alone.  The template ``_validate.tpl`` refuses values that do not fit together."""

from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cuda_agent.cluster.pools import POD_SECURITY
from cuda_agent.deploy.argo import EXECUTOR_RESOURCES
from cuda_agent.pipeline.graph import ROWS

CHART_VERSION = version("cuda-agent")
Object = dict[str, Any]  # part of a Kubernetes object, passed on unchanged
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?$")]
Cidr = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
StageName = Annotated[str, Field(pattern=f"^({'|'.join(stage.name for stage in ROWS)})$")]


class ValuesGroup(BaseModel):
    model_config = ConfigDict(extra="forbid")


def value(default: Any, description: str) -> Any:
    """Returns a field with the description that values.yaml and the README show."""
    return Field(default, description=description)


class Resources(ValuesGroup):
    requests: dict[str, Quantity | int] = value({}, "what a pod asks for")
    limits: dict[str, Quantity | int] = value({}, "what it may use at most; `nvidia.com/gpu: 1` asks for a GPU")


class Placement(ValuesGroup):
    """Where a pod runs, and its resources.  The profile's ``defaults`` give each field that a stage does not set; a
    field that a stage sets replaces the default as a whole."""

    resources: Resources = value(Resources(), "requests and limits")
    nodeSelector: dict[str, str] = value({}, "labels of its nodes")
    tolerations: list[Object] = value([], "taints it tolerates")
    affinity: Object = value({}, "affinity")
    deadlineSeconds: int = value(604800, "after this long a pod is ended for good")


class Pool(ValuesGroup):
    """One kind of sandbox servers of a run."""

    replicas: Annotated[int, Field(ge=1, le=512)] = value(1, "servers")
    resources: Resources = value(Resources(), "requests and limits of one server")
    nodeSelector: dict[str, str] = value({}, "labels of their nodes")
    tolerations: list[Object] = value([], "taints they tolerate")
    affinity: Object = value({}, "affinity")


class Pools(ValuesGroup):
    workspace: Pool = value(Pool(), "folders that the agent works in (CPU)")
    build: Pool = value(Pool(), "compilers (CPU)")
    evaluate: Pool = value(Pool(), "what judges and times; with GPUs where `sandbox.device=cuda`")


class EnginePods(ValuesGroup):
    """The vLLM servers of a run with ``policy.engine=vllm``; without these servers each stage starts its own."""

    replicas: Annotated[int, Field(ge=0, le=512)] = value(0, "servers; 0: none")
    claim: Name = value("", "claim of a volume that many nodes may write (ReadWriteMany), by which weights reach them")
    resources: Resources = value(Resources(), "requests and limits of one server; it uses all GPUs that it has")
    nodeSelector: dict[str, str] = value({}, "labels of their nodes")
    tolerations: list[Object] = value([], "taints they tolerate")
    affinity: Object = value({}, "affinity")
    extraVolumes: list[Object] = value([], "more volumes of the servers")
    extraVolumeMounts: list[Object] = value([], "and where they are")


class RayPods(ValuesGroup):
    """A Ray cluster of several pods for stages with ``runtime=ray``; without it Ray runs inside the stage's pod."""

    enabled: bool = value(False, "have KubeRay make one for each; needs its operator, 1.6")
    headResources: Resources = value(Resources(), "requests and limits of the pod that the stage itself runs in")
    resources: Resources = value(Resources(), "the same of the trainer's pod and of each rollout worker's")
    nodeSelector: dict[str, str] = value({}, "labels of their nodes")
    tolerations: list[Object] = value([], "taints they tolerate")
    affinity: Object = value({}, "affinity")


class Profile(ValuesGroup):
    """Resources and placement of a run's pods.  A user selects a profile: ``cuda-agent submit --profile NAME``."""

    device: str = value("", "what times are taken on, part of cache keys; empty: the profile's name")
    parallelism: int = value(1, "stages of a run at once; 1 where it has engine replicas or a Ray of several pods")
    queue: str = value("", "Kueue's LocalQueue for stages and sandboxes")
    priorityClass: str = value("", "PriorityClass of all pods")
    defaults: Placement = value(Placement(), "of every stage")
    stages: dict[StageName, Placement] = value({}, "a stage's own place; what it does not say is in `defaults`")
    pools: Pools = value(Pools(), "the run's sandbox")
    engine: EnginePods = value(EnginePods(), "vLLM servers for runs whose engine is vllm")
    ray: RayPods = value(RayPods(), "several pods for stages whose runtime is ray")


def _resources(cpu: str, memory: str, most_cpu: str, most_memory: str, disk: str, **more: int) -> Resources:
    limits = {"cpu": most_cpu, "memory": most_memory, "ephemeral-storage": disk} | more
    return Resources(requests={"cpu": cpu, "memory": memory}, limits=limits)


SMALL = _resources("100m", "512Mi", "1", "1Gi", "2Gi")
WORK = _resources("500m", "2Gi", "2", "8Gi", "20Gi")
_JUDGE = _resources("500m", "1Gi", "2", "6Gi", "10Gi")
_GPU = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
_WITH_GPU = _resources("8", "64Gi", "16", "128Gi", "500Gi", **{"nvidia.com/gpu": 1})
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


# the values of a release ----------------------------------------------------------------------------------------------


class Image(ValuesGroup):
    repository: str = value("", "name without registry")
    tag: str = value("", "tag; empty: the chart's version")
    digest: Digest = value("", "digest, which wins over the tag")


class Images(ValuesGroup):
    registry: str = value("", "registry of all images, as in registry.example.org/team")
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = value("IfNotPresent", "when images are pulled")
    pullSecrets: list[str] = value([], "names of pull secrets")
    command: list[str] = value(
        ["python3", "-m", "cuda_agent.cli"], "how cuda-agent is started in the stage and sandbox images"
    )
    stage: Image = value(Image(repository="cuda-agent"), "stages, prepare and finish")
    sandbox: Image = value(Image(repository="cuda-agent-sandbox"), "the sandbox's servers")
    ray: Image = value(Image(repository="cuda-agent-ray"), "pods of a stage's Ray: the stages' image, with all of Ray")
    engine: Image = value(Image(repository="cuda-agent-engine"), "engine replicas, where a profile has them")
    minio: Image = value(Image(repository="cuda-agent-minio"), "MinIO, when the chart brings it")
    mlflow: Image = value(Image(repository="cuda-agent-mlflow"), "MLflow, when the chart brings it")


class StoreValues(ValuesGroup):
    bucket: str = value("cuda-agent", "bucket of artifacts, caches and logs")
    prefix: str = value("", "folder inside the bucket")
    endpoint: str = value(
        "", "an S3 other than AWS, as in http://minio.storage:9000; empty with `minio.enabled`: its own"
    )
    region: str = value("us-east-1", "region")
    existingSecret: Name = value("", "secret with `accesskey` and `secretkey`; needed unless `minio.enabled` makes one")


class Tracking(ValuesGroup):
    uri: str = value(
        "", "address of an MLflow server; empty with `mlflow.enabled`: the chart's own; empty without: no MLflow"
    )
    allowedPort: Port = value(5000, "its port, which stages may reach")


class Workflow(ValuesGroup):
    deadlineSeconds: int = value(1209600, "after this long a run is ended")
    graceSeconds: int = value(120, "from SIGTERM to SIGKILL; a stage's checkpoint must fit")
    retryLimit: int = value(4, "how often a stage is tried again")
    retryAfter: str = value("10s", "wait before the first retry; it triples")
    keepPods: str = value("600s", "how long a pod that succeeded stays")
    keepDoneSeconds: int = value(604800, "how long a Workflow that succeeded stays")
    keepFailedSeconds: int = value(2592000, "how long one that failed stays")
    executorResources: Resources = value(Resources(**EXECUTOR_RESOURCES), "of Argo's own containers in a pod")
    smallResources: Resources = value(SMALL, "of prepare, finish and other pods that only ask and tell")


class SandboxValues(ValuesGroup):
    runtimeClassName: Name = value("", "RuntimeClass of the servers, such as gVisor's or Kata's")
    extraVolumes: list[Object] = value([], "more volumes of the servers")
    extraVolumeMounts: list[Object] = value([], "and where they are")
    recycleAfter: Annotated[int, Field(ge=0)] = value(
        1000, "verdicts after which a server ends and a fresh one takes its place; 0: never"
    )
    recycleOnCheat: bool = value(True, "and after any cheat")
    environment: dict[str, str] = value({}, "environment of the servers")


class Access(ValuesGroup):
    viewers: list[Object] = value([], "subjects that may look at runs")
    submitters: list[Object] = value([], "subjects that may also submit, cancel and resume")
    serviceAccountAnnotations: dict[str, str] = value(
        {}, "on the service accounts of stages and of prepare, as clouds want them"
    )


class Admission(ValuesGroup):
    enabled: bool = value(True, "admit only Workflows that are made from this release's templates")
    exemptUsers: list[str] = value(
        [], "users who are not asked, such as Argo's controller when it has `workflowDefaults`"
    )


class Network(ValuesGroup):
    enabled: bool = value(True, "deny by default, and allow what is needed")
    apiServerCidrs: list[Cidr] = value(["0.0.0.0/0"], "addresses of the API server, behind its service")
    apiServerPort: Port = value(6443, "its port")
    storeCidrs: list[Cidr] = value(["0.0.0.0/0"], "addresses of an S3 that the chart does not bring")
    storePort: Port = value(443, "its port")
    trackingCidrs: list[Cidr] = value([], "addresses of an MLflow that the chart does not bring")
    dnsCidrs: list[Cidr] = value([], "addresses of a DNS server outside of `kube-system`")
    stageEgress: list[Object] = value([], "more rules for stages, such as to a model's address")
    monitoringNamespace: str = value("monitoring", "where Prometheus runs")
    rayOperatorNamespace: str = value("kuberay", "where KubeRay's operator runs, which asks the head of a stage's Ray")


class Quota(ValuesGroup):
    enabled: bool = value(False, "a ResourceQuota for the namespace")
    hard: dict[str, str | int] = value({"pods": 200, "requests.nvidia.com/gpu": 16}, "its limits")


class Cron(ValuesGroup):
    enabled: bool = value(False, "submit a run again and again")
    schedule: str = value("0 2 * * 6", "when")
    timezone: str = value("Etc/UTC", "and in which time zone")
    profile: str = value("cpu", "profile")
    config: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = value(
        "", "sha256 of a configuration that an earlier run has stored"
    )


class Gc(ValuesGroup):
    """Settings of ``cuda-agent gc --on CONTEXT``, which hold for all users of the release."""

    keep: Annotated[int, Field(ge=1)] = value(10, "newest runs of each pipeline that stay")
    enabled: bool = value(False, "remove what no run needs again and again; it needs a moment without runs")
    schedule: str = value("30 1 * * *", "when")


class Persistence(ValuesGroup):
    size: Quantity = value("20Gi", "size of the volume")
    storageClass: str = value("", "storage class; empty: the default one")
    existingClaim: Name = value("", "a claim that is there already")


class Minio(ValuesGroup):
    enabled: bool = value(False, "bring a MinIO of one replica, for clusters that have no S3")
    existingSecret: Name = value("", "secret with `accesskey` and `secretkey`; empty: made at random")
    expireLogsDays: int = value(30, "after so many days logs and manifests that Argo wrote are removed")
    persistence: Persistence = value(Persistence(size="50Gi"), "its volume")
    resources: Resources = value(WORK, "its resources")


class Mlflow(ValuesGroup):
    enabled: bool = value(False, "bring an MLflow server, for clusters that have none")
    backendUri: str = value(
        "", "address of a PostgreSQL without password, which comes from `backendSecret`; empty: SQLite on its volume"
    )
    backendSecret: Name = value("", "secret with `password` for `backendUri`")
    allowedHosts: list[str] = value([], "names besides its service's under which it may be asked")
    persistence: Persistence = value(Persistence(size="20Gi"), "its volume")
    resources: Resources = value(WORK, "its resources")


class Monitoring(ValuesGroup):
    serviceMonitor: bool = value(False, "a ServiceMonitor for the sandboxes' metrics")
    dashboard: bool = value(False, "a ConfigMap with a Grafana dashboard")
    alerts: bool = value(False, "a PrometheusRule")
    labels: dict[str, str] = value({}, "labels that the operators look for")
    dashboardLabels: dict[str, str] = value({"grafana_dashboard": "1"}, "labels that Grafana's sidecar looks for")
    interval: str = value("30s", "how often metrics are read")


class Webhook(ValuesGroup):
    existingSecret: Name = value("", "secret with `url`: told how each run ended; the exit hook then always runs")


class Values(ValuesGroup):
    nameOverride: Name = value("", "in place of the chart's name")
    fullnameOverride: Name = value("", "in place of release and chart name")
    commonLabels: dict[str, str] = value({}, "on every object")
    images: Images = value(Images(), "images")
    store: StoreValues = value(StoreValues(), "the S3 that holds everything")
    tracking: Tracking = value(Tracking(), "MLflow")
    profiles: dict[str, Profile] = value(PROFILES, "what a run's pods get; one WorkflowTemplate each")
    workflow: Workflow = value(Workflow(), "deadlines, retries, retention")
    sandbox: SandboxValues = value(SandboxValues(), "sandbox servers of all profiles")
    environment: dict[str, str] = value({}, "environment of stages, prepare and finish; never a secret")
    secretEnvironment: dict[str, str] = value({}, "environment of stages from secrets: `NAME: secret/key`")
    extraVolumes: list[Object] = value([], "more volumes of stages, prepare and finish")
    extraVolumeMounts: list[Object] = value([], "and where they are")
    extraObjects: list[Object] = value([], "more objects of this release")
    podSecurityContext: Object = value(POD_SECURITY, "security context of all pods")
    dnsPolicy: Literal["ClusterFirst", "Default", "None"] = value("ClusterFirst", "DNS policy of stages")
    access: Access = value(Access(), "who may do what")
    admission: Admission = value(Admission(), "ValidatingAdmissionPolicy")
    networkPolicy: Network = value(Network(), "NetworkPolicies")
    quota: Quota = value(Quota(), "ResourceQuota")
    cron: Cron = value(Cron(), "CronWorkflow")
    gc: Gc = value(Gc(), "what runs leave behind")
    webhook: Webhook = value(Webhook(), "who is told when a run has ended")
    minio: Minio = value(Minio(), "MinIO")
    mlflow: Mlflow = value(Mlflow(), "MLflow")
    monitoring: Monitoring = value(Monitoring(), "Prometheus and Grafana")
