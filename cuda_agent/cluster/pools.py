"""The sandbox pools of a run as Kubernetes objects, and helpers for the run's other pods (``engines``, ``rayjobs``).

    Secret          the token that this run's stages send
    Service         headless: an address for each pod
    NetworkPolicy   in: from this run's stages; out: nothing, not even DNS
    StatefulSet     one per role: workspace, build, evaluate

The objects are data in which ``RUN`` stands for the name of the Workflow that owns them.  For each profile the chart
adds images, resources and node placement; ``objects`` then fills in the run."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from cuda_agent.cluster.api import API_VERSIONS, new_object
from cuda_agent.config import WHERE_JUDGED, SandboxConfig

ROLES = ("workspace", "build", "evaluate")
PORT = 8750
COMMAND = ["python3", "-m", "cuda_agent.cli"]
RUN_NAME = "RUN"  # placeholder for the Workflow's name
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"  # Argo puts it on the pods of a Workflow
POOL_LABEL = "cuda-agent.io/run"
ROLE_LABEL = "cuda-agent.io/role"
NAME_LABEL, COMPONENT_LABEL = "app.kubernetes.io/name", "app.kubernetes.io/component"

CONTAINER_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 65532),
    "seccompProfile": {"type": "RuntimeDefault"},
}
HOME: dict[str, Any] = {"HOME": "/scratch", "CUDA_AGENT_HOME": "/scratch/home"}  # the folder that a pod may write to


def version_name() -> str:
    """Returns the version in a form that can be part of an object's name: ``0-1-0``."""
    return version("cuda-agent").replace(".", "-").replace("+", "-")


# what all pods share --------------------------------------------------------------------------------------------------


