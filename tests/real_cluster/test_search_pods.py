"""A search of `optimize --on` on an installed release, with a scripted model in a pod that asks for a key.

One whole search of two players, in which the pod of a player is killed.  Does not cover GPUs and a real model.
"""

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from canaries import leaks
from kubectl import Cluster, wait_for
from probing import Place, address_of, cluster_places, python_pod, reached, service_of
from release import ROOT, Release, merged, release, values

from cuda_agent.agent.progress import read_events

pytestmark = pytest.mark.cluster

KEY = f"sk-{secrets.token_hex(20)}"
IMAGE = f"localhost/cuda-agent:{version('cuda-agent')}"
AGAIN = "The work folder was opened again"  # what an attempt that goes on is told
COMPONENT = "app.kubernetes.io/component"
# The example's server behind a key.  Each answer takes three seconds, so that there is time to look at the pods.
SERVER = """
import os, sys, time
from http.server import ThreadingHTTPServer
sys.path.insert(0, "/models")
import scripted_server

class Handler(scripted_server.Handler):
    def do_POST(self):
        if self.headers.get("Authorization") != "Bearer " + os.environ["KEY"]:
            return self.send_error(401)
        time.sleep(3)
        super().do_POST()

ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


def model_server() -> list[dict[str, Any]]:
    """Returns the objects of a pod that plays a language model, and of its key."""
    examples = ROOT / "examples"
    files = {"scripted_server.py": "scripted_server.py", "plan.json": "plan/plan.json"}
    files["fused.cpp"] = "plan/kernels/fused.cpp"
    data = {key: (examples / path).read_text() for key, path in files.items()}
    items = [{"key": key, "path": path} for key, path in files.items()]
    made = python_pod("models", IMAGE, SERVER, {"app": "models"})
    (container,) = made["spec"]["containers"]
    container["env"].append({"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "models", "key": "key"}}})
    container["volumeMounts"] = [{"name": "models", "mountPath": "/models"}]
    made["spec"]["volumes"] = [{"name": "models", "configMap": {"name": "models", "items": items}}]
    port = {"port": 8000, "protocol": "TCP"}
    selected: dict[str, Any] = {"app": "models"}
    wall = {"podSelector": {"matchLabels": selected}, "policyTypes": ["Ingress"], "ingress": [{"ports": [port]}]}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "models"}, "stringData": {"key": KEY}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "models"}, "data": data},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "models"},
         "spec": {"selector": selected, "ports": [port]}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "models"}, "spec": wall},
        made,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def searching(cluster: Cluster) -> Iterator[Release]:
    rule = {"to": [{"podSelector": {"matchLabels": {"app": "models"}}}], "ports": [{"port": 8000, "protocol": "TCP"}]}
    given = {
        "search": {"server": "http://models:8000/v1", "existingSecret": "models"},
        "networkPolicy": {"searchEgress": [rule]},
        "extraObjects": model_server(),
    }
    with release(cluster, f"search-{os.getpid()}", merged(values(), given)) as made:
        yield made


@dataclass
class Seen:
    folder: Path
    code: int = -1
    said: str = ""
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)  # all pods of the namespace, at any time
    reached: dict[str, set[str]] = field(default_factory=dict)  # who -> what of all that there is
    search: str = ""


@pytest.fixture(scope="module")
def seen(searching: Release, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    space, found = searching.cluster, Seen(tmp_path_factory.mktemp("search") / "out")
    command = begun(searching, found.folder, 4)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            for pod in json.loads(space.try_run("get", "pods", "-o", "json").stdout or '{"items": []}')["items"]:
                found.pods[pod["metadata"]["name"]] = pod

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        other = wait_for("a pod of the other player", 600, lambda: running(space, "player(1:1)"))
        wait_for("its first turn", 60, lambda: "turn 1" in space.try_run("logs", other, "-c", "main").stdout)
        space.run("delete", "pod", other, "--grace-period=0", "--force")
        player = wait_for("a pod of a player", 600, lambda: running(space, "player(0:0)"))
        found.search = space.get("pod", player)["metadata"]["labels"]["workflows.argoproj.io/workflow"]
        places: dict[str, Place] = cluster_places(space) | {
            "models": service_of(space, "models", 8000),
            "MinIO": service_of(space, "cuda-agent-minio", 9000),
            "sandbox": ("tcp", address_of(space, f"{found.search}-evaluate-0"), 8750),
        }
        found.reached["search"] = reached(space, player, places)
        found.reached["sandbox"] = reached(space, f"{found.search}-workspace-0", places, container="sandbox")
        found.said = command.communicate(timeout=1200)[0]
        found.code = command.returncode
    finally:
        command.kill()
        over.set()
        watching.join()
    return found


def begun(searching: Release, folder: Path, attempts: int) -> subprocess.Popen[str]:
    """Starts the command for a search on the release, as a person would on this machine."""
    line = [sys.executable, "-m", "cuda_agent.cli", "optimize", str(ROOT / "examples" / "model.py"), "--on", "."]
    line += ["--model", "scripted", "--attempts", str(attempts), "--target", "inf", "sandbox.clock=model"]
    line += ["--output", str(folder), "--namespace", searching.cluster.namespace]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, env=searching.environment, **pipes)


def running(space: Cluster, step: str) -> str:
    """Returns the name of a running pod of this step, or ""."""
    for pod in space.get("pods", "-l", f"{COMPONENT}=search")["items"]:
        node = pod["metadata"]["annotations"].get("workflows.argoproj.io/node-name", "")
        states = pod["status"].get("containerStatuses", [])
        main: dict[str, Any] = next((one for one in states if one["name"] == "main"), {})
        if f".{step}" in node and "running" in main.get("state", {}):
            return str(pod["metadata"]["name"])
    return ""


def test_the_command_brings_the_result_as_a_search_on_this_machine_does(seen: Seen) -> None:
    assert seen.code == 0, seen.said
    assert (seen.folder / "solution" / "kernels" / "fused.cpp").read_text() == (
        ROOT / "examples" / "plan" / "kernels" / "fused.cpp"
    ).read_text()
    verdict = json.loads((seen.folder / "verdict.json").read_text())
    assert verdict["status"] == "ok" and verdict["mode"] == "strict"
    assert "class ModelNew" in (seen.folder / "model_new.py").read_text()
    assert (seen.folder / "report.html").exists() and f"{seen.folder}/model_new.py" in seen.said


def test_both_players_play_their_attempts_also_the_one_whose_pod_is_killed(seen: Seen) -> None:
    events = read_events(seen.folder / "transcript.jsonl")
    ended = {event["attempt"]: event["why"] for event in events if event["kind"] == "ended"}
    assert ended == dict.fromkeys((1, 2, 3, 4), "answer")
    parents = {event["attempt"] for event in events if event["kind"] == "parent"}
    assert parents == {3, 4}
    again = [event["attempt"] for event in events if event["kind"] == "message" and AGAIN in str(event["message"])]
    assert again == [2], "the attempt whose pod was killed went on in another pod"
    assert [event["turn"] for event in events if event["kind"] == "turn" and event["attempt"] == 2][:2] == [0, 1]


def test_only_pods_without_candidate_code_have_the_key_and_reach_the_model(seen: Seen) -> None:
    with_key = {
        pod["metadata"]["labels"].get(COMPONENT, name)
        for name, pod in seen.pods.items()
        if '"models"' in json.dumps(pod["spec"]["containers"]) and name != "models"
    }
    assert with_key == {"search"}
    components = {pod["metadata"]["labels"].get(COMPONENT) for pod in seen.pods.values()}
    assert {"search", "sandbox", "prepare", "finish"} <= components
    assert "models" in seen.reached["search"] and {"MinIO", "sandbox"} <= seen.reached["search"]
    assert seen.reached["sandbox"] == set()


def test_the_key_is_in_no_object_no_log_no_store_and_no_row(seen: Seen, searching: Release) -> None:
    assert leaks(searching, {"key": KEY}) == []


def test_nothing_of_the_sandboxes_stays(seen: Seen, searching: Release) -> None:
    def left() -> list[str]:
        items = searching.cluster.get("statefulsets,services,networkpolicies")["items"]
        return [item["metadata"]["name"] for item in items if item["metadata"]["name"].startswith(seen.search)]

    wait_for("the sandboxes are gone", 120, lambda: not left())


def test_a_search_that_is_stopped_goes_on_from_its_folder(seen: Seen, searching: Release, tmp_path: Path) -> None:
    space, folder = searching.cluster, tmp_path / "out"
    command = begun(searching, folder, 1)
    pod = wait_for("a pod of the player", 600, lambda: running(space, "player(0:0)"))
    wait_for("its second turn", 60, lambda: "turn 2" in space.try_run("logs", pod, "-c", "main").stdout)
    search = json.loads((folder / "cluster.json").read_text())["search"]
    done = searching.command("cancel", search)
    assert done.returncode == 0, done.stderr
    said = command.communicate(timeout=300)[0]
    assert command.returncode == 75 and f"--resume {folder}" in said, said
    assert not [one for one in space.get("statefulsets")["items"] if one["metadata"]["name"].startswith(search)]
    line = [sys.executable, "-m", "cuda_agent.cli", "optimize", "--resume", str(folder)]
    again = subprocess.run(line, text=True, capture_output=True, timeout=600, env=searching.environment)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((folder / "verdict.json").read_text())["mode"] == "strict"
    turns = [event["turn"] for event in read_events(folder / "transcript.jsonl") if event["kind"] == "turn"]
    assert turns == [*range(len(turns))], "no turn is played again: it went on where it was"


def test_a_wrong_key_ends_a_search_before_a_player_begins(seen: Seen, searching: Release, tmp_path: Path) -> None:
    space = searching.cluster
    space.run("patch", "secret", "models", "-p", json.dumps({"stringData": {"key": "another"}}))
    command = begun(searching, tmp_path / "out", 4)
    said = command.communicate(timeout=600)[0]
    assert command.returncode == 78 and "401" in said and "player" not in said, said
