// Stands in for <torch/types.h> and its like: functions that make tensors, torch's names for what tensor.h holds, its
// checks, and its dispatch by dtype.
#pragma once
#include "tensor.h"

namespace stand_in __attribute__((visibility("hidden"))) {
// ---- functions that make tensors ----
#define STAND_IN_FACTORY(name)                                                                            \
  inline Tensor name(IntArrayRef shape, const TensorOptions& options = {}) {                               \
    static const Object function = torch_attribute(#name);                                                 \
    return Tensor(Call(shape).with(options, true).of(function));                                           \
  }                                                                                                        \
  inline Tensor name##_like(const Tensor& other, const TensorOptions& options = {}) {                      \
    static const Object function = torch_attribute(#name "_like");                                         \
    return Tensor(Call(other).with(options, false).of(function));                                          \
  }                                                                                                        \
  inline Tensor name##_like(const Tensor& other, const TensorOptions& options, MemoryFormat format) {      \
    Call call = Call(other).with(options, false).with("memory_format", format);                            \
    return Tensor(call.of(torch_attribute(#name "_like")));                                                \
  }
STAND_IN_FACTORY(empty) STAND_IN_FACTORY(zeros) STAND_IN_FACTORY(ones)
#undef STAND_IN_FACTORY
template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
Tensor full(IntArrayRef shape, T value, const TensorOptions& options = {}) {
  return Tensor(Call(shape, value).with(options, true).of(torch_attribute("full")));
}
template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
Tensor full_like(const Tensor& other, T value, const TensorOptions& options = {}) {
  return Tensor(Call(other, value).with(options, false).of(torch_attribute("full_like")));
}
inline Tensor empty_strided(IntArrayRef shape, IntArrayRef strides, const TensorOptions& options = {}) {
  return Tensor(Call(shape, strides).with(options, true).of(torch_attribute("empty_strided")));
}
inline std::optional<Device> device_of(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Device>(tensor.device()) : std::nullopt;
}
inline TensorOptions dtype(ScalarType type) { return TensorOptions(type); }
inline TensorOptions device(Device device) { return TensorOptions(device); }
inline TensorOptions requires_grad(bool grad = true) { return TensorOptions().requires_grad(grad); }
}  // namespace stand_in

namespace c10 {
template <class T>
using optional = std::optional<T>;
using std::make_optional;
using std::nullopt;
using std::nullopt_t;
using stand_in::Device;
using stand_in::Error;
using stand_in::IntArrayRef;
using stand_in::TensorOptions;
using stand_in::toString;
inline std::ostream& operator<<(std::ostream& out, ScalarType type) { return out << stand_in::toString(type); }
}  // namespace c10
namespace at {
using namespace c10;
using namespace torch::headeronly;
using stand_in::Tensor;
using stand_in::TensorAccessor;
using stand_in::GenericPackedTensorAccessor;
using stand_in::PackedTensorAccessor32;
using stand_in::PackedTensorAccessor64;
using stand_in::device;
using stand_in::device_of;
using stand_in::dtype;
using stand_in::empty;
using stand_in::empty_like;
using stand_in::empty_strided;
using stand_in::full;
using stand_in::full_like;
using stand_in::ones;
using stand_in::ones_like;
using stand_in::requires_grad;
using stand_in::zeros;
using stand_in::zeros_like;
constexpr ScalarType kFloat = ScalarType::Float, kFloat32 = kFloat, kDouble = ScalarType::Double, kFloat64 = kDouble,
                     kHalf = ScalarType::Half, kFloat16 = kHalf, kBFloat16 = ScalarType::BFloat16, kLong = ScalarType::Long,
                     kInt64 = kLong, kInt = ScalarType::Int, kInt32 = kInt, kShort = ScalarType::Short, kInt16 = kShort,
                     kChar = ScalarType::Char, kInt8 = kChar, kByte = ScalarType::Byte, kUInt8 = kByte, kBool = ScalarType::Bool;
constexpr stand_in::Strided kStrided;
}  // namespace at
namespace torch {
using namespace at;
}

#define STAND_IN_CHECK(type, condition, ...)                                                                         \
  if (C10_UNLIKELY_OR_CONST(!(condition))) throw stand_in::Error(type, STD_TORCH_CHECK_MSG(condition, "", ##__VA_ARGS__))
#define TORCH_CHECK(condition, ...) STAND_IN_CHECK(PyExc_RuntimeError, condition, ##__VA_ARGS__)
#define TORCH_CHECK_INDEX(condition, ...) STAND_IN_CHECK(PyExc_IndexError, condition, ##__VA_ARGS__)
#define TORCH_CHECK_VALUE(condition, ...) STAND_IN_CHECK(PyExc_ValueError, condition, ##__VA_ARGS__)
#define TORCH_CHECK_TYPE(condition, ...) STAND_IN_CHECK(PyExc_TypeError, condition, ##__VA_ARGS__)
#define TORCH_CHECK_NOT_IMPLEMENTED(condition, ...) STAND_IN_CHECK(PyExc_NotImplementedError, condition, ##__VA_ARGS__)
#define AT_ASSERTM(condition, ...) TORCH_CHECK(condition, ##__VA_ARGS__)
#define AT_ERROR(...) throw stand_in::Error(PyExc_RuntimeError, stand_in::text_of(__VA_ARGS__))

#define AT_DISPATCH_CASE(TYPE, ...)                                                   \
  case TYPE: {                                                                        \
    using scalar_t [[maybe_unused]] = typename stand_in::CppTypeOf<TYPE>::type;       \
    return __VA_ARGS__();                                                             \
  }
#define AT_DISPATCH_SWITCH(TYPE, NAME, ...)                                                                          \
  [&] {                                                                                                              \
    const at::ScalarType stand_in_type = TYPE;                                                                       \
    switch (stand_in_type) {                                                                                         \
      __VA_ARGS__                                                                                                    \
      default:                                                                                                       \
        TORCH_CHECK_NOT_IMPLEMENTED(false, '"', NAME, "\" not implemented for '", stand_in::toString(stand_in_type), "'"); \
    }                                                                                                                \
  }()
#define AT_DISPATCH_CASE_FLOATING_TYPES(...) \
  AT_DISPATCH_CASE(at::ScalarType::Double, __VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Float, __VA_ARGS__)
#define AT_DISPATCH_CASE_INTEGRAL_TYPES(...)                                                                    \
  AT_DISPATCH_CASE(at::ScalarType::Byte, __VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Char, __VA_ARGS__)       \
  AT_DISPATCH_CASE(at::ScalarType::Int, __VA_ARGS__) AT_DISPATCH_CASE(at::ScalarType::Long, __VA_ARGS__)        \
  AT_DISPATCH_CASE(at::ScalarType::Short, __VA_ARGS__)
#define AT_DISPATCH_CASE_ALL_TYPES(...) AT_DISPATCH_CASE_INTEGRAL_TYPES(__VA_ARGS__) AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__))
#define AT_DISPATCH_INTEGRAL_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_INTEGRAL_TYPES(__VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES(TYPE, NAME, ...) AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND(ONE, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(ONE, __VA_ARGS__))
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND(at::ScalarType::Half, TYPE, NAME, __VA_ARGS__)
#define AT_DISPATCH_FLOATING_TYPES_AND2(ONE, TWO, TYPE, NAME, ...)                             \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_FLOATING_TYPES(__VA_ARGS__)                  \
                     AT_DISPATCH_CASE(ONE, __VA_ARGS__) AT_DISPATCH_CASE(TWO, __VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND(ONE, TYPE, NAME, ...) \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__) AT_DISPATCH_CASE(ONE, __VA_ARGS__))
#define AT_DISPATCH_ALL_TYPES_AND2(ONE, TWO, TYPE, NAME, ...)                                  \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE_ALL_TYPES(__VA_ARGS__)                       \
                     AT_DISPATCH_CASE(ONE, __VA_ARGS__) AT_DISPATCH_CASE(TWO, __VA_ARGS__))
