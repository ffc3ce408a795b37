"""Tells how much of a cluster a run of a profile requests, and how many such runs have room.

Counted are the pods that a run needs at the same time to make progress: its sandbox servers, its engine replicas and
its largest stage.  The profile's WorkflowTemplate has their requests.  Pods of a stage in several pods are left out,
because their number is a setting of the run."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.cluster.pools import COMPONENT_LABEL, NAME_LABEL

Amounts = dict[str, Decimal]  # resource, such as cpu or nvidia.com/gpu -> amount in its base unit (CPUs, bytes, GPUs)
MOST = 100  # runs that are counted at most
CLAIMED = "claimed GPUs"  # by ResourceClaims for the pod alone


@dataclass(frozen=True)
class Pod:
    """What the scheduler looks at."""

    requests: Amounts
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Room:
    """The room of a cluster for runs of one profile."""

    requests: Amounts  # of one run
    at_once: int  # runs of the profile that Argo lets work at once; 0: no limit
    fit: int | None  # runs that fit beside the pods of others, at most ``MOST``; None: the user may not list nodes, or
    # pods claim their GPUs


def pods_of_run(template: Mapping[str, Any]) -> list[Pod]:
    """Returns the pods of a run that exist at the same time.  ``template`` is the profile's WorkflowTemplate."""
    stages, servers = [], []
    executor = json.loads(template["spec"].get("podSpecPatch") or "{}").get("containers", [])
    for one in template["spec"]["templates"]:
        if one.get("metadata", {}).get("labels", {}).get(COMPONENT_LABEL) == "stage":
            patch = json.loads(one.get("podSpecPatch") or "{}")
            stages.append(_pod(one | patch | {"containers": [one["container"], *executor]}))
        for variable in one.get("container", {}).get("env", []):
            if one["name"] == "prepare" and variable["name"] in ("CUDA_AGENT_POOLS", "CUDA_AGENT_ENGINE"):
                for item in json.loads(variable["value"]):
                    if item["kind"] == "StatefulSet":
                        servers += [_pod(item["spec"]["template"]["spec"])] * item["spec"]["replicas"]
    largest = max(stages, key=lambda pod: (pod.requests.get("nvidia.com/gpu", 0), pod.requests.get("memory", 0)))
    return [*servers, largest]


def total(pods: Iterable[Pod]) -> Amounts:
    """Returns the sum of the pods' requests."""
    summed: Amounts = {}
    for pod in pods:
        for name, amount in pod.requests.items():
            summed[name] = summed.get(name, Decimal(0)) + amount
    return summed


def runs_that_fit(nodes: Sequence[Mapping[str, Any]], others: Iterable[Mapping[str, Any]], run: Sequence[Pod]) -> int:
    """Returns how many runs fit on the nodes, at most ``MOST``.

    Places pods like the scheduler, first those that request most, each on the first node with room, the labels that
    it wants and no taint that it does not tolerate.  Affinity rules are left out.

    Args:
        nodes: Node objects of Kubernetes.
        others: Pod objects that use these nodes already.
        run: The pods of one run."""
    usable = [node for node in nodes if not node["spec"].get("unschedulable")]
    free = {node["metadata"]["name"]: _amounts(node["status"]["allocatable"]) for node in usable}
    for item in others:
        if (left := free.get(item["spec"].get("nodeName", ""))) is not None:
            _take(left, _pod(item["spec"]).requests | {"pods": Decimal(1)})
    largest_first = sorted(run, key=lambda pod: sorted(pod.requests.items(), reverse=True), reverse=True)
    for number in range(MOST):
        for pod in largest_first:
            wanted = pod.requests | {"pods": Decimal(1)}
            for node in usable:
                left = free[node["metadata"]["name"]]
                if _may_run(pod, node) and all(left.get(name, Decimal(0)) >= much for name, much in wanted.items()):
                    _take(left, wanted)
                    break
            else:
                return number
    return MOST


def of_profile(cluster: Cluster, template: str) -> Room:
    """Returns the room for runs of a profile.  ``template`` is the name of the profile's WorkflowTemplate.

    Raises:
        ClusterError: The template cannot be read."""
    found = cluster.get("WorkflowTemplate", template)
    run = pods_of_run(found)
    at_once = int(found["metadata"].get("annotations", {}).get("cuda-agent.io/runs") or 0)
    return Room(total(run), at_once, _fit(cluster, run))


def _fit(cluster: Cluster, run: Sequence[Pod]) -> int | None:
    if any(CLAIMED in pod.requests for pod in run):
        return None
    try:
        nodes = cluster.everywhere("Node")
        pods = cluster.everywhere("Pod", "status.phase!=Succeeded,status.phase!=Failed")
    except ClusterError as error:
        if error.status != 403:
            raise
        return None
    of_others = [pod for pod in pods if not _is_of_a_run(pod["metadata"].get("labels", {}))]
    return runs_that_fit(nodes, of_others, run)


def _is_of_a_run(labels: Mapping[str, str]) -> bool:
    parts = ("stage", "sandbox", "engine", "setup", "finish", "ray")
    return labels.get(NAME_LABEL) == "cuda-agent" and labels.get(COMPONENT_LABEL) in parts


def sentence(room: Room) -> str:
    """Returns the room in words, as in "a run requests 2.1 CPUs, 9.1 GiB and 2 nvidia.com/gpu; 3 fit; 1 at a time"."""
    amounts = dict(room.requests)
    disk, cpu, memory = (amounts.pop(name, Decimal(0)) for name in ("ephemeral-storage", "cpu", "memory"))
    words = [f"{cpu.normalize():f} CPUs", f"{memory / 2**30:.1f} GiB of memory", f"{disk / 2**30:.1f} GiB of disk"]
    words += [f"{amount.normalize():f} {name}" for name, amount in sorted(amounts.items())]
    turns = f"at most {room.at_once} at once" if room.at_once else "no limit of runs at once"
    fit = "" if room.fit is None else f"; {room.fit}{' or more' if room.fit == MOST else ''} fit on the nodes"
    return f"a run requests {', '.join(words)}{fit}; {turns}"


def _pod(spec: Mapping[str, Any]) -> Pod:
    requests: Amounts = {}
    for container in spec["containers"]:
        resources = container.get("resources", {})
        for name, amount in _amounts(resources.get("limits", {}) | resources.get("requests", {})).items():
            requests[name] = requests.get(name, Decimal(0)) + amount
    for claim in spec.get("resourceClaims") or ():
        count = re.search(r"-gpus-(\d+)$", claim.get("resourceClaimTemplateName", ""))
        requests[CLAIMED] = requests.get(CLAIMED, Decimal(0)) + (Decimal(count[1]) if count else 0)
    return Pod(requests, spec.get("nodeSelector") or {}, spec.get("tolerations") or ())


def _amounts(quantities: Mapping[str, Any]) -> Amounts:
    from kubernetes.utils.quantity import parse_quantity

    return {name: parse_quantity(quantity) for name, quantity in quantities.items()}


def _take(left: Amounts, wanted: Amounts) -> None:
    for name, amount in wanted.items():
        left[name] = left.get(name, Decimal(0)) - amount


def _may_run(pod: Pod, node: Mapping[str, Any]) -> bool:
    labels = node["metadata"].get("labels", {})
    if any(labels.get(name) != wanted for name, wanted in pod.node_selector.items()):
        return False
    taints = [taint for taint in node["spec"].get("taints", []) if taint["effect"] != "PreferNoSchedule"]
    return all(any(_tolerates(one, taint) for one in pod.tolerations) for taint in taints)


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")
