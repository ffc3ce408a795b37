"""The sandbox on a GPU: verdicts of plans and of Python, and what a kernel must not reach."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuda_agent.optimize.verdict_text import verdict_lines
from cuda_agent.sandbox.wire import Solution
from tests.sandbox import published
from tests.sandbox.conftest import CHAIN, Running, task
from tests.sandbox.formats import test_first_pass as compiling

pytestmark = pytest.mark.gpu

KERNEL = """
#include <cuda_runtime.h>
#include <cstdint>
template <class T, int V>
__global__ void chain(const T* __restrict__ x, T* __restrict__ y, int64_t n, float scale) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x * V;
  for (int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V; i < n; i += step)
    for (int j = 0; j < V && i + j < n; j++) y[i + j] = fmaxf(x[i + j], 0.0f) * scale;
}
"""
PLAN = {
    "nodes": [
        {
            "kernel": "kernels/chain.cu",
            "function": "chain<float, 4>",
            "grid": "min(cdiv(in0.numel, 1024), 1024)",
            "block": 256,
            "args": ["in0", "out0", "in0.numel", "init0"],
        }
    ]
}
LARGE = CHAIN.replace("torch.randn(32, 128)", "torch.randn(4096, 4096)")


def plan(kernel: str = KERNEL, nodes: Any = PLAN) -> Solution:
    return Solution("plan", {"plan.json": json.dumps(nodes), "kernels/chain.cu": kernel})


@pytest.mark.parametrize("code", [CHAIN, LARGE], ids=["small", "large"])
def test_a_plan_is_judged_and_timed_by_the_device(gpu: Running, code: str) -> None:
    verdict = gpu.evaluate(task(code), plan())
    print(verdict)
    assert (verdict.status, verdict.message, verdict.device) == ("ok", "", "cuda")
    assert verdict.seconds and verdict.eager_seconds and verdict.compile_seconds


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_workers_use_the_gpu_that_this_process_was_given(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    code = CHAIN.replace("return torch.relu(x)", "assert torch.cuda.device_count() == 1\n        return torch.relu(x)")
    verdict = start(device="cuda", memory_mb=4096).evaluate(task(code), plan(), mode="check")
    assert (verdict.status, verdict.message) == ("ok", "")


def test_a_kernel_that_writes_beyond_its_output_crashes(gpu: Running) -> None:
    odd = task(CHAIN.replace("torch.randn(32, 128)", "torch.randn(33, 129)"))
    assert gpu.evaluate(odd, plan(), mode="check").status == "ok"
    verdict = gpu.evaluate(odd, plan(KERNEL.replace(" && i + j < n", "")), mode="check")
    assert (verdict.status, verdict.message) == ("crash", "the solution wrote outside of its outputs in check 1")


def test_the_published_work_folder_runs_unchanged(gpu: Running) -> None:
    verdict = gpu.evaluate(task(published.TASK), Solution("extension", published.FILES))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")


SHARING = """
import mmap, torch
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.host = scale, torch.empty(SIZE << 20, dtype=torch.uint8, pin_memory=PINNED)
        self.kept = None if PINNED else mmap.mmap(-1, SIZE << 20, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    def forward(self, x):
        return torch.relu(x) * self.scale
"""


@pytest.mark.parametrize(("size", "pinned", "status"), [(512, True, "ok"), (6144, False, "crash")])
def test_memory_that_the_driver_pins_is_made_and_shared_memory_counts(
    gpu: Running, size: int, pinned: bool, status: str
) -> None:
    code = SHARING.replace("SIZE", str(size)).replace("PINNED", str(pinned))
    assert gpu.evaluate(task(), Solution("python", {"model_new.py": code})).status == status


MATMUL = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b
def get_inputs():
    return [torch.randn(2048, 16), torch.randn(16, 512)]
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize("compute", ["fp32", "tf32", "fp16"])
def test_a_library_node_multiplies_matrices(gpu: Running, compute: str) -> None:
    node = {"library": "gemm", "a": "in0", "b": "in1", "c": "out0", "compute": compute}
    node |= {"m": "in0.shape[0]", "n": "in1.shape[1]", "k": "in0.shape[1]"}
    verdict = gpu.evaluate(task(MATMUL), Solution("plan", {"plan.json": json.dumps({"nodes": [node]})}))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")


CONVOLUTIONS = {
    "Conv1d": ("Conv1d(8, 16, 5, padding=2, dilation=2)", (16, 8, 512), {"padding": 2, "dilation": 2}),
    "Conv2d": ("Conv2d(8, 16, 3, stride=2, groups=4)", (16, 8, 64, 64), {"stride": 2, "groups": 4}),
    "Conv3d": ("Conv3d(4, 8, 3, padding=(0, 1, 2))", (4, 4, 12, 12, 12), {"padding": [0, 1, 2]}),
    "transposed": (
        "ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)",
        (8, 8, 32, 32),
        {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1},
    ),
}


@pytest.mark.parametrize("compute", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_library_node_convolves(gpu: Running, kind: str, compute: str) -> None:
    made, shape, how = CONVOLUTIONS[kind]
    code = f"""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.{made}
    def forward(self, x):
        return self.conv(x)
def get_inputs():
    return [torch.randn{shape}]
def get_init_inputs():
    return []
"""
    node = {"library": "convolution", "input": "in0", "weight": "w:conv.weight", "bias": "w:conv.bias"}
    plan = {"nodes": [node | how | {"output": "out0", "compute": compute}]}
    verdict = gpu.evaluate(task(code, kind), Solution("plan", {"plan.json": json.dumps(plan)}))
    print(verdict)
    if compute == "bf16":  # its rounding is about the tolerance itself
        assert verdict.status in ("ok", "wrong")
    else:
        assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.max_error is not None
    assert verdict.max_error < {"fp32": 2e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 1e-1}[compute]


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        ("* scale;", "* scale * 1.05f;", "wrong", "off by more than the tolerance"),
        ("y[i + j] =", "((T*)x)[i + j] = y[i + j] =", "crash", "a write to an input"),
        ("y[i + j] =", "y[(1ll << 40) + i + j] =", "crash", "illegal address"),
        ("y[i + j] =", "if (i + j < n - 1) y[i + j] =", "wrong", "1 of 4096"),
        ("y[i + j] =", "while (true) y[i + j] =", "timeout", "did not finish in time"),
        ("y[i + j] =", "if (i + j < n) __trap(); else y[i + j] =", "crash", "a kernel failed"),
        ("x[i + j], 0.0f) * scale", "x[i + j], 0.0f) * *scale", "build_error", "operand"),
        (
            "float scale) {",
            "const float* factor) {\n  const float scale = *factor;",
            "build_error",
            "argument 3 is a pointer",
        ),
        ("T* __restrict__ y, int64_t n, float scale", "T* __restrict__ y, int64_t n", "build_error", "undefined"),
    ],
)
def test_a_broken_kernel_gets_the_status_it_earned(gpu: Running, old: str, new: str, status: str, words: str) -> None:
    verdict = gpu.evaluate(task(), plan(KERNEL.replace(old, new)))
    assert words in verdict.message
    assert verdict.status == status
    assert gpu.evaluate(task(), plan()).status == "ok"  # and the device serves the next one


def test_launches_may_ask_for_clusters_cooperation_and_much_shared_memory(gpu: Running) -> None:
    node = dict(PLAN["nodes"][0], shared=100_000, cluster=2, grid=4)
    assert gpu.evaluate(task(), plan(nodes={"nodes": [node]})).status == "ok"
    node = dict(PLAN["nodes"][0], cooperative=True, grid=64)
    assert gpu.evaluate(task(), plan(nodes={"nodes": [node]})).status == "ok"
    too_much = dict(PLAN["nodes"][0], shared=1_000_000)
    verdict = gpu.evaluate(task(), plan(nodes={"nodes": [too_much]}))
    assert verdict.status == "build_error" and "bytes of shared memory" in verdict.message


SINES = LARGE.replace(
    "return torch.relu(x) * self.scale", "for _ in range(40):\n            x = torch.sin(x)\n        return x"
)
PYTHON = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        BODY
"""
LOOP = "for _ in range(40):\n            x = torch.sin(x)\n        return x"
LIES = {
    "a forged clock": "torch.cuda.Event.elapsed_time = lambda *a: 0.01\n        " + LOOP,
    "a side stream": "self.side = getattr(self, 'side', None) or torch.cuda.Stream()\n"
    "        with torch.cuda.stream(self.side):\n            " + LOOP.replace("\n", "\n    "),
    "a clock that waits for nothing": "torch.cuda.synchronize = lambda *a: None\n"
    "        torch.cuda.Event.elapsed_time = lambda *a: 0.01\n        " + LOOP,
}


def python(body: str) -> Solution:
    return Solution("python", {"model_new.py": PYTHON.replace("BODY", body)})


def test_an_honest_python_solution_is_believed(gpu: Running) -> None:
    verdict = gpu.evaluate(task(SINES), python(LOOP))
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.speedup_eager and 0.8 < verdict.speedup_eager < 1.25


TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x, y, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.maximum(value, 0.0) * scale, mask=at < n)

