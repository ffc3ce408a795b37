"""Library nodes: what they say is checked where the plan is read, and what they compute is what torch computes."""

import json
import re
from typing import Any

import pytest
import torch

from cuda_agent.sandbox.formats.expressions import PlanError
from cuda_agent.sandbox.formats.plan import compile_plan
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor
from cuda_agent.sandbox.worker import library_nodes
from tests.sandbox.conftest import Running, task

CONVOLUTION: dict[str, Any] = {
    "library": "convolution", "input": "in0", "weight": "w:conv.weight", "bias": "w:conv.bias", "output": "out0",
    "stride": [2, 1], "padding": 1,
}  # fmt: skip
GEMM: dict[str, Any] = {"library": "gemm", "a": "in0", "b": "w:conv.weight", "c": "out0", "m": 4, "n": 3, "k": 6}


def spec(dtype: str = "float32", output: tuple[int, ...] = (2, 8, 5, 9)) -> TaskSpec:
    tensors = {"conv.weight": (8, 4, 3, 3), "conv.bias": (8,), "half": (8,)}
    weights = {name: Tensor(shape, "float16" if name == "half" else dtype) for name, shape in tensors.items()}
    return TaskSpec((Tensor((2, 4, 9, 9), dtype),), (Tensor(output, dtype),), weights, ({"tensor": 0},), ())


def described(node: dict[str, Any], device: str = "cpu", of: TaskSpec | None = None, **plan: Any) -> dict[str, Any]:
    program = compile_plan({"plan.json": json.dumps({"nodes": [node], **plan})}, of or spec(), device)
    return program.nodes[0]


