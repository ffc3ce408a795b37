"""The commands against a real API server: what they create, what admission and roles refuse, what a person reads."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.cluster import doctor as cluster_doctor
from cuda_agent.cluster import engines, maintenance, pod, pod_maintenance, pools, run_pools, searches, templates
from cuda_agent.cluster import submit as cluster
from cuda_agent.cluster.api import Cluster, ClusterError
from cuda_agent.compose import compose, freeze
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError, TryAgain
from cuda_agent.pipeline.graph import ROWS
from tests.cluster.control_plane import MISSING, NAMESPACE, ControlPlane
from tests.deploy.charts import ALONE, HELM, ROOT, merged, objects, of_kind, steps
from tests.deploy.test_chart import engines as rendered

VALUES = merged(
    ALONE,
    {
        "fullnameOverride": "cuda-agent",
        "access": {
            "submitters": [{"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}],
            "viewers": [{"kind": "User", "name": "eve", "apiGroup": "rbac.authorization.k8s.io"}],
        },
        "monitoring": {"serviceMonitor": False, "podMonitor": False, "alerts": False},
    },
)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane with the chart's objects."""
    from tests.deploy.charts import template

    if MISSING or HELM is None:
        pytest.skip("no kube-apiserver: tests/cluster builds it, and .ci/tools helm and argocheck")
    with ControlPlane() as plane:
        items = [item for item in template(VALUES, namespace=NAMESPACE) if item["kind"] not in ("Job", "Pod")]
        plane.apply(items)
        yield plane


@pytest.fixture
def as_user(plane, monkeypatch):
    """Gives the cluster as one of its users."""
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))

    def connect(user: str = "ada", namespace: str | None = None) -> Cluster:
        return Cluster.of_kubeconfig(user, namespace)

    return connect


def smoke(*overrides: str) -> Config:
    return compose(["experiment=smoke", *overrides])


def submission(name: str) -> cluster.Submission:
    return cluster.submission(smoke(f"run.name={name}"), "cpu", templates.template_name("cuda-agent", "cpu"))


def send(place: Cluster, name: str) -> cluster.Submission:
    what = submission(name)
    cluster.submit(place, what)
    return what


def command(plane: ControlPlane, *arguments: str, user: str = "ada") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-m", "cuda_agent.cli", *arguments]
    if arguments[0] in ("submit", "sweep", "watch", "logs", "cancel", "resume", "gc") and "--on" not in arguments:
        script += ["--on", user]
    return subprocess.run(script, capture_output=True, text=True, env=environment, timeout=120)


# -------------------------------------------------------------------------------------------------------------- submit


def test_submit_makes_a_workflow_and_the_immutable_config_map_that_it_owns(as_user):
    place = as_user()
    what = send(place, "first")
    workflow, config_map = place.get("Workflow", "first"), place.get("ConfigMap", "first")
    assert config_map["immutable"] is True
    (owner,) = config_map["metadata"]["ownerReferences"]
    assert owner["uid"] == workflow["metadata"]["uid"] and owner["kind"] == "Workflow"
    assert freeze(smoke("run.name=first")) == (
        config_map["data"]["config.json"],
        what.workflow["metadata"]["annotations"]["cuda-agent.io/config"],
    )
    assert set(workflow["spec"]) == {"workflowTemplateRef", "arguments"}
    with pytest.raises(ClusterError, match="immutable"):
        as_user("admin").patch("ConfigMap", "first", {"data": {"config.json": "{}"}})


def test_a_run_names_who_submitted_it_and_takes_no_other_name(plane, as_user):
    place = as_user()
    what = send(place, "named")
    made = place.get("Workflow", "named")
    assert cluster.submitter_of(made) == "ada"
    said = "the annotation cuda-agent.io/submitter names the user"
    for changed in ("eve", None):
        change = {"metadata": {"annotations": {"cuda-agent.io/submitter": changed}}}
        for user, kind in (("ada", "Workflow"), ("admin", "ConfigMap")):
            with pytest.raises(ClusterError, match=said):
                as_user(user).patch(kind, "named", change)
    for item in (what.workflow, what.config_map):
        item["metadata"] |= {"name": "forged", "annotations": {"cuda-agent.io/submitter": "eve"}}
        with pytest.raises(ClusterError, match=said):
            place.create(item, dry_run=True)
    as_user("admin").patch("Workflow", "named", {"metadata": {"labels": {"a": "b"}}})  # Argo changes it, too
    rows = json.loads(command(plane, "runs", "--json", "--on", "ada").stdout)
    assert next(row for row in rows if row["name"] == "named")["submitter"] == "ada"
    (line,) = (line for line in command(plane, "runs", "--on", "ada").stdout.splitlines() if "named" in line)
    assert " ada " in line


def test_a_name_that_is_taken_changes_nothing(as_user):
    place = as_user()
    send(place, "taken")
    before = place.get("Workflow", "taken")["metadata"]["uid"]
    with pytest.raises(ClusterError, match="already exists") as refused:
        send(place, "taken")
    assert refused.value.exit_code == 78 and place.get("Workflow", "taken")["metadata"]["uid"] == before


@pytest.mark.parametrize(
    ("arguments", "user", "said"),
    [
        (["--profile", "tpu"], "ada", "Release cuda-agent has no profile tpu. It has cpu, gpu."),
        (["sandbox.device=cuda"], "ada", "sandboxes of profile cpu have no GPUs. Use --profile gpu."),
        (["--release", "other"], "ada", "There is no release other in namespace kernels"),
        (["--namespace", "nowhere"], "admin", "There is no namespace nowhere in admin"),
        (["--namespace", "default"], "admin", "There is no chart of cuda-agent in namespace default"),
        ([], "mallory", "Ask for the chart's role of submitters"),
        ([], "eve", "refused to create Workflow"),
        (["run.name=Not_A_Name"], "ada", "run.name: on a cluster, expected"),
        ([f"run.name={'a' * 37}"], "ada", "run.name: on a cluster, expected"),
        (["run.nam=a"], "ada", "run.nam: there is no such key"),
    ],
)
def test_a_mistake_is_one_screen_and_nothing_is_created(plane, as_user, arguments, user, said):
    everything = ("get", "workflows,configmaps", "-A", "-o", "name")
    before = plane.kubectl(*everything)
    done = command(plane, "submit", "experiment=smoke", *arguments, user=user)
    assert done.returncode == 78, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 6
    assert plane.kubectl(*everything) == before


