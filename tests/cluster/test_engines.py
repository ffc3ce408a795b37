"""A run's engine replicas: what the chart and the run's configuration make of them, and who reaches them."""

import json
from typing import Any

import pytest

from cuda_agent.cluster import engines, pod, pools, rayjobs
from cuda_agent.compose import compose, freeze
from cuda_agent.config import Config
from cuda_agent.errors import ConfigError
from tests.deploy.charts import ALONE, merged, needs_helm, objects, of_kind, steps, template
from tests.deploy.test_chart import engines as rendered
from tests.deploy.test_chart import selects

STAGE = {"app.kubernetes.io/component": "stage"}
OWN = STAGE | {"workflows.argoproj.io/workflow": "night"}
OF_RAY = STAGE | {"cuda-agent.io/run": "night"}
OTHERS = [STAGE | {"workflows.argoproj.io/workflow": "day"}, STAGE | {"cuda-agent.io/run": "day"}]


def with_vllm(*overrides: str) -> Config:
    return compose(["experiment=smoke", "policy.engine=vllm", *overrides])


def of_run(*overrides: str, **values: Any) -> list[dict[str, Any]]:
    return engines.objects(rendered(template(merged(ALONE, values))), "night", "uid-1", with_vllm(*overrides))


def replicas(made: list[dict[str, Any]]) -> dict[str, Any]:
    return next(item for item in made if item["kind"] == "StatefulSet")


