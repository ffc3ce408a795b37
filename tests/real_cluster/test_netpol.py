"""The rules that follow from policies: the part of the enforcer that needs no cluster."""

from ipaddress import ip_address, ip_network
from typing import Any

from netpol import World, block, selects

PODS, GATEWAY = "10.244.0.0/24", "10.244.0.1"


def pod(name: str, ip: str | None, space: str = "runs", phase: str = "Running", **labels: str) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8080}, {"name": "dns", "containerPort": 53, "protocol": "UDP"}]
    return {
        "metadata": {"uid": name, "name": name, "namespace": space, "labels": labels},
        "spec": {"containers": [{"name": "main", "ports": ports}]},
        "status": {"phase": phase, **({"podIP": ip} if ip else {})},
    }


def policy(name: str = "p", space: str = "runs", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"uid": name, "name": name, "namespace": space}, "spec": {"podSelector": {}, **spec}}


def space(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"uid": name, "name": name, "labels": labels}}


def chain(pods: list[dict[str, Any]], policies: list[dict[str, Any]], of: str, kind: str) -> list[str] | None:
    """The rules that the pod with the address `of` is subject to; none when no policy applies."""
    chains = World(pods, [space("runs", team="a"), space("other", team="b")], policies).chains(PODS, GATEWAY)
    way = {"Ingress": "d", "Egress": "s"}[kind]
    jumps = [rule for rule in chains["NETPOL-FORWARD"] if rule.startswith(f"-{way} {of}/32 -j ")]
    assert len(jumps) <= 1
    return chains[jumps[0].split()[-1]] if jumps else None


def test_addresses_of_no_known_pod_are_dropped_both_ways() -> None:
    chains = World([pod("a", "10.244.0.5")], [], []).chains(PODS, GATEWAY)
    assert chains["NETPOL-KNOWN"] == [
        "-s 10.244.0.1/32 -j RETURN",
        "-s 10.244.0.5/32 -j RETURN",
        "-s 10.244.0.0/24 -j DROP",
    ]
    assert chains["NETPOL-REACHED"][-1] == "-d 10.244.0.0/24 -j DROP"
    assert "-j NETPOL-KNOWN" in chains["NETPOL-INPUT"]


def test_a_pod_that_has_ended_is_no_longer_known() -> None:
    for ended in ("Succeeded", "Failed"):
        chains = World([pod("a", "10.244.0.5", phase=ended)], [], []).chains(PODS, GATEWAY)
        assert not any("10.244.0.5" in rule for rules in chains.values() for rule in rules)


def test_a_pod_without_a_policy_is_not_restricted_and_one_of_another_namespace_neither() -> None:
    pods = [pod("a", "10.244.0.5"), pod("b", "10.244.0.6", space="other")]
    deny = policy(policyTypes=["Ingress", "Egress"])
    assert chain(pods, [deny], "10.244.0.5", "Egress") == ["-j DROP"]
    assert chain(pods, [deny], "10.244.0.6", "Egress") is None
    assert chain(pods, [], "10.244.0.5", "Ingress") is None


def test_policy_types_that_are_not_named_follow_from_the_rules() -> None:
    pods = [pod("a", "10.244.0.5")]
    assert chain(pods, [policy()], "10.244.0.5", "Ingress") == ["-j DROP"]
    assert chain(pods, [policy()], "10.244.0.5", "Egress") is None
    assert chain(pods, [policy(egress=[{}])], "10.244.0.5", "Egress") == ["-d 0.0.0.0/0 -j RETURN", "-j DROP"]


def test_peers_are_pods_of_the_same_namespace_unless_a_namespace_selector_says_otherwise() -> None:
    pods = [
        pod("a", "10.244.0.5"),
        pod("b", "10.244.0.6", role="client"),
        pod("c", "10.244.0.7", space="other", role="client"),
    ]
    chosen = {"podSelector": {"matchLabels": {"role": "client"}}}
    elsewhere = {**chosen, "namespaceSelector": {"matchLabels": {"team": "b"}}}
    for peer, ip in ((chosen, "10.244.0.6"), (elsewhere, "10.244.0.7")):
        rules = chain(pods, [policy(ingress=[{"from": [peer]}])], "10.244.0.5", "Ingress")
        assert rules == [f"-s {ip}/32 -j RETURN", "-j DROP"]


def test_a_rule_with_no_peers_left_lets_nothing_through() -> None:
    nobody = {"podSelector": {"matchLabels": {"role": "nobody"}}}
    assert chain([pod("a", "10.244.0.5")], [policy(ingress=[{"from": [nobody]}])], "10.244.0.5", "Ingress") == [
        "-j DROP"
    ]


def test_policies_add_up() -> None:
    one = policy("one", ingress=[{"ports": [{"port": 80}]}])
    two = policy("two", ingress=[{"ports": [{"port": 90, "endPort": 99, "protocol": "UDP"}]}])
    assert chain([pod("a", "10.244.0.5")], [one, two], "10.244.0.5", "Ingress") == [
        "-s 0.0.0.0/0 -p tcp --dport 80 -j RETURN",
        "-s 0.0.0.0/0 -p udp --dport 90:99 -j RETURN",
        "-j DROP",
    ]


def test_a_named_port_is_the_serving_pods_own() -> None:
    pods = [pod("a", "10.244.0.5"), pod("b", "10.244.0.6", role="server")]
    pods[1]["spec"]["containers"][0]["ports"][0]["containerPort"] = 9090
    named = [{"port": "http"}, {"port": "dns"}]  # the second is UDP there, and not meant
    incoming = chain(pods, [policy(ingress=[{"ports": named}])], "10.244.0.5", "Ingress")
    assert incoming == ["-s 0.0.0.0/0 -p tcp --dport 8080 -j RETURN", "-j DROP"]
    to = [{"podSelector": {"matchLabels": {"role": "server"}}}]
    outgoing = chain(pods, [policy(egress=[{"to": to, "ports": named}])], "10.244.0.5", "Egress")
    assert outgoing == ["-d 10.244.0.6/32 -p tcp --dport 9090 -j RETURN", "-j DROP"]


def test_an_excepted_range_is_cut_out_and_nothing_else() -> None:
    nets = [ip_network(net) for net in block({"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.3.4/32"]})]
    inside = {ip: any(ip_address(ip) in net for net in nets) for ip in ("10.0.0.1", "10.2.3.5", "10.1.2.3", "10.2.3.4")}
    assert inside == {"10.0.0.1": True, "10.2.3.5": True, "10.1.2.3": False, "10.2.3.4": False}
    assert sum(net.num_addresses for net in nets) == 2**24 - 2**16 - 1
    assert block({"cidr": "fd00::/8"}) == []
    assert block({"cidr": "10.0.0.9/31"}) == ["10.0.0.8/31"]


def test_selectors_follow_the_four_operators() -> None:
    def holds(operator: str, *values: str) -> bool:
        return selects({"matchExpressions": [{"key": "a", "operator": operator, "values": list(values)}]}, {"a": "1"})

    assert holds("In", "1", "2") and not holds("In", "2")
    assert holds("NotIn", "2") and not holds("NotIn", "1")
    assert holds("Exists") and not holds("DoesNotExist")
    assert selects({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, {"a": "1"})
    assert selects({}, {}) and not selects({"matchLabels": {"a": "2"}}, {"a": "1"})
