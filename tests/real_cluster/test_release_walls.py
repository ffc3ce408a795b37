"""What stands between a run and the rest of a cluster, tried on a live run of an installed release.

Every test tries the same thing once more with the wall taken away, and then it succeeds.
"""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import pytest
from canaries import leaks, open_bucket
from kubectl import Cluster, pod, wait_for
from probing import SLEEP, Place, address_of, listen, python_pod, reached, without
from release import Release
from runs import ROLES, Held, submission

pytestmark = pytest.mark.cluster

IMAGE = f"localhost/cuda-agent-sandbox:{version('cuda-agent')}"
RUN, WORKFLOW = "cuda-agent.io/run", "workflows.argoproj.io/workflow"
SHARED = {"API server", "API server, at the node", "DNS", "DNS, over TCP", "MinIO", "MLflow"}  # what stages need


def labels(component: str, **more: str) -> dict[str, str]:
    """Of a pod of the release."""
    part = {"name": "cuda-agent", "instance": "cuda-agent", "component": component}
    return {f"app.kubernetes.io/{key}": value for key, value in part.items()} | more


def started(space: Cluster, *pods: dict[str, Any]) -> None:
    for item in pods:
        space.run("delete", "pod", item["metadata"]["name"], "--ignore-not-found", "--now")
    space.create(*pods)
    space.ready(*(item["metadata"]["name"] for item in pods))


@pytest.fixture(scope="module")
def places(held: Held) -> Iterator[dict[str, Place]]:
    """All that a pod might try to reach, a sandbox of another run and a server in another namespace among it."""
    space, other = held.cluster, Cluster(held.cluster.number)
    started(space, python_pod("foreign", IMAGE, listen(8750), labels("sandbox", **{RUN: "another"})))
    started(other, python_pod("outside", IMAGE, listen(8080), {"app": "outside"}))
    yield held.places() | {
        "another run's sandbox": ("tcp", address_of(space, "foreign"), 8750),
        "another namespace": ("tcp", address_of(other, "outside"), 8080),
    }
    space.run("delete", "pod", "foreign", "--now")
    other.run("delete", "pod", "outside", "--now")


def settles(space: Cluster, name: str, places: dict[str, Place], expected: set[str], container: str = "main") -> None:
    """What is reached becomes this: a policy's rules come and go within about a second."""
    seen: list[set[str]] = []

    def look() -> bool:
        seen[:] = [reached(space, name, places, container)]
        return seen[0] == expected

    try:
        wait_for(f"{name} reaches {sorted(expected)}", 40, look)
    except AssertionError:
        assert seen[0] == expected
        raise


# ------------------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize("role", ROLES)
def test_a_sandbox_reaches_nothing_until_the_policies_are_taken_away(
    held: Held, places: dict[str, Place], role: str
) -> None:
    space = held.cluster
    others = {name: place for name, place in places.items() if name != f"its {role}"}
    server = f"{held.name}-{role}-0"
    assert reached(space, server, others, "sandbox") == set()
    with without(space, "networkpolicy"):
        settles(space, server, others, set(others), "sandbox")
    settles(space, server, others, set(), "sandbox")


def test_a_running_stage_reaches_what_it_needs_and_nothing_else(held: Held) -> None:
    assert held.from_stage == SHARED | {f"its {role}" for role in ROLES}


def test_a_stage_reaches_neither_node_nor_other_pods_until_the_policies_are_taken_away(
    held: Held, places: dict[str, Place]
) -> None:
    space = held.cluster
    started(space, python_pod("probe-stage", IMAGE, SLEEP, labels("stage", **{WORKFLOW: held.name})))
    needed = SHARED | {f"its {role}" for role in ROLES}
    settles(space, "probe-stage", places, needed)
    assert set(places) - needed == {"node", "Argo", "another run's sandbox", "another namespace"}
    with without(space, "networkpolicy"):
        settles(space, "probe-stage", places, set(places))
    settles(space, "probe-stage", places, needed)


def test_the_stage_of_another_run_does_not_reach_this_runs_sandboxes(held: Held) -> None:
    space = held.cluster
    servers = {name: place for name, place in held.places().items() if name.startswith("its ")}
    started(space, python_pod("probe-stranger", IMAGE, SLEEP, labels("stage", **{WORKFLOW: "another"})))
    settles(space, "probe-stranger", servers, set())
    space.run("label", "pod", "probe-stranger", "--overwrite", f"{WORKFLOW}={held.name}")
    settles(space, "probe-stranger", servers, set(servers))


def test_a_pod_that_is_none_of_ours_reaches_nothing_in_the_namespace(held: Held, places: dict[str, Place]) -> None:
    space = held.cluster
    started(space, python_pod("probe-nobody", IMAGE, SLEEP, {"app": "nobody"}))
    settles(space, "probe-nobody", places, set())
    space.run("label", "pod", "probe-nobody", *(f"{key}={value}" for key, value in labels("stage").items()))
    settles(space, "probe-nobody", places, SHARED)