def reaches(made: list[dict[str, Any]], one: dict[str, str], other: dict[str, str], port: int) -> bool:
    """Whether these policies alone let a pod with the labels ``one`` connect to ``port`` of one with ``other``."""
    for policy in of_kind(made, "NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], other):
            for rule in policy["spec"]["ingress"]:
                ports = [entry["port"] for entry in rule.get("ports", [])] or [port]
                if port in ports and any(selects(peer["podSelector"], one) for peer in rule["from"]):
                    return True
    return False


def leaves(made: list[dict[str, Any]], labels: dict[str, str]) -> list[Any]:
    """What a pod with these labels may connect to, by these policies alone."""
    found = of_kind(made, "NetworkPolicy")
    return [
        rule
        for item in found
        if selects(item["spec"]["podSelector"], labels)
        for rule in item["spec"].get("egress", [])
    ]


def test_a_pool_is_for_runs_that_need_servers_and_have_none():
    assert engines.wanted(with_vllm()) and engines.wanted(with_vllm("policy.vllm.sync=nccl"))
    assert not engines.wanted(compose(["experiment=smoke"]))
    assert not engines.wanted(with_vllm("policy.vllm.servers=['http://a:8000']"))
    with pytest.raises(ConfigError, match="lora"):
        engines.wanted(with_vllm("policy.vllm.sync=lora", "lora.rank=4"))


@needs_helm
def test_a_runs_objects_are_its_own_and_served_by_its_settings():
    made = of_run("policy.context=2048", "policy.engine_batch=7", "policy.vllm.gpu_memory=0.5", "policy.threads=3")
    assert {(item["kind"], item["metadata"]["name"]) for item in made} == {
        *((kind, "night-engine") for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet")),
    }  # fmt: skip
    assert all(item["metadata"]["ownerReferences"][0]["uid"] == "uid-1" for item in made)
    assert '"RUN' not in json.dumps(made)
    (container,) = replicas(made)["spec"]["template"]["spec"]["containers"]
    wanted = ["/engine/night", "--port=8000", "--context=2048", "--batch=7", "--memory=0.5", "--threads=3"]
    assert container["args"] == wanted
    assert pools.addresses(made, engines.ENGINE_PORT) == [
        f"http://night-engine-{i}.night-engine:8000" for i in range(2)
    ]
    assert {(item["kind"], item["metadata"]["name"]) for item in made} <= set(engines.names("night"))


@needs_helm
def test_replicas_are_restricted_limited_and_only_read_the_weights():
    spec = replicas(of_run())["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"]
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
    mounts = {entry["mountPath"]: entry.get("readOnly", False) for entry in container["volumeMounts"]}
    assert mounts == {"/scratch": False, "/tmp": False, "/dev/shm": False, "/engine": True}
    claims = [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [{"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}]
    assert not [entry for entry in container["env"] if "valueFrom" in entry], "they have no secret"


@needs_helm
def test_only_the_runs_own_stages_reach_its_replicas_and_these_reach_nothing():
    made, chart = of_run(), objects(ALONE)
    own = replicas(made)["spec"]["template"]["metadata"]["labels"]
    assert reaches(made, OWN, own, 8000) and reaches(made, OF_RAY, own, 8000)
    assert not reaches(made, OWN, own, 22)
    assert not any(reaches(made, other, own, 8000) for other in [*OTHERS, own, {}])
    assert leaves(made, own) == [] == leaves(chart, own)
    names = {
        key: value for key, value in own.items() if key in ("app.kubernetes.io/name", "app.kubernetes.io/instance")
    }
    to = [(rule["to"][0].get("podSelector", {}), rule["ports"]) for rule in leaves(chart, names | OWN) if "to" in rule]
    assert [ports[0]["port"] for selector, ports in to if selector and selects(selector, own)] == [8000]


@needs_helm
def test_with_nccl_stages_and_replicas_of_a_run_reach_each_others_ports_and_no_others():
    made = of_run("policy.vllm.sync=nccl")
    own = replicas(made)["spec"]["template"]["metadata"]["labels"]
    for stage in (OWN, OF_RAY):
        assert reaches(made, stage, own, 40000) and reaches(made, own, stage, 40000)
    assert not any(reaches(made, other, own, 8000) or reaches(made, own, other, 8000) for other in OTHERS)
    out = [peer["podSelector"] for rule in leaves(made, own) for peer in rule["to"]]
    assert out and not any(selects(selector, other) for selector in out for other in [*OTHERS, own])
    assert {("NetworkPolicy", item["metadata"]["name"]) for item in of_kind(made, "NetworkPolicy")} <= set(
        engines.names("night")
    )


@needs_helm
def test_where_the_chart_leaves_egress_open_so_do_the_policies_of_stages_but_not_those_of_replicas(monkeypatch):
    closed = of_run("policy.vllm.sync=nccl")
    monkeypatch.setenv("CUDA_AGENT_OPEN_EGRESS", "yes")
    made, alone = of_run("policy.vllm.sync=nccl"), of_run()
    own = replicas(made)["spec"]["template"]["metadata"]["labels"]
    for labels in (OWN, OF_RAY):
        assert leaves(closed, labels) and not leaves(made, labels)
        (policy,) = (one for one in of_kind(made, "NetworkPolicy") if selects(one["spec"]["podSelector"], labels))
        assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert leaves(made, own) == leaves(closed, own) != []
    (policy,) = of_kind(alone, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"] and policy["spec"]["egress"] == []


@needs_helm
def test_stages_and_the_pods_of_their_ray_write_into_the_runs_folder():
    (made,) = of_kind(objects(ALONE), "WorkflowTemplate", "-cpu-")
    folder = {"name": "CUDA_AGENT_ENGINE_FOLDER", "value": "/engine/{{workflow.name}}"}
    mounted = {"name": "weights", "mountPath": "/engine"}
    containers = {name: item["container"] for name, item in steps(made).items() if "container" in item}
    with_folder = {name for name, item in containers.items() if folder in item["env"]}
    assert with_folder == {name for name, item in containers.items() if mounted in item["volumeMounts"]}
    assert {"collect", "agentic", "finish"} <= with_folder and "prepare" not in with_folder
    base = next(item["value"] for item in containers["agentic-ray"]["env"] if item["name"] == "CUDA_AGENT_RAY")
    job = next(item for item in json.loads(base) if item["kind"] == "RayJob")["spec"]["rayClusterSpec"]
    for group in (job["headGroupSpec"], *job["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert folder in container["env"] and mounted in container["volumeMounts"]
        assert {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}} in group["template"]["spec"][
            "volumes"
        ]


@needs_helm
def test_a_profile_without_replicas_says_nothing_of_them():
    (made,) = of_kind(objects(ALONE), "WorkflowTemplate", "-gpu-")
    assert '"/engine' not in json.dumps(made) and "CUDA_AGENT_ENGINE_FOLDER" not in json.dumps(made)


@needs_helm
def test_a_stages_ray_is_told_where_the_replicas_are():
    (made,) = of_kind(objects(ALONE), "WorkflowTemplate", "-cpu-")
    step = steps(made)["agentic-ray"]
    base = json.loads(next(entry["value"] for entry in step["container"]["env"] if entry["name"] == "CUDA_AGENT_RAY"))
    told = rayjobs.objects(base, "night", "u", "agentic", [], "http://a:1", with_vllm("runtime=ray"), "http://e:8000")
    job = next(item for item in told if item["kind"] == "RayJob")["spec"]["rayClusterSpec"]
    for group in (job["headGroupSpec"], *job["workerGroupSpecs"]):
        env = {entry["name"]: entry.get("value") for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert env["CUDA_AGENT_ENGINE_SERVERS"] == "http://e:8000"


def test_without_a_pool_stages_are_told_of_none(tmp_path):
    text, sha256 = freeze(with_vllm())
    (tmp_path / "config.json").write_text(text)
    here = pod.PodEnvironment(str(tmp_path / "store"), "off", tmp_path / "config.json", tmp_path / "plan", tmp_path)
    assert pod.prepare(here, "night", sha256, "night", None, [])["engines"] == ""
    assert (tmp_path / "plan" / "engines").read_text() == ""


def test_a_users_variable_keeps_its_value_whatever_it_is():
    base = pools.pool_objects()
    base[-1]["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "MODE", "value": "RUN"})
    (container,) = pools.of_run(base, "night", "u")[-1]["spec"]["template"]["spec"]["containers"]
    assert container["env"][-1] == {"name": "MODE", "value": "RUN"}
    assert container["env"][-2]["valueFrom"]["secretKeyRef"]["name"] == "night-sandbox"
