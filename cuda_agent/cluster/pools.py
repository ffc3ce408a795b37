"""The sandbox pools of a run as Kubernetes objects.  ``prepare`` creates them, ``finish`` deletes them.

    Secret          the token that this run's stages send
    Service         headless: an address for each pod
    NetworkPolicy   in: from this run's stages; out: nothing, not even DNS
    StatefulSet     one per role: workspace, build, evaluate

The run's Workflow owns all objects, so they are deleted with it at the latest.  The objects are data with ``RUN`` as a
placeholder for the Workflow's name.  For each profile the chart merges images, resources and node placement into them,
and ``objects`` fills in the run.

What it does not cover: the connection to a cluster (``api``), and the servers (``sandbox.service``).
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from cuda_agent.config import WHERE_JUDGED, SandboxConfig

ROLES = ("workspace", "build", "evaluate")
PORT = 8750
RUN_NAME = "RUN"  # placeholder for the Workflow's name
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
SCRATCH_MOUNTS = [{"name": "work", "mountPath": "/scratch"}, {"name": "tmp", "mountPath": "/tmp"}]
_EMPTY: dict[str, Any] = {"emptyDir": {}}


def version_name() -> str:
    """The version as part of an object's name: ``0-1-0``."""
    return version("cuda-agent").replace(".", "-").replace("+", "-")


def pool_objects() -> list[dict[str, Any]]:
    """The objects without a profile and a run, in the order of creation."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{RUN_NAME}-sandbox", "labels": _LABELS},
        "type": "Opaque",
        "stringData": {},
    }
    own = {POOL_LABEL: RUN_NAME, COMPONENT_LABEL: "sandbox"}
    stage = {"podSelector": {"matchLabels": {WORKFLOW_LABEL: RUN_NAME, COMPONENT_LABEL: "stage"}}}
    policy = network_policy(f"{RUN_NAME}-sandbox", _LABELS, own, [from_to([stage], PORT)], [])
    return [secret, headless_service(f"{RUN_NAME}-sandbox", _LABELS, own, PORT), policy, *map(_pool, ROLES)]


def headless_service(name: str, labels: Mapping[str, str], selector: Mapping[str, str], port: int) -> dict[str, Any]:
    """A Service that gives each pod an address."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # an unready server can then be asked for the reason
            "selector": selector,
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        },
    }


def network_policy(
    name: str,
    labels: Mapping[str, str],
    pods: Mapping[str, str],
    ingress: Sequence[Mapping[str, Any]],
    egress: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Limits the traffic of the pods with these labels; without ``egress`` only what comes in."""
    rules = {"ingress": ingress} if egress is None else {"ingress": ingress, "egress": egress}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podSelector": {"matchLabels": pods}, "policyTypes": [key.capitalize() for key in rules]} | rules,
    }


def from_to(peers: Sequence[Mapping[str, Any]], port: int) -> dict[str, Any]:
    """An ingress rule: these peers may connect to this port."""
    return {"from": peers, "ports": [{"port": port, "protocol": "TCP"}]}


def pod_spec(
    account: str, grace: int, container: Mapping[str, Any], volumes: Mapping[str, Mapping[str, Any]] = {}
) -> dict[str, Any]:
    """A pod of one container without a service-account token.

    Args:
        account: suffix of its service account.
        grace: seconds from SIGTERM to SIGKILL.
        container: mounts the scratch volumes ``work`` and ``tmp``.
        volumes: name -> source of further volumes.
    """
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": f"cuda-agent-{account}",
        "terminationGracePeriodSeconds": grace,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": n, **v} for n, v in ({"work": _EMPTY, "tmp": _EMPTY} | dict(volumes)).items()],
    }


def _pool(role: str) -> dict[str, Any]:
    labels = _LABELS | {ROLE_LABEL: role}
    token = {"secretKeyRef": {"name": f"{RUN_NAME}-sandbox", "key": "token"}}
    container = {
        "name": "sandbox",
        "image": f"cuda-agent-sandbox:{version('cuda-agent')}",
        "command": ["python3", "-m", "cuda_agent.cli"],
        "args": [
            *("sandbox", "serve", "--host", "0.0.0.0", "--port", str(PORT), "--roles", role),
            *("--open-metrics", "--recycle-after", "1000"),
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
        "volumeMounts": SCRATCH_MOUNTS,
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
            "template": {"metadata": {"labels": labels}, "spec": pod_spec("sandbox", 90, container)},
        },
    }


def objects(
    base: Sequence[Mapping[str, Any]], workflow: str, uid: str, token: str, config: SandboxConfig
) -> list[dict[str, Any]]:
    """The objects of one run, ready to be created: named after the Workflow and owned by it, with the token, and with
    the run's sandbox settings."""
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
    """The owner reference of objects that are deleted with the Workflow."""
    return {
        "apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": workflow, "uid": uid,
        "controller": False, "blockOwnerDeletion": False,
    }  # fmt: skip


def settings(config: SandboxConfig) -> list[str]:
    """The overrides that give a server these sandbox settings."""
    values = config.model_dump(mode="json", exclude=set(WHERE_JUDGED))
    return [f"sandbox.{name}={json.dumps(value)}" for name, value in values.items()]


def addresses(made: Sequence[Mapping[str, Any]], port: int = PORT) -> list[str]:
    """The address of every pod of the pools, for ``sandbox.servers``."""
    return [
        f"http://{item['metadata']['name']}-{number}.{item['spec']['serviceName']}:{port}"
        for item in made
        if item["kind"] == "StatefulSet"
        for number in range(item["spec"]["replicas"])
    ]


def named(value: Any, workflow: str) -> Any:
    """The value with the placeholder ``RUN`` replaced by the Workflow's name."""
    if isinstance(value, Mapping):
        return {key: named(inner, workflow) for key, inner in value.items()}
    if isinstance(value, list):
        return [named(inner, workflow) for inner in value]
    if isinstance(value, str) and (value == RUN_NAME or value.startswith(f"{RUN_NAME}-")):
        return workflow + value.removeprefix(RUN_NAME)
    return value
