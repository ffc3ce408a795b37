"""Forwards a port of this machine to a port of a pod, through the API server of Kubernetes."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

from cuda_agent.cluster.api import Cluster, ClusterError


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


@contextlib.contextmanager
def forwarded(cluster: Cluster, pod: str, port: int, local: int = 0) -> Iterator[int]:
    """Forwards the port ``local`` of this machine to the pod's port ``port`` during the ``with`` block.  If ``local``
    is 0, chooses a free port.  Yields the number of the local port.

    Raises:
        ClusterError: The API server refuses to forward the pod's port or does not answer, or the local port is in
            use."""

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ClusterError), contextlib.closing(_open(cluster, pod, port)) as there:
                back = threading.Thread(target=_pump, args=(there, self.request), daemon=True)
                back.start()
                _pump(self.request, there)
                back.join()

    _open(cluster, pod, port).close()  # fails here with a clear message, not later in a thread
    try:
        opened = _Server(("127.0.0.1", local), Connection)
    except OSError as error:
        raise ClusterError(f"port {local} of this machine cannot be used: {error.strerror}") from None
    with opened as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def pod_of(cluster: Cluster, component: str) -> str:
    """Returns the name of a running pod of the chart's component ``component``, such as ``mlflow``.

    Raises:
        ClusterError: No pod of the component is running."""
    for pod in cluster.all("Pod", f"app.kubernetes.io/component={component}"):
        if pod.get("status", {}).get("phase") == "Running":
            return str(pod["metadata"]["name"])
    raise ClusterError(f"No {component} of the chart runs in namespace {cluster.namespace} of {cluster.name}.", 404)


def _pump(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _open(cluster: Cluster, pod: str, port: int) -> Any:
    from kubernetes.client import CoreV1Api
    from kubernetes.client.exceptions import ApiException
    from kubernetes.stream import portforward

    api = CoreV1Api(cluster.client)
    try:
        stream = portforward(api.connect_get_namespaced_pod_portforward, pod, cluster.namespace, ports=str(port))
    except ApiException as error:
        text = f"{cluster.name} refused to forward a port of {pod}: {error.reason}"
        raise ClusterError(text, error.status or 0) from None
    opened = stream.socket(port)
    opened.setblocking(True)
    return opened
