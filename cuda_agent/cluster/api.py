"""A small Kubernetes client on top of the package ``kubernetes``: reads and writes JSON objects in one namespace.

The credentials come from a kubeconfig or from a pod's service account.  A failed request raises a ``ClusterError``."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cuda_agent.errors import UserError

API_VERSIONS = {
    **dict.fromkeys(("ConfigMap", "Event", "Node", "Pod", "Secret", "Service"), "v1"),
    "StatefulSet": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "RayJob": "ray.io/v1",
    **dict.fromkeys(("Workflow", "WorkflowTemplate"), "argoproj.io/v1alpha1"),
}
_SECONDS = 30.0  # time limit of one request
_PAGE = 500  # objects of a list that one request asks for
_METADATA, _TABLE = (f"application/json;as={it};g=meta.k8s.io;v=v1" for it in ("PartialObjectMetadataList", "Table"))


def new_object(kind: str, name: str, labels: Mapping[str, str], **fields: Any) -> dict[str, Any]:
    """Returns a Kubernetes object for ``Cluster.create``.  ``fields`` are its top-level fields, such as ``spec``."""
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata} | fields


AWAY = 120.0  # seconds without an answer of the API server until waiting for a run or a job ends


class ClusterError(UserError):
    """A failed operation on a cluster.  The attribute ``status`` is the HTTP status of the API server's response, or 0
    if there was no response.  It is also 404 if a required object is missing, or if the kubeconfig or the pod's service
    account cannot be used."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """Returns the exit code of a process that ends with this error: 75 (try again) if there was no response or the
        API server is busy (``status`` 429 or 5xx), else 78 (a person must fix something)."""
        return 75 if self.status in (0, 429) or self.status >= 500 else 78


class Cluster:
    """A connection to one namespace of one Kubernetes cluster."""

    def __init__(self, client: Any, namespace: str, name: str) -> None:
        self.client, self.namespace, self.name = client, namespace, name

    @classmethod
    def of_kubeconfig(cls, context: str | None = None, namespace: str | None = None) -> "Cluster":
        """Connects to a cluster with the user's kubeconfig.

        Args:
            context: Name of a context in the kubeconfig; None: the current context.
            namespace: Namespace to use; None: the namespace of the context, or ``default`` if it has none.

        Raises:
            ClusterError: The kubeconfig cannot be used, or lacks the context."""
        import yaml
        from kubernetes import config
        from kubernetes.config import ConfigException, kube_config

        try:
            # The client reads the variable only once, at import.
            file = os.environ.get("KUBECONFIG") or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
            found = kube_config.KubeConfigMerger(file).config
            if found is None:
                raise ConfigException("there is no such file")
            contexts, name = found["contexts"].value, context or found.safe_get("current-context")
            if name is None:
                raise ConfigException("it has no current context, and no context is named")
            chosen = next((item for item in contexts if item["name"] == name), None)
            if chosen is None:
                names = ", ".join(sorted(item["name"] for item in contexts)) or "none"
                raise ClusterError(f"There is no context {name} in your kubeconfig: {names}.", 404)
            client = config.new_client_from_config(file, context=name)
        except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ClusterError(f"Your kubeconfig cannot be used: {reason}. Set KUBECONFIG.", 404) from None
        space = namespace or chosen["context"].safe_get("namespace") or "default"
        return cls(client, space, name)

    @classmethod
    def of_pod(cls) -> "Cluster":
        """Connects to the cluster of the pod in which this process runs, with the pod's service account.

        Raises:
            ClusterError: This process does not run in a pod with a service account."""
        from kubernetes import client, config
        from kubernetes.config import ConfigException

        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)
            with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
                namespace = file.read().strip()
        except (ConfigException, OSError) as error:
            raise ClusterError(f"This is no pod with an account: {error}", 404) from None
        return cls(client.ApiClient(settings), namespace, "this cluster")

    def user(self) -> str:
        """Returns the user's name on this cluster, or "" if the API server does not tell it."""
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        try:
            answer = self.ask("/apis/authentication.k8s.io/v1/selfsubjectreviews", "ask for your name", kind)
        except ClusterError:
            return ""
        return str(answer["status"]["userInfo"]["username"])

    def ask(self, path: str, doing: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends a request to the API server, and returns the parsed JSON response.  ``path`` is the path of the URL.
        The request is a POST with ``body``, or a GET if ``body`` is None.  ``doing`` names the operation in error
        messages, as in "list nodes"."""
        return self._ask("GET" if body is None else "POST", path, doing, body and dict(body))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self._ask("GET", f"{self._path(kind)}/{name}", f"read {kind} {name}")

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """Returns the object of this kind and name, or None if it does not exist."""
        return _unless(404, lambda: self.get(kind, name))

    def all(self, kind: str, selector: str = "", fields: str = "") -> list[dict[str, Any]]:
        """Returns all objects of this kind, or those with the labels ``selector`` and the fields ``fields``."""
        return [item for page in self._pages(kind, selector, fields) for item in page["items"]]

    def everywhere(self, kind: str, fields: str = "") -> list[dict[str, Any]]:
        """Returns the objects of this kind in all namespaces, or those with the fields ``fields``."""
        return [item for page in self._pages(kind, "", fields, everywhere=True) for item in page["items"]]

    def metadata(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Returns the metadata of the objects of this kind with the labels ``selector``."""
        return [item["metadata"] for page in self._pages(kind, selector, "", _METADATA) for item in page["items"] or ()]

    def table(self, kind: str, selector: str = "") -> dict[str, dict[str, Any]]:
        """Returns what `kubectl get` prints of the objects of this kind with the labels ``selector``: name -> column
        -> cell."""
        found = {}
        for page in self._pages(kind, selector, "", _TABLE):
            columns = [column["name"] for column in page["columnDefinitions"]]
            for row in page["rows"] or ():  # null if there are none
                cells = dict(zip(columns, row["cells"], strict=True))
                found[cells["Name"]] = cells
        return found

    def _pages(
        self, kind: str, selector: str, fields: str, accept: str = "", everywhere: bool = False
    ) -> Iterator[dict[str, Any]]:
        asked = {"limit": _PAGE, "labelSelector": selector, "fieldSelector": fields}
        if accept == _TABLE:  # cells alone: who set each field of 200 Workflows has 8 MB
            asked["includeObject"] = "None"
        more = None
        while more != "":
            query = [(key, value) for key, value in (asked | {"continue": more}).items() if value]
            where = " of all namespaces" if everywhere else ""
            page = self._ask("GET", self._path(kind, everywhere), f"list {kind}s{where}", query=query, accept=accept)
            yield page
            more = page["metadata"].get("continue", "")

    def create(self, item: Mapping[str, Any], dry_run: bool = False) -> dict[str, Any]:
        """Creates the object and returns it.  With ``dry_run`` the API server checks it, but stores nothing."""
        query = [("fieldValidation", "Strict"), *([("dryRun", "All")] if dry_run else [])]
        kind = item["kind"]
        return self._ask("POST", self._path(kind), f"create {kind} {item['metadata']['name']}", dict(item), query)

    def create_if_absent(self, item: Mapping[str, Any]) -> bool:
        """Creates the object and returns True, or returns False if an object of its kind and name exists."""
        return _unless(409, lambda: self.create(item)) is not None

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("PATCH", f"{self._path(kind)}/{name}", f"change {kind} {name}", dict(change))

    def delete(self, kind: str, name: str) -> bool:
        """Deletes the object of this kind and name, and returns whether it existed."""
        path, body = f"{self._path(kind)}/{name}", {"propagationPolicy": "Background"}
        return _unless(404, lambda: self._ask("DELETE", path, f"delete {kind} {name}", body)) is not None

    def await_container(self, pod: str) -> None:
        """Waits until the pod's container ``main`` has started, or the pod has ended or is deleted."""
        while (found := self.find("Pod", pod)) is not None:
            status = found.get("status", {})
            state = {one["name"]: one.get("state", {}) for one in status.get("containerStatuses", ())}.get("main", {})
            if status.get("phase") in ("Succeeded", "Failed") or "running" in state or "terminated" in state:
                return
            time.sleep(1.0)

    def logs(self, pod: str, follow: bool = False) -> Iterator[str]:
        """Yields the log lines of the pod's container ``main``.  With ``follow``, waits for more lines until the
        container ends."""
        from urllib3.exceptions import HTTPError

        query = [("container", "main"), *([("follow", "true")] if follow else [])]
        path = f"{self._path('Pod')}/{pod}/log"
        response = self._request("GET", path, f"read the log of {pod}", query=query, stream=True)
        rest = b""
        try:
            for chunk in response.stream(4096):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except HTTPError as error:
            raise ClusterError(f"the log of {pod} broke off: {type(error).__name__}") from None
        if rest:
            yield rest.decode(errors="replace")

    def _path(self, kind: str, everywhere: bool = False) -> str:
        version, plural = API_VERSIONS[kind], f"{kind.lower()}s".replace("ys", "ies")
        space = "" if everywhere else f"namespaces/{self.namespace}/"
        return f"/api{'s' if '/' in version else ''}/{version}/{space}{plural}"

    def _ask(self, *request: Any, **more: Any) -> dict[str, Any]:
        return json.loads(self._request(*request, **more).data)

    def _request(
        self,
        method: str,
        path: str,
        doing: str,
        body: Any = None,
        query: Sequence[Any] = (),
        accept: str = "",
        stream: bool = False,
    ) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        # A Workflow has 200 KB, of which gzip leaves a twentieth.
        headers = {"Accept": accept or "application/json"} | ({} if stream else {"Accept-Encoding": "gzip"})
        headers |= {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        try:
            return self.client.call_api(
                path, method, query_params=list(query), header_params=headers, body=body,
                auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
                _request_timeout=(_SECONDS, None if stream else _SECONDS),
            )  # fmt: skip
        except ApiException as error:
            raise self._refusal(doing, error.status or 0, error.body) from None
        except (HTTPError, OSError) as error:
            reason = (str(getattr(error, "reason", error)) or type(error).__name__).splitlines()[0][:200]
            raise ClusterError(f"{self.name} does not answer: could not {doing} ({reason}).") from None

    def _refusal(self, doing: str, status: int, body: Any) -> ClusterError:
        try:
            said = json.loads(body)["message"]
        except (ValueError, KeyError, TypeError):
            said = str(body or "")[:300]
        hint = {
            401: " Log in again.",
            403: f" Ask for the chart's role of submitters in namespace {self.namespace}.",
        }.get(status, "")
        return ClusterError(f"{self.name} refused to {doing} ({status}): {said}{hint}", status)


def _unless(status: int, request: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the result of ``request()``, or None if it raises a ``ClusterError`` with the HTTP status ``status``."""
    try:
        return request()
    except ClusterError as error:
        if error.status != status:
            raise
        return None
