// Calls whose gradients are asked for, on CPU tensors. Python says once for all calls of a kind what is saved, and its
// backward is recorded on a tape of ops, of which those of fusedcomm are prepared calls.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "key_table.h"
#include "python_objects.h"
#include "tape.h"

namespace fusedcomm {

// What calls with the same arguments, but for the values in tensors, leave to their backwards.
class TrainingKind : public std::enable_shared_from_this<TrainingKind> {
 public:
  // `formula`: fusedcomm.ops.formula.Formula of the op. `context`: what its backward reads beside tensors.
  TrainingKind(std::shared_ptr<PythonObject> formula, pybind11::object context, std::vector<int64_t> saved,
               bool materializes)
      : saved(std::move(saved)), materializes(materializes), formula_(std::move(formula)), context_(std::move(context)) {}

  const std::vector<int64_t> saved;  // indices of what is saved in the tensors of a call, its results behind them; or -1
  const bool materializes;           // whether the backward gets zeros for a gradient that is none

  // The gradients of the tensors of a call, undefined where there is none.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& saved, const std::vector<at::Tensor>& grads);

  // `tape` is null where none can stand for such backwards.
  void add(Key key, std::shared_ptr<Tape> tape);

 private:
  std::vector<at::Tensor> in_python(const std::vector<at::Tensor>& saved, const std::vector<at::Tensor>& grads) const;

  std::shared_ptr<PythonObject> formula_;
  PythonObject context_;
  std::mutex mutex_;
  KeyTable<Tape> tapes_;
};

// Those of one op.
class TrainingCalls {
 public:
  TrainingCalls(const c10::OperatorHandle& op, pybind11::object formula);

  // Runs a call and returns true; or false if that is Python's, and nothing was done.
  bool run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>& stack) const;

 private:
  int64_t id_;
  size_t group_name_;
  std::shared_ptr<PythonObject> formula_;
};

void bind_training_calls(pybind11::module_& m);

}  // namespace fusedcomm