class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        kernel[(triton.cdiv(n, 1024),)](x, y, n, self.scale, BLOCK=1024)
        return y
"""
COMPILERS = {
    "triton": TRITON,
    "autotuned triton": TRITON.replace(
        "@triton.jit",
        "@triton.autotune([triton.Config({'BLOCK': b}) for b in (512, 1024)], key=['n'])\n@triton.jit",
    )
    .replace(", BLOCK=1024)", ")")
    .replace("kernel[(triton.cdiv(n, 1024),)]", "kernel[lambda meta: (triton.cdiv(n, meta['BLOCK']),)]"),
    "load_inline": compiling.solution(compiling.CUDA_SOURCE, "return chain.chain(x, self.scale)").files["model_new.py"],
    "torch.compile": compiling.COMPILED.files["model_new.py"],
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_solution_may_bring_its_own_compiler(gpu: Running, compiler: str) -> None:
    verdict = gpu.evaluate(task(LARGE), Solution("python", {"model_new.py": COMPILERS[compiler]}))
    print(verdict)
    assert (verdict.status, verdict.message) == ("ok", "")
    if compiler == "load_inline":
        assert (compiling.kept(gpu)[-1] / "extensions" / "chain" / "stand-ins" / "chain.so").is_file()
    least = (
        0.9 if compiler == "load_inline" else 1.1
    )  # one pass over memory in the place of two, not in this simple kernel
    assert verdict.speedup_eager and verdict.speedup_eager > least


def test_what_triton_refuses_is_a_build_error(gpu: Running) -> None:
    broken = TRITON.replace("tl.maximum(value, 0.0)", "tl.no_such_function(value)")
    verdict = gpu.evaluate(task(), Solution("python", {"model_new.py": broken}))
    print(verdict)
    assert verdict.status == "build_error" and "no_such_function" in verdict.message


def test_a_time_that_the_judges_clock_does_not_allow_is_a_cheat(gpu: Running) -> None:
    """Its outputs are right and in time: nothing but the time can give it away."""
    verdict = gpu.evaluate(task(SINES), python(LIES["a forged clock"]))
    assert verdict.status == "cheat", verdict
    assert verdict.reward == -1


@pytest.mark.parametrize("lie", ["a side stream", "a clock that waits for nothing"])
def test_work_that_the_clock_does_not_wait_for_gains_nothing(gpu: Running, lie: str) -> None:
    """Where the work still runs when the outputs are copied, they are wrong. Otherwise the time is a lie, or the time
    by the judge's clock counts."""
    verdict = gpu.evaluate(task(SINES), python(LIES[lie]))
    print(verdict)
    if verdict.status == "ok":
        assert verdict.speedup_eager and verdict.speedup_eager < 1.1
    else:
        assert verdict.status in ("cheat", "wrong"), verdict
        assert verdict.reward == -1


