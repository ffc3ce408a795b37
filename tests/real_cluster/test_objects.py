"""The test cluster is a real one: pods run, DNS answers, workflows succeed, volumes keep, GPUs are scheduled."""

import json
from typing import Any

import pytest
from kubectl import Cluster, pod, script, setting, wait_for

pytestmark = pytest.mark.cluster


def claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def with_volume(made: dict[str, Any], name: str) -> dict[str, Any]:
    made["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]
    made["spec"]["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    return made


def test_the_server_has_the_version_that_is_pinned(cluster: Cluster) -> None:
    versions = json.loads(cluster.run("version", "-o", "json"))
    assert versions["serverVersion"]["gitVersion"] == f"v{setting('KUBERNETES')}"
    (node,) = cluster.get("nodes")["items"]
    assert node["status"]["nodeInfo"]["kubeletVersion"] == f"v{setting('KUBERNETES')}"


def test_starting_it_again_changes_nothing(space: Cluster) -> None:
    space.create(pod("lives", "sleep 600"))
    space.ready("lives")
    script("up")
    (status,) = space.get("pod", "lives")["status"]["containerStatuses"]
    assert status["restartCount"] == 0 and space.phase("lives") == "Running"


def test_a_pod_runs_and_its_log_and_a_shell_in_it_can_be_had(space: Cluster) -> None:
    space.create(pod("hello", "id -u; sleep 600"))
    space.ready("hello")
    assert space.run("logs", "hello") == "1000\n"
    status = space.exec("hello", "cat /proc/self/status").stdout
    found = dict(line.split(":", 1) for line in status.splitlines())
    assert found["NoNewPrivs"].strip() == "1" and found["Seccomp"].strip() == "2" and not int(found["CapEff"], 16)


def test_a_privileged_pod_is_refused_in_a_restricted_namespace(space: Cluster) -> None:
    refused = space.try_run(
        "create", "-f", "-", stdin=json.dumps(pod("root", "id", securityContext={"privileged": True}))
    )
    assert refused.returncode and "violates PodSecurity" in refused.stderr


def test_a_pod_over_its_memory_limit_is_killed_and_the_reason_shown(space: Cluster) -> None:
    space.create(pod("greedy", "tail /dev/zero", resources={"limits": {"memory": "64Mi"}}))
    assert space.ended("greedy") == "Failed"
    (status,) = space.get("pod", "greedy")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["reason"] == "OOMKilled"


def test_dns_answers_for_services_and_for_nothing_else(space: Cluster) -> None:
    space.create(pod("asks", "sleep 600"))
    space.ready("asks")
    wait_for(
        "an answer", 30, lambda: space.exec("asks", "nslookup kubernetes.default.svc.cluster.local").returncode == 0
    )
    answer = space.exec("asks", "nslookup kubernetes.default.svc.cluster.local")
    assert setting("API_IP") in answer.stdout
    outside = space.exec("asks", "nslookup example.com")
    assert outside.returncode and "NXDOMAIN" in outside.stdout + outside.stderr


def test_a_volume_is_writable_keeps_and_goes_with_its_claim(space: Cluster) -> None:
    space.create(claim("data"), with_volume(pod("writes", "echo kept >/data/file && cat /data/file"), "data"))
    assert space.finished("writes") == "kept\n"
    space.create(with_volume(pod("reads", "cat /data/file"), "data"))
    assert space.finished("reads") == "kept\n"
    folder = space.state / "volumes" / space.get("pvc", "data")["spec"]["volumeName"]
    assert (folder / "file").read_text() == "kept\n"
    space.run("delete", "pod", "writes", "reads")
    space.run("delete", "pvc", "data")
    wait_for("the folder goes", 30, lambda: not folder.exists())


def test_gpus_are_given_one_by_one_and_no_more_than_there_are(space: Cluster) -> None:
    (node,) = space.get("nodes")["items"]
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"

    def wants(name: str, count: int) -> dict[str, Any]:
        command = "echo $NVIDIA_VISIBLE_DEVICES; sleep 600"
        return pod(name, command, resources={"limits": {"nvidia.com/gpu": count}})

    space.create(wants("one", 1), wants("two", 2))
    space.ready("one", "two")
    given = [space.run("logs", name).strip().split(",") for name in ("one", "two")]
    assert [len(devices) for devices in given] == [1, 2]
    assert len({*given[0], *given[1]}) == 3 and all(name.startswith("GPU-fake-") for name in given[0])
    space.create(wants("late", 2))

    def reason() -> str:
        conditions = space.get("pod", "late")["status"].get("conditions") or []
        return " ".join(has.get("message", "") for has in conditions)

    wait_for("the scheduler says why not", 30, lambda: "Insufficient nvidia.com/gpu" in reason())
    space.run("delete", "pod", "two")
    space.ready("late")


EXECUTOR: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "executor"}},
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "executor"},
        "rules": [
            {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]},
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "executor"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "executor"},
        "subjects": [{"kind": "ServiceAccount", "name": "executor"}],
    },
]


