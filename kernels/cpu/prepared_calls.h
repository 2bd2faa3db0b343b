// Calls of a group on a CPU that have been made before, each with its plan.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "call_lock.h"
#include "call_ring.h"
#include "key_table.h"
#include "plan.h"
#include "python_objects.h"
#include "rounds.h"

namespace fusedcomm {

constexpr uintptr_t kKernelAlignment = 16;  // bytes: Triton compiles a kernel for it

inline bool is_plain(const at::Tensor& t) {
  return (t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && !t.is_conj() && !t.is_neg() &&
         !t._is_zerotensor() && !t.is_quantized() && !t.key_set().has(c10::DispatchKey::Python) && t.has_storage();
}

// Adds an argument of an op to its key, and its tensors to `tensors`. False for what no plan takes. Each begins with its
// kind, so that none is read as another: None is no integer, and 1 is not True.
inline bool add_to_key(const c10::IValue& value, Key& key, std::vector<at::Tensor>& tensors) {
  enum Kind : int64_t { kTensor, kNone, kInt, kBool, kDouble, kString, kList };
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (!t.defined() || !is_plain(t)) return false;
    key.push_back(kTensor);
    key.push_back(static_cast<int64_t>(t.scalar_type()));
    key.push_back(t.dim());
    key.append(t.sizes().begin(), t.sizes().end());
    key.append(t.strides().begin(), t.strides().end());
    if (t.is_cuda()) key.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kKernelAlignment));
    tensors.push_back(t);
  } else if (value.isNone()) {
    key.push_back(kNone);
  } else if (value.isInt()) {
    key.push_back(kInt);
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(kBool);
    key.push_back(value.toBool());
  } else if (value.isDouble()) {
    key.push_back(kDouble);
    key.push_back(std::bit_cast<int64_t>(value.toDouble()));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    key.push_back(kString);
    key.push_back(static_cast<int64_t>(text.size()));
    key.append(text.begin(), text.end());
  } else if (value.isList()) {
    const auto list = value.toListRef();
    key.push_back(kList);
    key.push_back(static_cast<int64_t>(list.size()));
    for (const c10::IValue& each : list) {
      if (!add_to_key(each, key, tensors)) return false;
    }
  } else {
    return false;
  }
  return true;
}

// The device of a call: that of its first tensor.
inline c10::Device device_of(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& x = arguments.front().toTensor();
  return x.defined() ? x.device() : c10::Device(c10::kCPU);
}

// What an op returns of a plan's tensors: one, or a list. kEmpty: a tensor without elements.
using Output = std::variant<int64_t, std::vector<int64_t>>;
constexpr int64_t kEmpty = -1;

void* address_of_group(const std::string& name);  // symmetric_memory.cpp; throws where there is none

struct PreparedCall {
  std::shared_ptr<Plan> plan;
  std::vector<Output> outputs;
  int64_t generation;
  int64_t fingerprint;
  std::shared_ptr<PythonObject> record;
  std::shared_ptr<PythonObject> workspace;
  std::unique_ptr<PythonObject> rescue;  // fusedcomm.ops.prepared.Rescue: what is done if something goes wrong
};

// The workspace of a group's calls. Each call keeps the one that it has begun with: in the middle of it, a signal's
// handler in Python may close the group or reset it, and then the call goes on where its peers wait.
struct CallContext {
  Segments segments;
  int64_t* epoch;  // of the Workspace, which each PreparedCall keeps alive
  std::vector<at::Tensor> error_records;  // its own, and those of workspaces that CUDA graphs replay on
  bool on_gpu = false;  // where kernels look at the words of peers

  // Python raises the error that a workspace has, or finds.
  bool is_broken() const {
    const auto failed = [](const at::Tensor& record) { return *static_cast<const int64_t*>(record.const_data_ptr()) != 0; };
    if (std::any_of(error_records.begin(), error_records.end(), failed)) return true;
    const uintptr_t broken = segments.address(segments.rank) + static_cast<uintptr_t>(segments.broken);
    return !on_gpu && any_broken(broken, segments.group_size, *epoch + 1);
  }
};

// By the generation of the group's calls, op, forced algorithm, sizes, strides and dtypes of tensors, and other arguments.
class PreparedCalls {
 public:
  // `counters`: num_calls of the group's Member, which counts its other calls there.
  PreparedCalls(const std::string& group_name, c10::Device device, std::shared_ptr<CallLock> lock,
                const pybind11::buffer& counters)
      : group_(address_of_group(group_name)), device_(device), lock_(std::move(lock)), counters_(counters),
        num_calls_(static_cast<int64_t*>(counters.request().ptr)) {}

  // Changes whenever earlier plans stand for nothing any more, also for those that a thread has found or makes.
  int64_t generation() const { return generation_; }

  // Begins anew, on another workspace or none. With the lock.
  void clear(std::shared_ptr<const CallContext> context, int64_t resets);

  // The call, if it is prepared; else null, and whether such a call has been made before, so that it is worth it.
  std::pair<std::shared_ptr<PreparedCall>, bool> find(const Key& key);
  void add(c10::IntArrayRef key, std::shared_ptr<PreparedCall> call);

  // Runs the call and returns true, or false if its plan is old, or the workspace broken, and nothing was done.
  bool run(PreparedCall& call, const std::vector<at::Tensor>& tensors, std::vector<c10::IValue>& results);

  void* group() const { return group_; }
  c10::Device device() const { return device_; }
  size_t size() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return calls_.size();
  }

  static std::shared_ptr<PreparedCalls> of(const std::string& group_name, c10::Device device);
  static void enlist(const std::shared_ptr<PreparedCalls>& calls);
  // Nobody finds them any more. False if that was so before.
  bool withdraw();

 private:
  std::vector<c10::IValue> run_plan(PreparedCall& call, const CallContext& context,
                                    const std::vector<at::Tensor>& tensors) const;

  void* group_;  // by its address alone, which another one has after it: then these are withdrawn
  c10::Device device_;
  std::shared_ptr<CallLock> lock_;
  PythonObject counters_;
  int64_t* num_calls_;
  std::atomic<int64_t> generation_{0};
  std::shared_ptr<const CallContext> context_;  // null without a workspace; with the lock, as the next
  int64_t resets_ = 0;
  mutable std::mutex mutex_;  // for the table; nothing else is waited for with it
  KeyTable<PreparedCall> calls_;
};

}  // namespace fusedcomm
