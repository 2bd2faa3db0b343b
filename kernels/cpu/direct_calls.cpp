// Calls of an op from Python, in place of torch's own: where all arguments are plain, nothing is looked up for each of
// them, which takes torch longer than a planned call.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python_objects.h"
#include "python_values.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

class DirectCall {
 public:
  // `others`: torch's own call, for arguments that are not plain: subclasses, symbols, and wrong ones.
  DirectCall(const std::string& op, const std::string& overload, py::object others)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), overload.c_str())), others_(std::move(others)) {
    for (const auto& argument : op_.schema().arguments()) {
      const auto optional = argument.type()->cast<c10::OptionalType>();
      const auto type = optional ? optional->getElementType() : argument.type();
      types_.push_back({argument.name(), type, optional != nullptr, argument.default_value()});
      num_positional_ += !argument.kwarg_only();
    }
  }

  py::object operator()(const py::args& args, const py::kwargs& kwargs) const {
    std::vector<c10::IValue> stack;
    stack.reserve(types_.size());
    bool plain = args.size() <= num_positional_ && !at::impl::torch_function_mode_enabled();
    size_t num_named = 0;
    try {
      for (size_t i = 0; plain && i < types_.size(); ++i) {
        const bool is_named = i >= args.size();
        PyObject* given = is_named ? PyDict_GetItemString(kwargs.ptr(), types_[i].name.c_str()) : PyTuple_GET_ITEM(args.ptr(), i);
        num_named += is_named && given != nullptr;
        plain = push(types_[i], given, stack);
      }
    } catch (const py::cast_error&) {  // a number beyond 64 bits, or a text that is no UTF-8: torch names it
      plain = false;
    }
    if (!plain || num_named != kwargs.size()) return others_.get()(*args, **kwargs);
    {
      const WithoutGil no_gil;
      op_.callBoxed(&stack);
    }
    if (stack.size() == 1) return torch::jit::toPyObject(std::move(stack.front()));
    py::tuple results(stack.size());
    for (size_t i = 0; i < stack.size(); ++i) results[i] = torch::jit::toPyObject(std::move(stack[i]));
    return results;
  }

 private:
  struct Type {
    std::string name;
    c10::TypePtr type;
    bool optional;
    std::optional<c10::IValue> default_value;
  };

  // False for what is not plainly of the type. Null: the default.
  static bool push(const Type& wanted, PyObject* given, std::vector<c10::IValue>& stack) {
    if (given == nullptr) {
      stack.push_back(wanted.default_value.value_or(c10::IValue()));
      return wanted.default_value.has_value();
    }
    if (given == Py_None) {
      stack.emplace_back();
      return wanted.optional;
    }
    switch (wanted.type->kind()) {
      case c10::TypeKind::TensorType:
        if (!THPVariable_CheckExact(given)) return false;
        stack.emplace_back(THPVariable_Unpack(given));
        return true;
      case c10::TypeKind::IntType: {
        int overflows = 0;
        if (THPDtype_Check(given)) {
          stack.emplace_back(reinterpret_cast<THPDtype*>(given)->scalar_type);
          return true;
        }
        if (!PyLong_CheckExact(given)) return false;
        stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(given, &overflows)));
        return overflows == 0;
      }
      case c10::TypeKind::FloatType:
        if (!PyFloat_CheckExact(given)) return false;
        stack.emplace_back(PyFloat_AS_DOUBLE(given));
        return true;
      case c10::TypeKind::BoolType:
        stack.emplace_back(given == Py_True);
        return PyBool_Check(given);
      case c10::TypeKind::StringType:
        if (!PyUnicode_CheckExact(given)) return false;
        stack.emplace_back(py::handle(given).cast<std::string>());
        return true;
      case c10::TypeKind::ListType:
        return push_list(wanted.type, given, stack);
      default:
        return false;
    }
  }

  static bool push_list(const c10::TypePtr& type, PyObject* given, std::vector<c10::IValue>& stack) {
    if (!PyList_CheckExact(given)) return false;
    const auto element = type->containedType(0)->kind();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      PyObject* each = PyList_GET_ITEM(given, i);
      const bool none = each == Py_None && element == c10::TypeKind::OptionalType;
      if (element == c10::TypeKind::IntType ? !PyLong_CheckExact(each) : !none && !THPVariable_CheckExact(each)) return false;
    }
    stack.push_back(torch::jit::toIValue(given, type));
    return true;
  }

  c10::OperatorHandle op_;
  PythonObject others_;
  std::vector<Type> types_;
  size_t num_positional_ = 0;
};

}  // namespace

void bind_direct_calls(py::module_& m) {
  m.def("direct_call", [](const std::string& op, const std::string& overload, py::object others) {
    auto call = std::make_shared<DirectCall>(op, overload, std::move(others));
    auto called = [call](const py::args& args, const py::kwargs& kwargs) { return (*call)(args, kwargs); };
    return py::cpp_function(called, py::name(op.c_str()));
  });
}

}  // namespace fusedcomm
