"""Makes the JSON schemas of two public formats: verdicts, which are the judge's results for solutions, and plans
(``plan.json``), which are solutions in the plan format.

The schema of a verdict comes from the dataclass ``Verdict``, and the schema of a plan from the models in ``grammar``. A
plan that fits the schema may still be invalid, because the schema does not check names, the values of expressions, and
shapes."""

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from cuda_agent.sandbox.formats.grammar import Plan
from cuda_agent.sandbox.wire import Verdict

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def verdict() -> dict[str, Any]:
    """Returns the JSON schema of a verdict (the judge's result for one solution). All properties but
    ``kernels`` are required, including those that ``Verdict`` computes from its fields, such as ``reward``."""
    schema = TypeAdapter(Verdict).json_schema()
    derived = {
        "reward": {
            "enum": [-1, 1, 2, 3, None],
            "description": "-1 not correct, 1 correct, 2 over 5 % faster than eager, 3 also than compile; null: infra",
        },
        "speedup_eager": {"type": ["number", "null"], "description": "eager_seconds / seconds"},
        "speedup_compile": {"type": ["number", "null"], "description": "compile_seconds / seconds"},
        "speed_of_light": {
            "type": ["number", "null"],
            "description": "least seconds at the peak rates of memory and arithmetic / seconds",
        },
    }
    schema["properties"]["advisory"]["description"] = "what the solution computed with is not known"
    schema["properties"]["untimed"]["description"] = "why no time was taken; empty: times are taken"
    properties = {
        name: {key: value for key, value in field.items() if key not in ("title", "default")}
        for name, field in schema["properties"].items()
    } | derived
    return {
        "$schema": _DRAFT,
        "title": "Verdict",
        "description": "What the judge says of one solution. Times are seconds per call, null where there is none.",
        "type": "object",
        "properties": properties,
        "required": sorted(properties.keys() - {"kernels"}),
        "additionalProperties": False,
        "$defs": {name: row | {"additionalProperties": False} for name, row in schema["$defs"].items()},
    }


class _Untitled(GenerateJsonSchema):
    """Generates JSON schemas without the titles that pydantic derives from the names of fields."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def plan() -> dict[str, Any]:
    """Returns the schema of ``plan.json``, the main file of a solution in the plan format."""
    return {"$schema": _DRAFT} | Plan.model_json_schema(schema_generator=_Untitled)


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {"verdict": verdict, "plan": plan}
