#include "gradients.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <map>
#include <utility>

namespace fusedcomm {
namespace {

using Argument = CallFacts::Argument;
using Values = std::vector<c10::IValue>;

const c10::IValue kNone;

// Arguments with defaults may be left out at the end.
Values run(const char* op, Values stack) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  const auto& arguments = handle.schema().arguments();
  while (stack.size() < arguments.size()) stack.push_back(arguments[stack.size()].default_value().value());
  handle.callBoxed(stack);
  return stack;
}

at::Tensor run_one(const char* op, Values stack) { return run(op, std::move(stack))[0].toTensor(); }

int64_t from_front(int64_t dim, int64_t num_dims) { return dim < 0 ? dim + num_dims : dim; }

at::Tensor exchange(const at::Tensor& t, int64_t gather_dim, int64_t scatter_dim, const CallFacts& call) {
  return run_one("fusedcomm::all_to_all", {t, gather_dim, scatter_dim, kNone, kNone, kNone, kNone, kNone, call.group_size,
                                           call.group_name});
}

at::Tensor all_gather(const at::Tensor& t, int64_t dim, const CallFacts& call) {
  return run_one("fusedcomm::all_gather", {t, dim, kNone, kNone, kNone, call.group_size, call.group_name});
}

at::Tensor reduce_scatter(const at::Tensor& t, int64_t dim, const CallFacts& call) {
  return run_one("fusedcomm::reduce_scatter", {t, "sum", dim, kNone, kNone, kNone, call.group_size, call.group_name});
}

// The gradients that a matmul has by itself, as in fusedcomm/ops/gradients.py.

at::Tensor of_w(at::Tensor x, at::Tensor grad, const Argument& w) {
  if (!w.is_batched) {
    x = x.flatten(0, -2);
    grad = grad.flatten(0, -2);
  }
  return w.is_transposed ? grad.mT().matmul(x).mT() : x.mT().matmul(grad);
}

at::Tensor of_bias(const at::Tensor& grad) {
  static constexpr int64_t kRows = 0;
  return grad.flatten(0, -2).sum(at::IntArrayRef(kRows));
}

at::Tensor averaged(const at::Tensor& part, const CallFacts& call) {
  return call.averages ? part.div(call.group_size) : part;
}

at::Tensor sum_of(const at::Tensor& one, const at::Tensor& other) { return one.defined() ? one.add(other) : other; }

}  // namespace

Backward::Gradients Backward::matmul_all_to_all(const CallFacts& call, const Tensors& saved, const Tensors& grads) {
  const at::Tensor &x = saved[0], &w = saved[1], &grad = grads[0];
  const bool needs_w = call.ws[0].needs_grad, needs_bias = call.biases[0].needs_grad;
  const auto num_dims = static_cast<int64_t>(call.x_shape.size()), num_columns = grad.dim() - num_dims + 1;
  const int64_t gather_dim = from_front(call.gather_dim, grad.dim()), scatter_dim = from_front(call.scatter_dim, grad.dim());
  Gradients found;
  at::Tensor grad_y;
  if (call.x.needs_grad && w.size(-1) > 0) {
    const Values made = run("fusedcomm::all_to_all_matmul",
                            {grad, w.mT(), kNone, scatter_dim, gather_dim, needs_w || needs_bias, kNone, kNone, kNone,
                             kNone, kNone, call.group_size, call.group_name});
    found.x = made[0].toTensor().view(call.x_shape);
    grad_y = made[1].toTensor();
  } else {
    grad_y = exchange(grad, scatter_dim, gather_dim, call);
    if (call.x.needs_grad) found.x = grad_y.flatten(-num_columns).matmul(w.mT());
  }
  if (needs_w) found.ws = {of_w(x, grad_y.flatten(-num_columns), call.ws[0])};
  if (needs_bias) found.biases = {of_bias(grad_y.flatten(-num_columns))};
  return found;
}

