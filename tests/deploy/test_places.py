"""Tests where the chart puts pods: nodes, container runtimes, shared memory, and where MLflow keeps its data."""

import json
from typing import Any

import yaml

from tests.deploy.charts import (
    ALONE,
    CHART,
    WITH_OTHERS,
    engines,
    helm,
    merged,
    needs_helm,
    objects,
    of_kind,
    pools,
    ray_job,
    refusal,
    steps,
)

NODES = {
    "nodeSelector": {"team": "a"},
    "tolerations": [{"key": "team", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}
CLUSTER_SCOPED = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
MEMORY = {"name": "memory", "mountPath": "/dev/shm"}


def ray_pods(items: list[dict[str, Any]], profile: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the specs of the head and of the other Ray pods of a stage."""
    cluster = ray_job(items, profile)["spec"]["rayClusterSpec"]
    return cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]


def servers(items: list[dict[str, Any]], profile: str = "cpu") -> dict[str, dict[str, Any]]:
    """Returns the specs of a profile's sandbox servers by role, and of ``engine`` if the profile is ``cpu``."""
    found = [*pools(items, profile), *(engines(items) if profile == "cpu" else [])]
    return {
        one["metadata"]["name"].removeprefix("RUN-"): one["spec"]["template"]["spec"]
        for one in found
        if one["kind"] == "StatefulSet"
    }


@needs_helm
def test_nodes_of_the_release_are_those_of_every_pod():
    items = objects(merged(ALONE, NODES))
    specs = [one["spec"] for one in items if one["kind"] in ("WorkflowTemplate", "Pod")]
    specs += [one["spec"]["template"]["spec"] for one in items if one["kind"] in ("Deployment", "Job")]
    specs += [*servers(items).values(), *ray_pods(items, "cpu")]
    assert len(specs) > 15
    for spec in specs:
        assert NODES.items() <= spec.items()


@needs_helm
def test_a_profiles_own_nodes_replace_those_of_the_release():
    own = {"defaults": {"nodeSelector": {"gpu": "h200"}}, "pools": {"build": {"nodeSelector": {"cpu": "fast"}}}}
    items = objects(merged(ALONE, NODES | {"profiles": {"gpu": own}}))
    (made,) = of_kind(items, "WorkflowTemplate", "-gpu-")
    stage = steps(made)["agentic"]
    assert stage["nodeSelector"] == {"gpu": "h200"} and stage["affinity"] == NODES["affinity"]
    assert [one["key"] for one in stage["tolerations"]] == ["nvidia.com/gpu"], "the profile has its own"
    assert servers(items, "gpu")["build"]["nodeSelector"] == {"cpu": "fast"}
    assert servers(items, "gpu")["workspace"]["nodeSelector"] == NODES["nodeSelector"]


@needs_helm
def test_a_container_runtime_is_named_for_stages_servers_and_ray_pods():
    named = {"runtimeClassName": "nvidia"}
    own = {"defaults": named, "pools": {"evaluate": named}, "engine": named, "ray": named}
    items = objects(merged(ALONE, {"profiles": {"cpu": own}, "sandbox": {"runtimeClassName": "gvisor"}}))
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    stages = [one for one in made["spec"]["templates"] if "podSpecPatch" in one and "-ray" not in one["name"]]
    patches = {one["name"]: json.loads(one["podSpecPatch"]) for one in stages}
    assert patches["agentic"]["runtimeClassName"] == "nvidia" and patches["agentic"]["terminationGracePeriodSeconds"]
    assert "runtimeClassName" not in patches.get("prepare", {})
    assert not any("runtimeClassName" in one for one in stages), "Argo's templates have no such field"
    found = {name: spec.get("runtimeClassName") for name, spec in servers(items).items()}
    assert found == {"workspace": "gvisor", "build": "gvisor", "evaluate": "nvidia", "engine": "nvidia"}
    assert [pod["runtimeClassName"] for pod in ray_pods(items, "cpu")] == ["nvidia", "nvidia"]
    assert not any("runtimeClassName" in pod for pod in ray_pods(items, "gpu"))


@needs_helm
def test_sandboxes_and_nothing_else_run_in_a_user_namespace_on_demand():
    items = objects(merged(ALONE, {"sandbox": {"userNamespace": True}}))
    found = {name: spec.get("hostUsers") for name, spec in servers(items).items()}
    assert found == {"workspace": False, "build": False, "evaluate": False, "engine": None}
    assert not any("hostUsers" in spec for spec in servers(objects(ALONE)).values())


@needs_helm
def test_stages_and_ray_pods_share_memory_and_sandboxes_get_no_more_of_it():
    items = objects(ALONE)
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    assert MEMORY in steps(made)["agentic"]["container"]["volumeMounts"]
    for spec in (made["spec"], *ray_pods(items, "cpu"), servers(items)["engine"]):
        assert {"name": "memory", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    for pod in ray_pods(items, "cpu"):
        assert MEMORY in pod["containers"][0]["volumeMounts"]
    for role in ("workspace", "build", "evaluate"):
        assert "/dev/shm" not in json.dumps(servers(items)[role])


def mlflow(values: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the spec of MLflow's pod, and all objects."""
    items = objects(values)
    (server,) = of_kind(items, "Deployment", "mlflow")
    return server["spec"]["template"]["spec"], items


@needs_helm
def test_mlflow_keeps_artifacts_in_the_store_with_its_keys():
    pod, items = mlflow(merged(ALONE, {"mlflow": {"artifacts": "s3://cuda-agent/mlflow"}}))
    (container,) = pod["containers"]
    assert "--artifacts-destination=s3://cuda-agent/mlflow" in container["args"]
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert env["AWS_ENDPOINT_URL"] == "http://r-cuda-agent-minio:9000" and env["AWS_DEFAULT_REGION"] == "us-east-1"
    assert env["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"]["name"] == "r-cuda-agent-minio"
    assert of_kind(items, "PersistentVolumeClaim", "mlflow"), "the database is there"
    (out,) = [one for one in of_kind(items, "NetworkPolicy", "mlflow")[0]["spec"]["egress"] if one.get("to")][1:]
    assert out["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "minio"
    (rule,) = of_kind(items, "NetworkPolicy", "-minio$")[0]["spec"]["ingress"]
    assert "mlflow" in rule["from"][0]["podSelector"]["matchExpressions"][0]["values"]


@needs_helm
def test_mlflow_with_the_volume_neither_has_the_stores_keys_nor_reaches_it():
    pod, items = mlflow(ALONE)
    assert "AWS_" not in json.dumps(pod) and "serviceAccountName" not in pod
    assert "egress" not in of_kind(items, "NetworkPolicy", "mlflow")[0]["spec"]
    (rule,) = of_kind(items, "NetworkPolicy", "-minio$")[0]["spec"]["ingress"]
    assert "mlflow" not in json.dumps(rule)


@needs_helm
def test_mlflow_with_a_database_and_the_store_needs_no_volume():
    own = {"artifacts": "s3://cuda-agent/mlflow", "backendUri": "postgresql://m@db/m", "backendSecret": "db"}
    pod, items = mlflow(merged(ALONE, {"mlflow": own}))
    assert {"name": "data", "emptyDir": {}} in pod["volumes"]
    assert not of_kind(items, "PersistentVolumeClaim", "mlflow")
    (wall,) = of_kind(items, "NetworkPolicy", "mlflow")
    ports = [port["port"] for rule in wall["spec"]["egress"] for port in rule["ports"]]
    assert {5432, 9000} <= set(ports)


@needs_helm
def test_mlflow_takes_the_role_of_the_store_and_trusts_its_authority():
    store = {"existingSecret": "", "roleArn": "arn:aws:iam::1:role/store"}
    own = {"tracking": {"uri": ""}, "mlflow": {"enabled": True, "artifacts": "s3://b/m"}, "store": store}
    pod, _ = mlflow(merged(WITH_OTHERS, own | {"privateCa": {"existingSecret": "ca"}}))
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["AWS_ROLE_ARN"] and "AWS_ACCESS_KEY_ID" not in env
    joins = 'cat "$(python3 -m certifi)" /etc/cuda-agent/ca/ca.crt >"$AWS_CA_BUNDLE"'
    assert joins in container["command"][-2] and env["AWS_CA_BUNDLE"].startswith("/tmp/"), (
        "boto3 trusts this file alone"
    )
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert {"store-token", "private-ca"} <= mounted <= {one["name"] for one in pod["volumes"]}
    assert pod["serviceAccountName"] == "r-cuda-agent-stage" and pod["automountServiceAccountToken"] is False


@needs_helm
def test_the_place_of_artifacts_is_an_address_of_a_bucket():
    assert "artifacts" in refusal(merged(ALONE, {"mlflow": {"artifacts": "/data"}}))


@needs_helm
def test_a_team_without_rights_on_the_cluster_leaves_two_policies_to_its_administrator():
    kinds = {one["kind"] for one in objects(merged(ALONE, {"admission": {"enabled": False}}))}
    assert not kinds & CLUSTER_SCOPED
    shown = ("--namespace", "ns", "--show-only", "templates/admission.yaml")
    done = helm("template", "r", str(CHART), *shown, values=ALONE)
    made = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert len(made) == 4 and {one["kind"] for one in made} == CLUSTER_SCOPED
