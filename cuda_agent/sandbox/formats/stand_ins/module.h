// Stands in for pybind11: makes an ordinary Python module of C++ functions (see types.h).
#pragma once
#include "types.h"

namespace stand_in __attribute__((visibility("hidden"))) {
struct Mismatch {};  // an argument of another type than the function's

// ---- from Python objects to C++ values ----
template <class T, class = void>
struct Read;
inline void no_error() {
  if (!PyErr_Occurred()) return;
  PyErr_Clear();
  throw Mismatch{};
}
template <>
struct Read<bool> {
  static bool from(PyObject* object) {
    if (!PyBool_Check(object) && object != Py_None && !(Py_TYPE(object)->tp_as_number && Py_TYPE(object)->tp_as_number->nb_bool))
      throw Mismatch{};
    int truth = PyObject_IsTrue(object);
    no_error();
    return truth;
  }
};
template <class T>
struct Read<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool> && (sizeof(T) < 8 || std::is_signed_v<T>)>> {
  static T from(PyObject* object) {
    if (PyFloat_Check(object)) throw Mismatch{};
    PyObject* whole = PyNumber_Check(object) ? PyNumber_Long(object) : nullptr;
    no_error();
    if (!whole) throw Mismatch{};
    long long value = PyLong_AsLongLong(Object(whole).get());
    no_error();
    if (value < static_cast<long long>(std::numeric_limits<T>::min()) || value > static_cast<long long>(std::numeric_limits<T>::max()))
      throw Mismatch{};
    return static_cast<T>(value);
  }
};
template <class T>
struct Read<T, std::enable_if_t<std::is_floating_point_v<T>>> {
  static T from(PyObject* object) {
    double value = PyFloat_AsDouble(object);
    no_error();
    return static_cast<T>(value);
  }
};
template <>
struct Read<std::string> {
  static std::string from(PyObject* object) {
    if (!PyUnicode_Check(object)) throw Mismatch{};
    const char* text = PyUnicode_AsUTF8(object);
    no_error();
    return text;
  }
};
template <>
struct Read<Tensor> {
  static Tensor from(PyObject* object) {
    static PyObject* type = torch_attribute("_C").attribute("TensorBase").release();
    if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type))) throw Mismatch{};
    return Tensor(Object::borrowed(object));
  }
};
template <>
struct Read<ScalarType> {
  static ScalarType from(PyObject* object) {
    for (int i = 0; i < kCount; i++)
      if (dtype_object(i) == object) return kKinds[i].type;
    throw Mismatch{};
  }
};
template <class T>
struct Read<std::optional<T>> {
  static std::optional<T> from(PyObject* object) {
    if (object == Py_None) return std::nullopt;
    return Read<T>::from(object);
  }
};
template <class T>
struct Read<std::vector<T>> {
  static std::vector<T> from(PyObject* object) {
    if (!PySequence_Check(object) || PyUnicode_Check(object) || PyBytes_Check(object)) throw Mismatch{};
    Object items(PySequence_Fast(object, "a sequence is expected"));
    std::vector<T> list;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); i++)
      list.push_back(Read<T>::from(PySequence_Fast_GET_ITEM(items.get(), i)));
    return list;
  }
};
template <class T>
struct Stored { typedef T type; };  // what keeps an argument's value during the call
template <>
struct Stored<IntArrayRef> { typedef std::vector<int64_t> type; };

// ---- results ----
template <class T>
Object to_python(const std::vector<T>& list) {
  Object result(PyList_New(list.size()));
  for (size_t i = 0; i < list.size(); i++) PyList_SET_ITEM(result.get(), i, to_python(list[i]).release());
  return result;
}
template <class T>
Object to_python(const std::optional<T>& value) { return value ? to_python(*value) : Object::borrowed(Py_None); }
inline Object to_python(std::nullopt_t) { return Object::borrowed(Py_None); }
template <class... T>
Object to_python(const std::tuple<T...>& values) {
  Object result(PyTuple_New(sizeof...(T)));
  Py_ssize_t at = 0;
  std::apply([&](const auto&... one) { (PyTuple_SET_ITEM(result.get(), at++, to_python(one).release()), ...); }, values);
  return result;
}
template <class A, class B>
Object to_python(const std::pair<A, B>& values) { return to_python(std::make_tuple(values.first, values.second)); }

// ---- functions ----
struct Argument {
  std::string name;
  Object standard;  // null: none
};
struct Entry {
  std::string name, doc;
  size_t count;
  std::vector<Argument> arguments;  // empty, or one an argument
  std::function<Object(PyObject* const*)> call;
  bool ours = false;  // every C++ exception becomes a RuntimeError, as with torch::wrap_pybind_function
  PyMethodDef definition{};
};

template <class R, class... A, size_t... I>
std::function<Object(PyObject* const*)> erased(std::function<R(A...)> function, std::index_sequence<I...>) {
  return [function](PyObject* const* given) {
    (void)given;
    std::tuple<typename Stored<std::decay_t<A>>::type...> values{Read<typename Stored<std::decay_t<A>>::type>::from(given[I])...};
    if constexpr (std::is_void_v<R>) {
      function(std::get<I>(values)...);
      return Object::borrowed(Py_None);
    } else {
      return to_python(function(std::get<I>(values)...));
    }
  };
}

