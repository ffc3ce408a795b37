"""NetworkPolicies are enforced: what they forbid fails, and the same attempt succeeds once the policy is gone."""

import socket
from typing import Any

import pytest
from kubectl import Cluster, pod, script, setting, wait_for

pytestmark = pytest.mark.cluster

SERVER = "busybox httpd -f -p 8080 -h /tmp & exec busybox httpd -f -p 9090 -h /tmp"
API = ("$KUBERNETES_SERVICE_HOST", "443")


def policy(name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name}
    spec = {"podSelector": {}, **spec}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def service(name: str) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def connects(space: Cluster, client: str, host: str, port: str | int) -> bool:
    return space.exec(client, f"nc -w 2 {host} {port} </dev/null").returncode == 0


def opens(space: Cluster, client: str, host: str, port: str | int) -> None:
    """Waits until it connects: a new pod has its network within about a second, a changed policy its rules sooner."""
    wait_for(f"{client} reaches {host}:{port}", 20, lambda: connects(space, client, host, port))


def closes(space: Cluster, client: str, host: str, port: str | int) -> None:
    wait_for(f"{client} is kept from {host}:{port}", 20, lambda: not connects(space, client, host, port))


def serving(space: Cluster) -> str:
    """Starts the pods `server`, `client` and `stranger` and a service; the server's address."""
    made = pod("server", SERVER)
    made["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": 8080}]
    space.create(made, service("server"), pod("client", "sleep 600"), pod("stranger", "sleep 600"))
    space.ready("server", "client", "stranger")
    ip: str = space.get("pod", "server")["status"]["podIP"]
    for client in ("client", "stranger"):
        opens(space, client, ip, 8080)
    return ip


def test_deny_all_keeps_a_pod_from_everything_and_its_absence_lets_it(space: Cluster) -> None:
    ip = serving(space)
    cluster_ip = space.get("service", "server")["spec"]["clusterIP"]
    places: list[tuple[str, str | int]] = [
        (ip, 8080),
        (cluster_ip, 80),
        API,
        (setting("NODE_IP"), 6443),
        (setting("NODE_IP"), 10250),
    ]
    lookup = "nslookup kubernetes.default.svc.cluster.local"
    for place in places:
        opens(space, "client", *place)
    assert space.exec("client", lookup).returncode == 0
    space.create(policy("deny-all", policyTypes=["Ingress", "Egress"]))
    for place in places:
        closes(space, "client", *place)
    assert space.exec("client", lookup).returncode
    space.run("delete", "networkpolicy", "deny-all")
    for place in places:
        opens(space, "client", *place)
    assert space.exec("client", lookup).returncode == 0


def test_what_is_let_in_is_one_client_on_one_port(space: Cluster) -> None:
    ip = serving(space)
    chosen = [{"podSelector": {"matchLabels": {"app": "client"}}}]
    letting = policy(
        "in", podSelector={"matchLabels": {"app": "server"}}, ingress=[{"from": chosen, "ports": [{"port": "http"}]}]
    )
    space.create(letting)
    closes(space, "stranger", ip, 8080)
    closes(space, "client", ip, 9090)
    opens(space, "client", ip, 8080)


def test_what_is_let_out_is_one_address_less_an_exception(space: Cluster) -> None:
    ip, node = serving(space), setting("NODE_IP")
    out = [{"to": [{"ipBlock": {"cidr": f"{node}/32"}}], "ports": [{"port": 6443}]}]
    space.create(policy("out", podSelector={"matchLabels": {"app": "client"}}, policyTypes=["Egress"], egress=out))
    closes(space, "client", ip, 8080)
    closes(space, "client", node, 10250)
    opens(space, "client", node, 6443)
    opens(space, "client", *API)  # a service's address is judged after its translation: the node's
    out[0]["to"] = [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"{node}/32"]}}]
    out[0]["ports"] = []
    space.run("delete", "networkpolicy", "out")
    space.create(policy("out", podSelector={"matchLabels": {"app": "client"}}, policyTypes=["Egress"], egress=out))
    closes(space, "client", node, 6443)
    opens(space, "client", ip, 8080)


def test_the_machine_outside_cannot_be_reached_from_the_cluster(space: Cluster) -> None:
    with socket.create_server((setting("HOST_IP"), 0)) as listening:
        port = listening.getsockname()[1]
        socket.create_connection((setting("HOST_IP"), port), timeout=5).close()  # it does answer
        space.create(pod("client", "sleep 600"))
        space.ready("client")
        opens(space, "client", setting("NODE_IP"), 6443)
        assert not connects(space, "client", setting("HOST_IP"), port)


def test_a_policy_holds_from_a_pods_first_instruction(space: Cluster) -> None:
    ip = serving(space)
    attempt = (
        f"for i in $(seq 100); do nc -w 1 {ip} 8080 </dev/null && echo through; usleep 20000; done 2>/dev/null; true"
    )
    space.create(pod("before", attempt))
    assert "through" in space.finished("before", 120)
    space.create(policy("deny", podSelector={"matchLabels": {"app": "after"}}, policyTypes=["Egress"]))
    space.create(pod("after", attempt.replace("seq 100", "seq 10")))
    assert space.finished("after", 120) == ""


def test_a_new_pod_has_no_network_while_the_enforcer_is_away(space: Cluster) -> None:
    ip = serving(space)
    script("enter", "pkill", "-STOP", "-f", "netpol.py")
    try:
        space.create(pod("new", "sleep 600"))
        space.ready("new")
        assert not any(connects(space, "new", ip, 8080) for _ in range(3))
        assert connects(space, "client", ip, 8080)
    finally:
        script("enter", "pkill", "-CONT", "-f", "netpol.py")
    opens(space, "new", ip, 8080)
