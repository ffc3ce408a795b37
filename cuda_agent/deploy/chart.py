"""Renders the generated files of ``workflows/`` and ``charts/cuda-agent``: manifests, values, schema, README.

    workflows/{workflow-template,cron-workflow,maintenance}.json    for use without Helm
    charts/cuda-agent/files/{workflow-template,cron-workflow,maintenance,pools,engine,ray,dashboard,alerts}.json
    charts/cuda-agent/{Chart.yaml,values.yaml,values.schema.json,README.md}

``files`` is a pure function of the graph and the schema of values; a test fails if the stored files differ from it.

What it does not cover: the chart's templates, which are written by hand.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cuda_agent.cluster.engines import engine_objects
from cuda_agent.cluster.pools import pool_objects
from cuda_agent.cluster.rayjobs import ray_objects
from cuda_agent.deploy.argo import cron_workflow, maintenance_jobs, workflow_template
from cuda_agent.deploy.chart_values import CHART_VERSION, Values
from cuda_agent.deploy.dashboards import alerts, dashboard

CHART = "charts/cuda-agent"


def files() -> dict[str, str]:
    """Path from the repository's root -> text."""
    template, cron, pools = (_json(value) for value in (workflow_template(), cron_workflow(), pool_objects()))
    maintenance = _json(maintenance_jobs())
    return {
        "workflows/workflow-template.json": template,
        "workflows/cron-workflow.json": cron,
        "workflows/maintenance.json": maintenance,
        f"{CHART}/files/maintenance.json": maintenance,
        f"{CHART}/files/workflow-template.json": template,
        f"{CHART}/files/cron-workflow.json": cron,
        f"{CHART}/files/pools.json": pools,
        f"{CHART}/files/engine.json": _json(engine_objects()),
        f"{CHART}/files/ray.json": _json(ray_objects()),
        f"{CHART}/files/dashboard.json": _json(dashboard()),
        f"{CHART}/files/alerts.json": _json(alerts()),
        f"{CHART}/Chart.yaml": _chart(),
        f"{CHART}/values.yaml": _values(),
        f"{CHART}/values.schema.json": _json(schema()),
        f"{CHART}/README.md": _readme(),
    }


def drift(root: Path) -> list[str]:
    """Paths below ``root`` that differ from ``files``."""
    return [name for name, text in files().items() if not (root / name).is_file() or (root / name).read_text() != text]


def write(root: Path) -> list[str]:
    """Updates the files below ``root``, and returns the paths that changed."""
    changed = drift(root)
    made = files()
    for name in changed:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(made[name])
    return changed


def schema() -> dict[str, Any]:
    """JSON schema of the values; it refuses unknown keys."""
    made: dict[str, Any] = _without(Values.model_json_schema(), {"title", "default"})
    made["$defs"]["Profile"]["properties"]["stages"]["additionalProperties"] = False
    # Helm passes `global` to a subchart; nothing of it is used.
    made["properties"]["global"] = {"type": "object", "description": "given by Helm to charts inside of others; unused"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Values of {CHART}", **made}


def leaves() -> Iterator[tuple[str, Any, FieldInfo]]:
    """Dotted path, default and field of every value that is not a group of others."""
    yield from _leaves(Values(), "")


def _leaves(model: BaseModel, prefix: str) -> Iterator[tuple[str, Any, FieldInfo]]:
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(inner, BaseModel) for inner in value.values()):
            for key, inner in value.items():
                yield from _leaves(inner, f"{prefix}{name}.{key}.")
        else:
            yield f"{prefix}{name}", value, info


def _without(value: Any, keys: set[str]) -> Any:
    """A schema without these annotations; properties with such a name stay."""
    if isinstance(value, dict):
        return {
            key: {name: _without(inner, keys) for name, inner in item.items()}
            if key in ("properties", "$defs")
            else _without(item, keys)
            for key, item in value.items()
            if key not in keys
        }
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _chart() -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v2",
            "name": "cuda-agent",
            "type": "application",
            "description": "Train a language model to write fast GPU kernels: Argo workflows, sandboxes, MinIO, MLflow",
            "version": CHART_VERSION,
            "appVersion": CHART_VERSION,
            "kubeVersion": ">=1.33.0-0",
            "keywords": ["argo-workflows", "cuda", "reinforcement-learning", "mlflow"],
        },
        sort_keys=False,
        width=120,
    )


