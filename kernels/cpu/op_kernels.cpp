// The kernels of fusedcomm's ops on CPU tensors, and below autograd's: a call that has been prepared runs here, and all
// others run in Python.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <functional>

#include "plan_bindings.h"
#include "prepared_calls.h"
#include "python_values.h"
#include "training_calls.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

std::atomic<int64_t> num_warm_ups{0};  // how many `before_capture` this process is in
std::atomic<int64_t> forced_algorithm{0};  // a number for what `force_algorithm` says, which is part of every key

// torch's switch for TF32.
int64_t matmul_precision() {
  return static_cast<int64_t>(at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL));
}

// Calls Python's kernel with the arguments on the stack, and puts its results there.
void call_python(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack,
                 const std::function<py::object(const py::tuple&, const py::dict&)>& kernel) {
  with_gil([&] {
    const auto& schema = op.schema();
    py::list args;
    py::dict kwargs;
    const size_t first = stack.size() - schema.arguments().size();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      py::object value = torch::jit::toPyObject(stack[first + i]);
      if (argument.kwarg_only()) {
        kwargs[argument.name().c_str()] = value;
      } else {
        args.append(value);
      }
    }
    const py::object result = kernel(py::tuple(args), kwargs);
    stack.resize(first);
    const auto& returns = schema.returns();
    if (returns.size() == 1) {
      stack.push_back(torch::jit::toIValue(result, returns[0].type()));
      return;
    }
    const auto results = result.cast<py::sequence>();
    TORCH_CHECK(results.size() == returns.size(), schema.name(), ": its kernel must return ", returns.size(),
                " values, got ", results.size());
    for (size_t i = 0; i < returns.size(); ++i) {
      stack.push_back(torch::jit::toIValue(py::object(results[i]), returns[i].type()));
    }
  });
}

size_t index_of_group_name(const c10::OperatorHandle& op) {
  const auto index = op.schema().argumentIndexWithName("group_name");
  TORCH_INTERNAL_ASSERT(index.has_value());
  return static_cast<size_t>(*index);
}

// Whether a call on a GPU must run in Python: a CUDA graph is captured, or will be (`before_capture`).
bool is_for_capture(c10::Device device) {
  if (num_warm_ups > 0) return true;
  const c10::DeviceGuard on_device(device);
  Driver::get().ensure_context(device.index());
  const c10::impl::VirtualGuardImpl guard(device.type());
  return Driver::get().is_capturing(guard.getStreamNativeHandle(guard.getStream(device)));
}

size_t num_bytes_of(const at::Tensor& t) { return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()); }

enum Overlap : int64_t { kNone, kPartial, kWhole };

Overlap overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); };
  const auto end = [&](const at::Tensor& t) { return begin(t) + num_bytes_of(t); };
  if (begin(a) == begin(b) && end(a) == end(b)) return kWhole;
  return std::max(begin(a), begin(b)) < std::min(end(a), end(b)) ? kPartial : kNone;
}

// The kernel of an op on CPU or CUDA tensors.
class OpKernel final : public c10::OperatorKernel {
 public:
  OpKernel(int64_t id, const c10::OperatorHandle& op, py::object kernel, py::object record)
      : id_(id), group_name_(index_of_group_name(op)), num_outs_(count_outs(op)), kernel_(std::move(kernel)),
        record_(std::move(record)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, std::vector<c10::IValue>* stack) {
    const size_t num_arguments = op.schema().arguments().size();
    const auto arguments = c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - num_arguments);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // `.out` comes with it
    const c10::Device device = device_of(arguments);
    const auto calls = PreparedCalls::of(arguments[group_name_].toStringRef(), device);
    if (calls == nullptr || (device.is_cuda() && is_for_capture(device))) return run_python(op, *stack);
    Key key{calls->generation(), id_, forced_algorithm, matmul_precision()};
    std::vector<at::Tensor> tensors;
    if (!make_key(arguments, key, tensors) || !all_on(device, tensors)) return run_python(op, *stack);
    const auto [call, is_known] = calls->find(key);
    if (call != nullptr) {
      std::vector<c10::IValue> results;
      if (!calls->run(*call, tensors, results)) return run_python(op, *stack);
      stack->resize(stack->size() - num_arguments);
      for (auto& result : results) stack->push_back(std::move(result));
      stay_if_interpreter_ends();
    } else if (is_known) {
      call_python(op, *stack, [&, &key = key](const py::tuple& args, const py::dict& kwargs) {
        return record_.get()(kernel_.get(), calls, std::vector<int64_t>(key.begin(), key.end()), args, kwargs);
      });
    } else {
      run_python(op, *stack);
    }
  }

 private:
  static bool all_on(c10::Device device, const std::vector<at::Tensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.device() == device; });
  }

  static size_t count_outs(const c10::OperatorHandle& op) {
    const auto& arguments = op.schema().arguments();
    const auto is_out = [](const auto& each) { return each.kwarg_only(); };
    return static_cast<size_t>(std::count_if(arguments.begin(), arguments.end(), is_out));
  }

  bool make_key(c10::ArrayRef<c10::IValue> arguments, Key& key, std::vector<at::Tensor>& tensors) const {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (i != group_name_ && !add_to_key(arguments[i], key, tensors)) return false;
    }
    for (size_t out = tensors.size() - num_outs_; out < tensors.size(); ++out) {  // which Python may refuse
      for (size_t i = 0; i < out; ++i) key.push_back(overlap(tensors[out], tensors[i]));
    }
    return true;
  }

  void run_python(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) const {
    call_python(op, stack,
                [&](const py::tuple& args, const py::dict& kwargs) { return kernel_.get()(*args, **kwargs); });
  }

  int64_t id_;
  size_t group_name_;
  size_t num_outs_;  // the last tensors, which it writes
  PythonObject kernel_;
  PythonObject record_;
};

