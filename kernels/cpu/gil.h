// Blocking calls let other Python threads run and stay open to Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fusedcomm {

inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// A daemon thread that comes back when the interpreter ends stays here until the process has ended: before 3.14 Python
// would end the thread, and the destructors on its stack would end the process by std::terminate. The main thread,
// which ends the interpreter, does not stay.
inline void stay_if_interpreter_ends() {
  while (interpreter_ends() && syscall(SYS_gettid) != getpid()) pause();
}

inline void take_gil(PyThreadState* state) {
  stay_if_interpreter_ends();
  PyEval_RestoreThread(state);
}

// Releases the GIL for a scope, if this thread holds it. torch's bindings of symmetric memory keep it held.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (state_ != nullptr) take_gil(state_);
  }

  // Throws what a Python signal handler raised (KeyboardInterrupt).
  void check_signals() {
    if (state_ == nullptr) return;
    take_gil(state_);
    state_ = nullptr;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_;
};

}  // namespace fusedcomm
