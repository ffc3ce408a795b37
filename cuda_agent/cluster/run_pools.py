"""Creates and removes the servers of one run on a cluster.

Sandbox servers build and judge solutions.  Engine replicas are vLLM servers, which generate text."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from cuda_agent.cluster import engines, pools, rayjobs
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.config import Config
from cuda_agent.errors import TryAgain

SERVERS, SHARED = ("StatefulSet", "RayJob"), ("Service", "Secret", "NetworkPolicy")  # kinds of a run's objects
POOL_SECONDS = 900.0  # longest wait until every pool has a ready server


def make_pools(cluster: Cluster, base: Sequence[dict[str, Any]], workflow: str, config: Config) -> list[str]:
    """Creates a run's sandbox servers, and returns their addresses.  Creates only objects that are missing.  Waits
    until each role (workspace, build, evaluate) has a ready server.  ``base`` has templates of the objects, from the
    chart.  ``workflow`` is the name of the run's Workflow.

    Raises:
        TryAgain: The run was stopped during the wait; its servers are removed.
        ClusterError: No server of a role became ready."""
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
                # `cancel --now` removed the pools of that time; no exit hook removes pools that were made later.
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
    """Creates a run's engine replicas (vLLM servers), and returns their addresses.  Creates only objects that are
    missing.  Does not wait for the replicas: they answer only after a stage of the run has written the first weights
    of the policy (the model that they serve).  ``base`` has templates of the objects, from the chart.  ``workflow`` is
    the name of the run's Workflow."""
    made = engines.objects(base, workflow, cluster.get("Workflow", workflow)["metadata"]["uid"], config)
    for item in made:
        cluster.create_if_absent(item)
    return pools.addresses(made, engines.ENGINE_PORT)


def remove_pools(cluster: Cluster, workflow: str, kinds: Sequence[str] = (*SERVERS, *SHARED)) -> None:
    """Deletes the Kubernetes objects of a run's sandbox servers, engine replicas and stages on Ray.  Deletes only
    objects whose kind is in ``kinds``, in the order of ``kinds``.  By default deletes all kinds, and NetworkPolicies
    last, because they restrict the servers.  Does not wait until the pods have ended.  ``workflow`` is the name of the
    run's Workflow."""
    names = [*pools.names(workflow), *engines.names(workflow), *rayjobs.names(workflow)]
    for kind in kinds:
        for name in (name for of, name in names if of == kind):
            cluster.delete(kind, name)


def why_not_ready(pods: Sequence[dict[str, Any]]) -> str:
    """Returns the reasons that Kubernetes reports for pods that do not become ready."""
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
