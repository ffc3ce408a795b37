"""The chart: it renders what its values say, refuses what they must not, and what it renders is restricted."""

import json
import re
import shutil
from typing import Any

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from cuda_agent.cluster.pools import PORT, ROLES
from cuda_agent.cluster.rayjobs import can_be_spread, task_name
from cuda_agent.cluster.stage_metrics import StageCollector
from cuda_agent.deploy import chart
from cuda_agent.deploy.argo import maintenance_jobs
from cuda_agent.deploy.chart_values import CHART_VERSION, Values
from cuda_agent.pipeline.graph import ROWS
from cuda_agent.sandbox.service.metrics import Metrics
from tests import by_day
from tests.deploy.charts import (
    ALONE,
    CHART,
    KUBERNETES,
    WITH_OTHERS,
    argocheck,
    engines,
    flat,
    helm,
    merged,
    needs_argo,
    needs_helm,
    objects,
    of_kind,
    pools,
    ray_job,
    refusal,
    steps,
    template,
)
from tests.deploy.value_fields import field_of
from tests.mlflow_server import serving

GVISOR_ON_MIG = {"runtimeClassName": "gvisor", "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}

ARGO_KINDS = ("WorkflowTemplate", "CronWorkflow")
OPERATORS_KINDS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
PROFILES = ("cpu", "gpu", "search-cpu", "search-gpu")  # their templates: for runs and for searches
LEAVES = {path: (default, info) for path, default, info in chart.leaves()}


def pod_templates(items: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Name and pod spec of every pod that Kubernetes itself would make, sandboxes included."""
    found = []
    for item in [*items, *pools(items), *pools(items, "gpu"), *engines(items)]:
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            found.append((item["metadata"]["name"], item["spec"]["template"]["spec"]))
        if item["kind"] == "Pod":
            found.append((item["metadata"]["name"], item["spec"]))
    return found


# ----------------------------------------------------------------------------------------------------------- the values


def test_every_value_is_documented():
    for path, (_, info) in LEAVES.items():
        assert info.description, path
    readme = (CHART / "README.md").read_text()
    for name in Values.model_fields:
        assert f"| `{name}" in readme


def test_the_defaults_keep_their_own_schema():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, chart.schema())
    assert Values.model_validate(values).model_dump(exclude={"profiles"}) == Values().model_dump(exclude={"profiles"})


def test_a_limit_on_disk_never_becomes_a_request():
    """Kubernetes requests the whole limit of a resource that is not requested."""

    def resources(value):
        if isinstance(value, dict):
            if "limits" in value:
                yield value
            for part in value.values():
                yield from resources(part)

    found = [one for one in resources(Values().model_dump(mode="json")) if "ephemeral-storage" in one["limits"]]
    assert len(found) >= 20
    assert {one["requests"].get("ephemeral-storage") for one in found} == {"64Mi", "512Mi", "1Gi", "10Gi"}


def test_the_schema_is_closed_wherever_a_name_is_ours():
    schema = chart.schema()
    for name, group in {"Values": schema, **schema["$defs"]}.items():
        assert group["additionalProperties"] is False, name


def test_the_chart_has_the_version_of_the_package():
    facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert facts["version"] == facts["appVersion"] == CHART_VERSION


@needs_helm
@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"storage": {}}, "storage"),
        ({"store": {"buckets": "a"}}, "buckets"),
        ({"profiles": {"cpu": {"gpus": 1}}}, "gpus"),
        ({"profiles": {"cpu": {"stages": {"training": {}}}}}, "training"),
        ({"profiles": {"cpu": {"pools": {"evaluate": {"replicas": 0}}}}}, "replicas"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"images": {"stage": {"digest": "sha256:12"}}}, "digest"),
        ({"minio": {"enabled": "yes"}}, "enabled"),
        ({"networkPolicy": {"apiServerCidrs": ["everywhere"]}}, "apiServerCidrs"),
        ({"networkPolicy": {"apiServerPort": 0}}, "apiServerPort"),
        ({"cron": {"config": "abc"}}, "config"),
        ({"minio": {"persistence": {"size": "much"}}}, "size"),
        ({"tracing": {"endpoint": "collector:4317"}}, "endpoint"),
        ({"monitoring": {"stuckSeconds": 5}}, "stuckSeconds"),
    ],
)
def test_the_schema_refuses_unknown_names_and_wrong_types(values, where):
    said = refusal(merged(ALONE, values))
    assert "values don't meet the specifications of the schema" in said and where in said


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "store.existingSecret: name a secret"),
        ({"minio": {"enabled": True}, "store": {"endpoint": "http://a:9"}}, "one store is enough"),
        ({"minio": {"enabled": True}, "store": {"existingSecret": "a"}}, "store.existingSecret: with minio.enabled"),
        (merged(ALONE, {"tracking": {"uri": "http://a:5000"}}), "one MLflow is enough"),
        (merged(ALONE, {"mlflow": {"backendUri": "postgresql://m@db/m"}}), "needs mlflow.backendSecret"),
        (merged(ALONE, {"mlflow": {"ingress": {"host": "m.test"}}}), "needs mlflow.ingress.tlsSecret"),
        (
            merged(ALONE, {"mlflow": {"backendUri": "postgresql://m:pass@db/m", "backendSecret": "s"}}),
            "leave the password out",
        ),
        (merged(ALONE, {"cron": {"config": ""}}), "cron.config"),
        (merged(ALONE, {"cron": {"profile": "tpu"}}), "there is no profile tpu"),
        (merged(ALONE, {"profiles": {"Big One": {}}}), "a profile's name has at most"),
        (merged(ALONE, {"profiles": {"doctor": {}}}), "a template of that name"),
        (merged(ALONE, {"profiles": {"own": {"base": "tpu"}}}), "profiles.own.base: there is no profile tpu"),
        (
            merged(ALONE, {"profiles": {"own": {"base": "gpu"}, "other": {"base": "own"}}}),
            "profiles.other.base: profile own has a base itself",
        ),
        ({"store": {"roleArn": "arn:a", "existingSecret": "s"}}, "no identity is used"),
        (
            merged(ALONE, {"profiles": {"cpu": {"pools": {"evaluate": {"resources": {"limits": {"cpu": None}}}}}}}),
            "untrusted code needs a limit",
        ),
        (
            merged(
                ALONE,
                {
                    "sandbox": {"runtimeClassName": "gvisor"},
                    "profiles": {
                        "gpu": {"pools": {"evaluate": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}}}
                    },
                },
            ),
            "gVisor does not support MIG",
        ),
        (
            merged(ALONE, {"profiles": {"gpu": {"pools": {"evaluate": GVISOR_ON_MIG}}}}),
            "profiles.gpu.pools.evaluate: gVisor does not support MIG",
        ),
        (
            merged(ALONE, {"mlflow": {"artifacts": "s3://other/m"}}),
            "choose a folder of it, as in s3://cuda-agent/mlflow",
        ),
        (
            merged(ALONE, {"profiles": {"cpu": {"stages": {"rft": {"resources": {"limits": {"cpu": "7"}}}}}}}),
            "replaces the defaults as a whole",
        ),
        (merged(ALONE, {"profiles": {"cpu": {"engine": {"claim": ""}}}}), "profiles.cpu.engine.claim: weights reach"),
        (merged(ALONE, {"profiles": {"cpu": {"parallelism": 2}}}), "share its engine's replicas"),
        (merged(ALONE, {"profiles": {"gpu": {"parallelism": 2}}}), "the pods that the other has"),
        (merged(ALONE, {"networkPolicy": {"apiServerCidrs": []}}), "networkPolicy.apiServerCidrs"),
        (merged(WITH_OTHERS, {"networkPolicy": {"storeCidrs": []}}), "networkPolicy.storeCidrs"),
        (merged(WITH_OTHERS, {"networkPolicy": {"trackingCidrs": []}}), "networkPolicy.trackingCidrs"),
        (merged(ALONE, {"secretEnvironment": {"KEY": "sk-12345"}}), "expected secret/key, never a value"),
    ],
)
def test_what_contradicts_itself_ends_with_a_sentence(values, said):
    assert said in refusal(values)


def changed_value(path: str) -> Any:
    default, _ = LEAVES[path]
    if (example := field_of(path)[1]) is not None:
        return example
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    assert isinstance(default, str) and default, f"{path} needs an example"
    return f"{default}x"


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    """``Kind:path`` of every field that is not the same; of an object that is there once, its kind and a colon."""
    one, other = ({(i["kind"], i["metadata"]["name"]): i for i in items} for items in (before, after))
    found = {f"{kind}:" for kind, _ in one.keys() ^ other.keys()}
    for kind, name in one.keys() ^ other.keys():
        found |= {f"{kind}:{path}" for path in flat((one | other)[kind, name])}
    for key in one.keys() & other.keys():
        if one[key] == other[key]:
            continue
        a, b = flat(one[key]), flat(other[key])
        # Labels hold the name that was asked for, and a random password is another one each time.
        found |= {
            f"{key[0]}:{path}" for path in a.keys() | b.keys() if a.get(path) != b.get(path) and key[0] != "Secret"
        }
    return found


# Values that show only beside others, or only where the chart does not bring something itself.
BESIDE: dict[str, dict[str, Any]] = {
    "mlflow.backendUri": {"mlflow": {"backendSecret": "s"}},
    "mlflow.ingress.host": {"mlflow": {"ingress": {"tlsSecret": "tls"}}},
    **{
        path: {"mlflow": {"ingress": {"host": "m.test", "tlsSecret": "tls"}}}
        for path in ("mlflow.ingress.className", "mlflow.ingress.tlsSecret", "mlflow.ingress.annotations")
    },
    "networkPolicy.ingressNamespace": {"mlflow": {"ingress": {"host": "m.test", "tlsSecret": "tls"}}},
    "profiles.cpu.parallelism": {"profiles": {"cpu": {"engine": {"replicas": 0}, "ray": {"enabled": False}}}},
    "profiles.gpu.parallelism": {"profiles": {"gpu": {"ray": {"enabled": False}}}},
    "profiles.gpu.ray.enabled": {"profiles": {"gpu": {"parallelism": 1}}},
    **{
        path: {"profiles": {path.split(".")[1]: {"parallelism": 1, "engine": {"replicas": 1, "claim": "w"}}}}
        for path in LEAVES
        if path.startswith("profiles.") and ".engine." in path
    },
    **{f"profiles.{one}.queuePriority": {"profiles": {one: {"queue": "q"}}} for one in ("cpu", "gpu")},
    "mlflow.backendSecret": {"mlflow": {"backendUri": "postgresql://a@b/c", "backendSecret": "t"}},
    **{
        f"profiles.{one}.base": {"profiles": {other: {"defaults": {"nodeSelector": {"pool": "of-the-base"}}}}}
        for one, other in (("cpu", "gpu"), ("gpu", "cpu"))
    },
    **{f"gpu.{name}": {"gpu": {"allocation": "dra"}} for name in ("deviceClass", "selectors", "sharedClaim")},
    "store.roleArn": {"store": {"existingSecret": "", "podIdentity": True}},
    "store.podIdentity": {
        "store": {"existingSecret": ""},
        "access": {"serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/store"}},
    },
    "store.tokenAudience": {"store": {"existingSecret": "", "roleArn": "arn:aws:iam::1:role/store"}},
}
NOT_ALONE = {
    *("store.existingSecret", "store.endpoint", "store.roleArn", "store.podIdentity", "store.tokenAudience"),
    "tracking.uri",
}
ONLY_ALONE = {"mlflow.enabled", "minio.enabled"}


@needs_helm
@pytest.mark.parametrize("path", by_day.every(12, LEAVES))
def test_changing_a_value_changes_the_field_that_it_is_for(path):
    value: Any = changed_value(path)
    for part in reversed(path.split(".")):
        value = {part: value}
    kind, field = field_of(path)[0].split(":", 1)
    wanted = re.compile(f"^{kind}:.*{field}")
    contexts = [WITH_OTHERS] if path in NOT_ALONE else [ALONE] if path in ONLY_ALONE else [ALONE, WITH_OTHERS]
    seen: set[str] = set()
    for context in contexts:
        base = merged(context, BESIDE.get(path, {}))
        if path in ONLY_ALONE:  # on in this context; what it brings must go
            name = path.split(".")[0]
            value = merged({name: {"enabled": False}}, {"store": {"existingSecret": "m"}} if name == "minio" else {})
        seen |= differences(objects(base), template(merged(base, value)))
        if any(wanted.match(item) for item in seen):
            return
    raise AssertionError(f"{path} changed {sorted(seen)[:20]}, not {wanted.pattern}")


# ---------------------------------------------------------------------------------------------------------- the objects


@needs_helm
def test_helm_lints_strictly():
    for values in (ALONE, WITH_OTHERS):
        done = helm("lint", "--strict", str(CHART), "--kube-version", "1.34.0", values=values)
        assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize("version", by_day.every(3, ["1.33", "1.34", "1.35", "1.36"]))
@pytest.mark.parametrize("values", [ALONE, WITH_OTHERS], ids=["alone", "with others"])
def test_every_object_is_one_of_this_kubernetes(version, values):
    items = objects(values)
    for item in [*items, *pools(items), *pools(items, "gpu"), *engines(items)]:
        if item["kind"] not in (*ARGO_KINDS, *OPERATORS_KINDS):
            kubernetes_validate.validate(item, version, strict=True)


@needs_helm
def test_a_misspelt_field_would_be_found():
    item = of_kind(objects(ALONE), "NetworkPolicy")[0]
    item["spec"]["podSelectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, "1.34", strict=True)


@needs_helm
@needs_argo
def test_argo_accepts_what_the_chart_makes_of_its_templates():
    for values in (ALONE, WITH_OTHERS, merged(ALONE, {"store": {"prefix": "/team/a/"}})):
        items = objects(values)
        assert argocheck(of_kind(items, "WorkflowTemplate") + of_kind(items, "CronWorkflow")) == []


@needs_helm
def test_a_template_a_profile_with_the_version_in_its_name():
    version = CHART_VERSION.replace(".", "-")
    names = {item["metadata"]["name"] for item in of_kind(objects(ALONE), "WorkflowTemplate")}
    assert names == {f"r-cuda-agent-{name}-{version}" for name in (*PROFILES, *maintenance_jobs())}


@needs_helm
def test_only_the_pods_of_searches_have_the_key_of_the_models_server_and_reach_it():
    """They run nothing that a model writes: that runs in the pools, whose pods are other ones."""
    items = objects(ALONE)
    assert "models" not in json.dumps(pools(items)) and "models.test" not in json.dumps(pools(items))
    with_key = set()
    for made in of_kind(items, "WorkflowTemplate"):
        for name, step in steps(made).items():
            if "container" in step and "CUDA_AGENT_SEARCH" in json.dumps(step):
                with_key.add((made["metadata"]["name"], name))
                env = {item["name"]: item for item in step["container"]["env"]}
                key = env["CUDA_AGENT_SEARCH_KEY"]["valueFrom"]["secretKeyRef"]
                assert key == {"name": "models", "key": "key"}
                assert env["CUDA_AGENT_SEARCH_SERVER"]["value"] == "https://models.test/v1"
                assert step["metadata"]["labels"]["app.kubernetes.io/component"] == "search"
                assert "serviceAccountName" not in step, "the account of stages, without rights and without a token"
        assert made["spec"]["automountServiceAccountToken"] is False
    version = CHART_VERSION.replace(".", "-")
    assert with_key == {(f"r-cuda-agent-search-{profile}-{version}", "search") for profile in ("cpu", "gpu")}
    rule = ALONE["networkPolicy"]["searchEgress"][0]
    reaching = {
        item["metadata"]["name"]: item["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for item in of_kind(items, "NetworkPolicy")
        if rule in item["spec"].get("egress", [])
    }
    assert reaching == {"r-cuda-agent-searches": "search"}


@needs_helm
def test_a_search_waits_for_the_turn_of_its_profile_and_has_its_pools():
    for profile, gpus in (("cpu", 0), ("gpu", 1)):
        (made,) = of_kind(objects(ALONE), "WorkflowTemplate", f"-search-{profile}-")
        assert made["metadata"]["labels"]["cuda-agent.io/search"] == f"search-{profile}"
        assert "cuda-agent.io/profile" not in made["metadata"]["labels"], "a run would be submitted to it"
        assert made["spec"]["synchronization"]["semaphores"][0]["configMapKeyRef"]["key"] == profile
        assert "parallelism" not in made["spec"]
        env = {item["name"]: item.get("value", "") for item in steps(made)["prepare"]["container"]["env"]}
        (evaluate,) = [one for one in json.loads(env["CUDA_AGENT_POOLS"]) if one["metadata"]["name"] == "RUN-evaluate"]
        limits = evaluate["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == gpus
        assert "nvidia.com/gpu" not in json.dumps(steps(made)["search"]), "the search's own pods need none"


@needs_helm
def test_without_a_server_there_are_no_searches():
    items = objects(merged(WITH_OTHERS, {}))
    assert not of_kind(items, "WorkflowTemplate", "-search-") and not of_kind(items, "NetworkPolicy", "searches")
    assert "networkPolicy.searchEgress" in refusal(merged(WITH_OTHERS, {"search": {"server": "http://m:8000/v1"}}))
    assert "search.server" in refusal(merged(WITH_OTHERS, {"search": {"existingSecret": "m"}}))
    assert "another name" in refusal(merged(WITH_OTHERS, {"profiles": {"search-cpu": {}}}))


@needs_helm
def test_maintenance_jobs_have_the_environment_of_a_run_and_no_webhook():
    values = merged(ALONE, {"webhook": {"existingSecret": "w"}, "gc": {"keep": 7}})
    items = objects(values)
    made = {name: of_kind(items, "WorkflowTemplate", f"-{name}-[0-9]")[0] for name in maintenance_jobs()}
    env = {}
    for name, item in made.items():
        (pod,) = steps(item).values()
        env[name] = {entry["name"]: entry.get("value") for entry in pod["container"]["env"]}
        assert env[name]["CUDA_AGENT_STORE"] == "s3://cuda-agent" and "CUDA_AGENT_WEBHOOK" not in env[name]
        assert item["metadata"]["labels"]["cuda-agent.io/maintenance"] == name
        assert "cuda-agent.io/profile" not in item["metadata"]["labels"]
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "setup"
    assert env["gc"]["CUDA_AGENT_KEEP"] == env["gc-plan"]["CUDA_AGENT_KEEP"] == "7"
    assert json.loads(env["doctor"]["CUDA_AGENT_POOLS"]) == pools(items)
    (cron,) = of_kind(items, "CronWorkflow", "-gc$")
    assert cron["spec"]["workflowSpec"] == {"workflowTemplateRef": {"name": made["gc"]["metadata"]["name"]}}


ROLE = {"access": {"serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/store"}}}


@needs_helm
@pytest.mark.parametrize("secret", ["", "keys"])
def test_with_an_iam_role_the_store_needs_no_keys_and_takes_those_that_are_named(secret):
    items = template(merged(ROLE, {"store": {"existingSecret": secret}}))
    (logs,) = of_kind(items, "ConfigMap", "-artifacts$")
    s3 = json.loads(logs["data"]["store"])["s3"]
    assert s3.get("useSDKCreds", False) is not bool(secret) and ("accessKeySecret" in s3) is bool(secret)
    for item in of_kind(items, "WorkflowTemplate"):
        for pod in steps(item).values():
            if "container" in pod:
                names = {entry["name"] for entry in pod["container"]["env"]}
                assert {"CUDA_AGENT_STORE", "AWS_REGION"} <= names
                assert ({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= names) is bool(secret)
    assert ("secretKeyRef" in json.dumps(of_kind(items, "Pod"))) is bool(secret)
    annotated = {
        item["metadata"]["name"] for item in of_kind(items, "ServiceAccount") if "annotations" in item["metadata"]
    }
    assert "r-cuda-agent-stage" in annotated and "r-cuda-agent-sandbox" not in annotated


@needs_helm
def test_another_annotation_is_no_identity():
    values = {"access": {"serviceAccountAnnotations": {"team": "a"}}}
    assert "or give pods an identity of the cloud" in refusal(values)


def names_of(env: list[dict[str, Any]]) -> set[str]:
    return {entry["name"] for entry in env}


@needs_helm
def test_a_role_by_web_identity_is_taken_by_all_that_use_the_store_and_by_nothing_else():
    """Argo's containers write logs and manifests; sandboxes and the workers of a stage's Ray use no store."""
    arn = "arn:aws:iam::1:role/store"
    items = template({"store": {"roleArn": arn}, "profiles": {"cpu": {"ray": {"enabled": True}}}})
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    executors = json.loads(made["spec"]["podSpecPatch"])
    groups = ray_job(items)["spec"]["rayClusterSpec"]
    head, actors = groups["headGroupSpec"]["template"]["spec"], groups["workerGroupSpecs"][0]["template"]["spec"]
    (test,) = of_kind(items, "Pod")
    stages = [step["container"] for step in steps(made).values() if "container" in step]
    for container in (*stages, *executors["containers"], *executors["initContainers"], *head["containers"],
                      *test["spec"]["containers"]):  # fmt: skip
        assert {"name": "AWS_ROLE_ARN", "value": arn} in container["env"]
        assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & names_of(container["env"])
        assert "/var/run/secrets/store" in {mount["mountPath"] for mount in container["volumeMounts"]}
    for volumes in (made["spec"]["volumes"], head["volumes"], test["spec"]["volumes"]):
        (token,) = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "store-token"]
        assert token[0]["serviceAccountToken"]["audience"] == "sts.amazonaws.com"
    assert test["spec"]["serviceAccountName"] == made["spec"]["serviceAccountName"]
    for other in (actors, *of_kind(pools(items), "StatefulSet")):
        assert "store-token" not in json.dumps(other) and "AWS_ROLE_ARN" not in json.dumps(other)


@needs_helm
def test_the_agent_of_pod_identity_is_the_only_address_more():
    items = template({"store": {"podIdentity": True}})
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    assert not {"AWS_ACCESS_KEY_ID", "AWS_ROLE_ARN"} & names_of(steps(made)["rft"]["container"]["env"])
    keyed, own = (
        of_kind(made_of, "NetworkPolicy", "-runs$")[0]["spec"]["egress"]
        for made_of in (template({"store": {"existingSecret": "s"}}), items)
    )
    (more,) = [rule for rule in own if rule not in keyed]
    assert [peer["ipBlock"]["cidr"] for peer in more["to"]] == ["169.254.170.23/32", "fd00:ec2::23/128"]
    assert more["ports"] == [{"port": 80, "protocol": "TCP"}]


@needs_helm
@needs_argo
def test_an_authority_of_ones_own_is_trusted_by_stages_and_by_argo():
    items = template(merged(WITH_OTHERS, {"privateCa": {"existingSecret": "ca"}}))
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    container = steps(made)["rft"]["container"]
    (mount,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "private-ca"]
    assert {"name": "CUDA_AGENT_CA_FILE", "value": f"{mount}/ca.crt"} in container["env"]
    assert {"name": "private-ca", "secret": {"secretName": "ca"}} in made["spec"]["volumes"]
    (logs,) = of_kind(items, "ConfigMap", "-artifacts$")
    assert json.loads(logs["data"]["store"])["s3"]["caSecret"] == {"name": "ca", "key": "ca.crt"}
    assert argocheck(of_kind(items, "WorkflowTemplate")) == []


@needs_helm
@pytest.mark.parametrize(
    ("values", "port"),
    [
        ({"tracking": {"uri": "https://mlflow.test"}}, 443),
        ({"tracking": {"uri": "https://mlflow.test:8443/api"}}, 8443),
        ({"tracking": {"uri": "http://mlflow.test"}}, 80),
        ({"tracking": {"uri": "http://[fd00::1]:5000"}}, 5000),
        ({"tracking": {"uri": "https://mlflow.test", "allowedPort": 5000}}, 5000),
        ({"store": {"endpoint": "http://minio.storage:9000"}}, 9000),
        ({"store": {"endpoint": "https://s3.test"}}, 443),
        ({"store": {"endpoint": "https://s3.test"}, "networkPolicy": {"storePort": 9000}}, 9000),
    ],
)
def test_runs_may_connect_to_the_port_of_an_address(values, port):
    items = template(merged(WITH_OTHERS, values))
    (policy,) = of_kind(items, "NetworkPolicy", "-runs$")
    cidr = "10.1.0.0/16" if "tracking" in values else "0.0.0.0/0"
    *_, rule = [rule for rule in policy["spec"]["egress"] if {"ipBlock": {"cidr": cidr}} in rule["to"]]
    assert rule["ports"] == [{"port": port, "protocol": "TCP"}]


@needs_helm
@needs_argo
def test_a_profile_takes_what_it_does_not_set_from_its_base():
    own = {"base": "gpu", "device": "H200", "parallelism": 1, "pools": {"evaluate": {"replicas": 8}}}
    own |= {"stages": {"agentic": {"nodeSelector": {"gpu": "h200"}}}}
    items = template(merged(ALONE, {"profiles": {"h200": own, "small": {"defaults": {"nodeSelector": {"a": "b"}}}}}))
    (h200,), (gpu,) = (of_kind(items, "WorkflowTemplate", f"-{name}-[0-9]") for name in ("h200", "gpu"))
    mine, its = steps(h200), steps(gpu)
    assert mine["rft"]["container"]["resources"] == its["rft"]["container"]["resources"]
    assert mine["report"]["container"]["resources"] == its["report"]["container"]["resources"]
    assert mine["agentic"]["nodeSelector"] == {"gpu": "h200"} and "nodeSelector" not in its["agentic"]
    assert h200["spec"]["parallelism"] == 1 and h200["metadata"]["annotations"]["cuda-agent.io/gpus"] == "1"
    replicas = {
        item["metadata"]["name"]: item["spec"]["replicas"] for item in of_kind(pools(items, "h200"), "StatefulSet")
    }
    assert replicas == {"RUN-workspace": 2, "RUN-build": 2, "RUN-evaluate": 8}
    (small,) = of_kind(items, "WorkflowTemplate", "-small-")  # the base is cpu
    assert steps(small)["rft"]["nodeSelector"] == {"a": "b"}
    assert small["metadata"]["annotations"]["cuda-agent.io/gpus"] == "0"
    assert argocheck([h200, small]) == []


@needs_helm
@needs_argo
def test_argo_accepts_a_store_without_keys():
    assert argocheck(of_kind(objects(ROLE), "WorkflowTemplate")) == []


@needs_helm
def test_a_value_stays_a_value():
    """What looks like YAML, JSON or a template in a value is text in one field and nothing else."""
    evil = 'a"}],"hostNetwork":true,"x":[{"y":"\n  privileged: true {{ .Values }} {{workflow.name}}'
    values = merged(ALONE, {"environment": {"EVIL": evil}, "sandbox": {"environment": {"EVIL": evil}}})
    items = template(values)
    for item in of_kind(items, "WorkflowTemplate"):
        for pod in steps(item).values():
            if "container" in pod:
                assert {"name": "EVIL", "value": evil} in pod["container"]["env"]
        assert "hostNetwork" not in item["spec"]
    assert {"name": "EVIL", "value": evil} in pools(items)[-1]["spec"]["template"]["spec"]["containers"][0]["env"]


@needs_helm
def test_a_stages_own_place_wins_over_the_profiles():
    own = {"resources": {"limits": {"cpu": "7", "memory": "3Gi", "ephemeral-storage": "1Gi"}}}
    values = merged(ALONE, {"profiles": {"cpu": {"stages": {"rft": own}}}})
    (made,) = of_kind(objects(values), "WorkflowTemplate", "-cpu-")
    cpus = {
        item["name"]: item["container"]["resources"]["limits"]
        for item in made["spec"]["templates"]
        if item["name"] in {stage.name for stage in ROWS}
    }
    assert cpus.pop("rft") == own["resources"]["limits"]
    assert {limits["cpu"] for limits in cpus.values()} == {"2"}


@needs_helm
def test_stages_with_a_gpu_and_pools_with_a_gpu_tolerate_its_nodes():
    items = objects(ALONE)
    (made,) = of_kind(items, "WorkflowTemplate", "-gpu-")
    by_name = {item["name"]: item for item in made["spec"]["templates"]}
    assert by_name["agentic"]["container"]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert by_name["agentic"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "nvidia.com/gpu" not in by_name["report"]["container"]["resources"]["limits"]
    by_role = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in of_kind(pools(items, "gpu"), "StatefulSet")
    }
    assert by_role["RUN-evaluate"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in json.dumps(by_role["RUN-build"])


@needs_helm
def test_a_stage_knows_the_gpus_that_it_and_the_runs_servers_have():
    """A budget of GPU-hours counts them (`pipeline/budget.py`)."""
    engine = {"replicas": 3, "claim": "weights", "resources": {"limits": {"nvidia.com/gpu": 4}}}
    workers = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    judges = {"evaluate": {"replicas": 2}}
    items = objects(merged(ALONE, {"profiles": {"gpu": {"engine": engine, "ray": workers, "pools": judges}}}))
    (made,) = of_kind(items, "WorkflowTemplate", "-gpu-")
    by_name = steps(made)
    environment = {
        name: {one["name"]: one.get("value", "") for one in by_name[name]["container"]["env"]}
        for name in ("agentic", "report", "finish", "agentic-ray")
    }
    shared = {"ray": 8, "sandboxes": 2, "engines": 12}
    assert json.loads(environment["agentic"]["CUDA_AGENT_GPUS"]) == {"stage": 1, **shared}
    assert json.loads(environment["report"]["CUDA_AGENT_GPUS"]) == {"stage": 0, **shared}
    assert "CUDA_AGENT_GPUS" not in environment["finish"]
    head = json.loads(environment["agentic-ray"]["CUDA_AGENT_RAY"])[-1]["spec"]["rayClusterSpec"]["headGroupSpec"]
    of_head = {one["name"]: one.get("value") for one in head["template"]["spec"]["containers"][0]["env"]}
    assert json.loads(of_head["CUDA_AGENT_GPUS"])["ray"] == 8
    (cpu,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    of_cpu = {one["name"]: one.get("value") for one in steps(cpu)["agentic"]["container"]["env"]}
    assert json.loads(of_cpu["CUDA_AGENT_GPUS"]) == {"stage": 0, "ray": 0, "sandboxes": 0, "engines": 0}


@needs_helm
def test_kueue_finds_the_queue_and_the_priority_on_every_pod_that_works():
    queue = {"queue": "team-a", "queuePriority": "urgent"}
    items = objects(merged(ALONE, {"profiles": {"cpu": queue}}))
    wanted = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "urgent"}
    servers = [one for one in [*pools(items), *engines(items)] if one["kind"] == "StatefulSet"]
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    small = ("prepare", "finish")
    for name, one in steps(made).items():
        if "container" in one:
            labels = one["metadata"]["labels"]
            works = name not in small and not name.endswith("-ray")  # those only wait: a RayJob has the labels
            assert (wanted.items() <= labels.items()) == works, name
    for labels in [
        ray_job(items)["metadata"]["labels"],
        *(one["spec"]["template"]["metadata"]["labels"] for one in servers),
    ]:
        assert wanted.items() <= labels.items()
    (other,) = of_kind(items, "WorkflowTemplate", "-gpu-")
    assert "kueue.x-k8s.io" not in json.dumps(other)
    assert "name a LocalQueue" in refusal(merged(ALONE, {"profiles": {"cpu": {"queuePriority": "urgent"}}}))


@needs_helm
def test_every_pod_of_a_run_has_the_annotations_that_keep_its_node():
    items = objects(WITH_OTHERS)
    patterns: list[Any] = [
        pod["spec"]["template"]
        for pod in [*pools(items), *pools(items, "gpu"), *engines(items)]
        if pod["kind"] == "StatefulSet"
    ]
    for made in of_kind(items, "WorkflowTemplate"):
        patterns += [one for one in made["spec"]["templates"] if "container" in one]
    assert len(patterns) > 40
    for pattern in patterns:
        assert pattern["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@needs_helm
def test_with_secrets_of_the_administrator_two_renderings_are_equal():
    """As tools need it that render the chart again and again, and cannot look up a random secret."""
    values = merged(ALONE, {"minio": {"existingSecret": "keys"}})
    assert template(values) == template(values)
    random = [template(merged(ALONE, {"minio": {"existingSecret": ""}})) for _ in range(2)]
    assert random[0] != random[1], "the chart's own keys are random"


@needs_helm
def test_claims_take_the_place_of_counted_gpus():
    profile = {"pools": {"evaluate": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}}
    gpu = {"allocation": "dra", "sharedClaim": "one", "selectors": ["device.driver == 'a'"]}
    items = objects(merged(ALONE, {"gpu": gpu, "profiles": {"gpu": profile}}))
    (made,) = of_kind(items, "WorkflowTemplate", "-gpu-")
    stages = {item["name"]: item for item in made["spec"]["templates"]}
    servers = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in of_kind(pools(items, "gpu"), "StatefulSet")
    }
    templates = {item["metadata"]["name"]: item["spec"]["spec"] for item in of_kind(items, "ResourceClaimTemplate")}
    (judge,) = servers["RUN-evaluate"]["resourceClaims"]
    (asked,) = templates[judge["resourceClaimTemplateName"]]["devices"]["requests"]
    wanted = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 2}
    assert asked["exactly"] == wanted | {"selectors": [{"cel": {"expression": "device.driver == 'a'"}}]}
    (container,) = servers["RUN-evaluate"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpus"}], "the claim of the pod"
    patch = json.loads(stages["agentic"]["podSpecPatch"])
    assert patch["resourceClaims"] == [{"name": "gpus", "resourceClaimName": "one"}]
    assert patch["terminationGracePeriodSeconds"] and stages["agentic"]["container"]["resources"]["claims"]
    for small in (stages["report"]["container"], servers["RUN-build"]["containers"][0]):
        assert "claims" not in small["resources"]
    assert not any(
        "nvidia.com/gpu" in json.dumps(one["resources"]) for one in [container, stages["agentic"]["container"]]
    )


@needs_helm
@pytest.mark.parametrize("values", [ALONE, WITH_OTHERS], ids=["alone", "with others"])
def test_every_pod_is_restricted_and_limited(values):
    items = objects(values)
    for name, pod in pod_templates(items):
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]
        assert not any("hostPath" in volume for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]} and security["seccompProfile"]
            assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"]), name
    for made in of_kind(items, "WorkflowTemplate"):
        for item in made["spec"]["templates"]:
            if "container" in item:
                limits = item["container"]["resources"]["limits"]
                assert {"cpu", "memory", "ephemeral-storage"} <= set(limits), item["name"]


@needs_helm
def test_only_prepare_finish_and_maintenance_have_an_account_that_may_do_anything():
    items = objects(ALONE)
    automounted = {i["metadata"]["name"] for i in of_kind(items, "ServiceAccount") if i["automountServiceAccountToken"]}
    assert automounted == {f"r-cuda-agent-{name}" for name in ("operator", "collector", "ray")}
    bound = {
        subject["name"]: binding["roleRef"]["name"]
        for binding in of_kind(items, "RoleBinding")
        for subject in binding["subjects"]
        if subject["kind"] == "ServiceAccount"
    }
    told = ("executor", "operator", "collector", "ray")
    assert bound == {f"r-cuda-agent-{name}": f"r-cuda-agent-{name}" for name in told}
    accounts = dict.fromkeys(("prepare", "finish", "doctor"), "r-cuda-agent-operator")
    accounts |= dict.fromkeys(("gc", "gc-plan", "pin", "unpin"), "r-cuda-agent-collector")
    accounts |= {task_name(stage.name): "r-cuda-agent-ray" for stage in ROWS if can_be_spread(stage)}
    for made in of_kind(items, "WorkflowTemplate"):
        assert made["spec"]["serviceAccountName"] == "r-cuda-agent-stage"
        for item in made["spec"]["templates"]:
            assert item.get("serviceAccountName") == accounts.get(item["name"])


@needs_helm
def test_no_role_reads_secrets_or_takes_everything():
    for role in of_kind(objects(ALONE), "Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            if "secrets" in rule["resources"]:
                assert set(rule["verbs"]) <= {"create", "delete"}
            assert "pods/exec" not in rule["resources"]
    assert not of_kind(objects(ALONE), "ClusterRole") and not of_kind(objects(ALONE), "ClusterRoleBinding")


@needs_helm
@pytest.mark.parametrize("values", [ALONE, WITH_OTHERS], ids=["alone", "with others"])
def test_the_network_denies_by_default_and_sandboxes_reach_nothing(values):
    items = objects(values)
    (deny,) = of_kind(items, "NetworkPolicy", "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    labels = next(item for item in pools(items) if item["kind"] == "StatefulSet")["spec"]["template"]["metadata"][
        "labels"
    ]
    for policy in [*of_kind(items, "NetworkPolicy"), *of_kind(pools(items), "NetworkPolicy")]:
        if selects(policy["spec"]["podSelector"], labels):
            assert not policy["spec"].get("egress"), policy["metadata"]["name"]
    (own,) = of_kind(pools(items), "NetworkPolicy")
    (rule,) = own["spec"]["ingress"]
    assert rule["ports"] == [{"port": PORT, "protocol": "TCP"}]
    assert rule["from"][0]["podSelector"]["matchLabels"]["workflows.argoproj.io/workflow"] == "RUN"


@needs_helm
def test_the_ingress_of_mlflow_opens_its_controllers_way_and_no_other():
    inside = merged(ALONE, {"mlflow": {"ingress": {"host": "m.test", "tlsSecret": "tls"}}})
    assert not of_kind(objects(ALONE), "Ingress")
    (ingress,) = of_kind(items := objects(inside), "Ingress")
    (service,) = of_kind(items, "Service", "mlflow")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": "http"}}
    (rule,) = of_kind(items, "NetworkPolicy", "mlflow")[0]["spec"]["ingress"]
    (before,) = of_kind(objects(ALONE), "NetworkPolicy", "mlflow")[0]["spec"]["ingress"]
    controller = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
    assert rule["from"] == [*before["from"], controller]


@needs_helm
@pytest.mark.nightly  # starts MLflow
def test_mlflow_answers_pages_from_its_ingress_and_no_others(tmp_path):
    inside = merged(ALONE, {"mlflow": {"ingress": {"host": "m.test", "tlsSecret": "tls"}}})
    (server,) = of_kind(objects(inside), "Deployment", "mlflow")
    arguments = server["spec"]["template"]["spec"]["containers"][0]["args"]
    options = [one for one in arguments if one.startswith(("--allowed-hosts", "--cors"))]
    with serving(tmp_path, *options) as address:

        def code(host: str, origin: str) -> int:
            url = f"{address}/ajax-api/2.0/mlflow/experiments/search"
            return httpx.post(url, json={"max_results": 1}, headers={"Host": host, "Origin": origin}).status_code

        assert code("m.test", "https://m.test") == 200
        assert code("m.test", "https://evil.test") == 403 and code("evil.test", "https://m.test") == 403


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for entry in selector.get("matchExpressions", []):
        assert entry["operator"] == "In"
        if labels.get(entry["key"]) not in entry["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@needs_helm
def test_selectors_find_the_pods_that_they_are_for():
    items = objects(ALONE)
    made = [*items, *pools(items), *engines(items)]
    pods = [item["spec"]["template"]["metadata"]["labels"] for item in made if "template" in item.get("spec", {})]
    for item in made:
        if item["kind"] == "Service":
            assert any(selects({"matchLabels": item["spec"]["selector"]}, labels) for labels in pods), item["metadata"][
                "name"
            ]
        if item["kind"] in ("Deployment", "StatefulSet"):
            assert selects(item["spec"]["selector"], item["spec"]["template"]["metadata"]["labels"])
    workflows = of_kind(items, "WorkflowTemplate", "-cpu-") + of_kind(items, "WorkflowTemplate", "-search-cpu-")
    templates = [item for workflow in workflows for item in workflow["spec"]["templates"]]
    stages = [item["metadata"]["labels"] for item in templates if "container" in item]
    for policy in of_kind(items, "NetworkPolicy"):
        assert any(selects(policy["spec"]["podSelector"], labels) for labels in [*pods, *stages]), policy["metadata"][
            "name"
        ]


@needs_helm
def test_every_reference_to_a_secret_an_account_or_a_claim_names_something_that_is_made():
    items = objects(ALONE)
    made = {(item["kind"], item["metadata"]["name"]) for item in items}
    made |= {("Secret", "RUN-sandbox"), ("Secret", "{{workflow.name}}-sandbox")}  # by prepare
    made |= {("Secret", ALONE["search"]["existingSecret"])}  # by the operator
    for item in [*items, *pools(items), *pools(items, "gpu"), *engines(items)]:
        facts = flat(item)
        for path, value in facts.items():
            if path.endswith("secretKeyRef.name") or path.endswith("KeySecret.name"):
                assert ("Secret", value) in made, path
            if path.endswith("claimName") and value != "weights":  # that one is the platform engineer's
                assert ("PersistentVolumeClaim", value) in made, path
            if path.endswith("erviceAccountName"):
                assert ("ServiceAccount", value) in made, path
            if path.endswith("artifactRepositoryRef.configMap"):
                assert ("ConfigMap", value) in made, path
    (token,) = of_kind(items, "Secret", "executor.service-account-token")
    assert token["metadata"]["annotations"]["kubernetes.io/service-account.name"] == "r-cuda-agent-executor"


@needs_helm
def test_the_policy_admits_only_this_releases_templates():
    (policy,) = of_kind(objects(ALONE), "ValidatingAdmissionPolicy", "-workflows$")
    (binding,) = of_kind(objects(ALONE), "ValidatingAdmissionPolicyBinding", "-workflows$")
    assert policy["spec"]["failurePolicy"] == "Fail" and binding["spec"]["validationActions"] == ["Deny"]
    assert binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "ns"
    }
    text = json.dumps(policy["spec"]["validations"])
    assert "^(r-cuda-agent)-[a-z0-9-]+$" in text and "clusterScope" in text


@needs_helm
def test_logs_go_to_the_store_under_the_prefix():
    (made,) = of_kind(objects(merged(WITH_OTHERS, {"store": {"prefix": "a/b"}})), "ConfigMap", "artifacts")
    store = json.loads(made["data"]["store"])
    assert store["s3"]["endpoint"] == "s3.test" and store["s3"]["insecure"] is False
    assert store["s3"]["keyFormat"] == "a/b/argo/{{workflow.name}}/{{pod.name}}"
    assert store["s3"]["accessKeySecret"] == {"name": "s3", "key": "accesskey"}


@needs_helm
def test_a_later_version_restarts_no_server_whose_image_stays(tmp_path):
    """MinIO under a run that is live: what its pods are made of says nothing of the chart's version."""
    later = tmp_path / "chart"
    shutil.copytree(CHART, later)
    about = (later / "Chart.yaml").read_text()
    (later / "Chart.yaml").write_text(about.replace(f"ersion: {CHART_VERSION}", "ersion: 9.9.9"))
    pinned = {name: {"tag": "1"} for name in ("stage", "sandbox", "minio", "mlflow")}
    made = []
    for folder in (CHART, later):
        done = helm(
            "template", "r", str(folder), "--kube-version", KUBERNETES, values=merged(ALONE, {"images": pinned})
        )
        items = [item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item]
        made.append({item["metadata"]["name"]: item for item in of_kind(items, "Deployment")})
    before, after = made
    assert set(before) == {"r-cuda-agent-minio", "r-cuda-agent-mlflow"}
    for name in before:
        assert before[name]["metadata"]["labels"] != after[name]["metadata"]["labels"]
        assert before[name]["spec"] == after[name]["spec"]


@needs_helm
def test_labels_are_on_everything():
    for item in objects(merged(ALONE, {"commonLabels": {"team": "kernels"}})):
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "r" and labels["team"] == "kernels", item["metadata"]["name"]
        assert labels["helm.sh/chart"].startswith("cuda-agent-")


@needs_helm
@pytest.mark.parametrize("release", ["r", "cuda-agent", "a-release-with-a-name-of-forty-letters-00"])
def test_names_are_short_enough_for_what_is_appended(release):
    for item in template(ALONE, release=release):
        longest = 63 if item["kind"] in ("Service", "WorkflowTemplate") else 253
        assert len(item["metadata"]["name"]) <= longest
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63


@needs_helm
def test_the_notes_print_the_next_commands_and_warn(tmp_path):
    """Helm shows notes only with a cluster; here they are rendered as an object of a copy of the chart."""
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    text = (copy / "templates" / "NOTES.txt").read_text()
    as_object = (
        'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata: {notes: {{ include "notes" . | quote }}}\n'
    )
    (copy / "templates" / "notes.yaml").write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}\n{as_object}')
    values = merged(ALONE, {"networkPolicy": {"enabled": False}, "admission": {"enabled": False}})
    done = helm("template", "r", str(copy), "--namespace", "ns", "--show-only", "templates/notes.yaml", values=values)
    assert done.returncode == 0, done.stderr
    notes = yaml.safe_load(done.stdout)["data"]["notes"]
    assert "kubectl label namespace ns pod-security.kubernetes.io/enforce=restricted" in notes
    for command in ("helm test r", "cuda-agent submit", "cuda-agent watch"):
        assert command in notes
    assert notes.count("WARNING") == 2


@needs_helm
def test_all_roles_have_a_pool():
    sets = of_kind(pools(objects(ALONE)), "StatefulSet")
    assert [item["metadata"]["labels"]["cuda-agent.io/role"] for item in sets] == list(ROLES)


def test_dashboards_and_alerts_ask_for_metrics_that_exist(tmp_path):
    known = set(re.findall(r"# TYPE (\S+)", Metrics().text().decode()))
    known |= {family.name for family in StageCollector(tmp_path, "a", "agentic", "ada").collect()}
    for file in ("files/dashboard.json", "files/dashboard-runs.json", "templates/monitoring.yaml"):
        asked = set(re.findall(r"cuda_agent_\w+", (CHART / file).read_text()))
        assert asked and {re.sub(r"_(sum|count|bucket)$", "", name) for name in asked} <= known


@needs_helm
def test_every_alert_has_a_sentence_and_asks_for_this_namespace():
    (rule,) = of_kind(template(ALONE, namespace="kernels"), "PrometheusRule")
    alerts = {alert["alert"]: alert for group in rule["spec"]["groups"] for alert in group["rules"]}
    assert alerts.keys() >= {
        "CudaAgentSandboxUnready", "CudaAgentEpisodesLost", "CudaAgentStageStuck", "CudaAgentPodPending",
        "CudaAgentVolumeFull",
    }  # fmt: skip
    for alert in alerts.values():
        assert alert["labels"]["severity"] and alert["annotations"]["summary"].endswith(".")
        others = re.findall(r"(?:kube_|kubelet_)\w+(\S*)", alert["expr"])
        assert all('namespace="kernels"' in selector for selector in others), "metrics that the whole cluster has"
    assert "> 7200" in alerts["CudaAgentStageStuck"]["expr"]
    assert "{{ $labels.run }}" in alerts["CudaAgentEpisodesLost"]["annotations"]["summary"]


@needs_helm
def test_prometheus_finds_and_reaches_the_port_of_every_stage():
    items = objects(ALONE)
    (monitor,) = of_kind(items, "PodMonitor")
    (policy,) = of_kind(items, "NetworkPolicy", "-stage-metrics$")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert policy["spec"]["podSelector"]["matchLabels"] == wanted
    (port,) = policy["spec"]["ingress"][0]["ports"]
    for made in of_kind(items, "WorkflowTemplate", "-(cpu|gpu)-"):
        stages = {stage.name for stage in ROWS}
        for pod in (item for item in steps(made).values() if "container" in item):
            assert (pod["metadata"]["labels"].items() >= wanted.items()) is (pod["name"] in stages)
            named = {one["name"]: one["containerPort"] for one in pod["container"].get("ports", [])}
            if pod["name"] in stages:
                env = {one["name"]: one.get("value") for one in pod["container"]["env"]}
                assert named == {"metrics": port["port"]} and env["CUDA_AGENT_METRICS_PORT"] == str(port["port"])
    without = objects(merged(ALONE, {"monitoring": {"podMonitor": False}}))
    assert "9464" not in json.dumps(without) and not of_kind(without, "PodMonitor")


@needs_helm
@pytest.mark.parametrize(
    ("address", "port"),
    [("http://c.monitoring:4318", 4318), ("https://otlp.test/path", 443), ("http://otlp.test", 80)],
)
def test_a_runs_pods_may_send_traces_to_the_collector_alone(address, port):
    values = {"tracing": {"endpoint": address}, "networkPolicy": {"tracingCidrs": ["10.0.0.6/32"]}}
    items = objects(merged(ALONE, values))
    (policy,) = of_kind(items, "NetworkPolicy", "-runs$")
    (rule,) = (rule for rule in policy["spec"]["egress"] if {"ipBlock": {"cidr": "10.0.0.6/32"}} in rule["to"])
    assert rule["ports"] == [{"port": port, "protocol": "TCP"}]
    assert rule["to"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    (made,) = of_kind(items, "WorkflowTemplate", "-cpu-")
    pods = {name: item["container"] for name, item in steps(made).items() if "container" in item}
    for container in pods.values():
        assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": address} in container["env"]
    for values in (entry["value"] for entry in pods["prepare"]["env"] if entry["name"] == "CUDA_AGENT_POOLS"):
        assert "OTEL_" not in values, "sandboxes run candidates, and send nothing"
    silent = objects(merged(ALONE, {"tracing": {"endpoint": ""}}))
    assert "OTEL_" not in json.dumps(silent)
    (policy,) = of_kind(silent, "NetworkPolicy", "-runs$")
    assert "monitoring" not in json.dumps(policy)
