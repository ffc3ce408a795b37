"""Checks whether a cluster has everything that a run needs.  Each check gives one line, with a remedy if it fails.

The first checks send requests to the API server with the user's rights.  The other checks run in a pod on the cluster,
because they test connections between pods and services (``pod_maintenance.doctor``)."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from cuda_agent import mlflow_api
from cuda_agent.cluster import maintenance, results, room, templates
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.diagnostics.doctor import Check, not_checked

Finding = tuple[str, str]  # what was found, and the remedy; an empty remedy means that all is well
OLDEST = (1, 33)  # oldest supported version of Kubernetes
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


def examine(cluster: Cluster, release: str | None) -> Iterator[Check]:
    """Checks a cluster and its Helm release ``release`` (None: the only one of the namespace), and yields the result of
    each check.  If a check raises a ``ClusterError``, its result is "failed".  If the first check (of the API server)
    fails, no other check follows."""
    first = _checked("api server", lambda: _api_server(cluster))
    yield first
    if not first.ok:
        return
    no_namespace = "you may not read the namespace", "ask for the chart's viewer role (access.viewers)"
    checks: list[tuple[str, Callable[[], Finding], Finding | None]] = [
        ("argo", lambda: _argo(cluster), None),
        ("controller", lambda: _controller(cluster), ("you may not list the Deployments of all namespaces", "")),
        ("rights", lambda: _rights(cluster), None),
        ("chart", lambda: _chart(cluster, release), None),
        ("results", lambda: _results(cluster, release), None),
        ("pod security", lambda: _pod_security(cluster), no_namespace),
        ("policies", lambda: _policies(cluster), None),
        ("gpus", lambda: _gpus(cluster), ("you may not list nodes", "")),
        ("room", lambda: _room(cluster, release), None),
        ("pid limits", lambda: _pid_limits(cluster), ("you may not read the kubelets' settings", "")),
    ]
    done = {}
    for name, check, hidden in checks:
        done[name] = _checked(name, check, hidden)
        yield done[name]
    needed = [name for name in ("argo", "rights", "chart") if not done[name].ok]
    if needed:
        yield Check("inside", False, "not checked from inside the cluster", f"fix {' and '.join(needed)} first")
        return
    yield from _inside(cluster, release)


def _checked(name: str, check: Callable[[], Finding], hidden: Finding | None = None) -> Check:
    """Runs ``check`` and returns its result.  The check passes if its remedy is empty, and fails if it raises an
    exception.  If the user lacks the rights for the check (HTTP status 403), ``hidden`` (text, remedy) is used as the
    outcome of ``check``, unless it is None."""
    try:
        text, mend = check()
    except ClusterError as error:
        mend = "ask the administrator of the cluster"
        text, mend = hidden if hidden and error.status == 403 else (str(error).splitlines()[0], mend)
    except Exception as error:  # a failing check is a finding, not a crash
        return Check(name, False, not_checked(error))
    return Check(name, not mend, text, mend)


def _api_server(cluster: Cluster) -> Finding:
    found = cluster.ask("/version", "ask for its version")
    numbers = tuple(int(re.sub(r"\D.*", "", found[part]) or 0) for part in ("major", "minor"))
    text = f"{cluster.name}, Kubernetes {found['gitVersion']}, namespace {cluster.namespace}"
    return text, "" if numbers >= OLDEST else "use Kubernetes 1.33 or newer"


def _argo(cluster: Cluster) -> Finding:
    """Checks Argo's CRDs, and derives Argo's version from the fields that they define.  The check fails if a CRD is
    missing, if the version is older than 3.6, or if the CRDs are Argo's minimal ones.  Minimal CRDs define no fields,
    so the API server would accept a Workflow with misspelt fields."""
    mend = "install Argo Workflows 3.7 or 4 with its full resource definitions (manifests/full in its release)"
    try:
        schemas = cluster.ask(f"/openapi/v3/apis/{_ARGO}", "read Argo's definitions")["components"]["schemas"]
    except ClusterError as error:
        if error.status != 404:
            raise
        return "the cluster has no resource definitions of Argo Workflows", mend
    kinds = {
        kind["kind"]: schema
        for schema in schemas.values()
        for kind in schema.get("x-kubernetes-group-version-kind", [])
    }
    missing = {"Workflow", "WorkflowTemplate", "CronWorkflow", "WorkflowTaskResult"} - kinds.keys()
    if missing:
        return f"the cluster has no resource definitions of {', '.join(sorted(missing))}", mend
    spec = kinds["Workflow"].get("properties", {}).get("spec", {}).get("properties", {})
    if not spec:
        return f"{_ARGO}: minimal definitions, which accept misspelt fields", mend
    locks = spec.get("synchronization", {}).get("properties", {})
    if "mutexes" not in locks:
        return f"{_ARGO}: definitions of a version before 3.6", mend
    return f"{_ARGO}, full definitions of version {'3.6 or 3.7' if 'mutex' in locks else '4'}", ""


def _controller(cluster: Cluster) -> Finding:
    """Lists the images of Argo's controllers in all namespaces.  The images' tags show the user Argo's version.  The
    check passes even if there is no controller."""
    everywhere = cluster.ask("/apis/apps/v1/deployments", "look for Argo's controller")["items"]
    images = [
        f"{container['image']} in {item['metadata']['namespace']}"
        for item in everywhere
        if item["metadata"]["name"].endswith("workflow-controller")
        for container in item["spec"]["template"]["spec"]["containers"]
    ]
    return ", ".join(images) or "no Deployment has a name that ends with workflow-controller", ""


def _rights(cluster: Cluster) -> Finding:
    missing = []
    for group, resource, verbs in _RIGHTS:
        name, _, sub = resource.partition("/")
        for verb in verbs:
            asked = {"verb": verb, "group": group, "resource": name, "subresource": sub}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": asked | {"namespace": cluster.namespace}},
            }
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            if not cluster.ask(path, "ask what you may do", review)["status"].get("allowed"):
                missing.append(f"{verb} {resource}")
    if not missing:
        return f"all that a submitter needs, in namespace {cluster.namespace}", ""
    mend = f"ask for the chart's submitter role (access.submitters) in namespace {cluster.namespace}"
    return f"you may not {', '.join(missing)}", mend


def _chart(cluster: Cluster, release: str | None) -> Finding:
    try:
        ours = templates.of_release(cluster, release)
    except ClusterError as error:
        if error.status != 404:
            raise
        text, _, mend = str(error).partition(". ")
        return text, mend
    name = ours[0].release
    profiles = ", ".join(f"{one.job} ({one.gpus} GPUs)" if one.gpus not in ("", "0") else one.job for one in ours)
    text = f"version {ours[0].version} as {name}, profiles {profiles}"
    there = {one.job for one in templates.templates(cluster, templates.JOB_LABEL) if one.release == name}
    absent = [job for job in ("doctor", "gc", "gc-plan", "pin", "unpin") if job not in there]
    return (
        (f"{text}; it lacks {', '.join(absent)}", "run helm upgrade with this version's chart")
        if absent
        else (text, "")
    )


def _results(cluster: Cluster, release: str | None) -> Finding:
    """Checks whether this machine can read reports and logs from an MLflow outside of the release, with the user's
    login.  Pods have another one, and the checks inside the cluster try it."""
    uri = templates.of_release(cluster, release)[0].mlflow
    if uri == "off" or results.is_of_chart(uri):
        return "the release has no MLflow" if uri == "off" else "in the chart's MLflow, through a forwarded port", ""
    try:
        mlflow_api.Rest(uri).experiments()
    except Exception as error:
        refused, _, login = mlflow_api.refusal(error).partition(". ")
        return f"{uri}: {refused or error}", login or "let this machine connect to it, for report and logs"
    return f"this machine reads them from {uri}", ""


def _pod_security(cluster: Cluster) -> Finding:
    found = cluster.ask(f"/api/v1/namespaces/{cluster.namespace}", f"read namespace {cluster.namespace}")
    level = found["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce", "")
    mend = f"kubectl label namespace {cluster.namespace} pod-security.kubernetes.io/enforce=restricted --overwrite"
    if level == "restricted":
        return level, ""
    return f"the namespace enforces {level}" if level else "the namespace enforces no level", mend


def _policies(cluster: Cluster) -> Finding:
    found = cluster.all("NetworkPolicy")
    for item in found:
        spec = item["spec"]
        rules = spec.get("podSelector") or spec.get("ingress") or spec.get("egress")
        if not rules and {"Ingress", "Egress"} <= set(spec.get("policyTypes", [])):
            return f"{len(found)}; {item['metadata']['name']} denies all that no other policy allows", ""
    return f"{len(found)}; no policy denies traffic by default", "helm upgrade --set networkPolicy.enabled=true"


def _gpus(cluster: Cluster) -> Finding:
    counts = [
        sum(int(n) for name, n in item["status"].get("allocatable", {}).items() if name.startswith("nvidia.com/"))
        for item in _nodes(cluster)
    ]
    if not any(counts):
        return f"none on {len(counts)} nodes: pods that ask for GPUs will wait", ""
    return f"{sum(counts)} on {sum(map(bool, counts))} of {len(counts)} nodes", ""


def _room(cluster: Cluster, release: str | None) -> Finding:
    """Counts the runs of each profile that fit on the cluster.  The check fails if none fits, or if more of them work
    at once than fit: each may then hold servers that the other needs."""
    rooms = {one.job: room.of_profile(cluster, one.name) for one in templates.of_release(cluster, release)}
    text = "; ".join(f"{name}: {room.sentence(one)}" for name, one in sorted(rooms.items()))
    counted = {name: one for name, one in rooms.items() if one.fit is not None}
    too_many = [name for name, one in counted.items() if one.fit and not 0 < one.at_once <= one.fit]
    mends = [f"--set profiles.{name}.runs={counted[name].fit}" for name in sorted(too_many)]
    if mends:
        return text, f"helm upgrade {' '.join(mends)}"
    if counted and not any(one.fit for one in counted.values()):
        return text, "add nodes, or lower the requests in the chart's profiles"
    return text, ""


def _pid_limits(cluster: Cluster) -> Finding:
    limits = []
    for item in _nodes(cluster):
        path = f"/api/v1/nodes/{item['metadata']['name']}/proxy/configz"
        limits.append(cluster.ask(path, "read a kubelet's settings")["kubeletconfig"].get("podPidsLimit", -1))
    if min(limits, default=-1) < 0:
        return "some nodes have no limit; the kubelet's setting podPidsLimit would add one", ""
    return f"{min(limits)} processes a pod", ""


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.everywhere("Node")


def _inside(cluster: Cluster, release: str | None) -> Iterator[Check]:
    mend = "use the same version of chart, image and command"
    try:
        found = maintenance.ask(cluster, release, "doctor")
    except ClusterError as error:
        first, *more = str(error).splitlines()
        yield Check("inside", False, first, more[-1].strip() if more else "see `kubectl get pods,events`")
        return
    except json.JSONDecodeError:
        yield Check("inside", False, "the answer of the pod cannot be read", mend)
        return
    yield Check("argo works", True, "a pod ran, and its answer came back")
    try:
        checks = [Check(**item) for item in found]
    except TypeError:
        yield Check("inside", False, "the pod's image has another version than this command: its checks differ", mend)
        return
    yield from checks
