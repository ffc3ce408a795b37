"""The commands beside hundreds of runs, on a small API server over HTTP: what they ask for, say and end with."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.cli import cluster as commands
from cuda_agent.cli import runs as listing
from cuda_agent.cluster import submit as cluster
from cuda_agent.cluster import templates
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.compose import compose
from cuda_agent.errors import ConfigError
from tests.cluster.fake_api import NAMESPACE, FakeApi


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def place(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    return Cluster.of_kubeconfig()


def chart(api: FakeApi, release: str = "cuda-agent", version: str = "", **gpus: str) -> None:
    """Adds the templates of a release: a profile for each of ``gpus``, with so many GPUs."""
    made_by = version or templates.own_version()
    for profile, count in (gpus or {"cpu": "0", "gpu": "1"}).items():
        said = {"cuda-agent.io/version": made_by, "cuda-agent.io/gpus": count, "cuda-agent.io/mlflow": "off"}
        name = f"{release}-{profile}-{made_by.replace('.', '-')}"
        api.add("WorkflowTemplate", name, {templates.PROFILE_LABEL: profile}, metadata={"annotations": said})


def run(api: FakeApi, name: str, phase: str = "", message: str = "", sweep: str = "", attempt: str = "", **nodes: Any):
    """Adds a run's Workflow, as Argo leaves it, and its ConfigMap."""
    labels = {cluster.RUN_LABEL: name, templates.PROFILE_LABEL: "cpu"} | ({cluster.SWEEP_LABEL: sweep} if sweep else {})
    status: dict[str, Any] = {"phase": phase, "message": message, "nodes": nodes, "storedTemplates": "x" * 200_000}
    parameters = [{"name": "run", "value": name}, {"name": "config", "value": "ab" * 32}]
    template = {"name": templates.template_name("cuda-agent", "cpu")}
    spec = {"workflowTemplateRef": template, "arguments": {"parameters": parameters}}
    api.add("Workflow", attempt or name, labels, spec=spec, status=status if phase else {})
    said = {"annotations": {cluster.CONFIG_ANNOTATION: "ab" * 32}}
    api.add("ConfigMap", attempt or name, labels, metadata=said, data={"config.json": "{}"})


def node(name: str, phase: str, code: str = "") -> dict[str, Any]:
    made = {"displayName": f"{name}(0)", "type": "Pod", "phase": phase, "startedAt": "2026-01-01T00:00:00Z"}
    return made | ({"outputs": {"exitCode": code}} if code else {})


def pod(name: str, step: str = "", role: str = "", **status: Any) -> dict[str, Any]:
    labels = {"workflows.argoproj.io/workflow": "w"} if step else {"cuda-agent.io/run": "w", "cuda-agent.io/role": role}
    said = {"annotations": {"workflows.argoproj.io/node-name": f"w.{step}(0)"}}
    return {"kind": "Pod", "name": name, "labels": labels, "metadata": said, "status": {"phase": "Pending"} | status}


def waits(reason: str, message: str = "", **more: Any) -> list[dict[str, Any]]:
    return [{"name": "main", "ready": False, "state": {"waiting": {"reason": reason, "message": message}}} | more]


# ------------------------------------------------------------------------------------------------------------ many runs


def test_no_command_reads_the_workflows_of_other_runs(api, place, capsys):
    for number in range(120):
        run(api, f"night-{number:03}", "Running" if number == 7 else "Succeeded")
    for what in (
        lambda: listing.list_all(on="."),
        lambda: cluster.find(place, "night-007"),
        lambda: cluster.cancel(place, cluster.find(place, "night-007"), now=False),
        lambda: cluster.find(place, "last"),
        lambda: cluster.known_name(place, "night-119"),
        lambda: cluster.pods_of(place, "night-007"),
    ):
        api.sent, api.requests = 0, []
        what()
        assert api.sent < 100_000 and len(api.requests) <= 7, api.requests
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 121 and "running" in lines[8] and "abababab" in lines[8], "the first is the head"


