// Calls whose gradients are asked for, on CPU tensors. Python says once for all calls of a kind what is saved.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gradients.h"
#include "python_objects.h"

namespace fusedcomm {

// What calls with the same arguments, but for the values in tensors, leave to their backwards.
class TrainingKind {
 public:
  // `formula`: fusedcomm.ops.formula.Formula of the op. `context`: what its backward reads beside tensors.
  TrainingKind(std::shared_ptr<PythonObject> formula, pybind11::object context, std::vector<int64_t> saved,
               size_t num_tensors, bool materializes, std::optional<Backward> backward)
      : saved(std::move(saved)), num_tensors(num_tensors), materializes(materializes), formula_(std::move(formula)),
        context_(std::move(context)), backward_(std::move(backward)) {}

  const std::vector<int64_t> saved;  // indices of what is saved in the tensors of a call, its results behind them; or -1
  const size_t num_tensors;          // of a call
  const bool materializes;           // whether the backward gets zeros for a gradient that is none

  // The gradients of the tensors of a call, undefined where there is none. `needs`: of each, whether it is asked for.
  Tensors backward(const Tensors& saved, const Tensors& grads, const std::vector<bool>& needs) const;

 private:
  Tensors in_python(const Tensors& saved, const Tensors& grads, const std::vector<bool>& needs) const;

  std::shared_ptr<PythonObject> formula_;
  PythonObject context_;
  std::optional<Backward> backward_;  // none: Python's runs
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

}  // namespace fusedcomm
