"""Checks whether a cluster has everything that a run needs.  One line per check; a failed check names the remedy.

First the checks with the person's own rights: the API server, Argo's definitions, the person's rights, the chart,
policies and nodes.  Then those that need a pod (``pod_maintenance.doctor``): the store, MLflow, and whether the walls
hold.

What it does not cover: free capacity for a run's pods, images that only some nodes can pull, and the internals of
network plugins and runtimes.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from cuda_agent.cluster import maintenance
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.cluster.pools import version_name
from cuda_agent.cluster.submit import PROFILE_LABEL
from cuda_agent.diagnostics.doctor import Check

OLDEST = (1, 33)  # minor version of Kubernetes
_ARGO = "argoproj.io/v1alpha1"
# Rights for submit, watch, logs, report, cancel, sweep, doctor and gc: group, resource, verbs.
_RIGHTS = (
    ("argoproj.io", "workflows", ("get", "list", "create", "patch", "delete")),
    ("argoproj.io", "workflowtemplates", ("get", "list")),
    ("", "configmaps", ("get", "create")),
    ("", "pods", ("list",)),
    ("", "pods/log", ("get",)),
    ("", "pods/portforward", ("get", "create")),
    ("apps", "statefulsets", ("delete",)),
)


def examine(cluster: Cluster, release: str) -> Iterator[Check]:
    """Yields all checks in order; none raises.  Without an API server there is only one."""
    first = _checked("api server", lambda: _api_server(cluster))
    yield first
    if not first.ok:
        return
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("argo", lambda: _argo(cluster)),
        ("controller", lambda: _controller(cluster)),
        ("rights", lambda: _rights(cluster)),
        ("chart", lambda: _chart(cluster, release)),
        ("pod security", lambda: _pod_security(cluster)),
        ("policies", lambda: _policies(cluster)),
        ("gpus", lambda: _gpus(cluster)),
        ("pid limits", lambda: _pid_limits(cluster)),
    ]
    done = {}
    for name, check in checks:
        done[name] = _checked(name, check)
        yield done[name]
    needed = [name for name in ("argo", "rights", "chart") if not done[name].ok]
    if needed:
        yield Check("inside", False, "not tried from inside", f"mend {' and '.join(needed)} first")
        return
    yield from _inside(cluster, release)


def _checked(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except ClusterError as error:
        return Check(name, False, str(error).splitlines()[0], "ask the administrator of the cluster")
    except Exception as error:  # a failing check is a finding, not a crash
        return Check(name, False, f"could not be checked: {type(error).__name__}: {str(error).splitlines()[:1]}")


def _api_server(cluster: Cluster) -> Check:
    found = cluster.ask("/version", "ask for its version")
    numbers = tuple(int(re.sub(r"\D.*", "", found[part]) or 0) for part in ("major", "minor"))
    text = f"{cluster.name}, Kubernetes {found['gitVersion']}, namespace {cluster.namespace}"
    return Check(
        "api server", numbers >= OLDEST, text, "" if numbers >= OLDEST else "Kubernetes 1.33 or newer is needed"
    )


def _argo(cluster: Cluster) -> Check:
    """The installed definitions: their fields tell the version, and whether they are the full ones, which refuse
    misspelt fields."""
    mend = "install Argo Workflows 3.7 or 4 with its full resource definitions (manifests/full in its release)"
    try:
        schemas = cluster.ask(f"/openapi/v3/apis/{_ARGO}", "read Argo's definitions")["components"]["schemas"]
    except ClusterError as error:
        if error.status != 404:
            raise
        return Check("argo", False, "its kinds are unknown here", mend)
    kinds = {
        kind["kind"]: schema
        for schema in schemas.values()
        for kind in schema.get("x-kubernetes-group-version-kind", [])
    }
    missing = {"Workflow", "WorkflowTemplate", "CronWorkflow", "WorkflowTaskResult"} - kinds.keys()
    if missing:
        return Check("argo", False, f"unknown here: {', '.join(sorted(missing))}", mend)
    spec = kinds["Workflow"].get("properties", {}).get("spec", {}).get("properties", {})
    if not spec:
        return Check("argo", False, f"{_ARGO}: minimal definitions, which accept misspelt fields", mend)
    locks = spec.get("synchronization", {}).get("properties", {})
    if "mutexes" not in locks:
        return Check("argo", False, f"{_ARGO}: definitions of a version before 3.6", mend)
    line = "3.6 or 3.7" if "mutex" in locks else "4"
    return Check("argo", True, f"{_ARGO}, full definitions of version {line}")


def _controller(cluster: Cluster) -> Check:
    """The version of Argo's controller, from the name of its image, for people who may see other namespaces.  Whether
    it works, the checks inside show."""
    try:
        all_of_them = cluster.ask("/apis/apps/v1/deployments", "look for Argo's controller")["items"]
    except ClusterError as error:
        if error.status != 403:
            raise
        return Check("controller", True, "its namespace is not yours to see")
    found = [item for item in all_of_them if item["metadata"]["name"].endswith("workflow-controller")]
    if not found:
        return Check("controller", True, "there is no Deployment of that name")
    images = [
        f"{c['image']} in {item['metadata']['namespace']}"
        for item in found
        for c in item["spec"]["template"]["spec"]["containers"]
    ]
    return Check("controller", True, ", ".join(images))


def _rights(cluster: Cluster) -> Check:
    missing = []
    for group, resource, verbs in _RIGHTS:
        name, _, sub = resource.partition("/")
        for verb in verbs:
            attributes = {
                "namespace": cluster.namespace,
                "verb": verb,
                "group": group,
                "resource": name,
                "subresource": sub,
            }
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            }
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            if not cluster.ask(path, "ask what you may do", review)["status"].get("allowed"):
                missing.append(f"{verb} {resource}")
    if not missing:
        return Check("rights", True, f"a submitter's, in namespace {cluster.namespace}")
    mend = f"ask for the chart's role of submitters (access.submitters) in namespace {cluster.namespace}"
    return Check("rights", False, f"you may not {', '.join(missing)}", mend)


def _chart(cluster: Cluster, release: str) -> Check:
    found = cluster.all("WorkflowTemplate", PROFILE_LABEL)
    mend = f"helm install {release} charts/cuda-agent --namespace {cluster.namespace}"
    if not found:
        return Check("chart", False, f"there is none in namespace {cluster.namespace}", mend)
    labels = found[0]["metadata"]["labels"]
    version = f"-{version_name()}"
    ours = [item["metadata"] for item in found if item["metadata"]["name"] == _name(release, item) + version]
    names = ", ".join(sorted(item["metadata"]["name"] for item in found))
    if not ours:
        mend = "name its --release, or install the chart and this command in the same version"
        return Check("chart", False, f"no template of {release} in version {version_name()}; there are {names}", mend)
    profiles = ", ".join(sorted(item["labels"][PROFILE_LABEL] for item in ours))
    instance = labels.get("app.kubernetes.io/instance", "?")
    text = f"{labels.get('helm.sh/chart', 'no chart')} as {instance}, profiles {profiles}"
    absent = [e for e in ("doctor", "gc", "gc-plan") if not cluster.find("WorkflowTemplate", f"{release}-{e}{version}")]
    if absent:
        return Check("chart", False, f"{text}; it lacks {', '.join(absent)}", "helm upgrade")
    return Check("chart", True, text)


def _name(release: str, template: dict[str, Any]) -> str:
    return f"{release}-{template['metadata']['labels'][PROFILE_LABEL]}"


def _pod_security(cluster: Cluster) -> Check:
    try:
        found = cluster.ask(f"/api/v1/namespaces/{cluster.namespace}", f"read namespace {cluster.namespace}")
    except ClusterError as error:
        if error.status != 403:
            raise
        return Check("pod security", False, "the namespace is not yours to see", "ask for the chart's role of viewers")
    level = found["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce", "")
    mend = f"kubectl label namespace {cluster.namespace} pod-security.kubernetes.io/enforce=restricted --overwrite"
    return Check("pod security", level == "restricted", level or "no label", "" if level == "restricted" else mend)


def _policies(cluster: Cluster) -> Check:
    found = cluster.all("NetworkPolicy")
    everything = [
        item["metadata"]["name"]
        for item in found
        if not item["spec"].get("podSelector")
        and {"Ingress", "Egress"} <= set(item["spec"].get("policyTypes", []))
        and not item["spec"].get("ingress")
        and not item["spec"].get("egress")
    ]
    if everything:
        return Check("policies", True, f"{len(found)}; {everything[0]} denies what no other one allows")
    return Check(
        "policies", False, f"{len(found)}; none denies by default", "helm upgrade --set networkPolicy.enabled=true"
    )


def _nodes(cluster: Cluster) -> list[dict[str, Any]] | None:
    """All nodes; None for people who may not see them."""
    try:
        found: list[dict[str, Any]] = cluster.ask("/api/v1/nodes", "list nodes")["items"]
    except ClusterError as error:
        if error.status != 403:
            raise
        return None
    return found


def _gpus(cluster: Cluster) -> Check:
    nodes = _nodes(cluster)
    if nodes is None:
        return Check("gpus", True, "nodes are not yours to see")
    counts = {
        item["metadata"]["name"]: sum(
            int(number)
            for name, number in item["status"].get("allocatable", {}).items()
            if name.startswith("nvidia.com/")
        )
        for item in nodes
    }
    with_some = {name: count for name, count in counts.items() if count}
    if not with_some:
        return Check("gpus", True, f"{len(nodes)} nodes without any: profiles that ask for GPUs will wait")
    return Check("gpus", True, f"{sum(with_some.values())} on {len(with_some)} of {len(nodes)} nodes")


def _pid_limits(cluster: Cluster) -> Check:
    """The kubelet's limit per pod; the sandbox has its own limits too."""
    limits = set()
    try:
        for item in _nodes(cluster) or []:
            path = f"/api/v1/nodes/{item['metadata']['name']}/proxy/configz"
            limits.add(cluster.ask(path, "read a kubelet's settings")["kubeletconfig"].get("podPidsLimit", -1))
    except ClusterError as error:
        if error.status != 403:
            raise
    if not limits:
        return Check("pid limits", True, "the kubelets' settings are not yours to see")
    if min(limits) < 0:
        return Check("pid limits", True, "none on some nodes; podPidsLimit of the kubelet would be a second wall")
    return Check("pid limits", True, f"{min(limits)} processes a pod")


def _inside(cluster: Cluster, release: str) -> Iterator[Check]:
    try:
        found = maintenance.ask(cluster, release, "doctor")
    except ClusterError as error:
        first, *more = str(error).splitlines()
        yield Check("inside", False, first, more[-1].strip() if more else "see `kubectl get pods,events`")
        return
    except json.JSONDecodeError:
        yield Check("inside", False, "its answer cannot be read", "use the same version of chart, image and command")
        return
    yield Check("argo works", True, "a pod ran, and its answer came back")
    yield from (Check(**item) for item in found)