def test_a_config_map_that_is_refused_takes_its_workflow_along(plane, as_user):
    """The namespace's quota has room for a Workflow and for no ConfigMap."""
    count = len(json.loads(plane.kubectl("get", "configmaps", "-n", NAMESPACE, "-o", "json"))["items"])
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "full"},
        "spec": {"hard": {"count/configmaps": str(count)}},
    }
    plane.apply([quota])
    hard = {"count/configmaps": str(count)}
    patch = json.dumps({"status": {"hard": hard, "used": hard}})  # no controller counts here
    plane.kubectl(
        "patch", "resourcequota", "full", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", patch
    )
    try:
        with pytest.raises(ClusterError, match="exceeded quota"):
            send(as_user(), "no-room")
        assert as_user().find("Workflow", "no-room") is None
    finally:
        plane.kubectl("delete", "resourcequota", "full", "-n", NAMESPACE)


def test_an_interrupt_takes_along_what_was_made():
    class Place:
        name = namespace = "n"

        def __init__(self) -> None:
            self.there: list[str] = []

        def find(self, kind: str, name: str) -> dict[str, Any]:
            return {"kind": kind, "metadata": {"name": name}}

        def user(self) -> str:
            return "ada"

        def create(self, item: dict[str, Any], dry_run: bool = False) -> dict[str, Any]:
            name = item["metadata"]["name"]
            if dry_run:
                return item
            if (item["kind"], name) == ("ConfigMap", "two"):
                raise KeyboardInterrupt
            self.there.append(name)
            return {"metadata": {"name": name, "uid": name}}

        def delete(self, kind: str, name: str) -> bool:
            self.there = [other for other in self.there if other != name]
            return True

    place: Any = Place()
    with pytest.raises(KeyboardInterrupt):
        cluster.submit(place, *(submission(name) for name in ("one", "two")))
    assert place.there == []


def test_a_cluster_without_argo_and_one_that_is_away_are_said_so(plane, tmp_path):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(plane.kubeconfig.read_text().replace(str(plane.port), "1"))
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "cuda_agent.cli", "submit", "experiment=smoke"],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 75 and "does not answer" in done.stderr and "Traceback" not in done.stderr


def test_without_a_kubeconfig_there_is_a_sentence(tmp_path):
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "cuda_agent.cli", "submit", "experiment=smoke"],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 78 and "kubeconfig" in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_both_objects_and_needs_no_cluster(tmp_path):
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "cuda_agent.cli", "submit", "experiment=smoke", "run.name=dry", "--dry-run", "--json"],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    workflow, config_map = json.loads(done.stdout)
    assert (workflow["kind"], config_map["kind"]) == ("Workflow", "ConfigMap")
    assert workflow["metadata"]["name"] == config_map["metadata"]["name"] == "dry"


# ----------------------------------------------------------------------------------------------------------- admission


def plain(name: str, template: str = "") -> dict[str, Any]:
    what = submission(name).workflow
    if template:
        what["spec"]["workflowTemplateRef"]["name"] = template
    return what


POD = {"name": "p", "container": {"image": "i", "command": ["sh"]}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(podSpecPatch='{"hostNetwork":true}'), "nothing else"),
        (lambda spec: spec.update(serviceAccountName="cuda-agent-operator"), "nothing else"),
        (lambda spec: spec.update(volumes=[{"name": "v", "secret": {"secretName": "s3"}}]), "nothing else"),
        (lambda spec: spec.update(entrypoint="finish"), "nothing else"),
        (lambda spec: spec.update(onExit="finish"), "nothing else"),
        (lambda spec: (spec.pop("workflowTemplateRef"), spec.update(entrypoint="p", templates=[POD])), "nothing else"),
        (lambda spec: spec["workflowTemplateRef"].update(name="elsewhere"), "one of this release's templates"),
        (
            lambda spec: spec["workflowTemplateRef"].update(name="xcuda-agent-cpu-0-1-0"),
            "one of this release's templates",
        ),
        (lambda spec: spec["workflowTemplateRef"].update(clusterScope=True), "one of this release's templates"),
        (lambda spec: spec.pop("workflowTemplateRef"), "one of this release's templates"),
        (
            lambda spec: spec["arguments"]["parameters"].append({"name": "cpu", "value": "1"}),
            "parameters run, config and group",
        ),
        (
            lambda spec: spec["arguments"]["parameters"].append({"name": "group", "value": "{{workflow.uid}}"}),
            "group: expected",
        ),
        (lambda spec: spec["arguments"]["parameters"][0].update(value='a","x":"'), "run: expected"),
        (lambda spec: spec["arguments"]["parameters"][0].update(value="{{workflow.uid}}"), "run: expected"),
        (lambda spec: spec["arguments"]["parameters"][1].update(value="../../cas"), "config: expected"),
        (
            lambda spec: spec["arguments"]["parameters"][0].update(
                valueFrom={"configMapKeyRef": {"name": "a", "key": "b"}}
            ),
            "parameters run, config and group",
        ),
        (lambda spec: spec["arguments"].update(artifacts=[{"name": "a", "raw": {"data": "x"}}]), "takes no artifacts"),
    ],
)
def test_a_workflow_that_is_not_made_from_our_templates_is_refused(as_user, change, said):
    workflow = plain("wrong")
    change(workflow["spec"])
    for user in ("ada", "admin"):  # rights do not help
        with pytest.raises(ClusterError, match=re.escape(said)):
            as_user(user).create(workflow)


def test_the_same_workflow_is_admitted_without_the_change(as_user):
    assert as_user().create(plain("right"), dry_run=True)["metadata"]["name"] == "right"


def test_the_policy_ends_with_the_namespace(as_user):
    """A positive control: elsewhere the same objects are nobody's business."""
    workflow = plain("elsewhere", "anything")
    workflow["spec"]["podSpecPatch"] = "{}"
    assert as_user("admin", "default").create(workflow, dry_run=True)


