// Stands in for torch's headers of tensors in the sources of load_inline: compiling these takes a second, torch's own most
// of a minute.  A tensor here is a Python object whose address, shape and dtype were read once; an allocation or a view
// is a call of torch's Python function.  Operators that compute are missing: a source that uses one does not compile
// here, and is built with torch's headers.  Element types and accessors are torch's own (torch/headeronly).
#pragma once
#include <ATen/dlpack.h>
#include <Python.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/MemoryFormat.h>
#include <torch/headeronly/core/TensorAccessor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace c10 {
enum class ScalarType : int8_t { Byte, Char, Short, Int, Long, Half, Float, Double, Bool = 11, BFloat16 = 15, Undefined = 99 };
}

namespace stand_in __attribute__((visibility("hidden"))) {
using c10::BFloat16;
using c10::DeviceType;
using c10::Half;
using c10::MemoryFormat;
using c10::ScalarType;

// ---- errors ----
struct PythonError {};  // a Python exception is set
struct Error : std::runtime_error {
  PyObject* type;
  Error(PyObject* kind, const std::string& message) : std::runtime_error(message), type(kind) {}
};
template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// ---- Python objects ----
class Object {  // owns a reference
 public:
  Object() = default;
  explicit Object(PyObject* owned) : object_(owned) {
    if (!owned) throw PythonError{};
  }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object(const Object& other) : object_(other.object_) { Py_XINCREF(object_); }
  Object& operator=(Object other) {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() {
    if (object_ && Py_IsInitialized()) Py_DECREF(object_);
  }
  static Object borrowed(PyObject* object) {
    Py_INCREF(object);
    return Object(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  Object attribute(const char* name) const { return Object(PyObject_GetAttrString(object_, name)); }

 private:
  PyObject* object_ = nullptr;
};
inline Object torch_attribute(const char* name) {
  static PyObject* module = Object(PyImport_ImportModule("torch")).release();
  return Object(PyObject_GetAttrString(module, name));
}
inline long integer_of(const Object& object) {
  long value = PyLong_AsLong(object.get());
  if (value == -1 && PyErr_Occurred()) throw PythonError{};
  return value;
}

// ---- element types ----
struct Kind {
  ScalarType type;
  const char *name, *python;
  int bytes;
  DLDataTypeCode code;
};
constexpr Kind kKinds[] = {
    {ScalarType::Float, "Float", "float32", 4, kDLFloat},      {ScalarType::Half, "Half", "float16", 2, kDLFloat},
    {ScalarType::BFloat16, "BFloat16", "bfloat16", 2, kDLBfloat}, {ScalarType::Double, "Double", "float64", 8, kDLFloat},
    {ScalarType::Long, "Long", "int64", 8, kDLInt},            {ScalarType::Int, "Int", "int32", 4, kDLInt},
    {ScalarType::Short, "Short", "int16", 2, kDLInt},          {ScalarType::Char, "Char", "int8", 1, kDLInt},
    {ScalarType::Byte, "Byte", "uint8", 1, kDLUInt},           {ScalarType::Bool, "Bool", "bool", 1, kDLBool}};
constexpr int kCount = sizeof(kKinds) / sizeof(Kind);
inline int place_of(ScalarType type) {
  for (int i = 0; i < kCount; i++)
    if (kKinds[i].type == type) return i;
  throw Error(PyExc_RuntimeError, "a dtype without a name");
}
inline PyObject* dtype_object(int place) {
  static PyObject* objects[kCount];
  if (!objects[place]) objects[place] = torch_attribute(kKinds[place].python).release();
  return objects[place];
}
inline const char* toString(ScalarType type) { return type == ScalarType::Undefined ? "Undefined" : kKinds[place_of(type)].name; }
template <ScalarType type> struct CppTypeOf;
template <class T> struct ScalarTypeOf;
#define STAND_IN_TYPE(cpp, name)                                          \
  template <> struct CppTypeOf<ScalarType::name> { typedef cpp type; };    \
  template <> struct ScalarTypeOf<cpp> { static constexpr ScalarType value = ScalarType::name; };
STAND_IN_TYPE(float, Float) STAND_IN_TYPE(double, Double) STAND_IN_TYPE(Half, Half) STAND_IN_TYPE(BFloat16, BFloat16)
STAND_IN_TYPE(int64_t, Long) STAND_IN_TYPE(int32_t, Int) STAND_IN_TYPE(int16_t, Short) STAND_IN_TYPE(int8_t, Char)
STAND_IN_TYPE(uint8_t, Byte) STAND_IN_TYPE(bool, Bool)
#undef STAND_IN_TYPE

// ---- shapes, devices, options ----
class IntArrayRef {
 public:
  IntArrayRef() = default;
  IntArrayRef(const int64_t* data, size_t count) : data_(data), count_(count) {}
  IntArrayRef(const std::initializer_list<int64_t>& list) : data_(list.begin()), count_(list.size()) {}
  IntArrayRef(const std::vector<int64_t>& list) : data_(list.data()), count_(list.size()) {}
  template <size_t N>
  IntArrayRef(const std::array<int64_t, N>& list) : data_(list.data()), count_(N) {}
  template <size_t N>
  IntArrayRef(const int64_t (&list)[N]) : data_(list), count_(N) {}
  IntArrayRef(const int64_t& one) : data_(&one), count_(1) {}
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const int64_t& operator[](size_t i) const { return data_[i]; }
  const int64_t& at(size_t i) const {
    if (i >= count_) throw Error(PyExc_RuntimeError, text_of("ArrayRef: invalid index Index = ", i, "; Length = ", count_));
    return data_[i];
  }
  const int64_t& front() const { return at(0); }
  const int64_t& back() const { return at(count_ - 1); }
  const int64_t* data() const { return data_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + count_; }
  std::vector<int64_t> vec() const { return {begin(), end()}; }
  bool equals(IntArrayRef other) const { return std::equal(begin(), end(), other.begin(), other.end()); }
  friend bool operator==(IntArrayRef a, IntArrayRef b) { return a.equals(b); }
  friend bool operator!=(IntArrayRef a, IntArrayRef b) { return !a.equals(b); }
  friend std::ostream& operator<<(std::ostream& out, IntArrayRef list) {
    out << "[";
    for (size_t i = 0; i < list.size(); i++) out << (i ? ", " : "") << list[i];
    return out << "]";
  }

 private:
  const int64_t* data_ = nullptr;
  size_t count_ = 0;
};

struct Device {
  DeviceType kind;
  int8_t number;
  Device(DeviceType type, int8_t index = -1) : kind(type), number(index) {}
  DeviceType type() const { return kind; }
  int8_t index() const { return number; }
  bool has_index() const { return number != -1; }
  bool is_cuda() const { return kind == DeviceType::CUDA; }
  bool is_cpu() const { return kind == DeviceType::CPU; }
  std::string str() const {
    std::string name = is_cuda() ? "cuda" : is_cpu() ? "cpu" : "meta";
    return number < 0 ? name : name + ":" + std::to_string(number);
  }
  friend bool operator==(Device a, Device b) { return a.kind == b.kind && a.number == b.number; }
  friend bool operator!=(Device a, Device b) { return !(a == b); }
  friend std::ostream& operator<<(std::ostream& out, Device device) { return out << device.str(); }
};
struct Strided {};

struct TensorOptions {
  std::optional<ScalarType> type_;
  std::optional<Device> device_;
  bool grad_ = false;
  TensorOptions() = default;
  TensorOptions(ScalarType type) : type_(type) {}
  TensorOptions(Device device) : device_(device) {}
  TensorOptions(DeviceType device) : device_(device) {}
  TensorOptions dtype(ScalarType type) const { return with([&](auto& o) { o.type_ = type; }); }
  TensorOptions device(Device device) const { return with([&](auto& o) { o.device_ = device; }); }
  TensorOptions device(DeviceType type, int8_t index = -1) const { return device(Device(type, index)); }
  TensorOptions device_index(int8_t index) const { return device(Device(DeviceType::CUDA, index)); }
  TensorOptions requires_grad(bool grad = true) const { return with([&](auto& o) { o.grad_ = grad; }); }
  TensorOptions layout(Strided) const { return *this; }
  ScalarType dtype() const { return type_.value_or(ScalarType::Float); }
  Device device() const { return device_.value_or(Device(DeviceType::CPU)); }

 private:
  template <class F>
  TensorOptions with(F change) const {
    TensorOptions other = *this;
    change(other);
    return other;
  }
};

// ---- from C++ values to Python objects ----
inline Object to_python(bool value) { return Object(PyBool_FromLong(value)); }
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
Object to_python(T value) { return Object(std::is_signed_v<T> ? PyLong_FromLongLong(value) : PyLong_FromUnsignedLongLong(value)); }
template <class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
Object to_python(T value) { return Object(PyFloat_FromDouble(value)); }
inline Object to_python(const std::string& value) { return Object(PyUnicode_FromStringAndSize(value.data(), value.size())); }
inline Object to_python(const char* value) { return Object(PyUnicode_FromString(value)); }
inline Object to_python(ScalarType type) { return Object::borrowed(dtype_object(place_of(type))); }
inline Object to_python(const Object& object) { return object; }
inline Object to_python(Device device) { return to_python(device.str()); }
inline Object to_python(MemoryFormat format) {
  const char* names[] = {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"};
  return torch_attribute(names[static_cast<int>(format)]);
}
inline Object to_python(IntArrayRef list) {
  Object tuple(PyTuple_New(list.size()));
  for (size_t i = 0; i < list.size(); i++) PyTuple_SET_ITEM(tuple.get(), i, to_python(list[i]).release());
  return tuple;
}

class Tensor;
Object to_python(const Tensor& tensor);

// ---- calls of Python functions ----
struct Call {
  Object positional[4], named;
  size_t count = 0;
  template <class... A>
  explicit Call(const A&... arguments) { ((positional[count++] = to_python(arguments)), ...); }
  template <class T>
  Call& with(const char* name, const T& value) {
    if (!named.get()) named = Object(PyDict_New());
    if (PyDict_SetItemString(named.get(), name, to_python(value).get())) throw PythonError{};
    return *this;
  }
  Call& with(const TensorOptions& options, bool device_too) {
    if (options.type_) with("dtype", *options.type_);
    if (options.device_ || device_too) with("device", options.device());
    if (options.grad_) with("requires_grad", true);
    return *this;
  }
  Object of(const Object& function) const {
    if (!PyGILState_Check()) throw std::runtime_error("torch is called outside of Python's thread");
    PyObject* items[4];
    for (size_t i = 0; i < count; i++) items[i] = positional[i].get();
    return Object(PyObject_VectorcallDict(function.get(), items, count, named.get()));
  }
};

// ---- tensors ----
// A Python tensor with its address, shape and dtype, which torch's table of C functions for DLPack gives. They are read
// once, so that threads may use them too.
struct State {
  Object object;
  DLTensor seen;
  ScalarType type = ScalarType::Undefined;
  int64_t numel = 1;

  explicit State(Object given) : object(std::move(given)) {
    static auto* table = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(
        torch_attribute("Tensor").attribute("__dlpack_c_exchange_api__").get(), "dlpack_exchange_api"));
    if (!table) throw PythonError{};
    if (!table->dltensor_from_py_object_no_sync) throw std::runtime_error("torch gives no such function");
    if (table->dltensor_from_py_object_no_sync(object.get(), &seen)) throw PythonError{};
    for (int i = 0; i < seen.ndim; i++) numel *= seen.shape[i];
    for (const Kind& kind : kKinds)
      if (kind.code == seen.dtype.code && kind.bytes * 8 == seen.dtype.bits) type = kind.type;
  }
  Device device() const {
    return seen.device.device_type == kDLCUDA ? Device(DeviceType::CUDA, seen.device.device_id) : Device(DeviceType::CPU);
  }
};

template <size_t N, class Index>
struct BoundsCheck {
  BoundsCheck(Index i) {
    if (i < 0 || i >= static_cast<Index>(N))
      throw Error(PyExc_IndexError, text_of("Index ", i, " is not within bounds of a tensor of dimension ", N));
  }
};
template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits, class Index = int64_t>
using TensorAccessor = torch::headeronly::detail::TensorAccessor<IntArrayRef, T, N, Traits, Index>;
template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits, class Index = int64_t>
using GenericPackedTensorAccessor = torch::headeronly::detail::GenericPackedTensorAccessor<
    TensorAccessor<T, N - 1, Traits, Index>, BoundsCheck<N, Index>, T, N, Traits, Index>;
template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits>
using PackedTensorAccessor32 = GenericPackedTensorAccessor<T, N, Traits, int32_t>;
template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits>
using PackedTensorAccessor64 = GenericPackedTensorAccessor<T, N, Traits, int64_t>;

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(Object object) : state_(std::make_shared<const State>(std::move(object))) {}
  bool defined() const { return state_ != nullptr; }
  PyObject* object() const { return state().object.get(); }

  int64_t dim() const { return state().seen.ndim; }
  int64_t ndimension() const { return dim(); }
  IntArrayRef sizes() const { return {state().seen.shape, static_cast<size_t>(dim())}; }
  IntArrayRef strides() const { return {state().seen.strides, static_cast<size_t>(dim())}; }
  int64_t size(int64_t i) const { return sizes()[wrapped(i)]; }
  int64_t stride(int64_t i) const { return strides()[wrapped(i)]; }
  int64_t numel() const { return state().numel; }
  ScalarType scalar_type() const { return state().type; }
  ScalarType dtype() const { return state().type; }
  int64_t element_size() const { return kKinds[place_of(state().type)].bytes; }
  int64_t itemsize() const { return element_size(); }
  size_t nbytes() const { return numel() * element_size(); }
  Device device() const { return state().device(); }
  bool is_cuda() const { return device().is_cuda(); }
  bool is_cpu() const { return device().is_cpu(); }
  int64_t get_device() const { return device().index(); }
  TensorOptions options() const { return TensorOptions(scalar_type()).device(device()); }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t i = dim() - 1; i >= 0; expected *= sizes()[i--])
      if (sizes()[i] != 1 && strides()[i] != expected) return numel() == 0;
    return true;
  }
  struct Type {  // what the deprecated type() returns: no dtype
    ScalarType type;
    bool cuda;
    ScalarType scalarType() const { return type; }
    bool is_cuda() const { return cuda; }
  };
  Type type() const { return {scalar_type(), is_cuda()}; }

