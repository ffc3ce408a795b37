"""A run's sandbox pools as Kubernetes objects: what ``prepare`` makes, and ``finish`` deletes.

    Secret          the token that this run's stages show
    Service         headless: an address for each pod
    NetworkPolicy   in: from this run's stages; out: nothing, not even DNS
    StatefulSet     one a role: workspace, build, evaluate

All are owned by the run's Workflow, so they go with it at the latest.  The objects are data with ``RUN`` in the place
of the Workflow's name; the chart merges images, resources and places into them, a profile at a time, and ``objects``
fills them in.

What it does not cover: talking to a cluster (``cluster_api``), and what a server does (``sandbox.service``).
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from cuda_agent.config import WHERE_JUDGED, SandboxConfig

ROLES = ("workspace", "build", "evaluate")
PORT = 8750
RUN_NAME = "RUN"  # stands for the Workflow's name
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"  # Argo puts it on the pods of a Workflow
POOL_LABEL = "cuda-agent.io/run"
ROLE_LABEL = "cuda-agent.io/role"
NAME_LABEL, COMPONENT_LABEL = "app.kubernetes.io/name", "app.kubernetes.io/component"

_LABELS = {NAME_LABEL: "cuda-agent", COMPONENT_LABEL: "sandbox", POOL_LABEL: RUN_NAME}
CONTAINER_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}

POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def version_name() -> str:
    """The version as part of an object's name: ``0-1-0``."""
    return version("cuda-agent").replace(".", "-").replace("+", "-")


def pool_objects() -> list[dict[str, Any]]:
    """The objects of a run without a profile, in the order in which they are made."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{RUN_NAME}-sandbox", "labels": _LABELS},
        "type": "Opaque",
        "stringData": {},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{RUN_NAME}-sandbox", "labels": _LABELS},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # an unready server says why; an unknown name says nothing
            "selector": {POOL_LABEL: RUN_NAME, COMPONENT_LABEL: "sandbox"},
            "ports": [{"name": "http", "port": PORT, "protocol": "TCP"}],
        },
    }
    stage = {"podSelector": {"matchLabels": {WORKFLOW_LABEL: RUN_NAME, COMPONENT_LABEL: "stage"}}}
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{RUN_NAME}-sandbox", "labels": _LABELS},
        "spec": {
            "podSelector": {"matchLabels": {POOL_LABEL: RUN_NAME, COMPONENT_LABEL: "sandbox"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [stage], "ports": [{"port": PORT, "protocol": "TCP"}]}],
            "egress": [],
        },
    }
    return [secret, service, policy, *(_pool(role) for role in ROLES)]


def _pool(role: str) -> dict[str, Any]:
    labels = _LABELS | {ROLE_LABEL: role}
    token = {"secretKeyRef": {"name": f"{RUN_NAME}-sandbox", "key": "token"}}
    container = {
        "name": "sandbox",
        "image": f"cuda-agent-sandbox:{version('cuda-agent')}",
        "command": ["python3", "-m", "cuda_agent.cli"],
        "args": [
            "sandbox",
            "serve",
            "--host",
            "0.0.0.0",
            "--port",
            str(PORT),
            "--roles",
            role,
            "--open-metrics",
            "--recycle-after",
            "1000",
        ],
        "env": [
            {"name": "HOME", "value": "/scratch"},
            {"name": "CUDA_AGENT_HOME", "value": "/scratch/home"},
            {"name": "CUDA_AGENT_SANDBOX_TOKEN", "valueFrom": token},
        ],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 2, "failureThreshold": 5},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 20, "failureThreshold": 6},
        "startupProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1, "failureThreshold": 300},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "work", "mountPath": "/scratch"}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": f"{RUN_NAME}-{role}", "labels": labels},
        "spec": {
            "replicas": 1,
            "podManagementPolicy": "Parallel",
            "serviceName": f"{RUN_NAME}-sandbox",
            "selector": {"matchLabels": {POOL_LABEL: RUN_NAME, ROLE_LABEL: role}},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "serviceAccountName": "cuda-agent-sandbox",
                    "terminationGracePeriodSeconds": 90,
                    "securityContext": POD_SECURITY,
                    "containers": [container],
                    "volumes": [{"name": "work", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
                },
            },
        },
    }


def objects(
    base: Sequence[Mapping[str, Any]], workflow: str, uid: str, token: str, config: SandboxConfig
) -> list[dict[str, Any]]:
    """The objects of one run, ready to be made: ``base`` with the Workflow's name in its place, owned by it, with the
    token, and with servers that judge by the run's own settings."""
    owner = owned_by(workflow, uid)
    made = [named(dict(item), workflow) for item in base]
    for item in made:
        item["metadata"]["ownerReferences"] = [owner]
        if item["kind"] == "Secret":
            item["stringData"] = {"token": token}
        if item["kind"] == "StatefulSet":
            item["spec"]["template"]["spec"]["containers"][0]["args"] += settings(config)
    return made


def owned_by(workflow: str, uid: str) -> dict[str, Any]:
    """The owner reference of what goes with a run's Workflow."""
    return {
        "apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": workflow, "uid": uid,
        "controller": False, "blockOwnerDeletion": False,
    }  # fmt: skip


def settings(config: SandboxConfig) -> list[str]:
    """The overrides that make a server judge as this configuration says."""
    values = config.model_dump(mode="json", exclude=set(WHERE_JUDGED))
    return [f"sandbox.{name}={json.dumps(value)}" for name, value in values.items()]


def addresses(made: Sequence[Mapping[str, Any]], port: int = PORT) -> list[str]:
    """Of every pod of the pools, as ``sandbox.servers`` wants them."""
    return [
        f"http://{item['metadata']['name']}-{number}.{item['spec']['serviceName']}:{port}"
        for item in made
        if item["kind"] == "StatefulSet"
        for number in range(item["spec"]["replicas"])
    ]


def named(value: Any, workflow: str) -> Any:
    """With the Workflow's name where ``RUN`` stands for it."""
    if isinstance(value, Mapping):
        return {key: named(inner, workflow) for key, inner in value.items()}
    if isinstance(value, list):
        return [named(inner, workflow) for inner in value]
    if isinstance(value, str) and (value == RUN_NAME or value.startswith(f"{RUN_NAME}-")):
        return workflow + value.removeprefix(RUN_NAME)
    return value
