// Values of torch as Python objects, and back. All with the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

namespace torch::jit {  // torch/csrc/jit/python/pybind_utils.h declares these too, and takes 20 s to compile

TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type,
                                      std::optional<int32_t> N = std::nullopt);
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);

}  // namespace torch::jit

namespace fusedcomm {

// An undefined tensor is None.
inline pybind11::list to_python(const std::vector<at::Tensor>& tensors) {
  pybind11::list list;
  for (const auto& t : tensors) list.append(t.defined() ? pybind11::cast(t) : pybind11::none());
  return list;
}

inline std::vector<at::Tensor> from_python(const pybind11::sequence& list) {
  std::vector<at::Tensor> tensors;
  for (const auto& each : list) tensors.push_back(each.is_none() ? at::Tensor() : each.cast<at::Tensor>());
  return tensors;
}

}  // namespace fusedcomm