  void* data_ptr() const { return state().seen.data; }
  const void* const_data_ptr() const { return state().seen.data; }
  void* mutable_data_ptr() const { return state().seen.data; }
  template <class T>
  T* data_ptr() const {
    constexpr ScalarType wanted = ScalarTypeOf<std::remove_const_t<T>>::value;
    if (state().type != wanted)
      throw Error(PyExc_RuntimeError, text_of("expected scalar type ", toString(wanted), " but found ", toString(state().type)));
    return static_cast<T*>(state().seen.data);
  }
  template <class T> T* mutable_data_ptr() const { return data_ptr<T>(); }
  template <class T> const T* const_data_ptr() const { return data_ptr<const T>(); }
  template <class T> T* data() const { return data_ptr<T>(); }
  template <class T, size_t N>
  auto accessor() const {
    expect(N);
    return TensorAccessor<T, N>(data_ptr<T>(), sizes().data(), strides().data());
  }
  template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits>
  auto packed_accessor32() const { return packed<T, N, Traits, int32_t>(); }
  template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits>
  auto packed_accessor64() const { return packed<T, N, Traits, int64_t>(); }
  template <class T, size_t N, template <class> class Traits = torch::headeronly::DefaultPtrTraits, class Index = int64_t>
  auto packed_accessor() const { return packed<T, N, Traits, Index>(); }

