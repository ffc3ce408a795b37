"""Measures what a cluster costs beside the work: seconds per stage, compared with a bare Argo workflow of empty steps.

    cuda_agent's namespace:  one smoke run, then the same run again, whose stages come from the cache
    a new namespace:         the same graph of empty steps, without retries, artifacts and archived logs

A stage's overhead is the time from the creation of its pod to the creation of the next pod, less the stage's own work
and its imports. The stage's log tells when the work ``begins`` and ``ends``. Imports have a column of their own: in a
new process, PyTorch's imports take long. The overhead is compared with the time from pod to pod in the bare workflow.
Both workflows run one pod at a time.

Needs a cluster with the chart (KUBECONFIG, current context):

    python benchmarks/cluster_overhead.py --namespace cuda-agent
"""

import argparse
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

from cuda_agent.cluster import submit as cluster
from cuda_agent.cluster.api import Cluster
from cuda_agent.cluster.pools import CONTAINER_SECURITY
from cuda_agent.cluster.templates import template_name
from cuda_agent.compose import compose
from cuda_agent.pipeline.graph import STAGES

SMOKE = ["experiment=smoke", "sandbox.clock=model"]
NAMES = [stage.name for stage in STAGES]


class Created:
    """Watches a namespace and records in ``at`` when its new pods appear, by this machine's clock. Kubernetes itself
    records whole seconds only."""

    def __init__(self, place: Cluster) -> None:
        from kubernetes import client, watch

        self.at: dict[str, float] = {}  # step of the graph -> creation of its last pod, in seconds since the epoch
        self._stopping = watch.Watch()
        listing = client.CoreV1Api(place.client).list_namespaced_pod
        known = {pod["metadata"]["uid"] for pod in place.all("Pod")}

        def follow() -> None:
            for event in self._stopping.stream(listing, place.namespace, timeout_seconds=3600):
                metadata = event["raw_object"]["metadata"]
                step = metadata.get("annotations", {}).get("workflows.argoproj.io/node-name", "")
                if event["type"] == "ADDED" and step and metadata["uid"] not in known:
                    self.at[re.sub(r"\(\d+\)$", "", step.rsplit(".", 1)[-1])] = time.time()

        threading.Thread(target=follow, daemon=True).start()
        time.sleep(1)  # the watch needs a moment to start


def finished(place: Cluster, name: str) -> dict[str, Any]:
    while True:
        found = place.get("Workflow", name)
        if (now := cluster.phase(found)) in cluster.ENDED:
            assert now == "Succeeded", f"{name}: {now} {found['status'].get('message', '')}"
            return found
        time.sleep(0.5)


def took(workflow: dict[str, Any]) -> float:
    """Returns the seconds from the workflow's creation to its end."""
    ends = workflow["metadata"]["creationTimestamp"], workflow["status"]["finishedAt"]
    began, ended = (datetime.fromisoformat(text) for text in ends)
    return (ended - began).total_seconds()


def periods(created: dict[str, float], names: list[str]) -> dict[str, float]:
    """Returns for each step in ``names`` the seconds from the creation of its pod to the creation of the next pod. The
    pod of the step ``finish`` is the last one. ``created`` maps steps to the times when their pods were created."""
    order = sorted([*names, "finish"], key=created.__getitem__)
    return {this: created[after] - created[this] for this, after in itertools.pairwise(order)}


def bare(place: Cluster, image: str) -> dict[str, float]:
    """Runs a workflow of empty steps in a new namespace. Returns for each step the seconds from its pod to the next
    pod."""
    name = f"bare-{secrets.token_hex(3)}"
    kubectl = ["kubectl", "--namespace", name]
    subprocess.run(["kubectl", "create", "namespace", name], check=True, stdout=subprocess.DEVNULL)
    here = Cluster(place.client, name, place.name)
    try:
        subprocess.run([*kubectl, "create", "serviceaccount", "executor"], check=True, stdout=subprocess.DEVNULL)
        rights = ["--verb=create,patch", "--resource=workflowtaskresults.argoproj.io"]
        subprocess.run([*kubectl, "create", "role", "executor", *rights], check=True, stdout=subprocess.DEVNULL)
        binding = ["rolebinding", "executor", "--role=executor", f"--serviceaccount={name}:executor"]
        subprocess.run([*kubectl, "create", *binding], check=True, stdout=subprocess.DEVNULL)
        created = Created(here)
        here.create(empty_steps(image))
        finished(here, "bare")
        return periods(created.at, ["prepare", *NAMES])
    finally:
        subprocess.run(["kubectl", "delete", "namespace", name, "--wait=false"], stdout=subprocess.DEVNULL)