def test_a_run_that_a_schedule_started_is_listed_found_and_stopped(api, place):
    run(api, "mine", "Succeeded")
    labels = {templates.SCHEDULED_LABEL: "yes", templates.PROFILE_LABEL: "cpu"}
    api.add("Workflow", "kernels-1764381600", labels, spec={}, status={"phase": "Running"})
    assert {cluster.run_of(item) for item in cluster.workflows(place)} == {"mine", "kernels-1764381600"}
    found = cluster.find(place, "kernels-17643")
    assert cluster.phase(found) == "Running" and cluster.find(place, "kernels-1764381600") == found
    cluster.cancel(place, found, now=False)
    assert api.objects["workflows", "kernels-1764381600"]["spec"]["shutdown"] == "Stop"
    api.objects["workflows", "kernels-1764381600"]["status"]["phase"] = "Failed"
    with pytest.raises(ConfigError, match="was started by a schedule"):
        cluster.resume(place, cluster.find(place, "kernels-1764381600"))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(["75", "75"], 75), (["75", "1"], 1), (["1", "75"], 75), (["78"], 78), (["75", ""], 1), (["79"], 79)],
)
def test_the_exit_code_of_a_run_is_that_of_the_last_attempt_of_its_step(codes: list[str], expected: int):
    nodes = {
        str(number): node("rft", "Failed", code)
        | {"displayName": f"rft({number})", "startedAt": f"2026-01-01T00:00:0{number}Z"}
        for number, code in enumerate(codes)
    }
    nodes["done"] = node("warmup", "Succeeded", "0")
    workflow = {"metadata": {}, "spec": {}, "status": {"phase": "Failed", "nodes": nodes}}
    assert cluster.exit_code(workflow) == expected


def test_lists_come_in_pages(api, place, monkeypatch):
    monkeypatch.setattr("cuda_agent.cluster.api._PAGE", 7)
    for number in range(20):
        run(api, f"r-{number:02}", "Succeeded")
    assert [cluster.run_of(item) for item in cluster.workflows(place)] == [f"r-{number:02}" for number in range(20)]
    assert len(place.all("Workflow")) == 20
    assert len(api.requests) == 11 and all("limit=7" in request for request in api.requests)


def test_a_name_is_one_run_although_others_begin_with_it(api, place):
    run(api, "a", "Failed")
    run(api, "a", "Running", attempt="a-r2")
    run(api, "ab", "Running")
    assert cluster.find(place, "a")["metadata"]["name"] == "a-r2"
    with pytest.raises(ConfigError, match="several match"):
        cluster.find(place, "")


@pytest.mark.parametrize("asked", ["x/y", "a,b", "a=b", "A", ""])
def test_a_name_that_no_run_can_have_is_no_query(api, place, asked):
    run(api, "one", "Running")
    run(api, "two", "Running")
    with pytest.raises(ConfigError, match=r"no such run|several match"):
        cluster.find(place, asked)


def test_a_namespace_that_does_not_exist_is_said(api, place):
    place.namespace = "nowhere"
    for ask in (
        lambda: cluster.find(place, "last"),
        lambda: cluster.known_name(place, "one"),
        lambda: cluster.newest_of(place, "grid"),
        lambda: listing._cluster_rows(place),
        lambda: templates.choose(place, "cpu", None),
    ):
        with pytest.raises(ClusterError, match="There is no namespace nowhere in fake") as error:
            ask()
        assert error.value.exit_code == 78


def test_who_may_not_read_the_namespace_is_told_that_there_are_no_runs(api, place):
    api.refuse = lambda method, path: 403 if path == f"/api/v1/namespaces/{NAMESPACE}" else 0
    assert listing._cluster_rows(place) == []


# --------------------------------------------------------------------------------------- the release and the chart


