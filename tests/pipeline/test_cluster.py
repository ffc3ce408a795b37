"""The commands against a real API server: what they create, what admission and roles refuse, what a person reads."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cuda_agent.config import Config, ConfigError, compose, freeze
from cuda_agent.pipeline import cluster, pod, pools
from cuda_agent.pipeline.cluster_api import Cluster, ClusterError
from cuda_agent.pipeline.graph import STAGES
from cuda_agent.stages.context import TryAgain
from tests.pipeline.charts import ALONE, HELM, ROOT, merged, objects, of_kind
from tests.pipeline.control_plane import MISSING, NAMESPACE, ControlPlane

pytestmark = pytest.mark.skipif(
    MISSING or HELM is None, reason="no kube-apiserver: tests/cluster builds it, and .ci/tools helm and argocheck"
)
VALUES = merged(
    ALONE,
    {
        "fullnameOverride": "cuda-agent",
        "access": {
            "submitters": [{"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}],
            "viewers": [{"kind": "User", "name": "eve", "apiGroup": "rbac.authorization.k8s.io"}],
        },
        "monitoring": {"serviceMonitor": False, "alerts": False},
    },
)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane with the chart's objects."""
    from tests.pipeline.charts import template

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


def send(place: Cluster, name: str, profile: str = "cpu") -> cluster.Submission:
    what = cluster.submission(smoke(f"run.name={name}"), profile, "cuda-agent")
    cluster.submit(place, what)
    return what


def command(plane: ControlPlane, *arguments: str, user: str = "ada") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-m", "cuda_agent.cli", *arguments]
    if arguments[0] in ("submit", "watch", "logs", "cancel", "resume"):
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


def test_a_name_that_is_taken_changes_nothing(as_user):
    place = as_user()
    send(place, "taken")
    before = place.get("Workflow", "taken")["metadata"]["uid"]
    with pytest.raises(ClusterError, match="already exists") as refused:
        send(place, "taken")
    assert refused.value.code == 78 and place.get("Workflow", "taken")["metadata"]["uid"] == before