def test_neither_stages_nor_sandboxes_hold_a_token_and_a_pod_that_asks_for_one_does(held: Held) -> None:
    space, look = held.cluster, ["--", "ls", "/var/run/secrets/kubernetes.io/serviceaccount"]
    assert "kubernetes.io" not in held.tokens
    for server in held.servers:
        assert space.try_run("exec", server, *look).returncode != 0
    asks = python_pod("probe-token", IMAGE, SLEEP, {"app": "asks"})
    asks["spec"] |= {"serviceAccountName": "cuda-agent-operator", "automountServiceAccountToken": True}
    started(space, asks)
    assert "token" in space.run("exec", "probe-token", *look)


def test_a_sandbox_has_no_secret_in_its_environment_but_its_own_token(held: Held, planted: dict[str, str]) -> None:
    token = base64.b64decode(held.cluster.get("secret", f"{held.name}-sandbox")["data"]["token"]).decode()
    for server in held.servers:
        found = held.cluster.run("exec", server, "--", "python3", "-c", "import os; print(dict(os.environ))")
        assert token in found  # it is the environment of what runs there
        assert "AWS_" not in found and not [name for name, value in planted.items() if value in found]


# ----------------------------------------------------------------------------------------------------------- admission


def container(**security: Any) -> dict[str, Any]:
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return pod("asks", "id", securityContext=locked | security)


def spec(**more: Any) -> dict[str, Any]:
    made = container()
    made["spec"] |= more
    return made


PRIVILEGED = {
    "privileged": container(privileged=True, allowPrivilegeEscalation=True),
    "may gain privileges": container(allowPrivilegeEscalation=True),
    "a capability": container(capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "its capabilities": container(capabilities={}),
    "root": container(runAsUser=0, runAsNonRoot=False),
    "no seccomp": container(seccompProfile={"type": "Unconfined"}),
    "the host's network": spec(hostNetwork=True),
    "the host's processes": spec(hostPID=True),
    "the host's memory": spec(hostIPC=True),
    "the host's files": spec(volumes=[{"name": "host", "hostPath": {"path": "/"}}]),
}


@pytest.mark.parametrize("wanted", PRIVILEGED)
def test_a_pod_that_asks_for_privilege_is_refused(installed: Release, wanted: str) -> None:
    """The wall is the namespace's label; another namespace takes the same pod."""
    ask = ["create", "--dry-run=server", "-f", "-"]
    refused = installed.cluster.try_run(*ask, stdin=json.dumps(PRIVILEGED[wanted]))
    assert refused.returncode and "violates PodSecurity" in refused.stderr, refused
    assert "asks" in Cluster(installed.cluster.number).run(*ask, stdin=json.dumps(PRIVILEGED[wanted]))


def test_a_workflow_that_is_not_made_from_our_templates_is_refused_until_the_policy_is_taken_away(
    installed: Release,
) -> None:
    space = installed.cluster
    ours = submission("asks").workflow
    foreign = json.loads(json.dumps(ours))
    foreign["spec"] = {
        "entrypoint": "read",
        "serviceAccountName": "cuda-agent-operator",
        "templates": [{"name": "read", "container": {"image": "localhost/busybox:1", "command": ["env"]}}],
    }
    patched = json.loads(json.dumps(ours))
    patched["spec"]["podSpecPatch"] = '{"hostNetwork": true}'

    def tries(workflow: dict[str, Any]) -> tuple[int, str]:
        done = space.try_run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(workflow))
        return done.returncode, done.stderr

    assert tries(ours) == (0, "")
    for workflow in (foreign, patched):
        code, text = tries(workflow)
        assert code and "ValidatingAdmissionPolicy" in text and "use `cuda-agent submit`" in text
    binding = f"{space.namespace}-cuda-agent-workflows"
    with without(space, "validatingadmissionpolicybinding", binding):
        for workflow in (foreign, patched):
            wait_for("it is admitted", 60, lambda workflow=workflow: tries(workflow) == (0, ""))
    for workflow in (foreign, patched):
        wait_for("it is refused again", 60, lambda workflow=workflow: tries(workflow)[0])


# --------------------------------------------------------------------------------------------------------------- roles

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
ACCOUNTS: dict[str, str | None] = {
    "stage": None, "sandbox": None, "executor": "cuda-agent-executor", "operator": "cuda-agent-operator",
    "ray": "cuda-agent-ray",
}  # fmt: skip


def resources(space: Cluster) -> list[tuple[str, str, str]]:
    """(group, resource, sub-resource) of everything that this API server serves."""
    found = []
    groups = json.loads(space.run("get", "--raw", "/apis"))["groups"]
    for path in ["api/v1", *(f"apis/{served['groupVersion']}" for group in groups for served in group["versions"])]:
        group = path.split("/")[1] if path.startswith("apis/") else ""
        for item in json.loads(space.run("get", "--raw", f"/{path}"))["resources"]:
            name, _, sub = item["name"].partition("/")
            found.append((group, name, sub))
    return sorted(set(found))


