"""Builds load_inline sources in the styles that language models write, with stand-in headers or with torch's own.

Run as a program, ``python -m ... FOLDER cpu|cuda stand-ins|torch`` builds the sources for one device and prints the
result of every call as JSON."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from cuda_agent.sandbox.formats.first_pass import stand_ins
from cuda_agent.sandbox.worker import stand_ins as worker

# ruff: noqa: E501
CPU = r"""
#include <torch/extension.h>
#include <stdexcept>
#include <vector>

torch::Tensor scaled(torch::Tensor x, double factor, int64_t shift) {
  TORCH_CHECK(x.dim() == 2, "expected a matrix, got ", x.dim(), " dimensions of sizes ", x.sizes());
  auto source = x.contiguous();
  auto y = torch::empty_like(source);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "scaled", ([&] {
    const scalar_t* a = source.data_ptr<scalar_t>();
    scalar_t* b = y.data_ptr<scalar_t>();
    for (int64_t i = 0; i < x.numel(); i++) b[i] = a[i] * scalar_t(factor) + scalar_t(shift);
  }));
  return y;
}
std::vector<torch::Tensor> moments(const torch::Tensor& x) {
  auto options = torch::TensorOptions().dtype(torch::kFloat32).device(x.device());
  torch::Tensor mean = torch::zeros({x.size(0)}, options), square = torch::empty({x.size(0)}, x.options());
  auto in = x.accessor<float, 2>();
  auto sums = mean.accessor<float, 1>();
  auto squares = square.packed_accessor32<float, 1>();
  for (int r = 0; r < in.size(0); r++) {
    squares[r] = 0;
    for (int c = 0; c < in.size(1); c++) { sums[r] += in[r][c] / in.size(1); squares[r] += in[r][c] * in[r][c]; }
  }
  return {mean, square};
}
std::tuple<at::Tensor, int64_t, bool, double> shapes(at::Tensor x, c10::optional<at::Tensor> bias, std::vector<int64_t> order) {
  at::Tensor y = at::full({2, 3}, 1.5, x.options()) ;
  return std::make_tuple(y.permute(order).unsqueeze(0), x.stride(-1), bias.has_value(), static_cast<double>(x.nbytes()));
}
void fill(torch::Tensor& x, float value) { x.fill_(value); }
torch::Tensor kept(torch::Tensor x) {
  static torch::Tensor last;
  torch::Tensor before = last.defined() ? last : torch::ones_like(x, x.options().dtype(torch::kLong));
  last = x.clone();
  return before;
}
void wrong() { throw std::invalid_argument("an invalid argument"); }
int64_t size_of(torch::Tensor x, int64_t i) { return x.size(i); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "functions";
  m.def("scaled", &scaled, "scales", py::arg("x"), py::arg("factor") = 2.0, py::arg("shift") = 0);
  m.def("moments", &moments);
  m.def("shapes", &shapes, py::arg("x"), py::arg("bias") = py::none(), py::arg("order") = std::vector<int64_t>{1, 0});
  m.def("fill", &fill);
  m.def("kept", &kept);
  m.def("wrong", &wrong);
  m.def("size_of", [](torch::Tensor x, int64_t i) { return size_of(x, i); });
}
"""
CPU_CALLS = [
    "m.scaled(x)", "m.scaled(x.half(), 0.3)", "m.scaled(x.bfloat16(), shift=3, factor=1.7)", "m.scaled(x.t())",
    "m.scaled(torch.nn.Parameter(x))", "m.scaled(x[0])", "m.scaled(x.int())", "m.scaled(x, 'two')", "m.scaled(x, shift=1.5)",
    "m.scaled(x, y=1)", "m.scaled()", "m.scaled(None)", "m.moments(x)", "m.moments(x.double())", "m.shapes(x)",
    "m.shapes(x, x, [0, 1])", "m.shapes(x.t(), bias=None, order=(1, 0))", "m.fill(x, 3)", "x", "m.kept(x)", "m.kept(x)",
    "m.wrong()", "m.size_of(x, -1)", "m.size_of(x, 2)", "m.__doc__", "m.scaled(torch.empty(0, 3))",
]  # fmt: skip

CUDA_DECLARATIONS = r"""
#include <torch/extension.h>
torch::Tensor relu2(torch::Tensor x);
torch::Tensor scale_rows(torch::Tensor x, torch::Tensor s);
torch::Tensor add(torch::Tensor a, torch::Tensor b);
std::vector<torch::Tensor> moments(torch::Tensor x);
torch::Tensor bias_relu(torch::Tensor x, c10::optional<torch::Tensor> bias, double slope);
torch::Tensor doubled(torch::Tensor x);
torch::Tensor multiplied(torch::Tensor a, torch::Tensor b);
std::tuple<torch::Tensor, torch::Tensor> made(const torch::Tensor& x, int64_t n, bool flip);
torch::Tensor row_max(torch::Tensor x);
torch::Tensor tiles(torch::Tensor a, torch::Tensor b);
void too_many_threads(torch::Tensor x);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("relu2", &relu2, "squared relu (CUDA)");
  m.def("scale_rows", &scale_rows);
  m.def("add", &add, py::arg("a"), py::arg("b"));
  m.def("moments", &moments);
  m.def("bias_relu", &bias_relu, py::arg("x"), py::arg("bias") = py::none(), py::arg("slope") = 0.01);
  m.def("doubled", &doubled);
  m.def("multiplied", &multiplied);
  m.def("made", &made);
  m.def("row_max", &row_max);
  m.def("tiles", &tiles);
  m.def("too_many_threads", &too_many_threads);
}
"""
CUDA = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <limits>
#include <vector>
#define CHECK_CUDA(x) TORCH_CHECK(x.type().is_cuda() && x.device().is_cuda(), #x " must be a CUDA tensor")
#define CHECK_INPUT(x) CHECK_CUDA(x); TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")

template <typename scalar_t>
__global__ void relu2_kernel(const scalar_t* __restrict__ x, scalar_t* __restrict__ y, size_t size) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < size) { scalar_t v = x[i]; y[i] = v > scalar_t(0) ? v * v + v : scalar_t(0); }
}
torch::Tensor relu2(torch::Tensor x) {
  auto y = torch::zeros_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::ScalarType::Half, at::ScalarType::BFloat16, x.scalar_type(), "relu2", ([&] {
    relu2_kernel<scalar_t><<<(x.numel() + 1023) / 1024, 1024>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
  }));
  return y;
}

template <typename scalar_t>
__global__ void rows_kernel(const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> x,
                            const torch::PackedTensorAccessor32<scalar_t, 1, torch::RestrictPtrTraits> s,
                            torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> y) {
  int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < x.size(1)) y[blockIdx.y][c] = x[blockIdx.y][c] * s[blockIdx.y];
}
torch::Tensor scale_rows(torch::Tensor x, torch::Tensor s) {
  auto y = torch::empty({x.size(0), x.size(1)}, x.options());
  dim3 blocks((x.size(1) + 255) / 256, x.size(0));
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scale_rows", [&] {
    rows_kernel<scalar_t><<<blocks, 256>>>(x.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                           s.packed_accessor32<scalar_t, 1, torch::RestrictPtrTraits>(),
                                           y.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
  });
  return y;
}

__global__ void add_kernel(const float4* a, const float4* b, float4* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = make_float4(a[i].x + b[i].x, a[i].y + b[i].y, a[i].z + b[i].z, a[i].w + b[i].w);
}
torch::Tensor add(torch::Tensor a, torch::Tensor b) {
  CHECK_INPUT(a);
  CHECK_INPUT(b);
  const at::cuda::OptionalCUDAGuard guard(device_of(a));
  auto c = torch::empty_like(a);
  int n = a.numel() / 4;
  cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  add_kernel<<<(n + 255) / 256, 256, 0, stream>>>(reinterpret_cast<const float4*>(a.data_ptr<float>()),
      reinterpret_cast<const float4*>(b.data_ptr<float>()), reinterpret_cast<float4*>(c.data_ptr<float>()), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  AT_CUDA_CHECK(cudaPeekAtLastError());
  return c;
}

namespace cg = cooperative_groups;
__global__ void moments_kernel(const float* x, float* mean, float* square, int columns) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  float sum = 0, squares = 0;
  for (int i = threadIdx.x; i < columns; i += 32) {
    float v = x[blockIdx.x * columns + i];
    sum += v;
    squares += v * v;
  }
  sum = cg::reduce(warp, sum, cg::plus<float>());
  squares = cg::reduce(warp, squares, cg::plus<float>());
  if (warp.thread_rank() == 0) { mean[blockIdx.x] = sum / columns; square[blockIdx.x] = rsqrtf(squares / columns + 1e-5f); }
}
std::vector<torch::Tensor> moments(torch::Tensor x) {
  auto options = torch::TensorOptions().dtype(torch::kFloat32).device(torch::kCUDA);
  torch::Tensor mean = torch::empty({x.size(0)}, options), square = torch::zeros({x.size(0)}, options);
  moments_kernel<<<x.size(0), 32>>>(x.data_ptr<float>(), mean.data_ptr<float>(), square.data_ptr<float>(), x.size(1));
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  return {mean, square};
}

__global__ void bias_kernel(const float* x, const float* b, float* y, int n, int columns, float slope) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i] + (b ? b[i % columns] : 0.f);
  y[i] = v > 0 ? v : expf(v) * slope;
}
torch::Tensor bias_relu(torch::Tensor x, c10::optional<torch::Tensor> bias, double slope) {
  auto source = x.contiguous();
  auto y = torch::empty_like(source);
  const float* b = bias.has_value() ? bias.value().data_ptr<float>() : nullptr;
  int n = source.numel();
  bias_kernel<<<(n + 255) / 256, 256>>>(source.data_ptr<float>(), b, y.data_ptr<float>(), n, (int)x.size(-1), (float)slope);
  return y;
}

__global__ void doubled_kernel(const __half2* x, __half2* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __hadd2(x[i], x[i]);
}
torch::Tensor doubled(torch::Tensor x) {
  TORCH_CHECK(x.dtype() == torch::kFloat16, "doubled: half is expected, got ", x.scalar_type());
  auto y = torch::empty_like(x);
  int n = x.numel() / 2;
  doubled_kernel<<<(n + 255) / 256, 256>>>(reinterpret_cast<const __half2*>(x.data_ptr<at::Half>()),
                                           reinterpret_cast<__half2*>(y.data_ptr<at::Half>()), n);
  return y;
}

torch::Tensor multiplied(torch::Tensor a, torch::Tensor b) {
  int m = a.size(0), k = a.size(1), n = b.size(1);
  auto c = torch::empty({m, n}, a.options());
  cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  float one = 1.0f, zero = 0.0f;
  auto status = cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, m, k, &one, b.data_ptr<float>(), n, a.data_ptr<float>(), k,
                            &zero, c.data_ptr<float>(), n);
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cublasSgemm failed");
  return c;
}

std::tuple<torch::Tensor, torch::Tensor> made(const torch::Tensor& x, int64_t n, bool flip) {
  at::Tensor a = at::full({n}, 2.0, x.options()), b = at::ones({n, 2}, x.options().dtype(at::kInt));
  if (flip) return std::make_tuple(b, a);
  return {a.view({-1, 1}), b.reshape({2, n}).contiguous()};
}

template <typename scalar_t>
__global__ void max_kernel(const scalar_t* x, scalar_t* y, int columns) {
  scalar_t best = std::numeric_limits<scalar_t>::lowest();
  for (int i = 0; i < columns; i++) best = x[blockIdx.x * columns + i] > best ? x[blockIdx.x * columns + i] : best;
  y[blockIdx.x] = best;
}
torch::Tensor row_max(torch::Tensor x) {
  auto y = torch::empty(x.size(0), x.options());
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "row_max", [&] {
    max_kernel<scalar_t><<<x.size(0), 1>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.size(1));
  });
  return y;
}

__global__ void tiles_kernel(const half* a, const half* b, float* c, int columns, int depth) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  for (int i = 0; i < depth; i += 16) {
    wmma::load_matrix_sync(fa, a + blockIdx.y * 16 * depth + i, depth);
    wmma::load_matrix_sync(fb, b + i * columns + blockIdx.x * 16, columns);
    wmma::mma_sync(fc, fa, fb, fc);
  }
  wmma::store_matrix_sync(c + blockIdx.y * 16 * columns + blockIdx.x * 16, fc, columns, wmma::mem_row_major);
}
torch::Tensor tiles(torch::Tensor a, torch::Tensor b) {
  auto x = a.to(torch::kHalf), y = b.to(torch::kHalf);
  auto c = torch::empty({a.size(0), b.size(1)}, torch::dtype(torch::kFloat32).device(torch::kCUDA));
  dim3 grid(b.size(1) / 16, a.size(0) / 16);
  tiles_kernel<<<grid, 32>>>((const half*)x.data_ptr<at::Half>(), (const half*)y.data_ptr<at::Half>(), c.data_ptr<float>(),
                             b.size(1), a.size(1));
  return c;
}

void too_many_threads(torch::Tensor x) {
  relu2_kernel<float><<<1, 4096>>>(x.data_ptr<float>(), x.data_ptr<float>(), 0);
  C10_CUDA_CHECK(cudaGetLastError());
}
"""
CUDA_CALLS = [
    "m.relu2(x)", "m.relu2(x.double())", "m.relu2(x.half())", "m.relu2(x.bfloat16())", "m.relu2(x.int())",
    "m.scale_rows(x, x[:, 0].contiguous())", "m.scale_rows(x.t(), x[0])", "m.add(x, x)",
    "m.add(a=x, b=x.t())", "m.add(x.cpu(), x)", "m.add(x.half(), x)", "on_another_stream(m.add, x, x)", "m.moments(x)",
    "m.bias_relu(x)", "m.bias_relu(x.t(), bias=x[0], slope=0.2)", "m.doubled(x.half())", "m.doubled(x)",
    "m.multiplied(x, x)", "m.made(x, 6, True)", "m.made(x, 6, flip=False)", "m.made(x, 6, False)", "m.row_max(x)",
    "m.row_max(x.bfloat16())", "m.row_max((x * 100).long())", "m.tiles(x, x)", "m.too_many_threads(x)", "m.relu2(x)",
]  # fmt: skip


