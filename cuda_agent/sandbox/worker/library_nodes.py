"""Runs the library nodes of a plan in a worker. A plan (``plan.json``) lists the nodes that a solution runs: kernels,
memsets and library nodes. A library node is a matrix product or a convolution. On a GPU, cuBLAS or cuDNN computes it,
and on a CPU, torch's own libraries.

A node's ``compute`` chooses the arithmetic:

- fp32: products and sums are in single precision, even for half-precision buffers.
- tf32: operands are rounded to TF32.
- fp16 and bf16: operands and results are rounded to this type, as under autocast. Partial sums may also be rounded. On
  a GPU, the bias of a convolution is not rounded: it is added afterwards in the type of the buffers.
- fp64: double precision.

``formats.library_nodes`` has checked the shapes. If cuBLAS, cuDNN or torch still rejects a node, the error names the
node."""

from collections.abc import Callable
from typing import Any

import torch

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_Tensor = torch.Tensor
_Step = Callable[[], Any]


def bind(node: dict[str, Any], tensor: Callable[[dict[str, Any]], _Tensor], device: str) -> _Step:
    """Returns a function that runs the library node ``node`` (a dictionary from ``formats.library_nodes``). The node's
    ``tensors`` are descriptions of tensors, and the function ``tensor`` makes a tensor from such a description."""
    tensors = {role: tensor(item) for role, item in node["tensors"].items()}
    constant = {role for role, item in node["tensors"].items() if item["buffer"].startswith("w:")}
    given = node, tensors, constant
    step = _product(*given) if node["library"] == "gemm" else _convolution(*given, device)

    def named() -> None:
        try:
            step()
        except RuntimeError as error:
            raise RuntimeError(f"{node['where']}: {error}") from error

    return named


def _operand(tensor: _Tensor, wanted: torch.dtype | None, constant: bool) -> tuple[_Tensor, _Step | None]:
    """Returns ``tensor`` in the dtype ``wanted``, and a function that repeats the conversion, to be called before each
    run. The function is ``None`` if ``tensor`` is ``constant`` or needs no conversion."""
    if wanted is None or tensor.dtype == wanted:
        return tensor, None
    rounded = tensor.to(wanted)
    return rounded, None if constant else lambda: rounded.copy_(tensor)


def _product(node: dict[str, Any], tensors: dict[str, _Tensor], constant: set[str]) -> _Step:
    compute, c = node["compute"], tensors["c"]
    wanted = _HALF.get(compute)
    a, fill_a = _operand(tensors["a"], wanted, "a" in constant)
    b, fill_b = _operand(tensors["b"], wanted, "b" in constant)
    target = torch.empty_like(c, dtype=a.dtype) if a.dtype != c.dtype else c
    left = a.transpose(1, 2) if node["transpose_a"] else a
    right = b.transpose(1, 2) if node["transpose_b"] else b
    fills = [fill for fill in (fill_a, fill_b) if fill]
    single = c.shape[0] == 1

    def step() -> None:
        matmul = torch.backends.cuda.matmul
        matmul.allow_tf32 = compute == "tf32"
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = bool(wanted)
        for fill in fills:
            fill()
        if single:
            torch.mm(left[0], right[0], out=target[0])
        else:
            torch.bmm(left, right, out=target)
        if target is not c:
            c.copy_(target)

    return step


def _convolution(node: dict[str, Any], tensors: dict[str, _Tensor], constant: set[str], device: str) -> _Step:
    wanted, output = _HALF.get(node["compute"]), tensors["output"]
    given, fill_given = _operand(tensors["input"], wanted, "input" in constant)
    weight, fill_weight = _operand(tensors["weight"], wanted, "weight" in constant)
    bias, fill_bias = None, None
    if "bias" in tensors:
        bias, fill_bias = _operand(tensors["bias"], wanted if device == "cpu" else None, "bias" in constant)
    fills = [fill for fill in (fill_given, fill_weight, fill_bias) if fill]
    stride, padding, dilation = node["stride"], node["padding"], node["dilation"]
    transposed, extra, groups = node["transposed"], node["output_padding"], node["groups"]
    if device == "cpu":

        def on_cpu() -> None:
            for fill in fills:
                fill()
            output.copy_(
                torch.ops.aten.convolution(given, weight, bias, stride, padding, dilation, transposed, extra, groups)
            )

        return on_cpu
    place = output
    if given.ndim == 3:  # cuDNN has no one-dimensional convolutions
        given, weight, place = given.unsqueeze(2), weight.unsqueeze(2), output.unsqueeze(2)
        stride, padding, dilation, extra = [1, *stride], [0, *padding], [1, *dilation], [0, *extra]
    direct = not transposed and given.dtype == output.dtype
    shown = bias.view(1, -1, *[1] * (output.ndim - 2)) if bias is not None else None
    how = groups, False, True, node["compute"] == "tf32"  # no benchmark, deterministic

    def on_gpu() -> None:
        for fill in fills:
            fill()
        if direct:
            torch.ops.aten.cudnn_convolution.out(given, weight, padding, stride, dilation, *how, out=place)
        elif transposed:
            place.copy_(
                torch.ops.aten.cudnn_convolution_transpose(given, weight, padding, extra, stride, dilation, *how)
            )
        else:
            place.copy_(torch.ops.aten.cudnn_convolution(given, weight, padding, stride, dilation, *how))
        if shown is not None:
            output.add_(shown)

    return on_gpu
