"""A stage in several pods: what is made of the chart's values, what KubeRay's definitions say of it, and how it is
followed.  No operator runs: its words are put into the job's status."""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cuda_agent.cluster import pod, rayjobs, run_pools, templates
from cuda_agent.cluster import submit as cluster
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.compose import compose
from cuda_agent.config import Config
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.pipeline.manifest import Manifest, manifest_entry, outcome_entry
from cuda_agent.storage import open_store
from tests.cluster.control_plane import MISSING, NAMESPACE, ControlPlane
from tests.deploy.charts import ALONE, KUBERAY, ROOT, merged, needs_helm, objects, of_kind, steps, template

pytestmark = needs_helm
needs_plane = pytest.mark.skipif(
    MISSING or KUBERAY is None, reason="no API server or KubeRay: .ci/tools, make cluster-up"
)
VALUES = merged(
    ALONE,
    {"fullnameOverride": "cuda-agent", "monitoring": {"serviceMonitor": False, "podMonitor": False, "alerts": False}},
)
ARGUMENTS = ["pod", "stage", "agentic", "--run", "night", "--config", "ab" * 32, "--workflow", "night"]


def spread(*overrides: str) -> Config:
    return compose(["experiment=smoke", "runtime=ray", "ray.workers=3", *overrides])


def container(items: list[dict[str, Any]], template_name: str, profile: str = "cpu") -> dict[str, Any]:
    (made,) = of_kind(items, "WorkflowTemplate", f"-{profile}-")
    return steps(made)[template_name]["container"]


def base(profile: str = "cpu") -> list[dict[str, Any]]:
    environment = container(objects(VALUES), "agentic-ray", profile)["env"]
    return json.loads(next(item["value"] for item in environment if item["name"] == "CUDA_AGENT_RAY"))


def of_run(workflow: str, uid: str = "u", profile: str = "cpu") -> list[dict[str, Any]]:
    return rayjobs.objects(base(profile), workflow, uid, "agentic", ARGUMENTS, "http://a:1,http://b:1", spread())


def job(made: list[dict[str, Any]]) -> dict[str, Any]:
    return next(item for item in made if item["kind"] == "RayJob")


