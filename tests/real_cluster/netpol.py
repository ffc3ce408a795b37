"""netpol.py SERVER PKI USER NETWORK GATEWAY: enforces NetworkPolicies (networking.k8s.io/v1) on one node with iptables.

Supports ingress and egress, podSelector, namespaceSelector, ipBlock with except, numbered and named ports and endPort.
Fails closed: an address of the pods' range that belongs to no known living pod reaches nothing and is not reached. So a
new pod has no network until its policies are in force, and no new pod gets one while this process is away. Traffic from
the node itself to a pod passes (probes), and so do answers. Rules are in the table `mangle`, which comes before
kube-proxy's `filter`. Does not support IPv6 (switched off), connections that were open before a policy came (they go
on), nor a pod that may forge packets with the address of another pod (this needs CAP_NET_RAW)."""

import hashlib
import ipaddress
import subprocess
import sys
from pathlib import Path

from kube import Api, Mirror, Object

PATHS = ("/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies")
HOOKS = (("FORWARD", "NETPOL-FORWARD"), ("INPUT", "NETPOL-INPUT"))


def selects(selector: Object, labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions") or []:
        value, values = labels.get(expression["key"]), expression.get("values") or []
        holds = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds[expression["operator"]]:
            return False
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())


def labels(thing: Object) -> dict[str, str]:
    return thing["metadata"].get("labels") or {}


def address(pod: Object) -> str | None:
    """Returns the pod's address; None if the pod uses the node's network or has ended."""
    ended = pod["status"].get("phase") in ("Succeeded", "Failed")
    return None if ended or pod["spec"].get("hostNetwork") else pod["status"].get("podIP")


def block(peer: Object) -> list[str]:
    """Returns an ipBlock as a list of networks, without the addresses in its `except`."""
    if ":" in peer["cidr"]:
        return []
    kept = [ipaddress.IPv4Network(peer["cidr"], strict=False)]  # host bits are allowed in a policy
    for hole in (ipaddress.IPv4Network(text, strict=False) for text in peer.get("except") or []):
        kept = [part for net in kept for part in (net.address_exclude(hole) if hole.subnet_of(net) else [net])]
    return [str(net) for net in kept]


class World:
    """The pods, namespaces and policies that the API server shows, and the iptables rules that follow from them."""

    def __init__(self, pods: list[Object], namespaces: list[Object], policies: list[Object]) -> None:
        self.pods = sorted((pod for pod in pods if address(pod)), key=lambda pod: pod["metadata"]["uid"])
        self.spaces = {space["metadata"]["name"]: labels(space) for space in namespaces}
        self.policies = sorted(policies, key=lambda policy: policy["metadata"]["uid"])

    def chains(self, network: str, gateway: str) -> dict[str, list[str]]:
        """Returns chain -> rules without their `-A chain`. A packet that returns from the hooks' chains may pass."""
        answers = "-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"
        chains = {name: [answers] for _, name in HOOKS}
        for name, way in (("NETPOL-KNOWN", "s"), ("NETPOL-REACHED", "d")):
            inhabited = [gateway, *(address(pod) for pod in self.pods)]
            chains[name] = [f"-{way} {ip}/32 -j RETURN" for ip in inhabited] + [f"-{way} {network} -j DROP"]
        chains["NETPOL-FORWARD"] += ["-j NETPOL-KNOWN", "-j NETPOL-REACHED"]
        chains["NETPOL-INPUT"] += ["-j NETPOL-KNOWN"]
        for pod in self.pods:
            for kind in ("Egress", "Ingress"):
                applying = [policy for policy in self.policies if applies(policy, pod, kind)]
                if not applying:
                    continue
                name = f"NETPOL-{kind[0]}-{hashlib.sha256(pod['metadata']['uid'].encode()).hexdigest()[:12]}"
                allowed = [f"{match} -j RETURN" for policy in applying for match in self.matches(policy, pod, kind)]
                chains[name] = [*allowed, "-j DROP"]
                way = "s" if kind == "Egress" else "d"
                chains["NETPOL-FORWARD"].append(f"-{way} {address(pod)}/32 -j {name}")
                if kind == "Egress":
                    chains["NETPOL-INPUT"].append(f"-s {address(pod)}/32 -j {name}")
        return chains

    def matches(self, policy: Object, pod: Object, kind: str) -> list[str]:
        """Returns what one policy lets through to (Ingress) or from (Egress) one pod, as conditions of iptables."""
        field, way = ("to", "-d") if kind == "Egress" else ("from", "-s")
        space, found = policy["metadata"]["namespace"], []
        for rule in policy["spec"].get(kind.lower()) or []:
            peers: list[tuple[str, Object | None]] = [("0.0.0.0/0", None)]
            if rule.get(field):
                peers = [found for peer in rule[field] for found in self.peers(peer, space)]
            for network, other in peers:
                serving = other if kind == "Egress" else pod
                for port in rule.get("ports") or [{}]:
                    found += [f"{way} {network} {match}".strip() for match in ports(port, serving)]
        return found

    def peers(self, peer: Object, space: str) -> list[tuple[str, Object | None]]:
        if "ipBlock" in peer:
            return [(network, None) for network in block(peer["ipBlock"])]
        spaces = {space}
        if "namespaceSelector" in peer:
            spaces = {name for name, has in self.spaces.items() if selects(peer["namespaceSelector"], has)}
        return [
            (f"{address(pod)}/32", pod)
            for pod in self.pods
            if pod["metadata"]["namespace"] in spaces and selects(peer.get("podSelector") or {}, labels(pod))
        ]