Backward::Gradients Backward::all_to_all_matmul(const CallFacts& call, const Tensors& saved, const Tensors& grads) {
  const at::Tensor &x = saved[0], &w = saved[1], &grad = grads[0], &grad_exchanged = grads[1];
  const auto num_dims = static_cast<int64_t>(call.x_shape.size());
  const int64_t gather_dim = from_front(call.gather_dim, num_dims), scatter_dim = from_front(call.scatter_dim, num_dims);
  Gradients found;
  if (grad.defined()) {
    const int64_t num_lead = grad.dim() - 1;
    if (call.x.needs_grad) {
      std::vector<int64_t> columns = call.x_shape;
      columns[static_cast<size_t>(gather_dim)] *= call.group_size;
      columns[static_cast<size_t>(scatter_dim)] /= call.group_size;
      columns.erase(columns.begin(), columns.begin() + num_lead);
      found.x = run_one("fusedcomm::matmul_all_to_all",
                        {grad, w.mT(), kNone, columns, scatter_dim, gather_dim, kNone, kNone, kNone, kNone, kNone,
                         call.group_size, call.group_name});
    }
    if (call.ws[0].needs_grad) {
      const at::Tensor exchanged = call.has_by_product ? x : exchange(x, gather_dim, scatter_dim, call);
      found.ws = {of_w(exchanged.flatten(num_lead), grad, call.ws[0])};
    }
    if (call.biases[0].needs_grad) found.biases = {of_bias(grad)};
  }
  if (grad_exchanged.defined() && call.has_by_product && call.x.needs_grad) {
    found.x = sum_of(found.x, exchange(grad_exchanged, scatter_dim, gather_dim, call));
  }
  return found;
}

Backward::Gradients Backward::all_gather_matmul(const CallFacts& call, const Tensors& saved, const Tensors& grads) {
  const int64_t dim = from_front(call.gather_dim, static_cast<int64_t>(call.x_shape.size()));
  const size_t num_ws = call.ws.size();
  Gradients found{{}, Tensors(num_ws), Tensors(num_ws), {}};
  at::Tensor x = saved[0];
  Tensors used_grads, used_ws;
  for (size_t i = 0; i < num_ws; ++i) {
    if (!grads[i].defined()) continue;
    used_grads.push_back(grads[i]);
    if (call.x.needs_grad) used_ws.push_back(saved[1 + i]);
  }
  if (call.x.needs_grad && !used_ws.empty()) {
    const bool is_one = used_ws.size() == 1;
    const at::Tensor grad = is_one ? used_grads[0] : at::cat(used_grads, -1);
    const at::Tensor w = is_one ? used_ws[0] : at::cat(used_ws, -1);
    found.x = run_one("fusedcomm::matmul_reduce_scatter", {grad, w.mT(), kNone, "sum", dim, kNone, kNone, kNone,
                                                           call.group_size, call.group_name});
  }
  if (call.x.needs_grad && grads[num_ws].defined() && call.has_by_product) {
    found.x = sum_of(found.x, reduce_scatter(grads[num_ws], dim, call));
  }
  const bool needs_w = std::any_of(call.ws.begin(), call.ws.end(), [](const Argument& w) { return w.needs_grad; });
  if (needs_w && !call.has_by_product && !used_grads.empty()) x = all_gather(x, dim, call);
  for (size_t i = 0; i < num_ws; ++i) {
    if (!grads[i].defined()) continue;
    if (call.ws[i].needs_grad) found.ws[i] = of_w(x, grads[i], call.ws[i]);
    if (call.biases[i].needs_grad) found.biases[i] = of_bias(grads[i]);
  }
  return found;
}

Backward::Gradients Backward::matmul_reduce_scatter(const CallFacts& call, const Tensors& saved, const Tensors& grads) {
  const at::Tensor &x = saved[0], &w = saved[1], &grad = grads[0];
  const int64_t dim = from_front(call.scatter_dim, static_cast<int64_t>(call.x_shape.size()));
  const bool needs_w = call.ws[0].needs_grad, needs_partial = call.partial_bias.needs_grad;
  const at::Tensor part = averaged(grad, call);
  Gradients found;
  at::Tensor gathered;
  if (call.x.needs_grad) {
    const c10::List<std::optional<at::Tensor>> no_bias({std::nullopt});
    const Values made = run("fusedcomm::all_gather_matmul",
                            {part, c10::List<at::Tensor>({w.mT()}), no_bias, dim, needs_w || needs_partial, kNone, kNone,
                             kNone, call.group_size, call.group_name});
    found.x = made[0].toTensorVector()[0];
    gathered = made[1].toTensor();
  } else if (needs_w || needs_partial) {
    gathered = all_gather(part, dim, call);
  }
  if (needs_w) found.ws = {of_w(x, gathered, call.ws[0])};
  if (call.biases[0].needs_grad) found.biases = {of_bias(grad)};
  if (needs_partial) found.partial_bias = of_bias(gathered);
  return found;
}

