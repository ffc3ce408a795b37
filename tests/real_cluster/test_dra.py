"""GPUs by dynamic resource allocation.  The driver has nothing behind its devices: two GPUs of 80 GiB, two of 40.

Evaluators get a claim each, by memory.  Stages share another GPU.  A claim is free again when its pod was killed."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubectl import HERE, Cluster, script, setting, wait_for
from release import Release, merged, release, values
from runs import pod_of, submit

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]  # builds its driver
RUN = "claims"
CLASS = "gpu.nvidia.com"
BY_MEMORY = f"device.capacity['{CLASS}'].memory.compareTo(quantity('80Gi')) >= 0"
SMALLER = f"device.attributes['{CLASS}'].cudaComputeCapability.isLessThan(semver('9.0.0'))"


def request(name: str, expression: str) -> dict[str, Any]:
    exactly = {"deviceClassName": CLASS, "selectors": [{"cel": {"expression": expression}}]}
    return {"devices": {"requests": [{"name": name, "exactly": exactly}]}}


def given() -> dict[str, Any]:
    small = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "4Gi"}}
    pools: dict[str, Any] = {role: {"replicas": 1, "resources": small} for role in ("workspace", "build", "evaluate")}
    with_gpu = {"resources": merged(small, {"limits": {"nvidia.com/gpu": 1}})}
    pools["evaluate"]["replicas"] = 2
    profile = {"runs": 0, "defaults": {"resources": small}, "stages": {"synthesis": with_gpu}, "pools": pools}
    shared = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "shared"},
        "spec": request("gpus", SMALLER),
    }
    gpu = {"allocation": "dra", "selectors": [BY_MEMORY], "sharedClaim": "shared"}
    return merged(values(), {"gpu": gpu, "profiles": {"gpu": profile}, "extraObjects": [shared]})


@pytest.fixture
def driver(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Runs the driver on the node, and yields the file to which it prints."""
    script("build", "fake-dra", number=cluster.number)
    program = subprocess.run(
        ["bash", "-euc", f'. "{HERE}/env.sh"; at fake-dra'], text=True, capture_output=True, check=True
    )
    kubeconfig = cluster.state / "kubeconfig"
    line = [str(HERE / "enter.sh"), f"{program.stdout.strip()}/fake-dra", str(kubeconfig), setting("NODE")]
    environment = {**os.environ, "CLUSTER": str(cluster.number)}
    chosen = [{"cel": {"expression": f"device.driver == '{CLASS}'"}}]
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
    cluster.create(kind | {"metadata": {"name": CLASS}, "spec": {"selectors": chosen}})
    log = tmp_path / "driver.txt"
    try:
        with (
            log.open("w") as file,
            subprocess.Popen(
                [*line, "/var/lib/kubelet"], stdout=file, stderr=subprocess.STDOUT, env=environment
            ) as running,
        ):
            try:
                wait_for("its devices", 60, lambda: cluster.get("resourceslices")["items"] or running.poll())
                assert running.poll() is None, log.read_text()
                yield log
            finally:
                subprocess.run([line[0], "pkill", "-x", "fake-dra"], env=environment)
    finally:
        cluster.run("delete", "deviceclass", CLASS)
        cluster.run("delete", "resourceslices", "--all")


def devices(space: Cluster) -> dict[str, list[str]]:
    """Returns claim -> its devices, of all claims that have some."""
    found = {}
    for claim in space.get("resourceclaims")["items"]:
        results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        if results:
            found[claim["metadata"]["name"]] = [result["device"] for result in results]
    return found


def of_evaluators(space: Cluster) -> dict[str, list[str]]:
    return {name: given for name, given in devices(space).items() if name.startswith(f"{RUN}-evaluate-")}


def test_evaluators_have_a_gpu_each_by_memory_and_stages_share_another(cluster: Cluster, driver: Path) -> None:
    with release(cluster, f"dra-{os.getpid()}", given()) as installed:
        space = installed.cluster
        submit(installed, RUN, "--profile", "gpu", "seed=31", "synthesis.train=40", "synthesis.max_candidates=200")
        stage = pod_of(space, RUN, "synthesis")
        assert sorted(of_evaluators(space).values()) == [["gpu-0"], ["gpu-1"]]
        (shared,) = devices(space)["shared"]
        assert shared in ("gpu-2", "gpu-3")
        reserved = space.get("resourceclaim", "shared")["status"]["reservedFor"]
        assert [one["name"] for one in reserved] == [stage]
        replaced(space, driver)
        ended(installed, driver)


def replaced(space: Cluster, driver: Path) -> None:
    """Kills an evaluator at once.  The pod that follows has a claim, and the driver has the old one back."""
    before = of_evaluators(space)
    old = space.get("pod", f"{RUN}-evaluate-0")["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    space.run("delete", "pod", f"{RUN}-evaluate-0", "--force", "--grace-period=0")
    wait_for("the claim is given back", 180, lambda: f"unprepared {space.namespace}/{old}" in driver.read_text())
    after = wait_for(
        "another claim", 180, lambda: (now := of_evaluators(space)).keys() != before.keys() and len(now) == 2
    )
    assert after and old not in of_evaluators(space)


def ended(installed: Release, driver: Path) -> None:
    """Stops the run.  No claim of an evaluator is left, and the shared one is reserved for no pod."""
    space = installed.cluster
    assert installed.command("cancel", RUN, "--now").returncode == 0
    wait_for("no evaluator has a GPU", 180, lambda: not of_evaluators(space))
    wait_for(
        "no pod has the shared GPU", 180, lambda: not space.get("resourceclaim", "shared")["status"].get("reservedFor")
    )
    wait_for("it was given back", 180, lambda: f"unprepared {space.namespace}/shared" in driver.read_text())
