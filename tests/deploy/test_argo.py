"""The rendered workflow: it is the graph, and Argo accepts it."""

import json
import re

import pytest
import yaml

from cuda_agent.cluster.pools import version_name
from cuda_agent.cluster.rayjobs import can_be_spread
from cuda_agent.deploy import argo, chart
from cuda_agent.deploy.argo import (
    CONCURRENCY_GROUP,
    RETRY,
    cron_workflow,
    maintenance_jobs,
    search_template,
    workflow_template,
)
from cuda_agent.pipeline.graph import ROWS, Stage
from tests.deploy.charts import ARGO, ROOT, argocheck, needs_argo, steps

TEMPLATE = workflow_template()
SPEC = TEMPLATE["spec"]
TEMPLATES = steps(TEMPLATE)
TASKS = {task["name"]: task for task in TEMPLATES["run"]["dag"]["tasks"]}
PATCH = json.loads(SPEC["podSpecPatch"])  # of all pods; Argo applies a template's own after it
EXECUTORS = [*PATCH["containers"], *PATCH["initContainers"]]
PODS = {name: item for name, item in TEMPLATES.items() if "container" in item}


def test_what_is_stored_is_what_is_rendered():
    assert chart.drift(ROOT) == [], "cuda-agent render"


SPREAD = [stage.name for stage in ROWS if can_be_spread(stage)]


def test_every_stage_is_a_task_after_prepare_and_after_what_it_reads():
    for stage in ROWS:
        above = [task for name in stage.upstream for task in (name, f"{name}-ray") if task in TASKS]
        assert TASKS[stage.name]["dependencies"] == ["prepare", *above]
        assert TASKS[stage.name]["template"] == stage.name
    tasks = {stage.name for stage in ROWS} | {f"{name}-ray" for name in SPREAD}
    assert set(TASKS) == tasks | {"prepare", "finish"}


def test_a_stage_that_ray_can_spread_has_a_second_task_in_the_same_place():
    assert set(SPREAD) == {stage.name for stage in ROWS if "agent" in stage.config} - {"bootstrap"}, "all that play"
    for name in SPREAD:
        one, other = TASKS[name], TASKS[f"{name}-ray"]
        assert other == one | {"name": f"{name}-ray", "template": f"{name}-ray", "when": other["when"]}
        assert other["when"] == one["when"].replace("== run", "== ray")
        step = TEMPLATES[f"{name}-ray"]
        assert step["container"]["args"][:3] == ["pod", "ray", name] and step["serviceAccountName"].endswith("-ray")
        assert step["outputs"] == TEMPLATES[name]["outputs"]


def test_every_stage_runs_only_when_prepare_says_so():
    outputs = {item["name"] for item in TEMPLATES["prepare"]["outputs"]["parameters"]}
    assert outputs == {stage.name for stage in ROWS} | {"servers", "engines", "finish"}
    for name in {*TASKS} - {"prepare"} - {f"{name}-ray" for name in SPREAD}:
        assert TASKS[name]["when"] == f"{{{{tasks.prepare.outputs.parameters.{name}}}}} == run"


def test_finish_comes_after_every_stage_that_nobody_reads():
    stages = (
        Stage("one", "m", outputs=("a",)),
        Stage("two", "m", inputs={"a": "one.a"}, outputs=("b",)),
        Stage("three", "m", inputs={"a": "one.a"}, outputs=("c",)),
    )
    tasks = next(item for item in workflow_template(stages)["spec"]["templates"] if item["name"] == "run")["dag"][
        "tasks"
    ]
    assert tasks[-1]["dependencies"] == ["prepare", "two", "three"]


def test_a_wrong_table_is_refused():
    with pytest.raises(ValueError, match="no stage above makes"):
        workflow_template((Stage("one", "m", inputs={"a": "two.a"}),))


def test_a_field_that_argo_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(argo.pools, "POD_SECURITY", {"runAsNonroot": True})
    with pytest.raises(ValueError, match="does not know all fields of cuda-agent-doctor-"):
        maintenance_jobs()


def test_users_pass_run_config_and_lane_and_none_reaches_a_field_that_decides_what_a_pod_may_do():
    assert [item["name"] for item in SPEC["arguments"]["parameters"]] == ["run", "config", "group"]
    for pod in PODS.values():
        elsewhere = {key: value for key, value in pod.items() if key not in ("container", "outputs")}
        container = {key: value for key, value in pod["container"].items() if key != "args"}
        assert "workflow.parameters" not in json.dumps([elsewhere, container, pod.get("outputs")])
    rest = {key: value for key, value in SPEC.items() if key not in ("templates", "synchronization")}
    assert "workflow.parameters" not in json.dumps(rest)
    assert (
        SPEC["synchronization"] == {"mutexes": [{"name": CONCURRENCY_GROUP}]}
        and "parameters.group" in CONCURRENCY_GROUP
    )


