"""Does the work of maintenance jobs in their pods.  The module ``maintenance`` starts these pods.

The job ``gc`` removes old runs, the data that only these runs need, and leftover Kubernetes objects of runs that have
ended.  The jobs ``pin`` and ``unpin`` say which runs it always keeps.  The job ``doctor`` tests the store and MLflow.
It also tests that a sandbox (a pod that runs generated code) cannot connect to the store, MLflow, the API server or
DNS."""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cuda_agent.cluster import bucket, pools, rayjobs, searches
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.cluster.pod import PodEnvironment
from cuda_agent.cluster.run_pools import remove_pools
from cuda_agent.cluster.submit import ENDED, RUN_LABEL
from cuda_agent.cluster.templates import JOB_LABEL, SEARCH_LABEL
from cuda_agent.cluster.waiting import why
from cuda_agent.config import SandboxConfig
from cuda_agent.diagnostics.doctor import Check
from cuda_agent.errors import ConfigError
from cuda_agent.pipeline import gc, locks, rows, runs
from cuda_agent.storage import open_store

WALL_SECONDS = 180.0  # longest wait for the sandbox's pod to answer
ARGO_DAYS = 30  # least age of Argo's logs and copies of manifests that a collection removes
CONNECT_SECONDS = 4.0  # longest wait for one connection


def answer(here: PodEnvironment, value: Any) -> None:
    """Writes ``value`` as JSON to the file from which Argo takes the job's output parameter ``answer``."""
    here.plan.mkdir(parents=True, exist_ok=True)
    (here.plan / "answer").write_text(json.dumps(value))


# gc -------------------------------------------------------------------------------------------------------------------


def collect(here: PodEnvironment, keep: int, days: float, dry_run: bool, cluster: Cluster) -> dict[str, Any]:
    """Removes old runs from the store and MLflow, the data that only these runs need, and leftover Kubernetes objects
    (see ``leftovers``).  Ends MLflow's rows of runs that were cut off.

    Args:
        keep: Number of the newest finished runs to keep in each pipeline (the runs with the same ``run.pipeline``).
        days: Runs that were active in so many days are kept.
        dry_run: Whether to remove nothing, and only list what would be removed.
        cluster: The cluster with the Workflows of the runs.

    Returns:
        A dict that lists what was removed, or with ``dry_run`` would be removed.  ``runs`` are names of runs, and
        ``pinned`` those that were kept because they are pinned.  ``objects`` and ``bytes`` are the number and the size
        of objects in the store.  ``pools`` are names of Workflows whose servers are removed.  ``config maps`` are names
        of ConfigMaps, and ``searches`` those of searches (see ``searches.collect``).  ``removed`` is False with
        ``dry_run``, else True; then ``rows`` and ``ended`` are there, too (see ``rows.tidy``).  If another collection
        is under way, or a run stores results for a long time, a call without ``dry_run`` removes nothing and returns
        ``{"busy": reason}``."""
    store = open_store(here.store)
    with contextlib.nullcontext("") if dry_run else locks.collecting(store) as busy:
        if busy:
            return {"busy": busy}
        left, maps = leftovers(cluster)
        states = states_of(cluster)
        live = {run for run, state in states.items() if state not in ENDED}
        scheduled = filter(None, [os.environ.get("CUDA_AGENT_SCHEDULED")])
        what = gc.plan(store, keep, days, live, states.__contains__, [*scheduled])
        found = what.to_json() | {"pools": left, "config maps": maps, "removed": not dry_run}
        found["searches"] = searches.collect(cluster, store, here.mlflow, days, dry_run)
        if not dry_run:
            for name in left:
                remove_pools(cluster, name)
            for name in maps:
                cluster.delete("ConfigMap", name)
            gc.collect(store, what)
            before = time.time() - max(days, ARGO_DAYS) * 86400
            store.delete_all(key for key, (_, changed) in store.sizes("argo").items() if changed < before)
    if not dry_run:
        found |= rows.tidy(here.mlflow, runs.store_id(store), what.runs, what.sweeps, what.still)
    return found


