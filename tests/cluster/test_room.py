"""How many runs have room on a cluster, without a cluster."""

from decimal import Decimal
from typing import Any

import pytest

from cuda_agent.cluster import room
from cuda_agent.cluster.room import Pod, Room
from tests.deploy.charts import ALONE, needs_helm, objects, of_kind


def node(name: str, taints: Any = (), labels: Any = None, **amounts: str) -> dict[str, Any]:
    about = {"name": name, "labels": labels or {}}
    return {"metadata": about, "spec": {"taints": list(taints)}, "status": {"allocatable": {"pods": "110"} | amounts}}


def used(where: str, **requests: str) -> dict[str, Any]:
    return {"spec": {"nodeName": where, "containers": [{"resources": {"requests": requests}}]}}


def pod(cpu: str, memory: int = 1, gpus: int = 0, **more: Any) -> Pod:
    return Pod({"cpu": Decimal(cpu), "memory": Decimal(memory << 30), "nvidia.com/gpu": Decimal(gpus)}, **more)


def test_pods_go_where_all_of_their_requests_fit() -> None:
    nodes = [node("a", cpu="4", memory="8Gi"), node("b", cpu="2", memory="8Gi")]
    assert room.runs_that_fit(nodes, [], [pod("1"), pod("1")]) == 3
    assert room.runs_that_fit(nodes, [used("a", cpu="2500m")], [pod("1"), pod("1")]) == 1
    assert room.runs_that_fit(nodes, [], [pod("3"), pod("1")]) == 1, "six CPUs are free, three of them on one node once"
    assert room.runs_that_fit(nodes, [], [pod("1", memory=9)]) == 0
    assert room.runs_that_fit(nodes, [], [pod("0", memory=0)]) == room.MOST
    assert room.runs_that_fit([node("a", cpu="4", memory="8Gi", pods="3")], [], [pod("1"), pod("1")]) == 1


def test_labels_taints_and_closed_nodes_keep_pods_away() -> None:
    tainted = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    nodes = [node("a", tainted, {"gpu": "h200"}, **{"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"})]
    tolerant = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
    assert room.runs_that_fit(nodes, [], [pod("1", gpus=1)]) == 0
    assert room.runs_that_fit(nodes, [], [pod("1", gpus=1, **tolerant)]) == 2
    assert room.runs_that_fit(nodes, [], [pod("1", gpus=1, node_selector={"gpu": "h100"}, **tolerant)]) == 0
    equal = {"key": "nvidia.com/gpu", "value": "present"}
    assert room.runs_that_fit(nodes, [], [pod("1", gpus=1, tolerations=[equal])]) == 2
    assert room.runs_that_fit(nodes, [], [pod("1", gpus=1, tolerations=[equal | {"effect": "NoExecute"}])]) == 0
    nodes[0]["spec"]["unschedulable"] = True
    assert room.runs_that_fit(nodes, [], [pod("1", gpus=1, **tolerant)]) == 0


@needs_helm
@pytest.mark.parametrize(("profile", "cpus", "gpus", "servers"), [("cpu", "3.01", 0, 5), ("gpu", "26.01", 3, 6)])
def test_a_run_has_its_servers_and_the_largest_stage(profile: str, cpus: str, gpus: int, servers: int) -> None:
    """Sandbox servers, and two replicas of the engine in the profile ``cpu``."""
    (template,) = of_kind(objects(ALONE), "WorkflowTemplate", f"-{profile}-")
    pods = room.pods_of_run(template)
    summed = room.total(pods)
    assert len(pods) == servers + 1
    assert summed["cpu"] == Decimal(cpus) and summed.get("nvidia.com/gpu", 0) == gpus
    assert summed["ephemeral-storage"] < 60 * 2**30


@needs_helm
@pytest.mark.parametrize(("shared", "claimed"), [("", 3), ("one", 2)])
def test_claims_count_as_gpus_of_a_run_and_their_room_is_unknown(shared: str, claimed: int) -> None:
    values = ALONE | {"gpu": {"allocation": "dra", "sharedClaim": shared}}
    (template,) = of_kind(objects(values), "WorkflowTemplate", "-gpu-")
    summed = room.total(room.pods_of_run(template))
    assert summed[room.CLAIMED] == claimed and "nvidia.com/gpu" not in summed
    place: Any = None  # no request is sent
    assert room._fit(place, room.pods_of_run(template)) is None


@needs_helm
def test_the_profile_says_how_many_runs_work_at_once() -> None:
    values = ALONE | {"profiles": {"cpu": {"runs": 2}, "gpu": {"runs": 0}}}
    items = objects(values)
    (turns,) = of_kind(items, "ConfigMap", "-runs")
    assert turns["data"] == {"cpu": "2"}
    (cpu,), (gpu,) = (of_kind(items, "WorkflowTemplate", f"-{name}-") for name in ("cpu", "gpu"))
    wanted = {"configMapKeyRef": {"name": turns["metadata"]["name"], "key": "cpu"}}
    assert cpu["spec"]["synchronization"]["semaphores"] == [wanted]
    assert "semaphores" not in gpu["spec"]["synchronization"]
    assert cpu["metadata"]["annotations"]["cuda-agent.io/runs"] == "2"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Room({"cpu": Decimal("2.010"), "memory": Decimal(7 << 30)}, 1, 3), "2.01 CPUs, 7.0 GiB of memory"),
        (Room({}, 1, 3), "; 3 fit on the nodes; at most 1 at once"),
        (Room({}, 0, None), "of disk; no limit of runs at once"),
        (Room({}, 2, room.MOST), "; 100 or more fit on the nodes; at most 2 at once"),
        (Room({"nvidia.com/gpu": Decimal(3)}, 1, 0), ", 3 nvidia.com/gpu; 0 fit on the nodes"),
    ],
)
def test_the_room_in_words(found: Room, words: str) -> None:
    assert words in room.sentence(found)