def test_what_a_workflow_runs_does_not_change_while_it_lives(as_user):
    place = as_user()
    send(place, "lives")
    with pytest.raises(ClusterError, match="cannot be changed"):
        place.patch("Workflow", "lives", {"spec": {"workflowTemplateRef": {"name": "cuda-agent-gpu-0-1-0"}}})
    with pytest.raises(ClusterError, match="nothing else"):
        place.patch("Workflow", "lives", {"spec": {"podSpecPatch": "{}"}})
    assert place.patch("Workflow", "lives", {"spec": {"shutdown": "Stop"}})["spec"]["shutdown"] == "Stop"


def test_a_run_of_cron_without_a_name_is_admitted(as_user):
    workflow = plain("cron-1")
    workflow["spec"]["arguments"]["parameters"][0]["value"] = ""
    assert as_user().create(workflow, dry_run=True)


# --------------------------------------------------------------------------------------------------------------- roles


VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
KINDS = (
    "workflows.argoproj.io", "workflowtemplates.argoproj.io", "workflowtaskresults.argoproj.io", "pods", "pods/log",
    "pods/exec", "pods/portforward", "secrets", "configmaps", "services", "statefulsets.apps", "deployments.apps",
    "networkpolicies.networking.k8s.io", "namespaces", "serviceaccounts", "roles.rbac.authorization.k8s.io",
    "rayjobs.ray.io", "rayclusters.ray.io",
)  # fmt: skip
ROLES = {
    "ada": "cuda-agent-submitter",
    "eve": "cuda-agent-viewer",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-operator": "cuda-agent-operator",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-collector": "cuda-agent-collector",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-executor": "cuda-agent-executor",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-ray": "cuda-agent-ray",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-stage": None,
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-sandbox": None,
    "mallory": None,
}


@pytest.mark.parametrize("who", ROLES)
def test_every_verb_that_a_role_does_not_list_is_refused(plane, as_user, who):
    role = ROLES[who]
    rules = of_kind(objects(VALUES), "Role", f"^{role}$")[0]["rules"] if role else []
    listed = {
        (f"{resource}.{group}" if group else resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}"] if ":" in who else []
    client = as_user("admin").client
    for kind in KINDS:
        resource, _, group = kind.partition(".")
        name, _, sub = resource.partition("/")
        for verb in VERBS:
            attributes = {"namespace": NAMESPACE, "verb": verb, "resource": name, "group": group, "subresource": sub}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": who, "groups": groups, "resourceAttributes": attributes},
            }
            answer = client.call_api(
                "/apis/authorization.k8s.io/v1/subjectaccessreviews", "POST", body=review,
                auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
            )  # fmt: skip
            assert json.loads(answer.data)["status"]["allowed"] == ((kind, verb) in listed), (kind, verb)


# --------------------------------------------------------------------------------------------------------------- pools


def base_pools() -> list[dict[str, Any]]:
    (made,) = of_kind(objects(VALUES), "WorkflowTemplate", "-cpu-")
    env = steps(made)["prepare"]["container"]["env"]
    return json.loads(next(item["value"] for item in env if item["name"] == "CUDA_AGENT_POOLS"))


def test_prepares_account_can_make_and_remove_a_runs_pools_and_they_belong_to_the_workflow(plane, as_user):
    send(as_user(), "pooled")
    account = f"system:serviceaccount:{NAMESPACE}:cuda-agent-operator"
    client = as_user("admin")
    client.client.default_headers["Impersonate-User"] = account
    # No controller makes pods here: the sets say themselves that a server is ready.
    for role in pools.ROLES:
        name = f"pooled-{role}"
        status = json.dumps({"status": {"replicas": 1, "readyReplicas": 1, "observedGeneration": 1}})
        made = pools.objects(
            base_pools(), "pooled", client.get("Workflow", "pooled")["metadata"]["uid"], "t" * 20, smoke().sandbox
        )
        for item in made:
            client.create_if_absent(item)
        plane.kubectl(
            "patch", "statefulset", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", status
        )
    servers = run_pools.make_pools(client, base_pools(), "pooled", smoke())
    assert servers == [f"http://pooled-{role}-0.pooled-sandbox:8750" for role in pools.ROLES]
    admin = as_user("admin")
    uid = admin.get("Workflow", "pooled")["metadata"]["uid"]
    for kind, name in [
        ("Secret", "pooled-sandbox"),
        ("NetworkPolicy", "pooled-sandbox"),
        ("StatefulSet", "pooled-build"),
    ]:
        assert admin.get(kind, name)["metadata"]["ownerReferences"][0]["uid"] == uid
    container = admin.get("StatefulSet", "pooled-evaluate")["spec"]["template"]["spec"]["containers"][0]
    assert 'sandbox.clock="model"' in container["args"]
    run_pools.remove_pools(client, "pooled")
    run_pools.remove_pools(client, "pooled")  # again: a retry
    for kind in ("StatefulSet", "Service", "Secret", "NetworkPolicy"):
        assert not [item for item in admin.all(kind) if item["metadata"]["name"].startswith("pooled-")]


def test_a_pool_that_does_not_become_ready_says_why(plane, as_user, monkeypatch):
    send(as_user(), "starved")
    monkeypatch.setattr(run_pools, "POOL_SECONDS", 0.0)
    with pytest.raises(ClusterError, match="No server of starved-workspace became ready") as error:
        run_pools.make_pools(as_user("admin"), base_pools(), "starved", smoke())
    assert error.value.exit_code == 75 and "it has no pods" in str(error.value)
    run_pools.remove_pools(as_user("admin"), "starved")


def test_a_run_that_is_ended_at_once_while_its_pools_are_made_leaves_none(as_user):
    place, admin = as_user(), as_user("admin")
    send(place, "hasty")
    cluster.cancel(place, cluster.find(place, "hasty"), now=True)  # nothing is there to be removed yet
    with pytest.raises(TryAgain, match="stopped while its servers"):
        run_pools.make_pools(admin, base_pools(), "hasty", smoke())
    for kind in ("StatefulSet", "Service", "Secret", "NetworkPolicy"):
        assert not [item for item in admin.all(kind) if item["metadata"]["name"].startswith("hasty-")]


# ------------------------------------------------------------------------------------------ runs, watch, cancel, resume


