"""Library nodes of a plan, as they are written: matrix products and convolutions of the vendor's library.

``describe`` is pure: it checks a node against the shapes of its buffers and gives what ``vendor`` binds in the worker,
with every extent a number.  Errors name the node.  Forward only; buffers are contiguous, batch and channels first.
"""

import math
from typing import Any

from cuda_agent.sandbox.formats.expressions import Buffer, PlanError, evaluate

# What may compute on which buffers.  The first is the default.
_COMPUTE = {
    "float64": ("fp64",),
    "float32": ("fp32", "tf32", "fp16", "bf16"),
    "float16": ("fp32", "fp16"),
    "bfloat16": ("fp32", "bf16"),
}
COMPUTE = ("fp64", "fp32", "tf32", "fp16", "bf16")
LIBRARY = ("gemm", "convolution")
_GEMM = ({"library", "a", "b", "c", "m", "n", "k"}, {"batch", "transpose_a", "transpose_b", "compute"})
_CONVOLUTION = (
    {"library", "input", "weight", "output"},
    {
        "bias", "input_shape", "weight_shape", "stride", "padding", "dilation", "groups", "transposed",
        "output_padding", "compute",
    },
)  # fmt: skip


def describe(node: dict[str, Any], where: str, names: dict[str, Any], device: str) -> dict[str, Any]:
    """The node as the worker binds it: ``tensors`` by role, each with buffer, shape and dtype; ``writes``, the buffer
    of the result; and what the kind needs.  Raises ``PlanError``."""
    if node["library"] not in LIBRARY:
        raise PlanError(f"{where}.library: {str(node['library'])[:60]!r} is none of {', '.join(LIBRARY)}")
    needed, optional = _GEMM if node["library"] == "gemm" else _CONVOLUTION
    for key in sorted(needed - node.keys()):
        raise PlanError(f"{where}: {key!r} is missing")
    for key in sorted(node.keys() - needed - optional):
        raise PlanError(f"{where}: {key!r} is unknown; there are {', '.join(sorted(needed | optional))}")
    roles = ("a", "b", "c") if node["library"] == "gemm" else ("input", "weight", "bias", "output")
    buffers = {
        role: _buffer(node, role, where, names) for role in roles if role in needed or node.get(role) is not None
    }
    result = roles[-1]
    if buffers[result].name.startswith(("in:", "w:")):
        raise PlanError(f"{where}.{result}: {node[result]!r} is no output and no workspace")
    for role, buffer in buffers.items():
        if role != result and buffer.name == buffers[result].name:
            raise PlanError(f"{where}.{result}: {node[result]!r} is read by the same node")
    item: dict[str, Any] = {"library": node["library"], "where": where, "writes": buffers[result].name}
    item["compute"] = _compute(node, where, buffers, device)
    describe_kind = _gemm if node["library"] == "gemm" else _convolution
    shapes, more = describe_kind(node, where, names, buffers)
    dtype = buffers[result].tensor.dtype
    for role, shape in shapes.items():
        there, wanted = math.prod(buffers[role].tensor.shape), math.prod(shape)
        whole = role == result and node["library"] == "convolution" and buffers[role].name.startswith("out:")
        if wanted > there or (whole and wanted < there):
            raise PlanError(f"{where}.{role}: {node[role]} has {there} elements, {wanted} are needed ({shape})")
    item["tensors"] = {
        role: {"buffer": buffers[role].name, "shape": shape, "dtype": dtype} for role, shape in shapes.items()
    }
    return item | more


def _buffer(node: dict[str, Any], role: str, where: str, names: dict[str, Any]) -> Buffer:
    buffer = names.get(node[role]) if isinstance(node[role], str) else None
    if not isinstance(buffer, Buffer):
        raise PlanError(f"{where}.{role}: {node[role]!r} is no buffer")
    return buffer


def _compute(node: dict[str, Any], where: str, buffers: dict[str, Buffer], device: str) -> str:
    dtypes = {buffer.tensor.dtype for buffer in buffers.values()}
    if len(dtypes) != 1 or not dtypes <= _COMPUTE.keys():
        roles = ", ".join(buffers)
        raise PlanError(f"{where}: {roles} must have one floating type, not {', '.join(sorted(dtypes))}")
    dtype = dtypes.pop()
    compute = node.get("compute", _COMPUTE[dtype][0])
    if compute not in _COMPUTE[dtype]:
        choices = " or ".join(_COMPUTE[dtype])
        raise PlanError(f"{where}.compute: {str(compute)[:60]!r} is not {choices}, which {dtype} buffers have")
    if compute == "tf32" and device == "cpu":
        raise PlanError(f"{where}.compute: tf32 does not exist on cpu")
    return str(compute)