def test_tf32_that_wins_over_fp32_is_shown_for_what_it_is(gpu: Running) -> None:
    code = MATMUL.replace("randn(2048, 16), torch.randn(16, 512)", "randn(4096, 4096), torch.randn(4096, 4096)")
    node = {"library": "gemm", "a": "in0", "b": "in1", "c": "out0", "compute": "tf32"}
    node |= {"m": "in0.shape[0]", "n": "in1.shape[1]", "k": "in0.shape[1]"}
    solution = Solution("plan", {"plan.json": json.dumps({"nodes": [node]})})
    verdict = gpu.wait(gpu.sandbox.evaluate(task(code), solution, "strict"))
    print("\n".join(verdict_lines(verdict)))
    print(verdict.phases)
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.strict and verdict.strict["precision"] == "tf32"
    assert verdict.speedup_eager and verdict.speedup_eager > 3
    assert verdict.strict["baselines"]["eager_tf32"] < 1.2 * (verdict.seconds or 0)


def test_strict_mode_on_the_device(gpu: Running) -> None:
    verdict = gpu.wait(gpu.sandbox.evaluate(task(published.TASK), Solution("extension", published.FILES), "strict"))
    print("\n".join(verdict_lines(verdict)))
    print(verdict.phases)
    assert (verdict.status, verdict.message) == ("ok", "")
    assert verdict.strict and verdict.strict["precision"] == "fp32"