def states_of(cluster: Cluster) -> dict[str, str]:
    """Returns run -> phase of its newest Workflow.  A run that a schedule started has the name of its Workflow."""
    named = {about["name"]: about["labels"][RUN_LABEL] for about in cluster.metadata("ConfigMap", RUN_LABEL)}
    flows = cluster.table("Workflow", f"!{JOB_LABEL},!{SEARCH_LABEL}")
    found = {named.get(name, name): "" for name in flows}
    for name, cells in flows.items():  # an attempt that has not ended counts, whichever it is
        run = named.get(name, name)
        if found[run] in ("", *ENDED):
            found[run] = cells["Status"] or "Pending"
    return found


def leftovers(cluster: Cluster) -> tuple[list[str], list[str]]:
    """Finds Kubernetes objects that no run needs.  Returns two lists: names of ended or deleted Workflows whose servers
    still exist, and names of ConfigMaps whose Workflow was deleted."""
    servers = f"{pools.COMPONENT_LABEL} in (sandbox,engine)"
    kinds = ("StatefulSet", "Service", "NetworkPolicy")
    made = [about for kind in kinds for about in cluster.metadata(kind, servers)]
    made += cluster.metadata("NetworkPolicy", rayjobs.RAY_LABEL)  # policies of a stage's Ray
    of_pools = {about["labels"].get(pools.POOL_LABEL, "") for about in made} - {""}
    maps = [about["name"] for about in cluster.metadata("ConfigMap", RUN_LABEL)]
    # Workflows are read last, so that a run that starts meanwhile does not seem deleted.
    phases = {name: cells["Status"] or "Pending" for name, cells in cluster.table("Workflow").items()}
    dead = sorted(name for name in of_pools if phases.get(name, "Succeeded") in ENDED)
    return dead, sorted(name for name in maps if name not in phases)


# pin ------------------------------------------------------------------------------------------------------------------


def pin(here: PodEnvironment, run: str, pinned: bool) -> dict[str, Any]:
    """Pins a run, so that collections keep it, or removes its pin.  Returns ``run`` and ``pinned``, or ``error``."""
    try:
        runs.pin(open_store(here.store), run, pinned)
    except ConfigError as error:
        return {"error": str(error)}
    return {"run": run, "pinned": pinned}


# doctor ---------------------------------------------------------------------------------------------------------------


def doctor(
    here: PodEnvironment, workflow: str, cluster: Cluster, base: Sequence[Mapping[str, Any]], addresses: dict[str, str]
) -> list[Check]:
    """Tests the store and MLflow, and tests that a sandbox (a pod that runs generated code) is isolated.

    Args:
        workflow: Name of this job's Workflow.
        cluster: The cluster on which a sandbox is started for the test.
        base: Templates of the sandbox servers' Kubernetes objects, from the Helm chart.
        addresses: The services to which a sandbox must not connect: name -> host:port.

    Returns:
        The results of the checks."""
    checks = list(bucket.probe(here.store, here.mlflow))
    control = reach([*addresses.values()])
    try:
        tried = from_sandbox(cluster, workflow, base, [*addresses.values()])
    except ClusterError as error:
        mend = "fix this first: runs need sandboxes, too"
        return [*checks, Check("walls", False, str(error).splitlines()[0], mend)]
    checks += [wall(name, it, control[it], tried["reached"][it]) for name, it in addresses.items()]
    return [*checks, Check("processes", True, f"a sandbox's own control group allows {tried['processes']}")]


def wall(name: str, address: str, outside: str, sandbox: str) -> Check:
    """Returns the result of a check that a sandbox cannot connect to a service.  The check passes if the sandbox could
    not connect and this pod could.  If this pod could not connect either, the test proves nothing, and the check fails.

    Args:
        name: Name of the service.
        address: host:port of the service.
        outside: Error of this pod's attempt to connect; empty if it succeeded.
        sandbox: Error of the sandbox's attempt to connect; empty if it succeeded."""
    name = f"wall: {name}"
    if not sandbox:
        mend = "use a network plugin that enforces NetworkPolicies, and set networkPolicy.enabled=true"
        return Check(name, False, f"a sandbox connected to {address}", mend)
    if outside:
        mend = "look at the checks above: this one tells nothing until a run's own pod can connect"
        return Check(name, False, f"not even a run's own pod can connect to {address} ({outside})", mend)
    return Check(name, True, f"a sandbox cannot connect to {address} ({sandbox}); this pod can")