// Goes on below autograd where there is nothing to differentiate. Elsewhere a call on CPU tensors becomes part of
// autograd's graph here, where that is all there is to do, and in Python's kernel if not.
class AutogradKernel final : public c10::OperatorKernel {
 public:
  AutogradKernel(const c10::OperatorHandle& op, py::object kernel, py::object formula)
      : kernel_(std::move(kernel)), training_(op, std::move(formula)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    bool needs_grad = false, has_tangent = false;
    for (size_t i = first; i < stack->size(); ++i) {
      needs_grad |= any_tensor((*stack)[i], [](const at::Tensor& t) { return t.requires_grad(); });
      has_tangent |= any_tensor((*stack)[i], [](const at::Tensor& t) { return t._fw_grad(0).defined(); });
    }
    needs_grad &= at::GradMode::is_enabled();
    if (!needs_grad && !has_tangent) {
      at::AutoDispatchBelowAutograd guard;
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
      return;
    }
    if (!has_tangent && training_.run(op, keys, *stack)) return;
    call_python(op, *stack, [&](const py::tuple& args, const py::dict& kwargs) {
      return kernel_.get()(*args, **kwargs);
    });
  }

 private:
  template <typename Predicate>
  static bool any_tensor(const c10::IValue& value, const Predicate& is_one) {
    if (value.isTensor()) return value.toTensor().defined() && is_one(value.toTensor());
    if (!value.isList()) return false;
    const auto list = value.toListRef();
    return std::any_of(list.begin(), list.end(), [&](const c10::IValue& each) { return any_tensor(each, is_one); });
  }

  PythonObject kernel_;
  TrainingCalls training_;
};

// The versions of the tensors that an op writes rise by one, however it writes them.
class WritingKernel final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, std::vector<c10::IValue>* stack) {
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    for (const c10::IValue& out : torch::jit::last(*stack, op.schema().returns().size())) {
      out.toTensor().unsafeGetTensorImpl()->bump_version();
    }
  }
};

// Registered as long as Python keeps it.
using Registration = c10::RegistrationHandleRAII;

template <typename Kernel>
std::unique_ptr<Registration> register_kernel(const c10::OperatorHandle& op, c10::DispatchKey key, std::unique_ptr<Kernel> kernel) {
  auto boxed = c10::KernelFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(std::move(kernel)));
  return std::make_unique<Registration>(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key, std::move(boxed), std::nullopt, nullptr, "fusedcomm"));
}

