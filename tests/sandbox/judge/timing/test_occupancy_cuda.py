"""The resources of a plan's kernels on a GPU, against the driver's own count."""

import time

import pytest

from cuda_agent.agent.tools import describe
from cuda_agent.optimize.profile_text import profile_lines
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.judge.timing import occupancy
from cuda_agent.sandbox.wire import Solution
from tests.sandbox import published
from tests.sandbox.conftest import Running, task
from tests.sandbox.test_cuda import KERNEL, LARGE, PLAN, plan

pytestmark = pytest.mark.gpu

# Local memory: an array with indices that are known at run time only.  Shared memory: 4096 bytes.
HEAVY = """
__global__ void heavy(const float* x, float* y, long n, float scale) {
  __shared__ float tile[1024];
  float kept[64];
  for (int i = 0; i < 64; i++) kept[i] = x[(threadIdx.x + i) % n];
  tile[threadIdx.x] = kept[(int)(n + threadIdx.x) & 63];
  __syncthreads();
  long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.0f) * scale + 1e-30f * tile[(threadIdx.x + 1) % blockDim.x];
}
"""
HEAVY_PLAN = {
    "nodes": [
        PLAN["nodes"][0] | {"function": "heavy", "grid": "cdiv(in0.numel, 128)", "block": 128, "shared": 40000},
    ]
}


def test_profile_tells_the_resources_of_each_kernel_and_the_limiter(gpu: Running) -> None:
    verdict = gpu.evaluate(task(LARGE), plan())
    assert verdict.status == "ok", verdict
    (use,) = verdict.kernels
    begin = time.perf_counter()
    lines = profile_lines(verdict)
    assert time.perf_counter() - begin < 1
    print("\n".join([describe(verdict, "profile", "full"), *lines]))
    assert (use.name, use.grid, use.block, use.shared_bytes) == ("chain<float, 4>", 1024, 256, 0)
    assert 8 <= use.registers <= 128 and 0 < use.occupancy <= 1 and use.waves > 0
    assert any(line.startswith("chain<float, 4>: ") for line in lines)
    assert sum(line.startswith("limiter: ") for line in lines) == 1


def test_local_and_shared_memory_are_told(gpu: Running) -> None:
    verdict = gpu.evaluate(task(LARGE), plan(HEAVY, HEAVY_PLAN))
    assert verdict.status == "ok", verdict
    (use,) = verdict.kernels
    print(use, *profile_lines(verdict), sep="\n")
    assert use.local_bytes >= 256 and use.shared_bytes == 4096 + 40000 and use.limit == "shared memory"


def test_the_kernels_of_an_extension_are_told(gpu: Running) -> None:
    verdict = gpu.evaluate(task(published.TASK), Solution("extension", published.FILES))
    assert verdict.status == "ok", verdict
    print(*verdict.kernels, *profile_lines(verdict), sep="\n")
    (use,) = verdict.kernels
    assert use.name == "norm_gelu_kernel" and use.registers >= 8 and use.grid == 0


def test_the_occupancy_is_the_drivers(gpu: Running) -> None:
    limits = occupancy.of_gpu()
    print(limits)
    names = [f"chain<float, {width}>" for width in (1, 4, 16)]
    built = gpu.sandbox._builder.kernels({"chain.cu": KERNEL}, "chain.cu", names, driver.architecture())
    image, mangled = gpu.wait(built)
    module = driver.Module(image.read_bytes())
    try:
        for name in names:
            for shared in (0, 1000, 20_000, 60_000, 100_000, 160_000):
                if shared > driver.shared_memory_limit():
                    continue
                function = module.function(mangled[name], shared)
                registers, _, static = driver.resources(function)
                for threads in (32, 33, 96, 128, 256, 320, 512, 1024):
                    mine, limit = occupancy.blocks_at_once(threads, registers, static + shared, limits)
                    known = driver.blocks_at_once(function, threads, shared)
                    assert mine == known, (name, registers, threads, shared, limit)
    finally:
        module.unload()
