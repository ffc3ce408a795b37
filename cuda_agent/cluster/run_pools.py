"""Creates and removes the servers of one run on a cluster.

Sandbox servers build and judge solutions.  Engine replicas are vLLM servers, which generate text."""

import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from cuda_agent.cluster import engines, pools, rayjobs
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.cluster.waiting import HOPELESS_SECONDS, TELL_SECONDS, is_hopeless, is_queued, why
from cuda_agent.config import Config
from cuda_agent.errors import BadConfiguration, TryAgain

SERVERS = ("StatefulSet", "RayJob")  # kinds of a run's objects, and in the next line the others
SHARED = ("Secret", *pools.AROUND)
POOL_SECONDS = 900.0  # longest wait until every pool has a ready server


def make_pools(cluster: Cluster, base: Sequence[dict[str, Any]], workflow: str, config: Config) -> list[str]:
    """Creates a run's sandbox servers, and returns their addresses.  Creates only objects that are missing.  Waits
    until each role (workspace, build, evaluate) has a ready server; does not wait for servers that are in a queue, such
    as Kueue's.  ``base`` has templates of the objects, from the chart.  ``workflow`` is the name of the run's Workflow.

    Raises:
        TryAgain: The run was stopped during the wait; its servers are removed.
        BadConfiguration: No server of a role can start without a person's help.
        ClusterError: No server of a role became ready; all servers are removed."""
    uid = cluster.get("Workflow", workflow)["metadata"]["uid"]
    made = pools.objects(base, workflow, uid, secrets.token_hex(24), config.sandbox)
    for item in made:
        cluster.create_if_absent(item)
    deadline = time.monotonic() + POOL_SECONDS
    for item in made:
        if item["kind"] == "StatefulSet":
            _await_server(cluster, workflow, item["metadata"]["labels"][pools.ROLE_LABEL], deadline)
    return pools.addresses(made, pools.PORT)


def _await_server(cluster: Cluster, workflow: str, role: str, deadline: float) -> None:
    """Waits until the role has a ready server, or all its servers are in a queue.  Prints every ``TELL_SECONDS`` why it
    has none.  ``deadline`` is a time by ``time.monotonic``."""
    name, looked, hopeless_since = f"{workflow}-{role}", time.monotonic(), 0.0
    while not cluster.get("StatefulSet", name).get("status", {}).get("readyReplicas"):
        if cluster.get("Workflow", workflow)["spec"].get("shutdown"):
            # `cancel --now` removed the pools of that time; no exit hook removes pools that were made later.
            remove_pools(cluster, workflow)
            raise TryAgain("The run was stopped while its servers were starting.")
        now = time.monotonic()
        if now - looked >= TELL_SECONDS or now > deadline:
            pods = cluster.all("Pod", f"{pools.POOL_LABEL}={workflow},{pools.ROLE_LABEL}={role}")
            looked, reason = now, why(cluster, pods, name)
            hopeless_since = (hopeless_since or now) if is_hopeless(pods) else 0.0
            print(f"waiting for {name}: {reason}", file=sys.stderr, flush=True)
            if is_queued(pods):
                return  # perhaps for days: the stages wait in the same queue, behind these servers
            if hopeless_since and now - hopeless_since >= HOPELESS_SECONDS:
                raise BadConfiguration(f"No server of {name} can start: {reason}")
            if now > deadline:
                remove_pools(cluster, workflow)  # other runs may wait for the room that the ready ones take
                raise ClusterError(f"No server of {name} became ready in {POOL_SECONDS:.0f} s: {reason}")
        time.sleep(1.0)


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