def test_a_convolution_is_told_in_numbers() -> None:
    node = described(CONVOLUTION | {"padding": ["in0.shape[2] // 9", 1]})
    assert (node["stride"], node["padding"], node["dilation"], node["groups"]) == ([2, 1], [1, 1], [1, 1], 1)
    assert node["tensors"]["output"] == {"buffer": "out:0", "shape": [2, 8, 5, 9], "dtype": "float32"}
    assert node["tensors"]["bias"]["shape"] == [8] and node["compute"] == "fp32"
    assert described(CONVOLUTION, of=spec("float64"))["compute"] == "fp64"


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"library": "fft"}, "nodes[0].library: 'fft' is none of gemm, convolution"),
        ({"library": ["gemm"]}, "nodes[0].library"),
        ({"library": "gemm"}, "nodes[0]: 'a' is missing"),
        (CONVOLUTION | {"strides": 1}, "nodes[0]: 'strides' is unknown"),
        (CONVOLUTION | {"bias": 0}, "nodes[0].bias: 0 is no buffer"),
        (CONVOLUTION | {"output": "in0"}, "nodes[0].output: 'in0' is no output and no workspace"),
        (CONVOLUTION | {"input": "out0"}, "nodes[0].output: 'out0' is read by the same node"),
        (CONVOLUTION | {"bias": "w:half"}, "nodes[0]: input, weight, bias, output must have one floating type"),
        (CONVOLUTION | {"compute": "fp8"}, "nodes[0].compute: 'fp8' is not fp32 or tf32 or fp16 or bf16"),
        (CONVOLUTION | {"compute": "tf32"}, "nodes[0].compute: tf32 does not exist on cpu"),
        (CONVOLUTION | {"weight": "w:conv.bias"}, "nodes[0].weight_shape: batch, channels and one to three extents"),
        (CONVOLUTION | {"weight_shape": 3}, "nodes[0].weight_shape: a list of numbers is expected"),
        (CONVOLUTION | {"weight_shape": [8, 2, 3, 3]}, "nodes[0].weight: [8, 2, 3, 3] takes 2 channels, the input"),
        (CONVOLUTION | {"weight_shape": [8, 4, 9]}, "nodes[0].weight: [8, 4, 9] has 3 dimensions"),
        (CONVOLUTION | {"weight_shape": [8, 4, 30, 3]}, "nodes[0]: a kernel of [30, 3] does not fit"),
        (CONVOLUTION | {"weight_shape": [9, 4, 3, 3]}, "nodes[0].weight: w:conv.weight has 288 elements, 324 are"),
        (CONVOLUTION | {"weight_shape": [7, 4, 3, 3]}, "nodes[0].output: out0 has 720 elements, 630 are needed"),
        (CONVOLUTION | {"groups": 3, "weight_shape": [8, 1, 3, 3]}, "nodes[0].weight: [8, 1, 3, 3] takes 3 channels"),
        (CONVOLUTION | {"groups": 4, "weight_shape": [6, 1, 3, 3]}, "nodes[0].groups: 4 groups of 4 and 6 channels"),
        (CONVOLUTION | {"stride": [1, 1, 1]}, "nodes[0].stride: 2 numbers are needed, not 3"),
        (CONVOLUTION | {"stride": 0}, "nodes[0].stride: 0 is not possible"),
        (CONVOLUTION | {"padding": "same"}, "nodes[0].padding: there is no same"),
        (CONVOLUTION | {"stride": 1}, "nodes[0].output: out0 has 720 elements, 1296 are needed"),
        (CONVOLUTION | {"stride": 3}, "nodes[0].output: out0 has 720 elements, 144 are needed"),
        (CONVOLUTION | {"output_padding": 1}, "nodes[0].output_padding: only where transposed is true"),
        (CONVOLUTION | {"transposed": 1}, "nodes[0].transposed: true or false"),
        (CONVOLUTION | {"bias": "in0", "input": "w:conv.weight", "weight": "in0", "transposed": True}, "nodes[0]"),
        (GEMM | {"m": 1000}, "nodes[0].a: in0 has 648 elements, 6000 are needed"),
        (GEMM | {"c": "w:conv.bias"}, "nodes[0].c: 'w:conv.bias' is no output and no workspace"),
        (GEMM | {"k": -1}, "nodes[0].k: -1 is not possible"),
        (GEMM | {"transpose_a": "yes"}, "nodes[0].transpose_a: true or false"),
    ],
)
def test_an_error_points_at_the_node(node: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        described(node)


def run(node: dict[str, Any], values: dict[str, torch.Tensor]) -> None:
    library_nodes.bind(node, lambda item: values[item["buffer"]].view(item["shape"]), "cpu")()


CASES = [
    ((2, 4, 17), (6, 4, 3), {"stride": 2, "padding": 1, "dilation": 2}),
    ((2, 4, 9, 7), (8, 2, 3, 2), {"groups": 2, "padding": [1, 0]}),
    ((1, 3, 5, 6, 7), (2, 3, 2, 3, 3), {"stride": [1, 2, 1]}),
    ((2, 4, 9), (4, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}),
    ((2, 4, 5, 5), (4, 1, 3, 3), {"transposed": True, "groups": 2, "padding": 1, "dilation": 2}),
]


@pytest.mark.parametrize("compute", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize(("given", "kernel", "how"), CASES)
def test_a_convolution_is_torchs(given: Any, kernel: Any, how: dict[str, Any], compute: str) -> None:
    dtype = torch.float64 if compute == "fp64" else torch.float32
    produced = kernel[1] * how.get("groups", 1) if how.get("transposed") else kernel[0]
    x, w, b = (torch.randn(*shape, dtype=dtype) for shape in (given, kernel, (produced,)))
    names = ["", "conv_transpose" if how.get("transposed") else "conv"]
    function = getattr(torch.nn.functional, f"{names[1]}{len(given) - 2}d")
    wanted = function(x, w, b, **{key: value for key, value in how.items() if key != "transposed"})
    name = str(dtype).removeprefix("torch.")
    weights = {"w": Tensor(kernel, name), "b": Tensor((produced,), name)}
    of = TaskSpec((Tensor(given, name),), (Tensor(tuple(wanted.shape), name),), weights, ({"tensor": 0},), ())
    node = {"library": "convolution", "input": "in0", "weight": "w:w", "bias": "w:b", "output": "out0"}
    out = torch.full_like(wanted, torch.nan)
    run(described(node | how | {"compute": compute}, of=of), {"in:0": x, "w:0": w, "w:1": b, "out:0": out})
    error = float((out - wanted).abs().max())
    limits = {"fp64": (0, 1e-12), "fp32": (0, 1e-5), "fp16": (1e-5, 2e-2), "bf16": (1e-4, 2e-1)}
    least, most = limits[compute]
    assert least <= error <= most


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_a_product_is_torchs(batch: int, flags: tuple[bool, bool]) -> None:
    m, n, k = 5, 7, 3
    a, b = torch.randn(batch, m, k), torch.randn(batch, k, n)
    given = [t.transpose(1, 2).contiguous() if flag else t for t, flag in zip((a, b), flags, strict=True)]
    tensors = [Tensor(tuple(t.shape), "float32") for t in (*given, torch.empty(batch, m, n))]
    of = TaskSpec(tuple(tensors[:2]), (tensors[2],), {}, ({"tensor": 0}, {"tensor": 1}), ())
    node = {"library": "gemm", "a": "in0", "b": "in1", "c": "out0", "m": m, "n": n, "k": k, "batch": batch}
    node |= {"transpose_a": flags[0], "transpose_b": flags[1]}
    out = torch.empty(batch, m, n)
    for compute, error in (("fp32", 1e-5), ("bf16", 1e-1)):
        values = {"in:0": given[0], "in:1": given[1], "out:0": out.fill_(torch.nan)}
        run(described(node | {"compute": compute}, of=of), values)
        torch.testing.assert_close(out, a @ b, atol=error, rtol=error)


def test_what_the_library_refuses_names_the_node() -> None:
    node = described(CONVOLUTION)
    values = {"in:0": torch.randn(2, 4, 9, 9), "w:0": torch.randn(8, 4, 3, 3), "w:1": torch.randn(8)}
    node["padding"] = [7]  # which no plan that was read can say
    with pytest.raises(RuntimeError, match=re.escape("nodes[0]: ")):
        run(node, values | {"out:0": torch.empty(2, 8, 5, 9)})


NETWORK = """
import torch
class Model(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.linear = torch.nn.Linear(channels * 64, 10)
    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).flatten(1))
def get_inputs():
    return [torch.randn(4, 3, 16, 16)]
def get_init_inputs():
    return [8]
"""
RELU = """
#include <algorithm>
void relu(long block, long grid, float* x, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) x[i] = std::max(x[i], 0.0f);
}
void bias(long block, long grid, const float* b, float* y, long rows, long columns) {
  for (long i = 0; i < rows * columns; i++) y[i] += b[i % columns];
}
"""
PLAN: dict[str, Any] = {
    "workspaces": {"hidden": {"size": "4 * 8 * 64"}},
    "nodes": [
        {"library": "convolution", "input": "in0", "weight": "w:conv.weight", "bias": "w:conv.bias",
         "output": "hidden", "stride": 2, "padding": 1},
        {"kernel": "relu.cpp", "function": "relu", "grid": 2, "args": ["hidden", "4 * 8 * 64"]},
        {"library": "gemm", "a": "hidden", "b": "w:linear.weight", "c": "out0", "m": 4, "n": 10, "k": 512,
         "transpose_b": True},
        {"kernel": "relu.cpp", "function": "bias", "args": ["w:linear.bias", "out0", 4, 10]},
    ],
}  # fmt: skip


def network(plan: dict[str, Any]) -> Solution:
    return Solution("plan", {"plan.json": json.dumps(plan), "relu.cpp": RELU})


def test_library_nodes_and_kernels_follow_each_other_on_the_cpu(running: Running) -> None:
    verdict = running.evaluate(task(NETWORK, "network"), network(PLAN))
    assert (verdict.status, verdict.message) == ("ok", "")
    rough = dict(PLAN, nodes=[PLAN["nodes"][0] | {"compute": "bf16"}, *PLAN["nodes"][1:]])
    verdict = running.evaluate(task(NETWORK, "network"), network(rough))
    assert verdict.status == "ok" and (verdict.max_error or 0) > 1e-4


def test_a_plan_without_a_kernel_is_one_too(running: Running) -> None:
    code = NETWORK.replace("self.linear(torch.relu(self.conv(x)).flatten(1))", "self.conv(x)")
    plan = {"nodes": [PLAN["nodes"][0] | {"output": "out0"}]}
    verdict = running.evaluate(task(code, "conv"), Solution("plan", {"plan.json": json.dumps(plan)}))
    assert (verdict.status, verdict.message) == ("ok", "")


def test_a_shape_that_does_not_fit_is_a_build_error_that_names_the_node(running: Running) -> None:
    nodes = [PLAN["nodes"][0], PLAN["nodes"][1], PLAN["nodes"][2] | {"k": 640}]
    verdict = running.evaluate(task(NETWORK, "network"), network(dict(PLAN, nodes=nodes)))
    assert verdict.status == "build_error"
    assert verdict.message.startswith("nodes[2].a: hidden has 2048 elements, 2560 are needed")
