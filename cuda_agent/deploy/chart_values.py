"""The schema of the Helm chart's values.  From it, ``chart`` makes values.yaml, values.schema.json and the README.

The schema checks each value alone.  The template ``_validate.tpl`` refuses values that do not fit together."""

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import Field

from cuda_agent.cluster.pools import POD_SECURITY
from cuda_agent.deploy.argo import EXECUTOR_RESOURCES
from cuda_agent.deploy.chart_profiles import (
    PROFILES,
    SMALL,
    WORK,
    Name,
    Object,
    Profile,
    Quantity,
    Resources,
    ValuesGroup,
    resources_of,
    value,
)

CHART_VERSION = version("cuda-agent")
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Cidr = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
PortOrUrls = Annotated[int, Field(ge=0, le=65535)]  # 0: the port of an address in other values


class Image(ValuesGroup):
    repository: str = value("", "image name without the registry")
    tag: str = value("", "image tag; empty: the chart's version")
    digest: Digest = value("", "image digest, as in sha256:0123...; takes precedence over the tag")


class Images(ValuesGroup):
    registry: str = value("", "registry of all images, as in registry.example.org/team")
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = value("IfNotPresent", "image pull policy of all pods")
    pullSecrets: list[str] = value([], "names of image pull secrets")
    command: list[str] = value(
        ["python3", "-m", "cuda_agent.cli"], "command that starts cuda-agent in the stage and sandbox images"
    )
    stage: Image = value(Image(repository="cuda-agent"), "image of stages, `prepare`, `finish` and maintenance jobs")
    sandbox: Image = value(Image(repository="cuda-agent-sandbox"), "image of sandbox servers")
    ray: Image = value(Image(repository="cuda-agent-ray"), "image of Ray pods, used with `profiles.NAME.ray.enabled`")
    engine: Image = value(
        Image(repository="cuda-agent-engine"), "image of vLLM servers, used with `profiles.NAME.engine.replicas`"
    )
    minio: Image = value(Image(repository="cuda-agent-minio"), "image of MinIO, used with `minio.enabled`")
    mlflow: Image = value(Image(repository="cuda-agent-mlflow"), "image of MLflow, used with `mlflow.enabled`")


class StoreValues(ValuesGroup):
    bucket: str = value("cuda-agent", "bucket for artifacts, caches and logs; must exist unless `minio.enabled`")
    prefix: str = value("", "folder in the bucket; empty: the bucket's root")
    endpoint: str = value(
        "", "URL of an S3 server, as in http://minio.storage:9000; empty: the chart's MinIO if enabled, otherwise AWS"
    )
    region: str = value("us-east-1", "region of the S3 server")
    existingSecret: Name = value(
        "",
        "name of a secret with keys `accesskey` and `secretkey`; required unless `minio.enabled`, or pods have an "
        "identity of the cloud: `roleArn`, `podIdentity`, or `eks.amazonaws.com/role-arn` in "
        "`access.serviceAccountAnnotations`",
    )
    roleArn: str = value(
        "",
        "AWS role that pods take with a token of their service account (web identity); the role must trust the "
        "cluster's issuer, on EKS or elsewhere",
    )
    tokenAudience: str = value("sts.amazonaws.com", "audience of that token")
    podIdentity: bool = value(False, "whether EKS Pod Identity gives pods their keys for the store")


class Tracking(ValuesGroup):
    uri: str = value("", "URL of an MLflow server; empty: the chart's MLflow if enabled, otherwise no MLflow")
    allowedPort: PortOrUrls = value(
        0, "port of MLflow that NetworkPolicies open for a run's pods; 0: that of `uri`, by default 443 for https"
    )


class PrivateCa(ValuesGroup):
    existingSecret: Name = value(
        "", "name of a secret with key `ca.crt`: certificates (PEM) that runs trust beside the public ones"
    )


class Workflow(ValuesGroup):
    deadlineSeconds: int = value(1209600, "seconds that a run may take; then it is stopped")
    graceSeconds: int = value(120, "seconds from SIGTERM to SIGKILL of a stage; must suffice to write a checkpoint")
    retryLimit: int = value(4, "maximum number of retries of a step; only failures that may be temporary are retried")
    retryAfter: str = value(
        "10s", "pause before the first retry; each later pause is three times as long, up to 10 minutes"
    )
    keepPods: str = value(
        "600s", "how long a pod is kept after it succeeded; a failed pod is kept as long as its Workflow"
    )
    keepDoneSeconds: int = value(604800, "seconds that a Workflow is kept after it succeeded")
    keepFailedSeconds: int = value(2592000, "seconds that a Workflow is kept after it failed")
    executorResources: Resources = value(
        Resources(**EXECUTOR_RESOURCES), "requests and limits of Argo's own containers in each pod"
    )
    smallResources: Resources = value(
        SMALL, "requests and limits of `prepare`, `finish`, maintenance jobs and `helm test`"
    )