// Fills ``slots`` with the arguments of a call, or throws.
inline void arrange(const Entry& entry, PyObject* const* given, size_t count, PyObject* names, std::vector<PyObject*>& slots) {
  if (count > entry.count) throw Mismatch{};
  std::copy(given, given + count, slots.begin());
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    size_t at = 0;
    while (at < entry.arguments.size() && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), entry.arguments[at].name.c_str())) at++;
    if (at == entry.arguments.size() || slots[at]) throw Mismatch{};
    slots[at] = given[count + i];
  }
  for (size_t i = 0; i < entry.count; i++)
    if (!slots[i] && !(i < entry.arguments.size() && (slots[i] = entry.arguments[i].standard.get()))) throw Mismatch{};
}

inline PyObject* called(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  const Entry& entry = *static_cast<Entry*>(PyCapsule_GetPointer(self, nullptr));
  PyObject* kind = PyExc_RuntimeError;
  std::string message;
  try {
    std::vector<PyObject*> slots(entry.count);
    arrange(entry, given, count, names, slots);
    return entry.call(slots.data()).release();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const Mismatch&) {
    kind = PyExc_TypeError;
    message = entry.name + "(): incompatible function arguments. The following argument types are supported:";
  } catch (const Error& error) {
    kind = error.type;
    message = error.what();
  } catch (const std::exception& error) {
    message = error.what();
    if (!entry.ours)
      kind = dynamic_cast<const std::bad_alloc*>(&error)          ? PyExc_MemoryError
             : dynamic_cast<const std::domain_error*>(&error)     ? PyExc_ValueError
             : dynamic_cast<const std::invalid_argument*>(&error) ? PyExc_ValueError
             : dynamic_cast<const std::length_error*>(&error)     ? PyExc_ValueError
             : dynamic_cast<const std::out_of_range*>(&error)     ? PyExc_IndexError
             : dynamic_cast<const std::range_error*>(&error)      ? PyExc_ValueError
             : dynamic_cast<const std::overflow_error*>(&error)   ? PyExc_OverflowError
                                                                  : PyExc_RuntimeError;
  } catch (...) {
    message = "Caught an unknown exception!";
  }
  PyErr_SetString(kind, message.c_str());
  return nullptr;
}

template <class F>
struct Wrapped { F function; };
}  // namespace stand_in

namespace torch {
template <class F>
stand_in::Wrapped<F> wrap_pybind_function(F function) { return {function}; }
}  // namespace torch

namespace pybind11 {
struct none {};
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
namespace literals {
inline arg operator""_a(const char* name, size_t) { return arg(name); }
}  // namespace literals

class module_ {
 public:
  explicit module_(PyObject* object) : object_(object) {}
  template <class F, class... Extra>
  module_& def(const char* name, F function, const Extra&... extra) {
    add(name, std::function(function), false, extra...);
    return *this;
  }
  template <class F, class... Extra>
  module_& def(const char* name, stand_in::Wrapped<F> wrapped, const Extra&... extra) {
    add(name, std::function(wrapped.function), true, extra...);
    return *this;
  }
  class Doc {
   public:
    explicit Doc(PyObject* object) : object_(object) {}
    void operator=(const char* text) { PyModule_SetDocString(object_, text); }

   private:
    PyObject* object_;
  };
  Doc doc() const { return Doc(object_); }

 private:
  template <class R, class... A, class... Extra>
  void add(const char* name, std::function<R(A...)> function, bool ours, const Extra&... extra) {
    auto* entry = new stand_in::Entry{name, "", sizeof...(A), {}, stand_in::erased(function, std::index_sequence_for<A...>()), ours};
    (describe(*entry, extra), ...);
    if (PyObject_HasAttrString(object_, name) || (!entry->arguments.empty() && entry->arguments.size() != entry->count))
      throw std::runtime_error("an overloaded function, or names for a part of the arguments");
    entry->definition = {entry->name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(stand_in::called)),
                         METH_FASTCALL | METH_KEYWORDS, entry->doc.c_str()};
    stand_in::Object self(PyCapsule_New(entry, nullptr, nullptr));
    stand_in::Object made(PyCFunction_NewEx(&entry->definition, self.get(), nullptr));
    if (PyModule_AddObject(object_, name, made.release())) throw stand_in::PythonError{};
  }
  static void describe(stand_in::Entry& entry, const arg& argument) { entry.arguments.push_back({argument.name, {}}); }
  template <class T>
  static void describe(stand_in::Entry& entry, const arg_v<T>& argument) {
    entry.arguments.push_back({argument.name, stand_in::to_python(argument.value)});
  }
  static void describe(stand_in::Entry& entry, const arg_v<none>& argument) {
    entry.arguments.push_back({argument.name, stand_in::Object::borrowed(Py_None)});
  }
  static void describe(stand_in::Entry& entry, const char* text) { entry.doc = text; }
  PyObject* object_;
};
using module = module_;
}  // namespace pybind11
namespace py = pybind11;
namespace torch {
namespace py = pybind11;
}

namespace stand_in __attribute__((visibility("hidden"))) {
inline PyObject* make_module(const char* name, void (*define)(pybind11::module_&)) {
  auto* definition = new PyModuleDef{PyModuleDef_HEAD_INIT, name, nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* object = PyModule_Create(definition);
  if (!object) return nullptr;
  try {
    pybind11::module_ module(object);
    define(module);
    return object;
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
  }
  Py_DECREF(object);
  return nullptr;
}
}  // namespace stand_in

#define STAND_IN_MODULE(name, variable)                                                                   \
  static void stand_in_define_##name(pybind11::module_&);                                                 \
  PyMODINIT_FUNC PyInit_##name() { return stand_in::make_module(#name, stand_in_define_##name); }         \
  static void stand_in_define_##name(pybind11::module_& variable)
#define PYBIND11_MODULE(name, variable) STAND_IN_MODULE(name, variable)
