// What a work folder's C++ sees of tensors, and how its functions get into the Python module cuda_extension:
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
// The published form is understood too: a function that takes a pybind11::module& and defines others in it, with torch's
// names for tensors (torch_surface.h, which stands in for torch's headers).  Real torch headers would take most of a
// minute to compile.
//
// Arguments: Tensor, double, float, long, int, bool.  Results: Tensor, Tensors, void.  Memory belongs to torch; this
// header only looks at it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

enum DType : int { Float32, Float64, Float16, BFloat16, Int64, Int32, Int16, Int8, UInt8, Bool };

struct Failure {
  const char* message;
};
inline void check(bool condition, const char* message) {
  if (!condition) throw Failure{message};
}

namespace binding {
constexpr int kMostDims = 8, kMostArguments = 32;
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

struct Extents {  // sizes or strides
  const long* data_;
  long count;
  long size() const { return count; }
  long operator[](long i) const { return data_[i]; }
  long front() const { return data_[0]; }
  long back() const { return data_[count - 1]; }
  const long* data() const { return data_; }
  const long* begin() const { return data_; }
  const long* end() const { return data_ + count; }
  friend bool operator==(const Extents& a, const Extents& b) {
    if (a.count != b.count) return false;
    for (long i = 0; i < a.count; i++)
      if (a[i] != b[i]) return false;
    return true;
  }
  friend bool operator!=(const Extents& a, const Extents& b) { return !(a == b); }
};

struct Device {
  bool cuda;
  bool is_cuda() const { return cuda; }
  bool is_cpu() const { return !cuda; }
  int index() const { return 0; }
  int type() const { return cuda; }  // torch::kCUDA is 1
  friend bool operator==(Device a, Device b) { return a.cuda == b.cuda; }
  friend bool operator!=(Device a, Device b) { return a.cuda != b.cuda; }
};
#ifdef CUDA_EXTENSION_ON_CUDA
constexpr Device kHere{true};
#else
constexpr Device kHere{false};
#endif

struct Options {
  DType type = Float32;
  Options dtype(DType other) const { return {other}; }
  template <class... Anything>
  Options device(Anything...) const { return *this; }
  Options requires_grad(bool) const { return *this; }
  template <class Anything>
  Options layout(Anything) const { return *this; }
};
}  // namespace binding

class Tensor {
 public:
  Tensor() : value_() {}
  explicit Tensor(const binding::Value& value) : value_(value) {}
  template <class T>
  T* data() const { return static_cast<T*>(value_.data); }
  template <class T>
  T* data_ptr() const { return static_cast<T*>(value_.data); }
  template <class T>
  T* mutable_data_ptr() const { return static_cast<T*>(value_.data); }
  template <class T>
  const T* const_data_ptr() const { return static_cast<const T*>(value_.data); }
  void* data_ptr() const { return value_.data; }
  bool defined() const { return value_.kind == 1; }
  long dim() const { return value_.dims; }
  long ndimension() const { return value_.dims; }
  long size(long i) const { return value_.sizes[i < 0 ? i + value_.dims : i]; }
  long stride(long i) const { return value_.strides[i < 0 ? i + value_.dims : i]; }
  binding::Extents sizes() const { return {value_.sizes, value_.dims}; }
  binding::Extents strides() const { return {value_.strides, value_.dims}; }
  DType dtype() const { return static_cast<DType>(value_.dtype); }
  DType scalar_type() const { return dtype(); }
  long element_size() const {
    constexpr long sizes[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};
    return sizes[value_.dtype];
  }
  long itemsize() const { return element_size(); }
  long nbytes() const { return numel() * element_size(); }
  binding::Device device() const { return binding::kHere; }
  bool is_cuda() const { return binding::kHere.cuda; }
  bool is_cpu() const { return !binding::kHere.cuda; }
  int get_device() const { return 0; }
  binding::Options options() const { return {dtype()}; }
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
  Tensor contiguous() const {
    check(is_contiguous(), "contiguous() of a tensor that is not contiguous: copy it in a kernel, or in model_new.py");
    return *this;
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
  } catch (...) {
    strncpy(message, "the binding threw an exception", 255);
  }
  return -1;
}

struct Argument {  // of a function that was defined with names and defaults
  const char* name;
  Value standard;  // kind 0: none
};

struct Entry {  // a function of cuda_extension; mirrored by binding.py
  const char* name;
  long (*call)(void* function, Allocate, const Value*, long, Value*, char*);
  void* function;
  long count, named;
  Argument arguments[kMostArguments];
  Entry* next;
};

__attribute__((visibility("hidden"))) inline Entry*& entries() {
  static Entry* first = nullptr;
  return first;
}

template <class R, class... A>
Entry* add(const char* name, R (*function)(A...)) {
  static_assert(sizeof...(A) <= kMostArguments, "too many arguments");
  auto erased = [](void* given, Allocate allocator, const Value* arguments, long count, Value* results, char* message) {
    return call(reinterpret_cast<R (*)(A...)>(given), allocator, arguments, count, results, message);
  };
  Entry* entry = new Entry();
  entry->name = name;
  entry->call = erased;
  entry->function = reinterpret_cast<void*>(function);
  entry->count = sizeof...(A);
  entry->next = entries();
  return entries() = entry;
}
}  // namespace binding

namespace pybind11 {
template <class T>
struct arg_v {
  const char* name;
  T value;
};
struct arg {
  const char* name;
  explicit arg(const char* given) : name(given) {}
  template <class T>
  arg_v<T> operator=(T value) const { return {name, value}; }
};

class module_ {
 public:
  template <class F, class... Extra>
  module_& def(const char* name, F function, Extra... extra) {
    binding::Entry* entry = binding::add(name, pointer(function));
    (describe(entry, extra), ...);
    return *this;
  }
  const char*& doc() {
    static const char* text;
    return text;
  }

 private:
  template <class R, class... A>
  static auto pointer(R (*function)(A...)) { return function; }
  template <class F>
  static auto pointer(F function) -> decltype(+function) { return +function; }  // a lambda without captures
  static binding::Argument* named(binding::Entry* entry, const char* name) {
    binding::Argument* argument = &entry->arguments[entry->named++];
    argument->name = name;
    return argument;
  }
  static void describe(binding::Entry* entry, const arg& argument) { named(entry, argument.name); }
  template <class T>
  static void describe(binding::Entry* entry, const arg_v<T>& argument) {
    binding::Value* value = &named(entry, argument.name)->standard;
    if (std::is_floating_point<T>::value) {
      value->kind = 3;
      value->number = static_cast<double>(argument.value);
    } else {
      value->kind = 2;
      value->integer = static_cast<long>(argument.value);
    }
  }
  static void describe(binding::Entry*, const char*) {}  // a description
};
using module = module_;
}  // namespace pybind11

namespace binding {
struct Registration {
  template <class R, class... A>
  Registration(const char* name, R (*function)(A...)) { add(name, function); }
  Registration(const char*, void (*define)(pybind11::module_&)) {
    pybind11::module_ module;
    define(module);
  }
};
}  // namespace binding

extern "C" __attribute__((visibility("default"), weak)) const binding::Entry* cuda_extension_entries() {
  return binding::entries();
}

#define REGISTER_BINDING(name, function) static const binding::Registration binding_registration_##name(#name, function)

