"""The sandbox on a GPU: verdicts of plans and of Python, and what a kernel must not reach."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.config import Sandbox
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import CHAIN, Running, task

pytestmark = pytest.mark.gpu

KERNEL = """
#include <cuda_runtime.h>
#include <cstdint>
template <class T, int V>
__global__ void chain(const T* __restrict__ x, T* __restrict__ y, int64_t n, float scale) {
  for (int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * V; i < n; i += (int64_t)gridDim.x * blockDim.x * V)
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


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    try:
        driver.open_device
    except driver.NoDevice:
        pytest.skip("no GPU")
    running = Running(Sandbox(device="cuda", memory_mb=4096), tmp_path_factory.mktemp("cuda"))
    yield running
    running.close()


@pytest.mark.parametrize("code", [CHAIN, LARGE], ids=["small", "large"])
def test_a_plan_is_judged_and_timed_by_the_device(gpu: Running, code: str) -> None:
    verdict = gpu.evaluate(task(code), plan())
    print(verdict)
    assert (verdict.status, verdict.message, verdict.device) == ("ok", "", "cuda")
    assert verdict.seconds and verdict.eager_seconds and verdict.compile_seconds
