#include "training_calls.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "prepared_calls.h"
#include "python_values.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether nobody looks at ops or changes what they do: a mode of Python or of vmap, a tracer. Autocast is no such mode.
bool no_mode_is_on() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::default_included_set - c10::autocast_dispatch_keyset).empty();
}

// All kinds by number, as what a node of autograd keeps must be a constant for compiled autograd. They stay: they hold
// no tensors, and there are at most kMost, behind which Python runs the calls of new ones.
class TrainingKinds {
 public:
  std::optional<int64_t> find(const Key& key) const {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = numbers_.find(key);
    return found == numbers_.end() ? std::nullopt : std::optional(found->second);
  }

  bool is_full() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return kinds_.size() >= kMost;
  }

  int64_t add(const Key& key, std::shared_ptr<TrainingKind> kind) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto [entry, is_new] = numbers_.emplace(key, static_cast<int64_t>(kinds_.size()));
    if (is_new) kinds_.push_back(std::move(kind));  // or another thread was first
    return entry->second;
  }

  std::shared_ptr<TrainingKind> operator[](int64_t number) const {
    std::lock_guard<std::mutex> guard(mutex_);
    return kinds_.at(static_cast<size_t>(number));
  }

 private:
  static constexpr size_t kMost = 16384;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<TrainingKind>> kinds_;
  std::unordered_map<Key, int64_t, HashKey> numbers_;
};

TrainingKinds& kinds() {
  static auto* all = new TrainingKinds();
  return *all;
}

Tensors flattened(c10::ArrayRef<c10::IValue> values) {
  Tensors tensors;
  for (const auto& value : values) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else {
      for (const at::Tensor& each : value.toTensorVector()) tensors.push_back(each);
    }
  }
  return tensors;
}

// A call on its way through autograd.
struct TrainingCall {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  std::vector<c10::IValue>& stack;
  const Key& key;
  std::optional<int64_t> number;  // the number of the kind, once that is known
  const std::shared_ptr<PythonObject>& formula;
};

std::shared_ptr<TrainingKind> describe(const TrainingCall& call, const std::vector<c10::IValue>& arguments,
                                       const Tensors& tensors, const Tensors& results) {
  return with_gil([&] {
    py::list args, needs_grad;
    for (const auto& argument : arguments) args.append(torch::jit::toPyObject(argument));
    for (const auto& t : tensors) needs_grad.append(t.requires_grad());
    const auto kind = call.formula->get().attr("describe")(args, to_python(results), needs_grad);
    auto [context, saved, materializes] = kind.cast<std::tuple<py::object, std::vector<int64_t>, bool>>();
    return std::make_shared<TrainingKind>(call.formula, std::move(context), std::move(saved), tensors.size(),
                                          materializes, Backward::of(call.op.schema(), arguments));
  });
}

}  // namespace

// The node of autograd. It does what torch's node for a formula in Python does, with the same tensors saved.
struct TrainingNode : torch::autograd::Function<TrainingNode> {
  static variable_list forward(AutogradContext* ctx, TrainingCall* call, at::TensorList tensors) {
    auto& stack = call->stack;
    const size_t first = stack.size() - call->op.schema().arguments().size();
    std::vector<c10::IValue> arguments;
    if (!call->number) arguments.assign(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
    {
      const at::AutoDispatchBelowAutograd below;
      call->op.redispatchBoxed(call->keys & c10::after_autograd_keyset, &stack);
    }
    const auto results = flattened(c10::ArrayRef<c10::IValue>(stack).slice(first));
    if (!call->number) call->number = kinds().add(call->key, describe(*call, arguments, tensors.vec(), results));
    const auto kind = kinds()[*call->number];
    variable_list saved;
    for (const int64_t index : kind->saved) {
      const auto at = static_cast<size_t>(index);
      saved.push_back(index < 0 ? at::Tensor() : at < tensors.size() ? tensors[at] : results[at - tensors.size()]);
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(kind->materializes);
    ctx->saved_data["kind"] = *call->number;
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto kind = kinds()[ctx->saved_data["kind"].toInt()];
    std::vector<bool> needs;  // of the running backward, which may ask for some gradients alone
    for (size_t i = 0; i < kind->num_tensors; ++i) needs.push_back(ctx->needs_input_grad(i));
    // The engine runs no node for nothing: it was called by hand, inside of another backward.
    if (std::none_of(needs.begin(), needs.end(), [](bool each) { return each; })) needs.assign(needs.size(), true);
    variable_list found = kind->backward(ctx->get_saved_variables(), grads, needs);
    found.insert(found.begin(), at::Tensor());  // for the TrainingCall, which is an argument of forward
    return found;
  }
};

Tensors TrainingKind::backward(const Tensors& saved, const Tensors& grads, const std::vector<bool>& needs) const {
  const auto plain = [](const at::Tensor& t) { return !t.defined() || is_plain(t); };
  const bool all_plain = std::all_of(saved.begin(), saved.end(), plain) && std::all_of(grads.begin(), grads.end(), plain);
  if (!backward_ || at::GradMode::is_enabled() || !no_mode_is_on() || !all_plain) {
    return in_python(saved, grads, needs);
  }
  return (*backward_)(saved, grads, needs);
}

Tensors TrainingKind::in_python(const Tensors& saved, const Tensors& grads, const std::vector<bool>& needs) const {
  return with_gil([&] {
    py::list asked;
    for (const bool each : needs) asked.append(each);
    return from_python(formula_->get().attr("run")(context_.get(), to_python(saved), to_python(grads), asked));
  });
}

TrainingCalls::TrainingCalls(const c10::OperatorHandle& op, py::object formula)
    : group_name_(static_cast<size_t>(op.schema().argumentIndexWithName("group_name").value())),
      formula_(std::make_shared<PythonObject>(std::move(formula))) {
  static std::atomic<int64_t> num_ops{0};
  id_ = ++num_ops;
}

bool TrainingCalls::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>& stack) const {
  const auto arguments = c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - op.schema().arguments().size());
  if (!no_mode_is_on() || torch::autograd::AnomalyMode::is_enabled()) return false;
  if (PreparedCalls::of(arguments[group_name_].toStringRef(), device_of(arguments)) == nullptr) return false;
  Key key{id_};
  std::vector<at::Tensor> tensors;
  for (const auto& argument : arguments) {
    if (!add_to_key(argument, key, tensors)) return false;
  }
  for (const auto& t : tensors) key.push_back(t.requires_grad());
  const auto number = kinds().find(key);
  if (!number && kinds().is_full()) return false;
  TrainingCall call{op, keys, stack, key, number, formula_};
  TrainingNode::apply(&call, at::TensorList(tensors));  // the results on the stack are in the graph then
  return true;
}

}  // namespace fusedcomm