class SandboxValues(ValuesGroup):
    runtimeClassName: Name = value(
        "", "RuntimeClass of sandbox servers, such as gVisor's or Kata's; empty: the nodes' default"
    )
    userNamespace: bool = value(
        False,
        "whether sandbox servers run in a user namespace (`hostUsers: false`); needs Kubernetes 1.33, and a container "
        "runtime and file systems that support it",
    )
    extraVolumes: list[Object] = value([], "additional volumes of sandbox servers")
    extraVolumeMounts: list[Object] = value([], "mounts of the additional volumes")
    recycleAfter: Annotated[int, Field(ge=0)] = value(
        1000, "number of verdicts after which a server restarts; 0: never"
    )
    recycleOnCheat: bool = value(True, "whether a server also restarts after the verdict `cheat`")
    environment: dict[str, str] = value({}, "environment variables of sandbox servers")


class Search(ValuesGroup):
    """The server of the language model for searches (``cuda-agent optimize --on``).  The key is sent to it alone."""

    server: Annotated[str, Field(pattern=r"^(https?://[^/?#@]+(/.*)?)?$")] = value(
        "",
        "address of an OpenAI-compatible server, including /v1; empty: no searches on this cluster; requires "
        "`networkPolicy.searchEgress`",
    )
    existingSecret: Name = value("", "name of a secret with key `key`, the server's API key; empty: it needs none")
    resources: Resources = value(
        resources_of(("100m", "256Mi", "64Mi"), ("1", "2Gi", "2Gi")), "requests and limits of each pod of a search"
    )


class Access(ValuesGroup):
    viewers: list[Object] = value([], "RBAC subjects that may view runs and logs, as in `{kind: User, name: ada}`")
    submitters: list[Object] = value([], "RBAC subjects that may also submit, cancel and resume runs")
    serviceAccountAnnotations: dict[str, str] = value(
        {}, "annotations of all service accounts except those of sandboxes and of Argo"
    )


class Admission(ValuesGroup):
    enabled: bool = value(True, "whether to refuse Workflows that are not made from this release's templates")
    releases: list[Name] = value(
        [], "other releases in this namespace, as `--release` names them; their templates are accepted, too"
    )
    exemptUsers: list[str] = value(
        [], "users that are not checked, such as `system:serviceaccount:argo:argo` if Argo has `workflowDefaults`"
    )


class Network(ValuesGroup):
    enabled: bool = value(True, "whether to deny all connections of the namespace's pods except those that are needed")
    apiServerCidrs: list[Cidr] = value(
        ["0.0.0.0/0"], "addresses (CIDR) of the API server's endpoints, not of its service"
    )
    apiServerPort: Port = value(6443, "port of the API server's endpoints")
    storeCidrs: list[Cidr] = value(["0.0.0.0/0"], "addresses (CIDR) of an external S3 server")
    storePort: PortOrUrls = value(0, "port of an external S3 server; 0: that of `store.endpoint`, 443 for AWS")
    trackingCidrs: list[Cidr] = value([], "addresses (CIDR) of an external MLflow server; required with `tracking.uri`")
    dnsCidrs: list[Cidr] = value([], "addresses (CIDR) of DNS servers outside `kube-system`")
    stageEgress: list[Object] = value([], "additional egress rules for stages, such as for a model's server")
    searchEgress: list[Object] = value(
        [], "egress rules for the pods of searches: those that lead to `search.server`; required with it"
    )
    monitoringNamespace: str = value(
        "monitoring",
        "namespace of Prometheus and of the collector; used with `monitoring.serviceMonitor`, `monitoring.podMonitor` "
        "and `tracing.endpoint`",
    )
    ingressNamespace: str = value(
        "ingress-nginx", "namespace of the Ingress controller; used with `mlflow.ingress.host`"
    )
    tracingCidrs: list[Cidr] = value([], "addresses (CIDR) of a collector outside of `monitoringNamespace`")
    rayOperatorNamespace: str = value("kuberay", "namespace of KubeRay's operator, which connects to Ray's head pods")


class Quota(ValuesGroup):
    enabled: bool = value(False, "whether to create a ResourceQuota for the namespace")
    hard: dict[str, str | int] = value({"pods": 200, "requests.nvidia.com/gpu": 16}, "limits of the ResourceQuota")


