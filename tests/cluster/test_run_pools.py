"""A run's servers while they start: what ``prepare`` says of them, and how it ends if they cannot."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.cluster import pools, run_pools
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.config import Config
from cuda_agent.errors import BadConfiguration
from tests.cluster.fake_api import FakeApi

BACK_OFF = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "sandbox:1"'}}
ENDED = {"terminated": {"exitCode": 1, "message": "no walls"}}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """An API server with the Workflow ``w``, on whose clock only pauses take time, five times as long."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + 5 * seconds))
    with FakeApi() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        api.add("Workflow", "w", spec={})
        api.add("StatefulSet", "w-workspace", {pools.ROLE_LABEL: "workspace"}, status={"readyReplicas": 1})
        yield api


def pod(api: FakeApi, role: str, number: int, **status: Any) -> None:
    labels = {pools.POOL_LABEL: "w", pools.ROLE_LABEL: role}
    api.add("Pod", f"w-{role}-{number}", labels, status={"conditions": [], **status})


def container(state: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"name": "sandbox", "ready": False, "restartCount": 0, "state": state} | more]


def make() -> list[str]:
    return run_pools.make_pools(Cluster.of_kubeconfig(), pools.pool_objects(), "w", Config())


def test_servers_that_cannot_start_end_prepare_after_two_minutes(api, capsys):
    for number in range(2):
        pod(api, "build", number, containerStatuses=container(BACK_OFF))
    began = time.monotonic()
    with pytest.raises(BadConfiguration, match="No server of w-build can start: ImagePullBackOff: Back-off") as error:
        make()
    assert error.value.exit_code == 78 and 120 <= time.monotonic() - began <= 140
    lines = capsys.readouterr().err.splitlines()
    assert 12 <= len(lines) <= 14 and set(lines) == {f"waiting for w-build: {BACK_OFF['waiting']['reason']}: "
                                                     f"{BACK_OFF['waiting']['message']}"}  # fmt: skip


@pytest.mark.parametrize(
    "statuses",
    [
        container({"running": {}}, restartCount=3, lastState=ENDED),
        container({"waiting": {"reason": "CrashLoopBackOff"}}, restartCount=3, lastState=ENDED),
    ],
)
def test_a_server_that_ends_again_and_again_cannot_start(api, statuses):
    pod(api, "build", 0, phase="Running", containerStatuses=statuses)
    with pytest.raises(BadConfiguration, match="sandbox ended with 1: no walls"):
        make()


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
        {"containerStatuses": container({"waiting": {"reason": "ContainerCreating"}})},
        {"containerStatuses": container({"running": {}}, restartCount=1, lastState=ENDED)},
    ],
)
def test_servers_that_may_still_start_are_waited_for(api, status):
    """Another run may end, a node may come: the step is tried again (75)."""
    pod(api, "build", 0, **status)
    with pytest.raises(ClusterError, match="No server of w-build became ready in 900 s") as error:
        make()
    assert error.value.exit_code == 75


def test_one_server_that_may_start_is_enough(api):
    pod(api, "build", 0, containerStatuses=container(BACK_OFF))
    pod(api, "build", 1, containerStatuses=container({"running": {}}))
    with pytest.raises(ClusterError, match="became ready in 900 s"):
        make()


def test_servers_in_a_queue_are_not_waited_for(api, capsys):
    """They may wait for days, longer than ``prepare`` may run; the stages wait behind them in the same queue."""
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked by gates"}
    for role in ("build", "evaluate"):
        pod(api, role, 0, conditions=[gated])
    began = time.monotonic()
    assert len(make()) == 3 and time.monotonic() - began < 60
    assert "waiting for w-build: SchedulingGated: blocked by gates" in capsys.readouterr().err
    assert "w-build" in {name for kind, name in api.objects if kind == "statefulsets"}


def test_one_server_that_left_the_queue_is_waited_for(api):
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    pod(api, "build", 0, conditions=[gated])
    pod(api, "build", 1, containerStatuses=container({"waiting": {"reason": "ContainerCreating"}}))
    with pytest.raises(ClusterError, match="became ready in 900 s"):
        make()


def test_a_quota_is_told_by_events(api):
    about = {"involvedObject": {"name": "w-build"}, "type": "Warning"}
    api.add("Event", "e", **about, message="pods is forbidden: exceeded quota", lastTimestamp="2026-01-01T00:00:00Z")
    with pytest.raises(ClusterError, match="exceeded quota"):
        make()


def test_an_image_that_arrives_in_time_is_no_failure(api, monkeypatch):
    pod(api, "build", 0, containerStatuses=container(BACK_OFF))

    def arrives(method: str, path: str) -> int:
        if time.monotonic() > 1100:
            for role in ("build", "evaluate"):
                api.objects["statefulsets", f"w-{role}"]["status"] = {"readyReplicas": 1}
        return 0

    api.refuse = arrives
    assert len(make()) == 3
