"""Defines the grammar of ``plan.json`` as pydantic models; ``schema`` makes a JSON schema from them.

The models check what can be checked without a task: the fields and the kinds of their values. ``plan`` and
``library_nodes`` check the rest: the existence of names, the values of expressions, and shapes."""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictFloat,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypeAliasType

from cuda_agent.sandbox.formats.expressions import LONGEST, PlanError

MOST_NODES = 256
CUDA_ONLY = frozenset(("block", "cluster", "shared", "cooperative"))  # fields of a kernel
COMPUTE = ("fp64", "fp32", "tf32", "fp16", "bf16")
PACKED = {
    "float32": "f", "float64": "d", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B", "bool": "B",
}  # fmt: skip
"""The types that a workspace may have, and their letters for ``struct``."""
_NAME, _ASCII_NAME = (  # of a workspace, of a constant
    rf"^(?!(in|out|init)\d+$){name}$" for name in (r"[^\W\d]\w*", "[A-Za-z_][A-Za-z0-9_]*")
)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*\s*(<[\w\s,:.+-]*>)?")


def _refuse(words: str, fits: Callable[[Any], bool]) -> BeforeValidator:
    """Returns a validator that accepts a value only if ``fits(value)`` is true. ``words`` is the error message. In it,
    {0} stands for the ``repr`` of the value, and {1} for the value as JSON."""

    def check(value: Any) -> Any:
        if not fits(value):
            said = words.format(repr(value), json.dumps(value)[:60])
            raise PydanticCustomError("plan", "{said}", {"said": said})
        return value

    return BeforeValidator(check)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


_EXPECTED = "an integer or an expression is expected, not {1}"
_expression, _text = _refuse(_EXPECTED, _is(int, str)), _is(str)


def _several(value: Any) -> Any:
    for part in value if isinstance(value, list) else [value]:
        _expression.func(part)  # type: ignore[call-arg]
    return value


Expression = TypeAliasType(
    "Expression",
    Annotated[
        int | str,
        _expression,
        WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": LONGEST}]}),
        Field(description="an integer, or an expression such as cdiv(in0.numel, 8) * in0.shape[1]"),
    ],
)
Buffer = TypeAliasType(
    "Buffer",
    Annotated[
        str,
        _refuse("{0} is no buffer", _text),
        Field(description="in0, out0, a workspace's name, or a weight as in w:conv.weight"),
    ],
)
Several = Annotated[
    Expression | Annotated[list[Expression], Field(min_length=1, max_length=3)],
    BeforeValidator(_several),
    _refuse("one to three numbers", lambda value: not isinstance(value, list) or 1 <= len(value) <= 3),
]
Shape = Annotated[
    list[Expression] | None,
    _refuse("a list of numbers is expected", lambda value: value is None or isinstance(value, list)),
    Field(description="where it is not the buffer's: batch, channels and one to three extents"),
]
Flag = Annotated[bool, _refuse("true or false", _is(bool))]
Byte = Annotated[
    int,
    Field(ge=0, le=255),
    _refuse("a byte from 0 to 255, not {0}", lambda value: _is(int)(value) and 0 <= value <= 255),
]
Constant = Annotated[
    int,
    Field(ge=-(2**31), lt=2**31),
    _refuse("an integer of 32 bits is expected, not {1}", lambda value: _is(int)(value) and -(2**31) <= value < 2**31),
]
Compute = Annotated[
    Any,
    WithJsonSchema({"enum": list(COMPUTE)}),
    Field(
        description="arithmetic; by default that of the buffers, fp32 for half precision; cuda only: tf32",
        json_schema_extra=lambda schema: schema.pop("default", None),
    ),
]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Kernel(_Object):
    """A call of a function for every block of a grid."""

    kernel: Annotated[str, _refuse("there is no file {0}", _text)] = Field(
        description="the file that holds the function"
    )
    function: Annotated[
        str, _refuse("{0} is no name of a function", lambda value: _text(value) and bool(_FUNCTION.fullmatch(value)))
    ] = Field(description="its name, with template arguments where it has some")
    grid: Several = Field(1, description="blocks; on cpu one number")
    args: list[Annotated[Buffer | Expression | StrictFloat, _refuse(_EXPECTED, _is(int, str, float))]] = Field(
        [], description="buffers by name; other expressions arrive as long, numbers with a fraction as double"
    )
    block: Several = Field(256, description="cuda only: threads of a block")
    cluster: Several = Field(1, description="cuda only: blocks of a cluster")
    shared: Expression = Field(0, description="cuda only: bytes of dynamic shared memory a block")
    cooperative: Flag = Field(False, description="cuda only: the grid may synchronise")


class Memset(_Object):
    """Fill an output or a workspace with a byte."""

    memset: Annotated[Buffer, _refuse("{0} is no output and no workspace", _text)]
    value: Byte = 0


class Gemm(_Object):
    """c = a @ b by the vendor's library, row-major; batch matrices lie one after the other."""

    library: Literal["gemm"]
    a: Buffer
    b: Buffer
    c: Buffer
    m: Expression
    n: Expression
    k: Expression
    batch: Expression = 1
    transpose_a: Flag = False
    transpose_b: Flag = False
    compute: Compute = None


