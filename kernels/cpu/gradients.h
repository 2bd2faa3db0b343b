// The backwards of the five ops, as the `backward` of each in fusedcomm/ops: that is the reference, and runs where parts
// differ in size.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fusedcomm {

using Tensors = std::vector<at::Tensor>;  // an undefined one: none

// The facts that a backward reads beside tensors.
struct CallFacts {
  // A tensor argument, as fusedcomm.ops.gradients.WeightLayout.
  struct Argument {
    bool is_given = false;
    bool needs_grad = false;
    bool is_batched = false;
    bool is_transposed = false;
  };

  Argument x;
  std::vector<Argument> ws, biases;
  Argument partial_bias;
  std::vector<int64_t> x_shape;
  int64_t gather_dim = 0;  // negative ones count from the end
  int64_t scatter_dim = 0;
  int64_t group_size = 1;
  std::string group_name;
  bool averages = false;
  bool has_by_product = false;  // the exchanged x, which is saved then
};

class Backward {
 public:
  // `arguments`: of a call of the op. None where their parts differ in size.
  static std::optional<Backward> of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments);

  // The gradients of the call's tensors, in the order of its arguments. `needs`: of each, whether it is asked for.
  Tensors operator()(const Tensors& saved, const Tensors& grads, const std::vector<bool>& needs) const;

 private:
  struct Gradients {
    at::Tensor x;
    Tensors ws, biases;
    at::Tensor partial_bias;
  };
  using Formula = Gradients (*)(const CallFacts&, const Tensors& saved, const Tensors& grads);

  static Gradients matmul_all_to_all(const CallFacts& call, const Tensors& saved, const Tensors& grads);
  static Gradients all_to_all_matmul(const CallFacts& call, const Tensors& saved, const Tensors& grads);
  static Gradients all_gather_matmul(const CallFacts& call, const Tensors& saved, const Tensors& grads);
  static Gradients matmul_reduce_scatter(const CallFacts& call, const Tensors& saved, const Tensors& grads);
  static Gradients matmul_all_reduce(const CallFacts& call, const Tensors& saved, const Tensors& grads);

  Formula formula_ = nullptr;
  CallFacts call_;
};

}  // namespace fusedcomm