def test_the_only_release_of_a_namespace_needs_no_name(api, place):
    chart(api, "kernels-cuda-agent")
    found = cluster.template_for(place, "cpu", None, [compose(["experiment=smoke"])])
    assert found == templates.template_name("kernels-cuda-agent", "cpu")
    chart(api, "second")
    with pytest.raises(ClusterError, match=r"several releases in .*: kernels-cuda-agent, second") as error:
        templates.choose(place, "cpu", None)
    assert "--release" in str(error.value)
    assert templates.choose(place, "cpu", "second").release == "second"
    with pytest.raises(ClusterError, match=r"There is no release third .* give kernels-cuda-agent or second"):
        templates.choose(place, "cpu", "third")


@pytest.mark.parametrize(
    ("mine", "theirs", "fits"),
    [("1.2.0", "1.2.0", True), ("1.2.0", "1.2.9", True), ("1.2.9", "1.2.0", True), ("1.2.0", "1.3.0", False),
     ("0.1.0", "0.2.0", False), ("2.2.0", "1.2.0", False)],
)  # fmt: skip
def test_command_and_chart_may_differ_in_their_last_number(api, place, monkeypatch, mine, theirs, fits):
    monkeypatch.setattr(templates, "own_version", lambda: mine)
    chart(api, version=theirs)
    if fits:
        assert templates.choose(place, "cpu", None).version == theirs
        return
    with pytest.raises(ClusterError, match=f"has version {theirs}, and this command {mine}"):
        templates.choose(place, "cpu", None)


def test_of_two_charts_the_newer_one_is_used(api, place, monkeypatch):
    monkeypatch.setattr(templates, "own_version", lambda: "1.2.3")
    for version in ("1.2.9", "1.2.10", "1.3.0"):
        chart(api, version=version)
    assert templates.choose(place, "cpu", None).version == "1.2.10"


def test_a_judge_on_gpus_needs_a_profile_with_gpus(api, place):
    chart(api)
    cuda, cpu = (compose(["experiment=smoke", f"sandbox.device={device}"]) for device in ("cuda", "cpu"))
    with pytest.raises(ConfigError, match=r"sandbox.device=cuda: .* profile cpu have no GPUs. Use --profile gpu"):
        cluster.template_for(place, "cpu", None, [cpu, cuda])
    assert cluster.template_for(place, "gpu", None, [cpu, cuda]) and cluster.template_for(place, "cpu", None, [cpu])


# --------------------------------------------------------------------------------------------------------------- sweeps


def test_a_run_that_waits_for_its_turn_says_for_which_and_is_stopped_at_once(api, place):
    run(api, "waits", "Pending", "Waiting for kernels/ConfigMap/cuda-agent-runs/cpu lock. Lock status: 0/1")
    workflow = api.objects["workflows", "waits"]
    lock = {"semaphore": "kernels/ConfigMap/cuda-agent-runs/cpu", "holders": ["kernels/night", "kernels/day"]}
    workflow["status"]["synchronization"] = {"semaphore": {"waiting": [lock]}}
    assert cluster.delays(place, workflow, cluster.views(workflow)) == {
        "prepare": ("waits for its turn behind the runs of its profile: day, night", False)
    }
    cluster.cancel(place, cluster.find(place, "waits"), now=False)
    workflow = api.objects["workflows", "waits"]
    assert workflow["spec"]["shutdown"] == "Terminate", "Argo lets a Stop wait for its turn, too"
    workflow["status"]["phase"] = "Succeeded"  # as Argo calls it
    last = cluster.find(place, "waits")
    assert (cluster.phase(last), last["status"]["message"]) == ("Failed", "stopped before it began")
    assert (cluster.phase(workflow), cluster.exit_code(workflow)) == ("Failed", 75)
    chart(api)
    assert cluster.resume(place, last).workflow["metadata"]["name"] == "waits-r2"


