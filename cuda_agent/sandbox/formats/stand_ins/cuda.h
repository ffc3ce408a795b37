// Stands in for torch's headers of the CUDA runtime: streams, guards and checks (see types.h).
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include "types.h"

namespace stand_in __attribute__((visibility("hidden"))) {
inline void checked(cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  Object kind = torch_attribute("AcceleratorError");
  Object raised = Call(text_of("CUDA error: ", cudaGetErrorString(error))).of(kind);
  if (PyObject_SetAttrString(raised.get(), "error_code", to_python(static_cast<int>(error)).get()) == 0)
    PyErr_SetObject(kind.get(), raised.get());
  throw PythonError{};
}
inline int current_device() {
  int device = 0;
  checked(cudaGetDevice(&device));
  return device;
}
class CUDAStream {
 public:
  explicit CUDAStream(int device) {
    Object read = torch_attribute("_C").attribute("_cuda_getCurrentRawStream");
    stream_ = reinterpret_cast<cudaStream_t>(integer_of(Call(device).of(read)));
  }
  cudaStream_t stream() const { return stream_; }
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { checked(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_;
};
inline CUDAStream getCurrentCUDAStream(int device = -1) { return CUDAStream(device < 0 ? current_device() : device); }
inline cublasHandle_t getCurrentCUDABlasHandle() {
  Object read = torch_attribute("cuda").attribute("current_blas_handle");
  return reinterpret_cast<cublasHandle_t>(integer_of(Call().of(read)));
}
struct CUDAGuard {
  int before = current_device();
  explicit CUDAGuard(int device) { set(device); }
  explicit CUDAGuard(Device device) { set(device.index()); }
  CUDAGuard(const CUDAGuard&) = delete;
  ~CUDAGuard() { cudaSetDevice(before); }
  void set(int device) { if (device >= 0 && device != current_device()) checked(cudaSetDevice(device)); }
};
struct OptionalCUDAGuard : CUDAGuard {
  OptionalCUDAGuard() : CUDAGuard(-1) {}
  explicit OptionalCUDAGuard(std::optional<Device> device) : CUDAGuard(device ? device->index() : -1) {}
};
inline const cudaDeviceProp* getCurrentDeviceProperties() {
  static cudaDeviceProp properties = [] {
    cudaDeviceProp found;
    checked(cudaGetDeviceProperties(&found, current_device()));
    return found;
  }();
  return &properties;
}
}  // namespace stand_in

namespace c10::cuda {
using stand_in::CUDAGuard;
using stand_in::CUDAStream;
using stand_in::OptionalCUDAGuard;
using stand_in::getCurrentCUDAStream;
inline int current_device() { return stand_in::current_device(); }
}  // namespace c10::cuda
namespace at::cuda {
using namespace c10::cuda;
using stand_in::getCurrentCUDABlasHandle;
using stand_in::getCurrentDeviceProperties;
}  // namespace at::cuda

#define C10_CUDA_CHECK(call) stand_in::checked(call)
#define AT_CUDA_CHECK(call) stand_in::checked(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() stand_in::checked(cudaGetLastError())
#define TORCH_CUDABLAS_CHECK(call)                                                                          \
  do {                                                                                                      \
    cublasStatus_t stand_in_status = call;                                                                  \
    TORCH_CHECK(stand_in_status == CUBLAS_STATUS_SUCCESS, "CUDA error: ", cublasGetStatusName(stand_in_status), \
                " when calling `" #call "`");                                                               \
  } while (0)