def _values() -> str:
    lines = [
        "# The chart's values and their defaults, made by `cuda-agent render` of cuda_agent/deploy/chart_values.py.",
        "# values.schema.json refuses whatever is not here.",
        "",
        *_value_lines(Values(), 0, whole=True),
    ]
    return "\n".join(lines) + "\n"


def _value_lines(model: BaseModel, depth: int, whole: bool) -> Iterator[str]:
    """``whole``: defaults too; a profile lists only the values that it sets."""
    pad = "  " * depth
    for name, info in type(model).model_fields.items():
        if not whole and name not in model.model_fields_set:
            continue
        value = getattr(model, name)
        yield f"{pad}# -- {info.description}"
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _value_lines(value, depth + 1, whole)
        elif isinstance(value, dict) and value and all(isinstance(inner, BaseModel) for inner in value.values()):
            yield f"{pad}{name}:"
            for key, inner in value.items():
                yield f"{pad}  {key}:"
                yield from _value_lines(inner, depth + 2, whole=name != "stages")
        else:
            yield f"{pad}{name}: {json.dumps(value)}"


def _readme() -> str:
    rows = []
    seen: set[str] = set()
    for path, default, info in leaves():
        generic = _generic(path)
        if generic in seen:
            continue
        seen.add(generic)
        shown = "per profile" if generic != path else f"`{json.dumps(default)}`"
        rows.append(f"| `{generic}` | {(info.description or '').replace('|', chr(92) + '|')} | {shown} |")
    return _README.replace("@ROWS@", "\n".join(rows)).replace("@VERSION@", CHART_VERSION)


def _generic(path: str) -> str:
    parts = path.split(".")
    if parts[0] == "profiles":
        parts[1] = "NAME"
        if parts[2] == "stages" and len(parts) > 3:
            parts[3] = "STAGE"
        if parts[2] == "pools":
            parts[3] = "ROLE"
    return ".".join(parts)


_README = """\
# The chart of cuda-agent

Argo WorkflowTemplates (one a profile), the accounts, roles and walls around them, and, for clusters that have none,
MinIO and MLflow. This page is made by `cuda-agent render`; version @VERSION@.

Needed first: Kubernetes 1.33 or newer, Argo Workflows 3.7 or 4 watching the release's namespace (its full CRDs), a
network plugin that enforces NetworkPolicies. Optional: Kueue, KubeRay 1.6, the Prometheus operator, an operator for
GPUs.

```
kubectl create namespace cuda-agent
kubectl label namespace cuda-agent pod-security.kubernetes.io/enforce=restricted
helm install cuda-agent charts/cuda-agent --namespace cuda-agent --set minio.enabled=true --set mlflow.enabled=true
helm test cuda-agent --namespace cuda-agent
```

With an S3 of your own instead:

```
helm install cuda-agent charts/cuda-agent --namespace cuda-agent \\
  --set store.endpoint=https://s3.example.org --set store.bucket=kernels --set store.existingSecret=my-s3
```

**Profiles** say what a run's pods get; a researcher names one and sets nothing else of the kind. All pods of a run have
one image, because the code in it is part of cache keys. **Upgrading** leaves runs alone that are under way: a
template's name holds the version, a Workflow keeps a copy of the template it was made from, and nothing that its pods
refer to has a version. **Removing** the release removes MinIO and MLflow too; their volumes stay.

Values that come from elsewhere are checked: `values.schema.json` refuses unknown names and wrong types, and what
contradicts itself ends with a sentence that says so.

| value | what it is | default |
|---|---|---|
@ROWS@
"""