def variables(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a container's environment.  A value that is a mapping says where Kubernetes finds the value."""
    return [{"name": name, "value" if isinstance(value, str) else "valueFrom": value} for name, value in values.items()]


def container(image: str, env: Mapping[str, Any], mounts: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    """Returns a restricted container with the scratch folders, the environment, and further mounts and fields."""
    scratch = [{"name": "work", "mountPath": "/scratch"}, {"name": "tmp", "mountPath": "/tmp"}]
    return {
        "image": f"{image}:{version('cuda-agent')}",
        "env": variables(env),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*scratch, *mounts],
    } | more


def pod_volumes(**more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the volumes of the scratch folders, and further volumes, given as name -> source."""
    sources: dict[str, Mapping[str, Any]] = {"work": {"emptyDir": {}}, "tmp": {"emptyDir": {}}} | more
    return [{"name": name, **source} for name, source in sources.items()]


def pod_spec(account: str, grace: int, container: Mapping[str, Any], **volumes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a pod of one container without a service-account token.  ``grace`` is seconds from SIGTERM to SIGKILL."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": f"cuda-agent-{account}",
        "terminationGracePeriodSeconds": grace,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": pod_volumes(**volumes),
    }


def token_of(workflow: str, **more: Any) -> dict[str, Any]:
    """Returns the reference by which Kubernetes finds the token of a run's sandbox."""
    return {"secretKeyRef": {"name": f"{workflow}-sandbox", "key": "token"} | more}


def labels_of(component: str) -> dict[str, str]:
    return {NAME_LABEL: "cuda-agent", COMPONENT_LABEL: component, POOL_LABEL: RUN_NAME}


def peers(*labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the pods with these labels as peers of a NetworkPolicy."""
    return [{"podSelector": {"matchLabels": own}} for own in labels]


def from_to(peers: Sequence[Mapping[str, Any]], port: int) -> dict[str, Any]:
    """Returns an ingress rule by which these peers may connect to this port."""
    return {"from": peers, "ports": [{"port": port, "protocol": "TCP"}]}


def network_policy(
    name: str, labels: Mapping[str, str], pods: Mapping[str, str], ingress: list[Any], egress: list[Any] | None = None
) -> dict[str, Any]:
    """Returns a policy for the traffic of the pods labelled ``pods``; without ``egress`` it limits incoming traffic."""
    rules = {"ingress": ingress} if egress is None else {"ingress": ingress, "egress": egress}
    spec = {"podSelector": {"matchLabels": pods}, "policyTypes": [key.capitalize() for key in rules]} | rules
    return new_object("NetworkPolicy", name, labels, spec=spec)


def service_and_wall(component: str, port: int, clients: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a headless Service, which gives each server an address, and a NetworkPolicy by which only ``clients`` may
    connect to the port and no server may connect to anything."""
    name, labels = f"{RUN_NAME}-{component}", labels_of(component)
    own = {POOL_LABEL: RUN_NAME, COMPONENT_LABEL: component}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # an unready server can then be asked for the reason
        "selector": own,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }
    return [
        new_object("Service", name, labels, spec=service),
        network_policy(name, labels, own, [from_to(clients, port)], []),
    ]


def servers(component: str, name: str, own: dict[str, str], port: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Returns a StatefulSet of servers behind the component's Service.  Their pods have
    the labels ``own`` besides the component's."""
    labels = labels_of(component) | own
    (container,) = pod["containers"]
    container |= {"name": component, "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}]}
    spec = {
        "replicas": 1,
        "podManagementPolicy": "Parallel",
        "serviceName": f"{RUN_NAME}-{component}",
        "selector": {"matchLabels": {POOL_LABEL: RUN_NAME} | own},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return new_object("StatefulSet", f"{RUN_NAME}-{name}", labels, spec=spec)


def of_run(
    base: Sequence[Mapping[str, Any]], workflow: str, uid: str, labels: Mapping[str, str] = {}, name: str = ""
) -> list[dict[str, Any]]:
    """Returns the objects of a profile for one run, owned by its Workflow.  ``RUN`` is replaced by ``name``, by default
    the Workflow's name.  Where ``RUN`` is the value of a label in ``labels``, the value given there replaces it."""
    made = [_named(one, name or workflow, labels) for one in base]
    for one in made:
        one["metadata"]["ownerReferences"] = [owned_by(workflow, uid)]
    return made


def owned_by(workflow: str, uid: str) -> dict[str, Any]:
    """Returns the owner reference of objects that are deleted with the Workflow."""
    of = {"apiVersion": API_VERSIONS["Workflow"], "kind": "Workflow", "name": workflow, "uid": uid}
    return of | {"controller": False, "blockOwnerDeletion": False}


def _named(value: Any, name: str, labels: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        # The value of an environment variable may be a user's.
        return {
            key: inner if key == "value" else _named(inner, labels.get(key, name), labels)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_named(inner, name, labels) for inner in value]
    if isinstance(value, str) and (value == RUN_NAME or value.startswith(f"{RUN_NAME}-")):
        return name + value.removeprefix(RUN_NAME)
    return value


def addresses(made: Sequence[Mapping[str, Any]], port: int) -> list[str]:
    """Returns the address of every pod of the StatefulSets."""
    return [
        f"http://{one['metadata']['name']}-{number}.{one['spec']['serviceName']}:{port}"
        for one in made
        if one["kind"] == "StatefulSet"
        for number in range(one["spec"]["replicas"])
    ]


# the sandbox ----------------------------------------------------------------------------------------------------------


def pool_objects() -> list[dict[str, Any]]:
    """Returns the objects in the order of creation, before a profile and a run are filled in."""
    secret = new_object("Secret", f"{RUN_NAME}-sandbox", labels_of("sandbox"), type="Opaque", stringData={})
    stages = peers({WORKFLOW_LABEL: RUN_NAME, COMPONENT_LABEL: "stage"})
    return [secret, *service_and_wall("sandbox", PORT, stages), *map(_pool, ROLES)]


def _pool(role: str) -> dict[str, Any]:
    made = container(
        "cuda-agent-sandbox",
        HOME | {"CUDA_AGENT_SANDBOX_TOKEN": token_of(RUN_NAME)},
        command=COMMAND,
        args=[
            *("sandbox", "serve", "--host", "0.0.0.0", "--port", str(PORT), "--roles", role),
            *("--open-metrics", "--recycle-after", "1000"),
        ],
        readinessProbe={"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 2, "failureThreshold": 5},
        livenessProbe={"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 20, "failureThreshold": 6},
        startupProbe={"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1, "failureThreshold": 300},
    )
    return servers("sandbox", role, {ROLE_LABEL: role}, PORT, pod_spec("sandbox", 90, made))


def objects(
    base: Sequence[Mapping[str, Any]], workflow: str, uid: str, token: str, config: SandboxConfig
) -> list[dict[str, Any]]:
    """Returns the objects of one run, ready to be created, with its token and its sandbox settings."""
    values = config.model_dump(mode="json", exclude=set(WHERE_JUDGED))
    overrides = [f"sandbox.{name}={json.dumps(value)}" for name, value in values.items()]
    made = of_run(base, workflow, uid)
    for one in made:
        if one["kind"] == "Secret":
            one["stringData"] = {"token": token}
        if one["kind"] == "StatefulSet":
            one["spec"]["template"]["spec"]["containers"][0]["args"] += overrides
    return made


def names(workflow: str) -> list[tuple[str, str]]:
    """Returns kind and name of every object of a run's pools."""
    shared = [(kind, f"{workflow}-sandbox") for kind in ("Service", "Secret", "NetworkPolicy")]
    return [*(("StatefulSet", f"{workflow}-{role}") for role in ROLES), *shared]
