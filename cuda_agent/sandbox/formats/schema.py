"""JSON schemas of the two formats that others read and write: a verdict, and ``plan.json``.

The verdict's comes from the dataclass.  The plan's is the grammar of ``plan`` on the CPU, with the fields that only
``cuda`` has named as such.  Not covered: what no schema can say (names that must exist, values of expressions, shapes);
a plan that fits may still be refused.
"""

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from cuda_agent.sandbox.formats.library_nodes import COMPUTE
from cuda_agent.sandbox.formats.plan import WORKSPACE_DTYPES
from cuda_agent.sandbox.wire import Verdict

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def verdict() -> dict[str, Any]:
    """Of ``Verdict.to_json``: all fields are always there, derived ones too."""
    schema = TypeAdapter(Verdict).json_schema()
    derived = {
        "reward": {
            "enum": [-1, 1, 2, 3, None],
            "description": "-1 not correct, 1 correct, 2 over 5 % faster than eager, 3 also than compile; null: infra",
        },
        "speedup_eager": {"type": ["number", "null"], "description": "eager_seconds / seconds"},
        "speedup_compile": {"type": ["number", "null"], "description": "compile_seconds / seconds"},
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
        "required": sorted(properties),
        "additionalProperties": False,
        "$defs": {"Ran": schema["$defs"]["Ran"] | {"additionalProperties": False}},
    }


def plan() -> dict[str, Any]:
    """Of ``plan.json``, the entry of a solution in the plan format."""
    expression = {"$ref": "#/$defs/expression"}
    cuda_only = "cuda only: "
    kernel = {
        "type": "object",
        "description": "A call of a function for every block of a grid.",
        "properties": {
            "kernel": {"type": "string", "description": "the file that holds the function"},
            "function": {"type": "string", "description": "its name, with template arguments where it has some"},
            "grid": _one_to_three(expression, "blocks; on cpu one number"),
            "args": {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/$defs/buffer"}, expression, {"type": "number"}]},
                "description": "buffers by name; other expressions arrive as long, numbers with a fraction as double",
            },
            "block": _one_to_three(expression, cuda_only + "threads of a block"),
            "cluster": _one_to_three(expression, cuda_only + "blocks of a cluster"),
            "shared": expression | {"description": cuda_only + "bytes of dynamic shared memory a block"},
            "cooperative": {"type": "boolean", "description": cuda_only + "the grid may synchronise"},
        },
        "required": ["kernel", "function"],
        "additionalProperties": False,
    }
    memset = {
        "type": "object",
        "description": "Fill an output or a workspace with a byte.",
        "properties": {
            "memset": {"$ref": "#/$defs/buffer"},
            "value": {"type": "integer", "minimum": 0, "maximum": 255},
        },
        "required": ["memset"],
        "additionalProperties": False,
    }
    buffer, flag = {"$ref": "#/$defs/buffer"}, {"type": "boolean", "default": False}
    compute = {
        "enum": list(COMPUTE),
        "description": "arithmetic; by default that of the buffers, fp32 for half precision; " + cuda_only + "tf32",
    }
    gemm = {
        "type": "object",
        "description": "c = a @ b by the vendor's library, row-major; batch matrices lie one after the other.",
        "properties": {
            "library": {"enum": ["gemm"]},
            "a": buffer,
            "b": buffer,
            "c": buffer,
            "m": expression,
            "n": expression,
            "k": expression,
            "batch": expression | {"default": 1},
            "transpose_a": flag,
            "transpose_b": flag,
            "compute": compute,
        },
        "required": ["library", "a", "b", "c", "m", "n", "k"],
        "additionalProperties": False,
    }
    shape = {"anyOf": [{"type": "null"}, {"type": "array", "items": expression, "minItems": 3, "maxItems": 5}]}
    convolution = {
        "type": "object",
        "description": "A convolution of one to three extents by the vendor's library, batch and channels first.",
        "properties": {
            "library": {"enum": ["convolution"]},
            "input": buffer,
            "weight": buffer | {"description": "[out, in / groups, extents]; transposed: [in, out / groups, extents]"},
            "bias": {"anyOf": [{"type": "null"}, buffer]},
            "output": buffer,
            "input_shape": shape | {"description": "where it is not the buffer's own, as for a workspace"},
            "weight_shape": shape,
            "stride": _one_to_three(expression, "of every extent, or one number for all"),
            "padding": _one_to_three(expression, "on both sides"),
            "dilation": _one_to_three(expression, "of the kernel"),
            "groups": expression | {"default": 1},
            "transposed": flag,
            "output_padding": _one_to_three(expression, "where transposed is true"),
            "compute": compute,
        },
        "required": ["library", "input", "weight", "output"],
        "additionalProperties": False,
    }
    workspace = {
        "type": "object",
        "properties": {
            "size": expression | {"description": "elements"},
            "dtype": {"enum": sorted(WORKSPACE_DTYPES), "default": "float32"},
            "init": {"type": ["number", "boolean"], "description": "of every element, when the plan is loaded"},
        },
        "required": ["size"],
        "additionalProperties": False,
    }
    return {
        "$schema": _DRAFT,
        "title": "plan.json",
        "description": "An ordered list of what to run.",
        "type": "object",
        "properties": {
            "nodes": {
                "type": "array",
                "items": {"anyOf": [kernel, memset, gemm, convolution]},
                "minItems": 1,
                "maxItems": 256,
            },
            "workspaces": {
                "type": "object",
                "propertyNames": {"pattern": r"^(?!(in|out|init)\d+$)[^\W\d]\w*$"},
                "additionalProperties": workspace,
            },
            "guards": {
                "type": "array",
                "items": expression,
                "description": "the solution is refused unless each is true for the task's shapes",
            },
        },
        "required": ["nodes"],
        "additionalProperties": False,
        "$defs": {
            "expression": {
                "description": "an integer, or an expression such as cdiv(in0.numel, 8) * in0.shape[1]",
                "anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 500}],
            },
            "buffer": {
                "type": "string",
                "description": "in0, out0, a workspace's name, or a weight as in w:conv.weight",
            },
        },
    }


def _one_to_three(expression: dict[str, Any], description: str) -> dict[str, Any]:
    several = {"type": "array", "items": expression, "minItems": 1, "maxItems": 3}
    return {"anyOf": [expression, several], "description": description}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {"verdict": verdict, "plan": plan}
