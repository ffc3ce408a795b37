"""The schema of the chart's values, from which ``chart`` makes ``values.yaml``, ``values.schema.json`` and the README.

What it does not cover: the values of a profile (``chart_profiles``), how values are merged into objects (the chart's
templates), and combinations that no type can refuse (``templates/_validate.tpl``).
"""

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import Field

from cuda_agent.deploy.chart_fields import (
    Cidr,
    Digest,
    Name,
    Object,
    Port,
    Quantity,
    Resources,
    ValuesGroup,
    group,
    leaf,
)
from cuda_agent.deploy.chart_profiles import PROFILES, SMALL, WORK, Profile


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
    smallResources: Resources = group(SMALL, "of prepare, finish and other pods that only ask and tell")


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
    resources: Resources = group(WORK, "its resources")


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
    resources: Resources = group(WORK, "its resources")


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
    profiles: dict[str, Profile] = group(PROFILES, "what a run's pods get; one WorkflowTemplate each")
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