def nodes(**phases: str) -> dict[str, Any]:
    began, ended = "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z"
    return {
        f"n{number}": {
            "id": f"n{number}", "name": f"w.{name}", "displayName": name, "type": "Pod", "phase": phase,
            "startedAt": began, "finishedAt": None if phase in ("Pending", "Running") else ended,
        }
        for number, (name, phase) in enumerate(phases.items())
    }  # fmt: skip


def set_status(place: Cluster, name: str, phase: str, **phases: str) -> None:
    """What Argo's controller would write."""
    place.patch("Workflow", name, {"status": {"phase": phase, "nodes": nodes(**phases)}})


def test_an_attempt_gets_a_name_above_all_others_although_argo_removed_the_first():
    assert cluster.next_attempt("train-1", ["train-1"]) == "train-1-r2"
    assert cluster.next_attempt("train-1", ["train-1-r2", "train-1-r3"]) == "train-1-r4"
    assert cluster.next_attempt("train-1", ["train-1-r9", "train-1-r10"]) == "train-1-r11"


def test_a_run_is_found_listed_cancelled_and_resumed(plane, as_user):
    place, admin = as_user(), as_user("admin")
    send(place, "train-1")
    assert cluster.run_of(cluster.find(place, "train-")) == "train-1"
    with pytest.raises(ConfigError, match="there is no such run"):
        cluster.find(place, "nothing")
    with pytest.raises(ConfigError, match="Cancel it first"):
        cluster.resume(place, cluster.find(place, "train-1"))
    set_status(admin, "train-1", "Running", prepare="Succeeded", synthesis="Running")
    done = command(plane, "cancel", "train-1")
    assert done.returncode == 0 and "synthesis" in done.stdout and "resume train-1" in done.stdout
    assert place.get("Workflow", "train-1")["spec"]["shutdown"] == "Stop"
    set_status(admin, "train-1", "Failed", prepare="Succeeded", synthesis="Failed")
    with pytest.raises(ConfigError, match="has ended"):
        cluster.cancel(place, cluster.find(place, "train-1"), now=False)
    done = command(plane, "resume", "train-1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workflow"] == "train-1-r2"
    again, first = place.get("Workflow", "train-1-r2"), place.get("Workflow", "train-1")
    assert again["spec"]["arguments"] == first["spec"]["arguments"] and "shutdown" not in again["spec"]
    assert place.get("ConfigMap", "train-1-r2")["data"] == place.get("ConfigMap", "train-1")["data"]
    rows = json.loads(command(plane, "runs", "--on", "ada", "--json").stdout)
    assert [row["workflow"] for row in rows if row["name"] == "train-1"] == ["train-1", "train-1-r2"]
    set_status(admin, "train-1-r2", "Succeeded", prepare="Succeeded")
    with pytest.raises(ConfigError, match="nothing to go on with"):
        cluster.resume(place, cluster.find(place, "train-1"))


def test_a_search_is_admitted_and_cancelled_and_is_no_run(as_user):
    place = as_user()
    template = searches.template_for(place, "cpu", None, "cpu")
    assert template.name == templates.template_name("cuda-agent", "search-cpu")
    with pytest.raises(ConfigError, match="have no GPUs"):
        searches.template_for(place, "cpu", None, "cuda")
    cluster.submit(place, searches.submission("search-a", "search-a", "cpu", template.name, "{}"))
    assert cluster.submitter_of(searches.newest(place, "search-a")) == "ada"
    assert searches.next_workflow(place, "search-a") == "search-a-r2"
    assert "search-a" not in {cluster.run_of(item) for item in cluster.workflows(place)}
    assert "search-a" not in pod_maintenance.states_of(as_user("admin"))
    cluster.cancel(place, searches.newest(place, "search-a"), now=False)
    assert searches.newest(place, "search-a")["spec"]["shutdown"] == "Terminate", "it has not begun"
    assert searches.newest(place, "search-b") is None and searches.newest(place, "last;") is None


def test_cancel_now_removes_the_pools_that_no_exit_hook_will(as_user):
    place, admin = as_user(), as_user("admin")
    send(place, "at-once")
    uid = admin.get("Workflow", "at-once")["metadata"]["uid"]
    for item in pools.objects(base_pools(), "at-once", uid, "t" * 20, smoke().sandbox):
        admin.create(item)
    cluster.cancel(place, cluster.find(place, "at-once"), now=True)
    assert place.get("Workflow", "at-once")["spec"]["shutdown"] == "Terminate"
    assert not [item for item in place.all("StatefulSet") if item["metadata"]["name"].startswith("at-once")]


def test_watch_shows_the_stages_and_ends_with_the_run(plane, as_user):
    admin = as_user("admin")
    send(as_user(), "watched")
    set_status(admin, "watched", "Succeeded", prepare="Succeeded", synthesis="Skipped", bootstrap="Succeeded")
    done = command(plane, "watch", "watched")
    assert done.returncode == 0, done.stderr
    assert "synthesis: cached" in done.stdout and "bootstrap: done (5.0 s)" in done.stdout
    assert "run watched: succeeded" in done.stdout
    send(as_user(), "watched-2")
    set_status(admin, "watched-2", "Failed", prepare="Succeeded", synthesis="Failed")
    assert command(plane, "watch", "watched-2").returncode == 1


