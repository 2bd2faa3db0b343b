// Python objects in code that runs without the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <utility>

#include "gil.h"

namespace fusedcomm {

// A reference that any thread may drop. After the interpreter it is kept for good.
class PythonObject {
 public:
  explicit PythonObject(pybind11::object object) : object_(std::move(object)) {}
  PythonObject(const PythonObject&) = delete;
  PythonObject& operator=(const PythonObject&) = delete;
  ~PythonObject() {
    if (!Py_IsInitialized() || interpreter_ends()) {
      object_.release();
      return;
    }
    pybind11::gil_scoped_acquire gil;
    object_ = pybind11::object();
  }

  // With the GIL.
  const pybind11::object& get() const { return object_; }

 private:
  pybind11::object object_;
};

// Calls f with the GIL. What Python raises in it goes on as the exception that torch takes through the dispatcher.
template <typename F>
auto with_gil(F&& f) {
  stay_if_interpreter_ends();
  pybind11::gil_scoped_acquire gil;
  try {
    return f();
  } catch (pybind11::error_already_set& raised) {
    raised.restore();
    python_error error;
    error.persist();
    throw error;
  }
}

// The exception as Python sees it. With the GIL.
inline pybind11::object as_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const python_error& raised) {
    return pybind11::reinterpret_borrow<pybind11::object>(raised.value != nullptr ? raised.value : raised.type);
  } catch (const pybind11::error_already_set& raised) {
    return raised.value();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(error);
    return pybind11::error_already_set().value();
  }
}

inline void check_python_signals() {
  with_gil([] {
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  });
}

}  // namespace fusedcomm
