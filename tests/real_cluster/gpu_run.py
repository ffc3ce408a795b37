"""Installs the chart on the cluster that ``gpu_node.sh`` started, runs a DAG with real GPU pods, and tries its walls.

gpu_run.py install     the chart, with a profile whose evaluators ask for a GPU
gpu_run.py run         a run, its report and its times; the walls from inside the pod with the GPU; a second run of the
                       same configuration whose evaluator is killed, and which gives the same bytes
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from canaries import open_bucket
from kubectl import Cluster, wait_for
from probing import cluster_places, reached, service_of, without
from release import CHART, NAME, Release, helm, merged, values
from runs import succeeded

from cuda_agent.cluster.submit import views
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.local import fetch_report
from cuda_agent.pipeline.manifest import read_manifest
from cuda_agent.storage import Store

PROFILE = "node"
AGAIN = "again"  # folder of the store in which the second run finds nothing of the first
CONFIG = (
    "experiment=smoke",
    f"sandbox.device={os.environ['DEVICE']}",
)  # the clock of `smoke` is a model: the same bytes
GPU = {"nvidia.com/gpu": 1}

_LOOK = """
import glob, json, os, stat

def tries(action):
    try:
        action()
        return "done"
    except OSError as error:
        return type(error).__name__

devices = [path for path in glob.glob("/dev/*") if stat.S_ISCHR(os.stat(path).st_mode)]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "devices": sorted(devices),
    "opened": {path: tries(lambda: os.close(os.open(path, os.O_RDWR))) for path in devices},
    "user": os.getuid(),
    "status": {name: status[name].strip() for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")},
    "token": os.path.exists("/var/run/secrets/kubernetes.io"),
    "written": {path: tries(lambda: open(path + "/probe", "w").close()) for path in ("/", "/usr", "/opt", "/app")},
    "seen": [path for path in STATE if os.path.exists(path)],
    "processes": sorted({open(path).read().split("\\0")[0] for path in glob.glob("/proc/[0-9]*/cmdline")}),
    "keys": sorted(name for name in os.environ if name.startswith("AWS_")),
}))
"""


def _mounted(space: Cluster) -> dict[str, Any]:
    """Returns volumes and mounts of the machine's folders, of which ``gpu_node.sh`` made claims."""
    trees = (space.state / "trees").read_text().split()
    claims = {tree: ("tree" + tree.replace("/", "-")).replace(".", "") for tree in trees}
    volumes = [
        {"name": claim, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} for claim in claims.values()
    ]
    mounts = [{"name": claim, "mountPath": tree, "readOnly": True} for tree, claim in claims.items()]
    return {"extraVolumes": volumes, "extraVolumeMounts": mounts}


def _values(space: Cluster) -> dict[str, Any]:
    """Returns the chart's values: the tests' own, without MLflow, with the machine's folders and the GPU."""
    given = values()
    small = given["profiles"]["cpu"]
    with_gpu = merged(small["pools"]["evaluate"], {"resources": {"limits": GPU, "requests": GPU}})
    pools = small["pools"] | {"evaluate": with_gpu}
    mounted = _mounted(space)
    return given | {
        "mlflow": {"enabled": False},
        "profiles": {PROFILE: small | {"pools": pools}},
        "sandbox": mounted,
        **mounted,
    }


def _say(what: str) -> None:
    print(what, flush=True)


def _timed(what: str, action: Callable[[], Any]) -> Any:
    begun = time.monotonic()
    result = action()
    _say(f"{time.monotonic() - begun:6.1f} s  {what}")
    return result


def install(space: Cluster) -> None:
    """Installs the chart, or upgrades it."""
    words = ["upgrade", "--install", NAME, str(CHART), "--wait", "--timeout=8m"]
    done = _timed("the chart is installed", lambda: helm(space, *words, given=_values(space)))
    assert done.returncode == 0, f"{done.stderr}\n{space.try_run('get', 'pods,events').stdout}"


def _submit(installed: Release, run: str) -> None:
    done = installed.command("submit", *CONFIG, f"run.name={run}", "--profile", PROFILE)
    assert done.returncode == 0, done.stderr


def _outputs(store: Store, run: str) -> dict[str, dict[str, str]]:
    found = {stage.name: read_manifest(store, run, stage.name) for stage in STAGES}
    return {name: manifest.outputs for name, manifest in found.items() if manifest}


def _of_store(installed: Release, prefix: str, run: str) -> dict[str, dict[str, str]]:
    with open_bucket(installed, prefix) as store:
        return _outputs(store, run)


def _ready(space: Cluster, run: str) -> str:
    """Waits for the run's evaluator and returns its pod."""
    name = f"{run}-evaluate-0"
    wait_for("the evaluator", 600, lambda: _is_ready(space, name))
    return name


def _is_ready(space: Cluster, name: str) -> bool:
    found = space.try_run("get", "pod", name, "-o", "jsonpath={.status.containerStatuses[0].ready}")
    return found.stdout == "true"


def _look(space: Cluster, pod: str) -> dict[str, Any]:
    code = _LOOK.replace("STATE", repr([str(space.state), "/host", "/var/lib/kubelet/pods"]))
    seen: dict[str, Any] = json.loads(space.run("exec", pod, "-c", "sandbox", "--", "python3", "-c", code))
    return seen


