"""Makes the Kubernetes objects of a run's sandbox servers, which build and judge the solutions that a policy writes.

    Secret          the token that the run's stages send to the servers
    Service         gives each server a separate address (headless)
    PodDisruptionBudget   says how many of the servers may be evicted at once, as when nodes are drained
    NetworkPolicy   lets only the run's stages, or the pods of a search, connect to the servers; the servers connect to
                    nothing, not even DNS
    StatefulSet     the servers of one role; the roles are workspace, build and evaluate

``pool_objects`` makes templates of these objects, with ``RUN`` in place of a Workflow's name.  The Helm chart adds
images, resources and node placement to the templates, once for each profile (a named set of such settings).  When a
run starts, ``objects`` fills in the name of the run's Workflow.

The modules ``engines`` and ``rayjobs`` use helpers of this module."""

import json
import os
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
# Processes share tensors by /dev/shm: Ray, vLLM and several trainers.  Container runtimes give it 64 MiB.  This volume
# may take as much as the pod's memory limit, and counts as memory of the pod.
SHARED_MEMORY_MOUNT = {"name": "memory", "mountPath": "/dev/shm"}
SHARED_MEMORY: dict[str, Any] = {"memory": {"emptyDir": {"medium": "Memory"}}}
AROUND = ("Service", "PodDisruptionBudget", "NetworkPolicy")  # kinds that `around_servers` makes
HOME: dict[str, Any] = {"HOME": "/scratch", "CUDA_AGENT_HOME": "/scratch/home"}  # the folder that a pod may write to


def version_name() -> str:
    """Returns the version of this package in a form that can be part of an object's name, such as ``0-1-0``."""
    return version("cuda-agent").replace(".", "-").replace("+", "-")


# what all pods share --------------------------------------------------------------------------------------------------


