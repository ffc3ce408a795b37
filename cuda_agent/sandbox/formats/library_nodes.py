"""Checks the library nodes of a plan. A plan (``plan.json``) is a list of operations (nodes). A library node is a
matrix product or a convolution that a vendor's library, such as cuBLAS, computes.

``describe`` checks a node against the shapes of its buffers and returns a description of the node.
``worker.library_nodes`` uses the description to call the library. All buffers are contiguous. The matrices of a product
have the shape [batch, rows, columns]. The input and the output of a convolution have the shape [batch, channels,
extents], where ``extents`` stands for one to three spatial sizes."""

import math
from typing import Any

from cuda_agent.sandbox.formats.expressions import Buffer, PlanError, evaluate
from cuda_agent.sandbox.formats.grammar import Convolution, Gemm

# Compute types allowed for each buffer dtype.  The first is the default.
_COMPUTE = {
    "float64": ("fp64",),
    "float32": ("fp32", "tf32", "fp16", "bf16"),
    "float16": ("fp32", "fp16"),
    "bfloat16": ("fp32", "bf16"),
}


def describe(node: Gemm | Convolution, where: str, names: dict[str, Any], device: str) -> dict[str, Any]:
    """Checks ``node``, a matrix product or a convolution, and returns its description for the worker that runs it. In
    the description, ``tensors`` maps each role (such as ``a`` or ``bias``) to a buffer, a shape and a dtype, and
    ``writes`` names the buffer of the result. The argument ``names`` maps the names in the plan to buffers and numbers.
    Raises ``PlanError`` for an invalid node. The message begins with ``where``, the node's place in the plan."""
    roles = ("a", "b", "c") if isinstance(node, Gemm) else ("input", "weight", "bias", "output")
    said: dict[str, str] = {role: name for role in roles if (name := getattr(node, role)) is not None}
    buffers: dict[str, Buffer] = {}
    for role, name in said.items():
        if not isinstance(buffer := names.get(name), Buffer):
            raise PlanError(f"{where}.{role}: {name!r} is no buffer")
        buffers[role] = buffer
    result = roles[-1]
    if buffers[result].name.startswith(("in:", "w:")):
        raise PlanError(f"{where}.{result}: {said[result]!r} is no output and no workspace")
    for role, buffer in buffers.items():
        if role != result and buffer.name == buffers[result].name:
            raise PlanError(f"{where}.{result}: {said[result]!r} is read by the same node")
    compute = _compute(node, where, buffers, device)
    shapes, more = _gemm(node, where, names) if isinstance(node, Gemm) else _convolution(node, where, names, buffers)
    dtype = buffers[result].tensor.dtype
    for role, shape in shapes.items():
        there, wanted = math.prod(buffers[role].tensor.shape), math.prod(shape)
        whole = role == result and node.library == "convolution" and buffers[role].name.startswith("out:")
        if wanted > there or (whole and wanted < there):
            raise PlanError(f"{where}.{role}: {said[role]} has {there} elements, {wanted} are needed ({shape})")
    tensors = {role: {"buffer": buffers[role].name, "shape": shape, "dtype": dtype} for role, shape in shapes.items()}
    item = {"library": node.library, "where": where, "writes": buffers[result].name, "compute": compute}
    return item | {"tensors": tensors} | more


def _compute(node: Gemm | Convolution, where: str, buffers: dict[str, Buffer], device: str) -> str:
    dtypes = {buffer.tensor.dtype for buffer in buffers.values()}
    if len(dtypes) != 1 or not dtypes <= _COMPUTE.keys():
        roles = ", ".join(buffers)
        raise PlanError(f"{where}: {roles} must have one floating type, not {', '.join(sorted(dtypes))}")
    dtype = dtypes.pop()
    compute = node.compute if "compute" in node.model_fields_set else _COMPUTE[dtype][0]
    if compute not in _COMPUTE[dtype]:
        choices = " or ".join(_COMPUTE[dtype])
        raise PlanError(f"{where}.compute: {str(compute)[:60]!r} is not {choices}, which {dtype} buffers have")
    if compute == "tf32" and device == "cpu":
        raise PlanError(f"{where}.compute: tf32 does not exist on cpu")
    return str(compute)


def _extent(value: Any, least: int, names: dict[str, Any], where: str) -> int:
    number = evaluate(value, names, where)
    if not least <= number < 1 << 31:
        raise PlanError(f"{where}: {number} is not possible")
    return number


_Described = tuple[dict[str, list[int]], dict[str, Any]]  # shapes by role, and the other fields of the kind


def _gemm(node: Gemm, where: str, names: dict[str, Any]) -> _Described:
    """Returns the shapes [batch, rows, columns] of a matrix product's buffers, and whether each factor is transposed.
    The shapes of the factors ``a`` and ``b`` are those in memory, before they are transposed. The shape of ``c`` is
    that of the result. ``where`` names the node in error messages. ``names`` maps the names in the node's size
    expressions to their values."""
    batch, m, n, k = (_extent(getattr(node, key), 1, names, f"{where}.{key}") for key in ("batch", "m", "n", "k"))
    shapes = {
        "a": [batch, k, m] if node.transpose_a else [batch, m, k],
        "b": [batch, n, k] if node.transpose_b else [batch, k, n],
        "c": [batch, m, n],
    }
    return shapes, {"transpose_a": node.transpose_a, "transpose_b": node.transpose_b}


def _convolution(node: Convolution, where: str, names: dict[str, Any], buffers: dict[str, Buffer]) -> _Described:
    """Returns the shapes of a convolution's tensors, and its settings such as the stride. Shapes are as in torch:
    ``input`` is [batch, channels, extents] and ``bias`` is [output channels]. ``weight`` is [output channels, input
    channels / groups, extents]. If the convolution is transposed, ``weight`` is [input channels, output channels /
    groups, extents]."""
    given = _shape(node.input_shape, "input", where, names, buffers)
    kernel = _shape(node.weight_shape, "weight", where, names, buffers)
    extents = len(given) - 2
    if len(kernel) != len(given):
        raise PlanError(f"{where}.weight: {kernel} has {len(kernel)} dimensions, the input {given} has {len(given)}")
    transposed = node.transposed

    def each(key: str, least: int) -> list[int]:
        value = getattr(node, key)
        if isinstance(value, list) and len(value) != extents:
            raise PlanError(f"{where}.{key}: {extents} numbers are needed, not {len(value)}")
        values = value if isinstance(value, list) else [value] * extents
        return [_extent(part, least, names, f"{where}.{key}") for part in values]

    stride, padding, dilation = each("stride", 1), each("padding", 0), each("dilation", 1)
    output_padding = each("output_padding", 0)
    groups = _extent(node.groups, 1, names, f"{where}.groups")
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


def _shape(
    given: list[int | str] | None, role: str, where: str, names: dict[str, Any], buffers: dict[str, Buffer]
) -> list[int]:
    """Returns the shape of the tensor with this ``role`` (``input`` or ``weight``): the values of the expressions in
    ``given``, or the shape of the tensor's buffer if ``given`` is ``None``."""
    place = f"{where}.{role}_shape"
    shape = list(buffers[role].tensor.shape) if given is None else [_extent(part, 1, names, place) for part in given]
    if not 3 <= len(shape) <= 5 or 0 in shape:
        raise PlanError(f"{place}: batch, channels and one to three extents are needed, not {shape}")
    return shape
