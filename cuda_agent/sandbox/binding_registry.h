// What a work folder's C++ sees of tensors on the CPU, and how its functions get into the Python module cuda_extension:
//
//   #include "binding_registry.h"
//   void relu(const float* x, float* y, long n);             // kernels/relu.cpp
//   static Tensor relu_forward(Tensor x) {                   // kernels/relu_binding.cpp
//     check(x.dtype() == Float32 && x.is_contiguous(), "relu: a contiguous float32 tensor is expected");
//     Tensor y = empty_like(x);
//     relu(x.data<float>(), y.data<float>(), x.numel());
//     return y;
//   }
//   REGISTER_BINDING(relu_forward, relu_forward);            // cuda_extension.relu_forward(x)
//
// Arguments: Tensor, double, float, long, int, bool.  Results: Tensor, Tensors, void.  There are no torch headers here:
// they would take most of a minute to compile.  Memory belongs to torch; this header only looks at it.
#pragma once
#include <cstddef>
#include <cstring>

enum DType : int { Float32, Float64, Float16, BFloat16, Int64, Int32, Int16, Int8, UInt8, Bool };

struct Failure {
  const char* message;
};
inline void check(bool condition, const char* message) {
  if (!condition) throw Failure{message};
}

namespace binding {
constexpr int kMostDims = 8;
struct Value {  // mirrored by binding.py
  long kind;    // 0 nothing, 1 tensor, 2 integer, 3 floating point
  long integer;
  double number;
  void* data;
  long dims, dtype, handle;
  long sizes[kMostDims], strides[kMostDims];
};
typedef void (*Allocate)(Value*);  // fills data and handle of a tensor with these sizes and this dtype
inline Allocate allocate = nullptr;
}  // namespace binding

class Tensor {
 public:
  Tensor() : value_() {}
  explicit Tensor(const binding::Value& value) : value_(value) {}
  template <class T>
  T* data() const { return static_cast<T*>(value_.data); }
  long dim() const { return value_.dims; }
  long size(long i) const { return value_.sizes[i < 0 ? i + value_.dims : i]; }
  long stride(long i) const { return value_.strides[i < 0 ? i + value_.dims : i]; }
  DType dtype() const { return static_cast<DType>(value_.dtype); }
  long numel() const {
    long count = 1;
    for (long i = 0; i < value_.dims; i++) count *= value_.sizes[i];
    return count;
  }
  bool is_contiguous() const {
    long expected = 1;
    for (long i = value_.dims - 1; i >= 0; i--) {
      if (value_.sizes[i] != 1 && value_.strides[i] != expected) return false;
      expected *= value_.sizes[i];
    }
    return true;
  }
  const binding::Value& value() const { return value_; }

 private:
  binding::Value value_;
};

struct Tensors {  // several results
  Tensor items[8];
  long count = 0;
  void add(const Tensor& tensor) {
    check(count < 8, "more than 8 results");
    items[count++] = tensor;
  }
};

// Uninitialised, contiguous.
inline Tensor empty(const long* sizes, long dims, DType dtype = Float32) {
  check(dims >= 0 && dims <= binding::kMostDims, "a tensor of more than 8 dimensions");
  binding::Value value = {};
  value.kind = 1;
  value.dims = dims;
  value.dtype = dtype;
  long stride = 1;
  for (long i = dims - 1; i >= 0; i--) {
    value.sizes[i] = sizes[i];
    value.strides[i] = stride;
    stride *= sizes[i];
  }
  binding::allocate(&value);
  check(value.data != nullptr || stride == 0, "out of memory");
  return Tensor(value);
}
template <int N>
Tensor empty(const long (&sizes)[N], DType dtype = Float32) { return empty(sizes, N, dtype); }
inline Tensor empty_like(const Tensor& other) { return empty(other.value().sizes, other.dim(), other.dtype()); }

namespace binding {
template <class T>
struct Read {  // integers and booleans
  static T from(const Value& v) {
    check(v.kind == 2, "an integer is expected");
    return static_cast<T>(v.integer);
  }
};
template <>
struct Read<double> {
  static double from(const Value& v) {
    check(v.kind == 2 || v.kind == 3, "a number is expected");
    return v.kind == 3 ? v.number : static_cast<double>(v.integer);
  }
};
template <>
struct Read<float> {
  static float from(const Value& v) { return static_cast<float>(Read<double>::from(v)); }
};
template <>
struct Read<Tensor> {
  static Tensor from(const Value& v) {
    check(v.kind == 1, "a tensor is expected");
    return Tensor(v);
  }
};
template <class T>
struct Plain { typedef T type; };
template <class T>
struct Plain<const T&> { typedef T type; };
template <class T>
struct Plain<T&> { typedef T type; };
template <class T>
struct Plain<const T> { typedef T type; };

inline long write(const Tensor& result, Value* out) {
  *out = result.value();
  return 1;
}
inline long write(const Tensors& results, Value* out) {
  for (long i = 0; i < results.count; i++) out[i] = results.items[i].value();
  return results.count;
}

template <size_t... I>
struct Sequence {};
template <size_t N, size_t... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I>
struct Count<0, I...> { typedef Sequence<I...> type; };

template <class R, class... A, size_t... I>
long apply(R (*function)(A...), const Value* arguments, Value* results, Sequence<I...>) {
  return write(function(Read<typename Plain<A>::type>::from(arguments[I])...), results);
}
template <class... A, size_t... I>
long apply(void (*function)(A...), const Value* arguments, Value*, Sequence<I...>) {
  function(Read<typename Plain<A>::type>::from(arguments[I])...);
  return 0;
}

// Results written, or -1 with a message.
template <class R, class... A>
long call(R (*function)(A...), Allocate allocator, const Value* arguments, long count, Value* results, char* message) {
  try {
    allocate = allocator;
    check(count == static_cast<long>(sizeof...(A)), "wrong number of arguments");
    return apply(function, arguments, results, typename Count<sizeof...(A)>::type());
  } catch (const Failure& failure) {
    strncpy(message, failure.message, 255);
    return -1;
  }
}
}  // namespace binding

#define REGISTER_BINDING(name, function)                                                                       \
  extern "C" __attribute__((visibility("default"))) long cuda_extension_##name(                                \
      binding::Allocate allocator, const binding::Value* arguments, long count, binding::Value* results,       \
      char* message) {                                                                                         \
    return binding::call(function, allocator, arguments, count, results, message);                             \
  }                                                                                                            \
  static_assert(true, "")