@pytest.mark.parametrize("name", maintenance_jobs())
def test_a_maintenance_job_is_one_pod_that_users_pass_at_most_a_run_to(name):
    spec = maintenance_jobs()[name]["spec"]
    (pod,) = spec["templates"]
    told = {"doctor": {"workflow.name"}, "pin": {"workflow.parameters.run"}, "unpin": {"workflow.parameters.run"}}
    assert set(re.findall(r"\{\{(.*?)\}\}", json.dumps(spec))) == told.get(name, set())
    assert spec.get("arguments") == ({"parameters": [{"name": "run"}]} if "pin" in name else None)
    assert spec["entrypoint"] == pod["name"] == name
    assert "retryStrategy" not in pod and [item["name"] for item in pod["outputs"]["parameters"]] == ["answer"]


@needs_argo
def test_argo_accepts_the_maintenance_jobs():
    assert argocheck([*maintenance_jobs().values()]) == []


def test_every_reference_names_something_that_is_there():
    known = {"workflow.name", "workflow.status", "workflow.parameters.run", "workflow.parameters.config"}
    known |= {
        f"tasks.prepare.outputs.parameters.{item['name']}" for item in TEMPLATES["prepare"]["outputs"]["parameters"]
    }
    for name, item in TEMPLATES.items():
        inputs = {f"inputs.parameters.{entry['name']}" for entry in item.get("inputs", {}).get("parameters", [])}
        used = set(re.findall(r"\{\{(.*?)\}\}", json.dumps(item)))
        assert used <= known | inputs, name


def test_artifacts_are_keys_and_nothing_else():
    for stage in ROWS:
        (artifact,) = TEMPLATES[stage.name]["outputs"]["artifacts"]
        assert set(artifact["s3"]) == {"key"} and artifact["archive"] == {"none": {}}
        assert not TEMPLATES[stage.name].get("inputs", {}).get("artifacts")


def test_every_pod_is_restricted_and_only_prepare_and_finish_have_a_token():
    assert SPEC["automountServiceAccountToken"] is False
    assert SPEC["executor"]["serviceAccountName"] != SPEC["serviceAccountName"]
    assert SPEC["securityContext"]["runAsNonRoot"] and SPEC["securityContext"]["runAsUser"] > 0
    for name, pod in PODS.items():
        told = ("prepare", "finish", *(f"{name}-ray" for name in SPREAD))
        assert bool(pod.get("automountServiceAccountToken")) == (name in told)
        for container in [pod["container"], *EXECUTORS]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]} and security["runAsNonRoot"]
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [container["name"] for container in EXECUTORS] == ["wait", "init"]
    for container in EXECUTORS:
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])


def test_every_pod_has_a_deadline_and_time_for_its_checkpoint():
    assert SPEC["activeDeadlineSeconds"] > 0
    for name, pod in PODS.items():
        assert 0 < pod["activeDeadlineSeconds"] <= SPEC["activeDeadlineSeconds"]
        patch = PATCH | json.loads(pod.get("podSpecPatch", "{}"))
        assert patch["terminationGracePeriodSeconds"] >= (120 if name in {stage.name for stage in ROWS} else 60)


def evaluate_retry(exit_code: str, status: str, message: str, retries: int) -> bool:
    """The expression in Python: its operators are the same but for a few spellings."""
    text = RETRY
    for old, new in (("lastRetry.", "last_"), ("&&", " and "), ("||", " or ")):
        text = text.replace(old, new)
    text = re.sub(r"(\w+) matches '(.*?)'", r"bool(re.search('\2', \1))", text)
    text = re.sub(
        r"\((bool\(re.search\('OOMKilled', last_message\)\)) \? (.*?) : (.*)\)$", r"((\2) if \1 else \3)", text
    )
    text = text.replace("!(", "not (")
    scope = {
        "last_exitCode": exit_code,
        "last_status": status,
        "last_message": message,
        "retries": str(retries),
        "re": re,
    }
    return eval(text, scope)


@pytest.mark.parametrize(
    ("exit_code", "status", "message", "retries", "again"),
    [
        ("75", "Failed", "Error (exit code 75)", 3, True),
        ("137", "Failed", "Error (exit code 137)", 2, True),
        ("143", "Failed", "Error (exit code 143): terminated", 0, True),
        ("-1", "Error", "pod deleted", 1, True),
        ("-1", "Failed", "The node was low on resource: memory", 1, True),
        ("137", "Error", "node shutdown", 0, True),
        ("1", "Failed", "Error (exit code 1)", 0, False),
        ("78", "Failed", "Error (exit code 78)", 0, False),
        ("79", "Failed", "Error (exit code 79)", 0, False),
        ("137", "Failed", "OOMKilled (exit code 137)", 0, True),
        ("137", "Failed", "OOMKilled (exit code 137)", 1, False),
        ("143", "Failed", "Pod was active on the node longer than the specified deadline", 0, False),
    ],
)
def test_what_is_tried_again(exit_code, status, message, retries, again):
    assert evaluate_retry(exit_code, status, message, retries) is again