  Tensor contiguous() const { return is_contiguous() ? *this : method("contiguous"); }
  Tensor contiguous(MemoryFormat format) const { return Tensor(Call().with("memory_format", format).of(bound("contiguous"))); }
  bool is_contiguous(MemoryFormat format) const {
    return PyObject_IsTrue(Call().with("memory_format", format).of(bound("is_contiguous")).get());
  }
  Tensor to(ScalarType type) const { return method("to", type); }
  Tensor to(Device device) const { return method("to", device); }
  Tensor to(DeviceType device) const { return method("to", Device(device)); }
  Tensor to(const TensorOptions& options) const { return Tensor(Call().with(options, false).of(bound("to"))); }
  Tensor toType(ScalarType type) const { return method("to", type); }
  Tensor view(IntArrayRef shape) const { return method("view", shape); }
  Tensor reshape(IntArrayRef shape) const { return method("reshape", shape); }
  Tensor expand(IntArrayRef shape) const { return method("expand", shape); }
  Tensor permute(IntArrayRef order) const { return method("permute", order); }
  Tensor transpose(int64_t a, int64_t b) const { return method("transpose", a, b); }
  Tensor flatten(int64_t from = 0, int64_t to = -1) const { return method("flatten", from, to); }
  Tensor squeeze() const { return method("squeeze"); }
  Tensor squeeze(int64_t i) const { return method("squeeze", i); }
  Tensor unsqueeze(int64_t i) const { return method("unsqueeze", i); }
  Tensor select(int64_t i, int64_t at) const { return method("select", i, at); }
  Tensor narrow(int64_t i, int64_t from, int64_t length) const { return method("narrow", i, from, length); }
  Tensor operator[](int64_t at) const { return select(0, at); }
#define STAND_IN_METHOD(name) Tensor name() const { return method(#name); }
  STAND_IN_METHOD(clone) STAND_IN_METHOD(t) STAND_IN_METHOD(detach) STAND_IN_METHOD(cpu) STAND_IN_METHOD(cuda)
  STAND_IN_METHOD(zero_)
#undef STAND_IN_METHOD
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  Tensor fill_(T value) const { return method("fill_", value); }
  Tensor copy_(const Tensor& other, bool non_blocking = false) const { return method("copy_", other, non_blocking); }
  template <class T>
  T item() const {
    Object value = Call().of(bound("item"));
    double number = PyFloat_AsDouble(value.get());
    if (number == -1 && PyErr_Occurred()) throw PythonError{};
    return std::is_integral_v<T> && PyLong_Check(value.get()) ? static_cast<T>(integer_of(value)) : static_cast<T>(number);
  }