class Convolution(_Object):
    """A convolution of one to three extents by the vendor's library, batch and channels first."""

    library: Literal["convolution"]
    input: Buffer
    weight: Buffer = Field(description="[out, in / groups, extents]; transposed: [in, out / groups, extents]")
    bias: Buffer | None = None
    output: Buffer
    input_shape: Shape = None
    weight_shape: Shape = None
    stride: Several = Field(1, description="of every extent, or one number for all")
    padding: Several = Field(0, description="on both sides")
    dilation: Several = Field(1, description="of the kernel")
    groups: Expression = 1
    transposed: Flag = False
    output_padding: Several = Field(0, description="where transposed is true")
    compute: Compute = None


class Workspace(_Object):
    size: Expression = Field(description="elements")
    dtype: Annotated[
        str,
        _refuse("{0} is none of " + ", ".join(PACKED), lambda value: _text(value) and value in PACKED),
        WithJsonSchema({"enum": sorted(PACKED)}),
    ] = "float32"
    init: Annotated[Any, WithJsonSchema({"type": ["number", "boolean"]})] = Field(
        0, description="of every element, when the plan is loaded"
    )


LIBRARY: dict[str, type[Gemm] | type[Convolution]] = {"gemm": Gemm, "convolution": Convolution}


def _kind(node: Any) -> str | None:
    if isinstance(node, dict) and "memset" in node:
        return "memset"
    if isinstance(node, dict) and "library" in node:
        return node["library"] if isinstance(node["library"], str) and node["library"] in LIBRARY else None
    return "kernel"


Node = Annotated[
    Annotated[Kernel, Tag("kernel")]
    | Annotated[Memset, Tag("memset")]
    | Annotated[Gemm, Tag("gemm")]
    | Annotated[Convolution, Tag("convolution")],
    Discriminator(_kind),
]


class Plan(_Object):
    """An ordered list of what to run."""

    model_config = ConfigDict(title="plan.json")

    nodes: list[Node] = Field(min_length=1, max_length=MOST_NODES)
    workspaces: dict[str, Workspace] = Field({}, json_schema_extra={"propertyNames": {"pattern": _NAME}})
    guards: list[Expression] = Field(
        [], description="the solution is refused unless each is true for the task's shapes"
    )
    constants: dict[str, Constant] = Field(
        {},
        description="integers by name, for expressions and, as constexpr int, for kernels",
        json_schema_extra={"propertyNames": {"pattern": _ASCII_NAME}},
    )


_MODELS: dict[str, type[_Object]] = {"kernel": Kernel, "memset": Memset, **LIBRARY}


def read(text: str, device: str) -> Plan:
    """Parses the text of ``plan.json``. Raises ``PlanError`` with a message that names the first fault and its
    place."""
    try:
        plan = Plan.model_validate(json.loads(text))
    except ValidationError as error:
        try:
            words = _in_words(error.errors(include_url=False), device)
        except RecursionError:
            words = "plan.json is nested too deeply"
        raise PlanError(words) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"plan.json is not JSON: {error}") from None
    for index, node in enumerate(plan.nodes):
        if device == "cpu" and isinstance(node, Kernel) and (cuda := CUDA_ONLY & node.model_fields_set):
            raise PlanError(f"nodes[{index}]: {_unknown(min(cuda), Kernel, device)}")
    return plan


def _unknown(key: str, model: type[_Object], device: str) -> str:
    known = model.model_fields.keys() - (CUDA_ONLY if device == "cpu" else ())
    return f"{key!r} is unknown; there are {', '.join(sorted(known))}"


def _in_words(errors: list[ErrorDetails], device: str) -> str:
    """Returns the most useful of pydantic's ``errors`` as text. An error outside the nodes takes precedence over errors
    of the first faulty node. A missing field takes precedence over an unknown field, and both over other errors."""

    def order(error: ErrorDetails) -> tuple[Any, ...]:
        place, rank = error["loc"], {"missing": 0, "extra_forbidden": 1}.get(error["type"], 2)
        node = place[1] if place[:1] == ("nodes",) and len(place) > 1 else -1
        return node, rank, str(place[-1]) if rank < 2 else ""

    if device == "cpu":  # CUDA-only fields count as unknown on the CPU, whatever their values
        for error in errors:
            if error["loc"][2:3] == ("kernel",) and error["loc"][3:4] and error["loc"][3] in CUDA_ONLY:
                error["loc"], error["type"] = error["loc"][:4], "extra_forbidden"
    error = min(errors, key=order)
    place, value = list(error["loc"]), error["input"]
    model: type[_Object] = Plan
    if place[:1] == ["workspaces"] and len(place) > 1:
        model = Workspace
    if place[:1] == ["nodes"] and len(place) > 2:
        model = _MODELS[str(place.pop(2))]
    if error["type"] in ("missing", "extra_forbidden"):
        key = str(place.pop())
        said = f"{key!r} is missing" if error["type"] == "missing" else _unknown(key, model, device)
    elif error["type"] == "plan":
        said = error["msg"]
    elif error["type"] in ("too_short", "too_long"):
        said = f"1 to {MOST_NODES} are possible, not {len(value)}"
    elif error["type"] == "union_tag_not_found":
        place, said = [*place, "library"], f"{str(value['library'])[:60]!r} is none of {', '.join(LIBRARY)}"
    else:
        kind = "a list" if error["type"] == "list_type" else "an object"
        said = f"{kind} is expected, not {json.dumps(value)[:60]}"
    where = ""
    for part in place:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part}" if where else part
    return f"{where or 'plan.json'}: {said}"