class Cron(ValuesGroup):
    enabled: bool = value(False, "whether to start a run on a schedule")
    schedule: str = value("0 2 * * 6", "times in cron syntax; the default is every Saturday at 2:00")
    timezone: str = value("Etc/UTC", "time zone of the schedule")
    profile: str = value("cpu", "profile of these runs")
    config: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = value(
        "", "sha256 of the runs' configuration, which an earlier run must have stored; `cuda-agent config` prints it"
    )


class Gc(ValuesGroup):
    """Settings of ``cuda-agent gc --on CONTEXT``, which hold for all users of the release."""

    keep: Annotated[int, Field(ge=1)] = value(
        10, "how many of the newest finished runs of each pipeline are kept; a sweep counts as one run"
    )
    days: Annotated[float, Field(ge=0)] = value(7, "runs that were active in so many days are kept anyway")
    enabled: bool = value(False, "whether to collect garbage on a schedule, beside running runs")
    schedule: str = value("30 1 * * *", "times in cron syntax, in the time zone of Argo's controller")


class Persistence(ValuesGroup):
    size: Quantity = value("20Gi", "size of the volume")
    storageClass: str = value("", "storage class of the volume; empty: the cluster's default")
    existingClaim: Name = value("", "name of an existing PersistentVolumeClaim; empty: the chart creates one")


class Minio(ValuesGroup):
    enabled: bool = value(False, "whether to install MinIO, with one replica")
    existingSecret: Name = value(
        "", "name of a secret with keys `accesskey` and `secretkey`; empty: a new one with random keys"
    )
    expireLogsDays: int = value(30, "days after which MinIO deletes logs and manifests that Argo wrote")
    persistence: Persistence = value(Persistence(size="50Gi"), "volume of MinIO")
    resources: Resources = value(WORK, "requests and limits of MinIO")


class Ingress(ValuesGroup):
    host: str = value("", "host name under which MLflow is reached from outside; empty: no Ingress")
    className: str = value("", "IngressClass; empty: the cluster's default")
    tlsSecret: Name = value("", "name of a TLS secret for the host, required with `host`")
    annotations: dict[str, str] = value(
        {}, "annotations of the Ingress, such as those by which its controller asks for a login: MLflow has none"
    )


class Mlflow(ValuesGroup):
    enabled: bool = value(False, "whether to install an MLflow server")
    backendUri: str = value(
        "",
        "URL of a PostgreSQL database (port 5432) without the password, as in postgresql://mlflow@db/mlflow; "
        "empty: SQLite",
    )
    backendSecret: Name = value("", "name of a secret with key `password`, required with `backendUri`")
    artifacts: Annotated[str, Field(pattern=r"^(s3://[^/?#@]+(/.*)?)?$")] = value(
        "",
        "bucket and prefix for logs and reports, as in s3://cuda-agent/mlflow, on the server and with the keys of "
        "`store`; empty: the volume",
    )
    allowedHosts: list[str] = value([], "additional host names under which MLflow accepts requests")
    ingress: Ingress = value(Ingress(), "Ingress of MLflow")
    persistence: Persistence = value(Persistence(size="20Gi"), "volume of MLflow")
    resources: Resources = value(WORK, "requests and limits of MLflow")


class Tracing(ValuesGroup):
    endpoint: Annotated[str, Field(pattern=r"^(https?://[^/?#@]+(/.*)?)?$")] = value(
        "",
        "address (OTLP over HTTP) of an OpenTelemetry collector to which runs send their traces, as in "
        "http://collector.monitoring:4318; empty: runs send none",
    )


class Monitoring(ValuesGroup):
    serviceMonitor: bool = value(False, "whether to create a ServiceMonitor for the metrics of sandbox servers")
    podMonitor: bool = value(False, "whether stages serve metrics, and to create a PodMonitor for them")
    dashboard: bool = value(False, "whether to create a ConfigMap with Grafana dashboards of runs and sandboxes")
    alerts: bool = value(
        False,
        "whether to create a PrometheusRule with alerts about sandboxes, lost episodes, stuck runs and full volumes",
    )
    stuckSeconds: Annotated[int, Field(ge=60)] = value(
        7200, "seconds without progress after which a stage counts as stuck; more than its longest step takes"
    )
    labels: dict[str, str] = value(
        {}, "labels by which the Prometheus operator selects ServiceMonitor, PodMonitor and PrometheusRule"
    )
    dashboardLabels: dict[str, str] = value(
        {"grafana_dashboard": "1"}, "labels by which Grafana's sidecar selects the dashboards"
    )
    interval: str = value("30s", "how often Prometheus reads the metrics")