@pytest.mark.parametrize(
    ("arguments", "user", "said"),
    [
        (["--profile", "tpu"], "ada", "There is no template cuda-agent-tpu"),
        (["--release", "other"], "ada", "which must be that of this command"),
        (["--namespace", "default"], "admin", "There is no chart of cuda-agent in namespace default"),
        ([], "mallory", "Ask for the chart's role of submitters"),
        ([], "eve", "refused to create Workflow"),
        (["run.name=Not_A_Name"], "ada", "run.name: on a cluster, expected"),
        ([f"run.name={'a' * 37}"], "ada", "run.name: on a cluster, expected"),
        (["run.nam=a"], "ada", "run.nam: there is no such key"),
    ],
)
def test_a_mistake_is_one_screen_and_nothing_is_created(plane, as_user, arguments, user, said):
    everything = [("get", kind, "-A", "-o", "name") for kind in ("workflows", "configmaps")]
    before = [plane.kubectl(*query) for query in everything]
    done = command(plane, "submit", "experiment=smoke", *arguments, user=user)
    assert done.returncode == 78, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 6
    assert [plane.kubectl(*query) for query in everything] == before


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
    what = cluster.submission(smoke(f"run.name={name}"), "cpu", "cuda-agent").workflow
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
            "parameters run and config",
        ),
        (lambda spec: spec["arguments"]["parameters"][0].update(value='a","x":"'), "run: expected"),
        (lambda spec: spec["arguments"]["parameters"][0].update(value="{{workflow.uid}}"), "run: expected"),
        (lambda spec: spec["arguments"]["parameters"][1].update(value="../../cas"), "config: expected"),
        (
            lambda spec: spec["arguments"]["parameters"][0].update(
                valueFrom={"configMapKeyRef": {"name": "a", "key": "b"}}
            ),
            "parameters run and config",
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
    with pytest.raises(ClusterError, match="does not change while it lives"):
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
    "networkpolicies.networking.k8s.io", "serviceaccounts", "roles.rbac.authorization.k8s.io",
)  # fmt: skip
ROLES = {
    "ada": "cuda-agent-submitter",
    "eve": "cuda-agent-viewer",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-operator": "cuda-agent-operator",
    f"system:serviceaccount:{NAMESPACE}:cuda-agent-executor": "cuda-agent-executor",
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
    prepare = next(item for item in made["spec"]["templates"] if item["name"] == "prepare")
    return json.loads(next(item["value"] for item in prepare["container"]["env"] if item["name"] == "CUDA_AGENT_POOLS"))


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
    servers = pod.make_pools(client, base_pools(), "pooled", smoke())
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
    pod.remove_pools(client, "pooled")
    pod.remove_pools(client, "pooled")  # again: a retry
    for kind in ("StatefulSet", "Service", "Secret", "NetworkPolicy"):
        assert not [item for item in admin.all(kind) if item["metadata"]["name"].startswith("pooled-")]


def test_a_pool_that_does_not_become_ready_says_why(plane, as_user, monkeypatch):
    send(as_user(), "starved")
    monkeypatch.setattr(pod, "POOL_SECONDS", 0.0)
    with pytest.raises(ClusterError, match="No server of starved-workspace became ready") as error:
        pod.make_pools(as_user("admin"), base_pools(), "starved", smoke())
    assert error.value.code == 75 and "it has no pods" in str(error.value)
    pod.remove_pools(as_user("admin"), "starved")


def test_a_run_that_is_ended_at_once_while_its_pools_are_made_leaves_none(as_user):
    place, admin = as_user(), as_user("admin")
    send(place, "hasty")
    cluster.cancel(place, "hasty", now=True)  # nothing is there to be removed yet
    with pytest.raises(TryAgain, match="stopped while its servers"):
        pod.make_pools(admin, base_pools(), "hasty", smoke())
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


def test_a_run_is_found_listed_cancelled_and_resumed(plane, as_user):
    place, admin = as_user(), as_user("admin")
    send(place, "train-1")
    assert cluster.run_of(cluster.find(place, "train-")) == "train-1"
    with pytest.raises(ConfigError, match="there is no such run"):
        cluster.find(place, "nothing")
    with pytest.raises(ConfigError, match="Cancel it first"):
        cluster.resume(place, "train-1")
    set_status(admin, "train-1", "Running", prepare="Succeeded", synthesis="Running")
    done = command(plane, "cancel", "train-1")
    assert done.returncode == 0 and "synthesis" in done.stdout and "resume train-1" in done.stdout
    assert place.get("Workflow", "train-1")["spec"]["shutdown"] == "Stop"
    set_status(admin, "train-1", "Failed", prepare="Succeeded", synthesis="Failed")
    with pytest.raises(ConfigError, match="has ended"):
        cluster.cancel(place, "train-1", now=False)
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
        cluster.resume(place, "train-1")


def test_cancel_now_removes_the_pools_that_no_exit_hook_will(as_user):
    place, admin = as_user(), as_user("admin")
    send(place, "at-once")
    uid = admin.get("Workflow", "at-once")["metadata"]["uid"]
    for item in pools.objects(base_pools(), "at-once", uid, "t" * 20, smoke().sandbox):
        admin.create(item)
    cluster.cancel(place, "at-once", now=True)
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


def test_watch_says_why_a_pod_does_not_start(as_user):
    admin = as_user("admin")
    send(as_user(), "hindered")
    set_status(admin, "hindered", "Running", prepare="Pending", synthesis="Pending")
    for name in ("hindered-prepare-12", "hindered-2-synthesis-12"):
        about = {"kind": "Pod", "namespace": NAMESPACE, "name": name}
        message = f'secret "s3" of {name} not found'
        metadata = {"name": f"{name}.1", "namespace": NAMESPACE}
        facts = {"involvedObject": about, "type": "Warning", "reason": "FailedMount", "message": message}
        admin.create({"apiVersion": "v1", "kind": "Event", "metadata": metadata} | facts)
    workflow = as_user("eve").get("Workflow", "hindered")
    shown = {view.name: view for view in cluster.views(workflow)}
    cluster.explain(as_user("eve"), workflow, list(shown.values()))
    assert shown["prepare"].notes[-1] == 'secret "s3" of hindered-prepare-12 not found'
    assert not shown["synthesis"].notes


def test_logs_of_a_pod_that_is_gone_say_where_they_are(plane, as_user):
    send(as_user(), "silent")
    done = command(plane, "logs", "silent", "agentic")
    assert done.returncode == 78 and "runs/silent/agentic/log.txt" in done.stderr


def test_every_stage_of_the_graph_is_on_the_screen():
    shown = [view.name for view in cluster.views({"status": {}})]
    assert shown == ["prepare", *(stage.name for stage in STAGES), "finish"]


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