def _flag(node: dict[str, Any], key: str, where: str) -> bool:
    value = node.get(key, False)
    if not isinstance(value, bool):
        raise PlanError(f"{where}.{key}: true or false")
    return value


def _extent(value: Any, least: int, names: dict[str, Any], where: str) -> int:
    number = evaluate(value, names, where)
    if not least <= number < 1 << 31:
        raise PlanError(f"{where}: {number} is not possible")
    return number


_Described = tuple[dict[str, list[int]], dict[str, Any]]  # shapes by role, and what else the kind needs


def _gemm(node: dict[str, Any], where: str, names: dict[str, Any], buffers: dict[str, Buffer]) -> _Described:
    """``c = a @ b``, batched when ``batch`` is more than one: the matrices lie one after the other."""
    batch, m, n, k = (_extent(node.get(key, 1), 1, names, f"{where}.{key}") for key in ("batch", "m", "n", "k"))
    flags = {key: _flag(node, key, where) for key in ("transpose_a", "transpose_b")}
    shapes = {
        "a": [batch, k, m] if flags["transpose_a"] else [batch, m, k],
        "b": [batch, n, k] if flags["transpose_b"] else [batch, k, n],
        "c": [batch, m, n],
    }
    return shapes, flags


def _convolution(node: dict[str, Any], where: str, names: dict[str, Any], buffers: dict[str, Buffer]) -> _Described:
    """The convolution of torch: ``input`` [batch, channels, extents], ``weight`` [out, in / groups, extents] or, when
    transposed, [in, out / groups, extents], ``bias`` [out].  One to three extents."""
    given = _shape(node, "input", where, names, buffers)
    kernel = _shape(node, "weight", where, names, buffers)
    extents = len(given) - 2
    if len(kernel) != len(given):
        raise PlanError(f"{where}.weight: {kernel} has {len(kernel)} dimensions, the input {given} has {len(given)}")
    transposed = _flag(node, "transposed", where)

    def each(key: str, default: int, least: int) -> list[int]:
        value = node.get(key, default)
        if isinstance(value, list) and len(value) != extents:
            raise PlanError(f"{where}.{key}: {extents} numbers are needed, not {len(value)}")
        values = value if isinstance(value, list) else [value] * extents
        return [_extent(part, least, names, f"{where}.{key}") for part in values]

    stride, padding, dilation = each("stride", 1, 1), each("padding", 0, 0), each("dilation", 1, 1)
    output_padding = each("output_padding", 0, 0)
    groups = _extent(node.get("groups", 1), 1, names, f"{where}.groups")
    channels = kernel[0] if transposed else kernel[1] * groups
    produced = kernel[1] * groups if transposed else kernel[0]
    if given[1] != channels:
        raise PlanError(f"{where}.weight: {kernel} takes {channels} channels, the input {given} has {given[1]}")
    if given[1] % groups or produced % groups:
        raise PlanError(f"{where}.groups: {groups} groups of {given[1]} and {produced} channels are not whole")
    if any(output_padding) and not transposed:
        raise PlanError(f"{where}.output_padding: only where transposed is true")
    if any(extra >= max(s, d) for extra, s, d in zip(output_padding, stride, dilation, strict=True)):
        raise PlanError(f"{where}.output_padding: {output_padding} must be smaller than stride or dilation")
    reach = [d * (size - 1) + 1 for size, d in zip(kernel[2:], dilation, strict=True)]
    if transposed:
        made = [
            (size - 1) * s - 2 * p + r + extra
            for size, s, p, r, extra in zip(given[2:], stride, padding, reach, output_padding, strict=True)
        ]
    else:
        made = [(size + 2 * p - r) // s + 1 for size, s, p, r in zip(given[2:], stride, padding, reach, strict=True)]
    if min(made) < 1:
        raise PlanError(f"{where}: a kernel of {kernel[2:]} does not fit into an input of {given[2:]}")
    shapes = {"input": given, "weight": kernel, "output": [given[0], produced, *made]}
    if "bias" in buffers:
        shapes["bias"] = [produced]
    more = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "transposed": transposed,
        "output_padding": output_padding,
    }  # fmt: skip
    return shapes, more


def _shape(node: dict[str, Any], role: str, where: str, names: dict[str, Any], buffers: dict[str, Buffer]) -> list[int]:
    """Of the buffer, or as the node says (a workspace has no shape of its own)."""
    place = f"{where}.{role}_shape"
    given = node.get(f"{role}_shape")
    if given is not None and not isinstance(given, list):
        raise PlanError(f"{place}: a list of numbers is expected")
    shape = list(buffers[role].tensor.shape) if given is None else [_extent(part, 1, names, place) for part in given]
    if not 3 <= len(shape) <= 5 or 0 in shape:
        raise PlanError(f"{place}: batch, channels and one to three extents are needed, not {shape}")
    return shape