def applies(policy: Object, pod: Object, kind: str) -> bool:
    spec = policy["spec"]
    kinds = spec.get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return same and kind in kinds and selects(spec.get("podSelector") or {}, labels(pod))


def ports(port: Object, serving: Object | None) -> list[str]:
    """Returns a port of a rule as conditions of iptables. A name stands for the serving pod's ports of that name."""
    if not port:
        return [""]
    protocol, number = port.get("protocol", "TCP"), port.get("port")
    if number is None:
        return [f"-p {protocol.lower()}"]
    if isinstance(number, str):
        containers = serving["spec"]["containers"] if serving else []
        numbers = {
            has["containerPort"]
            for container in containers
            for has in container.get("ports") or []
            if has.get("name") == number and has.get("protocol", "TCP") == protocol
        }
        return [f"-p {protocol.lower()} --dport {found}" for found in sorted(numbers)]
    last = f":{port['endPort']}" if "endPort" in port else ""
    return [f"-p {protocol.lower()} --dport {number}{last}"]


def iptables(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["iptables", "-w", "-t", "mangle", *words], text=True, capture_output=True, check=check)


def install(chains: dict[str, list[str]]) -> None:
    """Replaces all NETPOL chains at once, and adds jumps to them from the built-in chains where those are missing."""
    old = [line.split()[1] for line in iptables("-S").stdout.splitlines() if line.startswith("-N NETPOL-")]
    gone = [name for name in old if name not in chains]
    lines = ["*mangle", *(f":{name} - [0:0]" for name in [*chains, *gone])]
    lines += [f"-A {name} {rule}" for name, rules in chains.items() for rule in rules]
    lines += [*(f"-X {name}" for name in gone), "COMMIT", ""]
    subprocess.run(["iptables-restore", "-w", "--noflush"], input="\n".join(lines), text=True, check=True)
    for hook, name in HOOKS:
        if iptables("-C", hook, "-j", name, check=False).returncode:
            iptables("-I", hook, "1", "-j", name)


def main(server: str, pki: str, user: str, network: str, gateway: str) -> None:
    if iptables("-S", "NETPOL-KNOWN", check=False).returncode:
        install(World([], [], []).chains(network, gateway))
    last: dict[str, list[str]] = {}
    for pods, namespaces, policies in Mirror(Api(server, Path(pki), user), *PATHS).changes():
        chains = World(pods, namespaces, policies).chains(network, gateway)
        if chains != last:
            install(chains)
            last = chains
            print(f"{len(chains)} chains, {sum(map(len, chains.values()))} rules", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
