"""Tests which addresses a pod can reach, by connections from inside the pod.

It tries TCP connections and DNS queries, in pods that have Python. Other UDP cannot be tested, because a server that
does not answer looks like a blocked one."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kubectl import Cluster, pod, setting, wait_for

Place = tuple[str, str, int]  # tcp or dns, address, port

_PROBE = """
import concurrent.futures, json, socket, struct, sys

NAME = b"kubernetes.default.svc.cluster.local."
LABELS = b"".join(bytes([len(part)]) + part for part in NAME.split(b"."))
QUESTION = struct.pack("!6H", 7, 256, 1, 0, 0, 0) + LABELS + struct.pack("!2H", 1, 1)

def reaches(place):
    kind, address, port = place
    try:
        if kind == "tcp":
            socket.create_connection((address, port), timeout=4).close()
        else:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                asking.settimeout(4)
                asking.sendto(QUESTION, (address, port))
                return asking.recv(512)[:2] == QUESTION[:2]
        return True
    except OSError:
        return False

places = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
    print(json.dumps(dict(zip(places, threads.map(reaches, places.values())))))
"""


def reached(space: Cluster, name: str, places: Mapping[str, Place], container: str = "main") -> set[str]:
    """Returns the names of those ``places`` to which a container of the pod ``name`` can connect."""
    command = ["exec", name, "-c", container, "--", "python3", "-c", _PROBE, json.dumps(places)]
    answer: dict[str, bool] = json.loads(space.run(*command))
    return {place for place, answers in answer.items() if answers}


def python_pod(name: str, image: str, code: str, labels: dict[str, str]) -> dict[str, Any]:
    """Returns a restricted pod with these labels that runs the Python code `code` and nothing of the project."""
    made = pod(name, "", labels, image=image, env=[{"name": "HOME", "value": "/tmp"}])
    made["spec"]["containers"][0]["command"] = ["python3", "-c", code]
    made["spec"]["containers"][0]["imagePullPolicy"] = "Never"
    return made


SLEEP = "import time; time.sleep(3600)"


def listen(port: int) -> str:
    """Returns code that accepts connections on a port and closes them."""
    return f"import socket\nhere = socket.create_server(('', {port}))\nwhile True: here.accept()[0].close()"


def service_of(space: Cluster, name: str, port: int) -> Place:
    return "tcp", space.get("service", name)["spec"]["clusterIP"], port


def address_of(space: Cluster, name: str) -> str:
    return wait_for(f"the address of {name}", 60, lambda: space.get("pod", name)["status"].get("podIP", ""))


def cluster_places(space: Cluster) -> dict[str, Place]:
    """Returns name -> place for the services of every cluster: the API server at both of its addresses, DNS, the
    kubelet and Argo's controller."""
    node = setting("NODE_IP", space.number)
    (controller,) = Cluster(space.number, "argo").get("pods", "-l", "app=workflow-controller")["items"]
    return {
        "API server": ("tcp", setting("API_IP", space.number), 443),
        "API server, at the node": ("tcp", node, 6443),
        "DNS": ("dns", setting("DNS_IP", space.number), 53),
        "DNS, over TCP": ("tcp", setting("DNS_IP", space.number), 53),
        "node": ("tcp", node, 10250),
        "Argo": ("tcp", controller["status"]["podIP"], 6060),
    }


@contextmanager
def without(space: Cluster, kind: str, *names: str) -> Iterator[None]:
    """Removes the objects of this kind (all if none is named) during the `with` block, and then creates them again."""
    listed = [space.get(kind, name) for name in names] if names else space.get(kind)["items"]
    for item in listed:
        for field in ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"):
            item["metadata"].pop(field, None)
        item.pop("status", None)
    assert listed, f"there is no {kind} to take away"
    space.run("delete", kind, *(item["metadata"]["name"] for item in listed))
    try:
        yield
    finally:
        space.create(*listed)
