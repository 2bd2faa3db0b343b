// Blocking calls let other Python threads run and stay open to Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedcomm {

// Releases the GIL for a scope, if this thread holds it. torch's bindings of symmetric memory keep it held.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

  // Throws what a Python signal handler raised (KeyboardInterrupt).
  void check_signals() {
    if (state_ == nullptr) return;
    PyEval_RestoreThread(state_);
    state_ = nullptr;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_;
};

}  // namespace fusedcomm
