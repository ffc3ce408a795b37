// The part of torch's C++ interface that bindings of the published work folder use, over binding_registry.h.  It stands in
// for <torch/types.h>, <torch/extension.h>, <ATen/cuda/CUDAContext.h> and their like, which take most of a minute to
// compile.  There are no operators here: computing is the kernels' part.
#pragma once
#include <initializer_list>
#include <optional>
#include <sstream>
#include <tuple>
#include <vector>

#include "binding_registry.h"
#ifdef CUDA_EXTENSION_ON_CUDA
#include <cuda_runtime_api.h>
#endif

namespace binding {
template <class... Parts>
[[noreturn]] void fail(const char* condition, const Parts&... parts) {
  std::ostringstream text;
  if constexpr (sizeof...(Parts) == 0)
    text << "the check failed: " << condition;
  else
    (text << ... << parts);
  static thread_local char message[256];
  strncpy(message, text.str().c_str(), 255);
  throw Failure{message};
}

template <>
struct Read<std::optional<Tensor>> {
  static std::optional<Tensor> from(const Value& v) {
    if (v.kind == 0) return std::nullopt;
    return Read<Tensor>::from(v);
  }
};
inline long write(const std::vector<Tensor>& results, Value* out) {
  check(results.size() <= 8, "more than 8 results");
  for (size_t i = 0; i < results.size(); i++) out[i] = results[i].value();
  return static_cast<long>(results.size());
}
template <class... T>
long write(const std::tuple<T...>& results, Value* out) {
  static_assert(sizeof...(T) <= 8, "more than 8 results");
  long count = 0;
  std::apply([&](const auto&... one) { ((out[count++] = one.value()), ...); }, results);
  return count;
}
}  // namespace binding

namespace c10 {
struct Half {
  unsigned short x;
};
struct BFloat16 {
  unsigned short x;
};
template <class T>
using optional = std::optional<T>;
using std::nullopt;
using Device = binding::Device;
using TensorOptions = binding::Options;
struct IntArrayRef : binding::Extents {
  IntArrayRef(const binding::Extents& other) : Extents(other) {}
  IntArrayRef(std::initializer_list<long> list) : Extents{list.begin(), static_cast<long>(list.size())} {}
  IntArrayRef(const std::vector<int64_t>& list) : Extents{list.data(), static_cast<long>(list.size())} {}
};
enum DeviceType { CPU = 0, CUDA = 1 };
struct ScalarType {
  static constexpr DType Float = Float32, Double = Float64, Half = Float16, BFloat16 = ::BFloat16, Long = Int64,
                         Int = Int32, Short = Int16, Char = Int8, Byte = UInt8, Bool = ::Bool;
  DType type;
  ScalarType(DType given) : type(given) {}
  operator DType() const { return type; }
};
}  // namespace c10

namespace at {
using namespace c10;
using ::Tensor;
constexpr DType kFloat = Float32, kFloat32 = Float32, kDouble = Float64, kFloat64 = Float64, kHalf = Float16,
                kFloat16 = Float16, kBFloat16 = ::BFloat16, kLong = Int64, kInt64 = Int64, kInt = Int32, kInt32 = Int32,
                kShort = Int16, kInt16 = Int16, kChar = Int8, kInt8 = Int8, kByte = UInt8, kUInt8 = UInt8, kBool = ::Bool;
constexpr int kCPU = 0, kCUDA = 1;

inline Tensor empty(const IntArrayRef& sizes, TensorOptions options = {}) {
  return ::empty(sizes.data(), sizes.size(), options.type);
}
inline Tensor empty(const IntArrayRef& sizes, DType type) { return ::empty(sizes.data(), sizes.size(), type); }
inline Tensor empty_like(const Tensor& other) { return ::empty_like(other); }
inline Tensor empty_like(const Tensor& other, TensorOptions options) {
  return ::empty(other.sizes().data(), other.dim(), options.type);
}
inline Tensor cleared(const Tensor& tensor) {
#ifdef CUDA_EXTENSION_ON_CUDA
  cudaMemsetAsync(tensor.data_ptr(), 0, tensor.nbytes(), nullptr);
#else
  memset(tensor.data_ptr(), 0, tensor.nbytes());
#endif
  return tensor;
}
inline Tensor zeros(const IntArrayRef& sizes, TensorOptions options = {}) { return cleared(empty(sizes, options)); }
inline Tensor zeros_like(const Tensor& other) { return cleared(::empty_like(other)); }
}  // namespace at

namespace torch {
using namespace at;
inline at::TensorOptions dtype(DType type) { return {type}; }
inline at::TensorOptions TensorOptionsOf() { return {}; }
}  // namespace torch

namespace py = pybind11;

#define TORCH_CHECK(condition, ...) \
  do {                              \
    if (!(condition)) binding::fail(#condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (0)
#define AT_ASSERTM TORCH_CHECK
#define TORCH_INTERNAL_ASSERT TORCH_CHECK

#ifdef CUDA_EXTENSION_ON_CUDA
namespace c10::cuda {
struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }  // the default stream, which is the one that is timed
  operator cudaStream_t() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream(int = 0) { return {}; }
struct CUDAGuard {
  template <class Anything>
  explicit CUDAGuard(Anything) {}
};
using OptionalCUDAGuard = CUDAGuard;
inline void checked(cudaError_t error) {
  if (error != cudaSuccess) binding::fail("", "CUDA error: ", cudaGetErrorString(error));
}
}  // namespace c10::cuda
namespace at::cuda {
using namespace c10::cuda;
}
#define C10_CUDA_CHECK(call) c10::cuda::checked(call)
#define AT_CUDA_CHECK(call) c10::cuda::checked(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() c10::cuda::checked(cudaGetLastError())
#ifdef CUDA_EXTENSION_USES_CUBLAS
#include <cublas_v2.h>
namespace at::cuda {
inline cublasHandle_t getCurrentCUDABlasHandle() {
  static cublasHandle_t handle = [] {
    cublasHandle_t made = nullptr;
    check(cublasCreate(&made) == CUBLAS_STATUS_SUCCESS, "cublasCreate failed");
    return made;
  }();
  return handle;
}
}  // namespace at::cuda
#endif
#endif