class Webhook(ValuesGroup):
    existingSecret: Name = value(
        "",
        "name of a secret with key `url`, an HTTPS address (port 443) to which the end of each run is posted as JSON",
    )


class Gpu(ValuesGroup):
    """How pods get the GPUs that ``nvidia.com/gpu`` in their limits counts.  A device plugin counts GPUs of any kind.
    Dynamic resource allocation (DRA) chooses them by their properties."""

    allocation: Literal["plugin", "dra"] = value(
        "plugin", "`plugin`: by a device plugin; `dra`: by ResourceClaims, which needs Kubernetes 1.34 and a DRA driver"
    )
    deviceClass: str = value("gpu.nvidia.com", "with `dra`: name of the DeviceClass of the GPUs")
    selectors: list[str] = value(
        [], "with `dra`: CEL expressions that each GPU must fulfil, for example by memory or compute capability"
    )
    sharedClaim: Name = value(
        "",
        "with `dra`: name of a ResourceClaim that all pods share except servers that judge; empty: nothing is shared",
    )


class Values(ValuesGroup):
    nameOverride: Name = value("", "replaces the chart's name in labels and in the names of objects")
    fullnameOverride: Name = value(
        "", "prefix of objects' names, at most 30 characters; empty: from release and chart name"
    )
    commonLabels: dict[str, str] = value({}, "additional labels of all objects")
    images: Images = value(Images(), "container images")
    store: StoreValues = value(StoreValues(), "S3 store of all runs")
    tracking: Tracking = value(Tracking(), "MLflow server for the metrics, logs and reports of runs")
    privateCa: PrivateCa = value(
        PrivateCa(), "certificate authority of your own, for the store, MLflow and the webhook"
    )
    profiles: dict[str, Profile] = value(
        PROFILES, "resources and placement of a run's pods; one WorkflowTemplate per profile"
    )
    gpu: Gpu = value(Gpu(), "how pods get their GPUs")
    workflow: Workflow = value(Workflow(), "deadlines, retries and retention of runs")
    sandbox: SandboxValues = value(SandboxValues(), "settings of the sandbox servers of all profiles")
    search: Search = value(Search(), "searches with `cuda-agent optimize --on`")
    environment: dict[str, str] = value({}, "environment variables of stages, `prepare` and `finish`; not for secrets")
    secretEnvironment: dict[str, str] = value(
        {}, "environment variables of stages, `prepare` and `finish` from secrets, as in `NAME: secret/key`"
    )
    extraVolumes: list[Object] = value([], "additional volumes of stages, `prepare`, `finish` and MLflow")
    extraVolumeMounts: list[Object] = value([], "mounts of the additional volumes")
    extraObjects: list[Object] = value([], "additional Kubernetes objects of this release")
    podAnnotations: dict[str, str] = value(
        {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"},
        "annotations of all pods of a run; by default, autoscalers do not remove their nodes",
    )
    maxUnavailable: Annotated[int, Field(ge=0)] = value(
        1,
        "how many sandboxes of a run, and how many of its engines, may be evicted at once, as when nodes are drained",
    )
    nodeSelector: dict[str, str] = value({}, "labels of the nodes of all pods for which a profile names none")
    tolerations: list[Object] = value([], "node taints that all pods tolerate for which a profile names none")
    affinity: Object = value({}, "affinity rules of all pods for which a profile names none")
    podSecurityContext: Object = value(POD_SECURITY, "security context of all pods")
    dnsPolicy: Literal["ClusterFirst", "Default", "None"] = value("ClusterFirst", "DNS policy of all pods of a run")
    access: Access = value(Access(), "rights of users and service accounts")
    admission: Admission = value(Admission(), "ValidatingAdmissionPolicy for Workflows")
    networkPolicy: Network = value(Network(), "NetworkPolicies of the namespace")
    quota: Quota = value(Quota(), "ResourceQuota of the namespace")
    cron: Cron = value(Cron(), "CronWorkflow, which starts a run on a schedule")
    gc: Gc = value(Gc(), "garbage collection: removes old runs and what only they need")
    webhook: Webhook = value(Webhook(), "webhook that is called when a run has ended")
    minio: Minio = value(Minio(), "MinIO, an S3 server for clusters that have none")
    mlflow: Mlflow = value(Mlflow(), "MLflow server for clusters that have none")
    monitoring: Monitoring = value(Monitoring(), "Prometheus and Grafana")
    tracing: Tracing = value(Tracing(), "traces of runs, for OpenTelemetry")