def variables(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a container's environment variables in Kubernetes' form.  ``values`` maps the name of a variable to a
    string, or to a mapping that Kubernetes takes as ``valueFrom``."""
    return [{"name": name, "value" if isinstance(value, str) else "valueFrom": value} for name, value in values.items()]


def container(image: str, env: Mapping[str, Any], mounts: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    """Returns a container that runs without root, without capabilities and with a read-only root file system.  It may
    write to the scratch folders /scratch and /tmp.  ``env`` holds its environment variables (name -> value).  ``more``
    holds further fields of the container, such as ``command``."""
    scratch = [{"name": "work", "mountPath": "/scratch"}, {"name": "tmp", "mountPath": "/tmp"}]
    return {
        "image": f"{image}:{version('cuda-agent')}",
        "env": variables(env),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*scratch, *mounts],
    } | more


def pod_volumes(**more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a pod's volumes: those of the folders /scratch and /tmp, and ``more`` (name -> source)."""
    sources: dict[str, Mapping[str, Any]] = {"work": {"emptyDir": {}}, "tmp": {"emptyDir": {}}} | more
    return [{"name": name, **source} for name, source in sources.items()]


def pod_spec(account: str, grace: int, container: Mapping[str, Any], **volumes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the spec of a pod with one container.  The pod has the service account ``cuda-agent-<account>``, but the
    account's token is not mounted.  ``grace`` is the time from SIGTERM to SIGKILL in seconds.  The pod has volumes for
    the folders /scratch and /tmp, and the volumes ``volumes`` (name -> source)."""
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
    """Returns the source of an environment variable: the token that the stages of a run send to its sandbox servers.
    The token is in a Secret.  ``more`` has further fields of the reference to the Secret, such as ``optional``."""
    return {"secretKeyRef": {"name": f"{workflow}-sandbox", "key": "token"} | more}


def labels_of(component: str) -> dict[str, str]:
    return {NAME_LABEL: "cuda-agent", COMPONENT_LABEL: component, POOL_LABEL: RUN_NAME}


def peers(*labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns peers for a rule of a NetworkPolicy.  Each mapping in ``labels`` selects the pods with its labels."""
    return [{"podSelector": {"matchLabels": own}} for own in labels]


def from_to(peers: Sequence[Mapping[str, Any]], port: int) -> dict[str, Any]:
    """Returns an ingress rule for a NetworkPolicy.  The rule lets ``peers`` connect to ``port``."""
    return {"from": peers, "ports": [{"port": port, "protocol": "TCP"}]}


def network_policy(
    name: str, labels: Mapping[str, str], pods: Mapping[str, str], ingress: list[Any], egress: list[Any] | None = None
) -> dict[str, Any]:
    """Returns a NetworkPolicy for all pods with the labels ``pods``.  It allows only the incoming connections of the
    rules ``ingress`` and the outgoing connections of the rules ``egress`` (None: all outgoing connections)."""
    rules = {"ingress": ingress} if egress is None else {"ingress": ingress, "egress": egress}
    spec = {"podSelector": {"matchLabels": pods}, "policyTypes": [key.capitalize() for key in rules]} | rules
    return new_object("NetworkPolicy", name, labels, spec=spec)


def around_servers(component: str, port: int, clients: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns templates of a headless Service, a PodDisruptionBudget and a NetworkPolicy for the servers of
    ``component``, such as ``sandbox``.  The Service gives each server an address.  The budget lets one server be
    evicted at a time, and any that is not ready.  The policy lets only ``clients``, a list of peers, connect to the
    servers' ``port``.  It lets the servers connect to nothing."""
    name, labels = f"{RUN_NAME}-{component}", labels_of(component)
    own = {POOL_LABEL: RUN_NAME, COMPONENT_LABEL: component}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # an unready server can then be asked for the reason
        "selector": own,
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }
    budget = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # a server that waits for room must not stop a drain
        "selector": {"matchLabels": own},
    }
    return [
        new_object("Service", name, labels, spec=service),
        new_object("PodDisruptionBudget", name, labels, spec=budget),
        network_policy(name, labels, own, [from_to(clients, port)], []),
    ]


def servers(component: str, name: str, own: dict[str, str], port: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Returns the template of a StatefulSet of servers.

    Args:
        component: Component of the servers, such as ``sandbox``.  The component's Service gives each server an address.
        name: The StatefulSet is named ``RUN-<name>``; ``RUN`` stands for the name of a run's Workflow.
        own: Labels that select the pods of this StatefulSet among those of the run.
        port: The port of each server.
        pod: Spec of a server's pod, with one container."""
    labels = labels_of(component) | own
    (container,) = pod["containers"]
    container |= {"name": component, "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}]}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"  # `watch` shows why a server ended
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
    """Returns copies of the templates ``base`` for one run, owned by the run's Workflow.

    The chart may leave egress unrestricted (``networkPolicy.enabled=false``).  Then a NetworkPolicy that allows some
    egress of a pod would forbid the rest, so its egress rules are left out.  A policy that allows no egress stays.

    Args:
        base: Templates of Kubernetes objects, with the placeholder ``RUN``.
        workflow: Name of the run's Workflow.
        uid: UID of the run's Workflow.
        labels: Labels with a separate text: key of the label -> text that replaces the placeholder in the label.
        name: Text that replaces the placeholder in all other places; empty: ``workflow``."""
    made = [_named(one, name or workflow, labels) for one in base]
    for one in made:
        one["metadata"]["ownerReferences"] = [owned_by(workflow, uid)]
        if "CUDA_AGENT_OPEN_EGRESS" in os.environ and one["kind"] == "NetworkPolicy" and one["spec"].get("egress"):
            del one["spec"]["egress"]
            one["spec"]["policyTypes"].remove("Egress")
    return made


def owned_by(workflow: str, uid: str) -> dict[str, Any]:
    """Returns an owner reference to a Workflow.  If the Workflow is deleted, so are all objects with this reference."""
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
    """Returns the HTTP address of every pod of the StatefulSets in ``made``."""
    return [
        f"http://{one['metadata']['name']}-{number}.{one['spec']['serviceName']}:{port}"
        for one in made
        if one["kind"] == "StatefulSet"
        for number in range(one["spec"]["replicas"])
    ]


# the sandbox ----------------------------------------------------------------------------------------------------------


def pool_objects() -> list[dict[str, Any]]:
    """Returns templates of the Kubernetes objects of a run's sandbox servers, in the order of creation.  In names and
    labels, ``RUN`` stands for the name of the run's Workflow."""
    secret = new_object("Secret", f"{RUN_NAME}-sandbox", labels_of("sandbox"), type="Opaque", stringData={})
    clients = peers(*({WORKFLOW_LABEL: RUN_NAME, COMPONENT_LABEL: component} for component in ("stage", "search")))
    return [secret, *around_servers("sandbox", PORT, clients), *map(_pool, ROLES)]


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
    """Returns the Kubernetes objects of one run's sandbox servers.

    Args:
        base: Templates of the objects, from the chart.
        workflow: Name of the run's Workflow.
        uid: UID of the run's Workflow.
        token: Secret text that the run's stages send to the servers.
        config: The run's sandbox settings; the servers get them as arguments."""
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
    """Returns (kind, name) of every Kubernetes object of a run's sandbox servers."""
    shared = [(kind, f"{workflow}-sandbox") for kind in ("Secret", *AROUND)]
    return [*(("StatefulSet", f"{workflow}-{role}") for role in ROLES), *shared]
