"""The servers of one run on a cluster: its sandbox pools and engines, made by ``prepare`` and removed by ``finish``.

Making is idempotent: what is there stays."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from cuda_agent.cluster import engines, pools, rayjobs
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.config import Config
from cuda_agent.errors import TryAgain

SERVERS, SHARED = ("StatefulSet", "RayJob"), ("Service", "Secret", "NetworkPolicy")  # kinds of a run's objects
POOL_SECONDS = 900.0  # until every pool has a server that is ready


def make_pools(cluster: Cluster, base: Sequence[dict[str, Any]], workflow: str, config: Config) -> list[str]:
    """Creates the missing objects, waits until every role has a ready server, and returns all addresses.

    Raises:
        TryAgain: the run was stopped during the wait; the pools are removed.
        ClusterError: no server of a role became ready."""
    uid = cluster.get("Workflow", workflow)["metadata"]["uid"]
    made = pools.objects(base, workflow, uid, secrets.token_hex(24), config.sandbox)
    for item in made:
        cluster.create_if_absent(item)
    deadline = time.monotonic() + POOL_SECONDS
    for item in made:
        if item["kind"] != "StatefulSet":
            continue
        name = item["metadata"]["name"]
        while True:
            if cluster.get("Workflow", workflow)["spec"].get("shutdown"):
                # `cancel --now` removed the pools that were there then; no exit hook removes those made since.
                remove_pools(cluster, workflow)
                raise TryAgain("The run was stopped while its servers were starting.")
            if cluster.get("StatefulSet", name).get("status", {}).get("readyReplicas"):
                break
            if time.monotonic() > deadline:
                pods = [pod for pod in cluster.all("Pod") if pod["metadata"]["name"].startswith(f"{name}-")]
                why = why_not_ready(pods)
                raise ClusterError(f"No server of {name} became ready in {POOL_SECONDS:.0f} s: {why}")
            time.sleep(0.5)
    return pools.addresses(made, pools.PORT)


def make_engines(cluster: Cluster, base: Sequence[dict[str, Any]], workflow: str, config: Config) -> list[str]:
    """Makes what is absent of the engine's replicas and returns their addresses, without waiting: they answer when the
    run has a policy."""
    made = engines.objects(base, workflow, cluster.get("Workflow", workflow)["metadata"]["uid"], config)
    for item in made:
        cluster.create_if_absent(item)
    return pools.addresses(made, engines.ENGINE_PORT)


def remove_pools(cluster: Cluster, workflow: str, kinds: Sequence[str] = (*SERVERS, *SHARED)) -> None:
    """Servers first: nothing of a run answers when its walls go."""
    names = [*pools.names(workflow), *engines.names(workflow), *rayjobs.names(workflow)]
    for kind in kinds:
        for name in (name for of, name in names if of == kind):
            cluster.delete(kind, name)


def why_not_ready(pods: Sequence[dict[str, Any]]) -> str:
    """What Kubernetes says of pods that do not become ready."""
    if not pods:
        return "it has no pods (a quota, or admission?)"
    reasons = []
    for status in (pod.get("status", {}) for pod in pods):
        for container in status.get("containerStatuses", []):
            for state in container.get("state", {}).values():
                reasons.append(" ".join(filter(None, [state.get("reason"), state.get("message")])))
        for condition in status.get("conditions", []):
            if condition.get("status") != "True" and condition.get("message"):
                reasons.append(condition["message"])
    return "; ".join(dict.fromkeys(filter(None, reasons)))[:600] or "its pods give no reason"
