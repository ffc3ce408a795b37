"""Exported solutions on a GPU, each in a fresh process that has PyTorch alone."""

import json

import pytest
from fresh import only_torch, run

from cuda_agent.config import SandboxConfig
from cuda_agent.optimize.export import model_new
from cuda_agent.sandbox.wire import Solution, TaskSpec, Tensor

pytestmark = pytest.mark.gpu

MODEL = """import torch
class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = torch.nn.Linear(64, 32)
        self.scale = scale
    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale, x.sum(1)
def get_inputs():
    return [torch.randn(96, 64)]
def get_init_inputs():
    return [1.5]
"""
KERNEL = """
template <int N> __global__ void finish(const float* t, const float* b, float* y, int n, float scale) {
  extern __shared__ float room[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  room[threadIdx.x] = i < n ? t[i] + b[i % N] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = fmaxf(room[threadIdx.x], 0.0f) * scale;
}
__global__ void rows(const float* x, float* s, long long n) {
  float total = 0;
  for (int i = threadIdx.x; i < n; i += 32) total += x[blockIdx.x * n + i];
  for (int k = 16; k; k /= 2) total += __shfl_down_sync(~0u, total, k);
  if (threadIdx.x == 0) atomicAdd(s + blockIdx.x, total);
}
"""
PLAN = {
    "workspaces": {"tmp": {"size": 3072}},
    "nodes": [
        {
            "library": "gemm", "a": "in0", "b": "w:linear.weight", "c": "tmp", "m": 96, "n": 32, "k": 64,
            "transpose_b": True,
        },
        {
            "kernel": "kernels/k.cu", "function": "finish<32>", "grid": "cdiv(3072, 256)", "block": 256,
            "shared": 65536, "args": ["tmp", "w:linear.bias", "out0", 3072, "init0"],
        },
        {"memset": "out1", "value": 0},
        {"kernel": "kernels/k.cu", "function": "rows", "grid": 96, "block": 32, "args": ["in0", "out1", 64]},
    ],
}  # fmt: skip
SPEC = TaskSpec(
    (Tensor((96, 64), "float32"),),
    (Tensor((96, 32), "float32"), Tensor((96,), "float32")),
    {"linear.weight": Tensor((32, 64), "float32"), "linear.bias": Tensor((32,), "float32")},
    ({"tensor": 0},),
    ({"value": 1.5},),
)
FOLDER = {
    "model_new.py": """import torch
import cuda_extension

class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = torch.nn.Linear(64, 32)
        self.scale = scale

    def forward(self, x):
        return cuda_extension.forward(x, self.linear.weight, self.linear.bias, self.scale)
""",
    "kernels/k.cu": """
#include <cuda_runtime.h>
__global__ void product(const float* x, const float* w, const float* b, float* y, float* s, float scale) {
  float total = b[threadIdx.x], sum = 0;
  for (int i = 0; i < 64; i++) {
    total += x[blockIdx.x * 64 + i] * w[threadIdx.x * 64 + i];
    sum += x[blockIdx.x * 64 + i];
  }
  y[blockIdx.x * 32 + threadIdx.x] = fmaxf(total, 0.0f) * scale;
  if (threadIdx.x == 0) s[blockIdx.x] = sum;
}
extern "C" void launch(const float* x, const float* w, const float* b, float* y, float* s, float scale, int rows,
                       cudaStream_t stream) {
  product<<<rows, 32, 0, stream>>>(x, w, b, y, s, scale);
}
""",
    "kernels/k_binding.cpp": """
#include <torch/types.h>
#include <c10/cuda/CUDAStream.h>
#include "binding_registry.h"
extern "C" void launch(const float*, const float*, const float*, float*, float*, float, int, cudaStream_t);
static std::vector<torch::Tensor> forward(torch::Tensor x, torch::Tensor w, torch::Tensor b, double scale) {
  auto y = torch::empty({x.size(0), 32}, x.options()), s = torch::empty({x.size(0)}, x.options());
  launch(x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), s.data_ptr<float>(), scale,
         x.size(0), c10::cuda::getCurrentCUDAStream());
  return {y, s};
}
REGISTER_BINDING(forward, forward);
""",
}
COMPARE = """
import torch, model
from model_new import ModelNew
old, new = model.Model(1.5).eval().cuda(), ModelNew(1.5).eval().cuda()
new.load_state_dict(old.state_dict())
torch.backends.cuda.matmul.allow_tf32 = False
with torch.no_grad():
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(5):
                x = torch.randn(96, 64, device="cuda")
                for have, want in zip(new(x), old(x), strict=True):
                    torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)
    torch.cuda.synchronize()
    try:
        new(torch.randn(96, 64))
        raise SystemExit("not refused")
    except (ValueError, RuntimeError):  # a plain module's own complaint is of the second kind
        pass
"""


@pytest.mark.parametrize(
    "solution",
    [
        Solution("plan", {"plan.json": json.dumps(PLAN), "kernels/k.cu": KERNEL}),
        Solution("extension", FOLDER),
        Solution("python", {"model_new.py": MODEL.replace("class Model", "class ModelNew")}),
    ],
    ids=["plan", "extension", "python"],
)
def test_it_computes_what_the_model_computes_on_any_stream(solution, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "model_new.py").write_text(model_new(MODEL, solution, SPEC, SandboxConfig(device="cuda")))
    done = run(only_torch(tmp_path / "packages"), COMPARE, tmp_path, tmp_path / "home")
    assert done.returncode == 0, done.stderr
