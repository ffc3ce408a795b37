"""Measures a cluster of 1,000 nodes with up to 200 runs at once, on the test cluster (``make cluster-up``, as root).

    python benchmarks/fake_nodes.py --runs 50,100,200 --json fake_nodes.json

API server, etcd, scheduler and Argo's controller are real.  The nodes and what runs on them are KWOK's: a pod works for
some seconds and ends well.  This program takes the place of Argo's executor, which reports a pod's outputs.  The runs
are Workflows of the chart, submitted together by ``cuda-agent sweep``; the store, MLflow and sandbox servers are left
out.  While all runs are under way, one more is submitted, and ``runs`` and ``watch`` are timed as new processes.

A row is linear in the number of runs if its figure for each run stays the same.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "real_cluster")]

from kubectl import HERE, Cluster, script, setting, wait_for  # noqa: E402
from release import CHART, NAME, helm  # noqa: E402

from cuda_agent.cluster.api import Cluster as Api  # noqa: E402
from cuda_agent.cluster.api import new_object  # noqa: E402
from cuda_agent.cluster.submit import ENDED, RUN_LABEL, phase  # noqa: E402
from cuda_agent.pipeline.graph import ROWS, STAGES  # noqa: E402

SPACE = "fake-nodes"
ROOM = {"cpu": "32", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}  # of a node
PROGRAMS = ("workflow-controller", "kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager", "kwok")
LEASE_SECONDS = 160  # renewed four times in this time, which the node controller accepts; a kubelet's is 40
_RUNNING = """
- {key: .metadata.deletionTimestamp, operator: DoesNotExist}
- {key: .status.phase, operator: In, values: [Running]}
"""
_ENDED = """
{{ $now := Now }}
containerStatuses:
{{ range .spec.containers }}
- {name: {{ .name | Quote }}, image: {{ .image | Quote }}, ready: false, started: false, restartCount: 0,
   state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}}}}
{{ end }}
phase: Succeeded
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--runs", default="50,100,200")
    parser.add_argument("--seconds", type=int, default=10, help="for which a pod works")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    cluster = Cluster()
    with fake_nodes(cluster, options.nodes, options.seconds), chart(cluster) as space:
        for count in map(int, options.runs.split(",")):
            found.append(measure(space, count))
            print(json.dumps(found[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    print(table(found))


@contextlib.contextmanager
def fake_nodes(cluster: Cluster, count: int, seconds: int) -> Iterator[None]:
    """Adds nodes whose pods end after ``seconds``, and keeps pods from the real node."""
    script("build", "kwok", number=cluster.number)
    program = subprocess.run(["bash", "-euc", f'. "{HERE}/env.sh"; at kwok'], text=True, capture_output=True)
    folder = Path(program.stdout.strip())
    places = ["node/fast/node-initialize", "node/heartbeat-with-lease/node-heartbeat-with-lease"]
    places += ["pod/fast/pod-ready", "pod/fast/pod-delete"]
    stages = [yaml.safe_load((folder / "kustomize" / "stage" / f"{one}.yaml").read_text()) for one in places]
    ended = {
        "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
        "selector": {"matchExpressions": yaml.safe_load(_RUNNING)},
        "delay": {"durationMilliseconds": 1000 * seconds},
        "next": {"statusTemplate": _ENDED},
    }
    stages.append({"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": "end"}, "spec": ended})
    file = cluster.state / "kwok.yaml"
    file.write_text(yaml.safe_dump_all(stages))
    node = setting("NODE", cluster.number)
    line = [str(HERE / "enter.sh"), str(folder / "kwok"), f"--kubeconfig={cluster.state / 'kubeconfig'}"]
    line += [f"--config={file}", "--manage-nodes-with-label-selector=type=kwok", "--node-ip=127.0.0.1"]
    line += [f"--node-lease-duration-seconds={LEASE_SECONDS}"]
    environment = {**os.environ, "CLUSTER": str(cluster.number)}
    with open(cluster.state / "log" / "kwok.log", "w") as log:
        running = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
    try:
        labels = {"type": "kwok", "kubernetes.io/os": "linux"}
        status = {"allocatable": ROOM, "capacity": ROOM}
        cluster.create(*(new_object("Node", f"fake-{number}", labels, status=status) for number in range(count)))
        columns = ("-l", "type=kwok", "--no-headers")  # `kubectl wait` asks for each of them
        wait_for("the nodes", 300, lambda: cluster.run("get", "nodes", *columns).count(" Ready ") == count)
        cluster.run("cordon", node)
        yield
    finally:
        cluster.run("uncordon", node)
        cluster.run("delete", "nodes", "-l", "type=kwok", "--wait=false")
        subprocess.run([str(HERE / "enter.sh"), "pkill", "-x", "kwok"], env=environment)
        running.wait()


@contextlib.contextmanager
def chart(cluster: Cluster) -> Iterator[Cluster]:
    """Installs the chart without a store and MLflow, which only pods use."""
    space = Cluster(cluster.number, SPACE)
    given = {
        "images": {"registry": "localhost"},
        "store": {"existingSecret": "keys", "endpoint": "http://store.test"},
        "networkPolicy": {"apiServerCidrs": ["192.0.2.1/32"], "storeCidrs": ["192.0.2.0/24"]},
        "profiles": {"cpu": {"runs": 0}},
    }
    cluster.run("create", "namespace", SPACE)
    try:
        space.run("create", "secret", "generic", "keys", "--from-literal=accesskey=a", "--from-literal=secretkey=b")
        done = helm(space, "install", NAME, str(CHART), given=given)
        assert done.returncode == 0, done.stderr
        yield space
    finally:
        cluster.run("delete", "namespace", SPACE, "--wait=false")


def measure(space: Cluster, count: int) -> dict[str, Any]:
    """Submits ``count`` runs together, waits for their end, and returns what that took."""
    kubeconfig = str(space.state / "kubeconfig")
    os.environ["KUBECONFIG"] = kubeconfig
    api = Api.of_kubeconfig(None, SPACE)
    found: dict[str, Any] = {"runs": count}
    programs = processes(space)
    peak, before = dict.fromkeys(PROGRAMS, 0), usage(programs)
    with helpers(programs, peak):
        began = time.monotonic()
        found["sweep, s"] = timed(f"sweep experiment=smoke run.name=of{count} seed=range({count})")
        under_way = [name for name, row in api.table("Workflow", RUN_LABEL).items() if row["Status"] not in ENDED]
        found["under way together"] = len(under_way)
        found["submit, s"] = timed(f"submit experiment=smoke run.name=one-of{count} seed={count}")
        found["runs, s"] = timed("runs --on . --json")
        found["watch, s"] = timed(f"watch {under_way[0]} --json", lines=1)
        while not all_ended(api):
            time.sleep(2.0)
        found["all runs, s"] = time.monotonic() - began
    workflow = api.get("Workflow", under_way[0])
    assert phase(workflow) == "Succeeded", workflow["status"].get("message")
    after = usage(programs)
    found["a Workflow, KB"] = len(json.dumps(workflow, separators=(",", ":"))) / 1000
    found["etcd's file, MB"] = sum(file.stat().st_size for file in (space.state / "etcd").rglob("db")) / 1e6
    found["CPU, s"] = {name: after[name][0] - before[name][0] for name in PROGRAMS}
    found["most memory, MB"] = {name: peak[name] / 1e6 for name in PROGRAMS}
    space.run("delete", "workflows", "--all", "--wait=true")
    return found


@contextlib.contextmanager
def helpers(programs: dict[str, Path], peak: dict[str, int]) -> Iterator[None]:
    """Reports outputs and watches the memory beside the ``with`` block."""
    stop = threading.Event()
    running = [
        threading.Thread(target=report_outputs, args=(Api.of_kubeconfig(None, SPACE), stop)),
        threading.Thread(target=watch_memory, args=(programs, peak, stop)),
    ]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()


def all_ended(api: Api) -> bool:
    return all(row["Status"] in ENDED for row in api.table("Workflow", RUN_LABEL).values())


def timed(command: str, lines: int = 0) -> float:
    """Returns the seconds of a command, or until it has printed so many lines."""
    words = [sys.executable, "-m", "cuda_agent.cli", *command.split(), "--namespace", SPACE]
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stdout and running.stderr
        if lines:
            for _ in range(lines):
                running.stdout.readline()
            seconds = time.monotonic() - began
            running.kill()
            return seconds
        _, said = running.communicate()
        assert running.returncode == 0, said[-2000:]
    return time.monotonic() - began


def report_outputs(api: Api, stop: threading.Event) -> None:
    """Does what Argo's executor does in each pod: makes an object with the pod's outputs."""
    path = f"/apis/argoproj.io/v1alpha1/namespaces/{SPACE}/workflowtaskresults"
    outputs = dict.fromkeys((row.name for row in ROWS), "absent") | dict.fromkeys((row.name for row in STAGES), "run")
    outputs |= {"servers": "", "engines": "", "finish": "run"}
    of_prepare = {"parameters": [{"name": name, "value": value} for name, value in outputs.items()]}
    told: set[str] = set()
    while not stop.wait(0.5):
        for about in api.metadata("Pod", "workflows.argoproj.io/completed=false"):
            if about["name"] in told:
                continue
            told.add(about["name"])
            node = about["annotations"]["workflows.argoproj.io/node-name"]
            labels = {
                "workflows.argoproj.io/workflow": about["labels"]["workflows.argoproj.io/workflow"],
                "workflows.argoproj.io/report-outputs-completed": "true",
            }
            result = {
                "apiVersion": "argoproj.io/v1alpha1",
                "kind": "WorkflowTaskResult",
                "metadata": {"name": about["annotations"]["workflows.argoproj.io/node-id"], "labels": labels},
                **({"outputs": of_prepare} if ".prepare" in node else {}),
            }
            api.ask(path, "report outputs", result)


def processes(cluster: Cluster) -> dict[str, Path]:
    """Returns the folder in /proc of each of the cluster's programs: they descend from its first process."""
    script = f'CLUSTER={cluster.number}; . "{HERE}/env.sh"; inner'
    first = subprocess.run(["bash", "-euc", script], text=True, capture_output=True, check=True).stdout.strip()
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            names[folder.name] = Path((folder / "cmdline").read_text().split("\0")[0]).name
    found = {}
    for pid in (pid for pid, name in names.items() if name in PROGRAMS):
        above = pid
        while above in parents and above != first:
            above = parents[above]
        if above == first or names[pid] == "kwok":
            found[names[pid]] = Path("/proc") / pid
    return found


def usage(programs: dict[str, Path]) -> dict[str, tuple[float, int]]:
    """Returns the CPU seconds and the bytes of memory of each of the cluster's programs."""
    found = {}
    for name, folder in programs.items():
        ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        found[name] = seconds, int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def watch_memory(programs: dict[str, Path], peak: dict[str, int], stop: threading.Event) -> None:
    while not stop.wait(1.0):
        for name, (_, size) in usage(programs).items():
            peak[name] = max(peak[name], size)


def table(found: list[dict[str, Any]]) -> str:
    """Returns the figures as a table in Markdown: a row for each figure, a column for each number of runs."""
    rows = [("runs", *(one["runs"] for one in found))]
    for key in found[0]:
        if isinstance(found[0][key], dict):
            rows += [(f"{key}: {name}", *(round(one[key][name], 1) for one in found)) for name in PROGRAMS]
        elif key != "runs":
            rows.append((key, *(round(one[key], 1) for one in found)))
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


if __name__ == "__main__":
    main()
