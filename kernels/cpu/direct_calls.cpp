// Calls of an op from Python, in place of torch's own: where all arguments are plain, nothing is looked up for each of
// them, which takes torch longer than a planned call.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
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
  // `others`: torch's own call, for arguments that are not plain: subclasses, keywords, symbols, and wrong ones.
  DirectCall(const std::string& op, py::object others)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), "")), others_(std::move(others)) {
    for (const auto& argument : op_.schema().arguments()) {
      const auto optional = argument.type()->cast<c10::OptionalType>();
      types_.push_back({optional ? optional->getElementType() : argument.type(), optional != nullptr, argument.default_value()});
    }
  }

  py::object operator()(const py::args& args, const py::kwargs& kwargs) const {
    std::vector<c10::IValue> stack;
    stack.reserve(types_.size());
    bool plain = kwargs.empty() && args.size() <= types_.size() && !at::impl::torch_function_mode_enabled();
    try {
      for (size_t i = 0; plain && i < args.size(); ++i) plain = push(types_[i], PyTuple_GET_ITEM(args.ptr(), i), stack);
    } catch (const py::cast_error&) {  // a number beyond 64 bits, or a text that is no UTF-8: torch names it
      plain = false;
    }
    for (size_t i = args.size(); plain && i < types_.size(); ++i) {
      plain = types_[i].default_value.has_value();
      if (plain) stack.push_back(*types_[i].default_value);
    }
    if (!plain) return others_.get()(*args, **kwargs);
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
    c10::TypePtr type;
    bool optional;
    std::optional<c10::IValue> default_value;
  };

  // False for what is not plainly of the type.
  static bool push(const Type& wanted, PyObject* given, std::vector<c10::IValue>& stack) {
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
        if (!PyLong_CheckExact(given)) return false;
        stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(given, &overflows)));
        return overflows == 0;
      }
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
};

}  // namespace

void bind_direct_calls(py::module_& m) {
  m.def("direct_call", [](const std::string& op, py::object others) {
    auto call = std::make_shared<DirectCall>(op, std::move(others));
    auto called = [call](const py::args& args, const py::kwargs& kwargs) { return (*call)(args, kwargs); };
    return py::cpp_function(called, py::name(op.c_str()));
  });
}

}  // namespace fusedcomm