def walls(space: Cluster, run: str) -> None:
    """Tries the walls from inside the pod with the GPU, while its run lives.  Raises if one of them is missing."""
    files = set((space.state / "gpu-files").read_text().split())
    seen, other = _look(space, _ready(space, run)), _look(space, f"{run}-workspace-0")
    assert set(seen["devices"]) - set(other["devices"]) == files, (seen["devices"], other["devices"])
    assert {seen["opened"][file] for file in files} == {"done"}, seen["opened"]
    _say(f"          device files of the pod with the GPU, and of no other: {' '.join(sorted(files))}")
    if os.environ["DEVICE"] == "cuda":
        code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
        names = [
            space.run("exec", f"{run}-{role}-0", "-c", "sandbox", "--", "python3", "-c", code).strip()
            for role in ("evaluate", "workspace")
        ]
        assert names[0] != "no GPU" and names[1] == "no GPU", names
        _say(f"          PyTorch finds {names[0]} there, and no GPU in another pod of the run")
    for inside in (seen, other):
        status = inside["status"]
        assert inside["user"] == 65532 and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2", inside
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, inside
        assert not inside["token"] and not inside["keys"] and not inside["seen"], inside
        assert "done" not in inside["written"].values(), inside["written"]
        assert not [line for line in inside["processes"] if "kube" in line or "minio" in line], inside["processes"]
    _say(
        "          no root, no capability, seccomp, no token, no keys, nothing to write, no foreign files or processes"
    )
    places = cluster_places(space) | {
        "MinIO": service_of(space, "cuda-agent-minio", 9000),
        "outside": ("tcp", "1.1.1.1", 443),
    }
    server = f"{run}-evaluate-0"
    assert reached(space, server, places, "sandbox") == set()
    with without(space, "networkpolicy"):  # the same attempts succeed without the policies; outside there is no network
        wait_for("it reaches all", 60, lambda: reached(space, server, places, "sandbox") == set(places) - {"outside"})
    wait_for("it reaches nothing", 60, lambda: not reached(space, server, places, "sandbox"))
    _say(f"          reaches none of {', '.join(places)}; without the policies, all but the outside")
    wanted = {"limits": GPU}
    container = {
        "name": "x",
        "image": "localhost/busybox:1",
        "resources": wanted,
        "securityContext": {"privileged": True},
    }
    asks = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asks"}, "spec": {"containers": [container]}}
    refused = space.try_run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(asks))
    assert refused.returncode and "violates PodSecurity" in refused.stderr, refused
    _say("          a privileged pod with a GPU is refused")


def _times(space: Cluster, run: str) -> None:
    found = space.get("workflow", run)
    for view in views(found):
        _say(f"{view.seconds:6.1f} s    {view.name}: {view.state}")
    ended, began = (datetime.fromisoformat(found["status"][name]) for name in ("finishedAt", "startedAt"))
    _say(f"{(ended - began).total_seconds():6.1f} s  from the workflow's start to its end")


def run(space: Cluster) -> None:
    """Makes both runs."""
    installed, name = Release(space), f"gpu-{os.getpid()}"
    begun = time.monotonic()
    _submit(installed, name)
    walls(space, name)
    succeeded(space, name)
    _say(f"{time.monotonic() - begun:6.1f} s  {name}: from submit to its end, the walls tried meanwhile")
    _times(space, name)
    report(installed, name)
    disturbed(installed, name)


def report(installed: Release, name: str) -> None:
    """Fetches the report of the run from the store.  Raises if it holds no kernel."""
    with open_bucket(installed) as store:
        manifest = read_manifest(store, name, "report")
        assert manifest is not None
        folder = fetch_report(store, installed.cluster.state, name, manifest)
    kernels = json.loads((folder / "report.json").read_text())["kernels"]
    assert kernels and (folder / "index.html").stat().st_size
    _say(f"          its report shows {len(kernels)} kernels: {folder / 'index.html'}")


def disturbed(installed: Release, name: str) -> None:
    """Makes the run ``name`` again, where no result of it is found, and kills its evaluator.  Compares the outputs."""
    space, killed = installed.cluster, f"{name}-killed"
    again = merged(_values(space), {"store": {"prefix": AGAIN}})
    _timed("the chart has another folder of the store", lambda: installed.upgrade(again))
    begun = time.monotonic()
    _submit(installed, killed)
    pod = _ready(space, killed)
    wait_for("evaluations", 600, lambda: _evaluates(space, killed))
    before = space.get("pod", pod)["metadata"]["uid"]
    space.run("delete", "pod", pod, "--grace-period=0", "--force")
    _say(f"{time.monotonic() - begun:6.1f} s  {killed}: its evaluator is killed in the middle of `warmup`")
    wait_for("another evaluator", 300, lambda: _is_ready(space, pod) and _uid(space, pod) != before)
    _say(f"{time.monotonic() - begun:6.1f} s  another evaluator is ready")
    succeeded(space, killed)
    _say(f"{time.monotonic() - begun:6.1f} s  from submit to its end")
    _times(space, killed)
    calm, other = _of_store(installed, "", name), _of_store(installed, AGAIN, killed)
    differ = [stage.name for stage in STAGES if calm.get(stage.name) != other.get(stage.name)]
    assert len(calm) == len(STAGES) and not differ, differ
    _say(f"          the same digests in all {len(calm)} stages of both runs")
    install(space)  # the usual folder of the store again


def _uid(space: Cluster, pod: str) -> str:
    return space.try_run("get", "pod", pod, "-o", "jsonpath={.metadata.uid}").stdout


def _evaluates(space: Cluster, run: str) -> bool:
    """Says whether a stage that asks for verdicts has begun."""
    return any(view.name == "warmup" and view.state == "running" for view in views(space.get("workflow", run)))


if __name__ == "__main__":
    place = Cluster(namespace=os.environ["NAMESPACE"])
    {"install": install, "run": run}[sys.argv[1]](place)