def test_every_pod_is_tried_again_with_longer_and_longer_waits():
    for pod in PODS.values():
        retries = pod["retryStrategy"]
        assert retries["expression"] == RETRY and retries["retryPolicy"] == "Always"
        assert int(retries["limit"]) > 0 and int(retries["backoff"]["factor"]) > 1 and retries["backoff"]["cap"]


def test_names_carry_the_version():
    assert TEMPLATE["metadata"]["name"] == f"cuda-agent-{version_name()}"
    assert cron_workflow()["spec"]["workflowSpec"]["workflowTemplateRef"]["name"] == TEMPLATE["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9-]+", TEMPLATE["metadata"]["name"])


def workflow(**spec: object) -> dict[str, object]:
    parameters = [{"name": "run", "value": "a"}, {"name": "config", "value": "ab" * 32}]
    reference = {"name": TEMPLATE["metadata"]["name"]}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "a"},
        "spec": {"workflowTemplateRef": reference, "arguments": {"parameters": parameters}} | spec,
    }


@needs_argo
def test_argo_accepts_the_template_what_is_made_of_it_and_the_cron_workflow():
    assert argocheck([TEMPLATE, workflow(), cron_workflow()]) == []


@needs_argo
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(podGarbage={}), "unknown field"),
        (lambda spec: spec["templates"][0]["dag"]["tasks"][1].update(dependencies=["nobody"]), "nobody"),
        (
            lambda spec: spec["templates"][2]["container"]["args"].append("{{inputs.parameters.x}}"),
            "inputs.parameters.x",
        ),
        (lambda spec: spec.update(entrypoint="elsewhere"), "elsewhere"),
    ],
)
def test_argo_refuses_what_is_wrong(change, said):
    wrong = json.loads(json.dumps(TEMPLATE))
    change(wrong["spec"])
    assert any(said in line for line in argocheck([wrong]))


@pytest.mark.nightly
@needs_argo
@pytest.mark.parametrize("kind", ["workflowtemplates", "cronworkflows"])
def test_the_full_definitions_know_every_field(kind):
    """What a cluster with Argo's full CRDs would silently leave out is a mistake here."""
    assert ARGO is not None
    definition = yaml.safe_load((ARGO.parent / f"argoproj.io_{kind}.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    item = TEMPLATE if kind == "workflowtemplates" else cron_workflow()
    assert unknown(item, schema) == []
    spoilt = json.loads(json.dumps(item))
    spoilt["spec"]["activeDeadlineSecond"] = 1
    assert unknown(spoilt, schema) == [".spec.activeDeadlineSecond"]


def unknown(value: object, schema: dict[str, object], path: str = "") -> list[str]:
    """Paths that a structural schema prunes."""
    found: list[str] = []
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            if key in properties:  # type: ignore[operator]
                found += unknown(inner, properties[key], f"{path}.{key}")  # type: ignore[index]
            elif isinstance(more, dict):
                found += unknown(inner, more, f"{path}.{key}")
            elif path not in (".metadata", "") and not schema.get("x-kubernetes-preserve-unknown-fields"):
                found.append(f"{path}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for inner in value:
            found += unknown(inner, schema["items"], f"{path}[]")  # type: ignore[arg-type]
    return found


SEARCH = search_template()
SEARCH_STEPS = steps(SEARCH)


def test_a_search_fans_out_over_its_players_and_ends_even_if_one_of_them_fails():
    tasks = {task["name"]: task for task in SEARCH_STEPS["run"]["dag"]["tasks"]}
    assert {name: task.get("depends") for name, task in tasks.items()} == {
        "prepare": None,
        "begin": "prepare",
        "player": "begin",
        "end": "player.Succeeded || player.Failed || player.Errored",
    }
    assert SEARCH_STEPS["run"]["dag"]["failFast"] is False
    assert tasks["player"]["withParam"] == "{{tasks.prepare.outputs.parameters.players}}"
    given = {
        name: {item["name"]: item["value"] for item in tasks[name]["arguments"]["parameters"]}
        for name in tasks
        if name != "prepare"
    }
    assert {name: values["what"] for name, values in given.items()} == {name: name for name in given}
    assert given["player"]["player"] == "{{item}}" and "player" not in given["end"]
    assert SEARCH["spec"]["hooks"] == {"exit": {"template": "exit"}}, "the sandboxes go, however it ended"
    assert SEARCH_STEPS["exit"]["steps"] == [[{"name": "finish", "template": "finish"}]]
    assert SEARCH["spec"]["synchronization"] == {"mutexes": [{"name": "search-{{workflow.parameters.run}}"}]}


def test_the_pods_of_a_search_that_talk_to_a_model_have_no_right_on_the_cluster():
    accounts = {name: item.get("serviceAccountName", "") for name, item in SEARCH_STEPS.items() if "container" in item}
    assert accounts == {"prepare": "cuda-agent-operator", "search": "", "finish": "cuda-agent-operator"}
    assert SEARCH["spec"]["serviceAccountName"] == "cuda-agent-stage"
    assert SEARCH["spec"]["automountServiceAccountToken"] is False
    assert SEARCH_STEPS["search"]["retryStrategy"] == TEMPLATES["prepare"]["retryStrategy"]