 private:
  const State& state() const {
    if (!state_) throw Error(PyExc_RuntimeError, "a function of an undefined tensor is called");
    return *state_;
  }
  int64_t wrapped(int64_t i) const {
    if (i < -dim() || i >= dim())
      throw Error(PyExc_IndexError, text_of("Dimension out of range (expected to be in range of [", -dim(), ", ", dim() - 1,
                                            "], but got ", i, ")"));
    return i < 0 ? i + dim() : i;
  }
  void expect(int64_t dims) const {
    if (dim() != dims) throw Error(PyExc_RuntimeError, text_of("TensorAccessor expected ", dims, " dims but tensor has ", dim()));
  }
  template <class T, size_t N, template <class> class Traits, class Index>
  auto packed() const {
    expect(N);
    if (sizeof(Index) < 8 && numel() > std::numeric_limits<Index>::max())
      throw Error(PyExc_RuntimeError, "numel needs to be smaller than int32_t max; otherwise, please use packed_accessor64");
    return GenericPackedTensorAccessor<T, N, Traits, Index>(data_ptr<T>(), sizes().data(), strides().data());
  }
  Object bound(const char* name) const { return state().object.attribute(name); }
  template <class... A>
  Tensor method(const char* name, const A&... arguments) const { return Tensor(Call(arguments...).of(bound(name))); }

  std::shared_ptr<const State> state_;
};
inline Object to_python(const Tensor& tensor) { return Object::borrowed(tensor.defined() ? tensor.object() : Py_None); }
}  // namespace stand_in