def allowed(space: Cluster, account: str, everything: list[tuple[str, str, str]]) -> set[str]:
    """What a service account may do in the namespace, asked with a token of its own: ``verb resource.group/sub``."""
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(str(space.state / "kubeconfig"), client_configuration=settings)
    settings.cert_file = settings.key_file = None
    settings.api_key = {"authorization": f"Bearer {space.run('create', 'token', account).strip()}"}
    api = client.ApiClient(settings)

    def may(group: str, name: str, sub: str, verb: str) -> bool:
        attributes = {"namespace": space.namespace, "verb": verb, "group": group, "resource": name, "subresource": sub}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = api.call_api(
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "POST", body=review,
            auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
        )  # fmt: skip
        return bool(json.loads(answer.data)["status"]["allowed"])

    questions = [(*what, verb) for what in everything for verb in VERBS]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda question: may(*question), questions))
    return {named(*question) for question, answer in zip(questions, answers, strict=True) if answer}


def named(group: str, name: str, sub: str, verb: str) -> str:
    return f"{verb} {name}{'.' if group else ''}{group}{'/' if sub else ''}{sub}"


def granted(space: Cluster) -> set[tuple[str, str, str]]:
    """What the namespace's roles name: also what this API server does not serve, such as KubeRay's kinds."""
    rules = [rule for role in space.get("roles")["items"] for rule in role["rules"]]
    return {
        (group, *resource.partition("/")[::2])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def listed(space: Cluster, role: str) -> set[str]:
    return {
        named(group, *resource.partition("/")[::2], verb)
        for rule in space.get("role", role)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_every_verb_that_a_role_does_not_list_is_refused(installed: Release) -> None:
    """Of every resource of this cluster, for every account; what anybody may do who can log in comes off first."""
    space = installed.cluster
    what = sorted({*resources(space), *granted(space)})
    assert len(what) > 100 and ("", "pods", "exec") in what and ("argoproj.io", "workflows", "") in what
    anybody = allowed(space, "default", what)
    for account, role in ACCOUNTS.items():
        found = allowed(space, f"cuda-agent-{account}", what) - anybody
        assert found == (listed(space, role) if role else set()), account
    space.run("create", "serviceaccount", "probe")
    try:
        for role in ("cuda-agent-viewer", "cuda-agent-submitter"):
            space.run("create", "rolebinding", role, f"--role={role}", f"--serviceaccount={space.namespace}:probe")
            wait_for("the binding", 20, lambda: allowed(space, "probe", [("", "pods", "")]))
            assert allowed(space, "probe", what) - anybody == listed(space, role)
            space.run("delete", "rolebinding", role)
    finally:
        space.run("delete", "serviceaccount", "probe")


def test_what_is_refused_to_an_account_is_refused_in_deed_until_it_is_bound_to_a_role(installed: Release) -> None:
    space = installed.cluster
    stage = f"--as=system:serviceaccount:{space.namespace}:cuda-agent-stage"
    operator = f"--as=system:serviceaccount:{space.namespace}:cuda-agent-operator"
    for who, what in [
        (stage, ("get", "pods")), (stage, ("get", "secrets")), (operator, ("get", "secret", "planted")),
        (operator, ("get", "configmaps")), (operator, ("delete", "workflow", "any")),
        (operator, ("create", "rolebinding", "more", "--role=cuda-agent-operator", "--user=ada", "--dry-run=server")),
    ]:  # fmt: skip
        refused = space.try_run(*what, who)
        assert refused.returncode and "forbidden" in refused.stderr.lower(), (who, what, refused)
    space.run("create", "rolebinding", "probe-stage", "--role=cuda-agent-viewer", f"--user={stage.split('=')[1]}")
    try:
        wait_for("it may now", 20, lambda: space.try_run("get", "pods", stage).returncode == 0)
        assert space.try_run("get", "secrets", stage).returncode
    finally:
        space.run("delete", "rolebinding", "probe-stage")


# ------------------------------------------------------------------------------------------------------------ canaries


def test_planted_secrets_are_read_nowhere(held: Held, installed: Release, planted: dict[str, str]) -> None:
    """The search is tried too: it finds them in a ConfigMap, a log and an object of the store, in base64 or not."""
    space = installed.cluster
    token = base64.b64decode(space.get("secret", f"{held.name}-sandbox")["data"]["token"]).decode()
    wanted = planted | {"token": token}
    assert leaks(installed, wanted) == []
    coded = base64.b64encode(f"password: {planted['secretkey']}".encode()).decode()
    space.run("create", "configmap", "leak", f"--from-literal=x={coded}")
    space.create(pod("leak", f"echo token={token}"))
    space.finished("leak")
    with open_bucket(installed) as store:
        store.put("argo/leak.log", planted["url"].encode().hex().encode())
        try:
            found = set(leaks(installed, wanted))
        finally:
            store.delete("argo/leak.log")
            space.run("delete", "configmap/leak", "pod/leak", "--now")
    # The pod's command holds it too, as would any object that had it in clear.
    assert found >= {
        "ConfigMap/leak: secretkey",
        "Pod/leak: token",
        "log of leak/main: token",
        "store/argo/leak.log: url",
    }
    assert all("leak" in place for place in found)