def forbidden(mlflow: str) -> dict[str, str]:
    """Returns name -> host:port of the services that a sandbox must not reach: API server, store, MLflow and DNS.
    If this pod can resolve a host, gives the host's IP address, because a sandbox has no DNS."""
    store = os.environ.get("AWS_ENDPOINT_URL") or f"https://s3.{os.environ['AWS_REGION']}.amazonaws.com"
    places = {"API server": (os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"]))}
    for name, uri in {"store": store, "MLflow": mlflow}.items():
        if uri != "off":
            parts = urlsplit(uri)
            places[name] = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
    if server := re.search(r"(?m)^nameserver\s+(\S+)", Path("/etc/resolv.conf").read_text()):
        places["DNS"] = (server[1], 53)
    found = {}
    for name, (host, port) in places.items():
        with contextlib.suppress(OSError):  # the check then says that this pod does not reach the service either
            host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        found[name] = f"{host}:{port}"
    return found


def reach(addresses: Sequence[str]) -> dict[str, str]:
    """Tries to connect to each host:port in ``addresses``.  Returns a map from each address to the error of the
    attempt, or to "" if it succeeded."""

    def attempt(address: str) -> str:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            return ""
        except OSError as error:
            return str(error) or type(error).__name__

    with ThreadPoolExecutor(max(1, len(addresses))) as threads:
        return dict(zip(addresses, threads.map(attempt, addresses), strict=True))


def process_limit() -> str:
    """Returns how many processes this container's control group allows, as a phrase such as ``4096 processes``."""
    for file in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        if os.path.exists(file):
            text = Path(file).read_text().strip()
            return "any number of processes" if text == "max" else f"{text} processes"
    return "a number of processes that it cannot see"


def from_sandbox(
    cluster: Cluster, workflow: str, base: Sequence[Mapping[str, Any]], addresses: Sequence[str]
) -> dict[str, Any]:
    """Starts a pod with the restrictions of a sandbox.  The pod tries to connect to each of ``addresses``.  Removes the
    pod afterwards.

    Args:
        cluster: The cluster on which the pod is started.
        workflow: Name of this job's Workflow.
        base: Templates of the sandbox servers' Kubernetes objects, from the Helm chart.
        addresses: The host:port of each service.

    Returns:
        A dict with two entries.  ``reached`` maps each address to the error of the attempt, or to "" if it succeeded.
        ``processes`` says how many processes the pod may have, such as ``4096 processes``.

    Raises:
        ClusterError: The pod did not start or did not answer."""
    uid = cluster.get("Workflow", workflow)["metadata"]["uid"]
    made = pools.objects(base, workflow, uid, "none", SandboxConfig())
    policy = next(item for item in made if item["kind"] == "NetworkPolicy")
    server = next(item for item in made if item["metadata"]["labels"].get(pools.ROLE_LABEL) == "workspace")
    server["spec"]["replicas"] = 1
    container = server["spec"]["template"]["spec"]["containers"][0]
    container["args"] = ["pod", "reach", *addresses]
    container["env"] = [item for item in container["env"] if "valueFrom" not in item]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        container.pop(probe, None)
    try:
        for item in (policy, server):
            cluster.create_if_absent(item)
        return _said(cluster, workflow)
    finally:
        remove_pools(cluster, workflow)


def _said(cluster: Cluster, workflow: str) -> dict[str, Any]:
    deadline = time.monotonic() + WALL_SECONDS
    while True:
        pods = cluster.all("Pod", f"{pools.POOL_LABEL}={workflow},{pools.COMPONENT_LABEL}=sandbox")
        for pod in pods:
            for status in pod.get("status", {}).get("containerStatuses", []):
                for state in (status.get("state", {}), status.get("lastState", {})):
                    ended = state.get("terminated", {})
                    if ended.get("message") and ended.get("exitCode") == 0:
                        return json.loads(ended["message"])
        if time.monotonic() > deadline:
            reason = why(cluster, pods, f"{workflow}-workspace")
            raise ClusterError(f"A sandbox did not come to try in {WALL_SECONDS:.0f} s: {reason[:300]}")
        time.sleep(0.5)


def tell(addresses: Sequence[str], file: Path = PodEnvironment.termination_message) -> None:
    """Tries to connect to each of ``addresses`` (host:port), and writes the results to ``file`` as JSON.  This function
    runs in the pod that ``from_sandbox`` starts.  The JSON object is the dict that ``from_sandbox`` returns."""
    file.write_text(json.dumps({"reached": reach(addresses), "processes": process_limit()}))
