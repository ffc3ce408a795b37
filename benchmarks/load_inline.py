"""Measures seconds per new load_inline solution, built against small stand-ins for torch's headers or the real headers.

    python benchmarks/load_inline.py --device cuda --solutions 9 --torch 3

The time is that of a whole evaluation: first pass (which builds the extension), load and checks. Every solution has a
different source, so that none comes from a cache.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from cuda_agent.config import SandboxConfig
from cuda_agent.sandbox.formats import first_pass
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Solution
from cuda_agent.tasks.task import Task

TASK = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 1.5
def get_inputs():
    return [torch.randn(512, 1024)]
def get_init_inputs():
    return []
"""
CPU = """
torch::Tensor chain(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i++) b[i] = a[i] > 0 ? a[i] * 1.5f : 0.f;
  return y;
}
"""
CUDA = """
__global__ void chain_kernel(const float* x, float* y, int64_t n) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.f) * 1.5f;
}
torch::Tensor chain(torch::Tensor x) {
  auto y = torch::empty_like(x);
  chain_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}
"""
MODEL = """
import torch
from torch.utils.cpp_extension import load_inline
built = load_inline("chain", cpp_sources={cpp!r}, cuda_sources={cuda!r}, functions=["chain"])
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return built.chain(x)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--solutions", type=int, default=9, help="built against the stand-ins")
    parser.add_argument("--torch", type=int, default=3, help="built with torch's headers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        asyncio.run(measure(options.device, options.solutions, options.torch, Path(cache)))


async def measure(device: str, solutions: int, torchs: int, cache: Path) -> None:
    task = Task("relu", TASK, ("torch.relu",), "bench")
    stand_ins = first_pass.stand_ins
    async with LocalSandbox(SandboxConfig(device=device, memory_mb=4096), cache) as sandbox:
        await sandbox.evaluate(task, solution(device, 0), "check")  # prepares the task and the workers
        for name, count in (("stand-ins", solutions), ("torch", torchs)):
            if count == 0:
                continue
            first_pass.stand_ins = stand_ins if name == "stand-ins" else lambda files: {}
            seconds = []
            for number in range(count):
                begin = time.perf_counter()
                verdict = await sandbox.evaluate(task, solution(device, 1 + number + 1000 * (name == "torch")), "check")
                seconds.append(time.perf_counter() - begin)
                if verdict.status != "ok":
                    raise SystemExit(f"{name}: {verdict.status}: {verdict.message}")
            each = "  ".join(f"{one:.1f}" for one in seconds)
            print(f"{name:9} median {statistics.median(seconds):.2f} s | {each}")
    first_pass.stand_ins = stand_ins


def solution(device: str, number: int) -> Solution:
    note = f"// {number}\n"
    cpp, cuda = (note + CPU, None) if device == "cpu" else (note + "torch::Tensor chain(torch::Tensor x);", note + CUDA)
    return Solution("python", {"model_new.py": MODEL.format(cpp=cpp, cuda=cuda)})


if __name__ == "__main__":
    main()