def test_a_viewer_sees_why_a_pod_does_not_start(as_user):
    """A secret that is missing is told by an event only."""
    admin = as_user("admin")
    send(as_user(), "hindered")
    set_status(admin, "hindered", "Running", prepare="Pending", synthesis="Pending")
    name = "hindered-prepare-12"
    about = {"name": name, "labels": {"workflows.argoproj.io/workflow": "hindered"}}
    about["annotations"] = {"workflows.argoproj.io/node-name": "hindered.prepare(0)"}
    spec = {"containers": [{"name": "main", "image": "i"}]}
    admin.create({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})
    facts = {"type": "Warning", "reason": "FailedMount", "message": 'secret "s3" not found'}
    facts["involvedObject"] = {"kind": "Pod", "namespace": NAMESPACE, "name": name}
    admin.create(
        {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{name}.1", "namespace": NAMESPACE}} | facts
    )
    workflow = as_user("eve").get("Workflow", "hindered")
    found = cluster.delays(as_user("eve"), workflow, cluster.views(workflow))
    assert found == {"prepare": ('secret "s3" not found', False)}


def test_logs_of_a_pod_that_is_gone_are_asked_of_mlflow(plane, as_user):
    send(as_user(), "silent")
    done = command(plane, "logs", "silent", "agentic")
    assert done.returncode == 78 and "No mlflow of the chart runs in namespace kernels" in done.stderr
    assert "Traceback" not in done.stderr
    done = command(plane, "logs", "silent", "agentics")
    assert done.returncode == 78 and "agentics: there is no such stage" in done.stderr


def test_a_release_without_mlflow_says_so(as_user, plane):
    place = as_user("admin")
    names = [about["name"] for about in place.metadata("WorkflowTemplate", templates.PROFILE_LABEL)]

    def tracked_by(uri: str) -> None:
        for name in names:
            change = {"metadata": {"annotations": {"cuda-agent.io/mlflow": uri}}}
            place.patch("WorkflowTemplate", name, change)

    try:
        for uri, said in (("off", "has no MLflow"), ("http://mlflow.test.invalid:5000", "does not answer")):
            tracked_by(uri)
            done = command(plane, "report", "nobody", "--on", "ada")
            assert done.returncode in (75, 78) and said in done.stderr and "Traceback" not in done.stderr
    finally:
        tracked_by("http://cuda-agent-mlflow:5000")


def test_every_stage_of_the_graph_is_on_the_screen():
    shown = [view.name for view in cluster.views({"status": {}})]
    assert shown == ["prepare", *(stage.name for stage in ROWS), "finish"]


def test_a_stage_that_is_tried_again_shows_its_attempt():
    workflow = {
        "status": {
            "nodes": {
                "g": {"displayName": "rft", "type": "Retry", "phase": "Running", "startedAt": "2026-01-01T00:00:00Z"},
                "a": {
                    "displayName": "rft(0)", "type": "Pod", "phase": "Failed", "message": "Error (exit code 75)",
                    "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:05Z",
                },
            }
        }
    }  # fmt: skip
    view = next(view for view in cluster.views(workflow) if view.name == "rft")
    assert (view.state, view.attempt, view.notes) == ("retry", 1, ["Error (exit code 75)"])


# --------------------------------------------------------------------------------------------------------------- sweeps


def workflows_of(place: Cluster, sweep: str) -> list[dict[str, Any]]:
    found = place.all("Workflow", f"cuda-agent.io/sweep={sweep}")
    return sorted(found, key=lambda item: item["metadata"]["name"])


def group_of(workflow: dict[str, Any]) -> str | None:
    values = {item["name"]: item["value"] for item in workflow["spec"]["arguments"]["parameters"]}
    return values.get("group")


def test_a_sweep_makes_a_run_of_every_combination_and_says_where_it_belongs(plane, as_user):
    done = command(
        plane, "sweep", "experiment=smoke", "run.name=grid", "critic.lr=1e-5,3e-5", "seed=range(3)", "--json"
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["sweep"] == "grid" and len(said["runs"]) == 6 and said["namespace"] == NAMESPACE
    place = as_user()
    found = workflows_of(place, "grid")
    assert [item["metadata"]["name"] for item in found] == [f"grid-{number}" for number in range(1, 7)]
    assert {group_of(item) for item in found} == {None}
    configs = [json.loads(place.get("ConfigMap", f"grid-{n}")["data"]["config.json"]) for n in range(1, 7)]
    assert {(item["critic"]["lr"], item["seed"]) for item in configs} == {
        (r, s) for r in (1e-5, 3e-5) for s in range(3)
    }
    assert {item["run"]["sweep"] for item in configs} == {"grid"}
    rows = json.loads(command(plane, "runs", "--on", "ada", "--json").stdout)
    assert {row["name"] for row in rows if row["sweep"] == "grid"} == {f"grid-{n}" for n in range(1, 7)}
    assert "sweep grid: 6 runs (6 pending)" in command(plane, "runs", "--on", "ada").stdout


def test_a_sweep_with_a_limit_has_so_many_lanes_and_a_resumed_run_stays_in_its_own(plane, as_user):
    done = command(plane, "sweep", "experiment=smoke", "run.name=few", "seed=range(5)", "--parallel", "2")
    assert done.returncode == 0, done.stderr
    place = as_user()
    groups = [group_of(item) for item in workflows_of(place, "few")]
    assert groups == ["few-group-1", "few-group-2", "few-group-1", "few-group-2", "few-group-1"]
    set_status(as_user("admin"), "few-2", "Failed", prepare="Failed")
    assert command(plane, "resume", "few-2").returncode == 0
    again = place.get("Workflow", "few-2-r2")
    assert group_of(again) == "few-group-2" and again["metadata"]["labels"]["cuda-agent.io/sweep"] == "few"


@pytest.mark.parametrize(
    ("arguments", "user", "said"),
    [
        (["seed=1,x"], "ada", "seed: expected a whole number"),
        (["seed=1,2", "--profile", "tpu"], "ada", "has no profile tpu"),
        (["seed=1,2", "--release", "other"], "ada", "There is no release other"),
        (["seed=1,2", "sandbox.device=cuda"], "ada", "have no GPUs"),
        (["seed=1,2"], "eve", "refused to create Workflow"),
        (["seed=1,2"], "mallory", "Ask for the chart's role of submitters"),
        (["seed=1,2", "run.name=Not_A_Name"], "ada", "run.name: on a cluster, expected"),
        (["seed=range(10)", f"run.name={'a' * 34}"], "ada", "run.name: on a cluster, expected"),
        (["seed=1,2", "--parallel", "0"], "ada", "--parallel"),
    ],
)
def test_a_mistake_in_a_sweep_creates_nothing(plane, arguments, user, said):
    everything = ("get", "workflows,configmaps", "-A", "-o", "name")
    before = plane.kubectl(*everything)
    done = command(plane, "sweep", "experiment=smoke", *arguments, user=user)
    assert done.returncode in (78, 2) and said in done.stderr and "Traceback" not in done.stderr
    assert plane.kubectl(*everything) == before


def test_a_sweep_whose_second_run_is_refused_takes_the_first_one_along(plane, as_user):
    """The name of the second is taken, which only its own creation finds out."""
    send(as_user(), "half-2")
    done = command(plane, "sweep", "experiment=smoke", "run.name=half", "seed=1,2")
    assert done.returncode == 78 and "half-2" in done.stderr and "already exists" in done.stderr
    assert as_user().find("Workflow", "half-1") is None and as_user().find("Workflow", "half-2") is not None


# ---------------------------------------------------------------------------------------------------- where a run lives


def at_home(plane: ControlPlane, folder: Path, *arguments: str, current: bool = True) -> Any:
    """A command in a folder of its own, with ada's cluster as the current one or with none."""
    folder.mkdir(exist_ok=True)
    kubeconfig = str(plane.kubeconfig) if current else str(folder / "none")
    environment = os.environ | {"KUBECONFIG": kubeconfig, "PYTHONPATH": str(ROOT), "CUDA_AGENT_HOME": str(folder)}
    environment["PYTHONWARNINGS"] = "ignore"  # of the test server's certificate
    environment.pop("CUDA_AGENT_STORE", None)
    script = [sys.executable, "-m", "cuda_agent.cli", *arguments]
    return subprocess.run(script, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)


def local_run(folder: Path, name: str) -> None:
    from cuda_agent.pipeline import runs
    from cuda_agent.storage import open_store

    config = smoke(f"run.name={name}")
    text, sha256 = freeze(config)
    store = open_store(folder / ".cuda-agent" / "store")
    store.put(f"configs/{sha256}.json", text.encode())
    runs.create_run(store, config, sha256)
    store.put(f"runs/{name}/synthesis/log.txt", b"one\ntwo\n")


def test_a_run_is_looked_for_here_first_and_then_on_the_current_cluster(plane, as_user, tmp_path):
    folder = tmp_path / "here"
    local_run(folder, "mine")
    send(as_user(), "theirs")
    done = at_home(plane, folder, "logs", "mine")
    assert (done.returncode, done.stdout) == (0, "synthesis: one\nsynthesis: two\n"), done.stderr
    assert at_home(plane, folder, "logs", "last", "synthesis").stdout == "one\ntwo\n"
    lines = at_home(plane, folder, "logs", "mine", "synthesis", "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {"stage": "synthesis", "line": "one"}
    done = at_home(plane, folder, "logs", "theirs", "agentic")
    assert done.returncode == 78 and "No mlflow of the chart runs in namespace kernels" in done.stderr
    done = at_home(plane, folder, "logs", "theirs", "agentic", "--on", "local")
    assert done.returncode == 78 and "run theirs: there is no such run" in done.stderr and "kernels" not in done.stderr
    done = at_home(plane, folder, "logs", "mine", "agentic")
    assert done.returncode == 78 and "it has not run" in done.stderr


def test_runs_lists_the_store_where_there_is_one_and_else_the_current_cluster(plane, as_user, tmp_path):
    folder = tmp_path / "here"
    local_run(folder, "mine")
    send(as_user(), "listed")
    assert [row["name"] for row in json.loads(at_home(plane, folder, "runs", "--json").stdout)] == ["mine"]
    names = [row["name"] for row in json.loads(at_home(plane, tmp_path / "empty", "runs", "--json").stdout)]
    assert "listed" in names and "mine" not in names
    assert "listed" in at_home(plane, folder, "runs", "--on", ".").stdout


def test_a_run_that_is_nowhere_is_said_so_of_both_places(plane, tmp_path):
    local_run(tmp_path / "here", "mine")
    for command_name in ("report", "logs"):
        done = at_home(plane, tmp_path / "here", command_name, "nowhere", *(["agentic"] * (command_name == "logs")))
        assert done.returncode in (75, 78) and "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 5
    done = at_home(plane, tmp_path / "here", "diff", "mine", "nowhere", current=False)
    assert done.returncode == 78 and "run nowhere: there is no such run in" in done.stderr
    done = at_home(plane, tmp_path / "none", "runs", current=False)
    assert done.returncode == 75 and "There is no store" in done.stderr and not (tmp_path / "none/.cuda-agent").exists()
    done = at_home(plane, tmp_path / "here", "runs", "--on", "nobody")
    assert done.returncode == 78 and "There is no context nobody" in done.stderr


def test_cancel_and_watch_speak_json(plane, as_user):
    send(as_user(), "spoken")
    done = command(plane, "cancel", "spoken", "--json")
    assert json.loads(done.stdout) == {"run": "spoken", "stopping": [], "now": False}
    set_status(as_user("admin"), "spoken", "Failed", prepare="Failed")
    done = command(plane, "watch", "spoken", "--json")
    first, *_, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 75 and first["stages"][0]["stage"] == "prepare"
    assert last == {"run": "spoken", "status": "failed", "stopped": True, "message": ""}


# --------------------------------------------------------------------------------------------------------- maintenance


def job_workflows(place: Cluster) -> list[dict[str, Any]]:
    return place.all("Workflow", maintenance.JOB_LABEL)


def answered(place: Cluster, phase: str, value: Any = None, message: str = "") -> threading.Thread:
    """Plays Argo and the pod for the next job: it ends so, with this answer."""

    def play() -> None:
        deadline = time.monotonic() + 60
        while not (found := job_workflows(place)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        outputs = {"parameters": [{"name": "answer", "value": json.dumps(value)}]} if value is not None else None
        node = {"id": "n", "name": "n", "displayName": "n", "type": "Pod", "phase": phase, "message": message}
        status = {"phase": phase, "nodes": {"n": node | ({"outputs": outputs} if outputs else {})}}
        place.patch("Workflow", found[0]["metadata"]["name"], {"status": status | {"message": message}})

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def test_gc_on_a_cluster_asks_a_pod_of_the_chart_and_leaves_no_workflow(plane, as_user):
    found = {"runs": ["old"], "objects": 3, "bytes": 2**20, "pools": ["p"], "config maps": [], "removed": False}
    found["pinned"] = ["best"]
    pod_of_gc = answered(as_user("admin"), "Succeeded", found)
    done = command(plane, "gc", "--dry-run")
    pod_of_gc.join()
    assert done.returncode == 0, done.stderr
    assert "run old" in done.stdout and "pool p" in done.stdout and "3 objects, 1.0 MiB would be removed" in done.stdout
    assert "pinned, so kept: best" in done.stdout
    assert job_workflows(as_user()) == []


def test_a_second_gc_says_try_again(plane, as_user):
    pod_of_gc = answered(as_user("admin"), "Succeeded", {"busy": "Another collection is under way."})
    done = command(plane, "gc", "--json")
    pod_of_gc.join()
    assert done.returncode == 75 and "Another collection is under way. Nothing was removed." in done.stderr


def test_a_run_is_pinned_by_a_pod_of_the_chart_that_is_told_its_name(plane, as_user):
    send(as_user(), "treasure")
    told = answered(as_user("admin"), "Succeeded", {"run": "treasure", "pinned": True})
    done = command(plane, "pin", "treas", "--on", "ada")
    told.join()
    assert (done.returncode, done.stdout) == (0, "run treasure is pinned\n"), done.stderr
    told = answered(as_user("admin"), "Succeeded", {"error": "run gone: there is no such run in s3://b."})
    done = command(plane, "pin", "gone", "--remove", "--on", "ada")
    told.join()
    assert done.returncode == 78 and "run gone: there is no such run in s3://b." in done.stderr
    assert job_workflows(as_user()) == []


def test_a_job_whose_pod_fails_says_why_and_leaves_no_workflow(plane, as_user):
    pod_of_gc = answered(as_user("admin"), "Failed", message="Error (exit code 1)")
    done = command(plane, "gc")
    pod_of_gc.join()
    assert done.returncode == 75 and "gc ended without an answer: Error (exit code 1)" in done.stderr
    assert job_workflows(as_user()) == []


def test_a_job_that_does_not_start_is_given_up(as_user, monkeypatch):
    monkeypatch.setattr(maintenance, "START_SECONDS", 0.0)
    with pytest.raises(ClusterError, match="The pod of doctor did not start in 0 s"):
        maintenance.ask(as_user(), "cuda-agent", "doctor")
    assert job_workflows(as_user()) == []


@pytest.mark.parametrize(
    ("arguments", "user", "said"),
    [
        (["--keep", "3"], "ada", "its values gc.keep and gc.days"),
        ([], "eve", "refused to create Workflow"),
        (["--release", "other"], "ada", "There is no release other"),
        (["--namespace", "default"], "admin", "There is no chart of cuda-agent"),
        (["--on", "nobody"], "ada", "There is no context nobody"),
    ],
)
def test_a_mistake_in_gc_is_one_screen_and_creates_nothing(plane, as_user, arguments, user, said):
    done = command(plane, "gc", *arguments, user=user)
    assert done.returncode == 78 and said in done.stderr and "Traceback" not in done.stderr
    assert job_workflows(as_user()) == []


def job(name):
    """A Workflow of the template ``gc-plan``, as the command makes it."""
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name, "labels": {maintenance.JOB_LABEL: "gc-plan"}},
        "spec": {"workflowTemplateRef": {"name": templates.template_name("cuda-agent", "gc-plan")}},
    }


def test_argo_may_write_into_a_job_and_users_may_not_give_it_arguments(plane, as_user):
    """Argo writes `arguments: {}` into what had none."""
    place = as_user()
    place.create(job("gc-plan-2"))
    try:
        assert place.patch("Workflow", "gc-plan-2", {"spec": {"arguments": {}}})["spec"]["arguments"] == {}
        given = {"arguments": {"parameters": [{"name": "run", "value": "a"}]}}
        with pytest.raises(ClusterError, match="cannot be changed"):
            place.patch("Workflow", "gc-plan-2", {"spec": given})
    finally:
        place.delete("Workflow", "gc-plan-2")


def test_maintenance_jobs_are_no_runs(plane, as_user):
    place = as_user()
    place.create(job("gc-plan-1"))
    try:
        assert "gc-plan-1" not in command(plane, "runs", "--on", "ada").stdout
    finally:
        place.delete("Workflow", "gc-plan-1")


def as_account(as_user, name: str) -> Cluster:
    client = as_user("admin")
    client.client.default_headers["Impersonate-User"] = f"system:serviceaccount:{NAMESPACE}:cuda-agent-{name}"
    return client


def test_the_collector_finds_and_removes_what_workflows_have_left_behind(as_user, tmp_path):
    place, admin, collector = as_user(), as_user("admin"), as_account(as_user, "collector")
    for name in ("lives", "has-ended"):
        if place.find("Workflow", f"pool-{name}") is None:
            send(place, f"pool-{name}")
    set_status(admin, "pool-lives", "Running", prepare="Running")
    set_status(admin, "pool-has-ended", "Failed", prepare="Failed")
    for name in ("pool-lives", "pool-has-ended", "pool-gone"):
        for item in pools.objects(base_pools(), name, "0" * 8, "t" * 20, smoke().sandbox):
            admin.create_if_absent(item)
    served = smoke("policy.engine=vllm", "policy.vllm.sync=nccl")
    for item in engines.objects(rendered(objects(ALONE)), "engine-gone", "0" * 8, served):
        assert as_account(as_user, "operator").create_if_absent(item), "by the account that makes them, strictly"
    labels = {cluster.RUN_LABEL: "map-gone"}
    admin.create_if_absent(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "map-gone", "labels": labels}, "data": {}}
    )
    try:
        left, maps = pod_maintenance.leftovers(collector)
        assert {"pool-has-ended", "pool-gone", "engine-gone"} <= set(left) and "pool-lives" not in left
        assert "map-gone" in maps and "pool-has-ended" not in maps
        here = pod.PodEnvironment(str(tmp_path / "store"), "off", tmp_path / "c", tmp_path / "plan", tmp_path)
        planned = pod_maintenance.collect(here, 10, 7.0, True, collector)
        assert planned["removed"] is False and admin.find("Secret", "pool-gone-sandbox") is not None
        assert pod_maintenance.states_of(collector)["pool-lives"] == "Running"
        done = pod_maintenance.collect(here, 10, 7.0, False, collector)
        assert done["removed"] and "pool-gone" in done["pools"] and "map-gone" in done["config maps"]
        assert admin.find("Secret", "pool-lives-sandbox") is not None, "a run under way keeps its servers"
        set_status(admin, "pool-lives", "Succeeded", prepare="Succeeded")
        assert "pool-lives" in pod_maintenance.collect(here, 10, 7.0, False, collector)["pools"]
        for kind in ("StatefulSet", "Service", "Secret", "NetworkPolicy"):
            assert not [i for i in admin.all(kind) if i["metadata"]["name"].startswith(("pool-", "engine-gone"))]
        assert admin.find("ConfigMap", "map-gone") is None and admin.find("ConfigMap", "pool-has-ended") is not None
    finally:
        for name in ("pool-lives", "pool-has-ended", "pool-gone"):
            run_pools.remove_pools(admin, name)