def pods(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the head, and of the actors."""
    spec = job(made)["spec"]["rayClusterSpec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_version_of_ray_is_the_one_that_is_installed():
    assert f"\nray=={rayjobs.RAY_VERSION}\n" in (ROOT / "requirements.lock").read_text()


def test_a_jobs_name_follows_from_the_run_and_is_as_short_as_kuberay_wants():
    names = {rayjobs.job_name(run, stage.name) for run in ("a", "x" * 36 + "-r12") for stage in STAGES}
    assert len(names) == 2 * len(STAGES)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 47 for name in names)


def test_a_stages_objects_are_the_runs_own():
    made = of_run("night", "uid-1")
    name = rayjobs.job_name("night", "agentic")
    assert [item["metadata"]["name"] for item in made] == [name, f"{name}-sandbox", name]
    assert all(item["metadata"]["ownerReferences"][0]["uid"] == "uid-1" for item in made)
    assert "RUN" not in re.findall(r'"([^"]*)"', json.dumps(made))
    spec = job(made)["spec"]
    assert spec["entrypoint"] == " ".join(["python3 -m cuda_agent.cli", *ARGUMENTS]) and spec["backoffLimit"] == 0
    (actors,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert {actors[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {4}, "three workers and the trainer"
    made = rayjobs.objects(
        base(), "w", "u", "agentic", ARGUMENTS, "", spread("training.num_processes=2", "ray.trainers=2")
    )
    assert job(made)["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 5
    made = rayjobs.objects(base(), "w", "u", "evaluate-rft", ARGUMENTS, "", spread())
    assert job(made)["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3, "there is no trainer"


def test_what_a_person_names_is_an_argument_and_no_command():
    made = rayjobs.objects(base(), "w", "u", "agentic", ["--run", "x; rm -rf /"], "", spread())
    assert job(made)["spec"]["entrypoint"].endswith("--run 'x; rm -rf /'")


def test_only_the_head_has_the_stores_credentials():
    head, actors = ([entry["name"] for entry in p["spec"]["containers"][0]["env"]] for p in pods(of_run("night")))
    assert {"AWS_SECRET_ACCESS_KEY", "CUDA_AGENT_STORE", "CUDA_AGENT_SANDBOX_TOKEN"} <= set(head)
    assert "CUDA_AGENT_SANDBOX_TOKEN" in actors and not [name for name in actors if name.startswith("AWS_")]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_rays_pods_are_restricted_and_limited_and_have_no_account(profile):
    for made in pods(of_run("night", profile=profile)):
        spec = made["spec"]
        assert spec["automountServiceAccountToken"] is False and spec["serviceAccountName"] == "cuda-agent-stage"
        assert spec["securityContext"]["runAsNonRoot"] and spec["restartPolicy"] == "Never"
        (only,) = spec["containers"]
        assert only["securityContext"]["readOnlyRootFilesystem"] and only["livenessProbe"] and only["readinessProbe"]
        assert {"cpu", "memory", "ephemeral-storage"} <= set(only["resources"]["limits"])
    gpus = [
        "nvidia.com/gpu" in p["spec"]["containers"][0]["resources"]["limits"] for p in pods(of_run("n", "u", profile))
    ]
    assert gpus == [False, profile == "gpu"]


def test_rays_pods_reach_each_other_and_are_reached_by_nobody_else():
    made = of_run("night")
    between, sandbox = (item["spec"] for item in made if item["kind"] == "NetworkPolicy")
    own = {"podSelector": {"matchLabels": {rayjobs.RAY_LABEL: rayjobs.job_name("night", "agentic")}}}
    assert between["podSelector"] == own["podSelector"] and between["egress"] == [{"to": [own]}]
    assert between["ingress"][0] == {"from": [own]} and between["ingress"][1]["ports"][0]["port"] == 8265
    assert sandbox["podSelector"]["matchLabels"]["cuda-agent.io/run"] == "night"
    assert sandbox["ingress"] == [{"from": [own], "ports": [{"port": 8750, "protocol": "TCP"}]}]
    for each in pods(made):
        assert each["metadata"]["labels"][rayjobs.RAY_LABEL] == rayjobs.job_name("night", "agentic")
        assert "workflows.argoproj.io/workflow" not in each["metadata"]["labels"], "they are none of Argo's pods"


def test_where_the_chart_leaves_egress_open_so_do_rays_policies(monkeypatch):
    monkeypatch.setenv("CUDA_AGENT_OPEN_EGRESS", "yes")
    policies = [item["spec"] for item in of_run("night") if item["kind"] == "NetworkPolicy"]
    assert [policy["policyTypes"] for policy in policies] == [["Ingress"], ["Ingress"]]
    assert all(policy["ingress"] and "egress" not in policy for policy in policies)


def test_without_it_the_profile_says_nothing_of_ray():
    items = template(merged(VALUES, {"profiles": {name: {"ray": {"enabled": False}} for name in ("cpu", "gpu")}}))
    for name in ("prepare", "agentic-ray"):
        assert "CUDA_AGENT_RAY" not in [entry["name"] for entry in container(items, name)["env"]]


def test_prepare_sends_a_stage_to_ray_only_where_both_sides_want_it(tmp_path):
    for config, profile_has_it, wanted in (
        (spread(), True, "ray"), (spread(), False, "run"), (spread("runtime=local"), True, "run"),
    ):  # fmt: skip
        from cuda_agent.compose import freeze

        text, sha256 = freeze(config)
        home = tmp_path / f"{wanted}-{profile_has_it}"
        home.mkdir()
        (home / "config.json").write_text(text)
        here = pod.PodEnvironment(str(home / "store"), "off", home / "config.json", home / "plan", home)
        outputs = pod.prepare(here, "night", sha256, "night", None, [], spread=profile_has_it)
        assert (outputs["agentic"], outputs["collect"], outputs["rft"]) == (wanted, wanted, "run")


# ------------------------------------------------------------------------------------------------- with an API server


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        plane.apply([item for item in template(VALUES, namespace=NAMESPACE) if item["kind"] not in ("Job", "Pod")])
        yield plane


@pytest.fixture
def connect(plane, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))

    def as_account(name: str = "") -> Cluster:
        made = Cluster.of_kubeconfig("admin")
        if name:
            made.client.default_headers["Impersonate-User"] = f"system:serviceaccount:{NAMESPACE}:cuda-agent-{name}"
        return made

    return as_account


def begin(admin: Cluster, name: str) -> str:
    cluster.submit(
        admin, cluster.submission(spread(f"run.name={name}"), "cpu", templates.template_name("cuda-agent", "cpu"))
    )
    return admin.get("Workflow", name)["metadata"]["uid"]


class Followed(threading.Thread):
    """A step that follows the job of a run, as its account."""

    def __init__(self, place: Cluster, store: Any, made: list[dict[str, Any]], run: str) -> None:
        super().__init__(daemon=True)
        self.asked = False
        self.answer: tuple[int, str] | None = None
        self._follow = lambda: rayjobs.follow(place, store, made, run, "agentic", run, lambda: self.asked, pause=0.05)
        self.start()

    def run(self) -> None:
        self.answer = self._follow()

    def ended(self) -> tuple[int, str]:
        self.join(60)
        assert self.answer is not None
        return self.answer


def operator_says(plane: ControlPlane, run: str, **status: str) -> str:
    """Waits for the job, puts words into its status, and returns its uid."""
    name = rayjobs.job_name(run, "agentic")
    for _ in range(600):
        if plane.try_kubectl("get", "rayjob", name, "-n", NAMESPACE).returncode == 0:
            break
        time.sleep(0.05)
    text = json.dumps({"status": status})
    plane.kubectl("patch", "rayjob", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", text)
    return plane.kubectl("get", "rayjob", name, "-n", NAMESPACE, "-o", "jsonpath={.metadata.uid}")


def manifest(run: str) -> Manifest:
    return Manifest("agentic", run, "k", "c", "e", None, "s", {}, {}, "m", 1.0, "2026-01-01T00:00:00+00:00")


@needs_plane
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_kuberay_knows_every_field_and_the_steps_account_may_make_them(connect, profile):
    run = f"strict-{profile}"
    uid = begin(connect(), run)
    made = of_run(run, uid, profile)
    for item in made:
        assert connect("ray").create_if_absent(item)
        assert not connect("ray").create_if_absent(item), "it was there"
    run_pools.remove_pools(connect("operator"), run)
    for item in made:
        assert connect().find(item["kind"], item["metadata"]["name"]) is None


@needs_plane
def test_a_misspelt_field_is_refused(connect):
    wrong = job(of_run("wrong"))
    wrong["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(ClusterError, match="unknown field"):
        connect("ray").create(wrong)


@needs_plane
def test_a_job_is_followed_to_its_end_by_whoever_comes_next(plane, connect, tmp_path):
    store = open_store(str(tmp_path))
    made = of_run("followed", begin(connect(), "followed"))
    first = Followed(connect("ray"), store, made, "followed")
    uid = operator_says(plane, "followed", jobDeploymentStatus="Running", jobStatus="RUNNING")
    first.asked = True  # its pod is preempted
    assert first.ended()[0] == 75 and "goes on" in first.ended()[1]
    second = Followed(connect("ray"), store, made, "followed")
    store.put(manifest_entry("followed", "agentic"), manifest("followed").to_bytes())
    assert operator_says(plane, "followed", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED") == uid
    assert second.ended() == (0, "")


@needs_plane
def test_a_stage_ends_as_it_said_and_is_then_made_anew(plane, connect, tmp_path):
    store = open_store(str(tmp_path))
    made = of_run("failing", begin(connect(), "failing"))
    first = Followed(connect("ray"), store, made, "failing")
    store_says = json.dumps({"code": 79, "message": "not good enough"}).encode()
    operator_says(plane, "failing", jobDeploymentStatus="Running", jobStatus="RUNNING")
    store.put(outcome_entry("failing", "agentic"), store_says)
    uid = operator_says(plane, "failing", jobDeploymentStatus="Failed", jobStatus="FAILED")
    assert first.ended() == (79, "not good enough")
    second = Followed(connect("ray"), store, made, "failing")
    for _ in range(200):
        found = connect().find("RayJob", job(made)["metadata"]["name"])
        if found is not None and found["metadata"]["uid"] != uid:
            break
        time.sleep(0.05)
    said = {"reason": "AppFailed", "message": "the head was lost"}
    again = operator_says(plane, "failing", jobDeploymentStatus="Failed", jobStatus="FAILED", **said)
    code, message = second.ended()
    assert again != uid and code == 75 and "the head was lost" in message, "what nobody answers for is tried again"


@needs_plane
def test_a_run_that_is_stopped_takes_its_job_along(plane, connect, tmp_path):
    made = of_run("stopped", begin(connect(), "stopped"))
    step = Followed(connect("ray"), open_store(str(tmp_path)), made, "stopped")
    operator_says(plane, "stopped", jobDeploymentStatus="Running")
    connect().patch("Workflow", "stopped", {"spec": {"shutdown": "Stop"}})
    assert step.ended() == (75, "The run was stopped.")
    assert connect().find("RayJob", job(made)["metadata"]["name"]) is None


def test_a_screen_shows_the_step_in_the_stages_place():
    def node(name: str, phase: str, kind: str = "Pod") -> dict[str, Any]:
        return {"displayName": name, "type": kind, "phase": phase, "startedAt": "2026-01-01T00:00:00Z"}

    nodes = [
        node("warmup", "Succeeded"), node("warmup-ray", "Skipped", "Skipped"), node("agentic", "Skipped", "Skipped"),
        node("agentic-ray", "Running", "Retry"), node("agentic-ray(0)", "Running"),
    ]  # fmt: skip
    shown = cluster.views({"status": {"nodes": {str(i): item for i, item in enumerate(nodes)}}})
    states = {view.name: view.state for view in shown}
    assert (states["warmup"], states["agentic"]) == ("done", "running")