c10::OperatorHandle find_op(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

// The same memory under a storage of its own, which tells the arguments of a call apart.
at::Tensor alias(const at::Tensor& t) {
  c10::DataPtr data(t.data_ptr(), new at::Tensor(t), [](void* kept) { delete static_cast<at::Tensor*>(kept); }, t.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes_of(t), std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
  const auto key = t.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
  return made;
}

void add_call(PreparedCalls& calls, const std::vector<int64_t>& key, std::shared_ptr<Plan> plan,
              std::vector<Output> outputs, int64_t fingerprint, py::object record, py::object workspace,
              py::object rescue) {
  auto call = std::make_shared<PreparedCall>();
  call->plan = std::move(plan);
  call->outputs = std::move(outputs);
  call->generation = key.front();
  call->fingerprint = fingerprint;
  call->record = std::make_shared<PythonObject>(std::move(record));
  call->workspace = std::make_shared<PythonObject>(std::move(workspace));
  call->rescue = std::make_unique<PythonObject>(std::move(rescue));
  if (key[3] == matmul_precision()) calls.add(key, std::move(call));  // else another thread has changed it
}

Segments segments_of(int64_t rank, const std::vector<at::Tensor>& segments, const std::array<int64_t, 4>& offsets,
                     int64_t slot_bytes) {
  std::vector<c10::Storage> storages;
  for (const auto& each : segments) storages.push_back(each.storage());
  const auto [flags, broken, epoch_word, slots] = offsets;
  return {rank, static_cast<int64_t>(segments.size()), std::move(storages), flags, broken, epoch_word, slots,
          slot_bytes};
}

void begin_calls(PreparedCalls& calls, int64_t resets, const Segments& segments, uintptr_t epoch,
                 std::vector<at::Tensor> error_records) {
  const bool on_gpu = segments.storages.front().device_type() != c10::kCPU;
  const CallContext context{segments, reinterpret_cast<int64_t*>(epoch), std::move(error_records), on_gpu};
  calls.clear(std::make_shared<const CallContext>(context), resets);
}

py::list recorded_calls() {
  py::list found;
  for (const RecordedCall& call : call_ring().calls()) {
    const auto workspace = call.workspace.lock();
    const bool runs = call.ended == 0;
    found.append(py::make_tuple(call.record->get(), runs && workspace ? workspace->get() : py::none(), call.number,
                                call.resets, call.rounds_before, call.rounds_after, call.started,
                                runs ? py::object(py::none()) : py::float_(call.ended), call.error, call.peers));
  }
  return found;
}

}  // namespace

void bind_op_kernels(py::module_& m) {
  py::class_<Registration>(m, "Registration", "A kernel, registered as long as this lives.");

  py::class_<CallLock, std::shared_ptr<CallLock>>(m, "CallLock", "The lock of a group's calls, which may be nested.")
      .def(py::init<>())
      .def("__enter__", [](CallLock& lock) { lock.lock(); })
      .def("__exit__", [](CallLock& lock, const py::args&) { lock.unlock(); });

  m.attr("NUM_SLOTS") = kNumSlots;

  bind_plans(m);

  py::class_<Segments>(m, "Segments", "Where things lie in the segments of a group.")
      .def(py::init(&segments_of));

  py::class_<PreparedCalls, std::shared_ptr<PreparedCalls>>(m, "PreparedCalls", "A group's calls that have plans.")
      .def(py::init([](const std::string& group_name, c10::Device device, std::shared_ptr<CallLock> lock,
                       const py::buffer& counters) {
        auto calls = std::make_shared<PreparedCalls>(group_name, device, std::move(lock), counters);
        PreparedCalls::enlist(calls);
        return calls;
      }))
      .def("withdraw", &PreparedCalls::withdraw)
      .def("clear",
           [](PreparedCalls& calls, int64_t resets) { calls.clear(nullptr, resets); })
      .def("begin", &begin_calls)
      .def("add", &add_call)
      .def("refuse", [](PreparedCalls& calls, const std::vector<int64_t>& key) {
        calls.add(key, nullptr);
      })
      .def("__len__", &PreparedCalls::size);

  m.def("register_kernel", [](const std::string& op, const std::string& overload, bool on_gpu, py::object kernel,
                              py::object record) {
    static int64_t num_kernels = 0;
    const auto handle = find_op(op, overload);
    return register_kernel(handle, on_gpu ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU,
                           std::make_unique<OpKernel>(++num_kernels, handle, std::move(kernel), std::move(record)));
  });
  m.def("register_autograd_kernel", [](const std::string& op, py::object kernel, py::object formula) {
    const auto handle = find_op(op, "");
    return register_kernel(handle, c10::DispatchKey::Autograd,
                           std::make_unique<AutogradKernel>(handle, std::move(kernel), std::move(formula)));
  });
  m.def("register_writing_kernel", [](const std::string& op) {
    return register_kernel(find_op(op, "out"), c10::DispatchKey::ADInplaceOrView, std::make_unique<WritingKernel>());
  });
  m.def("set_warm_ups", [](int64_t number) { num_warm_ups = number; });
  m.def("set_forced_algorithm", [](int64_t number) { forced_algorithm = number; });
  m.def("alias", &alias);
  m.def("recorded_calls", &recorded_calls);
  m.def("forget_recorded_calls", [] { call_ring().clear(); });
}

}  // namespace fusedcomm