def test_the_doctors_sandbox_is_a_runs_sandbox_but_for_what_it_runs(plane, as_user, monkeypatch):
    """No kubelet is here: its status is played, and what was made is looked at."""
    send(as_user(), "asked")
    operator, admin = as_account(as_user, "operator"), as_user("admin")
    made: dict[str, dict[str, Any]] = {}

    def play() -> None:
        deadline = time.monotonic() + 60
        while (found := admin.find("StatefulSet", "asked-workspace")) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        made["server"] = found
        made["policy"] = admin.get("NetworkPolicy", "asked-sandbox")
        template = found["spec"]["template"]
        spec = template["spec"]
        admin.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "asked-workspace-0", **template["metadata"]},
                "spec": spec,
            }
        )
        said = json.dumps({"reached": {"10.0.0.1:443": "timed out"}, "processes": "8 processes"})
        ended = {"exitCode": 0, "message": said, "containerID": "a"}
        state = {"name": "sandbox", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
        status = {"containerStatuses": [state | {"state": {"terminated": ended}}]}
        plane.kubectl(
            "patch", "pod", "asked-workspace-0", "-n", NAMESPACE, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": status}),
        )  # fmt: skip

    playing = threading.Thread(target=play)
    playing.start()
    found = pod_maintenance.from_sandbox(operator, "asked", base_pools(), ["10.0.0.1:443"])
    playing.join()
    plane.kubectl("delete", "pod", "asked-workspace-0", "-n", NAMESPACE, "--force", "--grace-period=0")
    assert found == {"reached": {"10.0.0.1:443": "timed out"}, "processes": "8 processes"}
    container = made["server"]["spec"]["template"]["spec"]["containers"][0]
    wanted = next(item for item in base_pools() if item["metadata"]["name"] == "RUN-workspace")
    original = wanted["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["pod", "reach", "10.0.0.1:443"] and container["image"] == original["image"]
    assert container["securityContext"] == original["securityContext"]
    assert made["server"]["spec"]["template"]["metadata"]["labels"]["cuda-agent.io/run"] == "asked"
    assert made["policy"]["spec"].get("egress", []) == []
    for kind, name in (("StatefulSet", "asked-workspace"), ("NetworkPolicy", "asked-sandbox")):
        assert admin.find(kind, name) is None


# --------------------------------------------------------------------------------------------------------------- doctor


def doctor(plane: ControlPlane, user: str, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = command(plane, "doctor", user, "--json", *arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, {item["name"]: item for item in json.loads(done.stdout)}


def test_doctor_sees_what_a_submitter_sees_and_believes_the_inside(plane, as_user):
    inside = [{"name": "store", "ok": True, "text": "written", "mend": ""}]
    plane.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    try:
        pod_of_doctor = answered(as_user("admin"), "Succeeded", inside)
        code, found = doctor(plane, "ada")
        pod_of_doctor.join()
        assert code == 0, [item for item in found.values() if not item["ok"]]
        assert "full definitions of version 3.6 or 3.7" in found["argo"]["text"]
        assert "profiles cpu, gpu (1 GPUs)" in found["chart"]["text"] and found["store"]["text"] == "written"
        assert found["pod security"]["text"] == "restricted" and "default-deny" in found["policies"]["text"]
        assert found["gpus"]["text"] == "you may not list nodes" and job_workflows(as_user()) == []
        inside[0]["ok"] = False
        pod_of_doctor = answered(as_user("admin"), "Succeeded", inside)
        code, found = doctor(plane, "admin")
        pod_of_doctor.join()
        assert code == 1 and not found["store"]["ok"] and "0 nodes" in found["gpus"]["text"]
    finally:
        plane.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce-")


def test_doctor_says_what_is_missing_and_what_mends_it(plane, as_user):
    code, found = doctor(plane, "eve")
    assert code == 1 and "create workflows" in found["rights"]["text"] and "submitters" in found["rights"]["mend"]
    assert "kubectl label namespace" in found["pod security"]["mend"]
    assert found["inside"]["mend"] == "fix rights first" and job_workflows(as_user()) == []
    code, found = doctor(plane, "mallory")
    assert code == 1 and not found["chart"]["ok"] and not found["rights"]["ok"]
    code, found = doctor(plane, "admin", "--namespace", "default")
    assert code == 1 and "helm install" in found["chart"]["mend"] and not found["policies"]["ok"]
    code, found = doctor(plane, "ada", "--release", "other")
    assert code == 1 and "There is no release other" in found["chart"]["text"]


def test_doctor_finds_a_chart_of_another_version_and_one_without_argo(as_user, plane, monkeypatch):
    monkeypatch.setattr(templates, "own_version", lambda: "9.9.9")
    found = {check.name: check for check in cluster_doctor.examine(as_user(), "cuda-agent")}
    assert not found["chart"].ok and "and this command 9.9.9" in found["chart"].text
    monkeypatch.setattr(cluster_doctor, "_ARGO", "argoproj.example/v1")
    found = {check.name: check for check in cluster_doctor.examine(as_user(), "cuda-agent")}
    assert not found["argo"].ok and "install Argo Workflows" in found["argo"].mend


def test_doctor_of_a_cluster_that_is_away_is_one_line(tmp_path, plane):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(plane.kubeconfig.read_text().replace(str(plane.port), "1"))
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-m", "cuda_agent.cli", "doctor", "."]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1 and "does not answer" in done.stdout and done.stdout.count("✗") == 1