def empty_steps(image: str) -> dict[str, Any]:
    tasks: list[dict[str, Any]] = [{"name": "prepare", "template": "empty"}]
    tasks += [{"name": s.name, "template": "empty", "dependencies": ["prepare", *s.upstream]} for s in STAGES]
    tasks.append({"name": "finish", "template": "empty", "dependencies": ["report"]})
    container = {"image": image, "command": ["true"], "securityContext": CONTAINER_SECURITY}
    patch = {
        kind: [{"name": name, "securityContext": CONTAINER_SECURITY}]
        for kind, name in (("containers", "wait"), ("initContainers", "init"))
    }
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "bare"},
        "spec": {
            "entrypoint": "graph",
            "parallelism": 1,
            "serviceAccountName": "executor",
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "podSpecPatch": json.dumps(patch),
            "templates": [{"name": "graph", "dag": {"tasks": tasks}}, {"name": "empty", "container": container}],
        },
    }  # fmt: skip


def own_work(place: Cluster, run: str) -> dict[str, dict[str, float]]:
    """Returns for each stage when its process started, had its inputs, began its work and ended it: stage -> event in
    the log -> seconds since the epoch."""
    found: dict[str, dict[str, float]] = {}
    pods = cluster.pods_of(place, run)
    for stage in NAMES:
        lines = "\n".join(place.logs(pods[stage]))
        said = re.findall(rf"^(\S+) {re.escape(stage)}: (process started|inputs are here|begins|ends)$", lines, re.M)
        found[stage] = {what: datetime.fromisoformat(when).timestamp() for when, what in said}
    return found


def submitted(place: Cluster, run: str, overrides: list[str], profile: str, release: str) -> float:
    """Submits a run and returns the seconds that the command takes, start to end."""
    words = ["submit", *overrides, f"run.name={run}", "--profile", profile, "--release", release]
    begun = time.monotonic()
    command = [sys.executable, "-m", "cuda_agent.cli", *words, "--namespace", place.namespace]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--namespace", default="cuda-agent", help="where the chart is")
    parser.add_argument("--release", default="cuda-agent")
    parser.add_argument("--profile", default="cpu")
    options = parser.parse_args()
    if not os.environ.get("KUBECONFIG") and not (Path.home() / ".kube" / "config").exists():
        print("no kubeconfig: this one needs a cluster with the chart")
        return
    place = Cluster.of_kubeconfig(None, options.namespace)
    template = place.get("WorkflowTemplate", template_name(options.release, options.profile))
    image = next(t["container"]["image"] for t in template["spec"]["templates"] if "container" in t)
    compose(SMOKE)  # wrong overrides fail here, not on the cluster

    plain = bare(place, image)
    seed = secrets.randbelow(10**6)  # a new seed, so that no stage is in the cache
    run = f"overhead-{seed}"
    created = Created(place)
    submitting = submitted(place, run, [*SMOKE, f"seed={seed}"], options.profile, options.release)
    whole = took(finished(place, run))
    at = dict(created.at)
    spans, work = periods(at, NAMES), own_work(place, run)
    again = submitted(place, f"{run}-again", [*SMOKE, f"seed={seed}"], options.profile, options.release)
    cached = finished(place, f"{run}-again")
    pods = sum(node["type"] == "Pod" for node in cached["status"]["nodes"].values())

    columns = ("stage", "bare", "to process", "to inputs", "imports", "work", "to next", "overhead", "above bare")
    print(("{:18}" + "{:>11}" * 8).format(*columns))
    overheads, imports = [], []
    for stage in NAMES:
        step = work[stage]
        imports.append(step["begins"] - step["inputs are here"])
        own = step["ends"] - step["begins"]
        overheads.append(spans[stage] - own - imports[-1])
        parts = (
            plain[stage], step["process started"] - at[stage], step["inputs are here"] - step["process started"],
            imports[-1], own, at[stage] + spans[stage] - step["ends"], overheads[-1], overheads[-1] - plain[stage],
        )  # fmt: skip
        print(f"{stage:18}" + "".join(f"{value:11.2f}" for value in parts))
    usual = [plain[stage] for stage in NAMES]
    above = [mine - other for mine, other in zip(overheads, usual, strict=True)]
    print(f"mean     bare {mean(usual):.2f} s, ours {mean(overheads):.2f} s, above bare {mean(above):.2f} s a stage")
    print(f"median   bare {median(usual):.2f} s, ours {median(overheads):.2f} s, above bare {median(above):.2f} s")
    print(f"imports  {mean(imports):.2f} s a stage")
    print(f"prepare  {at['synthesis'] - at['prepare']:.1f} s, with the sandbox's pools")
    print(f"the run  {whole:.0f} s, of which {sum(w['ends'] - w['begins'] for w in work.values()):.0f} s work")
    print(f"cached   {took(cached):.0f} s, {pods} pod")
    print(f"submit   {submitting:.2f} s, {again:.2f} s")


if __name__ == "__main__":
    main()