def test_a_submitted_run_is_named_though_the_cluster_does_not_tell_its_room(api, place, capsys):
    chart(api)
    template = templates.template_name("cuda-agent", "cpu")
    api.refuse = lambda method, path: 503 if path.endswith(f"/workflowtemplates/{template}") else 0
    commands.submit(["experiment=smoke", "run.name=first"])
    assert capsys.readouterr().out.splitlines()[0] == "run first is Workflow first in namespace kernels of fake"
    assert ("workflows", "first") in api.objects


def test_a_sweep_is_cancelled_and_resumed_whole(api, place, capsys):
    chart(api)
    run(api, "grid-1", "Succeeded", sweep="grid")
    run(api, "grid-2", "Failed", sweep="grid")
    run(api, "grid-3", "Failed", sweep="grid")
    run(api, "grid-3", "Running", sweep="grid", attempt="grid-3-r2")
    run(api, "grid-4", sweep="grid")
    run(api, "other-1", "Running", sweep="other")
    commands.cancel("grid", whole=True)
    stopped = {name for kind, name in api.objects if api.objects[kind, name].get("spec", {}).get("shutdown")}
    assert stopped == {"grid-3-r2", "grid-4"}
    assert capsys.readouterr().out.splitlines() == ["grid-3", "grid-4", "sweep grid: 2 runs stopping"]
    for name in stopped:
        api.objects["workflows", name]["status"] = {"phase": "Failed"}
    commands.resume("grid", whole=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"sweep": "grid", "runs": ["grid-2", "grid-3", "grid-4"]}
    assert {"grid-2-r2", "grid-3-r3", "grid-4-r2"} <= {name for kind, name in api.objects if kind == "workflows"}
    assert api.objects["workflows", "grid-2-r2"]["metadata"]["labels"][cluster.SWEEP_LABEL] == "grid"
    with pytest.raises(ConfigError, match="sweep nights: there is none in namespace kernels of fake"):
        commands.cancel("nights", whole=True)
    with pytest.raises(ConfigError, match="follows one run"):
        commands.resume("grid", whole=True, watching=True)


def test_what_no_step_can_record_any_more_is_recorded_by_cancel(api, place, monkeypatch, capsys):
    chart(api)
    run(api, "a", "Running")
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr("cuda_agent.cluster.results.end", lambda place, run, config: ended.append((run, config)))
    commands.cancel("a")
    assert ended == []
    commands.cancel("a", now=True)
    assert ended == [("a", "ab" * 32)] and api.objects["workflows", "a"]["spec"]["shutdown"] == "Terminate"


def test_cancel_says_that_mlflow_was_not_told(api, place, capsys):
    chart(api)
    run(api, "a", "Running")
    commands.cancel("a", now=True)
    assert "MLflow shows the run as running until `gc`: The release in namespace" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- watch


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which only pauses take time: a second takes five."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += 5 * seconds

    monkeypatch.setattr(time, "sleep", sleep)


def ends_after(api: FakeApi, requests: int, phase: str, code: str) -> None:
    """Ends the run ``w`` after so many requests: its step ``prepare`` leaves the exit code ``code``."""

    def look(method: str, path: str) -> int:
        if len(api.requests) > requests:
            ended = {"phase": phase, "nodes": {"p": node("prepare", phase, code)}}
            api.objects["workflows", "w"]["status"] = ended
        return 0

    api.refuse = look


def server(api: FakeApi, role: str, ready: int = 0) -> None:
    labels = {"cuda-agent.io/run": "w", "cuda-agent.io/role": role}
    api.add("StatefulSet", f"w-{role}", labels, status={"readyReplicas": ready})


UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU"}]
CRASHED = {"terminated": {"exitCode": 78, "message": "walls: landlock\nis missing"}}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"containerStatuses": waits("ImagePullBackOff", "Back-off pulling image")}, "ImagePullBackOff: Back-off pull"),
        ({"conditions": UNSCHEDULABLE}, "Unschedulable: 0/3 nodes: no GPU"),
        (
            {"phase": "Running", "containerStatuses": waits("CrashLoopBackOff", "back-off", lastState=CRASHED)},
            "main ended with 78: walls: landlock is missing",
        ),
    ],
)
def test_watch_says_why_prepare_waits_for_its_servers_and_ends_with_its_code(api, place, capsys, hasty, status, said):
    run(api, "w", "Running", p=node("prepare", "Running"))
    server(api, "workspace", ready=1)
    server(api, "evaluate")
    api.add(**pod("w-evaluate-0", role="evaluate", **status))
    ends_after(api, 40, "Failed", "78")
    assert commands._follow(place, "w", False) == 78
    out = capsys.readouterr().out
    assert "prepare: waits: w-evaluate: " in out and said in out and "w-workspace" not in out
    assert out.splitlines()[-1] == "run w: failed"


def test_a_server_without_pods_is_explained_by_its_events(api, place):
    run(api, "w", "Running", p=node("prepare", "Running"))
    server(api, "build")
    about = {"involvedObject": {"name": "w-build"}, "type": "Warning"}
    for second, text in ((1, "old"), (2, "exceeded quota: pods=200")):
        api.add("Event", f"e{second}", **about, message=text, lastTimestamp=f"2026-01-01T00:00:0{second}Z")
    workflow = place.get("Workflow", "w")
    found = cluster.delays(place, workflow, cluster.views(workflow))
    assert found == {"prepare": ("w-build: exceeded quota: pods=200", False)}


def test_watch_gives_up_a_pod_that_cannot_start_after_two_minutes(api, place, hasty, capsys):
    """Nothing else would end the run: Argo waits for a pod whose image does not exist."""
    run(api, "w", "Running", p=node("prepare", "Pending"))
    api.add(**pod("w-prepare-1", step="prepare", initContainerStatuses=waits("ErrImagePull", "not found")))
    with pytest.raises(ConfigError, match="run w: prepare cannot start: ErrImagePull: not found") as error:
        commands._follow(place, "w", False)
    assert (
        "cuda-agent cancel w" in str(error.value)
        and "prepare: waits: ErrImagePull: not found" in capsys.readouterr().out
    )
    looks = [request for request in api.requests if "pods?" in request]
    assert 8 <= len(looks) <= 14, "about every ten seconds, for two minutes"


def test_watch_waits_for_a_pod_that_waits_for_room(api, place, hasty):
    run(api, "w", "Running", p=node("prepare", "Pending"))
    api.add(**pod("w-prepare-1", step="prepare", conditions=UNSCHEDULABLE))
    ends_after(api, 80, "Succeeded", "0")
    assert commands._follow(place, "w", False) == 0


@pytest.mark.parametrize(
    ("phase", "code", "stopped", "ends"),
    [("Succeeded", "0", False, 0), ("Failed", "78", False, 78), ("Failed", "79", False, 79), ("Failed", "1", False, 1),
     ("Failed", "137", False, 1), ("Failed", "", False, 1), ("Failed", "75", True, 75)],
)  # fmt: skip
def test_watch_ends_with_the_code_of_the_run(api, place, capsys, phase, code, stopped, ends):
    run(api, "w", phase, s=node("synthesis", phase, code))
    if stopped:
        api.objects["workflows", "w"]["spec"]["shutdown"] = "Stop"
    assert commands._follow(place, "w", True) == ends
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == phase.lower()


def test_the_reason_of_a_stage_on_ray_is_the_stages(api, place):
    skipped = {"displayName": "agentic", "type": "Skipped", "phase": "Skipped"}
    tried = {"displayName": "agentic-ray", "type": "Retry", "phase": "Running"}
    run(api, "w", "Running", a=node("agentic-ray", "Pending"), b=tried, c=skipped)
    api.add(**pod("w-agentic-ray-1", step="agentic-ray", conditions=UNSCHEDULABLE))
    workflow = place.get("Workflow", "w")
    assert cluster.delays(place, workflow, cluster.views(workflow)).keys() == {"agentic"}
