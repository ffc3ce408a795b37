"""Contains a task and a work folder in the form published with CUDA Agent.

The work folder has a CUDA file of three sections, a binding, and ``model_new.py``."""

TASK = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        return torch.nn.functional.gelu(self.norm(x))

def get_inputs():
    return [torch.randn(2048, 1024)]

def get_init_inputs():
    return [1024]
"""

MODEL = """
import torch
import torch.nn as nn
import cuda_extension

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        return cuda_extension.norm_gelu_forward(x, self.norm.weight, self.norm.bias, eps=self.norm.eps)
"""

KERNEL = """
#include <cuda_runtime.h>

// 1. the kernel
template <int THREADS>
__global__ void norm_gelu_kernel(float* out, const float* in, const float* w, const float* b, int columns, float eps) {
  __shared__ float sums[2];
  const float* row = in + (size_t)blockIdx.x * columns;
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += THREADS) sum += row[i];
  for (int format = 16; format; format /= 2) sum += __shfl_down_sync(~0u, sum, format);
  if (threadIdx.x % 32 == 0) atomicAdd(&sums[0], sum);
  __syncthreads();
  const float mean = sums[0] / columns;
  float square = 0;
  for (int i = threadIdx.x; i < columns; i += THREADS) square += (row[i] - mean) * (row[i] - mean);
  for (int format = 16; format; format /= 2) square += __shfl_down_sync(~0u, square, format);
  if (threadIdx.x % 32 == 0) atomicAdd(&sums[1], square);
  __syncthreads();
  const float scale = rsqrtf(sums[1] / columns + eps);
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    float v = (row[i] - mean) * scale * w[i] + b[i];
    out[(size_t)blockIdx.x * columns + i] = 0.5f * v * (1.0f + erff(v * 0.70710678f));
  }
}

// 2. the launch, by configuration
template <int THREADS>
static void launch(float* out, const float* in, const float* w, const float* b, int rows, int columns, float eps,
                   cudaStream_t stream) {
  norm_gelu_kernel<THREADS><<<rows, THREADS, 0, stream>>>(out, in, w, b, columns, eps);
}

// 3. the C interface
extern "C" void norm_gelu_launcher(float* out, const float* in, const float* w, const float* b, int rows, int columns,
                                   float eps, int config, cudaStream_t stream) {
  switch (config) {
    case 1: launch<128>(out, in, w, b, rows, columns, eps, stream); break;
    case 2: launch<512>(out, in, w, b, rows, columns, eps, stream); break;
    default: launch<256>(out, in, w, b, rows, columns, eps, stream);
  }
}
"""

BINDING = """
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
#include <ATen/cuda/CUDAContext.h>
#include "../binding_registry.h"

extern "C" void norm_gelu_launcher(float* out, const float* in, const float* w, const float* b, int rows, int columns,
                                   float eps, int config, cudaStream_t stream);

static torch::Tensor norm_gelu_forward(torch::Tensor x, const torch::Tensor& weight, const torch::Tensor& bias,
                                       double eps, int64_t config) {
  TORCH_CHECK(x.is_cuda(), "x must be a CUDA tensor");
  TORCH_CHECK(x.scalar_type() == at::ScalarType::Float, "x must be float32");
  TORCH_CHECK(x.is_contiguous() && x.dim() == 2, "x must be a contiguous matrix, it has ", x.dim(), " dimensions");
  TORCH_CHECK(weight.numel() == x.size(1));
  auto out = torch::empty_like(x);
  cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  norm_gelu_launcher(out.data_ptr<float>(), x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
                     static_cast<int>(x.size(0)), static_cast<int>(x.size(1)), static_cast<float>(eps),
                     static_cast<int>(config), stream);
  return out;
}

static void register_norm_gelu(pybind11::module& m) {
  m.def("norm_gelu_forward", &norm_gelu_forward, "layer norm and GELU", py::arg("x"), py::arg("weight"),
        py::arg("bias"), py::arg("eps") = 1e-5, py::arg("config") = 0);
}

REGISTER_BINDING(norm_gelu, register_norm_gelu);
"""

FILES = {"model_new.py": MODEL, "kernels/norm_gelu.cu": KERNEL, "kernels/norm_gelu_binding.cpp": BINDING}
