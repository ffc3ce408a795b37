"""Renders the generated files of ``workflows/`` and ``charts/cuda-agent``: manifests, values, schema, README.

``files`` makes the files from the graph of stages and the schema of the chart's values.  A test compares the result
with the repository's files.  The chart's templates and dashboard are written by hand."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cuda_agent.cluster.engines import engine_objects
from cuda_agent.cluster.pools import pool_objects
from cuda_agent.cluster.rayjobs import ray_objects
from cuda_agent.deploy.argo import cron_workflow, maintenance_jobs, search_template, workflow_template
from cuda_agent.deploy.chart_values import CHART_VERSION, Values

CHART = "charts/cuda-agent"


def files() -> dict[str, str]:
    """Returns path -> text of every generated file; paths begin at the repository's root."""
    workflows = {
        "workflow-template": workflow_template(), "cron-workflow": cron_workflow(), "maintenance": maintenance_jobs(),
        "search": search_template(),
    }  # fmt: skip
    read_by_the_chart = workflows | {"pools": pool_objects(), "engine": engine_objects(), "ray": ray_objects()}
    return {
        **{f"workflows/{name}.json": _json(item) for name, item in workflows.items()},
        **{f"{CHART}/files/{name}.json": _json(item) for name, item in read_by_the_chart.items()},
        f"{CHART}/Chart.yaml": yaml.safe_dump(_ABOUT, sort_keys=False, width=120),
        f"{CHART}/values.yaml": _VALUES_HEAD + "\n".join(_value_lines(Values(), "", whole=True)) + "\n",
        f"{CHART}/values.schema.json": _json(schema()),
        f"{CHART}/README.md": _readme(),
    }


def drift(root: Path) -> list[str]:
    """Returns the paths of the generated files that are missing or out of date below ``root``."""
    return [name for name, text in files().items() if not (root / name).is_file() or (root / name).read_text() != text]


def write(root: Path) -> list[str]:
    """Updates the generated files below ``root``, and returns the paths of those that changed."""
    changed, made = drift(root), files()
    for name in changed:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(made[name])
    return changed


def schema() -> dict[str, Any]:
    """Returns the JSON schema of the chart's values, without titles and defaults.  The schema refuses unknown keys."""
    made: dict[str, Any] = json.loads(
        json.dumps(Values.model_json_schema()),
        object_hook=lambda item: {key: inner for key, inner in item.items() if key not in ("title", "default")},
    )
    made["$defs"]["Profile"]["properties"]["stages"]["additionalProperties"] = False
    # Helm passes `global` to a subchart; the chart does not use it.
    made["properties"]["global"] = {"type": "object", "description": "values that Helm passes to subcharts; not used"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Values of {CHART}", **made}


def leaves(model: BaseModel | None = None, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yields (dotted path, default, field) for each value in ``model`` and in the models that it contains.  If
    ``model`` is None, yields all values of the chart.  ``prefix`` is put before each path."""
    model = Values() if model is None else model
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        elif groups := _groups(value):
            for key, inner in groups.items():
                yield from leaves(inner, f"{prefix}{name}.{key}.")
        else:
            yield f"{prefix}{name}", value, info


def _groups(value: Any) -> dict[str, BaseModel]:
    """Returns ``value`` if it is a dict of pydantic models, such as the profiles by name; else an empty dict."""
    found = isinstance(value, dict) and all(isinstance(inner, BaseModel) for inner in value.values())
    return value if found else {}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


_ABOUT = {
    "apiVersion": "v2",
    "name": "cuda-agent",
    "type": "application",
    "description": "Train a language model to write fast GPU kernels: Argo workflows, sandboxes, MinIO, MLflow",
    "version": CHART_VERSION,
    "appVersion": CHART_VERSION,
    "kubeVersion": ">=1.33.0-0",
    "keywords": ["argo-workflows", "cuda", "reinforcement-learning", "mlflow"],
}
_VALUES_HEAD = """\
# The chart's values and their defaults.  Helm checks yours against values.schema.json, which refuses unknown keys.
# `cuda-agent render` generates this file from cuda_agent/deploy/chart_values.py.

"""


def _value_lines(model: BaseModel, pad: str, whole: bool) -> Iterator[str]:
    """Yields the lines of values.yaml for the fields of ``model``, indented by ``pad``.  If ``whole`` is False,
    leaves out fields that were not set explicitly."""
    for name, info in type(model).model_fields.items():
        if not whole and name not in model.model_fields_set:
            continue
        value = getattr(model, name)
        yield f"{pad}# -- {info.description}"
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _value_lines(value, f"{pad}  ", whole)
        elif groups := _groups(value):
            yield f"{pad}{name}:"
            for key, inner in groups.items():
                yield f"{pad}  {key}:"
                yield from _value_lines(inner, f"{pad}    ", whole=name != "stages")
        else:
            yield f"{pad}{name}: {json.dumps(value)}"


def _readme() -> str:
    rows: dict[str, str] = {}
    for path, default, info in leaves():
        shared = re.sub(r"^profiles\.[^.]+", "profiles.NAME", path)
        shared = re.sub(r"\.stages\.[^.]+", ".stages.STAGE", re.sub(r"\.pools\.[^.]+", ".pools.ROLE", shared))
        shown = "per profile" if shared != path else f"`{json.dumps(default)}`"
        text = (info.description or "").replace("|", r"\|")
        rows.setdefault(shared, f"| `{shared}` | {text} | {shown} |")
    page = Path(__file__).with_name("chart_readme.md").read_text()
    return page.replace("@ROWS@", "\n".join(rows.values())).replace("@VERSION@", CHART_VERSION)