Backward::Gradients Backward::matmul_all_reduce(const CallFacts& call, const Tensors& saved, const Tensors& grads) {
  const at::Tensor &x = saved[0], &w = saved[1], &grad = grads[0];
  const at::Tensor part = averaged(grad, call);
  Gradients found;
  if (call.x.needs_grad) found.x = part.matmul(w.mT());
  if (call.ws[0].needs_grad) found.ws = {of_w(x, part, call.ws[0])};
  if (call.biases[0].needs_grad) found.biases = {of_bias(grad)};
  if (call.partial_bias.needs_grad) found.partial_bias = of_bias(part);
  return found;
}

std::optional<Backward> Backward::of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  static const std::map<std::string, Formula> kFormulas = {{"fusedcomm::matmul_all_to_all", &matmul_all_to_all},
                                                           {"fusedcomm::all_to_all_matmul", &all_to_all_matmul},
                                                           {"fusedcomm::all_gather_matmul", &all_gather_matmul},
                                                           {"fusedcomm::matmul_reduce_scatter", &matmul_reduce_scatter},
                                                           {"fusedcomm::matmul_all_reduce", &matmul_all_reduce}};
  const auto value = [&](const char* name) {
    const auto index = schema.argumentIndexWithName(name);
    return index ? arguments[static_cast<size_t>(*index)] : c10::IValue();
  };
  for (const char* name : {"gather_splits", "gather_size", "scatter_starts", "scatter_lengths", "rank"}) {
    if (!value(name).isNone()) return std::nullopt;
  }
  const auto one = [](const c10::IValue& given) {
    if (!given.isTensor()) return Argument();
    const at::Tensor& t = given.toTensor();
    const bool is_transposed = t.dim() > 1 && t.stride(-2) == 1 && t.stride(-1) != 1;
    return Argument{true, t.requires_grad(), t.dim() > 2, is_transposed};
  };
  const auto several = [&](const c10::IValue& given) {
    std::vector<Argument> found;
    if (!given.isList()) return std::vector<Argument>{one(given)};
    for (const c10::IValue& each : given.toListRef()) found.push_back(one(each));
    return found;
  };
  const auto formula = kFormulas.find(schema.name());
  if (formula == kFormulas.end()) return std::nullopt;
  Backward made;
  made.formula_ = formula->second;
  CallFacts& call = made.call_;
  call.x = one(arguments[0]);
  call.ws = several(arguments[1]);
  call.biases = several(arguments[2]);
  call.partial_bias = one(value("partial_bias"));
  call.x_shape = arguments[0].toTensor().sizes().vec();
  if (value("gather_dim").isInt()) call.gather_dim = value("gather_dim").toInt();
  if (value("scatter_dim").isInt()) call.scatter_dim = value("scatter_dim").toInt();
  call.group_size = value("group_size").toInt();
  call.group_name = value("group_name").toStringRef();
  call.averages = value("reduce_op").isString() && value("reduce_op").toStringRef() == "avg";
  for (const char* name : {"return_exchanged", "return_gathered"}) {
    call.has_by_product |= value(name).isBool() && value(name).toBool();
  }
  return made;
}

Tensors Backward::operator()(const Tensors& saved, const Tensors& grads, const std::vector<bool>& needs) const {
  CallFacts call = call_;
  size_t num_given = 0;
  const auto ask = [&](Argument& each) {
    if (each.is_given) each.needs_grad = needs[num_given++] && each.needs_grad;
  };
  ask(call.x);
  for (Argument& w : call.ws) ask(w);
  for (Argument& bias : call.biases) ask(bias);
  ask(call.partial_bias);
  Gradients found = formula_(call, saved, grads);
  found.ws.resize(call_.ws.size());
  found.biases.resize(call_.biases.size());
  Tensors given{found.x};
  for (size_t i = 0; i < call_.ws.size(); ++i) given.push_back(found.ws[i]);
  for (size_t i = 0; i < call_.biases.size(); ++i) {
    if (call_.biases[i].is_given) given.push_back(found.biases[i]);
  }
  if (call_.partial_bias.is_given) given.push_back(found.partial_bias);
  return given;
}

}  // namespace fusedcomm
