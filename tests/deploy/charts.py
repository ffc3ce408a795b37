"""Provides tools for tests of the Helm chart: helm's rendering, and Argo's own validation. ``.ci/tools`` builds
both."""

import functools
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "cuda-agent"
TOOLS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuda-agent" / "tools"
HELM = next(iter(sorted([*TOOLS.glob("helm-v*/helm"), *TOOLS.parent.glob("cluster/helm-*/helm")])), None)
ARGO = next(iter(sorted(TOOLS.glob("argocheck-v*/argocheck"))), None)
KUBERAY = next(iter(sorted(TOOLS.glob("kuberay-v*/ray.io_rayjobs.yaml"))), None)
KUBERNETES = "1.34.0"

needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: .ci/tools builds it (needs Go)")
needs_argo = pytest.mark.skipif(ARGO is None, reason="no argocheck: .ci/tools builds it (needs Go)")

# What a cluster with nothing of its own sets, and what one with S3 and MLflow does; together they show every value.
ALONE: dict[str, Any] = {
    "minio": {"enabled": True},
    "mlflow": {"enabled": True},
    "quota": {"enabled": True},
    "cron": {"enabled": True, "config": "ab" * 32},
    "gc": {"enabled": True},
    "profiles": {
        "cpu": {"ray": {"enabled": True}, "engine": {"replicas": 2, "claim": "weights"}},
        "gpu": {"ray": {"enabled": True}, "parallelism": 1},
    },
    "monitoring": {"serviceMonitor": True, "podMonitor": True, "dashboard": True, "alerts": True},
    "tracing": {"endpoint": "http://collector.monitoring:4318"},
    "access": {"viewers": [{"kind": "Group", "name": "all"}], "submitters": [{"kind": "User", "name": "eva"}]},
    "search": {"server": "https://models.test/v1", "existingSecret": "models"},
    "networkPolicy": {"searchEgress": [{"to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}], "ports": [{"port": 443}]}]},
}
WITH_OTHERS: dict[str, Any] = {
    "store": {"existingSecret": "s3", "endpoint": "https://s3.test"},
    "tracking": {"uri": "http://mlflow.test:5000"},
    "networkPolicy": {"trackingCidrs": ["10.1.0.0/16"]},
    "cron": {"config": "ab" * 32},
}


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "values.json"
        file.write_text(json.dumps(values or {}))
        homes = {f"HELM_{what}_HOME": folder for what in ("CACHE", "CONFIG", "DATA")}
        environment = os.environ | homes | {"KUBECONFIG": "/nonexistent", "GOGC": "off"}  # it lives too shortly
        return subprocess.run(
            [str(HELM), *arguments, "--values", str(file)],
            capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip


def template(values: dict[str, Any], release: str = "r", namespace: str = "ns") -> list[dict[str, Any]]:
    """Returns the objects that ``helm install`` would create with these values."""
    done = helm("template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES, values=values)
    assert done.returncode == 0, done.stderr
    return [item for text in done.stdout.split("\n---\n") if (item := json.loads(_parsed(text)))]


@functools.cache  # most documents of two renderings are the same, and JSON is read ten times faster
def _parsed(document: str) -> str:
    return json.dumps(yaml.load(document, yaml.CSafeLoader))


@functools.cache
def _cached(text: str) -> str:
    return json.dumps(template(json.loads(text)))


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the objects of ``template(values)``, rendered once per process; each call returns a new copy."""
    return json.loads(_cached(json.dumps(values, sort_keys=True)))


def refusal(values: dict[str, Any]) -> str:
    """Returns helm's error message about values that it refuses."""
    done = helm("template", "r", str(CHART), "--kube-version", KUBERNETES, values=values)
    assert done.returncode != 0, "these values were accepted"
    return done.stderr


def of_kind(items: list[dict[str, Any]], kind: str, name: str = "") -> list[dict[str, Any]]:
    """Returns the objects of this kind whose name matches the regular expression.  An expression such as ``-cpu-``
    means the template for runs of a profile, and not the one for searches, whose name ends alike."""
    found = [item for item in items if item["kind"] == kind and re.search(name, item["metadata"]["name"])]
    return [item for item in found if not name or "search" in name or "-search-" not in item["metadata"]["name"]]


def steps(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the templates of a WorkflowTemplate by name.  Those of pods have what ``templateDefaults`` adds to their
    containers, as Argo merges it."""
    common = made["spec"]["templateDefaults"]["container"]
    found = {one["name"]: one for one in json.loads(json.dumps(made["spec"]["templates"]))}
    for one in found.values():
        if own := one.get("container"):
            lists = {key: [*common[key], *own.get(key, [])] for key in ("env", "volumeMounts")}
            one["container"] = common | own | lists
    return found


def objects_in(items: list[dict[str, Any]], variable: str, profile: str = "cpu") -> list[dict[str, Any]]:
    """Returns the objects in an environment variable of the step prepare, or an empty list without the variable."""
    (made,) = of_kind(items, "WorkflowTemplate", f"-{profile}-")
    env = {item["name"]: item.get("value") for item in steps(made)["prepare"]["container"]["env"]}
    return json.loads(env.get(variable, "[]"))


def pools(items: list[dict[str, Any]], profile: str = "cpu") -> list[dict[str, Any]]:
    """Returns the objects that prepare would make with this profile."""
    return objects_in(items, "CUDA_AGENT_POOLS", profile)


def engines(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the objects that prepare would make for a run with vLLM of the profile ``cpu``, if it has engines."""
    return objects_in(items, "CUDA_AGENT_ENGINE")


def ray_job(items: list[dict[str, Any]], profile: str = "cpu") -> dict[str, Any]:
    """Returns the RayJob of a stage with Ray pods."""
    (job,) = [one for one in objects_in(items, "CUDA_AGENT_RAY", profile) if one["kind"] == "RayJob"]
    return job


def argocheck(items: list[dict[str, Any]]) -> list[str]:
    """Returns the errors that Argo's own validation finds in Argo's objects."""
    done = subprocess.run([str(ARGO)], input=json.dumps(items), capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Returns dotted path -> scalar for a nested value.  JSON inside of strings is parsed, and in a list of mappings
    with a ``name`` the name replaces the index."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return {path: value}
    if isinstance(value, dict):
        if not value:
            return {path: {}}
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}.{key}" if path else key).items()}
    if isinstance(value, list):
        if not value:
            return {path: []}
        found: dict[str, Any] = {}
        for number, inner in enumerate(value):
            name = inner.get("name", number) if isinstance(inner, dict) else number
            found |= flat(inner, f"{path}[{name}]")
        return found
    return {path: value}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    result = dict(one)
    for key, value in other.items():
        result[key] = (
            merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return result
