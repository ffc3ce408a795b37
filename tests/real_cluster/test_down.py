"""Ending a cluster leaves nothing on the machine: tried with a second one, beside whatever else runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from kubectl import NUMBER, Cluster, pod, script, setting

pytestmark = pytest.mark.cluster

SECOND = (NUMBER + 50) % 100
SYSCTLS = ("net/ipv4/ip_forward", "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
FOLDERS = ("/run", "/var/lib", "/var/log", "/etc/cni", "/opt", "/var/tmp", "/usr/libexec", "/run/netns", "/var/lib/cni")


def output(*command: str) -> set[str]:
    return set(subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines())


def state_of_the_machine() -> dict[str, set[str]]:
    """What a cluster could leave: mounts, links, addresses, routes, filter rules, settings, control groups and files.
    Other clusters may come and go meanwhile, and images may be built in the cache."""
    mounted = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    groups = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if " cgroup" in line]
    found = {
        "mounts": {path for path in mounted if not path.startswith(setting("CACHE"))},
        "links": set(os.listdir("/sys/class/net")),
        "addresses": output("ip", "-o", "addr"),
        "routes": output("ip", "route"),
        "filters": {line for line in output("iptables-save") if not line.startswith("#")},
        "settings": {f"{name}={Path('/proc/sys', name).read_text()}" for name in SYSCTLS},
        "groups": {
            f"{at}/{name}" for at in groups for name in os.listdir(at) if "agent-cluster" in name or "kube" in name
        },
        "files": {f"{at}/{name}" for at in FOLDERS if os.path.isdir(at) for name in os.listdir(at)},
    }
    return {kind: {thing for thing in things if not of_another_cluster(thing)} for kind, things in found.items()}


def of_another_cluster(thing: str) -> bool:
    number = re.search(r"(?:ca-cluster|cuda-agent-cluster-|10\.250\.)(\d+)", thing)
    return number is not None and int(number[1]) != SECOND


def namespaces(pid: str) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt", "pid")}
    except OSError:  # ended, or a kernel thread
        return set()


def inhabitants(those: set[str]) -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and namespaces(pid) & those]


def test_a_cluster_that_is_ended_leaves_nothing_behind() -> None:
    before = state_of_the_machine()
    script("up", number=SECOND)
    try:
        second = Cluster(SECOND)
        second.create(pod("left", "trap '' TERM; sleep 600 & sleep 600"))
        second.ready("left")
        inner = subprocess.run(
            ["bash", "-c", f'. "{Path(__file__).parent}/env.sh"; inner'],
            env={**os.environ, "CLUSTER": str(SECOND)},
            text=True,
            capture_output=True,
            check=True,
        ).stdout.strip()
        own = namespaces(inner) - namespaces("self")
        assert len(own) == 3
        assert len(inhabitants(own)) > 15  # the components and a pod's processes
        during = state_of_the_machine()
        assert during["settings"] == before["settings"]
        for kind in ("links", "addresses", "routes", "groups", "files"):
            assert during[kind] - before[kind], f"the comparison sees no {kind}"
    finally:
        script("down", number=SECOND)
    assert inhabitants(own) == []
    after = state_of_the_machine()
    assert {kind: after[kind] - before[kind] for kind in after} == {kind: set() for kind in after}
    assert after["settings"] == before["settings"]


def test_ending_what_does_not_run_is_no_error() -> None:
    script("down", number=SECOND)
    assert not Path(setting("STATE", SECOND)).exists()