def build(place: Path, device: str, kind: str) -> Any:
    """Builds the sources for ``device`` below ``place`` and returns the module. ``kind`` says which headers are used:
    "stand-ins" or "torch"."""
    import torch.utils.cpp_extension as extensions

    os.environ["TORCH_EXTENSIONS_DIR"] = str(place / "extensions")
    extensions.CUDA_HOME = os.environ.get("CUDA_HOME")  # type: ignore[attr-defined]
    cpp, cuda = (CPU, None) if device == "cpu" else (CUDA_DECLARATIONS, CUDA)
    if kind == "stand-ins":
        worker.write_headers(place, stand_ins({"model_new.py": f"load_inline {cpp} {cuda}"}))
        worker.offer(place)
    libraries = ["-lcublas"] if cuda else []
    return extensions.load_inline(f"styles_{device}", cpp, cuda, extra_cuda_cflags=["-O3"], extra_ldflags=libraries)


def answers(m: Any, device: str) -> dict[str, Any]:
    """Calls the functions of the module ``m``. Returns call -> result: descriptions and digests of tensors, or the type
    and the first line of an error."""
    torch.manual_seed(0)

    def on_another_stream(function: Any, *arguments: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            y = function(*arguments)
        torch.cuda.synchronize()
        return y

    names = {"m": m, "x": torch.randn(64, 64, device=device), "torch": torch, "on_another_stream": on_another_stream}
    said: dict[str, Any] = {}
    for number, call in enumerate(CPU_CALLS if device == "cpu" else CUDA_CALLS):
        print(call, file=sys.stderr, flush=True)  # names the call in which the process dies
        try:
            said[f"{number} {call}"] = _told(eval(call, names))
        except Exception as error:
            said[f"{number} {call}"] = [type(error).__name__, str(error).split("\n")[0]]
    return said


def _told(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_told, value)]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
        what = [str(value.dtype), str(value.device), list(value.shape), list(value.stride())]
        return [*what, type(value).__name__, hashlib.sha256(content).hexdigest()]
    return repr(value)


if __name__ == "__main__":
    folder, device, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("build", file=sys.stderr, flush=True)
    module = build(folder, device, kind)
    print(json.dumps({"file": module.__file__, "answers": answers(module, device)}))