def workflow(name: str, second: str) -> dict[str, Any]:
    """Two steps: the first gives a parameter, the second is the shell command `second` with that parameter in it."""

    security = pod("", "")["spec"]["containers"][0]["securityContext"]

    def step(command: str) -> dict[str, Any]:
        return {"image": "localhost/busybox:1", "command": ["sh", "-c", command], "securityContext": security}

    first = {
        "name": "first",
        "container": step("echo kernels >/tmp/word"),
        "outputs": {"parameters": [{"name": "word", "valueFrom": {"path": "/tmp/word"}}]},
    }
    given = {"parameters": [{"name": "word", "value": "{{steps.first.outputs.parameters.word}}"}]}
    steps = [[{"name": "first", "template": "first"}], [{"name": "second", "template": "second", "arguments": given}]]
    last = {"name": "second", "inputs": {"parameters": [{"name": "word"}]}, "container": step(second)}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": "both",
            "serviceAccountName": "executor",
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            # As installed, Argo's own containers do not meet what `restricted` asks for.
            "podSpecPatch": json.dumps(
                {
                    "containers": [{"name": "wait", "securityContext": security}],
                    "initContainers": [{"name": "init", "securityContext": security}],
                }
            ),
            "templates": [{"name": "both", "steps": steps}, first, last],
        },
    }


def test_a_workflow_of_two_steps_hands_a_value_on_and_succeeds(space: Cluster) -> None:
    space.create(*EXECUTOR, workflow("good", 'test "{{inputs.parameters.word}}" = kernels'))
    space.create(workflow("bad", 'test "{{inputs.parameters.word}}" = otherwise'))

    def ended(name: str) -> str:
        phase: str = space.get("workflow", name).get("status", {}).get("phase", "")
        return phase if phase in ("Succeeded", "Failed", "Error") else ""

    assert wait_for("the workflow ends", 120, lambda: ended("good")) == "Succeeded"
    assert wait_for("the other ends", 120, lambda: ended("bad")) == "Failed"
    nodes = space.get("workflow", "good")["status"]["nodes"].values()
    assert sorted(node["displayName"] for node in nodes if node["type"] == "Pod") == ["first", "second"]


def test_a_misspelt_field_of_a_workflow_is_refused(space: Cluster) -> None:
    misspelt = workflow("typo", "true")
    misspelt["spec"]["templates"][1]["retryStrategi"] = {"limit": 1}
    refused = space.try_run("create", "--validate=strict", "-f", "-", stdin=json.dumps(misspelt))
    assert refused.returncode and "retryStrategi" in refused.stderr


def test_a_killed_kubelet_is_started_again_and_its_gpus_come_back(space: Cluster) -> None:
    def kubelets() -> set[str]:
        return set(script("enter", "sh", "-c", "pgrep -x kubelet || true").split())

    before = kubelets()
    script("enter", "pkill", "-KILL", "-x", "kubelet")
    wait_for("another kubelet", 30, lambda: kubelets() and not kubelets() & before)

    def gets_a_gpu() -> bool:  # until the plugin has registered anew, the kubelet refuses such a pod
        space.run("delete", "pod", "after", "--ignore-not-found", "--now")
        space.create(pod("after", "echo $NVIDIA_VISIBLE_DEVICES", resources={"limits": {"nvidia.com/gpu": 1}}))
        return space.ended("after") == "Succeeded"

    wait_for("a pod gets a GPU", 90, gets_a_gpu)
    assert space.run("logs", "after").startswith("GPU-fake-")
