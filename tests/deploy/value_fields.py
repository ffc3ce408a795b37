"""Lists, for every value of the Helm chart, a Kubernetes field that depends on it and another value to try.

A key of ``FIELDS`` is the value's dotted path, or a pattern of such paths. An entry is a pair. Its first item is the
kind of an object, a colon, and a regular expression for the path of the field in the object. Its second item is a value
that changes this field. None means that the test derives such a value from the default."""

from fnmatch import fnmatchcase
from typing import Any

ENV = "WorkflowTemplate:container.env"  # of a step, or of all by templateDefaults

# The first pattern that matches counts.
FIELDS: dict[str, tuple[str, Any]] = {
    "nameOverride": ("WorkflowTemplate:labels", "other"),
    "fullnameOverride": ("WorkflowTemplate:metadata.name", "other"),
    "commonLabels": ("ServiceAccount:metadata.labels", {"team": "a"}),
    "images.registry": ("WorkflowTemplate:image$", "r.test/x"),
    "images.pullPolicy": ("WorkflowTemplate:imagePullPolicy$", "Never"),
    "images.pullSecrets": ("WorkflowTemplate:imagePullSecrets", ["pull"]),
    "images.command": ("WorkflowTemplate:container.command", ["/opt/cuda-agent"]),
    "images.*.repository": ("(WorkflowTemplate|StatefulSet|Deployment|Pod):", "other/image"),
    "images.*.tag": ("(WorkflowTemplate|StatefulSet|Deployment|Pod):", "other"),
    "images.*.digest": ("(WorkflowTemplate|StatefulSet|Deployment|Pod):", "sha256:" + "ab" * 32),
    "store.bucket": ("ConfigMap:data.store", "other"),
    "store.prefix": (ENV, "team-a"),
    "store.endpoint": ("ConfigMap:data.store", "https://s3.test:9000"),
    "store.region": ("ConfigMap:data.store", "eu-west-1"),
    "store.existingSecret": ("ConfigMap:data.store", "other-s3"),
    "tracking.uri": (ENV, "http://mlflow.test:5001"),
    "store.roleArn": (r"WorkflowTemplate:container.env\[AWS_ROLE_ARN", "arn:aws:iam::1:role/store"),
    "store.tokenAudience": ("WorkflowTemplate:spec.volumes", "minio"),
    "store.podIdentity": ("NetworkPolicy:egress", None),
    "tracking.allowedPort": ("NetworkPolicy:egress", 5001),
    "privateCa.existingSecret": ("WorkflowTemplate:spec.volumes", "ca"),
    "profiles.cpu.base": ("WorkflowTemplate:nodeSelector", "gpu"),
    "profiles.gpu.base": ("WorkflowTemplate:nodeSelector", "cpu"),
    "profiles.*.device": (ENV, "h1"),
    "profiles.*.parallelism": ("WorkflowTemplate:spec.parallelism", 3),
    "profiles.*.queue": ("WorkflowTemplate:metadata.labels", "gpus"),
    "profiles.*.priorityClass": ("WorkflowTemplate:podPriorityClassName", "high"),
    "*esources.requests": ("(WorkflowTemplate|StatefulSet|Deployment):requests", {"cpu": "150m"}),
    "*esources.limits": (
        "(WorkflowTemplate|StatefulSet|Deployment):limits",
        {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "4Gi"},
    ),
    "profiles.*.stages": ("WorkflowTemplate:nodeSelector", {"agentic": {"nodeSelector": {"gpu": "h100"}}}),
    "profiles.*.pools.*.replicas": (ENV, None),
    "profiles.*.pools.*.nodeSelector": (ENV, {"pool": "b"}),
    "profiles.*.pools.*.tolerations": (ENV, [{"key": "sandbox", "operator": "Exists"}]),
    "profiles.*.pools.*.affinity": (ENV, {"podAntiAffinity": {}}),
    "profiles.*.engine.replicas": (r"WorkflowTemplate:container.env\[CUDA_AGENT_ENGINE", 2),
    "profiles.*.engine.claim": (ENV, "weights"),
    "profiles.*.engine.nodeSelector": (ENV, {"pool": "e"}),
    "profiles.*.engine.tolerations": (ENV, [{"key": "engine", "operator": "Exists"}]),
    "profiles.*.engine.affinity": (ENV, {"podAntiAffinity": {}}),
    "profiles.*.engine.extraVolumes": (ENV, [{"name": "v", "emptyDir": {}}]),
    "profiles.*.engine.extraVolumeMounts": (ENV, [{"name": "v", "mountPath": "/v"}]),
    "profiles.*.ray.enabled": (r"WorkflowTemplate:container.env\[CUDA_AGENT_RAY", None),
    "profiles.*.ray.nodeSelector": (ENV, {"pool": "r"}),
    "profiles.*.ray.tolerations": (ENV, [{"key": "ray", "operator": "Exists"}]),
    "profiles.*.ray.affinity": (ENV, {"podAntiAffinity": {}}),
    # the defaults of stages, and a stage's own
    "profiles.*.nodeSelector": ("WorkflowTemplate:nodeSelector", {"pool": "a"}),
    "profiles.*.tolerations": ("WorkflowTemplate:tolerations", [{"key": "gpu", "operator": "Exists"}]),
    "profiles.*.affinity": ("WorkflowTemplate:affinity", {"podAntiAffinity": {}}),
    "profiles.*.deadlineSeconds": ("WorkflowTemplate:activeDeadlineSeconds", None),
    "workflow.deadlineSeconds": ("WorkflowTemplate:spec.activeDeadlineSeconds", None),
    "workflow.graceSeconds": ("WorkflowTemplate:podSpecPatch", 240),
    "workflow.retryLimit": ("WorkflowTemplate:retryStrategy.limit", None),
    "workflow.retryAfter": ("WorkflowTemplate:backoff.duration", "1m"),
    "workflow.keepPods": ("WorkflowTemplate:deleteDelayDuration", "60s"),
    "workflow.keepDoneSeconds": ("WorkflowTemplate:secondsAfterSuccess", None),
    "workflow.keepFailedSeconds": ("WorkflowTemplate:secondsAfterFailure", None),
    "sandbox.runtimeClassName": (ENV, "gvisor"),
    "sandbox.extraVolumes": (ENV, [{"name": "v", "emptyDir": {}}]),
    "sandbox.extraVolumeMounts": (ENV, [{"name": "v", "mountPath": "/v"}]),
    "sandbox.recycleAfter": (ENV, None),
    "sandbox.recycleOnCheat": (ENV, None),
    "sandbox.environment": (ENV, {"A": "b"}),
    "environment": (ENV, {"A": "b"}),
    "secretEnvironment": (ENV, {"KEY": "api/key"}),
    "extraVolumes": ("WorkflowTemplate:spec.volumes", [{"name": "v", "emptyDir": {}}]),
    "extraVolumeMounts": ("WorkflowTemplate:volumeMounts", [{"name": "v", "mountPath": "/v"}]),
    "extraObjects": (
        "ConfigMap:",
        [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}, "data": {}}],
    ),
    "podSecurityContext": (
        "WorkflowTemplate:spec.securityContext",
        {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    ),
    "dnsPolicy": ("WorkflowTemplate:dnsPolicy", "Default"),
    "access.viewers": ("RoleBinding:subjects", [{"kind": "Group", "name": "everybody"}]),
    "access.submitters": ("RoleBinding:subjects", [{"kind": "User", "name": "ada"}]),
    "access.serviceAccountAnnotations": ("ServiceAccount:annotations", {"a": "b"}),
    "admission.enabled": ("ValidatingAdmissionPolicy:", None),
    "admission.exemptUsers": ("ValidatingAdmissionPolicy:matchConditions", ["system:serviceaccount:argo:argo"]),
    "networkPolicy.enabled": ("NetworkPolicy:", None),
    "networkPolicy.apiServerCidrs": ("NetworkPolicy:egress", ["10.0.0.1/32"]),
    "networkPolicy.apiServerPort": ("NetworkPolicy:egress", None),
    "networkPolicy.storeCidrs": ("NetworkPolicy:egress", ["10.0.0.2/32"]),
    "networkPolicy.storePort": ("NetworkPolicy:egress", None),
    "networkPolicy.trackingCidrs": ("NetworkPolicy:egress", ["10.0.0.3/32"]),
    "networkPolicy.dnsCidrs": ("NetworkPolicy:egress", ["10.0.0.4/32"]),
    "networkPolicy.stageEgress": ("NetworkPolicy:egress", [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}]}]),
    "networkPolicy.monitoringNamespace": ("NetworkPolicy:ingress", "prometheus"),
    "networkPolicy.rayOperatorNamespace": (ENV, "operators"),
    "quota.enabled": ("ResourceQuota:", None),
    "quota.hard": ("ResourceQuota:spec.hard", {"pods": 10}),
    "cron.enabled": ("CronWorkflow:", None),
    "cron.schedule": ("CronWorkflow:schedules", "1 1 * * *"),
    "cron.timezone": ("CronWorkflow:timezone", "Europe/Berlin"),
    "cron.profile": ("CronWorkflow:workflowTemplateRef", "gpu"),
    "cron.config": ("CronWorkflow:arguments", "cd" * 32),
    "gc.keep": (r"WorkflowTemplate:container.env\[CUDA_AGENT_KEEP", None),
    "gc.days": (r"WorkflowTemplate:container.env\[CUDA_AGENT_DAYS", None),
    "gc.enabled": ("CronWorkflow:", None),
    "gc.schedule": ("CronWorkflow:schedules", "1 1 * * *"),
    "webhook.existingSecret": (ENV, "w"),
    "minio.enabled": ("Deployment:", None),
    "minio.existingSecret": ("Deployment:env", "m"),
    "minio.expireLogsDays": ("Job:args", 7),
    "*.persistence.size": ("PersistentVolumeClaim:storage", "30Gi"),
    "*.persistence.storageClass": ("PersistentVolumeClaim:storageClassName", "fast"),
    "*.persistence.existingClaim": ("Deployment:claimName", "mine"),
    "mlflow.enabled": ("Deployment:", None),
    "mlflow.backendUri": (r"Deployment:env\[MLFLOW_BACKEND_STORE_URI", "postgresql://mlflow@db/mlflow"),
    "mlflow.backendSecret": ("Deployment:env", "db"),
    "mlflow.allowedHosts": ("Deployment:args", ["mlflow.example.org"]),
    "monitoring.serviceMonitor": ("ServiceMonitor:", None),
    "monitoring.dashboard": ("ConfigMap:", None),
    "monitoring.alerts": ("PrometheusRule:", None),
    "monitoring.labels": ("(ServiceMonitor|PrometheusRule):labels", {"r": "p"}),
    "monitoring.dashboardLabels": ("ConfigMap:labels", {"g": "1"}),
    "monitoring.interval": ("ServiceMonitor:interval", "15s"),
}


def field_of(path: str) -> tuple[str, Any]:
    """Returns the pair that ``FIELDS`` lists for the chart value at a dotted path: (field, other value).

    Raises:
        AssertionError: ``FIELDS`` has no pattern for the path."""
    for pattern, known in FIELDS.items():
        if fnmatchcase(path, pattern):
            return known
    raise AssertionError(f"tests/deploy/value_fields.py does not say where {path} ends up")
